"""What a forward pass does beside matrix products and attention.  A unit of work is a token.

Rows of float32 buffers are padded with zeros to a multiple of 32 values, so that loops over whole vectors need no
odd ends; ``width`` is the padded number of values and strides are in bytes.
"""

from __future__ import annotations

import numpy as np

from localllm.kernels.cpu.cache_types import PAGE
from localllm.kernels.cpu.compiler import kernel
from localllm.kernels.cpu.simd import (
    fma,
    largest_magnitude,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    maximum,
    minimum,
    power_of_two,
    splat,
    sqrt,
    stack,
    store_f32,
    store_f32x16,
    store_i32,
    store_s8x16,
    sum_int_lanes,
    sum_lanes,
    to_float,
    to_int_rounded,
    zero_f32x16,
)
from localllm.kernels.cpu.templates import device, template
from localllm.kernels.cpu.tiles import RECORD, SUM, SUMS, TOKENS, X_STEP, D
from localllm.kernels.q8_0 import LARGEST_CODE, NEGLIGIBLE

ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)
LOW_HALF, SIXTEEN = np.int32(0xFFFF), np.int32(16)

# exp: the constants of Cephes' expf (Moshier, 1984): ln 2 in two parts, and a polynomial for |r| <= ln(2) / 2.
LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(-0.693359375), np.float32(2.12194440e-4)
EXP_5, EXP_4, EXP_3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
EXP_2, EXP_1, EXP_0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
#: Below, exp is 0 (its exponent would be -127); above, it is clamped short of infinity.
EXP_LOW, EXP_HIGH = np.float32(-88.1), np.float32(88.37)

GELU_SCALE, GELU_CUBIC = np.float32(np.sqrt(2 / np.pi)), np.float32(0.044715)


@device
def exp_rest(x, n):
    """r = x - n ln 2."""
    whole = to_float(n)
    r = fma(whole, splat(LN2_HIGH), x)
    return fma(whole, splat(LN2_LOW), r)


@device
def exp_polynomial(r):
    """(e ** r - 1 - r) / r²."""
    p = fma(splat(EXP_5), r, splat(EXP_4))
    p = fma(p, r, splat(EXP_3))
    p = fma(p, r, splat(EXP_2))
    p = fma(p, r, splat(EXP_1))
    return fma(p, r, splat(EXP_0))


@device
def exp(x):
    """e ** x, within 2 units in the last place."""
    x = minimum(maximum(x, splat(EXP_LOW)), splat(EXP_HIGH))
    n = to_int_rounded(x * splat(LOG2_E))
    r = exp_rest(x, n)
    p = fma(exp_polynomial(r), r * r, r + splat(ONE))
    return p * power_of_two(n)


@device
def tanh(x):
    """(e ** 2x - 1) / (e ** 2x + 1), within 3 units in the last place: 1 is taken away before it can cost digits."""
    x = minimum(maximum(x + x, splat(EXP_LOW)), splat(EXP_HIGH))
    n = to_int_rounded(x * splat(LOG2_E))
    r = exp_rest(x, n)
    power = power_of_two(n)
    less_one = fma(fma(exp_polynomial(r), r * r, r), power, power - splat(ONE))
    return less_one / (less_one + splat(TWO))


@device
def sigmoid(x):
    return splat(ONE) / (splat(ONE) + exp(zero_f32x16() - x))


@kernel
def rms_norm(begin, end, x, weight, n, width, x_stride, y, y_stride, eps: float):
    """y = x / sqrt(mean(x²) + eps) * weight, over rows of ``n`` values."""
    for token in range(begin, end):
        row, out = x + token * x_stride, y + token * y_stride
        squares = zero_f32x16()
        for i in range(0, 4 * width, 64):
            v = load_f32x16(row + i)
            squares = fma(v, v, squares)
        scale = splat(ONE / sqrt(sum_lanes(squares) / np.float32(n) + eps))
        for i in range(0, 4 * width, 64):
            store_f32x16(out + i, load_f32x16(row + i) * scale * load_f32x16(weight + i))


