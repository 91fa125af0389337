"""Qwen 3 Next: Qwen 3.5 with experts, but value heads that share a key head are adjacent."""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.kernels.graph import Graph
from localllm.models import qwen35
from localllm.models.config import Header
from localllm.models.hf_convert import Array, expert_norm


def hf_keys(config: Any) -> dict[str, Any]:
    return qwen35.delta_net_keys(config) | expert_norm(config, usual=True)


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Split the matrix with [query | key | values | gates] of each key head."""
    if not name.endswith("in_proj_qkvz.weight"):
        return qwen35.delta_net_tensor(name, array)
    n_keys, dim = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // n_keys * config.linear_value_head_dim
    parts = np.split(array.reshape(n_keys, -1, array.shape[-1]), np.cumsum([dim, dim, values]), axis=1)
    q, k, v, z = (part.reshape(-1, array.shape[-1]) for part in parts)
    return {"attn_qkv.weight": np.concatenate([q, k, v]), "attn_gate.weight": z}


def record(m: Header) -> Graph:
    return qwen35.record_hybrid(m, is_grouped=True)
