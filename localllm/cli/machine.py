"""What the command line finds out about the machine, for what it says of it: processors, other programs, folders."""

from __future__ import annotations

from localllm.kernels.cpu.host import OTHER_CPUS

#: How much the machine's speed may change before figures mean little.
_SCATTER = 1.5


def too_many_threads(threads: int) -> str | None:
    """What is to be said of a number of threads, if anything."""
    from localllm.kernels.cpu.host import usable_cpus

    cpus = usable_cpus()
    if threads <= cpus:
        return None
    return f"-t {threads} is more than the {cpus} processor{'s' * (cpus != 1)} here: they wait for each other, slowly"


def disturbance(other_cpus: float, scatter: float) -> str | None:
    """Why figures mean little, if they do.

    Args:
        other_cpus: see `localllm.kernels.cpu.host.OtherLoad`.
        scatter: the fastest that the machine was, divided by the slowest.
    """
    causes = []
    if other_cpus > OTHER_CPUS:
        causes.append(f"other programs kept {other_cpus:.1f} processors busy")
    if scatter > _SCATTER:
        causes.append(f"the machine was at times {scatter:.1f} times as fast as at others")
    return f"{' and '.join(causes)}: these figures mean little" if causes else None


def unwritable_cache() -> str | None:
    """What is to be said of the folder for compiled kernels, if it cannot be written."""
    from localllm.kernels.code_cache import CACHE_VARIABLE, cache_root
    from localllm.kernels.cpu.compiler import cache_fault

    fault = cache_fault()
    if fault is None:
        return None
    folder = cache_root() or "a folder in the home"
    return (
        f"compiled kernels cannot be saved in {folder} ({fault}), so every start compiles them: make room there if "
        f"it is full, or name a folder that can be written in the environment variable {CACHE_VARIABLE}"
    )
