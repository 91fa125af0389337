"""Mixtures of experts: selection of each token's experts, and products of rows with the experts' matrices.

A token forms a *pair* with every expert that it uses, k in total; pair ``token * k + rank`` is the row with this
number in the experts' results.  Pairs of one expert are stored at neighbouring *places*; the first place starts a
tile of activations.  An expert's weights are therefore read once for all its pairs, and not at all without pairs.
Each product is the same sum in the same order as any other product (`localllm.kernels.cpu.matmul`).

    pairs    0  1  2  3  4  5     of experts  7  2  7  5  7  2
    places   [ 1  5 . . . . . . ][ 3 . . . . . . . ][ 0  2  4 . . . . . ]
               expert 2            expert 5           expert 7
"""

from __future__ import annotations

import numpy as np

from localllm.kernels.cpu.compiler import kernel
from localllm.kernels.cpu.dots import scale_place, token_place
from localllm.kernels.cpu.elementwise import exp, quantise_row, sigmoid, softplus
from localllm.kernels.cpu.matmul import (
    FLOAT_GROUPS,
    FLOAT_SLAB,
    MAX_TOKENS,
    REST_SUMS,
    SLAB,
    few_tokens,
    multiply_tokens,
    one_float_token,
    several_float_tokens,
    store_rows,
)
from localllm.kernels.cpu.simd import *
from localllm.kernels.cpu.templates import device, static_range
from localllm.kernels.cpu.tiles import TOKENS, X_STEP, x_tile_bytes
from localllm.kernels.operations.experts import MAX_GROUPS, SPARSEMIXER_DISTANCE

NONE = np.int64(-1)
DISTANCE = np.float32(SPARSEMIXER_DISTANCE)
INFINITY = np.float32(np.inf)

#: Bytes of an entry, which describes an active expert: its number, its first place, and its number of pairs.
ENTRY = 24


# -- Routing -------------------------------------------------------------------------------------------------------


@device
def load_logit(address):
    """Load a logit; NaN becomes the lowest value, so that logits have a total order."""
    logit = load_f32(address)
    if logit == logit:
        return logit
    return -INFINITY


@device
def exp_of(x):
    return max_lanes(exp(splat(x)))


@device
def sum_of_exps(row, n, peak):
    """Return the sum of exp(x - peak) over a row of n values, without the padding."""
    total = zero_f32x16()
    last = splat_int(np.int32(n - 1))
    for i in range(0, n, 16):
        e = exp(load_f32x16(row + 4 * i) - splat(peak))
        numbers = lane_numbers() + splat_int(np.int32(i))
        total = total + select_between(numbers, zero_i32x16(), last, e, zero_f32x16())
    return sum_lanes(total)


@device
def sum_of_near(row, n, expert):
    """Return the divisor of an expert's weight in "sparsemixer", see `localllm.kernels.operations.Route`."""
    best, total = load_logit(row + 4 * expert), np.float32(0)
    for other in range(n):
        logit = load_logit(row + 4 * other)
        is_left = logit < best or (logit == best and other >= expert)
        if is_left and best - logit <= DISTANCE * max(abs(logit), best):
            total += exp_of(logit - best)
    return total


@device
def best_of_group(row, n, n_best):
    """Return the largest of a row of n values, or the sum of the two largest."""
    first, second = -INFINITY, -INFINITY
    for i in range(n):
        x = load_logit(row + 4 * i)
        if x > first:
            first, second = x, first
        elif x > second:
            second = x
    if n_best == 1:
        return first
    return first + second


