"""Qwen 3 with a mixture of experts in every layer (arXiv:2505.09388)."""

from __future__ import annotations

from localllm.models.blocks import Attention, Block, MixtureMLP, Model
from localllm.models.config import ModelConfig
from localllm.models.rope import make_rope
from localllm.models.weights import LayerWeights, Weights


def build(config: ModelConfig, weights: Weights) -> Model:
    rope = make_rope(config, weights, interleaved=False)

    def layer(i: int, w: LayerWeights) -> list[Block]:
        return [Attention.load(config, w, i, rope, qk_norm=True), MixtureMLP.load(config, w)]

    return Model.load(config, weights, layer)
