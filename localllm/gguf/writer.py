"""Writing GGUF files: the header first, then tensor after tensor, under another name until all is there.

The layout is drawn in `localllm.gguf.file`.
"""

from __future__ import annotations

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

    Without ``type`` integers are u32 and floats f32; in arrays, integers are i32.
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
        kind, dtype = {"b": (ValueType.BOOL, "?"), "f": (ValueType.FLOAT32, "<f4")}.get(
            numbers.dtype.kind, (ValueType.INT32, "<i4")
        )
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

    Raises:
        OutputError: it cannot be written, or there is not enough space.
    """

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, bytes],
        tensors: Sequence[TensorSpec],
        alignment: int = _DEFAULT_ALIGNMENT,
    ) -> None:
        self._tensors = tensors
        self._alignment = alignment
        self._next = 0
        self._left = 0
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
        super().__init__(path, len(self._header) + offset)

    def __enter__(self) -> Self:
        super().__enter__()
        self.put(self._header)
        return self

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
        self.put(np.ascontiguousarray(data).data)
        self._left -= data.nbytes
        if not self._left:
            self.put(bytes(-self._tensors[self._next - 1].n_bytes % self._alignment))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and (self._left or self._next < len(self._tensors)):
            self._discard()
            raise ValueError("not all tensors were written")
        super().__exit__(kind, error, trace)
