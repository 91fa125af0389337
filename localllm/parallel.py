"""Application of a function to many items in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


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
