"""The commands as the app has them: those of `localllm.tui.commands`, with titles for its palette, and keys."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.tui.commands import COMMANDS


@dataclass(frozen=True, slots=True)
class Entry:
    """A command in the palette.

    Attributes:
        name: what is typed after the slash.
        title: its name for people.
        key: that calls it, as Textual names it; empty if none does.
    """

    name: str
    title: str
    key: str = ""

    @property
    def shown_key(self) -> str:
        """The key as people read it."""
        return "+".join(part.capitalize() for part in self.key.split("+"))

    @property
    def help(self) -> str:
        """What it does."""
        return _COMMANDS[self.name].help

    @property
    def arguments(self) -> str:
        """What can follow it."""
        return _COMMANDS[self.name].arguments


_COMMANDS = {command.name: command for command in COMMANDS}

#: All commands that say something without arguments, those that people need first.
MENU = (
    Entry("clear", "New chat", "ctrl+n"),
    Entry("sessions", "Chats", "ctrl+o"),
    Entry("model", "Model", "ctrl+l"),
    Entry("system", "System prompt", "ctrl+s"),
    Entry("set", "Sampling", "ctrl+t"),
    Entry("regen", "Regenerate", "ctrl+r"),
    Entry("continue", "Continue the reply", "ctrl+g"),
    Entry("edit", "Edit your last message", "f2"),
    Entry("branch", "Branches"),
    Entry("copy", "Copy the last reply"),
    Entry("rename", "Rename the chat"),
    Entry("export", "Export the chat"),
    Entry("import", "Import a chat"),
    Entry("load", "Open a chat"),
    Entry("archive", "Archive the chat"),
    Entry("delete", "Delete the chat"),
    Entry("stats", "Statistics"),
    Entry("theme", "Theme"),
    Entry("help", "Help: keys and commands", "f1"),
    Entry("quit", "Quit", "ctrl+q"),
)

#: Names and helps of all commands, for completion.
NAMES = [(command.name, command.help) for command in COMMANDS]
