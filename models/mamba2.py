"""Mamba 2 (arXiv:2405.21060): no attention, and nothing else between its layers."""

from __future__ import annotations

from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, Mamba, decoder, mamba, norm
from localllm.models.config import Header

HF_NAMES = hf_names.mamba("mixer") | {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
    "attn_norm": "norm",
}


def record(m: Header) -> Graph:
    net = Mamba.read(m.meta)
    m.meta.find("attention.head_count")  # 0

    def layer(at: Layer, x: Tensor) -> Tensor:
        return mamba(at, norm(at, "attn_norm", x), net, residual=x)

    return decoder(m, layer)
