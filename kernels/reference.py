"""Plain numpy: every operation as its formula reads.  Slow, and the truth that other backends are tested against.

Weights are decoded to float32 when they are loaded; activations are never quantised.  Every token is computed by
itself, so that it has the same bits in whatever batch it comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.kernels import graph as g
from localllm.kernels.backend import (
    Backend,
    Batch,
    Footprint,
    HostOutput,
    Output,
    PackedWeight,
    Progress,
    Step,
    WeightUse,
    check_operations,
    input_rows,
    weights_of,
)
from localllm.kernels.buffers import Buffer, assign
from localllm.kernels.embedding import CopiedTable
from localllm.kernels.graph import (
    Graph,
    KVCache,
    Rope,
    Rows,
    Tensor,
    Value,
    Weight,
)
from localllm.kernels.q8_0 import LARGEST_CODE, LARGEST_SCALED, NEGLIGIBLE, VALUES_PER_SCALE
from localllm.quant.formats import dequantize

#: float32; numpy's stubs lose the type in most expressions.
Array = NDArray[Any]


class ReferenceBackend(Backend):
    """Interprets graphs in plain numpy.

    With a cache of type "f32" it computes as if a model's attention had no cache at all, which is what independent
    implementations are compared with; backends are compared with a float16 cache, which they have too.
    """

    name = "reference"
    page_size = 16

    def footprint(self, graph: Graph, *, n_pages: int, max_tokens: int, max_outputs: int) -> Footprint:
        check_operations(graph, _OPERATIONS, self.name)
        n_rows = {Rows.TOKENS: max_tokens, Rows.OUTPUTS: max_outputs, Rows.CHOSEN: max_tokens * graph.n_chosen()}
        tensors = {x for node in graph.nodes for x in node.operation.results}
        buffers = {x: Buffer(4 * n_rows[x.rows] * x.width) for x in tensors if isinstance(x, Tensor)}
        stages = [
            [buffers[x] for x in (*node.operation.inputs, *node.operation.results) if isinstance(x, Tensor)]
            for node in graph.nodes
        ]
        caches = {
            layer: sum(map(prod, _kept_shapes(cache, n_pages, self.page_size))) * _kept_type(cache)().itemsize
            for layer, cache in graph.caches.items()
        }
        return Footprint(tuple(map(_packed, weights_of(graph))), caches, assign(stages))

    def compile(
        self, graph: Graph, *, n_pages: int, max_tokens: int, max_outputs: int, progress: Progress | None = None
    ) -> ReferenceStep:
        check_operations(graph, _OPERATIONS, self.name)
        return ReferenceStep(graph, n_pages, self.page_size, (max_tokens, max_outputs), progress)


def _packed(use: WeightUse) -> PackedWeight:
    """A weight as the reference holds it: a table as the file has it, anything else in float32."""
    weight = use.weight
    if use.is_operand:
        return use.packed("F32", 4 * prod(weight.shape))
    return use.packed(weight.type.name, weight.data.nbytes)


def _kept_type(cache: KVCache) -> type[np.float16] | type[np.float32]:
    """What a cache holds; values of a type with scales are kept as the numbers that they stand for."""
    return np.float16 if cache.type == "f16" else np.float32


def _kept_shapes(cache: KVCache, n_pages: int, page_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of keys and of values; of none, where they are in the keys."""
    return (
        (n_pages, page_size, cache.n_heads, cache.key_dim),
        (n_pages, page_size, cache.n_heads, 0 if cache.values_in_keys else cache.value_dim),
    )


@dataclass(frozen=True)
class ReferencePages:
    """Of each layer, keys [n_pages, page_size, G, key_dim] and values."""

    layers: dict[int, tuple[Array, Array]]
    page_size: int
    n_pages: int

    @property
    def n_bytes(self) -> int:
        return sum(part.nbytes for parts in self.layers.values() for part in parts)

    def copy_page(self, source: int, target: int) -> None:
        for parts in self.layers.values():
            for part in parts:
                part[target] = part[source]


