"""An administrator's walk: presets, keys, nginx with TLS, metrics, logs, and a restart that loses no reply.

The configuration of nginx is the one in docs/production.md, with other paths and another port.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.command_line import command, environment, run_main
from tests.helpers.data import ROOT
from tests.localllm.integrations.test_production import certificate, fence, nginx

__all__ = ["certificate"]  # a fixture

CHAT = "/llm/v1/chat/completions"
HOST = "llm.example.org"

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="runs nginx as on Linux servers"),
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed"),
]

N_CLIENTS = 50
PRESETS = """
[chat]
model = "demo"
group = "main"
temperature = 0

[short]
model = "demo"
group = "main"
context = 256
alias = ["gpt-4o"]

[code]
model = "code.gguf"
ttl = 600
"""


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this takes too long"
        time.sleep(0.02)


class Server:
    """``localllm serve`` on a Unix socket of a folder, with its log in a file."""

    def __init__(self, folder: Path, name: str, stack: ExitStack, log: str) -> None:
        self.log = folder / log
        flags = ("--models", folder / "models.toml", "--keys", folder / "keys.toml")
        proxy = ("--api-prefix", "/llm", "--trusted-proxy", "unix", "--allow-host", HOST)
        line = command(
            "serve", *flags, "--host", f"unix:{folder / name}", *proxy, "--grace", 60, "--log-format", "json"
        )
        with self.log.open("w") as file:
            self._process = subprocess.Popen(line, stderr=file, env=environment(), cwd=ROOT)
        stack.callback(self._process.wait)
        stack.callback(self._process.kill)
        wait_for(lambda: self._process.poll() is not None or "listening on" in self.log.read_text())
        assert self._process.poll() is None, self.log.read_text()

    def stop(self) -> None:
        """Send SIGTERM, and wait until the running replies are complete."""
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(120) == 0, self.log.read_text()

    def line(self, request_id: str) -> dict[str, Any]:
        """Return the line of a request in the log, which is written after the response."""

        def lines() -> list[dict[str, Any]]:
            *complete, _ = self.log.read_text().split("\n")
            entries = map(json.loads, complete)
            return [each for each in entries if (each["message"], each.get("request_id")) == ("request", request_id)]

        wait_for(lines)
        (line,) = lines()
        return line


@pytest.fixture
def folder(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> Path:
    (tmp_path / "models.toml").write_text(PRESETS, encoding="utf-8")
    shutil.copy(ROOT / "tests" / "data" / "demo-f16.gguf", tmp_path / "code.gguf")
    for name, flags in {
        "alice": (),
        "bob": ("--model", "chat", "--model", "gpt*"),
        "prometheus": ("--role", "metrics"),
        "ops": ("--role", "admin"),
    }.items():
        added = run_main(capfdbinary, "keys", "add", name, "--keys", tmp_path / "keys.toml", *flags)
        (tmp_path / f"{name}.key").write_text(re.findall(r"localllm-\S+", added.out)[0])
    return tmp_path


class Team:
    """The clients of the proxy."""

    def __init__(self, folder: Path, url: str, trusted: ssl.SSLContext) -> None:
        self._folder, self._url, self._tls = folder, url, trusted

    def client(self, name: str) -> httpx.Client:
        """Return a client with the key of a name."""
        key = (self._folder / f"{name}.key").read_text() if name else "localllm-unknown"
        headers = {"Host": HOST, "Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self._url, headers=headers, verify=self._tls, timeout=120)


def chat(client: httpx.Client, *, stream: bool = False, **more: Any) -> str:
    """Return the text of a complete reply."""
    headers = more.pop("headers", {})
    messages = [{"role": "user", "content": "Tell me a story."}]
    body = {"model": "chat", "messages": messages, "max_tokens": 24, "stream": stream, **more}
    response = client.post(CHAT, json=body, headers=headers)
    assert response.status_code == 200, response.text
    if not stream:
        return str(response.json()["choices"][0]["message"]["content"])
    *events, done = (line[6:] for line in response.text.splitlines() if line.startswith("data: "))
    assert done == "[DONE]", response.text
    return "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events)


def check_roles(team: Team) -> None:
    """Each key can do what its role may do, also through the proxy."""
    unload = ("POST", "/llm/models/unload")
    for name, expected in {"": 401, "alice": 403, "bob": 403, "prometheus": 403, "ops": 200}.items():
        with team.client(name) as client:
            assert client.request(*unload, json={"model": "short"}).status_code == expected
            is_metrics = client.get("/llm/metrics").status_code
            assert is_metrics == (expected if name != "prometheus" else 200)
    with team.client("alice") as alice, team.client("bob") as bob:
        assert [model["id"] for model in alice.get("/llm/v1/models").json()["data"]] == ["chat", "short", "code"]
        assert [model["id"] for model in bob.get("/llm/v1/models").json()["data"]] == ["chat", "short"]
        assert bob.post(CHAT, json={"model": "code", "messages": []}).status_code == 404
        assert bob.post("/v1/chat/completions", json={}).status_code == 404  # of nginx
        assert "text/html" in bob.get("/llm/", headers={"Accept": "text/html"}).headers["Content-Type"]


def check_slow_request(team: Team, server: Server) -> None:
    """The log explains a slow request: its model was loaded, and its address is the client's."""
    with team.client("alice") as alice:
        chat(alice, model="code", headers={"X-Request-ID": "slow-1", "X-Forwarded-For": "192.0.2.9"})
        chat(alice, model="code", headers={"X-Request-ID": "fast-1"})
    slow, fast = server.line("slow-1"), server.line("fast-1")
    assert (slow["key"], slow["model"], slow["address"], slow["status"]) == ("alice", "code", "127.0.0.1", 200)
    phases = ("load_s", "queue_s", "prefill_s", "decode_s")
    assert sum(slow[phase] for phase in phases) <= slow["duration_s"] + 0.001
    assert slow["load_s"] > fast["load_s"]


