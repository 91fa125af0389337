"""DeepSeek V4: attention to a window and, in the same softmax, to compressed entries of earlier runs of tokens.

Layers without compression see only their window. Layers with 128 tokens per entry see all entries. Layers with 4
tokens per entry, whose runs overlap, see the entries that an indexer selects. The indexer compresses runs to separate
keys. All query heads share one key head. Its rotated keys are also the values, so the output of attention is rotated
back. Streams are connected as in GLM-5.3 (arXiv:2512.24880). In the first layers, the token's id selects the experts.

The block for multi-token prediction reads and returns all streams. Its file contains separate weights for mixing the
streams before the head, so it is not part of the model's file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localllm.errors import ModelError, quoted
from localllm.kernels import graph as g, operations as ops
from localllm.kernels.graph import Graph, Tensor
from localllm.models import hy_v4
from localllm.models.blocks import Layer, decoder, mixture, norm
from localllm.models.config import MAX_HEAD_DIM, Header
from localllm.models.hf_convert import Array, routing_keys
from localllm.models.mtp import record_block
from localllm.models.rope import make_local_rope, make_rope
from localllm.models.weights import Numbers, Reshaped, Weights
from localllm.quant.types import GGMLType

#: Names in released checkpoints.
HF_NAMES = {
    "embed": "token_embd",
    **{f"hc_head_{x}": f"output_hc_{x}" for x in ("fn", "base", "scale")},
    **{f"hc_{half}_{x}": f"hc_{half}_{x}" for half in ("attn", "ffn") for x in ("fn", "base", "scale")},
    "attn.attn_sink": "attn_sinks",
    "attn.wq_a": "attn_q_a",
    "attn.q_norm": "attn_q_a_norm",
    "attn.wq_b": "attn_q_b",
    "attn.wkv": "attn_kv",
    "attn.kv_norm": "attn_kv_a_norm",
    "attn.wo_a": "attn_output_a",
    "attn.wo_b": "attn_output_b",
    "attn.indexer.wq_b": "indexer.attn_q_b",
    "attn.indexer.weights_proj": "indexer.proj",
    "ffn.gate": "ffn_gate_inp",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid",
    "ffn.gate.bias": "exp_probs_b.bias",
}
for theirs, ours in (("attn", "attn"), ("attn.indexer", "indexer")):
    for x, y in (("wkv", "kv"), ("wgate", "gate"), ("norm", "norm"), ("ape", "ape")):
        HF_NAMES[f"{theirs}.compressor.{x}"] = f"{ours}_compressor_{y}"
for x, y in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
    HF_NAMES |= {f"ffn.experts.{x}": f"ffn_{y}_exps", f"ffn.shared_experts.{x}": f"ffn_{y}_shexp"}

#: Tokens per entry in layers with overlapping runs and an indexer, and the maximum number of tokens per entry.
_OVERLAPPING, _MOST = 4, 128

#: Tokens per entry, by transformers' types of layers.
_KINDS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def hf_keys(config: Any) -> dict[str, Any]:
    n = config.num_hidden_layers + config.n_nextn
    whole = config.rope_parameters
    rope, main = whole.get("compress", whole), whole.get("main")
    theta, compress_theta = config.rope_theta, config.compress_rope_theta
    if main is not None:
        theta, compress_theta = main["rope_theta"], rope["rope_theta"]
        if main["rope_type"] != "default" or main.get("partial_rotary_factor") != rope.get("partial_rotary_factor"):
            raise ModelError("config.json scales the rotation of layers without compression, but GGUF files cannot")
    if not config.norm_topk_prob:
        raise ModelError("config.json has norm_topk_prob = false, but GGUF files of DeepSeek V4 mean true")
    names = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
    names |= {f"yarn_{x}": x for x in ("beta_fast", "beta_slow")}
    scaling = {f"rope.scaling.{ours}": rope.get(theirs) for ours, theirs in names.items()}
    kind = rope["rope_type"]
    is_yarn = kind == "yarn"
    if kind not in ("default", "yarn") or (is_yarn and rope.get("attention_factor") not in (None, 1.0)):
        raise ModelError(
            f"config.json has rope_type = {quoted(kind)}: localllm converts yarn with an attention_factor of 1"
        )
    rates = config.get("compress_rates") or {}
    ratios = config.get("compress_ratios") or [rates.get(kind, _KINDS[kind]) for kind in config.layer_types]
    n_rot = config.get("qk_rope_head_dim") or int(config.head_dim * config.partial_rotary_factor)
    written = (config.peek("rope_parameters") or {}).get("main") or {}
    for part in (config.peek("partial_rotary_factor"), written.get("partial_rotary_factor")):
        if part is not None and int(config.head_dim * part) != n_rot:
            raise ModelError(f"config.json has partial_rotary_factor = {part}, but qk_rope_head_dim = {n_rot}")
    return routing_keys(config) | {
        "expert_gating_func": 4,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.sliding_window": config.sliding_window,
        "attention.output_group_count": config.o_groups,
        "attention.output_lora_rank": config.o_lora_rank,
        "attention.compress_ratios": [*ratios, *[0] * (n - len(ratios))],
        "attention.compress_rope_freq_base": compress_theta,
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
        "rope.dimension_count": n_rot,
        "rope.freq_base": theta,
        **(scaling | {"rope.scaling.type": "yarn", "rope.scaling.yarn_attn_factor": None} if is_yarn else {}),
        "hash_layer_count": _n_hashed(config),
        "hyper_connection.count": config.hc_mult,
        "hyper_connection.sinkhorn_iterations": config.hc_sinkhorn_iters,
        "hyper_connection.epsilon": config.hc_eps,
        "swiglu_clamp_exp": [config.swiglu_limit] * n,
        "swiglu_clamp_shexp": [config.swiglu_limit] * n,
        "embedding_length_out": config.hidden_size * config.hc_mult,
    }


def _n_hashed(config: Any) -> int:
    """Return the number of first layers whose experts are selected by the token's id."""
    if kinds := config.get("mlp_layer_types"):
        return sum(layer_type == "hash_moe" for layer_type in kinds)
    return int(config.num_hash_layers)


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Omit the router's bias in layers where the token's id selects the experts."""
    if name.endswith("ffn.gate.bias") and int(name.split("layers.")[1].split(".")[0]) < _n_hashed(config):
        return {}
    return array


@dataclass(frozen=True)
class AttentionConfig:
    """Sizes of the attention of all layers."""

    n: int  # query heads
    dim: int  # values of a head
    n_rot: int  # number of rotated values, at the end of a head
    n_query: int  # width of the low-rank input of queries
    n_groups: int  # groups of heads
    n_group: int  # width of a group's output projection
    window: int
    ratios: tuple[int, ...]  # tokens per entry in each layer; 0 without compression
    n_index: int  # heads of an indexer
    index_dim: int  # values of an indexer's head
    top_k: int  # number of entries that an indexer selects

    @classmethod
    def read(cls, m: Header) -> AttentionConfig:
        meta, n_layers, heads = m.meta, m.config.n_layers, m.heads()
        ratios = meta.find("attention.compress_ratios")
        valid_ratios = (0, *(1 << power for power in range(2, _MOST.bit_length())))
        is_known = isinstance(ratios, list) and all(type(ratio) is int and ratio in valid_ratios for ratio in ratios)
        if not is_known or len(ratios) < n_layers:
            raise ModelError(
                f"{meta.architecture}.attention.compress_ratios must contain {n_layers} values, each 0 or a power of "
                f"two from {_OVERLAPPING} to {_MOST}: the file is broken"
            )
        n_groups = meta.read("attention.output_group_count", int, low=1, high=heads.n)
        meta.check_multiple("attention.head_count", heads.n, "attention.output_group_count", n_groups)
        if heads.n_kv != 1 or heads.key_dim != heads.value_dim:
            name = f"{meta.architecture}.attention"
            raise ModelError(
                f"{name}.head_count_kv is {heads.n_kv}, {name}.key_length {heads.key_dim} and {name}.value_length "
                f"{heads.value_dim}, but keys must have one head and be equal to the values: the file is broken"
            )
        index_dim = meta.read("attention.indexer.key_length", int, low=2, high=MAX_HEAD_DIM)
        return cls(
            heads.n,
            heads.key_dim,
            meta.read("rope.dimension_count", int, low=2, high=min(heads.key_dim, index_dim)),
            meta.read("attention.q_lora_rank", int, low=1, high=1 << 16),
            n_groups,
            meta.read("attention.output_lora_rank", int, low=1, high=1 << 16),
            meta.read("attention.sliding_window", int, low=1, high=1 << 20),
            tuple(ratios[:n_layers]),
            meta.read("attention.indexer.head_count", int, low=1, high=1 << 10),
            index_dim,
            meta.read("attention.indexer.top_k", int, low=1, high=1 << 16),
        )

    @property
    def kept(self) -> int:
        """Number of uncompressed tokens in the caches: enough for the window and for the runs of an entry."""
        runs = (ratio * (2 if ratio == _OVERLAPPING else 1) for ratio in self.ratios)
        return max(self.window, *runs)


def record(m: Header) -> Graph:
    layers = V4Layers(m)
    if m.is_block:
        return record_block(m, layers.record_block, 1.0, m.norm_eps, layers.connections.n, layers.mix)

    def end(at: Layer, name: str, streams: Tensor) -> Tensor:
        return norm(at, name, layers.mix(at.graph, streams))

    return decoder(m, layers.record, change_embedding=layers.connections.begin, output_norm=end)


class V4Layers:
    """Records the layers of a model, of its block for multi-token prediction, or of a DSpark drafter."""

    def __init__(self, m: Header) -> None:
        attention = AttentionConfig.read(m)
        self.m, self.connections = m, hy_v4.Connections.read(m, magnitude=2.0)
        self.experts = replace(m.required_experts(gating="sqrt_softplus"), limits_input=True)
        self.limits = m.gate_limits()
        self.n_hashed = m.meta.read("hash_layer_count", int, low=0, high=1 << 16)
        if m.is_block:  # it has no compression, and the limits of all layers
            self.limits.append(self.limits[-1])
            attention = replace(attention, ratios=(0,) * len(self.limits))
        self.attention = V4Attention(m, attention)

    def record(self, at: Layer, streams: Tensor, cache: g.KVCache | None = None) -> Tensor:
        """Record a layer. ``cache``: see `V4Attention.attend`."""
        x, more = self.connections.before(at, "hc_attn", streams)
        y = self.attention.attend(at, norm(at, "attn_norm", x), cache)
        streams = self.connections.behind(at, y, streams, more)
        x, more = self.connections.before(at, "hc_ffn", streams)
        expert_ids = None
        if at.number < self.n_hashed:
            table = at.weights.require("ffn_gate_tid2eid.weight", self.m.config.n_vocab, self.experts.n_used)
            if table.type is not GGMLType.I32:
                raise ModelError(
                    f"tensor {table.name} is in {table.type.name}, but must be in I32: the file is broken"
                )
            expert_ids = at.add(ops.Embed(Numbers(table, self.experts.n)))
        at.weights.skip("exp_probs_b_vl.bias")  # for images
        limits = self.limits[at.number]
        y = mixture(at, norm(at, "ffn_norm", x), self.experts, limits=limits, expert_ids=expert_ids)
        return self.connections.behind(at, y, streams, more)

    def record_block(self, number: int, graph: Graph, e: Tensor, streams: Tensor) -> Tensor:
        m = self.m
        return self.record(Layer(number, graph, m.weights.layer(number), m.config.n_embd, m.norm_eps, e), streams)

    def mix(self, graph: Graph, streams: Tensor) -> Tensor:
        """Record the sum of the streams that the head's norm reads."""
        at = Layer(-1, graph, self.m.weights, self.m.config.n_embd, self.m.norm_eps, streams)
        (before,) = self.connections.weights(at, "output_hc", streams, 1)
        return at.add(ops.MixStreams(streams, before, self.connections.n))


