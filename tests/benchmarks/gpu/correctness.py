"""Run other programs: the CUDA tests, also under compute-sanitizer and in two processes, and kernels under ncu.

All of their output is stored in the folder of the results, even if they are stopped.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

import psutil

from tests.benchmarks.gpu.machine import Machine
from tests.benchmarks.gpu.sections import Row
from tests.helpers.data import ROOT
from tests.helpers.synthetic import random_gguf

#: A name, and the arguments of pytest.
Suite = tuple[str, Sequence[str]]
#: All suites.  Tests of all devices have a parameter for the real one.
SUITES: tuple[Suite, ...] = (
    ("kernels and models", ("tests/kernels/cuda", "-k", "real")),
    ("operations", ("tests/kernels", "--ignore", "tests/kernels/cuda", "-k", "cuda and not emulated")),
    ("architectures", ("tests/models/test_transformers.py", "-k", "a_gpu")),
)
#: Suites for compute-sanitizer, under which kernels are many times slower.
SANITIZED: tuple[Suite, ...] = tuple(
    (name, (f"tests/kernels/cuda/test_{name}.py", "-k", "real"))
    for name in ("attention", "matmul", "append", "elementwise", "experts", "quantise")
)
SANITIZER = "compute-sanitizer"
#: Folders of NVIDIA's tools, in addition to the PATH.
FOLDERS = ["/usr/local/cuda/bin"]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
NCU = "ncu"
#: Output of ncu if only root may use counters.
_REFUSED = "ERR_NVGPUCTRPERM"
#: Counters of ncu, and the columns of the table.
METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "% of memory",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "% of processors",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "% of warps",
    "launch__registers_per_thread": "registers",
}
#: Layers of the model whose kernels are counted.
_LAYERS = 2
#: Processes that share the device.
_WORKERS = 4
_NO_TESTS = 5


def run_tests(seconds: float, suites: Sequence[Suite], folder: Path) -> Iterator[Row]:
    """Run every suite, each with an equal part of the time."""
    workers = ("-n", str(_WORKERS)) if find_spec("xdist") and suites is SUITES else ()
    for name, arguments in suites:
        yield _suite(name, (*_pytest(), *workers, *arguments), seconds / len(suites), folder)


def two_processes(seconds: float, suite: Suite, folder: Path) -> Iterator[Row]:
    """Run a suite in two processes at a time, on the same device."""
    command = (*_pytest(), *suite[1])
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(lambda i: _suite(f"{suite[0]}, process {i}", command, seconds, folder), (1, 2))


def count(machine: Machine, seconds: float, folder: Path) -> Iterator[Row]:
    """Count the kernels of a prompt and a token of a small model with ncu, in a process of its own.

    Kernels that differ in neither name nor grid share a row; rows with the most time come first.
    """
    tool = _tool(NCU)
    if tool is None:
        yield {"kernel": "all", "result": f"not counted: {NCU} is not on the PATH"}
        return
    log, path = folder / "ncu.csv", machine.scratch / "counted.gguf"
    sizes = machine.sizes
    random_gguf(path, replace(sizes.model, n_layers=_LAYERS), sizes.file_types[0])
    metrics = ("--csv", "--page", "raw", "--metrics", ",".join(METRICS), "--log-file", str(log))
    # The clocks belong to the machine's owner, and only launches between profilerStart and profilerStop count.
    options = (*metrics, "--clock-control", "none", "--profile-from-start", "off")
    own = (sys.executable, "-m", "tests.benchmarks.gpu.counted", str(path), str(min(sizes.prompts)))
    said = _suite("ncu", (tool, *options, *own), seconds, folder)
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = list(csv.DictReader(lines[begin:]))
    if _REFUSED in (folder / "ncu.txt").read_text(encoding="utf-8") + "".join(lines):
        yield {"kernel": "all", "result": "not counted: the driver permits it only to root; run as root"}
    elif len(rows) < 2:
        yield {"kernel": "all", "result": said["result"], "fault": "ncu counted nothing: see ncu.txt and ncu.csv"}
    else:
        yield from sorted(_by_kernel(rows), key=lambda row: -row["launches"] * row["time"])


def _by_kernel(rows: Sequence[dict[str, str]]) -> Iterator[Row]:
    """Yield means of the counters; the first row has their units."""
    kinds: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows[1:]:
        kinds.setdefault((row["Kernel Name"], row.get("Grid Size", "")), []).append(row)
    for (kernel, grid), launches in kinds.items():
        means = {
            name: fmean(float((row.get(metric) or "nan").replace(",", "")) for row in launches)
            for metric, name in METRICS.items()
        }
        unit = rows[0].get(next(iter(METRICS)), "")
        yield {"kernel": kernel, "grid": grid, "launches": len(launches), **means, "unit of time": unit}


def sanitize(tools: Sequence[str], seconds: float, suites: Sequence[Suite], folder: Path) -> Iterator[Row]:
    """Run suites under each tool of `TOOLS`."""
    program = _tool(SANITIZER)
    if program is None:
        yield {"tests": "all", "result": f"not run: {SANITIZER} is not on the PATH"}
        return
    for tool in tools:
        for name, arguments in suites:
            command = (program, "--tool", tool, "--error-exitcode", "9", *_pytest(), *arguments)
            yield _suite(f"{name}, {tool}", command, seconds / len(tools) / len(suites), folder)


def _pytest() -> tuple[str, ...]:
    return (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")


def _tool(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS]))


def _suite(name: str, command: Sequence[str], seconds: float, folder: Path) -> Row:
    log = folder / (re.sub(r"\W+", "-", name) + ".txt")
    env = {**os.environ, "COLUMNS": "400"}  # otherwise pytest shortens failures
    with (
        log.open("w", encoding="utf-8") as to,
        psutil.Popen(command, cwd=ROOT, env=env, stdout=to, stderr=subprocess.STDOUT) as process,
    ):
        try:
            code = process.wait(seconds)
        except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
            children = process.children(recursive=True)
            for each in (process, *children):  # children would continue to use the GPU
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(children, timeout=5)
            return {"tests": name, "result": f"stopped after {seconds:.0f} s: see {log.name}"}
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    row: Row = {"tests": name, "result": lines[-1].strip("= ") if lines else f"exit code {code}"}
    if code == _NO_TESTS:
        row["fault"] = f"{name}: no test ran"
    elif code:
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR", "=========     "))] or lines[-1:]
        row["fault"] = f"{name}: {'; '.join(failed[:5])}"
    elif " passed" not in row["result"]:
        row["fault"] = f"{name}: nothing passed, all was skipped"
    return row
