"""A conversation as a tree of messages. Edited messages and regenerated replies are kept as branches.

The current path runs from the first message to the *leaf*. Messages are immutable: a change replaces a message by a
new one, so that one thread can read a conversation while another thread changes it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from localllm.chat.conversation import kind_of
from localllm.chat.thinking import split
from localllm.errors import StoreError, UsageError
from localllm.nesting import MAX_CALL_NESTING, NestingError, check_nesting, parse_json

T = TypeVar("T")

Role = Literal["user", "assistant"]

#: State of a reply: the model is writing it; the model ended it; it was stopped; it reached ``max_tokens`` or the end
#: of the context; it failed; the program was killed during the reply; or the user has edited its end. Messages of
#: users are complete.
State = Literal["streaming", "complete", "stopped", "length", "context", "failed", "killed", "edited"]


# Limits for values from files: integers that JSON represents exactly, and times up to the year 9999.
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Time = Annotated[float, Meta(ge=0, lt=253_402_300_799)]
Id = Annotated[str, Meta(min_length=1, max_length=100)]


@dataclass(frozen=True, slots=True)
class ReplyStats:
    """The cost of a reply."""

    prompt_tokens: Count = 0  # tokens of the prompt, including cached tokens
    cached_tokens: Count = 0  # tokens of the prompt that were in the cache and cost nothing
    new_tokens: Count = 0  # tokens of the reply
    first_token_s: Seconds = 0.0  # seconds to the first token
    rate: Seconds = 0.0  # tokens per second after the first token
    model: str = ""  # name of the model
    # thinking time in seconds; None if the model did not think, or the time is unknown
    thinking_s: Seconds | None = None

    @property
    def total_tokens(self) -> int:
        """Tokens of context that the prompt and the reply occupy."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class Window:
    """The part of the path that the model receives: messages from id ``first`` on, and a summary of earlier messages.

    It applies from the message that contains it.
    """

    first: Id
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A text file, a piece of one, an image or audio. ``name`` is its path as the user typed it."""

    name: str
    text: str
    n_tokens: Count
    picture: bytes = b""  # content of the image or audio file

    @property
    def is_sound(self) -> bool:
        return bool(self.picture) and kind_of(self.picture) == "audio"

    def is_of(self, name: str) -> bool:
        """Whether ``name`` is this file, the file that contains this piece, or the folder that contains the file."""
        name = name.rstrip("/\\")
        return self.name == name or self.name.startswith((f"{name}, ", f"{name}/", f"{name}\\"))


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A tool call, with its arguments as JSON. ``result`` is None until the tool has run.

    ``change`` is the diff of a call that changes a file. ``images`` are contents of image files in the result.
    """

    name: str
    arguments: str
    result: str | None = None
    change: str = ""
    images: tuple[bytes, ...] = ()

    @property
    def subject(self) -> str:
        """The path of the changed file, or the arguments of a call that changes no file."""
        lines = self.change.split("\n", 2)  # of an imported chat, these are any lines
        return lines[1].removeprefix("+++ ") if len(lines) > 1 else self.arguments


@dataclass(frozen=True)
class ChatMessage:
    id: Id  # unique among all messages of all conversations
    parent: Id | None  # id of the previous message; None for a first message
    role: Role
    text: str  # full text; for a reply including thinking and tags
    created: Time  # seconds since 1970
    state: State = "complete"
    opened: str = ""  # thinking tag at the end of the prompt; see `localllm.chat.thinking`
    stats: ReplyStats | None = None
    window: Window | None = None  # set if the whole path did not fit the context
    attachments: tuple[Attachment, ...] = ()
    calls: tuple[CallRecord, ...] = ()  # tool calls at the end of a reply; another reply follows

    @property
    def can_go_on(self) -> bool:
        """Whether this is a reply that can be continued, because the model did not write its end."""
        return self.state not in ("complete", "streaming")

    @property
    def is_cut(self) -> bool:
        """Whether this is a reply that ended before the model was finished."""
        return self.can_go_on and self.state != "edited"

    @property
    def content(self) -> str:
        """The text without thinking."""
        return self._parts[1]

    @property
    def thinking(self) -> str:
        return self._parts[0]

    # msgspec ignores attributes whose names start with an underscore.
    @cached_property
    def _parts(self) -> tuple[str, str]:
        return split(self.text, self.opened) if self.role == "assistant" else ("", self.text)


def new_id() -> str:
    return uuid.uuid4().hex


def short_id() -> str:
    """Return a short id that users can type. Collisions are unlikely."""
    return new_id()[:10]


