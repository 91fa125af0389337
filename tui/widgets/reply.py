"""A reply's text as Markdown, drawn in pieces of bounded cost: a model may write anything."""

from __future__ import annotations

import asyncio
import re
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from textual import events
from textual.content import Content
from textual.widgets import Markdown, Static
from textual.widgets.markdown import MarkdownBlock, MarkdownFence

from localllm.tui.text import escape_controls, parser

#: Minimum number of characters drawn at a time.
_PIECE_LENGTH = 500
#: Pause in seconds between two pieces, so that keys are handled.
_REST = 0.01
#: Blocks at the end of a reply whose heights are not fixed.
_UNSETTLED = 2
#: The beginning of a line without a letter.
_UNCERTAIN = re.compile(r"\W{0,80}+\d{0,9}+\W{0,80}+")
#: Maximum characters of a plain block, which ends at a line end if possible.
_BLOCK_LENGTH = 2000

#: Maximum characters of a highlighted code block.
_MAX_HIGHLIGHTED = 10_000
#: Maximum tokens of a list, table or quote that is drawn as Markdown. Each token may become a widget.
_MAX_TOKENS = 800
#: Maximum nesting of tokens; a list or quote takes one or two levels. The parser omits text nested deeper than 20.
_MAX_LEVEL = 16
#: Maximum number of blocks drawn as Markdown, and of characters in the last block.
_MAX_BLOCKS = 200
_MAX_LAST_BLOCK = 30_000


class CodeBlock(MarkdownFence):
    """A code block whose highlighting takes a bounded time."""

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        """Return the highlighted code, or plain code if it is long or its language is not named.

        Textual guesses a missing language with all lexers of pygments, which takes seconds.
        """
        if not language.strip() or len(code) > _MAX_HIGHLIGHTED:
            return Content(code).stylize_before("$text")
        return super().highlight(code, language.split()[0], ansi, dark)


def bounded_parser() -> MarkdownIt:
    """Return a parser that turns blocks which are expensive to draw into code blocks with the block's source."""
    markdown = parser()
    markdown.core.ruler.push("bounds", _bound_blocks)
    return markdown


def _bound_blocks(state: StateCore) -> None:
    tokens: list[Token] = []
    block: list[Token] = []
    for token in state.tokens:
        block.append(token)
        if token.level == 0 and token.nesting <= 0:
            tokens += [_source(block, state.src)] if _is_expensive(block) else block
            block = []
    state.tokens = tokens + block


def _is_expensive(block: list[Token]) -> bool:
    n_tokens = sum(1 + len(token.children or ()) for token in block)
    return n_tokens > _MAX_TOKENS or max(token.level for token in block) > _MAX_LEVEL


def _source(block: list[Token], text: str) -> Token:
    """Return a code block with the lines of ``text`` that a block was parsed from."""
    first, end = block[0].map or (0, 0)
    content = "".join(f"{line}\n" for line in text.split("\n")[first:end])
    return Token("code_block", "code", 0, content=content, map=[first, end], block=True)


def block_end(text: str) -> int:
    """Return the length of the first plain block of ``text``, 0 if the text is not longer than a block."""
    if len(text) <= _BLOCK_LENGTH:
        return 0
    return text.rfind("\n", 0, _BLOCK_LENGTH) + 1 or _BLOCK_LENGTH


class ReplyView(Markdown):
    """A reply's answer, drawn in pieces, between which keys are handled.

    After `_MAX_BLOCKS` blocks, or a block of `_MAX_LAST_BLOCK` characters, the rest is drawn as plain text.
    """

    BLOCKS: ClassVar[dict[str, type[MarkdownBlock]]] = {  # type: ignore[misc]  # Textual's own has no ClassVar
        **Markdown.BLOCKS,
        "fence": CodeBlock,
        "code_block": CodeBlock,
    }

    def __init__(self) -> None:
        super().__init__(parser_factory=bounded_parser, open_links=False)
        self._text = ""  # the text that is drawn
        self._held = ""
        self._plain_text = ""  # the text of the last plain block
        self._plain: Static | None = None  # the last plain block
        self._n_settled = self._width = 0

    async def write(self, text: str) -> None:
        """Add a piece, except the start of a line that may still become an item, a fence or a title."""
        text = self._held + escape_controls(text)
        line = text[text.rfind("\n") + 1 :]
        self._held = line if _UNCERTAIN.fullmatch(line) else ""
        await self._add(text.removesuffix(self._held))

    async def show(self, text: str) -> None:
        """Show a whole text.  Blocks of the current text stay if the new text starts with it."""
        text, self._held = escape_controls(text), ""
        is_odd = "]:" in text or len(text.split("\n")) != len(f"{text}.".splitlines())
        if text.startswith(self._text) and not is_odd:
            await self._add(text.removeprefix(self._text))
        else:
            self._text, self._plain, self._n_settled = "", None, 0
            await self.query(".plain").remove()
            await self.update("")
            await self._add(text)

    async def _add(self, text: str) -> None:
        self._text += text
        while text and self.is_attached:  # not after the message was removed
            n_last = self._last_block_length()
            if self._plain is None and (len(self.children) > _MAX_BLOCKS or n_last > _MAX_LAST_BLOCK):
                self._plain, self._plain_text = Static(classes="plain"), ""
                await self.mount(self._plain)
            self._settle()
            if self._plain is None:
                # The last block is parsed again with each piece.
                piece = _first_piece(text, max(_PIECE_LENGTH, n_last // 2))
                await self._append(piece)
            else:
                piece = text[: 4 * _BLOCK_LENGTH]
                await self._append_plain(piece)
            text = text[len(piece) :]
            await asyncio.sleep(_REST)

    async def _append(self, piece: str) -> None:
        last = self.children[-1] if self.children else None
        await self.append(piece)
        # A rule with :last-child would restyle all blocks for each new block.
        if last is not None:
            last.remove_class("last")
        if self.children:
            self.children[-1].add_class("last")

    async def _append_plain(self, piece: str) -> None:
        assert self._plain is not None
        self._plain_text += piece
        while end := block_end(self._plain_text):
            self._plain.update(Content(self._plain_text[:end].removesuffix("\n")))
            self._plain, self._plain_text = Static(classes="plain"), self._plain_text[end:]
            await self.mount(self._plain)
        self._plain.update(Content(self._plain_text.rstrip("\n")))

    def _last_block_length(self) -> int:
        last = self.children[-1] if self.children else None
        return len(getattr(last, "source", None) or "")

    def _settle(self) -> None:
        """Fix the heights of blocks that no longer change, because a new layout of hundreds of blocks is slow."""
        for block in self.children[self._n_settled : -_UNSETTLED]:
            if not block.outer_size.height:
                break
            block.styles.height = block.outer_size.height
            self._n_settled += 1

    def on_resize(self, event: events.Resize) -> None:
        if event.size.width != self._width:
            self._width, n, self._n_settled = event.size.width, self._n_settled, 0
            for block in self.children[:n]:
                block.styles.height = "auto"


def _first_piece(text: str, length: int) -> str:
    """Return at most ``length`` characters of ``text``, cut at the end of a Markdown block if possible."""
    if len(text) <= length:
        return text
    cuts = (text.rfind(mark, 0, length) + len(mark) for mark in ("\n\n", "\n", " "))
    return text[: next((cut for cut in cuts if cut > len(" ")), length)]
