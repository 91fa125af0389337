"""CUDA sources to PTX, and the resources of each kernel, by NVRTC and without a GPU.

The options are from `localllm.kernels.cuda.module`, and the include folder of CUDA's headers, which CuPy adds and
which only tests may use.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from localllm.errors import KernelError
from localllm.kernels.cuda.module import OPTIONS, Compiled, compile_source
from tests.cuda_on_cpu.errors import BuildError


@dataclass(frozen=True)
class Resources:
    """Resources of a thread (registers, bytes spilled, stack) and of a block (shared bytes), reported by ptxas."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@cache
def missing() -> str | None:
    """Return why NVRTC cannot be used on this machine, or None."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        return f"NVRTC cannot be used: {error}"
    return None


def architectures() -> list[int]:
    """Return the compute capabilities (80 for sm_80) that this NVRTC supports."""
    from cupy.cuda import nvrtc

    return list(nvrtc.getSupportedArchs())


def compile_ptx(source: str, architecture: int = 80, options: Sequence[str] = (), name: str = "kernel.cu") -> str:
    """Return the PTX of a CUDA source for ``compute_<architecture>``.  Raises BuildError with NVRTC's log."""
    text = _compile(source, (*options, f"-arch=compute_{architecture}"), name).binary
    return text.decode().rstrip("\0")


def resources(
    source: str, architecture: int = 80, options: Sequence[str] = (), name: str = "kernel.cu"
) -> dict[str, Resources]:
    """Return the resources of each kernel, compiled for ``sm_<architecture>``."""
    log = _compile(source, (*options, f"-arch=sm_{architecture}", "--ptxas-options=-v"), name).log
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


def _compile(source: str, options: Sequence[str], name: str) -> Compiled:
    reason = missing()
    if reason is not None:
        raise BuildError(reason)
    from cupy._core import core
    from cupy.cuda import nvrtc

    headers = [option for option in core.assemble_cupy_compiler_options(()) if option.startswith("-I")]
    try:
        return compile_source(source, name.removesuffix(".cu"), (*OPTIONS, *options, *headers), nvrtc)
    except KernelError as error:
        raise BuildError(str(error)) from error
