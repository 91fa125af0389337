"""Falcon 7B, 40B and 180B (arXiv:2311.16867): attention and MLP in parallel, after one or two LayerNorms."""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, attention, decoder, layer_norm, mlp
from localllm.models.config import Header
from localllm.models.hf_convert import GELU, Array
from localllm.models.rope import make_rope

HF_MEANT = {"activation": GELU, "num_ln_in_parallel_attn": ()}
_ABSENT = ("attention.key_length", "attention.value_length")


def hf_keys(config: Any) -> dict[str, Any]:
    if getattr(config, "alibi", False) or not getattr(config, "parallel_attn", True):
        raise ModelError(
            "config.json has alibi or lacks parallel_attn, but GGUF files of Falcon mean rotary positions"
        )
    theta = config.rope_parameters["rope_theta"]
    return dict.fromkeys(_ABSENT) | {
        "rope.freq_base": None if theta == 10_000.0 else theta,
        "context_length": getattr(config, "max_position_embeddings", None) or 2048,
        "tensor_data_layout": "jploski",
        "feed_forward_length": getattr(config, "ffn_hidden_size", None) or 4 * config.hidden_size,
        "attention.head_count_kv": _n_groups(config),
    }


def _n_groups(config: Any) -> int:
    names = {"new_decoder_architecture": False, "multi_query": True, "num_kv_heads": None}
    is_grouped, is_single, n = (getattr(config, name, usual) for name, usual in names.items())
    return int(n or config.num_attention_heads) if is_grouped or not is_single else 1


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Reorder [queries | key | value] of each group to the queries, keys and values of all groups.

    The norm before the MLP is the layer's first norm.
    """
    if ".ln_mlp." in name:
        return {f"attn_norm.{name.rpartition('.')[2]}": array}
    if "query_key_value" not in name:
        return array
    n, groups = config.num_attention_heads, _n_groups(config)
    heads = array.reshape(groups, n // groups + 2, -1, *array.shape[1:])
    parts = heads[:, :-2], heads[:, -2], heads[:, -1]
    return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])


def record(m: Header) -> Graph:
    heads, n_ff, rope = m.heads(), m.mlp_width(), make_rope(m, m.heads().key_dim)
    m.meta.skip("tensor_data_layout")

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = layer_norm(at, "attn_norm", x)
        attention_input = layer_norm(at, "attn_norm_2", x) if "attn_norm_2.weight" in at.weights else y
        x = attention(at, attention_input, heads, rope, residual=x)
        return mlp(at, y, n_ff, activation="gelu_erf", residual=x)

    return decoder(m, layer, output_norm=layer_norm, norm_eps=m.layer_norm_eps)
