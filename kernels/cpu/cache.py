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
from localllm.kernels.graph import Graph, KVCache, RecurrentState

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


def state_bytes(state: RecurrentState) -> int:
    """Bytes of one sequence's values of a state, with rows of whole vectors; how they lie, its kernel knows."""
    return 4 * prod(state.shape[:-1]) * (-(-state.shape[-1] // 16) * 16)


def cache_bytes(graph: Graph, n_pages: tuple[int, ...], n_states: int) -> dict[int, int]:
    """Bytes of what each layer of a graph keeps."""
    sizes = {layer: sum(part_bytes(cache, n_pages[graph.group(cache)])) for layer, cache in graph.caches.items()}
    for layer, states in graph.states.items():
        sizes[layer] = sizes.get(layer, 0) + sum(_aligned(n_states * state_bytes(state)) for state in states)
    return sizes


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def part_bytes(cache: KVCache, n_pages: int) -> tuple[int, int]:
    """Bytes of a layer's keys and of its values: blocks [n_pages, G] (`localllm.kernels.cpu.cache_types`)."""
    keys, values = (_aligned(n_pages * cache.n_heads * n) for n in block_bytes(cache))
    return keys, values


def block_bytes(cache: KVCache) -> tuple[int, int]:
    """Bytes of a block of keys and of one of values; 0 of values that are in the keys."""
    layout = layout_of(cache)
    return layout.block_bytes(cache.key_dim), 0 if cache.values_in_keys else layout.block_bytes(cache.value_dim)


@dataclass(frozen=True)
class CPUCache:
    """Keys and values, layer after layer, and behind them the states [n_states, …] one after the other.

    Attributes:
        memory: of all layers; none of a cache that is only planned.
        graph: what each of its layers keeps.
    """

    memory: NDArray[np.uint8] | None
    graph: Graph
    n_pages: tuple[int, ...]
    n_states: int
    workers: Workers | None = None
    page_size: int = PAGE

    @classmethod
    def allocate(cls, graph: Graph, n_pages: tuple[int, ...], n_states: int, workers: Workers) -> CPUCache:
        sizes = cache_bytes(graph, n_pages, n_states).values()
        huge = max(sizes, default=0) >= 2 * HUGE_LAYER
        return cls(aligned_zeros(sum(sizes), np.uint8, huge=huge), graph, n_pages, n_states, workers)

    @property
    def windows(self) -> list[int | None]:
        return self.graph.windows

    @property
    def layers(self) -> Mapping[int, KVCache]:
        return self.graph.caches

    def _part_bytes(self, cache: KVCache) -> tuple[int, int]:
        return part_bytes(cache, self.n_pages[self.graph.group(cache)])

    @property
    def n_bytes(self) -> int:
        return sum(cache_bytes(self.graph, self.n_pages, self.n_states).values())

    def addresses(self) -> dict[int, tuple[int, int]]:
        """Of each layer, where its keys and its values begin; from 0 on without memory."""
        at, places = 0 if self.memory is None else self.memory.ctypes.data, {}
        for layer, cache in self.layers.items():
            keys, values = self._part_bytes(cache)
            places[layer] = at, at if cache.values_in_keys else at + keys
            at += keys + values
        return places

    def states(self) -> dict[RecurrentState, int]:
        """Of each state, where its values begin, those of slot after slot."""
        at = 0 if self.memory is None else self.memory.ctypes.data
        at += sum(sum(self._part_bytes(cache)) for cache in self.layers.values())
        places = {}
        for state in (state for states in self.graph.states.values() for state in states):
            places[state] = at
            at += _aligned(self.n_states * state_bytes(state))
        return places

    def copy_state(self, source: int, target: int) -> None:
        if self.memory is None:
            return
        if self.workers is not None:
            self.workers.settle()
        for state, address in self.states().items():
            begin, n_bytes = address - self.memory.ctypes.data, state_bytes(state)
            values = self.memory[begin : begin + self.n_states * n_bytes].reshape(-1, n_bytes)
            values[target] = values[source]

    def blocks(self) -> dict[int, tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Of each layer, keys and values [n_pages, G, bytes of a block]; values in keys have none."""
        if self.memory is None:
            return {}
        begin, views = self.memory.ctypes.data, {}
        for layer, places in self.addresses().items():
            cache = self.layers[layer]
            n_pages = self.n_pages[self.graph.group(cache)]
            shapes = [(n_pages, cache.n_heads, n) for n in block_bytes(cache)]
            keys, values = (
                self.memory[at - begin : at - begin + prod(shape)].reshape(shape)
                for at, shape in zip(places, shapes, strict=True)
            )
            views[layer] = keys, values
        return views

    def copy_page(self, group: int, source: int, target: int) -> None:
        if self.workers is not None:
            self.workers.settle()
        for layer, (keys, values) in self.blocks().items():
            if self.graph.group(self.layers[layer]) == group:
                keys[target], values[target] = keys[source], values[source]
