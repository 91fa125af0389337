"""The number of drafts with the best expected speed."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from localllm.engine.drafting.cost import FIRST_COST, MIN_GAIN, StepCost, moved_rate


def cost_of(token_cost: float, single_s: float = 0.5) -> StepCost:
    """A step with one token takes ``single_s``; each further token adds ``token_cost`` times that."""
    cost = StepCost()
    cost.add(1, single_s)
    cost.add(3, single_s * (1 + 2 * token_cost))
    while abs(cost.token_cost - token_cost) > 1e-9 * (1 + token_cost):
        cost.add(3, single_s * (1 + 2 * token_cost))
    return cost


@given(token_cost=st.floats(0, 2), rate=st.floats(0, 1), draft_s=st.floats(0, 1), most=st.integers(0, 9))
def test_best_is_the_best_of_all(token_cost: float, rate: float, draft_s: float, most: int) -> None:
    cost = cost_of(token_cost)

    def gain(n: int) -> float:
        return sum(rate**i for i in range(n + 1)) / (1 + n * (token_cost + draft_s / 0.5))

    gains = {n: gain(n) for n in range(1, most + 1)}
    best = cost.best(rate, most, draft_s)
    if best:
        assert gains[best] == pytest.approx(max(gains.values()))
        assert gains[best] >= MIN_GAIN - 1e-6
    else:
        assert all(value <= MIN_GAIN + 1e-6 for value in gains.values())


def test_no_draft_pays_before_a_step_of_one_token_was_measured() -> None:
    cost = StepCost()
    cost.add(8, 1.0)
    assert cost.best(1.0, 7) == 0
    cost.add(1, 0.5)
    assert (cost.token_cost, cost.best(0.6, 7) > 0) == (FIRST_COST, True)


def test_one_long_step_is_no_reason_to_give_up() -> None:
    cost = cost_of(0.15)
    cost.add(8, 0.5 * 10)
    assert cost.best(0.9, 7) > 0
    for _ in range(20):
        cost.add(8, 0.5 * 10)
    assert cost.best(0.9, 7) == 0


def test_an_expensive_draft_is_tried_again_later() -> None:
    cost = cost_of(3.0)
    assert cost.best(0.9, 7) == 0
    for _ in range(1500):
        cost.add(1, 0.5)
    assert cost.best(0.9, 7) > 0


def test_the_speed_of_single_steps_is_followed() -> None:
    cost = cost_of(0.15)
    for _ in range(50):
        cost.add(1, 2.0)
    assert cost.single_s == pytest.approx(2.0, rel=0.01)


@given(rate=st.floats(0, 1), n_right=st.integers(0, 8), then_wrong=st.booleans())
def test_rates_move_towards_the_observed_rate(rate: float, n_right: int, then_wrong: bool) -> None:
    moved = moved_rate(rate, n_right, then_wrong=then_wrong)
    assert 0 <= moved <= 1
    assert moved >= rate - 1e-9 or then_wrong
    assert moved <= rate + 1e-9 or n_right
