"""``localllm search``, with a hub on localhost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.catalog import known_models
from tests.helpers.command_line import run_main
from tests.helpers.hub_server import HubServer, Repo, hub_of_this_process


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(known_models, "available_bytes", lambda: 10**10)
    with hub_of_this_process(tmp_path / "home", monkeypatch) as server:
        yield server


def test_short_names_and_repositories_are_listed(hub: HubServer, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    hub.repos["someone/Voxtral-GGUF"] = Repo({}, about={"downloads": 12_345})
    hub.repos["owner/voxtral-gated-GGUF"] = Repo({}, about={"downloads": 5, "gated": "auto"})
    hub.repos["someone/Other-GGUF"] = Repo({})
    outcome = run_main(capfdbinary, "search", "voxtral")
    assert outcome.code == 0, outcome.err
    assert [line.split("\t") for line in outcome.out.splitlines()] == [
        ["name", "download", "fits", "downloads in a month", "model"],
        ["voxtral:3b", "3.22 GB", "yes", "-", "Voxtral"],
        ["voxtral:24b", "15.7 GB", "no", "-", "Voxtral"],
        ["someone/Voxtral-GGUF", "-", "-", "12,345", "-"],
        ["owner/voxtral-gated-GGUF", "-", "-", "5", "needs permission"],
    ]
    assert hub.searches == ["search=voxtral&filter=gguf&sort=downloads&direction=-1&limit=20"]
    outcome = run_main(capfdbinary, "search", "Voxtral", "--json")
    names = [values["name"] for values in json.loads(outcome.out)]
    assert names == ["voxtral:3b", "voxtral:24b", "someone/Voxtral-GGUF", "owner/voxtral-gated-GGUF"]


def test_all_words_must_match(hub: HubServer, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    outcome = run_main(capfdbinary, "search", "qwen", "embeddings", "--json")
    names = [values["name"] for values in json.loads(outcome.out)]
    assert names == ["qwen3-embedding:0.6b", "qwen3-embedding:4b", "qwen3-embedding:8b"]
    assert hub.searches[0].startswith("search=qwen%20embeddings&")


def test_no_match_is_said(hub: HubServer, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    outcome = run_main(capfdbinary, "search", "xyzzy", "plugh")
    assert (outcome.code, outcome.out) == (0, "")
    assert "no model matches 'xyzzy plugh': try" in outcome.err
    outcome = run_main(capfdbinary, "search", "xyzzy", "--json")
    assert (outcome.code, json.loads(outcome.out)) == (0, [])


def test_short_names_are_listed_without_a_network(
    hub: HubServer, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    outcome = run_main(capfdbinary, "search", "voxtral")
    assert (outcome.code, len(outcome.out.splitlines())) == (0, 3)
    assert "warning: the hub at http://127.0.0.1:9 cannot be reached" in outcome.err
    outcome = run_main(capfdbinary, "search", "xyzzy")
    assert outcome.code == 1
    assert "error: the hub at http://127.0.0.1:9 cannot be reached" in outcome.err


@pytest.mark.parametrize("answer", [b"{}", b"[1]", b'[{"id": 5}]', b'[{"id": "a/b", "downloads": ""}]', b"<html>"])
def test_a_wrong_answer_is_refused(hub: HubServer, capfdbinary: pytest.CaptureFixture[bytes], answer: bytes) -> None:
    hub.found = answer
    outcome = run_main(capfdbinary, "search", "xyzzy")
    if answer == b"{}":  # an empty object has no entries
        assert outcome.code == 0
    else:
        assert outcome.code == 1
        assert f"error: the server at {hub.endpoint} is not a hub (" in outcome.err


def test_names_that_are_not_repositories_are_omitted(
    hub: HubServer, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    hub.found = b'[{"id": "../../etc"}, {"id": "a/b\\u001b[2J"}, {"id": "fine/model-GGUF"}]'
    outcome = run_main(capfdbinary, "search", "xyzzy", "--json")
    assert [values["name"] for values in json.loads(outcome.out)] == ["fine/model-GGUF"]
