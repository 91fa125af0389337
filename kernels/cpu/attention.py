"""Flash attention over the paged cache (Dao et al., arXiv:2205.14135), for prefill and decode alike.

A unit of work is a tile of `ROWS` query rows that share a key/value head.  A row is a token and one of the H / G
query heads of the group; row number t * (H / G) + h of a sequence is its token t and head h.  A tile walks over the
sequence's pages, and keeps for each row the largest score so far, the sum of exponentials and the weighted sum of
values.  Pages are taken whole and in order, wherever the row stands in its batch, so that a row's result never
depends on what else is in the batch.

The scores of 16 positions lie side by side in a vector, because keys are stored with positions innermost; the
values' weighted sum has 16 head values side by side.
"""

from __future__ import annotations

import numpy as np

from localllm.kernels.cpu.compiler import kernel
from localllm.kernels.cpu.elementwise import exp
from localllm.kernels.cpu.simd import (
    fma,
    lane_numbers,
    load_f16x16,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    max_lanes,
    maximum,
    select_between,
    splat,
    splat_f32,
    splat_int,
    stack,
    store_f32,
    store_f32x16,
    sum_lanes,
    zero_f32x16,
)
from localllm.kernels.cpu.templates import Registers, static_range, template

#: Tokens in a page of the cache, and the vectors that hold their scores.
PAGE = 64
GROUPS = PAGE // 16
#: Query rows in a tile.
ROWS = 4
#: A masked score, and where the largest score starts: above a masked one, so that exp(masked - largest) is 0.
MASKED, LOWEST = np.float32(-3e38), np.float32(-1e30)
ONE = np.float32(1)


@template
def score_page(s: Registers, queries, keys):
    """s[r, g] = row r's scores of positions 16 g …; keys: float16 [HEAD, PAGE]."""
    for r in static_range(ROWS):
        for g in static_range(GROUPS):
            s[r, g] = zero_f32x16()
    for i in range(HEAD):
        for g in static_range(GROUPS):
            key[g] = load_f16x16(keys + 2 * PAGE * i + 32 * g)
        for r in static_range(ROWS):
            q = splat_f32(queries + 4 * HEAD * r + 4 * i)
            for g in static_range(GROUPS):
                s[r, g] = fma(key[g], q, s[r, g])


@template
def add_values(weights, n, values, sums, first):
    """sums[r] = alpha_r * sums[r] + weights[r] @ values, for CHUNK * 16 head values from number ``first`` on.

    weights: float32 [ROWS, PAGE + 16], with alpha at PAGE; values: float16 [PAGE, HEAD]; sums: float32 [ROWS, HEAD].
    """
    for r in static_range(ROWS):
        alpha = splat_f32(weights + (4 * (PAGE + 16) * r + 4 * PAGE))
        for c in static_range(CHUNK):
            o[r, c] = alpha * load_f32x16(sums + 4 * HEAD * r + 4 * first + 64 * c)
    for p in range(n):
        for c in static_range(CHUNK):
            v[c] = load_f16x16(values + 2 * HEAD * p + 2 * first + 32 * c)
        for r in static_range(ROWS):
            w = splat_f32(weights + 4 * (PAGE + 16) * r + 4 * p)
            for c in static_range(CHUNK):
                o[r, c] = fma(v[c], w, o[r, c])
    for r in static_range(ROWS):
        for c in static_range(CHUNK):
            store_f32x16(sums + 4 * HEAD * r + 4 * first + 64 * c, o[r, c])


@kernel
def attention(
    begin,
    end,
    batch,
    tiles,
    n_kv_heads,
    group_size,
    q,
    q_stride,
    head_dim,
    starts,
    positions,
    block_tables,
    block_stride,
    window,
    keys,
    values,
    out,
    scale: float,
):
    """out = softmax(scale * q @ keys.T, over visible positions) @ values.

    tiles: int64 [n, 3], sequence, first row, number of rows in the tile.  Unit u is tile u % n of head u // n.
    q, out: float32 [T, H * head_dim].  starts: int32 [S], the sequences' first tokens.  positions: int32 [T].
    block_tables: int32 [S, block_stride].  window: visible positions, 0 for all.  keys, values: as in
    `localllm.kernels.cpu.elementwise.rope_append`.
    """
    n_tiles = load_i64(batch)
    queries = stack(4 * ROWS * HEAD)
    sums = stack(4 * ROWS * HEAD)
    weights = stack(4 * ROWS * (PAGE + 16))
    for unit in range(begin, end):
        head = unit // n_tiles
        tile = tiles + unit % n_tiles * 24
        sequence, first_row, n_rows = load_i64(tile), load_i64(tile + 8), load_i64(tile + 16)
        start = np.int64(load_i32(starts + 4 * sequence))
        for i in range(0, 4 * ROWS * HEAD, 64):
            store_f32x16(queries + i, zero_f32x16())
            store_f32x16(sums + i, zero_f32x16())
        for r in static_range(ROWS):
            # A tile short of rows computes its last one again.
            row = first_row + min(r, n_rows - 1)
            token = start + row // group_size
            place[r] = token * q_stride + 4 * (head * group_size + row % group_size) * head_dim
            for i in range(head_dim):
                store_f32(queries + 4 * HEAD * r + 4 * i, load_f32(q + place[r] + 4 * i) * scale)
            last[r] = load_i32(positions + 4 * token)
            first[r] = np.int32(0)
            if window > 0:
                first[r] = np.int32(max(0, last[r] - window + 1))
            largest[r] = LOWEST
            total[r] = zero_f32x16()
        # Rows are in order: the first begins to see first, the last sees farthest.
        for page in range(first[0] // PAGE, last[ROWS - 1] // PAGE + 1):
            number = np.int64(load_i32(block_tables + 4 * (sequence * block_stride + page)))
            block = (number * n_kv_heads + head) * (2 * HEAD * PAGE)
            score_page(s, queries, keys + block)
            for r in static_range(ROWS):
                low, high = splat_int(first[r]), splat_int(last[r])
                for g in static_range(GROUPS):
                    position = splat_int(np.int32(page * PAGE + 16 * g)) + lane_numbers()
                    s[r, g] = select_between(position, low, high, s[r, g], splat(MASKED))
                top = maximum(maximum(s[r, 0], s[r, 1]), maximum(s[r, 2], s[r, 3]))
                new = max(largest[r], max_lanes(top))
                alpha = exp(splat(largest[r] - new))
                largest[r] = new
                store_f32x16(weights + (4 * (PAGE + 16) * r + 4 * PAGE), alpha)
                total[r] = total[r] * alpha
                for g in static_range(GROUPS):
                    weight = exp(s[r, g] - splat(new))
                    total[r] = total[r] + weight
                    store_f32x16(weights + (4 * (PAGE + 16) * r + 64 * g), weight)
            seen = min(PAGE, last[ROWS - 1] + 1 - page * PAGE)
            for chunk in range(0, HEAD, 16 * CHUNK):
                add_values(weights, seen, values + block, sums, chunk)
        for r in static_range(ROWS):
            share = ONE / sum_lanes(total[r])
            if r < n_rows:
                for i in range(head_dim):
                    store_f32(out + place[r] + 4 * i, load_f32(sums + 4 * HEAD * r + 4 * i) * share)
