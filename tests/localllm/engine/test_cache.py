"""The paged cache compared with a simple model: every sequence must read back exactly the written tokens."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from localllm.engine import cache as cache_module, saved_prompts
from localllm.engine.cache import CachedSequence, PagedCache, common_prefix
from localllm.engine.snapshots import NONE, Block
from localllm.errors import PromptCacheError
from tests.helpers.fake_backend import PAGE_SIZE, FakeCache

T = TypeVar("T")

#: Positions of prompt snapshots in these tests.
INTERVAL = 2 * PAGE_SIZE


@pytest.fixture(autouse=True, scope="module")
def _frequent_snapshots() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_module, "SNAPSHOT_TOKENS", INTERVAL)
        yield


def write(cache: PagedCache, kept: FakeCache, sequence: CachedSequence, ids: list[int]) -> bool:
    """Append ids like an engine: reserve, evaluate, record."""
    while ids:
        n = cache.n_to_snapshot(sequence, len(ids))
        if not cache.reserve(sequence, n):
            return False
        evaluate(kept, sequence, ids[:n])
        cache.append(sequence, ids[:n])
        ids = ids[n:]
    return True


def evaluate(kept: FakeCache, sequence: CachedSequence, ids: list[int]) -> None:
    sequence.is_ahead = True
    kept.put(sequence.pages, sequence.state, len(sequence), ids)


def read(kept: FakeCache, sequence: CachedSequence) -> list[int]:
    return kept.get(sequence.pages, sequence.state, len(sequence))


def new_cache(
    n_pages: int | tuple[int, ...] = 8, windows: Sequence[int | None] = (None,), n_states: int = 0
) -> tuple[PagedCache, FakeCache]:
    kept = FakeCache(n_pages, windows, n_states)
    return PagedCache(kept), kept


def filled(cache: PagedCache, kept: FakeCache, *steps: list[int]) -> CachedSequence:
    sequence = cache.begin([])
    for ids in steps:
        assert write(cache, kept, sequence, ids)
    return sequence


def pieces(stop: int) -> list[list[int]]:
    """Yield chunks of the numbers before ``stop``, one page each."""
    return [list(range(first, min(first + PAGE_SIZE, stop))) for first in range(0, stop, PAGE_SIZE)]


def paths(block: Block, before: Sequence[Block] = ()) -> Iterator[list[Block]]:
    """Yield the paths from a block to every block below it."""
    for child in (*block.children.values(), *block.tails):
        yield [*before, child]
        yield from paths(child, [*before, child])


IDS = st.lists(st.integers(0, 1), max_size=3 * PAGE_SIZE)

#: Pages of each group, their windows, and the number of state slots.
KINDS = {
    "all tokens": ((8,), (None,), 0),
    "a window": ((8, 5), (None, 5), 0),
    "several windows": ((8, 7, 4), (None, 9, 1), 0),
    "states": ((8,), (None,), 6),
    "all": ((8, 6), (None, 6), 5),
}


def contents(cache: PagedCache, kept: FakeCache) -> dict[tuple[int, ...], tuple[list[object], dict[int, list[int]]]]:
    """Return, for each path of blocks, the contents of its pages and its snapshots."""
    return {
        tuple(id_ for block in blocks for id_ in block.ids): (
            [page != NONE and kept.groups[g][page].tolist() for g, page in enumerate(blocks[-1].pages)],
            {n: kept.states[slot] for n, slot in blocks[-1].snapshots.items()},
        )
        for blocks in paths(cache.root)
    }


def at_once(cache: PagedCache) -> saved_prompts.WithCache:
    """Run work like `Engine.with_cache`, for an otherwise idle engine."""

    def with_cache(work: Callable[[PagedCache], T]) -> T:
        return work(cache)

    return with_cache


class CacheMachine(RuleBasedStateMachine):
    """Random operations on a small cache, with many common prefixes and few pages."""

    sequences = Bundle("sequences")

    @initialize(kind=st.sampled_from(sorted(KINDS)))
    def choose(self, kind: str) -> None:
        self.kind = kind
        self.cache, self.kept = new_cache(*KINDS[kind])
        self.expected: dict[CachedSequence, list[int]] = {}

    def farthest(self, ids: list[int]) -> tuple[int, int]:
        """Return the number of ids that a new sequence can reuse, with and without copying a page."""
        found = [(0, 0)]
        for blocks in paths(self.cache.root):
            text = [id_ for block in blocks for id_ in block.ids]
            start, most = len(text) - len(blocks[-1].ids), common_prefix(text, ids)
            ends = (
                [start + n for n in blocks[-1].snapshots] if self.kept.n_states else range(start + 1, len(text) + 1)
            )
            for n in ends:
                seen = [first // PAGE_SIZE for first in self.kept.first_seen(n)]
                if n <= most and all(b.pages[g] != NONE for g, first in enumerate(seen) for b in blocks[first:]):
                    found.append((n, n if n == len(text) else 0))
        return max(n for n, _ in found), max(n for _, n in found)

    def can_begin(self) -> bool:
        return len(self.expected) < self.cache.max_sequences

    @precondition(lambda self: self.can_begin())
    @rule(target=sequences, ids=IDS)
    def begin(self, ids: list[int]) -> CachedSequence:
        farthest, without_copy = self.farthest(ids)
        n_available, n_pages = self.cache.n_available, self.cache.n_pages_to_begin(ids, len(ids))
        sequence = self.cache.begin(ids)
        assert without_copy <= len(sequence) <= farthest
        if all(self.cache._n_available(g) > len(ids) // PAGE_SIZE + 1 for g in range(len(self.kept.windows))):
            assert len(sequence) == farthest
        assert sequence.ids == ids[: len(sequence)]
        self.expected[sequence] = sequence.ids.copy()
        assert n_pages <= n_available or not self.cache.reserve(sequence, len(ids) - len(sequence))
        return sequence

    @rule(sequence=sequences, ids=IDS)
    def append(self, sequence: CachedSequence, ids: list[int]) -> None:
        has_pages = self.cache.n_pages_missing(sequence, len(ids)) <= self.cache.n_available
        has_room = write(self.cache, self.kept, sequence, ids)
        if not self.kept.n_states:  # with states it is written in chunks, and a known chunk returns its page
            assert has_room <= has_pages
        if len(self.kept.windows) == 1:
            assert has_room >= has_pages
        assert sequence.ids[len(self.expected[sequence]) :] == ids[: len(sequence) - len(self.expected[sequence])]
        self.expected[sequence] = sequence.ids.copy()

    @rule(sequence=sequences, n_tokens=st.integers(0, 3 * PAGE_SIZE))
    def reserve_without_writing(self, sequence: CachedSequence, n_tokens: int) -> None:
        before, n_available = [list(table) for table in sequence.pages], self.cache.n_available
        if not self.cache.reserve(sequence, n_tokens):
            assert (sequence.pages, self.cache.n_available) == (before, n_available)

    @rule(sequence=sequences, ids=IDS)
    def extend(self, sequence: CachedSequence, ids: list[int]) -> None:
        ids = self.expected[sequence] + ids
        self.cache.extend(sequence, ids)
        assert sequence.ids == ids[: len(sequence)]
        assert len(sequence) >= len(self.expected[sequence])
        self.expected[sequence] = ids[: len(sequence)]
        n = len(sequence) // PAGE_SIZE
        key = tuple(ids[n * PAGE_SIZE : (n + 1) * PAGE_SIZE])
        if len(self.kept.windows) == 1 and not self.kept.n_states:
            assert key not in (sequence.blocks[n - 1] if n else self.cache.root).children

    @rule(sequence=sequences, ids=IDS, n_right=st.integers(0, 3 * PAGE_SIZE))
    def draft(self, sequence: CachedSequence, ids: list[int], n_right: int) -> None:
        """Add possibly wrong tokens; right ones are recorded, or evaluated again if there are states."""
        n_right = min(n_right, len(ids))
        if not ids or not self.cache.reserve(sequence, len(ids)) or not self.cache.save(sequence):
            return
        evaluate(self.kept, sequence, ids)
        if self.kept.n_states and n_right < len(ids):
            self.cache.rollback(sequence)
        else:
            self.cache.append(sequence, ids[:n_right])
            self.expected[sequence] += ids[:n_right]

    @rule(target=sequences, sequence=consumes(sequences), ids=IDS, is_saved=st.booleans())
    def release(self, sequence: CachedSequence, ids: list[int], is_saved: bool) -> object:
        """End a sequence, or drop it as after a failed step."""
        if ids and self.cache.reserve(sequence, len(ids)) and (not is_saved or self.cache.save(sequence)):
            evaluate(self.kept, sequence, ids)
        self.cache.release(sequence)
        assert not any(sequence.pages)
        del self.expected[sequence]
        return multiple()

    @rule()
    def forget(self) -> None:
        self.cache.forget()
        in_use = {page for sequence in self.expected for page in sequence.pages[0]}
        assert self.cache.n_available == self.cache.n_pages - len(in_use)
        assert not self.cache._unused[0]

    @rule()
    def save_and_load(self) -> None:
        """Save, then load into a new cache and into this one, which is in use."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "prompts"
            n = saved_prompts.save(at_once(self.cache), path, "a key")
            other, kept = new_cache(*KINDS[self.kind])
            assert saved_prompts.load(at_once(other), path, "a key") == n
            assert contents(other, kept) == contents(self.cache, self.kept)
            self.cache.forget()
            assert saved_prompts.load(at_once(self.cache), path, "a key") <= n

    @invariant()
    def every_sequence_reads_back(self) -> None:
        for sequence, ids in self.expected.items():
            assert sequence.ids == ids
            assert read(self.kept, sequence) == ids
            for group, table in enumerate(sequence.pages):
                held = sequence.first[group]
                assert held == self.kept.first_seen(len(ids))[group] // PAGE_SIZE
                assert table == [0] * held + [block.pages[group] for block in sequence.blocks[held:]]
                assert len(set(table[held:])) == len(table[held:])

    @invariant()
    def the_tree_reads_back(self) -> None:
        for blocks in paths(self.cache.root):
            block, parent = blocks[-1], (self.cache.root, *blocks)[-2]
            for group, page in zip(self.kept.groups, block.pages, strict=True):
                assert page == NONE or group[page, : len(block.ids)].tolist() == block.ids
            assert block.parent is parent
            assert block in parent.tails if len(block.ids) < PAGE_SIZE else parent.children[tuple(block.ids)] is block
            assert parent is self.cache.root or block.n_users[0] <= parent.n_users[0]
            assert not (block in parent.tails and any(block.n_users))
            before = [id_ for each in blocks[:-1] for id_ in each.ids]
            for n, slot in block.snapshots.items():
                assert self.kept.states[slot] == before + block.ids[:n]

    @invariant()
    def users_are_counted(self) -> None:
        known = {blocks[-1] for blocks in paths(self.cache.root)}
        for group, n_pages in enumerate(self.kept.n_pages):
            users = Counter(block for sequence in self.expected for block in sequence.blocks[sequence.first[group] :])
            assert all(block.n_users[group] == n for block, n in users.items())
            unused = self.cache._unused[group] | self.cache._out_of_window[group]
            assert set(unused) == {b for b in known if b.pages[group] != NONE and not b.n_users[group]}
            pages = [*self.cache._free[group], *(b.pages[group] for b in (*unused, *users))]
            assert sorted(pages) == list(range(n_pages))
        states, blocks = self.cache._states, {block for sequence in self.expected for block in sequence.blocks}
        assert set(states._order) == {(block, n) for block in {*known, *blocks} for n in block.snapshots}
        slots = [block.snapshots[n] for block, n in states._order]
        own = [slot for sequence in self.expected for slot in (sequence.state, sequence.saved) if slot != NONE]
        assert sorted([*states._free, *slots, *own]) == list(range(self.kept.n_states))

    def teardown(self) -> None:
        for sequence in list(self.expected):
            self.cache.release(sequence)
        self.cache.forget()
        assert [len(free) for free in self.cache._free] == list(self.kept.n_pages)
        assert len(self.cache._states._free) == self.kept.n_states
        assert not self.cache.root.children
        assert not self.cache.root.tails


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=int(os.environ.get("LOCALLLM_TEST_EXAMPLES", "100")), stateful_step_count=30, deadline=None
)


