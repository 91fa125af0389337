"""The paged KV cache: assigns pages and state slots to sequences, and finds cached prefixes of new prompts.

Keys and values are stored in pages of a fixed number of tokens (`localllm.kernels.backend.Cache`). The block table of
a sequence lists its pages in order. Full pages are nodes of a prefix tree. The parent of a page is the preceding page
and its key is the tuple of its tokens, so finding a cached prefix costs one hash lookup per page, however many
sequences are cached. Sequences share the full pages of a common prefix. If a page matches only in part, the matching
part is copied (copy on write). A shared page is never written.

Unused pages keep their tokens until a page is needed. Eviction is least recently used. Within a sequence the last
page is evicted first, so common prefixes survive longest.

**Windows.** Layers with the same attention window form a group with its own pages
(`localllm.kernels.graph.Graph.windows`). A tree node (`Block`) contains one page per group. A page that has left a
sequence's window is no longer used. It stays cached for other sequences until a page is needed; the block then
continues without that page. Such pages are evicted first, except those next to the end of the prompt. A sequence can
start at a position whose preceding windows are completely cached.

**Recurrent states** cannot be truncated to an earlier token. Each sequence has a slot for its states. Copies of
states, **snapshots**, are stored in other slots, together with the block and the number of its tokens that they
include. Snapshots are taken every `SNAPSHOT_TOKENS` of a prompt, where the next prompt of a chat most likely differs
(`Request.branch_point`), and at the end of a sequence.
A sequence can start only at a snapshot. Eviction is least recently used.

Source: Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention (arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple
from weakref import WeakValueDictionary

from localllm.engine.media import EmbeddingCache
from localllm.engine.records import digest, ids_bytes
from localllm.engine.snapshots import NONE, Block, Snapshots
from localllm.kernels.backend import Cache

#: Prompt tokens between snapshots of recurrent states: a multiple of the page size.
SNAPSHOT_TOKENS = 512

#: Most bytes copied to or from pages between two steps: a few milliseconds.
BYTES_AT_ONCE = 4 << 20
#: Fraction of the pages that stay available to running requests while blocks are restored.
RESERVED_SHARE = 1 / 8


class Launched(NamedTuple):
    """The row of a batch that was launched ahead for the next token of a sequence."""

    batch: int  # id of the batch
    row: int
    position: int
    token: int  # chosen on the device


class CachedSequence:
    """Tokens whose keys and values are in the cache. Only `PagedCache` changes ``ids``, pages and states."""

    def __init__(self, n_groups: int, branch_point: int, root: Block) -> None:
        self.root = root  # root of the prefix tree that it shares
        self.ids: list[int] = []  # tokens from position 0
        # Block table per group: position p is in ``pages[group][p // page_size]``. Tables may include reserved pages
        # after the last token. Pages that left a window are 0.
        self.pages: list[list[int]] = [[] for _ in range(n_groups)]
        self.blocks: list[Block] = []
        self.first = [0] * n_groups  # per group: index of the first block whose page is in use
        self.branch_point = branch_point  # number of tokens that later sequences most likely share
        # Slots of the current recurrent states and of the states saved for a rollback
        self.state = self.saved = NONE
        self.is_ahead = False  # True if the states may include unrecorded tokens
        self.launched: Launched | None = None  # the last batch that `ModelRunner` launched ahead

    def __len__(self) -> int:
        return len(self.ids)


class PagedCache:
    """Pages and state slots of a backend's cache, and their contents. Not thread-safe."""

    def __init__(self, storage: Cache) -> None:
        self.storage = storage
        self.page_size = storage.page_size  # tokens per page
        self._n_bytes_of = cache(storage.n_bytes_of)  # bytes of a page or slot
        self.n_pages = storage.n_pages[0]  # pages of group 0, which stores every token
        self._windows = [(group, window) for group, window in enumerate(storage.windows) if window is not None]
        self._free = [list(range(n - 1, -1, -1)) for n in storage.n_pages]
        #: Blocks with an unused page per group, in order of eviction.
        self._unused: list[dict[Block, None]] = [{} for _ in storage.n_pages]
        #: Blocks per group whose page left a window. They are evicted before ``_unused``.
        self._out_of_window: list[dict[Block, None]] = [{} for _ in storage.n_pages]
        self._states = Snapshots(storage)
        self.embeddings = EmbeddingCache()  # of images and audio
        # Maximum of sequences. One state slot is reserved for copies within a step. Without states only the
        # number of pages limits the sequences.
        self.max_sequences = max(1, storage.n_states - 1) if storage.n_states else self.n_pages
        self.root = Block([])  # root of the prefix tree of requests without adapters and edits
        #: Prefix tree per `Request.tree`, for example per adapter scales, because adapters change keys and values.
        #: Weak, because scales are arbitrary numbers of requests: a root disappears with the last of its blocks.
        self._roots: WeakValueDictionary[Hashable, Block] = WeakValueDictionary()
        self._roots[()] = self.root
        self._key_of: Callable[[Hashable], bytes | None] | None = None
        #: Blocks with pages or snapshots that a `DiskTier` has not seen yet, parents before children.
        self.changed: dict[Block, None] = {}

    def store_changes(self, key_of: Callable[[Hashable], bytes | None]) -> None:
        """Add new blocks to ``changed`` from now on.

        ``key_of`` returns the key of a tree's root; None if the tree is not stored.
        """
        self._key_of, self.root.key = key_of, key_of(())
        self.embeddings.stores_changes = True

    @property
    def n_available(self) -> int:
        """Number of pages that no sequence uses."""
        return self._n_available(0)

    @property
    def has_states(self) -> bool:
        """True if sequences have recurrent states, which only `rollback` can restore to an earlier position."""
        return self._states.is_needed

    @property
    def has_slot(self) -> bool:
        """False if a new sequence needs a state slot and none is available."""
        return not self.has_states or self._states.has_slot

    # -- Sequences -------------------------------------------------------------------------------------------------

    def begin(
        self,
        ids: Sequence[int],
        tree: Hashable = (),
        *,
        branch_point: int | None = None,
        shareable: bool = True,
    ) -> CachedSequence:
        """Return a new sequence with the longest usable prefix of ``ids`` that is cached in the same tree.

        Args:
            branch_point: the number of tokens that later sequences most likely share; defaults to all.
            shareable: if False, the sequence starts empty, and other sequences do not reuse its tokens.
        """
        root = self.root_of(tree) if shareable else Block([])
        sequence = CachedSequence(len(self._free), len(ids) if branch_point is None else branch_point, root)
        for blocks, n in self._beginnings(sequence, ids):
            if self.holds_windows(blocks, n) and self._begin_with(sequence, blocks, list(ids[:n])):
                return sequence
        if self.has_states:
            sequence.state = self._states.take()
        return sequence

    def n_usable(self, ids: Sequence[int], tree: Hashable) -> int:
        """Return the length of the longest prefix of ``ids`` that `begin` can find."""
        prefixes = self._beginnings(CachedSequence(len(self._free), len(ids), self.root_of(tree)), ids)
        return next((n for blocks, n in prefixes if self.holds_windows(blocks, n)), 0)

    def extend(self, sequence: CachedSequence, ids: Sequence[int]) -> None:
        """Extend a sequence by cached full pages of ``ids``. ``ids`` starts with the sequence's tokens."""
        cached = self._find_full(sequence, ids)
        blocks = [*sequence.blocks[: len(sequence) // self.page_size], *cached]
        while cached:
            n = len(blocks) * self.page_size
            if self.page_size in self._ends(cached[-1], self.page_size) and self.holds_windows(blocks, n):
                self._share(sequence, cached, list(ids[:n]))
                if self.has_states:
                    sequence.state = self._states.load(cached[-1], self.page_size, sequence.state)
                return
            cached.pop()
            blocks.pop()

    def n_pages_to_begin(self, ids: Sequence[int], n_tokens: int, tree: Hashable = ()) -> int:
        """Return the number of available pages for a new sequence of ``n_tokens``.

        Cached pages of ``ids`` that other sequences use are shared and not counted.
        """
        cached = self._find_full(CachedSequence(0, 0, self.root_of(tree)), ids)
        return -(-n_tokens // self.page_size) - sum(block.n_users[0] > 0 for block in cached)

    def has_windows_for(self, lengths: Iterable[int], n_new: int) -> bool:
        """Return whether the window groups have enough pages for sequences of these lengths and ``n_new`` tokens."""
        needed = [-(-n // self.page_size) for n in lengths] if self._windows else []
        n_step = -(-n_new // self.page_size)
        return all(
            sum(min(n, n_window_pages(window, self.page_size)) for n in needed) + n_step
            <= self.storage.n_pages[group]
            for group, window in self._windows
        )

    def next_page_key(self, sequence: CachedSequence, ids: Sequence[int]) -> tuple[Block, tuple[int, ...]] | None:
        """Return the key of the page of the sequence's next token; with states, of the pages up to the next snapshot.

        None if ``ids`` does not fill them.
        """
        n = SNAPSHOT_TOKENS if self.has_states else self.page_size
        start = len(sequence) // n * n
        tokens = tuple(ids[start : start + n])
        if len(tokens) < n:
            return None
        return self._block_before(sequence, start // self.page_size), tokens

    def n_to_snapshot(self, sequence: CachedSequence, n_tokens: int) -> int:
        """Return the number of next tokens to evaluate in one step, at most ``n_tokens``, to stop at a snapshot."""
        n = len(sequence)
        if not self.has_states or n >= sequence.branch_point:
            return n_tokens
        return min(n_tokens, sequence.branch_point - n, SNAPSHOT_TOKENS - n % SNAPSHOT_TOKENS)

    def n_pages_missing(self, sequence: CachedSequence, n_tokens: int) -> int:
        """Return the number of additional pages for the next ``n_tokens``."""
        return max(0, -(-(len(sequence) + n_tokens) // self.page_size) - len(sequence.blocks))

    def reserve(self, sequence: CachedSequence, n_tokens: int) -> bool:
        """Allocate pages for the next ``n_tokens``. Return False, without a change, if too few are available."""
        n_missing = self.n_pages_missing(sequence, n_tokens)
        if any(n_missing > self._n_available(group) for group in range(len(self._free))):
            return False
        for _ in range(n_missing):
            block = self._new_block()
            sequence.blocks.append(block)
            for table, page in zip(sequence.pages, block.pages, strict=True):
                table.append(page)
        return True

    def append(self, sequence: CachedSequence, ids: Sequence[int]) -> None:
        """Record evaluated tokens in reserved pages. With recurrent states, ``ids`` must be all evaluated tokens."""
        n_done = 0
        while n_done < len(ids):
            i, n = divmod(len(sequence), self.page_size)
            chunk = ids[n_done : n_done + self.page_size - n]
            sequence.blocks[i].ids += chunk
            sequence.ids += chunk
            n_done += len(chunk)
            if n + len(chunk) == self.page_size:
                self._insert(sequence, i)
        for group, window in self._windows:
            self._release_window(sequence, group, window, self._first_seen(len(sequence), window))
        if self.has_states and ids:
            self._snapshot_states(sequence)

    def save(self, sequence: CachedSequence) -> bool:
        """Save the states of a sequence before uncertain tokens are evaluated. Return False if no slot is available.

        Does nothing without states, because pages may hold unrecorded tokens.
        """
        if self.has_states:
            if not self._states.has_slot:
                return False
            sequence.saved = self._states.copy(sequence.state)
        return True

    def rollback(self, sequence: CachedSequence) -> None:
        """Restore the states of the last `save`."""
        if sequence.saved != NONE:
            self._states.free(sequence.state)
            sequence.state, sequence.saved, sequence.is_ahead = sequence.saved, NONE, False

    def release(self, sequence: CachedSequence) -> None:
        """End the use of a sequence. Its tokens stay cached until their pages are needed."""
        if sequence.is_ahead:
            self.rollback(sequence)
        if sequence.is_ahead or not sequence.ids:
            self._states.free(sequence.state)
        elif self.has_states:
            block, n = self._end_of(sequence)
            self._states.keep(block, n, sequence.state)
            self._mark(block)
        self._states.free(sequence.saved)
        sequence.state = sequence.saved = NONE
        self._drop_blocks(sequence, 0)
        sequence.ids = []

    def forget(self) -> None:
        """Remove all tokens that no sequence uses."""
        while self._unused[0]:
            self._free[0].append(self._evict(0))
        self.embeddings.clear()

    # -- Saving and restoring (`localllm.engine.saved_prompts`) -----------------------------------------------------

    def blocks(self) -> list[Block]:
        """Return all blocks of the tree without adapters and edits: parents before children, recently used first."""
        used, below = [], [self.root]
        while below:
            children = [child for child in below.pop().children.values() if child.n_users[0]]
            used += children
            below += children
        reachable, blocks = {self.root}, []
        for block in (*used, *reversed(self._unused[0])):
            if block.parent in reachable:
                reachable.add(block)
                blocks.append(block)
        return blocks

    def holds(self, block: Block) -> bool:
        """Return whether a block from `blocks` is still in the tree."""
        parent = block.parent
        return parent is not None and (parent.children.get(tuple(block.ids)) is block or block in parent.tails)

    def parts_of(self, block: Block) -> Iterator[tuple[int, Callable[[], bytes]]]:
        """Yield number and reader of each part of a block, as in `restore`."""
        for group, page in enumerate(block.pages):
            if page != NONE:
                yield group, partial(self.storage.read, group, page)
        for n, slot in sorted(block.snapshots.items()):
            yield -n, partial(self.storage.read, None, slot)

    def restore(
        self,
        parent: Block,
        ids: list[int],
        parts: Mapping[int, bytes],
        uses: list[tuple[Block, int]],
        *,
        reserve: float = 0.0,
        replaces_snapshots: bool = False,
    ) -> Block | None:
        """Return the child of ``parent`` with these tokens, after adding the ``parts`` that it lacks.

        Pages in use are added to ``uses`` as (block, group), until `restored`. ``parent`` must be in use.

        Args:
            parts: bytes of pages by group, and of snapshots by -n for a snapshot after n tokens.
            reserve: fraction of the pages that must stay available.
            replaces_snapshots: whether a snapshot may take the slot of an older one.

        Returns:
            None if the block is not in the tree and has no page in ``parts``, or no page is available.

        Raises:
            ValueError: the sizes of the data do not match the cache.
        """
        self._check_parts(parent, ids, parts)
        block = parent.children.get(tuple(ids)) or next((tail for tail in parent.tails if tail.ids == ids), None)
        new = [group for group in sorted(parts) if group >= 0 and (block is None or block.pages[group] == NONE)]
        if (block is None and 0 not in parts) or any(
            self._n_available(group) <= reserve * self.storage.n_pages[group] for group in new
        ):
            return None
        if block is None:
            block = Block([NONE] * len(self._free))
            block.n_users, block.ids = [0] * len(self._free), ids
            self._join(block, parent)
        for group, page in enumerate(block.pages):
            if page != NONE:
                self._use(block, group)
                uses.append((block, group))
        for group in new:
            block.pages[group], block.n_users[group] = self._take_page(group), 1
            self.storage.write(group, block.pages[group], parts[group])
            uses.append((block, group))
        for part, data in parts.items():
            has_slot = self._states.has_slot if replaces_snapshots else self._states.has_free
            if part < 0 and -part not in block.snapshots and has_slot:
                slot = self._states.take()
                self.storage.write(None, slot, data)
                self._states.keep(block, -part, slot)
        return block

    def restored(self, uses: Iterable[tuple[Block, int]]) -> None:
        """End the uses of `restore`. Later blocks are evicted first."""
        for block, group in reversed(list(uses)):
            self._stop_using(block, group, self._unused[group])

    def _check_parts(self, parent: Block, ids: list[int], parts: Mapping[int, bytes]) -> None:
        if not 0 < len(ids) <= self.page_size or len(parent.ids) not in (0, self.page_size):
            raise ValueError("the saved page does not fit this cache: its number of tokens differs")
        for part, data in parts.items():
            is_state = self.has_states and 0 < -part <= len(ids)
            if not (is_state or 0 <= part < len(self._free)):
                raise ValueError("the saved page does not fit this cache: its groups or recurrent states differ")
            if len(data) != self._n_bytes_of(None if is_state else part):
                raise ValueError("the saved page does not fit this cache: its number of bytes differs")

    # -- Finding ---------------------------------------------------------------------------------------------------

    def _find_full(self, sequence: CachedSequence, ids: Sequence[int]) -> list[Block]:
        """Return cached full pages of ``ids`` after the full pages of a sequence. ``ids`` starts with its tokens."""
        size, n = self.page_size, len(sequence) // self.page_size
        block = self._block_before(sequence, n)
        blocks = []
        while len(key := tuple(ids[n * size : (n + 1) * size])) == size and (child := block.children.get(key)):
            blocks.append(child)
            block, n = child, n + 1
        return blocks

    def _block_before(self, sequence: CachedSequence, i: int) -> Block:
        return sequence.blocks[i - 1] if i else sequence.root

    def root_of(self, tree: Hashable) -> Block:
        """Return the root of a tree (`Request.tree`)."""
        root = self._roots.get(tree)
        if root is None:
            root = self._roots[tree] = Block([])
            root.key = None if self._key_of is None else self._key_of(tree)
        return root

    def _join(self, block: Block, parent: Block) -> None:
        """Add a block with its final tokens to the tree."""
        block.parent = parent
        if len(block.ids) == self.page_size:
            parent.children[tuple(block.ids)] = block
        else:
            parent.tails.append(block)
        if parent.key is not None:
            block.key = digest(parent.key, ids_bytes(block.ids))

    def _mark(self, block: Block) -> None:
        """Note new pages or snapshots of a block."""
        if block.key is not None:
            self.changed[block] = None

    def _end_of(self, sequence: CachedSequence) -> tuple[Block, int]:
        """Return the block of the last token, and the number of its tokens up to that one."""
        i, n = divmod(len(sequence) - 1, self.page_size)
        return sequence.blocks[i], n + 1

    def _beginnings(self, sequence: CachedSequence, ids: Sequence[int]) -> Iterator[tuple[list[Block], int]]:
        """Yield (blocks, n_tokens) of cached prefixes of ``ids`` that a sequence can start with, longest first."""
        size, full = self.page_size, self._find_full(sequence, ids)
        for i in range(len(full), -1, -1):
            if i < len(full) and size in self._ends(full[i], size):
                yield full[: i + 1], (i + 1) * size
            parent, tokens = full[i - 1] if i else sequence.root, ids[i * size : (i + 1) * size]
            candidates = [
                (common_prefix(block.ids, tokens), block) for block in (*parent.tails, *parent.children.values())
            ]
            ends = [(n, block) for most, block in candidates for n in self._ends(block, most) if n < size]
            for n, block in sorted(ends, key=lambda end: -end[0]):
                yield [*full[:i], block], i * size + n

    def _ends(self, block: Block, most: int) -> list[int]:
        """Return lengths of prefixes of a block, at most ``most`` tokens, that a sequence can start with."""
        if self.has_states:
            return [n for n in block.snapshots if n <= most]
        return [most] if most else []

    def _first_seen(self, n_tokens: int, window: int) -> int:
        """Return the index of the first block in the window of the token at position ``n_tokens``."""
        return max(0, n_tokens + 1 - window) // self.page_size

    def first_blocks(self, n_tokens: int) -> list[int]:
        """Return the index of the first block in the window of the token at position ``n_tokens``, by group."""
        return [0 if window is None else self._first_seen(n_tokens, window) for window in self.storage.windows]

    def holds_windows(self, blocks: Sequence[Block], n_tokens: int) -> bool:
        """Return whether all windows of the token at position ``n_tokens`` are cached."""
        first_blocks = self.first_blocks(n_tokens)
        return all(
            block.pages[group] != NONE for group, _ in self._windows for block in blocks[first_blocks[group] :]
        )

    # -- Blocks of sequences ---------------------------------------------------------------------------------------

    def _begin_with(self, sequence: CachedSequence, blocks: list[Block], ids: list[int]) -> bool:
        """Start a sequence with ``ids``, which are in ``blocks``.

        If the sequence needs only the first tokens of the last block, they are copied. Return False if there is no
        page for the copy.
        """
        last, n = blocks[-1], len(ids) - (len(blocks) - 1) * self.page_size
        is_part = n < len(last.ids)
        for group, start in enumerate(self.first_blocks(len(ids)) if is_part else ()):
            # The copy must not evict a page that is shared or copied here.
            if self._n_available(group) <= sum(not block.n_users[group] for block in blocks[start:]):
                return False
        self._share(sequence, blocks, ids)
        if is_part:
            copied = self._new_block()
            copied.ids = last.ids[:n]
            for group, page in enumerate(copied.pages):
                self.storage.copy(group, last.pages[group], page)
                self._stop_using(last, group, self._unused[group])
                sequence.pages[group][-1] = page
            sequence.blocks[-1] = copied
        elif n < self.page_size:
            self._block_before(sequence, len(blocks) - 1).tails.remove(last)
        if self.has_states:
            sequence.state = self._states.load(last, n, NONE)
        return True

    def _share(self, sequence: CachedSequence, blocks: list[Block], ids: list[int]) -> None:
        """Replace the sequence's blocks after its full ones by ``blocks``; its tokens are then ``ids``."""
        first = len(sequence) // self.page_size
        for block in sequence.blocks[first:]:
            block.ids = []  # ``blocks`` includes these tokens
            self._move_snapshots(block, blocks[0])
        self._drop_blocks(sequence, first)
        first_blocks = self.first_blocks(len(ids))
        for group, window in self._windows:
            self._release_window(sequence, group, window, min(first, first_blocks[group]))
        sequence.blocks += blocks
        for group, start in enumerate(first_blocks):
            n_behind = max(0, start - first)
            for block in blocks[n_behind:]:
                self._use(block, group)
            sequence.pages[group] += [0] * n_behind + [block.pages[group] for block in blocks[n_behind:]]
        sequence.first, sequence.ids = first_blocks, ids

    def _release_window(self, sequence: CachedSequence, group: int, window: int, stop: int) -> None:
        """Release the pages before block ``stop``, which have left the sequence's window."""
        branch_point = sequence.branch_point
        for i in range(sequence.first[group], stop):
            is_near = self._first_seen(branch_point, window) <= i < -(-branch_point // self.page_size)
            self._stop_using(sequence.blocks[i], group, (self._unused if is_near else self._out_of_window)[group])
            sequence.pages[group][i] = 0
        sequence.first[group] = stop

    def _insert(self, sequence: CachedSequence, i: int) -> None:
        """Add a full block to the tree. If the tree has an equal block, the sequence uses that one instead."""
        block, parent = sequence.blocks[i], self._block_before(sequence, i)
        cached = parent.children.get(tuple(block.ids))
        if cached is None:
            self._join(block, parent)
            self._mark(block)
            return
        for group, page in enumerate(block.pages):
            if cached.pages[group] == NONE:
                cached.pages[group], cached.n_users[group] = page, 1
            else:
                self._use(cached, group)
                self._free[group].append(page)
            sequence.pages[group][i] = cached.pages[group]
        self._move_snapshots(block, cached)
        sequence.blocks[i] = cached

    def _move_snapshots(self, source: Block, target: Block) -> None:
        if source.snapshots:
            self._states.move(source, target)
            self._mark(target)

    def _drop_blocks(self, sequence: CachedSequence, first: int) -> None:
        """Remove blocks from the end of a sequence; the last block becomes the first to be evicted."""
        blocks = sequence.blocks
        while len(blocks) > first and not blocks[-1].ids:
            for free, page in zip(self._free, blocks.pop().pages, strict=True):
                free.append(page)
        if len(blocks) > first and len(blocks[-1].ids) < self.page_size:
            self._join(blocks[-1], self._block_before(sequence, len(blocks) - 1))
            self._mark(blocks[-1])
        for group, first_used in enumerate(sequence.first):
            for block in reversed(blocks[max(first, first_used) :]):
                self._stop_using(block, group, self._unused[group])
        del blocks[first:]
        for table in sequence.pages:
            del table[first:]

    def _snapshot_states(self, sequence: CachedSequence) -> None:
        """Free the saved states, and take a snapshot if one is due. Called when all evaluated tokens are recorded."""
        self._states.free(sequence.saved)
        sequence.saved, sequence.is_ahead = NONE, False
        n = len(sequence)
        if n == sequence.branch_point or (n < sequence.branch_point and n % SNAPSHOT_TOKENS == 0):
            block, n_in_block = self._end_of(sequence)
            if n_in_block not in block.snapshots and self._states.has_slot:
                self._states.keep(block, n_in_block, self._states.copy(sequence.state))
                self._mark(block)

    # -- Pages -----------------------------------------------------------------------------------------------------

    def _n_available(self, group: int) -> int:
        return len(self._free[group]) + len(self._unused[group]) + len(self._out_of_window[group])

    def _use(self, block: Block, group: int) -> None:
        if not block.n_users[group]:
            self._remove(block, group)
        block.n_users[group] += 1

    def _stop_using(self, block: Block, group: int, unused: dict[Block, None]) -> None:
        block.n_users[group] -= 1
        if not block.n_users[group]:
            unused[block] = None

    def _remove(self, block: Block, group: int) -> None:
        """Remove a block from the blocks with an unused page."""
        unused = self._unused[group]
        del (unused if block in unused else self._out_of_window[group])[block]

    def _new_block(self) -> Block:
        return Block([self._take_page(group) for group in range(len(self._free))])

    def _take_page(self, group: int) -> int:
        free = self._free[group]
        return free.pop() if free else self._evict(group)

    def _evict(self, group: int) -> int:
        """Evict the next block and return its page. In group 0 children are always evicted before their parent."""
        block = next(iter(self._out_of_window[group] or self._unused[group]))
        self._remove(block, group)
        page = block.pages[group]
        if group:
            block.pages[group] = NONE
            return page
        assert block.parent is not None
        if len(block.ids) < self.page_size:
            block.parent.tails.remove(block)
        else:
            del block.parent.children[tuple(block.ids)]
        for other_group, _ in self._windows:
            if block.pages[other_group] != NONE:
                self._remove(block, other_group)
                self._free[other_group].append(block.pages[other_group])
        for n in list(block.snapshots):
            self._states.drop(block, n)
        return page


def n_window_pages(window: int, page_size: int) -> int:
    """Return the largest number of pages that hold the tokens in a window."""
    return -(-(window - 1) // page_size) + 1


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of ``a`` and ``b``."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))
