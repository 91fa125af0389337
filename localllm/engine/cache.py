"""The paged cache: which pages and states hold which tokens, and what a new prompt finds there.

Keys and values lie in pages of a fixed number of tokens (`localllm.kernels.backend.Cache`).  A sequence has a block
table, the pages that hold its tokens in order.  A full page is entered into a tree: its parent is the page before
it, its key the tokens that it holds.  So a prompt that begins like an earlier one finds those pages by one hash
look-up a page, however many sequences the cache has seen, and shares them; of the first page that differs it copies
the part that is the same (copy on write).  Nobody writes to a page that another sequence can see.

Pages that no sequence uses keep their tokens until a page is needed: the least recently used goes first, and of a
sequence its end before its beginning, so that common beginnings stay longest.

**Windows.**  Layers of one window form a group with pages of its own (`localllm.kernels.graph.Graph.windows`), so a
node of the tree, a `Block`, has a page in each group.  One that is behind a sequence's window is not in use any more.
It is kept for others until a page is needed; then the block goes on without it.  What a sequence has left behind goes
first, but for what is before the end of its prompt.  A sequence can begin where the windows before it are whole.

**Recurrent states** cannot be cut back at a token.  A sequence has them in a slot of its own, and copies of them,
**snapshots**, are kept in other slots with the block and the number of its tokens that they belong to: every
`SNAPSHOT_TOKENS` of a prompt, before its last token, and at the end of a sequence.  A sequence can begin where there
is a snapshot.  The least recently used goes first.

Source: Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention (arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from weakref import WeakValueDictionary

from localllm.engine.pictures import PictureCache
from localllm.engine.snapshots import NONE, Block, Snapshots
from localllm.kernels.backend import Cache

#: Tokens of a prompt from one snapshot of recurrent states to the next: a multiple of the pages' tokens.
SNAPSHOT_TOKENS = 512


class CachedSequence:
    """Tokens whose keys and values are in the cache.  Only `PagedCache` changes it."""

    def __init__(self, n_groups: int, n_prompt: int, root: Block) -> None:
        self.root = root  # what the tree of all that it can share begins with
        self.ids: list[int] = []  # the tokens, from position 0 on
        # the block table of each group: position p lies in ``pages[group][p // page_size]``.  They may reach past the
        # tokens; what is behind a window is 0.
        self.pages: list[list[int]] = [[] for _ in range(n_groups)]
        self.blocks: list[Block] = []  # what is known of those pages
        self.first = [0] * n_groups  # of each group the first block whose page it holds; it holds all from there on
        self.n_prompt = n_prompt  # tokens that it was begun for
        # saved: the slot of those that it can go back to
        self.state = self.saved = NONE  # the slot of its recurrent states, if there are any
        self.is_ahead = False  # whether its states may have seen tokens that were not recorded

    def __len__(self) -> int:
        return len(self.ids)


class PagedCache:
    """The pages and slots of a backend's cache, and what they hold.  Used by one thread."""

    def __init__(self, storage: Cache) -> None:
        self.storage = storage  # the backend's cache
        self.page_size = storage.page_size  # tokens in a page
        self.n_pages = storage.n_pages[0]  # those of all tokens, which are group 0
        self._windows = [(group, window) for group, window in enumerate(storage.windows) if window is not None]
        self._free = [list(range(n - 1, -1, -1)) for n in storage.n_pages]
        #: Of each group blocks whose page no sequence uses, those first that go first.
        self._unused: list[dict[Block, None]] = [{} for _ in storage.n_pages]
        #: The same of pages that sequences have left behind: all of them go before those.
        self._out_of_window: list[dict[Block, None]] = [{} for _ in storage.n_pages]
        self._states = Snapshots(storage)
        self.pictures = PictureCache()  # embeddings of pictures, for what is not in the pages
        # One slot is left for what only lasts a step.
        # how many there can be at a time, beside as many as there are pages for
        self.max_sequences = max(1, storage.n_states - 1) if storage.n_states else self.n_pages
        self.root = Block([])  # what the tree of tokens begins with, of sequences without adapters
        #: Adapters change keys and values: what was evaluated with others cannot be shared.  Weak, as requests may
        #: name any scales: a root goes with the last of its blocks.
        self._roots: WeakValueDictionary[tuple[float, ...], Block] = WeakValueDictionary()
        self._roots[()] = self.root

    @property
    def n_available(self) -> int:
        """Pages that no sequence uses."""
        return self._n_available(0)

    @property
    def has_states(self) -> bool:
        """Whether sequences have recurrent states: what was evaluated cannot be taken back, but by `rollback`."""
        return self._states.is_needed

    @property
    def has_slot(self) -> bool:
        """Whether there is a slot for the states of a new sequence, if it needs one."""
        return not self.has_states or self._states.has_slot

    # -- Sequences -------------------------------------------------------------------------------------------------

    def begin(self, ids: Sequence[int], adapters: tuple[float, ...] = ()) -> CachedSequence:
        """A sequence with as much of the beginning of ``ids`` as the cache has with the same adapters."""
        sequence = CachedSequence(len(self._free), len(ids), self._root_of(adapters))
        for blocks, n in self._beginnings(sequence, ids):
            if self._holds_windows(blocks, n) and self._begin_with(sequence, blocks, list(ids[:n])):
                return sequence
        if self.has_states:
            sequence.state = self._states.take()
        return sequence

    def extend(self, sequence: CachedSequence, ids: Sequence[int]) -> None:
        """Continues a sequence, which ``ids`` begin with, by full pages of ``ids`` that the cache has."""
        found = self._find_full(sequence, ids)
        blocks = [*sequence.blocks[: len(sequence) // self.page_size], *found]
        while found:
            n = len(blocks) * self.page_size
            if self.page_size in self._ends(found[-1], self.page_size) and self._holds_windows(blocks, n):
                self._share(sequence, found, list(ids[:n]))
                if self.has_states:
                    sequence.state = self._states.load(found[-1], self.page_size, sequence.state)
                return
            found.pop()
            blocks.pop()

    def n_pages_to_begin(self, ids: Sequence[int], n_tokens: int, adapters: tuple[float, ...] = ()) -> int:
        """Available pages that a new sequence of ``n_tokens`` takes, if it shares what the cache has of ``ids``."""
        found = self._find_full(CachedSequence(0, 0, self._root_of(adapters)), ids)
        return -(-n_tokens // self.page_size) - sum(block.n_users[0] > 0 for block in found)

    def has_windows_for(self, lengths: Iterable[int], n_new: int) -> bool:
        """Whether there are pages for the windows of sequences of so many tokens, and for those that a step adds."""
        needed = [-(-n // self.page_size) for n in lengths] if self._windows else []
        n_step = -(-n_new // self.page_size)
        return all(
            sum(min(n, n_window_pages(window, self.page_size)) for n in needed) + n_step
            <= self.storage.n_pages[group]
            for group, window in self._windows
        )

    def next_page_key(self, sequence: CachedSequence, ids: Sequence[int]) -> tuple[Block, tuple[int, ...]] | None:
        """The key of the page that the sequence's next token goes to, or of those up to the next snapshot; None if
        ``ids`` do not fill them."""
        n = SNAPSHOT_TOKENS if self.has_states else self.page_size
        start = len(sequence) // n * n
        tokens = tuple(ids[start : start + n])
        if len(tokens) < n:
            return None
        return self._block_before(sequence, start // self.page_size), tokens

    def n_to_snapshot(self, sequence: CachedSequence, n_tokens: int) -> int:
        """How many of the sequence's next ``n_tokens`` to evaluate at once, so that no snapshot is missed."""
        n = len(sequence)
        if not self.has_states or n >= sequence.n_prompt:
            return n_tokens
        return min(n_tokens, sequence.n_prompt - n, SNAPSHOT_TOKENS - n % SNAPSHOT_TOKENS)

    def n_pages_missing(self, sequence: CachedSequence, n_tokens: int) -> int:
        """Pages that the sequence's next ``n_tokens`` take beyond those that it has."""
        return max(0, -(-(len(sequence) + n_tokens) // self.page_size) - len(sequence.blocks))

    def reserve(self, sequence: CachedSequence, n_tokens: int) -> bool:
        """Gives the sequence pages for its next ``n_tokens``; if there are too few, changes nothing: False."""
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
        """Records tokens that were evaluated in the pages that `reserve` gave: with states, all of them."""
        done = 0
        while done < len(ids):
            i, n = divmod(len(sequence), self.page_size)
            part = ids[done : done + self.page_size - n]
            sequence.blocks[i].ids += part
            sequence.ids += part
            done += len(part)
            if n + len(part) == self.page_size:
                self._insert(sequence, i)
        for group, window in self._windows:
            self._release_window(sequence, group, window, self._first_seen(len(sequence), window))
        if self.has_states and ids:
            self._snapshot_states(sequence)

    def save(self, sequence: CachedSequence) -> bool:
        """Keeps the states of a sequence, as what it evaluates next may be wrong; False if there is no slot for them.

        Without states there is no need: pages may hold more than was recorded.
        """
        if self.has_states:
            if not self._states.has_slot:
                return False
            sequence.saved = self._states.copy(sequence.state)
        return True

    def rollback(self, sequence: CachedSequence) -> None:
        """Takes back what was evaluated since `save`."""
        if sequence.saved != NONE:
            self._states.free(sequence.state)
            sequence.state, sequence.saved, sequence.is_ahead = sequence.saved, NONE, False

    def release(self, sequence: CachedSequence) -> None:
        """Ends the use of a sequence.  Its tokens stay in the cache until their pages are needed."""
        if sequence.is_ahead:
            self.rollback(sequence)
        if sequence.is_ahead or not sequence.ids:
            self._states.free(sequence.state)
        elif self.has_states:
            self._states.keep(*self._end_of(sequence), sequence.state)
        self._states.free(sequence.saved)
        sequence.state = sequence.saved = NONE
        self._drop_blocks(sequence, 0)
        sequence.ids = []

    def forget(self) -> None:
        """Drops all tokens that no sequence uses."""
        while self._unused[0]:
            self._free[0].append(self._evict(0))
        self.pictures.clear()

    # -- Saving and restoring (`localllm.engine.saved_prompts`) -----------------------------------------------------

    def blocks(self) -> list[Block]:
        """All that the tree holds without adapters: parents before children, the most recently used first."""
        used, below = [], [self.root]
        while below:
            found = [child for child in below.pop().children.values() if child.n_users[0]]
            used += found
            below += found
        known, blocks = {self.root}, []
        for block in (*used, *reversed(self._unused[0])):
            if block.parent in known:
                known.add(block)
                blocks.append(block)
        return blocks

    def holds(self, block: Block) -> bool:
        """Whether the tree still has a block that `blocks` gave."""
        parent = block.parent
        return parent is not None and (parent.children.get(tuple(block.ids)) is block or block in parent.tails)

    def restore(
        self,
        parent: Block,
        ids: list[int],
        pages: Mapping[int, bytes],
        snapshots: Mapping[int, bytes],
        *,
        left: float = 0.0,
    ) -> Block | None:
        """Puts a block with what its pages held behind another, or takes the one that is there; None if there is no
        room.  It is in use until `restored`.  ``left``: the part of the pages that stays available."""
        groups = range(len(self._free))
        is_page = 0 < len(ids) <= self.page_size and len(parent.ids) in (0, self.page_size)
        fits = all(group in groups and len(data) == self.storage.n_bytes_of(group) for group, data in pages.items())
        if not (is_page and 0 in pages and fits):
            raise ValueError("no page of this cache")
        if any(len(data) != self.storage.n_bytes_of(None) for data in snapshots.values()):
            raise ValueError("no recurrent states of this cache")
        is_full = len(ids) == self.page_size
        known = parent.children.get(tuple(ids)) or next((tail for tail in parent.tails if tail.ids == ids), None)
        if known is not None:
            for group in groups:
                if known.pages[group] != NONE:
                    self._use(known, group)
            return known
        if any(self._n_available(group) <= left * self.storage.n_pages[group] for group in pages):
            return None
        block = Block([self._take_page(group) if group in pages else NONE for group in groups])
        block.n_users = [int(group in pages) for group in groups]
        block.ids, block.parent = ids, parent
        for group, data in pages.items():
            self.storage.write(group, block.pages[group], data)
        if is_full:
            parent.children[tuple(ids)] = block
        else:
            parent.tails.append(block)
        for n, data in snapshots.items():
            if self.has_states and 0 < n <= len(ids) and self._states.has_free:
                slot = self._states.take()
                self.storage.write(None, slot, data)
                self._states.keep(block, n, slot)
        return block

    def restored(self, blocks: Sequence[Block]) -> None:
        """Ends the use of blocks that `restore` gave, which are the first to go from the last to the first."""
        for block in reversed(blocks):
            for group, page in enumerate(block.pages):
                if page != NONE:
                    self._stop_using(block, group, self._unused[group])

    # -- Finding ---------------------------------------------------------------------------------------------------

    def _find_full(self, sequence: CachedSequence, ids: Sequence[int]) -> list[Block]:
        """The full pages of ``ids`` that the cache has behind those of a sequence that it begins with."""
        size, n = self.page_size, len(sequence) // self.page_size
        block = self._block_before(sequence, n)
        found = []
        while len(key := tuple(ids[n * size : (n + 1) * size])) == size and (child := block.children.get(key)):
            found.append(child)
            block, n = child, n + 1
        return found

    def _block_before(self, sequence: CachedSequence, i: int) -> Block:
        return sequence.blocks[i - 1] if i else sequence.root

    def _root_of(self, adapters: tuple[float, ...]) -> Block:
        return self._roots.setdefault(adapters, Block([]))

    def _end_of(self, sequence: CachedSequence) -> tuple[Block, int]:
        """The block that the last token is in, and the tokens up to it there."""
        i, n = divmod(len(sequence) - 1, self.page_size)
        return sequence.blocks[i], n + 1

    def _beginnings(self, sequence: CachedSequence, ids: Sequence[int]) -> Iterator[tuple[list[Block], int]]:
        """Where a sequence that begins like ``ids`` can go on, the farthest first: the blocks before, and how many
        tokens."""
        size, full = self.page_size, self._find_full(sequence, ids)
        for i in range(len(full), -1, -1):
            if i < len(full) and size in self._ends(full[i], size):
                yield full[: i + 1], (i + 1) * size
            parent, wanted = full[i - 1] if i else sequence.root, ids[i * size : (i + 1) * size]
            parts = [(common_prefix(each.ids, wanted), each) for each in (*parent.tails, *parent.children.values())]
            ends = [(n, block) for most, block in parts for n in self._ends(block, most) if n < size]
            for n, block in sorted(ends, key=lambda end: -end[0]):
                yield [*full[:i], block], i * size + n

    def _ends(self, block: Block, most: int) -> list[int]:
        """After how many of its first tokens, at most so many, a sequence can go on."""
        if self.has_states:
            return [n for n in block.snapshots if n <= most]
        return [most] if most else []

    def _first_seen(self, n_tokens: int, window: int) -> int:
        """The number of the first block that the token behind ``n_tokens`` sees."""
        return max(0, n_tokens + 1 - window) // self.page_size

    def _seen(self, n_tokens: int) -> list[int]:
        """The same of each group."""
        return [0 if window is None else self._first_seen(n_tokens, window) for window in self.storage.windows]

    def _holds_windows(self, blocks: Sequence[Block], n_tokens: int) -> bool:
        """Whether the token behind ``n_tokens`` sees all of its windows in their blocks."""
        seen = self._seen(n_tokens)
        return all(block.pages[group] != NONE for group, _ in self._windows for block in blocks[seen[group] :])

    # -- Blocks of sequences ---------------------------------------------------------------------------------------

    def _begin_with(self, sequence: CachedSequence, blocks: list[Block], ids: list[int]) -> bool:
        """Begins a sequence with ``ids``, which blocks hold; False if there is no page for a copy of the last one, of
        which it needs a part."""
        last, n = blocks[-1], len(ids) - (len(blocks) - 1) * self.page_size
        is_part = n < len(last.ids)
        for group, start in enumerate(self._seen(len(ids)) if is_part else ()):
            # No page that is shared or copied is to be taken for the copy.
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

    def _share(self, sequence: CachedSequence, found: list[Block], ids: list[int]) -> None:
        """Puts blocks in the place of those of a sequence that are not full; so it gets to ``ids``."""
        first = len(sequence) // self.page_size
        for block in sequence.blocks[first:]:
            block.ids = []  # the pages found hold the same, and more
            self._states.move(block, found[0])
        self._drop_blocks(sequence, first)
        seen = self._seen(len(ids))
        for group, window in self._windows:
            self._release_window(sequence, group, window, min(first, seen[group]))
        sequence.blocks += found
        for group, start in enumerate(seen):
            n_behind = max(0, start - first)
            for block in found[n_behind:]:
                self._use(block, group)
            sequence.pages[group] += [0] * n_behind + [block.pages[group] for block in found[n_behind:]]
        sequence.first, sequence.ids = seen, ids

    def _release_window(self, sequence: CachedSequence, group: int, window: int, stop: int) -> None:
        """Gives back the pages before block ``stop``, behind the sequence's window."""
        n_prompt = sequence.n_prompt
        for i in range(sequence.first[group], stop):
            # Where the prompt ends, others are likely to branch off.
            is_near = self._first_seen(n_prompt, window) <= i < -(-n_prompt // self.page_size)
            self._stop_using(sequence.blocks[i], group, (self._unused if is_near else self._out_of_window)[group])
            sequence.pages[group][i] = 0
        sequence.first[group] = stop

    def _insert(self, sequence: CachedSequence, i: int) -> None:
        """Puts a full block into the tree; where an equal one is there already, the sequence goes on with that."""
        block, parent = sequence.blocks[i], self._block_before(sequence, i)
        known = parent.children.setdefault(tuple(block.ids), block)
        if known is block:
            block.parent = parent
            return
        for group, page in enumerate(block.pages):
            if known.pages[group] == NONE:
                known.pages[group], known.n_users[group] = page, 1
            else:
                self._use(known, group)
                self._free[group].append(page)
            sequence.pages[group][i] = known.pages[group]
        self._states.move(block, known)
        sequence.blocks[i] = known

    def _drop_blocks(self, sequence: CachedSequence, first: int) -> None:
        """Takes blocks from the end of a sequence: the last one becomes the first to be evicted."""
        blocks = sequence.blocks
        while len(blocks) > first and not blocks[-1].ids:
            for free, page in zip(self._free, blocks.pop().pages, strict=True):
                free.append(page)
        if len(blocks) > first and len(blocks[-1].ids) < self.page_size:
            blocks[-1].parent = self._block_before(sequence, len(blocks) - 1)
            blocks[-1].parent.tails.append(blocks[-1])
        for group, held in enumerate(sequence.first):
            for block in reversed(blocks[max(first, held) :]):
                self._stop_using(block, group, self._unused[group])
        del blocks[first:]
        for table in sequence.pages:
            del table[first:]

    def _snapshot_states(self, sequence: CachedSequence) -> None:
        """After all that was evaluated was recorded: perhaps takes a snapshot."""
        self._states.free(sequence.saved)
        sequence.saved, sequence.is_ahead = NONE, False
        n = len(sequence)
        if n == sequence.n_prompt or (n < sequence.n_prompt and n % SNAPSHOT_TOKENS == 0):
            block, place = self._end_of(sequence)
            if place not in block.snapshots and self._states.has_slot:
                self._states.keep(block, place, self._states.copy(sequence.state))

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
        """Takes a block from those whose page no sequence uses."""
        unused = self._unused[group]
        del (unused if block in unused else self._out_of_window[group])[block]

    def _new_block(self) -> Block:
        return Block([self._take_page(group) for group in range(len(self._free))])

    def _take_page(self, group: int) -> int:
        free = self._free[group]
        return free.pop() if free else self._evict(group)

    def _evict(self, group: int) -> int:
        """The page of the block that goes first: in group 0 one that no other follows, as those go before it."""
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
        for other, _ in self._windows:
            if block.pages[other] != NONE:
                self._remove(block, other)
                self._free[other].append(block.pages[other])
        for n in list(block.snapshots):
            self._states.drop(block, n)
        return page


def n_window_pages(window: int, page_size: int) -> int:
    """Pages at most that hold the tokens which one sees in a window, itself included."""
    return -(-(window - 1) // page_size) + 1


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens a and b have in common at their beginning."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))
