"""``localllm bench``: how fast a model runs here, and how much of what the machine can do that is.

**What is measured.**  ``pp`` is the evaluation of a prompt, ``tg`` the generation of tokens one after the other,
both as a program that uses the library sees them, sampling included.  At a depth, so many tokens stand before.

**What it is compared with.**  A token that is generated needs all weights, and the keys and values of all tokens
before it: bytes that must be read.  Its ceiling is a plain streaming read of as many bytes.  The tokens of a prompt
share each weight that was read; what they cost is multiplications, and their ceiling how fast the processor
multiplies bytes (for weights whose kernels do) and floats (for others, and in attention).  Ceilings are measured
before and after every repetition, for they drift.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np

from localllm import __version__
from localllm.checks import whole_number
from localllm.cli.defaults import settle
from localllm.cli.machine import disturbance, too_many_threads
from localllm.cli.main import DONE
from localllm.cli.terminal import LoadStatus, StatusLine, model_line, quantity, warn
from localllm.errors import UsageError
from localllm.gguf import GGUFFile
from localllm.info import ModelInfo
from localllm.kernels.cpu.host import OtherLoad, available_memory, cpu_model
from localllm.kernels.cpu.roofline import Roofline
from localllm.kernels.cpu.target import choose
from localllm.kernels.cpu.tiles import TILES
from localllm.kernels.ops import CacheShape, Weight
from localllm.llm import LLM, load
from localllm.loading import LONG_CONTEXT
from localllm.quant.repack import repack_target

#: Bytes that a test of the bandwidth reads at most, and the part of the free memory that it takes at most.
_MOST_READ, _PART_OF_MEMORY = 1 << 30, 4

_COLUMNS = "{:<18} {:>7} {:>18} {:>11} {:>11} {:>6}"


def run(arguments: argparse.Namespace) -> int:
    """Measures what the command line asks for."""
    settings = settle(arguments, skip=["threads"])  # which are a list here
    tests = make_tests(arguments.prompts, arguments.generations, arguments.depths)
    threads_of_tests = arguments.threads or [settings.threads]
    if complaint := too_many_threads(max(n or 1 for n in threads_of_tests)):
        warn(complaint)
    measured: list[Measurement] = []
    others = OtherLoad()
    for threads in threads_of_tests:
        with _load(arguments, threads, tests) as llm:
            info = llm.info
            if not measured:
                print(model_line(info, arguments.threads or ()), "", _COLUMNS.format(*_HEAD), sep="\n", flush=True)
            for test in tests:
                measured.append(_measure(llm, test, arguments.repetitions, arguments))
                print(measured[-1].line(), flush=True)
    other_cpus = others.cpus()
    if complaint := disturbance(other_cpus, max(m.scatter for m in measured)):
        warn(complaint)
    if arguments.json:
        print(json.dumps(as_json(info, measured, other_cpus), ensure_ascii=False, allow_nan=False))
    return DONE


# -- What is measured ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Test:
    """One thing to measure.

    Attributes:
        kind: "pp" or "tg".
        n: tokens to evaluate, or to generate.
        depth: tokens that stand before.
    """

    __test__ = False  # for pytest, which would take it for one of its own

    kind: str
    n: int
    depth: int

    @property
    def name(self) -> str:
        return f"{self.kind}{self.n}" + (f" @ d{self.depth}" if self.depth else "")

    @property
    def context(self) -> int:
        """Tokens of context that it takes."""
        return max(self.depth, 1) + self.n + 1


def make_tests(prompts: Sequence[int], generations: Sequence[int], depths: Sequence[int]) -> list[Test]:
    """The tests for three lists of numbers; 0 tokens are no test.

    Raises:
        UsageError: a number is negative, or there is no test.
    """
    tests = [
        Test(kind, whole_number(flag, n, 0), whole_number("-d", depth, 0))
        for depth in depths
        for kind, flag, counts in (("pp", "-p", prompts), ("tg", "-n", generations))
        for n in counts
    ]
    tests = [test for test in tests if test.n]
    if not tests:
        raise UsageError("there is nothing to measure: give -p or -n a number above 0")
    return tests


@dataclass(frozen=True)
class Work:
    """What a model costs.

    Attributes:
        weight_bytes: read for every token that is generated.
        kv_bytes: of one token's keys and values.
        layer_products: multiplications of a token's activations with the layers' weights: of bytes, of floats.
        head_products: the same of the output matrix, which a prompt needs once.
        attention_products: multiplications of floats for each token that another one sees.
        window: how many tokens a token sees at most, itself among them; None for all.
    """

    weight_bytes: int
    kv_bytes: int
    layer_products: tuple[int, int]
    head_products: tuple[int, int]
    attention_products: int
    window: int | None = None

    @classmethod
    def of(cls, info: ModelInfo) -> Self:
        """The work of a loaded model."""
        config = info.config
        with GGUFFile.open(info.path) as file:
            matrices = [t for t in file.tensors.values() if len(t.shape) == 2]
            head = file.tensors.get("output.weight", file.tensors["token_embd.weight"])
            layers = [t for t in matrices if t.name.startswith("blk.")]
        return cls(
            weight_bytes=info.placement.multiplied,
            kv_bytes=CacheShape(
                config.n_layers, config.n_kv_heads, config.head_dim, info.cache_type
            ).bytes_per_token(),
            layer_products=products(layers),
            head_products=products([head]),
            attention_products=2 * config.n_layers * config.n_heads * config.head_dim,
            window=config.sliding_window,
        )

    def seen(self, test: Test) -> float:
        """Tokens that a token of the test sees on average."""
        positions = np.arange(test.depth, test.depth + test.n) + 1
        return float(np.minimum(positions, self.window or positions[-1]).mean())

    def bytes_per_token(self, test: Test) -> float:
        """Bytes that are read for a token that the test generates."""
        return self.weight_bytes + self.kv_bytes * self.seen(test)

    def products(self, test: Test) -> tuple[float, float]:
        """Multiplications of bytes and of floats in the evaluation of the test's prompt."""
        of_bytes, of_floats = (test.n * a + b for a, b in zip(self.layer_products, self.head_products, strict=True))
        return of_bytes, of_floats + test.n * self.attention_products * self.seen(test)


