"""Predicted time of a step on a GPU: the sum of a lower bound for each launch.

A launch takes the gap before it, a latency of memory, and the longest of three times: its bytes at the speed of
copies, its products at the rate of the tensor cores, its instructions at the rate of the schedulers. The prediction
is too optimistic: it omits the last wave of blocks (except for products of prompts), weights and keys that are read
again from the second-level cache, the exponentials of attention, and stalls of the schedulers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Self

import numpy as np

from localllm.kernels.backend import Batch
from localllm.kernels.cuda.backend import CUDABackend
from localllm.kernels.cuda.cache import PAGE, CUDACache
from localllm.kernels.cuda.calls import BatchSizes, Extent
from localllm.kernels.cuda.driver import DeviceProperties
from localllm.kernels.cuda.lowering import CUDALowered, CUDALowering
from localllm.kernels.cuda.roofline import CUDARoofline, Kind
from localllm.kernels.cuda.row_split import Barrier
from localllm.kernels.cuda.step import extent_of
from localllm.kernels.cuda.weights import CUDAPackedWeights
from localllm.kernels.graph import Graph

#: Seconds between two kernels of a graph.  Kernels of 2.9 us took 3.4 us each in a graph on a V100 (A. Gray, "Getting
#: Started with CUDA Graphs", NVIDIA, 2019); `tests.benchmarks.gpu` measures it, in the section ceilings.
GAP = 0.5e-6
#: Latency of a load that no cache serves, as in matvec.cu; still to be measured.
LATENCY = 0.7e-6
#: Estimated seconds to move hidden states to another device over PCIe: an event, a copy and a wait.
HANDOVER = 15e-6
#: Estimated seconds that synchronising all devices takes in a graph over several devices.
MEET = 5e-6
#: Warp instructions for 32 rows and 32 columns of weights: in matvec per token and per unpacking, in other kernels
#: per 8 tokens.  They include loops and were counted in the SASS for sm_90 (by nvdisasm): matmul in tiles of 128
#: tokens for Q4_K and 64 for Q6_K, matmul_few in tiles of 8.  Other formats are counted as Q6_K.
TOKEN, UNPACK = 8 + 3 + 3, {"Q4_K": 12, "Q6_K": 24}
EIGHT_TOKENS = {"matmul": {"Q4_K": 46, "Q6_K": 85}, "matmul_few": {"Q4_K": 106, "Q6_K": 153}}
#: Largest number of operations of attention per clock and multiprocessor: 16 rows of 4 * 128 * 64 operations take
#: 1,100 warp instructions (SASS for sm_90, heads of 128 values in F16, including merges and masks).
ATTENTION = 4 * 4 * 128 * 64 * 16 / 1100


@dataclass(frozen=True)
class DeviceRates:
    """Speeds of a GPU.

    Attributes:
        copy: speed of copies in its memory, in bytes per second, read and written.
        products: operations per second of mma.sync, by the type of the operands.
        clock: frequency of the multiprocessors, which start four warp instructions per period; infinite if unknown.
        link: bytes per second to another device, in one direction; infinite if unknown.
    """

    copy: float
    products: Mapping[Kind, float]
    clock: float = math.inf
    link: float = math.inf

    @classmethod
    def measured(cls, roofline: CUDARoofline) -> Self:
        """Measure the speed of copies and the rates of products, in a fraction of a second."""
        return cls(roofline.copy_bandwidth(), {kind: roofline.rate(kind) for kind in roofline.kinds})


@dataclass(frozen=True)
class CallCost:
    """Predicted cost of some calls."""

    n_launches: int = 0
    n_bytes: float = 0.0
    waits: float = 0.0  # seconds for gaps and latencies
    seconds: float = 0.0  # including ``waits``

    def __add__(self, other: CallCost) -> CallCost:
        return CallCost(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def planned_step(backend: CUDABackend, graph: Graph, n_tokens: int, max_tokens: int) -> CUDALowered:
    """Return the calls of a graph for one sequence of up to ``n_tokens`` tokens, without memory on the device.

    Args:
        max_tokens: maximum number of tokens of a step.
    """
    n_pages = (-(-n_tokens // PAGE),) * len(graph.windows)
    cache = CUDACache(graph, n_pages, 1 if graph.states else 0)
    limits = backend.limits(graph, cache, max_tokens, 1)
    return CUDALowering(graph, CUDAPackedWeights(backend.loader), limits).lower()


def one_sequence(graph: Graph, n: int, depth: int, n_outputs: int = 1) -> Batch:
    """Return a batch with ``n`` tokens of a sequence, after ``depth`` tokens."""
    length = depth + n
    return Batch(
        ids=np.zeros(n, np.int32),
        positions=np.arange(depth, length, dtype=np.int32),
        query_starts=np.array([0, n], np.int32),
        kv_lengths=np.array([length], np.int32),
        block_tables=np.zeros((len(graph.windows), 1, -(-length // PAGE)), np.int32),
        outputs=np.arange(n_outputs, dtype=np.int32),
        states=np.zeros(1, np.int32),
    )


def predicted(
    lowered: CUDALowered, batch: Batch, properties: DeviceProperties, rates: DeviceRates
) -> dict[str, CallCost]:
    """Return the cost of each kind of call for a batch."""
    extent = replace(extent_of(lowered.limits, batch), top_k=1)
    sizes, costs = BatchSizes.of(batch, lowered.limits.mixture), dict[str, CallCost]()
    for name, n_launches, n_bytes, seconds in _calls(lowered, extent, sizes, properties, rates):
        waits = n_launches * (GAP + LATENCY)
        costs[name] = costs.get(name, CallCost()) + CallCost(n_launches, n_bytes, waits, waits + seconds)
    return costs


def _calls(
    lowered: CUDALowered, extent: Extent, sizes: BatchSizes, properties: DeviceProperties, rates: DeviceRates
) -> Iterator[tuple[str, int, float, float]]:
    """Yield name, launches, bytes, and seconds without gaps and latencies of each call."""
    n_multiprocessors = properties.n_multiprocessors
    clocks = n_multiprocessors * rates.clock
    for call in lowered.calls:
        launches, cost = list(call.launches(extent)), call.cost(sizes)
        if isinstance(call, Barrier):  # the following launches read the exchanged sums
            yield call.name, 0, 0.0, MEET + cost.n_bytes / rates.link
        if not (kernels := [launch.kernel for launch in launches]):
            continue
        seconds, is_lanes = cost.n_bytes / rates.copy, kernels[0].startswith("matvec")
        if cost.kind is not None and not is_lanes:
            rate = rates.products[cost.kind]
            rate = min(rate, ATTENTION * clocks) if call.name == "attention" else rate
            seconds = max(seconds, cost.n_operations / rate)
        if cost.kind == "int8" and sizes.n_tokens:
            format = call.name.removesuffix(" + add").split()[-1].split("+")[0]  # the format with the most rows
            n = sizes.n_outputs if lowered.result in call.operands else sizes.n_tokens
            if is_lanes:
                per_block = n * TOKEN + UNPACK.get(format, UNPACK["Q6_K"])
            else:
                by_format = EIGHT_TOKENS["matmul_few" if "few" in kernels[0] else "matmul"]
                per_block = -(-n // 8) * by_format.get(format, by_format["Q6_K"])
            n_instructions = cost.n_operations / (2 * n * 32 * 32) * per_block
            seconds = max(seconds, n_instructions / (4 * clocks))
        if kernels[0] == "matmul":  # a multiprocessor runs one block at a time; in the last wave, some are idle
            grids, n = [math.prod(launch.grid) for launch in launches], n_multiprocessors
            seconds *= sum(-(-n_blocks // n) * n for n_blocks in grids) / sum(grids)
        yield call.name, len(kernels), cost.n_bytes, seconds
