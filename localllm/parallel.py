"""Calls of functions in threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from localllm.errors import LocalLLMError, UsageError

#: Interval in seconds between checks whether a call was stopped.
_PERIOD = 0.05

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_thread(work: Callable[[], _Result], name: str | None = None, *, is_daemon: bool = True) -> Future[_Result]:
    """Run ``work`` in a new thread.  At its end, the program does not wait for a daemon thread."""
    future: Future[_Result] = Future()
    future.set_running_or_notify_cancel()  # it can no longer be cancelled

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # the caller handles it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=is_daemon).start()
    return future


def wait_for(future: Future[_Result], seconds: float, is_stopped: Callable[[], bool]) -> _Result:
    """Return the result of another thread. Raises UsageError if it fails, was stopped or takes too long."""
    for _ in range(int(seconds / _PERIOD)):
        try:
            return future.result(_PERIOD)
        except CancelledError:
            raise UsageError("the server has ended") from None
        except TimeoutError:
            if future.done():  # TimeoutError of the function itself
                raise UsageError("it takes too long") from None
            if is_stopped():
                future.cancel()
                raise UsageError("stopped") from None
        except LocalLLMError:
            raise
        except Exception as error:  # the function may raise any exception
            raise UsageError(reason_of(error)) from None
    future.cancel()
    raise UsageError("it takes too long")


def reason_of(error: BaseException) -> str:
    """Return the message of an error, or of the first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def in_order(work: Callable[[_Item], _Result], items: Iterable[_Item], threads: int) -> Iterator[_Result]:
    """Yield the results of ``work`` in the order of the items.  At most ``2 * threads`` items are read ahead.

    At the end of the process, thread pools accept no more work.  The caller's thread then runs ``work`` itself.
    """
    remaining = iter(items)
    pool = ThreadPoolExecutor(threads, "localllm-parallel")

    def submitted(item: _Item) -> Future[_Result]:
        try:
            return pool.submit(work, item)
        except RuntimeError:
            future: Future[_Result] = Future()
            future.set_result(work(item))
            return future

    try:
        pending = deque(map(submitted, islice(remaining, 2 * threads)))
        while pending:
            yield pending.popleft().result()
            pending.extend(map(submitted, islice(remaining, 1)))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
