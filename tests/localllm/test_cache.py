"""The paged cache against a model of it: every sequence must read back what was written to it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from localllm.cache import CachedSequence, PagedCache, common_prefix
from tests.helpers.fake_backend import PAGE_SIZE, FakeCache


def write(cache: PagedCache, kv: FakeCache, sequence: CachedSequence, ids: list[int]) -> bool:
    """Appends ids as an engine does: reserve, write to the pages, record."""
    if not cache.reserve(sequence, len(ids)):
        return False
    for position, id_ in enumerate(ids, start=len(sequence)):
        kv.ids[sequence.pages[position // PAGE_SIZE], position % PAGE_SIZE] = id_
    cache.append(sequence, ids)
    return True


def read(kv: FakeCache, sequence: CachedSequence) -> list[int]:
    return [int(kv.ids[sequence.pages[p // PAGE_SIZE], p % PAGE_SIZE]) for p in range(len(sequence))]


def new_cache(n_pages: int = 8) -> tuple[PagedCache, FakeCache]:
    kv = FakeCache(n_pages)
    return PagedCache(kv), kv


def filled(cache: PagedCache, kv: FakeCache, ids: list[int]) -> CachedSequence:
    sequence = cache.begin([])
    assert write(cache, kv, sequence, ids)
    return sequence


IDS = st.lists(st.integers(0, 1), max_size=3 * PAGE_SIZE)


class CacheMachine(RuleBasedStateMachine):
    """Random use of a small cache, in which sequences often begin alike and pages often run out."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.kv = new_cache()
        self.expected: dict[CachedSequence, list[int]] = {}

    @rule(target=sequences, ids=IDS)
    def begin(self, ids: list[int]) -> CachedSequence:
        longest = max((common_prefix(s.ids, ids) for s in self.all_sequences()), default=0)
        sequence = self.cache.begin(ids)
        assert len(sequence) == longest
        assert sequence.ids == ids[:longest]
        assert sequence not in self.expected
        self.expected[sequence] = sequence.ids.copy()
        return sequence

    @rule(target=sequences, sequence=sequences, data=st.data())
    def fork(self, sequence: CachedSequence, data: st.DataObject) -> CachedSequence:
        n_tokens = data.draw(st.integers(0, len(sequence)))
        child = self.cache.fork(sequence, n_tokens)
        self.expected[child] = self.expected[sequence][:n_tokens]
        return child

    @rule(sequence=sequences, ids=IDS)
    def append(self, sequence: CachedSequence, ids: list[int]) -> None:
        if write(self.cache, self.kv, sequence, ids):
            self.expected[sequence] += ids
        else:
            assert not self.cache.kept, "a reservation failed though kept sequences had pages to give"

    @rule(sequence=sequences, n_tokens=st.integers(0, 3 * PAGE_SIZE))
    def reserve_without_writing(self, sequence: CachedSequence, n_tokens: int) -> None:
        self.cache.reserve(sequence, n_tokens)

    @rule(sequence=sequences, n_tokens=st.integers(0, 6 * PAGE_SIZE))
    def truncate(self, sequence: CachedSequence, n_tokens: int) -> None:
        self.cache.truncate(sequence, n_tokens)
        del self.expected[sequence][n_tokens:]

    @rule(sequence=sequences)
    def drop_last_page(self, sequence: CachedSequence) -> None:
        if sequence.pages:
            self.cache.drop_last_page(sequence)
            self.expected[sequence] = self.expected[sequence][: len(sequence.pages) * PAGE_SIZE]

    @rule(target=sequences, sequence=consumes(sequences), keep=st.booleans())
    def end(self, sequence: CachedSequence, keep: bool) -> object:
        (self.cache.keep if keep else self.cache.free)(sequence)
        del self.expected[sequence]
        return multiple()

    @rule()
    def forget(self) -> None:
        self.cache.forget()

    def all_sequences(self) -> list[CachedSequence]:
        return [*self.cache.active, *self.cache.kept]

    @invariant()
    def every_sequence_reads_back(self) -> None:
        assert set(self.cache.active) == set(self.expected)
        for sequence, ids in self.expected.items():
            assert sequence.ids == ids
        for sequence in self.all_sequences():
            assert read(self.kv, sequence) == sequence.ids

    @invariant()
    def owners_are_counted(self) -> None:
        owners = Counter(page for sequence in self.all_sequences() for page in sequence.pages)
        assert all(len(set(sequence.pages)) == len(sequence.pages) for sequence in self.all_sequences())
        assert len(owners) + self.cache.n_free_pages == self.cache.n_pages
        for page in range(self.cache.n_pages):
            assert self.cache._pages.owners(page) == owners[page]

    def teardown(self) -> None:
        for sequence in list(self.expected):
            self.cache.free(sequence)
        self.cache.forget()
        assert self.cache.n_free_pages == self.cache.n_pages


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_fork_shares_full_pages_and_copies_the_last_on_write() -> None:
    cache, kv = new_cache()
    parent = filled(cache, kv, list(range(10)))  # 2 full pages and half of a third
    child = cache.fork(parent, 10)
    assert cache.n_free_pages == 8 - 3
    write(cache, kv, child, [50])
    assert cache.n_free_pages == 8 - 4
    assert child.pages[:2] == parent.pages[:2]
    assert child.pages[2] != parent.pages[2]
    write(cache, kv, parent, [60])
    assert cache.n_free_pages == 8 - 4, "the parent is the only owner now and need not copy"
    assert (read(kv, parent)[-3:], read(kv, child)[-3:]) == ([8, 9, 60], [8, 9, 50])


