"""Phi-3.5-MoE and Phi-mini-MoE (arXiv:2404.14219): LongRoPE, LayerNorm, and experts that SparseMixer weighs.

localllm follows the code of the released models. llama.cpp computes RMSNorm instead of LayerNorm, and divides the
weights of the two experts by their sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.models import phi3
from localllm.models.blocks import Layer, attention, decoder, layer_norm, mixture
from localllm.models.config import Header
from localllm.models.rope import make_rope


def hf_keys(config: Any) -> dict[str, Any]:
    """Return Phi-3's keys. The magnitude of the rotation is a setting, which must be the same in all contexts."""
    rope = config.rope_parameters
    short, long = (rope.get(f"{name}_mscale", None) for name in ("short", "long"))
    noise = getattr(config, "router_jitter_noise", 0.01)
    if short != long or noise != 0.01:
        raise ModelError(
            f"config.json has short_mscale = {short}, long_mscale = {long} and router_jitter_noise = {noise}, but "
            "GGUF files need two equal values, and mean a noise of 0.01"
        )
    is_long = rope.peek("rope_type") == "longrope"
    magnitude = {"rope.scaling.attn_factor": float(short)} if is_long and short else {}
    return phi3.hf_keys(config) | {"rope.scaling.factor": None} | magnitude


def record(m: Header) -> Graph:
    heads = m.heads()
    scaling = "longrope" if "rope_factors_long.weight" in m.weights else None
    rope, windows = make_rope(m, heads.key_dim, scaling=scaling), m.windows(period=0)
    experts = replace(m.required_experts(norm_topk_prob=False), gating="sparsemixer")

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = layer_norm(at, "attn_norm", x)
        x = attention(at, y, heads, rope, residual=x, window=windows[at.number])
        return mixture(at, layer_norm(at, "ffn_norm", x), experts, residual=x)

    return decoder(m, layer, output_norm=layer_norm)