@kernel
def expert_scores(
    begin, end, logits, stride, n_experts, bias, n_groups, n_top_groups, n_best, expert_ids, expert_ids_stride, k,
    probabilities, scores,
):  # fmt: skip
    """Compute probabilities of experts, and the scores that select experts; a unit of work is a token.

    GATING: 0 softmax, 1 sigmoid, 2 √softplus, 3 sigmoid of logits that select.  scores: probabilities, or with 3
    logits, (+ bias), or -infinity outside the ``n_top_groups`` best groups.  Groups are ordered by their best score,
    or by the sum of their two best scores (``n_best``).  With ``expert_ids``, float32 [T, k], scores are -infinity
    except for these experts.
    """
    sums = stack(4 * MAX_GROUPS)
    size = n_experts // n_groups
    for token in range(begin, end):
        row, to, score = logits + token * stride, probabilities + token * stride, scores + token * stride
        peak, inverse = np.float32(0), np.float32(1)
        if GATING == 0:
            peak = load_logit(row)
            for expert in range(1, n_experts):
                peak = max(peak, load_logit(row + 4 * expert))
            inverse = np.float32(1) / sum_of_exps(row, n_experts, peak)
        for i in range(0, 4 * n_experts, 64):
            x = load_f32x16(row + i)
            if GATING == 0:
                p = exp(x - splat(peak)) * splat(inverse)
            elif GATING == 1 or GATING == 3:
                p = sigmoid(x)
            else:
                p = sqrt_lanes(softplus(x))
            store_f32x16(to + i, p)
            if GATING == 3:
                p = x
            if bias != 0:
                p = p + load_f32x16(bias + i)
            store_f32x16(score + i, p)
        if expert_ids != 0:
            for i in range(0, 4 * n_experts, 64):
                store_f32x16(score + i, splat(-INFINITY))
            for rank in range(k):
                offset = 4 * np.int64(load_f32(expert_ids + token * expert_ids_stride + 4 * rank))
                store_f32(score + offset, load_f32(to + offset))
        if n_groups > 1:
            for group in range(n_groups):
                store_f32(sums + 4 * group, best_of_group(score + 4 * size * group, size, n_best))
            for group in range(n_groups):
                group_sum, better = load_f32(sums + 4 * group), 0
                for other_group in range(n_groups):
                    other_sum = load_f32(sums + 4 * other_group)
                    if other_sum > group_sum or (other_sum == group_sum and other_group < group):
                        better += 1
                if better >= n_top_groups:
                    for expert in range(size * group, size * group + size):
                        store_f32(score + 4 * expert, -INFINITY)


