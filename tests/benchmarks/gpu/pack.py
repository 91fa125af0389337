"""Pack what a run on a machine with a GPU and without a network needs: packages, tiny models, a list of kernels.

    python tests/benchmarks/gpu/quick.py pack build/gpu

The machine has Python 3.12 on x86-64, and the packages of `THERE`.  It receives this checkout and the folder, which
must fit into `LIMIT` bytes together.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from email.parser import Parser
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from localllm.kernels.cuda.backend import CUDABackend
from localllm.kernels.cuda.driver import Defines, DeviceMemory, DeviceProperties, MemoryInfo, Stream
from tests.benchmarks.gpu import counted, families, kernels, layers, machine, models
from tests.benchmarks.gpu.installed import needs
from tests.benchmarks.gpu.predict import CARDS
from tests.helpers.data import ROOT
from tests.helpers.synthetic import random_gguf
from tests.kernels.cuda.watched import KernellessDriver

PYTHON = "3.12"
#: Packages of the machine, and hf-xet, which huggingface-hub imports only to download.
THERE = ("numpy", "numba", "llvmlite", "cupy-cuda12x", "cupy-cuda13x", "cuda-pathfinder", "hf-xet")
#: Bytes of the checkout and the folder.
LIMIT = 64 << 20
#: Memory of the device that lists kernels.
_MEMORY = 80 << 30
#: pip compares platforms by name, not by version of glibc.
_PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in range(39, 4, -1)), "manylinux2014_x86_64", "manylinux1_x86_64")
_MARKERS = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.3",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "implementation_name": "cpython",
    "os_name": "posix",
}


@dataclass(frozen=True)
class Wheel:
    name: str
    version: Version
    requirements: tuple[Requirement, ...]


def pack(folder: Path) -> int:
    """Write the folder; return the exit code."""
    wheels = folder / "wheels"
    download(wheels)
    faults = list(missing([_wheel(path) for path in sorted(wheels.glob("*.whl"))]))
    with (
        tempfile.TemporaryDirectory() as scratch,
        zipfile.ZipFile(folder / families.MODELS, "w", zipfile.ZIP_LZMA) as archive,
    ):
        families.record(Path(scratch))
        paths = sorted(Path(scratch).iterdir())
        for path in paths:
            archive.write(path, path.name)
        listed = modules(path for path in paths if path.suffix == ".gguf")
    (folder / families.MODULES).write_text("[\n" + ",\n".join(map(json.dumps, listed)) + "\n]\n", encoding="utf-8")
    tree, packed = (_bytes(paths) / 1e6 for paths in (_tracked(), folder.rglob("*")))
    print(f"{folder}: {len(listed)} kernels to compile, {packed:.1f} MB; the checkout: {tree:.1f} MB")
    if tree + packed > LIMIT / 1e6:
        faults.append(f"the checkout and {folder} take {tree + packed:.1f} MB, more than {LIMIT / 1e6:.1f} MB")
    for fault in faults:
        print(f"fault: {fault}", file=sys.stderr)
    return 1 if faults else 0


# -- Wheels --------------------------------------------------------------------------------------------------------


def download(folder: Path) -> None:
    """Download the wheels that the machine lacks, with their dependencies."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wanted = [need for need in needs() if canonicalize_name(Requirement(need).name) not in THERE]
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", scratch, "--only-binary=:all:"]
        command += ["--python-version", PYTHON, "--implementation", "cp"]
        command += [f"--platform={platform}" for platform in _PLATFORMS]
        subprocess.run([*command, *wanted], check=True)
        for path in sorted(Path(scratch).glob("*.whl")):
            if canonicalize_name(path.name.split("-")[0]) not in THERE:
                shutil.move(path, folder / path.name)


def _wheel(path: Path) -> Wheel:
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode("utf-8"))
    requirements = tuple(map(Requirement, metadata.get_all("Requires-Dist") or ()))
    return Wheel(canonicalize_name(metadata["Name"]), Version(metadata["Version"]), requirements)


def missing(wheels: Sequence[Wheel], wanted: Sequence[str] | None = None) -> Iterator[str]:
    """Yield what neither the wheels nor the machine have, of the needs and of the wheels' requirements."""
    by_name = {wheel.name: wheel for wheel in wheels}
    if len(by_name) < len(wheels):
        yield "a package has two versions among the wheels: remove the folder, and pack again"
    pending = [("localllm", Requirement(need)) for need in (needs() if wanted is None else wanted)]
    seen = set[tuple[str, str]]()
    while pending:
        owner, requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name in THERE:
            continue
        wheel = by_name.get(name)
        if wheel is None or not requirement.specifier.contains(wheel.version, prereleases=True):
            yield f"{owner} needs {requirement}, but the wheels have {wheel.version if wheel else 'none'}"
            continue
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            pending += [
                (name, each)
                for each in wheel.requirements
                if each.marker is None or each.marker.evaluate({**_MARKERS, "extra": extra})
            ]


# -- Kernels -------------------------------------------------------------------------------------------------------


class _Device(KernellessDriver):
    """A device of the expected kind, without memory, whose kernels do nothing."""

    def properties(self, device: int) -> DeviceProperties:
        return CARDS[0].properties

    def memory_info(self, device: int) -> MemoryInfo:
        return MemoryInfo(_MEMORY, _MEMORY)

    def allocate(self, device: int, n_bytes: int) -> DeviceMemory:
        return DeviceMemory(device, 1 << 30, n_bytes, None)

    def upload(self, destination: DeviceMemory, source: NDArray[Any], stream: Stream) -> None:
        pass

    def copy(self, destination: DeviceMemory, source: DeviceMemory, stream: Stream) -> None:
        pass

    def fill(self, destination: DeviceMemory, byte: int, stream: Stream) -> None:
        pass


def modules(tiny_models: Iterable[Path]) -> list[tuple[str, Defines]]:
    """Return the modules that the sections of a quick run load, as (name, macros)."""
    driver = _Device()
    for path in tiny_models:
        families.check(path, CUDABackend(driver, 0, compiles_ahead=False))
    shape = replace(machine.QUICK.model, n_layers=4, n_vocab=32_000)
    sizes = replace(machine.QUICK, model=shape, copied=1, generated=2, replays=1, long=2048)
    with (
        tempfile.TemporaryDirectory() as scratch,
        machine.emulated(Path(scratch), driver, CUDABackend) as devices,
    ):
        devices.sizes = sizes
        for find in (machine.ceilings, models.models, kernels.products, kernels.attention, layers.layers):
            for _ in find(devices):
                pass
        path = random_gguf(Path(scratch) / "counted.gguf", replace(shape, n_layers=2), sizes.file_types[0])
        counted.main(str(path), min(sizes.prompts), _NoProfiler())
        path.unlink()
    return sorted(((name, dict(defines)) for name, defines in driver.compiled | driver.loaded), key=repr)


class _NoProfiler:
    def __getattr__(self, name: str) -> Any:
        return lambda: None


# -- The checkout --------------------------------------------------------------------------------------------------


def _tracked() -> Iterator[Path]:
    """Yield the files of the checkout that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return (ROOT / name for name in names.split("\0") if name)


def _bytes(paths: Iterable[Path]) -> int:
    return sum(path.lstat().st_size for path in paths if path.is_file())
