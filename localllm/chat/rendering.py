"""Detects which messages a chat template supports, and converts a conversation to this form.

A template may be any program, and the model's name does not reveal its features.  Therefore small conversations of
made-up words are rendered, once and only when needed.  The words' positions in the output show the features.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import string
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from localllm.cancellation import check_cancelled
from localllm.chat.calls.declaration import CallFormat
from localllm.chat.calls.detection import ARGUMENTS, NAME, detected_format
from localllm.chat.conversation import Media, Message, ToolCall
from localllm.chat.thinking import TAGS
from localllm.errors import warn

#: Words of the test conversations.
_ONE, _TWO, _THREE = "zqfirst", ARGUMENTS["zqkey"], "zqthird"

#: Template variables that switch thinking, with their values for on and off.
_SWITCHES: dict[str, tuple[object, object]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "thinking_mode": ("enabled", "disabled"),  # MiniMax M3
}

#: Characters of call ids for templates that require nine of them, such as Mistral's.
_LETTERS = string.ascii_letters + string.digits

#: For the test conversations: a call id that all templates accept, and a tool that is not called.
_SHORT_ID = "abcdef012"
_SCHEMA = {"type": "object", "properties": {"zqkey": {"type": "string", "description": ""}}}
_TOOL: dict[str, Any] = {"name": "zqtool", "description": "", "parameters": _SCHEMA}
_TOOL = {"type": "function", "function": _TOOL}

_TemplateMessages = list[dict[str, Any]]


@dataclass(eq=False)
class Rendering:
    """Converts conversations to the form that a template supports."""

    source: str  # of the template
    #: Renders messages, tools and other variables (keywords) with the generation prompt; None if the template fails.
    render: Callable[..., str | None]

    def messages(self, conversation: Sequence[Message]) -> _TemplateMessages:
        converted = list(conversation)
        if any(m.role == "developer" for m in converted) and not self._takes_developers:
            converted = [m if m.role != "developer" else replace(m, role="system") for m in converted]
        converted = self._with_matched_results(self._with_systems_in_place(converted))
        return [self._message(message) for message in self._with_texts_after_results(converted)]

    def alternating(self, conversation: Sequence[Message]) -> _TemplateMessages | None:
        """Return the conversation with consecutive messages of a role merged, for templates that reject them.

        None if there are no consecutive messages of a role.
        """
        merged = _merged(conversation, [("user", "user"), ("assistant", "assistant")])
        return self.messages(merged) if len(merged) < len(conversation) else None

    def variables(self, variables: Mapping[str, object]) -> dict[str, object]:
        """Return the variables for the template.  Thinking is on unless it is switched off.

        The switch gets the name that the template reads.  The default is the same as in llama.cpp, even for templates
        whose own default is off (Gemma 4, DeepSeek).
        """
        switch = variables.get("enable_thinking", variables.get("thinking"))
        if switch is False and not self._thinking_switches and any(tag in self.source for tag in TAGS):
            warn("this chat template has no switch for thinking: the model may think although it shall not")
        on = switch is None or bool(switch)
        return {**{name: _SWITCHES[name][not on] for name in self._thinking_switches}, **variables}

    def capabilities(self, reads_tools: bool) -> dict[str, bool]:
        """Return the template's features under llama.cpp's names (``common/jinja/caps.h``)."""
        takes_calls = self._takes_calls
        return {
            "supports_string_content": self._takes_text,
            "supports_typed_content": self._takes_parts,
            "supports_tools": reads_tools,
            "supports_tool_calls": takes_calls,
            "supports_parallel_tool_calls": takes_calls and self._takes_parallel_calls,
            "supports_system_role": self._takes_systems,
            "supports_preserve_reasoning": self._keeps_reasoning,
            "supports_reasoning_effort": "reasoning_effort" in self.source,
            "supports_object_arguments": takes_calls and not self._wants_arguments_as_text,
        }

    # -- Features of the template ----------------------------------------------------------------------------------

    def _renders(self, messages: Sequence[Message], *words: str) -> bool:
        """Return whether the rendered messages contain all words, in this order."""
        return self._renders_converted([self._message(message) for message in messages], *words)

    def _renders_turns(self, *turns: tuple[str, str]) -> bool:
        """Return whether rendered messages, each a role and a word, contain all words, in this order."""
        return self._renders([Message(role, (word,)) for role, word in turns], *(word for _, word in turns))

    def _renders_converted(self, messages: _TemplateMessages, *words: str) -> bool:
        text = self.render(messages, None)
        if text is None or "{'type'" in text:  # parts in Python's notation
            return False
        position = 0
        for word in words:
            position = text.find(word, position)
            if position < 0:
                return False
        return True

    @cached_property
    def _takes_text(self) -> bool:
        return self._renders_converted([{"role": "user", "content": _ONE}], _ONE)

    @cached_property
    def _takes_parts(self) -> bool:
        return self._renders_converted([{"role": "user", "content": [_part(_ONE)]}], _ONE)

    @cached_property
    def _takes_several_parts(self) -> bool:
        return self._renders_converted([{"role": "user", "content": [_part(_ONE), _part(_TWO)]}], _ONE, _TWO)

    @cached_property
    def _takes_several_systems(self) -> bool:
        return self._renders_turns(("system", _ONE), ("system", _TWO), ("user", _THREE))

    @cached_property
    def _takes_later_systems(self) -> bool:
        return self._renders_turns(("user", _ONE), ("assistant", _TWO), ("system", _THREE), ("user", _ONE))

    @cached_property
    def _takes_systems(self) -> bool:
        # If the template does not even render a user message, the test has no meaning.
        return self._renders_turns(("system", _ONE), ("user", _TWO)) or not self._renders_turns(("user", _TWO))

    @cached_property
    def _takes_developers(self) -> bool:
        """Whether the template has a form for developers' messages, not the same as for any unknown role."""
        texts: dict[str, str] = {}
        for role in ("developer", "zqrole"):
            messages = [Message(role, (_ONE,)), Message("user", (_TWO,))]
            texts[role] = self.render([self._message(message) for message in messages], None) or ""
        developer = texts["developer"]
        return _ONE in developer and developer.replace("developer", "zqrole") != texts["zqrole"]

    @cached_property
    def _takes_texts_after_results(self) -> bool:
        """Whether a message of the user may follow the result of a call."""
        call = ToolCall(NAME, json.dumps(ARGUMENTS), _SHORT_ID)
        result = Message("tool", (_TWO,), call_id=_SHORT_ID, name=NAME)
        messages = [Message("user", (_ONE,)), Message("assistant", calls=(call,)), result, Message("user", (_THREE,))]
        converted = [self._message(message) for message in messages]
        text = self.render(converted, [_TOOL]) or self.render(converted, None) or ""
        return 0 <= text.find(_ONE) < text.rfind(_TWO) < text.find(_THREE)

    @cached_property
    def _takes_parallel_calls(self) -> bool:
        calls = tuple(ToolCall(name, json.dumps(ARGUMENTS), _SHORT_ID) for name in (NAME, "zqother"))
        messages = [Message("user", (_ONE,)), Message("assistant", calls=calls)]
        messages += [Message("tool", (word,), call_id=_SHORT_ID, name=NAME) for word in (_TWO, _THREE)]
        return self._renders(messages, _ONE, NAME, "zqother", _THREE)

    @cached_property
    def _keeps_reasoning(self) -> bool:
        """Whether reasoning of earlier replies stays in the prompt."""
        messages = [Message("user", (_ONE,)), Message("assistant", (_TWO,), _THREE), Message("user", (_ONE,))]
        return self._renders(messages, _THREE)

    @cached_property
    def _takes_calls(self) -> bool:
        if not (self._takes_text or self._takes_parts):  # the template cannot be tested
            return True
        return any(self._takes_call(_SHORT_ID, arguments) for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)))

    @cached_property
    def call_format(self) -> CallFormat | None:
        """The template's format of tool calls; None if it is unknown."""
        prompt = self.render([{"role": "user", "content": self._content((_ONE,))}], [_TOOL])
        for id_ in (f"functions.{NAME}:0", _SHORT_ID):
            for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
                text = self._rendered_call(id_, arguments)
                if text is not None and (call_format := detected_format(prompt or "", text)) is not None:
                    return call_format
        return None

    @cached_property
    def _wants_short_ids(self) -> bool:
        """Whether call ids must consist of nine letters and digits."""
        return self._takes_call(_SHORT_ID, ARGUMENTS) and not self._takes_call("call_0123456789abcdef", ARGUMENTS)

    @cached_property
    def _wants_arguments_as_text(self) -> bool:
        return not self._takes_call(_SHORT_ID, ARGUMENTS) and self._takes_call(_SHORT_ID, json.dumps(ARGUMENTS))

    @cached_property
    def _thinking_switches(self) -> list[str]:
        """The variables that switch thinking, detected because they change a rendered message."""
        messages: _TemplateMessages = [{"role": "user", "content": self._content((_ONE,))}]
        texts = {
            name: [self.render(messages, None, **{name: value}) for value in values]
            for name, values in _SWITCHES.items()
            if name in self.source
        }
        return [name for name, (on, off) in texts.items() if on != off and "True" not in (on or "")]

    def _takes_call(self, id_: str, arguments: object) -> bool:
        """Return whether the template renders a call and its result, and not in Python's notation."""
        text = self._rendered_call(id_, arguments)
        if text is None or _THREE not in text or "{'zqkey'" in text:
            return False
        return any(word in text for word in (NAME, _TWO, id_))

    def _rendered_call(self, id_: str, arguments: object) -> str | None:
        """Render a call and its result; None if the template fails."""
        call = {"id": id_, "type": "function", "function": {"name": NAME, "arguments": arguments}}
        messages: _TemplateMessages = [
            {"role": "user", "content": self._content((_ONE,))},
            {"role": "assistant", "content": self._content(("",)), "tool_calls": [call]},
            {"role": "tool", "content": self._content((_THREE,)), "tool_call_id": id_, "name": NAME},
        ]
        return self.render(messages, [_TOOL]) or self.render(messages, None)

    # -- Input of the template -------------------------------------------------------------------------------------

    def _with_systems_in_place(self, messages: list[Message]) -> list[Message]:
        """Moves system messages to positions that the template reads.  All their text is retained."""
        places = [i for i, message in enumerate(messages) if message.role == "system"]
        if not places:
            return messages
        n_leading = next((n for n, i in enumerate(places) if n != i), len(places))
        may_stay = self._takes_systems and (n_leading <= 1 or self._takes_several_systems)
        if may_stay and (n_leading == len(places) or self._takes_later_systems):
            return messages
        if self._takes_systems and self._takes_later_systems:
            return [_joined(messages[:n_leading]), *messages[n_leading:]]
        system = _joined([messages[i] for i in places])
        remaining = [message for message in messages if message.role != "system"]
        if self._takes_systems:
            return [system, *remaining]
        # The same as in llama.cpp.
        first = next((i for i, message in enumerate(remaining) if message.role == "user"), None)
        if first is None:
            return [replace(system, role="user"), *remaining]
        user_message = remaining[first]
        text = f"{system.text}\n"
        parts = (text, *user_message.parts) if user_message.media else (text + user_message.text,)
        remaining[first] = replace(user_message, parts=parts)
        return remaining

    def _with_matched_results(self, messages: list[Message]) -> list[Message]:
        """Return the messages with ids in calls, and ids and names in results, in the template's form."""
        if not any(message.calls or message.role == "tool" for message in messages):
            return messages
        as_text = not self._takes_calls
        form = _short_id if self._wants_short_ids else str
        matched: list[Message] = []
        open_calls = _OpenCalls(())
        n_calls = 0
        for message in messages:
            check_cancelled()
            if message.calls:
                numbered = enumerate(message.calls, n_calls + 1)
                calls = [replace(call, id=call.id or f"call_{n}") for n, call in numbered]
                n_calls += len(calls)
                open_calls = _OpenCalls(calls)
                message = replace(message, calls=tuple(replace(call, id=form(call.id)) for call in calls))
            elif message.role == "tool":
                call = open_calls.take(message.call_id, message.name)
                if call is not None:
                    message = replace(message, call_id=call.id, name=message.name or call.name)
                if message.call_id:
                    message = replace(message, call_id=form(message.call_id))
            matched.append(_as_text(message) if as_text else message)
        return matched

    def _with_texts_after_results(self, messages: list[Message]) -> list[Message]:
        """Append the user's text after a result to the result, for templates that refuse or omit such messages."""
        pairs = itertools.pairwise(message.role for message in messages)
        if ("tool", "user") not in pairs or self._takes_texts_after_results:
            return messages
        return _merged(messages, [("tool", "user")])

    def _content(self, parts: Sequence[str | Media]) -> Any:
        """Return parts in the template's form: a list for media, for several texts, or if required; else a string.

        Texts are joined if the template does not support several parts.
        """
        if any(isinstance(part, Media) for part in parts):
            return [_part(part) if isinstance(part, str) else {"type": part.kind} for part in parts]
        texts = [part for part in parts if isinstance(part, str)]
        if not self._takes_text and self._takes_parts:
            texts = texts if len(texts) < 2 or self._takes_several_parts else ["".join(texts)]
            return [_part(text) for text in texts]
        if len(texts) > 1 and self._takes_several_parts:
            return [_part(text) for text in texts]
        return "".join(texts)

    def _message(self, message: Message) -> dict[str, Any]:
        parts = message.parts
        if message.is_error:  # templates have no field for it
            first, following = (parts[0], parts[1:]) if parts and isinstance(parts[0], str) else ("", parts)
            parts = (f"Error: {first}", *following)
        converted: dict[str, Any] = {"role": message.role, "content": self._content(parts)}
        if message.reasoning:  # as in transformers, both names are set
            converted |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
        if message.calls:
            converted["tool_calls"] = [self._call(call) for call in message.calls]
        if message.call_id:
            converted["tool_call_id"] = message.call_id
        if message.name:
            converted["name"] = message.name
        return {**message.more, **converted}

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments = call.arguments if self._wants_arguments_as_text else call.values
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _merged(messages: Sequence[Message], pairs: Sequence[tuple[str, str]]) -> list[Message]:
    """Merge consecutive messages whose roles are one of ``pairs``."""
    merged: list[Message] = []
    for message in messages:
        if merged and (merged[-1].role, message.role) in pairs:
            merged[-1] = _joined([merged[-1], message])
        else:
            merged.append(message)
    return merged


