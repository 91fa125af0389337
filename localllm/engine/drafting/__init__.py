"""Speculative decoding: drafters propose tokens, and the model verifies several drafts in one step.

`lookup` copies from the text itself; `model` uses a smaller model. Drafts change the speed, never the text: the
engine samples each token from the model's own logits, in order, as long as the sampled tokens equal the drafts.
(Leviathan et al., arXiv:2211.17192, and Chen et al., arXiv:2302.01318, accept more drafts at a high temperature. They
preserve the distribution of texts, but not the text of a seed.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft counts of a request.

    Attributes:
        drafted: Drafted tokens that were verified.
        accepted: Drafts that became part of the text.
        steps: Steps of the model for all tokens after the first. Without drafts, one step per token.
    """

    drafted: int
    accepted: int
    steps: int

    @property
    def share(self) -> float:
        """Fraction of the drafts that were accepted; 0 without drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0


class Drafter(Protocol):
    """Proposes the continuation of one text. Called in the engine thread."""

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return at most ``most`` tokens that may follow ``tokens``; empty if no gain is expected.

        Args:
            tokens: the text. It starts with the text of the last call. The new tokens show which of the last drafts
                were right. The list grows in place: do not store or change it.
            most: at least 1.
        """

    def close(self) -> None:
        """Free resources. Called once, at the end."""
