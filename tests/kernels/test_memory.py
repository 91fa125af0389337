"""Memory for weights: in pages, zero, and taken back where a matrix turns out to need another format."""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys

import numpy as np
import pytest

from localllm.kernels.cpu import memory
from localllm.kernels.cpu.memory import HUGE_PAGE, PIECE, Arena
from localllm.quant.packing import LAYOUTS
from localllm.quant.types import GGMLType
from tests.helpers.blocks import random_rows, values_of
from tests.helpers.recorder import CPUOps
from tests.helpers.weights import blocks

T = GGMLType


def test_memory_begins_at_a_page_is_zero_and_nobody_elses() -> None:
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


class LockedPages(mmap.mmap):
    """What the system refuses to take back."""

    def madvise(self, option: int, *place: int) -> None:
        if option == mmap.MADV_DONTNEED:
            raise OSError(errno.EINVAL, "Invalid argument")
        super().madvise(option, *place)


@pytest.mark.parametrize("system", ["Linux", "Linux, pages locked", "another"])
def test_memory_taken_back_is_zero_and_handed_out_again(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the system does not take pages: its neighbours stay as they were."""
    if system == "another":
        monkeypatch.setattr(memory.sys, "platform", "another system")
    elif sys.platform != "linux":
        pytest.skip("of Linux")
    elif system == "Linux, pages locked":
        monkeypatch.setattr(memory.mmap, "mmap", LockedPages)
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


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages are resident")
def test_memory_taken_back_is_not_resident() -> None:
    """Even if what is asked for next does not fit into its place, and a neighbour keeps the piece alive."""
    arena = Arena()
    neighbour = arena.take(mmap.PAGESIZE)
    gone = arena.take(PIECE // 2)
    neighbour[:] = gone[:] = 1
    address = gone.ctypes.data
    assert resident_pages(address, PIECE // 2) == PIECE // 2 // mmap.PAGESIZE
    arena.take_back()
    arena.take(2 * PIECE)
    assert resident_pages(address, PIECE // 2) == 0
    assert resident_pages(neighbour.ctypes.data, mmap.PAGESIZE) == 1


def resident_pages(address: int, n_bytes: int) -> int:
    """How many of the pages there are in memory, as mincore(2) says."""
    pages = np.zeros(-(-n_bytes // mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), ctypes.c_void_p(pages.ctypes.data))
    assert libc.mincore(*arguments) == 0, ctypes.get_errno()
    return int((pages & 1).sum())


def test_what_was_packed_before_a_scale_did_not_fit_takes_no_memory() -> None:
    """The matrix in float32 lies where it lay: behind the one loaded before, and with zeros in its padding."""
    ops = CPUOps(threads=2)
    neighbour, _ = ops._loader.pack(blocks(random_rows(T.F32, 8, 256), T.F32, 256))
    kept = neighbour.copy()
    rows = np.concatenate([random_rows(T.IQ2_XXS, 580, 256), random_rows(T.IQ2_XXS, 3, 256, scales=[40000.0])])
    tiles, kind = ops._loader.pack(blocks(rows, T.IQ2_XXS, 256))
    ops.workers.close()
    assert kind == T.F32
    assert 0 <= tiles.ctypes.data - (neighbour.ctypes.data + neighbour.nbytes) < mmap.PAGESIZE
    np.testing.assert_array_equal(neighbour, kept)
    layout, expected = LAYOUTS[T.F32], np.zeros_like(tiles)
    values = values_of(rows, T.IQ2_XXS).astype(np.float32)
    layout.pack(values.view(np.uint8), expected[: layout.packed_bytes(len(rows), 256)])
    np.testing.assert_array_equal(tiles, expected)
