"""Laguna: attention with normed heads and a gate per head or per value, and experts as in DeepSeek V3. Layers with a
window may have a different number of heads and a different rotation."""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import head_dim, n_dense_layers, window_keys
from localllm.models.rope import make_local_rope, make_rope

HF_NAMES = {"mlp.experts.e_score_correction": "exp_probs_b"}
HF_MEANT = {"norm_topk_prob": (True,), "gating": (), "moe_apply_router_weight_on_input": (False,)}


def hf_keys(config: Any) -> dict[str, Any]:
    if getattr(config, "moe_router_logit_softcapping", 0):
        raise ModelError("config.json has moe_router_logit_softcapping, which GGUF files of Laguna have no key for")
    rope = config.rope_parameters
    parts = {kind: int(head_dim(config) * each.get("partial_rotary_factor", 1)) for kind, each in rope.items()}
    return window_keys(config) | {
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads_per_layer,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": float(config.moe_routed_scaling_factor),
        "leading_dense_block_count": n_dense_layers(config),
        "rope.dimension_count": parts["full_attention"],
        "rope.dimension_count_swa": parts.get("sliding_attention"),
    }


def record(m: Header) -> Graph:
    dim, _ = m.head_dims()
    rope, local_rope, windows = make_rope(m, dim), make_local_rope(m, dim), m.windows(period=4, first=True)
    return llama_like(
        m,
        [local_rope if window else rope for window in windows],
        m.experts(gating="sigmoid"),
        windows=windows,
        qk_norm="head",
        has_gate=True,
        gate_activation="softplus",
    )
