"""Constrains text to a grammar, by masking logits (`localllm.sampling.grammar`)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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


class Constraint:
    """Constrains one text to a grammar (`localllm.sampling.sampler`)."""

    #: Whether every token is allowed, so that `allows` need not be called.
    is_free = False

    def __init__(
        self,
        matcher: Any,
        vocabulary: Any,
        tokenizer: Tokenizer,
        n_vocab: int,
        *,
        closing: str | None,
        opening: dict[int, str],
    ) -> None:
        """
        Args:
            matcher: llguidance's matcher, in its initial state.
            vocabulary: llguidance's vocabulary.
            closing: end of the reasoning that the text starts with; None if it starts with the answer.
            opening: tokens that may start reasoning, with the closing of each.
        """
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._closing = None if closing is None else closing.encode()
        self._opening = opening
        self._thought = b""  # end of the reasoning
        self._n_vocab = n_vocab
        self._mask = np.empty((n_vocab + 32) // 32, np.uint32)  # one bit per token, and one for an extra end token
        self._ends = np.array(sorted(tokenizer.eog_ids), np.int64)

    @property
    def is_complete(self) -> bool:
        """True if no text can follow."""
        return self._closing is None and bool(self._matcher.is_stopped())

    def allows(self, id_: int) -> bool:
        if self._closing is not None:
            return id_ not in self._tokenizer.eog_ids
        return id_ in self._opening or bool(self._matcher.validate_tokens([id_]))

    def masked(self, logits: Logits) -> Logits:
        """Return the logits with -inf for tokens that are not allowed, and for short spellings of a forced text."""
        if self._closing is not None:
            masked = logits.copy()
            masked[self._ends] = -np.inf
            return masked
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        bits = np.unpackbits(self._mask.view(np.uint8), count=self._n_vocab, bitorder="little")
        bits[list(self._opening)] = 1
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
        texts = [self._tokenizer.token_bytes(id_) for id_ in allowed.tolist()]
        longest = max(texts, key=len)
        if not all(text and longest.startswith(text) for text in texts):  # an end token has no text
            return allowed
        return allowed[[len(text) == len(longest) for text in texts]]

    def starts_with(self, data: bytes) -> bool:
        """Return whether the text may start with ``data``, and continue after it."""
        ids = self._vocabulary.tokenize_bytes(data)
        return not self._matcher.is_error() and int(self._matcher.try_consume_tokens(ids)) == len(ids)

    def accept(self, id_: int) -> None:
        """Advance by one token of the text."""
        if self._closing is not None:
            self._think(id_)
        elif id_ in self._opening:
            self._closing = self._opening[id_].encode()
        else:
            self._consume([id_])
        self._opening = {}

    def n_possible(self, ids: Sequence[int]) -> int:
        """Return the number of leading tokens of ``ids`` that are allowed."""
        return len(ids) if self._closing is not None else int(self._matcher.validate_tokens(list(ids)))

    def _think(self, id_: int) -> None:
        assert self._closing is not None
        thought = self._thought + self._tokenizer.token_bytes(id_, special=True)
        before, closing, answer = thought.partition(self._closing)
        self._thought = before[-len(self._closing) :]
        if closing:
            self._closing = None
            if answer := answer.lstrip():  # rest of a token that contains the end of the tag
                self._consume(self._vocabulary.tokenize_bytes(answer))

    def _consume(self, ids: list[int]) -> None:
        self._matcher.consume_tokens(ids)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UsageError(f"the text no longer matches its grammar: {first_line(self._matcher.get_error())}")
