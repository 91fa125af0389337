"""Phi-3, 3.5 and 4 (arXiv:2404.14219): one matrix for query, key and value, one for gate and up, and LongRoPE."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import rotated_part
from localllm.models.rope import make_rope


def hf_keys(config: Any) -> dict[str, Any]:
    """Omit the type of scaling, for which Phi-3's files have no key."""
    original = getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
    keys = rotated_part(config) | {
        "attention.sliding_window": getattr(config, "sliding_window", None) or 0,
        "rope.scaling.original_context_length": original,
        "attention.key_length": None,
        "attention.value_length": None,
    }
    return keys | ({"rope.scaling.type": None} if "long_factor" in config.rope_parameters else {})


def record(m: Header) -> Graph:
    # Files do not name LongRoPE, but contain its factors.
    scaling = "longrope" if "rope_factors_long.weight" in m.weights else None
    rope = make_rope(m, m.heads().key_dim, scaling=scaling)
    return llama_like(m, rope, windows=m.windows(period=0))
