"""Operations with recurrent states: updates of a sequence's state by its tokens, and reads of the state.

A state is read and written once per step for any number of tokens.  The result for a token has the same bits for any
division of its sequence into steps.

A sequence's state is stored in a slot given by the batch.  Before position 0 it is zero, regardless of the slot's
content.
"""

from __future__ import annotations

import numpy as np

from localllm.kernels.cpu.compiler import kernel
from localllm.kernels.cpu.elementwise import ONE, exp, sigmoid, softplus
from localllm.kernels.cpu.simd import *
from localllm.kernels.cpu.templates import Registers, device, static_range, template

#: -1 / √e, the logarithm of RWKV 7's strongest decay, and the smallest square of a length.
LOG_DECAY, SMALLEST_SQUARE = np.float32(-np.exp(-0.5)), np.float32(1e-24)


@device
def rows_of(sequence, starts):
    """Return the first row of a sequence and the row after its last."""
    return np.int64(load_i32(starts + 4 * sequence)), np.int64(load_i32(starts + 4 * sequence + 4))


@kernel
def causal_conv(begin, end, starts, positions, slots, states, state_bytes, x, stride, weight, bias, y, state_stride):
    """y[t] = sum over j of weight[j] * x[t + AHEAD - KERNEL + 1 + j], in each column of x; a unit is a token.

    starts: int32, first row of each sequence.  positions: int32 [T].  slots: int32, slot of each sequence. states:
    float32 [n_slots, KERNEL - 1, columns], the inputs before the batch, with ``state_stride`` bytes per row. This
    kernel updates the states of sequences with one token, because only their unit reads them; `keep_inputs` updates
    the others. weight: float32 [KERNEL, columns], with ``stride`` bytes per row, as in x and y.  bias: float32
    [columns].
    """
    sequence, first = np.int64(0), np.int64(begin)
    while first < end:
        while load_i32(starts + 4 * sequence + 4) <= first:
            sequence += 1
        start, stop = rows_of(sequence, starts)
        state = states + np.int64(load_i32(slots + 4 * sequence)) * state_bytes
        n_before = min(np.int64(load_i32(positions + 4 * start)), KERNEL - 1)
        last = min(stop, end)
        for column in range(0, state_stride, 64):
            for j in static_range(KERNEL):
                w[j] = load_f32x16(weight + stride * j + column)
                inputs[j] = zero_f32x16()
            for j in static_range(KERNEL - 1):
                row = first + AHEAD - KERNEL + 1 + j
                if row >= stop:
                    inputs[j] = zero_f32x16()
                elif row >= start:
                    inputs[j] = load_f32x16(x + row * stride + column)
                elif row >= start - n_before:
                    inputs[j] = load_f32x16(state + state_stride * (row - start + KERNEL - 1) + column)
            for token in range(first, last):
                offset = token * stride + column
                inputs[KERNEL - 1] = zero_f32x16()
                if token + AHEAD < stop:
                    inputs[KERNEL - 1] = load_f32x16(x + offset + stride * AHEAD)
                total = zero_f32x16()
                if BIAS:
                    total = load_f32x16(bias + column)
                for j in static_range(KERNEL):
                    total = fma(inputs[j], w[j], total)
                if SILU:
                    total = total * sigmoid(total)
                store_f32x16(y + offset, total)
                for j in static_range(KERNEL - 1):
                    inputs[j] = inputs[j + 1]
            if stop - start == 1:
                for j in static_range(KERNEL - 1):
                    store_f32x16(state + state_stride * j + column, inputs[j])
        first = last


