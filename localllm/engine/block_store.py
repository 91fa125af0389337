"""A folder of cached blocks that outlive memory and the process. Any thread may use it.

**Files.** Blocks are records (`localllm.engine.records`) in numbered segments. A segment is only appended to, by the
process that created it. After a crash the last record may be incomplete, and is ignored. Data is checked when it is
read. Damaged blocks, and blocks of removed files, are no longer found.

**Processes.** The process that holds the lock writes. Other processes read the blocks that the folder contained when
they opened it.

**Eviction.** Blocks without a following block are evicted, least recently used first, so common beginnings survive
longest. If the files become too large, the remaining blocks of the segment with the most unused bytes move to the
last segment, and the file is removed. Uses are appended as records without data, so their order survives a restart.

One thread writes, in order. Callers never wait for the disk.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from localllm.engine.records import MAGIC, NO_PARENT, Record, digest, read_data, scan
from localllm.errors import UsageError, path_text
from localllm.files import lock, private_folder, private_opener
from localllm.regular_file import open_regular

#: Part of records that state a use of a block.
USE = 1 << 30

#: Most bytes of data that wait to be written.
MAX_QUEUED = 64 << 20

#: The default size is the smaller one of these bytes and this fraction of the free space.
_DEFAULT_BYTES, _DEFAULT_FRACTION = 4 * 10**9, 0.05

#: Segments of a full store, and bounds of a segment's bytes.
_N_SEGMENTS, _MIN_SEGMENT, _MAX_SEGMENT = 16, 1 << 16, 64 << 20

#: An eviction starts if blocks take the first fraction of the size, and ends at the second.
_FULL, _AFTER_EVICTION = 0.75, 0.7

_SEGMENT_NAME = re.compile(r"(\d{9})\.blocks")


@dataclass(eq=False)
class _Segment:
    path: Path
    size: int = 0  # bytes of the file
    n_live: int = 0  # bytes of records in ``parts``
    parts: dict[tuple[StoredBlock, int], None] = field(default_factory=dict)


class _Place(NamedTuple):
    segment: _Segment
    record: Record


class StoredBlock:
    """A block in the store."""

    __slots__ = ("children", "digest", "ids", "parent", "parts", "used")

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.ids = b""  # int64 [n_tokens], or the label of a root; empty if only blocks after it are stored
        self.parent: StoredBlock | None = None  # None for roots
        self.children: dict[bytes, StoredBlock] = {}  # blocks that follow, by their ids
        self.parts: dict[int, _Place] = {}
        self.used = 0  # number of the last use

    def n_bytes(self, part: int) -> int:
        place = self.parts.get(part)
        return 0 if place is None else place.record.n_bytes


class RootSize(NamedTuple):
    """The blocks with one label."""

    label: str
    n_tokens: int
    n_bytes: int
    used_at: float  # Unix time at which the last of their segments was written


class BlockStore:
    """Blocks in the files of a folder. See the module."""

    def __init__(self, folder: Path, max_bytes: int | None = None, *, reads_only: bool = False) -> None:
        """Open a folder, and read its index in another thread; until then `is_ready` is False.

        Args:
            max_bytes: most bytes of all files; None: 4 GB, or 5% of the free space if that is less.
            reads_only: take no lock, and change nothing.

        Raises:
            UsageError: the folder cannot be created, or is a file.
        """
        self.folder, self.n_users, self.is_ready = folder, 1, False
        self._notice, self._has_reported_damage = "", False
        self._lock = threading.RLock()
        self._nodes: dict[bytes, StoredBlock] = {}  # least recently used first
        self._segments: dict[int, _Segment] = {}
        self._file: BinaryIO | None = None  # the last segment, if this process appends to it
        self._queued: set[tuple[bytes, int]] = set()  # parts that wait to be written
        self._n_queued = self._n_uses = 0
        self._callbacks: list[Callable[[], object]] = []  # waiting for the index, or for room in the queue
        self._lock_file: BinaryIO | None = None
        # False if another process writes, or after an error
        self.is_writable = not reads_only and self._claim()
        self.max_bytes = default_bytes(folder) if max_bytes is None else max_bytes
        self._writer = ThreadPoolExecutor(1, "localllm-cache-writer")
        self._readers = ThreadPoolExecutor(2, "localllm-cache-reader")
        self._submit(self._open)

    # -- Blocks ----------------------------------------------------------------------------------------------------

    def get(self, key: bytes) -> StoredBlock | None:
        """Return the block with this digest."""
        return self._nodes.get(key)

    def has(self, key: bytes, part: int) -> bool:
        """Return whether a part is stored or waits to be written."""
        with self._lock:
            node = self._nodes.get(key)
            return (node is not None and part in node.parts) or (key, part) in self._queued

    def children(self, node: StoredBlock | None) -> list[StoredBlock]:
        with self._lock:
            return [] if node is None else list(node.children.values())

    @property
    def has_room(self) -> bool:
        """True if the folder is writable and the queue is not full."""
        return self.is_writable and self._n_queued < MAX_QUEUED

    def call_when_ready(self, callback: Callable[[], object]) -> None:
        """Call a function once, from any thread, when the index is read and the queue has room."""
        with self._lock:
            self._callbacks.append(callback)
        self._call_back()

    def put(self, parent: bytes, ids: bytes, part: int, data: bytes = b"") -> None:
        """Store a part of a block. Returns at once; another thread writes the data."""
        with self._lock:
            self._queued.add((digest(parent, ids), part))
            self._n_queued += len(data)
        self._submit(self._write, parent, ids, part, data)

    def use(self, node: StoredBlock) -> None:
        """Record a use of a block."""
        with self._lock:
            self._touch(node)
            parent = NO_PARENT if node.parent is None else node.parent.digest
        if self.is_writable:
            self._submit(self._write, parent, node.ids, USE, b"")

    def read(self, node: StoredBlock, part: int) -> Future[bytes | None]:
        """Read a part in another thread. The result is None if the part is damaged or was removed."""
        try:
            return self._readers.submit(self._read, node, part)
        except RuntimeError:  # the process is ending, and its threads have stopped
            future: Future[bytes | None] = Future()
            future.set_result(self._read(node, part))
            return future

    def take_notice(self) -> str:
        """Return the last problem with the folder, for the user. Empty if it was taken before."""
        notice, self._notice = self._notice, ""
        return notice

    def flush(self) -> None:
        """Wait until everything is written."""
        with contextlib.suppress(RuntimeError):  # the process is ending: nothing waits
            self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """End this user's use of the store. After the last one, write what waits, and release the folder."""
        with _shared_lock:
            self.n_users -= 1
            if self.n_users:
                return
            if _shared.get((os.getpid(), self.folder)) is self:
                del _shared[os.getpid(), self.folder]
            self._readers.shutdown(cancel_futures=True)
            self._writer.shutdown()
            self._stop_writing()
            if self._lock_file is not None:
                self._lock_file.close()

    def clear(self) -> None:
        """Remove all blocks and their files."""
        self.flush()
        with self._lock:
            self._nodes.clear()
            self._finish_segment()
            for number in list(self._segments):
                self._remove(number)

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(segment.size for segment in list(self._segments.values()))

    def sizes(self) -> list[RootSize]:
        """Return the roots with the sum of their blocks, least recently used first."""
        sizes = []
        with self._lock:
            for root in [node for node in self._nodes.values() if node.parent is None and node.ids]:
                nodes, n_tokens, n_bytes, used_at = [root], 0, 0, 0.0
                for node in nodes:
                    nodes += node.children.values()
                    n_tokens += len(node.ids) // 8 if node is not root else 0
                    for segment, record in node.parts.values():
                        n_bytes += record.size
                        with contextlib.suppress(OSError):
                            used_at = max(used_at, segment.path.stat().st_mtime)
                sizes.append(RootSize(root.ids.decode(errors="replace"), n_tokens, n_bytes, used_at))
        return sorted(sizes, key=lambda size: size.used_at)

    # -- Opening ---------------------------------------------------------------------------------------------------

    def _claim(self) -> bool:
        """Create and lock the folder. Return whether this process may write."""
        try:
            self._notice = private_folder(self.folder) or ""
            self._lock_file = open(self.folder / "lock", "ab", opener=private_opener)  # noqa: SIM115
        except OSError as error:
            if not self.folder.is_dir():
                raise UsageError(
                    f"the folder of the prompt cache {path_text(self.folder)} cannot be created ({error.strerror}): "
                    "name another folder"
                ) from None
            why = f"the folder is not writable ({error.strerror})"
        else:
            try:
                lock(self._lock_file.fileno())
                return True
            except (BlockingIOError, PermissionError):
                why = "another program writes to it"
            except OSError:  # a file system without locks
                return True
        self._notice = f"prompts are read from {path_text(self.folder)}, but new ones are not stored there: {why}"
        return False

    def _open(self) -> None:
        """Read the index of all segments."""
        with contextlib.suppress(OSError):
            for path in sorted(self.folder.iterdir()):
                if match := _SEGMENT_NAME.fullmatch(path.name):
                    self._open_segment(int(match[1]), path)
        with self._lock:
            for node in list(self._nodes.values()):
                # The blocks before it, or all blocks after a root, are missing.
                if node.parent is None and not (node.ids and node.children):
                    self._drop(node)
            for number in [number for number, segment in self._segments.items() if not segment.parts]:
                self._remove(number)
            self.is_ready = True
        self._call_back()

    def _open_segment(self, number: int, path: Path) -> None:
        segment = _Segment(path)
        # ValueError: another version, or a record that a crash cut off
        with contextlib.suppress(OSError, ValueError), open_regular(path) as file:
            segment.size = os.fstat(file.fileno()).st_size
            for record in scan(file):
                with self._lock:
                    self._add(record, segment)
        self._segments[number] = segment

    # -- The index. Callers hold the lock. -------------------------------------------------------------------------

    def _add(self, record: Record, segment: _Segment) -> None:
        key = digest(record.parent, record.ids)
        if record.part == USE:
            if key in self._nodes:
                self._touch(self._nodes[key])
            return
        node = self._nodes.setdefault(key, StoredBlock(key))
        node.ids = record.ids
        if node.parent is None and record.parent != NO_PARENT:
            node.parent = self._nodes.setdefault(record.parent, StoredBlock(record.parent))
            node.parent.children[record.ids] = node
        is_moved = record.part in node.parts
        self._lose(node, record.part)
        node.parts[record.part] = _Place(segment, record)
        segment.parts[node, record.part] = None
        segment.n_live += record.size
        if not is_moved:
            self._touch(node)

    def _touch(self, node: StoredBlock) -> None:
        self._n_uses += 1
        node.used = self._n_uses
        if self._nodes.pop(node.digest, None) is not None:
            self._nodes[node.digest] = node

    def _lose(self, node: StoredBlock, part: int) -> None:
        if (place := node.parts.pop(part, None)) is not None:
            del place.segment.parts[node, part]
            place.segment.n_live -= place.record.size

    def _drop(self, node: StoredBlock) -> None:
        """Remove a block, and all blocks after it, from the index."""
        nodes = [node]
        for dropped in nodes:
            nodes += dropped.children.values()
            for part in list(dropped.parts):
                self._lose(dropped, part)
            self._nodes.pop(dropped.digest, None)
        if node.parent is not None:
            node.parent.children.pop(node.ids, None)

    def _remove(self, number: int) -> None:
        segment = self._segments.pop(number)
        if self.is_writable:
            with contextlib.suppress(OSError):
                segment.path.unlink()

    # -- Reading ---------------------------------------------------------------------------------------------------

    def _read(self, node: StoredBlock, part: int) -> bytes | None:
        while (place := node.parts.get(part)) is not None:
            try:
                with open_regular(place.segment.path) as file:
                    return read_data(file, place.record)
            except (OSError, ValueError, MemoryError) as error:
                with self._lock:
                    if node.parts.get(part) is not place:  # moved to another segment
                        continue
                    self._lose(node, part)
                # A process that only reads does not know what another one has evicted.
                if not self._has_reported_damage and (self.is_writable or not isinstance(error, FileNotFoundError)):
                    self._has_reported_damage = True
                    self._notice = (
                        f"files of the prompt cache {path_text(self.folder)} are damaged or missing: prompts in them "
                        "are evaluated again"
                    )
        return None

    # -- Writing, in the writer's thread ---------------------------------------------------------------------------

    def _submit(self, work: Callable[..., None], *args: bytes | int) -> None:
        try:
            self._writer.submit(work, *args)
        except RuntimeError:  # the process is ending, and its threads have stopped
            work(*args)

    def _call_back(self) -> None:
        with self._lock:
            if not (self.is_ready and self._n_queued < MAX_QUEUED):
                return
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def _write(self, parent: bytes, ids: bytes, part: int, data: bytes) -> None:
        key = digest(parent, ids)
        try:
            node = self._nodes.get(key)
            is_new = node is None or part not in node.parts
            if is_new and self.is_writable and 4 * len(data) < self.max_bytes:
                self._make_room(len(data))
                self._append(parent, ids, part, data)
        except OSError as error:
            self._notice = (
                f"new prompts are no longer stored in {path_text(self.folder)} ({error.strerror or error}): free "
                "space on the disk or check the folder, then restart"
            )
            self._stop_writing()
        finally:
            with self._lock:
                self._queued.discard((key, part))
                self._n_queued -= len(data)
            self._call_back()

    def _append(self, parent: bytes, ids: bytes, part: int, data: bytes) -> None:
        if self._file is None or self._segments[max(self._segments)].size >= self._segment_bytes:
            self._begin_segment()
        assert self._file is not None
        segment = self._segments[max(self._segments)]
        record = Record.of(parent, ids, part, data, segment.size)
        try:
            _write_all(self._file, record.head)
            _write_all(self._file, data)
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(segment.size)
            raise
        with self._lock:
            segment.size += record.size
            self._add(record, segment)

    @property
    def _segment_bytes(self) -> int:
        return min(max(self.max_bytes // _N_SEGMENTS, _MIN_SEGMENT), _MAX_SEGMENT)

    def _begin_segment(self) -> None:
        self._finish_segment()
        number = max(self._segments, default=0) + 1
        path = self.folder / f"{number:09}.blocks"
        self._file = open(path, "xb", buffering=0, opener=private_opener)  # noqa: SIM115
        _write_all(self._file, MAGIC)
        self._segments[number] = _Segment(path, len(MAGIC))

    def _finish_segment(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def _stop_writing(self) -> None:
        self._finish_segment()
        self.is_writable = False

    def _make_room(self, n_bytes: int) -> None:
        """Evict blocks and remove segments until there is room for a record with this amount of data."""
        limit = self.max_bytes - self._segment_bytes
        if self.n_bytes + n_bytes <= limit:
            return
        n_live = sum(segment.n_live for segment in self._segments.values())
        if n_live + n_bytes > _FULL * limit:
            self._evict(n_live + n_bytes - int(_AFTER_EVICTION * limit))
        self._finish_segment()
        while self.n_bytes + n_bytes > limit:
            is_open = self._file is not None
            closed = sorted(self._segments)[: -1 if is_open else None]
            if not closed:
                break
            self._compact(max(closed, key=lambda number: self._segments[number].size - self._segments[number].n_live))

    def _evict(self, n_bytes: int) -> None:
        """Remove blocks from the index until records of at least ``n_bytes`` are gone."""
        for oldest in list(self._nodes.values()):
            node: StoredBlock | None = oldest
            while n_bytes > 0 and node is not None and self._is_leaf(node):
                with self._lock:
                    n_bytes -= sum(place.record.size for place in node.parts.values())
                    self._drop(node)
                # The block before it comes next, unless it was used later.
                node = node.parent if node.parent is not None and node.parent.used <= node.used else None

    def _is_leaf(self, node: StoredBlock) -> bool:
        """Return whether a block is in the index, is no root, and no block follows it."""
        return not (node.children or (node.parent is None and node.ids)) and node.digest in self._nodes

    def _compact(self, number: int) -> None:
        """Move the remaining blocks of a segment to the last segment, and remove the file."""
        segment = self._segments[number]
        for node, part in list(segment.parts):
            record = node.parts[part].record
            if (data := self._read(node, part)) is not None:
                self._append(record.parent, record.ids, part, data)
        with self._lock:
            self._remove(number)


def _write_all(file: BinaryIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def default_bytes(folder: Path) -> int:
    """Return the default size of a store in a folder: 4 GB, or 5% of the free space if that is less."""
    try:
        free = shutil.disk_usage(folder).free + sum(path.stat().st_size for path in folder.glob("*.blocks"))
    except OSError:
        return _DEFAULT_BYTES
    return min(_DEFAULT_BYTES, int(_DEFAULT_FRACTION * free))


#: Stores of this process by process id and folder, which models share.
_shared: dict[tuple[int, Path], BlockStore] = {}
_shared_lock = threading.Lock()


def open_store(folder: Path, max_bytes: int | None) -> BlockStore:
    """Return the store of a folder, shared with other models of this process. Call `BlockStore.close` after use."""
    folder = folder.absolute()
    with _shared_lock:
        store = _shared.get((os.getpid(), folder))
        if store is None:
            store = _shared[os.getpid(), folder] = BlockStore(folder, max_bytes)
        else:
            store.n_users += 1
        return store
