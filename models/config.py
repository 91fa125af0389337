"""A model's hyper-parameters, read once from GGUF metadata: typed, ranged and checked against each other.

Keys are those of the GGUF specification (ggml/docs/gguf.md, "LLM" and "RoPE") and of the `gguf` package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from localllm.errors import ModelError, quoted
from localllm.kernels.graph import Weight

T = TypeVar("T", int, float, str)

_REQUIRED: Any = object()

#: Values in a head of attention: real models have at most 256, and kernels keep rows of them on their stack.
LARGEST_HEAD = 512

#: ``rope.scaling.type`` values that `localllm.models.rope` computes.
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")

#: Keys that may be left unread if they have one of these values, which change nothing; with none given, any value.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "vocab_size": (),
    "attention.layer_norm_epsilon": (),
    "rope.scaling.finetuned": (),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_gating_func": (1,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.output_scale": (0.0, 1.0),
    "attention.temperature_scale": (0.0,),
    "attention.shared_kv_layers": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.alpha": (0.0,),
    "tensor_data_layout": ("reference",),
}


@dataclass(frozen=True)
class Metadata:
    """Typed, ranged reads of one architecture's keys, which remember what was read."""

    values: Mapping[str, Any]
    architecture: str
    _read: set[str] = field(default_factory=set)

    def find(self, key: str) -> Any:
        """The value of ``{architecture}.{key}`` in Python's own types, whatever it is; None where there is none."""
        full = f"{self.architecture}.{key}"
        self._read.add(full)
        return _plain(self.values.get(full))

    def read(
        self,
        key: str,
        kind: type[T],
        default: T = _REQUIRED,
        *,
        low: float = -math.inf,
        high: float = math.inf,
    ) -> T:
        """The value of ``{architecture}.{key}``.

        Raises:
            ModelError: it is missing and has no default, has another type, or lies outside low … high.
        """
        full = f"{self.architecture}.{key}"
        value = self.find(key)
        if value is None:
            value = default
        if value is _REQUIRED:
            raise ModelError(f"the file has no {full}, which a {self.architecture} model needs: is it complete?")
        if kind is float and type(value) is int:
            value = float(value)
        # Not isinstance: a bool is an int to Python, but not in a file.
        if type(value) is not kind:
            raise ModelError(f"{full} is {quoted(value)}, but must be of type {kind.__name__}: the file is broken")
        if not isinstance(value, str) and not low <= value <= high:  # also refuses NaN
            raise ModelError(f"{full} is {value}, but must lie between {low:g} and {high:g}: the file is broken")
        return value

    def read_uniform(self, key: str, n_layers: int, default: int = _REQUIRED, *, low: float, high: float) -> int:
        """An integer that may stand in the file once a layer, if it is the same for all of them.

        Raises:
            ModelError: as `read`; the array has not one value a layer, or they differ.
        """
        full = f"{self.architecture}.{key}"
        values = self.find(key)
        if not isinstance(values, list | tuple):
            return self.read(key, int, default, low=low, high=high)
        if len(values) != n_layers:
            raise ModelError(f"{full} has {len(values)} values for {n_layers} layers: the file is broken")
        if any(value != values[0] for value in values):
            raise ModelError(f"{full} differs from layer to layer, which localllm does not support yet")
        return Metadata({full: values[0]}, self.architecture).read(key, int, low=low, high=high)

    def check_all_read(self) -> None:
        """To be called when all was read: a key that nobody asked for may change what the model computes.

        Raises:
            ModelError: there is one.
        """
        prefix = f"{self.architecture}."
        for full in self.values:
            if full.startswith(prefix) and full not in self._read:
                harmless = _HARMLESS.get(full.removeprefix(prefix))
                value = _plain(self.values[full])
                if harmless is None or (harmless and value not in harmless):
                    raise ModelError(f"the model has {full} = {quoted(value)}, which localllm does not support yet")


def _plain(value: Any) -> Any:
    """A numpy scalar or array as Python's own number or list; anything else as it is."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; `localllm.models.rope` says what the scalings compute.

    Attributes:
        theta: base of the frequencies.
        n_rot: values of each head that are rotated.
        scaling: one of `ROPE_SCALINGS`.
        factor: how many times longer the context became by scaling.
        original_context: tokens of context before scaling.
        attn_factor: on the magnitude of all rotated values.
        yarn_ext_factor: weight of extrapolation at high frequencies.
        yarn_attn_factor: magnitude that takes the place of YaRN's own, if given.
        yarn_beta_fast, yarn_beta_slow: turns in the original context above which frequencies are kept, and
            below which they are scaled in full.
        yarn_log_multiplier: "mscale_all_dim", 0 if there is none.
        long_factors: whether LongRoPE takes its factors for contexts beyond the original; see
            `ModelConfig.for_context`.
    """

    theta: float
    n_rot: int
    scaling: str = "none"
    factor: float = 1.0
    original_context: int = 0
    attn_factor: float = 1.0
    yarn_ext_factor: float = 1.0
    yarn_attn_factor: float | None = None
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_log_multiplier: float = 0.0
    long_factors: bool = False


