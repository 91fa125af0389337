"""Registers of all kernels as ptxas reports them, compared with the budgets in registers.json.

python -m tests.kernels.cuda.registers          compile all variants for all architectures; fail if a kernel spills or
                                                exceeds its budget
python -m tests.kernels.cuda.registers 75 90    compile for these architectures only
python -m tests.kernels.cuda.registers --write  store the numbers of registers as the new budgets
python -m tests.kernels.cuda.registers --write --module elementwise     the same for elementwise.cu only
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from localllm.kernels.cuda import matmul
from localllm.kernels.cuda.attention import AttentionVariant, choose_variant
from localllm.kernels.cuda.cache import append_defines
from localllm.kernels.cuda.driver import Defines, Launch
from localllm.kernels.cuda.lowering import index_defines, selection_defines
from localllm.kernels.cuda.matmul import PACKED_FORMATS, ProductLimits
from localllm.kernels.cuda.module import flat_source
from localllm.kernels.graph import CacheType, Graph, KVCache
from localllm.quant.lut import KernelType
from tests.cuda_on_cpu import nvrtc
from tests.cuda_on_cpu.nvrtc import Resources

#: Registers by variant, kernel and architecture.
Budgets = dict[str, dict[str, dict[str, int]]]

BUDGETS = Path(__file__).with_name("registers.json")
#: Shared memory of a block, by architecture.
SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
#: Rows of activations: one number per variant of a kernel.
ROWS = (1, 2, 4, 8, 16, 24, 32, 64, 512)


def one_key(key_dim: int, value_dim: int | None = None, **more: bool) -> KVCache:
    """Return a cache with one key head that also holds the values."""
    graph = Graph()
    graph.layer = 0
    return graph.kv_cache(1, key_dim, value_dim, values_in_keys=True, **more)


#: Shapes of Qwen 3.5, Kimi Linear, Mamba 2, Mamba, and RWKV 7 and 6.
RECURRENCES: dict[str, Defines] = {
    "gated delta": {"ROWS": 128, "COLUMNS": 32, "DELTA": 1, "PER_CHANNEL": 0},
    "gated delta by channel": {"ROWS": 128, "COLUMNS": 32, "DELTA": 1, "PER_CHANNEL": 1},
    "scan 128": {"ROWS": 128, "COLUMNS": 32, "DELTA": 0, "PER_CHANNEL": 0},
    "scan 256": {"ROWS": 256, "COLUMNS": 32, "DELTA": 0, "PER_CHANNEL": 0},
    "channel scan": {"STATES": 16},
    "rwkv7": {"RATE": 1, "BONUS": 1, "ROWS": 64, "COLUMNS": 32},
    "rwkv6": {"RATE": 0, "BONUS": 1, "ROWS": 64, "COLUMNS": 32},
    "rwkv6 of qwen2": {"RATE": 0, "BONUS": 0, "ROWS": 128, "COLUMNS": 32},
}
#: Indexers of DeepSeek V3.2 and V4, with runs as in GLM-5.3 and with scores per head as in MiniMax-M3.
SELECTIONS: dict[str, Defines] = {
    "selection": index_defines(one_key(128, is_index=True), 2048, 64, 128),
    "selection of runs": index_defines(one_key(384, is_index=True), 256, 32, 128, run=8),
    "selection of heads": index_defines(one_key(128, is_index=True), 16, 4, 128, run=128, n_last=1),
    "attention to a selection": selection_defines(one_key(576, 512), 2048),
    "attention to entries": selection_defines(one_key(512), 512, 4),
    "compression": selection_defines(one_key(512), 0) | {"RUN": 4, "SERIES": 2},
    "attention to a selection of heads": selection_defines(KVCache(0, 4, 128, 128), 2048, by_head=True),
}
#: Known exceptions: the largest spills and stacks, in bytes, of variants that still spill on some architecture.
KNOWN_SPILLS = {
    "append q8_0 256 by axes": (16, 8),
    "attention to a selection": (64, 32),
    "attention to entries": (24, 8),
    "gated delta": (16, 8),
    "rwkv6 of qwen2": (8, 8),
    "rwkv7": (8, 8),
    "selection of heads": (8, 8),
}
HEAD_DIMS = (16, 64, 80, 96, 128, 256)


@dataclass(frozen=True)
class Case:
    """A module as a device uses it; ``name`` identifies the variant."""

    name: str
    module: str
    architecture: int
    defines: Defines

    def resources(self) -> dict[str, Resources]:
        options = ("--std=c++17", *(f"-D{key}={value}" for key, value in self.defines.items()))
        return nvrtc.resources(flat_source(self.module), self.architecture, options, f"{self.module}.cu")


def everything() -> list[Case]:
    """Return each variant of each module that localllm loads, for each architecture."""
    cases: dict[tuple[str, int], Case] = {}
    for architecture in SHARED_BYTES:
        for type in PACKED_FORMATS:
            cases |= {(case.name, architecture): case for case in _of_format(type, architecture)}
        for cache_type in ("f16", "q8_0"):  # types of fewer bits need a few more instructions for unpacking
            for head_dim in HEAD_DIMS:
                cases |= {(case.name, architecture): case for case in _of_heads(head_dim, cache_type, architecture)}
        for module in ("elementwise", "experts", "ceilings"):
            cases[module, architecture] = Case(module, module, architecture, {})
        for kernel, ahead in ((3, 0), (4, 0), (10, 0), (9, 4), (15, 7)):
            name = f"convolution {kernel}{f' ahead {ahead}' * bool(ahead)}"
            cases[name, architecture] = Case(name, "convolution", architecture, {"KERNEL": kernel, "AHEAD": ahead})
        for name, defines in RECURRENCES.items():
            cases[name, architecture] = Case(name, "recurrent", architecture, defines)
        for name, defines in SELECTIONS.items():
            cases[name, architecture] = Case(name, "selection", architecture, defines)
    return list(cases.values())


def _of_format(type: KernelType, architecture: int) -> Iterator[Case]:
    """Yield the variants of a format.  Look-up tables differ in numbers only, so their formats share variants."""
    capability = divmod(architecture, 10)
    format = matmul.packed_format(type, capability)
    launches = [
        matmul.pack_launch(format, 64, 4096),
        matmul.embed_launch(format, 8),
        matmul.quantise_launch(format, 4096, 8),
    ]
    limits = ProductLimits(capability, SHARED_BYTES[architecture])
    for rows in sorted({format.input_rows(n) for n in ROWS}):
        launches.append(matmul.product_launch(format, [4096], 4096, rows, limits))
        product = launches[-1]
        others = [matmul.gated_launch(format, product)]
        others += [matmul.mixed_launch(format, product, last) for last in PACKED_FORMATS.values()]
        launches += [launch for launch in others if launch]
        if rows in (1, 8, 64):
            launches.append(matmul.product_launch(format, [512], 512, rows, limits, n_heads=16))
    for rows in (8, 64) if capability >= matmul.TENSOR_CORES else (8,):
        for n in (1, 512):
            sizes = [4096], 4096, n, n, n, rows
            launches.append(matmul.expert_launch(format, *sizes, limits))
            launches += [summed for summed in (matmul.summed_launch(format, 4096, 1024, 1, 2),) if summed]
            narrow = matmul.expert_launch(format, [4096], 1024, *sizes[2:], limits)
            launches += [gated for gated in (matmul.gated_launch(format, narrow),) if gated]
    for launch in launches:
        yield Case(_name(launch), launch.module, architecture, launch.defines)


def _name(launch: Launch) -> str:
    """The number of stages in shared memory does not change the registers."""
    parts = (launch.kernel, *(launch.defines.get(key) for key in ("FORMAT", "LAST_FORMAT", "TOKENS", "ROWS")))
    return " ".join(str(part) for part in parts if part is not None) + " of heads" * ("HEADS" in launch.defines)


def _of_heads(head_dim: int, cache_type: CacheType, architecture: int) -> Iterator[Case]:
    """Yield the variants of attention; ``capped`` ones have a soft-cap and sinks."""
    name = f"{cache_type} {head_dim}"
    kept = KVCache(0, 1, head_dim, head_dim, cache_type)
    for axes in (False, True):
        defines = append_defines(kept, has_axes=axes)
        yield Case(f"append {name}{' by axes' if axes else ''}", "append", architecture, defines)
    for capped in (False, True):
        wanted = AttentionVariant(head_dim, head_dim, cache_type, soft_cap=capped, sinks=capped)
        variant = choose_variant(wanted, SHARED_BYTES[architecture])
        yield Case(f"attention {name}{' capped' if capped else ''}", "attention", architecture, variant.defines)


def problems(case: Case, budgets: Budgets, found: dict[str, Resources]) -> list[str]:
    wrong = []
    for kernel, taken in found.items():
        where = f"{kernel} of {case.name} for sm_{case.architecture}"
        known = KNOWN_SPILLS.get(case.name, (0, 0))
        if taken.spill_bytes > known[0] or taken.stack_bytes > known[1]:
            wrong.append(f"{where} spills {taken.spill_bytes} bytes, and has a stack of {taken.stack_bytes}")
        budget = budgets.get(case.name, {}).get(kernel, {}).get(str(case.architecture))
        if budget is None:
            wrong.append(f"{where} has no budget")
        elif taken.registers > budget:
            wrong.append(f"{where} takes {taken.registers} registers, and its budget is {budget}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", type=int)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--module", help="compile only this module")
    given = parser.parse_args()
    if given.write and given.architectures:
        parser.error("budgets are written for all architectures")
    cases = [
        case
        for case in everything()
        if case.architecture in (given.architectures or SHARED_BYTES) and given.module in (None, case.module)
    ]
    with ProcessPoolExecutor() as pool:  # older versions of NVRTC compile one module per process at a time
        all_found = list(pool.map(Case.resources, cases, chunksize=8))
    if given.write:
        taken: Budgets = json.loads(BUDGETS.read_text()) if given.module else {}
        for case in cases:
            taken.pop(case.name, None)
        for case, found in zip(cases, all_found, strict=True):
            for kernel, resources in found.items():
                of_kernel = taken.setdefault(case.name, {}).setdefault(kernel, {})
                of_kernel[str(case.architecture)] = resources.registers
        lines = (f"{json.dumps(name)}: {json.dumps(taken[name], sort_keys=True)}" for name in sorted(taken))
        BUDGETS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    budgets: Budgets = json.loads(BUDGETS.read_text())
    wrong = [p for case, found in zip(cases, all_found, strict=True) for p in problems(case, budgets, found)]
    print("\n".join([*wrong, f"{len(cases)} modules compiled, {len(wrong)} problems"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
