"""What a step is made of on a CUDA device: calls of kernels, each with the launches that it takes.

A layer of a llama takes eleven launches for a token: norm and quantise, the product with query, key and value,
rotation and append, attention over KV splits and their merge, quantise, the product with its output; norm and
quantise, the product with gate and up, gate and quantise, the product with down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from localllm.kernels import graph
from localllm.kernels.buffers import Buffer
from localllm.kernels.cuda import attention, matmul
from localllm.kernels.cuda.arena import (
    AttentionKind,
    BatchBuffer,
    Call,
    Extent,
    Inputs,
    StepLimits,
    Stored,
    stored_in,
)
from localllm.kernels.cuda.attention import Variant
from localllm.kernels.cuda.batch import N_OUTPUTS
from localllm.kernels.cuda.cache import append_defines
from localllm.kernels.cuda.driver import Argument, DeviceMemory
from localllm.kernels.cuda.launch import Launch
from localllm.kernels.cuda.matmul import MAX_MATRICES, Product
from localllm.kernels.cuda.weights import PackedMatrix
from localllm.kernels.graph import ACTIVATIONS, HeadNorm, KVCache, PositionScale, Rope

_NULL = np.uint64(0)
#: What rotates nothing.
NO_ROPE = Rope(np.zeros(0, np.float32), interleaved=False)
#: Threads and columns of a block in elementwise.cu.
_NORM_THREADS, _GATE_THREADS, _GATE_COLUMNS, _SORT_THREADS = 512, 128, 512, 1024
#: Heads of a block in append.cu.
_HEADS_PER_BLOCK = 4
#: Columns that a block of `top_parts` sorts, and how many of the largest may be wanted.
SORTED, MAX_TOP_K = 2048, 1024


def _elementwise(kernel: str, grid: tuple[int, ...], threads: int, *arguments: Argument) -> Iterator[Launch]:
    if all(grid):
        yield Launch("elementwise", kernel, {}, grid, (threads,), arguments=arguments)


def _row_arguments(rows: Stored) -> tuple[Argument, Argument, Argument]:
    return rows.memory, np.int32(rows.stride), np.int32(rows.width)


# -- Rows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Embed:
    """Columns of a packed matrix's rows for the batch's ids or positions."""

    batch: BatchBuffer
    table: PackedMatrix
    columns: range
    scale: float
    by_position: bool
    y: Stored

    def launches(self, extent: Extent) -> Iterator[Launch]:
        table, format = self.table, self.table.packed
        launch = matmul.embed_launch(format, extent.n_tokens)
        sizes = map(np.int32, (self.columns.start, self.columns.stop, format.n_tiles(table.n_in)))
        batch = self.batch.positions if self.by_position else self.batch.ids, self.batch.header
        y = self.y.memory, np.int32(self.y.stride)
        yield launch.given(table.memory, *sizes, *batch, np.float32(self.scale), *y)


@dataclass(frozen=True, eq=False)
class Gather:
    """The rows whose logits are wanted."""

    batch: BatchBuffer
    x: Stored
    y: Stored

    def launches(self, extent: Extent) -> Iterator[Launch]:
        batch, y = self.batch, (self.y.memory, np.int32(self.y.stride))
        grid = (-(-self.x.width // _GATE_COLUMNS), extent.rows(N_OUTPUTS))
        arguments = (batch.header, batch.outputs, *_row_arguments(self.x), *y)
        yield from _elementwise("gather_rows", grid, _GATE_THREADS, *arguments)


@dataclass(frozen=True, eq=False)
class Norm:
    """RMS norm of groups of a row, to float32; or of whole rows, also to inputs of eight bits.

    Attributes:
        weight_step: values from the weight of one group to the next one's.
    """

    batch: BatchBuffer
    x: Stored
    weight: DeviceMemory | None
    eps: float
    n_groups: int
    weight_step: int
    y: Stored | Inputs

    def launches(self, extent: Extent) -> Iterator[Launch]:
        x, n = self.x, extent.rows(self.x.slot)
        rows = x.memory, np.int32(x.stride), np.int32(x.width // self.n_groups)
        weight = _NULL if self.weight is None else self.weight
        arguments: tuple[Argument, ...] = (self.batch.header_at(x.slot), *rows, weight, np.float32(self.eps))
        name, to = _result("rms_norm", self.y, n)
        if isinstance(self.y, Inputs):
            yield from _elementwise(name, (n,), _NORM_THREADS, *arguments, *to)
        else:
            step = np.int32(self.weight_step)
            yield from _elementwise(name, (n, self.n_groups), _NORM_THREADS, *arguments, step, *to)


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """Layer norm."""

    batch: BatchBuffer
    x: Stored
    weight: DeviceMemory
    bias: DeviceMemory | None
    eps: float
    y: Stored

    def launches(self, extent: Extent) -> Iterator[Launch]:
        x, n = self.x, extent.rows(self.x.slot)
        weights = self.weight, _NULL if self.bias is None else self.bias, np.float32(self.eps)
        to = self.y.memory, np.int32(self.y.stride)
        header = self.batch.header_at(x.slot)
        yield from _elementwise("layer_norm", (n,), _NORM_THREADS, header, *_row_arguments(x), *weights, *to)


@dataclass(frozen=True, eq=False)
class Gate:
    """An activation, times another row if there is one, to float32 or to inputs of eight bits."""

    batch: BatchBuffer
    gate: Stored
    up: Stored | None
    activation: str
    y: Stored | Inputs

    def launches(self, extent: Extent) -> Iterator[Launch]:
        gate, n = self.gate, extent.rows(self.gate.slot)
        kind, up = np.int32(ACTIVATIONS.index(self.activation)), _NULL if self.up is None else self.up.memory
        arguments = (self.batch.header_at(gate.slot), kind, gate.memory, up, *_row_arguments(gate)[1:])
        name, to = _result("gated", self.y, n)
        yield from _elementwise(name, (-(-gate.width // _GATE_COLUMNS), n), _GATE_THREADS, *arguments, *to)


@dataclass(frozen=True, eq=False)
class Add:
    """factor * weight * sigmoid(gate) * x + residual; what is None is left out."""

    batch: BatchBuffer
    x: Stored
    factor: float
    weight: DeviceMemory | None
    gate: Stored | None
    residual: Stored | None
    y: Stored

    def launches(self, extent: Extent) -> Iterator[Launch]:
        x, n = self.x, extent.rows(self.x.slot)
        weight = _NULL if self.weight is None else self.weight
        gate = (_NULL, np.int32(0)) if self.gate is None else (self.gate.memory, np.int32(self.gate.stride))
        residual = _NULL if self.residual is None else self.residual.memory
        arguments = (*_row_arguments(x), np.float32(self.factor), weight, *gate, residual)
        to = self.y.memory, np.int32(self.y.stride)
        grid, header = (-(-x.width // _GATE_COLUMNS), n), self.batch.header_at(x.slot)
        yield from _elementwise("add", grid, _GATE_THREADS, header, *arguments, *to)


@dataclass(frozen=True, eq=False)
class SoftCap:
    """cap * tanh(x / cap)."""

    batch: BatchBuffer
    x: Stored
    cap: float
    y: Stored

    def launches(self, extent: Extent) -> Iterator[Launch]:
        x, n = self.x, extent.rows(self.x.slot)
        arguments = (self.batch.header_at(x.slot), *_row_arguments(x), np.float32(self.cap))
        to = self.y.memory, np.int32(self.y.stride)
        yield from _elementwise("softcap", (-(-x.width // _GATE_COLUMNS), n), _GATE_THREADS, *arguments, *to)


def _result(kernel: str, y: Stored | Inputs, n_rows: int) -> tuple[str, tuple[Argument, ...]]:
    """A kernel's name, and its arguments for what it writes."""
    if isinstance(y, Stored):
        return kernel, (y.memory, np.int32(y.stride))
    laid_out = matmul.EIGHT_BITS.input_rows(n_rows)
    return f"{kernel}_quantised", (y.units, y.scales, np.int32(laid_out))


