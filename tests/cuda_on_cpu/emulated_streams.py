"""Streams, events and graphs of emulated devices: work runs in any order that its dependencies leave open.

A GPU runs most host code in the order that it was written in, and so forgives a wait that was forgotten, until it
does not.  Here the order is chosen against the program:

    lazy    work runs when the host waits for something that needs it, at the last moment, the newest first
    eager   work runs when it is given
    random  work runs at any time, in a random order of what is ready
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from typing import Literal

from localllm.errors import DeviceLostError, KernelError

StreamOrder = Literal["lazy", "eager", "random"]


class Work:
    """Something that a device does once all of ``after`` is done."""

    def __init__(
        self, number: int, device: int, name: str, action: Callable[[], None], after: Iterable[Work]
    ) -> None:
        self.number = number
        self.device = device
        self.name = name
        self.action = action
        self.is_done = False
        self.after: list[Work] = [work for work in after if not work.is_done or work.lost is not None]
        #: The device that was lost before this was done, if one was.
        self.lost: int | None = None


class Node:
    """Work that was captured: it is done at each replay."""

    def __init__(self, device: int, name: str, action: Callable[[], None], after: list[Node]) -> None:
        self.device, self.name, self.action, self.after = device, name, action, after


class Capture:
    """A capture at work: what it has so far, and the streams that take part."""

    def __init__(self, origin: EmulatedStream) -> None:
        self.origin = origin
        self.thread = threading.get_ident()
        self.nodes: list[Node] = []
        self.streams: list[EmulatedStream] = []
        self.has_ended = False
        #: Why it cannot become a graph.
        self.defect: str | None = None

    def join(self, stream: EmulatedStream, after: Iterable[Node]) -> None:
        if stream.capture is None:
            stream.capture = self
            stream.tail = []
            self.streams.append(stream)
        stream.tail = list(dict.fromkeys([*stream.tail, *after]))

    def refuse(self, why: str) -> KernelError:
        """The error for what cannot be captured; the capture fails with it."""
        self.defect = self.defect or why
        return KernelError(f"CUDA graph capture: {why}")

    def end(self, stream: EmulatedStream) -> EmulatedGraph:
        if stream is not self.origin:
            raise self.refuse("it was not begun in the stream in which it ends")
        if self.defect is None and (unjoined := set(self.nodes) - _ancestors(stream.tail)):
            names = ", ".join(sorted(node.name for node in unjoined))
            self.refuse(f"the stream that began it does not wait for {names}")
        self.has_ended = True
        for each in self.streams:
            each.capture, each.tail = None, []
        if self.defect is not None:
            raise KernelError(f"CUDA graph capture: {self.defect}")
        return EmulatedGraph(stream.device, self.nodes)


def _ancestors(nodes: Iterable[Node]) -> set[Node]:
    """The nodes and all that they come after."""
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
        after: what its next work comes after: its last, and what it waits for.
        capture: the capture that it takes part in, if it does.
        tail: captured work that its next captured work comes after.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.after: list[Work] = []
        self.capture: Capture | None = None
        self.tail: list[Node] = []


class EmulatedEvent:
    """A place in a stream: work or, of a capture, nodes.

    Attributes:
        seconds: when it came, on the devices' clock.
    """

    def __init__(self, device: int, *, timing: bool) -> None:
        self.device = device
        self.has_timing = timing
        self.work: Work | None = None
        self.captured: tuple[Capture, list[Node]] | None = None
        self.seconds: float | None = None


class EmulatedGraph:
    """Nodes, each after those that it comes after; and the end of the last replay, which the next one comes after."""

    def __init__(self, device: int, nodes: list[Node]) -> None:
        self.device, self.nodes = device, nodes
        self.last: Work | None = None


class Scheduler:
    """Runs the work of all streams, in an order of a kind.

    Attributes:
        seconds: the devices' clock: every piece of work takes a microsecond.
        lost: devices that failed.
    """

    def __init__(self, order: StreamOrder, seed: int) -> None:
        self.order: StreamOrder = order
        self.random = random.Random(seed)
        self.seconds = 0.0
        self.lost: set[int] = set()
        #: Devices that will fail, and after how much more work.
        self.failing: dict[int, int] = {}
        self._pending: dict[int, Work] = {}
        self._number = 0

    # -- Taking work -----------------------------------------------------------------------------------------------

    def put(self, stream: EmulatedStream, name: str, action: Callable[[], None]) -> Work | None:
        """Gives a stream work.  None where it is captured."""
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
        """Runs what the order has run by the time that new work is given."""
        if self.order == "eager":
            for work in list(self._pending.values()):
                self._run(work)
        elif self.order == "random":
            while self._pending and self.throws_heads():
                self._run_any()

    def throws_heads(self) -> bool:
        """A throw of a coin; never heads where the order is not random."""
        return self.order == "random" and self.random.random() < 0.5

    # -- Running it ------------------------------------------------------------------------------------------------

    def finish(self, work: Work) -> None:
        """Runs what there is until ``work`` is done.

        Raises:
            DeviceLostError: a device was lost over it.
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
        """Runs ``work`` and what it needs and nothing else; of two pieces that could be first, the newer one."""
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
        """Counts down to a failure."""
        if device in self.failing:
            if self.failing[device] == 0:
                self.lost.add(device)
            self.failing[device] -= 1


def _is_ready(work: Work) -> bool:
    return all(w.is_done for w in work.after)


def lost_error(device: int) -> DeviceLostError:
    return DeviceLostError(f"emulated CUDA device {device} is lost")
