"""Quantisers: the gguf package decodes their output to nearly the original values."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import gguf
import gguf.quants
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from localllm.errors import ModelError
from localllm.quant.encode import ENCODABLE, FEEDBACK, ROUNDED, Feedback, quantize
from localllm.quant.formats import dequantize
from localllm.quant.iquants import IQ4_VALUES
from localllm.quant.types import BLOCK_SIZES, GGMLType
from tests.helpers.blocks import gguf_values

T = GGMLType
Floats = npt.NDArray[np.float32]

# RMS error relative to the RMS of normally distributed values, without and with importance.  The bounds are one or
# two percent above the measured errors, which are the same on every processor
# (`test_another_processor_writes_the_same_bytes`).
RELATIVE_RMS = {
    T.F32: (0.0, 0.0),
    T.F16: (0.00022, 0.00022),
    T.BF16: (0.0018, 0.0018),
    T.Q8_0: (0.0050, 0.0042),
    T.Q6_K: (0.0168, 0.0140),
    T.Q5_K: (0.0347, 0.0290),
    T.Q5_1: (0.0338, 0.0275),
    T.Q5_0: (0.0412, 0.0350),
    T.Q4_K: (0.0710, 0.0580),
    T.IQ4_XS: (0.0755, 0.0630),
    T.IQ4_NL: (0.0750, 0.0620),
    T.Q4_1: (0.0703, 0.0570),
    T.Q4_0: (0.0826, 0.0720),
    T.MXFP4: (0.1160, 0.1130),
    T.IQ3_S: (0.1340, 0.0960),
    T.Q3_K: (0.1465, 0.1230),
    T.IQ3_XXS: (0.1820, 0.1250),
    T.IQ2_S: (0.2450, 0.1900),
    T.Q2_K: (0.2660, 0.1980),
    T.IQ2_XS: (0.2920, 0.2050),
    T.IQ2_XXS: (0.3360, 0.2350),
    T.IQ1_M: (0.4220, 0.3250),
    T.NVFP4: (0.0820, 0.0630),
    T.Q1_0: (0.6050, 0.5800),
    T.Q2_0: (0.3600, 0.2960),
    T.TQ1_0: (0.4450, 0.4400),
    T.TQ2_0: (0.4450, 0.4400),
    T.IQ1_S: (0.4550, 0.3700),
}

FLOATS = [T.F32, T.F16, T.BF16]
BLOCKS = [type for type in ENCODABLE if type not in FLOATS]
# Types whose scales are float16, which limits their values.
HALF_SCALES = [type for type in BLOCKS if type not in (T.MXFP4, T.NVFP4)]


def of_types(*types: GGMLType) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("type", types, ids=lambda type: type.name)


def decoded(values: Floats, type: GGMLType, weights: Floats | None = None) -> Floats:
    """Encode with the search, and decode with the gguf package."""
    blocks = quantize(values, type, weights, search=True)
    back: Floats = gguf_values(blocks, type).astype(np.float32)
    return back.reshape(values.shape)


def relative_rms(values: Floats, back: Floats, weights: Floats | None = None) -> float:
    w = 1 if weights is None else weights
    return float(np.sqrt((w * (values - back) ** 2).sum() / (w * values**2).sum()))


def normal(rows: int, columns: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def importance(columns: int, seed: int = 1) -> Floats:
    return np.exp(1.5 * np.random.default_rng(seed).standard_normal(columns)).astype(np.float32)


@pytest.mark.parametrize("type", RELATIVE_RMS, ids=lambda type: type.name)
def test_errors_stay_within_their_bounds(type: GGMLType) -> None:
    values, weights = normal(24, 1024), importance(1024)
    plain, weighted = RELATIVE_RMS[type]
    assert relative_rms(values, decoded(values, type)) <= plain
    assert relative_rms(values, decoded(values, type, weights), weights) <= weighted


def test_every_type_has_its_bound() -> None:
    assert set(RELATIVE_RMS) == set(ENCODABLE)


@of_types(*BLOCKS)
def test_importance_moves_the_error_to_unimportant_columns(type: GGMLType) -> None:
    values, weights = normal(16, 512, 2), importance(512)
    without, with_it = decoded(values, type), decoded(values, type, weights)
    assert relative_rms(values, with_it, weights) < relative_rms(values, without, weights)
    assert relative_rms(values, without) < relative_rms(values, with_it)


@of_types(*BLOCKS)
def test_importance_counts_in_proportion_only(type: GGMLType) -> None:
    values, weights = normal(2, 512, 3), importance(512)
    np.testing.assert_array_equal(quantize(values, type, weights), quantize(values, type, 1024 * weights))
    same = np.full(512, 7, np.float32)
    np.testing.assert_array_equal(quantize(values, type, same), quantize(values, type, search=True))
    np.testing.assert_array_equal(quantize(values, type, 0 * same), quantize(values, type, same))


def test_large_values_can_have_more_weight() -> None:
    values, weights = normal(24, 1024), importance(1024)
    lost = []
    for favours_large in (False, True):
        back = dequantize(quantize(values, T.Q2_K, weights, favours_large=favours_large), T.Q2_K)
        lost.append([relative_rms(values, back, w) for w in (weights, weights * values**2)])
    (least, of_large), (more, least_of_large) = lost
    assert least < more < 1.04 * least
    assert least_of_large < of_large


@of_types(*BLOCKS)
def test_doubled_values_decode_doubled(type: GGMLType) -> None:
    """Each step scales with the values, within the range of float16."""
    values = normal(3, 512, 4)
    np.testing.assert_array_equal(decoded(4 * values, type), 4 * decoded(values, type))


@of_types(*BLOCKS)
@pytest.mark.parametrize("case", ["zeros", "positive", "negative", "one value", "a spike", "constant"])
def test_lopsided_blocks(type: GGMLType, case: str) -> None:
    values = np.random.default_rng(4).uniform(0.5, 1.0, (4, 256)).astype(np.float32)
    match case:
        case "zeros":
            values[:] = 0
        case "negative":
            values *= -1
        case "one value":
            values[:, 1:] = 0
        case "a spike":
            values[:, 40] = 100
        case "constant":
            values[:] = -0.75
    back = decoded(values, type)
    if case == "zeros":
        np.testing.assert_array_equal(back, 0)
    else:
        # IQ formats have no 0, and share signs between values; the errors must only be limited.
        loose = 0.95 if case in ("one value", "a spike") else 0.45
        if type is T.Q1_0:
            loose = 1
        assert relative_rms(values, back) <= (loose if type.name.startswith(("IQ", "TQ", "Q1")) else 0.35)


@of_types(*BLOCKS)
def test_rows_threads_and_shapes_change_nothing(type: GGMLType) -> None:
    values = normal(300, 512, 5).reshape(3, 100, 512)  # several pieces of work
    weights = importance(512)
    whole = quantize(values, type, weights, threads=3)
    assert whole.shape == (3, 100, BLOCK_SIZES[type].row_bytes(512))
    np.testing.assert_array_equal(whole[1, 50:], quantize(values[1, 50:], type, weights, threads=1))


def digests() -> dict[str, str]:
    """Return digests of the bytes of each type, without and with importance."""
    values, weights = normal(16, 1024, 7), importance(1024)
    found = {}
    for type in BLOCKS:
        blocks = [
            quantize(values, type),
            quantize(values, type, search=True),
            quantize(values, type, weights, favours_large=True),
        ]
        found[type.name] = hashlib.sha256(np.stack(blocks).tobytes()).hexdigest()
    return found


@pytest.mark.ci  # compiles all encoders again
def test_another_processor_writes_the_same_bytes() -> None:
    """Compiled for the common instructions of the family, and with NumPy's code for them."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    used = [name for name in __cpu_dispatch__ if __cpu_features__[name]]
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NPY_DISABLE_CPU_FEATURES": " ".join(used)}
    code = f"from {__name__} import digests; print(digests())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | plain, capture_output=True, text=True, check=True
    )
    assert eval(done.stdout) == digests()


