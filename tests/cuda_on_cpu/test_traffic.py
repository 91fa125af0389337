"""Counts of memory sectors and bank passes, for accesses with known counts."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.cuda_on_cpu.errors import LaunchError
from tests.cuda_on_cpu.kernels import Array, Kernels
from tests.cuda_on_cpu.module import Traffic

SOURCE = """
extern "C" __global__ void strided(const float* x, float* y, int stride) { y[threadIdx.x] = x[threadIdx.x * stride]; }
extern "C" __global__ void banks(const float* x, float* y, int stride) {
  __shared__ float s[1024];
  for (int i = threadIdx.x; i < 1024; i += 32) s[i] = x[0];
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x * stride];
}
extern "C" __global__ void wide(const float4* x, float4* y) {
  __shared__ float4 s[32];
  s[threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  y[threadIdx.x] = s[threadIdx.x ^ 1];
}
"""


@cache
def kernels() -> Kernels:
    return Kernels.of(SOURCE, "check")


def _aligned(n: int) -> Array:
    storage = np.zeros(n + 32, np.float32)
    return storage[-storage.ctypes.data % 128 // 4 :][:n]


def _count(name: str, *arguments: Array | np.generic) -> list[Traffic]:
    kernels().run(name, 1, 32, *arguments, count_traffic=True)
    return kernels().module.traffic()


@pytest.mark.parametrize(("stride", "sectors"), [(0, 1), (1, 4), (2, 8), (8, 32), (16, 32)])
def test_sectors(stride: int, sectors: int) -> None:
    rows = _count("strided", _aligned(1024), _aligned(32), np.int32(stride))
    (read,) = (row for row in rows if not row.is_write)
    (write,) = (row for row in rows if row.is_write)
    assert (read.space, read.requests, read.used, read.bytes_per_lane) == ("global", 1, sectors, 4)
    assert read.ideal == (4 if stride else 1)
    assert (write.used, write.ideal) == (4, 4)
    assert "test.cu:2" in read.site


@pytest.mark.parametrize(("stride", "passes"), [(0, 1), (1, 1), (2, 2), (16, 16), (17, 1), (31, 1)])
def test_bank_passes(stride: int, passes: int) -> None:
    rows = _count("banks", _aligned(1), _aligned(32), np.int32(stride))
    (read,) = (row for row in rows if not row.is_write and row.space == "shared")
    assert (read.requests, read.used, read.ideal) == (1, passes, 1)
    writes = [row for row in rows if row.is_write and row.space == "shared"]
    assert sum(row.requests for row in writes) == sum(row.used for row in writes) == 32


def test_wide_accesses_take_four_passes() -> None:
    rows = _count("wide", _aligned(128), _aligned(128))
    for row in rows:
        assert row.bytes_per_lane == 16
        assert row.used == row.ideal == (4 if row.space == "shared" else 16)


def test_only_in_check_mode() -> None:
    fast = Kernels.of(SOURCE)
    with pytest.raises(LaunchError, match="check mode"):
        fast.run("wide", 1, 32, _aligned(128), _aligned(128), count_traffic=True)
