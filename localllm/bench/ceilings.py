"""Measured ceilings of the machine for the tests of `localllm bench`.

A token passes through the devices of a model in order, so their times add up. On a prompt, devices work at the same
time on different parts, so the slowest device counts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from localllm.bench.workload import ModelCost, Test
from localllm.kernels.cpu.host import available_memory
from localllm.kernels.cpu.roofline import Roofline
from localllm.kernels.cpu.target import choose
from localllm.loading.model_info import ModelInfo

#: Maximum bytes to read in a bandwidth test, and maximum part of the free memory, as a divisor.
_MAX_READ, _PART_OF_MEMORY = 1 << 30, 4

#: Measures the minimum seconds of a device for a generated token, or for a prompt.
Seconds = Callable[[], float]


def gpu_index(device: str) -> int | None:
    """Return the index of a GPU, 1 of "cuda:1"; None for other devices."""
    device_type, _, number = device.partition(":")
    return int(number) if device_type == "cuda" else None


def has_gpu(info: ModelInfo) -> bool:
    return any(gpu_index(device) is not None for device in info.placement.devices)


def threads_of(info: ModelInfo, test: Test) -> int:
    return info.decode_threads if test.kind == "tg" else info.threads


def unit_of(info: ModelInfo, test: Test) -> str:
    """Return the unit of a test's ceiling. On GPUs, it is usual to count additions too."""
    if test.kind == "tg":
        return "B/s"
    return "FLOP/s" if has_gpu(info) else "MAC/s"


def amount(info: ModelInfo, test: Test, work: ModelCost) -> float:
    """Return the bytes of a generated token, or the operations of a whole prompt, in the base unit of `unit_of`."""
    if test.kind == "tg":
        return work.bytes_per_token(test)
    return sum(work.products(test)) * (2 if has_gpu(info) else 1)


def ceiling(info: ModelInfo, test: Test, work: ModelCost, isa: str | None, stack: ExitStack) -> Seconds | None:
    """Return a function that measures the machine's ceiling in `unit_of`; None if a device has no ceiling. ``stack``
    releases its resources."""
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
    # The ceiling assumes that the kinds of multiplications run in sequence, each at full speed.
    return lambda: of_bytes / roofline.dot_rate() + of_floats / roofline.fma_rate()


def _gpu_seconds(index: int, test: Test, work: ModelCost) -> Seconds:
    # Imported here because most machines have no GPU.
    from localllm.kernels.cuda.cupy_driver import open_driver
    from localllm.kernels.cuda.roofline import CUDARoofline

    roofline = CUDARoofline(open_driver(), index)
    n_bytes, (of_bytes, of_floats) = work.bytes_per_token(test), work.products(test)
    if test.kind == "tg":
        return lambda: n_bytes / roofline.copy_bandwidth()
    return lambda: 2 * (of_bytes / roofline.rate("int8") + of_floats / roofline.rate("f16"))
