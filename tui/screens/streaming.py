"""Turns whose text is generated on one thread and shown on another: a turn posts its events as Textual messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from textual.message import Message

from localllm.tui.chat import events
from localllm.tui.chat.events import Event, EventQueue, Turn

#: Minimum interval in seconds between reads of the queue.
PERIOD = 1 / 20
#: If drawing was slow, the next pause is this many times the drawing time, so that keys are handled.
_REST = 3.0
#: Maximum interval in seconds between reads of the queue.
_LONGEST = 0.25


class Draft(NamedTuple):
    """A message as the user typed it, and the id of the message that it replaces."""

    text: str
    replaced: str | None


class StreamedTurn(Turn):
    """A turn that queues its events, and posts them as messages."""

    @dataclass
    class Progressed(Message):
        """Events since the last message, possibly none. The turn continues once ``is_drawn`` is set."""

        turn: StreamedTurn
        events: list[Event]
        is_drawn: asyncio.Event = field(default_factory=asyncio.Event)

    def __init__(self, start: Callable[[Turn], None], draft: Draft | None = None) -> None:
        """``start`` is a method of a `localllm.tui.chat.session.ChatSession`."""
        self._queue = EventQueue()
        super().__init__(self._queue.put)
        self.draft = draft  # the sent draft; restored to the editor if it never became a message
        self.has_ended = False  # whether generation has ended; queued events might not be drawn yet
        self.error: BaseException | None = None  # the exception that ended the turn, or None
        self.full: events.ContextFull | None = None  # the last event if the turn ended because the context is full
        self.is_drawn = asyncio.Event()  # set when the message and an empty reply are on the screen
        self.n_summary_words = 0  # words of the summary so far
        self._start = start

    def run(self) -> None:
        try:
            self._start(self)
        except BaseException as error:  # the screen reports it
            self.error = error
        self.has_ended = True

    async def post_events(self, post: Callable[[Message], bool]) -> None:
        """Post `Progressed` messages until the turn has ended and its last events are drawn."""
        pause, has_ended = PERIOD, False
        while not has_ended:
            before = time.monotonic()
            await asyncio.sleep(pause)
            # The delay of the loop is the time spent on drawing and on keys.
            late = max(0.0, time.monotonic() - before - pause)
            pause = min(PERIOD + _REST * late, _LONGEST)
            has_ended = self.has_ended
            message = self.Progressed(self, self._queue.take())
            if post(message):
                await message.is_drawn.wait()
