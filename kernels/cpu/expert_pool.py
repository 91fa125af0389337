"""Pool of experts for models larger than memory: experts stay in the file, and are read and packed when tokens use
them.

A *group* is the matrices of a layer's experts that are multiplied with the same rows, such as gates and ups.  Every
entry in the pool belongs to one expert.  Before a program multiplies with a group it calls `hold_experts`
(`localllm.kernels.cpu.experts`), which returns at once if all experts are in memory.  Otherwise the pool reads the
experts that are needed now and then, while the program computes with them, the experts that are needed next.  Memory
for them comes from the least recently used experts.  The pool reuses memory only during such a call, when no kernel
reads any expert.

The packed tiles equal the tiles made by loading the whole model, so the results are the same to the last bit.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import NotEnoughMemoryError
from localllm.kernels import process
from localllm.kernels.backend import ExpertReads
from localllm.kernels.cpu.experts import ENTRY
from localllm.kernels.cpu.memory import PADDING, aligned_zeros, padded
from localllm.kernels.cpu.packing import PACKED_ROWS, Packer
from localllm.kernels.graph import Graph, Routing, Weight
from localllm.kernels.mapped_file import FileRange, OpenFile, range_in_file
from localllm.kernels.operations import ExpertLinears, ExpertOutput
from localllm.quant.lut import KernelType
from localllm.quant.packing import LAYOUTS
from localllm.quant.repack import ScaleRangeError, repack, repack_target

#: Reader threads: enough to keep a disk busy while other readers pack.
READERS = 4
#: A step whose number of pairs is at least this multiple of the number of experts needs nearly all experts.
MANY = 4
#: State of an entry: not in the pool, requested, in the pool, or failed to be read.
ABSENT, PENDING, HERE, FAILED = range(4)

_CALL = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class _Matrices:
    """One matrix [n_out, n_in] of each expert, and its location in the file."""

    weight: Weight
    file: FileRange  # rows of all experts, or the rows of the first expert and the data between them
    stride: int  # bytes between experts
    format: KernelType
    table: NDArray[np.int64]  # address of each expert's tiles; 0 if not in memory

    @property
    def n_packed(self) -> int:
        _, n_out, n_in = self.weight.shape
        return LAYOUTS[self.format].packed_bytes(padded(n_out), n_in)

    def pack(self, read: Callable[[int, int], Bytes], packer: Packer, packed: Bytes) -> None:
        """Pack the tiles of an expert from its bytes ``read(start, stop)``."""
        _, n_out, n_in = self.weight.shape
        layout, row_bytes = LAYOUTS[self.format], self.file.n_bytes // n_out
        if n_out % PADDING:
            packed[:] = 0
        for first in range(0, n_out, PACKED_ROWS):
            last = min(first + PACKED_ROWS, n_out)
            rows = read(first * row_bytes, last * row_bytes).reshape(-1, row_bytes)
            start, stop = (layout.packed_bytes(n, n_in) for n in (first, last))
            packer.pack(repack(rows, self.weight.type, self.format), packed[start:stop])


@dataclass(frozen=True, eq=False)
class ExpertGroup:
    number: int
    first: int  # number of its first expert's entry among all entries
    matrices: tuple[_Matrices, ...]
    routing: Routing  # groups with the same routing are needed in order, with the same experts
    n_bytes: int  # bytes of an expert in the pool
    at_once: int  # experts computed at once: half of the pool is reserved for the next ones


def stays_in_file(weight: Weight) -> FileRange | None:
    """Return the file range of the first expert's rows, or None if they cannot be read from a file."""
    return range_in_file(weight.data[0]) if len(weight.shape) == 3 else None


