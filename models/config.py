"""A model's hyper-parameters, read once from GGUF metadata, typed and ranged.

Keys are those of the GGUF specification (ggml/docs/gguf.md, "LLM" and "RoPE scaling").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from localllm.errors import ModelError
from localllm.kernels.ops import Weight

T = TypeVar("T", int, float, str, bool)

_REQUIRED: Any = object()


@dataclass(frozen=True)
class Metadata:
    """Typed, ranged reads of one architecture's keys."""

    values: Mapping[str, Any]
    architecture: str

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
        value = self.values.get(full, default)
        if value is _REQUIRED:
            raise ModelError(f"the file has no {full}, which a {self.architecture} model needs: is it complete?")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelError(f"{full} is {value!r}, but must be of type {kind.__name__}")
        if isinstance(value, (int, float)) and not low <= value <= high:
            raise ModelError(f"{full} is {value}, but must lie between {low:g} and {high:g}")
        return cast(T, value)


@dataclass(frozen=True)
class ModelConfig:
    """What every decoder-only transformer has."""

    architecture: str
    n_layers: int
    context_length: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    n_rot: int
    n_vocab: int
    sliding_window: int | None

    @classmethod
    def from_metadata(cls, values: Mapping[str, Any], architecture: str, n_vocab: int) -> ModelConfig:
        meta = Metadata(values, architecture)
        n_embd = meta.read("embedding_length", int, low=1, high=1 << 20)
        n_heads = meta.read("attention.head_count", int, low=1, high=4096)
        head_dim = meta.read("attention.key_length", int, n_embd // n_heads, low=2, high=1024)
        return cls(
            architecture=architecture,
            n_layers=meta.read("block_count", int, low=1, high=4096),
            context_length=meta.read("context_length", int, low=1, high=1 << 31),
            n_embd=n_embd,
            n_ff=meta.read("feed_forward_length", int, low=1, high=1 << 24),
            n_heads=n_heads,
            n_kv_heads=meta.read("attention.head_count_kv", int, n_heads, low=1, high=n_heads),
            head_dim=head_dim,
            norm_eps=meta.read("attention.layer_norm_rms_epsilon", float, low=0.0, high=1.0),
            rope_theta=meta.read("rope.freq_base", float, 10_000.0, low=1.0, high=1e12),
            n_rot=meta.read("rope.dimension_count", int, head_dim, low=2, high=head_dim),
            n_vocab=n_vocab,
            sliding_window=meta.read("attention.sliding_window", int, 0, low=0, high=1 << 31) or None,
        )


def read_config(metadata: Mapping[str, Any], tensors: Mapping[str, Weight]) -> ModelConfig:
    """The hyper-parameters of the file's model."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError("the file has no tensor token_embd.weight: is it complete?")
    return ModelConfig.from_metadata(metadata, metadata["general.architecture"], embedding.shape[0])
