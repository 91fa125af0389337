"""What steps cost, measured while they are made, and how many drafts pay."""

from __future__ import annotations

from itertools import pairwise

from localllm.drafting.drafter import MOST_DRAFTS

#: What drafts must at least bring, in speed without them: below it, errors of the estimates cost more.
LEAST_GAIN = 1.05

#: What a second token, and each further one, is thought to cost, in steps over one, until it was measured.
_SECOND_COST, _FURTHER_COST = 0.3, 0.05

#: Weights of a measurement that is below and above the estimate.  What disturbs a measurement makes it longer.
_WEIGHT_BELOW, _WEIGHT_ABOVE = 0.5, 0.125

#: Steps with drafts after which one without is due, to be compared with.
_DRAFTS_IN_A_ROW = 64

#: Steps without drafts after which what drafts cost is forgotten, so that it is measured again.
_MEMORY = 512


class StepCosts:
    """Running estimates of what a step over several tokens costs, in steps over one token.

    One for a model: all generations share it.  Several threads may use it; a measurement lost between them is no
    harm.

    Attributes:
        single_s: seconds of a step over one token; 0 until one was measured.
        draft_s: seconds of a step of the model that drafts, if there is one; 0 until one was measured.
    """

    def __init__(self) -> None:
        self.single_s = self.draft_s = 0.0
        self._since_single = self._since_drafts = 0
        self._forget()

    @property
    def is_due(self) -> bool:
        """Whether a step over one token is wanted, because there is no recent one to compare with."""
        return not self.single_s or self._since_single >= _DRAFTS_IN_A_ROW

    def add(self, n_tokens: int, seconds: float) -> None:
        """Learns that a step over so many tokens took so long."""
        if n_tokens == 1:
            self.single_s = _moved(self.single_s, seconds)
            self._since_single = 0
            self._since_drafts += 1
            if self._since_drafts >= _MEMORY:  # not ==: another thread may count in between
                self._forget()
        elif self.single_s and n_tokens <= MOST_DRAFTS + 1:
            self._since_single += 1
            self._since_drafts = 0
            self._measured[n_tokens] = _moved(self._measured[n_tokens], seconds / self.single_s)
            self._estimate()

    def best(self, share: float, most: int, draft_s: float = 0.0) -> int:
        """The number of drafts with which a text comes fastest, 0 if it is none.

        If each draft is right with the probability ``share``, provided that those before it are, then n of them
        bring 1 + share + … + shareⁿ tokens.

        Args:
            share: the probability.
            most: drafts at most.
            draft_s: seconds that making a draft takes.
        """
        most = min(most, MOST_DRAFTS)
        if not self.single_s or most < 1:
            return 0
        if (1 - share) * LEAST_GAIN * self._least_cost > 1:
            return 0  # as would be found below, where it takes longer
        draft_cost = draft_s / self.single_s
        costs = self._costs
        best, best_gain = 0, LEAST_GAIN
        n_tokens = chance = 1.0
        for n in range(1, most + 1):
            chance *= share
            n_tokens += chance
            gain = n_tokens / (costs[n + 1] + n * draft_cost)
            if gain > best_gain:
                best, best_gain = n, gain
        return best

    def _forget(self) -> None:
        #: By the number of tokens, in steps over one; 0 where it is not known.
        self._measured = [0.0, 1.0] + [0.0] * MOST_DRAFTS
        self._estimate()
        self._since_drafts = 0

    def _estimate(self) -> None:
        self._costs = _filled(self._measured)
        self._least_cost = min(self._costs[2:])


def _moved(estimate: float, measurement: float) -> float:
    """An estimate after one more measurement; 0 is none."""
    if not estimate:
        return measurement
    weight = _WEIGHT_BELOW if measurement < estimate else _WEIGHT_ABOVE
    return estimate + weight * (measurement - estimate)


def _filled(measured: list[float]) -> list[float]:
    """The costs with those that are not known put on lines between their neighbours, or beyond the last one.

    A second token is thought to add half of what the next larger step that was measured adds: a matrix product of
    several tokens is another kernel than that of one.
    """
    costs = measured.copy()
    if not costs[2]:
        further = next(filter(None, costs[3:]), None)
        costs[2] = 1 + _SECOND_COST if further is None else (1 + further) / 2
    known = [n for n, cost in enumerate(costs) if cost]
    for low, high in pairwise(known):
        slope = (costs[high] - costs[low]) / (high - low)
        for n in range(low + 1, high):
            costs[n] = costs[low] + slope * (n - low)
    last = known[-1]
    for n in range(last + 1, len(costs)):
        costs[n] = costs[last] + _FURTHER_COST * (n - last)
    return costs


#: Weight of one draft in the share of those that are right.
_DRAFT_WEIGHT = 0.15


def moved_share(share: float, n_right: int, *, then_wrong: bool) -> float:
    """The estimated probability that a draft is right, after ``n_right`` that were, and perhaps one that was not."""
    share = 1 - (1 - share) * (1 - _DRAFT_WEIGHT) ** n_right
    return share * (1 - _DRAFT_WEIGHT) if then_wrong else share
