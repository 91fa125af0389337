"""The scrollable list of messages on the current path."""

from __future__ import annotations

import asyncio

from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from localllm.tui.chat.context import window_of
from localllm.tui.chat.conversation import Conversation
from localllm.tui.commands import Match
from localllm.tui.text import SELECT_KEY
from localllm.tui.widgets.message import MessageView, Place

#: Number of messages drawn at first, and added each time the user requests earlier messages.
MAX_DRAWN = 30

#: Interval in seconds between checks of a match's position, and maximum number of checks until it is stable.
_LAYOUT_SECONDS = 0.03
_MAX_LOOKS = 30

WELCOME = f"""\
Type a message, and press Enter.

/ starts a command: /help lists them; Ctrl+P finds them
@ attaches a file or a folder: @notes.txt
{SELECT_KEY} selects a message: to edit, regenerate, branch or copy it\
"""


class Transcript(VerticalScroll, can_focus=False):
    """The messages. The view follows the end until the user scrolls up."""

    def __init__(self) -> None:
        super().__init__()
        self._places: list[Place] = []
        self._n_drawn = MAX_DRAWN
        self._conversation: str | None = None
        self._match: Match | None = None  # the match on the screen
        # Several tasks may draw, and drawing awaits widgets.
        self._drawing = asyncio.Lock()

    @property
    def views(self) -> list[MessageView]:
        return [child for child in self.children if isinstance(child, MessageView)]

    def view(self, id_: str) -> MessageView | None:
        """Return the view of a message, or None if it is not drawn."""
        return next((view for view in self.views if view.message.id == id_), None)

    def on_mount(self) -> None:
        self.anchor()

    async def show(self, conversation: Conversation, *, streaming: str | None = None, writer: str = "") -> None:
        """Draw the path. Reply ``streaming`` is about to be written by the model named ``writer``."""
        async with self._drawing:
            if conversation.id != self._conversation:
                self._conversation, self._n_drawn = conversation.id, MAX_DRAWN
                await self.remove_children()
            self._places = _places(conversation)
            await self._draw(streaming, writer)

    async def _draw(self, streaming: str | None, writer: str) -> None:
        drawn = {position.message.id: position for position in self._places[-self._n_drawn :]}
        with self.app.batch_update():
            for view in self.views:
                if view.message.id not in drawn:
                    await view.remove()
            views = {view.message.id: view for view in self.views}
            for id_, view in views.items():
                view.show(drawn[id_])
            await self._draw_notices(len(self._places) - len(drawn))
            # Both paths share their start, so kept views are contiguous. New views are before or after them.
            first = next(iter(views.values()), None)
            new = []
            for id_, position in drawn.items():
                if id_ in views:
                    first = None
                    continue
                new.append(MessageView(position, is_streaming=id_ == streaming))
                await self.mount(new[-1], before=first)
        for view in new[::-1]:  # from the visible end up, because long messages take time
            await view.fill()
        written = None if streaming is None else self.view(streaming)
        if written is not None:
            written.begin(writer)

    async def _draw_notices(self, n_earlier: int) -> None:
        await self.query(".note").remove()
        if not self._places:
            await self.mount(Static(Content(WELCOME), classes="note welcome"))
        elif n_earlier:
            text = f"[@click=screen.show_earlier]{n_earlier:,} earlier messages: Home shows more[/]"
            await self.mount(Static(Content.from_markup(text), classes="note earlier"), before=0)

    async def show_earlier(self, conversation: Conversation) -> None:
        """Draw more of the earlier messages, if there are any."""
        if len(self._places) > self._n_drawn:
            self.release_anchor()
            self._n_drawn += MAX_DRAWN
            await self.show(conversation)

    async def show_match(self, conversation: Conversation, text: str, match: Match | None) -> None:
        """Scroll to a match of ``text`` and mark its block. If ``match`` is None, only remove the mark."""
        self.query(".match").remove_class("match")
        self._match = match
        if match is None:
            return
        while (view := self.view(match.id)) is None and len(self._places) > self._n_drawn:
            await self.show_earlier(conversation)
        if view is None:
            return
        self.release_anchor()
        tops: list[int] = []
        # New blocks move until the layout is complete.
        while len(tops) < _MAX_LOOKS and (len(set(tops[-3:])) != 1 or len(tops) < 3):
            refreshed = asyncio.Event()
            if not self.call_after_refresh(refreshed.set):  # the chat was closed
                return
            await refreshed.wait()
            await asyncio.sleep(_LAYOUT_SECONDS)
            if not view.is_attached or self._match is not match:
                return
            block, line = view.locate(text, match.number)
            block.add_class("match")
            tops.append(block.region.y - self.region.y + self.scroll_offset.y + line)
            self.scroll_to(y=max(0, tops[-1] - self.size.height // 3), animate=False, immediate=True)


def _places(conversation: Conversation) -> list[Place]:
    path = conversation.path()
    window = window_of(path)
    places = []
    for i, message in enumerate(path):
        divider = ""
        if window is not None and window.first == message.id and i:
            divider = f"↑ {i:,} message{'s' * (i != 1)} that the model no longer gets"
            divider += ", replaced by a summary" if window.summary else ""
        places.append(Place(message, i + 1, conversation.branch_of(message.id), divider, i == len(path) - 1))
    return places
