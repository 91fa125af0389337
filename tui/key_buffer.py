"""Keys that are typed faster than the screen follows: each waits till the one before has had its effect.

Textual hands a key on at once, to what has the focus then.  But what the key before it does may still be under way: a
dialog opens, or closes, and letters meant for its search would be commands to the screen below, or be lost.
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

#: Seconds between two looks at whether the screen has followed.
_PERIOD = 0.01
#: Looks, half a second of them, that keys which end something wait for what was begun before them.  No time: where
#: the app itself stood still, what was begun did so too.
_PATIENCE = 50
_ENDING = ("escape", "ctrl+c", "ctrl+q")
#: Seconds after which a key counts as handled, whatever the widget that it went to is doing.
_TRIP_SECONDS = 5.0


class KeyHandled(Message, bubble=True):
    """Follows a key from the widget that it went to up to the app: there, the key has been handled."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = asyncio.Event()


class KeyBuffer:
    """Gives keys to an app one after the other."""

    def __init__(
        self, app: App[Any], give: Callable[[Typed], Awaitable[None]], fail: Callable[[Exception], None]
    ) -> None:
        """Gives the keys of ``app`` to ``give``; an error of a key's action goes to ``fail``."""
        self._app = app
        self._give = give
        self._fail = fail
        self._waiting: deque[Typed] = deque()
        self._task: asyncio.Task[None] | None = None
        #: The editor that the last one went to, if it was a letter; and whether letters followed unawaited.
        self._written_to: MessagePump | None = None
        self._was_followed = False
        #: Work that opens a dialog or ends soon, and the screen on which it was begun.
        self._begun: list[tuple[Worker[object], Screen[Any]]] = []
        #: Screens that have taken keys: what has no focus there any more was clicked away.
        self._known: WeakSet[Screen[Any]] = WeakSet()

    @property
    def is_done(self) -> bool:
        """Whether all keys have been handled."""
        return not self._waiting and (self._task is None or self._task.done())

    async def take(self, event: Typed) -> None:
        """Hands a key on, now or when its turn has come."""
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
        """Lets keys wait till a worker has opened a screen above the one that is there now, or has ended."""
        self._begun.append((worker, self._app.screen))

    def go_on(self) -> None:
        """Lets keys wait for nothing any more that was begun."""
        self._begun.clear()

    async def _pass_on(self, target: MessagePump | None) -> None:
        """Hands on what waits, beginning when a key that went to ``target`` has been handled."""
        while True:
            # What a key does in a widget may be a message to another one: the second trip comes after it.
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
            except Exception as error:  # of an action; the keys after it are taken all the same
                self._fail(error)

    async def _follow(self) -> None:
        """Waits till the screen has followed, or somebody wants an end.

        Where what was begun takes its time, Esc ends it, and Ctrl+C and Ctrl+Q go through; what was typed for it
        before these goes with it.
        """
        looks = 0
        while not self._has_followed():
            await asyncio.sleep(_PERIOD)
            looks += 1
            place = next((i for i, event in enumerate(self._waiting) if _key(event) in _ENDING), None)
            if place is None or looks < _PATIENCE or self._has_followed():
                continue
            for _ in range(place):
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
        except ScreenStackError:  # the app begins, or ends
            return False
        is_ready = screen in self._known or _is_ready(screen)
        return is_ready and all(begun_on is not screen for _, begun_on in self._begun)


def _key(event: Typed) -> str:
    return event.key if isinstance(event, events.Key) else ""


def _is_letter(event: Typed) -> bool:
    """Whether an editor only writes it: the next letter need not wait then, as the editor takes both in turn."""
    return isinstance(event, events.Key) and event.is_printable


async def _passed(target: MessagePump | None) -> None:
    """Waits till what waits in a widget, and in those around it, has been handled."""
    passed = KeyHandled()
    if target is None or not target.post_message(passed):
        return
    end = asyncio.get_running_loop().time() + _TRIP_SECONDS
    while target.is_running and target.app.is_running and asyncio.get_running_loop().time() < end:
        if passed.arrived.is_set():
            return
        with suppress(TimeoutError):  # the widget may have gone meanwhile
            await asyncio.wait_for(passed.arrived.wait(), 0.5)


def _is_ready(screen: Screen[Any]) -> bool:
    """Whether keys reach what they are meant for: an app begins with an empty screen, and dialogs take their time."""
    if not screen.is_mounted:
        return False
    return screen.focused is not None or (isinstance(screen, ModalScreen) and not screen.focus_chain)
