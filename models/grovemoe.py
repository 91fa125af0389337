"""GroveMoE (arXiv:2508.07785): Qwen 3's layers with experts, and a smaller expert for each group of experts.

A selected expert's group computes with the same input and the same weight, times a constant. llama.cpp passes
the output of the experts to the groups instead, and uses other weights.
"""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.kernels.operations import ExpertLinears, ExpertOutput, Gated
from localllm.models.blocks import Layer, add, attention, chosen_experts, decoder, norm, route
from localllm.models.config import Header
from localllm.models.hf_convert import Array, head_dim, implied
from localllm.models.rope import make_rope
from localllm.models.weights import RepeatedExperts

HF_MEANT = implied("norm_topk_prob", True)
#: Constants of the model's code: experts per group, and the factor of the groups' outputs.
GROUP_SIZE, GROUP_SCALE = 2, 0.05


def hf_keys(config: Any) -> dict[str, Any]:
    return {
        "expert_chunk_feed_forward_length": head_dim(config),
        "experts_per_group": GROUP_SIZE,
        "expert_group_scale": GROUP_SCALE,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    return {} if name.endswith(".expert_bias") else array  # which the model's code does not use


def record(m: Header) -> Graph:
    heads, experts, rope = m.heads(), m.required_experts(), make_rope(m, m.heads().key_dim)
    n_ff = m.meta.read("expert_chunk_feed_forward_length", int, heads.key_dim, low=1, high=1 << 24)
    size = m.meta.read("experts_per_group", int, low=1, high=experts.n)
    m.meta.check_multiple("expert_count", experts.n, "experts_per_group", size)
    scale = m.meta.read("expert_group_scale", float, low=-1e6, high=1e6)

    def matrices(at: Layer, name: str, n_in: int, n_out: int) -> RepeatedExperts:
        return RepeatedExperts(at.weights.experts(f"ffn_{name}_chexps", experts.n // size, n_in, n_out), size)

    def layer(at: Layer, x: Tensor) -> Tensor:
        d = at.n_embd
        x = attention(at, norm(at, "attn_norm", x), heads, rope, residual=x, qk_norm="head")
        y = norm(at, "ffn_norm", x)
        routing = route(at, y, experts)
        x = chosen_experts(at, y, experts, routing, "silu", x)
        of_groups = tuple(matrices(at, name, d, n_ff) for name in ("gate", "up"))
        gate, up = at.add(ExpertLinears(y, of_groups, routing))
        h = at.add(Gated(gate, up, "silu"))
        return add(at, at.add(ExpertOutput(h, matrices(at, "down", n_ff, d), routing)), x, scale)

    return decoder(m, layer)
