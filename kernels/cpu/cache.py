"""What the layers of a model keep, in the memory of the CPU's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

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


def part_bytes(cache: KVCache, n_pages: int) -> tuple[int, int]:
    """Bytes of a layer's keys and of its values: blocks [n_pages, G] (`localllm.kernels.cpu.cache_types`)."""
    keys, values = (-(-n_pages * cache.n_heads * n // ALIGNMENT) * ALIGNMENT for n in block_bytes(cache))
    return keys, values


def block_bytes(cache: KVCache) -> tuple[int, int]:
    """Bytes of a block of keys and of one of values; 0 of values that are in the keys."""
    layout = layout_of(cache)
    return layout.block_bytes(cache.key_dim), 0 if cache.values_in_keys else layout.block_bytes(cache.value_dim)


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
        huge = max((keys for keys, _ in sizes), default=0) >= HUGE_LAYER
        return cls(aligned_zeros(sum(map(sum, sizes)), np.uint8, huge=huge), layers, n_pages, workers)

    @property
    def n_bytes(self) -> int:
        return sum(sum(part_bytes(cache, self.n_pages)) for cache in self.layers.values())

    def addresses(self) -> dict[int, tuple[int, int]]:
        """Of each layer, where its keys and its values begin; from 0 on without memory."""
        at, places = 0 if self.memory is None else self.memory.ctypes.data, {}
        for layer, cache in self.layers.items():
            keys, values = part_bytes(cache, self.n_pages)
            places[layer] = at, at if cache.values_in_keys else at + keys
            at += keys + values
        return places

    def blocks(self) -> dict[int, tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Of each layer, keys and values [n_pages, G, bytes of a block]; values in keys have none."""
        if self.memory is None:
            return {}
        begin, views = self.memory.ctypes.data, {}
        for layer, places in self.addresses().items():
            cache = self.layers[layer]
            shapes = [(self.n_pages, cache.n_heads, n) for n in block_bytes(cache)]
            keys, values = (
                self.memory[at - begin : at - begin + prod(shape)].reshape(shape)
                for at, shape in zip(places, shapes, strict=True)
            )
            views[layer] = keys, values
        return views

    def copy_page(self, source: int, target: int) -> None:
        if self.workers is not None:
            self.workers.settle()
        for keys, values in self.blocks().values():
            keys[target], values[target] = keys[source], values[source]
