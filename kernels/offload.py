"""A graph that a device and the host compute together: the host multiplies with some matrices, such as experts.

    device   norm, attention, router ─▶ Send ──── shared expert ────▶ Receive, add ─▶ next layer
    host                                   └─▶ routing, experts ─▶┘

`offload` divides a graph into a graph for the device, with the caches and states, and a graph for the host. The
host's graph consists of **blocks**: a block receives tensors from the device, computes, and sends tensors back.
`Send` is placed directly after the operation that computes its last tensor, and `Receive` before the first operation
that reads a result. The device computes the operations between them while the host computes the block.

Tensors with a row per chosen expert, and the choice itself, do not leave the host: routing, the experts' products and
the operations between them are in one block. A residual is added by the device, so that only the product is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ExpertReadError, KernelError
from localllm.kernels import operations as ops
from localllm.kernels.backend import Backend, Batch, ExpertReads, Footprint, Output, Progress, Step
from localllm.kernels.graph import Graph, LayerTag, Node, Operation, Routing, Rows, Tensor, Value, Weight

#: Operations whose matrices can be on the host.
_MOVABLE = ops.Embed | ops.ExpertLinears | ops.ExpertOutput | ops.Linear | ops.Linears
#: Operations that the host computes if it has computed all their inputs.
_FOLLOWING = ops.Activation | ops.Clamp | ops.Gated | ops.Scale


class Send(Operation[tuple[Tensor, ...]]):
    """Copies tensors to the other graph: the inputs of the host's block ``number``, or its results."""

    tensors: tuple[Tensor, ...]
    number: int

    @cached_property
    def result(self) -> tuple[Tensor, ...]:
        return self.tensors


class Receive(Operation[tuple[Tensor, ...]]):
    """Tensors of the other graph: the inputs of the host's block ``number``, or its results."""

    tensors: tuple[Tensor, ...]
    number: int

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        return ()

    @cached_property
    def result(self) -> tuple[Tensor, ...]:
        return self.tensors


class OffloadRule(NamedTuple):
    """The host's backend, and whether it multiplies with a matrix."""

    host: Backend
    is_on_host: Callable[[Weight], bool]


@dataclass(frozen=True)
class Offloaded:
    """The two graphs.

    Attributes:
        on_host: the host's values, by the values of the original graph that only the host computes.
        on_device: the device's values, by the values of the original graph whose operations were changed.
    """

    device: Graph
    host: Graph
    on_host: Mapping[Value, Value]
    on_device: Mapping[Value, Value]

    def copied_bytes(self, n_tokens: int, n_outputs: int = 1) -> int:
        """Return the bytes that a step copies between device and host, without the padding of rows."""
        return sum(n_bytes for _, n_bytes in self._copies(n_tokens, n_outputs))

    def exchange_bytes(self, n_tokens: int, n_outputs: int) -> int:
        """Return the bytes of host memory for copies, without the padding of rows: all blocks share it."""
        largest = dict[type[Any], int]()
        for kind, n_bytes in self._copies(n_tokens, n_outputs):
            largest[kind] = max(largest.get(kind, 0), n_bytes)
        return sum(largest.values())

    def _copies(self, n_tokens: int, n_outputs: int) -> Iterator[tuple[type[Any], int]]:
        """Yield the operation and the bytes of each copy."""
        n_rows = {Rows.TOKENS: n_tokens, Rows.OUTPUTS: n_outputs}
        for node in self.device.nodes:
            if isinstance(node.operation, Send | Receive):
                yield type(node.operation), sum(4 * n_rows[x.rows] * x.width for x in node.operation.tensors)


def offload(graph: Graph, is_on_host: Callable[[Weight], bool]) -> Offloaded | None:
    """Divide a graph and its graph of a prompt; None if the host has no matrix of the former.

    Args:
        is_on_host: whether a matrix is on the host. An operation with several matrices moves as a whole.
    """
    on_host = _operations_on_host(graph, is_on_host)
    if not on_host:
        return None
    graphs = _Dividing(graph).divided(on_host)
    if graph.prompt is not None:
        prompt = offload(graph.prompt, is_on_host)
        graphs.device.prompt = graph.prompt if prompt is None else prompt.device
        graphs.host.prompt = None if prompt is None else prompt.host
    return graphs