ROUNDING_CASES = {
    "normal": normal(64, 1024, 8),
    # peaks of both signs, and values halfway between codes
    "coarse": np.round(4 * normal(64, 1024, 9)) / 4,
    "heavy tails": np.random.default_rng(10).standard_t(2, (64, 1024)).astype(np.float32),
    "next to powers of two": np.nextafter(np.exp2(np.round(3 * normal(64, 1024, 11))), np.float32(0)),
    "small": normal(64, 1024, 12) * np.float32(1e-30),
    "one sign": -np.abs(normal(64, 1024, 13)),
    "zeros": np.zeros((1, 1024), np.float32),
}


def rounded(values: Floats, type: GGMLType) -> npt.NDArray[np.uint8]:
    """Round without a search: by the gguf package, or by the rules in ggml-quants.c if it has no encoder."""
    rows = len(values)
    if type is T.Q1_0:
        blocks = values.reshape(-1, 128)
        total = np.zeros(len(blocks), np.float32)
        for column in np.abs(blocks).T:
            total += column
        scales, qs = total / np.float32(128), np.packbits(blocks >= 0, axis=1, bitorder="little")
    elif type is T.Q2_0:
        blocks = values.reshape(-1, 64)
        scales = np.abs(blocks).max(axis=1)
        with np.errstate(all="ignore"):
            x = blocks * np.where(scales > 0, np.float32(1) / scales, np.float32(0))[:, None]
        nearest = np.trunc(x + np.copysign(np.float32(0.5), x))  # ties round away from 0
        codes = (nearest + 1).clip(0, 3).astype(np.uint8).reshape(len(blocks), 16, 4)
        qs = (codes << np.array([0, 2, 4, 6], np.uint8)).sum(axis=2, dtype=np.uint8)
    elif type is T.NVFP4:
        runs = values.reshape(-1, 16)
        limit = np.abs(runs).max(axis=1) / np.float32(6)
        known = gguf.quants.NVFP4
        d = known.fp32_to_ue4m3(limit)
        off = np.abs(np.array(known.kvalues, np.float32) * known.ue4m3_to_fp32(d)[:, None, None] - runs[..., None])
        codes = off.astype(np.float32).argmin(axis=2).astype(np.uint8)  # the first of two codes at the same distance
        qs = (codes[:, :8] | codes[:, 8:] << 4).reshape(-1, 32)
        return np.concatenate([d.reshape(-1, 4), qs], axis=1).reshape(rows, -1)
    else:
        known_type = gguf.GGMLQuantizationType(type)
        return np.asarray(gguf.quants.quantize(values, known_type))
    halves = scales.astype("<f2")[:, None].view(np.uint8)
    return np.concatenate([halves, qs], axis=1).reshape(rows, -1)


