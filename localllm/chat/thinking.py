"""Separates a model's reasoning from its answer, while the text streams in.

Models that reason first do so between tags at the very beginning of a reply.  Some templates write the opening tag
themselves, at the end of the prompt. The reply then starts with reasoning.

gpt-oss writes messages ("harmony"): a header that names the channel, and the text. The channel "analysis" is
reasoning.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal, NamedTuple

#: Tags around reasoning, opening and closing.
TAGS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<seed:think>": "</seed:think>",
    "<think:opensource>": "</think:opensource>",  # Hunyuan 3
    "<|START_THINKING|>": "<|END_THINKING|>",  # Command R7B and A
    "<mm:think>": "</mm:think>",  # MiniMax M3
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|channel>thought": "<channel|>",
}

#: What prompts of gpt-oss end with.
_MESSAGE = "<|start|>assistant"
#: Ends a message of gpt-oss, and starts the one with the answer.
_ANSWER = f"<|end|>{_MESSAGE}<|channel|>final<|message|>"
_HEADER = re.compile(
    r"\s*+(?:<\|start\|>assistant)?\s*+(?:to=(\S+?))?\s*+<\|channel\|>(\w+)\s*(?:to=([^\s<]+))?"
    r"\s*(?:<\|constrain\|>)?\s*\w*<\|message\|>"
)
_LONGEST_HEADER = 200
#: Starts of headers, and ends of messages.
_BEGINNINGS = ("<|start|>", "<|channel|>", "to=")
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")

#: Tags around a message to a tool, in one form for all headers. The tool's name and "<|message|>" follow the first.
CALL, END_OF_CALL = "<|channel|>commentary to=", "<|call|>"


class Piece(NamedTuple):
    """A piece of a reply: reasoning if ``thinking``, otherwise answer text."""

    text: str
    thinking: bool


def opening_tag(prompt: str) -> str:
    """Return the opening tag of reasoning at the end of a prompt; empty without a tag."""
    end = prompt.rstrip()
    return next((tag for tag in (*TAGS, _MESSAGE) if end.endswith(tag)), "")


def reply_prefix(prompt: str, reasoning: str, text: str) -> str:
    """Return the start of a reply, formatted to follow a prompt.  Reasoning comes first if the prompt opens it."""
    tag = opening_tag(prompt)
    if tag == _MESSAGE and "<|message|>" not in text:
        messages = {"analysis": reasoning, "final": text}
        texts = [f"<|channel|>{name}<|message|>{content}" for name, content in messages.items() if content]
        return f"<|end|>{_MESSAGE}".join(texts)
    closing = TAGS.get(tag, "")
    if closing and text.lstrip().startswith(tag):  # it repeats the tag of the prompt
        return text.lstrip().removeprefix(tag + prompt[len(prompt.rstrip()) :]).removeprefix(tag)
    if not closing or closing in text:
        return text
    return f"{reasoning}\n{closing}\n\n{text}" if text else reasoning


def split(text: str, opened: str = "", ends: tuple[str, ...] = ()) -> tuple[str, str]:
    """Split a whole reply into reasoning and answer. The arguments match `ThinkingSplitter`."""
    splitter = ThinkingSplitter(opened, ends)
    pieces = [*splitter.feed(text), *splitter.finish()]
    thinking = "".join(piece.text for piece in pieces if piece.thinking)
    return thinking, "".join(piece.text for piece in pieces if not piece.thinking)


class Segment(NamedTuple):
    """Characters of a reply, and their text: empty for tags and white space next to tags."""

    raw: str
    text: str
    thinking: bool


class ThinkingSplitter:
    """Splits a reply into reasoning and answer while it arrives.

    Tags count only at the start of a reply, because an answer may be about tags. Tags and white space next to them
    belong to neither part. Text that may become a tag is held back.

    Attributes:
        ends: Tags of tool calls that end reasoning, too, and belong to the answer.
        held: Text whose part is not certain yet.
    """

    def __init__(self, opened: str = "", ends: tuple[str, ...] = ()) -> None:
        """Start a reply. ``opened`` is the tag at the end of its prompt (`opening_tag`)."""
        self._tag = opened
        self.ends = ends
        self._state: Literal["start", "thinking", "answer", "header"] = "start"
        self._has_messages = self._is_call = False  # whether it comes in messages, and is in one to a tool
        self._is_unclosed = False  # whether a call has ended the reasoning, whose closing tag may follow
        self.held = ""
        self._after_tag = bool(opened)  # whether white space that follows is omitted

    @property
    def is_open(self) -> bool:
        """True while the next text is reasoning."""
        return self._state == "thinking" or (self._state == "start" and self._tag in TAGS)

    @property
    def is_over(self) -> bool:
        """True if no more reasoning can follow."""
        return self._state == "answer" and not self._has_messages

    @property
    def closing(self) -> str:
        """Text that ends the reasoning, and starts the answer."""
        return _ANSWER if self._has_messages else TAGS.get(self._tag, "</think>")

    def feed(self, text: str) -> list[Piece]:
        """Add the next piece of text. Return the pieces that are certain now."""
        return _pieces(self.segments(text))

    def finish(self) -> list[Piece]:
        """Return the last pieces; call it once, after the last text."""
        return _pieces(self.last_segments())

    def segments(self, text: str) -> list[Segment]:
        """Add the next piece of text. Return the certain characters, including tags."""
        self.held += text
        segments: list[Segment] = []
        if self._state == "start":
            segments += self._begin()
        if self._has_messages:
            return segments + self._read_messages()
        if self._state == "thinking":
            segments += self._think()
        if self._state == "answer" and self._is_unclosed:
            segments += self._skip_closing_tag()
        elif self._state == "answer":
            segments += self._emit(len(self.held))
        return segments

    def last_segments(self) -> list[Segment]:
        """Return the characters that were held back, after the last text."""
        if self._state == "start":
            self._state = "thinking" if self._tag else "answer"
        if self._state == "header":
            self._state = "answer"
        return self._emit(len(self.held))

    def _begin(self) -> list[Segment]:
        """Find the tag at the start of the reply. A tag at the end of the prompt may be repeated."""
        text = self.held.lstrip()
        if self._tag == _MESSAGE or (not self._tag and text.startswith("<|channel|>")):
            self._has_messages, self._state = True, "header"
            return []
        if text and not self._tag and "<|channel|>".startswith(text):
            return []
        # A reply without reasoning may start with the closing tag.
        for tag in [self._tag] if self._tag else (*TAGS, *TAGS.values()):
            if text.startswith(tag):
                self._tag, self._state, self._after_tag = tag, "thinking" if tag in TAGS else "answer", True
                return [self._skip(len(self.held) - len(text) + len(tag))]
            if tag.startswith(text):  # it may become one, and so may white space alone
                return []
        self._state = "thinking" if self._tag else "answer"
        return []

    def _think(self) -> list[Segment]:
        closing = TAGS.get(self._tag, "</think>")
        tags = (closing, *self.ends)
        matches = [(at, tag) for tag in tags if (at := self.held.find(tag)) >= 0]
        if not matches:
            return self._emit(len(self.held) - n_open(self.held, tags))
        at, tag = min(matches)
        segments = self._emit(at)
        self._state, self._is_unclosed = "answer", tag != closing
        if not self._is_unclosed:
            segments.append(self._skip(len(closing)))
        self._after_tag = True
        return segments

    def _skip_closing_tag(self) -> list[Segment]:
        """The answer up to the closing tag of reasoning that a call has ended before."""
        closing = TAGS.get(self._tag, "</think>")
        at = self.held.find(closing)
        if at < 0:
            return self._emit(len(self.held) - n_open(self.held, closing))
        segments = [*self._emit(at), self._skip(len(closing))]
        self._is_unclosed = False
        return segments + self._emit(len(self.held))

    def _read_messages(self) -> list[Segment]:
        segments: list[Segment] = []
        while True:
            if self._state != "header":
                ends = [(at, tag) for tag in _ENDS if (at := self.held.find(tag)) >= 0]
                if not ends:
                    return segments + self._emit(len(self.held) - n_open(self.held, _ENDS))
                at, tag = min(ends)
                segments += self._emit(at)
                end = END_OF_CALL if self._is_call else ""
                segments.append(self._skip(0 if tag.startswith(_BEGINNINGS) else len(tag), end))
                self._state, self._is_call = "header", False
            header = _HEADER.match(self.held)
            if header is None:
                text = self.held.lstrip()
                if len(text) < _LONGEST_HEADER and any(tag.startswith(text[: len(tag)]) for tag in _BEGINNINGS):
                    return segments  # the rest of the header follows
                self._has_messages, self._state = False, "answer"
                return segments + self._emit(len(self.held))
            tool, channel = header[1] or header[3], header[2]
            self._is_call = bool(tool)
            self._state = "thinking" if channel == "analysis" and not tool else "answer"
            segments.append(self._skip(header.end(), f"{CALL}{tool}<|message|>" if tool else ""))

    def _skip(self, n: int, text: str = "") -> Segment:
        """Characters of a tag, replaced by ``text`` in the answer."""
        raw, self.held = self.held[:n], self.held[n:]
        return Segment(raw, text, thinking=False)

    def _emit(self, n: int) -> list[Segment]:
        """The next ``n`` characters, as text of the current part; white space after a tag is apart from it."""
        text = self.held[:n]
        segments: list[Segment] = []
        if self._after_tag and text:
            n_space = len(text) - len(text.lstrip())
            self._after_tag = n_space == len(text)
            segments += [self._skip(n_space)] if n_space else []
            text = text[n_space:]
        self.held = self.held[len(text) :]
        return [*segments, Segment(text, text, self._state == "thinking")] if text else segments


def _pieces(segments: list[Segment]) -> list[Piece]:
    return [Piece(segment.text, segment.thinking) for segment in segments if segment.text]


def n_open(text: str, tags: str | tuple[str, ...]) -> int:
    """Return the number of characters at the end of ``text`` that may be the start of one of ``tags``."""
    tags = (tags,) if isinstance(tags, str) else tags
    first_characters, longest = _first_characters(tags)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if text[start] in first_characters and any(tag.startswith(text[start:]) for tag in tags):
            return len(text) - start
    return 0


@cache
def _first_characters(tags: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """First characters of tags, and the length of the longest tag."""
    return frozenset(tag[0] for tag in tags if tag), max(map(len, tags), default=0)
