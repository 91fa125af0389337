"""Drafts copied from the text: the tokens that followed the last occurrence of the most recent n-gram.

Source: Saxena, Prompt Lookup Decoding (2023), https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

from localllm.engine.cache import common_prefix
from localllm.engine.drafting.cost import StepCost, moved_rate
from localllm.options.types import DEFAULT_DRAFTS

#: Lengths of the n-grams to look up, longest first.
LONGEST, SHORTEST = 4, 2

#: Acceptance rate by n-gram length before it is measured.
_FIRST_RATES = {2: 0.1, 3: 0.2, 4: 0.3}


class NGramIndex:
    """Finds earlier occurrences of the last n-grams, in constant time per token."""

    def __init__(self) -> None:
        #: Position after the last occurrence of each n-gram, if a token follows it.
        self._followers: dict[tuple[int, ...], int] = {}
        self._n_tokens = 0
        #: N-grams at the end of the text, longest first. Not in ``_followers``, because no token follows them yet.
        self._ends: list[tuple[int, ...]] = []

    def find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Return (n, position) for the most recent earlier occurrence of the longest n-gram at the end of ``tokens``.

        ``position`` is the position after it. Returns None without an occurrence. ``tokens`` must start with the
        tokens of the last call.
        """
        followers = self._followers
        for position in range(self._n_tokens, len(tokens)):
            for end in self._ends:
                followers[end] = position
            recent = tuple(tokens[max(0, position + 1 - LONGEST) : position + 1])
            self._ends = [recent[-n:] for n in range(LONGEST, SHORTEST - 1, -1) if n <= len(recent)]
        self._n_tokens = len(tokens)
        for end in self._ends:
            if (follower := followers.get(end)) is not None:
                return len(end), follower
        return None


def continuation(tokens: Sequence[int], position: int, n: int) -> list[int]:
    """Return ``n`` tokens from ``position``. After the end of the text, the copied tokens repeat periodically."""
    copied = list(tokens[position : position + n])
    period = len(tokens) - position
    while len(copied) < n:
        copied.append(copied[len(copied) - period])
    return copied


class LookupDrafter:
    """Drafts with an `NGramIndex`.

    A lookup costs almost nothing, so it is done at every step. Its first token is compared with the next token even
    if no draft is made. This shows when drafts start to pay.
    """

    def __init__(self, cost: StepCost, most: int = DEFAULT_DRAFTS, always: bool = False) -> None:
        """``most``: most drafts per step. ``always``: make ``most`` drafts even if no gain is expected."""
        self._always = always
        self._cost = cost
        self._most = most
        self._index = NGramIndex()
        self._rates = dict(_FIRST_RATES)  # by n-gram length
        self._guess: list[int] = []
        self._n_matched = self._n_before = 0

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        self._learn(tokens)
        match = self._index.find(tokens)
        if match is None:
            self._guess = []
            return []
        self._n_matched, position = match
        self._n_before = len(tokens)
        most = min(most, self._most)
        n = most if self._always else self._cost.best(self._rates[self._n_matched], most)
        self._guess = continuation(tokens, position, max(n, 1))
        return self._guess[:n]

    def close(self) -> None:
        """Do nothing."""

    def _learn(self, tokens: Sequence[int]) -> None:
        """Compare the last drafts with the text."""
        if self._guess:
            came = tokens[self._n_before : self._n_before + len(self._guess)]
            n_right = common_prefix(self._guess, came)
            rate = self._rates[self._n_matched]
            self._rates[self._n_matched] = moved_rate(rate, n_right, then_wrong=n_right < len(came))
