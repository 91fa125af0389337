"""MiniMax-01 and M1 (arXiv:2501.08313): lightning attention in seven of eight layers, and experts.

Lightning attention is linear attention whose state decays by a constant factor per head and layer. Residuals are the
results of norms.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.kernels.operations import Activation, Columns, Gated, Linears, RMSNorm, Scale, Scan
from localllm.models.blocks import Layer, attention, decoder, mixture, norm
from localllm.models.config import Header, Heads
from localllm.models.hf_convert import Array, head_dim, implied
from localllm.models.rope import make_rope
from localllm.models.weights import ArrayWeight

#: Epsilon of the norm after lightning attention, for which GGUF files have no key.
_NORM_EPS = 1e-6
_LAYERS_PER_FULL = 8

HF_NAMES = {
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.output_gate": "attn_gate",
    "self_attn.norm": "attn_norm_2",
}
HF_MEANT = implied("block_size postnorm router_jitter_noise layernorm_alphas") | implied("shared_moe_mode", "sigmoid")


def hf_keys(config: Any) -> dict[str, Any]:
    factors = {
        kind: [value for name in names if (value := config.get(name)) is not None]
        for kind, names in (("alpha", _factors("alpha")), ("beta", _factors("beta")))
    }
    if len(set(factors["alpha"])) > 1 or set(factors["beta"]) - {1}:
        raise ModelError(f"config.json has the factors {factors} of residuals, but GGUF files contain a single alpha")
    kinds = config.get("attn_type_list")
    is_linear = (
        [kind == "linear_attention" for kind in config.layer_types] if kinds is None else [not k for k in kinds]
    )
    usual = [(i + 1) % _LAYERS_PER_FULL != 0 for i in range(len(is_linear))]
    return {
        "residual_scale": float(factors["alpha"][0] if factors["alpha"] else 1.0),
        "rope.dimension_count": config.get("rotary_dim") or head_dim(config),
        "attention.recurrent_layers": None if is_linear == usual else is_linear,
    }


def _factors(kind: str) -> list[str]:
    released = [f"layernorm_{part}_{kind}" for part in ("full_attention", "linear_attention", "mlp")]
    return released + [f"{part}_{kind}_factor" for part in ("full_attn", "linear_attn", "mlp")]


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Omit the decays, which follow from the configuration."""
    return {} if name.endswith(("slope_rate", "query_decay", "key_decay", "diagonal_decay")) else array


def lightning_attention(at: Layer, x: Tensor, heads: Heads, n_layers: int, residual: Tensor) -> Tensor:
    w, d, n, width = at.weights, at.n_embd, heads.n, heads.n * heads.key_dim
    parts = w.split("attn_qkv", d, {"query": width, "key": width, "value": width}, n_groups=n)
    *qkv, gate = at.add(Linears(x, (*parts, w.matrix("attn_gate", d, width))))
    q, k, v = (at.add(Activation(part, "silu")) for part in qkv)
    slopes = 2.0 ** (-8 * np.arange(1, n + 1) / n) * (1 - at.number / max(1, n_layers - 1) + 1e-5)
    a = ArrayWeight(f"decays of layer {at.number}", -slopes.astype(np.float32))
    # Every step is softplus(0 + bias) = 1.
    bias = ArrayWeight("steps", np.full(n, math.log(math.e - 1), np.float32))
    steps = at.add(Scale(at.add(Columns(v, range(n))), 0.0))
    state = at.graph.state("S", n, heads.key_dim, heads.key_dim)
    y = at.add(Scan((v, k, q), steps, a, bias, ArrayWeight("zeros", np.zeros(n, np.float32)), state, n))
    y = at.add(RMSNorm(y, w.vector("attn_norm_2", width), _NORM_EPS))
    return at.linear(at.add(Gated(gate, y, "sigmoid")), "attn_output", d, residual=residual)


def record(m: Header) -> Graph:
    heads, experts, n_layers = m.heads(), m.required_experts(), m.config.n_layers
    rope, alpha = make_rope(m, heads.key_dim), m.meta.read("residual_scale", float, low=0.0, high=1e6)
    m.meta.skip(
        "attention.recurrent_layers", "full_attention_interval"
    )  # the names of tensors show the kinds of layers

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = norm(at, "attn_norm", x)
        residual = at.add(Scale(y, alpha)) if alpha != 1 else y
        if at.weights.shape("attn_norm_2.weight"):
            x = lightning_attention(at, y, heads, n_layers, residual)
        else:
            x = attention(at, y, heads, rope, residual=residual)
        y = norm(at, "ffn_norm", x)
        return mixture(at, y, experts, residual=at.add(Scale(y, alpha)) if alpha != 1 else y)

    return decoder(m, layer)
