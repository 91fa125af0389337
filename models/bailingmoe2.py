"""Ling and Ring 2, and Sarvam (arXiv:2510.22115): Llama's layers with normed heads that may be rotated in part, one
matrix for query, key and value, and experts as in DeepSeek V3."""

from __future__ import annotations

from typing import Any

from localllm.models import dots1
from localllm.models.hf_convert import head_dim, routing_keys

record = dots1.record


def hf_keys(config: Any) -> dict[str, Any]:
    is_sarvam = config.model_type == "sarvam_moe"
    part = config.rope_parameters.get("partial_rotary_factor", 1.0 if is_sarvam else 0.5)
    width = getattr(config, "moe_shared_expert_intermediate_size", None)
    return routing_keys(config) | {
        "vocab_size": config.vocab_size,
        "rope.dimension_count": int(head_dim(config) * part),
        "expert_shared_feed_forward_length": width or config.moe_intermediate_size * config.n_shared_experts,
    }
