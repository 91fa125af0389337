"""Streams, events and graphs of emulated devices.  Work runs in any order that its dependencies permit.

A GPU mostly runs work in the order of the host code, so a missing wait can stay unnoticed.  These orders expose it:

    lazy    work runs at the last moment, when the host waits for something that needs it, the newest work first
    eager   work runs at once
    random  work runs at random times, in a random order of the work that is ready
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from typing import Literal

from localllm.errors import DeviceLostError, KernelError

StreamOrder = Literal["lazy", "eager", "random"]


class Work:
    """Work of a device that runs after all of ``after``."""

    def __init__(
        self, number: int, device: int, name: str, action: Callable[[], None], after: Iterable[Work]
    ) -> None:
        self.number = number
        self.device = device
        self.name = name
        self.action = action
        self.is_done = False
        self.after: list[Work] = [work for work in after if not work.is_done or work.lost is not None]
        #: The device that was lost before this work ran, or None.
        self.lost: int | None = None


class Node:
    """Captured work, which runs at each replay."""

    def __init__(self, device: int, name: str, action: Callable[[], None], after: list[Node]) -> None:
        self.device, self.name, self.action, self.after = device, name, action, after


class Capture:
    """A capture in progress: its nodes and its streams."""

    def __init__(self, origin: EmulatedStream) -> None:
        self.origin = origin
        self.thread = threading.get_ident()
        self.nodes: list[Node] = []
        self.streams: list[EmulatedStream] = []
        self.has_ended = False
        #: Why the capture cannot become a graph.
        self.defect: str | None = None

    def join(self, stream: EmulatedStream, after: Iterable[Node]) -> None:
        if stream.capture is None:
            stream.capture = self
            stream.tail = []
            self.streams.append(stream)
        stream.tail = list(dict.fromkeys([*stream.tail, *after]))

    def refuse(self, why: str) -> KernelError:
        """Return the error of a call that cannot be captured, and make the capture fail."""
        self.defect = self.defect or why
        return KernelError(f"CUDA graph capture: {why}")

    def end(self, stream: EmulatedStream) -> EmulatedGraph:
        if stream is not self.origin:
            raise self.refuse("it started in another stream")
        if self.defect is None and (unjoined := set(self.nodes) - _ancestors(stream.tail)):
            names = ", ".join(sorted(node.name for node in unjoined))
            self.refuse(f"the stream that started it does not wait for {names}")
        self.has_ended = True
        for each in self.streams:
            each.capture, each.tail = None, []
        if self.defect is not None:
            raise KernelError(f"CUDA graph capture: {self.defect}")
        return EmulatedGraph(stream.device, self.nodes)


def _ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes and all nodes before them."""
    found: set[Node] = set()
    rest = list(nodes)
    while rest:
        node = rest.pop()
        if node not in found:
            found.add(node)
            rest += node.after
    return found


class EmulatedStream:
    """A queue of work.

    Attributes:
        after: work that the next work depends on: the last work of the stream, and the work that it waits for.
        capture: the capture that contains the stream, or None.
        tail: captured work that the next captured work depends on.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.after: list[Work] = []
        self.capture: Capture | None = None
        self.tail: list[Node] = []


class EmulatedEvent:
    """A position in a stream: work, or nodes of a capture.

    Attributes:
        seconds: time of the event on the clock of the devices.
    """

    def __init__(self, device: int, *, timing: bool) -> None:
        self.device = device
        self.has_timing = timing
        self.work: Work | None = None
        self.captured: tuple[Capture, list[Node]] | None = None
        self.seconds: float | None = None


class EmulatedGraph:
    """Nodes with their dependencies, and the end of the last replay, on which the next replay depends."""

    def __init__(self, device: int, nodes: list[Node]) -> None:
        self.device, self.nodes = device, nodes
        self.last: Work | None = None


class Scheduler:
    """Runs the work of all streams in one of the orders.

    Attributes:
        seconds: the clock of the devices; each piece of work takes a microsecond.
        lost: failed devices.
    """

    def __init__(self, order: StreamOrder, seed: int) -> None:
        self.order: StreamOrder = order
        self.random = random.Random(seed)
        self.seconds = 0.0
        self.lost: set[int] = set()
        #: Devices that will fail, with the number of pieces of work until then.
        self.failing: dict[int, int] = {}
        self._pending: dict[int, Work] = {}
        self._number = 0

    # -- Taking work -----------------------------------------------------------------------------------------------

    def put(self, stream: EmulatedStream, name: str, action: Callable[[], None]) -> Work | None:
        """Add work to a stream; return None if the stream captures it."""
        if stream.capture is not None:
            node = Node(stream.device, name, action, stream.tail)
            stream.capture.nodes.append(node)
            stream.tail = [node]
            return None
        work = self._add(stream.device, name, action, stream.after)
        stream.after = [work]
        self._some()
        return work

    def replay(self, graph: EmulatedGraph, stream: EmulatedStream) -> None:
        if stream.capture is not None:
            raise stream.capture.refuse("a graph is replayed in it")
        before = [*stream.after, *([graph.last] if graph.last else [])]
        works: dict[Node, Work] = {}
        for node in graph.nodes:
            after = [works[n] for n in node.after] or before
            works[node] = self._add(node.device, node.name, node.action, after)
        graph.last = self._add(stream.device, "the end of a graph", lambda: None, [*before, *works.values()])
        stream.after = [graph.last]
        self._some()

    def _add(self, device: int, name: str, action: Callable[[], None], after: Iterable[Work]) -> Work:
        self._number += 1
        work = Work(self._number, device, name, action, after)
        self._pending[work.number] = work
        return work

    def _some(self) -> None:
        """Run the work that the order starts before new work is added."""
        if self.order == "eager":
            for work in list(self._pending.values()):
                self._run(work)
        elif self.order == "random":
            while self._pending and self.throws_heads():
                self._run_any()

    def throws_heads(self) -> bool:
        """Return a random boolean; always False if the order is not random."""
        return self.order == "random" and self.random.random() < 0.5

    # -- Running it ------------------------------------------------------------------------------------------------

    def finish(self, work: Work) -> None:
        """Run work until ``work`` is done.

        Raises:
            DeviceLostError: a device was lost.
        """
        if self.order == "random":
            while not work.is_done:
                self._run_any()
        else:
            self._run_needed(work)
        if work.lost is not None:
            raise lost_error(work.lost)

    def _run_any(self) -> None:
        self._run(self.random.choice([w for w in self._pending.values() if _is_ready(w)]))

    def _run_needed(self, work: Work) -> None:
        """Run ``work`` and its dependencies only; of two pieces of work that are ready, the newer one first."""
        stack = [work]
        while stack:
            if needed := [w for w in stack[-1].after if not w.is_done]:
                stack.append(max(needed, key=lambda w: w.number))
            elif stack[-1].is_done:
                stack.pop()
            else:
                self._run(stack.pop())

    def _run(self, work: Work) -> None:
        del self._pending[work.number]
        work.is_done = True
        self._age(work.device)
        if work.device in self.lost:
            work.lost = work.device
        else:
            work.lost = next((w.lost for w in work.after if w.lost is not None), None)
        work.after = []
        if work.lost is None:
            self.seconds += 1e-6
            work.action()

    def _age(self, device: int) -> None:
        """Count down to a failure."""
        if device in self.failing:
            if self.failing[device] == 0:
                self.lost.add(device)
            self.failing[device] -= 1


def _is_ready(work: Work) -> bool:
    return all(w.is_done for w in work.after)


def lost_error(device: int) -> DeviceLostError:
    return DeviceLostError(f"emulated CUDA device {device} is lost")
