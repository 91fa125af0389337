"""What the layers of a model keep, in the memory of the CPU's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.buffers import ALIGNMENT, Address, Buffer
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


class CPUCache:
    """Keys and values, layer after layer, and behind them the states [n_states, …] one after the other.

    Attributes:
        graph: what each of its layers keeps.
        memory: of all layers, once it was allocated.
    """

    page_size = PAGE

    def __init__(self, graph: Graph, n_pages: tuple[int, ...], n_states: int, workers: Workers) -> None:
        self.graph, self.n_pages, self.n_states, self._workers = graph, n_pages, n_states, workers
        self.layer_bytes = cache_bytes(graph, n_pages, n_states)
        self.n_bytes = sum(self.layer_bytes.values())
        self.memory: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._buffer = Buffer(self.n_bytes, address=0)

    def allocate(self) -> None:
        """Takes the memory, which is zero at first."""
        huge = max(self.layer_bytes.values(), default=0) >= 2 * HUGE_LAYER
        self.memory = aligned_zeros(self.n_bytes, np.uint8, huge=huge)
        self._buffer.address = self.memory.ctypes.data

    @property
    def windows(self) -> list[int | None]:
        return self.graph.windows

    @property
    def layers(self) -> Mapping[int, KVCache]:
        return self.graph.caches

    def _part_bytes(self, cache: KVCache) -> tuple[int, int]:
        return part_bytes(cache, self.n_pages[self.graph.group(cache)])

    def places(self) -> dict[int, tuple[Address, Address]]:
        """Of each layer, where its keys and its values begin."""
        at, places = 0, {}
        for layer, cache in self.layers.items():
            keys, values = self._part_bytes(cache)
            places[layer] = self._buffer.at(at), self._buffer.at(at if cache.values_in_keys else at + keys)
            at += keys + values
        return places

    def states(self) -> dict[RecurrentState, Address]:
        """Of each state, where its values begin, those of slot after slot."""
        at, places = sum(sum(self._part_bytes(cache)) for cache in self.layers.values()), {}
        for state in (state for states in self.graph.states.values() for state in states):
            places[state] = self._buffer.at(at)
            at += _aligned(self.n_states * state_bytes(state))
        return places

    def copy_state(self, source: int, target: int) -> None:
        self._workers.settle()
        for state, place in self.states().items():
            n_bytes = state_bytes(state)
            values = self.memory[place.n_bytes : place.n_bytes + self.n_states * n_bytes].reshape(-1, n_bytes)
            values[target] = values[source]

    def blocks(self) -> dict[int, tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Of each layer, keys and values [n_pages, G, bytes of a block]; values in keys have none."""
        views = {}
        for layer, places in self.places().items():
            cache = self.layers[layer]
            n_pages = self.n_pages[self.graph.group(cache)]
            shapes = [(n_pages, cache.n_heads, n) for n in block_bytes(cache)]
            keys, values = (
                self.memory[place.n_bytes : place.n_bytes + prod(shape)].reshape(shape)
                for place, shape in zip(places, shapes, strict=True)
            )
            views[layer] = keys, values
        return views

    def copy_page(self, group: int, source: int, target: int) -> None:
        self._workers.settle()
        for layer, (keys, values) in self.blocks().items():
            if self.graph.group(self.layers[layer]) == group:
                keys[target], values[target] = keys[source], values[source]
