"""Markdown that a model writes: it streams in, and its links are not to be trusted."""

from __future__ import annotations

from textual.message import Message
from textual.widgets import Markdown
from textual.widgets.markdown import MarkdownStream

from localllm.tui.control import shown
from localllm.tui.markdown import parser


class Reply(Markdown):
    """A reply's answer.

    While it streams, pieces go through Textual's stream, which joins those that come while it draws; at the end it is
    drawn once more as a whole, since a block may have been read otherwise before its end was there.
    """

    class Link(Message):
        """Somebody wants to open a link."""

        def __init__(self, address: str) -> None:
            super().__init__()
            self.address = address

    def __init__(self, text: str = "") -> None:
        super().__init__(shown(text), parser_factory=parser, open_links=False)
        self._stream: MarkdownStream | None = None

    async def write(self, text: str) -> None:
        """Adds a piece."""
        if self._stream is None:
            self._stream = Markdown.get_stream(self)
        await self._stream.write(shown(text))

    async def show(self, text: str) -> None:
        """Shows a whole text, and ends the stream if there is one."""
        if self._stream is not None:
            await self._stream.stop()
            self._stream = None
        await self.update(shown(text))

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        event.stop()
        self.post_message(self.Link(event.href))
