"""Selection of the positions for attention by an indexer's scores (`localllm.kernels.operations.IndexSelect`), and
compression of groups of tokens to single entries (`localllm.kernels.operations.Compress`).

The scores of a token are a row, float32 [positions].  There are as many rows as lanes, the units of work.  In a batch
with no more tokens than lanes, each token has its own row, and lanes share its work, so that decoding uses all
threads.  In larger batches each lane scores token after token, and reuses one row.

If whole runs of positions are selected (RUN), each run has a key: the key of its last position, or the key that
`pool_keys` computes from its tokens and stores after it.  If each head selects for itself (LAST; CHOICES), a row is
[runs, CHOICES], the largest product with a key of each run; the last LAST runs are always selected.  If a cache has
one entry per STRIDE tokens, numbers of entries are selected.

The k largest scores are found by radix select.  Floats are mapped to integers in the same order.  From the highest
digit to the lowest, the digit of the k-th largest score is determined, and smaller scores are discarded.  All greater
scores are selected, and the first of the equal scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.kernels.cpu.attention import LOWEST, SCORES, block_at, load_query, score_rows
from localllm.kernels.cpu.cache import block_bytes
from localllm.kernels.cpu.cache_types import PAGE, layouts_of
from localllm.kernels.cpu.compiler import kernel
from localllm.kernels.cpu.elementwise import exp
from localllm.kernels.cpu.memory import padded
from localllm.kernels.cpu.simd import *
from localllm.kernels.cpu.templates import device, static_range, template
from localllm.kernels.operations import Compress, IndexSelect
from localllm.kernels.operations.compressed import MOST_RUN

#: Pages in a part, the unit that lanes score in turn: a whole number of runs.
PART = MOST_RUN // PAGE
#: Bits of a digit.
DIGIT = 11
ZERO, ONE = np.float32(0), np.float32(1)
#: A score greater than all others.
HIGHEST = np.float32(3e38)


def constants(op: IndexSelect, *, wide: bool) -> dict[str, Any]:
    has_many = wide and op.n_heads > 4
    rows, (layout, _) = 8 if has_many else 4, layouts_of(op.cache)
    return {
        "HEADS": op.n_heads,
        "PADDED": -(-op.n_heads // rows) * rows,
        "TOP": op.k // op.run,
        "CHOICES": op.n_choices,
        "WIDTH": op.result.width // op.n_choices,
        "RUN": op.run,
        "STRIDE": op.cache.stride,
        "LAST": op.n_last,
        # With this many positions missing, an incomplete run counts as a run.
        "MISSING": op.run - 1 if op.n_last else 0,
        "WEIGHTED": int(op.head_weights is not None),
        "DIM": op.dim,
        "POOL": 4 * padded(op.dim),
        "RUN_KEY": 0 if op.pool is None else 2 * op.dim,
        "KEY_HEAD": layout.head(op.cache.key_dim),
        "KEY_BLOCK": block_bytes(op.cache)[0],
        "KEY_SCALES": layout.scale_bytes(op.cache.key_dim),
        "ROWS": rows,
        "VECTORS": 2 if has_many else 1,
        "LOAD": layout.load,
        "UNIT": layout.unit,
    }


def compress_constants(op: Compress) -> dict[str, Any]:
    layout, _ = layouts_of(op.cache)
    return {
        "RUN": op.run,
        "SERIES": op.n_series,
        "DIM": op.cache.key_dim,
        "KEY_BLOCK": layout.block_bytes(op.cache.key_dim),
        "LOAD": layout.load,
    }


@device
def sequence_of(token, starts):
    s = np.int64(0)
    while np.int64(load_i32(starts + 4 * (s + 1))) <= token:
        s += 1
    return s


@device
def ordered(address):
    """Return the bits of a float as an integer from 0 to 2^32, in the order of the floats."""
    bits = np.int64(load_i32(address))
    if bits < 0:
        bits ^= np.int64(0x7FFFFFFF)
    return bits + np.int64(1 << 31)


@template
def score_pages(q, weights, cache, table, low, high, row):
    """row[PAGE * low …] = the scores of pages low … high: one per run of positions, or one per run and head."""
    queries, scores, factors = stack(4 * PADDED * KEY_HEAD), stack(ROWS * SCORES), stack(4 * PADDED)
    for h in range(PADDED):
        # After the last head, its score is computed again with a weight of 0.
        unit_scale, query = ONE, q + 4 * DIM * min(h, HEADS - 1)
        load_query(query, DIM, unit_scale, queries + 4 * KEY_HEAD * h)
        weight = ONE
        if WEIGHTED:
            weight = load_f32(weights + 4 * min(h, HEADS - 1))
        store_f32(factors + 4 * h, weight if h < HEADS else ZERO)
    for page in range(low, high):
        block = block_at(cache, table, page, KEY_BLOCK)
        if LAST:
            for some in range(0, PADDED, ROWS):
                score_rows(queries + 4 * KEY_HEAD * some, block, scores, block, 0)
                for r in range(min(ROWS, HEADS - some)):
                    for first in range(0, PAGE, min(RUN, PAGE)):
                        best, address = LOWEST, row + 4 * HEADS * ((PAGE * page + first) // RUN) + 4 * (some + r)
                        if (PAGE * page + first) % RUN:
                            best = load_f32(address)
                        if RUN % 16 == 0:
                            top = load_f32x16(scores + SCORES * r + 4 * first)
                            for i in range(first + 16, first + min(RUN, PAGE), 16):
                                top = maximum(top, load_f32x16(scores + SCORES * r + 4 * i))
                            best = max(best, max_lanes(top))
                        else:
                            for i in range(first, first + min(RUN, PAGE)):
                                best = max(best, load_f32(scores + SCORES * r + 4 * i))
                        store_f32(address, best + ZERO)
        elif STRIDE * RUN > 1:
            for j in range(PAGE // (STRIDE * RUN)):
                key, score = block + 2 * (KEY_HEAD * (RUN * j + RUN - 1) + RUN_KEY), ZERO
                for h in range(HEADS):
                    product = zero_f32x16()
                    for i in range(0, DIM, 16):
                        product = fma(LOAD(key + 2 * i), load_f32x16(queries + 4 * (KEY_HEAD * h + i)), product)
                    score += max(sum_lanes(product), ZERO) * load_f32(factors + 4 * h)
                store_f32(row + 4 * (PAGE // (STRIDE * RUN) * page + j), score + ZERO)
        else:
            for g in static_range(PAGE // 16):
                totals[g] = zero_f32x16()
            for some in range(0, PADDED, ROWS):
                score_rows(queries + 4 * KEY_HEAD * some, block, scores, block, 0)
                for r in range(ROWS):
                    factor = load_splat_f32(factors + 4 * (some + r))
                    for g in static_range(PAGE // 16):
                        score = maximum(load_f32x16(scores + SCORES * r + 64 * g), splat(ZERO))
                        totals[g] = fma(score, factor, totals[g])
            for g in static_range(PAGE // 16):
                store_f32x16(row + 4 * PAGE * page + 64 * g, totals[g] + splat(ZERO))  # -0 becomes 0


@template
def choose(row, near, n_seen, out):
    """out = the positions among the first ``n_seen`` in the TOP runs with the largest scores, and all positions after
    the last whole run; then -1.

    near: int32 [runs], scratch memory for the remaining candidates.
    """
    n, address, end_of_runs = (n_seen + MISSING) // RUN, out, np.int64(0)
    if n > TOP:
        end_of_runs = n * RUN
        for i in range(n - LAST, n):
            store_f32(row + 4 * CHOICES * i, HIGHEST)
        counts = stack(4 << DIGIT)
        prefix, n_missing, above, n_near = np.int64(0), np.int64(TOP), np.int64(32), n
        for turn in range(3):
            shift = max(np.int64(0), above - DIGIT)
            last = (np.int64(1) << (above - shift)) - 1
            for i in range(last + 1):
                store_i32(counts + 4 * i, np.int32(0))
            for i in range(n_near):
                bits = ordered(row + 4 * CHOICES * (i if turn == 0 else np.int64(load_i32(near + 4 * i))))
                if bits >> above == prefix:
                    count = counts + 4 * (bits >> shift & last)
                    store_i32(count, np.int32(load_i32(count) + 1))
            digit = last
            while np.int64(load_i32(counts + 4 * digit)) < n_missing:
                n_missing -= np.int64(load_i32(counts + 4 * digit))
                digit -= 1
            prefix, above, n_kept = prefix << (above - shift) | digit, shift, np.int64(0)
            for i in range(n_near):
                run = i if turn == 0 else np.int64(load_i32(near + 4 * i))
                store_i32(near + 4 * n_kept, np.int32(run))
                if ordered(row + 4 * CHOICES * run) >> above >= prefix:
                    n_kept += 1
            n_near = n_kept
        for i in range(n_near):
            run = np.int64(load_i32(near + 4 * i))
            is_equal = ordered(row + 4 * CHOICES * run) == prefix
            if not is_equal or n_missing > 0:
                if is_equal:
                    n_missing -= 1
                for j in range(min(np.int64(RUN), n_seen - RUN * run)):
                    store_f32(address, np.float32(RUN * run + j))
                    address += 4
    for i in range(end_of_runs, n_seen):
        store_f32(address, np.float32(i))
        address += 4
    while address < out + 4 * WIDTH:
        store_f32(address, -ONE)
        address += 4


@kernel
def pool_keys(begin, end, positions, slots, pool, keys):
    """Compute the key of each run that ends with a token of the batch.

    The key is the sum of the tokens' keys times the softmax of (their gates + the pool's weights).
    slots: int64 [T], page * PAGE + position in the page.  pool: float32 [RUN, POOL / 4].  keys: in the layout of
    values, [key | gate | key of a run].
    """
    row = stack(64)
    for token in range(begin, end):
        if load_i32(positions + 4 * token) % RUN == RUN - 1:
            slot = load_i64(slots + 8 * token)
            first = keys + KEY_BLOCK * (slot // PAGE) + 2 * KEY_HEAD * (slot % PAGE - RUN + 1)
            for c in range(0, DIM, 16):
                top, total, key = splat(LOWEST), zero_f32x16(), zero_f32x16()
                for i in range(RUN):
                    gate = LOAD(first + 2 * (KEY_HEAD * i + DIM + c)) + load_f32x16(pool + POOL * i + 4 * c)
                    top = maximum(top, gate)
                for i in range(RUN):
                    gate = LOAD(first + 2 * (KEY_HEAD * i + DIM + c)) + load_f32x16(pool + POOL * i + 4 * c)
                    weight = exp(gate - top)
                    total = total + weight
                    key = fma(LOAD(first + 2 * (KEY_HEAD * i + c)), weight, key)
                store_f32x16(row, key / total)
                for i in range(16):
                    store_f16(first + 2 * (KEY_HEAD * (RUN - 1) + 2 * DIM + c + i), load_f32(row + 4 * i))


@kernel
def compress(begin, end, starts, positions, block_tables, block_stride, rows, biases, biases_stride, out, out_stride):
    """out [T, DIM] = the compressed entry of each run of RUN tokens, at its last token; zeros at other tokens.

    An entry is the sum of the run's values.  Each channel is weighted by the softmax of its gates plus the biases.
    rows: blocks of ``KEY_BLOCK`` bytes [n_pages, 2 * SERIES]; the last SERIES contain gates.  With two SERIES, the
    sum uses the first series of the previous run, if it exists, and the second series of the current run.
    biases: float32 [RUN, biases_stride / 4].  `localllm.kernels.cpu.attention.attention` describes the other
    parameters.
    """
    for token in range(begin, end):
        position, to = np.int64(load_i32(positions + 4 * token)), out + out_stride * token
        if position % RUN != RUN - 1:
            for c in range(0, 4 * DIM, 64):
                store_f32x16(to + c, zero_f32x16())
        else:
            table = block_tables + 4 * sequence_of(token, starts) * block_stride
            first = max(np.int64(0), position + 1 - RUN * SERIES)
            for c in range(0, DIM, 16):
                top, total, values = splat(LOWEST), zero_f32x16(), zero_f32x16()
                for turn in range(2):
                    for p in range(first, position + 1):
                        series = 0 if p <= position - RUN else SERIES - 1
                        block = block_at(rows, table, p // PAGE, 2 * SERIES * KEY_BLOCK)
                        address = block + series * KEY_BLOCK + 2 * (DIM * (p % PAGE) + c)
                        bias = biases + biases_stride * (p % RUN) + 4 * (DIM * series + c)
                        gate = LOAD(address + SERIES * KEY_BLOCK) + load_f32x16(bias)
                        if turn == 0:
                            top = maximum(top, gate)
                        else:
                            weight = exp(gate - top)
                            total = total + weight
                            values = fma(LOAD(address), weight, values)
                store_f32x16(to + 4 * c, values / total)


@kernel
def index_scores(
    begin, end, batch, lanes, q, q_stride, weights, weights_stride, starts, positions, block_tables, block_stride,
    keys, scores, row_bytes,
):  # fmt: skip
    """Compute the scores of few tokens, in one row per token: each lane computes some parts.  Does nothing for more
    tokens.

    q: float32 [T, HEADS * DIM].  weights: float32 [T, HEADS].  scores: float32 [lanes, row_bytes / 4]; the second
    half of each row is scratch memory for `choose`.  `localllm.kernels.cpu.attention.attention` describes the other
    parameters.
    """
    n_tokens = load_i64(batch)
    if n_tokens <= lanes:
        for unit in range(begin, end):
            turn = np.int64(0)
            for token in range(n_tokens):
                n = ((np.int64(load_i32(positions + 4 * token)) + 1) // STRIDE + MISSING) // RUN
                if n > TOP:
                    table = block_tables + 4 * sequence_of(token, starts) * block_stride
                    n_pages = (STRIDE * RUN * (n - LAST) - 1) // PAGE + 1
                    for first in range(0, n_pages, PART):
                        if turn % lanes == unit:
                            score_pages(
                                q + q_stride * token, weights + weights_stride * token, keys, table,
                                first, min(n_pages, first + PART), scores + row_bytes * token,
                            )  # fmt: skip
                        turn += 1


@kernel
def index_select(
    begin, end, batch, lanes, q, q_stride, weights, weights_stride, starts, positions, block_tables, block_stride,
    keys, scores, row_bytes, out, out_stride,
):  # fmt: skip
    """out [T, CHOICES, WIDTH] = the positions that each token attends to.  Also computes scores of many tokens."""
    n_tokens = load_i64(batch)
    for unit in range(begin, end):
        for token in range(unit, n_tokens, lanes):
            n_seen = (np.int64(load_i32(positions + 4 * token)) + 1) // STRIDE
            row = scores + row_bytes * (token if n_tokens <= lanes else unit)
            n = (n_seen + MISSING) // RUN
            if n > TOP and n_tokens > lanes:
                table = block_tables + 4 * sequence_of(token, starts) * block_stride
                score_pages(
                    q + q_stride * token, weights + weights_stride * token, keys, table,
                    0, (STRIDE * RUN * (n - LAST) - 1) // PAGE + 1, row,
                )  # fmt: skip
            for choice in range(CHOICES):
                choose(row + 4 * choice, row + row_bytes // 2, n_seen, out + out_stride * token + 4 * WIDTH * choice)
