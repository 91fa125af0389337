"""The packing kernel writes what numpy does, to the last bit, and the memory for it is as it should be."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from localllm.kernels.cpu.memory import PIECE, Arena
from localllm.kernels.cpu.packing import Packer
from localllm.kernels.cpu.target import Target, available
from localllm.quant.packing import GROUP, LAYOUTS, TileLayout

RNG = np.random.default_rng(7)


@pytest.mark.parametrize("target", available(), ids=lambda target: target.name)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.type.name)
@pytest.mark.parametrize("n_rows", [1, GROUP, 2 * GROUP + 5])
def test_the_kernel_packs_as_numpy_does(target: Target, layout: TileLayout, n_rows: int) -> None:
    packer = Packer(layout, target)
    # Of floats, a block is one value: rows that 16 bytes divide, and rows that they do not.
    for n_blocks in (3, 16, 21, 32):
        # As in a file, at no particular address.
        file = RNG.integers(0, 256, 3 + n_rows * n_blocks * layout.block_bytes, np.uint8)
        rows = file[3:].reshape(n_rows, -1)
        n_bytes = layout.packed_bytes(n_rows, n_blocks * layout.columns)
        packed = np.full((2, n_bytes + 64), 0xAA, np.uint8)
        packer.pack(rows, packed[0, :n_bytes])
        layout.pack(rows, packed[1, :n_bytes])
        np.testing.assert_array_equal(packed[0], packed[1])  # what lies behind is untouched, too


def test_rows_that_do_not_lie_in_one_piece_are_refused() -> None:
    layout = next(iter(LAYOUTS.values()))
    rows = np.zeros((GROUP, 128), np.uint8)
    packer = Packer(layout, available()[0])
    for wrong_rows, out in ((rows[:, :64], np.zeros(1024, np.uint8)), (rows, np.zeros(2047, np.uint8))):
        with pytest.raises(ValueError, match="one piece"):
            packer.pack(wrong_rows, out)


def test_memory_begins_at_a_page_is_zero_and_nobody_elses() -> None:
    arena = Arena()
    sizes = [1, 4096, 5000, PIECE // 2, 7, PIECE, 3 * PIECE + 1, 100]
    taken = [arena.take(n) for n in sizes]
    for i, (memory, n) in enumerate(zip(taken, sizes, strict=True)):
        assert memory.shape == (n,)
        assert memory.ctypes.data % mmap.PAGESIZE == 0
        assert not memory[::1024].any()
        assert memory[-1] == 0
        memory[::1024] = memory[-1] = i + 1
    for i, memory in enumerate(taken):
        assert (memory[::1024] == i + 1).all()
