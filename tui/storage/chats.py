"""The store of chats on disk: saves, lists, searches, renames, archives and deletes chats."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import threading
import time
import uuid
from bisect import bisect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import psutil

from localllm.agent_tools.tool import storable
from localllm.chat.thinking import split
from localllm.errors import StoreError
from localllm.files import expanded
from localllm.tui.chat import settings as chat_settings
from localllm.tui.chat.conversation import ChatMessage, Conversation, parsed, to_message
from localllm.tui.storage import schema
from localllm.tui.text import clean_title, shortened

#: Environment variable with the folder of the chats.
DATA_VARIABLE = "LOCALLLM_DATA"

_PREVIEW = 80

_SUMMARY = """
    SELECT s.id, s.title, s.updated, s.archived,
        (SELECT count(*) FROM messages WHERE session = s.id) AS n_messages,
        (SELECT role FROM messages WHERE id = s.leaf) AS role,
        (SELECT substr(text, 1, 4000) FROM messages WHERE id = s.leaf) AS text,
        (SELECT opened FROM messages WHERE id = s.leaf) AS opened
    FROM sessions s
"""


@dataclass(frozen=True, slots=True)
class ChatSummary:
    """A chat in a list. ``updated`` is in seconds since 1970; the preview is from the last message or the match."""

    id: str
    title: str
    updated: float
    archived: bool
    n_messages: int
    preview: str


def default_path() -> Path:
    """Return the path of the chats: in ``LOCALLLM_DATA``, or in the platform's folder for user data."""
    folder = os.environ.get(DATA_VARIABLE)
    if folder:
        return expanded(folder) / "chats.sqlite3"
    from platformdirs import user_data_path

    return user_data_path("localllm", appauthor=False) / "chats.sqlite3"


class ChatDeletedError(StoreError):
    """The chat to save was deleted."""


