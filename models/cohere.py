"""Command R and R7B, Command A and Aya: attention and MLP in parallel after one LayerNorm.

Command R+ has a LayerNorm of each head of query and key.

In Cohere 2, three of four layers have a window, and only these layers rotate. In models with experts (North), the
first dense layers may rotate as well, and norms may be RMSNorms.
"""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import (
    Layer,
    RecordNorm,
    attention,
    decoder,
    gated_mlp,
    layer_norm,
    mixture,
    norm as rms_norm,
)
from localllm.models.config import Header
from localllm.models.hf_convert import head_dim, n_dense_layers, periodic_windows, rotated_part, unscaled, window_keys
from localllm.models.rope import make_rope


def hf_keys(config: Any) -> dict[str, Any]:
    keys = unscaled(config) | {"logit_scale": config.logit_scale}
    if config.model_type == "cohere2_moe":
        return keys | _moe_keys(config)
    if config.model_type != "cohere2":
        return keys | {"attention.key_length": None, "attention.value_length": None}
    return keys | periodic_windows(config, 4) | rotated_part(config) | {"vocab_size": config.vocab_size}


def _moe_keys(config: Any) -> dict[str, Any]:
    n_shared, strategy = getattr(config, "num_shared_experts", 0), config.shared_expert_combination_strategy
    if n_shared and strategy != "average":
        raise ModelError("config.json adds shared experts up, but GGUF files of cohere2moe mean their average")
    n_dense = n_dense_layers(config)
    kinds = set(config.layer_types[:n_dense])
    if kinds == {"full_attention"} and getattr(config, "prefix_dense_sliding_window_pattern", 1) != 1:
        raise ModelError(
            "config.json has dense layers without rotation, but GGUF files of cohere2moe mean that all rotate"
        )
    return window_keys(config) | {
        "vocab_size": config.vocab_size,
        "feed_forward_length": config.prefix_dense_intermediate_size,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_gating_func": 2 if config.expert_selection_fn == "sigmoid" else 3,
        "expert_weights_norm": bool(config.norm_topk_prob),
        "expert_shared_count": n_shared or None,
        "expert_shared_feed_forward_length": n_shared * config.intermediate_size or None,
        "leading_dense_block_count": n_dense,
        "rope.dimension_count": head_dim(config),
    }


def record(m: Header) -> Graph:
    meta, heads = m.meta, m.heads()
    is_second = m.config.architecture != "command-r"
    experts = m.experts(norm_topk_prob=False, gating="sigmoid")
    ffn = m.feed_forward(experts)
    norm: RecordNorm = layer_norm
    eps = "attention.layer_norm_epsilon"
    if meta.find("attention.layer_norm_rms_epsilon") is not None:
        norm, eps = rms_norm, "attention.layer_norm_rms_epsilon"
    windows = m.windows(period=4, default=None) if is_second else (None,) * m.config.n_layers
    rope = make_rope(m, heads.key_dim, interleaved=True)
    qk_norm: Any = "layer by head" if "blk.0.attn_q_norm.weight" in m.weights else None
    logit_scale = meta.read("logit_scale", float, 0.0, low=0.0, high=1e6) or 1.0

    def layer(at: Layer, x: Tensor) -> Tensor:
        y, window, own_experts = norm(at, "attn_norm", x), windows[at.number], ffn.experts_of(at.number)
        is_rotated = window or not is_second or (experts and not own_experts)
        x = attention(at, y, heads, rope if is_rotated else None, window=window, qk_norm=qk_norm, residual=x)
        if own_experts:
            scale = 0.5 if own_experts.n_ff_shared else 1.0
            return mixture(at, y, own_experts, residual=x, residual_scale=scale)
        return gated_mlp(at, y, ffn.n_ff, residual=x)

    norm_eps = meta.read(eps, float, low=0.0, high=1.0)
    return decoder(m, layer, output_norm=norm, norm_eps=norm_eps, logit_scale=logit_scale)
