"""Separates a model's reasoning from its answer, while the text streams in.

Models that reason first do so between tags at the very beginning of a reply.  Some templates write the opening tag
themselves, at the end of the prompt, so that a reply begins inside it.

gpt-oss writes messages ("harmony"): a header that names the channel, and the text.  What it writes in its channel
"analysis" is what it thinks.
"""

from __future__ import annotations

import re
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
_HEADER = re.compile(
    r"\s*+(?:<\|start\|>assistant)?\s*+(?:to=(\S+?))?\s*+<\|channel\|>(\w+)\s*(?:to=([^\s<]+))?"
    r"\s*(?:<\|constrain\|>)?\s*\w*<\|message\|>"
)
_LONGEST_HEADER = 200
#: How headers begin, and what ends a message.
_BEGINNINGS = ("<|start|>", "<|channel|>", "to=")
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")

#: Around a message to a tool, however its header was written; behind the first are the tool's name and "<|message|>".
CALL, END_OF_CALL = "<|channel|>commentary to=", "<|call|>"


class Piece(NamedTuple):
    """A piece of a reply; ``thinking`` tells which part it is of."""

    text: str
    thinking: bool


def opening_tag(prompt: str) -> str:
    """The opening tag that a prompt ends with, so that the reply begins with thinking; empty if there is none."""
    end = prompt.rstrip()
    return next((tag for tag in (*TAGS, _MESSAGE) if end.endswith(tag)), "")


def begun(prompt: str, reasoning: str, text: str) -> str:
    """The beginning of a reply as it follows a prompt; where the prompt opens reasoning, that comes first."""
    tag = opening_tag(prompt)
    if tag == _MESSAGE and "<|message|>" not in text:
        said = {"analysis": reasoning, "final": text}
        return f"<|end|>{_MESSAGE}".join(f"<|channel|>{name}<|message|>{part}" for name, part in said.items() if part)
    closing = TAGS.get(tag, "")
    if closing and text.lstrip().startswith(tag):  # it opens again what the prompt has opened
        return text.lstrip().removeprefix(tag + prompt[len(prompt.rstrip()) :]).removeprefix(tag)
    if not closing or closing in text:
        return text
    return f"{reasoning}\n{closing}\n\n{text}" if text else reasoning


def split(text: str, opened: str = "") -> tuple[str, str]:
    """Splits a whole reply into reasoning and answer.  ``opened``: the tag that its prompt ended with
    (`opening_tag`)."""
    splitter = ThinkingSplitter(opened)
    pieces = [*splitter.feed(text), *splitter.finish()]
    thinking = "".join(piece.text for piece in pieces if piece.thinking)
    return thinking, "".join(piece.text for piece in pieces if not piece.thinking)


class ThinkingSplitter:
    """Splits a reply that comes in pieces; whatever the pieces, the parts are the same.

    Tags count only at the beginning: later on they are text, for an answer may speak of them.  Tags, and white space
    beside them, belong to neither part; what may become a tag is held back.
    """

    def __init__(self, opened: str = "") -> None:
        """Begin a reply; ``opened`` is the tag that its prompt ended with."""
        self._tag = opened
        self._state: Literal["start", "thinking", "answer", "header"] = "start"
        #: Whether it comes in messages, and is at one to a tool.
        self._has_messages = self._is_call = False
        self._held = ""
        #: Whether white space that comes next is left out.
        self._after_tag = bool(opened)

    @property
    def held(self) -> str:
        """Text whose part is not certain yet."""
        return self._held

    def feed(self, text: str) -> list[Piece]:
        """Takes the next piece of text; returns what is certain now."""
        self._held += text
        pieces: list[Piece] = []
        if self._state == "start":
            self._begin()
        if self._has_messages:
            return self._read_messages()
        if self._state == "thinking":
            pieces += self._think()
        if self._state == "answer":
            pieces += self._emit(len(self._held))
        return pieces

    def finish(self) -> list[Piece]:
        """Returns what was held back; call it once, after the last text."""
        if self._state == "start":
            self._state = "thinking" if self._tag else "answer"
        if self._state == "header":
            self._state = "answer"
        return self._emit(len(self._held))

    def _begin(self) -> None:
        """Finds out what the reply begins with; a tag that the prompt has opened may be there again."""
        text = self._held.lstrip()
        if self._tag == _MESSAGE or (not self._tag and text.startswith("<|channel|>")):
            self._has_messages, self._state = True, "header"
            return
        if text and not self._tag and "<|channel|>".startswith(text):
            return
        # A reply without any may begin with what closes it.
        for tag in [self._tag] if self._tag else (*TAGS, *TAGS.values()):
            if text.startswith(tag):
                self._tag, self._state, self._after_tag = tag, "thinking" if tag in TAGS else "answer", True
                self._held = text[len(tag) :]
                return
            if tag.startswith(text):  # it may become one, and so may white space alone
                return
        self._state = "thinking" if self._tag else "answer"

    def _think(self) -> list[Piece]:
        closing = TAGS.get(self._tag, "</think>")
        end = self._held.find(closing)
        if end < 0:
            return self._emit(len(self._held) - n_open(self._held, closing))
        pieces = self._emit(end)
        self._held = self._held[len(closing) :]
        self._state, self._after_tag = "answer", True
        return pieces

    def _read_messages(self) -> list[Piece]:
        pieces: list[Piece] = []
        while True:
            if self._state != "header":
                ends = [(at, tag) for tag in _ENDS if (at := self._held.find(tag)) >= 0]
                if not ends:
                    return pieces + self._emit(len(self._held) - max(n_open(self._held, tag) for tag in _ENDS))
                at, tag = min(ends)
                pieces += self._emit(at)
                if self._is_call:
                    pieces.append(Piece(END_OF_CALL, False))
                if not tag.startswith(_BEGINNINGS):
                    self._held = self._held[len(tag) :]
                self._state, self._is_call = "header", False
            header = _HEADER.match(self._held)
            if header is None:
                text = self._held.lstrip()
                if len(text) < _LONGEST_HEADER and any(each.startswith(text[: len(each)]) for each in _BEGINNINGS):
                    return pieces  # the rest of it is still to come
                self._has_messages, self._state = False, "answer"
                return pieces + self._emit(len(self._held))
            tool, channel = header[1] or header[3], header[2]
            self._state, self._is_call = "thinking" if channel == "analysis" else "answer", bool(tool)
            self._held = self._held[header.end() :]
            if tool:
                self._state = "answer"
                pieces.append(Piece(f"{CALL}{tool}<|message|>", False))

    def _emit(self, n: int) -> list[Piece]:
        """The first ``n`` characters of what is held, as a piece of the part that is at hand."""
        text, self._held = self._held[:n], self._held[n:]
        if self._after_tag:
            text = text.lstrip()
            self._after_tag = not text
        return [Piece(text, self._state == "thinking")] if text else []


def n_open(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``tag``."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)