def products(matrices: Iterable[Weight]) -> tuple[int, int]:
    """Multiplications of a token's activations with matrices: of bytes, and of floats.

    What counts is the format that kernels read, which for some is another one than the file's.
    """
    n_bytes = n_floats = 0
    for matrix in matrices:
        if repack_target(matrix.type) in TILES:
            n_bytes += math.prod(matrix.shape)
        else:
            n_floats += math.prod(matrix.shape)
    return n_bytes, n_floats


@dataclass(frozen=True)
class Measurement:
    """What came out.

    Attributes:
        rates: tokens a second, one a repetition.
        achieved: what that is in bytes read, or multiplications, a second.
        ceilings: what the machine could do then, in the same unit; none where the device has no such ceiling.
    """

    test: Test
    threads: int
    unit: str
    rates: tuple[float, ...]
    achieved: tuple[float, ...]
    ceilings: tuple[float, ...] = ()

    @property
    def share(self) -> float | None:
        """The median part of the ceiling that was reached."""
        if not self.ceilings:
            return None
        return statistics.median(a / c for a, c in zip(self.achieved, self.ceilings, strict=True))

    @property
    def scatter(self) -> float:
        """The highest ceiling divided by the lowest one."""
        return max(self.ceilings) / min(self.ceilings) if self.ceilings else 1.0

    def line(self) -> str:
        """A line of the table."""
        spread = f" ± {statistics.stdev(self.rates):,.2f}" if len(self.rates) > 1 else ""
        return _COLUMNS.format(
            self.test.name,
            self.threads,
            f"{statistics.median(self.rates):,.2f}{spread}",
            quantity(statistics.median(self.achieved), self.unit),
            quantity(statistics.median(self.ceilings), self.unit) if self.ceilings else "-",
            "-" if self.share is None else f"{self.share:.0%}",
        )


_HEAD = ("test", "threads", "tok/s", "achieved", "ceiling", "share")


