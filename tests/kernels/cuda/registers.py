"""Registers of the kernels for matrix products: what ptxas says, and the budget kept in registers.json.

python -m tests.kernels.cuda.registers          compiles all for all architectures and lists what spills
python -m tests.kernels.cuda.registers --write  and keeps the registers, the most over the architectures
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from localllm.kernels.cuda import matmul
from localllm.kernels.cuda.matmul import PACKED_FORMATS, Launch
from localllm.kernels.cuda.module import flat_source
from localllm.quant.lut import LUT_E2M1_16, LUT_E2M1_32, KernelType, LUTType
from tests.cuda_on_cpu import nvrtc
from tests.cuda_on_cpu.nvrtc import Resources

BUDGETS = Path(__file__).with_name("registers.json")
#: Shared memory that a block may have, by architecture.
SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
#: Tables differ in numbers only.
TYPES: list[KernelType] = [
    *(t for t in PACKED_FORMATS if not isinstance(t, LUTType)),
    LUT_E2M1_32,
    LUT_E2M1_16,
]
#: Rows of activations: one for each variant of a kernel.
ROWS = (1, 2, 4, 8, 16, 64, 512)


def launches(type: KernelType, architecture: int) -> dict[str, Launch]:
    """All variants of all kernels that a device uses for a format, by name."""
    capability = divmod(architecture, 10)
    format = matmul.packed_format(type, capability)
    found = [matmul.pack_launch(format, 64, 4096), matmul.embed_launch(format, 8), matmul.quantise_launch(format, 8)]
    for rows in sorted({format.input_rows(n) for n in ROWS}):
        found.append(
            matmul.product_launch(
                format, [4096], 4096, rows, capability=capability, shared_bytes=SHARED_BYTES[architecture]
            )
        )
    for rows in (8, 64) if capability >= matmul.TENSOR_CORES else (8,):
        for n_tokens in (1, 512):
            found.append(
                matmul.expert_launch(
                    format,
                    *([4096], 4096, n_tokens, n_tokens, n_tokens, rows),
                    capability=capability,
                    shared_bytes=SHARED_BYTES[architecture],
                )
            )
    return {name(format.name, launch): launch for launch in found}


def name(format: str, launch: Launch) -> str:
    """Of a kernel's variant; stages of shared memory take no registers."""
    return " ".join(
        str(part) for part in (launch.kernel, format, *map(launch.defines.get, ("TOKENS", "ROWS"))) if part
    )


def resources(launch: Launch, architecture: int) -> Resources:
    options = ("--std=c++17", *(f"-D{key}={value}" for key, value in launch.defines.items()))
    return nvrtc.resources(flat_source(launch.kernel), architecture, options, f"{launch.kernel}.cu")[launch.kernel]


def everything(architectures: Sequence[int]) -> Iterator[tuple[str, int, Resources]]:
    for architecture in architectures:
        for type in TYPES:
            for variant, launch in launches(type, architecture).items():
                yield variant, architecture, resources(launch, architecture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", type=int, default=list(SHARED_BYTES))
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    budgets: dict[str, int] = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
    for variant, architecture, found in everything(given.architectures):
        budgets[variant] = max(budgets.get(variant, 0), found.registers)
        if found.spill_bytes or found.stack_bytes:
            print(f"{variant}, sm_{architecture}: {found}", flush=True)
    if given.write:
        BUDGETS.write_text(json.dumps(budgets, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
