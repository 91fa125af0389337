"""``localllm bench``: how fast a model runs here, and how much of what the machine can do that is.

**What is measured.**  ``pp`` is the evaluation of a prompt, ``tg`` the generation of tokens one after the other,
both as a program that uses the library sees them, sampling included.  At a depth, so many tokens stand before.

**What it is compared with.**  A token that is generated needs all weights, and the keys and values of all tokens
before it: bytes that must be read.  Its ceiling is a plain streaming read of as many bytes; on a GPU a copy in its
memory, whose bytes count twice.  The tokens of a prompt share each weight that was read; what they cost is
multiplications, and their ceiling how fast the processor, or the GPU's tensor cores, multiply bytes (for weights
whose kernels do) and floats (for others, and in attention).  Ceilings are measured before and after every repetition,
for they drift.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from localllm import __version__
from localllm.cli.bench_ceilings import amount, ceiling, threads_of, unit_of
from localllm.cli.bench_profile import DeviceCeilings, DeviceProfile, check_profiled, profiles
from localllm.cli.bench_work import Test, Work, make_tests
from localllm.cli.defaults import load_options, model_file, settle
from localllm.cli.machine import disturbance, too_many_threads
from localllm.cli.main import DONE
from localllm.cli.terminal import LoadStatus, StatusLine, model_line, quantity, visible_line, warn
from localllm.errors import UsageError
from localllm.info import ModelInfo
from localllm.kernels.cpu.host import OtherLoad, cpu_model
from localllm.llm import LLM, load
from localllm.loading import LONG_CONTEXT

if TYPE_CHECKING:
    from localllm.kernels.cuda.step import Watch

_COLUMNS = "{:<18} {:>7} {:>18} {:>11} {:>11} {:>6}"


def run(arguments: argparse.Namespace) -> int:
    """Measures what the command line asks for."""
    if arguments.serve:
        from localllm.cli import bench_serve

        return bench_serve.run(arguments)
    settings = settle(arguments, skip=["threads", "model"])  # of which there may be several
    tests = make_tests(arguments.prompts, arguments.generations, arguments.depths, arguments.pairs)
    if arguments.profile and arguments.form not in ("table", "json"):
        raise UsageError(f"--profile is shown as a table or in JSON: leave out -o {arguments.form}")
    threads_of_tests = arguments.threads or [settings.threads]
    if complaint := too_many_threads(max(n or 1 for n in threads_of_tests)):
        warn(complaint)
    names = [*arguments.files, *arguments.model] or [settings.model] * (not arguments.downloads)
    given = [{"model": name} for name in names]
    given += [{"model": name, "download": True, "quiet": arguments.quiet} for name in arguments.downloads]
    known: dict[str, DeviceCeilings] = {}
    form, others, shown = arguments.form, OtherLoad(), 0
    scatter, busy = 1.0, 0.0
    for path in [model_file(each, settings) for each in given]:
        measured: list[Measurement] = []
        for threads in threads_of_tests:
            with _load(arguments, path, threads, tests) as llm:
                info = llm.info
                if arguments.profile:
                    check_profiled(info)
                if form == "table" and not measured:
                    print(*[""] * bool(shown), model_line(info, arguments.threads or ()), "", sep="\n")
                    print(_COLUMNS.format(*_HEAD), flush=True)
                for test in tests:
                    found = measure(llm, test, arguments.repetitions, isa=arguments.isa, quiet=arguments.quiet)
                    _show(form, info, found, is_first=not shown)
                    shown += 1
                    if arguments.profile and test.kind != "pg":
                        found = replace(found, profiles=tuple(profile(llm, test, known)))
                    measured.append(found)
        busy = others.cpus()
        if form == "json":
            report = as_json(info, measured, busy)
            print(json.dumps(report, ensure_ascii=False, allow_nan=False), flush=True)
        elif form == "table":
            for each in (each for found in measured for each in found.profiles):
                print("", *each.lines(), sep="\n", flush=True)
        scatter = max(scatter, *(found.scatter for found in measured))
    if complaint := disturbance(busy, scatter):
        warn(complaint)
    return DONE


# -- What comes out ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """What came out.

    Attributes:
        rates: tokens a second, one a repetition.
        achieved: what that is in bytes read, or multiplications, a second; none of a test that is of both kinds.
        ceilings: what the machine could do then, in the same unit; none where the device has no such ceiling.
        profiles: what the time on each GPU went to, if that was asked for.
    """

    test: Test
    threads: int
    unit: str
    rates: tuple[float, ...]
    achieved: tuple[float, ...]
    ceilings: tuple[float, ...] = ()
    profiles: tuple[DeviceProfile, ...] = ()

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

    def as_json(self) -> dict[str, Any]:
        return {
            "test": self.test.kind,
            "n_tokens": self.test.n + self.test.n_after,
            "depth": self.test.depth,
            "threads": self.threads,
            "tokens_per_s": statistics.median(self.rates),
            "stdev": statistics.stdev(self.rates) if len(self.rates) > 1 else None,
            "repetitions": list(self.rates),
            "unit": self.unit,
            "achieved": statistics.median(self.achieved) if self.achieved else None,
            "ceiling": statistics.median(self.ceilings) if self.ceilings else None,
            "share": self.share,
            **({"profiles": [each.as_json() for each in self.profiles]} if self.profiles else {}),
        }

    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        spread = f" ± {statistics.stdev(self.rates):,.2f}" if len(self.rates) > 1 else ""
        return (
            self.test.name,
            str(self.threads),
            f"{statistics.median(self.rates):,.2f}{spread}",
            quantity(statistics.median(self.achieved), self.unit) if self.achieved else "-",
            quantity(statistics.median(self.ceilings), self.unit) if self.ceilings else "-",
            "-" if self.share is None else f"{self.share:.0%}",
        )


_HEAD = ("test", "threads", "tok/s", "achieved", "ceiling", "share")


def _show(form: str, info: ModelInfo, found: Measurement, *, is_first: bool) -> None:
    """Prints a measurement as a row, the first one below a head; of a table the head is there already."""
    if form == "table":
        print(_COLUMNS.format(*found.cells()), flush=True)
    elif form == "md":
        name = f"{visible_line(info.name or info.path.name)} {info.file_type}".replace("|", "\\|")
        row = dict(zip(_HEAD, found.cells(), strict=True))
        row = {"model": name, "size": quantity(info.n_bytes, "B"), "device": info.device} | row
        rule = ["---", *["---:"] * (len(row) - 1)]
        for cells in (row, rule, row.values()) if is_first else (row.values(),):
            print("|", " | ".join(cells), "|", flush=True)
    elif form != "json":
        values = {**_of_model(info), **found.as_json(), "test": found.test.name}
        values = {key: value for key, value in values.items() if key not in ("n_tokens", "depth", "repetitions")}
        if form == "jsonl":
            print(json.dumps(values, ensure_ascii=False, allow_nan=False), flush=True)
            return
        csv.writer(sys.stdout, lineterminator="\n").writerows([values, values.values()][not is_first :])
        sys.stdout.flush()


def _of_model(info: ModelInfo) -> dict[str, Any]:
    return {
        "model": str(info.path),
        "architecture": info.architecture,
        "file_type": info.file_type,
        "n_parameters": info.n_parameters,
        "n_bytes": info.n_bytes,
        "device": info.device,
        "kernels": info.kernels,
        "cache_type": info.cache_type,
    }


def as_json(info: ModelInfo, measured: Sequence[Measurement], other_cpus: float) -> dict[str, Any]:
    """Everything as JSON values; ``other_cpus`` is how many processors other programs kept busy meanwhile."""
    return {
        "localllm": __version__,
        "cpu": cpu_model(),
        **_of_model(info),
        "other_cpus": other_cpus,
        "results": [found.as_json() for found in measured],
    }


# -- Measuring -----------------------------------------------------------------------------------------------------


def _load(arguments: argparse.Namespace, path: str | Path | None, threads: int | None, tests: Sequence[Test]) -> LLM:
    # That a model was trained on a shorter context matters to its answers, not to its speed.
    warnings.filterwarnings("ignore", LONG_CONTEXT)
    context = max(test.context for test in tests)
    with LoadStatus(enabled=not arguments.quiet) as progress:
        return load(path, **load_options(arguments, path, threads=threads, context=context), progress=progress)


def measure(llm: LLM, test: Test, repetitions: int, *, isa: str | None = None, quiet: bool = True) -> Measurement:
    """Runs a test once to warm up, and then ``repetitions`` times in turn with what it is compared with."""
    work, random = Work.of(llm.info), np.random.default_rng(0)
    before = _random_ids(llm, random, test.depth)
    rates: list[float] = []
    ceilings: list[float] = []
    status = StatusLine(enabled=not quiet)
    with ExitStack() as stack:
        status.show(f"{test.name}: warming up")
        most = None if test.kind == "pg" else ceiling(llm.info, test, work, isa, stack)
        _rate(llm, test, before, random)
        for i in range(repetitions):
            status.show(f"{test.name}: {i + 1} of {repetitions}")
            ceilings += [] if most is None else [most()]
            rates.append(_rate(llm, test, before, random))
        ceilings += [] if most is None else [most()]
    status.clear()
    if test.kind == "pg":
        return Measurement(test, llm.info.threads, "", tuple(rates), ())
    a_token = amount(llm.info, test, work) / (1 if test.kind == "tg" else test.n)
    return Measurement(
        test,
        threads_of(llm.info, test),
        unit_of(llm.info, test),
        tuple(rates),
        tuple(rate * a_token for rate in rates),
        tuple((a + b) / 2 for a, b in pairwise(ceilings)),
    )


def profile(llm: LLM, test: Test, known: dict[str, DeviceCeilings]) -> Sequence[DeviceProfile]:
    """What the time of a test that is warm goes to on GPUs; see `profiles`."""
    random = np.random.default_rng(0)
    before = _random_ids(llm, random, test.depth)
    return profiles(llm.info, test, lambda test, watch: _rate(llm, test, before, random, watch), known)


def _rate(llm: LLM, test: Test, before: list[int], random: np.random.Generator, watch: Watch | None = None) -> float:
    """Runs a test once, perhaps watched; tokens a second."""
    if test.kind != "tg":
        if before:
            llm.generate(before, max_tokens=0)  # unless the cache still has them
        else:
            llm.forget()
    prompt = before + _random_ids(llm, random, test.n) if test.kind != "tg" else before or _random_ids(llm, random, 1)
    with nullcontext() if watch is None else _watching(watch):
        if test.kind == "pp":
            return llm.generate(prompt, max_tokens=0).timings.prefill_tokens_per_s
        n = test.n_after or test.n
        timings = llm.generate(prompt, max_tokens=n + 1, temperature=0, ignore_eos=True).timings
    if test.kind == "pg":
        return (test.n + test.n_after) / (timings.prefill_s + timings.decode_s)
    return timings.decode_tokens_per_s


def _watching(watch: Watch) -> AbstractContextManager[None]:
    from localllm.kernels.cuda.profile import watching

    return watching(watch)


def _random_ids(llm: LLM, random: np.random.Generator, n: int) -> list[int]:
    return [int(i) for i in random.integers(0, llm.info.n_vocab, n)]
