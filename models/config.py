"""Hyper-parameters of a model, read from GGUF metadata with type and range checks. Unread keys are an error.

The keys are from the GGUF specification (ggml/docs/gguf.md, "LLM" and "RoPE") and the `gguf` package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import CacheType, Graph, Weight
from localllm.models.weights import Weights

T = TypeVar("T", bool, int, float, str)

_REQUIRED: Any = object()

#: Maximum number of values of an attention head. Released models have at most 256. Kernels store a head on the stack.
MAX_HEAD_DIM = 512

#: Maximum number of layers.
MAX_LAYERS = 1 << 16

#: Keys that may stay unread if they have one of these values, which change nothing. An empty tuple accepts any value.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    key: values
    for keys, values in (
        # of an MLP (missing in models with only experts), of the other kind of norm, and of the axes of images, which
        # are equal for text
        ("feed_forward_length attention.layer_norm_epsilon attention.layer_norm_rms_epsilon", ()),
        ("rope.dimension_sections rope.scaling.finetuned vocab_size", ()),
        ("expert_count expert_used_count expert_shared_count leading_dense_block_count", (0,)),
        ("expert_group_count expert_group_used_count", (0, 1)),
        ("expert_gating_func expert_weights_norm", (1,)),
        ("use_parallel_residual attention.clamp_kqv attention.max_alibi_bias attention.scale", (0,)),
        ("attention.temperature_scale attention.shared_kv_layers rope.scaling.alpha", (0,)),
        ("attn_logit_softcapping final_logit_softcapping", (0,)),
        ("expert_weights_scale attention.output_scale embedding_scale logit_scale residual_scale", (0, 1)),
        ("tensor_data_layout", ("reference", "Meta AI original pth")),
    )
    for key in keys.split()
}

#: Prefixes of keys, and a substring in the names of the tensors that the keys describe. Converters write keys for a
#: model family: Granite 4 without Mamba layers has keys for Mamba, and dense DeepSeek models have keys for experts.
_PARTS = {"expert_": "_exps.", "ssm.": ".ssm_"}

#: ``expert_gating_func`` (llama.cpp's ``enum llama_expert_gating_func_type``).
_GATING_FUNCTIONS = {1: "softmax", 2: "sigmoid", 3: "softmax", 4: "sqrt_softplus"}


@dataclass(frozen=True)
class ModelMetadata:
    """Reads one architecture's keys with type and range checks, and records which keys were read."""

    values: Mapping[str, Any]
    architecture: str
    _read: set[str] = field(default_factory=set)

    def find(self, key: str) -> Any:
        """Return the value of ``{architecture}.{key}`` as a Python object without checks, or None if missing."""
        full = f"{self.architecture}.{key}"
        self._read.add(full)
        return _plain(self.values.get(full))

    def check_multiple(self, key: str, n: int, of_key: str, of: int) -> None:
        """Raise ModelError if the value ``n`` of ``key`` is not a multiple of the value ``of`` of ``of_key``."""
        if n % of:
            raise ModelError(
                f"{self.architecture}.{key} is {n}, which is not a multiple of {self.architecture}.{of_key}, {of}: "
                "the file is broken"
            )

    def skip(self, *keys: str) -> None:
        """Mark keys as read that change nothing in this architecture."""
        self._read.update(f"{self.architecture}.{key}" for key in keys)

    def read(
        self, key: str, kind: type[T], default: T = _REQUIRED, *, low: float = -math.inf, high: float = math.inf
    ) -> T:
        """Return ``{architecture}.{key}``. Raises ModelError if missing, of the wrong type or outside low … high."""
        full = f"{self.architecture}.{key}"
        value = self.find(key)
        if value is None:
            value = default
        if value is _REQUIRED:
            raise ModelError(f"the file has no {full}, which a {self.architecture} model needs: is it complete?")
        if kind is float and type(value) is int:
            value = float(value)
        # Not isinstance, because a bool is an int in Python.
        if type(value) is not kind:
            raise ModelError(f"{full} is {quoted(value)}, but must be of type {kind.__name__}: the file is broken")
        if not isinstance(value, str) and not low <= value <= high:  # also rejects NaN
            raise ModelError(f"{full} is {value}, but must be between {low:g} and {high:g}: the file is broken")
        return value

    def read_each(
        self, key: str, n_layers: int, kind: type[T], default: T = _REQUIRED, *, low: float, high: float
    ) -> tuple[T, ...]:
        """Return the value for each layer. The file contains one value for all layers, or a list of one per layer.

        A list may have additional values for blocks after the last layer.
        """
        full = f"{self.architecture}.{key}"
        values = self.find(key)
        if not isinstance(values, list | tuple):
            return (self.read(key, kind, default, low=low, high=high),) * n_layers
        if len(values) not in (n_layers, self.find("block_count")):
            raise ModelError(f"{full} has {len(values)} values for {n_layers} layers: the file is broken")
        layers = (ModelMetadata({full: v}, self.architecture) for v in values[:n_layers])
        return tuple(layer.read(key, kind, low=low, high=high) for layer in layers)

    def read_uniform(self, key: str, n_layers: int, default: int = _REQUIRED, *, high: float) -> int:
        """Return a positive integer, the same for all layers. The file may contain a list with one per layer."""
        first, *more = self.read_each(key, n_layers, int, default, low=1, high=high)
        if any(value != first for value in more):
            raise ModelError(
                f"{self.architecture}.{key} differs from layer to layer, which localllm does not support yet"
            )
        return first

    def check_all_read(self, tensors: Iterable[str], *, rotates: bool = True) -> None:
        """Raise ModelError for an unread key that may change the model's output.

        Call it after the model is recorded.

        Args:
            tensors: names of the file's tensors.
            rotates: whether the model has rotary positions. If not, keys about the rotation are ignored.
        """
        prefix, names = f"{self.architecture}.", "\n".join(tensors)
        absent = (
            *(begin for begin, fragment in _PARTS.items() if fragment not in names),
            *([] if rotates else ["rope."]),
        )
        for full in self.values:
            if full.startswith(prefix) and full not in self._read:
                key = full.removeprefix(prefix)
                harmless, value = _HARMLESS.get(key), _plain(self.values[full])
                if key.startswith(absent) and key != "expert_count":
                    continue
                if harmless is None or (harmless and value not in harmless):
                    raise ModelError(f"the model has {full} = {quoted(value)}, which localllm does not support yet")


