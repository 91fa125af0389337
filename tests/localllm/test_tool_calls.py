"""Parsed chat replies: reasoning, text and tool calls."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm import LLM, Chunk, Stream
from localllm.chat import ReplyParser
from localllm.chat.conversation import ToolCall
from localllm.chat.reply import CallDelta
from localllm.chat.tool_choice import ChosenTools
from tests.helpers.http_server import CALLS_TEMPLATE
from tests.helpers.tiny_models import tiny_gguf

pytest.importorskip("llguidance", reason="needs the extra 'grammar'")

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
MESSAGES = [{"role": "user", "content": "1?"}]
REPLY = '<think>So?</think>Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path: Path = tiny_gguf(tmp_path_factory.mktemp("tools") / "tiny.gguf", max_position_embeddings=512)
    template = "{% if tools %}T{% endif %}{{ messages[0]['content'] }}"
    with localllm.load(path, context=512, threads=1, chat_template=template) as llm:
        yield llm


def test_a_reply_is_parsed(llm: LLM) -> None:
    done = llm.chat(MESSAGES, tools=TOOLS, regex=re.escape(REPLY), max_tokens=300)
    assert (done.text, done.reasoning) == ("Let me see.", "So?")
    assert [(call.name, call.values) for call in done.tool_calls] == [("add", {"a": 1})]
    assert json.loads(json.dumps(done.to_dict()))["tool_calls"] == [{"name": "add", "arguments": {"a": 1}}]
    done = asyncio.run(llm.achat(MESSAGES, regex=re.escape(REPLY), max_tokens=300))
    assert (done.text, done.tool_calls) == (REPLY.removeprefix("<think>So?</think>"), ())  # no tools were passed


def test_a_stream_has_the_events_of_a_reply(llm: LLM) -> None:
    def start(**more: Any) -> Stream:
        options = {"tools": TOOLS, "regex": re.escape(REPLY), "max_tokens": 300, "seed": 1, **more}
        return llm.stream_chat(MESSAGES, **options)

    async def gathered() -> list[Chunk]:
        return [chunk async for chunk in start()]

    whole = start().read()
    for chunks in (list(start()), asyncio.run(gathered())):
        assert "".join(chunk.reasoning for chunk in chunks) == "So?"
        assert "".join(chunk.text for chunk in chunks) == "Let me see."
        begun, *arguments, ended = [chunk.call for chunk in chunks if chunk.call is not None]
        assert isinstance(begun, CallDelta)
        assert (begun.begins, begun.name) == (True, "add")
        assert ended == ToolCall("add", "".join(each.arguments for each in arguments), begun.id)
        assert len(arguments) > 1
        assert json.loads("".join(each.arguments for each in arguments)) == {"a": 1}
        assert tuple(id_ for chunk in chunks for id_ in chunk.ids) == whole.ids
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
    assert (whole.text, whole.reasoning, [call.values for call in whole.tool_calls]) == (
        "Let me see.",
        "So?",
        [{"a": 1}],
    )
    assert start(parse=False).read().text == REPLY
    assert start(parse=()).read().text == REPLY.removeprefix("<think>So?</think>")
    other_tools = start(tools=None, parse=TOOLS).read()
    assert (other_tools.text, [call.values for call in other_tools.tool_calls]) == ("Let me see.", [{"a": 1}])


def test_a_call_that_is_cut_off_is_a_call(llm: LLM) -> None:
    whole = llm.chat(MESSAGES, tools=TOOLS, regex=re.escape(REPLY), max_tokens=300, seed=1)
    for n in range(len(whole.ids)):
        done = llm.chat(MESSAGES, tools=TOOLS, regex=re.escape(REPLY), max_tokens=n, seed=1)
        assert done.finish_reason == "length"
        assert all('{"a": 1}'.startswith(call.arguments) for call in done.tool_calls)
    assert done.tool_calls


def test_open_reasoning_continues(llm: LLM) -> None:
    done = llm.chat(MESSAGES, reply_prefix="<think>So", regex="o[?]</think>Yes", max_tokens=300)
    assert (done.reasoning, done.text) == ("o?", "Yes")


def test_calls_follow_the_template_and_the_schemas(tmp_path: Path) -> None:
    """Also a call that the start of the reply has begun."""
    path = tiny_gguf(tmp_path / "tiny.gguf", max_position_embeddings=512)
    with localllm.load(path, context=512, threads=1, chat_template=CALLS_TEMPLATE) as llm:
        chosen = ChosenTools(TOOLS, TOOLS)
        options: dict[str, Any] = {"tools": TOOLS, "max_tokens": 300, "seed": 1}
        written = llm.stream_chat(MESSAGES, parse=False, **options).read().text
        assert "<tool_call>" not in written  # it is random
        (call,) = llm.stream_chat(MESSAGES, parse=chosen, **options).read().tool_calls
        assert call.name == "add"
        for prefix in ("<tool_call>", 'So: <tool_call>\n{"name": "', "<think>So</think><tool_call>"):
            done = llm.chat(MESSAGES, reply_prefix=prefix, **options)
            assert [call.name for call in done.tool_calls][:1] == ["add"], done
        done = llm.chat(MESSAGES, reply_prefix="<tool_call>", tool_grammar=False, **options)
        assert not done.tool_calls


def test_a_prompt_may_open_the_thought(llm: LLM) -> None:
    ids = llm.tokenize_chat(MESSAGES, reply_prefix="<think>")
    assert ReplyParser.after(ids, llm.tokenizer).feed("So?</think>Yes") == [("So?", True), ("Yes", False)]
    assert ReplyParser.after(ids[:-7], llm.tokenizer).feed("Yes") == [("Yes", False)]


def test_a_malformed_call_is_text_with_a_warning(llm: LLM) -> None:
    bad = "Now <tool_call>so it is</tool_call>"
    with pytest.warns(UserWarning, match="a tool call was left as text: it is written in no known way") as caught:
        done = llm.chat(MESSAGES, tools=TOOLS, regex=re.escape(bad), max_tokens=300)
    assert (done.text, done.tool_calls) == (bad, ())
    assert caught[0].filename == __file__


@pytest.mark.parametrize("prefix", ["", "<think>so"])
def test_stop_strings_end_the_answer_and_not_the_reasoning(llm: LLM, prefix: str) -> None:
    reply = "<think>so it is: Q: how many?</think>\n\nTwo. Q: no more"
    options: dict[str, Any] = {
        "regex": re.escape(reply.removeprefix(prefix)),
        "max_tokens": 300,
        "stop": ["Q:", "\n\n"],
    }
    done = llm.chat(MESSAGES, reply_prefix=prefix, **options)
    assert (done.reasoning, done.text) == ("so it is: Q: how many?".removeprefix(prefix[7:]), "Two. ")
    assert done.finish_reason == "stop"
    stream = llm.stream_chat(MESSAGES, reply_prefix=prefix, parse=False, **options)
    assert stream.read().text == reply.removeprefix(prefix).removesuffix("Q: no more")
    assert stream.stop_text == "Q:"


def test_a_call_that_a_stop_string_cuts_is_not_whole(llm: LLM) -> None:
    done = llm.chat(MESSAGES, tools=TOOLS, regex=re.escape(REPLY), max_tokens=300, stop=": 1")
    assert [call.arguments for call in done.tool_calls] == ['{"a"']
