"""Anthropic's client runs messages, streams, tools, thinking and token counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.http_server import Serving, scripted, serving

anthropic = pytest.importorskip("anthropic")

HELLO = [{"role": "user", "content": "Hello!"}]
WEATHER = {
    "name": "weather",
    "description": "The weather of a place.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
}
GREEDY = {"extra_body": {"temperature": 0}}


def client_of(server: Serving) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True)


@pytest.fixture
def client(server: Serving) -> Iterator[Any]:
    with client_of(server) as made:
        yield made


def script(prompt: str) -> str:
    if "tool: " in prompt:
        return "It is " + prompt.rpartition("tool: ")[2].split("assistant:")[0].strip()
    if "weather" in prompt:
        return '<think>Look.</think>Wait.<tool_call>{"name": "weather", "arguments": {"place": "Rome"}}</tool_call>'
    return "Nothing."


@pytest.fixture(scope="module")
def actor() -> Iterator[Any]:
    with serving(scripted(script)) as started, client_of(started) as made:
        yield made


def test_a_message(client: Any) -> None:
    reply = client.messages.create(model="demo", max_tokens=12, messages=HELLO, system="Be brief.", **GREEDY)
    assert reply.content[0].text
    assert (reply.stop_reason, reply.usage.output_tokens) == ("max_tokens", 12)
    again = client.messages.create(model="demo", max_tokens=12, messages=HELLO, system="Be brief.", **GREEDY)
    assert again.content[0].text == reply.content[0].text
    assert again.usage.input_tokens == 1
    assert again.usage.cache_read_input_tokens == reply.usage.input_tokens + reply.usage.cache_read_input_tokens - 1


def test_a_stop_sequence_is_named(client: Any) -> None:
    text = client.messages.create(model="demo", max_tokens=20, messages=HELLO, **GREEDY).content[0].text
    reply = client.messages.create(
        model="demo", max_tokens=20, messages=HELLO, stop_sequences=["zzz", text[5:9]], **GREEDY
    )
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", text[5:9])
    assert reply.content[0].text == text[:5]


def test_count_of_tokens(client: Any) -> None:
    count = client.messages.count_tokens(model="demo", messages=HELLO).input_tokens
    usage = client.messages.create(model="demo", max_tokens=1, messages=HELLO).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_tools_and_thinking(actor: Any, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    options = {"model": "demo", "max_tokens": 200, "tools": [WEATHER], "messages": messages}
    if stream:
        with actor.messages.stream(**options) as events:
            reply = events.get_final_message()
    else:
        reply = actor.messages.create(**options)
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
    thinking, text, call = reply.content
    assert (thinking.thinking, text.text, call.input) == ("Look.", "Wait.", {"place": "Rome"})
    assert reply.stop_reason == "tool_use"
    messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    messages.append({"role": "user", "content": [result]})
    assert actor.messages.create(**options).content[0].text == "It is sunny"


def test_errors_are_the_clients_own(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", max_tokens=1, messages=HELLO)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="demo", max_tokens=1, messages=[])
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match="without an encoder of images"):
        client.messages.create(model="demo", max_tokens=1, messages=[{"role": "user", "content": [image]}])
