"""Mutations of kernels: which instructions they change, and that a module runs one mutation at a time."""

from __future__ import annotations

import numpy as np

from tests.cuda_on_cpu.kernels import compile_ptx
from tests.cuda_on_cpu.module import MemoryRange
from tests.cuda_on_cpu.mutate import mutations, plant

COPY = """
extern "C" __global__ void copy(const int4* x, int4* y) {
  __shared__ int4 s[32];
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
    :: "r"((unsigned)__cvta_generic_to_shared(s + threadIdx.x)), "l"(x + threadIdx.x) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  y[threadIdx.x] = s[31 - threadIdx.x];
  __syncwarp();
}
"""
DIVIDE = 'extern "C" __global__ void divide(int* x, int a, int b) { x[0] = a - b; x[1] = a / b; }'


def test_barriers_and_waits_are_mutated() -> None:
    changes = [(m.kernel, m.kind, m.change) for m in mutations(compile_ptx(COPY)) if m.kind != "operands"]
    assert changes == [
        ("copy", "wait", "waits for all but 1"),
        ("copy", "barrier", "dropped"),
        ("copy", "barrier", "dropped"),
    ]


def test_a_module_runs_one_mutation_at_a_time() -> None:
    ptx = compile_ptx(DIVIDE)
    swapped = [m for m in mutations(ptx) if m.kind == "operands"]
    assert [m.before.opcode for m in swapped] == ["sub", "div"]
    module = plant(ptx, swapped)
    for module.mutation, expected in enumerate([[15, 4], [-15, 4], [15, 0]]):
        x = np.zeros(2, np.int32)
        ranges = [MemoryRange(x.ctypes.data, x.nbytes, writable=True)]
        module.launch("divide", 1, 1, [np.uint64(x.ctypes.data), np.int32(20), np.int32(5)], ranges=ranges)
        assert x.tolist() == expected
