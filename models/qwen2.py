"""Qwen 2 and 2.5 (arXiv:2407.10671): biases on query, key and value."""

from __future__ import annotations

from localllm.models.blocks import Attention, Block, GatedMLP, Model
from localllm.models.config import ModelConfig
from localllm.models.rope import make_rope
from localllm.models.weights import LayerWeights, Weights


def build(config: ModelConfig, weights: Weights) -> Model:
    rope = make_rope(config, weights, interleaved=False)

    def layer(i: int, w: LayerWeights) -> list[Block]:
        return [Attention.load(config, w, i, rope, qkv_bias=True), GatedMLP.load(config, w)]

    return Model.load(config, weights, layer)
