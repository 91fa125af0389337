"""The packing kernel writes the bytes of the numpy implementation."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.kernels.cpu.packing import Packer
from localllm.kernels.cpu.target import available
from localllm.quant.packing import GROUP, LAYOUTS, TileLayout

RNG = np.random.default_rng(7)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.type.name)
@pytest.mark.parametrize("n_rows", [1, GROUP, 2 * GROUP + 5])
def test_the_kernel_packs_as_numpy_does(layout: TileLayout, n_rows: int) -> None:
    packer = Packer(layout, available()[0])
    # A block of floats is one value, so some rows are no multiple of 16 bytes.
    for n_blocks in (3, 16, 21, 32):
        # In a file, rows have any alignment.
        file = RNG.integers(0, 256, 3 + n_rows * n_blocks * layout.block_bytes, np.uint8)
        rows = file[3:].reshape(n_rows, -1)
        n_bytes = layout.packed_bytes(n_rows, n_blocks * layout.columns)
        packed = np.full((2, n_bytes + 64), 0xAA, np.uint8)
        packer.pack(rows, packed[0, :n_bytes])
        layout.pack(rows, packed[1, :n_bytes])
        np.testing.assert_array_equal(packed[0], packed[1])  # including the bytes after the rows, which do not change


def test_rows_that_are_not_contiguous_are_refused() -> None:
    layout = next(iter(LAYOUTS.values()))
    rows = np.zeros((GROUP, 128), np.uint8)
    packer = Packer(layout, available()[0])
    for wrong_rows, out in ((rows[:, :64], np.zeros(1024, np.uint8)), (rows, np.zeros(2047, np.uint8))):
        with pytest.raises(ValueError, match="must be contiguous"):
            packer.pack(wrong_rows, out)