def as_json(info: ModelInfo, measured: Sequence[Measurement], other_cpus: float) -> dict[str, Any]:
    """Everything as JSON values; ``other_cpus`` is how many processors other programs kept busy meanwhile."""
    return {
        "localllm": __version__,
        "cpu": cpu_model(),
        "model": str(info.path),
        "architecture": info.architecture,
        "file_type": info.file_type,
        "n_parameters": info.n_parameters,
        "n_bytes": info.n_bytes,
        "device": info.device,
        "kernels": info.kernels,
        "cache_type": info.cache_type,
        "other_cpus": other_cpus,
        "results": [
            {
                "test": m.test.kind,
                "n_tokens": m.test.n,
                "depth": m.test.depth,
                "threads": m.threads,
                "tokens_per_s": statistics.median(m.rates),
                "repetitions": list(m.rates),
                "unit": m.unit,
                "achieved": statistics.median(m.achieved),
                "ceiling": statistics.median(m.ceilings) if m.ceilings else None,
                "share": m.share,
            }
            for m in measured
        ],
    }


# -- Measuring -----------------------------------------------------------------------------------------------------


def _load(arguments: argparse.Namespace, threads: int | None, tests: Sequence[Test]) -> LLM:
    progress = LoadStatus(enabled=not arguments.quiet)
    # That a model was trained on a shorter context matters to its answers, not to its speed.
    warnings.filterwarnings("ignore", LONG_CONTEXT)
    try:
        return load(
            arguments.model,
            device=arguments.device,
            n_gpu_layers=arguments.n_gpu_layers,
            tensor_split=arguments.tensor_split,
            isa=arguments.isa,
            threads=threads,
            context=max(test.context for test in tests),
            cache_type=arguments.cache_type,
            progress=progress,
        )
    finally:
        progress.close()


def _measure(llm: LLM, test: Test, repetitions: int, arguments: argparse.Namespace) -> Measurement:
    """Runs a test once to warm up, and then ``repetitions`` times in turn with what it is compared with."""
    work, random = Work.of(llm.info), np.random.default_rng(0)
    amount = work.bytes_per_token(test) if test.kind == "tg" else sum(work.products(test)) / test.n
    before = _random_ids(llm, random, test.depth)
    rates: list[float] = []
    ceilings: list[float] = []
    status = StatusLine(enabled=not arguments.quiet)
    with ExitStack() as stack:
        status.show(f"{test.name}: warming up")
        ceiling = _ceiling(llm.info, test, work, arguments.isa, stack)
        _rate(llm, test, before, random)
        for i in range(repetitions):
            status.show(f"{test.name}: {i + 1} of {repetitions}")
            ceilings += [] if ceiling is None else [ceiling()]
            rates.append(_rate(llm, test, before, random))
        ceilings += [] if ceiling is None else [ceiling()]
    status.clear()
    return Measurement(
        test,
        _threads(llm.info, test),
        "B/s" if test.kind == "tg" else "MAC/s",
        tuple(rates),
        tuple(rate * amount for rate in rates),
        tuple((a + b) / 2 for a, b in pairwise(ceilings)),
    )


def _threads(info: ModelInfo, test: Test) -> int:
    """How many compute a test."""
    return info.decode_threads if test.kind == "tg" else info.threads


def _rate(llm: LLM, test: Test, before: list[int], random: np.random.Generator) -> float:
    """Runs a test once; tokens a second."""
    if test.kind == "tg":
        done = llm.generate(
            before or _random_ids(llm, random, 1), max_tokens=test.n + 1, temperature=0, ignore_eos=True
        )
        return done.timings.decode_rate
    if before:
        llm.generate(before, max_tokens=0)  # unless the cache still has them
    else:
        llm.forget()
    return llm.generate(before + _random_ids(llm, random, test.n), max_tokens=0).timings.prefill_rate


def _random_ids(llm: LLM, random: np.random.Generator, n: int) -> list[int]:
    return [int(i) for i in random.integers(0, llm.info.n_vocab, n)]


def _ceiling(
    info: ModelInfo, test: Test, work: Work, isa: str | None, stack: ExitStack
) -> Callable[[], float] | None:
    """What measures the ceiling for a test; None where the device is no processor."""
    if info.device != "cpu":
        return None
    n_bytes = int(min(work.bytes_per_token(test), _MOST_READ, available_memory() // _PART_OF_MEMORY))
    roofline = stack.enter_context(Roofline(_threads(info, test), choose(isa), n_bytes))
    if test.kind == "tg":
        return roofline.read_bandwidth
    of_bytes, of_floats = work.products(test)
    # At full speed each kind of multiplication would take its own time, one after the other.
    return lambda: (of_bytes + of_floats) / (of_bytes / roofline.dot_rate() + of_floats / roofline.fma_rate())
