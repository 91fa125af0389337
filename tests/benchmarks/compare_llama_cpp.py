"""Compare localllm and llama.cpp: the same files, threads and prompts, in turn, with a comparison of the outputs.

    python -m tests.benchmarks.compare_llama_cpp --make llama-1.1b:q4_0,q8_0 --make qwen2-0.5b:q4_0
    python -m tests.benchmarks.compare_llama_cpp --tests pp,tg --make llama-1.1b:iq1_s,iq2_xxs,iq3_s,iq4_xs
    python -m tests.benchmarks.compare_llama_cpp --tests depth -d 32768 --make deepseek32-2.6b:q4_0 \\
        --make deepseek3-2.6b:q4_0                                   # sparse attention, and the same shape dense
    python -m tests.benchmarks.compare_llama_cpp model.gguf -t 1,2 --tests pp,tg -p 512 -n 64 -r 3
    python -m tests.benchmarks.compare_llama_cpp model.gguf --quick
    python -m tests.benchmarks.compare_llama_cpp … --resume          # continue an interrupted run

| test | measurement |
|---|---|
| pp, tg | evaluation of a prompt, and decoding after it |
| depth | the same with a long prompt |
| kv8 | depth with the cache in Q8_0 |
| batch | eight sequences at once, compared with one |
| small | decoding with small models: the demo model, and stories260K if it is found |
| start | seconds from the launch of a process to its first token |
| memory | peak memory of a process |

The figure of llama.cpp is the best of its settings (weights repacked or not, flash attention or not) that a short
trial selected.  The share of decoding is relative to the memory bandwidth.  Shares of a prompt are relative to the
peak rate of the format's own products, and to the highest peak.  Both ceilings are measured in turn with the
programs.

The exit code is 1 if logits differ by more than a tolerance, if greedy texts differ after a token that is no near
tie, or if memory exceeds its limit (see `tests.benchmarks.results`).  ``--markdown`` prints the tables of
docs/speed.md. ``--resume`` repeats measurements of changed files, and all measurements if the source of localllm has
changed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from localllm.cli.machine_warnings import disturbance
from localllm.kernels.cpu.host import OtherLoad, cpu_model
from localllm.kernels.cpu.target import choose
from tests.benchmarks import measure, theirs
from tests.benchmarks.markdown import markdown
from tests.benchmarks.measure import Sizes
from tests.benchmarks.results import (
    TITLES,
    Agreement,
    Journal,
    Line,
    Memory,
    Record,
    Trial,
    file_version,
    program_version,
    table_line,
)
from tests.helpers.synthetic import made_gguf

TESTS = ("pp", "tg", "depth", "kv8", "batch", "small", "start", "memory")
_ROOT = Path(__file__).resolve().parents[2]
#: Small models: the built-in one, and a file that may exist.
SMALL_MODELS = (
    _ROOT / "localllm" / "data" / "demo.gguf",
    _ROOT.parent / "shared" / "data" / "models" / "stories260K" / "stories260K.gguf",
)
FULL = Sizes(prompt=512, n=64, depth=8192, deep_n=32, repetitions=3)
QUICK = Sizes(prompt=256, n=24, depth=1024, deep_n=8, repetitions=1)


class Comparison:
    """The requested measurements, and the journal of the results."""

    def __init__(self, tests: Sequence[str], threads: Sequence[int], sizes: Sizes, journal: Journal) -> None:
        self.found: list[Record] = []
        self._tests = frozenset(tests)
        self._threads = threads
        self._sizes = sizes
        self._journal = journal
        self._programs = f"{program_version()} {choose().name} {theirs.version()}"

    def model(self, path: Path) -> None:
        """Run all tests of one file, except tests of small models."""
        trials = self._trials(path)
        for threads in self._threads:
            place = (path, threads, self._sizes)
            chosen = tuple(test for test in ("pp", "tg") if test in self._tests)
            if chosen:
                self._measure("+".join(chosen), measure.speed, *place, chosen, trials)
            if "depth" in self._tests:
                self._measure("depth", measure.depth, *place, trials)
            if "kv8" in self._tests:
                self._measure("kv8", measure.q8_depth, *place, trials)
            if "batch" in self._tests:
                self._measure("batch", measure.batch, *place)
        place = (path, max(self._threads), self._sizes)
        if "start" in self._tests:
            self._measure("start", measure.start, *place)
        if "memory" in self._tests:
            self._measure("memory", measure.peak_memory, *place)

    def small_models(self) -> None:
        """Run the tests of the small models that exist."""
        for path in SMALL_MODELS if "small" in self._tests else ():
            for threads in self._threads if path.exists() else ():
                self._measure("small", measure.small, path, threads, self._sizes)

    def _trials(self, path: Path) -> list[Trial]:
        """Try llama.cpp's settings, if a test needs the result."""
        if not self._tests & {"pp", "tg", "depth", "kv8"}:
            return []
        records = self._measure("trial", measure.trial, path, max(self._threads), self._sizes)
        return [record for record in records if isinstance(record, Trial)]

    def _measure(
        self,
        test: str,
        measurement: Callable[..., list[Record]],
        path: Path,
        threads: int,
        sizes: Sizes,
        *more: object,
    ) -> list[Record]:
        """Measure, unless the journal has the result, and print the records."""
        job = f"{test} {file_version(path)} {threads} {sizes} {self._programs}"
        records = self._journal.known(job)
        if records is None:
            records = measurement(path, threads, sizes, *more)
            self._journal.finish(job, records)
        for record in records:
            line = table_line(record.cells()) if isinstance(record, Line) else f"{record.model:20} {record.line()}"
            print(line, flush=True)
        self.found += records
        return records


