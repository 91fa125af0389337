"""Random actions, faster than the screen updates, compared with a model of the expected state.

Every typed word has a unique number: it must occur exactly once in the editor or in a message, in the order of
typing, for all keys.  LOCALLLM_RANDOM_STEPS and LOCALLLM_RANDOM_SEED allow longer runs.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from textual.events import Paste, Resize
from textual.geometry import Size

from localllm.tui import key_buffer
from localllm.tui.app import ChatApp
from localllm.tui.chat.conversation import Conversation
from localllm.tui.storage.chats import Store
from tests.helpers.chat_app import LIMIT, AppModel, Chat, Steps, setup, starting

STEPS = int(os.environ.get("LOCALLLM_RANDOM_STEPS", "60"))
SEED = int(os.environ.get("LOCALLLM_RANDOM_SEED", "1"))

#: The model's reply to every message.
REPLY = " ".join(f"r{i}" for i in range(40))

DIALOGS = ("f1", "ctrl+s", "ctrl+t", "ctrl+l", "ctrl+o", "ctrl+p")
SIZES = ((80, 24), (120, 40), (60, 12), (40, 20), (20, 5))


class Person:
    """The user and the expected state.

    Attributes:
        said: user messages that are certainly in the conversation.
        draft: the editor's text while ``loose`` is empty.
        loose: words that were sent and stopped at once: they are in a message or back in the editor.
        replying: whether a reply is certainly being generated.
        editing: whether the draft is an edit of the last message.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.said: list[str] = []
        self.draft = ""
        self.loose: list[str] = []
        self.replying = self.editing = self.is_sent = False
        self.system = ""
        self.gate = Steps()
        self.store = Store(None)
        self.conversation = Conversation()
        self.n_words = 0
        self.done: list[str] = []  # shown if the test fails

    # -- Actions -------------------------------------------------------------------------------------------------

    async def sit(self, steps: int) -> None:
        """Do this number of actions, in several sessions."""
        while steps > 0:
            at_once = min(steps, self.random.randint(20, 200))
            steps -= at_once
            async with self._program() as chat:
                for _ in range(at_once):
                    await self._act(chat)
                    if self.random.random() < 0.25:
                        await self._compare(chat)
                await self._quit(chat)

    @asynccontextmanager
    async def _program(self) -> AsyncIterator[Chat]:
        model = AppModel([], context=1_000_000, gate=self.gate)
        model.replies = _Endless()
        built = setup(model, self.store, conversation=self.conversation)
        async with starting(ChatApp(built), self.random.choice(SIZES)) as chat:
            yield chat

    @property
    def _last(self) -> str:
        return " ".join(self.done[-20:])

    async def _act(self, chat: Chat) -> None:
        word = self.random.choice(
            ["type"] * 8 + ["enter"] * 4 + ["escape"] * 3 + ["dialog", "resize", "paste"] * 2 + ["tab"]
        )
        if not self.loose:
            word = self.random.choice([word, word, word, "backspace", "more", "finish", "select", "new", "other"])
        if not self.loose and not self.replying and not self.editing:
            word = self.random.choice([word, word, word, "regenerate", "edit", "system"])
        self.done.append(word)
        await getattr(self, f"_{word}")(chat)

    def _word(self) -> str:
        self.n_words += 1
        return f"w{self.n_words} "

    def _write(self, word: str) -> None:
        if self.loose:
            self.loose += word.split()
        else:
            self.draft += word

    async def _type(self, chat: Chat) -> None:
        word = self._word()
        self._write(word)
        chat.hit(*word[:-1], "space")

    async def _paste(self, chat: Chat) -> None:
        word = self._word()
        self._write(word)
        chat.app.post_message(Paste(word))

    async def _backspace(self, chat: Chat) -> None:
        if self.draft:
            self.draft = self.draft[:-1]
            chat.hit("backspace")

    async def _enter(self, chat: Chat) -> None:
        chat.hit("enter")
        if self.loose or not self.draft.strip() or self.replying:
            return
        if self.editing:
            self.said.pop()
        self.said.append(self.draft)
        self.draft, self.editing = "", False
        self.replying = self.is_sent = True

    async def _escape(self, chat: Chat) -> None:
        chat.hit("escape")
        if self.is_sent and not self.loose:  # before the message was certainly visible
            self.loose = [*self.said.pop().split(), *self.draft.split()]
            self.draft, self.is_sent = "", False
        elif self.editing and not self.replying:
            self.draft, self.editing = "", False
        elif self.replying:
            await self._compare(chat)

    async def _dialog(self, chat: Chat) -> None:
        """Open a dialog, type into it, and close it."""
        chat.hit(self.random.choice(DIALOGS), *(["3"] * self.random.randint(0, 2)), "escape")

    async def _resize(self, chat: Chat) -> None:
        size = Size(*self.random.choice(SIZES))
        chat.app.post_message(Resize(size, size))

    async def _tab(self, chat: Chat) -> None:
        """Open another chat in a tab, type in both, and close it."""
        await self._compare(chat)
        first = chat.app._chat
        self._write(word := self._word())
        keys = ("f4", "z", "ctrl+pageup", *word[:-1], "space", "ctrl+pagedown", "backspace", "/close", "enter")
        chat.hit(*keys)
        await chat.until(lambda: len(chat.app.models.chats) == 1 and chat.app.screen is first, "the first tab")
        await self._compare(chat)

    async def _system(self, chat: Chat) -> None:
        self.system += "s"
        chat.hit("ctrl+s", "s", "ctrl+s")

    async def _select(self, chat: Chat) -> None:
        """Focus the messages, then return."""
        await self._compare(chat)
        if self.said:
            chat.hit("ctrl+up", "up", "i")

    async def _more(self, chat: Chat) -> None:
        """Let the model generate some tokens."""
        self.gate.allow(self.random.randint(1, 5))

    async def _finish(self, chat: Chat) -> None:
        """Let the model finish its reply."""
        await self._compare(chat)
        self.gate.set()
        await chat.rest()
        self.gate.clear()
        self.replying = False

    async def _regenerate(self, chat: Chat) -> None:
        await self._compare(chat)
        if self.said and not self.replying:
            chat.hit("ctrl+r")
            await self._compare(chat)

    async def _edit(self, chat: Chat) -> None:
        await self._compare(chat)
        if self.said and not self.replying and not self.draft and not self.editing:
            self.draft, self.editing = self.said[-1], True
            chat.hit("f2")

    async def _new(self, chat: Chat) -> None:
        """Start another chat; the draft and the messages are kept."""
        await self._compare(chat)
        if not self.editing:
            await self._leave(chat, [], "ctrl+n")

    async def _other(self, chat: Chat) -> None:
        """Open a chat found by its words."""
        await self._compare(chat)
        said = [message for message in self.said if message.strip()]
        if said and not self.editing:
            await self._leave(chat, [], "ctrl+n")
            await self._leave(chat, said, "ctrl+o", said[0].split()[0], "enter")

    async def _leave(self, chat: Chat, said: list[str], *keys: str) -> None:
        before = chat.app.session.conversation
        chat.hit(*keys)
        await chat.until(lambda: chat.app.session.conversation is not before, "another chat")
        self.said, self.replying = said, False
        await self._compare(chat)

    async def _quit(self, chat: Chat) -> None:
        if self.random.random() < 0.5:
            await self._compare(chat)
        chat.hit("ctrl+q")
        await chat.until(lambda: not chat.app.is_running, "the end")
        session = chat.app.session
        if len(session.conversation):
            assert session.saver.is_saved
            self.conversation = self.store.load(session.conversation.id)
        else:
            self.conversation = Conversation()
        # The last message may have returned to the editor and is lost with it.
        certain = [_plain(text) for text in self.said[: len(self.said) - self.is_sent]]
        kept = _said(self.conversation)
        assert kept[: len(certain)] == certain, self._last
        assert len(kept) == len(certain) or self.is_sent or self.loose, self._last
        self.said, self.draft, self.loose = [m.text for m in _asked(self.conversation)], "", []
        self.replying = self.editing = self.is_sent = False
        self.system = self.conversation.system

    # -- Checks ---------------------------------------------------------------------------------------------------

    async def _compare(self, chat: Chat) -> None:
        """Wait until all keys have taken effect, then check the state."""
        app = chat.app
        await chat._handled()
        keys = app.keys
        await chat.until(lambda: keys.is_done and keys._has_followed() and chat.model_is_settled, "quiet")
        assert app.screen is app._chat, self._last
        turn = app._chat.turn
        if turn is not None and not turn.is_stopped:
            await chat.until(lambda: _is_written(app.session.conversation) or app._chat.turn is not turn, "a reply")
        await chat.until(lambda: app._chat.turn is None or not app._chat.is_ending, "an end")
        await chat._handled()
        while self.gate._tokens.acquire(blocking=False):
            pass
        conversation = app.session.conversation
        said, draft = _said(conversation), _plain(app._chat.composer.message)
        if self.loose:
            assert said[: len(self.said)] == [_plain(text) for text in self.said], self._last
            words = [word for text in [*said[len(self.said) :], draft] for word in text.split()]
            assert sorted(words) == sorted(self.loose), self._last
        else:
            assert said == [_plain(text) for text in self.said], self._last
            assert draft == _plain(self.draft), self._last
        assert conversation.system == self.system, self._last
        for message in conversation.messages:
            assert message.role == "user" or REPLY.startswith(message.text), self._last
        self.said = [message.text for message in _asked(conversation)]
        self.draft, self.loose, self.is_sent = app._chat.composer.message, [], False
        self.replying = app._chat.turn is not None


class _Endless(list[str]):
    def __bool__(self) -> bool:
        return True

    def pop(self, index: object = None) -> str:
        return REPLY


def _asked(conversation: Conversation) -> list[object]:
    return [message for message in conversation.path() if message.role == "user"]


def _is_written(conversation: Conversation) -> bool:
    return conversation.leaf is not None and conversation.leaf.state == "streaming"


def _said(conversation: Conversation) -> list[str]:
    return [_plain(message.text) for message in _asked(conversation)]


def _plain(text: str) -> str:
    return " ".join(text.split())


def test_random_keys_are_never_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_buffer, "_PATIENCE", 100 * LIMIT)
    asyncio.run(Person(SEED).sit(STEPS))
