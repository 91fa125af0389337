"""Replies of chats taken apart: what was thought, said and called."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import localllm
from localllm import LLM
from localllm.chat import ReplyParser
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


def test_a_reply_is_taken_apart(llm: LLM) -> None:
    done = llm.chat(MESSAGES, tools=TOOLS, regex=re.escape(REPLY), max_tokens=300)
    assert (done.text, done.reasoning) == ("Let me see.", "So?")
    assert [(call.name, call.values) for call in done.tool_calls] == [("add", {"a": 1})]
    assert json.loads(json.dumps(done.to_dict()))["tool_calls"] == [{"name": "add", "arguments": {"a": 1}}]
    done = asyncio.run(llm.achat(MESSAGES, regex=re.escape(REPLY), max_tokens=300))
    assert (done.text, done.tool_calls) == (REPLY.removeprefix("<think>So?</think>"), ())  # no tools were offered
    assert llm.stream_chat(MESSAGES, tools=TOOLS, regex=re.escape(REPLY), max_tokens=300).read().text == REPLY


def test_a_prompt_may_open_the_thought(llm: LLM) -> None:
    ids = llm.tokenize_chat(MESSAGES, reply_prefix="<think>")
    assert ReplyParser.after(ids, llm.tokenizer).feed("So?</think>Yes") == [("So?", True), ("Yes", False)]
    assert ReplyParser.after(ids[:-7], llm.tokenizer).feed("Yes") == [("Yes", False)]


def test_a_malformed_call_is_text_with_a_warning(llm: LLM) -> None:
    bad = "Now <tool_call>add(1)</tool_call>"
    with pytest.warns(UserWarning, match="a call of a tool was left as text: there is no tool") as caught:
        done = llm.chat(MESSAGES, tools=TOOLS, regex=re.escape(bad), max_tokens=300)
    assert (done.text, done.tool_calls) == (bad, ())
    assert caught[0].filename == __file__
