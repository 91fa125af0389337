"""Instruction sets that kernels are compiled for, best first, and which of them this processor executes.

A `Target` names an LLVM processor and says how its kernels multiply bytes.  All of them read the same packed
weights and give the same integer sums.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import llvmlite.binding as llvm

from localllm.errors import DeviceError, UsageError

#: Environment variable that forces an instruction set.
ISA_VARIABLE = "LOCALLLM_ISA"

#: Windows' number of the feature, in winnt.h.
PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE = 43


@dataclass(frozen=True)
class Target:
    """An instruction set.

    Attributes:
        name: what users call it.
        family: the processor family, as LLVM's target triples begin.
        cpu, features: LLVM's names of the processor and of what it has beyond that.
        dot: which instructions sum products of bytes, four to a lane.
        needs: LLVM feature names that the processor at hand must report.
    """

    name: str
    family: Literal["x86_64", "aarch64", "any"]
    cpu: str
    features: str
    dot: Literal["vnni512", "vnni256", "maddubs512", "maddubs256", "sdot", "generic"]
    needs: frozenset[str]

    def machine(self, triple: str | None = None) -> llvm.TargetMachine:
        """LLVM's code generator for this target, on the platform at hand unless ``triple`` names another."""
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        static = triple is None and self.family != "aarch64"
        return llvm.Target.from_triple(triple or llvm.get_process_triple()).create_target_machine(
            cpu=self.cpu,
            features=self.features,
            opt=3,
            reloc="static" if static else "default",
            codemodel="jitdefault",
            jit=True,
        )


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}

#: Best first.  The x86-64-v3 and -v4 levels are the System V psABI's.
TARGETS = (
    Target("avx512vnni", "x86_64", "x86-64-v4", "+avx512vnni,-prefer-256-bit", "vnni512", _AVX512 | {"avx512vnni"}),
    Target("avx512", "x86_64", "x86-64-v4", "-prefer-256-bit", "maddubs512", _AVX512),
    Target("avxvnni", "x86_64", "x86-64-v3", "+avxvnni", "vnni256", _AVX2 | {"avxvnni"}),
    Target("avx2", "x86_64", "x86-64-v3", "", "maddubs256", _AVX2),
    Target("neon", "aarch64", "generic", "+neon,+dotprod", "sdot", frozenset({"neon", "dotprod"})),
    Target("generic", "any", "", "", "generic", frozenset()),
)


@functools.cache
def available() -> tuple[Target, ...]:
    """The targets that this processor executes, best first; the last is always ``generic``."""
    family = llvm.get_process_triple().split("-")[0].replace("arm64", "aarch64")
    features = _arm_features() if family == "aarch64" else _llvm_features()
    return tuple(t for t in TARGETS if t.family in (family, "any") and t.needs <= features)


def _llvm_features() -> frozenset[str]:
    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)


def _arm_features() -> frozenset[str]:
    """What Arm targets need; LLVM finds no dot product on Linux and Windows, and on macOS nothing at all."""
    if sys.platform == "darwin":
        return frozenset({"neon", "dotprod"})  # all of Apple's processors since the M1
    if sys.platform == "win32":
        has_dotprod = bool(ctypes.windll.kernel32.IsProcessorFeaturePresent(PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE))
        return frozenset({"neon", "dotprod"} if has_dotprod else {"neon"})
    try:
        return _arm_linux_features(Path("/proc/cpuinfo").read_text(errors="replace"))
    except OSError:
        return frozenset()


def _arm_linux_features(cpuinfo: str) -> frozenset[str]:
    """LLVM's names of the features that ``/proc/cpuinfo`` lists.

    Source: Linux, Documentation/arch/arm64/elf_hwcaps.rst.
    """
    lines = [line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith("Features")]
    names = {"asimd": "neon", "asimddp": "dotprod"}
    # Processors with unlike cores list each; a thread may run on any.
    return frozenset(ours for linux, ours in names.items() if lines and all(linux in line for line in lines))


def choose(name: str | None = None) -> Target:
    """The target called ``name``, or else the one in ``LOCALLLM_ISA``, or else the best that runs here.

    Raises:
        UsageError: there is no target of that name.
        DeviceError: this processor does not execute it.
    """
    name = name or os.environ.get(ISA_VARIABLE)
    if not name:
        return available()[0]
    for target in available():
        if target.name == name:
            return target
    here = ", ".join(t.name for t in available())
    if any(t.name == name for t in TARGETS):
        raise DeviceError(f"this processor does not execute {name} code; it executes {here}")
    raise UsageError(f"there is no instruction set called {name!r}; this processor executes {here}")
