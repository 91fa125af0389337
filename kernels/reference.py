"""Reference backend in plain numpy. Every operation follows its formula; other backends are tested against it.

Weights are decoded to float32 when loaded, and activations are never quantised. Every token is computed separately,
so that it has the same bits in every batch.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.kernels import graph as g, operations as ops
from localllm.kernels.backend import (
    Backend,
    Batch,
    Footprint,
    HostCache,
    HostOutput,
    Output,
    PackedWeight,
    Progress,
    Step,
    WeightUse,
    check_cache,
    check_operations,
    input_rows,
    weights_of,
)
from localllm.kernels.buffers import Buffer, assign
from localllm.kernels.cache_rounding import CODE_BITS, LARGEST_CODE, LARGEST_HALF, NEGLIGIBLE, VALUES_PER_SCALE
from localllm.kernels.embedding import CopiedTable, NgramRows
from localllm.kernels.graph import Graph, Tensor
from localllm.kernels.operations.experts import SPARSEMIXER_DISTANCE
from localllm.kernels.operations.recurrent import side_by_side
from localllm.quant.formats import dequantize
from localllm.quant.lut import LUTType, dequantize_lut

#: float32, which numpy's stubs lose in most expressions.
Array = NDArray[Any]


class ReferenceBackend(Backend):
    """Interprets graphs in plain numpy.

    With a cache of type "f32", attention is computed as without a cache, for comparison with independent
    implementations. Other backends are compared with a float16 cache, which they also support.
    """

    name = "reference"
    page_size = 16

    def footprint(
        self, graph: Graph, *, n_pages: tuple[int, ...], max_tokens: int, max_outputs: int, n_states: int = 0
    ) -> Footprint:
        check_operations(graph, _Run, self.name)
        check_cache(graph, n_pages, n_states)
        n_rows = {
            g.Rows.TOKENS: max_tokens,
            g.Rows.OUTPUTS: max_outputs,
            g.Rows.CHOSEN: max_tokens * graph.n_chosen(),
        }
        tensors = {x for node in graph.nodes for x in node.operation.results}
        buffers = {x: Buffer(4 * n_rows[x.rows] * x.width) for x in tensors if isinstance(x, Tensor)}
        stages = [
            [buffers[x] for x in (*node.operation.inputs, *node.operation.results) if isinstance(x, Tensor)]
            for node in graph.nodes
        ]
        caches: dict[int, int] = {}
        for c in graph.caches.values():
            shapes = zip(_kept_shapes(c, n_pages[graph.group(c)], self.page_size), _kept_types(c), strict=True)
            caches[c.layer] = caches.get(c.layer, 0) + sum(prod(shape) * type.itemsize for shape, type in shapes)
        for layer, states in graph.states.items():
            caches[layer] = caches.get(layer, 0) + sum(4 * n_states * state.n_values for state in states)

        def load(progress: Progress | None) -> ReferenceStep:
            return ReferenceStep(graph, n_pages, n_states, self.page_size, (max_tokens, max_outputs), progress)

        return Footprint(tuple(map(_packed, weights_of(graph))), caches, assign(stages), load)


def _packed(use: WeightUse) -> PackedWeight:
    """Return a weight as this backend stores it: tables in the file's format, other weights in float32."""
    weight = use.weight
    if use.is_operand:
        return use.packed("F32", 4 * prod(weight.shape))
    return use.packed(weight.type.name, weight.data.nbytes)


def _kept_types(cache: g.KVCache) -> list[np.dtype[Any]]:
    """Return the dtypes of a cache's keys and values. Types with scales are stored decoded."""
    return [np.dtype(np.float16 if type == "f16" else np.float32) for type in cache.types]


