"""The base of the app, as every screen needs it: work in threads, and a way to tell what went wrong."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from textual import events
from textual.app import App
from textual.worker import Worker, WorkerState

from localllm.errors import UsageError
from localllm.shell import copy_text
from localllm.tui import commands
from localllm.tui.chat.tools import in_thread
from localllm.tui.key_buffer import KeyBuffer, KeyHandled
from localllm.tui.setup import Setup
from localllm.tui.text import escape_controls, sentence

P = ParamSpec("P")
T = TypeVar("T")

#: What the library would print on a terminal goes here, for this one is taken.
LOG = logging.getLogger("localllm.tui")

#: Seconds that one stays, and how many characters of it people read in a second.
_NOTICE_SECONDS = 3.5
_READ_PER_SECOND = 20
#: Characters of a notification.
_MAX_NOTICE = 600


class BaseApp(App[int]):
    """An app whose thread draws and does nothing else.

    Everything that may take its time (files, SQLite, tokenizing, planning) goes through `offload`, whose one thread
    does one thing after the other; loading a model and generating have threads of their own.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.keys = KeyBuffer(self, super().on_event, self.notify_error)
        self._executor = ThreadPoolExecutor(1, "chat")

    def key_of(self, name: str) -> str:
        """How to call a command: its key, or its name where it has none."""
        return commands.find(name).shown_key(self.setup.keys) or f"/{name}"

    async def offload(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function in a thread, after all that were given before it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, partial(function, *args, **kwargs))

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function in a thread of its own, whose end nothing waits for when the app ends."""
        return await asyncio.wrap_future(in_thread(partial(function, *args, **kwargs)))

    def spawn(self, work: Coroutine[Any, Any, object], group: str = "default") -> Worker[object]:
        """Has something done while the app goes on; what fails in it is told."""
        return self.run_worker(work, group=group, exit_on_error=False)

    def ask(self, work: Coroutine[Any, Any, object], group: str = "default") -> Worker[object]:
        """The same for what may open a dialog: keys that are typed ahead wait for that."""
        worker = self.spawn(work, group)
        self.keys.wait_for(worker)
        return worker

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key | events.Paste) and not event.is_forwarded:
            await self.keys.take(event)
        else:
            await super().on_event(event)

    def on_key_handled(self, event: KeyHandled) -> None:
        event.arrived.set()

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        if event.state is WorkerState.ERROR and event.worker.error is not None:
            self.notify_error(event.worker.error)

    def notify(self, message: str, **options: Any) -> None:
        """Shows a notification, long enough to be read; not one that is there already."""
        text = escape_controls(message)
        if len(text) > _MAX_NOTICE:  # a longer one would cover the screen
            text = f"{text[:_MAX_NOTICE]}…"
        if all(other.message != text for other in self._notifications):
            seconds = max(_NOTICE_SECONDS, len(text) / _READ_PER_SECOND)
            super().notify(text, **{**options, "timeout": options.get("timeout") or seconds, "markup": False})

    def notify_error(self, error: BaseException) -> None:
        LOG.debug("told to the user", exc_info=error)
        self.notify(sentence(error), severity="warning" if isinstance(error, UsageError) else "error")

    def copy_to_clipboard(self, text: str) -> None:
        super().copy_to_clipboard(text)
        self.spawn(self.in_thread(copy_text, text))

    def end(self) -> None:
        """Lets the thread of `offload` finish what it has begun."""
        self._executor.shutdown()