@of_types(*ROUNDED)
@pytest.mark.parametrize("case", ROUNDING_CASES)
def test_plain_rounding_writes_the_bytes_of_llama_cpp(type: GGMLType, case: str) -> None:
    values = ROUNDING_CASES[case]
    if type is T.NVFP4:
        values = values.clip(-2600, 2600)
    np.testing.assert_array_equal(quantize(values, type, threads=2), rounded(values, type))


@of_types(*(type for type in ROUNDED if type is not T.Q1_0))  # Q1_0 has a single best scale
def test_the_search_is_better_than_plain_rounding(type: GGMLType) -> None:
    values = normal(24, 1024)
    plain = relative_rms(values, dequantize(quantize(values, type), type))
    least = 0.45 if type is T.Q2_0 else 0.5  # plain rounding uses three of the four codes
    assert least * plain < relative_rms(values, decoded(values, type)) < 0.98 * plain


def sweep(x: Floats, w: Floats, levels: npt.NDArray[np.float64]) -> float:
    """Return the least Σ w (x - s q)² over all scales s of either sign, trying each scale at which a code changes."""
    middles = (levels[1:] + levels[:-1]) / 2
    explained = 0.0
    for y in (x.astype(np.float64), -x.astype(np.float64)):
        changes = (middles / y[y != 0, None]).ravel()
        changes = np.sort(changes[changes > 0])
        between = np.append((changes[1:] + changes[:-1]) / 2, changes[-1] * 1.01)
        q = levels[np.searchsorted(middles, y * between[:, None])]
        products, squares = (w * q * y).sum(axis=1), (w * q * q).sum(axis=1)
        explained = max(explained, float((products**2 / np.maximum(squares, 1e-30)).max()))
    return float((w * x.astype(np.float64) ** 2).sum()) - explained


@pytest.mark.parametrize(
    ("type", "levels"),
    [
        (T.Q4_0, range(-8, 8)),
        (T.Q5_0, range(-16, 16)),
        (T.IQ4_NL, IQ4_VALUES.tolist()),
        (T.TQ2_0, range(-1, 2)),
        (T.Q2_0, range(-1, 3)),
    ],
    ids=lambda value: value.name if isinstance(value, GGMLType) else "",
)
@pytest.mark.parametrize("shape", ["normal", "heavy tails"])
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "alike"])
def test_scales_are_as_good_as_the_best_there_is(
    type: GGMLType, levels: list[int], shape: str, weighted: bool
) -> None:
    rng = np.random.default_rng(6)
    x = (rng.standard_normal(2048) if shape == "normal" else rng.standard_t(3, 2048)).astype(np.float32)
    w = importance(2048) if weighted else np.ones(2048, np.float32)
    length = BLOCK_SIZES[type].length
    blocks, weights = x.reshape(-1, length), w.reshape(-1, length)
    best = sum(sweep(b, v, np.asarray(levels, np.float64)) for b, v in zip(blocks, weights, strict=True))
    ours = float((w * (x - decoded(x[None], type, w)[0]) ** 2).sum())
    assert best * 0.999 <= ours <= best * (1.01 if weighted else 1.02)


