"""Random hostile requests to every route, with the keys of every role.

The requests are the same in every run.  ``LOCALLLM_ROUNDS=100`` sends more of them; the default is a few per route.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from localllm.server.http import Limits
from localllm.server.keys import KeyFile
from localllm.server.monitor import Monitoring
from localllm.server.roles import MAY_USE, ROLE_OF
from tests.helpers.engines import eventually
from tests.helpers.http_server import Serving, demo, serving
from tests.helpers.hub_server import hub_of_this_process
from tests.localllm.server.test_keys import NEEDS_ADMIN, ROLES, key_file, section
from tests.localllm.server.test_logs import logging_as

#: Requests per route and role.
ROUNDS = int(os.environ.get("LOCALLLM_ROUNDS", "6"))
ROUTES = sorted(ROLE_OF)
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
REQUEST_ID = re.compile(rb"\r\nx-request-id: ([A-Za-z0-9._~:/+=@-]{1,128})\r\n")

VALUES: list[Any] = [
    None, True, -1, 0, 1, 7, 2**31, 10**30, 1e308, -0.5, "", "a", "demo", "../../etc/passwd", "/etc/passwd", "a\0b",
    "\ud800", "\u202e", "🙂" * 40, "a" * 3000, "%00", "file:///etc/passwd", "data:image/png;base64,AAAA", "10m",
    "auto", "http://127.0.0.1:1/a.png", [], [[]], [None], ["a", 1], [-1, 2**40], {}, {"a": {}}, {"type": "function"},
    {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}, {"role": "user", "content": "a"},
    [{"role": "user", "content": "Hello!"}], [{"role": "tool", "content": [{"type": "image_url", "image_url": 5}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], [{"id": 0, "scale": 9}],
    [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}], "root ::= [", "(a*)*b", "save",
]  # fmt: skip
NAMES = """
    messages prompt model name instance_id source destination stream stop temperature top_k top_p seed n tools action
    tool_choice input instructions system logprobs top_logprobs echo suffix tokens content options keep_alive think id
    format thinking logit_bias timeout reasoning text metadata response_format stream_options input_extra filename
    lora grammar regex json_schema priority n_probs images documents query dimensions encoding_format top_n
    response_fields steering layer pooling previous_response_id store add_special with_pieces file language
    chat_template_kwargs path reasoning_budget context_length insecure verbose system_prompt input_prefix
    input_suffix multimodal_data role
"""
#: Short enough that no request generates to the end of the context.
FEW = {"max_tokens": 2, "n_predict": 2, "max_output_tokens": 2, "max_completion_tokens": 2}
BYTES = [
    b"", b"null", b"[]", b"{", b"\xff\xfe", b"\0" * 50, b"a=1&b=2", b'{"model": NaN}', b"[" * 3000, b'"a"', b"--a--",
    gzip.compress(b"{}"), gzip.compress(b"{}")[:-3], b'{"a":1}{"a":2}', b'{"model":"demo","model":5}',
]  # fmt: skip
TYPES = [
    b"application/json", b"text/plain", b"multipart/form-data; boundary=a", b"multipart/form-data", b"a/b;" * 50,
    b"\xff", b"application/json; charset=utf-16", b"application/x-www-form-urlencoded",
]  # fmt: skip
HEADER_VALUES = [
    b"", b"a", b"\xff\xfe", b"a" * 5000, b"\t", b"127.0.0.1", b"::1, unix, 10.0.0.1", b"admin", b"../..",
    b"%0d%0aX: y",
    b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-ff", b"-1",
    b'{"level": "error"}', b"\x1b[31m", b"1e999", b"a, b;q=nan", b"bytes=0-", b"*", b"\xe2\x80\xae", b"x\x7fy",
    b"nan",
]  # fmt: skip
HEADERS = [
    b"X-Forwarded-For", b"X-Forwarded-Proto", b"X-Forwarded-Host", b"Forwarded", b"X-Real-IP", b"traceparent",
    b"tracestate", b"baggage", b"X-Request-ID", b"Accept", b"Accept-Encoding", b"User-Agent", b"X-Priority",
    b"X-Timeout",
    b"X-HTTP-Method-Override", b"X-Original-URL", b"Cookie", b"Referer", b"Range", b"If-None-Match", b"Expect-CT",
    b"anthropic-version", b"anthropic-beta", b"OpenAI-Organization", b"X-User", b"X-Role", b"Sec-Fetch-Site",
]  # fmt: skip
PARAMETERS = [
    "0",
    "demo",
    "..",
    "%2e%2e%2fmodels",
    "%00",
    "%ff",
    "a" * 300,
    "%f0%9f%99%82",
    "-1",
    "resp_0",
    "a%20b",
    "*",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with one key per role, which is the role's name, below a prefix.  Its hub has no repositories."""
    folder = tmp_path_factory.mktemp("keys")
    keys = key_file(folder, *(section(role, role=role) for role in ROLES[1:]))
    options: dict[str, Any] = {"names": ("demo", "other"), "may_pull": True, "prompts": folder / "prompts"}
    options |= {"limits": Limits(keys=KeyFile(keys), prefix="/llm"), "monitoring": Monitoring(metrics_per_key=True)}
    with pytest.MonkeyPatch.context() as patched, hub_of_this_process(folder / "home", patched):
        with serving(demo(context=256), **options) as started:
            yield started
        assert list(folder.rglob("*.gguf")) == []


