"""Device names, and the backends that each one means."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

from localllm.errors import DeviceError, UsageError
from localllm.kernels.cpu.host import LLVM_BYTES, check_memory
from localllm.kernels.ops import Backend

#: Names that `open_devices` knows.
DEVICES = ("auto", "cpu", "cuda", "cuda:0,1", "reference")

_CUDA = re.compile(r"(?:cuda|gpu)(?::(\d+(?:,\d+)*))?")


@dataclass(frozen=True)
class Device:
    """A backend, ready to load a model or some layers of one.

    Attributes:
        name: "cpu", "reference", or that of a GPU, "cuda:0".
        kernels: which kernels run, in words.
        threads: how many compute steps of many tokens, as prompts are.
        decode_threads: how many compute steps of few.
        close: ends the threads; nothing runs on the device afterwards.
        free_memory: bytes that can be had of the device's own memory; None where that is the host's.
    """

    name: str
    kernels: str
    threads: int
    decode_threads: int
    ops: Backend
    close: Callable[[], None]
    free_memory: Callable[[], int] | None = None


def open_devices(
    name: str = "auto",
    *,
    threads: int | None = None,
    isa: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Device, ...]:
    """The backends for a device: the host's, then those of GPUs.

    Args:
        name: "cpu"; "auto", the best there is, which is the CPU; "cuda", all GPUs, or "cuda:0,1", these ones, with
            the CPU for layers that they have no room for; or "reference", plain numpy in float32: slow, exact, for
            finding out whether a kernel is at fault.
        threads: how many compute; by default one for each physical core that the process may use, and to decode as
            many of them as read memory fastest, which is measured on each machine and kept.
        isa: the instruction set of the CPU's kernels, by name; by default the best that runs here.
        progress: called with the kernels compiled so far and those to compile, when they are not cached yet.

    Raises:
        DeviceError: there is no such device here, or it has not that instruction set; says why.
        UsageError: there is no instruction set of that name, or the device has none; or so many threads are out of
            range.
    """
    if name in ("auto", "cpu"):
        return (_cpu(threads, isa, progress),)
    if name == "reference":
        if isa is not None:
            raise UsageError(f"isa={isa!r} chooses the CPU's kernels, but device='reference' has none: leave it out")
        return (_reference(),)
    if found := _CUDA.fullmatch(name):
        gpus = _cuda(name, cuda_indices(found[1]), progress)
        return (_cpu(threads, isa, progress), *gpus)
    raise DeviceError(f"there is no device {name!r}: choose one of {', '.join(map(repr, DEVICES))}")


def cuda_indices(numbers: str | None) -> tuple[int, ...] | None:
    """The GPUs that a device's name lists, in this order, as "0,1"; None for all.

    Raises:
        DeviceError: one is there twice.
    """
    if numbers is None:
        return None
    indices = tuple(map(int, numbers.split(",")))
    if len(set(indices)) < len(indices):
        raise DeviceError(f"the device 'cuda:{numbers}' names a GPU twice: name each once")
    return indices


def _cpu(threads: int | None, isa: str | None, progress: Callable[[int, int], None] | None) -> Device:
    if "llvmlite.binding" not in sys.modules:
        check_memory(LLVM_BYTES, "to load LLVM, which compiles kernels,")
    # Imported here: numba takes a third of a second.
    from localllm.kernels.cpu.ops import CPUOps

    ops = CPUOps(threads, isa, progress)
    return Device(
        "cpu", f"numba kernels for {ops.target.name}", ops.workers.n, ops.decode_threads, ops, ops.workers.close
    )


def _cuda(
    name: str, indices: tuple[int, ...] | None, progress: Callable[[int, int], None] | None
) -> tuple[Device, ...]:
    """The GPUs of these numbers, or all there are."""
    raise DeviceError(
        f"device {name!r} cannot be used: this version of localllm has no CUDA backend; use device='cpu'"
    )


def _reference() -> Device:
    from localllm.kernels.reference import ReferenceOps

    return Device("reference", "numpy", 1, 1, ReferenceOps(), close=lambda: None)