def _kept_shapes(cache: g.KVCache, n_pages: int, page_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of keys and of values; values are empty if the keys contain them."""
    return (
        (n_pages, cache.page_rows(page_size), cache.n_heads, cache.key_dim),
        (n_pages, cache.page_rows(page_size), cache.n_heads, 0 if cache.values_in_keys else cache.value_dim),
    )


@dataclass(frozen=True)
class ReferenceCache(HostCache):
    """Keys [n_pages, page_size, G, key_dim] and values of each layer, and each state [n_states, …]."""

    graph: Graph
    layers: dict[int, tuple[Array, Array]]
    page_size: int
    n_pages: tuple[int, ...]
    states: dict[g.RecurrentState, Array]
    n_states: int

    @property
    def windows(self) -> list[int | None]:
        return self.graph.windows

    @property
    def n_bytes(self) -> int:
        pages = sum(array.nbytes for arrays in self.layers.values() for array in arrays)
        return pages + sum(state.nbytes for state in self.states.values())

    def _arrays(self, group: int | None, number: int) -> list[Array]:
        if group is None:
            return [state[number] for state in self.states.values()]
        layers = [self.layers[n] for n, cache in self.graph.caches.items() if self.graph.group(cache) == group]
        return [array[number] for arrays in layers for array in arrays]


class ReferenceStep(Step):
    """Computes the nodes in order."""

    cache: ReferenceCache

    def __init__(
        self,
        graph: Graph,
        n_pages: tuple[int, ...],
        n_states: int,
        page_size: int,
        limits: tuple[int, int],
        progress: Progress | None,
    ) -> None:
        self._graph, self._limits = graph, limits
        self._last_uses = graph.last_uses()
        self._in_step = threading.Lock()
        #: Values of the last batch that later nodes did not overwrite.
        self._values: dict[g.Value, Any] = {}
        layers: dict[int, tuple[Array, Array]] = {}
        for n, cache in graph.caches.items():
            shapes = _kept_shapes(cache, n_pages[graph.group(cache)], page_size)
            keys, values = map(np.zeros, shapes, _kept_types(cache))
            layers[n] = keys, values
        states = {s: np.zeros((n_states, *s.shape), np.float32) for of in graph.states.values() for s in of}
        self.cache = ReferenceCache(graph, layers, page_size, n_pages, states, n_states if states else 0)
        self._arrays: dict[g.Weight, Array] = {}
        self._tables: dict[g.Weight, CopiedTable] = {}
        operations = [node.operation for node in graph.nodes]
        self._ngrams = {op: NgramRows(op) for op in operations if isinstance(op, ops.NgramEmbed)}
        uses = weights_of(graph)
        for use in uses:
            weight = use.weight
            if not use.is_operand:
                self._tables[weight] = CopiedTable.of(weight)
            else:
                decode: Any = dequantize_lut if isinstance(weight.type, LUTType) else dequantize
                self._arrays[weight] = decode(weight.data, weight.type).reshape(weight.shape)
            weight.drop_pages()
            if progress is not None:
                progress(weight)
        self.weights = tuple(map(_packed, uses))

    def run(self, batch: Batch, hidden: Output | None = None) -> Output:
        batch.check_size(*self._limits)
        batch.check(self.cache, self._graph.n_joined)
        # Weights are unbounded, so results can overflow. They then follow IEEE 754, as on other backends.
        with self._in_step, np.errstate(all="ignore"):
            run = _Run(batch, hidden, self.cache, self._graph, self._arrays, self._tables, self._ngrams)
            for i, node in enumerate(self._graph.nodes):
                operation = node.operation
                run.values.update(operation.computed_by(run))
                for x in {*operation.inputs, *operation.results}:
                    if self._last_uses[x] == i:
                        del run.values[x]
            self._values = run.values
            return HostOutput(run.values[self._graph.result])

    def value(self, x: g.Value) -> Array:
        value = self._values[x]
        return value.ids.astype(np.int32) if isinstance(value, ChosenExperts) else value

    def variant(self, graph: Graph, max_tokens: int | None = None) -> ReferenceStep:
        step = copy(self)
        step._limits = max_tokens or self._limits[0], self._limits[1]
        step._graph, step._last_uses, step._values = graph, graph.last_uses(), {}
        return step


@dataclass(frozen=True)
class ChosenExperts:
    """The k experts of each token [T, k], and their weights."""

    ids: Array
    weights: Array


@dataclass
class _Run:
    """A batch in computation. Each operation is a method that follows its formula."""

    batch: Batch
    hidden: Output | None
    cache: ReferenceCache
    graph: Graph
    arrays: Mapping[g.Weight, Array]
    tables: Mapping[g.Weight, CopiedTable]
    ngrams: Mapping[ops.NgramEmbed, NgramRows]
    values: dict[g.Value, Any] = field(default_factory=dict)

    def input(self, op: ops.Input) -> Array:
        return input_rows(self.hidden, len(self.batch.ids), op)

    def embed(self, op: ops.Embed) -> Array:
        ids = self.batch.rows_of(op.table.shape[0], by_position=op.by_position)
        table = self.tables.get(op.table)
        rows: Array = self.arrays[op.table][ids] if table is None else table.rows(ids)
        if op.columns is not None:
            rows = rows[:, op.columns.start : op.columns.stop]
        rows = rows * np.float32(op.scale)
        if op.takes_rows and len(self.batch.embedded):
            rows[self.batch.embedded] = self.batch.embeddings_of(0, op.result.width)
        return rows

    def ngram_embed(self, op: ops.NgramEmbed) -> Array:
        return self.ngrams[op].rows(self.batch, self.cache.states[op.state])

    def add_rows(self, op: ops.AddRows) -> Array:
        x: Array = self.values[op.x]
        if len(self.batch.embedded):
            x[self.batch.embedded] += self.batch.embeddings_of(op.index, op.x.width)
        return x

    def host_edit(self, op: ops.HostEdit) -> Array:
        x: Array = self.values[op.x].copy()  # other values may be views of the same memory
        if self.batch.edit is not None:
            self.batch.edit(op.name, x, None if op.base is None else self.values[op.base])
        return x

    def adapter_weights(self, op: ops.AdapterWeights) -> Array:
        return op.rows(self.batch.adapters, len(self.batch.ids))

    def rms_norm(self, op: ops.RMSNorm) -> Array:
        x = self.values[op.x].reshape(-1, op.n_groups, op.x.width // op.n_groups)
        weight = np.float32(1) if op.weight is None else self.arrays[op.weight]
        if op.weight is not None and op.weight.shape == (op.x.width,):
            weight = weight.reshape(op.n_groups, -1)
        return normed(x, weight, op.eps).reshape(-1, op.x.width)

    def layer_norm(self, op: ops.LayerNorm) -> Array:
        x = self.values[op.x].reshape(-1, op.n_groups, op.x.width // op.n_groups)
        weight = self.arrays[op.weight].reshape(op.n_groups, -1)
        y = normed(x - x.mean(axis=-1, keepdims=True), weight, op.eps).reshape(-1, op.x.width)
        if op.bias is not None:
            y += self.arrays[op.bias]
        return y

    def add(self, op: ops.Add) -> Array:
        factor = np.float32(op.scale) if op.gate is None else np.float32(op.scale) * sigmoid(self.values[op.gate])
        return self.values[op.x] * factor + self.values[op.residual]

    def columns(self, op: ops.Columns) -> Array:
        return self.values[op.x][:, op.columns.start : op.columns.stop]

    def side_by_side(self, op: ops.SideBySide) -> Array:
        return np.concatenate([self.values[x] for x in op.tensors], axis=1)

    def mix_streams(self, op: ops.MixStreams) -> Array:
        x = self.values[op.x].reshape(-1, op.n, op.size)
        weights = np.zeros((len(x), op.result.width // op.size, op.n), np.float32)
        if op.mixing is not None:
            weights += self.values[op.mixing].reshape(weights.shape)
        weights += np.float32(op.offset)
        weights[:, : op.first] = 0
        y: Array = np.einsum("tji,tid->tjd", weights, x).reshape(len(x), op.result.width)
        return y if op.residual is None else y + self.values[op.residual]

    def hyper_weights(self, op: ops.HyperWeights) -> tuple[Array, ...]:
        widths, eps = [x.width for x in op.result], np.float32(op.eps)
        factors = np.repeat(self.arrays[op.scale], widths)
        first, *further = np.split(self.values[op.x] * factors + self.arrays[op.bias], np.cumsum(widths)[:-1], axis=1)
        weights = [sigmoid(first) + eps]
        if further:
            weights.append(np.float32(op.write_scale) * sigmoid(further[0]) + np.float32(op.write_offset))
        if len(further) > 1:
            mixing = softmax(further[1].reshape(-1, op.n, op.n)) + eps
            for i in range(2 * op.n_rounds - 1):
                mixing = mixing / (mixing.sum(axis=1 + i % 2, keepdims=True) + eps)
            weights.append(mixing.swapaxes(1, 2).reshape(len(mixing), op.n * op.n))
        return tuple(weights)

    def stream_gate(self, op: ops.StreamGate) -> Array:
        products = (self.values[op.key] * self.values[op.query]).reshape(-1, op.n, op.size).sum(axis=-1)
        products *= np.float32(op.size**-0.5)
        return sigmoid(np.sign(products) * np.sqrt(np.maximum(np.abs(products), np.float32(1e-6))))

    def root_mean_square(self, op: ops.RootMeanSquare) -> Array:
        return np.sqrt(np.mean(np.square(self.values[op.x]), axis=1, keepdims=True))

    def above_deviation(self, op: ops.AboveDeviation) -> Array:
        x = self.values[op.x]
        cut = x.mean(axis=1, keepdims=True) + np.float32(op.factor) * x.std(axis=1, keepdims=True)
        return np.maximum(x - cut, 0)

    def scale(self, op: ops.Scale) -> Array:
        factor = np.float32(op.factor) if op.weight is None else np.float32(op.factor) * self.arrays[op.weight]
        return self.values[op.x] * factor

    def linear(self, op: ops.Linear) -> Array:
        y = self._product(op.x, op.matrix)
        return y if op.residual is None else y + self.values[op.residual]

    def linears(self, op: ops.Linears) -> tuple[Array, ...]:
        return tuple(self._product(op.x, matrix) for matrix in op.matrices)

    def _product(self, x: Tensor, matrix: g.Matrix) -> Array:
        # One matrix-vector product per token, because the order of additions in a matrix product depends on T.
        y: Array = np.matmul(self.arrays[matrix.weight], self.values[x][:, :, None])[:, :, 0]
        if matrix.bias is not None:
            y += self.arrays[matrix.bias]
        return y

    def head_linear(self, op: ops.HeadLinear) -> Array:
        x, (n_heads, _, n_in) = self.values[op.x], op.weight.shape
        heads = x.reshape(len(x), n_heads, op.x.width // n_heads)
        y = np.matmul(self.arrays[op.weight], heads[..., :n_in, None])[..., 0]
        return np.concatenate([y, heads[..., n_in:]], axis=-1).reshape(len(x), op.result.width)

    def rope_append(self, op: ops.RopeAppend) -> Array:
        batch, page_size, cache = self.batch, self.cache.page_size, op.cache
        q = self._heads(op.q, cache.key_dim, op.q_norm, op.rope, norm_last=op.norm_last)
        if op.q_scale is not None:
            q = q * position_factors(op.q_scale, batch.positions)[:, None, None]
        k = None if op.k is None else self._heads(op.k, cache.key_dim, op.k_norm, op.rope, norm_last=op.norm_last)
        v = None if op.v is None else self._heads(op.v, cache.value_dim, op.v_norm, None)
        q = hadamard(q, cache.rotations[0])
        for x, stored, type, size in zip(
            (k, v), self.cache.layers[cache.key], cache.types, cache.rotations, strict=True
        ):
            if x is None:
                continue
            x = in_codes(hadamard(x, size), type) if type in CODE_BITS else in_range(x, stored.dtype)
            for s, (start, stop, _) in enumerate(batch.sequences()):
                positions, rows = batch.positions[start:stop], x[start:stop]
                ends = (positions + 1) % cache.stride == 0
                page, row = np.divmod(positions[ends], page_size)
                page = batch.block_tables[self.graph.group(cache), s, page]
                stored[page, row // cache.stride] = rows[ends]
        return q.reshape(len(q), -1)

    def _heads(
        self, x: Tensor, dim: int, norm: g.HeadNorm | None, rope: g.Rope | None, *, norm_last: bool = False
    ) -> Array:
        """Return heads of ``dim`` values [T, n, dim], normalised and rotated in the order of ``norm_last``."""
        weight = None if norm is None or norm.weight is None else self.arrays[norm.weight]
        turns = self.batch.positions if rope is None else self._turns(rope)
        return rotated_heads(self.values[x], dim, norm, weight, rope, turns, norm_last=norm_last)

    def _turns(self, rope: g.Rope) -> Array:
        """Return the positions that tokens are rotated by: [T, 1] or, with axes, [T, n_rot / 2]."""
        batch = self.batch
        return batch.axes[list(rope.axes)].T if rope.axes and batch.axes.size else batch.positions[:, None]

    def attention(self, op: ops.Attention) -> Array:
        batch, cache = self.batch, op.cache
        keys, values = self.cache.layers[cache.key]
        tables = batch.block_tables[self.graph.group(cache)]
        if cache.values_in_keys:
            values = keys[..., : cache.value_dim]
        q = self.values[op.q].reshape(-1, cache.n_heads, op.group_size, cache.key_dim)  # [T, G, H / G, key_dim]
        sinks, slopes = (
            None if x is None else self.arrays[x].reshape(cache.n_heads, -1, 1) for x in (op.sinks, op.slopes)
        )
        out: Array = np.empty((*q.shape[:3], cache.value_dim), np.float32)
        for s, (start, stop, kv_length) in enumerate(batch.sequences()):
            for t in range(start, stop):
                position = int(batch.positions[t])
                reach = op.window or kv_length
                begin = position - position % op.chunk if op.chunk else max(0, position - reach + 1)
                end = position + 1 if op.causal else min(kv_length, position + reach)
                if op.part == "prompt":
                    end = max(1, int(batch.divisions()[t]))
                elif op.part == "reply":
                    begin = int(batch.divisions()[t])
                if op.has_spans and len(batch.ends):
                    end = int(batch.ends[t])
                    begin = begin if op.causal else int(batch.begins[t])
                selections: list[Any] = [None]  # selected positions: for all key heads, or per key head
                if op.selected is not None:
                    numbers = self.values[op.selected][t].astype(np.int64).reshape(-1, op.n_selected)
                    selections = [row[row >= 0] for row in numbers]
                for head, selection in enumerate(selections):
                    of = slice(head, head + 1) if op.selected_by_head else slice(None)
                    kv_positions = np.arange(begin, end) if selection is None or op.entries is not None else selection
                    page, row = tables[s, kv_positions // self.cache.page_size], kv_positions % self.cache.page_size
                    own_keys, own_values = (
                        array[page, row, of].astype(np.float32) for array in (keys, values)
                    )  # [L, G, dim]
                    if op.entries is not None:
                        selection = np.arange((position + 1) // op.entries.stride) if selection is None else selection
                        more = self._entries(op.entries, s, selection)
                        own_keys = np.concatenate([own_keys, more])
                        own_values = np.concatenate([own_values, more[..., : cache.value_dim]])
                    scores = np.einsum("ghd,lgd->ghl", q[t, of], own_keys) * np.float32(op.scale)
                    if op.softcap is not None:
                        scores = soft_capped(scores, op.softcap)
                    if slopes is not None:
                        scores -= slopes[of] * np.abs(position - kv_positions).astype(np.float32)
                    if op.biases is not None:
                        n = op.bias_width // 2
                        of_heads = self.arrays[op.biases].reshape(cache.n_heads, op.group_size, -1)
                        scores += of_heads[of][..., n + np.clip(kv_positions - position, -n, n)]
                    if sinks is not None:
                        scores = np.concatenate([scores, sinks[of]], axis=-1)
                    weights = softmax(scores)[..., : len(own_values)]
                    out[t, of] = np.einsum("ghl,lgd->ghd", weights, own_values)
        return hadamard(out, cache.rotations[1]).reshape(len(q), -1)

    def _entries(self, cache: g.KVCache, s: int, numbers: Array) -> Array:
        """Return entries ``numbers`` of a sequence, or positions if each has an entry: [n, 1, key_dim]."""
        page, row = np.divmod((numbers + 1) * cache.stride - 1, self.cache.page_size)
        page = self.batch.block_tables[self.graph.group(cache), s, page]
        rows: Array = self.cache.layers[cache.key][0][page, row // cache.stride]
        return rows.astype(np.float32)

    def compress(self, op: ops.Compress) -> Array:
        batch, cache, run, n = self.batch, op.cache, op.run, op.n_series
        stored, tables = self.cache.layers[cache.key][0], batch.block_tables[self.graph.group(cache)]
        biases = self.arrays[op.biases].reshape(run, n, cache.key_dim)
        out: Array = np.zeros((len(batch.ids), cache.key_dim), np.float32)
        for s, (start, stop, _) in enumerate(batch.sequences()):
            for t in range(start, stop):
                position = int(batch.positions[t])
                if (position + 1) % run:
                    continue
                tokens = np.arange(max(0, position + 1 - n * run), position + 1)
                page, row = np.divmod(tokens, self.cache.page_size)
                rows = stored[tables[s, page], row].astype(np.float32)  # [n * run, 2 * n, dim]
                # first series for the previous run, last series for the current run
                series = np.where(tokens > position - run, n - 1, 0)
                index = np.arange(len(tokens))
                gates = rows[index, n + series] + biases[tokens % run, series]
                out[t] = (softmax(gates.T).T * rows[index, series]).sum(axis=0)
        return out

    def index_select(self, op: ops.IndexSelect) -> Array:
        batch, cache, k, run = self.batch, op.cache, op.k, op.run
        q = self.values[op.q].reshape(-1, op.n_heads, op.dim)
        out: Array = np.full((len(q), op.n_choices, op.result.width // op.n_choices), -1, np.float32)
        for s, (start, stop, _) in enumerate(batch.sequences()):
            for t in range(start, stop):
                entries = np.arange((int(batch.positions[t]) + 1) // cache.stride)
                if len(entries) <= k:
                    out[t, :, : len(entries)] = entries
                    continue
                keys = self._entries(cache, s, entries)[:, 0]
                weights = np.float32(1) if op.head_weights is None else self.values[op.head_weights][t][:, None]
                for row, scores in zip(out[t], self._run_scores(op, q[t], weights, keys), strict=True):
                    runs = np.sort(np.argsort(-scores, kind="stable")[: k // run])
                    positions = np.append(runs[:, None] * run + np.arange(run), entries[len(scores) * run :])
                    positions = positions[positions < len(entries)]
                    row[: len(positions)] = positions
        return out.reshape(len(q), -1)

    def _run_scores(self, op: ops.IndexSelect, q: Array, weights: Array | np.float32, keys: Array) -> Array:
        """Return the scores of runs of positions, [1, runs], or per head [H, runs]."""
        run = op.run
        if op.n_last:
            missing = -len(keys) % run
            products = np.pad(q @ keys.T, ((0, 0), (0, missing)), constant_values=-np.inf)
            scores: Array = products.reshape(len(q), -1, run).max(axis=-1)
            scores[:, -op.n_last :] = np.inf
            return scores
        keys = keys[: len(keys) // run * run].reshape(-1, run, keys.shape[-1])
        if op.pool is None:
            keys = keys[:, -1]
        else:
            fields = keys.reshape(-1, run, 3, op.dim)
            gates = fields[:, :, 1] + self.arrays[op.pool]
            keys = (softmax(gates.swapaxes(1, 2)).swapaxes(1, 2) * fields[:, :, 0]).sum(axis=1)
        return (weights * np.maximum(q @ keys.T, 0)).sum(axis=0, keepdims=True)

    def block_conv(self, op: ops.BlockConv) -> Array:
        x, n_groups, kernel = self.values[op.x], op.n_groups, op.kernel
        base = self.arrays[op.base].reshape(2, kernel, -1)[op.side]
        factors = self.values[op.factors].reshape(len(x), 2, kernel, n_groups)[:, op.side]
        kernels, y = base + np.repeat(factors, x.shape[1] // n_groups, axis=2), np.zeros_like(x)
        for start, stop, _ in self.batch.sequences():
            for j in range(min(kernel, stop - start)):
                y[start + j : stop] += kernels[start + j : stop, j] * x[start : stop - j]
        return y

    def causal_conv(self, op: ops.CausalConv) -> Array:
        x, weight = self.values[op.x], self.arrays[op.weight]
        kernel, y = weight.shape[1], np.empty_like(x)
        for start, stop, state in self._states(op.state):
            inputs = np.concatenate([state, x[start:stop], np.zeros((op.ahead, x.shape[1]), np.float32)])[op.ahead :]
            y[start:stop] = sum(weight[:, j] * inputs[j : j + stop - start] for j in range(kernel))
            state[:] = inputs[len(inputs) - kernel + 1 :]
        if op.bias is not None:
            y += self.arrays[op.bias]
        return silu(y) if op.silu else y

    def gated_delta(self, op: ops.GatedDelta) -> Array:
        n_heads, d_k, d_v = op.state.shape
        keys = op.n_key_heads * d_k
        q, k, v = self._side_by_side(op.qkv, (keys, keys, n_heads * d_v))
        q, k = (x.reshape(-1, op.n_key_heads, d_k) for x in (q, k))
        q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + np.float32(op.eps)) for x in (q, k))
        n_repeats, n_tiles = (n_heads // op.n_key_heads, 1) if op.is_grouped else (1, n_heads // op.n_key_heads)
        q, k = (np.tile(np.repeat(x, n_repeats, axis=1), (1, n_tiles, 1)) for x in (q / np.float32(np.sqrt(d_k)), k))
        steps, a = self.values[op.decay] + self.arrays[op.dt_bias], self.arrays[op.a].reshape(-1, 1)
        a = np.abs(a) if op.bound else a
        steps = steps.reshape(len(q), n_heads, -1)
        decay = np.exp(np.float32(op.bound) * sigmoid(steps * a) if op.bound else softplus(steps) * a)
        beta = sigmoid(self.values[op.beta])
        return self._recurrence(op.state, q, k, v.reshape(-1, n_heads, d_v), decay, beta)

    def scan(self, op: ops.Scan) -> Array:
        n_heads, n, p = op.state.shape
        x, b, c = self._side_by_side(op.xbc, (n_heads * p, op.n_groups * n, op.n_groups * n))
        b, c = (np.repeat(y.reshape(-1, op.n_groups, n), n_heads // op.n_groups, axis=1) for y in (b, c))
        x = x.reshape(-1, n_heads, p)
        step = softplus(self.values[op.dt] + self.arrays[op.dt_bias])[..., None]  # [T, H, 1]
        decay = np.exp(step * self.arrays[op.a].reshape(-1, 1))
        y = self._recurrence(op.state, c, b, step * x, decay, None)
        y += (self.arrays[op.d].reshape(-1, 1) * x).reshape(y.shape)
        return y

    def channel_scan(self, op: ops.ChannelScan) -> Array:
        x, b, c = (self.values[y] for y in (op.x, op.b, op.c))
        step = softplus(self.values[op.dt] + self.arrays[op.dt_bias])
        y: Array = self.arrays[op.d] * x
        for start, stop, state in self._states(op.state):
            for t in range(start, stop):
                state *= np.exp(self.arrays[op.a].T * step[t])
                state += b[t][:, None] * (step[t] * x[t])
                y[t] += c[t] @ state
        return y

    def wkv(self, op: ops.WKV) -> tuple[Array, ...]:
        n_heads, d, _ = op.state.shape
        r, k, v, decay = (self.values[x].reshape(-1, n_heads, d) for x in (op.r, op.k, op.v, op.decay))
        bonus = None if op.bonus is None else self.arrays[op.bonus].reshape(n_heads, d)
        if op.rate is not None and op.key_scale is not None and op.key_rate is not None:
            decay = np.exp(np.float32(-np.exp(-0.5)) * sigmoid(decay))
            kappa = k * self.arrays[op.key_scale].reshape(n_heads, d)
            kappa = kappa / np.maximum(np.sqrt(np.sum(kappa * kappa, axis=-1, keepdims=True)), np.float32(1e-12))
            rate = sigmoid(self.values[op.rate]).reshape(-1, n_heads, d)
            removed = kappa * rate
            k = k * (1 + (rate - 1) * self.arrays[op.key_rate].reshape(n_heads, d))
        else:
            kappa = removed = None
            with np.errstate(over="ignore"):
                decay = np.exp(-np.exp(decay))
            k = k if bonus is not None else k * (1 - decay)
        out = np.empty_like(v)
        for start, stop, state in self._states(op.state):
            for t in range(start, stop):
                if kappa is None and bonus is not None:
                    out[t] = np.einsum("hkv,hk->hv", state, r[t])
                change = k[t][..., None] * v[t][:, None]
                if kappa is not None and removed is not None:
                    change = change - removed[t][..., None] * np.einsum("hkv,hk->hv", state, kappa[t])[:, None]
                state[:] = state * decay[t][..., None] + change
                if kappa is not None or bonus is None:
                    out[t] = np.einsum("hkv,hk->hv", state, r[t])
        y = out.reshape(len(out), -1)
        return (y,) if bonus is None else (y, (v * (r * k * bonus).sum(axis=-1, keepdims=True)).reshape(y.shape))

    def _recurrence(
        self, declaration: g.RecurrentState, q: Array, k: Array, v: Array, decay: Array, beta: Array | None
    ) -> Array:
        """Run the recurrence over the tokens. With ``beta``, the state's value for the key is subtracted first."""
        out = np.empty_like(v)
        for start, stop, state in self._states(declaration):
            for t in range(start, stop):
                state *= decay[t][..., None]
                new = v[t] if beta is None else beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
                state += k[t][:, :, None] * new[:, None]
                out[t] = np.einsum("hkv,hk->hv", state, q[t])
        return out.reshape(len(out), -1)

    def _side_by_side(self, tensors: tuple[Tensor, ...], widths: tuple[int, ...]) -> list[Array]:
        places = zip(side_by_side(tensors, widths), widths, strict=True)
        return [self.values[x][:, first : first + width] for (x, first), width in places]

    def _states(self, state: g.RecurrentState) -> Iterator[tuple[int, int, Array]]:
        """Yields (first_row, end_row, state) per sequence. The state is set to zero at the start of a sequence."""
        for s, (start, stop, length) in enumerate(self.batch.sequences()):
            values = self.cache.states[state][self.batch.states[s]]
            if length == stop - start:
                values[:] = 0
            yield start, stop, values

    def gated(self, op: ops.Gated) -> Array:
        gate, up = self.values[op.gate], self.values[op.up]
        if op.activation == "clamped_swiglu":
            return clamped_swiglu(gate, up)
        return ACTIVATION_FUNCTIONS[op.activation](gate) * up

    def head_gate(self, op: ops.HeadGate) -> Array:
        x, gate = self.values[op.x], self.values[op.gate]
        heads = x.reshape(*gate.shape, op.x.width // op.gate.width)
        return (heads * ACTIVATION_FUNCTIONS[op.activation](gate)[..., None]).reshape(x.shape)

    def activation(self, op: ops.Activation) -> Array:
        return ACTIVATION_FUNCTIONS[op.activation](self.values[op.x])

    def clamp(self, op: ops.Clamp) -> Array:
        return np.clip(self.values[op.x], np.float32(op.low), np.float32(op.high))

    def xielu(self, op: ops.XIELU) -> Array:
        x, p, n, beta, eps = self.values[op.x], *map(np.float32, (op.p, op.n, op.beta, op.eps))
        return np.where(x > 0, p * x * x, n * (np.expm1(np.minimum(x, eps)) - x)) + beta * x

    def route(self, op: ops.Route) -> ChosenExperts:
        logits = self.values[op.logits]
        probabilities = GATING_FUNCTIONS[op.gating](logits)
        scores = logits if op.is_by_logits or op.gating == "sigmoid_of_best" else probabilities
        if op.selection_bias is not None:
            scores = scores + self.arrays[op.selection_bias]
        if op.expert_ids is not None:
            expert_ids = self.values[op.expert_ids].astype(np.int64)
            fixed_scores, scores = np.take_along_axis(scores, expert_ids, axis=1), np.full_like(scores, -np.inf)
            np.put_along_axis(scores, expert_ids, fixed_scores, axis=1)
        if op.n_groups > 1:
            groups = scores.reshape(len(scores), op.n_groups, -1)
            best = np.sort(groups, axis=2)[:, :, -op.n_group_best :].sum(axis=2)
            worse = np.argsort(-best, axis=1, kind="stable")[:, op.n_top_groups :]
            np.put_along_axis(groups := groups.copy(), worse[:, :, None], -np.inf, axis=1)
            scores = groups.reshape(scores.shape)
        ids = np.argsort(-scores, axis=1, kind="stable")[:, : op.k]
        weights = np.take_along_axis(probabilities, ids, axis=1)
        if op.gating == "sparsemixer":
            weights = sparsemixer_weights(logits, ids)
        elif op.norm_topk_prob and op.gating == "softmax":
            weights = softmax(np.take_along_axis(logits, ids, axis=1))
        elif op.norm_topk_prob:
            weights = weights / weights.sum(axis=1, keepdims=True)
        if op.expert_scales is not None:
            weights = weights * self.arrays[op.expert_scales].reshape(-1)[ids]
        return ChosenExperts(ids, weights * np.float32(op.scale))

    def expert_linears(self, op: ops.ExpertLinears) -> tuple[Array, ...]:
        rows = np.repeat(self.values[op.x], op.routing.k, axis=0)
        if op.is_weighted:
            rows = rows * self.values[op.routing].weights.reshape(-1, 1)
        biases = op.biases or (None,) * len(op.experts)
        return tuple(
            self._expert_product(rows, weight, bias, op.routing)
            for weight, bias in zip(op.experts, biases, strict=True)
        )

    def expert_output(self, op: ops.ExpertOutput) -> Array:
        routing = self.values[op.routing]
        products = self._expert_product(self.values[op.h], op.experts, op.bias, op.routing)
        products = products.reshape(*routing.ids.shape, -1)
        weights = routing.weights if op.is_weighted else np.ones_like(routing.weights)
        total = np.zeros_like(products[:, 0])  # [T, d], of products [T, k, d]
        for rank in range(op.routing.k):
            total += weights[:, rank, None] * products[:, rank]
        return total if op.residual is None else total + self.values[op.residual]

    def _expert_product(self, rows: Array, experts: g.Weight, bias: g.Weight | None, routing: g.Routing) -> Array:
        """Return rows [T * k, n_in] times the matrices of their experts, plus bias."""
        matrices, ids = self.arrays[experts], self.values[routing].ids.reshape(-1)
        pairs = zip(rows, ids, strict=True)
        y = np.array([matrices[expert] @ row for row, expert in pairs], np.float32).reshape(-1, matrices.shape[1])
        return y if bias is None else y + self.arrays[bias][ids]

    def softcap(self, op: ops.Softcap) -> Array:
        return soft_capped(self.values[op.x], op.cap)

    def outputs(self, op: ops.Outputs) -> Array:
        rows: Array = self.values[op.x][self.batch.outputs[:, None] + np.arange(op.n_joined)]  # [N, n_joined, d]
        return rows.mean(axis=1) if op.is_mean else rows.reshape(len(rows), op.result.width)


# -- Formulas --------------------------------------------------------------------------------------------------------


def normed(x: Array, weight: Array | np.float32, eps: float) -> Array:
    """x / sqrt(mean(x²) + eps) * weight."""
    mean_square: Array = np.mean(x * x, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(eps)) * weight


def rotated_heads(
    x: Array,
    dim: int,
    norm: g.HeadNorm | None,
    weight: Array | None,
    rope: g.Rope | None,
    turns: Array,
    *,
    norm_last: bool = False,
) -> Array:
    """Return the heads of rows x [T, n * dim] as [T, n, dim], normalised and rotated in the order of ``norm_last``.

    Args:
        weight: decoded weights of ``norm``; None for weights of 1.
        turns: positions for `rotate`.
    """
    y = x.reshape(len(x), x.shape[1] // dim, dim)
    if rope is not None and norm_last:
        y = rotate(y, turns, rope)
    if norm is not None:
        weight = np.ones(dim, np.float32) if weight is None else weight
        first, remaining = np.split(y, [len(weight)], axis=-1)
        y = np.concatenate([normed(first, weight, norm.eps), remaining], axis=-1)
    return rotate(y, turns, rope) if rope is not None and not norm_last else y


def rotate(x: Array, positions: NDArray[np.int32], rope: g.Rope) -> Array:
    """Rotate heads x [T, heads, head_dim] to positions [T, 1] or, per frequency, [T, n_rot / 2]."""
    angles = (positions.astype(np.float64) + rope.position_offset) * rope.frequencies  # [T, n_rot / 2]
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
    factors = scale.base + scale.rate * np.log1p(np.maximum(positions + scale.offset, 0) // scale.length)
    return np.asarray(np.maximum(factors, 1), np.float32)


def in_range(x: Array, dtype: np.dtype[Any]) -> Array:
    """Clamp to the largest finite value of ``dtype``, so that 0 * x stays 0."""
    limit = np.float32(np.finfo(dtype).max)
    return np.clip(x, -limit, limit)


def in_codes(x: Array, type: g.CacheType) -> Array:
    """Round groups of 32 values of each head to codes times a float16 scale (ties to even)."""
    head_dim, half = x.shape[-1], 1 << (CODE_BITS[type] - 1)
    padded = np.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, -head_dim % VALUES_PER_SCALE)])
    groups = padded.reshape(*x.shape[:-1], -1, VALUES_PER_SCALE)
    if type == "q8_0":
        largest, code, least = np.abs(groups).max(axis=-1, keepdims=True), LARGEST_CODE, -LARGEST_CODE
    else:
        high, low = groups.max(axis=-1, keepdims=True), groups.min(axis=-1, keepdims=True)
        largest, code, least = np.where(high >= -low, high, low), np.float32(-half), np.float32(-half)
    largest = np.clip(largest, -np.abs(code) * LARGEST_HALF, np.abs(code) * LARGEST_HALF)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(np.abs(largest) > NEGLIGIBLE, code / largest, np.float32(0))
    codes = np.clip(np.rint(groups * inverse), least, half - 1)
    scale = in_range(largest / code, np.dtype(np.float16)).astype(np.float16).astype(np.float32)
    return (codes * scale).reshape(*x.shape[:-1], -1)[..., :head_dim]


def hadamard(x: Array, size: int) -> Array:
    """Multiply groups of ``size`` neighbours in the last axis by the orthonormal Hadamard matrix, unless it is 0."""
    step = 1
    while step < size:
        pairs = x.reshape(*x.shape[:-1], -1, 2, step)
        x = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2).reshape(x.shape)
        step *= 2
    return x * (np.float32(1) / np.sqrt(np.float32(size))) if size else x


