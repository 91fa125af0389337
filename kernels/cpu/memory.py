"""Page-aligned memory.  Weights get a few large pieces, for which huge pages are requested.

A model's weights are hundreds of matrices that are written once, at the speed of memory.  With pages of 4 KiB most of
this time would be spent in the system, which clears each page first.  Pages of 2 MiB also save most address
translations when weights are read.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Bytes of a huge page on x86-64, and on Arm with pages of 4 KiB.
HUGE_PAGE = 2 << 20
#: Bytes of each piece allocated from the system.  Only written pages become resident.
PIECE = 64 << 20
#: Rows of activations, rows of matrices, and vectors are padded to a multiple of this many values.
PADDING = 32


def padded(n: int) -> int:
    """Return ``n`` rounded up to a multiple of `PADDING`."""
    return -(-n // PADDING) * PADDING


class Arena:
    """Allocates page-aligned, zeroed memory.  A piece is freed with the last array in it."""

    def __init__(self) -> None:
        self._memory = np.zeros(0, np.uint8)
        self._last = self._next = 0

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        if n_bytes > len(self._memory) - self._next:
            n_pages = -(-max(PIECE, n_bytes) // HUGE_PAGE) + 1
            pages = np.frombuffer(_pages(n_pages * HUGE_PAGE, huge=True), np.uint8)
            self._memory, self._next = pages[-pages.ctypes.data % HUGE_PAGE :], 0
        self._last = self._next
        self._next += -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return self._memory[self._last : self._last + n_bytes]

    def take_back(self) -> None:
        """Free the most recent allocation, which must not be used afterwards."""
        self._memory[self._last : self._next] = 0
        self._next = self._last


def aligned_zeros(shape: int | tuple[int, ...], dtype: type, *, huge: bool = False) -> NDArray[Any]:
    """Return page-aligned zeros; a page becomes resident when it is first written.

    ``huge``: use huge pages if available.  They make scattered reads faster, but use memory in units of 2
    MiB.
    """
    count = int(np.prod(shape))
    memory = _pages(max(1, count * np.dtype(dtype).itemsize), huge=huge)
    return np.frombuffer(memory, dtype, count).reshape(shape)


def _pages(n_bytes: int, *, huge: bool) -> mmap.mmap:
    """Allocate memory from the system, in huge pages if ``huge`` is set and possible."""
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, n_bytes)
        # Private: a forked child computes in its own memory.
        memory = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system cannot allocate {n_bytes:,} bytes of memory ({error})") from error
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the system has no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
