"""Compile with g++: the runtime and its headers once, and each translated module to a library.

Results are cached.  Processes that need the same library wait for the process that builds it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

from tests.cuda_on_cpu.errors import BuildError

RUNTIME = Path(__file__).parent / "runtime"
_FLAGS = "-std=c++17 -fPIC -fvisibility=hidden -fno-strict-aliasing -march=x86-64-v3 -ffp-contract=off -w"
_COMMON = (*_FLAGS.split(),)
_RUNTIME_FLAGS = ("-O2",)
# Options with and without checks of memory accesses.  Kernels of tests run briefly, so more optimisation costs time.
_MODULE_FLAGS = {False: ("-Og",), True: ("-O0", "-DCHECKING")}


def missing() -> str | None:
    """Return why the emulator cannot build on this machine, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the CUDA harness is written for Linux on x86-64, not {platform.system()} on {platform.machine()}"
    if shutil.which("g++") is None:
        return "the CUDA harness needs g++"
    return None


def default_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"cuda_on_cpu-{os.getuid()}"


def build_module(source: str, folder: Path, *, checking: bool) -> Path:
    """Return the library of a translated module, from the cache if possible.  Raises BuildError."""
    flags = (*_COMMON, *_MODULE_FLAGS[checking])

    def build(target: Path) -> None:
        # g++ uses a precompiled header that it finds before the header itself.
        include = [f"-I{_precompiled_header(folder, flags).parent}", f"-I{RUNTIME}"]
        with tempfile.TemporaryDirectory() as scratch:
            code = Path(scratch) / "module.cpp"
            code.write_text(source)
            objects = map(str, _build_runtime(folder))
            _run(["g++", *flags, *include, "-shared", "-Wl,-Bsymbolic", str(code), *objects], target)

    return _once(folder / f"module-{_key(source, repr(flags), runtime_key())}.so", build)


@cache
def runtime_key() -> str:
    texts = [path.read_text() for path in sorted(RUNTIME.iterdir()) if path.suffix in (".h", ".cpp")]
    return _key(*texts, repr((_COMMON, _RUNTIME_FLAGS)), _compiler_version())


def _build_runtime(folder: Path) -> list[Path]:
    def build(source: Path, target: Path) -> None:
        _run(["g++", *_COMMON, *_RUNTIME_FLAGS, "-c", str(source)], target)

    return [
        _once(folder / f"{source.stem}-{runtime_key()}.o", partial(build, source))
        for source in sorted(RUNTIME.glob("*.cpp"))
    ]


def _precompiled_header(folder: Path, flags: tuple[str, ...]) -> Path:
    header = RUNTIME / "kernel.h"
    target = folder / f"headers-{_key(repr(flags), runtime_key())}" / f"{header.name}.gch"
    return _once(target, lambda path: _run(["g++", *flags, "-x", "c++-header", str(header)], path))


def _once(target: Path, build: Callable[[Path], None]) -> Path:
    """Build a missing file, in one process at a time."""
    if not target.exists():
        with _locked(target):
            if not target.exists():
                build(target)
    return target


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    import fcntl  # imported here because Windows lacks it

    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.with_name(f"{target.name}.lock")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        path.unlink(missing_ok=True)


def _key(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


@cache
def _compiler_version() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def _run(command: list[str], target: Path) -> None:
    """Run the compiler with a temporary output file, so that an existing output is always complete."""
    reason = missing()
    if reason is not None:
        raise BuildError(reason)
    unfinished = target.with_name(f"{target.stem}.{os.getpid()}.partial{target.suffix}")
    done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"g++ refused the translation: {done.stderr[:4000]}")
    unfinished.replace(target)
