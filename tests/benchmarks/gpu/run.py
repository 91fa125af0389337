"""Measure and check everything on a GPU, in runs of less than ten minutes.

    python tests/benchmarks/gpu/quick.py pack build/gpu                 packages for a machine without a network
    python3 tests/benchmarks/gpu/quick.py run build/gpu --out results   the most important sections in nine minutes

    python -m tests.benchmarks.gpu --out 1 --sections environment,sanitizer,tests,processes
    python -m tests.benchmarks.gpu --out 2 --sections environment,ceilings,products,attention,layers,counters
    python -m tests.benchmarks.gpu --out 3 --sections environment,models,cpu,variants,several
    python -m tests.benchmarks.gpu --emulated

| section | result |
|---|---|
| environment | card, driver, CuPy, NVRTC, missing packages |
| compile | compiles the kernels that --packages lists, in a process per processor |
| families | a tiny model of each family of operations in --packages, compared with the CPU |
| sanitizer | the tests under the tools of compute-sanitizer in --sanitizer |
| ceilings | limits of the card: copies, reads, products, launches, and the bus |
| products, attention | single kernels: the floor, the goal, the time, the error |
| layers | the time of calls in layers with latents, recurrences and experts |
| counters | ncu's counters of the kernels for a token and a prompt |
| models | models of 8B parameters with random weights: tokens per second, profiles, the five slowest kernels |
| cpu | a layer of such a model, compared with the CPU, whose kernels compile slowly |
| variants | decoding with each optimisation removed |
| several | with two GPUs: copies between them, and a model split by layers and by rows |
| tests | the CUDA tests on the card |
| processes | some tests in two processes at a time |

Sections share the time of --minutes; each finishes its last row.  `tests.benchmarks.gpu.quick` runs each section in a
process of its own, and ends those that take too long.

The tables are in gpu.md and gpu.jsonl in the folder --out, updated after each row.  Models are written to the folder
for temporary files, one at a time.  The exit code is 1 if an output is wrong or a test or section fails, 2 if no
device can be measured, and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import datetime
import math
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from localllm.cli.interrupt import INTERRUPTED
from localllm.errors import DeviceError, UsageError
from tests.benchmarks.gpu import correctness, families, kernels, layers, machine, models
from tests.benchmarks.gpu.machine import Machine
from tests.benchmarks.gpu.report import write
from tests.benchmarks.gpu.sections import Row, Section, run_all
from tests.helpers.backends import no_harness
from tests.helpers.synthetic import FILE_TYPES

#: Sections, and their shares of the time.
SHARES = {
    "environment": 1.0,
    "compile": 4.0,
    "families": 6.0,
    "sanitizer": 12.0,
    "ceilings": 2.0,
    "products": 8.0,
    "attention": 4.0,
    "layers": 6.0,
    "counters": 4.0,
    "models": 12.0,
    "cpu": 4.0,
    "variants": 4.0,
    "several": 4.0,
    "tests": 12.0,
    "processes": 4.0,
}
#: Sections that need the folder --packages.
_PACKED = ("compile", "families")
#: The suite that runs in two processes.
_OF_TWO = ("models", ("tests/kernels/cuda/test_models.py", "-k", "real"))
#: A quick suite for emulated devices.
_EMULATED_SUITES = (("profile", ("tests/kernels/cuda/test_profile.py", "-k", "floor")),)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    given = _arguments(arguments)
    try:
        _check(given)
        with tempfile.TemporaryDirectory(prefix="localllm-gpu-") as scratch:
            open_machine = machine.emulated if given.emulated else machine.real
            with open_machine(Path(scratch)) as devices:
                devices.sizes = machine.chosen(devices.sizes, quick=given.quick, types=given.types)
                _check_room(given, devices)
                return _run(given, devices)
    except DeviceError as error:
        said = f"there is no GPU to measure: {error}"
    except UsageError as error:
        said = str(error)
    except OSError as error:
        said = f"the results cannot be written: {error}; free space, or choose another folder with --out"
    except KeyboardInterrupt:
        print("stopped by Ctrl-C before anything was measured", file=sys.stderr)
        return INTERRUPTED
    print(said, file=sys.stderr)
    return 2


def _check(given: argparse.Namespace) -> None:
    """Check the arguments, and that results can be written.

    Raises:
        UsageError: an argument is invalid.
        OSError: the folder of the results is not writable.
    """
    for what, names, known in (
        ("section", given.sections, tuple(SHARES)),
        ("tool of compute-sanitizer", given.sanitizer, correctness.TOOLS),
    ):
        if unknown := [name for name in names.split(",") if name not in known]:
            raise UsageError(f"unknown {what} {', '.join(map(repr, unknown))}; choose from {', '.join(known)}")
    if given.types and (unknown := [name for name in given.types.split(",") if name not in FILE_TYPES]):
        raise UsageError(f"unknown file type {', '.join(map(repr, unknown))}; choose from {', '.join(FILE_TYPES)}")
    if given.packages is None and (needy := [name for name in _PACKED if name in given.sections.split(",")]):
        raise UsageError(f"sections that need --packages: {', '.join(needy)}; see tests/benchmarks/gpu/quick.py")
    if not 0 < given.minutes < math.inf:
        raise UsageError(f"--minutes is {given.minutes:g}, but must be a number above 0")
    if given.emulated and (reason := no_harness()):
        raise UsageError(f"kernels cannot run on emulated GPUs on this machine: {reason}")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=given.out):
            pass


def _check_room(given: argparse.Namespace, devices: Machine) -> None:
    """Raise UsageError if the disk has no space for the largest model."""
    sections = set(given.sections.split(","))
    if not {"models", "variants", "several"} & sections:
        return
    whole = "several" in sections and devices.count > 1
    needed, free = models.largest_file(devices.sizes, whole=whole), shutil.disk_usage(devices.scratch).free
    if free < needed:
        raise UsageError(
            f"the models take up to {needed / 1e9:.1f} GB on the disk, but {devices.scratch.parent} has "
            f"{free / 1e9:.1f} GB free: set TMPDIR to another folder, or omit the sections "
            "models, variants and several"
        )


def _run(given: argparse.Namespace, devices: Machine) -> int:
    chosen, folder = given.sections.split(","), given.out or Path(tempfile.mkdtemp(prefix="localllm-gpu-results-"))
    folder = folder.absolute()
    sections = [section for name, section in _sections(devices, given, folder).items() if name in chosen]
    head = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "card": ", ".join(devices.driver.properties(i).name for i in range(devices.count)),
        "command": "python -m tests.benchmarks.gpu " + shlex.join(given.words),
    }
    results = run_all(
        sections, 60 * given.minutes, lambda line: print(line, flush=True), lambda found: write(folder, head, found)
    )
    faults = [fault for found in results for fault in found.faults]
    print(f"\nwritten: {folder / 'gpu.md'}, {folder / 'gpu.jsonl'}")
    for fault in faults:
        print(f"fault: {fault}", file=sys.stderr)
    if any(found.is_interrupted for found in results):
        return INTERRUPTED
    return 1 if faults else 0


def _sections(devices: Machine, given: argparse.Namespace, folder: Path) -> dict[str, Section]:
    suites = _EMULATED_SUITES if given.emulated else correctness.SUITES
    sanitized = _EMULATED_SUITES if given.emulated else correctness.SANITIZED
    tools, of_two = given.sanitizer.split(","), _EMULATED_SUITES[0] if given.emulated else _OF_TWO

    def of(find: Callable[[Machine], Iterator[Row]]) -> Callable[[float], Iterator[Row]]:
        return lambda seconds: find(devices)

    finders: dict[str, Callable[[float], Iterator[Row]]] = {
        "environment": of(machine.environment),
        "ceilings": of(machine.ceilings),
        "tests": lambda seconds: correctness.run_tests(seconds, suites, folder),
        "processes": lambda seconds: correctness.two_processes(seconds, of_two, folder),
        "compile": lambda seconds: families.compile_modules(devices, given.packages),
        "families": lambda seconds: families.families(devices, given.packages, seconds),
        "counters": lambda seconds: correctness.count(devices, seconds, folder),
        "products": of(kernels.products),
        "attention": of(kernels.attention),
        "layers": of(layers.layers),
        "models": of(models.models),
        "cpu": of(models.cpu),
        "variants": of(models.variants),
        "several": of(models.several),
        "sanitizer": lambda seconds: correctness.sanitize(tools, seconds, sanitized, folder),
    }
    return {name: Section(name, finders[name], share) for name, share in SHARES.items()}


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    most = ",".join(name for name in SHARES if name not in ("sanitizer", *_PACKED))
    parser.add_argument("--out", type=Path, help="folder for the results (default: a temporary one)")
    parser.add_argument("--sections", default=most, help=f"comma-separated (default: {most})")
    parser.add_argument("--sanitizer", default="memcheck", help="its tools, comma-separated (default: memcheck)")
    parser.add_argument("--minutes", type=float, default=7.8, help="for the whole run (default: 7.8)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and formats")
    parser.add_argument("--types", default="", help="file types of models, comma-separated (default: all)")
    parser.add_argument("--packages", type=Path, help="the folder that tests/benchmarks/gpu/quick.py wrote")
    parser.add_argument("--emulated", action="store_true", help="try the run on emulated GPUs; times are meaningless")
    given = parser.parse_args(words)
    given.words = sys.argv[1:] if words is None else words
    return given
