"""Show where the time of a small model's token goes, in microseconds.

    python -m tests.benchmarks.token_time                       # the demo model
    python -m tests.benchmarks.token_time -t 2 model.gguf …

Each row is the best of several rounds.  ``calls`` is the program without work: its kernel calls and the waits between
them.  ``batch`` fills the tables and the embeddings that the program reads.  ``rest`` is Python between two steps:
the scheduler, the sampler and the text.  The logits are compared with the numpy
reference.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import localllm
from localllm.kernels.backend import Batch
from localllm.kernels.cpu.backend import CPUStep
from localllm.kernels.cpu.host import cpu_model
from localllm.kernels.cpu.program import Job
from localllm.sampling import greedy
from tests.benchmarks.results import QUANTISED_TOLERANCE, even_line, relative_error

#: Tokens of a reply, rounds, and repetitions of a part in a round.
N, ROUNDS, REPETITIONS = 200, 5, 300

_COLUMNS = ["model", "tokens/s", "token µs", "program µs", "calls µs", "calls", "waits", "batch µs", "rest µs"]


def best(work: Callable[[], object]) -> float:
    """Return the microseconds of a call, in the best of several rounds."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(REPETITIONS):
            work()
        times.append((time.perf_counter() - begin) / REPETITIONS)
    return min(times) * 1e6


def measure(path: str | None, threads: int | None) -> list[str]:
    """Return the cells of a row."""
    last: dict[str, Any] = {}
    run = CPUStep.run

    def recorded(step: CPUStep, batch: Batch, *more: Any) -> Any:
        last["step"], last["batch"] = step, batch
        return run(step, batch, *more)

    CPUStep.run = recorded  # type: ignore[method-assign]
    try:
        with localllm.load(path, threads=threads, context=1024) as llm:
            ids = llm.tokenize("Once upon a time")
            options: dict[str, Any] = {"sampling": greedy, "max_tokens": N, "ignore_eos": True}
            timings = [llm.generate(ids, **options).timings for _ in range(ROUNDS)]
            token = min(each.decode_s / each.decode_tokens for each in timings) * 1e6
            _check(path, llm.logits(ids), ids)
            llm.generate(ids, **options)
            step: CPUStep = last["step"]
            batch: Batch = last["batch"]
            program, backend = step._program, step._backend
            workers = backend.caller if step._n_products < backend.small_step else backend.workers
            table = program._table
            no_work = program._call_of(0, len(table), stop=0)
            job = Job(program._entry, no_work.ctypes.data, keep=no_work, threads=step.limit.now)
            calls = best(lambda: workers.run(job))
            whole = best(lambda: program.run(workers, threads=step.limit.now))
            filled = best(lambda: step._fill(batch, None))
            n_waits = int(table[:, 4].sum()) if workers.n > 1 else 0
            name = llm.info.title[:24]
    finally:
        CPUStep.run = run  # type: ignore[method-assign]
    numbers = [f"{x:.1f}" for x in (token, whole, calls)]
    counts = [str(len(table)), str(n_waits)]
    return [name, f"{1e6 / token:,.0f}", *numbers, *counts, f"{filled:.1f}", f"{token - whole - filled:.1f}"]


def _check(path: str | None, found: NDArray[np.float32], ids: list[int]) -> None:
    with localllm.load(path, device="reference", context=128) as llm:
        expected = llm.logits(ids)
    if (error := float(relative_error(found, expected))) > QUANTISED_TOLERANCE:
        print(f"{path}: the logits differ from the reference's by {error:.2g}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="*", default=[None], help="files (default: the demo model)")
    parser.add_argument("-t", "--threads", type=int)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(cpu_model())
    print(even_line(_COLUMNS))
    for path in arguments.models:
        print(even_line(measure(path, arguments.threads)), flush=True)


if __name__ == "__main__":
    main()
