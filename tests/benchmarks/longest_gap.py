"""Measure the longest gap between two tokens of a stream while other clients send expensive requests.

    python -m tests.benchmarks.longest_gap model.gguf -t 2
    python -m tests.benchmarks.longest_gap model.gguf --only grammar --lora adapter.gguf
    python -m tests.benchmarks.longest_gap model.gguf --only image --mmproj mmproj.gguf

Each kind of request prints a line: the longest and the median gap of the stream in milliseconds, its tokens, the
number of answered requests, and the last answer.  `nothing` is the stream alone.  The last line has all results as
JSON.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
from PIL import Image

from localllm.bench.serving import our_address, started

#: Largest acceptable gap.
MOST_MS = 300

Body = dict[str, Any]

_numbers = count()


def objects(n: int, *, are_required: bool) -> Body:
    names = [f"p{next(_numbers)}" for _ in range(n)]
    properties = {name: {"type": "string"} for name in names}
    return {"type": "object", "properties": properties, "required": names if are_required else []}


def letters(n: int) -> str:
    """Return a string that no earlier grammar contained."""
    return (f"a{next(_numbers)} bc def ghij " * n)[:n]


def completion(**more: Any) -> tuple[str, Body]:
    return "/completion", {"prompt": "Once", "n_predict": 16, **more}


def chat(messages: list[Body]) -> tuple[str, Body]:
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 4}


def variables(n: int) -> Body:
    return {"messages": turns(1), "max_tokens": 4, "chat_template_kwargs": {f"v{i}": i for i in range(n)}}


def turns(n: int) -> list[Body]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": f"Message {i}."} for i in range(n)]


#: Path and body of a request by kind.  Each request is new, because known grammars and prompts cost nothing.
ATTACKS: dict[str, Callable[[], tuple[str, Body]]] = {
    "grammar: a literal": lambda: completion(grammar=f'start: "{letters(500_000)}"'),
    "grammar: alternatives": lambda: completion(
        grammar="start: " + "|".join(f'"{letters(9)}{i}"' for i in range(1900))
    ),
    "grammar: repetition": lambda: completion(regex=f"({letters(20)}){{500000}}"),
    "grammar: many states": lambda: completion(regex=f"(.*a.{{{1000 + next(_numbers)}}}b)"),
    "schema: a constant": lambda: completion(json_schema={"const": letters(450_000)}),
    "schema: 10,000 properties": lambda: completion(json_schema=objects(10_000, are_required=True)),
    "schema: 490 optional": lambda: completion(json_schema=objects(490, are_required=False)),
    "schema: refused": lambda: completion(json_schema=objects(9_000, are_required=False)),
    "chat: 500 messages": lambda: chat(turns(501)),
    "chat: 20,000 messages": lambda: chat(turns(20_001)),
    "text: 2 million characters": lambda: ("/tokenize", {"content": letters(2_000_000)}),
    "text: a long word": lambda: ("/tokenize", {"content": "ab" * 500_000}),
    "prompt: as long as fits": lambda: completion(prompt=letters(3000)),
    "prompts: save": lambda: ("/slots/0?action=save", {"filename": "saved"}),
    "prompts: restore": lambda: ("/slots/0?action=restore", {"filename": "saved"}),
    "body: 16 MB": lambda: ("/tokenize", {"content": "", "more": [1] * 8_000_000}),
    "body: 500,000 token ids": lambda: completion(prompt=[1] * 500_000),
    "body: 1.4 million token ids": lambda: completion(prompt=[1] * 1_400_000),
    "body: text of 500,000 ids": lambda: ("/detokenize", {"tokens": [300] * 500_000}),
    "body: numbers of 4,000 digits": lambda: ("/tokenize", {"content": "", "more": [10**3999] * 2500}),
    "body: 200,000 variables": lambda: ("/v1/chat/completions", variables(200_000)),
    "body: 20,000 variables": lambda: ("/v1/chat/completions", variables(20_000)),
    "body: 20,000 messages of Anthropic": lambda: ("/v1/messages", {"messages": turns(20_001), "max_tokens": 4}),
    "biases: 250,000": lambda: completion(logit_bias=[[i % 500, 0.5] for i in range(250_000)]),
    "biases: 30,000": lambda: completion(logit_bias=[[i % 500, 0.5] for i in range(30_000)]),
    "biases: long strings": lambda: completion(logit_bias=[[letters(12_000), 0.5] for _ in range(2000)]),
    "biases: 30,000 strings": lambda: completion(logit_bias=[[f"{i}x"[:2], 0.5] for i in range(30_000)]),
    "schema: 3,000 oneOf": lambda: completion(
        json_schema={"oneOf": [objects(1, are_required=True) for _ in range(3000)]}
    ),
}


def adapters() -> tuple[str, Body]:
    return completion(lora=[{"id": 0, "scale": next(_numbers) % 7 / 7}])


def image() -> tuple[str, Body]:
    """Return a request with a new image of 4,096 patches of 16 × 16 pixels."""
    pixels = np.random.default_rng(next(_numbers)).integers(0, 256, (1024, 1024, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "BMP")
    data = base64.b64encode(file.getvalue()).decode()
    return completion(prompt={"prompt_string": "Once <__media__>", "multimodal_data": [data]})


def send(url: str, data: bytes, timeout: float = 120) -> Any:
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=timeout)


class Attackers:
    """Clients that send the next request when the last one is answered."""

    def __init__(self, url: str, make: Callable[[], tuple[str, Body]] | None, n_clients: int) -> None:
        self.n_answered, self.last = 0, ""
        self._url, self._ended = url, threading.Event()
        # Encode the requests in advance, because encoding would hold the lock of the interpreter.
        asked = [] if make is None else [make() for _ in range(4 * n_clients)]
        self._asked = [(path, json.dumps(body).encode()) for path, body in asked]
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(n_clients)]

    def __enter__(self) -> Attackers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        while self._asked and not self._ended.is_set():
            path, data = self._asked[number % len(self._asked)]
            number += len(self._threads)
            try:
                with send(self._url + path, data) as response:
                    self.last = str(response.status)
                    response.read()
            except urllib.error.HTTPError as error:
                self.last = f"{error.code} {error.read()[:90]!r}"
            except OSError as error:
                self.last = str(error)
            self.n_answered += 1


def gaps(url: str, seconds: float) -> Iterator[float]:
    """Yield the gaps between tokens of streams, in milliseconds."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        body = {"prompt": "Once upon a time", "n_predict": 400, "stream": True, "ignore_eos": True}
        with send(f"{url}/completion", json.dumps(body).encode()) as response:
            before = None
            for line in response:
                if line.startswith(b"data:"):
                    now = time.perf_counter()
                    if before is not None:
                        yield 1000 * (now - before)
                    before = now
                    if now > end:
                        break


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="demo")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("-c", "--context", type=int, default=8192, help="total context of all clients")
    parser.add_argument("--clients", type=int, default=4, help="clients with expensive requests")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds per kind")
    parser.add_argument("--only", default="", help="only kinds whose names contain this string")
    parser.add_argument("--lora", help="an adapter, whose scale changes with each request")
    parser.add_argument("--mmproj", help="the model's image encoder; sends images")
    given = parser.parse_args()
    attacks: dict[str, Callable[[], tuple[str, Body]] | None] = {"nothing": None, **ATTACKS}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "localllm", "serve", "-m", given.file, "--port", "0", "-q"]
        words += ["-t", str(given.threads), "-c", str(given.context), "-np", str(given.clients + 1), "-kvu"]
        words += ["--prompt-cache", folder]
        if given.lora:
            words += ["--lora", given.lora]
            attacks["adapters"] = adapters
        if given.mmproj:
            words += ["--mmproj", given.mmproj]
            attacks["image: 4,096 patches"] = image
        with started(words, our_address) as url:
            list(gaps(url, 1.0))
            for name, make in attacks.items():
                if given.only not in name and make is not None:
                    continue
                with Attackers(url, make, given.clients) as attackers:
                    ms = list(gaps(url, given.seconds)) or [0.0]
                found[name] = {"longest_ms": round(max(ms), 1), "median_ms": round(statistics.median(ms), 2)}
                found[name] |= {"tokens": len(ms), "answered": attackers.n_answered, "last": attackers.last}
                print(
                    f"{name:28} longest {max(ms):8.1f} ms, median {statistics.median(ms):7.2f} ms, "
                    f"{len(ms):6,} tokens, {attackers.n_answered:5,} answered, last: {attackers.last}",
                    flush=True,
                )
    print(json.dumps({"model": given.file, "threads": given.threads, "clients": given.clients, "gaps": found}))
    return int(any(each["longest_ms"] > MOST_MS for each in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
