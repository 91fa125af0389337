"""Compilation of ``.cu`` files for a device.

    matvec.cu + *.cuh ──flatten──▶ one source ──NVRTC, for an architecture──▶ cubin ──▶ cache on disk
                                        └ #line: errors name the real file

NVRTC compiles one flat source, so its hash covers everything that the code depends on: the source, the options and
NVRTC's version name the file in the cache (`localllm.kernels.code_cache`).  Compiling needs no GPU and no driver.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from localllm.errors import DeviceError, KernelError
from localllm.kernels.buffers import Address, Buffer
from localllm.kernels.code_cache import cache_root, is_stale, read_code, warn_if_unwritable, write_code
from localllm.kernels.cpu.host import default_threads
from localllm.kernels.cuda.driver import CompileProgress, Defines, DeviceMemory, Launch
from localllm.kernels.cuda.installation import import_nvrtc
from localllm.kernels.parameters import Parameters, ParameterType, ordered
from localllm.parallel import in_order

#: Folder of the sources.
FOLDER = Path(__file__).parent
#: Options of every module.  Subnormal numbers are zero; other float arithmetic follows IEEE 754.
OPTIONS = ("--std=c++17", "-ftz=true", "--device-as-default-execution-space", "-lineinfo")
#: Modules that are compiled at once: each compilation takes some 100 MB.
_COMPILERS = 8
#: Maximum characters of a compiler log in an error message.
_MAX_LOG = 4000
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]*)"')
#: Macros for parameter lists, optionally numbered, and kernels with their parameter lists.
_PARAMETERS_MACRO = re.compile(r"^#define (\w*PARAMETERS)(?:\(i\))?((?:.*\\\n)*.*)", re.MULTILINE)
_KERNEL = re.compile(r"__global__[^{}]*?\b(\w+)\(([^(){}]*)\)\s*[{#]")
_PRAGMA_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")


# -- The source ----------------------------------------------------------------------------------------------------


def flat_source(name: str, folder: Path = FOLDER) -> str:
    """Return ``name``.cu with every ``#include "…"`` expanded in place; each file is included once."""
    if not _NAME.fullmatch(name):
        raise KernelError(f"{name!r} is not the name of a CUDA module")
    return "".join(_flatten(f"{name}.cu", folder, included=set()))


def _flatten(file: str, folder: Path, included: set[str]) -> Iterable[str]:
    included.add(file)
    try:
        text = (folder / file).read_text(encoding="utf-8")
    except OSError as error:
        raise KernelError(f"the CUDA source {file} cannot be read: {error}") from error
    shown = f"{folder.parent.name}/{folder.name}/{file}"
    yield f'#line 1 "{shown}"\n'
    for number, line in enumerate(text.splitlines(), start=1):
        if include := _INCLUDE.match(line):
            if include[1] not in included:
                yield from _flatten(include[1], folder, included)
            yield f'#line {number + 1} "{shown}"\n'
        else:
            yield "\n" if _PRAGMA_ONCE.match(line) else f"{line}\n"


_NULL = np.uint64(0)
_POINTER = ParameterType(
    "a pointer", (Buffer, Address, DeviceMemory, type(None)), lambda argument: _NULL if argument is None else argument
)
_NUMBERS = {
    "int": ParameterType("an int", (int,), np.int32),
    "int64_t": ParameterType("an int", (int,), np.int64),
    "float": ParameterType("a float", (float,), np.float32),
}


@functools.cache
def kernel_parameters(name: str) -> dict[str, Parameters]:
    """Return the parameters of the kernels in ``name``.cu, as declared there, by kernel."""
    source = flat_source(name)
    for macro, text in _PARAMETERS_MACRO.findall(source):
        one_line = text.replace("\\\n", " ")
        for i in "012":
            source = source.replace(f"{macro}({i})", one_line.replace("##i", i))
        source = re.sub(rf"\b{macro}\b", one_line, source)
    return {kernel: dict(map(_parameter, text.split(","))) for kernel, text in _KERNEL.findall(source)}


def _parameter(declaration: str) -> tuple[str, ParameterType]:
    *types, name = re.findall(r"\w+|\*", declaration)
    return name, _POINTER if "*" in types else _NUMBERS[types[0]]


def kernel_arguments(module: str, kernel: str, /, **arguments: Any) -> tuple[Any, ...]:
    """Return arguments in a kernel's order; see `localllm.kernels.parameters.ordered`."""
    return ordered(kernel, kernel_parameters(module)[kernel], arguments)


def with_arguments(launch: Launch, /, **arguments: Any) -> Launch:
    """Return a launch with arguments, which are passed by name."""
    values = ordered(launch.kernel, kernel_parameters(launch.module)[launch.kernel], arguments)
    return replace(launch, arguments=values)


