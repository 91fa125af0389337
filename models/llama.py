"""Llama 1 to 3.x, Mistral, TinyLlama, SmolLM and their kin (arXiv:2302.13971, arXiv:2310.06825), and with experts
Mixtral (arXiv:2401.04088).

Their GGUF files have the rows of query and key reordered, so that rotary pairs lie side by side.
"""

from __future__ import annotations

from localllm.models.blocks import Attention, Block, GatedMLP, MixtureMLP, Model
from localllm.models.config import ModelConfig
from localllm.models.rope import make_rope
from localllm.models.weights import LayerWeights, Weights


def build(config: ModelConfig, weights: Weights) -> Model:
    rope = make_rope(config, weights, interleaved=True)
    mlp = GatedMLP if config.experts is None else MixtureMLP

    def layer(i: int, w: LayerWeights) -> list[Block]:
        return [Attention.load(config, w, i, rope), mlp.load(config, w)]

    return Model.load(config, weights, layer)
