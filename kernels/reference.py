"""Plain numpy: every operation as its formula reads.  Slow, and the truth that other backends are tested against.

Matrices are dequantised to float32 when they are loaded; activations are never quantised.  Every token is
computed by itself, so that it has the same bits in whatever batch it comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.checks import check_choice, check_gate, check_sinks, check_softcap
from localllm.kernels.embedding import CopiedTable, EmbeddingTable
from localllm.kernels.interpreter import ACTIVATIONS, in_q8_0, in_range, rotate, soft_capped, softmax
from localllm.kernels.ops import (
    Backend,
    Batch,
    CacheShape,
    Experts,
    Hidden,
    HostHidden,
    KVCache,
    Linear,
    Part,
    Rope,
    Routing,
    Step,
    Tensor,
    Weight,
    WholeStep,
    Widening,
    hidden_rows,
)
from localllm.quant.formats import dequantize
from localllm.quant.types import GGMLType

#: float32; numpy's stubs lose the type in most expressions.
Array = NDArray[Any]


@dataclass(frozen=True)
class ReferenceLinear:
    matrix: Array  # [n_out, n_in]
    bias: Array | None
    n_in: int
    n_out: int
    format: str = "F32"
    n_bytes: int = 0


@dataclass(frozen=True)
class ReferenceExperts:
    matrices: Array  # [E, n_out, n_in]
    n_experts: int
    n_in: int
    n_out: int
    format: str = "F32"
    n_bytes: int = 0


@dataclass(frozen=True)
class ReferenceRouting:
    ids: Array  # [T, k]
    shares: Array


@dataclass(frozen=True)
class ReferenceCache:
    keys: Array  # [n_layers, n_pages, page_size, G, head_dim]
    values: Array
    page_size: int
    n_pages: int
    n_bytes: int
    #: Rounds [..., head_dim] to what the cache's type can say, in the arrays' type.
    rounded: Callable[[Array, np.dtype[Any]], Array]

    def copy_page(self, source: int, target: int) -> None:
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]


class ReferenceOps(Backend):
    """The `Ops` protocol in plain numpy.

    With a float32 cache it computes as if a model's attention had no cache at all, which is what independent
    implementations are compared with; backends are compared with the float16 cache, which they have too.
    """

    name = "reference"
    page_size = 16

    _batch: Batch
    _cache: ReferenceCache
    _hidden: Hidden | None

    def __init__(self, f16_dtype: type[np.float16] | type[np.float32] = np.float16) -> None:
        """``f16_dtype``: numpy's type of what a cache of type "f16" holds."""
        self._f16_dtype = f16_dtype
        self._in_step = threading.Lock()  # models that share the backend may run in several threads

    def load_linear(self, weight: Weight, bias: Weight | None = None, *, widening: Widening | None = None) -> Linear:
        matrix = dequantize(weight.data, weight.type).reshape(weight.shape)
        return ReferenceLinear(
            matrix=matrix,
            bias=None if bias is None else self.load_vector(bias),
            n_in=matrix.shape[1],
            n_out=matrix.shape[0],
            n_bytes=matrix.nbytes,
        )

    def load_experts(self, weight: Weight, *, widening: Widening | None = None) -> Experts:
        matrices = dequantize(weight.data, weight.type).reshape(weight.shape)
        n_experts, n_out, n_in = matrices.shape
        return ReferenceExperts(matrices, n_experts, n_in, n_out, n_bytes=matrices.nbytes)

    def packed_bytes(self, weight: Weight) -> int:
        return 4 * prod(weight.shape)

    def load_vector(self, weight: Weight) -> Array:
        return dequantize(weight.data, weight.type).reshape(-1)

    def load_embedding(self, weight: Weight, packed: Linear | None = None) -> EmbeddingTable:
        if isinstance(packed, ReferenceLinear):
            return CopiedTable(GGMLType.F32, (packed.n_out, packed.n_in), packed.matrix.view(np.uint8))
        return CopiedTable.of(weight)

    def new_cache(self, shape: CacheShape, n_pages: int) -> ReferenceCache:
        size = (shape.n_layers, n_pages, self.page_size, shape.n_kv_heads, shape.head_dim)
        kind = self._kept_dtype(shape)
        keys, values = np.zeros(size, kind), np.zeros(size, kind)
        rounded = in_range if shape.type == "f16" else in_q8_0
        return ReferenceCache(keys, values, self.page_size, n_pages, keys.nbytes + values.nbytes, rounded)

    def cache_bytes(self, shape: CacheShape, n_pages: int) -> int:
        n_values = 2 * shape.n_layers * n_pages * self.page_size * shape.n_kv_heads * shape.head_dim
        return n_values * np.dtype(self._kept_dtype(shape)).itemsize

    def _kept_dtype(self, shape: CacheShape) -> type[np.float16] | type[np.float32]:
        """What a cache holds; values of a type with scales are kept as the numbers that they stand for."""
        return self._f16_dtype if shape.type == "f16" else np.float32

    def compile(self, forward: Callable[[], Tensor], cache: KVCache, *, max_tokens: int, max_outputs: int) -> Step:
        part = self.compile_part(forward, cache, max_tokens=max_tokens, max_outputs=max_outputs)
        return WholeStep(part)

    def compile_part(
        self, forward: Callable[[], Tensor], cache: KVCache, *, max_tokens: int, max_outputs: int
    ) -> Part:
        if not isinstance(cache, ReferenceCache):
            raise KernelError(f"the reference backend cannot use a {type(cache).__name__}")
        bound = cache

        def part(batch: Batch, hidden: Hidden | None) -> HostHidden:
            # Weights of any size make numbers of any size: the results are then what IEEE 754 says, as on others.
            with self._in_step, np.errstate(all="ignore"):
                self._batch, self._cache, self._hidden = batch, bound, hidden
                return HostHidden(forward())

        return part

    def hidden(self, width: int) -> Array:
        return hidden_rows(self._hidden, len(self._batch.ids), width)

    def embed(self, table: EmbeddingTable, scale: float = 1.0) -> Array:
        return table.rows(self._batch.ids) * np.float32(scale)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        mean_square: Array = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + np.float32(eps)) * weight

    def linear(self, x: Array, weight: Linear, residual: Array | None = None) -> Array:
        if not isinstance(weight, ReferenceLinear):
            raise KernelError(f"the reference backend cannot use a {type(weight).__name__}")
        # A product of matrix and vector a token: a product of matrices adds in an order that depends on T.
        y: Array = np.matmul(weight.matrix, x[:, :, None])[:, :, 0]
        if weight.bias is not None:
            y += weight.bias
        return y if residual is None else y + residual

    def linears(self, x: Array, weights: Sequence[Linear]) -> list[Array]:
        return [self.linear(x, weight) for weight in weights]

    def rope_append(
        self,
        q: Array,
        k: Array,
        v: Array,
        rope: Rope | None,
        layer: int,
        *,
        q_norm: Array | None = None,
        k_norm: Array | None = None,
        eps: float = 0.0,
    ) -> Array:
        head_dim = self._cache.keys.shape[-1]
        q, k, v = (a.reshape(len(a), -1, head_dim) for a in (q, k, v))  # [T, heads, head_dim]
        if q_norm is not None:
            q = self.rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = self.rms_norm(k, k_norm, eps)
        if rope is not None:
            q, k = (rotate(a, self._batch.positions, rope) for a in (q, k))
        for s in range(len(self._batch.kv_lengths)):
            rows = slice(self._batch.query_starts[s], self._batch.query_starts[s + 1])
            page, slot = np.divmod(self._batch.positions[rows], self.page_size)
            page = self._batch.block_tables[s, page]
            kind = self._cache.keys.dtype
            self._cache.keys[layer, page, slot] = self._cache.rounded(k[rows], kind)
            self._cache.values[layer, page, slot] = self._cache.rounded(v[rows], kind)
        return q.reshape(len(q), -1)

    def attention(
        self,
        q: Array,
        layer: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        _, _, _, n_kv_heads, head_dim = self._cache.keys.shape
        heads = q.reshape(len(q), n_kv_heads, -1, head_dim)  # [T, G, H / G, head_dim]
        check_softcap(softcap)
        if sinks is not None:
            check_sinks(len(sinks), q.shape[1] // head_dim)
            sinks = sinks.reshape(n_kv_heads, -1, 1)
        out = np.empty_like(heads)
        for s, table in enumerate(self._batch.block_tables):
            for t in range(self._batch.query_starts[s], self._batch.query_starts[s + 1]):
                stop = int(self._batch.positions[t]) + 1
                seen = np.arange(max(0, stop - (window or stop)), stop)
                page, slot = table[seen // self.page_size], seen % self.page_size
                keys, values = (
                    a[layer, page, slot] for a in (self._cache.keys, self._cache.values)
                )  # [L, G, head_dim]
                scores = np.einsum("ghd,lgd->ghl", heads[t], keys.astype(np.float32)) * np.float32(scale)
                if softcap is not None:
                    scores = soft_capped(scores, softcap)
                if sinks is not None:
                    scores = np.concatenate([scores, sinks], axis=-1)
                weights = softmax(scores)[..., : len(seen)]
                out[t] = np.einsum("ghl,lgd->ghd", weights, values.astype(np.float32))
        return out.reshape(len(q), -1)

    def gated(self, gate: Array, up: Array, activation: str) -> Array:
        check_gate(gate.shape[1], up.shape[1], activation, ACTIVATIONS)
        return ACTIVATIONS[activation](gate) * up

    def route(self, logits: Array, k: int, *, normalise: bool, scale: float = 1.0) -> ReferenceRouting:
        check_choice(k, logits.shape[1])
        ids = np.argsort(-logits, axis=1, kind="stable")[:, :k]
        shares = softmax(np.take_along_axis(logits, ids, axis=1) if normalise else logits)
        return ReferenceRouting(ids, (shares if normalise else np.take_along_axis(shares, ids, axis=1)) * scale)

    def expert_linears(self, x: Array, weights: Sequence[Experts], routing: Routing) -> list[Array]:
        k = routing.ids.shape[1]
        return [_expert_products(np.repeat(x, k, axis=0), weight, routing) for weight in weights]

    def expert_output(self, h: Array, weight: Experts, routing: Routing, residual: Array) -> Array:
        products = _expert_products(h, weight, routing).reshape(*routing.ids.shape, -1)  # [T, k, n_out]
        total = np.zeros_like(residual)
        for rank in range(routing.ids.shape[1]):
            total += routing.shares[:, rank, None] * products[:, rank]
        y: Array = total + residual
        return y

    def softcap(self, x: Array, cap: float) -> Array:
        check_softcap(cap)
        return soft_capped(x, cap)

    def outputs(self, x: Array) -> Array:
        rows: Array = x[self._batch.outputs]
        return rows


def _expert_products(rows: Array, weight: Experts, routing: ReferenceRouting) -> Array:
    """Rows [T * k, n_in], each times the matrix of its expert."""
    if not isinstance(weight, ReferenceExperts):
        raise KernelError(f"the reference backend cannot use a {type(weight).__name__}")
    pairs = zip(rows, routing.ids.reshape(-1), strict=True)
    products = [weight.matrices[expert] @ row for row, expert in pairs]
    return np.array(products, np.float32).reshape(len(rows), weight.n_out)
