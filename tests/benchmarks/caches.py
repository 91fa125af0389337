"""Compare the types of the KV cache of localllm and llama.cpp: bytes, quality and speed.

    python -m tests.benchmarks.caches --text README.md SmolLM2.gguf gemma-3-270m.gguf

Quality is measured on the last of ``--depth`` tokens of text: perplexity, and the mean KL divergence from
the same program's predictions with F16.  Both programs round activations to bytes, so any change of the cache causes
a KL divergence of a few thousandths, which is the least possible value of the column.  Speeds are the best of several
rounds, measured in turn: the prompt, and decoding with 2k and 8k tokens in the cache.  The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from localllm.gguf import GGUFFile
from localllm.kernels.graph import KVCache
from localllm.models.registry import read_model
from tests.benchmarks.ours import Ours
from tests.benchmarks.results import Array
from tests.benchmarks.theirs import LlamaCpp

TYPES = ("f16", "q8_0", "q5_0", "q4_0", "q8_0/q4_0")
#: Last tokens, whose predictions are compared, and decoded tokens.
LAST, DECODED = 512, 32


def log_probabilities(logits: Array) -> Iterator[Array]:
    """Yield log-probabilities of 32 rows at a time, in float64."""
    for first in range(0, len(logits), 32):
        x = logits[first : first + 32].astype(np.float64)
        x -= x.max(axis=1, keepdims=True)
        yield x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def quality(exact: Array, logits: Array, ids: list[int]) -> tuple[float, float]:
    """Return the perplexity of the next tokens, and the KL divergence from ``exact``."""
    wanted, kl, loss = np.array([*ids[1:], -1]), 0.0, 0.0
    for i, (p, q) in enumerate(zip(log_probabilities(exact), log_probabilities(logits), strict=True)):
        kl += (np.exp(p) * (p - q)).sum()
        rows = [(row, id_) for row, id_ in enumerate(wanted[32 * i : 32 * i + 32]) if id_ >= 0]
        loss -= sum(q[row, id_] for row, id_ in rows)
    return float(np.exp(loss / (len(ids) - 1))), kl / len(ids)


def cache_bytes(path: Path, cache_type: str) -> int:
    """Return the bytes per token."""
    with GGUFFile.open(path) as file:
        caches: list[KVCache] = [*read_model(file, cache_type=cache_type).graph.caches.values()]
    return sum(cache.bytes_per_token() for cache in caches)


def speeds(run: Callable[..., Any], ids: list[int], depths: list[int], rounds: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for n in depths:
        for i in range(rounds):
            prefill, decode, _ = run(ids[:n], DECODED, forget=i == 0)
            if i == 0:
                found[f"pp{n}"] = n / prefill
            found[f"tg@{n}"] = max(found.get(f"tg@{n}", 0.0), DECODED / decode)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="a file whose first tokens are predicted")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--depth", type=int, default=2048)
    parser.add_argument("--depths", default="2048,8192", help="depths for speeds; empty for none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    depths = [int(n) for n in given.depths.split(",") if n]
    room = max([given.depth, *depths]) + DECODED + 2
    text = given.text.read_text(encoding="utf-8")
    found = []
    for path in given.models:
        exact: dict[str, Array] = {}
        with ExitStack() as models:
            theirs = models.enter_context(LlamaCpp(path, repack=True))
            for cache_type in given.types.split(","):
                with Ours(path, given.threads, room, cache_type=cache_type) as ours:
                    context = theirs.context(given.threads, room, flash=True, cache_type=cache_type)
                    ids = ours.tokenize(text)[: given.depth]
                    spread = (ids * (1 + max([1, *depths]) // len(ids)))[: max([1, *depths])]
                    for name, program in (("localllm", ours), ("llama.cpp", context)):
                        logits = program.all_logits(ids)[-LAST:].copy()
                        perplexity, kl = quality(exact.setdefault(name, logits), logits, ids[-LAST:])
                        row = {"model": path.stem, "cache": cache_type, "program": name}
                        row |= {"bytes": cache_bytes(path, cache_type), "ppl": perplexity, "kl": kl}
                        row |= speeds(program.measure, spread, depths, given.rounds)
                        found.append(row)
                        print(
                            " ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()), flush=True
                        )
                    theirs.close_context(context)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
