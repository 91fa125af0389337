"""Refact 1.6B (Small Magellanic Cloud, 2023): Llama's layers with ALiBi and one key/value head."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import Array, implied

HF_MEANT = implied("multi_query do_sample", True) | implied("attention_bias_in_fp32 n_inner")
#: Largest bias of ALiBi, for which files have no key.
MAX_BIAS = 8.0


def _width(config: Any) -> int:
    """Return the width of the MLP: two thirds of four times the hidden width, rounded up to a multiple of 256."""
    width = 8 * int(config.hidden_size) // 3
    return -(-width // 256) * 256


def hf_keys(config: Any) -> dict[str, Any]:
    return {
        "feed_forward_length": _width(config),
        "attention.head_count_kv": 1,
        "attention.key_length": None,
        "attention.value_length": None,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.layer_norm_epsilon": None,
        "rope.freq_base": None,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Split keys and values, and gate and up."""
    half = len(array) // 2
    if name.endswith(".attn.kv.weight"):
        return {"attn_k.weight": array[:half], "attn_v.weight": array[half:]}
    if name.endswith(".attn.q.weight"):
        return {"attn_q.weight": array}
    if name.endswith(".mlp.gate_up_proj.weight"):
        return {"ffn_gate.weight": array[:half], "ffn_up.weight": array[half:]}
    return array


def record(m: Header) -> Graph:
    return llama_like(m, [None] * m.config.n_layers, max_bias=MAX_BIAS)
