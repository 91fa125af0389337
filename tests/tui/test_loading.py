"""The chat app loads, changes or fails to load its model while the user types."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from localllm.errors import HubError, ModelNotFoundError, NotEnoughMemoryError
from localllm.options.types import LoadProgress
from localllm.tui.app import ChatApp
from localllm.tui.chat.conversation import ChatMessage, Conversation
from localllm.tui.setup import ModelEntry, Offer
from tests.helpers.chat_app import LIMIT, AppModel, AppStore, Chat, chatting, setup, starting, talk

ENTRIES = (
    ModelEntry("small", "/models/small.gguf", 600_000_000, "Q4_0", "1.1B", 2048, "yes"),
    ModelEntry("large", "/models/large.gguf", 60_000_000_000, "Q8_0", "70B", 8192, "no"),
    ModelEntry("broken", "/models/broken.gguf", 1000, error="broken.gguf is no GGUF file: get it again"),
)


def texts(chat: Chat) -> list[str]:
    return [message.text for message in chat.app._chat.session.conversation.path()]


class Halt:
    """Stops a thread at one of its steps.

    Attributes:
        step: the step to stop at.
        came: set when the thread reaches it.
        goes: set it to continue.
    """

    def __init__(self) -> None:
        self.step: str | None = None
        self.came = threading.Event()
        self.goes = threading.Event()

    def at(self, step: str) -> None:
        self.step = step
        self.came.clear()
        self.goes.clear()

    def here(self, step: str) -> None:
        if step == self.step:
            self.came.set()
            assert self.goes.wait(LIMIT)


class NotingStore(AppStore):
    """A store that stops when a chat's model is saved."""

    def __init__(self, halt: Halt) -> None:
        super().__init__(None)
        self._halt = halt

    def set(self, id_: str, **changes: str | bool | dict[str, object] | None) -> None:
        if "model" in changes:
            self._halt.here("note")
        super().set(id_, **changes)


async def test_a_message_waits_for_the_model() -> None:
    """While the previous model closes, the next one loads, and its name is saved with the chat."""
    halt = Halt()

    class Model(AppModel):
        def close(self) -> None:
            halt.here("close")
            super().close()

    def load(name: str, progress: LoadProgress) -> Model:
        halt.here("load")
        return Model([f"by {name}"])

    halt.at("load")
    async with starting(ChatApp(setup(Model(), NotingStore(halt), load=load))) as chat:
        for number, step in enumerate(("load", "close", "load", "note")):
            if number:
                halt.at(step)
                await chat.say(f"/model {number}")
            await chat.until(halt.came.is_set)
            await chat.say(f"hello {number}")
            await chat.sees("The model is being loaded: your message will be sent afterwards")
            assert chat.app._chat.composer.text == ""
            # Once the device is shown, the user may continue a reply, which must not fail.
            assert not chat.app._chat.status.status.device
            await chat.type("typed next")  # not sent yet
            halt.goes.set()
            await chat.until(lambda n=number: len(texts(chat)) == 2 * n + 2)  # type: ignore[misc]
            await chat.rest()
            assert texts(chat)[-2:] == [f"hello {number}", f"by {number or ''}"]
            assert "is being loaded" not in chat.screen
            assert chat.app._chat.composer.text == "typed next"
            chat.app._chat.composer.empty()
        assert chat.notices == []


async def test_esc_withdraws_a_waiting_message() -> None:
    there = threading.Event()
    model = AppModel(["hello"])

    def load(name: str, progress: LoadProgress) -> AppModel:
        assert there.wait(LIMIT)
        return model

    async with starting(ChatApp(setup(model, load=load))) as chat:
        await chat.sees("loading the model")
        await chat.say("hi")
        await chat.sees("will be sent afterwards")
        await chat.press("escape")
        await chat.until(lambda: "as soon as it is there" not in chat.screen)
        there.set()
        await chat.rest()
        await chat.sees("Fake · cpu")
        assert model.asked == []
        assert chat.app._chat.composer.text == "hi"
        await chat.press("enter")
        await chat.until(lambda: texts(chat) == ["hi", "hello"])


