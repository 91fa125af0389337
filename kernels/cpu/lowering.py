"""Lowering of a graph to a program of CPU kernels: the kernel calls that compute each operation.

Lowering runs nothing and needs no weights, so it also reports the memory of a step before anything is loaded.  One
program serves every batch, because kernels read the number of tokens when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from localllm.kernels import graph as g, operations as ops
from localllm.kernels.backend import check_operations
from localllm.kernels.buffers import Address, Buffer, StoredRows, assign
from localllm.kernels.cpu import (
    attention as attention_kernels,
    elementwise,
    experts as expert_kernels,
    matmul,
    recurrent,
    selection,
)
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
from localllm.kernels.cpu.expert_pool import ExpertGroup
from localllm.kernels.cpu.memory import PADDING, padded
from localllm.kernels.cpu.program import Instruction
from localllm.kernels.cpu.simd import load_bf16x16, load_f16x16, load_f32x16
from localllm.kernels.cpu.target import Target
from localllm.kernels.cpu.tiles import TILES, TOKENS, x_tile_bytes
from localllm.kernels.cpu.weights import CPUPackedWeights
from localllm.kernels.graph import Graph, RecurrentState, Rows, Tensor, Value, Weight
from localllm.kernels.offload import Receive, Send
from localllm.kernels.operations.experts import GATINGS
from localllm.kernels.operations.recurrent import side_by_side
from localllm.quant.lut import KernelType
from localllm.quant.packing import GROUP, LAYOUTS
from localllm.quant.types import GGMLType

_SLOTS = {Rows.TOKENS: N_TOKENS, Rows.OUTPUTS: N_OUTPUTS, Rows.CHOSEN: N_CHOSEN}

_ACTIVATIONS = {
    "silu": elementwise.silu, "gelu": elementwise.gelu, "gelu_erf": elementwise.gelu_erf,
    "gelu_quick": elementwise.gelu_quick, "relu": elementwise.relu, "relu2": elementwise.relu2,
    "tanh": elementwise.tanh_of_gate, "sigmoid": elementwise.sigmoid_of_gate, "identity": elementwise.identity,
    "clamped_swiglu": elementwise.clamped_swiglu, "softplus": elementwise.softplus_of_gate,
}  # fmt: skip

#: Kernels that compute each value of a result from one value of x, and their numbers.
_ELEMENTWISE: dict[type[g.Operation[Any]], tuple[Kernel, Callable[[Any], dict[str, float]]]] = {
    ops.Clamp: (elementwise.clamp, lambda op: {"low": op.low, "high": op.high}),
    ops.Softcap: (elementwise.softcap, lambda op: {"cap": op.cap, "inverse": 1 / op.cap}),
    ops.XIELU: (elementwise.xielu, lambda op: {"p": op.p, "n": op.n, "beta": op.beta, "eps": op.eps}),
}

_FLOAT_LOADS: dict[KernelType, Any] = {
    GGMLType.F32: load_f32x16,
    GGMLType.F16: load_f16x16,
    GGMLType.BF16: load_bf16x16,
}


T = TypeVar("T")
#: A number of positions larger than any context length.
ALL = 1 << 31


class HostRows(StoredRows):
    """A float32 matrix [rows, padded width] in memory of the host."""

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
class Edit:
    """Rows that the host changes before instruction number ``instruction``; see `HostEdit`."""

    instruction: int
    name: str
    rows: HostRows
    base: HostRows | None


@dataclass
class HostBlock:
    """Instructions between rows that the host's step receives and rows that it sends; see `kernels.offload`."""

    begin: int  # number of the first instruction
    received: Sequence[HostRows]
    end: int = 0  # number after the last instruction
    sent: Sequence[HostRows] = ()
    n_products: int = 0  # products of activations and weights per token


