"""Measure decoding and prompts of localllm and llama.cpp next to programs that keep the processors busy.

    python -m tests.benchmarks.busy model.gguf
    python -m tests.benchmarks.busy model.gguf --loops 0,1,2,4 -p 512 -n 64 -r 3

A busy program is a process with an endless loop.  Next to L busy programs, the fair share of T threads is T / (T + L)
of their idle speed, because the system gives all threads the same time.  Rates are medians of the rounds.  Rates of
llama.cpp are from the faster setting (weights repacked or not) in decoding.  The exit code is 1 if the ids that
localllm decodes next to busy programs differ from those on the idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.benchmarks.measure import WARM_UP, random_ids
from tests.benchmarks.ours import Ours
from tests.benchmarks.theirs import Context, LlamaCpp

#: Seconds for busy programs to start.
START_S = 1.0


@contextmanager
def busy_programs(n: int) -> Iterator[None]:
    """Run ``n`` processes with endless loops."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n)]
    try:
        time.sleep(START_S if n else 0.0)
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def rates(program: Ours | Context, ids: Sequence[int], n: int) -> tuple[float, float, list[int]]:
    """Return tokens per second of the prompt and of decoding, and the decoded ids."""
    prefill_s, decode_s, decoded = program.measure(ids, n)
    return len(ids) / prefill_s, n / decode_s, decoded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--loops", default="0,1,2,4", help="numbers of busy programs (default: 0,1,2,4)")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-p", "--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("-n", type=int, default=64, help="tokens to decode")
    parser.add_argument("-r", "--rounds", type=int, default=3)
    given = parser.parse_args()
    ids = random_ids(given.model, given.prompt)
    n_tokens = given.prompt + given.n + 2
    idle: tuple[float, float] | None = None
    expected: list[int] | None = None
    all_equal = True
    print("| loops | prompt, ours | of the fair share | llama.cpp | decode, ours | of the fair share | llama.cpp |")
    print("|---|---|---|---|---|---|---|")
    with ExitStack() as stack:
        ours = stack.enter_context(Ours(given.model, given.threads, n_tokens))
        theirs = [
            stack.enter_context(LlamaCpp(given.model, repack=repack)).context(given.threads, n_tokens, flash=True)
            for repack in (True, False)
        ]
        for each in (ours, *theirs):
            each.measure(ids[:WARM_UP], 2)
        for n_loops in map(int, given.loops.split(",")):
            found: list[list[tuple[float, float]]] = [[], *([] for _ in theirs)]
            with busy_programs(n_loops):
                for _ in range(given.rounds):
                    for program, seen in zip((ours, *theirs), found, strict=True):
                        prompt, decode, decoded = rates(program, ids, given.n)
                        seen.append((prompt, decode))
                        if program is ours:
                            expected = expected or decoded
                            all_equal &= decoded == expected
            medians = [tuple(map(statistics.median, zip(*seen, strict=True))) for seen in found]
            our, other = medians[0], max(medians[1:], key=lambda each: each[1])
            idle = idle or (our[0], our[1])
            fair = given.threads / (given.threads + n_loops)
            cells = [f"{our[i]:.1f} | {our[i] / (fair * idle[i]):.0%} | {other[i]:.1f}" for i in range(2)]
            print(f"| {n_loops} | {' | '.join(cells)} |", flush=True)
    if not all_equal:
        print("the ids decoded next to busy programs differ from those on the idle machine", file=sys.stderr)
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
