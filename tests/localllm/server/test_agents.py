"""Requests of coding agents, and their replies: tools, histories, budgets, model lists and endpoints."""

from __future__ import annotations

import base64
import json
import re
import socket
import threading
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import httpx
import pytest

from localllm.server.answers import PendingReplies
from localllm.server.openai import ChatRequest, _chat_job
from tests.helpers.engines import eventually
from tests.helpers.http_server import CALLS_TEMPLATE, TOOLS_TEMPLATE, Serving, demo, scripted, serving

HI = {"role": "user", "content": "hi"}


def post(server: Serving, path: str, body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def prompt_of(server: Serving, path: str, body: dict[str, Any]) -> str:
    """Return the prompt of a request, from the tokens that the server evaluated."""
    prompts: list[str] = []
    llm = server.llm
    original = llm.stream_chat

    def record(messages: Any, **options: Any) -> Any:
        stream = original(messages, **options)
        prompts.append(llm.tokenizer.decode(list(stream.tokens), special=True))
        return stream

    llm.stream_chat = record  # type: ignore[method-assign]
    try:
        answer = post(server, path, body)
    finally:
        del llm.stream_chat
    assert answer.status_code == 200, answer.text
    return prompts[0]


@pytest.fixture(scope="module")
def templated() -> Iterator[Serving]:
    with serving(demo(chat_template=TOOLS_TEMPLATE)) as server:
        yield server


# -- Codex -----------------------------------------------------------------------------------------------------------

PATCH = {"type": "custom", "name": "apply_patch", "description": "Change files.", "format": {"type": "text"}}
CALLS = {
    "apply_patch": {"input": '*** Begin\n"ä"\n'},
    "mcp__clock__set": {"hour": 3},
    "local_shell": {"command": ["ls", "-l"]},
    "tool_search": {"query": "clock"},
}
CODEX_TOOLS = [
    PATCH,
    {
        "type": "namespace",
        "name": "mcp__clock__",
        "description": "A clock.",
        "tools": [{"type": "function", "name": "set", "parameters": {"type": "object"}}],
    },
    {"type": "local_shell"},
    {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}},
    {"type": "web_search"},
]


def answer_with_call(prompt: str) -> str:
    name = next((name for name in CALLS if f"call {name} please" in prompt), "")
    if not name or "tool: " in prompt:
        return "Done."
    return "<tool_call>" + json.dumps({"name": name, "arguments": CALLS[name]}) + "</tool_call>"


@pytest.fixture(scope="module")
def actor() -> Iterator[Serving]:
    with serving(scripted(answer_with_call)) as server:
        yield server


@pytest.mark.parametrize("name", CALLS)
def test_codexs_tools_are_called_in_their_own_form(name: str, actor: Serving) -> None:
    openai = pytest.importorskip("openai")
    item_type, key = {
        "apply_patch": ("custom_tool_call", "input"),
        "mcp__clock__set": ("function_call", "arguments"),
        "local_shell": ("local_shell_call", "action"),
        "tool_search": ("tool_search_call", "arguments"),
    }[name]
    content = [{"type": "input_text", "text": f"call {name} please"}]
    history: list[Any] = [{"type": "message", "role": "user", "content": content}]
    more = {"model": "demo", "tools": CODEX_TOOLS, "store": False}
    with openai.OpenAI(base_url=f"{actor.url}/v1", api_key="none", max_retries=0) as client:
        with client.responses.stream(input=history, **more) as stream:
            events = list(stream)
        response = events[-1].response
        (item,) = response.output
        assert item.type == item_type
        value = getattr(item, key)
        assert {
            "apply_patch": lambda: value == CALLS[name]["input"],
            "mcp__clock__set": lambda: (
                (item.name, item.namespace, json.loads(value)) == ("set", "mcp__clock__", CALLS[name])
            ),
            "local_shell": lambda: (value.type, value.command) == ("exec", CALLS[name]["command"]),
            "tool_search": lambda: (value, item.execution) == (CALLS[name], "client"),
        }[name]()
        types = [event.type for event in events]
        assert types.count("response.output_item.added") == types.count("response.output_item.done") == 1
        if name == "apply_patch":
            texts = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
            assert "".join(texts) == value
            assert "response.custom_tool_call_input.done" in types
        result = {"type": f"{item_type}_output", "call_id": item.call_id, "output": "done"}
        if name == "tool_search":
            result = {"type": "tool_search_output", "call_id": item.call_id, "tools": [], "execution": "client"}
        again = client.responses.create(input=[*history, item.model_dump(exclude_none=True), result], **more)
        assert again.output_text == "Done."