# -- Products ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Quantise:
    """Rows as products with weights of a format read them."""

    batch: BatchBuffer
    format: matmul.PackedFormat
    x: Stored
    inputs: Inputs

    def launches(self, extent: Extent) -> Iterator[Launch]:
        n = extent.rows(self.x.slot)
        if not n:
            return
        n_rows = self.format.input_rows(n)
        launch = matmul.quantise_launch(self.format, self.x.width, n_rows)
        counted = self.batch.header_at(self.x.slot)
        to = self.inputs.units, self.inputs.scales, np.int32(n_rows)
        yield launch.given(*_row_arguments(self.x), counted, *to)


@dataclass(frozen=True, eq=False)
class Multiply:
    """Products of the same inputs with matrices of one format, and where they go.

    Attributes:
        biases: of each matrix.
        residual: what is added to the product, of which there is one then; it may be where the product goes.
    """

    step: StepLimits
    slot: int
    inputs: Inputs
    weights: Sequence[PackedMatrix]
    biases: Sequence[DeviceMemory | None]
    results: Sequence[Stored]
    residual: Stored | None = None

    def launches(self, extent: Extent) -> Iterator[Launch]:
        n = extent.rows(self.slot)
        if not n:
            return
        format, capability = self.weights[0].packed, self.step.properties.capability
        n_rows = format.input_rows(n)
        step = 1 if matmul.takes_one_matrix(format, n_rows, capability) else MAX_MATRICES
        products = list(zip(self.weights, self.biases, self.results, strict=True))
        for i in range(0, len(products), step):
            yield self._launch(products[i : i + step], n_rows)

    def _launch(self, products: Sequence[tuple[PackedMatrix, DeviceMemory | None, Stored]], n_rows: int) -> Launch:
        step, first = self.step, products[0][0]
        launch = matmul.product_launch(
            first.packed,
            [w.n_out for w, _, _ in products],
            first.n_in,
            n_rows,
            capability=step.properties.capability,
            shared_bytes=step.properties.shared_bytes,
            tile_rows=step.tile_rows,
        )
        residual = None if self.residual is None else self.residual.memory
        arguments = matmul.product_arguments(
            launch,
            first.packed,
            first.n_in,
            n_rows,
            (self.inputs.units, self.inputs.scales),
            step.batch.header_at(self.slot),
            [Product(w.memory, y.memory, w.n_out, y.stride, bias, residual) for w, bias, y in products],
        )
        return launch.given(*arguments)


