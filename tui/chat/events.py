"""Events while a reply is generated: `localllm.tui.chat.session.ChatSession` emits it, screens show it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from localllm.tui.chat.conversation import Message
from localllm.tui.chat.tools import Permission

if TYPE_CHECKING:
    from localllm.generation.completion import Stream

#: What can be done where the context is full: leave out the oldest turns, put a summary in their place, or nothing.
Choice = Literal["drop", "summarise", "stop"]


@dataclass(frozen=True, slots=True)
class Started:
    """A reply begins, or is continued; it stands in the conversation from now on."""

    id: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """The prompt is being evaluated: tokens done, what was cached among them, and all."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of the reply."""

    text: str
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """The reply is as it will stay; None if there is none, for it was stopped before its first word."""

    message: Message | None


@dataclass(frozen=True, slots=True)
class ContextFull:
    """The last event where the context is full: `ChatSession.free_context` goes on, with one of ``choices``."""

    needed: int  # tokens of the prompt, and of the reply so far
    context: int  # the model's context in tokens
    in_reply: bool  # whether a reply was cut off by it; else there is none yet
    choices: tuple[Choice, ...]  # what can be done; "stop" alone where the last message does not fit by itself


@dataclass(frozen=True, slots=True)
class Summarising:
    """A piece of a summary that the model writes."""

    text: str


@dataclass(frozen=True, slots=True)
class ContextTrimmed:
    """From now on the model does not get the first ``n_left_out`` messages of the path any more, but ``summary``."""

    n_left_out: int
    summary: str


@dataclass(frozen=True, slots=True)
class ChatWarning:
    """Something to tell, after which the chat goes on: it cannot be saved, a word with an @ names no file."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolApprovalRequest:
    """The model wants to use a tool, and waits for ``answer`` to be called, by any thread."""

    name: str
    arguments: str
    answer: Callable[[Permission], None]


@dataclass(frozen=True, slots=True)
class ToolCallsDone:
    """Something came of the calls of a reply."""

    message: Message


Event = (
    ToolApprovalRequest
    | ToolCallsDone
    | Started
    | Prefill
    | Delta
    | Finished
    | ContextFull
    | Summarising
    | ContextTrimmed
    | ChatWarning
)


class EventQueue:
    """Events that wait.  Any thread may put, and any may take.

    A model writes hundreds of pieces a second, and a screen takes what is there some times a second: texts that wait
    are joined, and of the progress of a prompt only the newest is kept.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Event] = []

    def put(self, event: Event) -> None:
        with self._lock:
            joined = _joined(self._waiting[-1], event) if self._waiting else None
            if joined is None:
                self._waiting.append(event)
            else:
                self._waiting[-1] = joined

    def take(self) -> list[Event]:
        with self._lock:
            taken, self._waiting = self._waiting, []
        return taken


def _joined(last: Event, event: Event) -> Event | None:
    """One event that says as much as both; None if there is none."""
    if isinstance(last, Delta) and isinstance(event, Delta) and last.thinking == event.thinking:
        return Delta(last.text + event.text, event.thinking)
    if isinstance(last, Summarising) and isinstance(event, Summarising):
        return Summarising(last.text + event.text)
    if isinstance(last, Prefill) and isinstance(event, Prefill):
        return event
    return None


class Turn:
    """Something that is being generated: where its events go, and whether somebody wants no more of it."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self.emit = emit  # takes its events, on the thread that generates
        self.question: str | None = None  # the id of the message that was said in it; None as long as none was
        self._stopped = threading.Event()
        self._stream: Stream | None = None

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """Ends it soon; what was said is kept.  Any thread may call it, at any time, also before it has begun."""
        self._stopped.set()
        if (stream := self._stream) is not None:
            stream.cancel()

    @property
    def stream(self) -> Stream | None:
        """The reply being read; `stop` ends it, even if it came before."""
        return self._stream

    @stream.setter
    def stream(self, stream: Stream | None) -> None:
        self._stream = stream
        if stream is not None and self.is_stopped:
            stream.cancel()


class ThinkingClock:
    """Tells how long a model thinks, from its first thought to its first word of an answer."""

    def __init__(self, before: float | None = None) -> None:
        """``before`` are the seconds of a reply that goes on; None if it has no thought yet."""
        self._before = before
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        """How long it has thought by now."""
        return (self._before or 0.0) + (0.0 if self._began is None else time.monotonic() - self._began)

    def see(self, *, thinking: bool) -> None:
        """Takes note of a piece that has just come."""
        if not thinking:
            self.stop()
        elif self._began is None:
            self._began = time.monotonic()

    def stop(self) -> float | None:
        """Ends a thought that is under way; returns the seconds of all; None if there was none."""
        if self._began is not None:
            self._before, self._began = self.seconds, None
        return self._before
