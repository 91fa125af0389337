"""Falcon-H1 (arXiv:2507.22448): attention and Mamba 2 side by side in every layer.

The multipliers of its configuration are in the matrices of GGUF files already.
"""

from __future__ import annotations

from localllm.kernels.graph import Graph, RMSNorm, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, Mamba, attention, decoder, gated_mlp, mamba, norm
from localllm.models.config import Header
from localllm.models.rope import make_rope

HF_NAMES = (
    hf_names.COMMON
    | hf_names.mamba("mamba")
    | {
        "output_norm": "model.final_layernorm",
        "ffn_norm": "pre_ff_layernorm.weight",  # in its files, the name ends here
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    }
)


def record(m: Header) -> Graph:
    heads, n_ff, net, rope = m.heads(), m.mlp_width(), Mamba.read(m.meta), make_rope(m, m.heads().key_dim)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = norm(at, "attn_norm", x)
        x = attention(at, y, heads, rope, residual=x)
        x = mamba(at, y, net, residual=x)
        y = at.add(RMSNorm(x, at.weights.require("ffn_norm", at.n_embd), at.norm_eps))
        return gated_mlp(at, y, n_ff, residual=x)

    return decoder(m, layer)
