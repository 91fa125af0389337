"""PLaMo 3 (Preferred Networks and NICT, 2025): norms before and after attention and MLP, with normed heads.

Seven of eight layers have a window, and a separate rotation. PLaMo's norms store weights with an offset.
"""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import Array, implied
from localllm.models.rope import make_local_rope, make_rope

HF_MEANT = implied("rope_scaling_factor", 1) | implied(
    "tokenizer_class image_feature_size image_proj_type linear_type"
)
#: Values that are added to the weights of norms, by the end of their names.
_OFFSETS = {
    "post_mixer_norm.weight": 1 / 5,
    "post_mlp_norm.weight": 1 / 5**1.5,
    "norm.weight": 1,
}


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    return next((array + offset for end, offset in _OFFSETS.items() if name.endswith(end)), array)


def hf_keys(config: Any) -> dict[str, Any]:
    window = getattr(config, "window_size", None)
    return {
        "vocab_size": config.vocab_size,
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": window and config.sliding_window_pattern,
    }


def record(m: Header) -> Graph:
    dim, windows = m.heads().key_dim, m.windows(period=8)
    rope, local_rope = make_rope(m, dim), make_local_rope(m, dim)
    ropes = [local_rope if window else rope for window in windows]
    return llama_like(m, ropes, windows=windows, qk_norm="head", post_norm_eps=m.norm_eps)
