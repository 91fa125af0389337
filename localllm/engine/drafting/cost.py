"""Chooses the number of drafts, from running estimates of their acceptance rate and cost."""

from __future__ import annotations

#: Minimum of the expected speed-up. Below it, errors of the estimates cost more than drafts gain.
MIN_GAIN = 1.05

#: Cost of each further token of a step before it is measured, as a fraction of a step over one token.
FIRST_COST = 0.15

#: Weights of measurements below and above the estimate. Disturbances only make a measurement longer.
_WEIGHT_BELOW, _WEIGHT_ABOVE = 0.5, 0.125

#: Weight of one draft in the acceptance rate.
_DRAFT_WEIGHT = 0.15

#: Each step without drafts moves the cost towards `FIRST_COST` by this fraction, so that drafts are tried again.
_FORGOTTEN = 1 / 512


class StepCost:
    """Measured cost of verifying drafts. One instance per engine."""

    def __init__(self) -> None:
        self.single_s = 0.0  # seconds of a step over one token; 0 before it is measured
        self.token_cost = FIRST_COST  # cost of each further token, as a fraction of a step over one token

    def add(self, n_tokens: int, seconds: float) -> None:
        """Add a measured step over ``n_tokens`` of one sequence."""
        if n_tokens == 1:
            self.single_s = _moved(self.single_s, seconds)
            self.token_cost += _FORGOTTEN * (FIRST_COST - self.token_cost)
        elif self.single_s:
            self.token_cost = _moved(self.token_cost, max(0.0, seconds / self.single_s - 1) / (n_tokens - 1))

    def best(self, rate: float, most: int, draft_s: float = 0.0) -> int:
        """Return the number of drafts with the highest expected speed; 0 if drafts do not pay.

        If each draft is right with probability ``rate``, given that all drafts before it are right, n drafts yield
        1 + rate + … + rateⁿ tokens.

        ``most``: most drafts. ``draft_s``: seconds to make one draft.
        """
        if not self.single_s:
            return 0
        draft_cost = self.token_cost + draft_s / self.single_s
        best, best_gain = 0, MIN_GAIN
        n_tokens = chance = 1.0
        for n in range(1, most + 1):
            chance *= rate
            n_tokens += chance
            gain = n_tokens / (1 + n * draft_cost)
            if gain > best_gain:
                best, best_gain = n, gain
            elif chance < draft_cost * best_gain:
                break  # further drafts cost more than they gain
        return best


def moved_rate(rate: float, n_right: int, *, then_wrong: bool) -> float:
    """Return the updated acceptance rate after ``n_right`` right drafts and, if ``then_wrong``, a wrong one."""
    rate = 1 - (1 - rate) * (1 - _DRAFT_WEIGHT) ** n_right
    return rate * (1 - _DRAFT_WEIGHT) if then_wrong else rate


def _moved(estimate: float, measured: float) -> float:
    if not estimate:
        return measured
    return estimate + (_WEIGHT_BELOW if measured < estimate else _WEIGHT_ABOVE) * (measured - estimate)
