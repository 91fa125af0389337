"""GLM-4.5, 4.6 and 4.7 (arXiv:2508.06471): experts after a few dense layers, and a rotation of half of each head."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import axes_keys, rotated_part, routing_keys
from localllm.models.rope import make_rope, with_axes


def hf_keys(config: Any) -> dict[str, Any]:
    return rotated_part(config) | axes_keys(config) | routing_keys(config)


def record(m: Header) -> Graph:
    qk_norm = "head" if "blk.0.attn_q_norm.weight" in m.weights else None
    experts = m.experts(gating="sigmoid")
    rope = with_axes(m, make_rope(m, m.heads().key_dim), in_turn=False)
    return llama_like(m, rope, experts, ffn_norm="post_attention_norm", qk_norm=qk_norm)
