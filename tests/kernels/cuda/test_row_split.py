"""Models split by rows over emulated devices, each of which computes a part of every layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm.kernels.cuda.row_split import RowSplitBackend
from localllm.llm import LLM
from localllm.quant.types import GGMLType
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.emulated_streams import StreamOrder
from tests.helpers.backends import emulated_cuda
from tests.kernels.cuda.test_models import (
    SHORT,
    assert_same_text,
    harness,
    small,
)

T = GGMLType
#: Sizes of which four devices have a part each.
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 160}


def over(n: int, **options: Any) -> RowSplitBackend:
    driver = EmulatedDriver(n, **options)
    return RowSplitBackend([emulated_cuda(driver, i) for i in range(n)])


@pytest.mark.parametrize(
    ("kind", "type", "n", "peers", "order"),
    [
        ("llama", T.Q4_0, 2, True, "random"),
        ("llama", T.Q8_0, 2, False, "lazy"),
        ("qwen3", T.F16, 3, True, "lazy"),
        ("qwen2", T.Q4_0, 4, False, "random"),
        ("llama", T.F32, 2, True, "eager"),
    ],
)
def test_the_text_is_the_cpus(
    load: Callable[..., LLM], tmp_path: Path, kind: str, type: GGMLType, n: int, peers: bool, order: StreamOrder
) -> None:
    harness()
    path = small(tmp_path, kind, type, num_hidden_layers=2, **WIDE)
    llm = load(path, over(n, peers=peers, order=order, seed=n))
    assert_same_text(llm, load(path), SHORT)
