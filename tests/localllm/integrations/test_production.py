"""docs/production.md: its proxies, its keys, its units and its commands."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.cli.parser import parser_of
from localllm.server.answers import PendingReplies
from localllm.server.http import Guard, Limits
from localllm.server.keys import KeyFile, parse_keys
from localllm.server.sockets import listen_unix
from tests.helpers.command_line import run_main
from tests.helpers.data import ROOT
from tests.helpers.http_server import Serving, demo, serving
from tests.localllm.server.test_keys import bearer, key_file, section

PAGE = (ROOT / "docs" / "production.md").read_text("utf-8")

#: Configuration around the server of the page, without files and ports outside of the test's folder.
NGINX = """
daemon off;
{user}
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {recipe}
}}
"""


def fence(language: str, number: int = 0) -> str:
    text: str = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[number]
    return text


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    named = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = folder / "certificate.pem", folder / "key.pem"
    subprocess.run([*made, *named, "-keyout", files[1], "-out", files[0]], check=True, capture_output=True)
    return files


@contextmanager
def running(line: list[str], url: str, trusted: ssl.SSLContext, **more: Any) -> Iterator[None]:
    """Run a proxy until the end, and wait until it answers."""
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, **more) as process:
        try:
            end = time.monotonic() + 30
            while True:
                try:
                    httpx.get(url, verify=trusted)
                    break
                except httpx.TransportError:
                    assert process.poll() is None, process.stderr and process.stderr.read()
                    assert time.monotonic() < end
                    time.sleep(0.02)
            yield
        finally:
            process.terminate()


@contextmanager
def nginx(folder: Path, certificate: tuple[Path, Path], recipe: str = "") -> Iterator[tuple[str, ssl.SSLContext]]:
    """The page's nginx in front of ``llm.sock`` in a folder."""
    port = free_port()
    recipe = recipe or fence("nginx")
    for there, here in (
        ("/run/localllm/", f"{folder}/"),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/ssl/llm.example.org.pem", str(certificate[0])),
        ("/etc/ssl/private/llm.example.org.key", str(certificate[1])),
        ("server_name llm.example.org", "server_name localhost"),
    ):
        assert there in recipe
        recipe = recipe.replace(there, here)
    user = "user root;" if os.geteuid() == 0 else ""  # who may use the test's folder
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, recipe=recipe, user=user))
    trusted = ssl.create_default_context(cafile=str(certificate[0]))
    url = f"https://localhost:{port}"
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    line = [program, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
    with running(line, url, trusted):
        yield url, trusted


@contextmanager
def caddy(folder: Path, certificate: tuple[Path, Path]) -> Iterator[tuple[str, ssl.SSLContext]]:
    """The page's Caddy in front of ``llm.sock`` in a folder."""
    port = free_port()
    recipe = fence("caddy").replace("unix//run/localllm/llm.sock", f"unix/{folder}/llm.sock")
    tls = f"tls {certificate[0]} {certificate[1]}"
    recipe = recipe.replace("llm.example.org {", f"https://localhost:{port} {{\n    {tls}")
    (folder / "Caddyfile").write_text(f"{{\n    admin off\n    auto_https disable_redirects\n}}\n{recipe}")
    trusted = ssl.create_default_context(cafile=str(certificate[0]))
    url = f"https://localhost:{port}"
    line = ["caddy", "run", "--config", str(folder / "Caddyfile")]
    more = {"env": os.environ | {"HOME": str(folder), "XDG_DATA_HOME": str(folder)}}
    with running(line, url, trusted, **more):
        yield url, trusted


PROXIES = [
    pytest.param(nginx, marks=pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")),
    pytest.param(caddy, marks=pytest.mark.skipif(shutil.which("caddy") is None, reason="Caddy is not installed")),
]


@contextmanager
def behind(folder: Path) -> Iterator[Serving]:
    """The server of the page: a Unix socket, a prefix, keys, and a trusted proxy."""
    limits = Limits(keys=KeyFile(key_file(folder, section("alice"), section("ops", role="admin"))), prefix="/llm")
    with serving(
        demo(), listening=listen_unix(folder / "llm.sock"), limits=limits, trusted_proxies=["unix"]
    ) as server:
        yield server


@pytest.mark.parametrize("proxy", PROXIES)
def test_a_stream_passes_the_proxy_at_once(
    proxy: Any, tmp_path: Path, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply stops after its first words, until the client has received them."""
    received = threading.Event()
    events = PendingReplies.events

    async def held(self: PendingReplies) -> AsyncIterator[Any]:
        n = 0
        async for event in events(self):
            yield event
            n += 1
            while n == 2 and not received.is_set():
                await asyncio.sleep(0.01)

    monkeypatch.setattr(PendingReplies, "events", held)
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 20, "stream": True}
    with (
        behind(tmp_path),
        proxy(tmp_path, certificate) as (url, trusted),
        httpx.Client(base_url=url, verify=trusted, timeout=60, headers=bearer("alice")) as client,
    ):
        for path in ("/llm/v1/chat/completions", "/llm/v1/messages", "/llm/api/chat"):
            received.clear()
            with client.stream("POST", path, json=body) as response:
                assert response.status_code == 200
                lines = [line for line in response.iter_lines() if line and not received.set()]
            assert len(lines) > 3


@pytest.mark.parametrize("proxy", PROXIES)
def test_the_page_keys_and_addresses_pass_the_proxy(
    proxy: Any, tmp_path: Path, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        behind(tmp_path),
        proxy(tmp_path, certificate) as (url, trusted),
        httpx.Client(base_url=url, verify=trusted, timeout=60) as client,
    ):
        page = client.get("/llm/", headers={"Accept": "text/html"})
        assert page.status_code == 200
        assert "<script>" in page.text
        moved = client.get("/llm")
        assert (moved.status_code, httpx.URL(moved.headers["location"]).path) == (308, "/llm/")
        assert client.get("/llm/health").json() == {"status": "ok"}
        assert client.get("/llm/v1/models").status_code == 401
        assert client.get("/llm/v1/models", headers=bearer("alice")).status_code == 200
        # Browsers send the page's origin with every POST.
        origin = {"Origin": url} | bearer("alice")
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}
        assert client.post("/llm/v1/chat/completions", json=body, headers=origin).status_code == 200
        other = origin | {"Origin": "https://evil.example"}
        assert client.post("/llm/v1/chat/completions", json=body, headers=other).status_code == 403
        for path in ("/llm/slots", "/llm//slots", "/llm/%73lots", "/llm/slots/", "/llm/x/../slots"):
            assert client.get(path, headers=bearer("alice")).status_code in (403, 404), path
        assert client.get("/llm/slots", headers=bearer("ops")).status_code == 200
        # Without a key in the request, the client is its address, which it cannot choose.
        seen: list[Any] = []
        call = Guard.__call__

        async def spy(self: Guard, scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope["client"])
            await call(self, scope, receive, send)

        monkeypatch.setattr(Guard, "__call__", spy)
        client.get("/llm/health", headers={"X-Forwarded-For": "203.0.113.9"})
        assert seen[0][0] == "127.0.0.1"


def test_the_keys_of_the_page_are_valid() -> None:
    (key,) = parse_keys(fence("toml").encode(), "keys.toml")
    assert (key.name, key.entry.role, key.entry.models) == ("alice", "client", ["qwen*", "demo"])


def commands(name: str) -> list[list[str]]:
    """The words of the commands ``localllm name`` of the page."""
    text = "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)).replace("\\\n", " ")
    lines = [shlex.split(line) for line in text.splitlines()]
    return [words[2:] for words in lines if words[:2] == ["localllm", name]]


def test_the_commands_of_the_page_manage_keys(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path = str(tmp_path / "keys.toml")
    lines = commands("keys")
    assert [line[0] for line in lines] == ["add", "add", "add", "list", "revoke"]
    for line in lines:
        outcome = run_main(
            capfdbinary, "keys", *(path if word == "/etc/localllm/keys.toml" else word for word in line)
        )
        assert outcome.code == 0, outcome.err
    assert [*tomllib.loads(Path(path).read_text("utf-8"))] == ["prometheus", "ops"]


def test_the_other_commands_of_the_page_can_be_read() -> None:
    serve, service = parser_of("serve"), parser_of("service")
    (line,) = commands("serve")
    assert serve.parse_args(line).prefix == "/llm"
    install, *others = commands("service")
    own, flags = install[: install.index("--")], install[install.index("--") + 1 :]
    assert service.parse_args(own).system
    assert serve.parse_args(flags).grace == 60
    assert [service.parse_args(line).action for line in others] == ["status", "logs", "uninstall"]


@pytest.mark.skipif(sys.platform == "win32" or shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_understands_the_socket(tmp_path: Path) -> None:
    (tmp_path / "localllm.socket").write_text(fence("ini"))
    (tmp_path / "localllm.service").write_text("[Service]\nExecStart=/bin/true\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "localllm.socket")], capture_output=True, text=True, check=False
    )
    assert "localllm" not in done.stderr
