"""Attention, append and elementwise keep to their budget of registers and spill none.

All head sizes and all architectures have their turn, but not each with each: `attention_registers` does that by hand.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.cuda_on_cpu import nvrtc
from tests.kernels.cuda.attention_registers import (
    Case,
    append_case,
    attention_case,
    elementwise_case,
    everything,
)

BUDGETS = tomllib.loads(Path(__file__).with_name("registers_attention.toml").read_text())
CASES = [
    attention_case(256, "q8_0", 75),
    attention_case(80, "f16", 80, capped=True),
    attention_case(256, "f16", 86),
    attention_case(64, "q8_0", 89),
    attention_case(128, "f16", 90),
    attention_case(16, "q8_0", 120, capped=True),
    append_case(256, "q8_0", 75),
    append_case(128, "f16", 90),
    elementwise_case(75),
    elementwise_case(90),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.architecture}")
def test_registers(case: Case) -> None:
    if reason := nvrtc.missing():
        pytest.skip(reason)
    resources = case.resources()
    assert set(resources) == set(BUDGETS[case.name])
    for kernel, found in resources.items():
        assert found.registers <= BUDGETS[case.name][kernel], kernel
        assert found.spill_bytes == found.stack_bytes == 0, kernel


def test_every_variant_has_a_budget() -> None:
    assert set(BUDGETS) == {case.name for case in everything()}
