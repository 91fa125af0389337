"""NVRTC without a GPU: PTX and resources, for every architecture that localllm supports."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda_on_cpu import nvrtc
from tests.cuda_on_cpu.errors import BuildError
from tests.cuda_on_cpu.kernels import Kernels, skip_without_tools
from tests.cuda_on_cpu.module import EmulatedModule

SOURCE = """
#include <cuda_fp16.h>
__constant__ float table[4] = {1.0f, 2.5f, -3.0f, 4.0f};
__device__ int counter = 5;
struct Pair { int first; double second; };
extern "C" __global__ void __launch_bounds__(64) mixed(const __half* x, float* y, Pair pair, unsigned char byte) {
  __shared__ float s[64];
  s[threadIdx.x] = __half2float(x[threadIdx.x]) * table[threadIdx.x % 4];
  __syncthreads();
  y[threadIdx.x] = s[63 - threadIdx.x] + pair.first + (float)pair.second + byte;
}
extern "C" __global__ void count(int* y) { y[0] = atomicAdd(&counter, 1); }
extern "C" __global__ void spills(const float* x, float* y, int n) {
  float local[40];
  for (int i = 0; i < 40; i++) local[i] = x[i];
  for (int i = 0; i < n; i++) local[(i * 7) % 40] += local[(i * 3) % 40];
  float sum = 0;
  for (int i = 0; i < 40; i++) sum += local[i];
  y[0] = sum;
}
extern "C" __global__ void choose(const int* x, int* y) {
  int v = x[threadIdx.x];
  switch (v) {
    case 0: v = y[3] * 3; break;
    case 1: v = y[1] + 7; break;
    case 2: v = y[2] - 9; break;
    case 3: v = y[0] ^ 5; break;
    case 4: v = y[4] / 3; break;
    case 5: v = y[5] << 2; break;
    default: v = -1;
  }
  y[8 + threadIdx.x] = v;
}
"""


@pytest.fixture(autouse=True)
def _tools() -> None:
    skip_without_tools()


@pytest.mark.parametrize("architecture", [75, 80, 86, 89, 90, 120])
def test_architectures(architecture: int) -> None:
    assert architecture in nvrtc.architectures()
    kernels = Kernels.of(SOURCE, architecture=architecture)
    x = np.arange(64).astype(np.float16)
    y = np.zeros(64, np.float32)
    pair = np.array([(3, 0.5)], np.dtype([("first", "i4"), ("second", "f8")], align=True))
    kernels.run("mixed", 1, 64, x, y, pair[0], np.uint8(200))
    wanted = (x.astype(np.float32) * np.tile([1, 2.5, -3, 4], 16))[::-1] + 3.5 + 200
    np.testing.assert_array_equal(y, wanted.astype(np.float32))


def test_other_kernels() -> None:
    kernels = Kernels.of(SOURCE, "check")
    y = np.zeros(1, np.int32)
    for _ in range(2):
        kernels.run("count", 1, 1, y)
    assert y[0] == 6  # variables of a module keep their values between launches
    x, out = np.arange(40, dtype=np.float32), np.zeros(1, np.float32)
    kernels.run("spills", 1, 1, x, out, np.int32(30))
    local = x.copy()
    for i in range(30):
        local[i * 7 % 40] += local[i * 3 % 40]
    assert out[0] == local.sum()
    x_int, table = np.arange(8, dtype=np.int32), np.arange(10, 18).astype(np.int32)
    y = np.concatenate([table, np.zeros(8, np.int32)])
    kernels.run("choose", 1, 8, x_int, y)
    np.testing.assert_array_equal(y[8:], [13 * 3, 18, 3, 10 ^ 5, 14 // 3, 60, -1, -1])


def test_resources() -> None:
    found = nvrtc.resources(SOURCE, 80)
    assert set(found) == {"mixed", "count", "spills", "choose"}
    assert found["mixed"].shared_bytes == 256
    assert 8 <= found["mixed"].registers <= 64
    assert found["mixed"].spill_bytes == 0
    assert found["spills"].stack_bytes >= 160
    limited = nvrtc.resources(SOURCE.replace("(i * 7) % 40", "i"), 80, ("--maxrregcount=16",))
    assert all(kernel.registers <= 24 for kernel in limited.values())


def test_log_of_a_wrong_source() -> None:
    with pytest.raises(BuildError, match=r"bad\.cu\(2\): error"):
        nvrtc.compile_ptx("\nextern nonsense;", name="bad.cu")


def test_options() -> None:
    ptx = nvrtc.compile_ptx('extern "C" __global__ void NAME(float* x) { x[0] *= x[1]; }', 80, ("-DNAME=renamed",))
    assert "renamed" in EmulatedModule(ptx).kernels
    assert "mul.ftz.f32" in ptx  # the option of localllm's modules
