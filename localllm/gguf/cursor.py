"""The place in a GGUF file that the parser is at: reads that never pass the end, and the errors they raise.

Every count and length is compared with the bytes that remain before anything is allocated or looped
over.  Part of `localllm.gguf`.
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
    """Where the bytes of a string lie in the file."""

    start: int
    stop: int


class Cursor:
    """A place in the file that moves forward and never past the end."""

    def __init__(self, path: Path, buffer: mmap.mmap | bytes) -> None:
        self.path = path
        self.buffer = buffer
        self.at = 0  # the place, in bytes from the start
        self.end = len(buffer)  # the size of the file
        self.context = "header"  # the key or tensor at hand, for error texts
        self.strings_left = limits.MAX_STRINGS  # how many strings may still come in arrays
        self.nested_arrays_left = limits.MAX_NESTED_ARRAYS  # how many arrays may still come inside arrays

    def error(self, defect: str, *, at: int | None = None, advice: str = DAMAGED) -> LocalLLMError:
        """A `GGUFError` that names the file, the byte (here, or ``at``), the context and the defect."""
        return error_at(self.path, self.at if at is None else at, self.context, defect, advice)

    def take(self, n_bytes: int, what: str) -> int:
        """Step over ``n_bytes`` and return where they begin."""
        start = self.at
        if n_bytes > self.end - start:
            raise self.error(f"{what} takes {n_bytes} bytes but {self.end - start} are left")
        self.at = start + n_bytes
        return start

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.buffer, self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.buffer, self.take(8, what))[0]
        return value

    def count(self, what: str, *, least_bytes: int, most: int) -> int:
        """A u64 number of entries of at least ``least_bytes`` each, which fit into what is left."""
        start = self.at
        n = self.u64(f"the number of {what}")
        left = self.end - self.at
        if n * least_bytes > left:
            raise self.error(f"{n} {what} cannot be in the {left} bytes that are left", at=start)
        if n > most:
            raise self.error(f"{n} {what} are more than localllm takes ({most})", at=start)
        return n

    def text(self, what: str) -> StringRange:
        """A string, of which only the length is looked at."""
        length = self.u64(f"the length of {what}")
        start = self.take(length, what)
        return StringRange(start, self.at)

    def name(self, what: str, longest: int) -> str:
        """A string that must be UTF-8, not empty, and at most ``longest`` bytes."""
        start = self.at
        text = self.text(what)
        length = text.stop - text.start
        if not 0 < length <= longest:
            raise self.error(f"{what} has {length} bytes but must have 1 to {longest}", at=start)
        try:
            return str(self.buffer[text.start : text.stop], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not valid UTF-8", at=text.start + error.start) from None


def error_at(path: Path, at: int, context: str, defect: str, advice: str = DAMAGED) -> GGUFError:
    """A `GGUFError` that names the file, the byte, the key or tensor, the defect, and what to do."""
    return GGUFError(f"{path_text(path)}: byte {at}, {context}: {defect}; {advice}")


def align(offset: int, alignment: int) -> int:
    """The first multiple of ``alignment`` from ``offset`` on."""
    return -(-offset // alignment) * alignment
