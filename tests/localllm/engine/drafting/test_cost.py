"""Which number of drafts pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.drafting.costs import LEAST_GAIN, StepCosts, moved_share
from localllm.drafting.drafter import MOST_DRAFTS


def costs_of(by_size: dict[int, float]) -> StepCosts:
    costs = StepCosts()
    costs.add(1, 0.5)
    for n, cost in by_size.items():
        costs.add(n, cost * 0.5)
    return costs


@given(
    by_size=st.lists(st.floats(1, 10), min_size=8, max_size=8),
    share=st.floats(0, 1),
    draft_s=st.floats(0, 1),
    most=st.integers(0, 7),
)
def test_best_is_the_best_of_all(by_size: list[float], share: float, draft_s: float, most: int) -> None:
    costs = costs_of({n + 2: cost for n, cost in enumerate(by_size)})

    def gain(n: int) -> float:
        return sum(share**i for i in range(n + 1)) / (by_size[n - 1] + n * draft_s / 0.5)

    gains = {n: gain(n) for n in range(1, most + 1)}
    best = costs.best(share, most, draft_s)
    if best:
        assert gains[best] == pytest.approx(max(gains.values()))
        assert gains[best] >= LEAST_GAIN - 1e-6
    else:
        assert all(value <= LEAST_GAIN + 1e-6 for value in gains.values())


def test_nothing_pays_before_a_step_was_measured() -> None:
    costs = StepCosts()
    costs.add(8, 1.0)
    assert costs.is_due
    assert costs.best(1.0, 7) == 0


def test_unknown_sizes_are_thought_to_cost_a_little_more_than_known_ones() -> None:
    costs = costs_of({4: 2.0})
    assert costs.best(1.0, 3) == 3
    assert costs.best(0.9, 7) > 3
    assert costs_of({4: 4.0}).best(0.5, 7) == 0
    assert costs_of({}).best(0.6, 7) > 0


def test_larger_numbers_than_are_ever_drafted() -> None:
    costs = costs_of({MOST_DRAFTS + 1: 2.0})
    assert costs.best(1.0, 10 * MOST_DRAFTS) == MOST_DRAFTS
    costs.add(10 * MOST_DRAFTS, 1.0)


def test_one_long_step_is_no_reason_to_give_up() -> None:
    costs = costs_of({8: 2.0})
    costs.add(8, 0.5 * 10)
    assert costs.best(0.9, 7) > 0
    for _ in range(20):
        costs.add(8, 0.5 * 10)
    assert costs.best(0.5, 7) == 0


def test_what_was_too_dear_is_tried_again_at_last() -> None:
    costs = costs_of(dict.fromkeys(range(2, 9), 20.0))
    assert costs.best(0.9, 7) == 0
    for _ in range(600):
        costs.add(1, 0.5)
    assert costs.best(0.9, 7) > 0


def test_a_step_without_drafts_is_due_now_and_then() -> None:
    costs = costs_of({})
    for _ in range(100):
        costs.add(8, 1.0)
    assert costs.is_due
    costs.add(1, 0.5)
    assert not costs.is_due


@given(share=st.floats(0, 1), n_right=st.integers(0, 8), then_wrong=st.booleans())
def test_shares_move_towards_what_was_seen(share: float, n_right: int, then_wrong: bool) -> None:
    moved = moved_share(share, n_right, then_wrong=then_wrong)
    assert 0 <= moved <= 1
    assert moved >= share - 1e-9 or then_wrong
    assert moved <= share + 1e-9 or n_right
