"""What a client says of a conversation, in the words of each API: all become the same messages.

A table of features by dialects; a cell is a request, or why the API has no words for it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from localllm.chat.conversation import Message, ToolCall, read_messages
from localllm.errors import TemplateError, UsageError
from localllm.server import anthropic, ollama, openai, responses
from localllm.server.dispatcher import GenerationJob, begun_reply
from localllm.server.http import HTTPError

CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
#: The beginning of a file of a picture.
DATA = base64.b64encode(b"\x89PNG").decode()
URL, PART = f"data:image/png;base64,{DATA}", {"type": "text", "text": "hi"}
HI, HO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}

#: What every dialect makes of each feature: messages, and how the reply begins.
EXPECTED: dict[str, tuple[list[Message], str]] = {
    "a text": ([Message("user", ("hi",))], ""),
    "parts of text": ([Message("user", ("h", "i"))], ""),
    "a system's message": ([Message("system", ("S",)), Message("user", ("hi",))], ""),
    "a developer's message": ([Message("developer", ("D",)), Message("user", ("hi",))], ""),
    "reasoning": (
        [Message("user", ("hi",)), Message("assistant", ("ho",), "hm"), Message("user", ("hi",))],
        "",
    ),
    "a call and its result": (
        [
            Message("user", ("hi",)),
            Message("assistant", calls=(ToolCall("now", '{"zone": "UTC"}', "call_1"),)),
            Message("tool", ("noon",), call_id="call_1"),
        ],
        "",
    ),
    "a tool that failed": (
        [
            Message("assistant", calls=(ToolCall("now", '{"zone": "UTC"}', "call_1"),)),
            Message("tool", ("no clock",), call_id="call_1", is_error=True),
        ],
        "",
    ),
    "a reply that has begun": ([Message("user", ("hi",))], "ho"),
    # `with_shown`
    "a picture": ([Message("user", ((b"\x89PNG", None), "hi"))], ""),  # type: ignore[arg-type]
    "a picture of little detail": ([Message("user", ("hi", (b"\x89PNG", 256)))], ""),  # type: ignore[arg-type]
    "a picture in a result": (
        [
            Message("assistant", calls=(ToolCall("now", '{"zone": "UTC"}', "call_1"),)),
            Message("tool", ("here", (b"\x89PNG", None)), call_id="call_1"),  # type: ignore[arg-type]
        ],
        "",
    ),
}

#: The same requests: `messages` of OpenAI's chat, of Anthropic's and of Ollama's, and `input` of responses.
CHAT: dict[str, Any] = {
    "a text": [HI],
    "parts of text": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}],
    "a system's message": [{"role": "system", "content": "S"}, HI],
    "a developer's message": [{"role": "developer", "content": "D"}, HI],
    "reasoning": [HI, {**HO, "reasoning_content": "hm"}, HI],
    "a call and its result": [
        HI,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ],
    "a tool that failed": [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "no clock", "is_error": True},
    ],
    "a reply that has begun": [HI, HO],
    "a picture": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL}}, PART]}],
    "a picture of little detail": [
        {"role": "user", "content": [PART, {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}]}
    ],
    "a picture in a result": [
        {"role": "assistant", "tool_calls": [CALL]},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": [{"type": "text", "text": "here"}, {"type": "image_url", "image_url": {"url": URL}}],
        },
    ],
}
SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA}
USE = {"type": "tool_use", "id": "call_1", "name": "now", "input": {"zone": "UTC"}}
ANTHROPIC: dict[str, Any] = {
    **CHAT,
    "a picture": [{"role": "user", "content": [{"type": "image", "source": SOURCE}, PART]}],
    "a picture of little detail": "it has no word for it",
    "a picture in a result": [
        {"role": "assistant", "content": [USE]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call_1",
                    "content": [{"type": "text", "text": "here"}, {"type": "image", "source": SOURCE}],
                }
            ],
        },
    ],
    "a system's message": {"system": "S", "messages": [HI]},
    "a developer's message": "it has none",
    "reasoning": [
        HI,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "ho"}]},
        HI,
    ],
    "a call and its result": [
        HI,
        {"role": "assistant", "content": [USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "noon"}]},
    ],
    "a tool that failed": [
        {"role": "assistant", "content": [USE]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "no clock", "is_error": True}],
        },
    ],
}
FUNCTION_CALL = {"type": "function_call", "call_id": "call_1", "name": "now", "arguments": '{"zone": "UTC"}'}
RESPONSES: dict[str, Any] = {
    **CHAT,
    "parts of text": [{"role": "user", "content": [{"type": "input_text", "text": each} for each in "hi"]}],
    "a picture": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}, PART]}],
    "a picture of little detail": [
        {"role": "user", "content": [PART, {"type": "input_image", "image_url": URL, "detail": "low"}]}
    ],
    "a picture in a result": [
        FUNCTION_CALL,
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [{"type": "input_text", "text": "here"}, {"type": "input_image", "image_url": URL}],
        },
    ],
    "a system's message": {"instructions": "S", "input": "hi"},
    "reasoning": [
        HI,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ho"}]},
        HI,
    ],
    "a call and its result": [
        HI,
        FUNCTION_CALL,
        {"type": "function_call_output", "call_id": "call_1", "output": "noon"},
    ],
    "a tool that failed": "a result has no word for it",
}
OLLAMA: dict[str, Any] = {
    **CHAT,
    "parts of text": "a content is one text",
    "a picture": [{"role": "user", "content": "hi", "images": [DATA]}],
    "a picture of little detail": "it has no word for it",
    "a picture in a result": "pictures stand before the text",
    "reasoning": [HI, {**HO, "thinking": "hm"}, HI],
}


def library(messages: Any, **_: Any) -> tuple[list[Message], str]:
    return begun_reply(read_messages(messages))


def of_job(job: GenerationJob) -> tuple[list[Message], str]:
    return job.messages or [], job.reply_prefix


def chat(messages: Any, **more: Any) -> tuple[list[Message], str]:
    return of_job(openai._chat_job(msgspec.convert({"messages": messages, **more}, openai.ChatRequest)))


def claude(messages: Any, **more: Any) -> tuple[list[Message], str]:
    body = messages if isinstance(messages, dict) else {"messages": messages}
    return of_job(anthropic._job(msgspec.convert({**body, **more}, anthropic.MessagesRequest)))


def response(messages: Any, **more: Any) -> tuple[list[Message], str]:
    body = messages if isinstance(messages, dict) else {"input": messages}
    return of_job(responses._job(msgspec.convert({**body, **more}, responses.ResponsesRequest), []))


def llama(messages: Any, **_: Any) -> tuple[list[Message], str]:
    return begun_reply([ollama._message(i, each) for i, each in enumerate(messages)])


DIALECTS: dict[str, tuple[Callable[..., tuple[list[Message], str]], Mapping[str, Any]]] = {
    "library": (library, CHAT),
    "openai": (chat, CHAT),
    "anthropic": (claude, ANTHROPIC),
    "responses": (response, RESPONSES),
    "ollama": (llama, OLLAMA),
}


@pytest.mark.parametrize("feature", EXPECTED)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_say_the_same(dialect: str, feature: str) -> None:
    read, requests = DIALECTS[dialect]
    request = requests[feature]
    if isinstance(request, str):
        pytest.skip(request)
    messages, begun = read(request)
    assert (with_shown(messages), begun) == EXPECTED[feature]


def with_shown(messages: list[Message]) -> list[Message]:
    """Messages whose pictures are what is equal of them."""
    shown = lambda part: part if isinstance(part, str) else (part.source, part.max_tokens)  # noqa: E731
    return [replace(each, parts=tuple(map(shown, each.parts))) for each in messages]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_not_text_is_refused_by_its_name(dialect: str) -> None:
    read, _ = DIALECTS[dialect]
    with pytest.raises(TemplateError, match="message 0 has a part of type 'input_audio'"):
        read([{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}])


@pytest.mark.parametrize("dialect", [name for name in DIALECTS if name != "library"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("/etc/passwd", "is no data URL"),
        ("file:///etc/passwd", "is no data URL"),
        ("https://example.com/cat.png", "is an address on the web"),
        ("data:image/png;base64,%%%", "is not in base64"),
        ("", "is missing"),
        (["x"], "must be a data URL"),
        (5, "must be a data URL"),
    ],
)
def test_servers_open_no_files_and_no_addresses(dialect: str, given: Any, words: str) -> None:
    read, _ = DIALECTS[dialect]
    for part in (
        {"type": "image", "image": given},
        {"type": "image_url", "image_url": {"url": given}},
        {"type": "image_url", "image_url": given},
        {"type": "input_image", "image_url": given},
        {"type": "image", "source": {"type": "url", "url": given}},
    ):
        with pytest.raises(TemplateError, match=f"^the picture of message 0 .*{words}"):
            read([{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        (None, False),
        ("auto", False),
        ("required", True),
        ({"type": "function", "function": {"name": "now"}}, True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}, False),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}, True),
    ],
)
def test_a_choice_of_tools(choice: Any, forced: bool) -> None:
    body = {"messages": [HI], "tools": [TOOL], "tool_choice": choice}
    job = openai._chat_job(msgspec.convert(body, openai.ChatRequest))
    assert job.tools == [TOOL]
    assert ("json_schema" in job.options) == forced


@pytest.mark.parametrize("choice", ["foo", "Required", "", {"type": "foo"}, {"type": "function"}, {"type": "tool"}])
def test_a_choice_that_means_nothing_is_refused(choice: Any) -> None:
    with pytest.raises(UsageError, match="tool_choice"):
        openai._chat_job(
            msgspec.convert({"messages": [HI], "tools": [TOOL], "tool_choice": choice}, openai.ChatRequest)
        )


def test_documents_of_text_are_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "one two"}
    parts = [{"type": "document", "title": "T", "source": source}, {"type": "text", "text": "?"}]
    assert claude([{"role": "user", "content": parts}]) == ([Message("user", ("T\n\none two", "?"))], "")
    with pytest.raises(HTTPError, match="message 0 has a document that is not text"):
        claude([{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "="}}]}])


def test_a_format_of_the_reply_forces_no_call() -> None:
    body = {"messages": [HI], "tools": [TOOL], "response_format": {"type": "json_object"}}
    assert not openai._chat_job(msgspec.convert(body, openai.ChatRequest)).must_call
    body = {"messages": [HI], "tools": [TOOL], "tool_choice": "required"}
    assert openai._chat_job(msgspec.convert(body, openai.ChatRequest)).must_call


def test_what_was_thought_before_calls_belongs_to_them_alone() -> None:
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "noon"}
    messages, begun = response([HI, reasoning, FUNCTION_CALL, result, {"type": "message", **HO}, HI])
    assert ([each.reasoning for each in messages], begun) == (["", "hm", "", "", ""], "")


@pytest.mark.parametrize("feature", [name for name, each in RESPONSES.items() if isinstance(each, list)])
def test_messages_become_the_items_that_they_were_read_of(feature: str) -> None:
    messages, begun = response(RESPONSES[feature])
    messages = [replace(each, reasoning="") for each in messages]  # which is not kept as an item
    read, again = response([item for each in messages for item in responses._items(each)])
    assert (with_shown(read), again) == (with_shown(messages), "")
    assert not begun or feature == "a reply that has begun"
