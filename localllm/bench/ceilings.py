"""Ceilings of the machine for what `localllm bench` measures, measured too.

A token goes through the devices that share a model one after the other: what they need adds up.  Of a prompt they
work on parts at the same time, and the slowest one decides.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from localllm.bench.workload import ModelCost, Test
from localllm.kernels.cpu.host import available_memory
from localllm.kernels.cpu.roofline import Roofline
from localllm.kernels.cpu.target import choose
from localllm.loading.model_info import ModelInfo

#: Bytes that a test of the bandwidth reads at most, and the part of the free memory that it takes at most.
_MAX_READ, _PART_OF_MEMORY = 1 << 30, 4

#: What measures, now, the seconds that a device needs at least: for a token that a test generates, or for a prompt.
Seconds = Callable[[], float]


def gpu_index(device: str) -> int | None:
    """The number of a GPU, 1 of "cuda:1"; None for other devices."""
    kind, _, number = device.partition(":")
    return int(number) if kind == "cuda" else None


def has_gpu(info: ModelInfo) -> bool:
    """Whether some of a model lies on a GPU."""
    return any(gpu_index(device) is not None for device in info.placement.devices)


def threads_of(info: ModelInfo, test: Test) -> int:
    return info.decode_threads if test.kind == "tg" else info.threads


def unit_of(info: ModelInfo, test: Test) -> str:
    """The unit of a test beside tokens.  On GPUs it is usual to count additions too."""
    if test.kind == "tg":
        return "B/s"
    return "FLOP/s" if has_gpu(info) else "MAC/s"


def amount(info: ModelInfo, test: Test, work: ModelCost) -> float:
    """How many of those a token takes that a test generates, or a whole prompt."""
    if test.kind == "tg":
        return work.bytes_per_token(test)
    return sum(work.products(test)) * (2 if has_gpu(info) else 1)


def ceiling(info: ModelInfo, test: Test, work: ModelCost, isa: str | None, stack: ExitStack) -> Seconds | None:
    """A function that measures the machine's ceiling in `unit_of`; None where a device has none.  ``stack`` ends what
    it takes."""
    if "reference" in info.placement.devices:
        return None
    placement = info.placement
    needs = [
        _seconds(info, device, test, work.on(device, info), isa, stack)
        for device in placement.devices
        if placement.layers_on(device) or device == placement.devices[-1]
    ]
    in_all = amount(info, test, work)
    together = sum if test.kind == "tg" else max
    return lambda: in_all / together(seconds() for seconds in needs)


def _seconds(info: ModelInfo, device: str, test: Test, work: ModelCost, isa: str | None, stack: ExitStack) -> Seconds:
    if (index := gpu_index(device)) is not None:
        return _gpu_seconds(index, test, work)
    n_bytes, (of_bytes, of_floats) = work.bytes_per_token(test), work.products(test)
    n_read = int(min(n_bytes, _MAX_READ, available_memory() // _PART_OF_MEMORY))
    roofline = stack.enter_context(Roofline(threads_of(info, test), choose(isa), n_read))
    if test.kind == "tg":
        return lambda: n_bytes / roofline.read_bandwidth()
    # At full speed each kind of multiplication would take its own time, one after the other.
    return lambda: of_bytes / roofline.dot_rate() + of_floats / roofline.fma_rate()


def _gpu_seconds(index: int, test: Test, work: ModelCost) -> Seconds:
    # Imported here, as all of CUDA's: most machines have no GPU.
    from localllm.kernels.cuda.cupy_driver import open_driver
    from localllm.kernels.cuda.roofline import CUDARoofline

    roofline = CUDARoofline(open_driver(), index)
    n_bytes, (of_bytes, of_floats) = work.bytes_per_token(test), work.products(test)
    if test.kind == "tg":
        return lambda: n_bytes / roofline.copy_bandwidth()
    return lambda: 2 * (of_bytes / roofline.rate("int8") + of_floats / roofline.rate("f16"))