def _operations_on_host(graph: Graph, is_on_host: Callable[[Weight], bool]) -> set[int]:
    """Return the indices of the nodes that the host computes."""
    operations = [node.operation for node in graph.nodes]
    indices = {
        i
        for i, op in enumerate(operations)
        if isinstance(op, _MOVABLE)
        and not (isinstance(op, ops.Embed) and op.by_position)
        and any(len(weight.shape) > 1 and is_on_host(weight) for weight in op.weights)
    }
    while True:
        local = {x for i in indices for x in (*operations[i].inputs, *operations[i].results) if _is_local(x)}
        more = {i for i, op in enumerate(operations) if not local.isdisjoint((*op.inputs, *op.results))} - indices
        if not more:
            break
        indices |= more
    if any(isinstance(operations[i], ops.HostEdit) for i in indices):
        raise KernelError("values between the products of an expert cannot be changed on the host: load all experts")
    return indices


def _is_local(x: Value) -> bool:
    """Return whether a value cannot be copied."""
    return isinstance(x, Routing) or x.rows is Rows.CHOSEN


@dataclass
class _Block:
    layer: LayerTag
    inputs: list[Tensor] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    # results without their residual, by the result in the original graph: the product, and the residual
    sums: dict[Value, tuple[Tensor, Tensor]] = field(default_factory=dict)


class _Dividing:
    """Builds the two graphs."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.host = graph, Graph(graph.cache_type, graph.rounds_floats)
        self.device = graph.empty()
        self.block: _Block | None = None
        self.n_blocks = 0
        #: Values of the original graph, as values of the host and of the device.
        self.host_values: dict[Value, Value] = {}
        self.device_values: dict[Value, Value] = {}
        #: The number of the device's nodes when it has computed a value.
        self.computed_at: dict[Value, int] = {}
        #: Sends of the device, by the number of nodes before them; and the earliest place of the next.
        self.sends: dict[int, list[Node]] = {}
        self.earliest = 0

    def divided(self, on_host: set[int]) -> Offloaded:
        for i, node in enumerate(self.graph.nodes):
            op = node.operation
            follows = isinstance(op, _FOLLOWING) and all(x in self.host_values for x in op.inputs)
            if i in on_host or (follows and self.block is not None):
                self._add_to_host(node)
            else:
                self._fetch(op.inputs)
                self._add_to_device(Node(op.with_inputs(self.device_values), node.layer), op.results)
        self._fetch([self.graph.result])
        nodes = [*self.device.nodes]
        self.device.nodes = []
        for i in range(len(nodes) + 1):
            self.device.nodes += [*self.sends.get(i, ()), *nodes[i : i + 1]]
        only_host = {x: y for x, y in self.host_values.items() if x not in self.device_values}
        for x in self.graph.watched:
            where = self.host if x in only_host else self.device
            where.watched.add(only_host.get(x) or self.device_values.get(x, x))
        changed = {x: y for x, y in self.device_values.items() if x is not y}
        return Offloaded(self.device, self.host, only_host, changed)

    def _add_to_device(self, node: Node, results: Sequence[Value]) -> None:
        self.device.nodes.append(node)
        self.device_values.update(zip(results, node.operation.results, strict=True))
        self.computed_at |= dict.fromkeys(node.operation.results, len(self.device.nodes))

    def _add_to_host(self, node: Node) -> None:
        op = node.operation
        if self.block is not None and any(x in self.block.sums for x in op.inputs):
            self._finish(())  # the host reads a sum that the device computes
        residual: Tensor | None = None
        if isinstance(op, ops.Linear | ops.ExpertOutput) and op.residual not in self.host_values:
            residual, op = op.residual, replace(op, residual=None)
        if self.block is None:
            self.block = _Block(node.layer)
        for x in op.inputs:
            if x not in self.host_values:
                value = self.device_values[x]
                assert isinstance(value, Tensor)
                self.block.inputs.append(value)
                self.host_values[x] = value
        op = op.with_inputs(self.host_values)
        self.block.nodes.append(Node(op, node.layer))
        if residual is None:
            self.host_values.update(zip(node.operation.results, op.results, strict=True))
        else:
            [product], [result], added = op.results, node.operation.results, self.device_values[residual]
            assert isinstance(product, Tensor)
            assert isinstance(added, Tensor)
            self.block.sums[result] = product, added

    def _fetch(self, values: Sequence[Value]) -> None:
        """Let the device receive values that only the host has."""
        needed = [x for x in values if x not in self.device_values and x in self.host_values]
        if needed or (self.block is not None and any(x in self.block.sums for x in values)):
            self._finish(needed)

    def _finish(self, needed: Sequence[Value]) -> None:
        """End the block, whose results are ``needed`` and its sums."""
        block, number = self.block or _Block(self.graph.nodes[0].layer), self.n_blocks
        self.block, self.n_blocks = None, number + 1
        products = [product for product, _ in block.sums.values()]
        results: tuple[Any, ...] = (*(self.host_values[x] for x in needed), *products)
        for value in results:
            if _is_local(value):
                raise KernelError("the rows of single experts stay on the host: move whole experts")
        self.host.nodes += [
            Node(Receive(tuple(block.inputs), number), block.layer),
            *block.nodes,
            Node(Send(results, number), block.layer),
        ]
        place = max((self.computed_at[x] for x in block.inputs), default=0)
        place = max(place, self.earliest)
        self.sends.setdefault(place, []).append(Node(Send(tuple(block.inputs), number), block.layer))
        self._add_to_device(Node(Receive(results, number), block.layer), (*needed, *products))
        for x, (product, residual) in block.sums.items():
            self._add_to_device(Node(ops.Add(product, residual), block.layer), (x,))
        self.earliest = len(self.device.nodes)


# -- Steps ---------------------------------------------------------------------------------------------------------


class HostBlocks(Protocol):
    """The host's part of a step."""

    def begin(self, batch: Batch) -> None:
        """Prepare for the blocks of a batch."""

    def compute(self, number: int, inputs: Sequence[NDArray[np.float32]]) -> Sequence[NDArray[np.float32]]:
        """Return the results of a block, in its memory. Blocks of a batch are computed in order."""

    def end(self, batch: Batch) -> ExpertReadError | None:
        """End a batch. Returns an error without rows if experts could not be read, or None."""


