"""Apertus (arXiv:2509.14233): Llama's layers with normed heads, and an MLP of xIELU without a gate."""

from __future__ import annotations

import math
from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.kernels.operations import XIELU
from localllm.models.blocks import Layer, attention, decoder, norm
from localllm.models.config import Header, ModelMetadata
from localllm.models.hf_convert import Array, floats, rotated_part
from localllm.models.rope import make_rope

HF_MEANT = {"hidden_act": ("xielu",)}
_NUMBERS = ("alpha_n", "alpha_p", "beta", "eps")


def hf_keys(config: Any) -> dict[str, Any]:
    """Return the activations' parameters, which are tensors in a checkpoint, as four keys without a prefix."""
    layers = range(config.num_hidden_layers)

    def values(name: str) -> list[float]:
        tensors = (config.tensors[f"model.layers.{i}.mlp.act_fn.{name}"] for i in layers)
        return [float(floats(tensor.values()).reshape(())) for tensor in tensors]

    keys = rotated_part(config) | {"vocab_size": config.vocab_size}
    keys |= {f".xielu.{name}": values(name) for name in _NUMBERS}
    return keys


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    return {} if ".act_fn." in name else array


def record(m: Header) -> Graph:
    heads, n_ff, rope, n_layers = m.heads(), m.mlp_width(), make_rope(m, m.heads().key_dim), m.config.n_layers
    meta = ModelMetadata(m.meta.values, "xielu")
    numbers = [meta.read_each(name, n_layers, float, low=-1e3, high=1e3) for name in _NUMBERS]

    def layer(at: Layer, x: Tensor) -> Tensor:
        x = attention(at, norm(at, "attn_norm", x), heads, rope, qk_norm="head", residual=x)
        alpha_n, alpha_p, beta, eps = (values[at.number] for values in numbers)
        y = at.linear(norm(at, "ffn_norm", x), "ffn_up", n_ff)
        y = at.add(XIELU(y, _softplus(alpha_p), beta + _softplus(alpha_n), beta, eps))
        return at.linear(y, "ffn_down", at.n_embd, residual=x)

    return decoder(m, layer)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
