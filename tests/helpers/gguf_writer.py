"""GGUF files for tests: valid files through the gguf package, broken files byte by byte.

`write_gguf` is for tests that need a model file.  `RawGGUF` writes the bytes itself and can falsify every count,
length, type and offset; by default it writes a valid little-endian file.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from localllm.quant.types import BLOCK_SIZES, GGMLType

ALIGNMENT = 32

TensorValue = np.ndarray | tuple[GGMLType, Sequence[int], bytes]


@dataclass(frozen=True)
class Typed:
    """A metadata value with an explicit GGUF type, where `write_gguf` would choose another one."""

    type: gguf.GGUFValueType
    value: Any
    element_type: gguf.GGUFValueType | None = None


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorValue] | None = None) -> Path:
    """Write a GGUF v3 file with the gguf package and return its path.

    Args:
        metadata: bool, int (u32, or i32, u64, i64 if it does not fit), float (f32), str, bytes (an
            undecoded text), a non-empty list of one of these, a 1-d numeric array, or a `Typed`.
            ``general.architecture`` and ``general.alignment`` set the file's architecture and alignment.
        tensors: arrays of a dtype that GGUF supports, in numpy's order, or (type, shape in numpy's order,
            bytes of the blocks).
    """
    architecture = metadata.get("general.architecture")
    writer = gguf.GGUFWriter(path, "" if architecture is None else architecture)
    for key, value in metadata.items():
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        elif key != "general.architecture":
            typed = value if isinstance(value, Typed) else _typed(value)
            writer.add_key_value(key, typed.value, typed.type, typed.element_type)
    for name, tensor in (tensors or {}).items():
        _add_tensor(writer, name, tensor)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _typed(value: Any) -> Typed:
    kind = gguf.GGUFValueType
    if isinstance(value, np.ndarray):
        return Typed(kind.ARRAY, value.tolist(), kind[_VALUE_TYPE_OF_DTYPE[value.dtype.str.lstrip("<|")]])
    if isinstance(value, list | tuple):
        return Typed(kind.ARRAY, list(value), _typed(value[0]).type)
    if isinstance(value, bool):
        return Typed(kind.BOOL, value)
    if isinstance(value, int):
        return Typed(_int_type(value), value)
    if isinstance(value, float):
        return Typed(kind.FLOAT32, value)
    return Typed(kind.STRING, value)


def _int_type(value: int) -> gguf.GGUFValueType:
    kind = gguf.GGUFValueType
    if value >= 0:
        return kind.UINT32 if value < 2**32 else kind.UINT64
    return kind.INT32 if value >= -(2**31) else kind.INT64


_VALUE_TYPE_OF_DTYPE = {
    "u1": "UINT8",
    "i1": "INT8",
    "u2": "UINT16",
    "i2": "INT16",
    "u4": "UINT32",
    "i4": "INT32",
    "f4": "FLOAT32",
    "b1": "BOOL",
    "u8": "UINT64",
    "i8": "INT64",
    "f8": "FLOAT64",
}


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: TensorValue) -> None:
    if isinstance(tensor, np.ndarray):
        writer.add_tensor(name, tensor)
        return
    tensor_type, shape, data = tensor
    row_bytes = BLOCK_SIZES[tensor_type].row_bytes(shape[-1])
    blocks = np.frombuffer(data, np.uint8).reshape(*shape[:-1], row_bytes)
    writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType(int(tensor_type)))


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: bytes | str, length: int | None = None) -> bytes:
    """Encode a GGUF string; ``length`` overrides the stored length."""
    data = text.encode() if isinstance(text, str) else text
    return u64(len(data) if length is None else length) + data


def array(element_type: int, elements: Sequence[bytes], length: int | None = None) -> bytes:
    """Encode a GGUF array of encoded elements, without the preceding value type 9."""
    return u32(element_type) + u64(len(elements) if length is None else length) + b"".join(elements)


def key(name: bytes | str, value_type: int, value: bytes) -> bytes:
    """Encode a metadata key with an encoded value."""
    return string(name) + u32(value_type) + value


ARCHITECTURE_KEY = key("general.architecture", 8, string("llama"))


@dataclass
class RawTensor:
    """A tensor in the table and the data section; None means the correct value.

    Attributes:
        dims: in the file's order, columns first.
        data: bytes in the data section, before padding.
    """

    name: bytes | str
    dims: Sequence[int]
    data: bytes
    type: int = 0
    n_dims: int | None = None
    offset: int | None = None


@dataclass
class RawGGUF:
    """A GGUF file with fields that can be falsified; None means the correct value.

    Attributes:
        keys: results of `key`.
        tail: bytes after the data section.
    """

    keys: Sequence[bytes] = (ARCHITECTURE_KEY,)
    tensors: Sequence[RawTensor] = ()
    magic: bytes = b"GGUF"
    version: int = 3
    n_tensors: int | None = None
    n_keys: int | None = None
    alignment: int = ALIGNMENT
    tail: bytes = field(default=b"", repr=False)

    def __bytes__(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        table, data = b"", b""
        for tensor in self.tensors:
            offset = len(data) if tensor.offset is None else tensor.offset
            table += string(tensor.name) + u32(len(tensor.dims) if tensor.n_dims is None else tensor.n_dims)
            table += b"".join(u64(n) for n in tensor.dims) + u32(tensor.type) + u64(offset)
            data += self._padded(tensor.data)
        head = self.magic + u32(self.version) + u64(n_tensors) + u64(n_keys) + b"".join(self.keys) + table
        return (self._padded(head) if self.tensors else head) + data + self.tail

    def _padded(self, data: bytes) -> bytes:
        return data + bytes(-len(data) % self.alignment)

    def write(self, path: Path) -> Path:
        path.write_bytes(bytes(self))
        return path
