"""What the scripts of tests/localllm/test_ending.py begin with: ``from tests.helpers.ending_script import *``."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NoReturn

import localllm
from localllm import LLM, ClosedError, Stream
from localllm.catalog.demo import demo_path
from localllm.kernels.cpu.backend import CPUBackend

__all__ = [
    "DEMO",
    "NUMBERS",
    "ClosedError",
    "asyncio",
    "atexit",
    "busy",
    "contextlib",
    "ctrl_c",
    "fill",
    "interruptible",
    "load",
    "localllm",
    "os",
    "quiet",
    "refused",
    "run",
    "signal",
    "step",
    "sys",
    "threading",
    "time",
    "write",
]

DEMO = str(demo_path())
NUMBERS = {"type": "array", "items": {"type": "integer"}}

# The demo model's steps go to the workers, as a large model's do.
CPUBackend.small_step = 0


def step() -> None:
    """The script's last step: it should end within a second of it."""
    os.write(1, f"step {time.monotonic()}\n".encode())


def load(**options: Any) -> LLM:
    return localllm.load(**{"threads": 2} | options)


def busy(llm: LLM, n: int = 3) -> list[Stream]:
    """Streams that go on for seconds whether anybody reads them or not; returns when steps are being evaluated."""
    streams = [llm.stream("Once upon a time " * i, ignore_eos=True) for i in range(1, n + 1)]
    for stream in streams:
        stream.deliver_at_end()
    n_steps = llm.counts.steps
    while llm.counts.steps < n_steps + 2:
        time.sleep(0.001)
    return streams


def write(llm: LLM) -> int:
    """A short text; returns how many tokens it has."""
    return len(llm.generate("Hello", max_tokens=5, ignore_eos=True).ids)


def fill(stream: Stream) -> Stream:
    """Waits until the stream has paused, as nobody reads it."""
    next(stream)
    while not stream._output.is_full:
        time.sleep(0.001)
    return stream


def refused(use: Callable[[], object]) -> None:
    """Uses a model, and prints which error that gives."""
    try:
        print("got", use(), flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)


def run(task: Callable[[], Awaitable[Any]]) -> Any:
    """What a coroutine function returns, in an event loop of its own."""

    async def main() -> Any:
        return await task()

    return asyncio.run(main())


def quiet() -> None:
    """An exception ends the script as ever, but without its traceback."""
    sys.excepthook = lambda *_: None


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C comes in the middle of this; the script ends with it."""
    quiet()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where the suite runs it is perhaps ignored
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        yield
    except KeyboardInterrupt:
        step()
        raise


def ctrl_c() -> NoReturn:
    """Raises KeyboardInterrupt, as Ctrl-C does."""
    with interruptible():
        while True:
            time.sleep(1)
