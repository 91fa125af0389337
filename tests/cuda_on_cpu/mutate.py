"""Kernels with one mistake planted: each must be caught by the kernel's tests, by a wrong result or in check mode.

A mistake is made in the PTX, so that nothing of the kernel's source has to be known.  One build has all mistakes of a
module, and a number that says which one is made (`EmulatedModule.mutation`).  ``survivors`` does the whole work for a
kernel whose test can be written as one function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tests.cuda_on_cpu.errors import KernelFault
from tests.cuda_on_cpu.module import ORDERS, EmulatedModule, Order
from tests.cuda_on_cpu.ptx import Instruction, parse, split_operands

# Instructions whose first two inputs cannot be swapped without a difference.
_NOT_COMMUTATIVE = ("sub", "div", "rem", "shl", "shr", "selp", "prmt")
_COMPARISONS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}
_COMPARISONS |= {"lo": "ls", "ls": "lo", "hi": "hs", "hs": "hi"}


#: Of a kernel that may never end.
STEP_LIMIT = 1 << 14

Trial = Callable[[EmulatedModule, str, Order], bool]


@dataclass(frozen=True)
class Mutation:
    """A mistake; ``kind``: ``barrier wait operands fragments comparison``.

    ``after`` stands in the place of the instruction ``before``; None: nothing does.
    """

    kind: str
    kernel: str
    change: str
    before: Instruction
    after: Instruction | None

    def __str__(self) -> str:
        return f"{self.change} in `{self.before.text}` ({self.before.location or self.kernel})"


def mutations(ptx: str, kernel: str | None = None) -> list[Mutation]:
    """Every mutation of a module, or of one of its kernels, in the order of the text.

    * each ``bar.sync`` and ``bar.warp.sync`` dropped;
    * each ``cp.async.wait_group n`` made ``n + 1``, each ``wait_all`` dropped;
    * the inputs of each subtraction, division, shift, selection and byte permutation swapped;
    * registers of the A and B fragments of each ``mma`` swapped;
    * the comparison of each ``setp`` made the one beside it (< and <=, == and !=).
    """
    return [
        Mutation(kind, function.name, change, instruction, after)
        for function in parse(ptx).functions
        if kernel in (None, function.name)
        for instruction in function.instructions()
        for mistake in _MISTAKES
        for kind, change, after in mistake(instruction)
    ]


def plant(ptx: str, chosen: Sequence[Mutation]) -> EmulatedModule:
    """A module in check mode with mutations, which are numbered from 1 on."""
    planted: dict[tuple[int, int], list[tuple[int, Instruction | None]]] = {}
    for number, mutation in enumerate(chosen, start=1):
        planted.setdefault(mutation.before.span, []).append((number, mutation.after))
    return EmulatedModule(ptx, "check", planted=planted, step_limit=STEP_LIMIT)


def survivors(ptx: str, chosen: Sequence[Mutation], is_right: Trial) -> list[str]:
    """Runs each mutation in check mode under all orders; gives the descriptions of those that nothing caught.

    ``is_right(module, kernel, order)`` launches the kernel of that name and says whether its results are right.
    """
    module = plant(ptx, chosen)
    found = []
    for module.mutation, mutation in enumerate(chosen, start=1):
        if all(_passes(module, mutation.kernel, order, is_right) for order in ORDERS):
            found.append(str(mutation))
    return found


def _passes(module: EmulatedModule, kernel: str, order: Order, is_right: Trial) -> bool:
    try:
        return is_right(module, kernel, order)
    except KernelFault:
        return False


#: (kind, what was done, the instruction in its place)
Mistake = tuple[str, str, Instruction | None]


def _dropped_barrier(instruction: Instruction) -> Iterator[Mistake]:
    if instruction.opcode in ("bar", "barrier") and "sync" in instruction.modifiers:
        yield "barrier", "dropped", None


def _weaker_wait(instruction: Instruction) -> Iterator[Mistake]:
    if instruction.opcode != "cp":
        return
    if "wait_all" in instruction.modifiers:
        yield "wait", "dropped", None
    if "wait_group" in instruction.modifiers:
        left = int(instruction.operands[0], 0) + 1
        yield "wait", f"waits for all but {left}", replace(instruction, operands=(str(left),))


def _swapped_operands(instruction: Instruction) -> Iterator[Mistake]:
    if instruction.opcode not in _NOT_COMMUTATIVE:
        return
    result, a, b, *rest = instruction.operands
    if a != b:
        yield "operands", "inputs swapped", replace(instruction, operands=(result, b, a, *rest))


def _swapped_fragments(instruction: Instruction) -> Iterator[Mistake]:
    if instruction.opcode != "mma":
        return
    for index, matrix in ((1, "A"), (2, "B")):
        operands = list(instruction.operands)
        first, *others = split_operands(operands[index].strip("{}"))
        if not others or first == others[0]:
            continue
        operands[index] = "{" + ", ".join((others[0], first, *others[1:])) + "}"
        yield "fragments", f"registers of {matrix} swapped", replace(instruction, operands=tuple(operands))


def _other_comparison(instruction: Instruction) -> Iterator[Mistake]:
    if instruction.opcode != "setp" or instruction.modifiers[0] not in _COMPARISONS:
        return
    comparison = _COMPARISONS[instruction.modifiers[0]]
    changed = replace(instruction, modifiers=(comparison, *instruction.modifiers[1:]))
    yield "comparison", f"made {comparison}", changed


_MISTAKES: tuple[Callable[[Instruction], Iterator[Mistake]], ...] = (
    _dropped_barrier,
    _weaker_wait,
    _swapped_operands,
    _swapped_fragments,
    _other_comparison,
)
