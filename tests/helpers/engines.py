"""Looks into an engine whose thread runs."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import TypeVar

from localllm import LLM
from localllm.engine.engine import Engine, EngineLoop

_T = TypeVar("_T")


def in_engine(model: LLM | Engine, look: Callable[[EngineLoop], _T]) -> _T:
    """What a function returns that the engine's thread calls, between two steps."""
    engine = model._opened() if isinstance(model, LLM) else model
    found: queue.SimpleQueue[_T] = queue.SimpleQueue()
    engine._inbox.put(lambda loop: found.put(look(loop)))
    return found.get(timeout=60)


def n_requests(model: LLM | Engine) -> int:
    """Requests that wait or run."""
    return in_engine(model, lambda loop: len(loop._scheduler.requests))


def eventually(condition: Callable[[], object], seconds: float = 60) -> bool:
    """Whether a condition comes true, which only another thread can make true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
