"""The paged KV cache: which pages hold which tokens of which sequence.

Keys and values lie in fixed-size pages (`localllm.kernels.backend.Cache`).  A sequence is a list of tokens and a
block table, the pages that hold them in order.  Pages are counted by reference, so that sequences with the same
beginning share its pages; a page that several sequences hold is never written, but copied first (copy on write).
Finished sequences are kept, for a later prompt may begin as they do.  When pages run out they give up their last
ones, the least recently used sequence first, so that common beginnings stay longest.

Source: Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention (arXiv:2309.06180).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from localllm.kernels.backend import Cache


class PageAllocator:
    """Counts the owners of each page."""

    def __init__(self, n_pages: int) -> None:
        self._owners = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free page, which has one owner now.  There must be one (`n_free`)."""
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def share(self, page: int) -> None:
        """Adds an owner."""
        self._owners[page] += 1

    def release(self, page: int) -> None:
        """Removes an owner; without any the page is free."""
        self._owners[page] -= 1
        if not self._owners[page]:
            self._free.append(page)

    def owners(self, page: int) -> int:
        return self._owners[page]

    def recount(self, held: Iterable[int]) -> None:
        """Begins anew with these pages held, each once for every time that it is named."""
        counts = Counter(held)
        self._owners = [counts[page] for page in range(len(self._owners))]
        self._free = [page for page in reversed(range(len(self._owners))) if not self._owners[page]]


