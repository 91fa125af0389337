"""Packed weights: the layout, compared with a layout made in numpy, and rows decoded from it."""

from __future__ import annotations

from collections.abc import Sequence

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

#: Tables differ in numbers only, so one with 32 columns per scale and one with 16 are tested.
TYPES: list[KernelType] = [
    *(t for t in matmul.PACKED_FORMATS if not isinstance(t, LUTType)),
    *LUT_TYPES[1:3],
    *LUT_TYPES[-2:],
]
every_type = pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)


def columns(type: KernelType) -> int:
    """Return a number of columns that ends within a tile, if the block size of the format permits it."""
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
    """Pack rows, and return the rows of ids times 2.5: [ids, n_in + 4], NaN in columns that were not written.

    The first id is an input, the others were chosen by the previous batch.
    """
    weights = load(device, rows, type, n_in)
    y = device.upload(np.full((len(ids), n_in + 4), np.nan, np.float32))
    named = np.array([ids[0], *(~i for i in range(1, len(ids)))], np.int32)
    device.run(
        matmul.embed_launch(weights.format, 8),
        weights=weights.memory, begin=0, end=n_in, n_tiles=weights.format.n_tiles(n_in),
        ids=device.upload(named), chosen=device.upload(np.array(ids, np.int32)), n_tokens=device.count(len(ids)),
        scale=2.5, embeddings=None, y=y, y_stride=n_in + 4,
    )  # fmt: skip
    return device.download(y, np.float32, len(ids), n_in + 4)


@every_type
def test_rows_are_decoded_as_from_the_file(device: Device, type: KernelType) -> None:
    n_out, n_in = 70, columns(type)
    rows = random_rows(type, n_out, n_in)
    ids = [0, 69, 33, 33, 31, 5]
    found = decoded(device, rows, type, n_in, ids)
    values = dequantize_lut(rows, type) if isinstance(type, LUTType) else dequantize(rows, type)
    np.testing.assert_array_equal(found[:, :n_in], values[ids] * np.float32(2.5))
    assert np.isnan(found[:, n_in:]).all()


@pytest.mark.parametrize("type", matmul.PACKED_FORMATS, ids=lambda type: type.name)
def test_a_packed_matrix_has_the_size_of_the_file(type: KernelType) -> None:
    size = block_size(type)
    n_out, n_in = 64, 512
    assert matmul.PACKED_FORMATS[type].packed_bytes(n_out, n_in) == n_out * size.row_bytes(n_in)


def test_padding_is_counted() -> None:
    format = matmul.PACKED_FORMATS[T.Q4_0]
    assert format.packed_bytes(33, 160) == 64 * 256 // 32 * 18
