"""BLOOM (arXiv:2211.05100): LayerNorm, biases everywhere, and ALiBi."""

from __future__ import annotations

from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, attention, decoder, layer_norm, mlp
from localllm.models.config import Header
from localllm.models.hf_convert import Array

_ABSENT = ("attention.key_length", "attention.value_length", "rope.freq_base")


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


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    """Reorder [query | key | value] of each head to the queries, keys and values of all heads."""
    if "query_key_value" not in name:
        return array
    heads = array.reshape(config.num_attention_heads, 3, -1, *array.shape[1:])
    return heads.swapaxes(0, 1).reshape(array.shape)


def record(m: Header) -> Graph:
    heads, n_ff = m.heads(), m.mlp_width()
    max_bias = m.meta.read("attention.max_alibi_bias", float, 8.0, low=0.0, high=1e3)

    def embedding(at: Layer, x: Tensor) -> Tensor:
        return layer_norm(at, "token_embd_norm", x)

    def layer(at: Layer, x: Tensor) -> Tensor:
        x = attention(at, layer_norm(at, "attn_norm", x), heads, None, residual=x, max_bias=max_bias)
        return mlp(at, layer_norm(at, "ffn_norm", x), n_ff, activation="gelu", residual=x)

    return decoder(m, layer, change_embedding=embedding, output_norm=layer_norm, norm_eps=m.layer_norm_eps)
