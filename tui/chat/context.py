"""Builds the messages that the model receives from a path of the conversation."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from localllm.chat.conversation import kind_of
from localllm.tui.chat import settings as chat_settings
from localllm.tui.chat.attachments import with_attachments
from localllm.tui.chat.conversation import ChatMessage, Conversation, Window
from localllm.tui.chat.events import Choice

if TYPE_CHECKING:
    from localllm.chat import ChatTemplate
    from localllm.generation.completion import Stream
    from localllm.loading.model_info import ModelInfo
    from localllm.options.keywords import Options

#: A message in the format of `LLM.chat`.
Sent = dict[str, Any]
Messages = Sequence[Mapping[str, object]]


class ChatModel(Protocol):
    """The part of `localllm.LLM` that a chat uses. Tests use a fake model."""

    @property
    def info(self) -> ModelInfo: ...
    @property
    def accepts_images(self) -> bool: ...
    @property
    def accepts_audio(self) -> bool: ...
    @property
    def chat_template(self) -> ChatTemplate: ...
    @property
    def template_variables(self) -> Mapping[str, Any]: ...
    def close(self) -> None: ...
    def tokenize(self, text: str, add_special: bool = True) -> list[int]: ...
    def tokenize_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_variables: Mapping[str, object] | None = None,
        reply_prefix: str = "",
    ) -> list[int]: ...
    def stream_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_variables: Mapping[str, object] | None = None,
        reply_prefix: str = "",
        parse: bool = True,
        **options: Unpack[Options],
    ) -> Stream: ...


def name_of(model: ChatModel) -> str:
    """Return the model's name, or the name of its file."""
    return model.info.name or model.info.path.name


def window_of(path: Sequence[ChatMessage]) -> Window | None:
    """Return the window that applies at the end of a path: the last window that starts on the path."""
    ids = {message.id for message in path}
    return next((m.window for m in reversed(path) if m.window is not None and m.window.first in ids), None)


def visible_part(path: Sequence[ChatMessage], window: Window | None) -> Sequence[ChatMessage]:
    """Return the messages from the first message of the window on."""
    if window is None:
        return path
    return path[next((i for i, message in enumerate(path) if message.id == window.first), 0) :]


def prompt(messages: Sequence[ChatMessage], system: str, summary: str = "") -> list[Sent]:
    """Return the messages for the model, with a summary of earlier messages.

    Replies without an answer are omitted. Consecutive user messages are joined, because many chat templates require
    alternating roles.
    """
    outgoing: list[Sent] = []
    if summary:
        system = f"{system}\n\nSummary of the conversation so far:\n{summary}".lstrip()
    if system:
        outgoing.append({"role": "system", "content": system})
    for message in messages:
        content = with_attachments(message) if message.role == "user" else message.content
        media = [media_part(file.picture) for file in message.attachments if file.picture]
        if message.calls:
            outgoing += _calls(message, content)
        elif content or media:
            _say(outgoing, message.role, content, media)
    return outgoing


def _say(outgoing: list[Sent], role: str, text: str, media: Sequence[Sent] = ()) -> None:
    """Append images, audio and text to the messages. They join the last message if it has the same role."""
    last: Sent | None = outgoing[-1] if outgoing and outgoing[-1]["role"] == role else None
    if last is None:
        last = {"role": role, "content": ""}
        outgoing.append(last)
    text = f"\n\n{text}" if last["content"] else text
    if isinstance(last["content"], str) and not media:
        last["content"] += text
        return
    if isinstance(last["content"], str):
        last["content"] = [{"type": "text", "text": last["content"]}] if last["content"] else []
    last["content"] += media
    last["content"].append({"type": "text", "text": text})


def texts_alone(messages: Sequence[Sent]) -> list[Sent]:
    """Return the messages without images and audio, which `ChatTemplate.render` does not accept."""

    def text_of(content: Any) -> Any:
        return [part for part in content if part["type"] == "text"] if isinstance(content, list) else content

    return [{**message, "content": text_of(message["content"])} for message in messages]


def media_part(file: bytes) -> Sent:
    kind = kind_of(file)
    return {"type": kind, kind: file}


