"""Ministral 3 and Devstral 2: Llama's layers, with queries that grow with the logarithm of their position."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like, read_q_scale
from localllm.models.config import Header
from localllm.models.hf_convert import interleave_query_and_key, rotated_part

hf_tensor = interleave_query_and_key


def hf_keys(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return rotated_part(config) | {
        "vocab_size": config.vocab_size,
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),  # for all types
        "attention.temperature_scale": rope.get("llama_4_scaling_beta"),
        # Without "mscale", transformers ignores "mscale_all_dim".
        "rope.scaling.yarn_log_multiplier": rope.get("mscale_all_dim") if rope.get("mscale") else None,
    }


def record(m: Header) -> Graph:
    options: Any = {"windows": m.windows(period=0), "q_scale": read_q_scale(m)}
    return llama_like(m, experts=m.experts(), interleaved=True, **options)
