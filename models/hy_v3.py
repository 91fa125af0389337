"""Hunyuan 3 (Hy3): Llama's layers with normed heads, and experts as in DeepSeek V3 after dense layers."""

from __future__ import annotations

from typing import Any

from localllm.models import dots1
from localllm.models.hf_convert import Array

HF_MEANT = {"mlp_layer_types": (), "norm_topk_prob": (True,), "first_k_dense_replace": ()}
record = dots1.record


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    return {"exp_probs_b": array} if name.endswith("mlp.expert_bias") else array  # without ".bias", as in llama.cpp


def hf_keys(config: Any) -> dict[str, Any]:
    return {
        "expert_shared_feed_forward_length": config.moe_intermediate_size * config.num_shared_experts,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": config.router_scaling_factor,
    }
