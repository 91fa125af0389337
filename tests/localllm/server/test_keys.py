"""Key files: who may use which route and which model, how much, and what happens when the file changes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings, strategies as st

from localllm.errors import UsageError
from localllm.server import keys
from localllm.server.http import OPEN_PATHS, Limits
from localllm.server.keys import KeyFile, LimitError, RateMeter, parse_keys, read_keys
from localllm.server.roles import MAY_USE, ROLE_OF
from tests.helpers.http_server import Serving, demo, scripted, serving

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}
ROLES = ("none", "metrics", "client", "admin")

#: Decisions about routes that change the server or show the requests of other clients.
NEEDS_ADMIN = {
    "GET /models/catalog",
    "GET /page/tools", "POST /page/tools/preview", "POST /page/tools/call", "POST /page/tools/undo",
    "POST /page/tools/restart",
    "POST /models/load", "POST /models/unload", "GET /unload", "POST /unload", "POST /api/v1/models/load",
    "POST /api/v1/models/unload", "POST /api/pull", "DELETE /api/delete", "POST /api/copy", "POST /api/create",
    "POST /api/push", "POST /api/blobs/{digest}", "GET /slots", "POST /slots/{id}", "POST /lora-adapters",
}  # fmt: skip


def section(name: str, key: str | None = None, **entries: object) -> str:
    """Return a section of a key file.  The key is the name by default."""
    lines = [f"[{name}]", f'hash = "sha256:{hashlib.sha256((key or name).encode()).hexdigest()}"']
    return "\n".join([*lines, *(f"{field} = {value!r}" for field, value in entries.items())]) + "\n"


def key_file(folder: Path, *sections: str) -> Path:
    path = folder / "keys.toml"
    path.write_text("\n".join(sections))
    return path


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


@contextmanager
def serving_keys(path: Path, *, prefix: str = "", **more: Any) -> Iterator[Serving]:
    with serving(
        more.pop("load", None) or demo(), limits=Limits(keys=KeyFile(path), prefix=prefix), **more
    ) as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with one key per role, which is the role's name, below a prefix."""
    folder = tmp_path_factory.mktemp("keys")
    sections = [section(role, role=role) for role in ROLES[1:]]
    with serving_keys(key_file(folder, *sections), prefix="/llm") as started:
        yield started


def ask(server: Serving, key: str, method: str = "POST", path: str = CHAT, **more: Any) -> httpx.Response:
    headers = bearer(key) | more.pop("headers", {})
    url = f"{server.url}{server.app.limits.prefix}{path}"
    return httpx.request(method, url, headers=headers, timeout=60, **more)


# -- Routes ----------------------------------------------------------------------------------------------------------


def routes(server: Serving) -> list[str]:
    table: Any = server.app.routes
    return [f"{method} {route.path}" for route in table for method in route.app.endpoints]


def test_every_route_has_a_decision(server: Serving) -> None:
    """A new route needs a line in roles.py."""
    assert sorted(routes(server)) == sorted(ROLE_OF)
    assert {route for route, role in ROLE_OF.items() if role == "admin"} == NEEDS_ADMIN
    assert {route for route, role in ROLE_OF.items() if role == "none"} == {f"GET {path}" for path in OPEN_PATHS}
    assert {route for route, role in ROLE_OF.items() if role == "metrics"} == {"GET /metrics"}


def test_every_route_is_open_to_its_roles_only(server: Serving) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for route in routes(server):
            method, _, pattern = route.partition(" ")
            path = "/llm" + pattern.replace("{name:path}", "demo").replace("{id}", "0").replace("{digest}", "0")
            if path == "/llm/models/sse":  # it has no end
                continue
            for role in ROLES:
                response = client.request(method, path, headers=bearer("" if role == "none" else role))
                is_refused = response.status_code == 401 or "needs a key with the role" in response.text
                assert is_refused == (role not in MAY_USE[ROLE_OF[route]]), (route, role, response.text)
                if is_refused:
                    assert response.status_code == (401 if role == "none" else 403)