@dataclass(frozen=True)
class ExpertConfig:
    """A mixture of experts in the place of an MLP.

    Attributes:
        n: experts in a layer.
        n_used: of which a token goes to so many.
        n_ff: width of each.
        scale: factor on their weights.
    """

    n: int
    n_used: int
    n_ff: int
    scale: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """What every decoder-only transformer has.

    Attributes:
        context_length: tokens that the model was trained to see.
        n_embd: hidden width.
        n_ff: width of the MLP.
        n_heads, n_kv_heads: query heads, and key/value heads that they share in equal groups.
        norm_eps: added to the mean square under RMSNorm's root.
        sliding_window: positions that a token sees, itself included; None for all.
        experts: the mixture in the place of the MLP, if there is one.
    """

    architecture: str
    n_layers: int
    context_length: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    n_vocab: int
    sliding_window: int | None
    rope: RopeConfig
    experts: ExpertConfig | None = None

    def for_context(self, n_tokens: int) -> ModelConfig:
        """The same for sequences of up to ``n_tokens``: where they can pass the original context, LongRoPE rotates
        all of them by its long factors.

        One choice for a sequence's whole life, as in llama.cpp, for keys that are in the cache were rotated already.
        """
        long_factors = n_tokens > self.rope.original_context
        return replace(self, rope=replace(self.rope, long_factors=long_factors))


def read_architecture(metadata: Mapping[str, Any]) -> str:
    """``general.architecture``, the model's family.

    Raises:
        ModelError: it is missing or no text.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError("the file has no general.architecture: it does not hold a model")
    return architecture


def read_decoder(
    meta: Metadata,
    tensors: Mapping[str, Weight],
    experts: Callable[[Metadata, int], ExpertConfig | None] = lambda meta, n_ff: None,
) -> ModelConfig:
    """The hyper-parameters that every decoder-only transformer has, and with ``experts`` those of its mixtures.

    Raises:
        ModelError: one is missing, of the wrong type, out of range, or at odds with the others or with the tensors.
    """
    architecture = meta.architecture
    n_layers = _read_n_layers(meta, tensors)
    n_embd = meta.read("embedding_length", int, low=1, high=1 << 20)
    n_heads = meta.read_uniform("attention.head_count", n_layers, low=1, high=1 << 14)
    n_kv_heads = meta.read_uniform("attention.head_count_kv", n_layers, n_heads, low=1, high=n_heads)
    if n_heads % n_kv_heads:
        raise ModelError(
            f"{architecture}.attention.head_count is {n_heads}, which is no multiple of "
            f"{architecture}.attention.head_count_kv, {n_kv_heads}: the file is broken"
        )
    context_length = meta.read("context_length", int, low=1, high=(1 << 31) - 1)
    head_dim = _read_head_dim(meta, n_embd, n_heads)
    n_ff = meta.read_uniform("feed_forward_length", n_layers, low=1, high=1 << 24)
    return ModelConfig(
        architecture=architecture,
        n_layers=n_layers,
        context_length=context_length,
        n_embd=n_embd,
        n_ff=n_ff,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        norm_eps=meta.read("attention.layer_norm_rms_epsilon", float, low=0.0, high=1.0),
        n_vocab=_read_n_vocab(meta, tensors),
        sliding_window=meta.read("attention.sliding_window", int, 0, low=0, high=(1 << 32) - 1) or None,
        rope=_read_rope(meta, head_dim, context_length),
        experts=experts(meta, n_ff),
    )


def read_experts(meta: Metadata, n_ff: int) -> ExpertConfig | None:
    """The mixture of experts; by default they have the width of an MLP."""
    n = meta.read("expert_count", int, 0, low=0, high=1 << 10)
    if not n:
        return None
    n_used = meta.read("expert_used_count", int, low=1, high=1 << 10)
    if n_used > n:
        raise ModelError(
            f"{meta.architecture}.expert_used_count is {n_used}, more than the {n} experts that "
            f"{meta.architecture}.expert_count names: the file is broken"
        )
    width = meta.read("expert_feed_forward_length", int, n_ff, low=1, high=1 << 24)
    scale = meta.read("expert_weights_scale", float, 0.0, low=0.0, high=1e6) or 1.0  # 0, as in llama.cpp, for none
    return ExpertConfig(n, n_used, width, scale)


def _read_n_layers(meta: Metadata, tensors: Iterable[str]) -> int:
    """``block_count``, which must be that of the layers whose tensors the file holds."""
    n_layers = meta.read("block_count", int, low=1, high=1 << 16)
    indices = {int(match[1]) for name in tensors if (match := re.match(r"blk\.(\d{1,9})\.", name))}
    if indices != set(range(n_layers)):
        raise ModelError(
            f"{meta.architecture}.block_count is {n_layers}, but the file has tensors of {len(indices)} layers: "
            "the file's metadata and tensors disagree"
        )
    return n_layers


def _read_head_dim(meta: Metadata, n_embd: int, n_heads: int) -> int:
    """``attention.key_length``, by default the hidden width shared out among the heads."""
    if meta.find("attention.key_length") is None and n_embd % n_heads:
        raise ModelError(
            f"{meta.architecture}.embedding_length is {n_embd}, which is no multiple of "
            f"{meta.architecture}.attention.head_count, {n_heads}: the file is broken"
        )
    head_dim = meta.read("attention.key_length", int, n_embd // n_heads, low=2, high=1 << 12)
    if head_dim > LARGEST_HEAD:
        raise ModelError(
            f"{meta.architecture}.attention.key_length is {head_dim:,}, more than the {LARGEST_HEAD} values a head "
            "that localllm computes with: the file is broken"
        )
    value_length = meta.read("attention.value_length", int, head_dim, low=1, high=1 << 12)
    if value_length != head_dim:
        raise ModelError(
            f"the model's keys have {head_dim} values a head, but its values {value_length}, "
            "which localllm does not support yet"
        )
    return head_dim


def _read_n_vocab(meta: Metadata, tensors: Mapping[str, Weight]) -> int:
    """The rows of the token embedding, which must be as many as the vocabulary has tokens."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError("the file has no tensor token_embd.weight: is it complete?")
    if len(embedding.shape) != 2:
        raise ModelError(
            f"tensor token_embd.weight has the shape {list(embedding.shape)}, but must be a matrix with a row for "
            "each token: the file is broken"
        )
    n_vocab = embedding.shape[0]
    tokens = meta.values.get("tokenizer.ggml.tokens")
    if tokens is None:
        key, n_tokens = f"{meta.architecture}.vocab_size", meta.read("vocab_size", int, n_vocab)
    elif isinstance(tokens, Sized):
        key, n_tokens = "tokenizer.ggml.tokens", len(tokens)
    else:
        raise ModelError(f"tokenizer.ggml.tokens is {quoted(tokens)}, but must be a list: the file is broken")
    if n_tokens != n_vocab:
        raise ModelError(
            f"the token embedding has {n_vocab:,} rows, but by {key} the vocabulary has {n_tokens:,} tokens: "
            "the file's metadata and tensors disagree"
        )
    return n_vocab


