"""Ling 3: groups of layers with gated delta nets, whose decay is per channel and bounded. The last layer of a group
is latent attention with a gate per head. Experts as in DeepSeek V3."""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.models import deepseek2, kimi_linear
from localllm.models.blocks import Layer, decoder, feed_forward, norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array, floats

HF_NAMES = {
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.q_a_proj": "attn_q_a",
    "attention.q_a_layernorm": "attn_q_a_norm",
    "attention.q_b_proj": "attn_q_b",
    "attention.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "attention.kv_a_layernorm": "attn_kv_a_norm",
    "attention.kv_b_proj": "attn_kv_b",
    "attention.q_conv1d": "ssm_conv1d_q",
    "attention.k_conv1d": "ssm_conv1d_k",
    "attention.v_conv1d": "ssm_conv1d_v",
    "attention.f_proj": "ssm_f_a",
    "attention.b_proj": "ssm_beta",
    "attention.A_log": "ssm_a",
    "attention.dt_proj": "ssm_dt",
    "attention.o_norm": "ssm_norm",
}
HF_MEANT = {"layer_group_size": (), "linear_conv_kernel_dim": (), "linear_head_dim": ()}


def hf_keys(config: Any) -> dict[str, Any]:
    if not getattr(config, "kda_safe_gate", True):
        raise ModelError("config.json has kda_safe_gate = false, but GGUF files of Ling 3 mean true")
    dim = getattr(config, "linear_head_dim", None) or config.head_dim
    width = getattr(config, "moe_shared_expert_intermediate_size", None)
    limits = {
        f"swiglu_clamp_{ours}": [float(limit or 0) for limit in getattr(config, theirs, None) or ()] or None
        for ours, theirs in (("exp", "expert_swiglu_limit_list"), ("shexp", "share_expert_swiglu_limit_list"))
    }
    keys = deepseek2.hf_keys(config) | limits
    return keys | {
        "attention.head_count_kv": [int(_is_full(config, i)) for i in range(config.num_hidden_layers)],
        "attention.value_length": config.head_dim,
        "expert_shared_feed_forward_length": width or config.moe_intermediate_size * config.n_shared_experts,
        "kda.head_dim": dim,
        "kda.safe_gate": True,
        "kda.gate_lower_bound": config.kda_lower_bound,
        "ssm.conv_kernel": config.short_conv_kernel_size,
        "rope.dimension_sections": None,
    }


def _is_full(config: Any, layer: int) -> bool:
    """Return whether a layer is attention: the last of each group, and all layers after the last complete group."""
    if kinds := getattr(config, "layer_types", None):
        return bool(kinds[layer] == "full_attention")
    size = config.layer_group_size
    return bool((layer + 1) % size == 0 or layer >= config.num_hidden_layers // size * size)


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    if name.endswith("A_log"):
        return np.exp(floats(array)).reshape(-1, 1)
    if name.endswith("conv1d.weight"):
        return array.reshape(1, -1, 1, array.shape[-1])
    if name.endswith("g_proj.weight"):  # per head or per value
        layer = int(name.split(".")[2])
        return {"attn_gate.weight" if _is_full(config, layer) else "ssm_g_a.weight": array}
    return deepseek2.hf_tensor(name, array, config)


def record(m: Header) -> Graph:
    meta, n_layers, ffn = m.meta, m.config.n_layers, m.feed_forward(m.experts(gating="sigmoid"))
    rope, scale = deepseek2.make_latent_rope(m)
    latents = deepseek2.Latents.read(m, scale)
    n_kv = meta.read_each("attention.head_count_kv", n_layers, int, low=0, high=1 << 14)
    dim = meta.read("kda.head_dim", int, low=16, high=1 << 10)
    kernel = meta.read("ssm.conv_kernel", int, low=2, high=8)
    bound = meta.read("kda.gate_lower_bound", float, low=-1e3, high=-1e-6)
    if not meta.read("kda.safe_gate", bool, True):
        raise ModelError("the file has kda.safe_gate = false, but it is true in models of Ling 3: the file is broken")
    limits = m.gate_limits()

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = norm(at, "attn_norm", x)
        if n_kv[at.number]:
            x = deepseek2.latent_attention(at, y, latents, rope, residual=x, has_gate=True)
        else:
            x = kimi_linear.delta_net(at, y, latents.n_heads, dim, kernel, residual=x, bound=bound)
        return feed_forward(at, norm(at, "ffn_norm", x), ffn, residual=x, limits=limits[at.number])

    return decoder(m, layer)
