"""Takes a reply apart while it streams in: what the model thinks, what it says, and which tools it calls.

A call is known as one only when all of it is there, so it comes as a whole.  One that is malformed, or of a tool that
nobody offered, is text like any other, and a warning says so: a turn never fails for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.chat.thinking import Piece, ThinkingSplitter, n_open

#: Around a call: JSON with "name" and "arguments" (Hermes, Qwen), or tags for each parameter (Qwen Coder).
_OPENING, _CLOSING = "<tool_call>", "</tool_call>"

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool: its name, and the arguments as the text of a JSON object."""

    name: str
    arguments: str

    @property
    def values(self) -> dict[str, Any]:
        """The arguments."""
        values: dict[str, Any] = json.loads(self.arguments)
        return values


class ReplyParser:
    """Takes one reply apart.

    Attributes:
        warnings: calls that were left as text, and why.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = (), opened: str = "") -> None:
        """Begins a reply.

        Args:
            tools: that the model was offered, as OpenAI's API describes functions; without any, none are called.
            opened: the tag that the prompt ended with (`localllm.chat.thinking.opening_tag`).
        """
        self.warnings: list[str] = []
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._thinking = ThinkingSplitter(opened)
        self._held = ""
        self._is_call = self._has_begun = False

    def feed(self, text: str) -> list[Piece | ToolCall]:
        """What is certain now that ``text`` has come."""
        return self._answer(self._thinking.feed(text))

    def finish(self) -> list[Piece | ToolCall]:
        """What was held back; call it once, after the last text."""
        parts = self._answer(self._thinking.finish())
        text, self._held = self._held, ""
        if self._is_call:
            return parts + self._call(text, _OPENING + text)
        return parts + (self._call(text, text) if self._may_be_bare(text) else _piece(text))

    def _answer(self, pieces: Sequence[Piece]) -> list[Piece | ToolCall]:
        parts: list[Piece | ToolCall] = []
        for piece in pieces:
            if piece.thinking or not self._tools:
                parts.append(piece)
            else:
                self._held += piece.text
                parts += self._find_calls()
        return parts

    def _find_calls(self) -> list[Piece | ToolCall]:
        parts: list[Piece | ToolCall] = []
        while not self._may_be_bare(self._held):
            if not self._is_call:
                before, tag, self._held = self._held.partition(_OPENING)
                if tag:
                    parts += _piece(before.rstrip())
                    self._is_call = self._has_begun = True
                    continue
                # White space before a call is no part of the text.
                n = len(before[: len(before) - n_open(before, _OPENING)].rstrip())
                self._held = before[n:]
                self._has_begun |= n > 0
                return parts + _piece(before[:n])
            body, tag, rest = self._held.partition(_CLOSING)
            if not tag:
                return parts
            parts += self._call(body, _OPENING + body + _CLOSING)
            self._held, self._is_call = rest.lstrip(), False
        return parts

    def _may_be_bare(self, text: str) -> bool:
        """Whether the reply is JSON from its beginning on, as calls of Llama and Mistral are."""
        return not self._has_begun and text.lstrip()[:1] in ("{", "[")

    def _call(self, body: str, text: str) -> list[Piece | ToolCall]:
        """The calls that a text spells; the text itself if it spells none."""
        function = _FUNCTION.fullmatch(body)
        try:
            if function is not None:
                return [self._checked(function[1], self._parameters(function[1], function[2]))]
            values = json.loads(body, parse_constant=_refuse)
            calls = values if isinstance(values, list) and values else [values]
            return [
                self._checked(call["name"], call["arguments"] if "arguments" in call else call["parameters"])
                for call in calls
            ]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if self._is_call:
                self.warnings.append(f"a call of a tool was left as text: {_words(error)}")
            return _piece(text)

    def _checked(self, name: Any, arguments: Any) -> ToolCall:
        if name not in self._tools:
            raise ValueError(f"there is no tool {name!r:.80}")
        if isinstance(arguments, str):
            arguments = json.loads(arguments, parse_constant=_refuse)
        if not isinstance(arguments, dict):
            raise ValueError("its arguments are not a JSON object")
        text = json.dumps(arguments, ensure_ascii=False)
        text.encode()  # a lone surrogate is no text: a UnicodeEncodeError, which is a ValueError
        return ToolCall(name, text)

    def _parameters(self, name: str, body: str) -> dict[str, Any]:
        """Values of parameters that stand between tags: texts where the tool's schema says so, else JSON."""
        schema = self._tools.get(name, {}).get("parameters") or {}
        kinds = {key: each.get("type") for key, each in (schema.get("properties") or {}).items()}
        values: dict[str, Any] = {}
        for key, text in _PARAMETER.findall(body):
            values[key] = text
            if kinds.get(key) != "string":
                try:
                    values[key] = json.loads(text, parse_constant=_refuse)
                except ValueError:
                    continue
        return values


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _words(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__


def _piece(text: str) -> list[Piece | ToolCall]:
    return [Piece(text, False)] if text else []
