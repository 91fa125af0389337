"""Mellum 2: Qwen 3's layers with experts, some with a window and a different rotation."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import expert_norm, window_keys
from localllm.models.rope import make_local_rope, make_rope

HF_MEANT = {"mlp_layer_types": ()}


def hf_keys(config: Any) -> dict[str, Any]:
    return window_keys(config) | expert_norm(config, usual=True)


def record(m: Header) -> Graph:
    dim, windows = m.heads().key_dim, m.windows(period=4)
    rope, local_rope = make_rope(m, dim), make_local_rope(m, dim)
    ropes = [local_rope if window else rope for window in windows]
    return llama_like(m, ropes, m.experts(), windows=windows, qk_norm="head")
