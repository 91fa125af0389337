"""The plan of a step's memory, against what programs take of emulated devices."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.engine.runner import MAX_TOKENS
from localllm.kernels.cuda import step as steps
from localllm.kernels.cuda.backend import CUDABackend
from localllm.kernels.split import MICRO_BATCH
from localllm.llm import LLM
from localllm.quant.types import GGMLType
from tests.helpers.tiny_models import tiny_gguf
from tests.kernels.cuda.watched import KernellessDriver

T = GGMLType
#: Wider than a tiny model, so that what rows are padded to is little.
WIDE = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8, "max_position_embeddings": 2048}
SPLITS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "whole": (1, {}),
    "two devices": (2, {"tensor_split": [1, 1]}),
    "with the host": (1, {"n_gpu_layers": 1}),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("type", [T.Q4_0, T.F16, T.F32, "mixture"])
def test_a_step_takes_what_the_plan_says(
    load: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type: Any, split: str
) -> None:
    """Prompts longer than a step and a micro-batch, and tokens chosen among the best of them on the device.

    Emulated devices take no memory for graphs.
    """
    monkeypatch.setattr(CUDABackend, "step_tokens", MAX_TOKENS)
    monkeypatch.setattr(steps, "NODE_BYTES", 0)
    n_devices, options = SPLITS[split]
    if type == "mixture":
        path = tiny_gguf(tmp_path / "model.gguf", "qwen3_moe", type=T.Q4_0, max_position_embeddings=2048)
    else:
        path = tiny_gguf(tmp_path / "model.gguf", type=type, **WIDE)
    driver = KernellessDriver(n_devices, memory=1 << 30)
    free = [driver.memory_info(i).free for i in range(n_devices)]
    ops = [CUDABackend(driver, i, compiles_ahead=False) for i in range(n_devices)]
    llm = load(path, *ops, context=1024, **options)
    ids = [int(i) for i in np.random.default_rng(0).integers(3, 300, MAX_TOKENS + MICRO_BATCH)]
    for temperature in (0.0, 1.0):
        llm.generate(ids, max_tokens=2, temperature=temperature, top_k=40, ignore_eos=True)
    gc.collect()
    for i in range(n_devices):
        on = llm.info.placement.on(f"cuda:{i}")
        taken = free[i] - driver.memory_info(i).free - on.weights - on.kv_cache
        assert taken == on.scratch
