"""Write GGUF files: first the header, then the tensors in order, under a temporary name until the file is complete.

`localllm.gguf.file` describes the layout.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from localllm.errors import OutputError, UsageError, path_text, quoted
from localllm.files import NewFile
from localllm.gguf import limits
from localllm.gguf.cursor import Cursor, align
from localllm.gguf.file import read_header
from localllm.gguf.metadata import DTYPES, Metadata, ValueType
from localllm.gguf.strings import StringArray
from localllm.quant.types import BLOCK_SIZES, GGMLType

# Bytes written between two calls of fsync.
_SYNC = 64 << 20


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to write. ``shape`` is in numpy's order."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType

    @property
    def n_bytes(self) -> int:
        return BLOCK_SIZES[self.type].row_bytes(self.shape[-1] if self.shape else 1) * prod(self.shape[:-1])


def encode_value(value: object, type: ValueType = ValueType.UINT32) -> bytes:
    """Return a value's type and the value in the encoding of GGUF.

    Args:
        value: a bool, number or string, or a list, tuple or array of values of one of these kinds.
        type: type of an integer other than numpy's int32. Integers in arrays are i32, or the type of numpy's uint8
            and uint64 arrays; floats are f32.

    Raises:
        UsageError: GGUF cannot store the value.
    """
    match value:
        case bool() | np.bool_():
            value_type, data = ValueType.BOOL, bytes([bool(value)])
        case int() | np.integer():
            value_type = ValueType.INT32 if isinstance(value, np.integer) and value.dtype == np.int32 else type
            data = _integers([int(value)], value_type, value)
        case float() | np.floating():
            value_type, data = ValueType.FLOAT32, _floats([float(value)], value)
        case str():
            value_type, data = ValueType.STRING, _string(value)
        case list() | tuple() | np.ndarray() | StringArray():
            value_type, data = ValueType.ARRAY, _array(value)
        case _:
            raise _no_value(value)
    return struct.pack("<I", value_type) + data


def _array(values: Sequence[Any] | NDArray[Any]) -> bytes:
    """Return the element type, the length and the elements."""
    items: list[Any]
    if isinstance(values, np.ndarray):
        items = values.tolist() if values.ndim else [None]
    else:
        items = [value.item() if isinstance(value, np.generic) else value for value in values]
    types = {type(item) for item in items}
    if types == {str}:
        value_type, data = ValueType.STRING, b"".join(map(_string, items))
    elif types == {bool}:
        value_type, data = ValueType.BOOL, bytes(items)
    elif types <= {int}:
        kinds = {np.dtype(np.uint8): ValueType.UINT8, np.dtype(np.uint64): ValueType.UINT64}
        value_type = kinds.get(values.dtype, ValueType.INT32) if isinstance(values, np.ndarray) else ValueType.INT32
        data = _integers(items, value_type, values)
    elif types <= {int, float}:
        value_type, data = ValueType.FLOAT32, _floats(items, values)
    else:
        raise _no_value(values)
    return struct.pack("<IQ", value_type, len(items)) + data


def _integers(numbers: Sequence[int], value_type: ValueType, value: object) -> bytes:
    try:
        return np.array(numbers, DTYPES[value_type]).tobytes()
    except OverflowError:
        raise _no_value(value) from None


def _floats(numbers: Sequence[float], value: object) -> bytes:
    try:
        return struct.pack(f"<{len(numbers)}f", *numbers)
    except (OverflowError, struct.error):
        raise _no_value(value) from None


def _string(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise _no_value(text) from None
    return struct.pack("<Q", len(data)) + data


def _no_value(value: object) -> UsageError:
    return UsageError(
        f"{quoted(value)} has no place in a GGUF file: values are bools, integers and floats of 32 bits, Unicode "
        "texts, and lists of one of these; integers that are not in a list are not negative"
    )


def read_back(path: Path, values: Mapping[str, object], tensors: Sequence[TensorSpec]) -> Metadata:
    """Return the values as a reader of a file with these tensors will get them; ``path`` is for errors."""
    metadata = {}
    for key, value in values.items():
        try:
            metadata[key] = encode_value(value)
        except UsageError as error:
            raise UsageError(f"key {quoted(key)}: {error}") from None
    return _header(path, metadata, tensors)[1]


class _Draft(Cursor):
    """A header before it is written. Values that the reader would reject are errors of the output, not of a file."""

    def error(self, defect: str, *, at: int | None = None, advice: str = "") -> OutputError:
        return OutputError(f"{path_text(self.path)} would not load: {self.context}: {defect}")


def _header(path: Path, metadata: Mapping[str, bytes], tensors: Sequence[TensorSpec]) -> tuple[bytes, Metadata, int]:
    """Return the encoded header, the metadata that the reader gets from it, and the bytes of the data section."""
    alignment = int.from_bytes(metadata.get("general.alignment", b"")[4:8], "little")
    if not limits.MIN_ALIGNMENT <= alignment <= limits.MAX_ALIGNMENT:  # missing or invalid
        alignment = limits.DEFAULT_ALIGNMENT
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    head += [_string(key) + value for key, value in metadata.items()]
    offset = 0
    for tensor in tensors:
        dims = tensor.shape[::-1]
        try:
            shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
            head.append(_string(tensor.name) + shape + struct.pack("<IQ", tensor.type, offset))
        except struct.error:
            raise OutputError(
                f"{path_text(path)} would not load: tensor {quoted(tensor.name)}: no file has room for the shape "
                f"{quoted(list(tensor.shape))}"
            ) from None
        offset += align(tensor.n_bytes, alignment)
    header = b"".join(head)
    draft = _Draft(path, header)
    padded = header + bytes(-len(header) % alignment)
    _, read, _ = read_header(draft, len(padded) + offset)
    for key, value in metadata.items():
        if key not in read or read.encoded(key) != value:
            draft.context = f"key {quoted(key)}"
            raise draft.error("its bytes are not those of a single value")
    return padded, read, offset


class GGUFWriter(NewFile):
    """A GGUF file being written, as a context manager: the file gets its name when all tensors are written.

    Args:
        path: the file to write. It does not exist before it is complete.
        metadata: values encoded by `encode_value` or `Metadata.encoded`, including ``general.alignment`` if any.
        tensors: all tensors, in the order of the calls of `write`.
        origin: identifies the input of the tensors. If an earlier writer of this file was killed and had the same
            origin, metadata and tensors, its complete data is kept. By default, all data is written again.
    """

    def __init__(
        self, path: Path, metadata: Mapping[str, bytes], tensors: Sequence[TensorSpec], origin: str = ""
    ) -> None:
        self._tensors = tensors
        self._header, read, n_bytes = _header(path, metadata, tensors)
        self._alignment = read.alignment
        self._next = self.n_kept = 0  # tensors that an earlier writer wrote; `write` continues after them
        self._n_missing = self._unsynced = 0
        # An unfinished file starts with this mark instead of the header's first bytes, so it is not a GGUF file.
        self._mark = hashlib.sha256(self._header + origin.encode()).digest()[:24]
        super().__init__(path, len(self._header) + n_bytes, is_resumable=bool(origin))

    def __enter__(self) -> Self:
        super().__enter__()
        if not self.n_kept:
            self.put(self._mark + self._header[24:])
        return self

    def _n_kept(self) -> int:
        with self._partial.open("rb") as file:
            is_ours = file.read(24) == self._mark
        # After a power failure, the last bytes may be missing on the disk.
        most = self._partial.stat().st_size - 2 * _SYNC
        end = len(self._header)
        for tensor in self._tensors if is_ours else ():
            if end + align(tensor.n_bytes, self._alignment) > most:
                break
            end += align(tensor.n_bytes, self._alignment)
            self.n_kept += 1
        self._next = self.n_kept
        return end if self.n_kept else 0

    def write(self, data: NDArray[np.uint8]) -> None:
        """Write the next bytes of the current tensor, or the first bytes of the next tensor."""
        if not self._n_missing:
            self._n_missing = self._tensors[self._next].n_bytes
            self._next += 1
        if data.nbytes > self._n_missing:
            raise ValueError(f"more bytes than {self._tensors[self._next - 1].name} has")
        if self.is_resumable and self._unsynced >= _SYNC:
            self.sync()
            self._unsynced = 0
        self.put(np.ascontiguousarray(data).data)
        self._unsynced += data.nbytes
        self._n_missing -= data.nbytes
        if not self._n_missing:
            self.put(bytes(-self._tensors[self._next - 1].n_bytes % self._alignment))

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error_type is None and (self._n_missing or self._next < len(self._tensors)):
            self._discard()
            raise ValueError("not all tensors were written")
        if error_type is None:
            self.put(self._header[:24], at=0)
        super().__exit__(error_type, error, trace)
