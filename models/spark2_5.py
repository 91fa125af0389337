"""Spark-X2.5: a gate per head of attention, windows in three of four layers, and GELU.

Layers without a window rotate a part of each head, with another base.
"""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import head_dim, implied, window_keys
from localllm.models.rope import make_local_rope, make_rope

HF_NAMES = {"self_attn.q_k_v_proj": "attn_qkv", "self_attn.g_proj": "attn_gate"}
HF_MEANT = (
    implied("hidden_act", "gelu")
    | implied("gate_attn_act_mode", "sigmoid")
    | implied("headwise_attn_output_gate", True)
    | implied("hybrid_layer_pattern is_hybrid_swa")
)


def hf_keys(config: Any) -> dict[str, Any]:
    parts = {
        kind: int(head_dim(config) * rope.get("partial_rotary_factor", 1.0))
        for kind, rope in config.rope_parameters.items()
    }
    return window_keys(config) | {
        "rope.dimension_count": parts["full_attention"],
        "rope.dimension_count_swa": parts["sliding_attention"],
        "vocab_size": config.vocab_size,
    }


def record(m: Header) -> Graph:
    dim, windows = m.heads_of_layers()[0].key_dim, m.windows(period=4, default=None)
    rope, local_rope = make_rope(m, dim), make_local_rope(m, dim)
    ropes = [local_rope if window else rope for window in windows]
    return llama_like(m, ropes, windows=windows, activation="gelu_erf", has_gate=True)
