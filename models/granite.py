"""Granite 3 and 4, dense and with experts: Llama's layers, with scales on embedding, scores, residuals and logits.

In hybrids, most layers have Mamba 2 in attention's place, and nothing is rotated.
"""

from __future__ import annotations

from localllm.kernels.graph import Graph, Rope, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, Mamba, add, attention, decoder, gated_mlp, mamba, mixture, norm
from localllm.models.config import Header
from localllm.models.rope import make_rope

HF_NAMES = (
    hf_names.COMMON
    | hf_names.mamba("mamba")
    | {
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_gate_up_exps": "block_sparse_moe.input_linear",
        "ffn_down_exps": "block_sparse_moe.output_linear",
        "ffn_gate_up_shexp": "shared_mlp.input_linear",
        "ffn_down_shexp": "shared_mlp.output_linear",
    }
)


def record(m: Header) -> Graph:
    heads, experts = m.heads_by_layer(), m.experts()
    n_ff = 0 if experts else m.mlp_width()
    m.meta.find("expert_shared_feed_forward_length")  # without experts, the MLP's width
    net = None if all(heads) else Mamba.read(m.meta)
    rope: Rope | None = make_rope(m, next((h.key_dim for h in heads if h), m.config.n_embd), interleaved=True)
    if not m.meta.read("rope.scaling.finetuned", bool, True):
        rope = None
    scale, residual_scale, embedding_scale, logit_divisor = (
        m.meta.read(key, float, 0.0, low=0.0, high=1e6)  # 0 for none
        for key in ("attention.scale", "residual_scale", "embedding_scale", "logit_scale")
    )

    def layer(at: Layer, x: Tensor) -> Tensor:
        y, own_heads = norm(at, "attn_norm", x), heads[at.number]
        if own_heads:
            y = attention(at, y, own_heads, rope, scale=scale or None)
        elif net:
            y = mamba(at, y, net)
        x = add(at, y, x, residual_scale or 1)
        y = norm(at, "ffn_norm", x)
        if experts:
            return mixture(at, y, experts, residual=x, residual_scale=residual_scale or 1)
        return add(at, gated_mlp(at, y, n_ff), x, residual_scale or 1)

    return decoder(m, layer, embedding_scale=embedding_scale or 1, logit_scale=1 / (logit_divisor or 1))
