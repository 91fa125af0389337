"""Actions on existing messages: edit, branch, continue, copy, delete."""

from __future__ import annotations

import random
import re

import pytest
from textual.widget import Widget

from localllm.tui.chat.conversation import Conversation
from localllm.tui.text import SELECT_SIGN
from localllm.tui.widgets.reply import ReplyView
from tests.helpers.chat_app import AppModel, Chat, chatting, keeping, setup, talk
from tests.helpers.fake_chat import leaves


def said(chat: Chat) -> list[str]:
    """Return the visible messages, or an empty list while they differ from the path."""
    drawn = [view.message.text for view in chat.views]
    return drawn if drawn == [message.text for message in chat.app._chat.session.conversation.path()] else []


async def test_a_message_is_edited_and_the_user_moves_through_branches() -> None:
    async with chatting(setup(AppModel(["two", "three"]), conversation=talk("a", "one"))) as chat:
        await chat.press("f2")
        await chat.sees("Editing your message")
        assert chat.app._chat.composer.text == "a"
        await chat.press("escape")  # closes the editor
        await chat.until(lambda: "Editing" not in chat.screen)
        assert chat.app._chat.composer.text == ""
        await chat.ask("b")
        await chat.press("ctrl+up", "up", "up", "up")
        await chat.until(lambda: chat.app._chat.selected is chat.views[0])
        await chat.press("e")
        await chat.sees("Editing your message")
        await chat.ask("c")
        assert said(chat) == ["ac", "three"]
        assert "‹ 2/2 ›" in chat.screen
        await chat.press("ctrl+up", "up", "left")
        await chat.sees("‹ 1/2 ›")
        assert said(chat) == ["a", "one", "b", "two"]
        await chat.until(lambda: chat.app._chat.selected is chat.views[0])
        await chat.press("right", "right")  # there is only one more branch
        await chat.sees("‹ 2/2 ›")
        assert said(chat) == ["ac", "three"]
        await chat.press("escape")
        await chat.say("/branch 1")
        await chat.until(lambda: said(chat) == ["a", "one", "b", "two"])
        await chat.say("/branch")
        await chat.sees("● #1  1/2  a")
        await chat.press("down", "enter")
        await chat.until(lambda: said(chat) == ["ac", "three"])


async def test_a_reply_is_edited_and_continued() -> None:
    model = AppModel([" and more"])
    async with chatting(setup(model, conversation=talk("a", "one"))) as chat:
        await chat.press("ctrl+up", "e")
        await chat.sees("Editing the reply")
        await chat.type("!")
        await chat.press("enter")
        await chat.until(lambda: said(chat) == ["a", "one!"])
        await chat.sees("edited · Ctrl+G")
        await chat.rest()
        await chat.press("ctrl+up", "c")
        await chat.until(lambda: said(chat) == ["a", "one! and more"])
        assert model.asked[-1].reply_prefix == "one!"


async def test_a_reply_is_regenerated_and_branched_from() -> None:
    async with chatting(setup(AppModel(["two", "three", "four"]), conversation=talk("a", "one"))) as chat:
        await chat.press("ctrl+r")
        await chat.until(lambda: said(chat) == ["a", "two"])
        await chat.rest()
        await chat.press("ctrl+up", "r")
        await chat.sees("‹ 3/3 ›")
        await chat.rest()
        assert said(chat) == ["a", "three"]
        await chat.pilot.click("MessageView.assistant .head", offset=(9, 0))
        await chat.until(lambda: said(chat) == ["a", "two"])
    async with chatting(setup(AppModel(["three"]), conversation=talk("a", "one", "b", "two"))) as chat:
        await chat.press("ctrl+up", "up", "up", "b")
        await chat.sees("New branch:")
        await chat.ask("c")
        assert said(chat) == ["a", "one", "c", "three"]
        assert len(leaves(chat.app._chat.session.conversation)) == 2


async def test_copying() -> None:
    reply = "See:\n\n```python\nprint(1)\n```\nor\n```sh\nls\n```\n"
    async with chatting(setup(AppModel(), conversation=talk("a", reply))) as chat:
        await chat.press("ctrl+up", "y")
        await chat.until(lambda: chat.app.clipboard == reply)
        await chat.press("k")
        await chat.sees("Copy which block?")
        await chat.press("down", "enter")
        await chat.until(lambda: chat.app.clipboard == "ls\n")
        await chat.press("escape")
        await chat.say("/copy code 1")
        await chat.until(lambda: chat.app.clipboard == "print(1)\n")
        await chat.say("/copy")
        await chat.until(lambda: chat.app.clipboard == reply)
        await chat.say("/copy code 3")
        await chat.hears("this message has 2 code blocks")
        await chat.say("/copy 1")
        await chat.until(lambda: chat.app.clipboard == "a")


