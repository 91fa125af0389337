"""Recorded forward passes, run: a batch goes up in one piece, and graphs or single launches do the rest.

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
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError, LocalLLMError
from localllm.kernels.cuda.attention import work_of_batch
from localllm.kernels.cuda.batch import N_TOKENS
from localllm.kernels.cuda.cache import PAGE
from localllm.kernels.cuda.driver import CompileProgress, Defines, DeviceMemory, Driver, Event, Graph, Module, Stream
from localllm.kernels.cuda.launch import Launch
from localllm.kernels.cuda.operations import MOST_CHOICES, SORTED, Choose, fused
from localllm.kernels.cuda.recording import BUCKETS, SHORTEST, Buffer, Extent, Operation, Recording
from localllm.kernels.ops import Batch, Best, Hidden, hidden_rows

#: Batches that may be on their way to the device.
_IN_FLIGHT = 4
#: Extents whose launches are kept to be captured, and graphs.
_MOST_LAUNCHES, _MOST_GRAPHS = 16, 64
#: Tokens and outputs of larger batches are counted as multiples of this, so that launches serve several of them.
_STEP = 8


#: A launch whose module is loaded.
_Loaded = tuple[Module, Launch]


@dataclass(eq=False)
class _Slot:
    """Pinned memory for a batch, and for the hidden states that come with it; and when both were uploaded."""

    words: NDArray[np.int32]
    event: Event
    rows: NDArray[np.uint8] | None = None


class Watch(Protocol):
    """What runs programs in their place, to see what they do; see `localllm.kernels.cuda.profile`."""

    def run(self, program: Program, batch: Batch, extent: Extent) -> None:
        """Called when a batch is on its way to the device: `Program.launch` computes it."""
        ...


#: What watches the programs of this process: the last of them, if there is one.
WATCHES: list[Watch] = []


class Program:
    """A recorded forward pass on a device.

    Attributes:
        rows: what it ends with.
        operations: what it does.

    Args:
        result: the buffer that it ends with.
        keep: what must live as long.
    """

    def __init__(self, recording: Recording, result: Buffer, keep: object) -> None:
        self.recording, self.driver, self.stream = recording, recording.driver, recording.stream
        recording.finish()
        self.rows = result.read()
        self._result = result
        self.operations = fused(recording.operations)
        self._graphs: OrderedDict[Extent, Graph] = OrderedDict()
        self._launches: OrderedDict[Extent, list[_Loaded]] = OrderedDict()
        #: Host memory that copies are made from and to.
        self._host_memory: list[NDArray[np.uint8]] = []
        self._slots = [_Slot(self._words(1), self._event()) for _ in range(_IN_FLIGHT)]
        self._done = self._event()
        #: What still reads the result of the last run, on other devices.
        self._readers: list[Event] = []
        self._host_rows: NDArray[np.float32] | None = None
        self._staging: NDArray[np.uint8] | None = None
        self._choosers: dict[int, _Chooser] = {}
        # Whoever lets go of the program does not know what is under way: memory is given back after it.
        kept = (recording.memory, recording.operands, self._host_memory, (*self._slots,), self._choosers, keep)
        weakref.finalize(self, _settle, self.driver, self.stream, self._readers, kept).atexit = False

    def _words(self, n_sequences: int) -> NDArray[np.int32]:
        """Pinned memory for batches of so many sequences.

        Few have more than one, so it grows when it must: tables of as many as there may be tokens take hundreds of
        megabytes beside a large cache.
        """
        words = self.driver.pinned(4 * self.recording.batch.layout.words_of(n_sequences)).view(np.int32)
        words[:] = 0
        return words

    def _event(self) -> Event:
        return self.driver.event(self.recording.device)

    def _pinned(self, n_bytes: int) -> NDArray[np.uint8]:
        self._host_memory.append(self.driver.pinned(n_bytes))
        return self._host_memory[-1]

    # -- Running ---------------------------------------------------------------------------------------------------

    def __call__(self, batch: Batch, hidden: Hidden | None) -> CUDAHidden:
        """Runs a batch; returns before the device has."""
        extent = self._run(batch, hidden)
        n = len(batch.ids) if self.rows.slot == N_TOKENS else len(batch.outputs)
        return CUDAHidden(self, n, extent)

    def _run(self, batch: Batch, hidden: Hidden | None) -> Extent:
        recording, driver = self.recording, self.driver
        self._check(batch)
        slot = self._slots[0]
        self._slots = [*self._slots[1:], slot]
        driver.synchronize(slot.event)
        n_sequences, layout = len(batch.kv_lengths), recording.batch.layout
        if len(slot.words) < layout.words_of(n_sequences):
            slot.words = self._words(min(2 * n_sequences, recording.max_tokens))
        n_words = layout.fill(slot.words, batch)
        for event in self._readers:
            driver.wait(self.stream, event)
        self._readers.clear()
        driver.upload(recording.batch.memory.at(0, 4 * n_words), slot.words[:n_words], self.stream)
        if recording.hidden is not None:
            self._receive(hidden, len(batch.ids), slot)
        driver.record(slot.event, self.stream)
        extent = self._compute(batch)
        driver.record(self._done, self.stream)
        return extent

    def _check(self, batch: Batch) -> None:
        """Makes sure that a batch fits: kernels believe every index."""
        recording, n_tokens, n_outputs = self.recording, len(batch.ids), len(batch.outputs)
        if n_tokens > recording.max_tokens or n_outputs > recording.max_outputs:
            raise KernelError(
                f"a batch of {n_tokens} tokens and {n_outputs} outputs is larger than this step was compiled for, "
                f"{recording.max_tokens} and {recording.max_outputs}"
            )
        batch.check(PAGE, recording.cache.n_pages)
        for n_vocab in recording.vocabularies:
            if batch.ids.min() < 0 or batch.ids.max() >= n_vocab:
                raise KernelError(f"a batch has token ids outside the vocabulary of {n_vocab}")

    def _receive(self, hidden: Hidden | None, n_tokens: int, slot: _Slot) -> None:
        """Puts hidden states where the forward pass begins with them."""
        into = self.recording.hidden
        if into is None:
            return
        row_bytes = 4 * into.stride
        memory = into.memory.at(0, n_tokens * row_bytes)
        if isinstance(hidden, CUDAHidden) and (hidden.n, hidden.width) == (n_tokens, into.width):
            hidden.copy_to(memory, self.stream)
            return
        if slot.rows is None:
            slot.rows = self._pinned(self.recording.max_tokens * row_bytes)
        rows = slot.rows[: memory.n_bytes]
        matrix = rows.view(np.float32).reshape(n_tokens, into.stride)
        matrix[:, : into.width] = hidden_rows(hidden, n_tokens, into.width)
        matrix[:, into.width :] = 0
        self.driver.upload(memory, rows, self.stream)

    def _compute(self, batch: Batch) -> Extent:
        extent = self._bucket(batch) or self._whole(batch)
        if WATCHES:
            WATCHES[-1].run(self, batch, extent)
        else:
            self.launch(extent)
        return extent

    def launch(self, extent: Extent) -> None:
        """Computes the batch of that extent which is in the device's memory."""
        if extent not in self._graphs and extent not in self._launches:
            launches = self._loaded(self.operations, extent)
            self._launch(launches)
            self._launches[extent] = launches
            if len(self._launches) > _MOST_LAUNCHES:
                self._launches.popitem(last=False)
            return
        if extent not in self._graphs:
            self._graphs[extent] = self._captured(self._launches.pop(extent))
            if len(self._graphs) > _MOST_GRAPHS:
                self.driver.synchronize(self.stream)  # the one that goes may be at work
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(extent)
        self.driver.replay(self._graphs[extent], self.stream)

    def graph(self, operations: Sequence[Operation], extent: Extent) -> Graph:
        """A graph of some of the operations, for that extent."""
        return self._captured(self._loaded(operations, extent))

    def _bucket(self, batch: Batch) -> Extent | None:
        """That of a bucket which a batch fits into, if any."""
        n = max(len(batch.ids), len(batch.outputs))
        bucket = next((b for b in BUCKETS if n <= b), None)
        if bucket is None:
            return None
        longest, most = SHORTEST, max(1, self.recording.cache.n_pages) * PAGE
        while longest < int(batch.kv_lengths.max()):
            longest *= 2
        return self._bucket_extent(bucket, min(longest, most))

    def _bucket_extent(self, bucket: int, longest: int) -> Extent | None:
        recording = self.recording
        work = recording.bucket_work(bucket, longest)
        if work is None:
            return None
        return recording.extent(min(bucket, recording.max_tokens), min(bucket, recording.max_outputs), work)

    def _whole(self, batch: Batch) -> Extent:
        """The extent of a batch of many tokens, or far into a long cache."""
        recording = self.recording
        sequences = [(stop - start, length) for start, stop, length in batch.sequences()]
        work = tuple(
            (heads, work_of_batch(sequences, heads, recording.variant, recording.usable_part_bytes))
            for heads in recording.heads
        )
        return recording.extent(_rounded(len(batch.ids)), _rounded(len(batch.outputs)), work)

    # -- Launching -------------------------------------------------------------------------------------------------

    def compile(self, progress: CompileProgress | None) -> None:
        """Compiles the kernels that batches of all sizes take, so that none has to wait for it."""
        recording, modules = self.recording, dict[str, tuple[str, Defines]]()
        most = min(SHORTEST, max(1, recording.cache.n_pages) * PAGE)
        buckets = [self._bucket_extent(bucket, most) for bucket in BUCKETS if bucket <= 2 * recording.max_tokens]
        large = (
            [
                recording.extent(n, min(n, recording.max_outputs), buckets[0].attention)
                for n in _LARGE
                if n <= recording.max_tokens
            ]
            if buckets[0]
            else []
        )
        for extent in (*buckets, *large):
            if extent is not None:
                for launch in _launches(self.operations, extent):
                    modules[f"{launch.module} {sorted(launch.defines.items())}"] = launch.module, launch.defines
        self.driver.compile_modules(recording.device, modules.values(), progress)

    def _loaded(self, operations: Sequence[Operation], extent: Extent) -> list[_Loaded]:
        return [self._load(launch) for launch in _launches(operations, extent)]

    def _load(self, launch: Launch) -> _Loaded:
        return self.driver.load_module(self.recording.device, launch.module, launch.defines), launch

    def _launch(self, launches: Sequence[_Loaded]) -> None:
        launch, stream = self.driver.launch, self.stream
        for module, each in launches:
            launch(module, each.kernel, each.grid, each.block, each.arguments, stream, each.shared_bytes)

    def _captured(self, launches: Sequence[_Loaded]) -> Graph:
        self.driver.begin_capture(self.stream)
        try:
            self._launch(launches)
        except BaseException:
            with contextlib.suppress(LocalLLMError):  # what went wrong is the first error
                self.driver.end_capture(self.stream)
            raise
        return self.driver.end_capture(self.stream)

    # -- The result ------------------------------------------------------------------------------------------------

    def download(self, n: int) -> NDArray[np.float32]:
        """Waits, and gives the first ``n`` rows of the result: memory of the program's own."""
        rows = self.rows
        if self._host_rows is None:
            n_rows = self.recording.most_rows(rows.slot)
            self._host_rows = self._pinned(4 * n_rows * rows.stride).view(np.float32).reshape(n_rows, rows.stride)
        if n:
            self.driver.download(self._host_rows[:n], rows.memory.at(0, 4 * n * rows.stride), self.stream)
        self.driver.synchronize(self.stream)
        return self._host_rows[:n, : rows.width]

    def best(self, extent: Extent, n: int, k: int) -> Best:
        """Waits, and gives the ``k`` best of the first ``n`` rows of the result, of a batch of that extent."""
        n_vocab = self.rows.width
        if not 1 <= k <= min(MOST_CHOICES, n_vocab):
            raise KernelError(f"{k} of {n_vocab} logits cannot be chosen: 1 to {min(MOST_CHOICES, n_vocab)} can")
        most = min(next(most for most in _CHOICES if k <= most), n_vocab)
        if most not in self._choosers:
            self._choosers[most] = _Chooser(self, most)
        ids, logits = self._choosers[most].choose(self, extent, n)
        return Best(ids[:, :k], logits[:, :k])

    def send(self, n: int, to: DeviceMemory, stream: Stream) -> None:
        """Brings the first ``n`` rows of the result to another device, in whose stream they are copied."""
        driver, own = self.driver, self.recording.device
        source = self.rows.memory.at(0, to.n_bytes)
        if to.device == own or driver.can_access_peer(to.device, own):
            if to.device != own:
                driver.enable_peer_access(to.device, own)
            driver.wait(stream, self._done)
            driver.copy(to, source, stream)
        else:
            if self._staging is None:
                self._staging = self._pinned(4 * self.recording.most_rows(self.rows.slot) * self.rows.stride)
            driver.download(self._staging[: to.n_bytes], source, self.stream)
            driver.record(self._done, self.stream)
            driver.wait(stream, self._done)
            driver.upload(to, self._staging[: to.n_bytes], stream)
        read = driver.event(to.device)
        driver.record(read, stream)
        self._readers.append(read)


