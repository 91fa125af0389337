"""Work on many items at once, which the model evaluates in common batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_order(work: Callable[[_Item], _Result], items: Iterable[_Item], at_once: int) -> Iterator[_Result]:
    """What a function makes of each item, in order; it runs in ``at_once`` threads, not far ahead of the reader."""
    rest = iter(items)
    pool = ThreadPoolExecutor(at_once, "localllm-evaluate")
    try:
        under_way: deque[Future[_Result]] = deque(pool.submit(work, item) for item in islice(rest, 2 * at_once))
        while under_way:
            yield under_way.popleft().result()
            under_way.extend(pool.submit(work, item) for item in islice(rest, 1))
    finally:
        # Who closes the model ends what is still under way.
        pool.shutdown(wait=False, cancel_futures=True)
