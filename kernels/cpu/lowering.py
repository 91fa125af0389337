"""Lowering of a graph to a program of CPU kernels: the kernel calls that compute each operation.

Lowering runs nothing and needs no weights, so it also reports the memory of a step before anything is loaded.  One
program serves every batch, because kernels read the number of tokens when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.kernels import graph as g
from localllm.kernels import operations as ops
from localllm.kernels.backend import check_operations
from localllm.kernels.buffers import Address, Buffer, assign
from localllm.kernels.cpu import attention as attention_kernels
from localllm.kernels.cpu import elementwise, matmul, recurrent, selection
from localllm.kernels.cpu import experts as expert_kernels
from localllm.kernels.cpu.batch import (
    ALWAYS,
    N_CHOSEN,
    N_EMBEDDED,
    N_HELD,
    N_OUTPUTS,
    N_SEQUENCES,
    N_TOKENS,
    N_USED,
    BatchTables,
)
from localllm.kernels.cpu.cache import CPUCache, block_bytes, state_bytes
from localllm.kernels.cpu.cache_types import PAGE, layouts_of
from localllm.kernels.cpu.compiler import Kernel, variant
from localllm.kernels.cpu.expert_pool import ExpertGroup, stays_in_file
from localllm.kernels.cpu.memory import PADDING, padded
from localllm.kernels.cpu.program import Argument, Instruction
from localllm.kernels.cpu.simd import load_bf16x16, load_f16x16, load_f32x16
from localllm.kernels.cpu.target import Target
from localllm.kernels.cpu.tiles import TILES, TOKENS, x_tile_bytes
from localllm.kernels.cpu.weights import CPUPackedWeights
from localllm.kernels.graph import Graph, RecurrentState, Rows, Tensor, Value, Weight
from localllm.kernels.operations.experts import GATINGS
from localllm.kernels.operations.recurrent import side_by_side
from localllm.quant.lut import KernelType
from localllm.quant.packing import GROUP, LAYOUTS
from localllm.quant.types import GGMLType

_SLOTS = {Rows.TOKENS: N_TOKENS, Rows.OUTPUTS: N_OUTPUTS, Rows.CHOSEN: N_CHOSEN}

_ACTIVATIONS = {
    "silu": elementwise.silu,
    "gelu": elementwise.gelu,
    "gelu_erf": elementwise.gelu_erf,
    "gelu_quick": elementwise.gelu_quick,
    "relu2": elementwise.relu2,
    "tanh": elementwise.tanh_of_gate,
    "sigmoid": elementwise.sigmoid_of_gate,
    "identity": elementwise.identity,
    "clamped_swiglu": elementwise.clamped_swiglu,
    "softplus": elementwise.softplus_of_gate,
}

#: Kernels that compute each value of a result from one value of x, and their numbers.
_ELEMENTWISE: dict[type[g.Operation[Any]], tuple[Kernel, Callable[[Any], tuple[float, ...]]]] = {
    ops.Clamp: (elementwise.clamp, lambda op: (op.low, op.high)),
    ops.Softcap: (elementwise.softcap, lambda op: (op.cap, 1 / op.cap)),
    ops.XIELU: (elementwise.xielu, lambda op: (op.p, op.n, op.beta, op.eps)),
}

_FLOAT_LOADS: dict[KernelType, Any] = {
    GGMLType.F32: load_f32x16,
    GGMLType.F16: load_f16x16,
    GGMLType.BF16: load_bf16x16,
}


#: A number of positions larger than any context length.
ALL = 1 << 31


@dataclass(frozen=True, eq=False, kw_only=True)
class HostRows:
    """A float32 matrix [rows, padded width] in a buffer."""

    buffer: Buffer
    width: int
    slot: int  # index in the batch's header of the number of rows

    @property
    def stride(self) -> int:
        """Bytes between rows."""
        return 4 * padded(self.width)

    def rows(self, arena: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the whole matrix, including padding."""
        data = arena[self.buffer.offset : self.buffer.offset + self.buffer.n_bytes]
        return data.view(np.float32).reshape(-1, padded(self.width))


@dataclass(frozen=True)
class StoredRouting:
    """The experts chosen for each token, and their pairs grouped by expert, as drawn in `experts`."""

    n_places: int
    ids: Address
    weights: Address
    cursors: Address
    places: Address
    pairs: Address
    entries: Address

    @property
    def buffer(self) -> Buffer:
        return self.ids.buffer


@dataclass(frozen=True)
class CPULowered:
    """A program whose buffers have offsets."""

    instructions: Sequence[Instruction]
    tables: BatchTables  # tables of the batch, filled before the program runs
    embeddings: Sequence[tuple[ops.Embed, HostRows]]  # embeddings to look up, and the matrix for their rows
    ngrams: Sequence[tuple[ops.NgramEmbed, HostRows]]  # n-gram embeddings, in the same form
    adapters: Sequence[tuple[ops.AdapterWeights, HostRows]]  # weights of adapters, in the same form
    added: Sequence[tuple[ops.AddRows, HostRows]]  # embeddings that layers add, in the same form
    hidden: Sequence[tuple[ops.Input, HostRows]]  # input rows of the graph
    result: HostRows
    watched: Mapping[Value, HostRows | StoredRouting]
    arena_bytes: int  # size of all buffers
    n_products: int  # products of activations and weights per token
    n_joined: int  # rows that one output row is made from


