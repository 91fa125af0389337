"""SmolLM3: Llama's layers, of which every fourth does not rotate (NoPE, arXiv:2501.18795)."""

from __future__ import annotations

from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names, llama
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.rope import make_rope

HF_NAMES = hf_names.COMMON
hf_keys, hf_tensor = llama.hf_keys, llama.hf_tensor


def record(m: Header) -> Graph:
    heads, n_ff = m.heads(), m.mlp_width()
    rope = make_rope(m, heads.key_dim, interleaved=True)

    def layer(at: Layer, x: Tensor) -> Tensor:
        is_rotated = (at.number + 1) % 4 != 0
        x = attention(at, norm(at, "attn_norm", x), heads, rope if is_rotated else None, residual=x)
        return gated_mlp(at, norm(at, "ffn_norm", x), n_ff, residual=x)

    return decoder(m, layer)
