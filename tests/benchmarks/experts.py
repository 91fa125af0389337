"""Run a mixture of experts larger than the available memory: compare its ids and speed with all experts in memory.

    python -m tests.benchmarks.experts FOLDER                # writes a random mixture of 8.1 GB, and removes it
    python -m tests.benchmarks.experts model.gguf --gb 4     # with another model

Each run is a process: first the model within ``--gb`` gigabytes, then with all experts, if they fit.  The limit is a
control group if one can be created (Linux, as root or in the user's own group).  It includes the system's cache of
the file, and kills a process above it.  Otherwise the system refuses memory above ``--gb`` (``RLIMIT_DATA``, which
also counts reserved memory), and drops each matrix from its cache after it was read, so that experts come from the
disk. The limit of the disk is the time to read the same bytes at the disk's rate, measured before and after.  The
last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import localllm
from localllm.bench.expert_speed import ExpertSpeed
from localllm.console import quantity
from localllm.kernels.cpu import control_groups, expert_pool
from localllm.kernels.cpu.rates import disk_rate
from tests.helpers.real_shapes import REAL_SHAPES, real_shape_gguf

#: Layers of the written model, which has 8.1 GB in Q8_0.
N_LAYERS = 18
PROMPT, WARM_UP = 512, 8


class UncachedFile(expert_pool._ExpertFile):
    """A file whose matrices the system drops from its cache after each read."""

    def read(self, matrices: expert_pool._Matrices, expert: int, start: int, stop: int) -> Any:
        data = super().read(matrices, expert, start, stop)
        if stop == matrices.file.n_bytes:
            offset = matrices.file.offset + expert * matrices.stride
            os.posix_fadvise(self.file.fileno(), offset, stop, os.POSIX_FADV_DONTNEED)
        return data


@contextlib.contextmanager
def control_group(n_bytes: int) -> Iterator[Path | None]:
    """Return the folder of a new control group with this memory, inside the current one; None if that fails."""
    for parent in control_groups._folders("memory"):
        for limit in ("memory.limit_in_bytes", "memory.max"):  # versions 1 and 2
            group = parent / f"localllm-experts-{os.getpid()}"
            try:
                group.mkdir()
            except OSError:
                continue
            try:
                (group / limit).write_text(str(n_bytes))
            except OSError:
                group.rmdir()
                continue
            try:
                yield group
            finally:
                group.rmdir()
            return
    yield None


def of_group(group: Path) -> dict[str, int]:
    """Return the peak memory of a control group, and how often its limit was reached, if it reports that."""
    names = {"peak": ("memory.max_usage_in_bytes", "memory.peak"), "reached": ("memory.failcnt",)}
    texts = {key: "".join(control_groups.text_of(group / name) for name in of) for key, of in names.items()}
    return {key: int(text) for key, text in texts.items() if text}


def measure(path: Path, gigabytes: float | None, n_tokens: int, group: Path | None) -> dict[str, Any]:
    """Return the ids and the speed of a model, within a limit or with all experts in memory."""
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    elif gigabytes is not None:
        vars(expert_pool)["_ExpertFile"] = UncachedFile
        resource.setrlimit(resource.RLIMIT_DATA, (round(gigabytes * 1e9), resource.RLIM_INFINITY))
    random = np.random.default_rng(0)
    with path.open("r+b") as file:
        os.fsync(file.fileno())  # the system cannot drop unwritten pages
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with localllm.load(path, context=1024, max_memory=gigabytes) as llm:
        short, long = ([int(i) for i in random.integers(3, llm.info.n_vocab, n)] for n in (16, PROMPT))
        found: dict[str, Any] = {"gigabytes": gigabytes, "pool": llm.info.placement.pool}
        found["prefill"] = _speed(llm, path, lambda: llm.generate(long, max_tokens=0), PROMPT)
        options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
        llm.generate(short, max_tokens=WARM_UP, **options)

        def decode() -> None:
            found["ids"] = list(llm.generate(short, max_tokens=n_tokens, **options).ids)

        found["decode"] = _speed(llm, path, decode, n_tokens)
    found["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return found | ({} if group is None else {"group": of_group(group)})


def _speed(llm: localllm.LLM, path: Path, work: Any, n_tokens: int) -> dict[str, Any]:
    before = llm.counts.experts
    disk = 0.0 if before is None else disk_rate(path)
    begin = time.perf_counter()
    work()
    seconds = time.perf_counter() - begin
    found: dict[str, Any] = {"tokens_per_s": n_tokens / seconds}
    after = llm.counts.experts
    if before is not None and after is not None:
        speed = ExpertSpeed.of(before, after, seconds, (disk + disk_rate(path)) / 2)
        found |= speed.as_json() | {"of_allowed": speed.read_bytes / speed.disk / seconds}
    return found


def in_a_process(path: Path, gigabytes: float | None, n_tokens: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.experts", str(path), "--child", "--tokens", str(n_tokens)]
    with contextlib.ExitStack() as stack:
        if gigabytes is not None:
            command += ["--gb", str(gigabytes)]
            if (group := stack.enter_context(control_group(round(gigabytes * 1e9)))) is not None:
                command += ["--group", str(group)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:  # -9: killed for its memory
        raise SystemExit(f"the run with {gigabytes or 'all'} GB ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run a mixture of experts larger than memory.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--gb", type=float)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--layers", type=int, default=N_LAYERS)
    parser.add_argument("--no-whole", action="store_true", help="skip the run with all experts in memory")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        print(json.dumps(measure(given.path, given.gb, given.tokens, given.group)))
        return 0
    path, is_own = given.path, given.path.is_dir()
    if is_own:
        path = given.path / "experts-benchmark.gguf"
        real_shape_gguf(path, replace(REAL_SHAPES["qwen3moe-7b"], n_layers=given.layers), "Q8_0")
    try:
        runs = [in_a_process(path, given.gb or 4.0, given.tokens)]
        runs += [] if given.no_whole else [in_a_process(path, None, given.tokens)]
    finally:
        if is_own:
            path.unlink()
    for run in runs:
        limit = "all in memory" if run["gigabytes"] is None else f"{run['gigabytes']:g} GB"
        print(f"{limit}: at most {quantity(run['resident'], 'B')} resident", end="")
        if "group" in run:
            print(f", {quantity(run['group']['peak'], 'B')} in a control group with the system's cache", end="")
        print()
        for kind in ("prefill", "decode"):
            speed = run[kind]
            print(f"  {kind:<8} {speed['tokens_per_s']:8.2f} tok/s", end="")
            if "disk" in speed:
                print(
                    f", {speed['hits']:.0%} in memory, read at {quantity(speed['rate'], 'B/s')}, the disk gives "
                    f"{quantity(speed['disk'], 'B/s')}: {speed['of_allowed']:.0%} of what that allows",
                    end="",
                )
            print()
    is_same = runs[0]["ids"] == runs[-1]["ids"]
    print("the same ids" if is_same else "OTHER IDS")
    print(json.dumps(runs))
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
