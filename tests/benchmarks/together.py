"""Requests that share a model: how long streams pause, how many tokens a batch brings, what a request costs to start.

    python -m tests.benchmarks.together model.gguf [-t 2] [--prompt 3500] [--tests stream,batch,mixed,start]

``stream`` writes one text while a long prompt is evaluated beside it: the longest pause between two tokens, and how
much longer the prompt takes than alone, less the time that the stream's own steps take.  ``batch`` decodes eight
sequences at once, against one.  ``mixed`` runs 64 requests of mixed lengths and priorities, some of which are
cancelled, and compares the ids of the others with those that they write alone.  ``start`` keeps 100 chats of 8,192
tokens in the cache (``--chats``), and measures what it takes to find a prompt's beginning among them.

The exit code is 1 if a text differs from the one written alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

import localllm
from localllm import LLM
from localllm.engine.cache import PagedCache

_OPTIONS: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def random_ids(llm: LLM, n: int, seed: int) -> list[int]:
    return [int(id_) for id_ in np.random.default_rng(seed).integers(3, llm.info.n_vocab, n)]


def stream_beside_a_prompt(llm: LLM, n_prompt: int) -> bool:
    prompt, own = random_ids(llm, n_prompt, 1), random_ids(llm, 16, 2)
    llm.forget()
    alone = llm.generate(prompt, max_tokens=1, **_OPTIONS)
    llm.forget()
    expected = llm.generate(own, max_tokens=400, **_OPTIONS)
    token_s = expected.timings.decode_s / expected.timings.decode_tokens
    llm.forget()
    times: list[float] = []
    ids: list[int] = []
    begun, ended = threading.Event(), threading.Event()

    def write() -> None:
        for chunk in llm.stream(own, **_OPTIONS):
            times.append(time.perf_counter())
            ids.extend(chunk.ids)
            if len(times) == 10:
                begun.set()
            if ended.is_set():
                break

    writer = threading.Thread(target=write)
    writer.start()
    begun.wait()
    begin = time.perf_counter()
    beside = llm.generate(prompt, max_tokens=1, **_OPTIONS)
    end = time.perf_counter()
    ended.set()
    writer.join()
    gaps = [b - a for a, b in pairwise(times) if a >= begin and b <= end]
    n_steps = len(gaps)
    longer = (beside.timings.prefill_s - n_steps * token_s) / alone.timings.prefill_s - 1
    print(
        f"stream: a prompt of {n_prompt:,} tokens takes {alone.timings.prefill_s:.2f} s alone and "
        f"{beside.timings.prefill_s:.2f} s beside a stream, {longer:+.1%} beyond the stream's {n_steps} steps; the "
        f"stream pauses {1e3 * max(gaps):.0f} ms at most, {1e3 * statistics.median(gaps):.0f} ms mostly "
        f"(alone {1e3 * token_s:.0f} ms a token)",
        flush=True,
    )
    n = min(len(ids), len(expected.ids))
    return tuple(ids[:n]) == expected.ids[:n] and beside.ids == alone.ids


def batch_of_eight(llm: LLM, rounds: int) -> bool:
    prompts = [random_ids(llm, 16, seed) for seed in range(8)]
    ratios, is_equal = [], True
    for _ in range(rounds):
        llm.forget()
        one = llm.generate(prompts[0], max_tokens=64, **_OPTIONS)
        llm.forget()
        eight = list(llm.generate_many(prompts, max_tokens=64, **_OPTIONS))
        rate = sum(each.timings.decode_tokens for each in eight) / max(each.timings.decode_s for each in eight)
        ratios.append(rate / one.timings.decode_tokens_per_s)
        is_equal &= eight[0].ids == one.ids
    print(f"batch: eight sequences write {statistics.median(ratios):.2f} x the tokens of one", flush=True)
    return is_equal


def mixed(llm: LLM) -> bool:
    rng = np.random.default_rng(5)
    prompts = [random_ids(llm, int(rng.integers(1, 400)), seed) for seed in range(64)]
    lengths = [int(n) for n in rng.integers(1, 40, 64)]
    cancelled = {int(i) for i in rng.choice(64, 12, replace=False)}
    llm.forget()
    begin = time.perf_counter()
    streams = [
        llm.stream(prompt, max_tokens=n, priority="background" if i % 3 == 0 else "normal", **_OPTIONS)
        for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    threading.Timer(0.5, lambda: [streams[i].cancel() for i in cancelled]).start()
    done = [stream.read() for stream in streams]
    seconds = time.perf_counter() - begin
    equal = 0
    for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True)):
        if done[i].finish_reason == "cancelled":
            assert i in cancelled
            continue
        llm.forget()
        equal += llm.generate(prompt, max_tokens=n, **_OPTIONS).ids == done[i].ids
    n_whole = sum(each.finish_reason != "cancelled" for each in done)
    print(
        f"mixed: 64 requests in {seconds:.1f} s, {64 - n_whole} of them cancelled, {equal} of {n_whole} others as "
        f"alone; the first token came after {max(d.timings.first_token_s for d in done):.1f} s at the latest",
        flush=True,
    )
    return equal == n_whole


class _NoPages:
    """A backend's cache that keeps nothing: only what is known of its pages is measured."""

    page_size, windows, n_states, n_bytes = 64, (None,), 0, 0

    def __init__(self, n_pages: int) -> None:
        self.n_pages = (n_pages,)

    def copy(self, group: int | None, source: int, target: int) -> None:
        """There is nothing to copy."""

    def n_bytes_of(self, group: int | None) -> int:
        return 0

    def read(self, group: int | None, number: int) -> bytes:
        return b""

    def write(self, group: int | None, number: int, data: bytes) -> None:
        """There is nothing to write."""


