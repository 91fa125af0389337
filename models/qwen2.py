"""Qwen 2 and 2.5 (arXiv:2407.10671, arXiv:2412.15115), and 1.5 and 2 with experts: query, key and value have
biases."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import axes_keys, expert_norm
from localllm.models.rope import make_rope, with_axes


def hf_keys(config: Any) -> dict[str, Any]:
    return axes_keys(config) | (expert_norm(config, usual=False) if "num_experts" in config else {})


def record(m: Header) -> Graph:
    experts = m.experts(norm_topk_prob=False) if m.config.architecture == "qwen2moe" else None
    rope, windows = with_axes(m, make_rope(m, m.heads().key_dim), in_turn=False), m.windows(period=0)
    return llama_like(m, rope, experts, windows=windows)
