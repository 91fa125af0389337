"""The field that searches the text of the visible chat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, Static


class Finder(Horizontal):
    """A field for the text to find, and the number of the current match.  It is hidden until `open`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,down", "move(1)", "Next", key_display="⏎"),
        Binding("up,shift+enter", "move(-1)", "Previous", key_display="↑"),
        Binding("escape", "close", "Close"),
    ]

    @dataclass
    class Changed(Message):
        """The text to find has changed; an empty one ends the search."""

        text: str

    @dataclass
    class Moved(Message):
        """Go to the next match, or to the previous one if ``step`` is -1."""

        step: int

    def __init__(self) -> None:
        super().__init__(id="finder")
        self._field = Input(placeholder="Find in this chat", compact=True)
        self._count = Static()
        self.display = False

    def compose(self) -> ComposeResult:
        yield self._field
        yield self._count

    @property
    def text(self) -> str:
        """The text to find; empty if the field is hidden."""
        return self._field.value if self.display else ""

    def open(self, text: str) -> None:
        """Show the field, with ``text`` in it or with the last text."""
        self.display = True
        self._field.focus()
        if text and text != self._field.value:
            self._field.value = text
        else:
            self.post_message(self.Changed(self.text))

    def count(self, number: int, n_matches: int) -> None:
        """Show that match ``number`` of ``n_matches`` is on the screen."""
        text = f"{number} of {n_matches}" if n_matches else "no match" if self.text else ""
        self._count.update(Content(text))

    def action_move(self, step: int) -> None:
        self.post_message(self.Moved(step))

    def action_close(self) -> None:
        self.display = False
        self.post_message(self.Changed(""))

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.post_message(self.Changed(self.text))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.action_move(1)

    def on_key(self, event: events.Key) -> None:
        if event.key == "shift+enter":  # which the field treats as Enter
            event.stop()
            self.action_move(-1)
