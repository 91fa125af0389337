"""Fields of llama.cpp's server and of vLLM's, and prompts in every form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from localllm.server.answers import _OPTIONS, GenerationFields
from localllm.server.llamacpp import LlamaCompletionRequest
from localllm.server.responses import ResponsesRequest
from tests.helpers.http_server import Serving, demo, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(demo()) as server:
        yield server


def post(server: Serving, path: str, **body: Any) -> Any:
    answer = httpx.post(server.url + path, json={"temperature": 0, **body}, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(server: Serving, **more: Any) -> str:
    messages = [{"role": "user", "content": "hi"}]
    answer = post(server, "/v1/chat/completions", messages=messages, max_tokens=60, **more)
    text: str = answer["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("request_type", [GenerationFields, LlamaCompletionRequest, ResponsesRequest])
def test_fields_have_the_types_of_the_options(request_type: type[GenerationFields]) -> None:
    types = {field.name: field.type for field in msgspec.structs.fields(request_type)}
    assert [types[name] for name, *_ in _OPTIONS] == [type_ for _, type_, _ in _OPTIONS]


CHOICES = ["yes, (a+b)*?", "no|maybe"]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}


@pytest.mark.parametrize("held", ["structured_outputs", "guided"])
def test_replies_are_held_as_clients_of_vllm_ask(server: Serving, held: str) -> None:
    def ask(name: str, value: Any) -> str:
        fields = {"structured_outputs": {name: value}} if held == "structured_outputs" else {f"guided_{name}": value}
        return said(server, **fields)

    assert ask("choice", CHOICES) in CHOICES
    assert ask("regex", "[ab]{3}c") in {f"{x}{y}{z}c" for x in "ab" for y in "ab" for z in "ab"}
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        assert json.loads(ask("json", schema))["a"] in (1, 2)
    assert ask("grammar", 'root ::= "x" | "y"') in "xy"


def test_any_object_and_two_ways_at_once(server: Serving) -> None:
    assert said(server, structured_outputs={"json_object": True}).lstrip().startswith("{")
    body = {"messages": [{"role": "user", "content": "hi"}], "guided_json": {}, "guided_regex": "a"}
    answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert "use only one" in answer.json()["error"]["message"]


def test_prompts_of_texts_and_tokens_in_turn(server: Serving) -> None:
    tokenizer = server.llm.tokenizer
    ids, more = tokenizer.encode("Once upon"), tokenizer.encode(" a time", add_special=False)
    forms = ["Once upon", {"prompt_string": "Once upon"}, ids, [*ids[:1], *ids[1:]]]
    texts = [post(server, "/completion", prompt=form, n_predict=4)["content"] for form in forms]
    assert len(set(texts)) == 1
    mixed = post(server, "/completion", prompt=[*ids, " a time"], n_predict=4)
    assert mixed["content"] == post(server, "/completion", prompt=ids + more, n_predict=4)["content"]
    several = post(server, "/completion", prompt=["Once upon", [*ids, " a time"]], n_predict=4)
    assert [(each["index"], each["content"]) for each in several] == [(0, texts[0]), (1, mixed["content"])]


def test_a_stream_of_several_prompts_is_what_they_are_whole(server: Serving) -> None:
    body = {"prompt": ["Once", "The little dog", [1, 2, "x"]], "n": 2, "max_tokens": 5, "echo": True, "seed": 5}
    whole = post(server, "/v1/completions", **body)
    texts = dict.fromkeys(range(6), "")
    options = {**body, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", server.url + "/v1/completions", json=options, timeout=300) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage")
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    counts = ("prompt_tokens", "completion_tokens")
    assert {name: usage[name] for name in counts} == {name: whole["usage"][name] for name in counts}


def test_the_fields_that_are_asked_for(server: Serving) -> None:
    fields = ["content", "generation_settings/n_predict", "timings/predicted_n", "nothing/here"]
    answer = post(server, "/completion", prompt="a", n_predict=2, response_fields=fields)
    assert answer == {
        "content": answer["content"],
        "generation_settings/n_predict": 2,
        "timings/predicted_n": 2,
    }


def test_settings_of_a_generation_are_told(server: Serving) -> None:
    settings = post(server, "/completion", prompt="a", n_predict=2, top_k=7)["generation_settings"]
    assert (settings["n_predict"], settings["top_k"], settings["temperature"], settings["min_p"]) == (2, 7, 0, 0.05)


def test_images_are_refused_where_a_model_reads_text(server: Serving) -> None:
    prompt = {"prompt_string": "<__media__>", "multimodal_data": ["aGk="]}
    answer = httpx.post(server.url + "/completion", json={"prompt": prompt}, timeout=60)
    assert answer.status_code == 400
    assert "was loaded without an encoder of images" in answer.text
