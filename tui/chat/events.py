"""Events during the generation of a reply. `localllm.tui.chat.session.ChatSession` emits them; screens show them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from localllm.agent_tools.toolbox import Permission
from localllm.tui.chat.conversation import ChatMessage

if TYPE_CHECKING:
    from localllm.generation.completion import Stream

#: Actions when the context is full: drop the oldest turns, replace them with a summary, or stop.
Choice = Literal["drop", "summarise", "stop"]


@dataclass(frozen=True, slots=True)
class Started:
    """A reply starts or is continued. Its message is already part of the conversation."""

    id: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """Progress of evaluating the prompt, in tokens. ``done`` includes cached tokens."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of the reply."""

    text: str
    thinking: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """The reply is complete. ``message`` is None if the reply was stopped before its first word."""

    message: ChatMessage | None


@dataclass(frozen=True, slots=True)
class ContextFull:
    """The context is full. The last event of the turn; call `ChatSession.free_context` with one of ``choices``."""

    needed: int  # tokens of the prompt plus tokens of the unfinished reply
    context: int  # context length of the model in tokens
    in_reply: bool  # whether a reply was cut off; False: the prompt itself is too long
    choices: tuple[Choice, ...]  # possible actions; only "stop" if the last message alone is too long


@dataclass(frozen=True, slots=True)
class Summarising:
    """New text of the summary that the model writes."""

    text: str


@dataclass(frozen=True, slots=True)
class ContextTrimmed:
    """The model no longer receives the first ``n_left_out`` messages of the path; it receives ``summary`` instead."""

    n_left_out: int
    summary: str


@dataclass(frozen=True, slots=True)
class ChatWarning:
    """A problem that does not end the chat: it cannot be saved, or a word with an @ names no file."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatNotice:
    """Information for the user, such as which instructions the model gets."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolApprovalRequest:
    """The model requests a tool call and waits until ``answer`` is called, from any thread.

    ``change`` is the diff of a call that changes a file.
    """

    name: str
    arguments: str
    answer: Callable[[Permission], None]
    change: str = ""

    @property
    def text(self) -> str:
        """The call for the user: the name and the diff, or the arguments if there is no diff."""
        return f"{self.name}\n{self.change}" if self.change else f"{self.name} {self.arguments}"


@dataclass(frozen=True, slots=True)
class ToolApprovalEnded:
    """The tool call no longer waits, because the user has answered or the turn was stopped."""


@dataclass(frozen=True, slots=True)
class ToolCallsDone:
    """Some tool calls of a reply have results or diffs."""

    message: ChatMessage


Event = (
    ToolApprovalRequest
    | ToolApprovalEnded
    | ToolCallsDone
    | Started
    | Prefill
    | Delta
    | Finished
    | ContextFull
    | Summarising
    | ContextTrimmed
    | ChatWarning
    | ChatNotice
)


class EventQueue:
    """A thread-safe queue of events.

    A model emits hundreds of text pieces per second, and a screen reads the queue only a few times per second. The
    queue therefore joins consecutive texts, and keeps only the newest progress of a prompt.
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
            events, self._waiting = self._waiting, []
        return events


def _joined(last: Event, event: Event) -> Event | None:
    """Return one event that replaces both, or None if they cannot be joined."""
    if isinstance(last, Delta) and isinstance(event, Delta) and last.thinking == event.thinking:
        return Delta(last.text + event.text, event.thinking)
    if isinstance(last, Summarising) and isinstance(event, Summarising):
        return Summarising(last.text + event.text)
    if isinstance(last, Prefill) and isinstance(event, Prefill):
        return event
    return None


class Turn:
    """One generation: the receiver of its events, and whether it was stopped."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self.emit = emit  # called on the generating thread
        self.question: str | None = None  # id of the user's message; None before it is added
        self.asked: ToolApprovalRequest | None = None  # the tool call that waits for permission
        self._stopped = threading.Event()
        self._stream: Stream | None = None

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """End the generation soon and keep the generated text. Safe from any thread, also before the start."""
        self._stopped.set()
        if (stream := self._stream) is not None:
            stream.cancel()

    @property
    def stream(self) -> Stream | None:
        """The reply being read. If `stop` was called earlier, a new stream is cancelled at once."""
        return self._stream

    @stream.setter
    def stream(self, stream: Stream | None) -> None:
        self._stream = stream
        if stream is not None and self.is_stopped:
            stream.cancel()


class ThinkingClock:
    """Measures the thinking time of a reply, from the first thought to the first word of the answer."""

    def __init__(self, before: float | None = None) -> None:
        """``before`` is the earlier thinking time in seconds of a continued reply; None if it has no thoughts."""
        self._before = before
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        """The thinking time up to now, in seconds."""
        return (self._before or 0.0) + (0.0 if self._began is None else time.monotonic() - self._began)

    def see(self, *, thinking: bool) -> None:
        """Record the kind of a new piece of text."""
        if not thinking:
            self.stop()
        elif self._began is None:
            self._began = time.monotonic()

    def stop(self) -> float | None:
        """End the current thought. Returns the total in seconds, or None if the reply has no thoughts."""
        if self._began is not None:
            self._before, self._began = self.seconds, None
        return self._before
