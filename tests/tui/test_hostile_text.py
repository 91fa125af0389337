"""Texts that are expensive to draw: drawing takes a bounded time and shows the whole text."""

from __future__ import annotations

import asyncio
import re

import pygments.lexers
import pytest

from localllm.tui.chat.conversation import CallRecord
from localllm.tui.text import code_blocks
from localllm.tui.widgets.reply import CodeBlock, ReplyView
from tests.helpers.chat_app import AppModel, chatting, setup, talk

N = 10_000

TEXTS = {
    "code without a language": "```\n" + "x = some_function(1, 2)\n" * (N // 24) + "```\n",
    "code of an unknown language": "```nosuch\n" + "x = some_function(1, 2)\n" * (N // 24) + "```\n",
    "an unclosed fence": "```python\n" + "x = some_function(1, 2)\n" * (N // 24),
    "indented code": "\n" + "    x = some_function(1, 2)\n" * (N // 28),
    "code in a line": "```json\n" + '{"a": [1, 2, 3]}, ' * (N // 18) + "\n```\n",
    "a line": "x" * N,
    "a long table": "| a | b | c |\n|---|---|---|\n" + "| 1 | 2 | 3 |\n" * (N // 14),
    "a wide table": "|" + " a |" * (N // 12) + "\n|" + "---|" * (N // 12) + "\n|" + " 1 |" * (N // 12) + "\n",
    "nested quotes": ">" * N + " deep\n",
    "nested lists": "\n".join("  " * i + "- item" for i in range(140)),
    "a long list": "- item\n" * (N // 7),
    "rules": "---\n\n" * (N // 5),
    "headings": "# a\n" * (N // 4),
    "fences": "```\na\n```\n" * (N // 10),
    "brackets": "[" * N,
    "links": "[a](b) " * (N // 7),
    "pictures": "![" * (N // 2),
    "stars": "*a **b " * (N // 7),
    "empty lines": "\n" * N,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
async def test_a_reply_is_drawn_in_a_bounded_time(text: str) -> None:
    async with chatting(setup(AppModel([text], context=N), conversation=talk("hello", "hi"))) as chat:
        reply = ReplyView()
        await chat.views[-1].mount(reply)
        await asyncio.wait_for(reply.show(text), 60)  # about a second
        assert len(list(reply.walk_children())) < 1000
        await asyncio.wait_for(reply.show(f"{text}\nthe end"), 60)


async def test_expensive_markdown_is_shown_as_source() -> None:
    text = "> " * 30 + "the deepest quote\n\n" + "".join(f"- item {i}\n" for i in range(500)) + "\nThe **end**."
    async with chatting(setup(AppModel(), conversation=talk("hello", text)), (100, 40)) as chat:
        await chat.rest()
        quote, items, end = chat.views[-1]._reply.children
        assert isinstance(quote, CodeBlock)
        assert quote.code.endswith("> the deepest quote")
        assert isinstance(items, CodeBlock)
        assert items.code.splitlines() == [f"- item {i}" for i in range(500)]
        assert str(end.render()) == "The end."  # type: ignore[attr-defined]


async def test_after_many_blocks_text_is_plain() -> None:
    text = "".join(f"Paragraph **{i}**.\n\n" for i in range(800))
    async with chatting(setup(AppModel(), conversation=talk("hello", "hi"))) as chat:
        reply = ReplyView()
        await chat.views[-1].mount(reply)
        for part in re.findall(r"[^!]{1,5000}", text):
            await reply.write(part)
        plain = "\n".join(str(block.render()) for block in reply.query(".plain"))  # type: ignore[attr-defined]
        assert "Paragraph **300**." in plain
        assert plain.endswith("Paragraph **799**.")
        assert len(reply.children) < 300
        await reply.show("another")
        assert [str(block.render()) for block in reply.children] == ["another"]  # type: ignore[attr-defined]


async def test_no_language_is_guessed_and_long_code_is_not_highlighted(monkeypatch: pytest.MonkeyPatch) -> None:
    def guess_lexer(text: str) -> None:
        raise AssertionError("the language must not be guessed")

    monkeypatch.setattr(pygments.lexers, "guess_lexer", guess_lexer)
    text = (
        "```\na = 1\n```\n\n``` \nb = 1\n```\n\n    c = 1\n\n```python x\nd = 1\n```\n\n```python\n"
        + "e = 1\n" * 3000
    )
    async with chatting(setup(AppModel(), conversation=talk("hello", text))) as chat:
        await chat.rest()
        blocks = list(chat.views[-1]._reply.query(CodeBlock))
        assert [block.code[0] for block in blocks] == list("abcde")
        assert [len(block._highlighted_code.spans) > 1 for block in blocks] == [False, False, False, True, False]


async def test_long_lines_of_code_wrap() -> None:
    text = "```python\nx = " + " + ".join(f"value_{i}" for i in range(60)) + "\n```"
    async with chatting(setup(AppModel(), conversation=talk("hello", text))) as chat:
        await chat.sees("value_59")
        assert "value_30" in chat.screen


async def test_a_long_message_and_a_long_result_are_folded() -> None:
    conversation = talk("word " * 20_000, "hi")
    calls = (CallRecord("read", "a" * 50_000, "b" * 50_000),)
    conversation.update(conversation.path()[1].id, calls=calls)
    async with chatting(setup(AppModel(context=10**6), conversation=conversation)) as chat:
        await chat.press("ctrl+up", "up")
        said, reply = chat.views
        assert "97,500 more characters (t unfolds)" in str(said._said.render())
        await chat.press("t")
        await chat.until(lambda: str(said._said.render()) == "word " * 20_000)
        await chat.press("down", "t")
        shown = str(reply._calls.query_one(".thought").render())  # type: ignore[attr-defined]
        assert shown.count("30,000 more characters") == 2
        assert len(shown) < 41_000


def test_code_is_found_in_blocks_shown_as_source() -> None:
    items = "".join(f"- item {i}\n\n  ```python\n  x = {i}\n  ```\n" for i in range(500))
    assert code_blocks(items)[-1] == ("python", "x = 499\n")
