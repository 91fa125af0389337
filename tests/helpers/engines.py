"""Inspect an engine while its thread runs."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import TypeVar

from localllm import LLM
from localllm.engine.engine import Engine, EngineLoop

_T = TypeVar("_T")


def in_engine(model: LLM | Engine, look: Callable[[EngineLoop], _T]) -> _T:
    """Call a function on the engine's thread between two steps and return its result."""
    engine = model._opened() if isinstance(model, LLM) else model
    found: queue.SimpleQueue[_T] = queue.SimpleQueue()
    engine._inbox.put(lambda loop: found.put(look(loop)))
    return found.get(timeout=60)


def n_requests(model: LLM | Engine) -> int:
    """Return the number of waiting and running requests."""
    return in_engine(model, lambda loop: len(loop._scheduler.requests))


def eventually(condition: Callable[[], object], seconds: float = 60) -> bool:
    """Wait until another thread makes a condition true; return whether it did."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
