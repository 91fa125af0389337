"""Profiling of forward passes on CUDA devices.

Steps that run during ``with watching(…)`` are observed.  `BusyTime` times each step as a whole; `Profiler` times its
kinds of calls.

**How a call is timed.**  The kernels for a token take a few microseconds each, less than the host needs to launch
one, or a device to record the time between two.  Therefore, all calls of a forward pass that differ only in the
layer, such as the products with gate and up, are captured in a separate graph, and replays of the graph are timed as
a whole.  As in the forward pass, each call reads different weights, which are not in any cache.  The replays compute
meaningless results, because their inputs are outdated, and the batch is run once more afterwards to get correct
results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from localllm.kernels.backend import Batch
from localllm.kernels.cuda.calls import BatchSizes, Cost, Extent, KernelCall
from localllm.kernels.cuda.driver import Event
from localllm.kernels.cuda.roofline import Stopwatch
from localllm.kernels.cuda.step import WATCHES, CUDAStep, Watch

#: Minimum launches in a graph, so that launching it takes the host less time than running it takes the device.
MIN_LAUNCHES = 32


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Observe the steps that run in this process, in any thread, inside this context."""
    WATCHES.append(watch)
    try:
        yield
    finally:
        WATCHES.remove(watch)


class BusyTime:
    """Measures how long devices worked on forward passes, from the first kernel of each pass to its last."""

    def __init__(self) -> None:
        self._marks: list[tuple[CUDAStep, Event, Event]] = []

    def run(self, step: CUDAStep, batch: Batch, extent: Extent) -> None:
        driver, stream = step.driver, step.stream
        begin, end = (driver.event(stream.device, timing=True) for _ in range(2))
        driver.record(begin, stream)
        step.launch(extent)
        driver.record(end, stream)
        self._marks.append((step, begin, end))

    def seconds(self) -> dict[int, float]:
        """Return the seconds of each device, after all work is finished."""
        total: dict[int, float] = {}
        for step, begin, end in self._marks:
            step.driver.synchronize(end)
            total[end.device] = total.get(end.device, 0.0) + step.driver.elapsed_seconds(begin, end)
        return total


@dataclass
class Share:
    """A kind of call: number of calls, their launches, seconds and kernels."""

    name: str
    cost: Cost  # minimum cost of the calls
    n: int = 0
    n_launches: int = 0
    seconds: float = 0.0
    kernels: set[str] = field(default_factory=set)


@dataclass
class Profile:
    """Profile of the forward passes of one device."""

    n_steps: int = 0  # batches that ran
    seconds: float = 0.0  # duration of their whole graphs
    shares: dict[str, Share] = field(default_factory=dict)  # by name, in the order of the first pass

    @property
    def kernel_seconds(self) -> float:
        return sum(share.seconds for share in self.shares.values())


class Profiler:
    """Times the calls of forward passes, in graphs of at least ``least_launches``, or `MIN_LAUNCHES`, launches."""

    def __init__(self, repetitions: int = 5, least_launches: int = 0) -> None:
        self.profiles: dict[int, Profile] = {}  # by device
        self._repetitions, self._least_launches = repetitions, least_launches or MIN_LAUNCHES

    def run(self, step: CUDAStep, batch: Batch, extent: Extent) -> None:
        profile = self.profiles.setdefault(step.stream.device, Profile())
        sizes, n = BatchSizes.of(batch, step.limits.mixture), self._repetitions
        by_name: dict[str, list[KernelCall]] = {}
        for call in step.calls:
            by_name.setdefault(call.name, []).append(call)
        with hidden_states_kept(step):
            step.launch(extent)  # compiles missing kernels
            profile.n_steps += 1
            profile.seconds += call_seconds(step, step.calls, extent, repetitions=n, least_launches=1)
            for name, calls in by_name.items():
                if n_launches := _n_launches(calls, extent):
                    share, least = profile.shares.setdefault(name, Share(name, Cost())), self._least_launches
                    share.seconds += call_seconds(step, calls, extent, repetitions=n, least_launches=least)
                    share.n, share.n_launches = share.n + len(calls), share.n_launches + n_launches
                    share.cost += total_cost(calls, sizes)
                    share.kernels |= {launch.kernel for call in calls for launch in call.launches(extent)}
        step.launch(extent)


def total_cost(calls: Sequence[KernelCall], sizes: BatchSizes) -> Cost:
    return sum((call.cost(sizes) for call in calls), Cost())


def _n_launches(calls: Sequence[KernelCall], extent: Extent) -> int:
    return sum(1 for call in calls for _ in call.launches(extent))


def call_seconds(
    step: CUDAStep, calls: Sequence[KernelCall], extent: Extent, *, repetitions: int, least_launches: int
) -> float:
    """Return the seconds that calls of a step take in order, without other calls; overwrites their buffers."""
    times = -(-least_launches // _n_launches(calls, extent))
    graph = step.graph(list(calls) * times, extent)
    driver, stream = step.driver, step.stream
    return Stopwatch(driver, stream, repetitions).seconds(lambda: driver.replay(graph, stream)) / times


@contextmanager
def hidden_states_kept(step: CUDAStep) -> Iterator[None]:
    """Restore the hidden states that a part of a model starts with afterwards, because their memory is reused."""
    driver, stream = step.driver, step.stream
    rows = [step.rows(stored, step.limits.max_tokens) for _, stored in step.hidden]
    copies = [driver.allocate(memory.device, memory.n_bytes) for memory in rows]
    for memory, copy in zip(rows, copies, strict=True):
        driver.copy(copy, memory, stream)
    yield
    for memory, copy in zip(rows, copies, strict=True):
        driver.copy(memory, copy, stream)
    driver.synchronize(stream)  # the copies must not be freed before
