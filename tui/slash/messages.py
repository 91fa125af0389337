"""Slash commands on messages and branches."""

from __future__ import annotations

from localllm.errors import UsageError
from localllm.tui.chat.conversation import Conversation, Message
from localllm.tui.numbers import NO_BRANCHES, branch_meant, first_numbered, forks, numbered
from localllm.tui.slash.frontend import Frontend
from localllm.tui.text import shortened


def edit(front: Frontend, argument: str) -> None:
    conversation = front.session.conversation
    message, text = first_numbered(conversation, argument)
    if message is None:
        message = next((m for m in reversed(conversation.path()) if m.role == "user"), None)
    if message is None:
        raise UsageError("there is nothing to edit yet: send a message first")
    if text:
        front.play(front.session.edit(message.id, text))
    else:
        front.edit(message)


def regenerate(front: Frontend, argument: str) -> None:
    conversation = front.session.conversation
    message = numbered(conversation, argument) if argument else None
    front.play(front.session.regenerate(None if message is None else message.id))


def continue_(front: Frontend, argument: str) -> None:
    front.play(front.session.continue_reply())


def drop(front: Frontend, argument: str) -> None:
    front.play(front.session.make_room("drop"))


def summarise(front: Frontend, argument: str) -> None:
    front.play(front.session.make_room("summarise"))


def branch(front: Frontend, argument: str) -> None:
    conversation = front.session.conversation
    if argument:
        front.session.switch(branch_meant(conversation, argument).id)
        show(front, "")
        return
    lines = []
    for fork in forks(conversation):
        lines += [f"#{fork.number} {fork.branches[0].role}, {len(fork.branches)} branches"]
        lines += [
            f"  {'*' if i == fork.at else ' '} {i} {shortened(branch.content, 60)}"
            for i, branch in enumerate(fork.branches, 1)
        ]
    front.say("\n".join(lines) or NO_BRANCHES)


def remove(front: Frontend, argument: str) -> None:
    front.session.delete(to_remove(front.session.conversation, argument).id)
    show(front, "")


def to_remove(conversation: Conversation, argument: str) -> Message:
    """The message that ``/remove`` means."""
    if not argument:
        raise UsageError("name the message: /remove 3 deletes it and all that follows it")
    return numbered(conversation, argument)


def show(front: Frontend, argument: str) -> None:
    conversation = front.session.conversation
    parts = []
    for number, message in enumerate(conversation.path(), 1):
        at, n = conversation.branch_of(message.id)
        branch = f", branch {at} of {n}" if n > 1 else ""
        cut = ", cut off" if message.is_cut else ", edited" if message.state == "edited" else ""
        parts.append(f"#{number} {message.role}{branch}{cut}\n{message.content}")
    front.say("\n\n".join(parts) or "nothing was said yet")
