"""K-EXAONE: EXAONE 4's attention, with rotation only in layers with a window, norms before attention and MLP as in
Llama, and experts as in DeepSeek V3."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import routing_keys, unscaled, window_keys
from localllm.models.rope import make_rope


def hf_keys(config: Any) -> dict[str, Any]:
    keys = window_keys(config) | routing_keys(config) | unscaled(config)
    width = config.moe_intermediate_size * config.n_shared_experts
    return keys | {"vocab_size": config.vocab_size, "expert_shared_feed_forward_length": width}


def record(m: Header) -> Graph:
    rope, windows = make_rope(m, m.heads().key_dim), m.windows(period=4)
    ropes = [rope if window else None for window in windows]
    return llama_like(m, ropes, m.experts(gating="sigmoid"), windows=windows, qk_norm="head")