@dataclass
class Conversation:
    """A tree of messages, with the properties of the whole conversation."""

    id: str = field(default_factory=short_id)
    title: str = ""
    system: str = ""
    # settings of generation; see `localllm.tui.chat.settings`
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = ""  # path of the model file; empty: the demo model
    # created, updated: seconds since 1970
    created: float = field(default_factory=time.time)
    updated: float = field(default_factory=time.time)
    # whether it was ever saved; if the store no longer contains it, the chat was deleted
    is_saved: bool = field(default=False, compare=False)
    _messages: dict[str, ChatMessage] = field(default_factory=dict, repr=False)
    _children: dict[str | None, list[str]] = field(default_factory=dict, repr=False)
    #: For each message, the child that was viewed last.
    _last_viewed: dict[str | None, str] = field(default_factory=dict, repr=False, compare=False)
    _leaf: str | None = None

    # -- Reading ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, id_: object) -> bool:
        return id_ in self._messages

    def __getitem__(self, id_: str) -> ChatMessage:
        message = self._messages.get(id_)
        if message is None:
            raise UsageError(f"this conversation has no message {id_!r}")
        return message

    def get(self, id_: str) -> ChatMessage | None:
        return self._messages.get(id_)

    @property
    def messages(self) -> list[ChatMessage]:
        """All messages of all branches, parents before children."""
        return list(self._messages.values())

    @property
    def leaf(self) -> ChatMessage | None:
        """The last message of the current path."""
        return None if self._leaf is None else self._messages[self._leaf]

    def path(self, to: str | None = None) -> list[ChatMessage]:
        """Return the messages from the first one to ``to``, which defaults to the leaf."""
        messages: list[ChatMessage] = []
        at = self._leaf if to is None else to
        while at is not None:
            message = self[at]
            messages.append(message)
            at = message.parent
        return messages[::-1]

    def children(self, id_: str | None) -> list[ChatMessage]:
        """Return the children of a message, or the first messages if ``id_`` is None."""
        return [self._messages[child] for child in self._children.get(id_, ())]

    def siblings(self, id_: str) -> list[ChatMessage]:
        """Return all messages with the same parent, including this message, oldest first."""
        return self.children(self[id_].parent)

    def was_replied_to(self, id_: str) -> bool:
        """Whether the message has children in any branch, or is a reply itself."""
        return self[id_].role == "assistant" or bool(self._children.get(id_))

    def branch_of(self, id_: str) -> tuple[int, int]:
        """Return the number of a message among its siblings, from 1, and the number of siblings."""
        siblings = self._children[self[id_].parent]
        return siblings.index(id_) + 1, len(siblings)

    # -- Writing ---------------------------------------------------------------------------------------------------

    def add(self, role: Role, text: str, *, parent: str | None = None, **fields: Any) -> ChatMessage:
        """Add a message to ``parent``, which defaults to the leaf. The message becomes the leaf.

        ``fields`` are fields of `ChatMessage`.
        """
        return self._append(role, text, self._leaf if parent is None else self[parent].id, fields)

    def add_sibling(self, id_: str, text: str, **fields: Any) -> ChatMessage:
        """Add an alternative to a message, which stays as a branch. The alternative becomes the leaf."""
        message = self[id_]
        return self._append(message.role, text, message.parent, fields)

    def _append(self, role: Role, text: str, parent: str | None, fields: dict[str, Any]) -> ChatMessage:
        message = ChatMessage(new_id(), parent, role, text, time.time(), **fields)
        self._insert(message)
        self._choose(message.id)
        return message

    def _insert(self, message: ChatMessage) -> None:
        self._messages[message.id] = message
        self._children.setdefault(message.parent, []).append(message.id)

    def update(self, id_: str, **changes: Any) -> ChatMessage:
        message = replace(self[id_], **changes)
        self._messages[id_] = message
        return message

    def switch(self, id_: str) -> ChatMessage:
        """Switch to the branch of a message, down to its leaf that was viewed last. Returns the leaf."""
        at = self[id_].id
        while children := self._children.get(at):
            at = self._last_viewed.get(at, children[-1])
        self._choose(at)
        return self._messages[at]

    def delete(self, id_: str) -> list[str]:
        """Delete a message and all its descendants. Returns the deleted ids.

        If the leaf is deleted, the nearest sibling branch becomes current, or the parent if there are no siblings.
        """
        message = self[id_]
        siblings = self._children[message.parent]
        index = siblings.index(id_)
        doomed = [id_]
        for at in doomed:  # the list grows during the iteration
            doomed += self._children.pop(at, [])
        siblings.remove(id_)
        for at in doomed:
            del self._messages[at]
            self._last_viewed.pop(at, None)
        if self._last_viewed.get(message.parent) == id_:
            del self._last_viewed[message.parent]
        if not siblings:
            del self._children[message.parent]
        if self._leaf in doomed:
            self._leaf = message.parent
            if siblings:
                self.switch(siblings[min(index, len(siblings) - 1)])
        return doomed

    def restore(self, messages: Iterable[ChatMessage], leaf: str | None) -> None:
        """Add stored messages, parents before children.

        A message whose parent is missing becomes a first message. Without a ``leaf``, the newest message is the leaf.
        """
        for message in messages:
            orphaned = message.parent is not None and message.parent not in self._messages
            self._insert(replace(message, parent=None) if orphaned else message)
        if leaf in self._messages:
            self._choose(leaf)
        elif self._messages:
            self._choose(next(reversed(self._messages)))

    def _choose(self, leaf: str | None) -> None:
        self._leaf = at = leaf
        while at is not None:
            parent = self._messages[at].parent
            self._last_viewed[parent] = at
            at = parent


# -- Untrusted values from files and the database --------------------------------------------------------------------


def parsed(text: str | bytes) -> Any:
    """Parse JSON. Raises StoreError if it is invalid."""
    try:
        check_nesting(text)
        return msgspec.json.decode(text)
    except NestingError as error:
        raise StoreError(str(error)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise StoreError(f"it is not valid JSON ({error})") from None


def converted(values: object, type_: type[T], label: str) -> T:
    """Convert JSON values to ``type_``, ignoring unknown fields. Raises StoreError, with ``label`` in its message."""
    try:
        return msgspec.convert(values, type_)
    except msgspec.ValidationError as error:
        raise StoreError(f"{label} is damaged: {error}") from None


def to_message(values: object, label: str) -> ChatMessage:
    """Convert JSON values to a message; see `converted`."""
    if isinstance(values, Mapping):
        values = {"parent": None, "created": 0.0, **values}
    message = converted(values, ChatMessage, label)
    for call in message.calls:
        try:
            arguments = parse_json(call.arguments, MAX_CALL_NESTING)
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise StoreError(f"{label} is damaged: the arguments of a call are not a JSON object")
    return message