def test_a_tool_that_is_not_a_function_can_be_forced(actor: Serving) -> None:
    body = {
        "model": "demo",
        "input": "hi",
        "tools": [PATCH],
        "tool_choice": {"type": "custom", "name": "apply_patch"},
    }
    (item,) = post(actor, "/v1/responses", body).json()["output"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "apply_patch")
    assert isinstance(item["input"], str)


GRAMMARS = {
    "lark": 'start: begin line{2} "*** \\"End\\""\nbegin: "*** Begin" LF\n'
    'line: "+" /[a-c"]{1,3}/ LF\n%import common.LF',
    "regex": r'[a-c]{2}\n"[d-f]{3}',
}
MATCHING = {"lark": r'\*\*\* Begin\n(\+[a-c"]{1,3}\n){2}\*\*\* "End"', "regex": GRAMMARS["regex"]}


@pytest.mark.parametrize("syntax", GRAMMARS)
def test_the_input_of_a_custom_tool_follows_its_grammar(syntax: str) -> None:
    tool = {**PATCH, "format": {"type": "grammar", "syntax": syntax, "definition": GRAMMARS[syntax]}}
    body = {"model": "demo", "input": "hi", "tools": [tool], "tool_choice": "required", "seed": 1}
    with serving(demo(chat_template=CALLS_TEMPLATE)) as server:
        (item,) = post(server, "/v1/responses", {**body, "max_output_tokens": 200}).json()["output"]
        assert item["type"] == "custom_tool_call"
        assert re.fullmatch(MATCHING[syntax], item["input"])
        tool["format"]["definition"] = "start: ("
        refused = post(server, "/v1/responses", body)
        assert refused.status_code == 400
        assert "grammar" in refused.text or "regex" in refused.text


CHAT_PATCH = {"type": "custom", "custom": {"name": "apply_patch", "description": "Change files."}}


def test_custom_tools_of_the_chat_api_are_called_with_text(actor: Serving) -> None:
    openai = pytest.importorskip("openai")
    text = CALLS["apply_patch"]["input"]
    history: list[Any] = [{"role": "user", "content": "call apply_patch please"}]
    more = {"model": "demo", "tools": [CHAT_PATCH]}
    with openai.OpenAI(base_url=f"{actor.url}/v1", api_key="none", max_retries=0) as client:
        (choice,) = client.chat.completions.create(messages=history, **more).choices
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, call.type) == ("tool_calls", "custom")
        assert (call.custom.name, call.custom.input) == ("apply_patch", text)
        history += [choice.message.model_dump(exclude_none=True)]
        history += [{"role": "tool", "tool_call_id": call.id, "content": "done"}]
        assert client.chat.completions.create(messages=history, **more).choices[0].message.content == "Done."
    body = {"messages": history[:1], **more, "stream": True}
    lines = post(actor, "/v1/chat/completions", body).text.split("\n\n")
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line.startswith("data: {")]
    first, *following = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert (first["index"], first["type"], first["custom"]) == (0, "custom", {"name": "apply_patch", "input": ""})
    assert {call["index"] for call in following} == {0}
    assert "".join(call["custom"]["input"] for call in following) == text
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("syntax", GRAMMARS)
def test_a_custom_tool_of_the_chat_api_is_forced_and_follows_its_grammar(syntax: str) -> None:
    grammar = {"syntax": syntax, "definition": GRAMMARS[syntax]}
    tool = {"type": "custom", "custom": {"name": "edit", "format": {"type": "grammar", "grammar": grammar}}}
    function = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    body = {"messages": [HI], "tools": [function, tool], "seed": 1, "max_tokens": 200}
    allowed = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "edit"}}]}
    with serving(demo(chat_template=CALLS_TEMPLATE)) as server:
        for choice in (allowed["tools"][0], {"type": "allowed_tools", "allowed_tools": allowed}):
            answer = post(server, "/v1/chat/completions", {**body, "tool_choice": choice}).json()
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert call["type"] == "custom"
            assert re.fullmatch(MATCHING[syntax], call["custom"]["input"])
        nameless = post(server, "/v1/chat/completions", {**body, "tools": [{"type": "custom", "custom": {}}]})
        assert nameless.status_code == 400
        assert "a tool of type custom has no name" in nameless.text


