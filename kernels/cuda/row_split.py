"""Several CUDA devices as one: each device computes a part of every layer (`localllm.kernels.shards`).

    device 0   q k v, attention, part of the output ─┐ all wait ┌─ sum of all parts, norm, gate, up, …
    device 1   q k v, attention, part of the output ─┘ for all  └─ sum of all parts, norm, gate, up, …

Each device adds all partial sums itself, in the order of the devices, reading the others' memory.  If it cannot
access this memory, the sums are copied through pinned host memory.  One graph is captured over the streams of all
devices, with the events that order them.

Each device has two buffers for partial sums, used alternately: when all devices have reached the barrier of one sum,
all have read the previous sum, and its buffer can be reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from localllm.kernels import operations as ops
from localllm.kernels.backend import (
    Backend,
    Batch,
    Footprint,
    Output,
    PackedWeight,
    Progress,
    check_cache,
    weights_of,
)
from localllm.kernels.buffers import Address, Buffer
from localllm.kernels.cuda.backend import CUDABackend
from localllm.kernels.cuda.cache import PAGE, CUDACache
from localllm.kernels.cuda.calls import (
    N_OUTPUTS,
    N_TOKENS,
    Cost,
    DeviceRows,
    Extent,
    Inputs,
    KernelCall,
    StepLimits,
    padded,
    runs_of,
)
from localllm.kernels.cuda.driver import CompileProgress, Driver
from localllm.kernels.cuda.lowering import GATE_THREADS, CUDALowered, CUDALowering, columns
from localllm.kernels.cuda.step import CUDAStep, Work, graph_bytes
from localllm.kernels.cuda.weights import CUDAPackedWeights
from localllm.kernels.graph import Graph, LayerTag
from localllm.kernels.shards import AllSum, Gather, shard
from localllm.kernels.split import SplitCache


@dataclass(eq=False)
class Exchange:
    """Buffers of a device that other devices read: two for partial sums, one for logits."""

    sums: tuple[DeviceRows, DeviceRows]
    logits: DeviceRows | None

    @classmethod
    def of(cls, graph: Graph, limits: StepLimits) -> Exchange:
        def new(width: int, slot: int) -> DeviceRows:
            buffer = Buffer(4 * padded(width) * limits.max_rows(slot), is_kept=True)
            return DeviceRows(buffer=buffer, width=width, slot=slot)

        width = max((n.operation.x.width for n in graph.nodes if isinstance(n.operation, AllSum)), default=1)
        gathered = [n.operation.x.width for n in graph.nodes if isinstance(n.operation, Gather)]
        return cls((new(width, N_TOKENS), new(width, N_TOKENS)), new(gathered[0], N_OUTPUTS) if gathered else None)


@dataclass(frozen=True, eq=False)
class Barrier(KernelCall):
    """A point where all devices wait until each has computed its part."""

    device_rows: DeviceRows = field(kw_only=True)  # this device's part
    # by device, buffer for a copy of its part, if this device cannot access its memory
    received: dict[int, Buffer] = field(kw_only=True)


class ShardLowering(CUDALowering):
    """Creates the calls of device number ``device``, which cannot access the memory of ``unreachable`` devices."""

    def __init__(
        self,
        graph: Graph,
        weights: CUDAPackedWeights,
        limits: StepLimits,
        exchanges: Sequence[Exchange],
        device: int,
        unreachable: Sequence[int],
    ) -> None:
        super().__init__(graph, weights, limits)
        self.exchanges, self.device, self.unreachable = exchanges, device, unreachable
        self.n_sums = 0
        self.received: dict[DeviceRows, Buffer] = {}

    def in_place(self, op: ops.Linear | ops.ExpertOutput) -> DeviceRows:
        exchange = self.exchanges[self.device]
        match self.readers[op.result]:
            case [AllSum()]:
                return exchange.sums[self.n_sums % 2]
            case [Gather()] if exchange.logits is not None:
                return exchange.logits
        return super().in_place(op)

    def all_sum(self, op: AllSum) -> DeviceRows:
        sums = self._barrier(
            [exchange.sums[self.n_sums % 2] for exchange in self.exchanges], range(len(self.exchanges))
        )
        self.n_sums += 1
        y = self.like(op.result)
        before: Address | Buffer = sums[0].at(0)
        for device_sum in sums[1:]:
            self._add_row("all-reduce", device_sum, y, before, y)
            before = y.buffer
        return y

    def gather(self, op: Gather) -> DeviceRows:
        logits = [exchange.logits for exchange in self.exchanges if exchange.logits is not None]
        buffers = self._barrier(logits, range(len(logits)) if self.device == 0 else ())
        if self.device:
            return logits[self.device]
        y = self.like(op.result)
        for buffer, rows, begin in zip(buffers, logits, op.cuts, strict=False):
            self._add_row("gather logits", buffer, rows, None, y, begin)
        return y

    def _add_row(
        self, name: str, x: Buffer, like: DeviceRows, residual: Address | Buffer | None, y: DeviceRows, begin: int = 0
    ) -> None:
        """Add rows at x, in the layout of ``like``, to a residual, and write y from column ``begin`` on."""
        self.elementwise(
            name, "add", y, columns(like), GATE_THREADS,
            # x can be in another device's memory.  As an address, it gets no place in this device's arena.
            x=x.at(0),
            x_stride=like.stride, n=like.width, factor=1.0, weight=None, gate=None, residual=residual,
            y=y.buffer.at(4 * begin), y_stride=y.stride, operands=[y],
        )  # fmt: skip

    def choose(self, logits: DeviceRows) -> tuple[Buffer, Buffer] | None:
        return super().choose(logits) if self.device == 0 else None

    def _barrier(self, rows_by_device: Sequence[DeviceRows], read: Sequence[int]) -> list[Buffer]:
        """Add a barrier, and return the buffers with the parts that this device reads."""
        received = {i: self._copy_of(rows_by_device[i]) for i in self.unreachable if i in read}
        device_rows = rows_by_device[self.device]
        operands: list[DeviceRows | Inputs | Buffer] = [device_rows, *received.values()]
        read_rows = [rows_by_device[i] for i in read if i != self.device]
        cost = lambda sizes: Cost(sum(rows.bytes_of(sizes.rows(device_rows.slot)) for rows in read_rows))  # noqa: E731
        self.calls.append(
            Barrier("barrier", lambda extent: (), operands, cost, device_rows=device_rows, received=received)
        )
        return [received.get(i, rows.buffer) for i, rows in enumerate(rows_by_device)]

    def _copy_of(self, rows: DeviceRows) -> Buffer:
        return self.received.setdefault(rows, Buffer(rows.buffer.n_bytes, is_kept=True))


class RowSplitStep(CUDAStep):
    """The step of the first device, which also runs the steps of the other devices, its followers."""

    #: The other devices would need the chosen ids.
    chooses_ahead = False

    def __init__(
        self,
        lowered: Sequence[CUDALowered],
        first: tuple[Driver, int, object],
        followers: Sequence[CUDAStep],
        weights: tuple[PackedWeight, ...],
    ) -> None:
        driver, device, keep = first
        super().__init__(driver, device, lowered[0], weights, (keep, *followers))
        self.followers, self.steps = tuple(followers), (self, *followers)
        caches = tuple(step.limits.cache for step in self.steps)
        self.cache = SplitCache(caches, PAGE, caches[0].n_pages)
        self._fork, *self._joins = (driver.event(step.device) for step in self.steps)
        self._computed = [driver.event(step.device) for step in self.steps]
        self._copied = [driver.event(step.device) for step in self.steps]
        self._staging_of: dict[DeviceRows, Any] = {}
        for step in self.steps:
            for peer in self.steps:
                if peer is not step:
                    if driver.can_access_peer(step.device, peer.device):
                        driver.enable_peer_access(step.device, peer.device)
                    barriers = (call for call in peer.calls if isinstance(call, Barrier))
                    step.reached |= {barrier.device_rows.buffer: peer.arena for barrier in barriers}

    def begin(self, batch: Batch, hidden: Output | None) -> tuple[Extent, ...]:
        follower_extents = [extent for step in self.followers for extent in step.begin(batch, hidden)]
        extents = super().begin(batch, hidden)
        for step, event in zip(self.followers, self._joins, strict=True):
            self.driver.record(event, step.stream)
            self.driver.wait(self.stream, event)
        return (*extents, *follower_extents)

    def compile_kernels(self, progress: CompileProgress | None) -> None:
        super().compile_kernels(progress)
        for step in self.followers:
            step.compile_kernels(progress)

    def loaded(self, calls: Sequence[KernelCall], *extents: Extent) -> list[Work]:
        """Return the work of all devices, and its synchronisation; ``calls`` are all calls of this device."""
        record, wait = self.driver.record, self.driver.wait
        work: list[Work] = [partial(record, self._fork, self.stream)]
        work += [partial(wait, step.stream, self._fork) for step in self.followers]
        for at_once in zip(*(runs_of(step.calls, Barrier) for step in self.steps), strict=True):
            if at_once[0][0]:
                work += self._synchronize([barrier for _, [barrier] in at_once], extents[0])
                continue
            for step, extent, (_, run) in zip(self.steps, extents, at_once, strict=True):
                work += CUDAStep.loaded(step, run, extent)
        for step, event in zip(self.followers, self._joins, strict=True):
            work += [partial(record, event, step.stream), partial(wait, self.stream, event)]
        return work

    def _synchronize(self, barriers: Sequence[Barrier], extent: Extent) -> Iterator[Work]:
        """Make each device wait for the parts that it reads, and copy parts that it cannot access."""
        driver = self.driver
        for i, (step, barrier) in enumerate(zip(self.steps, barriers, strict=True)):
            rows = barrier.device_rows
            if any(i in reader.received for reader in barriers):
                if rows not in self._staging_of:
                    self._staging_of[rows] = step.pinned(rows.buffer.n_bytes)
                host = self._staged(rows, extent)
                yield partial(driver.download, host, step.memory(rows.buffer, host.nbytes), step.stream)
            yield partial(driver.record, self._computed[i], step.stream)
        for step, barrier in zip(self.steps, barriers, strict=True):
            for i, event in enumerate(self._computed):
                if self.steps[i] is not step:
                    yield partial(driver.wait, step.stream, event)
            for i, buffer in barrier.received.items():
                host = self._staged(barriers[i].device_rows, extent)
                yield partial(driver.upload, step.memory(buffer, host.nbytes), host, step.stream)

    def _staged(self, rows: DeviceRows, extent: Extent) -> Any:
        """Return host memory for a part: its rows, rounded up by the extent."""
        return self._staging_of[rows][: min(rows.buffer.n_bytes, 4 * rows.stride * extent.rows(rows.slot))]


class RowSplitBackend(Backend):
    """Several CUDA devices of one driver as one, up to 8.

    Memory is counted once per device, using the maximum of all devices.
    """

    name = "cuda"
    page_size = PAGE
    step_tokens = CUDABackend.step_tokens

    def __init__(self, backends: Sequence[CUDABackend]) -> None:
        self.backends = tuple(backends)

    def footprint(
        self, graph: Graph, *, n_pages: tuple[int, ...], max_tokens: int, max_outputs: int, n_states: int = 0
    ) -> Footprint:
        check_cache(graph, n_pages, n_states)
        graphs = shard(graph, len(self.backends))
        weights = [CUDAPackedWeights(backend.loader) for backend in self.backends]
        caches = [CUDACache(shard_graph, n_pages, n_states) for shard_graph in graphs]
        uses = [weights_of(shard_graph) for shard_graph in graphs]
        reaches, devices = self.backends[0].driver.can_access_peer, [backend.device for backend in self.backends]
        unreachable = [[i for i, b in enumerate(devices) if a != b and not reaches(a, b)] for a in devices]

        def lower() -> list[CUDALowered]:
            shards = list(zip(self.backends, graphs, caches, strict=True))
            limits = [
                backend.limits(shard_graph, cache, max_tokens, max_outputs) for backend, shard_graph, cache in shards
            ]
            exchanges = [Exchange.of(*both) for both in zip(graphs, limits, strict=True)]
            makers = zip(graphs, weights, limits, unreachable, strict=True)
            return [ShardLowering(a, b, c, exchanges, i, d).lower() for i, (a, b, c, d) in enumerate(makers)]

        def load(progress: Progress | None) -> CUDAStep:
            packed = []
            for backend, packer, cache, device_uses in zip(self.backends, weights, caches, uses, strict=True):
                # Weights are reported once, with their size in the file.
                report = progress if backend is self.backends[0] else None
                packed.append([packer.load(use, report) for use in device_uses])
                backend.loader.close()
                cache.allocate(backend.driver, backend.device)
            lowered = lower()
            first, *further = zip(self.backends, lowered, packed, weights, strict=True)
            followers = [CUDAStep(b.driver, b.device, low, tuple(ps), keep) for b, low, ps, keep in further]
            backend, _, _, keep = first
            step = RowSplitStep(lowered, (backend.driver, backend.device, keep), followers, _together(packed))
            if backend.compiles_ahead:
                step.compile_kernels(backend.progress)
            return step

        planned = [
            [packer.planned(use) for use in device_uses] for packer, device_uses in zip(weights, uses, strict=True)
        ]
        buffers = [lowered.arena_bytes + graph_bytes(lowered) for lowered in lower()]
        fixed = [
            sum(w.n_bytes for w in ws) + sum(c.layer_bytes().values()) for ws, c in zip(planned, caches, strict=True)
        ]
        together = _together(planned)
        cache_bytes = {
            layer: sum(cache.layer_bytes()[layer] for cache in caches) for layer in caches[0].layer_bytes()
        }
        most = max(a + b for a, b in zip(fixed, buffers, strict=True))
        return Footprint(together, cache_bytes, most * len(self.backends) - sum(fixed), load)

    def close(self) -> None:
        for backend in self.backends:
            backend.close()


def _together(devices: Sequence[Sequence[PackedWeight]]) -> tuple[PackedWeight, ...]:
    """Return the weights of all devices, each once, with the bytes of all its parts."""
    merged: dict[tuple[str, LayerTag], PackedWeight] = {}
    for weight in (weight for weights in devices for weight in weights):
        before = merged.get((weight.name, weight.layer))
        merged[weight.name, weight.layer] = (
            weight if before is None else replace(before, n_bytes=before.n_bytes + weight.n_bytes)
        )
    return tuple(merged.values())
