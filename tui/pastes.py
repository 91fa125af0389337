"""Large texts that are pasted: a short mark stands for each until the message is sent.

An editor in a terminal is no place for a megabyte, nor is the screen that the question stands on.
"""

from __future__ import annotations

import re

#: Texts with more lines or characters than these are folded.
MOST_LINES = 40
MOST_CHARACTERS = 4000

_MARK = re.compile(r"\[pasted text #(\d+): [\d,]+ (?:lines|characters)\]")


class Pastes:
    """The texts that marks in one message stand for."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def fold(self, text: str) -> str:
        """What goes into the editor for a text: itself, or a mark if it is large."""
        n_lines = text.removesuffix("\n").count("\n") + 1
        if n_lines <= MOST_LINES and len(text) <= MOST_CHARACTERS:
            return text
        number = len(self._texts) + 1
        self._texts[number] = text
        size = f"{n_lines:,} lines" if n_lines > MOST_LINES else f"{len(text):,} characters"
        return f"[pasted text #{number}: {size}]"

    def unfold(self, text: str) -> str:
        """A message with the texts in the place of their marks."""
        return _MARK.sub(lambda match: self._texts.get(int(match[1]), match[0]), text)

    def clear(self) -> None:
        self._texts.clear()
