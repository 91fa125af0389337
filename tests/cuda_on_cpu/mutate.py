"""Kernels with one mistake planted: each must be caught by the kernel's tests, by a wrong result or in check mode.

A mutation is made in the PTX, so that nothing of the kernel's source has to be known.  ``survivors`` does the whole
work for a kernel whose test can be written as one function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tests.cuda_on_cpu.errors import KernelFault
from tests.cuda_on_cpu.module import ORDERS, EmulatedModule, Order
from tests.cuda_on_cpu.ptx import Instruction, parse, split_operands

# Instructions whose first two inputs cannot be swapped without a difference.
_NOT_COMMUTATIVE = ("sub", "div", "rem", "shl", "shr", "selp", "prmt")
_COMPARISONS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}
_COMPARISONS |= {"lo": "ls", "ls": "lo", "hi": "hs", "hs": "hi"}


Trial = Callable[[EmulatedModule, str, Order], bool]


@dataclass(frozen=True)
class Mutation:
    """A module's PTX with one mistake; ``kind``: ``barrier wait operands fragments comparison``."""

    kind: str
    kernel: str
    description: str
    ptx: str
    function: str  # the text of the mutated kernel alone


def mutations(ptx: str, kernel: str | None = None) -> list[Mutation]:
    """Every mutation of a module, or of one of its kernels, in the order of the text.

    * each ``bar.sync`` and ``bar.warp.sync`` dropped;
    * each ``cp.async.wait_group n`` made ``n + 1``, each ``wait_all`` dropped;
    * the inputs of each subtraction, division, shift, selection and byte permutation swapped;
    * registers of the A and B fragments of each ``mma`` swapped;
    * the comparison of each ``setp`` made the one beside it (< and <=, == and !=).
    """
    found = []
    for function in parse(ptx).functions:
        if kernel is not None and function.name != kernel:
            continue
        for instruction in function.instructions():
            for kind, change, text in _mistakes(instruction):
                where = f"{instruction.location or function.name}"
                description = f"{change} in `{instruction.text}` ({where})"
                start, end = instruction.span
                before, after = ptx[:start] + text, ptx[end:]
                first, last = function.span
                mutated = before[first:] + ptx[end:last]
                found.append(Mutation(kind, function.name, description, before + after, mutated))
    return found


def combine(ptx: str, chosen: Sequence[Mutation]) -> str:
    """One module, and so one build, with the mutated kernels beside the right ones; see ``name_in_combination``."""
    copies = [
        re.sub(rf"\b{mutation.kernel}\b(?!\w)", name_in_combination(mutation, i), mutation.function, count=1)
        for i, mutation in enumerate(chosen)
    ]
    end = max(function.span[1] for function in parse(ptx).functions)
    return "\n".join([ptx[:end], *copies, ptx[end:]])


def name_in_combination(mutation: Mutation, index: int) -> str:
    return f"{mutation.kernel}_mutation_{index}"


def survivors(ptx: str, chosen: Sequence[Mutation], is_right: Trial) -> list[str]:
    """Runs each mutation in check mode under all orders; gives the descriptions of those that nothing caught.

    ``is_right(module, kernel, order)`` launches the kernel of that name and says whether its results are right.
    """
    module = EmulatedModule(combine(ptx, chosen), "check")
    names = [name_in_combination(mutation, i) for i, mutation in enumerate(chosen)]
    return [
        mutation.description
        for mutation, name in zip(chosen, names, strict=True)
        if all(_passes(module, name, order, is_right) for order in ORDERS)
    ]


def _passes(module: EmulatedModule, kernel: str, order: Order, is_right: Trial) -> bool:
    try:
        return is_right(module, kernel, order)
    except KernelFault:
        return False


def _mistakes(instruction: Instruction) -> Iterator[tuple[str, str, str]]:
    """(kind, what was done, the text in its place)"""
    for mistake in _MISTAKES:
        yield from mistake(instruction)


def _write(instruction: Instruction, name: str, operands: list[str]) -> str:
    predicate = ""
    if instruction.predicate is not None:
        predicate = instruction.text.split(maxsplit=1)[0] + " "
    return f"{predicate}{name} {', '.join(operands)};"


def _name(instruction: Instruction) -> str:
    return ".".join((instruction.opcode, *instruction.modifiers))


def _operands(instruction: Instruction) -> list[str]:
    """As they stand in the text (those of the record are renamed)."""
    text = instruction.text
    if instruction.predicate is not None:
        text = text.split(maxsplit=1)[1]
    return split_operands(text.partition(" ")[2])


def _dropped_barrier(instruction: Instruction) -> Iterator[tuple[str, str, str]]:
    if instruction.opcode in ("bar", "barrier") and "sync" in instruction.modifiers:
        yield "barrier", "dropped", ";"


def _weaker_wait(instruction: Instruction) -> Iterator[tuple[str, str, str]]:
    if instruction.opcode != "cp":
        return
    if "wait_all" in instruction.modifiers:
        yield "wait", "dropped", ";"
    if "wait_group" in instruction.modifiers:
        left = int(instruction.operands[0], 0)
        yield "wait", f"waits for all but {left + 1}", _write(instruction, _name(instruction), [str(left + 1)])


def _swapped_operands(instruction: Instruction) -> Iterator[tuple[str, str, str]]:
    operands = _operands(instruction)
    if instruction.opcode not in _NOT_COMMUTATIVE or operands[1] == operands[2]:
        return
    operands[1], operands[2] = operands[2], operands[1]
    yield "operands", "inputs swapped", _write(instruction, _name(instruction), operands)


def _swapped_fragments(instruction: Instruction) -> Iterator[tuple[str, str, str]]:
    if instruction.opcode != "mma":
        return
    operands = _operands(instruction)
    for index, matrix in ((1, "A"), (2, "B")):
        registers = split_operands(operands[index].strip("{}"))
        if len(registers) < 2 or registers[0] == registers[1]:
            continue
        registers[0], registers[1] = registers[1], registers[0]
        changed = [*operands[:index], "{" + ", ".join(registers) + "}", *operands[index + 1 :]]
        yield "fragments", f"registers of {matrix} swapped", _write(instruction, _name(instruction), changed)


def _other_comparison(instruction: Instruction) -> Iterator[tuple[str, str, str]]:
    if instruction.opcode != "setp" or instruction.modifiers[0] not in _COMPARISONS:
        return
    comparison = _COMPARISONS[instruction.modifiers[0]]
    changed = replace(instruction, modifiers=(comparison, *instruction.modifiers[1:]))
    yield "comparison", f"made {comparison}", _write(instruction, _name(changed), _operands(instruction))


_MISTAKES: tuple[Callable[[Instruction], Iterator[tuple[str, str, str]]], ...] = (
    _dropped_barrier,
    _weaker_wait,
    _swapped_operands,
    _swapped_fragments,
    _other_comparison,
)
