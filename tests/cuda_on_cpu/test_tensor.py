"""Matrix instructions compared with numpy, on fragments filled as in the PTX manual or by ldmatrix."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from tests.cuda_on_cpu.kernels import Array, Kernels
from tests.cuda_on_cpu.module import ORDERS, Order

# (shape M, K, type of A and B, registers of A, B and C)
INT_SHAPES = [(16, 32, 4, 2, 4), (16, 16, 2, 1, 4), (8, 16, 1, 1, 2)]
FLOAT_SHAPES = [
    (16, 16, "f16", 4, 2, 4),
    (16, 8, "f16", 2, 1, 4),
    (16, 16, "bf16", 4, 2, 4),
    (16, 8, "bf16", 2, 1, 4),
]


def _mma(name: str, m: int, k: int, types: str, counts: tuple[int, int, int]) -> str:
    """Return a kernel that takes the registers of all lanes, [32, n], and writes the registers of D."""
    a, b, c = counts

    def operand(start: int, n: int) -> str:
        return "{" + ", ".join(f"%{start + i}" for i in range(n)) + "}"

    values = [f'"r"(a[{a} * lane + {i}])' for i in range(a)] + [f'"r"(b[{b} * lane + {i}])' for i in range(b)]
    kind = "f" if types.startswith("f32") else "r"
    cast = "__uint_as_float" if kind == "f" else ""
    back = "__float_as_uint" if kind == "f" else ""
    values += [f'"{kind}"({cast}(c[{c} * lane + {i}]))' for i in range(c)]
    results = ", ".join(f'"={kind}"(d{i})' for i in range(c))
    operands = f"{operand(0, c)}, {operand(c, a)}, {operand(c + a, b)}, {operand(c + a + b, c)}"
    return f"""
