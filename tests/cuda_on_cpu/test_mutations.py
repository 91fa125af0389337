"""The harness notices each mistake in a kernel: a dropped barrier, a weaker wait, swapped operands, a comparison."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda_on_cpu.kernels import Array, compile_ptx
from tests.cuda_on_cpu.module import ORDERS, Argument, EmulatedModule, MemoryRange, Order
from tests.cuda_on_cpu.mutate import Mutation, mutations, plant, survivors

REDUCTION = """
// y[row] = the sum of the even warp's share minus the odd one's; a block of 64 threads a row
extern "C" __global__ void reduction(const float* x, float* y, int n) {
  __shared__ float part[2];
  float sum = 0.0f;
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += 64) sum += x[blockIdx.x * n + i];
#pragma unroll
  for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) y[blockIdx.x] = part[0] - part[1];
}
// the same over shared memory, by one warp
extern "C" __global__ void warp_reduction(const float* x, float* y) {
  __shared__ float s[32];
  s[threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  const float right = s[threadIdx.x ^ 1];
  __syncwarp();
  s[threadIdx.x] -= right;
  __syncwarp();
  y[threadIdx.x] = s[threadIdx.x ^ 2];
}
"""
MATMUL = """
#define ASYNC(TO, FROM) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" \\
    :: "r"((unsigned)__cvta_generic_to_shared(TO)), "l"(FROM) : "memory")
#define COMMIT() asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(N) asm volatile("cp.async.wait_group " #N ";" ::: "memory")
// C[16][8] = A[16][64] B[8][64]^T of int8 by two warps, which add halves of K; two stages of 32 columns
extern "C" __global__ void matmul(const signed char* a, const signed char* b, int* c) {
  __shared__ __align__(16) signed char sa[2][16][32], sb[2][8][32];
  __shared__ int sums[16][8];
  const unsigned i = threadIdx.x, lane = i % 32, warp = i / 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int stage = 0; stage < 2; stage++) {
    const unsigned k = i - 32;
    if (i < 32) ASYNC(&sa[stage][i / 2][16 * (i % 2)], a + 64 * (i / 2) + 32 * stage + 16 * (i % 2));
    else if (i < 48) ASYNC(&sb[stage][k / 2][16 * (k % 2)], b + 64 * (k / 2) + 32 * stage + 16 * (k % 2));
    COMMIT();
  }
  int d[4] = {0, 0, 0, 0};
  WAIT(1);
  __syncthreads();
