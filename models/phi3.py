"""Phi-3, 3.5 and 4 (arXiv:2404.14219): one matrix for query, key and value, one for gate and up, and LongRoPE."""

from __future__ import annotations

from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.rope import make_rope

HF_NAMES = hf_names.COMMON | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


def record(m: Header) -> Graph:
    heads, n_ff, windows = m.heads(), m.mlp_width(), m.windows(period=0)
    # Files do not say that it is LongRoPE, but have its factors.
    scaling = "longrope" if "rope_factors_long.weight" in m.weights else None
    rope = make_rope(m, heads.key_dim, scaling=scaling)

    def layer(at: Layer, x: Tensor) -> Tensor:
        x = attention(at, norm(at, "attn_norm", x), heads, rope, window=windows[at.number], residual=x)
        return gated_mlp(at, norm(at, "ffn_norm", x), n_ff, residual=x)

    return decoder(m, layer)
