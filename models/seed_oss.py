"""Seed-OSS: Llama's layers, with biases on query, key and value."""

from __future__ import annotations

from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.rope import make_rope

HF_NAMES = hf_names.COMMON | {"post_attention_norm": "post_attention_layernorm"}


def record(m: Header) -> Graph:
    heads, n_ff = m.heads(), m.mlp_width()
    rope = make_rope(m, heads.key_dim)

    def layer(at: Layer, x: Tensor) -> Tensor:
        x = attention(at, norm(at, "attn_norm", x), heads, rope, residual=x)
        return gated_mlp(at, norm(at, "post_attention_norm", x), n_ff, residual=x)

    return decoder(m, layer)
