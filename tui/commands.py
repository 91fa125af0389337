"""Slash commands: one table of what people may type, for every front end."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from localllm.errors import UsageError
from localllm.tui.slash import chats, messages, settings
from localllm.tui.slash.frontend import Frontend


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
    Command("regen", "[N]", "reply again; the earlier reply stays as a branch", messages.regenerate, ("retry",)),
    Command(
        "edit", "[N] [TEXT]", "change your last message, or number N: a new branch goes on from there", messages.edit
    ),
    Command("continue", "", "go on with a reply that was cut off", messages.continue_),
    Command(
        "branch", "[[N] next|prev|K]", "list branches, or go to the next, the one before or number K", messages.branch
    ),
    Command("show", "", "show the conversation, with numbers", messages.show, ("history",)),
    Command("remove", "N", "delete message N and all that follows it", messages.remove),
    Command("drop", "", "where the context is full: leave out the oldest turns", messages.drop),
    Command(
        "summarise", "", "where the context is full: put a summary in their place", messages.summarise, ("summarize",)
    ),
    Command("system", "[TEXT|none]", "show or set the system prompt", settings.system),
    Command("set", "[NAME [VALUE|default]]", "show or change how replies are generated", settings.set_),
    Command("prefix", "[TEXT|none]", "what replies begin with", settings.prefix),
    Command("stop-strings", "[TEXT … |none]", "what replies end before; in quotes for spaces", settings.stop_strings),
    Command("model", "[FILE]", "show the model, or load another one", settings.model),
    Command("stats", "", "tokens, cache and speed", settings.stats),
    Command("sessions", "[WORDS|archived]", "list chats, or search them", chats.sessions, ("list",)),
    Command("save", "[TITLE]", "tell where this chat is saved, and name it", chats.save),
    Command("load", "ID|FILE.json", "open a saved chat, or import one", chats.load, ("open",)),
    Command("import", "FILE.json", "open a chat that was exported", chats.import_),
    Command("export", "[FILE.md|FILE.json]", "write this chat into a file", chats.export),
    Command("rename", "TITLE", "give this chat a title", chats.rename),
    Command("archive", "[ID]", "take this chat, or another one, out of the list", chats.archive),
    Command("unarchive", "[ID]", "take it back into the list", chats.unarchive),
    Command("delete", "ID|this", "delete a chat for good", chats.delete),
    Command("clear", "", "begin a new chat; this one stays saved", chats.clear, ("new",)),
    Command("copy", "[code [N]]", "copy the last reply, or a block of its code", None),
    Command("theme", "[NAME]", "choose colours", None),
    Command("quit", "", "end", _quit, ("exit", "bye", "q")),
]

_BY_NAME = {name: command for command in COMMANDS for name in (command.name, *command.aliases)}
