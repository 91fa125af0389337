"""Hunyuan, dense and with experts (arXiv:2411.02265): Llama's layers, with heads normed behind the rotation."""

from __future__ import annotations

from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, mixture, norm
from localllm.models.config import Header
from localllm.models.rope import make_rope

HF_NAMES = (
    hf_names.COMMON
    | hf_names.EXPERTS
    | {
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
        "ffn_gate_inp": "mlp.gate.wg",
        "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
        "ffn_up_shexp": "mlp.shared_mlp.up_proj",
        "ffn_down_shexp": "mlp.shared_mlp.down_proj",
    }
)


def record(m: Header) -> Graph:
    heads, experts = m.heads(), m.experts()
    rope, n_ff = make_rope(m, heads.key_dim), 0 if experts else m.mlp_width()

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = norm(at, "attn_norm", x)
        x = attention(at, y, heads, rope, qk_norm="head", norm_last=True, residual=x)
        y = norm(at, "ffn_norm", x)
        return mixture(at, y, experts, residual=x) if experts else gated_mlp(at, y, n_ff, residual=x)

    return decoder(m, layer)
