"""The machine at hand: its processor, and how much of it this process may use.

Binary packages are imported where they are needed: ``localllm doctor`` asks even where one of them is broken.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import sys
import time
from pathlib import Path

from localllm.errors import NotEnoughMemoryError
from localllm.kernels.cpu.control_groups import cpu_quota, memory_left, text_of

#: Features of Arm processors by LLVM's names: the word (AT_HWCAP, AT_HWCAP2) of Linux's auxiliary vector, the bit in
#: it (arch/arm64/include/uapi/asm/hwcap.h), Windows' number (winnt.h), and macOS's name (sysctl).
_ARM_FEATURES = {
    "lse": (16, 8, 34, "hw.optional.arm.FEAT_LSE"),
    "fullfp16": (16, 10, 67, "hw.optional.arm.FEAT_FP16"),
    "dotprod": (16, 20, 43, "hw.optional.arm.FEAT_DotProd"),
    "sve": (16, 22, 46, ""),
    "sve2": (26, 1, 47, ""),
    "i8mm": (26, 13, 66, "hw.optional.arm.FEAT_I8MM"),
    "bf16": (26, 14, 68, "hw.optional.arm.FEAT_BF16"),
}

#: Processors that other programs may keep busy before what is measured means little.
OTHER_CPUS = 0.5

#: Bytes of memory, addresses more than all else, that LLVM takes, which every kernel needs.  (Measured: 163 MiB.)
LLVM_BYTES = 192 << 20

#: A limit of the address space below which hardly anything runs.
MIN_ADDRESS_SPACE = 1 << 30

#: Most threads that anybody may ask for: so many for each processor, or this many where there are few.
THREADS_PER_CPU, FEW_THREADS = 4, 64

_CPUS = Path("/sys/devices/system/cpu")
_MEMORY = Path("/proc/meminfo")
_OWN_MEMORY = Path("/proc/self/statm")


# -- The processor -------------------------------------------------------------------------------------------------


def family() -> str:
    """The processor family, as LLVM's target triples begin: "x86_64", "aarch64", …"""
    import llvmlite.binding as llvm

    return str(llvm.get_process_triple()).split("-")[0].replace("arm64", "aarch64")


def features() -> frozenset[str]:
    """The processor's features, by LLVM's names."""
    import llvmlite.binding as llvm

    found = frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)
    return found | _arm_features() if family() == "aarch64" else found


def _arm_features() -> frozenset[str]:
    """The features that the system reports; LLVM finds little on Linux and Windows, and on macOS nothing at all.

    Of unlike cores it tells what all have.  Each has NEON, and Apple's have the dot product since the M1.
    """
    if sys.platform == "darwin":
        apples = {"neon", "dotprod"}
        return frozenset(apples | {name for name, (*_, key) in _ARM_FEATURES.items() if key and _sysctl_int(key)})
    if sys.platform == "win32":
        is_present = ctypes.windll.kernel32.IsProcessorFeaturePresent
        return frozenset({"neon"} | {name for name, (_, _, number, _) in _ARM_FEATURES.items() if is_present(number)})
    try:
        getauxval = ctypes.CDLL(None).getauxval
    except AttributeError:  # another system
        return frozenset({"neon"})
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return frozenset(
        {"neon"} | {name for name, (word, bit, *_) in _ARM_FEATURES.items() if getauxval(word) >> bit & 1}
    )


def _sysctl_int(name: str) -> int:
    """A number that macOS knows by name; 0 where it does not."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value


def cpu_model() -> str:
    """The processor's name, as far as the system tells it."""
    if sys.platform == "linux":
        for line in text_of(Path("/proc/cpuinfo")).splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "Hardware"):
                return value.strip()
    if sys.platform == "darwin":
        return program_output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine() or "unknown"


# -- How much of it ------------------------------------------------------------------------------------------------


def usable_cpus() -> int:
    """Logical processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores() -> int:
    """Physical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        # Processors that share a core name the same siblings.
        siblings = {text_of(_CPUS / f"cpu{n}/topology/thread_siblings_list").strip() for n in os.sched_getaffinity(0)}
        if "" not in siblings:
            return len(siblings)
    import psutil

    usable = usable_cpus()
    return min(usable, psutil.cpu_count(logical=False) or usable)


def default_threads() -> int:
    """One thread for each physical core that this process may use, but none beyond what a control group grants.

    Threads wait for each other many times a token: one that has used up its quota stops them all.
    """
    quota = cpu_quota()
    cores = usable_cores()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def last_level_cache() -> int:
    """Bytes of the largest cache that a processor reads through; 0 where the system does not tell."""
    sizes = (text_of(index / "size").strip() for index in (_CPUS / "cpu0" / "cache").glob("index*"))
    return max((int(size[:-1]) << 10 for size in sizes if size[:-1].isdigit() and size[-1] == "K"), default=0)


def most_threads() -> int:
    """Threads that may be asked for: more than processors, for whoever wants to try, but not thousands."""
    return max(FEW_THREADS, THREADS_PER_CPU * usable_cpus())


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


def available_memory() -> int:
    """Bytes that this process can still take: what the system has, or less where something limits it."""
    return _least_memory()[0]


def memory_advice() -> str:
    """Advice where memory is short, beginning with a verb: it depends on the scarcest kind."""
    return _least_memory()[1]


def check_memory(n_bytes: int, what: str) -> None:
    """Raises NotEnoughMemoryError where ``what``, which would not survive that, does not fit into memory."""
    available, advice = _least_memory()
    if n_bytes > available:
        raise NotEnoughMemoryError(
            f"{what} takes {n_bytes / 1e6:,.0f} MB of memory, but {available / 1e6:,.0f} MB is available: {advice}"
        )


def address_space_limit() -> int | None:
    """Bytes of addresses that this process may have (``ulimit -v``); None where nothing limits them.

    Reserved memory counts, used or not: stacks of threads, the file of a model while it is read.
    """
    if sys.platform != "linux":  # others do not heed it, or have none
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _least_memory() -> tuple[int, str]:
    """Bytes that this process can still take, and what to do if they are too few."""
    limits = [(_system_memory(), "close other programs")]
    if (granted := memory_left()) is not None:
        limits.append((granted, "raise the memory limit of the container or service that this runs in"))
    if (limit := address_space_limit()) is not None:
        advice = f"raise the limit of the address space, which is {limit / 1e9:.2f} GB (ulimit -v)"
        limits.append((max(0, limit - _address_space_used()), advice))
    return min(limits)


def _address_space_used() -> int:
    pages = text_of(_OWN_MEMORY).split()
    return int(pages[0]) * mmap.PAGESIZE if pages else 0


def _system_memory() -> int:
    for line in text_of(_MEMORY).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    import psutil

    return int(psutil.virtual_memory().available)


def program_output(*command: str) -> str:
    """The output of a program; nothing where it is missing, fails, or hangs."""
    # Imported here and not by every start.
    import shutil
    import subprocess

    path = shutil.which(command[0])
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *command[1:]], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else ""
