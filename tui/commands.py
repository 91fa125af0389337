"""Slash commands: one table of what people may type, for every front end."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from localllm.errors import UsageError
from localllm.sampling import Sampling
from localllm.tui import options
from localllm.tui.conversation import Conversation, Message
from localllm.tui.events import Event
from localllm.tui.numbers import NO_BRANCHES, branch_meant, first_numbered, forks, numbered
from localllm.tui.session import ChatSession
from localllm.tui.store import SessionSummary, Store, shortened
from localllm.tui.transfer import import_chat, path_of, write_export


class Frontend(Protocol):
    """What commands need of the program that people sit at."""

    @property
    def session(self) -> ChatSession: ...
    def say(self, text: str) -> None:
        """Tells something, of one line or several."""

    def play(self, events: Iterator[Event]) -> None:
        """Shows events as they come."""

    def edit(self, message: Message) -> None:
        """Has a message changed, and goes on from there."""

    def open(self, conversation: Conversation) -> None:
        """Goes on with another conversation."""

    def use_model(self, path: str) -> None:
        """Loads another model for this conversation."""

    def quit(self) -> None:
        """Ends the program once the command is done."""


@dataclass(frozen=True, slots=True)
class Command:
    """What can be typed after a slash.

    Attributes:
        name: without the slash.
        arguments: what follows it, for people.
        help: what it does.
        run: does it, given what was typed after the name; None where only the app knows how.
        aliases: other names.
    """

    name: str
    arguments: str
    help: str
    run: Callable[[Frontend, str], None] | None
    aliases: tuple[str, ...] = ()


class Call(NamedTuple):
    """A command that was typed, and what stood after its name."""

    command: Command
    argument: str


def parse(text: str) -> Call | str:
    """What was typed: a command, or a message, of which ``//`` begins one with a slash.

    Raises:
        UsageError: there is no such command; names the one that was meant.
    """
    if not text.startswith("/") or text.startswith("//"):
        return text[1:] if text.startswith("//") else text
    name, *rest = text[1:].split(maxsplit=1) or [""]
    command = _BY_NAME.get(name)
    if command is None:
        near = difflib.get_close_matches(name, _BY_NAME, n=1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists them; // begins a message with a slash"
        raise UsageError(f"there is no command /{name}: {hint}")
    return Call(command, rest[0].rstrip() if rest else "")


def run(front: Frontend, call: Call) -> None:
    """Does what a command says.

    Raises:
        LocalLLMError: it cannot be done.
    """
    if call.command.run is None:
        raise UsageError(f"/{call.command.name} is for the app: start localllm chat without --plain")
    call.command.run(front, call.argument)


# -- Messages ------------------------------------------------------------------------------------------------------


def _edit(front: Frontend, argument: str) -> None:
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


def _regenerate(front: Frontend, argument: str) -> None:
    conversation = front.session.conversation
    message = numbered(conversation, argument) if argument else None
    front.play(front.session.regenerate(None if message is None else message.id))


def _continue(front: Frontend, argument: str) -> None:
    front.play(front.session.continue_reply())


def _drop(front: Frontend, argument: str) -> None:
    front.play(front.session.make_room("drop"))


def _summarise(front: Frontend, argument: str) -> None:
    front.play(front.session.make_room("summarise"))


def _branch(front: Frontend, argument: str) -> None:
    conversation = front.session.conversation
    if argument:
        front.session.switch(branch_meant(conversation, argument).id)
        _show(front, "")
        return
    lines = []
    for fork in forks(conversation):
        lines += [f"#{fork.number} {fork.branches[0].role}, {len(fork.branches)} branches"]
        lines += [
            f"  {'*' if i == fork.at else ' '} {i} {shortened(branch.content, 60)}"
            for i, branch in enumerate(fork.branches, 1)
        ]
    front.say("\n".join(lines) or NO_BRANCHES)


def _remove(front: Frontend, argument: str) -> None:
    if not argument:
        raise UsageError("name the message: /remove 3 deletes it and all that follows it")
    front.session.delete(numbered(front.session.conversation, argument).id)
    _show(front, "")


def _show(front: Frontend, argument: str) -> None:
    conversation = front.session.conversation
    parts = []
    for number, message in enumerate(conversation.path(), 1):
        at, n = conversation.branch_of(message.id)
        branch = f", branch {at} of {n}" if n > 1 else ""
        cut = ", cut off" if message.is_cut else ", edited" if message.state == "edited" else ""
        parts.append(f"#{number} {message.role}{branch}{cut}\n{message.content}")
    front.say("\n\n".join(parts) or "nothing was said yet")


# -- Settings ------------------------------------------------------------------------------------------------------


def _system(front: Frontend, argument: str) -> None:
    if argument:
        front.session.set_system("" if argument == "none" else argument)
    front.say(f"system prompt: {front.session.conversation.system or 'none'}")


def _set(front: Frontend, argument: str) -> None:
    settings = front.session.conversation.settings
    name, *rest = argument.split(maxsplit=1) or [""]
    if rest:
        settings = options.with_setting(settings, name, rest[0])
        front.session.set_options(settings)
    elif name:
        options.with_setting(settings, name, "default")  # complains where there is none
    defaults = vars(Sampling())
    wanted = [options.full_name(name)] if name else list(options.READERS)
    lines = []
    for each in wanted:
        value = settings.get(each, defaults.get(each, "default"))
        lines.append(f"{each:<20} {_value(value)}{'' if each in settings else '  (default)'}")
    front.say("\n".join(lines))


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else f"{value}"


def _prefix(front: Frontend, argument: str) -> None:
    if argument:
        _change(front, "reply_prefix", "default" if argument == "none" else argument)
    front.say(f"replies begin with: {front.session.conversation.settings.get('reply_prefix') or 'nothing given'}")


def _stop_strings(front: Frontend, argument: str) -> None:
    session = front.session
    if argument:
        try:
            texts = [] if argument == "none" else shlex.split(argument)
        except ValueError:
            raise UsageError(
                'a quotation mark is open: give texts in quotes, as in /stop-strings "###" "User:"'
            ) from None
        rest = {name: value for name, value in session.conversation.settings.items() if name != "stop"}
        session.set_options({**rest, "stop": texts} if texts else rest)
    stop = session.conversation.settings.get("stop") or []
    front.say("replies end before: " + (", ".join(map(repr, stop)) or "nothing given"))


def _change(front: Frontend, name: str, text: str) -> None:
    front.session.set_options(options.with_setting(front.session.conversation.settings, name, text))


def _model(front: Frontend, argument: str) -> None:
    if argument:
        front.use_model(argument)
    elif front.session.model is None:
        front.say("no model is loaded: /model FILE loads one")
    else:
        info = front.session.model.info
        front.say(f"{info.name or info.path.name}: {info.path}, {info.context:,} tokens of context")


def _stats(front: Frontend, argument: str) -> None:
    used, context = front.session.meter()
    lines = [f"context {used:,} / {context:,} tokens ({used / max(1, context):.0%})"]
    if (stats := front.session.last) is not None:
        lines.append(
            f"last prompt {stats.prompt_tokens:,} tokens: {stats.cached_tokens:,} cached, "
            f"{stats.prefilled_tokens:,} evaluated"
        )
        lines.append(
            f"last reply {stats.new_tokens:,} tokens: the first after {stats.first_token_s:.2f} s, "
            f"then {stats.rate:.1f} tok/s, by {stats.model}"
        )
    front.say("\n".join(lines))


# -- Chats ---------------------------------------------------------------------------------------------------------


def _save(front: Frontend, argument: str) -> None:
    session = front.session
    if not len(session.conversation):
        raise UsageError("there is nothing to save yet: chats are saved as they are written")
    if argument:
        session.set_title(argument)
    where = "in memory alone" if session.store.path is None else f"in {session.store.path}"
    front.say(f"{session.conversation.id}  {session.conversation.title}, saved {where}")


def _load(front: Frontend, argument: str) -> None:
    if not argument:
        raise UsageError("name a chat, or a file: /load ID, or /load FILE.json; /sessions lists chats")
    store = front.session.store
    if argument.lower().endswith(".json"):
        _import(front, argument)
        return
    front.open(store.load(store.find(argument)))
    _show(front, "")


def _import(front: Frontend, argument: str) -> None:
    if not argument:
        raise UsageError("name a file that was exported: /import FILE.json")
    conversation = import_chat(front.session.store, path_of(argument))
    front.open(conversation)
    front.say(f"imported: {conversation.title}")
    _show(front, "")


def _export(front: Frontend, argument: str) -> None:
    conversation = front.session.conversation
    path = path_of(argument or f"chat-{conversation.id}.md")
    write_export(conversation, path)
    front.say(f"written to {path}")


def _sessions(front: Frontend, argument: str) -> None:
    store = front.session.store
    if argument == "archived":
        found = store.sessions(archived=True)
    else:
        found = store.search(argument) if argument else store.sessions(limit=20)
    front.say("\n".join(map(_line, found)) or "no chats")


def _line(summary: SessionSummary) -> str:
    archived = " (archived)" if summary.archived else ""
    return f"{summary.id}  {summary.title or 'untitled'}{archived} · {summary.n_messages} · {summary.preview}"


def _rename(front: Frontend, argument: str) -> None:
    if not argument:
        raise UsageError("give a title: /rename TITLE")
    front.say(f"title: {front.session.set_title(argument)}")


def _chosen(store: Store, session: ChatSession, argument: str) -> str:
    return session.conversation.id if argument in ("", "this") else store.find(argument)


def _delete(front: Frontend, argument: str) -> None:
    if not argument:
        raise UsageError("name the chat: /delete ID, or /delete this; /remove 3 deletes messages")
    session = front.session
    id_ = _chosen(session.store, session, argument)
    session.store.delete(id_)
    front.say(f"deleted {id_}")
    if id_ == session.conversation.id:
        _clear(front, "")


def _archive(front: Frontend, argument: str) -> None:
    id_ = _chosen(front.session.store, front.session, argument)
    front.session.store.archive(id_)
    front.say(f"archived {id_}: /unarchive {id_} brings it back")


def _unarchive(front: Frontend, argument: str) -> None:
    id_ = _chosen(front.session.store, front.session, argument)
    front.session.store.archive(id_, False)
    front.say(f"{id_} is among the chats again")


def _clear(front: Frontend, argument: str) -> None:
    old = front.session.conversation
    front.open(Conversation(system=old.system, settings=dict(old.settings), model=old.model))
    front.say("a new chat")


def _quit(front: Frontend, argument: str) -> None:
    front.quit()


def _help(front: Frontend, argument: str) -> None:
    name = argument.removeprefix("/")
    if name and name not in _BY_NAME:
        parse(f"/{name}")  # complains
    wanted = [_BY_NAME[name]] if name else [command for command in COMMANDS if command.run is not None]
    usages = [f"/{command.name} {command.arguments}".rstrip() for command in wanted]
    width = max(map(len, usages))
    lines = [f"{usage:<{width}}  {command.help}" for usage, command in zip(usages, wanted, strict=True)]
    front.say("\n".join(lines))


COMMANDS = [
    Command("help", "[COMMAND]", "list the commands", _help, ("?",)),
    Command("regen", "[N]", "reply again; the earlier reply stays as a branch", _regenerate, ("retry",)),
    Command("edit", "[N] [TEXT]", "change your last message, or number N: a new branch goes on from there", _edit),
    Command("continue", "", "go on with a reply that was cut off", _continue),
    Command("branch", "[[N] next|prev|K]", "list branches, or go to the next, the one before or number K", _branch),
    Command("show", "", "show the conversation, with numbers", _show, ("history",)),
    Command("remove", "N", "delete message N and all that follows it", _remove),
    Command("drop", "", "where the context is full: leave out the oldest turns", _drop),
    Command("summarise", "", "where the context is full: put a summary in their place", _summarise, ("summarize",)),
    Command("system", "[TEXT|none]", "show or set the system prompt", _system),
    Command("set", "[NAME [VALUE|default]]", "show or change how replies are generated", _set),
    Command("prefix", "[TEXT|none]", "what replies begin with", _prefix),
    Command("stop-strings", "[TEXT … |none]", "what replies end before; in quotes for spaces", _stop_strings),
    Command("model", "[FILE]", "show the model, or load another one", _model),
    Command("stats", "", "tokens, cache and speed", _stats),
    Command("sessions", "[WORDS|archived]", "list chats, or search them", _sessions, ("list",)),
    Command("save", "[TITLE]", "tell where this chat is saved, and name it", _save),
    Command("load", "ID|FILE.json", "open a saved chat, or import one", _load, ("open",)),
    Command("import", "FILE.json", "open a chat that was exported", _import),
    Command("export", "[FILE.md|FILE.json]", "write this chat into a file", _export),
    Command("rename", "TITLE", "give this chat a title", _rename),
    Command("archive", "[ID]", "take this chat, or another one, out of the list", _archive),
    Command("unarchive", "[ID]", "take it back into the list", _unarchive),
    Command("delete", "ID|this", "delete a chat for good", _delete),
    Command("clear", "", "begin a new chat; this one stays saved", _clear, ("new",)),
    Command("copy", "[code [N]]", "copy the last reply, or a block of its code", None),
    Command("theme", "[NAME]", "choose colours", None),
    Command("quit", "", "end", _quit, ("exit", "bye", "q")),
]

_BY_NAME = {name: command for command in COMMANDS for name in (command.name, *command.aliases)}
