"""Appearance of the main screens in all sizes and both themes; tests/helpers/snapshots.py explains updates."""

from __future__ import annotations

import sys

import pytest
from textual.widgets import Input, TextArea

from tests.helpers import snapshots
from tests.helpers.chat_app import AppModel, Chat, chatting, setup
from tests.helpers.scenes import MODELS, conversation


def model() -> AppModel:
    """The model that wrote the scene's replies: its counters are in the status line."""
    made = AppModel()
    made.name = "Qwen2.5 1.5B"
    return made


async def looks_like(chat: Chat, name: str) -> None:
    """Wait until the screen equals a snapshot."""
    for screen in chat.app.screen_stack:
        for editor in [*screen.query(TextArea), *screen.query(Input)]:
            editor.cursor_blink = False
            editor._pause_blink(visible=editor.has_focus)
    if snapshots.UPDATES:
        await chat.pilot.pause(2.0)
        snapshots.update(chat.app, name)
    await chat.until(lambda: snapshots.dump(chat.app) == snapshots.read(name), f"what {name}.txt shows")


@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 40)])
@pytest.mark.skipif(sys.platform == "darwin", reason="shows another key there")
async def test_the_conversation(size: tuple[int, int]) -> None:
    async with chatting(setup(model(), conversation=conversation()), size) as chat:
        for theme in ("dark", "light"):
            chat.app.theme = theme
            await looks_like(chat, f"chat-{size[0]}x{size[1]}-{theme}")


@pytest.mark.skipif(sys.platform == "darwin", reason="shows another key there")
async def test_other_screens() -> None:
    built = setup(model(), conversation=conversation(), list_models=lambda: MODELS)
    async with chatting(built, (100, 30)) as chat:
        for name, key, awaited in (
            ("selected", "ctrl+up", "c Continue"),
            ("models", "ctrl+l", "llama-3.3-70b"),
            ("sampling", "ctrl+t", "Temperature"),
            ("help", "f1", "On a message"),
        ):
            await chat.press(key)
            await chat.sees(awaited)
            await looks_like(chat, name)
            await chat.press("escape")
        await chat.press("slash")
        await chat.sees("/help")  # each key's output moves the text above the next one's
        await chat.press("e")
        await chat.sees("/export")
        await looks_like(chat, "completion")


async def test_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NO_COLOR the screen uses only greys, and remains readable without colours."""
    monkeypatch.setenv("NO_COLOR", "1")
    async with chatting(setup(model(), conversation=conversation())) as chat:
        await chat.press("ctrl+up")
        await chat.sees("c Continue")
        legend = snapshots.dump(chat.app).split("\n\n")[-1]
        colours = [word for word in legend.split() if word.startswith("#")]
        assert colours
        assert all(len(set(colour[1:])) == 1 for colour in colours), legend
