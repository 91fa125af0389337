"""Quantisers: encode floats as blocks, in every format that files are published in.

This module describes the values of each format as data. `localllm.quant.rounding` searches for the best codes, and
rounds values if no search is requested.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

import numpy as np
import numpy.typing as npt

from localllm.errors import ModelError
from localllm.parallel import in_order
from localllm.quant.bits import Bytes, Floats, Ints, codes_of
from localllm.quant.block_format import PackableFormat, Parts
from localllm.quant.floats import bfloat16
from localllm.quant.formats import FORMATS
from localllm.quant.fp4 import E2M1_DOUBLED, HALF_E8M0, HALF_UE4M3, MXFP4, NVFP4, ue4m3
from localllm.quant.iq_grids import grid
from localllm.quant.iquants import IQ4_VALUES, GridFormat
from localllm.quant.ternary import Q1_0
from localllm.quant.types import BLOCK_SIZES, GGMLType

# Values that a thread encodes at a time. The intermediate arrays then fit into a core's second-level cache.
_CHUNK = 1 << 17
# Largest value accepted by each type. Float types: the largest value that is not rounded to infinity. Other types:
# more than blocks with float16 scales can represent, but small enough for sums of squares.
_MOST = {GGMLType.F32: 3.4028235e38, GGMLType.F16: 65519.99, GGMLType.BF16: 3.3961774e38, GGMLType.NVFP4: 6 * 448.0}
_MOST_OF_BLOCKS = 1e15
# Types that can give large values more weight, see `_favouring_large`.
_COARSE, _WITH_WEIGHTS = (GGMLType.Q2_K, GGMLType.Q3_K), (GGMLType.Q4_K, GGMLType.IQ4_XS)
# Candidate scales for NVFP4, as steps from the scale that maps the largest value to 6. Step 5 maps it to about 4.
_NVFP4_STEPS = range(-3, 7)
# Added to the diagonal of XᵀX, relative to its mean.
_DAMPING = 0.01


def quantize(
    values: npt.NDArray[np.floating],
    type: GGMLType,
    weights: npt.NDArray[np.floating] | None = None,
    threads: int | None = None,
    feedback: Feedback | None = None,
    *,
    favours_large: bool = False,
    search: bool = False,
) -> Bytes:
    """Encode rows of values.

    Types in `ROUNDED` are encoded to the same bytes as by llama.cpp, unless ``weights`` or ``search`` are set. All
    other encodings minimise the weighted squared error by a search.

    Args:
        values: floating point [..., n], rounded to float32 first; ``n`` must be a multiple of the block length.
        type: one of `ENCODABLE`.
        weights: importance of each column, [n] (a row of an importance matrix). Defaults to equal weights.
        threads: defaults to the number of processors.
        feedback: replaces ``weights`` for the formats in `FEEDBACK`. The encoder then minimises the error of the
            products with the inputs that the factors were computed from.
        favours_large: give large values more weight, in the types for which this improves models.
        search: search for better scales also in the types in `ROUNDED`.

    Returns:
        uint8 [..., row_bytes].

    Raises:
        ModelError: the type has no encoder, ``n`` is not a multiple of its block length, a value is NaN, infinite or
            too large for the format, or the weights are not ``n`` finite numbers of at least 0.
    """
    _check(values, type)
    n, size = values.shape[-1], BLOCK_SIZES[type]
    out = np.empty((*values.shape[:-1], size.row_bytes(n)), np.uint8)
    if not out.size:
        return out
    if feedback is not None and type in FEEDBACK:
        weights = feedback.weights
    rows = np.ascontiguousarray(values).reshape(-1, n)
    blocks = out.reshape(len(rows), -1, size.n_bytes)
    rounds = type in ROUNDED and weights is None and not search
    importance = _importance(weights, n).reshape(-1, size.length)
    favours_large = favours_large and (type in _COARSE or (weights is not None and type in _WITH_WEIGHTS))

    def encode(first: int) -> None:
        with np.errstate(all="ignore"):  # `_finite_half` detects overflow
            chunk = rows[first : first + step].astype(np.float32, copy=False)
            if not -most <= chunk.min() <= chunk.max() <= most:  # also true for NaN
                raise _unfit(type)
            x = chunk.reshape(-1, size.length)
            if rounds:
                encoded = _rounded(x, type)
            elif feedback is None or type not in FEEDBACK:
                encoded = _encode(x, type, _favouring_large(x, importance) if favours_large else importance)
            else:
                encoded = _encode_with_feedback(chunk.copy(), type, importance, feedback.factor, favours_large)
        blocks[first : first + step] = encoded.reshape(len(chunk), -1, size.n_bytes)

    most = _MOST.get(type, _MOST_OF_BLOCKS)
    step = max(_CHUNK // n, 1)
    starts = range(0, len(rows), step)
    for _ in map(encode, starts) if len(starts) < 2 else in_order(encode, starts, threads or os.cpu_count() or 1):
        pass
    return out


def _check(values: npt.NDArray[np.floating], type: GGMLType) -> None:
    """Raise ModelError if the type has no encoder, or the rows are not whole blocks."""
    if type not in ENCODABLE:
        supported = ", ".join(supported_type.name for supported_type in ENCODABLE)
        raise ModelError(f"cannot encode tensors as {type.name}; choose one of {supported}")
    length = BLOCK_SIZES[type].length
    if values.ndim == 0 or values.shape[-1] % length:
        raise ModelError(
            f"rows encoded as {type.name} must have a multiple of {length} values; the shape is {list(values.shape)}"
        )


@dataclass(frozen=True, eq=False)
class Feedback:
    """Factors that carry the error of each column of a matrix over to later columns.

    For inputs X [T, n] and the error E of a row, the error of the row's products is E XᵀX Eᵀ. It is smallest if each
    error is compensated in the following columns, with the factor U of the inverse of XᵀX = (UᵀU)⁻¹.

    Source: Frantar et al., GPTQ (arXiv:2210.17323).
    """

    factor: Floats  # U, float32 [n, n], upper triangular

    @classmethod
    def of(cls, hessian: npt.NDArray[np.floating]) -> Feedback:
        """Compute the factor of XᵀX [n, n]. Raises ModelError if it is not finite and positive semi-definite."""
        damped = hessian.astype(np.float64)
        mean = float(damped.diagonal().mean())
        if not np.isfinite(damped).all() or mean < 0:
            raise ModelError("the products of a matrix's inputs are not finite numbers: collect them again")
        # Columns that were never used, or always together, must not make the matrix singular.
        damped[np.diag_indices_from(damped)] += _DAMPING * (mean or 1.0)
        try:
            return cls(np.linalg.cholesky(np.linalg.inv(damped)).T.astype(np.float32))
        except np.linalg.LinAlgError:
            raise ModelError("products of a matrix's inputs are not positive definite: collect them again") from None

    @property
    def weights(self) -> Floats:
        """Cost of the error that remains in each column after compensation, float32 [n]."""
        return self.factor.diagonal() ** -2


def _unfit(type: GGMLType) -> ModelError:
    return ModelError(f"cannot encode as {type.name}: a value is NaN, infinite or too large for the format")


def _importance(weights: npt.NDArray[np.floating] | None, n: int) -> Floats:
    """Return weights with a mean of 1 and a minimum of 1e-5: unused columns may matter for other texts."""
    if weights is None:
        return np.ones(n, np.float32)
    if weights.shape != (n,) or not np.isfinite(weights).all() or (weights < 0).any():
        raise ModelError(f"importance weights of rows of {n} values must be {n} finite numbers of at least 0")
    mean = weights.mean(dtype=np.float64).astype(weights.dtype) if n else 0.0
    if mean == 0:  # possible for weights near the smallest number of their type
        return np.ones(n, np.float32)
    importance: Floats = np.maximum(weights / mean, 1e-5).astype(np.float32)
    return importance


def _encode(x: Floats, type: GGMLType, weights: Floats) -> Bytes:
    """Encode blocks, float32 [n_blocks, length]. ``weights`` [k, length] are the weights of a row's k blocks."""
    match type:
        case GGMLType.F32:
            return x.astype("<f4").view(np.uint8)
        case GGMLType.F16:
            return x.astype("<f2").view(np.uint8)
        case GGMLType.BF16:
            return bfloat16(x).view(np.uint8)
        case GGMLType.MXFP4:
            return _encode_mxfp4(x, weights)
        case GGMLType.NVFP4:
            return _encode_nvfp4(x, weights)
        case GGMLType.Q1_0:
            return _encode_signs(x, weights)
        case _ if type in _ROWS:
            return _encode_rows(x, type, weights)
        case _:
            return _packed(type, *_codes(x, type, weights))