def _plain(value: Any) -> Any:
    """Convert a numpy scalar or array to a Python number or list. Return other values unchanged."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


@dataclass(frozen=True)
class ModelConfig:
    """Hyper-parameters of every model. An architecture reads further ones when it records its graph."""

    architecture: str
    n_layers: int  # layers of the forward pass, without the blocks for multi-token prediction after them
    context_length: int  # tokens that the model was trained to see
    original_context: int  # context length before the rotary frequencies were scaled
    n_embd: int  # hidden width
    n_vocab: int


def read_architecture(metadata: Mapping[str, Any]) -> str:
    """Return ``general.architecture``, the model's family."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError("the file has no general.architecture: it does not contain a model")
    return architecture


def read_general(meta: ModelMetadata, tensors: Mapping[str, Weight]) -> ModelConfig:
    """Read the hyper-parameters of every model."""
    context_length = meta.read("context_length", int, low=1, high=(1 << 31) - 1)
    return ModelConfig(
        architecture=meta.architecture,
        n_layers=_read_n_layers(meta, tensors),
        context_length=context_length,
        original_context=meta.read(
            "rope.scaling.original_context_length", int, context_length, low=1, high=(1 << 31) - 1
        ),
        n_embd=meta.read("embedding_length", int, low=1, high=1 << 20),
        n_vocab=_read_n_vocab(meta, tensors),
    )