#: Numbers of choices that there is memory for: for another one the next larger is made.
_CHOICES = (1, 64, 256, MOST_CHOICES)
#: Batches beyond the buckets whose kernels are compiled ahead.
_LARGE = (24, 40, 512)


def _launches(operations: Sequence[Operation], extent: Extent) -> list[Launch]:
    return [launch for operation in operations for launch in operation.launches(extent)]


def _rounded(n: int) -> int:
    return -(-n // _STEP) * _STEP if n > _STEP else n


def _settle(driver: Driver, stream: Stream, readers: Sequence[Event], kept: object) -> None:
    """Waits for what still uses memory that is about to be given back."""
    for what in (stream, *readers):
        with contextlib.suppress(LocalLLMError):
            driver.synchronize(what)


@dataclass(frozen=True, eq=False)
class CUDAHidden(Hidden):
    """The first ``n`` rows of a program's result, in the device's memory, perhaps still being computed."""

    program: Program
    n: int
    extent: Extent

    @property
    def width(self) -> int:
        return self.program.rows.width

    def host(self) -> NDArray[np.float32]:
        return self.program.download(self.n)

    def best(self, k: int) -> Best:
        return self.program.best(self.extent, self.n, k)

    def copy_to(self, memory: DeviceMemory, stream: Stream) -> None:
        """Copies the rows, with their padding, in the stream of the memory's device."""
        self.program.send(self.n, memory, stream)


class _Chooser:
    """The choice of the ``k`` best of a program's logits, on the device."""

    def __init__(self, program: Program, k: int) -> None:
        driver, device, n = program.driver, program.recording.device, program.recording.max_outputs
        self._k = k
        # Its own, not the recording's: if there is no room for all of it, none of it shall stay.
        self._best = driver.allocate(device, 8 * n * k)  # ids, and behind those of a batch their logits
        self._parts = driver.allocate(device, 8 * n * k * -(-program.rows.width // SORTED)) if k > 1 else None
        self._host = driver.pinned(8 * n * k)
        driver.fill(self._best, 0, program.stream)

    def choose(self, program: Program, extent: Extent, n: int) -> Best:
        """Of the first ``n`` rows of the program's result, of a batch of that extent."""
        n_bytes = 4 * n * self._k
        if n:
            ids, logits = (self._best.at(begin, n_bytes) for begin in (0, n_bytes))
            choose = Choose(program.recording.batch, program.rows, self._k, ids, logits, self._parts)
            program._launch(program._loaded([choose], extent))
            program.driver.download(self._host[: 2 * n_bytes], self._best.at(0, 2 * n_bytes), program.stream)
        program.driver.synchronize(program.stream)
        ids_there, logits_there = self._host[:n_bytes], self._host[n_bytes : 2 * n_bytes]
        shape = n, self._k
        return Best(ids_there.view(np.int32).reshape(shape), logits_there.view(np.float32).reshape(shape))
