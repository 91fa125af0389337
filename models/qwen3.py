"""Qwen 3, dense and with a mixture of experts in every layer (arXiv:2505.09388): each head of query and key is normed
before it is rotated."""

from __future__ import annotations

from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, mixture, norm
from localllm.models.config import Header
from localllm.models.rope import make_rope

HF_NAMES = hf_names.COMMON | hf_names.HEAD_NORMS | hf_names.EXPERTS


def record(m: Header) -> Graph:
    heads, windows, experts = m.heads(), m.windows(period=0), m.experts()
    rope, n_ff = make_rope(m, heads.key_dim), 0 if experts else m.mlp_width()

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = norm(at, "attn_norm", x)
        x = attention(at, y, heads, rope, qk_norm="head", window=windows[at.number], residual=x)
        y = norm(at, "ffn_norm", x)
        return mixture(at, y, experts, residual=x) if experts else gated_mlp(at, y, n_ff, residual=x)

    return decoder(m, layer)
