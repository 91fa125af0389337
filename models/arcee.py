"""AFM, of Arcee: Llama's layers, with an MLP of two matrices and relu² between them."""

from __future__ import annotations

from localllm.kernels.graph import Graph, Tensor
from localllm.models import llama
from localllm.models.blocks import Layer, attention, decoder, mlp, norm
from localllm.models.config import Header
from localllm.models.rope import make_rope

HF_MEANT = {"hidden_act": ("relu2",)}
hf_keys, hf_tensor = llama.hf_keys, llama.hf_tensor


def record(m: Header) -> Graph:
    heads, n_ff = m.heads(), m.mlp_width()
    rope = make_rope(m, heads.key_dim, interleaved=True)

    def layer(at: Layer, x: Tensor) -> Tensor:
        x = attention(at, norm(at, "attn_norm", x), heads, rope, residual=x)
        return mlp(at, norm(at, "ffn_norm", x), n_ff, activation="relu2", residual=x)

    return decoder(m, layer)
