"""Kernels stay within their budgets of registers and spill no registers.

These tests compile one variant of each module, each for another architecture; `registers` compiles all variants.
"""

from __future__ import annotations

import json

import pytest

from localllm.kernels.cuda.module import FOLDER
from tests.cuda_on_cpu import nvrtc
from tests.cuda_on_cpu.nvrtc import Resources
from tests.kernels.cuda.registers import BUDGETS, Budgets, Case, everything, problems

CASES = everything()
#: Modules, with and without the variants for matrices of experts.
MODULES = sorted({(case.module, "EXPERTS" in case.defines) for case in CASES})


def test_every_module_has_cases() -> None:
    assert {module for module, _ in MODULES} == {path.stem for path in FOLDER.glob("*.cu")}


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_registers(module: tuple[str, bool]) -> None:
    if reason := nvrtc.missing():
        pytest.skip(reason)
    cases = [c for c in CASES if (c.module, "EXPERTS" in c.defines) == module]
    architectures = sorted({c.architecture for c in cases})  # some modules start with sm_80
    architecture = architectures[MODULES.index(module) % len(architectures)]
    case = max((c for c in cases if c.architecture == architecture), key=lambda c: c.name)
    budgets: Budgets = json.loads(BUDGETS.read_text())
    found = case.resources()
    assert set(found) == set(budgets[case.name]), "run python -m tests.kernels.cuda.registers --write --module NAME"
    assert not problems(case, budgets, found)


def test_every_variant_has_a_budget() -> None:
    budgets: Budgets = json.loads(BUDGETS.read_text())
    kept = {(name, int(a)) for name, kernels in budgets.items() for of_kernel in kernels.values() for a in of_kernel}
    assert kept == {(case.name, case.architecture) for case in CASES}


@pytest.mark.parametrize(
    ("registers", "spilled", "words"),
    [(40, 0, ()), (41, 0, ("takes 41 registers, and its budget is 40",)), (40, 8, ("spills 8 bytes",))],
)
def test_problems_are_reported(registers: int, spilled: int, words: tuple[str, ...]) -> None:
    case, found = Case("some variant", "some", 80, {}), {"kernel": Resources(registers, spilled, 0, 0)}
    seen = problems(case, {"some variant": {"kernel": {"80": 40, "90": 99}}}, found)
    assert len(seen) == len(words)
    assert all(word in text for word, text in zip(words, seen, strict=True))
    assert problems(case, {}, {"kernel": Resources(1, 0, 0, 0)}) == ["kernel of some variant for sm_80 has no budget"]
