"""Constrains text to a grammar, by masking logits (`localllm.sampling.grammar`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from localllm.errors import UsageError
from localllm.sampling.candidates import IntArray
from localllm.sampling.penalties import Logits

if TYPE_CHECKING:
    from localllm.tokenizer import Tokenizer

#: Most allowed tokens for which the longest common spelling is preferred.
_MAX_SPELLINGS = 256


def first_line(text: str) -> str:
    """Return a message's first line, without the excerpts of the grammar that follow."""
    reason = re.search(r"^error: (.*)", text, re.MULTILINE)  # for a regular expression
    return (reason[1] if reason else text.partition("\n")[0])[:300]


@dataclass(eq=False)
class Constraint:
    """Constrains one text to a grammar (`localllm.sampling.sampler`)."""

    matcher: Any  # llguidance's matcher, in its initial state
    vocabulary: Any  # llguidance's vocabulary
    tokenizer: Tokenizer
    n_vocab: int
    closing: bytes | None  # end of the reasoning that the text starts with; None if it starts with the answer
    opening: dict[int, str]  # tokens that may start reasoning, with the closing of each
    #: Whether every token is allowed, so that `allows` need not be called.
    is_free: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._thought = b""  # end of the reasoning
        self._mask = np.empty((self.n_vocab + 32) // 32, np.uint32)  # a bit per token, and one for an extra end token
        self._ends = np.array(sorted(self.tokenizer.eog_ids), np.int64)

    @property
    def is_complete(self) -> bool:
        """True if no text can follow."""
        return self.closing is None and bool(self.matcher.is_stopped())

    def allows(self, id_: int) -> bool:
        if self.closing is not None:
            return id_ not in self.tokenizer.eog_ids
        return id_ in self.opening or bool(self.matcher.validate_tokens([id_]))

    def masked(self, logits: Logits) -> Logits:
        """Return the logits with -inf for tokens that are not allowed, and for short spellings of a forced text."""
        if self.closing is not None:
            masked = logits.copy()
            masked[self._ends] = -np.inf
            return masked
        self.matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        bits = np.unpackbits(self._mask.view(np.uint8), count=self.n_vocab, bitorder="little")
        bits[list(self.opening)] = 1
        allowed: IntArray = np.flatnonzero(bits)
        if 1 < len(allowed) <= _MAX_SPELLINGS:
            allowed = self._longest_spelling(allowed)
        masked = np.full_like(logits, -np.inf)
        masked[allowed] = logits[allowed]
        return masked

    def _longest_spelling(self, allowed: IntArray) -> IntArray:
        """Return the longest of tokens that all start one forced text, or all tokens if several texts can follow.

        The model would choose the longest spelling. The shorter tokens are likely only because other texts start with
        them.
        """
        texts = [self.tokenizer.token_bytes(id_) for id_ in allowed.tolist()]
        longest = max(texts, key=len)
        if not all(text and longest.startswith(text) for text in texts):  # an end token has no text
            return allowed
        return allowed[[len(text) == len(longest) for text in texts]]

    def starts_with(self, data: bytes) -> bool:
        """Return whether the text may start with ``data``, and continue after it."""
        ids = self.vocabulary.tokenize_bytes(data)
        return not self.matcher.is_error() and int(self.matcher.try_consume_tokens(ids)) == len(ids)

    def accept(self, id_: int) -> None:
        """Advance by one token of the text."""
        if self.closing is not None:
            self._think(id_)
        elif id_ in self.opening:
            self.closing = self.opening[id_].encode()
        else:
            self._consume([id_])
        self.opening = {}

    def n_possible(self, ids: Sequence[int]) -> int:
        """Return the number of leading tokens of ``ids`` that are allowed."""
        return len(ids) if self.closing is not None else int(self.matcher.validate_tokens(list(ids)))

    def _think(self, id_: int) -> None:
        assert self.closing is not None
        thought = self._thought + self.tokenizer.token_bytes(id_, special=True)
        before, closing, answer = thought.partition(self.closing)
        self._thought = before[-len(self.closing) :]
        if closing:
            self.closing = None
            if answer := answer.lstrip():  # rest of a token that contains the end of the tag
                self._consume(self.vocabulary.tokenize_bytes(answer))

    def _consume(self, ids: list[int]) -> None:
        self.matcher.consume_tokens(ids)
        self._check()

    def _check(self) -> None:
        if self.matcher.is_error():
            raise UsageError(f"the text no longer matches its grammar: {first_line(self.matcher.get_error())}")
