"""Formats without a kernel are repacked with no measurable loss."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.errors import KernelError
from localllm.quant.formats import FORMATS
from localllm.quant.lut import LUT_TYPES, LUTType, block_size, dequantize_lut
from localllm.quant.packing import LAYOUTS
from localllm.quant.repack import FALLBACK, MEASURABLE, ScaleRangeError, repack, repack_target
from localllm.quant.types import BLOCK_SIZES, GGMLType
from tests.helpers.blocks import F16_FIELDS, UNITS, random_rows, values_of

T = GGMLType
REPACKED = [t for t in FORMATS if t not in LAYOUTS]
EXACT = {T.Q1_0, T.Q2_0, T.TQ1_0, T.TQ2_0, T.MXFP4, T.NVFP4}

#: Bits per weight that kernels read, from the documentation.
BITS = {
    T.Q1_0: 3.5,
    T.Q2_0: 3.5,
    T.TQ1_0: 2.625,
    T.TQ2_0: 2.625,
    T.IQ1_S: 3.5,
    T.IQ1_M: 4.0,
    T.IQ2_XXS: 3.5,
    T.IQ2_XS: 4.0,
    T.IQ2_S: 4.0,
    T.IQ3_XXS: 4.5,
    T.IQ3_S: 4.5,
    T.IQ4_XS: 4.5,
    T.MXFP4: 4.5,
    T.NVFP4: 5.0,
}

repacked = pytest.mark.parametrize("type", REPACKED, ids=lambda type: type.name)


def loss(rows: np.ndarray, type: GGMLType) -> float:
    """Return the squared error of repacked rows relative to the squares of the originals, in the worst row."""
    target = repack_target(type)
    exact = values_of(rows, type)
    error = values_of(repack(rows, type, target), target) - exact
    return float(np.max(np.square(error).sum(axis=1) / np.square(exact).sum(axis=1)))


def test_formats_with_a_kernel_are_not_repacked() -> None:
    for type in set(FORMATS) & set(LAYOUTS):
        rows = random_rows(type, 3, 256)
        assert repack_target(type) is type
        assert repack(rows, type, type) is rows


def test_no_format_is_repacked_to_sixteen_bits() -> None:
    assert set(BITS) == set(REPACKED)
    for type in FORMATS:
        target = block_size(repack_target(type))
        bits = target.n_bytes * 8 / target.length
        assert bits == BITS.get(type, BLOCK_SIZES[type].n_bytes * 8 / BLOCK_SIZES[type].length)


@pytest.mark.parametrize("type", [t for t in GGMLType if t not in FORMATS], ids=lambda type: type.name)
def test_an_unsupported_type_is_named(type: GGMLType) -> None:
    with pytest.raises(KernelError, match=rf"no kernel reads weights of type {type.name};"):
        repack_target(type)


@repacked
def test_repacking_loses_nothing_measurable(type: GGMLType) -> None:
    lost = loss(random_rows(type, 20, 1024), type)
    assert lost == 0 if type in EXACT else 0 < lost < 2e-7


@repacked
def test_integer_formats_keep_their_values(type: GGMLType) -> None:
    """With a scale whose products float16 holds exactly, all values are exact."""
    rows = random_rows(type, 5, 512, scales=[UNITS[type]])
    target = repack_target(type)
    values = values_of(repack(rows, type, target), target)
    np.testing.assert_array_equal(values, np.rint(values))
    np.testing.assert_array_equal(values, values_of(rows, type))


@pytest.mark.parametrize("type", [t for t in REPACKED if t is not T.NVFP4], ids=lambda type: type.name)
def test_small_scales_lose_little_or_are_refused(type: GGMLType) -> None:
    refused = 0
    for exponent in range(-12, -25, -1):
        rows = random_rows(type, 2, 256, scales=[1.75 * 2.0**exponent])
        try:
            assert loss(rows, type) <= 2 * MEASURABLE
        except ScaleRangeError:
            refused += 1
    assert refused < 13


def overflowing(type: GGMLType) -> np.ndarray:
    """Return rows whose last block has a scale above the range of float16."""
    rows = random_rows(type, 4, 512)
    blocks = rows.reshape(-1, BLOCK_SIZES[type].n_bytes)
    if type is T.MXFP4:
        blocks[-1, 0] = 127 + 20  # 2^20
    elif type in (T.TQ1_0, T.TQ2_0, T.Q1_0, T.Q2_0):
        at = F16_FIELDS[type][0]
        blocks[-1, at : at + 2] = np.array(np.inf, "<f2").reshape(1).view(np.uint8)
    else:
        blocks[-1] = random_rows(type, 1, 256, scales=[65504.0], seed=1)
    return rows


@pytest.mark.parametrize("type", [t for t in REPACKED if t is not T.NVFP4], ids=lambda type: type.name)
def test_scales_outside_float16_are_refused_and_stored_in_float32(type: GGMLType) -> None:
    rows = overflowing(type)
    target = repack_target(type)
    repack(rows[:1], type, target)  # the other rows are valid
    with pytest.raises(ScaleRangeError, match="range of float16"):
        repack(rows, type, target)
    wide = repack(rows, type, FALLBACK)
    np.testing.assert_array_equal(wide.view("<f4").astype(np.float64), values_of(rows, type))


def test_all_scales_of_nvfp4_are_exact() -> None:
    rows = random_rows(T.NVFP4, 1, 64 * 64)
    rows.reshape(-1, 36)[:, :4] = np.arange(256, dtype=np.uint8).reshape(-1, 4)
    assert loss(rows, T.NVFP4) == 0


def test_a_row_of_small_values_is_not_flushed() -> None:
    """The loss is measured per row, because every row is a separate output."""
    rows = random_rows(T.MXFP4, 3, 256, scales=[1.0])
    rows.reshape(3, -1, 17)[1, :, 0] = 127 - 40  # far below the smallest number in float16
    with pytest.raises(ScaleRangeError):
        repack(rows, T.MXFP4, repack_target(T.MXFP4))
    rows.reshape(3, -1, 17)[1, 1:, 0] = 127  # one small block in an ordinary row is no measurable loss
    repack(rows, T.MXFP4, repack_target(T.MXFP4))


@repacked
def test_rows_of_zeros_stay_zero(type: GGMLType) -> None:
    rows = np.zeros((2, 2 * BLOCK_SIZES[type].n_bytes), np.uint8)
    target = repack_target(type)
    np.testing.assert_array_equal(values_of(repack(rows, type, target), target), values_of(rows, type))


def test_zeros_of_mxfp4_stay_zero_with_any_scale_and_sign() -> None:
    rows = np.full((1, 2 * 17), 0x80, np.uint8)
    rows[0, ::17] = 0, 200
    target = repack_target(T.MXFP4)
    np.testing.assert_array_equal(values_of(repack(rows, T.MXFP4, target), target), 0)


@repacked
def test_any_strides_are_taken(type: GGMLType) -> None:
    rows = random_rows(type, 6, 512)
    target = repack_target(type)
    expected = repack(rows, type, target)
    np.testing.assert_array_equal(repack(rows[::-2], type, target), expected[::-2])


@pytest.mark.parametrize("type", LUT_TYPES, ids=lambda type: type.name)
def test_the_kernels_own_formats_are_decoded(type: LUTType) -> None:
    rows = random_rows(type, 5, 96)
    np.testing.assert_array_equal(dequantize_lut(rows, type), values_of(rows, type).astype(np.float32))


@pytest.mark.parametrize("type", LUT_TYPES, ids=lambda type: type.name)
def test_tables_fit_the_kernels(type: LUTType) -> None:
    """Values are within -127 … 127, because dot products use the magnitude as a signed byte."""
    assert len(type.table) in (8, 16)
    assert all(-127 <= value <= 127 for value in type.table)
    assert type.size.n_bytes == 4 * type.bits + 2 * 32 // type.scale_length