def softmax(x: Array) -> Array:
    """exp(x) / sum(exp(x)) over the last axis."""
    e: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    total: Array = e.sum(axis=-1, keepdims=True)
    return e / total


def soft_capped(x: Array, cap: float) -> Array:
    """cap * tanh(x / cap)."""
    return np.float32(cap) * np.tanh(x / np.float32(cap))


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):
        y: Array = 1 / (1 + np.exp(-x))
    return y


def softplus(x: Array) -> Array:
    """log(1 + exp(x))."""
    return np.logaddexp(x, np.float32(0))


def silu(x: Array) -> Array:
    """x * sigmoid(x). Source: arXiv:1702.03118."""
    with np.errstate(over="ignore"):  # exp(-x) may overflow to inf; the result is then -0
        y: Array = x / (1 + np.exp(-x))
    return y


def gelu(x: Array) -> Array:
    """Tanh approximation of GELU, which GGML always uses. Source: arXiv:1606.08415."""
    return 0.5 * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x**3)))


def gelu_erf(x: Array) -> Array:
    """x * Φ(x), with the CDF Φ of the normal distribution. Source: arXiv:1606.08415."""
    erf = np.vectorize(math.erf, otypes=[np.float64])
    return (x * 0.5 * (1 + erf(x / np.sqrt(2)))).astype(np.float32)