class _Queue:
    """A queue of reads, ordered by urgency, and the lock of a pool."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.needed, self.ahead = deque[int](), deque[int]()
        self.is_closed = False

    def get(self) -> int | None:
        with self.changed:
            while not self.is_closed and not self.needed and not self.ahead:
                self.changed.wait()
            return None if self.is_closed else (self.needed or self.ahead).popleft()

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


def _read_for(queue: _Queue, pool: weakref.ref[ExpertPool]) -> None:
    """Run a reader thread, which ends with the pool."""
    while (entry := queue.get()) is not None:
        owner = pool()
        if owner is None:
            return
        owner.read(entry)
        del owner


def _close(queue: _Queue, files: Mapping[Path, _ExpertFile]) -> None:
    """Stop the readers of a pool and close its files."""
    queue.close()
    for file in files.values():
        file.file.close()


class ExpertPool:
    """``n_bytes`` of memory for the experts of a graph.

    ``counts``: int64, the number of `hold_experts` calls (used as the time), and the bytes that were
    needed.  ``stamps``: int64, the time when each entry was last needed.
    """

    def __init__(self, n_bytes: int, graph: Graph, packer: Callable[[KernelType], Packer]) -> None:
        self.n_bytes, self.packer = n_bytes, packer
        groups = [node.operation for node in graph.nodes if isinstance(node.operation, ExpertLinears | ExpertOutput)]
        n_experts = sum(operation.routing.n_experts for operation in groups)
        self.counts, self.stamps = np.zeros(2, np.int64), np.zeros(n_experts, np.int64)
        self.bytes_read = 0
        #: Seconds that programs waited, and seconds with at least one read in progress.
        self.wait_s = self.read_s = 0.0
        #: Since `begin`: whether programs waited, why experts could not be read, and the tokens without these
        #: experts.
        self.has_waited = False
        self.error: BaseException | None = None
        self.failed_tokens: list[int] = []
        self._groups: list[ExpertGroup] = []
        self._state = np.zeros(n_experts, np.int8)
        self._memory: list[Bytes | None] = [None] * n_experts
        self._errors: dict[int, BaseException] = {}
        self._owner: list[ExpertGroup] = []  # group of each entry
        self._n_used = self._n_reading = 0
        self._needs_all = False
        self._reading_since = 0.0
        self._queue = _Queue()
        self._files: dict[Path, _ExpertFile] = {}
        this = weakref.ref(self)
        self._call = _CALL(lambda *numbers: pool._hold(*numbers) if (pool := this()) is not None else 0)
        #: Address of the function that `hold_experts` calls.
        self.call = ctypes.cast(self._call, ctypes.c_void_p).value or 0

    def group(self, weights: Sequence[Weight], tables: Sequence[NDArray[np.int64]], routing: Routing) -> ExpertGroup:
        """Return the group of some weights, each with the table of its experts' addresses."""
        for group in self._groups:
            if [matrix.weight for matrix in group.matrices] == [*weights]:
                return group
        matrices = tuple(
            _Matrices(weight, _first(weight), weight.data.strides[0], repack_target(weight.type), table)
            for weight, table in zip(weights, tables, strict=True)
        )
        n_bytes = sum(x.n_packed for x in matrices)
        least = routing.k * n_bytes
        if self.n_bytes < least:
            raise NotEnoughMemoryError(
                f"one token's experts of a layer take {least / 1e6:,.1f} MB, but there are "
                f"{self.n_bytes / 1e6:,.1f} MB for experts that stay in the file: give it more memory"
            )
        at_once = max(routing.k, self.n_bytes // 2 // n_bytes)
        group = ExpertGroup(len(self._groups), len(self._owner), matrices, routing, n_bytes, at_once)
        self._groups.append(group)
        self._owner += [group] * weights[0].shape[0]
        return group

    def open(self) -> None:
        """Open the files and start the readers.  Called once, after all groups were created."""
        for matrices in (matrices for group in self._groups for matrices in group.matrices):
            self.packer(matrices.format)
            if matrices.file.path not in self._files:
                self._files[matrices.file.path] = _ExpertFile(matrices.file.path)
        weakref.finalize(self, _close, self._queue, self._files).atexit = False
        for i in range(READERS):
            arguments = self._queue, weakref.ref(self)
            threading.Thread(target=_read_for, args=arguments, name=f"localllm-experts-{i}", daemon=True).start()

    @property
    def reads(self) -> ExpertReads:
        return ExpertReads(int(self.counts[1]), self.bytes_read, self.read_s, self.wait_s)

    def begin(self, n_tokens: int) -> None:
        """Start a step.  Called before each step."""
        routing = self._groups[0].routing
        self._needs_all = n_tokens * routing.k >= MANY * routing.n_experts
        self.has_waited, self.error, self.failed_tokens = False, None, []

    # -- Called by programs ----------------------------------------------------------------------------------------

    def _hold(self, number: int, address: int, n: int, n_all: int, pairs: int) -> int:
        """Return the number of entries in memory, after reading the experts of the first ``n`` of ``n_all`` entries.

        Entries of experts that cannot be read are moved to the end.  Their pairs are not computed, and no caller may
        use them.
        """
        entries, group = _words(address, n_all * ENTRY // 8).reshape(-1, ENTRY // 8), self._groups[number]
        began, self.has_waited = time.perf_counter(), self.has_waited or n > 0
        try:
            failed = self._request(group, entries[:, 0], n)
        except BaseException as error:
            self.error, failed = error, list(range(n))
        self.wait_s += time.perf_counter() - began
        for i in failed:
            _, first_place, count = entries[i].tolist()
            self.failed_tokens += [
                pair // group.routing.k for pair in _words(pairs + 8 * first_place, count).tolist()
            ]
        order = [i for i in range(n) if i not in failed] + failed
        entries[:n] = entries[order]
        return n - len(failed)

    def _request(self, group: ExpertGroup, experts: NDArray[np.int64], n: int) -> list[int]:
        """Wait for the first ``n`` experts, and return the entries that failed.

        Also requests the following experts, the layer's other matrices and, if all experts are needed, the next
        layer's.
        """
        needed = (group.first + experts[:n]).tolist()
        same = [later for later in self._groups if later.routing is group.routing and later.number > group.number]
        ahead = [group.first + experts[n:], *(later.first + experts for later in same)]
        if self._needs_all:
            last = group.number + len(same)
            ahead += [later.first + np.arange(later.routing.n_experts) for later in self._groups[last + 1 : last + 3]]
        state, queue = self._state, self._queue
        with queue.changed:
            for entry in needed:
                if state[entry] in (ABSENT, FAILED):
                    while (memory := self._take(group.n_bytes, needed)) is None:
                        self._wait_for_memory()
                    self._ask(entry, memory, queue.needed)
                elif state[entry] == PENDING and entry in queue.ahead:
                    queue.ahead.remove(entry)
                    queue.needed.append(entry)
            self._read_ahead(np.concatenate(ahead).tolist(), needed)
            while any(state[entry] == PENDING for entry in needed):
                queue.changed.wait()
            failed = [i for i, entry in enumerate(needed) if state[entry] != HERE]
            for i in failed:
                self.error = self._errors.pop(needed[i], self.error)
        return failed

    def _read_ahead(self, entries: Iterable[int], needed: Sequence[int]) -> None:
        """Request entries while there is memory for them."""
        protected = [*needed, *entries]
        for entry in protected[len(needed) :]:
            if self._state[entry] == ABSENT:
                memory = self._take(self._owner[entry].n_bytes, protected)
                if memory is None:
                    return
                self._ask(entry, memory, self._queue.ahead)

    def _ask(self, entry: int, memory: Bytes, queue: deque[int]) -> None:
        self._memory[entry], self._state[entry] = memory, PENDING
        self.stamps[entry] = self.counts[0]
        queue.append(entry)
        self._queue.changed.notify_all()

    # -- Memory ----------------------------------------------------------------------------------------------------

    def _take(self, n_bytes: int, protected: Sequence[int]) -> Bytes | None:
        """Return memory for an entry, evicting entries outside ``protected`` if necessary; None if impossible."""
        while True:
            if self._n_used + n_bytes <= self.n_bytes:
                try:
                    memory = aligned_zeros(n_bytes, np.uint8)
                    break
                except MemoryError:  # another program took memory that the plan had counted on
                    self.n_bytes = self._n_used
            may_go = self._state == HERE
            may_go[protected] = False
            if not may_go.any():
                return None
            # Long steps need nearly all experts, layer by layer: the most recently used entry is needed again last.
            ages = -self.stamps if self._needs_all else self.stamps
            memory = self._drop(int(np.where(may_go, ages, np.iinfo(np.int64).max).argmin()))
            if len(memory) == n_bytes:
                break
        self._n_used += n_bytes
        return memory

    def _drop(self, entry: int) -> Bytes:
        """Remove an entry from the pool and return its memory."""
        memory, group = self._memory[entry], self._owner[entry]
        assert memory is not None
        for matrices in group.matrices:
            matrices.table[entry - group.first] = 0
        self._memory[entry], self._state[entry] = None, ABSENT
        self._n_used -= len(memory)
        return memory

    def _wait_for_memory(self) -> None:
        """Cancel queued reads, or wait for the reads in progress."""
        if not (self._state == PENDING).any():
            raise NotEnoughMemoryError(
                "memory for experts ran out: close other programs, or use a smaller max_memory"
            )
        if not self._queue.ahead:
            self._queue.changed.wait()
        while self._queue.ahead:
            self._drop(self._queue.ahead.popleft())

    # -- Reading ---------------------------------------------------------------------------------------------------

    def read(self, entry: int) -> None:
        """Read and pack a requested entry.  Called by readers."""
        group, memory = self._owner[entry], self._memory[entry]
        assert memory is not None
        expert, n_read = entry - group.first, 0
        error: BaseException | None = None
        with self._queue.changed:
            if not self._n_reading:
                self._reading_since = time.perf_counter()
            self._n_reading += 1
        addresses = []
        try:
            with process.UnfinishedWork(process.workers):
                stop = 0
                for matrices in group.matrices:
                    start, stop = stop, stop + matrices.n_packed
                    read = partial(self._files[matrices.file.path].read, matrices, expert)
                    matrices.pack(read, self.packer(matrices.format), memory[start:stop])
                    n_read += matrices.file.n_bytes
                    addresses.append(memory[start:].ctypes.data)
        except ScaleRangeError as failure:
            name = group.matrices[len(addresses)].weight.name
            error = ScaleRangeError(f"tensor {name}, expert {expert}: {failure}: load the model with more memory")
        except BaseException as failure:
            error = failure
        with self._queue.changed:
            self._n_reading -= 1
            if not self._n_reading:
                self.read_s += time.perf_counter() - self._reading_since
            self.bytes_read += n_read
            if error is None:
                # The first table is written last: kernels check it to see whether all matrices are in memory.
                for matrices, address in reversed(list(zip(group.matrices, addresses, strict=True))):
                    matrices.table[expert] = address
                self._state[entry] = HERE
            else:
                self._drop(entry)
                self._state[entry], self._errors[entry] = FAILED, error
            self._queue.changed.notify_all()


class _ExpertFile(OpenFile):
    """A file of experts, open for the lifetime of the pool."""

    def read(self, matrices: _Matrices, expert: int, start: int, stop: int) -> Bytes:
        """Return bytes start : stop of an expert's matrix.  Raises GGUFError as `OpenFile.fill` does."""
        data = np.empty(stop - start, np.uint8)
        offset = matrices.file.offset + expert * matrices.stride
        if not start and sys.platform == "linux":  # the system reads the rest while the first piece is packed
            with contextlib.suppress(OSError):  # the read below reports errors of the disk
                os.posix_fadvise(self.file.fileno(), offset, matrices.file.n_bytes, os.POSIX_FADV_WILLNEED)
        self.fill(data, offset + start, f"tensor {matrices.weight.name}, expert {expert}")
        return data


def _first(weight: Weight) -> FileRange:
    file_range = stays_in_file(weight)
    assert file_range is not None
    return file_range


def _words(address: int, n: int) -> NDArray[np.int64]:
    """View memory as int64 numbers."""
    words: Any = (ctypes.c_int64 * n).from_address(address)
    return np.frombuffer(words, np.int64)
