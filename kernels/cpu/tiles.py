"""How each block format's tiles are multiplied: one short template a format.

All follow one pattern.  A tile's codes are unpacked into vectors w[0] … w[7], each four columns of sixteen rows;
then, for each token, an integer dot product with 32 activations, turned to float and scaled:

    acc[i] += scale * d_i * (dot(w, q_i) - offset * sum(q_i))            (Q4_0, Q5_0, Q8_0, Q6_K)
    acc[i] += scale * d_i * dot(w, q_i) + minimum * d_i * sum(q_i)       (Q4_1, Q5_1, Q4_K, Q5_K)

where token i's activations in these columns are d_i * q_i.  The tiles are drawn in `localllm.quant.packing`, the
blocks in `localllm.quant.legacy` and `localllm.quant.kquants`.

**Activations** come in tiles too, of `TOKENS` tokens by 32 columns, so that one address serves all of a tile's
tokens.  Each token has a record of 48 bytes in it:

    0        32     36           40         44
    [ 32 q  ][ d  ][ d * sum(q) ][ -sum(q) ][ -sum of the first sixteen q ]
      int8    f32    f32           int32      int32
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localllm.kernels.cpu.simd import (
    bit_to_16,
    dot16_u6,
    dot32_s8,
    dot32_u4,
    dot32_u5,
    fma,
    load_f16x16,
    load_i8x64,
    load_i32x16,
    mask,
    shift_left,
    shift_mask,
    shift_right,
    signed_byte,
    splat_f32,
    splat_i32,
    to_float,
    unsigned_byte,
    zero_f32x16,
    zero_i32x16,
)
from localllm.kernels.cpu.templates import Registers, Template, static_range, template
from localllm.quant.types import GGMLType

#: Tokens in a tile of activations, and bytes of one token's record in it.
TOKENS = 8
RECORD = 48
X_STEP = TOKENS * RECORD
D, D_SUM, NEG_SUM, NEG_SUM_FIRST = 32, 36, 40, 44

# -- Dot products of unpacked codes with each token's activations; x is the address of the first token's record ----


@template
def add_offset_codes(acc: Registers, n, w: Registers, scale, x, shift):
    """acc += scale * d * (dot(w, q) - 2**shift * sum(q))."""
    for i in static_range(n):
        start[0] = shift_left(splat_i32(x + (RECORD * i + NEG_SUM)), shift)
        dot[0] = DOT(start[0], w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], x + RECORD * i)
        acc[i] = fma(scale * splat_f32(x + (RECORD * i + D)), to_float(dot[0]), acc[i])


@template
def add_min_codes(acc: Registers, n, w: Registers, scale, minimum, x):
    """acc += scale * d * dot(w, q) + minimum * d * sum(q)."""
    for i in static_range(n):
        dot[0] = DOT(zero_i32x16(), w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], x + RECORD * i)
        acc[i] = fma(scale * splat_f32(x + (RECORD * i + D)), to_float(dot[0]), acc[i])
        acc[i] = fma(minimum, splat_f32(x + (RECORD * i + D_SUM)), acc[i])


# -- Formats of 32 columns ----------------------------------------------------------------------------------------


@template
def unpack_nibbles(w: Registers, codes):
    """Columns 0 … 15 lie in the low nibbles of four vectors, 16 … 31 in the high ones."""
    for v in static_range(4):
        q[v] = load_i8x64(codes + 64 * v)
        w[v] = shift_mask(q[v], 0, 15)
        w[v + 4] = shift_mask(q[v], 4, 15)


@template
def add_fifth_bits(w: Registers, planes):
    """Bit v of each byte is the fifth bit of vector v's code."""
    plane = load_i8x64(planes)
    for v in static_range(8):
        w[v] = w[v] | shift_mask(plane, v - 4, 16)


@template
def tile_q4_0(acc: Registers, n, tile, x):
    unpack_nibbles(w, tile + 32)
    add_offset_codes(acc, n, w, load_f16x16(tile), x, 3)