@pytest.mark.parametrize("step", ["one", "note"])
async def test_a_model_chosen_during_loading_replaces_the_loading_one(step: str) -> None:
    """While the chat is being read, or has been read but its model is not yet saved."""
    halt = Halt()
    loaded: list[str] = []

    def load(name: str, progress: LoadProgress) -> AppModel:
        loaded.append(name)
        halt.here(name)
        progress("weights", 1, 2)
        return AppModel([f"by {name}"])

    async with chatting(setup(AppModel(), NotingStore(halt), load=load)) as chat:
        halt.at(step)
        await chat.say("/model one")
        await chat.until(halt.came.is_set)
        models = chat.app._chat.models
        for name in ("two", "three"):
            chat.app.spawn(models.change(name))  # a command would wait for the stopped thread
            await chat.until(lambda name=name: models._loading.name == name)  # type: ignore[misc, union-attr]
        assert models.state == "loading"
        await chat.say("hello")
        halt.goes.set()
        await chat.until(lambda: texts(chat) == ["hello", "by three"])
        await chat.rest()
        assert loaded == ["", "one", "three"]
        assert chat.app._chat.session.conversation.model == "three"


class SavingStore(AppStore):
    """A store that stops when a reply is finally saved."""

    def __init__(self, halt: Halt) -> None:
        super().__init__(None)
        self._halt = halt

    def save(self, conversation: Conversation, messages: Iterable[ChatMessage]) -> None:
        messages = list(messages)
        if any(message.role == "assistant" and message.state != "streaming" for message in messages):
            self._halt.here("save")
        super().save(conversation, messages)


@pytest.mark.parametrize("when_full", [None, "drop"])
async def test_models_that_are_chosen_while_a_reply_stops(when_full: str | None) -> None:
    """The last model is loaded and all others are closed, even if the reply would continue automatically."""
    halt = Halt()
    models: list[tuple[str, AppModel]] = []

    def load(name: str, progress: LoadProgress) -> AppModel:
        models.append((name, AppModel(["word " * 99, "by " + name], context=60)))
        return models[-1][1]

    built = setup(AppModel(), SavingStore(halt), load=load, when_full=when_full)
    async with chatting(built) as chat:
        halt.at("save")
        await chat.say("hello")
        await chat.until(halt.came.is_set)
        changes = [chat.app.spawn(chat.app._chat.models.change(name)) for name in ("b", "c")]
        await asyncio.sleep(0.05)
        halt.goes.set()
        await chat.until(lambda: all(change.is_finished for change in changes))
        await chat.rest()
        assert chat.app._chat.models.state == "loaded"
        assert chat.app._chat.models.name == models[-1][0] == "c"
        assert [model.closed for _, model in models] == [True] * (len(models) - 1) + [False]
        assert chat.app.session.model is models[-1][1]


OFFERS = [Offer("large:9b", "large:9b: 6 GB to download, about 9 tokens/s here"), Offer("small:1b", "small:1b: 1 GB")]


def offering(pull: Callable[[str, LoadProgress], object], loaded: list[str], **fields: Any) -> ChatApp:
    """Return an app at its first start. ``loaded`` collects the names of loaded models."""

    def load(name: str, progress: LoadProgress) -> AppModel:
        loaded.append(name)
        return AppModel([f"by {name or 'demo'}"])

    return ChatApp(setup(AppModel(), load=load, pull=pull, offers=lambda: OFFERS, first_model="", **fields))


