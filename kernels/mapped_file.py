"""Files whose tensors are memory-mapped: location of an array in its file, and reads without the map."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import GGUFError, path_text

_READ = "could not be read while the model was in use"
_CHANGED = "was changed by another program after the model was loaded"


class MappedFile(mmap.mmap):
    """A file map that stores the file's path."""

    path: Path


@dataclass(frozen=True)
class FileRange:
    """A range of bytes in a file."""

    path: Path
    offset: int
    n_bytes: int


def range_in_file(array: NDArray[Any]) -> FileRange | None:
    """Return the range of an array in a mapped file; None if the array is not mapped or not contiguous."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    mapped = base.obj if isinstance(base, memoryview) else base
    if not isinstance(mapped, MappedFile) or not array.flags.c_contiguous:
        return None
    return FileRange(mapped.path, array.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data, array.nbytes)


class OpenFile:
    """A file that is read while a model is in use. Any change to the file is an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._stamp = self._now()
        self._lock = threading.Lock()

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self.file.fileno())
        return status.st_size, status.st_mtime_ns

    def fill(self, data: NDArray[np.uint8], offset: int, description: str) -> None:
        """Read the bytes at ``offset`` into ``data``. ``description`` describes them in error messages.

        Raises:
            GGUFError: reading failed, or the file has changed since it was opened.
        """
        n_read, view, description = 0, data.data, f"{path_text(self._path)}, {description}"
        try:
            while n_read < len(data) and (n := self._read_at(offset + n_read, view[n_read:])):
                n_read += n
            is_same = self._now() == self._stamp
        except OSError as error:
            raise GGUFError(
                f"{description}: {_READ} ({error.strerror}): check the disk, and load the model again"
            ) from error
        if n_read < len(data) or not is_same:
            raise GGUFError(f"{description}: the file {_CHANGED}: load the model again")

    def _read_at(self, offset: int, into: memoryview) -> int:
        if sys.platform == "win32":
            with self._lock:
                self.file.seek(offset)
                return self.file.readinto(into) or 0
        return os.preadv(self.file.fileno(), [into], offset)
