"""DFlash and DSpark drafters: a few layers that predict a block of tokens at once.

The target model's step also computes the keys and values of the drafter's layers, from hidden states of the target's
layers. They are stored in the target's cache, next to the target's keys and values. A block is the last token
followed by mask tokens. Tokens of the block see the cache and each other in both directions. The head predicts one
draft token per mask.

DSpark adds a bias to the logits of each draft, from a product of two small matrices that depends on the token before
it. A confidence head estimates how likely each draft is right. The last token's row also predicts a draft.

DFlash 2 adds convolutions along the block, before and after attention and the MLP. Each draft is chosen from the
most likely candidates. Their scores include a product of the hidden state with embeddings of the candidate and of the
token before it.

Source: transformers' ``muse_glimmer_assistant`` and ``DFlashTokenCandidateGenerator``; llama.cpp's ``dflash``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Graph, HeadNorm, KVCache, Matrix, Rows, Tensor, Weight
from localllm.kernels.operations import (
    Attention,
    BlockConv,
    Embed,
    Input,
    Linear,
    Linears,
    Outputs,
    RMSNorm,
    RopeAppend,
    Scale,
    Softcap,
)
from localllm.kernels.operations.recurrent import MAX_CONV
from localllm.models import deepseek4_dspark, eagle3
from localllm.models.blocks import Layer, add, gated_mlp, norm, read_softcap
from localllm.models.config import Header, ModelMetadata
from localllm.models.hf_convert import Array, rotated_part, window_keys
from localllm.models.rope import make_rope
from localllm.models.target import before_outputs, check_target, layer_inputs, read_ends, read_layers, read_token_ids
from localllm.models.weights import Reshaped, Weights

HF_NAMES = {"fc": "fc", "hidden_norm": "enc.output_norm"}
HF_NAMES |= {"encoder.fc": "fc", "encoder.output_norm_enc": "enc.output_norm"}  # in transformers
HF_NAMES |= {"markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2"}
HF_NAMES |= {"confidence_head.proj": "conf_proj"}
HF_NAMES |= {f"candidate_selector.{x}_codebook": f"selector_{x}" for x in ("predecessor", "successor")}
HF_NAMES |= {"candidate_selector.hidden_projection": "selector_hidden"}
for theirs, ours in (("attention", "attn"), ("mlp", "ffn")):
    HF_NAMES |= {f"{theirs}_conv.base_kernel": f"{ours}_conv_base"}
    HF_NAMES |= {f"{theirs}_conv.kernel_projection": f"{ours}_conv_proj"}
HF_MEANT: dict[str, tuple[Any, ...]] = dict.fromkeys(("num_target_layers", "layer_types"), ())
# of DSpark; the tensors show these
_NAMES = "draft_vocab_size enable_confidence_head has_embed_tokens markov_rank projector_type target_hidden_size"
HF_MEANT |= dict.fromkeys((*_NAMES.split(), *(f"speculators_{x}" for x in ("config", "model_type", "version"))), ())
HF_MEANT["confidence_head_with_markov"] = (True,)

#: Activation functions by their names in ``hidden_activation``.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu_erf", "gelu_pytorch_tanh": "gelu"}

#: Tokens per block if the file has no key for it.
_BLOCK_SIZE = 16


def hf_keys(config: Any) -> dict[str, Any]:
    inner = getattr(config, "dflash_config", None) or {}

    def setting(name: str, usual: Any = None) -> Any:
        value = getattr(config, name, usual)
        return inner.get(name, value)

    layers, act, numbers = setting("target_layer_ids"), setting("hidden_act"), setting("aux_hidden_state_layer_ids")
    layers = [i - 1 for i in numbers] if layers is None else layers
    check_target(config, len(layers))
    has_windows = config.model_type == "muse_glimmer_assistant" or setting("use_sliding_window")
    keys = window_keys(config) if has_windows else {}
    if setting("use_swa"):
        keys = {"attention.sliding_window": setting("swa_window_size") or config.sliding_window}
        keys["attention.sliding_window_pattern"] = [True] * config.num_hidden_layers
    if _is_dspark(config):
        if (kind := setting("markov_head_type", "vanilla")) != "vanilla":
            raise ModelError(f"config.json has markov_head_type = {quoted(kind)}, but GGUF files mean vanilla")
        # Exports of the speculators library have this setting in another place, and predict no draft from the anchor.
        from_last = setting("sample_from_anchor", numbers is None and not config.has_section)
        names = {name.rpartition("confidence_head")[1] for name in config.tensors}
        keys |= {"sample_from_anchor": bool(from_last), "has_confidence_head": "confidence_head" in names}
    keys |= rotated_part(config) if "partial_rotary_factor" in config.rope_parameters else {}
    if "conv_kernel_size" in inner:
        of_dflash2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        keys |= {name: inner[name] for name in of_dflash2}
    return keys | {
        "block_size": setting("block_size", _BLOCK_SIZE),
        "logit_scale": setting("output_multiplier"),
        "final_logit_softcapping": setting("final_logit_softcapping") or None,
        "target_layers": [i + 1 for i in layers],  # inputs of the layers after them
        "hidden_activation": None if act == "silu" else act,
        "embedding_scale": setting("input_embedding_scale"),
        "attention.value_scale": setting("attention_value_scale"),
        "attention.causal": setting("is_causal", setting("causal")),
        ".tokenizer.ggml.mask_token_id": setting("mask_token_id"),
    }


def _is_dspark(config: Any) -> bool:
    return any("markov_head." in name for name in config.tensors)


def hf_tensor(name: str, array: Array, config: Any) -> Array | Mapping[str, Array]:
    """Omit the tensors that the drafter shares with its target model, and reorder rotated pairs of values."""
    has_all = config.get("draft_vocab_size") in (None, config.get("vocab_size"))
    is_needless = (
        (name.endswith("embed_tokens.weight") and config.get("has_embed_tokens") is False)
        or (name.endswith("lm_head.weight") and _is_dspark(config) and has_all)
        or name in ("d2t", "t2d")  # `hf_extra` computes the file's d2t. t2d is the inverse mapping.
    )
    if is_needless:
        return {}
    if config.get("rope_is_neox_style") is False and re.search(r"self_attn\.[qk]_(proj|norm)\.weight$", name):
        pairs = array.reshape(-1, config.head_dim // 2, 2, *array.shape[1:])
        return np.swapaxes(pairs, 1, 2).reshape(array.shape)
    return array


hf_extra = eagle3.hf_extra


@dataclass(frozen=True)
class DraftBlock:
    """How a drafter predicts a block."""

    size: int  # tokens per block
    mask: int  # id of the mask token
    from_last: bool = False  # whether the last token's row predicts a draft, in addition to the rows of masks
    has_bias: bool = False  # whether the token before a draft changes its logits (DSpark)
    confidence: Matrix | None = None  # [1, d + width of the bias' input]: hidden state and embedding to a logit
    n_candidates: int = 0  # candidates for each draft (DFlash 2); 0: drafts are the most likely tokens

    @property
    def n_drafts(self) -> int:
        return self.size if self.from_last else self.size - 1

    @classmethod
    def read(cls, meta: ModelMetadata, weights: Weights, n_vocab: int) -> DraftBlock:
        mask = ModelMetadata(meta.values, "tokenizer.ggml").read("mask_token_id", int, low=0, high=n_vocab - 1)
        size, confidence = meta.read("block_size", int, _BLOCK_SIZE, low=2, high=1 << 12), None
        has_bias = "markov_w1.weight" in weights
        from_last = meta.read("sample_from_anchor", bool, True) and has_bias
        meta.skip("has_confidence_head")  # the tensors show it
        if has_bias and "conf_proj.weight" in weights:
            d = meta.read("embedding_length", int, low=1, high=1 << 20)
            confidence = weights.row("conf_proj", d + weights.shape("markov_w1.weight")[-1])
        has_candidates = "selector_hidden.weight" in weights
        n_candidates = meta.read("selector_top_k", int, low=1, high=1 << 10) if has_candidates else 0
        return cls(size, mask, from_last, has_bias, confidence, n_candidates)


def record(m: Header) -> Graph:
    """Record a graph from the token ids of a block to the logits of drafts.

    The computation of the drafter's keys and values is recorded in the target model's graph (`Header.target`), whose
    caches store them. Without a target, the graph has separate caches. Without an embedding table, its input is the
    embeddings [T, d]. Without a head, it ends before the head.
    """
    meta, w, d, n_vocab, target = m.meta, m.weights, m.config.n_embd, m.config.n_vocab, m.target
    block = DraftBlock.read(meta, w, n_vocab)
    logit_scale = meta.read("logit_scale", float, 0.0, low=-1e6, high=1e6) or 1.0
    softcap = read_softcap(m, "final_logit_softcapping")
    layers: DFlashLayers | deepseek4_dspark.DSparkLayers
    if meta.find("hyper_connection.count") is not None:
        layers = deepseek4_dspark.DSparkLayers(m)
    else:
        layers = DFlashLayers(m, _read_convolutions(meta) if block.n_candidates else None)
    fused = _read_fusion(m)
    table, head = read_ends(w, d, n_vocab, target)
    embedding_scale = meta.read("embedding_scale", float, 0.0, low=0.0, high=1e6) or 1.0
    graph = Graph(m.cache_type, token_ids=read_token_ids(w, n_vocab), caches_of=target)
    if target is None:
        caches = layers.declare(graph, 0)
        graph.layer = "embedding"
    else:
        if not target.watched:  # skipped if the drafter is read a second time
            _record_keys(m, layers, target, *fused)
        caches = list(target.caches.values())[-m.config.n_layers :]
        graph.caches, graph.states, graph.windows = dict(target.caches), dict(target.states), list(target.windows)
    x = graph.add(Input(Tensor(Rows.TOKENS, d)) if table is None else Embed(table, embedding_scale))
    before_norm = layers.record(graph, x, caches)
    x = norm(Layer(-1, graph, w, d, m.norm_eps, x), "output_norm", before_norm)
    if block.n_candidates:
        rank = meta.read("selector_rank", int, low=1, high=1 << 16)
        graph.watched.add(graph.add(Linear(x, w.matrix("selector_hidden", d, rank))))
        graph.token_graph = _record_candidates(m, graph, rank)
    elif block.confidence is not None:
        graph.watched.add(x if layers.confidence_reads_normed else before_norm)
    if head is not None:
        logits = graph.add(Linear(x, Matrix(head)))
        if block.n_candidates:  # without candidates, llama.cpp ignores both
            logits = logits if logit_scale == 1 else graph.add(Scale(logits, logit_scale))
            if softcap is not None:
                graph.add(Softcap(logits, softcap))
    if block.has_bias:
        graph.token_graph = _record_bias(m, graph)
    return graph


class _Convolutions:
    """Convolutions along the block, before and after attention or the MLP of a layer of DFlash 2.

    ``sizes``: values of a kernel, and columns with the same factors; None for a drafter without convolutions.
    """

    def __init__(self, at: Layer, name: str, x: Tensor, sizes: tuple[int, int] | None) -> None:
        self.at, self.x, self.is_used = at, x, sizes is not None
        if sizes is not None:
            kernel, group = sizes
            self.factors = at.linear(x, f"{name}_conv_proj", 2 * kernel * (x.width // group))
            base = at.weights.require(f"{name}_conv_base", 2, kernel, x.width)
            self.base = Reshaped(base, (2 * kernel, x.width))

    def before(self) -> Tensor:
        return self._convolved(self.x, 0)

    def behind(self, y: Tensor) -> Tensor:
        return self._convolved(y, 1)

    def _convolved(self, x: Tensor, side: int) -> Tensor:
        return self.at.add(BlockConv(x, self.factors, self.base, side)) if self.is_used else x


def _read_convolutions(meta: ModelMetadata) -> tuple[int, int]:
    """Return the number of values of a kernel, and the number of neighbouring columns with the same factors."""
    kernel = meta.read("conv_kernel_size", int, low=1, high=MAX_CONV)
    group = meta.read("conv_group_size", int, low=16, high=1 << 16)
    meta.check_multiple("embedding_length", meta.read("embedding_length", int), "conv_group_size", group)
    if group % 16:
        raise ModelError(f"dflash.conv_group_size is {group}: localllm supports multiples of 16")
    return kernel, group


def _record_candidates(m: Header, graph: Graph, rank: int) -> Graph:
    """Record the embeddings of a token before a draft, and of a candidate."""
    tokens = graph.empty()
    tokens.layer = "output"
    names = ("selector_predecessor.weight", "selector_successor.weight")
    tokens.watched = {tokens.add(Embed(m.weights.require(name, m.config.n_vocab, rank))) for name in names}
    return tokens


def _record_bias(m: Header, graph: Graph) -> Graph:
    """Record the bias of a draft's logits, from the token before it: an embedding and a product."""
    rank = m.weights.shape("markov_w1.weight")[-1]
    n_columns = m.config.n_vocab if graph.token_ids is None else len(graph.token_ids)
    bias = graph.empty()
    bias.layer = "output"
    x = bias.add(Embed(m.weights.require("markov_w1.weight", m.config.n_vocab, rank)))
    bias.watched = {x, bias.add(Linear(x, m.weights.matrix("markov_w2", rank, n_columns)))}
    return bias


