"""Matrix products over packed tiles: y = x @ W.T (+ bias) (+ residual).

A unit of work is a group of rows.  For any number of tokens, each output is the same sum in the same order: along the
row, tile by tile.  A token decoded alone therefore gets the same bits as a token prefilled among hundreds.
"""

from __future__ import annotations

import numpy as np

from localllm.kernels.cpu.compiler import kernel
from localllm.kernels.cpu.dots import add_int16_x86, dot32_s16, load_parts, store_parts
from localllm.kernels.cpu.simd import *
from localllm.kernels.cpu.templates import device, static_range, template
from localllm.kernels.cpu.tiles import (
    FETCH_AHEAD,
    SLAB,
    TOKENS,
    X_STEP,
    fetch_ahead,
    multiply_block,
    multiply_half,
    multiply_quarter,
    multiply_rests,
    x_tile_bytes,
)

#: Tokens multiplied with a group of rows before the next group, a multiple of `TOKENS`: the activations of this many
#: tokens fit the second-level cache.
MAX_TOKENS = 64
#: Bytes of the sums of `MAX_TOKENS` tokens.  The sums of their rests follow.
REST_SUMS = 64 * MAX_TOKENS
#: At most this many tokens use a kernel for half a tile.
HALF_TILE = TOKENS // 2

#: With at most this number of tokens, unpacking a block for each tile of tokens costs less than writing it to a slab.
#: Processors that multiply a slab by halves or quarters write more than half a tile, because their registers do not
#: hold a whole block.
FEW = 2 * TOKENS

#: Groups of 16 rows in a unit of the float kernels, and columns in one of their slabs.
FLOAT_GROUPS = 2
FLOAT_SLAB = 128

#: Bytes of a token's record of 32 activations as 16-bit numbers, and offset of their scale.  Records are grouped in
#: tiles like records of bytes.  Numbers are in -8191 … 8191, so that 32 of their products can be added in 32 bits.
INT16_RECORD, INT16_SCALE = 68, 64
LARGEST_INT16 = np.float32(8191)
#: Bytes of 32 columns of sixteen rows as 16-bit numbers, and offset of the rows' scales.
INT16_BLOCK, INT16_SCALES = 1088, 1024
#: Tokens that such a slab is multiplied with: rounding it takes as long as multiplying it with twelve tokens.
INT16_TOKENS = 256
#: Blocks of weights whose largest magnitude is smaller are 0.
SMALLEST = np.float32(1e-30)


@device
def store_rows(acc, bias, residual, y, rows, offset):
    """y = acc (+ bias) (+ residual), for sixteen rows at byte ``rows`` of the bias and byte ``offset`` of y."""
    if bias != 0:
        acc = acc + load_f32x16(bias + rows)
    if residual != 0:
        acc = acc + load_f32x16(residual + offset)
    store_f32x16(y + offset, acc)


