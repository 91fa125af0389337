"""Predict the speed of the CUDA backend on unavailable GPUs, with a lower bound for the time of each launch.

    python -m tests.benchmarks.gpu.predict            tokens per second, and the used share of the GPU
    python -m tests.benchmarks.gpu.predict --calls    a decoded token, a prompt and a token of a mixture by call:
                                                      launches, bytes, times

The launches are from Llama 3 8B in Q4_K_M after lowering; only their times are modelled, by
`localllm.kernels.cuda.prediction`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from localllm.kernels import graph as g, operations as ops
from localllm.kernels.backend import Batch
from localllm.kernels.cuda.backend import CUDABackend
from localllm.kernels.cuda.cache import PAGE, CUDACache
from localllm.kernels.cuda.calls import BatchSizes, StepLimits
from localllm.kernels.cuda.driver import DeviceProperties, Driver
from localllm.kernels.cuda.lowering import CUDALowered, CUDALowering
from localllm.kernels.cuda.matmul import ProductLimits
from localllm.kernels.cuda.prediction import HANDOVER, CallCost, DeviceRates, predicted
from localllm.kernels.cuda.row_split import Exchange, ShardLowering
from localllm.kernels.cuda.weights import CUDAPackedWeights, CUDAWeightLoader
from localllm.kernels.shards import shard
from localllm.kernels.split import MICRO_BATCH
from localllm.quant.types import GGMLType
from tests.benchmarks.gpu.report import table
from tests.benchmarks.gpu.sections import Row
from tests.helpers.synthetic import FILE_TYPES, SHAPES, tensor_shapes, tensor_type
from tests.helpers.weights import Tensor

MAX_TOKENS = CUDABackend.step_tokens

#: Qwen3 30B A3B with half of its query heads; number of experts, experts per token, and their width.
SPARSE = replace(SHAPES["llama-8b"], n_layers=48, n_embd=2048, n_heads=16, n_kv_heads=4, n_vocab=151_936)
MIXTURE = 128, 8, 768
#: Goal for prompts, as a share of the peak; and the share of the memory for weights and caches.
PREFILL, ROOM = 0.45, 0.95


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        peak: int8 operations per second of the tensor cores, dense, from the data sheet.
        decode_aim: goal for one sequence, as a share of the speed of copies.
    """

    properties: DeviceProperties
    rates: DeviceRates
    peak: float
    decode_aim: float


def _card(
    name: str,
    capability: tuple[int, int],
    n: int,
    gb: int,
    shared: int,
    *,
    peak: float,
    decode_aim: float,
    **rates: Any,
) -> Card:
    properties = DeviceProperties(name, capability, n, gb << 30, shared << 10, "")
    return Card(properties, DeviceRates(**rates), peak, decode_aim)


CARDS = (
    # NVIDIA's data sheet of the H100 SXM: 132 multiprocessors, 3.35 TB/s, 1,979 int8 and 989 f16 dense; its
    # whitepaper: 1.755 GHz.  Copies move 3.0 TB/s (seen on one, through PyTorch).  mma.sync reaches 62% of the peak
    # (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking", 2024).
    # NVLink 4 moves 450 GB/s one way, by the data sheet.
    _card("H100", (9, 0), 132, 80, 227, copy=3.0e12, clock=1.755e9,
          products={"int8": 0.62 * 1979e12, "f16": 0.62 * 989e12}, peak=1979e12, link=450e9, decode_aim=0.8),
    # NVIDIA's whitepaper of Ada: 128 multiprocessors at 2.52 GHz, 1,008 GB/s, 660.6 int8 and 165.2 f16 with sums of
    # float32, dense.  That copies move 92% of the bandwidth is a guess, and so is that the way through the host, with
    # no peers, moves 12 GB/s over PCIe 4.
    _card("RTX 4090", (8, 9), 128, 24, 99, copy=0.92 * 1008e9, clock=2.52e9,
          products={"int8": 660.6e12, "f16": 165.2e12}, peak=660.6e12, link=12e9, decode_aim=0.88),
)  # fmt: skip


