"""Memory that loaded models have planned but not used yet.

The system gives a cache memory when the cache is first written.  Without this record, a second model would be planned
with the memory that the first model's cache will need.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from localllm.kernels.cpu.host import used_memory
from localllm.loading.placement import Placement

_lock = threading.Lock()
_open: set[PlannedMemory] = set()


class PlannedMemory:
    """The memory of one loaded model on the host, until `close`."""

    def __init__(self, placements: Sequence[Placement]) -> None:
        on_host = [placement.on(placement.host) for placement in placements]
        self.total = sum(placed.memory.host for placed in on_host)  # bytes
        self.growing = sum(placed.kv_cache + placed.pool for placed in on_host)  # bytes that are used after loading
        with _lock:
            _open.add(self)

    def close(self) -> None:
        with _lock:
            _open.discard(self)


def unused_memory() -> int:
    """Return the bytes of the host's memory that loaded models will still use."""
    with _lock:
        models = [*_open]
    if not models:
        return 0
    unused = sum(model.total for model in models) - used_memory()
    return max(0, min(unused, sum(model.growing for model in models)))
