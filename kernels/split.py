"""Pipeline parallelism: a model whose layers are split over several devices, such as GPUs, or CPU and GPU.

The graph is split by layer. Each device compiles its part like any other graph, and batches pass through the parts in
order. Batches of many tokens are split into micro-batches, in the order of their tokens. A step may return before its
output is computed, so the previous device receives the next micro-batch while a device computes. A synchronous device
such as the CPU delays the devices before it, but not the devices after it, so it is placed first. Tokens are computed
independently, so the split does not change the results.

**Pages.** Each device stores the cache of its layers. The size of a page is the least common multiple of the devices'
page sizes. A page corresponds to a run of consecutive pages on each device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from math import lcm
from operator import not_
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import ExpertReadError, GGUFError, KernelError
from localllm.kernels.backend import Backend, Batch, Cache, ExpertReads, Footprint, HostOutput, Output, Step, TopK
from localllm.kernels.graph import Graph, Node, Operation, Rows, Tensor, Value
from localllm.kernels.offload import OffloadRule, offloaded_footprint
from localllm.kernels.operations import Embed, Input, Scale

#: Tokens per micro-batch. According to `tests.benchmarks.gpu.predict`, two GPUs are slower than one with 128, because
#: products then take less time than reading the weights. With 512 they cannot share a prompt of 512 tokens.
MICRO_BATCH = 256
#: The number of tokens is a multiple of this, the largest tile of kernels.
_WHOLE_TILES = 16


@dataclass(frozen=True)
class SplitCache:
    """The caches of all parts, each for the layers of its part."""

    caches: tuple[Cache, ...]
    page_size: int
    n_pages: tuple[int, ...]

    @property
    def windows(self) -> Sequence[int | None]:
        return self.caches[0].windows

    @property
    def n_states(self) -> int:
        return max(cache.n_states for cache in self.caches)

    @property
    def n_bytes(self) -> int:
        return sum(cache.n_bytes for cache in self.caches)

    def copy(self, group: int | None, source: int, target: int) -> None:
        for (cache, source_page), (_, target_page) in zip(
            self._pages_of(group, source), self._pages_of(group, target), strict=True
        ):
            cache.copy(group, source_page, target_page)

    def _pages_of(self, group: int | None, number: int) -> list[tuple[Cache, int]]:
        """Return the parts, each with its pages that form a page of the whole, or with its slot."""
        n_pages = [1 if group is None else self.page_size // cache.page_size for cache in self.caches]
        return [(cache, n * number + i) for cache, n in zip(self.caches, n_pages, strict=True) for i in range(n)]

    def n_bytes_of(self, group: int | None) -> int:
        return sum(cache.n_bytes_of(group) for cache, _ in self._pages_of(group, 0))

    def read(self, group: int | None, number: int) -> bytes:
        return b"".join(cache.read(group, page) for cache, page in self._pages_of(group, number))

    def write(self, group: int | None, number: int, data: bytes) -> None:
        for cache, page in self._pages_of(group, number):
            n = cache.n_bytes_of(group)
            cache.write(group, page, data[:n])
            data = data[n:]


def page_size(backends: Sequence[Backend]) -> int:
    """Return the tokens per page of a cache that is split over these backends."""
    return lcm(*(backend.page_size for backend in backends))


def graph_part(graph: Graph, layers: range) -> Graph:
    """Return the operations of a range of layers. The first layers also embed; the last also have norm and head.

    Later layers that need the embedding again (Gemma 4's E2B) compute it themselves.

    Raises:
        KernelError: more than one tensor with a row per token crosses into the part, or a layer uses the keys and
            values of a layer outside.
    """
    n_layers = graph.n_layers
    if layers == range(n_layers):
        return graph
    subgraph = Graph(graph.cache_type, graph.rounds_floats)
    subgraph.caches = {n: c for n, c in graph.caches.items() if c.layer in layers}
    subgraph.states = {n: s for n, s in graph.states.items() if n in layers}
    subgraph.windows, subgraph.watched = graph.windows, graph.watched
    subgraph.prompt = None if graph.prompt is None else graph_part(graph.prompt, layers)
    ends = {"embedding": layers.start == 0, "output": layers.stop == n_layers}
    inside = [n.layer in layers if isinstance(n.layer, int) else ends[n.layer] for n in graph.nodes]
    subgraph.nodes = [*compress(graph.nodes, inside)]
    for node in subgraph.nodes:
        cache = getattr(node.operation, "cache", None)
        if cache is not None and cache.layer not in layers:
            raise KernelError(
                f"the model cannot be cut between layers {cache.layer} and {node.layer}: the second uses the keys "
                "and values of the first"
            )
    computed = {x for node in subgraph.nodes for x in node.operation.results}
    crossing = {x for node in subgraph.nodes for x in node.operation.inputs} - computed
    operations = [node.operation for node in graph.nodes]
    embeds = [op for op in operations if isinstance(op, Embed) and op.result in crossing]
    if layers.start:
        crossing -= {embed.result for embed in embeds}
        inputs = [x for x in crossing if isinstance(x, Tensor) and x.rows is Rows.TOKENS]
        if len(inputs) != 1 or len(crossing) != 1:
            raise KernelError(f"the model cannot be cut at layer {layers.start}: more than one tensor crosses it")
        first: list[Operation[Any]] = [Input(inputs[0]), *embeds]
        subgraph.nodes[:0] = [Node(operation, layers.start) for operation in first]
    # The next part continues with the last result. Variants may have other operations after it.
    of_embeds = {op.result for op in operations if isinstance(op, Embed)}
    outside = compress(graph.nodes, map(not_, inside))
    read_later = {x for node in outside for x in node.operation.inputs}
    outputs = [x for x in (computed & read_later) - of_embeds if isinstance(x, Tensor)]
    if len(outputs) == 1 and outputs[0] is not subgraph.result:
        subgraph.nodes.append(Node(Scale(outputs[0]), subgraph.nodes[-1].layer))
    return subgraph


def part_footprint(
    backend: Backend,
    layers: range,
    graph: Graph,
    size: int,
    *,
    n_pages: tuple[int, ...],
    max_tokens: int,
    max_outputs: int,
    n_states: int = 0,
    micro_batch: int = MICRO_BATCH,
    offloads: OffloadRule | None = None,
    **more: Any,
) -> Footprint:
    """Return the footprint of a range of layers on a backend. Parts of a graph run in micro-batches.

    Args:
        size: `page_size` of all backends that the graph is split over.
        n_pages: pages of this size.
        micro_batch: maximum number of tokens before a batch is split. Ignored if tokens see later ones.
        offloads: which matrices the host multiplies; see `localllm.kernels.offload`.
        more: further arguments of the backend's ``footprint``; of the host's, with ``offloads``.
    """
    footprint = backend.footprint if offloads is None else partial(offloaded_footprint, backend, offloads)
    return footprint(
        graph_part(graph, layers),
        n_pages=tuple(n * (size // backend.page_size) for n in n_pages),
        max_tokens=max_tokens if len(layers) == graph.n_layers or graph.looks_ahead else min(max_tokens, micro_batch),
        max_outputs=max_outputs,
        n_states=n_states,
        **more,
    )


class SplitStep(Step):
    """The steps of several devices, run in order."""

    cache: SplitCache

    def __init__(
        self,
        steps: tuple[Step, ...],
        graph: Graph,
        size: int,
        *,
        layers: Sequence[range],
        n_pages: tuple[int, ...],
        max_tokens: int,
        max_outputs: int,
        micro_batch: int = MICRO_BATCH,
        watched: Mapping[Value, Step] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            steps: steps of the parts of a graph, in execution order.
            layers: layers of each step.
            watched: the step of each value that can be read.
            size, n_pages, max_tokens, max_outputs, micro_batch: see `part_footprint`.
        """
        self.layers, self._watched = layers, watched
        self.steps, self.micro_batch = steps, max_tokens if graph.looks_ahead else micro_batch
        self.cache = SplitCache(tuple(step.cache for step in steps), size, n_pages)
        self.weights = tuple(weight for step in steps for weight in step.weights)
        self.max_top_k = steps[-1].max_top_k
        self._limits = max_tokens, max_outputs
        self.logits = np.empty((max_outputs, graph.result.width), np.float32)

    @property
    def expert_reads(self) -> ExpertReads | None:
        reads = [step.expert_reads for step in self.steps if step.expert_reads is not None]
        return ExpertReads(*map(sum, zip(*reads, strict=True))) if reads else None

    def run(self, batch: Batch, hidden: Output | None = None) -> Output:
        batch.check_size(*self._limits)
        batch.check(self.cache)
        return _SplitOutput(self, batch, hidden)

    def value(self, x: Value) -> NDArray[Any]:
        return self._watched[x].value(x)

    def variant(self, graph: Graph, max_tokens: int | None = None) -> SplitStep:
        """See `Step.variant`. A variant has no micro-batches, so that each value is in a single array."""
        most = max_tokens or self._limits[0]
        parts = [graph_part(graph, layers) for layers in self.layers]
        steps = tuple(step.variant(part, most) for step, part in zip(self.steps, parts, strict=True))
        return SplitStep(
            steps,
            graph,
            self.cache.page_size,
            layers=self.layers,
            n_pages=self.cache.n_pages,
            max_tokens=most,
            max_outputs=self._limits[1],
            micro_batch=most,
            watched={
                x: step
                for step, part in zip(steps, parts, strict=True)
                for node in part.nodes
                for x in node.operation.results
                if x in graph.watched
            },
        )

    def through(self, steps: Sequence[Step], batch: Batch, hidden: Output | None = None) -> Output:
        """Return the output of ``steps``, run in order, for a batch."""
        for step in steps:
            try:
                hidden = step.run(_in_smaller_pages(batch, self.cache.page_size // step.cache.page_size), hidden)
            except ExpertReadError as error:  # the failed sequences of a micro-batch do not describe the whole batch
                raise GGUFError(str(error)) from error
        if hidden is None:
            raise KernelError("a model split over no devices computes nothing")
        return hidden


@dataclass(frozen=True)
class _SplitOutput(Output):
    """The logits of a batch, which are computed when requested."""

    step: SplitStep
    batch: Batch
    hidden: Output | None

    def rows(self) -> NDArray[np.float32]:
        if len(self.batch.ids) <= self.step.micro_batch:
            return self.step.through(self.step.steps, self.batch, self.hidden).rows()
        logits = self.step.logits[: len(self.batch.outputs)]

        def take(rows: NDArray[np.int64], result: Output) -> None:
            logits[rows] = result.rows()

        self._pipeline(take)
        return logits

    def top_k(self, k: int, whole: Sequence[int] = ()) -> TopK:
        n, full_rows = len(self.batch.outputs), dict[int, NDArray[np.float32]]()
        best = TopK(np.empty((n, k), np.int32), np.empty((n, k), np.float32), full_rows)

        def take(rows: NDArray[np.int64], result: Output) -> None:
            full_indices = np.flatnonzero(np.isin(rows, whole)).tolist()
            top = result.top_k(k, full_indices)
            best.ids[rows], best.logits[rows] = top.ids, top.logits
            full_rows.update((int(rows[i]), top.whole[i].copy()) for i in full_indices)

        self._pipeline(take)
        return best

    def _pipeline(self, take: Callable[[NDArray[np.int64], Output], None]) -> None:
        """Run micro-batches through all steps. ``take`` receives their rows among the outputs, and their output."""
        *first, last = self.step.steps
        pending: tuple[MicroBatch, Output] | None = None
        for micro in micro_batches(self.batch, self.step.micro_batch):
            hidden: Output | None = None if self.hidden is None else HostOutput(self.hidden.rows()[micro.tokens])
            if first:
                hidden = self.step.through(first, micro.batch, hidden)
            # The last step overwrites its previous output, so it is read now. Reading it earlier would only wait.
            _take(pending, take)
            pending = micro, self.step.through([last], micro.batch, hidden)
        _take(pending, take)


def _take(pending: tuple[MicroBatch, Output] | None, take: Callable[[NDArray[np.int64], Output], None]) -> None:
    """Wait for the logits of a micro-batch, if it has any."""
    if pending is not None and len(pending[0].rows):
        take(pending[0].rows, pending[1])


# -- Micro-batches -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch:
    """Consecutive tokens of a batch, as a batch. ``rows`` [N] are the positions of its outputs in the whole batch."""

    batch: Batch
    rows: NDArray[np.int64]
    tokens: slice


def micro_batches(batch: Batch, n_tokens: int) -> list[MicroBatch]:
    """Split a batch into parts of similar size, at most ``n_tokens``, in the order of its tokens.

    If a part ends within a sequence, the next part continues from the cache.
    """
    n = len(batch.ids)
    if n <= n_tokens:
        return [MicroBatch(batch, np.arange(len(batch.outputs)), slice(0, n))]
    even = -(-n // -(-n // n_tokens))
    size = min(n_tokens, -(-even // _WHOLE_TILES) * _WHOLE_TILES)
    return [_tokens(batch, start, min(start + size, n)) for start in range(0, n, size)]


def _tokens(batch: Batch, start: int, stop: int) -> MicroBatch:
    """Return the tokens start : stop as a micro-batch."""
    starts = np.clip(batch.query_starts, start, stop)
    within = np.flatnonzero(np.diff(starts))  # sequences with tokens in the range
    lasts = starts[within + 1] - 1
    rows = np.flatnonzero((batch.outputs >= start) & (batch.outputs < stop))
    embedded = np.flatnonzero((batch.embedded >= start) & (batch.embedded < stop))
    micro = Batch(
        ids=batch.ids[start:stop],
        positions=batch.positions[start:stop],
        query_starts=np.append(starts[within], stop).astype(np.int32) - np.int32(start),
        kv_lengths=batch.positions[lasts] + np.int32(1),
        block_tables=batch.block_tables[:, within],
        states=batch.states[within] if len(batch.states) else batch.states,
        outputs=batch.outputs[rows] - np.int32(start),
        adapters=batch.adapters[start:stop],
        top_k=batch.top_k,
        embedded=batch.embedded[embedded] - np.int32(start),
        embeddings=batch.embeddings[embedded],
        axes=batch.axes[:, start:stop],
        begins=batch.begins[start:stop],
    )
    return MicroBatch(micro, rows, slice(start, stop))


def _in_smaller_pages(batch: Batch, n: int) -> Batch:
    """Return the batch for a cache whose page is one of ``n`` consecutive smaller pages."""
    if n == 1:
        return batch
    tables = batch.block_tables[:, :, :, None] * n + np.arange(n, dtype=np.int32)
    return replace(batch, block_tables=tables.reshape(*tables.shape[:2], -1).astype(np.int32))
