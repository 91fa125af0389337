"""Which process something was made in, and what stops before that process ends.

A forked child (``os.fork``, and `multiprocessing`'s "fork" method) has a copy of its parent's memory, but of its
threads only the one that forked: locks that the others held stay held, and what they worked on stays half done.

A thread that computes while Python takes itself down would crash the process; so would a daemon thread inside a C++
or Rust library, out of which Python would end it.  So engines stop first, each after the step under way, and then the
workers that they compute on, with calls of such libraries; until then all go on as ever.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from localllm.errors import ClosedError, DeviceError

#: Seconds that the end of the process waits for threads at most, which a caller's own function may hold up.
END_S = 10.0

#: Seconds between two looks whether they have stopped.
_LOOK_S = 0.002

#: Forks between the process that imported this and the one at hand.
_generation = 0


class Process:
    """The process that makes this object, told apart from its forked children.

    A number of our own, not the process's: in a container of its own a child may have the number of its parent.
    """

    def __init__(self) -> None:
        self._generation = _generation

    @property
    def is_current(self) -> bool:
        """Whether this is that process, not a child."""
        return self._generation == _generation

    def check(self) -> None:
        """Makes sure that this is that process."""
        if not self.is_current:
            raise DeviceError(
                "this model was loaded before the process was forked, and its threads are not in the child: load the "
                "model after the fork, or start the process with multiprocessing's 'spawn' method"
            )


class Stage:
    """Work of one kind, which the end of the process waits for."""

    def __init__(self) -> None:
        self.is_over = False  # whether no more of it may begin
        self.under_way: set[UnfinishedWork] = set()  # without a lock, which a forked child could find held

    def check(self, *, waits: bool = False) -> None:
        """Makes sure that work may begin, or that what was begun goes on.

        Args:
            waits: for something begun earlier.  An event loop in a daemon thread may: nothing comes, and its other
                tasks can go on until the process is gone.

        Raises:
            ClosedError: the process is ending.
            SystemExit: the same in a daemon thread without an event loop, which ends by it and prints nothing.
        """
        if not self.is_over:
            return
        if threading.current_thread().daemon:
            asyncio = sys.modules.get("asyncio")  # where nobody has imported it no loop runs
            if asyncio is None or asyncio._get_running_loop() is None:
                raise SystemExit
            if waits:
                return
        raise ClosedError("the process is ending, and its models have stopped: use them before that")

    def end(self, deadline: float) -> None:
        """Lets no more work begin; returns when none is under way, or at the deadline."""
        self.is_over = True
        for work in list(self.under_way):
            work.wake()
        while self.is_busy and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    @property
    def is_own(self) -> bool:
        """Whether this thread is at such work."""
        own = threading.current_thread()
        return any(work.thread is own for work in list(self.under_way))

    @property
    def is_busy(self) -> bool:
        """Whether another thread is at such work.

        What this thread has under way is none any more, nor is that of one that has ended: Ctrl-C came just as it
        began or ended.
        """
        own = threading.current_thread()
        return any(work.thread is not own and work.thread.is_alive() for work in list(self.under_way))


class UnfinishedWork:
    """``with UnfinishedWork(stage):`` is around work that the process waits for at its end; ``wake`` tells it so."""

    def __init__(self, stage: Stage, wake: Callable[[], object] = lambda: None) -> None:
        self.stage, self.wake, self.thread = stage, wake, threading.current_thread()

    def __enter__(self) -> None:
        self.stage.under_way.add(self)  # before it looks, so that either it sees the end, or the end sees it
        try:
            self.stage.check()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self.stage.under_way.discard(self)


#: In the order in which they end.
engines, workers = Stage(), Stage()


def patience() -> float | None:
    """Seconds for which a thread may be waited for: without a limit, until the process begins to end."""
    if engines.is_over:
        return 0.0  # it has been waited for
    return None if threading.main_thread().is_alive() else END_S


def end() -> None:
    """Stops all that computes, as the process ends: the one function that Python calls then (`localllm.__init__`)."""
    deadline = time.monotonic() + END_S
    for stage in (engines, workers):
        is_ended = False
        while not is_ended:
            try:
                stage.end(deadline)
                is_ended = True
            except (KeyboardInterrupt, SystemExit):  # of a signal: the process is ending already
                pass


def _after_fork() -> None:
    global _generation
    _generation += 1
    for stage in (engines, workers):
        stage.under_way.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