@device
def quantise_row(row, record, n_blocks):
    """A row of ``32 * n_blocks`` values to its records in a tile."""
    for _ in range(n_blocks):
        first, second = load_f32x16(row), load_f32x16(row + 64)
        largest = largest_magnitude(first, second)
        inverse = ZERO
        if largest > NEGLIGIBLE:  # which a NaN is not: it then comes out as the scale
            inverse = LARGEST_CODE / largest
        scale = largest / LARGEST_CODE
        first, second = first * splat(inverse), second * splat(inverse)
        sum_first = sum_int_lanes(to_int_rounded(first))
        sum_second = sum_int_lanes(to_int_rounded(second))
        store_s8x16(record, first)
        store_s8x16(record + 16, second)
        store_f32(record + D, scale)
        store_f32(record + SUM, np.float32(sum_first + sum_second))
        store_i32(record + SUMS, (sum_first & LOW_HALF) | (sum_second << SIXTEEN))
        row += 128
        record += X_STEP


@kernel
def quantise(begin, end, x, n_blocks, x_stride, records):
    """Rows of ``32 * n_blocks`` values to the records that `localllm.kernels.cpu.tiles` draws."""
    for token in range(begin, end):
        record = records + token // TOKENS * (n_blocks * X_STEP) + token % TOKENS * RECORD
        quantise_row(x + token * x_stride, record, n_blocks)


@kernel
def gated_silu(begin, end, gate, up, width, stride, y):
    """y = gate * sigmoid(gate) * up."""
    for token in range(begin, end):
        for i in range(token * stride, token * stride + 4 * width, 64):
            g = load_f32x16(gate + i)
            store_f32x16(y + i, g * sigmoid(g) * load_f32x16(up + i))


@kernel
def gated_gelu(begin, end, gate, up, width, stride, y):
    """y = gelu(gate) * up, in the tanh form: gelu(x) = x * sigmoid(2 sqrt(2/π) (x + 0.044715 x³))."""
    for token in range(begin, end):
        for i in range(token * stride, token * stride + 4 * width, 64):
            g = load_f32x16(gate + i)
            inner = fma(splat(GELU_CUBIC) * g * g, g, g) * splat(TWO * GELU_SCALE)
            store_f32x16(y + i, g * sigmoid(inner) * load_f32x16(up + i))


@kernel
def softcap(begin, end, x, width, stride, y, cap: float, inverse: float):
    """y = cap * tanh(x * inverse)."""
    for row in range(begin, end):
        for i in range(row * stride, row * stride + 4 * width, 64):
            store_f32x16(y + i, splat(cap) * tanh(load_f32x16(x + i) * splat(inverse)))


@kernel
def gather_rows(begin, end, rows, x, width, stride, y):
    """Row i of y is row rows[i] of x (rows: int32)."""
    for i in range(begin, end):
        source, target = x + np.int64(load_i32(rows + 4 * i)) * stride, y + i * stride
        for place in range(0, 4 * width, 64):
            store_f32x16(target + place, load_f32x16(source + place))


@template
def norm_head(x, n, weight, eps, has_weight):
    """RMS norm of the n values of a head, in place."""
    squares = ZERO
    for i in range(n):
        v = load_f32(x + 4 * i)
        squares += v * v
    scale = ONE / sqrt(squares / np.float32(n) + eps)
    for i in range(n):
        if has_weight:
            store_f32(x + 4 * i, load_f32(x + 4 * i) * scale * load_f32(weight + 4 * i))
        else:
            store_f32(x + 4 * i, load_f32(x + 4 * i) * scale)


