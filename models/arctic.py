"""Snowflake Arctic (Snowflake, 2024): an MLP after attention, and experts that read the layer's input in parallel."""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, Tensor
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, mixture, norm
from localllm.models.config import Header
from localllm.models.hf_convert import head_dim, implied, interleave_query_and_key
from localllm.models.rope import make_rope

HF_MEANT = (
    implied("moe_layer_frequency", 1)
    | implied("parallel_attn_mlp_res use_residual", True)
    | implied("enable_expert_tensor_parallelism moe_eval_capacity_factor moe_min_capacity moe_token_dropping")
    | implied("moe_train_capacity_factor quantization")
)
hf_tensor = interleave_query_and_key


def hf_keys(config: Any) -> dict[str, Any]:
    return {"vocab_size": config.vocab_size, "rope.dimension_count": head_dim(config)}


def record(m: Header) -> Graph:
    heads, experts = m.heads(), m.required_experts()
    rope = make_rope(m, heads.key_dim, interleaved=True)

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = attention(at, norm(at, "attn_norm", x), heads, rope, residual=x)
        y = gated_mlp(at, norm(at, "ffn_norm", y), at.n_embd, residual=y)
        return mixture(at, norm(at, "ffn_norm_exps", x), experts, residual=y)

    return decoder(m, layer)
