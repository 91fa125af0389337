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
from localllm.kernels.cpu.templates import device
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


@kernel
def head_norm(begin, end, x, weight, n_heads, head_dim, stride, eps: float):
    """RMS norm of each head of x [T, n_heads * head_dim], in place."""
    for token in range(begin, end):
        for head in range(n_heads):
            row = x + token * stride + 4 * head * head_dim
            squares = ZERO
            for i in range(head_dim):
                v = load_f32(row + 4 * i)
                squares += v * v
            scale = ONE / sqrt(squares / np.float32(head_dim) + eps)
            for i in range(head_dim):
                store_f32(row + 4 * i, load_f32(row + 4 * i) * scale * load_f32(weight + 4 * i))


@device
def rotate(row, angles, n_pairs, first_step, second_offset):
    """Rotates n_pairs pairs of a head: (x_i, x_i + second_offset), i in steps of first_step; offsets in bytes."""
    for i in range(n_pairs):
        cos, sin = load_f32(angles + 8 * i), load_f32(angles + 8 * i + 4)
        place = row + i * first_step
        a, b = load_f32(place), load_f32(place + second_offset)
        store_f32(place, a * cos - b * sin)
        store_f32(place + second_offset, b * cos + a * sin)


@kernel
def rope_append(
    begin,
    end,
    slots,
    positions,
    angles,
    n_pairs,
    q,
    q_stride,
    n_heads,
    k,
    v,
    kv_stride,
    n_kv_heads,
    head_dim,
    pair_step,
    pair_offset,
    keys,
    values,
):
    """Rotates q and k in place by angles [positions, n_pairs] of (cos, sin), and appends k and v to the cache.

    slots: int64 [T], page * PAGE + place in the page.  positions: int32 [T].
    keys, values: blocks of ``BLOCK`` bytes [n_pages, n_kv_heads] (`localllm.kernels.cpu.cache_types`).
    """
    for token in range(begin, end):
        turn = angles + np.int64(load_i32(positions + 4 * token)) * n_pairs * 8
        for head in range(n_heads):
            rotate(q + token * q_stride + 4 * head * head_dim, turn, n_pairs, pair_step, pair_offset)
        slot = load_i64(slots + 8 * token)
        for head in range(n_kv_heads):
            k_row = k + token * kv_stride + 4 * head * head_dim
            v_row = v + token * kv_stride + 4 * head * head_dim
            rotate(k_row, turn, n_pairs, pair_step, pair_offset)
            block = (slot // PAGE * n_kv_heads + head) * BLOCK
            APPEND(k_row, v_row, head_dim, keys + block, values + block, slot % PAGE)