def _read_rope(meta: Metadata, head_dim: int, context_length: int) -> RopeConfig:
    n_rot = meta.read("rope.dimension_count", int, head_dim, low=2, high=head_dim)
    if n_rot % 2:
        raise ModelError(f"{meta.architecture}.rope.dimension_count is {n_rot}, but must be even: the file is broken")
    # As in llama.cpp: 0 stands for "no factor", and a factor without a type scales linearly.
    old_factor = meta.read("rope.scale_linear", float, 0.0, low=0.0, high=1e6)
    factor = meta.read("rope.scaling.factor", float, old_factor, low=0.0, high=1e6) or 1.0
    scaling = meta.read("rope.scaling.type", str, "none" if factor == 1 else "linear")
    if scaling not in ROPE_SCALINGS:
        raise ModelError(
            f"{meta.architecture}.rope.scaling.type is {quoted(scaling)}, which localllm does not support; "
            f"it knows {', '.join(ROPE_SCALINGS)}"
        )
    original_context = meta.read(
        "rope.scaling.original_context_length", int, context_length, low=1, high=(1 << 31) - 1
    )
    return RopeConfig(
        theta=meta.read("rope.freq_base", float, 10_000.0, low=2.0, high=1e15),
        n_rot=n_rot,
        scaling=scaling,
        factor=factor,
        original_context=original_context,
        attn_factor=meta.read("rope.scaling.attn_factor", float, 1.0, low=1e-3, high=1e3),
        yarn_ext_factor=meta.read("rope.scaling.yarn_ext_factor", float, 1.0, low=0.0, high=1.0),
        yarn_attn_factor=meta.read("rope.scaling.yarn_attn_factor", float, 0.0, low=0.0, high=1e3) or None,
        yarn_beta_fast=meta.read("rope.scaling.yarn_beta_fast", float, 32.0, low=1e-3, high=1e6),
        yarn_beta_slow=meta.read("rope.scaling.yarn_beta_slow", float, 1.0, low=1e-3, high=1e6),
        yarn_log_multiplier=meta.read("rope.scaling.yarn_log_multiplier", float, 0.0, low=0.0, high=1e3),
    )
