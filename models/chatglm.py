"""ChatGLM 3 and GLM-4 9B (arXiv:2406.12793): Llama's layers, a rotation of half of each head, and one matrix for gate
and up."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import rotated_part


def hf_keys(config: Any) -> dict[str, Any]:
    return rotated_part(config) | {"attention.key_length": None, "attention.value_length": None}


def record(m: Header) -> Graph:
    return llama_like(m, interleaved=True)
