"""Number of decoding threads: the knee of the curve of speed over threads, measured on each machine and cached.

Decoding reads every weight for each token.  On most machines, fewer threads than cores reach the full memory
bandwidth, and more threads only wait for each other.  Fast cores would also wait for slow cores, so there are at most
as many decoding threads as fast cores.  (A prompt is limited by multiplication and uses all cores.)

The choice is stored next to the compiled kernels, keyed by the machine and the processors that this process may use.
A measurement made while other programs computed is not used: then all cores decode, and the measurement is soon
repeated.
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

#: The share of the best bandwidth that is enough: more threads are not used.
ENOUGH = 0.95
#: Measurements for each number of threads; the best one counts.
TRIES = 4
#: Bytes that are read, and the maximum share of the available memory for them.  They are flushed from all caches
#: before each reading, so they come from memory, as weights do.  (A buffer larger than all caches would have the same
#: effect, but some servers have 480 MiB of cache.)  On Arm caches are not flushed, but few processors have such large
#: caches.
N_BYTES = 96 << 20
PART_OF_MEMORY = 10
#: Seconds for which a measurement is valid, and for which a disturbed measurement is.
KEPT_SECONDS, DISTURBED_SECONDS = 30 * 24 * 60 * 60, 10 * 60

#: Measures the bandwidth in bytes per second for a number of threads.
Bandwidth = Callable[[int], float]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ThreadChoice:
    """The number of threads, and the measurement that it is based on."""

    decode: int  # threads for steps with few tokens
    cores: int  # threads for steps with many tokens: physical cores that this process may use
    # (threads, bytes per second), by threads; empty with only one core
    curve: tuple[tuple[int, float], ...] = ()
    measured: float = 0.0  # time of the measurement, in seconds since 1970
    other_cpus: float = 0.0  # processors used by other programs during the measurement

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs computed during the measurement."""
        return self.other_cpus > OTHER_CPUS

    def is_fresh(self, now: float) -> bool:
        """Return whether the measurement is still valid."""
        return is_fresh(self.measured, self.other_cpus, now)


def is_fresh(measured: float, other_cpus: float, now: float) -> bool:
    """Return whether a measurement is still valid; False if its time is in the future."""
    return 0 <= now - measured < (DISTURBED_SECONDS if other_cpus > OTHER_CPUS else KEPT_SECONDS)


_lock = threading.RLock()
_choices: dict[str, ThreadChoice] = {}

# A fork waits for the lock, so that it is free in the child.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def choose_threads(target: Target, progress: Progress | None = None) -> ThreadChoice:
    """Return the choice for this machine: cached in this process or on disk, or measured in less than a second."""
    cores = default_threads()
    if cores == 1:
        return ThreadChoice(1, 1)
    key = machine_key(cores, target)
    with _lock:
        choice = _valid_choice(key, cores)
    if choice is None:
        # No lock is held while the caller's function runs, because it may wait for a thread that calls this function.
        _compile(target, progress)
        with _lock:
            choice = _valid_choice(key, cores)  # another thread may have measured it
            if choice is None:
                choice = _choices[key] = _measure(cores, target, default_threads(DECODES))
                _save(key, choice)
    return choice


def known_threads(target: Target) -> ThreadChoice | None:
    """Return the choice for this machine if it needs no measurement."""
    cores = default_threads()
    with _lock:
        return ThreadChoice(1, 1) if cores == 1 else _valid_choice(machine_key(cores, target), cores)


def _valid_choice(key: str, cores: int) -> ThreadChoice | None:
    """Return the choice of this process or of an earlier one; None if it is no longer valid."""
    choice = _choices.get(key) or _load(key, cores)
    if choice is None or not choice.is_fresh(time.time()):
        return None
    _choices[key] = choice
    return choice


def knee(bandwidth: Bandwidth, cores: int) -> tuple[int, dict[int, float]]:
    """Return the smallest number of threads that is almost as fast as any, and the measurements.

    Doubles the number of threads up to ``cores``, then halves the interval where the curve reaches `ENOUGH`: about
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
    """Compile the kernels of `_measure` that are not in the cache."""
    # Imported here: measurements are rare, and every start imports this module.
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
        other_load = OtherLoad()
        decode, curve = knee(lambda n: max(test.bandwidth(n) for _ in range(TRIES)), fast_cores)
        other_cpus = other_load.cpus()
    finally:
        workers.close()
    if other_cpus > OTHER_CPUS:
        decode = fast_cores
    return ThreadChoice(decode, cores, tuple(sorted(curve.items())), time.time(), other_cpus)


def machine_key(cores: int, target: Target) -> str:
    """Return a key of the machine and of the processors that this process may use."""
    counts = cores, default_threads(DECODES)
    facts = (cpu_model(), usable_cpus(), counts, cpu_quota(), last_level_cache(), target.name)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _file(key: str) -> Path | None:
    root = cache_root()
    return None if root is None else root / f"threads-{key}.json"


def _load(key: str, cores: int) -> ThreadChoice | None:
    """Return an earlier process's measurement; None if it is missing or invalid."""
    file = _file(key)
    if file is None:
        return None
    try:
        measurement = json.loads(file.read_bytes())
        curve = tuple((int(n), float(rate)) for n, rate in measurement["curve"])
        choice = ThreadChoice(
            int(measurement["decode"]), cores, curve, float(measurement["measured"]), float(measurement["other_cpus"])
        )
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return choice if 1 <= choice.decode <= cores else None


def _save(key: str, choice: ThreadChoice) -> None:
    """Store a choice for later processes.  If that fails, each process measures again."""
    file = _file(key)
    if file is not None:
        write_aside(file, json.dumps(asdict(choice)).encode())