def _read_n_layers(meta: ModelMetadata, tensors: Iterable[str]) -> int:
    """Return ``block_count`` without the blocks for multi-token prediction, unless all blocks are of this kind.

    Raises ModelError unless the file contains tensors of all layers, or only of blocks for multi-token prediction.
    """
    n_blocks = meta.read("block_count", int, low=1, high=MAX_LAYERS)
    if meta.find("hrm.layers_per_stack") is not None:  # two stacks of layers, whose runs are the blocks
        n_blocks = 2 * meta.read("hrm.layers_per_stack", int, low=1, high=MAX_LAYERS)
    n_layers = n_blocks - meta.read("nextn_predict_layers", int, 0, low=0, high=n_blocks) or n_blocks
    indices = {int(match[1]) for name in tensors if (match := re.match(r"(?:enc\.)?blk\.(\d{1,9})\.", name))}
    widths = meta.find("feed_forward_length")
    empty = {i for i, width in enumerate(widths) if width == 0} if isinstance(widths, list | tuple) else set()
    layers, blocks = set(range(n_layers)) - empty, set(range(n_layers, n_blocks))
    if not layers <= indices <= layers | empty | blocks and not (indices and indices <= blocks):
        raise ModelError(
            f"{meta.architecture}.block_count is {n_blocks}, but the file has tensors of {len(indices)} layers: "
            "the file's metadata and tensors disagree"
        )
    for i in indices - set(range(n_layers)):
        if not any(name.startswith(f"blk.{i}.nextn.") for name in tensors):
            raise ModelError(
                f"{meta.architecture}.nextn_predict_layers is {n_blocks - n_layers}, but layer {i} has no tensor "
                f"blk.{i}.nextn.*: the file's metadata and tensors disagree"
            )
    return n_layers


def _read_n_vocab(meta: ModelMetadata, tensors: Mapping[str, Weight]) -> int:
    """Return the number of rows of the token embedding, which must be the number of tokens of the vocabulary.

    For a drafter that uses the embedding of its target model, return the number of tokens.
    """
    embedding, tokens = tensors.get("token_embd.weight"), meta.values.get("tokenizer.ggml.tokens")
    if embedding is None and isinstance(tokens, Sized) and meta.find("target_layers") is not None:
        return len(tokens)
    if embedding is None:
        raise ModelError("the file has no tensor token_embd.weight: is it complete?")
    if len(embedding.shape) != 2:
        raise ModelError(
            f"tensor token_embd.weight has the shape {list(embedding.shape)}, but must be a matrix with one row "
            "per token: the file is broken"
        )
    n_vocab = embedding.shape[0]
    if tokens is None:
        key, n_tokens = f"{meta.architecture}.vocab_size", meta.read("vocab_size", int, n_vocab)
    elif isinstance(tokens, Sized):
        key, n_tokens = "tokenizer.ggml.tokens", len(tokens)
    else:
        raise ModelError(f"tokenizer.ggml.tokens is {quoted(tokens)}, but must be a list: the file is broken")
    if n_tokens != n_vocab:
        raise ModelError(
            f"the token embedding has {n_vocab:,} rows, but {key} gives the vocabulary {n_tokens:,} tokens: "
            "the file's metadata and tensors disagree"
        )
    return n_vocab


# -- Settings of blocks --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """Sizes of attention heads: ``n`` query heads share ``n_kv`` key/value heads in equal groups."""

    n: int
    n_kv: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class Experts:
    """A mixture of experts."""

    n: int  # experts in a layer
    n_used: int  # experts per token
    n_ff: int  # width of an expert
    n_ff_shared: int  # width of the shared expert; 0 without one
    # gating, norm_topk_prob, scale, n_groups, n_top_groups: see `localllm.kernels.operations.Route`
    gating: str
    norm_topk_prob: bool
    scale: float
    n_groups: int
    n_top_groups: int
    limits_input: bool = False  # see `localllm.models.blocks.gated`


@dataclass(frozen=True)
class FeedForward:
    """Feed-forward blocks of all layers: each layer has a gated MLP or experts."""

    n_ff: int  # width of the MLP; 0 if every layer has experts
    experts: Experts | None  # None if no layer has experts
    n_dense: int  # number of layers before the first layer that can have experts
    # After the dense layers, a layer has experts if its number, counted from 1, is a multiple of ``step``. With 0, no
    # layer has experts.
    step: int

    def experts_of(self, layer: int) -> Experts | None:
        """Return the experts of a layer, counted from 0, or None if the layer has an MLP."""
        return self.experts if layer >= self.n_dense and self.step and (layer + 1) % self.step == 0 else None


