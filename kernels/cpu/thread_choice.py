"""How many threads decode: where the curve of its speed over threads bends, measured on each machine and kept.

Decoding reads every weight for each token, and on most machines fewer threads than there are cores do that as fast as
memory can.  More of them only wait for each other, and so would fast cores for slow ones: no more threads decode than
there are fast cores.  (A prompt, which multiplies, takes all cores.)

The choice is kept beside the compiled kernels, for the machine as this process may use it.  One that was measured
while other programs computed is not believed: all cores are used then, and it is soon measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from localllm.kernels.code_cache import cache_root, write_aside
from localllm.kernels.cpu.control_groups import cpu_quota
from localllm.kernels.cpu.host import (
    DECODES,
    OTHER_CPUS,
    OtherLoad,
    available_memory,
    cpu_model,
    default_threads,
    last_level_cache,
    usable_cpus,
)
from localllm.kernels.cpu.target import Target

#: The share of the best bandwidth at which more threads are not worth it.
ENOUGH = 0.95
#: Measurements with each number of threads, of which the best counts.
TRIES = 4
#: Bytes that are read, and the share of the available memory that they may take.  They are flushed from all caches
#: before each reading, so they come from memory, as weights do.  (A buffer larger than all caches would do the same,
#: but some servers have 480 MiB of them.)  On Arm, where nothing is flushed, few processors have caches as large.
N_BYTES = 96 << 20
PART_OF_MEMORY = 10
#: Seconds for which a measurement counts, and one that was disturbed.
KEPT_SECONDS, DISTURBED_SECONDS = 30 * 24 * 60 * 60, 10 * 60

#: Measures bytes a second with so many threads.
Bandwidth = Callable[[int], float]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ThreadChoice:
    """How many threads to use, and what was measured."""

    decode: int  # threads for steps of few tokens
    cores: int  # threads for steps of many: physical cores that this process may use
    # (threads, bytes a second), by threads; empty where there is one core, and nothing to choose
    curve: tuple[tuple[int, float], ...] = ()
    measured: float = 0.0  # when, in seconds since 1970
    other_cpus: float = 0.0  # processors that other programs kept busy meanwhile

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs computed while it was measured."""
        return self.other_cpus > OTHER_CPUS

    def is_fresh(self, now: float) -> bool:
        """Whether it still counts; not if it was measured in the future."""
        return 0 <= now - self.measured < (DISTURBED_SECONDS if self.is_disturbed else KEPT_SECONDS)


_lock = threading.RLock()
_chosen: dict[str, ThreadChoice] = {}

# A fork waits for the lock, so that nobody holds it in the child.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def choose_threads(target: Target, progress: Progress | None = None) -> ThreadChoice:
    """The choice for this machine: this process's, an earlier one's, or measured now, in part of a second."""
    cores = default_threads()
    if cores == 1:
        return ThreadChoice(1, 1)
    key = _machine(cores, target)
    with _lock:
        known = _known(key, cores)
    if known is None:
        # The caller's function runs while nothing is locked: it may wait for a thread that comes here as well.
        _compile(target, progress)
        with _lock:
            known = _known(key, cores)  # another thread may have measured meanwhile
            if known is None:
                known = _chosen[key] = _measure(cores, target, default_threads(DECODES))
                _save(key, known)
    return known


def _known(key: str, cores: int) -> ThreadChoice | None:
    """The choice that was made here, or by an earlier process, if it still counts."""
    known = _chosen.get(key) or _load(key, cores)
    if known is None or not known.is_fresh(time.time()):
        return None
    _chosen[key] = known
    return known


def knee(bandwidth: Bandwidth, cores: int) -> tuple[int, dict[int, float]]:
    """The fewest threads that decode as fast as any number does, nearly; and what was measured to find them.

    Doubles the number of threads up to ``cores``, and halves the gap in which the curve reaches `ENOUGH`: some
    2 log2(cores) measurements.
    """
    counts = [1 << i for i in range(cores.bit_length()) if 1 << i < cores] + [cores]
    curve = {n: bandwidth(n) for n in counts}
    enough = ENOUGH * max(curve.values())
    high = next(n for n in counts if curve[n] >= enough)
    low = max((n for n in counts if n < high), default=0)
    while high - low > 1:
        middle = (low + high) // 2
        curve[middle] = bandwidth(middle)
        low, high = (low, middle) if curve[middle] >= enough else (middle, high)
    return high, curve


def _compile(target: Target, progress: Progress | None) -> None:
    """Compiles what `_measure` runs, if it is not in the cache."""
    # Imported here: it is seldom measured, and every start imports this module.
    from localllm.kernels.cpu.program import Workers
    from localllm.kernels.cpu.roofline import DecodeTest

    workers = Workers(1)
    try:
        DecodeTest(workers, target, 1, progress)
    finally:
        workers.close()


def _measure(cores: int, target: Target, fast_cores: int) -> ThreadChoice:
    from localllm.kernels.cpu.program import Workers
    from localllm.kernels.cpu.roofline import DecodeTest

    n_bytes = min(N_BYTES, available_memory() // PART_OF_MEMORY)
    workers = Workers(cores)
    try:
        test = DecodeTest(workers, target, n_bytes)
        test.bandwidth()  # starts the threads
        others = OtherLoad()
        decode, curve = knee(lambda n: max(test.bandwidth(n) for _ in range(TRIES)), fast_cores)
        other_cpus = others.cpus()
    finally:
        workers.close()
    if other_cpus > OTHER_CPUS:
        decode = fast_cores
    return ThreadChoice(decode, cores, tuple(sorted(curve.items())), time.time(), other_cpus)


def _machine(cores: int, target: Target) -> str:
    """Tells machines apart, and what of one a process may use."""
    parts = cores, default_threads(DECODES)
    facts = (cpu_model(), usable_cpus(), parts, cpu_quota(), last_level_cache(), target.name)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _file(key: str) -> Path | None:
    root = cache_root()
    return None if root is None else root / f"threads-{key}.json"


def _load(key: str, cores: int) -> ThreadChoice | None:
    """An earlier process's measurement; None without a valid one."""
    file = _file(key)
    if file is None:
        return None
    try:
        found = json.loads(file.read_bytes())
        curve = tuple((int(n), float(rate)) for n, rate in found["curve"])
        choice = ThreadChoice(
            int(found["decode"]), cores, curve, float(found["measured"]), float(found["other_cpus"])
        )
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return choice if 1 <= choice.decode <= cores else None


def _save(key: str, choice: ThreadChoice) -> None:
    """Keeps a choice for later processes; where that cannot be, each measures anew."""
    file = _file(key)
    if file is not None:
        write_aside(file, json.dumps(asdict(choice)).encode())
