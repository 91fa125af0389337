"""What a forward pass is made of on a CUDA device: each operation with the launches that it takes.

A layer of a llama takes eleven launches for a token: norm and quantise, the product with query, key and value,
rotation and append, attention over spans and their merge, quantise, the product with its output; norm and quantise,
the product with gate and up, gate and quantise, the product with down.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from localllm.kernels.cuda import attention, matmul
from localllm.kernels.cuda.attention import Heads, Variant
from localllm.kernels.cuda.batch import N_OUTPUTS, DeviceBatch
from localllm.kernels.cuda.driver import Argument, DeviceMemory
from localllm.kernels.cuda.launch import Launch
from localllm.kernels.cuda.matmul import MAX_MATRICES, Product
from localllm.kernels.cuda.recording import Extent, Inputs, Operation, Recording, Rows
from localllm.kernels.cuda.weights import CUDALinear, CUDAVector
from localllm.kernels.ops import Rope

_NULL = np.uint64(0)
#: Threads and columns of a block in elementwise.cu.
_NORM_THREADS, _GATE_THREADS, _GATE_COLUMNS, _SORT_THREADS = 512, 128, 512, 1024
#: Heads of a block in append.cu.
_HEADS_PER_BLOCK = 4
#: Columns that a block of `top_parts` sorts, and how many of them may be wanted.
SORTED, MOST_CHOICES = 2048, 1024


def _elementwise(kernel: str, grid: tuple[int, ...], threads: int, *arguments: Argument) -> Iterator[Launch]:
    if all(grid):
        yield Launch("elementwise", kernel, {}, grid, (threads,), arguments=arguments)


def _row_arguments(rows: Rows) -> tuple[Argument, Argument, Argument]:
    return rows.memory, np.int32(rows.stride), np.int32(rows.width)


# -- Rows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Embed:
    """Rows of a packed matrix for the batch's ids."""

    batch: DeviceBatch
    table: CUDALinear
    scale: float
    y: Rows

    def launches(self, extent: Extent) -> Iterator[Launch]:
        table, format = self.table, self.table.packed
        launch = matmul.embed_launch(format, extent.n_tokens)
        sizes = np.int32(table.n_in), np.int32(format.n_tiles(table.n_in))
        batch = self.batch.ids, self.batch.header
        y = self.y.memory, np.int32(self.y.stride)
        yield launch.given(table.memory, *sizes, *batch, np.float32(self.scale), *y)


