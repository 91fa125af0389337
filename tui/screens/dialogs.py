"""Small dialogs: a choice, a question, a line of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeVar

from textual import getters
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from localllm.tui.base import BaseApp
from localllm.tui.control import shown
from localllm.tui.widgets.keys import Keys

Result = TypeVar("Result")


class Dialog(ModalScreen[Result | None]):
    """A box above the conversation; Esc closes it without a result."""

    app = getters.app(BaseApp)

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", "Close")]

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = Content(shown(self._title))
            yield from self.content()
        yield Keys(show_command_palette=False, compact=True)

    def content(self) -> ComposeResult:
        """What is in the box."""
        raise NotImplementedError

    def action_close(self) -> None:
        self.dismiss(None)


class Choose(Dialog[str]):
    """One of several things; the result is its id."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "choose", "Choose")]

    def __init__(self, title: str, text: str, choices: Iterable[tuple[str, str]], at: int = 0) -> None:
        """``choices`` are ids and what is shown for them; the one at place ``at`` is highlighted first."""
        super().__init__(title)
        self._at = at
        self._text = text
        self._choices = list(choices)

    def content(self) -> ComposeResult:
        if self._text:
            yield Static(Content(shown(self._text)), classes="text")
        yield OptionList(*(Option(Content(shown(label)), id=id_) for id_, label in self._choices))

    def on_mount(self) -> None:
        self.query_one(OptionList).highlighted = self._at

    def action_choose(self) -> None:
        self.query_one(OptionList).action_select()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(event.option_id)


class Find(Dialog[str]):
    """One of a list that is searched: letters always go into the field above it, and the arrows move in the list."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move('cursor_up')", "Up", show=False),
        Binding("down", "move('cursor_down')", "Down", show=False),
        Binding("pageup", "move('page_up')", "Page up", show=False),
        Binding("pagedown", "move('page_down')", "Page down", show=False),
        Binding("ctrl+home", "move('first')", "First", show=False),
        Binding("ctrl+end", "move('last')", "Last", show=False),
    ]

    def action_move(self, where: str) -> None:
        self.app.ask(self._move(where))

    async def _move(self, where: str) -> None:
        await self.listed()
        getattr(self.query_one(OptionList), f"action_{where}")()

    async def listed(self) -> None:
        """Waits until the list is of what was typed."""
        raise NotImplementedError


class FoundList(OptionList, can_focus=False):
    """What was found; it is looked at from the field."""


def confirm(title: str, text: str, yes: str) -> Choose:
    """A question; the result is "yes" if it was answered so."""
    return Choose(title, text, [("no", "Cancel"), ("yes", yes)])


class Ask(Dialog[str]):
    """A line of text."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "done", "OK")]

    def __init__(self, title: str, text: str = "", value: str = "", placeholder: str = "") -> None:
        super().__init__(title)
        self._text = text
        self._value = value
        self._placeholder = placeholder

    def content(self) -> ComposeResult:
        if self._text:
            yield Static(Content(shown(self._text)), classes="text")
        yield Input(self._value, placeholder=self._placeholder)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.dismiss(event.value)

    def action_done(self) -> None:
        self.dismiss(self.query_one(Input).value)


class Tell(Dialog[None]):
    """A text to read."""

    def __init__(self, title: str, text: str) -> None:
        super().__init__(title)
        self._text = text

    def content(self) -> ComposeResult:
        yield Static(Content(shown(self._text)), classes="text")


def rows(cells: Sequence[Sequence[str]]) -> list[Content]:
    """Lines of cells, in columns of equal width."""
    columns = [[Content(shown(cell)) for cell in column] for column in zip(*cells, strict=True)]
    widths = [max(cell.cell_length for cell in column) for column in columns]
    return [
        Content("  ").join(cell.pad_right(width - cell.cell_length) for cell, width in zip(row, widths, strict=True))
        for row in zip(*columns, strict=True)
    ]
