"""OpenELM (arXiv:2404.14619): Llama's layers with normed heads. Layers differ in their number of heads and width."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array
from localllm.models.rope import make_rope


def _width(multiplier: float, config: Any) -> int:
    """Round a width to a multiple of the divisor that is at least 0.9 times the width."""
    wanted, divisor = multiplier * config.hidden_size, config.ffn_dim_divisor
    width = max(divisor, int(wanted + divisor / 2) // divisor * divisor)
    return int(width + divisor if width < 0.9 * wanted else width)


def hf_keys(config: Any) -> dict[str, Any]:
    return {
        "context_length": config.max_context_length,
        "feed_forward_length": [_width(each, config) for each in config.ffn_multipliers],
        "attention.head_count": list(config.num_query_heads),
        "attention.head_count_kv": list(config.num_kv_heads),
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_freq_constant,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    if not name.endswith("ffn.proj_1.weight"):
        return array
    n = len(array) // 2
    return {"ffn_gate.weight": array[:n], "ffn_up.weight": array[n:]}


def record(m: Header) -> Graph:
    heads = m.heads_of_layers()
    widths = m.meta.read_each("feed_forward_length", m.config.n_layers, int, low=1, high=1 << 24)
    rope = make_rope(m, heads[0].key_dim)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = norm(at, "attn_norm", x)
        x = attention(at, y, heads[at.number], rope, residual=x, qk_norm="head")
        return gated_mlp(at, norm(at, "ffn_norm", x), widths[at.number], residual=x)

    return decoder(m, layer)
