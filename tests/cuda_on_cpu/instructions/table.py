"""The table of instructions, and the parts of an instruction that its translation uses.

A handler removes each modifier that it supports from the instruction.  The translator refuses an instruction with
modifiers left, so an unknown variant is an error and never a wrong result.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.cuda_on_cpu.errors import UnsupportedInstruction
from tests.cuda_on_cpu.ptx import NAME, TYPE_BYTES, Instruction, split_operands

# C++ types of computations with a PTX type.  16-bit floats stay bits, which rounding.h computes with.
C_TYPES = {
    "pred": "bool",
    **{f"{kind}{bits}": f"{'s' if kind == 's' else 'u'}{bits}" for kind in "bus" for bits in (8, 16, 32, 64)},
    "f16": "u16",
    "bf16": "u16",
    "f16x2": "u32",
    "bf16x2": "u32",
    "tf32": "u32",
    "f32": "f32",
    "f64": "f64",
}
_SPECIAL_REGISTERS = {
    "%laneid": "(u32)current->lane",
    "%warpid": "(u32)current->warp",
    "%nwarpid": "((block_size.x * block_size.y * block_size.z + 31) / 32)",
    "%lanemask_eq": "(1u << current->lane)",
    "%lanemask_lt": "((1u << current->lane) - 1)",
    "%lanemask_le": "((2u << current->lane) - 1)",
    "%lanemask_gt": "(~((2u << current->lane) - 1))",
    "%lanemask_ge": "(~((1u << current->lane) - 1))",
    "%dynamic_smem_size": "(u32)(shared_bytes - static_shared_bytes)",
    "%total_smem_size": "(u32)shared_bytes",
    "WARP_SZ": "32u",
}
_INTEGER = re.compile(r"(\d+|0[xX][0-9a-fA-F]+)U?")
_SPECIAL_VECTORS = {"tid": "current->id", "ntid": "block_size", "ctaid": "block_id", "nctaid": "grid_size"}


@dataclass
class Names:
    """The C++ counterparts of the names in a function."""

    registers: dict[str, str]  # name -> PTX type
    shared: dict[str, str] = field(default_factory=dict)  # name -> offset in shared memory
    addresses: dict[str, str] = field(default_factory=dict)  # other variables and parameters -> address
    labels: dict[str, str] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    flushed: frozenset[str] = frozenset()  # registers that never hold a denormal f32


def mangle(name: str) -> str:
    """Return a C++ identifier that is unique in the generated code."""
    return "v_" + re.sub(r"\W", lambda match: f"_{ord(match[0]):x}_", name.lstrip("%"))


def register_type(type_: str) -> str:
    """Return the C++ type of a register; "" for other names."""
    return "bool" if type_ == "pred" else f"u{max(16, 8 * TYPE_BYTES[type_])}" if type_ else ""


def _float_bits(number: float, type_: str) -> int:
    return int.from_bytes(struct.pack("<f" if type_ == "f32" else "<d", number), "little")


class Operation:
    """One instruction during its translation to C++."""

    def __init__(self, instruction: Instruction, names: Names, site: int, is_backward: Callable[[str], bool]) -> None:
        self.instruction = instruction
        self.names = names
        self.site = site
        self.modifiers = list(instruction.modifiers)
        self.operands = list(instruction.operands)
        self.is_backward = is_backward  # whether a label precedes this instruction

    def refuse(self, why: str) -> UnsupportedInstruction:
        place = f" ({self.instruction.location})" if self.instruction.location else ""
        return UnsupportedInstruction(f"{why}: {self.instruction.text}{place}")

    # ---- modifiers
    def flag(self, name: str) -> bool:
        """Remove a modifier; return whether it was present."""
        if name not in self.modifiers:
            return False
        self.modifiers.remove(name)
        return True

    def choice(self, *names: str, default: str | None = None) -> str:
        """Remove the modifier that is present, of several; return it."""
        for name in names:
            if self.flag(name):
                return name
        if default is None:
            raise self.refuse(f"one of .{', .'.join(names)} was expected")
        return default

    def ignore(self, *names: str) -> None:
        """Remove modifiers without effect here, such as cache hints and scopes."""
        for name in names:
            self.flag(name)

    def type(self, *allowed: str) -> str:
        """Remove and return the last modifier, which must be one of these types."""
        if not self.modifiers or self.modifiers[-1] not in allowed:
            raise self.refuse(f"the type is none of {', '.join(allowed)}")
        return self.modifiers.pop()

    def count(self, *allowed: int) -> None:
        if len(self.operands) not in allowed:
            raise self.refuse(f"{len(self.operands)} operands")

    def finish(self) -> None:
        if self.modifiers:
            raise self.refuse(f".{' .'.join(self.modifiers)} is not known")

    # ---- operands
    def value(self, operand: str, type_: str) -> str:
        """Return a C++ expression for the value of an operand as ``type_``."""
        if operand.startswith("!"):
            return f"(!{self.value(operand[1:], 'pred')})"
        if re.match(r"-?[\d.]|0[xXfFdD]", operand):
            return self._literal(operand, type_)
        raw = self._raw(operand)
        if type_ == "f32":
            return f"f32_of({raw})"
        if type_ == "f64":
            return f"f64_of({raw})"
        has_type = type_ == "pred" or C_TYPES[type_] == register_type(self.names.registers.get(operand, ""))
        return raw if has_type else f"(({C_TYPES[type_]})({raw}))"

    def read(self, index: int, type_: str, flush: bool = False) -> str:
        operand = self.operands[index]
        value = self.value(operand, type_)
        return f"flush({value})" if flush and operand not in self.names.flushed else value

    def number(self, index: int) -> int | None:
        """Return the value of an integer literal, or None."""
        match = _INTEGER.fullmatch(self.operands[index])
        return int(match[1], 0) if match else None

    def _raw(self, name: str) -> str:
        if name in self.names.registers:
            return mangle(name)
        vector = re.fullmatch(r"%(n?(?:tid|ctaid))\.([xyz])", name)
        if vector:
            return f"{_SPECIAL_VECTORS[vector[1]]}.{vector[2]}"
        for table in (_SPECIAL_REGISTERS, self.names.shared, self.names.addresses):
            if name in table:
                return table[name]
        raise self.refuse(f"{name} is not known")

    def _literal(self, text: str, type_: str) -> str:
        is_float = type_ in ("f32", "f64")
        if re.match(r"0[fFdD]", text):
            bits = int(text[2:], 16)
            if is_float:
                number = struct.unpack(">f" if len(text) == 10 else ">d", bytes.fromhex(text[2:]))[0]
                bits = _float_bits(number, type_)
        elif is_float:
            if "." not in text:
                raise self.refuse("an integer where a float belongs")
            bits = _float_bits(float(text), type_)
        else:
            bits = int(text.rstrip("U"), 0)
        if is_float:
            return f"{type_}_of(0x{bits:x}ull)"
        width = 8 * TYPE_BYTES[type_]
        return f"(({C_TYPES[type_]})0x{bits & ((1 << width) - 1):x}{'ull' if width == 64 else 'u'})"

    def write(self, operand: str, type_: str, value: str) -> str:
        """Return a C++ statement that stores a value of ``type_`` in a register, extended by its sign if wider."""
        if operand == "_":
            return f"(void)({value});"
        if operand not in self.names.registers:
            raise self.refuse(f"{operand} is no register")
        if type_ in ("f32", "f64"):
            return f"{mangle(operand)} = bits_of(({type_})({value}));"
        return f"{mangle(operand)} = ({C_TYPES[type_]})({value});"

    def result(self, type_: str, value: str, flush: bool = False) -> str:
        """Return a C++ statement that writes the first operand."""
        return self.write(self.operands[0], type_, f"flush({value})" if flush else value)

    def vector(self, operand: str) -> list[str]:
        """Return the elements of ``{a, b}``, or one register."""
        return split_operands(operand[1:-1]) if operand.startswith("{") else [operand]

    def address(self, operand: str, space: str) -> str:
        """Return a C++ expression for the generic address of ``[base + offset]``."""
        match = re.fullmatch(rf"\[\s*({NAME}|\d\w*)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        if match is None:
            raise self.refuse(f"address {operand} not understood")
        base = self.value(match[1], "u64")
        offset = int(match[2] or "0", 0)
        place = f"{base} + (s64){offset}" if offset else base
        return f"shared_address({place})" if space == "shared" else f"({place})"


Handler = Callable[[Operation], str]
HANDLERS: dict[str, Handler] = {}


def translates(*opcodes: str) -> Callable[[Handler], Handler]:
    """Register a function that returns the C++ statement for instructions of these opcodes."""

    def enter(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(opcodes, handler))
        return handler

    return enter
