"""Maple: Qwen 3's layers with experts, whose gates are limited. Only layers with a window rotate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import head_dim, sliding_window, window_pattern
from localllm.models.rope import make_local_rope

HF_MEANT = {"nope_on_global_attention": (True,), "norm_topk_prob": (True,), "num_shared_experts": (0,)}
#: Limit of the experts' gates in the model's own code, which has no setting for it.
LIMIT = 7.0


def hf_keys(config: Any) -> dict[str, Any]:
    part = config.rope_parameters.get("partial_rotary_factor", 1.0)
    return sliding_window(config) | {
        "attention.sliding_window_pattern": window_pattern(config),
        "rope.dimension_count": int(head_dim(config) * part),
        "swiglu_clamp_exp": [LIMIT] * config.num_hidden_layers,
        "vocab_size": config.vocab_size,
    }


def record(m: Header) -> Graph:
    windows = m.windows(period=0, default=None)
    rope = make_local_rope(m, m.heads().key_dim)
    experts = replace(m.required_experts(), limits_input=True)
    ropes = [rope if window else None for window in windows]
    return llama_like(m, ropes, experts, windows=windows, qk_norm="head", limits=m.gate_limits())
