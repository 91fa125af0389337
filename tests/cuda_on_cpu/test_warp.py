"""Instructions of a warp: shuffles, votes, reductions, matches, and the barriers that reduce."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.cuda_on_cpu.kernels import Array, Kernels
from tests.cuda_on_cpu.module import ORDERS, Order

SOURCE = """
#define FULL 0xffffffffu
#define SHUFFLE(NAME, MODE) extern "C" __global__ void NAME(const unsigned* x, unsigned distance, unsigned clamp, \
    unsigned* out, unsigned* valid) { unsigned value, in_range; \
  asm volatile("{ .reg .pred p; shfl.sync." MODE ".b32 %0|p, %2, %3, %4, 0xffffffff; selp.u32 %1, 1, 0, p; }" \
      : "=r"(value), "=r"(in_range) : "r"(x[threadIdx.x]), "r"(distance), "r"(clamp)); \
  out[threadIdx.x] = value; valid[threadIdx.x] = in_range; }
SHUFFLE(shuffle_up, "up")
SHUFFLE(shuffle_down, "down")
SHUFFLE(shuffle_bfly, "bfly")
SHUFFLE(shuffle_idx, "idx")
extern "C" __global__ void intrinsics(const int* x, int* out, int width) {
  const int i = threadIdx.x;
  out[i] = __shfl_xor_sync(FULL, x[i], 1, width);
  out[32 + i] = __shfl_down_sync(FULL, x[i], 3, width);
  out[64 + i] = __shfl_up_sync(FULL, x[i], 2, width);
  out[96 + i] = __shfl_sync(FULL, x[i], 5, width);
}
extern "C" __global__ void votes(const int* x, unsigned* out) {
  const int i = threadIdx.x, p = x[i] > 0;
  out[i] = __ballot_sync(FULL, p);
  out[64 + i] = __any_sync(FULL, p);
  out[128 + i] = __all_sync(FULL, p);
  out[192 + i] = __uni_sync(FULL, p);
}
extern "C" __global__ void reductions(const int* x, int* out) {
  const int i = threadIdx.x;
  out[i] = __reduce_add_sync(FULL, x[i]);
  out[32 + i] = __reduce_min_sync(FULL, x[i]);
  out[64 + i] = (int)__reduce_max_sync(FULL, (unsigned)x[i]);
  out[96 + i] = (int)__reduce_and_sync(FULL, (unsigned)x[i]);
  out[128 + i] = (int)__reduce_or_sync(FULL, (unsigned)x[i]);
  out[160 + i] = (int)__reduce_xor_sync(FULL, (unsigned)x[i]);
}
extern "C" __global__ void matches(const int* x, unsigned* out) {
  const int i = threadIdx.x;
  int all;
  out[i] = __match_any_sync(FULL, x[i]);
  out[32 + i] = __match_all_sync(FULL, x[i], &all);
  out[64 + i] = all;
}
// Each half has its mask, at different times.
extern "C" __global__ void half_warps(const int* x, int* out) {
  const int i = threadIdx.x;
  const unsigned mask = i < 16 ? 0xffffu : 0xffff0000u;
  int sum = x[i];
  for (int distance = 8; distance; distance /= 2) sum += __shfl_xor_sync(mask, sum, distance);
  out[i] = sum;
}
extern "C" __global__ void block_votes(const int* x, int* out) {
  const int p = x[threadIdx.x] > 0;
  out[threadIdx.x] = __syncthreads_count(p);
  out[blockDim.x + threadIdx.x] = __syncthreads_and(p);
  out[2 * blockDim.x + threadIdx.x] = __syncthreads_or(p);
}
extern "C" __global__ void lane_masks(unsigned* out) {
  unsigned lane, lt, le, gt, ge, eq;
  asm volatile("mov.u32 %0, %laneid;" : "=r"(lane));
  asm volatile("mov.u32 %0, %lanemask_lt;" : "=r"(lt));
  asm volatile("mov.u32 %0, %lanemask_le;" : "=r"(le));
  asm volatile("mov.u32 %0, %lanemask_gt;" : "=r"(gt));
  asm volatile("mov.u32 %0, %lanemask_ge;" : "=r"(ge));
  asm volatile("mov.u32 %0, %lanemask_eq;" : "=r"(eq));
  unsigned* mine = out + threadIdx.x * 6;
  mine[0] = lane; mine[1] = lt; mine[2] = le; mine[3] = gt; mine[4] = ge; mine[5] = eq;
}
"""
LANE = np.arange(32)


@cache
def kernels() -> Kernels:
    return Kernels.of(SOURCE)


def _shuffled(mode: str, values: Array, distance: int, clamp: int) -> tuple[Array, Array]:
    """The pseudo code of the PTX ISA, lane by lane."""
    out, valid = [], []
    for lane in range(32):
        segment, limit, b = clamp >> 8 & 31, clamp & 31, distance & 31
        max_lane, min_lane = (lane & segment) | (limit & ~segment), lane & segment
        source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": min_lane | (b & ~segment)}[mode]
        in_range = source >= max_lane if mode == "up" else source <= max_lane
        out.append(values[source if in_range else lane])
        valid.append(in_range)
    return np.array(out), np.array(valid)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles(mode: str) -> None:
    values = np.random.default_rng(0).integers(0, 2**32, 32).astype(np.uint32)
    out, valid = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    for segment in (0, 0b10000, 0b11000, 0b11110, 31):
        for limit in (0, 7, 31):
            for distance in (0, 1, 3, 16, 31):
                clamp = segment << 8 | limit
                kernels().run(f"shuffle_{mode}", 1, 32, values, np.uint32(distance), np.uint32(clamp), out, valid)
                wanted = _shuffled(mode, values, distance, clamp)
                np.testing.assert_array_equal(out, wanted[0])
                np.testing.assert_array_equal(valid, wanted[1])


@pytest.mark.parametrize("width", [4, 8, 32])
def test_shuffles_of_cuda(width: int) -> None:
    values = np.arange(100, 132).astype(np.int32)
    out = np.zeros((4, 32), np.int32)
    kernels().run("intrinsics", 1, 32, values, out, np.int32(width))
    start = LANE // width * width
    down = np.where(LANE % width + 3 < width, LANE + 3, LANE)
    up = np.where(LANE % width >= 2, LANE - 2, LANE)
    np.testing.assert_array_equal(out, values[np.stack([LANE ^ 1, down, up, start + 5 % width])])


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_votes(order: Order) -> None:
    for value in (np.arange(64) % 3 - 1, np.ones(64), -np.ones(64)):
        x = value.astype(np.int32)
        out = np.zeros((4, 2, 32), np.uint32)
        kernels().run("votes", 1, 64, x, out, order=order)
        p = (x > 0).reshape(2, 32)
        ballots = (p.astype(np.uint64) << LANE.astype(np.uint64)).sum(1)
        columns = (ballots, p.any(1), p.all(1), p.all(1) | ~p.any(1))
        for got, wanted in zip(out, columns, strict=True):
            np.testing.assert_array_equal(got, np.repeat(wanted[:, None], 32, 1))


def test_reductions() -> None:
    x = np.random.default_rng(1).integers(-(2**31), 2**31, 32).astype(np.int32)
    out = np.zeros((6, 32), np.int32)
    kernels().run("reductions", 1, 32, x, out)
    u = x.view(np.uint32)
    wanted = [np.uint32(int(u.astype(np.uint64).sum()) & 0xFFFFFFFF), x.min().view(np.uint32), u.max()]
    wanted += [np.bitwise_and.reduce(u), np.bitwise_or.reduce(u), np.bitwise_xor.reduce(u)]
    np.testing.assert_array_equal(out.view(np.uint32), np.repeat(np.array(wanted)[:, None], 32, 1))


def test_matches() -> None:
    for x in (np.arange(32) % 5, np.full(32, 7)):
        out = np.zeros((3, 32), np.uint32)
        kernels().run("matches", 1, 32, x.astype(np.int32), out)
        same = ((x[:, None] == x).astype(np.uint64) << LANE.astype(np.uint64)).sum(1)
        np.testing.assert_array_equal(out[0], same)
        equal = len(set(x.tolist())) == 1
        np.testing.assert_array_equal(out[1:], np.repeat([[0xFFFFFFFF * equal], [equal]], 32, 1))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_half_warps_in_separate_branches(order: Order) -> None:
    x, out = np.arange(32, dtype=np.int32), np.zeros(32, np.int32)
    kernels().run("half_warps", 1, 32, x, out, order=order)
    np.testing.assert_array_equal(out, np.repeat([x[:16].sum(), x[16:].sum()], 16))


@pytest.mark.parametrize("n_threads", [32, 96, 100])
def test_block_votes(n_threads: int) -> None:
    for x in (np.arange(n_threads) % 3 - 1, np.ones(n_threads), -np.ones(n_threads)):
        out = np.zeros((3, n_threads), np.int32)
        kernels().run("block_votes", 1, n_threads, x.astype(np.int32), out)
        p = x > 0
        np.testing.assert_array_equal(out, np.repeat([[p.sum()], [p.all()], [p.any()]], n_threads, 1))


def test_lane_masks() -> None:
    out = np.zeros((32, 6), np.uint32)
    kernels().run("lane_masks", 1, 32, out)
    eq = np.uint64(1) << LANE.astype(np.uint64)
    wanted = np.stack([LANE.astype(np.uint64), eq - 1, 2 * eq - 1, 2**32 - 2 * eq, 2**32 - eq, eq], 1)
    np.testing.assert_array_equal(out, wanted)