@device
def rotate(row, angles, n_pairs, first_step, second_offset):
    """Rotates n_pairs pairs of a head: (x_i, x_i + second_offset), i in steps of first_step; offsets in bytes."""
    for i in range(n_pairs):
        cos, sin = load_f32(angles + 8 * i), load_f32(angles + 8 * i + 4)
        place = row + i * first_step
        a, b = load_f32(place), load_f32(place + second_offset)
        store_f32(place, a * cos - b * sin)
        store_f32(place + second_offset, b * cos + a * sin)


@template
def turn_head(x, norm, n_norm, weight, eps, angles, n_pairs, pair_step, pair_offset):
    """Norms and rotates a head in place; ``norm``: 0 for none, 1 for one without weights, 2 for one with them."""
    if norm and not NORM_LAST:
        norm_head(x, n_norm, weight, eps, norm - 1)
    rotate(x + ROPE_FIRST, angles, n_pairs, pair_step, pair_offset)
    if norm and NORM_LAST:
        norm_head(x, n_norm, weight, eps, norm - 1)


@kernel
def rope_append(
    begin,
    end,
    slots,
    positions,
    angles,
    n_pairs,
    pair_step,
    pair_offset,
    q,
    q_stride,
    n_heads,
    key_dim,
    k,
    k_stride,
    v,
    v_stride,
    n_kv_heads,
    value_dim,
    keys,
    values,
    q_weight,
    n_q_norm,
    k_weight,
    n_k_norm,
    v_weight,
    n_v_norm,
    factors,
    factor_length,
    factor_offset,
    q_eps: float,
    k_eps: float,
    v_eps: float,
):
    """Norms and rotates q and k in place, by angles [positions, n_pairs] of (cos, sin), and appends k and v.

    slots: int64 [T], page * PAGE + place in the page.  positions: int32 [T].
    keys, values: blocks of ``KEY_BLOCK`` and ``VALUE_BLOCK`` bytes [n_pages, n_kv_heads]
    (`localllm.kernels.cpu.cache_types`).  factors: of q, `BatchTables.position_factors`.

    Q_NORM, K_NORM, V_NORM: as in `turn_head`.  HAS_KEYS, HAS_VALUES: whether there are k and v.  COPY_VALUES: whether
    v is in the memory of k, which is changed.  SCALES_Q: whether there are factors.
    """
    scratch = stack(4 * VALUE_HEAD)
    for token in range(begin, end):
        position = np.int64(load_i32(positions + 4 * token))
        turn = angles + position * n_pairs * 8
        for head in range(n_heads):
            row = q + token * q_stride + 4 * head * key_dim
            turn_head(row, Q_NORM, n_q_norm, q_weight, q_eps, turn, n_pairs, pair_step, pair_offset)
            if SCALES_Q:
                factor = load_f32(factors + 4 * ((position + factor_offset) // factor_length))
                for i in range(key_dim):
                    store_f32(row + 4 * i, load_f32(row + 4 * i) * factor)
        if HAS_KEYS:
            slot = load_i64(slots + 8 * token)
            for head in range(n_kv_heads):
                number = slot // PAGE * n_kv_heads + head
                if HAS_VALUES:
                    v_row = v + token * v_stride + 4 * head * value_dim
                    if COPY_VALUES:
                        for i in range(value_dim):
                            store_f32(scratch + 4 * i, load_f32(v_row + 4 * i))
                        v_row = scratch
                    if V_NORM:
                        norm_head(v_row, n_v_norm, v_weight, v_eps, V_NORM - 1)
                    APPEND_VALUES(v_row, value_dim, VALUE_HEAD, values + number * VALUE_BLOCK, slot % PAGE)
                k_row = k + token * k_stride + 4 * head * key_dim
                turn_head(k_row, K_NORM, n_k_norm, k_weight, k_eps, turn, n_pairs, pair_step, pair_offset)
                APPEND_KEYS(k_row, key_dim, KEY_HEAD, keys + number * KEY_BLOCK, slot % PAGE)