@settings(deadline=None, max_examples=40)
@given(
    type=st.sampled_from(BLOCKS),
    values=hnp.arrays(np.float32, 256, elements=st.floats(-1000, 1000, width=32), fill=st.just(0.0)),
    weights=hnp.arrays(np.float32, 256, elements=st.floats(0, 1000, width=32)),
)
@example(GGMLType.Q4_0, np.zeros(256, np.float32), np.eye(1, 256, dtype=np.float32)[0] * np.float32(1e-45))
def test_finite_values_decode_to_finite_values(type: GGMLType, values: Floats, weights: Floats) -> None:
    back = decoded(values[None], type, weights)
    assert np.isfinite(back).all()
    # Scales come from the values, so no decoded value exceeds twice the largest.
    assert np.abs(back).max() <= 2.5 * np.abs(values).max() + 1e-6


# -- Floats --------------------------------------------------------------------------------------------------------


@of_types(*FLOATS)
def test_values_of_all_sizes_encode_as_in_gguf(type: GGMLType) -> None:
    rng = np.random.default_rng(2)
    size = 10.0 ** rng.uniform(-35, 4.5, (2000, 1))
    values = (rng.standard_normal((2000, 32)) * size).astype(np.float32).clip(-65000, 65000)
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType(type)).view(np.uint8)
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(quantize(values, type), expected)


@of_types(T.F16, T.BF16)
def test_half_way_values_round_to_even(type: GGMLType) -> None:
    """Values exactly between two values of the type, above an even and an odd one."""
    step = {T.F16: 2.0**-10, T.BF16: 2.0**-7}[type]
    values = np.array([[1 + 0.5 * step, 1 + 1.5 * step, -1 - 2.5 * step]], np.float32)
    expected = np.array([[1, 1 + 2 * step, -1 - 2 * step]], np.float32)
    np.testing.assert_array_equal(dequantize(quantize(values, type), type), expected)


@of_types(*FLOATS)
def test_subnormal_and_extreme_values_of_float_types_survive(type: GGMLType) -> None:
    tiny = {T.F32: 2.0**-149, T.F16: 2.0**-24, T.BF16: 2.0**-133}[type]
    huge = {T.F32: float(np.finfo(np.float32).max), T.F16: 65504.0, T.BF16: 255 * 2.0**120}[type]
    values = np.array([[tiny, -tiny, huge, -huge, 1.0, -0.0]], np.float32)
    back = dequantize(quantize(values, type), type)
    np.testing.assert_array_equal(back.view(np.uint32), values.view(np.uint32))


def test_wider_floats_are_rounded_to_float32_first() -> None:
    values = np.random.default_rng(5).standard_normal((3, 64))
    np.testing.assert_array_equal(quantize(values, T.Q8_0), quantize(values.astype(np.float32), T.Q8_0))


# -- Errors --------------------------------------------------------------------------------------------------------


@of_types(*BLOCKS)
def test_values_too_small_for_the_scale_become_zero(type: GGMLType) -> None:
    values = np.tile(np.array([1e-45, -1e-45, 3e-44, 0, -1e-39, 1e-38, -0.0, 2e-40], np.float32), 32)
    with np.errstate(all="raise"):
        back = dequantize(quantize(values[None], type), type)
    assert np.abs(back).max() <= (0 if type in HALF_SCALES else 2e-38)


@of_types(*ENCODABLE)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39])
def test_values_not_finite_in_float32_are_refused(type: GGMLType, bad: float) -> None:
    for place in (0, 511):
        values = np.zeros((2, 512))
        values[1, place] = bad
        with (
            np.errstate(all="ignore"),
            pytest.raises(ModelError, match=f"{type.name}: a value is NaN, infinite or too large"),
        ):
            quantize(values, type)


@of_types(T.F16, T.BF16, *HALF_SCALES)
def test_values_too_large_for_the_format_are_refused(type: GGMLType) -> None:
    values = np.zeros((1, 256), np.float32)
    values[0, 3] = np.finfo(np.float32).max
    with pytest.raises(ModelError, match="too large"):
        quantize(values, type)


@of_types(*BLOCKS)
def test_a_row_of_incomplete_blocks_is_refused(type: GGMLType) -> None:
    length = BLOCK_SIZES[type].length
    with pytest.raises(ModelError, match=f"multiple of {length} values"):
        quantize(np.zeros((2, length + 1), np.float32), type)


