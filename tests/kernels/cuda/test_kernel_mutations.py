"""Mistakes planted in every kernel must change the result or fail in check mode.

The tests drop each barrier and each wait of the sources, and swap inputs of instructions and registers of tensor
cores. Expected results come from the kernel without a mistake; other tests compare those results with references.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.kernels.cuda import matmul
from localllm.kernels.cuda.attention import AttentionVariant, HeadShape, choose_variant
from localllm.kernels.cuda.cache import append_defines
from localllm.kernels.cuda.calls import Mixture
from localllm.kernels.cuda.driver import Defines
from localllm.kernels.cuda.lowering import index_defines, selection_defines
from localllm.kernels.cuda.matmul import PACKED_FORMATS, ProductLimits
from localllm.kernels.cuda.module import FOLDER
from localllm.kernels.cuda.roofline import KINDS, CUDARoofline, Kind
from localllm.kernels.graph import KVCache, Rope
from localllm.quant.types import GGMLType
from tests.cuda_on_cpu import mutate
from tests.cuda_on_cpu.emulated_driver import EmulatedDriver
from tests.cuda_on_cpu.errors import KernelFault
from tests.cuda_on_cpu.kernels import skip_without_tools
from tests.cuda_on_cpu.module import EmulatedModule, Order
from tests.cuda_on_cpu.mutate import Mutation
from tests.cuda_on_cpu.ptx import Location
from tests.helpers.blocks import random_rows
from tests.helpers.run_model import make_batch
from tests.helpers.weights import random
from tests.kernels import test_operation_formulas as operations
from tests.kernels.cuda.device import Device, load, multiply, quantise
from tests.kernels.cuda.registers import one_key
from tests.kernels.cuda.test_append import Written, heads_of
from tests.kernels.cuda.test_attention import Talk, smallest
from tests.kernels.cuda.test_elementwise import (
    NO_STEP,
    cap_inputs,
    gate_inputs,
    gathered,
    joined,
    largest,
    logits,
    norm_inputs,
    quantised_launch,
    row_launch,
    top,
)
from tests.kernels.cuda.test_experts import BATCHES, N_FF, D, K, group, mixed, ops_of
from tests.kernels.cuda.test_pack import decoded

T = GGMLType
Array = NDArray[Any]
ORDERS = (Order(), Order("reverse", "early"))
#: Rows, columns, and tokens per block of matmul.
N_OUT, N_IN, TILE_ROWS = 37, 768, 16
#: Swapped instructions per kernel, spread over its code.  One must be caught, because some swaps change nothing.
N_SWAPPED = 5
#: Bytes that a kernel of the ceilings reads; the last load of a thread is out of bounds.
N_READ = 4 * 256 * 16 * 3 + 16 * 5
ON_TENSOR_CORES = (
    *("matmul_few", "matmul", "matmul_few_experts", "matmul_experts", "attention_split", "attention_prefill"),
    *("multiply_int8", "multiply_f16", "multiply_bf16"),
)


#: Kinds of mistakes that need to be caught once only.  The order of rows does not change the sum of a product.
MAY_BE_EQUIVALENT = defaultdict(lambda: {"operands"}, ceilings={"operands", "fragments"})


@dataclass(frozen=True)
class Case:
    """A kernel with its module and macros, and a run that returns all of its outputs."""

    kernel: str
    module: str
    defines: Defines
    run: Callable[[Device], Array]


def pack(device: Device) -> Array:
    weights = load(device, random_rows(T.Q6_K, N_OUT, 512), T.Q6_K, 512)
    return device.download(weights.memory, np.uint8, weights.memory.n_bytes)


def embed(device: Device) -> Array:
    return decoded(device, random_rows(T.Q6_K, N_OUT, 512), T.Q6_K, 512, [0, 36, 5])


def quantised(type: GGMLType) -> Case:
    def run(device: Device) -> Array:
        units, scales, _ = quantise(device, random(5, 300), PACKED_FORMATS[type], 8)
        return np.concatenate([device.download(m, np.uint8, m.n_bytes) for m in (units, scales)])

    return Case("quantise", "quantise", matmul.quantise_launch(PACKED_FORMATS[type], 300, 8).defines, run)


def product(type: GGMLType, n_tokens: int) -> Case:
    def run(device: Device) -> Array:
        weights = load(device, random_rows(type, N_OUT, N_IN), type, N_IN)
        return multiply(device, random(n_tokens, N_IN), [weights])[0]

    limits = ProductLimits((8, 0), 99 << 10, (TILE_ROWS,))
    launch = matmul.product_launch(PACKED_FORMATS[type], [N_OUT], N_IN, n_tokens, limits)
    return Case(launch.kernel, launch.kernel, launch.defines, run)


def attention(kernel: str, variant: AttentionVariant) -> Case:
    """Use enough rows for two tiles of two warps."""

    def run(device: Device) -> Array:
        talk = Talk(device, variant, ((20, 330), (1, 70)), HeadShape(1, 2, 300))
        return talk.run(talk.work(0) if kernel == "attention_prefill" else talk.work_of_bucket())

    return Case(kernel, "attention", variant.defines, run)


def append(device: Device) -> Array:
    rope = Rope(np.array([0.7, 0.01], np.float32), False, 1.3)
    out = Written(device, 24, "q8_0", rope, heads_of(24), (random(24, seed=1), random(24, seed=2)))
    return np.concatenate([out.q.view(np.uint8).ravel(), out.memory])


def rows(kernel: str) -> Case:
    is_norm, is_quantised = kernel.startswith("rms_norm"), kernel.endswith("quantised")
    kernel = kernel.removesuffix(" quantised")

    def run(device: Device) -> Array:
        x, other = random(3, 2176), random(3, 2176, seed=1)
        inputs = norm_inputs(device, x, other[0], 1e-6) if is_norm else gate_inputs(device, "gelu", x, other)
        if is_norm:
            inputs.append(NO_STEP)
        if is_quantised:
            return quantised_launch(device, kernel, x, 2176, inputs, is_norm)[0]
        return row_launch(device, kernel, 3, 2176, inputs, is_norm)

    return Case(kernel, "elementwise", {}, run)


def elementwise(kernel: str, run: Callable[[Device], Array]) -> Case:
    return Case(kernel, "elementwise", {}, run)


def operation(kernel: str, module: str, defines: Defines, case: Callable[[], operations.Case]) -> Case:
    """Return a case of the table of operations, with a new sequence and one that continues."""

    def run(device: Device) -> Array:
        own = case()
        step = operations.compiled(ops_of(device.driver), own, 4)
        first = make_batch([(range(40), 0, [1]), (range(60, 65), 0, [2])], states=[2, 0])
        out = step(own.completed(first)).copy()
        more = make_batch([(range(65, 67), 5, [2]), (range(40, 43), 40, [1])], states=[0, 2])
        return np.concatenate([out, step(own.completed(more))])

    return Case(kernel, module, defines, run)


def recurrence(is_per_channel: bool) -> Case:
    defines: Defines = {"ROWS": 48, "COLUMNS": 32, "DELTA": 1, "PER_CHANNEL": int(is_per_channel)}
    return operation(
        "recurrence",
        "recurrent",
        defines,
        lambda: operations.gated_delta("odd", is_grouped=True, per_channel=is_per_channel, in_parts=False),
    )


def grouped(device: Device) -> Array:
    """Group more experts than a warp has lanes.  The order within an expert is undefined, so places are checked."""
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(70, dtype=np.int32), (20, 1)), axis=1)
    group(device.driver, np.ascontiguousarray(ids[:, :3]), Mixture(70, 3), 8)
    return np.zeros(0)


def mixture(kernel: str, module: str, n_tokens: int, defines: Defines) -> Case:
    return Case(kernel, module, defines, lambda device: mixed(ops_of(device.driver), T.Q4_0, n_tokens))


def expert_product(kernel: str) -> Case:
    n = BATCHES[kernel]
    limits = ProductLimits((8, 0), 99 << 10, (TILE_ROWS,))
    rows = TILE_ROWS if kernel == "matmul_experts" else 8
    launch = matmul.expert_launch(PACKED_FORMATS[T.Q4_0], [N_FF, N_FF], D, n, K * n, 99, rows, limits)
    return mixture(kernel, launch.module, n, launch.defines)


def soft_capped(device: Device) -> Array:
    return row_launch(device, "softcap", 3, 700, cap_inputs(device, 40 * random(3, 700), 30), False)


def joined_rows(is_mean: bool, device: Device) -> Array:
    return joined(device, random(5, 530), np.array([3, 0, 1], np.int32), is_mean=is_mean)


def drawn(device: Device) -> Array:
    draws = np.array([[700, 1, 0, 1, 0.999]], np.float32)
    ids, _, chosen = top(device, random(1, 4000), 700, draws)
    return np.append(ids, chosen)


def ceiling(kernel: str) -> Case:
    def run(device: Device) -> Array:
        roofline = CUDARoofline(device.driver, 0, n_bytes=N_READ, rounds=3)
        kinds: dict[str, Kind] = {f"multiply_{kind}": kind for kind in KINDS}
        return roofline.sums(kinds[kernel]) if kernel in kinds else np.array(roofline.total())

    return Case(kernel, "ceilings", {}, run)


SUMMED = matmul.summed_launch(PACKED_FORMATS[T.Q8_0], 40, N_FF, 2, K)
WANTED = np.array([4, 0, 0, 1], np.int32)
F16 = replace(choose_variant(AttentionVariant(8, 8, "f16"), 99 << 10), warps=2)
Q8_0 = replace(choose_variant(AttentionVariant(8, 8, "q8_0"), 99 << 10), warps=2)


def of_index(kernel: str, dim: int, k: int, run: int) -> Case:
    """Return a case of an indexer with five heads that selects k positions, or runs of positions."""
    kept = one_key(3 * dim if run > 1 else dim, is_index=True, is_exact=run > 1)
    defines: Defines = index_defines(kept, k // run, 5, dim, run=run)
    made = (
        (lambda: operations.attention_to_runs(k))
        if run > 1
        else lambda: operations.selected_attention(k, "f16", True)
    )
    return operation(kernel, "selection", defines, made)


CASES = {
    "pack": Case("pack", "pack", PACKED_FORMATS[T.Q6_K].defines, pack),
    "embed": Case("embed", "embed", PACKED_FORMATS[T.Q6_K].defines, embed),
    "quantise": quantised(T.Q4_0),
    "quantise F16": quantised(T.F16),
    "matvec": product(T.Q4_0, 1),
    "matmul_few": product(T.Q4_0, 16),
    "matmul": product(T.Q4_0, 40),
    "attention_split": attention("attention_split", F16),
    "attention_merge": attention("attention_merge", F16),
    "attention_prefill": attention("attention_prefill", F16),
    # Variants that do not prefetch, which devices with little shared memory use.
    "attention_split, small": attention("attention_split", smallest(F16)),
    "attention_split Q8_0, small": attention("attention_split", smallest(Q8_0)),
    "attention_prefill, small": attention("attention_prefill", smallest(F16)),
    "attention_prefill Q8_0, small": attention("attention_prefill", smallest(Q8_0)),
    "attention_split, values in keys": attention("attention_split", replace(F16, values_in_keys=True)),
    "attention_split Q8_0": attention("attention_split", Q8_0),
    "attention_prefill Q8_0": attention("attention_prefill", Q8_0),
    "rope_append": Case("rope_append", "append", append_defines(KVCache(0, 1, 24, 24, "q8_0")), append),
    "rotate_back": operation(
        "rotate_back",
        "append",
        append_defines(KVCache(0, 3, 32, 32, "q4_0")),
        lambda: operations.replace(operations.Heads(key_dim=32, value_dim=32), type="q4_0").case(),
    ),
    **{name: rows(name) for name in ("rms_norm", "gated", "rms_norm quantised", "gated quantised")},
    "layer_norm": operation("layer_norm", "elementwise", {}, lambda: operations.layer_norm(700, True)),
    "add": operation("add", "elementwise", {}, lambda: operations.add(0.5, True)),
    "route": operation("route", "experts", {}, lambda: operations.routing("sigmoid with all", norm_topk_prob=True)),
    "finish_experts": operation(
        "finish_experts", "experts", {}, lambda: operations.experts(T.F32, is_weighted_first=True, with_biases=True)
    ),
    "causal_conv": operation(
        "causal_conv",
        "convolution",
        {"KERNEL": 4, "AHEAD": 0},
        lambda: operations.causal_conv(4, silu_after=True, with_bias=True),
    ),
    "causal_conv ahead": operation(
        "causal_conv", "convolution", {"KERNEL": 15, "AHEAD": 7}, lambda: operations.convolution_ahead(15, 7)
    ),
    "recurrence": recurrence(is_per_channel=False),
    "recurrence by channel": recurrence(is_per_channel=True),
    "channel_scan": operation("channel_scan", "recurrent", {"STATES": 16}, lambda: operations.channel_scan(48, 16)),
    "wkv": operation(
        "wkv", "recurrent", {"RATE": 1, "BONUS": 1, "ROWS": 16, "COLUMNS": 16}, lambda: operations.wkv("small")
    ),
    "hyper_weights": operation("hyper_weights", "elementwise", {}, lambda: operations.hyper_weights(3, 4)),
    "mix_streams": operation("mix_streams", "elementwise", {}, lambda: operations.mix_streams(3, 4, True)),
    "stream_gate": operation("stream_gate", "elementwise", {}, lambda: operations.stream_gate(3)),
    "root_mean_square": operation("root_mean_square", "elementwise", {}, lambda: operations.root_mean_square(100)),
    "above_deviation": operation("above_deviation", "elementwise", {}, lambda: operations.above_deviation(100, 1.3)),
    "pool_keys": of_index("pool_keys", 32, 16, 8),
    "compress": operation(
        "compress",
        "selection",
        selection_defines(replace(one_key(48), n_heads=4), 0) | {"RUN": 4, "SERIES": 2},
        lambda: operations.compress(4, True),
    ),
    "attention_selected, entries": operation(
        "attention_selected",
        "selection",
        selection_defines(one_key(72, 64), 3, 4),
        lambda: operations.attention_to_entries(5, 4, 3),
    ),
    "index_scores": of_index("index_scores", 24, 20, 1),
    "index_select": of_index("index_select", 24, 20, 1),
    **{
        f"{kernel} of heads": operation(
            kernel,
            "selection",
            index_defines(one_key(24, is_index=True, is_exact=True), 8, 3, 24, run=4, n_last=1),
            lambda: operations.attention_to_largest_runs(4, 32, "f16"),
        )
        for kernel in ("index_scores", "index_select")
    },
    "attention_selected of heads": operation(
        "attention_selected",
        "selection",
        selection_defines(KVCache(0, 3, 40, 72), 32, by_head=True),
        lambda: operations.attention_to_largest_runs(4, 32, "f16"),
    ),
    "attention_selected": operation(
        "attention_selected",
        "selection",
        selection_defines(one_key(72, 64), 20),
        lambda: operations.selected_attention(20, "f16", True),
    ),
    "softcap": elementwise("softcap", soft_capped),
    "head_gate": operation("head_gate", "elementwise", {}, lambda: operations.head_gate("sigmoid")),
    "clamp": operation("clamp", "elementwise", {}, lambda: operations.clamp(-0.5)),
    "xielu": operation("xielu", "elementwise", {}, operations.xielu),
    "quantise of heads": operation(
        "quantise", "quantise", quantised(T.Q4_0).defines, lambda: operations.head_linear(T.Q4_0, 32)
    ),
    "copy_heads": operation("copy_heads", "elementwise", {}, lambda: operations.head_linear(T.F32, 32)),
    "add_rows": operation("add_rows", "elementwise", {}, lambda: operations.media_embeddings(100)),
    **{
        f"join_rows{' to a mean' * is_mean}": elementwise("join_rows", partial(joined_rows, is_mean))
        for is_mean in (False, True)
    },
    "gather_rows": elementwise("gather_rows", lambda d: gathered(d, random(5, 530), WANTED)),
    "argmax": elementwise("argmax", lambda d: largest(d, logits(5000))[0]),
    "top_parts": elementwise("top_parts", lambda d: top(d, logits(4000)[:1], 700)[0]),
    "top_merge": elementwise("top_merge", drawn),
    "group_by_expert": Case("group_by_expert", "experts", {}, grouped),
    "add_experts": mixture("add_experts", "experts", 7, {}),
    "quantise gathered": mixture("quantise", "quantise", 7, quantised(T.Q4_0).defines),
    **{kernel: expert_product(kernel) for kernel in BATCHES},
    "matvec_experts_summed": mixture("matvec_experts_summed", "matvec", 2, SUMMED.defines),
    **{name: ceiling(name) for name in ("read_words", "multiply_int8", "multiply_f16", "multiply_bf16")},
}


# -- The mistakes --------------------------------------------------------------------------------------------------


@dataclass
class PlantedModule:
    module: EmulatedModule
    mutations: list[Mutation]


@functools.cache
def planted(ptx: str) -> PlantedModule:
    """Return a module with the mistakes of all its kernels."""
    found = mutate.mutations(ptx)
    mutations: list[Mutation] = []
    for kernel in dict.fromkeys(m.kernel for m in found):
        mutations += chosen([m for m in found if m.kernel == kernel])
    return PlantedModule(mutate.plant(ptx, mutations), mutations)


def chosen(mutations: list[Mutation]) -> Iterator[Mutation]:
    """Choose mistakes of a kernel: all barriers and waits (of unrolled loops the first and last), and some others."""
    places: dict[tuple[str, Location | None], list[Mutation]] = {}
    for m in mutations:
        if m.kind in ("barrier", "wait"):
            places.setdefault((m.kind, m.before.location), []).append(m)
    for copies in places.values():
        yield from {m.before.span: m for m in (copies[0], copies[-1])}.values()
    for kind, n in (("operands", N_SWAPPED), ("fragments", 1)):
        some = [m for m in mutations if m.kind == kind]
        yield from some[:: -(-len(some) // n) or 1]


class PlantedDriver(EmulatedDriver):
    """A driver with mistakes in one module."""

    def __init__(self, ptx: str, order: Order) -> None:
        super().__init__(mode="check", kernel_order=order)
        self._wrong_ptx = ptx

    def _translated(self, ptx: str) -> EmulatedModule:
        return planted(ptx).module if ptx == self._wrong_ptx else super()._translated(ptx)


@functools.cache
def ptx_of(name: str) -> str:
    return EmulatedDriver(mode="check").ptx(CASES[name].module, CASES[name].defines)


def module_of(name: str) -> PlantedModule:
    return planted(ptx_of(name))


@functools.cache
def right(name: str) -> bytes:
    return run(name, ORDERS[0])


def run(name: str, order: Order) -> bytes:
    return CASES[name].run(Device(PlantedDriver(ptx_of(name), order), tile_rows=(TILE_ROWS,))).tobytes()


def is_caught(name: str, number: int) -> bool:
    """Return whether a planted mistake is caught; number 0 is the kernel without a mistake."""
    module = module_of(name).module
    for order in ORDERS:
        expected = right(name)
        module.mutation = number
        try:
            if run(name, order) != expected:
                return True
        except (KernelFault, AssertionError):
            return True
        finally:
            module.mutation = 0
    return False


@pytest.fixture(autouse=True)
def harness() -> None:
    skip_without_tools()


# A device whose kernel failed reports the error again when its memory is freed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", CASES)
def test_mistakes_are_caught(name: str) -> None:
    assert not is_caught(name, 0)
    mutations = module_of(name).mutations
    own = {number: m for number, m in enumerate(mutations, start=1) if m.kernel == CASES[name].kernel}
    swapped = [number for number, m in own.items() if m.kind in MAY_BE_EQUIVALENT[CASES[name].module]]
    missed = [str(m) for number, m in own.items() if number not in swapped and not is_caught(name, number)]
    assert not missed
    assert any(is_caught(name, number) for number in swapped)


def test_mistakes_are_planted_in_every_kernel() -> None:
    kinds: dict[str, set[str]] = {kernel: set() for name in CASES for kernel in module_of(name).module.kernels}
    assert set(kinds) == {case.kernel for case in CASES.values()}
    assert {case.module for case in CASES.values()} == {path.stem for path in FOLDER.glob("*.cu")}
    for name, case in CASES.items():
        kinds[case.kernel] |= {m.kind for m in module_of(name).mutations if m.kernel == case.kernel}
    for kernel, found in kinds.items():
        assert "operands" in found, kernel
        assert ("fragments" in found) == (kernel in ON_TENSOR_CORES), kernel


def test_every_barrier_and_wait_of_the_sources_is_dropped() -> None:
    call = re.compile(r"__sync(threads|warp)\(\)|wait_for_copies<.*>\(\)")
    wanted = {
        f"{path.name}:{number}"
        for path in FOLDER.glob("*.cu*")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if call.search(line)
    }
    dropped: set[str] = set()
    for name, case in CASES.items():
        for mutation in module_of(name).mutations:
            place = mutation.before.location if mutation.kernel == case.kernel else None
            while mutation.kind in ("barrier", "wait") and place is not None:
                dropped.add(f"{place.file}:{place.line}")
                place = place.inlined_at
    assert len(wanted) > 20
    assert not wanted - dropped
