"""What guesses the tokens that follow, and what became of the guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

#: Drafts a step at most where nobody asks for a number: with the token before them, as many as the CPU's kernels
#: multiply at once.
DEFAULT_DRAFTS = 7

#: Drafts a step that may be asked for at most.
MOST_DRAFTS = 64


@dataclass(frozen=True, slots=True)
class Drafts:
    """What became of a generation's drafts.

    Attributes:
        drafted: tokens that were guessed and evaluated.
        accepted: how many of them the text went on with.
        steps: evaluations by the model that the tokens after the first one took; without drafts, one for each.
    """

    drafted: int
    accepted: int
    steps: int

    @property
    def share(self) -> float:
        """The part of the drafts that was accepted; 0 if there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0


class Drafter(Protocol):
    """Guesses what one text goes on with.  What it guesses may change how fast the text comes, never the text."""

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """At most ``most`` tokens that may follow ``tokens``; none where guessing is not worth it.

        Args:
            tokens: the text so far.  It begins with that of the last call: what it has beyond that tells which of
                the tokens proposed then were right.  It grows in place, and must not be kept or changed.
            most: at least 1.
        """
        ...

    def measured(self, n_tokens: int, seconds: float) -> None:
        """Told of the model's steps that went on with this text alone: over how many tokens, how long it took."""
        ...

    def close(self) -> None:
        """Lets go of what it holds.  Never waits; may be called more than once, also from a finaliser."""
        ...
