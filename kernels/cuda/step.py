"""A step on a CUDA device: one upload per batch, then graphs or single launches.

Each batch has an extent, and the launches for an extent serve all batches with this extent.  They are launched one by
one for the first batch, and captured in a graph for the second batch.  Later batches replay the graph, so that no
Python code runs per layer.  Batches of few tokens share extents: one per bucket and, approximately,
per power of two of the length in the cache.  Larger batches that fill a step or a micro-batch usually have the same
extent.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError, LocalLLMError
from localllm.kernels.backend import Batch, Cache, Output, PackedWeight, Step, TopK, input_rows
from localllm.kernels.buffers import Address, Buffer
from localllm.kernels.cuda.attention import work_of_batch, work_of_bucket
from localllm.kernels.cuda.cache import PAGE
from localllm.kernels.cuda.calls import (
    BUCKETS,
    N_OUTPUTS,
    N_TOKENS,
    DeviceRows,
    EditCall,
    Extent,
    HostCall,
    KernelCall,
    ReceiveCall,
    SendCall,
    StepLimits,
    phases,
    runs_of,
)
from localllm.kernels.cuda.driver import CompileProgress, Defines, DeviceMemory, Driver, Event, Graph, Launch, Stream
from localllm.kernels.cuda.lowering import MAX_TOP_K, CUDALowered
from localllm.kernels.embedding import NgramRows
from localllm.kernels.graph import Graph as ModelGraph, Routing, Value
from localllm.kernels.offload import HostBlocks
from localllm.kernels.operations import NgramEmbed

#: Maximum cache length of the first extent of a small batch; each further extent doubles it.
SHORTEST = 1024
#: Maximum batches in flight to the device.
_IN_FLIGHT = 4
#: Maximum extents whose launches are stored for capturing, and maximum graphs; the least recently used are dropped.
_MAX_LAUNCHES, _MAX_GRAPHS = 16, 16
#: Device memory of a kernel in a graph, for the plan: 1,000 more took 63 MB (driver 470; "Increasing memory footprint
#: with large task graphs", NVIDIA's forums, 2023).  The section ceilings of `tests.benchmarks.gpu` measures it.
NODE_BYTES = 64 << 10
#: Tokens and outputs of larger batches are rounded up to a multiple of this, so that their launches are reused.
_STEP = 8
#: Supported numbers of largest logits; other numbers are rounded up.
_TOP_K = (1, 64, 256, MAX_TOP_K)
#: Larger batches, outside the buckets, whose kernels are compiled ahead.
_LARGE = (24, 40, 512)


#: Work for a stream, such as a launch whose module is loaded.
Work = partial[None]


@dataclass(eq=False)
class _Slot:
    """Pinned memory for a batch and its hidden states and embeddings, and the event of their upload."""

    words: NDArray[np.int32]
    event: Event
    rows: NDArray[np.uint8] | None = None
    embeddings: dict[Buffer, NDArray[np.uint8]] = field(default_factory=dict)


@dataclass(eq=False)
class _Largest:
    """Pinned memory for ids and logits, int32 [2, rows, k], and for chosen ids, and the event of their download."""

    event: Event
    numbers: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    chosen_ids: NDArray[np.int32] | None = None


class Watch(Protocol):
    """Runs steps instead of the step itself, to observe them; see `localllm.kernels.cuda.profile`."""

    def run(self, step: CUDAStep, batch: Batch, extent: Extent) -> None:
        """Compute a batch with `CUDAStep.launch`.  Called when the upload of the batch was submitted."""


#: Observers of this process's steps; only the last one is active.
WATCHES: list[Watch] = []


class CUDAStep(Step):
    """The calls of a graph on a device, with the weights (kept alive by ``keep``) and the cache that they use."""

    #: Steps of other devices that run together with this one: see `localllm.kernels.cuda.row_split`.
    followers: tuple[CUDAStep, ...] = ()

    def __init__(
        self,
        driver: Driver,
        device: int,
        lowered: CUDALowered,
        weights: tuple[PackedWeight, ...],
        keep: object,
        lower: Callable[[ModelGraph, int | None], CUDALowered] | None = None,
        ngrams: Mapping[NgramEmbed, NgramRows] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            lower: returns the calls of another graph with the same weights and cache, and the maximum number of
                tokens, by default the same.
            ngrams: opened tables of n-grams; other tables are opened.
        """
        self.driver, self.device = driver, device
        self._lower, self._keep, self._watched = lower, keep, lowered.watched
        self.weights, self.limits = weights, lowered.limits
        self.cache: Cache = lowered.limits.cache
        self.stream = lowered.limits.cache.stream  # copies of pages are ordered after the steps that fill the pages
        self.calls, self.result, self.hidden = lowered.calls, lowered.result, lowered.hidden
        #: Kernels between the points where the host acts, and these points.
        self._parts = [calls for is_host, calls in runs_of(self.calls, HostCall) if not is_host]
        self._host_calls = [call for call in self.calls if isinstance(call, HostCall)]
        #: Computes the host's part of the graph.
        self.host: HostBlocks | None = None
        self._largest, self._tables, self._embeddings = lowered.largest, lowered.tables, lowered.embeddings
        self._ngrams = [(ngrams.get(op) or NgramRows(op), into) for op, into in lowered.ngrams]
        self.max_top_k = 0 if lowered.largest is None else min(MAX_TOP_K, lowered.result.width)
        self._sent = np.zeros((0, 0, 0), np.int32)  # block tables of the last run
        self._n_rows = {N_TOKENS: 0, N_OUTPUTS: 0}  # rows of the last run
        self._n_chosen = 0  # rows of the last run, whose ids the next run may use
        self.arena = driver.allocate(device, lowered.arena_bytes)
        #: Arenas of other devices, by the buffers in them.
        self.reached: dict[Buffer, DeviceMemory] = {}
        # Padding of rows is read, and must be defined.
        driver.fill(self.arena, 0, self.stream)
        for rope, buffer in self.limits.ropes:
            axes = np.array(rope.axes, np.int32)
            values = np.concatenate([phases(rope.frequencies).view(np.uint8), axes.view(np.uint8)])
            driver.upload(self.memory(buffer), values, self.stream)
            driver.synchronize(self.stream)  # the values must not be freed before
        #: By the extents of this step and its followers.
        self._graphs: OrderedDict[tuple[Extent, ...], list[Graph | None]] = OrderedDict()
        self._launches: OrderedDict[tuple[Extent, ...], list[list[Work]]] = OrderedDict()
        #: Host memory of pending copies.
        self._host_memory: list[NDArray[np.uint8]] = []
        self._slots = [_Slot(self._words(1), self._event()) for _ in range(_IN_FLIGHT)]
        self._done, self._sent_rows = self._event(), self._event()
        #: Rows that the device sends to the host, and rows that the host sends back, float32.
        self._exchanged: list[NDArray[np.uint8]] = []
        #: Events of other devices that still read the result of the last run.
        self._readers: list[Event] = []
        self._host_rows: NDArray[np.float32] | None = None
        #: Used alternately for chosen ids: one is read during the download of the next.
        self._host_largest = [_Largest(self._event()) for _ in range(2)]
        self._staging: NDArray[np.uint8] | None = None
        # The step can be garbage while work is in flight: its memory is freed after this work.
        resources = (self.arena, lowered.limits.cache.memory, self._host_memory, (*self._slots,), keep)
        weakref.finalize(self, _settle, driver, self.stream, self._readers, resources).atexit = False

    def memory(self, start: Buffer | Address, n_bytes: int | None = None) -> DeviceMemory:
        """Return the memory of a buffer from ``start`` on: ``n_bytes``, or up to its end."""
        buffer, begin = (start, 0) if isinstance(start, Buffer) else (start.buffer, start.n_bytes)
        arena = self.reached.get(buffer, self.arena)
        return arena.at(buffer.offset + begin, buffer.n_bytes - begin if n_bytes is None else n_bytes)

    def rows(self, stored: DeviceRows, n: int) -> DeviceMemory:
        """Return the first ``n`` rows, with their padding."""
        return self.memory(stored.buffer, 4 * n * stored.stride)

    def _words(self, n_sequences: int) -> NDArray[np.int32]:
        """Return pinned memory for batches of ``n_sequences`` sequences.

        It grows on demand, because most batches contain a single sequence: with a large cache, tables for the maximum
        number of sequences would take hundreds of megabytes.
        """
        words = self.driver.pinned(4 * self.limits.batch.words_of(n_sequences)).view(np.int32)
        words[:] = 0
        return words

    def _event(self) -> Event:
        return self.driver.event(self.device)

    def pinned(self, n_bytes: int) -> NDArray[np.uint8]:
        """Return host memory that is freed with the step."""
        self._host_memory.append(self.driver.pinned(n_bytes))
        return self._host_memory[-1]

    # -- Running ---------------------------------------------------------------------------------------------------

    def run(self, batch: Batch, hidden: Output | None = None) -> CUDAOutput:
        """Run a batch; return before the device has finished."""
        driver = self.driver
        extent, *follower_extents = self.begin(batch, hidden)
        if batch.top_k and self.max_top_k:
            most = next(k for k in _TOP_K if batch.top_k <= k)
            extent = replace(extent, top_k=min(most, self.result.width))
        self._n_rows = {N_TOKENS: len(batch.ids), N_OUTPUTS: len(batch.outputs)}
        if WATCHES and not follower_extents and not self._host_calls:
            WATCHES[-1].run(self, batch, extent)
        else:
            self.launch(extent, *follower_extents, batch=batch)
        driver.record(self._done, self.stream)
        for follower in self.followers:
            driver.wait(follower.stream, self._done)
        n = len(batch.ids) if self.result.slot == N_TOKENS else len(batch.outputs)
        self._n_chosen = n if extent.top_k else 0
        return CUDAOutput(self, n, self._download_largest(n, extent.top_k) if extent.top_k else None)

    def begin(self, batch: Batch, hidden: Output | None) -> tuple[Extent, ...]:
        """Upload a batch; return the extents of this step and its followers."""
        limits, driver = self.limits, self.driver
        batch.check_size(limits.max_tokens, limits.max_outputs)
        batch.check(self.cache, limits.n_joined)
        for n_rows, by_position in self._tables:
            batch.rows_of(n_rows, by_position=by_position)
        if batch.top_k > self.max_top_k > 0:
            raise KernelError(
                f"{batch.top_k} of {self.result.width} logits cannot be chosen: 1 to {self.max_top_k} can"
            )
        if batch.n_chosen > self._n_chosen:
            raise KernelError(f"a batch continues with {batch.n_chosen} ids, but {self._n_chosen} were chosen")
        slot = self._slots[0]
        self._slots = [*self._slots[1:], slot]
        driver.synchronize(slot.event)
        n_sequences, layout = len(batch.kv_lengths), limits.batch
        if len(slot.words) < layout.words_of(n_sequences):
            slot.words = self._words(min(2 * n_sequences, limits.max_tokens))
        uploads = layout.fill(slot.words, batch, self._sent)
        self._sent = batch.block_tables.copy()
        for event in self._readers:
            driver.wait(self.stream, event)
        self._readers.clear()
        for words in uploads:
            memory = self.memory(layout.buffer.at(4 * words.start), 4 * (words.stop - words.start))
            driver.upload(memory, slot.words[words], self.stream)
        self._receive(hidden, len(batch.ids), slot)
        if len(batch.embedded):
            for index, into in self._embeddings.items():
                self._upload_rows(batch.embeddings_of(index, into.width), into, slot)
        for ngrams, into in self._ngrams:
            self._upload_rows(ngrams.rows(batch, limits.cache.host_states[ngrams.op.state]), into, slot)
        driver.record(slot.event, self.stream)
        return (replace(extent_of(self.limits, batch), has_embedded=len(batch.embedded) > 0),)

    @property
    def chooses_ahead(self) -> bool:
        n_ids = min((n for n, by_position in self._tables if not by_position), default=0)
        # An observer runs a batch several times, and would choose different ids each time.  The host does not know
        # the n-grams of ids that are chosen on the device.  If it computes a part of the step, it waits for the
        # device, and the results of the previous step would be late.
        has_host = bool(self._ngrams or self._host_calls)
        return self.max_top_k > 0 and n_ids >= self.result.width and not WATCHES and not has_host

    def _receive(self, hidden: Output | None, n_tokens: int, slot: _Slot) -> None:
        """Copy hidden states to the inputs of the calls, if the graph has such inputs."""
        begin = 0
        for op, into in self.hidden:
            memory = self.rows(into, n_tokens)
            if isinstance(hidden, CUDAOutput) and (hidden.n, hidden.width) == (n_tokens, into.width):
                hidden.copy_to(memory, self.stream)
                continue
            if slot.rows is None:
                row_bytes = sum(4 * stored.stride for _, stored in self.hidden)
                slot.rows = self.pinned(self.limits.max_tokens * row_bytes)
            rows = slot.rows[begin : begin + memory.n_bytes]
            matrix = rows.view(np.float32).reshape(n_tokens, into.stride)
            matrix[:, : into.width] = input_rows(hidden, n_tokens, op)
            matrix[:, into.width :] = 0
            self.driver.upload(memory, rows, self.stream)
            begin += memory.n_bytes

    def _upload_rows(self, values: NDArray[np.float32], into: DeviceRows, slot: _Slot) -> None:
        """Copy rows to the buffer that calls read."""
        if into.buffer not in slot.embeddings:
            slot.embeddings[into.buffer] = self.pinned(4 * self.limits.max_tokens * into.stride)
        memory = self.rows(into, len(values))
        rows = slot.embeddings[into.buffer][: memory.n_bytes]
        matrix = rows.view(np.float32).reshape(-1, into.stride)
        matrix[:, : into.width], matrix[:, into.width :] = values, 0
        self.driver.upload(memory, rows, self.stream)

    def launch(self, *extents: Extent, batch: Batch | None = None) -> None:
        """Compute the uploaded batch with this extent, and the batches of the followers with theirs.

        Between two parts of the kernels, the host edits rows, or computes a block of its graph.
        """
        if extents not in self._graphs and extents not in self._launches:
            loaded = [self.loaded(calls, *extents) if calls else [] for calls in self._parts]
            self._run_parts([partial(self._launch, launches) for launches in loaded], batch)
            self._launches[extents] = loaded
            if len(self._launches) > _MAX_LAUNCHES:
                self._launches.popitem(last=False)
            return
        if extents not in self._graphs:
            parts = self._launches.pop(extents)
            self._graphs[extents] = [self._captured(launches) if launches else None for launches in parts]
            if len(self._graphs) > _MAX_GRAPHS:
                self.driver.synchronize(self.stream)  # the graphs to be dropped may be running
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(extents)
        replays = [partial(self._replay, graph) for graph in self._graphs[extents]]
        self._run_parts(replays, batch)

    def _replay(self, graph: Graph | None) -> None:
        if graph is not None:
            self.driver.replay(graph, self.stream)

    def _run_parts(self, parts: Sequence[Callable[[], None]], batch: Batch | None) -> None:
        """Run the parts of the kernels, and let the host act between them."""
        first, *further = parts
        first()
        for call, part in zip(self._host_calls, further, strict=True):
            match call:
                case EditCall():
                    self._edit(call, batch)
                case SendCall():
                    self._send(call)
                case ReceiveCall():
                    self._receive_block(call)
            part()

    def _edit(self, call: EditCall, batch: Batch | None) -> None:
        """Let the host change rows."""
        if batch is None or batch.edit is None or not (n := self._n_rows[call.rows.slot]):
            return
        rows, width = self._read(call.rows, n), call.rows.width
        base = None if call.base is None else self._read(call.base, n)[:, :width]
        batch.edit(call.value_name, rows[:, :width], base)
        self.driver.upload(self.rows(call.rows, n), rows, self.stream)
        self.driver.synchronize(self.stream)  # the rows must not be freed before

    def _send(self, call: SendCall) -> None:
        """Copy rows to the host."""
        for rows, stored in self._exchange(call):
            if len(rows):
                self.driver.download(rows, self.rows(stored, len(rows)), self.stream)
        self.driver.record(self._sent_rows, self.stream)

    def _receive_block(self, call: ReceiveCall) -> None:
        """Wait for the rows of a block, compute it on the host, and copy the results to the device."""
        assert self.host is not None
        send = next(c for c in self._host_calls if isinstance(c, SendCall) and c.number == call.number)
        self.driver.synchronize(self._sent_rows)  # also the uploads of the previous block
        inputs = [rows[:, : stored.width] for rows, stored in self._exchange(send)]
        results = self.host.compute(call.number, inputs)
        for result, (rows, stored) in zip(results, self._exchange(call), strict=True):
            if len(rows):
                rows[:, : stored.width], rows[:, stored.width :] = result, 0
                self.driver.upload(self.rows(stored, len(rows)), rows, self.stream)

    def _exchange(self, call: SendCall | ReceiveCall) -> list[tuple[NDArray[np.float32], DeviceRows]]:
        """Return the pinned memory of the rows of a call [n, stride], which all blocks share."""
        if not self._exchanged:
            for kind in (SendCall, ReceiveCall):
                calls = (c for c in self._host_calls if isinstance(c, kind))
                sizes = (sum(4 * rows.stride * self.limits.max_rows(rows.slot) for rows in c.rows) for c in calls)
                self._exchanged.append(self.pinned(max(4, *sizes)))
        memory, found, begin = self._exchanged[isinstance(call, ReceiveCall)].view(np.float32), [], 0
        for stored in call.rows:
            n, stop = self._n_rows[stored.slot], begin + self._n_rows[stored.slot] * stored.stride
            found.append((memory[begin:stop].reshape(n, stored.stride), stored))
            begin = stop
        return found

    def _read(self, stored: DeviceRows, n: int) -> NDArray[np.float32]:
        """Wait, and return the first ``n`` rows with their padding."""
        rows = np.empty((n, stored.stride), np.float32)
        if n:
            self.driver.download(rows, self.rows(stored, n), self.stream)
            self.driver.synchronize(self.stream)
        return rows

    def value(self, x: Value) -> NDArray[Any]:
        stored = self._watched[x]
        if isinstance(stored, DeviceRows):
            return self._read(stored, self._n_rows[stored.slot])[:, : stored.width]
        assert isinstance(x, Routing)
        ids = np.empty((self._n_rows[N_TOKENS], x.k), np.int32)
        self.driver.download(ids, self.memory(stored, ids.nbytes), self.stream)
        self.driver.synchronize(self.stream)
        return ids

    def variant(self, graph: ModelGraph, max_tokens: int | None = None) -> CUDAStep:
        if self._lower is None:
            return super().variant(graph)  # type: ignore[return-value]  # raises an error
        lowered, ngrams = self._lower(graph, max_tokens), {rows.op: rows for rows, _ in self._ngrams}
        return CUDAStep(self.driver, self.device, lowered, self.weights, self._keep, self._lower, ngrams)

    def graph(self, calls: Sequence[KernelCall], extent: Extent) -> Graph:
        """Return a graph of some of the calls, for an extent."""
        return self._captured(self.loaded(calls, extent))

    # -- Launching -------------------------------------------------------------------------------------------------

    def compile_kernels(self, progress: CompileProgress | None) -> None:
        """Compile the kernels for batches of all sizes, so that no batch waits for compilation."""
        limits, modules = self.limits, dict[str, tuple[str, Defines]]()
        longest = min(SHORTEST, max(1, self.cache.n_pages[0]) * PAGE)
        extents = [_bucket_extent(limits, bucket, longest) for bucket in BUCKETS if bucket <= 2 * limits.max_tokens]
        if first := extents[0]:
            large = [n for n in _LARGE if n <= limits.max_tokens]
            extents += [limits.extent(n, min(n, limits.max_outputs), first.attention) for n in large]
        for extent in extents:
            if extent is not None:
                for launch in _launches(self.calls, extent):
                    modules[f"{launch.module} {sorted(launch.defines.items())}"] = launch.module, launch.defines
        self.driver.compile_modules(self.device, modules.values(), progress)

    def loaded(self, calls: Sequence[KernelCall], *extents: Extent) -> list[Work]:
        """Return the launches of calls, with their modules and the memory of their buffers."""
        return [self._load(launch) for launch in _launches(calls, extents[0])]

    def _load(self, launch: Launch) -> Work:
        arguments = [self.memory(a) if isinstance(a, Buffer | Address) else a for a in launch.arguments]
        module = self.driver.load_module(self.device, launch.module, launch.defines)
        shape = launch.kernel, launch.grid, launch.block
        return partial(self.driver.launch, module, *shape, arguments, self.stream, launch.shared_bytes)

    def _launch(self, work: Sequence[Work]) -> None:
        for launch in work:
            launch()

    def _captured(self, launches: Sequence[Work]) -> Graph:
        self.driver.begin_capture(self.stream)
        try:
            self._launch(launches)
        except BaseException:
            with contextlib.suppress(LocalLLMError):  # the first error is the cause
                self.driver.end_capture(self.stream)
            raise
        return self.driver.end_capture(self.stream)

    # -- The result ------------------------------------------------------------------------------------------------

    def download(self, *row_ranges: range) -> NDArray[np.float32]:
        """Wait, and return the result in memory of the step; only the rows of ``row_ranges`` are valid."""
        rows = self.result
        if self._host_rows is None:
            n_rows = self.limits.max_rows(rows.slot)
            self._host_rows = self.pinned(4 * n_rows * rows.stride).view(np.float32).reshape(n_rows, rows.stride)
        for row_range in filter(None, row_ranges):
            source = self.memory(rows.buffer.at(4 * row_range.start * rows.stride), 4 * len(row_range) * rows.stride)
            self.driver.download(self._host_rows[row_range.start : row_range.stop], source, self.stream)
        self.driver.synchronize(self.stream)
        return self._host_rows[:, : rows.width]

    def _download_largest(self, n: int, k: int) -> _Largest:
        """Submit the download of the ``k`` largest of the first ``n`` rows of the result."""
        assert self._largest is not None
        largest = self._host_largest[0]
        self._host_largest.reverse()
        self.driver.synchronize(largest.event)  # an earlier result may be unread
        size = 2 * n * k + (n if k > 1 else 0)
        if len(largest.numbers) < size:
            largest.numbers = self.pinned(4 * self.limits.max_outputs * (2 * k + 1)).view(np.int32)
        if n:
            self.driver.download(largest.numbers[:size], self.memory(self._largest[k > 1], 4 * size), self.stream)
        self.driver.record(largest.event, self.stream)
        numbers = largest.numbers[: 2 * n * k].reshape(2, n, k)
        return _Largest(largest.event, numbers, largest.numbers[2 * n * k : size] if k > 1 else numbers[0, :, 0])

    def send(self, n: int, to: DeviceMemory, stream: Stream) -> None:
        """Copy the first ``n`` rows of the result to another device, in ``stream`` of that device."""
        driver, device = self.driver, self.device
        source = self.memory(self.result.buffer, to.n_bytes)
        if to.device == device or driver.can_access_peer(to.device, device):
            if to.device != device:
                driver.enable_peer_access(to.device, device)
            driver.wait(stream, self._done)
            driver.copy(to, source, stream)
        else:
            if self._staging is None:
                self._staging = self.pinned(4 * self.limits.max_rows(self.result.slot) * self.result.stride)
            driver.download(self._staging[: to.n_bytes], source, self.stream)
            driver.record(self._done, self.stream)
            driver.wait(stream, self._done)
            driver.upload(to, self._staging[: to.n_bytes], stream)
        read = driver.event(to.device)
        driver.record(read, stream)
        self._readers.append(read)