def test_a_full_page_is_shared_and_of_the_next_the_common_part_copied() -> None:
    cache, kept = new_cache()
    first = filled(cache, kept, list(range(10)))  # two full pages and half of a third
    second = cache.begin([*range(9), 99])
    assert second.pages[0][:2] == first.pages[0][:2]
    assert len(second) == 8, "a page that is still written is not shared"
    cache.release(first)
    third = cache.begin([*range(9), 99])
    assert len(third) == 9
    assert third.pages[0][2] not in first.pages[0]
    assert write(cache, kept, third, [99])
    assert read(kept, third) == [*range(9), 99]


def test_an_ended_sequence_is_continued_without_a_copy() -> None:
    cache, kept = new_cache()
    first = filled(cache, kept, list(range(10)))
    pages = list(first.pages[0])
    cache.release(first)
    second = cache.begin(list(range(12)))
    assert (second.pages[0], len(second)) == (pages, 10)


def test_sequences_that_write_equal_pages_share_them() -> None:
    cache, kept = new_cache()
    sequences = [filled(cache, kept, [1, 2, 3]) for _ in range(2)]
    assert sequences[0].pages != sequences[1].pages
    for sequence in sequences:
        write(cache, kept, sequence, [4, 5])
    assert sequences[0].pages[0][0] == sequences[1].pages[0][0]
    assert cache.n_available == 8 - 3
    assert [read(kept, sequence) for sequence in sequences] == [[1, 2, 3, 4, 5]] * 2


