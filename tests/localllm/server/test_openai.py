"""OpenAI's client runs chat, completions, models and responses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.server.http import Limits
from tests.helpers.http_server import Serving, demo, scripted, serving

openai = pytest.importorskip("openai")

HELLO = [{"role": "user", "content": "Hello!"}]
BIASED = {"logit_bias": {"100": 100}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


def client_of(server: Serving, strict: bool = True) -> Any:
    url = server.url + "/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, _strict_response_validation=strict)


@pytest.fixture
def client(server: Serving) -> Iterator[Any]:
    with client_of(server) as made:
        yield made


def script(prompt: str) -> str:
    """Return the scripted reply: a tool call if there is a tool and no result yet."""
    if "tool: " in prompt:
        return "It is sunny in " + prompt.split("tool: ")[1].split("\n")[0]
    if "two calls" in prompt:
        call = '<tool_call>\n{"name": "weather", "arguments": {"place": "%s"}}\n</tool_call>'
        return "Let me see.\n" + call % "Rome" + "\n" + call % "Oslo"
    if "broken call" in prompt:
        return '<tool_call>\n{"name": "weather", "arguments": {"place":\n</tool_call> there.'
    if "think" in prompt:
        return "<think>\nHm.\n</think>\n\nYes."
    return "I have no idea."


@pytest.fixture(scope="module")
def actor() -> Iterator[Any]:
    """Return a client of the scripted model."""
    with serving(scripted(script)) as started, client_of(started) as made:
        yield made


# -- Chat ----------------------------------------------------------------------------------------------------------


def test_turns_of_an_agent_evaluate_what_they_share_once(client: Any, server: Serving) -> None:
    messages: list[Any] = [{"role": "system", "content": "You may read and write files. " * 40}]
    llm = server.llm
    n_before, n_shared, n_new = llm.counts.prompt_tokens, 0, 0
    for turn in range(20):
        messages.append({"role": "user", "content": f"Step {turn}."})
        reply = client.chat.completions.create(model="demo", messages=messages, max_tokens=3, temperature=0)
        cached = reply.usage.prompt_tokens_details.cached_tokens
        if turn:
            assert cached >= n_shared - 1
        n_new += reply.usage.prompt_tokens - cached
        n_shared = reply.usage.prompt_tokens
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    assert llm.counts.prompt_tokens - n_before == n_new < 2 * n_shared


def test_several_replies_to_one_prompt(client: Any) -> None:
    options = {"model": "demo", "messages": HELLO, "max_tokens": 8, "seed": 3, "n": 3, "temperature": 1.5}
    whole = client.chat.completions.create(**options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1
    assert whole.usage.completion_tokens == 24
    streamed = ["", "", ""]
    for event in client.chat.completions.create(**options, stream=True):
        streamed[event.choices[0].index] += event.choices[0].delta.content or ""
    assert streamed == texts


def test_logit_bias(client: Any) -> None:
    options = {"model": "demo", "messages": HELLO, "max_tokens": 3, "temperature": 0}
    texts = [client.chat.completions.create(**options, **more).choices[0].message.content for more in ({}, BIASED)]
    assert texts[0] != texts[1]


def test_errors_are_the_clients_own_exceptions(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "word " * 3000}])
    assert long.value.code == "context_length_exceeded"
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(openai.BadRequestError, match="without an encoder of images"):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": [part]}])
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.chat.completions.create(model="demo", messages=HELLO, top_p=7)
    with pytest.raises(openai.BadRequestError, match="cannot compute vectors"):
        client.embeddings.create(model="demo", input="a")


# -- Tools ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_tools(actor: Any, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "two calls"}]
    options = {"model": "demo", "messages": messages, "tools": [WEATHER], "tool_choice": "auto"}
    if stream:
        with actor.chat.completions.stream(**{k: v for k, v in options.items() if k != "stream"}) as events:
            message = events.get_final_completion().choices[0].message
    else:
        choice = actor.chat.completions.create(**options).choices[0]
        assert choice.finish_reason == "tool_calls"
        message = choice.message
    assert message.content == "Let me see."
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [
        {"place": "Rome"},
        {"place": "Oslo"},
    ]
    messages.append(message.model_dump(exclude_none=True))
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "Rome, Oslo"} for call in message.tool_calls]
    last = actor.chat.completions.create(**options).choices[0]
    assert last.message.content.startswith("It is sunny in Rome, Oslo")
    assert last.finish_reason == "stop"


def test_a_broken_call_is_seen_with_a_warning(actor: Any) -> None:
    reply = actor.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "broken call"}], tools=[WEATHER]
    )
    (call,) = reply.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments.strip()) == ("weather", '{"place":\nnull}')
    assert reply.choices[0].message.content == "there."
    assert "a call of weather is malformed" in reply.warnings[0]


def test_what_the_model_thinks_is_apart(actor: Any) -> None:
    messages = [{"role": "user", "content": "think"}]
    reply = actor.chat.completions.create(model="demo", messages=messages)
    message = reply.choices[0].message
    assert (message.reasoning_content.strip(), message.content) == ("Hm.", "Yes.")
    assert 0 < reply.usage.completion_tokens_details.reasoning_tokens < reply.usage.completion_tokens
    events = actor.chat.completions.create(
        model="demo", messages=messages, stream=True, extra_body={"chat_template_kwargs": {"enable_thinking": True}}
    )
    deltas = [event.choices[0].delta for event in events]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas).strip() == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."


def test_a_model_whose_template_has_no_tools_is_told_of_them(client: Any) -> None:
    def ask(**more: Any) -> Any:
        return client.chat.completions.create(model="demo", messages=HELLO, tools=[WEATHER], **more)

    reply = ask(max_tokens=1)
    assert "template has no tools" in reply.model_extra["warnings"][0]
    plain = ask(tool_choice="none", max_tokens=1)
    assert plain.choices[0].message.tool_calls is None
    assert reply.usage.prompt_tokens > plain.usage.prompt_tokens + 50
    forced = ask(tool_choice="required", max_tokens=200)
    assert forced.choices[0].message.tool_calls[0].function.name == "weather"
    assert forced.usage.prompt_tokens == reply.usage.prompt_tokens


# -- Completions and models ----------------------------------------------------------------------------------------


def test_completions_of_texts_and_tokens(client: Any, server: Serving) -> None:
    llm = server.llm
    options = {"model": "demo", "max_tokens": 6, "temperature": 0}
    expected = llm.generate("Once upon a time", max_tokens=6, temperature=0).text
    single = client.completions.create(prompt="Once upon a time", **options)
    assert single.choices[0].text == expected
    both = client.completions.create(prompt=["Once upon a time", "The sea"], n=2, **options)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[1].text == expected
    ids = llm.tokenize("Once upon a time")
    assert client.completions.create(prompt=ids, **options).choices[0].text == expected
    # The client's type requires a reason to end in every event, which OpenAI itself omits.
    with client_of(server, strict=False) as lenient:
        stream = lenient.completions.create(prompt="Once upon a time", stream=True, **options)
        assert "".join(event.choices[0].text for event in stream) == expected


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "localllm"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


# -- Responses -----------------------------------------------------------------------------------------------------


def test_responses_go_on_from_earlier_ones(client: Any) -> None:
    first = client.responses.create(model="demo", input="Hello!", temperature=0, max_output_tokens=30)
    assert first.status == "completed" or first.incomplete_details.reason == "max_output_tokens"
    second = client.responses.create(
        model="demo", input="Thanks", previous_response_id=first.id, max_output_tokens=4, temperature=0
    )
    assert second.usage.input_tokens > first.usage.input_tokens + 5
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 1
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="demo", input="a", previous_response_id="resp_../../etc/passwd")


def test_responses_follow_a_schema_and_call_one_tool_at_a_time(client: Any, actor: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    response = client.responses.create(model="demo", input="Hello!", text={"format": form})
    assert json.loads(response.output_text)["a"] in (1, 2)
    assert response.text.format.schema_ == schema
    tool = {"type": "function", **WEATHER["function"], "strict": False}
    one = actor.responses.create(model="demo", input="two calls", tools=[tool], parallel_tool_calls=False)
    assert [item.type for item in one.output] == ["message", "function_call"]


def test_a_folder_that_takes_no_response_costs_no_reply(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(demo(), responses_folder=tmp_path / "kept") as server, client_of(server) as client:
        (tmp_path / "kept").rmdir()
        first = client.responses.create(model="demo", input="Hello!", max_output_tokens=3)
        assert client.responses.retrieve(first.id).output_text == first.output_text
    assert "a response will be lost at a restart" in capfd.readouterr().err


def test_responses_in_a_folder_outlive_the_server(tmp_path: Path) -> None:
    with serving(demo(), responses_folder=tmp_path / "kept") as server, client_of(server) as client:
        first = client.responses.create(model="demo", input="Hello!", max_output_tokens=3)
    with serving(demo(), responses_folder=tmp_path / "kept") as server, client_of(server) as client:
        assert client.responses.retrieve(first.id).output_text == first.output_text
        (tmp_path / "kept" / f"{first.id}.json").write_bytes(b'{"client": ')
        (tmp_path / "kept" / "resp_old.json").touch()
        os.utime(tmp_path / "kept" / "resp_old.json", (0, 0))
    with (
        serving(demo(), responses_folder=tmp_path / "kept") as server,
        client_of(server) as client,
        pytest.raises(openai.NotFoundError),
    ):
        client.responses.retrieve(first.id)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [f"{first.id}.json"]


def test_responses_are_of_a_key_whichever_its_place(tmp_path: Path) -> None:
    """Otherwise another client could read them after a restart."""
    limits = Limits(api_keys=("none", "other"))
    with serving(demo(), limits=limits, responses_folder=tmp_path) as server, client_of(server) as client:
        first = client.responses.create(model="demo", input="Hello!", max_output_tokens=3)
    limits = Limits(api_keys=("other", "none"))
    with serving(demo(), limits=limits, responses_folder=tmp_path) as server, client_of(server) as client:
        assert client.responses.retrieve(first.id).output_text == first.output_text
        with pytest.raises(openai.NotFoundError):
            client.with_options(api_key="other").responses.retrieve(first.id)
