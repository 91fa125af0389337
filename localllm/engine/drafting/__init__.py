"""Speculative decoding: proposing tokens that the model verifies in one step, several at a time.

`lookup` proposes that the text repeats itself; `model` asks a smaller model.  What is proposed changes how fast a
text comes, never the text: the engine samples each token from the model's own logits, in the same order, as long as
the tokens chosen are those proposed.  (Leviathan et al., arXiv:2211.17192, and Chen et al., arXiv:2302.01318, accept
more drafts where the temperature is high, but keep only the distribution of texts, not the text of a seed.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Drafts:
    """Counts of a request's drafts.

    Attributes:
        drafted: tokens that were proposed and evaluated.
        accepted: how many of them the text continued with.
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
    """Proposes how one text continues.  Called in the engine's thread."""

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """At most ``most`` tokens that may follow ``tokens``; none where that is not expected to pay.

        Args:
            tokens: the text so far.  It begins with that of the last call: what it has beyond that tells which of
                the tokens proposed then were right.  It grows in place, and must not be kept or changed.
            most: at least 1.
        """
        ...

    def close(self) -> None:
        """Lets go of what it holds; called once, in the end."""
        ...
