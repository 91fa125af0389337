"""The chat's own colours, dark and light; Textual's other themes can be chosen too."""

from __future__ import annotations

from textual.theme import Theme

DARK = Theme(
    name="dark",
    primary="#7aa2f7",
    secondary="#9d7cd8",
    accent="#e0af68",
    warning="#e0af68",
    error="#f7768e",
    success="#9ece6a",
    foreground="#d5d9e8",
    background="#16161e",
    surface="#1d1e29",
    panel="#262837",
    dark=True,
)

LIGHT = Theme(
    name="light",
    primary="#2e5aac",
    secondary="#7847bd",
    accent="#96631a",
    warning="#96631a",
    error="#b3304f",
    success="#40731b",
    foreground="#24283b",
    background="#fafafa",
    surface="#f0f1f5",
    panel="#e3e5ec",
    dark=False,
)

THEMES = (DARK, LIGHT)