def test_a_sequence_uses_pages_computed_by_another_one() -> None:
    cache, kept = new_cache()
    ids = list(range(11))
    slow = filled(cache, kept, ids[:6])
    filled(cache, kept, ids)
    cache.extend(slow, ids[:-1])
    assert slow.ids == ids[:8]
    assert read(kept, slow) == ids[:8]


def test_the_least_recently_used_sequence_is_evicted_from_its_end() -> None:
    cache, kept = new_cache(6)
    old = filled(cache, kept, [1] * 8)
    new = filled(cache, kept, [2] * 8)
    cache.release(old)
    cache.release(new)
    cache.release(cache.begin([1] * 4))  # reused; only the first page of the old sequence
    filled(cache, kept, [3] * 16)
    assert [len(cache.begin(ids)) for ids in ([1] * 8, [2] * 8)] == [4, 4]


def test_a_page_is_not_evicted_for_its_own_copy() -> None:
    cache, kept = new_cache(2)
    first = filled(cache, kept, [1, 2, 3, 4])
    other = filled(cache, kept, [9])
    cache.release(first)
    sequence = cache.begin([1, 2, 5])
    assert len(sequence) == 0
    cache.release(other)
    assert len(cache.begin([1, 2, 5])) == 2


def test_the_key_of_the_next_page_finds_it_later() -> None:
    cache, kept = new_cache()
    ids = list(range(12))
    sequence = filled(cache, kept, ids[:6])
    key = cache.next_page_key(sequence, ids)
    assert key == (sequence.blocks[0], (4, 5, 6, 7))
    assert cache.next_page_key(sequence, ids[:7]) is None
    write(cache, kept, sequence, ids[6:8])
    assert key[1] in key[0].children
    assert cache.next_page_key(filled(cache, kept, [3]), [3, 4, 5, 6]) == (cache.root, (3, 4, 5, 6))


