"""dots.llm1 (arXiv:2506.05767): Llama's layers with normed heads, and experts as in DeepSeek V3."""

from __future__ import annotations

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import routing_keys

hf_keys = routing_keys


def record(m: Header) -> Graph:
    return llama_like(m, experts=m.experts(gating="sigmoid"), qk_norm="head")
