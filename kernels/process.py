"""Detection of forked processes, and orderly shutdown of computing threads.

A forked child (``os.fork``, or `multiprocessing`'s "fork" method) gets a copy of its parent's memory, but only the
thread that forked. Locks held by other threads stay locked, and their work stays unfinished.

A thread that computes during Python's shutdown would crash the process. So would a daemon thread inside a C++ or Rust
library, because Python would end it there. Engines therefore stop first, each after its current step. Then the
workers stop that engines compute on, and that call such libraries. Until its stage stops, a thread works normally.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from localllm.errors import ClosedError, DeviceError

#: Maximum time in seconds that the process waits for threads at exit. A caller's function may block them.
END_S = 10.0

#: Polling interval in seconds.
_LOOK_S = 0.002

#: Number of forks between the process that imported this module and the current one.
_generation = 0


class Process:
    """The process that creates this object, as distinct from its forked children.

    Identified by a counter instead of the process id, because in a container a child can get the id of its parent.
    """

    def __init__(self) -> None:
        self._generation = _generation

    @property
    def is_current(self) -> bool:
        """Return whether this is the process that created the object."""
        return self._generation == _generation

    def check(self) -> None:
        """Raises DeviceError in a forked child."""
        if not self.is_current:
            raise DeviceError(
                "this model was loaded before the process was forked, and its threads are not in the child: load the "
                "model after the fork, or start the process with multiprocessing's 'spawn' method"
            )


class Stage:
    """One kind of work that the process waits for at exit."""

    def __init__(self) -> None:
        self.is_over = False  # True: no more work may start
        self.under_way: set[UnfinishedWork] = set()  # without a lock, because a forked child could inherit it locked

    def check(self, *, waits: bool = False) -> None:
        """Raises an error if work must not start or continue.

        Args:
            waits: the caller waits for earlier work. In an event loop of a daemon thread this is allowed: the wait
                never ends, but other tasks of the loop continue until the process ends.

        Raises:
            ClosedError: the process is ending.
            SystemExit: the process is ending, in a daemon thread without an event loop. Ends the thread without
                output.
        """
        if not self.is_over:
            return
        if threading.current_thread().daemon:
            asyncio = sys.modules.get("asyncio")  # no loop runs if asyncio was never imported
            if asyncio is None or asyncio._get_running_loop() is None:
                raise SystemExit
            if waits:
                return
        raise ClosedError("the process is ending, and its models have stopped: use them before that")

    def end(self, deadline: float) -> None:
        """Block new work, and wait until current work is finished or the deadline is reached."""
        self.is_over = True
        for work in list(self.under_way):
            work.wake()
        while self.is_busy and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    @property
    def is_own(self) -> bool:
        """Return whether this thread is doing such work."""
        current = threading.current_thread()
        return any(work.thread is current for work in list(self.under_way))

    @property
    def is_busy(self) -> bool:
        """Return whether another thread is doing such work.

        Work of this thread, or of a thread that has ended, does not count: Ctrl-C interrupted it at its start or end.
        """
        current = threading.current_thread()
        return any(work.thread is not current and work.thread.is_alive() for work in list(self.under_way))


class UnfinishedWork:
    """Context manager for work that the process waits for at exit. ``wake`` is called when the process is ending."""

    def __init__(self, stage: Stage, wake: Callable[[], object] = lambda: None) -> None:
        self.stage, self.wake, self.thread = stage, wake, threading.current_thread()

    def __enter__(self) -> None:
        self.stage.under_way.add(self)  # before the check: either this thread sees the end, or the end sees this work
        try:
            self.stage.check()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self.stage.under_way.discard(self)


#: In the order of shutdown.
engines, workers = Stage(), Stage()


def patience() -> float | None:
    """Return the time in seconds to wait for a thread. None means no limit: the process is not ending."""
    if engines.is_over:
        return 0.0  # already waited for
    return None if threading.main_thread().is_alive() else END_S


def end() -> None:
    """Stop all computation at exit. `localllm.__init__` registers only this function."""
    deadline = time.monotonic() + END_S
    for stage in (engines, workers):
        is_ended = False
        while not is_ended:
            try:
                stage.end(deadline)
                is_ended = True
            except (KeyboardInterrupt, SystemExit):  # raised by a signal; the process is ending already
                pass


def _after_fork() -> None:
    global _generation
    _generation += 1
    for stage in (engines, workers):
        stage.under_way.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
