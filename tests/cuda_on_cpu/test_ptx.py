"""The PTX parser on hand-written text: names in scopes, source locations, and errors."""

from __future__ import annotations

import pytest

from tests.cuda_on_cpu.errors import PtxError, UnsupportedInstruction
from tests.cuda_on_cpu.ptx import BranchTargets, Instruction, Label, Location, Variable, parse, split_operands
from tests.cuda_on_cpu.translate import translate

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"


def kernel(body: str, parameters: str = ".param .u64 k_param_0", directives: str = "") -> str:
    files = '.file 1 "/some/where/k.cu"\n.file 2 "c.cuh"\n'
    return f"{HEAD}.visible .entry k({parameters})\n{directives}{{\n{body}\nret;\n}}\n{files}"


def body_of(text: str) -> list[Instruction | Label | BranchTargets]:
    return parse(kernel(text)).kernels()["k"].body[:-1]


def test_module() -> None:
    text = HEAD + ".extern .shared .align 16 .b8 dyn[];\n.const .align 4 .b8 table[4] = {1, 2, 3, 4}; // comment\n"
    module = parse(text + kernel("")[len(HEAD) :])
    assert module.target == "sm_80"
    assert module.variables == [
        Variable("dyn", "shared", "b8", 16, None),
        Variable("table", "const", "b8", 4, 4, ("1", "2", "3", "4")),
    ]


def test_parameters() -> None:
    text = ".param .u64 .ptr .global .align 16 a,\n.param .f32 b, .param .align 8 .b8 c[24]"
    function = parse(kernel("", text, ".maxntid 32, 4, 1\n.minnctapersm 2\n")).kernels()["k"]
    assert [(p.name, p.type, p.n_bytes, p.align, p.is_array) for p in function.parameters] == [
        ("a", "u64", 8, 8, False),
        ("b", "f32", 4, 4, False),
        ("c", "b8", 24, 8, True),
    ]
    assert function.max_threads == 128


def test_instruction() -> None:
    text = "@!%p1 ld.global.nc.v2.u32 {%r1, %r2}, [%rd1+-8];"
    (instruction,) = body_of(text)
    assert isinstance(instruction, Instruction)
    assert (instruction.opcode, instruction.modifiers) == ("ld", ("global", "nc", "v2", "u32"))
    assert instruction.operands == ("{%r1, %r2}", "[%rd1+-8]")
    assert (instruction.predicate, instruction.negated) == ("%p1", True)
    start, end = instruction.span
    assert kernel(text)[start:end] == text


def test_places() -> None:
    first, second, third = body_of(
        "add.s32 a, b, c;\n.loc 1 12 3\nadd.s32 a, b, c;\n"
        ".loc\t2 28 3, function_name $L__info_string0, inlined_at 1 11 3\nadd.s32 a, b, c;"
    )
    assert isinstance(first, Instruction)
    assert isinstance(second, Instruction)
    assert isinstance(third, Instruction)
    assert first.location is None
    assert second.location == Location("k.cu", 12)
    assert str(third.location) == "c.cuh:28 (inlined at k.cu:11)"


def test_scopes() -> None:
    text = """.reg .b32 %r<3>;
    { .reg .pred p; .reg .b32 %r1; setp.eq.u32 p, %r1, %r2; @p bra DONE; mov.b32 %r2, 1; DONE: }
    { .reg .pred p; @p bra DONE; DONE: mov.b32 %r1, 2; }"""
    function = parse(kernel(text)).kernels()["k"]
    assert len(function.registers) == 3 + 2 + 1
    labels = [item.name for item in function.body if isinstance(item, Label)]
    assert len(set(labels)) == 2
    jumps = [item for item in function.instructions() if item.opcode == "bra"]
    assert [jump.operands[0] for jump in jumps] == labels
    assert jumps[0].predicate != jumps[1].predicate
    moves = [item.operands[0] for item in function.instructions() if item.opcode == "mov"]
    assert moves == ["%r2", "%r1"]


def test_branch_targets() -> None:
    label, targets = body_of("A:\nT: .branchtargets A, B;")
    assert label == Label("A")
    assert targets == BranchTargets("T", ("A", "B"))


def test_split_operands() -> None:
    assert split_operands("{a, b}, [c+4], (d, e), 5") == ["{a, b}", "[c+4]", "(d, e)", "5"]


@pytest.mark.parametrize(
    "text",
    [
        "int main() { return 0; }",
        f"{HEAD}.visible .entry k(.param .v9 a) {{ ret; }}",
        f"{HEAD}.visible .entry k() {{ ret;",
        f"{HEAD}.global .f128 x;",
        f"{HEAD}.visible .entry k() {{ .reg .b128 %r; ret; }}",
        f"{HEAD}.visible .entry k() {{ add.s32 a, b, c }}",
        f"{HEAD}.visible .entry k() {{ p: .callprototype _ (.param .b32 _); ret; }}",
    ],
)
def test_invalid_ptx_is_refused(text: str) -> None:
    with pytest.raises(PtxError):
        parse(text)


@pytest.mark.parametrize(
    "instruction",
    [
        "wgmma.fence.sync.aligned;",
        "mbarrier.init.shared.b64 [%r1], 1;",
        "cp.async.bulk.commit_group;",
        "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32 "
        "{%r1, %r1, %r1, %r1}, {%r1, %r1, %r1, %r1}, {%r1, %r1}, {%r1, %r1, %r1, %r1};",
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r1}, {%r1}, {%r1}, {%r1};",
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1, %r1}, {%r1, %r1, %r1, %r1}, {%r1, %r1}, {%r1, %r1};",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r1}, {%r1, %r1, %r1, %r1}, {%r1, %r1}, {%r1};",
        "add.rq.f32 %f1, %f1, %f1;",
        "add.s32 %r1, %r1;",
        "add.s32 %r1, %r1, %r9;",
        "add.cc.u32 %r1, %r1, %r1;",
        "fma.rz.f64 %fd1, %fd1, %fd1, %fd1;",
        "prmt.b32.f4e %r1, %r1, %r1, %r1;",
        "shfl.up.b32 %r1, %r1, 1, 0;",
        "activemask.b32 %r1;",
        "mov.u32 %r1, %smid;",
        "cvt.rn.f16.s64 %rs1, %rd1;",
        "cvt.rn.e4m3x2.f32 %rs1, %f1, %f1;",
        "cp.async.cg.shared.global [%r1], [%rd1], 8;",
        "ld.global.v2.b128 {%rd1, %rd1}, [%rd1];",
        "atom.global.min.f32 %f1, [%rd1], %f1;",
        "bra NOWHERE;",
        "call.uni (a), printf, (b);",
        "barrier.cluster.arrive;",
        "tex.2d.v4.f32.s32 {%f1, %f1, %f1, %f1}, [t, {%r1, %r1}];",
        "bar.sync;",
        "setp.lo.f32 %p1, %f1, %f1;",
        "setp.lt.b32 %p1, %r1, %r1;",
    ],
)
def test_instructions_without_a_translation_are_refused(instruction: str) -> None:
    registers = (
        ".reg .pred %p<2>; .reg .b16 %rs<2>; .reg .b32 %r<2>; .reg .b64 %rd<2>; .reg .f32 %f<2>; .reg .f64 %fd<2>;\n"
    )
    module = parse(kernel(registers + ".loc 1 7 3\n" + instruction))
    with pytest.raises(UnsupportedInstruction, match=r"k\.cu:7"):
        translate(module)
