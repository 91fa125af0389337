"""Kernels of the ceilings do the work that is timed: their sums equal numpy's."""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Iterator
from types import SimpleNamespace

import llvmlite.binding as llvm
import numpy as np
import pytest

from localllm.kernels.cpu import compiler
from localllm.kernels.cpu.compiler import variant
from localllm.kernels.cpu.program import Workers
from localllm.kernels.cpu.roofline import (
    DOTS,
    FRAME,
    LANES,
    PERIOD,
    ROUNDS,
    UNIT,
    UNITS,
    DecodeTest,
    MultiplyTest,
    ReadTest,
    Roofline,
    copy_through_frame,
    frames_work,
)
from localllm.kernels.cpu.target import TARGETS, Target, choose
from tests.helpers.windows import elsewhere


@pytest.fixture
def target() -> Target:
    """The best instruction set; test_simd.py tests products of bytes on all instruction sets."""
    return choose()


@pytest.fixture
def workers() -> Iterator[Workers]:
    two = Workers(2)
    yield two
    two.close()


@pytest.mark.parametrize("n_bytes", [1, 3 * UNIT, 5 * UNIT + 1])
def test_all_words_are_read(target: Target, workers: Workers, n_bytes: int) -> None:
    test = ReadTest(workers, target, n_bytes)
    test.data[:] = np.random.default_rng(0).integers(0, 1 << 32, len(test.data), np.uint32)
    assert test.bandwidth() > 0
    assert test.data.nbytes == -(-n_bytes // UNIT) * UNIT
    assert test.total() == int(test.data.sum(dtype=np.uint64)) % (1 << 32)


def test_all_rows_are_decoded(target: Target, workers: Workers) -> None:
    """The rows of the matrix are equal, so each gives the same number other than 0, with any number of threads."""
    test = DecodeTest(workers, target, 3 * UNIT)
    test.x[:] = 1
    for threads in (1, 2):
        test.y[:] = np.nan
        assert test.bandwidth(threads) > 0
        assert len(np.unique(test.y)) == 1
        assert np.isfinite(test.y[0])
        assert test.y[0] != 0


def test_frames_of_several_pages(target: Target, workers: Workers) -> None:
    assert frames_work(workers, target)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="code of x86-64")
@pytest.mark.linux("simulates Windows")
def test_a_frame_of_several_pages_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code runs here with the calling convention of Windows and a ``__chkstk`` that does nothing."""
    probe = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    probe.write(b"\xc3")  # ret
    address = np.frombuffer(probe, np.uint8).ctypes.data
    ntdll = {"__chkstk": ctypes.CFUNCTYPE(None)(address)}
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(ntdll=ntdll), raising=False)
    elsewhere(monkeypatch, "win32")
    assert llvm.address_of_symbol("__chkstk") is None
    compiler._define_stack_probe()
    assert llvm.address_of_symbol("__chkstk") == address

    triple = "x86_64-pc-windows-msvc-elf"  # the format that LLVM's in-process linker accepts
    code = variant(copy_through_frame, next(t for t in TARGETS if t.name == "generic"))
    assert "__chkstk" in compiler.assembly(code, triple)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(CALLS_AS_WINDOWS), choose().machine())
    data = code.target.machine(triple).emit_object(compiler.llvm_ir(code, triple))
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    call = ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * 4)(engine.get_function_address("call"))
    source = np.arange(2 * FRAME // 4, dtype=np.uint32)
    copied = np.zeros_like(source)
    arguments = np.array([source.ctypes.data, copied.ctypes.data], np.int64)
    call(engine.get_function_address(code.symbol), arguments.ctypes.data, 0, 2)
    np.testing.assert_array_equal(copied, source)


CALLS_AS_WINDOWS = """
define void @call(i64 %function, i64 %arguments, i64 %begin, i64 %end) {
  %f = inttoptr i64 %function to ptr
  call win64cc void %f(i64 %arguments, i64 %begin, i64 %end)
  ret void
}
"""


@pytest.mark.parametrize("bits", DOTS)
def test_every_byte_is_multiplied(target: Target, workers: Workers, bits: int) -> None:
    test = MultiplyTest(workers, target, bits=bits)
    assert test.rate() > 0
    assert len(np.unique(test.weights)) == 1 << bits
    weights = test.weights.astype(np.int64).reshape(8, LANES, 4).transpose(1, 0, 2).reshape(LANES, 32)
    x = test.x.astype(np.int64).reshape(PERIOD * test.chains, 32)
    expected = (x @ weights.T).sum() * (ROUNDS // PERIOD)
    assert test.sums.shape == (UNITS * workers.n,)
    np.testing.assert_array_equal(test.sums, expected.astype(np.int32))


def test_all_floats_are_multiplied(target: Target, workers: Workers) -> None:
    test = MultiplyTest(workers, target, bits=None)
    assert test.rate() > 0
    expected = test.weights.astype(np.float64).sum() * test.x.astype(np.float64).sum() * (ROUNDS // PERIOD)
    np.testing.assert_array_equal(test.sums, np.float32(expected))


def test_a_roofline_measures_all_ceilings() -> None:
    with Roofline(1, n_bytes=UNIT) as roofline:
        assert roofline.target == choose()
        assert min(roofline.read_bandwidth(), roofline.dot_rate(8), roofline.dot_rate(), roofline.fma_rate()) > 0
