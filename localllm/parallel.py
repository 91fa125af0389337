"""A function applied to many items in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_order(work: Callable[[_Item], _Result], items: Iterable[_Item], threads: int) -> Iterator[_Result]:
    """Results of ``work`` in the order of the items; at most ``2 * threads`` items are ahead of the reader.

    Once the process ends, pools take no more work: the caller's thread does the rest, until models refuse it too.
    """
    rest = iter(items)
    pool = ThreadPoolExecutor(threads, "localllm-parallel")

    def submitted(item: _Item) -> Future[_Result]:
        try:
            return pool.submit(work, item)
        except RuntimeError:
            future: Future[_Result] = Future()
            future.set_result(work(item))
            return future

    try:
        pending = deque(map(submitted, islice(rest, 2 * threads)))
        while pending:
            yield pending.popleft().result()
            pending.extend(map(submitted, islice(rest, 1)))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
