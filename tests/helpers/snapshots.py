"""The app's screen as text with styles, compared with a stored snapshot.

A snapshot has the characters, and below them a letter for the style of each.  Colours have four bits per channel, so
that a new version of Textual may round them differently.

``LOCALLLM_SNAPSHOTS=update`` writes the current screens instead of comparing them; review the difference in git.
"""

from __future__ import annotations

import os
from itertools import groupby
from pathlib import Path
from string import ascii_letters
from typing import Any

from rich.color import Color, ColorSystem
from rich.style import Style
from textual.app import App

FOLDER = Path(__file__).parent.parent / "tui" / "snapshots"


#: Whether to write snapshots instead of comparing.
UPDATES = os.environ.get("LOCALLLM_SNAPSHOTS") == "update"


def read(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def update(app: App[Any], name: str) -> None:
    (FOLDER / f"{name}.txt").write_text(dump(app), encoding="utf-8")


def dump(app: App[Any]) -> str:
    """Return the screen: its characters, the style letter of each, and a legend."""
    letters: dict[str, str] = {}
    text: list[str] = []
    styles: list[str] = []
    for strip in app.screen._compositor.render_strips():
        text.append(strip.text.rstrip())
        row = [(_style(segment.style), segment.cell_length) for segment in strip]
        styles.append(
            "".join(
                letters.setdefault(style, ascii_letters[len(letters)]) * sum(n for _, n in group)
                for style, group in groupby(row, key=lambda each: each[0])
            )
        )
    legend = [f"{letter} {style}" for style, letter in letters.items()]
    return "\n".join([*text, "", *styles, "", *legend]) + "\n"


def _style(style: Style | None) -> str:
    if style is None:
        return "plain"
    names = [name for name in ("bold", "dim", "italic", "underline", "reverse", "strike") if getattr(style, name)]
    return " ".join([_colour(style.color), "on", _colour(style.bgcolor), *names])


def _colour(colour: Color | None) -> str:
    if colour is None or colour.system is not ColorSystem.TRUECOLOR or colour.triplet is None:
        return "default" if colour is None else colour.name
    return "#" + "".join(f"{(channel + 8) * 15 // 263:x}" for channel in colour.triplet)