def options(defines: Defines, architecture: str) -> tuple[str, ...]:
    """Return NVRTC's options for a module; ``architecture`` is "sm_80" for machine code, "compute_80" for PTX."""
    return (*OPTIONS, f"-arch={architecture}", *(f"-D{key}={value}" for key, value in sorted(defines.items())))


def architecture(capability: tuple[int, int], supported: Sequence[int]) -> str:
    """Return the target for a device: its architecture if NVRTC supports it (80 is 8.0), or PTX for its driver."""
    version = capability[0] * 10 + capability[1]
    if version in supported:
        return f"sm_{version}"
    older = [older_version for older_version in supported if older_version < version]
    if not older:
        raise DeviceError(
            f"the NVRTC installed compiles for compute capability {min(supported) / 10:.1f} and above, but the "
            f"device has {version / 10:.1f}: install an older one, with localllm[cuda12] or localllm[cuda13]"
        )
    return f"compute_{max(older)}"


# -- Compiling -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    binary: bytes  # a cubin, or PTX as text if requested
    log: str  # the compiler's warnings and other output


def compile_source(source: str, name: str, options: Sequence[str], nvrtc: Any) -> Compiled:
    """Compile a flat source; ``name`` is the module's name for messages."""
    program = nvrtc.createProgram(source, f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, tuple(options))
        is_ptx = any(option.startswith("-arch=compute_") for option in options)
        binary = nvrtc.getPTX(program) if is_ptx else nvrtc.getCUBIN(program)
        return Compiled(binary, nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as error:
        version = ".".join(map(str, nvrtc.getVersion()))
        log = nvrtc.getProgramLog(program).strip()[:_MAX_LOG] or str(error)
        raise KernelError(
            f"the CUDA module {name} does not compile with NVRTC {version} and {' '.join(options)}:\n{log}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)


class ModuleCompiler:
    """Compiles modules for architectures, unless they are in the cache."""

    def __init__(self, cupy: Any, folder: Path = FOLDER) -> None:
        self._nvrtc = import_nvrtc(cupy)
        self._folder = folder
        #: Compiled modules that were not fetched yet, by file name, in case the cache cannot be written.
        self._compiled: dict[str, bytes] = {}

    def architecture(self, capability: tuple[int, int]) -> str:
        """Return the target for a device; see `architecture`."""
        return architecture(capability, self._nvrtc.getSupportedArchs())

    def compile(
        self, modules: Iterable[tuple[str, Defines]], architecture: str, progress: CompileProgress | None = None
    ) -> None:
        """Compile the modules (name, defines) that are not in the cache."""
        sources = {s.file: s for s in (self._source(name, defines, architecture) for name, defines in modules)}
        missing = [s for s in sources.values() if s.file not in self._compiled and _cached(s.file) is None]
        if not missing:
            return
        warn_if_unwritable(cache_root())
        report = progress or (lambda n_done, n: None)
        report(0, len(missing))
        codes = in_order(self._compile, missing, min(_COMPILERS, default_threads()))
        for n_done, (source, code) in enumerate(zip(missing, codes, strict=True), 1):
            self._compiled[source.file] = code
            report(n_done, len(missing))

    def binary(self, name: str, defines: Defines, architecture: str) -> bytes:
        """Return a module's code, for a driver to load."""
        source = self._source(name, defines, architecture)
        ready = self._compiled.pop(source.file, None) or _cached(source.file)
        return self._compile(source) if ready is None else ready

    def _source(self, name: str, defines: Defines, architecture: str) -> _Source:
        text, flags = flat_source(name, self._folder), options(defines, architecture)
        digest = hashlib.sha256("\0".join((text, *flags, str(self._nvrtc.getVersion()))).encode()).hexdigest()
        return _Source(name, text, flags, f"{name}-{architecture}-{digest[:32]}.bin")

    def _compile(self, source: _Source) -> bytes:
        code = compile_source(source.text, source.name, source.options, self._nvrtc).binary
        if (folder := _cache_folder()) is not None:
            write_code(folder / source.file, code)
            _prune(folder)
        return code


@dataclass(frozen=True)
class _Source:
    """A module to compile, and the name of its cache file."""

    name: str
    text: str
    options: tuple[str, ...]
    file: str


# -- The cache on disk ---------------------------------------------------------------------------------------------


def _cache_folder() -> Path | None:
    root = cache_root()
    return None if root is None else root / "cuda"


def _cached(file: str) -> bytes | None:
    """Return a file of the cache, and mark it as used; None if it is missing or damaged."""
    folder = _cache_folder()
    code = None if folder is None else read_code(folder / file)
    if folder is not None and code is not None:
        with contextlib.suppress(OSError):
            os.utime(folder / file)
    return code


@functools.cache
def _prune(folder: Path) -> None:
    """Remove old files of the cache, once per process."""
    with contextlib.suppress(OSError):
        for file in filter(is_stale, folder.glob("*.bin")):
            file.unlink()
