"""What a model thinks before it answers: folded, with how long it took."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Collapsible, Static

from localllm.tui.control import shown


class Thinking(Collapsible):
    """A thinking section.  What it holds is drawn only while it is open."""

    def __init__(self, text: str, seconds: float | None) -> None:
        self._text = shown(text)
        self._body = Static(Content(self._text), classes="thought")
        super().__init__(self._body, title=_title(self._text, seconds, False), collapsed=True)

    def write(self, text: str, seconds: float) -> None:
        """Adds a piece, after so many seconds of thinking."""
        self._text += shown(text)
        self.title = _title(self._text, seconds, True)
        self._draw()

    def show(self, text: str, seconds: float | None) -> None:
        """Shows what was thought in the end; how long it took, if that is known."""
        self._text = shown(text)
        self.title = _title(self._text, seconds, False)
        self._draw()

    def _draw(self) -> None:
        if not self.collapsed:
            self._body.update(Content(self._text.strip()))

    def on_collapsible_expanded(self) -> None:
        self._draw()


def _title(text: str, seconds: float | None, is_thinking: bool) -> str:
    if is_thinking:
        return f"Thinking … {0.0 if seconds is None else seconds:.0f} s"
    if seconds is not None:
        return f"Thought for {seconds:.1f} s"
    n_words = len(text.split())
    return f"Thought in {n_words:,} word{'s' * (n_words != 1)}"
