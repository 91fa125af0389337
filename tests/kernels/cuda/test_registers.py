"""Kernels for matrix products keep to their budget of registers and spill none, on all architectures.

All formats and all architectures have their turn, but not each with each: `registers` does that by hand.
"""

from __future__ import annotations

import json

import pytest

from localllm.quant.lut import KernelType
from localllm.quant.types import GGMLType
from tests.cuda_on_cpu import nvrtc
from tests.kernels.cuda.registers import BUDGETS, SHARED_BYTES, TYPES, launches, resources

T = GGMLType

ARCHITECTURES = list(SHARED_BYTES)
CASES = [
    *((type, ARCHITECTURES[i % 6], ("matvec",)) for i, type in enumerate(TYPES)),
    (T.Q4_K, 90, ("pack", "embed", "quantise")),
    (T.Q4_0, 80, ("matmul", "matmul_few")),
    (T.Q5_K, 86, ("matmul_few",)),
    (T.Q6_K, 89, ("matmul_few",)),
    (T.Q2_K, 90, ("matmul",)),
    (T.Q8_0, 120, ("matmul",)),
    (T.F16, 75, ("matmul_few",)),
    (T.BF16, 120, ("matmul_few", "matmul")),
    (T.Q4_K, 80, ("matvec_experts", "matmul_few_experts", "matmul_experts")),
    (T.Q6_K, 120, ("matvec_experts", "matmul_experts")),
    (T.F16, 75, ("matmul_few_experts",)),
]


@pytest.mark.parametrize(
    ("type", "architecture", "kernels"), CASES, ids=lambda v: v.name if hasattr(v, "name") else str(v)
)
def test_registers(type: KernelType, architecture: int, kernels: tuple[str, ...]) -> None:
    if reason := nvrtc.missing():
        pytest.skip(reason)
    budgets = json.loads(BUDGETS.read_text())
    chosen = {name: v for name, v in launches(type, architecture).items() if v.kernel in kernels}
    for name, launch in list(chosen.items())[-2:]:  # the largest variants
        found = resources(launch, architecture)
        assert found.registers <= budgets[name], name
        assert found.spill_bytes == found.stack_bytes == 0, name


def test_every_variant_has_a_budget() -> None:
    budgets = json.loads(BUDGETS.read_text())
    variants = {name for type in TYPES for arch in ARCHITECTURES for name in launches(type, arch)}
    assert set(budgets) == variants
