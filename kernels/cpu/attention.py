"""Flash attention over the paged cache (Dao et al., arXiv:2205.14135), for prefill and decode alike.

A unit of work is a tile of up to `TILE_ROWS` query rows that share a key/value head.  A row is a token and one of the
H / G query heads of the group; row number t * (H / G) + h of a sequence is its token t and head h.  A tile walks over
the sequence's pages, so that each is read once for all its rows, and keeps for each row the largest score so far, the
sum of exponentials and the weighted sum of values.

The cache is cut into spans of `SPAN` positions.  Each is summed up for itself, and the sums are merged in order.
So a few rows that look far back can be shared by many threads, a span each (as in Flash-Decoding, Dao et al., 2023):
which thread did what changes no bit.  Nor does what else is in the batch: pages are taken whole and in order, and
a masked score adds exactly nothing.

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
    prefetch,
    select_between,
    splat,
    splat_f32,
    splat_int,
    stack,
    store_f32,
    store_f32x16,
    store_i64,
    sum_lanes,
    zero_f32x16,
)
from localllm.kernels.cpu.templates import Registers, static_range, template

#: Tokens in a page of the cache, the vectors that hold their scores, and the tokens and pages in a span.
PAGE = 64
GROUPS = PAGE // 16
SPAN = 512
SPAN_PAGES = SPAN // PAGE
#: Query rows in a tile, and those computed at once.
TILE_ROWS, ROWS = 32, 4
#: Bytes of a row's scores turned to weights, with the factor of what was before behind them.
WEIGHTS = 4 * (PAGE + 16)
#: A masked score, and where the largest score starts: above a masked one, so that exp(masked - largest) is 0.
MASKED, LOWEST = np.float32(-3e38), np.float32(-1e30)
ZERO, ONE = np.float32(0), np.float32(1)
#: Bytes of a row's largest score and total, behind its sums.
MARGIN = 128


@template
def score_page(s: Registers, queries, keys, next_keys):
    """s[r, g] = row r's scores of positions 16 g …; keys: float16 [HEAD, PAGE].  Begins to read the next page's."""
    for r in static_range(ROWS):
        for g in static_range(GROUPS):
            s[r, g] = zero_f32x16()
    for i in range(HEAD):
        prefetch(next_keys + 2 * PAGE * i)
        prefetch(next_keys + 2 * PAGE * i + 64)
        for g in static_range(GROUPS):
            key[g] = load_f16x16(keys + 2 * PAGE * i + 32 * g)
        for r in static_range(ROWS):
            q = splat_f32(queries + 4 * HEAD * r + 4 * i)
            for g in static_range(GROUPS):
                s[r, g] = fma(key[g], q, s[r, g])


@template
def add_values(weights, n, values, next_values, sums, first):
    """sums[r] = alpha_r * sums[r] + weights[r] @ values, for CHUNK * 16 head values from number ``first`` on.

    weights: float32 [ROWS, PAGE + 16], with alpha at PAGE; values: float16 [PAGE, HEAD]; sums: float32, a row of
    ``STATE`` bytes each.
    """
    for r in static_range(ROWS):
        alpha = splat_f32(weights + (WEIGHTS * r + 4 * PAGE))
        for c in static_range(CHUNK):
            o[r, c] = alpha * load_f32x16(sums + STATE * r + 4 * first + 64 * c)
    for p in range(n):
        for c in static_range(CHUNK):
            prefetch(next_values + 2 * HEAD * p + 2 * first + 32 * c)
            v[c] = load_f16x16(values + 2 * HEAD * p + 2 * first + 32 * c)
        for r in static_range(ROWS):
            w = splat_f32(weights + WEIGHTS * r + 4 * p)
            for c in static_range(CHUNK):
                o[r, c] = fma(v[c], w, o[r, c])
    for r in static_range(ROWS):
        for c in static_range(CHUNK):
            store_f32x16(sums + STATE * r + 4 * first + 64 * c, o[r, c])


@template
def clear(state, n_rows):
    """States of rows that have seen nothing: HEAD sums, the largest score 16 times, 16 parts of the weights' sum."""
    for r in range(n_rows):
        for i in range(0, 4 * HEAD, 64):
            store_f32x16(state + STATE * r + i, zero_f32x16())
        store_f32x16(state + STATE * r + 4 * HEAD, splat(LOWEST))
        store_f32x16(state + STATE * r + 4 * HEAD + 64, zero_f32x16())


