"""Machine code for Arm and Apple processors, which the tests compile to assembly and read instead of running it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from localllm.kernels.cpu import attention, elementwise, matmul, recurrent
from localllm.kernels.cpu.compiler import Kernel, Variant, assembly, kernel, variant
from localllm.kernels.cpu.program import run_program
from localllm.kernels.cpu.simd import load_f16x16, store_f32x16, zero_f32x16
from localllm.kernels.cpu.target import TARGETS, Target
from localllm.kernels.cpu.tiles import TILES, X_STEP
from localllm.kernels.graph import KVCache, Rows, Tensor
from localllm.kernels.operations import Attention
from localllm.quant.lut import LUT_E2M1_16, LUT_TYPES, KernelType
from localllm.quant.packing import LAYOUTS
from localllm.quant.types import GGMLType
from tests.helpers.assembly import loops_of, vector_instructions

I8MM, NEON, ASIMD = (next(t for t in TARGETS if t.name == name) for name in ("i8mm", "neon", "asimd"))
LINUX, APPLE = "aarch64-unknown-linux-gnu", "arm64-apple-darwin23.0.0"

#: One table per block layout; other look-up tables differ in numbers only.
FORMATS = [t for t in TILES if t not in LUT_TYPES or t is LUT_E2M1_16]

X86 = re.compile(r"\b(v?p[a-z]+[bwdq]|[xyz]mm\d+|[re][abcd]x)\b")


@kernel
def multiply_one_tile(begin, end, tile, x, y):
    """The inner part of a matrix product, for one tile and one token."""
    acc[0] = zero_f32x16()
    UNPACK(acc, 1, tile, x, X_STEP, 0, X_STEP, y)
    store_f32x16(y, acc[0])


def instructions(v: Variant, triple: str) -> list[str]:
    """Return the instructions of the only function of a kernel."""
    text = assembly(v, triple)
    # Symbols on Apple's systems start with an underscore.
    assert re.search(rf'^"?_?{re.escape(v.symbol)}"?:', text, re.MULTILINE)
    lines = [line.strip() for line in text.splitlines() if line.startswith("\t") and not line.startswith("\t.")]
    assert len(lines) > 10
    return [line for line in lines if not line.startswith((";", "//", "#"))]


def check(code: list[str]) -> None:
    """Check that the code calls no library and uses no instruction of another processor."""
    assert not [i for i in code if re.match(r"blr?\b", i)]
    assert not [i for i in code if X86.search(i)]


@pytest.mark.parametrize("type", FORMATS, ids=lambda t: t.name)
def test_integer_products_use_the_dot_product(type: KernelType) -> None:
    tile, layout = TILES[type], LAYOUTS[type]
    constants = {"TILE_BYTES": layout.tile_bytes, **tile.constants}
    code = instructions(variant(multiply_one_tile, NEON, **constants), LINUX)
    check(code)
    dots = sum(i.startswith(("sdot", "udot")) for i in code)
    # 16 rows of 32 columns are 8 vectors of 64 bytes, each 4 registers of 16 bytes.  Loops repeat some vectors.
    repeats = {GGMLType.Q2_K: 4, GGMLType.Q3_K: 4, GGMLType.Q4_K: 4, GGMLType.Q5_K: 4, GGMLType.Q6_K: 4}
    assert dots >= layout.columns // 32 * 32 // repeats.get(type, 1)
    assert any(i.startswith("prfm") for i in code)  # prefetches
    assert all(re.search(r"\.4b\[\d\]$", i) for i in code if i.startswith("sdot"))  # loads 16 activations at a time
    if type is GGMLType.IQ4_NL or type in LUT_TYPES:
        assert any(i.startswith("tbl") for i in code)


def test_integer_products_without_the_dot_product_are_summed_in_16_bits() -> None:
    tile, layout = TILES[GGMLType.Q4_0], LAYOUTS[GGMLType.Q4_0]
    constants = {"TILE_BYTES": layout.tile_bytes, **tile.constants}
    code = instructions(variant(multiply_one_tile, ASIMD, **constants), LINUX)
    check(code)
    assert not any(i.startswith("sdot") for i in code)
    # Sixteen bits hold the sum of eight products, so each half of a quarter is widened once per eight products.
    products = sum(i.startswith(("smull", "smlal")) for i in code)
    assert products >= 8 * 8
    assert products == 8 * sum(i.startswith(("saddlp", "sadalp")) for i in code)


def test_a_whole_matrix_product_for_apple() -> None:
    tile, layout = TILES[GGMLType.Q4_0], LAYOUTS[GGMLType.Q4_0]
    constants = {"TILE_BYTES": layout.tile_bytes, "BLOCKS": 1, "HEADS": False, **tile.constants}
    code = instructions(variant(matmul.matmul_quantised, NEON, **constants), APPLE)
    check(code)
    # Four rows of a tile of eight tokens, of half a tile, and of one token.
    assert sum(i.startswith("sdot") for i in code) >= 8 * 8 + (4 + 1) * 32


def test_float_products_use_fused_multiply_adds() -> None:
    code = instructions(variant(matmul.matmul_float, NEON, LOAD=load_f16x16, COLUMN_BYTES=32, HEADS=False), LINUX)
    check(code)
    assert any(i.startswith("fmla") for i in code)
    assert any(i.startswith("fcvtl") for i in code)  # float16 to float32


def test_attention() -> None:
    op = Attention(Tensor(Rows.TOKENS, 32), KVCache(0, 1, 32, 32, "q8_0"), scale=1.0, softcap=30.0)
    constants = attention.constants(op, NEON)
    code = instructions(variant(attention.attention, NEON, **constants), LINUX)
    check(code)
    assert any(i.startswith("fmla") for i in code)


@pytest.mark.parametrize("triple", [LINUX, APPLE])
@pytest.mark.parametrize(
    ("code", "constants"),
    [
        (elementwise.quantise, {}),
        (elementwise.rms_norm, {"WEIGHT": True}),
        (elementwise.gated, {"ACTIVATION": elementwise.silu, "UP": True}),
        (recurrent.recurrence, {"DELTA": True, "PER_CHANNEL": False, "BOUNDED": False, "ROWS": 128, "VECTORS": 2}),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_other_kernels(code: Kernel, constants: dict[str, Any], triple: str) -> None:
    check(instructions(variant(code, NEON, **constants), triple))


def test_threads_synchronise_by_atomic_additions() -> None:
    code = instructions(variant(run_program, NEON), LINUX)
    # The code calls kernels and the operating system by address.
    assert any(i.startswith("blr") for i in code)
    assert not [i for i in code if re.match(r"bl\b", i)]
    assert any(i.startswith(("ldaxr", "ldadd")) for i in code)
    assert any(i.startswith(("yield", "hint")) for i in code)


#: Rows of the table in docs/kernels.md: format; products per instruction in prompts, with the dot product and with
#: i8mm; instructions to decode 16 × 32 with the dot product.
COUNTED = re.findall(
    r"^\| (\w+) \|[^|]*\| ([\d.]+) \| ([\d.]+) \|[^|]*\| (\d*) ?\|",
    (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def counts(name: str, target: Target, multiply: str) -> list[tuple[int, int]]:
    """Return the products and the vector instructions of each inner loop of a format's matrix product."""
    tile, layout = TILES[GGMLType[name]], LAYOUTS[GGMLType[name]]
    constants = {"TILE_BYTES": layout.tile_bytes, "BLOCKS": layout.columns // 32, "HEADS": False, **tile.constants}
    loops = map(vector_instructions, loops_of(variant(matmul.matmul_quantised, target, **constants)))
    return [(sum(i.startswith(multiply) for i in loop), len(loop)) for loop in loops]


assert COUNTED


@pytest.mark.parametrize(
    ("name", "dots", "matrices", "decoding"),
    [pytest.param(*row, marks=[] if row[0] == "Q4_0" else [pytest.mark.ci]) for row in COUNTED],
)
def test_the_table_of_instructions_matches_the_code(name: str, dots: str, matrices: str, decoding: str) -> None:
    with_dots = counts(name, NEON, "sdot")
    slab = min(
        n for multiply, n in with_dots if multiply == 64
    )  # the same number as a pair of blocks of a decoded token
    assert 1024 / slab == pytest.approx(float(dots), abs=0.1)
    token = next(n for multiply, n in with_dots if multiply == 32)  # the first loop of the kernel
    assert not decoding or token == pytest.approx(int(decoding), abs=2)
    (slab,) = (n for multiply, n in counts(name, I8MM, "smmla") if multiply == 32)
    assert 1024 / slab == pytest.approx(float(matrices), abs=0.1)
