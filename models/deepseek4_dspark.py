"""DeepSeek V4's DSpark drafter: a DSpark drafter (`localllm.models.dflash`) with uncompressed layers of DeepSeek V4.

Each layer has four streams, latent attention with one head of keys, and experts. Tokens of a block see each other in
both directions, and the last tokens of the text in a window.

Source: llama.cpp's ``dflash``, whose converter defines the names of keys and tensors.
"""

from __future__ import annotations

from typing import Any

from localllm.kernels.graph import Graph, KVCache, Tensor
from localllm.kernels.operations import Linear, Outputs, RopeAppend
from localllm.models import deepseek4
from localllm.models.blocks import Layer
from localllm.models.config import Header
from localllm.models.hf_convert import Array

HF_NAMES = deepseek4.HF_NAMES | {"main_proj": "fc", "main_norm": "enc.output_norm"}
HF_NAMES |= {"markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2"}
HF_NAMES |= {"confidence_head.proj": "conf_proj"}


def n_stages(config: Any) -> int:
    """Return the number of layers of the drafter in a checkpoint, whose names start with ``mtp.{i}.``."""
    return 1 + max(int(name.split(".")[1]) for name in config.tensors if name.startswith("mtp."))


def hf_keys(config: Any) -> dict[str, Any]:
    n, keys = n_stages(config), deepseek4.hf_keys(config)
    for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        keys[name] = [config.swiglu_limit] * n
    return keys | {
        "block_count": n,
        "attention.compress_ratios": [0] * n,
        "hash_layer_count": 0,
        "embedding_length_out": None,
        "block_size": config.dspark_block_size,
        "target_layers": [i + 1 for i in config.dspark_target_layer_ids],
        ".tokenizer.ggml.mask_token_id": config.dspark_noise_token_id,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Omit the router's bias for images."""
    return {} if name.endswith(("gate.bias_vl", "gate.tid2eid")) else array


class DSparkLayers:
    """See `localllm.models.dflash.DFlashLayers`."""

    confidence_reads_normed = False

    def __init__(self, m: Header) -> None:
        self.m, self.layers = m, deepseek4.V4Layers(m)

    def declare(self, graph: Graph, first: int) -> list[KVCache]:
        caches = []
        for i in range(self.m.config.n_layers):
            graph.layer = first + i
            caches.append(self.layers.attention.cache(graph))
        return caches

    def append(self, target: Graph, i: int, x: Tensor, cache: KVCache) -> None:
        w, attention = self.m.weights.layer(i), self.layers.attention
        keys = target.add(Linear(x, w.matrix("attn_kv", x.width, attention.a.dim)))
        target.add(RopeAppend(keys, keys, None, cache, attention.of_window, k_norm=attention.key_norm(w)))

    def record(self, graph: Graph, embedding: Tensor, caches: list[KVCache]) -> Tensor:
        m, layers = self.m, self.layers
        x = embedding
        for i, cache in enumerate(caches):
            graph.layer = i
            at = Layer(i, graph, m.weights.layer(i), m.config.n_embd, m.norm_eps, embedding)
            x = layers.record(at, x if i else layers.connections.begin(at, x), cache)
        graph.layer = "output"
        return layers.mix(graph, graph.add(Outputs(x)))