WINDOW_OF_3 = (None, 3)


def test_pages_outside_a_window_are_reused_and_their_tokens_stay() -> None:
    cache, kept = new_cache((8, 3), WINDOW_OF_3)
    first = filled(cache, kept, *pieces(18))  # five pages, at most three of the window at a time
    assert first.first == [0, 4]
    second = cache.begin(list(range(18)))
    assert len(second) == 16, "the last page is still written"
    assert second.pages[1][:3] == [0, 0, 0]
    assert read(kept, second) == list(range(16))
    assert len(cache.begin([*range(8), 99])) == 0, "the previous page is gone"


def test_the_window_at_the_end_of_a_prompt_is_kept_longest() -> None:
    cache, kept = new_cache((16, 5), WINDOW_OF_3)
    prompt = list(range(10))
    sequence = cache.begin(prompt)
    write(cache, kept, sequence, prompt)
    for piece in pieces(40):
        assert write(cache, kept, sequence, piece)
    cache.release(sequence)
    branch = cache.begin([*prompt, 99])
    assert read(kept, branch) == prompt


def test_a_block_that_lost_its_page_gets_that_of_an_equal_one() -> None:
    cache, kept = new_cache((8, 4), WINDOW_OF_3)
    late = filled(cache, kept, [0, 1, 2])
    filled(cache, kept, *pieces(18))
    known = cache.root.children[0, 1, 2, 3]
    assert known.pages[1] == NONE
    write(cache, kept, late, [3, 4])
    assert (late.blocks[0], late.pages[1][0]) == (known, known.pages[1])
    assert read(kept, late) == [0, 1, 2, 3, 4]


