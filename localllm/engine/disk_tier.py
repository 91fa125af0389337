"""The tier of the cache on disk: stores new blocks, and restores blocks for prompts. Only the engine thread uses it.

New blocks are copied between two steps, a few megabytes at a time. The store writes the copies in its own thread. A
request whose prompt continues in the store waits while blocks are read, which other requests do not notice: blocks
are read in other threads, and written to pages between two steps. The request then starts like any other request, and
finds the blocks in memory. If reading would take longer than evaluating the tokens, the request does not wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from localllm.engine.block_store import BlockStore, StoredBlock
from localllm.engine.cache import BYTES_AT_ONCE, RESERVED_SHARE, PagedCache, common_prefix
from localllm.engine.records import (
    MEDIA_LABEL,
    MEDIA_ROOT,
    NO_PARENT,
    digest,
    ids_bytes,
    ids_of,
    pack_embeddings,
    unpack_embeddings,
)
from localllm.engine.request import Request
from localllm.engine.scheduler import StepTimes
from localllm.engine.snapshots import NONE, Block

#: Most bytes that are read ahead of the pages.
_READ_AHEAD = 32 << 20

#: Most blocks after the last full block of a prompt that are compared with the prompt's next tokens.
_MOST_CHILDREN = 256

#: Rates before the first measurement: bytes per second of the store, and seconds per prompt token.
_READ_RATE, _TOKEN_S = 500e6, 1e-3
#: Weight of one measurement, and the bytes that make one.
_WEIGHT, _MEASURED_BYTES = 0.5, 1 << 20


@dataclass
class _Level:
    """A block of a prompt: in memory, in the store, or both."""

    ids: list[int]
    block: Block | None
    node: StoredBlock | None

    def has_page(self, group: int) -> bool:
        return self.block is not None and self.block.pages[group] != NONE

    def is_stored(self, part: int) -> bool:
        return self.node is not None and part in self.node.parts


@dataclass
class _Restoring:
    """Blocks that are read for a request."""

    request: Request
    parent: Block  # the last restored block
    levels: deque[tuple[_Level, list[int]]]  # with the parts to read
    media: deque[StoredBlock]
    n_bytes: int
    started_at: float = field(default_factory=time.perf_counter)
    uses: list[tuple[Block, int]] = field(default_factory=list)
    n_ahead: int = 0  # bytes that are being read
    # Reads in progress, in order; None: an image
    reads: deque[tuple[_Level | None, StoredBlock, dict[int, Future[bytes | None]]]] = field(default_factory=deque)


class DiskTier:
    """See the module."""

    def __init__(
        self,
        store: BlockStore,
        cache: PagedCache,
        label_of: Callable[[Hashable], str | None],
        step_times: StepTimes,
        wake: Callable[[], object],
    ) -> None:
        """
        Args:
            label_of: returns the label of a tree's root (`localllm.engine.records`).
            step_times: seconds per prompt token, as measured.
            wake: called from any thread when `advance` has work again.
        """
        self.n_restored = 0  # tokens
        self._store, self._cache, self._step_times, self._wake = store, cache, step_times, wake
        self._label_of = label_of
        self._new: list[Request] = []
        self._queue: list[Request] = []  # requests that wait for blocks
        self._restoring: _Restoring | None = None
        self._read_rate = _READ_RATE  # bytes per second
        self._is_waiting = False  # True if the store will call ``wake``
        cache.store_changes(self._key_of)

    def add(self, request: Request) -> None:
        """Let a new request wait if its prompt continues in the store."""
        request.is_restoring = True
        self._new.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended."""
        if self._restoring is not None and self._restoring.request is request:
            self._finish()
        for requests in (self._new, self._queue):
            if request in requests:
                requests.remove(request)

    def advance(self, *, is_alone: bool) -> bool:
        """Copy some blocks. Return whether more can be copied at once.

        ``is_alone``: no request runs, so that restoring may take longer.
        """
        is_busy = self._store_changes()
        if not (self._new or self._queue or self._restoring):
            return is_busy
        if not self._store.is_ready:
            self._wait()
            return is_busy
        self._start()
        if self._restoring is not None:
            is_busy |= self._restore(self._restoring, is_alone=is_alone)
        return is_busy

    def _start(self) -> None:
        """Admit new requests whose prompts do not continue in the store, and start to restore blocks for the next."""
        for request in self._new:
            request.is_restoring = self._plan(request) is not None
        self._queue += [request for request in self._new if request.is_restoring]
        self._new.clear()
        while self._queue and self._restoring is None:
            request = self._queue.pop(0)
            self._restoring = self._plan(request)  # another request may have restored its blocks
            request.is_restoring = self._restoring is not None

    def take_notice(self) -> str:
        return self._store.take_notice()

    def close(self) -> None:
        """Store all remaining blocks, wait until they are written, and close the store."""
        while self._store.is_writable and (self._cache.changed or self._cache.embeddings.changed):
            if not self._store_changes():
                self._store.flush()
        self._store.close()

    def _wait(self) -> None:
        """Call ``wake`` when the index is read, and the store has room again."""

        def wake() -> None:
            self._is_waiting = False
            self._wake()

        if not self._is_waiting:
            self._is_waiting = True
            self._store.call_when_ready(wake)

    def _key_of(self, tree: Hashable) -> bytes | None:
        if (text := self._label_of(tree)) is None:
            return None
        label = text.encode()
        self._put(NO_PARENT, label, 0, bytes)
        return digest(NO_PARENT, label)

    # -- Storing ---------------------------------------------------------------------------------------------------

    def _store_changes(self) -> bool:
        """Copy some new blocks and embeddings. Return whether more can be copied at once."""
        changed, media, n_bytes = self._cache.changed, self._cache.embeddings.changed, 0
        if not changed and not media:
            return False
        if not self._store.is_writable:
            changed.clear()
            media.clear()
            return False
        while changed or media:
            if not self._store.has_room:
                self._wait()
                return False
            if n_bytes >= BYTES_AT_ONCE:
                return True
            if changed:
                block = next(iter(changed))
                del changed[block]
                n_bytes += self._store_block(block)
            else:
                key, embeddings = media.popitem()
                self._put(NO_PARENT, MEDIA_LABEL, 0, bytes)
                n_bytes += self._put(MEDIA_ROOT, key, 0, partial(pack_embeddings, embeddings))
        return False

    def _store_block(self, block: Block) -> int:
        """Store the missing parts of a block, and of missing blocks before it. Return the number of bytes."""
        if not self._cache.holds(block):
            return 0
        blocks = [block]
        while (parent := blocks[-1].parent) is not None and parent.key is not None and parent.parent is not None:
            if self._store.has(parent.key, 0):
                break
            blocks.append(parent)
        n_bytes = 0
        for block in reversed(blocks):
            assert block.parent is not None
            assert block.parent.key is not None
            ids = ids_bytes(block.ids)
            n_bytes += sum(self._put(block.parent.key, ids, *part) for part in self._cache.parts_of(block))
        return n_bytes

    def _put(self, parent: bytes, ids: bytes, part: int, data: Callable[[], bytes]) -> int:
        if self._store.has(digest(parent, ids), part):
            return 0
        self._store.put(parent, ids, part, copied := data())
        return len(copied)

    # -- Restoring -------------------------------------------------------------------------------------------------

    def _plan(self, request: Request) -> _Restoring | None:
        """Return the blocks to restore for a request. None if memory has the same tokens, or reading is slower."""
        root = self._cache.root_of(request.tree)
        ids = request.tokens[: request.n_reusable]
        n_tokens, needed = (0, []) if root.key is None else self._best_end(root, ids)
        media = [
            node
            for key in dict.fromkeys(request.media_key(span.media) for span in request.media.of(n_tokens, len(ids)))
            if key not in self._cache.embeddings and (node := self._store.get(digest(MEDIA_ROOT, key))) is not None
        ]
        for node in media:
            self._store.use(node)
        n_bytes = sum(0 if level.node is None else sum(map(level.node.n_bytes, parts)) for level, parts in needed)
        n_new = n_tokens - self._cache.n_usable(ids, request.tree) if n_bytes else 0
        if n_bytes > n_new * (self._step_times.token_s or _TOKEN_S) * self._read_rate:
            needed, n_bytes = [], 0
        if not n_bytes and not media:
            return None
        return _Restoring(request, root, deque(needed), deque(media), n_bytes)

    def _best_end(self, root: Block, ids: list[int]) -> tuple[int, list[tuple[_Level, list[int]]]]:
        """Return the longest prefix that can be restored, in tokens, and its blocks with the parts to read."""
        size, levels = self._cache.page_size, list(self._path(root, ids))
        if (last := next((level.node for level in reversed(levels) if level.node is not None), None)) is not None:
            self._store.use(last)
        for i in range(len(levels), -1, -1):
            before = levels[:i]
            parent = before[-1] if before else _Level([], root, self._store.get(root.key or b""))
            rest = ids[i * size : (i + 1) * size]
            children = [*levels[i : i + 1], *self._children(parent)]
            ends = [(n, child) for child in children for n in self._ends(child, common_prefix(child.ids, rest))]
            for n, level in sorted(ends, key=lambda end: -end[0]):
                path, needed = [*before, level], list[tuple[_Level, list[int]]]()
                for j in reversed(range(len(path))):  # missing parts are likely to be near the end
                    if (parts := self._needed(path, j, i * size + n)) is None:
                        break
                    needed.append((path[j], parts))
                else:
                    return i * size + n, needed[::-1]
        return 0, []

    def _path(self, root: Block, ids: list[int]) -> Iterator[_Level]:
        """Yield the full blocks of a prompt that are in memory or in the store."""
        size, key, data = self._cache.page_size, root.key, ids_bytes(ids)
        block: Block | None = root
        assert key is not None
        for first in range(0, len(ids) - size + 1, size):
            tokens = ids[first : first + size]
            key = digest(key, data[8 * first : 8 * (first + size)])
            block = None if block is None else block.children.get(tuple(tokens))
            level = _Level(tokens, block, self._store.get(key))
            if not (level.has_page(0) or level.is_stored(0)):
                return
            yield level

    def _children(self, level: _Level) -> list[_Level]:
        """Return the blocks that follow a block, in memory or among the newest in the store."""
        levels: dict[tuple[int, ...], _Level] = {}
        if level.block is not None:
            for block in (*level.block.tails, *level.block.children.values()):
                levels[tuple(block.ids)] = _Level(block.ids, block, None)
        for node in self._store.children(level.node)[-_MOST_CHILDREN:]:
            if 0 in node.parts:
                ids = ids_of(node.ids)
                levels.setdefault(tuple(ids), _Level(ids, None, None)).node = node
        return list(levels.values())

    def _ends(self, level: _Level, most: int) -> list[int]:
        """Return lengths of prefixes of a block, at most ``most`` tokens, that a sequence can start with."""
        if not self._cache.has_states:
            return [most] if most else []
        in_memory = [] if level.block is None else level.block.snapshots
        stored = [] if level.node is None else [-part for part in list(level.node.parts) if part < 0]
        return [n for n in {*in_memory, *stored} if n <= most]

    def _needed(self, path: list[_Level], i: int, n_tokens: int) -> list[int] | None:
        """Return the parts to read of block ``i`` for a sequence of ``n_tokens``. None if a part is missing."""
        level, parts = path[i], list[int]()
        for group, first in enumerate(self._cache.first_blocks(n_tokens)):
            if i >= first and not level.has_page(group):
                parts.append(group)
        n = n_tokens - i * self._cache.page_size
        if self._cache.has_states and i == len(path) - 1 and (level.block is None or n not in level.block.snapshots):
            parts.append(-n)
        return parts if all(map(level.is_stored, parts)) else None

    def _restore(self, restoring: _Restoring, *, is_alone: bool) -> bool:
        """Write blocks that have been read to pages. Return whether more can be written at once."""
        cache, n_bytes = self._cache, 0
        while True:
            self._read_ahead(restoring)
            if not restoring.reads:
                self._measure(restoring)
                self._finish()
                return True
            level, node, reads = restoring.reads[0]
            if not all(read.done() for read in reads.values()):
                return False
            restoring.reads.popleft()
            parts = {part: read.result() for part, read in reads.items()}
            n_read = sum(len(data or b"") for data in parts.values())
            restoring.n_ahead -= n_read
            data = {part: data for part, data in parts.items() if data is not None}
            try:
                if len(data) < len(parts):
                    raise ValueError("a part is damaged")
                if level is None:
                    cache.embeddings.put(node.ids, unpack_embeddings(data[0]), is_new=False)
                else:
                    self._restore_level(restoring, level, data, is_alone=is_alone)
            except ValueError:  # damaged, removed, or no page is available: evaluated instead
                restoring.levels.clear()
                restoring.reads = deque(read for read in restoring.reads if read[0] is None)
            n_bytes += n_read
            if n_bytes >= (_READ_AHEAD if is_alone else BYTES_AT_ONCE):
                return True

    def _restore_level(self, restoring: _Restoring, level: _Level, data: dict[int, bytes], *, is_alone: bool) -> None:
        reserve = 0.0 if is_alone else RESERVED_SHARE
        block = self._cache.restore(
            restoring.parent, level.ids, data, restoring.uses, reserve=reserve, replaces_snapshots=True
        )
        if block is None:
            raise ValueError("no page is available")
        if 0 in data:
            self.n_restored += len(level.ids)
            restoring.request.n_restored += len(level.ids)
        restoring.parent = block

    def _read_ahead(self, restoring: _Restoring) -> None:
        """Start to read the next blocks."""
        while restoring.n_ahead < _READ_AHEAD and (restoring.levels or restoring.media):
            if restoring.levels:
                level, parts = restoring.levels.popleft()
                node = level.node
            else:
                level, parts, node = None, [0], restoring.media.popleft()
            reads = {} if node is None else {part: self._store.read(node, part) for part in parts}
            for part, read in reads.items():
                restoring.n_ahead += 0 if node is None else node.n_bytes(part)
                read.add_done_callback(lambda _: self._wake())
            restoring.reads.append((level, node or StoredBlock(b""), reads))

    def _measure(self, restoring: _Restoring) -> None:
        if restoring.n_bytes >= _MEASURED_BYTES:
            rate = restoring.n_bytes / max(1e-6, time.perf_counter() - restoring.started_at)
            self._read_rate += _WEIGHT * (rate - self._read_rate)

    def _finish(self) -> None:
        restoring, self._restoring = self._restoring, None
        assert restoring is not None
        self._cache.restored(restoring.uses)
        restoring.request.is_restoring = False
