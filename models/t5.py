"""T5 (arXiv:1910.10683): encoders as embedding models, such as sentence-t5, and encoders with decoders.

Scores are not scaled, and have a learnt bias per distance, which is the only use of positions.

The encoder reads a prompt as another model's encoder reads an image: `PromptEncoder` computes a row per token. The
rows are the first tokens of the decoder's sequence. The graph `Graph.prompt` appends their keys and values for the
cross-attention of all layers, once per prompt. The decoder's own tokens follow.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ModelError, quoted
from localllm.kernels.embedding import FileTable
from localllm.kernels.graph import CacheType, Graph, KVCache, Rows, Tensor, Weight
from localllm.kernels.operations import Attention, Clamp, Embed, Input, Linears, Outputs, RopeAppend, Scale
from localllm.models.blocks import Layer, decoder, gated_mlp, norm, query_key_value
from localllm.models.config import MAX_LAYERS, Header, Heads, ModelMetadata, read_architecture, read_general
from localllm.models.encoders.encoder import EncoderModel, FrameRows, Prepared
from localllm.models.hf_convert import Array
from localllm.models.weights import DistanceBiases, ModelFile, Weights

HF_MEANT = {"dense_act_fn": (), "is_gated_act": (), "num_decoder_layers": (), "scale_decoder_outputs": ()}
#: Names of the decoder's tensors that differ from the encoder's, by the end of Hugging Face's names.
_OF_DECODER = {
    "layer.1.layer_norm.weight": "cross_attn_norm.weight",
    "layer.1.EncDecAttention.relative_attention_bias.weight": "cross_attn_rel_b.weight",
}
_BIAS = "attn_rel_b.weight"


def hf_keys(config: Any) -> dict[str, Any]:
    if getattr(config, "relative_attention_max_distance", 128) != DistanceBiases.reach:
        raise ModelError("config.json has a relative_attention_max_distance other than 128, which GGUF files mean")
    kind = getattr(config, "feed_forward_proj", "relu")
    if kind not in ("relu", "gated-gelu"):
        raise ModelError(
            f"config.json has feed_forward_proj = {quoted(kind)}, but GGUF files mean relu or gated-gelu"
        )
    act = getattr(config, "dense_act_fn", None)
    if act not in (None, "relu", "gelu_new") or ((act == "gelu_new") == (kind == "relu") and act is not None):
        raise ModelError(f"config.json has dense_act_fn = {quoted(act)} with feed_forward_proj = {quoted(kind)}")
    eps = config.layer_norm_epsilon
    keys = {} if "T5EncoderModel" in (getattr(config, "architectures", None) or ()) else _decoder_keys(config)
    return keys | {
        "context_length": getattr(config, "n_positions", None) or 512,
        "attention.relative_buckets_count": config.relative_attention_num_buckets,
        "attention.layer_norm_epsilon": eps,
        "attention.layer_norm_rms_epsilon": eps,
        "attention.head_count_kv": None,
        "rope.freq_base": None,
    }


def _decoder_keys(config: Any) -> dict[str, Any]:
    """Return the keys of the decoder. ``logit_scale`` is written only if the file's tensors do not imply it."""
    scales = getattr(config, "scale_decoder_outputs", None)
    scales = config.peek("tie_word_embeddings") is not False if scales is None else scales
    has_head = "lm_head.weight" in config.tensors
    return {
        "decoder_block_count": getattr(config, "num_decoder_layers", None) or config.num_hidden_layers,
        "decoder_start_token_id": getattr(config, "decoder_start_token_id", None) or 0,
        "logit_scale": (config.hidden_size**-0.5 if scales else 1.0) if scales == has_head else None,
    }


def hf_tensor(name: str, array: Array, config: Any) -> Array | dict[str, Array]:
    """Rename the embedding, which has several names, and tensors whose names in encoder and decoder are the same."""
    if name.endswith("embed_tokens.weight"):
        return {"token_embd.weight": array}
    if name.startswith("decoder.block."):
        for end, ours in _OF_DECODER.items():
            if name.endswith(end):
                return {ours: array}
    elif name.endswith("layer.1.layer_norm.weight"):
        return {"ffn_norm.weight": array}
    return {"ffn_up.weight": array} if name.endswith("wi_1.weight") else array


def _self_attention(
    at: Layer, x: Tensor, heads: Heads, biases: Weight, cache: KVCache | None = None, *, is_encoder: bool
) -> Tensor:
    """Record norm and self-attention. ``cache``: of other layers, if only the current layer reads it."""
    q, k, v, _ = query_key_value(at, norm(at, "attn_norm", x), heads)
    cache = cache or at.graph.kv_cache(heads.n_kv, heads.key_dim, heads.value_dim)
    q = at.add(RopeAppend(q, k, v, cache, None))
    sees: Any = {"causal": False} if is_encoder else {"part": "reply"}
    y = at.add(Attention(q, cache, 1.0, biases=DistanceBiases(biases, is_causal=not is_encoder), **sees))
    return at.linear(y, "attn_o", at.n_embd, residual=x)


def _mlp(at: Layer, x: Tensor, n_ff: int) -> Tensor:
    y = norm(at, "ffn_norm", x)
    if "ffn_gate.weight" in at.weights:
        return gated_mlp(at, y, n_ff, residual=x, activation="gelu")
    y = at.add(Clamp(at.linear(y, "ffn_up", n_ff), 0.0, math.inf))
    return at.linear(y, "ffn_down", at.n_embd, residual=x)


