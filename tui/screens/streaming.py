"""Turns whose text is generated on one thread and shown on another: the screen polls a queue of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from localllm.tui.chat import events
from localllm.tui.chat.context import name_of
from localllm.tui.chat.events import Event, EventQueue, Turn
from localllm.tui.chat.session import ChatSession
from localllm.tui.widgets.message import MessageView

if TYPE_CHECKING:
    from localllm.tui.screens.chat import ChatScreen

#: Minimum interval in seconds between reads of the queue.
PERIOD = 1 / 20
#: If drawing was slow, the next pause is this many times the drawing time, so that keys are handled.
_REST = 3.0
#: Maximum interval in seconds between reads of the queue.
_LONGEST = 0.25
#: No progress is shown for prompts with fewer tokens.
_SHORT_PROMPT = 64


class Draft(NamedTuple):
    """A message as the user typed it, and the id of the message that it replaces."""

    text: str
    replaced: str | None


class StreamedTurn(Turn):
    """A turn that queues its events for the screen."""

    def __init__(self, start: Callable[[Turn], None], draft: Draft | None = None) -> None:
        """``start`` is a method of a `localllm.tui.chat.session.ChatSession`."""
        self._queue = EventQueue()
        super().__init__(self._queue.put)
        self.draft = draft  # the sent draft; restored to the editor if it never became a message
        self.has_ended = False  # whether generation has ended; queued events might not be drawn yet
        self.error: BaseException | None = None  # the exception that ended the turn, or None
        self.full: events.ContextFull | None = None  # the last event if the turn ended because the context is full
        self.is_drawn = asyncio.Event()  # set when the message and an empty reply are on the screen
        self._start = start
        self._view: MessageView | None = None
        self._summary_words = 0

    def run(self) -> None:
        """Generate the reply, on the calling thread."""
        try:
            self._start(self)
        except BaseException as error:  # the screen reports it
            self.error = error
        self.has_ended = True

    async def follow(self, screen: ChatScreen, session: ChatSession) -> None:
        """Show events until the turn ends."""
        status = screen.status
        status.change(activity="waiting for the model", progress=None)
        pause, has_ended = PERIOD, False
        while not has_ended:
            before = time.monotonic()
            await asyncio.sleep(pause)
            # The delay of the loop is the time spent on drawing and on keys.
            late = max(0.0, time.monotonic() - before - pause)
            pause = min(PERIOD + _REST * late, _LONGEST)
            has_ended = self.has_ended
            for event in self._queue.take():
                await self._show(event, screen, session)
            if (stats := session.live) is not None:
                status.change(stats=stats, meter=session.meter())
        await self._finish(session)
        status.change(activity="", progress=None)

    async def _finish(self, session: ChatSession) -> None:
        """Draw the final reply. This also covers failed turns, which emit no `Finished` event."""
        view, self._view = self._view, None
        if view is not None and (message := session.conversation.get(view.message.id)) is not None:
            await view.finish(message)

    async def _show(self, event: Event, screen: ChatScreen, session: ChatSession) -> None:
        status, transcript = screen.status, screen.transcript
        if isinstance(event, events.Delta):
            status.change(activity="thinking" if event.thinking else "writing", progress=None)
            if self._view is not None:
                await self._view.write(event.text, thinking=event.thinking)
        elif isinstance(event, events.Prefill):
            if event.total >= _SHORT_PROMPT and event.done < event.total:
                status.change(activity="reading the prompt", progress=event.done / event.total)
        elif isinstance(event, events.Started):
            writer = "" if session.model is None else name_of(session.model)
            await transcript.show(session.conversation, streaming=event.id, writer=writer)
            self._view = transcript.view(event.id)
            transcript.anchor()
            self.is_drawn.set()
        elif isinstance(event, events.Finished):
            await self._finish(session)
        elif isinstance(event, events.Summarising):
            self._summary_words += len(event.text.split())
            status.change(activity=f"summarising: {self._summary_words:,} words")
        elif isinstance(event, events.ContextTrimmed):
            status.change(activity="")
        elif isinstance(event, events.ToolApprovalRequest):
            status.change(activity="a tool waits for your answer")
            screen.ask_for_tool(event)
        elif isinstance(event, events.ToolCallsDone):
            status.change(activity="using tools")
            if (view := transcript.view(event.message.id)) is not None:
                await view.finish(event.message)
        elif isinstance(event, events.ChatWarning):
            screen.app.notify(event.text, severity="warning")
        elif isinstance(event, events.ContextFull):
            self.full = event
