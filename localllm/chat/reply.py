"""Takes a reply apart while it streams in: what the model thinks, what it says, and which tools it calls.

A call is known as one only when all of it is there, so it comes as a whole.  One that is malformed, or of a tool that
nobody offered, is text like any other, and a warning says so: a turn never fails for it, and no text is lost.

Models write calls in many ways, which no two use for different things: so all of them are read, whatever the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from localllm.chat.conversation import ToolCall
from localllm.chat.thinking import CALL, END_OF_CALL, Piece, ThinkingSplitter, n_open, opening_tag
from localllm.tokenizer import Tokenizer

#: What stands around calls, opening and closing; where nothing closes them, the next opening or the reply's end does.
_AROUND = {
    "<tool_call>": "</tool_call>",  # Hermes, Qwen, GLM, Nemotron 3
    "<TOOLCALL>": "</TOOLCALL>",  # Nemotron 2
    "<tool_calls>": "</tool_calls>",  # MiniMax M1
    "<minimax:tool_call>": "</minimax:tool_call>",
    "<|tool_call>": "<tool_call|>",  # Gemma 4
    "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>",  # DeepSeek to V3.1
    "<｜DSML｜function_calls>": "</｜DSML｜function_calls>",
    "<|tool_calls_section_begin|>": "<|tool_calls_section_end|>",  # Kimi
    "[TOOL_CALLS]": "[TOOL_CALLS]",  # Mistral
    "<|python_tag|>": "<|python_tag|>",  # Llama 3
}

#: The same where these are part of the call.
_PARTS = {"<function=": "</function>", CALL: END_OF_CALL}

_CLOSING = {**_AROUND, **_PARTS}

#: Calls that are not all JSON.  Their arguments are, or stand between tags.
_CALLS = [
    re.compile(pattern + r"\s*", re.DOTALL)
    for pattern in (
        r"<function=(?P<name>[^>\s]+)>(?P<arguments>.*?)(?:</function>(?=\s*(?:<function=|\Z))|\Z)",
        r'<invoke name="(?P<name>[^">]+)">(?P<arguments>.*?)</invoke>(?=\s*(?:<invoke|\Z))',
        rf"{re.escape(CALL)}(?:functions\.)?(?P<name>[^\s<]+)<\|message\|>(?P<arguments>.*?)(?:<\|call\|>|\Z)",
        r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n(?P<arguments>.*?)\n```<｜tool▁call▁end｜>",
        r"<｜tool▁call▁begin｜>(?P<name>[^<]+)<｜tool▁sep｜>(?P<arguments>.*?)<｜tool▁call▁end｜>",
        r"<\|tool_call_begin\|>(?:functions\.)?(?P<name>[^:<]+)[^<]*<\|tool_call_argument_begin\|>"
        r"(?P<arguments>.*?)<\|tool_call_end\|>",
        r"(?P<name>[^\s\[{]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\](?P<arguments>\{.*\})",
        r"call:(?P<name>[^\s{]+)(?P<arguments>\{.*\})",
        r"(?P<name>[^\s<{]+)\s*(?P<arguments>(?:<arg_key>.*</arg_value>)?)",
    )
]

_PARAMETER = re.compile(
    r"""(?:<parameter(?:=|\ name=")(?P<key>[^>"]+)[^>]*>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter[= ]|\Z))
    |<arg_key>(?P<key_>.*?)</arg_key>\s*<arg_value>(?P<value_>.*?)</arg_value>(?=\s*(?:<arg_key>|\Z)))\s*""",
    re.DOTALL | re.VERBOSE,
)


class _UnfinishedError(ValueError):
    """What stands before a closing tag is no call, but may be the beginning of one whose arguments have that tag."""

    def __init__(self) -> None:
        super().__init__("it is written in no known way")


#: What reading a call may raise.
_CANNOT_BE_READ = (ValueError, KeyError, TypeError, RecursionError)


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
        functions = [tool.get("function", tool) for tool in tools]
        self._tools = {str(each.get("name")): each for each in functions if isinstance(each, Mapping)}
        self._thinking = ThinkingSplitter(opened)
        self._held = ""
        #: What opened the call that is held, with the white space before it.
        self._opening = self._space = ""
        #: Where in what is held closing tags have not been looked for.
        self._searched = 0
        self._has_begun = self._is_after_call = False

    @classmethod
    def after(
        cls, prompt_ids: Sequence[int], tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()
    ) -> ReplyParser:
        """Begins the reply to a prompt."""
        return cls(tools, opening_tag(tokenizer.decode(prompt_ids[-16:], special=True)))

    def feed(self, text: str) -> list[Piece | ToolCall]:
        """What is certain now that ``text`` has come."""
        return self._answer(self._thinking.feed(text))

    def finish(self) -> list[Piece | ToolCall]:
        """What was held back; call it once, after the last text."""
        parts = self._answer(self._thinking.finish()) + self._find_calls(is_whole=True)
        text, self._held = self._held, ""
        if not self._may_be_bare(text):
            return parts + _piece(text)
        try:
            return parts + self._calls(text, "")
        except _CANNOT_BE_READ:
            return parts + _piece(text)

    def _answer(self, pieces: Sequence[Piece]) -> list[Piece | ToolCall]:
        parts: list[Piece | ToolCall] = []
        for piece in pieces:
            if piece.thinking or not self._tools:
                parts.append(piece)
            else:
                self._held += piece.text
                parts += self._find_calls()
        return parts

    def _find_calls(self, is_whole: bool = False) -> list[Piece | ToolCall]:
        """What is certain of the text held; ``is_whole``: nothing comes behind it."""
        parts: list[Piece | ToolCall] = []
        while not self._may_be_bare(self._held):
            if self._opening:
                found_call = self._end_call(is_whole)
                if found_call is None:
                    return parts
                parts += found_call
                continue
            if self._is_after_call:
                self._held = self._held.lstrip()
                self._is_after_call = not self._held
            found = [(at, tag) for tag in _CLOSING if (at := self._held.find(tag)) >= 0]
            n_certain = len(self._held) - max(n_open(self._held, tag) for tag in _CLOSING)
            at, self._opening = min(found, default=(n_certain, ""))
            # White space before a call is no part of the text.
            text = self._held[:at].rstrip()
            self._has_begun |= bool(text or found)
            parts += _piece(text)
            if not found:
                self._held = self._held[len(text) :]
                return parts
            self._space, self._held = self._held[len(text) : at], self._held[at + len(self._opening) :]
        return parts

    def _may_be_bare(self, text: str) -> bool:
        """Whether the reply is JSON from its beginning on, as calls of Llama are."""
        text = text.lstrip()
        return not self._has_begun and text[:1] in ("{", "[") and not text.startswith("[TOOL_CALLS]")

    def _end_call(self, is_whole: bool) -> list[Piece | ToolCall] | None:
        """The calls that stand behind what opened them, up to the closing tag that makes them whole.

        A tag in a call's arguments does not.  None if the tag is still to come.
        """
        closing = _CLOSING[self._opening]
        while (at := self._held.find(closing, self._searched)) >= 0:
            try:
                return self._ended(self._calls(self._held[:at], closing), at, closing)
            except _CANNOT_BE_READ as error:
                is_first = self._held.find(closing) == at
                if is_first and not isinstance(error, _UnfinishedError):
                    return self._ended(self._as_text(self._held[:at], closing, error), at, closing)
            self._searched = at + len(closing)
        if not is_whole:
            self._searched = max(self._searched, len(self._held) - len(closing) + 1)
            return None
        try:
            return self._ended(self._calls(self._held, ""), len(self._held), "")
        except _CANNOT_BE_READ as error:
            at = self._held.find(closing)
            at, closing = (len(self._held), "") if at < 0 else (at, closing)
            return self._ended(self._as_text(self._held[:at], closing, error), at, closing)

    def _ended(self, parts: list[Piece | ToolCall], at: int, closing: str) -> list[Piece | ToolCall]:
        """Goes on behind a call that ends at ``at``; a closing tag that also opens is the next call's."""
        self._held = self._held[at if closing == self._opening else at + len(closing) :]
        self._opening, self._space, self._searched = "", "", 0
        return parts

    def _calls(self, body: str, closing: str) -> list[Piece | ToolCall]:
        """The calls of a body.

        Raises:
            One of `_CANNOT_BE_READ`.
        """
        calls = list(self._read(self._opening + body + closing if self._opening in _PARTS else body))
        self._is_after_call = True
        return [*calls]

    def _as_text(self, body: str, closing: str, error: Exception) -> list[Piece | ToolCall]:
        if self._opening:
            self.warnings.append(f"a call of a tool was left as text: {_words(error)}")
        return _piece(self._space + self._opening + body + ("" if closing == self._opening else closing))

    def _read(self, body: str) -> Iterator[ToolCall]:
        text = body.replace("｜DSML｜", "").strip()
        if text[:1] in ("{", "["):
            for call in _json_values(text):
                yield self._checked(call["name"], call["arguments"] if "arguments" in call else call["parameters"])
            return
        for pattern in _CALLS:
            calls = _in_a_row(pattern, text)
            if calls:
                for call in calls:
                    yield self._checked(call["name"], self._arguments(call["name"], call["arguments"].strip()))
                return
        raise _UnfinishedError

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

    def _arguments(self, name: str, text: str) -> Any:
        """JSON, or values between tags: texts where the tool's schema says so, else JSON."""
        if text.startswith("{"):
            return json.loads(_as_json(text) if '<|"|>' in text or '"' not in text else text, parse_constant=_refuse)
        schema = self._tools.get(name, {}).get("parameters") or {}
        properties = schema.get("properties") or {}
        values: dict[str, Any] = {}
        found = _in_a_row(_PARAMETER, text)
        if text and not found:
            raise _UnfinishedError
        for each in found:
            key, value = each["key"] or each["key_"], each["value"] or each["value_"] or ""
            values[key] = value
            if "string" not in _types(properties.get(key), schema):
                try:
                    values[key] = json.loads(_PYTHON.get(value, value), parse_constant=_refuse)
                except ValueError:
                    continue
        return values