class ReferenceStep(Step):
    """Computes node after node."""

    cache: ReferencePages

    def __init__(
        self, graph: Graph, n_pages: int, page_size: int, limits: tuple[int, int], progress: Progress | None
    ) -> None:
        self._graph, self._limits = graph, limits
        self._last_uses = graph.last_uses()
        self._in_step = threading.Lock()
        kept: dict[int, tuple[Array, Array]] = {}
        for n, cache in graph.caches.items():
            keys, values = _kept_shapes(cache, n_pages, page_size)
            kept[n] = np.zeros(keys, _kept_type(cache)), np.zeros(values, _kept_type(cache))
        self.cache = ReferencePages(kept, page_size, n_pages)
        self._arrays: dict[Weight, Array] = {}
        self._tables: dict[Weight, CopiedTable] = {}
        uses = weights_of(graph)
        for use in uses:
            weight = use.weight
            if not use.is_operand:
                self._tables[weight] = CopiedTable.of(weight)
            else:
                self._arrays[weight] = dequantize(weight.data, weight.type).reshape(weight.shape)
            weight.drop_pages()
            if progress is not None:
                progress(weight)
        self.weights = tuple(map(_packed, uses))

    def run(self, batch: Batch, hidden: Output | None = None) -> Output:
        batch.check_size(*self._limits)
        batch.check(self.cache.page_size, self.cache.n_pages)
        # Weights of any size make numbers of any size: the results are then what IEEE 754 says, as on others.
        with self._in_step, np.errstate(all="ignore"):
            run = _Run(batch, hidden, self.cache, self._arrays, self._tables)
            for i, node in enumerate(self._graph.nodes):
                operation = node.operation
                result = _OPERATIONS[type(operation)](run, operation)
                run.values.update(zip(operation.results, result if type(result) is tuple else [result], strict=True))
                for x in {*operation.inputs, *operation.results}:
                    if self._last_uses[x] == i:
                        del run.values[x]
            return HostOutput(run.values[self._graph.result])


@dataclass(frozen=True)
class ChosenExperts:
    """The experts that each token goes to [T, k], and their weights."""

    ids: Array
    weights: Array


