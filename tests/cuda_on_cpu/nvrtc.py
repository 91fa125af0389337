"""CUDA source to PTX, and the resources that each kernel takes, by NVRTC and without a GPU.

The options are those that CuPy's ``RawModule`` compiles with (``compile_using_nvrtc``), and ``-lineinfo``, which
changes no code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.cuda_on_cpu.errors import BuildError


@dataclass(frozen=True)
class Resources:
    """What ptxas says that a thread (registers, bytes spilled, stack) and a block (shared bytes) of a kernel take."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@cache
def missing() -> str | None:
    """Why NVRTC cannot be used here, or None."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        return f"NVRTC is not there: {error}"
    return None


def architectures() -> list[int]:
    """The compute capabilities (80 for sm_80) that this NVRTC compiles for."""
    from cupy.cuda import nvrtc

    return list(nvrtc.getSupportedArchs())


def compile_ptx(source: str, architecture: int = 80, options: Sequence[str] = (), name: str = "kernel.cu") -> str:
    """The PTX of a CUDA source for ``compute_<architecture>``.  Raises BuildError with NVRTC's log."""
    text = _compile(source, "ptx", (*options, f"-arch=compute_{architecture}", "-lineinfo"), name)[0]
    return text.decode().rstrip("\0")


def resources(
    source: str, architecture: int = 80, options: Sequence[str] = (), name: str = "kernel.cu"
) -> dict[str, Resources]:
    """What each kernel takes when it is compiled for ``sm_<architecture>``."""
    log = _compile(source, "cubin", (*options, f"-arch=sm_{architecture}", "--ptxas-options=-v"), name)[1]
    found = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        kernel = part[: part.index("'")]
        found[kernel] = Resources(
            _number(r"Used (\d+) registers", part),
            _number(r"(\d+) bytes spill stores", part) + _number(r"(\d+) bytes spill loads", part),
            _number(r"(\d+) bytes stack frame", part),
            _number(r"(\d+) bytes smem", part),
        )
    return found


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


class _Log:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def _compile(source: str, method: str, options: tuple[str, ...], name: str) -> tuple[bytes, str]:
    reason = missing()
    if reason is not None:
        raise BuildError(reason)
    from cupy._core import core
    from cupy.cuda import compiler

    of_cupy: tuple[str, ...] = core.assemble_cupy_compiler_options(tuple(options))
    program: Any = compiler._NVRTCProgram(source, name, method=method)
    log = _Log()
    try:
        binary, _ = program.compile((*of_cupy, "-ftz=true", "--device-as-default-execution-space"), log)
    except compiler.CompileException as error:
        raise BuildError(f"NVRTC refused {name}: {error}") from error
    return bytes(binary), log.text
