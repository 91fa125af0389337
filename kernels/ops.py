"""The operations a model is made of.

A model's forward pass is written once, over the `Ops` protocol, and every backend (plain numpy in
`reference.py`, CPU kernels in `cpu/`, GPU kernels in `cuda/`) runs it.  The operations
are coarse: a decode step of one layer costs at most about eight of them.  Shapes in the docstrings use

    T  tokens in the batch          S  sequences in the batch       N  rows whose logits are wanted
    d  hidden width                 H  query heads                  G  key/value heads (H is a multiple of G)
    E  experts of a layer           k  experts that a token goes to

**Forward passes are traced.**  A backend may call the forward function once, record what it does, and replay the
record for every later batch.  So a forward function may branch on its configuration, but never on the values or
the number of tokens of the batch at hand; those it sees only through the operations.

**Every token stands alone.**  What an operation computes for a token depends on that token, its position and the
cache, never on which other tokens share the batch.  A backend keeps the order of its additions independent of T,
so that a token decoded alone has the same bits as one that was prefilled in a batch of hundreds.  (All values are
finite, that is to say: a backend may multiply those that a token does not see by zero.)

**A model may lie on several backends**, each with some of its layers (`localllm.kernels.split`).  Each then runs a
*part* of the forward pass, which begins and ends with hidden states, and may still compute when it was called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.backend import Batch as Batch
from localllm.kernels.backend import TopK as Best
from localllm.kernels.backend import top_k as best_of
from localllm.kernels.graph import CACHE_TYPES as CACHE_TYPES
from localllm.kernels.graph import LARGEST_CODE as LARGEST_CODE
from localllm.kernels.graph import LARGEST_SCALED as LARGEST_SCALED
from localllm.kernels.graph import NEGLIGIBLE as NEGLIGIBLE
from localllm.kernels.graph import VALUES_PER_SCALE as VALUES_PER_SCALE
from localllm.kernels.graph import CacheType as CacheType
from localllm.kernels.graph import Rope as Rope
from localllm.kernels.graph import Weight as Weight
from localllm.quant.types import GGMLType

#: What an operation takes and returns: a backend's own handle of a float32 matrix [T, width].
Tensor = Any

#: What `Ops.route` returns: a backend's own handle of the k experts that each token goes to, and their shares.
Routing = Any


class Packed(Protocol):
    """Matrices [n_out, n_in], packed for a backend."""

    @property
    def n_in(self) -> int: ...
    @property
    def n_out(self) -> int: ...
    @property
    def format(self) -> str:
        """The name of the format that the kernels read."""
        ...

    @property
    def n_bytes(self) -> int:
        """What all of them take in memory."""
        ...


class Linear(Packed, Protocol):
    """One matrix: y = x @ W.T + bias."""


class Experts(Packed, Protocol):
    """The matrices of a layer's experts: y = x @ W[expert].T."""

    @property
    def n_experts(self) -> int: ...