def tokens_of_media(model: ChatModel, file: bytes) -> int:
    """Return the number of tokens of an image or audio file. Their token ids are negative."""
    ids = model.tokenize_chat([{"role": "user", "content": [media_part(file)]}])
    return sum(id_ < 0 for id_ in ids)


def _calls(message: ChatMessage, text: str) -> list[Sent]:
    """Return a reply with tool calls, including the reasoning that led to the calls, and the results of the calls."""
    calls = [{"function": {"name": call.name, "arguments": json.loads(call.arguments)}} for call in message.calls]
    reply = {"role": "assistant", "content": text, "reasoning_content": message.thinking, "tool_calls": calls}
    results: list[Sent] = []
    for call in message.calls:
        content: Any = call.result or "(it was not run)"
        if call.images:
            content = [*map(media_part, call.images), {"type": "text", "text": content}]
        results.append({"role": "tool", "name": call.name, "content": content})
    return [reply, *results]


def whole_prompt(path: Sequence[ChatMessage], system: str) -> list[Sent]:
    """Return the messages that the model receives for a path, using the window that applies at its end."""
    window = window_of(path)
    return prompt(visible_part(path, window), system, "" if window is None else window.summary)


INSTRUCTION = (
    "Summarise our conversation for yourself: you will continue with only the summary, without the earlier messages. "
    "Include all decisions, facts, names, numbers and open questions. Answer with the summary and nothing else."
)


class ContextTrimmer:
    """Finds the first message of a prompt that fits the context."""

    def __init__(
        self,
        model: ChatModel,
        conversation: Conversation,
        system: str,
        question: str,
        reply_prefix: str,
        tools: Mapping[str, Any],
    ) -> None:
        """Trim for a reply to ``question``. ``reply_prefix`` is an unfinished reply; ``tools`` are model keywords."""
        self._model = model
        self._tools = tools
        self._system = system
        self._reply_prefix = reply_prefix
        self._settings = chat_settings.generation(conversation.settings)
        self._context = model.info.context
        # messages up to the question; the model receives the messages from index ``start`` on
        self.path = conversation.path(question)
        window = window_of(self.path)
        self.start = len(self.path) - len(visible_part(self.path, window))
        # summary of the messages before ``start``; a new summary may have ``summary_tokens``
        self.summary = "" if window is None else window.summary
        self.summary_tokens = max(1, self._context // 8)

    def choices(self) -> tuple[Choice, ...]:
        if self.first(0) is None:
            return ("stop",)
        first = self.first(self.summary_tokens)
        limit = self._context - self.summary_tokens
        is_short = first is not None and len(self._model.tokenize_chat(self.request(first))) <= limit
        return ("drop", "summarise", "stop") if is_short else ("drop", "stop")

    def first(self, reserve: int) -> int | None:
        """Return the index of the first user message at which a prompt can start and leave room for an answer.

        ``reserve`` tokens stay free as well. If no start leaves enough room, return the last user message; None if
        that message alone does not fit.
        """
        starts = [i for i, message in enumerate(self.path) if message.role == "user" and i > self.start]
        max_tokens = self._settings.options.get("max_tokens") or self._context // 4
        limit = self._context - min(max_tokens, self._context // 2) - reserve
        i = bisect_left(starts, True, key=lambda start: self._count(self.path[start:]) <= limit)
        if i < len(starts):
            return starts[i]
        return starts[-1] if starts and self._count(self.path[starts[-1] :]) < self._context - reserve else None

    def _count(self, messages: Sequence[ChatMessage]) -> int:
        outgoing, variables = prompt(messages, self._system, self.summary), self._settings.template_variables
        options: dict[str, Any] = {"template_variables": variables, "reply_prefix": self._reply_prefix, **self._tools}
        return len(self._model.tokenize_chat(outgoing, **options))

    def request(self, first: int) -> list[Sent]:
        """Return the prompt for a summary of the messages before index ``first``."""
        outgoing = prompt(self.path[self.start : first], self._system, self.summary)
        _say(outgoing, "user", INSTRUCTION)
        return outgoing