class _Biases:
    """Tables of biases of an encoder's or decoder's layers. A layer without a table uses the first layer's."""

    def __init__(self, meta: ModelMetadata, weights: Weights, prefix: str, n_heads: int) -> None:
        n_buckets = meta.read("attention.relative_buckets_count", int, low=4, high=1 << 12)
        self._shape = n_buckets, n_heads
        self._first = weights.layer(0, prefix).require(_BIAS, *self._shape)

    def of(self, weights: Weights) -> Weight:
        return weights.require(_BIAS, *self._shape) if weights.n_rows(_BIAS) else self._first


def record(m: Header) -> Graph:
    return _record_decoder(m) if m.config.architecture == "t5" else _record_encoder(m)


def _record_encoder(m: Header) -> Graph:
    heads, n_ff = m.heads(), m.mlp_width()
    biases = _Biases(m.meta, m.weights, "enc.", heads.n)

    def layer(at: Layer, x: Tensor) -> Tensor:
        at = replace(at, weights=m.weights.layer(at.number, "enc."))
        return _mlp(at, _self_attention(at, x, heads, biases.of(at.weights), is_encoder=True), n_ff)

    def output_norm(at: Layer, name: str, x: Tensor) -> Tensor:
        return norm(at, f"enc.{name}", x)

    return decoder(m, layer, output_norm=output_norm)


def _record_decoder(m: Header) -> Graph:
    heads, n_ff, d, weights = m.heads(), m.mlp_width(), m.config.n_embd, m.weights
    biases = _Biases(m.meta, weights, "dec.", heads.n)
    n_layers = m.meta.read("decoder_block_count", int, m.config.n_layers, low=1, high=MAX_LAYERS)
    m.meta.read("decoder_start_token_id", int, 0, low=0, high=m.config.n_vocab - 1)
    is_tied = "output.weight" not in weights
    logit_scale = m.meta.read("logit_scale", float, d**-0.5 if is_tied else 1.0, low=1e-6, high=1e6)
    weights.skip("enc.output_norm.weight", *weights.names("enc.blk."))
    prompt = Graph(m.cache_type)
    rows = prompt.add(Embed(weights.require("token_embd.weight", m.config.n_vocab, d), takes_rows=True))

    def cross_attention(at: Layer, x: Tensor) -> Tensor:
        """Record attention to the prompt, and in the other graph its keys and values."""
        nonlocal rows
        kv, w = heads.n_kv * heads.key_dim, at.weights
        cache = at.graph.kv_cache(heads.n_kv, heads.key_dim, heads.value_dim, number=1)
        prompt.layer = at.graph.layer
        matrices = (w.matrix(name, d, kv) for name in ("cross_attn_k", "cross_attn_v"))
        k, v = prompt.add(Linears(rows, tuple(matrices)))
        prompt.add(RopeAppend(k, k, v, cache, None))
        rows = prompt.add(Scale(rows))  # a tensor of the layer, which continues on the next device
        q = at.linear(norm(at, "cross_attn_norm", x), "cross_attn_q", heads.n * heads.key_dim)
        y = at.add(Attention(at.add(RopeAppend(q, None, None, cache, None)), cache, 1.0, part="prompt"))
        return at.linear(y, "cross_attn_o", d, residual=x)

    def layer(at: Layer, x: Tensor) -> Tensor:
        at = replace(at, weights=weights.layer(at.number, "dec."))
        at.weights.skip("cross_attn_rel_b.weight")  # unused in the released code, too
        x = _self_attention(at, x, heads, biases.of(at.weights), is_encoder=False)
        return _mlp(at, cross_attention(at, x), n_ff)

    def output_norm(at: Layer, name: str, x: Tensor) -> Tensor:
        return norm(at, f"dec.{name}", x)

    of_decoder = replace(m, config=replace(m.config, n_layers=n_layers))
    graph = decoder(of_decoder, layer, output_norm=output_norm, logit_scale=logit_scale)
    prompt.caches, prompt.windows, prompt.layer = graph.caches, graph.windows, "output"
    prompt.add(Outputs(rows))
    graph.prompt = prompt
    return graph


class PromptEncoder(EncoderModel):
    """The encoder of a prompt. A frame is the token ids of the prompt, and each token has a row."""

    kind, marker = "text", ""

    def __init__(self, file: ModelFile, cache_type: CacheType) -> None:
        meta, weights = ModelMetadata(file.metadata, read_architecture(file.metadata)), Weights(file)
        m = Header(meta, read_general(meta, file.tensors), weights, 0, cache_type)
        heads, n_ff, d = m.heads(), m.mlp_width(), m.config.n_embd
        biases = _Biases(meta, weights, "enc.", heads.n)
        self.width, self.max_rows, self.further = d, m.config.context_length, []
        self.start_id = meta.read("decoder_start_token_id", int, 0, low=0, high=m.config.n_vocab - 1)
        self._table = FileTable(weights.require("token_embd.weight", m.config.n_vocab, d))
        self.graph = graph = Graph(cache_type)
        x = graph.add(Input(Tensor(Rows.TOKENS, d)))
        cache: KVCache | None = None
        for i in range(m.config.n_layers):
            graph.layer = i
            at = Layer(i, graph, weights.layer(i, "enc."), d, m.norm_eps, x)
            cache = cache or graph.kv_cache(heads.n_kv, heads.key_dim, heads.value_dim)
            x = _mlp(at, _self_attention(at, x, heads, biases.of(at.weights), cache, is_encoder=True), n_ff)
        graph.layer = "output"
        norm(Layer(-1, graph, weights, d, m.norm_eps, x), "enc.output_norm", graph.add(Outputs(x)))

    def prepare(self, source: Any, max_tokens: int | None = None) -> Prepared:
        return Prepared((np.array(source, np.int32),), (len(source),), (0, 0), kind="text")

    def rows(self, frame: NDArray[Any]) -> FrameRows:
        return FrameRows.in_order(self._table.rows(frame.astype(np.int64)))
