"""Trinity (AFMoE): norms before and after attention and MLP, attention with a gate per value, rotation only in layers
with a window, and experts as in DeepSeek V3."""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph
from localllm.models.blocks import decoder, llama_layer
from localllm.models.config import Header
from localllm.models.hf_convert import window_keys
from localllm.models.rope import make_rope

HF_MEANT = {"n_group": (1,), "topk_group": (1,), "norm_topk_prob": (True,)}


def hf_keys(config: Any) -> dict[str, Any]:
    if not config.mup_enabled:
        raise ModelError("config.json has mup_enabled = false, but GGUF files of AFMoE mean true")
    return window_keys(config) | {
        "vocab_size": config.vocab_size,
        "rope.dimension_count": config.head_dim,
        "expert_count": config.num_experts,
        "expert_shared_count": config.num_shared_experts,
        "expert_gating_func": 2,
        "expert_weights_norm": getattr(config, "route_norm", True),
        "expert_weights_scale": config.route_scale,
        "leading_dense_block_count": config.num_dense_layers,
    }


def record(m: Header) -> Graph:
    rope, windows = make_rope(m, m.heads().key_dim), m.windows(period=4)
    layer = llama_layer(
        m,
        [rope if window else None for window in windows],
        m.experts(gating="sigmoid"),
        windows=windows,
        post_norm_eps=m.norm_eps,
        qk_norm="head",
        has_gate=True,
    )
    return decoder(m, layer, embedding_scale=m.config.n_embd**0.5)
