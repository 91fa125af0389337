"""Flash attention over the paged cache (Dao et al., arXiv:2205.14135), for prefill and decode.

A unit of work is a tile of up to `TILE_ROWS` query rows that share a key/value head.  A row is a token and one of the
H / G query heads of the group; row number t * (H / G) + h of a sequence is its token t and head h.

The cache is cut into splits of `SPLIT` positions.  A tile processes its visible splits in order, each in three
passes: the scores of all pages; the weights, exp(score - largest); and the weighted sums of the values.  Each page is
read once for all rows of a tile.  Each pass prefetches the data of the next pass at an even pace: while a page is
scored, the next page of keys (on the last page, the first page of values); while weights are computed, the second
page of values; while values are added, the page after the next (at the end, the first keys of the next split).

Scores are capped (SOFT_CAP) or reduced with the distance (ALIBI) before masking.  A sink is one more score, applied
when a row's sums are divided by their total (SINKS).  These flags are constants, so kernels without them pay nothing.

If keys contain the values (VALUES_IN_KEYS; MLA), a page uses the layout of values, and its keys are scored one by
one.  All query heads are rows of the single key/value head, so each page is read once for all heads.

Half-precision values are converted to float32 during the multiplication.  Codes (KEY_BITS, VALUE_BITS; below 16) are
multiplied as integers: a query is rounded to bytes, 32 head values per scale.  The weights of 32 positions, times the
scales of their values, are also rounded: to 16 bits if values have eight bits, so that this error is negligible
compared to the rounding of the values, and to bytes otherwise.  A tile of codes is read once for up to ROWS rows.
Latents are few and shared by many rows, so they are converted to float32 too; their scales are a factor of the keys,
and of the weights.  Sums of rotated values (VALUE_ROTATION) are rotated back at the end.

With selected positions (SELECTED, their maximum number; BY_HEAD, one selection per key/value head), a token sees only
these positions, and a tile has one token.  The visible positions are numbered 0, 1, …: a page of these numbers is
gathered before it is scored, and again before it is added, unless the cache has a page of the same positions.  If a
token sees compressed entries in addition to a window (ENTRIES, tokens per entry), the first numbers are the positions
of the window, followed by all entries or the selected entries.

Each split is summed separately, and the sums are merged in order with each row's largest score.  A few rows with a
long context can therefore be divided among many threads, one split each (as in Flash-Decoding, Dao et al., 2023).
The bits of the result depend neither on the threads nor on the other sequences of the batch: positions are processed
in order, and a masked position adds exactly zero if its values are finite.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.kernels.cache_rounding import NEGLIGIBLE, VALUES_PER_SCALE
from localllm.kernels.cpu.cache import block_bytes
from localllm.kernels.cpu.cache_types import PAGE, layouts_of
from localllm.kernels.cpu.codes import load_bits, load_bits_raised, with_fifth_bits
from localllm.kernels.cpu.compiler import kernel
from localllm.kernels.cpu.dots import dot32_s8, dot32_u4, dot32_u5
from localllm.kernels.cpu.elementwise import exp, hadamard, tanh
from localllm.kernels.cpu.simd import *
from localllm.kernels.cpu.target import Target
from localllm.kernels.cpu.templates import Registers, device, static_range, template
from localllm.kernels.operations import Attention

#: Tokens and pages in a KV split.
SPLIT = 512
SPLIT_PAGES = SPLIT // PAGE
#: Query rows in a tile.
TILE_ROWS = 64
#: Bytes of a row's scores in a split: one cache line more than needed, so that rows do not map to the same cache
#: sets.
SCORES = 4 * SPLIT + 64
#: A masked score, and the initial largest score: greater than a masked score, so that exp(masked - largest) is 0.
MASKED, LOWEST = np.float32(-3e38), np.float32(-1e30)
ZERO, ONE = np.float32(0), np.float32(1)
#: A record: 32 numbers as signed bytes, the float32 scale and the int32 sum.  Limits of codes; offsets and size in
#: bytes.
BYTE_LIMIT, WORD_LIMIT, RECORD_SCALE, RECORD_SUM, RECORD = np.float32(127), np.float32(127 * 128), 32, 36, 64


def state_bytes(head: int) -> int:
    """Return STATE, the bytes of a row's state: sums, largest score (16 times), 16 partial totals of the weights."""
    return 4 * head + 128


def state_constants(op: Attention) -> dict[str, int]:
    """Return the constants of `merge_partials`: offsets in a row's state, and the operations on its final sums."""
    head = layouts_of(op.cache)[1].head(op.cache.value_dim)
    places = {"VALUE_HEAD": head, "LARGEST": 4 * head, "TOTAL": 4 * head + 64, "STATE": state_bytes(head)}
    return {**places, "SINKS": int(op.sinks is not None), "VALUE_ROTATION": op.cache.rotations[1]}


