"""Multiplication of tiles of each block format: one short template per format.

A tile is unpacked block by block.  A block is 32 columns of sixteen rows: vectors w[0] … w[7] with the codes, four
columns each, and vectors s[0] … with the rows' scales.  The kind of block of a format defines the scales:

    Codes      s = scale, minimum       acc += (scale * dot(w, q) + minimum * sum(q)) * d
    Scaled     s = whole scale, unit,   acc += (unit * (scale * dot(w, q)) + minimum * sum(q)) * d
                   minimum
    Signed     s = scale                acc += (scale * dot(w, q)) * d
    Halves     s = two scales           acc += (first * dot(w, q) + second * dot(w, q)) * d
    Sixteens   s = two whole scales,    acc += (unit * (first * (dot(w, q) - offset * sum(q))
                   both times the              + second * (dot(w, q) - offset * sum(q)))) * d
                   offset, unit
    Minima     s = two whole scales,    acc += (unit * (first * dot(w, q) + second * dot(w, q))
                   both minima, unit,          + unit of minima * (first * sum(q) + second * sum(q))) * d
                   unit of minima

where a token's activations in these columns are d * q, and q is in -127 … 127; with two scales, each covers 16 of the
columns.  Codes are unsigned except in Signed and Halves; an offset of a format's codes is part of its minima, if the
format has minima.  Whole scales are stored twice in each lane of s, as 16-bit numbers.  The layout of tiles is shown
in `localllm.quant.packing`, the blocks of the files in `localllm.quant.legacy`, `localllm.quant.kquants` and
`localllm.quant.lut`.

For at most one tile of tokens, a block is multiplied when it is unpacked (`take`).  For more tokens it is first
stored, and then multiplied with all tiles of tokens (`multiply_block`):

    0          512          576
    [ w[0] … w[7] ][ s[0] ][ s[1] ] …
      64 int8 each  16 x 32 bits

**Activations** are stored in tiles too, of `TOKENS` tokens by 32 columns, so that one address serves all tokens of a
tile.  A tile contains a record of 48 bytes for each token:

    0        32     36         40                   42
    [ 32 q  ][ d  ][ sum(q) ][ sum of the first 16 ][ sum of the last 16 ]
      int8    f32    f32       int16                  int16

If an instruction multiplies matrices of bytes (Arm's i8mm), the records of two tokens are interleaved by 8 bytes.
The second record starts 8 bytes after the first one:

    0       16      32      48      64     68         80                   82
    [ 8 q ] [ 8 q ] [ 8 q ] [ 8 q ] [ d  ][ sum(q) ]  [ sum of the first 16 ][ sum of the last 16 ]

Products of codes and activations, and their sums, are exact.

In most language models a few columns are far larger than all others, and most of a product's error comes from blocks
with these columns.  If a block's scale is greater than `OUTLIER` times the row's mean scale, its rounding error,
x - d * q, is the block's *rest*: it is also rounded and multiplied.  Products of rests have a separate sum, added at
the end, so that a token's bits do not depend on when its rests are multiplied.  Flags follow the records of a tile of
activations, one word per `SLAB` blocks: bit b of byte i is set if token i has a rest in block b.  The records of
rests follow, undefined for blocks without a rest:

    0                n_blocks * 384
    [ n_blocks × 8 records ][ 64-bit flags of blocks 0 … 7 ][ 8 … 15 ] … [ n_blocks × 8 records of rests ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from localllm.kernels.cpu.codes import (
    high_number,
    load_bit_packed,
    load_bits,
    low_number,
    lut_op,
    signed_byte_pair,
    signed_byte_twice,
    subtract_from_bytes,
    unsigned_byte,
    unsigned_byte_pair,
    unsigned_byte_twice,
)
from localllm.kernels.cpu.dots import (
    RECORD,
    load_of_slab,
    load_part_of_codes,
    load_parts,
    load_sum,
    load_sums,
    load_unit,
    multiply_pairs,
    record_dot16_s8,
    record_dot32_s8,
    record_dot32_u4,
    record_dot32_u5,
    scaled_dot16_u2,
    scaled_dot16_u3,
    scaled_dot16_u6,
    scaled_dot32_u4,
    scaled_dot32_u5,
    second_half,
    store_parts,
    store_two_of_slab,
    sums_place,
    token_place,
)
from localllm.kernels.cpu.simd import *
from localllm.kernels.cpu.templates import Registers, Template, device, static_range, template
from localllm.quant.iquants import IQ4_VALUES
from localllm.quant.lut import LUT_TYPES, KernelType
from localllm.quant.types import GGMLType

#: Tokens in a tile of activations.
TOKENS = 8
#: Bytes between the blocks of a tile of activations.
X_STEP = TOKENS * RECORD
#: Blocks of 32 columns in a slab: the blocks of one tile of the K formats.
SLAB = 8

#: Blocks whose scale is greater than this multiple of the row's mean scale have a rest: about 0.5% of the products of
#: SmolLM2 135M, 0.9% of the products of Gemma 3 270M.
OUTLIER = np.float32(6)
#: Bit 0 of each byte.
EACH_BYTE = np.int64(0x0101010101010101)

#: Bytes of an unpacked block's codes, and of each following vector of scales.
CODE_BYTES, SCALE_BYTES = 512, 64

#: Prefetch distance in bytes, from the tile that is unpacked.  Hardware prefetchers stop at the end of each page of
#: 4096 bytes; prefetching across it avoids the delay.
FETCH_AHEAD = 4096

# -- A block times the activations in the record at x --------------------------------------------------


@device
def add_codes(acc, x, scale, minimum, w0, w1, w2, w3, w4, w5, w6, w7):
    """Unsigned codes with a scale and a minimum; DOT is the product for their width."""
    total = scale * to_float(DOT(zero_i32x16(), w0, w1, w2, w3, w4, w5, w6, w7, x))
    total = fma(minimum, load_sum(x), total)
    return fma(total, load_unit(x), acc)


@device
def add_scaled(acc, x, scale, unit, minimum, w0, w1, w2, w3, w4, w5, w6, w7):
    """Unsigned codes with a whole scale, in units of ``unit``, and a minimum."""
    total = DOT(unit, as_int(scale), w0, w1, w2, w3, w4, w5, w6, w7, x)
    total = fma(minimum, load_sum(x), total)
    return fma(total, load_unit(x), acc)


@device
def add_signed(acc, x, scale, w0, w1, w2, w3, w4, w5, w6, w7):
    """Signed bytes with a scale."""
    sum_x = to_int_rounded(load_sum(x))
    total = scale * to_float(record_dot32_s8(zero_i32x16(), w0, w1, w2, w3, w4, w5, w6, w7, x, sum_x))
    return fma(total, load_unit(x), acc)


@device
def add_halves(acc, x, first, second, w0, w1, w2, w3, w4, w5, w6, w7):
    """Signed bytes with one scale per sixteen columns."""
    sums = load_sums(x)
    lo = record_dot16_s8(zero_i32x16(), w0, w1, w2, w3, x, low_number(sums))
    hi = record_dot16_s8(zero_i32x16(), w4, w5, w6, w7, second_half(x), high_number(sums))
    return fma(fma(second, to_float(hi), first * to_float(lo)), load_unit(x), acc)


@device
def add_sixteens(acc, x, first, second, offsets, unit, w0, w1, w2, w3, w4, w5, w6, w7):
    """Unsigned codes, minus an offset, with one whole scale per sixteen columns, in units of ``unit``."""
    sums = sums_place(x)
    total = DOT(unit, as_int(first), as_int(second), w0, w1, w2, w3, w4, w5, w6, w7, x, as_int(offsets), sums)
    return fma(total, load_unit(x), acc)


@device
def add_minima(acc, x, first, second, minima, unit, min_unit, w0, w1, w2, w3, w4, w5, w6, w7):
    """Unsigned codes with a whole scale and a whole minimum per sixteen columns, and units of both."""
    total = DOT(unit, as_int(first), as_int(second), w0, w1, w2, w3, w4, w5, w6, w7, x)
    total = fma(min_unit, to_float(multiply_pairs(as_int(minima), load_sums(x))), total)
    return fma(total, load_unit(x), acc)


@dataclass(frozen=True)
class BlockKind:
    """A kind of block: the operation that adds its product with a token to a sum, and its number of scale vectors."""

    add: Template
    n_scales: int

    @property
    def n_bytes(self) -> int:
        return CODE_BYTES + SCALE_BYTES * self.n_scales


CODES, SCALED, SIGNED = BlockKind(add_codes, 2), BlockKind(add_scaled, 3), BlockKind(add_signed, 1)
HALVES, SIXTEENS, MINIMA = BlockKind(add_halves, 2), BlockKind(add_sixteens, 4), BlockKind(add_minima, 5)

# -- Blocks.  ADD, N_SCALES: constants of the format's kind of block -----------------------------------------------


@template
def take(acc: Registers, n, address, flags, rests, rest_sums, s: Registers, w: Registers):
    """Multiply a block with n tokens of the tile of activations at ``address``, or store it there if n is 0.

    flags: bit 0 of byte i is set if token i has a rest, ``rests`` bytes after its record.  Products of rests are
    added to the sums in memory at ``rest_sums``.
    """
    if n > 0:  # rests first: after the sums, the compiler would delay them and spill the loaded codes
        add_rests(n, address + rests, flags, rest_sums, s, w)
    for i in static_range(n):
        acc[i] = ADD(acc[i], address + token_place(i), *s[0:N_SCALES], *w[0:8])
    if n == 0:
        for v in static_range(4):
            store_two_of_slab(address + 128 * v, w[2 * v], w[2 * v + 1], SLAB_OFFSET if QUARTERS else 0)
        for v in static_range(N_SCALES):
            store_f32x16(address + (CODE_BYTES + SCALE_BYTES * v), s[v])


@template
def add_rests(n, records, flags, rest_sums, s: Registers, w: Registers):
    """Multiply a block with the rests at ``records`` of those among n tokens that have a rest."""
    tokens = flags & (EACH_BYTE >> (64 - 8 * n))
    while tokens != 0:
        i = trailing_zeros(tokens) >> 3
        tokens &= tokens - 1
        total = rest_sums + 64 * i
        store_f32x16(total, ADD(load_f32x16(total), records + token_place(i), *s[0:N_SCALES], *w[0:8]))


@template
def multiply_rests(slab, x, flags, rest_sums):
    """Multiply the stored blocks at ``slab`` with all rests of the tile of tokens at x.

    flags: bit b of byte i is set if token i has a rest in block b.  Most tokens have rests in the same blocks.
    """
    while flags != 0:
        blocks = flags | flags >> 32
        blocks |= blocks >> 16
        b = trailing_zeros(blocks | blocks >> 8)  # in ascending order, so that sums do not depend on other tokens
        tokens = (flags >> b) & EACH_BYTE
        flags ^= tokens << b
        block = slab + b * BLOCK_BYTES
        for v in static_range(8):
            w[v] = load_of_slab(block + 128 * (v // 2), v % 2, SLAB_OFFSET if QUARTERS else 0)
        for v in static_range(N_SCALES):
            s[v] = load_f32x16(block + (CODE_BYTES + SCALE_BYTES * v))
        add_rests(TOKENS, x + b * X_STEP, tokens, rest_sums, s, w)


@device
def x_tile_bytes(n_blocks):
    """Return the bytes of a tile of activations; its second ``n_blocks * X_STEP`` bytes are the records of rests."""
    return n_blocks * (2 * X_STEP) + (n_blocks + SLAB - 1) // SLAB * 8


@template
def multiply_block(acc: Registers, block, x, ahead):
    """acc[i] += the stored block at ``block`` times token i of the tile of activations at x.

    Prefetches from ``ahead``, one cache line per token.
    """
    for v in static_range(8):
        w[v] = load_i8x64(block + 64 * v)
    for v in static_range(N_SCALES):
        s[v] = load_f32x16(block + (CODE_BYTES + SCALE_BYTES * v))
    for i in static_range(TOKENS):
        prefetch(ahead + 64 * i)
        acc[i] = ADD(acc[i], x + token_place(i), *s[0:N_SCALES], *w[0:8])


@template
def multiply_quarter(acc: Registers, block, x, ahead):
    """`multiply_block` for four rows: acc[0] has the sums of four tokens, acc[1] the sums of the other four.

    For processors on which a vector fills four registers: a quarter of the block fits the registers next to the sums.
    """
    for v in static_range(8):
        w[v] = load_part_of_codes(block + 64 * v, 4)
    for v in static_range(N_SCALES):
        s[v] = load_parts(block + (CODE_BYTES + SCALE_BYTES * v), 0, 4)
    for i in static_range(TOKENS // 4):
        prefetch(ahead + 64 * i)
        acc[i] = ADD_FOUR(acc[i], x + 4 * RECORD * i, *s[0:N_SCALES], *w[0:8])


@template
def multiply_half(sums, block, x, ahead):
    """Multiply eight rows of a block with the tile of tokens at x, and add the products to the sums in memory.

    For processors whose vectors fill two of sixteen registers: the codes of eight rows fill eight registers.
    """
    for v in static_range(8):
        w[v] = load_part_of_codes(block + 64 * v, 2)
    for v in static_range(N_SCALES):
        s[v] = load_parts(block + (CODE_BYTES + SCALE_BYTES * v), 0, 2)
    for i in static_range(TOKENS // 2):
        prefetch(ahead + 64 * i)
        total = load_parts(sums + 128 * i, 64, 2)
        store_parts(sums + 128 * i, 64, 2, ADD_TWO(total, x + 2 * RECORD * i, *s[0:N_SCALES], *w[0:8]))


@template
def fetch_ahead(address, n_bytes):
    """Prefetch the data `FETCH_AHEAD` bytes after ``address``."""
    for line in static_range(-(-n_bytes // 64)):
        prefetch(address + (FETCH_AHEAD + 64 * line))


# -- Codes --------------------------------------------------------------------------------------------------------


@device
def load_codes(codes):
    """Load the codes of 32 columns: bytes, nibbles, or bit-packed.  LOOK_UP returns their values in a table."""
    if BITS == 8:
        for v in static_range(8):
            w[v] = load_i8x64(codes + 64 * v)
    elif BITS == 4:
        for v in static_range(4):
            w[v] = load_bits(codes + 64 * v, 0, 15)  # columns 0 … 15
            w[v + 4] = load_bits(codes + 64 * v, 4, 15)
    else:
        for v in static_range(8):
            w[v] = load_bit_packed(codes, v, BITS)
    if LOOK_UP:
        for v in static_range(8):
            w[v] = LOOK_UP(w[v])
    return (*w[0:8],)


@device
def load_k_codes(codes, block):
    """Load the codes of columns 32 block …: bit-packed, or the low and then the high nibbles of eight vectors."""
    if BITS == 4:
        for v in static_range(8):
            w[v] = load_bits(codes + (512 * (block // 2) + 64 * v), 4 * (block % 2), 15)
    else:
        w[0:8] = load_codes(codes + 64 * BITS * block)
    return (*w[0:8],)


@device
def load_q2_codes(codes, k):
    """Load the k-th pair of bits of eight vectors."""
    for v in static_range(8):
        w[v] = load_bits(codes + 64 * v, 2 * k, 3)
    return (*w[0:8],)


# -- Formats of 32 columns ----------------------------------------------------------------------------------------


@template
def unpack_32(acc: Registers, n, tile, address, step, flags, rests, rest_sums):
    """One or two vectors of float16 scales, and the codes.  A second vector contains minima, or scales of the last
    sixteen columns.
    """
    fetch_ahead(tile, TILE_BYTES)
    w[0:8] = load_codes(tile + (TILE_BYTES - 64 * BITS))
    s[0] = load_f16x16(tile)
    if TILE_BYTES - 64 * BITS > 32:
        s[1] = load_f16x16(tile + 32)
    elif N_SCALES > 1:
        s[1] = splat(OFFSET) * s[0]
    take(acc, n, address, flags, rests, rest_sums, s, w)


# -- K formats of 256 columns -------------------------------------------------------------------------------------


@template
def unpack_q45_k(acc: Registers, n, tile, address, step, flags, rests, rest_sums):
    """Every 32 columns have a six-bit scale and minimum.

    a, b and c are the vectors of words 0, 1 and 2 of the twelve bytes of scales.  Byte j of a and b contains the
    scale and the minimum of columns 32 j …, and the upper two bits of the scale and minimum of columns 128 + 32 j …,
    whose lower four bits are the nibbles of c.
    """
    d = load_f16x16(tile)
    d_min = zero_f32x16() - load_f16x16(tile + 32)
    a = load_i32x16(tile + 64)
    b = load_i32x16(tile + 128)
    c = load_i32x16(tile + 192)
    scales = mask(a, 0x3F3F3F3F)
    minima = mask(b, 0x3F3F3F3F)
    for four in range(2):
        for pair in range(2 * four, 2 * four + 2):
            fetch_ahead(tile + TILE_BYTES // 4 * pair, TILE_BYTES // 4)
            for half in static_range(2):
                w[0:8] = load_k_codes(tile + 256, 2 * pair + half)
                s[0] = as_float(unsigned_byte_twice(scales, half))
                s[1] = d
                s[2] = d_min * to_float(unsigned_byte(minima, half))
                take(acc, n, address, flags, rests, rest_sums, s, w)
                address += step
                flags >>= 1
            scales = shift_right(scales, 16)
            minima = shift_right(minima, 16)
        scales = mask(c, 0x0F0F0F0F) | mask(shift_right(a, 2), 0x30303030)
        minima = mask(shift_right(c, 4), 0x0F0F0F0F) | mask(shift_right(b, 2), 0x30303030)


@template
def load_sixteens(s: Registers, d, scales, n):
    """Load the scales of a `SIXTEENS` block; bytes n and n + 1 of each word are the whole scales."""
    s[0] = as_float(signed_byte_twice(scales, n))
    s[1] = as_float(signed_byte_twice(scales, n + 1))
    s[2] = as_float(signed_byte_pair(scales, n, LOG2_OFFSET))
    s[3] = d


@template
def unpack_q6_k(acc: Registers, n, tile, address, step, flags, rests, rest_sums):
    """Every 32 columns have two signed scales; a word contains four scales."""
    d = load_f16x16(tile)
    for pair in range(4):
        words = load_i32x16(tile + 32 + 64 * pair)
        for half in static_range(2):
            fetch_ahead(tile + TILE_BYTES // 8 * (2 * pair + half), TILE_BYTES // 8)
            w[0:8] = load_codes(tile + (288 + 384 * half) + 768 * pair)
            load_sixteens(s, d, words, 2 * half)
            take(acc, n, address, flags, rests, rest_sums, s, w)
            address += step
            flags >>= 1


@template
def unpack_q3_k(acc: Registers, n, tile, address, step, flags, rests, rest_sums):
    """Every 32 columns have two six-bit scales with an offset of 32.

    a, b and c are the vectors of words 0, 1 and 2 of the twelve bytes of scales.  The low nibbles of a, b and then
    their high nibbles are the lower four bits of the scales of 64 columns each; the pairs of bits in c are the upper
    two bits.
    """
    d = load_f16x16(tile)
    a = load_i32x16(tile + 32)
    b = load_i32x16(tile + 96)
    c = load_i32x16(tile + 160)
    for pair in range(4):
        fetch_ahead(tile + TILE_BYTES // 4 * pair, TILE_BYTES // 4)
        scales = subtract_from_bytes(mask(a, 0x0F0F0F0F) | shift_left(mask(c, 0x03030303), 4), 32)
        for half in static_range(2):
            w[0:8] = load_codes(tile + (224 + 192 * half) + 384 * pair)
            load_sixteens(s, d, scales, 2 * half)
            take(acc, n, address, flags, rests, rest_sums, s, w)
            address += step
            flags >>= 1
        used = a
        a = b
        b = shift_right(used, 4)
        c = shift_right(c, 2)


@template
def unpack_q2_k(acc: Registers, n, tile, address, step, flags, rests, rest_sums):
    """Four pairs of 32 columns: two of the four two-bit positions in a byte, for each 128 columns.

    A pair's word contains one byte per 16 columns, whose nibbles are their scale and their minimum.
    """
    s[3] = load_f16x16(tile)
    s[4] = zero_f32x16() - load_f16x16(tile + 32)
    for pair in range(4):
        fetch_ahead(tile + TILE_BYTES // 4 * pair, TILE_BYTES // 4)
        codes = tile + 320 + 512 * (pair // 2)
        words = load_i32x16(tile + 64 + 64 * pair)
        scales = mask(words, 0x0F0F0F0F)
        minima = mask(shift_right(words, 4), 0x0F0F0F0F)
        for half in static_range(2):
            w[0:8] = load_q2_codes(codes, 2 * (pair % 2) + half)
            s[0] = as_float(unsigned_byte_twice(scales, 2 * half))
            s[1] = as_float(unsigned_byte_twice(scales, 2 * half + 1))
            s[2] = as_float(unsigned_byte_pair(minima, 2 * half))
            take(acc, n, address, flags, rests, rest_sums, s, w)
            address += step
            flags >>= 1


@dataclass(frozen=True)
class Tile:
    """Unpacking of a format's tiles."""

    unpack: Template  # unpacks a tile
    block: BlockKind  # kind of the unpacked blocks
    bits: int = 8  # bits of a code
    dot: Any = None  # product of a block's codes; None if the kind of block defines it
    offset: int = 0  # offset subtracted from codes, a power of two or 0
    look_up: Any = 0  # for formats whose codes index a table, the operation that looks up values

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "UNPACK": self.unpack,
            "ADD": self.block.add,
            "N_SCALES": self.block.n_scales,
            "BLOCK_BYTES": self.block.n_bytes,
            "BITS": self.bits,
            "DOT": self.dot,
            "LOOK_UP": self.look_up,
            "OFFSET": np.float32(-self.offset),
            # A slab for quarters stores codes minus the offset, because signed codes cost no more there.
            "SLAB_OFFSET": self.offset if self.block is SIXTEENS else 0,
            "LOG2_OFFSET": self.offset.bit_length() - 1,
        }


