"""Matrix products over packed tiles: y = x @ W.T (+ bias) (+ residual).

A unit of work is a group of rows.  Whatever the number of tokens, each output is the same sum in the same order:
along the row, tile by tile.  So a token decoded alone gets the same bits as one prefilled among hundreds.
"""

from __future__ import annotations

from localllm.kernels.cpu.compiler import kernel
from localllm.kernels.cpu.simd import (
    fma,
    load_f32x16,
    load_i64,
    splat_f32,
    store_f32x16,
    zero_f32x16,
)
from localllm.kernels.cpu.templates import device, static_range, template
from localllm.kernels.cpu.tiles import RECORD, TOKENS, X_STEP, fetch_ahead

#: Groups of 16 rows in a unit of the float kernels: enough independent sums to keep the multipliers busy.
FLOAT_GROUPS = 2


@device
def finish_rows(acc, bias, residual, y, rows, place):
    """y = acc (+ bias) (+ residual), for sixteen rows from byte ``rows`` of the bias and byte ``place`` of y."""
    if bias != 0:
        acc = acc + load_f32x16(bias + rows)
    if residual != 0:
        acc = acc + load_f32x16(residual + place)
    store_f32x16(y + place, acc)


@template
def quantised_tokens(n, first, group, tiles, n_tiles, n_blocks, x, bias, residual, y, y_stride):
    """Sixteen rows times ``n`` tokens from number ``first`` on, which lie in one tile of activations."""
    for i in static_range(n):
        acc[i] = zero_f32x16()
    tile = tiles
    records = x + first // TOKENS * (n_blocks * X_STEP) + first % TOKENS * RECORD
    for _ in range(n_tiles):
        ADD_TILE(acc, n, tile, records)
        tile += TILE_BYTES
        records += BLOCKS * X_STEP
    place = first * y_stride + group * 64
    for i in static_range(n):
        finish_rows(acc[i], bias, residual, y, group * 64, place)
        place += y_stride


@kernel
def matmul_quantised(begin, end, batch, weights, n_tiles, x, bias, residual, y, y_stride):
    """Integer products; a unit is 16 rows.

    weights: packed tiles, ``n_tiles`` a row.  x: activations as `tiles` draws them.  bias: float32 [n] or 0.
    residual, y: float32 [T, n] with ``y_stride`` bytes a token; residual may be 0, or y itself.
    ADD_TILE, TILE_BYTES, BLOCKS (of 32 columns in a tile): the format's.
    """
    n_tokens = load_i64(batch)
    n_blocks = n_tiles * BLOCKS
    for group in range(begin, end):
        tiles = weights + group * n_tiles * TILE_BYTES
        token = 0
        while token + TOKENS <= n_tokens:
            quantised_tokens(TOKENS, token, group, tiles, n_tiles, n_blocks, x, bias, residual, y, y_stride)
            token += TOKENS
        while token < n_tokens:
            quantised_tokens(1, token, group, tiles, n_tiles, n_blocks, x, bias, residual, y, y_stride)
            token += 1


@template
def float_tokens(n, first, unit, tiles, n_in, x, x_stride, bias, residual, y, y_stride):
    """Rows of a unit times ``n`` tokens from number ``first`` on."""
    for g in static_range(FLOAT_GROUPS):
        for i in static_range(n):
            acc[g, i] = zero_f32x16()
    for i in static_range(n):
        row[i] = x + (first + i) * x_stride
    for k in range(n_in):
        for g in static_range(FLOAT_GROUPS):
            fetch_ahead(n, tiles + g * n_in * COLUMN_BYTES + k * COLUMN_BYTES, COLUMN_BYTES)
            w[g] = LOAD(tiles + g * n_in * COLUMN_BYTES + k * COLUMN_BYTES)
        for i in static_range(n):
            value = splat_f32(row[i] + 4 * k)
            for g in static_range(FLOAT_GROUPS):
                acc[g, i] = fma(w[g], value, acc[g, i])
    for g in static_range(FLOAT_GROUPS):
        rows = (unit * FLOAT_GROUPS + g) * 64
        for i in static_range(n):
            finish_rows(acc[g, i], bias, residual, y, rows, (first + i) * y_stride + rows)


@kernel
def matmul_float(begin, end, batch, weights, n_in, x, x_stride, bias, residual, y, y_stride):
    """Float products; a unit is ``16 * FLOAT_GROUPS`` rows.  x: float32 [T, n_in], ``x_stride`` bytes a token.

    LOAD, COLUMN_BYTES (of one column of 16 rows): the format's.  The rest is as in `matmul_quantised`.
    """
    n_tokens = load_i64(batch)
    for unit in range(begin, end):
        tiles = weights + unit * FLOAT_GROUPS * n_in * COLUMN_BYTES
        token = 0
        while token + TOKENS <= n_tokens:
            float_tokens(TOKENS, token, unit, tiles, n_in, x, x_stride, bias, residual, y, y_stride)
            token += TOKENS
        while token < n_tokens:
            float_tokens(1, token, unit, tiles, n_in, x, x_stride, bias, residual, y, y_stride)
            token += 1
