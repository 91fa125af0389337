"""A conversation in the one form that every front end makes of what its clients send.

`read_messages` takes messages as OpenAI's chat has them, and what other programs write: null is absent, a content is
a text or a list of parts, arguments are a mapping or its JSON.  `localllm.chat.rendering` turns the result into what
a model's chat template understands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.cancellation import check_cancelled
from localllm.errors import TemplateError, quoted

EXAMPLE = "{'role': 'user', 'content': 'Hello!'}"

#: Keys that programs have what was thought under, and types of parts that are thoughts.
_REASONING = ("reasoning_content", "reasoning", "thinking")
#: Types of parts that are text, which stands under "text", or under "refusal".
_TEXTS = ("text", "input_text", "output_text", "refusal")

#: Keys of a message that are read; others are given to the template as they are.
_READ = {"role", "content", *_REASONING, "tool_calls", "tool_call_id", "name", "tool_name", "is_error"}


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        name: of the tool.
        arguments: the text of a JSON object; of a call that a client sends back, whatever the model wrote.
        id: by which its result names it; empty where nobody has given one.
    """

    name: str
    arguments: str
    id: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are a JSON object, and not cut off or malformed."""
        try:
            return isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            return False

    @property
    def values(self) -> dict[str, Any]:
        """The arguments; what is not a JSON object stands under the name ``arguments``."""
        try:
            values = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            values = None
        return values if isinstance(values, dict) else {"arguments": self.arguments}


@dataclass(frozen=True)
class Message:
    """A message of a conversation.

    Attributes:
        role: "system", "developer", "user", "assistant", "tool", or another that the template knows.
        texts: its parts, each a text.
        reasoning: what the model thought before it said that.
        calls: tools that it called.
        call_id, name: which call this is the result of, and of which tool; ``name`` also of a user.
        is_error: whether the tool failed.
        more: whatever else the message had, for the template.
    """

    role: str
    texts: tuple[str, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""
    is_error: bool = False
    more: dict[str, Any] = field(default_factory=dict)


def read_messages(messages: Sequence[Message | Mapping[str, object]]) -> list[Message]:
    """The messages in the one form.

    Raises:
        TemplateError: one is malformed; names it and the field.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TemplateError(f"messages must be a list of mappings, such as [{EXAMPLE}], not {quoted(messages)}")
    read = []
    for number, message in enumerate(messages):
        check_cancelled()
        read.append(message if isinstance(message, Message) else read_message(number, message))
    return read


def read_message(number: int, message: object) -> Message:
    """One of them; ``number`` is for errors.

    Raises:
        TemplateError: it is malformed.
    """
    if not isinstance(message, Mapping):
        raise TemplateError(f"message {number} is not a mapping such as {EXAMPLE}: {quoted(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise TemplateError(
            f"message {number} has no 'role', a text such as 'system', 'user' or 'assistant': write {EXAMPLE}"
        )
    calls = read_calls(number, message.get("tool_calls"))
    content = message.get("content")
    may_be_null = role in ("assistant", "tool") and "content" in message
    if content is None and not calls and not may_be_null:
        raise TemplateError(f"message {number} (role {quoted(role)}) has no 'content'")
    texts, thoughts = read_parts(number, role, content)
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return Message(
        role,
        texts,
        thoughts if reasoning is None else str(reasoning),
        calls,
        call_id=_text(number, message, "tool_call_id"),
        name=_text(number, message, "name") or _text(number, message, "tool_name"),
        is_error=message.get("is_error") is True,
        more={str(key): value for key, value in message.items() if key not in _READ},
    )


def read_parts(number: int, role: str, content: object) -> tuple[tuple[str, ...], str]:
    """The texts of a content, and the thoughts among its parts.

    Raises:
        TemplateError: it is neither a text nor a list of parts of text.
    """
    if content is None or isinstance(content, str):
        return (() if content is None else (content,)), ""
    if isinstance(content, bytes | bytearray) or not isinstance(content, Sequence):
        raise TemplateError(f"the content of message {number} (role {quoted(role)}) is neither text nor a list")
    texts: list[str] = []
    thoughts: list[str] = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind in ("thinking", "reasoning"):
            thoughts.append(str(part.get("thinking") or part.get("text") or ""))
            continue
        text: object = part
        if isinstance(part, Mapping):
            text = part.get("text", part.get("refusal")) if kind in _TEXTS else None
        if not isinstance(text, str):
            kind = part.get("type", "unknown") if isinstance(part, Mapping) else type(part).__name__
            raise TemplateError(
                f"message {number} has a part of type {quoted(kind)}, but models read text alone here: "
                "write parts as {'type': 'text', 'text': 'Hello!'}"
            )
        texts.append(text)
    return tuple(texts), "".join(thoughts)


def read_calls(number: int, calls: object) -> tuple[ToolCall, ...]:
    """Calls of tools as OpenAI has them, ``{"id": …, "function": {"name": …, "arguments": …}}``, or the inner part.

    Raises:
        TemplateError: it is not a list of such.
    """
    if calls is None:
        return ()
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise TemplateError(f"tool_calls of message {number} is not a list")
    read = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise TemplateError(f"a tool call of message {number} has no function with a name")
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            try:
                arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError):
                raise TemplateError(f"the arguments of a tool call of message {number} are not JSON") from None
        read.append(ToolCall(name, arguments, str(call.get("id") or "")))
    return tuple(read)


def _text(number: int, message: Mapping[str, object], key: str) -> str:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise TemplateError(f"{key} of message {number} is {quoted(value)}, but must be a text")
    return value or ""
