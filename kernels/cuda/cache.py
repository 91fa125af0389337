"""KV cache of a model's layers in a device's memory.

The cache is one allocation.  Each layer has four parts, and each part covers all pages and key/value heads.  For one
page and head, they contain

    keys, values             f16    float16 [PAGE, head]
                             q8_0   int8 [PAGE, head], codes
                             q4_0   [PAGE, head / 16, 8]; of 16 codes, the first eight are the low halves of bytes
                             q5_0   lower bits as in q4_0, followed by the fifth bits, uint16 [PAGE, head / 16]
    key and value scales            float16 [groups, PAGE]: one per 32 values of the head (the last may cover 16)

where ``head`` is the head size of keys or of values, rounded up to a multiple of 16.  Values that are part of the
keys have no parts.  A page of compressed entries has `KVCache.page_rows` rows instead of PAGE.  `append.cu` writes
the padding of heads as zeros.  The unused rows of a page are undefined: attention does not read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.backend import scatter
from localllm.kernels.cache_rounding import CODE_BITS, VALUES_PER_SCALE
from localllm.kernels.cuda.driver import Defines, DeviceMemory, Driver, Stream
from localllm.kernels.graph import CACHE_TYPES, Graph, KVCache, RecurrentState

#: Tokens in a page of the cache.
PAGE = 64
#: Alignment of parts, in bytes.
_ALIGNMENT = 256


def padded_head(head_dim: int) -> int:
    """Return the padded number of values of a head: whole tiles of the tensor cores."""
    return -(-head_dim // 16) * 16


def bits_of(cache: KVCache) -> tuple[int, int]:
    """Return the bits per value in keys and in values."""
    keys, values = (CODE_BITS.get(type, 16) for type in cache.types)
    return keys, values


@dataclass(frozen=True)
class CachePart:
    """A part of a layer's memory, [n_pages, n_heads, …]."""

    offset: int  # offset in the layer's memory, in bytes
    page_bytes: int  # bytes of one page, all heads; a multiple of 128
    n_pages: int

    @property
    def n_bytes(self) -> int:
        return self.page_bytes * self.n_pages


