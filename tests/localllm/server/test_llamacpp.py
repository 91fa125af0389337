"""What llama.cpp's server has of its own."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from localllm.options import Options
from tests.helpers.http_server import TOOLS_TEMPLATE, Serving, demo, serving

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def post(server: Serving, path: str, **body: Any) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_completion_whole_and_streamed(server: Serving) -> None:
    body = {"prompt": "Once upon a time", "n_predict": 8, "temperature": 0, "n_probs": 2}
    whole = post(server, "/completion", **body)
    assert (whole["tokens_predicted"], whole["stop_type"]) == (8, "limit")
    assert len(whole["completion_probabilities"]) == 8
    text = ""
    with httpx.stream("POST", server.url + "/completion", json={**body, "stream": True}, timeout=60) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line]
    text = "".join(event["content"] for event in events)
    assert text == whole["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["timings"]["predicted_n"] == 8


def test_tokens_and_templates(server: Serving) -> None:
    ids = post(server, "/tokenize", content="Once upon")["tokens"]
    assert post(server, "/detokenize", tokens=ids)["content"] == "Once upon"
    pieces = post(server, "/tokenize", content="é", with_pieces=True)["tokens"]
    assert bytes(b for each in pieces for b in _bytes(each["piece"])).decode().strip() == "é"
    prompt = post(server, "/apply-template", messages=[{"role": "user", "content": "Hi"}])["prompt"]
    assert prompt.endswith("<|assistant|>")
    assert "Hi" in prompt


def _bytes(piece: str | list[int]) -> bytes:
    return piece.encode() if isinstance(piece, str) else bytes(piece)


def test_what_is_said_of_the_server(server: Serving) -> None:
    post(server, "/completion", prompt="a", n_predict=1)
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    assert httpx.get(server.url + "/props").json()["default_generation_settings"]["n_ctx"] == 1024
    assert httpx.get(server.url + "/lora-adapters").json() == []
    assert httpx.get(server.url + "/slots").json() == []
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    llm = server.models.served["demo"].llm
    assert llm is not None
    assert float(values['llamacpp:tokens_predicted_total{model="demo"}']) == llm.counts.generated_tokens > 0
    assert float(values['localllm_cache_usage_ratio{model="demo"}']) == 0
    kinds = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))


def test_infill_is_refused_by_a_model_that_does_not_fill_in(server: Serving) -> None:
    response = httpx.post(server.url + "/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert response.status_code == 400
    assert "does not fill in" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/embedding", "/api/embed", "/slots/0?action=save"])
def test_what_is_not_there_yet_says_so(server: Serving, path: str) -> None:
    response = httpx.post(server.url + path, json={})
    assert response.status_code == 501
    assert "not available in this version" in response.text


@pytest.mark.skipif("json_schema" in Options.__annotations__, reason="there are grammars")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}),
        ("/v1/chat/completions", {"tools": [TOOL], "tool_choice": "required"}),
        (
            "/v1/messages",
            {"tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "any"}},
        ),
        ("/api/chat", {"format": "json"}),
        ("/completion", {"grammar": "root ::= [a-z]"}),
        ("/completion", {"json_schema": {}}),
    ],
)
def test_without_grammars_nothing_is_ignored_in_silence(server: Serving, path: str, body: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "a"}]
    response = httpx.post(server.url + path, json={"messages": messages, "max_tokens": 1, **body}, timeout=60)
    assert response.status_code == 501, response.text


@pytest.mark.skipif("json_schema" not in Options.__annotations__, reason="there are no grammars")
def test_schemas_and_forced_calls() -> None:
    messages = [{"role": "user", "content": "a"}]
    with serving(demo(chat_template=TOOLS_TEMPLATE)) as server:
        schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
        schema["additionalProperties"] = False
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        reply = post(server, "/v1/chat/completions", messages=messages, response_format=form)
        assert json.loads(reply["choices"][0]["message"]["content"])["a"] in (1, 2)
        tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
        choice = {"type": "function", "function": {"name": "add"}}
        reply = post(server, "/v1/chat/completions", messages=messages, tools=[TOOL, tool], tool_choice=choice)
        (call,) = reply["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"])["a"] in (1, 2)


def test_the_page_needs_nothing_from_elsewhere(server: Serving) -> None:
    response = httpx.get(server.url + "/")
    assert response.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in response.headers["content-security-policy"]
    assert "http://" not in response.text
    assert "https://" not in response.text
