"""EXAONE 4 (arXiv:2507.11407): norms after attention and MLP, normed heads, and in models with windows, rotation
only in layers with a window."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, add, attention, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.hf_convert import window_keys
from localllm.models.rope import make_rope


def hf_keys(config: Any) -> dict[str, Any]:
    return window_keys(config) | {"vocab_size": config.vocab_size}


def record(m: Header) -> Graph:
    heads, n_ff, windows = m.heads(), m.mlp_width(), m.windows(period=4)
    rope = make_rope(m, heads.key_dim)

    def layer(at: Layer, x: Tensor) -> Tensor:
        window = windows[at.number]
        is_rotated = window is not None or not any(windows)
        y = attention(at, x, heads, rope if is_rotated else None, qk_norm="head", window=window)
        x = add(at, norm(at, "post_attention_norm", y), x)
        y = gated_mlp(at, x, n_ff)
        return add(at, norm(at, "post_ffw_norm", y), x)

    return decoder(m, layer)