def _read_fusion(m: Header) -> tuple[list[int], Matrix, Weight]:
    """Return the numbers of the layers that are read, and the matrix and norm that fuse them to one row."""
    numbers, d, w = read_layers(m.meta), m.config.n_embd, m.weights
    return numbers, w.matrix("fc", len(numbers) * d, d), w.vector("enc.output_norm", d)


def _record_keys(
    m: Header,
    layers: DFlashLayers | deepseek4_dspark.DSparkLayers,
    target: Graph,
    numbers: list[int],
    fc: Matrix,
    fc_norm: Weight,
) -> None:
    """Record the keys and values of the drafter's layers in the target model's graph."""
    with before_outputs(target):
        x = layer_inputs(target, numbers, m.config.n_embd)
        x = target.add(RMSNorm(target.add(Linear(x, fc)), fc_norm, m.norm_eps))
        target.watched.add(x)
        caches = layers.declare(target, target.n_layers)
        target.layer = "output"
        for i, cache in enumerate(caches):
            layers.append(target, i, x, cache)


class DFlashLayers:
    """The layers of a drafter, like layers of Qwen 3 or Gemma 4.

    ``convolutions``: values of a kernel, and columns with the same factors; None without convolutions.
    """

    #: Whether the confidence head reads the hidden state after the norm before the head.
    confidence_reads_normed = True

    def __init__(self, m: Header, convolutions: tuple[int, int] | None) -> None:
        meta = m.meta
        self.m, self.heads, self.convolutions = m, m.heads(), convolutions
        self.rope, self.windows = make_rope(m, self.heads.key_dim), m.windows(period=0)
        act = meta.read("hidden_activation", str, "silu")
        if act not in _ACTIVATIONS:
            raise ModelError(f"dflash.hidden_activation is {quoted(act)}, which localllm does not support yet")
        self.activation, self.causal = _ACTIVATIONS[act], meta.read("attention.causal", bool, False)
        scale = meta.read("attention.scale", float, 0.0, low=0.0, high=1e3)
        self.scale = scale or self.heads.key_dim**-0.5
        self.value_scale = meta.read("attention.value_scale", float, 0.0, low=-1e3, high=1e3) or 1.0

    def declare(self, graph: Graph, first: int) -> list[KVCache]:
        """Declare the layers' caches in a graph, as caches of layer ``first`` and the following layers."""
        caches = []
        for i, window in enumerate(self.windows):
            graph.layer = first + i
            caches.append(graph.kv_cache(self.heads.n_kv, self.heads.key_dim, self.heads.value_dim, window=window))
        return caches

    def append(self, target: Graph, i: int, x: Tensor, cache: KVCache) -> None:
        """Record the keys and values of layer i for the target's tokens, from the fused rows x [T, d]."""
        # The operation requires queries, but they are unused here.
        *keys_and_values, q = target.add(Linears(x, self._matrices(i, "kvk")))
        self._append(target, i, q, keys_and_values, cache)

    def record(self, graph: Graph, embedding: Tensor, caches: list[KVCache]) -> Tensor:
        """Record the layers and the selection of outputs. Returns hidden states [N, d] before the last norm."""
        m, x = self.m, embedding
        d = m.config.n_embd

        def normed_behind(at: Layer, name: str, y: Tensor) -> Tensor:
            return norm(at, name, y) if f"{name}.weight" in at.weights else y

        for i, window in enumerate(self.windows):
            graph.layer = i
            at = Layer(i, graph, m.weights.layer(i), d, m.norm_eps, embedding)
            conv = _Convolutions(at, "attn", norm(at, "attn_norm", x), self.convolutions)
            q, *keys_and_values = at.add(Linears(conv.before(), self._matrices(i, "qkv")))
            q = self._append(graph, i, q, keys_and_values, caches[i], self._head_norm(i, "q"))
            sinks = at.weights.find("attn_sinks.weight", self.heads.n)
            y = at.add(Attention(q, caches[i], self.scale, window, sinks=sinks, has_spans=not self.causal))
            y = at.linear(y, "attn_output", d)
            y = y if self.value_scale == 1 else at.add(Scale(y, self.value_scale))
            x = add(at, normed_behind(at, "post_attention_norm", conv.behind(y)), x)
            conv = _Convolutions(at, "ffn", norm(at, "ffn_norm", x), self.convolutions)
            y = gated_mlp(at, conv.before(), m.mlp_width(), activation=self.activation)
            x = add(at, normed_behind(at, "post_ffw_norm", conv.behind(y)), x)
            if "layer_output_scale.weight" in at.weights:
                x = at.add(Scale(x, weight=at.weights.require("layer_output_scale.weight", 1)))
        graph.layer = "output"
        return graph.add(Outputs(x))

    def _matrices(self, i: int, names: str) -> tuple[Matrix, ...]:
        """Return the layer's matrices with the letters in ``names``: q, k or v. Gemma's layers have no v."""
        heads, w, d = self.heads, self.m.weights.layer(i), self.m.config.n_embd
        widths = {"q": heads.n * heads.key_dim, "k": heads.n_kv * heads.key_dim, "v": heads.n_kv * heads.value_dim}
        names = names if "attn_v.weight" in w else names.replace("v", "")
        return tuple(w.matrix(f"attn_{name}", d, widths[name]) for name in names)

    def _append(
        self,
        graph: Graph,
        i: int,
        q: Tensor,
        keys_and_values: Sequence[Tensor],
        cache: KVCache,
        q_norm: HeadNorm | None = None,
    ) -> Tensor:
        """Append keys and values to a layer's cache. Without values, they are the keys with another norm."""
        k, v, v_norm = keys_and_values[0], keys_and_values[-1], None
        if v is k:
            v_norm = HeadNorm(self.m.norm_eps)
        return graph.add(RopeAppend(q, k, v, cache, self.rope, q_norm, self._head_norm(i, "k"), v_norm))

    def _head_norm(self, i: int, name: str) -> HeadNorm:
        return HeadNorm(self.m.norm_eps, self.m.weights.layer(i).vector(f"attn_{name}_norm", self.heads.key_dim))