class CPULowering:
    """Builds the program of a graph, for batches of at most ``max_tokens`` tokens and ``max_outputs`` outputs."""

    def __init__(
        self,
        graph: Graph,
        weights: CPUPackedWeights,
        cache: CPUCache,
        target: Target,
        threads: int,
        *,
        max_tokens: int,
        max_outputs: int,
    ) -> None:
        check_operations(graph, CPULowering, "cpu")
        self.graph, self.weights, self.cache, self.target = graph, weights, cache, target
        self.threads = threads
        n_chosen = graph.n_chosen()
        self.n_rows = {N_TOKENS: max_tokens, N_OUTPUTS: max_outputs, N_CHOSEN: max_tokens * n_chosen}
        self.tables = BatchTables(graph, max_tokens, max_outputs, cache.n_pages, threads)
        self.layers, self.states = cache.places, cache.states
        self.last_uses = graph.last_uses()
        self.node_index = 0
        self.instructions: list[Instruction] = []
        self.stored: dict[Value, Any] = {}
        #: Quantised rows of tensors, in the layout of `tiles`.
        self.records: dict[Tensor, Buffer] = {}
        self.int16: dict[Tensor, Buffer] = {}
        self.embeddings: list[tuple[ops.Embed, HostRows]] = []
        self.ngrams: list[tuple[ops.NgramEmbed, HostRows]] = []
        self.adapters: list[tuple[ops.AdapterWeights, HostRows]] = []
        self.added: list[tuple[ops.AddRows, HostRows]] = []
        self.hidden: list[tuple[ops.Input, HostRows]] = []
        self.n_products = 0

    def lower(self) -> CPULowered:
        for i, node in enumerate(self.graph.nodes):
            self.node_index = i
            self.stored.update(node.operation.computed_by(self))
        result = self.stored[self.graph.result]
        rows = *self.embeddings, *self.ngrams, *self.adapters, *self.added, *self.hidden
        filled = [*self.tables.buffers, *(y.buffer for _, y in rows)]
        watched = {x: self.stored[x] for x in self.graph.watched if x in self.stored}
        n_bytes = assign([*self._stages(), [result.buffer, *(stored.buffer for stored in watched.values())]], filled)
        return CPULowered(
            self.instructions,
            self.tables,
            self.embeddings,
            self.ngrams,
            self.adapters,
            self.added,
            self.hidden,
            result,
            watched,
            n_bytes,
            self.n_products,
            self.graph.n_joined,
        )

    def _stages(self) -> list[list[Buffer]]:
        """Return the buffers of each group of instructions that run without waiting for each other."""
        stages: list[list[Buffer]] = [[]]
        for instruction in self.instructions:
            for x in instruction.arguments:
                buffer = x.buffer if isinstance(x, Address) else x
                if isinstance(buffer, Buffer) and buffer.address is None:
                    stages[-1].append(buffer)
            if instruction.wait:
                stages.append([])
        return stages

    # -- Memory ----------------------------------------------------------------------------------------------------

    def new(self, rows: Rows, width: int, *, is_kept: bool = False, writes_padding: bool = True) -> HostRows:
        """Allocate a matrix for a tensor.

        Args:
            is_kept: do not share the memory with other buffers, because it is filled before the program runs.
            writes_padding: whether the kernel writes the padding of each row. If it does not, memory with padding is
                kept: it is zero at first, and the padding stays zero.
        """
        slot = _SLOTS[rows]
        is_kept = is_kept or (not writes_padding and width % PADDING != 0)
        return HostRows(buffer=Buffer(self.n_rows[slot] * 4 * padded(width), is_kept), width=width, slot=slot)

    def in_place(self, op: g.Operation[Tensor]) -> HostRows:
        """Allocate a result, in the memory of the input that it may overwrite if nothing reads this input later."""
        x = getattr(op, op.overwrites) if op.overwrites else None
        if x is not None and self.last_uses[x] == self.node_index:
            stored: HostRows = self.stored[x]
            return stored
        return self.new(op.result.rows, op.result.width)

    def records_of(self, x: Tensor) -> Buffer:
        """Return the quantised rows of a tensor; the first call adds the kernel that quantises them."""
        if x not in self.records:
            s = self.stored[x]
            n_blocks = s.width // 32
            records = Buffer(-(-self.n_rows[s.slot] // TOKENS) * x_tile_bytes.function(n_blocks))
            self.records[x] = records
            self.call(elementwise.quantise, (s.buffer, n_blocks, s.stride, records), 1, s.slot)
        return self.records[x]

    def int16_of(self, x: Tensor) -> Buffer:
        """Return the rows of a tensor as 16-bit integers, in the layout of `matmul`."""
        if x not in self.int16:
            s = self.stored[x]
            n_blocks = padded(s.width) // 32
            records = Buffer(padded(self.n_rows[s.slot]) * n_blocks * matmul.INT16_RECORD)
            self.int16[x] = records
            self.call(elementwise.quantise_int16, (s.buffer, n_blocks, s.stride, records), 1, s.slot)
        return self.int16[x]

    def call(
        self,
        kernel: Kernel,
        arguments: Sequence[Argument],
        units: int,
        slot: int,
        *,
        wait: bool = True,
        **constants: Any,
    ) -> None:
        code = variant(kernel, self.target, **constants)
        self.instructions.append(Instruction(code, arguments, units, slot, wait))

    def counter(self, slot: int) -> Address:
        """Return the address of a number in the header."""
        return self.tables.header.at(8 * slot)

    # -- Rows ------------------------------------------------------------------------------------------------------

    def input(self, op: ops.Input) -> HostRows:
        # Filled before the program runs, as an embedding is: kernels must not write to this memory.
        y = self.new(Rows.TOKENS, op.x.width, is_kept=True)
        self.hidden.append((op, y))
        return y

    def embed(self, op: ops.Embed) -> HostRows:
        y = self.new(Rows.TOKENS, op.result.width, is_kept=True)
        self.embeddings.append((op, y))
        return y

    def ngram_embed(self, op: ops.NgramEmbed) -> HostRows:
        y = self.new(Rows.TOKENS, op.result.width, is_kept=True)
        self.ngrams.append((op, y))
        return y

    def adapter_weights(self, op: ops.AdapterWeights) -> HostRows:
        y = self.new(Rows.TOKENS, op.result.width, is_kept=True)
        self.adapters.append((op, y))
        return y

    def add_rows(self, op: ops.AddRows) -> HostRows:
        x: HostRows = self.stored[op.x]
        rows = self.new(Rows.TOKENS, op.x.width, is_kept=True)
        self.added.append((op, rows))
        arguments = self.tables.embedded, rows.buffer, x.stride // 4, x.stride, x.buffer
        self.call(elementwise.add_rows, arguments, 1, N_EMBEDDED)
        return x

    def rms_norm(self, op: ops.RMSNorm) -> HostRows:
        x, y = self.stored[op.x], self.new(op.x.rows, op.x.width)
        weight = self.weights.vector(op.weight)
        n = x.width // op.n_groups
        width = x.stride // 4 if op.n_groups == 1 else n
        step = 4 * n if op.weight is not None and op.weight.shape == (x.width,) else 0
        arguments = (x.buffer, weight, op.n_groups, n, width, step, x.stride, y.buffer, y.stride, float(op.eps))
        self.call(elementwise.rms_norm, arguments, 1, x.slot, WEIGHT=op.weight is not None)
        return y

    def layer_norm(self, op: ops.LayerNorm) -> HostRows:
        x, y = self.stored[op.x], self.new(op.x.rows, op.x.width)
        weight, bias = self.weights.vector(op.weight), self.weights.vector(op.bias)
        n = x.width // op.n_groups
        width = x.stride // 4 if op.n_groups == 1 else n
        arguments = (x.buffer, weight, bias, op.n_groups, n, width, x.stride, y.buffer, float(op.eps))
        self.call(elementwise.layer_norm, arguments, 1, x.slot)
        return y

    def gated(self, op: ops.Gated) -> HostRows:
        gate, up = self.stored[op.gate], self.stored[op.up]
        activation = {"ACTIVATION": _ACTIVATIONS[op.activation]}
        return self._row_by_row(elementwise.gated, op, gate, (gate.buffer, up.buffer), **activation)

    def head_gate(self, op: ops.HeadGate) -> HostRows:
        x, gate, y = self.stored[op.x], self.stored[op.gate], self.in_place(op)
        sizes = op.gate.width, 4 * op.x.width // op.gate.width, gate.stride, x.stride
        values = x.buffer, gate.buffer, *sizes, y.buffer
        self.call(elementwise.head_gate, values, 1, y.slot, ACTIVATION=_ACTIVATIONS[op.activation])
        return y

    def activation(self, op: ops.Activation) -> HostRows:
        x, activation = self.stored[op.x], {"ACTIVATION": _ACTIVATIONS[op.activation]}
        return self._row_by_row(elementwise.activation, op, x, (x.buffer,), **activation)

    def _elementwise(self, op: g.SameShape) -> HostRows:
        kernel, numbers = _ELEMENTWISE[type(op)]
        x = self.stored[op.x]
        return self._row_by_row(kernel, op, x, (x.buffer,), *map(float, numbers(op)))

    clamp = softcap = xielu = _elementwise

    def add(self, op: ops.Add) -> HostRows:
        x, gated = self.stored[op.x], {"GATE": op.gate is not None}
        first = x.buffer, *self._address_and_stride(op.gate), self.stored[op.residual].buffer
        return self._row_by_row(elementwise.add, op, x, first, float(op.scale), **gated)

    def columns(self, op: ops.Columns) -> HostRows:
        y = self.new(op.x.rows, op.result.width, writes_padding=False)
        self._copy(self.stored[op.x], 4 * op.columns.start, y, 0, 4 * len(op.columns))
        return y

    def side_by_side(self, op: ops.SideBySide) -> HostRows:
        y, first = self.new(op.result.rows, op.result.width, writes_padding=False), 0
        for x in op.tensors:
            self._copy(self.stored[x], 0, y, 4 * first, 4 * x.width)
            first += x.width
        return y

    def _copy(self, x: HostRows, source: int, y: HostRows, target: int, n_bytes: int) -> None:
        """Copy ``n_bytes`` bytes of each row, from offset ``source`` in x to offset ``target`` in y."""
        places = x.buffer.at(source), 1, 0, x.stride, y.buffer.at(target), 0, y.stride, n_bytes
        self.call(elementwise.copy_heads, places, 1, x.slot)

    def mix_streams(self, op: ops.MixStreams) -> HostRows:
        x, y = self.stored[op.x], self.new(op.x.rows, op.result.width, writes_padding=False)
        weights, residual = self._address_and_stride(op.mixing), self._address_and_stride(op.residual)
        sizes = op.n, op.result.width // op.size, op.first, 4 * op.size
        arguments = (x.buffer, x.stride, *weights, *residual, *sizes, y.buffer, y.stride, float(op.offset))
        constants = {"WEIGHTS": op.mixing is not None, "RESIDUAL": op.residual is not None}
        self.call(elementwise.mix_streams, arguments, 1, x.slot, **constants)
        return y

    def hyper_weights(self, op: ops.HyperWeights) -> tuple[HostRows, ...]:
        x, results = self.stored[op.x], tuple(self.new(op.x.rows, y.width, writes_padding=False) for y in op.result)
        addresses = (*(y.buffer for y in results), 0, 0)[:3]
        strides = results[0].stride, results[-1].stride
        weights = self.weights.vector(op.scale), self.weights.vector(op.bias)
        numbers = float(op.eps), float(op.write_scale), float(op.write_offset)
        constants: dict[str, Any] = {"N": op.n, "PARTS": len(results), "ROUNDS": op.n_rounds}
        arguments = (x.buffer, x.stride, *weights, *addresses, *strides, *numbers)
        self.call(elementwise.hyper_weights, arguments, 1, x.slot, **constants)
        return results

    def stream_gate(self, op: ops.StreamGate) -> HostRows:
        key, query, y = self.stored[op.key], self.stored[op.query], self.new(op.key.rows, op.n, writes_padding=False)
        sizes = op.n, 4 * op.size, y.buffer, y.stride, op.size**-0.5
        self.call(elementwise.stream_gate, (key.buffer, key.stride, query.buffer, query.stride, *sizes), 1, key.slot)
        return y

    def root_mean_square(self, op: ops.RootMeanSquare) -> HostRows:
        x, y = self.stored[op.x], self.new(op.x.rows, 1, writes_padding=False)
        arguments = x.buffer, x.width, x.stride // 4, x.stride, y.buffer, y.stride
        self.call(elementwise.root_mean_square, arguments, 1, x.slot)
        return y

    def above_deviation(self, op: ops.AboveDeviation) -> HostRows:
        x, y = self.stored[op.x], self.new(op.x.rows, op.x.width)
        arguments = x.buffer, x.width, x.stride // 4, x.stride, y.buffer, float(op.factor)
        self.call(elementwise.above_deviation, arguments, 1, x.slot)
        return y

    def scale(self, op: ops.Scale) -> HostRows:
        x, weighted = self.stored[op.x], {"WEIGHT": op.weight is not None}
        first = x.buffer, self.weights.vector(op.weight)
        return self._row_by_row(elementwise.scale, op, x, first, float(op.factor), **weighted)

    def outputs(self, op: ops.Outputs) -> HostRows:
        x, rows, n = self.stored[op.x], self.tables.output_rows, op.n_joined
        if n == 1:
            return self._row_by_row(elementwise.gather_rows, op, x, (rows, x.buffer))
        y = self.new(Rows.OUTPUTS, op.result.width, writes_padding=False)
        width = x.stride // 4 if op.is_mean else x.width
        arguments = (rows, n, x.buffer, width, x.stride, y.buffer, y.stride, 1 / n)
        self.call(elementwise.join_rows, arguments, 1, y.slot, MEAN=op.is_mean)
        return y

    def _row_by_row(
        self,
        kernel: Kernel,
        op: g.Operation[Tensor],
        x: HostRows,
        first: tuple[Argument, ...],
        *last: Argument,
        **constants: Any,
    ) -> HostRows:
        """Call a kernel with ``first``, the width and stride of x, the result, and ``last``."""
        y = self.in_place(op)
        self.call(kernel, (*first, x.stride // 4, x.stride, y.buffer, *last), 1, y.slot, **constants)
        return y

    # -- Products --------------------------------------------------------------------------------------------------

    def linear(self, op: ops.Linear) -> HostRows:
        # The result may overwrite the residual, but not if the residual is also x, which other units still multiply.
        y = self.new(op.x.rows, op.matrix.n_out) if op.residual is op.x else self.in_place(op)
        residual = 0 if op.residual is None else self.stored[op.residual].buffer
        self._multiply(op.x, op.matrix, y, residual, wait=True)
        return y

    def linears(self, op: ops.Linears) -> tuple[HostRows, ...]:
        results = tuple(self.new(op.x.rows, matrix.n_out) for matrix in op.matrices)
        for matrix in op.matrices:  # before the products, which do not wait for each other
            if self.weights.matrix(matrix.weight)[1] in TILES:
                self.records_of(op.x)
            elif self.graph.rounds_floats:
                self.int16_of(op.x)
        for i, (matrix, y) in enumerate(zip(op.matrices, results, strict=True)):
            self._multiply(op.x, matrix, y, 0, wait=i == len(results) - 1)
        return results

    def _multiply(self, x: Tensor, matrix: g.Matrix, y: HostRows, residual: Argument, *, wait: bool) -> None:
        address, format = self.weights.matrix(matrix.weight)
        bias = self.weights.vector(matrix.bias)
        groups, s, arguments = padded(matrix.n_out) // GROUP, self.stored[x], list[Argument]()
        if format in TILES:
            kernel, units = matmul.matmul_quantised, groups
            arguments += [matrix.n_in // LAYOUTS[format].columns, self.records_of(x)]
        elif self.graph.rounds_floats:
            kernel, units = matmul.matmul_int16, groups
            arguments += [matrix.n_in, self.int16_of(x)]
        else:
            kernel, units = matmul.matmul_float, groups // matmul.FLOAT_GROUPS
            arguments += [matrix.n_in, s.buffer, s.stride]
        arguments = [self.counter(s.slot), address, *arguments, bias, residual, y.buffer, y.stride]
        constants = _format_constants(format)
        if kernel is not matmul.matmul_int16:
            arguments, constants = [*arguments, 0, 0, 0], {**constants, "HEADS": False}
        self.call(kernel, arguments, units, ALWAYS, wait=wait, **constants)
        self.n_products += matrix.n_in * matrix.n_out

    def head_linear(self, op: ops.HeadLinear) -> HostRows:
        x, y, (n_heads, n_out, n_in) = self.stored[op.x], self.new(op.x.rows, op.result.width), op.weight.shape
        x_head, rest_bytes = 4 * (n_in + op.n_rest), 4 * op.n_rest  # bytes
        if rest_bytes:
            source = x.buffer.at(4 * n_in), n_heads, x_head, x.stride
            target = y.buffer.at(4 * n_out), 4 * n_out + rest_bytes, y.stride, rest_bytes
            self.call(elementwise.copy_heads, (*source, *target), 1, x.slot, wait=False)
        address, format = self.weights.matrix(op.weight)
        arguments: list[Argument] = [self.counter(x.slot), address]
        if format in TILES:
            n_blocks = n_in // 32
            record_head = -(-self.n_rows[x.slot] // TOKENS) * x_tile_bytes.function(n_blocks)
            records = Buffer(n_heads * record_head)
            values = x.buffer, n_heads, x_head, n_blocks, x.stride, records, record_head
            self.call(elementwise.quantise_heads, values, 1, x.slot)
            kernel, units = matmul.matmul_quantised, n_out // GROUP
            arguments += [
                n_in // LAYOUTS[format].columns,
                records,
                0,
                0,
                y.buffer,
                y.stride,
                units,
                record_head,
                rest_bytes,
            ]
        else:
            kernel, units = matmul.matmul_float, n_out // GROUP // matmul.FLOAT_GROUPS
            arguments += [n_in, x.buffer, x.stride, 0, 0, y.buffer, y.stride, units, x_head, rest_bytes]
        self.call(kernel, arguments, n_heads * units, ALWAYS, HEADS=True, **_format_constants(format))
        self.n_products += n_heads * n_in * n_out
        return y

    # -- Attention -------------------------------------------------------------------------------------------------

    def rope_append(self, op: ops.RopeAppend) -> HostRows:
        q: HostRows = self.stored[op.q]
        cache, (key_layout, value_layout), rope, tables = op.cache, layouts_of(op.cache), op.rope, self.tables
        n_pairs = 0 if rope is None else len(rope.frequencies)
        angles = 0 if rope is None or not n_pairs else tables.angles(rope)
        # Bytes from one pair to the next, and from a pair's first value to its second.
        step, offset = (8, 4) if rope is not None and rope.interleaved else (4, 4 * n_pairs)
        dims = cache.key_dim, cache.key_dim, cache.value_dim
        norms = [self._norm(norm, dim) for norm, dim in zip(op.norms, dims, strict=True)]
        scale = op.q_scale
        factors = (0, 1, 0) if scale is None else (tables.position_factors(scale), scale.length, scale.offset)
        # An operation without keys uses the cache of another layer.
        keys, values = self.layers[cache.key] if op.k is not None else (0, 0)
        key_block, value_block = block_bytes(cache)
        self.call(
            elementwise.rope_append,
            (
                *(tables.slots[self.graph.group(cache)], tables.positions),
                tables.turns if rope is not None and rope.axes else tables.positions,
                *(angles, n_pairs, step, offset),
                *(q.buffer, q.stride, 0 if op.q is op.k else q.width // cache.key_dim, cache.key_dim),
                *self._address_and_stride(op.k),
                *self._address_and_stride(op.v),
                *(cache.n_heads, cache.value_dim, keys, values),
                *(number for weight, n, _ in norms for number in (weight, n)),
                *factors,
                *(eps for _, _, eps in norms),
            ),
            1,
            N_TOKENS,
            Q_NORM=_norm_kind(op.q_norm),
            K_NORM=_norm_kind(op.k_norm),
            V_NORM=_norm_kind(op.v_norm),
            NORM_LAST=int(op.norm_last),
            ROPE_FIRST=0 if rope is None else 4 * rope.first,
            HAS_KEYS=int(op.k is not None),
            HAS_VALUES=int(op.v is not None),
            COPY_VALUES=int(op.v is op.k),
            SCALES_Q=int(scale is not None),
            KEY_HEAD=key_layout.head(cache.key_dim),
            VALUE_HEAD=value_layout.head(cache.value_dim),
            KEY_BITS=key_layout.bits,
            VALUE_BITS=value_layout.bits,
            KEY_BLOCK=key_block,
            VALUE_BLOCK=value_block,
            STRIDE=cache.stride,
            KEY_ROTATION=cache.rotations[0],
            VALUE_ROTATION=cache.rotations[1],
            APPEND_KEYS=key_layout.append,
            APPEND_VALUES=value_layout.append,
        )
        return q

    def _address_and_stride(self, x: Tensor | None) -> tuple[Argument, Argument]:
        """Return the address of the rows of x and their stride in bytes; 0 without x."""
        return (0, 0) if x is None else (self.stored[x].buffer, self.stored[x].stride)

    def _norm(self, norm: g.HeadNorm | None, dim: int) -> tuple[Argument, int, float]:
        """Return the weights of a norm, the number of values that it covers, and eps."""
        if norm is None:
            return 0, dim, 0.0
        n = dim if norm.weight is None else norm.weight.shape[0]
        return self.weights.vector(norm.weight), n, float(norm.eps)

    def attention(self, op: ops.Attention) -> HostRows:
        cache, tables = op.cache, self.tables
        n_heads, head, q = cache.n_heads, layouts_of(cache)[1].head(cache.value_dim), self.stored[op.q]
        sees: dict[str, Any] = {"causal": op.causal, "has_spans": op.has_spans}
        sees_span = op.has_spans and not op.causal  # a window of one token at the span's first position
        if op.selected is not None or op.entries is not None:
            most = ALL if op.selected is None else op.n_selected
            sees["gathered"] = (0, 1, most) if op.entries is None else (op.window or 0, op.entries.stride, most)
        table = tables.tile_table(n_heads, op.group_size, head, **sees)
        sinks = self.weights.vector(op.sinks)
        # The kernel writes heads, but not the padding after the last head.
        width = op.result.width
        y = self.new(Rows.TOKENS, width, writes_padding=False)
        partials = Buffer(table.max_partials * table.partial_bytes) if table.max_partials else 0
        self.call(
            attention_kernels.attention,
            (
                *(self.counter(table.slot), table.tiles, n_heads, op.group_size),
                *(q.buffer, q.stride, cache.key_dim, cache.value_dim),
                *(tables.starts, tables.firsts if sees_span else tables.positions),
                tables.lasts if op.has_spans else tables.positions,
                *(tables.block_tables[self.graph.group(cache)], tables.n_blocks),
                *(1 if sees_span else op.window or op.chunk or tables.n_blocks * PAGE, *self.layers[cache.key]),
                *(y.buffer, y.stride, partials, sinks, self.weights.vector(op.slopes or op.biases)),
                *self._address_and_stride(op.selected),
                *self._entries(op.entries),
                *(float(op.scale) / (op.softcap or 1.0), float(op.softcap or 0)),
            ),
            n_heads,
            table.slot,
            **attention_kernels.constants(op, self.target),
        )
        if table.max_partials:
            arguments = (
                *(self.counter(table.slot + 1), table.merged, n_heads, op.group_size, cache.value_dim),
                *(tables.starts, partials, sinks, y.buffer, y.stride),
            )
            constants: dict[str, Any] = attention_kernels.state_constants(op)
            self.call(attention_kernels.merge_partials, arguments, n_heads, table.slot + 1, **constants)
        return y

    def _entries(self, cache: g.KVCache | None) -> tuple[Argument, Argument]:
        """Return the address of a cache of compressed entries and its block tables; 0 without a cache."""
        if cache is None:
            return 0, 0
        return self.layers[cache.key][0], self.tables.block_tables[self.graph.group(cache)]

    def compress(self, op: ops.Compress) -> HostRows:
        cache, tables, width = op.cache, self.tables, op.result.width
        y = self.new(Rows.TOKENS, width, writes_padding=False)
        values = (
            *(tables.starts, tables.positions, tables.block_tables[self.graph.group(cache)], tables.n_blocks),
            *(self.layers[cache.key][0], self.weights.vector(op.biases), 4 * padded(op.biases.shape[1])),
            *(y.buffer, y.stride),
        )
        self.call(selection.compress, values, 1, N_TOKENS, **selection.compress_constants(op))
        return y

    def index_select(self, op: ops.IndexSelect) -> HostRows:
        cache, tables, lanes = op.cache, self.tables, 2 * self.threads
        q, y = self.stored[op.q], self.new(Rows.TOKENS, op.result.width)
        row_bytes = 8 * padded(-(-tables.n_blocks * PAGE // op.run) * op.n_choices)
        scores = Buffer(lanes * row_bytes)
        values = (
            *(self.counter(N_TOKENS), lanes, q.buffer, q.stride, *self._address_and_stride(op.head_weights)),
            *(tables.starts, tables.positions, tables.block_tables[self.graph.group(cache)], tables.n_blocks),
            *(self.layers[cache.key][0], scores, row_bytes),
        )
        constants = selection.constants(op, wide=self.target.wide)
        if op.pool is not None:
            slots, keys = tables.slots[self.graph.group(cache)], self.layers[cache.key][0]
            arguments = tables.positions, slots, self.weights.vector(op.pool), keys
            self.call(selection.pool_keys, arguments, 1, N_TOKENS, **constants)
        self.call(selection.index_scores, values, lanes, ALWAYS, **constants)
        self.call(selection.index_select, (*values, y.buffer, y.stride), lanes, ALWAYS, **constants)
        return y

    # -- Recurrent states ------------------------------------------------------------------------------------------

    def causal_conv(self, op: ops.CausalConv) -> HostRows:
        x, width, kernel = self.stored[op.x], op.x.width, op.weight.shape[1]
        y = self.new(Rows.TOKENS, width, writes_padding=False)
        weights = self.weights.vector(op.weight), self.weights.vector(op.bias)
        sequences, stride = self.sequences(op.state), state_bytes(op.state) // (kernel - 1)
        arguments = *sequences, x.buffer, x.stride, *weights, y.buffer, stride
        constants: dict[str, Any] = {"KERNEL": kernel, "SILU": op.silu, "BIAS": op.bias is not None}
        self.call(recurrent.causal_conv, arguments, 1, N_TOKENS, **constants)
        self.call(recurrent.keep_inputs, (*sequences, x.buffer, x.stride, stride, kernel - 1), 1, N_SEQUENCES)
        return y

    def gated_delta(self, op: ops.GatedDelta) -> HostRows:
        n_heads, d_k, d_v = op.state.shape
        keys = op.n_key_heads * d_k
        q, k, v = self._side_by_side(op.qkv, (keys, keys, n_heads * d_v))
        per_group = n_heads // op.n_key_heads if op.is_grouped else 0
        gates = *self._address_and_stride(op.decay), *self._address_and_stride(op.beta)
        weights = self.weights.vector(op.a), self.weights.vector(op.dt_bias)
        constants = {"DELTA": True, "PER_CHANNEL": op.is_per_channel, "BOUNDED": op.bound != 0}
        values, numbers = (*q, *k, *v, *gates, *weights, 0), (float(op.eps), d_k**-0.5, float(op.bound))
        return self._recurrence(op, values, op.n_key_heads, per_group, numbers, constants)

    def scan(self, op: ops.Scan) -> HostRows:
        n_heads, n, p = op.state.shape
        x, b, c = self._side_by_side(op.xbc, (n_heads * p, op.n_groups * n, op.n_groups * n))
        a, dt_bias, d = map(self.weights.vector, (op.a, op.dt_bias, op.d))
        values = (*c, *b, *x, *self._address_and_stride(op.dt), 0, 0, a, dt_bias, d)
        constants = {"DELTA": False, "PER_CHANNEL": False, "BOUNDED": False}
        return self._recurrence(op, values, op.n_groups, n_heads // op.n_groups, (0.0, 1.0, 0.0), constants)

    def channel_scan(self, op: ops.ChannelScan) -> HostRows:
        y = self.new(Rows.TOKENS, op.x.width, writes_padding=False)
        rows = (value for z in (op.x, op.dt, op.b, op.c) for value in self._address_and_stride(z))
        weights = map(self.weights.vector, (op.a, op.dt_bias, op.d))
        sequences = self.counter(N_SEQUENCES), *self.sequences(op.state)
        arguments = (*sequences, *rows, *weights, state_bytes(op.state) // op.b.width, y.buffer)
        self.call(recurrent.channel_scan, arguments, op.x.width // 16, N_SEQUENCES, N=op.b.width)
        return y

    def _recurrence(
        self,
        op: ops.GatedDelta | ops.Scan,
        values: tuple[Argument, ...],
        n_groups: int,
        per_group: int,
        numbers: tuple[float, float, float],
        constants: dict[str, Any],
    ) -> HostRows:
        n_heads, rows, columns = op.state.shape
        vectors = 2 if columns % 32 == 0 else 1
        y = self.new(Rows.TOKENS, op.result.width, writes_padding=False)
        sequences = self.counter(N_SEQUENCES), *self.sequences(op.state)
        arguments = (*sequences, *values, n_groups, per_group, columns, y.buffer, y.stride)
        units = n_heads * columns // (16 * vectors)
        constants |= {"ROWS": rows, "VECTORS": vectors}
        self.call(recurrent.recurrence, (*arguments, *numbers), units, N_SEQUENCES, **constants)
        return y

    def _side_by_side(self, tensors: tuple[Tensor, ...], widths: tuple[int, ...]) -> list[tuple[Argument, int]]:
        """Return the address and the stride in bytes of each tensor of a joined matrix."""
        places = ((self.stored[x], first) for x, first in side_by_side(tensors, widths))
        return [(stored.buffer.at(4 * first), stored.stride) for stored, first in places]

    def sequences(self, state: RecurrentState) -> tuple[Argument, ...]:
        """Return a batch's tables for kernels with a state: rows of sequences, positions, and state slots."""
        tables = self.tables
        return tables.starts, tables.positions, tables.states, self.states[state], state_bytes(state)

    # -- Experts ---------------------------------------------------------------------------------------------------

    def route(self, op: ops.Route) -> StoredRouting:
        logits, n_experts = self.stored[op.logits], op.result.n_experts
        n_pairs = self.n_rows[N_CHOSEN]
        # The places of each expert start at a whole tile.
        n_places = (n_pairs + (TOKENS - 1) * min(n_experts, n_pairs)) // TOKENS * TOKENS
        words = (n_pairs, -(-n_pairs // 2), n_experts, n_pairs, n_places, 3 * n_experts)
        memory = Buffer(8 * sum(words))
        choice = StoredRouting(n_places, *(memory.at(8 * at) for at in accumulate(words[:-1], initial=0)))
        scores, probabilities = logits, None
        if not op.is_by_logits:
            scores, probabilities = (self.new(Rows.TOKENS, n_experts) for _ in range(2))
            bias = self.weights.vector(op.selection_bias)
            values = (logits.buffer, logits.stride, n_experts, bias, op.n_groups, op.n_top_groups, op.n_group_best)
            scored = *self._address_and_stride(op.expert_ids), op.k, probabilities.buffer, scores.buffer
            self.call(expert_kernels.expert_scores, (*values, *scored), 1, N_TOKENS, GATING=GATINGS.index(op.gating))
        factors = self.weights.vector(op.expert_scales)
        weighed = 0 if probabilities is None else probabilities.buffer
        arguments = (scores.buffer, weighed, logits.stride, n_experts, op.k, int(op.norm_topk_prob), choice.ids)
        to = choice.weights, factors, float(op.scale)
        self.call(expert_kernels.route, (*arguments, *to), 1, N_TOKENS, PROBABILITIES=probabilities is not None)
        grouping = (
            *(self.counter(N_CHOSEN), choice.ids, n_experts),
            *(choice.cursors, choice.places, choice.pairs, choice.entries, self.counter(N_USED)),
        )
        self.call(expert_kernels.group_by_expert, grouping, 1, ALWAYS)
        return choice

    def expert_linears(self, op: ops.ExpertLinears) -> tuple[HostRows, ...]:
        return self._multiply_experts(op.x, op.experts, op.biases, op.routing, is_weighted=op.is_weighted)

    def expert_output(self, op: ops.ExpertOutput) -> HostRows:
        biases = () if op.bias is None else (op.bias,)
        products = self._multiply_experts(op.h, (op.experts,), biases, op.routing)[0]
        residual, y = 0 if op.residual is None else self.stored[op.residual].buffer, self.in_place(op)
        weights = self.stored[op.routing].weights if op.is_weighted else 0
        arguments = (products.buffer, weights, op.routing.k, y.stride // 4, y.stride, residual, y.buffer)
        self.call(expert_kernels.add_experts, arguments, 1, N_TOKENS)
        if self.weights.pool is not None:
            self.stored[op.result] = y
            self._read_ahead(op.result, self.weights.pool.call)
        return y

    def _multiply_experts(
        self,
        x: Tensor,
        experts: Sequence[Weight],
        biases: Sequence[Weight],
        routing: g.Routing,
        *,
        is_weighted: bool = False,
    ) -> tuple[HostRows, ...]:
        """Multiply rows of x with the matrices of the experts.  x has a row per token, or a row per pair."""
        choice, s = self.stored[routing], self.stored[x]
        formats = [self.weights.matrix(weight)[1] for weight in experts]
        results = tuple(self.new(Rows.CHOSEN, weight.shape[1]) for weight in experts)
        per_row = routing.k if s.slot == N_TOKENS else 1
        gathered = {
            as_records: self._gather(s, choice, per_row, as_records, is_weighted)
            for as_records in sorted({format in TILES for format in formats})
        }
        for entries, slot in self._hold(experts, choice, routing):
            for i, (weight, format, y) in enumerate(zip(experts, formats, results, strict=True)):
                _, n_out, n_in = weight.shape
                groups, rows, table = padded(n_out) // GROUP, gathered[format in TILES], self.weights.experts(weight)
                arguments: list[Argument] = [entries]
                if format in TILES:
                    kernel, units = expert_kernels.experts_quantised, groups
                    arguments += [units, table.ctypes.data, n_in // LAYOUTS[format].columns, rows]
                else:
                    kernel, units = expert_kernels.experts_float, groups // matmul.FLOAT_GROUPS
                    arguments += [units, table.ctypes.data, n_in, rows, s.stride]
                bias = self.weights.vector(biases[i]) if biases else 0
                arguments += [choice.pairs, bias, y.buffer, y.stride]
                self.call(kernel, arguments, units, slot, wait=i == len(results) - 1, **_format_constants(format))
        self.n_products += sum(routing.k * weight.shape[1] * weight.shape[2] for weight in experts)
        return results

    def _hold(
        self, experts: Sequence[Weight], choice: StoredRouting, routing: g.Routing
    ) -> Iterator[tuple[Address, int]]:
        """Yield the address of the entries of active experts, and the slot of their number in the header.

        Experts that stay in the file are yielded in groups, each after it was read into memory.
        """
        pool = self.weights.pool
        if pool is None or not all(map(stays_in_file, experts)):
            yield choice.entries, N_USED
            return
        group, table = self._group(experts, routing)
        entries = choice.entries
        for first in range(0, min(routing.n_experts, self.n_rows[N_CHOSEN]), group.at_once):
            group_entries = Address(entries.buffer, entries.n_bytes + first * expert_kernels.ENTRY)
            values = group_entries, self.counter(N_USED), first, group.at_once, self.counter(N_HELD), choice.pairs
            stamps = pool.stamps[group.first :].ctypes.data, pool.counts.ctypes.data
            pool_values = table, *stamps, group.n_bytes, pool.call, group.number
            self.call(expert_kernels.hold_experts, (*values, *pool_values), 1, ALWAYS)
            yield group_entries, N_HELD

    def _group(self, experts: Sequence[Weight], routing: g.Routing) -> tuple[ExpertGroup, int]:
        """Return the group of some experts in the pool, and the address of the table of their addresses."""
        assert self.weights.pool is not None
        tables = [self.weights.experts(weight) for weight in experts]
        return self.weights.pool.group(experts, tables, routing), tables[0].ctypes.data

    def _read_ahead(self, x: Tensor, call: int) -> None:
        """Request reads of the experts that the next layer will probably choose.

        The prediction applies the next layer's router to this layer's output, before attention has changed it.
        """
        makers = {y: node.operation for node in self.graph.nodes for y in node.operation.results}
        behind = [node.operation for node in self.graph.nodes[self.node_index + 1 :]]
        route = next((op for op in behind if isinstance(op, ops.Route)), None)
        if route is None or route.expert_ids is not None:
            return
        if not isinstance(linear := makers[route.logits], ops.Linear) or linear.residual is not None:
            return
        norm = makers.get(linear.x)
        linears = [op for op in behind if isinstance(op, ops.ExpertLinears) and op.routing is route.result]
        if not isinstance(norm, ops.RMSNorm | ops.LayerNorm) or norm.x.width != x.width or len(linears) != 1:
            return
        if not all(map(stays_in_file, linears[0].experts)):
            return
        norm = replace(norm, x=x)
        linear = replace(linear, x=norm.result)
        likely = replace(route, logits=linear.result)
        for op in (norm, linear, likely):
            self.stored.update(op.computed_by(self))
        group, table = self._group(linears[0].experts, route.result)
        entries = self.stored[likely.result].entries
        self.call(expert_kernels.read_ahead, (entries, self.counter(N_USED), table, call, group.number), 1, ALWAYS)

    def _gather(
        self, x: HostRows, choice: StoredRouting, per_row: int, as_records: bool, is_weighted: bool
    ) -> Buffer:
        """Return the rows of x at the places of their pairs."""
        n_blocks = x.width // 32
        tiles = choice.n_places // TOKENS * x_tile_bytes.function(n_blocks)
        memory = Buffer(tiles if as_records else choice.n_places * x.stride)
        arguments: list[Argument] = [choice.places, per_row, x.buffer, x.stride, *([n_blocks] if as_records else [])]
        kernel = expert_kernels.gather_records if as_records else expert_kernels.gather_floats
        weights = choice.weights if is_weighted else 0
        self.call(kernel, [*arguments, weights, memory], 1, N_CHOSEN)
        return memory


def _norm_kind(norm: g.HeadNorm | None) -> int:
    """Return the ``norm`` argument of `elementwise.turn_head`."""
    return 0 if norm is None else 1 if norm.weight is None else 2


def _format_constants(format: KernelType) -> dict[str, Any]:
    """Return the compile-time constants of matrix kernels for a format."""
    layout = LAYOUTS[format]
    if tile := TILES.get(format):
        return {"TILE_BYTES": layout.tile_bytes, "BLOCKS": layout.columns // 32, **tile.constants}
    return {"LOAD": _FLOAT_LOADS[format], "COLUMN_BYTES": layout.tile_bytes}
