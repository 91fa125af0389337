"""A step on a CUDA device: a batch goes up in one piece, and graphs or single launches do the rest.

Each batch has an extent, and the launches for that serve all batches that have it.  For the first of these they are
made one by one; for the second they are captured in a graph, which is replayed from then on, so that Python does
nothing a layer.  Batches of few tokens share extents: there is one for each bucket and, about, power of two of the
length in the cache.  Of larger ones, those that fill a step or a micro-batch have the same extent mostly.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError, LocalLLMError
from localllm.kernels.backend import Batch, Cache, Output, PackedWeight, Step, TopK, input_rows
from localllm.kernels.buffers import Address, Buffer
from localllm.kernels.cuda.attention import work_of_batch, work_of_bucket
from localllm.kernels.cuda.cache import PAGE
from localllm.kernels.cuda.calls import BUCKETS, N_TOKENS, Call, Extent, Stored, phases
from localllm.kernels.cuda.driver import CompileProgress, Defines, DeviceMemory, Driver, Event, Graph, Launch, Stream
from localllm.kernels.cuda.lowering import MAX_TOP_K, Lowered
from localllm.kernels.embedding import NgramRows

#: Lengths in the cache that an extent of a small batch serves: the first, and then twice as much each.
SHORTEST = 1024
#: Batches that may be on their way to the device.
_IN_FLIGHT = 4
#: Extents whose launches are kept to be captured, and graphs: those used last.
_MAX_LAUNCHES, _MAX_GRAPHS = 16, 16
#: Device memory of a kernel in a graph, for the plan: 1,000 more took 63 MB (driver 470; "Increasing memory footprint
#: with large task graphs", NVIDIA's forums, 2023).  The section ceilings of `tests.benchmarks.gpu` measures it.
NODE_BYTES = 64 << 10
#: Tokens and outputs of larger batches are counted as multiples of this, so that launches serve several of them.
_STEP = 8
#: Numbers of the largest logits that are found at once: for another one the next larger is.
_TOP_K = (1, 64, 256, MAX_TOP_K)
#: Batches beyond the buckets whose kernels are compiled ahead.
_LARGE = (24, 40, 512)


#: Work for a stream, such as a launch whose module is loaded.
Work = partial[None]


@dataclass(eq=False)
class _Slot:
    """Pinned memory for a batch, and for the hidden states and embeddings that come with it; and when all of it was
    uploaded."""

    words: NDArray[np.int32]
    event: Event
    rows: NDArray[np.uint8] | None = None
    embeddings: dict[Buffer, NDArray[np.uint8]] = field(default_factory=dict)


@dataclass(eq=False)
class _Found:
    """Pinned memory for ids and their logits, int32 [2, rows, k], and what rows go on with; and when it has come."""

    event: Event
    numbers: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    chosen: NDArray[np.int32] | None = None


class Watch(Protocol):
    """Runs steps in their place, to observe them; see `localllm.kernels.cuda.profile`."""

    def run(self, step: CUDAStep, batch: Batch, extent: Extent) -> None:
        """Called when a batch is on its way to the device: `CUDAStep.launch` computes it."""
        ...


#: What watches the steps of this process: the last of them, if there is one.
WATCHES: list[Watch] = []


class CUDAStep(Step):
    """The calls of a graph on a device, with the weights (kept alive by ``keep``) and the cache that they work on."""

    #: Steps of other devices that run with it: see `localllm.kernels.cuda.row_split`.
    followers: tuple[CUDAStep, ...] = ()

    def __init__(
        self, driver: Driver, device: int, lowered: Lowered, weights: tuple[PackedWeight, ...], keep: object
    ) -> None:
        self.driver, self.device = driver, device
        self.weights, self.limits = weights, lowered.limits
        self.cache: Cache = lowered.limits.cache
        self.stream = lowered.limits.cache.stream  # what copies its pages comes behind the steps that fill them
        self.calls, self.result, self.hidden = lowered.calls, lowered.result, lowered.hidden
        self._found, self._tables, self._embeddings = lowered.found, lowered.tables, lowered.embeddings
        self._ngrams = [(NgramRows(op), into) for op, into in lowered.ngrams]
        self.max_top_k = 0 if lowered.found is None else min(MAX_TOP_K, lowered.result.width)
        self._sent = np.zeros((0, 0, 0), np.int32)  # block tables of the last run
        self._n_chosen = 0  # rows of the last run, which the next may begin with
        self.arena = driver.allocate(device, lowered.arena_bytes)
        #: Arenas of other devices, by the buffers in them.
        self.reached: dict[Buffer, DeviceMemory] = {}
        # What pads rows is read, and must be something.
        driver.fill(self.arena, 0, self.stream)
        for rope, buffer in self.limits.ropes:
            axes = np.array(rope.axes, np.int32)
            values = np.concatenate([phases(rope.frequencies).view(np.uint8), axes.view(np.uint8)])
            driver.upload(self.memory(buffer), values, self.stream)
            driver.synchronize(self.stream)  # until then the values must live
        #: By the extent here and those of the followers.
        self._graphs: OrderedDict[tuple[Extent, ...], Graph] = OrderedDict()
        self._launches: OrderedDict[tuple[Extent, ...], list[Work]] = OrderedDict()
        #: Host memory that copies are made from and to.
        self._host_memory: list[NDArray[np.uint8]] = []
        self._slots = [_Slot(self._words(1), self._event()) for _ in range(_IN_FLIGHT)]
        self._done = self._event()
        #: What still reads the result of the last run, on other devices.
        self._readers: list[Event] = []
        self._host_rows: NDArray[np.float32] | None = None
        #: For what was chosen, in turn: one is read while the next is on its way.
        self._host_found = [_Found(self._event()) for _ in range(2)]
        self._staging: NDArray[np.uint8] | None = None
        # Whoever lets go of the step does not know what is under way: memory is given back after it.
        kept = (self.arena, lowered.limits.cache.memory, self._host_memory, (*self._slots,), keep)
        weakref.finalize(self, _settle, driver, self.stream, self._readers, kept).atexit = False

    def memory(self, place: Buffer | Address, n_bytes: int | None = None) -> DeviceMemory:
        """Of a buffer, from a place in it on: to its end, or so many bytes."""
        buffer, begin = (place, 0) if isinstance(place, Buffer) else (place.buffer, place.n_bytes)
        arena = self.reached.get(buffer, self.arena)
        return arena.at(buffer.offset + begin, buffer.n_bytes - begin if n_bytes is None else n_bytes)

    def rows(self, stored: Stored, n: int) -> DeviceMemory:
        """The first ``n`` rows, with their padding."""
        return self.memory(stored.buffer, 4 * n * stored.stride)

    def _words(self, n_sequences: int) -> NDArray[np.int32]:
        """Pinned memory for batches of so many sequences.

        Few have more than one, so it grows when it must: tables of as many as there may be tokens take hundreds of
        megabytes beside a large cache.
        """
        words = self.driver.pinned(4 * self.limits.batch.words_of(n_sequences)).view(np.int32)
        words[:] = 0
        return words

    def _event(self) -> Event:
        return self.driver.event(self.device)

    def pinned(self, n_bytes: int) -> NDArray[np.uint8]:
        """Host memory that is given back with the step."""
        self._host_memory.append(self.driver.pinned(n_bytes))
        return self._host_memory[-1]

    # -- Running ---------------------------------------------------------------------------------------------------

    def run(self, batch: Batch, hidden: Output | None = None) -> CUDAOutput:
        """Runs a batch; returns before the device has."""
        driver = self.driver
        extent, *others = self.begin(batch, hidden)
        if batch.top_k and self.max_top_k:
            most = next(k for k in _TOP_K if batch.top_k <= k)
            extent = replace(extent, top_k=min(most, self.result.width))
        if WATCHES and not others:
            WATCHES[-1].run(self, batch, extent)
        else:
            self.launch(extent, *others)
        driver.record(self._done, self.stream)
        for each in self.followers:
            driver.wait(each.stream, self._done)
        n = len(batch.ids) if self.result.slot == N_TOKENS else len(batch.outputs)
        self._n_chosen = n if extent.top_k else 0
        return CUDAOutput(self, n, self._download_found(n, extent.top_k) if extent.top_k else None)

    def begin(self, batch: Batch, hidden: Output | None) -> tuple[Extent, ...]:
        """Uploads a batch; gives the extent here, and those of the followers."""
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
            raise KernelError(f"a batch goes on with {batch.n_chosen} ids, of which {self._n_chosen} were chosen")
        slot = self._slots[0]
        self._slots = [*self._slots[1:], slot]
        driver.synchronize(slot.event)
        n_sequences, layout = len(batch.kv_lengths), limits.batch
        if len(slot.words) < layout.words_of(n_sequences):
            slot.words = self._words(min(2 * n_sequences, limits.max_tokens))
        parts = layout.fill(slot.words, batch, self._sent)
        self._sent = batch.block_tables.copy()
        for event in self._readers:
            driver.wait(self.stream, event)
        self._readers.clear()
        for part in parts:
            memory = self.memory(layout.buffer.at(4 * part.start), 4 * (part.stop - part.start))
            driver.upload(memory, slot.words[part], self.stream)
        self._receive(hidden, len(batch.ids), slot)
        if len(batch.embedded):
            self._upload_embeddings(batch, slot)
        for ngrams, into in self._ngrams:
            self._upload_rows(ngrams.rows(batch, limits.cache.host_states[ngrams.op.state]), into, slot)
        driver.record(slot.event, self.stream)
        return (replace(self._bucket(batch) or self._whole(batch), has_embedded=len(batch.embedded) > 0),)

    @property
    def chooses_ahead(self) -> bool:
        n_ids = min((n for n, by_position in self._tables if not by_position), default=0)
        # What watches runs a batch several times, and would have it choose another id each time; and of ids that are
        # chosen ahead, the host knows no n-grams.
        return self.max_top_k > 0 and n_ids >= self.result.width and not WATCHES and not self._ngrams

    def _receive(self, hidden: Output | None, n_tokens: int, slot: _Slot) -> None:
        """Puts hidden states where the calls begin with them, if they do."""
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

    def _upload_embeddings(self, batch: Batch, slot: _Slot) -> None:
        for index, into in self._embeddings.items():
            self._upload_rows(batch.embeddings_of(index, into.width), into, slot)

    def _upload_rows(self, values: NDArray[np.float32], into: Stored, slot: _Slot) -> None:
        """Rows to where calls read them."""
        if into.buffer not in slot.embeddings:
            slot.embeddings[into.buffer] = self.pinned(4 * self.limits.max_tokens * into.stride)
        memory = self.rows(into, len(values))
        rows = slot.embeddings[into.buffer][: memory.n_bytes]
        matrix = rows.view(np.float32).reshape(-1, into.stride)
        matrix[:, : into.width], matrix[:, into.width :] = values, 0
        self.driver.upload(memory, rows, self.stream)

    def launch(self, *extents: Extent) -> None:
        """Computes the batch of that extent which is in the device's memory; and in those of the followers."""
        if extents not in self._graphs and extents not in self._launches:
            launches = self.loaded(self.calls, *extents)
            self._launch(launches)
            self._launches[extents] = launches
            if len(self._launches) > _MAX_LAUNCHES:
                self._launches.popitem(last=False)
            return
        if extents not in self._graphs:
            self._graphs[extents] = self._captured(self._launches.pop(extents))
            if len(self._graphs) > _MAX_GRAPHS:
                self.driver.synchronize(self.stream)  # the one that goes may be at work
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(extents)
        self.driver.replay(self._graphs[extents], self.stream)

    def graph(self, calls: Sequence[Call], extent: Extent) -> Graph:
        """A graph of some of the calls, for that extent."""
        return self._captured(self.loaded(calls, extent))

    def _bucket(self, batch: Batch) -> Extent | None:
        """That of a bucket which a batch fits into, if any."""
        n = max(len(batch.ids), len(batch.outputs))
        bucket = next((b for b in BUCKETS if n <= b), None)
        if bucket is None:
            return None
        longest, most = SHORTEST, max(1, self.cache.n_pages[0]) * PAGE
        while longest < int(batch.kv_lengths.max()):
            longest *= 2
        return self._bucket_extent(bucket, min(longest, most))

    def _bucket_extent(self, bucket: int, longest: int) -> Extent | None:
        limits = self.limits
        work = limits.bucket_work(bucket, longest)
        if work is None:
            return None
        return limits.extent(min(bucket, limits.max_tokens), min(bucket, limits.max_outputs), work)

    def _whole(self, batch: Batch) -> Extent:
        """The extent of a batch of many tokens, or far into a long cache."""
        limits = self.limits
        sequences = [(stop - start, length) for start, stop, length in batch.sequences()]
        work = tuple(
            (kind, work_of_batch(sequences, kind.heads, kind.variant, limits.usable_partial_bytes))
            for kind in limits.kinds
        )
        return limits.extent(_rounded(len(batch.ids)), _rounded(len(batch.outputs)), work)

    # -- Launching -------------------------------------------------------------------------------------------------

    def compile_kernels(self, progress: CompileProgress | None) -> None:
        """Compiles the kernels that batches of all sizes take, so that none has to wait for it."""
        limits, modules = self.limits, dict[str, tuple[str, Defines]]()
        longest = min(SHORTEST, max(1, self.cache.n_pages[0]) * PAGE)
        extents = [self._bucket_extent(bucket, longest) for bucket in BUCKETS if bucket <= 2 * limits.max_tokens]
        if first := extents[0]:
            large = [n for n in _LARGE if n <= limits.max_tokens]
            extents += [limits.extent(n, min(n, limits.max_outputs), first.attention) for n in large]
        for extent in extents:
            if extent is not None:
                for launch in _launches(self.calls, extent):
                    modules[f"{launch.module} {sorted(launch.defines.items())}"] = launch.module, launch.defines
        self.driver.compile_modules(self.device, modules.values(), progress)

    def loaded(self, calls: Sequence[Call], *extents: Extent) -> list[Work]:
        """The launches of calls, with their modules and the memory of their buffers."""
        return [self._load(launch) for launch in _launches(calls, extents[0])]

    def _load(self, launch: Launch) -> Work:
        arguments = [self.memory(a) if isinstance(a, Buffer | Address) else a for a in launch.arguments]
        module = self.driver.load_module(self.device, launch.module, launch.defines)
        shape = launch.kernel, launch.grid, launch.block
        return partial(self.driver.launch, module, *shape, arguments, self.stream, launch.shared_bytes)

    def _launch(self, work: Sequence[Work]) -> None:
        for each in work:
            each()

    def _captured(self, launches: Sequence[Work]) -> Graph:
        self.driver.begin_capture(self.stream)
        try:
            self._launch(launches)
        except BaseException:
            with contextlib.suppress(LocalLLMError):  # what went wrong is the first error
                self.driver.end_capture(self.stream)
            raise
        return self.driver.end_capture(self.stream)

    # -- The result ------------------------------------------------------------------------------------------------

    def download(self, *parts: range) -> NDArray[np.float32]:
        """Waits, and gives the result, of which these rows are there: memory of the step's own."""
        rows = self.result
        if self._host_rows is None:
            n_rows = self.limits.max_rows(rows.slot)
            self._host_rows = self.pinned(4 * n_rows * rows.stride).view(np.float32).reshape(n_rows, rows.stride)
        for part in filter(None, parts):
            source = self.memory(rows.buffer.at(4 * part.start * rows.stride), 4 * len(part) * rows.stride)
            self.driver.download(self._host_rows[part.start : part.stop], source, self.stream)
        self.driver.synchronize(self.stream)
        return self._host_rows[:, : rows.width]

    def _download_found(self, n: int, k: int) -> _Found:
        """Has the ``k`` largest of the first ``n`` rows of the result brought here, once they are found."""
        assert self._found is not None
        found = self._host_found[0]
        self._host_found.reverse()
        self.driver.synchronize(found.event)  # what it held, somebody may have run and never read
        size = 2 * n * k + (n if k > 1 else 0)
        if len(found.numbers) < size:
            found.numbers = self.pinned(4 * self.limits.max_outputs * (2 * k + 1)).view(np.int32)
        if n:
            self.driver.download(found.numbers[:size], self.memory(self._found[k > 1], 4 * size), self.stream)
        self.driver.record(found.event, self.stream)
        numbers = found.numbers[: 2 * n * k].reshape(2, n, k)
        return _Found(found.event, numbers, found.numbers[2 * n * k : size] if k > 1 else numbers[0, :, 0])

    def send(self, n: int, to: DeviceMemory, stream: Stream) -> None:
        """Brings the first ``n`` rows of the result to another device, in whose stream they are copied."""
        driver, own = self.driver, self.device
        source = self.memory(self.result.buffer, to.n_bytes)
        if to.device == own or driver.can_access_peer(to.device, own):
            if to.device != own:
                driver.enable_peer_access(to.device, own)
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