def check_metrics(team: Team) -> None:
    with team.client("prometheus") as prometheus:
        text = prometheus.get("/llm/metrics", params={"names": "localllm"}).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    loaded = {s.labels["model"]: s.value for s in samples if s.name == "localllm_model_loaded"}
    assert loaded == {"chat": 1, "short": 0, "code": 1}
    (replies,) = (s.value for s in samples if s.name == "localllm_replies_total" and s.labels["model"] == "code")
    assert replies == 2


class Clients:
    """Clients that chat until they are stopped.  Every reply must be complete and have the expected text."""

    def __init__(self, team: Team, expected: str) -> None:
        self._team, self._expected = team, expected
        self._stop = threading.Event()
        self._n_replies = [0] * N_CLIENTS
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(N_CLIENTS)]

    def _run(self, i: int) -> None:
        with self._team.client(("alice", "bob")[i % 2]) as client:
            while not self._stop.wait(0.2):
                try:
                    text = chat(client, stream=i % 4 < 2)
                    assert text == self._expected
                except Exception as error:
                    self.failures.append(f"client {i}: {error!r}")
                    return
                self._n_replies[i] += 1

    def wait_for_replies(self) -> None:
        """Wait until every client has received another reply."""
        before = [*self._n_replies]
        wait_for(lambda: self.failures or all(n > m for n, m in zip(self._n_replies, before, strict=True)))
        assert not self.failures

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)


def test_an_administrator_serves_a_team(folder: Path, certificate: tuple[Path, Path]) -> None:
    proxy = fence("nginx")
    recipe = fence("nginx", 1) + proxy[proxy.index("server {") :]  # with the servers for upgrades
    with ExitStack() as stack:
        first = Server(folder, "llm.sock", stack, "first.log")
        team = Team(folder, *stack.enter_context(nginx(folder, certificate, recipe)))
        check_roles(team)
        check_slow_request(team, first)
        check_metrics(team)
        with team.client("alice") as alice:
            expected = chat(alice)
        assert expected
        with Clients(team, expected) as clients:
            clients.wait_for_replies()
            second = Server(folder, "second.sock", stack, "second.log")
            first.stop()
            clients.wait_for_replies()
            again = Server(folder, "llm.sock", stack, "again.log")
            clients.wait_for_replies()  # for which nginx did not find the socket
            second.stop()
            clients.wait_for_replies()
        assert not clients.failures
        again.stop()
