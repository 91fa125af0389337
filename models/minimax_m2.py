"""MiniMax-M2: attention whose query and key are normed as whole rows and rotated in part, and experts."""

from __future__ import annotations

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, attention, decoder, mixture, norm
from localllm.models.config import Header
from localllm.models.rope import make_rope

HF_NAMES = (
    hf_names.COMMON
    | hf_names.HEAD_NORMS
    | {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
        "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
        "ffn_down_exps": "block_sparse_moe.experts.*.w2",
        "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    }
)


def record(m: Header) -> Graph:
    heads, experts = m.heads(), m.experts(gating=2)
    rope = make_rope(m, heads.key_dim)
    if experts is None:
        raise ModelError("the file has no minimax-m2.expert_count: is it complete?")

    def layer(at: Layer, x: Tensor) -> Tensor:
        x = attention(at, norm(at, "attn_norm", x), heads, rope, qk_norm="row", residual=x)
        return mixture(at, norm(at, "ffn_norm", x), experts, residual=x)

    return decoder(m, layer)
