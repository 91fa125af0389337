"""Granite 3 and 4, dense and with experts: Llama's layers, with scales on embedding, scores, residuals and logits.

In hybrids, most layers have Mamba 2 in attention's place, and nothing is rotated.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.kernels.graph import Graph, Rope, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, Mamba, add, attention, decoder, gated_mlp, mamba, mixture, norm
from localllm.models.config import Header
from localllm.models.hf_convert import (
    Array,
    attention_layers,
    interleave_query_and_key,
    mamba_keys,
    mamba_tensor,
    rotated_part,
)
from localllm.models.rope import make_rope

HF_NAMES = (
    hf_names.COMMON
    | hf_names.mamba("mamba")
    | {
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_up_exps": "block_sparse_moe.input_linear",
        "ffn_down_exps": "block_sparse_moe.output_linear",
        "ffn_gate_up_shexp": "shared_mlp.input_linear",
        "ffn_down_shexp": "shared_mlp.output_linear",
    }
)


def hf_keys(config: Any) -> dict[str, Any]:
    keys = rotated_part(config) | {
        "vocab_size": config.vocab_size,
        "attention.key_length": None,
        "attention.value_length": None,
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "expert_shared_feed_forward_length": getattr(config, "shared_intermediate_size", None),
    }
    if config.model_type != "granitemoehybrid":
        return keys
    n_kv = attention_layers(config, config.num_key_value_heads)
    hybrid = {"attention.head_count_kv": n_kv, "rope.scaling.finetuned": False, "context_length": 1 << 20}
    return keys | mamba_keys(config) | hybrid


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    if config.model_type == "granitemoehybrid":
        array = mamba_tensor(name, array, config)
    if "shared_mlp" not in name:
        return interleave_query_and_key(name, array, config)
    suffix = "_shexp" if getattr(config, "num_local_experts", 0) else ""
    if "output_linear" in name:
        return {f"ffn_down{suffix}.weight": array}
    gate, up = np.split(array, 2)
    return {f"ffn_gate{suffix}.weight": gate, f"ffn_up{suffix}.weight": up}


def record(m: Header) -> Graph:
    heads, experts = m.heads_by_layer(), m.experts()
    n_ff = 0 if experts else m.mlp_width()
    m.meta.skip("expert_shared_feed_forward_length")  # without experts, the MLP's width
    net = None if all(heads) else Mamba.read(m.meta)
    rope: Rope | None = make_rope(m, next((h.key_dim for h in heads if h), m.config.n_embd), interleaved=True)
    if not m.meta.read("rope.scaling.finetuned", bool, True):
        rope = None
    scale, residual_scale, embedding_scale, logit_divisor = (
        m.meta.read(key, float, 0.0, low=0.0, high=1e6)  # 0 for none
        for key in ("attention.scale", "residual_scale", "embedding_scale", "logit_scale")
    )

    def layer(at: Layer, x: Tensor) -> Tensor:
        y, own_heads = norm(at, "attn_norm", x), heads[at.number]
        if own_heads:
            y = attention(at, y, own_heads, rope, scale=scale or None)
        elif net:
            y = mamba(at, y, net)
        x = add(at, y, x, residual_scale or 1)
        y = norm(at, "ffn_norm", x)
        if experts:
            return mixture(at, y, experts, residual=x, residual_scale=residual_scale or 1)
        return add(at, gated_mlp(at, y, n_ff), x, residual_scale or 1)

    return decoder(m, layer, embedding_scale=embedding_scale or 1, logit_scale=1 / (logit_divisor or 1))
