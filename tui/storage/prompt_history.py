"""The history of prompts for the arrow keys, stored on disk as one JSON string per line."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import msgspec

from localllm.files import private_opener

#: Maximum number of entries.
MAX_ENTRIES = 500
#: Maximum length of an entry. Longer texts are usually pasted and not worth recalling.
MAX_CHARACTERS = 20_000


class PromptHistory:
    """Typed messages, oldest first, and the current position among them.

    `load` and `save` access the file and may be slow; call the other methods on the drawing thread. File errors are
    ignored, because the history is not important enough to report them.
    """

    def __init__(self, path: Path | None) -> None:
        """If ``path`` is None, the history is not saved."""
        self.path = path
        self._entries: list[str] = []
        self._place: int | None = None
        self._draft = ""

    def load(self) -> list[str]:
        """Return the prompts of the file, for `restore`."""
        if self.path is None:
            return []
        try:
            data = self.path.read_bytes()
        except OSError:
            return []
        entries = []
        lines = data.decode("utf-8", "replace").splitlines()
        for line in lines[-MAX_ENTRIES:]:
            with contextlib.suppress(msgspec.DecodeError):
                entries.append(msgspec.json.decode(line, type=str))
        if len(lines) > 2 * MAX_ENTRIES:
            _rewrite(self.path, entries, len(data))
        return entries

    def restore(self, entries: list[str]) -> None:
        """Insert the loaded entries before the entries that were typed since."""
        self._entries = entries + self._entries

    def save(self, text: str) -> None:
        if self.path is None or len(text) > MAX_CHARACTERS:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(self.path, "ab", opener=private_opener) as file:
                file.write(json.dumps(text).encode() + b"\n")

    def add(self, text: str) -> bool:
        """Add an entry and leave the history. Returns whether the text must be saved."""
        self._place = None
        if not text.strip() or len(text) > MAX_CHARACTERS or self._entries[-1:] == [text]:
            return False
        self._entries.append(text)
        return True

    def older(self, current: str) -> str | None:
        """Return the previous entry that differs from ``current``, the text in the editor, or None."""
        if self._place is None:
            self._draft = current
        index = (len(self._entries) if self._place is None else self._place) - 1
        while index >= 0 and self._entries[index] == current:
            index -= 1
        if index < 0:
            return None
        self._place = index
        return self._entries[index]

    def newer(self) -> str | None:
        """Return the next entry, or the draft after the last entry. None if no entry is shown."""
        if self._place is None:
            return None
        self._place += 1
        if self._place < len(self._entries):
            return self._entries[self._place]
        self._place = None
        return self._draft


def _rewrite(path: Path, entries: list[str], size: int) -> None:
    """Shorten the file, unless another terminal has just added to it."""
    aside = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        with open(aside, "wb", opener=private_opener) as file:
            file.write(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))
        if path.stat().st_size == size:
            aside.replace(path)