@template
def tile_q4_1(acc: Registers, n, tile, x):
    unpack_nibbles(w, tile + 64)
    add_min_codes(acc, n, w, load_f16x16(tile), load_f16x16(tile + 32), x)


@template
def tile_q5_0(acc: Registers, n, tile, x):
    unpack_nibbles(w, tile + 96)
    add_fifth_bits(w, tile + 32)
    add_offset_codes(acc, n, w, load_f16x16(tile), x, 4)


@template
def tile_q5_1(acc: Registers, n, tile, x):
    unpack_nibbles(w, tile + 128)
    add_fifth_bits(w, tile + 64)
    add_min_codes(acc, n, w, load_f16x16(tile), load_f16x16(tile + 32), x)


@template
def tile_q8_0(acc: Registers, n, tile, x):
    scale = load_f16x16(tile)
    for v in static_range(8):
        w[v] = load_i8x64(tile + (32 + 64 * v))
    for i in static_range(n):
        dot[0] = dot32_s8(zero_i32x16(), w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], x + RECORD * i)
        acc[i] = fma(scale * splat_f32(x + (RECORD * i + D)), to_float(dot[0]), acc[i])


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
        for v in static_range(8):
            q[v] = load_i8x64(tile + (CODES + 64 * v) + 512 * pair)
        for half in static_range(2):
            for v in static_range(8):
                w[v] = shift_mask(q[v], 4 * half, 15)
                if BITS == 5:
                    w[v] = w[v] | bit_to_16(load_i8x64(tile + (256 + 64 * v)), 2 * pair + half)
            add_min_codes(acc, n, w, d * unsigned_byte(scales, half), d_min * unsigned_byte(minima, half), x)
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
            for v in static_range(8):
                w[v] = shift_mask(load_i8x64(low + (512 * (k % 2) + 64 * v)), 4 * (k // 2), 15)
                w[v] = w[v] | shift_mask(load_i8x64(high + 64 * v), 2 * k - 4, 48)
            words = load_i32x16(tile + (32 + 64 * (k // 2)) + 128 * half)
            first = d * signed_byte(words, 2 * (k % 2))
            second = d * signed_byte(words, 2 * (k % 2) + 1)
            for i in static_range(n):
                minus_first = splat_i32(x + (RECORD * i + NEG_SUM_FIRST))
                minus_second = splat_i32(x + (RECORD * i + NEG_SUM)) - minus_first
                lo = dot16_u6(shift_left(minus_first, 5), w[0], w[1], w[2], w[3], x + RECORD * i)
                hi = dot16_u6(shift_left(minus_second, 5), w[4], w[5], w[6], w[7], x + (RECORD * i + 16))
                both = fma(second, to_float(hi), first * to_float(lo))
                acc[i] = fma(both, splat_f32(x + (RECORD * i + D)), acc[i])
            x += X_STEP


@dataclass(frozen=True)
class Tile:
    """A format's template and the constants it is specialised with."""

    add: Template
    constants: tuple[tuple[str, Any], ...] = ()


TILES = {
    GGMLType.Q4_0: Tile(tile_q4_0, (("DOT", dot32_u4),)),
    GGMLType.Q4_1: Tile(tile_q4_1, (("DOT", dot32_u4),)),
    GGMLType.Q5_0: Tile(tile_q5_0, (("DOT", dot32_u5),)),
    GGMLType.Q5_1: Tile(tile_q5_1, (("DOT", dot32_u5),)),
    GGMLType.Q8_0: Tile(tile_q8_0),
    GGMLType.Q4_K: Tile(tile_q45_k, (("BITS", 4), ("CODES", 256), ("DOT", dot32_u4))),
    GGMLType.Q5_K: Tile(tile_q45_k, (("BITS", 5), ("CODES", 768), ("DOT", dot32_u5))),
    GGMLType.Q6_K: Tile(tile_q6_k),
}
