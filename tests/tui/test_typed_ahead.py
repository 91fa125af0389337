"""Keys that come faster than the screen follows go where somebody meant them, and do no harm on the way."""

from __future__ import annotations

from pathlib import Path

from textual.events import Key

from localllm.progress import LoadProgress
from localllm.tui import app
from localllm.tui.app import ChatApp
from localllm.tui.setup import ModelEntry
from tests.helpers.chat_app import AppModel, AppStore, Chat, chatting, setup


def texts(chat: Chat) -> list[str]:
    return [message.text for message in chat.app._chat.session.conversation.path()]


async def three_chats(chat: Chat) -> None:
    for text in ("first", "second", "third"):
        if text != "first":
            await chat.press("ctrl+n")
            await chat.rest()
        await chat.ask(text)


async def test_letters_search_chats_and_are_no_commands() -> None:
    store = AppStore(None)
    async with chatting(setup(AppModel(["pears", "dear", "plums", "and more"]), store)) as chat:
        await three_chats(chat)
        chat.hit("draft", "ctrl+o", "ear", "down", "enter", "?")
        await chat.until(lambda: texts(chat) == ["first", "pears"])
        await chat.until(lambda: chat.app._chat.composer.text == "draft?")
        chat.hit("ctrl+u", "/sessions", "enter", "dear", "enter", "go on", "enter")
        await chat.until(lambda: texts(chat) == ["second", "dear", "go on", "and more"])
        await chat.rest()
        # What could be done by mistake to a chat asks first; Esc leaves it.
        chat.hit("ctrl+o", "dea", "delete", "escape", "escape", "still here")
        await chat.until(lambda: chat.app._chat.composer.text == "still here")
        assert [s.title for s in await chat.app.offload(store.sessions)] == ["second", "third", "first"]


async def test_a_name_and_a_path_typed_into_dialogs_that_open(tmp_path: Path) -> None:
    async with chatting(setup(AppModel(["pears"]), AppStore(None))) as chat:
        await chat.ask("first")
        chat.hit("ctrl+o", "f2", "another", "enter", "f4", "ctrl+u", f"{tmp_path}/a.json", "enter")
        await chat.until((tmp_path / "a.json").exists)
        chat.hit("f5", f"{tmp_path}/a.json", "enter", "up", "enter")
        await chat.until(lambda: chat.app.screen is chat.app._chat)
        await chat.sees("localllm  another")


async def test_a_model_is_chosen_before_the_list_is_there() -> None:
    loaded: list[str] = []

    def load(name: str, progress: LoadProgress) -> AppModel:
        loaded.append(name)
        return AppModel(["by the small one"])

    entries = (ModelEntry("large", "/large.gguf", 1), ModelEntry("small", "/small.gguf", 1))
    async with chatting(setup(AppModel(), load=load, list_models=lambda: entries)) as chat:
        chat.hit("ctrl+l", "small", "enter", "who?", "enter")
        await chat.until(lambda: texts(chat) == ["who?", "by the small one"])
        assert loaded == ["", "/small.gguf"]


class EarlyApp(ChatApp):
    """An app to which somebody types before it has a screen."""

    CSS_PATH = Path(app.__file__).with_name("chat.tcss")

    def on_load(self) -> None:
        self.post_message(Key("h", "h"))
        self.post_message(Key("i", "i"))
        self.post_message(Key("enter", None))


async def test_what_is_typed_before_the_first_screen_is_kept() -> None:
    early = EarlyApp(setup(AppModel(["well"])))
    async with early.run_test() as pilot:
        chat = Chat(early, pilot)
        await chat.until(lambda: texts(chat) == ["hi", "well"])
        await chat.rest()
    early.end()


async def test_keys_are_taken_where_nothing_has_the_focus() -> None:
    async with chatting(setup(AppModel())) as chat:
        await chat.ask("first")
        chat.app._chat.set_focus(None)
        chat.hit("ctrl+o")
        await chat.sees("Search titles")
        chat.hit("escape")
        await chat.until(lambda: chat.app.screen is chat.app._chat)
