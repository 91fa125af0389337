"""Properties of this machine: its processor, and the cores and memory available to this process.

Binary packages are imported inside functions, because ``localllm doctor`` must run even if a package is broken.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import struct
import sys
import time
from pathlib import Path

from localllm.errors import NotEnoughMemoryError
from localllm.kernels.cpu.control_groups import cpu_quota, memory_left, text_of

#: Features of Arm processors by LLVM's names: the word (AT_HWCAP, AT_HWCAP2) and the bit in Linux's auxiliary vector
#: (arch/arm64/include/uapi/asm/hwcap.h), the number on Windows (winnt.h), and the name on macOS (sysctl).
_ARM_FEATURES = {
    "lse": (16, 8, 34, "hw.optional.arm.FEAT_LSE"),
    "fullfp16": (16, 10, 67, "hw.optional.arm.FEAT_FP16"),
    "dotprod": (16, 20, 43, "hw.optional.arm.FEAT_DotProd"),
    "sve": (16, 22, 46, ""),
    "sve2": (26, 1, 47, ""),
    "i8mm": (26, 13, 66, "hw.optional.arm.FEAT_I8MM"),
    "bf16": (26, 14, 68, "hw.optional.arm.FEAT_BF16"),
}

#: LLVM's names of features that have another name on Linux.
_LLVM_NAMES = {
    "avx512_vnni": "avx512vnni",
    "avx_vnni": "avxvnni",
    "avx_vnni_int8": "avxvnniint8",
    "avx512_bf16": "avx512bf16",
    "amx_int8": "amx-int8",
    "amx_bf16": "amx-bf16",
}

#: Processors that other programs may use before a measurement counts as disturbed.
OTHER_CPUS = 0.5

#: Bytes of address space, mostly not resident, that LLVM takes.  Every kernel needs LLVM.  (Measured: 163 MiB.)
LLVM_BYTES = 192 << 20

#: An address space limit below which almost no program runs.
MIN_ADDRESS_SPACE = 1 << 30

#: Relative core speeds: cores of at least the first value decode; cores below the second compute nothing, because all
#: threads would wait for them at each barrier.
DECODES, COMPUTES = 0.7, 0.25
#: Relative speed of the next lower class of cores if the system reports only classes, and of an Intel E core compared
#: with a P core at the same clock.
LOWER_CLASS = EFFICIENT = 0.6

#: Maximum number of threads: this many per processor, or ``FEW_THREADS`` if that is more.
THREADS_PER_CPU, FEW_THREADS = 4, 64

#: Minimum size of a SYSTEM_CPU_SET_INFORMATION (winnt.h).
_CPU_SET_BYTES = 32

_CPUS = Path("/sys/devices/system/cpu")
_MEMORY = Path("/proc/meminfo")
_OWN_MEMORY = Path("/proc/self/statm")


# -- The processor -------------------------------------------------------------------------------------------------


def family() -> str:
    """Return the processor family, as in LLVM's target triples: "x86_64", "aarch64", …"""
    if sys.platform == "linux" and sys.maxsize > 1 << 32 and (machine := os.uname().machine) in ("x86_64", "aarch64"):
        return machine
    import llvmlite.binding as llvm

    return str(llvm.get_process_triple()).split("-")[0].replace("arm64", "aarch64")


def features() -> frozenset[str]:
    """Return the processor's features, by LLVM's names.

    Linux reports the features of x86-64 processors.  On other systems LLVM reports them, which is slow to import.
    """
    if sys.platform == "linux" and family() == "x86_64":
        if flags := _linux_flags():
            return frozenset(_LLVM_NAMES.get(flag, flag) for flag in flags)
    import llvmlite.binding as llvm

    features = frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)
    return features | _arm_features() if family() == "aarch64" else features


def _linux_flags() -> list[str]:
    """Return the features of an x86-64 processor by Linux's names; empty if Linux does not report them."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            text = file.read(1 << 14)  # of the first processor: there can be hundreds
    except OSError:
        return []
    return text.partition(b"\nflags")[2].partition(b"\n")[0].decode("ascii", "replace").split()[1:]


def _arm_features() -> frozenset[str]:
    """Return the features that the system reports; LLVM detects few on Linux and Windows, and none on macOS.

    If cores differ, the system reports the features that all cores have.  All have NEON, and Apple's have the dot
    product since the M1.
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
    """Return a number that macOS stores under a name; 0 if it has no such name."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value


def cpu_model() -> str:
    """Return the processor's name, or its architecture if the system does not report a name."""
    if sys.platform == "linux":
        for line in text_of(Path("/proc/cpuinfo")).splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "Hardware"):
                return value.strip()
    if sys.platform == "darwin":
        return program_output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine() or "unknown"


# -- Available resources -------------------------------------------------------------------------------------------


def usable_cpus() -> int:
    """Return the number of logical processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_speeds() -> list[float]:
    """Return the speed of each physical core that this process may use, relative to the fastest core.

    All speeds are equal if the system does not report them.
    """
    tell = {"darwin": _speeds_on_macos, "win32": _speeds_on_windows}.get(sys.platform, _speeds_on_linux)
    if not (speeds := tell()):
        import psutil

        usable = usable_cpus()
        speeds = [1.0] * min(usable, psutil.cpu_count(logical=False) or usable)
    fastest = max(speeds)
    return [speed / fastest if fastest else 1.0 for speed in speeds]


def _speeds_on_linux() -> list[float]:
    """Read capacities (Arm) or maximum clocks; on hybrid Intel processors also which cores are Atoms."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    atoms, speeds = _cpu_list(text_of(_CPUS.parent.parent / "cpu_atom" / "cpus")), dict[str, float]()
    for n in os.sched_getaffinity(0):
        cpu = _CPUS / f"cpu{n}"
        speed = text_of(cpu / "cpu_capacity") or text_of(cpu / "cpufreq" / "cpuinfo_max_freq") or "0"
        siblings = text_of(cpu / "topology" / "thread_siblings_list").strip()  # equal for threads of one core
        speeds[siblings] = float(speed) * (EFFICIENT if n in atoms else 1)
    return [] if "" in speeds else list(speeds.values())


