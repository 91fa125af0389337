"""Instruction sets that kernels are compiled for, best first, and the subset that this processor supports.

A `Target` names an LLVM processor and the way its kernels multiply bytes.  All targets read the same packed weights
and compute the same integer sums.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from localllm.errors import DeviceError, UsageError
from localllm.kernels.cpu import host

if TYPE_CHECKING:
    import llvmlite.binding as llvm

#: Environment variable that overrides the instruction set.
ISA_VARIABLE = "LOCALLLM_ISA"


@dataclass(frozen=True)
class Target:
    """An instruction set."""

    name: str  # name for users
    family: Literal["x86_64", "aarch64", "any"]  # processor family, as in LLVM's target triples
    # cpu, features: LLVM's names of the processor and of its additional features
    cpu: str
    features: str
    # instructions that add products of bytes, four per lane
    dot: Literal["vnni512", "vnni256", "maddubs512", "maddubs256", "smmla", "sdot", "smull", "generic"]
    needs: frozenset[str]  # LLVM feature names that the processor must report

    @property
    def wide(self) -> bool:
        """Whether a vector of 64 bytes fills one register, so that many vectors fit."""
        return self.dot.endswith("512")

    @property
    def n_registers(self) -> int:
        return 32 if self.wide or self.family == "aarch64" else 16

    @property
    def registers_per_vector(self) -> int:
        """Registers per vector of 64 bytes."""
        return 1 if self.wide else 2 if self.dot.endswith("256") else 4

    def rows_of_sums(self, n_vectors: int) -> int:
        """Return the rows of a float product whose sums fit the registers, for ``n_vectors`` vectors of columns.

        Next to the sums the registers hold the vectors of the current step and one factor.
        """
        free = self.n_registers - 1 - self.registers_per_vector * n_vectors
        return free // (self.registers_per_vector * n_vectors)

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time constants of every kernel.

        QUARTERS: whether a vector fills four registers, and 32 registers hold a quarter of a product.
        FEW_REGISTERS: whether a vector fills two registers of 16.
        TILE_TOKENS, TILE_GROUPS: tokens and groups of 16 rows whose sums of float products stay in registers.
        FLOAT_TOKENS: tokens that a slab of float weights is multiplied with, a multiple of TILE_TOKENS.
        """
        groups = 2 if self.wide else 1
        tokens = min(8, self.rows_of_sums(groups))
        return {
            "QUARTERS": self.family == "aarch64",
            "FEW_REGISTERS": self.dot.endswith("256"),
            "TILE_TOKENS": tokens,
            "TILE_GROUPS": groups,
            "FLOAT_TOKENS": 128 // tokens * tokens,
        }

    def machine(self, triple: str | None = None) -> llvm.TargetMachine:
        """Return LLVM's code generator for this target, on this platform unless ``triple`` names another one."""
        import llvmlite.binding as llvm

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
    Target(
        "avx512vnni",
        "x86_64",
        "x86-64-v4",
        "+avx512vnni,+fast-dpwssd,-prefer-256-bit",
        "vnni512",
        _AVX512 | {"avx512vnni"},
    ),
    Target("avx512", "x86_64", "x86-64-v4", "-prefer-256-bit", "maddubs512", _AVX512),
    Target("avxvnni", "x86_64", "x86-64-v3", "+avxvnni,+fast-dpwssd", "vnni256", _AVX2 | {"avxvnni"}),
    Target("avx2", "x86_64", "x86-64-v3", "", "maddubs256", _AVX2),
    Target(
        "i8mm", "aarch64", "generic", "+neon,+dotprod,+i8mm,+lse", "smmla", frozenset({"neon", "dotprod", "i8mm"})
    ),
    Target("neon", "aarch64", "generic", "+neon,+dotprod,+lse", "sdot", frozenset({"neon", "dotprod"})),
    Target("asimd", "aarch64", "generic", "+neon", "smull", frozenset({"neon"})),
    Target("generic", "any", "", "", "generic", frozenset()),
)


@functools.cache
def available() -> tuple[Target, ...]:
    """Return the targets that this processor supports, best first; the last is always ``generic``."""
    family, features = host.family(), host.features()
    return tuple(t for t in TARGETS if t.family in (family, "any") and t.needs <= features)


def choose(name: str | None = None) -> Target:
    """Return the target called ``name``; defaults to ``LOCALLLM_ISA``, or else the best supported target."""
    if name is None:
        name = os.environ.get(ISA_VARIABLE) or available()[0].name
    for target in available():
        if target.name == name:
            return target
    here = ", ".join(t.name for t in available())
    if any(t.name == name for t in TARGETS):
        raise DeviceError(f"this processor does not execute {name} code; it executes {here}")
    raise UsageError(f"there is no instruction set called {name!r}; this processor executes {here}")
