"""Drafts by a model: its run follows the text, whatever of the drafts was right."""

from __future__ import annotations

import random

import numpy as np
import pytest

from localllm.drafting import model as drafting_model
from localllm.drafting.costs import StepCosts
from localllm.drafting.model import ModelDrafter, likeliest
from tests.helpers.fake_backend import N_VOCAB, fake_engine, greedy_after


@pytest.fixture(autouse=True)
def _every_token_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake backend's likeliest tokens are not likely at all."""
    monkeypatch.setattr(drafting_model, "LEAST_PROBABILITY", 0.0)


def cheap() -> StepCosts:
    """Costs with which any draft pays."""
    costs = StepCosts()
    costs.add(1, 1000.0)
    costs.add(8, 1000.0)
    return costs


def test_drafts_are_the_models_own_text() -> None:
    engine, ops = fake_engine(context=64)
    drafter = ModelDrafter(engine, cheap(), most=5)
    tokens = [5, 6, 7]
    assert drafter.propose(tokens, 100) == greedy_after(tokens, 5)
    tokens += greedy_after(tokens, 6)
    n_before = sum(len(batch.ids) for batch in ops.batches)
    assert drafter.propose(tokens, 3) == greedy_after(tokens, 3)
    assert sum(len(batch.ids) for batch in ops.batches) - n_before == 2 + 2, "what it has is not evaluated again"


@pytest.mark.parametrize("seed", range(5))
def test_it_follows_any_text(seed: int) -> None:
    chance = random.Random(seed)
    engine, _ = fake_engine(context=200)
    costs = cheap()
    drafter = ModelDrafter(engine, costs, most=4)
    tokens = [1, 2, 3]
    while len(tokens) < 150:
        most = chance.randint(1, 6)
        drafts = list(drafter.propose(tokens, most))
        assert drafts == greedy_after(tokens, len(drafts))
        assert len(drafts) <= min(most, 4)
        tokens += drafts[: chance.randint(0, len(drafts))]
        tokens.append(chance.randrange(N_VOCAB))
    drafter.close()
    drafter.close()
    assert len(engine._open[0].active) == 0  # type: ignore[index]


def test_it_pauses_where_drafts_are_wrong_and_goes_on_where_they_are_right() -> None:
    engine, _ = fake_engine(context=1000)
    costs = cheap()
    costs.add(8, 3000.0)
    drafter = ModelDrafter(engine, costs, most=7)
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


def test_what_is_not_expected_to_pay_is_not_tried_at_once() -> None:
    """To find out it would have to evaluate the prompt; and what it cost once is known to the next text."""
    engine, ops = fake_engine(context=400, max_tokens=100)
    costs = cheap()
    for expected, first_try in ((0.9, 64), (0.01, 0)):
        drafter = ModelDrafter(engine, costs, expected_cost=expected)
        tokens = [1, 2, 3]
        for n in range(80):
            assert bool(drafter.propose(tokens, 100)) == (n >= first_try)
            if n >= first_try:
                break
            assert not ops.batches
            tokens.append(5)
        drafter.close()
    costs.draft_s = 0.9 * costs.single_s
    assert not ModelDrafter(engine, costs, expected_cost=0.01).propose([1, 2, 3], 100)


def test_a_text_beyond_its_context_gets_no_drafts() -> None:
    engine, _ = fake_engine(context=16, max_tokens=16)
    drafter = ModelDrafter(engine, cheap(), most=4)
    tokens = list(range(1, 13))
    assert len(drafter.propose(tokens, 100)) == 4
    tokens += [1, 2]
    assert len(drafter.propose(tokens, 100)) == 2
    tokens += [1, 2]
    assert not drafter.propose(tokens, 100)
    tokens += [1, 2]
    assert not drafter.propose(tokens, 100)


def test_a_long_prompt_is_taken_up_a_chunk_at_a_time() -> None:
    engine, ops = fake_engine(context=64, max_tokens=8)
    drafter = ModelDrafter(engine, cheap(), most=2)
    tokens = list(range(1, 25))
    for n_batches in (1, 2):
        assert not drafter.propose(tokens, 100)
        assert len(ops.batches) == n_batches
        tokens.append(9)
    tokens += [1] * 4
    while not (drafts := drafter.propose(tokens, 100)):
        pass
    assert drafts == greedy_after(tokens, 2)


def test_it_does_not_wait_for_room() -> None:
    engine, _ = fake_engine(context=16)
    other = engine.start(list(range(16)))
    engine.advance(other)
    engine.advance(other)
    other.waiting = True  # as if its thread were about to go on
    drafter = ModelDrafter(engine, cheap(), most=2)
    tokens = [50, 51, 52]
    assert not drafter.propose(tokens, 100)
    other.waiting = False
    engine.finish(other)
    tokens.append(53)
    assert drafter.propose(tokens, 100) == greedy_after(tokens, 2)


def test_tokens_that_it_does_not_have_end_its_drafts() -> None:
    engine, _ = fake_engine()
    drafter = ModelDrafter(engine, cheap())
    tokens = [1, 2]
    assert drafter.propose(tokens, 100)
    tokens.append(N_VOCAB)
    assert not drafter.propose(tokens, 100)
    tokens.append(1)
    assert not drafter.propose(tokens, 100)
    assert not ModelDrafter(engine, cheap()).propose([N_VOCAB + 5], 100)


def test_it_gives_up_before_tokens_it_does_not_believe_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting_model, "LEAST_PROBABILITY", 0.999)
    engine, ops = fake_engine()
    tokens = [1, 2]
    drafter = ModelDrafter(engine, cheap())
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