async def test_the_first_start_downloads_the_chosen_model() -> None:
    halt, loaded = Halt(), list[str]()

    def pull(name: str, progress: LoadProgress) -> None:
        for stage, step in (("download", "half"), ("check", "whole")):
            progress(stage, 500_000_000, 1_000_000_000)
            halt.here(step)
        loaded.append(f"pulled {name}")

    halt.at("half")
    async with starting(offering(pull, loaded)) as chat:
        await chat.sees("Which model?")
        await chat.sees("large:9b: 6 GB to download, about 9 tokens/s here")
        await chat.sees("Chat with the demo model")
        assert loaded == []
        await chat.press("down", "enter")
        await chat.sees("downloading 500 MB of 1 GB")
        await chat.say("hello")
        halt.step = "whole"
        halt.goes.set()
        await chat.until(lambda: texts(chat) == ["hello", "by small:1b"])
        await chat.rest()
        assert loaded == ["pulled small:1b", "small:1b"]
        assert chat.app._chat.session.conversation.model == "small:1b"


@pytest.mark.parametrize("keys", [("escape",), ("down", "down", "enter")])
async def test_the_first_start_can_keep_the_demo_model(keys: tuple[str, ...]) -> None:
    loaded: list[str] = []

    def pull(name: str, progress: LoadProgress) -> None:
        raise AssertionError

    async with starting(offering(pull, loaded)) as chat:
        await chat.sees("Which model?")
        await chat.press(*keys)
        await chat.ask("hello")
        assert loaded == [""]


async def test_a_first_download_without_a_network_leads_to_the_demo_model() -> None:
    loaded: list[str] = []

    def pull(name: str, progress: LoadProgress) -> None:
        raise HubError("the hub cannot be reached: check the network")

    async with starting(offering(pull, loaded)) as chat:
        await chat.sees("Which model?")
        await chat.press("enter")
        await chat.sees("large:9b cannot be loaded")
        await chat.sees("the hub cannot be reached: check the network")
        await chat.sees("Back to the demo model")
        await chat.press("enter")
        await chat.ask("hello")
        assert loaded == [""]


async def test_a_model_that_is_not_here_is_downloaded_on_request() -> None:
    here, loaded = {""}, list[str]()

    def load(name: str, progress: LoadProgress) -> AppModel:
        loaded.append(name)
        return AppModel([f"by {name}"])

    def check(name: str) -> None:
        if name not in here:
            raise ModelNotFoundError(f"{name} is not on this machine")

    def pull(name: str, progress: LoadProgress) -> None:
        here.add(name)

    def label(name: str) -> str | None:
        return "Download it (2 GB)" if name == "qwen" else None

    built = setup(AppModel(), load=load, check=check, pull=pull, download_label=label)
    async with chatting(built) as chat:
        await chat.say("/model other")
        await chat.sees("other is not on this machine")
        assert "Download" not in chat.screen
        await chat.press("escape")
        await chat.say("/model qwen")
        await chat.sees("Download it (2 GB)")
        await chat.press("enter")
        await chat.until(lambda: loaded[-1] == "qwen")
        await chat.rest()
        await chat.ask("hello")
        assert texts(chat)[-1] == "by qwen"


async def test_quitting_ends_a_download() -> None:
    waits, done = threading.Event(), list[int]()

    def pull(name: str, progress: LoadProgress) -> None:
        for i in range(10_000):
            progress("download", i, 10_000)
            done.append(i)
            waits.wait(0.01)

    async with starting(offering(pull, [])) as chat:
        await chat.sees("Which model?")
        await chat.press("enter")
        await chat.sees("downloading")
        await chat.press("ctrl+q")
        await chat.until(lambda: not chat.app.is_running)
    assert len(done) < 10_000


async def test_quitting_ends_loading() -> None:
    waits = threading.Event()
    done: list[int] = []

    def load(name: str, progress: LoadProgress) -> AppModel:
        for i in range(10_000):
            progress("weights", i, 10_000)
            done.append(i)
            waits.wait(0.01)
        return AppModel()

    async with starting(ChatApp(setup(AppModel(), load=load))) as chat:
        await chat.sees("loading weights")
        await chat.press("ctrl+q")
        await chat.until(lambda: not chat.app.is_running)
    assert len(done) < 10_000


