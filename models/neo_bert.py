"""NeoBERT (arXiv:2502.19587): Llama's layers, whose tokens see each other in both directions.

Rows of query, key and value are grouped by head, as in NeoBERT's code. llama.cpp's converter keeps this order, but
llama.cpp reads files as if all queries came first.
"""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.hf_convert import encoder_keys, unscaled
from localllm.models.rope import make_rope

HF_MEANT = {"hidden_act": ("swiglu", "silu")}


def hf_keys(config: Any) -> dict[str, Any]:
    pooling = {"pooling_type": 2}  # the first token's vector, as in the authors' code
    keys = pooling | encoder_keys(config) | unscaled(config)
    return keys | {
        "context_length": getattr(config, "max_length", None) or config.max_position_embeddings,
        "feed_forward_length": 2 * config.intermediate_size // 3,
        "attention.layer_norm_rms_epsilon": getattr(config, "norm_eps", 1e-6),
    }


def record(m: Header) -> Graph:
    heads, n_ff, rope = m.heads(), m.mlp_width(), make_rope(m, m.heads().key_dim, interleaved=True)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = norm(at, "attn_norm", x)
        x = attention(at, y, heads, rope, residual=x, qkv_by_head=True)
        return gated_mlp(at, norm(at, "ffn_norm", x), n_ff, residual=x)

    def output_norm(at: Layer, name: str, x: Tensor) -> Tensor:
        return norm(at, f"enc.{name}", x)

    return decoder(m, layer, output_norm=output_norm)
