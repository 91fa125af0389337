"""Slash commands on chats as a whole: the open one, and those that are kept."""

from __future__ import annotations

from localllm.errors import UsageError
from localllm.tui.chat.conversation import Conversation
from localllm.tui.chat.export import import_chat, path_of, write_export
from localllm.tui.chat.session import ChatSession
from localllm.tui.slash.frontend import Frontend
from localllm.tui.slash.messages import show
from localllm.tui.storage.chats import ChatSummary


def save(front: Frontend, argument: str) -> None:
    session = front.session
    check_begun(session.conversation)
    if argument:
        session.set_title(argument)
    where = "in memory alone" if session.store.path is None else f"in {session.store.path}"
    front.say(f"{session.conversation.id}  {session.conversation.title}, saved {where}")


def check_begun(conversation: Conversation) -> None:
    """Complains where nothing was said: such a chat is not kept."""
    if not len(conversation):
        raise UsageError("there is nothing to save yet: chats are saved as they are written")


def load(front: Frontend, argument: str) -> None:
    if not argument:
        raise UsageError("name a chat, or a file: /load ID, or /load FILE.json; /sessions lists chats")
    store = front.session.store
    if argument.lower().endswith(".json"):
        import_(front, argument)
        return
    front.open(store.load(store.find(argument)))
    show(front, "")


def import_(front: Frontend, argument: str) -> None:
    if not argument:
        raise UsageError("name a file that was exported: /import FILE.json")
    conversation = import_chat(front.session.store, path_of(argument))
    front.open(conversation)
    front.say(f"imported: {conversation.title}")
    show(front, "")


def export(front: Frontend, argument: str) -> None:
    conversation = front.session.conversation
    path = path_of(argument or f"chat-{conversation.id}.md")
    write_export(conversation, path)
    front.say(f"written to {path}")


def sessions(front: Frontend, argument: str) -> None:
    store = front.session.store
    if argument == "archived":
        found = store.sessions(archived=True)
    else:
        found = store.search(argument) if argument else store.sessions(limit=20)
    front.say("\n".join(map(_line, found)) or "no chats")


def _line(summary: ChatSummary) -> str:
    archived = " (archived)" if summary.archived else ""
    return f"{summary.id}  {summary.title or 'untitled'}{archived} · {summary.n_messages} · {summary.preview}"


def rename(front: Frontend, argument: str) -> None:
    if not argument:
        raise UsageError("give a title: /rename TITLE")
    front.say(f"title: {front.session.set_title(argument)}")


def _chosen(session: ChatSession, argument: str) -> str:
    return session.conversation.id if argument in ("", "this") else session.store.find(argument)


def delete(front: Frontend, argument: str) -> None:
    if not argument:
        raise UsageError("name the chat: /delete ID, or /delete this; /remove 3 deletes messages")
    session = front.session
    id_ = _chosen(session, argument)
    session.store.delete(id_)
    front.say(f"deleted {id_}")
    if id_ == session.conversation.id:
        clear(front, "")


def archive(front: Frontend, argument: str) -> None:
    id_ = _chosen(front.session, argument)
    if id_ == front.session.conversation.id:
        check_begun(front.session.conversation)
    front.session.store.archive(id_)
    front.say(f"archived {id_}: /unarchive {id_} brings it back")


def unarchive(front: Frontend, argument: str) -> None:
    id_ = _chosen(front.session, argument)
    front.session.store.archive(id_, False)
    front.say(f"{id_} is among the chats again")


def clear(front: Frontend, argument: str) -> None:
    old = front.session.conversation
    front.open(Conversation(system=old.system, settings=dict(old.settings), model=old.model))
    front.say("a new chat")
