"""Search for codes and scales with the least weighted squared error, shared by all formats with scales.

For fixed codes ``q`` of a sub-block, the best scale (and minimum) follow by least squares. Their error depends on
three weighted sums: of q, of q² and of q times the values. Each block is encoded in three steps:

1. **Fit** each sub-block alone: round it with many scales at once and select the codes whose best scale has the least
   error. In formats with a minimum, search once more around the best scale and minimum.
2. Fit the block's scale to the scales of its sub-blocks in the same way. The scales are the values to be rounded,
   weighted by the sensitivity of the error to each scale.
3. **Settle**: with that scale, select the integer scale (and minimum) of each sub-block that has the least actual
   error. Then compute the block's scale by least squares for all codes together.

A sweep over every scale at which a code changes would be exact. In tests (`tests/quant/test_encode.py`) the
candidates come within a percent of its error in a tenth of its time, because candidates are lanes of the processor's
vectors: loops over candidates are innermost and of constant length, so that LLVM vectorises them.

**The bytes do not depend on the processor.** Nearly equal candidates are common, and the last bit of a sum can decide
between them. Sums are therefore computed in the order of the source: LLVM must not reorder them to fit the vector
width, fuse products into them, or approximate quotients. If values rather than candidates fill a vector, their sums
use separate lanes (`total`).

numba compiles these functions on first use and caches the result. (The compiler in `localllm.kernels` requires
hand-written vectors, and `localllm.quant` must not import it.)
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

#: Candidates per search.
LANES = 32
#: Candidates per search if all weights are equal.
FEW = 16
#: Offsets of the rows in the table of candidates: factor and summand of values before rounding; sums of weights
#: times codes, codes squared, and codes times values; resulting scale and minimum.
INV, OFF, SQ, SQQ, SQX, SCALE, MIN = (i * LANES for i in range(7))
TABLE = 7 * LANES
#: Steps from the initial integer scale and minimum that `choose` tries, by candidate.
STEPS = np.array([[c - LANES // 2, 0] for c in range(LANES)], np.float32).T.copy()
STEPS_WITH_MIN = np.array([[c // 5 - 3, c % 5 - 2] for c in range(LANES)], np.float32).T.copy()


def jit(function, **options):
    """Compile a function that allocates nothing.

    Reference counting of arrays (``_nrt``) is disabled, because it takes as long as rounding a sub-block.
    """
    options |= {"nogil": True, "error_model": "numpy", "_nrt": False}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # the cache directory is not writable
        return njit(**options)(function)


@jit
def half(x):
    """Return ``x`` rounded to float16, as float32."""
    if abs(x) < np.float32(2**-14):
        return np.rint(x * np.float32(2**24)) * np.float32(2**-24)
    bits = np.int64(np.float32(x).view(np.uint32))
    bits += 0xFFF + (bits >> 13 & 1)  # to nearest, ties to even
    return np.uint32(bits & 0xFFFFE000).view(np.float32)


@jit
def inverse(x):
    return np.float32(1) / x if x != 0 else np.float32(0)


@jit
def place(y):
    """Return the index of ``y``, in halves, in a table by halves. Every ``y``, also NaN, gives a valid index."""
    y = np.floor(y)
    y = y if y > np.float32(-256) else np.float32(-256)
    y = y if y < np.float32(255) else np.float32(255)
    return np.int32(y) + 256


@jit
def scan(x, w, lo, hi, lut, t):
    """Round x [n], n even, with each candidate scale.

    Codes are the integers lo … hi or, if ``lut`` is not empty, its values, which it lists by halves from -128.
    """
    for c in range(3 * LANES):
        t[SQ + c] = 0
    if lut.size == 0:
        for i in range(0, x.size, 2):  # two values at a time: sums are loaded and stored half as often
            x0, w0, x1, w1 = x[i], w[i], x[i + 1], w[i + 1]
            for c in range(LANES):
                q0 = min(max(np.rint(x0 * t[INV + c] + t[OFF + c]), lo), hi)
                q1 = min(max(np.rint(x1 * t[INV + c] + t[OFF + c]), lo), hi)
                wq0, wq1 = w0 * q0, w1 * q1
                t[SQ + c] += wq0 + wq1
                t[SQQ + c] += wq0 * q0 + wq1 * q1
                t[SQX + c] += wq0 * x0 + wq1 * x1
    else:
        for i in range(x.size):
            xi = 2 * x[i]
            wi = w[i]
            for c in range(LANES):
                q = lut[place(xi * t[INV + c])]
                wq = wi * q
                t[SQ + c] += wq
                t[SQQ + c] += wq * q
                t[SQX + c] += wq * x[i]


@jit
def code(x, inv, off, lo, hi, lut, out):
    """Write the codes of x [n] into ``out``."""
    if lut.size == 0:
        for i in range(x.size):
            out[i] = np.int8(min(max(np.rint(x[i] * inv + off), lo), hi))
    else:
        for i in range(x.size):
            out[i] = np.int8(lut[place(2 * x[i] * inv)])


@jit
def best(t, sw, sx, affine, m_most):
    """Return (explained, scale, minimum, Σ w q²) of the candidate whose scaled codes explain most of Σ w x²."""
    zero = np.float32(0)
    for c in range(LANES):
        sq, sqq, sqx = t[SQ + c], t[SQQ + c], t[SQX + c]
        scale = sqx / sqq if sqq > 0 else zero
        low = zero
        if affine:
            det = sw * sqq - sq * sq
            determined = det > np.float32(1e-6) * sw * sqq
            inv = np.float32(1) / (det if determined else np.float32(1))
            lowest = (sqq * sx - sq * sqx) * inv
            free = determined and lowest <= m_most
            scale = (sw * sqx - sq * sx) * inv if free else scale
            low = lowest if free else zero
        t[SCALE + c] = scale
        t[MIN + c] = low
        t[INV + c] = scale * sqx + low * sx
    c = highest(t[INV : INV + LANES])
    return t[INV + c], t[SCALE + c], t[MIN + c], t[SQQ + c]


@jit
def highest(values):
    """Return the index of the highest of `LANES` values."""
    most = values[0]
    for c in range(LANES):
        most = max(most, values[c])
    for c in range(LANES):
        if values[c] == most:
            return c
    return 0


@jit
def total(t):
    """Return the sum of `LANES` values, added pairwise by halves. Overwrites ``t``."""
    for n in (16, 8, 4, 2, 1):
        for c in range(n):
            t[c] += t[c + n]
    return t[0]


@jit
def fit(x, w, lo, hi, lut, affine, m_most, tries, t):
    """Return the scale and minimum of values x [n] alone.

    Args:
        m_most: largest minimum allowed (0 in formats that subtract it).
        tries: [2, LANES], levels that the smallest and the largest value are mapped to. In symmetric formats, 0 and
            the level of the value of largest magnitude.

    Returns:
        (scale, minimum, Σ w q²), float32.
    """
    sw, sx, low, high = np.float32(0), np.float32(0), x[0], x[0]
    for i in range(x.size):
        sw += w[i]
        sx += w[i] * x[i]
        low = min(low, x[i])
        high = max(high, x[i])
    if affine:
        low = min(low, m_most)
        span = high - low
    else:
        span = high if high > -low else low
    if abs(span) < np.float32(1e-30):  # 1 / span would not be finite; float16 rounds it to 0
        return np.float32(0), low if affine else np.float32(0), np.float32(0)
    for c in range(LANES):
        t[INV + c] = (tries[1, c] - tries[0, c]) / span
        t[OFF + c] = tries[0, c] - low * t[INV + c] if affine else np.float32(0)
    scan(x, w, lo, hi, lut, t)
    most, scale, minimum, sqq = best(t, sw, sx, affine, m_most)
    # A second search gains little without a minimum or with few levels.
    if not affine or hi - lo < np.float32(4):
        return scale, minimum, sqq
    # Search around the best scale and minimum, in steps of 1/30 and of 1/8 of a level.
    for c in range(LANES):
        t[INV + c] = inverse(scale) * (1 + (c % 8 - 4) * np.float32(1 / 30))
        t[OFF + c] = -minimum * t[INV + c] + (c // 8 - 2) * np.float32(1 / 8)
    scan(x, w, lo, hi, lut, t)
    candidate = best(t, sw, sx, affine, m_most)
    if candidate[0] > most:
        most, scale, minimum, sqq = candidate
    return scale, minimum, sqq


@jit
def choose(x, w, lo, hi, lut, t, d, dmin, affine, s, m, s_lo, s_hi, m_hi):
    """Return the integer scale and minimum near (s, m) with the least error, its candidate, and Σ w x."""
    sw, sx = np.float32(0), np.float32(0)
    for i in range(x.size):
        sw += w[i]
        sx += w[i] * x[i]
    steps = STEPS_WITH_MIN if affine else STEPS
    for c in range(LANES):
        t[SCALE + c] = min(max(s + steps[0, c], s_lo), s_hi)
        t[MIN + c] = min(max(m + steps[1, c], np.float32(0)), m_hi)
        t[INV + c] = inverse(d * t[SCALE + c])
        t[OFF + c] = dmin * t[MIN + c] * t[INV + c]
    scan(x, w, lo, hi, lut, t)
    for c in range(LANES):
        a, b = d * t[SCALE + c], dmin * t[MIN + c]
        t[INV + c] = 2 * a * (t[SQX + c] + b * t[SQ + c]) - a * a * t[SQQ + c] - 2 * b * sx - b * b * sw
    at = highest(t[INV : INV + LANES])
    return t[SCALE + at], t[MIN + at], at, sx


@jit
def encode_alike(x, lo, hi, tries, out, ds, t):
    """Encode blocks with equal weights and a scale only, like `encode` but in half the time."""
    for b in range(x.shape[0]):
        low, high = np.float32(0), np.float32(0)
        for i in range(x.shape[1]):
            low = min(low, x[b, i])
            high = max(high, x[b, i])
        span = high if high > -low else low
        per_level = np.float32(1) / span if abs(span) > np.float32(1e-30) else np.float32(0)
        for c in range(FEW):
            t[INV + c] = tries[c] * per_level
            t[SQQ + c], t[SQX + c] = 0, 0
        for i in range(0, x.shape[1], 2):
            x0, x1 = x[b, i], x[b, i + 1]
            for c in range(FEW):
                q0 = min(max(np.rint(x0 * t[INV + c]), lo), hi)
                q1 = min(max(np.rint(x1 * t[INV + c]), lo), hi)
                t[SQQ + c] += q0 * q0 + q1 * q1
                t[SQX + c] += q0 * x0 + q1 * x1
        most, scale = np.float32(0), np.float32(0)
        for c in range(FEW):
            best = t[SQX + c] * inverse(t[SQQ + c])
            scale = best if best * t[SQX + c] > most else scale
            most = max(most, best * t[SQX + c])
        ds[b, 0], ds[b, 1] = half(scale), 0
        code(x[b], inverse(ds[b, 0]), np.float32(0), lo, hi, ds[b, :0], out[b])


@jit
def encode(x, weights, sub, lo, hi, lut, affine, m_most, s_lo, s_hi, m_hi, tries, s_tries, out, ds, ss, t, fits):
    """Encode blocks.

    Args:
        x: float32 [n_blocks, length].
        weights: float32 [k, length], the weights of a row's k blocks.
        sub: values per sub-block.
        lo, hi, lut: range of the codes, and their values if they are not consecutive integers, see `scan`.
        affine, m_most: whether there is a minimum, and its upper limit, see `fit`.
        s_lo, s_hi, m_hi: ranges of the integer scales and minima; ``s_hi`` is 0 in formats without integer scales.
        tries, s_tries: candidates of `fit`, for values, and for scales and minima.
        out: int8 [n_blocks, length], receives the codes (levels).
        ds: float32 [n_blocks, 2], receives scale and minimum (which is subtracted), rounded to float16.
        ss: int16 [2, n_blocks, length / sub], receives integer scales and minima.
        t, fits: scratch memory, float32 [TABLE] and [6, length / sub].
    """
    n_sub = x.shape[1] // sub
    none = lut[:0]
    for b in range(x.shape[0]):
        w = weights[b % weights.shape[0]]
        for j in range(n_sub):
            xs, ws = x[b, j * sub : (j + 1) * sub], w[j * sub : (j + 1) * sub]
            fits[0, j], low, fits[2, j] = fit(xs, ws, lo, hi, lut, affine, m_most, tries, t)
            fits[1, j], fits[3, j] = -low, ws.sum()
        if s_hi == 0:
            d, dmin = half(fits[0, 0]), half(fits[1, 0])
            fits[4, 0], fits[5, 0] = 1, 1
        else:
            d = half(fit(fits[0], fits[2], s_lo, s_hi, none, False, np.float32(0), s_tries, t)[0])
            dmin = np.float32(0)
            if affine:
                dmin = half(fit(fits[1], fits[3], np.float32(0), m_hi, none, False, np.float32(0), s_tries, t)[0])
            for j in range(n_sub):
                fits[4, j] = min(max(np.rint(fits[0, j] * inverse(d)), s_lo), s_hi)
                fits[5, j] = min(max(np.rint(fits[1, j] * inverse(dmin)), np.float32(0)), m_hi)
            aa, ab, bb, ax, bx = np.float32(0), np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for j in range(n_sub):
                xs, ws = x[b, j * sub : (j + 1) * sub], w[j * sub : (j + 1) * sub]
                s, m, c, sx = choose(
                    xs, ws, lo, hi, lut, t, d, dmin, affine, fits[4, j], fits[5, j], s_lo, s_hi, m_hi
                )
                fits[4, j], fits[5, j] = s, m
                aa += s * s * t[SQQ + c]
                ab += s * m * t[SQ + c]
                bb += m * m * fits[3, j]
                ax += s * t[SQX + c]
                bx += m * sx
            # The minimum of Σ w (x - d S q + dmin M)² for constant S, M and q.
            det = aa * bb - ab * ab
            if det > np.float32(1e-6) * aa * bb:
                d, dmin = half((bb * ax - ab * bx) / det), half((ab * ax - aa * bx) / det)
            else:
                d = half((ax + dmin * ab) * inverse(aa))
        for j in range(n_sub):
            inv = inverse(d * fits[4, j])
            code(
                x[b, j * sub : (j + 1) * sub],
                inv,
                dmin * fits[5, j] * inv,
                lo,
                hi,
                lut,
                out[b, j * sub : (j + 1) * sub],
            )
            ss[0, b, j], ss[1, b, j] = np.int16(fits[4, j]), np.int16(fits[5, j])
        ds[b, 0], ds[b, 1] = d, dmin


@jit
def feed_back(x, sub, lo, hi, lut, factor, out, ds, ss, errors, y):
    """Encode blocks again with fixed scales, and compensate each value's rounding error in later values.

    Later columns compensate the error of a column as far as their inputs correlate. This function does so within the
    block. For later blocks, the caller subtracts ``errors`` times the matching part of the factor.

    Args:
        x, sub, lo, hi, lut: see `encode`.
        factor: float32 [length, length], the block's part of a factor (`localllm.quant.encode.Feedback`).
        out, ds, ss: results of `encode`; ``ss`` is empty without integer scales. ``out`` receives the new codes.
        errors: float32 [n_blocks, length], receives the error of each value, divided by the factor's diagonal.
    """
    for b in range(x.shape[0]):
        for i in range(y.size):
            y[i] = x[b, i]
        for i in range(y.size):
            scale, minimum = ds[b, 0], ds[b, 1]
            if ss.size:
                scale, minimum = scale * ss[0, b, i // sub], minimum * ss[1, b, i // sub]
            if lut.size:
                q = lut[place(2 * y[i] * inverse(scale))]
            else:
                q = min(max(np.rint((y[i] + minimum) * inverse(scale)), lo), hi)
            out[b, i] = np.int8(q)
            error = (y[i] - (scale * q - minimum)) / factor[i, i]
            errors[b, i] = error
            for j in range(i + 1, y.size):
                y[j] -= error * factor[i, j]


# -- Plain rounding ------------------------------------------------------------------------------------------------
#
# One kernel per step, because LLVM vectorises only short loops.


def _extremes(x, low, high):
    """Write the lowest and the highest value of each block [n_blocks, length] into float32 [n_blocks] arrays."""
    for b in range(x.shape[0]):
        values = x[b]
        least = most = values[0]
        for i in range(values.size):
            least = min(least, values[i])
            most = max(most, values[i])
        low[b], high[b] = least, most


extremes = jit(_extremes, fastmath={"nnan", "nsz"})  # reordering changes only the sign of zeros


@jit
def to_planes(x, base, inverse, offset, most, start, out):
    """Write codes 0 … ``most`` of 4 or 5 bits, (x - base) / scale + ``offset`` with ties rounded up.

    Args:
        base, inverse: value to subtract and 1 / scale, per block [n_blocks, 32].
        start: offset of the two planes of 16 codes in the blocks ``out``; fifth bits precede them.
    """
    half_up = offset + np.float32(0.5)
    for b in range(x.shape[0]):
        values, block, first, factor = x[b], out[b], base[b], inverse[b]
        for i in range(16):
            code = np.int32(min((values[i] - first) * factor + half_up, most))
            above = np.int32(min((values[i + 16] - first) * factor + half_up, most))
            block[start + i] = np.uint8((code & 15) | above << 4)
        if most > 16:
            fifth = np.uint32(0)
            for i in range(32):
                code = np.uint32(min((values[i] - first) * factor + half_up, most))
                fifth |= (code >> np.uint32(4)) << np.uint32(i)
            for i in range(4):
                block[start - 4 + i] = np.uint8(fifth >> np.uint32(8 * i))


@jit
def to_nearest(x, inverse, out):
    """Round x / scale to the nearest integer, ties away from 0, into int8 [n_blocks, length]."""
    for b in range(x.shape[0]):
        values, codes, factor = x[b], out[b], inverse[b]
        for i in range(values.size):
            y = values[i] * factor
            truncated = np.int32(y)
            fraction = y - np.float32(truncated)
            up, down = fraction >= np.float32(0.5), fraction <= np.float32(-0.5)
            codes[i] = np.int8(truncated + np.int32(up) - np.int32(down))


@jit
def to_powers(x, scale, out):
    """Write E2M1 codes, int8 [n_blocks, length], of the doubled values nearest to x / scale; ties towards 0."""
    for b in range(x.shape[0]):
        values, codes, unit = x[b], out[b], scale[b]
        for i in range(values.size):
            size = abs(values[i])
            code = np.int32(size > np.float32(0.5) * unit) + np.int32(size > np.float32(1.5) * unit)
            code += np.int32(size > np.float32(2.5) * unit) + np.int32(size > np.float32(3.5) * unit)
            code += np.int32(size > 5 * unit) + np.int32(size > 7 * unit) + np.int32(size > 10 * unit)
            codes[i] = np.int8(code + 8 * np.int32(values[i] < np.float32(-0.5) * unit))


# -- Codebooks -----------------------------------------------------------------------------------------------------


@jit
def best_row(x, w, s, lowest, step, top, near, t):
    """Return the row near x / s with the least Σ w (s row - x)², as its index in ``near``: (point, lane).

    Args:
        lowest, step, top: approximate values in rows: lowest, lowest + step, … lowest + top * step.
        near: int8 [points, len(x), LANES], the nearest rows to each combination of these values.
    """
    inv = inverse(s * step)
    point = 0
    for i in range(x.size):
        digit = np.rint(x[i] * inv - lowest / step)
        digit = digit if digit > 0 else np.float32(0)
        digit = digit if digit < top else np.float32(top)
        point = point * (top + 1) + np.int64(digit)
    for c in range(LANES):
        t[c] = 0
    for i in range(x.size):
        xi = x[i]
        wi = w[i]
        for c in range(LANES):
            e = s * near[point, i, c] - xi
            t[c] -= wi * e * e
    return point, highest(t)


@jit
def cost_at(s, a, b):
    """Return the error of groups at scale s, minus Σ w x², with the best rows of a, b [groups, candidates]."""
    cost = np.float32(0)
    for k in range(a.shape[0]):
        least = s * b[k, 0] - 2 * a[k, 0]
        for c in range(1, a.shape[1]):
            least = min(least, s * b[k, c] - 2 * a[k, c])
        cost += s * least
    return cost


@jit
def choose_rows(s, a, b, rows):
    """Write each group's best candidate at scale s into ``rows``. Return their Σ w x row and Σ w row²."""
    sum_a, sum_b = np.float32(0), np.float32(0)
    for k in range(a.shape[0]):
        rows[k] = 0
        for c in range(1, a.shape[1]):
            if s * b[k, c] - 2 * a[k, c] < s * b[k, rows[k]] - 2 * a[k, rows[k]]:
                rows[k] = c
        sum_a += a[k, rows[k]]
        sum_b += b[k, rows[k]]
    return sum_a, sum_b


