"""Writing GGUF files: the header first, then tensor after tensor, under another name until all is there.

The layout is drawn in `localllm.gguf.file`.
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

from localllm.files import NewFile
from localllm.gguf.cursor import align
from localllm.gguf.metadata import ValueType
from localllm.quant.types import BLOCK_SIZES, GGMLType

_DEFAULT_ALIGNMENT = 32
# Bytes after which what was written is made sure to be on the disk.
_SYNC = 64 << 20


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written: ``shape`` as numpy has it."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType

    @property
    def n_bytes(self) -> int:
        return BLOCK_SIZES[self.type].row_bytes(self.shape[-1] if self.shape else 1) * prod(self.shape[:-1])


def encode_value(value: bool | int | float | str | Sequence[Any], type: ValueType | None = None) -> bytes:
    """A value's type and the value, as a file has them.

    Without ``type`` integers are u32 and floats f32; in arrays, integers are i32, and
    numpy's unsigned ones bytes.
    """
    match value:
        case bool():
            return struct.pack("<I?", ValueType.BOOL, value)
        case int():
            kind = type or ValueType.UINT32
            return struct.pack({ValueType.UINT16: "<IH", ValueType.INT32: "<Ii"}.get(kind, "<II"), kind, value)
        case float():
            return struct.pack("<If", ValueType.FLOAT32, value)
        case str():
            return struct.pack("<I", ValueType.STRING) + _string(value)
    if not len(value) or not isinstance(value[0], str):
        numbers = np.asarray(value, None if len(value) else np.int32)
        kind, dtype = {
            "b": (ValueType.BOOL, "?"), "f": (ValueType.FLOAT32, "<f4"), "u": (ValueType.UINT8, "u1")
        }.get(numbers.dtype.kind, (ValueType.INT32, "<i4"))  # fmt: skip
        return struct.pack("<IIQ", ValueType.ARRAY, kind, len(value)) + numbers.astype(dtype).tobytes()
    head = struct.pack("<IIQ", ValueType.ARRAY, ValueType.STRING, len(value))
    return head + b"".join(_string(text) for text in value)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


class GGUFWriter(NewFile):
    """A GGUF file being written, as a context manager: it gets its name when all tensors are there.

    Args:
        path: where it will be; nothing is there before it is complete.
        metadata: values as `encode_value` and `Metadata.encoded` give them.
        tensors: all tensors, in the order in which `write` brings them.
        alignment: of the data section and of each tensor, in bytes.
        origin: what the tensors' bytes depend on.  If an earlier writer of this file was killed, and had the same
            origin, metadata and tensors, what it wrote is kept.  By default nothing is.

    Attributes:
        n_kept: tensors that an earlier writer wrote: `write` goes on behind them.

    Raises:
        OutputError: it cannot be written, or there is not enough space.
    """

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, bytes],
        tensors: Sequence[TensorSpec],
        alignment: int = _DEFAULT_ALIGNMENT,
        origin: str = "",
    ) -> None:
        self._tensors = tensors
        self._alignment = alignment
        self._next = self.n_kept = 0
        self._left = self._unsynced = 0
        head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
        head += [_string(key) + value for key, value in metadata.items()]
        offset = 0
        for tensor in tensors:
            dims = tensor.shape[::-1]
            shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
            head.append(_string(tensor.name) + shape + struct.pack("<IQ", tensor.type, offset))
            offset += align(tensor.n_bytes, alignment)
        header = b"".join(head)
        self._header = header + bytes(-len(header) % alignment)
        # An unfinished file begins with this instead of the header's first bytes: it is no GGUF file yet.
        self._mark = hashlib.sha256(self._header + origin.encode()).digest()[:24]
        super().__init__(path, len(self._header) + offset, is_resumable=bool(origin))

    def __enter__(self) -> Self:
        super().__enter__()
        if not self.n_kept:
            self.put(self._mark + self._header[24:])
        return self

    def _n_kept(self) -> int:
        with self._partial.open("rb") as file:
            is_ours = file.read(24) == self._mark
        # The rest may not have reached the disk when a computer lost its power.
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
        """Add bytes: the next of the tensor at hand, or the first of the next one.

        Raises:
            OutputError: the disk is full, or fails.
        """
        if not self._left:
            self._left = self._tensors[self._next].n_bytes
            self._next += 1
        if data.nbytes > self._left:
            raise ValueError(f"more bytes than {self._tensors[self._next - 1].name} has")
        if self.is_resumable and self._unsynced >= _SYNC:
            self.sync()
            self._unsynced = 0
        self.put(np.ascontiguousarray(data).data)
        self._unsynced += data.nbytes
        self._left -= data.nbytes
        if not self._left:
            self.put(bytes(-self._tensors[self._next - 1].n_bytes % self._alignment))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and (self._left or self._next < len(self._tensors)):
            self._discard()
            raise ValueError("not all tensors were written")
        if kind is None:
            self.put(self._header[:24], at=0)
        super().__exit__(kind, error, trace)
