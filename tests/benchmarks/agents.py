"""Compare the time to the first token of each turn of a long agent session: localllm and llama.cpp, in turn.

    python -m tests.benchmarks.agents model.gguf --tokens 30000 --turns 10

The first turn has 40% of the tokens, as agents send long instructions and tools, and each later turn adds an equal
part of the rest.  Both programs keep the session's cache.  llama.cpp runs through its C functions, so its times have
no HTTP, templates or tokenizer; localllm runs through `LLM.generate`.  The exit status is 1 if localllm's sum of
times exceeds 0.6 times llama.cpp's, or if the first tokens of the replies differ too often.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from localllm.kernels.cpu.host import cpu_model
from tests.benchmarks.measure import random_ids
from tests.benchmarks.ours import Ours
from tests.benchmarks.results import even_line
from tests.benchmarks.theirs import LlamaCpp, version

#: Share of the session in the first turn.
FIRST = 0.4
#: Tokens of each reply.
REPLY = 32
#: Most of localllm's time, relative to llama.cpp's.
LIMIT = 0.6
#: Least share of turns whose first tokens are the same.
MIN_EQUAL = 0.7


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=30_000, help="length of the session")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--no-repack", action="store_true", help="llama.cpp does not repack weights")
    arguments = parser.parse_args()

    ids = random_ids(arguments.model, arguments.tokens)
    first = int(FIRST * arguments.tokens)
    ends = [first + (arguments.tokens - first) * turn // (arguments.turns - 1) for turn in range(arguments.turns)]
    rows, n_equal = [], 0
    n_context = arguments.tokens + REPLY * arguments.turns + 64
    print(f"{cpu_model()}, {arguments.threads} threads; {version()}")
    print(even_line(["turn", "tokens", "new", "localllm s", "llama.cpp s", "ratio"]))
    with (
        Ours(arguments.model, arguments.threads, n_context) as ours,
        LlamaCpp(arguments.model, repack=not arguments.no_repack) as model,
    ):
        context = model.context(arguments.threads, n_context, flash=True)
        context.evaluate(ids[:64])
        ours.measure(ids[:64], 1)
        before = 0
        for turn, end in enumerate(ends, 1):
            our_s, _, our_reply = ours.measure(ids[:end], REPLY, forget=turn == 1)
            their_s, _, their_reply = context.measure(ids[:end], REPLY, forget=turn == 1)
            n_equal += our_reply[0] == their_reply[0]
            rows.append((our_s, their_s))
            cells = [str(turn), f"{end:,}", f"{end - before:,}", f"{our_s:.2f}", f"{their_s:.2f}"]
            print(even_line([*cells, f"{our_s / their_s:.2f}"]), flush=True)
            before = end
    our_total, their_total = (sum(seconds) for seconds in zip(*rows, strict=True))
    ratio, share = our_total / their_total, n_equal / len(rows)
    print(
        f"all turns: {our_total:.1f} and {their_total:.1f} s: {ratio:.2f}; {share:.0%} of the first tokens are equal"
    )
    return int(ratio > LIMIT or share < MIN_EQUAL)


if __name__ == "__main__":
    sys.exit(main())
