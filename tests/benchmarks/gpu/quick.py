"""Check and measure a GPU in nine minutes, on a machine without a network.

    python tests/benchmarks/gpu/quick.py pack build/gpu                  on a machine with a network
    python3 tests/benchmarks/gpu/quick.py run build/gpu --out results    on the machine with the GPU

    python tests/benchmarks/gpu/quick.py run --emulated --steps environment,ceilings    without a GPU, to try it

`pack` writes packages, tiny models with their logits, and the list of kernels to compile: see
`tests.benchmarks.gpu.pack`.  `run` needs only the standard library: it unpacks the packages into a temporary folder,
and runs each section of `tests.benchmarks.gpu.run` in a process of its own.  A process that takes too long is killed
with its children, and the next section starts.  Sections share the time of --minutes; the last one, the CUDA tests,
gets the remaining time.

The results are in gpu.md and gpu.jsonl in the folder --out, updated after each row, and the output of all processes
is in log.txt.  The exit code is as in `tests.benchmarks.gpu.run`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

if __name__ == "__main__":  # started as a file; an installed package "tests" would hide this checkout's folder
    sys.path[0] = str(ROOT)
    sys.modules["tests"] = types.ModuleType("tests")
    sys.modules["tests"].__path__ = [str(ROOT / "tests")]

from tests.benchmarks.gpu.report import read, write  # noqa: E402
from tests.benchmarks.gpu.sections import Row, Section, run_all  # noqa: E402


@dataclass(frozen=True)
class Step:
    """A section in a process of its own.

    Attributes:
        share: its share of the remaining time, relative to the following steps: seconds if all take their share.
        words: further arguments of `tests.benchmarks.gpu.run`.
    """

    section: str
    share: float
    words: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return " ".join((self.section, *self.words[1:2]))


#: The checks come first, and take three minutes at most.
STEPS = (
    Step("environment", 45),
    Step("compile", 60),
    Step("families", 75),
    Step("ceilings", 25),
    Step("models", 90, ("--types", "q4_k_m")),
    Step("counters", 45),
    Step("models", 40, ("--types", "q8_0")),
    Step("models", 40, ("--types", "f16")),
    Step("products", 30),
    Step("attention", 25),
    Step("layers", 25),
    Step("tests", 30),
)
_SECTIONS = tuple(dict.fromkeys(step.section for step in STEPS))
#: Part of a step's time after which its process starts no further row.
_LAST_ROW = 0.85
#: Characters of a log's last lines in a message, and of a file in log.txt.
_SAID, _MAX_LOG = 600, 1 << 20
#: Exit code of `run` without faults, with faults, and if there is no usable GPU.
_GOOD, _FAULTS, _NO_GPU = 0, 1, 2
_NVRTC = "from cupy.cuda import nvrtc; nvrtc.getVersion()"


@dataclass
class Steps:
    """Runs steps in processes.

    Attributes:
        scratch: folder for temporary files.
        log: file for the output of all processes.
        words: arguments of each process.
        env: its environment.
        reason: why no GPU can be used, found by the first step; then the other steps are skipped.
    """

    scratch: Path
    log: Path
    words: tuple[str, ...]
    env: dict[str, str]
    reason: str = ""
    _n: int = field(default=0)

    def section(self, step: Step) -> Section:
        return Section(step.title, lambda seconds: self._rows(step, seconds), step.share)

    def _rows(self, step: Step, seconds: float) -> Iterator[Row]:
        """Yield the rows of a step's process as they come.  Raises RuntimeError if it fails."""
        if self.reason:
            yield {"note": "skipped: no GPU can be used"}
            return
        self._n += 1
        folder = self.scratch / str(self._n)
        (folder / "tmp").mkdir(parents=True)
        output = folder / "output.txt"
        words = ["--sections", step.section, *step.words, "--minutes", str(_LAST_ROW * seconds / 60)]
        command = [sys.executable, "-m", "tests.benchmarks.gpu", *words, *self.words, "--out", str(folder)]
        env = self.env | {"TMPDIR": str(folder / "tmp")}
        begin, n_rows = time.monotonic(), 0
        with (
            output.open("w", encoding="utf-8") as to,
            subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=to, stderr=subprocess.STDOUT, start_new_session=True
            ) as process,
        ):
            try:
                while True:
                    code, is_late = process.poll(), time.monotonic() - begin > seconds
                    rows = [line["row"] for line in read(folder) if "row" in line]
                    yield from rows[n_rows:]
                    n_rows = len(rows)
                    if code is not None or is_late:
                        break
                    time.sleep(0.1)
            finally:
                with contextlib.suppress(ProcessLookupError):  # children can be alive after the process itself
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                shutil.rmtree(folder / "tmp", ignore_errors=True)  # models of a process that was killed
                self._keep_logs(step, folder)
        said = last_lines(output)
        note = next((line["note"] for line in reversed(read(folder)) if line.get("note")), "")
        if code == _NO_GPU and n_rows == 0:
            self.reason = said
            raise RuntimeError(said)
        if code is None:
            raise RuntimeError(f"killed after {seconds:.0f} s: {said}")
        if note.startswith("failed"):
            raise RuntimeError(note)
        if code != _GOOD and not (code == _FAULTS and any("fault" in row for row in rows)):
            raise RuntimeError(f"exit code {code}: {said}")
        if note:
            yield {"note": note}

    def _keep_logs(self, step: Step, folder: Path) -> None:
        with self.log.open("a", encoding="utf-8") as to:
            for path in sorted(folder.rglob("*.txt")) + sorted(folder.rglob("*.csv")):
                text = path.read_text(encoding="utf-8", errors="replace")
                to.write(f"\n===== {step.title}: {path.name}\n{text[-_MAX_LOG:]}\n")


