"""The machine at hand: its processor, and how much of it this process may use.

Binary packages are imported where they are needed: ``localllm doctor`` asks even where one of them is broken.
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

#: LLVM's names of features that Linux calls otherwise.
_LLVM_NAMES = {
    "avx512_vnni": "avx512vnni",
    "avx_vnni": "avxvnni",
    "avx_vnni_int8": "avxvnniint8",
    "avx512_bf16": "avx512bf16",
    "amx_int8": "amx-int8",
    "amx_bf16": "amx-bf16",
}

#: Processors that other programs may keep busy before what is measured means little.
OTHER_CPUS = 0.5

#: Bytes of memory, addresses more than all else, that LLVM takes, which every kernel needs.  (Measured: 163 MiB.)
LLVM_BYTES = 192 << 20

#: A limit of the address space below which hardly anything runs.
MIN_ADDRESS_SPACE = 1 << 30

#: The share of the fastest core's speed from which on one decodes, and below which it computes nothing: who waits at
#: a barrier would wait for it.
DECODES, COMPUTES = 0.7, 0.25
#: Speed of the cores of the next lower class where the system tells nothing but classes; and what an Intel E core
#: does in a cycle beside a P core.
LOWER_CLASS = EFFICIENT = 0.6

#: Most threads that anybody may ask for: so many for each processor, or this many where there are few.
THREADS_PER_CPU, FEW_THREADS = 4, 64

#: Of a SYSTEM_CPU_SET_INFORMATION (winnt.h), at least.
_CPU_SET_BYTES = 32

_CPUS = Path("/sys/devices/system/cpu")
_MEMORY = Path("/proc/meminfo")
_OWN_MEMORY = Path("/proc/self/statm")


# -- The processor -------------------------------------------------------------------------------------------------


def family() -> str:
    """The processor family, as LLVM's target triples begin: "x86_64", "aarch64", …"""
    if sys.platform == "linux" and sys.maxsize > 1 << 32 and (machine := os.uname().machine) in ("x86_64", "aarch64"):
        return machine
    import llvmlite.binding as llvm

    return str(llvm.get_process_triple()).split("-")[0].replace("arm64", "aarch64")


def features() -> frozenset[str]:
    """The processor's features, by LLVM's names.

    Of x86-64 processors Linux tells those that it supports.  Elsewhere LLVM is asked, which takes long to import.
    """
    if sys.platform == "linux" and family() == "x86_64":
        if flags := _linux_flags():
            return frozenset(_LLVM_NAMES.get(flag, flag) for flag in flags)
    import llvmlite.binding as llvm

    found = frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)
    return found | _arm_features() if family() == "aarch64" else found


def _linux_flags() -> list[str]:
    """The features of an x86-64 processor by Linux's names; nothing where it does not tell."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            text = file.read(1 << 14)  # of the first processor: there may be hundreds
    except OSError:
        return []
    return text.partition(b"\nflags")[2].partition(b"\n")[0].decode("ascii", "replace").split()[1:]


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


def core_speeds() -> list[float]:
    """How fast each physical core is that this process may use, as a share of the fastest one's speed.

    All are equal where the system does not tell.
    """
    tell = {"darwin": _speeds_on_macos, "win32": _speeds_on_windows}.get(sys.platform, _speeds_on_linux)
    if not (found := tell()):
        import psutil

        usable = usable_cpus()
        found = [1.0] * min(usable, psutil.cpu_count(logical=False) or usable)
    fastest = max(found)
    return [speed / fastest if fastest else 1.0 for speed in found]


def _speeds_on_linux() -> list[float]:
    """Arm tells capacities, others the highest clock; and where Intel's processors differ, which are Atoms."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    atoms, speeds = _cpu_list(text_of(_CPUS.parent.parent / "cpu_atom" / "cpus")), dict[str, float]()
    for n in os.sched_getaffinity(0):
        cpu = _CPUS / f"cpu{n}"
        speed = text_of(cpu / "cpu_capacity") or text_of(cpu / "cpufreq" / "cpuinfo_max_freq") or "0"
        siblings = text_of(cpu / "topology" / "thread_siblings_list").strip()  # the same of those that share a core
        speeds[siblings] = float(speed) * (EFFICIENT if n in atoms else 1)
    return [] if "" in speeds else list(speeds.values())


def _cpu_list(text: str) -> set[int]:
    """The numbers in a list such as ``0-3,8``."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)}


def _speeds_on_macos() -> list[float]:
    levels = range(_sysctl_int("hw.nperflevels"))  # the fastest first; none on Intel
    return [LOWER_CLASS**i for i in levels for _ in range(_sysctl_int(f"hw.perflevel{i}.physicalcpu"))]


def _speeds_on_windows() -> list[float]:
    """By efficiency classes, of which the highest is the fastest."""
    classes = dict[tuple[int, int], int]()
    if sys.platform == "win32":
        call = ctypes.windll.kernel32.GetSystemCpuSetInformation
        process, n_bytes = ctypes.c_void_p(-1), ctypes.c_ulong(0)
        call(None, 0, ctypes.byref(n_bytes), process, 0)
        data, place = ctypes.create_string_buffer(n_bytes.value), 0
        known = n_bytes.value if call(data, n_bytes, ctypes.byref(n_bytes), process, 0) else 0
        while place + _CPU_SET_BYTES <= known:
            size, _, _, group, _, core, _, _, efficiency = struct.unpack_from("<IIIHBBBBB", data, place)
            classes[group, core] = efficiency
            place += max(size, _CPU_SET_BYTES)
    return [LOWER_CLASS ** (max(classes.values()) - found) for found in classes.values()]


def has_unequal_cores() -> bool:
    """Whether some cores are so much slower that threads may differ in what they compute."""
    return min(core_speeds()) < DECODES


def default_threads(least_speed: float = COMPUTES) -> int:
    """One thread for each physical core of such a speed that this process may use, but none beyond what a control
    group grants.

    Threads wait for each other many times a token: one that has used up its quota stops them all.
    """
    quota = cpu_quota()
    cores = sum(speed >= least_speed for speed in core_speeds())
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
