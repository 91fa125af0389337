"""Plant mistakes in the PTX of kernels, to prove that the tests of a kernel find them.

One build contains all mistakes of a module.  `EmulatedModule.mutation` selects the mistake of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tests.cuda_on_cpu.module import EmulatedModule
from tests.cuda_on_cpu.ptx import Instruction, parse, split_operands

# Instructions whose first two inputs are not interchangeable.
_NOT_COMMUTATIVE = ("sub", "div", "rem", "shl", "shr", "selp", "prmt")
#: Backward jumps per thread; a mistake can make a kernel endless.
STEP_LIMIT = 1 << 14


@dataclass(frozen=True)
class Mutation:
    """A mistake of the kind ``barrier``, ``wait``, ``operands`` or ``fragments``.

    ``after`` replaces the instruction ``before``; None removes it.
    """

    kind: str
    kernel: str
    change: str
    before: Instruction
    after: Instruction | None

    def __str__(self) -> str:
        return f"{self.change} in `{self.before.text}` ({self.before.location or self.kernel})"


def mutations(ptx: str) -> list[Mutation]:
    """Return the mutations of a module, in the order of the text.

    * Drop a ``bar.sync`` or ``bar.warp.sync``.
    * Change ``cp.async.wait_group n`` to ``n + 1``, or drop ``wait_all``.
    * Swap the inputs of a subtraction, division, shift, selection or byte permutation.
    * Swap registers of the A or B fragment of an ``mma``.
    """
    return [
        Mutation(kind, function.name, change, instruction, after)
        for function in parse(ptx).functions
        for instruction in function.instructions()
        for mistake in _MISTAKES
        for kind, change, after in mistake(instruction)
    ]


def plant(ptx: str, chosen: Sequence[Mutation]) -> EmulatedModule:
    """Return a module in check mode with mutations, numbered from 1."""
    planted: dict[tuple[int, int], list[tuple[int, Instruction | None]]] = {}
    for number, mutation in enumerate(chosen, start=1):
        planted.setdefault(mutation.before.span, []).append((number, mutation.after))
    return EmulatedModule(ptx, "check", planted=planted, step_limit=STEP_LIMIT)


#: Kind, description and new instruction.
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


_MISTAKES: tuple[Callable[[Instruction], Iterator[Mistake]], ...] = (
    _dropped_barrier,
    _weaker_wait,
    _swapped_operands,
    _swapped_fragments,
)
