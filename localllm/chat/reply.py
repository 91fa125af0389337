"""Splits a reply into reasoning, answer text and tool calls while it arrives.

A call starts when its tool is known, and its arguments follow as the model writes them. Errors are repaired before
the arguments are emitted, so a finished call has valid JSON. A call of a tool that was not offered is also a call, so
that the program that runs tools can answer "no such tool". Text that is no call stays text. Both add a warning.
Parsing never fails.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from localllm.chat.calls.formats import CONTROL_TAGS, TAGS, TAGS_IN_CALLS
from localllm.chat.calls.patterns import BARE, PARTIAL_BARE_LIST
from localllm.chat.calls.reader import CallReader
from localllm.chat.calls.source import CallDelta, CallSource, Reading, parameters_of
from localllm.chat.conversation import ToolCall
from localllm.chat.thinking import Piece, ThinkingSplitter, n_open, opening_tag
from localllm.tokenizer import Tokenizer

__all__ = ["CallDelta", "ReplyParser", "ToolCall"]

_OPENINGS = tuple(sorted(TAGS, key=len, reverse=True))
_OPENING = re.compile("|".join(map(re.escape, _OPENINGS)))

Event = Piece | CallDelta | ToolCall


class ReplyParser:
    """Parses one reply.

    Attributes:
        opened: Tag that the prompt ended with.
        warnings: Calls that were repaired or left as text, and why.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (), opened: str = "") -> None:
        """Start a reply.

        Args:
            tools: Offered to the model, as OpenAI's API describes functions. Without tools, all text is answer text.
            opened: Tag that the prompt ended with (`localllm.chat.thinking.opening_tag`).
        """
        self.opened = opened
        self._events: list[Event] = []
        self._source = CallSource()
        self._calls = CallReader(self._source, self._emit_call, self._emit_text)
        self.warnings = self._calls.warnings
        self._thinking = ThinkingSplitter(opened)
        self._reasoning: list[str] = []
        self.offer(tools)
        self._space = ""  # trailing white space of the answer, which may precede a call
        self._space_before_call: str | None = None  # None if no call precedes
        self._has_text = False  # whether the answer has text
        self._prefix_rest = ""  # the end of the reply prefix that was not emitted
        self._reading = self._read()

    @classmethod
    def after(
        cls,
        prompt_ids: Sequence[int],
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]] = (),
        prefix: str = "",
    ) -> ReplyParser:
        """Start the reply to a prompt whose end, ``prefix``, is already the start of the reply.

        Text of the prefix is not emitted again; calls in the prefix are.
        """
        last_ids = prompt_ids[-16 - 4 * len(prefix) :]
        end = tokenizer.decode([id_ for id_ in last_ids if id_ >= 0], special=True)  # negative ids are images
        parser = cls(tools, opening_tag(end.removesuffix(prefix)))
        if prefix:
            parser._events = [event for event in parser.feed(prefix) if not isinstance(event, Piece)]
            parser._prefix_rest = parser._space + parser._calls.held + parser._source.rest + parser._thinking.held
        return parser

    def offer(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Set the tools that may be called."""
        self._calls.parameters = parameters_of(tools)
        self._thinking.ends = CONTROL_TAGS if self._calls.parameters else ()

    def splitter(self) -> ThinkingSplitter:
        """Return a splitter that separates the rest of the reply as this parser does."""
        return copy.copy(self._thinking)

    def feed(self, text: str) -> list[Event]:
        """Add the next piece of text. Return the events that are certain now."""
        self._consume(self._thinking.feed(text))
        return self._drain()

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """Return the last events; call it once, after the last text.

        Args:
            is_cut: Whether the model would have continued. An open call is then no error, and its arguments are the
                start of JSON.
        """
        self._consume(self._thinking.finish())
        self._source.is_whole, self._source.is_cut = True, is_cut
        for _ in self._reading:
            pass
        if self._space_before_call is None:
            self._emit(self._space)
        if self._reasoning and not (is_cut or self._has_text or self._calls.n_calls):
            self._call_at_end_of_reasoning()
        return self._drain()

    def _consume(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if piece.thinking and self._calls.parameters:
                self._reasoning.append(piece.text)
            if piece.thinking or not self._calls.parameters:
                self._emit(piece.text, piece.thinking)
            else:
                self._source.add(piece.text)
                next(self._reading)

    def _call_at_end_of_reasoning(self) -> None:
        """Emit calls at the end of the reasoning, for replies without an answer.

        Models forget to close their reasoning, and tags that are no control tokens do not end it.
        """
        parser = ReplyParser()
        parser._calls.parameters = self._calls.parameters
        parser._consume([Piece("".join(self._reasoning), thinking=False)])
        calls: list[CallDelta | ToolCall] = []
        n_skipped = 0  # calls before the last text
        for event in parser.finish():
            if isinstance(event, ToolCall):
                calls.append(event)
            elif isinstance(event, CallDelta):
                calls.append(replace(event, index=event.index - n_skipped))
            elif event.text.strip():
                n_skipped += sum(isinstance(call, ToolCall) for call in calls)
                calls = []
        self._events += calls

    def _drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _emit(self, text: str, thinking: bool = False) -> None:
        if self._prefix_rest:
            n = next(
                (i for i, (a, b) in enumerate(zip(text, self._prefix_rest, strict=False)) if a != b),
                min(len(text), len(self._prefix_rest)),
            )
            self._prefix_rest = self._prefix_rest[n:] if n == len(text) else ""
            text = text[n:]
        if text:
            self._events.append(Piece(text, thinking))

    def _emit_text(self, text: str) -> None:
        """Emit answer text. White space around a call is emitted once, and only between two texts."""
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if end == 0:
            self._space += text
            return
        space = self._space + text[:start]
        if self._space_before_call is not None:
            space = max(self._space_before_call, space, key=_breadth) if self._has_text else ""
            self._space_before_call = None
        self._emit(space + text[start:end])
        self._space, self._has_text = text[end:], True

    def _emit_call(self, event: CallDelta | ToolCall) -> None:
        if isinstance(event, CallDelta) and event.begins:
            self._prefix_rest = ""
            self._space_before_call = max(self._space_before_call or "", self._space, key=_breadth)
            self._space = ""
        self._events.append(event)

    def _read(self) -> Reading:
        """Read the answer from its start to its end."""
        source = self._source
        while not (text := source.rest.lstrip()) or self._may_be_bare(text):
            if not (yield from source.wait()):
                break
        if (bare := BARE.match(text)) is not None:
            names = {bare["in_list"], bare["on_line"]} - {None}
            if bare["has_keyword"] or all(map(self._calls.is_offered, names)):
                yield from self._calls.read("")
        while True:
            opening = _OPENING.search(source.text, source.at)
            if opening is None:
                n_held = (
                    0 if source.is_whole else n_open(source.text[max(source.at, len(source.text) - 50) :], _OPENINGS)
                )
                self._emit_text(source.take(len(source.text) - source.at - n_held))
                if not (yield from source.wait()):
                    return
                continue
            self._emit_text(source.take(opening.start() - source.at))
            source.take(0 if opening[0] in TAGS_IN_CALLS else len(opening[0]))
            yield from self._calls.read(opening[0])

    def _may_be_bare(self, text: str) -> bool:
        """Whether text may be the start of a call without tags, before its arguments."""
        return self._calls.may_be_bare(text) or (text.startswith("[") and bool(PARTIAL_BARE_LIST.fullmatch(text)))


def _breadth(space: str) -> tuple[int, int]:
    """Size of white space: its lines, then its length."""
    return space.count("\n"), len(space)
