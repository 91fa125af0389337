"""Operations other than matrix products and attention.  A unit of work is a token.

Rows of float32 buffers are padded with zeros to a multiple of 32 values, so that loops over whole vectors need no
remainder; ``width`` is the padded number of values and strides are in bytes.
"""

from __future__ import annotations

import numpy as np

from localllm.kernels.cache_rounding import LARGEST_CODE, NEGLIGIBLE
from localllm.kernels.cpu.cache_types import PAGE
from localllm.kernels.cpu.compiler import kernel
from localllm.kernels.cpu.dots import load_activations, scale_place, store_activations, sums_place, token_place
from localllm.kernels.cpu.matmul import INT16_RECORD, INT16_SCALE, LARGEST_INT16, int16_record
from localllm.kernels.cpu.simd import *
from localllm.kernels.cpu.simd import polynomial_op
from localllm.kernels.cpu.templates import device, template
from localllm.kernels.cpu.tiles import OUTLIER, SLAB, TOKENS, X_STEP, x_tile_bytes

ZERO, ONE, TWO = np.float32(0), np.float32(1), np.float32(2)
LOW_HALF, SIXTEEN = np.int32(0xFFFF), np.int32(16)

# exp: the constants of Cephes' expf (Moshier, 1984), with ln 2 in two parts.
LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(-0.693359375), np.float32(2.12194440e-4)
#: Below EXP_LOW, exp is 0 (its exponent would be -127); above EXP_HIGH, it is clamped so that it stays finite.
EXP_LOW, EXP_HIGH = np.float32(-88.1), np.float32(88.37)

HALF, SQRT_HALF = np.float32(0.5), np.float32(np.sqrt(0.5))
#: Lower bound of the root's argument in a gate of streams (`localllm.kernels.operations.StreamGate`).
LEAST_PRODUCT = np.float32(1e-6)
#: Bits of √2 and of infinity: non-negative floats have the order of their bits, and NaN is greater than infinity.
SQRT_2_BITS, INFINITY_BITS, MAGNITUDE = np.int32(0x3FB504F3), np.int32(0x7F800000), 0x7FFFFFFF

NAN_BITS = np.int32(0x7FFFFFFF)
SWIGLU_ALPHA, SWIGLU_LIMIT = np.float32(1.702), np.float32(7)
GELU_SCALE, GELU_CUBIC = np.float32(np.sqrt(2 / np.pi)), np.float32(0.044715)

