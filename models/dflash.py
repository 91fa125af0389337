"""DFlash drafters: a few layers that predict a block of tokens at once.

The target model's step also computes the keys and values of the drafter's layers, from hidden states of the target's
layers. They are stored in the target's cache, next to the target's keys and values. A block is the last token
followed by mask tokens. Tokens of the block see the cache and each other in both directions. The head predicts one
draft token per mask.

Source: transformers' ``muse_glimmer_assistant`` and ``DFlashTokenCandidateGenerator``; llama.cpp's ``dflash``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Graph, HeadNorm, KVCache, Matrix, Rope, Rows, Tensor, Weight
from localllm.kernels.operations import Attention, Embed, Input, Linear, Linears, Outputs, RMSNorm, RopeAppend, Scale
from localllm.models.blocks import Layer, add, gated_mlp, norm
from localllm.models.config import Header, Heads, ModelMetadata
from localllm.models.hf_convert import rotated_part, window_keys
from localllm.models.rope import make_rope
from localllm.models.target import before_outputs, check_target, layer_inputs, read_ends, read_layers, read_token_ids

HF_NAMES = {"fc": "fc", "hidden_norm": "enc.output_norm"}
HF_NAMES |= {"encoder.fc": "fc", "encoder.output_norm_enc": "enc.output_norm"}  # in transformers
HF_MEANT = {"num_target_layers": (), "layer_types": ()}

#: Activation functions by their names in ``hidden_activation``.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu_erf", "gelu_pytorch_tanh": "gelu"}

#: Tokens per block if the file has no key for it.
_BLOCK_SIZE = 16


def hf_keys(config: Any) -> dict[str, Any]:
    inner = getattr(config, "dflash_config", None) or {}

    def setting(name: str, usual: Any = None) -> Any:
        value = getattr(config, name, usual)
        return inner.get(name, value)

    layers, act = setting("target_layer_ids"), setting("hidden_act")
    check_target(config, len(layers))
    has_windows = config.model_type == "muse_glimmer_assistant" or setting("use_sliding_window")
    keys = window_keys(config) if has_windows else {}
    keys |= rotated_part(config) if "partial_rotary_factor" in config.rope_parameters else {}
    return keys | {
        "block_size": setting("block_size", _BLOCK_SIZE),
        "target_layers": [i + 1 for i in layers],  # inputs of the layers after them
        "hidden_activation": None if act == "silu" else act,
        "embedding_scale": setting("input_embedding_scale"),
        "attention.value_scale": setting("attention_value_scale"),
        "attention.causal": setting("is_causal", setting("causal")),
        ".tokenizer.ggml.mask_token_id": setting("mask_token_id"),
    }


def read_block(meta: ModelMetadata, n_vocab: int) -> tuple[int, int]:
    """Return the number of tokens per block, and the id of the mask token."""
    mask = ModelMetadata(meta.values, "tokenizer.ggml").read("mask_token_id", int, low=0, high=n_vocab - 1)
    return meta.read("block_size", int, _BLOCK_SIZE, low=2, high=1 << 12), mask


def record(m: Header) -> Graph:
    """Record a graph from the token ids of a block to the logits of drafts.

    The computation of the drafter's keys and values is recorded in the target model's graph (`Header.target`), whose
    caches store them. Without a target, the graph has separate caches. Without an embedding table, its input is the
    embeddings [T, d]. Without a head, it ends before the head.
    """
    meta, w, d, n_vocab, target = m.meta, m.weights, m.config.n_embd, m.config.n_vocab, m.target
    read_block(meta, n_vocab)
    # In text, all axes are the position. Logit scale and soft-cap do not change which token is the most likely.
    meta.skip("logit_scale", "final_logit_softcapping")
    act = meta.read("hidden_activation", str, "silu")
    if act not in _ACTIVATIONS:
        raise ModelError(f"dflash.hidden_activation is {quoted(act)}, which localllm does not support yet")
    causal = meta.read("attention.causal", bool, False)
    scale = meta.read("attention.scale", float, 0.0, low=0.0, high=1e3) or m.heads().key_dim ** -0.5
    value_scale = meta.read("attention.value_scale", float, 0.0, low=-1e3, high=1e3) or 1.0
    embedding_scale = meta.read("embedding_scale", float, 0.0, low=0.0, high=1e6) or 1.0
    keys = _KeysAndValues(m, m.heads(), make_rope(m, m.heads().key_dim), m.windows(period=0))
    fused = keys.read_fusion()
    table, head = read_ends(w, d, n_vocab, target)
    graph = Graph(m.cache_type, token_ids=read_token_ids(w, n_vocab), caches_of=target)
    if target is None:
        caches = keys.declare(graph, 0)
        graph.layer = "embedding"
    else:
        if not target.watched:  # skipped if the drafter is read a second time
            keys.record(target, *fused)
        caches = list(target.caches.values())[-m.config.n_layers :]
        graph.caches, graph.states, graph.windows = dict(target.caches), dict(target.states), list(target.windows)
    x = embedding = graph.add(Input(Tensor(Rows.TOKENS, d)) if table is None else Embed(table, embedding_scale))

    def normed_behind(at: Layer, name: str, y: Tensor) -> Tensor:
        return norm(at, name, y) if f"{name}.weight" in at.weights else y

    for i, window in enumerate(keys.windows):
        graph.layer = i
        at = Layer(i, graph, w.layer(i), d, m.norm_eps, embedding)
        q, k, v = at.add(Linears(norm(at, "attn_norm", x), keys.matrices(i, "qkv")))
        q = at.add(RopeAppend(q, k, v, caches[i], keys.rope, keys.head_norm(i, "q"), keys.head_norm(i, "k")))
        sinks = at.weights.find("attn_sinks.weight", keys.heads.n)
        y = at.add(Attention(q, caches[i], scale, window, sinks=sinks, has_spans=not causal))
        y = at.linear(y, "attn_output", d)
        y = y if value_scale == 1 else at.add(Scale(y, value_scale))
        x = add(at, normed_behind(at, "post_attention_norm", y), x)
        y = gated_mlp(at, norm(at, "ffn_norm", x), m.mlp_width(), activation=_ACTIVATIONS[act])
        x = add(at, normed_behind(at, "post_ffw_norm", y), x)
        if "layer_output_scale.weight" in at.weights:
            x = at.add(Scale(x, weight=at.weights.require("layer_output_scale.weight", 1)))
    graph.layer = "output"
    x = norm(Layer(-1, graph, w, d, m.norm_eps, embedding), "output_norm", graph.add(Outputs(x)))
    if head is not None:
        graph.add(Linear(x, Matrix(head)))
    return graph


@dataclass(frozen=True)
class _KeysAndValues:
    """Computation of the keys and values of the drafter's layers."""

    m: Header
    heads: Heads
    rope: Rope
    windows: tuple[int | None, ...]  # one per layer

    def matrices(self, i: int, names: str) -> tuple[Matrix, ...]:
        """Return the layer's matrices with the letters in ``names``: q, k or v."""
        heads, w, d = self.heads, self.m.weights.layer(i), self.m.config.n_embd
        widths = {"q": heads.n * heads.key_dim, "k": heads.n_kv * heads.key_dim, "v": heads.n_kv * heads.value_dim}
        return tuple(w.matrix(f"attn_{name}", d, widths[name]) for name in names)

    def head_norm(self, i: int, name: str) -> HeadNorm:
        return HeadNorm(self.m.norm_eps, self.m.weights.layer(i).vector(f"attn_{name}_norm", self.heads.key_dim))

    def declare(self, graph: Graph, first: int) -> list[KVCache]:
        """Declare the layers' caches in a graph, as caches of layer ``first`` and the following layers."""
        caches = []
        for i, window in enumerate(self.windows):
            graph.layer = first + i
            caches.append(graph.kv_cache(self.heads.n_kv, self.heads.key_dim, self.heads.value_dim, window=window))
        return caches

    def read_fusion(self) -> tuple[list[int], Matrix, Weight]:
        """Return the numbers of the layers that are read, and the matrix and norm that fuse them to one row."""
        numbers, d, w = read_layers(self.m.meta), self.m.config.n_embd, self.m.weights
        return numbers, w.matrix("fc", len(numbers) * d, d), w.vector("enc.output_norm", d)

    def record(self, target: Graph, numbers: list[int], fc: Matrix, fc_norm: Weight) -> None:
        """Record the computation in the target model's graph."""
        with before_outputs(target):
            x = layer_inputs(target, numbers, self.m.config.n_embd)
            x = target.add(RMSNorm(target.add(Linear(x, fc)), fc_norm, self.m.norm_eps))
            target.watched.add(x)
            caches = self.declare(target, target.n_layers)
            target.layer = "output"
            for i, cache in enumerate(caches):
                # The operation requires queries, but they are unused here.
                k, v, q = target.add(Linears(x, self.matrices(i, "kvk")))
                target.add(RopeAppend(q, k, v, cache, self.rope, k_norm=self.head_norm(i, "k")))
