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
from localllm.tui.commands import PALETTE, SlashCommand
from localllm.tui.screens.chat import ChatScreen
from localllm.tui.screens.models import ModelLoader
from localllm.tui.setup import Setup
from localllm.tui.text import without_controls

#: Interpreter switch interval in seconds (Python's default is 0.005). A short interval keeps drawing responsive
#: while other threads compute.
_SWITCH_SECONDS = 0.001
#: Threshold of the garbage collector's oldest generation (Python's default is 10). A full collection takes about
#: 0.1 s when many widgets exist.
_COLLECTIONS = 300

#: Colour names with their values in the dark and in the light theme.
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
    """Removes control characters from all output, because text editors draw them unchanged.

    Control characters have no width, so the layout of a line does not change.
    """

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [s if s.control else s._replace(text=without_controls(s.text)) for s in segments]


class CommandsProvider(Provider):
    """The command palette: searches commands by title and by help text."""

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

    def _runner(self, command: SlashCommand) -> partial[None]:
        return partial(cast(ChatScreen, self.screen).run_command, f"/{command.name}")

    def _help(self, command: SlashCommand) -> str:
        return command.help_and_key(cast(ChatApp, self.app).setup.keys)


class ChatApp(BaseApp):
    """The chat application. Use `run` to start it."""

    TITLE = "localllm"
    CSS_PATH = "chat.tcss"
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {CommandsProvider}

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        for theme in THEMES:
            self.register_theme(theme)
        self._filters.append(ControlFilter())
        self.theme = setup.theme if setup.theme in self.available_themes else "dark"
        self.models: ModelLoader[ChatScreen] = ModelLoader(self)
        self._chat = ChatScreen(setup, self.models, setup.conversation)
        self.set_keymap(dict(setup.keys))
        self._is_warned = False

    @property
    def session(self) -> ChatSession:
        return self._chat.session

    @property
    def sessions(self) -> list[ChatSession]:
        """Sessions of closed chats that could not be saved, then of open chats. The visible chat is last."""
        chats = sorted(self.models.chats, key=lambda chat: chat is self._chat)
        return [session for chat in chats for session in (*chat.unsaved, chat.session)]

    async def on_mount(self) -> None:
        self.install_screen(self._chat, "1")
        self._chat.seen.set()
        await self.push_screen(self._chat)
        # Event loops on Windows, and loops outside the main thread, do not support signal handlers.
        with suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._terminated)

    async def open_tab(self, conversation: Conversation) -> None:
        chat = ChatScreen(self.setup, self.models, conversation)
        self.install_screen(chat, uuid.uuid4().hex)
        await self.show_tab(len(self.models.chats) - 1)

    async def show_tab(self, index: int) -> None:
        chat = self.models.chats[index]
        if chat is not self._chat:
            self._chat.seen.clear()
            self._chat = chat
            await self.switch_screen(chat)
            chat.seen.set()
            chat.draw_heading()
            chat.set_focus(chat.composer)

    async def close_tab(self) -> None:
        chat, chats = self._chat, self.models.chats
        if len(chats) == 1:
            raise UsageError(f"this is the only open chat: {self.key_of('quit')} quits")
        await chat.end_turn()
        index = chats.index(chat)
        await self.show_tab(index - 1 if index else 1)
        chats.remove(chat)
        self._chat.unsaved += [*chat.unsaved, chat.session]
        self.uninstall_screen(chat)
        await chat.remove()
        self._chat.draw_heading()
        await self._chat.mark_open()

    def _terminated(self) -> None:
        """Quit and restore the terminal. A second SIGTERM ends the process at once."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        self.spawn(self._chat.quit(), group="quit")

    async def action_quit(self) -> None:
        self.spawn(self._chat.quit(), group="quit")

    def action_help_quit(self) -> None:
        """Handle Ctrl+C when no text is selected: stop the reply, or quit. Warn first if a draft would be lost."""
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
        """Wait for the chat thread, then close the model."""
        super().end()
        gc.unfreeze()
        if self.models.model is not None:
            self.models.model.close()


def run(setup: Setup, sessions: list[ChatSession]) -> int:
    """Run the chat in the terminal and return the exit code. The open sessions are appended to ``sessions``."""
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
    """Keep drawing responsive: switch threads more often, and run full garbage collections less often."""
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
    """Show warnings as notifications, because text on stderr would overwrite the screen."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if app.is_running:
            app.call_later(partial(app.notify, str(message), severity="warning"))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def take_any_bytes() -> None:
    """Make Textual decode invalid UTF-8 as U+FFFD. Otherwise a pasted invalid byte would crash the app."""
    try:
        from textual.drivers import linux_driver
    except ImportError:  # Windows consoles deliver characters, not bytes
        return
    if hasattr(linux_driver, "getincrementaldecoder"):
        tolerant = partial(codecs.getincrementaldecoder("utf-8"), errors="replace")
        vars(linux_driver)["getincrementaldecoder"] = lambda encoding: tolerant


def _teach_alt_enter() -> None:
    """Register Alt+Enter as a newline for terminals without newer protocols. Textual would read it as Enter."""
    try:
        from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
    except ImportError:  # another version of Textual: Ctrl+J still works
        return
    if isinstance(ANSI_SEQUENCES_KEYS, dict):
        ANSI_SEQUENCES_KEYS.setdefault("\x1b\r", (Keys.ControlJ,))
