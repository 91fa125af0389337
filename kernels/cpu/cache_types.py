"""How the KV cache holds keys and values: all that kernels know of its types.

A block is what keys, or values, of one page and key/value head take: `CacheLayout.block_bytes`.  Keys have positions
side by side and values have head values side by side, as attention reads them:

    f16    keys float16 [head, PAGE], values float16 [PAGE, head]
    q8_0   float16 scales [head / 32, PAGE], then keys int8 [head, PAGE], or values int8 [PAGE, head]

Keys that hold the values, too, lie as values do.  ``head`` is the size of a head in keys or values, rounded up to
whole vectors, or to whole runs of 32 values that share a scale.  What pads a head is never written: it stays zero.

A type is a template that writes a token's head into its blocks, and an operation that reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from localllm.kernels.cpu.simd import *
from localllm.kernels.cpu.templates import Template, template
from localllm.kernels.graph import CacheType
from localllm.kernels.q8_0 import LARGEST_CODE, LARGEST_SCALED, NEGLIGIBLE, VALUES_PER_SCALE

#: Tokens in a page of the cache.
PAGE = 64

ZERO = np.float32(0)


@dataclass(frozen=True)
class CacheLayout:
    """How blocks of a type are written and read."""

    size: int  # bytes of a value
    per_scale: int  # values that share a scale; 0 if there are no scales
    # append_keys, append_values: templates; ``append(x, n, head, block, place)`` writes n float32 values, padded to
    # ``head``, as number ``place`` of a page's block
    append_keys: Template
    append_values: Template
    load: Any  # operation that reads sixteen values side by side, without their scale

    def head(self, head_dim: int) -> int:
        """Values that a head takes."""
        multiple = self.per_scale or 16
        return -(-head_dim // multiple) * multiple

    def scale_bytes(self, head_dim: int) -> int:
        """Bytes of a block's scales."""
        return 2 * PAGE * (self.head(head_dim) // self.per_scale) if self.per_scale else 0

    def block_bytes(self, head_dim: int) -> int:
        """Bytes of a block."""
        return self.scale_bytes(head_dim) + PAGE * self.head(head_dim) * self.size


@template
def append_f16_keys(x, n, head, block, place):
    for i in range(n):
        store_f16(block + 2 * place + 2 * PAGE * i, load_f32(x + 4 * i))


@template
def append_f16_values(x, n, head, block, place):
    for i in range(n):
        store_f16(block + 2 * head * place + 2 * i, load_f32(x + 4 * i))


@template
def quantise_head(x, n, scales, codes, step):
    """Codes ``step`` bytes apart, and a scale for each 32 of them, ``2 * PAGE`` bytes apart.

    Rounded as GGML's Q8_0: the largest magnitude becomes 127, and what the float16 scale loses is not made up for.
    """
    for first in range(0, n, VALUES_PER_SCALE):
        stop = min(n, first + VALUES_PER_SCALE)
        largest = ZERO
        for i in range(first, stop):
            magnitude = abs(load_f32(x + 4 * i))
            if not magnitude <= largest and largest == largest:  # NaN, once seen, stays
                largest = magnitude
        if largest > LARGEST_SCALED:
            largest = LARGEST_SCALED
        inverse = ZERO
        if largest > NEGLIGIBLE:  # which a NaN is not: it then comes out as the scale
            inverse = LARGEST_CODE / largest
        store_f16(scales + 2 * PAGE * (first // VALUES_PER_SCALE), largest / LARGEST_CODE)
        for i in range(first, stop):
            store_s8(codes + step * i, load_f32(x + 4 * i) * inverse)


@template
def append_q8_0_keys(x, n, head, block, place):
    quantise_head(x, n, block + 2 * place, block + 2 * PAGE * (head // VALUES_PER_SCALE) + place, PAGE)


@template
def append_q8_0_values(x, n, head, block, place):
    quantise_head(x, n, block + 2 * place, block + 2 * PAGE * (head // VALUES_PER_SCALE) + head * place, 1)


CACHE_LAYOUTS: dict[CacheType, CacheLayout] = {
    "f16": CacheLayout(2, 0, append_f16_keys, append_f16_values, load_f16x16),
    "q8_0": CacheLayout(1, VALUES_PER_SCALE, append_q8_0_keys, append_q8_0_values, load_s8x16),
}
