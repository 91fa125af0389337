"""ERNIE 4.5, dense and with experts, which follow some dense layers and may be in every second layer only; and the
text of PaddleOCR-VL, whose rotary pairs are halves."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import axes_keys
from localllm.models.rope import make_rope, with_axes

HF_MEANT = {"moe_norm_min": (), "moe_layer_end_index": ()}


def hf_keys(config: Any) -> dict[str, Any]:
    if not getattr(config, "moe_num_experts", None):
        return axes_keys(config)
    return {
        "expert_count": config.moe_num_experts,
        "expert_used_count": config.moe_k,
        "interleave_moe_layer_step": config.moe_layer_interval,
        "leading_dense_block_count": config.moe_layer_start_index,
        "expert_shared_count": config.moe_num_shared_experts,
        "expert_shared_feed_forward_length": config.moe_num_shared_experts * config.moe_intermediate_size or None,
    }


def record(m: Header) -> Graph:
    rope = make_rope(m, m.heads().key_dim, interleaved=m.config.architecture != "paddleocr")
    rope = with_axes(m, rope, in_turn=False)
    return llama_like(m, rope, m.experts())
