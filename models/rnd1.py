"""RND1 (Radical Numerics, 2025): Qwen 3's layers with experts, whose tokens see each other. Writes by diffusion."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import expert_norm


def hf_keys(config: Any) -> dict[str, Any]:
    return {"attention.causal": False} | expert_norm(config, usual=True)


def record(m: Header) -> Graph:
    return llama_like(m, experts=m.experts(), qk_norm="head")
