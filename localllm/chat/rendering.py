"""Detects what a chat template understands, and puts a conversation into just that form.

A model's name says nothing about its template, which may be any program.  So small conversations of made-up words are
rendered, each once and only when needed: where the words are in the output tells what the template understands.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from localllm.cancellation import check_cancelled
from localllm.chat.conversation import Media, Message, ToolCall
from localllm.chat.thinking import TAGS
from localllm.errors import warn

#: Words of the conversations that test a template.
_ONE, _TWO, _THREE = "zqfirst", "zqsecond", "zqthird"

#: The variables of templates that switch thinking, with their values for on and for off.
_SWITCHES: dict[str, tuple[object, object]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "thinking_mode": ("enabled", "disabled"),  # MiniMax M3
}

#: Characters of call ids for templates that want nine of them, as Mistral's do.
_LETTERS = string.ascii_letters + string.digits

#: For the same tests: a call id that all templates take, arguments, and a tool, which is not the one called.
_SHORT_ID, _ARGUMENTS = "abcdef012", {"zqkey": _TWO}
_SCHEMA = {"type": "object", "properties": {"zqkey": {"type": "string", "description": ""}}}
_TOOL: dict[str, Any] = {"name": "zqtool", "description": "", "parameters": _SCHEMA}
_TOOL = {"type": "function", "function": _TOOL}

_Given = list[dict[str, Any]]
_Tools = Sequence[Mapping[str, object]] | None


class Rendering:
    """Conversations as one template takes them."""

    def __init__(self, source: str, render: Callable[..., str | None]) -> None:
        """Takes a template.  ``render``: what it makes of messages, tools and other variables (keywords), with what
        stands before an answer; None if it fails."""
        self._source = source
        self._render = render

    def messages(self, conversation: Sequence[Message]) -> _Given:
        is_known = "developer" in self._source
        found = [m if is_known or m.role != "developer" else replace(m, role="system") for m in conversation]
        found = self._with_matched_results(self._with_systems_in_place(found))
        return [self._message(each) for each in found]

    def alternating(self, conversation: Sequence[Message]) -> _Given | None:
        """The same with messages of one side in a row as one, for templates that refuse these; None without any."""
        found: list[Message] = []
        for each in conversation:
            if found and found[-1].role == each.role and each.role in ("user", "assistant"):
                found[-1] = _joined([found[-1], each])
            else:
                found.append(each)
        return self.messages(found) if len(found) < len(conversation) else None

    def variables(self, given: Mapping[str, object]) -> dict[str, object]:
        """The variables for the template: it thinks unless that is switched off, under the name that it reads.

        As in llama.cpp, and whatever the template does where nothing is said: Gemma 4's and DeepSeek's do not think.
        """
        said = given.get("enable_thinking", given.get("thinking"))
        if said is False and not self._thinking_switches and any(tag in self._source for tag in TAGS):
            warn("this chat template has no switch for thinking: the model may think although it shall not")
        on = said is None or bool(said)
        return {**{name: _SWITCHES[name][not on] for name in self._thinking_switches}, **given}

    # -- What it understands ---------------------------------------------------------------------------------------

    def _renders(self, messages: Sequence[Message], *words: str) -> bool:
        """Whether all these words are in what the template makes of messages, in this order."""
        return self._renders_given([self._message(each) for each in messages], *words)

    def _renders_given(self, given: _Given, *words: str) -> bool:
        text = self._render(given, None)
        if text is None or "{'type'" in text:  # parts as Python writes them
            return False
        place = 0
        for word in words:
            place = text.find(word, place)
            if place < 0:
                return False
        return True

    @cached_property
    def _takes_text(self) -> bool:
        return self._renders_given([{"role": "user", "content": _ONE}], _ONE)

    @cached_property
    def _takes_parts(self) -> bool:
        return self._renders_given([{"role": "user", "content": [_part(_ONE)]}], _ONE)

    @cached_property
    def _takes_several_parts(self) -> bool:
        return self._renders_given([{"role": "user", "content": [_part(_ONE), _part(_TWO)]}], _ONE, _TWO)

    @cached_property
    def _takes_several_systems(self) -> bool:
        messages = [Message("system", (_ONE,)), Message("system", (_TWO,)), Message("user", (_THREE,))]
        return self._renders(messages, _ONE, _TWO, _THREE)

    @cached_property
    def _takes_later_systems(self) -> bool:
        said = [Message("user", (_ONE,)), Message("assistant", (_TWO,)), Message("system", (_THREE,))]
        return self._renders([*said, Message("user", (_ONE,))], _ONE, _TWO, _THREE, _ONE)

    @cached_property
    def _takes_systems(self) -> bool:
        messages = [Message("system", (_ONE,)), Message("user", (_TWO,))]
        # One that takes no message of a user either is not asked what else it takes.
        return self._renders(messages, _ONE, _TWO) or not self._renders(messages[1:], _TWO)

    @cached_property
    def _takes_calls(self) -> bool:
        if not (self._takes_text or self._takes_parts):  # it cannot be asked
            return True
        return any(self._takes_call(_SHORT_ID, arguments) for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)))

    @cached_property
    def _wants_short_ids(self) -> bool:
        """Whether ids of calls must have nine letters and digits."""
        return self._takes_call(_SHORT_ID, _ARGUMENTS) and not self._takes_call("call_0123456789abcdef", _ARGUMENTS)

    @cached_property
    def _wants_arguments_as_text(self) -> bool:
        return not self._takes_call(_SHORT_ID, _ARGUMENTS) and self._takes_call(_SHORT_ID, json.dumps(_ARGUMENTS))

    @cached_property
    def _thinking_switches(self) -> list[str]:
        """The variables that switch thinking on and off: those that change what the template makes of a message."""
        given: _Given = [{"role": "user", "content": self._content((_ONE,))}]
        texts = {
            name: [self._render(given, None, **{name: value}) for value in values]
            for name, values in _SWITCHES.items()
            if name in self._source
        }
        return [name for name, (on, off) in texts.items() if on != off and "True" not in (on or "")]

    def _takes_call(self, id_: str, arguments: object) -> bool:
        """Whether a call and its result are in what the template makes of them, and not as Python writes them."""
        call = {"id": id_, "type": "function", "function": {"name": "zqname", "arguments": arguments}}
        given: _Given = [
            {"role": "user", "content": self._content((_ONE,))},
            {"role": "assistant", "content": self._content(("",)), "tool_calls": [call]},
            {"role": "tool", "content": self._content((_THREE,)), "tool_call_id": id_, "name": "zqname"},
        ]
        text = self._render(given, [_TOOL]) or self._render(given, None)
        if text is None or _THREE not in text or "{'zqkey'" in text:
            return False
        return any(word in text for word in ("zqname", _TWO, id_))

    # -- What it is given ------------------------------------------------------------------------------------------

    def _with_systems_in_place(self, messages: list[Message]) -> list[Message]:
        """Moves system messages to where the template reads them; none of their text is lost."""
        places = [i for i, each in enumerate(messages) if each.role == "system"]
        if not places:
            return messages
        n_leading = next((n for n, i in enumerate(places) if n != i), len(places))
        may_stay = self._takes_systems and (n_leading <= 1 or self._takes_several_systems)
        if may_stay and (n_leading == len(places) or self._takes_later_systems):
            return messages
        if self._takes_systems and self._takes_later_systems:
            return [_joined(messages[:n_leading]), *messages[n_leading:]]
        system = _joined([messages[i] for i in places])
        rest = [each for each in messages if each.role != "system"]
        if self._takes_systems:
            return [system, *rest]
        # As llama.cpp does it.
        first = next((i for i, each in enumerate(rest) if each.role == "user"), None)
        if first is None:
            return [replace(system, role="user"), *rest]
        own = rest[first]
        parts = (f"{system.text}\n", *own.parts) if own.media else (f"{system.text}\n{own.text}",)
        rest[first] = replace(own, parts=parts)
        return rest

    def _with_matched_results(self, messages: list[Message]) -> list[Message]:
        """Calls with ids, and results with the id and the name of their call, in the form that the template wants."""
        if not any(each.calls or each.role == "tool" for each in messages):
            return messages
        as_text = not self._takes_calls
        form = _short_id if self._wants_short_ids else str
        found: list[Message] = []
        open_calls = _OpenCalls(())
        n_calls = 0
        for message in messages:
            check_cancelled()
            if message.calls:
                numbered = enumerate(message.calls, n_calls + 1)
                calls = [replace(call, id=call.id or f"call_{n}") for n, call in numbered]
                n_calls += len(calls)
                open_calls = _OpenCalls(calls)
                message = replace(message, calls=tuple(replace(each, id=form(each.id)) for each in calls))
            elif message.role == "tool":
                call = open_calls.take(message.call_id, message.name)
                if call is not None:
                    message = replace(message, call_id=call.id, name=message.name or call.name)
                if message.call_id:
                    message = replace(message, call_id=form(message.call_id))
            found.append(_as_text(message) if as_text else message)
        return found

    def _content(self, parts: Sequence[str | Media]) -> Any:
        """Parts as the template reads them: one by one where it has to have them so, or there are several and it
        can."""
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
        if message.is_error:  # which no template has a place for
            first, rest = (parts[0], parts[1:]) if parts and isinstance(parts[0], str) else ("", parts)
            parts = (f"Error: {first}", *rest)
        given: dict[str, Any] = {"role": message.role, "content": self._content(parts)}
        if message.reasoning:  # as in transformers, templates find it under either name
            given |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
        if message.calls:
            given["tool_calls"] = [self._call(each) for each in message.calls]
        if message.call_id:
            given["tool_call_id"] = message.call_id
        if message.name:
            given["name"] = message.name
        return {**message.more, **given}

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments = call.arguments if self._wants_arguments_as_text else call.values
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _joined(messages: Sequence[Message]) -> Message:
    """Messages of one role as a single one."""
    parts: list[str | Media] = []
    for each in messages:
        own = each.parts if each.media else (each.text,) if each.text else ()
        parts += ["\n\n", *own] if parts and own else own
    if not any(isinstance(part, Media) for part in parts):
        parts = ["".join(part for part in parts if isinstance(part, str))]
    reasoning = "\n\n".join(each.reasoning for each in messages if each.reasoning)
    calls = tuple(call for each in messages for call in each.calls)
    return replace(messages[0], parts=tuple(parts), reasoning=reasoning, calls=calls)


def _as_text(message: Message) -> Message:
    """A message with calls, or with a result, in words, for templates that know neither."""
    if message.calls:
        given = ({"name": each.name, "arguments": each.values} for each in message.calls)
        calls = [json.dumps(each, ensure_ascii=False) for each in given]
        texts = [part for part in message.parts if isinstance(part, str) and part]
        return replace(message, parts=("\n".join(texts + calls), *message.media), calls=())
    if message.role != "tool":
        return message
    text = f"Result of {message.name or 'the tool'}: {message.text}"
    return replace(message, role="user", parts=(text, *message.media))


class _OpenCalls:
    """The calls of a message that have no result so far."""

    def __init__(self, calls: Sequence[ToolCall]) -> None:
        self._queues: dict[tuple[str, str], deque[int]] = defaultdict(deque)
        self._calls = dict(enumerate(calls))
        for number, call in self._calls.items():
            for key in (("id", call.id), ("name", call.name), ("", "")):
                self._queues[key].append(number)

    def take(self, id_: str, name: str) -> ToolCall | None:
        """The call that a result is of: that of its id, else the first one left of the tool, or of any."""
        queue = self._queues.get(("id", id_) if id_ else ("name", name) if name else ("", ""), deque())
        while queue:
            call = self._calls.pop(queue.popleft(), None)
            if call is not None:
                return call
        return None


def _short_id(id_: str) -> str:
    """Nine letters and digits, the same for the same id."""
    if len(id_) == 9 and id_.isascii() and id_.isalnum():
        return id_
    number = int.from_bytes(hashlib.sha256(id_.encode(errors="replace")).digest()[:8])
    return "".join(_LETTERS[number // 62**i % 62] for i in range(9))


def described_tools(tools: Sequence[Mapping[str, object]]) -> str:
    """The text of a system message that describes tools, for templates without a place for them; calls are JSON."""
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    return (
        "You can call these tools, described by JSON schemas:\n"
        + "\n".join(lines)
        + '\nTo call one, answer with a JSON object and nothing else: {"name": the tool\'s name, "arguments": {…}}'
    )
