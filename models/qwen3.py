"""Qwen 3, dense (arXiv:2505.09388): each head of query and key is normed before it is rotated."""

from __future__ import annotations

from localllm.kernels.graph import CacheType, Graph, Tensor
from localllm.models.blocks import attention, decoder, gated_mlp
from localllm.models.config import ModelConfig
from localllm.models.config import read_decoder as read
from localllm.models.rope import make_rope
from localllm.models.weights import Weights

__all__ = ["read", "record"]


def record(config: ModelConfig, weights: Weights, cache_type: CacheType) -> Graph:
    rope = make_rope(config, weights, interleaved=False)

    def layer(g: Graph, w: Weights, x: Tensor) -> Tensor:
        return gated_mlp(g, w, attention(g, w, x, config, rope, qk_norm=True), config)

    return decoder(config, weights, cache_type, layer)
