"""What every screen needs of the app: work in threads, and a way to tell what went wrong."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

from textual import events
from textual.app import App
from textual.notifications import SeverityLevel
from textual.worker import Worker, WorkerState

from localllm.errors import UsageError
from localllm.tui.control import shown
from localllm.tui.failures import sentence
from localllm.tui.setup import Setup
from localllm.tui.typed_ahead import Passed, TypedAhead

P = ParamSpec("P")
T = TypeVar("T")

#: What the library would print on a terminal goes here, for this one is taken.
LOG = logging.getLogger("localllm.tui")

#: Notifications that are shown at once, at most.
_MOST_NOTICES = 2
#: Seconds that one stays, and how many characters of it people read in a second.
_NOTICE_SECONDS = 3.5
_READ_PER_SECOND = 20


class _Notice(NamedTuple):
    text: str
    severity: SeverityLevel
    end: float


class BaseApp(App[int]):
    """An app whose thread draws and does nothing else.

    Everything that may take its time (files, SQLite, tokenizing, planning) goes through `offload`, whose one thread
    does one thing after the other; loading a model and generating have threads of their own.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.typed_ahead = TypedAhead(self, super().on_event, self.tell)
        self._hands = ThreadPoolExecutor(1, "chat")
        self._notices: list[_Notice] = []
        self._will_notify = False

    async def offload(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function in a thread, after all that were given before it."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._hands, partial(function, *args, **kwargs))

    def spawn(self, work: Coroutine[Any, Any, object], group: str = "default") -> Worker[object]:
        """Has something done while the app goes on; what fails in it is told."""
        return self.run_worker(work, group=group, exit_on_error=False)

    def ask(self, work: Coroutine[Any, Any, object], group: str = "default") -> Worker[object]:
        """The same for what may open a dialog: keys that are typed ahead wait for that."""
        worker = self.spawn(work, group)
        self.typed_ahead.wait_for(worker)
        return worker

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key | events.Paste) and not event.is_forwarded:
            await self.typed_ahead.take(event)
        else:
            await super().on_event(event)

    def on_passed(self, event: Passed) -> None:
        event.arrived.set()

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        if event.state is WorkerState.ERROR and event.worker.error is not None:
            self.tell(event.worker.error)

    def tell(self, error: BaseException) -> None:
        """Says in a notification what went wrong."""
        LOG.debug("told to the user", exc_info=error)
        is_usage = isinstance(error, UsageError)
        self._tell(sentence(error), "warning" if is_usage else "error")

    def say(self, text: str, *, warning: bool = False) -> None:
        """Says something in a notification."""
        self._tell(shown(text), "warning" if warning else "information")

    def _tell(self, text: str, severity: SeverityLevel) -> None:
        """Shows a notification below the one before; those before that one go, and so does one that said the same."""
        now = time.monotonic()
        end = now + max(_NOTICE_SECONDS, len(text) / _READ_PER_SECOND)
        kept = [notice for notice in self._notices if notice.end > now and notice.text != text]
        self._notices = [*kept, _Notice(text, severity, end)][-_MOST_NOTICES:]
        # Notifications come by messages: what is cleared before these came would not be.
        if not self._will_notify:
            self._will_notify = self.call_later(self._notify)

    def _notify(self) -> None:
        self._will_notify = False
        self.clear_notifications()
        for screen in self.screen_stack:  # else what held them would keep its lines
            screen.query("ToastHolder").remove()
        now = time.monotonic()
        for notice in self._notices:
            seconds = max(1.0, notice.end - now)
            self.notify(notice.text, severity=notice.severity, timeout=seconds, markup=False)

    def end_threads(self) -> None:
        """Lets the thread of `offload` finish what it has begun."""
        self._hands.shutdown(wait=True, cancel_futures=False)