def test_pages_are_shared_only_with_the_same_adapters() -> None:
    cache, kept = new_cache((2,))
    for scale in (0.5, 0.25, 0.125):
        for n in (0, 5):
            sequence = cache.begin(list(range(5)), (scale,))
            assert len(sequence) == n
            write(cache, kept, sequence, list(range(n, 5)))
            cache.release(sequence)
        del sequence
    assert list(cache._roots) == [(), (0.125,)]


def test_a_sequence_that_is_not_shareable_is_never_found() -> None:
    cache, kept = new_cache()
    shared = filled(cache, kept, *pieces(6))
    alone = cache.begin(list(range(6)), shareable=False)
    assert len(alone) == 0
    for ids in pieces(6):
        assert write(cache, kept, alone, ids)
    assert not set(alone.pages[0]) & set(shared.pages[0])
    cache.release(shared)
    cache.forget()
    cache.release(alone)
    assert len(cache.begin(list(range(6)))) == 0
    assert not cache.blocks()
    cache.forget()
    assert cache.n_available == cache.n_pages


def test_a_sequence_continues_the_end_of_a_prompt_or_of_another_sequence() -> None:
    cache, kept = new_cache(n_states=8)
    prompt = list(range(6))
    sequence = cache.begin(prompt)
    write(cache, kept, sequence, prompt)
    write(cache, kept, sequence, [6, 7, 8, 9, 10])
    assert len(cache.begin([*range(9), 99])) == 6, "its last page is still written"
    cache.release(sequence)
    for ids, n in (([*range(11), 99], 11), ([*range(10), 99], 6), ([*prompt, 99], 6), ([0, 1, 99], 0)):
        branch = cache.begin(ids)
        assert (len(branch), read(kept, branch)) == (n, ids[:n])
        cache.release(branch)


@pytest.mark.parametrize("extends", [False, True])
def test_snapshots_move_to_the_block_that_a_sequence_continues(extends: bool) -> None:
    cache, kept = new_cache(n_states=8)
    slow = cache.begin([0, 1])
    write(cache, kept, slow, [0, 1])
    cache.release(filled(cache, kept, [0, 1, 2, 3]))
    if extends:
        cache.extend(slow, [0, 1, 2, 3, 4])
    else:
        write(cache, kept, slow, [2, 3])
    assert read(kept, slow) == [0, 1, 2, 3]
    assert len(cache.begin([0, 1, 99])) == 2
    for n in range(8):  # all snapshot slots are needed: each text occurs once
        cache.release(filled(cache, kept, [50 + n]))


def test_the_only_slot_is_taken_over_from_its_snapshot() -> None:
    cache, kept = new_cache(n_states=1)
    cache.release(filled(cache, kept, [0, 1, 2]))
    assert cache.max_sequences == 1
    sequence = cache.begin([0, 1, 2, 3])
    assert read(kept, sequence) == [0, 1, 2]
    assert not cache.has_slot
    assert not cache.save(sequence)


def test_states_of_a_step_that_failed_are_not_kept() -> None:
    cache, kept = new_cache(n_states=4)
    sequence = filled(cache, kept, [0, 1, 2])
    cache.reserve(sequence, 2)
    evaluate(kept, sequence, [3])
    cache.release(sequence)
    assert len(cache.begin([0, 1, 2, 3])) == 0
    sequence = filled(cache, kept, [5, 6, 7])
    assert cache.reserve(sequence, 2)
    assert cache.save(sequence)
    evaluate(kept, sequence, [8])
    cache.release(sequence)
    assert len(cache.begin([5, 6, 7, 8])) == 3, "saved tokens are kept"


