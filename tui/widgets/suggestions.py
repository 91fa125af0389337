"""The list of ways to go on with what is being typed."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from localllm.tui.completion import MOST, Completion
from localllm.tui.control import shown


class Suggestions(OptionList, can_focus=False):
    """The choices; the editor keeps the focus, and tells this which one is meant."""

    def __init__(self) -> None:
        super().__init__()
        self.choices: list[Completion] = []
        self._line = ""
        self.display = False

    def offer(self, choices: Sequence[Completion], line: str = "") -> None:
        """Shows choices for a line; none hides the list."""
        self._line = line
        if list(choices) == self.choices:
            return
        self.choices = list(choices)
        self.clear_options()
        self.add_options([Option(_line(choice)) for choice in self.choices])
        self.display = bool(self.choices)
        self.styles.height = min(len(self.choices), MOST)
        if self.choices:
            self.highlighted = 0

    def chosen(self, line: str) -> Completion | None:
        """The choice that is highlighted; None while the list is hidden, or was made for another line than this."""
        fits = self.display and line == self._line
        return self.choices[self.highlighted] if fits and self.highlighted is not None else None

    def move(self, by: int) -> None:
        """Highlights another one; after the last one comes the first."""
        if self.highlighted is not None:
            self.highlighted = (self.highlighted + by) % len(self.choices)


def _line(choice: Completion) -> Content:
    text = Content(shown(choice.text))
    return Content.assemble(text, "  ", (choice.help, "dim")) if choice.help else text
