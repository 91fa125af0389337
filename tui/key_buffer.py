"""Buffering of keys that arrive faster than the screen changes: a key waits until the effect of the last one is done.

Textual delivers a key at once to the focused widget, while the previous key may still be opening or closing a dialog.
Letters typed for the dialog would then act as commands on the screen below it, or be lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from textual import events
from textual.app import App, ScreenStackError
from textual.message import Message
from textual.message_pump import MessagePump
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, TextArea
from textual.worker import Worker

Typed = events.Key | events.Paste

#: Interval in seconds between checks whether the screen is ready.
_PERIOD = 0.01
#: Number of checks (half a second in all) before Esc, Ctrl+C and Ctrl+Q interrupt work that has not finished. Checks
#: are counted instead of time, because the work also makes no progress while the app is blocked.
_PATIENCE = 50
_ENDING = ("escape", "ctrl+c", "ctrl+q")
#: Seconds until a key counts as handled even if its widget is still busy.
_TRIP_SECONDS = 5.0


class KeyHandled(Message, bubble=True):
    """Sent to the widget that received a key. When it bubbles up to the app, the widget has handled the key."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = asyncio.Event()


class KeyBuffer:
    """Delivers keys to an app in order."""

    def __init__(
        self, app: App[Any], give: Callable[[Typed], Awaitable[None]], fail: Callable[[Exception], None]
    ) -> None:
        """Deliver keys of ``app`` through ``give``, and report exceptions of key actions through ``fail``."""
        self._app = app
        self._give = give
        self._fail = fail
        self._waiting: deque[Typed] = deque()
        self._task: asyncio.Task[None] | None = None
        #: The editor that received the last key, if the key was a letter; and whether more letters followed directly.
        self._written_to: MessagePump | None = None
        self._was_followed = False
        #: Workers that will open a dialog or end soon, with the screen on which they were started.
        self._begun: list[tuple[Worker[object], Screen[Any]]] = []
        #: Screens that have received keys. If such a screen has no focus, the user clicked outside its widgets.
        self._known: WeakSet[Screen[Any]] = WeakSet()

    @property
    def is_done(self) -> bool:
        return not self._waiting and (self._task is None or self._task.done())

    async def take(self, event: Typed) -> None:
        """Deliver a key now, or queue it until the screen is ready."""
        if self.is_done and self._has_followed():
            self._task = asyncio.create_task(self._pass_on(await self._given(event)))
            return
        goes_on_writing = self._written_to is not None and self._app.focused is self._written_to
        if goes_on_writing and not self._waiting and _is_letter(event) and self._has_followed():
            self._was_followed = True
            await self._given(event)
            return
        self._waiting.append(event)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._pass_on(None))

    def wait_for(self, worker: Worker[object]) -> None:
        """Hold keys until ``worker`` has opened a screen above the current one, or has ended."""
        self._begun.append((worker, self._app.screen))

    def go_on(self) -> None:
        """Stop waiting for the workers passed to `wait_for`."""
        self._begun.clear()

    async def _pass_on(self, target: MessagePump | None) -> None:
        """Deliver the queued keys, after the previous key has been handled by ``target``."""
        while True:
            # A key's handler may post a message to another widget. The second round waits for that message.
            for _ in range(2):
                await _passed(target)
            if self._was_followed:
                self._was_followed = False
                continue
            if not self._waiting:
                return
            await self._follow()
            if not self._waiting:
                continue
            try:
                target = await self._given(self._waiting.popleft())
            except Exception as error:  # a failed key action must not block later keys
                self._fail(error)

    async def _follow(self) -> None:
        """Wait until the screen is ready for the next key.

        If that takes too long, Esc cancels the running work, and Ctrl+C and Ctrl+Q are delivered at once. Keys queued
        before them are discarded.
        """
        looks = 0
        while not self._has_followed():
            await asyncio.sleep(_PERIOD)
            looks += 1
            index = next((i for i, event in enumerate(self._waiting) if _key(event) in _ENDING), None)
            if index is None or looks < _PATIENCE or self._has_followed():
                continue
            for _ in range(index):
                self._waiting.popleft()
            if _key(self._waiting[0]) != "escape":
                return
            self._waiting.popleft()
            for worker, _ in self._begun:
                worker.cancel()
            self._begun.clear()

    async def _given(self, event: Typed) -> MessagePump:
        target = self._app.focused or self._app.screen
        self._known.add(self._app.screen)
        is_written = _is_letter(event) and isinstance(target, Input | TextArea)
        self._written_to = target if is_written else None
        await self._give(event)
        return target

    def _has_followed(self) -> bool:
        self._begun = [(worker, screen) for worker, screen in self._begun if not worker.is_finished]
        try:
            screen = self._app.screen
        except ScreenStackError:  # the app is starting or ending
            return False
        is_ready = screen in self._known or _is_ready(screen)
        return is_ready and all(begun_on is not screen for _, begun_on in self._begun)


def _key(event: Typed) -> str:
    return event.key if isinstance(event, events.Key) else ""


def _is_letter(event: Typed) -> bool:
    """Whether the key only inserts text. An editor handles such keys in order, so the next one need not wait."""
    return isinstance(event, events.Key) and event.is_printable


async def _passed(target: MessagePump | None) -> None:
    """Wait until ``target`` and its ancestors have handled all queued messages."""
    passed = KeyHandled()
    if target is None or not target.post_message(passed):
        return
    end = asyncio.get_running_loop().time() + _TRIP_SECONDS
    while target.is_running and target.app.is_running and asyncio.get_running_loop().time() < end:
        if passed.arrived.is_set():
            return
        with suppress(TimeoutError):  # check again: the widget may have been removed
            await asyncio.wait_for(passed.arrived.wait(), 0.5)


def _is_ready(screen: Screen[Any]) -> bool:
    """Whether keys would reach their widget. The app starts with an empty screen, and dialogs need time to mount."""
    if not screen.is_mounted:
        return False
    return screen.focused is not None or (isinstance(screen, ModalScreen) and not screen.focus_chain)