def _lut_tile(table: Sequence[int], n_scales: int) -> Tile:
    block = SIGNED if n_scales == 1 else HALVES
    return Tile(unpack_32, block, len(table).bit_length() - 1, look_up=lut_op(table))


TILES: dict[KernelType, Tile] = {
    GGMLType.Q4_0: Tile(unpack_32, CODES, 4, record_dot32_u4, 8),
    GGMLType.Q4_1: Tile(unpack_32, CODES, 4, record_dot32_u4),
    GGMLType.Q5_0: Tile(unpack_32, CODES, 5, record_dot32_u5, 16),
    GGMLType.Q5_1: Tile(unpack_32, CODES, 5, record_dot32_u5),
    GGMLType.Q8_0: Tile(unpack_32, SIGNED),
    GGMLType.IQ4_NL: _lut_tile(IQ4_VALUES.tolist(), 1),
    **{t: _lut_tile(t.table, t.n_scales) for t in LUT_TYPES},
    GGMLType.Q2_K: Tile(unpack_q2_k, MINIMA, 2, scaled_dot16_u2),
    GGMLType.Q3_K: Tile(unpack_q3_k, SIXTEENS, 3, scaled_dot16_u3, 4),
    GGMLType.Q4_K: Tile(unpack_q45_k, SCALED, 4, scaled_dot32_u4),
    GGMLType.Q5_K: Tile(unpack_q45_k, SCALED, 5, scaled_dot32_u5),
    GGMLType.Q6_K: Tile(unpack_q6_k, SIXTEENS, 6, scaled_dot16_u6, 32),
}
