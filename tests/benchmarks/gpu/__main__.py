"""Everything that is to be measured on a GPU, and checked, in one run of less than eight minutes.

    python -m tests.benchmarks.gpu --out results
    python -m tests.benchmarks.gpu --sections ceilings,products
    python -m tests.benchmarks.gpu --sections sanitizer --sanitizer memcheck,racecheck --minutes 30
    python -m tests.benchmarks.gpu --emulated

| section | what is found |
|---|---|
| environment | card, driver, CuPy, NVRTC |
| ceilings | what the card does at most: copies, reads, products, and the bus |
| tests | whether the CUDA tests pass on the card |
| products, attention | kernels one by one: the floor, what is hoped for, what came out, the error |
| models | models of 8B parameters with random weights: tokens a second, profiles, llama.cpp where it is there |
| several | with two GPUs: copies between them, and a split model |
| sanitizer | the tests under compute-sanitizer, if --sanitizer asks for it |

The tables are written to gpu.md and gpu.json in the folder that --out names.  The exit code is 1 if an output is
wrong, a test or a section fails, and 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from localllm.errors import DeviceError
from tests.benchmarks.gpu import correctness, kernels, machine, models
from tests.benchmarks.gpu.machine import Machine
from tests.benchmarks.gpu.report import write
from tests.benchmarks.gpu.sections import Row, Section, run_all

#: Sections, and the seconds that each may take.
SECONDS = {
    "environment": 20.0,
    "ceilings": 30.0,
    "tests": 130.0,
    "products": 90.0,
    "attention": 40.0,
    "models": 180.0,
    "several": 60.0,
    "sanitizer": 1500.0,
}
#: A quick test, for emulated devices.
_EMULATED_SUITES = (("profile", ("tests/kernels/cuda/test_profile.py", "-k", "floor")),)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    given = _arguments(arguments)
    chosen = given.sections.split(",")
    if unknown := set(chosen) - set(SECONDS):
        raise SystemExit(f"there is no section {', '.join(sorted(unknown))}: choose of {', '.join(SECONDS)}")
    with tempfile.TemporaryDirectory(prefix="localllm-gpu-") as scratch:
        open_machine = machine.emulated if given.emulated else machine.real
        try:
            with open_machine(Path(scratch)) as devices:
                return _run(given, chosen, devices)
        except DeviceError as error:
            print(f"there is no GPU to measure: {error}", file=sys.stderr)
            return 2


def _run(given: argparse.Namespace, chosen: list[str], devices: Machine) -> int:
    sections = [section for name, section in _sections(devices, given).items() if name in chosen]
    results = run_all(sections, 60 * given.minutes, lambda line: print(line, flush=True))
    head = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "card": ", ".join(devices.driver.properties(i).name for i in range(devices.count)),
        "command": "python -m tests.benchmarks.gpu " + shlex.join(given.words),
    }
    folder = given.out or Path(tempfile.mkdtemp(prefix="localllm-gpu-results-"))
    paths = write(folder, head, results)
    faults = [fault for found in results for fault in found.faults]
    print(f"\nwritten: {', '.join(map(str, paths))}")
    for fault in faults:
        print(f"fault: {fault}", file=sys.stderr)
    return 1 if faults else 0


def _sections(devices: Machine, given: argparse.Namespace) -> dict[str, Section]:
    suites = _EMULATED_SUITES if given.emulated else correctness.SUITES
    tools = given.sanitizer.split(",")

    def of(find: Callable[[Machine], Iterator[Row]]) -> Callable[[float], Iterator[Row]]:
        return lambda seconds: find(devices)

    finders: dict[str, Callable[[float], Iterator[Row]]] = {
        "environment": of(machine.environment),
        "ceilings": of(machine.ceilings),
        "tests": lambda seconds: correctness.run_tests(seconds, suites),
        "products": of(kernels.products),
        "attention": of(kernels.attention),
        "models": of(models.models),
        "several": of(models.several),
        "sanitizer": lambda seconds: correctness.sanitize(tools, seconds, suites),
    }
    return {name: Section(name, find, SECONDS[name]) for name, find in finders.items()}


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    most = ",".join(name for name in SECONDS if name != "sanitizer")
    parser.add_argument("--out", type=Path, help="folder for the results (default: a temporary one)")
    parser.add_argument("--sections", default=most, help=f"with commas (default: {most})")
    parser.add_argument("--sanitizer", default="memcheck", help="its tools, with commas (default: memcheck)")
    parser.add_argument("--minutes", type=float, default=7.8, help="for all of it (default: 7.8)")
    parser.add_argument(
        "--emulated", action="store_true", help="try the run out on emulated GPUs; times mean nothing"
    )
    given = parser.parse_args(words)
    given.words = sys.argv[1:] if words is None else words
    return given


if __name__ == "__main__":
    sys.exit(main())
