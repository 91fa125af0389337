"""Arrays of strings in GGUF metadata: indexed in one pass, decoded when they are read.

Part of `localllm.gguf`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from localllm.errors import quoted
from localllm.gguf.cursor import Cursor, error_at

# Bytes of a string's length, and therefore the minimum bytes of a string.
_LENGTH_BYTES = _MIN_STRING_BYTES = 8

# Bytes that are indexed at a time: enough to outweigh numpy's cost per call, few enough to stay in cache.
# Near the end of an array, the chunk is limited to the likely bytes of the remaining strings.
_CHUNK = 1 << 17
_LIKELY_STRING_BYTES = 32

_U64 = struct.Struct("<Q")


class StringArray(Sequence[str]):
    """A metadata array of strings. A string is decoded from the file when it is read.

    Indexing, slicing and iterating return ``str``. They raise `GGUFError` with the key and the index if a string is
    not UTF-8. `raw` and `raw_all` return the bytes in the file.
    """

    __slots__ = ("_bounds", "_buffer", "_label", "_path")

    def __init__(self, path: Path, label: str, buffer: mmap.mmap | bytes, bounds: NDArray[np.int64]) -> None:
        self._path = path
        self._label = label
        self._buffer = buffer
        # String i, with its 8 bytes of length, is stored at bounds[i] : bounds[i + 1] in the file.
        self._bounds = bounds

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __repr__(self) -> str:
        return f"StringArray({self._label!r}, {len(self):,} strings)"

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        return self._decode(self.raw(index), index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded_together() or [self._decode(string, i) for i, string in enumerate(self.raw_all())])

    def _decoded_together(self) -> list[str] | None:
        """Return all strings, decoded together with zero bytes in place of their lengths; None if this is impossible.

        Every start reads the whole vocabulary, and a loop over 300,000 strings takes three times as long.
        """
        start, n_bytes = int(self._bounds[0]), int(self._bounds[-1] - self._bounds[0])
        text = np.frombuffer(self._buffer, np.uint8, n_bytes, start).copy()
        for i in range(_LENGTH_BYTES):
            text[self._bounds[:-1] - start + i] = 0
        if n_bytes - np.count_nonzero(text) != _LENGTH_BYTES * len(self):  # strings contain zero bytes
            return None
        try:
            return text.tobytes().decode().split("\0" * _LENGTH_BYTES)[1:]
        except UnicodeDecodeError:
            return None

    def raw(self, index: int) -> bytes:
        """Return the bytes of string ``index``, which need not be valid UTF-8."""
        index = range(len(self))[index]
        return self._buffer[int(self._bounds[index]) + 8 : int(self._bounds[index + 1])]

    def raw_all(self) -> list[bytes]:
        """Return the bytes of every string."""
        buffer = self._buffer
        return [buffer[start + 8 : stop] for start, stop in pairwise(self._bounds.tolist())]

    def _decode(self, string: bytes, index: int) -> str:
        try:
            return str(string, "utf-8")
        except UnicodeDecodeError as error:
            at = int(self._bounds[index]) + 8 + error.start
            defect = f"string {index} is not valid UTF-8"
            raise error_at(self._path, at, f"key {quoted(self._label)}", defect) from None


def read_strings(cursor: Cursor, label: str) -> StringArray:
    """Read the length of an array of strings, and skip the strings."""
    n = cursor.count("strings", least_bytes=_MIN_STRING_BYTES, most=cursor.strings_left)
    cursor.strings_left -= n
    return StringArray(cursor.path, label, cursor.buffer, _string_bounds(cursor, n))


def _string_bounds(cursor: Cursor, n: int) -> NDArray[np.int64]:
    """Skip ``n`` strings. Returns the start of each string (at its length), and the end of the last one.

    Each length determines the start of the next string, so a plain loop costs a few hundred nanoseconds of Python per
    string: 0.1 s and more for a real vocabulary. Instead, `_likely_strings` guesses the lengths in a whole chunk from
    their zero bytes and keeps the guesses that the chain of lengths confirms. A loop reads the rest of the chunk.
    Thus every chunk is read at most twice, for any contents.
    """
    bounds = np.empty(n + 1, np.int64)
    n_read = 0
    while n_read < n:
        chunk_end = min(cursor.at + min(_CHUNK, (n - n_read) * _LIKELY_STRING_BYTES), cursor.end)
        likely = _likely_strings(cursor, n - n_read, chunk_end)
        bounds[n_read : n_read + len(likely)] = likely
        n_read += len(likely)
        walked = _walk_strings(cursor, n_read, n - n_read, chunk_end)
        bounds[n_read : n_read + len(walked)] = walked
        n_read += len(walked)
    bounds[n] = cursor.at
    return bounds


def _likely_strings(cursor: Cursor, most: int, chunk_end: int) -> NDArray[np.int64]:
    """Skip fewer than ``most`` strings that end before ``chunk_end``. Returns their starts.

    Text has no zero bytes, and a length under 65,536 ends in six zero bytes. Therefore a length probably ends where a
    run of zero bytes ends. A guess is used only if the previous string ends at its start.
    """
    start = cursor.at
    n = chunk_end - start
    if n < 2 * _MIN_STRING_BYTES:
        return np.empty(0, np.int64)
    zero = np.frombuffer(cursor.buffer, np.uint8, n, start) == 0
    guesses = np.flatnonzero(zero[:-1] & ~zero[1:]) - 7
    guesses = guesses[guesses >= 0]
    # The eight bytes at every position of the chunk as integers: an overlapping view, without a copy.
    numbers = np.ndarray((n - 7,), "<u8", cursor.buffer, start, (1,))
    guesses = guesses[numbers[guesses] < 65_536][:most]
    if len(guesses) < 2 or guesses[0] != 0:
        return np.empty(0, np.int64)
    ends = guesses[:-1] + 8 + numbers[guesses[:-1]].astype(np.int64)
    confirmed = ends == guesses[1:]
    n_confirmed = len(confirmed) if confirmed.all() else int(np.argmin(confirmed))
    cursor.at = start + int(guesses[n_confirmed])
    return guesses[:n_confirmed] + start


def _walk_strings(cursor: Cursor, first: int, most: int, chunk_end: int) -> list[int]:
    """Skip at most ``most`` strings that start before ``chunk_end`` one by one. Returns their starts.

    ``first`` is the index of the first string, for errors.
    """
    starts: list[int] = []
    buffer, at, end = cursor.buffer, cursor.at, cursor.end
    stop = min(chunk_end, end - 7)  # after the last position where a length can start
    while at < stop and len(starts) < most:
        starts.append(at)
        at += 8 + _U64.unpack_from(buffer, at)[0]
    if at > end:
        start = starts[-1]
        index, n_remaining = first + len(starts) - 1, end - start - 8
        raise cursor.error(f"string {index} takes {at - start - 8} bytes but {n_remaining} are left", at=start)
    cursor.at = at
    if at > end - _MIN_STRING_BYTES and len(starts) < most:
        index = first + len(starts)
        raise cursor.error(f"the length of string {index} takes 8 bytes but {end - at} are left")
    return starts
