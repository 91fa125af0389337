"""How the KV cache holds keys and values: all that kernels know of its types.

A block is what one page and key/value head take, `CacheType.block_bytes` for keys and as many for values.  Keys have
positions side by side and values have head values side by side, as attention reads them:

    f16    keys float16 [HEAD, PAGE], values float16 [PAGE, HEAD]
    q8_0   float16 scales [HEAD / 32, PAGE], then keys int8 [HEAD, PAGE], or values int8 [PAGE, HEAD]

HEAD is the head size rounded up to whole vectors, or to whole groups of 32 values that share a scale.  What pads
a head is never written: it stays zero.

A type is a template that writes a token's head into its blocks, and two that widen blocks to float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localllm.kernels.cpu.simd import (
    load_f16x16,
    load_f32,
    load_s8x16,
    splat_f32,
    stack,
    store_f16,
    store_f32x16,
    store_s8,
)
from localllm.kernels.cpu.templates import Template, static_range, template
from localllm.kernels.ops import CacheType

#: Tokens in a page of the cache.
PAGE = 64
#: Values that share a scale.
GROUP = 32

ZERO = np.float32(0)
LARGEST_CODE = np.float32(127)
#: The largest magnitude that codes and a float16 scale can say, and one below which all counts as 0.
LARGEST, NEGLIGIBLE = np.float32(127 * 65504), np.float32(1e-36)


@dataclass(frozen=True)
class CacheLayout:
    """How blocks of a type are written and read.

    Attributes:
        multiple: heads are padded to a multiple of so many values.
        bytes_of_32: what 32 values take.
        append: ``append(k, v, n, keys, values, place)`` writes a head's n float32 values as position ``place``.
        widen_keys: ``widen_keys(block, out)``, to float32 [HEAD, PAGE].
        widen_values: the same, to float32 [PAGE, HEAD].
    """

    multiple: int
    bytes_of_32: int
    append: Template
    widen_keys: Template
    widen_values: Template

    def head(self, head_dim: int) -> int:
        """Values that a head takes: HEAD."""
        return -(-head_dim // self.multiple) * self.multiple

    def block_bytes(self, head_dim: int) -> int:
        """Bytes of a block: BLOCK."""
        n_values = PAGE * self.head(head_dim)
        return n_values * self.bytes_of_32 // 32


@template
def append_f16(k, v, n, keys, values, place):
    for i in range(n):
        store_f16(keys + 2 * place + 2 * PAGE * i, load_f32(k + 4 * i))
        store_f16(values + 2 * HEAD * place + 2 * i, load_f32(v + 4 * i))


@template
def widen_f16(block, out):
    for i in range(0, PAGE * HEAD, PAGE):
        for g in static_range(PAGE // 16):
            store_f32x16(out + 4 * i + 64 * g, load_f16x16(block + 2 * i + 32 * g))


@template
def quantise_head(x, n, scales, codes, step):
    """Codes ``step`` bytes apart, and a scale for each 32 of them, ``2 * PAGE`` bytes apart.

    Rounded as GGML's Q8_0: the largest magnitude becomes 127, and what the float16 scale loses is not made up for.
    """
    for first in range(0, n, GROUP):
        stop = min(n, first + GROUP)
        largest = ZERO
        for i in range(first, stop):
            magnitude = abs(load_f32(x + 4 * i))
            if not magnitude <= largest and largest == largest:  # NaN, once seen, stays
                largest = magnitude
        if largest > LARGEST:
            largest = LARGEST
        inverse = ZERO
        if largest > NEGLIGIBLE:  # which a NaN is not: it then comes out as the scale
            inverse = LARGEST_CODE / largest
        store_f16(scales + 2 * PAGE * (first // GROUP), largest / LARGEST_CODE)
        for i in range(first, stop):
            store_s8(codes + step * i, load_f32(x + 4 * i) * inverse)


@template
def append_q8_0(k, v, n, keys, values, place):
    quantise_head(k, n, keys + 2 * place, keys + 2 * PAGE * (HEAD // GROUP) + place, PAGE)
    quantise_head(v, n, values + 2 * place, values + 2 * PAGE * (HEAD // GROUP) + HEAD * place, 1)


@template
def widen_keys_q8_0(block, out):
    codes = block + 2 * PAGE * (HEAD // GROUP)
    for group in range(HEAD // GROUP):
        for g in static_range(PAGE // 16):
            scale[g] = load_f16x16(block + 2 * PAGE * group + 32 * g)
        for i in range(GROUP * PAGE * group, GROUP * PAGE * (group + 1), PAGE):
            for g in static_range(PAGE // 16):
                store_f32x16(out + 4 * i + 64 * g, load_s8x16(codes + i + 16 * g) * scale[g])


@template
def widen_values_q8_0(block, out):
    codes = block + 2 * PAGE * (HEAD // GROUP)
    scales = stack(4 * PAGE * (HEAD // GROUP))
    for i in range(0, PAGE * (HEAD // GROUP), 16):
        store_f32x16(scales + 4 * i, load_f16x16(block + 2 * i))
    for place in range(PAGE):
        for group in static_range(HEAD // GROUP):
            scale = splat_f32(scales + 4 * PAGE * group + 4 * place)
            for half in static_range(2):
                i = HEAD * place + GROUP * group + 16 * half
                store_f32x16(out + 4 * i, load_s8x16(codes + i) * scale)


LAYOUTS: dict[CacheType, CacheLayout] = {
    "f16": CacheLayout(16, 64, append_f16, widen_f16, widen_f16),
    "q8_0": CacheLayout(GROUP, 34, append_q8_0, widen_keys_q8_0, widen_values_q8_0),
}
