"""Blocks of cached tokens, and slots for their recurrent states."""

from __future__ import annotations

from localllm.kernels.backend import Cache

#: No page, or no slot.
NONE = -1


class Block:
    """A page of tokens in the cache, with their keys and values, and possibly recurrent states."""

    __slots__ = ("__weakref__", "children", "ids", "key", "n_users", "pages", "parent", "snapshots", "tails")

    def __init__(self, pages: list[int]) -> None:
        self.pages = pages  # page per window group; `NONE` after eviction from the group
        self.ids: list[int] = []  # at most page_size tokens
        self.parent: Block | None = None  # preceding block; None outside the tree
        self.n_users = [1] * len(pages)  # number of sequences that use each page
        self.children: dict[tuple[int, ...], Block] = {}  # full blocks that follow, by their tokens
        self.tails: list[Block] = []  # partly filled blocks that follow and belong to no sequence
        self.snapshots: dict[int, int] = {}  # slots with states, by the number of tokens they include
        # Digest (`localllm.engine.records`) of a block in the tree; None if its tree is not stored on disk
        self.key: bytes | None = None


class Snapshots:
    """Slots with recurrent states: states of running sequences, and snapshots."""

    def __init__(self, storage: Cache) -> None:
        self._storage = storage
        # False if no layer has recurrent states; the slots are then unused
        self.is_needed = storage.n_states > 0
        self._free = list(range(storage.n_states - 1, -1, -1))
        #: Snapshots, least recently used first.
        self._order: dict[tuple[Block, int], None] = {}

    @property
    def has_free(self) -> bool:
        """True if a slot is neither used by a sequence nor holds a snapshot."""
        return bool(self._free)

    @property
    def has_slot(self) -> bool:
        """True if a slot is not used by a sequence."""
        return bool(self._free or self._order)

    def take(self) -> int:
        """Return a slot, if necessary from the least recently used snapshot."""
        if not self._free:
            self.drop(*next(iter(self._order)))
        return self._free.pop()

    def free(self, slot: int) -> None:
        if slot != NONE:
            self._free.append(slot)

    def copy(self, slot: int) -> int:
        """Return a new slot with a copy of the states."""
        copied = self.take()
        self._storage.copy(None, slot, copied)
        return copied

    def keep(self, block: Block, n: int, slot: int) -> None:
        """Turn a slot into the snapshot after ``n`` tokens of a block. Frees the slot if there is such a snapshot."""
        if n in block.snapshots:
            self.free(slot)
        else:
            block.snapshots[n] = slot
            self._order[block, n] = None

    def drop(self, block: Block, n: int) -> None:
        del self._order[block, n]
        self._free.append(block.snapshots.pop(n))

    def move(self, source: Block, target: Block) -> None:
        """Move the snapshots of a block to another block with the same tokens."""
        for n, slot in source.snapshots.items():
            del self._order[source, n]
            self.keep(target, n, slot)
        source.snapshots = {}

    def load(self, block: Block, n: int, slot: int) -> int:
        """Copy a snapshot to a slot, or to a new slot if ``slot`` is `NONE`. Return the slot.

        If no slot is available, return the snapshot's slot itself.
        """
        del self._order[block, n]  # not evicted by `take`; added again as most recently used
        if slot == NONE and not self.has_slot:
            return block.snapshots.pop(n)
        if slot == NONE:
            slot = self.take()
        self._order[block, n] = None
        self._storage.copy(None, block.snapshots[n], slot)
        return slot