@kernel
def route(
    begin, end, logits, probabilities, stride, n_experts,
    k, norm_topk_prob, ids, expert_weights, factors, scale: float,
):  # fmt: skip
    """Select the k largest of each row of logits, the lowest id first among equals; a unit of work is a token.

    ids: int64 [T, k].  expert_weights: float32 [T, k], softmax of all logits or, with ``norm_topk_prob``, of the
    selected logits.  With PROBABILITIES, logits only select experts; the weights are probabilities, optionally
    divided by their sum.  With MIXES, the gating "sparsemixer" computes weights.
    factors: float32 [n_experts], factors of the weights, or 0.
    """
    for token in range(begin, end):
        row, first_choice = logits + token * stride, 8 * token * k
        last_id, last = NONE, INFINITY
        for rank in range(k):
            best_id, best = NONE, -INFINITY
            for expert in range(n_experts):
                logit = load_logit(row + 4 * expert)
                is_left = logit < last or (logit == last and expert > last_id)
                if is_left and (best_id < 0 or logit > best):
                    best_id, best = np.int64(expert), logit
            store_i64(ids + first_choice + 8 * rank, best_id)
            last_id, last = best_id, best
        if MIXES:
            for rank in range(k):
                expert = load_i64(ids + first_choice + 8 * rank)
                weight = scale / sum_of_near(row, n_experts, expert)
                if factors != 0:
                    weight = weight * load_f32(factors + 4 * expert)
                store_f32(expert_weights + first_choice // 2 + 4 * rank, weight)
            continue
        if PROBABILITIES:
            row = probabilities + token * stride
        peak = load_f32(row + 4 * load_i64(ids + first_choice))
        total = np.float32(0)
        if PROBABILITIES:
            for rank in range(k):
                total += load_f32(row + 4 * load_i64(ids + first_choice + 8 * rank))
            if norm_topk_prob == 0:
                total = np.float32(1)
        elif norm_topk_prob != 0:
            for rank in range(k):
                total += exp_of(load_f32(row + 4 * load_i64(ids + first_choice + 8 * rank)) - peak)
        else:
            total = sum_of_exps(row, n_experts, peak)
        for rank in range(k):
            expert = load_i64(ids + first_choice + 8 * rank)
            weight = load_f32(row + 4 * expert)
            if not PROBABILITIES:
                weight = exp_of(weight - peak)
            weight = weight / total
            if factors != 0:
                weight = weight * load_f32(factors + 4 * expert)
            store_f32(expert_weights + first_choice // 2 + 4 * rank, weight * scale)


@kernel
def group_by_expert(begin, end, n_pairs, ids, n_experts, cursors, places, pairs, experts, n_used):
    """Group the pairs by expert; one unit of work.

    n_pairs: address of the number of pairs.  ids: int64, expert of each pair.
    cursors: int64 [n_experts], scratch memory.  places: int64, place of each pair.  pairs: int64, pair at each place.
    experts: entries of experts with pairs.  n_used: address for their number.
    """
    n = load_i64(n_pairs)
    for expert in range(n_experts):
        store_i64(cursors + 8 * expert, 0)
    for pair in range(n):
        cursor = cursors + 8 * load_i64(ids + 8 * pair)
        store_i64(cursor, load_i64(cursor) + 1)
    next_place, entry = np.int64(0), experts
    for expert in range(n_experts):
        count = load_i64(cursors + 8 * expert)
        store_i64(cursors + 8 * expert, next_place)
        if count > 0:
            store_i64(entry, expert)
            store_i64(entry + 8, next_place)
            store_i64(entry + 16, count)
            entry += ENTRY
            next_place += -(-count // TOKENS) * TOKENS
    store_i64(n_used, (entry - experts) // ENTRY)
    for pair in range(n):
        cursor = cursors + 8 * load_i64(ids + 8 * pair)
        pair_place = load_i64(cursor)
        store_i64(cursor, pair_place + 1)
        store_i64(places + 8 * pair, pair_place)
        store_i64(pairs + 8 * pair_place, pair)


@kernel
def hold_experts(
    begin, end, entries, n_used, first, most, n_held, pairs, table, stamps, counts, n_bytes, call, group
):  # fmt: skip
    """Make sure that experts are in memory before they are used; one unit of work.

    entries: entries of active experts, from number ``first``; ``n_used``: address of the number of active experts.
    At most ``most`` experts are needed now; the number of loaded ones is stored in ``n_held``.  pairs: pair at each
    place.
    table: int64 [n_experts], address of each expert; 0 if not in memory.  stamps: int64 [n_experts], time of the last
    use.  counts: int64, the number of such calls (the time), and the bytes needed.  n_bytes: size of an expert.
    call: reads missing experts (`localllm.kernels.cpu.expert_pool.ExpertPool`), and returns the number of available
    experts.
    """
    n_all = max(np.int64(0), load_i64(n_used) - first)
    n, now, is_missing = min(n_all, most), load_i64(counts) + 1, False
    store_i64(counts, now)
    store_i64(counts + 8, load_i64(counts + 8) + n * n_bytes)
    for entry in range(entries, entries + n * ENTRY, ENTRY):
        expert = 8 * load_i64(entry)
        store_i64(stamps + expert, now)
        if load_i64(table + expert) == 0:
            is_missing = True
    if is_missing:
        n = call_back(call, group, entries, n, n_all, pairs)
    store_i64(n_held, n)


@kernel
def read_ahead(begin, end, entries, n_used, table, call, group):
    """Request experts that will probably be needed next, without waiting.  Parameters: see `hold_experts`."""
    n, is_missing = load_i64(n_used), False
    for entry in range(entries, entries + n * ENTRY, ENTRY):
        if load_i64(table + 8 * load_i64(entry)) == 0:
            is_missing = True
    if is_missing:
        call_back(call, group, entries, 0, n, 0)


# -- Gathering rows ------------------------------------------------------------------------------------------------


@kernel
def gather_records(begin, end, places, per_row, x, x_stride, n_blocks, expert_weights, records):
    """Copy row ``pair // per_row`` of x to the record at the pair's place; a unit of work is a pair.

    expert_weights: float32, factor of each pair's row; or 0.
    """
    for pair in range(begin, end):
        pair_place = load_i64(places + 8 * pair)
        tile, token = records + pair_place // TOKENS * x_tile_bytes(n_blocks), pair_place % TOKENS
        quantise_row(x + pair // per_row * x_stride, tile, token, n_blocks)
        if expert_weights != 0:
            factor = load_f32(expert_weights + 4 * pair)
            rests = x_tile_bytes(n_blocks) - n_blocks * X_STEP
            for scale in range(scale_place(tile + token_place(token)), tile + n_blocks * X_STEP, X_STEP):
                store_f32(scale, load_f32(scale) * factor)
                store_f32(scale + rests, load_f32(scale + rests) * factor)  # undefined for blocks without a rest


@kernel
def gather_floats(begin, end, places, per_row, x, x_stride, expert_weights, y):
    """Copy row ``pair // per_row`` of x to the row of y at the pair's place; rows have ``x_stride`` bytes."""
    for pair in range(begin, end):
        source, target = x + pair // per_row * x_stride, y + load_i64(places + 8 * pair) * x_stride
        factor = splat(np.float32(1))
        if expert_weights != 0:
            factor = load_splat_f32(expert_weights + 4 * pair)
        for i in range(0, x_stride, 64):
            store_f32x16(target + i, load_f32x16(source + i) * factor)


# -- Products ------------------------------------------------------------------------------------------------------


@kernel
def experts_quantised(begin, end, experts, n_units, tables, n_tiles, x, pairs, biases, y, y_stride):
    """Integer products; a unit is 16 rows of an active expert.

    experts: entries of active experts.  tables: int64, address of each expert's packed tiles, ``n_units`` groups of
    16 rows.  x: records by place.  pairs: pair at each place.  biases: float32 [n_experts, n] or 0.  y: float32
    [pairs, n].  `matmul_quantised` describes the other parameters.
    """
    slab = stack(SLAB * BLOCK_BYTES)
    sums = stack(2 * REST_SUMS)
    for unit in range(begin, end):
        entry, group = experts + unit // n_units * ENTRY, unit % n_units
        tiles = load_i64(tables + 8 * load_i64(entry)) + group * n_tiles * TILE_BYTES
        first_place, n_places = load_i64(entry + 8), load_i64(entry + 16)
        rows, bias = group * 64, np.int64(0)
        if biases != 0:
            bias = biases + load_i64(entry) * y_stride
        if n_places == 1:
            records = x + first_place // TOKENS * x_tile_bytes(n_tiles * BLOCKS)
            few_tokens(1, tiles, n_tiles, slab, records, sums)
            offset = load_i64(pairs + 8 * first_place) * y_stride + rows
            store_rows(load_f32x16(sums), bias, 0, y, rows, offset)
        else:
            for first in range(first_place, first_place + n_places, MAX_TOKENS):
                n = min(MAX_TOKENS, first_place + n_places - first)
                records = x + first // TOKENS * x_tile_bytes(n_tiles * BLOCKS)
                multiply_tokens(n, tiles, n_tiles, slab, sums, records)
                for i in range(n):
                    offset = load_i64(pairs + 8 * (first + i)) * y_stride + rows
                    store_rows(load_f32x16(sums + 64 * i), bias, 0, y, rows, offset)


@kernel
def experts_float(begin, end, experts, n_units, tables, n_in, x, x_stride, pairs, biases, y, y_stride):
    """Float products; a unit is ``16 * FLOAT_GROUPS`` rows of an expert; an expert has ``n_units`` units.

    x: float32 rows by place.  `matmul_float` and `experts_quantised` describe the other parameters.
    """
    slab = stack(64 * FLOAT_GROUPS * FLOAT_SLAB)
    sums = stack(64 * FLOAT_GROUPS * FLOAT_TOKENS)
    for unit in range(begin, end):
        entry, expert_unit = experts + unit // n_units * ENTRY, unit % n_units
        tiles = load_i64(tables + 8 * load_i64(entry)) + expert_unit * FLOAT_GROUPS * n_in * COLUMN_BYTES
        first_place, n_places = load_i64(entry + 8), load_i64(entry + 16)
        rows, bias = expert_unit * FLOAT_GROUPS * 64, np.int64(0)
        if biases != 0:
            bias = biases + load_i64(entry) * y_stride
        if n_places == 1:
            out = y + load_i64(pairs + 8 * first_place) * y_stride
            one_float_token(tiles, n_in, x + first_place * x_stride, bias, 0, out, rows)
        else:
            for first in range(first_place, first_place + n_places, FLOAT_TOKENS):
                n = min(FLOAT_TOKENS, first_place + n_places - first)
                several_float_tokens(n, tiles, n_in, slab, sums, x + first * x_stride, x_stride)
                for i in range(n):
                    for g in static_range(FLOAT_GROUPS):
                        offset = load_i64(pairs + 8 * (first + i)) * y_stride + rows + 64 * g
                        total = load_f32x16(sums + 64 * (FLOAT_GROUPS * i + g))
                        store_rows(total, bias, 0, y, rows + 64 * g, offset)


@kernel
def add_experts(begin, end, products, expert_weights, k, width, stride, residual, y):
    """y = the sum of each token's products [T * k, width], starting with the best expert, plus residual.

    expert_weights: float32 [T * k], factors of the products; or 0.
    residual: float32 [T, width], or 0.
    """
    for token in range(begin, end):
        for i in range(0, 4 * width, 64):
            total = zero_f32x16()
            for pair in range(token * k, token * k + k):
                weight = splat(np.float32(1))
                if expert_weights != 0:
                    weight = load_splat_f32(expert_weights + 4 * pair)
                total = fma(load_f32x16(products + pair * stride + i), weight, total)
            offset = token * stride + i
            if residual != 0:
                total = total + load_f32x16(residual + offset)
            store_f32x16(y + offset, total)
