"""Every API must produce equal messages and arguments for a conversation and its options.

Two tables of features by dialects; a cell is a request, or the reason why the API lacks the feature.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import httpx
import msgspec
import pytest

from localllm import compat
from localllm.chat.conversation import Message, ToolCall, read_messages
from localllm.chat.tool_choice import ChosenTools
from localllm.errors import TemplateError, UsageError
from localllm.llm import LLM
from localllm.loading.load import load_file
from localllm.options.declared import LoadOptions
from localllm.server import anthropic, llamacpp, ollama, openai, responses
from localllm.server.answers import GenerationJob, split_reply_start
from localllm.server.response_items import ToolItems
from tests.helpers.http_server import Serving, serving

CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
#: First bytes of an image file.
DATA = base64.b64encode(b"\x89PNG").decode()
URL, PART = f"data:image/png;base64,{DATA}", {"type": "text", "text": "hi"}
SOUND = {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}}
HI, HO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}

BEGUN = "a reply that has begun"
#: Expected messages for each feature.
CALLED = Message("assistant", calls=(ToolCall("now", '{"zone": "UTC"}', "call_1"),))
SHOWN: Any = (b"\x89PNG", None, "image")  # `with_shown`
EXPECTED: dict[str, list[Message]] = {
    "a text": [Message("user", ("hi",))],
    "parts of text": [Message("user", ("h", "i"))],
    "a system's message": [Message("system", ("S",)), Message("user", ("hi",))],
    "a developer's message": [Message("developer", ("D",)), Message("user", ("hi",))],
    "reasoning": [Message("user", ("hi",)), Message("assistant", ("ho",), "hm"), Message("user", ("hi",))],
    "a call and its result": [Message("user", ("hi",)), CALLED, Message("tool", ("noon",), call_id="call_1")],
    "a tool that failed": [CALLED, Message("tool", ("no clock",), call_id="call_1", is_error=True)],
    BEGUN: [Message("user", ("hi",))],
    "a picture": [Message("user", (SHOWN, "hi"))],
    "a picture of little detail": [Message("user", ("hi", (*SHOWN[:1], 256, "image")))],  # type: ignore[arg-type]
    "a sound": [Message("user", ((*SHOWN[:2], "audio"), "hi"))],  # type: ignore[arg-type]
    "a picture in a result": [CALLED, Message("tool", ("here", SHOWN), call_id="call_1")],
}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


#: The same requests: `messages` of OpenAI's chat, of Anthropic's and of Ollama's, and `input` of responses.
ASKS = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1"}
HERE = {"type": "text", "text": "here"}
PICTURE = {"type": "image_url", "image_url": {"url": URL}}
CHAT: dict[str, Any] = {
    "a text": [HI],
    "parts of text": [user({"type": "text", "text": "h"}, {"type": "text", "text": "i"})],
    "a system's message": [{"role": "system", "content": "S"}, HI],
    "a developer's message": [{"role": "developer", "content": "D"}, HI],
    "reasoning": [HI, {**HO, "reasoning_content": "hm"}, HI],
    "a call and its result": [HI, {**ASKS, "content": None}, {**RESULT, "content": "noon"}],
    "a tool that failed": [ASKS, {**RESULT, "content": "no clock", "is_error": True}],
    BEGUN: [HI, HO],
    "a picture": [user(PICTURE, PART)],
    "a picture of little detail": [user(PART, {"type": "image_url", "image_url": {"url": URL, "detail": "low"}})],
    "a sound": [user(SOUND, PART)],
    "a picture in a result": [ASKS, {**RESULT, "content": [HERE, PICTURE]}],
}
SOURCE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
USE = {"type": "tool_use", "id": "call_1", "name": "now", "input": {"zone": "UTC"}}
USES = {"role": "assistant", "content": [USE]}
USED = {"type": "tool_result", "tool_use_id": "call_1"}
THOUGHT = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "ho"}]
ANTHROPIC: dict[str, Any] = {
    **CHAT,
    "a picture": [user(SOURCE, PART)],
    "a picture of little detail": "it has no word for it",
    "a sound": "it has none",
    "a picture in a result": [USES, user({**USED, "content": [HERE, SOURCE]})],
    "a system's message": {"system": "S", "messages": [HI]},
    "a developer's message": "it has none",
    "reasoning": [HI, {"role": "assistant", "content": THOUGHT}, HI],
    "a call and its result": [HI, USES, user({**USED, "content": "noon"})],
    "a tool that failed": [USES, user({**USED, "content": "no clock", "is_error": True})],
}
FUNCTION_CALL = {"type": "function_call", "call_id": "call_1", "name": "now", "arguments": '{"zone": "UTC"}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1"}
INPUT_PICTURE = {"type": "input_image", "image_url": URL}
RESPONSES: dict[str, Any] = {
    **CHAT,
    "parts of text": [user(*({"type": "input_text", "text": each} for each in "hi"))],
    "a picture": [user(INPUT_PICTURE, PART)],
    "a picture of little detail": [user(PART, {**INPUT_PICTURE, "detail": "low"})],
    "a picture in a result": [
        FUNCTION_CALL,
        {**OUTPUT, "output": [{"type": "input_text", "text": "here"}, INPUT_PICTURE]},
    ],
    "a system's message": {"instructions": "S", "input": "hi"},
    "reasoning": [
        HI,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ho"}]},
        HI,
    ],
    "a call and its result": [HI, FUNCTION_CALL, {**OUTPUT, "output": "noon"}],
    "a tool that failed": "a result has no word for it",
}
OLLAMA: dict[str, Any] = {
    **CHAT,
    "parts of text": "a content is one text",
    "a picture": [{"role": "user", "content": "hi", "images": [DATA]}],
    "a picture of little detail": "it has no word for it",
    "a picture in a result": "pictures stand before the text",
    "a sound": "it has none",
    "reasoning": [HI, {**HO, "thinking": "hm"}, HI],
}


def library(messages: Any, **_: Any) -> tuple[list[Message], str]:
    return with_text(*split_reply_start(read_messages(messages)))


def with_text(messages: list[Message], begun: Message | None) -> tuple[list[Message], str]:
    return messages, "" if begun is None else begun.text


def of_job(job: GenerationJob) -> tuple[list[Message], str]:
    return with_text(job.messages or [], job.reply_start)


def chat(messages: Any, **more: Any) -> tuple[list[Message], str]:
    return of_job(openai._chat_job(msgspec.convert({"messages": messages, **more}, openai.ChatRequest)))


def claude(messages: Any, **more: Any) -> tuple[list[Message], str]:
    body = messages if isinstance(messages, dict) else {"messages": messages}
    return of_job(anthropic._job(msgspec.convert({**body, **more}, anthropic.MessagesRequest)))


def response(messages: Any, **more: Any) -> tuple[list[Message], str]:
    body = messages if isinstance(messages, dict) else {"input": messages}
    return of_job(responses._job(msgspec.convert({**body, **more}, responses.ResponsesRequest), [], ToolItems()))


def llama(messages: Any, **_: Any) -> tuple[list[Message], str]:
    return with_text(*split_reply_start([ollama._message(i, each) for i, each in enumerate(messages)]))


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
    assert (with_shown(messages), begun) == (EXPECTED[feature], "ho" if feature == BEGUN else "")


def with_shown(messages: list[Message]) -> list[Message]:
    """Replace images and audio in messages by comparable values."""
    shown = lambda part: part if isinstance(part, str) else (part.source, part.max_tokens, part.kind)  # noqa: E731
    return [replace(each, parts=tuple(map(shown, each.parts))) for each in messages]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_part_of_an_unknown_type_is_refused_or_omitted(dialect: str) -> None:
    read, _ = DIALECTS[dialect]
    omits = dialect in ("anthropic", "responses")  # with a warning, because agents send parts of many types
    refused = pytest.raises(TemplateError, match="message 0 has a part of type 'video'")
    with nullcontext() if omits else refused:
        read([{"role": "user", "content": [{"type": "video", "video": {"data": "x"}}]}])


@pytest.mark.parametrize("dialect", [name for name in DIALECTS if name != "library"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("/etc/passwd", "is not a data URL"),
        ("file:///etc/passwd", "is not a data URL"),
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
        with pytest.raises(TemplateError, match=f"^the image of message 0 .*{words}"):
            read([{"role": "user", "content": [part]}])


def job_of(**more: Any) -> GenerationJob:
    return openai._chat_job(msgspec.convert({"messages": [HI], "tools": [TOOL], **more}, openai.ChatRequest))


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        (None, False),
        ({"function": {"name": "now"}}, True),
        ({"name": "now"}, True),
        ("auto", False),
        ("required", True),
        ({"type": "function", "function": {"name": "now"}}, True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}, False),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}, True),
    ],
)
def test_a_choice_of_tools(choice: Any, forced: bool) -> None:
    job = job_of(tool_choice=choice)
    assert job.tools == [TOOL]
    assert bool(job.forced) == forced


@pytest.mark.parametrize("choice", ["foo", "Required", "", {"type": "foo"}, {"type": "function"}, {"type": "tool"}])
def test_a_choice_that_means_nothing_is_refused(choice: Any) -> None:
    with pytest.raises(UsageError, match="tool_choice"):
        job_of(tool_choice=choice)


def test_documents_of_text_are_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "one two"}
    parts = [{"type": "document", "title": "T", "source": source}, {"type": "text", "text": "?"}]
    assert claude([{"role": "user", "content": parts}]) == ([Message("user", ("T\n\none two", "?"))], "")
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": parts}
    expected = Message("tool", ("T\n\none two", "?"), call_id="call_1")
    assert claude([{"role": "user", "content": [result]}]) == ([expected], "")
    with pytest.raises(TemplateError, match="the document of message 0 is not in base64"):
        claude([{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "!"}}]}])


def test_a_format_of_the_reply_forces_no_call() -> None:
    assert not job_of(response_format={"type": "json_object"}).forced
    assert job_of(tool_choice="required").forced


def test_what_was_thought_before_calls_belongs_to_them_alone() -> None:
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "noon"}
    messages, begun = response([HI, reasoning, FUNCTION_CALL, result, {"type": "message", **HO}, HI])
    assert ([each.reasoning for each in messages], begun) == (["", "hm", "", "", ""], "")


def test_what_was_thought_stays_in_its_turn() -> None:
    first, second = ({"type": "reasoning", "summary": [{"type": "summary_text", "text": each}]} for each in "ab")
    said, call = {"type": "message", **HO}, FUNCTION_CALL
    calls = (ToolCall("now", '{"zone": "UTC"}', "call_1"),)
    for items, expected in (
        # A reply that was cut during its reasoning, with the next reply.
        ([first, HI, said], [Message("assistant", (), "a"), Message("user", ("hi",)), Message("assistant", ("ho",))]),
        # Reasoning between a text and a call.
        ([first, said, second, call], [Message("assistant", ("ho",), "a"), Message("assistant", (), "b", calls)]),
        ([first, second, call, said], [Message("assistant", (), "ab", calls), Message("assistant", ("ho",))]),
    ):
        assert response([HI, *items, HI])[0][1:-1] == expected


@pytest.mark.parametrize("feature", [name for name, each in RESPONSES.items() if isinstance(each, list)])
def test_messages_become_the_items_that_they_were_read_of(feature: str) -> None:
    messages, begun = response(RESPONSES[feature])
    messages = [replace(each, reasoning="") for each in messages]  # not stored in an item
    read, again = response([item for each in messages for item in responses._items(each, ToolItems())])
    assert (with_shown(read), again) == (with_shown(messages), "")
    assert not begun or feature == BEGUN


# -- Options besides messages -------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "integer"}}}
FUNCTION = {"name": "now", "description": "Tells it.", "parameters": SCHEMA}
OTHER = {**FUNCTION, "name": "then"}
TOOLS = [{"type": "function", "function": function} for function in (FUNCTION, OTHER)]


#: Expected arguments of the library for each feature; tools are the names of the offered tools.
WANTED: dict[str, dict[str, Any]] = {
    "a limit of tokens": {"max_tokens": 7},
    "texts that end a reply": {"stop": ("a", "b")},
    "sampling": {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "seed": 4},
    "null, and integers as floats": {"max_tokens": 7, "top_k": 3},
    "log-probabilities": {"logprobs": 2},
    "any JSON object": {"json_schema": {"type": "object"}},
    "a schema with references": {"json_schema": SCHEMA},
    "tools": {"tools": ["now", "then"], "forced": []},
    "no tools after all": {"tools": []},
    "a call of any tool": {"tools": ["now", "then"], "forced": ["now", "then"]},
    "a call of one tool": {"tools": ["now", "then"], "forced": ["now"]},
    "some of the tools": {"tools": ["now"]},
    "no thinking": {"template_variables": {"enable_thinking": False}},
    "thinking": {"template_variables": {"enable_thinking": True}},
    "little thinking": {"template_variables": {"reasoning_effort": "low", "enable_thinking": True}},
}

CHOICES_OF_TOOLS = "no tools after all", "a call of any tool", "a call of one tool", "some of the tools"
SWITCHES_OF_THINKING = "no thinking", "thinking", "little thinking"
_PROMPT_ALONE = "it goes on with a text: there are no tools, and no thinking that a template switches"
_TEXT: dict[str, Any] = dict.fromkeys(("tools", *CHOICES_OF_TOOLS, *SWITCHES_OF_THINKING), _PROMPT_ALONE)
_SAMPLING = {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "seed": 4}
_NULLS = {"temperature": None, "seed": None, "stop": None, "top_k": 3.0}
_ONE = {"type": "function", "function": {"name": "now"}}
_SOME = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [_ONE]}}
_FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}

OF_LIBRARY: dict[str, Any] = {
    **WANTED,
    "texts that end a reply": {"stop": ["a", "b"]},
    "null, and integers as floats": "keywords are Python's",
    "tools": {"tools": TOOLS},
    "no tools after all": {"tools": None},
    "a call of any tool": "its keyword parse forces calls",
    "a call of one tool": "its keyword parse forces calls",
    "some of the tools": {"tools": TOOLS[:1]},
}
OF_OPENAI: dict[str, Any] = {
    "a limit of tokens": {"max_completion_tokens": 7},
    "texts that end a reply": {"stop": ["a", "", "b"]},
    "sampling": _SAMPLING,
    "null, and integers as floats": {**_NULLS, "max_tokens": 7.0, "tools": None, "response_format": None},
    "log-probabilities": {"logprobs": True, "top_logprobs": 2},
    "any JSON object": {"response_format": {"type": "json_object"}},
    "a schema with references": {"response_format": _FORM},
    "tools": {"tools": TOOLS},
    "no tools after all": {"tools": TOOLS, "tool_choice": "none"},
    "a call of any tool": {"tools": TOOLS, "tool_choice": "required"},
    "a call of one tool": {"tools": TOOLS, "tool_choice": _ONE},
    "some of the tools": {"tools": TOOLS, "tool_choice": _SOME},
    "no thinking": {"chat_template_kwargs": {"enable_thinking": False}},
    "thinking": {"chat_template_kwargs": {"enable_thinking": True}},
    "little thinking": {"reasoning_effort": "low"},
}
_THEIR_TOOLS = [
    {"name": each["name"], "description": each["description"], "input_schema": SCHEMA} for each in (FUNCTION, OTHER)
]
OF_ANTHROPIC: dict[str, Any] = {
    "a limit of tokens": {"max_tokens": 7},
    "texts that end a reply": {"stop_sequences": ["a", "b"]},
    "sampling": _SAMPLING,
    "null, and integers as floats": {
        "temperature": None, "stop_sequences": None, "tools": None, "top_k": 3.0, "max_tokens": 7.0
    },
    "log-probabilities": "it has none",
    "any JSON object": {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
    "a schema with references": {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    "tools": {"tools": _THEIR_TOOLS},
    "no tools after all": {"tools": _THEIR_TOOLS, "tool_choice": {"type": "none"}},
    "a call of any tool": {"tools": _THEIR_TOOLS, "tool_choice": {"type": "any"}},
    "a call of one tool": {"tools": _THEIR_TOOLS, "tool_choice": {"type": "tool", "name": "now"}},
    "some of the tools": "it has no word for it",
    "no thinking": {"thinking": {"type": "disabled"}},
    "thinking": {"thinking": {"type": "enabled"}},
    "little thinking": {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
}  # fmt: skip
_FLAT = [{"type": "function", **function} for function in (FUNCTION, OTHER)]
OF_RESPONSES: dict[str, Any] = {
    "a limit of tokens": {"max_output_tokens": 7},
    "texts that end a reply": {"stop": ["a", "b"]},
    "sampling": _SAMPLING,
    "null, and integers as floats": {**_NULLS, "max_output_tokens": 7.0, "tools": None, "text": None},
    "log-probabilities": {"top_logprobs": 2},
    "any JSON object": {"text": {"format": {"type": "json_object"}}},
    "a schema with references": {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    "tools": {"tools": _FLAT},
    "no tools after all": {"tools": _FLAT, "tool_choice": "none"},
    "a call of any tool": {"tools": _FLAT, "tool_choice": "required"},
    "a call of one tool": {"tools": _FLAT, "tool_choice": {"type": "function", "name": "now"}},
    "some of the tools": {
        "tools": _FLAT,
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]},
    },
    "no thinking": {"reasoning": {"effort": "none"}},
    "thinking": {"reasoning": {"effort": "medium"}},
    "little thinking": {"reasoning": {"effort": "low"}},
}
OF_OLLAMA: dict[str, Any] = {
    "a limit of tokens": {"options": {"num_predict": 7}},
    "texts that end a reply": {"options": {"stop": ["a", "b"]}},
    "sampling": {"options": _SAMPLING},
    "null, and integers as floats": {"options": {**_NULLS, "num_predict": 7.0}, "tools": None, "format": None},
    "log-probabilities": "it had none before 0.12.11",
    "any JSON object": {"format": "json"},
    "a schema with references": {"format": SCHEMA},
    "tools": {"tools": TOOLS},
    **dict.fromkeys(CHOICES_OF_TOOLS, "it has no tool_choice"),
    "no thinking": {"think": False},
    "thinking": {"think": True},
    "little thinking": {"think": "low"},
}
OF_COMPLETIONS: dict[str, Any] = {
    **_TEXT,
    "a limit of tokens": {"max_tokens": 7},
    "texts that end a reply": {"stop": ["a", "b"]},
    "sampling": _SAMPLING,
    "null, and integers as floats": {**_NULLS, "max_tokens": 7.0, "n": None},
    "log-probabilities": {"logprobs": 2},
    "any JSON object": {"json_schema": {"type": "object"}},
    "a schema with references": {"json_schema": SCHEMA},
}
OF_LLAMA_CPP: dict[str, Any] = {
    **OF_COMPLETIONS,
    "a limit of tokens": {"n_predict": 7},
    "null, and integers as floats": {**_NULLS, "n_predict": 7.0},
    "log-probabilities": {"n_probs": 2},
}
OF_COMPAT: dict[str, Any] = {
    **OF_OPENAI,
    "a limit of tokens": {"max_tokens": 7},
    "texts that end a reply": {"stop": ["a", "b"]},
    "null, and integers as floats": "keywords are Python's",
    "a call of any tool": "llama-cpp-python has none",
    "a call of one tool": "it is held to the arguments alone, as there",
    **dict.fromkeys(("some of the tools", *SWITCHES_OF_THINKING), "llama-cpp-python has none"),
}


AS_FAR = "this is as far as it goes"


class AskedLLM(LLM):
    """Records its arguments and then fails."""

    asked: ClassVar[dict[str, Any]] = {}

    def stream_chat(self, messages: Any, **options: Any) -> Any:
        chosen = options.get("parse")
        lists = {"tools": options.get("tools"), "forced": chosen.forced if isinstance(chosen, ChosenTools) else None}
        AskedLLM.asked = options | {
            name: [tool["function"]["name"] for tool in tools or ()] for name, tools in lists.items()
        }
        raise UsageError(AS_FAR)

    def stream(self, prompt: Any, **options: Any) -> Any:
        AskedLLM.asked = options
        raise UsageError(AS_FAR)


def load_asked(*_: Any, **__: Any) -> AskedLLM:
    template = "{{ tools }}{{ messages[-1].content }}"
    return AskedLLM(load_file(LoadOptions(device="reference", threads=1, chat_template=template)))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with load_asked() as llm:
        yield llm


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(load_asked) as server:
        yield server


HELLO = {"messages": [HI]}
#: Path of each dialect, a minimal request, and the request for each feature.
ASKED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "library": ("", HELLO, OF_LIBRARY),
    "compat": ("", HELLO, OF_COMPAT),
    "openai": ("/v1/chat/completions", HELLO, OF_OPENAI),
    "anthropic": ("/v1/messages", {**HELLO, "max_tokens": 99}, OF_ANTHROPIC),
    "responses": ("/v1/responses", {"input": "hi"}, OF_RESPONSES),
    "ollama": ("/api/chat", HELLO, OF_OLLAMA),
    "ollama's generate": ("/api/generate", {"prompt": "hi", "raw": True}, {**OF_OLLAMA, **_TEXT}),
    "completions": ("/v1/completions", {"prompt": "hi"}, OF_COMPLETIONS),
    "llama.cpp": ("/completion", {"prompt": "hi"}, OF_LLAMA_CPP),
}


OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
SWITCHES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"enable_thinking": False}, OFF),
    ({"enable_thinking": True}, ON),
    ({"thinking": {"type": "disabled"}}, OFF),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ON),
    ({"thinking": {"type": "auto"}}, {}),
    ({"thinking": False}, OFF),
    ({"thinking": "disabled"}, OFF),
    ({"think": False}, OFF),
    ({"think": "low"}, {"reasoning_effort": "low", **ON}),
    ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none", **OFF}),
    ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high", **ON}),
    ({"reasoning": {"enabled": False}}, OFF),
    ({"reasoning": {"enabled": True}}, ON),
    ({"reasoning": "off"}, OFF),
    ({"reasoning_effort": "none"}, {"reasoning_effort": "none", **OFF}),
    ({"chat_template_kwargs": {"enable_thinking": False}}, OFF),
    ({"reasoning_effort": "high", "chat_template_kwargs": OFF}, {"reasoning_effort": "high", **OFF}),
    ({"thinking": None, "reasoning": None, "think": None, "enable_thinking": None}, {}),
]


@pytest.mark.parametrize(("switch", "variables"), SWITCHES)
@pytest.mark.parametrize("dialect", ["openai", "anthropic", "responses", "ollama"])
def test_every_form_of_switching_thinking_is_known_in_every_dialect(
    dialect: str, switch: dict[str, Any], variables: dict[str, Any], server: Serving
) -> None:
    path, base, _ = ASKED[dialect]
    AskedLLM.asked = {}
    answer = httpx.post(server.url + path, json={**base, **switch}, timeout=60)
    assert AS_FAR in answer.text
    assert AskedLLM.asked["template_variables"] == variables


@pytest.mark.parametrize(("switch", "variables"), SWITCHES)
def test_templates_are_rendered_with_every_switch(
    switch: dict[str, Any], variables: dict[str, Any], server: Serving
) -> None:
    assert msgspec.convert({"messages": [], **switch}, llamacpp.TemplateRequest).template_variables() == variables
    run = {"options": switch, "messages": [HI]}
    if None not in switch.values():
        assert ollama._job(msgspec.convert(run, ollama.OllamaRequest)).variables == variables


@pytest.mark.parametrize("feature", WANTED)
@pytest.mark.parametrize("dialect", ASKED)
def test_all_want_the_same(
    dialect: str, feature: str, server: Serving, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, base, cells = ASKED[dialect]
    if isinstance(cells[feature], str):
        pytest.skip(cells[feature])
    body, AskedLLM.asked = {**base, **cells[feature]}, {}
    if dialect == "library":
        with pytest.raises(UsageError, match=AS_FAR):
            llm.stream_chat(**body)
    elif dialect == "compat":
        monkeypatch.setattr("localllm.compat.load", load_asked)
        with compat.Llama("demo") as llama, pytest.raises(UsageError, match=AS_FAR):
            llama.create_chat_completion(**body)
    else:
        answer = httpx.post(server.url + path, json=body, timeout=60)
        assert AS_FAR in answer.text
        assert "x-ignored-fields" not in answer.headers
    asked = {name: AskedLLM.asked.get(name) for name in WANTED[feature]}
    if "stop" in asked:
        asked["stop"] = tuple(asked["stop"])
    if variables := asked.get("template_variables"):  # a level also enables thinking
        asked["template_variables"] = {name: variables[name] for name in WANTED[feature]["template_variables"]}
    assert asked == WANTED[feature]
