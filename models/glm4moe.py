"""GLM-4.5, 4.6 and 4.7 (arXiv:2508.06471): experts behind a few dense layers, and a rotation of half of each head."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, mixture, norm
from localllm.models.config import Header
from localllm.models.hf_convert import rotated_part, routing_keys
from localllm.models.rope import make_rope

HF_NAMES = (
    hf_names.COMMON
    | hf_names.HEAD_NORMS
    | hf_names.EXPERTS
    | hf_names.SHARED_EXPERTS
    | {"post_attention_norm": "post_attention_layernorm"}
)


def hf_keys(config: Any) -> dict[str, Any]:
    return rotated_part(config) | routing_keys(config)


def record(m: Header) -> Graph:
    heads, n_ff, experts = m.heads(), m.mlp_width(), m.experts(gating=2)
    rope = make_rope(m, heads.key_dim)
    m.meta.find("rope.dimension_sections")  # of several axes, which agree for text

    def layer(at: Layer, x: Tensor) -> Tensor:
        has_norms = "attn_q_norm.weight" in at.weights
        y = norm(at, "attn_norm", x)
        x = attention(at, y, heads, rope, qk_norm="head" if has_norms else None, residual=x)
        y = norm(at, "post_attention_norm", x)
        if experts and at.number >= m.n_dense:
            return mixture(at, y, experts, residual=x)
        return gated_mlp(at, y, n_ff, residual=x)

    return decoder(m, layer)