def _favouring_large(x: Floats, weights: Floats) -> Floats:
    """Return weights [n_blocks, length] per value: column weights times √(σ² + x²), similar to llama.cpp.

    They increase the squared error weighted by columns slightly, but decrease the divergence from the original model.
    Measured on copies of the demo model that compute the same values and round differently: Q2_K loses about 25 %
    less, with an importance matrix 12 %, with Hessians 20 %. Q3_K_M loses about 8 % less, and Q4_K_M with either
    matrix 2 to 4 %.
    """
    squares = x * x
    large = np.sqrt(squares + squares.mean(axis=1, keepdims=True))
    adapted: Floats = (large.reshape(-1, *weights.shape) * weights).reshape(x.shape)
    adapted /= np.maximum(adapted.mean(axis=1, keepdims=True), np.float32(1e-30))
    return adapted


def _finite_half(values: Floats, type: GGMLType) -> npt.NDArray[np.float16]:
    halves = values.astype("<f2")
    if not np.isfinite(halves).all():
        raise _unfit(type)
    return halves


# -- Formats of codes ----------------------------------------------------------------------------------------------

_LANES = 32  # `rounding.LANES`. Importing that module loads numba, which takes most of a second.
_NONE = np.zeros(0, np.float32)


def _halves_table(values: Sequence[float] | Ints) -> Floats:
    """Return the table for `rounding.scan`: the nearest element of ``values`` to -128, -127.5, … 127.5."""
    levels = np.unique(np.asarray(values, np.float32))
    return levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, np.arange(-256, 256) / 2, side="right")]


