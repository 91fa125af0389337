"""Memory that begins at a page; for weights in few large pieces, for which the system is asked to use huge pages.

A model's weights are hundreds of matrices that are written once, as fast as memory allows.  By far the most of that
time would go to the system, which hands out memory a page of 4 KiB at a time and clears it first; and reading through
pages of 2 MiB spares the processor looking most addresses up.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Bytes of a huge page; those of x86-64, and of Arm with pages of 4 KiB.
HUGE_PAGE = 2 << 20
#: Bytes of the pieces that memory is taken from the system in.  Only what is written to becomes resident.
PIECE = 64 << 20
#: Values that rows of activations, rows of matrices and vectors are padded to.
PADDING = 32


def padded(n: int) -> int:
    """The values that ``n`` of them take."""
    return -(-n // PADDING) * PADDING


class Arena:
    """Hands out memory that begins at a page and is zero; a piece is let go of with the last array in it."""

    def __init__(self) -> None:
        self._memory = np.zeros(0, np.uint8)
        self._last = self._next = 0

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        """Memory of ``n_bytes``."""
        if n_bytes > len(self._memory) - self._next:
            n_pages = -(-max(PIECE, n_bytes) // HUGE_PAGE) + 1
            whole = np.frombuffer(_pages(n_pages * HUGE_PAGE, huge=True), np.uint8)
            self._memory, self._next = whole[-whole.ctypes.data % HUGE_PAGE :], 0
        self._last = self._next
        self._next += -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return self._memory[self._last : self._last + n_bytes]

    def take_back(self) -> None:
        """Takes the memory back that was handed out last, and that nobody will use any more."""
        self._memory[self._last : self._next] = 0
        self._next = self._last


def aligned_zeros(shape: int | tuple[int, ...], kind: type, *, huge: bool = False) -> NDArray[Any]:
    """Zeros that begin at a page of memory; pages are only taken as they are written.

    ``huge``: in huge pages, where the system has them.  It finds its way to scattered places faster then, but takes
    2 MiB at a time.
    """
    count = int(np.prod(shape))
    memory = _pages(max(1, count * np.dtype(kind).itemsize), huge=huge)
    return np.frombuffer(memory, kind, count).reshape(shape)


def _pages(n_bytes: int, *, huge: bool) -> mmap.mmap:
    """Memory of the system's, in huge pages if it can."""
    try:
        if sys.platform == "win32":
            return mmap.mmap(-1, n_bytes)
        # Private: a forked child computes in memory of its own.
        memory = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system gives no {n_bytes:,} bytes of memory ({error})") from error
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
