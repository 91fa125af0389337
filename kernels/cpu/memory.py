"""Memory that begins at a page; for weights in few large pieces, for which the system is asked to use huge pages.

A model's weights are hundreds of matrices that are written once, as fast as memory allows.  By far the most of that
time would go to the system, which hands out memory a page of 4 KiB at a time and clears it first; and reading through
pages of 2 MiB spares the processor looking most addresses up.
"""

from __future__ import annotations

import contextlib
import mmap
import os
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
        self._piece: _Piece | None = None

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        """Memory of ``n_bytes``."""
        if self._piece is None or n_bytes > self._piece.n_free:
            self._piece = _Piece(max(PIECE, n_bytes))
        return self._piece.take(n_bytes)

    def take_back(self) -> None:
        """Takes the memory back that was handed out last, and that nobody will use any more.

        Its pages go back to the system: beside a neighbour that stays in use they would be kept otherwise.
        """
        if self._piece is not None:
            self._piece.take_back()


class _Piece:
    """New memory of at least so many bytes that begins at a huge page."""

    def __init__(self, n_bytes: int) -> None:
        self._pages = _pages((-(-n_bytes // HUGE_PAGE) + 1) * HUGE_PAGE, huge=True)
        whole = np.frombuffer(self._pages, np.uint8)
        self._begin = -whole.ctypes.data % HUGE_PAGE
        self._memory = whole[self._begin :]
        self._last = self._next = 0

    @property
    def n_free(self) -> int:
        return len(self._memory) - self._next

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        self._last = self._next
        self._next += -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return self._memory[self._last : self._last + n_bytes]

    def take_back(self) -> None:
        begin, stop = self._last, self._next
        self._next = begin
        if sys.platform == "linux":  # elsewhere pages that went back need not be zero when they come again
            with contextlib.suppress(OSError):  # the process has locked them
                self._pages.madvise(mmap.MADV_DONTNEED, self._begin + begin, stop - begin)
                return
        self._memory[begin:stop] = 0


def aligned_zeros(shape: int | tuple[int, ...], kind: type, *, huge: bool = False) -> NDArray[Any]:
    """Zeros that begin at a page of memory; pages are only taken as they are written.

    ``huge``: in huge pages, where the system has them.  It finds its way to scattered places faster then, but takes
    2 MiB at a time.
    """
    count = int(np.prod(shape))
    memory = _pages(max(1, count * np.dtype(kind).itemsize), huge=huge)
    return np.frombuffer(memory, kind, count).reshape(shape)


def _pages(n_bytes: int, *, huge: bool) -> mmap.mmap:
    """Memory of the system's, in huge pages if it can.

    Raises:
        MemoryError: there is none.
    """
    try:
        if os.name == "nt":
            return mmap.mmap(-1, n_bytes)
        # Private: a forked child computes in memory of its own.
        memory = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system gives no {n_bytes:,} bytes of memory ({error})") from error
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
