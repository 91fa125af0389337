"""Saves a conversation in the store while it changes, and tolerates errors of the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from localllm.errors import StoreError
from localllm.tui.chat.conversation import ChatMessage, Conversation
from localllm.tui.storage.chats import ChatDeletedError, Store

#: Seconds between two saves of a reply during its generation.
SAVE_SECONDS = 0.5


class AutoSaver:
    """Saves one conversation.

    If the store fails, the chat continues without it. The failure is reported once. Unsaved changes are retried with
    the next change.
    """

    def __init__(self, store: Store, conversation: Conversation) -> None:
        self._store = store
        self._conversation = conversation
        self._lock = threading.Lock()
        self._unsaved: dict[str, ChatMessage] = {}
        self._unset: dict[str, Any] = {}
        self._undeleted: list[str] = []
        self._warning: str | None = None
        self._failure: str | None = None
        self._is_deleted = False

    @property
    def is_saved(self) -> bool:
        """Whether the store contains the conversation with all its messages."""
        return self._conversation.is_saved and not self._is_pending

    @property
    def _is_pending(self) -> bool:
        return bool(self._unsaved or self._unset or self._undeleted) and not self._is_deleted

    def flush(self, seconds: float) -> str | None:
        """Retry unsaved changes for up to ``seconds``. Returns the reason if that fails, otherwise None."""
        end = time.monotonic() + seconds
        while self._is_pending:
            with self._lock:
                self._try()
            if self._failure is not None:
                if time.monotonic() > end:
                    return self._failure
                time.sleep(0.1)
        return None

    def save(self, *ids: str) -> None:
        """Save messages in their current state, together with all unsaved changes."""
        with self._lock:
            for id_ in ids:
                self._unsaved[id_] = self._conversation[id_]
            self._unset.pop("leaf", None)  # saving messages also saves the current leaf
            self._try()

    def set(self, **changes: Any) -> None:
        """Save properties of the conversation; see `Store.set`."""
        with self._lock:
            self._unset |= changes
            self._try()

    def delete(self, ids: Iterable[str]) -> None:
        with self._lock:
            for id_ in ids:
                self._unsaved.pop(id_, None)
                self._undeleted.append(id_)
            self._try()

    @contextmanager
    def saving(self, id_: str) -> Iterator[None]:
        """Save a message repeatedly while the block runs, in a thread: a slow disk must not delay generation."""
        stop_event = threading.Event()

        def run() -> None:
            saved = None
            while not stop_event.wait(SAVE_SECONDS):
                message = self._conversation[id_]
                if message is not saved:
                    self.save(id_)
                    saved = message

        thread = threading.Thread(target=run, name="saving", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop_event.set()
            thread.join()

    def take_warning(self) -> str | None:
        """Return the pending warning and clear it, or None."""
        warning, self._warning = self._warning, None
        return warning

    def _try(self) -> None:
        """Apply all unsaved changes, in an order that can be repeated after a failure."""
        if self._is_deleted:
            self._unsaved.clear()
            return
        try:
            if self._undeleted:
                self._store.delete_messages(self._undeleted)
                self._undeleted.clear()
            if self._unset:
                self._store.set(self._conversation.id, **self._unset)
                self._unset.clear()
            if self._unsaved:
                self._store.save(self._conversation, self._unsaved.values())
                self._unsaved.clear()
        except ChatDeletedError as error:  # never recreate a deleted chat from its unsaved part
            self._warning = f"{error}: new messages are not saved; /export writes the chat to a file"
            self._is_deleted, self._conversation.is_saved = True, False
        except StoreError as error:
            if self._failure is None:
                self._warning = f"{error}; the chat continues, but is not saved"
            self._failure = str(error)
        else:
            self._failure = None
