"""What is known of the machine at hand: its processor, and how much of it this process may use.

Binary packages are imported where they are needed: ``localllm doctor`` asks even where one of them is broken.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

#: Windows' number of the feature, in winnt.h.
PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE = 43

#: Most threads that anybody may ask for: so many for each processor, or this many where there are few.
THREADS_PER_CPU, FEW_THREADS = 4, 64

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


# -- The processor -------------------------------------------------------------------------------------------------


def family() -> str:
    """The processor family, as LLVM's target triples begin: "x86_64", "aarch64", …"""
    import llvmlite.binding as llvm

    return str(llvm.get_process_triple()).split("-")[0].replace("arm64", "aarch64")


def features() -> frozenset[str]:
    """What the processor has, by LLVM's names."""
    import llvmlite.binding as llvm

    found = frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)
    return found | _arm_features() if family() == "aarch64" else found


def _arm_features() -> frozenset[str]:
    """What Arm targets need; LLVM finds no dot product on Linux and Windows, and on macOS nothing at all."""
    if sys.platform == "darwin":
        return frozenset({"neon", "dotprod"})  # all of Apple's processors since the M1
    if sys.platform == "win32":
        has_dotprod = bool(ctypes.windll.kernel32.IsProcessorFeaturePresent(PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE))
        return frozenset({"neon", "dotprod"} if has_dotprod else {"neon"})
    return _arm_linux_features(_text(Path("/proc/cpuinfo")))


def _arm_linux_features(cpuinfo: str) -> frozenset[str]:
    """LLVM's names of the features that ``/proc/cpuinfo`` lists.

    Source: Linux, Documentation/arch/arm64/elf_hwcaps.rst.
    """
    lines = [line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith("Features")]
    names = {"asimd": "neon", "asimddp": "dotprod"}
    # Processors with unlike cores list each; a thread may run on any.
    return frozenset(ours for linux, ours in names.items() if lines and all(linux in line for line in lines))


def cpu_model() -> str:
    """The processor's name, as far as the system tells it."""
    if sys.platform == "linux":
        for line in _text(Path("/proc/cpuinfo")).splitlines():
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
        siblings = {_text(_CPUS / f"cpu{n}/topology/thread_siblings_list").strip() for n in os.sched_getaffinity(0)}
        if "" not in siblings:
            return len(siblings)
    import psutil

    usable = usable_cpus()
    return min(usable, psutil.cpu_count(logical=False) or usable)


def cpu_quota() -> float | None:
    """How many processors' time a control group grants this process (Linux containers); None if it does not say."""
    version_2 = _text(_CONTROL_GROUPS / "cpu.max").split()
    version_1 = [_text(_CONTROL_GROUPS / f"cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    for numbers in (version_2, version_1):
        if len(numbers) == 2 and all(number.isdigit() for number in numbers) and int(numbers[1]):
            return int(numbers[0]) / int(numbers[1])
    return None


def default_threads() -> int:
    """One thread for each physical core that this process may use, but none beyond what a control group grants.

    Threads wait for each other many times a token: one that has used up its quota stops them all.
    """
    quota = cpu_quota()
    cores = usable_cores()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def most_threads() -> int:
    """Threads that may be asked for: more than processors, for whoever wants to try, but not thousands."""
    return max(FEW_THREADS, THREADS_PER_CPU * usable_cpus())


def program_output(*command: str) -> str:
    """What a program prints; nothing where it is not there, fails, or hangs."""
    path = shutil.which(command[0])
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *command[1:]], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else ""


def _text(path: Path) -> str:
    """A small file's text; nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
