"""Jais (arXiv:2308.16149): GPT-2's layers with ALiBi and a gated MLP. Scores are divided by the width of a head."""

from __future__ import annotations

import math
from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, layer_norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array, floats, implied

HF_MEANT = (
    implied("activation_function", "swiglu")
    | implied("position_embedding_type", "alibi")
    | implied("mup_scale_qk_dot_by_d scale_qk_dot_by_d", True)
    | implied("alibi_scaling", None)
)
_ABSENT = ("head_count_kv", "key_length", "value_length")
#: Tensors of linear layers that are stored as [inputs, outputs].
_TRANSPOSED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight", ".c_fc2.weight")


def hf_keys(config: Any) -> dict[str, Any]:
    slopes = next((t for name, t in config.tensors.items() if name.endswith("relative_pe.slopes")), None)
    power = 1 << (config.num_attention_heads.bit_length() - 1)
    first = 2.0 ** (-8 / power) if slopes is None else float(floats(slopes.values()).flat[0])
    return dict.fromkeys(f"attention.{name}" for name in _ABSENT) | {
        "feed_forward_length": config.n_inner,
        "attention.max_alibi_bias": float(-round(math.log2(first) * power)),
        "rope.freq_base": None,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    if name.endswith("relative_pe.slopes"):
        return {}
    if name.endswith(_TRANSPOSED):
        return array.T
    if name.endswith("wte.weight"):
        return floats(array) * _scale(config, "mup_embeddings_scale", "embeddings_scale")
    if name == "lm_head.weight":
        alpha = _scale(config, "mup_output_alpha", "width_scale")
        return floats(array) * (alpha * getattr(config, "mup_width_scale", 1.0))
    return array


def _scale(config: Any, name: str, other: str) -> float:
    value = getattr(config, name, None)
    return float(config[other] if value is None else value)


def record(m: Header) -> Graph:
    heads, n_ff = m.heads(), m.mlp_width()
    max_bias = m.meta.read("attention.max_alibi_bias", float, low=0.0, high=1e3)
    scale = 1 / heads.key_dim

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = layer_norm(at, "attn_norm", x)
        x = attention(at, y, heads, None, residual=x, scale=scale, max_bias=max_bias)
        return gated_mlp(at, layer_norm(at, "ffn_norm", x), n_ff, residual=x)

    return decoder(m, layer, output_norm=layer_norm, norm_eps=m.layer_norm_eps)