@dataclass(frozen=True)
class CUDACacheLayout:
    """The parts of a layer in a cache of ``n_pages`` pages.  Parts of unused scales are empty."""

    cache: KVCache
    n_pages: int

    def __post_init__(self) -> None:
        for type in self.cache.types:
            if type not in CACHE_TYPES:
                raise KernelError(f"the cuda backend has no cache of type {type!r}: choose one of {[*CACHE_TYPES]}")

    @property
    def heads(self) -> tuple[int, int]:
        """Padded values per head of keys and of values; 0 for values that are part of the keys."""
        cache = self.cache
        return padded_head(cache.key_dim), 0 if cache.values_in_keys else padded_head(cache.value_dim)

    @property
    def groups(self) -> tuple[int, int]:
        """Scales per head of keys and of values; 0 without scales."""
        keys, values = (
            -(-n // VALUES_PER_SCALE) if type in CODE_BITS else 0
            for n, type in zip(self.heads, self.cache.types, strict=True)
        )
        return keys, values

    @cached_property
    def parts(self) -> tuple[CachePart, CachePart, CachePart, CachePart]:
        """Keys, values, the keys' scales, the values' scales."""
        offset, parts = 0, []
        codes = (n * bits // 8 for n, bits in zip(self.heads, bits_of(self.cache), strict=True))
        for per_head in (*codes, *(2 * n for n in self.groups)):
            page_bytes = self.cache.page_rows(PAGE) * self.cache.n_heads * per_head
            part = CachePart(offset, page_bytes, self.n_pages)
            offset = -(-(offset + part.n_bytes) // _ALIGNMENT) * _ALIGNMENT
            parts.append(part)
        keys, values, key_scales, value_scales = parts
        return keys, values, key_scales, value_scales

    @property
    def n_bytes(self) -> int:
        """Bytes of the layer, including padding to the next layer."""
        last = self.parts[-1]
        return -(-(last.offset + last.n_bytes) // _ALIGNMENT) * _ALIGNMENT


def append_defines(cache: KVCache, *, has_axes: bool = False, position_offset: int = 0) -> Defines:
    (keys, values), (of_keys, of_values) = bits_of(cache), cache.rotations
    bits = {"KEY_DIM": cache.key_dim, "VALUE_DIM": cache.value_dim, "KEY_BITS": keys, "VALUE_BITS": values}
    options = {"AXES": int(has_axes), "STRIDE": cache.stride, "POSITION_OFFSET": position_offset}
    return {**bits, "KEY_ROTATION": of_keys, "VALUE_ROTATION": of_values, **options}


def _state_bytes(state: RecurrentState) -> int:
    """Return the bytes of one sequence's values of a state.  The kernel defines the layout."""
    return -(-4 * state.n_values // _ALIGNMENT) * _ALIGNMENT


class CUDACache:
    """The cache of a step, layer by layer; see the layout above.

    All reads and writes use ``stream``, because steps return before they have computed.
    """

    page_size = PAGE

    def __init__(self, graph: Graph, n_pages: tuple[int, ...], n_states: int) -> None:
        self.windows, self.n_pages, self.n_states = graph.windows, n_pages, n_states
        self.groups = {number: graph.group(cache) for number, cache in graph.caches.items()}
        self.layouts = {n: CUDACacheLayout(cache, n_pages[self.groups[n]]) for n, cache in graph.caches.items()}
        self.offsets: dict[int, int] = {}
        self.n_bytes = 0
        for number, layout in self.layouts.items():
            self.offsets[number] = self.n_bytes
            self.n_bytes += layout.n_bytes
        self._first_slot = self.n_bytes
        #: Offset of each state in a slot.
        self._places: dict[RecurrentState, int] = {}
        self.slot_bytes = 0
        #: Values [n_states, n] of the states that are kept on the host.
        self.host_states: dict[RecurrentState, NDArray[np.float32]] = {}
        for state in (state for states in graph.states.values() for state in states):
            if state.is_on_host:
                self.host_states[state] = np.zeros((n_states, state.n_values), np.float32)
                continue
            self._places[state] = self.slot_bytes
            self.slot_bytes += _state_bytes(state)
        self.n_bytes += n_states * self.slot_bytes
        self.memory = DeviceMemory(0, 0, max(1, self.n_bytes), None)  # no memory yet: the cache may only be planned

    def allocate(self, driver: Driver, device: int) -> None:
        """Allocate the memory, which is zero at first."""
        self.driver, self.stream = driver, driver.stream(device)
        self.memory = driver.allocate(device, self.memory.n_bytes)
        driver.fill(self.memory, 0, self.stream)
        driver.synchronize(self.stream)

    driver: Driver
    stream: Stream

    def part(self, number: int, which: int) -> DeviceMemory:
        part = self.layouts[number].parts[which]
        return self.memory.at(self.offsets[number] + part.offset, part.n_bytes)

    def layer(self, number: int) -> dict[str, Any]:
        """Return keys, values and their scales of a layer, as arguments of kernels; None for empty parts."""
        names = "keys", "values", "key_scales", "value_scales"
        parts = enumerate(self.layouts[number].parts)
        return {names[i]: self.part(number, i) if part.n_bytes else None for i, part in parts}

    def copy(self, group: int | None, source: int, target: int) -> None:
        for to, of in zip(self._memories(group, target), self._memories(group, source), strict=True):
            self.driver.copy(to, of, self.stream)
        if group is None:
            for values in self.host_states.values():
                values[target] = values[source]
        self.driver.synchronize(self.stream)

    def layer_bytes(self) -> dict[int, int]:
        sizes: dict[int, int] = {}
        for layout in self.layouts.values():
            sizes[layout.cache.layer] = sizes.get(layout.cache.layer, 0) + layout.n_bytes
        for state in self._places:
            sizes[state.layer] = sizes.get(state.layer, 0) + self.n_states * _state_bytes(state)
        return sizes

    def state(self, state: RecurrentState) -> DeviceMemory:
        """Return the values of a state in the first slot; later slots follow at multiples of `slot_bytes`."""
        begin = self._first_slot + self._places[state]
        return self.memory.at(begin, self.n_bytes - begin)

    def _memories(self, group: int | None, number: int) -> list[DeviceMemory]:
        """Return the parts of a page in the layers of a group; a slot if the group is None."""
        n, item = (self.n_states, "slot") if group is None else (self.n_pages[group], "page")
        if not 0 <= number < n:
            raise KernelError(f"there is no {item} {number} in a cache of {n}")
        if group is None:
            return [self.memory.at(self._first_slot + number * self.slot_bytes, self.slot_bytes)]
        return [
            self.memory.at(self.offsets[n] + part.offset + number * part.page_bytes, part.page_bytes)
            for n, layout in self.layouts.items()
            if self.groups[n] == group
            for part in layout.parts
            if part.page_bytes
        ]

    def n_bytes_of(self, group: int | None) -> int:
        return sum(memory.n_bytes for memory in self._memories(group, 0)) + sum(
            x.nbytes for x in self._on_host(group, 0)
        )

    def _on_host(self, group: int | None, number: int) -> list[NDArray[np.uint8]]:
        """Return the values of a slot that are kept on the host."""
        return [x[number].view(np.uint8) for x in self.host_states.values()] if group is None else []

    def read(self, group: int | None, number: int) -> bytes:
        memories = self._memories(group, number)
        arrays = [np.empty(memory.n_bytes, np.uint8) for memory in memories]
        for array, memory in zip(arrays, memories, strict=True):
            self.driver.download(array, memory, self.stream)
        self.driver.synchronize(self.stream)
        return b"".join(array.tobytes() for array in (*arrays, *self._on_host(group, number)))

    def write(self, group: int | None, number: int, data: bytes) -> None:
        memories = self._memories(group, number)
        arrays = [np.empty(memory.n_bytes, np.uint8) for memory in memories]
        scatter(data, [*arrays, *self._on_host(group, number)])
        for array, memory in zip(arrays, memories, strict=True):
            self.driver.upload(memory, array, self.stream)
        self.driver.synchronize(self.stream)
