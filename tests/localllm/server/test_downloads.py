"""Downloads, removal and search of models by requests, with a hub on localhost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.catalog import known_models
from localllm.catalog.hub_cache import hub_cache
from tests.helpers.data import ROOT
from tests.helpers.engines import eventually
from tests.helpers.http_server import Serving, demo, serving
from tests.helpers.hub_server import HubServer, Repo, hub_of_this_process

DEMO = (ROOT / "localllm" / "data" / "demo.gguf").read_bytes()
REPOSITORY = "unsloth/SmolLM2-135M-Instruct-GGUF"
CHAT = {"model": "smollm2:135m", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(known_models, "available_bytes", lambda: 10**10)
    with hub_of_this_process(tmp_path / "home", monkeypatch) as server:
        server.repos[REPOSITORY] = Repo({"SmolLM2-135M-Instruct-Q8_0.gguf": DEMO}, about={"downloads": 7})
        yield server


@pytest.fixture
def pulling(hub: HubServer) -> Iterator[Serving]:
    with serving(demo(), may_pull=True) as started:
        yield started


def pulled(server: Serving, name: str) -> list[dict[str, Any]]:
    answer = httpx.post(f"{server.url}/api/pull", json={"model": name}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_nothing_is_downloaded_or_deleted_without_permission(server: Serving) -> None:
    for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
        answer = httpx.request(method, server.url + path, json={"model": "smollm2:135m"})
        assert answer.status_code == 403
        assert "start serve with --allow-pull" in answer.text
    nothing = {"allowed": False, "models": [], "repositories": []}
    assert httpx.get(f"{server.url}/models/catalog?search=qwen&hub=1").json() == nothing


def test_a_model_is_pulled_answers_and_is_deleted(pulling: Serving) -> None:
    url = pulling.url
    assert httpx.post(f"{url}/v1/chat/completions", json=CHAT).status_code == 404
    first, *_, last = pulled(pulling, "smollm2:135m")
    assert first == {"status": "pulling manifest"}
    assert last == {"status": "success"}
    assert pulled(pulling, "SmolLM2:135m") == [{"status": "success"}]
    names = [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]
    assert "smollm2:135m" in names
    assert httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=60).status_code == 200
    (blob,) = hub_cache().glob("models--*/blobs/*")
    assert httpx.request("DELETE", f"{url}/api/delete", json={"model": "smollm2:135m"}).status_code == 200
    assert not blob.exists()
    assert httpx.post(f"{url}/v1/chat/completions", json=CHAT).status_code == 404


def test_a_model_is_pulled_without_a_stream(pulling: Serving) -> None:
    answer = httpx.post(f"{pulling.url}/api/pull", json={"name": "smollm2:135m", "stream": False}, timeout=60)
    assert answer.json() == {"status": "success"}


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("smollm9:135m", 404, "did you mean"),
        ("smollm2:9b", 404, "the tags of smollm2 are 135m, 360m, 1.7b"),
        ("../../etc/passwd", 404, "is not the name of a model on the hub"),
        ("", 404, "is not the name of a model on the hub"),
        ("org/missing", 502, "the hub has no repository org/missing"),
    ],
)
def test_a_failed_pull_names_the_reason(pulling: Serving, name: str, status: int, words: str) -> None:
    answer = httpx.post(f"{pulling.url}/api/pull", json={"model": name or "x" * 200, "stream": False}, timeout=60)
    assert answer.status_code == status
    assert words in answer.text
    if status == 502:
        assert words in pulled(pulling, name)[-1]["error"]


HOSTILE = [
    b'{"model": "\\ud800"}', b'{"model": "a/b:../../x"}', b'{"model": "a/b\\u0000"}', b'{"model": 5}', b"[]", b"{",
    b'{"model": "' + b"x" * 100_000 + b'"}', b'{"name": "org/repo:' + b"Q" * 10_000 + b'"}', b'{"model": "../.."}',
    b'{"model": "smollm2:135m-q9_9"}', b'{"model": "file:///etc/passwd"}', b'{"model": "hf.co/a/b?c#d"}',
]  # fmt: skip


@pytest.mark.parametrize("body", HOSTILE, ids=lambda body: body[:40])
def test_hostile_bodies_are_refused(pulling: Serving, body: bytes) -> None:
    for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
        sent = body.replace(b"{", b'{"stream": false, ', 1)
        answer = httpx.request(method, pulling.url + path, content=sent, timeout=60)
        assert 400 <= answer.status_code <= 404 or answer.status_code == 502, answer.text
        assert "Traceback" not in answer.text
    assert list(pulling.models.served) == ["demo"]
    search = {"search": body.decode("utf-8", "replace")[:1000], "hub": "1"}
    answer = httpx.get(f"{pulling.url}/models/catalog", params=search, timeout=60)
    assert answer.status_code in (200, 400, 414, 431)
    assert list(hub_cache().glob("**/*.gguf")) == []


def test_a_client_that_disconnects_ends_the_download(pulling: Serving, hub: HubServer) -> None:
    """The downloaded part stays, and the next request continues it."""
    repo = hub.repos[REPOSITORY]
    repo.waits = True
    with httpx.stream("POST", f"{pulling.url}/api/pull", json={"model": "smollm2:135m"}, timeout=60) as answer:
        lines = answer.iter_lines()
        while json.loads(next(lines)).get("completed", 0) < len(DEMO) // 2:
            pass
    (part,) = hub_cache().glob("models--*/blobs/*.incomplete")
    assert part.stat().st_size == len(DEMO) // 2
    repo.waits = False
    hub.is_ending.set()  # the held connection ends
    eventually(lambda: pulled(pulling, "smollm2:135m")[-1] == {"status": "success"})
    assert f"bytes={len(DEMO) // 2}-" in hub.ranges


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [("demo", 403, "was not downloaded from the hub"), ("nobody", 404, "there is no model 'nobody' here")],
)
def test_other_models_are_not_deleted(pulling: Serving, name: str, status: int, words: str) -> None:
    answer = httpx.request("DELETE", f"{pulling.url}/api/delete", json={"model": name})
    assert answer.status_code == status
    assert words in answer.text


def test_the_catalog_is_searched(pulling: Serving, hub: HubServer) -> None:
    answer = httpx.get(f"{pulling.url}/models/catalog?search=smollm2").json()
    names = [model["name"] for model in answer["models"]]
    assert names == ["smollm2:135m", "smollm2:360m", "smollm2:1.7b"]
    assert not any(model["is_here"] for model in answer["models"])
    assert answer["repositories"] == []
    pulled(pulling, "smollm2:135m")
    answer = httpx.get(f"{pulling.url}/models/catalog?search=smollm2&hub=1").json()
    assert [model["is_here"] for model in answer["models"]] == [True, False, False]
    assert answer["repositories"] == [{"name": REPOSITORY, "downloads": 7, "gated": False}]
    everything = httpx.get(f"{pulling.url}/models/catalog").json()["models"]
    assert len(everything) == len(known_models.known_models())
    assert {model["fits"] for model in everything} == {True, False}
    hub.found = b"<html>"
    answer = httpx.get(f"{pulling.url}/models/catalog?search=smollm2&hub=1").json()
    assert "is not a hub" in answer["problem"]
