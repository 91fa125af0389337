"""Command R and R7B, Command A and Aya: attention and MLP side by side behind one LayerNorm.

In Cohere 2, three of four layers see a window, and only those rotate.
"""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, layer_norm
from localllm.models.config import Header
from localllm.models.hf_convert import rotated_part, sliding_window
from localllm.models.rope import make_rope

HF_NAMES = hf_names.COMMON


def hf_keys(config: Any) -> dict[str, Any]:
    keys = {"logit_scale": config.logit_scale}
    if config.rope_parameters["rope_type"] == "default":
        keys["rope.scaling.type"] = "none"
    if config.model_type != "cohere2":
        return keys | {"attention.key_length": None, "attention.value_length": None}
    return keys | sliding_window(config) | rotated_part(config) | {"vocab_size": config.vocab_size}


def record(m: Header) -> Graph:
    meta, heads, n_ff = m.meta, m.heads(), m.mlp_width()
    is_second = m.config.architecture == "cohere2"
    windows = m.windows(period=4, default=None) if is_second else (None,) * m.config.n_layers
    rope = make_rope(m, heads.key_dim, interleaved=True)
    logit_scale = meta.read("logit_scale", float, 0.0, low=0.0, high=1e6) or 1.0

    def layer(at: Layer, x: Tensor) -> Tensor:
        y, window = layer_norm(at, "attn_norm", x), windows[at.number]
        own_rope = rope if window or not is_second else None
        x = attention(at, y, heads, own_rope, window=window, residual=x)
        return gated_mlp(at, y, n_ff, residual=x)

    return decoder(m, layer, output_norm=layer_norm, norm_eps=m.layer_norm_eps, logit_scale=logit_scale)
