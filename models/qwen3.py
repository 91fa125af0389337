"""Qwen 3, dense and with a mixture of experts in every layer (arXiv:2505.09388): each head of query and key is normed
before it is rotated."""

from __future__ import annotations

from localllm.kernels.graph import Graph
from localllm.models import hf_names
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.rope import make_rope

HF_NAMES = hf_names.COMMON | hf_names.HEAD_NORMS | hf_names.EXPERTS


def record(m: Header) -> Graph:
    rope, windows = make_rope(m, m.heads().key_dim), m.windows(period=0)
    return llama_like(m, rope, m.experts(), windows=windows, qk_norm="head")
