"""Ollama's client runs chat, generate, and information about models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.engines import eventually
from tests.helpers.http_server import Serving, demo, scripted, serving

ollama = pytest.importorskip("ollama")

HELLO = [{"role": "user", "content": "Hello!"}]
GREEDY = {"temperature": 0, "num_predict": 12}


@pytest.fixture
def client(server: Serving) -> Iterator[Any]:
    with ollama.Client(host=server.url) as made:
        yield made


def test_chat_whole_and_streamed(client: Any) -> None:
    whole = client.chat(model="demo", messages=HELLO, options=GREEDY)
    assert whole.done_reason == "length"
    assert (whole.eval_count, whole.done) == (12, True)
    assert whole.total_duration >= whole.eval_duration > 0
    parts = list(client.chat(model="demo", messages=HELLO, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_generate_with_the_template_and_raw(client: Any, server: Serving) -> None:
    llm = server.llm
    asked = client.generate(model="demo:latest", prompt="Hello!", options=GREEDY)
    assert asked.response == llm.chat(HELLO, max_tokens=12, temperature=0).text
    raw = client.generate(model="demo", prompt="Once upon", raw=True, options=GREEDY)
    assert raw.response == llm.generate("Once upon", max_tokens=12, temperature=0).text


def test_what_there_is(client: Any) -> None:
    (listed,) = client.list().models
    assert (listed.model, listed.details.family, listed.details.parameter_size) == ("demo", "llama", "4.3M")
    assert listed.size > 2e6
    assert len(listed.digest) == 64
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
    with pytest.raises(ollama.ResponseError, match="cannot compute vectors"):
        client.embed(model="demo", input="a")
    for refused_call in (
        lambda: client.delete("demo"),
        lambda: client.copy("demo", "a"),
        lambda: client.push("demo"),
    ):
        with pytest.raises(ollama.ResponseError, match=r"requests (change|download and delete) no models"):
            refused_call()


def test_keep_alive_unloads() -> None:
    with serving(demo()) as server, ollama.Client(host=server.url) as client:
        client.chat(model="demo", messages=HELLO, options=GREEDY, keep_alive="1h30m")
        assert server.models.served["demo"].ttl_s == 5400
        client.generate(model="demo", prompt="", keep_alive=1e300)
        assert client.ps().models[0].expires_at
        client.generate(model="demo", prompt="", keep_alive=0)
        assert server.models.served["demo"].llm is None
        assert not client.ps().models
        client.chat(model="demo", messages=HELLO, options=GREEDY, keep_alive=0)
        assert eventually(lambda: not client.ps().models)


def test_keep_alive_ends_no_reply() -> None:
    with serving(scripted("word " * 300)) as server, ollama.Client(host=server.url) as client:
        reply = client.chat(model="demo", messages=HELLO, stream=True)
        next(reply)
        client.generate(model="demo", prompt="", keep_alive=0)
        assert list(reply)[-1].done_reason == "stop"
        assert eventually(lambda: not client.ps().models)


def test_a_reply_gives_the_context_for_the_next_one(client: Any, server: Serving) -> None:
    first = client.generate(model="demo", prompt="Hello!", options=GREEDY)
    second = client.generate(model="demo", prompt="Thanks!", context=first.context, options=GREEDY)
    assert second.prompt_eval_count > len(first.context) > first.prompt_eval_count
    llm = server.llm
    assert second.context[: len(first.context)] == first.context
    assert llm.detokenize(second.context).endswith(second.response)
