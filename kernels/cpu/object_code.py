"""Links machine code without LLVM, whose import takes a tenth of the time to a first token.

A kernel's object file contains one function, its constants, and absolute addresses of the constants
(`Target.machine`).  Linking copies the code, fills in the addresses, and makes the code executable.  LLVM links all
other object files, and object files of other systems.

Source: System V ABI, chapters 4 and 5; its AMD64 supplement, section 4.4.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
#: ELF, 64 bits, little-endian, version 1; a relocatable file, for x86-64.
_IDENTITY, _RELOCATABLE, _X86_64 = b"\x7fELF\2\1\1", 1, 62
_SYMBOLS, _ADDENDS, _NO_BITS = 2, 4, 8  # section types
_ALLOCATED, _FUNCTION, _ADDRESS = 2, 2, 1
#: Debuggers use this section to walk the stack; the runtime does not need it.
_FRAMES = ".eh_frame"
_READ_EXECUTE = 5

#: Memory of linked code, kept for the lifetime of the process.
_linked: list[mmap.mmap] = []


class _Section(NamedTuple):
    """A section's header, by ELF's names."""

    name: int
    type: int
    flags: int
    addr: int
    offset: int
    size: int
    link: int
    info: int
    addralign: int
    entsize: int


class _UnknownError(ValueError):
    """An object file contains something that only LLVM can link."""


def link(objects: Sequence[tuple[str, bytes]]) -> list[int] | None:
    """Return the addresses of functions, given one object file per function; None if LLVM has to link them."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32:
        return None
    try:
        files = [_Object(symbol, code) for symbol, code in objects]
    except (ValueError, struct.error, IndexError):
        return None
    starts, end = [], 0
    for file in files:
        starts.append(end := -(-end // file.align) * file.align)
        end += file.n_bytes
    memory = mmap.mmap(-1, end, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for file, start in zip(files, starts, strict=True):
        memory[start : start + file.n_bytes] = file.at(base + start)
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(base), ctypes.c_size_t(end), _READ_EXECUTE):
        return None  # the system does not allow executable memory
    _linked.append(memory)
    return [base + start + file.entry for file, start in zip(files, starts, strict=True)]


class _Object:
    """An object file, with its sections laid out in order."""

    def __init__(self, symbol: str, code: bytes) -> None:
        identity, file_type, machine, *_, table, _, _, _, _, _, n, names = _HEADER.unpack_from(code)
        if not identity.startswith(_IDENTITY) or (file_type, machine) != (_RELOCATABLE, _X86_64):
            raise _UnknownError
        self._code = code
        sections = [_Section(*_SECTION.unpack_from(code, table + i * _SECTION.size)) for i in range(n)]
        #: Offset of each required section.
        self._places: dict[int, int] = {}
        self._sections, self.n_bytes, self.align = sections, 0, 1
        for i, section in enumerate(sections):
            if section.flags & _ALLOCATED and self._text(sections[names], section.name) != _FRAMES:
                align = max(1, section.addralign)
                if section.type == _NO_BITS or section.offset + section.size > len(code) or align > mmap.PAGESIZE:
                    raise _UnknownError
                self._places[i] = -(-self.n_bytes // align) * align
                self.n_bytes, self.align = self._places[i] + section.size, max(self.align, align)
        (table,) = (s for s in sections if s.type == _SYMBOLS)
        self._symbols = list(_SYMBOL.iter_unpack(self._content(table)))
        functions = {self._text(sections[table.link], s[0]): s for s in self._symbols if s[1] & 15 == _FUNCTION}
        if symbol not in functions:
            raise _UnknownError
        self.entry = self._place(functions[symbol])
        #: (offset of the address, offset that it refers to)
        self._addresses = [
            self._address(s.info, *relocation)
            for s in sections
            if s.type == _ADDENDS and s.info in self._places
            for relocation in _RELOCATION.iter_unpack(self._content(s))
        ]

    def _address(self, section: int, offset: int, info: int, addend: int) -> tuple[int, int]:
        if info & 0xFFFF_FFFF != _ADDRESS or offset + 8 > self._sections[section].size:
            raise _UnknownError
        return self._places[section] + offset, self._place(self._symbols[info >> 32]) + addend

    def _content(self, section: _Section) -> bytes:
        return self._code[section.offset : section.offset + section.size]

    def _text(self, strings: _Section, at: int) -> str:
        begin = strings.offset + at
        return self._code[begin : self._code.index(0, begin)].decode()

    def _place(self, symbol: tuple[int, ...]) -> int:
        _, _, _, section, value, _ = symbol
        if section not in self._places:  # an undefined symbol
            raise _UnknownError
        return self._places[section] + value

    def at(self, base: int) -> bytes:
        """Return the bytes of the file, linked for address ``base``."""
        image = bytearray(self.n_bytes)
        for i, offset in self._places.items():
            section = self._sections[i]
            image[offset : offset + section.size] = self._content(section)
        for offset, target in self._addresses:
            struct.pack_into("<Q", image, offset, base + target)
        return bytes(image)
