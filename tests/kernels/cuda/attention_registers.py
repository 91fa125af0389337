"""Registers of attention, append and elementwise: what ptxas says, and the budget in registers_attention.toml.

python -m tests.kernels.cuda.attention_registers     compiles all for all architectures and prints the budget's lines
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from localllm.kernels.cuda.attention import choose_variant
from localllm.kernels.cuda.driver import Defines
from localllm.kernels.cuda.module import flat_source
from localllm.kernels.ops import CACHE_TYPES, CacheType
from tests.cuda_on_cpu import nvrtc
from tests.cuda_on_cpu.nvrtc import Resources

#: Shared memory that a block may have, by architecture.
SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
HEAD_DIMS = (16, 64, 80, 96, 128, 256)


@dataclass(frozen=True)
class Case:
    """A module as a device uses it."""

    name: str
    module: str
    architecture: int
    defines: Defines

    def resources(self) -> dict[str, Resources]:
        options = ("--std=c++17", *(f"-D{key}={value}" for key, value in self.defines.items()))
        return nvrtc.resources(flat_source(self.module), self.architecture, options, f"{self.module}.cu")


def attention_case(head_dim: int, cache_type: CacheType, architecture: int, *, capped: bool = False) -> Case:
    variant = choose_variant(head_dim, cache_type, SHARED_BYTES[architecture], soft_cap=capped, sinks=capped)
    name = f"attention {cache_type} {head_dim}{' capped' if capped else ''}"
    return Case(name, "attention", architecture, variant.defines)


def append_case(head_dim: int, cache_type: CacheType, architecture: int) -> Case:
    defines = {"HEAD_DIM": head_dim, "Q8_0": int(cache_type == "q8_0")}
    return Case(f"append {cache_type} {head_dim}", "append", architecture, defines)


def elementwise_case(architecture: int) -> Case:
    return Case("elementwise", "elementwise", architecture, {})


def everything() -> Iterator[Case]:
    for architecture in SHARED_BYTES:
        for cache_type in CACHE_TYPES:
            for head_dim in HEAD_DIMS:
                yield attention_case(head_dim, cache_type, architecture)
                yield attention_case(head_dim, cache_type, architecture, capped=True)
                yield append_case(head_dim, cache_type, architecture)
        yield elementwise_case(architecture)


def main() -> None:
    budgets: dict[tuple[str, str], int] = {}
    for case in everything():
        for kernel, found in case.resources().items():
            key = case.name, kernel
            budgets[key] = max(budgets.get(key, 0), found.registers)
            if found.spill_bytes or found.stack_bytes:
                print(f"# {case.name} {kernel}, sm_{case.architecture}: {found}", flush=True)
    for name in sorted({name for name, _ in budgets}):
        print(f'["{name}"]')
        for kernel in sorted(kernel for other, kernel in budgets if other == name):
            print(f"{kernel} = {budgets[name, kernel]}")


if __name__ == "__main__":
    main()