class OffloadedStep(Step):
    """The step of a device, whose host computes blocks.

    Attributes:
        device, host: their steps.
    """

    def __init__(self, device: Any, host: Any, graphs: Offloaded, rule: OffloadRule) -> None:
        self.device, self.host, self.graphs, self._rule = device, host, graphs, rule
        device.host = host
        self.cache, self.weights = device.cache, (*device.weights, *host.weights)
        self.max_top_k = device.max_top_k

    @property
    def expert_reads(self) -> ExpertReads | None:
        reads: ExpertReads | None = self.host.expert_reads
        return reads

    def run(self, batch: Batch, hidden: Output | None = None) -> Output:
        self.host.begin(_without_cache(batch, self.host.cache.page_size))
        output: Output = self.device.run(batch, hidden)
        if (error := self.host.end(batch)) is not None:
            raise ExpertReadError(str(error), error.sequences, output.rows()) from error
        return output

    def value(self, x: Value) -> NDArray[Any]:
        if x in self.graphs.on_host:
            value: NDArray[Any] = self.host.value(self.graphs.on_host[x])
        else:
            value = self.device.value(self.graphs.on_device.get(x, x))
        return value

    def variant(self, graph: Graph, max_tokens: int | None = None) -> Step:
        graphs = offload(graph, self._rule.is_on_host)
        if graphs is None:  # such as the head of a model
            step: Step = self.device.variant(graph, max_tokens)
            return step
        device = self.device.variant(graphs.device, max_tokens)
        host = self.host.variant(graphs.host, max_tokens)
        return OffloadedStep(device, host, graphs, self._rule)


def _without_cache(batch: Batch, page_size: int) -> Batch:
    """Return a batch for a graph without caches and states: all tokens are one sequence, in unused pages."""
    n = len(batch.ids)
    return Batch(
        ids=batch.ids,
        positions=np.arange(n, dtype=np.int32),
        query_starts=np.array([0, n], np.int32),
        kv_lengths=np.array([n], np.int32),
        block_tables=np.zeros((1, 1, -(-n // page_size)), np.int32),
        outputs=batch.outputs,
        adapters=batch.adapters,
        embedded=batch.embedded,
        embeddings=batch.embeddings,
    )


def offloaded_footprint(
    device: Backend,
    rule: OffloadRule,
    graph: Graph,
    *,
    n_pages: tuple[int, ...],
    max_tokens: int,
    max_outputs: int,
    n_states: int = 0,
    **host_limits: Any,
) -> Footprint:
    """Return the footprint of a graph on a device, with the part on the host as `Footprint.host`.

    Args:
        host_limits: further arguments of the host's ``footprint``.
    """
    sizes = {"max_tokens": max_tokens, "max_outputs": max_outputs}
    graphs, host = offload(graph, rule.is_on_host), rule.host
    if graphs is None:
        return device.footprint(graph, n_pages=n_pages, n_states=n_states, **sizes)
    on_device = device.footprint(graphs.device, n_pages=n_pages, n_states=n_states, **sizes)
    unused_pages = (-(-max_tokens // host.page_size),)
    on_host = host.footprint(graphs.host, n_pages=unused_pages, **sizes, **host_limits)
    on_host = replace(on_host, buffers=on_host.buffers + graphs.exchange_bytes(max_tokens, max_outputs))

    def load(progress: Progress | None) -> Step:
        return OffloadedStep(on_device.load(progress), on_host.load(progress), graphs, rule)

    return replace(on_device, load=load, host=on_host)
