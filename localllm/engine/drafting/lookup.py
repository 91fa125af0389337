"""Drafts from the text itself: what followed the last time that it had the same few tokens in a row.

Source: Saxena, Prompt Lookup Decoding (2023), https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

from localllm.engine.cache import common_prefix
from localllm.engine.drafting.cost import StepCost, moved_rate
from localllm.options.types import DEFAULT_DRAFTS

#: Tokens in a row that are looked for: the longest first.
LONGEST, SHORTEST = 4, 2

#: How often the same 2, 3, 4 tokens are expected to be followed by the same, until it was seen.
_FIRST_RATES = {2: 0.1, 3: 0.2, 4: 0.3}


class NGramIndex:
    """Where the last few tokens of a text stood before: in constant time a token, however long the text."""

    def __init__(self) -> None:
        #: The position that follows the last occurrence of each n-gram with something behind it.
        self._followers: dict[tuple[int, ...], int] = {}
        self._n_tokens = 0
        #: The n-grams at the end of the text, the longest first: not taken up yet, for nothing is behind them.
        self._ends: list[tuple[int, ...]] = []

    def find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """The most recent earlier occurrence of the longest possible end of ``tokens``.  ``tokens``: those of the
        last call, and more.  Returns how many tokens it has in common with the end, and the position behind it; None
        if there is none."""
        followers = self._followers
        for place in range(self._n_tokens, len(tokens)):  # those that are new
            for end in self._ends:
                followers[end] = place
            recent = tuple(tokens[max(0, place + 1 - LONGEST) : place + 1])
            self._ends = [recent[-n:] for n in range(LONGEST, SHORTEST - 1, -1) if n <= len(recent)]
        self._n_tokens = len(tokens)
        for end in self._ends:
            if (found := followers.get(end)) is not None:
                return len(end), found
        return None


def continuation(tokens: Sequence[int], place: int, n: int) -> list[int]:
    """The ``n`` tokens from position ``place`` on; at the text's end it goes on into what was copied itself."""
    copied = list(tokens[place : place + n])
    period = len(tokens) - place
    while len(copied) < n:
        copied.append(copied[len(copied) - period])
    return copied


class LookupDrafter:
    """Drafts by `NGramIndex`.

    A look-up costs next to nothing.  So it is done at every step, and the first token found is compared with what
    comes even where no draft is made of it: that is how it is known when drafts begin to pay.
    """

    def __init__(self, cost: StepCost, most: int = DEFAULT_DRAFTS, always: bool = False) -> None:
        """``most``: drafts a step at most; ``always``: as many, whether they are expected to pay or not."""
        self._always = always
        self._cost = cost
        self._most = most
        self._index = NGramIndex()
        self._rates = dict(_FIRST_RATES)  # by the length of the match
        self._guess: list[int] = []
        self._n_matched = self._n_before = 0

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        self._learn(tokens)
        match = self._index.find(tokens)
        if match is None:
            self._guess = []
            return []
        self._n_matched, place = match
        self._n_before = len(tokens)
        most = min(most, self._most)
        n = most if self._always else self._cost.best(self._rates[self._n_matched], most)
        self._guess = continuation(tokens, place, max(n, 1))
        return self._guess[:n]

    def close(self) -> None:
        """There is nothing to let go of."""

    def _learn(self, tokens: Sequence[int]) -> None:
        """Compares the last guess with what came."""
        if self._guess:
            came = tokens[self._n_before : self._n_before + len(self._guess)]
            n_right = common_prefix(self._guess, came)
            rate = self._rates[self._n_matched]
            self._rates[self._n_matched] = moved_rate(rate, n_right, then_wrong=n_right < len(came))
