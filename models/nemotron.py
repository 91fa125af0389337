"""Nemotron 3 and 4, Minitron (arXiv:2407.14679) and Jais 2: LayerNorm, and an MLP of squared ReLU without a gate."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import gpt_like
from localllm.models.config import Header
from localllm.models.hf_convert import Array, rotated_part, unscaled
from localllm.models.rope import make_rope

HF_MEANT = {"hidden_act": ("relu2",)}


def hf_keys(config: Any) -> dict[str, Any]:
    keys = rotated_part(config)
    if config.model_type == "jais2":
        return keys
    eps = dict.fromkeys(("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"), config.norm_eps)
    return keys | unscaled(config) | eps | {"vocab_size": config.vocab_size}


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    """Add 1 to weights of Nemotron's norms, which multiply with 1 + weight."""
    return array + 1 if name.endswith("norm.weight") and config.model_type == "nemotron" else array


def record(m: Header) -> Graph:
    m.meta.skip("attention.layer_norm_rms_epsilon")  # unused, but written by llama.cpp's converter
    return gpt_like(m, make_rope(m, m.heads().key_dim), activation="relu2")