def _cpu_list(text: str) -> set[int]:
    """Return the numbers in a list such as ``0-3,8``."""
    ranges = [range_text.partition("-") for range_text in text.strip().split(",") if range_text]
    return {n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)}


def _speeds_on_macos() -> list[float]:
    levels = range(_sysctl_int("hw.nperflevels"))  # the fastest first; empty on Intel
    return [LOWER_CLASS**i for i in levels for _ in range(_sysctl_int(f"hw.perflevel{i}.physicalcpu"))]


def _speeds_on_windows() -> list[float]:
    """Read efficiency classes; the highest class is the fastest."""
    classes = dict[tuple[int, int], int]()
    if sys.platform == "win32":
        call = ctypes.windll.kernel32.GetSystemCpuSetInformation
        process, n_bytes = ctypes.c_void_p(-1), ctypes.c_ulong(0)
        call(None, 0, ctypes.byref(n_bytes), process, 0)
        data, offset = ctypes.create_string_buffer(n_bytes.value), 0
        n_known = n_bytes.value if call(data, n_bytes, ctypes.byref(n_bytes), process, 0) else 0
        while offset + _CPU_SET_BYTES <= n_known:
            size, _, _, group, _, core, _, _, efficiency = struct.unpack_from("<IIIHBBBBB", data, offset)
            classes[group, core] = efficiency
            offset += max(size, _CPU_SET_BYTES)
    return [LOWER_CLASS ** (max(classes.values()) - efficiency) for efficiency in classes.values()]


def has_unequal_cores() -> bool:
    """Return whether core speeds differ enough that threads may get unequal work."""
    return min(core_speeds()) < DECODES


def default_threads(least_speed: float = COMPUTES) -> int:
    """Return one thread per physical core of at least this speed, limited by the quota of the control group.

    Threads wait for each other many times per token: a thread that has used up its quota stops all others.
    """
    quota = cpu_quota()
    cores = sum(speed >= least_speed for speed in core_speeds())
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def last_level_cache() -> int:
    """Return the bytes of the largest cache of a processor; 0 if the system does not report it."""
    sizes = (text_of(index / "size").strip() for index in (_CPUS / "cpu0" / "cache").glob("index*"))
    return max((int(size[:-1]) << 10 for size in sizes if size[:-1].isdigit() and size[-1] == "K"), default=0)


def most_threads() -> int:
    """Return the maximum number of threads: more than processors, to allow experiments, but not thousands."""
    return max(FEW_THREADS, THREADS_PER_CPU * usable_cpus())


class OtherLoad:
    """Measures the load of other programs from the moment it is created."""

    def __init__(self) -> None:
        self._began = time.monotonic(), _other_seconds()

    def cpus(self) -> float:
        """Return the average number of processors used by other programs."""
        began, seconds = self._began
        return max(0.0, _other_seconds() - seconds) / max(1e-9, time.monotonic() - began)


def _other_seconds() -> float:
    """Return the processor seconds used by other programs, including other guests of a hypervisor."""
    import psutil

    times = psutil.cpu_times()._asdict()
    busy = sum(times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
    return float(busy - time.process_time())


def available_memory() -> int:
    """Return the bytes that this process can still allocate: the system's free memory, or less if a limit applies."""
    return _least_memory()[0]


def memory_advice() -> str:
    """Return advice on how to get more of the scarcest kind of memory.  Starts with a verb."""
    return _least_memory()[1]


def check_memory(n_bytes: int, purpose: str) -> None:
    """Raise NotEnoughMemoryError if ``n_bytes`` for ``purpose`` are not available.  LLVM would end the process."""
    available, advice = _least_memory()
    if n_bytes > available:
        raise NotEnoughMemoryError(
            f"{purpose} takes {n_bytes / 1e6:,.0f} MB of memory, but {available / 1e6:,.0f} MB is available: {advice}"
        )


def address_space_limit() -> int | None:
    """Return the limit of this process's address space in bytes (``ulimit -v``); None without a limit.

    Reserved memory counts even if unused: stacks of threads, and the model file while it is read.
    """
    if sys.platform != "linux":  # other systems have no limit or ignore it
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _least_memory() -> tuple[int, str]:
    """Return the bytes that this process can still allocate, and advice if they are too few."""
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


def used_memory() -> int:
    """Return the bytes of memory that this process uses, without files on Linux."""
    pages = text_of(_OWN_MEMORY).split()
    if pages:
        return (int(pages[1]) - int(pages[2])) * mmap.PAGESIZE
    import psutil

    return int(psutil.Process().memory_info().rss)


def _system_memory() -> int:
    for line in text_of(_MEMORY).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    import psutil

    return int(psutil.virtual_memory().available)


def program_output(*command: str) -> str:
    """Return the output of a program; empty if the program is missing, fails, or hangs."""
    # Imported here because most starts do not need it.
    import shutil
    import subprocess

    path = shutil.which(command[0])
    if path is None:
        return ""
    try:
        process = subprocess.run([path, *command[1:]], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return process.stdout.decode("utf-8", "replace").strip() if process.returncode == 0 else ""
