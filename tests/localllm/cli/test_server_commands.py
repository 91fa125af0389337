"""``localllm ps`` and ``stop`` with a server, and ``rm``."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from localllm.catalog.demo import demo_path
from localllm.server.http import Limits
from tests.helpers.command_line import run_main
from tests.helpers.http_server import Serving, demo, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(demo(context=64), limits=Limits(api_keys=["secret"])) as started:
        yield started


def test_ps_and_stop(
    server: Serving, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    at = ("--url", server.url)
    assert "refused the request" in run_main(capfdbinary, "ps", *at).error()
    monkeypatch.setenv("LOCALLLM_API_KEY", "secret")
    body = {"model": "demo", "prompt": "hi", "stream": False, "options": {"num_predict": 1}}
    headers = {"Authorization": "Bearer secret"}
    with httpx.Client(trust_env=False, headers=headers, timeout=60) as client:
        assert client.post(f"{server.url}/api/generate", json=body).status_code == 200
    head, row = run_main(capfdbinary, "ps", *at).out.splitlines()
    assert head.split() == ["name", "size", "context", "unloaded"]
    assert row.startswith("demo")
    assert row.split()[-2:] == ["64", "never"]
    (model,) = json.loads(run_main(capfdbinary, "ps", *at, "--json").out)["models"]
    assert model["name"].startswith("demo")
    assert run_main(capfdbinary, "stop", "demo", *at).out.startswith("demo")
    assert len(run_main(capfdbinary, "ps", *at).out.splitlines()) == 1
    assert "there is no model 'other'" in run_main(capfdbinary, "stop", "other", *at).error()


def test_addresses_that_are_none(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert (
        "no server answers at http://127.0.0.1:9 (" in run_main(capfdbinary, "ps", "--url=http://127.0.0.1:9").error()
    )
    for url in (
        "file:///etc/passwd",
        "localhost:8080",
        "http://127.0.0.1:abc",
        "http://127.0.0.1:70000",
        "http://[::1",
    ):
        assert "is not the address of a server" in run_main(capfdbinary, "ps", "--url", url).error()


def test_a_server_of_another_protocol(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    def greet() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            connection.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=greet)
        thread.start()
        port = listening.getsockname()[1]
        error = run_main(capfdbinary, "ps", f"--url=http://127.0.0.1:{port}").error()
        thread.join()
    assert f"no server answers at http://127.0.0.1:{port} (" in error
    assert "start one with localllm serve" in error


def test_rm_removes_a_file_after_a_confirmation(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / name for name in ("m-Q8_0.gguf", "n-00001-of-00002.gguf", "n-00002-of-00002.gguf")]
    for path in paths:
        shutil.copy(demo_path(), path)
    assert "add --yes" in run_main(capfdbinary, "rm", paths[0]).error()
    monkeypatch.setattr("localllm.cli.commands.rm.is_terminal", lambda stream: True)

    def end_of_input(question: str) -> str:  # Ctrl-D
        raise EOFError

    monkeypatch.setattr("builtins.input", end_of_input)
    assert "no file was removed" in run_main(capfdbinary, "rm", paths[0]).error()
    for answer, code in (("", 1), ("n", 1), ("y", 0)):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert run_main(capfdbinary, "rm", paths[0]).code == code
        assert paths[0].exists() == bool(code)
    assert "and 1 more" in run_main(capfdbinary, "rm", paths[2], "--yes").out
    assert not list(tmp_path.iterdir())


def test_rm_leaves_files_of_other_programs(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    blob = tmp_path / "blobs" / ("sha256-" + 64 * "a")
    manifest = tmp_path / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    for path in (blob, manifest):
        path.parent.mkdir(parents=True)
    shutil.copy(demo_path(), blob)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:" + 64 * "a"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    (tmp_path / "notes.txt").touch()
    for name, words in (
        ("tiny", "remove it with ollama rm tiny"),
        ("demo", "is a file of a Python package"),
        ("tin", "there is no file or model 'tin' here"),
        (tmp_path / "notes.txt", "is not a GGUF file"),
    ):
        assert words in run_main(capfdbinary, "rm", name, "--yes").error()
    assert blob.exists()


@pytest.mark.posix("links need privileges on Windows")
def test_rm_removes_blobs_of_the_hubs_cache(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "models--org--repo"
    (repo / "blobs").mkdir(parents=True)
    shutil.copy(demo_path(), repo / "blobs" / "abc")
    links = [repo / "snapshots" / (commit * 40) / "m-Q8_0.gguf" for commit in "cd"]
    for link in links:
        link.parent.mkdir(parents=True)
        link.symlink_to("../../blobs/abc")
    assert run_main(capfdbinary, "rm", links[0], "--yes").code == 0
    assert (repo / "blobs" / "abc").exists()
    assert run_main(capfdbinary, "rm", links[1], "--yes").code == 0
    assert not (repo / "blobs" / "abc").exists()