@jit
def fit_rows(x, w, lowest, step, top, near, tries, a, b, row, rows, t):
    """Search the best rows for a sub-block, at a few scales. Return its best scale and their Σ w row².

    ``a``, ``b`` and ``row`` receive Σ w x row, Σ w row² and the row for each codebook, group of values and scale.
    `encode_rows` describes the other arguments.
    """
    length = near.shape[2]
    span = np.float32(0)
    for i in range(x.size):
        span = max(span, abs(x[i]))
    least, best, best_book = np.float32(0), np.float32(0), 0
    for v in range(near.shape[0]):
        book = near[v]
        for k in range(x.size // length):
            xs, ws = x[length * k : length * (k + 1)], w[length * k : length * (k + 1)]
            for c in range(tries.size):
                point, lane = best_row(xs, ws, span / tries[c], lowest[v], step, top, book, t)
                row[v, k, c] = LANES * point + lane
                a[v, k, c], b[v, k, c] = 0, 0
                for i in range(length):
                    g = np.float32(book[point, i, lane])
                    a[v, k, c] += ws[i] * xs[i] * g
                    b[v, k, c] += ws[i] * g * g
        for c in range(2 * tries.size - 1):
            target = tries[c // 2]
            if c % 2:
                target = (target + tries[c // 2 + 1]) / 2
            cost = cost_at(span / target, a[v], b[v])
            if cost < least:
                least, best, best_book = cost, span / target, v
    if least < 0:
        sum_a, sum_b = choose_rows(best, a[best_book], b[best_book], rows)
        return sum_a * inverse(sum_b), sum_b
    return np.float32(0), np.float32(0)


@jit
def encode_rows(
    x, weights, sub, lowest, step, top, near, signed, even, s_hi, lut, tries, s_tries, points, masks, ds, ss, space
):
    """Encode blocks of 256 values as rows of a codebook, with a sign per value or a choice of two codebooks.

    The best row depends on the scale. Rows near the values are searched at a few scales only. The few best rows are
    then the candidates while scales are fitted and rounded as in `encode`.

    Args:
        x: float32 [n_blocks, 256].
        weights: float32 [k, 256], the weights of a row's k blocks.
        sub: values that share an integer scale S; the factor is 2 S + 1.
        lowest, step, top, near: see `best_row`. ``lowest`` and ``near`` have a first dimension of 1 or 2 codebooks;
            with two, each sub-block selects one.
        signed: rows are magnitudes, and every value has a sign.
        even: an even number of each 8 values is negative.
        s_hi: largest S.
        lut: table for `scan` that rounds to 2 S + 1.
        tries, s_tries: levels of the largest value, and candidates of `fit` for the scales.
        points: int32 [n_blocks, 256 / values in a row], receives indices of rows in ``near``: point times `LANES`
            plus lane.
        masks: uint8 [n_blocks, 32], receives signs, or 255 if the second codebook was selected.
        ds: float32 [n_blocks], receives the scales that 2 S + 1 are multiplied by, not yet rounded to float16.
        ss: uint8 [n_blocks, 256 / sub], receives S.
        space: scratch memory: Σ w x row, Σ w row² and the row for each sub-block, codebook, row and scale; selected
            rows; a table; scale and weight of each sub-block; the block's values.
    """
    n_books, n_sub, n_groups = near.shape[0], 256 // sub, sub // near.shape[2]
    a, b, row, rows, t, fits, y = space
    for block in range(x.shape[0]):
        w = weights[block % weights.shape[0]]
        for k in range(32):
            masks[block, k] = 0
        for i in range(256):
            y[i] = x[block, i]
            if signed and y[i] < 0:
                y[i] = -y[i]
                masks[block, i // 8] |= 1 << (i % 8)
        if even:
            for k in range(32):
                make_even(y[8 * k : 8 * k + 8], w[8 * k : 8 * k + 8], masks[block, k : k + 1])
        for j in range(n_sub):
            ys, ws = y[sub * j : sub * (j + 1)], w[sub * j : sub * (j + 1)]
            fits[0, j], fits[1, j] = fit_rows(ys, ws, lowest, step, top, near, tries, a[j], b[j], row[j], rows, t)
        d = fit(fits[0], fits[1], np.float32(0), np.float32(0), lut, False, np.float32(0), s_tries, t)[0]
        numerator, denominator = np.float32(0), np.float32(0)
        for j in range(n_sub):
            least, best_book, factor = np.float32(np.inf), 0, np.float32(1)
            ss[block, j] = 0
            near_s = np.rint((fits[0, j] * inverse(d) - 1) / 2)
            for step_s in range(-3, 4):
                s = min(max(near_s + step_s, np.float32(0)), np.float32(s_hi))
                for v in range(n_books):
                    cost = cost_at(d * (2 * s + 1), a[j, v], b[j, v])
                    if cost < least:
                        least, best_book, factor, ss[block, j] = cost, v, 2 * s + 1, np.uint8(s)
            sum_a, sum_b = choose_rows(d * factor, a[j, best_book], b[j, best_book], rows)
            numerator += factor * sum_a
            denominator += factor * factor * sum_b
            for k in range(n_groups):
                points[block, n_groups * j + k] = row[j, best_book, k, rows[k]]
            if best_book == 1:
                for k in range(sub // 8 * j, sub // 8 * (j + 1)):
                    masks[block, k] = 255
        ds[block] = numerator * inverse(denominator)


@jit
def make_even(y, w, mask):
    """Change the sign of the value whose error grows least, if an odd number of 8 values is negative."""
    n, at, least = 0, 0, np.float32(np.inf)
    for i in range(8):
        n += mask[0] >> i & 1
        if w[i] * y[i] < least:
            least, at = w[i] * y[i], i
    if n % 2:
        y[at] = -y[at]
        mask[0] ^= 1 << at


# -- Powers of two -------------------------------------------------------------------------------------------------


@jit
def e2m1(x, scale):
    """Return the nearest doubled E2M1 number (0, 1, 2, 3, 4, 6, 8, 12 or a negative) to x / scale."""
    y = x * (np.float32(1) / scale)
    size = min(abs(y), np.float32(12))
    step = np.float32(1) if size < 4 else np.float32(2) if size < 8 else np.float32(4)
    return math.copysign(np.rint(size * (np.float32(1) / step)) * step, y)


@jit
def encode_powers(x, weights, out, exponents, t):
    """Encode blocks of E2M1 with scales 2^(e - 128), ``exponents`` e. Selects the better of two possible scales."""
    for b in range(x.shape[0]):
        w = weights[b % weights.shape[0]]
        high = np.float32(0)
        for i in range(x.shape[1]):
            high = max(high, abs(x[b, i]))
        # 12 · 2^first is larger than the largest value.
        first = math.frexp(high / np.float32(12))[1] if high > 0 else -125
        least, best = np.float32(np.inf), np.float32(1)
        for e in range(max(first - 1, -127), first + 1):
            scale = np.float32(math.ldexp(1.0, e))
            for i in range(LANES):
                off = x[b, i] - scale * e2m1(x[b, i], scale)
                t[i] = w[i] * off * off
            error = total(t[:LANES])
            if error < least:
                least, best, exponents[b] = error, scale, np.uint8(e + 128)
        for i in range(x.shape[1]):
            out[b, i] = np.int8(e2m1(x[b, i], best))
