"""Maincoder: Llama's layers, with heads normed after the rotation of adjacent pairs."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import rotated_part


def hf_keys(config: Any) -> dict[str, Any]:
    width = getattr(config, "intermediate_size_mlp", None) or config.intermediate_size
    return rotated_part(config) | {"feed_forward_length": width}


def record(m: Header) -> Graph:
    return llama_like(m, interleaved=True, qk_norm="head", norm_last=True)
