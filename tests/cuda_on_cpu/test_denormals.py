"""Registers that never hold a denormal; instructions with .ftz flush all other registers."""

from __future__ import annotations

import pytest

from tests.cuda_on_cpu.denormals import flushed_registers
from tests.cuda_on_cpu.ptx import parse

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k() { .reg .f32 %f<5>; .reg .pred %p; "
DENORMAL, SMALLEST_NORMAL = "0f00000001", "0f00800000"


def flushed(body: str) -> set[str]:
    """Return the registers of the statements that never hold a denormal."""
    (function,) = parse(f"{HEAD}{body} ret; }}").functions
    return {name for name in flushed_registers(function) if name in body}


@pytest.mark.parametrize(
    "instruction",
    [
        *(f"{name}.ftz.f32 %f1, %f2, %f3;" for name in ("add.rn", "sub", "mul", "min", "max.NaN", "div.full")),
        "fma.rn.ftz.f32 %f1, %f2, %f3, %f3;",
        "ex2.approx.ftz.f32 %f1, %f2;",
        "cvt.rn.f32.s32 %f1, %r1;",
        "cvt.f32.f16 %f1, %rs1;",
        f"mov.f32 %f1, {SMALLEST_NORMAL};",
        "mov.f32 %f1, 0f80000000;",
    ],
)
def test_instructions_whose_results_are_never_denormals(instruction: str) -> None:
    assert "%f1" in flushed(instruction)


@pytest.mark.parametrize(
    "instruction",
    [
        "add.rn.f32 %f1, %f2, %f3;",
        "cvt.f32.bf16 %f1, %rs1;",
        "ld.global.f32 %f1, [%rd1];",
        "ld.global.v2.f32 {%f4, %f1}, [%rd1];",
        "shfl.sync.down.b32 %f1|%p, %f2, 1, 31, -1;",
        f"mov.f32 %f1, {DENORMAL};",
        f"selp.f32 %f1, 0f3F800000, {DENORMAL}, %p;",
    ],
)
def test_instructions_whose_results_may_be_denormals(instruction: str) -> None:
    assert "%f1" not in flushed(instruction)


def test_a_move_keeps_the_property_of_its_source() -> None:
    """Also in a loop."""
    loop = "add.ftz.f32 %f1, %f2, %f3; selp.f32 %f2, %f1, %f4, %p; mov.f32 %f4, %f2;"
    assert flushed(loop) == {"%f1", "%f2", "%f3", "%f4", "%p"}
    assert flushed(f"ld.global.f32 %f4, [%rd1]; {loop}") == {"%f1", "%f3", "%p"}


def test_one_writer_of_denormals_is_enough() -> None:
    assert "%f1" not in flushed("add.ftz.f32 %f1, %f2, %f3; @%p mul.f32 %f1, %f2, %f3;")
