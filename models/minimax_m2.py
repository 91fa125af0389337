"""MiniMax-M2: attention with norms over complete rows of query and key and a partial rotation, and experts."""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import rotated_part

HF_MEANT = {"scoring_func": ("sigmoid",)}


def hf_keys(config: Any) -> dict[str, Any]:
    part = rotated_part(config)["rope.dimension_count"]
    has_part = "partial_rotary_factor" in config.rope_parameters
    rotated = getattr(config, "rotary_dim", None) or part
    rotated = part if has_part and "rotary_dim" not in config else rotated
    if not has_part and rotated != part and config.text_type.startswith("minimax_m3"):  # whose class ignores it
        raise ModelError(f"config.json has rotary_dim = {rotated}, but no partial_rotary_factor: add it")
    if has_part and rotated != part:
        raise ModelError(f"config.json has rotary_dim = {rotated}, and a partial_rotary_factor by which it is {part}")
    return {
        "rope.dimension_count": rotated,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_gating_func": 2,
    }


def record(m: Header) -> Graph:
    return llama_like(m, experts=m.experts(gating="sigmoid"), qk_norm="row")
