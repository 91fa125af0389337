"""Qwen 3 with a mixture of experts in every layer (arXiv:2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping

from localllm.errors import ModelError
from localllm.kernels.graph import CacheType, Graph, Tensor, Weight
from localllm.models.blocks import attention, decoder, mixture_mlp
from localllm.models.config import Metadata, ModelConfig, read_decoder, read_experts
from localllm.models.rope import make_rope
from localllm.models.weights import Weights


def read(meta: Metadata, tensors: Mapping[str, Weight]) -> ModelConfig:
    return read_decoder(meta, tensors, experts=read_experts)


def record(config: ModelConfig, weights: Weights, cache_type: CacheType) -> Graph:
    rope, experts = make_rope(config, weights, interleaved=False), config.experts
    if experts is None:
        raise ModelError("the file has no qwen3moe.expert_count: is it complete?")

    def layer(g: Graph, w: Weights, x: Tensor) -> Tensor:
        return mixture_mlp(g, w, attention(g, w, x, config, rope, qk_norm=True), config, experts)

    return decoder(config, weights, cache_type, layer)
