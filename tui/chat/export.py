"""Conversations as files: Markdown for reading, and JSON for export and import.

Markdown contains the current path. JSON contains all branches. Imported JSON is untrusted and is checked.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import msgspec

from localllm.errors import StoreError, UsageError
from localllm.regular_file import open_regular
from localllm.tui.chat import settings as chat_settings
from localllm.tui.chat.attachments import fenced
from localllm.tui.chat.conversation import (
    Attachment,
    ChatMessage,
    Conversation,
    Id,
    Time,
    converted,
    new_id,
    parsed,
    short_id,
    to_message,
)
from localllm.tui.storage.chats import Store
from localllm.tui.text import clean_title, escape_controls

FORMAT, VERSION = "localllm-chat", 1

_MAX_BYTES = 256 << 20


def to_markdown(conversation: Conversation) -> str:
    """Return the path from the first message to the leaf as Markdown."""
    c = conversation
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(c.created))
    blocks = [f"# {c.title or 'Chat'}", f"*{date}{f' · {c.model}' if c.model else ''}*"]
    if c.system:
        blocks += ["## System", c.system]
    for message in c.path():
        blocks.append("## User" if message.role == "user" else "## Assistant")
        if message.window is not None and message.window.summary:
            blocks.append(f"> *Summary that replaces the earlier messages for the model:* {message.window.summary}")
        if message.thinking.strip():
            blocks.append(f"<details><summary>Thinking</summary>\n\n{message.thinking.strip()}\n\n</details>")
        blocks.append(message.content)
        blocks += map(_attached, message.attachments)
        for call in message.calls:
            blocks += [f"Tool `{call.name}`:", fenced(call.change or call.arguments), fenced(call.result or "")]
            blocks += [f"![]({_data_url(image)})" for image in call.images]
        if message.is_cut:
            blocks.append("*(cut off)*")
    return escape_controls("\n\n".join(blocks) + "\n")


def _attached(file: Attachment) -> str:
    if not file.picture:
        return f"File `{file.name}`:\n\n{fenced(file.text)}"
    name = re.sub(r"[\[\]\n]", "", file.name)
    return f"{'' if file.is_sound else '!'}[{name}]({_data_url(file.picture)})"


def _data_url(file: bytes) -> str:
    return f"data:;base64,{base64.b64encode(file).decode()}"


def _portable(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in chat_settings.LOCAL}


def to_json(conversation: Conversation) -> str:
    c = conversation
    values = {
        "format": FORMAT,
        "version": VERSION,
        "title": c.title,
        "system": c.system,
        "settings": _portable(c.settings),
        "model": c.model,
        "created": c.created,
        "updated": c.updated,
        "leaf": None if c.leaf is None else c.leaf.id,
        "messages": [msgspec.to_builtins(message) for message in c.messages],
    }
    return json.dumps(values, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


class Function(msgspec.Struct):
    """The function of a tool. Its description and parameters are not checked."""

    name: str


class ExportedTool(msgspec.Struct):
    """A tool in OpenAI's format."""

    function: Function


class Exported(msgspec.Struct):
    """The fields of an exported chat. `to_message` checks its messages separately.

    The web page checks imported chats against the same schema, `localllm/server/page/chat_schema.js`.
    """

    messages: list[Any]
    leaf: Id | None = None
    title: str = ""
    system: str = ""
    settings: dict[str, Any] | None = None
    tools: list[ExportedTool] | None = None  # only in chats of the web page; ignored here
    model: str = ""
    created: Time = msgspec.field(default_factory=time.time)
    updated: Time = msgspec.field(default_factory=time.time)


def from_json(text: str | bytes) -> Conversation:
    """Return an exported conversation with new ids. Raises StoreError if a value is invalid."""
    values = parsed(text)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise StoreError(f"it is not a chat exported by localllm: 'format' is not {FORMAT!r}")
    if values.get("version") != VERSION:
        raise StoreError(f"it has version {values.get('version')!r:.60}, this localllm supports {VERSION}: update")
    exported = converted(values, Exported, "it")
    messages, ids = _messages(exported.messages)
    if exported.leaf is not None and exported.leaf not in ids:
        raise StoreError("its 'leaf' is not one of its messages")
    try:
        chat_settings.check(exported.settings or {})
    except UsageError as error:
        raise StoreError(f"its settings are wrong: {error}") from None
    conversation = Conversation(
        id=short_id(),
        title=clean_title(exported.title),
        system=exported.system,
        settings=_portable(exported.settings or {}),
        model=exported.model,
        created=exported.created,
        updated=exported.updated,
    )
    conversation.restore(messages, None if exported.leaf is None else ids[exported.leaf])
    return conversation


