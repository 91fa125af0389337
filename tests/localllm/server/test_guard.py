"""Access control, hostile requests and disconnecting clients: never a 5xx status, never a leak."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from starlette.types import Message

from localllm import LLM
from localllm.cancellation import CancelledError, check_cancelled
from localllm.chat import ChatTemplate
from localllm.errors import TemplateError
from localllm.options.types import LoadProgress
from localllm.server import http, uvicorn_server
from localllm.server.answers import GenerationJob, PendingReplies, Reply
from localllm.server.app import _ENDPOINTS
from localllm.server.http import EventStream, HTTPError, Limits
from tests.helpers.data import ROOT
from tests.helpers.engines import eventually
from tests.helpers.http_server import FAILS, Serving, demo, scripted, serving

HELLO = [{"role": "user", "content": "Hello!"}]
CHAT = "/v1/chat/completions"


def status(server: Serving, method: str = "GET", path: str = "/v1/models", **more: Any) -> int:
    return httpx.request(method, server.url + path, timeout=60, **more).status_code


# -- Access control --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost:8080", 200),
        ("127.0.0.1", 200),
        ("[::1]:8080", 200),
        ("LOCALHOST", 200),
        ("tauri.localhost", 200),
        ("192.168.0.7", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("localhost:8080@evil.example", 403),
        ("evil.example/localhost", 403),
        ("localhost:x", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_a_name_that_is_not_this_machines_is_refused(server: Serving, host: str, expected: int) -> None:
    """A page whose host name resolves to this machine must not read anything."""
    assert status(server, headers={"Host": host}) == expected


def test_pages_may_ask_only_if_they_are_named() -> None:
    with serving(demo(), limits=Limits(origins=("https://good.example",))) as server:
        good = httpx.get(server.url + "/v1/models", headers={"Origin": "https://good.example"})
        assert (good.status_code, good.headers["access-control-allow-origin"]) == (200, "https://good.example")
        asked = {"Origin": "https://good.example", "Access-Control-Request-Method": "POST"}
        assert status(server, "OPTIONS", CHAT, headers=asked) == 204
        for origin in ("https://evil.example", "null", "http://localhost.evil.example", "http://[::1"):
            refused = httpx.get(server.url + "/v1/models", headers={"Origin": origin})
            assert refused.status_code == 403
            assert "access-control-allow-origin" not in refused.headers
            assert status(server, "OPTIONS", CHAT, headers={**asked, "Origin": origin}) == 403
        assert status(server, headers={"Origin": server.url}) == 200


def test_keys() -> None:
    with serving(demo(), limits=Limits(api_keys=("first", "sécond"))) as server:
        for headers, expected in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "first"}, 401),
            ({"Authorization": "Bearer"}, 401),
            ({"Authorization": "Bearer first"}, 200),
            ({"authorization": "bearer first"}, 200),
            ({"x-api-key": "first"}, 200),
            ({"x-api-key": "sécond".encode()}, 200),
        ):
            assert status(server, headers=headers) == expected, headers
        assert status(server, path="/health") == status(server, path="/v1/health") == 200
        assert status(server, path="/") == 200
        assert status(server, path="/metrics") == 401


def test_errors_have_the_form_of_each_api(server: Serving) -> None:
    forms = {
        CHAT: lambda body: body["error"]["type"] == "invalid_request_error",
        "/v1/messages": lambda body: body["type"] == "error" and body["error"]["type"] == "invalid_request_error",
        "/api/chat": lambda body: isinstance(body["error"], str),
    }
    for path, has_form in forms.items():
        response = httpx.post(server.url + path, content=b"{")
        assert response.status_code == 400
        assert has_form(response.json()), response.text
    missing = httpx.get(server.url + "/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"


#: Required field of each path that reads or writes text.
NEEDED = {
    "/completion": "prompt", "/completions": "prompt", "/v1/completions": "prompt", "/infill": "input_prefix",
    "/v1/chat/completions": "messages", "/chat/completions": "messages", "/v1/responses": "input",
    "/responses": "input", "/v1/responses/input_tokens": "input",
    "/chat/completions/input_tokens": "messages", "/v1/chat/completions/input_tokens": "messages",
    "/v1/messages": "messages", "/v1/messages/count_tokens": "messages", "/apply-template": "messages",
    "/v1/embeddings": "input", "/embedding": "input", "/embeddings": "input", "/api/embed": "input",
    "/api/embeddings": "input", "/pooling": "input", "/rerank": "query", "/reranking": "query", "/v1/rerank": "query",
    "/v1/reranking": "query",
    "/tokenize": "content", "/detokenize": "tokens", "/audio/transcriptions": "file",
    "/v1/audio/transcriptions": "file",
    "/api/v0/chat/completions": "messages", "/api/v0/completions": "prompt", "/api/v0/embeddings": "input",
    "/api/v1/chat": "input", "/api/v1/models/load": "model", "/api/v1/models/unload": "instance_id",
    "/models/load": "model", "/models/unload": "model", "/v1/chat/completions/control": "id",
    "/page/tools/preview": "name", "/page/tools/call": "name", "/page/tools/undo": "id",
}  # fmt: skip
#: Ollama's clients load a model with an empty request; the other paths neither read nor write text.
NEED_NOTHING = {"/api/chat", "/api/generate", "/api/show", "/api/pull", "/slots/{id}", "/lora-adapters"}
NEED_NOTHING |= {"/api/copy", "/api/create", "/api/push", "/api/blobs/{digest}", "/unload", "/page/tools/restart"}


def test_every_path_is_known_to_need_a_text_or_not() -> None:
    posts = {path for method, paths, *_ in _ENDPOINTS if method == "POST" for path in paths}
    assert posts == NEEDED.keys() | NEED_NOTHING


@pytest.mark.parametrize("path", NEEDED)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_a_text_is_refused(server: Serving, path: str, stream: bool) -> None:
    for body in ({}, {NEEDED[path]: None}):
        response = httpx.post(server.url + path, json=body | {"stream": stream}, timeout=60)
        assert response.status_code == 400
        assert NEEDED[path] in response.text
    assert httpx.post(server.url + path, timeout=60).status_code == 400


def test_no_tokens_are_no_prompt(server: Serving) -> None:
    for path in ("/completion", "/v1/completions"):
        assert httpx.post(server.url + path, json={"prompt": []}, timeout=60).status_code == 400


def test_no_path_in_an_error() -> None:
    error = HTTPError.of(TemplateError("the chat template of /home/me/my models/a.gguf failed on these messages: x"))
    assert str(error) == "the chat template of a.gguf failed on these messages: x"
    assert error.status == 400


# -- Hostile requests ----------------------------------------------------------------------------------------------

BODIES = [
    b"",
    b"null",
    b"[]",
    b"\xff\xfe",
    b'{"messages": NaN}',
    b'{"temperature": 1e999, "messages": [{"role": "user", "content": "a"}]}',
    b'{"messages": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "a\\u0000b"}], "max_tokens": 1}',
    b'{"messages": [{"role": "\xf0\x9f\x98\x80", "content": {"a": 1}}]}',
    b'{"messages": [{"content": "a"}]}',
    b'{"messages": [{"role": "assistant", "content": null}]}',
    b'{"messages": [{"role": "assistant", "tool_calls": 5}]}',
    b'{"messages": [{"role": "assistant", "tool_calls": [5]}]}',
    b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "max_tokens": 1}',
    b'{"messages": [{"role": "user", "content": "a"}], "n": 1000000}',
    b'{"messages": [{"role": "user", "content": "a"}], "n": -1}',
    b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 123456789012345678901234567890}',
    b'{"messages": [{"role": "user", "content": "a"}], "seed": -5}',
    b'{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 9999, "logprobs": true}',
    b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"x": 1}}',
    b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"99999999": 1}}',
    b'{"messages": [{"role": "user", "content": "a"}], "stop": ["", ""], "max_tokens": 1}',
    b'{"messages": [{"role": "user", "content": "a"}], "stop": ["' + b"a" * 5000 + b'"]}',
    b'{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}',
    b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"function": {"name": 5}}]}',
    b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": []}}',
    b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": '
    + b"[" * 900
    + b"]" * 900
    + b"}}",
    b'{"messages": [{"role": "user", "content": "a"}], "timeout": -1}',
    b'{"messages": [], "response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}',
    b'{"messages": [{"role": "user", "content": "a"}], "priority": "first"}',
    b'{"model": "../../etc/passwd", "messages": []}',
    b'{"model": "", "prompt": [[]], "input": [], "tokens": [-1], "max_tokens": 1}',
    b'{"prompt": [1, "a"], "tokens": [99999999999999999999], "input": [{"type": "item_reference"}]}',
    b'{"prompt": "a", "options": {"num_predict": 1, "stop": 5}, "keep_alive": "soon"}',
    b'{"content": "\\ud800", "input": [{"type": "function_call"}], "max_tokens": 1, "n_predict": 1}',
]

PATHS = [
    CHAT,
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/api/pull",
    "/completion",
    "/infill",
    "/tokenize",
    "/detokenize",
    "/apply-template",
]

#: Short enough that no test waits for a text that continues to the end of the context.
FEW = b'"max_tokens": 2, "n_predict": 2, "max_output_tokens": 2, "options": {"num_predict": 2}, '


@pytest.mark.parametrize("path", PATHS)
def test_no_body_is_a_5xx(server: Serving, path: str) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for i, body in enumerate(BODIES):
            stream = b'"stream": true, ' if i % 2 else b""
            sent = body.replace(b"{", b"{" + stream + FEW, 1) if body.startswith(b'{"') else body
            response = client.post(path, content=sent)
            assert response.status_code < 500, (body[:200], response.text)
    server.wait_until_idle()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = """
    messages prompt model stream stop temperature top_k top_p seed n tools tool_choice input instructions system
    logprobs top_logprobs echo suffix tokens content options keep_alive think format thinking logit_bias timeout
    reasoning text metadata response_format stream_options input_extra
