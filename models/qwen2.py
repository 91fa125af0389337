"""Qwen 2 and 2.5 (arXiv:2407.10671, arXiv:2412.15115): query, key and value have biases."""

from __future__ import annotations

from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.rope import make_rope

HF_NAMES = hf_names.COMMON


def record(m: Header) -> Graph:
    heads, n_ff, windows = m.heads(), m.mlp_width(), m.windows(period=0)
    rope = make_rope(m, heads.key_dim)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = norm(at, "attn_norm", x)
        x = attention(at, y, heads, rope, qkv_bias=True, window=windows[at.number], residual=x)
        return gated_mlp(at, norm(at, "ffn_norm", x), n_ff, residual=x)

    return decoder(m, layer)
