"""The chat app with a fake model, for tests: what is on its screen, and waiting for it."""

from __future__ import annotations

import asyncio
import threading
import unicodedata
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from textual.app import App
from textual.events import Key, Paste
from textual.keys import REPLACED_KEYS, Keys, _character_to_key, _get_unicode_name_from_key
from textual.pilot import Pilot

from localllm.tui.app import ChatApp
from localllm.tui.chat.conversation import Conversation
from localllm.tui.setup import Setup
from localllm.tui.storage.chats import Store
from localllm.tui.widgets.message import MessageView
from tests.helpers.fake_chat import FakeModel, Reply

#: Seconds that something may take on a slow machine.
LIMIT = 60.0


def not_drawing() -> None:
    """Fails on the thread that draws, which must not wait for anything; in tests that is the main one."""
    assert threading.current_thread() is not threading.main_thread(), "the thread that draws does heavy work"


class Steps(threading.Event):
    """A gate that opens for so many tokens, or with `set` for all."""

    def __init__(self) -> None:
        super().__init__()
        self._tokens = threading.Semaphore(0)

    def allow(self, n: int) -> None:
        self._tokens.release(n)

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set() or self._tokens.acquire(timeout=timeout)


class AppModel(FakeModel):
    """A model that works on no thread that draws."""

    def tokenize(self, text: str, add_special: bool = True) -> list[int]:
        not_drawing()
        return super().tokenize(text, add_special)

    def tokenize_chat(self, *arguments: Any, **options: Any) -> list[int]:
        not_drawing()
        return super().tokenize_chat(*arguments, **options)

    def stream_chat(self, *arguments: Any, **options: Any) -> Any:
        not_drawing()
        return super().stream_chat(*arguments, **options)


class AppStore(Store):
    """A store in memory that is used on no thread that draws, once the app runs."""

    watched = False

    @contextmanager
    def _reading(self) -> Iterator[None]:
        if self.watched:
            not_drawing()
        with super()._reading():
            yield


def setup(model: AppModel, store: Store | None = None, **fields: Any) -> Setup:
    """What an app is built of that talks with a model."""
    given: dict[str, Any] = {"load": lambda name, progress: model, "memory": lambda: 812_000_000, **fields}
    return Setup(AppStore(None) if store is None else store, **given)


def talk(*texts: str, title: str = "") -> Conversation:
    """A chat in which somebody and a model said things in turn."""
    conversation = Conversation(title=title)
    for i, text in enumerate(texts):
        conversation.add("assistant" if i % 2 else "user", text)
    return conversation


def keeping(*chats: tuple[str, ...], replies: Sequence[Reply] = ()) -> Setup:
    """What an app is built of whose store has chats, titled as they begin; the last one is open."""
    store = AppStore(None)
    conversation = Conversation()
    for texts in chats:
        conversation = talk(*texts, title=texts[0])
        store.save(conversation, conversation.messages)
    return setup(AppModel(list(replies)), store, conversation=conversation)


def screen_text(app: App[Any]) -> str:
    """What is on the screen, without colours."""
    # The compositor is what Textual's own screenshots are made of.
    return "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())