def gelu_quick(x: Array) -> Array:
    """x * sigmoid(1.702 x), used by CLIP. Source: arXiv:1606.08415."""
    return x * sigmoid(np.float32(1.702) * x)


def relu(x: Array) -> Array:
    """max(x, 0)."""
    return np.maximum(x, np.float32(0))


def relu2(x: Array) -> Array:
    """max(x, 0)². Source: Primer, arXiv:2109.08668."""
    return np.square(np.maximum(x, 0))


def clamped_swiglu(gate: Array, up: Array) -> Array:
    """Activation of gpt-oss, see `localllm.kernels.operations.Gated`."""
    gate, up = np.minimum(gate, np.float32(7)), np.clip(up, np.float32(-7), np.float32(7))
    return gate * sigmoid(np.float32(1.702) * gate) * (up + 1)


def sparsemixer_weights(logits: Array, ids: Array) -> Array:
    """Return the weights [T, k] of selected experts, see `localllm.kernels.operations.Route`."""
    left, weights = logits.copy(), np.empty(ids.shape, np.float32)
    for rank in range(ids.shape[1]):
        best = np.take_along_axis(logits, ids[:, rank, None], axis=1)
        is_near = best - left <= np.float32(SPARSEMIXER_DISTANCE) * np.maximum(np.abs(logits), best)
        weights[:, rank] = 1 / np.where(is_near, np.exp(np.minimum(left - best, 0)), 0).sum(axis=1)
        np.put_along_axis(left, ids[:, rank, None], -np.inf, axis=1)
    return weights


def sqrt_softplus(x: Array) -> Array:
    """√log(1 + exp(x))."""
    return np.sqrt(softplus(x))


def identity(x: Array) -> Array:
    return x


ACTIVATION_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_erf": gelu_erf,
    "gelu_quick": gelu_quick,
    "relu": relu,
    "relu2": relu2,
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "identity": identity,
    "softplus": softplus,
}

GATING_FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "sqrt_softplus": sqrt_softplus,
    "sigmoid_of_best": sigmoid,
    "sparsemixer": identity,
}
