"""localllm and llama.cpp side by side: the same files, threads and prompts, in turn, with their outputs compared.

    python -m tests.benchmarks.compare_llama_cpp model.gguf [more.gguf] -t 1,2 -p 512 -n 64 -r 3
    python -m tests.benchmarks.compare_llama_cpp --make llama-1.1b:q4_0,q8_0,q4_k_m --folder /tmp/models

The machine's speed drifts, so each round measures one after the other: what it can read from memory, localllm,
llama.cpp.  Rates are the best of all rounds, the share of the bandwidth is a median over rounds.  Peak memory is
that of a process which loads the file and generates.  Needs ``pip install llama-cpp-python`` (it compiles
llama.cpp, ten minutes on two cores), which only this script uses.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

import localllm
from localllm.gguf import GGUFFile
from localllm.kernels.cpu.program import Workers
from localllm.kernels.cpu.roofline import ReadTest
from localllm.kernels.cpu.target import choose
from tests.helpers.synthetic import SHAPES, random_gguf

Array = NDArray[np.float32]


@dataclass
class Line:
    """One row of the table."""

    model: str
    threads: int
    test: str
    ours: float
    theirs: float
    gb_per_s: float | None = None
    of_bandwidth: float | None = None

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


@dataclass
class Agreement:
    """How far the outputs agree: logits after the prompt, and greedy ids."""

    model: str
    relative_error: float
    top_equal: bool
    equal_ids: int
    n_ids: int


class LlamaCpp:
    """llama.cpp through its Python binding, with its default settings."""

    def __init__(self, path: Path, threads: int, context: int) -> None:
        self._llama = llama_cpp.Llama(
            str(path), n_ctx=context, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
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
        pointer = llama_cpp.llama_get_logits_ith(self._llama.ctx, -1)
        return np.ctypeslib.as_array(pointer, shape=(self._llama.n_vocab(),))

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

    def logits(self, ids: list[int]) -> Array:
        return self._llm.logits(ids)[-1]

    def close(self) -> None:
        self._llm.close()


@contextmanager
def both(path: Path, threads: int, context: int) -> Iterator[tuple[Ours, LlamaCpp]]:
    ours, theirs = Ours(path, threads, context), LlamaCpp(path, threads, context)
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()
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
    ids = [1, *rng.integers(300, n_vocab, args.prompt - 1).tolist()]
    n_bytes = weight_bytes(path)
    read_test = ReadTest(Workers(threads), choose(), 1 << 28)
    prefills: list[tuple[float, float]] = []
    decodes: list[tuple[float, float]] = []
    shares = []
    with both(path, threads, context) as (ours, theirs):
        for round_ in range(args.repetitions + 1):
            bandwidth = read_test.bandwidth()
            prefill, decode, our_ids = ours.measure(ids, args.n)
            their_prefill = theirs.prefill(ids)
            their_decode, their_ids = theirs.decode(args.n)
            if round_ == 0:  # warms both up
                continue
            prefills.append((prefill, their_prefill))
            decodes.append((decode, their_decode))
            shares.append(n_bytes * args.n / decode / bandwidth)
        theirs.prefill(ids)
        a, b = ours.logits(ids), theirs.logits()
        error = float(np.linalg.norm(a - b) / np.linalg.norm(b))
        equal = next((i for i, (x, y) in enumerate(zip(our_ids, their_ids, strict=False)) if x != y), args.n)
        agreement = Agreement(path.stem, error, bool(a.argmax() == b.argmax()), equal, args.n)
    best = [min(side) for side in zip(*prefills, strict=True)]
    lines = [Line(path.stem, threads, f"pp{args.prompt}", args.prompt / best[0], args.prompt / best[1])]
    best = [min(side) for side in zip(*decodes, strict=True)]
    rate = args.n / best[0]
    share = statistics.median(shares)
    lines.append(
        Line(path.stem, threads, f"tg{args.n}", rate, args.n / best[1], rate * n_bytes / 1e9, share),
    )
    return lines, agreement


_PEAK = """
import sys, localllm
llm = localllm.load(sys.argv[1], context=int(sys.argv[2]))
llm.generate([1] * int(sys.argv[3]), max_tokens=8, temperature=0.0, ignore_eos=True)
# Not getrusage: what a process inherits there includes the peak of the one that started it.
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak) * 1024, llm.info.placement.kv_cache)
"""


def peak_memory(path: Path, context: int, prompt: int) -> tuple[int, int]:
    """Peak resident bytes of a process that generates (on Linux), and those of its KV cache."""
    command = [sys.executable, "-c", _PEAK, str(path), str(context), str(prompt)]
    peak, cache = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(peak), int(cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--make", help="SHAPE:FORMAT,FORMAT: random models to write first, where they are missing")
    parser.add_argument("--folder", type=Path, default=Path("models"), help="where --make writes them")
    parser.add_argument("-t", "--threads", default="1,2", help="numbers of threads, with commas")
    parser.add_argument("-p", "--prompt", type=int, default=512)
    parser.add_argument("-n", type=int, default=64, help="tokens to decode")
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    args = parser.parse_args()
    models: list[Path] = list(args.models)
    if args.make:
        shape, formats = args.make.split(":")
        args.folder.mkdir(parents=True, exist_ok=True)
        for file_type in formats.split(","):
            path = args.folder / f"{shape}-{file_type}.gguf"
            models.append(path if path.exists() else random_gguf(path, SHAPES[shape], file_type))
    print(f"{platform.processor() or platform.machine()}, llama-cpp-python {llama_cpp.__version__}")
    titles = f"{'localllm':>9} {'llama.cpp':>9} {'ratio':>6} {'GB/s':>6} {'of bw':>6}"
    print(f"{'model':24} {'thr':>3} {'test':>6} {titles}")
    report: dict[str, list[Any]] = {"speed": [], "agreement": [], "memory": []}
    for path in models:
        for threads in map(int, args.threads.split(",")):
            lines, agreement = compare(path, threads, args)
            for line in lines:
                traffic = f"{line.gb_per_s:6.1f} {line.of_bandwidth:6.0%}" if line.gb_per_s else ""
                rates = f"{line.ours:9.1f} {line.theirs:9.1f} {line.ratio:6.2f}"
                print(f"{line.model:24} {line.threads:3} {line.test:>6} {rates} {traffic}", flush=True)
                report["speed"].append(asdict(line))
        print(
            f"{path.stem:24} logits differ by {agreement.relative_error:.1e}, top token "
            f"{'equal' if agreement.top_equal else 'DIFFERENT'}, first {agreement.equal_ids} of {agreement.n_ids} "
            "greedy tokens equal"
        )
        report["agreement"].append(asdict(agreement))
        peak, cache = peak_memory(path, args.prompt + args.n + 2, args.prompt)
        size = path.stat().st_size
        print(
            f"{path.stem:24} peak {peak / 2**20:,.0f} MiB = {(peak - cache) / size:.2f} x file + "
            f"{cache / 2**20:,.0f} MiB cache",
            flush=True,
        )
        report["memory"].append({"model": path.stem, "peak": peak, "cache": cache, "file": size})
    print(json.dumps(report))


if __name__ == "__main__":
    main()