@kernel
def block_conv(begin, end, starts, x, stride, factors, factors_stride, base, n_groups, size, y):
    """y[t] = sum over j of (base[j] + factors[t, j]) * x[t - j] within a sequence of the batch; a unit is a token.

    starts: int32, first row of each sequence.  factors: float32 [T, KERNEL, n_groups] with ``factors_stride`` bytes
    per token; each applies to ``size`` bytes of x.  base: float32 [KERNEL, columns].  Rows of base, x and y have
    ``stride`` bytes.
    """
    sequence = np.int64(0)
    for token in range(begin, end):
        while load_i32(starts + 4 * sequence + 4) <= token:
            sequence += 1
        start = np.int64(load_i32(starts + 4 * sequence))
        for group in range(n_groups):
            for column in range(group * size, (group + 1) * size, 64):
                total = zero_f32x16()
                for j in static_range(KERNEL):
                    if token - j >= start:
                        factor = load_splat_f32(factors + token * factors_stride + 4 * (j * n_groups + group))
                        weight = load_f32x16(base + j * stride + column) + factor
                        total = fma(load_f32x16(x + (token - j) * stride + column), weight, total)
                store_f32x16(y + token * stride + column, total)


@kernel
def keep_inputs(begin, end, starts, positions, slots, states, state_bytes, x, stride, state_stride, n_rows):
    """Copy the last ``n_rows`` inputs of each sequence with several tokens to its `causal_conv` state."""
    for sequence in range(begin, end):
        start = np.int64(load_i32(starts + 4 * sequence))
        n = np.int64(load_i32(starts + 4 * sequence + 4)) - start
        if n > 1:
            state = states + np.int64(load_i32(slots + 4 * sequence)) * state_bytes
            n_before = np.int64(load_i32(positions + 4 * start))
            for i in range(n_rows):
                row = n - n_rows + i  # number of a token of the sequence in the batch
                for column in range(0, state_stride, 64):
                    row_values = zero_f32x16()
                    if row >= 0:
                        row_values = load_f32x16(x + (start + row) * stride + column)
                    elif row >= -n_before:
                        row_values = load_f32x16(state + state_stride * (n_rows + row) + column)
                    store_f32x16(state + state_stride * i + column, row_values)


@device
def product_of(x, y, n):
    """Return the sum of the products of two rows of n bytes."""
    total = zero_f32x16()
    for i in range(0, n, 64):
        total = fma(load_f32x16(x + i), load_f32x16(y + i), total)
    return sum_lanes(total)


@template
def read_state(state, key, query, of_key: Registers, of_query: Registers):
    """Compute Sᵀk and Sᵀq for 16 * VECTORS columns of a state."""
    for i in range(ROWS):
        k, q = load_splat_f32(key + 4 * i), load_splat_f32(query + 4 * i)
        for v in static_range(VECTORS):
            s = load_f32x16(state + 64 * VECTORS * i + 64 * v)
            of_key[v] = fma(s, k, of_key[v])
            of_query[v] = fma(s, q, of_query[v])


@template
def change_state(state, decays, decay, key, new: Registers):
    """S = decay * S + k ⊗ new."""
    for i in range(ROWS):
        factor = splat(decay)
        if PER_CHANNEL:
            factor = load_splat_f32(decays + 4 * i)
        k = load_splat_f32(key + 4 * i)
        for v in static_range(VECTORS):
            address = state + 64 * VECTORS * i + 64 * v
            store_f32x16(address, fma(k, new[v], load_f32x16(address) * factor))


@template
def change_and_read_state(
    state, decays, decay, old, new: Registers, key, query, of_key: Registers, of_query: Registers
):
    """`change_state` for a token and `read_state` for the next: the same bits, but the state is read once."""
    for i in range(ROWS):
        factor = splat(decay)
        if PER_CHANNEL:
            factor = load_splat_f32(decays + 4 * i)
        o, k, q = load_splat_f32(old + 4 * i), load_splat_f32(key + 4 * i), load_splat_f32(query + 4 * i)
        for v in static_range(VECTORS):
            address = state + 64 * VECTORS * i + 64 * v
            s = fma(o, new[v], load_f32x16(address) * factor)
            store_f32x16(address, s)
            of_key[v] = fma(s, k, of_key[v])
            of_query[v] = fma(s, q, of_query[v])


