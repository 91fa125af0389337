"""GPT-NeoX, Pythia and similar models (arXiv:2204.06745): LayerNorm, an MLP without a gate, and in most models
attention and MLP in parallel, each after a separate norm."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, attention, decoder, layer_norm, mlp
from localllm.models.config import Header
from localllm.models.hf_convert import GELU, parallel_keys, split_heads
from localllm.models.rope import make_rope

HF_MEANT = {"hidden_act": GELU}
hf_tensor = split_heads


def hf_keys(config: Any) -> dict[str, Any]:
    return parallel_keys(config) | {"attention.head_count_kv": None}


def record(m: Header) -> Graph:
    heads, n_ff, rope = m.heads(), m.mlp_width(), make_rope(m, m.heads().key_dim)
    is_parallel = m.meta.read("use_parallel_residual", bool, True)

    def layer(at: Layer, x: Tensor) -> Tensor:
        after = attention(at, layer_norm(at, "attn_norm", x), heads, rope, residual=x)
        y = layer_norm(at, "ffn_norm", x if is_parallel else after)
        return mlp(at, y, n_ff, activation="gelu_erf", residual=after)

    return decoder(m, layer, output_norm=layer_norm, norm_eps=m.layer_norm_eps)
