"""Qwen 3.5 and 3.6, dense and with experts: three of four layers are gated delta nets, and the fourth is attention
with a gate on its output.

The block for multi-token prediction after the last layer is attention.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import DeltaNet, Layer, attention, decoder, delta_net, feed_forward, norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array, add_one_to_norms, rotated_part
from localllm.models.rope import make_rope, with_axes

HF_MEANT = {"norm_topk_prob": (True,)}


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    """Reorder value heads. Heads with one key head are adjacent in transformers and interleaved in GGUF files."""
    array = delta_net_tensor(name, array)
    if "linear_attn." not in name or name.endswith(".norm.weight"):
        return array
    n_keys, n_values = config.linear_num_key_heads, config.linear_num_value_heads
    if name.endswith("out_proj.weight"):
        return _tiled(array.T, n_keys, n_values).T
    keys = 2 * n_keys * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    return np.concatenate([array[:keys], _tiled(array[keys:], n_keys, n_values)])


def _tiled(array: Array, n_keys: int, n_values: int) -> Array:
    """Reorder the rows of heads, which form n_keys groups, so that one head of each group follows the other."""
    heads = array.reshape(n_keys, n_values // n_keys, -1, *array.shape[1:])
    return heads.swapaxes(0, 1).reshape(array.shape)


def delta_net_tensor(name: str, array: Array) -> Array:
    if name.endswith("A_log"):
        return -np.exp(array)
    return array.squeeze(1) if name.endswith("conv1d.weight") else add_one_to_norms(name, array, None)


def delta_net_keys(config: Any) -> dict[str, Any]:
    return rotated_part(config) | {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types]
        + [False] * config.n_nextn,
        "full_attention_interval": getattr(config, "full_attention_interval", 4),
    }


def hf_keys(config: Any) -> dict[str, Any]:
    sections = config.rope_parameters.get("mrope_section", [11, 11, 10])
    return delta_net_keys(config) | {"rope.dimension_sections": (sections + [0] * 4)[:4]}


def record(m: Header) -> Graph:
    return record_hybrid(m, is_grouped=False)


def record_hybrid(m: Header, *, is_grouped: bool) -> Graph:
    """Record Qwen 3.5, or, if value heads are grouped by their shared key head, Qwen 3 Next."""
    heads, net, ffn = m.heads(), DeltaNet.read(m.meta), m.feed_forward(m.experts())
    rope = with_axes(m, make_rope(m, heads.key_dim), in_turn=True)
    is_recurrent = recurrent_layers(m)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = norm(at, "attn_norm", x)
        if is_recurrent[at.number]:
            x = delta_net(at, y, net, is_grouped=is_grouped, residual=x)
        else:
            x = attention(at, y, heads, rope, qk_norm="head", has_gate=True, residual=x)
        return feed_forward(at, norm(at, "post_attention_norm", x), ffn, residual=x)

    return decoder(m, layer)


def recurrent_layers(m: Header) -> list[bool]:
    """Return whether each block is a delta net. By default, every fourth layer is attention."""
    n_blocks = m.meta.read("block_count", int)
    interval = m.meta.read("full_attention_interval", int, 4, low=1, high=1 << 16)
    if m.meta.find("attention.recurrent_layers") is None:
        return [i < m.config.n_layers and (i + 1) % interval != 0 for i in range(n_blocks)]
    return list(m.meta.read_each("attention.recurrent_layers", n_blocks, bool, low=0, high=1))