def constants(op: Attention, target: Target) -> dict[str, Any]:
    """Compile-time constants of `attention`."""
    wide, cache = target.wide, op.cache
    vectors = 2 if wide else 1
    # Decoding has four or eight heads per key: six rows at once would compute some rows twice.  `score_rows` adds the
    # lanes of four or sixteen sums at once.  Encoders fill the registers.
    few = op.causal or cache.values_in_keys
    rows = 8 if wide else 4 if few else max(4, target.rows_of_sums(vectors))
    keys, values = layouts_of(cache)
    values_dim = cache.key_dim if cache.values_in_keys else cache.value_dim
    entries = op.entries
    return {
        **state_constants(op),
        "KEY_HEAD": keys.head(cache.key_dim),
        "SOFT_CAP": int(op.softcap is not None),
        "ALIBI": int(op.slopes is not None),
        "BIASES": op.bias_width,
        # Bytes per row of the data that changes its scores.
        "FALL": 8 if op.slopes is not None else 16,
        "CHUNKED": int(op.chunk is not None),
        "CAUSAL": int(op.causal or op.has_spans),
        "SELECTED": op.n_selected,
        "BY_HEAD": int(op.selected_by_head),
        "ENTRIES": 0 if entries is None else entries.stride,
        "ENTRY_BLOCK": 0 if entries is None else block_bytes(entries)[0],
        "GATHERED": int(op.selected is not None or entries is not None),
        "VALUES_IN_KEYS": int(cache.values_in_keys),
        "KEY_BLOCK": keys.block_bytes(cache.key_dim),
        "VALUE_BLOCK": values.block_bytes(values_dim),
        # Bytes of a gathered block.
        "GATHERED_BLOCK": max(keys.block_bytes(cache.key_dim), values.block_bytes(values_dim)),
        # Stride of a block of values, in values per position.
        "VALUE_ROW": values.head(values_dim),
        # Rows, and vectors of scores or of head values, that are computed at once: their sums fill the registers.
        "ROWS": rows,
        # Rows of a tile whose last group is padded to ROWS.
        "HELD": -(-TILE_ROWS // rows) * rows,
        "VECTORS": vectors,
        # Steps of `add_products` per iteration: narrow vectors have few products per step.
        "UNROLLED": 1 if wide else 2,
        "KEY_BITS": keys.bits,
        "VALUE_BITS": values.bits,
        # Operation that loads sixteen values as float32, and the bytes of these values.
        "LOAD": values.load if cache.values_in_keys else load_f16x16,
        "UNIT": values.unit if cache.values_in_keys else 32,
        # Bytes of the scales at the start of a block.
        "KEY_SCALES": keys.scale_bytes(cache.key_dim),
        "VALUE_SCALES": values.scale_bytes(values_dim),
        # ROWS rows are computed at once, and a shorter tile repeats its last row; not if keys and values are both
        # codes.
        "ROW_STEP": 1 if keys.load is None and values.load is None else rows,
    }


@device
def block_at(cache, block_table, page, page_bytes):
    """Return the address of a page's block; ``cache`` is the address of the block in page 0."""
    return cache + np.int64(load_i32(block_table + 4 * page)) * page_bytes


@template
def load_query(query, key_dim, scale, out):
    """out = scale * query, padded with zeros to KEY_HEAD values."""
    for i in range(key_dim):
        store_f32(out + 4 * i, load_f32(query + 4 * i) * scale)
    for i in range(key_dim, KEY_HEAD):
        store_f32(out + 4 * i, ZERO)


@template
def load_limits(position, last, window, kv_length, limits, selected):
    """limits = the first and the last position, int64 [2], that a token sees.

    ``position``: the token's position, or the first position that it sees.  ``last``: the last visible position with
    CAUSAL.  With SELECTED or ENTRIES, limits are numbers of gathered positions.
    """
    current = np.int64(load_i32(position))
    if GATHERED:
        store_i64(limits, 0)
    elif CHUNKED:
        store_i64(limits, current - current % window)
    else:
        store_i64(limits, max(np.int64(0), current - window + 1))
    if GATHERED:
        final = current
        if ENTRIES:
            final = (current + 1) // ENTRIES - 1
        if SELECTED:
            final = min(final, np.int64(SELECTED - 1))
            while final >= 0 and load_f32(selected + 4 * final) < ZERO:
                final -= 1
        if ENTRIES:
            final += min(current + 1, window)
        store_i64(limits + 8, final)
    elif CAUSAL:
        store_i64(limits + 8, np.int64(load_i32(last)))
    else:
        store_i64(limits + 8, min(kv_length, current + window) - 1)


@template
def add_products(total: Registers, x, x_step, matrix, step, vectors, n, ahead, pace):
    """total[r, v] += x[r] @ matrix, for ROWS rows and ``vectors`` times 16 columns.

    x: float32 [ROWS, n]; matrix: [n, columns] in the cache's type; strides between rows are in bytes.
    Prefetches from ``ahead``, ``pace`` bytes per step.
    """
    for i in range(0, n // UNROLLED * UNROLLED, UNROLLED):
        for j in static_range(UNROLLED):
            prefetch(ahead + pace * (i + j))
            for v in static_range(vectors):
                entry[v] = LOAD(matrix + step * (i + j) + UNIT * v)
            for r in static_range(ROWS):
                factor = load_splat_f32(x + x_step * r + 4 * i + 4 * j)
                for v in static_range(vectors):
                    total[r, v] = fma(entry[v], factor, total[r, v])
    for i in range(n // UNROLLED * UNROLLED, n):
        for v in static_range(vectors):
            entry[v] = LOAD(matrix + step * i + UNIT * v)
        for r in static_range(ROWS):
            factor = load_splat_f32(x + x_step * r + 4 * i)
            for v in static_range(vectors):
                total[r, v] = fma(entry[v], factor, total[r, v])


@template
def score_page(queries, block, scores, ahead, pace):
    """Compute the scores [ROWS, PAGE] of a page of keys."""
    for c in range(0, PAGE, 16 * VECTORS):
        for r in static_range(ROWS):
            for v in static_range(VECTORS):
                total[r, v] = zero_f32x16()
        add_products(total, queries, 4 * KEY_HEAD, block + 2 * c, 2 * PAGE, VECTORS, KEY_HEAD, ahead, pace)
        ahead += pace * KEY_HEAD
        for r in static_range(ROWS):
            for v in static_range(VECTORS):
                store_f32x16(scores + 4 * c + SCORES * r + 64 * v, total[r, v])


@template
def store_record(x, y, as_words, offset, record):
    """Round 32 numbers to a record of bytes, or to words: two records of bytes, first the high parts, then the low 7
    bits.

    The sum of each record is multiplied by ``offset``.
    """
    limit, largest, inverse = BYTE_LIMIT, largest_magnitude(x, y), ZERO
    if as_words:
        limit = WORD_LIMIT
    if largest > NEGLIGIBLE:
        inverse = limit / largest
    a, b = to_int_rounded(x * splat(inverse)), to_int_rounded(y * splat(inverse))
    store_f32(record + RECORD_SCALE, largest / limit)
    if as_words:
        store_bytes(record + RECORD, mask(a, 127))
        store_bytes(record + RECORD + 16, mask(b, 127))
        store_i32(record + RECORD + RECORD_SUM, sum_int_lanes(mask(a, 127) + mask(b, 127)) * np.int32(offset))
        a, b = shift_right_signed(a, 7), shift_right_signed(b, 7)
    store_bytes(record, a)
    store_bytes(record + 16, b)
    store_i32(record + RECORD_SUM, sum_int_lanes(a + b) * np.int32(offset))


@template
def score_tiles(queries, n_rows, block, scores, ahead):
    """Compute the scores [n_rows, PAGE] of a page of quantised keys; prefetches as much from ``ahead``."""
    for c in range(0, PAGE, 16):
        for g in range(KEY_HEAD // VALUES_PER_SCALE):
            offset = KEY_SCALES + 64 * KEY_BITS * (PAGE // 16 * g + c // 16)
            prefetch(ahead + 2 * PAGE * g + 2 * c)
            for v in static_range(KEY_BITS):
                prefetch(ahead + offset + 64 * v)
            for v in static_range(8):
                if KEY_BITS == 8:
                    w[v] = load_i8x64(block + offset + 64 * v)
                else:
                    w[v] = load_bits(block + offset + 64 * (v % 4), 4 * (v // 4), 15)
                    if KEY_BITS == 5:
                        w[v] = w[v] | load_bits_raised(block + offset + 256, v, 1, 4)
            scale = load_f16x16(block + 2 * PAGE * g + 2 * c)
            for r in range(n_rows):
                record, to = queries + 4 * KEY_HEAD * r + RECORD * g, scores + SCORES * r + 4 * c
                if KEY_BITS == 8:
                    dot = dot32_s8(zero_i32x16(), *w[0:8], record, load_splat_i32(record + RECORD_SUM))
                elif KEY_BITS == 5:
                    dot = dot32_u5(load_splat_i32(record + RECORD_SUM), *w[0:8], record)
                else:
                    dot = dot32_u4(load_splat_i32(record + RECORD_SUM), *w[0:8], record)
                score = to_float(dot) * (scale * load_splat_f32(record + RECORD_SCALE))
                if g > 0:
                    score = score + load_f32x16(to)
                store_f32x16(to, score)


@template
def score_rows(queries, block, scores, ahead, pace):
    """`score_page` for keys in the layout of values, [PAGE, KEY_HEAD]: a few keys at once for all rows."""
    sums = stack(64)
    for position in range(0, PAGE, VECTORS):
        keys = block + KEY_SCALES + UNIT * (KEY_HEAD // 16) * position
        for r in static_range(ROWS * VECTORS):
            total[r] = zero_f32x16()
        for i in range(0, KEY_HEAD, 16):
            prefetch(ahead)
            ahead += pace
            for v in static_range(VECTORS):
                entry[v] = LOAD(keys + UNIT * (KEY_HEAD // 16 * v + i // 16))
                if KEY_SCALES:
                    scale = load_splat_f16(block + 2 * PAGE * (i // VALUES_PER_SCALE) + 2 * (position + v))
                    entry[v] = entry[v] * scale
            for r in static_range(ROWS):
                query = load_f32x16(queries + 4 * KEY_HEAD * r + 4 * i)
                for v in static_range(VECTORS):
                    total[VECTORS * r + v] = fma(entry[v], query, total[VECTORS * r + v])
        if VECTORS == 2:
            store_f32x16(sums, sum_lanes_of_16(*total[0:16]))
            for r in static_range(ROWS):
                store_i64(scores + SCORES * r + 4 * position, load_i64(sums + 8 * r))
        else:
            store_f32x16(sums, sum_lanes_of_4(*total[0:4]))
            for r in static_range(ROWS):
                store_f32(scores + SCORES * r + 4 * position, load_f32(sums + 4 * r))


@template
def add_columns(weights, block, c, vectors, n, sums, scaled, ahead, pace):
    """`add_page` for ``vectors`` times 16 columns, starting at column ``c``."""
    address = sums + 4 * c
    for r in static_range(ROWS):
        for v in static_range(vectors):
            total[r, v] = load_f32x16(address + STATE * r + 64 * v)
    matrix = block + VALUE_SCALES + UNIT * (c // 16)
    if VALUE_SCALES:
        for g in static_range(PAGE // 16):
            scale = load_f16x16(block + 2 * PAGE * (c // VALUES_PER_SCALE) + 32 * g)
            for r in static_range(ROWS):
                weight = load_f32x16(weights + SCORES * r + 64 * g)
                store_f32x16(scaled + 4 * PAGE * r + 64 * g, weight * scale)
        add_products(total, scaled, 4 * PAGE, matrix, UNIT * (VALUE_ROW // 16), vectors, n, ahead, pace)
    else:
        add_products(total, weights, SCORES, matrix, UNIT * (VALUE_ROW // 16), vectors, n, ahead, pace)
    for r in static_range(ROWS):
        for v in static_range(vectors):
            store_f32x16(address + STATE * r + 64 * v, total[r, v])


@template
def add_page(weights, block, n, sums, scaled, ahead, pace):
    """Add the first ``n`` values of a page, times their weights [ROWS, PAGE], to the sums."""
    for c in range(0, VALUE_HEAD // (16 * VECTORS) * (16 * VECTORS), 16 * VECTORS):
        add_columns(weights, block, c, VECTORS, n, sums, scaled, ahead, pace)
        ahead += pace * PAGE
    if VALUE_HEAD % (16 * VECTORS):
        add_columns(weights, block, VALUE_HEAD - 16, 1, n, sums, scaled, ahead, pace)


@template
def add_tiles(weights, n_rows, block, n, sums, record, ahead):
    """`add_page` for quantised values.  Prefetches the same number of bytes from ``ahead``."""
    end = splat_int(np.int32(n - 1))
    for g in range(VALUE_HEAD // VALUES_PER_SCALE):
        for first in range(0, n, 32):
            offset = VALUE_SCALES + 128 * VALUE_BITS * (PAGE // 32 * g + first // 32)
            prefetch(ahead + 2 * PAGE * g + 2 * first)
            for v in static_range(2 * VALUE_BITS):
                prefetch(ahead + offset + 64 * v)
            for v in static_range(8):
                if VALUE_BITS == 8:
                    w[v] = load_i8x64(block + offset + 64 * v)
                    w[v + 8] = load_i8x64(block + offset + 512 + 64 * v)
                else:
                    w[v] = load_bits(block + offset + 64 * v, 0, 15)
                    w[v + 8] = load_bits(block + offset + 64 * v, 4, 15)
                    if VALUE_BITS == 5:
                        w[v] = with_fifth_bits(w[v], block + offset + 512 + 16 * v, 0)
                        w[v + 8] = with_fifth_bits(w[v + 8], block + offset + 512 + 16 * v, 1)
            for v in static_range(2):
                scale[v] = load_f16x16(block + 2 * (PAGE * g + first) + 32 * v)
                lanes[v] = lane_numbers() + splat_int(np.int32(first + 16 * v))
            for r in range(n_rows):
                for v in static_range(2):
                    weighted[v] = load_f32x16(weights + SCORES * r + 4 * first + 64 * v) * scale[v]
                    # Values after the last position are undefined.
                    weighted[v] = select_between(lanes[v], zero_i32x16(), end, weighted[v], zero_f32x16())
                if VALUE_BITS == 8:
                    store_record(weighted[0], weighted[1], 1, 1, record)
                else:
                    store_record(weighted[0], weighted[1], 0, -(1 << (VALUE_BITS - 1)), record)
                for v in static_range(2):
                    start = load_splat_i32(record + RECORD_SUM)
                    if VALUE_BITS == 8:
                        dot = shift_left(dot32_s8(zero_i32x16(), *w[8 * v : 8 * v + 8], record, start), 7)
                        start = load_splat_i32(record + RECORD + RECORD_SUM)
                        dot = dot32_s8(dot, *w[8 * v : 8 * v + 8], record + RECORD, start)
                    elif VALUE_BITS == 5:
                        dot = dot32_u5(start, *w[8 * v : 8 * v + 8], record)
                    else:
                        dot = dot32_u4(start, *w[8 * v : 8 * v + 8], record)
                    to = sums + STATE * r + 128 * g + 64 * v
                    store_f32x16(to, fma(to_float(dot), load_splat_f32(record + RECORD_SCALE), load_f32x16(to)))


@template
def cap_page(scores, n_rows, soft_cap):
    """Cap the scores [n_rows, PAGE] of a page, which are already divided by the cap."""
    for r in range(n_rows):
        for g in static_range(PAGE // 16):
            address = scores + SCORES * r + 64 * g
            store_f32x16(address, tanh(load_f32x16(address)) * splat(soft_cap))


@template
def lower_page(scores, n_rows, falls, position):
    """Subtract slope * distance from the scores [n_rows, PAGE] of a page whose first position is ``position``.

    falls: per row, the slope of its head, float32, and the position of its token, int32.
    """
    for r in range(n_rows):
        slope = splat(load_f32(falls + 8 * r))
        distance_to_first = splat(np.float32(load_i32(falls + 8 * r + 4) - position))
        for g in static_range(PAGE // 16):
            address = scores + SCORES * r + 64 * g
            distance = distance_to_first - to_float(splat_int(np.int32(16 * g)) + lane_numbers())
            distance = maximum(distance, zero_f32x16() - distance)
            store_f32x16(address, load_f32x16(address) - slope * distance)


@template
def bias_page(scores, n_rows, falls, position):
    """Add a bias for each distance to the scores [n_rows, PAGE] of a page whose first position is ``position``.

    falls: per row, the address of its head's bias for distance 0, and the position of its token, int64.
    """
    for r in range(n_rows):
        biases, before = load_i64(falls + 16 * r), position - load_i64(falls + 16 * r + 8)
        for i in range(PAGE):
            address = scores + SCORES * r + 4 * i
            distance = min(max(before + i, np.int64(-(BIASES // 2))), np.int64(BIASES // 2))
            store_f32(address, load_f32(address) + load_f32(biases + 4 * distance))


@template
def mask_page(scores, n_rows, limits, position):
    """Mask the scores [n_rows, PAGE] outside the rows' limits; the page starts at ``position``."""
    for r in range(n_rows):
        low = splat_int(np.int32(load_i64(limits + 16 * r) - position))
        high = splat_int(np.int32(load_i64(limits + 16 * r + 8) - position))
        for g in static_range(PAGE // 16):
            address = scores + SCORES * r + 64 * g
            lanes = splat_int(np.int32(16 * g)) + lane_numbers()
            store_f32x16(address, select_between(lanes, low, high, load_f32x16(address), splat(MASKED)))


@template
def softmax_weights(scores, n, state, ahead, n_ahead):
    """Convert ``n`` bytes of a row's scores to weights exp(score - largest); store the largest score and the total.

    Prefetches ``n_ahead`` bytes from ``ahead``.
    """
    pace = n_ahead * 64 // n
    for g in static_range(PAGE // 16):
        top[g] = splat(LOWEST)
    for i in range(0, n, 4 * PAGE):
        for g in static_range(PAGE // 16):
            top[g] = maximum(top[g], load_f32x16(scores + i + 64 * g))
    largest = splat(max_lanes(maximum(maximum(top[0], top[1]), maximum(top[2], top[3]))))
    total = zero_f32x16()
    for i in range(0, n, 64):
        prefetch(ahead)
        ahead += pace
        weight = exp(load_f32x16(scores + i) - largest)
        total = total + weight
        store_f32x16(scores + i, weight)
    store_f32x16(state + LARGEST, largest)
    store_f32x16(state + TOTAL, total)


@template
def clear(state, n_rows):
    """Initialise the states (see `state_bytes`) of rows that have processed no position."""
    for r in range(n_rows):
        for i in range(0, 4 * VALUE_HEAD, 64):
            store_f32x16(state + STATE * r + i, zero_f32x16())
        store_f32x16(state + STATE * r + LARGEST, splat(LOWEST))
        store_f32x16(state + STATE * r + TOTAL, zero_f32x16())


@template
def merge(state, split, n_rows):
    """Merge the states of a split into the rows' states."""
    for r in range(n_rows):
        ours, theirs = state + STATE * r, split + STATE * r
        a, b = load_f32x16(ours + LARGEST), load_f32x16(theirs + LARGEST)
        top = maximum(a, b)
        keep, add = exp(a - top), exp(b - top)
        for i in range(0, 4 * VALUE_HEAD, 64):
            store_f32x16(ours + i, fma(load_f32x16(theirs + i), add, load_f32x16(ours + i) * keep))
        store_f32x16(ours + LARGEST, top)
        total = load_f32x16(ours + TOTAL) * keep
        store_f32x16(ours + TOTAL, fma(load_f32x16(theirs + TOTAL), add, total))


@template
def write_rows(state, n_rows, first_row, start, head, group_size, value_dim, sinks, out, stride):
    """out = sums / total, for rows from number ``first_row`` of a sequence whose first token is ``start``.

    sinks: float32 [H], an additional score per query head, without a value.
    """
    for r in range(n_rows):
        row = first_row + r
        address = out + (start + row // group_size) * stride + 4 * (head * group_size + row % group_size) * value_dim
        if SINKS:
            sink = load_splat_f32(sinks + 4 * (head * group_size + row % group_size))
            largest = load_f32x16(state + STATE * r + LARGEST)
            top = maximum(largest, sink)
            keep = exp(largest - top)
            total = sum_lanes(load_f32x16(state + STATE * r + TOTAL) * keep)
            share = max_lanes(keep) / (total + max_lanes(exp(sink - top)))
        else:
            share = ONE / sum_lanes(load_f32x16(state + STATE * r + TOTAL))
        for i in range(value_dim):
            store_f32(address + 4 * i, load_f32(state + STATE * r + 4 * i) * share)
        if VALUE_ROTATION:
            hadamard(address, value_dim, VALUE_ROTATION)


@template
def copy_scales(block, index, gathered, i, n_bytes):
    """Copy float16 numbers [n_bytes / (2 * PAGE), PAGE] of one position, from ``index`` in a page to index i."""
    for c in range(0, n_bytes, 2 * PAGE):
        copy_i16(block + c + 2 * index, gathered + c + 2 * i)


@template
def copy_row(source, target, n_bytes):
    """Copy ``n_bytes`` bytes, a multiple of four."""
    for c in range(0, n_bytes // 64 * 64, 64):
        store_f32x16(target + c, load_f32x16(source + c))
    for c in range(n_bytes // 64 * 64, n_bytes, 4):
        store_i32(target + c, load_i32(source + c))


@template
def gather_latents(cache, table, page_bytes, first, n, selected, beside, gathered):
    """gathered = a block of n latents visible to a token, starting at number ``first``.

    selected: float32 [SELECTED].  ``beside``: int64 [4], used with ENTRIES: number of positions in the window, the
    position after the window, the address of the entries, and the sequence's block table of entries.
    """
    for i in range(n):
        number = first + i
        if ENTRIES:
            number -= load_i64(beside)
        if ENTRIES and number < 0:
            position = load_i64(beside + 8) + number
        elif SELECTED:
            position = np.int64(load_f32(selected + 4 * number))
        else:
            position = number
        if ENTRIES and number >= 0:
            position = ENTRIES * position + ENTRIES - 1
            block = block_at(load_i64(beside + 16), load_i64(beside + 24), position // PAGE, ENTRY_BLOCK)
            index = position % PAGE // ENTRIES
        else:
            block, index = block_at(cache, table, position // PAGE, page_bytes), position % PAGE
        copy_scales(block, index, gathered, i, KEY_SCALES)
        row = UNIT * (KEY_HEAD // 16)
        copy_row(block + KEY_SCALES + row * index, gathered + KEY_SCALES + row * i, row)


@template
def gather_keys(keys, table, page_bytes, selected, n, gathered):
    """gathered = a block of the keys at the n ``selected`` positions, float32 [n]."""
    for i in range(n):
        position = np.int64(load_f32(selected + 4 * i))
        block, index = block_at(keys, table, position // PAGE, page_bytes), position % PAGE
        if KEY_BITS == 16:
            copy_scales(block, index, gathered, i, 2 * PAGE * KEY_HEAD)
        else:
            copy_scales(block, index, gathered, i, KEY_SCALES)
            for g in range(KEY_HEAD // VALUES_PER_SCALE):
                source = block + KEY_SCALES + 64 * KEY_BITS * (PAGE // 16 * g + index // 16) + 4 * (index % 16)
                target = gathered + KEY_SCALES + 64 * KEY_BITS * (PAGE // 16 * g + i // 16) + 4 * (i % 16)
                for v in range(KEY_BITS):
                    store_i32(target + 64 * v, load_i32(source + 64 * v))


@template
def gather_values(values, table, page_bytes, selected, n, gathered):
    """gathered = a block of the values at the n ``selected`` positions, float32 [n]."""
    for i in range(n):
        position = np.int64(load_f32(selected + 4 * i))
        block, index = block_at(values, table, position // PAGE, page_bytes), position % PAGE
        if VALUE_BITS == 16:
            copy_row(block + 2 * VALUE_ROW * index, gathered + 2 * VALUE_ROW * i, 2 * VALUE_ROW)
        else:
            copy_scales(block, index, gathered, i, VALUE_SCALES)
            for g in range(VALUE_ROW // VALUES_PER_SCALE):
                source = block + VALUE_SCALES + 128 * VALUE_BITS * (PAGE // 32 * g + index // 32)
                target = gathered + VALUE_SCALES + 128 * VALUE_BITS * (PAGE // 32 * g + i // 32)
                codes, to = source + 64 * (index % 32 // 4) + index % 4, target + 64 * (i % 32 // 4) + i % 4
                for lane in range(16):
                    copy_i8(codes + 4 * lane, to + 4 * lane)
                    if VALUE_BITS == 8:
                        copy_i8(codes + 512 + 4 * lane, to + 512 + 4 * lane)
                if VALUE_BITS == 5:
                    codes = source + 512 + 16 * (index % 32 // 4) + index % 4
                    to = target + 512 + 16 * (i % 32 // 4) + i % 4
                    for v in range(4):
                        copy_i8(codes + 4 * v, to + 4 * v)


@device
def whole_page(cache, table, page_bytes, selected, n, gathered):
    """Return the address of the page that starts with the selected positions, float32 [n]; else ``gathered``."""
    first, block = np.int64(load_f32(selected)), gathered
    if first % PAGE == 0 and np.int64(load_f32(selected + 4 * (n - 1))) == first + n - 1:
        block = block_at(cache, table, first // PAGE, page_bytes)
    return block


@template
def page_seen(block: Registers, cache, table, page, page_bytes, limits, selected, beside, gathered, gather):
    """block[0] = the block of the visible positions with numbers PAGE * page …, in the cache or gathered.

    gather: `gather_keys` or `gather_values`; not used for latents.
    """
    n = min(np.int64(PAGE), load_i64(limits + 8) + 1 - PAGE * page)
    block[0] = gathered
    if VALUES_IN_KEYS:
        gather_latents(cache, table, page_bytes, PAGE * page, n, selected, beside, gathered)
    else:
        page_selection = selected + 4 * PAGE * page
        block[0] = whole_page(cache, table, page_bytes, page_selection, n, gathered)
        if block[0] == gathered:
            gather(cache, table, page_bytes, page_selection, n, gathered)


@template
def score_split(
    queries, n_rows, limits, keys, table, page_bytes, low, high, scores, soft_cap, falls, ahead, selected, beside,
    gathered,
):  # fmt: skip
    """Compute the rows' scores for pages low … high of a split, and prefetch from ``ahead``."""
    pace = (KEY_BLOCK * ROWS - 1) // (KEY_HEAD * PAGE // 16 // VECTORS * n_rows) + 1
    for page in range(low, high):
        page_scores, next_block = scores + 4 * PAGE * (page % SPLIT_PAGES), ahead
        if GATHERED:
            page_seen(block, keys, table, page, page_bytes, limits, selected, beside, gathered, gather_keys)
        else:
            block[0] = block_at(keys, table, page, page_bytes)
            if page + 1 < high:
                next_block = block_at(keys, table, page + 1, page_bytes)
        for some in range(0, n_rows, ROWS):
            here = min(ROWS, n_rows - some)
            first, last = limits + 16 * some, limits + 16 * (some + here - 1)
            if load_i64(first) // PAGE <= page and page * PAGE <= load_i64(last + 8):
                row = page_scores + SCORES * some
                if KEY_BITS < 16 and not VALUES_IN_KEYS:
                    score_tiles(queries + 4 * KEY_HEAD * some, here, block[0], row, next_block)
                elif VALUES_IN_KEYS:
                    score_rows(queries + 4 * KEY_HEAD * some, block[0], row, next_block, pace)
                else:
                    score_page(queries + 4 * KEY_HEAD * some, block[0], row, next_block, pace)
                if KEY_BITS == 16 or VALUES_IN_KEYS:
                    next_block += (KEY_BLOCK * ROWS - 1) // n_rows + 1
                if SOFT_CAP:
                    cap_page(row, here, soft_cap)
                if ALIBI:
                    lower_page(row, here, falls + FALL * some, page * PAGE)
                if BIASES:
                    bias_page(row, here, falls + FALL * some, page * PAGE)
                if page * PAGE < load_i64(last) or load_i64(first + 8) < page * PAGE + PAGE - 1:
                    mask_page(row, here, first, page * PAGE)


@template
def split_weights(scores, n_rows, limits, low, high, states, ahead):
    """Convert the rows' scores for pages low … high of a split to weights; skips groups of ROWS rows that see no
    page.

    Prefetches one block from ``ahead``.
    """
    share = VALUE_BLOCK // n_rows + 1
    for r in range(n_rows):
        first = limits + 16 * (r // ROWS * ROWS)
        begin = max(low, load_i64(first) // PAGE)
        last = limits + 16 * (min(r // ROWS * ROWS + ROWS, n_rows) - 1)
        stop = min(high, load_i64(last + 8) // PAGE + 1)
        if begin < stop:
            row_scores = scores + SCORES * r + 4 * PAGE * (begin % SPLIT_PAGES)
            softmax_weights(row_scores, 4 * PAGE * (stop - begin), states + STATE * r, ahead + share * r, share)


@template
def add_split(
    weights, n_rows, limits, values, table, page_bytes, low, high, scaled, sums, ahead, selected, beside, gathered
):
    """Add the weighted values of pages low … high of a split to the rows' sums, and prefetch from ``ahead``."""
    n_steps = (VALUE_HEAD + 16 * VECTORS - 1) // (16 * VECTORS) * PAGE
    pace = (VALUE_BLOCK * ROWS - 1) // (n_steps * n_rows) + 1
    for page in range(low, high):
        page_weights, next_block = weights + 4 * PAGE * (page % SPLIT_PAGES), ahead
        if GATHERED:
            page_seen(block, values, table, page, page_bytes, limits, selected, beside, gathered, gather_values)
        else:
            block[0] = block_at(values, table, page, page_bytes)
            if page + 2 < high:
                next_block = block_at(values, table, page + 2, page_bytes)
        for some in range(0, n_rows, ROWS):
            here = min(ROWS, n_rows - some)
            first, last = limits + 16 * some, limits + 16 * (some + here - 1)
            n = min(np.int64(PAGE), load_i64(last + 8) + 1 - page * PAGE)
            if load_i64(first) // PAGE <= page and n > 0:
                if VALUE_BITS < 16 and not VALUES_IN_KEYS:
                    add_tiles(
                        page_weights + SCORES * some, here, block[0], n, sums + STATE * some, scaled, next_block
                    )
                else:
                    add_page(page_weights + SCORES * some, block[0], n, sums + STATE * some, scaled, next_block, pace)
                    next_block += (VALUE_BLOCK * ROWS - 1) // n_rows + 1


@template
def attend_splits(
    queries, n_rows, limits, keys, values, table, key_bytes, value_bytes, first_split, stop_split, soft_cap, falls,
    state, selected, beside, gathered,
):  # fmt: skip
    """Compute the rows' states after the splits first_split … stop_split; skips splits that no row sees."""
    scores, scaled, split_state = stack(HELD * SCORES), stack(4 * PAGE * ROWS), stack(HELD * STATE)
    # Rows are in order: the first row has the lowest first position, the last row the highest last position.
    first_page = load_i64(limits) // PAGE
    n_pages = load_i64(limits + 16 * (n_rows - 1) + 8) // PAGE + 1
    clear(state, n_rows)
    for split in range(max(first_split, first_page // SPLIT_PAGES), stop_split):
        low, high = max(first_page, split * SPLIT_PAGES), min(n_pages, (split + 1) * SPLIT_PAGES)
        clear(split_state, n_rows)
        ahead = gathered
        if not GATHERED:
            ahead = block_at(values, table, low, value_bytes)
        score_split(
            queries, n_rows, limits, keys, table, key_bytes, low, high, scores, soft_cap, falls, ahead,
            selected, beside, gathered,
        )  # fmt: skip
        if not GATHERED:
            ahead = block_at(values, table, min(low + 1, high - 1), value_bytes)
        split_weights(scores, n_rows, limits, low, high, split_state, ahead)
        if not GATHERED:
            ahead = block_at(keys, table, min(high, n_pages - 1), key_bytes)
        add_split(
            scores, n_rows, limits, values, table, value_bytes, low, high, scaled, split_state, ahead,
            selected, beside, gathered,
        )  # fmt: skip
        merge(state, split_state, n_rows)


@template
def copy_states(state, n_rows, out):
    """Copy the rows' states for `merge_partials`."""
    for i in range(0, n_rows * STATE, 64):
        store_f32x16(out + i, load_f32x16(state + i))


@template
def round_query(row_query):
    """Round a query in place to the records that are multiplied with codes of keys; records are shorter."""
    offset = 1 if KEY_BITS == 8 else -(1 << (KEY_BITS - 1))
    for g in range(KEY_HEAD // VALUES_PER_SCALE):
        x, y = load_f32x16(row_query + 128 * g), load_f32x16(row_query + 128 * g + 64)
        store_record(x, y, 0, offset, row_query + RECORD * g)


@template
def load_fall(falls, r, by_distance, head, position):
    """Store how the scores of row r depend on the distance: the head's slope, or the address of its biases."""
    if ALIBI:
        store_f32(falls + 8 * r, load_f32(by_distance + 4 * head))
        store_i32(falls + 8 * r + 4, load_i32(position))
    if BIASES:
        store_i64(falls + 16 * r, by_distance + 4 * (head * BIASES + BIASES // 2))
        store_i64(falls + 16 * r + 8, np.int64(load_i32(position)))


@kernel
def attention(
    begin, end, batch, tiles, n_kv_heads, group_size, q, q_stride, key_dim, value_dim,
    starts, positions, firsts, lasts, block_tables, block_stride, window, keys, values,
    out, out_stride, partials, sinks, by_distance, selected, selected_stride, entries, entry_tables,
    scale: float, soft_cap: float,
):  # fmt: skip
    """out = softmax(scale * q @ keys.T, over visible positions) @ values.

    With SOFT_CAP, the input of softmax is soft_cap * tanh(scale * q @ keys.T); ``scale`` is already divided by the
    cap.

    tiles: int64 [n, 7]: sequence, first row, number of rows, first split, end split (exclusive), -1 or the number of
    the partial that receives the sums instead of ``out``, and the sequence's length in the cache.  Unit u is tile
    u % n of head u // n.
    q: float32 [T, H * key_dim].  out: float32 [T, H * value_dim].  starts: int32 [S], first token of each sequence.
    positions, firsts, lasts: int32 [T].  block_tables: int32 [S, block_stride].  window: visible positions up to
    ``firsts``, or the chunk length with CHUNKED.
    keys, values: blocks of ``KEY_BLOCK`` and ``VALUE_BLOCK`` bytes [n_pages, n_kv_heads]
    (`localllm.kernels.cpu.cache_types`).
    partials: float32 [n_partials, n_kv_heads, TILE_ROWS, STATE / 4].  STATE: see `state_bytes`.  sinks: float32 [H].
    by_distance: with ALIBI, the slopes of the heads, float32 [H]; with BIASES, their biases, float32 [H, BIASES].
    selected: float32 [T, SELECTED], or with BY_HEAD [T, n_kv_heads, SELECTED].
    entries, entry_tables: with ENTRIES, blocks of ``ENTRY_BLOCK`` bytes [n_pages], and their block tables.
    """
    n_tiles, beside = load_i64(batch), stack(64)
    gathered, falls = stack(GATHERED_BLOCK if GATHERED else 64), stack(FALL * HELD if ALIBI or BIASES else 64)
    queries, limits, state = stack(4 * HELD * KEY_HEAD), stack(16 * HELD), stack(HELD * STATE)
    key_bytes, value_bytes = n_kv_heads * KEY_BLOCK, n_kv_heads * VALUE_BLOCK
    for unit in range(begin, end):
        head = unit // n_tiles
        tile = tiles + unit % n_tiles * 56
        sequence, first_row, n_rows = load_i64(tile), load_i64(tile + 8), load_i64(tile + 16)
        start = np.int64(load_i32(starts + 4 * sequence))
        table = block_tables + 4 * sequence * block_stride
        head_keys, head_values = keys + head * KEY_BLOCK, values + head * VALUE_BLOCK
        own_selected = selected + 4 * SELECTED * BY_HEAD * head
        n_computed = (n_rows + ROW_STEP - 1) // ROW_STEP * ROW_STEP
        for r in range(n_computed):
            row = first_row + min(r, n_rows - 1)
            token = start + row // group_size
            query_head, row_query = head * group_size + row % group_size, queries + 4 * KEY_HEAD * r
            load_query(q + token * q_stride + 4 * query_head * key_dim, key_dim, scale, row_query)
            if KEY_BITS < 16 and not VALUES_IN_KEYS:
                round_query(row_query)
            load_fall(falls, r, by_distance, query_head, positions + 4 * token)
            token_selection = own_selected + token * selected_stride
            load_limits(
                firsts + 4 * token, lasts + 4 * token, window, load_i64(tile + 48), limits + 16 * r,
                token_selection,
            )  # fmt: skip
        first, stop, first_token = load_i64(tile + 24), load_i64(tile + 32), start + first_row // group_size
        if ENTRIES:
            n_seen = np.int64(load_i32(positions + 4 * first_token)) + 1
            store_i64(beside, min(n_seen, window))
            store_i64(beside + 8, n_seen)
            store_i64(beside + 16, entries)
            store_i64(beside + 24, entry_tables + 4 * sequence * block_stride)
        attend_splits(
            queries, n_computed, limits, head_keys, head_values, table, key_bytes, value_bytes,
            first, stop, soft_cap, falls,
            state, own_selected + first_token * selected_stride, beside, gathered,
        )  # fmt: skip
        partial = load_i64(tile + 40)
        if partial < 0:
            write_rows(state, n_rows, first_row, start, head, group_size, value_dim, sinks, out, out_stride)
        else:
            copy_states(state, n_rows, partials + (partial * n_kv_heads + head) * (TILE_ROWS * STATE))


@kernel
def merge_partials(
    begin, end, batch, tiles, n_kv_heads, group_size, value_dim, starts, partials, sinks, out, out_stride
):  # fmt: skip
    """Merge the partials of each tile in order, and write its rows.

    tiles: int64 [n, 5]: sequence, first row, number of rows, first partial, number of partials.  The other
    parameters are described in `attention`.
    """
    n_tiles = load_i64(batch)
    state = stack(TILE_ROWS * STATE)
    for unit in range(begin, end):
        head = unit // n_tiles
        tile = tiles + unit % n_tiles * 40
        first_row, n_rows, first_partial = load_i64(tile + 8), load_i64(tile + 16), load_i64(tile + 24)
        start = np.int64(load_i32(starts + 4 * load_i64(tile)))
        clear(state, n_rows)
        for partial in range(first_partial, first_partial + load_i64(tile + 32)):
            merge(state, partials + (partial * n_kv_heads + head) * (TILE_ROWS * STATE), n_rows)
        write_rows(state, n_rows, first_row, start, head, group_size, value_dim, sinks, out, out_stride)