def _joined(messages: Sequence[Message]) -> Message:
    """Merge messages of one role."""
    parts: list[str | Media] = []
    for message in messages:
        added = message.parts if message.media else (message.text,) if message.text else ()
        parts += ["\n\n", *added] if parts and added else added
    if not any(isinstance(part, Media) for part in parts):
        parts = ["".join(part for part in parts if isinstance(part, str))]
    reasoning = "\n\n".join(message.reasoning for message in messages if message.reasoning)
    calls = tuple(call for message in messages for call in message.calls)
    return replace(messages[0], parts=tuple(parts), reasoning=reasoning, calls=calls)


def _as_text(message: Message) -> Message:
    """Return a message whose calls or result are converted to text, for templates that do not support them."""
    if message.calls:
        descriptions = ({"name": call.name, "arguments": call.values} for call in message.calls)
        calls = [json.dumps(description, ensure_ascii=False) for description in descriptions]
        texts = [part for part in message.parts if isinstance(part, str) and part]
        return replace(message, parts=("\n".join(texts + calls), *message.media), calls=())
    if message.role != "tool":
        return message
    text = f"Result of {message.name or 'the tool'}: {message.text}"
    return replace(message, role="user", parts=(text, *message.media))


class _OpenCalls:
    """Calls of a message that do not have a result yet."""

    def __init__(self, calls: Sequence[ToolCall]) -> None:
        self._queues: dict[tuple[str, str], deque[int]] = defaultdict(deque)
        self._calls = dict(enumerate(calls))
        for number, call in self._calls.items():
            for key in (("id", call.id), ("name", call.name), ("", "")):
                self._queues[key].append(number)

    def take(self, id_: str, name: str) -> ToolCall | None:
        """Remove and return the call of a result: by id, else the first open call of the tool, else of any tool."""
        queue = self._queues.get(("id", id_) if id_ else ("name", name) if name else ("", ""), deque())
        while queue:
            call = self._calls.pop(queue.popleft(), None)
            if call is not None:
                return call
        return None


def _short_id(id_: str) -> str:
    """Convert an id to nine letters and digits.  Equal ids give equal results."""
    if len(id_) == 9 and id_.isascii() and id_.isalnum():
        return id_
    number = int.from_bytes(hashlib.sha256(id_.encode(errors="replace")).digest()[:8])
    return "".join(_LETTERS[number // 62**i % 62] for i in range(9))


def described_tools(tools: Sequence[Mapping[str, object]]) -> str:
    """Return a system message that describes tools and calls in JSON, for templates without support for tools."""
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    return (
        "You can call these tools, described by JSON schemas:\n"
        + "\n".join(lines)
        + '\nTo call one, answer with a JSON object and nothing else: {"name": the tool\'s name, "arguments": {…}}'
    )
