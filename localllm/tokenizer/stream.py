"""Decodes generated tokens to text: only complete characters, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from localllm.errors import UsageError
from localllm.tokenizer import Tokenizer


class ReplySplitter(Protocol):
    """Separates the answer of a reply from the rest (`localllm.chat.thinking.ThinkingSplitter`)."""

    @property
    def held(self) -> str:
        """Characters that are not yet assigned to a part."""

    def segments(self, text: str) -> Sequence[tuple[str, str, bool]]:
        """Add text. Return pieces: certain characters, their text, and whether the piece is reasoning."""

    def last_segments(self) -> Sequence[tuple[str, str, bool]]:
        """Return the pieces of the held characters, after the last text."""


class StreamDecoder:
    """Decodes generated ids as they arrive.

    The results of ``feed`` and ``finish`` add up to ``tokenizer.decode`` of all ids (with the same ``special`` and
    ``continuation``), up to the first stop string. An incomplete character is held back until it is complete. Invalid
    bytes become U+FFFD.

    Use one decoder per text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] | str = (),
        *,
        special: bool = False,
        continuation: bool = False,
        splitter: ReplySplitter | None = None,
    ) -> None:
        """Start the text of a reply.

        Args:
            tokenizer: the model's tokenizer.
            stop: strings that end the stream, even if they start or end inside a token.
            special: include the names of control tokens.
            continuation: the text continues earlier text, so its leading space is kept.
            splitter: separates reasoning from the answer. Stop strings then end only the answer.
        """
        self._tokenizer = tokenizer
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.add_space_prefix and not continuation
        self._stops = _StopStrings([stop] if isinstance(stop, str) else stop)
        self._splitter = splitter if stop else None
        #: Characters of an earlier reply prefix that the splitter holds. They are not part of this text.
        self._n_held_before = 0 if splitter is None else len(splitter.held)

    @property
    def stopped(self) -> str | None:
        """Stop string that ended the text, or None."""
        return self._stops.match

    def feed(self, token: int) -> str:
        """Add a token and return the text that is now certain; empty after a stop string."""
        return self._emit(self._tokenizer.token_bytes(token, special=self._special), final=False)

    def finish(self) -> str:
        """Return the text that was held back. Call it once, after the last token."""
        return self._emit(b"", final=True)

    def _emit(self, data: bytes, final: bool) -> str:
        text = self._utf8.decode(data, final)
        if text and self._drop_space:
            text = text.removeprefix(" ")
            self._drop_space = False
        if self._splitter is None:
            return self._stops.feed(text, final=final)
        return self._answer_stopped(self._splitter, text, final)

    def _answer_stopped(self, splitter: ReplySplitter, text: str, final: bool) -> str:
        """Return the text up to a stop string in the answer."""
        segments = [*splitter.segments(text), *(splitter.last_segments() if final else ())]
        texts: list[str] = []
        for characters, segment_text, is_reasoning in segments:
            raw = characters[self._n_held_before :]
            self._n_held_before -= len(characters) - len(raw)
            is_answer = segment_text == characters and not is_reasoning
            if not is_answer:  # no stop string includes reasoning or a tag
                texts.append(self._stops.feed("", final=True))
            if self.stopped is None:
                texts.append(self._stops.feed(raw, final=False) if is_answer else raw)
        return "".join(texts) + self._stops.feed("", final=final)


class _StopStrings:
    """Returns text up to the stop string that starts first. Holds back text that may be the start of a stop string.

    A complete stop string must wait while an earlier one may still become complete: with "abcd" and "bc", "abc" is
    held back until the next character.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise UsageError("a stop string is empty: give the text to stop at, or remove the stop string")
        self._stops = tuple(stops)
        self._pending = ""
        self.match: str | None = None

    def feed(self, text: str, *, final: bool) -> str:
        if not self._stops:
            return text
        if self.match is not None:
            return ""
        text = self._pending + text
        begin = len(text) if final else self._begin_of_open(text)
        hits = [(start, len(stop), stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if hits and min(hits)[0] <= begin:
            begin, _, self.match = min(hits)
        self._pending = "" if self.match is not None else text[begin:]
        return text[:begin]

    def _begin_of_open(self, text: str) -> int:
        """Return the first position whose following text may be the start of a stop string, else the length."""
        longest = max(len(stop) for stop in self._stops) - 1
        for begin in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[begin:]) for stop in self._stops):
                return begin
        return len(text)


class TextOffsets:
    """Start of each token in the text, in characters. All tokens of one character have the same start."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        """``offset``: start of the first token."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = offset

    def next(self, id_: int) -> int:
        offset = self._offset
        self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(id_)))
        return offset
