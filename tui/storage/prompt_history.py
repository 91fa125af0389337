"""The history of prompts, to be called up again with the arrow keys: kept on disk, a line of JSON each."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import msgspec

from localllm.files import private_opener

#: Entries that are kept.
MAX_ENTRIES = 500
#: Longer texts are not kept: nobody looks for a pasted book here.
MAX_CHARACTERS = 20_000


class PromptHistory:
    """Messages that were typed, oldest first, and a place among them.

    Files are read and written by `load` and `save`, which may take their time; the rest is for the thread
    that draws.  A file that cannot be read or written is done without: nothing here is worth an error.
    """

    def __init__(self, path: Path | None) -> None:
        """Without a ``path`` it is gone with the process."""
        self.path = path
        self._entries: list[str] = []
        self._place: int | None = None
        self._draft = ""

    def load(self) -> list[str]:
        """The file's prompts, for `restore`."""
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
        """Puts what `load` gave before what was typed since."""
        self._entries = entries + self._entries

    def save(self, text: str) -> None:
        if self.path is None or len(text) > MAX_CHARACTERS:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(self.path, "ab", opener=private_opener) as file:
                file.write(json.dumps(text).encode() + b"\n")

    def add(self, text: str) -> bool:
        """Remembers a text, and leaves the past; returns whether it is to be saved."""
        self._place = None
        if not text.strip() or len(text) > MAX_CHARACTERS or self._entries[-1:] == [text]:
            return False
        self._entries.append(text)
        return True

    def older(self, current: str) -> str | None:
        """The entry before, when ``current`` is in the editor; None if there is none."""
        if self._place is None:
            self._draft = current
        place = (len(self._entries) if self._place is None else self._place) - 1
        while place >= 0 and self._entries[place] == current:
            place -= 1
        if place < 0:
            return None
        self._place = place
        return self._entries[place]

    def newer(self) -> str | None:
        """The entry after, at the end what was in the editor first; None while no entry is."""
        if self._place is None:
            return None
        self._place += 1
        if self._place < len(self._entries):
            return self._entries[self._place]
        self._place = None
        return self._draft


def _rewrite(path: Path, entries: list[str], size: int) -> None:
    """Makes a file shorter, unless another terminal has just added to it."""
    aside = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        with open(aside, "wb", opener=private_opener) as file:
            file.write(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))
        if path.stat().st_size == size:
            aside.replace(path)
