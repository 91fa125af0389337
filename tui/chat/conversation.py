"""A conversation as a tree of messages: what was edited or answered again stays, as a branch beside the new one.

The path from the first message to the *leaf* is what is being talked about now.  Messages are values: a change makes
a new one in the old one's place, so that one thread may read a conversation while another one writes to it.
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

#: How far a reply came: it is being written; the model ended it; it was stopped, reached ``max_tokens`` or the end
#: of the context, or failed; the program was killed while it was written; or people have written its end.  What users
#: say is complete.
State = Literal["streaming", "complete", "stopped", "length", "context", "failed", "killed", "edited"]


# Bounds of what comes from files: numbers that JSON keeps exactly, and times up to the year 9999.
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Time = Annotated[float, Meta(ge=0, lt=253_402_300_799)]
Id = Annotated[str, Meta(min_length=1, max_length=100)]


@dataclass(frozen=True, slots=True)
class Stats:
    """The cost of a reply."""

    prompt_tokens: Count = 0  # all tokens of the prompt
    cached_tokens: Count = 0  # those of them that were in the cache, and cost nothing
    new_tokens: Count = 0  # tokens of the reply
    first_token_s: Seconds = 0.0  # seconds to the first token
    rate: Seconds = 0.0  # tokens a second after it
    model: str = ""  # which model replied
    # seconds that it thought before it answered; None if it did not, or that is not known
    thinking_s: Seconds | None = None

    @property
    def total_tokens(self) -> int:
        """Tokens of context that the prompt and the reply take."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class Window:
    """From its message on, the model gets the messages from the id ``first`` on, and a summary of the others."""

    first: Id
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A text file, a piece of it, a picture or a sound, sent with a message; ``name`` is its path as it was typed."""

    name: str
    text: str
    n_tokens: Count
    picture: bytes = b""  # the file of a picture, or of a sound

    @property
    def is_sound(self) -> bool:
        return bool(self.picture) and kind_of(self.picture) == "audio"

    def is_of(self, name: str) -> bool:
        """Whether it is the file of a name, a piece of it, or in the folder of that name."""
        name = name.rstrip("/\\")
        return self.name == name or self.name.startswith((f"{name}, ", f"{name}/", f"{name}\\"))


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, with its arguments as JSON; ``result`` is None until it has been run."""

    name: str
    arguments: str
    result: str | None = None


@dataclass(frozen=True)
class Message:
    """One message."""

    id: Id  # unique among all messages of all conversations
    parent: Id | None  # the id of the message before it; None for a first one
    role: Role
    text: str  # what was said; of a reply all that the model wrote, thinking and tags as well
    created: Time  # in seconds since 1970
    state: State = "complete"
    opened: str = ""  # the tag of thinking that the prompt ended with; see `localllm.chat.thinking`
    stats: Stats | None = None
    window: Window | None = None  # what the model gets of the conversation from here on, where it did not fit
    attachments: tuple[Attachment, ...] = ()
    calls: tuple[Call, ...] = ()  # of tools, with which a reply ends; another reply follows them

    @property
    def can_go_on(self) -> bool:
        """Whether it is a reply whose end the model did not write, so that it can be continued."""
        return self.state not in ("complete", "streaming")

    @property
    def is_cut(self) -> bool:
        """Whether it is a reply that ended before the model was done."""
        return self.can_go_on and self.state != "edited"

    @property
    def content(self) -> str:
        """The text without reasoning."""
        return self._parts[1]

    @property
    def thinking(self) -> str:
        """The reasoning."""
        return self._parts[0]

    # msgspec leaves out what begins with an underscore.
    @cached_property
    def _parts(self) -> tuple[str, str]:
        return split(self.text, self.opened) if self.role == "assistant" else ("", self.text)


def new_id() -> str:
    return uuid.uuid4().hex


def short_id() -> str:
    """An id that hardly anything else has, for people to type."""
    return new_id()[:10]


