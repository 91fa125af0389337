"""Many clients at once for a long time: replies stay right, nothing is a 5xx, and nothing leaks.

    python -m tests.benchmarks.soak_server --clients 64 --minutes 10

Clients ask for chats whose text is known, stream them, leave in the midst of one, read slowly, and send malformed
bodies.  Then memory, file descriptors and threads are compared with those after the first tenth of the time.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any

import httpx
import psutil

from tests.helpers.http_server import demo, serving

CHAT = "/v1/chat/completions"
BROKEN = (b"{", b"\xff", b'{"messages": 5}', b"[" * 5000, b'{"messages": [], "n": 99}')


class Soak:
    """The clients, and what came of their requests."""

    def __init__(self, port: int, seconds: float) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.end = time.monotonic() + seconds
        self.seen: Counter[str] = Counter()
        self.faults: list[str] = []
        self.expected = {seed: self._ask(seed) for seed in range(16)}

    @staticmethod
    def _body(seed: int, *, stream: bool = False, **more: object) -> dict[str, object]:
        messages = [{"role": "user", "content": f"Tell me story {seed}."}]
        return {"messages": messages, "seed": seed, "max_tokens": 10 + 5 * seed, "stream": stream, **more}

    def _ask(self, seed: int) -> str:
        reply = httpx.post(self.url + CHAT, json=self._body(seed), timeout=120).json()
        text: str = reply["choices"][0]["message"]["content"]
        return text

    def client(self, number: int) -> None:
        chance = random.Random(number)
        with httpx.Client(base_url=self.url, timeout=120) as client:
            while time.monotonic() < self.end:
                kind = chance.choice(("whole", "whole", "stream", "stream", "leave", "slow", "broken"))
                seed = chance.randrange(16)
                try:
                    getattr(self, kind)(client, seed, chance)
                    self.seen[kind] += 1
                except Exception as error:
                    self.faults.append(f"{kind}: {error!r}")

    def whole(self, client: httpx.Client, seed: int, chance: random.Random) -> None:
        response = client.post(CHAT, json=self._body(seed))
        self._check(response.status_code)
        if response.status_code == 200:
            self._compare(seed, response.json()["choices"][0]["message"]["content"])

    def stream(self, client: httpx.Client, seed: int, chance: random.Random, pause: float = 0.0) -> None:
        text = ""
        with client.stream("POST", CHAT, json=self._body(seed, stream=True)) as response:
            self._check(response.status_code)
            if response.status_code != 200:
                return
            for line in response.iter_lines():
                time.sleep(pause)
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    text += event["choices"][0]["delta"].get("content") or ""
        self._compare(seed, text)

    def slow(self, client: httpx.Client, seed: int, chance: random.Random) -> None:
        self.stream(client, seed % 4, chance, pause=0.02)

    def leave(self, client: httpx.Client, seed: int, chance: random.Random) -> None:
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            content = json.dumps(self._body(seed, stream=chance.random() < 0.5, max_tokens=900)).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content)
            time.sleep(0.1 * chance.random())

    def broken(self, client: httpx.Client, seed: int, chance: random.Random) -> None:
        response = client.post(CHAT, content=chance.choice(BROKEN))
        if response.status_code != 400:
            self.faults.append(f"a broken body was answered with {response.status_code}")

    def _check(self, status: int) -> None:
        if status not in (200, 429):
            self.faults.append(f"status {status}")

    def _compare(self, seed: int, text: str) -> None:
        if text != self.expected[seed]:
            self.faults.append(f"seed {seed}: {text!r} is not {self.expected[seed]!r}")


def resources() -> dict[str, float]:
    process = psutil.Process()
    return {"MB": process.memory_info().rss / 1e6, "files": process.num_fds(), "threads": process.num_threads()}


def ask(port: int, n_clients: int, seconds: float) -> None:
    """The clients, in a process of their own, so that what they take is not counted as the server's."""
    soak = Soak(port, seconds)
    threads = [threading.Thread(target=soak.client, args=(i,)) for i in range(n_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"seen": soak.seen, "faults": soak.faults[:20]}))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.port is not None:
        ask(arguments.port, arguments.clients, 60 * arguments.minutes)
        return 0
    with serving(demo()) as server:

        def phase(minutes: float) -> tuple[dict[str, Any], dict[str, float]]:
            flags = {"--port": server.port, "--clients": arguments.clients, "--minutes": minutes}
            words = [str(word) for flag in flags.items() for word in flag]
            command = [sys.executable, "-m", "tests.benchmarks.soak_server", *words]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            server.wait_until_idle(120)
            time.sleep(1)
            return json.loads(done.stdout), resources()

        first, before = phase(0.1 * arguments.minutes)
        second, after = phase(0.9 * arguments.minutes)
    faults = first["faults"] + second["faults"]
    print(json.dumps({"seen": second["seen"], "faults": faults, "before": before, "after": after}))
    leaked = any(after[name] > (1.05 if name == "MB" else 1) * before[name] for name in before)
    return 1 if faults or leaked else 0


if __name__ == "__main__":
    raise SystemExit(main())