def test_events_of_models_need_a_key(server: Serving) -> None:
    for key, expected in (("", 401), ("metrics", 403), ("client", 200)):
        url = f"{server.url}/llm/models/sse"
        with httpx.stream("GET", url, headers=bearer(key), timeout=60) as response:
            assert response.status_code == expected


def disguised(path: str) -> list[str]:
    """Other ways to write a path."""
    encoded = "".join(f"%{byte:02x}" if byte != ord("/") else "/" for byte in path.encode())
    return [
        path,
        f"{path}/",
        f"{path}//",
        f"/{path}",
        f"/v1/..{path}",
        f"/.{path}",
        encoded,
        encoded.replace("/", "%2f"),
        path.upper(),
        f"{path};x=1",
        f"{path}?key=admin&api_key=admin",
        f"{path}%00",
        f"{path}#/health",
        f"/llm{path}",
        f"{path}%3f/health",
    ]


@pytest.mark.parametrize("route", sorted(NEEDS_ADMIN))
def test_a_client_cannot_disguise_what_needs_an_administrator(server: Serving, route: str) -> None:
    assert ask(server, "client", json=HELLO).status_code == 200  # the model is loaded
    method, _, pattern = route.partition(" ")
    path = pattern.replace("{id}", "0").replace("{digest}", "0")
    body = b'{"model": "demo", "instance_id": "demo"}' if path != "/lora-adapters" else b"[]"
    headers = bearer("client") | {"X-HTTP-Method-Override": method, "X-Original-URL": path, "X-Rewrite-URL": path}
    verbs = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"}
    if path == "/lora-adapters":  # a client may read the list
        verbs -= {"GET", "HEAD"}
    requests = [(method, written) for written in disguised(path)] + [(verb, path) for verb in sorted(verbs)]
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for verb, written in requests:
            target = {"target": f"/llm{written}".encode()}
            response = client.request(verb, "/", headers=headers, content=body, extensions=target)
            assert response.status_code in (400, 403, 404, 405), (verb, written, response.text)
    assert server.models.served["demo"].llm is not None


def test_pipelined_requests_have_their_own_keys(server: Serving) -> None:
    """uvicorn starts a pipelined request in the context of the request before it."""
    head = "GET /llm{path} HTTP/1.1\r\nHost: localhost\r\n{key}\r\n"
    admin, client = ("Authorization: Bearer admin\r\n", "Authorization: Bearer client\r\n")
    requests = [("/slots", admin, 200), ("/slots", "", 401), ("/slots", client, 403), ("/health", "", 200)]
    requests += [("/slots", admin, 200), ("/metrics", "", 401), ("/metrics", client, 403)]
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        text = "".join(head.format(path=path, key=key) for path, key, _ in requests)
        connection.sendall(text[:-2].encode() + b"Connection: close\r\n\r\n")
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
    statuses = [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", received)]
    assert statuses == [expected for *_, expected in requests]


def test_the_prefix_is_needed(server: Serving) -> None:
    for path in ("/health", "/", "/llmx/health", "/LLM/health", "//llm/health", "/x/../llm/health", "/llm%2fx"):
        with httpx.Client() as client:
            answer = client.get(server.url, extensions={"target": path.encode()})
            assert answer.status_code in (400, 401, 404), path
    for path in ("/llm/health", "/llm/health/", "/llm", "/llm/", "/%6clm/health"):
        assert httpx.get(server.url + path).status_code == 200, path


# -- Keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 401),
        ({"Authorization": "Bearer client"}, 200),
        ({"authorization": "bearer  client"}, 200),
        ({"x-api-key": "client"}, 200),
        ({"Authorization": "Bearer"}, 401),
        ({"x-api-key": ""}, 401),
        ({"Authorization": "client"}, 401),
        ({"Authorization": "Basic Y2xpZW50OmNsaWVudA=="}, 401),
        ({"Authorization": "Bearer Client"}, 401),
        ({"Authorization": "Bearer client admin"}, 401),
        ({"Authorization": "Bearer " + "a" * 20_000}, 401),
        ({"x-api-key": b"\xff\xfe"}, 401),
        ({"Cookie": "api_key=client"}, 401),
        ({"X-Forwarded-User": "admin"}, 401),
    ],
)
def test_hostile_headers(server: Serving, headers: Any, expected: int) -> None:
    assert httpx.get(f"{server.url}/llm/v1/models", headers=headers).status_code == expected
    digest = hashlib.sha256(b"client").hexdigest()
    for key in (digest, f"sha256:{digest}"):  # the content of the file is no key
        assert httpx.get(f"{server.url}/llm/v1/models", headers=bearer(key)).status_code == 401


