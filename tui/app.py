"""The terminal chat: a Textual app on any model."""

from __future__ import annotations

import asyncio
import codecs
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual.command import Provider
from textual.keys import Keys

from localllm.tui.base_app import BaseApp, unfreeze_gc_heap
from localllm.tui.chat.conversation import Conversation
from localllm.tui.launch import setup_of
from localllm.tui.palette import CommandsProvider
from localllm.tui.screens.chat import ChatScreen
from localllm.tui.setup import Setup
from localllm.tui.theme import THEMES

if TYPE_CHECKING:
    from localllm.tui.launch import Launch

#: Seconds after which a thread that computes has to let the one that draws go on; by default 0.005.
_SWITCH_SECONDS = 0.001


class ChatApp(BaseApp):
    """The app; `run` runs it."""

    TITLE = "localllm"
    CSS_PATH = "chat.tcss"
    COMMANDS: ClassVar[set[type[Provider] | Callable[[], type[Provider]]]] = {CommandsProvider}

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = setup.theme if setup.theme in self.available_themes else "dark"
        self._chat = ChatScreen(setup)
        self._is_warned = False

    @property
    def conversation(self) -> Conversation:
        """The chat that is open."""
        return self._chat.session.conversation

    async def on_mount(self) -> None:
        await self.push_screen(self._chat)
        # Windows' loops, and those of threads, take no signals.
        with suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._terminated)

    def _terminated(self) -> None:
        """Quits, so that the terminal is left as it was; at once, should it be asked again."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        self.spawn(self._chat.quit(), group="quit")

    async def action_quit(self) -> None:
        """Ctrl+Q."""
        self.spawn(self._chat.quit(), group="quit")

    def action_help_quit(self) -> None:
        """Ctrl+C, where nothing is selected that could be copied."""
        if self._chat.composer.text.strip() and not self._is_warned:
            self._is_warned = True
            self.notify("Ctrl+C again quits; the message that you are typing would be lost", severity="warning")
            self.set_timer(3.0, self._forget_warning)
        else:
            self.spawn(self._chat.quit(), group="quit")

    def _forget_warning(self) -> None:
        self._is_warned = False

    def end(self) -> None:
        """Lets the threads end, and closes the model."""
        self.end_threads()
        unfreeze_gc_heap()
        if self._chat.models.model is not None:
            self._chat.models.model.close()


def run(launch: Launch) -> int:
    """Runs the chat in the terminal; returns the exit code, and leaves in ``launch`` the chat that was open last."""
    app = ChatApp(setup_of(launch))
    code = run_app(app)
    launch.conversation = app.conversation
    return code


def run_app(app: ChatApp) -> int:
    """Runs an app in the terminal; returns the exit code."""
    _teach_alt_enter()
    take_any_bytes()
    with quick_switching(), _warnings_shown(app):
        code = app.run()
    app.end()
    return app.return_code or code or 0


@contextmanager
def quick_switching() -> Iterator[None]:
    """Lets the thread that draws have its turn soon while others compute."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


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
    """Has Textual read bytes that are no UTF-8 as U+FFFD: one that is pasted would end the app with an error."""
    try:
        from textual.drivers import linux_driver
    except ImportError:  # Windows, whose consoles give characters
        return
    if hasattr(linux_driver, "getincrementaldecoder"):
        vars(linux_driver)["getincrementaldecoder"] = _tolerant_decoder


def _tolerant_decoder(encoding: str) -> Callable[[], codecs.IncrementalDecoder]:
    return partial(codecs.getincrementaldecoder(encoding), errors="replace")


def _teach_alt_enter() -> None:
    """Has Textual know Alt+Enter in terminals without newer protocols: it would take it for Enter, and send."""
    try:
        from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
    except ImportError:  # another version: Ctrl+J is there
        return
    if isinstance(ANSI_SEQUENCES_KEYS, dict):
        ANSI_SEQUENCES_KEYS.setdefault("\x1b\r", (Keys.ControlJ,))
