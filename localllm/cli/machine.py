"""What the command line finds out about the machine, for what it says of it: processors, other programs, folders."""

from __future__ import annotations

import time

#: Processors that other programs may keep busy, and how much the machine's speed may change, before figures mean
#: little.
_OTHER_CPUS, _SCATTER = 0.5, 1.5


def too_many_threads(threads: int) -> str | None:
    """What is to be said of a number of threads, if anything."""
    from localllm.kernels.cpu.host import usable_cpus

    cpus = usable_cpus()
    if threads <= cpus:
        return None
    return f"-t {threads} is more than the {cpus} processor{'s' * (cpus != 1)} here: they wait for each other, slowly"


class OtherLoad:
    """How much other programs compute from now on."""

    def __init__(self) -> None:
        self._began = time.monotonic(), _other_seconds()

    def cpus(self) -> float:
        """Processors that they kept busy on average."""
        began, seconds = self._began
        return max(0.0, _other_seconds() - seconds) / max(1e-9, time.monotonic() - began)


def _other_seconds() -> float:
    """Seconds that processors worked for others, a hypervisor's other guests among them."""
    import psutil

    times = psutil.cpu_times()._asdict()
    busy = sum(times.get(kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
    return float(busy - time.process_time())


def disturbance(other_cpus: float, scatter: float) -> str | None:
    """Why figures mean little, if they do.

    Args:
        other_cpus: see `OtherLoad`.
        scatter: the fastest that the machine was, divided by the slowest.
    """
    causes = []
    if other_cpus > _OTHER_CPUS:
        causes.append(f"other programs kept {other_cpus:.1f} processors busy")
    if scatter > _SCATTER:
        causes.append(f"the machine was at times {scatter:.1f} times as fast as at others")
    return f"{' and '.join(causes)}: these figures mean little" if causes else None


def unwritable_cache() -> str | None:
    """What is to be said of the folder for compiled kernels, if it cannot be written."""
    from localllm.kernels.cpu.compiler import CACHE_VARIABLE, cache_is_writable, cache_root

    if cache_is_writable():
        return None
    folder = cache_root() or "this user's home, which is not there"
    return (
        f"compiled kernels cannot be saved in {folder}, so every start compiles them: name a folder that can "
        f"be written in the environment variable {CACHE_VARIABLE}"
    )