def test_a_key_in_an_address_is_no_key(server: Serving) -> None:
    for name in ("key", "api_key", "api-key", "access_token", "Authorization"):
        assert httpx.get(f"{server.url}/llm/v1/models?{name}=client").status_code == 401


def test_all_keys_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time must not depend on which key matches."""
    file = KeyFile(key_file(tmp_path, *(section(f"key{i}") for i in range(5))))
    compared: list[tuple[bytes, bytes]] = []
    compare = keys.hmac.compare_digest
    spy = SimpleNamespace(compare_digest=lambda a, b: compared.append((a, b)) or compare(a, b))  # type: ignore[func-returns-value]
    monkeypatch.setattr(keys, "hmac", spy)
    for sent in ("key0", "key4", "none"):
        compared.clear()
        found = file.find(sent)
        assert (found and found.name) == (None if sent == "none" else sent)
        assert len(compared) == 5


def test_the_hash_of_nothing_lets_nobody_in(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"").hexdigest()
    file = KeyFile(key_file(tmp_path, f'[empty]\nhash = "sha256:{digest}"\n'))
    assert file.find("") is None


GOOD = section("good")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a", "is not valid TOML"),
        ("a = 1\n", "unknown field `a`"),
        ("[a]\n", "hash"),
        ("[a]\nhash = 5\n", "hash"),
        ('[a]\nhash = "sha256:00"\n', "hash must be"),
        ('[a]\nhash = "md5:' + "0" * 64 + '"\n', "hash must be"),
        ('[a]\nhash = "secret"\n', "hash must be"),
        (section("a", role="root"), "root"),
        (section("a", role="none"), "none"),
        (section("a", admin=1), "admin"),
        (section("a", models="qwen"), "models"),
        (section("a", models=[1]), "models"),
        (section("a", requests_per_minute=0), "requests_per_minute"),
        (section("a", requests_per_minute=-5), "requests_per_minute"),
        (section("a", requests_per_minute=1.5), "requests_per_minute"),
        (section("a", tokens_per_minute=10**13), "tokens_per_minute"),
        (section("a") + "tokens_per_minute = true\n", "tokens_per_minute"),
        (section("a") + "tokens_per_minute = inf\n", "tokens_per_minute"),
        (section("a") + "tokens_per_minute = 99999999999999999999999999\n", "tokens_per_minute"),
        (section("a") + section("a"), "is not valid TOML"),
        (section("a", "same") + section("b", "same"), "has the hash of [a]"),
        (section('"a b"'), "cannot be the name"),
        (section('"a\\nb"'), "cannot be the name"),
        (section('"\\u001b[31m"'), "cannot be the name"),
        (section('""'), "cannot be the name"),
        (section("a.b"), "of"),
        (section("a" * 65), "cannot be the name"),
        ("x = " + "[" * 5000 + "]" * 5000, ""),
        ('[a]\nhash = "\udcff"\n', "is not valid TOML"),
        ("\x00", "is not valid TOML"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_keys((GOOD + text).encode(errors="surrogateescape"), "keys.toml")
    message = str(caught.value)
    assert words in message
    assert "keys.toml" in message
    assert message.isprintable()
    assert len(message) < 400


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 250), st.integers(0, 4), st.binary(max_size=5)), min_size=1, max_size=4))
def test_a_file_with_random_damage_is_read_or_refused(edits: list[tuple[int, int, bytes]]) -> None:
    data = bytearray((section("good", role="admin", models=["qwen*"]) + section("a", tokens_per_minute=5)).encode())
    for at, n_removed, inserted in edits:
        data[at : at + n_removed] = inserted
    try:
        found = parse_keys(bytes(data), "keys.toml")
    except UsageError as error:
        message = str(error)
    else:
        assert all(key.entry.role in ROLES[1:] and key.name.isprintable() for key in found)
        message = ""
    assert message.isprintable()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_keys(tmp_path / "missing.toml")
    with pytest.raises(UsageError, match="cannot be read"):
        read_keys(tmp_path)
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (keys.MAX_BYTES + 1))
    with pytest.raises(UsageError, match="MiB"):
        read_keys(large)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(UsageError, match="cannot be read"):
            read_keys(tmp_path / "pipe")


# -- Models ----------------------------------------------------------------------------------------------------------


def test_a_client_sees_only_its_models(tmp_path: Path) -> None:
    sections = [section("one", models=["Small*"]), section("zero", models=[]), section("all")]
    names = ("big", "small-1", "small-2")
    with serving_keys(key_file(tmp_path, *sections), names=names) as server:
        for path, field, name in (
            ("/v1/models", "data", "id"),
            ("/v1/models", "models", "name"),
            ("/api/tags", "models", "name"),
            ("/api/v0/models", "data", "id"),
            ("/api/v1/models", "models", "key"),
        ):
            for key, expected in (("one", ["small-1", "small-2"]), ("zero", []), ("all", list(names))):
                rows = ask(server, key, "GET", path).json()[field]
                assert [row[name] for row in rows] == expected, path
        reply = ask(server, "one", json=HELLO)
        assert reply.json()["model"] == "small-1"  # the default is the first model of the key
        assert ask(server, "all", json=HELLO | {"model": "big"}).status_code == 200
        for model in ("big", "BIG:latest", "big.gguf"):
            refused = ask(server, "one", json=HELLO | {"model": model})
            assert refused.status_code == 404
            missing = ask(server, "one", json=HELLO | {"model": "none"})
            texts = [re.sub('"request_id":"\\w+"', "", reply.text) for reply in (refused, missing)]
            assert texts[0].replace(model, "none") == texts[1]  # nothing tells that the model exists
            for path in ("/v1/models/", "/api/v0/models/", "/props?model=", "/lora-adapters?model="):
                assert ask(server, "one", "GET", path + model).status_code == 404
            for path in ("/tokenize", "/v1/embeddings", "/api/show", "/v1/messages/count_tokens", "/api/generate"):
                body = {"model": model, "content": "a", "input": "a", "messages": HELLO["messages"], "prompt": "a"}
                assert ask(server, "one", path=path, json=body).status_code == 404, path
        assert "big" in str(ask(server, "all", "GET", "/running").json())
        assert "big" not in str(ask(server, "one", "GET", "/running").json())
        assert "big" not in str(ask(server, "one", "GET", "/api/ps").json())
        assert ask(server, "zero", json=HELLO).status_code == 404


def test_one_model_keeps_its_name_for_clients_without_it(tmp_path: Path) -> None:
    """With one model any name selects it, but not for a key that may not use it."""
    path = key_file(tmp_path, section("a", models=["other"]), section("b", models=["demo"]))
    with serving_keys(path, takes_any_name=True) as server:
        assert ask(server, "a", json=HELLO | {"model": "other"}).status_code == 404
        assert ask(server, "b", json=HELLO | {"model": "other"}).status_code == 200


def test_requests_without_a_key_learn_no_names(tmp_path: Path) -> None:
    with serving_keys(key_file(tmp_path, section("a"))) as server:
        server.models.served["demo"].load_progress = 0.5
        assert "demo" not in httpx.get(f"{server.url}/health").text
        assert "demo" in ask(server, "a", "GET", "/health").text
        server.models.served["demo"].load_progress = None


def test_only_an_administrator_sets_how_long_a_model_stays(server: Serving) -> None:
    served = server.models.served["demo"]
    before = served.ttl_s
    body = {"messages": HELLO["messages"], "stream": False, "keep_alive": 0, "options": {"num_predict": 1}}
    answer = ask(server, "client", path="/api/chat", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "keep_alive"
    assert served.ttl_s == before
    for path in ("/api/chat", "/api/generate"):
        for keep_alive in (0, "0", "0s", 0.0):
            refused = ask(server, "client", path=path, json={"model": "demo", "keep_alive": keep_alive})
            assert refused.status_code == 403
        assert ask(server, "client", path=path, json={"model": "demo", "keep_alive": "1h"}).status_code == 200
    assert served.ttl_s == before
    assert served.llm is not None
    assert ask(server, "admin", path="/api/chat", json={"model": "demo", "keep_alive": 0}).status_code == 200
    assert served.llm is None


def test_a_client_ends_only_the_reasoning_of_its_own_replies(tmp_path: Path) -> None:
    sections = [section("one"), section("two"), section("boss", role="admin")]
    with serving_keys(key_file(tmp_path, *sections), load=scripted("<think>" + "word " * 600)) as server:
        body = HELLO | {"stream": True, "max_tokens": 600}
        with httpx.stream("POST", f"{server.url}{CHAT}", json=body, headers=bearer("one"), timeout=60) as response:
            lines = response.iter_lines()
            id_ = json.loads(next(line for line in lines if line.startswith("data: {"))[6:])["id"]
            command = {"id": id_, "action": "reasoning_end"}
            for key, is_done in (("two", False), ("boss", False), ("one", True)):
                answer = ask(server, key, path=f"{CHAT}/control", json=command).json()
                assert answer["success"] is is_done, key
            assert any('"content":"' in line for line in lines)


# -- Limits ----------------------------------------------------------------------------------------------------------


def test_a_meter_counts_down_at_the_rate_of_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(keys, "time", SimpleNamespace(monotonic=lambda: now))
    meter = RateMeter()
    for _ in range(60):
        assert meter.wait_s(60) == 0
        meter.add(1, 60)
    assert meter.wait_s(60) == pytest.approx(1)
    now += 30
    assert meter.wait_s(60) == 0
    meter.add(100, 60)  # a long reply may exceed the limit
    assert meter.wait_s(60) == pytest.approx(71)
    now += 71.001
    assert meter.wait_s(60) == 0
    now += 1e9
    meter.add(0, 60)
    assert meter.wait_s(60) == 0
    assert RateMeter().wait_s(10**12) == 0
    assert RateMeter().wait_s(1) == 0


def test_requests_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    path = key_file(tmp_path, section("few", requests_per_minute=2), section("other"))
    with serving_keys(path) as server:
        statuses = [ask(server, "few", json=HELLO).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        refused = ask(server, "few", path="/v1/messages", json=HELLO)
        assert 1 <= int(refused.headers["Retry-After"]) <= 30
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "few has used its 2 requests per minute" in refused.text
        assert ask(server, "few", "GET", "/v1/models").status_code == 200  # reading does not count
        assert ask(server, "other", json=HELLO).status_code == 200
        assert ask(server, "", json=HELLO).status_code == 401


def test_tokens_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    path = key_file(tmp_path, section("few", tokens_per_minute=20))
    with serving_keys(path, load=scripted("word " * 30)) as server:
        stream = HELLO | {"stream": True, "max_tokens": 30}
        assert ask(server, "few", json=stream).text.endswith("[DONE]\n\n")
        server.wait_until_idle()
        refused = ask(server, "few", json=HELLO)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(refused.headers["Retry-After"]) > 10
    with serving_keys(path) as server:
        body = {"input": ["A text of several words."] * 20}
        assert ask(server, "few", path="/v1/embeddings", json=body).status_code in (200, 400)


def test_cached_tokens_are_free(tmp_path: Path) -> None:
    file = KeyFile(key_file(tmp_path, section("a", tokens_per_minute=600)))
    with serving(demo(), limits=Limits(keys=file)) as server:
        body = HELLO | {"messages": [{"role": "user", "content": "word " * 200}], "max_tokens": 1}
        used = []
        for _ in range(2):
            usage = ask(server, "a", json=body).json()["usage"]
            used.append(usage["total_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
        assert used[1] < used[0] / 10
        server.wait_until_idle()
        assert file.keys[0].tokens._used == pytest.approx(sum(used), rel=0.5)


# -- Changes of the file ---------------------------------------------------------------------------------------------


@pytest.fixture
def immediate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the file at every request."""
    monkeypatch.setattr(keys, "CHECK_S", 0.0)


