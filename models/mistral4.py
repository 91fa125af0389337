"""Mistral Small 4: DeepSeek's latent attention, with queries that grow with the logarithm of their position."""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError
from localllm.models import deepseek2

hf_tensor, record = deepseek2.hf_tensor, deepseek2.record


def hf_keys(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    if (getattr(config, "n_group", None) or 1) > 1:
        raise ModelError("config.json has experts in groups, which localllm does not convert for Mistral 4")
    return deepseek2.hf_keys(config) | {
        "expert_gating_func": 1,
        "attention.temperature_scale": rope.get("llama_4_scaling_beta"),
        "attention.temperature_length": rope.get("original_max_position_embeddings"),
    }
