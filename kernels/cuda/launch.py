"""Launches of kernels: what says which to make, and what makes them, have this between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from localllm.kernels.cuda.driver import Argument, Defines


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel of the module ``module``.cu, compiled with ``defines``.

    Attributes:
        arguments: the kernel's; none until they are `given`, for what chooses the geometry does not know them.
    """

    module: str
    kernel: str
    defines: Defines
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int = 0
    arguments: tuple[Argument, ...] = ()

    def given(self, *arguments: Argument) -> Launch:
        """The same with arguments."""
        return replace(self, arguments=arguments)