@dataclass
class Conversation:
    """A tree of messages, and what belongs to it as a whole."""

    id: str = field(default_factory=short_id)
    title: str = ""
    system: str = ""
    # how replies are generated; see `localllm.tui.chat.settings`
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = ""  # the path of the model's file; empty is the demo model
    # created, updated: in seconds since 1970
    created: float = field(default_factory=time.time)
    updated: float = field(default_factory=time.time)
    # whether it was ever saved: where it is gone from the store then, somebody has deleted it
    is_saved: bool = field(default=False, compare=False)
    _messages: dict[str, Message] = field(default_factory=dict, repr=False)
    _children: dict[str | None, list[str]] = field(default_factory=dict, repr=False)
    #: Of the children of a message the one that was looked at last.
    _chosen: dict[str | None, str] = field(default_factory=dict, repr=False, compare=False)
    _leaf: str | None = None

    # -- Reading ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, id_: object) -> bool:
        return id_ in self._messages

    def __getitem__(self, id_: str) -> Message:
        message = self._messages.get(id_)
        if message is None:
            raise UsageError(f"this conversation has no message {id_!r}")
        return message

    def get(self, id_: str) -> Message | None:
        return self._messages.get(id_)

    @property
    def messages(self) -> list[Message]:
        """All messages of all branches, those before others first."""
        return list(self._messages.values())

    @property
    def leaf(self) -> Message | None:
        """The last message of the branch that is being talked about."""
        return None if self._leaf is None else self._messages[self._leaf]

    def path(self, to: str | None = None) -> list[Message]:
        """The messages from the first one to ``to``, by default to the leaf."""
        found: list[Message] = []
        at = self._leaf if to is None else to
        while at is not None:
            message = self[at]
            found.append(message)
            at = message.parent
        return found[::-1]

    def children(self, id_: str | None) -> list[Message]:
        """The replies to a message; with None, first messages."""
        return [self._messages[child] for child in self._children.get(id_, ())]

    def siblings(self, id_: str) -> list[Message]:
        """The messages that stand in the same place, it among them, oldest first."""
        return self.children(self[id_].parent)

    def was_replied_to(self, id_: str) -> bool:
        """Whether anything follows a message, in whatever branch, or it is a reply itself."""
        return self[id_].role == "assistant" or bool(self._children.get(id_))

    def branch_of(self, id_: str) -> tuple[int, int]:
        """The number of a message among its siblings, from 1, and how many there are."""
        siblings = self._children[self[id_].parent]
        return siblings.index(id_) + 1, len(siblings)

    # -- Writing ---------------------------------------------------------------------------------------------------

    def add(self, role: Role, text: str, *, parent: str | None = None, **fields: Any) -> Message:
        """Says something to ``parent``, by default to the leaf; it becomes the leaf.  ``fields`` are of `Message`."""
        return self._append(role, text, self._leaf if parent is None else self[parent].id, fields)

    def add_sibling(self, id_: str, text: str, **fields: Any) -> Message:
        """Says something else in the place of a message, which stays as a branch; it becomes the leaf."""
        message = self[id_]
        return self._append(message.role, text, message.parent, fields)

    def _append(self, role: Role, text: str, parent: str | None, fields: dict[str, Any]) -> Message:
        message = Message(new_id(), parent, role, text, time.time(), **fields)
        self._insert(message)
        self._choose(message.id)
        return message

    def _insert(self, message: Message) -> None:
        self._messages[message.id] = message
        self._children.setdefault(message.parent, []).append(message.id)

    def update(self, id_: str, **changes: Any) -> Message:
        message = replace(self[id_], **changes)
        self._messages[id_] = message
        return message

    def switch(self, id_: str) -> Message:
        """Goes to the branch that a message is in, and there to the end that was looked at last; returns the leaf."""
        at = self[id_].id
        while children := self._children.get(at):
            at = self._chosen.get(at, children[-1])
        self._choose(at)
        return self._messages[at]

    def delete(self, id_: str) -> list[str]:
        """Removes a message and all that follows it; returns their ids.

        If the leaf was among them, the branch beside it that is nearest is gone to, else the message before.
        """
        message = self[id_]
        siblings = self._children[message.parent]
        place = siblings.index(id_)
        doomed = [id_]
        for at in doomed:  # which grows meanwhile
            doomed += self._children.pop(at, [])
        siblings.remove(id_)
        for at in doomed:
            del self._messages[at]
            self._chosen.pop(at, None)
        if self._chosen.get(message.parent) == id_:
            del self._chosen[message.parent]
        if not siblings:
            del self._children[message.parent]
        if self._leaf in doomed:
            self._leaf = message.parent
            if siblings:
                self.switch(siblings[min(place, len(siblings) - 1)])
        return doomed

    def restore(self, messages: Iterable[Message], leaf: str | None) -> None:
        """Takes in messages that were kept, those before others first.

        One whose parent is missing becomes a first message; without a ``leaf`` of theirs, the newest is the leaf.
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
            self._chosen[parent] = at
            at = parent


# -- Values of files and of the database: anybody may have written them ----------------------------------------------


def parsed(text: str | bytes) -> Any:
    """The values of a JSON text.  Raises StoreError if it is not valid."""
    try:
        check_nesting(text)
        return msgspec.json.decode(text)
    except NestingError as error:
        raise StoreError(str(error)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise StoreError(f"it is not valid JSON ({error})") from None


def converted(values: object, type_: type[T], where: str) -> T:
    """JSON values as a class, unknown ones left out.  Raises StoreError, which names ``where``, if one is wrong."""
    try:
        return msgspec.convert(values, type_)
    except msgspec.ValidationError as error:
        raise StoreError(f"{where} is damaged: {error}") from None


def to_message(values: object, where: str) -> Message:
    """A message of its values; see `converted`."""
    if isinstance(values, Mapping):
        values = {"parent": None, "created": 0.0, **values}
    message = converted(values, Message, where)
    for call in message.calls:
        try:
            arguments = parse_json(call.arguments, MAX_CALL_NESTING)
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise StoreError(f"{where} is damaged: the arguments of a call are not a JSON object")
    return message
