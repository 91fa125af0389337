"""Measure the speed of a model, alternating with measurements of the machine's limits.

**Tests.** ``pp`` is the evaluation of a prompt, ``tg`` the sequential generation of tokens. Both are measured as in
a program that uses the library, including sampling. The depth is the number of tokens before the test.

**Ceilings.** Generating a token needs all weights, and the keys and values of all tokens before it: bytes to read.
The ceiling is a plain streaming read of the same bytes; on a GPU, a copy in its memory, whose bytes count twice.
Tokens of a prompt share the weights that were read, so multiplications limit the speed. The ceiling is the speed at
which the processor, or the GPU's tensor cores, multiply bytes (for weights whose kernels do so) and floats (for other
weights, and in attention). Ceilings are measured before and after every repetition, because they drift.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from localllm.bench.ceilings import amount, ceiling, threads_of, unit_of
from localllm.bench.expert_speed import ExpertSpeed
from localllm.bench.profile import DeviceCeilings, DeviceProfile, profiles
from localllm.bench.workload import ModelCost, Test
from localllm.console import StatusLine, quantity
from localllm.engine.drafting import Drafts
from localllm.kernels.cpu.rates import disk_rate
from localllm.llm import LLM
from localllm.loading.prediction import Predictor

if TYPE_CHECKING:
    from localllm.kernels.cuda.step import Watch


@dataclass(frozen=True)
class Measurement:
    test: Test
    threads: int
    unit: str
    rates: tuple[float, ...]  # tokens per second, one per repetition
    # bytes read, or multiplications, per second of each repetition; empty for tests of both kinds
    achieved: tuple[float, ...]
    # ceilings in the same unit; empty if the device has no ceiling
    ceilings: tuple[float, ...] = ()
    profiles: tuple[DeviceProfile, ...] = ()  # profile of each GPU, if requested
    experts: ExpertSpeed | None = None  # experts that stay in the file, if any
    drafts: Drafts | None = None  # drafts of all repetitions, if the model drafts
    predicted: float | None = None  # tokens per second; None if a part of the model is not on the CPU

    @property
    def share(self) -> float | None:
        """Median fraction of the ceiling."""
        if not self.ceilings:
            return None
        return statistics.median(a / c for a, c in zip(self.achieved, self.ceilings, strict=True))

    @property
    def scatter(self) -> float:
        """Highest ceiling divided by the lowest ceiling."""
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
            "predicted": self.predicted,
            **({"profiles": [profile.as_json() for profile in self.profiles]} if self.profiles else {}),
            **({"experts": self.experts.as_json()} if self.experts else {}),
            **({"drafted": self.drafts.drafted, "accepted": self.drafts.accepted} if self.drafts else {}),
        }

    def cells(self) -> tuple[str, ...]:
        spread = f" ± {statistics.stdev(self.rates):,.2f}" if len(self.rates) > 1 else ""
        return (
            self.test.name,
            str(self.threads),
            f"{statistics.median(self.rates):,.2f}{spread}",
            quantity(statistics.median(self.achieved), self.unit) if self.achieved else "-",
            quantity(statistics.median(self.ceilings), self.unit) if self.ceilings else "-",
            "-" if self.share is None else f"{self.share:.0%}",
            "-" if self.predicted is None else f"{self.predicted:,.2f}",
        )


def predicted_rate(predictor: Predictor, test: Test) -> float | None:
    """Return the predicted tokens per second of a test; None if a rate is not known."""
    n_prompt, n = (0 if test.kind == "tg" else test.n), test.n if test.kind == "tg" else test.n_after
    token_s = predictor.decode_s(test.depth + n_prompt + n // 2)
    prompt_s = predictor.prompt_s(n_prompt, test.depth) if n_prompt else 0.0
    return None if token_s is None or prompt_s is None else (n_prompt + n) / (prompt_s + n * token_s)


def measure(
    llm: LLM,
    test: Test,
    repetitions: int,
    *,
    isa: str | None = None,
    quiet: bool = True,
    predictor: Predictor | None = None,
) -> Measurement:
    """Run a test once to warm up, and then ``repetitions`` times, alternating with the ceiling."""
    work, random = ModelCost.of(llm.info), np.random.default_rng(0)
    before = _random_ids(llm, random, test.depth)
    rates: list[float] = []
    ceilings: list[float] = []
    status = StatusLine(enabled=not quiet)
    with ExitStack() as stack:
        status.show(f"{test.name}: warming up")
        most = None if test.kind == "pg" else ceiling(llm.info, test, work, isa, stack)
        _rate(llm, test, before, random)
        first = _drafts(llm)
        reads, disk = llm.counts.experts, [] if llm.counts.experts is None else [disk_rate(llm.info.path)]
        begin = time.perf_counter()
        for i in range(repetitions):
            status.show(f"{test.name}: {i + 1} of {repetitions}")
            ceilings += [] if most is None else [most()]
            rates.append(_rate(llm, test, before, random))
        experts, now = None, llm.counts.experts
        if reads is not None and now is not None:
            seconds = time.perf_counter() - begin
            disk.append(disk_rate(llm.info.path))
            experts = ExpertSpeed.of(reads, now, seconds, statistics.mean(disk))
        ceilings += [] if most is None else [most()]
    status.clear()
    new = Drafts(*(now - then for now, then in zip(_drafts(llm), first, strict=True)))
    more: dict[str, Any] = {"experts": experts, "drafts": new if new.drafted else None}
    more["predicted"] = None if predictor is None else predicted_rate(predictor, test)
    if test.kind == "pg":
        return Measurement(test, llm.info.threads, "", tuple(rates), (), **more)
    a_token = amount(llm.info, test, work) / (1 if test.kind == "tg" else test.n)
    used, limits = tuple(rate * a_token for rate in rates), tuple((a + b) / 2 for a, b in pairwise(ceilings))
    threads, unit = threads_of(llm.info, test), unit_of(llm.info, test)
    return Measurement(test, threads, unit, tuple(rates), used, limits, **more)


def _drafts(llm: LLM) -> tuple[int, int, int]:
    return llm.counts.drafted, llm.counts.accepted, llm.counts.draft_steps


def profile(llm: LLM, test: Test, ceilings: dict[str, DeviceCeilings]) -> Sequence[DeviceProfile]:
    """Return a profile of a warm test on GPUs; see `profiles`."""
    random = np.random.default_rng(0)
    before = _random_ids(llm, random, test.depth)
    return profiles(llm.info, test, lambda test, watch: _rate(llm, test, before, random, watch), ceilings)


def _rate(llm: LLM, test: Test, before: list[int], random: np.random.Generator, watch: Watch | None = None) -> float:
    """Run a test once, with ``watch`` if it is not None. Returns tokens per second."""
    if test.kind != "tg":
        if before:
            llm.generate(before, max_tokens=0)  # fills the cache unless it still contains the tokens
        else:
            llm.forget()
    prompt = before + _random_ids(llm, random, test.n) if test.kind != "tg" else before or _random_ids(llm, random, 1)
    with ExitStack() as stack:
        if watch is not None:
            from localllm.kernels.cuda.profile import watching

            stack.enter_context(watching(watch))
        if test.kind == "pp":
            return llm.generate(prompt, max_tokens=0).timings.prefill_tokens_per_s
        n = test.n_after or test.n
        timings = llm.generate(prompt, max_tokens=n + 1, temperature=0, ignore_eos=True).timings
    if test.kind == "pg":
        return (test.n + test.n_after) / (timings.prefill_s + timings.decode_s)
    return timings.decode_tokens_per_s


def _random_ids(llm: LLM, random: np.random.Generator, n: int) -> list[int]:
    return [int(i) for i in random.integers(0, llm.info.n_vocab, n)]
