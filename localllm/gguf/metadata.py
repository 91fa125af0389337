"""Keys and typed values of a GGUF file. Part of `localllm.gguf`."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from localllm.errors import quoted
from localllm.gguf import limits
from localllm.gguf.cursor import Cursor, StringRange, error_at
from localllm.gguf.strings import StringArray, read_strings

# Minimum bytes of an array inside an array: element type and length.
_MIN_ARRAY_BYTES = 4 + 8


#: Ids of metadata value types (``gguf_metadata_value_type``).
ValueType = IntEnum(
    "ValueType",
    "UINT8 INT8 UINT16 INT16 UINT32 INT32 FLOAT32 BOOL STRING ARRAY UINT64 INT64 FLOAT64",
    start=0,
)

#: Types of numbers and bools in a file.
DTYPES: dict[ValueType, np.dtype[Any]] = {
    type: np.dtype(type.name.lower()).newbyteorder("<")
    for type in ValueType
    if type not in (ValueType.STRING, ValueType.ARRAY)
}


MetadataValue: TypeAlias = "bool | int | float | str | NDArray[Any] | StringArray | tuple[MetadataValue, ...]"
"""A number or string; a read-only numpy array; a `StringArray`; or a tuple of these for an array of arrays."""


class Metadata(Mapping[str, MetadataValue]):
    """The file's keys and values, in the order of the file.

    Arrays of numbers and bools are read-only numpy arrays. They are views of the file if its alignment and the
    processor's byte order allow this. A string is decoded when it is read: if it is not UTF-8, reading it raises
    `GGUFError`, and `raw` returns its bytes.
    """

    __slots__ = ("_buffer", "_path", "_spans", "_values")

    def __init__(
        self,
        path: Path,
        buffer: mmap.mmap | bytes,
        values: dict[str, MetadataValue | StringRange],
        spans: dict[str, StringRange],
    ) -> None:
        self._path = path
        self._buffer = buffer
        self._values = values
        self._spans = spans

    def __getitem__(self, key: str) -> MetadataValue:
        value = self._values[key]
        if not isinstance(value, StringRange):
            return value
        try:
            return str(self._buffer[value.start : value.stop], "utf-8")
        except UnicodeDecodeError as error:
            at = value.start + error.start
            raise error_at(self._path, at, f"key {quoted(key)}", "the text is not valid UTF-8") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values  # without decoding the value, as Mapping would

    def __repr__(self) -> str:
        return f"Metadata({len(self):,} keys of {self._path.name})"

    @property
    def alignment(self) -> int:
        """``general.alignment``: alignment of the data section and of each tensor, in bytes."""
        alignment = self._values.get("general.alignment")
        return alignment if isinstance(alignment, int) else limits.DEFAULT_ALIGNMENT

    def raw(self, key: str) -> bytes:
        """Return the bytes of a string, which need not be valid UTF-8."""
        value = self._values[key]
        if not isinstance(value, StringRange):
            raise TypeError(f"the value of {key!r} is not a text")
        return self._buffer[value.start : value.stop]

    def encoded(self, key: str) -> bytes:
        """Return the bytes of a value's type and value, to copy them into another file."""
        span = self._spans[key]
        return self._buffer[span.start : span.stop]


def read_metadata(cursor: Cursor, n_keys: int) -> Metadata:
    """Read ``n_keys`` keys and values at the position of the cursor."""
    values: dict[str, MetadataValue | StringRange] = {}
    spans: dict[str, StringRange] = {}
    for i in range(n_keys):
        cursor.context = f"metadata key {i}"
        start = cursor.at
        key = cursor.name("the key", limits.MAX_KEY_BYTES)
        cursor.context = f"key {quoted(key)}"
        if key in values:
            raise cursor.error("the key occurs twice", at=start)
        start = cursor.at
        if key == "general.alignment":
            values[key] = _read_alignment(cursor)
        else:
            values[key] = _read_value(cursor, _read_value_type(cursor), key)
        spans[key] = StringRange(start, cursor.at)
    return Metadata(cursor.path, cursor.buffer, values, spans)


def _read_alignment(cursor: Cursor) -> int:
    start = cursor.at
    value_type = _read_value_type(cursor)
    if value_type is not ValueType.UINT32:
        raise cursor.error(f"the alignment is of type {value_type.name}, not UINT32", at=start)
    alignment = cursor.u32("the alignment")
    low, high = limits.MIN_ALIGNMENT, limits.MAX_ALIGNMENT
    if not low <= alignment <= high or alignment & (alignment - 1):
        raise cursor.error(f"the alignment {alignment} is not a power of two from {low} to {high}", at=start + 4)
    return alignment


def _read_value_type(cursor: Cursor) -> ValueType:
    start = cursor.at
    value_type = cursor.u32("the value type")
    try:
        return ValueType(value_type)
    except ValueError:
        raise cursor.error(f"value type {value_type} is not one of GGUF's (0 to 12)", at=start) from None


def _read_value(cursor: Cursor, value_type: ValueType, label: str) -> MetadataValue | StringRange:
    if value_type is ValueType.STRING:
        return cursor.text("the text")
    if value_type is ValueType.ARRAY:
        return _read_array(cursor, label, depth=1)
    if value_type is ValueType.BOOL:
        start = cursor.take(1, "the value")
        byte = cursor.buffer[start]
        if byte > 1:
            raise cursor.error(f"the bool is {byte}, neither 0 nor 1", at=start)
        return byte == 1
    dtype = DTYPES[value_type]
    value: int | float = np.frombuffer(cursor.buffer, dtype, 1, cursor.take(dtype.itemsize, "the value")).item()
    return value


def _read_array(cursor: Cursor, label: str, depth: int) -> MetadataValue:
    if depth > limits.MAX_NESTING:
        raise cursor.error(f"arrays are nested more than {limits.MAX_NESTING} deep")
    element_type = _read_value_type(cursor)
    if element_type is ValueType.STRING:
        return read_strings(cursor, label)
    if element_type is not ValueType.ARRAY:
        return _read_numbers(cursor, element_type)
    n = cursor.count("nested arrays", least_bytes=_MIN_ARRAY_BYTES, most=cursor.nested_arrays_left)
    cursor.nested_arrays_left -= n
    return tuple(_read_array(cursor, f"{label}[{i}]", depth + 1) for i in range(n))


def _read_numbers(cursor: Cursor, element_type: ValueType) -> NDArray[Any]:
    dtype = DTYPES[element_type]
    n = cursor.u64("the length of the array")
    start = cursor.take(n * dtype.itemsize, f"an array of {n} values of type {element_type.name}")
    if element_type is ValueType.BOOL:
        values = np.frombuffer(cursor.buffer, np.uint8, n, start)
        if n and values.max() > 1:
            i = int(np.argmax(values > 1))
            raise cursor.error(f"bool {i} of the array is {values[i]}, neither 0 nor 1", at=start + i)
    array = np.frombuffer(cursor.buffer, dtype, n, start)
    if not array.flags.aligned or not dtype.isnative:
        array = array.astype(dtype.newbyteorder("="))
        array.flags.writeable = False
    return array
