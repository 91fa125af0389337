"""Unix sockets, sockets that systemd opens, proxies in front of the server, and signals."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.errors import UsageError
from localllm.server import sockets
from localllm.server.sockets import listen_unix
from tests.helpers.command_line import command, environment, run_main, run_process
from tests.helpers.data import ROOT
from tests.helpers.http_server import demo, serving
from tests.localllm.server.test_keys import HELLO, bearer, key_file, section

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs Unix sockets and signals")

CHAT = "http://localhost/v1/chat/completions"


def client_of(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=60)


#: Passes file descriptors as systemd does, sd_listen_fds(3): from 3, and for the process with the id LISTEN_PID.
ACTIVATE = """
import fcntl, os, sys
high = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 50) for fd in sys.argv[1].split(",")]
for number, fd in enumerate(high, 3):
    os.dup2(fd, number)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(high)), "LISTEN_FDNAMES": "a:b"}
os.execv(sys.argv[2], sys.argv[2:])
"""


def activated(line: list[str], fds: tuple[int, ...]) -> list[str]:
    return [sys.executable, "-c", ACTIVATE, ",".join(map(str, fds)), *line]


@contextmanager
def started(
    *arguments: object, fds: tuple[int, ...] = (), **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The running command, and the line in which it says where it listens."""
    line = command("serve", "-m", "demo", *arguments)
    process = subprocess.Popen(
        activated(line, fds) if fds else line,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | variables,
        cwd=ROOT,
        pass_fds=fds,
    )
    assert process.stderr is not None
    lines = []
    try:
        for text in process.stderr:
            lines.append(text)
            if "listening on" in text:
                break
        assert lines, process.wait()
        yield process, lines[-1]
    finally:
        process.kill()
        process.communicate()


# -- Unix sockets ----------------------------------------------------------------------------------------------------


def test_a_unix_socket_serves_its_group_and_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "llm.sock"
    with serving(demo(), listening=listen_unix(path)), client_of(path) as client:
        assert path.stat().st_mode & 0o777 == 0o660
        assert client.post("/v1/chat/completions", json=HELLO).status_code == 200
        assert client.get("/health", headers={"Host": "evil.example"}).status_code == 403
    assert not path.exists()


def test_a_second_server_is_refused_and_a_dead_one_replaced(tmp_path: Path) -> None:
    path = tmp_path / "llm.sock"
    with listen_unix(path):
        with pytest.raises(UsageError, match="another server listens"), listen_unix(path):
            pass
        assert path.exists()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listen_unix(path) as listening:
        assert listening.getsockname() == str(path)
        path.unlink()
        path.write_text("another program's")
    assert path.read_text() == "another program's"  # only the server's own file is removed


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("text")
    (tmp_path / "link").symlink_to(path)
    for name in ("file", "link", ".", "missing/llm.sock", "a" * 200, "a\0b"):
        with pytest.raises(UsageError), listen_unix(tmp_path / name):
            pass
    assert path.read_text() == "text"


