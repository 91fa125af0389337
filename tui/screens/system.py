"""The editor of the system prompt."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Static, TextArea

from localllm.tui.screens.dialogs import Dialog


class SystemScreen(Dialog[str]):
    """What the model is told before the conversation; the result is the new text."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+s", "save", "Save", priority=True)]

    def __init__(self, text: str) -> None:
        super().__init__("System prompt")
        self._text = text
        self.add_class("large")

    def content(self) -> ComposeResult:
        yield Static(
            Content("What the model is told before the conversation begins. Empty: nothing."), classes="text"
        )
        yield TextArea(self._text, compact=True, highlight_cursor_line=False)

    def on_mount(self) -> None:
        editor = self.query_one(TextArea)
        editor.move_cursor(editor.document.end)

    def action_save(self) -> None:
        self.dismiss(self.query_one(TextArea).text)
