"""The terminal chat: a Textual app on any model."""

from __future__ import annotations

import asyncio
import codecs
import gc
import signal
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, cast

from rich.segment import Segment
from textual.color import Color
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.filter import LineFilter
from textual.keys import Keys
from textual.theme import Theme

from localllm.errors import UsageError
from localllm.tui.base_app import BaseApp
from localllm.tui.chat.conversation import Conversation
from localllm.tui.chat.session import ChatSession
from localllm.tui.commands import PALETTE, Command
from localllm.tui.screens.chat import ChatScreen
from localllm.tui.screens.models import ModelLoader
from localllm.tui.setup import Setup
from localllm.tui.text import without_controls

#: Seconds after which a thread that computes has to let the one that draws go on; by default 0.005.
_SWITCH_SECONDS = 0.001
#: Collections of younger garbage before one of all, which takes a tenth of a second where much is drawn; else 10.
_COLLECTIONS = 300


#: Of each colour the dark one and the light one.
_COLOURS = {
    "primary": ("#7aa2f7", "#2e5aac"),
    "secondary": ("#9d7cd8", "#7847bd"),
    "accent": ("#e0af68", "#96631a"),
    "warning": ("#e0af68", "#96631a"),
    "error": ("#f7768e", "#b3304f"),
    "success": ("#9ece6a", "#40731b"),
    "foreground": ("#d5d9e8", "#24283b"),
    "background": ("#16161e", "#fafafa"),
    "surface": ("#1d1e29", "#f0f1f5"),
    "panel": ("#262837", "#e3e5ec"),
}
THEMES = [
    Theme(name, dark=i == 0, **dict[str, Any]((colour, pair[i]) for colour, pair in _COLOURS.items()))
    for i, name in enumerate(("dark", "light"))
]


class ControlFilter(LineFilter):
    """Keeps control characters from the terminal, whatever widget draws them: editors show texts as they are.

    They take no width in a line, so that leaving them out moves nothing.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [s if s.control else s._replace(text=without_controls(s.text)) for s in segments]


class CommandsProvider(Provider):
    """The command palette: finds commands by their title and by what they do."""

    async def discover(self) -> Hits:
        for command in PALETTE:
            yield DiscoveryHit(command.title, self._runner(command), help=self._help(command))

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for command in PALETTE:
            text = f"{command.title} /{command.name}"
            score = max(matcher.match(text), 0.8 * matcher.match(command.help))
            if score > 0:
                yield Hit(score, matcher.highlight(text), self._runner(command), text=text, help=self._help(command))

    def _runner(self, command: Command) -> partial[None]:
        return partial(cast(ChatScreen, self.screen).run_command, f"/{command.name}")

    def _help(self, command: Command) -> str:
        return command.help_and_key(cast(ChatApp, self.app).setup.keys)


class ChatApp(BaseApp):
    """The app; `run` runs it."""

    TITLE = "localllm"
    CSS_PATH = "chat.tcss"
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {CommandsProvider}

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        for theme in THEMES:
            self.register_theme(theme)
        self._filters.append(ControlFilter())
        self.theme = setup.theme if setup.theme in self.available_themes else "dark"
        self.models = ModelLoader(self)
        self._chat = ChatScreen(setup, self.models, setup.conversation)
        self.set_keymap(dict(setup.keys))
        self._is_warned = False

    @property
    def session(self) -> ChatSession:
        """The chat that is shown."""
        return self._chat.session

    @property
    def sessions(self) -> list[ChatSession]:
        """The chats that were open and could not be saved, and those that are open; the one that is shown is last."""
        chats = sorted(self.models.chats, key=lambda chat: chat is self._chat)
        return [session for chat in chats for session in (*chat.unsaved, chat.session)]

    async def on_mount(self) -> None:
        self.install_screen(self._chat, "1")
        self._chat.seen.set()
        await self.push_screen(self._chat)
        # Windows' loops, and those of threads, take no signals.
        with suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._terminated)

    async def open_tab(self, conversation: Conversation) -> None:
        """Opens a chat beside those that are open, and shows it."""
        chat = ChatScreen(self.setup, self.models, conversation)
        self.install_screen(chat, uuid.uuid4().hex)
        await self.show_tab(len(self.models.chats) - 1)

    async def show_tab(self, place: int) -> None:
        """Shows another one of the chats that are open."""
        chat = self.models.chats[place]
        if chat is not self._chat:
            self._chat.seen.clear()
            self._chat = chat
            await self.switch_screen(chat)
            chat.seen.set()
            chat.draw_heading()
            chat.set_focus(chat.composer)

    async def close_tab(self) -> None:
        """Closes the chat that is shown, and shows the one beside it.  Raises UsageError if there is no other."""
        chat, chats = self._chat, self.models.chats
        if len(chats) == 1:
            raise UsageError(f"this is the only chat that is open: {self.key_of('quit')} quits")
        await chat.end_turn()
        place = chats.index(chat)
        await self.show_tab(place - 1 if place else 1)
        chats.remove(chat)
        self._chat.unsaved += [*chat.unsaved, chat.session]
        self.uninstall_screen(chat)
        await chat.remove()
        self._chat.draw_heading()
        await self._chat.mark_open()

    def _terminated(self) -> None:
        """Quits, so that the terminal is left as it was; at once, should it be asked again."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        self.spawn(self._chat.quit(), group="quit")

    async def action_quit(self) -> None:
        """Ctrl+Q."""
        self.spawn(self._chat.quit(), group="quit")

    def action_help_quit(self) -> None:
        """Ctrl+C, where nothing is selected that could be copied: stops a reply; a second one quits."""
        turn = self._chat.turn
        if turn is not None and not turn.is_stopped:
            turn.stop()
            self.notify("stopped: Ctrl+C again quits")
        elif turn is None and self._chat.composer.text.strip() and not self._is_warned:
            self._is_warned = True
            self.notify("Ctrl+C again quits; the message that you are typing would be lost", severity="warning")
            self.set_timer(3.0, partial(setattr, self, "_is_warned", False))
        else:
            self.spawn(self._chat.quit(), group="quit")

    def end(self) -> None:
        """Lets the threads end, and closes the model."""
        super().end()
        gc.unfreeze()
        if self.models.model is not None:
            self.models.model.close()


