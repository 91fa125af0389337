"""Seed-OSS: Llama's layers, with biases on query, key and value."""

from __future__ import annotations

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header


def record(m: Header) -> Graph:
    return llama_like(m, ffn_norm="post_attention_norm")
