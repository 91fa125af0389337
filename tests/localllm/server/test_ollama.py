"""Ollama's own client runs chat, generate, and what is said about models."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.http_server import Serving, demo, scripted, serving

ollama = pytest.importorskip("ollama")

HELLO = [{"role": "user", "content": "Hello!"}]
GREEDY = {"temperature": 0, "num_predict": 12}


@pytest.fixture
def client(server: Serving) -> Iterator[Any]:
    with ollama.Client(host=server.url) as made:
        yield made


def weather(place: str) -> str:
    """The weather.

    Args:
        place: where.
    """
    return place


def script(prompt: str) -> str:
    if "think" in prompt:
        return "Hm.</think>Yes."
    return '<tool_call>{"name": "weather", "arguments": {"place": "Rome"}}</tool_call>'


def test_chat_whole_and_streamed(client: Any) -> None:
    whole = client.chat(model="demo", messages=HELLO, options=GREEDY)
    assert whole.done_reason == "length"
    assert (whole.eval_count, whole.done) == (12, True)
    assert whole.total_duration >= whole.eval_duration > 0
    parts = list(client.chat(model="demo", messages=HELLO, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_generate_with_the_template_and_raw(client: Any, server: Serving) -> None:
    llm = server.models.served["demo"].llm or server.models._load(None, lambda *_: None)
    asked = client.generate(model="demo:latest", prompt="Hello!", options=GREEDY)
    assert asked.response == llm.chat(HELLO, max_tokens=12, temperature=0).text
    raw = client.generate(model="demo", prompt="Once upon", raw=True, options=GREEDY)
    assert raw.response == llm.generate("Once upon", max_tokens=12, temperature=0).text


def test_tools_and_thinking() -> None:
    with serving(scripted(script)) as server, ollama.Client(host=server.url) as client:
        reply = client.chat(model="demo", messages=HELLO, tools=[weather])
        (call,) = reply.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", {"place": "Rome"})
        thought = client.chat(model="demo", messages=[{"role": "user", "content": "think"}], think=True)
        assert (thought.message.thinking, thought.message.content) == ("Hm.", "Yes.")


def test_what_there_is(client: Any) -> None:
    assert [model.model for model in client.list().models] == ["demo"]
    client.generate(model="demo", prompt="")
    assert [model.model for model in client.ps().models] == ["demo"]
    shown = client.show("demo")
    assert shown.details.family == "llama"
    assert "completion" in shown.capabilities
    assert client.pull("demo").status == "success"
    with pytest.raises(ollama.ResponseError) as refused:
        client.pull("llama3")
    assert refused.value.status_code == 403
    with pytest.raises(ollama.ResponseError) as missing:
        client.chat(model="llama3", messages=HELLO)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="not available"):
        client.embed(model="demo", input="a")


def test_keep_alive_unloads() -> None:
    with serving(demo()) as server, ollama.Client(host=server.url) as client:
        client.chat(model="demo", messages=HELLO, options=GREEDY, keep_alive="1h30m")
        assert server.models.served["demo"].ttl_s == 5400
        client.generate(model="demo", prompt="", keep_alive=0)
        assert server.models.served["demo"].llm is None
        assert not client.ps().models
        client.chat(model="demo", messages=HELLO, options=GREEDY, keep_alive=0)
        end = time.monotonic() + 30
        while client.ps().models:
            assert time.monotonic() < end
            time.sleep(0.1)