def _launches(calls: Sequence[Call], extent: Extent) -> list[Launch]:
    return [launch for call in calls for launch in call.launches(extent)]


def graph_bytes(lowered: Lowered | CUDAStep) -> int:
    """Device memory of a step's graphs: as many as are kept, of a token each (those of prompts have more nodes)."""
    work = tuple((kind, work_of_bucket(1, 1, kind.heads)) for kind in lowered.limits.kinds)
    return _MAX_GRAPHS * NODE_BYTES * len(_launches(lowered.calls, lowered.limits.extent(1, 1, work)))


def _rounded(n: int) -> int:
    return -(-n // _STEP) * _STEP if n > _STEP else n


def _settle(driver: Driver, stream: Stream, readers: Sequence[Event], kept: object) -> None:
    """Waits for what still uses memory that is about to be given back."""
    for what in (stream, *readers):
        with contextlib.suppress(LocalLLMError):
            driver.synchronize(what)


@dataclass(frozen=True, eq=False)
class CUDAOutput(Output):
    """The first ``n`` rows of a step's result, in the device's memory, perhaps still being computed."""

    step: CUDAStep
    n: int
    found: _Found | None

    @property
    def width(self) -> int:
        return self.step.result.width

    def rows(self) -> NDArray[np.float32]:
        return self.step.download(range(self.n))[: self.n]

    def top_k(self, k: int, whole: Sequence[int] = ()) -> TopK:
        found = self.found
        if found is None or not 1 <= k <= found.numbers.shape[2]:
            most = self.step.max_top_k if found is None else found.numbers.shape[2]
            raise KernelError(f"{k} of {self.width} logits cannot be chosen: 1 to {most} can")
        self.step.driver.synchronize(found.event)
        ids, logits = found.numbers[:, :, :k]
        best = TopK(ids, logits.view(np.float32), chosen=found.chosen)
        if not whole:
            return best
        rows = self.step.download(*(range(i, i + 1) for i in whole))
        return best._replace(whole={i: rows[i] for i in whole})

    def copy_to(self, memory: DeviceMemory, stream: Stream) -> None:
        """Copies the rows, with their padding, in the stream of the memory's device."""
        self.step.send(self.n, memory, stream)