@dataclass(frozen=True, eq=False)
class MultiplyHeads:
    """Each head of x times its matrix, and the rest of its values as they are."""

    step: StepLimits
    op: graph.HeadLinear
    x: Stored
    inputs: Inputs
    weight: PackedMatrix
    y: Stored

    def launches(self, extent: Extent) -> Iterator[Launch]:
        n, step, x, y = extent.rows(self.x.slot), self.step, self.x, self.y
        if not n:
            return
        format, (n_heads, n_out, n_in), rest = self.weight.packed, self.op.weight.shape, self.op.n_rest
        header, n_rows = step.batch.header_at(x.slot), format.input_rows(n)
        launch = replace(
            matmul.quantise_launch(format, n_in, n_rows), kernel="quantise_heads", grid=(n_rows, n_heads)
        )
        rows = x.memory, np.int32(x.stride), np.int32(n_in + rest), np.int32(n_in)
        yield launch.given(*rows, header, self.inputs.units, self.inputs.scales, np.int32(n_rows))
        launch = matmul.product_launch(
            format,
            [n_out],
            n_in,
            n_rows,
            capability=step.properties.capability,
            shared_bytes=step.properties.shared_bytes,
            tile_rows=step.tile_rows,
            n_heads=n_heads,
        )
        inputs, products = (
            (self.inputs.units, self.inputs.scales),
            [Product(self.weight.memory, y.memory, n_out, y.stride)],
        )
        yield launch.given(*matmul.product_arguments(launch, format, n_in, n_rows, inputs, header, products))
        if rest:
            sizes = np.int32(n_in + rest), np.int32(rest)
            to = y.memory.at(4 * n_out, y.memory.n_bytes - 4 * n_out), np.int32(y.stride), np.int32(n_out + rest)
            given = header, x.memory.at(4 * n_in, x.memory.n_bytes - 4 * n_in), np.int32(x.stride), *sizes, *to
            yield from _elementwise("copy_heads", (n_heads, n), 32, *given)


