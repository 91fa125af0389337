"""Threads that choose tokens, where a grammar may make that take long."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

#: Threads at most: llguidance holds no lock of Python's while it computes a mask.
_MAX_THREADS = 4


class SamplingThreads:
    """Does jobs in threads of its own, which begin with the first one."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def put(self, job: Callable[[], object]) -> None:
        """Has a job done, which must raise nothing: here, where the system gives no thread for it."""
        if len(self._threads) < _MAX_THREADS:
            name = f"localllm-chooser-{len(self._threads)}"
            thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
            with contextlib.suppress(RuntimeError, MemoryError):  # the system's limit of threads or of memory
                thread.start()
                self._threads.append(thread)
        if self._threads:
            self._jobs.put(job)
        else:
            job()

    def close(self) -> None:
        """Drops the jobs that wait, and waits for those under way."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()


def _work(jobs: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # what it holds goes with its request
