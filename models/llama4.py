"""Llama 4: three of four layers see a chunk of the text and rotate. The fourth sees all positions, does not rotate,
and has queries that grow with the logarithm of their position. The experts' weights multiply the experts' inputs.
"""

from __future__ import annotations

from typing import Any, Literal

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Graph, PositionScale, Tensor
from localllm.models.blocks import Layer, attention, decoder, gated_mlp, mixture, norm
from localllm.models.config import Header
from localllm.models.hf_convert import Array, rotated_part
from localllm.models.rope import make_rope

HF_NAMES = {"feed_forward.experts.gate_up_proj": "ffn_gate_up_exps"}


def hf_keys(config: Any) -> dict[str, Any]:
    n, step, chunk = config.num_hidden_layers, config.interleave_moe_layer_step, config.attention_chunk_size
    interval = config.no_rope_layer_interval
    rotated = config.no_rope_layers or [int((i + 1) % interval != 0) for i in range(n)]
    kinds = config.layer_types or [
        "chunked_attention" if is_rotated and chunk else "full_attention" for is_rotated in rotated
    ]
    is_plain = all(rotated) and "chunked_attention" not in kinds
    usual = [int((i + 1) % 4 != 0) for i in range(n)]
    chunks = ["chunked_attention" if flag and chunk else "full_attention" for flag in usual]
    if not is_plain and (list(map(int, rotated)) != usual or kinds != chunks):
        raise ModelError(
            "in config.json, other layers than every fourth lack rotation or chunks, but GGUF files mean every fourth"
        )
    if (config.moe_layers or []) != [*range(step - 1, n, step)] and config.moe_layers is not None:
        raise ModelError(
            f"config.json has moe_layers = {quoted(config.moe_layers)}, but GGUF files have experts in one of {step} "
            "layers"
        )
    if not is_plain and config.use_qk_norm != (config.num_local_experts != _MAVERICK):
        raise ModelError(f"config.json has use_qk_norm = {config.use_qk_norm}, but GGUF files mean Llama 4's value")
    return rotated_part(config) | {
        "attention.sliding_window": 0 if is_plain else None,
        "vocab_size": config.vocab_size,
        "interleave_moe_layer_step": step,
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "attention.chunk_size": chunk or config.max_position_embeddings,
        "attention.temperature_scale": config.attn_scale if config.attn_temperature_tuning else 0.0,
        "attention.temperature_length": config.floor_scale,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array:
    return array.swapaxes(1, 2) if "experts." in name and array.ndim == 3 else array


#: Constants of Llama 4 Maverick and Scout, which their files do not contain.
CHUNK, TEMPERATURE = 8192, 0.1
#: Number of experts of Maverick, whose queries and keys are not normed.
_MAVERICK = 128


def record(m: Header) -> Graph:
    meta, heads, experts = m.meta, m.heads(), m.experts(norm_topk_prob=False, gating="sigmoid", n_shared=1)
    rope = make_rope(m, heads.key_dim, interleaved=True)
    ffn = m.feed_forward(experts)
    # Small models without chunks, such as MobileLLM-R1, rotate in all layers.
    has_chunks = meta.read("attention.sliding_window", int, 1, low=0, high=1 << 31) > 0
    chunk = meta.read("attention.chunk_size", int, CHUNK, low=1, high=1 << 31)
    rate = meta.read("attention.temperature_scale", float, TEMPERATURE, low=0.0, high=1e3)
    q_scale = PositionScale(rate, meta.read("attention.temperature_length", int, chunk, low=1, high=1 << 31), 1)
    is_normed = not experts or experts.n != _MAVERICK

    def layer(at: Layer, x: Tensor) -> Tensor:
        y = norm(at, "attn_norm", x)
        if has_chunks and (at.number + 1) % 4 == 0:
            x = attention(at, y, heads, None, q_scale=q_scale, residual=x)
        else:
            own_chunk = chunk if has_chunks else None
            qk_norm: Literal["unweighted"] | None = "unweighted" if is_normed else None
            x = attention(at, y, heads, rope, qk_norm=qk_norm, norm_last=True, chunk=own_chunk, residual=x)
        y = norm(at, "ffn_norm", x)
        own_experts = ffn.experts_of(at.number)
        if own_experts:
            return mixture(at, y, own_experts, is_weighted_first=True, residual=x)
        return gated_mlp(at, y, ffn.n_ff, residual=x)

    return decoder(m, layer)
