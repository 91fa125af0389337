"""Compare decode rates with and without drafts, in turn, and the generated texts.

    python -m tests.benchmarks.speculation model.gguf [-t 2] [-n 128] [-r 3] [--draft-model small.gguf] [--always]

The drafters are ``lookup``, and the drafter of the model: ``draft``, a smaller model, or ``mtp``, a block in its
file. With ``--always`` they draft in every step, even if that is not expected to pay.

There are three tasks.  ``repeat``: a processor forces the text to repeat its prompt word for word, as when a model
copies or edits text.  This needs no trained model, and costs both sides the same.  ``greedy``: the model's text at
temperature 0.  ``hot``: sampling at temperature 1.5 without truncation; nothing repeats, so drafts
only cost time.

With ``--made FOLDER``, a table compares the kinds of drafters instead: drafting from the text, the ``--draft-model``
and random drafters of each kind for the model, which are written to the folder. Random drafters show the cost of a
draft, and that the text is not slower if no draft is right. The last columns replace drafts by right ones with a
probability of 50, 70 and 90%, so that they show the speed of trained drafters with these rates.

The machine's speed drifts, so the drafters take turns.  Rates are the best of all rounds, and the ratio is the median
of the ratios within a round.  The exit code is 1 if drafts change a text.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import localllm
from localllm import LLM, Completion
from localllm.engine.drafting import model
from localllm.engine.drafting.assistant import AssistantDrafter
from localllm.engine.drafting.block import BlockDrafter
from localllm.engine.drafting.model import ModelDrafter
from localllm.engine.drafting.mtp import MTPDrafter
from localllm.engine.engine import EngineLoop
from tests.helpers.engines import in_engine
from tests.helpers.made_drafters import KINDS, made_drafter

_COLUMNS = "{:<8} {:<8} {:>8} {:>8} {:>7} {:>9} {:>9} {:>6} {:>7}"


_TABLE = "{:<8} {:>6} {:>9} {:>8} {:>8} {:>6} {:>6} {:>6} {:>6}"
#: Probabilities that a draft is right.
RATES = (0.5, 0.7, 0.9)
TEXT = """The lighthouse keeper had lived on the island for thirty years. Every evening he climbed the stairs and lit
the lamp, and every morning he wrote down the ships that had passed. One night, when the fog was so thick that"""


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
    rng = np.random.default_rng(0)
    words = [int(id_) for id_ in rng.integers(3, llm.info.n_vocab, 96)]

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


@contextmanager
def replaced_drafts(rate: float, text: Sequence[int], seed: int) -> Iterator[None]:
    """Replace the drafts of models by tokens of the text with probability ``rate``, and by wrong tokens otherwise."""
    chance, classes = random.Random(seed), (ModelDrafter, MTPDrafter, AssistantDrafter, BlockDrafter)
    originals = {cls: cls.__dict__["_draft"] for cls in classes}

    def replacing(draft: Any) -> Any:
        def replaced(self: ModelDrafter, tokens: Sequence[int], n: int) -> list[int]:
            right = text[len(tokens) : len(tokens) + len(draft(self, tokens, n))]
            return [token if chance.random() < rate else token ^ 1 for token in right]

        return replaced

    least, model.MIN_PROBABILITY = model.MIN_PROBABILITY, 0.0
    try:
        for cls in classes:
            cls._draft = replacing(originals[cls])  # type: ignore[method-assign]
        yield
    finally:
        model.MIN_PROBABILITY = least
        for cls in classes:
            cls._draft = originals[cls]  # type: ignore[method-assign]


def _cost_of_draft(loop: EngineLoop) -> float:
    """Return the measured cost of a draft in steps of the model."""
    assert loop.draft_model is not None
    return loop.draft_model.token_s(loop._cost) / loop._cost.single_s


def compare(path: Path, drafter: Path | None, name: str, threads: int, n_tokens: int, rounds: int) -> bool:
    """Print a line of the table of drafters. Return whether all texts are equal."""
    with localllm.load(path, threads=threads, context=1024, draft_model=drafter) as llm:
        prompt, way = llm.tokenize(TEXT), "lookup" if drafter is None else "draft"

        def run(way: Any, always: bool = False) -> Completion:
            llm.generate(prompt, max_tokens=0)  # caches the prompt
            options: dict[str, Any] = {"temperature": 0, "max_tokens": n_tokens + 1, "ignore_eos": True}
            return llm.generate(prompt, speculate=way, draft_always=always, **options)

        expected, cost = run(None), 0.0
        if drafter is not None:
            run(way, always=True)
            cost = in_engine(llm, _cost_of_draft)
        text, is_equal, plain, speeds = [*prompt, *expected.ids], True, list[float](), dict[float, list[float]]()
        last = expected
        for number in range(rounds):
            plain.append(run(None).timings.decode_tokens_per_s)
            for rate in (0.0, *RATES) if drafter is not None else (0.0,):
                with replaced_drafts(rate, text, number) if rate else nullcontext():
                    done = run(way)
                is_equal &= done.ids == expected.ids
                last = done if not rate else last
                speeds.setdefault(rate, []).append(done.timings.decode_tokens_per_s)
    ratios = [statistics.median(b / a for a, b in zip(plain, of, strict=True)) for of in speeds.values()]
    share = f"{last.drafts.share:.0%}" if last.drafts is not None and last.drafts.drafted else "none"
    numbers = f"{max(plain):.1f}", f"{max(speeds[0.0]):.1f}", *(f"{ratio:.2f}" for ratio in ratios), *[""] * 3
    print(_TABLE.format(name, f"{cost:.2f}", share, *numbers), "" if is_equal else "TEXTS DIFFER", flush=True)
    return is_equal


def compare_all(arguments: argparse.Namespace) -> bool:
    """Print the table of drafters."""
    path, options = Path(arguments.model), (arguments.threads, arguments.n_gen, arguments.rounds)
    drafters: dict[str, Path | None] = {"lookup": None}
    if arguments.draft_model is not None:
        drafters["draft"] = Path(arguments.draft_model)
    drafters |= {kind: made_drafter(kind, path, arguments.made) for kind in KINDS}
    print(_TABLE.format("drafter", "cost", "accepted", "plain", "drafts", "ratio", *(f"{r:.0%}" for r in RATES)))
    equal = [compare(path, drafter, name, *options) for name, drafter in drafters.items()]
    return all(equal)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft-model")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("-n", "--n-gen", type=int, default=128)
    parser.add_argument("-r", "--rounds", type=int, default=3)
    parser.add_argument("--always", action="store_true", help="draft for every step")
    parser.add_argument("--tasks", default="repeat,greedy,hot")
    parser.add_argument("--made", type=Path, metavar="FOLDER", help="compare the kinds of drafters")
    arguments = parser.parse_args()
    if arguments.made is not None:
        return 0 if compare_all(arguments) else 1
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
