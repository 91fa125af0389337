"""The paged cache against a plain model of it: every sequence must read back what was written to it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from localllm.engine.cache import Block, CachedSequence, PagedCache, common_prefix
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


def texts(block: Block) -> list[list[int]]:
    """All that the tree holds below a block."""
    below = [[*key, *rest] for key, child in block.children.items() for rest in ([], *texts(child))]
    return below + [tail.ids for tail in block.tails]


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
        longest = max((common_prefix(text, ids) for text in texts(self.cache._root)), default=0)
        whole_pages = longest // PAGE_SIZE * PAGE_SIZE
        n_available, n_pages = self.cache.n_available, self.cache.n_pages_to_begin(ids, len(ids))
        sequence = self.cache.begin(ids)
        # Where no page is left for the copy of a part, only whole pages are shared.
        assert len(sequence) in ((longest,) if n_available > n_pages else (whole_pages, longest))
        assert sequence.ids == ids[: len(sequence)]
        self.expected[sequence] = sequence.ids.copy()
        assert n_pages <= n_available or not self.cache.reserve(sequence, len(ids) - len(sequence))
        return sequence

    @rule(sequence=sequences, ids=IDS)
    def append(self, sequence: CachedSequence, ids: list[int]) -> None:
        has_room = self.cache.n_pages_missing(sequence, len(ids)) <= self.cache.n_available
        assert write(self.cache, self.kv, sequence, ids) == has_room
        if has_room:
            self.expected[sequence] += ids

    @rule(sequence=sequences, n_tokens=st.integers(0, 3 * PAGE_SIZE))
    def reserve_without_writing(self, sequence: CachedSequence, n_tokens: int) -> None:
        before, n_available = list(sequence.pages), self.cache.n_available
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
        assert key not in (sequence.blocks[n - 1] if n else self.cache._root).children

    @rule(target=sequences, sequence=consumes(sequences))
    def release(self, sequence: CachedSequence) -> object:
        self.cache.release(sequence)
        assert not sequence.pages
        del self.expected[sequence]
        return multiple()

    @rule()
    def forget(self) -> None:
        self.cache.forget()
        in_use = {page for sequence in self.expected for page in sequence.pages}
        assert self.cache.n_available == self.cache.n_pages - len(in_use)
        assert not self.cache._unused

    @invariant()
    def every_sequence_reads_back(self) -> None:
        for sequence, ids in self.expected.items():
            assert sequence.ids == ids
            assert read(self.kv, sequence) == ids
            assert [block.page for block in sequence.blocks] == sequence.pages
            assert len(set(sequence.pages)) == len(sequence.pages)

    @invariant()
    def the_tree_reads_back(self) -> None:
        def check(block: Block) -> None:
            for key, child in block.children.items():
                assert list(key) == child.ids == self.kv.ids[child.page].tolist()
                assert child.parent is block
                assert child.n_users <= block.n_users or block is self.cache._root
                check(child)
            for tail in block.tails:
                assert not tail.n_users
                assert tail.ids == self.kv.ids[tail.page, : len(tail.ids)].tolist()

        check(self.cache._root)

    @invariant()
    def users_are_counted(self) -> None:
        users = Counter(block for sequence in self.expected for block in sequence.blocks)
        assert all(block.n_users == n for block, n in users.items())
        assert not any(block.n_users for block in self.cache._unused)
        pages = [*self.cache._free, *(b.page for b in self.cache._unused), *(b.page for b in users)]
        assert sorted(pages) == list(range(self.cache.n_pages))

    def teardown(self) -> None:
        for sequence in list(self.expected):
            self.cache.release(sequence)
        self.cache.forget()
        assert len(self.cache._free) == self.cache.n_pages
        assert not self.cache._root.children
        assert not self.cache._root.tails


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_full_page_is_shared_and_of_the_next_the_common_part_copied() -> None:
    cache, kv = new_cache()
    first = filled(cache, kv, list(range(10)))  # two full pages and half of a third
    second = cache.begin([*range(9), 99])
    assert second.pages[:2] == first.pages[:2]
    assert len(second) == 8, "a page that is still written to is nobody else's"
    cache.release(first)
    third = cache.begin([*range(9), 99])
    assert len(third) == 9
    assert third.pages[2] not in first.pages
    assert write(cache, kv, third, [99])
    assert read(kv, third) == [*range(9), 99]


def test_a_sequence_that_ended_is_taken_up_without_a_copy() -> None:
    cache, kv = new_cache()
    first = filled(cache, kv, list(range(10)))
    pages = list(first.pages)
    cache.release(first)
    second = cache.begin(list(range(12)))
    assert (second.pages, len(second)) == (pages, 10)


def test_two_that_write_the_same_page_share_it_from_then_on() -> None:
    cache, kv = new_cache()
    sequences = [filled(cache, kv, [1, 2, 3]) for _ in range(2)]
    assert sequences[0].pages != sequences[1].pages
    for sequence in sequences:
        write(cache, kv, sequence, [4, 5])
    assert sequences[0].pages[0] == sequences[1].pages[0]
    assert cache.n_available == 8 - 3
    assert [read(kv, sequence) for sequence in sequences] == [[1, 2, 3, 4, 5]] * 2


def test_a_sequence_goes_on_with_pages_that_another_has_computed_meanwhile() -> None:
    cache, kv = new_cache()
    ids = list(range(11))
    slow = filled(cache, kv, ids[:6])
    filled(cache, kv, ids)
    cache.extend(slow, ids[:-1])
    assert slow.ids == ids[:8]
    assert read(kv, slow) == ids[:8]


def test_the_least_recently_used_goes_first_and_its_end_before_its_beginning() -> None:
    cache, kv = new_cache(6)
    old = filled(cache, kv, [1] * 8)
    new = filled(cache, kv, [2] * 8)
    cache.release(old)
    cache.release(new)
    cache.release(cache.begin([1] * 4))  # used again, of the old one only the first page
    filled(cache, kv, [3] * 16)
    assert [len(cache.begin(ids)) for ids in ([1] * 8, [2] * 8)] == [4, 4]


def test_a_page_is_not_evicted_for_its_own_copy() -> None:
    cache, kv = new_cache(2)
    first = filled(cache, kv, [1, 2, 3, 4])
    other = filled(cache, kv, [9])
    cache.release(first)
    sequence = cache.begin([1, 2, 5])
    assert len(sequence) == 0
    cache.release(other)
    assert len(cache.begin([1, 2, 5])) == 2


def test_the_key_of_the_next_page_is_that_under_which_it_will_be_found() -> None:
    cache, kv = new_cache()
    ids = list(range(12))
    sequence = filled(cache, kv, ids[:6])
    key = cache.next_page_key(sequence, ids)
    assert key == (sequence.blocks[0], (4, 5, 6, 7))
    assert cache.next_page_key(sequence, ids[:7]) is None
    write(cache, kv, sequence, ids[6:8])
    assert key[1] in key[0].children
    assert cache.next_page_key(filled(cache, kv, [3]), [3, 4, 5, 6]) == (cache._root, (3, 4, 5, 6))


@pytest.mark.parametrize(
    ("a", "b", "n"), [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2)]
)
def test_common_prefix(a: list[int], b: list[int], n: int) -> None:
    assert common_prefix(a, b) == common_prefix(b, a) == n
