"""How each block format's tiles are multiplied: one short template a format.

All follow one pattern.  A tile's codes are unpacked into vectors w[0] … w[7], each four columns of sixteen rows;
then, for each token, an integer dot product with 32 activations, turned to float and scaled:

    acc[i] += scale * d_i * (dot(w, q_i) - offset * sum(q_i))            (Q4_0, Q5_0, Q8_0, Q3_K, Q6_K, LUT)
    acc[i] += scale * d_i * dot(w, q_i) + minimum * d_i * sum(q_i)       (Q4_1, Q5_1, Q2_K, Q4_K, Q5_K)

where token i's activations in these columns are d_i * q_i.  The tiles are drawn in `localllm.quant.packing`, the
blocks in `localllm.quant.legacy`, `localllm.quant.kquants` and `localllm.quant.lut`.

**Activations** come in tiles too, of `TOKENS` tokens by 32 columns, so that one address serves all of a tile's
tokens.  Each token has a record of 48 bytes in it:

    0        32     36           40         44
    [ 32 q  ][ d  ][ d * sum(q) ][ -sum(q) ][ -sum of the first sixteen q ]
      int8    f32    f32           int32      int32
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from localllm.kernels.cpu.simd import (
    dot16_s8,
    dot16_u2,
    dot16_u3,
    dot16_u6,
    dot32_s8,
    dot32_u4,
    dot32_u5,
    fma,
    load_bits,
    load_bits_on_top,
    load_bits_raised,
    load_f16x16,
    load_i8x64,
    load_i32x16,
    lut_op,
    mask,
    prefetch,
    shift_left,
    shift_right,
    signed_byte,
    splat,
    splat_f32,
    splat_i32,
    to_float,
    unsigned_byte,
    zero_f32x16,
    zero_i32x16,
)
from localllm.kernels.cpu.templates import Registers, Template, device, static_range, template
from localllm.quant.iquants import IQ4_VALUES
from localllm.quant.lut import LUT_TYPES, KernelType
from localllm.quant.types import GGMLType

#: Tokens in a tile of activations, and bytes of one token's record in it.
TOKENS = 8
RECORD = 48
X_STEP = TOKENS * RECORD
D, D_SUM, NEG_SUM, NEG_SUM_FIRST = 32, 36, 40, 44

#: How far ahead of the tile that is multiplied memory is read, in bytes.  Processors that fetch ahead by themselves
#: stop at the end of each page of 4096 bytes; asked to read across it, they lose no time there.
FETCH_AHEAD = 4096

#: What is subtracted from Q3_K's six-bit scales.
SCALE_OFFSET = np.float32(32)

# -- One token: unpacked codes times the activations in the record at x ------------------------------------------


@device
def add_offset_codes(acc, scale, x, w0, w1, w2, w3, w4, w5, w6, w7):
    """acc + scale * d * (dot(w, q) - 2**SHIFT * sum(q))."""
    dot = DOT(shift_left(splat_i32(x + NEG_SUM), SHIFT), w0, w1, w2, w3, w4, w5, w6, w7, x)
    return fma(scale * splat_f32(x + D), to_float(dot), acc)


@device
def add_min_codes(acc, scale, minimum, x, w0, w1, w2, w3, w4, w5, w6, w7):
    """acc + scale * d * dot(w, q) + minimum * d * sum(q)."""
    dot = DOT(zero_i32x16(), w0, w1, w2, w3, w4, w5, w6, w7, x)
    acc = fma(scale * splat_f32(x + D), to_float(dot), acc)
    return fma(minimum, splat_f32(x + D_SUM), acc)


@device
def add_signed_codes(acc, scale, x, w0, w1, w2, w3, w4, w5, w6, w7):
    """acc + scale * d * dot(w, q)."""
    dot = dot32_s8(zero_i32x16(), w0, w1, w2, w3, w4, w5, w6, w7, x)
    return fma(scale * splat_f32(x + D), to_float(dot), acc)


@device
def add_q6_codes(acc, first, second, x, w0, w1, w2, w3, w4, w5, w6, w7):
    """acc + first * d * (dot(w, q) - 32 * sum(q)) over columns 0 … 15, + second * … over 16 … 31."""
    neg_sum = splat_i32(x + NEG_SUM_FIRST)
    lo = dot16_u6(shift_left(neg_sum, 5), w0, w1, w2, w3, x)
    hi = dot16_u6(shift_left(splat_i32(x + NEG_SUM) - neg_sum, 5), w4, w5, w6, w7, x + 16)
    return fma(fma(second, to_float(hi), first * to_float(lo)), splat_f32(x + D), acc)


@device
def add_q3_codes(acc, first, second, x, w0, w1, w2, w3, w4, w5, w6, w7):
    """acc + first * d * (dot(w, q) - 4 * sum(q)) over columns 0 … 15, + second * … over 16 … 31."""
    neg_sum = splat_i32(x + NEG_SUM_FIRST)
    lo = dot16_u3(shift_left(neg_sum, 2), w0, w1, w2, w3, x)
    hi = dot16_u3(shift_left(splat_i32(x + NEG_SUM) - neg_sum, 2), w4, w5, w6, w7, x + 16)
    return fma(fma(second, to_float(hi), first * to_float(lo)), splat_f32(x + D), acc)


@device
def add_q2_codes(acc, first, second, first_min, second_min, x, w0, w1, w2, w3, w4, w5, w6, w7):
    """acc + d * (first * dot(w, q) - first_min * sum(q)) over columns 0 … 15, + d * … over 16 … 31."""
    lo = dot16_u2(zero_i32x16(), w0, w1, w2, w3, x)
    hi = dot16_u2(zero_i32x16(), w4, w5, w6, w7, x + 16)
    neg_sum = splat_i32(x + NEG_SUM_FIRST)
    total = fma(second, to_float(hi), first * to_float(lo))
    total = fma(first_min, to_float(neg_sum), total)
    total = fma(second_min, to_float(splat_i32(x + NEG_SUM) - neg_sum), total)
    return fma(total, splat_f32(x + D), acc)


@device
def add_signed_halves(acc, first, second, x, w0, w1, w2, w3, w4, w5, w6, w7):
    """acc + first * d * dot(w, q) over columns 0 … 15, + second * … over 16 … 31."""
    lo = dot16_s8(zero_i32x16(), w0, w1, w2, w3, x)
    hi = dot16_s8(zero_i32x16(), w4, w5, w6, w7, x + 16)
    return fma(fma(second, to_float(hi), first * to_float(lo)), splat_f32(x + D), acc)


@template
def fetch_ahead(n, place, n_bytes):
    """Begins to read what stands ahead, if the weights are for one token: reading them is then all of the time."""
    if n == 1:
        for line in static_range(-(-n_bytes // 64)):
            prefetch(place + (FETCH_AHEAD + 64 * line))


# -- Unpacking ----------------------------------------------------------------------------------------------------


@device
def load_nibbles(codes):
    """Columns 0 … 15 from the low nibbles of four vectors, 16 … 31 from the high ones."""
    for v in static_range(4):
        w[v] = load_bits(codes + 64 * v, 0, 15)
        w[v + 4] = load_bits(codes + 64 * v, 4, 15)
    return (*w[0:8],)


@device
def load_codes(codes, planes):
    """The same, and for five-bit codes the fifth: bit v of the bytes at ``planes`` is that of vector v's codes."""
    w[0:8] = load_nibbles(codes)
    if BITS == 5:
        for v in static_range(8):
            w[v] = w[v] | load_bits_on_top(planes, v, 1)
    return (*w[0:8],)