def test_a_stored_response_keeps_the_form_of_its_calls(actor: Serving) -> None:
    body = {"model": "demo", "input": "call apply_patch please", "tools": [PATCH]}
    first = post(actor, "/v1/responses", body).json()
    (call,) = first["output"]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    second = post(actor, "/v1/responses", {**body, "input": [result], "previous_response_id": first["id"]}).json()
    items = httpx.get(f"{actor.url}/v1/responses/{second['id']}/input_items").json()["data"]
    assert [item["type"] for item in items] == ["message", "custom_tool_call", "function_call_output"]
    assert items[1]["input"] == CALLS["apply_patch"]["input"]


def test_prompts_are_decoded_outside_the_event_loop(templated: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    original = PendingReplies.prompt_text

    def record(self: PendingReplies, index: int) -> str:
        threads.append(threading.current_thread().name)
        return original(self, index)

    monkeypatch.setattr(PendingReplies, "prompt_text", record)
    post(templated, "/v1/chat/completions", {"messages": [HI], "max_tokens": 1, "verbose": True})
    for more in ({"verbose": True}, {"response_fields": ["prompt"]}, {"verbose": True, "stream": True}):
        post(templated, "/completion", {"prompt": "hi", "n_predict": 1, **more})
    assert len(threads) == 4
    assert all(name.startswith("localllm-reply") for name in threads), threads


def test_the_tools_of_a_request_do_not_change() -> None:
    tools = [{"type": "function", "function": {"name": "now", "input_grammar": "mine", "strict": True}}]
    request = ChatRequest(messages=[HI], tools=deepcopy(tools))
    _chat_job(request)
    assert request.tools == tools


def test_fields_of_codex_are_accepted_and_skipped_items_are_warned_about(actor: Serving) -> None:
    body = {
        "model": "demo",
        "instructions": "Be brief.",
        "input": [{"type": "ghost_snapshot", "ghost_commit": {}}, HI, {"type": "web_search_call", "id": "ws_1"}],
        "tools": CODEX_TOOLS,
        "text": {"verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "client_metadata": {"a": "b"},
        "prompt_cache_key": "k",
    }
    answer = post(actor, "/v1/responses", body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["warnings"] == [
        "tools that only a provider's server can run were omitted: web_search",
        "parts of unknown types were omitted: ghost_snapshot, web_search_call",
    ]
    assert "localllm-ignored" not in " ".join(answer.headers).lower()


def test_a_websocket_upgrade_is_refused_at_once(actor: Serving) -> None:
    with socket.create_connection(("127.0.0.1", actor.port), 30) as connection:
        connection.sendall(
            b"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert connection.recv(12) == b"HTTP/1.1 426"


# -- Claude Code -----------------------------------------------------------------------------------------------------


def billed(stamp: str) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch={stamp};"


def test_a_changing_stamp_does_not_change_the_prompt(templated: Serving) -> None:
    def ask(system: Any) -> str:
        body = {"model": "demo", "max_tokens": 1, "messages": [HI], "system": system}
        return prompt_of(templated, "/v1/messages", body)

    texts = [{"type": "text", "text": "You are an agent with cch=12345; in its text."}]
    first, second = (ask([{"type": "text", "text": billed(stamp)}, *texts]) for stamp in ("ef01a", "0a1b2c3d"))
    assert first == second
    assert "cch=12345;" in first
    assert "ef01a" not in ask(billed("ef01a") + "You are an agent.")
    assert "cch=ef01a" in ask("Not at the start: " + billed("ef01a"))


def test_documents_and_unknown_blocks(templated: Serving) -> None:
    blocks = [
        {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "of text"}},
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "of blocks"}]}},
        {"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": "b2YgYnl0ZXM="}},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": ""}},
        {"type": "search_result", "title": "S", "source": "http://a", "content": [{"type": "text", "text": "found"}]},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "compaction", "content": "c"},
        {"type": "container_upload", "file_id": "f"},
        {"type": "text", "text": "end"},
    ]
    result = [{"type": "tool_reference", "tool_name": "t"}, {"type": "text", "text": "result"}]
    use = {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}}
    messages = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": result}]},
    ]
    body = {"model": "demo", "max_tokens": 1, "messages": messages}
    prompt = prompt_of(templated, "/v1/messages", body)
    for words in ("T\n\nof text", "of blocks", "of bytes", "S\nhttp://a\n\nfound", "end", "tool: result"):
        assert words in prompt
    (warning,) = post(templated, "/v1/messages", body).json()["warnings"]
    assert warning.endswith("omitted: server_tool_use, compaction, container_upload, tool_reference")


