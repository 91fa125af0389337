"""Measure a session that continues after a restart, from the prompt cache on disk, by type of the KV cache.

    python -m tests.benchmarks.prompt_cache -n 32768 --llama-cpp llama-1.1b-q4_0.gguf

A first program evaluates a session of random tokens and stores it. The files are removed from the system's memory. A
second program loads the model and continues the session with a short message. Printed are the seconds to the first
token with an empty folder and with the stored session, the bytes that were read and their rate, the rate of reading
the files alone, and whether both replies are equal. With ``--llama-cpp``, llama.cpp evaluates the same session, saves
its cache to a file and to memory, and continues from both. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import localllm
from localllm import LLM
from tests.benchmarks.theirs import LlamaCpp

TYPES = ("f16", "q8_0", "q4_0")
#: Tokens of a message and of a reply.
N_MESSAGE, N_REPLY = 20, 16


def drop_from_memory(folder: Path) -> None:
    """Write the files to the disk, and remove them from the system's memory."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_rate(folder: Path) -> float:
    """Return the bytes per second of reading all files, one after another."""
    drop_from_memory(folder)
    begin, n_bytes = time.perf_counter(), 0
    for path in folder.iterdir():
        with open(path, "rb", buffering=0) as file:
            while data := file.read(4 << 20):
                n_bytes += len(data)
    return n_bytes / (time.perf_counter() - begin)


def turn(llm: LLM, ids: list[int]) -> dict[str, Any]:
    """Generate a reply, and return its tokens, the seconds to the first token, and counters."""
    done = llm.generate(ids, max_tokens=N_REPLY, temperature=0, ignore_eos=True)
    return {
        "ids": done.ids,
        "first_token_s": done.timings.first_token_s,
        "evaluated": llm.counts.prompt_tokens,
        "restored": llm.counts.restored_tokens,
    }


def measured(path: Path, cache_type: str, n_tokens: int, threads: int, folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = {"threads": threads, "cache_type": cache_type, "prompt_cache": folder}
    options |= {"context": n_tokens + 64, "prompt_cache_size": 64}
    with localllm.load(path, **options) as llm:
        n = n_tokens - N_MESSAGE - 2 * N_REPLY
        ids = np.random.default_rng(0).integers(100, llm.info.n_vocab - 100, n).tolist()
        first = turn(llm, ids)
        begin = time.perf_counter()
    close_s = time.perf_counter() - begin
    ids += [*first["ids"], *ids[:N_MESSAGE]]
    n_bytes = sum(file.stat().st_size for file in folder.iterdir())
    disk_rate = read_rate(folder)
    drop_from_memory(folder)
    with localllm.load(path, **options) as llm:
        second = turn(llm, ids)
    with localllm.load(path, **options | {"prompt_cache": None}) as llm:
        alone = turn(llm, ids)
    return {
        "model": path.stem,
        "cache": cache_type,
        "tokens": len(ids),
        "evaluating_s": alone["first_token_s"],
        "first_token_s": second["first_token_s"],
        "evaluated": second["evaluated"],
        "restored": second["restored"],
        "stored_mb": n_bytes / 1e6,
        "read_mb_s": n_bytes / 1e6 / second["first_token_s"],
        "disk_mb_s": disk_rate / 1e6,
        "close_s": close_s,
        "equal": alone["ids"] == second["ids"],
    }


def theirs(path: Path, cache_type: str, n_tokens: int, threads: int, folder: Path) -> dict[str, float]:
    """Return the seconds to evaluate and to save a session, and to the first token after it was restored."""
    file = folder / "slot"
    with LlamaCpp(path, repack=True) as model:
        session = np.random.default_rng(0).integers(100, model.n_vocab - 100, n_tokens - N_MESSAGE - N_REPLY).tolist()
        context = model.context(threads, n_tokens + 64, flash=True, cache_type=cache_type)
        seconds = {"their_evaluating_s": context.evaluate(session)}
        begin = time.perf_counter()
        context.save(file)
        seconds["their_save_s"] = time.perf_counter() - begin
        kept = context.state()
        for name in ("file", "memory"):
            context.forget()
            drop_from_memory(folder)
            begin = time.perf_counter()
            if name == "file":
                context.restore(file, n_tokens)
            else:
                context.set_state(*kept)
            context.evaluate([*session, *session[:N_MESSAGE]])
            context.generate(1)
            seconds[f"their_first_token_{name}_s"] = time.perf_counter() - begin
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("-n", "--tokens", type=int, default=32_768)
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count())
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--llama-cpp", action="store_true", help="measure llama.cpp too")
    arguments = parser.parse_args()
    rows = []
    for path in arguments.models:
        for cache_type in arguments.types.split(","):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                row = measured(path, cache_type, arguments.tokens, arguments.threads, Path(folder))
            if arguments.llama_cpp:
                with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                    row |= theirs(path, cache_type, arguments.tokens, arguments.threads, Path(folder))
            if not rows:
                print(f"| {' | '.join(row)} |\n|{'---|' * len(row)}")
            rows.append(row)
            cells = (f"{value:,.2f}" if isinstance(value, float) else str(value) for value in row.values())
            print(f"| {' | '.join(cells)} |", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
