"""Kimi Linear (arXiv:2510.26692): three of four layers are gated delta nets with a decay per channel. The fourth
is latent attention without rotation."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.kernels.operations import CausalConv, Gated, GatedDelta, Linears, RMSNorm
from localllm.models import deepseek2
from localllm.models.blocks import Layer, decoder, feed_forward, norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array, floats
from localllm.models.weights import Reshaped

HF_MEANT = {"layer_types": (), "num_heads": (), "kda_layers": ()}


def hf_keys(config: Any) -> dict[str, Any]:
    if (getattr(config, "n_group", None) or 1) > 1:
        raise ModelError("config.json has experts in groups, which GGUF files of Kimi Linear have no key for")
    linear = getattr(config, "linear_attn_config", None) or {}
    names = {"head_dim": "linear_head_dim", "short_conv_kernel_size": "linear_conv_kernel_dim"}
    usual = {name: getattr(config, other, None) for name, other in names.items()}
    width, kernel = (linear.get(name) or usual[name] for name in names)
    full_layers = [i - 1 for i in linear.get("full_attn_layers") or ()]
    if not full_layers:
        full_layers = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    return deepseek2.hf_keys(config) | {
        "attention.head_count_kv": [int(i in full_layers) for i in range(config.num_hidden_layers)],
        "attention.value_length": config.v_head_dim,
        "kda.head_dim": width,
        "ssm.conv_kernel": kernel,
        "expert_group_count": None,
        "rope.freq_base": None,
        "rope.scaling.yarn_log_multiplier": None,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    if name.endswith("A_log"):
        return -np.exp(floats(array))
    if name.endswith("conv1d.weight"):
        return array.reshape(1, -1, 1, array.shape[-1])
    match = re.fullmatch(r"model\.layers\.\d+\.block_sparse_moe\.(gate|up|down)_proj\.weight", name)
    return {f"ffn_{match[1]}.weight": array} if match else deepseek2.hf_tensor(name, array, config)


def record(m: Header) -> Graph:
    meta, latents, ffn = m.meta, deepseek2.Latents.read(m), m.feed_forward(m.experts(gating="sigmoid"))
    n_kv = meta.read_each("attention.head_count_kv", m.config.n_layers, int, low=0, high=1 << 14)
    dim = meta.read("kda.head_dim", int, low=16, high=1 << 10)
    kernel = meta.read("ssm.conv_kernel", int, low=2, high=8)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = norm(at, "attn_norm", x)
        if n_kv[at.number]:
            x = deepseek2.latent_attention(at, y, latents, None, residual=x)
        else:
            x = delta_net(at, y, latents.n_heads, dim, kernel, residual=x)
        return feed_forward(at, norm(at, "ffn_norm", x), ffn, residual=x)

    return decoder(m, layer)


def delta_net(
    at: Layer, x: Tensor, n: int, dim: int, kernel: int, *, residual: Tensor | None = None, bound: float = 0.0
) -> Tensor:
    """A gated delta net of n heads, with separate convolutions for queries, keys and values.

    `localllm.kernels.operations.GatedDelta` documents ``bound``. Decay and gate have one matrix each, or two.
    """
    w, d, width = at.weights, at.n_embd, n * dim
    has_two = "ssm_f_b.weight" in w
    inner = dim if has_two else width
    widths = {"attn_q": width, "attn_k": width, "attn_v": width, "ssm_beta": n, "ssm_f_a": inner, "ssm_g_a": inner}
    *qkv, beta, decay, gate = at.add(Linears(x, tuple(w.matrix(name, d, n_out) for name, n_out in widths.items())))
    mixed = []
    for name, tensor in zip("qkv", qkv, strict=True):
        conv = Reshaped(w.require(f"ssm_conv1d_{name}.weight", 1, width, 1, kernel), (width, kernel))
        state = at.graph.state(f"conv_{name}", kernel - 1, width)
        mixed.append(at.add(CausalConv(tensor, conv, state, silu=True)))
    if has_two:
        decay, gate = at.linear(decay, "ssm_f_b", width), at.linear(gate, "ssm_g_b", width)
    shape = (n, 1) if w.n_rows("ssm_a") else (n,)
    a, bias = Reshaped(w.require("ssm_a", *shape), (n,)), w.require("ssm_dt.bias", width)
    y = at.add(GatedDelta(tuple(mixed), decay, beta, a, bias, at.graph.state("S", n, dim, dim), n, bound=bound))
    y = at.add(RMSNorm(y, w.vector("ssm_norm", dim), at.norm_eps, n))
    return at.linear(at.add(Gated(gate, y, "sigmoid")), "attn_output", d, residual=residual)