def names(file: KeyFile) -> list[str]:
    return [key.name for key in file.keys]


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


@pytest.mark.usefixtures("immediate")
def test_a_changed_file_is_read_and_a_broken_one_is_not(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = key_file(tmp_path, section("a"))
    log: list[str] = []
    file = KeyFile(path, log.append)
    file.refresh()
    assert log == []
    replace(path, section("a") + section("b"))
    file.refresh()
    assert names(file) == ["a", "b"]
    assert log == [f"read {path}: 2 keys"]
    for damage in (lambda: replace(path, "[a"), path.unlink):
        damage()
        for _ in range(3):
            file.refresh()
        assert names(file) == ["a", "b"]
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 1  # not once per request
        assert lines[0].startswith("localllm: warning: the keys have not changed, because ")
    replace(path, "")
    file.refresh()
    assert names(file) == []  # after the last key was revoked


@pytest.mark.usefixtures("immediate")
def test_use_counts_on_after_a_change(tmp_path: Path) -> None:
    path = key_file(tmp_path, section("a", requests_per_minute=1))
    file = KeyFile(path)
    file.keys[0].count_request()
    replace(path, section("renamed", "a", requests_per_minute=1))
    file.refresh()
    with pytest.raises(LimitError, match="renamed has used"):
        file.keys[0].count_request()
    replace(path, section("renamed", "a", requests_per_minute=1000))
    file.refresh()
    file.keys[0].count_request()


@pytest.mark.usefixtures("immediate")
def test_a_revoked_key_is_refused_at_the_next_request(tmp_path: Path) -> None:
    path = key_file(tmp_path, section("a"), section("b"))
    with serving_keys(path) as server:
        assert ask(server, "a", json=HELLO).status_code == 200
        replace(path, section("b") + section("c", role="admin"))
        assert ask(server, "a", json=HELLO).status_code == 401
        assert ask(server, "b", json=HELLO).status_code == 200
        assert ask(server, "c", "GET", "/slots").status_code == 200
        replace(path, section("c"))
        assert ask(server, "c", "GET", "/slots").status_code == 403


@pytest.mark.usefixtures("immediate")
def test_reloads_and_changes_at_once(tmp_path: Path) -> None:
    """Every request gets an answer from a complete file."""
    path = key_file(tmp_path, section("a"))
    with serving_keys(path) as server:
        stopped = threading.Event()

        def change() -> None:
            for i in range(100):
                replace(path, section("a") + "".join(section(f"key{j}") for j in range(i % 7)))
                time.sleep(0.002)
            stopped.set()

        def reload() -> None:
            while not stopped.is_set():
                server.server._reload_keys(1, None)
                time.sleep(0.001)

        works: list[Callable[[], None]] = [change, reload, reload]
        threads = [threading.Thread(target=work) for work in works]
        for thread in threads:
            thread.start()
        with httpx.Client(headers=bearer("a"), timeout=60) as client:
            while not stopped.is_set():
                assert client.get(f"{server.url}/api/version").status_code == 200
        for thread in threads:
            thread.join()
