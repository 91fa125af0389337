"""Operands of products stay in registers on every instruction set.  The tests compile and read the code."""

from __future__ import annotations

import re
from typing import Any

import pytest

from localllm.kernels.cpu import attention, experts, matmul, recurrent
from localllm.kernels.cpu.compiler import Kernel, Variant, variant
from localllm.kernels.cpu.simd import load_bf16x16, load_f16x16, load_f32x16
from localllm.kernels.cpu.target import TARGETS, Target
from localllm.kernels.cpu.tiles import TILES, TOKENS
from localllm.kernels.graph import KVCache, Rows, Tensor
from localllm.kernels.operations import Attention
from localllm.quant.packing import LAYOUTS
from localllm.quant.types import GGMLType
from tests.helpers.assembly import float_products, loops_of, spilled, spills, vector_instructions

F32, F16, BF16 = (
    {"LOAD": load, "COLUMN_BYTES": n} for load, n in ((load_f32x16, 64), (load_f16x16, 32), (load_bf16x16, 32))
)
#: Targets by kind of registers.  Outside CI, tests compile code only for the first target of each kind.
KINDS = [("avx512vnni", "avx512"), ("avx2", "avxvnni"), ("neon", "i8mm", "asimd"), ("generic",)]
OTHER_FORMATS = [GGMLType.Q4_0, GGMLType.Q5_K, GGMLType.Q6_K, GGMLType.Q2_K]
BY_NAME = {target.name: target for target in TARGETS}
every_target = pytest.mark.parametrize(
    "target",
    [
        pytest.param(BY_NAME[name], id=name, marks=[pytest.mark.ci] if i else [])
        for names in KINDS
        for i, name in enumerate(names)
    ],
)


def test_all_targets_are_tried() -> None:
    assert sorted(name for names in KINDS for name in names) == sorted(BY_NAME)


def products_and_spills(v: Variant, at_least: int) -> list[tuple[int, int]]:
    """Return the float products and the spills of innermost loops with at least ``at_least`` products."""
    loops = [(float_products(loop), len(spills(loop))) for loop in loops_of(v)]
    return [counts for counts in loops if counts[0] >= at_least]


def tile(target: Target) -> tuple[int, int]:
    constants = target.constants
    return constants["TILE_TOKENS"], constants["TILE_GROUPS"]


def test_tiles_fill_the_registers() -> None:
    assert {name: tile(BY_NAME[names[0]]) for names in KINDS for name in names[:1]} == {
        "avx512vnni": (8, 2),
        "avx2": (6, 1),
        "neon": (6, 1),
        "generic": (2, 1),
    }
    for target in TARGETS:
        tokens, groups = tile(target)
        n_vectors = tokens * groups + groups  # sums and weights
        assert n_vectors * target.registers_per_vector < target.n_registers
        assert target.constants["FLOAT_TOKENS"] % tokens == 0
        assert 64 * matmul.FLOAT_GROUPS * target.constants["FLOAT_TOKENS"] <= 1 << 14  # bytes of sums in a frame


@every_target
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        pytest.param(matmul.matmul_float, {**F32, "HEADS": False}, id="F32"),
        pytest.param(matmul.matmul_float, {**F16, "HEADS": True}, id="F16", marks=pytest.mark.ci),
        pytest.param(matmul.matmul_float, {**BF16, "HEADS": False}, id="BF16", marks=pytest.mark.ci),
        pytest.param(experts.experts_float, F16, id="experts", marks=pytest.mark.ci),
    ],
)
def test_float_products(target: Target, kernel: Kernel, constants: dict[str, Any]) -> None:
    tokens, groups = tile(target)
    n_products = tokens * groups * target.registers_per_vector
    loops = products_and_spills(variant(kernel, target, **constants), n_products)
    if target.name == "generic":  # widening float16 takes multiplications on this target
        loops = [counts for counts in loops if counts[0] == n_products]
    assert len(loops) >= matmul.FLOAT_GROUPS // groups
    assert set(loops) == {(n_products, 0)}


def test_a_tile_that_is_too_large_is_found() -> None:
    """Eight tokens times 32 rows fit 32 registers of 64 bytes, but not 16 registers of 32 bytes."""
    large = Target("avx2", "x86_64", "x86-64-v3", "", "maddubs256", frozenset())
    tile = {**large.constants, "TILE_TOKENS": 8, "TILE_GROUPS": 2, "FLOAT_TOKENS": 64}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "constants", property(lambda _: tile))
        (loop,) = products_and_spills(variant(matmul.matmul_float, large, **F32, HEADS=False), 32)
    n_products, n_spills = loop
    assert n_products == 32
    assert n_spills > 20


@every_target
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.ci)], ids=["decoder", "encoder"])
def test_attention(target: Target, causal: bool) -> None:
    """Rows of queries times keys and values in F16."""
    if target.name == "generic":
        pytest.skip("without instructions for halves, widening them takes more registers than the sums")
    op = Attention(Tensor(Rows.TOKENS, 64), KVCache(0, 1, 64, 64, "f16"), scale=1.0, causal=causal)
    constants = attention.constants(op, target)
    n_products = constants["ROWS"] * constants["VECTORS"] * constants["UNROLLED"] * target.registers_per_vector
    assert products_and_spills(variant(attention.attention, target, **constants), n_products)[:2] == [
        (n_products, 0),
        (n_products, 0),
    ]


@every_target
@pytest.mark.parametrize("delta", [True, pytest.param(False, marks=pytest.mark.ci)])
def test_recurrent_states(target: Target, delta: bool) -> None:
    """No loop over the rows of a state stores a sum on the stack; it may read constants of a token from there."""
    sizes = {"ROWS": 128, "VECTORS": 2 if target.name != "generic" else 1, "PER_CHANNEL": False, "BOUNDED": False}
    loops = loops_of(variant(recurrent.recurrence, target, **sizes, DELTA=delta))
    loops = [loop for loop in loops if float_products(loop)]
    assert len(loops) >= 3
    assert not any(map(spilled, loops))


@pytest.mark.parametrize("name", ["avx2", pytest.param("avxvnni", marks=pytest.mark.ci)])
@pytest.mark.parametrize("type", [GGMLType.Q4_K, *(pytest.param(t, marks=pytest.mark.ci) for t in OTHER_FORMATS)])
def test_slabs_of_codes(name: str, type: GGMLType) -> None:
    """Eight rows of a block fill half of AVX2's registers.  Sixteen rows would spill every third instruction."""
    layout, tile = LAYOUTS[type], TILES[type]
    constants = {"TILE_BYTES": layout.tile_bytes, "BLOCKS": layout.columns // 32, "HEADS": False, **tile.constants}
    n_products = 8 * TOKENS  # of eight vectors of codes
    loops = [
        loop
        for loop in loops_of(variant(matmul.matmul_quantised, BY_NAME[name], **constants))
        if sum(bool(re.search(r"\bvp(maddubsw|dpbusd)\b", line)) for line in loop) == n_products
    ]
    slab = vector_instructions(loops[-1])
    assert len(spills(slab)) < 0.1 * len(slab)
    assert len(spilled(slab)) < 0.03 * len(slab)


def test_rounded_floats() -> None:
    """Encoders round floats to 16 bits: four tokens times 16 rows fit the registers of AVX2."""
    loops = loops_of(variant(matmul.matmul_int16, BY_NAME["avx2"], **F16))
    products = [loop for loop in loops if any(line.startswith("vpmaddwd") for line in loop)]
    assert products
    assert not any(map(spills, products))
