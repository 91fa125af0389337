"""Find registers that never hold a denormal f32, because instructions with ``.ftz`` read and write zeros instead.

Kernels write nearly all of their values with such instructions, so most values need not be flushed again.
"""

from __future__ import annotations

import re

from tests.cuda_on_cpu.ptx import NAME, Function, Instruction

# Instructions with .ftz.f32 whose result is never a denormal ...
_FLUSHING = {
    *("add", "sub", "mul", "fma", "neg", "abs", "min", "max"),
    *("div", "rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"),
}
# ... and instructions whose result is one of these operands.
_PASSING = {"mov": (1,), "selp": (1, 2)}
_REGISTER = re.compile(NAME)


def flushed_registers(function: Function) -> frozenset[str]:
    """Return the registers of a function that never hold a denormal f32; registers start as zero."""
    flushed = set(function.registers)
    passed: list[tuple[str, Instruction]] = []
    for instruction in function.instructions():
        if _is_flushing(instruction) or not instruction.operands:
            continue
        # An instruction writes only its first operand.  Stores and barriers read theirs, which is harmless here.
        written = _REGISTER.findall(instruction.operands[0])
        if instruction.opcode in _PASSING and len(written) == 1:
            passed.append((written[0], instruction))
        else:
            flushed.difference_update(written)
    while lost := {name for name, instruction in passed if name in flushed and not _passes(instruction, flushed)}:
        flushed -= lost
    return frozenset(flushed)


def _is_flushing(instruction: Instruction) -> bool:
    modifiers = instruction.modifiers
    if instruction.opcode == "cvt" and len(modifiers) >= 2:
        # Results from integers, and from float16, whose denormals are normal numbers in f32.
        return modifiers[-2] == "f32" and (modifiers[-1][0] in "us" or modifiers[-1] == "f16")
    return instruction.opcode in _FLUSHING and "ftz" in modifiers and modifiers[-1] == "f32"


def _passes(instruction: Instruction, flushed: set[str]) -> bool:
    return all(_is_safe(instruction.operands[i], flushed) for i in _PASSING[instruction.opcode])


def _is_safe(operand: str, flushed: set[str]) -> bool:
    """Return whether the moved value is never a denormal."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
        return int(operand[2:], 16) & 0x7F800000 != 0 or int(operand[2:], 16) & 0x7FFFFFFF == 0
    return operand in flushed
