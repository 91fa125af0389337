"""Warnings about the machine: too many threads, other programs, unsteady speed."""

from __future__ import annotations

from localllm.kernels.cpu.host import OTHER_CPUS

#: Maximum ratio of the machine's highest to lowest speed in a reliable measurement.
_SCATTER = 1.5


def too_many_threads(threads: int) -> str | None:
    """Return a warning if there are more threads than processors, otherwise None."""
    from localllm.kernels.cpu.host import usable_cpus

    cpus = usable_cpus()
    if threads <= cpus:
        return None
    return f"-t {threads} is more than the {cpus} processor{'s' * (cpus != 1)} here, which is slow: use fewer threads"


def disturbance(other_cpus: float, scatter: float) -> str | None:
    """Return the reason if measurements are unreliable, otherwise None.

    ``other_cpus``: see `localllm.kernels.cpu.host.OtherLoad`.  ``scatter``: highest speed divided by lowest speed.
    """
    causes = []
    if other_cpus > OTHER_CPUS:
        causes.append(f"other programs kept {other_cpus:.1f} processors busy")
    if scatter > _SCATTER:
        causes.append(f"the machine's speed varied by a factor of {scatter:.1f}")
    return f"{' and '.join(causes)}: the results are unreliable" if causes else None
