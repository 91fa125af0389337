"""Grok 1 and 2 (xAI): norms before and after attention and experts, soft-caps, and in Grok 2 an additional MLP.

xAI's code for SGLang (``grok.py``) defines the soft-cap of the router, the weights of experts, and the growth of
queries with the position. The sum of the weights is not 1. llama.cpp ignores the soft-cap and the growth, and divides
the weights by their sum.
"""

from __future__ import annotations

import math
from typing import Any

from localllm.kernels.graph import Graph, PositionScale, Tensor
from localllm.kernels.operations import Route, Softcap
from localllm.models.blocks import Layer, add, attention, chosen_experts, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.hf_convert import GELU, GELU_TANH, head_dim, implied
from localllm.models.rope import make_rope

HF_MEANT = (
    {"hidden_act": (*GELU, *GELU_TANH)}
    | implied("attn_logit_softcapping_method", "tanh")
    | implied("residual_moe merge_gate_up rope_rotate_half_dims", True, False)
    | implied("tie_word_embeddings max_attn_value context_len shared_experts_weights")
)
#: Values of the first files, which lack the keys: factors of logits, embeddings and scores, and the soft-caps.
LOGITS, EMBEDDING, SCORES, CAP = 3**-0.5, 78.38367176906169, 128**-0.5, 30.0


def hf_keys(config: Any) -> dict[str, Any]:
    caps = {
        f"{name}_logit_softcapping": getattr(config, f"{name}_logit_softcapping", CAP) for name in ("attn", "router")
    }
    return caps | {
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None) or None,
        "attention.temperature_length": getattr(config, "attn_temperature_len", None) or None,
        "attention.output_scale": getattr(config, "attn_output_multiplier", None) or head_dim(config) ** -0.5,
        "embedding_scale": config.embedding_multiplier_scale,
        "logit_scale": config.output_multiplier_scale,
    }


def record(m: Header) -> Graph:
    meta, heads, experts = m.meta, m.heads(), m.required_experts(norm_topk_prob=False)
    rope, has_mlp = make_rope(m, heads.key_dim), "blk.0.ffn_up.weight" in m.weights
    n_ff = m.mlp_width() if has_mlp else 0

    def read(key: str, default: float) -> float:
        return meta.read(key, float, default, low=0.0, high=1e6)

    scale, cap = read("attention.output_scale", SCORES), read("attn_logit_softcapping", CAP)
    router_cap = read("router_logit_softcapping", CAP)
    length = meta.read("attention.temperature_length", int, 0, low=0, high=1 << 31)
    growth = PositionScale(1 / math.log(length), 1, -1, 0.0) if length > 1 else None
    final_cap = read("final_logit_softcapping", 0.0) or None

    def mixed(at: Layer, x: Tensor) -> Tensor:
        logits = at.linear(x, "ffn_gate_inp", experts.n)
        logits = at.add(Softcap(logits, router_cap)) if router_cap else logits
        part = 0.5**0.5 if has_mlp else 1.0
        routing = at.add(Route(logits, experts.n_used, experts.norm_topk_prob, part * experts.scale))
        y = chosen_experts(at, x, experts, routing, "gelu")
        return add(at, gated_mlp(at, x, n_ff, activation="gelu"), y, part) if has_mlp else y

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = norm(at, "attn_norm", x)
        y = attention(at, y, heads, rope, scale=scale, softcap=cap or None, q_scale=growth)
        x = add(at, norm(at, "attn_output_norm", y), x)
        y = mixed(at, norm(at, "ffn_norm", x))
        name = "layer_output_norm" if "layer_output_norm.weight" in at.weights else "post_ffw_norm"
        return add(at, norm(at, name, y), x)

    return decoder(
        m,
        layer,
        embedding_scale=read("embedding_scale", EMBEDDING),
        logit_scale=read("logit_scale", LOGITS),
        softcap=final_cap,
    )
