"""Values of files and of the database, checked as they come in: anybody may have written them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from localllm.errors import StoreError
from localllm.tui.chat.conversation import Message

T = TypeVar("T")


def parsed(text: str | bytes) -> Any:
    """The values of a JSON text.

    Raises:
        StoreError: it is not valid.
    """
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise StoreError("it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise StoreError(f"it is not valid JSON ({error})") from None


def converted(values: object, type_: type[T], where: str) -> T:
    """Values of JSON as a class says; unknown ones are left out.

    Raises:
        StoreError: one is missing or wrong; ``where`` is the name of it all for people.
    """
    try:
        return msgspec.convert(values, type_)
    except msgspec.ValidationError as error:
        raise StoreError(f"{where} is damaged: {error}") from None


def to_message(values: object, where: str) -> Message:
    """A message of its values; see `converted`."""
    if isinstance(values, Mapping):
        values = {"parent": None, "created": 0.0, **values}
    return converted(values, Message, where)


def extras(message: Message) -> dict[str, Any]:
    """What most messages do not have, as values of JSON."""
    files = tuple(replace(file, name=storable(file.name)) for file in message.attachments)
    found = {"stats": message.stats, "window": message.window, "attachments": files, "calls": message.calls}
    values: dict[str, Any] = msgspec.to_builtins({name: value for name, value in found.items() if value})
    return values


def storable(text: str) -> str:
    """A text with lone surrogates spelled out, which UTF-8 does not have, but names of files do."""
    return text.encode("utf-8", "backslashreplace").decode()