@dataclass(frozen=True)
class CacheShape:
    """What a KV cache holds: for each layer, keys and values of G heads of ``head_dim`` values a token."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    type: CacheType = "f16"

    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, without padding."""
        head = 2 * self.head_dim if self.type == "f16" else self.head_dim + 2 * -(-self.head_dim // VALUES_PER_SCALE)
        return self.n_layers * self.n_kv_heads * 2 * head


@dataclass(frozen=True)
class StepSizes:
    """What decides how much memory a compiled step takes beside weights and cache.

    Attributes:
        n_embd, n_ff, n_vocab: values of a hidden state, of a gate (of each expert), and logits.
        n_heads, n_kv_heads, head_dim, cache_type: of attention.
        n_tokens, n_outputs: in a batch, at most.
        n_pages: of the cache.
        n_experts, n_chosen: of a layer, and how many of them a token goes to; 0 without a mixture.
        types: of the matrices but for routers, as the file has them; none: any.
    """

    n_embd: int
    n_ff: int
    n_vocab: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    cache_type: CacheType
    n_tokens: int
    n_outputs: int
    n_pages: int
    n_experts: int = 0
    n_chosen: int = 0
    types: frozenset[GGMLType] = frozenset()


class KVCache(Protocol):
    """Keys and values, in pages of ``page_size`` tokens that sequences name in their block tables.

    What is beyond the range of the cache's type is kept as the largest finite value that it has.
    """

    @property
    def page_size(self) -> int: ...
    @property
    def n_pages(self) -> int: ...
    @property
    def n_bytes(self) -> int:
        """What it takes in memory."""
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copies one page, in all layers."""
        ...


class Step(Protocol):
    """A compiled forward pass.  The arrays that it gives are the backend's own and good until the next call."""

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        """Runs a batch, and gives the logits, float32 [N, n_vocab]."""
        ...

    def best(self, batch: Batch, k: int) -> Best:
        """Runs a batch, and gives the ``k`` largest logits alone; see `Ops.most_choices`."""
        ...


class Hidden(Protocol):
    """What a part of a forward pass ends with, perhaps still being computed: hidden states [T, d], or logits."""

    def host(self) -> NDArray[np.float32]:
        """Waits, and gives it in memory of the host: float32 [T, d], or [N, n_vocab].

        The array is the backend's own and good until the part is called again.
        """
        ...

    def best(self, k: int) -> Best:
        """Of logits, waits and gives the ``k`` largest; the arrays are as those of `host`."""
        ...


@dataclass(frozen=True)
class HostHidden(Hidden):
    """That of a backend whose parts are through when they return, in memory of the host."""

    rows: NDArray[np.float32]

    def host(self) -> NDArray[np.float32]:
        return self.rows

    def best(self, k: int) -> Best:
        return best_of(self.rows, k)


def hidden_rows(hidden: Hidden | None, n_tokens: int, width: int) -> NDArray[np.float32]:
    """The hidden states [n_tokens, width] that a part was called with, once they are there.

    Raises:
        KernelError: it was called without, or with others.
    """
    if hidden is None:
        raise KernelError(f"this part of a forward pass begins with hidden states of {width}, but was given none")
    rows = hidden.host()
    if rows.shape != (n_tokens, width) or rows.dtype != np.float32:
        raise KernelError(
            f"this part of a forward pass was given hidden states {list(rows.shape)} in {rows.dtype}, but needs "
            f"{[n_tokens, width]} in float32"
        )
    return rows


#: A compiled part of a forward pass: takes a batch, and the hidden states that it begins with, or None if it begins
#: with ids.  It may return before it has computed, but must have read then what lies in memory of the host: the
#: batch, and what `Hidden.host` gave.  Backends that hand hidden states over in memory of their own see to it that
#: these are read before the part that made them, called again, overwrites them.
Part = Callable[[Batch, Hidden | None], Hidden]


@dataclass(frozen=True)
class WholeStep(Step):
    """The step of a part that is all of a forward pass."""

    part: Part

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        return self.part(batch, None).host()

    def best(self, batch: Batch, k: int) -> Best:
        return self.part(batch, None).best(k)


#: Where a tensor belongs in a model: in the layer of that number, or before or behind all of them.
Place = int | Literal["embedding", "output"]


#: Called with a matrix that a backend must keep in a larger format than `Loader.packed_bytes` counted on, because its
#: values do not fit into that one: before it takes the memory, with the name of the format and the bytes.  It may
#: raise to prevent that.
Widening = Callable[[Weight, str, int], None]


class Loader(Protocol):
    """Keeps weights as a backend wants them; called while a model is loaded."""

    def load_linear(self, weight: Weight, bias: Weight | None = None, *, widening: Widening | None = None) -> Linear:
        """Packs a matrix [n_out, n_in] and an optional bias [n_out] for this backend.

        Raises:
            KernelError: no kernel reads the matrix's format.
        """
        ...

    def load_experts(self, weight: Weight, *, widening: Widening | None = None) -> Experts:
        """Packs the matrices [E, n_out, n_in] of a layer's experts.

        Raises:
            KernelError: no kernel reads their format.
        """
        ...

    def packed_bytes(self, weight: Weight) -> int:
        """Bytes of memory that a tensor will take once it is loaded: known before, to see whether all fits."""
        ...

    def load_vector(self, weight: Weight) -> Any:
        """Keeps a vector (a norm's weight), in float32."""
        ...

    def load_embedding(self, weight: Weight, packed: Linear | None = None) -> Any:
        """Keeps an embedding table [n_vocab, d] for row look-up, in memory of the process's own.

        ``packed`` is what `load_linear` made of the same tensor, where the model shares it with its output: the
        rows are then taken from there.
        """
        ...


class Ops(Protocol):
    """What a model runs on.  Operations are for the inside of forward passes, the rest is for whoever loads it."""

    @property
    def name(self) -> str:
        """ "reference", "cpu", …"""
        ...

    @property
    def page_size(self) -> int:
        """Tokens in a page of the KV cache."""
        ...

    @property
    def most_choices(self) -> int:
        """Largest logits that `Step.best` finds on a device, so that only they come from there; 0 where all logits
        lie in memory of the host anyway."""
        ...

    def at(self, place: Place) -> Loader:
        """What loads the tensors of a place; the same object for places whose tensors lie side by side."""
        ...

    def new_cache(self, shape: CacheShape, n_pages: int) -> KVCache: ...

    def cache_bytes(self, shape: CacheShape, n_pages: int) -> int:
        """Bytes of memory that such a cache takes: known before, to see whether all fits."""
        ...

    def compile(self, forward: Callable[[], Tensor], cache: KVCache, *, max_tokens: int, max_outputs: int) -> Step:
        """A step that runs ``forward`` over batches of at most ``max_tokens`` tokens, ``max_outputs`` outputs."""
        ...

    def embed(self, table: Any, scale: float = 1.0) -> Tensor:
        """Rows of the table for the batch's ids: [T, d]."""
        ...

    def rms_norm(self, x: Tensor, weight: Any, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last axis: [T, d].  Source: arXiv:1910.07467."""
        ...

    def linear(self, x: Tensor, weight: Linear, residual: Tensor | None = None) -> Tensor:
        """x @ W.T + bias (+ residual, which is consumed: it must not be used afterwards): [T, n_out]."""
        ...

    def linears(self, x: Tensor, weights: Sequence[Linear]) -> list[Tensor]:
        """Several matrices over one input, such as query, key and value, or gate and up."""
        ...

    def rope_append(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: Rope | None,
        layer: int,
        *,
        q_norm: Any | None = None,
        k_norm: Any | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Norms each head of q and k where weights are given, rotates both, appends k and v to the cache.

        Takes q [T, H * head_dim], k and v [T, G * head_dim] (all consumed); returns the rotated q.
        """
        ...

    def attention(
        self,
        q: Tensor,
        layer: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Any | None = None,
    ) -> Tensor:
        """Causal attention of q [T, H * head_dim] over the cache, of the last ``window`` positions if given.

        A token sees the positions max(0, p - window + 1) … p of its sequence.  With ``softcap``, scores s (scaled)
        become softcap * tanh(s / softcap).  With ``sinks`` [H], as `load_vector` keeps them, the softmax of each
        query head has one more score, that one, which takes its share and adds no value.

        Sources: arXiv:2205.14135; soft-cap: Gemma 2, arXiv:2408.00118; sinks: gpt-oss, after arXiv:2309.17453.
        """
        ...

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up: [T, f]; ``activation`` is "silu" or "gelu" (tanh).  Source: arXiv:2002.05202."""
        ...

    def route(self, logits: Tensor, k: int, *, normalise: bool, scale: float = 1.0) -> Routing:
        """The k experts that each token goes to: those of its largest logits [T, E], of equals the lowest first.

        Their shares are the softmax over all experts, times ``scale``; or with ``normalise`` over those k alone.
        All layers of a forward pass have the same E and k.  Source: arXiv:2401.04088 (Mixtral).
        """
        ...

    def expert_linears(self, x: Tensor, weights: Sequence[Experts], routing: Routing) -> list[Tensor]:
        """Each token of x [T, d] times several matrices, such as gate and up, of each expert that it goes to.

        Returns a row for each token and expert, in an order of the backend's own, which `gated` and `expert_output`
        can be given.
        """
        ...

    def expert_output(self, h: Tensor, weight: Experts, routing: Routing, residual: Tensor) -> Tensor:
        """Each row of h times the matrix of its expert; of each token the sum by shares, plus residual: [T, n_out].

        ``residual`` is consumed.  A token's best expert is added up first.
        """
        ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap), of logits: [N, n_vocab].  Source: Gemma 2, arXiv:2408.00118."""
        ...

    def outputs(self, x: Tensor) -> Tensor:
        """The rows of x [T, d] whose logits are wanted: [N, d]."""
        ...


class Backend(Ops, Loader, Protocol):
    """Kernels on one device: all of a model can lie there, or some of its layers.

    With the operations goes one more, which only the forward function of a part uses, and first of all.
    """

    most_choices: int = 0

    def step_bytes(self, sizes: StepSizes) -> tuple[int, int] | None:
        """Bytes of the device's own memory that a step takes: for its layers, and for its logits where the output
        matrix is.  None of a backend in memory of the host."""
        return None

    def at(self, place: Place) -> Self:
        """Itself: here all places lie side by side."""
        return self

    def compile_part(
        self, forward: Callable[[], Tensor], cache: KVCache, *, max_tokens: int, max_outputs: int
    ) -> Part:
        """As `compile`, of a ``forward`` that may begin with `hidden`, and end with hidden states."""
        ...

    def hidden(self, width: int) -> Tensor:
        """The hidden states [T, width] that the part is called with."""
        ...