@template
def clear_registers(x: Registers):
    for i in static_range(VECTORS):
        x[i] = zero_f32x16()


@device
def clear_state(state, n_bytes):
    for i in range(0, n_bytes, 64):
        store_f32x16(state + i, zero_f32x16())


@device
def decay_of(step, factor, bound):
    """Return exp(factor * softplus(step)), or with BOUNDED exp(bound * σ(factor * step))."""
    if BOUNDED:
        return exp(splat(bound) * sigmoid(step * splat(factor)))
    return exp(softplus(step) * splat(factor))


@template
def decay_channels(steps, dt_bias, factor, bound, key, query, decays, decayed_k, decayed_q):
    """Store the decay of each channel of a head, and the key and the query multiplied by the decays."""
    for i in range(0, 4 * ROWS, 64):
        gates = decay_of(load_f32x16(steps + i) + load_f32x16(dt_bias + i), factor, bound)
        store_f32x16(decays + i, gates)
        store_f32x16(decayed_k + i, gates * load_f32x16(key + i))
        store_f32x16(decayed_q + i, gates * load_f32x16(query + i))


@kernel
def recurrence(
    begin, end, batch, starts, positions, slots, states, state_bytes, q, q_stride, k, k_stride, v, v_stride,
    steps, steps_stride, betas, betas_stride, a, dt_bias, d, n_groups, per_group, columns, out, out_stride,
    eps: float, scale: float, bound: float,
):  # fmt: skip
    """For each token and head: S = decay * S + k ⊗ new; out = Sᵀq, where decay = exp(a * softplus(step + dt_bias)),
    or with BOUNDED exp(bound * σ(a * (step + dt_bias))).

    With DELTA, q and k are divided by their lengths, q is also multiplied by ``scale``, and
    new = σ(beta) * (v - decay * Sᵀk); steps are [T, H] or, with PER_CHANNEL, [T, H, ROWS].  Without DELTA,
    new = softplus(step + dt_bias) * v, and d * v is added to ``out``.

    Unit u computes columns 16 * VECTORS * (u // n) … of the v of all heads, for sequence u % n of n: a thread
    iterates over the tokens with this part of the state in its first-level cache.  columns: columns per head.  batch:
    address of n.
    states: float32 [n_slots, columns / (16 * VECTORS) of all heads, ROWS, 16 * VECTORS], so that a unit accesses
    contiguous memory.  q, k: [T, n_groups, ROWS]; head h uses group h // per_group or, if per_group is 0, group h %
    n_groups.  `causal_conv` describes the other parameters.
    """
    n_sequences = load_i64(batch)
    decays, decayed_k, decayed_q = stack(4 * ROWS), stack(4 * ROWS), stack(4 * ROWS)
    for unit in range(begin, end):
        sequence, column_group = unit % n_sequences, unit // n_sequences
        head = column_group * (16 * VECTORS) // columns
        group = head // per_group if per_group != 0 else head % n_groups
        start, stop = rows_of(sequence, starts)
        state = states + np.int64(load_i32(slots + 4 * sequence)) * state_bytes + column_group * (64 * VECTORS * ROWS)
        if load_i32(positions + 4 * start) == 0:
            clear_state(state, 64 * VECTORS * ROWS)
        factor, old, decay = load_f32(a + 4 * head), k, ONE
        if BOUNDED:
            factor = abs(factor)
        clear_registers(new)
        for token in range(start, stop):
            query, key = q + token * q_stride + 4 * ROWS * group, k + token * k_stride + 4 * ROWS * group
            clear_registers(of_key)
            clear_registers(of_query)
            if PER_CHANNEL:
                if token > start:
                    change_state(state, decays, decay, old, new)
                own_steps, own_bias = steps + token * steps_stride + 4 * ROWS * head, dt_bias + 4 * ROWS * head
                decay_channels(own_steps, own_bias, factor, bound, key, query, decays, decayed_k, decayed_q)
                read_state(state, decayed_k, decayed_q, of_key, of_query)
                decay = ONE
            else:
                if token > start:
                    change_and_read_state(state, decays, decay, old, new, key, query, of_key, of_query)
                else:
                    read_state(state, key, query, of_key, of_query)
                total = splat(load_f32(steps + token * steps_stride + 4 * head) + load_f32(dt_bias + 4 * head))
                decay = max_lanes(decay_of(total, factor, bound))
            both = product_of(query, key, 4 * ROWS)
            for x in static_range(VECTORS):
                offset = 64 * (VECTORS * column_group + x)
                value = load_f32x16(v + token * v_stride + offset)
                if DELTA:
                    k_length = ONE / sqrt(product_of(key, key, 4 * ROWS) + eps)
                    q_length = scale / sqrt(product_of(query, query, 4 * ROWS) + eps)
                    beta = sigmoid(load_splat_f32(betas + token * betas_stride + 4 * head))
                    missing = value - of_key[x] * splat(decay * k_length)
                    new[x] = beta * missing * splat(k_length)
                    y = fma(new[x], splat(both * q_length), of_query[x] * splat(decay * q_length))
                else:
                    new[x] = value * softplus(total)
                    y = fma(new[x], splat(both), of_query[x] * splat(decay))
                    y = fma(value, load_splat_f32(d + 4 * head), y)
                store_f32x16(out + token * out_stride + offset, y)
            old = key
        change_state(state, decays, decay, old, new)