@dataclass(frozen=True)
class Header:
    """Keys and tensors of a file, from which an architecture records its graph. No tensor is read."""

    meta: ModelMetadata
    config: ModelConfig
    weights: Weights
    context: int  # maximum number of tokens of a sequence
    cache_type: CacheType  # storage type of keys and values
    pooling: str | None = None  # kind of pooling of an embedding model, see `localllm.models.pooling`
    # whether to record the block after the last layer instead of the model (`localllm.models.mtp`)
    is_block: bool = False
    target: Graph | None = None  # target model of a drafter that reads the target's cache or hidden states
    sees: bool = False  # whether batches contain embeddings of images; if not, operations for images are omitted
    is_causal: bool = True  # whether tokens attend to earlier tokens only

    @property
    def norm_eps(self) -> float:
        """Epsilon of RMSNorm, added to the mean square."""
        return self.meta.read("attention.layer_norm_rms_epsilon", float, low=0.0, high=1.0)

    @property
    def layer_norm_eps(self) -> float:
        """Epsilon of LayerNorm, added to the variance."""
        return self.meta.read("attention.layer_norm_epsilon", float, low=0.0, high=1.0)

    def gate_limits(self) -> list[tuple[float, float]]:
        """Return the limits of the gates of selected and of shared experts in each layer; 0 for no limit."""
        both = (
            self.meta.read_each(f"swiglu_clamp_{name}", self.config.n_layers, float, 0.0, low=0.0, high=1e6)
            for name in ("exp", "shexp")
        )
        return list(zip(*both, strict=True))

    def mlp_width(self) -> int:
        return self.meta.read_uniform("feed_forward_length", self.config.n_layers, high=1 << 24)

    def heads(self) -> Heads:
        """Return the attention heads, which are the same in all layers. By default, they share the hidden width."""
        meta, n_layers = self.meta, self.config.n_layers
        n = meta.read_uniform("attention.head_count", n_layers, high=1 << 14)
        return self._heads(n, meta.read_uniform("attention.head_count_kv", n_layers, n, high=n))

    def heads_by_layer(self) -> tuple[Heads | None, ...]:
        """Return the attention heads of each layer; None for layers without attention (``head_count_kv`` is 0)."""
        n_layers = self.config.n_layers
        n_heads = self.meta.read_each("attention.head_count", n_layers, int, low=0, high=1 << 14)
        most = max(n_heads)
        each_kv = self.meta.read_each("attention.head_count_kv", n_layers, int, most, low=0, high=most)
        return tuple(self._heads(n or most, n_kv) if n_kv else None for n, n_kv in zip(n_heads, each_kv, strict=True))

    def heads_of_layers(self) -> tuple[Heads, ...]:
        """Return the attention heads of each layer. Raises ModelError if a layer has no attention."""
        by_layer = self.heads_by_layer()
        heads = tuple(heads for heads in by_layer if heads is not None)
        if len(heads) != len(by_layer):
            raise ModelError(f"{self.meta.architecture}.attention.head_count_kv is 0 in a layer: the file is broken")
        return heads

    def _heads(self, n: int, n_kv: int) -> Heads:
        meta, n_embd = self.meta, self.config.n_embd
        meta.check_multiple("attention.head_count", n, "attention.head_count_kv", n_kv)
        if meta.find("attention.key_length") is None:
            meta.check_multiple("embedding_length", n_embd, "attention.head_count", n)
        key_dim, value_dim = self.head_dims()
        return Heads(n, n_kv, key_dim or n_embd // n, value_dim or n_embd // n)

    def head_dims(self, suffix: str = "") -> tuple[int, int]:
        """Return the values per head in keys and in values; 0 if not in the file. ``suffix`` ends the file's keys."""
        names = f"attention.key_length{suffix}", f"attention.value_length{suffix}"
        lengths = [self.meta.read(name, int, 0, low=0, high=MAX_HEAD_DIM) for name in names]
        for name, length in zip(names, lengths, strict=True):
            if self.meta.find(name) is not None and length < 2:
                raise ModelError(f"{self.meta.architecture}.{name} is {length}, but must be at least 2")
        return lengths[0], lengths[1] or lengths[0]

    def windows(
        self, period: int, default: int | None = 0, *, first: bool = False, kind: type[bool | int] = bool
    ) -> tuple[int | None, ...]:
        """Return the window of each layer in tokens, including the token itself; None for an unlimited layer.

        Args:
            period: by default, the last (or the ``first``) of every ``period`` layers is unlimited. With 1 all layers
                are unlimited, and with 0 no layer is.
            default: window if the file has no key; 0 for unlimited layers. None means that the key is required.
            kind: type of the file's value per layer.
        """
        meta, n_layers = self.meta, self.config.n_layers
        least, default = (1, _REQUIRED) if default is None else (0, default)
        window = meta.read("attention.sliding_window", int, default, low=least, high=(1 << 32) - 1)
        pattern = meta.find("attention.sliding_window_pattern")
        if isinstance(pattern, list | tuple):
            has_window = meta.read_each("attention.sliding_window_pattern", n_layers, kind, low=0, high=1)
            if any(has_window) and not window:
                raise ModelError(
                    f"{meta.architecture}.attention.sliding_window_pattern gives layers a window, but "
                    f"{meta.architecture}.attention.sliding_window is {window}: the file is broken"
                )
        else:
            period = meta.read("attention.sliding_window_pattern", int, period, low=0, high=1 << 16)
            full = 0 if first else period - 1
            has_window = tuple(not period or i % period != full for i in range(n_layers))
        return tuple((window or None) if has else None for has in has_window)

    def feed_forward(self, experts: Experts | None) -> FeedForward:
        """Return the feed-forward blocks. By default, the first layer with a router is the first with experts."""
        names = (f"blk.{i}.ffn_gate_inp.weight" for i in range(self.config.n_layers))
        first = next((i for i, name in enumerate(names) if name in self.weights), 0)
        n_dense = self.meta.read("leading_dense_block_count", int, first, low=0, high=1 << 16)
        step = self.meta.read("interleave_moe_layer_step", int, 1, low=0, high=1 << 16)
        has_mlp = experts is None or n_dense or step != 1
        return FeedForward(self.mlp_width() if has_mlp else 0, experts, n_dense, step)

    def required_experts(self, **defaults: Any) -> Experts:
        """Return the mixture of experts: see `experts`. Raises ModelError for a file without experts."""
        experts = self.experts(**defaults)
        if experts is None:
            name = f"{self.meta.architecture}.expert_count"
            raise ModelError(f"the file has no {name}, which its layers need: is it complete?")
        return experts

    def experts(self, *, norm_topk_prob: bool = True, gating: str = "softmax", n_shared: int = 0) -> Experts | None:
        """Return the mixture of experts, or None without one. The arguments are defaults for optional keys."""
        meta = self.meta
        n = meta.read("expert_count", int, 0, low=0, high=1 << 12)
        if n == 1 and not self.weights.has_experts:  # the MLP of Jamba Reasoning 3B
            return None
        if not n:
            if f"blk.{self.config.n_layers - 1}.ffn_gate_inp.weight" in self.weights:
                raise ModelError(f"the file has experts, but no {meta.architecture}.expert_count: is it complete?")
            return None
        n_used = meta.read_uniform("expert_used_count", self.config.n_layers, high=1 << 10)
        if n_used > n:
            raise ModelError(
                f"{meta.architecture}.expert_used_count is {n_used}, more than the {n} experts that "
                f"{meta.architecture}.expert_count names: the file is broken"
            )
        width = meta.find("expert_feed_forward_length")
        n_ff = (
            self.mlp_width()
            if width is None
            else meta.read_uniform("expert_feed_forward_length", self.config.n_layers, high=1 << 24)
        )
        function = meta.read("expert_gating_func", int, 0, low=0, high=4)
        n_groups, n_top_groups = (
            meta.read(f"expert_group_{key}", int, 1, low=0, high=1 << 10) or 1 for key in ("count", "used_count")
        )
        if n_top_groups > n_groups:
            raise ModelError(
                f"{meta.architecture}.expert_group_used_count is {n_top_groups}, more than the {n_groups} that "
                f"{meta.architecture}.expert_group_count names: the file is broken"
            )
        n_shared = meta.read("expert_shared_count", int, n_shared, low=0, high=1 << 10)
        shared = meta.read("expert_shared_feed_forward_length", int, n_shared * n_ff, low=0, high=1 << 24)
        return Experts(
            n=n,
            n_used=n_used,
            n_ff=n_ff,
            n_ff_shared=shared,
            gating=_GATING_FUNCTIONS.get(function, gating),
            # Function 3 is the softmax of the selected experts' logits.
            norm_topk_prob=function == 3 or meta.read("expert_weights_norm", bool, norm_topk_prob),
            # 0 means no scale, as in llama.cpp
            scale=meta.read("expert_weights_scale", float, 0.0, low=0.0, high=1e6) or 1.0,
            n_groups=n_groups,
            n_top_groups=n_top_groups,
        )
