"""What a reply tells on its way from the thread that generates to the one that draws.

The thread puts in events as they come, hundreds a second; the screen takes what is there some times a second.  Texts
that wait are joined, and of the progress of a prompt only the newest is kept.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from localllm.tui.events import Delta, Event, Prefill, Summarising


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing more comes; ``error`` is what ended it, None if nothing went wrong."""

    error: BaseException | None


class Inbox:
    """Events that wait.  Any thread may put, and any may take."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Event | Ended] = []

    def put(self, event: Event | Ended) -> None:
        with self._lock:
            joined = _joined(self._waiting[-1], event) if self._waiting else None
            if joined is None:
                self._waiting.append(event)
            else:
                self._waiting[-1] = joined

    def take(self) -> list[Event | Ended]:
        """All that waits."""
        with self._lock:
            taken, self._waiting = self._waiting, []
        return taken


def _joined(last: Event | Ended, event: Event | Ended) -> Event | None:
    """One event that says as much as both; None if there is none."""
    if isinstance(last, Delta) and isinstance(event, Delta) and last.thinking == event.thinking:
        return Delta(last.text + event.text, event.thinking)
    if isinstance(last, Summarising) and isinstance(event, Summarising):
        return Summarising(last.text + event.text)
    if isinstance(last, Prefill) and isinstance(event, Prefill):
        return event
    return None
