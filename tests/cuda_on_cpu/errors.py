"""Errors of the emulator: unknown PTX, invalid launches, and faults of kernels."""

from __future__ import annotations


class CudaOnCpuError(Exception):
    """Base class of the emulator's errors."""


class PtxError(CudaOnCpuError):
    """Text that is not valid PTX, or PTX that the parser does not know."""


class UnsupportedInstruction(PtxError):
    """An instruction, or a variant of one, without a translation."""


class BuildError(CudaOnCpuError):
    """NVRTC, ptxas or g++ is missing, or refused a source."""


class LaunchError(CudaOnCpuError):
    """A launch that CUDA would refuse, or arguments that do not match the parameters of the kernel."""


class KernelFault(CudaOnCpuError):
    """An invalid action of a kernel.

    Attributes:
        kind: ``race``, ``out of bounds``, ``uninitialised``, ``misaligned``, ``deadlock``, ``endless loop``,
            ``barrier``, ``collective``, ``async copy``, ``division by zero``, ``trap`` or ``crash``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
