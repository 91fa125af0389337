"""The blocks that architectures are assembled from.

A block holds loaded weights and says, in the order of the data's way, which operations run over them.  Shapes as
in `localllm.kernels.ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localllm.kernels.ops import CacheShape, Linear, Ops, Rope, Tensor
from localllm.models.config import ModelConfig


@dataclass(frozen=True)
class RMSNorm:
    weight: Any
    eps: float

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention with rotary positions, pre-normed, added to the residual stream."""

    layer: int
    norm: RMSNorm
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    rope: Rope
    scale: float
    window: int | None = None
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        q, k, v = ops.linears(self.norm(ops, x), [self.query, self.key, self.value])
        q = ops.rope_append(
            q,
            k,
            v,
            self.rope,
            self.layer,
            q_norm=self.q_norm and self.q_norm.weight,
            k_norm=self.k_norm and self.k_norm.weight,
            eps=self.q_norm.eps if self.q_norm else 0.0,
        )
        mixed = ops.attention(q, self.layer, scale=self.scale, window=self.window)
        return ops.linear(mixed, self.output, residual=x)


@dataclass(frozen=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x)), pre-normed, added to the residual stream."""

    norm: RMSNorm
    gate: Linear
    up: Linear
    down: Linear
    activation: str = "silu"

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        gate, up = ops.linears(self.norm(ops, x), [self.gate, self.up])
        return ops.linear(ops.gated(gate, up, self.activation), self.down, residual=x)


@dataclass(frozen=True)
class Model:
    """Embedding, layers, final norm and head: a forward pass from ids to logits."""

    config: ModelConfig
    embedding: Any
    layers: Sequence[tuple[Attention, GatedMLP]]
    norm: RMSNorm
    head: Linear
    cache_shape: CacheShape

    def forward(self, ops: Ops) -> Tensor:
        """Logits [N, n_vocab] of the batch that ``ops`` is running."""
        x = ops.embed(self.embedding)  # [T, d]
        for attention, mlp in self.layers:
            x = mlp(ops, attention(ops, x))
        return ops.linear(self.norm(ops, ops.outputs(x)), self.head)