@template
def merge(state, span, n_rows):
    """Adds to the rows' states what they came to in a span."""
    for r in range(n_rows):
        ours, theirs = state + STATE * r, span + STATE * r
        a, b = load_f32x16(ours + 4 * HEAD), load_f32x16(theirs + 4 * HEAD)
        top = maximum(a, b)
        keep, add = exp(a - top), exp(b - top)
        for i in range(0, 4 * HEAD, 64):
            store_f32x16(ours + i, fma(load_f32x16(theirs + i), add, load_f32x16(ours + i) * keep))
        store_f32x16(ours + 4 * HEAD, top)
        total = load_f32x16(ours + 4 * HEAD + 64) * keep
        store_f32x16(ours + 4 * HEAD + 64, fma(load_f32x16(theirs + 4 * HEAD + 64), add, total))


@template
def write_rows(state, n_rows, first_row, start, head, group_size, head_dim, out, stride):
    """out = sums / total, for rows from number ``first_row`` on of a sequence that begins at token ``start``."""
    for r in range(n_rows):
        row = first_row + r
        place = out + (start + row // group_size) * stride + 4 * (head * group_size + row % group_size) * head_dim
        share = ONE / sum_lanes(load_f32x16(state + STATE * r + 4 * HEAD + 64))
        for i in range(head_dim):
            store_f32(place + 4 * i, load_f32(state + STATE * r + 4 * i) * share)


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
    parts,
    scale: float,
):
    """out = softmax(scale * q @ keys.T, over visible positions) @ values.

    tiles: int64 [n, 6]: sequence, first row, number of rows, first span, the one behind the last, and -1 or the
    number of the part of ``parts`` that the sums go to instead of to ``out``.  Unit u is tile u % n of head u // n.
    q, out: float32 [T, H * head_dim].  starts: int32 [S], the sequences' first tokens.  positions: int32 [T].
    block_tables: int32 [S, block_stride].  window: visible positions, 0 for all.  keys, values: as in
    `localllm.kernels.cpu.elementwise.rope_append`.  parts: float32 [n_parts, n_kv_heads, TILE_ROWS, STATE / 4].
    STATE: bytes of a row's state, 4 * HEAD + MARGIN.
    """
    n_tiles = load_i64(batch)
    queries = stack(4 * TILE_ROWS * HEAD)
    limits = stack(16 * TILE_ROWS)
    weights = stack(ROWS * WEIGHTS)
    span_state = stack(TILE_ROWS * STATE)
    state = stack(TILE_ROWS * STATE)
    for unit in range(begin, end):
        head = unit // n_tiles
        tile = tiles + unit % n_tiles * 48
        sequence, first_row, n_rows = load_i64(tile), load_i64(tile + 8), load_i64(tile + 16)
        start = np.int64(load_i32(starts + 4 * sequence))
        # Rows are computed ROWS at once: a tile short of them computes its last one again.
        n_computed = (n_rows + ROWS - 1) // ROWS * ROWS
        for r in range(n_computed):
            row = first_row + min(r, n_rows - 1)
            token = start + row // group_size
            place = q + token * q_stride + 4 * (head * group_size + row % group_size) * head_dim
            for i in range(head_dim):
                store_f32(queries + 4 * HEAD * r + 4 * i, load_f32(place + 4 * i) * scale)
            for i in range(head_dim, HEAD):
                store_f32(queries + 4 * HEAD * r + 4 * i, ZERO)
            last = np.int64(load_i32(positions + 4 * token))
            first = np.int64(0)
            if window > 0:
                first = max(np.int64(0), last - window + 1)
            store_i64(limits + 16 * r, first)
            store_i64(limits + 16 * r + 8, last)
        # Rows are in order: the first begins to see first, the last sees farthest.
        first_page = load_i64(limits) // PAGE
        n_pages = load_i64(limits + 16 * (n_computed - 1) + 8) // PAGE + 1
        clear(state, n_computed)
        for span in range(max(load_i64(tile + 24), first_page // SPAN_PAGES), load_i64(tile + 32)):
            clear(span_state, n_computed)
            stop = min(n_pages, (span + 1) * SPAN_PAGES)
            for page in range(max(first_page, span * SPAN_PAGES), stop):
                number = np.int64(load_i32(block_tables + 4 * (sequence * block_stride + page)))
                block = (number * n_kv_heads + head) * (2 * HEAD * PAGE)
                number = np.int64(load_i32(block_tables + 4 * (sequence * block_stride + min(page + 1, stop - 1))))
                ahead = (number * n_kv_heads + head) * (2 * HEAD * PAGE)
                for some in range(0, n_computed, ROWS):
                    farthest = load_i64(limits + 16 * (some + ROWS - 1) + 8)
                    if load_i64(limits + 16 * some) // PAGE <= page and page * PAGE <= farthest:
                        score_page(s, queries + 4 * HEAD * some, keys + block, keys + ahead)
                        for r in static_range(ROWS):
                            low = splat_int(np.int32(load_i64(limits + 16 * (some + r)) - page * PAGE))
                            high = splat_int(np.int32(load_i64(limits + 16 * (some + r) + 8) - page * PAGE))
                            for g in static_range(GROUPS):
                                position = splat_int(np.int32(16 * g)) + lane_numbers()
                                s[r, g] = select_between(position, low, high, s[r, g], splat(MASKED))
                            row_state = span_state + STATE * (some + r) + 4 * HEAD
                            largest = load_f32(row_state)
                            top = maximum(maximum(s[r, 0], s[r, 1]), maximum(s[r, 2], s[r, 3]))
                            new = max(largest, max_lanes(top))
                            alpha = exp(splat(largest - new))
                            store_f32x16(row_state, splat(new))
                            store_f32x16(weights + (WEIGHTS * r + 4 * PAGE), alpha)
                            total = load_f32x16(row_state + 64) * alpha
                            for g in static_range(GROUPS):
                                weight = exp(s[r, g] - splat(new))
                                total = total + weight
                                store_f32x16(weights + (WEIGHTS * r + 64 * g), weight)
                            store_f32x16(row_state + 64, total)
                        seen = min(np.int64(PAGE), farthest + 1 - page * PAGE)
                        rows = span_state + STATE * some
                        for chunk in range(0, HEAD, 16 * CHUNK):
                            add_values(weights, seen, values + block, values + ahead, rows, chunk)
            merge(state, span_state, n_computed)
        part = load_i64(tile + 40)
        if part < 0:
            write_rows(state, n_rows, first_row, start, head, group_size, head_dim, out, q_stride)
        else:
            target = parts + (part * n_kv_heads + head) * (TILE_ROWS * STATE)
            for i in range(0, n_rows * STATE, 64):
                store_f32x16(target + i, load_f32x16(state + i))


@kernel
def merge_parts(begin, end, batch, tiles, n_kv_heads, group_size, head_dim, starts, parts, out, stride):
    """Merges the parts that tiles were cut into, in order, and writes their rows.

    tiles: int64 [n, 5]: sequence, first row, number of rows, first part, number of parts.  The rest is as in
    `attention`.
    """
    n_tiles = load_i64(batch)
    state = stack(TILE_ROWS * STATE)
    for unit in range(begin, end):
        head = unit // n_tiles
        tile = tiles + unit % n_tiles * 40
        first_row, n_rows, first_part = load_i64(tile + 8), load_i64(tile + 16), load_i64(tile + 24)
        start = np.int64(load_i32(starts + 4 * load_i64(tile)))
        clear(state, n_rows)
        for part in range(first_part, first_part + load_i64(tile + 32)):
            merge(state, parts + (part * n_kv_heads + head) * (TILE_ROWS * STATE), n_rows)
        write_rows(state, n_rows, first_row, start, head, group_size, head_dim, out, stride)
