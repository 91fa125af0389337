"""Qwen 3, dense (arXiv:2505.09388): each head of query and key is normed before it is rotated."""

from __future__ import annotations

from localllm.models.blocks import Attention, Block, GatedMLP, Model
from localllm.models.config import ModelConfig
from localllm.models.rope import make_rope
from localllm.models.weights import LayerWeights, Weights


def build(config: ModelConfig, weights: Weights) -> Model:
    rope = make_rope(config, weights, interleaved=False)

    def layer(i: int, w: LayerWeights) -> list[Block]:
        return [Attention.load(config, w, i, rope, qk_norm=True), GatedMLP.load(config, w)]

    return Model.load(config, weights, layer)
