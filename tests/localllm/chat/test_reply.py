"""Calls of tools in replies, whatever the pieces that a reply comes in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.chat.reply import ReplyParser, ToolCall
from localllm.chat.thinking import Piece

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"properties": {"a": {"type": "integer"}, "note": {"type": "string"}}},
        },
    }
]

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TAGS = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n2\n</parameter>\n</function>\n"
    "</tool_call>"
)

#: Replies, and what they think, say and call.
CASES = [
    ("Hello.", ("", "Hello.", [])),
    (CALL, ("", "", [{"a": 1}])),
    (f"<think>So?</think>\n\nLet me see.\n{CALL}\n{CALL}\n", ("So?", "Let me see.", [{"a": 1}, {"a": 1}])),
    (TAGS, ("", "", [{"a": 1, "note": "2"}])),
    (CALL.removesuffix("</tool_call>"), ("", "", [{"a": 1}])),
    ('{"name": "add", "parameters": {"a": 1}}', ("", "", [{"a": 1}])),
    ('[{"name": "add", "arguments": "{\\"a\\": 1}"}, {"name": "add", "arguments": {}}]', ("", "", [{"a": 1}, {}])),
    ('{"a": 1}', ("", '{"a": 1}', [])),
    ("a < b, <tool", ("", "a < b, <tool", [])),
    (f"{CALL}\nThere.", ("", "There.", [{"a": 1}])),
]


def parsed(parser: ReplyParser, pieces: list[str]) -> tuple[str, str, list[object]]:
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    said = [part for part in parts if isinstance(part, Piece)]
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return (
        "".join(part.text for part in said if part.thinking),
        "".join(part.text for part in said if not part.thinking),
        [json.loads(call.arguments) for call in calls],
    )


@given(st.sampled_from(CASES), st.lists(st.integers(1, 12)))
def test_the_pieces_do_not_matter(case: tuple[str, object], lengths: list[int]) -> None:
    text, expected = case
    pieces = []
    for n in lengths:
        pieces.append(text[:n])
        text = text[n:]
    parser = ReplyParser(TOOLS)
    assert parsed(parser, [*pieces, text]) == expected
    assert not parser.warnings


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "add", "arguments": {"a": 1}',
        '{"name": "subtract", "arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add"}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": "\\ud800"}}',
        '{"name": ["add"], "arguments": {}}',
        "[" * 100_000,
        "[]",
        "3",
        "",
        "<function=add><parameter=a>1",
        "<function=other></function>",
    ],
)
def test_what_is_no_call_is_text_with_a_warning(body: str) -> None:
    text = f"So: <tool_call>{body}</tool_call> Yes."
    parser = ReplyParser(TOOLS)
    thinking, said, calls = parsed(parser, [text])
    if "<parameter" in body:  # without its end it is no parameter
        assert calls == [{}]
        return
    assert (thinking, calls) == ("", [])
    assert said.replace(" ", "") == text.replace(" ", "")
    assert len(parser.warnings) == 1


def test_without_tools_nothing_is_called() -> None:
    parser = ReplyParser()
    assert parsed(parser, [CALL]) == ("", CALL, [])
    assert not parser.warnings


def test_a_reply_that_begins_in_the_midst_of_thinking() -> None:
    assert parsed(ReplyParser(TOOLS, "<think>"), [f"Hm. {CALL} no </think>{CALL}"]) == (
        f"Hm. {CALL} no ",
        "",
        [{"a": 1}],
    )