def _messages(values: list[object]) -> tuple[list[ChatMessage], dict[str, str]]:
    """Return the messages with new ids, and the new ids by old id."""
    ids: dict[str, str] = {}
    messages: list[ChatMessage] = []
    for number, value in enumerate(values):
        label = f"message {number}"
        message = to_message(value, label)
        if message.id in ids:
            raise StoreError(f"{label} has the id of an earlier message")
        if message.parent is not None and message.parent not in ids:
            raise StoreError(f"the 'parent' of {label} is not an earlier message")
        ids[message.id] = new_id()
        if message.window is not None and message.window.first not in ids:
            raise StoreError(f"the window of {label} does not start at an earlier message")
        messages.append(replace(message, state="killed" if message.state == "streaming" else message.state))
    return [_with_new_id(message, ids) for message in messages], ids


def _with_new_id(message: ChatMessage, ids: Mapping[str, str]) -> ChatMessage:
    """Replace the ids in a message. A window whose first message is missing starts at this message."""
    return replace(
        message,
        id=ids[message.id],
        parent=None if message.parent is None else ids[message.parent],
        window=message.window and replace(message.window, first=ids.get(message.window.first, ids[message.id])),
    )


def write_export(conversation: Conversation, path: Path) -> None:
    """Write a new file, in the format given by its suffix. Raises UsageError if it exists or cannot be written."""
    text = to_json(conversation) if path.suffix.lower() == ".json" else to_markdown(conversation)
    # File names that are not UTF-8 contain lone surrogates, which cannot be encoded.
    data = text.encode("utf-8", "replace")
    try:
        file = path.open("xb")
        try:
            with file:
                file.write(data)
        except BaseException:  # an incomplete file would block the next try
            path.unlink(missing_ok=True)
            raise
    except FileExistsError:
        raise UsageError(f"{path} already exists: choose another name") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be written ({_reason(error)}): choose another place") from None


def read_export(path: Path) -> Conversation:
    """Read a conversation from a JSON file. Raises StoreError if it is invalid, UsageError if it is unreadable."""
    try:
        with open_regular(path) as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({_reason(error)}): check the path") from None
    if len(data) > _MAX_BYTES:
        raise StoreError(f"{path} cannot be imported: it has more than {_MAX_BYTES >> 20} MiB")
    try:
        return from_json(data)
    except StoreError as error:
        raise StoreError(f"{path} cannot be imported: {error}") from None


def import_chat(store: Store, path: Path) -> Conversation:
    """Save the conversation of a file under a new title. Raises StoreError or UsageError; see `read_export`."""
    conversation = read_export(path)
    titles = {chat.title for archived in (False, True) for chat in store.sessions(archived=archived)}
    title = conversation.title or path.stem
    names = chain([title, f"{title} (copy)"], (f"{title} (copy {number})" for number in count(2)))
    conversation.title = next(name for name in names if name not in titles)
    store.save(conversation, conversation.messages)
    return conversation


def export_all(store: Store, folder: Path) -> int:
    """Write all chats into a folder as ID.json. Returns their number. Raises StoreError or UsageError on failure."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be created ({_reason(error)}): choose another place") from None
    chats = [chat for archived in (False, True) for chat in store.sessions(archived=archived)]
    for chat in chats:
        write_export(store.load(chat.id), folder / f"{chat.id}.json")
    return len(chats)


def import_all(store: Store, folder: Path) -> int:
    """Save all chats of a folder's .json files, or none if a file is invalid. Returns their number.

    Raises the errors of `import_chat`.
    """
    paths = sorted(folder.glob("*.json"))
    for path in paths:
        read_export(path)
    for path in paths:
        import_chat(store, path)
    return len(paths)


def copied_path(conversation: Conversation, to: str | None = None) -> Conversation:
    """Return a new conversation with the messages up to ``to``, which defaults to the leaf."""
    path = conversation.path(to)
    ids = {message.id: new_id() for message in path}
    c = conversation
    title = f"{c.title or 'Chat'} (fork)"
    copy = Conversation(title=title, system=c.system, settings=dict(c.settings), model=c.model)
    copy.restore([_with_new_id(message, ids) for message in path], None)
    return copy


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
