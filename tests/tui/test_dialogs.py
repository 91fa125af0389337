"""The dialogs: chats, models, a full context, system prompt, sampling, help, the palette."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
from rich.console import Console

from localllm.errors import ModelNotFoundError, NotEnoughMemoryError
from localllm.progress import LoadProgress
from localllm.tui.app import ChatApp
from localllm.tui.commands import COMMANDS
from localllm.tui.conversation import Conversation
from localllm.tui.menu import MENU
from localllm.tui.screens.help import help_text
from localllm.tui.screens.models_in_use import ModelState
from localllm.tui.setup import ModelEntry
from localllm.tui.transfer import read_export
from tests.helpers.chat_app import AppModel, AppStore, Chat, chatting, setup


async def other_chats(chat: Chat, *texts: str) -> None:
    for text in texts:
        await chat.press("ctrl+n")
        await chat.rest()
        await chat.ask(text)


def title(chat: Chat) -> str:
    return chat.app._chat.session.conversation.title


async def test_chats_are_opened_and_searched() -> None:
    async with chatting(setup(AppModel(["apples", "pears", "plums"]), AppStore(None))) as chat:
        await other_chats(chat, "first", "second", "third")
        await chat.press("ctrl+o")
        await chat.sees("third  open · just now · 2 messages")
        await chat.press("down", "enter")
        await chat.until(lambda: title(chat) == "second")
        await chat.sees("pears")
        await chat.press("ctrl+o")
        await chat.sees("first")
        await chat.type("apple")
        await chat.until(lambda: "third" not in chat.screen)
        await chat.press("enter")
        await chat.until(lambda: title(chat) == "first")
        await chat.say("/load plums")
        await chat.sees("third")
        await chat.press("escape")
        await chat.until(lambda: "Search titles" not in chat.screen)


async def test_chats_are_renamed_archived_and_deleted() -> None:
    store = AppStore(None)
    async with chatting(setup(AppModel(), store)) as chat:
        await other_chats(chat, "first", "second")
        await chat.press("ctrl+o")
        await chat.sees("second  open")
        await chat.press("f2")
        await chat.sees("─ Rename")
        await chat.type("second best")  # all of the old title is selected
        await chat.press("enter")
        await chat.sees("second best  open")
        await chat.press("down", "f3")
        await chat.until(lambda: "first" not in chat.screen.replace("first after", ""))
        await chat.press("f6")
        await chat.sees("Archived chats")
        await chat.sees("first  archived")
        await chat.press("delete")
        await chat.sees("Delete the chat for good?")
        await chat.press("down", "enter")
        await chat.sees("no chat is archived")
        await chat.press("f6", "escape")
        await chat.until(lambda: title(chat) == "second best")
        await chat.sees("localllm  second best")
        assert [s.title for s in await chat.app.offload(store.sessions)] == ["second best"]
        await chat.say("/delete this")
        await chat.sees("Delete this chat for good?")
        await chat.press("down", "enter")
        await chat.sees("New chat")
        assert await chat.app.offload(store.sessions) == []
        await chat.say("/archive")
        await chat.hears("there is nothing to save yet")


async def test_archived_chats_are_listed_and_searched() -> None:
    async with chatting(setup(AppModel())) as chat:
        await other_chats(chat, "first", "second")
        await chat.say("/archive")
        await chat.hears("the chat is archived")
        await chat.ask("third")
        await chat.say("/sessions archived")
        await chat.sees("Archived chats")
        await chat.sees("second  archived")
        await chat.type("r")  # it is in all of them
        await chat.sees("no chat has these words")
        await chat.press("f6")
        await chat.sees("third  open")


async def test_chats_are_exported_and_imported(tmp_path: Path) -> None:
    store = AppStore(None)
    async with chatting(setup(AppModel(["one"]), store)) as chat:
        await chat.ask("hello")
        await chat.say(f"/export {tmp_path}/chat.json")
        await chat.hears("written to")
        await chat.press("ctrl+o")
        await chat.sees("hello  open")
        await chat.press("f4")
        await chat.sees("A new file")
        chat.app.screen.query_one("Input").value = f"{tmp_path}/chat.md"  # type: ignore[attr-defined]
        await chat.press("enter")
        await chat.until((tmp_path / "chat.md").exists)
        await chat.press("f5")
        await chat.sees("that was exported")
        chat.app.screen.query_one("Input").value = f"{tmp_path}/chat.json"  # type: ignore[attr-defined]
        await chat.press("enter")
        await chat.until(lambda: chat.screen.count("2 messages") == 2)
        await chat.hears("imported: hello (copy)")
        await chat.press("escape")
        await chat.until(lambda: chat.app.screen is chat.app._chat)
        await chat.say(f"/import {tmp_path}/chat.json")
        await chat.hears("imported: hello (copy 2)")
        await chat.until(lambda: title(chat) == "hello (copy 2)")
        await chat.say(f"/load {tmp_path}/chat.json")
        await chat.until(lambda: title(chat) == "hello (copy 3)")
        await chat.say("/import")
        await chat.sees("for example ~/")
        await chat.press("escape")
        await chat.say(f"/export {tmp_path}/chat.json")
        await chat.hears("is there already: choose another name")
    assert [m.text for m in read_export(tmp_path / "chat.json").path()] == ["hello", "one"]
    assert "## User\n\nhello" in (tmp_path / "chat.md").read_text()


async def test_a_full_context_is_asked_about() -> None:
    model = AppModel(["word " * 30, "word " * 30, "the answer", "a summary", "at last"], context=100)
    async with chatting(setup(model)) as chat:
        await chat.ask("one " * 3)
        await chat.ask("two " * 3)
        await chat.say("three " * 40)
        await chat.sees("The context is full")
        assert "Drop the oldest turns" in chat.screen
        assert "Summarise" in chat.screen
        await chat.press("enter")
        await chat.rest()
        await chat.sees("the answer")
        await chat.press("ctrl+up", "up", "up", "up")
        await chat.sees("messages that the model does not get any more")


async def test_a_summary_makes_room_or_nothing_does() -> None:
    model = AppModel(["word " * 30, "word " * 30, "in short", "in shorter", "at last"], context=110)
    async with chatting(setup(model)) as chat:
        await chat.ask("one " * 3)
        await chat.ask("two " * 3)
        await chat.say("three " * 40)
        await chat.sees("The context is full")
        await chat.press("escape")  # stop
        await chat.rest()
        n = len(model.asked)
        await chat.press("ctrl+r")
        await chat.sees("The context is full")
        await chat.press("down", "enter")
        await chat.sees("4 messages that the model does not get any more, but a summary of them")
        await chat.sees("at last")
        assert len(model.asked) == n + 3  # the summary in two parts
        assert "in shorter" in str(model.asked[-1].messages)


async def test_system_prompt_and_settings() -> None:
    model = AppModel(["one", "two"])
    async with chatting(setup(model), size=(100, 30)) as chat:
        await chat.press("ctrl+s")
        await chat.sees("System prompt")
        await chat.type("be brief")
        await chat.press("ctrl+s")
        await chat.hears("the system prompt is set")
        await chat.press("ctrl+t")
        await chat.sees("Temperature")
        await chat.type("hot")
        await chat.press("ctrl+s")
        await chat.sees("temperature cannot be 'hot': give a number")
        await chat.press("home", "shift+end")
        await chat.type("0.5")
        chat.app.screen.query_one("#stop").text = "a\\nb\nUser:"  # type: ignore[attr-defined]
        await chat.press("ctrl+s")
        await chat.hears("temperature 0.5")
        await chat.say("/set top_k 3")
        await chat.hears("top_k")
        await chat.ask("hello")
        assert model.asked[0].messages[0] == {"role": "system", "content": "be brief"}
        asked = model.asked[0].options
        assert (asked["temperature"], asked["top_k"], asked["stop"]) == (0.5, 3, ["a\nb", "User:"])
        await chat.say("/set nonsense 3")
        await chat.hears("there is no setting 'nonsense'")
        await chat.press("ctrl+t")
        await chat.sees("Temperature")
        assert "a\\nb" in chat.screen
        await chat.press("ctrl+r", "ctrl+s")
        await chat.hears("all by default")


ENTRIES = (
    ModelEntry("small", "/models/small.gguf", 600_000_000, "Q4_0", "1.1B", 2048, "yes"),
    ModelEntry("large", "/models/large.gguf", 60_000_000_000, "Q8_0", "70B", 8192, "no"),
    ModelEntry("broken", "/models/broken.gguf", 1000, error="broken.gguf is no GGUF file: get it again"),
)


async def test_another_model_is_chosen() -> None:
    loaded: list[str] = []
    models: list[AppModel] = []

    def load(name: str, progress: LoadProgress) -> AppModel:
        loaded.append(name)
        progress("weights", 1, 2)
        if "large" in name:
            raise NotEnoughMemoryError("large.gguf needs 61 GB, and there are 16: choose a smaller one")
        models.append(AppModel([f"by {name or 'demo'}"]))
        return models[-1]

    async with chatting(setup(AppModel(), load=load, list_models=lambda: ENTRIES), size=(100, 24)) as chat:
        await chat.ask("hello")
        await chat.press("ctrl+l")
        await chat.sees("70B")
        assert "60 GB" in chat.screen
        assert "cannot be run" in chat.screen
        await chat.press("down", "down")
        await chat.sees("is no GGUF file: get it again")
        await chat.press("up", "enter")
        await chat.sees("needs 61 GB")
        assert models[0].closed
        assert "by demo" in chat.app._chat.session.conversation.path()[1].text  # the chat stays
        await chat.press("down", "enter")  # Choose another model
        await chat.sees("70B")
        await chat.type("small")
        await chat.press("enter")
        await chat.until(lambda: loaded[-1] == "/models/small.gguf")
        await chat.rest()
        await chat.ask("and you?")
        assert "by /models/small.gguf" in chat.screen
        assert chat.app._chat.session.conversation.model == "/models/small.gguf"
        await chat.say("/model large")
        await chat.sees("cannot be loaded")
        await chat.press("enter")  # Back
        await chat.until(lambda: loaded[-1] == "/models/small.gguf" and chat.app._chat.models.model)
        await chat.say("/model large")
        await chat.sees("cannot be loaded")
        await chat.press("escape")
        await chat.until(lambda: loaded[-1] == "/models/small.gguf" and chat.app._chat.models.model)


async def test_a_model_that_cannot_be_read_leaves_the_one_before() -> None:
    model = AppModel(["by the old one", "still by the old one"])
    loaded: list[str] = []

    def load(name: str, progress: LoadProgress) -> AppModel:
        loaded.append(name)
        return model

    def check(name: str) -> None:
        if name == "typo.gguf":
            raise ModelNotFoundError("there is no file typo.gguf: check the path")

    async with chatting(setup(model, load=load, check=check, list_models=lambda: ENTRIES)) as chat:
        await chat.ask("hello")
        for leave in ("escape", "enter"):  # the first choice is to go back
            await chat.say("/model typo.gguf")
            await chat.sees("there is no file typo.gguf")
            assert "Back to the demo model" in chat.screen
            await chat.press(leave)
            await chat.until(lambda: chat.app.screen is chat.app._chat)
        assert not model.closed
        await chat.ask("and now?")
        assert "still by the old one" in chat.screen
        await chat.say("/model typo.gguf")
        await chat.sees("there is no file typo.gguf")
        await chat.press("down", "enter")
        await chat.sees("70B")
        await chat.press("escape")
        assert loaded == [""]
        assert chat.app._chat.session.conversation.model == ""


async def test_a_chat_whose_model_is_another_or_gone() -> None:
    store = AppStore(None)
    for name in ("gone.gguf", "other.gguf"):
        kept = Conversation(title=name, model=name)
        kept.add("user", "hello")
        store.save(kept, kept.messages)

    def check(name: str) -> None:
        if name == "gone.gguf":
            raise ModelNotFoundError("there is no file gone.gguf: check the path")

    built = setup(AppModel(), store, conversation=kept, first_model="here.gguf", check=check)
    async with chatting(built) as chat:
        await chat.ask("hello?")
        # What was loaded because the chat's own model is gone is not noted with the chat.
        assert (await chat.app.offload(store.load, kept.id)).model == "other.gguf"
        for name, said in (
            ("gone.gguf", "the model of this chat, gone.gguf, is not here: here.gguf replies now"),
            ("other.gguf", "this chat was with other.gguf: here.gguf replies now, /model changes that"),
        ):
            await chat.press("ctrl+o")
            await chat.type(name)
            await chat.press("enter")
            await chat.until(lambda name=name: title(chat) == name)  # type: ignore[misc]
            await chat.hears(said)


async def test_quitting_ends_loading() -> None:
    waits = threading.Event()

    def load(name: str, progress: LoadProgress) -> AppModel:
        for i in range(10_000 if name else 0):
            progress("weights", i, 10_000)
            waits.wait(0.01)
        return AppModel()

    async with chatting(setup(AppModel(), load=load)) as chat:
        await chat.say("/model other")
        await chat.sees("loading weights")
        await chat.press("ctrl+q")
        await chat.until(lambda: not chat.app.is_running)


async def test_escape_takes_back_a_message_that_waits_for_the_model() -> None:
    is_loaded = threading.Event()

    def load(name: str, progress: LoadProgress) -> AppModel:
        is_loaded.wait(30 if name else 0)
        return AppModel()

    async with chatting(setup(AppModel(), load=load)) as chat:
        await chat.say("/model other")
        await chat.until(lambda: chat.app._chat.models.state is ModelState.LOADING)
        await chat.say("hello")
        await chat.sees("is being loaded")
        await chat.press("escape")
        await chat.until(lambda: "is being loaded" not in chat.screen)
        is_loaded.set()
        await chat.rest()
        assert chat.app._chat.composer.text == "hello"
        assert not chat.views


async def test_no_model_is_told() -> None:
    def load(name: str, progress: LoadProgress) -> AppModel:
        raise MemoryError

    app = ChatApp(setup(AppModel(), load=load))
    async with app.run_test() as pilot:
        chat = Chat(app, pilot)
        await chat.sees("memory ran out")
        await chat.press("end", "enter")
        await chat.sees("no model: /model chooses one")
        await chat.say("hello")
        await chat.hears("no model is loaded: choose one with /model")
    app.end()


@pytest.mark.parametrize("width", [56, 76, 140])
def test_help_has_every_command_and_key(width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as printed:
        console.print(help_text(width))
    words = printed.get().split()
    for command in COMMANDS:
        assert f"/{command.name}" in words
    for entry in MENU:
        assert not entry.key or f"({entry.shown_key})" in words
    assert (width > 100) == ("Commands" in printed.get().splitlines()[0])


async def test_help_is_there() -> None:
    assert {entry.name for entry in MENU} <= {command.name for command in COMMANDS}

    async with chatting(setup(AppModel())) as chat:
        await chat.press("f1")
        await chat.sees("Typing")
        await chat.press("escape")
        await chat.say("/help")
        await chat.sees("Typing")


async def test_the_palette_finds_commands() -> None:
    async with chatting(setup(AppModel())) as chat:
        await chat.press("ctrl+p")
        await chat.sees("Sampling")
        await chat.type("statis")
        await chat.until(lambda: "Sampling" not in chat.screen)
        await chat.sees("Statistics")
        await chat.pilot.pause(0.3)
        await chat.press("enter")
        await chat.sees("in use")


def command_has_ended(chat: Chat) -> bool:
    return all(worker.is_finished for worker in chat.app.workers if worker.group == "command")


async def test_every_command_does_something() -> None:
    """None of them fails, whatever state the chat is in."""

    async with chatting(setup(AppModel(), list_models=lambda: ENTRIES)) as chat:
        for round_ in range(2):
            for command in COMMANDS:
                if command.name == "quit":
                    continue
                chat.app._chat.run_command(f"/{command.name}")
                await chat.until(lambda: command_has_ended(chat) or len(chat.app.screen_stack) > 2)
                while not command_has_ended(chat) or len(chat.app.screen_stack) > 2:
                    await chat.press("escape")
                assert not [n for n in chat.notices if "inside localllm" in n], (
                    command.name,
                    chat.notices,
                )
            await chat.rest()
            if round_ == 0:
                await chat.press("escape")
                chat.app._chat.composer.empty()
                await chat.ask("hello")


async def test_a_command_that_is_none_stays_to_be_mended() -> None:
    async with chatting(setup(AppModel(["one"]))) as chat:
        await chat.say("/modle x")
        await chat.hears("did you mean /model?")
        assert chat.app._chat.composer.text == "/modle x"
        chat.app._chat.composer.empty()
        await chat.ask("//not a command")
        assert chat.app._chat.session.conversation.path()[0].text == "/not a command"


async def test_themes() -> None:
    async with chatting(setup(AppModel(), theme="light")) as chat:
        assert chat.app.theme == "light"
        await chat.say("/theme dark")
        await chat.until(lambda: chat.app.theme == "dark")
        await chat.say("/theme mauve")
        await chat.hears("there is no theme 'mauve'")
