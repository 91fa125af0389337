"""Markdown as models write it: how it is read, and the blocks of code in it."""

from __future__ import annotations

from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore


class CodeBlock(NamedTuple):
    """A block of code: what language it is in, as its fence says, and what it is."""

    language: str
    text: str


def parser() -> MarkdownIt:
    """A parser for replies: HTML is text, as it is not shown otherwise, and a line that ends has ended."""
    made = MarkdownIt("gfm-like", {"html": False})
    made.core.ruler.push("breaks", _keep_breaks)
    return made


def _keep_breaks(state: StateCore) -> None:
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"


def code_blocks(text: str) -> list[CodeBlock]:
    """The blocks of code in a text, first to last; one that was cut off is there as far as it came."""
    return [
        CodeBlock(token.info.split()[0] if token.info.split() else "", token.content)
        for token in parser().parse(text)
        if token.type in ("fence", "code_block")
    ]
