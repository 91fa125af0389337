"""Loads and stores of all widths and spaces, and atomics."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.cuda_on_cpu.kernels import Array, Kernels
from tests.cuda_on_cpu.module import Mode

WIDTHS = ("u8", "s8", "u16", "s16", "u32", "u64", "v2.u8", "v4.u8", "v2.u16", "v4.s16", "v2.u32", "v4.u32", "v2.u64")


def _copy(form: str) -> str:
    """Return a kernel that copies 16 bytes per thread through shared memory and generic addresses."""
    vector, _, kind = form.rpartition(".")
    n, size = int(vector[1:] or 1) if vector else 1, int(kind[1:]) // 8
    register = {"8": ".b16", "16": ".b16", "32": ".b32", "64": ".b64"}[kind[1:]]
    names = [f"r{i}" for i in range(n)]
    value = "{" + ", ".join(names) + "}" if n > 1 else names[0]
    steps = range(0, 16, n * size)
    to_shared = " ".join(f"ld.global.nc.{form} {value}, [%0+{i}]; st.shared.{form} [%2+{i}], {value};" for i in steps)
    back = " ".join(f"ld.{form} {value}, [%3+{i}]; st.global.{form} [%1+{i}], {value};" for i in steps)
    name = form.replace(".", "_")
    return f"""
extern "C" __global__ void copy_{name}(const char* x, char* y) {{
  __shared__ __align__(16) char s[512];
  char* mine = s + 16 * threadIdx.x;
  asm volatile("{{ .reg {register} {", ".join(names)}; {to_shared} {back} }}" :: "l"(x + 16 * threadIdx.x),
    "l"(y + 16 * threadIdx.x), "r"((unsigned)__cvta_generic_to_shared(mine)), "l"(mine) : "memory");
}}"""


EXTENSIONS = """
extern "C" __global__ void extend(const char* x, int* y) {  // narrow loads into wide registers
  int s8, u8, s16, u16;
  asm volatile("ld.global.s8 %0, [%4]; ld.global.u8 %1, [%4]; ld.global.s16 %2, [%4]; ld.global.u16 %3, [%4];"
    : "=r"(s8), "=r"(u8), "=r"(s16), "=r"(u16) : "l"(x + 2 * threadIdx.x));
  int* mine = y + 4 * threadIdx.x;
  mine[0] = s8; mine[1] = u8; mine[2] = s16; mine[3] = u16;
}
"""
TOTAL = sum(range(1, 33))
# name: (C type, CUDA expression of the thread's index + 1, result of 32 threads for an initial value of 7)
ATOMICS = {
    "add": ("int", "atomicAdd(p, v)", 7 + TOTAL),
    "sub": ("int", "atomicSub(p, v)", 7 - TOTAL),
    "max": ("int", "atomicMax(p, v)", 32),
    "min": ("int", "atomicMin(p, v)", 1),
    "umax": ("unsigned", "atomicMax(p, v)", 32),
    "and": ("unsigned", "atomicAnd(p, ~v)", 0),
    "or": ("unsigned", "atomicOr(p, v)", 63),
    "xor": ("unsigned", "atomicXor(p, v)", 7 ^ 32),
    "inc": ("unsigned", "atomicInc(p, 20)", (7 + 32) % 21),
    "dec": ("unsigned", "atomicDec(p, 20)", (7 - 32) % 21),
    "float": ("float", "atomicAdd(p, (float)v)", 7 + TOTAL),
    "double": ("double", "atomicAdd(p, (double)v)", 7 + TOTAL),
    "long": ("unsigned long long", "atomicAdd(p, (unsigned long long)v << 33)", 7 + (TOTAL << 33)),
}
TYPES: dict[str, type[np.generic]] = {
    "int": np.int32,
    "unsigned": np.uint32,
    "unsigned long long": np.uint64,
    "float": np.float32,
    "double": np.float64,
}


def _atomic(name: str) -> str:
    kind, expression, _ = ATOMICS[name]
    return f"""
extern "C" __global__ void atomic_{name}({kind}* out, {kind} start) {{
  __shared__ {kind} s[1];
  if (threadIdx.x == 0) s[0] = start;
  __syncthreads();
  const unsigned v = threadIdx.x + 1;
  {{ {kind}* p = out; {expression}; }}
  {{ {kind}* p = s; {expression}; }}
  __syncthreads();
  if (threadIdx.x == 0) out[1] = s[0];
}}"""


CAS = """
extern "C" __global__ void compare_and_swap(unsigned* out, unsigned* seen) {
  seen[threadIdx.x] = atomicCAS(out, threadIdx.x, threadIdx.x + 1);
  unsigned old = out[1 + threadIdx.x];
  out[1 + threadIdx.x] = atomicExch(seen + 32 + threadIdx.x, old);
}
"""


@cache
def kernels(mode: Mode) -> Kernels:
    parts = [*map(_copy, WIDTHS), EXTENSIONS, *map(_atomic, ATOMICS), CAS]
    return Kernels.of("\n".join(parts), mode)


@pytest.mark.parametrize("mode", ["fast", "check"])
@pytest.mark.parametrize("form", WIDTHS)
def test_copies_of_all_widths(form: str, mode: Mode) -> None:
    x, y = _aligned(512), _aligned(512)
    x[:] = np.random.default_rng(0).integers(0, 256, 512)
    kernels(mode).run(f"copy_{form.replace('.', '_')}", 1, 32, x, y)
    np.testing.assert_array_equal(y, x)


def _aligned(n: int) -> Array:
    storage = np.zeros(n + 16, np.uint8)
    return storage[-storage.ctypes.data % 16 :][:n]


def test_narrow_loads_are_extended() -> None:
    x = np.array([0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x1280], np.uint16)
    y = np.zeros((x.size, 4), np.int32)
    kernels("fast").run("extend", 1, x.size, x, y)
    low = x.astype(np.uint8)
    np.testing.assert_array_equal(y, np.stack([low.view(np.int8), low, x.view(np.int16), x], 1, dtype=np.int32))


@pytest.mark.parametrize("name", ATOMICS)
def test_atomics(name: str) -> None:
    c_type, _, wanted = ATOMICS[name]
    start = TYPES[c_type](7)
    out = np.full(2, start)
    kernels("check").run(f"atomic_{name}", 1, 32, out, start)
    np.testing.assert_array_equal(out, wanted)


def test_compare_and_swap() -> None:
    out, seen = np.zeros(33, np.uint32), np.zeros(64, np.uint32)
    out[1:], seen[32:] = np.arange(100, 132), np.arange(200, 232)
    kernels("check").run("compare_and_swap", 1, 32, out, seen)
    assert out[0] == 32  # in lane order, each thread finds its own index
    np.testing.assert_array_equal(seen[:32], np.arange(32))
    np.testing.assert_array_equal(out[1:], np.arange(200, 232))
    np.testing.assert_array_equal(seen[32:], np.arange(100, 132))
