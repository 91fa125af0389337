"""BLOOM (arXiv:2211.05100): LayerNorm, biases everywhere, and ALiBi."""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, gpt_like, layer_norm
from localllm.models.config import Header
from localllm.models.hf_convert import split_heads

_ABSENT = ("attention.key_length", "attention.value_length", "rope.freq_base")
hf_tensor = split_heads


def hf_keys(config: Any) -> dict[str, Any]:
    if getattr(config, "apply_residual_connection_post_layernorm", False):
        raise ModelError(
            "config.json has apply_residual_connection_post_layernorm, but GGUF files of BLOOM mean that it is false"
        )
    return dict.fromkeys(_ABSENT) | {
        "context_length": getattr(config, "seq_length", None) or config.hidden_size,
        "feed_forward_length": 4 * config.hidden_size,
        "attention.head_count_kv": config.num_attention_heads,
    }


def record(m: Header) -> Graph:
    max_bias = m.meta.read("attention.max_alibi_bias", float, 8.0, low=0.0, high=1e3)

    def embedding(at: Layer, x: Tensor) -> Tensor:
        return layer_norm(at, "token_embd_norm", x)

    return gpt_like(m, None, activation="gelu", change_embedding=embedding, max_bias=max_bias)
