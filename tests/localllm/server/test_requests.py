"""Unusual requests of clients are accepted as intended, and answers have the form that they read."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import localllm
from localllm.chat.conversation import Message
from localllm.cli.defaults import chat_template
from localllm.cli.parser import parser_of
from localllm.errors import UsageError
from localllm.server import openai
from localllm.server.bodies import tolerant
from localllm.server.http import LONG_REQUEST, HTTPError, event, json_bytes
from localllm.server.ollama import _seconds
from localllm.server.response_store import ResponseStore
from tests.helpers.http_server import Serving

HI = [{"role": "user", "content": "hi"}]
#: A body for each API, and the path of the answer's text.
APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
    "/api/chat": {"messages": HI, "stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 2}},
    "/completion": {"prompt": "hi", "n_predict": 2},
}


def post(server: Serving, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def warnings_in(value: Any) -> list[str]:
    """Return the texts of every ``warnings`` field in a JSON value."""
    if isinstance(value, list):
        return [text for each in value for text in warnings_in(each)]
    if not isinstance(value, dict):
        return []
    return [*value.get("warnings", ()), *(text for each in value.values() for text in warnings_in(each))]


@pytest.mark.parametrize("path", [path for path in APIS if not path.startswith("/api/")])
def test_a_stream_that_is_null_is_none(server: Serving, path: str) -> None:
    assert post(server, path, {**APIS[path], "stream": None}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", APIS)
def test_a_reply_that_its_time_limit_ends_has_a_warning(server: Serving, path: str, stream: bool) -> None:
    limit = {"timeout": 1e-3, "ignore_eos": True}
    body = {**APIS[path], "stream": stream, **limit}
    for name in ("max_tokens", "max_output_tokens", "n_predict"):
        body.update({name: 900} if name in body else {})
    if "options" in body:
        body["options"] = {"num_predict": 900, **limit}
    response = post(server, path, body)
    assert response.status_code == 200
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if "{" in line]
    texts = [text for line in lines for text in warnings_in(json.loads(line))]
    assert texts == ["the text is cut off: its timeout of 0.001 seconds has passed"]


def read(body: Any, kind: Any) -> tuple[Any, list[str]]:
    ignored: list[str] = []
    return msgspec.convert(tolerant(body, kind, ignored), kind), ignored


def test_fields_inside_fields_are_taken_so_too() -> None:
    body = {"messages": HI, "stream_options": {"include_usage": None}, "n": 1.0, "logit_bias": {"5": 1.0}}
    chat, ignored = read(body, openai.ChatRequest)
    assert chat.n == 1
    assert not ignored
    assert chat.stream_options == openai.StreamOptions()
    with pytest.raises(msgspec.ValidationError, match=r"Expected `int | null`, got `float` - at `\$.n`"):
        read({**body, "n": 1.5}, openai.ChatRequest)


def test_whole_floats_are_integers_wherever_only_an_integer_can_be() -> None:
    body = {
        "prompt": [[1.0, 2.0], "a", 3.0],
        "logit_bias": [[5.0, 1.0], [6.0, False]],
        "lora": [{"id": 0.0, "scale": 1.0}],
    }
    completion, _ = read(body, openai.CompletionRequest)
    assert completion.prompt == [[1, 2], "a", 3]
    assert completion.lora[0].id == 0
    assert [type(each) for pair in completion.logit_bias for each in pair] == [int, float, int, bool]


def test_null_stays_where_it_is_a_value() -> None:
    """Schemas and messages are passed on unchanged."""
    schema = {"type": "object", "default": None}
    body = {
        "messages": [{"role": "user", "content": None}],
        "response_format": {"type": "json_schema", "schema": schema},
    }
    chat, _ = read(body, openai.ChatRequest)
    assert chat.messages == body["messages"]
    assert chat.response_format.schema == schema


def test_fields_that_nothing_reads_are_named_also_inside_others() -> None:
    body = {"messages": HI, "stream_options": {"color": 1}, "num_ctx": None, "user": "me", "messages2": 3}
    assert read(body, openai.ChatRequest)[1] == ["color", "messages2"]


@pytest.mark.parametrize("stop", ["", [], [""]])
def test_an_empty_stop_is_none(server: Serving, stop: Any) -> None:
    assert post(server, "/v1/completions", {**APIS["/v1/completions"], "stop": stop}).status_code == 200


def test_an_answer_is_one_line_however_lines_are_told() -> None:
    text = "a\x85b\u2028c\u2029d"
    for data in (json_bytes({"a": text}), event({"a": text})):
        assert len(data.decode().strip().splitlines()) == 1
        assert json.loads(data[data.index(b"{") :]) == {"a": text}


@pytest.mark.parametrize(
    ("words", "seconds"),
    [("5m", 300), ("1h30m", 5400), ("0", 0), ("+5m", 300), (".5h", 1800), ("100us", 1e-4), ("-1m", float("inf"))],
)
def test_durations_of_ollama(words: str, seconds: float) -> None:
    assert _seconds(words) == pytest.approx(seconds)


def test_control_tokens_of_a_prompt_are_those_tokens(server: Serving) -> None:
    def n_tokens(prompt: str) -> int:
        body = {**APIS["/v1/completions"], "prompt": prompt}
        return int(post(server, "/v1/completions", body).json()["usage"]["prompt_tokens"])

    llm = server.llm
    for prompt in ("<s>Hello", "<|user|>Hello!<|end|><|assistant|>"):
        assert n_tokens(prompt) == len(llm.tokenize(prompt, parse_special=True)) < len(llm.tokenize(prompt))
    assert n_tokens("<s>Hello") == n_tokens("Hello")


def test_an_echoed_prompt_has_the_likeliest_tokens_of_each_place(server: Serving) -> None:
    body = {"prompt": "Once upon a time", "echo": True, "logprobs": 3, "max_tokens": 1, "temperature": 0}
    choice = post(server, "/v1/completions", body).json()["choices"][0]
    found, ids = choice["logprobs"], server.llm.tokenize("Once upon a time")
    assert choice["text"].startswith("Once upon a time")
    assert found["top_logprobs"][0] is found["token_logprobs"][0] is None
    (score,) = server.llm.score(ids[:1], [ids[1:]])
    assert found["token_logprobs"][1:-1] == pytest.approx(score.logprobs, abs=1e-5)
    columns = (found[key][1:] for key in ("tokens", "token_logprobs", "top_logprobs"))
    for token, logprob, top in zip(*columns, strict=True):
        assert len(top) == 3
        assert list(top.values()) == sorted(top.values(), reverse=True)
        assert top.get(token, logprob) == logprob


@pytest.mark.parametrize("echo", [False, True])
def test_tokens_of_one_character_are_where_it_is(server: Serving, echo: bool) -> None:
    ids = server.llm.tokenize("é😀a", add_special=False)
    bias = {str(id_): 0 for id_ in ids}
    body = {"prompt": "x", "max_tokens": len(ids), "logprobs": 0, "echo": echo, "temperature": 0, "logit_bias": bias}
    body["grammar"] = 'root ::= "é😀a"'
    whole = post(server, "/v1/completions", body).json()["choices"][0]
    places = whole["logprobs"]["text_offset"]
    assert whole["text"].endswith("é😀a")
    begins = whole["text"].index("é")
    assert set(places[-len(ids) :]) <= {begins, begins + 1, begins + 2}
    assert places == sorted(places)
    stream = post(server, "/v1/completions", {**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    found = [each["choices"][0]["logprobs"] for each in events if each["choices"][0]["logprobs"]]
    assert [place for each in found for place in each["text_offset"]] == places


@pytest.mark.parametrize("more", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}])
def test_responses_have_the_logprobs_that_are_asked_for(server: Serving, more: dict[str, Any]) -> None:
    body = {"input": "hi", "max_output_tokens": 4, "temperature": 0, **more}
    answer = post(server, "/v1/responses", body).json()
    found = answer["output"][0]["content"][0]
    assert len(found["logprobs"]) == answer["usage"]["output_tokens"]
    assert "".join(each["token"] for each in found["logprobs"]).strip() == found["text"].strip()
    assert len(found["logprobs"][0]["top_logprobs"]) == more.get("top_logprobs", 0)
    stream = post(server, "/v1/responses", {**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    assert [one for each in deltas for one in each["logprobs"]] == found["logprobs"]
    (begun,) = (each["part"] for each in events if each["type"] == "response.content_part.added")
    assert (begun["text"], begun["logprobs"]) == ("", [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"])
def test_every_api_says_that_a_template_has_no_tools(server: Serving, path: str, stream: bool) -> None:
    tool: dict[str, Any] = {"type": "function", "name": "now", "function": {"name": "now"}, "input_schema": {}}
    answer = post(server, path, {**APIS[path], "tools": [tool], "stream": stream})
    assert answer.text.count("template has no tools") == 1


def test_chat_template_flags_are_read_alike(tmp_path: Path) -> None:
    file = tmp_path / "a.jinja"
    file.write_text("{{ messages }}\n")
    for command in ("serve", "generate"):
        parser = parser_of(command)
        template = chat_template(parser.parse_args(["--chat-template-file", str(file)]))
        assert template == "{{ messages }}"
        assert "im_start" in str(chat_template(parser.parse_args(["--chat-template", "chatml"])))
        for words in (["--chat-template", "none-such"], ["--chat-template-file", str(tmp_path / "none")]):
            with pytest.raises(UsageError):
                chat_template(parser.parse_args(words))


# -- Compatibility with other servers ----------------------------------------------------------------------------


def test_bodies_in_gzip(server: Serving) -> None:
    def send(data: bytes, encoding: str = "gzip") -> httpx.Response:
        return httpx.post(server.url + "/tokenize", content=data, headers={"Content-Encoding": encoding})

    packed = gzip.compress(json.dumps({"content": "Hello"}).encode())
    assert send(packed).json()["tokens"] == server.llm.tokenize("Hello", add_special=False)
    assert "not valid gzip" in send(b"{}").json()["error"]["message"]
    assert "is cut off" in send(packed[:-10]).json()["error"]["message"]
    assert send(packed, "br").status_code == 415
    assert send(gzip.compress(bytes(40 << 20))).status_code == 413


def test_a_slash_at_the_end_of_a_path_means_nothing(server: Serving) -> None:
    assert httpx.get(server.url + "/v1/models/").json() == httpx.get(server.url + "/v1/models").json()


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [
        ("http://localhost:5173", True),
        ("http://127.0.0.1:3000", True),
        ("app://obsidian.md", True),
        ("vscode-webview://a1", True),
        ("tauri://localhost", True),
        ("file://", True),
        ("http://tauri.localhost", True),
        ("https://app.localhost:3000", True),
        ("http://127.0.0.2:3000", True),
        ("http://[::1]:3000", True),
        ("http://notlocalhost", False),
        ("http://localhost.", False),
        ("ftp://localhost", False),
        ("https://example.org", False),
        ("http://localhost.example.org", False),
        ("null", False),
    ],
)
def test_programs_of_this_machine_may_ask_and_pages_may_not(server: Serving, origin: str, is_allowed: bool) -> None:
    answer = httpx.get(server.url + "/v1/models", headers={"Origin": origin})
    assert answer.status_code == (200 if is_allowed else 403)
    assert answer.headers.get("access-control-allow-origin") == (origin if is_allowed else None)


def test_tokens_of_prompts_are_counted_as_they_are_evaluated(server: Serving) -> None:
    chat = APIS["/v1/chat/completions"]
    for path in ("/v1/chat/completions", "/v1/responses"):
        counted = post(server, f"{path}/input_tokens", APIS[path]).json()["input_tokens"]
        usage = post(server, path, APIS[path]).json()["usage"]
        assert counted == usage.get("prompt_tokens", usage.get("input_tokens"))
    assert post(server, "/responses", APIS["/v1/responses"]).json()["object"] == "response"
    assert post(server, "/v1/chat/completions", chat).json()["timings"]["predicted_per_token_ms"] > 0


def test_the_input_of_a_kept_response(server: Serving) -> None:
    id_ = post(server, "/v1/responses", {**APIS["/v1/responses"], "instructions": "Be kind."}).json()["id"]
    items = httpx.get(f"{server.url}/v1/responses/{id_}/input_items").json()
    assert [(each["role"], each["content"][0]["text"]) for each in items["data"]] == [("user", "hi")]
    assert httpx.get(f"{server.url}/v1/responses/none/input_items").status_code == 404


def test_a_response_of_another_version_is_not_found_rather_than_empty(tmp_path: Path) -> None:
    id_ = f"resp_{'0' * 32}"
    old = {"client": "a", "messages": [{"role": "user", "content": "hi"}], "response": {}}
    (tmp_path / f"{id_}.json").write_text(json.dumps(old))
    with pytest.raises(HTTPError, match="there is no response"):
        ResponseStore(tmp_path).get(id_, "a")


def test_what_is_told_to_clients_of_ollama_and_to_prometheus(server: Serving) -> None:
    version = httpx.get(server.url + "/api/version").json()
    assert tuple(map(int, version["version"].split("."))) >= (0, 6, 4)
    assert version["localllm"] == localllm.__version__
    post(server, "/completion", APIS["/completion"])
    text = httpx.get(server.url + "/metrics").text
    for name in ("prompt_tokens_seconds", "predicted_tokens_seconds", "prompt_seconds_total"):
        (line,) = (line for line in text.splitlines() if line.startswith(f"llamacpp:{name}{{"))
        assert float(line.split()[-1]) > 0


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        *((path, {"stream": "no"}, "stream") for path in APIS),
        ("/v1/chat/completions", {"mirostat": 1}, "mirostat"),
        ("/v1/chat/completions", {"response_format": {"type": "xml"}}, "is 'xml', but must be text"),
        ("/v1/responses", {"text": {"format": {"type": "xml"}}}, "is 'xml', but must be text"),
        ("/v1/responses", {"conversation": "c1"}, "conversation"),  # OpenAI's own server stores these
        ("/v1/responses", {"prompt": {"id": "p1"}}, "prompt"),
        ("/v1/responses", {"background": True}, "background"),
        ("/v1/completions", {"top_p": 3.5}, '"param":"top_p"'),
        ("/api/chat", {"format": "xml"}, "format is 'xml'"),
        ("/api/chat", {"options": {"min_p": 7}}, "options.min_p"),
        ("/completion", {"top_p": 3.5}, "top_p"),
        ("/v1/messages", {"stop_sequences": ["a"] * 40}, "stop_sequences"),
    ],
)
def test_an_error_names_the_field_as_the_client_wrote_it(
    server: Serving, path: str, more: dict[str, Any], words: str
) -> None:
    answer = post(server, path, APIS[path] | more)
    assert (answer.status_code, words in answer.text) == (400, True), answer.text


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        ("/v1/messages", {"type": "web_search_20250305", "name": "web_search"}),
        ("/v1/responses", {"type": "web_search"}),
    ],
)
def test_tools_of_a_providers_own_server_are_left_out_with_a_warning(
    server: Serving, path: str, tool: dict[str, Any]
) -> None:
    answer = post(server, path, APIS[path] | {"tools": [tool], "stream": False})
    assert answer.status_code == 200, answer.text
    (said,) = answer.json()["warnings"]
    assert said == "tools that only a provider's server can run were omitted: web_search"


BERLIN = {"type": "object", "properties": {"city": {"enum": ["Berlin"]}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("path", "more", "field", "expected"),
    [
        (
            "/v1/chat/completions",
            {
                "tools": [{"type": "function", "function": {"name": "go", "parameters": BERLIN}}],
                "tool_choice": "required",
            },
            "finish_reason",
            "stop",
        ),
        (
            "/v1/responses",
            {"tools": [{"type": "function", "name": "go", "parameters": BERLIN}], "tool_choice": "required"},
            "status",
            "incomplete",
        ),
        (
            "/v1/messages",
            {"tools": [{"name": "go", "input_schema": BERLIN}], "tool_choice": {"type": "any"}},
            "stop_reason",
            "stop_sequence",
        ),
    ],
)
def test_a_call_that_a_stop_text_cuts_is_not_to_be_made(
    server: Serving, path: str, more: dict[str, Any], field: str, expected: str
) -> None:
    stop = {"stop_sequences" if path == "/v1/messages" else "stop": ["rlin"]}
    lengths = {"max_tokens": 99, "max_output_tokens": 99}
    whole = post(server, path, APIS[path] | more | lengths | {"stream": False}).json()
    cut = post(server, path, APIS[path] | more | lengths | stop | {"stream": False}).json()
    whole, cut = ({**each, **each.get("choices", [{}])[0]} for each in (whole, cut))
    assert whole[field] in ("tool_calls", "completed", "tool_use"), whole
    assert cut[field] == expected, cut


def test_a_message_to_ollama_needs_no_content(server: Serving) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "thinking": "hm"}, {"role": "user"}]
    assert post(server, "/api/chat", APIS["/api/chat"] | {"messages": messages}).status_code == 200


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/chat/completions/input_tokens", "messages"),
        ("/v1/messages", "messages"),
        ("/v1/messages/count_tokens", "messages"),
        ("/v1/responses", "input"),
        ("/v1/responses/input_tokens", "input"),
        ("/api/chat", "messages"),
        ("/apply-template", "messages"),
    ],
)
def test_long_conversations_are_read_beside_the_event_loop(
    server: Serving, monkeypatch: pytest.MonkeyPatch, path: str, field: str
) -> None:
    """The slow reader must not delay other clients' tokens."""
    threads: set[str] = set()
    make = Message.__init__

    def noted(*args: Any, **fields: Any) -> None:
        threads.add(threading.current_thread().name)
        make(*args, **fields)

    monkeypatch.setattr(Message, "__init__", noted)
    body = {field: [{"role": "user", "content": "a text of a message"}] * 6000, "max_tokens": 1}
    assert len(json.dumps(body)) > LONG_REQUEST
    post(server, path, body)
    assert threads
    assert all(name.startswith("localllm-long") for name in threads)
