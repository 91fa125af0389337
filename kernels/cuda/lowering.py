"""Lowering of a graph to CUDA kernels: the kernel calls that compute each operation.

Lowering launches nothing and allocates no device memory, so it also reports the memory of a step before anything is
loaded.

A layer of a llama takes nine launches for a token: norm and quantise; the product with query, key and value; rotation
and append; attention over KV splits; their merge and quantise; the product with its output; norm and quantise; the
product with gate and up, which ends with the gate; the product with down.  Norms, gates and attention write integers
directly if only products with integers read their results.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from localllm.errors import KernelError
from localllm.kernels import graph as g, operations as ops
from localllm.kernels.backend import check_operations
from localllm.kernels.buffers import Address, Buffer, assign
from localllm.kernels.cuda import attention, matmul
from localllm.kernels.cuda.cache import PAGE, append_defines
from localllm.kernels.cuda.calls import (
    N_OUTPUTS,
    N_PLACES,
    N_TOKENS,
    BatchSizes,
    Cost,
    DeviceRows,
    EditCall,
    Extent,
    Inputs,
    KernelCall,
    Mixture,
    ReceiveCall,
    SendCall,
    StepLimits,
    padded,
)
from localllm.kernels.cuda.driver import DeviceMemory, Launch
from localllm.kernels.cuda.matmul import PackedFormat, ProductLimits
from localllm.kernels.cuda.module import kernel_arguments, kernel_parameters, with_arguments
from localllm.kernels.cuda.roofline import Kind
from localllm.kernels.cuda.weights import CUDAPackedWeights, PackedMatrix
from localllm.kernels.graph import Graph, Rows, Tensor, Value, Weight
from localllm.kernels.offload import Receive, Send
from localllm.kernels.operations.dense import ACTIVATIONS
from localllm.kernels.operations.experts import GATINGS
from localllm.kernels.operations.recurrent import side_by_side
from localllm.kernels.parameters import expanded
from localllm.quant.types import GGMLType

#: Columns that a block of `top_parts` sorts, and the maximum number of largest values.
SORTED, MAX_TOP_K = 2048, 1024
#: Maximum experts of a layer, and maximum experts per token.
MAX_EXPERTS, MAX_CHOSEN = 1024, 32

#: Returns the grid of a launch for a number of rows.
Grid = Callable[[int], tuple[int, ...]]
#: Whether launches for batches within an extent need a call.
Condition = Callable[[Extent], bool]

_SLOTS = {Rows.TOKENS: N_TOKENS, Rows.OUTPUTS: N_OUTPUTS, Rows.CHOSEN: N_PLACES}
#: Operands of products by the format of weights; "int8" for formats that are not listed.
_KINDS: dict[str, Kind | None] = {"F16": "f16", "BF16": "bf16", "F32": None}
#: Kernels of elementwise.cu that take rows of x, their width and numbers of an operation; whether a block computes a
#: whole row; and these numbers.
_ELEMENTWISE: dict[type[g.Operation[Any]], tuple[str, bool, Callable[[Any], dict[str, float]]]] = {
    ops.AboveDeviation: ("above_deviation", True, lambda op: {"factor": op.factor}),
    ops.Clamp: ("clamp", False, lambda op: {"low": op.low, "high": op.high}),
    ops.RootMeanSquare: ("root_mean_square", True, lambda op: {}),
    ops.Softcap: ("softcap", False, lambda op: {"cap": op.cap}),
    ops.XIELU: ("xielu", False, lambda op: {"positive": op.p, "negative": op.n, "beta": op.beta, "eps": op.eps}),
}
#: Arguments of kernels that can write activations in the format of products, if they do not.
_NO_CODES: dict[str, Any] = {"units": None, "scales": None, "n_rows": 0}
_LAYER = re.compile(r"blk\.\d+\.")
#: A rope that rotates nothing.
_NO_ROPE = g.Rope(np.zeros(0, np.float32), interleaved=False)
# Threads, columns, tokens and heads per block, as in the CUDA sources.
_NORM_THREADS, GATE_THREADS, _GATE_COLUMNS, _SORT_THREADS = 512, 128, 512, 1024
_HEADS_PER_BLOCK = 4
_CONV_COLUMNS, _CONV_TOKENS = 128, 32
_ROUTE_THREADS, _ROUTE_TOKENS, _GROUP_THREADS, _SUM_THREADS, _SUM_COLUMNS = 128, 4, 1024, 128, 512
#: Maximum number of sequences in the grid of recurrent kernels: with more sequences, each block processes several.
_MAX_SEQUENCES = 16
#: Attention writes codes if the value head size is a multiple of this.
_CODED_HEAD = 32
#: Tokens that an indexer scores at once, and blocks that share the positions of each token.
_SCORED_TOKENS, _SCORE_BLOCKS = 64, 16
#: Rows per product with experts in kernels other than matmul.
_FEW_ROWS = 8


@dataclass(frozen=True)
class CUDALowered:
    """Kernel calls whose buffers have offsets."""

    limits: StepLimits  # limits shared by the calls
    calls: list[KernelCall]
    watched: dict[Value, DeviceRows | Address]  # rows, or the ids of chosen experts
    hidden: list[tuple[ops.Input, DeviceRows]]  # input rows of the graph
    result: DeviceRows
    tables: list[tuple[int, bool]]  # rows of each embedding table, and whether it is indexed by position
    embeddings: dict[int, DeviceRows]  # buffers of separate embeddings of tokens, by number
    ngrams: list[tuple[ops.NgramEmbed, DeviceRows]]  # buffers of the rows that the host looks up for n-grams
    # buffers of the largest value per row, and of the top k, if the result is logits: the ids of all rows, followed
    # by their logits; with k > 1 also followed by the ids that the next batch continues with
    largest: tuple[Buffer, Buffer] | None
    arena_bytes: int  # size of all buffers


@dataclass(frozen=True)
class _ExpertChoice:
    """The experts chosen for each token, and the tables derived from the choice; see experts.cu."""

    mixture: Mixture
    # whether all products of an extent use single rows, which need not be contiguous
    is_single: Callable[[Extent], bool]
    buffer: Buffer
    products: Address
    n_products: Address
    ids: Address
    weights: Address
    places: Address
    rows: Address


class CUDALowering:
    """Creates the calls of a graph."""

    def __init__(self, graph: Graph, weights: CUDAPackedWeights, limits: StepLimits) -> None:
        check_operations(graph, type(self), "cuda")
        self.graph, self.weights, self.limits, self.batch = graph, weights, limits, limits.batch
        self.last_uses = graph.last_uses()
        self.readers: dict[Value, list[g.Operation[Any]]] = defaultdict(list)
        for node in graph.nodes:
            for x in node.operation.inputs:
                self.readers[x].append(node.operation)
        self.node = 0
        self.calls: list[KernelCall] = []
        self.stored: dict[Value | None, Any] = {None: None}
        #: Rows in the format that matrix products read, by tensor and kind of weight format.
        self.inputs: dict[tuple[Tensor, str], Inputs] = {}
        #: Outputs of gates that products can compute, and whether they do for an extent.
        self.ends: dict[Tensor, tuple[Inputs, Callable[[Extent], bool]]] = {}
        self.hidden: list[tuple[ops.Input, DeviceRows]] = []
        #: Ids chosen for the last batch, which can be inputs of the next batch.
        self.chosen_ids = Buffer(8 * limits.max_outputs, is_kept=True)
        self.tables: list[tuple[int, bool]] = []
        self.embeddings: dict[int, DeviceRows] = {}
        self.ngrams: list[tuple[ops.NgramEmbed, DeviceRows]] = []

    def lower(self) -> CUDALowered:
        for i, node in enumerate(self.graph.nodes):
            self.node = i
            self.stored.update(node.operation.computed_by(self))
        result = self.stored[self.graph.result]
        largest = self.choose(result) if self.graph.result.rows is Rows.OUTPUTS else None
        # Inputs of a step are written before its calls, and its outputs must remain valid after them.
        inputs = *self.hidden, *self.ngrams
        begin = [stored.buffer for stored in (*(y for _, y in inputs), *self.embeddings.values())]
        watched = self._watched()
        kept = (stored.buffer for stored in watched.values())
        end = [result.buffer, *(largest or ()), *kept]
        permanent = [self.batch.buffer, self.chosen_ids, *(buffer for _, buffer in self.limits.ropes)]
        n_bytes = assign([begin, *(call.buffers for call in self.calls), end], permanent)
        calls, self.calls = self.calls, []  # the calls refer to self: a cycle would delay freeing
        given_rows = self.embeddings, self.ngrams
        return CUDALowered(
            self.limits, calls, watched, self.hidden, result, self.tables, *given_rows, largest, n_bytes
        )

    def _watched(self) -> dict[Value, DeviceRows | Address]:
        stored = {x: self.stored.get(x) for x in self.graph.watched}
        rows = {x: value.ids if isinstance(value, _ExpertChoice) else value for x, value in stored.items()}
        return {x: value for x, value in rows.items() if isinstance(value, DeviceRows | Address)}

    # -- Memory ----------------------------------------------------------------------------------------------------

    def new(self, rows: Rows, width: int) -> DeviceRows:
        slot = _SLOTS[rows]
        buffer = Buffer(4 * padded(width) * self.limits.max_rows(slot))
        return DeviceRows(buffer=buffer, width=width, slot=slot)

    def like(self, x: Tensor) -> DeviceRows:
        return self.new(x.rows, x.width)

    def in_place(self, op: ops.Linear | ops.ExpertOutput) -> DeviceRows:
        """Allocate a sum, in the memory of the residual if nothing reads it later."""
        if op.residual is None or self.last_uses[op.residual] > self.node:
            return self.like(op.result)
        residual: DeviceRows = self.stored[op.residual]
        return residual

    def new_inputs(self, format: PackedFormat, x: Tensor, slot: int) -> Inputs:
        return Inputs.new(format, self.limits.max_rows(slot), x.width, slot)

    def inputs_of(self, x: Tensor, format: PackedFormat) -> Inputs:
        """Return a tensor's rows in the format for products with such weights; the first call adds the conversion."""
        key = x, format.input_kind
        if key not in self.inputs:
            rows: DeviceRows = self.stored[x]
            inputs = self.new_inputs(format, x, rows.slot)
            is_read = any(getattr(op, "residual", None) is x for op in self.readers[x])  # and overwritten
            is_same = format.type is GGMLType.F32 and x.width % matmul.RUN == 0 and not is_read
            self.inputs[key] = replace(inputs, alone=rows) if is_same else inputs
            when = (lambda extent: extent.rows(rows.slot) != 1) if is_same else None
            self._quantise("quantise", rows, inputs, when=when)
        return self.inputs[key]

    def _quantise(
        self, name: str, x: DeviceRows, inputs: Inputs, rows: Any = None, head_stride: int = 0, **options: Any
    ) -> None:
        """Convert rows for products: all rows, the rows given by ``rows``, or the first values of every head."""
        format, launch = inputs.format, matmul.quantise_launch(inputs.format, inputs.width, 1)
        self.call(
            name, (launch.module, launch.kernel), inputs.slot, lambda n: (format.input_rows(n), inputs.n_heads),
            launch.block[0],
            defines=launch.defines, **options, x=x, n_in=inputs.width, n_there=self.batch.counter(inputs.slot),
            rows=rows, head_stride=head_stride, codes=inputs,
        )  # fmt: skip

    def result_of(self, x: Tensor, *, both: bool = False) -> tuple[DeviceRows | None, Inputs | None]:
        """Return the outputs of a norm or a gate: float rows, or integers, or both.

        Float rows are omitted if only products with integers read the tensor.

        Args:
            both: whether the kernel can write both.
        """
        readers = self.readers[x]
        multiplied = [_multiplied(op, x) for op in readers]
        formats = [self.weights.matrix(weight).packed for weights in multiplied for weight in weights]
        gathered = [w for op in readers if isinstance(op, ops.ExpertLinears) for w in op.experts]
        integers = [f for f in (*formats, *(self.weights.matrix(w).packed for w in gathered)) if not f.is_float]
        is_alone = all(multiplied) and len(integers) == len(formats) and x is not self.graph.result
        if not integers or not (both or is_alone):
            return self.like(x), None
        inputs = self.inputs[x, integers[0].input_kind] = self.new_inputs(integers[0], x, _SLOTS[x.rows])
        return None if is_alone else self.like(x), inputs

    def call(
        self,
        name: str,
        kernel: tuple[str, str],
        slot: int,
        grid: Grid,
        threads: int,
        /,
        *,
        defines: Mapping[str, int | str] | None = None,
        operands: Sequence[DeviceRows | Inputs | Buffer] = (),
        cost: Callable[[BatchSizes], Cost] | None = None,
        when: Condition | None = None,
        codes: Inputs | None = None,
        **arguments: Any,
    ) -> None:
        """Add a call of one kernel, whose launches differ only in the number of rows.

        Args:
            kernel: module and name.
            slot: number in the header that counts the rows; 0 rows need no launch.
            grid: returns the grid for a number of rows.
            operands: rows and buffers that arguments point to, in addition to rows and buffers among the arguments.
            cost: by default, all rows and weights are read or written once.
            when: whether an extent needs the call; by default, every extent does.
            codes: the kernel's arguments units, scales and n_rows; null if None.
            arguments: by the name of the kernel's parameter; see `localllm.kernels.parameters.ordered`.
        """
        values = *arguments.values(), *([] if codes is None else [codes]), *operands
        rows = [value for value in values if isinstance(value, DeviceRows | Inputs)]
        weight_bytes = sum(value.n_bytes for value in values if isinstance(value, DeviceMemory))
        parameters = kernel_parameters(kernel[0])[kernel[1]]
        arguments = expanded(parameters, arguments)
        if codes is None and "units" in parameters:
            arguments |= _NO_CODES
        fixed = kernel_arguments(*kernel, **arguments) if codes is None else None

        def launches(extent: Extent) -> Iterator[Launch]:
            if (n := extent.rows(slot)) and (when is None or when(extent)):
                launch = Launch(*kernel, defines or {}, grid(n), (threads,), 0, fixed or ())
                yield launch if codes is None else with_arguments(launch, **arguments, **codes.arguments(n))

        def all_rows(sizes: BatchSizes) -> Cost:
            return Cost(sum(x.bytes_of(sizes.rows(x.slot)) for x in rows) + weight_bytes)

        buffers = [value for value in values if isinstance(value, Buffer)]
        self.calls.append(KernelCall(name, launches, [*rows, *buffers], cost or all_rows))

    def elementwise(
        self, name: str, kernel: str, rows: DeviceRows, grid: Grid, threads: int, /, **options: Any
    ) -> None:
        """Add a call of a kernel in elementwise.cu, with one row per row of ``rows``."""
        header = self.batch.counter(rows.slot)
        self.call(name, ("elementwise", kernel), rows.slot, grid, threads, header=header, **options)

    # -- Rows ------------------------------------------------------------------------------------------------------

    def input(self, op: ops.Input) -> DeviceRows:
        y = self.like(op.x)
        self.hidden.append((op, y))
        return y

    def embed(self, op: ops.Embed) -> DeviceRows:
        y, table = self.new(Rows.TOKENS, op.result.width), self.weights.matrix(op.table)
        self.tables.append((table.n_out, op.by_position))
        columns, format, batch = op.columns or range(table.n_in), table.packed, self.batch
        launch, row_bytes = matmul.embed_launch(format, 1), table.memory.n_bytes / table.n_out + y.bytes_of(1)
        self.call(
            "embed", (launch.module, launch.kernel), N_TOKENS, _each, launch.block[0],
            defines=launch.defines, cost=lambda sizes: Cost(sizes.n_tokens * row_bytes), weights=table.memory,
            begin=columns.start, end=columns.stop, n_tiles=format.n_tiles(table.n_in),
            ids=batch.positions if op.by_position else batch.ids, chosen=None if op.by_position else self.chosen_ids,
            n_tokens=batch.header, scale=float(op.scale),
            embeddings=self.embeddings.setdefault(0, self.like(op.result)) if op.takes_rows else None, y=y,
        )  # fmt: skip
        return y

    def host_edit(self, op: ops.HostEdit) -> DeviceRows:
        rows: DeviceRows = self.stored[op.x]
        base: DeviceRows | None = self.stored[op.base]
        operands = [rows] if base is None else [rows, base]
        call = EditCall("edit", _nothing, operands, _copies(()), value_name=op.name, rows=rows, base=base)
        self.calls.append(call)
        return rows

    def send(self, op: Send) -> tuple[DeviceRows, ...]:
        rows = tuple(self.stored[x] for x in op.tensors)
        self.calls.append(SendCall("send to host", _nothing, rows, _copies(rows), rows=rows, number=op.number))
        return rows

    def receive(self, op: Receive) -> tuple[DeviceRows, ...]:
        rows = tuple(map(self.like, op.tensors))
        self.calls.append(
            ReceiveCall("receive from host", _nothing, rows, _copies(rows), rows=rows, number=op.number)
        )
        return rows

    def ngram_embed(self, op: ops.NgramEmbed) -> DeviceRows:
        y = self.like(op.result)
        self.ngrams.append((op, y))
        return y

    def add_rows(self, op: ops.AddRows) -> DeviceRows:
        x: DeviceRows = self.stored[op.x]
        rows = self.embeddings.setdefault(op.index, self.like(op.x))
        values = {"ids": self.batch.ids, "embeddings": rows, "n": x.width, "x": x}
        when = lambda extent: extent.has_embedded  # noqa: E731
        self.elementwise("add rows", "add_rows", x, columns(x), GATE_THREADS, **values, when=when)
        return x

    def rms_norm(self, op: ops.RMSNorm) -> DeviceRows | Inputs | None:
        x, n_groups = self.stored[op.x], op.n_groups
        y, codes = self.result_of(op.result, both=True) if n_groups == 1 else (self.like(op.result), None)
        self.elementwise(
            f"norm{' + quantise' if codes else ''}", "rms_norm", x, lambda n: (n, n_groups), _NORM_THREADS,
            x=x, n=x.width // n_groups, weight=self.weights.vector(op.weight), eps=float(op.eps),
            weight_step=0 if op.weight is None or op.weight.shape != (op.x.width,) else op.x.width // n_groups, y=y,
            codes=codes,
        )  # fmt: skip
        return y or codes

    def layer_norm(self, op: ops.LayerNorm) -> DeviceRows:
        x, y = self.stored[op.x], self.like(op.result)
        weights = {"weight": self.weights.vector(op.weight), "bias": self.weights.vector(op.bias)}
        values, grid = {**weights, "n": x.width // op.n_groups, "eps": float(op.eps)}, lambda n: (n, op.n_groups)
        self.elementwise("layer norm", "layer_norm", x, grid, _NORM_THREADS, x=x, y=y, **values)
        return y

    def gated(self, op: ops.Gated) -> DeviceRows | Inputs | None:
        return self._gate(op.result, op.gate, op.up, op.activation)

    def activation(self, op: ops.Activation) -> DeviceRows | Inputs | None:
        return self._gate(op.result, op.x, None, op.activation)

    def head_gate(self, op: ops.HeadGate) -> DeviceRows:
        x, gate, y = self.stored[op.x], self.stored[op.gate], self.like(op.result)
        values = {"kind": ACTIVATIONS.index(op.activation), "n": x.width, "dim": op.x.width // op.gate.width}
        self.elementwise("gate of heads", "head_gate", x, columns(x), GATE_THREADS, x=x, gate=gate, y=y, **values)
        return y

    def _elementwise(self, op: Any) -> DeviceRows:
        kernel, by_row, numbers = _ELEMENTWISE[type(op)]
        x, y = self.stored[op.x], self.like(op.result)
        grid, threads = (_each, _NORM_THREADS) if by_row else (columns(x), GATE_THREADS)
        values = {name: float(number) for name, number in numbers(op).items()}
        self.elementwise(kernel.replace("_", " "), kernel, x, grid, threads, x=x, n=x.width, y=y, **values)
        return y

    above_deviation = clamp = root_mean_square = softcap = xielu = _elementwise

    def _gate(self, result: Tensor, gate: Tensor, up: Tensor | None, activation: str) -> DeviceRows | Inputs | None:
        """Apply an activation, multiplied by a second row if given."""
        x, up_rows = self.stored[gate], self.stored[up]
        product_codes, is_done = self.ends.get(result, (None, None))
        y, codes = (None, product_codes) if product_codes else self.result_of(result, both=True)
        self.elementwise(
            f"gate{' + quantise' if codes else ''}", "gated", x, columns(x), GATE_THREADS,
            kind=ACTIVATIONS.index(activation), gate=x.buffer, up=up_rows and up_rows.buffer, stride=x.stride,
            n=x.width, y=y, codes=codes, operands=[rows for rows in (x, up_rows) if rows],
            when=None if is_done is None else lambda extent: not is_done(extent),
        )  # fmt: skip
        return y or codes

    def add(self, op: ops.Add) -> DeviceRows:
        return self._add(op.x, op.scale, None, op.gate, op.residual)

    def columns(self, op: ops.Columns) -> DeviceRows:
        x, y = self.stored[op.x], self.like(op.result)
        self._copy_heads("copy columns", x, op.columns.start, y, 0, len(op.columns))
        return y

    def side_by_side(self, op: ops.SideBySide) -> DeviceRows:
        y, first = self.like(op.result), 0
        for x in op.tensors:
            self._copy_heads("copy columns", self.stored[x], 0, y, first, x.width)
            first += x.width
        return y

    def _copy_heads(
        self,
        name: str,
        x: DeviceRows,
        source: int,
        y: DeviceRows,
        target: int,
        n: int,
        *,
        n_heads: int = 1,
        x_head: int = 0,
        y_head: int = 0,
    ) -> None:
        """Copy n columns of each row, or of each head, from column ``source`` of x to column ``target`` of y.

        Heads start ``x_head`` and ``y_head`` columns after each other.
        """
        self.elementwise(
            name, "copy_heads", x, lambda n_rows: (n_heads, n_rows), 32,
            x=x.buffer.at(4 * source), x_stride=x.stride, x_head_stride=x_head, n=n, y=y.buffer.at(4 * target),
            y_stride=y.stride, y_head_stride=y_head, operands=[x, y],
            cost=lambda sizes: Cost(8 * sizes.rows(x.slot) * n_heads * n),
        )  # fmt: skip

    def mix_streams(self, op: ops.MixStreams) -> DeviceRows:
        x, y = self.stored[op.x], self.like(op.result)
        self.elementwise(
            "mix streams", "mix_streams", x, columns(y), GATE_THREADS,
            x=x, weights=self.stored[op.mixing], residual=self.stored[op.residual], n_streams=op.n, first=op.first,
            d=op.size, offset=float(op.offset), y=y, n=y.width,
        )  # fmt: skip
        return y

    def hyper_weights(self, op: ops.HyperWeights) -> tuple[DeviceRows, ...]:
        x, results = self.stored[op.x], tuple(map(self.like, op.result))
        read, write, mix = (*results, None, None)[:3]
        self.elementwise(
            "stream weights", "hyper_weights", x, _each, 1,
            x=x, scale=self.weights.vector(op.scale), bias=self.weights.vector(op.bias), n=op.n, eps=float(op.eps),
            write_scale=float(op.write_scale), write_offset=float(op.write_offset), rounds=op.n_rounds, read=read,
            write=write, mix=mix,
        )  # fmt: skip
        return results

    def stream_gate(self, op: ops.StreamGate) -> DeviceRows:
        key, query, y = self.stored[op.key], self.stored[op.query], self.like(op.result)
        values, grid = {"key": key, "query": query, "n": op.size, "scale": op.size**-0.5}, lambda n: (op.n, n)
        self.elementwise("stream gate", "stream_gate", key, grid, 32, **values, y=y)
        return y

    def scale(self, op: ops.Scale) -> DeviceRows:
        return self._add(op.x, op.factor, op.weight, None, None)

    def _add(
        self, x: Tensor, factor: float, weight: Weight | None, gate: Tensor | None, residual: Tensor | None
    ) -> DeviceRows:
        """Compute factor * weight * sigmoid(gate) * x + residual; None omits a factor or the residual."""
        rows, y, residual_rows = self.stored[x], self.like(x), self.stored[residual]
        self.elementwise(
            "add", "add", rows, columns(rows), GATE_THREADS,
            x=rows, n=rows.width, factor=float(factor), weight=self.weights.vector(weight), gate=self.stored[gate],
            residual=residual_rows and residual_rows.buffer, y=y,
            operands=[] if residual_rows is None else [residual_rows],
        )  # fmt: skip
        return y

    def outputs(self, op: ops.Outputs) -> DeviceRows:
        x, y, batch = self.stored[op.x], self.new(Rows.OUTPUTS, op.result.width), self.batch
        joined = {} if op.n_joined == 1 else {"n_joined": op.n_joined, "is_mean": op.is_mean}
        kernel = "elementwise", "join_rows" if joined else "gather_rows"
        values = {"header": batch.header, "rows": batch.outputs, "x": x, "n": x.width, "y": y, **joined}
        cost = lambda sizes: Cost(2 * y.bytes_of(sizes.n_outputs))  # noqa: E731
        self.call("gather", kernel, N_OUTPUTS, columns(x), GATE_THREADS, **values, cost=cost)
        return y

    def choose(self, logits: DeviceRows) -> tuple[Buffer, Buffer] | None:
        """Find the largest logits, in the number that the extent specifies."""
        n_parts, n_outputs, header = -(-logits.width // SORTED), self.limits.max_outputs, self.batch.header
        found_bytes = 8 * n_outputs * min(MAX_TOP_K, logits.width)
        best, candidates = Buffer(found_bytes + 4 * n_outputs), Buffer(found_bytes * n_parts)

        def launches(extent: Extent) -> Iterator[Launch]:
            def launch(kernel: str, grid: tuple[int, ...], **values: Any) -> Launch:
                sorted_logits = Launch("elementwise", kernel, {}, grid, (_SORT_THREADS,))
                return with_arguments(sorted_logits, header=header, logits=logits, **values)

            k, n = extent.top_k, extent.n_outputs
            if k == 1 and n:
                yield launch("argmax", (n,), n=logits.width, found=self.chosen_ids)
            elif k and n:
                yield launch("top_parts", (n_parts, n), n=logits.width, k=k, parts=candidates)
                chosen = {"draws": self.batch.draws, "found": best, "chosen": self.chosen_ids}
                yield launch("top_merge", (n,), parts=candidates, n_keys=n_parts * k, k=k, **chosen)

        cost = lambda sizes: Cost(logits.bytes_of(sizes.n_outputs))  # noqa: E731
        self.calls.append(KernelCall("choice", launches, [logits, best, candidates, self.chosen_ids], cost))
        return self.chosen_ids, best

    # -- Products --------------------------------------------------------------------------------------------------

    def linear(self, op: ops.Linear) -> DeviceRows:
        matrix = self.weights.matrix(op.matrix.weight)
        inputs = self.inputs_of(op.x, matrix.packed)  # a copy, so the rows may be overwritten
        y = self.in_place(op)
        bias = self.weights.vector(op.matrix.bias)
        self._multiply(inputs, [(matrix, y, bias)], self.stored[op.residual])
        return y

    def linears(self, op: ops.Linears) -> tuple[DeviceRows, ...]:
        matrices = [self.weights.matrix(matrix.weight) for matrix in op.matrices]
        results = tuple(self.new(op.x.rows, matrix.n_out) for matrix in matrices)
        inputs = [self.inputs_of(op.x, matrix.packed) for matrix in matrices]
        biases = [self.weights.vector(matrix.bias) for matrix in op.matrices]
        products = list(zip(matrices, results, biases, strict=True))
        gate = self._gate_of(op) if len({matrix.format for matrix in matrices}) == 1 else None
        for operand in dict.fromkeys(inputs):
            self._multiply(
                operand, [product for x, product in zip(inputs, products, strict=True) if x is operand], gate=gate
            )
        return results

    def _gate_of(self, op: ops.Linears | ops.ExpertLinears) -> tuple[ops.Gated, Inputs] | None:
        """Return the gate of both products, if nothing else reads them and only its codes are used; else None."""
        gates = {reader for x in op.result for reader in self.readers[x]}
        [gate] = gates if len(gates) == 1 else (None,)
        if not isinstance(gate, ops.Gated) or (gate.gate, gate.up) != op.result or self.graph.result in op.result:
            return None
        codes = None if gate.result.width % matmul.RUN else self.result_of(gate.result)[1]
        return (gate, codes) if codes else None

    def _gate_arguments(
        self, gate: tuple[ops.Gated, Inputs], products: Sequence[matmul.Product], n_rows: int
    ) -> dict[str, Any]:
        activation, codes = ACTIVATIONS.index(gate[0].activation), gate[1].arguments(n_rows)
        return matmul.gate_arguments(products[0], products[1], activation, codes)

    def _ends_with(
        self, gate: tuple[ops.Gated, Inputs] | None, launches: Callable[[Extent], Iterator[Launch]]
    ) -> list[Inputs]:
        """Return the additional buffers of products that may compute a gate."""
        if gate is None:
            return []
        is_done = lambda extent: any(launch.kernel.endswith("_gated") for launch in launches(extent))  # noqa: E731
        self.ends[gate[0].result] = gate[1], is_done
        return [gate[1]]

    def head_linear(self, op: ops.HeadLinear) -> DeviceRows:
        x, y, matrix = self.stored[op.x], self.new(op.x.rows, op.result.width), self.weights.matrix(op.weight)
        (n_heads, n_out, n_in), n_rest = op.weight.shape, op.n_rest
        inputs = Inputs.new(matrix.packed, self.limits.max_rows(x.slot), n_in, x.slot, n_heads)
        self._quantise("quantise", x, inputs, head_stride=n_in + n_rest)
        self._multiply(inputs, [(matrix, y, None)])
        if n_rest:
            heads = {"n_heads": n_heads, "x_head": n_in + n_rest, "y_head": n_out + n_rest}
            self._copy_heads("copy heads", x, n_in, y, n_out, n_rest, **heads)
        return y

    def _multiply(
        self,
        inputs: Inputs,
        products: Sequence[tuple[PackedMatrix, DeviceRows, DeviceMemory | None]],
        residual: DeviceRows | None = None,
        gate: tuple[ops.Gated, Inputs] | None = None,
    ) -> None:
        """Multiply the same inputs with matrices of all formats that read inputs of this kind.

        Args:
            products: the matrix (or the matrices of the inputs' heads), the result, and the bias.
            residual: added to the product.  Requires a single product; may be the result's memory.
            gate: the gate that both products feed, and the buffers of its codes.
        """
        limits, slot, added = self.limits, inputs.slot, None if residual is None else residual.buffer
        packed, results = [w for w, _, _ in products], [y for _, y, _ in products]
        names, n_in = [w.format for w in packed], packed[0].n_in
        formats, step = {w.format: w.packed for w in packed}, matmul.MAX_MATRICES
        factors = [matmul.Product(w.memory, y.buffer, w.n_out, y.stride, bias, added) for w, y, bias in products]
        by_format = [
            [p for p, format_name in zip(factors, names, strict=True) if format_name == name] for name in formats
        ]
        can_mix = len(formats) == 2 and len(by_format[1]) == 1 and len(factors) <= step
        mixed_factors = [factor for group in by_format for factor in group] if can_mix else []
        groups = [
            (format, group[i : i + step], matmul.matrix_arguments(group[i : i + step]))
            for format, group in zip(formats.values(), by_format, strict=True)
            for i in range(0, len(group), step)
        ]

        def launches(extent: Extent) -> Iterator[Launch]:
            if n := extent.rows(slot):
                if mixed_factors:
                    first, last = formats.values()
                    launch, values = product(n, first, mixed_factors)
                    if mixed := matmul.mixed_launch(first, launch, last):
                        yield with_arguments(mixed, **values, **matmul.matrix_arguments(mixed_factors))
                        return
                for format, some, matrices in groups:
                    launch, values = product(n, format, some)
                    if gate is not None and (gated := matmul.gated_launch(format, launch)):
                        yield with_arguments(gated, **values, **self._gate_arguments(gate, some, n))
                    else:
                        yield with_arguments(launch, **values, **matrices)

        def product(n: int, format: PackedFormat, some: Sequence[matmul.Product]) -> tuple[Launch, dict[str, Any]]:
            """Return the launch for some matrices, and its arguments except the matrices."""
            n_outs, n_rows = [p.n_out for p in some], format.input_rows(n)
            launch = matmul.product_launch(format, n_outs, n_in, n_rows, limits.products, inputs.n_heads)
            sizes = matmul.size_arguments(launch.kernel, format, n_in)
            return launch, {**inputs.arguments(n), "n_tokens": self.batch.counter(slot), **sizes}

        def cost(sizes: BatchSizes) -> Cost:
            extra = 0 if residual is None else residual.bytes_of(sizes.rows(slot))
            return _product_cost(packed, inputs, sizes.rows(slot), extra_bytes=extra)

        operands: list[DeviceRows | Inputs | Buffer] = [inputs, *results, *([] if residual is None else [residual])]
        operands += self._ends_with(gate, launches)
        name = "linear" if inputs.n_heads == 1 else "heads"
        self.calls.append(KernelCall(f"{name} {_names(packed)}", launches, operands, cost))

    # -- Attention -------------------------------------------------------------------------------------------------

    def rope_append(self, op: ops.RopeAppend) -> DeviceRows:
        limits, batch, kv_cache, cache = self.limits, self.batch, op.cache, self.limits.cache
        q: DeviceRows
        q, k, v = (self.stored[x] for x in (op.q, op.k, op.v))
        rope, scale = op.rope or _NO_ROPE, op.q_scale or g.PositionScale(0.0, 1)
        keys_values = [x for x in (k, v) if x]
        if self.graph.caches_of is not None:
            raise KernelError("assistants that draft from another model's caches do not run on a GPU")
        # An indexer's keys that are also its queries are only stored.
        n_heads = 0 if op.q is op.k else q.width // kv_cache.key_dim
        row_bytes = (
            2 * q.bytes_of(1) + sum(x.bytes_of(1) for x in keys_values) + (kv_cache.bytes_per_token() if k else 0)
        )
        self.call(
            "rope + append", ("append", "rope_append"), N_TOKENS,
            lambda n: (-(-(n_heads + len(keys_values) * kv_cache.n_heads) // _HEADS_PER_BLOCK), n),
            32 * _HEADS_PER_BLOCK,
            header=batch.header, slots=batch.slots[cache.groups[kv_cache.key]], positions=batch.positions,
            axes=batch.axes if rope.axes else None, axes_stride=limits.max_tokens if rope.axes else 0,
            phases=limits.frequencies(rope) if len(rope.frequencies) else None, n_pairs=len(rope.frequencies),
            first=rope.first, interleaved=rope.interleaved, magnitude=float(rope.magnitude), q=q, k=k, v=v,
            n_heads=n_heads, n_kv_heads=kv_cache.n_heads, **op.norm_arguments(self.weights.vector),
            norm_last=op.norm_last, rate=float(scale.rate), length=scale.length, offset=scale.offset,
            base=float(scale.base),
            # An operation without keys uses the cache of another layer.
            **(cache.layer(kv_cache.key) if k else dict.fromkeys(("keys", "key_scales", "values", "value_scales"))),
            defines=append_defines(kv_cache, has_axes=bool(rope.axes), position_offset=rope.position_offset),
            cost=lambda sizes: Cost(sizes.n_tokens * row_bytes),
        )  # fmt: skip
        return q

    def attention(self, op: ops.Attention) -> DeviceRows:
        if op.selected is not None or op.entries is not None:
            return self._attention_selected(op)
        if op.has_spans and not op.causal:
            raise KernelError("attention to spans only, as in image encoders, does not run on a GPU")
        limits, kv_cache, q, y = self.limits, op.cache, self.stored[op.q], self.new(Rows.TOKENS, op.result.width)
        # The merge of splits ends with codes if only codes are read.  Heads and rows must be whole groups.
        fits = kv_cache.value_dim % _CODED_HEAD == y.width % matmul.RUN == 0 and not kv_cache.rotations[1]
        codes = self.result_of(op.result)[1] if fits else None
        kind, sinks, partials = limits.kind(op), self.weights.vector(op.sinks), limits.new_partials()
        heads = kind.heads
        variant = replace(kind.variant, soft_cap=op.softcap is not None, sinks=sinks is not None)
        variant = replace(variant, has_slopes=op.slopes is not None, bias_width=op.bias_width)
        shared = {
            **self.batch.attention(limits.cache.groups[kv_cache.key]),
            "n_kv_heads": heads.n_kv_heads,
            "group_size": heads.group_size,
            "window": heads.window,
        }
        read: dict[str, Any] = {
            **limits.cache.layer(kv_cache.key), "q": q.buffer, "q_stride": q.stride, "scale": float(op.scale),
            "soft_cap": float(op.softcap or 0), "by_distance": self.weights.vector(op.slopes or op.biases),
        }  # fmt: skip
        written = {"out": y.buffer, "out_stride": y.stride, "sinks": sinks}

        def launches(extent: Extent) -> Iterator[Launch]:
            work = extent.work(kind)
            states = partials.n_bytes - max(4, 4 * work.partial_floats(heads, kind.variant)[1])
            splits = {
                "partial_sums": partials,
                "partial_states": partials.at(states // 8 * 8),
                "max_splits": work.max_splits,
                "partial_rows": work.partial_rows,
            }
            merged = _NO_CODES if codes is None or work.prefill_tiles else codes.arguments(extent.n_tokens)
            kernel_values: dict[str, dict[str, Any]] = {
                "attention_prefill": read | written,
                "attention_split": read | splits,
                "attention_merge": splits | written | merged,
            }
            for launch in attention.launches(work, heads, variant, limits.properties.n_multiprocessors):
                values = shared | attention.token_range(launch, work) | kernel_values[launch.kernel]
                yield with_arguments(launch, **values)

        def cost(sizes: BatchSizes) -> Cost:
            pairs, positions = sizes.seen(heads.window)
            n_bytes = q.bytes_of(sizes.n_tokens) + y.bytes_of(sizes.n_tokens) + positions * kv_cache.bytes_per_token()
            return Cost(n_bytes, 4 * pairs * q.width, "f16")  # query times key, and weight times value

        name = "attention" if heads.window == attention.NO_WINDOW else f"attention, window {heads.window}"
        self.calls.append(KernelCall(name, launches, [q, y, partials, *([codes] if codes else [])], cost))
        if codes is not None:
            self._quantise("quantise", y, codes, when=lambda extent: extent.work(kind).prefill_tiles > 0)
        self._rotate_back(op, y)
        return y

    def _rotate_back(self, op: ops.Attention, y: DeviceRows) -> None:
        """Undo the rotation of values in their sums."""
        if op.cache.rotations[1]:
            self.call(
                "rotate back", ("append", "rotate_back"), N_TOKENS, lambda n: (-(-op.n_heads // _HEADS_PER_BLOCK), n),
                32 * _HEADS_PER_BLOCK,
                header=self.batch.header, n_heads=op.n_heads, out=y, defines=append_defines(op.cache),
                cost=lambda sizes: Cost(2 * y.bytes_of(sizes.n_tokens)),
            )  # fmt: skip

    def index_select(self, op: ops.IndexSelect) -> DeviceRows:
        limits, kv_cache, batch = self.limits, op.cache, self.batch
        q, y = self.stored[op.q], self.new(Rows.TOKENS, op.result.width)
        weights, stride = self.stored[op.head_weights], -(-limits.cache.n_pages[0] * PAGE // op.run)
        n_choices, group, layer = op.n_choices, limits.cache.groups[kv_cache.key], limits.cache.layer(kv_cache.key)
        scores = Buffer(4 * _SCORED_TOKENS * n_choices * stride)
        defines = index_defines(kv_cache, op.k // op.run, op.n_heads, op.dim, run=op.run, n_last=op.n_last)
        if op.pool is not None:
            self.call(
                "pool", ("selection", "pool_keys"), N_TOKENS, _each, 128,
                header=batch.header, positions=batch.positions, slots=batch.slots[group],
                pool=self.weights.vector(op.pool), stride=padded(op.dim), keys=layer["keys"], defines=defines,
                cost=lambda sizes: Cost(sizes.n_tokens * kv_cache.bytes_per_token()), operands=[q],
            )  # fmt: skip
        shared = {"header": batch.header, "positions": batch.positions, "scores": scores, "stride": stride}
        cache = {**batch.pages(group), "keys": layer["keys"], "key_scales": layer["key_scales"]}
        scored, selected = {**shared, **cache, "q": q, "weights": weights}, {**shared, "out": y}

        def launches(extent: Extent) -> Iterator[Launch]:
            for first in range(0, extent.n_tokens, _SCORED_TOKENS):
                n = min(_SCORED_TOKENS, extent.n_tokens - first)
                launch = Launch("selection", "index_scores", defines, (_SCORE_BLOCKS, n), (128,))
                yield with_arguments(launch, **scored, first=first)
                launch = Launch("selection", "index_select", defines, (n, n_choices), (128,))
                yield with_arguments(launch, **selected, first=first)

        def index_cost(sizes: BatchSizes) -> Cost:
            pairs, positions = sizes.seen(attention.NO_WINDOW)
            return Cost(positions * kv_cache.bytes_per_token(), 2 * pairs * q.width)

        operands = [x for x in (q, weights, y, scores) if x]
        self.calls.append(KernelCall("index", launches, operands, index_cost))
        return y

    def compress(self, op: ops.Compress) -> DeviceRows:
        kv_cache, y = op.cache, self.new(Rows.TOKENS, op.result.width)
        n_bytes = op.n_series * kv_cache.bytes_per_token() + y.bytes_of(1)
        self.call(
            "compress", ("selection", "compress"), N_TOKENS, _each, 128,
            **self.batch.pages(self.limits.cache.groups[kv_cache.key]), positions=self.batch.positions,
            rows=self.limits.cache.layer(kv_cache.key)["keys"], biases=self.weights.vector(op.biases),
            biases_stride=padded(op.biases.shape[1]), out=y,
            defines=selection_defines(kv_cache, 0) | {"RUN": op.run, "SERIES": op.n_series},
            cost=lambda sizes: Cost(sizes.n_tokens * n_bytes), operands=[self.stored[op.x]],
        )  # fmt: skip
        return y

    def _attention_selected(self, op: ops.Attention) -> DeviceRows:
        limits, kv_cache, batch, entries = self.limits, op.cache, self.batch, op.entries
        q, y = self.stored[op.q], self.new(Rows.TOKENS, op.result.width)
        most = longest = op.n_selected
        if entries is not None:
            longest = (op.window or 0) + (most or limits.cache.n_pages[0] * PAGE // entries.stride)
        n_bytes = kv_cache.bytes_per_token() * longest + q.bytes_of(1) + y.bytes_of(1)
        self.call(
            "attention, selected", ("selection", "attention_selected"), N_TOKENS, lambda n: (op.n_heads, n), 128,
            **batch.pages(limits.cache.groups[kv_cache.key]), positions=batch.positions,
            selected=self.stored[op.selected], **limits.cache.layer(kv_cache.key), q=q, out=y,
            sinks=self.weights.vector(op.sinks), scale=float(op.scale),
            window=0 if entries is None else op.window or 0,
            entries=None if entries is None else limits.cache.layer(entries.key)["keys"],
            entry_tables=None if entries is None else batch.block_tables(limits.cache.groups[entries.key]),
            defines=selection_defines(
                kv_cache, most, 0 if entries is None else entries.stride, by_head=op.selected_by_head
            ),
            cost=lambda sizes: Cost(sizes.n_tokens * n_bytes, 4 * sizes.n_tokens * longest * q.width),
        )  # fmt: skip
        self._rotate_back(op, y)
        return y

    # -- Recurrent states ------------------------------------------------------------------------------------------

    def _recurrent_call(
        self,
        name: str,
        module: str,
        kernel: str,
        state: g.RecurrentState,
        row_bytes: int,
        grid: Grid,
        threads: int,
        /,
        **options: Any,
    ) -> None:
        """Add a call of a kernel that reads and writes a state."""
        cache = self.limits.cache
        states = {**self.batch.sequences, "states": cache.state(state), "slot_floats": cache.slot_bytes // 4}
        cost = lambda sizes: Cost(sizes.n_tokens * row_bytes + len(sizes.sequences) * 8 * state.n_values)  # noqa: E731
        self.call(name, (module, kernel), N_TOKENS, grid, threads, **states, cost=cost, **options)

    def causal_conv(self, op: ops.CausalConv) -> DeviceRows:
        x, y = self.stored[op.x], self.new(Rows.TOKENS, op.x.width)
        self._recurrent_call(
            "causal conv", "convolution", "causal_conv", op.state, 2 * x.bytes_of(1),
            lambda n: (-(-x.width // _CONV_COLUMNS), min(n, _MAX_SEQUENCES), -(-n // _CONV_TOKENS)), _CONV_COLUMNS,
            x=x, n=x.width, weight=self.weights.vector(op.weight), bias=self.weights.vector(op.bias), silu=op.silu,
            y=y.buffer, operands=[y], defines={"KERNEL": op.state.shape[0] + 1, "AHEAD": op.ahead},
        )  # fmt: skip
        return y

    def gated_delta(self, op: ops.GatedDelta) -> DeviceRows:
        n_heads, d_k, d_v = op.state.shape
        keys = op.n_key_heads * d_k
        return self._recurrence(
            op, {"DELTA": 1, "PER_CHANNEL": int(op.is_per_channel)},
            side_by_side(op.qkv, (keys, keys, n_heads * d_v)),
            steps=self.stored[op.decay], betas=self.stored[op.beta], d=None, n_groups=op.n_key_heads,
            per_group=n_heads // op.n_key_heads if op.is_grouped else 0, eps=float(op.eps), scale=d_k**-0.5,
            bound=float(op.bound),
        )  # fmt: skip

    def scan(self, op: ops.Scan) -> DeviceRows:
        n_heads, n, p = op.state.shape
        x, b, c = side_by_side(op.xbc, (n_heads * p, op.n_groups * n, op.n_groups * n))
        return self._recurrence(
            op, {"DELTA": 0, "PER_CHANNEL": 0}, [c, b, x],
            steps=self.stored[op.dt], betas=None, d=self.weights.vector(op.d), n_groups=op.n_groups,
            per_group=n_heads // op.n_groups, eps=0.0, scale=1.0, bound=0.0,
        )  # fmt: skip

    def channel_scan(self, op: ops.ChannelScan) -> DeviceRows:
        x, b, y = self.stored[op.x], self.stored[op.b], self.new(Rows.TOKENS, op.x.width)
        self._recurrent_call(
            "scan", "recurrent", "channel_scan", op.state, 12 * x.width + 8 * b.width,
            lambda n: (-(-x.width // 128), min(n, _MAX_SEQUENCES)), 128,
            x=x, dt=self.stored[op.dt], b=b, c=self.stored[op.c], a=self.weights.vector(op.a),
            dt_bias=self.weights.vector(op.dt_bias), d=self.weights.vector(op.d), n=x.width, out=y,
            defines={"STATES": b.width},
        )  # fmt: skip
        return y

    def wkv(self, op: ops.WKV) -> tuple[DeviceRows, ...]:
        n_heads, n_rows, n_columns = op.state.shape
        results = tuple(self.new(Rows.TOKENS, y.width) for y in op.result)
        columns, tensors = 32 if n_columns % 32 == 0 else 16, (op.r, op.k, op.v, op.decay, op.rate or op.decay)
        weights = {name: self.weights.vector(getattr(op, name)) for name in ("key_scale", "key_rate", "bonus")}
        rows = {name: self.stored[x] for name, x in zip(("r", "k", "v", "decay", "rate"), tensors, strict=True)}
        self._recurrent_call(
            "wkv", "recurrent", "wkv", op.state, 4 * (len(tensors) + len(results)) * op.r.width,
            lambda n: (n_heads * n_columns // columns, min(n, _MAX_SEQUENCES)), 4 * columns,
            **rows, **weights, columns=n_columns, out=results[0], of_bonus=results[-1].buffer, operands=[*results],
            defines={
                "RATE": int(op.rate is not None), "BONUS": int(op.bonus is not None), "ROWS": n_rows,
                "COLUMNS": columns,
            },
        )  # fmt: skip
        return results

    def _recurrence(
        self,
        op: ops.GatedDelta | ops.Scan,
        defines: dict[str, int],
        qkv: Sequence[tuple[Tensor, int]],
        /,
        *,
        n_groups: int,
        **arguments: Any,
    ) -> DeviceRows:
        """Update a state by each token, and compute its output.

        Args:
            qkv: the tensors that contain q, k and v, and their first columns.
        """
        (n_heads, n_rows, n_columns), y = op.state.shape, self.new(Rows.TOKENS, op.result.width)
        columns, row_bytes = 32 if n_columns % 32 == 0 else 16, 4 * (2 * n_heads * n_columns + 2 * n_groups * n_rows)
        for name, (x, first) in zip("qkv", qkv, strict=True):
            arguments |= {name: self.stored[x].buffer.at(4 * first), f"{name}_stride": self.stored[x].stride}
        self._recurrent_call(
            "recurrence", "recurrent", "recurrence", op.state, row_bytes,
            lambda n: (n_heads * n_columns // columns, min(n, _MAX_SEQUENCES)), 4 * columns,
            **arguments, a=self.weights.vector(op.a), dt_bias=self.weights.vector(op.dt_bias), n_groups=n_groups,
            columns=n_columns, out=y, operands=[self.stored[x] for x, _ in qkv],
            defines={**defines, "ROWS": n_rows, "COLUMNS": columns},
        )  # fmt: skip
        return y

    # -- Experts ---------------------------------------------------------------------------------------------------

    def route(self, op: ops.Route) -> _ExpertChoice:
        limits, mixture, logits = self.limits, Mixture(op.logits.width, op.k), self.stored[op.logits]
        if mixture.n > MAX_EXPERTS or mixture.k > MAX_CHOSEN:
            raise KernelError(
                f"{mixture.n} experts with {mixture.k} per token are too many for CUDA kernels, whose maximum "
                f"is {MAX_EXPERTS} and {MAX_CHOSEN}: run the model's layers on the CPU"
            )
        n_pairs, n_places = limits.max_tokens * mixture.k, limits.max_rows(N_PLACES)
        # Products, their number, ids, expert weights, places, and the tokens of places.
        sizes = 16 * mixture.n_products(limits.max_tokens, _FEW_ROWS), 16, *3 * [4 * n_pairs], 4 * n_places
        memory, header = Buffer(sum(sizes)), self.batch.header
        readers = [op for op in self.readers[op.result] if isinstance(op, ops.ExpertLinears | ops.ExpertOutput)]
        experts = [w for op in readers for w in (op.experts if isinstance(op, ops.ExpertLinears) else (op.experts,))]
        formats, products = [self.weights.matrix(weight).packed for weight in experts], limits.products

        def is_single(extent: Extent) -> bool:
            sizes = extent.n_tokens, _product_rows(mixture, extent, products), products.capability
            return all(matmul.expert_kernel(format, *sizes) == "matvec_experts" for format in formats)

        choice = _ExpertChoice(mixture, is_single, memory, *map(memory.at, accumulate(sizes[:-1], initial=0)))
        scored = [] if op.is_by_logits else [self.new(Rows.TOKENS, logits.width) for _ in range(2)]
        probabilities, scores = [x.buffer for x in scored] or (None, None)
        shared = {"header": header, "ids": choice.ids, "k": mixture.k}
        values: dict[str, Any] = {
            "logits": logits, "n": logits.width, "norm_topk_prob": op.norm_topk_prob, "scale": float(op.scale),
            "gating": GATINGS.index(op.gating), "bias": self.weights.vector(op.selection_bias),
            "n_groups": op.n_groups, "n_top_groups": op.n_top_groups, "n_best": op.n_group_best,
            "chosen": self.stored[op.expert_ids], "probabilities": probabilities, "scores": scores,
            "factors": self.weights.vector(op.expert_scales), "expert_weights": choice.weights,
        }  # fmt: skip
        values = expanded(kernel_parameters("experts")["route"], values)
        places: dict[str, Any] = {"places": choice.places, "rows": choice.rows}
        products_to = {"products": choice.products, "n_products": choice.n_products}

        def launches(extent: Extent) -> Iterator[Launch]:
            launch = Launch("experts", "route", {}, (-(-extent.n_tokens // _ROUTE_TOKENS),), (_ROUTE_THREADS,))
            tables = places if is_single(extent) else dict.fromkeys(places)
            yield with_arguments(launch, **shared, **values, **tables)
            if not is_single(extent):
                launch = Launch("experts", "group_by_expert", {}, (1,), (_GROUP_THREADS,))
                sizes = {"n_experts": mixture.n, "product_rows": _product_rows(mixture, extent, products)}
                yield with_arguments(launch, **shared, **sizes, **places, **products_to)

        # Ids, weights, places, and the tokens of places.
        cost = lambda sizes: Cost(  # noqa: E731
            (1 + 2 * len(scored)) * logits.bytes_of(sizes.n_tokens) + sizes.rows(N_PLACES) * 4 * 4
        )
        operands = [x for x in (logits, memory, self.stored[op.expert_ids], *scored) if x]
        self.calls.append(KernelCall("route", launches, operands, cost))
        return choice

    def expert_linears(self, op: ops.ExpertLinears) -> tuple[DeviceRows, ...]:
        choice, x = self.stored[op.routing], self.stored[op.x]
        matrices = [self.weights.matrix(weight) for weight in op.experts]
        inputs = dict[str, tuple[Inputs, Inputs | None]]()
        for kind, format in {matrix.packed.input_kind: matrix.packed for matrix in matrices}.items():
            rows, shared = self.new_inputs(format, op.x, N_PLACES), self.inputs.get((op.x, kind))
            inputs[kind] = rows, shared
            cost = lambda sizes, rows=rows: Cost(  # noqa: E731
                x.bytes_of(sizes.n_tokens) + 4 * sizes.rows(N_PLACES) + rows.bytes_of(sizes.rows(N_PLACES))
            )
            # Single rows use the inputs of tokens, if they exist.
            when = None if shared is None else lambda extent: not choice.is_single(extent)
            options: dict[str, Any] = {"operands": [choice.buffer], "cost": cost, "when": when}
            self._quantise("gather for experts", x, rows, choice.rows, **options)
        is_plain = not op.biases and not op.is_weighted and len({matrix.format for matrix in matrices}) == 1
        gate = self._gate_of(op) if is_plain else None
        results = self._multiply_experts(choice, matrices, inputs, gate)
        for i, y in enumerate(results):
            if op.biases or op.is_weighted:  # weights apply before biases
                self._finish_experts(choice, op.is_weighted, op.biases[i] if op.biases else None, y)
        return results

    def expert_output(self, op: ops.ExpertOutput) -> DeviceRows:
        if op.residual is not None and self.last_uses[op.residual] > self.node:
            raise KernelError("the cuda backend adds the output of experts in place: it must not be read elsewhere")
        choice, matrix, batch = self.stored[op.routing], self.weights.matrix(op.experts), self.batch
        rows, format, bias = self.inputs_of(op.h, matrix.packed), matrix.packed, self.weights.vector(op.bias)
        begin, k = len(self.calls), choice.mixture.k

        def summed_launch(extent: Extent) -> Launch | None:
            """Return a launch for the whole operation; None if it needs several kernels."""
            sizes = matrix.n_out, matrix.n_in, extent.n_tokens, k
            return matmul.summed_launch(format, *sizes) if choice.is_single(extent) else None

        when: Condition = lambda extent: summed_launch(extent) is None  # noqa: E731
        inputs = {format.input_kind: (rows, None)}
        [products], y = self._multiply_experts(choice, [matrix], inputs, when=when), self.in_place(op)
        if op.bias is not None:
            self._finish_experts(choice, False, op.bias, products, when)
        weights, width, adds = (
            choice.weights if op.is_weighted else None,
            products.width,
            int(op.residual is not None),
        )

        def cost(sizes: BatchSizes) -> Cost:  # includes places and weights
            n = sizes.rows(N_PLACES)
            return Cost(products.bytes_of(n) + 8 * n + 2 * y.bytes_of(sizes.n_tokens))

        shared = {"expert_weights": weights, "k": k, "adds": adds}
        self.call(
            "add experts", ("experts", "add_experts"), N_TOKENS, lambda n: (-(-width // _SUM_COLUMNS), n),
            _SUM_THREADS,
            **shared, header=batch.header, places=choice.places, products=products, n=width, y=y,
            operands=[choice.buffer], cost=cost, when=when,
        )  # fmt: skip
        sizes = {"n_tiles": format.n_tiles(matrix.n_in), "n_chunks": format.n_chunks(matrix.n_in), "n_out": width}
        summed = {"experts": choice.ids, "weights": matrix.memory, "biases": bias, "y": y.buffer, "stride": y.stride}

        def launches(extent: Extent) -> Iterator[Launch]:
            if launch := summed_launch(extent):
                values = {**shared, **sizes, **summed, "n_tokens": batch.counter(N_TOKENS)}
                yield with_arguments(launch, **values, **rows.arguments(extent.n_places))

        product = self.calls[begin]

        def cost_at_once(sizes: BatchSizes) -> Cost:  # products are not stored and read again
            return product.cost(sizes) + cost(sizes) + Cost(-2 * products.bytes_of(sizes.rows(N_PLACES)))

        self.calls.append(KernelCall(f"{product.name} + add", launches, [rows, choice.buffer, y], cost_at_once))
        return y

    def _finish_experts(
        self,
        choice: _ExpertChoice,
        is_weighted: bool,
        bias: Weight | None,
        y: DeviceRows,
        when: Condition | None = None,
    ) -> None:
        """Multiply products by the weights of their pairs and add the biases of their experts, in place."""
        k = choice.mixture.k
        self.call(
            "finish experts", ("experts", "finish_experts"), N_TOKENS, lambda n: (-(-y.width // _SUM_COLUMNS), k * n),
            _SUM_THREADS,
            header=self.batch.header, places=choice.places, ids=choice.ids,
            expert_weights=choice.weights if is_weighted else None, biases=self.weights.vector(bias), k=k, y=y,
            n=y.width, operands=[choice.buffer, y], when=when,
        )  # fmt: skip

    def _multiply_experts(
        self,
        choice: _ExpertChoice,
        matrices: Sequence[PackedMatrix],
        inputs: Mapping[str, tuple[Inputs, Inputs | None]],
        gate: tuple[ops.Gated, Inputs] | None = None,
        when: Condition | None = None,
    ) -> tuple[DeviceRows, ...]:
        """Multiply rows by place; products of one format are one call.

        Args:
            inputs: by kind, the inputs of places; and the inputs of tokens, if they exist, which single rows use.
            when: see `call`.
        """
        results = tuple(self.new(Rows.CHOSEN, matrix.n_out) for matrix in matrices)
        for format in dict.fromkeys(matrix.format for matrix in matrices):
            pairs = [(w, y) for w, y in zip(matrices, results, strict=True) if w.format == format]
            self._multiply_some_experts(choice, pairs, *inputs[pairs[0][0].packed.input_kind], gate, when)
        return results

    def _multiply_some_experts(
        self,
        choice: _ExpertChoice,
        pairs: Sequence[tuple[PackedMatrix, DeviceRows]],
        inputs: Inputs,
        shared: Inputs | None,
        gate: tuple[ops.Gated, Inputs] | None,
        when: Condition | None,
    ) -> None:
        mixture, limits, packed = choice.mixture, self.limits.products, [w for w, _ in pairs]
        format, n_in = packed[0].packed, packed[0].n_in
        products = [matmul.Product(w.memory, y.buffer, w.n_out, y.stride) for w, y in pairs]
        groups = [products[i : i + matmul.MAX_MATRICES] for i in range(0, len(products), matmul.MAX_MATRICES)]
        matrices = [matmul.matrix_arguments(some) for some in groups]
        few = {"n_tokens": choice.n_products, "products": choice.products}
        single = {"n_tokens": self.batch.counter(N_TOKENS), "experts": choice.ids, "places": choice.places}

        def launches(extent: Extent) -> Iterator[Launch]:
            if when is not None and not when(extent):
                return
            n, rows = extent.n_tokens, _product_rows(mixture, extent, limits)
            x, n_rows, share = inputs, extent.n_places, 1
            if shared is not None and choice.is_single(extent):
                x, n_rows, share = shared, n, mixture.k
            sizes = n_in, n, n * mixture.k, mixture.n_products(n, rows), rows
            for some, some_matrices in zip(groups, matrices, strict=True):
                launch = matmul.expert_launch(format, [p.n_out for p in some], *sizes, limits)
                values: dict[str, Any] = few
                if launch.kernel == "matvec_experts":
                    values = {**single, "k": mixture.k, "share": share}
                values = {**x.arguments(n_rows), **matmul.size_arguments(launch.kernel, format, n_in), **values}
                if gate is not None and (gated := matmul.gated_launch(format, launch)):
                    yield with_arguments(gated, **values, **self._gate_arguments(gate, some, extent.n_places))
                else:
                    yield with_arguments(launch, **values, **some_matrices)

        def cost(sizes: BatchSizes) -> Cost:
            used = 1 - (1 - mixture.k / mixture.n) ** sizes.n_tokens  # share of experts that are read
            return _product_cost(packed, inputs, sizes.rows(N_PLACES), share=used)

        operands: list[DeviceRows | Inputs | Buffer] = [inputs, choice.buffer, *(y for _, y in pairs)]
        operands += [shared] if shared else []
        operands += self._ends_with(gate, launches)
        self.calls.append(KernelCall(f"experts {_names(packed)}", launches, operands, cost))


def _each(n: int) -> tuple[int, ...]:
    """Return a grid with one block per row."""
    return (n,)


def _product_rows(mixture: Mixture, extent: Extent, limits: ProductLimits) -> int:
    """Return the maximum rows of one expert in a product."""
    few = extent.n_tokens * mixture.k <= _FEW_ROWS * mixture.n
    return _FEW_ROWS if few or limits.capability < matmul.TENSOR_CORES else limits.tile_rows[-1]


def columns(x: DeviceRows) -> Grid:
    """Return a grid with blocks of columns for each row."""
    return lambda n: (-(-x.width // _GATE_COLUMNS), n)


def selection_defines(cache: g.KVCache, k: int, entries: int = 0, *, by_head: bool = False) -> dict[str, int | str]:
    """Return definitions of selection.cu for attention to k positions."""
    heads = {"KV_HEADS": cache.n_heads, "VALUES_IN_KEYS": int(cache.values_in_keys), "BY_HEAD": int(by_head)}
    return {**append_defines(cache), **heads, "TOP": k, "ENTRIES": entries}


def index_defines(
    cache: g.KVCache, k: int, n_heads: int, dim: int, *, run: int = 1, n_last: int = 0
) -> dict[str, int | str]:
    """Return definitions for an indexer that selects k runs, whose keys can be pooled and follow the tokens' keys."""
    options = {"RUN": run, "RUN_KEY": cache.key_dim - dim, "LAST": n_last}
    return {**selection_defines(cache, k), **options, "HEADS": n_heads, "DIM": dim}


def _nothing(extent: Extent) -> tuple[Launch, ...]:
    """Return no launches."""
    return ()


def _copies(rows: Sequence[DeviceRows]) -> Callable[[BatchSizes], Cost]:
    """Return the cost of copies from or to the host."""
    return lambda sizes: Cost(sum(x.bytes_of(sizes.rows(x.slot)) for x in rows))


def _multiplied(op: g.Operation[Any], x: Tensor) -> list[Weight]:
    """Return the weights that an operation multiplies a tensor with; empty if it also uses the tensor differently."""
    match op:
        case ops.Linears(x=operand, matrices=matrices) if operand is x:
            return [matrix.weight for matrix in matrices]
        case ops.Linear(x=operand, matrix=matrix, residual=residual) if operand is x and residual is not x:
            return [matrix.weight]
        case ops.ExpertOutput(h=operand, experts=experts, residual=residual) if operand is x and residual is not x:
            return [experts]
    return []


def _names(weights: Sequence[PackedMatrix]) -> str:
    """Return the names of matrices in a layer, and their format."""
    names = dict.fromkeys(_LAYER.sub("", w.name).removesuffix(".weight") or "?" for w in weights)
    return f"{'+'.join(names)} {'+'.join(dict.fromkeys(w.format for w in weights))}"


def _product_cost(
    weights: Sequence[PackedMatrix], inputs: Inputs, n: int, share: float = 1.0, extra_bytes: int = 0
) -> Cost:
    """Return the cost of ``n`` rows; ``share`` is the fraction of the weights that is read."""
    format, n_in, n_out = weights[0].packed, weights[0].n_in, inputs.n_heads * sum(w.n_out for w in weights)
    n_bytes = share * sum(w.n_bytes for w in weights) + inputs.bytes_of(n) + 4 * n * n_out + extra_bytes
    return Cost(n_bytes, 2 * n * n_in * n_out, _KINDS.get(format.name, "int8"))
