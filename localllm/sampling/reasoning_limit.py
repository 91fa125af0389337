"""Limits the number of reasoning tokens of a reply."""

from __future__ import annotations

import codecs
from collections import deque
from dataclasses import dataclass

from localllm.chat.thinking import ThinkingSplitter
from localllm.tokenizer import Tokenizer

#: Most tokens that are read together, so that `ReasoningLimit.end` delays no step.
_MAX_UNREAD = 256


@dataclass(eq=False)
class ReasoningLimit:
    """Forces the tokens that close the reasoning of one reply, after ``budget`` tokens or `end`."""

    splitter: ThinkingSplitter  # separates the reasoning from the answer
    tokenizer: Tokenizer
    budget: int | None = None  # maximum number of tokens of reasoning; None is no limit
    message: str = ""  # text at the end of reasoning that is cut off

    def __post_init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unread: list[int] = []  # tokens that the splitter has not read yet
        self._n_tokens = 0  # of reasoning
        self._forced: deque[int] | None = None  # remaining tokens of the end; None before it
        self._is_over = False

    def end(self) -> None:
        """End the reasoning before its next token.  May be called in any thread."""
        self.budget = 0

    def accept(self, id_: int) -> None:
        """Add a token of the reply."""
        if self._forced:
            self._forced.popleft()
        elif not self._is_over:
            self._unread.append(id_)
            if len(self._unread) >= _MAX_UNREAD:
                self._read()

    @property
    def next_id(self) -> int | None:
        """The token that must follow; None if any token may follow."""
        if self.budget is None or self._is_over:
            return None
        if self._forced is None:
            self._read()
            # A character whose bytes are several tokens is not cut.
            is_too_long = self._n_tokens >= self.budget and not self._decoder.getstate()[0]
            if self._is_over or not (self.splitter.is_open and is_too_long):
                return None
            end = self.message + self.splitter.closing
            ids = self.tokenizer.encode(end, add_special=False, parse_special=True, continuation=True)
            self._forced = deque(ids)
        if not self._forced:
            self._is_over = True
            return None
        return self._forced[0]

    def _read(self) -> None:
        for id_ in self._unread:
            self._n_tokens += self.splitter.is_open
            self.splitter.segments(self._decoder.decode(self.tokenizer.token_bytes(id_, special=True)))
        self._unread.clear()
        self._is_over = self.splitter.is_over
