"""A fake model for chat tests: it returns scripted replies, with words as tokens."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from localllm.engine.request import FinishReason, Timings, Usage
from localllm.errors import ContextLengthError
from localllm.generation.completion import Chunk
from localllm.options.declared import CheckedOptions
from localllm.tui.chat.conversation import ChatMessage, Conversation
from localllm.tui.chat.events import Event, Turn

Messages = Sequence[Mapping[str, object]]

#: A reply, or a function that creates one from the messages.
Reply = str | Exception | Callable[[Messages], str]


def play(
    act: Callable[..., None], *arguments: object, watch: Callable[[Event, Turn], None] = lambda event, turn: None
) -> list[Event]:
    """Run a session method that generates and return its events; ``watch`` also receives each event immediately."""
    events: list[Event] = []

    def emit(event: Event) -> None:
        events.append(event)
        watch(event, turn)

    turn = Turn(emit)
    act(*arguments, turn)
    return events


def leaves(conversation: Conversation) -> list[ChatMessage]:
    return [message for message in conversation.messages if not conversation.children(message.id)]


def words(text: str) -> list[str]:
    """Split a text into tokens: words with their leading white space."""
    return re.findall(r"\s*\S+|\s+$", text)


@dataclass(frozen=True)
class FakeInfo:
    context: int
    path: Path = Path("fake.gguf")
    name: str | None = "Fake"
    device: str = "cpu"
    gpu_bytes: int = 0


@dataclass
class FakeTemplate:
    """Renders ``role: content`` lines, then ``ending``, without its tag if thinking is disabled."""

    ending: str = "assistant:"

    def render(self, messages: Messages, *, enable_thinking: bool = True, **variables: Any) -> str:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + (self.ending if enable_thinking else self.ending.removesuffix("<think>"))


@dataclass
class Asked:
    messages: list[dict[str, object]]
    reply_prefix: str
    variables: dict[str, object]
    options: dict[str, Any]
    tools: Sequence[Mapping[str, object]] | None = None


@dataclass
class FakeModel:
    """A `localllm.tui.chat.context.ChatModel`.

    Attributes:
        replies: scripted replies, in order; later replies are "ok".  An exception is raised in the middle of a reply.
        context: context length in tokens.
        seconds: delay before every token.
        gate: if set, every token waits for this event.
        ending: end of the rendered prompt.
        asked: received requests.
    """

    replies: list[Reply] = field(default_factory=list)
    context: int = 1000
    seconds: float = 0.0
    gate: threading.Event | None = None
    ending: str = "assistant:"
    asked: list[Asked] = field(default_factory=list)
    n_ended_reasonings: int = 0
    _cache: list[str] = field(default_factory=list)

    closed = False
    name = "Fake"
    accepts_images = accepts_audio = False
    template_variables: ClassVar[dict[str, Any]] = {}

    @property
    def info(self) -> Any:
        return FakeInfo(self.context, name=self.name)

    def close(self) -> None:
        self.closed = True

    @property
    def chat_template(self) -> Any:
        return FakeTemplate(self.ending)

    def tokenize(self, text: str, add_special: bool = True) -> list[int]:
        return [hash(word) for word in words(text)]

    def _prompt(self, messages: Messages, reply_prefix: str) -> list[str]:
        return words(self.chat_template.render(messages)) + words(reply_prefix)

    def tokenize_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_variables: Mapping[str, object] | None = None,
        reply_prefix: str = "",
    ) -> list[int]:
        return [hash(word) for word in self._prompt(messages, reply_prefix)]

    def stream_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_variables: Mapping[str, object] | None = None,
        reply_prefix: str = "",
        parse: bool = True,
        **options: Any,
    ) -> Any:
        request = CheckedOptions.of(options)
        self.asked.append(
            Asked([dict(m) for m in messages], reply_prefix, dict(template_variables or {}), dict(options), tools)
        )
        reply = self.replies.pop(0) if self.replies else "ok"
        prompt = self._prompt(messages, reply_prefix)
        if len(prompt) > self.context:
            raise ContextLengthError(len(prompt), self.context, "shorten it")
        n_cached = next((i for i, (a, b) in enumerate(zip(prompt, self._cache, strict=False)) if a != b), None)
        n_cached = min(len(prompt), len(self._cache)) if n_cached is None else n_cached
        text = reply(messages) if callable(reply) else reply
        return FakeStream(self, prompt, min(n_cached, len(prompt) - 1), text, request)


class FakeStream:
    """The parts of `localllm.Stream` that the chat uses."""

    def __init__(
        self, model: FakeModel, prompt: list[str], n_cached: int, text: str | Exception, request: CheckedOptions
    ) -> None:
        self._model = model
        self._prompt = prompt
        self._n_cached = n_cached
        self._error = text if isinstance(text, Exception) else None
        self._words = ["so", " far"] if isinstance(text, Exception) else words(text)
        self._request = request
        self._n = 0
        self._ended = False
        self._cancelled = threading.Event()
        self.stop_text: str | None = None
        self.finish_reason: FinishReason | None = None

    @property
    def usage(self) -> Usage:
        return Usage(len(self._prompt), self._n_cached, self._n)

    @property
    def timings(self) -> Timings:
        return Timings(0.1, len(self._prompt) - self._n_cached, 0.25, self._n / 10, self._n)

    def cancel(self) -> None:
        self._cancelled.set()

    def end_reasoning(self) -> None:
        self._model.n_ended_reasonings += 1

    def close(self) -> None:
        self._ended = True
        self._cancelled.set()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        if self._n == 0 and self._request.progress is not None:
            self._request.progress(self._n_cached, len(self._prompt))
            self._request.progress(len(self._prompt), len(self._prompt))
        self._wait()
        most = self._request.max_tokens
        if self._cancelled.is_set():
            return self._last("cancelled")
        if len(self._prompt) + self._n > self._model.context or (most is not None and self._n >= most):
            return self._last("length")
        if self._n == len(self._words):
            if self._error is not None:
                self._ended = True
                raise self._error
            return self._last("stop")
        self._n += 1
        return Chunk(self._words[self._n - 1], (self._n,))

    def _wait(self) -> None:
        if self._model.seconds:
            time.sleep(self._model.seconds)
        while self._model.gate is not None and not self._cancelled.is_set():
            if self._model.gate.wait(0.01):
                break

    def _last(self, reason: FinishReason) -> Chunk:
        self._ended = True
        self.finish_reason = reason
        self._model._cache = [*self._prompt, *self._words[: self._n]]
        return Chunk("", finish_reason=reason, usage=self.usage, timings=self.timings)
