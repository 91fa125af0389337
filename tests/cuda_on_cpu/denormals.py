"""Where no denormal f32 can be: with ``.ftz`` an instruction takes and gives zeros instead of them.

Nearly all that kernels compute with was given by such an instruction, and need not be flushed again.
"""

from __future__ import annotations

import re

from tests.cuda_on_cpu.ptx import NAME, Function, Instruction

# Instructions whose result is no denormal if they are .ftz.f32 ...
_FLUSHING = {
    *("add", "sub", "mul", "fma", "neg", "abs", "min", "max"),
    *("div", "rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"),
}
# ... and those whose result is one of their inputs, by the operands that these are.
_PASSING = {"mov": (1,), "selp": (1, 2)}
_REGISTER = re.compile(NAME)


def flushed_registers(function: Function) -> frozenset[str]:
    """The registers of a function into which nothing writes a denormal f32; they start as zero."""
    flushed = set(function.registers)
    passed: list[tuple[str, Instruction]] = []
    for instruction in function.instructions():
        if _is_flushing(instruction) or not instruction.operands:
            continue
        # Only first operands are written; that stores and barriers read theirs does no harm.
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
        # From integers, and from halves, whose denormals are normal numbers here.
        return modifiers[-2] == "f32" and (modifiers[-1][0] in "us" or modifiers[-1] == "f16")
    return instruction.opcode in _FLUSHING and "ftz" in modifiers and modifiers[-1] == "f32"


def _passes(instruction: Instruction, flushed: set[str]) -> bool:
    return all(_is_safe(instruction.operands[i], flushed) for i in _PASSING[instruction.opcode])


def _is_safe(operand: str, flushed: set[str]) -> bool:
    """Whether what is moved is no denormal."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", operand):
        return int(operand[2:], 16) & 0x7F800000 != 0 or int(operand[2:], 16) & 0x7FFFFFFF == 0
    return operand in flushed
