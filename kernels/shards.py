"""Tensor parallelism: a graph split across its matrices, so that each device computes a part of every layer.

Attention heads are split by key/value head, together with their cache. The first matrices of an MLP and the output
matrix are split by rows, and the last matrix of an MLP by columns. A product with a device's columns is a partial
sum. `AllSum` adds the partial sums of all devices in their order, so that every run computes the same bits. Every
device computes operations on whole rows (norms, residuals, the embedding) itself.

Source: Megatron-LM, arXiv:1909.08053.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels import graph as g, operations as ops
from localllm.kernels.graph import Graph, Matrix, Operation, Rows, Tensor, Weight
from localllm.quant.lut import block_size

#: Operations on whole rows, computed identically on every device.
_WHOLE = (
    ops.Input
    | ops.Embed
    | ops.RMSNorm
    | ops.LayerNorm
    | ops.Add
    | ops.AddRows
    | ops.Scale
    | ops.Softcap
    | ops.Outputs
)
#: Operations that can be split.
_CUT = ops.Linear | ops.Linears | ops.RopeAppend | ops.Attention | ops.Gated | ops.Activation
#: Names of unsupported operations in error messages.
_NAMES = {
    ops.Route: "mixtures of experts",
    ops.HeadLinear: "latent attention",
    ops.IndexSelect: "positions that an indexer chooses",
    ops.HeadGate: "gates of heads",
    ops.XIELU: "an activation with parameters",
    ops.Clamp: "values that are clamped",
    ops.CausalConv: "recurrent layers",
    ops.AdapterWeights: "adapters",
}
#: Units of columns for splits: activations are rounded in groups of 32, and tiles have up to 256 columns.
_GROUP, _TILE = 32, 256

#: Boundaries of the parts of a tensor's columns, or of a weight's rows or columns: one more than devices.
Cuts = tuple[int, ...]


class AllSum(g.SameShape):
    """The sum of x over all devices, in their order."""


class Gather(Operation[Tensor]):
    """The concatenated x of all devices, on the first device; other devices continue with their part."""

    x: Tensor
    cuts: Cuts
    device: int

    @cached_property
    def result(self) -> Tensor:
        return Tensor(self.x.rows, self.x.width if self.device else self.cuts[-1])


@dataclass(frozen=True, eq=False)
class Shard(g.WeightView):
    """A device's rows, or columns, of a weight."""

    indices: range
    is_columns: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        rows, *columns = self.whole.shape
        return (rows, len(self.indices)) if self.is_columns else (len(self.indices), *columns)

    @property
    def data(self) -> NDArray[np.uint8]:
        """Raw blocks; a copy if columns are selected."""
        data, indices = self.whole.data, self.indices
        if not self.is_columns:
            n_bytes = data.nbytes // self.whole.shape[0]
            return (
                data[indices.start : indices.stop]
                if data.ndim > 1
                else data[n_bytes * indices.start : n_bytes * indices.stop]
            )
        size = block_size(self.type)
        return np.ascontiguousarray(data[:, size.row_bytes(indices.start) : size.row_bytes(indices.stop)])


def shard(graph: Graph, n: int) -> list[Graph]:
    """Return one graph per device, which together compute ``graph``. Raises KernelError if it cannot be split."""
    for node in graph.nodes:
        if not isinstance(node.operation, _WHOLE | _CUT):
            raise _refused(_NAMES.get(type(node.operation), type(node.operation).__name__))
        if node.operation.has_part:
            raise _refused("an encoder of prompts")
    cuts = _cuts(graph, n)
    return [_Sharding(graph, cuts, device).graph() for device in range(n)]


def _refused(feature: str) -> KernelError:
    return KernelError(f"a model with {feature} cannot be split by rows: leave split_mode out to split it by layers")


