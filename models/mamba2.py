"""Mamba 2 (arXiv:2405.21060): layers without attention and MLP."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, Mamba, decoder, mamba, norm
from localllm.models.config import Header
from localllm.models.hf_convert import mamba_tensor
from localllm.models.mamba import plain_keys

HF_MEANT = {"time_step_rank": ()}
hf_tensor = mamba_tensor


def hf_keys(config: Any) -> dict[str, Any]:
    return plain_keys(config) | {
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "ssm.group_count": config.n_groups,
        "ssm.time_step_rank": config.num_heads,
        "ssm.inner_size": config.num_heads * config.head_dim,
    }


def record(m: Header) -> Graph:
    net = Mamba.read(m.meta)
    m.meta.skip("attention.head_count")  # 0

    def layer(at: Layer, x: Tensor) -> Tensor:
        return mamba(at, norm(at, "attn_norm", x), net, residual=x)

    return decoder(m, layer)
