"""Llama 1 to 3.x, Mistral, TinyLlama, SmolLM and their kin (arXiv:2302.13971, arXiv:2310.06825), and with experts
Mixtral (arXiv:2401.04088).

Their GGUF files have the rows of query and key reordered, so that rotary pairs lie side by side.
"""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, mixture, norm
from localllm.models.config import Header
from localllm.models.hf_convert import interleave_query_and_key, rotated_part
from localllm.models.rope import make_rope

HF_NAMES = hf_names.COMMON | hf_names.BLOCK_SPARSE_EXPERTS
hf_tensor = interleave_query_and_key


def hf_keys(config: Any) -> dict[str, Any]:
    return {"vocab_size": config.vocab_size} | rotated_part(config)


def record(m: Header) -> Graph:
    heads, experts, windows = m.heads(), m.experts(), m.windows(period=0)
    rope, n_ff = make_rope(m, heads.key_dim, interleaved=True), 0 if experts else m.mlp_width()

    def layer(at: Layer, x: Tensor) -> Tensor:
        x = attention(at, norm(at, "attn_norm", x), heads, rope, window=windows[at.number], residual=x)
        y = norm(at, "ffn_norm", x)
        return mixture(at, y, experts, residual=x) if experts else gated_mlp(at, y, n_ff, residual=x)

    return decoder(m, layer)
