"""What the harness can complain of: PTX that it does not know, a wrong launch, or a kernel that does wrong."""

from __future__ import annotations


class CudaOnCpuError(Exception):
    """The root of the harness's errors."""


class PtxError(CudaOnCpuError):
    """Text that is not the PTX that we understand."""


class UnsupportedInstruction(PtxError):
    """An instruction, or a variant of one, that has no translation.  It is refused, never guessed."""


class BuildError(CudaOnCpuError):
    """NVRTC, ptxas or g++ refused a source, or is not there."""


class LaunchError(CudaOnCpuError):
    """A launch that CUDA would refuse, or arguments that do not fit the kernel's parameters."""


class KernelFault(CudaOnCpuError):
    """A kernel did what it must not do.

    Attributes:
        kind: ``race``, ``out of bounds``, ``uninitialised``, ``misaligned``, ``deadlock``, ``endless loop``,
            ``barrier``, ``collective``, ``async copy``, ``division by zero``, ``trap`` or ``crash``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