def test_a_fork_inside_a_full_page_copies_it_on_write() -> None:
    cache, kv = new_cache()
    parent = filled(cache, kv, list(range(8)))
    child = cache.fork(parent, 5)
    write(cache, kv, child, [50, 51])
    assert read(kv, child) == [0, 1, 2, 3, 4, 50, 51]
    assert read(kv, parent) == list(range(8))


def test_begin_takes_up_a_kept_sequence_that_is_all_prefix() -> None:
    cache, kv = new_cache()
    first = filled(cache, kv, [1, 2, 3, 4, 5])
    cache.keep(first)
    again = cache.begin([1, 2, 3, 4, 5, 6])
    assert again is first
    assert cache.kept == ()


def test_begin_leaves_a_kept_sequence_that_goes_another_way() -> None:
    cache, kv = new_cache()
    first = filled(cache, kv, [1, 2, 3, 4, 5])
    cache.keep(first)
    again = cache.begin([1, 2, 3, 9])
    assert again.ids == [1, 2, 3]
    assert cache.kept == (first,)
    assert again.pages == first.pages[:1]


def test_begin_shares_with_a_sequence_in_use() -> None:
    cache, kv = new_cache()
    first = filled(cache, kv, [1, 2, 3, 4, 5])
    second = cache.begin([1, 2, 3, 4, 5, 6])
    assert second is not first
    assert second.pages == first.pages


def test_of_sequences_that_begin_each_other_one_is_kept() -> None:
    cache, kv = new_cache()
    sequences = [filled(cache, kv, ids) for ids in ([1, 2], [1, 2, 3], [1], [1, 4], [])]
    for sequence in sequences:
        cache.keep(sequence)
    assert cache.kept == (sequences[1], sequences[3])
    assert cache.n_free_pages == 8 - 2


def test_longest_prefix_is_exact() -> None:
    cache, kv = new_cache(16)
    short, long = [1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 8]
    kept_short = filled(cache, kv, [*short, 9])
    kept_long = filled(cache, kv, long)
    cache.keep(kept_short)
    cache.keep(kept_long)
    assert cache.longest_prefix([1, 2, 3, 4, 5, 0]) == (kept_long, 5)
    assert cache.longest_prefix([1, 2, 3, 9, 9]) == (kept_short, 4)
    assert cache.longest_prefix([2, 2, 3]) == (None, 0)
    assert cache.longest_prefix([]) == (None, 0)


def test_the_least_recently_used_gives_up_its_last_pages_first() -> None:
    cache, kv = new_cache(8)
    old, new = filled(cache, kv, [1] * 12), filled(cache, kv, [2] * 12)
    cache.keep(old)
    cache.keep(new)
    cache.free(cache.begin([1, 1]))  # used again: `new` is the least recently used now
    assert cache.reserve(cache.begin([]), 4 * PAGE_SIZE)
    assert (len(old), len(new)) == (12, 4)


def test_a_reservation_too_large_changes_nothing_in_use() -> None:
    cache, kv = new_cache(4)
    used = filled(cache, kv, [1] * 8)
    other = cache.begin([])
    assert not cache.reserve(other, 3 * PAGE_SIZE)
    assert other.pages == []
    assert used.ids == [1] * 8
    assert cache.n_free_pages == 2


@pytest.mark.parametrize(("a", "b", "n"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1), ([4], [5], 0)])
def test_common_prefix(a: list[int], b: list[int], n: int) -> None:
    assert common_prefix(a, b) == common_prefix(b, a) == n
