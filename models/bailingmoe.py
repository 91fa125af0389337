"""Ling 1 and 1.5 (arXiv:2503.05139): Llama's layers, each with experts and shared experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.kernels.graph import Graph
from localllm.models import llama
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import Array, floats, interleave_pairs


def hf_keys(config: Any) -> dict[str, Any]:
    return llama.hf_keys(config) | {
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": 1.0,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Split query, key and value, the first two in the order of rotary pairs, and normalise the head if needed."""
    if name == "lm_head.weight" and getattr(config, "norm_head", False):
        length: Array = np.linalg.norm(floats(array), axis=0, keepdims=True)
        return np.asarray(floats(array) / (length + np.float32(1e-7)))
    if not name.endswith("query_key_value.weight"):
        return array
    n, n_kv = config.num_attention_heads, config.num_key_value_heads
    heads = array.reshape(n + 2 * n_kv, -1, array.shape[-1])
    q, k, v = (part.reshape(-1, array.shape[-1]) for part in np.split(heads, [n, n + n_kv]))
    return {"attn_q.weight": interleave_pairs(q, n), "attn_k.weight": interleave_pairs(k, n_kv), "attn_v.weight": v}


def record(m: Header) -> Graph:
    return llama_like(m, experts=m.experts(), interleaved=True)
