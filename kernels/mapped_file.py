"""Files whose tensors are read through a memory map, and where in them an array lies."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class MappedFile(mmap.mmap):
    """A map of a file that knows which file that is."""

    path: Path


@dataclass(frozen=True)
class FileRange:
    """Bytes of a file."""

    path: Path
    offset: int
    n_bytes: int


def range_in_file(array: NDArray[Any]) -> FileRange | None:
    """Where an array's bytes are in a mapped file; None if they are not, or do not lie in one piece."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    mapped = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapped, MappedFile) or not array.flags.c_contiguous:
        return None
    return FileRange(mapped.path, array.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data, array.nbytes)
