"""Blocks of cached tokens, and the slots with the recurrent states that belong to them."""

from __future__ import annotations

from localllm.kernels.backend import Cache

#: Where there is no page, or no slot.
NONE = -1


class Block:
    """A page of tokens whose keys and values, and perhaps states, are in the cache."""

    __slots__ = ("__weakref__", "children", "ids", "n_users", "pages", "parent", "snapshots", "tails")

    def __init__(self, pages: list[int]) -> None:
        self.pages = pages  # its page in each group; `NONE` where that was needed for something else
        self.ids: list[int] = []  # the tokens, at most a page of them
        self.parent: Block | None = None  # the block before it, once this one is in the tree
        self.n_users = [1] * len(pages)  # of each page, sequences that hold it
        self.children: dict[tuple[int, ...], Block] = {}  # full blocks that follow it, by their tokens
        self.tails: list[Block] = []  # blocks that follow it, are not full, and belong to no sequence any more
        self.snapshots: dict[int, int] = {}  # slots with the states after so many of its tokens


class Snapshots:
    """Slots with recurrent states: of sequences at work, and of snapshots, which belong to some tokens of a block."""

    def __init__(self, storage: Cache) -> None:
        self._storage = storage
        # whether layers have such states at all; without them, nothing here is done
        self.is_needed = storage.n_states > 0
        self._free = list(range(storage.n_states - 1, -1, -1))
        #: The least recently used first.
        self._order: dict[tuple[Block, int], None] = {}

    @property
    def has_free(self) -> bool:
        """Whether there is one that neither a sequence nor a snapshot has."""
        return bool(self._free)

    @property
    def has_slot(self) -> bool:
        """Whether there is one that no sequence has."""
        return bool(self._free or self._order)

    def take(self) -> int:
        """A slot, perhaps that of the snapshot that was not used for longest."""
        if not self._free:
            self.drop(*next(iter(self._order)))
        return self._free.pop()

    def free(self, slot: int) -> None:
        if slot != NONE:
            self._free.append(slot)

    def copy(self, slot: int) -> int:
        """A slot with the same states."""
        copied = self.take()
        self._storage.copy(None, slot, copied)
        return copied

    def keep(self, block: Block, n: int, slot: int) -> None:
        """Makes a slot a snapshot after ``n`` tokens of a block, unless there is one."""
        if n in block.snapshots:
            self.free(slot)
        else:
            block.snapshots[n] = slot
            self._order[block, n] = None

    def drop(self, block: Block, n: int) -> None:
        del self._order[block, n]
        self._free.append(block.snapshots.pop(n))

    def move(self, source: Block, target: Block) -> None:
        """Gives the snapshots of a block to another, which holds the same tokens."""
        for n, slot in source.snapshots.items():
            del self._order[source, n]
            self.keep(target, n, slot)
        source.snapshots = {}

    def load(self, block: Block, n: int, slot: int) -> int:
        """Copies a snapshot to a slot, or to a new one if that is `NONE`, which it gives."""
        del self._order[block, n]  # not to be dropped for it; and now the most recently used
        if slot == NONE and not self.has_slot:
            return block.snapshots.pop(n)
        if slot == NONE:
            slot = self.take()
        self._order[block, n] = None
        self._storage.copy(None, block.snapshots[n], slot)
        return slot
