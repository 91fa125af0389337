"""Predict decoding of mixtures of experts on one GPU and the CPU, with routed experts of some layers on the CPU.

    python -m tests.benchmarks.gpu.predict_offload

Nothing is measured: the graph of each model is divided as in loading (`localllm.kernels.offload`), the device's graph
is lowered, and its launches are timed by the model of `tests.benchmarks.gpu.predict`.  The CPU reads its experts at
`BANDWIDTH` times `SHARE`.  The graphs have the matrices of the models.  They omit operations that take little time:
norms of heads, convolutions, and gates of queries.  The GPU's time for shared experts is counted in
full, although the CPU computes at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import numpy as np

from localllm.kernels import graph as g, operations as ops
from localllm.kernels.backend import PackedWeight, weights_of
from localllm.kernels.cpu.weights import planned_weight
from localllm.kernels.cuda.driver import Driver
from localllm.kernels.cuda.weights import CUDAPackedWeights, CUDAWeightLoader
from localllm.kernels.offload import Offloaded, offload
from localllm.loading.bandwidths import BLOCK_S
from localllm.loading.devices import GPU_OVERHEAD_BYTES
from localllm.loading.overrides import Overrides
from localllm.quant.types import GGMLType
from tests.benchmarks.gpu.predict import CARDS, Model, total
from tests.benchmarks.gpu.report import table
from tests.benchmarks.gpu.sections import Row
from tests.helpers.weights import Tensor

#: Two channels of DDR5-5600 are 89.6 GB/s by the data sheet; that programs read 85% of it is a guess.  The kernels of
#: experts reached 89% to 93% of a machine's bandwidth (docs/speed.md).
BANDWIDTH, SHARE = 0.85 * 89.6e9, 0.9
#: Bytes per second between the host and the GPU, and memory that the host has for weights.
LINK, HOST_MEMORY = 12e9, 60e9
#: Tokens in the cache.
DEPTH = 8192


@dataclass(frozen=True)
class Mixture:
    """Sizes of a model.  One of ``n_full`` layers has attention, the others have a recurrent state."""

    name: str
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_experts: int
    n_used: int
    n_ff: int
    n_ff_shared: int
    n_vocab: int
    experts: GGMLType
    n_dense: int = 0
    n_ff_dense: int = 0
    n_full: int = 1
    n_linear_heads: int = 0

    def graph(self) -> g.Graph:
        graph, d = g.Graph(), self.n_embd
        x = graph.add(ops.Embed(weight("token_embd", self.n_vocab, d)))
        rope = g.Rope(np.ones(self.head_dim // 2, np.float32), interleaved=False)
        for graph.layer in range(self.n_layers):
            h = graph.add(ops.RMSNorm(x, weight("norm", d), 1e-6))
            x = graph.add(ops.Linear(self._attention(graph, h, rope), *self._output(graph), x))
            h = graph.add(ops.RMSNorm(x, weight("norm", d), 1e-6))
            if graph.layer < self.n_dense:
                x = gated(graph, h, self.n_ff_dense, x)
                continue
            router = matrix("router", self.n_experts, d, type=GGMLType.F32)
            routing = graph.add(ops.Route(graph.add(ops.Linear(h, router)), self.n_used, True))
            if self.n_ff_shared:
                x = gated(graph, h, self.n_ff_shared, x)
            name = f"blk.{graph.layer}.ffn_up_exps"
            sizes = (self.n_experts, self.n_ff, d), (self.n_experts, d, self.n_ff)
            up, down = (weight(name, *size, type=self.experts) for size in sizes)
            gate = weight(name, *sizes[0], type=self.experts)
            gate_rows, up_rows = graph.add(ops.ExpertLinears(h, (gate, up), routing))
            x = graph.add(ops.ExpertOutput(graph.add(ops.Gated(gate_rows, up_rows, "silu")), down, routing, x))
        graph.layer = "output"
        x = graph.add(ops.RMSNorm(graph.add(ops.Outputs(x)), weight("norm", d), 1e-6))
        graph.add(ops.Linear(x, matrix("output", self.n_vocab, d)))
        return graph

    def _has_attention(self, graph: g.Graph) -> bool:
        assert isinstance(graph.layer, int)
        return graph.layer % self.n_full == self.n_full - 1

    def _attention(self, graph: g.Graph, h: g.Tensor, rope: g.Rope) -> g.Tensor:
        if self._has_attention(graph):
            cache = graph.kv_cache(self.n_kv_heads, self.head_dim)
            rows = (n * self.head_dim for n in (self.n_heads, self.n_kv_heads, self.n_kv_heads))
            q, k, v = graph.add(ops.Linears(h, tuple(matrix("attn", n, self.n_embd) for n in rows)))
            return graph.add(ops.Attention(graph.add(ops.RopeAppend(q, k, v, cache, rope)), cache, 0.1))
        n, n_keys, dim = self.n_linear_heads, 16, 128
        state = graph.state("s", n, dim, dim)
        widths = 2 * n_keys * dim + n * dim, n * dim
        qkv, gate = graph.add(ops.Linears(h, tuple(matrix("attn", width, self.n_embd) for width in widths)))
        floats = tuple(matrix("beta", n, self.n_embd, type=GGMLType.F32) for _ in range(2))
        decay, beta = graph.add(ops.Linears(h, floats))
        vectors = weight("a", n), weight("dt", n)
        y = graph.add(ops.GatedDelta((qkv,), decay, beta, *vectors, state, n_keys))
        return graph.add(ops.Gated(gate, y, "silu"))

    def _output(self, graph: g.Graph) -> tuple[g.Matrix]:
        n = self.n_heads * self.head_dim if self._has_attention(graph) else self.n_linear_heads * 128
        return (matrix("attn", self.n_embd, n),)


#: Sizes from the configurations of the models.  Matrices other than experts are in Q6_K.
MIXTURES = (
    Mixture("gpt-oss-120b, MXFP4", 36, 2880, 64, 8, 64, 128, 4, 2880, 0, 201_088, GGMLType.MXFP4),
    Mixture(
        *("Qwen 3.5 122B-A10B, Q4_K", 48, 3072, 32, 2, 256, 256, 8, 1024, 1024, 248_320, GGMLType.Q4_K),
        n_full=4,
        n_linear_heads=64,
    ),
    Mixture(
        *("GLM-4.7, Q4_K", 92, 5120, 96, 8, 128, 160, 8, 1536, 1536, 151_552, GGMLType.Q4_K),
        n_dense=3,
        n_ff_dense=12_288,
    ),
)


def weight(name: str, *shape: int, type: GGMLType | None = None) -> Tensor:
    if type is None:
        type = GGMLType.F32 if len(shape) == 1 else GGMLType.Q6_K
    if shape[-1] % 256 and type is GGMLType.Q6_K:
        type = GGMLType.Q8_0
    return Tensor(type, shape, np.empty(0, np.uint8), name)


def matrix(name: str, *shape: int, type: GGMLType | None = None) -> g.Matrix:
    return g.Matrix(weight(name, *shape, type=type))


def gated(graph: g.Graph, h: g.Tensor, n_ff: int, residual: g.Tensor) -> g.Tensor:
    gate, up = graph.add(ops.Linears(h, (matrix("gate", n_ff, h.width), matrix("up", n_ff, h.width))))
    return graph.add(ops.Linear(graph.add(ops.Gated(gate, up, "silu")), matrix("down", h.width, n_ff), residual))


def predict(mixture: Mixture) -> Row:
    """Predict a token on an RTX 4090 and two channels of DDR5."""
    card, graph = CARDS[1], mixture.graph()
    graphs, model = _fitting(mixture, graph, card.properties.total_bytes - GPU_OVERHEAD_BYTES)
    on_host = [planned_weight(use) for use in weights_of(graphs.host)]
    n_blocks = len({w.layer for w in on_host})
    used = sum(w.n_bytes for w in on_host if w.is_expert) * mixture.n_used / mixture.n_experts
    taken = total(model.predict(1, 1, DEPTH))
    copied = graphs.copied_bytes(1)
    seconds = taken.seconds + used / (BANDWIDTH * SHARE) + n_blocks * BLOCK_S + copied / LINK
    least = taken.n_bytes / card.rates.copy + used / BANDWIDTH
    host_bytes = sum(w.n_bytes for w in on_host)
    return {
        "model": mixture.name,
        "--n-cpu-moe": n_blocks + mixture.n_dense,
        "experts on the CPU, GB": host_bytes / 1e9,
        "fits into 64 GB": "yes" if host_bytes < HOST_MEMORY else "no",
        "read per token by the GPU, GB": taken.n_bytes / 1e9,
        "by the CPU, GB": used / 1e9,
        "copied, kB": copied / 1e3,
        "tok/s": 1 / seconds,
        "share of bytes / bandwidth": f"{least / seconds:.0%}",
    }


def _fitting(mixture: Mixture, graph: g.Graph, room: float) -> tuple[Offloaded, Model]:
    """Return the division with the fewest layers on the host whose other part fits on the GPU."""
    driver = cast(Driver, SimpleNamespace(properties=lambda _: CARDS[1].properties, stream=lambda _: None))
    weights = CUDAPackedWeights(CUDAWeightLoader(driver, 0))
    experts = dict[int, int]()
    n_bytes = 0
    planned: list[PackedWeight] = [weights.planned(use) for use in weights_of(graph)]
    for packed in planned:
        n_bytes += packed.n_bytes
        if packed.is_expert and isinstance(packed.layer, int):
            experts[packed.layer] = experts.get(packed.layer, 0) + packed.n_bytes
    n = 0
    # Cache and activations; more than a step needs.
    n_bytes += sum(DEPTH * cache.bytes_per_token() for cache in graph.caches.values()) + (1 << 30)
    while n_bytes > room and n < mixture.n_layers:
        n_bytes -= experts.get(n, 0)
        n += 1
    graphs = offload(graph, Overrides(n_layers=n).is_on_host)
    assert graphs is not None
    return graphs, Model(CARDS[1], 1, DEPTH, graph=graphs.device)


def rows() -> Iterator[Row]:
    yield from map(predict, MIXTURES)


if __name__ == "__main__":
    print(table(list(rows())))
