"""Compare decode rates with and without drafts, in turn, and the generated texts.

    python -m tests.benchmarks.speculation model.gguf [-t 2] [-n 128] [-r 3] [--draft-model small.gguf] [--always]

The drafters are ``lookup``, and the drafter of the model: ``draft``, a smaller model, or ``mtp``, a block in its
file. With ``--always`` they draft in every step, even if that is not expected to pay.

There are three tasks.  ``repeat``: a processor forces the text to repeat its prompt word for word, as when a model
copies or edits text.  This needs no trained model, and costs both sides the same.  ``greedy``: the model's text at
temperature 0.  ``hot``: sampling at temperature 1.5 without truncation; nothing repeats, so drafts
only cost time.

The machine's speed drifts, so the drafters take turns.  Rates are the best of all rounds, and the ratio is the median
of the ratios within a round.  The exit code is 1 if drafts change a text.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import localllm
from localllm import LLM, Completion

_COLUMNS = "{:<8} {:<8} {:>8} {:>8} {:>7} {:>9} {:>9} {:>6} {:>7}"


@dataclass
class Line:
    """Results of one task with one drafter."""

    task: str
    way: str
    plain: list[float] = field(default_factory=list)
    guessed: list[float] = field(default_factory=list)
    is_equal: bool = True
    last: Completion | None = None

    def add(self, plain: Completion, guessed: Completion) -> None:
        self.plain.append(plain.timings.decode_tokens_per_s)
        self.guessed.append(guessed.timings.decode_tokens_per_s)
        self.is_equal &= plain.ids == guessed.ids
        self.last = guessed

    def __str__(self) -> str:
        ratio = statistics.median(b / a for a, b in zip(self.plain, self.guessed, strict=True))
        drafts = self.last.drafts if self.last is not None else None
        counts = ("",) * 4
        if drafts is not None:
            counts = (str(drafts.drafted), str(drafts.accepted), f"{drafts.share:.0%}", str(drafts.steps))
        rates = f"{max(self.plain):.1f}", f"{max(self.guessed):.1f}", f"{ratio:.3f}"
        return _COLUMNS.format(self.task, self.way, *rates, *counts) + ("" if self.is_equal else "  TEXTS DIFFER")


def tasks(llm: LLM, n_tokens: int) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Return the prompt and the options of each task."""
    random = np.random.default_rng(0)
    words = [int(id_) for id_ in random.integers(3, llm.info.n_vocab, 96)]

    def repeat(ids: NDArray[np.int32], logits: NDArray[np.float32]) -> NDArray[np.float32]:
        logits[words[len(ids) % len(words)]] = logits.max() + 1
        return logits

    common: dict[str, Any] = {"max_tokens": n_tokens + 1, "ignore_eos": True}
    hot = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
    return {
        "repeat": (words, {"temperature": 0, "processors": (repeat,), **common}),
        "greedy": (words, {"temperature": 0, **common}),
        "hot": (words, hot | common),
    }


def measure(llm: LLM, task: str, ways: Sequence[str], n_tokens: int, rounds: int, always: bool) -> list[Line]:
    prompt, options = tasks(llm, n_tokens)[task]

    def run(way: Any) -> Completion:
        llm.generate(prompt, max_tokens=0)  # caches the prompt
        return llm.generate(prompt, speculate=way, draft_always=always and way is not None, **options)

    lines = [Line(task, way) for way in ways]
    for number in range(rounds):
        for line in lines:
            if number % 2:  # the second run may find a faster or a slower machine
                guessed = run(line.way)
                line.add(run(None), guessed)
            else:
                plain = run(None)
                line.add(plain, run(line.way))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft-model")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-n", "--n-gen", type=int, default=128)
    parser.add_argument("-r", "--rounds", type=int, default=3)
    parser.add_argument("--always", action="store_true", help="draft for every step")
    parser.add_argument("--tasks", default="repeat,greedy,hot")
    arguments = parser.parse_args()
    print(_COLUMNS.format("task", "way", "plain", "guessed", "ratio", "drafted", "accepted", "share", "steps"))
    equal = True
    with localllm.load(
        arguments.model, threads=arguments.threads, context=1024, draft_model=arguments.draft_model
    ) as llm:
        own = [] if llm.info.draft is None else ["mtp" if arguments.draft_model is None else "draft"]
        for task in arguments.tasks.split(","):
            for line in measure(llm, task, ["lookup", *own], arguments.n_gen, arguments.rounds, arguments.always):
                print(line, flush=True)
                equal &= line.is_equal
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
