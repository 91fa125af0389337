"""Sampling threads, for grammars that may take long to compute a mask."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

#: Most sampling threads. llguidance releases the GIL while it computes a mask.
_MAX_THREADS = 4


class SamplingThreads:
    """Runs jobs in threads that start with the first job."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def put(self, job: Callable[[], object]) -> None:
        """Run a job in a thread, or in this thread if the system cannot start one. Jobs must not raise."""
        if len(self._threads) < _MAX_THREADS:
            name = f"localllm-chooser-{len(self._threads)}"
            thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
            with contextlib.suppress(RuntimeError, MemoryError):  # limit of threads or of memory
                thread.start()
                self._threads.append(thread)
        if self._threads:
            self._jobs.put(job)
        else:
            job()

    def close(self) -> None:
        """Discard waiting jobs and wait for running ones."""
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
        del job  # do not keep the job's request in memory
