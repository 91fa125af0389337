"""Qwen 2 and 2.5 (arXiv:2407.10671, arXiv:2412.15115), and 1.5 and 2 with experts: query, key and value have
biases."""

from __future__ import annotations

from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, mixture, norm
from localllm.models.config import Header
from localllm.models.rope import make_rope

HF_NAMES = hf_names.COMMON | hf_names.EXPERTS | hf_names.SHARED_EXPERT


def record(m: Header) -> Graph:
    heads, windows, rope = m.heads(), m.windows(period=0), make_rope(m, m.heads().key_dim)
    experts = m.experts(norm_topk_prob=False) if m.config.architecture == "qwen2moe" else None
    n_ff = 0 if experts else m.mlp_width()

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = norm(at, "attn_norm", x)
        x = attention(at, y, heads, rope, qkv_bias=True, window=windows[at.number], residual=x)
        y = norm(at, "ffn_norm", x)
        return mixture(at, y, experts, residual=x) if experts else gated_mlp(at, y, n_ff, residual=x)

    return decoder(m, layer)
