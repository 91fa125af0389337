"""Linking without LLVM: the results of LLVM's linker, which links all code that is not plain."""

from __future__ import annotations

import ctypes
import platform
import struct
import sys

import llvmlite.binding as llvm
import numpy as np
import pytest

from localllm.kernels.cpu.object_code import link

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="elsewhere LLVM links"
)

#: Code that refers to a table of constants, a vector constant and a switch.
SOURCE = """
@table = internal constant [4 x i64] [i64 7, i64 -5, i64 1000000007, i64 3]
define void @"a.kernel[x=1]"(i64 %arguments, i64 %begin, i64 %end) {
  %out = inttoptr i64 %arguments to ptr
  %at = getelementptr [4 x i64], ptr @table, i64 0, i64 %begin
  %v = load i64, ptr %at
  %f = sitofp i64 %v to double
  %g = fmul double %f, 0x3FD5555555555555
  store double %g, ptr %out
  switch i64 %end, label %other [ i64 0, label %a
    i64 1, label %b
    i64 2, label %c
    i64 3, label %d ]
a:
  br label %done
b:
  br label %done
c:
  br label %done
d:
  br label %done
other:
  br label %done
done:
  %n = phi i64 [ 11, %a ], [ 5, %b ], [ 92, %c ], [ 38, %d ], [ 0, %other ]
  %behind = getelementptr i64, ptr %out, i64 1
  store i64 %n, ptr %behind
  ret void
}
"""
SYMBOL = "a.kernel[x=1]"


def compiled(source: str = SOURCE, **options: str) -> bytes:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    settings = {"reloc": "static", "codemodel": "jitdefault", **options}
    machine = llvm.Target.from_default_triple().create_target_machine(opt=0, jit=True, **settings)
    code: bytes = machine.emit_object(llvm.parse_assembly(source))
    return code


def results(address: int) -> list[tuple[float, int]]:
    found = []
    for i in range(4):
        memory = np.zeros(2)
        ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(address)(memory.ctypes.data, i, i)
        found.append((float(memory[0]), int(memory.view(np.int64)[1])))
    return found


def test_functions_compute_the_results_of_llvm_linking() -> None:
    code = compiled()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    linked = link([(SYMBOL, code)] * 3)
    assert linked is not None
    assert len(set(linked)) == 3
    for address in (engine.get_function_address(SYMBOL), *linked):
        numbers, chosen = zip(*results(address), strict=True)
        assert numbers == pytest.approx([v / 3 for v in (7, -5, 1000000007, 3)])
        assert chosen == (11, 5, 92, 38)
    assert results(linked[2]) == results(engine.get_function_address(SYMBOL))


def test_code_that_is_not_plain_is_left_to_llvm() -> None:
    code = compiled()
    assert link([("another", code)]) is None
    assert link([(SYMBOL, code), (SYMBOL, b"")]) is None
    assert link([(SYMBOL, compiled(codemodel="small", reloc="pic"))]) is None  # relative addresses
    calls = SOURCE.replace("ret void", "call void @elsewhere()\n  ret void") + "declare void @elsewhere()"
    assert link([(SYMBOL, compiled(calls))]) is None
    for at, other in ((0, b"MZ"), (4, b"\1"), (16, struct.pack("<H", 3)), (18, struct.pack("<H", 183))):
        assert link([(SYMBOL, code[:at] + other + code[at + len(other) :])]) is None


def test_a_truncated_file_is_never_run() -> None:
    code = compiled()
    assert all(link([(SYMBOL, code[:n])]) is None for n in range(0, len(code), 7))


def test_damaged_files_cause_no_write_outside_their_section() -> None:
    """Linking raises no exception, even if the file states offsets outside a section."""
    code, random = compiled(), np.random.default_rng(0)
    for _ in range(500):
        damaged = bytearray(code)
        damaged[int(random.integers(64, len(code)))] = int(random.integers(256))
        link([(SYMBOL, bytes(damaged))])
