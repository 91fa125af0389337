"""KV cache and recurrent states of a model, in memory for CPU kernels."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.backend import HostCache
from localllm.kernels.buffers import ALIGNMENT, Address, Buffer
from localllm.kernels.cpu.cache_types import PAGE, layouts_of
from localllm.kernels.cpu.memory import aligned_zeros
from localllm.kernels.cpu.program import Workers
from localllm.kernels.graph import Graph, KVCache, RecurrentState

#: Minimum size in bytes of a layer's keys for huge pages: a small cache would be resident as a whole.
HUGE_LAYER = 4 << 20


def state_bytes(state: RecurrentState) -> int:
    """Return the bytes of one sequence's values of a state, with padded rows.  The kernel defines the layout."""
    return 4 * prod(state.shape[:-1]) * (-(-state.shape[-1] // 16) * 16)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def block_bytes(cache: KVCache) -> tuple[int, int]:
    """Return the bytes of a block of keys and of a block of values; 0 for values that are part of the keys."""
    keys, values = layouts_of(cache)
    if cache.stride > 1:  # fewer rows, without scales
        return keys.block_bytes(cache.key_dim) // PAGE * cache.page_rows(PAGE), 0
    return keys.block_bytes(cache.key_dim), 0 if cache.values_in_keys else values.block_bytes(cache.value_dim)


class CPUCache(HostCache):
    """Keys and values layer by layer, followed by each recurrent state [n_states, …]."""

    page_size = PAGE

    def __init__(self, graph: Graph, n_pages: tuple[int, ...], n_states: int, workers: Workers) -> None:
        self.windows, self.n_pages, self.n_states, self._workers = graph.windows, n_pages, n_states, workers
        self.layers, self._groups = graph.caches, {n: graph.group(cache) for n, cache in graph.caches.items()}
        self.layer_bytes: dict[int, int] = {}  # size of each layer
        self.places: dict[int, tuple[Address, Address]] = {}  # addresses of each layer's keys and values
        self.states: dict[RecurrentState, Address] = {}  # address of each state, slot by slot
        self.memory, self._buffer = np.zeros(0, np.uint8), Buffer(0, address=0)
        # Arrays [n_pages, …] of each group, and [n_states, …] for None
        self._views: dict[int | None, list[NDArray[np.uint8]]] = {}
        for key, cache in graph.caches.items():
            keys, values = (_aligned(n_pages[self._groups[key]] * cache.n_heads * n) for n in block_bytes(cache))
            begin = self._add(cache.layer, keys + values)
            self.places[key] = begin, begin if cache.values_in_keys else self._buffer.at(begin.n_bytes + keys)
        for state in (state for states in graph.states.values() for state in states):
            self.states[state] = self._add(state.layer, _aligned(n_states * state_bytes(state)))

    def _add(self, layer: int, n_bytes: int) -> Address:
        """Reserve memory for a layer after the existing layers."""
        begin = self._buffer.at(self.n_bytes)
        self._buffer.n_bytes += n_bytes
        self.layer_bytes[layer] = self.layer_bytes.get(layer, 0) + n_bytes
        return begin

    @property
    def n_bytes(self) -> int:
        return self._buffer.n_bytes

    def allocate(self) -> None:
        """Allocate the memory, which is zero at first."""
        huge = max(self.layer_bytes.values(), default=0) >= 2 * HUGE_LAYER
        self.memory = aligned_zeros(self.n_bytes, np.uint8, huge=huge)
        self._buffer.address = self.memory.ctypes.data
        self._views.clear()

    def share(self, other: CPUCache | None) -> None:
        """Use the memory of another cache with the same layers and pages."""
        if other is None or (other.layers, other.n_pages, other.n_bytes) != (self.layers, self.n_pages, self.n_bytes):
            raise KernelError("a graph that shares caches needs the other graph's step, with equal pages")
        self.memory = other.memory
        self._buffer.address = self.memory.ctypes.data
        self._views.clear()

    def _part(self, start: Address, *shape: int) -> NDArray[np.uint8]:
        return self.memory[start.n_bytes : start.n_bytes + prod(shape)].reshape(shape)

    def blocks(self) -> dict[int, tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        """Return keys and values of each layer, [n_pages, G, bytes of a block]; values inside keys are empty."""
        views = {}
        for layer, places in self.places.items():
            cache, n_pages = self.layers[layer], self.n_pages[self._groups[layer]]
            sizes = zip(places, block_bytes(cache), strict=True)
            keys, values = (self._part(start, n_pages, cache.n_heads, n) for start, n in sizes)
            views[layer] = keys, values
        return views

    def state(self, state: RecurrentState) -> NDArray[np.float32]:
        """Return the values of a state whose value is one row, [n_states, n]."""
        rows = self._part(self.states[state], self.n_states, state_bytes(state)).view(np.float32)
        return rows[:, : state.n_values]

    def _arrays(self, group: int | None, number: int) -> list[NDArray[np.uint8]]:
        self._workers.wait_until_idle()
        if (views := self._views.get(group)) is None:
            if group is None:
                views = [self._part(start, self.n_states, state_bytes(s)) for s, start in self.states.items()]
            else:
                of_group = [arrays for layer, arrays in self.blocks().items() if self._groups[layer] == group]
                views = [array.reshape(len(array), -1) for arrays in of_group for array in arrays if array.size]
            self._views[group] = views
        return [view[number] for view in views]
