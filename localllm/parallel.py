"""Calls of functions in threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

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
