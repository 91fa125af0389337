"""OLMo (arXiv:2402.00838): Llama's layers with unweighted LayerNorms. Queries, keys and values may be clamped."""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.kernels.graph import Graph, Tensor
from localllm.kernels.operations import LayerNorm
from localllm.models.blocks import Layer, attention, decoder, gated_mlp
from localllm.models.config import Header
from localllm.models.hf_convert import interleave_query_and_key
from localllm.models.rope import make_rope
from localllm.models.weights import ArrayWeight

hf_tensor = interleave_query_and_key


def hf_keys(config: Any) -> dict[str, Any]:
    return {
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": None,
        "attention.clamp_kqv": getattr(config, "clip_qkv", None),
    }


def record(m: Header) -> Graph:
    heads, n_ff, rope = m.heads(), m.mlp_width(), make_rope(m, m.heads().key_dim, interleaved=True)
    ones = ArrayWeight("ones", np.ones(m.config.n_embd, np.float32))
    clamp = m.meta.read("attention.clamp_kqv", float, 0.0, low=0.0, high=1e6)

    def norm(at: Layer, name: str, x: Tensor) -> Tensor:
        return at.add(LayerNorm(x, ones, None, at.norm_eps))

    def layer(at: Layer, x: Tensor) -> Tensor:
        x = attention(at, norm(at, "", x), heads, rope, clamp=clamp, residual=x)
        return gated_mlp(at, norm(at, "", x), n_ff, residual=x)

    return decoder(m, layer, output_norm=norm, norm_eps=m.layer_norm_eps)
