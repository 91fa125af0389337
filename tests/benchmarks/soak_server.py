"""Run many kinds of requests against ``localllm serve`` for a long time, and check replies, memory and pauses.

    python -m tests.benchmarks.soak_server --clients 12 --minutes 30

The server has four models: the demo model, a tiny llama with two adapters, a tiny BERT, and a tiny Gemma 4 that
accepts images and sounds (both built from transformers).  Clients send chats, streams, completions with adapters,
images, sounds, embeddings and malformed bodies; they also read slowly and disconnect early.  A reply with a fixed
seed must equal the reply that the idle server gave.  A separate process measures the pauses of one stream per model.

The report compares memory, file descriptors and threads of the server after one fifth of the time with those at the
end.  The exit status is 1 if a reply is wrong, a status is unexpected, a resource grows, or a stream pauses longer
than 0.3 s.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import wave
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
from PIL import Image

from localllm.bench.serving import our_address, started

Body = dict[str, Any]

CHAT = "/v1/chat/completions"
MALFORMED = (b"{", b"\xff", b'{"messages": 5}', b"[" * 5000, b'{"messages": [], "n": 99}')
N_SEEDS = 8
LONGEST_PAUSE_S = 0.3
#: Growth allowed between one fifth of the time and the end.  Memory: allocators do not return every page.  Threads:
#: pools of a fixed size start their threads when many requests come together.
ALLOWED_GROWTH = {"MB": 1.05, "files": 1.0, "threads": 1.25}

TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ '<|image|>' if part.type == 'image' else '<|audio|>' "
    "if part.type == 'audio' else part.text }}{% endfor %}{% endif %} {% endfor %}"
)


# -- Requests --------------------------------------------------------------------------------------------------------


def chat(model: str, content: Any, seed: int, **options: Any) -> Body:
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "seed": seed, "max_tokens": 10 + 5 * seed, **options}


def story(seed: int, **options: Any) -> Body:
    return chat("demo", f"Tell me story {seed}.", seed, **options)


def image(seed: int) -> Body:
    pixels = np.random.default_rng(seed).integers(0, 256, (64 + 8 * seed, 96, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, ("PNG", "JPEG", "WEBP")[seed % 3])
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return chat("media", [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}], seed)


def sound(seed: int) -> Body:
    samples = np.random.default_rng(seed).integers(-9000, 9000, 16_000 * (1 + seed % 3), np.int16)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16_000)
        writer.writeframes(samples.tobytes())
    audio = {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}
    return chat("media", [{"type": "text", "text": "hear"}, {"type": "input_audio", "input_audio": audio}], seed)


def adapters(seed: int) -> Body:
    scales = [{"id": 0, "scale": seed % 3 / 2}, {"id": 1, "scale": seed % 2}]
    return {"model": "adapted", "prompt": "the", "seed": seed, "n_predict": 10 + 5 * seed, "lora": scales}


def embedding(seed: int) -> Body:
    return {"model": "embedder", "input": [f"text {seed}", "another text " * seed]}


#: Path, body by seed, and the part of the reply that must stay the same.
KINDS: dict[str, tuple[str, Callable[[int], Body], Callable[[Any], Any]]] = {
    "chat": (CHAT, story, lambda reply: reply["choices"][0]["message"]["content"]),
    "image": (CHAT, image, lambda reply: reply["choices"][0]["message"]["content"]),
    "sound": (CHAT, sound, lambda reply: reply["choices"][0]["message"]["content"]),
    "adapters": ("/completion", adapters, lambda reply: reply["content"]),
    "embedding": ("/v1/embeddings", embedding, lambda reply: [row["embedding"] for row in reply["data"]]),
}


class Clients:
    """Threads that send random requests until the time is up.

    Attributes:
        n_done: answered requests by kind.
        faults: one line per wrong reply or status.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.n_done: Counter[str] = Counter()
        self.faults: list[str] = []
        self._expected: dict[tuple[str, int], Any] = {}
        with httpx.Client(base_url=url, timeout=300) as client:
            for kind in KINDS:
                for seed in range(N_SEEDS):
                    self._expected[kind, seed] = self._reply(client, kind, seed)

    @staticmethod
    def _reply(client: httpx.Client, kind: str, seed: int) -> Any:
        path, body, result = KINDS[kind]
        response = client.post(path, json=body(seed))
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}: {response.text[:200]}")
        return result(response.json())

    def run(self, n_clients: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=self._client, args=(i, end)) for i in range(n_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, number: int, end: float) -> None:
        chance = random.Random(f"{number} {end}")
        behaviours = (*KINDS, *KINDS, "stream", "stream", "slow", "disconnect", "disconnect", "malformed")
        with httpx.Client(base_url=self.url, timeout=300) as client:
            while time.monotonic() < end:
                kind, seed = chance.choice(behaviours), chance.randrange(N_SEEDS)
                try:
                    if kind in KINDS:
                        self._compare(kind, seed, self._reply(client, kind, seed))
                    elif kind == "disconnect":
                        self._disconnect(chance, seed)
                    elif kind == "malformed":
                        self._malformed(client, chance)
                    else:
                        self._stream(client, seed, pause_s=0.02 if kind == "slow" else 0.0)
                    self.n_done[kind] += 1
                except Exception as error:
                    self.faults.append(f"{kind}: {error!r}")
                time.sleep(chance.random())

    def _stream(self, client: httpx.Client, seed: int, pause_s: float) -> None:
        text = ""
        with client.stream("POST", CHAT, json=story(seed, stream=True)) as response:
            if response.status_code != 200:
                raise ValueError(f"status {response.status_code}")
            for line in response.iter_lines():
                time.sleep(pause_s)
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        self._compare("chat", seed, text)

    def _disconnect(self, chance: random.Random, seed: int) -> None:
        path, body, _ = KINDS[chance.choice(list(KINDS))]
        content = json.dumps(body(seed) | {"stream": chance.random() < 0.5, "max_tokens": 900}).encode()
        with socket.create_connection((urlsplit(self.url).hostname, urlsplit(self.url).port)) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content[: chance.choice((len(content), len(content) // 2))])
            time.sleep(0.2 * chance.random())

    @staticmethod
    def _malformed(client: httpx.Client, chance: random.Random) -> None:
        response = client.post(CHAT, content=chance.choice(MALFORMED))
        if response.status_code != 400:
            raise ValueError(f"a malformed body was answered with {response.status_code}")

    def _compare(self, kind: str, seed: int, reply: Any) -> None:
        if reply != self._expected[kind, seed]:
            self.faults.append(f"{kind} {seed}: {str(reply)[:80]!r} is not {str(self._expected[kind, seed])[:80]!r}")


# -- Measurements ----------------------------------------------------------------------------------------------------


class Pauses:
    """Threads that read one stream per model; ``longest_s`` has the longest time between two tokens of each."""

    def __init__(self, url: str, models: tuple[str, ...]) -> None:
        self.url = url
        self.longest_s: dict[str, float] = dict.fromkeys(models, 0.0)
        self.n_tokens: dict[str, int] = dict.fromkeys(models, 0)

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=self._read, args=(model, end)) for model in self.longest_s]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _read(self, model: str, end: float) -> None:
        body = {"model": model, "prompt": "Once upon a time", "n_predict": 400, "stream": True, "ignore_eos": True}
        with httpx.Client(base_url=self.url, timeout=300) as client:
            while time.monotonic() < end:
                with client.stream("POST", "/completion", json=body) as response:
                    previous: float | None = None
                    for line in response.iter_lines():
                        if not line.startswith("data:"):
                            continue
                        now = time.monotonic()
                        if previous is not None:
                            self.longest_s[model] = max(self.longest_s[model], now - previous)
                        previous = now
                        self.n_tokens[model] += 1
                        if now > end:
                            break


class ServerProcess:
    """The server's process, found by its port."""

    def __init__(self, url: str) -> None:
        self._port = urlsplit(url).port

    @cached_property
    def _process(self) -> psutil.Process:
        for child in psutil.Process().children():
            if any(c.laddr.port == self._port and c.status == "LISTEN" for c in child.net_connections("tcp")):
                return child
        raise RuntimeError("the server's process has no listening socket")

    def resources(self) -> dict[str, float]:
        family = [self._process, *self._process.children(recursive=True)]
        memory = sum(process.memory_info().rss for process in family)
        return {
            "MB": round(memory / 1e6, 1),
            "files": self._process.num_fds(),
            "threads": self._process.num_threads(),
        }


def write_models(folder: Path) -> Path:
    """Write the models and a file of presets into a folder; return the presets' path."""
    from tests.helpers.tiny_models import tiny_gguf
    from tests.localllm.loading.test_adapters import write_gguf
    from tests.models.encoders.test_hearing import made
    from tests.models.tiny import ENCODERS, make_model, write

    tiny_gguf(folder / "adapted.gguf", max_position_embeddings=1024)
    write_gguf(folder / "first.gguf", 2, rank=8)
    write_gguf(folder / "second.gguf", 4, rank=16, alpha=16)
    write(folder / "embedder.gguf", ENCODERS["bert"], make_model(ENCODERS["bert"]))
    (folder / "media").mkdir()
    made("gemma4a", folder / "media")
    presets = {
        "demo": ['model = "demo"'],
        "adapted": [
            f'model = "{folder}/adapted.gguf"',
            f'lora = ["{folder}/first.gguf", "{folder}/second.gguf"]',
        ],
        "embedder": [f'model = "{folder}/embedder.gguf"'],
        "media": [
            f'model = "{folder}/media/model.gguf"',
            f'mmproj = "{folder}/media/mmproj.gguf"',
            f"chat_template = {json.dumps(TEMPLATE)}",
        ],
    }
    path = folder / "models.toml"
    path.write_text("".join(f"[{name}]\n" + "\n".join(lines) + "\n\n" for name, lines in presets.items()))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--url", help=argparse.SUPPRESS)  # of a running server: be the clients' process
    arguments = parser.parse_args()
    if arguments.url is not None:
        clients = Clients(arguments.url)
        clients.run(arguments.clients, 60 * arguments.minutes)
        print(json.dumps({"done": clients.n_done, "faults": clients.faults[:20]}))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        presets = write_models(Path(folder))
        command = [sys.executable, "-m", "localllm", "serve", "--models", str(presets), "--port", "0"]
        with started([*command, "-np", str(arguments.clients + 1), "-c", "4096", "-kvu", "-q"], our_address) as url:
            server = ServerProcess(url)

            def phase(minutes: float) -> tuple[Body, Pauses, dict[str, float]]:
                flags = ["--url", url, "--clients", str(arguments.clients), "--minutes", str(minutes)]
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.benchmarks.soak_server", *flags], stdout=subprocess.PIPE, text=True
                )
                time.sleep(10)  # the clients' process starts and requests the expected replies
                pauses = Pauses(url, ("demo", "adapted", "media"))
                pauses.run(60 * minutes)
                output, _ = process.communicate(timeout=600)
                time.sleep(2)
                return json.loads(output), pauses, server.resources()

            first, _, before = phase(0.2 * arguments.minutes)
            second, pauses, after = phase(0.8 * arguments.minutes)
    faults = first["faults"] + second["faults"]
    longest = {model: round(seconds, 3) for model, seconds in pauses.longest_s.items()}
    print(json.dumps({"done": second["done"], "faults": faults, "before": before, "after": after}))
    print(json.dumps({"longest_pause_s": longest, "tokens": pauses.n_tokens}))
    grew = any(after[name] > ALLOWED_GROWTH[name] * before[name] for name in before)
    return int(bool(faults) or grew or any(seconds > LONGEST_PAUSE_S for seconds in longest.values()))


if __name__ == "__main__":
    raise SystemExit(main())