def last_lines(path: Path) -> str:
    """Return the last lines of a log in one line."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    return " / ".join(line for line in lines[-6:] if line)[-_SAID:] or "no output"


def unpack(packages: Path, site: Path) -> None:
    """Unpack wheels into a folder for PYTHONPATH, with a package `tests` that is this checkout's folder."""
    for wheel in sorted((packages / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    for part in [part for kind in ("purelib", "platlib") for part in site.glob(f"*.data/{kind}")]:
        shutil.copytree(part, site, dirs_exist_ok=True)
    (site / "tests").mkdir(parents=True, exist_ok=True)
    (site / "tests" / "__init__.py").write_text(f"__path__ = [{str(ROOT / 'tests')!r}]\n", encoding="utf-8")


def environment(site: Path, scratch: Path) -> dict[str, str]:
    """Return the environment of the processes, in which CuPy finds NVRTC if any folder has it."""
    env = dict(os.environ, LOCALLLM_CACHE=str(scratch / "kernels"), PYTHONUNBUFFERED="1")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), env.get("PYTHONPATH")]))
    if subprocess.run([sys.executable, "-c", _NVRTC], env=env, capture_output=True, check=False).returncode:
        folders = [
            str(library.parent)
            for base, pattern in [*((each, "nvidia/*/lib") for each in sys.path), ("/usr/local", "cuda*/lib64")]
            for library in sorted(Path(base).glob(f"{pattern}/libnvrtc.so.*"))
        ]
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [env.get("LD_LIBRARY_PATH"), *dict.fromkeys(folders)]))
    return env


def run(given: argparse.Namespace) -> int:
    """Run the steps; return the exit code."""
    out: Path = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    chosen = [step for step in STEPS if not given.steps or step.section in given.steps.split(",")]
    head = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "command": " ".join(sys.argv)}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="localllm-gpu-", ignore_cleanup_errors=True) as name:
        scratch, packages = Path(name), given.packages and given.packages.absolute()
        site = scratch / "site"
        site.mkdir()
        if packages:
            unpack(packages, site)
        words = ("--quick", *(("--packages", str(packages)) if packages else ()), *(("--emulated",) * given.emulated))
        steps = Steps(scratch, out / "log.txt", words, environment(site, scratch))
        head["ready"] = f"after {time.monotonic() - begin:.1f} s"
        results = run_all(
            [steps.section(step) for step in chosen],
            60 * given.minutes - (time.monotonic() - begin),
            lambda line: print(line, flush=True),
            lambda found: write(out, head, found),
        )
    faults = [fault for found in results for fault in found.faults]
    print(f"\nwritten: {out / 'gpu.md'}, {out / 'gpu.jsonl'}, {out / 'log.txt'}; faults: {len(faults)}")
    for fault in faults:
        print(f"fault: {fault}", flush=True)
    return _NO_GPU if steps.reason else _FAULTS if faults else _GOOD


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="on a machine with a network")
    packing.add_argument("packages", type=Path, help="folder for the packages")
    running = commands.add_parser("run", help="on the machine with the GPU")
    running.add_argument(
        "packages", type=Path, nargs="?", help="the folder that pack wrote (default: the installed packages)"
    )
    running.add_argument("--out", type=Path, default=Path("results"), help="folder for the results")
    running.add_argument("--minutes", type=float, default=9.0, help="for the whole run (default: 9)")
    running.add_argument("--steps", default="", help=f"comma-separated (default: {','.join(_SECTIONS)})")
    running.add_argument(
        "--emulated", action="store_true", help="try the run on emulated GPUs; times are meaningless"
    )
    given = parser.parse_args(arguments)
    if given.command == "pack":
        from tests.benchmarks.gpu.pack import pack

        return pack(given.packages)
    if unknown := set(filter(None, given.steps.split(","))) - {*_SECTIONS}:
        parser.error(f"unknown steps: {', '.join(sorted(unknown))}; choose from {', '.join(_SECTIONS)}")
    if given.packages is not None and not (given.packages / "wheels").is_dir():
        parser.error(f"{given.packages} has no folder wheels: create it with quick.py pack {given.packages}")
    if not 0 < given.minutes < math.inf:
        parser.error(f"--minutes is {given.minutes:g}, but must be a number above 0")
    return run(given)


if __name__ == "__main__":
    sys.exit(main())
