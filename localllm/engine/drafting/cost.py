"""How many drafts pay: from the running rate at which drafts are accepted, and what they were measured to cost."""

from __future__ import annotations

#: What drafts must at least bring, in speed without them: below it, errors of the estimates cost more.
MIN_GAIN = 1.05

#: What each token after the first adds to a step, in steps over one token, until it was measured.
FIRST_COST = 0.15

#: Weights of a measurement below and above the estimate: what disturbs a measurement makes it longer.
_WEIGHT_BELOW, _WEIGHT_ABOVE = 0.5, 0.125

#: Weight of one draft in the rate at which they are accepted.
_DRAFT_WEIGHT = 0.15

#: Each step without drafts moves the cost by this part towards the first one: what was too dear is tried again.
_FORGOTTEN = 1 / 512


class StepCost:
    """The measured cost of verifying drafts; one for an engine."""

    def __init__(self) -> None:
        self.single_s = 0.0  # seconds of a step over one token; 0 until one was measured
        self.token_cost = FIRST_COST  # what each further token adds, in steps over one

    def add(self, n_tokens: int, seconds: float) -> None:
        """Learns that a step over so many tokens of one sequence took so long."""
        if n_tokens == 1:
            self.single_s = _moved(self.single_s, seconds)
            self.token_cost += _FORGOTTEN * (FIRST_COST - self.token_cost)
        elif self.single_s:
            self.token_cost = _moved(self.token_cost, max(0.0, seconds / self.single_s - 1) / (n_tokens - 1))

    def best(self, rate: float, most: int, draft_s: float = 0.0) -> int:
        """The number of drafts with which a text comes fastest; 0 if it is none.

        If each draft is right with the probability ``rate``, provided that those before it are, n of them bring 1 +
        rate + … + rateⁿ tokens.

        ``most``: drafts at most; ``draft_s``: seconds that making a draft takes.
        """
        if not self.single_s:
            return 0
        each = self.token_cost + draft_s / self.single_s
        best, best_gain = 0, MIN_GAIN
        n_tokens = chance = 1.0
        for n in range(1, most + 1):
            chance *= rate
            n_tokens += chance
            gain = n_tokens / (1 + n * each)
            if gain > best_gain:
                best, best_gain = n, gain
            elif chance < each * best_gain:
                break  # further drafts cost more than they bring
        return best


def moved_rate(rate: float, n_right: int, *, then_wrong: bool) -> float:
    """The estimated probability that a draft is right, after ``n_right`` that were, and perhaps one that was not."""
    rate = 1 - (1 - rate) * (1 - _DRAFT_WEIGHT) ** n_right
    return rate * (1 - _DRAFT_WEIGHT) if then_wrong else rate


def _moved(estimate: float, measured: float) -> float:
    if not estimate:
        return measured
    return estimate + (_WEIGHT_BELOW if measured < estimate else _WEIGHT_ABOVE) * (measured - estimate)
