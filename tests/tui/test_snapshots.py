"""How the main screens look, in both sizes and themes; see tests/helpers/snapshots.py for how to update them."""

from __future__ import annotations

import pytest
from textual.widgets import Input, TextArea

from tests.helpers import snapshots
from tests.helpers.chat_app import AppModel, Chat, chatting, setup
from tests.helpers.scenes import MODELS, conversation


async def settled(chat: Chat) -> None:
    """Waits until the screen stays as it is."""
    for screen in chat.app.screen_stack:
        for editor in [*screen.query(TextArea), *screen.query(Input)]:
            editor.cursor_blink = False
            editor._pause_blink(visible=editor.has_focus)
    seen: list[str] = []
    while len(seen) < 4 or len({*seen[-4:]}) > 1:
        await chat.pilot.pause(0.1)
        seen.append(snapshots.dump(chat.app))


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("size", [(60, 20), (80, 24), (120, 40)])
async def test_the_conversation(size: tuple[int, int], theme: str) -> None:
    async with chatting(setup(AppModel(), conversation=conversation(), theme=theme), size) as chat:
        await settled(chat)
        snapshots.check(chat.app, f"chat-{size[0]}x{size[1]}-{theme}")


@pytest.mark.parametrize(
    ("name", "keys", "awaited"),
    [
        ("selected", ("ctrl+up",), "c Continue"),
        ("models", ("ctrl+l",), "llama-3.3-70b"),
        ("sampling", ("ctrl+t",), "Temperature"),
        ("completion", ("slash", "e"), "/export"),
        ("help", ("f1",), "On a message"),
    ],
)
async def test_other_screens(name: str, keys: tuple[str, ...], awaited: str) -> None:
    built = setup(AppModel(), conversation=conversation(), list_models=lambda: MODELS)
    async with chatting(built, (100, 30)) as chat:
        for key in keys:  # what one key shows moves what is above the next one's
            await chat.press(key)
            await settled(chat)
        await chat.sees(awaited)
        await settled(chat)
        snapshots.check(chat.app, name)


async def test_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NO_COLOR there are greys alone, and what matters can be told without any."""
    monkeypatch.setenv("NO_COLOR", "1")

    async with chatting(setup(AppModel(), conversation=conversation())) as chat:
        await chat.press("ctrl+up")
        await settled(chat)
        legend = snapshots.dump(chat.app).split("\n\n")[-1]
        colours = [word for word in legend.split() if word.startswith("#")]
        assert colours
        assert all(len(set(colour[1:])) == 1 for colour in colours), legend
