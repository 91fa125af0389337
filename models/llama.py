"""Llama 1 to 3.x, Mistral, TinyLlama, SmolLM and similar models (arXiv:2302.13971, arXiv:2310.06825), and Mixtral
with experts (arXiv:2401.04088).

In their GGUF files, the rows of query and key are reordered so that rotary pairs are adjacent.
"""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import interleave_query_and_key, rotated_part

hf_tensor = interleave_query_and_key


def hf_keys(config: Any) -> dict[str, Any]:
    return {"vocab_size": config.vocab_size} | rotated_part(config)


def record(m: Header) -> Graph:
    return llama_like(m, experts=m.experts(), interleaved=True, windows=m.windows(period=0))