@device
def load_k_codes(codes, planes, half, n):
    """The low or the high nibbles of eight vectors, and for five-bit codes bit n of eight others."""
    for v in static_range(8):
        w[v] = load_bits(codes + 64 * v, 4 * half, 15)
        if BITS == 5:
            w[v] = w[v] | load_bits_on_top(planes + 64 * v, n, 1)
    return (*w[0:8],)


@device
def load_q6_codes(low, high, k):
    """The low or the high nibbles of eight vectors, and on top two bits from the k-th place of eight others."""
    for v in static_range(8):
        w[v] = load_bits(low + 64 * v, 4 * (k // 2), 15) | load_bits_on_top(high + 64 * v, 2 * k, 3)
    return (*w[0:8],)


@device
def load_q3_codes(low, high, k, n):
    """Two bits from the k-th place of eight vectors, and on top bit n of eight others."""
    for v in static_range(8):
        w[v] = load_bits(low + 64 * v, 2 * k, 3) | load_bits_raised(high + 64 * v, n, 1, 2)
    return (*w[0:8],)


@device
def load_q2_codes(codes, k):
    """Two bits from the k-th place of eight vectors."""
    for v in static_range(8):
        w[v] = load_bits(codes + 64 * v, 2 * k, 3)
    return (*w[0:8],)


@device
def look_up_nibbles(codes):
    """The values of codes as `load_nibbles` takes them."""
    w[0:8] = load_nibbles(codes)
    for v in static_range(8):
        w[v] = LOOK_UP(w[v])
    return (*w[0:8],)


# -- Formats of 32 columns ----------------------------------------------------------------------------------------


@template
def tile_q45_0(acc: Registers, n, tile, x):
    """Q4_0 and Q5_0."""
    fetch_ahead(n, tile, TILE_BYTES)
    w[0:8] = load_codes(tile + CODES, tile + 32)
    scale = load_f16x16(tile)
    for i in static_range(n):
        acc[i] = add_offset_codes(acc[i], scale, x + RECORD * i, *w[0:8])


@template
def tile_q45_1(acc: Registers, n, tile, x):
    """Q4_1 and Q5_1."""
    fetch_ahead(n, tile, TILE_BYTES)
    w[0:8] = load_codes(tile + CODES, tile + 64)
    scale = load_f16x16(tile)
    minimum = load_f16x16(tile + 32)
    for i in static_range(n):
        acc[i] = add_min_codes(acc[i], scale, minimum, x + RECORD * i, *w[0:8])


@template
def tile_q8_0(acc: Registers, n, tile, x):
    fetch_ahead(n, tile, TILE_BYTES)
    scale = load_f16x16(tile)
    for v in static_range(8):
        w[v] = load_i8x64(tile + (32 + 64 * v))
    for i in static_range(n):
        acc[i] = add_signed_codes(acc[i], scale, x + RECORD * i, *w[0:8])


@template
def tile_lut_32(acc: Registers, n, tile, x):
    fetch_ahead(n, tile, TILE_BYTES)
    w[0:8] = look_up_nibbles(tile + 32)
    scale = load_f16x16(tile)
    for i in static_range(n):
        acc[i] = add_signed_codes(acc[i], scale, x + RECORD * i, *w[0:8])


@template
def tile_lut_16(acc: Registers, n, tile, x):
    fetch_ahead(n, tile, TILE_BYTES)
    w[0:8] = look_up_nibbles(tile + 64)
    first = load_f16x16(tile)
    second = load_f16x16(tile + 32)
    for i in static_range(n):
        acc[i] = add_signed_halves(acc[i], first, second, x + RECORD * i, *w[0:8])


# -- K formats of 256 columns -------------------------------------------------------------------------------------


@template
def tile_q45_k(acc: Registers, n, tile, x):
    """Four pairs of 32 columns: the low and the high nibbles of the same eight vectors.

    Each 32 columns have a six-bit scale and minimum.  Of the twelve bytes that hold them, a, b and c are the
    vectors of words 0, 1 and 2: byte j of a and b has the scale and minimum of columns 32 j …, and the upper two
    bits of those of columns 128 + 32 j …, whose lower four bits are c's nibbles.
    """
    d = load_f16x16(tile)
    d_min = zero_f32x16() - load_f16x16(tile + 32)
    a = load_i32x16(tile + 64)
    b = load_i32x16(tile + 128)
    c = load_i32x16(tile + 192)
    scales = mask(a, 0x3F3F3F3F)
    minima = mask(b, 0x3F3F3F3F)
    for pair in range(4):
        fetch_ahead(n, tile + TILE_BYTES // 4 * pair, TILE_BYTES // 4)
        codes = tile + CODES + 512 * pair
        for half in static_range(2):
            w[0:8] = load_k_codes(codes, tile + 256, half, 2 * pair + half)
            scale = d * unsigned_byte(scales, half)
            minimum = d_min * unsigned_byte(minima, half)
            for i in static_range(n):
                acc[i] = add_min_codes(acc[i], scale, minimum, x + RECORD * i, *w[0:8])
            x += X_STEP
        if pair == 1:
            scales = mask(c, 0x0F0F0F0F) | mask(shift_right(a, 2), 0x30303030)
            minima = mask(shift_right(c, 4), 0x0F0F0F0F) | mask(shift_right(b, 2), 0x30303030)
        else:
            scales = shift_right(scales, 16)
            minima = shift_right(minima, 16)


@template
def tile_q6_k(acc: Registers, n, tile, x):
    """Two halves of 128 columns, each of four times 32 with two signed scales.

    The four times 32 columns take their lower four bits from the low nibbles of two runs of eight vectors and then
    from the high ones, and their upper two bits from the four places in a byte of one run.
    """
    d = load_f16x16(tile)
    for half in range(2):
        low = tile + 288 + 1024 * half
        high = tile + 2336 + 512 * half
        for k in static_range(4):
            fetch_ahead(n, tile + TILE_BYTES // 8 * (4 * half + k), TILE_BYTES // 8)
            w[0:8] = load_q6_codes(low + 512 * (k % 2), high, k)
            words = load_i32x16(tile + (32 + 64 * (k // 2)) + 128 * half)
            first = d * signed_byte(words, 2 * (k % 2))
            second = d * signed_byte(words, 2 * (k % 2) + 1)
            for i in static_range(n):
                acc[i] = add_q6_codes(acc[i], first, second, x + RECORD * i, *w[0:8])
            x += X_STEP


@template
def tile_q3_k(acc: Registers, n, tile, x):
    """Four pairs of 32 columns: two of each 128 columns' four places of two bits in a byte.

    The third bits of all 256 are the eight bits of eight other vectors.  Of the twelve bytes that hold the scales, a,
    b and c are the vectors of words 0, 1 and 2: the low nibbles of a, b and then the high ones are the lower four
    bits of a pair's four scales, and the pairs of bits in c the upper two.
    """
    d = load_f16x16(tile)
    a = load_i32x16(tile + 32)
    b = load_i32x16(tile + 96)
    c = load_i32x16(tile + 160)
    for pair in range(4):
        fetch_ahead(n, tile + TILE_BYTES // 4 * pair, TILE_BYTES // 4)
        low = tile + 736 + 512 * (pair // 2)
        scales = mask(a, 0x0F0F0F0F) | shift_left(mask(c, 0x03030303), 4)
        for half in static_range(2):
            w[0:8] = load_q3_codes(low, tile + 224, 2 * (pair % 2) + half, 2 * pair + half)
            first = d * (unsigned_byte(scales, 2 * half) - splat(SCALE_OFFSET))
            second = d * (unsigned_byte(scales, 2 * half + 1) - splat(SCALE_OFFSET))
            for i in static_range(n):
                acc[i] = add_q3_codes(acc[i], first, second, x + RECORD * i, *w[0:8])
            x += X_STEP
        used = a
        a = b
        b = shift_right(used, 4)
        c = shift_right(c, 2)


@template
def tile_q2_k(acc: Registers, n, tile, x):
    """Four pairs of 32 columns: two of each 128 columns' four places in a byte.

    A pair's word holds a byte for each 16 columns, whose nibbles are their scale and their minimum.
    """
    d = load_f16x16(tile)
    d_min = load_f16x16(tile + 32)
    for pair in range(4):
        fetch_ahead(n, tile + TILE_BYTES // 4 * pair, TILE_BYTES // 4)
        codes = tile + 320 + 512 * (pair // 2)
        words = load_i32x16(tile + 64 + 64 * pair)
        scales = mask(words, 0x0F0F0F0F)
        minima = mask(shift_right(words, 4), 0x0F0F0F0F)
        for half in static_range(2):
            w[0:8] = load_q2_codes(codes, 2 * (pair % 2) + half)
            first = d * unsigned_byte(scales, 2 * half)
            second = d * unsigned_byte(scales, 2 * half + 1)
            first_min = d_min * unsigned_byte(minima, 2 * half)
            second_min = d_min * unsigned_byte(minima, 2 * half + 1)
            for i in static_range(n):
                acc[i] = add_q2_codes(acc[i], first, second, first_min, second_min, x + RECORD * i, *w[0:8])
            x += X_STEP


@dataclass(frozen=True)
class Tile:
    """A format's template and the constants it is specialised with."""

    add: Template
    constants: tuple[tuple[str, Any], ...] = ()


def _codes(bits: int, place: int) -> tuple[tuple[str, Any], ...]:
    """Constants of codes of four or five bits, of which four begin at byte ``place`` of a tile."""
    return (("BITS", bits), ("CODES", place), ("DOT", dot32_u4 if bits == 4 else dot32_u5))


def _lut_tile(table: Sequence[int], n_scales: int) -> Tile:
    return Tile(tile_lut_32 if n_scales == 1 else tile_lut_16, (("LOOK_UP", lut_op(table)),))


TILES: dict[KernelType, Tile] = {
    GGMLType.Q4_0: Tile(tile_q45_0, (*_codes(4, 32), ("SHIFT", 3))),
    GGMLType.Q4_1: Tile(tile_q45_1, _codes(4, 64)),
    GGMLType.Q5_0: Tile(tile_q45_0, (*_codes(5, 96), ("SHIFT", 4))),
    GGMLType.Q5_1: Tile(tile_q45_1, _codes(5, 128)),
    GGMLType.Q8_0: Tile(tile_q8_0),
    GGMLType.IQ4_NL: _lut_tile(IQ4_VALUES.tolist(), 1),
    **{t: _lut_tile(t.table, t.n_scales) for t in LUT_TYPES},
    GGMLType.Q2_K: Tile(tile_q2_k),
    GGMLType.Q3_K: Tile(tile_q3_k),
    GGMLType.Q4_K: Tile(tile_q45_k, _codes(4, 256)),
    GGMLType.Q5_K: Tile(tile_q45_k, _codes(5, 768)),
    GGMLType.Q6_K: Tile(tile_q6_k),
}
