"""Lara 4 Mini: Qwen 3.5's gated delta nets, and attention with or without a window, all followed by experts.

Only attention with a window rotates. The shared expert has no gate. GGUF has no names for this architecture, so
`localllm convert` uses Qwen 3.5's names.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import DeltaNet, Layer, attention, decoder, delta_net, mixture, norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array, expert_norm, floats, sliding_window, window_pattern
from localllm.models.qwen35 import delta_net_keys, recurrent_layers
from localllm.models.rope import make_rope

HF_NAMES = {"linear_attn.out_norm": "ssm_norm"}


def hf_keys(config: Any) -> dict[str, Any]:
    windows = {"attention.sliding_window_pattern": window_pattern(config)}
    return delta_net_keys(config) | sliding_window(config) | windows | expert_norm(config, usual=True)


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Split the matrix of all inputs of a delta net, whose rows are [query | key | value | gate | β | α]."""
    if name.endswith("A_log"):
        return -np.exp(floats(array))
    if name.endswith("conv1d.weight"):
        return array.squeeze(1)
    if not name.endswith("linear_attn.in_proj.weight"):
        return array
    keys, n = config.linear_num_key_heads * config.linear_key_head_dim, config.linear_num_value_heads
    values = n * config.linear_value_head_dim
    parts = np.split(array, np.cumsum([2 * keys + values, values, n]))
    return dict(
        zip(("attn_qkv.weight", "attn_gate.weight", "ssm_beta.weight", "ssm_alpha.weight"), parts, strict=True)
    )


def record(m: Header) -> Graph:
    heads, net, experts = m.heads(), DeltaNet.read(m.meta), m.required_experts()
    rope, windows, is_recurrent = make_rope(m, heads.key_dim), m.windows(period=1), recurrent_layers(m)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y, window = norm(at, "attn_norm", x), windows[at.number]
        if is_recurrent[at.number]:
            x = delta_net(at, y, net, is_grouped=True, residual=x)
        else:
            x = attention(at, y, heads, rope if window else None, qk_norm="head", window=window, residual=x)
        return mixture(at, norm(at, "post_attention_norm", x), experts, residual=x)

    return decoder(m, layer)
