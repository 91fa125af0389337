"""What people type, or programs pipe in: messages of a line, or of several.

A backslash at the end of a line goes on with the next one; three quotation marks begin and end a block.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from functools import partial
from pathlib import Path

from localllm.cli.terminal import is_terminal, say
from localllm.errors import UsageError
from localllm.tui.control import shown

BLOCK = '"""'

#: A message of more bytes than this fits into no context.
_MOST_BYTES = 64 << 20
_MOST_HISTORY = 1000


class Lines:
    """Standard input.

    Attributes:
        interactive: whether somebody types.
    """

    def __init__(self, history: Path | None = None) -> None:
        """Begin to read.

        Args:
            history: the file that keeps what was typed on terminals, where Python has readline; None keeps nothing.
        """
        self.interactive = is_terminal(sys.stdin)
        self._history = history
        self._edits = self.interactive and is_terminal(sys.stdout) and _load_history(history)

    def read(self) -> str | None:
        """The next message; None where the input ends.

        Raises:
            UsageError: it is not valid UTF-8, or too long.
        """
        line = self._line("> ")
        if line is None:
            return None
        if line.lstrip().startswith(BLOCK):
            text = self._block(line.lstrip().removeprefix(BLOCK))
        else:
            text = self._continued(line)
        if self._edits:
            self._save_history()
        return text

    def edit(self, text: str) -> str | None:
        """A text that somebody changes: in its line, where that can be done; None where the input ends."""
        if self._edits and "\n" not in text and text.isprintable():
            return self._changed(text)
        say(f"{shown(text)}\n(type all of the new text; an empty line leaves it as it is)")
        return self.read()

    def _changed(self, text: str) -> str | None:
        import readline

        readline.set_startup_hook(partial(readline.insert_text, text))
        try:
            return self._line("edit> ")
        finally:
            readline.set_startup_hook()

    def _continued(self, line: str) -> str:
        parts = []
        while line.endswith("\\"):
            parts.append(line[:-1])
            more = self._line(". ")
            if more is None:
                return "\n".join(parts)
            line = more
        return "\n".join([*parts, line])

    def _block(self, line: str) -> str:
        parts = []
        while not line.rstrip().endswith(BLOCK):
            parts.append(line)
            more = self._line(". ")
            if more is None:
                return "\n".join(parts).strip("\n")
            line = more
        return "\n".join([*parts, line.rstrip().removesuffix(BLOCK)]).strip("\n")

    def _line(self, prompt: str) -> str | None:
        if self._edits:
            try:
                return _valid(input(prompt))
            except EOFError:
                print(flush=True)
                return None
        if self.interactive:
            print(prompt, end="", file=sys.stderr, flush=True)
        if sys.stdin is None or sys.stdin.closed:
            return None
        data = sys.stdin.buffer.readline(_MOST_BYTES)
        if len(data) == _MOST_BYTES:
            raise UsageError(f"a line has more than {_MOST_BYTES >> 20} MiB, the most a message may have: shorten it")
        if not data:
            return None
        try:
            return data.removeprefix(codecs.BOM_UTF8).decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise UsageError("standard input is not valid UTF-8: convert it to UTF-8") from None

    def _save_history(self) -> None:
        if self._history is not None:
            import readline

            with contextlib.suppress(OSError):
                readline.write_history_file(self._history)
                os.chmod(self._history, 0o600)


def _load_history(history: Path | None) -> bool:
    """Makes ``input`` edit lines and remember them; returns whether it can."""
    try:
        import readline
    except ImportError:  # Windows
        return False
    readline.set_history_length(_MOST_HISTORY)
    if history is not None:
        with contextlib.suppress(OSError):
            readline.read_history_file(history)
    return True


def _valid(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("what was typed is not valid UTF-8: check the terminal's character set") from None
    return text
