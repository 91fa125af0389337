"""Base class of the chat app: background work, key buffering and error notifications."""

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
from localllm.parallel import in_thread
from localllm.shell import copy_text
from localllm.tui import commands
from localllm.tui.chat.conversation import Conversation
from localllm.tui.key_buffer import KeyBuffer, KeyHandled
from localllm.tui.setup import Setup
from localllm.tui.text import escape_controls, sentence

P = ParamSpec("P")
T = TypeVar("T")

#: Receives messages of the library that would otherwise be printed over the app's screen.
LOG = logging.getLogger("localllm.tui")

#: Minimum duration of a notification in seconds, and the reading speed in characters per second for longer ones.
_NOTICE_SECONDS = 3.5
_READ_PER_SECOND = 20
#: Maximum length of a notification in characters.
_MAX_NOTICE = 600


class BaseApp(App[int]):
    """A Textual app whose main thread only draws.

    Slow work (files, SQLite, tokenizing, planning) runs through `offload`, on one worker thread. Loading a model and
    generating text use separate threads.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.keys = KeyBuffer(self, super().on_event, self.notify_error)
        self._executor = ThreadPoolExecutor(1, "chat")

    def key_of(self, name: str) -> str:
        """Return the key of a command, or ``/name`` if it has no key."""
        return commands.find(name).shown_key(self.setup.keys) or f"/{name}"

    async def offload(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` on the worker thread, after all functions submitted earlier."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, partial(function, *args, **kwargs))

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` in a new daemon thread, which the app does not wait for on exit."""
        return await asyncio.wrap_future(in_thread(partial(function, *args, **kwargs)))

    def spawn(
        self, work: Coroutine[Any, Any, object] | Callable[[], Coroutine[Any, Any, object]], group: str = "default"
    ) -> Worker[object]:
        """Start a Textual worker. Exceptions become notifications instead of ending the app."""
        return self.run_worker(work, group=group, exit_on_error=False)

    def ask(self, work: Coroutine[Any, Any, object], group: str = "default") -> Worker[object]:
        """Start a worker that may open a dialog. Keys typed before the dialog opens are delivered to it."""
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
        """Show a notification for as long as it takes to read. Duplicates of a visible notification are dropped."""
        text = escape_controls(message)
        if len(text) > _MAX_NOTICE:  # a longer one would cover the screen
            text = f"{text[:_MAX_NOTICE]}…"
        if all(notification.message != text for notification in self._notifications):
            seconds = max(_NOTICE_SECONDS, len(text) / _READ_PER_SECOND)
            super().notify(text, **{**options, "timeout": options.get("timeout") or seconds, "markup": False})

    def notify_error(self, error: BaseException) -> None:
        LOG.debug("error shown as a notification", exc_info=error)
        self.notify(sentence(error), severity="warning" if isinstance(error, UsageError) else "error")

    def copy_to_clipboard(self, text: str) -> None:
        super().copy_to_clipboard(text)
        self.spawn(self.in_thread(copy_text, text))

    async def open_tab(self, conversation: Conversation) -> None:
        """Open a conversation in a new tab and show it."""
        raise NotImplementedError

    async def show_tab(self, index: int) -> None:
        """Show an open chat; ``index`` counts from 0."""
        raise NotImplementedError

    async def close_tab(self) -> None:
        """Close the visible chat and show its neighbour. Raises UsageError if only one chat is open."""
        raise NotImplementedError

    def end(self) -> None:
        """Wait for functions submitted to `offload`."""
        self._executor.shutdown()
