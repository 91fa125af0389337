"""Llama 1 to 3.x, Mistral, TinyLlama, SmolLM and their kin (arXiv:2302.13971, arXiv:2310.06825), and with experts
Mixtral (arXiv:2401.04088).

Their GGUF files have the rows of query and key reordered, so that rotary pairs lie side by side.
"""

from __future__ import annotations

from collections.abc import Mapping

from localllm.kernels.graph import CacheType, Graph, Tensor, Weight
from localllm.models.blocks import attention, decoder, gated_mlp, mixture_mlp
from localllm.models.config import Metadata, ModelConfig, read_decoder, read_experts
from localllm.models.rope import make_rope
from localllm.models.weights import Weights


def read(meta: Metadata, tensors: Mapping[str, Weight]) -> ModelConfig:
    return read_decoder(meta, tensors, experts=read_experts)


def record(config: ModelConfig, weights: Weights, cache_type: CacheType) -> Graph:
    rope, experts = make_rope(config, weights, interleaved=True), config.experts

    def layer(g: Graph, w: Weights, x: Tensor) -> Tensor:
        x = attention(g, w, x, config, rope)
        return gated_mlp(g, w, x, config) if experts is None else mixture_mlp(g, w, x, config, experts)

    return decoder(config, weights, cache_type, layer)
