"""Memory for weights: pages of zeros, returned when a matrix needs another format."""

from __future__ import annotations

import mmap

import numpy as np

from localllm.kernels.cpu.memory import HUGE_PAGE, PIECE, Arena
from localllm.quant.packing import LAYOUTS
from localllm.quant.types import GGMLType
from tests.helpers.blocks import random_rows, values_of
from tests.helpers.recorder import CPUOps
from tests.helpers.weights import blocks

T = GGMLType


def test_memory_starts_at_a_page_and_is_zero_and_exclusive() -> None:
    arena = Arena()
    sizes = [1, 4096, 5000, PIECE // 2, 7, PIECE, 3 * PIECE + 1, 100]
    taken = [arena.take(n) for n in sizes]
    for i, (array, n) in enumerate(zip(taken, sizes, strict=True)):
        assert array.shape == (n,)
        assert array.ctypes.data % mmap.PAGESIZE == 0
        assert not array[::1024].any()
        assert array[-1] == 0
        array[::1024] = array[-1] = i + 1
    for i, array in enumerate(taken):
        assert (array[::1024] == i + 1).all()


def test_returned_memory_is_zeroed_and_reused() -> None:
    arena = Arena()
    before = arena.take(5000)
    before[:] = 1
    gone = arena.take(3 * HUGE_PAGE + 5)
    gone[:] = 2
    address = gone.ctypes.data
    arena.take_back()
    after = arena.take(4 * HUGE_PAGE)
    assert after.ctypes.data == address
    assert not after.any()
    assert (before == 1).all()


def test_a_matrix_repacked_as_float32_reuses_its_memory() -> None:
    """The float32 matrix follows the matrix loaded before, and its padding is zero."""
    ops = CPUOps(threads=2)
    neighbour, _ = ops.loader.pack(blocks(random_rows(T.F32, 8, 256), T.F32, 256))
    kept = neighbour.copy()
    rows = np.concatenate([random_rows(T.IQ2_XXS, 580, 256), random_rows(T.IQ2_XXS, 3, 256, scales=[40000.0])])
    tiles, kind = ops.loader.pack(blocks(rows, T.IQ2_XXS, 256))
    ops.workers.close()
    assert kind == T.F32
    assert 0 <= tiles.ctypes.data - (neighbour.ctypes.data + neighbour.nbytes) < mmap.PAGESIZE
    np.testing.assert_array_equal(neighbour, kept)
    layout, expected = LAYOUTS[T.F32], np.zeros_like(tiles)
    values = values_of(rows, T.IQ2_XXS).astype(np.float32)
    layout.pack(values.view(np.uint8), expected[: layout.packed_bytes(len(rows), 256)])
    np.testing.assert_array_equal(tiles, expected)