def test_of_servers_that_start_at_once_one_listens(tmp_path: Path) -> None:
    path = tmp_path / "llm.sock"
    for _ in range(10):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        with ExitStack() as stack:
            results: list[str] = []
            barrier = threading.Barrier(8)

            def start(stack: Any = stack, barrier: Any = barrier, results: Any = results) -> None:
                barrier.wait()
                try:
                    stack.enter_context(listen_unix(path))
                    results.append("listens")
                except UsageError as error:
                    results.append(str(error))

            threads = [threading.Thread(target=start) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert results.count("listens") == 1
            assert sum("another server" in each for each in results) == 7


def test_the_command_listens_on_a_socket_and_a_port(tmp_path: Path) -> None:
    path = tmp_path / "llm.sock"
    flags = ("-q", "--port", 0, "--host", f"unix:{path},127.0.0.1", "--api-prefix", "/llm")
    with started(*flags) as (process, line):
        assert f"listening on unix:{path} " in line
        with client_of(path) as client:
            assert client.get("/llm/v1/models").status_code == 200
            assert client.get("/v1/models").status_code == 404
        second = run_process(["serve", "-m", "demo", "-q", "--host", f"unix:{path}"])
        assert second.code == 2
        assert f"error: another server listens on {path}: stop it, or choose another path" in second.err
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--api-prefix", "llm"], "--api-prefix 'llm'"),
        (["--api-prefix", "/llm/"], "--api-prefix '/llm/'"),
        (["--api-prefix", "/a?b"], "--api-prefix '/a?b'"),
        (["--trusted-proxy", "proxy.example"], "--trusted-proxy 'proxy.example'"),
        (["--trusted-proxy", "10.0.0.1/8"], "--trusted-proxy '10.0.0.1/8'"),
        (["--trusted-proxy", "*"], "--trusted-proxy '*'"),
        (["--keys", "/nowhere/keys.toml"], "/nowhere/keys.toml cannot be read"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], words: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    outcome = run_main(capfdbinary, "serve", "-m", "demo", *flags)
    assert outcome.code == 2
    assert words in outcome.err


# -- Sockets of systemd ----------------------------------------------------------------------------------------------


def test_sockets_of_systemd_are_used(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as opened, listen_unix(tmp_path / "llm.sock") as unix:
        fds = (opened.fileno(), unix.fileno())
        with started("-q", "--port", 1, fds=fds) as (_, line):
            url = f"http://127.0.0.1:{opened.getsockname()[1]}"
            assert url in line
            assert httpx.get(f"{url}/health", timeout=60).status_code in (200, 503)
            with client_of(tmp_path / "llm.sock") as client:
                assert client.get("/health").status_code in (200, 503)


def test_descriptors_for_another_process_are_not_used() -> None:
    with started("-q", "--port", 0, LISTEN_PID="1", LISTEN_FDS="1") as (_, line):
        assert re.search(r"listening on http://127.0.0.1:\d+ ", line)


def test_what_is_no_socket_of_systemd_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "file").open("w") as file, socket.socket() as idle, socket.socket(type=socket.SOCK_DGRAM) as udp:
        for opened in (file, idle, udp):
            monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
            monkeypatch.setenv("LISTEN_FDS", "1")
            monkeypatch.setattr(sockets, "_FIRST_DESCRIPTOR", descriptor := os.dup(opened.fileno()))
            with pytest.raises(UsageError, match=f"file descriptor {descriptor} is no"):
                sockets.inherited()
            assert "LISTEN_FDS" not in os.environ


# -- Proxies ---------------------------------------------------------------------------------------------------------


def stored_by(client: httpx.Client, address: str) -> str:
    """Store a response as a client of a proxy; return its path.  Other clients cannot read it."""
    body = {"input": "Hello!", "max_output_tokens": 1}
    answer = client.post("/v1/responses", json=body, headers={"X-Forwarded-For": address})
    return f"/v1/responses/{answer.json()['id']}"


@pytest.mark.parametrize(
    ("trusted", "is_trusted"),
    [
        (("127.0.0.1",), True),
        (("127.0.0.0/8", "::1"), True),
        (("192.0.2.1",), False),
        (("unix",), False),
        ((), False),
    ],
)
def test_only_a_trusted_proxy_names_the_client(trusted: tuple[str, ...], is_trusted: bool) -> None:
    with (
        serving(demo(), trusted_proxies=trusted) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        path = stored_by(client, "198.51.100.7")
        other = client.get(path, headers={"X-Forwarded-For": "198.51.100.8"})
        assert other.status_code == (404 if is_trusted else 200)
        # A client can send the header, too; the proxy appends the client's address.
        for spoofed in ("198.51.100.7, 198.51.100.8", "unix, 198.51.100.8", "127.0.0.1,, 198.51.100.8"):
            assert client.get(path, headers={"X-Forwarded-For": spoofed}).status_code == other.status_code
        own = client.get(path, headers={"X-Forwarded-For": "203.0.113.1, 198.51.100.7"})
        assert own.status_code == 200


def test_a_proxy_on_a_unix_socket_names_the_client(tmp_path: Path) -> None:
    path = tmp_path / "llm.sock"
    for trusted, expected in ((("unix",), 404), (("127.0.0.1",), 200)):
        with (
            serving(demo(), listening=listen_unix(path), trusted_proxies=trusted),
            client_of(path) as client,
        ):
            stored = stored_by(client, "198.51.100.7")
            other = client.get(stored, headers={"X-Forwarded-For": "198.51.100.8"})
            assert other.status_code == expected


# -- Signals ---------------------------------------------------------------------------------------------------------


def test_sighup_reads_the_keys_again(tmp_path: Path) -> None:
    path = key_file(tmp_path, section("a"))
    with started("--port", 0, "--keys", path) as (process, line):
        match = re.search(r"http://[^ ]+", line)
        assert match is not None
        url = f"{match[0]}/v1/models"
        assert httpx.get(url, headers=bearer("a"), timeout=60).status_code == 200
        status = path.stat()
        path.write_text(section("b"))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # a change that the file does not show
        process.send_signal(signal.SIGHUP)
        end = time.monotonic() + 60
        while httpx.get(url, headers=bearer("b"), timeout=60).status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert httpx.get(url, headers=bearer("a"), timeout=60).status_code == 401
        path.write_text("[b")
        for _ in range(20):
            process.send_signal(signal.SIGHUP)
        assert httpx.get(url, headers=bearer("b"), timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_sighup_does_not_end_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    def hang_up(path: Path) -> Any:
        signal.raise_signal(signal.SIGHUP)
        raise UsageError("the signal came")

    monkeypatch.setattr("localllm.server.keys.read_keys", hang_up)
    before = signal.getsignal(signal.SIGHUP)
    outcome = run_main(capfdbinary, "serve", "-m", "demo", "-q", "--keys", tmp_path / "keys.toml")
    assert outcome.error() == "the signal came"
    assert signal.getsignal(signal.SIGHUP) == before


@pytest.mark.skipif(
    signal.getsignal(getattr(signal, "SIGHUP", signal.SIGINT)) is signal.SIG_IGN, reason="started by nohup"
)
def test_sighup_ends_a_server_without_a_key_file() -> None:
    """The signal means that the terminal is closed."""
    with started("-q", "--port", 0) as (process, line):
        assert "http://" in line
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == -signal.SIGHUP


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="needs systemd")
def test_systemd_socket_activate_starts_it(tmp_path: Path) -> None:
    path = tmp_path / "llm.sock"
    line = ["systemd-socket-activate", f"--listen={path}", *command("serve", "-m", "demo", "-q")]
    with subprocess.Popen(line, stderr=subprocess.DEVNULL, env=environment(), cwd=ROOT) as process:
        try:
            end = time.monotonic() + 60
            while not path.exists():
                assert time.monotonic() < end
                time.sleep(0.02)
            with client_of(path) as client:  # its first request starts the server
                assert client.get("/v1/models").status_code == 200
        finally:
            process.kill()


def test_keys_and_other_keys_exclude_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = key_file(tmp_path, section("a"))
    for flags in (["--api-key", "k"], []):
        outcome = run_main(capfdbinary, "serve", "-m", "demo", "--keys", path, *flags)
        assert "--keys replaces --api-key" in outcome.error()
        monkeypatch.setenv("LOCALLLM_API_KEY", "k")
