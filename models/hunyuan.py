"""Hunyuan, dense and with experts (arXiv:2411.02265): Llama's layers, with heads normed behind the rotation."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models import hf_names
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.rope import make_rope

HF_NAMES = (
    hf_names.COMMON
    | hf_names.EXPERTS
    | hf_names.projections("mlp.shared_mlp", "_shexp")
    | {
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
        "ffn_gate_inp": "mlp.gate.wg",
    }
)


def hf_keys(config: Any) -> dict[str, Any]:
    if config.model_type != "hunyuan_v1_moe":
        return {}
    used = config.moe_topk
    return {
        "expert_used_count": used[0] if isinstance(used, list) else used,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": config.intermediate_size,
    }


def record(m: Header) -> Graph:
    return llama_like(m, make_rope(m, m.heads().key_dim), m.experts(), qk_norm="head", norm_last=True)