class V4Attention:
    """Records the attention of layers."""

    def __init__(self, m: Header, a: AttentionConfig) -> None:
        base = m.meta.read("attention.compress_rope_freq_base", float, low=2.0, high=1e15)
        # The model does not use YaRN's magnitude.
        scaled = replace(make_rope(m, a.dim, interleaved=True, theta=base), magnitude=1.0)
        local = replace(make_local_rope(m, a.dim), interleaved=True)

        def rotating(rope: g.Rope, dim: int, position_offset: int = 0) -> g.Rope:
            """Return a rotation of the last values of a head. ``position_offset`` is added to the positions."""
            return replace(rope, first=dim - a.n_rot, position_offset=position_offset)

        self.m, self.a, self.context = m, a, m.context
        ratios, dims = {*a.ratios} - {0}, (a.dim, a.index_dim)
        self.of_entries = {(ratio, dim): rotating(scaled, dim, 1 - ratio) for ratio in ratios for dim in dims}
        self.of_window, self.of_compressed = rotating(local, a.dim), rotating(scaled, a.dim)
        self.of_index = rotating(scaled, a.index_dim)
        ropes = self.of_window, self.of_compressed
        self.back = {rope: replace(rope, frequencies=-rope.frequencies) for rope in ropes}

    def compressed(self, at: Layer, x: Tensor, name: str, dim: int, first_cache: int) -> g.KVCache:
        """Record the compression of the layer's runs, and return the cache of entries.

        ``first_cache`` is the number of the first of its two caches.
        """
        w, ratio = at.weights, self.a.ratios[at.number]
        n = (2 if ratio == _OVERLAPPING else 1) * dim
        rows = at.add(
            ops.Linears(x, tuple(w.matrix(f"{name}_compressor_{suffix}", x.width, n) for suffix in ("kv", "gate")))
        )
        window_cache = at.graph.kv_cache(
            2 * n // dim, dim, values_in_keys=True, window=self.a.kept, is_exact=True, number=first_cache
        )
        both = at.add(ops.SideBySide(rows))
        both = at.add(ops.RopeAppend(both, both, None, window_cache, None))
        entry = at.add(ops.Compress(both, window_cache, w.require(f"{name}_compressor_ape.weight", ratio, n)))
        entries = at.graph.kv_cache(1, dim, values_in_keys=True, stride=ratio, number=first_cache + 1)
        of_head = g.HeadNorm(at.norm_eps, w.vector(f"{name}_compressor_norm", dim))
        at.add(ops.RopeAppend(entry, entry, None, entries, self.of_entries[ratio, dim], k_norm=of_head))
        return entries

    def select(self, at: Layer, x: Tensor, of_query: Tensor) -> Tensor | None:
        """Return the selection of entries of overlapping runs, or None if tokens see all entries."""
        w, a = at.weights, self.a
        if self.context // _OVERLAPPING <= a.top_k:
            w.skip("indexer.attn_q_b.weight", "indexer.proj.weight")
            w.skip(*(f"indexer_compressor_{name}.weight" for name in ("kv", "gate", "ape", "norm")))
            return None
        entries = self.compressed(at, x, "indexer", a.index_dim, 3)
        q = at.add(ops.Linear(of_query, w.matrix("indexer.attn_q_b", a.n_query, a.n_index * a.index_dim)))
        q = at.add(ops.RopeAppend(q, None, None, entries, self.of_index))
        weights = at.add(ops.Scale(at.linear(x, "indexer.proj", a.n_index), (a.n_index * a.index_dim) ** -0.5))
        return at.add(ops.IndexSelect(q, weights, entries, a.top_k))

    def cache(self, graph: Graph) -> g.KVCache:
        """Declare the cache of a layer's tokens."""
        return graph.kv_cache(1, self.a.dim, values_in_keys=True, window=self.a.kept, is_exact=True)

    def key_norm(self, w: Weights) -> g.HeadNorm:
        return g.HeadNorm(self.m.norm_eps, w.vector("attn_kv_a_norm", self.a.dim))

    def attend(self, at: Layer, x: Tensor, cache: g.KVCache | None = None) -> Tensor:
        """Record attention for the normed input of a layer, [T, d].

        ``cache``: declared cache of a drafter's layer, whose tokens of a block see each other in both directions.
        """
        w, a, ratio, width = at.weights, self.a, self.a.ratios[at.number], self.a.n * self.a.dim
        of_query, kv = at.add(
            ops.Linears(x, (w.matrix("attn_q_a", x.width, a.n_query), w.matrix("attn_kv", x.width, a.dim)))
        )
        of_query = norm(at, "attn_q_a_norm", of_query)
        entries = self.compressed(at, x, "attn", a.dim, 1) if ratio else None
        selected = self.select(at, x, of_query) if ratio == _OVERLAPPING else None
        q = at.add(ops.Linear(of_query, w.matrix("attn_q_b", a.n_query, width)))
        has_spans = cache is not None
        cache = self.cache(at.graph) if cache is None else cache
        rope, of_head = self.of_compressed if ratio else self.of_window, g.HeadNorm(at.norm_eps)
        q = at.add(ops.RopeAppend(q, kv, None, cache, rope, of_head, self.key_norm(w)))
        visible: dict[str, Any] = {"selected": selected, "entries": entries, "has_spans": has_spans}
        y = at.add(ops.Attention(q, cache, a.dim**-0.5, a.window, sinks=w.vector("attn_sinks", a.n), **visible))
        y = at.add(ops.RopeAppend(y, None, None, cache, self.back[rope]))
        n_out = a.n_groups * a.n_group
        of_groups = Reshaped(
            w.require("attn_output_a.weight", n_out, width // a.n_groups),
            (a.n_groups, a.n_group, width // a.n_groups),
        )
        return at.linear(at.add(ops.HeadLinear(y, of_groups)), "attn_output_b", at.n_embd)