@dataclass
class Chat:
    """An app that runs, and somebody who sits before it."""

    app: ChatApp
    pilot: Pilot[int]

    @property
    def screen(self) -> str:
        return screen_text(self.app)

    @property
    def notices(self) -> list[str]:
        """What was told in notifications that are there still."""
        return [notification.message for notification in self.app._notifications]

    @property
    def views(self) -> list[MessageView]:
        return self.app._chat.transcript.views

    @property
    def model_is_settled(self) -> bool:
        """Whether no model is to be loaded, or being loaded."""
        return self.app._chat.models.state in ("loaded", "none")

    async def press(self, *keys: str) -> None:
        """Presses keys, and waits till they have been handled."""
        # Textual's own way waits after every key for a processor that does nothing, on a busy machine a second.
        for key in keys:
            self.app.post_message(_key(key))
        await self._handled()

    def hit(self, *keys: str) -> None:
        """Presses keys all at once, faster than the screen follows; see `press`."""
        press(self.app, *keys)

    async def type(self, text: str) -> None:
        """Types a text where the cursor is; pasted, which is quicker, and does the same."""
        assert self.app.screen.focused is not None
        self.app.post_message(Paste(text))
        await self._handled()

    async def say(self, text: str) -> None:
        """Types a message, and sends it."""
        assert self.app.screen.focused is not None
        self.app.post_message(Paste(text))
        await self.press("enter")

    async def ask(self, text: str) -> None:
        """Says something, and waits for the reply."""
        n = len(self.app._chat.session.conversation)
        await self.say(text)
        await self.until(lambda: len(self.app._chat.session.conversation) >= n + 2)
        await self.rest()

    async def _handled(self) -> None:
        """Waits until keys have had their effect, and it is drawn."""
        taken = asyncio.Event()
        self.app.call_later(taken.set)  # behind the keys
        await asyncio.wait_for(taken.wait(), LIMIT)
        while (task := self.app.keys._task) is not None and not task.done():
            _, late = await asyncio.wait([task], timeout=LIMIT)
            assert not late, f"the keys have no end:\n{self.screen}"
        await self.pilot.pause(0)

    async def rest(self) -> None:
        """Waits until nothing is generated, and all of it is drawn."""
        await self.until(lambda: self.app._chat.turn is None and self.model_is_settled)
        for worker in list(self.app.workers):
            if worker.group in ("turn", "command", "step", "suggestions"):
                await self.until(lambda worker=worker: worker.is_finished, f"an end of {worker.description}")
        await self.pilot.pause(0)

    async def sees(self, text: str) -> None:
        await self.until(lambda: text in self.screen, f"{text!r} on the screen")

    async def hears(self, text: str) -> None:
        await self.until(lambda: any(text in notice for notice in self.notices), f"{text!r} in a notification")

    async def until(self, condition: Callable[[], object], what: str = "what is awaited") -> None:
        if condition():
            return
        end = asyncio.get_running_loop().time() + LIMIT
        while not condition():
            assert asyncio.get_running_loop().time() < end, f"there is not {what}:\n{self.screen}\n{self.notices}"
            await asyncio.sleep(0.01)
        await self.pilot.pause(0)


def press(app: App[Any], *keys: str) -> None:
    """Presses keys, and waits for nothing; what is not the name of a key is typed."""
    for key in keys:
        for each in [key] if key in set(Keys) else key:
            app.post_message(_key(each))


def _key(name: str) -> Key:
    """A key by its name, or the character on it."""
    name = _character_to_key(name) if len(name) == 1 else name
    try:
        return Key(name, unicodedata.lookup(_get_unicode_name_from_key(REPLACED_KEYS.get(name, name))))
    except KeyError:
        return Key(name, name if len(name) == 1 else None)


@asynccontextmanager
async def starting(
    app: ChatApp, size: tuple[int, int] = (80, 24), *, notifications: bool = False
) -> AsyncIterator[Chat]:
    """An app that has just begun."""
    async with app.run_test(size=size, notifications=notifications) as pilot:
        try:
            yield Chat(app, pilot)
        except BaseException:  # a reply that waits for the test would keep the failure from being told
            if app._chat.turn is not None:
                app._chat.turn.stop()
            raise
    app.end()


@asynccontextmanager
async def chatting(
    built: Setup, size: tuple[int, int] = (80, 24), *, notifications: bool = False
) -> AsyncIterator[Chat]:
    """An app whose model is loaded; ``notifications`` are drawn if it is so said."""
    async with starting(ChatApp(built), size, notifications=notifications) as chat:
        if isinstance(built.store, AppStore):
            built.store.watched = True
        await chat.until(lambda: chat.app._chat.models.state == "loaded", "a model")
        await chat.rest()
        yield chat
        if isinstance(built.store, AppStore):
            built.store.watched = False


def run(test: Coroutine[Any, Any, None]) -> None:
    """Runs a test, which takes `LIMIT` seconds several times at most."""
    asyncio.run(asyncio.wait_for(test, 4 * LIMIT))