class Store:
    """The chats in one SQLite file, or in memory. Threads and processes may share the file.

    All methods raise `StoreError` if the file cannot be read or written.
    """

    def __init__(self, path: Path | None) -> None:
        """Open or create the file. If ``path`` is None, chats are stored in memory only."""
        self.path = path
        #: Identifies this store among the stores of all processes: unique id, host, process id, process start time.
        self._marks = (uuid.uuid4().hex, socket.gethostname(), os.getpid(), psutil.Process().create_time())
        self._lock = threading.RLock()
        self._connection = schema.connect(path)
        self._connection.row_factory = sqlite3.Row
        # A single invalid byte on disk must not hide all chats.
        self._connection.text_factory = lambda data: data.decode("utf-8", "replace")
        self._connection.create_function("folded", 1, str.casefold, deterministic=True)
        self._connection.create_function("content", 3, _content, deterministic=True)

    def close(self) -> None:
        with suppress(StoreError):
            self.mark_open()
        with self._lock:
            self._connection.close()

    # -- Writing ---------------------------------------------------------------------------------------------------

    def save(self, conversation: Conversation, messages: Iterable[ChatMessage]) -> None:
        """Save new and changed messages of a conversation, and its leaf.

        The conversation itself is saved with its first messages. `set` saves later changes of its properties.
        """
        leaf = None if conversation.leaf is None else conversation.leaf.id
        conversation.updated = time.time()
        c = conversation
        title, system, model = map(storable, (c.title, c.system, c.model))
        with self._writing() as execute:
            if not c.is_saved:
                execute(
                    "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (c.id, title, system, json.dumps(c.settings), model, c.created, c.updated, False, leaf),
                )
            elif not execute("UPDATE sessions SET updated=?, leaf=? WHERE id=?", (c.updated, leaf, c.id)).rowcount:
                raise ChatDeletedError("this chat was deleted")
            for m in messages:
                text = storable(m.text)
                more = json.dumps(extras(m), ensure_ascii=False).encode("utf-8", "replace").decode()
                execute(
                    "INSERT INTO messages (id, session, parent, role, text, created, state, opened, extras)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET text = excluded.text,"
                    " state = excluded.state, opened = excluded.opened, extras = excluded.extras",
                    (m.id, c.id, m.parent, m.role, text, m.created, m.state, m.opened, more),
                )
        c.is_saved = True

    def set(self, id_: str, **changes: str | bool | dict[str, Any] | None) -> None:
        """Change title, system, settings, model, archived or leaf of a conversation, if it was saved before."""
        with self._writing() as execute:
            for name, value in changes.items():
                if name not in ("title", "system", "settings", "model", "archived", "leaf"):
                    raise TypeError(f"a conversation has no {name!r} that can be set")
                stored = json.dumps(value) if isinstance(value, dict) else value
                stored = storable(stored) if isinstance(stored, str) else stored
                execute(f"UPDATE sessions SET {name} = ? WHERE id = ?", (stored, id_))

    def rename(self, id_: str, title: str) -> str:
        """Rename a conversation. Returns the saved title, which is one line."""
        title = clean_title(title)
        self.set(id_, title=title)
        return title

    def delete(self, id_: str) -> None:
        with self._writing() as execute:
            execute("DELETE FROM messages WHERE session = ?", (id_,))
            execute("DELETE FROM sessions WHERE id = ?", (id_,))

    def delete_messages(self, ids: Iterable[str]) -> None:
        with self._writing() as execute:
            for id_ in ids:
                execute("DELETE FROM messages WHERE id = ?", (id_,))

    # -- Other terminals -------------------------------------------------------------------------------------------

    def mark_open(self, *ids: str) -> None:
        """Record the conversations that are open here, and only these. Removes terminals whose process has ended."""
        store_id, here, *process = self._marks
        with self._writing() as execute:
            for id_, host, pid, began in execute("SELECT id, host, pid, began FROM terminals").fetchall():
                if id_.startswith(store_id) or (host == here and not _is_alive(pid, began)):
                    execute("DELETE FROM terminals WHERE id = ?", (id_,))
            for chat in set(ids):
                values = (f"{store_id} {chat}", here, *process, chat)
                execute("INSERT INTO terminals (id, host, pid, began, session) VALUES (?, ?, ?, ?, ?)", values)

    def others_with_open(self, id_: str) -> list[str]:
        """Return the other terminals that have opened a conversation, such as "process 123"."""
        store_id, here, *_ = self._marks
        with self._reading():
            rows = self._connection.execute(
                "SELECT host, pid, began FROM terminals WHERE session = ? AND substr(id, 1, 32) != ?", (id_, store_id)
            ).fetchall()
        return [
            f"process {pid}" if host == here else f"process {pid} on {host}"
            for host, pid, began in rows
            # A process on another machine cannot be checked. Assume that it is alive.
            if host != here or _is_alive(pid, began)
        ]

    # -- Reading ---------------------------------------------------------------------------------------------------

    def load(self, id_: str) -> Conversation:
        """Load a conversation. An unfinished reply gets the state "killed", because its program has ended.

        If another terminal has opened the conversation, it may still be writing that reply, so the reply is omitted.
        """
        with self._reading():
            row = self._connection.execute("SELECT * FROM sessions WHERE id = ?", (id_,)).fetchone()
            rows = self._connection.execute(
                "SELECT * FROM messages WHERE session = ? ORDER BY seq", (id_,)
            ).fetchall()
        if row is None:
            raise _no_chat(id_)
        if any(values["state"] == "streaming" for values in rows) and self.others_with_open(id_):
            rows = [values for values in rows if values["state"] != "streaming"]
        messages = [_message(values) for values in rows]
        settings = parsed(row["settings"])
        conversation = Conversation(
            id=row["id"],
            title=row["title"],
            system=row["system"],
            settings=chat_settings.sound(settings if isinstance(settings, dict) else {}),
            model=row["model"],
            created=_time(row["created"]),
            updated=_time(row["updated"]),
            is_saved=True,
        )
        conversation.restore([m for m in messages if m.text or m.state != "killed"], row["leaf"])
        return conversation

    def find(self, beginning: str) -> str:
        """Return the id that starts with ``beginning``. Raises StoreError if no id or several ids match."""
        with self._reading():
            rows = self._connection.execute(
                "SELECT id FROM sessions WHERE substr(id, 1, length(?1)) = ?1 ORDER BY id = ?1 DESC LIMIT 2",
                (beginning,),
            ).fetchall()
        if not beginning or not rows:
            raise _no_chat(beginning)
        if len(rows) > 1 and rows[0]["id"] != beginning:
            raise StoreError(f"there are several chats whose id starts with {beginning!r}: give more characters")
        return str(rows[0]["id"])

    def sessions(self, *, archived: bool = False, limit: int = -1) -> list[ChatSummary]:
        """Return the archived or the other conversations, most recently updated first."""
        return self._summaries("WHERE archived = ? ORDER BY updated DESC, s.rowid DESC LIMIT ?", (archived, limit))

    def search(self, text: str, *, limit: int = 100) -> list[ChatSummary]:
        """Return conversations whose title or one of whose messages contains all words of ``text``.

        Case is ignored, and a word may be part of a longer word. Archived conversations are included.
        """
        words = text.casefold().split()
        if not words:
            return []
        titled = self._summaries("WHERE " + " AND ".join(["folded(title) GLOB ?"] * len(words)), _patterns(words))
        summaries = {summary.id: summary for summary in titled}
        condition = " AND ".join(["folded(content(role, text, opened)) GLOB ?"] * len(words))
        with self._reading():  # per conversation, the newest message with all words
            rows = self._connection.execute(
                "SELECT session, content(role, text, opened), max(seq) FROM messages"
                f" WHERE {condition} AND session IN (SELECT id FROM sessions) GROUP BY session",
                _patterns(words),
            ).fetchall()
        for session, content, _ in rows:
            summary = summaries.get(session) or self._summaries("WHERE s.id = ?", (session,))[0]
            summaries[session] = replace(summary, preview=_excerpt(content, words[0]))
        return sorted(summaries.values(), key=lambda summary: summary.updated, reverse=True)[:limit]

    def _summaries(self, condition: str, values: Iterable[Any]) -> list[ChatSummary]:
        with self._reading():
            rows = self._connection.execute(_SUMMARY + condition, tuple(values)).fetchall()
        return [
            ChatSummary(id_, title, _time(updated), bool(archived), n_messages, _preview(*last))
            for id_, title, updated, archived, n_messages, *last in rows
        ]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock, schema.in_words(self.path):
            yield

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        """Run a transaction. Yields the function that executes its statements."""
        with self._reading(), schema.transaction(self._connection):
            yield self._connection.execute