def _launches(calls: Sequence[KernelCall], extent: Extent) -> list[Launch]:
    return [launch for call in calls for launch in call.launches(extent)]


def graph_bytes(lowered: CUDALowered | CUDAStep) -> int:
    """Return the device memory of the maximum number of graphs, for one token (prompts have more nodes)."""
    work = tuple((kind, work_of_bucket(1, 1, kind.heads)) for kind in lowered.limits.kinds)
    return _MAX_GRAPHS * NODE_BYTES * len(_launches(lowered.calls, lowered.limits.extent(1, 1, work)))


def extent_of(limits: StepLimits, batch: Batch) -> Extent:
    """Return the maximum sizes of a batch's launches, from its bucket if the batch fits one."""
    n = max(len(batch.ids), len(batch.outputs))
    if (bucket := next((b for b in BUCKETS if n <= b), None)) is not None:
        longest, most = SHORTEST, max(1, limits.cache.n_pages[0]) * PAGE
        while longest < int(batch.kv_lengths.max()):
            longest *= 2
        if (extent := _bucket_extent(limits, bucket, min(longest, most))) is not None:
            return extent
    # A batch with many tokens, or with a long cache.
    sequences = [(stop - start, length) for start, stop, length in batch.sequences()]
    work = tuple(
        (kind, work_of_batch(sequences, kind.heads, kind.variant, limits.usable_partial_bytes))
        for kind in limits.kinds
    )
    return limits.extent(_rounded(len(batch.ids)), _rounded(len(batch.outputs)), work)


