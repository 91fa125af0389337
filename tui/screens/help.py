"""Help: every key and every command."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Markdown

from localllm.tui.commands import COMMANDS
from localllm.tui.menu import MENU
from localllm.tui.screens.dialogs import Dialog

_KEYS = """\
## Typing

| | |
|---|---|
| Enter | sends; Ctrl+J (or Alt+Enter, Shift+Enter, or `\\` before Enter) begins a new line |
| ↑ ↓ | at the first and the last line: what was typed before |
| / @ | a command; a text file to attach. Tab takes what is offered |
| Esc | stops the reply at once; what was said is kept |
| Page ↑ ↓ | scrolls the conversation |
| Ctrl+P | finds every command |
| Ctrl+C, Ctrl+Q | quit; the chat is kept, also in mid-reply |

## On a message

Ctrl+↑ and Ctrl+↓, Shift+Tab, or a click select one. Then

| | |
|---|---|
| e | edits it: the chat goes on from there, and what followed stays as a branch |
| r | replies again |
| b | branches: the next message goes on from here |
| ← → | other branches, where there is ‹ 2/3 › |
| c | continues a reply that was cut off |
| y, k | copies it, or one of its blocks of code |
| t | unfolds its thinking, or a long text |
| d | deletes it and all that follows |
| Esc, Enter | back to the input |

## Commands

Without an argument they ask. `//` begins a message with a slash.

| | |
|---|---|
"""


class HelpScreen(Dialog[None]):
    """All there is."""

    def __init__(self) -> None:
        super().__init__("Help")
        self.add_class("large")

    def content(self) -> ComposeResult:
        with VerticalScroll():
            yield Markdown(help_text(), open_links=False)


def help_text() -> str:
    """Keys and commands, as Markdown."""
    keys = {entry.name: entry.shown_key for entry in MENU if entry.key}
    lines = []
    for command in COMMANDS:
        usage = f"/{command.name} {command.arguments}".rstrip().replace("|", "\\|")
        key = f" ({keys[command.name]})" if command.name in keys else ""
        lines.append(f"| `{usage}` | {command.help}{key} |")
    return _KEYS + "\n".join(lines)
