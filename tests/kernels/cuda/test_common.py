"""Functions that all kernels share: conversions, to the bit, and collectives of a warp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.kernels.cuda.module import compile_source, flat_source, options
from tests.cuda_on_cpu.kernels import skip_without_tools
from tests.cuda_on_cpu.module import EmulatedModule, MemoryRange
from tests.helpers.data import ROOT

KERNELS = """
extern "C" __global__ void widen(const uint16_t* from, float* halves, float* bfloats) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  halves[i] = half_to_float(from[i]);
  bfloats[i] = bfloat_to_float(from[i]);
}
extern "C" __global__ void narrow(const float* from, uint16_t* halves, uint16_t* bfloats) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  halves[i] = float_to_half(from[i]);
  bfloats[i] = float_to_bfloat(from[i]);
}
extern "C" __global__ void collect(const float* from, float* sums, float* largest, int* counts) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  sums[i] = warp_sum(from[i]);
  largest[i] = warp_max(from[i]);
  counts[i] = warp_sum((int)from[i]);
}
"""

Run = Callable[..., None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a kernel with one thread for each value of the first array."""
    skip_without_tools()
    from cupy.cuda import nvrtc as binding

    folder = tmp_path_factory.mktemp("sources")
    (folder / "common.cuh").write_text((ROOT / "kernels" / "cuda" / "common.cuh").read_text())
    (folder / "all.cu").write_text('#include "common.cuh"\n' + KERNELS)
    compiled = compile_source(flat_source("all", folder), "all", options({}, "compute_75"), binding)
    module = EmulatedModule(compiled.binary.decode().rstrip("\0"), "check")

    def launch(kernel: str, *arrays: NDArray[Any]) -> None:
        ranges = [MemoryRange(a.ctypes.data, a.nbytes) for a in arrays]
        addresses = [np.uint64(a.ctypes.data) for a in arrays]
        module.launch(kernel, len(arrays[0]) // 128, 128, addresses, ranges=ranges)

    return launch


def bits(values: NDArray[Any]) -> NDArray[Any]:
    """Return bits, with the same pattern for all NaNs."""
    words = values.view(np.uint16 if values.itemsize == 2 else np.uint32).copy()
    words[np.isnan(values)] = 0xFFFF
    return words


def test_widening(run: Run) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    halves, bfloats = np.zeros((2, 1 << 16), np.float32)
    run("widen", patterns, halves, bfloats)
    np.testing.assert_array_equal(bits(halves), bits(patterns.view(np.float16).astype(np.float32)))
    np.testing.assert_array_equal(bits(bfloats), bits((patterns.astype(np.uint32) << 16).view(np.float32)))


def test_narrowing(run: Run) -> None:
    """Rounds to nearest even: ties, values close to ties, subnormals, values out of range, and NaN."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (halves[1:] + halves[:-1]) / 2
    some = np.concatenate(
        [halves, between, np.nextafter(between, np.float32(0)), np.nextafter(between, np.float32(9e9))]
    )
    special = np.array([np.nan, np.inf, 65519.996, 65520, 1e38, 3.3e38, 1e-38, 6e-8, 2.9e-8], np.float32)
    ties = (np.arange(0x3F80, 0x4080, dtype=np.uint32) << 16 | 0x8000).view(np.float32)  # for bfloat16
    values = np.concatenate([some, special, ties])
    values = np.concatenate([values, -values])
    values = np.concatenate([values, np.zeros(-len(values) % 128, np.float32)])
    got_halves, got_bfloats = np.zeros((2, len(values)), np.uint16)
    run("narrow", values, got_halves, got_bfloats)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    np.testing.assert_array_equal(bits(got_halves.view(np.float16)), bits(expected))
    # bfloat16 is the upper half of a float; ties round to the even neighbour.
    below = values.view(np.uint32) >> 16
    rest = values.view(np.uint32) & 0xFFFF
    nearest = below + ((rest > 0x8000) | ((rest == 0x8000) & (below % 2 == 1)))
    is_nan = np.isnan(values)
    np.testing.assert_array_equal(got_bfloats[~is_nan], nearest[~is_nan].astype(np.uint16))
    assert np.isnan((got_bfloats[is_nan].astype(np.uint32) << 16).view(np.float32)).all()


def test_collectives(run: Run) -> None:
    values = np.random.default_rng(1).integers(-1000, 1000, 256).astype(np.float32)
    sums, largest = np.zeros((2, 256), np.float32)
    counts = np.zeros(256, np.int32)
    run("collect", values, sums, largest, counts)
    warps = values.reshape(8, 32)
    np.testing.assert_array_equal(sums.reshape(8, 32), np.repeat(warps.sum(1)[:, None], 32, 1))
    np.testing.assert_array_equal(counts.reshape(8, 32), np.repeat(warps.sum(1)[:, None], 32, 1))
    np.testing.assert_array_equal(largest.reshape(8, 32), np.repeat(warps.max(1)[:, None], 32, 1))
