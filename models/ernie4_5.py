"""ERNIE 4.5, dense and with experts, which come behind some dense layers and may be in every other layer only."""

from __future__ import annotations

from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, mixture, norm
from localllm.models.config import Header
from localllm.models.rope import make_rope

HF_NAMES = (
    hf_names.COMMON
    | hf_names.EXPERTS
    | hf_names.SHARED_EXPERTS
    | {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}
)


def record(m: Header) -> Graph:
    heads, n_ff, experts = m.heads(), m.mlp_width(), m.experts()
    rope = make_rope(m, heads.key_dim, interleaved=True)
    step = m.meta.read("interleave_moe_layer_step", int, 1, low=1, high=1 << 16)

    def layer(at: Layer, x: Tensor) -> Tensor:
        x = attention(at, norm(at, "attn_norm", x), heads, rope, residual=x)
        y = norm(at, "ffn_norm", x)
        if experts and at.number >= m.n_dense and (at.number + 1) % step == 0:
            return mixture(at, y, experts, residual=x)
        return gated_mlp(at, y, n_ff, residual=x)

    return decoder(m, layer)