class CachedSequence:
    """Tokens whose keys and values are in the cache.  Only `PagedCache` changes it.

    Attributes:
        ids: the tokens, from position 0 on.
        pages: the block table: position p lies in ``pages[p // page_size]``.  It may reach past the tokens.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.pages: list[int] = []

    def __len__(self) -> int:
        return len(self.ids)


class PagedCache:
    """The pages of a backend's KV cache, and the sequences in them.  Not thread-safe: its engine locks."""

    def __init__(self, kv: Cache) -> None:
        self._kv = kv
        self._pages = PageAllocator(kv.n_pages)
        self._active: list[CachedSequence] = []
        self._kept: list[CachedSequence] = []  # least recently used first

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self._kv.page_size

    @property
    def n_pages(self) -> int:
        return self._kv.n_pages

    @property
    def n_free_pages(self) -> int:
        """Pages that nothing holds, not even a kept sequence."""
        return self._pages.n_free

    @property
    def kept(self) -> tuple[CachedSequence, ...]:
        """Finished sequences, the least recently used first."""
        return tuple(self._kept)

    @property
    def active(self) -> tuple[CachedSequence, ...]:
        """Sequences in use, in the order in which they began."""
        return tuple(self._active)

    def begin(self, ids: Sequence[int]) -> CachedSequence:
        """A sequence that holds as much of the beginning of ``ids`` as the cache has of any sequence.

        A kept sequence that is all of it is taken up again; of others the beginning is shared.
        """
        source, n_tokens = self.longest_prefix(ids)
        if source is None:
            sequence = CachedSequence()
            self._active.append(sequence)
            return sequence
        if source in self._kept:
            self._kept.remove(source)
            if n_tokens == len(source):
                self._active.append(source)
                return source
            self._kept.append(source)
        return self.fork(source, n_tokens)

    def longest_prefix(self, ids: Sequence[int]) -> tuple[CachedSequence | None, int]:
        """The sequence that has most of the beginning of ``ids``, and how many tokens of it; (None, 0) if none.

        Of equals it is the kept one that ends there, if there is one, for it need not be copied.
        """
        best: CachedSequence | None = None
        best_key = (0, False)
        for sequence in (*self._active, *self._kept):
            n = common_prefix(sequence.ids, ids)
            key = (n, n == len(sequence) and sequence in self._kept)
            if n and key > best_key:
                best, best_key = sequence, key
        return best, best_key[0]

    def fork(self, sequence: CachedSequence, n_tokens: int) -> CachedSequence:
        """A new sequence with the first ``n_tokens`` of another, in the same pages."""
        child = CachedSequence()
        child.ids = sequence.ids[:n_tokens]
        child.pages = sequence.pages[: self._pages_for(n_tokens)]
        for page in child.pages:
            self._pages.share(page)
        self._active.append(child)
        return child

    def reserve(self, sequence: CachedSequence, n_tokens: int) -> bool:
        """Makes room for the sequence's next ``n_tokens``: pages of its own for the positions to be written.

        Kept sequences give up pages for it.  False, and the sequence is as before, if that is not enough.
        """
        while self._missing(sequence, n_tokens) > self._pages.n_free:
            if not self._kept:
                return False
            self.drop_last_page(self._kept[0])
            if not self._kept[0].pages:
                del self._kept[0]
        end = self._pages_for(len(sequence) + n_tokens)
        if n_tokens and self._shared_tail(sequence):
            self._copy_on_write(sequence, len(sequence) // self.page_size)
        while len(sequence.pages) < end:
            sequence.pages.append(self._pages.take())
        return True

    def append(self, sequence: CachedSequence, ids: Iterable[int]) -> None:
        """Records tokens whose keys and values were written to the room that `reserve` made."""
        sequence.ids.extend(ids)

    def truncate(self, sequence: CachedSequence, n_tokens: int) -> None:
        """Forgets all but the first ``n_tokens``, and gives back the pages after them."""
        del sequence.ids[n_tokens:]
        for page in sequence.pages[self._pages_for(len(sequence)) :]:
            self._pages.release(page)
        del sequence.pages[self._pages_for(len(sequence)) :]

    def drop_last_page(self, sequence: CachedSequence) -> None:
        """Forgets the tokens of the last page.  It is free then, unless other sequences hold it as well."""
        n_pages = len(sequence.pages) - 1
        del sequence.ids[n_pages * self.page_size :]
        self._pages.release(sequence.pages.pop())

    def keep(self, sequence: CachedSequence) -> None:
        """Ends the use of a sequence, and keeps it for later prompts until its pages are needed."""
        self._active.remove(sequence)
        self.truncate(sequence, len(sequence))
        if any(common_prefix(other.ids, sequence.ids) == len(sequence) for other in self._kept):
            self.truncate(sequence, 0)
            return
        for other in [other for other in self._kept if common_prefix(other.ids, sequence.ids) == len(other)]:
            self._kept.remove(other)
            self.truncate(other, 0)
        if sequence.ids:
            self._kept.append(sequence)

    def free(self, sequence: CachedSequence) -> None:
        """Ends the use of a sequence, and gives back its pages."""
        self._active.remove(sequence)
        self.truncate(sequence, 0)

    def forget(self) -> None:
        """Drops all kept sequences."""
        for sequence in self._kept:
            self.truncate(sequence, 0)
        self._kept.clear()

    def mend(self, active: Iterable[CachedSequence]) -> None:
        """Puts itself in order after one of its methods was interrupted: only these sequences are in use.

        What a sequence says of its own pages holds at any line; who else holds them is made from that.
        """
        self._active = list(active)
        self._kept = [sequence for sequence in self._kept if sequence not in self._active and sequence.ids]
        self._pages.recount(page for sequence in (*self._active, *self._kept) for page in sequence.pages)

    def _pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_size)

    def _missing(self, sequence: CachedSequence, n_tokens: int) -> int:
        """Free pages that the next ``n_tokens`` take."""
        more = max(0, self._pages_for(len(sequence) + n_tokens) - len(sequence.pages))
        return more + (n_tokens > 0 and self._shared_tail(sequence))

    def _shared_tail(self, sequence: CachedSequence) -> bool:
        """Whether the page that the next token would be written to has other owners."""
        block = len(sequence) // self.page_size
        return block < len(sequence.pages) and self._pages.owners(sequence.pages[block]) > 1

    def _copy_on_write(self, sequence: CachedSequence, block: int) -> None:
        source, target = sequence.pages[block], self._pages.take()
        self._kv.copy_page(source, target)
        sequence.pages[block] = target
        self._pages.release(source)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens a and b have in common at their beginning."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))
