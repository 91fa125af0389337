"""g++ runs here: the runtime is compiled once, each translated module into a library of its own; both are cached."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from tests.cuda_on_cpu.errors import BuildError

RUNTIME = Path(__file__).parent / "runtime"
_COMMON = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-march=x86-64-v3",
    "-ffp-contract=off",
    "-w",
)
_RUNTIME_FLAGS = ("-O2",)
_MODULE_FLAGS = ("-O1",)  # a third faster to compile than -O2, and hardly slower to run


def missing() -> str | None:
    """Why the harness cannot build here, or None."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"the CUDA harness is written for Linux on x86-64, not {platform.system()} on {platform.machine()}"
    if shutil.which("g++") is None:
        return "the CUDA harness needs g++"
    return None


def default_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"cuda_on_cpu-{os.getuid()}"


def build_module(source: str, folder: Path) -> Path:
    """The library of a translated module, from the cache where it is there.  Raises BuildError."""
    flags = (*_COMMON, *_MODULE_FLAGS)
    library = folder / f"module-{_key(source, repr(flags), runtime_key())}.so"
    if not library.exists():
        runtime = _build_runtime(folder)
        with tempfile.TemporaryDirectory() as scratch:
            code = Path(scratch) / "module.cpp"
            code.write_text(source)
            _run(["g++", *flags, f"-I{RUNTIME}", "-shared", "-Wl,-Bsymbolic", str(code), *map(str, runtime)], library)
    return library


@cache
def runtime_key() -> str:
    texts = [path.read_text() for path in sorted(RUNTIME.iterdir()) if path.suffix in (".h", ".cpp")]
    return _key(*texts, repr((_COMMON, _RUNTIME_FLAGS)), _compiler_version())


def _build_runtime(folder: Path) -> list[Path]:
    objects = []
    for source in sorted(RUNTIME.glob("*.cpp")):
        target = folder / f"{source.stem}-{runtime_key()}.o"
        if not target.exists():
            _run(["g++", *_COMMON, *_RUNTIME_FLAGS, "-c", str(source)], target)
        objects.append(target)
    return objects


def _key(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


@cache
def _compiler_version() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def _run(command: list[str], target: Path) -> None:
    """Runs the compiler into a file of its own first: other processes may build the same."""
    reason = missing()
    if reason is not None:
        raise BuildError(reason)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.stem}.{os.getpid()}.partial{target.suffix}")
    done = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"g++ refused the translation: {done.stderr[:4000]}")
    partial.replace(target)
