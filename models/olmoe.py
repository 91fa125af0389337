"""OLMoE (arXiv:2409.02060): Llama's layers with experts, and norms over complete rows of query and key."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import expert_norm


def hf_keys(config: Any) -> dict[str, Any]:
    return expert_norm(config, usual=False) | {"attention.clamp_kqv": getattr(config, "clip_qkv", None)}


def record(m: Header) -> Graph:
    return llama_like(m, experts=m.experts(norm_topk_prob=False), qk_norm="row")
