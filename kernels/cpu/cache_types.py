"""Storage formats of keys and values in the KV cache.

A block is the keys or the values of one page and one key/value head: `CPUCacheLayout.block_bytes` bytes.
Half-precision blocks are stored in the order that attention multiplies, 16 values at a time: keys of 16 positions, or
16 values of one position:

    f16      keys float16 [head, PAGE], values float16 [PAGE, head]

Codes are stored for byte products (`localllm.kernels.cpu.dots`).  A tile has 16 lanes and 32 columns, in vectors of
four columns each.  The tiles follow float16 scales [head / 32, PAGE]:

    keys     tiles [head / 32, PAGE / 16]: lanes are positions, columns are values of the head
    values   tiles [head / 32, PAGE / 32, 2]: lanes are values of the head, columns are positions
    latents  codes [PAGE, head]: keys that contain the values, which are read one by one as floats

Codes of 8 bits are signed bytes, and shorter codes are unsigned.  A byte of 4-bit codes contains one code in its low
half and, in its high half, the code 16 values later (8 values later for latents).  5-bit codes store the lower four
bits in the same way, followed by the fifth bits.  For keys, these are a byte for each lane and column modulo 4, with
one bit per four columns.  For values, they are four bytes per position: byte l modulo 4 belongs to lane l, with bit l
/ 4 for the first 16 values and four more bits for the other 16 values.  For latents, they are one bit per value, for
16 values.

``head`` is the size of a head in keys or values, rounded up to whole vectors, or to whole groups of 32 values that
share a scale.  Padding counts as 0.  Writing a token changes no byte of another token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from localllm.errors import KernelError
from localllm.kernels.cache_rounding import CODE_BITS, LARGEST_CODE, LARGEST_HALF, NEGLIGIBLE, VALUES_PER_SCALE
from localllm.kernels.cpu.codes import load_u4x16, load_u5x16
from localllm.kernels.cpu.simd import *
from localllm.kernels.cpu.templates import Template, device, template
from localllm.kernels.graph import CACHE_TYPES, KVCache

#: Tokens in a page of the cache.
PAGE = 64

ZERO = np.float32(0)


@dataclass(frozen=True)
class CPUCacheLayout:
    """How blocks of keys or of values are written and read."""

    bits: int  # bits per value
    # template ``append(x, n, head, bits, block, place)``: writes n float32 values, padded to ``head``, at position
    # ``place`` of a page's block
    append: Template
    load: Any  # operation that loads 16 consecutive values, without their scale; None for tiles

    @property
    def per_scale(self) -> int:
        """Values that share a scale; 0 if there are no scales."""
        return VALUES_PER_SCALE if self.bits < 16 else 0

    @property
    def unit(self) -> int:
        """Bytes of sixteen values."""
        return 2 * self.bits

    def head(self, head_dim: int) -> int:
        """Return the padded number of values of a head."""
        multiple = self.per_scale or 16
        return -(-head_dim // multiple) * multiple

    def scale_bytes(self, head_dim: int) -> int:
        return 2 * PAGE * (self.head(head_dim) // self.per_scale) if self.per_scale else 0

    def block_bytes(self, head_dim: int) -> int:
        return self.scale_bytes(head_dim) + PAGE * self.head(head_dim) * self.bits // 8


@template
def append_f16_keys(x, n, head, bits, block, index):
    for i in range(n):
        store_f16(block + 2 * index + 2 * PAGE * i, load_f32(x + 4 * i))


@template
def append_f16_values(x, n, head, bits, block, index):
    for i in range(n):
        store_f16(block + 2 * head * index + 2 * i, load_f32(x + 4 * i))


@template
def quantise_group(x, n, group, bits, scales, codes):
    """Quantise group number ``group`` of 32 values of a head to codes int64 [32] and a float16 scale of the page.

    See `localllm.kernels.cache_rounding`.
    """
    high, low, half = ZERO, ZERO, 1 << (bits - 1)
    first, here = x + 4 * VALUES_PER_SCALE * group, min(n - VALUES_PER_SCALE * group, VALUES_PER_SCALE)
    for i in range(here):
        value = load_f32(first + 4 * i)
        if not value <= high and high == high:  # keeps a NaN
            high = value
        if value < low:
            low = value
    largest, code = high, np.float32(-half)
    if bits == 8:
        code = LARGEST_CODE
        if -low > high:
            largest = -low
    elif -low > high:
        largest = low
    limit = abs(code) * LARGEST_HALF
    if largest > limit:
        largest = limit
    if largest < -limit:
        largest = -limit
    inverse = ZERO
    if abs(largest) > NEGLIGIBLE:  # false for NaN, which then becomes the scale
        inverse = code / largest
    store_f16(scales + 2 * PAGE * group, largest / code)
    for i in range(VALUES_PER_SCALE):
        value = load_f32(first + 4 * i) * inverse if i < here else ZERO
        if bits == 8:
            store_i64(codes + 8 * i, rounded(value, LARGEST_CODE))
        else:
            store_i64(codes + 8 * i, half + min(rounded(value, np.float32(half)), half - 1))


@template
def store_halves(codes, low, high, address):
    """Store a byte of two 4-bit codes, with the indices ``low`` and ``high``."""
    store_i8(address, load_i64(codes + 8 * low) & 15 | (load_i64(codes + 8 * high) & 15) << 4)


@device
def fifth_bits(codes, first, step):
    """Return a byte of the fifth bits of eight codes, ``step`` apart."""
    byte = 0
    for i in range(8):
        byte |= load_i64(codes + 8 * (first + step * i)) >> 4 << i
    return byte


@template
def append_key_tiles(x, n, head, bits, block, index):
    codes = stack(8 * VALUES_PER_SCALE)
    for group in range(head // VALUES_PER_SCALE):
        quantise_group(x, n, group, bits, block + 2 * index, codes)
        tile = block + 2 * PAGE * (head // VALUES_PER_SCALE) + 64 * bits * (PAGE // 16 * group + index // 16)
        lane = tile + 4 * (index % 16)
        if bits == 8:
            for i in range(VALUES_PER_SCALE):
                store_i8(lane + 64 * (i // 4) + i % 4, load_i64(codes + 8 * i))
        else:
            for i in range(16):
                store_halves(codes, i, i + 16, lane + 64 * (i // 4) + i % 4)
        if bits == 5:
            for i in range(4):
                store_i8(lane + 256 + i, fifth_bits(codes, i, 4))


@template
def append_value_tiles(x, n, head, bits, block, index):
    codes = stack(8 * VALUES_PER_SCALE)
    for group in range(head // VALUES_PER_SCALE):
        quantise_group(x, n, group, bits, block + 2 * index, codes)
        tile = block + 2 * PAGE * (head // VALUES_PER_SCALE) + 128 * bits * (PAGE // 32 * group + index // 32)
        column = tile + 64 * (index % 32 // 4) + index % 4
        for i in range(16):
            if bits == 8:
                store_i8(column + 4 * i, load_i64(codes + 8 * i))
                store_i8(column + 512 + 4 * i, load_i64(codes + 8 * (i + 16)))
            else:
                store_halves(codes, i, i + 16, column + 4 * i)
        if bits == 5:
            for i in range(4):
                store_i8(tile + 512 + 16 * (index % 32 // 4) + 4 * i + index % 4, fifth_bits(codes, i, 4))


@template
def append_latents(x, n, head, bits, block, index):
    codes = stack(8 * VALUES_PER_SCALE)
    for group in range(head // VALUES_PER_SCALE):
        quantise_group(x, n, group, bits, block + 2 * index, codes)
        row = block + 2 * PAGE * (head // VALUES_PER_SCALE) + 4 * bits * (head // VALUES_PER_SCALE * index + group)
        for half in range(2):
            half_codes, to = codes + 128 * half, row + 2 * bits * half
            if bits == 8:
                for i in range(16):
                    store_i8(to + i, load_i64(half_codes + 8 * i))
            else:
                for i in range(8):
                    store_halves(half_codes, i, i + 8, to + i)
            if bits == 5:
                for i in range(2):
                    store_i8(to + 8 + i, fifth_bits(half_codes, 8 * i, 1))


_KEYS, _VALUES = (CPUCacheLayout(16, append, load_f16x16) for append in (append_f16_keys, append_f16_values))
_LOADS = {8: load_s8x16, 5: load_u5x16, 4: load_u4x16}


def layouts_of(cache: KVCache) -> tuple[CPUCacheLayout, CPUCacheLayout]:
    """Return the layouts of keys and of values; equal if values are part of the keys."""
    for type in cache.types:
        if type not in CACHE_TYPES:
            raise KernelError(f"the cpu backend has no cache of type {type!r}: choose one of {[*CACHE_TYPES]}")
    bits = [CODE_BITS.get(type) for type in cache.types]
    if cache.values_in_keys:
        latents = _VALUES if bits[0] is None else CPUCacheLayout(bits[0], append_latents, _LOADS[bits[0]])
        return latents, latents
    return (
        _KEYS if bits[0] is None else CPUCacheLayout(bits[0], append_key_tiles, None),
        _VALUES if bits[1] is None else CPUCacheLayout(bits[1], append_value_tiles, None),
    )
