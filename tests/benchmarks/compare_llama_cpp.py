"""localllm and llama.cpp side by side: the same files, threads and prompts, in turn, with their outputs compared.

    python -m tests.benchmarks.compare_llama_cpp model.gguf [more.gguf] -t 1,2 -p 512 -n 64 -r 3
    python -m tests.benchmarks.compare_llama_cpp --make llama-1.1b:q4_0,q8_0,q4_k_m --folder /tmp/models

The machine's speed drifts, so each round measures one after the other: what it can read from memory, localllm,
llama.cpp without and with flash attention.  Rates are the best of all rounds, llama.cpp's the better of its two;
the share of the bandwidth is a median over rounds.  Peak memory is that of a process which loads the file and
generates.

The exit code is 1 if logits differ by more than `TOLERANCE`, if greedy texts part where it is no near tie, or if
memory passes `memory_limit`.  ``--markdown`` prints the README's table.

Needs ``pip install llama-cpp-python`` (it compiles llama.cpp, ten minutes on two cores), which only this script uses.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import localllm
from localllm.gguf import GGUFFile
from localllm.kernels.cpu.program import Workers
from localllm.kernels.cpu.roofline import ReadTest
from localllm.kernels.cpu.target import choose
from tests.helpers.synthetic import SHAPES, random_gguf

Array = NDArray[np.float32]

#: The largest ‖ours - theirs‖ / ‖theirs‖ of the logits: for weights in floats, and for quantised ones, where both
#: round activations to eight bits, each in its way.
FLOAT_TOLERANCE, QUANTISED_TOLERANCE = 2e-3, 2e-2
#: Two tokens are as good as equally likely if their logits differ by less than so many errors that are tolerated.
NEAR_TIE = 4.0


@dataclass
class Line:
    """One row of the table."""

    model: str
    threads: int
    test: str
    ours: float
    theirs: float
    flash_attention: bool  # of theirs
    gb_per_s: float | None = None
    of_bandwidth: float | None = None

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    def cells(self) -> list[str]:
        """As the table shows them."""
        traffic = [f"{self.gb_per_s:.1f}", f"{self.of_bandwidth:.0%}"] if self.gb_per_s and self.of_bandwidth else []
        rates = [f"{self.ours:.1f}", f"{self.theirs:.1f}", f"{self.ratio:.2f}"]
        return [self.model, str(self.threads), self.test, *rates, *(traffic or ["", ""])]


@dataclass
class Agreement:
    """How far the outputs agree: logits after the prompt, and greedy ids.

    Attributes:
        relative_error: ‖ours - theirs‖ / ‖theirs‖ of the logits.
        tolerance: how much of it is fine.
        top_equal: whether the likeliest token is the same.
        equal_ids: how many of the first greedy tokens are the same.
        gap: where they part, the larger difference of the logits of the two tokens, ours and theirs, in units of
            the error that is tolerated; 0 where they do not.
    """

    model: str
    threads: int
    relative_error: float
    tolerance: float
    top_equal: bool
    equal_ids: int
    n_ids: int
    gap: float

    def line(self) -> str:
        part = f", parting at a gap of {self.gap:.1f} tolerated errors" if self.gap else ""
        return (
            f"logits differ by {self.relative_error:.1e}, top token {'equal' if self.top_equal else 'DIFFERENT'}, "
            f"first {self.equal_ids} of {self.n_ids} greedy tokens equal{part}"
        )

    def faults(self) -> Iterator[str]:
        """What is wrong, in words."""
        if not self.relative_error <= self.tolerance:  # a NaN is one too
            yield f"logits differ by {self.relative_error:.1e}, more than {self.tolerance:.0e}"
        if not self.gap <= NEAR_TIE:
            yield f"greedy texts part after {self.equal_ids} tokens, at a gap of {self.gap:.1f} tolerated errors"


@dataclass
class Memory:
    """Bytes: peak resident ones, the KV cache among them, and the file."""

    model: str
    peak: int
    cache: int
    file: int

    def line(self) -> str:
        times = (self.peak - self.cache) / self.file
        return f"peak {self.peak / 2**20:,.0f} MiB = {times:.2f} x file + {self.cache / 2**20:,.0f} MiB cache"

    def faults(self) -> Iterator[str]:
        limit = memory_limit(self.file, self.cache)
        if self.peak > limit:
            yield f"memory peaks at {self.peak / 1e6:,.0f} MB, more than {limit / 1e6:,.0f} MB"


def memory_limit(file: int, cache: int) -> float:
    """Bytes that a process may take: 1.2 times the file, the cache, and 200 MB."""
    return 1.2 * file + cache + 200e6


def relative_error(ours: Array, theirs: Array) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def gap(ours: Array, theirs: Array, our_id: int, their_id: int, tolerance: float) -> float:
    """How far from equally likely two tokens are; see `Agreement`."""
    tolerated = tolerance * float(np.linalg.norm(theirs)) / math.sqrt(len(theirs))  # of one logit
    return float(max(ours[our_id] - ours[their_id], theirs[their_id] - theirs[our_id])) / tolerated


class LlamaCpp:
    """llama.cpp through its Python binding, with its default settings but for flash attention."""

    def __init__(self, path: Path, threads: int, context: int, *, flash_attention: bool) -> None:
        import llama_cpp

        self.flash_attention = flash_attention
        self._raw_logits = llama_cpp.llama_get_logits_ith
        self._llama = llama_cpp.Llama(
            str(path),
            n_ctx=context,
            n_batch=512,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=flash_attention,
            verbose=False,
        )

    def prefill(self, ids: list[int]) -> float:
        """Seconds to evaluate a prompt."""
        self._llama.reset()
        start = time.perf_counter()
        self._llama.eval(ids)
        self.logits()
        return time.perf_counter() - start

    def decode(self, n: int) -> tuple[float, list[int]]:
        """Seconds to go on greedily for n tokens, and those."""
        start = time.perf_counter()
        ids = []
        for _ in range(n):
            ids.append(int(self.logits().argmax()))
            self._llama.eval([ids[-1]])
        return time.perf_counter() - start, ids

    def logits(self) -> Array:
        """After the last token: [n_vocab]."""
        pointer = self._raw_logits(self._llama.ctx, -1)
        logits: Array = np.ctypeslib.as_array(pointer, shape=(self._llama.n_vocab(),))
        return logits

    def close(self) -> None:
        self._llama.close()


class Ours:
    """localllm through its library."""

    def __init__(self, path: Path, threads: int, context: int) -> None:
        self._llm = localllm.load(path, threads=threads, context=context)

    def measure(self, ids: list[int], n: int) -> tuple[float, float, list[int]]:
        """Seconds for the prompt, seconds for n further tokens, and those."""
        self._llm.forget()
        done = self._llm.generate(ids, max_tokens=n + 1, temperature=0.0, ignore_eos=True)
        return done.timings.prefill_s, done.timings.decode_s, list(done.ids)

    @property
    def tolerance(self) -> float:
        """How far the logits may be from those of others."""
        return FLOAT_TOLERANCE if self._llm.info.file_type in ("F32", "F16", "BF16") else QUANTISED_TOLERANCE

    def logits(self, ids: list[int]) -> Array:
        """After the last token: [n_vocab]."""
        return self._llm.logits(ids)[-1]

    def close(self) -> None:
        self._llm.close()


@contextmanager
def all_three(path: Path, threads: int, context: int) -> Iterator[tuple[Ours, list[LlamaCpp]]]:
    """localllm, and llama.cpp without and with flash attention."""
    ours = Ours(path, threads, context)
    theirs = [LlamaCpp(path, threads, context, flash_attention=flash) for flash in (False, True)]
    try:
        yield ours, theirs
    finally:
        ours.close()
        for each in theirs:
            each.close()
        gc.collect()


def weight_bytes(path: Path) -> int:
    """Bytes that one decoded token reads: all matrices but the embedding, of which it reads a row."""
    with GGUFFile.open(path) as file:
        sizes = {name: t.n_bytes for name, t in file.tensors.items()}
    embedding = sizes["token_embd.weight"]
    return sum(sizes.values()) - (embedding if "output.weight" in sizes else 0)


def compare(path: Path, threads: int, args: argparse.Namespace) -> tuple[list[Line], Agreement]:
    """Measures one file with one number of threads."""
    context = args.prompt + args.n + 2
    rng = np.random.default_rng(0)
    with GGUFFile.open(path) as file:
        n_vocab = file.tensors["token_embd.weight"].shape[0]
    ids = [1, *rng.integers(min(300, n_vocab // 2), n_vocab, args.prompt - 1).tolist()]
    n_bytes = weight_bytes(path)
    read_test = ReadTest(Workers(threads), choose(), 1 << 28)
    prefills: list[list[float]] = []  # seconds of ours, and of each of theirs
    decodes: list[list[float]] = []
    shares = []
    with all_three(path, threads, context) as (ours, theirs):
        for round_ in range(args.repetitions + 1):
            bandwidth = read_test.bandwidth()
            prefill, decode, our_ids = ours.measure(ids, args.n)
            prefill_row, decode_row = [prefill], [decode]
            for each in theirs:
                prefill_row.append(each.prefill(ids))
                seconds, their_ids = each.decode(args.n)
                decode_row.append(seconds)
                if each is theirs[0]:
                    first_ids = their_ids
            if round_ == 0:  # warms all up
                continue
            prefills.append(prefill_row)
            decodes.append(decode_row)
            shares.append(n_bytes * args.n / decode / bandwidth)
        agreement = agree(path.stem, threads, ours, theirs[0], ids, our_ids[: args.n], first_ids)
    rate = args.n / min(row[0] for row in decodes)
    lines = [
        _line(path.stem, threads, f"pp{args.prompt}", args.prompt, prefills),
        _line(path.stem, threads, f"tg{args.n}", args.n, decodes),
    ]
    lines[1].gb_per_s, lines[1].of_bandwidth = rate * n_bytes / 1e9, statistics.median(shares)
    return lines, agreement


def _line(model: str, threads: int, test: str, n: int, seconds: list[list[float]]) -> Line:
    """A row of the table from the seconds that n tokens took: in each round ours, and theirs without and with
    flash attention."""
    ours, without, with_flash = (n / min(column) for column in zip(*seconds, strict=True))
    return Line(model, threads, test, ours, max(without, with_flash), with_flash > without)


def agree(
    model: str,
    threads: int,
    ours: Ours,
    theirs: LlamaCpp,
    prompt: list[int],
    our_ids: Sequence[int],
    their_ids: Sequence[int],
) -> Agreement:
    """Compares logits after the prompt, and what was greedily generated after it."""

    def logits(ids: list[int]) -> tuple[Array, Array]:
        theirs.prefill(ids)
        return ours.logits(ids), theirs.logits().copy()

    a, b = logits(prompt)
    error, top_equal = relative_error(a, b), bool(a.argmax() == b.argmax())
    n_equal = next((i for i, (x, y) in enumerate(zip(our_ids, their_ids, strict=True)) if x != y), len(our_ids))
    parting = 0.0
    if n_equal < len(our_ids):
        a, b = logits([*prompt, *our_ids[:n_equal]])
        parting = gap(a, b, our_ids[n_equal], their_ids[n_equal], ours.tolerance)
    return Agreement(model, threads, error, ours.tolerance, top_equal, n_equal, len(our_ids), parting)


_PEAK = """
import sys, localllm
llm = localllm.load(sys.argv[1], context=int(sys.argv[2]))
llm.generate([1] * int(sys.argv[3]), max_tokens=8, temperature=0.0, ignore_eos=True)
# Not getrusage: what a process inherits there includes the peak of the one that started it.
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak) * 1024, llm.info.placement.kv_cache)
"""


def peak_memory(path: Path, context: int, prompt: int) -> Memory:
    """Measures a process that generates (on Linux)."""
    command = [sys.executable, "-c", _PEAK, str(path), str(context), str(prompt)]
    peak, cache = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return Memory(path.stem, int(peak), int(cache), path.stat().st_size)


_TITLES = ("model", "threads", "test", "localllm", "llama.cpp", "ratio", "GB/s", "of bandwidth")
_COLUMNS = "{:24} {:>7} {:>6} {:>9} {:>9} {:>6} {:>6} {:>12}"


def markdown(lines: Sequence[Line]) -> str:
    """The table for the README."""
    titles = ["model", "threads", "test", "localllm, tok/s", "llama.cpp, tok/s", "ratio", "GB/s", "of the bandwidth"]
    rows = [titles, ["---"] * len(titles), *(line.cells() for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    """Runs the command line; returns the exit code."""
    args = _arguments()
    print(f"{platform.processor() or platform.machine()}, llama-cpp-python {importlib.metadata.version(_BINDING)}")
    print(_COLUMNS.format(*_TITLES))
    speed: list[Line] = []
    agreements: list[Agreement] = []
    memory: list[Memory] = []
    for path in [*args.models, *_made(args)]:
        for threads in map(int, args.threads.split(",")):
            lines, agreement = compare(path, threads, args)
            for line in lines:
                print(_COLUMNS.format(*line.cells()), flush=True)
            print(f"{path.stem:24} {agreement.line()}", flush=True)
            speed += lines
            agreements.append(agreement)
        memory.append(peak_memory(path, args.prompt + args.n + 2, args.prompt))
        print(f"{path.stem:24} {memory[-1].line()}", flush=True)
    if args.markdown:
        print(markdown(speed))
    report: dict[str, Sequence[Line | Agreement | Memory]] = {
        "speed": speed,
        "agreement": agreements,
        "memory": memory,
    }
    print(json.dumps({name: [asdict(each) for each in part] for name, part in report.items()}))
    checked: list[Agreement | Memory] = [*agreements, *memory]
    faults = [f"{each.model}: {fault}" for each in checked for fault in each.faults()]
    print(*faults, sep="\n", end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


_BINDING = "llama-cpp-python"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--make", help="SHAPE:FORMAT,FORMAT: random models to write first, where they are missing")
    parser.add_argument("--folder", type=Path, default=Path("models"), help="where --make writes them")
    parser.add_argument("-t", "--threads", default="1,2", help="numbers of threads, with commas")
    parser.add_argument("-p", "--prompt", type=int, default=512)
    parser.add_argument("-n", type=int, default=64, help="tokens to decode")
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("--markdown", action="store_true", help="print the table for the README too")
    return parser.parse_args()


def _made(args: argparse.Namespace) -> Iterator[Path]:
    """The models that ``--make`` asks for."""
    if args.make:
        shape, formats = args.make.split(":")
        args.folder.mkdir(parents=True, exist_ok=True)
        for file_type in formats.split(","):
            path = args.folder / f"{shape}-{file_type}.gguf"
            yield path if path.exists() else random_gguf(path, SHAPES[shape], file_type)


if __name__ == "__main__":
    sys.exit(main())
