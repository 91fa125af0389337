"""Keys that arrive faster than the screen updates reach the intended widget and have no side effects."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from localllm.options.types import LoadProgress
from localllm.tui import app
from localllm.tui.app import ChatApp
from localllm.tui.key_buffer import KeyBuffer
from localllm.tui.screens.chats import ChatsScreen
from localllm.tui.setup import ModelEntry, Setup
from tests.helpers.chat_app import LIMIT, AppModel, Chat, chatting, keeping, press, setup, starting, talk


def texts(chat: Chat) -> list[str]:
    return [message.text for message in chat.app.session.conversation.path()]


async def test_letters_search_chats_and_are_no_commands() -> None:
    built = keeping(("first", "pears"), ("second", "dear"), ("third", "plums"), replies=["and more"])
    async with chatting(built) as chat:
        chat.hit("draft", "ctrl+o", "ear", "down", "enter", "?")
        await chat.until(lambda: texts(chat) == ["first", "pears"])
        await chat.until(lambda: chat.app._chat.composer.text == "draft?")
        chat.hit("ctrl+u", "/sessions", "enter", "dear", "enter", "go on", "enter")
        await chat.until(lambda: texts(chat) == ["second", "dear", "go on", "and more"])
        await chat.rest()
        # Destructive actions need confirmation; Esc cancels.
        chat.hit("ctrl+o", "dea", "delete", "escape", "escape", "still here")
        await chat.until(lambda: chat.app._chat.composer.text == "still here")
        assert [s.title for s in await chat.app.offload(built.store.sessions)] == ["second", "third", "first"]
        chat.app._chat.composer.empty()
        chat.app._chat.set_focus(None)  # keys also work if no widget has the focus
        chat.hit("ctrl+o")
        await chat.sees("Search titles")
        chat.hit("escape")
        await chat.until(lambda: chat.app.screen is chat.app._chat)


async def test_an_arrow_key_moves_in_pending_search_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = keeping(("first", "pears"), ("second", "dear"), ("third", "plums"))
    found = threading.Event()
    for name in ("sessions", "search"):
        when_found = getattr(built.store, name)
        monkeypatch.setattr(
            built.store, name, lambda *args, when=when_found, **options: found.wait(LIMIT) and when(*args, **options)
        )
    async with chatting(built) as chat:
        chat.hit("ctrl+o", "ear", "down", "enter")
        await chat.until(lambda: isinstance(chat.app.screen, ChatsScreen))
        await asyncio.sleep(0.1)
        found.set()
        await chat.until(lambda: texts(chat) == ["first", "pears"])


async def test_esc_waits_for_earlier_keys_of_a_blocked_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, the second key waits until the command has ended whose question the first key answered."""
    has_followed = KeyBuffer._has_followed
    stood_still = []

    def stand_still(keys: KeyBuffer) -> bool:
        if len(keys._waiting) != 2 or stood_still:
            return has_followed(keys)
        stood_still.append(time.sleep(1))
        return False

    monkeypatch.setattr(KeyBuffer, "_has_followed", stand_still)
    async with chatting(keeping(("first", "pears"))) as chat:
        chat.hit("ctrl+o", "ear", "delete", "escape", "escape", "!")
        await chat.until(lambda: chat.app._chat.composer.text == "!")
        assert stood_still


async def test_a_name_and_a_path_typed_into_dialogs_that_open(tmp_path: Path) -> None:
    async with chatting(keeping(("first", "pears"))) as chat:
        chat.hit("ctrl+o", "f2", "another", "enter", "enter", "/export", "enter")
        chat.hit("ctrl+u", f"{tmp_path}/a.json", "enter")
        await chat.until((tmp_path / "a.json").exists)
        chat.hit("/import", "enter", f"{tmp_path}/a.json", "enter")
        await chat.sees("localllm  another (copy)")


class EarlyApp(ChatApp):
    """Run an app that receives keys before it has a screen."""

    CSS_PATH = Path(app.__file__).with_name("chat.tcss")

    def __init__(self, built: Setup, *keys: str) -> None:
        super().__init__(built)
        self._keys = keys

    def on_load(self) -> None:
        press(self, *self._keys)


async def test_a_message_typed_before_the_first_screen_is_sent() -> None:
    async with starting(EarlyApp(setup(AppModel(["well"])), "hi", "enter")) as chat:
        await chat.until(lambda: texts(chat) == ["hi", "well"])
        await chat.rest()


async def test_a_chat_is_searched_before_the_first_screen() -> None:
    """While a model loads, keys still go to the dialog for which they wait."""
    built = keeping(("first", "pears"), ("second", "plums"), replies=["well"])
    async with starting(EarlyApp(built, "ctrl+o", "ear", "enter", "who?", "enter")) as chat:
        await chat.until(lambda: texts(chat) == ["first", "pears", "who?", "well"])
        await chat.rest()


async def test_a_model_is_chosen_before_the_first_screen_and_the_list() -> None:
    loaded: list[str] = []

    def load(name: str, progress: LoadProgress) -> AppModel:
        loaded.append(name)
        return AppModel([f"by {name}"])

    entries = (ModelEntry("large", "/large.gguf", 1), ModelEntry("small", "/small.gguf", 1))
    built = setup(AppModel(), load=load, list_models=lambda: entries)
    async with starting(EarlyApp(built, "ctrl+l", "small", "enter", "who?", "enter")) as chat:
        await chat.until(lambda: texts(chat) == ["who?", "by /small.gguf"])
        await chat.rest()
        chat.hit("ctrl+l", "large", "enter", "and?", "enter")
        await chat.until(lambda: texts(chat)[2:] == ["and?", "by /large.gguf"])
        assert loaded[-2:] == ["/small.gguf", "/large.gguf"]


async def test_text_typed_while_a_dialog_closes_goes_to_the_editor() -> None:
    async with chatting(setup(AppModel(), conversation=talk("a", "one", "b", "two"))) as chat:
        # Textual defers `Widget.focus` in the same way: the focus may change after the next key.
        chat.app.call_later = lambda act, *given: bool(chat.app.set_timer(0.3, partial(act, *given)))  # type: ignore[method-assign]
        chat.hit("ctrl+up", "up", "d", "down", "enter", "hello")
        await chat.until(lambda: len(chat.app.session.conversation) == 2)
        await chat.until(lambda: chat.app.keys.is_done)
        assert chat.app._chat.composer.text == "hello"
