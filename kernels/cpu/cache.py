"""What the layers of a model keep, in the memory of the CPU's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.buffers import ALIGNMENT
from localllm.kernels.cpu.cache_types import CACHE_LAYOUTS, PAGE, CacheLayout
from localllm.kernels.cpu.memory import aligned_zeros
from localllm.kernels.cpu.program import Workers
from localllm.kernels.graph import KVCache

#: Bytes of a layer's keys from which on a cache lies in huge pages: of a short one they would take most at once.
HUGE_LAYER = 4 << 20


def layout_of(cache: KVCache) -> CacheLayout:
    """How its type is kept.

    Raises:
        KernelError: there is no such type on the CPU.
    """
    if cache.type not in CACHE_LAYOUTS:
        raise KernelError(f"the cpu backend has no cache of type {cache.type!r}: choose one of {[*CACHE_LAYOUTS]}")
    return CACHE_LAYOUTS[cache.type]


def part_bytes(cache: KVCache, n_pages: int) -> int:
    """Bytes of a layer's keys, or of its values: blocks [n_pages, G] (`localllm.kernels.cpu.cache_types`)."""
    n_bytes = n_pages * cache.n_heads * layout_of(cache).block_bytes(cache.head_dim)
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class CPUCache:
    """Keys and values, layer after layer.

    Attributes:
        memory: of all layers; none of a cache that is only planned.
        layers: what each of them keeps.
    """

    memory: NDArray[np.uint8] | None
    layers: Mapping[int, KVCache]
    n_pages: int
    workers: Workers | None = None
    page_size: int = PAGE

    @classmethod
    def allocate(cls, layers: Mapping[int, KVCache], n_pages: int, workers: Workers) -> CPUCache:
        sizes = [part_bytes(cache, n_pages) for cache in layers.values()]
        huge = max(sizes, default=0) >= HUGE_LAYER
        return cls(aligned_zeros(2 * sum(sizes), np.uint8, huge=huge), layers, n_pages, workers)

    @property
    def n_bytes(self) -> int:
        return sum(2 * part_bytes(cache, self.n_pages) for cache in self.layers.values())

    def addresses(self) -> dict[int, tuple[int, int]]:
        """Of each layer, where its keys and its values begin; from 0 on without memory."""
        at, places = 0 if self.memory is None else self.memory.ctypes.data, {}
        for layer, cache in self.layers.items():
            n_bytes = part_bytes(cache, self.n_pages)
            places[layer] = at, at + n_bytes
            at += 2 * n_bytes
        return places

    def blocks(self) -> dict[int, tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Of each layer, keys and values [n_pages, G, bytes of a block]."""
        if self.memory is None:
            return {}
        begin, views = self.memory.ctypes.data, {}
        for layer, places in self.addresses().items():
            cache = self.layers[layer]
            shape = self.n_pages, cache.n_heads, layout_of(cache).block_bytes(cache.head_dim)
            n_bytes = int(np.prod(shape))
            keys, values = (self.memory[at - begin : at - begin + n_bytes].reshape(shape) for at in places)
            views[layer] = keys, values
        return views

    def copy_page(self, source: int, target: int) -> None:
        if self.workers is not None:
            self.workers.settle()
        for keys, values in self.blocks().values():
            keys[target], values[target] = keys[source], values[source]