async def test_deleting_needs_confirmation() -> None:
    async with chatting(setup(AppModel(), conversation=talk("a", "one", "b", "two"))) as chat:
        await chat.press("ctrl+up", "up", "d")
        await chat.sees("Delete this message?")
        await chat.press("enter")  # Cancel is the first choice
        await chat.until(lambda: chat.app.screen is chat.app._chat)
        assert said(chat) == ["a", "one", "b", "two"]
        await chat.press("d")
        await chat.sees("Delete this message?")
        await chat.press("down", "enter")
        await chat.until(lambda: said(chat) == ["a", "one"])
        await chat.say("/remove 2")
        await chat.sees("Delete this message?")
        await chat.press("down", "enter")
        await chat.until(lambda: said(chat) == ["a"])
        await chat.say("/show")  # and the typed text is not a command
        await chat.until(lambda: chat.app._chat.composer.has_focus and not chat.app._chat.composer.text)
        assert chat.app._chat.selected is None


async def test_only_keys_with_an_effect_are_offered() -> None:
    conversation = Conversation()
    conversation.add("user", "\n".join(f"line {i}" for i in range(100)))
    conversation.add("assistant", "answer", state="stopped")
    async with chatting(setup(AppModel(), conversation=conversation), size=(120, 60)) as chat:
        await chat.sees("New chat")
        assert "… 85 more lines (t unfolds)" in chat.screen
        await chat.press("ctrl+up")
        await chat.sees("c Continue")
        assert "k Copy code" not in chat.screen
        assert "t Unfold" not in chat.screen
        assert "branch" not in chat.screen.lower().replace("b branch", "")
        await chat.press("up")
        await chat.until(lambda: "c Continue" not in chat.screen)
        assert "e Edit" in chat.screen
        await chat.press("t")
        await chat.sees("line 50")


async def test_no_key_is_cut() -> None:
    whole = {"⏎ Send", "esc Stop", f"{SELECT_SIGN} Messages", "f1 Help", "^n New chat", "^o Chats"}
    whole |= {"e Edit", "r Regenerate", "b New branch", "y Copy", "d Delete"}

    def offered(chat: Chat) -> set[str]:
        line, end = chat.screen.splitlines()[-1], "▏^p palette"
        return set(re.split("  +", line.removesuffix(end).strip())) if line.endswith(end) else set()

    async with chatting(setup(AppModel(), conversation=talk("question", "answer", "another"))) as chat:
        for i, n_fit in enumerate((2, 4, 6, 6)):
            await chat.pilot.resize_terminal(40 + 20 * i, 20)
            await chat.until(lambda n_fit=n_fit: len(offered(chat)) >= n_fit, "keys, and a whole palette key")
            assert offered(chat) <= whole
            await chat.press("ctrl+up")
            await chat.until(lambda: {"e Edit", "r Regenerate"} <= offered(chat) <= whole)
            await chat.press("up")
            await chat.until(lambda: chat.app._chat.selected is chat.views[1])
            await chat.until(lambda: {"e Edit", "r Regenerate"} <= offered(chat) <= whole)
            await chat.press("escape")


#: Starts of blocks, split at awkward points.
_BLOCKS = (
    *(
        "# Head\n",
        "Title\n===\n",
        "text **bold** `code`\n",
        "\n",
        "- item\n",
        "- item\n  - deeper\n\n  more\n",
        "1. one\n",
    ),
    *(
        "```py\nx = 1\n```\n",
        "```\n",
        "> quote\n",
        "| a | b |\n|---|---|\n| 1 | 2 |\n",
        "    code\n",
        "***\n",
        "*em",
        "* ",
    ),
    *("\u2028", "[a]", "\n\n[a]: http://x.y\n", "word "),
)


@pytest.mark.parametrize("n", [2, pytest.param(10, marks=pytest.mark.ci)])
async def test_a_streamed_reply_is_drawn_like_a_complete_one(n: int) -> None:
    chosen = random.Random(3)
    async with chatting(keeping(("q", "a", "q", "b"))) as chat:
        _, streamed, _, whole = (view.query_one(ReplyView) if view.query(ReplyView) else None for view in chat.views)
        assert streamed is not None
        assert whole is not None
        for _ in range(n):
            text = "".join(chosen.choices(_BLOCKS, k=chosen.randint(1, 14)))
            await streamed.show("")
            at = 0
            while at < len(text):
                before, at = at, at + chosen.randint(1, 12)
                await streamed.write(text[before:at])
            await streamed.show(text)
            await whole.update(text)
            assert _drawn(streamed) == _drawn(whole), text


def _drawn(widget: Widget) -> list[object]:
    return [
        (str(getattr(child, "content", "")), _drawn(child))
        for child in widget.children
        if not child.has_class("foot")
    ]


async def test_a_reply_that_arrives_at_once_is_drawn_a_few_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are appended in several steps, so that keys can be handled in between."""
    drawn: list[int] = []
    append = ReplyView.append
    monkeypatch.setattr(
        ReplyView, "append", lambda self, text: drawn.append(text.count("\n\n")) or append(self, text)
    )
    text = "\n\n".join(f"- block {i}\n- of a list" if i % 2 else f"block {i} " + "word " * 20 for i in range(60))
    async with chatting(setup(AppModel([text], context=100_000))) as chat:
        await chat.ask("write")
        assert len(chat.views[1].query_one(ReplyView).children) == 60
        assert 59 <= sum(drawn) < 2 * 59  # each block is drawn once
        assert max(drawn) < 30