#: (e ** r - 1 - r) / r², for |r| <= ln(2) / 2.
exp_polynomial = polynomial_op(
    "exp_polynomial",
    (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
)
#: (log(1 + m) - m + m² / 2) / m³, for 1/√2 <= 1 + m <= √2: the constants of Cephes' logf.
log_polynomial = polynomial_op(
    "log_polynomial",
    (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
     2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)  # fmt: skip
#: log(erfc(z) / t) + z², where t = 1 / (1 + z / 2) (Numerical Recipes, within 1.2e-7 of erfc).
erfc_polynomial = polynomial_op(
    "erfc_polynomial",
    (0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
     -1.26551223),
)  # fmt: skip


@device
def exp_rest(x, n):
    """Return r = x - n ln 2."""
    exponent = to_float(n)
    r = fma(exponent, splat(LN2_HIGH), x)
    return fma(exponent, splat(LN2_LOW), r)


@device
def exp(x):
    """Return e ** x, within 2 units in the last place."""
    x = minimum(maximum(x, splat(EXP_LOW)), splat(EXP_HIGH))
    n = to_int_rounded(x * splat(LOG2_E))
    r = exp_rest(x, n)
    p = fma(exp_polynomial(r), r * r, r + splat(ONE))
    return p * power_of_two(n)


@device
def exp_less_one(x):
    """Return e ** x - 1; 1 is subtracted before it can cost digits."""
    x = minimum(maximum(x, splat(EXP_LOW)), splat(EXP_HIGH))
    n = to_int_rounded(x * splat(LOG2_E))
    r = exp_rest(x, n)
    power = power_of_two(n)
    return fma(fma(exp_polynomial(r), r * r, r), power, power - splat(ONE))


@device
def tanh(x):
    """Return (e ** 2x - 1) / (e ** 2x + 1), within 3 units in the last place."""
    less_one = exp_less_one(x + x)
    return less_one / (less_one + splat(TWO))


@device
def sigmoid(x):
    return splat(ONE) / (splat(ONE) + exp(zero_f32x16() - x))


@device
def log_of_one_and(y):
    """Return log(1 + y) for 0 <= y <= 1, within 4 units in the last place: Cephes' logf(1 + y), corrected."""
    u = y + splat(ONE)
    rounded_y = u - splat(ONE)
    bits = as_int(u)
    low, high = splat_int(SQRT_2_BITS), splat_int(INFINITY_BITS)
    m = select_between(bits, low, high, fma(u, splat(HALF), splat(-ONE)), rounded_y)
    exponent = select_between(bits, low, high, splat(ONE), zero_f32x16())
    z = m * m
    log = fma(log_polynomial(m), m * z, fma(splat(-LN2_LOW), exponent, splat(-HALF) * z)) + m
    log = fma(splat(-LN2_HIGH), exponent, log)
    # If 1 + y was rounded to 1, the logarithm is 0, and the correction would divide by 0.
    return select_between(as_int(rounded_y), splat_int(np.int32(1)), high, log * (y / rounded_y), y)


@device
def softplus(x):
    """Return log(1 + e ** x)."""
    magnitude = mask(as_int(x), MAGNITUDE)
    y = maximum(x, zero_f32x16()) + log_of_one_and(exp(zero_f32x16() - as_float(magnitude)))
    return select_between(magnitude, zero_i32x16(), splat_int(INFINITY_BITS), y, x)


@kernel
def rms_norm(begin, end, x, weight, n_groups, n, width, weight_step, x_stride, y, y_stride, eps: float):
    """y = x / sqrt(mean(x²) + eps) * weight, over groups of ``n`` values; with WEIGHT, shared or per group."""
    for token in range(begin, end):
        for group in range(n_groups):
            first = 4 * n * group
            row, out = x + token * x_stride + first, y + token * y_stride + first
            factors = weight + weight_step * group
            squares = zero_f32x16()
            for i in range(0, 4 * width, 64):
                v = load_f32x16(row + i)
                squares = fma(v, v, squares)
            scale = splat(ONE / sqrt(sum_lanes(squares) / np.float32(n) + eps))
            for i in range(0, 4 * width, 64):
                v = load_f32x16(row + i) * scale
                if WEIGHT:
                    v = v * load_f32x16(factors + i)
                store_f32x16(out + i, v)


@device
def mean_and_variance(row, n, width):
    """Return the mean of ``n`` values in all lanes, and their variance; ``width`` includes padding."""
    last = splat_int(np.int32(n - 1))
    total, squares = zero_f32x16(), zero_f32x16()
    for i in range(0, 4 * width, 64):
        total = total + load_f32x16(row + i)
    mean = splat(sum_lanes(total) / np.float32(n))
    for i in range(0, 4 * width, 64):
        lanes = lane_numbers() + splat_int(np.int32(i // 4))
        v = select_between(lanes, zero_i32x16(), last, load_f32x16(row + i) - mean, zero_f32x16())
        squares = fma(v, v, squares)
    return mean, sum_lanes(squares) / np.float32(n)


@kernel
def layer_norm(begin, end, x, weight, bias, n_groups, n, width, stride, y, eps: float):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight (+ bias), over groups of ``n`` values."""
    for token in range(begin, end):
        for group in range(n_groups):
            first = 4 * n * group
            row, out = x + token * stride + first, y + token * stride + first
            mean, variance = mean_and_variance(row, n, width)
            scale = splat(ONE / sqrt(variance + eps))
            for i in range(0, 4 * width, 64):
                v = (load_f32x16(row + i) - mean) * scale * load_f32x16(weight + first + i)
                if bias != 0:
                    v = v + load_f32x16(bias + first + i)
                store_f32x16(out + i, v)


@device
def quantise_block(first, second, record):
    """Quantise 32 values to a record, and return their scale."""
    largest = largest_magnitude(first, second)
    inverse = ZERO
    if largest > NEGLIGIBLE:  # false for NaN, which then becomes the scale
        inverse = LARGEST_CODE / largest
    scale = largest / LARGEST_CODE
    first, second = first * splat(inverse), second * splat(inverse)
    sum_first = sum_int_lanes(to_int_rounded(first))
    sum_second = sum_int_lanes(to_int_rounded(second))
    store_activations(record, first, second)
    store_f32(scale_place(record), scale)
    store_f32(scale_place(record) + 4, np.float32(sum_first + sum_second))
    store_i32(sums_place(record), (sum_first & LOW_HALF) | (sum_second << SIXTEEN))
    return scale


@device
def left_by_rounding(row, record, scale):
    """Return the rounding errors of the codes of a block of 32 values."""
    first = fma(load_activations(record, 0), splat(-scale), load_f32x16(row))
    return first, fma(load_activations(record, 1), splat(-scale), load_f32x16(row + 64))


@device
def quantise_row(row, tile, token, n_blocks):
    """Quantise a row of ``32 * n_blocks`` values to the records of a token in a tile."""
    record, total, largest = tile + token_place(token), ZERO, ZERO
    for i in range(n_blocks):
        scale = quantise_block(load_f32x16(row + 128 * i), load_f32x16(row + 128 * i + 64), record + i * X_STEP)
        total += scale
        largest = max(largest, scale)
    limit = total * (OUTLIER / np.float32(n_blocks))
    flags, rests = tile + n_blocks * X_STEP + token, x_tile_bytes(n_blocks) - n_blocks * X_STEP
    for slab in range(0, n_blocks, SLAB):
        outliers = np.int64(0)
        for i in range(slab, min(slab + SLAB, n_blocks) if largest > limit else slab):
            scale = load_f32(scale_place(record + i * X_STEP))
            if scale > limit:
                first, second = left_by_rounding(row + 128 * i, record + i * X_STEP, scale)
                quantise_block(first, second, record + i * X_STEP + rests)
                outliers |= np.int64(1) << (i - slab)
        store_i8(flags + slab, outliers)


@kernel
def quantise(begin, end, x, n_heads, x_head, n_blocks, x_stride, records, record_head):
    """Quantise the first ``32 * n_blocks`` values of each head to records, in the layout of
    `localllm.kernels.cpu.tiles`.

    A head starts ``x_head`` bytes after the previous one, and its records ``record_head`` bytes after the previous
    records.
    """
    for token in range(begin, end):
        tile = records + token // TOKENS * x_tile_bytes(n_blocks)
        for head in range(n_heads):
            quantise_row(x + token * x_stride + head * x_head, tile + head * record_head, token % TOKENS, n_blocks)


@kernel
def quantise_int16(begin, end, x, n_blocks, x_stride, records):
    """Quantise rows of ``32 * n_blocks`` values to 16-bit records, in the layout of `localllm.kernels.cpu.matmul`."""
    for token in range(begin, end):
        row, record = x + token * x_stride, records + int16_record(token, n_blocks)
        for i in range(n_blocks):
            first, second = load_f32x16(row + 128 * i), load_f32x16(row + 128 * i + 64)
            largest = largest_magnitude(first, second)
            inverse = ZERO
            if largest > NEGLIGIBLE:
                inverse = LARGEST_INT16 / largest
            store_s16x16(record, first * splat(inverse))
            store_s16x16(record + 32, second * splat(inverse))
            store_f32(record + INT16_SCALE, largest / LARGEST_INT16)
            record += TOKENS * INT16_RECORD


@kernel
def copy_heads(begin, end, x, n_heads, x_head, x_stride, y, y_head, y_stride, n_bytes):
    """y = the first ``n_bytes`` bytes of each head of x."""
    for token in range(begin, end):
        for head in range(n_heads):
            source, target = x + token * x_stride + head * x_head, y + token * y_stride + head * y_head
            for i in range(0, n_bytes, 64):
                store_f32x16(target + i, load_f32x16(source + i))


@device
def silu(g, u):
    return g * sigmoid(g) * u


@device
def gelu(g, u):
    """The tanh form: gelu(x) = x * sigmoid(2 sqrt(2/π) (x + 0.044715 x³))."""
    inner = fma(splat(GELU_CUBIC) * g * g, g, g) * splat(TWO * GELU_SCALE)
    return g * sigmoid(inner) * u


@device
def gelu_erf(g, u):
    """x * erfc(-x / √2) / 2."""
    z = as_float(mask(as_int(g), MAGNITUDE)) * splat(SQRT_HALF)
    t = splat(ONE) / fma(splat(HALF), z, splat(ONE))
    tail = splat(HALF) * t * exp(erfc_polynomial(t) - z * z)
    return g * select_between(as_int(g), zero_i32x16(), splat_int(INFINITY_BITS), splat(ONE) - tail, tail) * u


@device
def gelu_quick(g, u):
    return g * sigmoid(splat(SWIGLU_ALPHA) * g) * u


@device
def positive(g):
    return select_between(as_int(g), zero_i32x16(), splat_int(NAN_BITS), g, zero_f32x16())


@device
def relu(g, u):
    return positive(g) * u


@device
def relu2(g, u):
    return positive(g) * positive(g) * u


@device
def tanh_of_gate(g, u):
    return tanh(g) * u


@device
def sigmoid_of_gate(g, u):
    return sigmoid(g) * u


@device
def softplus_of_gate(g, u):
    return softplus(g) * u


@device
def identity(g, u):
    return g * u


@device
def clamped_swiglu(g, u):
    """gpt-oss's gate: g * sigmoid(1.702 g) * (u + 1), where g is at most 7, and u is within ±7."""
    g = minimum(g, splat(SWIGLU_LIMIT))
    u = maximum(minimum(u, splat(SWIGLU_LIMIT)), splat(-SWIGLU_LIMIT))
    return g * sigmoid(splat(SWIGLU_ALPHA) * g) * (u + splat(ONE))


@kernel
def gated(begin, end, gate, up, width, stride, y):
    """y = ACTIVATION(gate, up); without UP, the second argument is 1."""
    for token in range(begin, end):
        for i in range(token * stride, token * stride + 4 * width, 64):
            factor = splat(ONE)
            if UP:
                factor = load_f32x16(up + i)
            store_f32x16(y + i, ACTIVATION(load_f32x16(gate + i), factor))


@kernel
def head_gate(begin, end, x, gate, n_heads, head_bytes, gate_stride, stride, y):
    """y = ACTIVATION(gate, x), with one gate per head."""
    for token in range(begin, end):
        for head in range(n_heads):
            factor, first = load_splat_f32(gate + token * gate_stride + 4 * head), token * stride + head * head_bytes
            for i in range(first, first + head_bytes, 64):
                store_f32x16(y + i, ACTIVATION(factor, load_f32x16(x + i)))


@kernel
def clamp(begin, end, x, width, stride, y, low: float, high: float):
    """y = x, clamped to low … high."""
    for token in range(begin, end):
        for i in range(token * stride, token * stride + 4 * width, 64):
            store_f32x16(y + i, maximum(minimum(load_f32x16(x + i), splat(high)), splat(low)))


@kernel
def xielu(begin, end, x, width, stride, y, p: float, n: float, beta: float, eps: float):
    """y = p x² + beta x if x > 0, else n (e ** min(x, eps) - 1 - x) + beta x."""
    for token in range(begin, end):
        for i in range(token * stride, token * stride + 4 * width, 64):
            v = load_f32x16(x + i)
            low = splat(n) * (exp_less_one(minimum(v, splat(eps))) - v)
            curve = select_between(as_int(v), zero_i32x16(), splat_int(NAN_BITS), splat(p) * v * v, low)
            store_f32x16(y + i, fma(splat(beta), v, curve))


@kernel
def add(begin, end, x, weight, gate, gate_stride, residual, width, stride, y, factor: float):
    """y = factor * x, with WEIGHT times a weight, with GATE times sigmoid(gate), and with RESIDUAL plus residual."""
    for token in range(begin, end):
        factors = splat(factor)
        if WEIGHT:
            factors = factors * load_splat_f32(weight)
        if GATE:
            factors = factors * sigmoid(load_splat_f32(gate + token * gate_stride))
        for i in range(token * stride, token * stride + 4 * width, 64):
            if RESIDUAL:
                store_f32x16(y + i, fma(load_f32x16(x + i), factors, load_f32x16(residual + i)))
            else:
                store_f32x16(y + i, load_f32x16(x + i) * factors)


@kernel
def mix_streams(
    begin, end, x, x_stride, weights, weights_stride, residual, residual_stride, n, n_made, first, size, y, y_stride,
    offset: float,
):  # fmt: skip
    """Mix streams of ``size`` bytes: stream j is the sum over i of (weights[j * n + i] + offset) * x_i, plus a
    residual.

    Streams before number ``first`` equal the residual, or 0 without WEIGHTS or RESIDUAL.
    """
    for token in range(begin, end):
        for j in range(n_made):
            for c in range(0, size, 64):
                total = zero_f32x16()
                if RESIDUAL:
                    total = load_f32x16(residual + token * residual_stride + j * size + c)
                if j >= first:
                    for i in range(n):
                        weight = splat(offset)
                        if WEIGHTS:
                            weight = weight + load_splat_f32(weights + token * weights_stride + 4 * (j * n + i))
                        total = fma(load_f32x16(x + token * x_stride + i * size + c), weight, total)
                store_f32x16(y + token * y_stride + j * size + c, total)


@kernel
def stream_gate(begin, end, key, key_stride, query, query_stride, n, size, y, y_stride, scale: float):
    """y = σ(sign(s) √max(|s|, 1e-6)) for n streams of ``size`` bytes, where s = scale * key · query."""
    for token in range(begin, end):
        k, q = key + token * key_stride, query + token * query_stride
        for j in range(n):
            total = zero_f32x16()
            for c in range(j * size, (j + 1) * size, 64):
                total = fma(load_f32x16(k + c), load_f32x16(q + c), total)
            product = sum_lanes(total) * scale
            root = sqrt(max(abs(product), LEAST_PRODUCT))
            if product < ZERO:
                root = -root
            if product == ZERO:
                root = ZERO
            store_f32(y + token * y_stride + 4 * j, max_lanes(sigmoid(splat(root))))


@kernel
def hyper_weights(
    begin, end, x, x_stride, scale, bias, read, write, mix, stride, mix_stride,
    eps: float, write_scale: float, write_offset: float,
):  # fmt: skip
    """Compute PARTS kinds of weights for N streams; see `localllm.kernels.operations.HyperWeights`."""
    for token in range(begin, end):
        row = x + token * x_stride
        for i in range(N):
            value = splat(load_f32(row + 4 * i) * load_f32(scale) + load_f32(bias + 4 * i))
            store_f32(read + token * stride + 4 * i, max_lanes(sigmoid(value)) + eps)
            if PARTS > 1:
                value = splat(load_f32(row + 4 * (N + i)) * load_f32(scale + 4) + load_f32(bias + 4 * (N + i)))
                store_f32(write + token * stride + 4 * i, write_scale * max_lanes(sigmoid(value)) + write_offset)
        if PARTS > 2:
            out = mix + token * mix_stride  # [result stream, input stream]: columns are contiguous
            for i in range(N):
                largest = np.float32(-3e38)
                for j in range(N):
                    offset = 4 * (2 * N + N * i + j)
                    logit = load_f32(row + offset) * load_f32(scale + 8) + load_f32(bias + offset)
                    store_f32(out + 4 * (N * j + i), logit)
                    largest = max(largest, logit)
                total = ZERO
                for j in range(N):
                    power = max_lanes(exp(splat(load_f32(out + 4 * (N * j + i)) - largest)))
                    store_f32(out + 4 * (N * j + i), power)
                    total += power
                for j in range(N):
                    address = out + 4 * (N * j + i)
                    store_f32(address, load_f32(address) / total + eps)
            for turn in range(2 * ROUNDS - 1):
                # Strides between the summands, and between the sums.
                step, next_sum = (4, 4 * N) if turn % 2 == 0 else (4 * N, 4)
                for i in range(N):
                    total = eps
                    for j in range(N):
                        total += load_f32(out + next_sum * i + step * j)
                    for j in range(N):
                        address = out + next_sum * i + step * j
                        store_f32(address, load_f32(address) / total)


@kernel
def root_mean_square(begin, end, x, n, width, stride, y, y_stride):
    """y = √mean(x²), over rows of ``n`` values."""
    for token in range(begin, end):
        squares = zero_f32x16()
        for i in range(token * stride, token * stride + 4 * width, 64):
            squares = fma(load_f32x16(x + i), load_f32x16(x + i), squares)
        store_f32(y + token * y_stride, sqrt(sum_lanes(squares) / np.float32(n)))


@kernel
def above_deviation(begin, end, x, n, width, stride, y, factor: float):
    """y = max(0, x - mean(x) - factor * √var(x)), over rows of ``n`` values."""
    last = splat_int(np.int32(n - 1))
    for token in range(begin, end):
        row, out = x + token * stride, y + token * stride
        mean, variance = mean_and_variance(row, n, width)
        cut = mean + splat(factor * sqrt(variance))
        for i in range(0, 4 * width, 64):
            lanes = lane_numbers() + splat_int(np.int32(i // 4))
            v = maximum(load_f32x16(row + i) - cut, zero_f32x16())
            store_f32x16(out + i, select_between(lanes, zero_i32x16(), last, v, zero_f32x16()))


@kernel
def softcap(begin, end, x, width, stride, y, cap: float, inverse: float):
    """y = cap * tanh(x * inverse)."""
    for row in range(begin, end):
        for i in range(row * stride, row * stride + 4 * width, 64):
            store_f32x16(y + i, splat(cap) * tanh(load_f32x16(x + i) * splat(inverse)))


@kernel
def gather_rows(begin, end, rows, x, width, stride, y):
    """Row i of y = row rows[i] of x.  rows: int32."""
    for i in range(begin, end):
        source, target = x + np.int64(load_i32(rows + 4 * i)) * stride, y + i * stride
        for offset in range(0, 4 * width, 64):
            store_f32x16(target + offset, load_f32x16(source + offset))


@kernel
def join_rows(begin, end, rows, n, x, width, stride, y, y_stride, share: float):
    """Row i of y = the ``n`` rows of x from rows[i], concatenated; with MEAN, their sum times ``share``."""
    for i in range(begin, end):
        source, target = x + np.int64(load_i32(rows + 4 * i)) * stride, y + i * y_stride
        if MEAN:
            for offset in range(0, 4 * width, 64):
                total = load_f32x16(source + offset)
                for j in range(1, n):
                    total = total + load_f32x16(source + j * stride + offset)
                store_f32x16(target + offset, total * splat(share))
        else:
            for j in range(n):
                vector_bytes = width // 16 * 64
                for offset in range(0, vector_bytes, 64):
                    store_f32x16(target + 4 * j * width + offset, load_f32x16(source + j * stride + offset))
                for offset in range(vector_bytes, 4 * width, 4):
                    store_f32(target + 4 * j * width + offset, load_f32(source + j * stride + offset))


@kernel
def add_rows(begin, end, rows, x, width, stride, y):
    """Row rows[i] of y += row i of x.  rows: int32."""
    for i in range(begin, end):
        source, target = x + i * stride, y + np.int64(load_i32(rows + 4 * i)) * stride
        for offset in range(0, 4 * width, 64):
            store_f32x16(target + offset, load_f32x16(target + offset) + load_f32x16(source + offset))


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
    """Rotate n_pairs pairs of a head: (x_i, x_i + second_offset), i in steps of first_step; offsets are in bytes."""
    for i in range(n_pairs):
        cos, sin = load_f32(angles + 8 * i), load_f32(angles + 8 * i + 4)
        address = row + i * first_step
        a, b = load_f32(address), load_f32(address + second_offset)
        store_f32(address, a * cos - b * sin)
        store_f32(address + second_offset, b * cos + a * sin)


@template
def turn_head(x, norm, n_norm, weight, eps, angles, n_pairs, pair_step, pair_offset):
    """Normalise and rotate a head in place.  ``norm``: 0 for none, 1 without weights, 2 with weights."""
    if norm and not NORM_LAST:
        norm_head(x, n_norm, weight, eps, norm - 1)
    rotate(x + ROPE_FIRST, angles, n_pairs, pair_step, pair_offset)
    if norm and NORM_LAST:
        norm_head(x, n_norm, weight, eps, norm - 1)


@template
def hadamard(row, n, size):
    """Rotate each group of ``size`` values among n values in place; ``size`` is a power of two from 16."""
    factor = splat(ONE / sqrt(np.float32(size)))
    for first in range(row, row + 4 * n, 4 * size):
        for i in range(first, first + 4 * size, 64):
            store_f32x16(i, hadamard_lanes(load_f32x16(i)) * factor)
        step = 64
        while step < 4 * size:
            for i in range(first, first + 4 * size, 2 * step):
                for j in range(i, i + step, 64):
                    a, b = load_f32x16(j), load_f32x16(j + step)
                    store_f32x16(j, a + b)
                    store_f32x16(j + step, a - b)
            step *= 2


@kernel
def rope_append(
    begin, end, slots, positions, turns, angles, n_pairs, pair_step, pair_offset,
    q, q_stride, n_heads, key_dim, k, k_stride, v, v_stride, n_kv_heads, value_dim, keys, values,
    q_weight, n_q_norm, k_weight, n_k_norm, v_weight, n_v_norm, factors, factor_length, factor_offset,
    q_eps: float, k_eps: float, v_eps: float,
):  # fmt: skip
    """Normalise and rotate q and k in place, by angles [positions, n_pairs] of (cos, sin), and append k and v to the
    cache.

    slots: int64 [T], page * PAGE + position in the page.  positions, turns: int32 [T]; turns are rows of angles.
    keys, values: blocks of ``KEY_BLOCK`` and ``VALUE_BLOCK`` bytes [n_pages, n_kv_heads]
    (`localllm.kernels.cpu.cache_types`).  factors: of q, `BatchTables.position_factors`.

    Q_NORM, K_NORM, V_NORM: ``norm`` of `turn_head`.  HAS_KEYS, HAS_VALUES: whether k and v exist.  COPY_VALUES:
    whether v shares the memory of k, which is changed.  SCALES_Q: whether factors exist.  KEY_ROTATION,
    VALUE_ROTATION: rotations of the stored keys and values, `KVCache.rotations`.  STRIDE: tokens per cache entry; the
    last token appends the entry.
    """
    scratch = stack(4 * VALUE_HEAD)
    for token in range(begin, end):
        position = np.int64(load_i32(positions + 4 * token))
        turn = angles + np.int64(load_i32(turns + 4 * token)) * n_pairs * 8
        for head in range(n_heads):
            row = q + token * q_stride + 4 * head * key_dim
            turn_head(row, Q_NORM, n_q_norm, q_weight, q_eps, turn, n_pairs, pair_step, pair_offset)
            if SCALES_Q:
                factor = load_f32(factors + 4 * (max(position + factor_offset, 0) // factor_length))
                for i in range(key_dim):
                    store_f32(row + 4 * i, load_f32(row + 4 * i) * factor)
            if KEY_ROTATION:
                hadamard(row, key_dim, KEY_ROTATION)
        if HAS_KEYS and (STRIDE == 1 or position % STRIDE == STRIDE - 1):
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
                    if VALUE_ROTATION:
                        hadamard(v_row, value_dim, VALUE_ROTATION)
                    block = values + number * VALUE_BLOCK
                    APPEND_VALUES(v_row, value_dim, VALUE_HEAD, VALUE_BITS, block, slot % PAGE)
                k_row = k + token * k_stride + 4 * head * key_dim
                turn_head(k_row, K_NORM, n_k_norm, k_weight, k_eps, turn, n_pairs, pair_step, pair_offset)
                if KEY_ROTATION:
                    hadamard(k_row, key_dim, KEY_ROTATION)
                index = slot % PAGE // STRIDE
                APPEND_KEYS(k_row, key_dim, KEY_HEAD, KEY_BITS, keys + number * KEY_BLOCK, index)
