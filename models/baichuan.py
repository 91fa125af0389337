"""Baichuan and Baichuan 2 (arXiv:2309.10305): Llama's layers, with query, key and value in one matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import Array, floats, interleave_pairs, rotated_part
from localllm.models.rope import make_rope

#: Vocabulary size of Baichuan 2, whose output matrix has normalised rows.
_BAICHUAN_2 = 125_696


def hf_keys(config: Any) -> dict[str, Any]:
    context = getattr(config, "max_position_embeddings", None) or getattr(config, "model_max_length", None)
    return rotated_part(config) | {"context_length": context, "tensor_data_layout": "Meta AI original pth"}


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    if name == "lm_head.weight" and config.vocab_size == _BAICHUAN_2:
        values = floats(array)
        return np.asarray(values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12), np.float32)
    if not name.endswith("W_pack.weight"):
        return array
    n = config.num_attention_heads
    q, k, v = np.split(array, 3)
    return {"attn_q.weight": interleave_pairs(q, n), "attn_k.weight": interleave_pairs(k, n), "attn_v.weight": v}


def record(m: Header) -> Graph:
    """Record the model. The 13B model, recognised by its number of layers, uses ALiBi instead of a rotation."""
    rope = make_rope(m, m.heads().key_dim, interleaved=True)
    if m.config.n_layers == 40:
        return llama_like(m, [None] * m.config.n_layers, max_bias=8.0)
    return llama_like(m, rope)