@dataclass(frozen=True, eq=False)
class Gather:
    """The rows whose logits are wanted."""

    batch: DeviceBatch
    x: Rows
    y: Rows

    def launches(self, extent: Extent) -> Iterator[Launch]:
        batch, y = self.batch, (self.y.memory, np.int32(self.y.stride))
        grid = (-(-self.x.width // _GATE_COLUMNS), extent.rows(N_OUTPUTS))
        arguments = (batch.header, batch.outputs, *_row_arguments(self.x), *y)
        yield from _elementwise("gather_rows", grid, _GATE_THREADS, *arguments)


@dataclass(frozen=True, eq=False)
class Norm:
    """RMS norm, to float32 or to ``inputs`` of eight bits."""

    batch: DeviceBatch
    x: Rows
    weight: CUDAVector
    eps: float
    y: Rows
    inputs: Inputs | None = None

    def launches(self, extent: Extent) -> Iterator[Launch]:
        n = extent.rows(self.x.slot)
        arguments = (
            self.batch.header_at(self.x.slot),
            *_row_arguments(self.x),
            self.weight.memory,
            np.float32(self.eps),
        )
        name, to = _result("rms_norm", self.y, self.inputs, n)
        yield from _elementwise(name, (n,), _NORM_THREADS, *arguments, *to)


@dataclass(frozen=True, eq=False)
class Gate:
    """An activation times another row, to float32 or to ``inputs`` of eight bits."""

    batch: DeviceBatch
    gate: Rows
    up: Rows
    kernel: str
    y: Rows
    inputs: Inputs | None = None

    def launches(self, extent: Extent) -> Iterator[Launch]:
        gate, n = self.gate, extent.rows(self.gate.slot)
        arguments = (self.batch.header_at(gate.slot), gate.memory, self.up.memory, *_row_arguments(gate)[1:])
        name, to = _result(self.kernel, self.y, self.inputs, n)
        yield from _elementwise(name, (-(-gate.width // _GATE_COLUMNS), n), _GATE_THREADS, *arguments, *to)


@dataclass(frozen=True, eq=False)
class SoftCap:
    """cap * tanh(x / cap)."""

    batch: DeviceBatch
    x: Rows
    cap: float
    y: Rows

    def launches(self, extent: Extent) -> Iterator[Launch]:
        x, n = self.x, extent.rows(self.x.slot)
        arguments = (self.batch.header_at(x.slot), *_row_arguments(x), np.float32(self.cap))
        to = self.y.memory, np.int32(self.y.stride)
        yield from _elementwise("softcap", (-(-x.width // _GATE_COLUMNS), n), _GATE_THREADS, *arguments, *to)


def _result(kernel: str, y: Rows, inputs: Inputs | None, n_rows: int) -> tuple[str, tuple[Argument, ...]]:
    """A kernel's name, and its arguments for what it writes."""
    if inputs is None:
        return kernel, (y.memory, np.int32(y.stride))
    laid_out = matmul.EIGHT_BITS.input_rows(n_rows)
    return f"{kernel}_quantised", (inputs.units, inputs.scales, np.int32(laid_out))


# -- Products ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Quantise:
    """Rows as products with weights of a format read them."""

    batch: DeviceBatch
    format: matmul.PackedFormat
    x: Rows
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
    """Products of the same inputs with matrices of one format, and where they go; residuals are added in place."""

    recording: Recording
    slot: int
    inputs: Inputs
    weights: Sequence[CUDALinear]
    results: Sequence[Rows]
    residual: bool

    def launches(self, extent: Extent) -> Iterator[Launch]:
        n = extent.rows(self.slot)
        if not n:
            return
        format, capability = self.weights[0].packed, self.recording.properties.capability
        n_rows = format.input_rows(n)
        step = 1 if matmul.takes_one_matrix(format, n_rows, capability) else MAX_MATRICES
        pairs = list(zip(self.weights, self.results, strict=True))
        for i in range(0, len(pairs), step):
            yield self._launch(pairs[i : i + step], n_rows)

    def _launch(self, pairs: Sequence[tuple[CUDALinear, Rows]], n_rows: int) -> Launch:
        recording, first = self.recording, pairs[0][0]
        launch = matmul.product_launch(
            first.packed,
            [w.n_out for w, _ in pairs],
            first.n_in,
            n_rows,
            capability=recording.properties.capability,
            shared_bytes=recording.properties.shared_bytes,
            tile_rows=recording.tile_rows,
        )
        products = [
            Product(
                w.memory,
                y.memory,
                w.n_out,
                y.stride,
                None if w.bias is None else w.bias.memory,
                y.memory if self.residual else None,
            )
            for w, y in pairs
        ]
        arguments = matmul.product_arguments(
            launch,
            first.packed,
            first.n_in,
            n_rows,
            (self.inputs.units, self.inputs.scales),
            recording.batch.header_at(self.slot),
            products,
        )
        return launch.given(*arguments)


# -- Attention -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RopeAppend:
    """Norms of heads, rotation, and the cache of a layer."""

    recording: Recording
    q: Rows
    k: Rows
    v: Rows
    rope: Rope | None
    layer: int
    norms: tuple[CUDAVector | None, CUDAVector | None]
    eps: float

    def launches(self, extent: Extent) -> Iterator[Launch]:
        recording, cache, rope = self.recording, self.recording.cache, self.rope
        batch, shape = recording.batch, cache.layout.shape
        n_heads, n_pairs = self.q.width // shape.head_dim, 0 if rope is None else len(rope.frequencies)
        given = sum(1 << i for i, norm in enumerate(self.norms) if norm is not None)
        keys, key_scales, values, value_scales = cache.layer(self.layer)
        arguments: tuple[Argument, ...] = (
            *(batch.header, batch.slots, batch.positions),
            *(_NULL if rope is None else recording.phases(rope), np.int32(n_pairs)),
            *(np.int32(rope is not None and rope.interleaved), np.float32(1.0 if rope is None else rope.magnitude)),
            *(self.q.memory, np.int32(self.q.stride)),
            *(self.k.memory, self.v.memory, np.int32(self.k.stride)),
            *(np.int32(n_heads), np.int32(shape.n_kv_heads)),
            *(_NULL if norm is None else norm.memory for norm in self.norms),
            *(np.int32(given), np.float32(self.eps)),
            *(keys, key_scales, values, value_scales),
        )
        grid = (-(-(n_heads + 2 * shape.n_kv_heads) // _HEADS_PER_BLOCK), extent.n_tokens)
        block = (32 * _HEADS_PER_BLOCK,)
        yield Launch("append", "rope_append", cache.append_defines, grid, block, arguments=arguments)


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention over the cache of a layer."""

    recording: Recording
    heads: Heads
    variant: Variant
    layer: int
    scale: float
    soft_cap: float | None
    sinks: CUDAVector | None
    q: Rows
    y: Rows

    def launches(self, extent: Extent) -> Iterator[Launch]:
        recording, heads = self.recording, self.heads
        work, cache = extent.work(heads), recording.cache.layer(self.layer)
        sums, states = recording.parts(heads, work)
        parts = sums, states, np.int32(work.max_parts), np.int32(work.part_rows)
        q, out = ((rows.memory, np.int32(rows.stride)) for rows in (self.q, self.y))
        scoring = np.float32(self.scale), np.float32(self.soft_cap or 0)
        sinks = _NULL if self.sinks is None else self.sinks.memory
        own: dict[str, tuple[Argument, ...]] = {
            "attention_prefill": (*cache, *q, *out, sinks, *scoring),
            "attention_split": (*cache, *q, *parts, *scoring),
            "attention_merge": (*parts, *out, sinks),
        }
        stride = np.int32(recording.batch.layout.table_stride)
        for launch in attention.launches(work, heads, self.variant, recording.properties.n_multiprocessors):
            limits = *attention.token_range(launch, work), heads.window
            numbers = stride, *map(np.int32, (heads.n_kv_heads, heads.group_size, *limits))
            yield launch.given(*recording.batch.attention, *numbers, *own[launch.kernel])


# -- Choice of tokens ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Choose:
    """The k best of each row of logits: ids, best first, and their logits."""

    batch: DeviceBatch
    logits: Rows
    k: int
    ids: DeviceMemory
    values: DeviceMemory
    parts: DeviceMemory | None

    def launches(self, extent: Extent) -> Iterator[Launch]:
        logits, header, n = self.logits, self.batch.header, extent.n_outputs
        rows, best = _row_arguments(logits), (self.ids, self.values)
        if self.parts is None:
            yield from _elementwise("argmax", (n,), _SORT_THREADS, header, *rows, *best)
            return
        n_parts, k = -(-logits.width // SORTED), np.int32(self.k)
        yield from _elementwise("top_parts", (n_parts, n), _SORT_THREADS, header, *rows, k, self.parts)
        keys = np.int32(n_parts * self.k)
        yield from _elementwise("top_merge", (n,), _SORT_THREADS, header, self.parts, keys, k, *rows[:2], *best)


# -- Fusion --------------------------------------------------------------------------------------------------------


def fused(operations: Iterable[Operation]) -> list[Operation]:
    """The same with norms and gates that leave integers at once, where nobody wants their floats.

    Buffers see to it that the integers lie nowhere where such an operation still reads: see `Buffer`.
    """
    result: list[Operation] = []
    for operation in operations:
        last = result[-1] if result else None
        if (
            isinstance(operation, Quantise)
            and not operation.format.is_float
            and isinstance(last, Norm | Gate)
            and last.y is operation.x
            and last.y.reads == 1
        ):
            result[-1] = replace(last, inputs=operation.inputs)
        else:
            result.append(operation)
    return result
