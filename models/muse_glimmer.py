"""Muse Glimmer: normed embeddings, norms before and after attention and MLP, and attention with a gate per value,
which rotates only in layers with a window."""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Graph, Tensor
from localllm.kernels.operations import RMSNorm
from localllm.models.blocks import Layer, decoder, llama_layer, read_softcap
from localllm.models.config import Header
from localllm.models.hf_convert import Array, interleave_query_and_key, window_keys, window_pattern
from localllm.models.rope import make_rope

#: Epsilon of the norms after attention and MLP, which files do not contain.
POST_NORM_EPS = 1e-8


def hf_keys(config: Any) -> dict[str, Any]:
    thetas = getattr(config, "layer_rope_theta", None)
    theta = config.rope_parameters["rope_theta"]
    if thetas and thetas != [theta if has_window else 0 for has_window in window_pattern(config)]:
        raise ModelError(
            f"config.json has layer_rope_theta = {quoted(thetas)}, but GGUF files mean layers with windows"
        )
    if (eps := getattr(config, "post_norm_eps", POST_NORM_EPS)) != POST_NORM_EPS:
        raise ModelError(f"config.json has post_norm_eps = {eps}, but GGUF files mean {POST_NORM_EPS}")
    return window_keys(config) | {
        "final_logit_softcapping": config.final_logit_softcapping,
        "logit_scale": config.output_multiplier,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    """Convert norms except the last, which multiply with 1 + weight, and reorder rows to rotary pairs."""
    return array + 1 if name.endswith("layernorm.weight") else interleave_query_and_key(name, array, config)


def hf_extra(config: Any) -> dict[str, Array]:
    """Return weights for the norms of heads, which have none in the model, with the factor of queries."""
    values = {"attn_q_norm": config.qk_scale_factor, "attn_k_norm": 1}
    return {
        f"blk.{i}.{name}.weight": np.full(config.head_dim, value, np.float32)
        for i in range(config.num_hidden_layers)
        for name, value in values.items()
    }


def record(m: Header) -> Graph:
    rope, windows = make_rope(m, m.heads().key_dim, interleaved=True), m.windows(period=4, default=None)
    ropes = [rope if window else None for window in windows]
    layer = llama_layer(m, ropes, windows=windows, post_norm_eps=POST_NORM_EPS, qk_norm="head", has_gate=True)

    def embedding(at: Layer, x: Tensor) -> Tensor:
        return at.add(RMSNorm(x, None, at.norm_eps))

    return decoder(
        m,
        layer,
        change_embedding=embedding,
        logit_scale=m.meta.read("logit_scale", float, low=1e-6, high=1e6),
        softcap=read_softcap(m, "final_logit_softcapping"),
    )
