"""Follows a turn on the screen: some times a second it shows what has come."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from localllm.tui.base_app import BaseApp
from localllm.tui.chat.events import (
    ContextFull,
    Delta,
    Ended,
    Event,
    Finished,
    Prefill,
    RoomMade,
    Started,
    Summarising,
    Turn,
    Warned,
)
from localllm.tui.chat.session import ChatSession, Meter
from localllm.tui.widgets.message import MessageView
from localllm.tui.widgets.status import StatusLine
from localllm.tui.widgets.transcript import Transcript

#: Seconds between two looks into the inbox, at least.
PERIOD = 1 / 20
#: Where drawing takes long, this many times as long is left to keys and all else.
_REST = 3.0
#: Seconds between two looks, at most.
_LONGEST = 0.25
#: Tokens of a prompt below which its progress is not worth a word.
_SHORT_PROMPT = 64


class Outcome(NamedTuple):
    """How a turn ended: by an error, with a full context, or well."""

    error: BaseException | None
    full: ContextFull | None


class Follower:
    """Shows the turns of one session."""

    def __init__(self, app: BaseApp, session: ChatSession, transcript: Transcript, status: StatusLine) -> None:
        self._app = app
        self._session = session
        self._transcript = transcript
        self._status = status
        self._view: MessageView | None = None
        self._full: ContextFull | None = None
        self._summary_words = 0

    async def follow(self, turn: Turn) -> Outcome:
        """Shows a turn to its end."""
        pause = PERIOD
        self._status.change(activity="waiting for the model", progress=None)
        while True:
            before = time.monotonic()
            await asyncio.sleep(pause)
            # What the loop is late by it was drawing, or reading keys.
            late = max(0.0, time.monotonic() - before - pause)
            pause = min(PERIOD + _REST * late, _LONGEST)
            for event in turn.queue.take():
                if isinstance(event, Ended):
                    await self._finish()
                    self._status.change(activity="", progress=None)
                    return Outcome(event.error, self._full)
                await self._handle(event)
            self._show_counters()

    def _show_counters(self) -> None:
        stats, model = self._session.live, self._session.model
        if stats is not None and model is not None:
            self._status.change(stats=stats, meter=Meter(stats.total_tokens, model.info.context))

    async def _finish(self) -> None:
        """Draws the reply as it stays; one that failed has no `Finished`."""
        view, self._view = self._view, None
        if view is not None and (message := self._session.conversation.get(view.message.id)) is not None:
            await view.finish(message)

    async def _handle(self, event: Event) -> None:
        if isinstance(event, Delta):
            self._status.change(activity="thinking" if event.thinking else "writing", progress=None)
            if self._view is not None:
                await self._view.write(event.text, thinking=event.thinking)
        elif isinstance(event, Prefill):
            if event.total >= _SHORT_PROMPT and event.done < event.total:
                self._status.change(activity="reading the prompt", progress=event.done / event.total)
        elif isinstance(event, Started):
            model = self._session.model
            writer = "" if model is None else model.info.name or model.info.path.name
            await self._transcript.show(self._session.conversation, streaming=event.id, writer=writer)
            self._view = self._transcript.view(event.id)
            self._transcript.follow()
        elif isinstance(event, Finished):
            await self._finish()
        elif isinstance(event, Summarising):
            self._summary_words += len(event.text.split())
            self._status.change(activity=f"summarising: {self._summary_words:,} words")
        elif isinstance(event, RoomMade):
            self._summary_words = 0
            self._status.change(activity="")
        elif isinstance(event, Warned):
            self._app.notify(event.text, severity="warning")
        elif isinstance(event, ContextFull):
            self._full = event
