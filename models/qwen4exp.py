"""Qwen 3.8 Flash Next, text: Qwen 3.5's layers with experts, and attention to runs of positions that an indexer
selects; several streams instead of norms and one residual stream; and in one layer, embeddings of n-grams.

If the context is not longer than the selected positions, all would be selected, and no indexer is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import Any

import numpy as np

from localllm.errors import ModelError, quoted
from localllm.kernels import graph as g, operations as ops
from localllm.kernels.graph import Graph, Rope, Tensor
from localllm.kernels.operations import Linears, MixStreams, RMSNorm, RopeAppend
from localllm.kernels.operations.recurrent import MAX_CONV
from localllm.models import qwen35
from localllm.models.blocks import DeltaNet, Layer, Select, attention, decoder, delta_net, feed_forward
from localllm.models.config import Header
from localllm.models.hf_convert import Array, floats
from localllm.models.rope import make_rope
from localllm.models.weights import ArrayWeight, Dilated

HF_NAMES = {
    **{
        f"{theirs}.{its}": f"{ours}_{x}"
        for theirs, ours in (
            ("attn_hyper_connection", "hc_attn"),
            ("mlp_hyper_connection", "hc_ffn"),
            ("model.hyper_connection_mixer", "output_hc"),
        )
        for its, x in (
            ("hc_norm", "norm"),
            ("input_mix_weight_down", "down"),
            ("input_mix_weight_up", "up"),
            ("block_inject_weight", "inject"),
        )
    },
    **{f"self_attn.indexer.{x}_layernorm": f"indexer.{x}_norm" for x in "qk"},
    **{f"ple.{x}_proj": f"ple_{x}" for x in ("key", "value")},
    **{f"ple.norm_{x}": f"ple_norm_{x}" for x in ("key", "query", "conv")},
    "ple.conv1d": "ple_conv1d",
    "ngram_embedding": "per_layer_token_embd",
}
HF_MEANT = {"indexer_kv_heads": (1,), "norm_topk_prob": (True,), "number_of_conv_states": ()} | dict.fromkeys(
    ("make_ngram_vocab_size_divisible_by", "split_ngram_parts"), ()
)
#: Name of the table of n-gram embeddings.
_TABLE = "per_layer_token_embd.weight"
#: Maximum number of tokens of an n-gram, and of heads per length.
_MAX_N, _MAX_HEADS = 8, 1 << 8


def hf_keys(config: Any) -> dict[str, Any]:
    ratio = getattr(config, "indexer_compress_ratio", None) or 0
    gate = config.get("output_gate_type") or config.hidden_act
    if gate != "sigmoid":
        raise ModelError(f"config.json has output_gate_type = {quoted(gate)}, but GGUF files mean sigmoid")
    return qwen35.hf_keys(config) | {
        "hyper_connection.count": config.hc_count,
        "hyper_connection.low_rank": config.hc_lowrank,
        "attention.indexer.head_count": getattr(config, "indexer_n_heads", None),
        "attention.indexer.key_length": getattr(config, "indexer_head_dim", None),
        "attention.indexer.top_k": getattr(config, "indexer_budget", None),
        "attention.compress_ratios": [0 if kind == "linear_attention" else ratio for kind in config.layer_types],
        **_ngram_keys(config),
    }


def _ngram_keys(config: Any) -> dict[str, Any]:
    """Return the keys of the layer with n-grams, which transformers derives from the configuration."""
    layers = [number - 1 for number in getattr(config, "ple_layer_ids", None) or ()]
    if not layers:
        return {}
    if len(layers) > 1:
        raise ModelError(f"config.json has n-grams in {len(layers)} layers, but GGUF files only in one")
    n, per_n, end = config.ngram_size, config.heads_per_ngram, config.eos_token_id
    if not 2 <= n <= _MAX_N or not 1 <= per_n <= _MAX_HEADS or not 1 < config.ngram_vocab_size_base < 1 << 32:
        raise ValueError(f"n-grams of {n} tokens, with {per_n} heads of {config.ngram_vocab_size_base} rows")
    primes = (x for x in count(config.ngram_vocab_size_base) if all(x % y for y in range(2, math.isqrt(x) + 1)))
    sizes = [next(primes) for _ in range((n - 1) * per_n)]
    half = max(1, ((1 << 63) - 1) // config.vocab_size // 2)
    factors = [2 * (_split_mix(config.seed + _GAMMA * i) % half) + 1 for i in range(1, n + 1)]
    for name, tensor in config.tensors.items():
        if name.endswith(".layer_multipliers") and not np.allclose(floats(tensor.values()), factors):
            raise ModelError(
                f"config.json has seed = {config.seed}, but the checkpoint contains factors of another one"
            )
    width = getattr(config, "ple_embed_dim", None) or config.hidden_size
    return {
        "ple.layers": layers,
        "ple.ngram_size": n,
        "ple.heads_per_ngram": per_n,
        "ple.conv_kernel": config.ple_conv_kernel_size,
        "ple.eos_token_id": end[0] if isinstance(end, list) else end,
        "ple.image_token_id": getattr(config, "image_token_id", None),
        "ple.layer_multipliers": np.array(factors, np.uint64),
        "ple.head_vocab_sizes": np.array(sizes, np.uint64),
        "ple.head_offsets": np.array([*accumulate(sizes[:-1], initial=0)], np.uint64),
        "embedding_length_per_layer_input": width // len(sizes),
    }


#: Constants of SplitMix64 (Steele et al., 2014).
_GAMMA, _BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1


def _split_mix(x: int) -> int:
    x = x + _GAMMA & _BITS
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _BITS
    return x ^ x >> 31


def hf_tensor(name: str, array: Array, config: Any) -> Array | Mapping[str, Array]:
    if ".ple_embedding." in name:
        return {}  # the keys contain the same numbers
    if name.endswith("index_qk_proj.weight"):
        n = config.indexer_n_heads * config.indexer_head_dim
        return {"indexer.q_proj.weight": array[:n], "indexer.k_proj.weight": array[n:]}
    return array + 1 if ".ple.norm_" in name else qwen35.hf_tensor(name, array, config)


def record(m: Header) -> Graph:
    meta, d = m.meta, m.config.n_embd
    heads, net, ffn = m.heads(), DeltaNet.read(meta), m.feed_forward(m.experts())
    n = meta.read("hyper_connection.count", int, low=2, high=16)
    rank = meta.read("hyper_connection.low_rank", int, low=1, high=1 << 16)
    rope, is_recurrent, ngrams = make_rope(m, heads.key_dim), qwen35.recurrent_layers(m), Ngrams.read(m)
    meta.skip("ple.image_token_id")  # for images
    select = make_indexers(m, rope)
    mean_weights = ArrayWeight("parts of streams", np.full(1, 1 / n, np.float32))
    zeros = ArrayWeight("no bias", np.zeros(n, np.float32))

    def mixed(at: Layer, name: str, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Return a row mixed from all streams, with a gate per value, and the normed streams."""
        normed = at.add(RMSNorm(streams, at.weights.vector(f"{name}_norm", n * d), at.norm_eps, n))
        low = at.add(ops.Activation(at.add(ops.Scale(at.linear(normed, f"{name}_down", rank), 1 / n)), "silu"))
        gated = at.add(ops.Gated(at.linear(low, f"{name}_up", n * d), normed, "sigmoid"))
        return at.add(MixStreams(gated, None, n, offset=1 / n)), normed

    def before(at: Layer, half: str, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of attention or MLP, and each stream's factor on the output."""
        x, normed = mixed(at, f"hc_{half}", streams)
        logits = at.linear(normed, f"hc_{half}_inject", n)
        (weights,) = at.add(ops.HyperWeights(logits, mean_weights, zeros, n, eps=0.0))
        return x, at.add(ops.Scale(weights, 2.0))

    def layer(at: Layer, streams: Tensor) -> Tensor:
        if ngrams is not None and at.number == ngrams.layer:
            streams = ngrams.added(at, streams, n)
        x, weights = before(at, "attn", streams)
        if is_recurrent[at.number]:
            y = delta_net(at, x, net, activation="sigmoid")
        else:
            y = attention(at, x, heads, rope, qk_norm="head", has_gate=True, select=select)
        streams = at.add(MixStreams(y, weights, 1, streams))
        x, weights = before(at, "ffn", streams)
        return at.add(MixStreams(feed_forward(at, x, ffn), weights, 1, streams))

    def begin(at: Layer, x: Tensor) -> Tensor:
        return at.add(ops.SideBySide((x,) * n))

    def end(at: Layer, name: str, streams: Tensor) -> Tensor:
        return mixed(at, "output_hc", streams)[0]

    return decoder(m, layer, change_embedding=begin, output_norm=end)


def make_indexers(m: Header, rope: Rope) -> Select:
    """Return the selection of runs of positions. ``attention.compress_ratios`` is the length of a run in each layer.

    A run's key is the mean of its positions' keys, normed and rotated to the run's first position. Here it is rotated
    to the last position, and a position offset of the queries compensates for this.
    """
    meta, names = m.meta, ("q_proj", "k_proj", "q_norm", "k_norm")
    runs = meta.read_each("attention.compress_ratios", m.config.n_layers, int, 0, low=0, high=MAX_CONV)
    if not any(runs):
        n_heads, dim, k = 0, 0, 0
        meta.skip(*(f"attention.indexer.{name}" for name in ("head_count", "key_length", "top_k")))
    else:
        n_heads = meta.read("attention.indexer.head_count", int, low=1, high=1 << 10)
        dim = meta.read("attention.indexer.key_length", int, low=2, high=256)
        k = meta.read("attention.indexer.top_k", int, low=1, high=1 << 16)
    means = {run: ArrayWeight("mean", np.full((dim, run), 1 / run, np.float32)) for run in {*runs} if run > 1}

    def select(at: Layer, x: Tensor) -> tuple[Tensor, bool] | None:
        w, run = at.weights, runs[at.number]
        if not run or m.context <= k:
            w.skip(*(f"indexer.{name}.weight" for name in names))
            return None
        q, key = at.add(
            Linears(x, (w.matrix("indexer.q_proj", x.width, n_heads * dim), w.matrix("indexer.k_proj", x.width, dim)))
        )
        if run > 1:
            key = at.add(ops.CausalConv(key, means[run], at.graph.state("index", run - 1, dim)))
        q_norm, k_norm = (g.HeadNorm(at.norm_eps, w.vector(f"indexer.{name}", dim)) for name in names[2:])
        cache = at.graph.kv_cache(1, dim, values_in_keys=True, is_index=True, is_exact=True)
        q = at.add(RopeAppend(q, None, None, cache, replace(rope, position_offset=run - 1), q_norm))
        at.add(RopeAppend(at.add(ops.SideBySide((key,))), key, None, cache, rope, None, k_norm))
        return at.add(ops.IndexSelect(q, None, cache, k, run)), False

    return select


@dataclass(frozen=True)
class Ngrams:
    """Embeddings of n-grams. A layer adds them to its streams, with a gate per stream and a convolution."""

    layer: int
    table: g.Weight  # [., d / heads]
    kernel: int  # size of the convolution's kernel; its dilation is the length of the longest n-gram
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    end: int

    @classmethod
    def read(cls, m: Header) -> Ngrams | None:
        """Read llama.cpp's keys. Return None if the file has no n-grams."""
        meta = m.meta

        def numbers(key: str, length: int) -> tuple[int, ...]:
            values = meta.find(f"ple.{key}")
            if not isinstance(values, list) or len(values) != length or any(type(x) is not int for x in values):
                raise ModelError(f"{meta.architecture}.ple.{key} must be {length} integers: the file is broken")
            return tuple(values)

        if meta.find("ple.layers") is None:
            return None
        (layer,) = numbers("layers", 1)
        n = meta.read("ple.ngram_size", int, low=2, high=_MAX_N)
        n_heads = (n - 1) * meta.read("ple.heads_per_ngram", int, low=1, high=_MAX_HEADS)
        kernel = meta.read("ple.conv_kernel", int, low=2, high=8)
        end = meta.read("ple.eos_token_id", int, low=0, high=m.config.n_vocab - 1)
        width = meta.read("embedding_length_per_layer_input", int, low=1, high=1 << 16)
        table = m.weights.require(_TABLE, m.weights.n_rows(_TABLE), width)
        sizes, offsets = numbers("head_vocab_sizes", n_heads), numbers("head_offsets", n_heads)
        return cls(layer, table, kernel, numbers("layer_multipliers", n), sizes, offsets, end)

    def added(self, at: Layer, streams: Tensor, n: int) -> Tensor:
        """Return the n streams with the n-gram embeddings added."""
        w, d, reach = at.weights, at.n_embd, len(self.multipliers)
        state = at.graph.state("ids", reach - 1, is_on_host=True)
        x = at.add(ops.NgramEmbed(self.table, state, self.multipliers, self.sizes, self.offsets, self.end))
        key, value = at.add(Linears(x, (w.matrix("ple_key", x.width, n * d), w.matrix("ple_value", x.width, d))))
        key, query = (
            at.add(RMSNorm(y, w.vector(f"ple_norm_{name}", n * d), at.norm_eps, n))
            for y, name in ((key, "key"), (streams, "query"))
        )
        values = at.add(MixStreams(value, at.add(ops.StreamGate(key, query, n)), 1))
        normed = at.add(RMSNorm(values, w.vector("ple_norm_conv", n * d), at.norm_eps, n))
        weight = Dilated(w.require("ple_conv1d.weight", n * d, self.kernel), reach)
        state = at.graph.state("ple", weight.shape[1] - 1, n * d)
        convolved = at.add(ops.CausalConv(normed, weight, state, silu=True))
        return at.add(ops.Add(convolved, at.add(ops.Add(values, streams))))
