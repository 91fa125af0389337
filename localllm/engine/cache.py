"""The paged KV cache: which page holds which tokens, and what a new prompt finds there.

Keys and values lie in pages of a fixed number of tokens (`localllm.kernels.backend.Cache`).  A sequence has a block
table, the pages that hold its tokens in order.  A full page is entered into a tree: its parent is the page before
it, its key the tokens that it holds.  So a prompt that begins like an earlier one finds those pages by one hash
look-up a page, however many sequences the cache has seen, and shares them; of the first page that differs it copies
the part that is the same (copy on write).  Nobody writes to a page that another sequence can see.

Pages that no sequence uses keep their tokens until a page is needed: the least recently used goes first, and of a
sequence its end before its beginning, so that common beginnings stay longest.

Source: Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention (arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import Sequence

from localllm.kernels.backend import Cache


class Block:
    """A page, and the tokens whose keys and values it holds.

    Attributes:
        page: its number.
        ids: the tokens, at most a page of them.
        parent: the block before it, once this one is in the tree.
        n_users: sequences that hold it.
        children: full blocks that follow it, by their tokens.
        tails: blocks that follow it, are not full, and belong to no sequence any more.
    """

    __slots__ = ("children", "ids", "n_users", "page", "parent", "tails")

    def __init__(self, page: int) -> None:
        self.page = page
        self.ids: list[int] = []
        self.parent: Block | None = None
        self.n_users = 1
        self.children: dict[tuple[int, ...], Block] = {}
        self.tails: list[Block] = []


class CachedSequence:
    """Tokens whose keys and values are in the cache.  Only `PagedCache` changes it.

    Attributes:
        ids: the tokens, from position 0 on.
        pages: the block table: position p lies in ``pages[p // page_size]``.  It may reach past the tokens.
        blocks: what is known of those pages.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.pages: list[int] = []
        self.blocks: list[Block] = []

    def __len__(self) -> int:
        return len(self.ids)


class PagedCache:
    """The pages of a backend's KV cache, and what they hold.  Used by one thread."""

    def __init__(self, kv: Cache) -> None:
        self._kv = kv
        self.page_size = kv.page_size
        self.n_pages = kv.n_pages[0]
        self._free = list(range(self.n_pages - 1, -1, -1))
        #: Blocks that no sequence uses, the least recently used first.
        self._unused: dict[Block, None] = {}
        self._root = Block(-1)

    @property
    def n_available(self) -> int:
        """Pages that no sequence uses."""
        return len(self._free) + len(self._unused)

    def begin(self, ids: Sequence[int]) -> CachedSequence:
        """A sequence with as much of the beginning of ``ids`` as the cache has."""
        sequence = CachedSequence()
        self.extend(sequence, ids)
        self._take_up_part(sequence, ids)
        return sequence

    def extend(self, sequence: CachedSequence, ids: Sequence[int]) -> None:
        """Continues a sequence, which ``ids`` begin with, by full pages of ``ids`` that the cache has."""
        first = len(sequence) // self.page_size
        found = self._find_full(sequence, ids)
        if not found:
            return
        for block in found:
            self._use(block)
        for block in sequence.blocks[first:]:
            block.ids = []  # the pages found hold the same, and more
        self._drop_blocks(sequence, first)
        for block in found:
            self._attach(sequence, block)
        sequence.ids = list(ids[: len(sequence.blocks) * self.page_size])

    def n_pages_to_begin(self, ids: Sequence[int], n_tokens: int) -> int:
        """Available pages that a new sequence of ``n_tokens`` takes, if it shares what the cache has of ``ids``."""
        in_use = sum(block.n_users > 0 for block in self._find_full(CachedSequence(), ids))
        return -(-n_tokens // self.page_size) - in_use

    def next_page_key(self, sequence: CachedSequence, ids: Sequence[int]) -> tuple[Block, tuple[int, ...]] | None:
        """What the page that the sequence's next token goes to will be found by; None if ``ids`` do not fill it."""
        start = len(sequence) // self.page_size * self.page_size
        tokens = tuple(ids[start : start + self.page_size])
        if len(tokens) < self.page_size:
            return None
        return self._block_before(sequence, start // self.page_size), tokens

    def n_pages_missing(self, sequence: CachedSequence, n_tokens: int) -> int:
        """Pages that the sequence's next ``n_tokens`` take beyond those that it has."""
        return max(0, -(-(len(sequence) + n_tokens) // self.page_size) - len(sequence.pages))

    def reserve(self, sequence: CachedSequence, n_tokens: int) -> bool:
        """Gives the sequence pages for its next ``n_tokens``; if there are too few, changes nothing: False."""
        n_missing = self.n_pages_missing(sequence, n_tokens)
        if n_missing > self.n_available:
            return False
        for _ in range(n_missing):
            self._attach(sequence, Block(self._take_page()))
        return True

    def append(self, sequence: CachedSequence, ids: Sequence[int]) -> None:
        """Records tokens whose keys and values were written to the pages that `reserve` gave."""
        done = 0
        while done < len(ids):
            i, n = divmod(len(sequence), self.page_size)
            part = ids[done : done + self.page_size - n]
            sequence.blocks[i].ids += part
            sequence.ids += part
            done += len(part)
            if n + len(part) == self.page_size:
                self._enter(sequence, i)

    def release(self, sequence: CachedSequence) -> None:
        """Ends the use of a sequence.  Its tokens stay in the cache until their pages are needed."""
        self._drop_blocks(sequence, 0)
        sequence.ids = []

    def forget(self) -> None:
        """Drops all tokens that no sequence uses."""
        while self._unused:
            self._free.append(self._evict())

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
        return sequence.blocks[i - 1] if i else self._root

    def _take_up_part(self, sequence: CachedSequence, ids: Sequence[int]) -> None:
        """Continues a new sequence by the part of a page that begins like what is left of ``ids``."""
        parent = self._block_before(sequence, len(sequence.blocks))
        wanted = ids[len(sequence) : len(sequence) + self.page_size]
        best, most = None, 0
        for block in (*parent.tails, *parent.children.values()):
            n = common_prefix(block.ids, wanted)
            if n > most:
                best, most = block, n
        if best is None:
            return
        if most == len(best.ids):  # a tail: full pages were found before
            self._use(best)
            parent.tails.remove(best)
            block = best
        elif self.n_available > (best in self._unused):  # the page that is copied is not to be taken for the copy
            self._use(best)
            block = Block(self._take_page())
            self._kv.copy_page(0, best.page, block.page)
            block.ids = best.ids[:most]
            self._stop_using(best)
        else:
            return
        self._attach(sequence, block)
        sequence.ids += block.ids

    def _attach(self, sequence: CachedSequence, block: Block) -> None:
        sequence.blocks.append(block)
        sequence.pages.append(block.page)

    def _enter(self, sequence: CachedSequence, i: int) -> None:
        """Puts a full block into the tree; where an equal one is there already, the sequence goes on with that."""
        block, parent = sequence.blocks[i], self._block_before(sequence, i)
        known = parent.children.setdefault(tuple(block.ids), block)
        if known is block:
            block.parent = parent
            return
        self._use(known)
        self._free.append(block.page)
        sequence.blocks[i], sequence.pages[i] = known, known.page

    def _use(self, block: Block) -> None:
        if not block.n_users:
            del self._unused[block]
        block.n_users += 1

    def _stop_using(self, block: Block) -> None:
        block.n_users -= 1
        if not block.n_users:
            self._unused[block] = None

    def _drop_blocks(self, sequence: CachedSequence, first: int) -> None:
        """Takes blocks from the end of a sequence: the last one becomes the first to be evicted."""
        for i in reversed(range(first, len(sequence.blocks))):
            block = sequence.blocks[i]
            if not block.ids:
                self._free.append(block.page)
                continue
            if len(block.ids) < self.page_size:
                block.parent = self._block_before(sequence, i)
                block.parent.tails.append(block)
            self._stop_using(block)
        del sequence.blocks[first:], sequence.pages[first:]

    def _take_page(self) -> int:
        return self._free.pop() if self._free else self._evict()

    def _evict(self) -> int:
        """The page of the block that was not used for longest: one that no other follows, as those go first."""
        block = next(iter(self._unused))
        del self._unused[block]
        assert block.parent is not None
        if len(block.ids) < self.page_size:
            block.parent.tails.remove(block)
        else:
            del block.parent.children[tuple(block.ids)]
        return block.page


def n_window_pages(window: int, page_size: int) -> int:
    """Pages at most that hold the tokens which one sees in a window, itself included."""
    return -(-(window - 1) // page_size) + 1


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens a and b have in common at their beginning."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))
