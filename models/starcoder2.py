"""StarCoder 2 (arXiv:2402.19173): LayerNorm in place of RMSNorm, biases everywhere, and an MLP without a gate.

The models were trained with a window of 4096 tokens, but their files do not contain it. As in llama.cpp, a token sees
all positions.
"""

from __future__ import annotations

from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, attention, decoder, layer_norm, mlp
from localllm.models.config import Header
from localllm.models.hf_convert import GELU_TANH
from localllm.models.rope import make_rope

HF_MEANT = {"activation_function": (), "hidden_act": GELU_TANH}


def record(m: Header) -> Graph:
    heads, n_ff, rope = m.heads(), m.mlp_width(), make_rope(m, m.heads().key_dim)

    def layer(at: Layer, x: Tensor) -> Tensor:
        x = attention(at, layer_norm(at, "attn_norm", x), heads, rope, qkv_bias=True, residual=x)
        return mlp(at, layer_norm(at, "ffn_norm", x), n_ff, activation="gelu", residual=x)

    return decoder(m, layer, output_norm=layer_norm, norm_eps=m.layer_norm_eps)
