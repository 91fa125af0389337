"""Jamba (arXiv:2403.19887): Mamba's layers, some with attention without positions instead of Mamba. Each is followed
by an MLP or experts."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models import mamba
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, mixture, norm
from localllm.models.config import Header

HF_MEANT = {"expert_layer_offset": (), "expert_layer_period": ()}
hf_tensor = mamba.hf_tensor


def hf_keys(config: Any) -> dict[str, Any]:
    period, offset, n = config.attn_layer_period, config.attn_layer_offset, config.num_key_value_heads
    return {
        "rope.freq_base": None,
        "attention.key_length": None,
        "attention.value_length": None,
        "attention.head_count_kv": [n if i % period == offset else 0 for i in range(config.num_hidden_layers)],
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.time_step_rank": config.mamba_dt_rank,
    }


def record(m: Header) -> Graph:
    channels, heads, experts = mamba.Channels.read(m), m.heads_by_layer(), m.experts(norm_topk_prob=False)
    n_ff = m.mlp_width()

    def layer(at: Layer, x: Tensor) -> Tensor:
        layer_heads, y = heads[at.number], norm(at, "attn_norm", x)
        x = mamba.scan(at, y, channels, x) if layer_heads is None else attention(at, y, layer_heads, None, residual=x)
        y = norm(at, "ffn_norm", x)
        if experts is not None and at.weights.n_rows("ffn_gate_inp.weight"):
            return mixture(at, y, experts, residual=x)
        return gated_mlp(at, y, n_ff, residual=x)

    return decoder(m, layer)
