"""The memory plan of a step, compared with the memory that programs allocate on emulated devices."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from itertools import product
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
#: Wider than other tiny models, so that the padding of rows is a small share.
WIDE = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8}
LARGER = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 256, "hidden_size": 256}
#: Kind, type of the weights, context length and settings of each model.
MODELS: Mapping[str, tuple[str, GGMLType, int, dict[str, Any]]] = {
    "Q4_0": ("llama", T.Q4_0, 1024, WIDE),
    "F16": ("llama", T.F16, 1024, WIDE),
    "F32": ("llama", T.F32, 1024, WIDE),
    "mixture": ("qwen3_moe", T.Q4_0, 1024, {}),
    "short context": ("llama", T.Q4_0, 64, {}),
    "tied, Q4_K, long context": ("qwen2", T.Q4_K, 4096, {"tie_word_embeddings": True} | LARGER),
    "large vocabulary": (
        "llama",
        T.Q4_0,
        2048,
        {"vocab_size": 8000, "num_hidden_layers": 4, "head_dim": 64} | LARGER,
    ),
    "F16, large heads": ("qwen3", T.F16, 1024, {"num_hidden_layers": 6, "head_dim": 128} | LARGER),
    "F32, six layers": ("llama", T.F32, 256, {"num_hidden_layers": 6} | LARGER),
    "Mixtral": ("mixtral", T.Q4_0, 1024, {"num_hidden_layers": 4} | LARGER),
    "Mixtral, F32": ("mixtral", T.F32, 256, LARGER),
    "many experts": ("qwen3_moe", T.Q4_K, 2048, LARGER | EXPERTS),
    "experts in F16": ("qwen3_moe", T.F16, 64, {}),
}
SPLITS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "whole": (1, {}),
    "two devices": (2, {"tensor_split": [1, 1]}),
    "with the host": (1, {"n_gpu_layers": 1}),
}
CASES = [*product([*MODELS][:4], SPLITS), *((name, "whole") for name in [*MODELS][4:]), ("Mixtral", "two devices")]


@pytest.mark.parametrize(("model", "split"), CASES)
def test_a_step_takes_the_planned_memory(
    load: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, split: str
) -> None:
    """Prompts are longer than a step and a micro-batch, and devices choose tokens greedily and at random."""
    monkeypatch.setattr(CUDABackend, "step_tokens", MAX_TOKENS)
    monkeypatch.setattr(steps, "NODE_BYTES", 0)  # emulated devices allocate no memory for graphs
    (kind, type, context, changes), (n_devices, options) = MODELS[model], SPLITS[split]
    path = tiny_gguf(tmp_path / "model.gguf", kind, type=type, max_position_embeddings=4096, **changes)
    driver = KernellessDriver(n_devices, memory=1 << 32)
    free = [driver.memory_info(i).free for i in range(n_devices)]
    backends = [CUDABackend(driver, i, compiles_ahead=False) for i in range(n_devices)]
    llm = load(path, *backends, context=context, **options)
    n_prompt = min(MAX_TOKENS + MICRO_BATCH, context - 4)
    ids = [int(i) for i in np.random.default_rng(0).integers(3, 300, n_prompt)]
    for temperature in (0.0, 1.0):
        llm.generate(ids, max_tokens=2, temperature=temperature, top_k=40, ignore_eos=True)
    gc.collect()
    for i in range(n_devices):
        planned = llm.info.placement.on(f"cuda:{i}")
        taken = free[i] - driver.memory_info(i).free - planned.weights - planned.kv_cache
        assert taken == planned.scratch