def _no_chat(id_: str) -> StoreError:
    return StoreError(f"there is no chat {id_!r}: localllm chat --list lists them, and in a chat /sessions does")


def _time(value: object) -> float:
    """Return a time from the file, or 1970 if it is not a valid time."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 253_402_300_799 else 0.0


def _message(row: sqlite3.Row) -> ChatMessage:
    label = f"message {row['seq']} of the saved chats"
    try:
        more = parsed(row["extras"])
    except StoreError as error:
        raise StoreError(f"{label} is damaged: {error}") from None
    values = more if isinstance(more, dict) else {}
    values |= {key: row[key] for key in ("id", "parent", "role", "text", "state", "opened")}
    message = to_message({**values, "created": _time(row["created"])}, label)
    return replace(message, state="killed") if message.state == "streaming" else message


def _content(role: str, text: str, opened: str) -> str:
    return split(text, opened)[1] if role == "assistant" else text


def _patterns(words: Iterable[str]) -> list[str]:
    """Return GLOB patterns that match the words literally."""
    return ["*" + "".join(f"[{c}]" if c in "*?[" else c for c in word) + "*" for word in words]


def _preview(role: str | None, text: str | None, opened: str | None) -> str:
    thinking, content = split(text or "", opened or "") if role == "assistant" else ("", text or "")
    return shortened(content or thinking, _PREVIEW)


def _excerpt(text: str, word: str) -> str:
    match = text.casefold().find(word)
    # Number of letters before the word. Case folding can expand one letter to two, such as "ß".
    n_before = bisect(list(accumulate(len(letter.casefold()) for letter in text[:match])), match)
    start = max(0, n_before - _PREVIEW // 4)
    return ("…" if start else "") + shortened(text[start : start + 4 * _PREVIEW], _PREVIEW)


#: Tolerance in seconds for the start time of a process, which may shift when the clock is set.
_TOLERANCE_SECONDS = 5.0


def _is_alive(pid: int, began: float) -> bool:
    try:
        process = psutil.Process(pid)
        is_same = abs(process.create_time() - began) <= _TOLERANCE_SECONDS
        return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, OSError, ValueError, TypeError, OverflowError):
        return False


def extras(message: ChatMessage) -> dict[str, Any]:
    fields = {name: getattr(message, name) for name in ("stats", "window", "attachments", "calls")}
    values: dict[str, Any] = msgspec.to_builtins({name: value for name, value in fields.items() if value})
    return values
