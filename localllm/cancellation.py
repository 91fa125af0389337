"""Ends long work in Python, such as rendering a chat, when whoever asked for it has gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_cancelled: ContextVar[Callable[[], bool] | None] = ContextVar("is_cancelled", default=None)


class CancelledError(BaseException):
    """Nobody waits for this work any more: not an `Exception`, so that nothing takes it for a failure of the work."""


@contextmanager
def cancellable(is_cancelled: Callable[[], bool]) -> Iterator[None]:
    """Lets `check_cancelled` end the work in this block, which is done in one thread."""
    token = _is_cancelled.set(is_cancelled)
    try:
        yield
    finally:
        _is_cancelled.reset(token)


def check_cancelled() -> None:
    """Called now and then by what may take long."""
    is_cancelled = _is_cancelled.get()
    if is_cancelled is not None and is_cancelled():
        raise CancelledError
