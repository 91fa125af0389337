"""How long a model thinks; `localllm.chat.thinking` tells what it thinks from what it answers."""

from __future__ import annotations

import time
from collections.abc import Iterable

from localllm.chat.thinking import TAGS, Piece, ThinkingSplitter, opening_tag, split

__all__ = ["TAGS", "Piece", "ThinkingClock", "ThinkingSplitter", "opening_tag", "split"]


class ThinkingClock:
    """Tells how long a model thinks, from its first thought to its first word of an answer."""

    def __init__(self, before: float | None = None) -> None:
        """``before`` are the seconds of a reply that goes on; None if it has no thought yet."""
        self._before = before
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        """How long it has thought by now."""
        return (self._before or 0.0) + (0.0 if self._began is None else time.monotonic() - self._began)

    def see(self, pieces: Iterable[Piece]) -> None:
        """Takes note of pieces that have just come."""
        for piece in pieces:
            if not piece.thinking:
                self.stop()
            elif self._began is None:
                self._began = time.monotonic()

    def stop(self) -> float | None:
        """Ends a thought that is under way; returns the seconds of all; None if there was none."""
        if self._began is not None:
            self._before, self._began = self.seconds, None
        return self._before