def starting_among(n_chats: int) -> bool:
    rng = np.random.default_rng(0)
    cache = PagedCache(_NoPages(n_chats * 129))
    common = rng.integers(0, 32000, 300).tolist()
    chats: list[list[int]] = []
    for _ in range(n_chats):
        ids = common + rng.integers(0, 32000, 8192 - 300).tolist()
        sequence = cache.begin(ids)
        cache.reserve(sequence, len(ids) - len(sequence))
        cache.append(sequence, ids[len(sequence) :])
        cache.release(sequence)
        chats.append(ids)
    seconds = []
    for ids in [*chats, [*common, 7, 8, 9], [1, 2, 3]] * 3:
        begin = time.perf_counter()
        cache.n_pages_to_begin(ids[:-1], len(ids))
        sequence = cache.begin(ids[:-1])
        seconds.append(time.perf_counter() - begin)
        assert len(sequence) == (len(ids) - 1 if len(ids) == 8192 else len(ids) - 3)
        cache.release(sequence)
    print(
        f"start: among {n_chats} chats of 8,192 tokens a prompt finds its beginning in "
        f"{1e3 * statistics.median(seconds):.2f} ms, {1e3 * max(seconds):.2f} ms at most",
        flush=True,
    )
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-r", "--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=3500)
    parser.add_argument("--chats", type=int, default=100)
    parser.add_argument("--tests", default="stream,batch,mixed,start")
    given = parser.parse_args(arguments)
    tests = given.tests.split(",")
    is_equal = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a context longer than the model was trained on
        llm = localllm.load(given.model, threads=given.threads, context=4096, parallel=3)
    with llm:
        if "stream" in tests:
            for _ in range(given.rounds):
                is_equal &= stream_beside_a_prompt(llm, given.prompt)
        if "batch" in tests:
            is_equal &= batch_of_eight(llm, given.rounds)
        if "mixed" in tests:
            is_equal &= mixed(llm)
    if "start" in tests:
        is_equal &= starting_among(given.chats)
    if not is_equal:
        print("TEXTS DIFFER from those written alone")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