def main() -> int:
    """Run the command line; return the exit code."""
    arguments = _arguments()
    tests, threads = arguments.tests.split(","), sorted(map(int, arguments.threads.split(",")))
    if unknown := set(tests) - set(TESTS):
        raise SystemExit(f"unknown test {', '.join(sorted(unknown))}; choose from {', '.join(TESTS)}")
    comparison = Comparison(tests, threads, _sizes(arguments), Journal(arguments.results, resume=arguments.resume))
    others = OtherLoad()
    print(f"{cpu_model()}, kernels for {choose().name}; {theirs.version()}")
    print(table_line(TITLES), flush=True)
    for path in _models(arguments):
        comparison.model(path)
    comparison.small_models()
    if complaint := disturbance(others.cpus(), 1.0):
        print(complaint, file=sys.stderr)
    return report(comparison.found, with_markdown=arguments.markdown)


def report(found: Sequence[Record], *, with_markdown: bool) -> int:
    """Print a summary of all records; return the exit code."""
    lines = [record for record in found if isinstance(record, Line)]
    if with_markdown:
        print(f"\n{markdown(found)}\n")
    for words in (words for line in lines for words in line.shortfalls()):
        print(f"below the goal: {words}")
    checked = [record for record in found if isinstance(record, Agreement | Memory)]
    faults = [f"{record.model}: {fault}" for record in checked for fault in record.faults()]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument(
        "--make",
        action="append",
        default=[],
        help="SHAPE:FORMAT,FORMAT: random models to write first if they are missing; may be repeated",
    )
    parser.add_argument("--folder", type=Path, default=Path("benchmark-models"), help="where --make writes them")
    parser.add_argument("--tests", default=",".join(TESTS), help=f"comma-separated: {', '.join(TESTS)}; default: all")
    parser.add_argument("-t", "--threads", default="1,2", help="comma-separated numbers of threads")
    parser.add_argument("--quick", action="store_true", help="shorter prompts and texts, one repetition")
    parser.add_argument("-p", "--prompt", type=int, help="tokens of the prompt")
    parser.add_argument("-n", type=int, help="tokens to decode")
    parser.add_argument("-d", "--depth", type=int, help="tokens of the long prompt")
    parser.add_argument("-r", "--repetitions", type=int)
    parser.add_argument(
        "--results", type=Path, default=Path("benchmark-results.jsonl"), help="the file of the results"
    )
    parser.add_argument("--resume", action="store_true", help="skip measurements that --results contains")
    parser.add_argument("--markdown", action="store_true", help="also print the tables for docs/speed.md")
    return parser.parse_args()


def _sizes(arguments: argparse.Namespace) -> Sizes:
    given = {name: getattr(arguments, name) for name in ("prompt", "n", "depth", "repetitions")}
    chosen = {name: value for name, value in given.items() if value is not None}
    return replace(QUICK if arguments.quick else FULL, **chosen)


def _models(arguments: argparse.Namespace) -> Iterator[Path]:
    yield from arguments.models
    for made in arguments.make:
        shape, formats = made.split(":")
        for file_type in formats.split(","):
            yield made_gguf(arguments.folder, shape, file_type)


if __name__ == "__main__":
    sys.exit(main())