def _bucket_extent(limits: StepLimits, bucket: int, longest: int) -> Extent | None:
    work = limits.bucket_work(bucket, longest)
    if work is None:
        return None
    return limits.extent(min(bucket, limits.max_tokens), min(bucket, limits.max_outputs), work)


def _rounded(n: int) -> int:
    return -(-n // _STEP) * _STEP if n > _STEP else n


def _settle(driver: Driver, stream: Stream, readers: Sequence[Event], resources: object) -> None:
    """Wait for work that uses memory which will be freed."""
    for work in (stream, *readers):
        with contextlib.suppress(LocalLLMError):
            driver.synchronize(work)


@dataclass(frozen=True, eq=False)
class CUDAOutput(Output):
    """The first ``n`` rows of a step's result, in device memory; the computation may be unfinished."""

    step: CUDAStep
    n: int
    largest: _Largest | None

    @property
    def width(self) -> int:
        return self.step.result.width

    def rows(self) -> NDArray[np.float32]:
        return self.step.download(range(self.n))[: self.n]

    def top_k(self, k: int, whole: Sequence[int] = ()) -> TopK:
        largest = self.largest
        if largest is None or not 1 <= k <= largest.numbers.shape[2]:
            most = self.step.max_top_k if largest is None else largest.numbers.shape[2]
            raise KernelError(f"{k} of {self.width} logits cannot be chosen: 1 to {most} can")
        self.step.driver.synchronize(largest.event)
        ids, logits = largest.numbers[:, :, :k]
        best = TopK(ids, logits.view(np.float32), chosen=largest.chosen_ids)
        if not whole:
            return best
        rows = self.step.download(*(range(i, i + 1) for i in whole))
        return best._replace(whole={i: rows[i] for i in whole})

    def copy_to(self, memory: DeviceMemory, stream: Stream) -> None:
        """Copy the rows, with their padding, in the stream of the memory's device."""
        self.step.send(self.n, memory, stream)