async def test_a_missing_model_is_reported() -> None:
    halt = Halt()

    def load(name: str, progress: LoadProgress) -> AppModel:
        halt.here(name)
        if not name:
            raise MemoryError
        return AppModel(["well"])

    async with starting(ChatApp(setup(AppModel(), load=load))) as chat:
        await chat.sees("memory ran out")
        halt.at("")
        await chat.press("down", "enter")  # Try again
        await chat.until(halt.came.is_set)
        await chat.say("hello")
        await chat.sees("is being loaded")
        halt.goes.set()
        await chat.sees("memory ran out")
        assert chat.app._chat.models.state == "none"
        await chat.press("end", "enter")
        await chat.hears("no model is loaded: choose one with /model")
        await chat.sees("no model: /model chooses one")
        assert "is being loaded" not in chat.screen
        assert chat.app._chat.composer.text == "hello"
        chat.app.clear_notifications()
        await chat.press("enter")
        await chat.hears("no model is loaded: choose one with /model")
        chat.app._chat.composer.empty()
        await chat.press("ctrl+r")
        await chat.hears("no model is loaded: wait until one is")
        await chat.say("/model small")
        await chat.rest()
        await chat.ask("hello")
        assert texts(chat) == ["hello", "well"]


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

    built = setup(AppModel(), load=load, list_models=lambda: ENTRIES, conversation=talk("hello", "by demo"))
    async with chatting(built, size=(100, 24)) as chat:
        await chat.press("ctrl+l")
        await chat.sees("70B")
        assert "60 GB" in chat.screen
        assert "cannot be run" in chat.screen
        await chat.press("down", "down")
        await chat.sees("is no GGUF file: get it again")
        await chat.press("up", "enter")
        await chat.sees("needs 61 GB")
        assert models[0].closed
        assert texts(chat) == ["hello", "by demo"]  # the chat is kept
        await chat.press("down", "enter")  # Choose another model
        await chat.sees("70B")
        await chat.type("small")
        await chat.press("enter")
        await chat.until(lambda: loaded[-1] == "/models/small.gguf")
        await chat.rest()
        await chat.ask("and you?")
        assert "by /models/small.gguf" in chat.screen
        assert chat.app._chat.session.conversation.model == "/models/small.gguf"
        for go_back in ("enter", "escape"):
            await chat.say("/model large")
            await chat.sees("cannot be loaded")
            await chat.press(go_back)
            await chat.until(lambda: loaded[-1] == "/models/small.gguf")
            await chat.rest()
            assert chat.app._chat.models.state == "loaded"


async def test_an_unreadable_model_keeps_the_previous_one() -> None:
    model = AppModel(["still by the old one"])
    loaded: list[str] = []

    def load(name: str, progress: LoadProgress) -> AppModel:
        loaded.append(name)
        return model

    def check(name: str) -> None:
        if name == "typo.gguf":
            raise ModelNotFoundError("there is no file typo.gguf: check the path")

    async with chatting(setup(model, load=load, check=check, list_models=lambda: ENTRIES)) as chat:
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


async def test_a_chat_with_another_or_a_missing_model() -> None:
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
        # The substitute for the chat's missing model is not saved with the chat.
        assert (await chat.app.offload(store.load, kept.id)).model == "other.gguf"
        assert chat.notices == []
        for name, said in (
            ("gone.gguf", "the model of this chat, gone.gguf, is not available: here.gguf replies now"),
            ("other.gguf", "this chat used other.gguf: here.gguf replies now, /model changes that"),
        ):
            await chat.press("ctrl+o")
            await chat.type(name)
            await chat.press("enter")
            await chat.until(lambda name=name: chat.app.session.conversation.title == name)  # type: ignore[misc]
            await chat.hears(said)