def test_the_least_recently_used_snapshot_goes_first() -> None:
    cache, kept = new_cache(16, n_states=3)
    for n in (1, 2, 3):
        cache.release(filled(cache, kept, 2 * [n]))
    cache.release(cache.begin([1, 1, 9]))
    for n in (4, 5):
        cache.release(filled(cache, kept, 2 * [n]))
    found = []
    for n in (1, 5):
        found.append(len(cache.begin([n, n, 9])))
    assert found == [2, 2]


def test_windows_are_counted_with_the_tokens_of_a_step() -> None:
    cache, _ = new_cache((8, 5), WINDOW_OF_3)  # each spans at most two pages
    assert [cache.has_windows_for(lengths, n) for lengths, n in (([8, 8], 4), ([8, 8], 5), ([3, 8], 8))] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("a", "b", "n"), [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2)]
)
def test_common_prefix(a: list[int], b: list[int], n: int) -> None:
    assert common_prefix(a, b) == common_prefix(b, a) == n


# -- Saved prompts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_requests_go_on_while_prompts_are_saved_and_loaded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other sequences take pages while prompts are saved or loaded; the result must still be right."""
    monkeypatch.setattr(saved_prompts, "_BLOCKS_AT_ONCE", 1)
    rng = np.random.default_rng(0)
    n_loaded = 0
    for _ in range(30):
        cache, kept = new_cache(*KINDS[kind])
        running: list[CachedSequence] = []

        def with_cache(
            work: Callable[[PagedCache], T],
            cache: PagedCache = cache,
            kept: FakeCache = kept,
            running: list[CachedSequence] = running,
        ) -> T:
            for _ in range(int(rng.integers(4))):
                ids = rng.integers(0, 2, int(rng.integers(1, 12))).tolist()
                if cache.has_slot and (len(running) < 2 or rng.integers(2)):
                    running.append(cache.begin(ids))
                    write(cache, kept, running[-1], ids[len(running[-1]) :])
                elif running:
                    cache.release(running.pop(0))
            return work(cache)

        for _ in range(4):
            with_cache(PagedCache.blocks)
        n_saved = saved_prompts.save(with_cache, tmp_path / "prompts", "a key")
        other, other_kept = new_cache(*KINDS[kind])
        assert saved_prompts.load(at_once(other), tmp_path / "prompts", "a key") == n_saved
        for sequence in (other.begin([*ids, 9]) for ids in contents(other, other_kept)):
            assert read(other_kept, sequence) == sequence.ids
            other.release(sequence)
        n_loaded += saved_prompts.load(with_cache, tmp_path / "prompts", "a key")
        for sequence in running:
            assert read(kept, sequence) == sequence.ids
            cache.release(sequence)
        assert cache.n_available == cache.n_pages
    assert n_loaded > 0


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Saved prompts of a cache: three prompts, one of which continues another after a page."""
    cache, kept = new_cache(*KINDS["all"])
    for ids in (list(range(9)), [*range(4), 20, 21, 22, 23, 24], [30, 31]):
        sequence = cache.begin(ids)
        assert write(cache, kept, sequence, ids[len(sequence) :])
        cache.release(sequence)
    saved_prompts.save(at_once(cache), tmp_path / "prompts", "a key")
    return tmp_path / "prompts"


def test_a_saved_prompt_is_found_again(prompts: Path) -> None:
    cache, kept = new_cache(*KINDS["all"])
    assert saved_prompts.load(at_once(cache), prompts, "a key") > 0
    sequence = cache.begin([*range(9), 9])
    assert sequence.ids == list(range(9))
    assert read(kept, sequence) == list(range(9))


def test_a_smaller_cache_loads_as_much_as_fits(prompts: Path) -> None:
    cache, _ = new_cache((2, 2), (None, 6), 1)
    assert 0 < saved_prompts.load(at_once(cache), prompts, "a key") <= 2 * PAGE_SIZE


def test_no_damage_is_loaded(prompts: Path) -> None:
    """Data before the damage is loaded, and loaded data always equals the saved data."""
    data, whole = prompts.read_bytes(), contents_of(prompts)
    rng = np.random.default_rng(0)
    damages = [data[:n] for n in range(0, len(data), 7)]
    for i in rng.integers(0, len(data), 200):
        damages.append(data[:i] + bytes([data[i] ^ 1 << int(rng.integers(8))]) + data[i + 1 :])
    for damaged in damages:
        prompts.write_bytes(damaged)
        cache, kept = new_cache(*KINDS["all"])
        with pytest.raises(PromptCacheError, match="not a complete file of saved prompts: delete it"):
            saved_prompts.load(at_once(cache), prompts, "a key")
        for ids, (pages, snapshots) in contents(cache, kept).items():
            whole_pages, whole_snapshots = whole[ids]
            assert all(page in (False, saved) for page, saved in zip(pages, whole_pages, strict=True))
            assert snapshots.items() <= whole_snapshots.items()


def test_a_block_of_another_cache_is_refused() -> None:
    cache, kept = new_cache(*KINDS["all"])
    page, state = kept.read(0, 0), kept.read(None, 0)
    good = {0: page, 1: page}
    uses: list[tuple[Block, int]] = []
    faulty: list[tuple[list[int], dict[int, bytes]]] = [
        ([], good),
        ([0] * (PAGE_SIZE + 1), good),
        ([1], {0: page, -1: page}),
        ([1], {0: page, -2: state}),
        ([1], {0: page, 2: page}),
        ([1], {0: page[:-4]}),
        ([1], {**good, -1: state[:-4]}),
    ]
    for ids, parts in faulty:
        with pytest.raises(ValueError, match="not fit this cache"):
            cache.restore(cache.root, ids, parts, uses)
    assert cache.restore(cache.root, [1], {1: page}, uses) is None
    assert cache.n_available == cache.n_pages
    assert not cache.root.tails
    assert not uses
    tail = cache.restore(cache.root, [1], {**good, -1: state}, uses)
    assert tail is not None
    with pytest.raises(ValueError, match="not fit this cache"):
        cache.restore(tail, [1], good, uses)


def test_parts_are_added_to_a_block() -> None:
    """The page of a window and a snapshot come later, while a sequence uses the block."""
    (cache, _), (source, source_kept) = new_cache(*KINDS["all"]), new_cache(*KINDS["all"])
    ids = list(range(PAGE_SIZE))
    filled(source, source_kept, ids)
    [block] = source.root.children.values()
    data = {group: source_kept.read(group, page) for group, page in enumerate(block.pages)}
    first: list[tuple[Block, int]] = []
    restored = cache.restore(cache.root, ids, {0: data[0]}, first)
    assert restored is not None
    assert restored.pages[1] == NONE
    assert cache.n_usable([*ids, 9], ()) == 0
    second: list[tuple[Block, int]] = []
    state = source_kept.read(None, next(iter(block.snapshots.values()), 0))
    assert cache.restore(cache.root, ids, {1: data[1], -PAGE_SIZE: state}, second) is restored
    cache.restored(first)
    assert cache.n_available == cache.n_pages - 1
    cache.restored(second)
    assert cache.n_available == cache.n_pages
    assert cache.n_usable([*ids, 9], ()) == PAGE_SIZE


def contents_of(path: Path) -> dict[tuple[int, ...], tuple[list[object], dict[int, list[int]]]]:
    cache, kept = new_cache(*KINDS["all"])
    saved_prompts.load(at_once(cache), path, "a key")
    return contents(cache, kept)


def test_prompts_of_another_model_are_refused(prompts: Path) -> None:
    cache, _ = new_cache(*KINDS["all"])
    with pytest.raises(PromptCacheError, match="different model, version, device or cache type"):
        saved_prompts.load(at_once(cache), prompts, "another key")
    with pytest.raises(PromptCacheError, match="cannot be read"):
        saved_prompts.load(at_once(cache), prompts.with_name("none"), "a key")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_does_not_hold_up_the_engine(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PromptCacheError, match="not a regular file"):
        saved_prompts.load(at_once(new_cache()[0]), tmp_path / "pipe", "a key")
