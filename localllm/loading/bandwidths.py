"""Measured bandwidths of the host's memory, of GPUs and of the link between them, to choose a placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from localllm.errors import DeviceError
from localllm.loading.devices import Device

#: Seconds per block that the host computes between kernels of a GPU, in addition to computing and copying it: waiting
#: for the GPU, waking the threads and starting the next kernels. An estimate.
BLOCK_S = 60e-6
#: Bytes per second of the host's memory if they were not measured, as with a single core.
UNKNOWN_HOST = 10e9


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per second."""

    host: float  # of weights that the CPU reads
    gpus: float  # read and written by copies in the memory of the slowest GPU
    link: float  # from the host to a GPU

    def token_s(self, on_host: int, on_gpus: int, n_blocks: int, copied: int) -> float:
        """Return the seconds for reading the weights of a token.

        Args:
            on_host, on_gpus: bytes of the weights that the token needs.
            n_blocks, copied: blocks that the host computes for GPUs, and the bytes copied for the token.
        """
        return on_host / self.host + on_gpus / self.gpus + n_blocks * BLOCK_S + copied / self.link


def measure(devices: Sequence[Device]) -> Bandwidths | None:
    """Measure the bandwidths of a host and its GPUs in about a tenth of a second; None if a GPU cannot share layers
    with the host."""
    # Imported here because most machines have no GPU.
    from localllm.kernels.cpu.backend import CPUBackend
    from localllm.kernels.cpu.thread_choice import choose_threads
    from localllm.kernels.cuda.backend import CUDABackend

    host, *gpus = (device.backend for device in devices)
    if not isinstance(host, CPUBackend):
        return None
    copies = list[Mapping[str, float]]()
    for gpu in gpus:
        if not isinstance(gpu, CUDABackend):
            return None
        try:
            copies.append(gpu.measured_copies())
        except DeviceError:  # the GPU has no memory for a measurement
            return None
    curve = choose_threads(host.target).curve
    return Bandwidths(
        max((rate for _, rate in curve), default=UNKNOWN_HOST),
        min(rates["memory"] for rates in copies),
        min(rates["link"] for rates in copies),
    )
