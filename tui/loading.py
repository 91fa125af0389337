"""A model that is being loaded, by a thread of its own."""

from __future__ import annotations

import threading
from typing import NamedTuple

from localllm.tui.setup import Loader, OpenModel


class Cancelled(Exception):
    """Loading was ended by whoever began it."""


class Progress(NamedTuple):
    """How far it is, in words, and from 0 to 1; None where no total is known."""

    text: str
    share: float | None


class Loading:
    """Loads one model.

    Attributes:
        name: of the model, as `Loader` takes it.
        progress: how far it is; any thread may read it.
    """

    def __init__(self, loader: Loader, name: str) -> None:
        self.name = name
        self.progress = Progress("loading the model", None)
        self._loader = loader
        self._cancelled = threading.Event()
        self._compiled = 0

    def run(self) -> OpenModel:
        """Loads it, on the thread that calls.

        Raises:
            Cancelled: `cancel` was called.
            LocalLLMError: it cannot be loaded.
        """
        if not self._cancelled.is_set():
            model = self._loader(self.name, self._report)
            if not self._cancelled.is_set():
                return model
            model.close()
        raise Cancelled

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ends it soon, at its next sign of life; any thread may call it."""
        self._cancelled.set()

    def _report(self, stage: str, done: int, total: int) -> None:
        if self._cancelled.is_set():
            raise Cancelled
        if stage == "weights":
            self.progress = Progress("loading weights", done / total if total else None)
        elif done < total:
            self.progress = Progress(f"compiling kernel {self._compiled + done + 1}, once on this machine", None)
        else:
            self._compiled += total
