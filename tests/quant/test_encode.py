"""Quantisers: bit for bit as the gguf package where it has one, else close to what went in."""

from __future__ import annotations

import gguf
import gguf.quants
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from localllm.errors import ModelError
from localllm.quant.encode import ENCODERS, quantize
from localllm.quant.formats import dequantize
from localllm.quant.types import BLOCK_SIZES, GGMLType

T = GGMLType

EXACT = [T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0]

# RMS error over the values' own, on normally distributed values: 1.5 to 2 times a uniform step's.
RELATIVE_RMS = {
    T.F32: 0.0,
    T.F16: 0.0003,
    T.BF16: 0.002,
    T.Q4_0: 0.09,
    T.Q4_1: 0.085,
    T.Q5_0: 0.045,
    T.Q5_1: 0.04,
    T.Q8_0: 0.006,
    T.Q4_K: 0.085,
    T.Q5_K: 0.04,
    T.Q6_K: 0.02,
}


def of_types(*types: GGMLType) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("type", types, ids=lambda type: type.name)


FLOATS = [T.F32, T.F16, T.BF16]
BLOCKS = [type for type in ENCODERS if type not in FLOATS]


def oracle(values: npt.NDArray[np.float32], type: GGMLType) -> npt.NDArray[np.uint8]:
    with np.errstate(all="ignore"):
        encoded = gguf.quants.quantize(values, gguf.GGMLQuantizationType(type))
    bytes_: npt.NDArray[np.uint8] = encoded.view(np.uint8)
    return bytes_


def test_every_encoder_is_checked() -> None:
    assert set(RELATIVE_RMS) == set(ENCODERS)


@of_types(*EXACT)
def test_values_of_all_sizes_encode_as_in_gguf(type: GGMLType) -> None:
    """From far below to far above 1, with zeros and, below 1e-35, scales that are 0 in float16."""
    rng = np.random.default_rng(2)
    size = 10.0 ** rng.uniform(-35, 4.5, (2000, 1))
    values = (rng.standard_normal((2000, 32)) * size).astype(np.float32).clip(-65000, 65000)
    values[rng.random(values.shape) < 0.05] = 0
    values = values.reshape(100, 640)
    with np.errstate(all="raise"):
        ours = quantize(values, type)
    np.testing.assert_array_equal(ours, oracle(values, type))


@of_types(*EXACT)
def test_ties_and_signed_extremes_encode_as_in_gguf(type: GGMLType) -> None:
    ramp = np.arange(-127, 129, dtype=np.float32) / 2
    rows = [ramp, -ramp, np.abs(ramp), -np.abs(ramp), ramp * 2, np.zeros(256), np.full(256, 0.49999997)]
    # The largest magnitude twice, with either sign first; and 127 to make Q8_0's scale 1.
    pair = np.tile(np.array([4, -4] * 8 + [-4, 4] * 8, np.float32), 8)
    ties = np.tile(np.r_[127, np.arange(31) - 15.5, np.nextafter(np.float32(0.5), np.float32(0))][:32], 8)
    values = np.stack([*rows, pair, ties]).astype(np.float32)
    np.testing.assert_array_equal(quantize(values, type), oracle(values, type))


@of_types(T.F16, T.BF16)
def test_half_way_values_round_to_even(type: GGMLType) -> None:
    """Exactly between two values of the type, above an even and an odd one."""
    step = {T.F16: 2.0**-10, T.BF16: 2.0**-7}[type]
    values = np.array([[1 + 0.5 * step, 1 + 1.5 * step, -1 - 2.5 * step]], np.float32)
    expected = np.array([[1, 1 + 2 * step, -1 - 2 * step]], np.float32)
    np.testing.assert_array_equal(dequantize(quantize(values, type), type), expected)


