"""Qwen 1 (arXiv:2309.16609): Llama's layers, with biases of query, key and value in one matrix."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.rope import make_rope


def hf_keys(config: Any) -> dict[str, Any]:
    return {
        "rope.freq_base": getattr(config, "rotary_emb_base", 10_000.0),
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.layer_norm_epsilon": None,
        "attention.head_count_kv": None,
    }


def record(m: Header) -> Graph:
    heads, rope = m.heads(), make_rope(m, m.heads().key_dim)
    n_ff = m.mlp_width() // 2  # files contain the sum of the widths of gate and up

    def layer(at: Layer, x: Tensor) -> Tensor:
        x = attention(at, norm(at, "attn_norm", x), heads, rope, residual=x)
        return gated_mlp(at, norm(at, "ffn_norm", x), n_ff, residual=x)

    return decoder(m, layer)
