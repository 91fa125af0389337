"""EXAONE 3 and 3.5 (arXiv:2408.03541, 2412.04862): Llama's layers."""

from __future__ import annotations

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import rotated_part
from localllm.models.rope import make_rope

hf_keys = rotated_part


def record(m: Header) -> Graph:
    return llama_like(m, make_rope(m, m.heads().key_dim))
