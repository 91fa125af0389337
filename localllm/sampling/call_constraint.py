"""Constrains the tool calls of a reply. Text before the first call is free and costs nothing.

The text is searched for the opening of a call. From there the grammar applies, until the end of the reply.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from localllm.chat.thinking import ThinkingSplitter, n_open
from localllm.sampling.penalties import Logits

if TYPE_CHECKING:
    from localllm.chat.calls.grammar import CallGrammar
    from localllm.sampling.constraint import Constraint
    from localllm.tokenizer import Tokenizer


class CallSearch:
    """Searches a reply for the start of its first call, while it arrives."""

    def __init__(self, grammar: CallGrammar, opened: str = "", prefix: str = "") -> None:
        """``grammar``: the openings of calls. ``opened``, ``prefix``: as in `ReplyParser.after`."""
        # Calls do not start in reasoning.
        self._grammar, self._splitter = grammar, None if grammar.is_anywhere else ThinkingSplitter(opened)
        self._text, self._bytes = "", b""  # the end of the answer, and of an incomplete character
        self._is_over = False  # whether the search has ended
        self._may_start: bool | None = None  # None until it is computed for the newest text
        #: The start of a call in the prefix; None without one.
        self.call_in_prefix = self.add((f"{opened}{prefix}" if grammar.is_anywhere else prefix).encode())

    @property
    def endings(self) -> list[str]:
        """The texts that complete an opening at the end of the reply."""
        if self._is_over:
            return []
        openings = self._grammar.openings
        if self._grammar.is_bare:
            start = self._text.lstrip()
            return [opening[len(start) :] for opening in openings if opening.startswith(start)]
        ends = {self._text[len(self._text) - n :] for n in range(1, max(map(len, openings)))}
        return [opening[len(end) :] for opening in openings for end in ends if end and opening.startswith(end)]

    @property
    def may_start(self) -> bool:
        """Whether the next token may complete an opening."""
        if self._may_start is None:
            if self._splitter is not None and (self._splitter.held or self._splitter.is_open):
                self._may_start = bool(self._splitter.held)
            elif self._grammar.is_bare:
                self._may_start = bool(self.endings)
            else:
                self._may_start = n_open(self._text, self._grammar.openings) > 0
        return self._may_start

    def stop(self) -> None:
        """Search no further."""
        self._is_over, self._text, self._may_start = True, "", None

    def copy(self) -> Self:
        search = copy.copy(self)
        search._splitter = copy.copy(self._splitter)
        return search

    def add(self, data: bytes) -> bytes | None:
        """Add text. Return the text of the call from its start on; None if no call has started."""
        if self._is_over:
            return None
        self._may_start = None
        data = self._bytes + data
        text, n = codecs.utf_8_decode(data, "replace", False)
        self._bytes = data[n:]
        if self._splitter is not None:
            text = "".join(piece.text for piece in self._splitter.feed(text) if not piece.thinking)
        self._text += text
        openings = self._grammar.openings
        if self._grammar.is_bare:
            self._text = self._text.lstrip()
            starts = [0] if self._text.startswith(openings) else []
            self._is_over = not starts and not self.endings
        else:
            starts = [at for opening in openings if (at := self._text.find(opening)) >= 0]
        if not starts:
            self._text = self._text[-max(map(len, openings)) :]
            return None
        return self._text[min(starts) :].encode() + self._bytes


@dataclass(eq=False)
class CallConstraint:
    """Constrains the calls of one reply (`localllm.sampling.sampler`)."""

    start: Callable[[], Constraint | None]  # returns the constraint of a call; None if calls cannot be constrained
    search: CallSearch  # searches the reply for its first call
    tokenizer: Tokenizer
    texts: Callable[[], Sequence[bytes]]  # returns the texts of all tokens

    def __post_init__(self) -> None:
        self._constraint: Constraint | None = None
        if self.search.call_in_prefix is not None:
            self._begin(self.search.call_in_prefix)

    @property
    def is_free(self) -> bool:
        """Whether every token is allowed, so that `allows` need not be called."""
        return self._constraint is None and not self.search.may_start

    @property
    def is_complete(self) -> bool:
        """Whether no text can follow."""
        return self._constraint is not None and self._constraint.is_complete

    def allows(self, id_: int) -> bool:
        if self._constraint is not None:
            return self._constraint.allows(id_)
        call = self.search.copy().add(self.tokenizer.token_bytes(id_))
        return call is None or self._may_begin(call)

    def masked(self, logits: Logits) -> Logits:
        """Return the logits with -inf for tokens that are not allowed."""
        if self._constraint is not None:
            return self._constraint.masked(logits)
        endings = tuple(ending.encode() for ending in self.search.endings)
        masked = logits.copy()
        if endings:
            completing = [id_ for id_, text in enumerate(self.texts()) if text.startswith(endings)]
            masked[[id_ for id_ in completing if not self.allows(id_)]] = -np.inf
        return masked

    def accept(self, id_: int) -> None:
        """Advance by one token of the reply."""
        if self._constraint is not None:
            self._constraint.accept(id_)
            return
        call = self.search.add(self.tokenizer.token_bytes(id_))
        if call is not None:
            self._begin(call)

    def _begin(self, call: bytes) -> None:
        constraint = self.start()
        self._constraint = constraint if constraint is not None and constraint.starts_with(call) else None
        self.search.stop()

    def _may_begin(self, call: bytes) -> bool:
        constraint = self.start()
        return constraint is None or constraint.starts_with(call)

    def n_possible(self, ids: Sequence[int]) -> int:
        """Return the number of leading tokens of ``ids`` that are allowed. After them, a call may start."""
        if self._constraint is not None:
            return self._constraint.n_possible(ids)
        search = self.search.copy()
        for n, id_ in enumerate(ids):
            call = search.add(self.tokenizer.token_bytes(id_))
            if call is not None:
                return n + self._may_begin(call)
            if search.may_start:
                return n + 1
        return len(ids)