extern "C" __global__ void {name}(const unsigned* a, const unsigned* b, const unsigned* c, unsigned* d) {{
  const int lane = threadIdx.x;
  {"float" if kind == "f" else "unsigned"} {", ".join(f"d{i}" for i in range(c))};
  asm volatile("mma.sync.aligned.m{m}n8k{k}.row.col.{types} {operands};" : {results} : {", ".join(values)});
  {" ".join(f"d[{c} * lane + {i}] = {back}(d{i});" for i in range(c))}
}}"""


MATRICES = """
extern "C" __global__ void load_matrices(const uint4* x, unsigned* out) {  // 4 matrices of 8 rows of 16 bytes
  __shared__ __align__(16) uint4 rows[32];
  rows[threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  const unsigned at = (unsigned)__cvta_generic_to_shared(&rows[threadIdx.x]);
  unsigned r0, r1, r2, r3;
  unsigned* mine = out + threadIdx.x * 14;
#define LOAD(FORM, LIST) asm volatile("ldmatrix.sync.aligned.m8n8." FORM ".shared.b16 " LIST ", [%4];" \\
    : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3) : "r"(at))
  LOAD("x1", "{%0}"); mine[0] = r0;
  LOAD("x2", "{%0, %1}"); mine[1] = r0; mine[2] = r1;
  LOAD("x4", "{%0, %1, %2, %3}"); mine[3] = r0; mine[4] = r1; mine[5] = r2; mine[6] = r3;
  LOAD("x1.trans", "{%0}"); mine[7] = r0;
  LOAD("x2.trans", "{%0, %1}"); mine[8] = r0; mine[9] = r1;
  LOAD("x4.trans", "{%0, %1, %2, %3}"); mine[10] = r0; mine[11] = r1; mine[12] = r2; mine[13] = r3;
}
"""
STORES = """
extern "C" __global__ void store_matrices(const uint4* x, uint4* out) {  // what stmatrix stores, ldmatrix loaded
  __shared__ __align__(16) uint4 rows[32], back[64];
  rows[threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  const unsigned at = (unsigned)__cvta_generic_to_shared(&rows[threadIdx.x]);
  const unsigned to = (unsigned)__cvta_generic_to_shared(&back[threadIdx.x]);
  const unsigned to_2 = (unsigned)__cvta_generic_to_shared(&back[32 + threadIdx.x]);
  unsigned r0, r1, r2, r3;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
    : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3) : "r"(at));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%4], {%0, %1, %2, %3};"
    :: "r"(r0), "r"(r1), "r"(r2), "r"(r3), "r"(to));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%4], {%0, %1, %2, %3};"
    :: "r"(r0), "r"(r1), "r"(r2), "r"(r3), "r"(to_2));
  __syncwarp();
  out[threadIdx.x] = back[threadIdx.x];
  out[32 + threadIdx.x] = back[32 + threadIdx.x];
}
"""


@cache
def kernels() -> Kernels:
    parts = [MATRICES]
    for (m, k, *counts), a, b in itertools.product(INT_SHAPES, "su", "su"):
        name = f"mma_{m}_{k}_{a}{b}"
        parts.append(_mma(name, m, k, f"s32.{a}8.{b}8.s32", (counts[0], counts[1], counts[2])))
    for m, k, kind, *counts in FLOAT_SHAPES:
        parts.append(_mma(f"mma_{m}_{k}_{kind}", m, k, f"f32.{kind}.{kind}.f32", (counts[0], counts[1], counts[2])))
    return Kernels.of("\n".join(parts))


def _fragment(matrix: Array, per: int) -> Array:
    """Return registers [32, n] of a matrix [rows, K] of bytes (per = 4) or float16 (2), as A or as B transposed.

    PTX manual, "Matrix fragments for mma": four lanes share a row.  A register holds `per` neighbours along K.  The
    registers of A cover the halves of the rows first, then K.
    """
    rows, k = matrix.shape
    registers = []
    for start, row in itertools.product(range(0, k, 4 * per), range(0, rows, 8)):
        block = np.ascontiguousarray(matrix[row : row + 8, start : start + 4 * per])
        registers.append(block.view(np.uint32).reshape(32))
    return np.ascontiguousarray(np.stack(registers, 1))


def _accumulators(matrix: Array) -> Array:
    """[M, 8] of 32-bit numbers -> [32, M / 4]"""
    rows = matrix.shape[0]
    blocks = [matrix[row : row + 8].reshape(32, 2) for row in range(0, rows, 8)]
    return np.ascontiguousarray(np.concatenate(blocks, 1)).view(np.uint32)


@pytest.mark.parametrize("signs", ["ss", "su", "us", "uu"])
@pytest.mark.parametrize("shape", INT_SHAPES, ids=lambda s: f"m{s[0]}k{s[1]}")
def test_int_mma(shape: tuple[int, ...], signs: str) -> None:
    m, k = shape[:2]
    rng = np.random.default_rng(0)
    kinds = [np.int8 if sign == "s" else np.uint8 for sign in signs]
    a = rng.integers(0, 256, (m, k)).astype(np.uint8).view(kinds[0])
    b = rng.integers(0, 256, (8, k)).astype(np.uint8).view(kinds[1])
    c = rng.integers(-(2**31), 2**31, (m, 8)).astype(np.int32)
    out = np.zeros((32, m // 4), np.uint32)
    kernels().run(f"mma_{m}_{k}_{signs}", 1, 32, _fragment(a, 4), _fragment(b, 4), _accumulators(c), out)
    wanted = (a.astype(np.int64) @ b.astype(np.int64).T + c).astype(np.int32)  # sums wrap
    np.testing.assert_array_equal(out, _accumulators(wanted))


def _halves(kind: str, values: Array) -> tuple[Array, Array]:
    """Round to 16-bit floats; return their bits and their values."""
    if kind == "f16":
        bits = values.astype(np.float16)
        return bits.view(np.uint16), bits.astype(np.float64)
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("order", ORDERS[:3], ids=str)
@pytest.mark.parametrize("shape", FLOAT_SHAPES, ids=lambda s: f"m{s[0]}k{s[1]}{s[2]}")
def test_float_mma(shape: tuple[int, int, str], order: Order) -> None:
    m, k, kind = shape[:3]
    rng = np.random.default_rng(1)
    a_bits, a = _halves(kind, rng.standard_normal((m, k)))
    b_bits, b = _halves(kind, rng.standard_normal((8, k)))
    c = rng.standard_normal((m, 8)).astype(np.float32)
    out = np.zeros((32, m // 4), np.uint32)
    kernels().run(
        f"mma_{m}_{k}_{kind}", 1, 32, _fragment(a_bits, 2), _fragment(b_bits, 2), _accumulators(c), out, order=order
    )
    wanted = _accumulators((a @ b.T + c).astype(np.float32)).view(np.float32)
    np.testing.assert_allclose(out.view(np.float32), wanted, rtol=3e-7, atol=1e-7)


def test_ldmatrix() -> None:
    x = np.random.default_rng(2).integers(0, 65536, (4, 8, 8)).astype(np.uint16)  # [matrix, row, column]
    out = np.zeros((32, 14), np.uint32)
    kernels().run("load_matrices", 1, 32, x, out)
    plain = [np.ascontiguousarray(matrix).view(np.uint32).reshape(32) for matrix in x]
    turned = [np.ascontiguousarray(matrix.T).view(np.uint32).reshape(32) for matrix in x]
    wanted = [part for of in (plain, turned) for n in (1, 2, 4) for part in of[:n]]
    np.testing.assert_array_equal(out, np.stack(wanted, 1))


def test_stmatrix() -> None:
    x = np.random.default_rng(3).integers(0, 65536, (4, 8, 8)).astype(np.uint16)
    out = np.zeros((2, 4, 8, 8), np.uint16)
    Kernels.of(STORES, "check", architecture=90).run("store_matrices", 1, 32, x, out)
    np.testing.assert_array_equal(out, np.stack([x, x.transpose(0, 2, 1)]))
