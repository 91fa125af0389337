"""CogVLM (arXiv:2311.03079) and CogVLM 2, text: Llama's layers.

The files contain further matrices for tokens of images, which text does not use.
"""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph
from localllm.models.blocks import llama_like
from localllm.models.config import Header
from localllm.models.hf_convert import implied

HF_MEANT = implied("vision_config template_version")
_VISION = ("vis_attn_qkv.weight", "vis_attn_output.weight", "vis_gate.weight", "vis_up.weight", "vis_down.weight")


def hf_keys(config: Any) -> dict[str, Any]:
    """Return the keys of key/value heads and of the rotation, for which CogVLM 2's code has a constant."""
    n_kv = getattr(config, "num_multi_query_heads", None)
    theta = config.rope_parameters["rope_theta"]
    is_second = bool(n_kv) and getattr(config, "rope_theta", None) is None
    return {
        "vocab_size": config.vocab_size,
        "attention.head_count_kv": n_kv or config.num_attention_heads,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.freq_base": 500_000.0 if is_second else None if theta == 10_000.0 else theta,
    }


def record(m: Header) -> Graph:
    for i in range(m.config.n_layers):
        m.weights.layer(i).skip(*_VISION)
    return llama_like(m)
