"""``localllm bench --serve``: speed of a server with many concurrent clients.

Clients send prompts of random words to ``/v1/completions`` and read the streams. Lengths of prompts and replies have
log-normal distributions, like real chats: most are short and some are very long. With a rate, requests arrive as a
Poisson process and wait for a free client. Without a rate, every client sends its next request after reading the
last reply.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from localllm.errors import LocalLLMError
from localllm.nesting import parse_json

#: Standard deviations of the logarithms of the lengths of prompts and of replies.
_SPREADS = (1.0, 0.7)

#: Maximum length divided by the mean, which determines the necessary context.
LONGEST = 4

#: Common words for prompts.
_WORDS = """
    the of and to in is was for on with as by at from it an be are this that have not but had his they you which one
    were all their there been many some could time these two may then first any my now such like our over man me even
    most made after also did before must through years where much way well down should because each just those people
    how too little state good very make world still own see men work long get here between both life being under never
"""


@dataclass
class Result:
    """Measurements of a request: seconds to the first token and between further tokens, and numbers of tokens."""

    first_s: float
    gaps: list[float]
    n_prompt: int
    n_reply: int


@dataclass
class Load:
    """Requests to a server, and their results."""

    url: str  # address of the server
    n_clients: int  # number of clients; each sends one request at a time
    n_requests: int  # total number of requests
    rate: float | None = None  # mean number of requests per second; None sends a request when a client is free
    # mean_prompt, mean_reply: mean number of tokens
    mean_prompt: int = 512
    mean_reply: int = 128
    model: str = ""  # name of the model in requests
    seed: int = 1
    results: list[Result] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def run(self) -> None:
        chance, due = random.Random(self.seed), 0.0
        requests = []
        for _ in range(self.n_requests):
            due += chance.expovariate(self.rate) if self.rate else 0.0
            requests.append((due, self._body(chance)))
        self._next: Iterator[tuple[float, bytes]] = iter(requests)
        self._lock, self._begin = threading.Lock(), time.perf_counter()
        threads = [threading.Thread(target=self._client, daemon=True) for _ in range(self.n_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.seconds = time.perf_counter() - self._begin

    def _body(self, chance: random.Random) -> bytes:
        lengths = (self.mean_prompt, self.mean_reply)
        n_prompt, n_reply = (_length(chance, mean, spread) for mean, spread in zip(lengths, _SPREADS, strict=True))
        body = {
            "model": self.model,
            "prompt": " ".join(chance.choices(_WORDS.split(), k=n_prompt)),
            "max_tokens": n_reply,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body).encode()

    def _client(self) -> None:
        address = urlsplit(self.url)
        while True:
            with self._lock:
                due, body = next(self._next, (0.0, b""))
            if not body:
                return
            time.sleep(max(0.0, self._begin + due - time.perf_counter()))
            # A new connection for each request, because servers close connections that were idle for some seconds.
            with closing(http.client.HTTPConnection(address.hostname or "", address.port, timeout=600)) as connection:
                try:
                    self.results.append(self._ask(connection, body, self._begin + due if self.rate else None))
                except (OSError, http.client.HTTPException, ValueError) as error:
                    self.errors.append(str(error))

    @staticmethod
    def _ask(connection: http.client.HTTPConnection, body: bytes, due: float | None) -> Result:
        begin = time.perf_counter() if due is None else due
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"status {response.status}: {response.read(500).decode(errors='replace')}")
        times: list[float] = []
        usage: dict[str, int] = {}
        while line := response.readline():
            if not line.startswith(b"data: {"):
                continue
            event = parse_json(line[6:])
            if "error" in event:
                raise ValueError(str(event["error"]))
            if event.get("choices") and event["choices"][0].get("text"):
                times.append(time.perf_counter())
            usage = event.get("usage") or usage
        if not times:
            raise ValueError("a reply had no text")
        gaps, n_reply = [b - a for a, b in pairwise(times)], usage.get("completion_tokens", len(times))
        return Result(times[0] - begin, gaps, usage.get("prompt_tokens", 0), n_reply)

    def summary(self) -> dict[str, Any]:
        """Return the results; times are in milliseconds."""
        n_reply = sum(result.n_reply for result in self.results)
        return {
            "clients": self.n_clients,
            "rate": self.rate,
            "requests": len(self.results),
            "errors": len(self.errors),
            "seconds": round(self.seconds, 3),
            "prompt_tokens": sum(result.n_prompt for result in self.results),
            "reply_tokens": n_reply,
            "requests_per_s": round(len(self.results) / self.seconds, 3),
            "reply_tokens_per_s": round(n_reply / self.seconds, 2),
            "first_token_ms": _percentiles([result.first_s for result in self.results]),
            "between_tokens_ms": _percentiles([gap for result in self.results for gap in result.gaps]),
        }


def _length(chance: random.Random, mean: int, spread: float) -> int:
    return max(1, min(LONGEST * mean, round(chance.lognormvariate(math.log(mean) - spread**2 / 2, spread))))


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": round(1e3 * float(np.percentile(seconds, p)), 1) for p in (50, 95, 99)} if seconds else {}


@contextmanager
def started(command: Sequence[str], line: Callable[[str], str | None]) -> Iterator[str]:
    """Start a server in a process, and yield its address.

    Args:
        command: starts the server.
        line: returns the address from a line of the server's output, or None.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    assert process.stdout is not None
    output: list[str] = []
    url = None
    try:
        while url is None and (text := process.stdout.readline()):
            output.append(text)
            url = line(text)
        if url is None:
            raise LocalLLMError(f"the server did not start: {' '.join(''.join(output[-5:]).split())}")
        threading.Thread(target=process.stdout.read, daemon=True).start()  # a full pipe would block the server
        yield url
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def ours(file: str, n_clients: int, longest: int, threads: int | None = None) -> list[str]:
    """Return the command that starts localllm's server."""
    words = ["-m", file, "--port", "0", "-np", str(n_clients), "-c", str(longest), "-kvu", "-q"]
    return [sys.executable, "-m", "localllm", "serve", *words, *(["-t", str(threads)] if threads else [])]


def our_address(line: str) -> str | None:
    match = re.search(r"listening on (http://\S+)", line)
    return match and match[1]


def table(summary: dict[str, Any]) -> str:
    lines = [
        "{model}: {clients} clients, {requests} requests in {seconds:.1f} s, {prompt_tokens:,} tokens of prompts, "
        "{reply_tokens:,} of replies".format(**summary),
        "  {reply_tokens_per_s:.1f} tokens of replies and {requests_per_s:.2f} requests a second".format(**summary),
    ]
    for name, key in (("to the first token", "first_token_ms"), ("between tokens", "between_tokens_ms")):
        lines.append(f"  {name}: " + ", ".join(f"{p} {ms:,.0f} ms" for p, ms in summary[key].items()))
    return "\n".join(lines)