@dataclass
class _Run:
    """A batch on its way through a graph: the operations, each as its formula reads."""

    batch: Batch
    hidden: Output | None
    cache: ReferencePages
    arrays: Mapping[Weight, Array]
    tables: Mapping[Weight, CopiedTable]
    values: dict[Value, Any] = field(default_factory=dict)

    def input(self, op: g.Input) -> Array:
        return input_rows(self.hidden, len(self.batch.ids), op.x.width)

    def embed(self, op: g.Embed) -> Array:
        self.batch.check_ids(op.table.shape[0])
        ids, table = self.batch.ids, self.tables.get(op.table)
        rows: Array = self.arrays[op.table][ids] if table is None else table.rows(ids)
        return rows * np.float32(op.scale)

    def rms_norm(self, op: g.RMSNorm) -> Array:
        return normed(self.values[op.x], self.arrays[op.weight], op.eps)

    def linear(self, op: g.Linear) -> Array:
        y = self._product(op.x, op.matrix)
        return y if op.residual is None else y + self.values[op.residual]

    def linears(self, op: g.Linears) -> tuple[Array, ...]:
        return tuple(self._product(op.x, matrix) for matrix in op.matrices)

    def _product(self, x: Tensor, matrix: g.Matrix) -> Array:
        # A product of matrix and vector a token: a product of matrices adds in an order that depends on T.
        y: Array = np.matmul(self.arrays[matrix.weight], self.values[x][:, :, None])[:, :, 0]
        if matrix.bias is not None:
            y += self.arrays[matrix.bias]
        return y

    def rope_append(self, op: g.RopeAppend) -> Array:
        batch, page_size, cache = self.batch, self.cache.page_size, op.cache
        q = self._turned(op.q, cache.key_dim, op.q_norm, op.rope, norm_last=op.norm_last)
        if op.q_scale is not None:
            q = q * position_factors(op.q_scale, batch.positions)[:, None, None]
        k = None if op.k is None else self._turned(op.k, cache.key_dim, op.k_norm, op.rope, norm_last=op.norm_last)
        v = None if op.v is None else self._turned(op.v, cache.value_dim, op.v_norm, None)
        rounded = in_q8_0 if cache.type == "q8_0" else in_range
        for x, kept in zip((k, v), self.cache.layers[cache.layer], strict=True):
            if x is None:
                continue
            for s, (start, stop, _) in enumerate(batch.sequences()):
                page, place = np.divmod(batch.positions[start:stop], page_size)
                kept[batch.block_tables[s, page], place] = rounded(x[start:stop], kept.dtype)
        turned: Array = q.reshape(len(q), -1)
        return turned

    def _turned(
        self, x: Tensor, dim: int, norm: g.HeadNorm | None, rope: Rope | None, *, norm_last: bool = False
    ) -> Array:
        """Heads of ``dim`` values [T, n, dim], normed and rotated in one order or the other."""
        y: Array = self.values[x].reshape(-1, x.width // dim, dim)
        if rope is not None and norm_last:
            y = rotate(y, self.batch.positions, rope)
        if norm is not None:
            weight = np.ones(dim, np.float32) if norm.weight is None else self.arrays[norm.weight]
            first, rest = np.split(y, [len(weight)], axis=-1)
            y = np.concatenate([normed(first, weight, norm.eps), rest], axis=-1)
        return rotate(y, self.batch.positions, rope) if rope is not None and not norm_last else y

    def attention(self, op: g.Attention) -> Array:
        batch, cache = self.batch, op.cache
        keys, values = self.cache.layers[cache.layer]
        if cache.values_in_keys:
            values = keys[..., : cache.value_dim]
        q = self.values[op.q].reshape(-1, cache.n_heads, op.group_size, cache.key_dim)  # [T, G, H / G, key_dim]
        sinks = None if op.sinks is None else self.arrays[op.sinks].reshape(cache.n_heads, -1, 1)
        out: Array = np.empty((*q.shape[:3], cache.value_dim), np.float32)
        for s, (start, stop, kv_length) in enumerate(batch.sequences()):
            for t in range(start, stop):
                position = int(batch.positions[t])
                reach = op.window or kv_length
                begin = position - position % op.chunk if op.chunk else max(0, position - reach + 1)
                seen = np.arange(begin, position + 1 if op.causal else min(kv_length, position + reach))
                page, place = batch.block_tables[s, seen // self.cache.page_size], seen % self.cache.page_size
                own_keys, own_values = (
                    part[page, place].astype(np.float32) for part in (keys, values)
                )  # [L, G, dim]
                scores = np.einsum("ghd,lgd->ghl", q[t], own_keys) * np.float32(op.scale)
                if op.softcap is not None:
                    scores = soft_capped(scores, op.softcap)
                if sinks is not None:
                    scores = np.concatenate([scores, sinks], axis=-1)
                out[t] = np.einsum("ghl,lgd->ghd", softmax(scores)[..., : len(seen)], own_values)
        return out.reshape(len(q), -1)

    def gated(self, op: g.Gated) -> Array:
        y: Array = ACTIVATIONS[op.activation](self.values[op.gate]) * self.values[op.up]
        return y

    def route(self, op: g.Route) -> ChosenExperts:
        logits = self.values[op.logits]
        ids = np.argsort(-logits, axis=1, kind="stable")[:, : op.k]
        if op.norm_topk_prob:
            weights = softmax(np.take_along_axis(logits, ids, axis=1))
        else:
            weights = np.take_along_axis(softmax(logits), ids, axis=1)
        return ChosenExperts(ids, weights * op.scale)

    def expert_linears(self, op: g.ExpertLinears) -> tuple[Array, ...]:
        rows = np.repeat(self.values[op.x], op.routing.k, axis=0)
        return tuple(self._expert_product(rows, experts, op.routing) for experts in op.experts)

    def expert_output(self, op: g.ExpertOutput) -> Array:
        routing, residual = self.values[op.routing], self.values[op.residual]
        products = self._expert_product(self.values[op.h], op.experts, op.routing).reshape(*routing.ids.shape, -1)
        total = np.zeros_like(residual)  # [T, d], of products [T, k, d]
        for rank in range(op.routing.k):
            total += routing.weights[:, rank, None] * products[:, rank]
        y: Array = total + residual
        return y

    def _expert_product(self, rows: Array, experts: Weight, routing: g.Routing) -> Array:
        """Rows [T * k, n_in], each times the matrix of its expert."""
        matrices = self.arrays[experts]
        pairs = zip(rows, self.values[routing].ids.reshape(-1), strict=True)
        return np.array([matrices[expert] @ row for row, expert in pairs], np.float32).reshape(-1, matrices.shape[1])

    def softcap(self, op: g.Softcap) -> Array:
        return soft_capped(self.values[op.x], op.cap)

    def outputs(self, op: g.Outputs) -> Array:
        rows: Array = self.values[op.x][self.batch.outputs]
        return rows


_OPERATIONS: dict[type[g.Operation[Any]], Callable[[_Run, Any], Any]] = {
    g.Input: _Run.input,
    g.Embed: _Run.embed,
    g.RMSNorm: _Run.rms_norm,
    g.Linear: _Run.linear,
    g.Linears: _Run.linears,
    g.RopeAppend: _Run.rope_append,
    g.Attention: _Run.attention,
    g.Gated: _Run.gated,
    g.Route: _Run.route,
    g.ExpertLinears: _Run.expert_linears,
    g.ExpertOutput: _Run.expert_output,
    g.Softcap: _Run.softcap,
    g.Outputs: _Run.outputs,
}


# -- Formulas --------------------------------------------------------------------------------------------------------


def normed(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x²) + eps) * weight."""
    mean_square: Array = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(eps)) * weight


def rotate(x: Array, positions: NDArray[np.int32], rope: Rope) -> Array:
    """Rotates the heads x [T, heads, head_dim] to their positions [T]."""
    angles = positions[:, None].astype(np.float64) * rope.frequencies  # [T, n_rot / 2]
    cos, sin = ((f(angles) * rope.magnitude).astype(np.float32)[:, None] for f in (np.cos, np.sin))
    begin, n_pairs = rope.first, len(rope.frequencies)
    end = begin + 2 * n_pairs
    if rope.interleaved:
        first, second = slice(begin, end, 2), slice(begin + 1, end, 2)
    else:
        first, second = slice(begin, begin + n_pairs), slice(begin + n_pairs, end)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def position_factors(scale: g.PositionScale, positions: NDArray[np.int32]) -> NDArray[np.float32]:
    """What queries at these positions are multiplied with."""
    factors = 1 + scale.rate * np.log1p((positions + scale.offset) // scale.length)
    return np.asarray(factors, np.float32)


def in_range(x: Array, kind: np.dtype[Any]) -> Array:
    """What is beyond the range of ``kind`` becomes its largest finite value, so that 0 * x stays 0."""
    limit = np.float32(np.finfo(kind).max)
    return np.clip(x, -limit, limit)


def in_q8_0(x: Array, kind: np.dtype[Any]) -> Array:
    """Groups of 32 values of each head, rounded to bytes times a float16 scale, as GGML's Q8_0 (ties to even)."""
    head_dim = x.shape[-1]
    padded = np.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, -head_dim % VALUES_PER_SCALE)])
    groups = padded.reshape(*x.shape[:-1], -1, VALUES_PER_SCALE)
    largest = np.minimum(np.abs(groups).max(axis=-1, keepdims=True), LARGEST_SCALED)
    inverse = np.where(largest > NEGLIGIBLE, LARGEST_CODE / largest, np.float32(0))
    codes = np.clip(np.rint(groups * inverse), -LARGEST_CODE, LARGEST_CODE)
    scale = in_range(largest / LARGEST_CODE, np.dtype(np.float16)).astype(np.float16).astype(kind)
    rounded: Array = (codes * scale).reshape(*x.shape[:-1], -1)[..., :head_dim]
    return rounded


def softmax(x: Array) -> Array:
    """exp(x) / sum(exp(x)) over the last axis."""
    e: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    total: Array = e.sum(axis=-1, keepdims=True)
    return e / total


def soft_capped(x: Array, cap: float) -> Array:
    """cap * tanh(x / cap)."""
    y: Array = np.float32(cap) * np.tanh(x / np.float32(cap))
    return y


def silu(x: Array) -> Array:
    """x * sigmoid(x).  Source: arXiv:1702.03118."""
    with np.errstate(over="ignore"):  # exp(-x) may be inf: the result is then -0
        y: Array = x / (1 + np.exp(-x))
    return y


def gelu(x: Array) -> Array:
    """The tanh form, which GGML uses throughout.  Source: arXiv:1606.08415."""
    y: Array = 0.5 * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)))
    return y


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": silu, "gelu": gelu}