@settings(deadline=None, max_examples=80)
@given(
    type=st.sampled_from([T.Q8_0, T.Q4_0]),
    values=hnp.arrays(
        np.float32,
        st.tuples(st.integers(0, 2), st.sampled_from([0, 32, 64])),
        fill=st.just(0.0),
        elements=st.floats(-(2.0**18), 2.0**18, width=32, allow_subnormal=False).map(
            lambda x: x if abs(x) > 1e-30 else 0.0
        ),
    ),
)
def test_any_finite_values_encode_as_in_gguf(type: GGMLType, values: npt.NDArray[np.float32]) -> None:
    ours = quantize(values, type)
    assert ours.shape == (len(values), values.shape[1] // 32 * BLOCK_SIZES[type].n_bytes)
    if values.size:  # gguf cannot concatenate nothing
        np.testing.assert_array_equal(ours, oracle(values, type))


@of_types(T.F16, *BLOCKS)
def test_values_too_small_for_the_scale_become_zero(type: GGMLType) -> None:
    """1 / scale overflows for these; GGML's own codes then depend on the processor."""
    values = np.tile(np.array([1e-45, -1e-45, 3e-44, 0, -1e-39, 1e-38, -0.0, 2e-40], np.float32), 32)
    with np.errstate(all="raise"):
        decoded = dequantize(quantize(values[None], type), type)
    np.testing.assert_array_equal(decoded, 0)


@of_types(*FLOATS)
def test_subnormal_and_extreme_values_of_float_types_survive(type: GGMLType) -> None:
    tiny = {T.F32: 2.0**-149, T.F16: 2.0**-24, T.BF16: 2.0**-133}[type]
    huge = {T.F32: float(np.finfo(np.float32).max), T.F16: 65504.0, T.BF16: 255 * 2.0**120}[type]
    values = np.array([[tiny, -tiny, huge, -huge, 1.0, -0.0]], np.float32)
    decoded = dequantize(quantize(values, type), type)
    np.testing.assert_array_equal(decoded.view(np.uint32), values.view(np.uint32))


@of_types(*ENCODERS)
def test_round_trip_error(type: GGMLType) -> None:
    values = np.random.default_rng(3).standard_normal((64, 1024)).astype(np.float32)
    error = dequantize(quantize(values, type), type) - values
    assert np.sqrt(np.mean(error**2)) <= RELATIVE_RMS[type]


@of_types(*ENCODERS)
def test_round_trip_error_as_ggml_measures_it(type: GGMLType) -> None:
    """test-quantize-fns.cpp: the norm of the error over the count, on a cosine, at most 0.002."""
    values = (0.1 + 2 * np.cos(np.arange(4096))).astype(np.float32)[None]
    error = dequantize(quantize(values, type), type) - values
    assert np.linalg.norm(error) / 4096 <= 0.002


@of_types(T.Q4_K, T.Q5_K, T.Q6_K)
@pytest.mark.parametrize("case", ["zeros", "positive", "negative", "one sub-block", "constant"])
def test_k_encoders_on_lopsided_blocks(type: GGMLType, case: str) -> None:
    values = np.random.default_rng(4).uniform(0.5, 1.0, (8, 256)).astype(np.float32)
    if case == "zeros":
        values[:] = 0
    elif case == "negative":
        values *= -1
    elif case == "one sub-block":
        values[:, 32:] = 0
    elif case == "constant":
        values[:] = -0.75
    decoded = dequantize(quantize(values, type), type)
    # One step of the widest span, 0 to the extreme, plus what 6-bit sub-scales and minima lose of it.
    step = {T.Q4_K: 1 / 15, T.Q5_K: 1 / 31, T.Q6_K: 1 / 32}[type]
    bound = 0 if case == "zeros" else step / 2 + 1 / 63
    assert np.abs(decoded - values).max() <= bound


def test_wider_floats_are_rounded_to_float32_first() -> None:
    values = np.random.default_rng(5).standard_normal((3, 64))
    np.testing.assert_array_equal(quantize(values, T.Q8_0), quantize(values.astype(np.float32), T.Q8_0))


@of_types(*ENCODERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e39])
def test_what_is_not_finite_in_float32_is_refused(type: GGMLType, bad: float) -> None:
    for place in (0, 200, 511):
        values = np.zeros((2, 512))
        values[1, place] = bad
        with pytest.raises(ModelError, match=f"{type.name}: a value is NaN, infinite or too large"):
            quantize(values, type)


@of_types(T.F16, T.BF16, *BLOCKS)
def test_what_is_too_large_for_the_format_is_refused(type: GGMLType) -> None:
    values = np.zeros((1, 256), np.float32)
    values[0, 3] = np.finfo(np.float32).max
    with pytest.raises(ModelError, match="too large"):
        quantize(values, type)


@of_types(*BLOCKS)
def test_a_row_of_broken_length_is_refused(type: GGMLType) -> None:
    length = BLOCK_SIZES[type].length
    with pytest.raises(ModelError, match=f"multiple of {length} values"):
        quantize(np.zeros((2, length + 1), np.float32), type)


def test_a_single_number_is_refused() -> None:
    with pytest.raises(ModelError, match="the shape is"):
        quantize(np.array(1.0, np.float32), T.F32)


def test_a_type_without_encoder_is_named() -> None:
    with pytest.raises(ModelError, match="cannot encode tensors as Q2_K; choose one of F32, F16"):
        quantize(np.zeros((1, 256), np.float32), T.Q2_K)
