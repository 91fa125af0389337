"""The commands of the chat: one list for what is typed after a slash, the command palette, keys and help."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from localllm.errors import UsageError


@dataclass(frozen=True, slots=True)
class Command:
    """A command.

    Attributes:
        name: what is typed after the slash.
        title: its name in the palette.
        help: what it does.
        argument: what can follow, as help shows it.
        key: that calls it, as Textual names it; empty if none does.
    """

    name: str
    title: str
    help: str
    argument: str = ""
    key: str = ""

    @property
    def shown_key(self) -> str:
        """The key as people read it."""
        return "+".join(part.capitalize() for part in self.key.split("+"))


COMMANDS = (
    Command("new", "New chat", "begins a new chat", key="ctrl+n"),
    Command("sessions", "Chats", "lists the chats: to open, search, rename, archive, delete", key="ctrl+o"),
    Command("model", "Model", "chooses the model that replies", "[NAME]", key="ctrl+l"),
    Command("system", "System prompt", "sets what the model is told first", "[TEXT]", key="ctrl+s"),
    Command("set", "Sampling", "sets how replies are generated", "[NAME VALUE]", key="ctrl+t"),
    Command("regen", "Regenerate", "replies again; the old reply stays as a branch", key="ctrl+r"),
    Command("edit", "Edit last message", "edits your last message and goes on from there", key="f2"),
    Command("branch", "Branch", "goes to another branch of the last message that has some", "[next|previous|N]"),
    Command("continue", "Continue", "goes on with a reply that was cut off", key="ctrl+g"),
    Command("copy", "Copy reply", "copies the last reply, or the Nth block of code in it", "[code [N]]"),
    Command("title", "Rename chat", "gives the chat a title", "[TEXT]"),
    Command("save", "Save", "gives the chat a title to find it by; it is kept in any case", "[TITLE]"),
    Command("load", "Load", "opens a chat by its id or words in it, or an exported file", "[WORDS|FILE.json]"),
    Command("export", "Export", "writes the chat into a file: Markdown, or JSON with all branches", "[FILE]"),
    Command("import", "Import", "opens a chat from an exported file", "[FILE.json]"),
    Command("stats", "Statistics", "shows tokens, times and memory"),
    Command("clear", "Clear", "begins anew, with the same system prompt and settings; the chat is kept"),
    Command("archive", "Archive", "takes the chat out of the list, and begins a new one"),
    Command("delete", "Delete chat", "deletes the chat for good"),
    Command("theme", "Theme", "chooses colours", "[NAME]"),
    Command("stop", "Stop", "ends the reply; what was said is kept", key="escape"),
    Command("help", "Help", "shows keys and commands", key="f1"),
    Command("quit", "Quit", "ends the program; the chat is kept", key="ctrl+q"),
)

_ALIASES = {"bye": "quit", "exit": "quit", "q": "quit", "?": "help", "h": "help", "regenerate": "regen", "m": "model"}

_BY_NAME = {command.name: command for command in COMMANDS}


def is_command(text: str) -> bool:
    """Whether a message is a command: one line that begins with a slash and a letter, as no path with two does."""
    first = text.split(maxsplit=1)[0] if text.split() else ""
    return first.startswith("/") and "\n" not in text.strip() and "/" not in first[1:] and first != "/"


def find(text: str) -> tuple[Command, str]:
    """The command of a line, and what follows it.

    Raises:
        UsageError: there is none of this name.
    """
    first, _, rest = text.strip().partition(" ")
    name = first.removeprefix("/").lower()
    command = _BY_NAME.get(_ALIASES.get(name, name))
    if command is None:
        near = difflib.get_close_matches(name, _BY_NAME, n=1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists them"
        raise UsageError(f"there is no command /{name:.40}: {hint}")
    return command, rest.strip()
