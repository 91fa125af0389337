"""Device names, and the backends that they open."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localllm.errors import Argument, DeviceError, Notice, UsageError
from localllm.kernels.cpu.host import LLVM_BYTES, check_memory

if TYPE_CHECKING:
    from localllm.kernels.backend import Backend
    from localllm.kernels.cuda.driver import Driver

#: Examples of names that `open_devices` accepts.
DEVICES = ("auto", "cpu", "cuda", "cuda:0,1", "reference")

#: Bytes of GPU memory in addition to the model: kernels, uploaded batches, and partial results of split attention.
GPU_OVERHEAD_BYTES = 256 << 20

#: Maximum number of GPUs that share each layer.
MAX_SPLIT_ROWS = 8

_CUDA = re.compile(r"(?:cuda|gpu)(?::?(\d{1,9}(?:,\d{1,9})*))?", re.ASCII)


@dataclass(frozen=True)
class Device:
    """A backend, ready to load a model or some layers of one."""

    name: str  # "cpu", "reference", or a GPU: "cuda:0"
    kernels: str  # description of the kernels
    threads: int  # number of threads for steps of many tokens (prefill)
    decode_threads: int  # number of threads for steps of few tokens (decode)
    backend: Backend
    close: Callable[[], None]  # ends the threads; nothing runs on the device afterwards
    # returns the available bytes of separate GPU memory; None if the device uses the host's memory
    free_memory: Callable[[], int] | None = None
    note: Notice | None = None  # for users who chose the device "auto"


def open_devices(
    name: str = "auto",
    *,
    threads: int | None = None,
    isa: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Device, ...]:
    """Return the backends for a device: the host, then GPUs.

    Args:
        name: "cpu"; "cuda" for all GPUs or "cuda:0,1" for some, with the CPU for layers that do not fit on them;
            "auto" for "cuda" if a GPU works, otherwise "cpu"; or "reference", plain numpy in float32. The reference
            is slow and exact; compare with it to find faults of kernels.
        threads: number of threads. Defaults to one per physical core that the process may use; decode then uses the
            number that reads memory fastest, which is measured once per machine and cached.
        isa: name of the instruction set of the CPU's kernels. Defaults to the best that the processor supports.
        progress: called with the numbers of compiled kernels and of all kernels to compile, if they are not cached:
            for the CPU during this call, for a GPU when a model is loaded.

    Raises:
        DeviceError: unknown device, or a GPU that does not work.
    """
    if name == "auto":
        gpus, note = _automatic(progress)
        return (replace(_cpu(threads, isa, progress), note=note), *gpus)
    if name == "cpu":
        return (_cpu(threads, isa, progress),)
    if name == "reference":
        if isa is not None:
            conflict = Argument("isa", isa), " chooses the CPU's kernels, but ", Argument("device", "reference")
            raise UsageError(*conflict, " has none: leave it out")
        from localllm.kernels.reference import ReferenceBackend

        return (Device("reference", "numpy", 1, 1, ReferenceBackend(), close=lambda: None),)
    if match := _CUDA.fullmatch(name):
        gpus = _cuda(cuda_indices(match[1]), progress)
        return (_cpu(threads, isa, progress), *gpus)
    if name != name.lower():
        return open_devices(name.lower(), threads=threads, isa=isa, progress=progress)
    raise DeviceError(f"there is no device {name!r}: choose one of {', '.join(map(repr, DEVICES))}")


def split_by_rows(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """Return the host, and its GPUs as one device that computes each layer on all GPUs."""
    host, *gpus = devices
    if not 2 <= len(gpus) <= MAX_SPLIT_ROWS:
        have = "is 1" if len(gpus) == 1 else f"are {len(gpus)}"
        why = (
            f" is 'row', which needs 2 to {MAX_SPLIT_ROWS} GPUs, but there {have}: leave it out, or name GPUs as in "
        )
        raise UsageError(Argument("split_mode"), why, Argument("device", "cuda:0,1"))
    # Imported here because most machines have no GPU.
    from localllm.kernels.cuda.backend import CUDABackend
    from localllm.kernels.cuda.row_split import RowSplitBackend

    backends = [gpu.backend for gpu in gpus if isinstance(gpu.backend, CUDABackend)]
    free = [gpu.free_memory for gpu in gpus if gpu.free_memory is not None]
    backend = RowSplitBackend(backends)
    return host, replace(
        gpus[0],
        name="+".join(gpu.name for gpu in gpus),
        kernels=" + ".join(dict.fromkeys(gpu.kernels for gpu in gpus)),
        backend=backend,
        close=backend.close,
        # Each GPU has an equal part of the model, so the smallest free memory counts.
        free_memory=lambda: len(free) * min(free_memory() for free_memory in free),
    )


def cuda_indices(numbers: str | None) -> tuple[int, ...] | None:
    """Return the GPUs that a device name lists, such as "0,1", in this order; None for all."""
    if numbers is None:
        return None
    indices = tuple(map(int, numbers.split(",")))
    if len(set(indices)) < len(indices):
        raise DeviceError(f"the device 'cuda:{numbers}' names a GPU twice: name each once")
    return indices


def gpu_memory(name: str) -> int:
    """Return the bytes available on the GPUs of a device name; 0 if no GPU works."""
    from localllm.kernels.cuda.installation import driver_cuda

    match = _CUDA.fullmatch("cuda" if name == "auto" else name.lower())
    if match is None or driver_cuda() is None:
        return 0
    from localllm.kernels.cuda.cupy_driver import open_driver
    from localllm.kernels.cuda.driver import check_capability

    free = 0
    try:
        driver = open_driver()
        for index in cuda_indices(match[1]) or range(driver.device_count):
            with contextlib.suppress(DeviceError):  # too old, or missing
                check_capability(index, driver.properties(index))
                free += max(0, driver.memory_info(index).free - GPU_OVERHEAD_BYTES)
    except DeviceError:
        return 0
    return free


def _cpu(threads: int | None, isa: str | None, progress: Callable[[int, int], None] | None) -> Device:
    if "llvmlite.binding" not in sys.modules:
        check_memory(LLVM_BYTES, "to load LLVM, which compiles kernels,")
    # Imported here because importing numba takes a third of a second.
    from localllm.kernels.cpu.backend import CPUBackend

    backend = CPUBackend(threads, isa, progress)
    kernels, workers = f"numba kernels for {backend.target.name}", backend.workers
    return Device("cpu", kernels, workers.n, backend.decode_threads, backend, workers.close)


def _automatic(progress: Callable[[int, int], None] | None) -> tuple[tuple[Device, ...], Notice | None]:
    """Return the GPUs that work. If there is a driver but no GPU works, also return the reason."""
    from localllm.kernels.cuda.installation import driver_cuda

    if driver_cuda() is None:
        return (), None
    try:
        return _cuda(None, progress), None
    except DeviceError as error:
        return (), Notice("the model runs on the CPU: ", *error.args)


def _cuda(indices: tuple[int, ...] | None, progress: Callable[[int, int], None] | None) -> tuple[Device, ...]:
    """Return the GPUs with these indices, or all GPUs that work."""
    # Imported here because most machines have no GPU.
    from localllm.kernels.cuda.cupy_driver import open_driver

    driver, gpus, failed = open_driver(), list[Device](), list[DeviceError]()
    for index in range(driver.device_count) if indices is None else indices:
        try:
            gpus.append(_gpu(driver, index, progress))
        except DeviceError as error:
            failed.append(error)
    if failed and (indices is not None or not gpus):
        raise failed[0]
    return tuple(gpus)


def _gpu(driver: Driver, index: int, progress: Callable[[int, int], None] | None) -> Device:
    from localllm.kernels.cuda.backend import CUDABackend

    backend, properties = CUDABackend(driver, index, progress=progress), driver.properties(index)
    return Device(
        f"cuda:{index}",
        f"CUDA kernels for {properties.name}",
        threads=1,
        decode_threads=1,
        backend=backend,
        close=backend.close,
        free_memory=lambda: max(0, driver.memory_info(index).free - GPU_OVERHEAD_BYTES),
    )
