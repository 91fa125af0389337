"""Phi 1, 1.5 and 2 (arXiv:2309.05463): attention and MLP in parallel after one LayerNorm, and biases everywhere."""

from __future__ import annotations

from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, attention, decoder, layer_norm, mlp
from localllm.models.config import Header
from localllm.models.hf_convert import GELU_TANH, parallel_keys
from localllm.models.rope import make_rope

HF_MEANT = {"hidden_act": GELU_TANH}
hf_keys = parallel_keys


def record(m: Header) -> Graph:
    heads, n_ff, rope = m.heads(), m.mlp_width(), make_rope(m, m.heads().key_dim)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = layer_norm(at, "attn_norm", x)
        x = attention(at, y, heads, rope, qkv_bias=True, residual=x)
        return mlp(at, y, n_ff, activation="gelu", residual=x)

    return decoder(m, layer, output_norm=layer_norm, norm_eps=m.layer_norm_eps)