@kernel
def channel_scan(
    begin, end, batch, starts, positions, slots, states, state_bytes, x, x_stride, dt, dt_stride, b, b_stride,
    c, c_stride, a, dt_bias, d, state_stride, out,
):  # fmt: skip
    """For each token and channel: h_i = exp(a_i step) h_i + b_i step x; out = sum over i of c_i h_i + d x, where
    step = softplus(dt + dt_bias).

    Unit u computes 16 channels, number u // n, of sequence u % n of n.  states: float32 [n_slots, N, channels], with
    ``state_stride`` bytes per row; a: [N, channels], with the row stride of x.  `recurrence` describes the other
    parameters.
    """
    n_sequences = load_i64(batch)
    for unit in range(begin, end):
        sequence, column = unit % n_sequences, 64 * (unit // n_sequences)
        start, stop = rows_of(sequence, starts)
        state = states + np.int64(load_i32(slots + 4 * sequence)) * state_bytes + column
        if load_i32(positions + 4 * start) == 0:
            for i in range(N):
                store_f32x16(state + state_stride * i, zero_f32x16())
        for token in range(start, stop):
            step = softplus(load_f32x16(dt + token * dt_stride + column) + load_f32x16(dt_bias + column))
            value = load_f32x16(x + token * x_stride + column)
            total, added = value * load_f32x16(d + column), value * step
            for i in range(N):
                decay = exp(load_f32x16(a + x_stride * i + column) * step)
                h = added * load_splat_f32(b + token * b_stride + 4 * i)
                h = fma(load_f32x16(state + state_stride * i), decay, h)
                store_f32x16(state + state_stride * i, h)
                total = fma(h, load_splat_f32(c + token * c_stride + 4 * i), total)
            store_f32x16(out + token * x_stride + column, total)


@template
def wkv_channels(r, k, decay, rate, key_scale, key_rate, bonus, decays, keys, kappas, removed, total: Registers):
    """Store the decays and keys of a head's channels and, with RATE, κ and -κ ∘ a before κ is divided by its length.

    total: the sum of r ∘ k' ∘ bonus, and of κ².
    """
    for i in range(0, 4 * ROWS, 64):
        key, step = load_f32x16(k + i), load_f32x16(decay + i)
        if RATE:
            factor = exp(sigmoid(step) * splat(LOG_DECAY))
            a, kappa = sigmoid(load_f32x16(rate + i)), key * load_f32x16(key_scale + i)
            key = fma((a - splat(ONE)) * load_f32x16(key_rate + i), key, key)
            store_f32x16(kappas + i, kappa)
            store_f32x16(removed + i, zero_f32x16() - kappa * a)
            total[1] = fma(kappa, kappa, total[1])
        else:
            factor = exp(zero_f32x16() - exp(step))
            if not BONUS:
                key = key - key * factor
        if BONUS:
            total[0] = fma(load_f32x16(r + i) * key, load_f32x16(bonus + i), total[0])
        store_f32x16(decays + i, factor)
        store_f32x16(keys + i, key)


@kernel
def wkv(
    begin, end, batch, starts, positions, slots, states, state_bytes, r, r_stride, k, k_stride, v, v_stride,
    decay, decay_stride, rate, rate_stride, key_scale, key_rate, bonus, columns, out, out_stride, of_bonus,
):  # fmt: skip
    """RWKV's recurrence, see `localllm.kernels.operations.WKV`. RATE and BONUS: whether these arguments are given.

    Units, and states [n_slots, columns / (16 * VECTORS) of all heads, ROWS, 16 * VECTORS], as in `recurrence`.
    """
    n_sequences = load_i64(batch)
    decays, keys, kappas, removed = stack(4 * ROWS), stack(4 * ROWS), stack(4 * ROWS), stack(4 * ROWS)
    for unit in range(begin, end):
        sequence, column_group = unit % n_sequences, unit // n_sequences
        head = 4 * ROWS * (column_group * (16 * VECTORS) // columns)
        start, stop = rows_of(sequence, starts)
        state = states + np.int64(load_i32(slots + 4 * sequence)) * state_bytes + column_group * (64 * VECTORS * ROWS)
        if load_i32(positions + 4 * start) == 0:
            clear_state(state, 64 * VECTORS * ROWS)
        for token in range(start, stop):
            total[0] = zero_f32x16()
            total[1] = zero_f32x16()
            query, key, step = r + token * r_stride + head, k + token * k_stride + head, decay + token * decay_stride
            own_rate = rate + token * rate_stride + head
            wkv_channels(
                query, key, step + head, own_rate, key_scale + head, key_rate + head, bonus + head,
                decays, keys, kappas, removed, total,
            )  # fmt: skip
            clear_registers(known)
            clear_registers(y)
            if RATE:
                for i in range(ROWS):
                    kappa = load_splat_f32(kappas + 4 * i)
                    for x in static_range(VECTORS):
                        known[x] = fma(load_f32x16(state + 64 * VECTORS * i + 64 * x), kappa, known[x])
                square = max(sum_lanes(total[1]), SMALLEST_SQUARE)
                for x in static_range(VECTORS):
                    known[x] = known[x] * splat(ONE / square)
            offset = token * v_stride + 64 * VECTORS * column_group
            for x in static_range(VECTORS):
                values[x] = load_f32x16(v + offset + 64 * x)
            for i in range(ROWS):
                factor, added, q = (
                    load_splat_f32(decays + 4 * i),
                    load_splat_f32(keys + 4 * i),
                    load_splat_f32(query + 4 * i),
                )
                if RATE:
                    minus = load_splat_f32(removed + 4 * i)
                for x in static_range(VECTORS):
                    s = load_f32x16(state + 64 * VECTORS * i + 64 * x)
                    if BONUS and not RATE:
                        y[x] = fma(s, q, y[x])
                    s = s * factor
                    if RATE:
                        s = fma(minus, known[x], s)
                    s = fma(added, values[x], s)
                    if RATE or not BONUS:
                        y[x] = fma(s, q, y[x])
                    store_f32x16(state + 64 * VECTORS * i + 64 * x, s)
            offset = token * out_stride + 64 * VECTORS * column_group
            for x in static_range(VECTORS):
                store_f32x16(out + offset + 64 * x, y[x])
                if BONUS:
                    store_f32x16(of_bonus + offset + 64 * x, values[x] * splat(sum_lanes(total[0])))