def run(setup: Setup, sessions: list[ChatSession]) -> int:
    """Runs the chat in the terminal; returns the exit code, and puts the chats that were open into ``sessions``."""
    app = ChatApp(setup)
    _teach_alt_enter()
    take_any_bytes()
    with responsive(), _warnings_shown(app):
        code = app.run()
    app.end()
    sessions += app.sessions
    return app.return_code or code or 0


@contextmanager
def responsive() -> Iterator[None]:
    """Lets the thread that draws have its turn soon: while others compute, and before all garbage is collected."""
    before, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.set_threshold(*thresholds[:2], _COLLECTIONS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.set_threshold(*thresholds)


@contextmanager
def _warnings_shown(app: BaseApp) -> Iterator[None]:
    """Shows warnings as notifications, where they would be written over the screen."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if app.is_running:
            app.call_later(partial(app.notify, str(message), severity="warning"))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def take_any_bytes() -> None:
    """Has Textual read bytes that are not UTF-8 as U+FFFD: one that is pasted would end the app with an error."""
    try:
        from textual.drivers import linux_driver
    except ImportError:  # Windows, whose consoles give characters
        return
    if hasattr(linux_driver, "getincrementaldecoder"):
        tolerant = partial(codecs.getincrementaldecoder("utf-8"), errors="replace")
        vars(linux_driver)["getincrementaldecoder"] = lambda encoding: tolerant


def _teach_alt_enter() -> None:
    """Has Textual know Alt+Enter in terminals without newer protocols: it would take it for Enter, and send."""
    try:
        from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
    except ImportError:  # another version: Ctrl+J is there
        return
    if isinstance(ANSI_SEQUENCES_KEYS, dict):
        ANSI_SEQUENCES_KEYS.setdefault("\x1b\r", (Keys.ControlJ,))
