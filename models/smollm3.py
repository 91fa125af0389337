"""SmolLM3: Llama's layers, of which every fourth does not rotate (NoPE, arXiv:2501.18795)."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, norm
from localllm.models.config import Header
from localllm.models.hf_convert import interleave_query_and_key, rotated_part
from localllm.models.rope import make_rope

HF_NAMES = hf_names.COMMON
hf_tensor = interleave_query_and_key


def hf_keys(config: Any) -> dict[str, Any]:
    return {"vocab_size": config.vocab_size} | rotated_part(config)


def record(m: Header) -> Graph:
    heads, n_ff = m.heads(), m.mlp_width()
    rope = make_rope(m, heads.key_dim, interleaved=True)

    def layer(at: Layer, x: Tensor) -> Tensor:
        is_rotated = (at.number + 1) % 4 != 0
        x = attention(at, norm(at, "attn_norm", x), heads, rope if is_rotated else None, residual=x)
        return gated_mlp(at, norm(at, "ffn_norm", x), n_ff, residual=x)

    return decoder(m, layer)