"""
FIELDS = st.sampled_from(NAMES.split())
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", 5])},
    optional={"content": JSON, "tool_calls": JSON, "images": JSON},
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(PATHS), st.dictionaries(FIELDS, JSON, max_size=4), st.none() | st.lists(MESSAGE, max_size=3))
def test_no_json_is_a_5xx(server: Serving, path: str, body: dict[str, Any], messages: list[Any] | None) -> None:
    body |= {"max_tokens": 2, "n_predict": 2, "max_output_tokens": 2}
    body |= {} if messages is None else {"messages": messages}
    if not isinstance(body.get("options"), dict):
        body["options"] = {"num_predict": 2}
    response = httpx.post(server.url + path, content=json.dumps(body), timeout=60)
    assert response.status_code < 500 or response.status_code == 501, response.text


MANY_ITEMS = {
    "/v1/responses": {"input": [{"type": "function_call", "name": "a"}] * 20_000, "max_output_tokens": 1},
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a" * 99}] * 25_000}],
        "max_tokens": 1,
    },
    "/v1/completions": {"prompt": " " * 9_000_000},
    "/completion": {"prompt": [5] * 2_000},
}


@pytest.mark.parametrize("path", MANY_ITEMS)
def test_a_long_request_takes_time_in_proportion(server: Serving, path: str) -> None:
    assert httpx.post(server.url + path, json=MANY_ITEMS[path], timeout=30).status_code in (200, 400)


def test_other_connections_have_their_turn_while_a_body_is_parsed(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing a body of short chunks takes seconds."""
    sizes: list[int] = []
    parse = uvicorn_server.H11Protocol.data_received

    def recorded(connection: Any, data: bytes) -> None:
        sizes.append(len(data))
        parse(connection, data)

    monkeypatch.setattr(uvicorn_server.H11Protocol, "data_received", recorded)
    body = json.dumps({"content": "a", "user": "a" * 20_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(server) as connection:
        connection.settimeout(60)
        for _ in range(2):
            connection.sendall(head + chunks)
            reply = b""
            while not reply.endswith(b"}"):
                reply += connection.recv(4096)
            assert reply.startswith(b"HTTP/1.1 200")
    assert sum(sizes) == 2 * len(head + chunks)
    assert 0 < min(sizes) <= max(sizes) <= 4096


def test_a_body_that_is_too_large_is_refused() -> None:
    with serving(demo(), limits=Limits(max_body=1000)) as server:
        assert status(server, "POST", "/tokenize", content=b"{" + b" " * 2000) == 413

        def pieces() -> Iterator[bytes]:  # sent without its length
            for _ in range(20):
                yield b" " * 100

        assert status(server, "POST", "/tokenize", content=pieces()) == 413
        assert status(server, "POST", "/tokenize", json={"content": "a" * 900}) == 200


def test_a_request_that_never_comes_to_an_end_is_refused() -> None:
    with serving(demo(), limits=Limits(read_timeout_s=0.3)) as server, connect(server) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        connection.settimeout(0.05)
        for _ in range(99):  # bytes that trickle in do not extend the limit
            connection.sendall(b" ")
            with contextlib.suppress(TimeoutError):
                reply = connection.recv(4096)
                break
        assert b"408" in reply.split(b"\r\n")[0]


#: Half a head, half a head after a whole request, and half a body.
HALF_SENT = {
    "nothing": b"",
    "head": b"GET /health HTTP/1.1\r\nHo",
    "second head": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP/1.1\r\nHo",
    "body": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
}


@pytest.mark.parametrize("half", ["nothing", "head", "second head"])
def test_a_head_has_to_come_in_time(server: Serving, half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_server, "HEAD_S", 0.2)
    with connect(server) as connection:
        for byte in HALF_SENT[half][:-2]:
            connection.sendall(bytes((byte,)))
        with contextlib.suppress(OSError):  # bytes that trickle in do not extend the limit
            for _ in range(200):
                time.sleep(0.02)
                connection.sendall(b"o")
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(4096):
                received += piece
    assert received.count(b"HTTP/1.1 200 OK") == (half == "second head")


@pytest.mark.parametrize("half", list(HALF_SENT))
def test_connections_that_say_nothing_shut_nobody_out(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_server, "MAX_CONNECTIONS", 8)
    with serving(scripted("word " * 900)) as server, contextlib.ExitStack() as stack:
        assert server.llm
        busy = stack.enter_context(connect(server))
        send_chat(busy, stream=True)
        assert busy.recv(100).startswith(b"HTTP/1.1 200")
        silent = []
        for _ in range(20):
            silent.append(stack.enter_context(connect(server)))
            silent[-1].sendall(HALF_SENT[half])
        for _ in range(5):
            assert status(server, path="/health") == 200
        silent[0].settimeout(10)
        with contextlib.suppress(ConnectionResetError):  # the connection that was silent longest is closed
            while silent[0].recv(4096):
                pass
        received = b""
        while received.count(b"data:") < 50:  # answered requests continue
            piece = busy.recv(1 << 16)
            assert piece
            received += piece


@pytest.mark.parametrize(
    ("limits", "refuses", "places"),
    [
        ((256, -1), False, 512),
        ((256, 4096), True, 112),
        ((64, 256), True, 8),
        ((1024, 1024), True, 512),
        ((-1, -1), True, 512),
    ],
)
def test_a_process_may_have_files_for_all_connections(
    limits: tuple[int, int], refuses: bool, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS allows a process 256 files, and more on request."""
    resource = pytest.importorskip("resource")
    asked: list[tuple[int, int]] = []

    def set_limit(kind: int, wanted: tuple[int, int]) -> None:
        if refuses:
            raise ValueError("not allowed to raise maximum limit")
        asked.append(wanted)

    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    assert uvicorn_server.connection_limit() == places
    assert asked == ([] if refuses else [(656, -1)])


def test_more_clients_than_places_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_server, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(uvicorn_server, "_ENDING", 0)
    with serving(scripted("word " * 900)) as server, contextlib.ExitStack() as stack:
        assert server.llm
        for expected in (b"HTTP/1.1 200", b"HTTP/1.1 200", b"HTTP/1.1 503", b"HTTP/1.1 503"):
            connection = stack.enter_context(connect(server))
            send_chat(connection, stream=True)
            assert connection.recv(100).startswith(expected)


# -- Slow work -----------------------------------------------------------------------------------------------------


class SlowWork:
    """Replaces the library's work: it runs until its caller is gone."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.begun.set()
        try:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                check_cancelled()
                time.sleep(0.001)
        except CancelledError:
            self.ended.set()
            raise


@pytest.mark.parametrize("path", [CHAT, "/apply-template", "/v1/messages/count_tokens"])
def test_work_ends_with_its_client(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = SlowWork()
    monkeypatch.setattr(ChatTemplate, "render", work)
    with serving(demo()) as server:
        assert server.llm
        body = {"messages": HELLO, "max_tokens": 5, "model": "demo"}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + path, json=body, timeout=httpx.Timeout(60, read=0.5))
        assert work.begun.is_set()
        assert work.ended.wait(30)
        server.wait_until_idle()


@pytest.mark.parametrize("stops", [True, False], ids=["work that ends", "work that does not"])
def test_work_ends_with_the_server(stops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    work, go_on = SlowWork(), threading.Event()

    def stuck(*_: Any, **__: Any) -> str:
        work.begun.set()
        go_on.wait(60)
        return ""

    monkeypatch.setattr(ChatTemplate, "render", work if stops else stuck)
    replies = []
    with serving(demo(), grace_s=300) as server:  # which is for running replies
        assert server.llm
        asking = threading.Thread(
            target=lambda: replies.append(httpx.post(server.url + CHAT, json={"messages": HELLO}, timeout=60))
        )
        asking.start()
        assert work.begun.wait(60)
        server.server.handle_exit(2, None)
        asking.join(30)
        assert not asking.is_alive()
    assert replies[0].status_code == 503
    assert "the server is stopping" in replies[0].text
    assert not stops or work.ended.wait(30)
    assert not go_on.is_set()  # the server ended without waiting for it
    go_on.set()


def test_a_request_that_has_yet_to_arrive_does_not_delay_the_end() -> None:
    with serving(demo(), grace_s=300) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.sendall(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            assert eventually(lambda: any(each.cycle for each in server.server.server_state.connections))
            server.server.handle_exit(2, None)
            client.recv(1000)  # with the grace period of running replies it would time out


def test_a_load_ends_with_the_server() -> None:
    begun = threading.Event()

    def endless_load(source: str | None, progress: LoadProgress, planned: object) -> LLM:
        while True:
            begun.set()
            progress("weights", 1, 100)
            time.sleep(0.01)

    before = threading.active_count()
    with serving(endless_load, grace_s=0.1, loads_first=True) as server:
        assert begun.wait(60)
    assert server.models.is_closed
    assert eventually(lambda: threading.active_count() <= before)


def test_the_process_ends_though_a_thread_does_not() -> None:
    code = (
        "import threading, time; from localllm.server.uvicorn_server import end_if_busy;"
        "threading.Thread(target=time.sleep, args=(300,)).start(); end_if_busy(3)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, cwd=ROOT).returncode == 3


# -- Disconnects ---------------------------------------------------------------------------------------------------


def connect(server: Serving) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def send_chat(connection: socket.socket, **body: Any) -> None:
    content = json.dumps({"messages": HELLO, **body}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)


@pytest.fixture(scope="module")
def endless() -> Iterator[Serving]:
    """A server whose model continues to the end of its context."""
    with serving(scripted("word " * 900)) as started:
        yield started


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_place(endless: Serving, stream: bool) -> None:
    llm = None
    for _ in range(5):
        with connect(endless) as connection:
            send_chat(connection, stream=stream, n=2)
            if stream:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
            else:
                assert eventually(lambda: endless.app.dispatcher.active)
        endless.wait_until_idle()
        llm = endless.models.served["demo"].llm
    assert llm is not None
    assert endless.models.served["demo"].n_users == 0
    assert llm.counts.n_pages_used == 0


def test_a_reader_that_takes_nothing_stalls_nobody_and_is_dropped(
    endless: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventStream, "send_timeout_s", 0.2)
    before = endless.llm.counts.generated_tokens
    for each in endless.server.servers[0].sockets:  # connections inherit it; larger buffers hold all 7,200 tokens
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    slow.connect(("127.0.0.1", endless.port))
    with slow:
        send_chat(slow, stream=True, n=8)
        body = {"messages": HELLO, "max_tokens": 5}
        reply = httpx.post(endless.url + CHAT, json=body, timeout=60).json()
        assert reply["choices"][0]["message"]["content"].startswith("word word")
        endless.wait_until_idle()
        assert endless.llm.counts.generated_tokens - before < 8 * 900
    # Unfinished tasks would be closed by the garbage collector in another thread, which has crashed Python.
    loop = endless.server._loop
    assert loop is not None
    assert eventually(lambda: not any("_put_events" in repr(task) for task in asyncio.all_tasks(loop)))


def test_an_answer_that_is_closed_before_it_is_read_begins_nothing() -> None:
    class Endless:
        def cancel(self) -> None:
            return

        def __aiter__(self) -> Endless:
            return self

        async def __anext__(self) -> Any:
            await asyncio.Event().wait()

    async def closed() -> list[Reply]:
        streams: Any = [Endless(), Endless()]
        nobody: Any = None
        answer = PendingReplies(GenerationJob(None, {}), nobody, nobody, streams, lambda answer: None, "", 0.0, 0.0)
        events = answer.events()
        answer.close()
        replies = [reply async for reply, _ in events]
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return replies

    assert asyncio.run(closed()) == []


def test_a_full_queue_says_when_to_come_again() -> None:
    with serving(scripted("word " * 900, max_waiting=1, parallel=1)) as server:
        connections = [connect(server) for _ in range(12)]
        try:
            statuses = []
            for connection in connections:
                send_chat(connection, stream=True)
            for connection in connections:
                head = connection.recv(400)
                statuses.append(int(head.split()[1]))
                if statuses[-1] == 429:
                    assert b"retry-after" in head.lower()
            assert set(statuses) == {200, 429}
        finally:
            for connection in connections:
                connection.close()
        server.wait_until_idle()


def test_a_server_that_stops_says_so() -> None:
    body = {"messages": HELLO, "stream": True}
    with (
        serving(scripted("word " * 900), grace_s=0.1) as server,
        httpx.stream("POST", server.url + CHAT, json=body, timeout=60) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.server.handle_exit(2, None)
        rest = list(lines)
    assert any("the server is stopping" in line or "[DONE]" in line for line in rest)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/api/chat", "/completion"])
def test_a_request_that_fails_says_so_and_takes_no_other_with_it(
    failing: Serving, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"/completion": {"prompt": "fail"}, "/v1/responses": {"input": "fail"}}
    body = {"max_tokens": 50, **asked.get(path, {"messages": [{"role": "user", "content": "fail"}]})}
    other: list[str] = []

    def ask_well() -> None:
        good = {"messages": [{"role": "user", "content": "go on"}]}
        reply = httpx.post(failing.url + CHAT, json=good, timeout=60).json()
        other.append(reply["choices"][0]["message"]["content"])

    thread = threading.Thread(target=ask_well)
    thread.start()
    whole = httpx.post(failing.url + path, json={**body, "stream": False}, timeout=60)
    assert whole.status_code == 500
    assert "a defect" not in whole.text
    streamed = httpx.post(failing.url + path, json={**body, "stream": True}, timeout=60)
    assert streamed.status_code == 200
    assert "unexpected error in localllm" in streamed.text.strip().splitlines()[-1]
    assert ("event: error" in streamed.text) == (path in ("/v1/messages", "/v1/responses"))
    if path == "/v1/responses":
        *_, error, failed = (
            json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")
        )
        assert error["message"] == failed["response"]["error"]["message"] == error["error"]["message"]
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    thread.join()
    assert other == ["word " * 200 + "end"]
    assert "RuntimeError: a defect" in caplog.text
    failing.wait_until_idle()


@pytest.fixture(scope="module")
def failing() -> Iterator[Serving]:
    def reply(prompt: str) -> str:
        return "word " * 200 + "end" if "go on" in prompt else f"One two {FAILS}"

    with serving(scripted(reply)) as started:
        yield started


def test_a_client_that_goes_before_its_request_is_whole(server: Serving, capfd: pytest.CaptureFixture[str]) -> None:
    with connect(server) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    assert status(server, "POST", "/tokenize", json={"content": "a"}) == 200
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("ping", [b": wait\n\n", b""])
def test_a_stream_that_has_nothing_to_say_pings_until_it_has(ping: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PING_S", 0.01)
    bodies: list[bytes] = []
    pinged = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        await (pinged.wait() if ping else asyncio.sleep(0.05))
        yield b"last"

    async def send(message: Message) -> None:
        bodies.append(message.get("body", b"head"))
        if bodies.count(ping) == 3:
            pinged.set()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    closed: list[bool] = []
    stream = EventStream(pieces(), lambda: closed.append(True), "text/event-stream", ping)
    asyncio.run(stream({"type": "http"}, receive, send))
    assert [body for body in bodies if body != ping or not body][:2] == [b"head", b"first"]
    assert bodies[-2:] == [b"last", b""]
    assert (bodies.count(ping) >= 3) if ping else (len(bodies) == 4)
    assert closed == [True]
