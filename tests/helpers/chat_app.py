"""The chat app with a fake model, for tests: its screen, keys, and waiting for events."""

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

#: Seconds to wait for an event on a slow machine.
LIMIT = 60.0


def not_drawing() -> None:
    """Fail on the drawing thread (the main thread in tests), which must never block."""
    assert threading.current_thread() is not threading.main_thread(), "heavy work on the drawing thread"


class Steps(threading.Event):
    """A gate that opens for n tokens with `allow`, or for all with `set`."""

    def __init__(self) -> None:
        super().__init__()
        self._tokens = threading.Semaphore(0)

    def allow(self, n: int) -> None:
        self._tokens.release(n)

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set() or self._tokens.acquire(timeout=timeout)


class AppModel(FakeModel):
    """A model that must not be used on the drawing thread."""

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
    """A store in memory.  While the app runs, it must not be used on the drawing thread."""

    watched = False

    @contextmanager
    def _reading(self) -> Iterator[None]:
        if self.watched:
            not_drawing()
        with super()._reading():
            yield


def setup(model: AppModel, store: Store | None = None, **fields: Any) -> Setup:
    given: dict[str, Any] = {"load": lambda name, progress: model, "memory": lambda: 812_000_000, **fields}
    return Setup(AppStore(None) if store is None else store, **given)


def talk(*texts: str, title: str = "") -> Conversation:
    """Return a chat with alternating messages of the user and the model."""
    conversation = Conversation(title=title)
    for i, text in enumerate(texts):
        conversation.add("assistant" if i % 2 else "user", text)
    return conversation


def keeping(*chats: tuple[str, ...], replies: Sequence[Reply] = ()) -> Setup:
    """Return a setup whose store contains chats, each titled with its first message.  The last chat is open."""
    store = AppStore(None)
    conversation = Conversation()
    for texts in chats:
        conversation = talk(*texts, title=texts[0])
        store.save(conversation, conversation.messages)
    return setup(AppModel(list(replies)), store, conversation=conversation)


def screen_text(app: App[Any]) -> str:
    # Textual's screenshots use the compositor too.
    return "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())


@dataclass
class Chat:
    app: ChatApp
    pilot: Pilot[int]

    @property
    def screen(self) -> str:
        return screen_text(self.app)

    @property
    def notices(self) -> list[str]:
        """Messages of the notifications that are still visible."""
        return [notification.message for notification in self.app._notifications]

    @property
    def views(self) -> list[MessageView]:
        return self.app._chat.transcript.views

    @property
    def model_is_settled(self) -> bool:
        """Whether no model is loading or about to load."""
        return self.app._chat.models.state in ("loaded", "none")

    async def press(self, *keys: str) -> None:
        """Press keys and wait until they have been handled."""
        # Textual's `Pilot.press` waits after every key for an idle processor: a second on a busy machine.
        for key in keys:
            self.app.post_message(_key(key))
        await self._handled()

    def hit(self, *keys: str) -> None:
        """Press all keys at once, faster than the screen updates; see `press`."""
        press(self.app, *keys)

    async def type(self, text: str) -> None:
        """Enter a text at the cursor.  Pastes it, which is faster than typing and has the same effect."""
        assert self.app.screen.focused is not None
        self.app.post_message(Paste(text))
        await self._handled()

    async def say(self, text: str) -> None:
        assert self.app.screen.focused is not None
        self.app.post_message(Paste(text))
        await self.press("enter")

    async def ask(self, text: str) -> None:
        """Send a message and wait for the reply."""
        n = len(self.app._chat.session.conversation)
        await self.say(text)
        await self.until(lambda: len(self.app._chat.session.conversation) >= n + 2)
        await self.rest()

    async def _handled(self) -> None:
        """Wait until all keys have taken effect and the screen is drawn."""
        taken = asyncio.Event()
        self.app.call_later(taken.set)  # after the keys
        await asyncio.wait_for(taken.wait(), LIMIT)
        while (task := self.app.keys._task) is not None and not task.done():
            _, late = await asyncio.wait([task], timeout=LIMIT)
            assert not late, f"the keys were never handled:\n{self.screen}"
        await self.pilot.pause(0)

    async def rest(self) -> None:
        """Wait until generation has ended and the screen is drawn."""
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
            assert asyncio.get_running_loop().time() < end, f"timeout: {what}:\n{self.screen}\n{self.notices}"
            await asyncio.sleep(0.01)
        await self.pilot.pause(0)


def press(app: App[Any], *keys: str) -> None:
    """Press keys without waiting.  Strings that are not key names are typed character by character."""
    for key in keys:
        for each in [key] if key in set(Keys) else key:
            app.post_message(_key(each))


def _key(name: str) -> Key:
    """Return the event of a key, given by its name or its character."""
    name = _character_to_key(name) if len(name) == 1 else name
    try:
        return Key(name, unicodedata.lookup(_get_unicode_name_from_key(REPLACED_KEYS.get(name, name))))
    except KeyError:
        return Key(name, name if len(name) == 1 else None)


@asynccontextmanager
async def starting(
    app: ChatApp, size: tuple[int, int] = (80, 24), *, notifications: bool = False
) -> AsyncIterator[Chat]:
    """Run an app that has just started."""
    async with app.run_test(size=size, notifications=notifications) as pilot:
        try:
            yield Chat(app, pilot)
        except BaseException:  # a reply that waits for the test would hide the failure
            if app._chat.turn is not None:
                app._chat.turn.stop()
            raise
    app.end()


@asynccontextmanager
async def chatting(
    built: Setup, size: tuple[int, int] = (80, 24), *, notifications: bool = False
) -> AsyncIterator[Chat]:
    """Run an app whose model is loaded; ``notifications`` draws them."""
    async with starting(ChatApp(built), size, notifications=notifications) as chat:
        if isinstance(built.store, AppStore):
            built.store.watched = True
        await chat.until(lambda: chat.app._chat.models.state == "loaded", "a model")
        await chat.rest()
        yield chat
        if isinstance(built.store, AppStore):
            built.store.watched = False


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test with a time limit of several times `LIMIT`."""
    asyncio.run(asyncio.wait_for(test, 4 * LIMIT))
