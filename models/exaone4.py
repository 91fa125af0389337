"""EXAONE 4 (arXiv:2507.11407): norms after attention and MLP, normed heads, and in models with windows, rotation
only in layers with a window."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import window_keys
from localllm.models.rope import make_rope


def hf_keys(config: Any) -> dict[str, Any]:
    return window_keys(config) | {"vocab_size": config.vocab_size}


def record(m: Header) -> Graph:
    rope, windows = make_rope(m, m.heads().key_dim), m.windows(period=4)
    ropes = [rope if window or not any(windows) else None for window in windows]
    return llama_like(m, ropes, windows=windows, pre_norms=False, post_norm_eps=m.norm_eps, qk_norm="head")