def _even(total: int, n: int, *units: int) -> Cuts:
    """Return nearly equal parts, in multiples of the first unit that is small enough for ``n`` parts."""
    for unit in units:
        if (n_units := total // unit) >= n:
            return *(n_units * i // n * unit for i in range(n)), total
    raise _refused(f"{total:,} values per row, or heads, but each of {n} devices needs {units[-1]}")


def _cuts(graph: Graph, n: int) -> dict[Tensor, Cuts]:
    """Return the boundaries of all tensors that are split."""
    readers: dict[Any, list[Operation[Any]]] = defaultdict(list)
    made_by: dict[Any, Operation[Any]] = {}
    for node in graph.nodes:
        made_by |= dict.fromkeys(node.operation.results, node.operation)
        for x in node.operation.inputs:
            readers[x].append(node.operation)
    cuts: dict[Tensor, Cuts] = {}
    heads: dict[int, Cuts] = {}

    def columns_of(x: Tensor) -> int:
        """Return the divisor of a tensor's boundaries that its readers require, directly or after a gate."""
        sizes = [columns_of(op.result) for op in readers[x] if isinstance(op, ops.Gated)]
        sizes += [block_size(op.matrix.weight.type).length for op in readers[x] if isinstance(op, ops.Linear)]
        return lcm(_GROUP, *sizes)

    for node in graph.nodes:
        match node.operation:
            case ops.RopeAppend(q=q, k=k, v=v, cache=cache) as op:
                if not all(isinstance(made_by[x], ops.Linear | ops.Linears) for x in (q, k, v) if x is not None):
                    raise _refused("queries and keys that are normed in whole rows")
                group = q.width // (cache.n_heads * cache.key_dim)
                [attention] = [reader for reader in readers[op.result] if isinstance(reader, ops.Attention)]
                if cache.layer not in heads:
                    unit = columns_of(attention.result)
                    head = lcm(unit, group * cache.value_dim) // (group * cache.value_dim)
                    heads[cache.layer] = _even(cache.n_heads, n, head)
                head_cuts = heads[cache.layer]
                widths = (q, group * cache.key_dim), (k, cache.key_dim), (v, cache.value_dim)
                cuts |= {x: tuple(width * i for i in head_cuts) for x, width in widths if x is not None}
                cuts[op.result] = cuts[q]
                cuts[attention.result] = tuple(group * cache.value_dim * i for i in head_cuts)
            case ops.Gated(gate=gate, up=up) as op:
                unit = columns_of(op.result)
                gate_cuts = cuts.get(up) or cuts.get(gate) or _even(up.width, n, lcm(_TILE, unit), unit)
                cuts |= {gate: gate_cuts, up: gate_cuts, op.result: gate_cuts}
            case ops.Activation(x=x) as op:
                unit = columns_of(op.result)
                cuts[x] = cuts[op.result] = _even(x.width, n, lcm(_TILE, unit), unit)
            case ops.Linear() as op if node.layer == "output":
                cuts[op.result] = _even(op.result.width, n, _TILE, _GROUP)
    return cuts


class _Sharding:
    """Builds the graph of one device."""

    def __init__(self, graph: Graph, cuts: dict[Tensor, Cuts], device: int) -> None:
        self.graph_to_split, self.cuts, self.device = graph, dict(cuts), device
        self.device_graph = Graph(graph.cache_type, graph.rounds_floats)
        self.device_graph.windows = graph.windows
        self.tensors: dict[Any, Any] = {}
        self.weights: dict[tuple[Weight, range, bool], Shard] = {}

    def graph(self) -> Graph:
        for layer, cache in self.graph_to_split.caches.items():
            operations = (node.operation for node in self.graph_to_split.nodes)
            q = next(op.q for op in operations if isinstance(op, ops.Attention) and op.cache is cache)
            n_heads = len(self.indices(q)) * cache.n_heads // q.width
            self.device_graph.caches[layer] = replace(cache, n_heads=n_heads)
        for node in self.graph_to_split.nodes:
            self.device_graph.layer = node.layer
            op = node.operation
            results = self.add(op)
            self.tensors |= zip(op.results, results if isinstance(results, tuple) else (results,), strict=True)
        return self.device_graph

    def indices(self, x: Tensor) -> range:
        return range(*self.cuts[x][self.device : self.device + 2])

    def shard(self, weight: Weight | None, indices: range, *, is_columns: bool = False) -> Any:
        """Return rows or columns of a weight. Equal arguments return the same object, so that it is packed once."""
        if weight is None:
            return None
        return self.weights.setdefault((weight, indices, is_columns), Shard(weight, indices, is_columns))

    def rows(self, matrix: Matrix, result: Tensor) -> Matrix:
        """Return the rows of a matrix that compute this device's part of ``result``."""
        indices = self.indices(result)
        return Matrix(self.shard(matrix.weight, indices), self.shard(matrix.bias, indices))

    def add(self, op: Operation[Any]) -> Any:
        cut = [x for x in (*op.inputs, *op.results) if x in self.cuts]
        match op:
            case ops.Linear(x=x, matrix=matrix) if x in self.cuts and op.result not in self.cuts:
                if x.rows is not Rows.TOKENS:
                    raise _refused("products of outputs alone")
                weight = self.shard(matrix.weight, self.indices(x), is_columns=True)
                is_first = self.device == 0  # only one device adds bias and residual
                residual = self.tensors[op.residual] if is_first and op.residual is not None else None
                mine = Matrix(weight, matrix.bias if is_first else None)
                return self.device_graph.add(
                    AllSum(self.device_graph.add(ops.Linear(self.tensors[x], mine, residual)))
                )
            case ops.Linear(x=x) if cut == [op.result] and op.residual is None:
                y = self.device_graph.add(ops.Linear(self.tensors[x], self.rows(op.matrix, op.result)))
                is_output = self.device_graph.layer == "output"
                cuts = self.cuts.pop(op.result) if is_output else ()
                return self.device_graph.add(Gather(y, cuts, self.device)) if is_output else y
            case ops.Linears(x=x, matrices=matrices) if cut == list(op.result):
                own_matrices = tuple(self.rows(m, y) for m, y in zip(matrices, op.result, strict=True))
                return self.device_graph.add(ops.Linears(self.tensors[x], own_matrices))
            case (
                ops.RopeAppend()
                | ops.Attention(sinks=None, slopes=None, biases=None)
                | ops.Gated()
                | ops.Activation()
            ):
                return self.device_graph.add(self.renewed(op))
            case _ if isinstance(op, _WHOLE | ops.Linear | ops.Linears) and not cut:
                return self.device_graph.add(self.renewed(op))
        raise _refused(f"a cut through {type(op).__name__}")

    def renewed(self, op: Operation[Any]) -> Any:
        """Return the operation with this graph's tensors and caches."""
        changes: dict[str, Any] = {}
        for argument in fields(op):
            value = getattr(op, argument.name)
            if isinstance(value, Tensor):
                changes[argument.name] = self.tensors.get(value, value)
            elif isinstance(value, g.KVCache):
                changes[argument.name] = self.device_graph.caches[value.key]
        return replace(op, **changes)