@pytest.mark.parametrize("weights", [np.ones(31), -np.ones(32), np.full(32, np.nan)])
def test_invalid_importance_is_refused(weights: npt.NDArray[np.float64]) -> None:
    with pytest.raises(ModelError, match="must be 32 finite numbers of at least 0"):
        quantize(np.zeros((2, 32), np.float32), T.Q4_0, weights)


def test_a_single_number_is_refused() -> None:
    with pytest.raises(ModelError, match="the shape is"):
        quantize(np.array(1.0, np.float32), T.F32)


def test_a_type_without_encoder_is_named() -> None:
    with pytest.raises(ModelError, match="cannot encode tensors as Q8_K; choose one of F32, F16"):
        quantize(np.zeros((1, 256), np.float32), T.Q8_K)


@of_types(*ENCODABLE)
def test_no_rows_are_no_bytes(type: GGMLType) -> None:
    assert quantize(np.zeros((0, 256), np.float32), type).shape == (0, BLOCK_SIZES[type].row_bytes(256))
    assert quantize(np.zeros((3, 0), np.float32), type).shape == (3, 0)


# -- Feedback ------------------------------------------------------------------------------------------------------


def correlated(n: int, n_tokens: int = 2048) -> np.ndarray:
    """Inputs [n_tokens, n] with correlated columns, as activations have."""
    rng = np.random.default_rng(3)
    mixed = rng.standard_normal((n_tokens, n // 2)) @ rng.standard_normal((n // 2, n)) / n**0.5
    return mixed * np.exp(rng.normal(0, 0.5, n)) + 0.1 * rng.standard_normal((n_tokens, n))


@pytest.mark.parametrize("type", FEEDBACK)
def test_feedback_reduces_the_error_of_products(type: GGMLType) -> None:
    x = correlated(512)
    values = np.random.default_rng(4).standard_t(5, (48, 512)).astype(np.float32)
    hessian = x.T @ x

    def error(encoded: np.ndarray) -> float:
        return float(np.square((dequantize(encoded, type) - values) @ x.T).sum())

    plain = error(quantize(values, type, np.diag(hessian)))
    assert error(quantize(values, type, feedback=Feedback.of(hessian))) < 0.75 * plain


@pytest.mark.parametrize("type", [GGMLType.Q4_0, GGMLType.Q5_K, GGMLType.Q6_K, GGMLType.IQ4_NL])
def test_feedback_does_nothing_for_uncorrelated_columns(type: GGMLType) -> None:
    values = np.random.default_rng(5).standard_normal((16, 256)).astype(np.float32)
    alone = Feedback.of(np.diag(np.random.default_rng(6).uniform(1, 3, 256)))
    given = dequantize(quantize(values, type, alone.weights), type)
    found = dequantize(quantize(values, type, feedback=alone), type)
    # A value halfway between two codes may round either way.
    assert (np.abs(found - given) > 1e-6).mean() < 0.01


def test_errors_are_distributed_as_in_the_paper() -> None:
    """Algorithm 1 of GPTQ with blocks of one column, and the chosen scales."""
    x = correlated(32, 256)
    values = np.random.default_rng(7).standard_normal((6, 32)).astype(np.float32)
    feedback = Feedback.of(x.T @ x)
    found = dequantize(quantize(values, GGMLType.Q8_0, feedback=feedback), GGMLType.Q8_0)
    scales = quantize(values, GGMLType.Q8_0, feedback=feedback)[:, :2].copy().view(np.float16).astype(np.float64)
    damped = x.T @ x + 0.01 * np.trace(x.T @ x) / 32 * np.eye(32)
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    rest = values.astype(np.float64)
    expected = np.zeros_like(rest)
    for i in range(32):
        expected[:, i] = scales[:, 0] * np.clip(np.rint(rest[:, i] / scales[:, 0]), -127, 127)
        rest[:, i:] -= ((rest[:, i] - expected[:, i]) / upper[i, i])[:, None] * upper[i, i:]
    assert (np.abs(found - expected) > 1e-6).mean() < 0.03


@pytest.mark.parametrize("hessian", [np.full((32, 32), np.nan), -np.eye(32), np.eye(32) - 0.5, np.zeros((32, 32))])
def test_products_of_inputs_must_be_positive_semidefinite(hessian: np.ndarray) -> None:
    if hessian.any() or np.isnan(hessian).any():
        with pytest.raises(ModelError, match="collect them again"):
            Feedback.of(hessian)
    else:
        assert Feedback.of(hessian).factor.diagonal().min() > 0