#define MULTIPLY(STAGE) { \\
    const unsigned* A = (const unsigned*)sa[STAGE]; const unsigned* B = (const unsigned*)sb[STAGE]; \\
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 " \\
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \\
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(A[8 * g + t]), "r"(A[8 * (g + 8) + t]), \\
        "r"(A[8 * g + t + 4]), "r"(A[8 * (g + 8) + t + 4]), "r"(B[8 * g + t]), "r"(B[8 * g + t + 4])); }
  if (warp == 0) MULTIPLY(0)
  WAIT(0);
  __syncthreads();
  if (warp == 1) {
    MULTIPLY(1)
    sums[g][2 * t] = d[0]; sums[g][2 * t + 1] = d[1]; sums[g + 8][2 * t] = d[2]; sums[g + 8][2 * t + 1] = d[3];
  }
  __syncthreads();
  if (warp == 0) {
    c[8 * g + 2 * t] = d[0] + sums[g][2 * t]; c[8 * g + 2 * t + 1] = d[1] + sums[g][2 * t + 1];
    c[8 * (g + 8) + 2 * t] = d[2] + sums[g + 8][2 * t]; c[8 * (g + 8) + 2 * t + 1] = d[3] + sums[g + 8][2 * t + 1];
  }
}
"""
RNG = np.random.default_rng(0)


def _launch(
    module: EmulatedModule, kernel: str, grid: int, block: int, order: Order, *arguments: Array | np.generic
) -> None:
    ranges: list[MemoryRange] = []
    values: list[Argument] = []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            ranges.append(MemoryRange(argument.ctypes.data, argument.nbytes, argument.flags.writeable))
            values.append(np.uint64(argument.ctypes.data))
        else:
            values.append(argument)
    module.launch(kernel, grid, block, values, order=order, ranges=ranges)


def reduction_is_right(module: EmulatedModule, kernel: str, order: Order) -> bool:
    if kernel.startswith("warp"):
        x, out = RNG.integers(-99, 99, 32).astype(np.float32), np.zeros(32, np.float32)
        _launch(module, kernel, 1, 32, order, x, out)
        lanes = np.arange(32)
        return bool(np.array_equal(out, (x - x[lanes ^ 1])[lanes ^ 2]))
    for n in (192, 40):
        x, y = RNG.integers(-99, 99, (3, n)).astype(np.float32), np.zeros(3, np.float32)
        _launch(module, kernel, 3, 64, order, x, y, np.int32(n))
        halves = np.pad(x, ((0, 0), (0, -n % 64))).reshape(3, -1, 2, 32).sum((1, 3))
        if not np.array_equal(y, halves[:, 0] - halves[:, 1]):
            return False
    return True


def matmul_is_right(module: EmulatedModule, kernel: str, order: Order) -> bool:
    a, b = (RNG.integers(-128, 128, (rows, 64)).astype(np.int8) for rows in (16, 8))
    a, b = _aligned(a), _aligned(b)
    c = np.zeros((16, 8), np.int32)
    _launch(module, kernel, 1, 64, order, a, b, c)
    return bool(np.array_equal(c, a.astype(np.int32) @ b.astype(np.int32).T))


def _aligned(array: Array) -> Array:
    storage = np.zeros(array.nbytes + 16, np.uint8)
    start = -storage.ctypes.data % 16
    view = storage[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def _kinds(found: list[Mutation]) -> dict[str, int]:
    return {kind: sum(m.kind == kind for m in found) for kind in {m.kind for m in found}}


def test_every_mutation_of_a_reduction_is_caught() -> None:
    ptx = compile_ptx(REDUCTION)
    module = EmulatedModule(ptx, "check")
    assert all(reduction_is_right(module, kernel, order) for kernel in module.kernels for order in ORDERS)
    found = mutations(ptx)
    kinds = _kinds(found)
    assert kinds["barrier"] == 4
    assert min(kinds["operands"], kinds["comparison"]) >= 3
    assert survivors(ptx, found, reduction_is_right) == []


def test_every_mutation_of_a_matmul_is_caught() -> None:
    ptx = compile_ptx(MATMUL)
    module = EmulatedModule(ptx, "check")
    assert all(matmul_is_right(module, "matmul", order) for order in ORDERS)
    found = mutations(ptx, "matmul")
    kinds = _kinds(found)
    assert (kinds["barrier"], kinds["wait"], kinds["fragments"]) == (3, 2, 4)
    assert survivors(ptx, found, matmul_is_right) == []


def test_a_mutation_that_changes_nothing_survives() -> None:
    ptx = compile_ptx('extern "C" __global__ void noop(const float* x, float* y) { __syncthreads(); y[0] = x[0]; }')

    def is_right(module: EmulatedModule, kernel: str, order: Order) -> bool:
        x, y = np.ones(1, np.float32), np.zeros(1, np.float32)
        _launch(module, kernel, 1, 1, order, x, y)
        return bool(y[0] == 1)

    (dropped,) = (m for m in mutations(ptx) if m.kind == "barrier")
    assert survivors(ptx, [dropped], is_right) == [str(dropped)]


def test_only_one_mutation_is_made_at_a_time() -> None:
    ptx = compile_ptx('extern "C" __global__ void k(int* x, int a, int b) { x[0] = a - b; x[1] = a / b; }')
    swapped = [m for m in mutations(ptx) if m.kind == "operands"]
    assert [m.before.opcode for m in swapped] == ["sub", "div"]
    module = plant(ptx, swapped)
    for module.mutation, expected in enumerate([[15, 4], [-15, 4], [15, 0]]):
        x = np.zeros(2, np.int32)
        _launch(module, "k", 1, 1, Order(), x, np.int32(20), np.int32(5))
        assert x.tolist() == expected


@pytest.mark.parametrize("kernel", ["reduction", "warp_reduction"])
def test_only_the_kernel_that_was_asked_for(kernel: str) -> None:
    assert {m.kernel for m in mutations(compile_ptx(REDUCTION), kernel)} == {kernel}
