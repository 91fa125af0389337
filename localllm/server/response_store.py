"""Stored responses of OpenAI's responses API, which later requests may continue."""

from __future__ import annotations

import base64
import contextlib
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from localllm.chat.conversation import Message
from localllm.console import warn
from localllm.files import private_folder, private_opener
from localllm.nesting import check_nesting
from localllm.server.http import HTTPError

#: Maximum bytes of responses in memory; the oldest are removed first.
_MAX_BYTES = 64 << 20
#: Lifetime of a response's file in seconds, the same as OpenAI's.
_STORED_SECONDS = 30 * 24 * 60 * 60

_ID = re.compile(r"resp_[0-9a-f]{32}")


class StoredResponse(msgspec.Struct):
    client: str  # only this client may continue the response
    conversation: list[Message]  # the messages of the chat, including the reply
    response: dict[str, Any]  # as sent to the client


class ResponseStore:
    """Stores responses in memory up to `_MAX_BYTES`, and in a folder, if one is set, for thirty days.

    Threads may share a store.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._stored: dict[str, bytes] = {}
        self._n_bytes = 0
        self._lock = threading.Lock()
        if folder is not None:
            if (warning := private_folder(folder)) is not None:
                warn(warning)
            for path in folder.glob("resp_*.json"):
                if path.stat().st_mtime < time.time() - _STORED_SECONDS:
                    path.unlink()

    def put(self, id_: str, response: StoredResponse) -> None:
        data = msgspec.json.encode(response)
        with self._lock:
            self._stored[id_] = data
            self._n_bytes += len(data)
            while self._n_bytes > _MAX_BYTES:
                self._n_bytes -= len(self._stored.pop(next(iter(self._stored))))
        if self._folder is not None:
            path = self._folder / f"{id_}.json"
            try:
                with open(path, "wb", opener=private_opener) as file:
                    file.write(data)
            except OSError as error:  # a full disk must not fail a finished reply
                print(f"localllm: a response will be lost at a restart: {error}", file=sys.stderr)

    def get(self, id_: str, client: str) -> StoredResponse:
        """Return the response with that id.

        Raises:
            HTTPError: 404; the id is unknown, its file is damaged, or the response is another client's.
        """
        data = self._stored.get(id_)
        if data is None and self._folder is not None and _ID.fullmatch(id_):
            with contextlib.suppress(OSError):
                data = (self._folder / f"{id_}.json").read_bytes()
        stored = None if data is None else _read(data)
        if stored is None or stored.client != client or stored.response.get("id") != id_:
            raise HTTPError(404, f"there is no response {id_!r:.80}: send the whole chat as input", "not_found")
        return stored

    def remove(self, id_: str, client: str) -> None:
        """Remove a response.  Raises HTTPError as `get`."""
        self.get(id_, client)
        with self._lock:
            self._n_bytes -= len(self._stored.pop(id_, b""))
        if self._folder is not None and _ID.fullmatch(id_):
            (self._folder / f"{id_}.json").unlink(missing_ok=True)


def _read(data: bytes) -> StoredResponse | None:
    """Return a stored response; None if the data are damaged."""
    try:
        check_nesting(data)
        stored = msgspec.json.decode(data, type=StoredResponse)
        stored.conversation[:] = map(_with_bytes, stored.conversation)
    except (msgspec.MsgspecError, ValueError, TypeError):
        return None
    return stored


def _with_bytes(message: Message) -> Message:
    """Return a stored message with its media decoded from base64."""
    parts = (p if isinstance(p, str) else replace(p, source=base64.b64decode(p.source)) for p in message.parts)
    return replace(message, parts=tuple(parts))
