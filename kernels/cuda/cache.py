"""The KV cache, and how it lies in a device's memory.

One allocation has four parts, each for all layers, pages and key/value heads; of a page and head

    keys, values             f16    float16 [PAGE, head]
                             q8_0   int8 [PAGE, head], codes
    key and value scales     q8_0   float16 [groups, PAGE]: of each 32 values of the head (the last may be of 16)

where ``head`` is the head size rounded up to whole 16 values.  `append.cu` writes what pads a head as zeros.  Of a
page that is not full, the rest is whatever it was: attention reads none of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localllm.errors import KernelError
from localllm.kernels.cuda.driver import Argument, Defines, DeviceMemory, Driver, Stream
from localllm.kernels.ops import VALUES_PER_SCALE, CacheShape

#: Tokens in a page of the cache.
PAGE = 64
#: Bytes of a page that a block copies.
_COPIED_BYTES = 16 * 256 * 4


def padded_head(head_dim: int) -> int:
    """The values that a head takes: whole tiles of the tensor cores."""
    return -(-head_dim // 16) * 16


@dataclass(frozen=True)
class Part:
    """A part of the cache's memory, [n_layers, n_pages, n_kv_heads, …].

    Attributes:
        offset: where it begins, in bytes; a multiple of 256.
        page_bytes: bytes of one page of one layer, all heads; a multiple of 128.
        n_pages: pages of a layer.
        n_layers: layers.
    """

    offset: int
    page_bytes: int
    n_pages: int
    n_layers: int

    @property
    def layer_bytes(self) -> int:
        return self.page_bytes * self.n_pages

    @property
    def n_bytes(self) -> int:
        return self.layer_bytes * self.n_layers

    def layer(self, number: int) -> tuple[int, int]:
        """Where a layer begins, and its bytes: what `DeviceMemory.at` takes."""
        return self.offset + number * self.layer_bytes, self.layer_bytes


@dataclass(frozen=True)
class CacheLayout:
    """The parts of a cache of ``n_pages`` pages.  Without scales, theirs are empty."""

    shape: CacheShape
    n_pages: int

    @property
    def head(self) -> int:
        return padded_head(self.shape.head_dim)

    @property
    def groups(self) -> int:
        """Scales of a head; 0 where there are none."""
        return -(-self.head // VALUES_PER_SCALE) if self.shape.type == "q8_0" else 0

    @property
    def parts(self) -> tuple[Part, Part, Part, Part]:
        """Keys, values, the keys' scales, the values' scales."""
        per_head = self.head if self.groups else 2 * self.head
        entries, scales = (PAGE * self.shape.n_kv_heads * n for n in (per_head, 2 * self.groups))
        offset, parts = 0, []
        for page_bytes in (entries, entries, scales, scales):
            part = Part(offset, page_bytes, self.n_pages, self.shape.n_layers)
            offset = -(-(offset + part.n_bytes) // 256) * 256
            parts.append(part)
        keys, values, key_scales, value_scales = parts
        return keys, values, key_scales, value_scales

    @property
    def n_bytes(self) -> int:
        """What the allocation takes."""
        last = self.parts[-1]
        return last.offset + last.n_bytes


@dataclass(frozen=True, eq=False)
class CUDACache:
    """Keys and values in one allocation; drawn above.

    All that reads and writes them goes into ``stream``: programs may return before they have computed.
    """

    memory: DeviceMemory
    layout: CacheLayout
    driver: Driver
    stream: Stream
    page_size: int = PAGE

    @property
    def n_pages(self) -> int:
        return self.layout.n_pages

    @property
    def n_bytes(self) -> int:
        return self.layout.n_bytes

    @property
    def append_defines(self) -> Defines:
        """What append.cu is compiled for."""
        return {"HEAD_DIM": self.layout.shape.head_dim, "Q8_0": int(self.layout.shape.type == "q8_0")}

    def layer(self, number: int) -> tuple[Argument, Argument, Argument, Argument]:
        """Keys, their scales, values and theirs, of a layer, as kernels take them."""
        keys, values, key_scales, value_scales = (
            self.memory.at(*part.layer(number)) if part.n_bytes else np.uint64(0) for part in self.layout.parts
        )
        return keys, key_scales, values, value_scales

    def copy_page(self, source: int, target: int) -> None:
        for page in (source, target):
            if not 0 <= page < self.n_pages:
                raise KernelError(f"there is no page {page} in a cache of {self.n_pages}")
        module = self.driver.load_module(self.memory.device, "append", self.append_defines)
        for part in self.layout.parts:
            if part.n_bytes:
                sizes = np.int32(part.page_bytes), np.int64(part.layer_bytes), np.int32(source), np.int32(target)
                grid = (-(-part.page_bytes // _COPIED_BYTES), part.n_layers)
                memory = self.memory.at(part.offset, part.n_bytes)
                self.driver.launch(module, "copy_page", grid, (256,), [memory, *sizes], self.stream)
        self.driver.synchronize(self.stream)
