"""PLaMo 13B (Preferred Networks, 2023): attention and MLP in parallel, after one norm."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array, implied
from localllm.models.rope import make_rope

HF_MEANT = implied("num_key_value_heads") | implied("tokenizer_class")


def hf_keys(config: Any) -> dict[str, Any]:
    return {
        "context_length": 4096,  # not in config.json
        "attention.head_count_kv": config.num_attention_heads // config.n_shared_head,
        "attention.key_length": None,
        "attention.value_length": None,
        "rope.freq_base": None,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    """Reorder query heads: in the checkpoint, query head h uses the key head h modulo the number of key heads."""
    n = config.n_shared_head
    if name.endswith("q_proj.weight"):
        heads = array.reshape(n, config.num_attention_heads // n, -1, array.shape[-1])
        return heads.swapaxes(0, 1).reshape(array.shape)
    if name.endswith("o_proj.weight"):
        heads = array.reshape(len(array), n, config.num_attention_heads // n, -1)
        return heads.swapaxes(1, 2).reshape(array.shape)
    return array


def record(m: Header) -> Graph:
    heads, n_ff, rope = m.heads(), m.mlp_width(), make_rope(m, m.heads().key_dim)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = norm(at, "attn_norm", x)
        return gated_mlp(at, y, n_ff, residual=attention(at, y, heads, rope, residual=x))

    return decoder(m, layer)
