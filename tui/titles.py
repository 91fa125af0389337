"""Titles of chats, and other texts in one line."""

from __future__ import annotations

from localllm.cli.terminal import visible_line

_MOST_OF_A_TITLE = 200
_AUTOMATIC_TITLE = 50


def shortened(text: str, length: int) -> str:
    """``text`` in one line, cut between words if it is longer than ``length``."""
    line = visible_line(" ".join(text.split()))
    if len(line) <= length:
        return line
    cut = line[:length].rsplit(" ", 1)[0] if " " in line[length // 2 : length] else line[: length - 1]
    return cut.rstrip(" ,.;:") + "…"


def clean_title(title: str) -> str:
    """A title in one line, without control characters, and of bounded length."""
    return shortened(title, _MOST_OF_A_TITLE)


def automatic_title(text: str) -> str:
    """A title for a conversation that begins with ``text``: its first line, without marks of Markdown, cut short."""
    line = next((line.strip("#>*-`~ \t") for line in text.splitlines() if line.strip("#>*-`~ \t")), "")
    return shortened(line, _AUTOMATIC_TITLE)
