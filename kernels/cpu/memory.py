"""Memory for weights: in few large pieces, for which the system is asked to use huge pages.

A model's weights are hundreds of matrices that are written once, as fast as memory allows.  By far the most of that
time would go to the system, which hands out memory a page of 4 KiB at a time and clears it first; and reading through
pages of 2 MiB spares the processor looking most addresses up.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np
from numpy.typing import NDArray

#: Bytes of a huge page; those of x86-64, and of Arm with pages of 4 KiB.
HUGE_PAGE = 2 << 20
#: Bytes of the pieces that memory is taken from the system in.  Only what is written to becomes resident.
PIECE = 64 << 20


class Arena:
    """Hands out memory that begins at a page and is zero; a piece is let go of with the last array in it."""

    def __init__(self) -> None:
        self._piece = np.zeros(0, np.uint8)

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        """Memory of ``n_bytes``."""
        if n_bytes > len(self._piece):
            self._piece = _piece(max(PIECE, n_bytes))
        taken = self._piece[:n_bytes]
        self._piece = self._piece[-(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE :]
        return taken


def _piece(n_bytes: int) -> NDArray[np.uint8]:
    """New memory of at least so many bytes that begins at a huge page."""
    n_bytes = (-(-n_bytes // HUGE_PAGE) + 1) * HUGE_PAGE
    if os.name == "nt":
        memory = mmap.mmap(-1, n_bytes)
    else:
        # Private: a forked child computes in memory of its own.
        memory = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    piece = np.frombuffer(memory, np.uint8)
    return piece[-piece.ctypes.data % HUGE_PAGE :]
