"""Reasoning and answer of a reply, however its text is divided."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from localllm.chat.thinking import TAGS, ThinkingSplitter, opening_tag, split

ANALYSIS = "<|channel|>analysis<|message|>well<|end|>"
CASES = {
    "no thinking": ("Hello <b>you</b>", "", ("", "Hello <b>you</b>")),
    "leading space stays": ("  Hello", "", ("", "  Hello")),
    "thinking": ("<think>\nwell\n</think>\n\nHello", "", ("well\n", "Hello")),
    "opened by the prompt": ("well\n</think>\n\nHello", "<think>", ("well\n", "Hello")),
    "opened twice": ("<think>well</think>Hello", "<think>", ("well", "Hello")),
    "another tag": ("[THINK]well[/THINK]Hello", "", ("well", "Hello")),
    "wrong closing tag": ("<think>a</thinking>b", "", ("a</thinking>b", "")),
    "cut in thought": ("<think>well", "", ("well", "")),
    "cut in the closing tag": ("<think>well</th", "", ("well</th", "")),
    "cut in the opening tag": ("<thi", "", ("", "<thi")),
    "nothing thought": ("<think>\n\n</think>\n\nHello", "", ("", "Hello")),
    "tags later are text": ("Use <think> and </think>.", "", ("", "Use <think> and </think>.")),
    "a second thought is text": ("<think>a</think>b <think>c</think>", "", ("a", "b <think>c</think>")),
    "gpt-oss": (f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Hello", "", ("well", "Hello")),
    "gpt-oss, opened": (f"{ANALYSIS}<|channel|>final<|message|>Hello", "<|start|>assistant", ("well", "Hello")),
    "gpt-oss without a thought": ("Hello <|channel|>", "<|start|>assistant", ("", "Hello <|channel|>")),
    "gemma": ("<|channel>thought\nwell<channel|>Hello", "", ("well", "Hello")),
    "empty": ("", "", ("", "")),
}


@pytest.mark.parametrize(("text", "opened", "parts"), CASES.values(), ids=CASES)
def test_split(text: str, opened: str, parts: tuple[str, str]) -> None:
    assert split(text, opened) == parts


@given(
    st.lists(st.sampled_from([*TAGS, *TAGS.values(), "<", "/", "th", "ink>", " ", "\n", "word", "]"]), max_size=12),
    st.sampled_from(["", "<think>"]),
    st.randoms(use_true_random=False),
)
def test_pieces_make_no_difference(parts: list[str], opened: str, random: object) -> None:
    text = "".join(parts)
    splitter = ThinkingSplitter(opened)
    pieces = []
    rest = text
    while rest:
        n = random.randint(1, len(rest))  # type: ignore[attr-defined]
        pieces += splitter.feed(rest[:n])
        rest = rest[n:]
    pieces += splitter.finish()
    joined = tuple("".join(piece.text for piece in pieces if piece.thinking is kind) for kind in (True, False))
    assert joined == split(text, opened)
    # All reasoning precedes the answer.
    kinds = [piece.thinking for piece in pieces]
    assert kinds == sorted(kinds, reverse=True)


@given(st.text(alphabet="ab \n<", max_size=30))
def test_text_without_tags_is_all_answer(text: str) -> None:
    assert split(text) == ("", text)


def test_only_what_may_be_a_tag_is_held_back() -> None:
    splitter = ThinkingSplitter()
    assert splitter.feed("<think>one <") == [("one ", True)]
    assert splitter.feed("b> two </th") == [("<b> two ", True)]
    assert splitter.feed("ink>three") == [("three", False)]


def test_a_reply_without_reasoning_may_close_it() -> None:
    assert split("</mm:think>Yes.") == ("", "Yes.")
    assert split("Yes.</mm:think>") == ("", "Yes.</mm:think>")


def test_the_tag_at_the_end_of_a_prompt() -> None:
    assert opening_tag("user: hi\nassistant:<think>\n") == "<think>"
    assert opening_tag("assistant:<think>\n\n</think>\n\n") == ""
    assert opening_tag("what is <think>? assistant:") == ""
