"""Compare `localllm serve` with llama.cpp's server: the same file, threads and requests, in turn.

    python -m tests.benchmarks.serving model.gguf -t 2 --clients 8,16 --llama-server ./llama-server
    python -m tests.benchmarks.serving model.gguf -t 2 --binding /path/to/python     # with llama-cpp-python[server]

The server of the binding answers requests sequentially, without batches, so it does not show what llama.cpp can
do.  Each round prints a line of JSON per server, and the last lines are the ratios between localllm and the others.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
from typing import Any

from localllm.bench.serving import LONGEST, Load, our_address, ours, started


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-p", "--prompt", type=int, default=128, help="mean tokens of a prompt")
    parser.add_argument("-n", "--reply", type=int, default=64, help="mean tokens of a reply")
    parser.add_argument("--clients", default="8,16")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-server")
    parser.add_argument("--binding")
    given = parser.parse_args()
    longest = LONGEST * (2 * given.prompt + given.reply)

    def commands(n_clients: int) -> dict[str, tuple[list[str], Any]]:
        found: dict[str, tuple[list[str], Any]] = {
            "localllm": (ours(given.file, n_clients, longest, given.threads), our_address)
        }
        common = ["--host", "127.0.0.1"]
        if given.llama_server:
            port = free_port()
            sizes = ["-c", n_clients * longest, "-np", n_clients, "-t", given.threads, "-tb", given.threads]
            words = [given.llama_server, "-m", given.file, *common, "--port", port, "-fa", "on", *sizes]
            found["llama-server"] = [str(w) for w in words], our_address
        if given.binding:
            port = free_port()
            sizes = ["--n_ctx", longest, "--n_threads", given.threads, "--n_threads_batch", given.threads]
            more = ["--interrupt_requests", "false", "--flash_attn", "true"]
            words = [given.binding, "-m", "llama_cpp.server", "--model", given.file, "--port", port, *common]
            found["binding"] = [str(w) for w in [*words, *sizes, *more]], _uvicorn
        return found

    for n_clients in map(int, given.clients.split(",")):
        rates: dict[str, list[dict[str, Any]]] = {}
        for _ in range(given.rounds):
            for name, (command, address) in commands(n_clients).items():
                with started(command, address) as url:
                    Load(url, 1, 1, mean_prompt=8, mean_reply=2).run()
                    load = Load(url, n_clients, given.requests, given.rate, given.prompt, given.reply)
                    load.run()
                summary = {"server": name, **load.summary(), "error": load.errors[:1]}
                rates.setdefault(name, []).append(summary)
                print(json.dumps(summary), flush=True)
        for name in rates.keys() - {"localllm"}:
            pairs = list(zip(rates["localllm"], rates[name], strict=True))
            speed = statistics.median(a["reply_tokens_per_s"] / b["reply_tokens_per_s"] for a, b in pairs)
            gap, first = (
                statistics.median(a[key]["p95"] / b[key]["p95"] for a, b in pairs)
                for key in ("between_tokens_ms", "first_token_ms")
            )
            print(
                f"{n_clients} clients, against {name}: {speed:.2f} x its tokens a second, {gap:.2f} x its p95 "
                f"between tokens, {first:.2f} x its p95 to the first",
                flush=True,
            )
    return 0


def _uvicorn(line: str) -> str | None:
    match = re.search(r"running on (http://\S+)", line)
    return match and match[1]


if __name__ == "__main__":
    raise SystemExit(main())
