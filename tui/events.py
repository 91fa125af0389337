"""What happens while a reply is generated, as `localllm.tui.session.ChatSession` tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.tui.conversation import Message

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
    """The last event where the context is full: `ChatSession.make_room` goes on, with one of ``choices``.

    Attributes:
        needed: tokens of the prompt, and of the reply so far.
        context: tokens that there is room for.
        in_reply: whether a reply was cut off by it; else there is none yet.
        choices: what can be done; "stop" alone where the last message does not fit by itself.
    """

    needed: int
    context: int
    in_reply: bool
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Summarising:
    """A piece of a summary that the model writes."""

    text: str


@dataclass(frozen=True, slots=True)
class RoomMade:
    """From now on the model does not get the first ``n_left_out`` messages of the path any more, but ``summary``."""

    n_left_out: int
    summary: str


@dataclass(frozen=True, slots=True)
class Warned:
    """Something to tell, after which the chat goes on: it cannot be saved, a word with an @ names no file."""

    text: str


Event = Started | Prefill | Delta | Finished | ContextFull | Summarising | RoomMade | Warned