def _tries(top: float, least: float, most: float, low: float = 0.0) -> Floats:
    """Return candidates for `rounding.fit`: ``top`` times ``least`` … ``most``; half use ``low`` instead if not 0."""
    n = _LANES // 2 if low else _LANES
    levels = np.linspace(least, most, n) * top
    if low:
        levels = np.concatenate([np.linspace(least, most, n) * low, levels])
    return np.stack([np.zeros(_LANES), levels]).astype(np.float32)


def _tries_with_min(top: float, least: float, most: float) -> Floats:
    """Return candidates with a minimum.

    The smallest value is mapped up to ``most`` levels below the lowest, the largest up to ``most`` above ``top``.
    """
    beyond = np.linspace(least, most, 8)
    return np.array([(-u, top + v) for u in np.linspace(least, most, 4) for v in beyond], np.float32).T.copy()


def _few(top: float, least: float, most: float) -> Floats:
    """Return candidates for `rounding.encode_alike`: ``top`` times ``least`` … ``most``."""
    return (np.geomspace(least, most, _LANES // 2) * top).astype(np.float32)


@dataclass(frozen=True, eq=False)
class _Codes:
    """Values that a format can represent, as arguments of `rounding.encode`."""

    # lo, hi: range of the codes, or of the table's values
    lo: int
    hi: int
    tries: Floats  # candidate scales
    has_min: bool = False  # the format stores a minimum, at most 0 in formats with ``m_hi``
    # s_lo, s_hi, m_hi: ranges of the sub-blocks' integer scales and minima; 0 without sub-blocks
    s_lo: int = 0
    s_hi: int = 0
    m_hi: int = 0
    s_tries: Floats | None = None  # candidate scales (and minima) of the block
    table: Floats | None = None  # values of the codes; None if the codes are consecutive integers
    few: Floats | None = None  # candidates for equal weights, in formats with one symmetric scale


_IQ4 = _halves_table(IQ4_VALUES)

_CODES: dict[GGMLType, _Codes] = {
    GGMLType.Q4_0: _Codes(-8, 7, _tries(7, 0.8, 1.8, low=-8), few=_few(-8, 0.9, 1.4)),
    GGMLType.Q4_1: _Codes(0, 15, _tries_with_min(15, -0.5, 1.3), has_min=True),
    GGMLType.Q5_0: _Codes(-16, 15, _tries(15, 0.85, 1.3, low=-16), few=_few(-16, 0.93, 1.22)),
    GGMLType.Q5_1: _Codes(0, 31, _tries_with_min(31, -0.5, 1.3), has_min=True),
    GGMLType.Q8_0: _Codes(-127, 127, _tries(127, 0.96, 1.05), few=_few(127, 0.96, 1)),
    GGMLType.Q2_K: _Codes(
        0, 3, _tries_with_min(3, -0.4, 1), True, s_hi=15, m_hi=15, s_tries=_tries(15, 0.75, 1.25)
    ),
    GGMLType.Q3_K: _Codes(
        -4, 3, _tries(3, 0.7, 2.2, low=-4), s_lo=-32, s_hi=31, s_tries=_tries(31, 0.85, 1.05, low=-32)
    ),
    GGMLType.Q4_K: _Codes(
        0, 15, _tries_with_min(15, -0.5, 1.3), True, s_hi=63, m_hi=63, s_tries=_tries(63, 0.9, 1.05)
    ),
    GGMLType.Q5_K: _Codes(
        0, 31, _tries_with_min(31, -0.5, 1.3), True, s_hi=63, m_hi=63, s_tries=_tries(63, 0.9, 1.05)
    ),
    GGMLType.Q6_K: _Codes(
        -32, 31, _tries(31, 0.92, 1.2, low=-32), s_lo=-128, s_hi=127, s_tries=_tries(127, 0.9, 1.02, low=-128)
    ),
    GGMLType.IQ4_NL: _Codes(-127, 113, _tries(113, 0.75, 1.5, low=-127), table=_IQ4),
    GGMLType.IQ4_XS: _Codes(
        -127, 113, _tries(113, 0.75, 1.5, low=-127),
        s_lo=-32, s_hi=31, s_tries=_tries(31, 0.85, 1.05, low=-32), table=_IQ4,
    ),
    GGMLType.Q2_0: _Codes(-1, 2, _tries(2, 0.45, 8, low=-1)),
    GGMLType.TQ1_0: _Codes(-1, 1, _tries(1, 0.5, 7), few=_few(1, 0.5, 7)),
    GGMLType.TQ2_0: _Codes(-1, 1, _tries(1, 0.5, 7), few=_few(1, 0.5, 7)),
}  # fmt: skip


def _codes(x: Floats, type: GGMLType, weights: Floats) -> tuple[npt.NDArray[np.int8], Floats, npt.NDArray[np.int16]]:
    """Return codes [n_blocks, length], scales and minima [n_blocks, 2], sub-blocks' integers [2, n_blocks, n_sub]."""
    from localllm.quant import rounding

    codes, form = _CODES[type], cast(PackableFormat, FORMATS[type])
    out = np.empty(x.shape, np.int8)
    scales = np.empty((len(x), 2), np.float32)
    integers = np.empty((2, len(x), form.block_length // form.sub_length), np.int16)
    single = np.float32
    t = np.empty(rounding.TABLE, single)
    if codes.few is not None and weights.min() == weights.max():
        rounding.encode_alike(x, single(codes.lo), single(codes.hi), codes.few, out, scales, t)
        return out, scales, integers
    table = _NONE if codes.table is None else codes.table
    s_tries = codes.tries if codes.s_tries is None else codes.s_tries
    rounding.encode(
        x, weights, form.sub_length, single(codes.lo), single(codes.hi), table, codes.has_min,
        single(0 if codes.m_hi else np.inf), single(codes.s_lo), single(codes.s_hi), single(codes.m_hi),
        codes.tries, s_tries, out, scales, integers,
        t, np.empty((6, integers.shape[2]), single),
    )  # fmt: skip
    return out, scales, integers


def _rounded(x: Floats, type: GGMLType) -> Bytes:
    """Round blocks [n_blocks, length] with scales from their largest and smallest values, as llama.cpp does."""
    from localllm.quant import rounding

    if type is GGMLType.Q1_0:
        return _encode_signs(x, np.ones((1, x.shape[1]), np.float32))
    if type is GGMLType.NVFP4:
        return _encode_nvfp4(x, None)
    n, single = len(x), np.float32
    low, high = np.empty((2, n), single)
    rounding.extremes(x, low, high)
    largest = np.maximum(np.abs(high), np.abs(low))
    codes = np.empty(x.shape, np.int8)
    if type is GGMLType.MXFP4:
        # 4 times the scale is the largest power of two up to the largest value, as computed with a float32 logarithm.
        exponents = np.maximum(np.floor(np.log2(largest.astype(np.float64)).astype(single)) + 125, 0).astype(np.uint8)
        rounding.to_powers(x, HALF_E8M0[exponents], codes)
        return MXFP4().pack(codes, exponents)
    code_range = _CODES[type]
    lo, hi = single(code_range.lo), single(code_range.hi if type is not GGMLType.Q2_0 else 1)  # 2 is left to a search
    if lo == -hi:
        scale: Floats = np.divide(largest, hi)
        rounding.to_nearest(x, _inverse(scale), codes)
        return _packed(type, codes, np.stack([scale, scale], axis=1), np.empty((2, 0), np.int16))
    form = FORMATS[type]
    blocks = np.empty((n, form.block_bytes), np.uint8)
    block = form.fields(blocks)
    if code_range.has_min:
        scale, base = np.divide(high - low, hi), low
        block["m"] = _finite_half(low, type)
    else:
        # The value of largest magnitude gets the lowest code; the first one counts if two are equal.
        peak, base = np.where(high > -low, high, low), np.zeros(n, single)
        (both,) = np.nonzero(high == -low)
        peak[both] = x[both, np.abs(x[both]).argmax(axis=1)]
        scale = np.divide(peak, lo)
    block["d"] = _finite_half(scale, type)
    assert form.layout.fields is not None
    rounding.to_planes(x, base, _inverse(scale), -lo, hi - lo, form.layout.fields["qs"][1], blocks)
    return blocks


def _inverse(scale: Floats) -> Floats:
    """Return 1 / scale, or 0 if the result overflows float32."""
    inverse: Floats = np.divide(np.float32(1), scale)
    inverse[np.isinf(inverse)] = 0
    return inverse


def _packed(type: GGMLType, out: npt.NDArray[np.int8], scales: Floats, integers: npt.NDArray[np.int16]) -> Bytes:
    codes, form = _CODES[type], cast(PackableFormat, FORMATS[type])
    scale, minimum = _finite_half(scales, type).T
    if type in (GGMLType.Q4_1, GGMLType.Q5_1):
        minimum = -minimum  # these two formats add the minimum
    stored = out.view(np.uint8) + np.uint8(form.offset) if codes.lo > -127 else out
    sub_scales = integers[0].astype(np.uint8 if codes.has_min else np.int8) if codes.s_hi else None
    sub_mins = integers[1].astype(np.uint8) if codes.m_hi else None
    return form.pack(Parts(stored, scale, minimum if codes.has_min else None, sub_scales, sub_mins))


def _encode_with_feedback(
    rows: Floats, type: GGMLType, weights: Floats, factor: Floats, favours_large: bool
) -> Bytes:
    """Encode rows [n_rows, n] block by block. ``rows`` is overwritten with the compensated values."""
    from localllm.quant import rounding

    codes, form = _CODES[type], cast(PackableFormat, FORMATS[type])
    length, single = form.block_length, np.float32
    table = _NONE if codes.table is None else codes.table
    blocks = []
    for i, importance in enumerate(weights):
        here = slice(i * length, (i + 1) * length)
        x = np.ascontiguousarray(rows[:, here])
        w = importance[None]
        out, scales, integers = _codes(x, type, _favouring_large(x, w) if favours_large else w)
        errors = np.empty(x.shape, np.float32)
        rounding.feed_back(
            x, form.sub_length, single(codes.lo), single(codes.hi), table, np.ascontiguousarray(factor[here, here]),
            out, scales, integers if codes.s_hi else integers[:0], errors, np.empty(length, single),
        )  # fmt: skip
        rows[:, here.stop :] -= errors @ factor[here, here.stop :]
        blocks.append(_packed(type, out, scales, integers))
    return np.stack(blocks, axis=1)


def _encode_mxfp4(x: Floats, weights: Floats) -> Bytes:
    from localllm.quant import rounding

    levels, exponents = np.empty(x.shape, np.int8), np.empty(len(x), np.uint8)
    rounding.encode_powers(x, weights, levels, exponents, np.empty(rounding.TABLE, np.float32))
    return MXFP4().pack(codes_of(E2M1_DOUBLED)[levels.view(np.uint8)], exponents)


def _encode_nvfp4(x: Floats, weights: Floats | None) -> Bytes:
    """Encode with scales that map the largest values to 6 or, with ``weights``, the best scales near these."""
    from localllm.quant import rounding

    runs = np.ascontiguousarray(x.reshape(-1, 16))
    largest = ue4m3(np.abs(runs).max(axis=1) / np.float32(6)).astype(np.int64)
    least = np.full(len(runs), np.inf, np.float32)
    scales, best = np.zeros(len(runs), np.uint8), np.zeros(runs.shape, np.int8)
    for step in (0,) if weights is None else _NVFP4_STEPS:
        scale = np.clip(largest + step, 0, 0x7E).astype(np.uint8)
        half, codes = HALF_UE4M3[scale], np.empty(runs.shape, np.int8)
        rounding.to_powers(runs, half, codes)
        codes[half == 0] = 0
        squares = np.square(E2M1_DOUBLED[codes] * half[:, None] - runs)
        if weights is not None:
            squares = (squares.reshape(-1, *weights.shape) * weights).reshape(runs.shape)
        errors = squares.sum(axis=1)
        better = errors < least
        least[better], scales[better], best[better] = errors[better], scale[better], codes[better]
    return NVFP4().pack(best.reshape(x.shape), scales.reshape(len(x), -1))


def _encode_signs(x: Floats, weights: Floats) -> Bytes:
    """Encode signs times the mean magnitude of the values, which is the scale with the least squared error."""
    total = (np.abs(x).reshape(-1, *weights.shape) * weights).reshape(x.shape)
    # Sums in the order of llama.cpp, which gives the same bytes.
    scale = total.cumsum(axis=1, dtype=np.float32)[:, -1].reshape(-1, len(weights))
    scale /= weights.cumsum(axis=1, dtype=np.float32)[:, -1]
    codes = np.where(x >= 0, np.uint8(2), np.uint8(0))
    return Q1_0().pack(Parts(codes, _finite_half(scale.reshape(-1), GGMLType.Q1_0)))


# -- Formats with a codebook ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rows:
    """Values that a format with a codebook can represent, as arguments of `rounding.encode_rows`."""

    sub: int  # values per integer scale
    # range of the level that the largest value of a sub-block is mapped to, relative to the codebook's largest value
    tries: tuple[float, float]
    unit: float = 1  # scale of a sub-block: unit times (2 S + 1) times the block's scale
    # signed: values have signs; even: an even number of each 8 values is negative
    signed: bool = True
    even: bool = False
    s_hi: int = 15  # largest S
    n_tries: int = 6  # scales for which candidate rows are searched


_ROWS: dict[GGMLType, _Rows] = {
    GGMLType.IQ2_XXS: _Rows(32, (0.8, 2), 1 / 8, even=True),
    GGMLType.IQ2_XS: _Rows(16, (0.8, 2), 1 / 8, even=True),
    GGMLType.IQ2_S: _Rows(16, (0.8, 2), 1 / 8),
    GGMLType.IQ3_XXS: _Rows(32, (0.8, 1.7), 1 / 4, even=True),
    GGMLType.IQ3_S: _Rows(32, (0.8, 1.7)),
    GGMLType.IQ1_S: _Rows(32, (1.1, 2.8), signed=False, s_hi=7, n_tries=3),
    GGMLType.IQ1_M: _Rows(16, (0.8, 4), signed=False, s_hi=7, n_tries=4),
}


@dataclass(frozen=True, eq=False)
class _Codebooks:
    """A format's codebooks, in integers."""

    unit: float  # value of one integer step
    # lowest, step, top: approximate values in rows are lowest (one per book), lowest + step, … lowest + top * step
    lowest: Floats
    step: np.float32
    top: int
    # int8 [books, points, row length, lanes], rows nearest to each combination of these values
    near: npt.NDArray[np.int8]
    index: npt.NDArray[np.uint16]  # uint16 [points, lanes], numbers of these rows


@cache
def _books(type: GGMLType) -> _Codebooks:
    """Return the codebooks of a format.

    IQ1 shifts all values by 1/8 up or down. In IQ1_S a whole sub-block is shifted in the same direction, which is
    represented by two books. In IQ1_M each row has a direction, which is represented by one book with twice the rows.
    """
    rows = grid(type)
    unit, books = 1.0, [rows]
    if type in (GGMLType.IQ1_S, GGMLType.IQ1_M):
        unit, books = 1 / 8, [8 * rows + 1, 8 * rows - 1]
    values = np.unique(rows) / unit
    points = np.stack(np.meshgrid(*[values] * rows.shape[1], indexing="ij"), axis=-1).reshape(-1, rows.shape[1])
    if type is GGMLType.IQ1_M:
        books = [np.concatenate(books)]
    # Squared distances without the term that is equal for all rows. The shift moves points and rows equally. All
    # terms are integers. Adding the row number makes keys unique, so that results do not depend on the processor.
    plain = books[0] if len(books) == 1 else rows / unit
    distances = (plain**2).sum(axis=1) - 2 * points.astype(np.float32) @ plain.T
    keys = distances.astype(np.int64) * len(plain) + np.arange(len(plain))
    nearest = np.sort(np.partition(keys, _LANES, axis=1)[:, :_LANES], axis=1)
    index = (nearest % len(plain)).astype(np.uint16)
    near = np.ascontiguousarray(np.stack([book[index].transpose(0, 2, 1) for book in books]), np.int8)
    top = len(values) - 1
    step = np.float32((values[-1] - values[0]) / top)
    lowest = values[0] + np.array([0] if len(books) == 1 else [1, -1], np.float32)
    return _Codebooks(unit, lowest.astype(np.float32), step, top, near, index)


def _encode_rows(x: Floats, type: GGMLType, weights: Floats) -> Bytes:
    from localllm.quant import rounding

    rows, books = _ROWS[type], _books(type)
    n = len(x)
    points = np.empty((n, 256 // books.near.shape[2]), np.int32)
    masks = np.empty((n, 32), np.uint8)
    scales = np.empty(n, np.float32)
    integers = np.empty((n, 256 // rows.sub), np.uint8)
    top = 2 * rows.s_hi + 1
    tries = np.geomspace(*rows.tries, rows.n_tries).astype(np.float32) * books.near.max()
    n_books, _, length, _ = books.near.shape
    sums = np.empty((2, 256 // rows.sub, n_books, rows.sub // length, rows.n_tries), np.float32)
    space = (
        *sums, np.empty(sums.shape[1:], np.int32), np.empty(sums.shape[3], np.int64),
        np.empty(rounding.TABLE, np.float32), np.empty((2, len(sums[0])), np.float32), np.empty(256, np.float32),
    )  # fmt: skip
    rounding.encode_rows(
        x, weights, rows.sub, books.lowest, books.step, books.top, books.near, rows.signed, rows.even, rows.s_hi,
        _halves_table(range(1, top + 1, 2)), tries, _tries(top, 0.6, 1.15), points, masks, scales, integers,
        space,
    )  # fmt: skip
    index = books.index.ravel()[points]
    if type is GGMLType.IQ1_M:
        masks = np.where(index >> 11, np.uint8(255), np.uint8(0))
        index &= 2047
    d = _finite_half(scales / np.float32(rows.unit * books.unit), type)
    return cast(GridFormat, FORMATS[type]).pack(index, masks, d, integers)


ENCODABLE: tuple[GGMLType, ...] = (
    GGMLType.F32, GGMLType.F16, GGMLType.BF16, *_CODES, GGMLType.MXFP4, GGMLType.NVFP4, GGMLType.Q1_0, *_ROWS
)  # fmt: skip
"""Types that `quantize` writes."""

FEEDBACK: tuple[GGMLType, ...] = tuple(_CODES)
"""Types in `ENCODABLE` whose errors can be compensated in later columns."""

ROUNDED: tuple[GGMLType, ...] = (
    GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.Q8_0, GGMLType.MXFP4, GGMLType.NVFP4,
    GGMLType.Q1_0, GGMLType.Q2_0, GGMLType.TQ1_0, GGMLType.TQ2_0,
)  # fmt: skip
"""Types that `quantize` only rounds, unless importance weights or a search are requested."""
