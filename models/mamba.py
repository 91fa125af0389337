"""Mamba (arXiv:2312.00752) and Falcon Mamba (arXiv:2410.05355): each layer is a scan of every channel, without
attention and MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Matrix, Tensor
from localllm.kernels.operations import CausalConv, ChannelScan, Gated, Linear, Linears, RMSNorm
from localllm.models.blocks import Layer, decoder, norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array, floats


def hf_keys(config: Any) -> dict[str, Any]:
    rank, eps = config.time_step_rank, config.layer_norm_epsilon
    if (mixer_eps := getattr(config, "mixer_rms_eps", eps)) != eps:
        raise ModelError(f"config.json has mixer_rms_eps = {mixer_eps}, but GGUF files have one epsilon, {eps}")
    return plain_keys(config) | {
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "ssm.inner_size": getattr(config, "intermediate_size", None) or int(config.expand * config.hidden_size),
        "ssm.time_step_rank": -(-config.hidden_size // 16) if rank == "auto" else rank,
        "ssm.dt_b_c_rms": config.model_type == "falcon_mamba",
    }


def plain_keys(config: Any) -> dict[str, Any]:
    """Return the keys of models without attention and MLPs."""
    absent = ("head_count_kv", "key_length", "value_length", "layer_norm_epsilon")
    return {f"attention.{name}": None for name in absent} | {
        "rope.freq_base": None,
        "context_length": 1 << 20,  # no limit; the value of llama.cpp's converter
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.state_size,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    if name.endswith("A_log"):
        return -np.exp(floats(array))
    return array.squeeze(1) if name.endswith("conv1d.weight") else array


@dataclass(frozen=True)
class Channels:
    """Sizes of a layer's scan: ``n`` channels of ``n_state`` values, and ``n_step`` inputs of the step sizes."""

    n: int
    n_state: int
    n_step: int
    kernel: int
    has_norms: bool  # whether the inputs of steps, states and outputs are normed without weights

    @classmethod
    def read(cls, m: Header) -> Channels:
        n, n_state, n_step, kernel = (
            m.meta.read(f"ssm.{key}", int, low=1, high=1 << 20)
            for key in ("inner_size", "state_size", "time_step_rank", "conv_kernel")
        )
        return cls(n, n_state, n_step, kernel, m.meta.read("ssm.dt_b_c_rms", bool, False))


def scan(at: Layer, x: Tensor, channels: Channels, residual: Tensor) -> Tensor:
    """A convolution, then a scan whose steps, inputs and outputs depend on the convolution's result, times a gate."""
    w, d, n, n_state, kernel = at.weights, at.n_embd, channels.n, channels.n_state, channels.kernel
    x, gate = at.add(Linears(x, w.split("ssm_in", d, {"x": n, "gate": n})))
    conv, bias = w.require("ssm_conv1d.weight", n, kernel), w.find("ssm_conv1d.bias", n)
    x = at.add(CausalConv(x, conv, at.graph.state("conv", kernel - 1, n), bias, silu=True))
    widths = {"dt": channels.n_step, "b": n_state, "c": n_state}
    inputs = dict(zip(widths, at.add(Linears(x, w.split("ssm_x", n, widths))), strict=True))
    for name, tensor in inputs.items():
        weight = w.find(f"ssm_{name}_norm.weight", tensor.width)
        if channels.has_norms or weight is not None:
            inputs[name] = at.add(RMSNorm(tensor, weight, at.norm_eps))
    dt = at.add(Linear(inputs["dt"], Matrix(w.require("ssm_dt.weight", n, channels.n_step))))
    weights = w.require("ssm_a", n, n_state), w.require("ssm_dt.bias", n), w.require("ssm_d", n)
    y = at.add(ChannelScan(x, dt, inputs["b"], inputs["c"], *weights, at.graph.state("h", n_state, n)))
    return at.linear(at.add(Gated(gate, y, "silu")), "ssm_out", d, residual=residual)


def record(m: Header) -> Graph:
    channels = Channels.read(m)
    m.meta.skip("attention.head_count")  # 0
    return decoder(m, lambda at, x: scan(at, norm(at, "attn_norm", x), channels, x))