def test_tools_of_an_mcp_server_have_no_name(templated: Serving) -> None:
    tools = [
        {"type": "mcp_toolset", "mcp_server_name": "files"},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    body = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    (warning,) = post(templated, "/v1/messages", body).json()["warnings"]
    assert warning.endswith("omitted: mcp_toolset, web_search")


def test_a_reply_with_only_reasoning_goes_back_without_content(templated: Serving) -> None:
    reply = {"role": "assistant", "reasoning_content": "hm"}
    messages = [{"role": "user", "content": "hi"}, reply, {"role": "user", "content": "and?"}]
    body = {"model": "demo", "max_tokens": 1, "messages": messages}
    assert "user: and?" in prompt_of(templated, "/v1/chat/completions", body)


FILE = {"filename": "a.txt", "file_data": "data:text/plain;base64,b2YgYnl0ZXM="}
SOURCE = {"type": "base64", "media_type": "text/plain", "data": "b2YgYnl0ZXM="}


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/v1/chat/completions", {"type": "file", "file": FILE}),
        ("/v1/responses", {"type": "input_file", **FILE}),
        ("/v1/messages", {"type": "document", "title": "a.txt", "source": SOURCE}),
    ],
)
def test_files_of_text_in_every_dialect(path: str, part: dict[str, Any], templated: Serving) -> None:
    messages = [{"role": "user", "content": [part]}]
    body = {"model": "demo", "max_tokens": 1, "input" if path == "/v1/responses" else "messages": messages}
    assert "user: a.txt\n\nof bytes" in prompt_of(templated, path, body)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"file_id": "file-1"}, "send the file's bytes in base64"),
        ({"file_data": "!!!"}, "is not in base64"),
        ({"file_data": "/w=="}, "is neither text nor a PDF file"),
        ({"file_data": "JVBERi0="}, "PDF"),
    ],
)
def test_files_that_cannot_be_read(file: dict[str, Any], words: str, templated: Serving) -> None:
    body = {
        "model": "demo",
        "input": [{"role": "user", "content": [{"type": "input_file", "filename": "a", **file}]}],
    }
    answer = post(templated, "/v1/responses", body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def pdf_of(text: str) -> bytes:
    content = f"BT /F 12 Tf 10 100 Td ({text}) Tj ET".encode()
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 200 200]/Resources<</Font<</F 4 0 R>>>>/Contents 5 0 R>>",
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(content), content),
    ]
    written = b"".join(b"%d 0 obj%sendobj\n" % (i, item) for i, item in enumerate(objects, 1))
    return b"%PDF-1.4\n" + written + b"trailer<</Root 1 0 R>>\nstartxref\n0\n%%EOF\n"


def test_a_pdf_file_is_read_as_text(templated: Serving) -> None:
    pytest.importorskip("pypdf")
    data = base64.b64encode(pdf_of("Words of a page")).decode()
    file = {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{data}"}
    body = {"model": "demo", "max_output_tokens": 1, "input": [{"role": "user", "content": [file]}]}
    assert "a.pdf\n\nWords of a page" in prompt_of(templated, "/v1/responses", body)


# -- Reasoning -------------------------------------------------------------------------------------------------------

THINKING_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:<think>"


@pytest.fixture(scope="module")
def thinker() -> Iterator[Serving]:
    with serving(demo(chat_template=THINKING_TEMPLATE)) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "budget"),
    [
        ("/v1/chat/completions", {"reasoning_budget": 9}),
        ("/v1/chat/completions", {"reasoning_budget_tokens": 9}),
        ("/v1/chat/completions", {"thinking_budget": 9}),
        ("/v1/chat/completions", {"thinking_budget_tokens": 9}),
        ("/v1/chat/completions", {"reasoning": {"max_tokens": 9}}),
        ("/v1/responses", {"reasoning": {"max_tokens": 9}}),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 9}}),
        ("/api/chat", {"reasoning_budget": 9, "stream": False}),
    ],
)
@pytest.mark.parametrize("more", [{}, {"regex": "[a-z]+"}, {"temperature": 0}])
def test_a_budget_of_reasoning_is_exact(
    path: str, budget: dict[str, Any], more: dict[str, Any], thinker: Serving
) -> None:
    limit: dict[str, Any] = {"ignore_eos": True}
    if path.startswith("/api"):
        limit = {"options": {"num_predict": 30, **limit}}
    limit |= {"max_output_tokens" if "responses" in path else "max_tokens": 30}
    body = {"model": "demo", "input" if "responses" in path else "messages": [HI], **limit, **budget, **more}
    answer = post(thinker, path, body)
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    if path == "/v1/chat/completions":
        thinking, text = (reply["choices"][0]["message"][name] for name in ("reasoning_content", "content"))
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 9
    elif path == "/v1/responses":
        thinking, text = (item["content"][0]["text"] for item in reply["output"])
        assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] == 9
    elif path == "/v1/messages":
        thinking, text = reply["content"][0]["thinking"], reply["content"][1]["text"]
    else:
        thinking, text = reply["message"]["thinking"], reply["message"]["content"]
    assert thinking
    assert text
    assert "think>" not in thinking + text


