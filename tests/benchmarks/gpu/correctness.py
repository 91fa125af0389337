"""The CUDA tests on the real devices, perhaps under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from tests.benchmarks.gpu.sections import Row
from tests.helpers.data import ROOT

#: A name, and what pytest is given.
Suite = tuple[str, Sequence[str]]
#: All of them.  Tests that run on every device there is have a parameter for the real one.
SUITES: tuple[Suite, ...] = (
    ("kernels and models", ("tests/kernels/cuda", "-k", "real")),
    ("operations", ("tests/kernels", "--ignore", "tests/kernels/cuda", "-k", "cuda and not emulated")),
    ("architectures", ("tests/models/test_transformers.py", "-k", "a_gpu")),
)
#: What compute-sanitizer, under which kernels take many times as long, runs.
SANITIZED: tuple[Suite, ...] = tuple(
    (name, (f"tests/kernels/cuda/test_{name}.py", "-k", "real"))
    for name in ("attention", "matmul", "append", "elementwise", "experts", "quantise")
)
SANITIZER = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
#: Processes that share the device.
_WORKERS = 4
_NO_TESTS = 5


def run_tests(seconds: float, suites: Sequence[Suite]) -> Iterator[Row]:
    """Every suite; each may take an equal part of the time."""
    workers = ("-n", str(_WORKERS)) if find_spec("xdist") and suites is SUITES else ()
    for name, arguments in suites:
        yield _suite(name, (*_pytest(), *workers, *arguments), seconds / len(suites))


def sanitize(tools: Sequence[str], seconds: float, suites: Sequence[Suite]) -> Iterator[Row]:
    """The same under each tool, of `TOOLS`."""
    if shutil.which(SANITIZER) is None:
        yield {"tests": "all", "result": f"not run: {SANITIZER} is not on the PATH"}
        return
    for tool in tools:
        for name, arguments in suites:
            command = (SANITIZER, "--tool", tool, "--error-exitcode", "9", *_pytest(), *arguments)
            yield _suite(f"{name}, {tool}", command, seconds / len(tools) / len(suites))


def _pytest() -> tuple[str, ...]:
    return (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")


def _suite(name: str, command: Sequence[str], seconds: float) -> Row:
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "400"},  # or pytest shortens what it says of failures
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode(errors="replace").split("\n") if isinstance(error.stdout, bytes) else [""]
        return {"tests": name, "result": f"stopped after {seconds:.0f} s: {' '.join(said)[-300:]}".strip()}
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    row: Row = {"tests": name, "result": lines[-1].strip("= ") if lines else f"exit code {done.returncode}"}
    if done.returncode == _NO_TESTS:
        row["fault"] = f"{name}: no test ran"
    elif done.returncode:
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR", "=========     "))] or lines[-1:]
        row["fault"] = f"{name}: {'; '.join(failed[:5])} {done.stderr.strip()[-300:]}".strip()
    elif " passed" not in row["result"]:
        row["fault"] = f"{name}: nothing passed, all was skipped"
    return row
