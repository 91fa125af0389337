"""Llama Nemotron 51B, Super and Ultra (arXiv:2411.19146), DeciLM: Llama's layers with different widths. Some
layers have no attention, or a matrix instead of attention, and some layers have no MLP."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models import llama
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array, interleave_pairs
from localllm.models.rope import make_rope


def _blocks(config: Any) -> list[tuple[int, int, int]]:
    """Return the number of query and key heads and the width of the MLP for each layer; 0 if absent."""
    n, found = config.num_attention_heads, []
    if not hasattr(config, "block_configs"):  # DeciLM
        each = getattr(
            config, "num_key_value_heads_per_layer", [config.num_key_value_heads] * config.num_hidden_layers
        )
        return [(n, n_kv, config.intermediate_size) for n_kv in each]
    for block in config.block_configs:
        group, part = block["attention"]["n_heads_in_group"], block["ffn"]["ffn_mult"] or 0
        width = -(-int(2 * part * config.hidden_size / 3) // 256) * 256
        found.append(
            (n if group or block["attention"]["replace_with_linear"] else 0, n // group if group else 0, width)
        )
    return found


def hf_keys(config: Any) -> dict[str, Any]:
    heads, kv_heads, widths = map(list, zip(*_blocks(config), strict=True))
    dim = config.hidden_size // config.num_attention_heads
    lengths = {"attention.key_length": dim, "attention.value_length": dim}
    keys = llama.hf_keys(config) | lengths
    keys |= {"attention.head_count": heads, "attention.head_count_kv": kv_heads, "feed_forward_length": widths}
    return keys


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return array
    n, n_kv, _ = _blocks(config)[int(name.split("layers.")[1].split(".")[0])]
    return interleave_pairs(array, n if name.endswith("q_proj.weight") else n_kv)


def record(m: Header) -> Graph:
    n_layers, heads = m.config.n_layers, m.heads_by_layer()
    n_heads = m.meta.read_each("attention.head_count", n_layers, int, low=0, high=1 << 14)
    widths = m.meta.read_each("feed_forward_length", n_layers, int, low=0, high=1 << 24)
    dim = m.head_dims()[0] or m.config.n_embd // max(n_heads)
    rope = make_rope(m, dim, interleaved=True)

    def layer(at: Layer, x: Tensor) -> Tensor:
        layer_heads, n_ff = heads[at.number], widths[at.number]
        if layer_heads is not None and n_heads[at.number]:
            x = attention(at, norm(at, "attn_norm", x), layer_heads, rope, residual=x)
        elif n_heads[at.number]:
            x = at.linear(norm(at, "attn_norm", x), "attn_output", at.n_embd, residual=x)
        return gated_mlp(at, norm(at, "ffn_norm", x), n_ff, residual=x) if n_ff else x

    return decoder(m, layer)