def exchange(server: Serving, head: bytes, body: bytes = b"", *, is_endless: bool = False) -> bytes:
    """Send a request, and return the response, of an endless response only the head."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head + b"\r\n" + body)
        received = b""
        while not (is_endless and b"\r\n\r\n" in received) and (piece := connection.recv(1 << 16)):
            received += piece
    return received


def random_body(choose: random.Random) -> bytes:
    if choose.random() < 0.25:
        return choose.choice(BYTES)
    fields = {name: choose.choice(VALUES) for name in choose.sample(NAMES.split(), choose.randint(0, 6))}
    if choose.random() < 0.5:
        fields |= {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a", "model": "demo"}
    if not isinstance(fields.get("options"), dict):
        fields["options"] = {"num_predict": 2}
    return json.dumps(fields | FEW | {"n": 1}).encode()


def random_head(choose: random.Random, method: str, path: str, role: str, n_bytes: int) -> bytes:
    query = "&".join(
        f"{choose.choice((*NAMES.split(), 'key', 'search', 'hub', 'names', '%00'))}={choose.choice(PARAMETERS)}"
        for _ in range(choose.randint(0, 3))
    )
    lines = [f"{method} {path}{f'?{query}' if query else ''} HTTP/1.1".encode(), b"Host: localhost"]
    lines += [b"Connection: close", b"Content-Length: %d" % n_bytes]
    lines += [] if role == "none" else [f"Authorization: Bearer {role}".encode()]
    lines += [b"Content-Type: " + (TYPES[0] if choose.random() < 0.7 else choose.choice(TYPES))]
    lines += [b"Content-Encoding: " + choose.choice((b"gzip", b"br", b"\xff"))] if choose.random() < 0.1 else []
    names = choose.sample(HEADERS, choose.randint(0, 4))
    lines += [name + b": " + choose.choice(HEADER_VALUES) for name in names]
    return b"\r\n".join(lines) + b"\r\n"


def requests(route: str, role: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield the heads and bodies of random requests to a route."""
    choose = random.Random(f"{route} {role}")
    method, _, pattern = route.partition(" ")
    for _ in range(ROUNDS):
        path = re.sub(r"{.*?}", lambda _: choose.choice(PARAMETERS), f"/llm{pattern}")
        body = random_body(choose) if method != "GET" or choose.random() < 0.2 else b""
        yield random_head(choose, method, path, role, len(body)), body


def status_of(response: bytes) -> int:
    """Return the status of a response, which has only one head, with an id that contains no other line."""
    match = STATUS.match(response)
    assert match is not None, response
    head = response.partition(b"\r\n\r\n")[0] + b"\r\n"
    # h11 refuses heads with control characters before the application sees the request.
    assert REQUEST_ID.search(head) or b"Invalid HTTP request received." in response, head
    assert b"Traceback" not in response
    return int(match[1])


