"""Activations in the format that matrix products read."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.kernels.cuda import matmul
from localllm.quant.types import GGMLType
from tests.helpers.cuda_sums import quantised
from tests.kernels.cuda.device import Device, quantise

T = GGMLType
Floats = NDArray[np.float32]


def rows_of(n_in: int) -> Floats:
    """Rows with ordinary, large, tiny and subnormal values, ties, zeros and an outlier."""
    x = np.random.default_rng(0).standard_normal((7, n_in), np.float32)
    x[1] *= 1e30
    x[2] *= 1e-30
    x[3] = 1e-38
    x[4] = np.arange(n_in) % 64 - 31.5
    x[5, : n_in // 2] = 0
    x[6, n_in // 3] = 1000
    return x


def run(device: Device, type: GGMLType, x: Floats, n_rows: int) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """Return units [units, n_rows, 16] and scales as words [.., n_rows, words]."""
    format = matmul.PACKED_FORMATS[type]
    units, scales, n_rows = quantise(device, x, format, n_rows)
    words = 1 if format.is_float else 2
    return (
        device.download(units, np.uint8, units.n_bytes // n_rows // 16, n_rows, 16),
        device.download(scales, np.uint32, scales.n_bytes // n_rows // 4 // words, n_rows, words),
    )


def whole_runs(x: Floats, n_rows: int) -> Floats:
    """Pad with zeros: columns to a multiple of 128, rows to ``n_rows``."""
    wide = np.zeros((n_rows, -(-x.shape[1] // 128) * 128), np.float32)
    wide[: len(x), : x.shape[1]] = x
    return wide


@pytest.mark.parametrize("n_in", [128, 173, 640])
@pytest.mark.parametrize("n_rows", [7, 16])
def test_eight_bits(device: Device, n_in: int, n_rows: int) -> None:
    x = rows_of(n_in)
    units, scales = run(device, T.Q4_0, x, n_rows)
    expected = quantised(whole_runs(x, n_rows))
    codes = units.transpose(1, 0, 2).reshape(n_rows, -1, 32).view(np.int8)
    np.testing.assert_array_equal(codes, expected.codes)
    d = expected.d.copy()
    d[np.abs(d) < np.finfo(np.float32).tiny] = 0  # the device flushes subnormal numbers
    found = scales.view(np.float32)
    np.testing.assert_allclose(found[..., 0].T, d, rtol=0, atol=1.2e-38)
    sums = expected.d * expected.codes.sum(axis=2).astype(np.float32)
    np.testing.assert_allclose(found[..., 1].T, sums, rtol=0, atol=1.2e-38)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_a_non_finite_value_affects_only_its_block(device: Device, value: float) -> None:
    x = rows_of(256)
    clean, clean_scales = run(device, T.Q4_0, x, 8)
    x[2, 77] = value
    units, scales = run(device, T.Q4_0, x, 8)
    is_finite = np.isfinite(scales[..., 0].view(np.float32))
    assert is_finite[2, 2] == np.isfinite(value)
    is_finite[2, 2] = True
    assert is_finite.all()
    others = np.ones((16, 8), bool)
    others[4:6, 2] = False
    np.testing.assert_array_equal(units[others], clean[others])
    np.testing.assert_array_equal(np.delete(scales, 2, axis=0), np.delete(clean_scales, 2, axis=0))


@pytest.mark.parametrize("n_in", [128, 173])
def test_float16_is_scaled_so_that_nothing_overflows(device: Device, n_in: int) -> None:
    x = rows_of(n_in)
    units, scales = run(device, T.F16, x, 8)
    values = units.transpose(1, 0, 2).reshape(8, -1).view("<f2")
    factor = scales.view(np.float32)[0]
    assert np.isfinite(values).all()
    np.testing.assert_array_equal(np.frexp(factor)[0], 0.5)  # a power of two rounds no value
    wide = whole_runs(x, 8)
    largest = np.abs(wide).max(axis=1, keepdims=True)
    error = np.abs(values.astype(np.float64) * factor - wide)
    is_denormal = np.abs(wide) < np.finfo(np.float32).tiny  # the device flushes them to zero
    assert (is_denormal | (error <= np.maximum(2.0**-11 * np.abs(wide), 2.0**-24 * largest))).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("type", [T.F16, T.BF16, T.F32], ids=lambda type: type.name)
def test_non_finite_floats_stay_non_finite(device: Device, type: GGMLType, value: float) -> None:
    x = rows_of(128)
    x[2, 77] = value
    units, _ = run(device, type, x, 8)
    raw = np.ascontiguousarray(units.transpose(1, 0, 2).reshape(8, -1))
    if type is T.BF16:
        raw = (raw.view("<u2").astype(np.uint32) << 16).view(np.uint8)
    values = raw.view("<f2" if type is T.F16 else "<f4")
    assert not np.isfinite(values[2, 77])
    assert np.isfinite(np.delete(values, 2, axis=0)).all()


def test_bfloat16_is_rounded_to_nearest_even(device: Device) -> None:
    x = rows_of(128)
    x[0, :4] = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF818000], np.uint32).view(np.float32)
    units, _ = run(device, T.BF16, x, 8)
    bits = whole_runs(x, 8).view(np.uint32)
    expected = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    found = units.transpose(1, 0, 2).reshape(8, -1).view("<u2")
    np.testing.assert_array_equal(found, expected)


def test_float32_does_not_change(device: Device) -> None:
    x = rows_of(173)
    x[3] = 0  # the device may flush subnormal numbers
    units, _ = run(device, T.F32, x, 7)
    np.testing.assert_array_equal(units.transpose(1, 0, 2).reshape(7, -1).view("<f4"), whole_runs(x, 7))
