"""Step 3.5 and 3.7 Flash: attention with normed heads and a gate per head, and experts as in DeepSeek V3, whose gates
may have limits. Layers with a window may have a different number of heads and a different rotation."""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import Array, add_one_to_norms, head_dim, rope_factors, window_keys, window_pattern
from localllm.models.rope import make_local_rope, make_rope

HF_MEANT = {"per_layer_config": ()}
hf_tensor = add_one_to_norms

#: Fraction of a head that is rotated in layers without a window. Files contain it only for layers with a window.
ROTATED_PART = 0.5


def hf_keys(config: Any) -> dict[str, Any]:
    n, rope = config.num_attention_heads, config.rope_parameters
    other = config.get("attention_other_setting") or {}
    n_local = config.get("num_sliding_attention_heads") or other.get("num_attention_heads") or n
    for kind, expected in (("full_attention", ROTATED_PART), ("sliding_attention", 1.0)):
        part = (rope.get(kind) or {}).get("partial_rotary_factor", 1.0)
        if part != expected:
            raise ModelError(
                f"config.json has partial_rotary_factor = {quoted(part)} for {kind}, but GGUF files mean {expected}"
            )
    if (scalar := config.get("query_pre_attn_scalar", head_dim(config))) not in (None, head_dim(config)):
        raise ModelError(
            f"config.json has query_pre_attn_scalar = {quoted(scalar)}, but GGUF files mean the width of a head"
        )
    kinds = config.get("mlp_layer_types") or []
    limits = {
        f"swiglu_clamp_{ours}": [float(limit or 0) for limit in config.get(f"swiglu_limits{theirs}") or ()] or None
        for ours, theirs in (("exp", ""), ("shexp", "_shared"))
    }
    keys = window_keys(config) | limits
    return keys | {
        "rope.dimension_count": None,  # the complete head in layers with a window
        "attention.head_count": [n_local if has_window else n for has_window in window_pattern(config)],
        "attention.head_count_kv": [config.num_key_value_heads] * config.num_hidden_layers,
        "expert_gating_func": 2,
        "expert_shared_feed_forward_length": config.share_expert_dim,
        "expert_weights_norm": True,
        "expert_weights_scale": config.moe_router_scaling_factor,
        "leading_dense_block_count": kinds.index("sparse") if "sparse" in kinds else 0,
        "moe_every_n_layers": 1,
    }


def hf_extra(config: Any) -> dict[str, Array]:
    """Return factors for all frequencies of a head. Only the first ones are used."""
    return {
        name: np.concatenate([factors, np.ones(head_dim(config) // 2 - len(factors), np.float32)])
        for name, factors in rope_factors(config).items()
    }


def record(m: Header) -> Graph:
    dim, _ = m.head_dims()
    rope, local_rope, windows = make_rope(m, dim, part=ROTATED_PART), make_local_rope(m, dim), m.windows(period=0)
    m.meta.skip("moe_every_n_layers")
    return llama_like(
        m,
        [local_rope if window else rope for window in windows],
        m.experts(gating="sigmoid"),
        windows=windows,
        limits=m.gate_limits(),
        qk_norm="head",
        has_gate=True,
    )