@template
def few_tokens(n, tiles, n_tiles, slab, x, sums):
    """sums = sixteen rows times n tokens of one tile of activations; each block is multiplied when it is unpacked.

    With QUARTERS, keeping unpacked codes for a token's rests would take registers from the multiplication.  The few
    tiles with rests are therefore unpacked a second time, into the slab.
    """
    for i in static_range(n):
        acc[i] = zero_f32x16()
        store_f32x16(sums + (REST_SUMS + 64 * i), zero_f32x16())
    tile = tiles
    record = x
    all_flags = x + n_tiles * (BLOCKS * X_STEP)
    rests = x_tile_bytes(n_tiles * BLOCKS) - n_tiles * (BLOCKS * X_STEP)
    for first in range(0, n_tiles * BLOCKS, BLOCKS):
        flags = load_i64(all_flags + first // SLAB * 8) >> (first % SLAB)
        if QUARTERS and n == 1 and BITS < 8:
            UNPACK(acc, n, tile, record, X_STEP, 0, 0, 0)
            flags &= (1 << BLOCKS) - 1
            if flags != 0:
                UNPACK(none, 0, opaque(tile), slab, BLOCK_BYTES, 0, 0, 0)
                multiply_rests(slab, record + rests, flags, sums + REST_SUMS)
        else:
            UNPACK(acc, n, tile, record, X_STEP, flags, rests, sums + REST_SUMS)
        tile += TILE_BYTES
        record += BLOCKS * X_STEP
    for i in static_range(n):
        store_f32x16(sums + 64 * i, acc[i] + load_f32x16(sums + (REST_SUMS + 64 * i)))


@template
def multiply_slab(sums, slab, n_blocks, x, ahead, step):
    """sums[i] += the slab's blocks times token i of the tile of activations at x.

    Prefetches from ``ahead``, ``step`` bytes per block.
    """
    if QUARTERS:
        for quarter in range(4):
            for i in static_range(TOKENS // 4):
                acc[i] = load_parts(sums + (16 * quarter + 256 * i), 64, 4)
            for b in range(n_blocks):
                lines = ahead + b * step + 128 * quarter
                multiply_quarter(acc, slab + b * BLOCK_BYTES + 16 * quarter, x + b * X_STEP, lines)
            for i in static_range(TOKENS // 4):
                store_parts(sums + (16 * quarter + 256 * i), 64, 4, acc[i])
    elif FEW_REGISTERS:
        for half in range(2):
            for b in range(n_blocks):
                block, lines = slab + b * BLOCK_BYTES + 32 * half, ahead + b * step + 256 * half
                multiply_half(sums + 32 * half, block, x + b * X_STEP, lines)
    else:
        for i in static_range(TOKENS):
            acc[i] = load_f32x16(sums + 64 * i)
        for b in range(n_blocks):
            multiply_block(acc, slab + b * BLOCK_BYTES, x + b * X_STEP, ahead + b * step)
        for i in static_range(TOKENS):
            store_f32x16(sums + 64 * i, acc[i])


@template
def many_tokens(n_tokens, tiles, n_tiles, slab, sums, x):
    """sums = sixteen rows times ``n_tokens`` tokens, whose activations are at x.

    A slab of the rows is unpacked into memory that stays in the first-level cache, and multiplied with all tiles of
    tokens.  The activations do not all fit this cache, so each multiplication prefetches the next tile of tokens.
    The last one prefetches weights, because unpacking the next slab would otherwise request them all at once.
    """
    for token in range(0, n_tokens, TOKENS):
        for i in static_range(TOKENS):
            store_f32x16(sums + 64 * (token + i), zero_f32x16())
    have_rests = np.int64(0)  # bit ``token`` belongs to the tile of tokens that starts there
    n_blocks = n_tiles * BLOCKS
    stride = x_tile_bytes(n_blocks)  # bytes of a tile of tokens
    rests = stride - n_blocks * X_STEP
    for first in range(0, n_tiles, SLAB // BLOCKS):
        n = min(SLAB // BLOCKS, n_tiles - first)
        for tile in range(n):  # into the slab, without a sum
            block = slab + tile * (BLOCKS * BLOCK_BYTES)
            UNPACK(none, 0, tiles + (first + tile) * TILE_BYTES, block, BLOCK_BYTES, 0, 0, 0)
        records, flags = x + first * (BLOCKS * X_STEP), x + n_blocks * X_STEP + first * BLOCKS // SLAB * 8
        weights = tiles + (first + n) * TILE_BYTES + FETCH_AHEAD
        for token in range(0, n_tokens, TOKENS):
            ahead, step = records + stride, X_STEP
            if token + TOKENS >= n_tokens:
                ahead, step = weights, TILE_BYTES // BLOCKS
            multiply_slab(sums + 64 * token, slab, n * BLOCKS, records, ahead, step)
            tokens_with_rests = load_i64(flags)
            if token + TOKENS > n_tokens:
                tokens_with_rests &= (np.int64(1) << (8 * (n_tokens - token))) - 1  # ignore padding tokens
            if tokens_with_rests != 0:
                rest_sums = sums + REST_SUMS + 64 * token
                if have_rests >> token & 1 == 0:
                    have_rests |= np.int64(1) << token
                    for i in static_range(TOKENS):
                        store_f32x16(rest_sums + 64 * i, zero_f32x16())
                multiply_rests(slab, records + rests, tokens_with_rests, rest_sums)
            records += stride
            flags += stride
    while have_rests != 0:
        token_sums = sums + 64 * trailing_zeros(have_rests)
        have_rests &= have_rests - 1
        for i in static_range(TOKENS):
            store_f32x16(
                token_sums + 64 * i, load_f32x16(token_sums + 64 * i) + load_f32x16(token_sums + REST_SUMS + 64 * i)
            )


@template
def multiply_tokens(n_tokens, tiles, n_tiles, slab, sums, x):
    """sums = sixteen rows times ``n_tokens`` tokens, at least two, by the fastest method for this number.

    The sums of padding tokens are undefined.
    """
    if n_tokens <= HALF_TILE:
        few_tokens(HALF_TILE, tiles, n_tiles, slab, x, sums)
    elif QUARTERS or FEW_REGISTERS:
        many_tokens(n_tokens, tiles, n_tiles, slab, sums, x)
    elif n_tokens <= FEW:
        for token in range(0, n_tokens, TOKENS):
            records = x + token // TOKENS * x_tile_bytes(n_tiles * BLOCKS)
            few_tokens(TOKENS, tiles, n_tiles, slab, records, sums + 64 * token)
    else:
        many_tokens(n_tokens, tiles, n_tiles, slab, sums, x)


@kernel
def matmul_quantised(begin, end, batch, weights, n_tiles, x, bias, residual, y, y_stride, head_units, x_head, y_head):
    """Integer products; a unit is 16 rows.

    weights: packed tiles, ``n_tiles`` per row.  x: activations in the layout of `tiles`.  bias: float32 [n] or 0.
    residual, y: float32 [T, n] with ``y_stride`` bytes per token; residual may be 0, or y itself.
    HEADS: whether every ``head_units`` units belong to one head.  Its activations start ``x_head`` bytes after the
    previous head's, and its results ``y_head`` bytes after the previous head's.
    UNPACK, ADD, N_SCALES, …: the format's (see `tiles`).  TILE_BYTES, BLOCKS: bytes of a tile, and its blocks of 32
    columns.  BLOCK_BYTES: bytes of an unpacked block.
    """
    n_tokens = load_i64(batch)
    slab = stack(SLAB * BLOCK_BYTES)
    sums = stack(2 * REST_SUMS)
    if n_tokens == 1:  # a separate path, because decoding is limited by reading the weights
        for group in range(begin, end):
            own_x, offset = x, group * 64
            if HEADS:
                own_x, offset = x + group // head_units * x_head, offset + group // head_units * y_head
            few_tokens(1, weights + group * n_tiles * TILE_BYTES, n_tiles, slab, own_x, sums)
            store_rows(load_f32x16(sums), bias, residual, y, group * 64, offset)
        return
    for first in range(0, n_tokens, MAX_TOKENS):
        n = min(MAX_TOKENS, n_tokens - first)
        records = x + first // TOKENS * x_tile_bytes(n_tiles * BLOCKS)
        for group in range(begin, end):
            rows = group * 64
            own_x, column = records, rows
            if HEADS:
                own_x, column = records + group // head_units * x_head, rows + group // head_units * y_head
            multiply_tokens(n, weights + group * n_tiles * TILE_BYTES, n_tiles, slab, sums, own_x)
            for token in range(n):
                offset = (first + token) * y_stride + column
                store_rows(load_f32x16(sums + 64 * token), bias, residual, y, rows, offset)


@template
def one_float_token(tiles, n_in, x, bias, residual, y, rows):
    """Multiply the rows of a unit with a single token."""
    for g in static_range(FLOAT_GROUPS):
        acc[g] = zero_f32x16()
    for k in range(n_in):
        value = load_splat_f32(x + 4 * k)
        for g in static_range(FLOAT_GROUPS):
            column = tiles + (g * n_in + k) * COLUMN_BYTES
            fetch_ahead(column, COLUMN_BYTES)
            acc[g] = fma(LOAD(column), value, acc[g])
    for g in static_range(FLOAT_GROUPS):
        store_rows(acc[g], bias, residual, y, rows + 64 * g, rows + 64 * g)


@template
def multiply_float_slab(n, sums, slab, n_columns, x, x_stride, last):
    """Add the products of a slab and n tokens to the sums, TILE_GROUPS groups of rows at a time.

    The sums of n tokens and TILE_GROUPS groups stay in registers.  A token after number ``last`` repeats that token.
    """
    for i in static_range(n):
        row[i] = x + min(np.int64(i), last) * x_stride
    for tile_group in static_range(FLOAT_GROUPS // TILE_GROUPS):
        tile_sums, columns = sums + 64 * TILE_GROUPS * tile_group, slab + 64 * TILE_GROUPS * tile_group
        for i in static_range(n):
            for g in static_range(TILE_GROUPS):
                acc[g, i] = load_f32x16(tile_sums + 64 * (FLOAT_GROUPS * i + g))
        for k in range(n_columns):
            for g in static_range(TILE_GROUPS):
                w[g] = load_f32x16(columns + 64 * (FLOAT_GROUPS * k + g))
            for i in static_range(n):
                value = load_splat_f32(row[i] + 4 * k)
                for g in static_range(TILE_GROUPS):
                    acc[g, i] = fma(w[g], value, acc[g, i])
        for i in static_range(n):
            for g in static_range(TILE_GROUPS):
                store_f32x16(tile_sums + 64 * (FLOAT_GROUPS * i + g), acc[g, i])


@template
def several_float_tokens(n_tokens, tiles, n_in, slab, sums, x, x_stride):
    """sums = the rows of a unit times ``n_tokens`` tokens, at most FLOAT_TOKENS; unpacks slab after slab."""
    for i in range(-(-n_tokens // TILE_TOKENS) * (TILE_TOKENS * FLOAT_GROUPS)):
        store_f32x16(sums + 64 * i, zero_f32x16())
    for first in range(0, n_in, FLOAT_SLAB):
        n = min(FLOAT_SLAB, n_in - first)
        for k in range(n):
            for g in static_range(FLOAT_GROUPS):
                column = tiles + (g * n_in + first + k) * COLUMN_BYTES
                fetch_ahead(column, COLUMN_BYTES)
                store_f32x16(slab + 64 * (FLOAT_GROUPS * k + g), LOAD(column))
        for token in range(0, n_tokens, TILE_TOKENS):
            row, last = x + token * x_stride + 4 * first, n_tokens - 1 - token
            tile_sums = sums + token * (64 * FLOAT_GROUPS)
            if last < TILE_TOKENS // 2:
                multiply_float_slab(TILE_TOKENS // 2, tile_sums, slab, n, row, x_stride, last)
            else:
                multiply_float_slab(TILE_TOKENS, tile_sums, slab, n, row, x_stride, last)


@kernel
def matmul_float(
    begin, end, batch, weights, n_in, x, x_stride, bias, residual, y, y_stride, head_units, x_head, y_head
):  # fmt: skip
    """Float products; a unit is ``16 * FLOAT_GROUPS`` rows.  x: float32 [T, n_in], ``x_stride`` bytes a token.

    LOAD, COLUMN_BYTES (of one column of 16 rows): the format's.  `Target.constants` derives TILE_TOKENS, TILE_GROUPS
    and FLOAT_TOKENS from the registers.  `matmul_quantised` describes the other parameters.
    """
    n_tokens = load_i64(batch)
    slab = stack(64 * FLOAT_GROUPS * FLOAT_SLAB)
    sums = stack(64 * FLOAT_GROUPS * FLOAT_TOKENS)
    for first in range(0, n_tokens, FLOAT_TOKENS):
        n = min(FLOAT_TOKENS, n_tokens - first)
        for unit in range(begin, end):
            tiles = weights + unit * FLOAT_GROUPS * n_in * COLUMN_BYTES
            rows = unit * FLOAT_GROUPS * 64
            own_x, own_y = x, y
            if HEADS:
                own_x, own_y = x + unit // head_units * x_head, y + unit // head_units * y_head
            if n_tokens == 1:
                one_float_token(tiles, n_in, own_x, bias, residual, own_y, rows)
            else:
                several_float_tokens(n, tiles, n_in, slab, sums, own_x + first * x_stride, x_stride)
                for token in range(n):
                    for g in static_range(FLOAT_GROUPS):
                        total = load_f32x16(sums + 64 * (FLOAT_GROUPS * token + g))
                        offset = (first + token) * y_stride + rows + 64 * g
                        store_rows(total, bias, residual, own_y, rows + 64 * g, offset)


@device
def int16_record(token, n_blocks):
    """Return the offset in bytes of a token's first record of 16-bit numbers."""
    return (token // TOKENS * (TOKENS * n_blocks) + token % TOKENS) * INT16_RECORD


@template
def round_columns(columns, n, block):
    """Round n <= 32 columns of sixteen rows to pairs of 16-bit numbers, with zero padding; store the rows' scales."""
    largest, total = zero_f32x16(), zero_f32x16()
    for k in range(n):
        column = LOAD(columns + k * COLUMN_BYTES)
        largest = maximum(largest, as_float(mask(as_int(column), 0x7FFFFFFF)))
        total = total + column
    inverse = splat(LARGEST_INT16) / maximum(largest, splat(SMALLEST))
    unit = splat(np.float32(1) / LARGEST_INT16)
    store_f32x16(
        block + INT16_SCALES, fma(largest, unit, total - total)
    )  # NaN if a weight is NaN, which ``maximum`` would drop
    for k in range(0, n - 1, 2):
        first = to_int_rounded(LOAD(columns + k * COLUMN_BYTES) * inverse)
        second = to_int_rounded(LOAD(columns + (k + 1) * COLUMN_BYTES) * inverse)
        store_f32x16(block + 32 * k, as_float(mask(first, 0xFFFF) | shift_left(second, 16)))
    if n % 2 != 0:
        last = to_int_rounded(LOAD(columns + (n - 1) * COLUMN_BYTES) * inverse)
        store_f32x16(block + 32 * (n - 1), as_float(mask(last, 0xFFFF)))
    for k in range(n + n % 2, 32, 2):
        store_f32x16(block + 32 * k, zero_f32x16())


@device
def add_int16_total(acc, total, scale, record, ahead):
    """Return acc plus a block's products with a token's record, scaled to float; prefetches from ``ahead``."""
    prefetch(record + ahead)
    return fma(to_float(total), scale * load_splat_f32(record + INT16_SCALE), acc)


@template
def multiply_int16(sums, slab, n_blocks, x, ahead):
    """sums[i] += the slab's blocks times token i of the tile of activations at x; prefetches from ``ahead``."""
    for i in static_range(TOKENS):
        acc[i] = load_f32x16(sums + 64 * i)
    for b in range(n_blocks):
        block = slab + b * INT16_BLOCK
        for v in static_range(16):
            w[v] = load_i8x64(block + 64 * v)
        scale = load_f32x16(block + INT16_SCALES)
        for i in static_range(TOKENS):
            record = x + (b * TOKENS + i) * INT16_RECORD
            acc[i] = add_int16_total(acc[i], dot32_s16(*w[0:16], record), scale, record, ahead)
    for i in static_range(TOKENS):
        store_f32x16(sums + 64 * i, acc[i])


@template
def multiply_int16_by_fours(sums, slab, n_blocks, x, ahead):
    """`multiply_int16` if registers do not hold a block: two columns at a time are read for four tokens.

    The loop over columns is not unrolled, because the compiler would then read all columns first.
    """
    for _ in range(TOKENS // 4):
        for i in static_range(4):
            acc[i] = load_f32x16(sums + 64 * i)
        for b in range(n_blocks):
            block, records = slab + b * INT16_BLOCK, x + b * (TOKENS * INT16_RECORD)
            for i in static_range(4):
                total[i] = zero_i32x16()
            for two in range(8):
                for v in static_range(2):
                    columns = load_i8x64(block + (128 * two + 64 * v))
                    for i in static_range(4):
                        pair = records + 8 * two + (i * INT16_RECORD + 4 * v)
                        total[i] = add_int16_x86(total[i], columns, pair)
            scale = load_f32x16(block + INT16_SCALES)
            for i in static_range(4):
                acc[i] = add_int16_total(acc[i], total[i], scale, records + i * INT16_RECORD, ahead)
        for i in static_range(4):
            store_f32x16(sums + 64 * i, acc[i])
        sums += 4 * 64
        x += 4 * INT16_RECORD


@kernel
def matmul_int16(begin, end, batch, weights, n_in, x, bias, residual, y, y_stride):
    """Products of float weights, rounded to 16-bit numbers with a scale per 32 columns, as activations are.

    Used for graphs with many tokens, because rounding a slab takes as long as multiplying it with a few tokens.  A
    unit is 16 rows.  x: records of `quantise_int16`.  `matmul_float` describes LOAD, COLUMN_BYTES and the other
    parameters.
    """
    n_tokens = load_i64(batch)
    slab = stack(SLAB * INT16_BLOCK)
    sums = stack(64 * INT16_TOKENS)
    n_blocks = (n_in + 31) // 32
    for first in range(0, n_tokens, INT16_TOKENS):
        n = min(INT16_TOKENS, n_tokens - first)
        for group in range(begin, end):
            for i in range(-(-n // TOKENS) * TOKENS):
                store_f32x16(sums + 64 * i, zero_f32x16())
            for block in range(0, n_blocks, SLAB):
                several = min(SLAB, n_blocks - block)
                for b in range(several):
                    column = 32 * (block + b)
                    columns = weights + (group * n_in + column) * COLUMN_BYTES
                    round_columns(columns, min(32, n_in - column), slab + b * INT16_BLOCK)
                for token in range(0, n, TOKENS):
                    records = x + int16_record(first + token, n_blocks) + block * (TOKENS * INT16_RECORD)
                    ahead = TOKENS * n_blocks * INT16_RECORD
                    if FEW_REGISTERS:
                        multiply_int16_by_fours(sums + 64 * token, slab, several, records, ahead)
                    else:
                        multiply_int16(sums + 64 * token, slab, several, records, ahead)
            for token in range(n):
                offset = (first + token) * y_stride + group * 64
                store_rows(load_f32x16(sums + 64 * token), bias, residual, y, group * 64, offset)
