"""The tensor table of a GGUF file, and tensors as views of the file. Part of `localllm.gguf`."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from localllm.errors import quoted
from localllm.gguf import limits
from localllm.gguf.cursor import Cursor, align
from localllm.quant.types import BLOCK_SIZES, GGMLType

_REQUANTISE = "choose another quantisation of the model"

# Types removed from GGUF; their ids are not used again.
_REMOVED_TYPES = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
_REMOVED_TYPES |= {36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}


@dataclass(frozen=True, slots=True, eq=False)
class TensorInfo:
    """A tensor's name, shape and type, and its bytes as a view of the file."""

    name: str  # at most 63 bytes of UTF-8, unique in the model
    shape: tuple[int, ...]  # in numpy's order, GGUF's dimensions reversed: a weight matrix is (rows, columns)
    type: GGMLType
    # uint8 [*shape[:-1], bytes of a row], read-only.  It stays valid after the file is closed.
    data: NDArray[np.uint8]
    offset: int  # start of the data, in bytes from the start of its file
    _buffer: mmap.mmap = field(repr=False)

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor in the file, without padding."""
        return self.data.nbytes

    @property
    def n_values(self) -> int:
        """Number of values, the product of the shape."""
        return prod(self.shape)

    def parts(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the data in one piece."""
        yield self.data

    def drop_pages(self) -> None:
        """Remove the data's pages from this process's memory, because the data is not needed soon.

        Call this after the tensor is packed. Reading `data` later still works and reads the file again. Only whole
        pages inside the tensor are removed; without ``madvise`` (Windows) this does nothing.
        """
        if sys.platform == "win32":
            return
        start = align(self.offset, mmap.PAGESIZE)
        stop = (self.offset + self.n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop:
            self._buffer.madvise(mmap.MADV_DONTNEED, start, stop - start)


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the tensor table. ``offset`` counts from the data section; the file stores it at ``offset_at``."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    n_bytes: int
    offset: int
    offset_at: int


def read_table(cursor: Cursor, n_tensors: int, alignment: int, file_bytes: int) -> list[Entry]:
    """Read ``n_tensors`` entries of the tensor table at the cursor's position, in a file of ``file_bytes`` bytes."""
    entries = _read_entries(cursor, n_tensors)
    data_start = align(cursor.at, alignment)
    _check_bounds(cursor, entries, alignment, max(file_bytes - data_start, 0))
    _check_layout(cursor, entries, alignment, data_start, file_bytes)
    return entries


def tensor_views(buffer: mmap.mmap, entries: list[Entry], data_start: int) -> list[TensorInfo]:
    """Return the tensors of a file."""
    file = np.frombuffer(buffer, np.uint8)
    tensors = []
    for entry in entries:
        start = data_start + entry.offset
        data = file[start : start + entry.n_bytes].reshape(*entry.shape[:-1], -1)
        tensors.append(TensorInfo(entry.name, entry.shape, entry.type, data, start, buffer))
    return tensors


def _read_entries(cursor: Cursor, n_tensors: int) -> list[Entry]:
    entries: list[Entry] = []
    names: set[str] = set()
    for i in range(n_tensors):
        cursor.context = f"tensor {i}"
        start = cursor.at
        name = cursor.name("the tensor's name", limits.MAX_NAME_BYTES)
        cursor.context = f"tensor {quoted(name)}"
        if name in names:
            raise cursor.error("the tensor's name occurs twice", at=start)
        names.add(name)
        entries.append(_read_entry(cursor, name))
    return entries


def _read_entry(cursor: Cursor, name: str) -> Entry:
    dims_at = cursor.at
    n_dims = cursor.u32("the number of dimensions")
    if n_dims > limits.MAX_DIMS:
        raise cursor.error(f"{n_dims} dimensions are more than {limits.MAX_DIMS}", at=dims_at)
    dims = [cursor.u64("a dimension") for _ in range(n_dims)]
    if 0 in dims:
        raise cursor.error(f"a dimension of {dims} is zero", at=dims_at + 4 + 8 * dims.index(0))
    tensor_type = _read_type(cursor)
    block = BLOCK_SIZES[tensor_type]
    n_columns = dims[0] if dims else 1
    if n_columns % block.length:
        defect = f"rows of {n_columns} values do not fill {tensor_type.name}'s blocks of {block.length}"
        raise cursor.error(defect, at=dims_at + 4)
    n_bytes = block.row_bytes(n_columns) * prod(dims[1:])
    offset_at = cursor.at
    return Entry(name, tuple(dims[::-1]), tensor_type, n_bytes, cursor.u64("the offset"), offset_at)


def _read_type(cursor: Cursor) -> GGMLType:
    start = cursor.at
    type_id = cursor.u32("the tensor type")
    if type_id in BLOCK_SIZES:
        return GGMLType(type_id)
    if type_id in _REMOVED_TYPES:
        defect = f"tensor type {type_id} ({_REMOVED_TYPES[type_id]}) was removed from GGUF"
        raise cursor.error(defect, at=start, advice=_REQUANTISE)
    advice = f"if it is a new one update localllm, else {_REQUANTISE}"
    raise cursor.error(f"tensor type {type_id} is unknown", at=start, advice=advice)


def _check_bounds(cursor: Cursor, entries: list[Entry], alignment: int, data_bytes: int) -> None:
    for entry in entries:
        cursor.context = f"tensor {quoted(entry.name)}"
        if entry.offset % alignment:
            defect = f"the offset {entry.offset} is not a multiple of the alignment {alignment}"
            raise cursor.error(defect, at=entry.offset_at)
        if entry.offset + entry.n_bytes > data_bytes:
            extent = f"its {entry.n_bytes} bytes at offset {entry.offset}"
            raise cursor.error(f"{extent} end past the data section of {data_bytes} bytes", at=entry.offset_at)


def _check_layout(cursor: Cursor, entries: list[Entry], alignment: int, data_start: int, file_bytes: int) -> None:
    """Check that the tensors do not overlap, leave no holes, and that no bytes follow them."""
    expected = 0
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.offset != expected:
            cursor.context = f"tensor {quoted(entry.name)}"
            relation = "overlaps" if entry.offset < expected else "leaves a hole after"
            fault = f"{relation} the data before it, which ends at {expected}"
            raise cursor.error(f"its data at offset {entry.offset} {fault}", at=entry.offset_at)
        expected += align(entry.n_bytes, alignment)
    data_end = data_start + expected
    if file_bytes > data_end:
        cursor.context = "end of the data section"
        raise cursor.error(f"{file_bytes - data_end} bytes follow that belong to no tensor", at=data_end)
