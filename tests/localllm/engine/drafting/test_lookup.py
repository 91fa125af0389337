"""Prompt lookup compared with a naive search."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, strategies as st

from localllm.engine.drafting.cost import StepCost
from localllm.engine.drafting.lookup import LONGEST, SHORTEST, LookupDrafter, NGramIndex, continuation


def naive_find(tokens: Sequence[int]) -> tuple[int, int] | None:
    """Return the length of the longest repeated suffix, and the end of its last earlier occurrence."""
    for n in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                return n, start + n
    return None


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60), steps=st.lists(st.integers(1, 9)))
def test_the_index_finds_what_a_search_finds(tokens: list[int], steps: list[int]) -> None:
    """The result does not depend on how the text is divided."""
    index, n = NGramIndex(), 0
    for step in [*steps, len(tokens)]:
        n = min(n + step, len(tokens))
        assert index.find(tokens[:n]) == naive_find(tokens[:n])


@given(
    tokens=st.lists(st.integers(0, 9), min_size=2, max_size=20),
    place=st.integers(0, 100),
    n=st.integers(0, 30),
)
def test_a_continuation_may_repeat_itself(tokens: list[int], place: int, n: int) -> None:
    place = place % (len(tokens) - 1) + 1
    whole = list(tokens)
    for i in range(n):
        whole.append(whole[place + i])
    assert continuation(tokens, place, n) == whole[len(tokens) :]


class Counted(Sequence[int]):
    """Tokens that count accesses."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.n_read = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, key: int | slice) -> int | list[int]:  # type: ignore[override]
        found = self.tokens[key]
        self.n_read += len(found) if isinstance(found, list) else 1
        return found


def test_a_token_costs_the_same_however_long_the_text() -> None:
    tokens = Counted([i * i % 61 for i in range(5000)])
    index = NGramIndex()
    index.find(tokens)
    read = []
    for token in range(100):
        tokens.tokens.append(token % 7)
        tokens.n_read = 0
        index.find(tokens)
        read.append(tokens.n_read)
    assert max(read) <= 2 * sum(range(SHORTEST, LONGEST + 1))


def cost_of(token_cost: float) -> StepCost:
    """A step with one token takes a second; each further token adds ``token_cost`` seconds."""
    cost = StepCost()
    cost.add(1, 1.0)
    for _ in range(100):
        cost.add(8, 1 + 7 * token_cost)
    return cost


def test_drafts_start_when_guesses_are_right() -> None:
    """Guesses are checked against the text before they become drafts."""
    drafter = LookupDrafter(cost_of(0.3), most=7)
    tokens = [1, 2, 3, 4, 5]
    proposed = [len(drafter.propose(tokens, 100))]
    for i in range(40):
        tokens.append(tokens[i])
        proposed.append(len(drafter.propose(tokens, 100)))
    assert proposed[:5] == [0] * 5
    assert proposed[-20:] == [7] * 20
    assert list(drafter.propose(tokens, 3)) == tokens[-5:-2]


def test_drafts_end_when_guesses_are_wrong() -> None:
    """The same four tokens, followed by a different token each time."""
    drafter = LookupDrafter(cost_of(0.15), most=7)
    proposed = []
    for i in range(100):
        tokens = [token for j in range(i + 1) for token in (1, 2, 3, 4, 1000 + j)][:-1]
        proposed.append(len(drafter.propose(tokens, 100)))
    assert sum(map(bool, proposed[50:])) == 0


def test_no_drafts_if_a_larger_step_costs_as_much_as_its_tokens() -> None:
    drafter = LookupDrafter(cost_of(1.0), most=7)
    tokens = [1, 2, 3] * 10
    for i in range(40):
        assert not drafter.propose(tokens, 100)
        tokens.append(tokens[i])


def test_no_drafts_before_a_step_was_measured() -> None:
    cost = StepCost()
    drafter = LookupDrafter(cost)
    tokens = [1, 2, 3] * 10
    assert not drafter.propose(tokens, 100)
    cost.add(1, 0.5)
    tokens.append(1)
    assert drafter.propose(tokens, 100)
