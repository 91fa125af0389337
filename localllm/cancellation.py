"""Cancels long work in Python, such as rendering a chat, when its caller no longer needs the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_cancelled: ContextVar[Callable[[], bool] | None] = ContextVar("is_cancelled", default=None)


class CancelledError(BaseException):
    """The work was cancelled.  Not an `Exception`, so that handlers of failures do not catch it."""


@contextmanager
def cancellable(is_cancelled: Callable[[], bool]) -> Iterator[None]:
    """Enables `check_cancelled` in this block and thread: it raises when ``is_cancelled`` returns True."""
    token = _is_cancelled.set(is_cancelled)
    try:
        yield
    finally:
        _is_cancelled.reset(token)


def check_cancelled() -> None:
    """Raises `CancelledError` if the work was cancelled.  Long work calls this regularly."""
    is_cancelled = _is_cancelled.get()
    if is_cancelled is not None and is_cancelled():
        raise CancelledError
