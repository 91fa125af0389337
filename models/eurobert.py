"""EuroBERT (arXiv:2503.05500): Llama's layers, whose tokens see each other in both directions."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import unscaled
from localllm.models.rope import make_rope


def hf_keys(config: Any) -> dict[str, Any]:
    return unscaled(config) | {"attention.causal": False}


def record(m: Header) -> Graph:
    return llama_like(m, make_rope(m, m.heads().key_dim))
