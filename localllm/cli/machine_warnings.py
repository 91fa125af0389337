"""Warnings about the machine: too many threads, other programs, unsteady speed."""

from __future__ import annotations

from localllm.kernels.cpu.host import OTHER_CPUS

#: How much the machine's speed may change before figures mean little.
_SCATTER = 1.5


def too_many_threads(threads: int) -> str | None:
    """A warning of more threads than processors, if there are."""
    from localllm.kernels.cpu.host import usable_cpus

    cpus = usable_cpus()
    if threads <= cpus:
        return None
    return f"-t {threads} is more than the {cpus} processor{'s' * (cpus != 1)} here: they wait for each other, slowly"


def disturbance(other_cpus: float, scatter: float) -> str | None:
    """Why figures mean little, if they do.  ``other_cpus``: see `localllm.kernels.cpu.host.OtherLoad`; ``scatter``:
    the fastest that the machine was, divided by the slowest."""
    causes = []
    if other_cpus > OTHER_CPUS:
        causes.append(f"other programs kept {other_cpus:.1f} processors busy")
    if scatter > _SCATTER:
        causes.append(f"the machine was at times {scatter:.1f} times as fast as at others")
    return f"{' and '.join(causes)}: these figures mean little" if causes else None
