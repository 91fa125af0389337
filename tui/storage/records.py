"""Messages as plain values, for JSON and the schema, and back: whatever comes in is checked.

Files that people import, and databases, may have been written by anybody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast, get_args

from localllm.errors import StoreError
from localllm.tui.chat.conversation import Attachment, Message, Role, State, Stats, Window

_ROLES: tuple[str, ...] = get_args(Role)
_STATES: tuple[str, ...] = get_args(State)
#: Seconds from 1970 to the end of the year 9999, after which there are no dates.
_END_OF_TIME = 253_402_300_800.0
_MOST_TOKENS = 1 << 53
_MOST = 1e12


def parsed(text: str | bytes) -> object:
    """The values of a JSON text.

    Raises:
        StoreError: it is none.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise StoreError("it is nested too deeply") from None
    except ValueError as error:  # also of invalid UTF-8, and of numbers with thousands of digits
        raise StoreError(f"it is no JSON ({error})") from None


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no number of JSON")


class Record:
    """A JSON object that is read with checks; ``where`` is its name in what is said of it."""

    def __init__(self, value: object, where: str) -> None:
        """Raises:
        StoreError: ``value`` is no object.
        """
        if not isinstance(value, Mapping):
            raise StoreError(f"{where} is {value!r:.60}, but must be an object")
        self.values = value
        self.where = where

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self._wrong(key, value, "a text of valid characters") from None
        return value

    def id(self, key: str) -> str:
        value = self.text(key)
        if not 0 < len(value) <= 100:
            raise self._wrong(key, value, "a text of 1 to 100 characters")
        return value

    def one_of(self, key: str, values: tuple[str, ...], default: str | None = None) -> str:
        value = self.text(key, default)
        if value not in values:
            raise self._wrong(key, value, f"one of {', '.join(values)}")
        return value

    def number(self, key: str, most: float, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise self._wrong(key, value, "a number in range")
        return float(value)

    def count(self, key: str) -> int:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_TOKENS:
            raise self._wrong(key, value, "a whole number of at least 0")
        return value

    def time(self, key: str, default: float | None = None) -> float:
        return self.number(key, _END_OF_TIME - 1, default)

    def list(self, key: str, default: list[Any] | None = None) -> list[Any]:
        value = self.values.get(key, default)
        if not isinstance(value, list):
            raise self._wrong(key, value, "a list")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> StoreError:
        if key not in self.values:
            return StoreError(f"{self.where} has no {key!r}, {wanted}")
        return StoreError(f"{key!r} of {self.where} is {value!r:.60}, but must be {wanted}")


def to_record(message: Message) -> dict[str, Any]:
    """A message as values of JSON."""
    return {
        "id": message.id,
        "parent": message.parent,
        "role": message.role,
        "text": message.text,
        "created": message.created,
        "state": message.state,
        "opened": message.opened,
        **extras(message),
    }


def extras(message: Message) -> dict[str, Any]:
    """What most messages do not have."""
    found: dict[str, Any] = {}
    if (stats := message.stats) is not None:
        found["stats"] = {name: getattr(stats, name) for name in Stats.__slots__}
    if (window := message.window) is not None:
        found["window"] = {"first": window.first, "summary": window.summary}
    if message.attachments:
        found["attachments"] = [{"name": a.name, "text": a.text, "n_tokens": a.n_tokens} for a in message.attachments]
    return found


def to_message(record: Record) -> Message:
    """A message of its values.

    Raises:
        StoreError: one is missing or wrong.
    """
    parent = None if record.get("parent") is None else record.id("parent")
    return Message(
        id=record.id("id"),
        parent=parent,
        role=cast(Role, record.one_of("role", _ROLES)),
        text=record.text("text"),
        created=record.time("created", 0.0),
        state=cast(State, record.one_of("state", _STATES, "complete")),
        opened=record.text("opened", ""),
        stats=_stats(record),
        window=_window(record),
        attachments=tuple(
            _attachment(Record(value, f"an attachment of {record.where}")) for value in record.list("attachments", [])
        ),
    )


def _stats(record: Record) -> Stats | None:
    if record.get("stats") is None:
        return None
    values = Record(record.get("stats"), f"the stats of {record.where}")
    return Stats(
        prompt_tokens=values.count("prompt_tokens"),
        cached_tokens=values.count("cached_tokens"),
        new_tokens=values.count("new_tokens"),
        first_token_s=values.number("first_token_s", _MOST),
        rate=values.number("rate", _MOST),
        model=values.text("model", ""),
        thinking_s=None if values.get("thinking_s") is None else values.number("thinking_s", _MOST),
    )


def _window(record: Record) -> Window | None:
    if record.get("window") is None:
        return None
    values = Record(record.get("window"), f"the window of {record.where}")
    return Window(values.id("first"), values.text("summary", ""))


def _attachment(values: Record) -> Attachment:
    return Attachment(values.text("name"), values.text("text"), values.count("n_tokens"))
