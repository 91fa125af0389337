"""Plants one mistake at a time in a copy of this checkout and runs the nearest tests: do they catch it?

    python -m tests.mutations.run [FILE.toml …] [--only NAME]

The lists beside this file (all of them, if none is named) have entries of this form:

    [[mutation]]
    name = "an escape is decoded once"
    file = "localllm/tokenizer/encoders.py"
    old = "text that occurs exactly once in the file"
    new = "what stands in its place"
    tests = ["tests/localllm/tokenizer/test_tokenizer.py::test_one"]
    survives = "why no test can catch it"  # optional

Tests run once without any mistake first.  Each mistake gets a tree and a cache of compiled kernels of its own, which
are linked from the first and thrown away afterwards, so no kernel compiled from a mistake is ever used again.
The exit status is 1 if a mistake survives without a reason, or an entry is stale: its old text does not occur once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from localllm.kernels.code_cache import CACHE_VARIABLE, cache_root

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    old: str
    new: str
    tests: list[str]
    survives: str | None = None


def read_lists(paths: list[Path], only: str | None) -> list[Mutation]:
    """The entries of the lists; with ``only``, those with that text in their name or file."""
    entries = [Mutation(**entry) for path in paths for entry in tomllib.loads(path.read_text())["mutation"]]
    return [m for m in entries if only is None or only in m.name or only in m.file]


def copy_checkout(root: Path, tree: Path) -> None:
    """Copies the files of a checkout as they are now: tracked ones, and new ones that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and os.path.lexists(root / name):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, tree / name, follow_symlinks=False)


def run_tests(folder: Path, tests: list[str], limit: float | None = None) -> tuple[bool, str]:
    """Whether the tests pass in ``folder/tree`` with ``folder/cache``, and the end of what they print."""
    tree = folder / "tree"
    environment = {**os.environ, CACHE_VARIABLE: str(folder / "cache"), "PYTHONPATH": str(tree)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    # A file and a session of their own: processes that the tests start may outlive them, and hold a pipe open.
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            passed = process.wait(limit) == 0
        except subprocess.TimeoutExpired:
            passed = False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return passed, "".join(output.readlines()[-15:])


def try_mutation(mutation: Mutation, original: Path, limit: float) -> str:
    """Plants the mistake in a copy of the original folder: ``caught``, ``survived`` or ``stale``."""
    source = original / "tree" / mutation.file
    text = source.read_text() if source.is_file() else ""
    if text.count(mutation.old) != 1 or mutation.old == mutation.new:
        return "stale"
    with tempfile.TemporaryDirectory(dir=original.parent) as name:
        folder = Path(name) / "copy"
        shutil.copytree(original, folder, symlinks=True, copy_function=os.link)
        path = folder / "tree" / mutation.file
        path.unlink()  # still linked to the original's
        path.write_text(text.replace(mutation.old, mutation.new))
        os.utime(path, (0, 0))  # Python takes bytecode of a source of equal size and second for this one's
        (folder / "output").unlink()
        passed, _ = run_tests(folder, mutation.tests, limit)
    return "survived" if passed else "caught"


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("lists", nargs="*", type=Path, metavar="FILE.toml", help="lists (default: all beside run.py)")
    parser.add_argument("--only", metavar="NAME", help="only entries with this text in their name or file")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="mistakes that are tried at once (default: 1)"
    )
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="a mistake that hangs is caught")
    options = parser.parse_args(arguments)
    mutations = read_lists(options.lists or sorted(Path(__file__).parent.glob("*.toml")), options.only)
    if not mutations:
        parser.error("no entry is chosen")
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        original = Path(name) / "original"
        copy_checkout(root, original / "tree")
        if (compiled := cache_root()) and compiled.exists():
            shutil.copytree(compiled, original / "cache")
        passed, output = run_tests(original, sorted({test for m in mutations for test in m.tests}))
        if not passed:
            print(f"The tests fail without any mistake:\n{output}")
            return 2
        outcomes = []
        running = [pool.submit(try_mutation, m, original, options.limit) for m in mutations]
        for m, future in zip(mutations, running, strict=True):
            outcome = future.result()
            if outcome == "survived" and m.survives:
                outcome = "survived for a reason"
            print(f"{outcome:9} {m.file}: {m.name}", flush=True)
            outcomes.append(outcome)
    print(", ".join(f"{outcomes.count(o)} {o}" for o in dict.fromkeys(sorted(outcomes))))
    return int("survived" in outcomes or "stale" in outcomes)


if __name__ == "__main__":
    sys.exit(main())
