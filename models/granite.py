"""Granite 3 and 4, dense and with experts: Llama's layers, with scales on embedding, scores, residuals and logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.kernels.graph import Graph, Rope, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, add, attention, decoder, gated_mlp, mixture, norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array, interleave_query_and_key
from localllm.models.rope import make_rope

HF_NAMES = hf_names.COMMON | {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_up_exps": "block_sparse_moe.input_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_gate_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}


def hf_keys(config: Any) -> dict[str, Any]:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "expert_shared_feed_forward_length": getattr(config, "shared_intermediate_size", None),
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    if "shared_mlp.input_linear" not in name:
        return interleave_query_and_key(name, array, config)
    return dict(zip(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), np.split(array, 2), strict=True))


def record(m: Header) -> Graph:
    heads, experts = m.heads(), m.experts()
    n_ff = 0 if experts else m.mlp_width()
    rope: Rope | None = make_rope(m, heads.key_dim, interleaved=True)
    if not m.meta.read("rope.scaling.finetuned", bool, True):
        rope = None
    scale, residual_scale, embedding_scale, logit_divisor = (
        m.meta.read(key, float, 0.0, low=0.0, high=1e6)  # 0 for none
        for key in ("attention.scale", "residual_scale", "embedding_scale", "logit_scale")
    )

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = attention(at, norm(at, "attn_norm", x), heads, rope, scale=scale or None)
        x = add(at, y, x, residual_scale or 1)
        y = norm(at, "ffn_norm", x)
        if experts:
            return mixture(at, y, experts, residual=x, residual_scale=residual_scale or 1)
        return add(at, gated_mlp(at, y, n_ff), x, residual_scale or 1)

    return decoder(m, layer, embedding_scale=embedding_scale or 1, logit_scale=1 / (logit_divisor or 1))
