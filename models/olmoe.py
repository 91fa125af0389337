"""OLMoE (arXiv:2409.02060): Llama's layers with experts, and query and key are normed as whole rows."""

from __future__ import annotations

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.models import hf_names
from localllm.models.blocks import Layer, attention, decoder, mixture, norm
from localllm.models.config import Header
from localllm.models.rope import make_rope

HF_NAMES = hf_names.COMMON | hf_names.HEAD_NORMS | hf_names.EXPERTS


def record(m: Header) -> Graph:
    heads, experts = m.heads(), m.experts(norm_topk_prob=False)
    rope = make_rope(m, heads.key_dim)
    if experts is None:
        raise ModelError("the file has no olmoe.expert_count: is it complete?")

    def layer(at: Layer, x: Tensor) -> Tensor:
        x = attention(at, norm(at, "attn_norm", x), heads, rope, qk_norm="row", residual=x)
        return mixture(at, norm(at, "ffn_norm", x), experts, residual=x)

    return decoder(m, layer)