@dataclass(frozen=True)
class CPULowered:
    """A program whose buffers have offsets."""

    instructions: Sequence[Instruction]
    tables: BatchTables  # tables of the batch, filled before the program runs
    filled: Sequence[tuple[g.Operation[Tensor], HostRows]]  # rows that are filled before the program runs
    result: HostRows
    watched: Mapping[Value, HostRows | StoredRouting]
    edits: Sequence[Edit]  # points where the program stops while the host changes rows
    blocks: Sequence[HostBlock]  # empty unless the graph is the host's part of a graph
    arena_bytes: int  # size of all buffers
    n_products: int  # products of activations and weights per token
    n_joined: int  # rows that one output row is made from

    def filled_by(self, type: type[T]) -> list[tuple[T, HostRows]]:
        """Return the operations of a type whose rows are filled before the program runs."""
        return [(op, rows) for op, rows in self.filled if isinstance(op, type)]


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
        self.stored: dict[Value | None, Any] = {None: None}
        #: Quantised rows of tensors, in the layout of `tiles`.
        self.records: dict[Tensor, Buffer] = {}
        self.int16: dict[Tensor, Buffer] = {}
        self.filled: list[tuple[g.Operation[Tensor], HostRows]] = []
        self.edits: list[Edit] = []
        self.blocks: list[HostBlock] = []
        self.n_products = 0

    def lower(self) -> CPULowered:
        for i, node in enumerate(self.graph.nodes):
            self.node_index = i
            self.stored.update(node.operation.computed_by(self))
        result = self.stored[self.graph.result]
        filled = [*self.tables.buffers, *(y.buffer for _, y in self.filled)]
        watched = {x: self.stored[x] for x in self.graph.watched if x in self.stored}
        n_bytes = assign([*self._stages(), [result.buffer, *(stored.buffer for stored in watched.values())]], filled)
        return CPULowered(
            self.instructions,
            self.tables,
            self.filled,
            result,
            watched,
            self.edits,
            self.blocks,
            n_bytes,
            self.n_products,
            self.graph.n_joined,
        )

    def _stages(self) -> list[list[Buffer]]:
        """Return the buffers of each group of instructions that run without waiting for each other."""
        stages: list[list[Buffer]] = [[]]
        # rows that the host reads and writes before an instruction
        accessed: dict[int, list[HostRows | None]] = {}
        for edit in self.edits:
            accessed.setdefault(edit.instruction, []).extend((edit.rows, edit.base))
        for block in self.blocks:
            accessed.setdefault(block.begin, []).extend(block.received)
            accessed.setdefault(block.end, []).extend(block.sent)
        for i, instruction in enumerate(self.instructions):
            stages[-1] += [rows.buffer for rows in accessed.get(i, ()) if rows is not None]
            for x in instruction.arguments:
                buffer = x.buffer if isinstance(x, Address) else x
                if isinstance(buffer, Buffer) and buffer.address is None:
                    stages[-1].append(buffer)
            if instruction.wait:
                stages.append([])
        at_the_end = accessed.get(len(self.instructions), ())
        return [*stages, [rows.buffer for rows in at_the_end if rows is not None]]

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

    def _buffer_of(self, x: Tensor | None) -> Buffer | None:
        return None if x is None else self.stored[x].buffer

    def records_of(self, x: Tensor) -> Buffer:
        """Return the quantised rows of a tensor; the first call adds the kernel that quantises them."""
        if x not in self.records:
            s = self.stored[x]
            self.records[x] = self._quantise(s, s.width // 32)
        return self.records[x]

    def _quantise(self, x: HostRows, n_blocks: int, n_heads: int = 1, x_head: int = 0) -> Buffer:
        """Return the quantised first ``32 * n_blocks`` values of each head; heads are ``x_head`` bytes apart."""
        record_head = -(-self.n_rows[x.slot] // TOKENS) * x_tile_bytes.function(n_blocks)
        records = Buffer(n_heads * record_head)
        sizes = {"n_heads": n_heads, "x_head": x_head, "n_blocks": n_blocks, "record_head": record_head}
        self.call(elementwise.quantise, 1, x.slot, x=x, records=records, **sizes)
        return records

    def int16_of(self, x: Tensor) -> Buffer:
        """Return the rows of a tensor as 16-bit integers, in the layout of `matmul`."""
        if x not in self.int16:
            s = self.stored[x]
            n_blocks = padded(s.width) // 32
            records = Buffer(padded(self.n_rows[s.slot]) * n_blocks * matmul.INT16_RECORD)
            self.int16[x] = records
            self.call(elementwise.quantise_int16, 1, s.slot, x=s, n_blocks=n_blocks, records=records)
        return self.int16[x]

    def call(
        self,
        kernel: Kernel,
        units: int,
        slot: int,
        /,
        *,
        wait: bool = True,
        constants: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        """Add a call of a kernel with ``units`` units of work per row of ``slot``.

        Args:
            wait: see `Instruction`.
            constants: values that the kernel is compiled for.
            arguments: by the name of the kernel's parameter; see `localllm.kernels.parameters.ordered`.
        """
        code = variant(kernel, self.target, **(constants or {}))
        self.instructions.append(Instruction(code, kernel.arguments(**arguments), units, slot, wait))

    def counter(self, slot: int) -> Address:
        return self.tables.header.at(8 * slot)

    # -- Rows ------------------------------------------------------------------------------------------------------

    def _filled(self, op: g.Operation[Tensor]) -> HostRows:
        """Return rows that are filled before the program runs: kernels must not write to this memory before."""
        y = self.new(Rows.TOKENS, op.result.width, is_kept=True)
        self.filled.append((op, y))
        return y

    input = embed = ngram_embed = adapter_weights = _filled

    def host_edit(self, op: ops.HostEdit) -> HostRows:
        rows: HostRows = self.stored[op.x]
        self.edits.append(Edit(len(self.instructions), op.name, rows, self.stored[op.base]))
        return rows

    def receive(self, op: Receive) -> tuple[HostRows, ...]:
        rows = tuple(self.new(x.rows, x.width) for x in op.tensors)
        self.blocks.append(HostBlock(len(self.instructions), rows, n_products=-self.n_products))
        return rows

    def send(self, op: Send) -> tuple[HostRows, ...]:
        rows, block = tuple(self.stored[x] for x in op.tensors), self.blocks[-1]
        block.end, block.sent = len(self.instructions), rows
        block.n_products += self.n_products
        return rows

    def add_rows(self, op: ops.AddRows) -> HostRows:
        x: HostRows = self.stored[op.x]
        rows = self._filled(op)
        sizes: dict[str, Any] = {"width": x.stride // 4, "stride": x.stride}
        self.call(elementwise.add_rows, 1, N_EMBEDDED, rows=self.tables.embedded, x=rows.buffer, y=x.buffer, **sizes)
        return x

    def rms_norm(self, op: ops.RMSNorm) -> HostRows:
        x, y = self.stored[op.x], self.new(op.x.rows, op.x.width)
        n = x.width // op.n_groups
        self.call(
            elementwise.rms_norm, 1, x.slot,
            x=x, weight=self.weights.vector(op.weight), n_groups=op.n_groups, n=n,
            width=x.stride // 4 if op.n_groups == 1 else n,
            weight_step=4 * n if op.weight is not None and op.weight.shape == (x.width,) else 0, y=y,
            eps=float(op.eps), constants={"WEIGHT": op.weight is not None},
        )  # fmt: skip
        return y

    def layer_norm(self, op: ops.LayerNorm) -> HostRows:
        x, y = self.stored[op.x], self.new(op.x.rows, op.x.width)
        n = x.width // op.n_groups
        self.call(
            elementwise.layer_norm, 1, x.slot,
            x=x.buffer, weight=self.weights.vector(op.weight), bias=self.weights.vector(op.bias),
            n_groups=op.n_groups, n=n, width=x.stride // 4 if op.n_groups == 1 else n, stride=x.stride, y=y.buffer,
            eps=float(op.eps),
        )  # fmt: skip
        return y

    def gated(self, op: ops.Gated) -> HostRows:
        return self._gate(op, op.gate, op.up)

    def activation(self, op: ops.Activation) -> HostRows:
        return self._gate(op, op.x, None)

    def _gate(self, op: ops.Gated | ops.Activation, gate: Tensor, up: Tensor | None) -> HostRows:
        """Apply an activation, multiplied by a second row if given."""
        x, constants = self.stored[gate], {"ACTIVATION": _ACTIVATIONS[op.activation], "UP": up is not None}
        return self._row_by_row(elementwise.gated, op, x, constants, gate=x.buffer, up=self._buffer_of(up))

    def head_gate(self, op: ops.HeadGate) -> HostRows:
        x, gate, y = self.stored[op.x], self.stored[op.gate], self.in_place(op)
        sizes = {"n_heads": op.gate.width, "head_bytes": 4 * op.x.width // op.gate.width, "stride": x.stride}
        constants = {"ACTIVATION": _ACTIVATIONS[op.activation]}
        self.call(elementwise.head_gate, 1, y.slot, x=x.buffer, gate=gate, y=y.buffer, **sizes, constants=constants)
        return y

    def _elementwise(self, op: g.SameShape) -> HostRows:
        kernel, numbers = _ELEMENTWISE[type(op)]
        x = self.stored[op.x]
        values: dict[str, Any] = {name: float(number) for name, number in numbers(op).items()}
        return self._row_by_row(kernel, op, x, x=x.buffer, **values)

    clamp = softcap = xielu = _elementwise

    def add(self, op: ops.Add) -> HostRows:
        return self._add(op, op.scale, None, op.gate, op.residual)

    def scale(self, op: ops.Scale) -> HostRows:
        return self._add(op, op.factor, op.weight, None, None)

    def _add(
        self,
        op: ops.Add | ops.Scale,
        factor: float,
        weight: Weight | None,
        gate: Tensor | None,
        residual: Tensor | None,
    ) -> HostRows:
        """Compute factor * weight * sigmoid(gate) * x + residual; None omits a factor or the residual."""
        x: HostRows = self.stored[op.x]
        constants = {"WEIGHT": weight is not None, "GATE": gate is not None, "RESIDUAL": residual is not None}
        return self._row_by_row(
            elementwise.add, op, x, constants,
            x=x.buffer, weight=self.weights.vector(weight), gate=self.stored[gate],
            residual=self._buffer_of(residual), factor=float(factor),
        )  # fmt: skip

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

    def _copy(
        self,
        x: HostRows,
        source: int,
        y: HostRows,
        target: int,
        n_bytes: int,
        *,
        n_heads: int = 1,
        x_head: int = 0,
        y_head: int = 0,
        wait: bool = True,
    ) -> None:
        """Copy ``n_bytes`` bytes of each row, or of each head, from offset ``source`` in x to ``target`` in y.

        Heads start ``x_head`` and ``y_head`` bytes after each other.
        """
        self.call(
            elementwise.copy_heads, 1, x.slot,
            x=x.buffer.at(source), n_heads=n_heads, x_head=x_head, x_stride=x.stride, y=y.buffer.at(target),
            y_head=y_head, y_stride=y.stride, n_bytes=n_bytes, wait=wait,
        )  # fmt: skip

    def mix_streams(self, op: ops.MixStreams) -> HostRows:
        x, y = self.stored[op.x], self.new(op.x.rows, op.result.width, writes_padding=False)
        self.call(
            elementwise.mix_streams, 1, x.slot,
            x=x, weights=self.stored[op.mixing], residual=self.stored[op.residual], n=op.n,
            n_made=op.result.width // op.size, first=op.first, size=4 * op.size, y=y, offset=float(op.offset),
            constants={"WEIGHTS": op.mixing is not None, "RESIDUAL": op.residual is not None},
        )  # fmt: skip
        return y

    def hyper_weights(self, op: ops.HyperWeights) -> tuple[HostRows, ...]:
        x, results = self.stored[op.x], tuple(self.new(op.x.rows, y.width, writes_padding=False) for y in op.result)
        read, write, mix = (*(y.buffer for y in results), None, None)[:3]
        self.call(
            elementwise.hyper_weights, 1, x.slot,
            x=x, scale=self.weights.vector(op.scale), bias=self.weights.vector(op.bias), read=read, write=write,
            mix=mix, stride=results[0].stride, mix_stride=results[-1].stride, eps=float(op.eps),
            write_scale=float(op.write_scale), write_offset=float(op.write_offset),
            constants={"N": op.n, "PARTS": len(results), "ROUNDS": op.n_rounds},
        )  # fmt: skip
        return results

    def stream_gate(self, op: ops.StreamGate) -> HostRows:
        key, query, y = self.stored[op.key], self.stored[op.query], self.new(op.key.rows, op.n, writes_padding=False)
        sizes = {"n": op.n, "size": 4 * op.size, "scale": op.size**-0.5}
        self.call(elementwise.stream_gate, 1, key.slot, key=key, query=query, y=y, **sizes)
        return y

    def root_mean_square(self, op: ops.RootMeanSquare) -> HostRows:
        x, y = self.stored[op.x], self.new(op.x.rows, 1, writes_padding=False)
        sizes = {"n": x.width, "width": x.stride // 4, "stride": x.stride}
        self.call(elementwise.root_mean_square, 1, x.slot, x=x.buffer, y=y, **sizes)
        return y

    def above_deviation(self, op: ops.AboveDeviation) -> HostRows:
        x, y = self.stored[op.x], self.new(op.x.rows, op.x.width)
        sizes = {"n": x.width, "width": x.stride // 4, "stride": x.stride}
        self.call(elementwise.above_deviation, 1, x.slot, x=x.buffer, y=y.buffer, factor=float(op.factor), **sizes)
        return y

    def outputs(self, op: ops.Outputs) -> HostRows:
        x, rows, n = self.stored[op.x], self.tables.output_rows, op.n_joined
        if n == 1:
            return self._row_by_row(elementwise.gather_rows, op, x, rows=rows, x=x.buffer)
        y = self.new(Rows.OUTPUTS, op.result.width, writes_padding=False)
        sizes = {"n": n, "width": x.stride // 4 if op.is_mean else x.width, "stride": x.stride, "share": 1 / n}
        constants = {"MEAN": op.is_mean}
        self.call(elementwise.join_rows, 1, y.slot, rows=rows, x=x.buffer, y=y, **sizes, constants=constants)
        return y

    def _row_by_row(
        self,
        kernel: Kernel,
        op: g.Operation[Tensor],
        rows: HostRows,
        /,
        constants: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> HostRows:
        """Call a kernel whose result has the width and the stride of ``rows``."""
        y = self.in_place(op)
        sizes: dict[str, Any] = {"width": rows.stride // 4, "stride": rows.stride}
        self.call(kernel, 1, y.slot, **arguments, **sizes, y=y.buffer, constants=constants)
        return y

    # -- Products --------------------------------------------------------------------------------------------------

    def linear(self, op: ops.Linear) -> HostRows:
        # The result may overwrite the residual, but not if the residual is also x, which other units still multiply.
        y = self.new(op.x.rows, op.matrix.n_out) if op.residual is op.x else self.in_place(op)
        self._multiply(op.x, op.matrix, y, self._buffer_of(op.residual), wait=True)
        return y

    def linears(self, op: ops.Linears) -> tuple[HostRows, ...]:
        results = tuple(self.new(op.x.rows, matrix.n_out) for matrix in op.matrices)
        for matrix in op.matrices:  # before the products, which do not wait for each other
            if self.weights.matrix(matrix.weight)[1] in TILES:
                self.records_of(op.x)
            elif self.graph.rounds_floats:
                self.int16_of(op.x)
        for i, (matrix, y) in enumerate(zip(op.matrices, results, strict=True)):
            self._multiply(op.x, matrix, y, None, wait=i == len(results) - 1)
        return results

    def _multiply(self, x: Tensor, matrix: g.Matrix, y: HostRows, residual: Buffer | None, *, wait: bool) -> None:
        weights, format = self.weights.matrix(matrix.weight)
        units, s, n_in = padded(matrix.n_out) // GROUP, self.stored[x], matrix.n_in
        constants, arguments = {**_format_constants(format), "HEADS": False}, dict[str, Any]()
        one_head = {"head_units": 0, "x_head": 0, "y_head": 0}
        if format in TILES:
            kernel = matmul.matmul_quantised
            arguments = {"n_tiles": n_in // LAYOUTS[format].columns, "x": self.records_of(x), **one_head}
        elif self.graph.rounds_floats:
            kernel, constants = matmul.matmul_int16, _format_constants(format)
            arguments = {"n_in": n_in, "x": self.int16_of(x)}
        else:
            kernel, units = matmul.matmul_float, units // matmul.FLOAT_GROUPS
            arguments = {"n_in": n_in, "x": s, **one_head}
        self.call(
            kernel, units, ALWAYS,
            batch=self.counter(s.slot), weights=weights, bias=self.weights.vector(matrix.bias), residual=residual,
            y=y, **arguments, wait=wait, constants=constants,
        )  # fmt: skip
        self.n_products += n_in * matrix.n_out

    def head_linear(self, op: ops.HeadLinear) -> HostRows:
        x, y, (n_heads, n_out, n_in) = self.stored[op.x], self.new(op.x.rows, op.result.width), op.weight.shape
        x_head, rest_bytes = 4 * (n_in + op.n_rest), 4 * op.n_rest  # bytes
        if rest_bytes:
            heads: dict[str, Any] = {"n_heads": n_heads, "x_head": x_head, "y_head": 4 * n_out + rest_bytes}
            self._copy(x, 4 * n_in, y, 4 * n_out, rest_bytes, **heads, wait=False)
        weights, format = self.weights.matrix(op.weight)
        arguments: dict[str, Any]
        if format in TILES:
            records = self._quantise(x, n_in // 32, n_heads, x_head)
            kernel, units = matmul.matmul_quantised, n_out // GROUP
            arguments = {"n_tiles": n_in // LAYOUTS[format].columns, "x": records}
            arguments["x_head"] = records.n_bytes // n_heads
        else:
            kernel, units = matmul.matmul_float, n_out // GROUP // matmul.FLOAT_GROUPS
            arguments = {"n_in": n_in, "x": x, "x_head": x_head}
        self.call(
            kernel, n_heads * units, ALWAYS,
            batch=self.counter(x.slot), weights=weights, bias=None, residual=None, y=y, head_units=units,
            y_head=rest_bytes, **arguments, constants={"HEADS": True, **_format_constants(format)},
        )  # fmt: skip
        self.n_products += n_heads * n_in * n_out
        return y

    # -- Attention -------------------------------------------------------------------------------------------------

    def rope_append(self, op: ops.RopeAppend) -> HostRows:
        q: HostRows = self.stored[op.q]
        cache, rope, tables = op.cache, op.rope, self.tables
        n_pairs = 0 if rope is None else len(rope.frequencies)
        angles = None if rope is None or not n_pairs else tables.angles(rope)
        # Bytes from one pair to the next, and from a pair's first value to its second.
        step, offset = (8, 4) if rope is not None and rope.interleaved else (4, 4 * n_pairs)
        scale = op.q_scale
        # An operation without keys uses the cache of another layer.
        keys, values = self.layers[cache.key] if op.k is not None else (None, None)
        self.call(
            elementwise.rope_append, 1, N_TOKENS,
            slots=tables.slots[self.graph.group(cache)], positions=tables.positions,
            turns=tables.turns if rope is not None and rope.axes else tables.positions, angles=angles,
            n_pairs=n_pairs, pair_step=step, pair_offset=offset, q=q,
            n_heads=0 if op.q is op.k else q.width // cache.key_dim, key_dim=cache.key_dim, k=self.stored[op.k],
            v=self.stored[op.v], n_kv_heads=cache.n_heads, value_dim=cache.value_dim, keys=keys, values=values,
            **op.norm_arguments(self.weights.vector),
            factors=None if scale is None else tables.position_factors(scale),
            factor_length=1 if scale is None else scale.length, factor_offset=0 if scale is None else scale.offset,
            constants=_rope_append_constants(op),
        )  # fmt: skip
        return q

    def attention(self, op: ops.Attention) -> HostRows:
        cache, tables = op.cache, self.tables
        n_heads, head, q = cache.n_heads, layouts_of(cache)[1].head(cache.value_dim), self.stored[op.q]
        sees: dict[str, Any] = {"causal": op.causal, "has_spans": op.has_spans}
        sees["sees_prompt"] = sees_prompt = op.part == "prompt"
        # A window of one token at the first position of a span or of the reply.
        has_first = (op.has_spans and not op.causal) or op.part == "reply"
        if op.selected is not None or op.entries is not None:
            most = ALL if op.selected is None else op.n_selected
            sees["gathered"] = (0, 1, most) if op.entries is None else (op.window or 0, op.entries.stride, most)
        table = tables.tile_table(n_heads, op.group_size, head, **sees)
        keys, values = self.layers[cache.key]
        # The kernel writes heads, but not the padding after the last head.
        y = self.new(Rows.TOKENS, op.result.width, writes_padding=False)
        shared: dict[str, Any] = {
            "n_kv_heads": n_heads, "group_size": op.group_size, "value_dim": cache.value_dim, "starts": tables.starts,
            "partials": Buffer(table.max_partials * table.partial_bytes) if table.max_partials else None,
            "sinks": self.weights.vector(op.sinks), "out": y,
        }  # fmt: skip
        self.call(
            attention_kernels.attention, n_heads, table.slot,
            **shared, batch=self.counter(table.slot), tiles=table.tiles, q=q, key_dim=cache.key_dim,
            positions=tables.positions, firsts=tables.firsts if has_first else tables.positions,
            lasts=tables.lasts if op.has_spans or sees_prompt else tables.positions,
            block_tables=tables.block_tables[self.graph.group(cache)], block_stride=tables.n_blocks,
            window=1 if has_first else op.window or op.chunk or tables.n_blocks * PAGE, keys=keys, values=values,
            by_distance=self.weights.vector(op.slopes or op.biases), selected=self.stored[op.selected],
            entries=None if op.entries is None else self.layers[op.entries.key][0],
            entry_tables=None if op.entries is None else tables.block_tables[self.graph.group(op.entries)],
            scale=float(op.scale) / (op.softcap or 1.0), soft_cap=float(op.softcap or 0),
            constants=attention_kernels.constants(op, self.target),
        )  # fmt: skip
        if table.max_partials:
            self.call(
                attention_kernels.merge_partials, n_heads, table.slot + 1,
                **shared, batch=self.counter(table.slot + 1), tiles=table.merged,
                constants=attention_kernels.state_constants(op),
            )  # fmt: skip
        return y

    def compress(self, op: ops.Compress) -> HostRows:
        cache, y = op.cache, self.new(Rows.TOKENS, op.result.width, writes_padding=False)
        self.call(
            selection.compress, 1, N_TOKENS,
            **self._pages(cache), rows=self.layers[cache.key][0], biases=self.weights.vector(op.biases),
            biases_stride=4 * padded(op.biases.shape[1]), out=y, constants=selection.compress_constants(op),
        )  # fmt: skip
        return y

    def _pages(self, cache: g.KVCache) -> dict[str, Any]:
        tables = self.tables
        pages = {"block_tables": tables.block_tables[self.graph.group(cache)], "block_stride": tables.n_blocks}
        return {"starts": tables.starts, "positions": tables.positions, **pages}

    def index_select(self, op: ops.IndexSelect) -> HostRows:
        cache, tables, lanes = op.cache, self.tables, 2 * self.threads
        q, y = self.stored[op.q], self.new(Rows.TOKENS, op.result.width)
        row_bytes = 8 * padded(-(-tables.n_blocks * PAGE // op.run) * op.n_choices)
        scores, keys = Buffer(lanes * row_bytes), self.layers[cache.key][0]
        constants = selection.constants(op, wide=self.target.wide)
        if op.pool is not None:
            slots, pool = tables.slots[self.graph.group(cache)], self.weights.vector(op.pool)
            pooled: dict[str, Any] = {"positions": tables.positions, "slots": slots, "pool": pool, "keys": keys}
            self.call(selection.pool_keys, 1, N_TOKENS, **pooled, constants=constants)
        arguments = {
            **self._pages(cache), "batch": self.counter(N_TOKENS), "lanes": lanes, "q": q,
            "weights": self.stored[op.head_weights], "keys": keys, "scores": scores, "row_bytes": row_bytes,
        }  # fmt: skip
        self.call(selection.index_scores, lanes, ALWAYS, **arguments, constants=constants)
        self.call(selection.index_select, lanes, ALWAYS, **arguments, out=y, constants=constants)
        return y

    # -- Recurrent states ------------------------------------------------------------------------------------------

    def causal_conv(self, op: ops.CausalConv) -> HostRows:
        x, width, kernel = self.stored[op.x], op.x.width, op.weight.shape[1]
        y = self.new(Rows.TOKENS, width, writes_padding=False)
        shared = {**self.sequences(op.state), "state_stride": state_bytes(op.state) // (kernel - 1)}
        self.call(
            recurrent.causal_conv, 1, N_TOKENS,
            **shared, x=x.buffer, stride=x.stride, weight=self.weights.vector(op.weight),
            bias=self.weights.vector(op.bias), y=y.buffer,
            constants={"KERNEL": kernel, "SILU": op.silu, "BIAS": op.bias is not None, "AHEAD": op.ahead},
        )  # fmt: skip
        self.call(recurrent.keep_inputs, 1, N_SEQUENCES, **shared, x=x.buffer, stride=x.stride, n_rows=kernel - 1)
        return y

    def block_conv(self, op: ops.BlockConv) -> HostRows:
        x, factors, kernel = self.stored[op.x], self.stored[op.factors], op.kernel
        y, base = self.new(Rows.TOKENS, op.x.width, writes_padding=False), self.weights.vector(op.base)
        assert isinstance(base, Buffer)
        self.call(
            recurrent.block_conv, 1, N_TOKENS,
            starts=self.tables.starts, x=x.buffer, stride=x.stride,
            factors=Address(factors.buffer, 4 * op.side * kernel * op.n_groups), factors_stride=factors.stride,
            base=Address(base, op.side * kernel * x.stride), n_groups=op.n_groups,
            size=4 * op.x.width // op.n_groups, y=y.buffer, constants={"KERNEL": kernel},
        )  # fmt: skip
        return y

    def gated_delta(self, op: ops.GatedDelta) -> HostRows:
        n_heads, d_k, d_v = op.state.shape
        keys = op.n_key_heads * d_k
        return self._recurrence(
            op, {"DELTA": True, "PER_CHANNEL": op.is_per_channel, "BOUNDED": op.bound != 0},
            **self._side_by_side(op.qkv, {"q": keys, "k": keys, "v": n_heads * d_v}), steps=self.stored[op.decay],
            betas=self.stored[op.beta], a=self.weights.vector(op.a), dt_bias=self.weights.vector(op.dt_bias), d=None,
            n_groups=op.n_key_heads, per_group=n_heads // op.n_key_heads if op.is_grouped else 0, eps=float(op.eps),
            scale=d_k**-0.5, bound=float(op.bound),
        )  # fmt: skip

    def scan(self, op: ops.Scan) -> HostRows:
        n_heads, n, p = op.state.shape
        return self._recurrence(
            op, {"DELTA": False, "PER_CHANNEL": False, "BOUNDED": False},
            **self._side_by_side(op.xbc, {"v": n_heads * p, "k": op.n_groups * n, "q": op.n_groups * n}),
            steps=self.stored[op.dt], betas=None, a=self.weights.vector(op.a),
            dt_bias=self.weights.vector(op.dt_bias), d=self.weights.vector(op.d), n_groups=op.n_groups,
            per_group=n_heads // op.n_groups, eps=0.0, scale=1.0, bound=0.0,
        )  # fmt: skip

    def channel_scan(self, op: ops.ChannelScan) -> HostRows:
        y = self.new(Rows.TOKENS, op.x.width, writes_padding=False)
        self.call(
            recurrent.channel_scan, op.x.width // 16, N_SEQUENCES,
            batch=self.counter(N_SEQUENCES), **self.sequences(op.state), x=self.stored[op.x], dt=self.stored[op.dt],
            b=self.stored[op.b], c=self.stored[op.c], a=self.weights.vector(op.a),
            dt_bias=self.weights.vector(op.dt_bias), d=self.weights.vector(op.d),
            state_stride=state_bytes(op.state) // op.b.width, out=y.buffer, constants={"N": op.b.width},
        )  # fmt: skip
        return y

    def wkv(self, op: ops.WKV) -> tuple[HostRows, ...]:
        n_heads, rows, columns = op.state.shape
        vectors = 2 if columns % 32 == 0 else 1
        results = tuple(self.new(Rows.TOKENS, y.width, writes_padding=False) for y in op.result)
        names = ("key_scale", "key_rate", "bonus")
        weights: dict[str, Any] = {name: self.weights.vector(getattr(op, name)) for name in names}
        self.call(
            recurrent.wkv, n_heads * columns // (16 * vectors), N_SEQUENCES,
            batch=self.counter(N_SEQUENCES), **self.sequences(op.state), r=self.stored[op.r], k=self.stored[op.k],
            v=self.stored[op.v], decay=self.stored[op.decay],
            rate=self.stored[op.decay if op.rate is None else op.rate], **weights, columns=columns, out=results[0],
            of_bonus=results[-1].buffer,
            constants={"RATE": op.rate is not None, "BONUS": op.bonus is not None, "ROWS": rows, "VECTORS": vectors},
        )  # fmt: skip
        return results

    def _recurrence(self, op: ops.GatedDelta | ops.Scan, constants: dict[str, bool], **arguments: Any) -> HostRows:
        n_heads, rows, columns = op.state.shape
        vectors = 2 if columns % 32 == 0 else 1
        y = self.new(Rows.TOKENS, op.result.width, writes_padding=False)
        self.call(
            recurrent.recurrence, n_heads * columns // (16 * vectors), N_SEQUENCES,
            batch=self.counter(N_SEQUENCES), **self.sequences(op.state), **arguments, columns=columns, out=y,
            constants={**constants, "ROWS": rows, "VECTORS": vectors},
        )  # fmt: skip
        return y

    def _side_by_side(self, tensors: tuple[Tensor, ...], widths: Mapping[str, int]) -> dict[str, Any]:
        """Return arguments for tensors of these widths, which are side by side in ``tensors``: address and stride."""
        arguments: dict[str, Any] = {}
        for name, (x, first) in zip(widths, side_by_side(tensors, tuple(widths.values())), strict=True):
            rows: HostRows = self.stored[x]
            arguments |= {name: rows.buffer.at(4 * first), f"{name}_stride": rows.stride}
        return arguments

    def sequences(self, state: RecurrentState) -> dict[str, Any]:
        """Return arguments of kernels with a state: the batch's sequences, and the memory of the state."""
        tables = self.tables
        sequences = {"starts": tables.starts, "positions": tables.positions, "slots": tables.states}
        return {**sequences, "states": self.states[state], "state_bytes": state_bytes(state)}

    # -- Experts ---------------------------------------------------------------------------------------------------

    def route(self, op: ops.Route) -> StoredRouting:
        logits, n_experts = self.stored[op.logits], op.result.n_experts
        n_pairs = self.n_rows[N_CHOSEN]
        # The places of each expert start at a whole tile.
        n_places = (n_pairs + (TOKENS - 1) * min(n_experts, n_pairs)) // TOKENS * TOKENS
        words = (n_pairs, -(-n_pairs // 2), n_experts, n_pairs, n_places, 3 * n_experts)
        memory = Buffer(8 * sum(words))
        choice = StoredRouting(n_places, *(memory.at(8 * at) for at in accumulate(words[:-1], initial=0)))
        scores, probabilities = logits.buffer, None
        if not op.is_by_logits:
            scores, probabilities = (self.new(Rows.TOKENS, n_experts).buffer for _ in range(2))
            self.call(
                expert_kernels.expert_scores, 1, N_TOKENS,
                logits=logits.buffer, stride=logits.stride, n_experts=n_experts,
                bias=self.weights.vector(op.selection_bias), n_groups=op.n_groups, n_top_groups=op.n_top_groups,
                n_best=op.n_group_best, expert_ids=self.stored[op.expert_ids], k=op.k, probabilities=probabilities,
                scores=scores, constants={"GATING": GATINGS.index(op.gating)},
            )  # fmt: skip
        self.call(
            expert_kernels.route, 1, N_TOKENS,
            logits=scores, probabilities=probabilities, stride=logits.stride, n_experts=n_experts, k=op.k,
            norm_topk_prob=int(op.norm_topk_prob), ids=choice.ids, expert_weights=choice.weights,
            factors=self.weights.vector(op.expert_scales), scale=float(op.scale),
            constants={"PROBABILITIES": probabilities is not None, "MIXES": op.gating == "sparsemixer"},
        )  # fmt: skip
        self.call(
            expert_kernels.group_by_expert, 1, ALWAYS,
            n_pairs=self.counter(N_CHOSEN), ids=choice.ids, n_experts=n_experts, cursors=choice.cursors,
            places=choice.places, pairs=choice.pairs, experts=choice.entries, n_used=self.counter(N_USED),
        )  # fmt: skip
        return choice

    def expert_linears(self, op: ops.ExpertLinears) -> tuple[HostRows, ...]:
        return self._multiply_experts(op.x, op.experts, op.biases, op.routing, is_weighted=op.is_weighted)

    def expert_output(self, op: ops.ExpertOutput) -> HostRows:
        biases = () if op.bias is None else (op.bias,)
        products = self._multiply_experts(op.h, (op.experts,), biases, op.routing)[0]
        y = self.in_place(op)
        self.call(
            expert_kernels.add_experts, 1, N_TOKENS,
            products=products.buffer, expert_weights=self.stored[op.routing].weights if op.is_weighted else None,
            k=op.routing.k, width=y.stride // 4, stride=y.stride,
            residual=self._buffer_of(op.residual), y=y.buffer,
        )  # fmt: skip
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
                units = padded(n_out) // GROUP
                if format in TILES:
                    kernel, sizes = expert_kernels.experts_quantised, {"n_tiles": n_in // LAYOUTS[format].columns}
                else:
                    kernel, sizes = expert_kernels.experts_float, {"n_in": n_in, "x_stride": s.stride}
                    units //= matmul.FLOAT_GROUPS
                self.call(
                    kernel, units, slot,
                    experts=entries, n_units=units, tables=self.weights.experts(weight).ctypes.data,
                    x=gathered[format in TILES], **sizes, pairs=choice.pairs,
                    biases=self.weights.vector(biases[i]) if biases else None, y=y, wait=i == len(results) - 1,
                    constants=_format_constants(format),
                )  # fmt: skip
        self.n_products += sum(routing.k * weight.shape[1] * weight.shape[2] for weight in experts)
        return results

    def _hold(
        self, experts: Sequence[Weight], choice: StoredRouting, routing: g.Routing
    ) -> Iterator[tuple[Address, int]]:
        """Yield the address of the entries of active experts, and the slot of their number in the header.

        Experts that stay in the file are yielded in groups, each after it was read into memory.
        """
        pool = self.weights.pool
        if pool is None or not all(map(self.weights.stays_in_file, experts)):
            yield choice.entries, N_USED
            return
        group, table = self._group(experts, routing)
        entries = choice.entries
        for first in range(0, min(routing.n_experts, self.n_rows[N_CHOSEN]), group.at_once):
            group_entries = Address(entries.buffer, entries.n_bytes + first * expert_kernels.ENTRY)
            self.call(
                expert_kernels.hold_experts, 1, ALWAYS,
                entries=group_entries, n_used=self.counter(N_USED), first=first, most=group.at_once,
                n_held=self.counter(N_HELD), pairs=choice.pairs, table=table,
                stamps=pool.stamps[group.first :].ctypes.data, counts=pool.counts.ctypes.data, n_bytes=group.n_bytes,
                call=pool.call, group=group.number,
            )  # fmt: skip
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
        if not all(map(self.weights.stays_in_file, linears[0].experts)):
            return
        norm = replace(norm, x=x)
        linear = replace(linear, x=norm.result)
        likely = replace(route, logits=linear.result)
        for op in (norm, linear, likely):
            self.stored.update(op.computed_by(self))
        group, table = self._group(linears[0].experts, route.result)
        values = {"entries": self.stored[likely.result].entries, "n_used": self.counter(N_USED), "table": table}
        self.call(expert_kernels.read_ahead, 1, ALWAYS, **values, call=call, group=group.number)

    def _gather(
        self, x: HostRows, choice: StoredRouting, per_row: int, as_records: bool, is_weighted: bool
    ) -> Buffer:
        """Return the rows of x at the places of their pairs."""
        n_blocks = x.width // 32
        tiles = choice.n_places // TOKENS * x_tile_bytes.function(n_blocks)
        memory = Buffer(tiles if as_records else choice.n_places * x.stride)
        weights = choice.weights if is_weighted else None
        shared: dict[str, Any] = {"places": choice.places, "per_row": per_row, "x": x, "expert_weights": weights}
        if as_records:
            self.call(expert_kernels.gather_records, 1, N_CHOSEN, **shared, n_blocks=n_blocks, records=memory)
        else:
            self.call(expert_kernels.gather_floats, 1, N_CHOSEN, **shared, y=memory)
        return memory


def _rope_append_constants(op: ops.RopeAppend) -> dict[str, Any]:
    cache, (key_layout, value_layout) = op.cache, layouts_of(op.cache)
    key_block, value_block = block_bytes(cache)
    return {
        "Q_NORM": _norm_kind(op.q_norm), "K_NORM": _norm_kind(op.k_norm), "V_NORM": _norm_kind(op.v_norm),
        "NORM_LAST": int(op.norm_last), "ROPE_FIRST": 0 if op.rope is None else 4 * op.rope.first,
        "HAS_KEYS": int(op.k is not None), "HAS_VALUES": int(op.v is not None), "COPY_VALUES": int(op.v is op.k),
        "SCALES_Q": int(op.q_scale is not None), "KEY_HEAD": key_layout.head(cache.key_dim),
        "VALUE_HEAD": value_layout.head(cache.value_dim), "KEY_BITS": key_layout.bits,
        "VALUE_BITS": value_layout.bits, "KEY_BLOCK": key_block, "VALUE_BLOCK": value_block, "STRIDE": cache.stride,
        "KEY_ROTATION": cache.rotations[0], "VALUE_ROTATION": cache.rotations[1], "APPEND_KEYS": key_layout.append,
        "APPEND_VALUES": value_layout.append,
    }  # fmt: skip


def _norm_kind(norm: g.HeadNorm | None) -> int:
    """Return the ``norm`` argument of `elementwise.turn_head`."""
    return 0 if norm is None else 1 if norm.weight is None else 2


def _format_constants(format: KernelType) -> dict[str, Any]:
    layout = LAYOUTS[format]
    if tile := TILES.get(format):
        return {"TILE_BYTES": layout.tile_bytes, "BLOCKS": layout.columns // 32, **tile.constants}
    return {"LOAD": _FLOAT_LOADS[format], "COLUMN_BYTES": layout.tile_bytes}