def llama(name: str = "llama-8b", file_type: str = "q4_k_m", *, mixture: bool = False) -> g.Graph:
    """Return the graph of a model, optionally with experts; weights have sizes and no bytes."""
    shape, kind, graph = SPARSE if mixture else SHAPES[name], FILE_TYPES[file_type], g.Graph()
    weights = {
        name: Tensor(tensor_type(name, size, shape, kind), size, np.empty(0, np.uint8), name)
        for name, size in tensor_shapes(shape)
    }
    rope, dim = g.Rope(np.ones(shape.head_dim // 2, np.float32), interleaved=True), shape.head_dim
    x = graph.add(ops.Embed(weights["token_embd.weight"]))
    for graph.layer in range(shape.n_layers):
        own = {name.split(".")[2]: w for name, w in weights.items() if name.startswith(f"blk.{graph.layer}.")}
        cache = graph.kv_cache(shape.n_kv_heads, dim)
        h = graph.add(ops.RMSNorm(x, own["attn_norm"], shape.norm_eps))
        q, k, v = graph.add(ops.Linears(h, tuple(g.Matrix(own[f"attn_{name}"]) for name in "qkv")))
        q = graph.add(ops.RopeAppend(q, k, v, cache, rope))
        x = graph.add(ops.Linear(graph.add(ops.Attention(q, cache, dim**-0.5)), g.Matrix(own["attn_output"]), x))
        h = graph.add(ops.RMSNorm(x, own["ffn_norm"], shape.norm_eps))
        if mixture:
            n, k, width = MIXTURE
            routing = graph.add(ops.Route(graph.add(ops.Linear(h, g.Matrix(_weight(n, shape.n_embd)))), k, True))
            into, out = _weight(n, width, shape.n_embd), _weight(n, shape.n_embd, width)
            gate, up = graph.add(ops.ExpertLinears(h, (into, into), routing))
            x = graph.add(ops.ExpertOutput(graph.add(ops.Gated(gate, up, "silu")), out, routing, x))
            continue
        gate, up = graph.add(ops.Linears(h, (g.Matrix(own["ffn_gate"]), g.Matrix(own["ffn_up"]))))
        x = graph.add(ops.Linear(graph.add(ops.Gated(gate, up, "silu")), g.Matrix(own["ffn_down"]), x))
    graph.layer = "output"
    x = graph.add(ops.RMSNorm(graph.add(ops.Outputs(x)), weights["output_norm.weight"], shape.norm_eps))
    graph.add(ops.Linear(x, g.Matrix(weights["output.weight"])))
    return graph


def _weight(*shape: int) -> Tensor:
    """Return a weight of a router or of experts."""
    type, name = (GGMLType.Q4_K, "experts") if len(shape) > 2 else (GGMLType.F32, "router")
    return Tensor(type, shape, np.empty(0, np.uint8), name)


def row(name: str, cost: CallCost) -> Row:
    times = {"gaps and latencies, us": 1e6 * cost.waits, "us": 1e6 * cost.seconds}
    return {"call": name, "launches": cost.n_launches, "MB": cost.n_bytes / 1e6, **times}


def total(calls: Mapping[str, CallCost]) -> CallCost:
    return sum(calls.values(), CallCost())


class Model:
    """The 8B model on a card, for steps of up to ``n_sequences`` sequences of a length.

    Args:
        n_rows: number of GPUs for a split by rows; the model is the first GPU's part.
        graph: another model.
    """

    def __init__(
        self,
        card: Card,
        n_sequences: int,
        length: int,
        *,
        mixture: bool = False,
        n_rows: int = 1,
        graph: g.Graph | None = None,
    ) -> None:
        self.card, self.pages = card, -(-length // PAGE)
        graphs = [graph or llama(mixture=mixture)] if n_rows == 1 else shard(llama(), n_rows)
        graph = graphs[0]
        driver = cast(Driver, SimpleNamespace(properties=lambda device: card.properties, stream=lambda device: None))
        cache = CUDACache(graph, (self.pages * n_sequences,), n_sequences if graph.states else 0)
        own = card.properties
        limits = ProductLimits(own.capability, own.shared_bytes, n_multiprocessors=own.n_multiprocessors)
        weights = CUDAPackedWeights(CUDAWeightLoader(driver, 0))
        steps = StepLimits(graph, card.properties, cache, MAX_TOKENS, 32, limits)
        exchanges = [Exchange.of(each, steps) for each in graphs]
        lowering = (
            CUDALowering(graph, weights, steps)
            if n_rows == 1
            else ShardLowering(graph, weights, steps, exchanges, 0, ())
        )
        self.lowered: CUDALowered = lowering.lower()
        token = BatchSizes(1, 1, ((1, 1),))  # one token reads all weights
        self.n_bytes = cache.n_bytes + sum(call.cost(token).n_bytes for call in self.lowered.calls)

    def predict(self, n_sequences: int, n: int, length: int) -> dict[str, CallCost]:
        """Return the cost of a step with ``n`` tokens per sequence, at the end of ``length`` tokens."""
        past, n_tokens = np.arange(length - n, length, dtype=np.int32), n * n_sequences
        batch = Batch(
            ids=np.zeros(n_tokens, np.int32),
            positions=np.tile(past, n_sequences),
            query_starts=np.arange(0, n_tokens + 1, n, dtype=np.int32),
            kv_lengths=np.full(n_sequences, length, np.int32),
            block_tables=np.zeros((1, n_sequences, self.pages), np.int32),
            outputs=np.arange(n_sequences, dtype=np.int32),
            states=np.arange(n_sequences, dtype=np.int32),
        )
        return predicted(self.lowered, batch, self.card.properties, self.card.rates)


def decode(card: Card, n_sequences: int, depth: int, n_gpus: int, *, rows: bool = False) -> Row:
    """Predict decoding with caches of ``depth`` tokens."""
    row = _row(card, f"tg @ {depth}", n_sequences, n_gpus, rows=rows)
    model = Model(card, n_sequences, depth + 1, n_rows=n_gpus if rows else 1)
    if model.n_bytes > ROOM * (1 if rows else n_gpus) * card.properties.total_bytes:
        return {**row, "tok/s": "does not fit"}
    calls = model.predict(n_sequences, 1, depth + 1)
    seconds = total(calls).seconds + (0 if rows else (n_gpus - 1) * HANDOVER)
    share = total(calls).n_bytes / card.rates.copy / seconds / (1 if rows else n_gpus)
    aim = card.decode_aim if n_sequences == n_gpus == 1 else None
    return row | _found(n_sequences / seconds, total(calls).n_launches, share, "copies", aim)


def prefill(card: Card, n: int, n_gpus: int, *, rows: bool = False) -> Row:
    """Predict a prompt in steps.  Two GPUs have half of the layers each, or half of each layer."""
    n_parts = 1 if rows else n_gpus  # stages of the pipeline
    model = Model(card, 1, n, n_rows=n_gpus if rows else 1)
    size = min(n, MAX_TOKENS if n_parts == 1 else MICRO_BATCH)
    steps = [total(model.predict(1, size, end)) for end in range(size, n + 1, size)]
    seconds = sum(step.seconds / n_parts + (n_parts - 1) * HANDOVER for step in steps)
    seconds += (n_parts - 1) * steps[-1].seconds / n_parts  # the second GPU starts and ends later
    matrices = (size for name, size in tensor_shapes(SHAPES["llama-8b"]) if name.startswith("blk.") and len(size) > 1)
    share = sum(2.0 * n * rows * columns for rows, columns in matrices) / seconds / card.peak / n_gpus
    n_launches = sum(step.n_launches for step in steps)
    row = _row(card, f"pp {n}", 1, n_gpus, rows=rows)
    return row | _found(n / seconds, n_launches, share, "int8's peak", PREFILL if n_gpus == 1 else None)


def _row(card: Card, test: str, n_sequences: int, n_gpus: int, *, rows: bool) -> Row:
    gpus = f"{n_gpus}, by rows" if rows else n_gpus
    return {"card": card.properties.name, "test": test, "sequences": n_sequences, "GPUs": gpus}


def _found(rate: float, n_launches: int, share: float, of: str, aim: float | None) -> Row:
    verdict = "" if aim is None else f"{'reached' if share >= aim else 'missed'}: {aim:.0%}"
    return {"tok/s": rate, "launches": n_launches, "share": f"{share:.0%} of {of}", "aim": verdict}


def predictions() -> Iterator[Row]:
    """Return every row of the table."""
    for card in CARDS:
        for n_gpus, rows in ((1, False), (2, False), (2, True)):
            yield from (decode(card, n, depth, n_gpus, rows=rows) for depth in (512, 32768) for n in (1, 8, 32))
            yield from (prefill(card, n, n_gpus, rows=rows) for n in (512, 8192))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="list the calls of one token and of a prompt")
    if not parser.parse_args().calls:
        print(table(list(predictions())))
        return
    for card in CARDS:
        for n, mixture in ((1, False), (MAX_TOKENS, False), (1, True)):
            calls = Model(card, 1, MAX_TOKENS, mixture=mixture).predict(1, n, MAX_TOKENS)
            took, of = 1e6 * total(calls).seconds, ", with experts" if mixture else ""
            print(f"\n{card.properties.name}{of}, {n} tokens up to {MAX_TOKENS}: {took:,.0f} us\n")
            print(table([row(*call) for call in calls.items()]))


if __name__ == "__main__":
    main()
