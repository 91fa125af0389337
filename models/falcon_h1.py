"""Falcon-H1 (arXiv:2507.22448): attention and Mamba 2 in parallel in every layer.

In GGUF files, the configuration's multipliers are already applied to the matrices.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm.errors import ModelError
from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, Mamba, attention, decoder, gated_mlp, mamba, norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array, floats, mamba_keys, mamba_tensor
from localllm.models.rope import make_rope


def hf_keys(config: Any) -> dict[str, Any]:
    if config.mamba_rms_norm and config.mamba_norm_before_gate:
        raise ModelError("config.json has mamba_norm_before_gate = true, but GGUF files of Falcon-H1 mean false")
    return mamba_keys(config) | {"vocab_size": config.vocab_size, "ssm.inner_size": config.mamba_d_ssm}


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    """Apply the configuration's multipliers to the matrices."""
    inner, states = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    parts = [inner, inner, states, states, config.mamba_n_heads]
    factors: dict[str, Any] = {
        "gate_proj.weight": config.mlp_multipliers[0],
        "down_proj.weight": config.mlp_multipliers[1],
        "q_proj.weight": config.attention_in_multiplier,
        "k_proj.weight": config.attention_in_multiplier * config.key_multiplier,
        "v_proj.weight": config.attention_in_multiplier,
        "o_proj.weight": config.attention_out_multiplier,
        "in_proj.weight": config.ssm_in_multiplier * np.repeat(config.ssm_multipliers, parts)[:, None],
        "out_proj.weight": config.ssm_out_multiplier,
        "lm_head.weight": config.lm_head_multiplier,
        "embed_tokens.weight": config.embedding_multiplier,
    }
    factor = next((factor for end, factor in factors.items() if name.endswith(end)), None)
    if factor is None:
        return mamba_tensor(name, array, config)
    changed: Array = (floats(array) * factor).astype(np.float32)
    return changed


def record(m: Header) -> Graph:
    heads, n_ff, net, rope = m.heads(), m.mlp_width(), Mamba.read(m.meta), make_rope(m, m.heads().key_dim)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = norm(at, "attn_norm", x)
        x = attention(at, y, heads, rope, residual=x)
        x = mamba(at, y, net, residual=x)
        return gated_mlp(at, norm(at, "ffn_norm", x), n_ff, residual=x)

    return decoder(m, layer)
