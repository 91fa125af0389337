"""What the layers of a model keep, in the memory of the CPU's kernels."""

from __future__ import annotations

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


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def block_bytes(cache: KVCache) -> tuple[int, int]:
    """Bytes of a block of keys and of one of values; 0 of values that are in the keys."""
    layout = layout_of(cache)
    return layout.block_bytes(cache.key_dim), 0 if cache.values_in_keys else layout.block_bytes(cache.value_dim)


class CPUCache:
    """Keys and values, layer after layer, and behind them the states [n_states, …] one after the other.

    Attributes:
        layers: what each keeps: keys, then values, blocks [n_pages, G] (`localllm.kernels.cpu.cache_types`).
        layer_bytes: what it takes.
        memory: of all layers; empty where the cache is only planned.
    """

    page_size = PAGE
    workers: Workers

    def __init__(self, graph: Graph, n_pages: tuple[int, ...], n_states: int) -> None:
        self.windows, self.n_pages, self.n_states = graph.windows, n_pages, n_states
        self.layers, self._groups = graph.caches, {n: graph.group(cache) for n, cache in graph.caches.items()}
        self.layer_bytes: dict[int, int] = {}
        self.memory = np.zeros(0, np.uint8)
        self.n_bytes = 0
        #: Where keys and values of each layer begin, and each state.
        self._places: dict[int, tuple[int, int]] = {}
        self._states: dict[RecurrentState, int] = {}
        for layer, cache in graph.caches.items():
            keys, values = (_aligned(n_pages[self._groups[layer]] * cache.n_heads * n) for n in block_bytes(cache))
            self._places[layer] = self.n_bytes, self.n_bytes + (0 if cache.values_in_keys else keys)
            self._add(layer, keys + values)
        for state in (state for states in graph.states.values() for state in states):
            self._states[state] = self.n_bytes
            self._add(state.layer, _aligned(n_states * state_bytes(state)))

    def _add(self, layer: int, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        self.layer_bytes[layer] = self.layer_bytes.get(layer, 0) + n_bytes

    def allocate(self, workers: Workers) -> None:
        huge = max(self.layer_bytes.values(), default=0) >= 2 * HUGE_LAYER
        self.memory, self.workers = aligned_zeros(self.n_bytes, np.uint8, huge=huge), workers

    def addresses(self) -> dict[int, tuple[int, int]]:
        """Of each layer, where its keys and its values begin."""
        begin = self.memory.ctypes.data
        return {layer: (begin + keys, begin + values) for layer, (keys, values) in self._places.items()}

    def states(self) -> dict[RecurrentState, int]:
        """Of each state, where its values begin, those of slot after slot."""
        return {state: self.memory.ctypes.data + place for state, place in self._states.items()}

    def _part(self, begin: int, *shape: int) -> NDArray[np.uint8]:
        return self.memory[begin : begin + prod(shape)].reshape(shape)

    def copy_state(self, source: int, target: int) -> None:
        self.workers.settle()
        for state, begin in self._states.items():
            values = self._part(begin, self.n_states, state_bytes(state))
            values[target] = values[source]

    def blocks(self) -> dict[int, tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Of each layer, keys and values [n_pages, G, bytes of a block]; values in keys have none."""
        views = {}
        for layer, places in self._places.items():
            cache, n_pages = self.layers[layer], self.n_pages[self._groups[layer]]
            sizes = zip(places, block_bytes(cache), strict=True)
            keys, values = (self._part(begin, n_pages, cache.n_heads, n) for begin, n in sizes)
            views[layer] = keys, values
        return views

    def copy_page(self, group: int, source: int, target: int) -> None:
        self.workers.settle()
        for layer, (keys, values) in self.blocks().items():
            if self._groups[layer] == group:
                keys[target], values[target] = keys[source], values[source]
