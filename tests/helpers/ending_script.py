"""Preamble of the scripts in tests/localllm/test_ending.py: ``from tests.helpers.ending_script import *``."""

# ruff: noqa: F401 (scripts use these modules)

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
from localllm.kernels import process
from localllm.kernels.cpu.backend import CPUBackend

DEMO = str(demo_path())
NUMBERS = {"type": "array", "items": {"type": "integer"}}

# Use worker threads for the demo model's steps, as a large model does.
CPUBackend.small_step = 0
# A wait at exit that the engine does not end lasts until the test fails.
process.END_S = 1000.0


def step() -> None:
    """Print the processor seconds up to the script's last step; the process should exit soon."""
    os.write(1, f"step {sum(os.times()[:4])}\n".encode())


def load(**options: Any) -> LLM:
    return localllm.load(**{"threads": 2} | options)


def busy(llm: LLM, n: int = 3) -> list[Stream]:
    """Start streams that run for seconds without a reader; return once steps are being evaluated."""
    streams = [llm.stream("Once upon a time " * i, ignore_eos=True) for i in range(1, n + 1)]
    for stream in streams:
        stream.deliver_at_end()
    n_steps = llm.counts.steps
    while llm.counts.steps < n_steps + 2:
        time.sleep(0.001)
    return streams


def write(llm: LLM) -> int:
    """Generate a short text and return its number of tokens."""
    return len(llm.generate("Hello", max_tokens=5, ignore_eos=True).ids)


def fill(stream: Stream) -> Stream:
    """Wait until the stream pauses because it has no reader."""
    next(stream)
    while not stream._output.is_full:
        time.sleep(0.001)
    return stream


def refused(use: Callable[[], object]) -> None:
    """Call ``use`` and print its result or the name of the exception."""
    try:
        print("got", use(), flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)


def run(task: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine function in a new event loop and return its result."""

    async def main() -> Any:
        return await task()

    return asyncio.run(main())


def quiet() -> None:
    """Suppress the traceback of the exception that ends the script."""
    sys.excepthook = lambda *_: None


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Send Ctrl-C to this process during the block; the script ends with it."""
    quiet()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the test run may ignore the signal
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        yield
    except KeyboardInterrupt:
        step()
        raise


def ctrl_c() -> NoReturn:
    """Raise KeyboardInterrupt through a real Ctrl-C."""
    with interruptible():
        while True:
            time.sleep(1)
