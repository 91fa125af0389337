"""A position in a GGUF file for the parser: reads that never pass the end, and errors that name the position.

Every count and length is compared with the remaining bytes before anything is allocated or looped over.
Part of `localllm.gguf`.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import GGUFError, LocalLLMError, path_text
from localllm.gguf import limits

DAMAGED = "the file is cut short or damaged, download or convert it again"

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class StringRange:
    """Start and stop of a string's bytes in the file."""

    start: int
    stop: int


class Cursor:
    """A position in the file that moves forward and never past the end."""

    def __init__(self, path: Path, buffer: mmap.mmap | bytes) -> None:
        self.path = path
        self.buffer = buffer
        self.at = 0  # bytes from the start of the file
        self.end = len(buffer)  # size of the file in bytes
        self.context = "header"  # current key or tensor, for errors
        self.strings_left = limits.MAX_STRINGS  # maximum number of further strings in arrays
        self.nested_arrays_left = limits.MAX_NESTED_ARRAYS  # maximum number of further arrays inside arrays

    def error(self, defect: str, *, at: int | None = None, advice: str = DAMAGED) -> LocalLLMError:
        """Return a `GGUFError` with the file, the byte (``at``, or the position), the context and the defect."""
        return error_at(self.path, self.at if at is None else at, self.context, defect, advice)

    def take(self, n_bytes: int, label: str) -> int:
        """Skip ``n_bytes`` and return their start."""
        start = self.at
        if n_bytes > self.end - start:
            raise self.error(f"{label} takes {n_bytes} bytes but {self.end - start} are left")
        self.at = start + n_bytes
        return start

    def u32(self, label: str) -> int:
        value: int = _U32.unpack_from(self.buffer, self.take(4, label))[0]
        return value

    def u64(self, label: str) -> int:
        value: int = _U64.unpack_from(self.buffer, self.take(8, label))[0]
        return value

    def count(self, label: str, *, least_bytes: int, most: int) -> int:
        """Read a u64 number of entries of at least ``least_bytes`` each, which must fit into the remaining bytes."""
        start = self.at
        n = self.u64(f"the number of {label}")
        remaining = self.end - self.at
        if n * least_bytes > remaining:
            raise self.error(f"{n} {label} cannot be in the {remaining} bytes that are left", at=start)
        if n > most:
            raise self.error(f"{n} {label} are more than localllm takes ({most})", at=start)
        return n

    def text(self, label: str) -> StringRange:
        """Read the length of a string and skip its bytes."""
        length = self.u64(f"the length of {label}")
        start = self.take(length, label)
        return StringRange(start, self.at)

    def name(self, label: str, longest: int) -> str:
        """Read a string that must be UTF-8, not empty, and at most ``longest`` bytes."""
        start = self.at
        text = self.text(label)
        length = text.stop - text.start
        if not 0 < length <= longest:
            raise self.error(f"{label} has {length} bytes but must have 1 to {longest}", at=start)
        try:
            return str(self.buffer[text.start : text.stop], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{label} is not valid UTF-8", at=text.start + error.start) from None


def error_at(path: Path, at: int, context: str, defect: str, advice: str = DAMAGED) -> GGUFError:
    """Return a `GGUFError` that names the file, the byte, the key or tensor, the defect, and a remedy."""
    return GGUFError(f"{path_text(path)}: byte {at}, {context}: {defect}; {advice}")


def align(offset: int, alignment: int) -> int:
    """Return the first multiple of ``alignment`` that is at least ``offset``."""
    return -(-offset // alignment) * alignment
