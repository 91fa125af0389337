"""Drafts by a model: its sequence follows the text, whichever drafts were right."""

from __future__ import annotations

import random

import numpy as np
import pytest

from localllm.engine.drafting.cost import StepCost
from localllm.engine.drafting.model import DraftModel, ModelDrafter, likeliest
from tests.helpers.fake_backend import N_VOCAB, FakeStep, fake_runner, greedy_after


@pytest.fixture(autouse=True)
def _every_token_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake backend's best tokens have low probability."""
    monkeypatch.setattr("localllm.engine.drafting.model.MIN_PROBABILITY", 0.0)


def cheap() -> StepCost:
    """Make any draft pay off."""
    cost = StepCost()
    cost.add(1, 1000.0)
    for _ in range(100):
        cost.add(8, 1000.0)
    return cost


def draft_model(context: int = 64, max_tokens: int = 8, expected_cost: float = 0.0) -> tuple[DraftModel, FakeStep]:
    runner, ops = fake_runner(context, max_tokens=max_tokens)
    return DraftModel(runner, expected_cost=expected_cost), ops


def test_drafts_are_the_models_own_text() -> None:
    model, ops = draft_model()
    drafter = ModelDrafter(model, cheap(), most=5)
    tokens = [5, 6, 7]
    assert drafter.propose(tokens, 100) == greedy_after(tokens, 5)
    tokens += greedy_after(tokens, 6)
    n_before = sum(len(batch.ids) for batch in ops.batches)
    assert drafter.propose(tokens, 3) == greedy_after(tokens, 3)
    assert sum(len(batch.ids) for batch in ops.batches) - n_before == 2 + 2, "cached tokens are not evaluated again"


@pytest.mark.parametrize("seed", range(5))
def test_the_drafters_sequence_follows_any_text(seed: int) -> None:
    chance = random.Random(seed)
    model, _ = draft_model(context=200)
    drafter = ModelDrafter(model, cheap(), most=4)
    tokens = [1, 2, 3]
    while len(tokens) < 150:
        most = chance.randint(1, 6)
        drafts = list(drafter.propose(tokens, most))
        assert drafts == greedy_after(tokens, len(drafts))
        assert len(drafts) <= min(most, 4)
        tokens += drafts[: chance.randint(0, len(drafts))]
        tokens.append(chance.randrange(N_VOCAB))
    drafter.close()
    assert model.runner.cache.n_available == model.runner.cache.n_pages


def test_drafting_pauses_if_drafts_are_wrong_and_continues_if_they_are_right() -> None:
    model, _ = draft_model(context=1000)
    cost = cheap()
    for _ in range(100):
        cost.add(8, 3000.0)
    drafter = ModelDrafter(model, cost, most=7)
    tokens = [1]
    drafted = []
    for _ in range(400):
        drafted.append(len(drafter.propose(tokens, 100)))
        tokens.append((greedy_after(tokens, 1)[0] + 1) % N_VOCAB)
    assert sum(map(bool, drafted[100:])) <= 5
    assert any(drafted[100:])
    drafted = []
    while len(tokens) < 990:
        drafts = drafter.propose(tokens, 100)
        drafted.append(len(drafts))
        tokens += greedy_after(tokens, len(drafts) + 1)
    assert max(drafted) == 7


def test_drafts_that_are_not_expected_to_pay_are_delayed() -> None:
    """A measurement would need the whole prompt; the cost of an earlier text is known."""
    cost = cheap()
    for expected, first_try in ((0.9, 64), (0.01, 0)):
        model, ops = draft_model(context=400, max_tokens=100, expected_cost=expected)
        drafter = ModelDrafter(model, cost)
        tokens = [1, 2, 3]
        for n in range(80):
            assert bool(drafter.propose(tokens, 100)) == (n >= first_try)
            if n >= first_try:
                break
            assert not ops.batches
            tokens.append(5)
    model, _ = draft_model(expected_cost=0.01)
    model.measured(0.9 * cost.single_s)
    assert not ModelDrafter(model, cost).propose([1, 2, 3], 100)


def test_a_text_longer_than_the_drafters_context_gets_no_drafts() -> None:
    model, _ = draft_model(context=16, max_tokens=16)
    drafter = ModelDrafter(model, cheap(), most=4)
    tokens = list(range(1, 13))
    assert len(drafter.propose(tokens, 100)) == 4
    tokens += [1, 2]
    assert len(drafter.propose(tokens, 100)) == 2
    tokens += [1, 2]
    assert not drafter.propose(tokens, 100)
    tokens += [1, 2]
    assert not drafter.propose(tokens, 100)


def test_a_long_prompt_is_evaluated_in_chunks() -> None:
    model, ops = draft_model(context=64, max_tokens=8)
    drafter = ModelDrafter(model, cheap(), most=2)
    tokens = list(range(1, 25))
    for n_batches in (1, 2):
        assert not drafter.propose(tokens, 100)
        assert len(ops.batches) == n_batches
        tokens.append(9)
    tokens += [1] * 4
    while not (drafts := drafter.propose(tokens, 100)):
        pass
    assert drafts == greedy_after(tokens, 2)


def test_the_drafter_does_not_wait_for_pages() -> None:
    model, _ = draft_model(context=16)
    cache = model.runner.cache
    other = cache.begin([])
    assert cache.reserve(other, 16)
    drafter = ModelDrafter(model, cheap(), most=2)
    tokens = [50, 51, 52]
    assert not drafter.propose(tokens, 100)
    cache.release(other)
    tokens.append(53)
    assert drafter.propose(tokens, 100) == greedy_after(tokens, 2)


def test_an_unchanged_text_gets_no_new_drafts() -> None:
    """For example, its request was not part of the step."""
    model, _ = draft_model()
    drafter = ModelDrafter(model, cheap(), most=3)
    tokens = [1, 2, 3]
    assert drafter.propose(tokens, 100)
    assert not drafter.propose(tokens, 100)
    tokens += greedy_after(tokens, 2)
    assert drafter.propose(tokens, 100) == greedy_after(tokens, 3)


def test_tokens_that_the_drafter_lacks_end_its_drafts() -> None:
    model, _ = draft_model()
    drafter = ModelDrafter(model, cheap())
    tokens = [1, 2]
    assert drafter.propose(tokens, 100)
    tokens.append(N_VOCAB)
    assert not drafter.propose(tokens, 100)
    tokens.append(1)
    assert not drafter.propose(tokens, 100)
    assert not ModelDrafter(model, cheap()).propose([N_VOCAB + 5], 100)


def test_drafts_end_before_unlikely_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.engine.drafting.model.MIN_PROBABILITY", 0.999)
    model, ops = draft_model()
    tokens = [1, 2]
    drafter = ModelDrafter(model, cheap())
    assert not drafter.propose(tokens, 100)
    assert len(ops.batches) == 1
    tokens.append(5)
    assert not drafter.propose(tokens, 100)
    assert len(ops.batches) == 2


def test_likeliest() -> None:
    logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    assert likeliest(logits) == (1, pytest.approx(0.6))
    assert np.isnan(likeliest(np.array([1, np.nan, 2], np.float32))[1])
    assert np.isnan(likeliest(np.array([1, np.inf, 2], np.float32))[1])