@pytest.mark.parametrize("role", ROLES)
def test_no_request_to_any_route_is_an_internal_error(server: Serving, role: str) -> None:
    for route in ROUTES:
        may_use = role in MAY_USE[ROLE_OF[route]]
        for head, body in requests(route, role):
            status = status_of(exchange(server, head, body, is_endless=route == "GET /models/sse"))
            # 502: the hub has no such model.  503: another of these requests unloads the model.
            assert status < 500 or status in (501, 502, 503), (head, body[:500], status)
            if not may_use:
                assert status in (400, 401, 403, 404), (head, body[:500], status)
            if role == "none":
                assert status in (200, 400, 401, 404) or (route == "GET /", status) == ("GET /", 405)
    server.wait_until_idle()


def disguise(choose: random.Random, path: str) -> str:
    """Return another spelling of a path: encoded or repeated characters, other case, and more segments."""
    characters = list(path)
    for _ in range(choose.randint(1, 3)):
        i = choose.randrange(len(characters))
        character = characters[i]
        characters[i] = choose.choice(
            [
                "".join(f"%{byte:02x}" for byte in character.encode()),
                "".join(f"%25{byte:02x}" for byte in character.encode()),
                character.swapcase(),
                character + "/",
                "/./" + character,
                character + "%2f",
                character + ";a=b",
                character + "%00",
                character + "\\",
                "/x/../" + character,
                character + "%0d%0aHost:%20a",
                character + "%ef%bc%8f",
            ]
        )
    return "".join(characters) + choose.choice(("", "/", "//", "?role=admin", "?a=/health", "%3f", "%23", ".json"))


def test_a_client_never_does_what_needs_an_administrator(server: Serving) -> None:
    head = b"POST /llm/tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer client\r\n"
    body = b'{"content": "a"}'
    assert status_of(exchange(server, head + b"Content-Length: %d\r\n" % len(body), body)) == 200
    models = [*server.models.served.values()]
    before = [(model.name, model.llm, model.n_loads, model.ttl_s, dict(model.adapters)) for model in models]
    choose = random.Random(1)
    for route in sorted(NEEDS_ADMIN):
        method, _, pattern = route.partition(" ")
        path = re.sub(r"{.*?}", "0", pattern)
        fields = {"model": "demo", "name": "demo", "instance_id": "demo"}
        body = b"[]" if path == "/lora-adapters" else json.dumps(fields).encode()
        for _ in range(4 * ROUNDS):
            head = random_head(choose, method, f"/llm{disguise(choose, path)}", "client", len(body))
            status = status_of(exchange(server, head, body))
            assert status in (400, 401, 403, 404, 405), (head, status)
    assert [*server.models.served.values()] == models
    after = [(model.name, model.llm, model.n_loads, model.ttl_s, dict(model.adapters)) for model in models]
    assert after == before


def test_no_request_forges_a_line_of_the_log(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    with logging_as("json", monkeypatch) as lines:
        heads = []
        choose = random.Random(2)
        for name in (b"X-Request-ID", b"X-Forwarded-For", b"traceparent", b"User-Agent", b"Authorization"):
            for value in HEADER_VALUES:
                path = f"/llm/health{choose.choice(('', '%0a{}', '%e2%80%a8', '%1b', '%22,%22key%22:%22admin'))}"
                head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
                heads.append(head + name + b": " + value + b"\r\n")
        n_requests = sum(b"Invalid HTTP" not in exchange(server, head) for head in heads)
        assert eventually(lambda: len(lines.getvalue().splitlines()) >= n_requests)
        rows = lines.rows()  # each line is JSON
        assert len(rows) == n_requests > len(heads) // 2
        assert {row["message"] for row in rows} == {"request"}
        assert {row.get("key") for row in rows} == {None}
        assert {row["address"] for row in rows} == {"127.0.0.1"}
        assert lines.getvalue().isascii()
