"""GLM-4 (0414) and GLM-Z1: norms before and behind both halves of a layer, and a rotation of half of each head."""

from __future__ import annotations

from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, add, attention, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.hf_convert import rotated_part
from localllm.models.rope import make_rope, with_axes

HF_NAMES = hf_names.COMMON | {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}
hf_keys = rotated_part


def record(m: Header) -> Graph:
    heads, n_ff = m.heads(), m.mlp_width()
    # Those that see images rotate by several axes, which agree for text, and their rows are reordered for it.
    has_axes = any(m.meta.find("rope.dimension_sections") or ())
    rope = with_axes(m, make_rope(m, heads.key_dim, interleaved=not has_axes), in_turn=False)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = attention(at, norm(at, "attn_norm", x), heads, rope)
        x = add(at, norm(at, "post_attention_norm", y), x)
        y = gated_mlp(at, norm(at, "ffn_norm", x), n_ff)
        return add(at, norm(at, "post_ffw_norm", y), x)

    return decoder(m, layer)
