"""Help: every key and every command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from localllm.tui.base_app import BaseApp
from localllm.tui.commands import COMMANDS
from localllm.tui.screens.dialogs import Dialog

_TYPING = (
    ("Enter", "sends"),
    ("Ctrl+J", "starts a new line, as do Alt+Enter, Shift+Enter, and \\ before Enter"),
    ("↑ ↓", "in the first or last line: earlier messages"),
    ("/ @", "a command; a file or folder to attach. Tab completes"),
    ("Ctrl+V", "attaches an image from the clipboard, if the model accepts images"),
    ("!", "a shell command; its output goes into the editor"),
    ("Esc", "stops the reply; its text is kept"),
    ("Page ↑ ↓", "scrolls the conversation"),
    ("Ctrl+P", "searches the commands"),
    ("Ctrl+Page ↑ ↓", "switches between open chats"),
    ("Ctrl+C", "stops the reply; again, or without a reply, it quits"),
    ("Ctrl+Q", "quits, as does Ctrl+D in an empty editor; the chat is saved"),
)
_ON_A_MESSAGE = (
    ("Ctrl+↑ Ctrl+↓", "select one, as do Shift+Tab and a click. Then:"),
    ("e", "edits it: the chat continues from there; later messages stay as a branch"),
    ("r", "regenerates the reply"),
    ("b", "starts a new branch from this reply"),
    ("← →", "other branches, if it shows ‹ 2/3 ›"),
    ("c", "continues a reply that was cut off"),
    ("y, k", "copies it, or one of its code blocks (in tmux after: set -s set-clipboard on)"),
    ("t", "unfolds reasoning, results of tools, or a long text"),
    ("d", "deletes it and everything after it"),
    ("Esc, Enter", "back to the input"),
)
_COMMANDS_NOTE = "Commands ask for missing arguments. N is the number of a message. // starts a message with a slash."

#: Minimum number of columns to show keys and commands side by side.
_WIDE = 104


class HelpScreen(Dialog[None]):
    def __init__(self) -> None:
        super().__init__("Help")
        self.add_class("large").add_class("wide")

    def content(self) -> ComposeResult:
        with VerticalScroll():
            yield _Help()


class _Help(Static):
    """The help as one widget, because drawing many widgets is slow."""

    def on_resize(self, event: events.Resize) -> None:
        self.update(help_text(event.size.width, cast(BaseApp, self.app).setup.keys))


def help_text(width: int, changed: Mapping[str, str]) -> RenderableType:
    """Return keys and commands for ``width`` columns. ``changed`` contains the keys that the user changed."""
    keys = Group(_part("Typing", _TYPING), "", _part("On a message", _ON_A_MESSAGE))
    rows = [(command.usage, command.help_and_key(changed)) for command in COMMANDS]
    commands = _part("Commands", rows, _COMMANDS_NOTE)
    if width < _WIDE:
        return Group(keys, "", commands)
    halves = Table.grid(padding=(0, 3), expand=True)
    halves.add_column(ratio=1)
    halves.add_column(ratio=1)
    halves.add_row(keys, commands)
    return halves


def _part(title: str, rows: Iterable[tuple[str, str]], note: str = "") -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(max_width=24, style="bold")
    table.add_column()
    for key, text in rows:
        table.add_row(Text(key), Text(text))
    heading = Text.assemble((title, "bold underline"), f"\n{note}" if note else "")
    return Group(heading, table)