# -- Attention -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RopeAppend:
    """Norms of heads, rotation, and the cache of a layer.

    Attributes:
        op: says what is done.
        frequencies: where those of the rope lie, if there is one with any.
        norms: the weights of queries', keys' and values'.
    """

    step: StepLimits
    op: graph.RopeAppend
    q: Stored
    k: Stored | None
    v: Stored | None
    frequencies: Buffer | None
    norms: Sequence[DeviceMemory | None]

    def launches(self, extent: Extent) -> Iterator[Launch]:
        step, op, kept = self.step, self.op, self.op.cache
        batch, cache = step.batch, step.cache
        n_heads, rope = self.q.width // kept.key_dim, op.rope or NO_ROPE
        scale = op.q_scale or PositionScale(0.0, 1)
        dims = kept.key_dim, kept.key_dim, kept.value_dim
        norms = zip(op.norms, self.norms, dims, strict=True)
        # Without keys, the cache is another layer's.
        places = (_NULL,) * 4 if self.k is None else cache.layer(kept.layer)
        arguments: tuple[Argument, ...] = (
            *(batch.header, batch.slots(cache.groups[kept.layer]), batch.positions),
            _NULL if self.frequencies is None else step.arena.at(self.frequencies),
            *map(np.int32, (len(rope.frequencies), rope.first, rope.interleaved)),
            *(np.float32(rope.magnitude), self.q.memory, np.int32(self.q.stride)),
            *(argument for x in (self.k, self.v) for argument in _rows_or_null(x)),
            *(np.int32(n_heads), np.int32(kept.n_heads)),
            *(argument for norm in norms for argument in _norm_arguments(*norm)),
            *(np.int32(op.norm_last), np.float32(scale.rate), np.int32(scale.length), np.int32(scale.offset)),
            *places,
        )
        n_kinds = sum(x is not None for x in (self.k, self.v))
        grid = (-(-(n_heads + n_kinds * kept.n_heads) // _HEADS_PER_BLOCK), extent.n_tokens)
        threads = (32 * _HEADS_PER_BLOCK,)
        yield Launch("append", "rope_append", append_defines(kept), grid, threads, arguments=arguments)


def _rows_or_null(x: Stored | None) -> tuple[Argument, Argument]:
    return (_NULL, np.int32(0)) if x is None else (x.memory, np.int32(x.stride))


def _norm_arguments(norm: HeadNorm | None, weight: DeviceMemory | None, dim: int) -> tuple[Argument, ...]:
    """Weights, how many values are normed, and eps."""
    if norm is None:
        return _NULL, np.int32(0), np.float32(0)
    n = dim if norm.weight is None else norm.weight.shape[0]
    return _NULL if weight is None else weight, np.int32(n), np.float32(norm.eps)


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention over the cache of a layer.

    Attributes:
        partials: for what splits of the cache come to.
    """

    step: StepLimits
    kind: AttentionKind
    variant: Variant
    kept: KVCache
    scale: float
    soft_cap: float | None
    sinks: DeviceMemory | None
    q: Stored
    y: Stored
    partials: Buffer

    def launches(self, extent: Extent) -> Iterator[Launch]:
        step, heads = self.step, self.kind.heads
        work, cache = extent.work(self.kind), step.cache.layer(self.kept.layer)
        batch = step.batch.attention(step.cache.groups[self.kept.layer])
        sums, states = step.partials(self.partials, self.kind, work)
        partials = sums, states, np.int32(work.max_splits), np.int32(work.partial_rows)
        q, out = ((rows.memory, np.int32(rows.stride)) for rows in (self.q, self.y))
        scoring = np.float32(self.scale), np.float32(self.soft_cap or 0)
        sinks = _NULL if self.sinks is None else self.sinks
        own: dict[str, tuple[Argument, ...]] = {
            "attention_prefill": (*cache, *q, *out, sinks, *scoring),
            "attention_split": (*cache, *q, *partials, *scoring),
            "attention_merge": (*partials, *out, sinks),
        }
        for launch in attention.launches(work, heads, self.variant, step.properties.n_multiprocessors):
            limits = *attention.token_range(launch, work), heads.window
            numbers = map(np.int32, (heads.n_kv_heads, heads.group_size, *limits))
            yield launch.given(*batch, *numbers, *own[launch.kernel])


# -- The largest logits --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TopK:
    """The k largest of each row of logits: their ids, the largest first, and behind those of all rows the logits.

    Attributes:
        best: for ids and logits.
        parts: for the largest of each stretch of a row, unless only one is wanted.
    """

    step: StepLimits
    logits: Stored
    best: Buffer
    parts: Buffer | None

    @classmethod
    def of(cls, step: StepLimits, logits: Stored) -> TopK:
        """With memory for as many as there may be wanted."""
        n = 8 * step.max_outputs * min(MAX_TOP_K, logits.width)
        parts = Buffer(n * -(-logits.width // SORTED)) if logits.width > 1 else None
        return cls(step, logits, Buffer(n), parts)

    def launches(self, extent: Extent, k: int = MAX_TOP_K, n_rows: int = 0) -> Iterator[Launch]:
        """Those of a batch of ``n_rows`` outputs."""
        logits, header, n, arena = self.logits, self.step.batch.header, extent.n_outputs, self.step.arena
        n_bytes = 4 * n_rows * k
        rows, best = _row_arguments(logits), [arena.at(self.best, i * n_bytes, n_bytes) for i in range(2)]
        if k == 1 or self.parts is None:
            yield from _elementwise("argmax", (n,), _SORT_THREADS, header, *rows, *best)
            return
        n_parts, parts = -(-logits.width // SORTED), arena.at(self.parts)
        yield from _elementwise("top_parts", (n_parts, n), _SORT_THREADS, header, *rows, np.int32(k), parts)
        keys = np.int32(n_parts * k)
        yield from _elementwise("top_merge", (n,), _SORT_THREADS, header, parts, keys, np.int32(k), *rows[:2], *best)


# -- Fusion --------------------------------------------------------------------------------------------------------


def fused(calls: Iterable[Call], result: Stored) -> list[Call]:
    """The same with norms and gates that write integers at once, where nobody wants their floats."""
    calls = list(calls)
    uses = Counter(x for call in calls for x in stored_in(call))
    found: list[Call] = []
    for call in calls:
        last = found[-1] if found else None
        if (
            isinstance(call, Quantise)
            and not call.format.is_float
            and isinstance(last, Norm | Gate)
            and getattr(last, "n_groups", 1) == 1
            and last.y is call.x is not result
            and uses[call.x] == 2  # written there, and read here
        ):
            found[-1] = replace(last, y=call.inputs)
        else:
            found.append(call)
    return found
