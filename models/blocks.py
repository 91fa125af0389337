"""The blocks that architectures are assembled from.

A block loads its weights under the names that GGUF files give them, and says, in the order of the data's way,
which operations run over them.  Shapes as in `localllm.kernels.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.errors import ModelError
from localllm.kernels.ops import CacheShape, Experts, Linear, Ops, Rope, Tensor
from localllm.models.config import ExpertConfig, ModelConfig
from localllm.models.weights import LayerWeights, LoadedWeight, Weights


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
    window: int | None
    eps: float
    #: Weights [head_dim] of RMSNorms on each head, before rotation.
    q_norm: Any | None = None
    k_norm: Any | None = None

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        weights: LayerWeights,
        layer: int,
        rope: Rope,
        *,
        qkv_bias: bool = False,
        qk_norm: bool = False,
    ) -> Attention:
        """With ``qkv_bias``, query, key and value must have biases; else they may.  ``qk_norm``: of each head."""
        width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        return cls(
            layer=layer,
            norm=RMSNorm(weights.vector("attn_norm", config.n_embd), config.norm_eps),
            query=weights.linear("attn_q", config.n_embd, width, bias=qkv_bias),
            key=weights.linear("attn_k", config.n_embd, kv_width, bias=qkv_bias),
            value=weights.linear("attn_v", config.n_embd, kv_width, bias=qkv_bias),
            output=weights.linear("attn_output", width, config.n_embd),
            rope=rope,
            scale=config.head_dim**-0.5,
            window=config.sliding_window,
            eps=config.norm_eps,
            q_norm=weights.vector("attn_q_norm", config.head_dim) if qk_norm else None,
            k_norm=weights.vector("attn_k_norm", config.head_dim) if qk_norm else None,
        )

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        q, k, v = ops.linears(self.norm(ops, x), [self.query, self.key, self.value])
        q = ops.rope_append(q, k, v, self.rope, self.layer, q_norm=self.q_norm, k_norm=self.k_norm, eps=self.eps)
        mixed = ops.attention(q, self.layer, scale=self.scale, window=self.window)
        return ops.linear(mixed, self.output, residual=x)


@dataclass(frozen=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x)), pre-normed, added to the residual stream."""

    norm: RMSNorm
    gate: Linear
    up: Linear
    down: Linear
    activation: str

    @classmethod
    def load(cls, config: ModelConfig, weights: LayerWeights, *, activation: str = "silu") -> GatedMLP:
        return cls(
            norm=RMSNorm(weights.vector("ffn_norm", config.n_embd), config.norm_eps),
            gate=weights.linear("ffn_gate", config.n_embd, config.n_ff),
            up=weights.linear("ffn_up", config.n_embd, config.n_ff),
            down=weights.linear("ffn_down", config.n_ff, config.n_embd),
            activation=activation,
        )

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        gate, up = ops.linears(self.norm(ops, x), [self.gate, self.up])
        return ops.linear(ops.gated(gate, up, self.activation), self.down, residual=x)


@dataclass(frozen=True)
class MixtureMLP:
    """A gated MLP for each of several experts, of which every token goes to a few; pre-normed, and what comes out is
    added to the residual stream by shares.  Source: arXiv:2401.04088 (Mixtral)."""

    norm: RMSNorm
    router: Linear
    gate: Experts
    up: Experts
    down: Experts
    activation: str
    config: ExpertConfig

    @classmethod
    def load(cls, config: ModelConfig, weights: LayerWeights, *, activation: str = "silu") -> MixtureMLP:
        """Raises:
        ModelError: the hyper-parameters name no experts.
        """
        experts, d = config.experts, config.n_embd
        if experts is None:
            raise ModelError(f"the file has no {config.architecture}.expert_count: is it complete?")
        return cls(
            norm=RMSNorm(weights.vector("ffn_norm", d), config.norm_eps),
            router=weights.linear("ffn_gate_inp", d, experts.n),
            gate=weights.experts("ffn_gate_exps", experts.n, d, experts.n_ff),
            up=weights.experts("ffn_up_exps", experts.n, d, experts.n_ff),
            down=weights.experts("ffn_down_exps", experts.n, experts.n_ff, d),
            activation=activation,
            config=experts,
        )

    def __call__(self, ops: Ops, x: Tensor) -> Tensor:
        y = self.norm(ops, x)
        routing = ops.route(ops.linear(y, self.router), self.config.n_used, normalise=True, scale=self.config.scale)
        gate, up = ops.expert_linears(y, [self.gate, self.up], routing)
        return ops.expert_output(ops.gated(gate, up, self.activation), self.down, routing, residual=x)


#: A step along the residual stream: takes x [T, d] (consumed) and returns the next.
Block = Callable[[Ops, Tensor], Tensor]


@dataclass(frozen=True)
class Model:
    """Embedding, layers, final norm and head: a forward pass from ids to logits.

    Attributes:
        weights: all tensors, as the backend holds them.
    """

    config: ModelConfig
    embedding: Any
    layers: Sequence[Sequence[Block]]
    norm: RMSNorm
    head: Linear
    weights: tuple[LoadedWeight, ...]

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        weights: Weights,
        layer: Callable[[int, LayerWeights], Sequence[Block]],
    ) -> Model:
        """``layer`` assembles the blocks of one layer from its index and weights."""
        # The largest matrices first: what loading one takes beside its result then comes on top of nothing else.
        head = weights.linear("output", config.n_embd, config.n_vocab, "output", tied_to="token_embd")
        embedding = weights.embedding("token_embd", config.n_vocab, config.n_embd, head)
        layers = [layer(i, weights.layer(i)) for i in range(config.n_layers)]
        norm = RMSNorm(weights.vector("output_norm", config.n_embd, "output"), config.norm_eps)
        return cls(config, embedding, layers, norm, head, weights.held)

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(self.config.n_layers, self.config.n_kv_heads, self.config.head_dim)

    def forward(self, ops: Ops) -> Tensor:
        """Logits [N, n_vocab] of the batch that ``ops`` is running."""
        x = ops.embed(self.embedding)  # [T, d]
        for layer in self.layers:
            for block in layer:
                x = block(ops, x)
        return ops.linear(self.norm(ops, ops.outputs(x)), self.head)
