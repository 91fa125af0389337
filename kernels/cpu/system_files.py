"""Small files in which the system tells of itself, such as Linux's ``/proc`` and ``/sys``."""

from __future__ import annotations

from pathlib import Path


def text_of(path: Path) -> str:
    """A small file's text; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
