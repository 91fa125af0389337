"""Drafting is never much slower than plain decoding, whatever drafts cost and however many are right.

Time is simulated: each step and each round of drafts takes a fixed number of seconds.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from localllm.engine.drafting.cost import StepCost
from localllm.engine.drafting.model import DraftModel, ModelDrafter
from tests.helpers.fake_backend import fake_runner

#: Tokens of the text.
N_TOKENS = 3000


class Simulated(ModelDrafter):
    """Drafts tokens that are right with a fixed probability; a round takes ``round_s`` plus ``draft_s`` per draft."""

    def __init__(
        self, model: DraftModel, cost: StepCost, most: int, rate: float, round_s: float, draft_s: float
    ) -> None:
        super().__init__(model, cost, most)
        self.rate, self.round_s, self.draft_s = rate, round_s, draft_s
        self.chance, self.seconds = random.Random(1), 0.0

    def _draft(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return 1 for a right draft, and 2 for a wrong one."""
        seconds = self.round_s + n * self.draft_s
        self.seconds += seconds
        self._model.measured(seconds / n)
        return [1 if self.chance.random() < self.rate else 2 for _ in range(n)]


def speed(rate: float, round_s: float, draft_s: float, token_s: float, most: int = 7) -> float:
    """Return the speed with drafts relative to plain decoding, whose steps take one second.

    ``token_s``: seconds of each further token in a step.
    """
    runner, _ = fake_runner(N_TOKENS + 64)
    cost, expected = StepCost(), round_s / 4 + draft_s
    drafter = Simulated(DraftModel(runner, expected_cost=expected), cost, most, rate, round_s, draft_s)
    tokens, seconds = [1], 0.0
    while len(tokens) < N_TOKENS:
        drafts = drafter.propose(tokens, 64)
        n_right = next((i for i, draft in enumerate(drafts) if draft != 1), len(drafts))
        step_s = 1.0 + token_s * len(drafts)
        cost.add(1 + len(drafts), step_s)
        seconds += step_s
        tokens += [1] * (n_right + 1)
    return (len(tokens) - 1) / (seconds + drafter.seconds)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize(
    ("round_s", "draft_s"),
    [(0.0, 0.05), (0.0, 0.3), (0.0, 1.5), (0.2, 0.0), (1.0, 0.0), (4.0, 0.0), (0.3, 0.03), (1.0, 0.2)],
    ids=["cheap", "dear", "very dear", "block", "dear block", "very dear block", "chain", "dear chain"],
)
@pytest.mark.parametrize("token_s", [0.02, 0.2, 0.9])
def test_drafts_never_cost_much(rate: float, round_s: float, draft_s: float, token_s: float) -> None:
    assert speed(rate, round_s, draft_s, token_s) > 0.93


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_drafts_that_cannot_pay_are_seldom_tried(rate: float) -> None:
    """A draft costs more than a step, so no rate makes drafts pay."""
    assert speed(rate, 0.0, 1.2, 0.05) > 0.985


@pytest.mark.parametrize(("round_s", "draft_s"), [(0.0, 0.05), (0.2, 0.0), (0.1, 0.02)])
def test_right_drafts_pay(round_s: float, draft_s: float) -> None:
    assert speed(0.9, round_s, draft_s, 0.05) > 2
    assert speed(0.6, round_s, draft_s, 0.05) > 1.3