#: What some models write for JSON's words.
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The types of JSON that a schema allows, as far as it names them; ``root``: what its references lead into."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        place: Any = root
        for name in reference.removeprefix("#").split("/")[1:]:
            place = place.get(name) if isinstance(place, Mapping) else None
        return _types(place, root, depth + 1)
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not types and isinstance(values, list):
        types = {"string" for value in values if isinstance(value, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        for each in schema.get(key) or ():
            types |= _types(each, root, depth + 1)
    return types


def _in_a_row(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """The matches that make up a text; none if something else is left."""
    matches, at = [], 0
    while at < len(text) and (match := pattern.match(text, at)):
        matches.append(match)
        at = match.end()
    return matches if at == len(text) else []


def _json_values(text: str) -> Iterator[Any]:
    """JSON values one after the other, and those of lists."""
    decoder, at = json.JSONDecoder(parse_constant=_refuse), 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            if error.msg.startswith("Unterminated string"):
                raise _UnfinishedError from None
            raise
        if value == []:
            raise ValueError("it is empty")
        yield from value if isinstance(value, list) else [value]
        at += len(text[at:]) - len(text[at:].lstrip())


def _as_json(text: str) -> str:
    """What Gemma writes as JSON: its keys have no quotation marks, and those of its texts are tokens."""
    parts = text.split('<|"|>')
    parts[::2] = [re.sub(r"([{,]\s*)([^\s{},:\"]+)\s*:", r'\1"\2":', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return "".join(parts)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _words(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__


def _piece(text: str) -> list[Piece | ToolCall]:
    return [Piece(text, False)] if text else []
