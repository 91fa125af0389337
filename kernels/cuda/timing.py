"""The time that work takes on a device, by its own clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from localllm.kernels.cuda.driver import Driver, Stream


class Stopwatch:
    """Times what a stream is given, by events between one piece of work and the next.

    The device has the next piece before it is through with the last, so that no time of the host's counts, as long as
    a piece takes the device longer than it takes the host to give it: some ten microseconds.

    Args:
        repetitions: how often a piece of work is timed.
    """

    def __init__(self, driver: Driver, stream: Stream, repetitions: int = 7) -> None:
        self._driver, self._stream = driver, stream
        self._marks = [driver.event(stream.device, timing=True) for _ in range(repetitions + 1)]

    def seconds(self, work: Callable[[], None]) -> float:
        """The median of several times, after one more that warms up; ``work`` gives the stream something to do."""
        work()
        for i, mark in enumerate(self._marks):
            if i:
                work()
            self._driver.record(mark, self._stream)
        self._driver.synchronize(self._stream)
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return statistics.median(self._driver.elapsed_seconds(begin, end) for begin, end in pairs)
