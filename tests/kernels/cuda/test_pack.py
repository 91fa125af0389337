"""Packed weights: the layout against one made in numpy, and rows read back from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.kernels.cuda import matmul
from localllm.quant.formats import dequantize
from localllm.quant.lut import LUT_TYPES, KernelType, LUTType, block_size, dequantize_lut
from localllm.quant.types import GGMLType
from tests.helpers import packed
from tests.helpers.blocks import random_rows
from tests.kernels.cuda.device import Device, load

T = GGMLType

#: Tables differ in numbers only: one with a scale for 32 columns, and one for 16.
TYPES: list[KernelType] = [
    *(t for t in matmul.PACKED_FORMATS if not isinstance(t, LUTType)),
    *LUT_TYPES[1:3],
    *LUT_TYPES[-2:],
]
every_type = pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)


def columns(type: KernelType) -> int:
    """Of a row that ends within a tile, where a format's blocks allow it."""
    length = block_size(type).length
    return {1: 141, 32: 160, 256: 512}[length]


@every_type
def test_packing(device: Device, type: KernelType) -> None:
    for n_out, n_in in ((37, columns(type)), (32, 256)):
        rows = random_rows(type, n_out, n_in)
        weights = load(device, rows, type, n_in)
        expected = packed.pack(rows, type, n_in)
        assert weights.memory.n_bytes == expected.nbytes
        np.testing.assert_array_equal(device.download(weights.memory, np.uint8, *expected.shape), expected)


def decoded(
    device: Device, rows: NDArray[np.uint8], type: KernelType, n_in: int, ids: Sequence[int]
) -> NDArray[np.float32]:
    """Some rows, packed and read, times 2.5: [ids, n_in + 4], NaN where nothing was written.

    The first id is given, the others are those that the batch before chose.
    """
    weights = load(device, rows, type, n_in)
    y = device.upload(np.full((len(ids), n_in + 4), np.nan, np.float32))
    named = np.array([ids[0], *(~i for i in range(1, len(ids)))], np.int32)
    wanted = device.upload(named), device.upload(np.array(ids, np.int32)), device.count(len(ids))
    tiles, stride = np.int32(weights.format.n_tiles(n_in)), np.int32(n_in + 4)
    arguments: list[Any] = [weights.memory, np.int32(0), np.int32(n_in), tiles, *wanted, np.float32(2.5)]
    arguments += [np.uint64(0), np.int32(0), y, stride]
    device.run(matmul.embed_launch(weights.format, 8), arguments)
    return device.download(y, np.float32, len(ids), n_in + 4)


@every_type
def test_rows_are_decoded_as_from_the_file(device: Device, type: KernelType) -> None:
    """With the same bits."""
    n_out, n_in = 70, columns(type)
    rows = random_rows(type, n_out, n_in)
    ids = [0, 69, 33, 33, 31, 5]
    found = decoded(device, rows, type, n_in, ids)
    values = dequantize_lut(rows, type) if isinstance(type, LUTType) else dequantize(rows, type)
    np.testing.assert_array_equal(found[:, :n_in], values[ids] * np.float32(2.5))
    assert np.isnan(found[:, n_in:]).all()


@pytest.mark.parametrize("type", matmul.PACKED_FORMATS, ids=lambda type: type.name)
def test_a_format_takes_the_bits_that_it_has_in_files(type: KernelType) -> None:
    size = block_size(type)
    n_out, n_in = 64, 512
    assert matmul.PACKED_FORMATS[type].packed_bytes(n_out, n_in) == n_out * size.row_bytes(n_in)


def test_what_pads_is_counted() -> None:
    format = matmul.PACKED_FORMATS[T.Q4_0]
    assert format.packed_bytes(33, 160) == 64 * 256 // 32 * 18
