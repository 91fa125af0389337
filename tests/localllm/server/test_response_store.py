"""Stored responses: a damaged file counts as a missing response."""

from __future__ import annotations

import base64
import copy
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.cli.commands.serve import _folder
from localllm.errors import UsageError
from localllm.server import responses
from localllm.server.http import HTTPError
from localllm.server.response_store import ResponseStore
from tests.helpers.http_server import demo, serving

ID = f"resp_{'0' * 32}"
PICTURE = {"source": base64.b64encode(b"\x89PNG").decode(), "where": "the picture", "kind": "image"}
STORED: dict[str, Any] = {
    "client": "127.0.0.1",
    "conversation": [
        {"role": "user", "parts": ["hi", PICTURE]},
        {"role": "assistant", "parts": ["ho"], "calls": [{"name": "f", "arguments": "{}", "id": "call_1"}]},
    ],
    "response": {"id": ID, "object": "response", "output": []},
}


def damaged() -> Iterator[bytes]:
    """Yield the file of a response with a value replaced or removed, truncated, or with a wrong byte."""

    def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, child in children:
            yield (*path, key)
            yield from paths(child, (*path, key))

    for *path, last in paths(STORED):
        for value in (None, 5, "x", "é", [], {}, [5], {"a": 1}, True, ...):
            changed = target = copy.deepcopy(STORED)
            for key in path:
                target = target[key]
            if value is ...:
                del target[last]
            else:
                target[last] = value
            yield json.dumps(changed).encode()
    data = json.dumps(STORED).encode()
    for place in range(len(data)):
        yield data[:place]
        yield data[:place] + b"\xff" + data[place + 1 :]
    yield from (b"null", b"5", b"[" * 100_000)


def test_a_damaged_file_is_no_response(tmp_path: Path) -> None:
    file, store = tmp_path / f"{ID}.json", ResponseStore(tmp_path)
    file.write_text(json.dumps(STORED))
    assert store.get(ID, "127.0.0.1").conversation[0].media[0].source == b"\x89PNG"
    n_refused = 0
    for data in damaged():
        file.write_bytes(data)
        try:
            store.get(ID, "127.0.0.1")
        except HTTPError as error:
            n_refused += error.status == 404
    assert n_refused > 200


@pytest.mark.parametrize("data", [b'{"client": "\xff"}', json.dumps({**STORED, "response": {}}).encode()])
def test_a_server_answers_404_for_a_damaged_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / f"{ID}.json").write_bytes(data)
    with serving(demo(), responses_folder=tmp_path) as server, httpx.Client(base_url=server.url) as client:
        body = {"previous_response_id": ID, "input": "a", "max_output_tokens": 1}
        assert client.get(f"/v1/responses/{ID}").status_code == 404
        assert client.get(f"/v1/responses/{ID}/input_items").status_code == 404
        assert client.post("/v1/responses", json=body, timeout=60).status_code == 404
        assert client.delete(f"/v1/responses/{ID}").status_code == 404


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"^--responses .*file.a cannot be created \("):
        _folder("--responses", tmp_path / "file" / "a")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{"top_logprobs": 2, "store": False}, {}])
def test_a_thread_encodes_and_stores_responses(
    stream: bool, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[str]] = {}

    def recorded(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def record(*args: Any, **options: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name.rpartition("_")[0])
            return function(*args, **options)

        monkeypatch.setattr(owner, name, record)

    recorded(responses, "_usage_json")  # called for the final event or the complete response
    for name in ("put", "get", "remove"):
        recorded(ResponseStore, name)
    with serving(demo(), responses_folder=tmp_path) as server, httpx.Client(base_url=server.url) as client:
        body = {"input": "a", "max_output_tokens": 2, "stream": stream, **more}
        text = client.post("/v1/responses", json=body, timeout=60).text
        if not more:
            id_ = re.search(r"resp_[0-9a-f]{32}", text)
            assert id_ is not None
            again = {**body, "previous_response_id": id_[0]}
            assert client.post("/v1/responses", json=again, timeout=60).status_code == 200
            assert client.delete(f"/v1/responses/{id_[0]}").status_code == 200
            assert client.get(f"/v1/responses/{id_[0]}").status_code == 404
    assert threads.keys() == ({"_usage_json"} if more else {"_usage_json", "put", "get", "remove"})
    assert set().union(*threads.values()) == {"localllm-reply"}