def test_budgets_of_nothing_and_without_limit(thinker: Serving) -> None:
    def ask(budget: int, **more: Any) -> Any:
        body = {"model": "demo", "messages": [HI], "max_tokens": 20, "ignore_eos": True}
        body |= {"reasoning_budget": budget, **more}
        return post(thinker, "/v1/chat/completions", body)

    none = ask(0).json()
    assert none["choices"][0]["message"]["content"]
    assert none["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert ask(-1).json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 20
    message = ask(4, reasoning_budget_message=" Enough.").json()["choices"][0]["message"]
    assert message["reasoning_content"].endswith(" Enough.")
    assert ask(-2).status_code == 400


@pytest.mark.parametrize(
    "path", ["/v1/messages/count_tokens", "/v1/chat/completions/input_tokens", "/v1/responses/input_tokens"]
)
def test_counts_of_tokens_refuse_a_wrong_budget(thinker: Serving, path: str) -> None:
    field = "input" if "responses" in path else "messages"
    for budget, status in ((-2, 400), (-1, 200), (5, 200)):
        body = {"model": "demo", field: [HI], "thinking": {"type": "enabled", "budget_tokens": budget}}
        answer = post(thinker, path, body | {"logit_bias": {"1": -1}})
        assert answer.status_code == status, answer.text
        assert status == 200 or "reasoning_budget is -2" in answer.text


def test_a_running_reply_is_made_to_answer(thinker: Serving) -> None:
    body = {"model": "demo", "messages": [HI], "max_tokens": 400, "ignore_eos": True, "stream": True}
    thinking, text, is_told = 0, "", False
    with httpx.stream("POST", f"{thinker.url}/v1/chat/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line[6:])
            delta = piece["choices"][0]["delta"]
            thinking += "reasoning_content" in delta
            text += delta.get("content") or ""
            if thinking == 3 and not is_told:
                is_told = True
                told = post(thinker, "/v1/chat/completions/control", {"id": piece["id"], "action": "reasoning_end"})
                assert told.json() == {"success": True}
            if text:
                break
    assert text
    missed = post(thinker, "/v1/chat/completions/control", {"id": "chatcmpl-none", "action": "reasoning_end"})
    assert missed.json()["success"] is False
    assert post(thinker, "/v1/chat/completions/control", {"id": "a", "action": "jump"}).status_code == 400


# -- Lists of models, and programs that switch models ----------------------------------------------------------------


def test_model_lists_tell_the_planned_and_the_allocated_context() -> None:
    with serving(demo(context=128), context=128) as server:
        for _ in range(2):
            (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
            names = ("context_length", "max_model_len", "max_input_tokens", "max_tokens")
            assert {name: model[name] for name in names} == dict.fromkeys(names, 128)
            assert model["architecture"]["input_modalities"] == ["text"]
            assert server.llm.info.context == 128  # loads the model
        assert model["status"]["value"] == "loaded"


def test_props_tell_what_the_template_supports(templated: Serving) -> None:
    capabilities = httpx.get(f"{templated.url}/props?model=demo", timeout=60).json()["chat_template_caps"]
    assert capabilities == {
        "supports_string_content": True,
        "supports_typed_content": False,
        "supports_tools": True,
        "supports_tool_calls": True,
        "supports_parallel_tool_calls": True,
        "supports_system_role": True,
        "supports_preserve_reasoning": False,
        "supports_reasoning_effort": False,
        "supports_object_arguments": True,
    }


def test_models_are_loaded_unloaded_and_watched() -> None:
    with serving(demo()) as server:
        events: list[dict[str, Any]] = []

        def watch() -> None:
            with httpx.stream("GET", f"{server.url}/models/sse", timeout=60) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        events.append(json.loads(line[6:]))
                        if len(events) > 2 and events[-1]["data"]["status"] == "unloaded":
                            return

        watcher = threading.Thread(target=watch)
        watcher.start()
        assert post(server, "/models/load", {"model": "demo"}).json() == {"success": True}
        ready = {"model": "demo", "state": "ready", "ttl": 0}
        assert eventually(lambda: httpx.get(f"{server.url}/running").json()["running"] == [ready])
        assert eventually(lambda: events[-1]["data"] == {"status": "loaded"})
        assert post(server, "/models/unload", {"model": "demo"}).json() == {"success": True}
        watcher.join(30)
        assert not watcher.is_alive()
        assert {(event["model"], event["event"]) for event in events} == {("demo", "model_status")}
        assert events[0]["data"]["status"] in ("unloaded", "loading")
        assert httpx.get(f"{server.url}/running").json() == {"running": []}
        assert server.llm
        refused = httpx.get(f"{server.url}/unload", headers={"User-Agent": "Mozilla/5.0"})
        assert refused.status_code == 403
        assert httpx.get(f"{server.url}/unload").text == "OK"
        assert server.models.served["demo"].llm is None
        assert post(server, "/models/load", {"model": "missing"}).status_code == 404


def test_lm_studios_endpoints(thinker: Serving) -> None:
    assert thinker.llm
    (model,) = httpx.get(f"{thinker.url}/api/v0/models").json()["data"]
    assert httpx.get(f"{thinker.url}/api/v0/models/demo").json() == model
    assert model["loaded_context_length"] == thinker.llm.info.context
    body = {"model": "demo", "messages": [HI], "max_tokens": 3}
    assert post(thinker, "/api/v0/chat/completions", body).json()["usage"]["completion_tokens"] == 3
    (model,) = httpx.get(f"{thinker.url}/api/v1/models").json()["models"]
    assert (model["key"], model["loaded_instances"][0]["id"], model["type"]) == ("demo", "demo", "llm")
    loaded = post(thinker, "/api/v1/models/load", {"model": "demo"}).json()
    assert (loaded["instance_id"], loaded["status"]) == ("demo", "loaded")


def test_chats_of_lm_studio(thinker: Serving) -> None:
    body = {"model": "demo", "input": "hi", "system_prompt": "S", "max_output_tokens": 20, "thinking_budget": 5}
    body["ignore_eos"] = True
    whole = post(thinker, "/api/v1/chat", {**body, "temperature": 0}).json()
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    assert whole["stats"]["total_output_tokens"] == 20
    events = []
    with httpx.stream(
        "POST", f"{thinker.url}/api/v1/chat", json={**body, "temperature": 0, "stream": True}
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
    assert (events[0]["type"], events[-1]["type"]) == ("chat.start", "chat.end")
    assert events[-1]["result"]["output"] == whole["output"]
    texts = [event["content"] for event in events if event["type"] == "message.delta"]
    assert "".join(texts) == whole["output"][1]["content"]
    follows = {"model": "demo", "input": "more", "previous_response_id": whole["response_id"], "max_output_tokens": 1}
    assert post(thinker, "/api/v1/chat", follows).json()["stats"]["input_tokens"] > whole["stats"]["input_tokens"]


def test_pings_of_ollamas_dialect_are_chunks(monkeypatch: pytest.MonkeyPatch, thinker: Serving) -> None:
    monkeypatch.setattr("localllm.server.http.PING_S", 0.005)
    message = {"role": "user", "content": "word " * (thinker.llm.info.context // 2)}
    body = {"model": "demo", "messages": [message], "options": {"num_predict": 1}}
    with httpx.stream("POST", f"{thinker.url}/api/chat", json=body, timeout=60) as answer:
        lines = [json.loads(line) for line in answer.iter_lines()]
    pings = [line for line in lines if not line["done"] and line["message"] == {"role": "assistant", "content": ""}]
    assert pings
    assert lines[-1]["done"]
