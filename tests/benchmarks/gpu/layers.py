"""Layers that the model of the other sections lacks: the time of each call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from localllm.kernels import graph as g, operations as ops
from localllm.kernels.backend import HostOutput
from localllm.kernels.cuda.profile import Profiler, watching
from localllm.kernels.graph import Graph, Matrix, Rope
from localllm.quant.types import GGMLType
from tests.benchmarks.gpu.sections import Row
from tests.helpers import weights
from tests.helpers.blocks import random_rows
from tests.helpers.run_model import make_batch
from tests.helpers.weights import f32, random

if TYPE_CHECKING:
    from tests.benchmarks.gpu.machine import Machine

#: Adds a layer over rows of x to a graph.
Layer = Callable[[Graph, g.Tensor], g.Tensor]
#: Layers that are timed at once, so that their weights exceed the caches.
N_LAYERS = 4
#: Rows of random weights; larger matrices repeat them.
_POOL = 512


def layers(machine: Machine) -> Iterator[Row]:
    """Measure each kind of layer with each batch."""
    for name, (width, layer) in machine.sizes.layers.items():
        for batch in machine.sizes.batches:
            for row in _layer(machine, width, layer, *batch):
                yield {"layer": name, **row}
            gc.collect()  # frees memory of the device


def _layer(machine: Machine, width: int, layer: Layer, n_sequences: int, n: int, length: int) -> Iterator[Row]:
    """Yield a row per kind of call, with the microseconds of one layer."""
    graph, backend, n_tokens = Graph(), machine.make_backend(machine.driver, 0), n * n_sequences
    x = graph.add(ops.Input(g.Tensor(g.Rows.TOKENS, width)))
    for graph.layer in range(N_LAYERS):
        layer(graph, x)
    pages, n_groups = -(-length // backend.page_size), len(graph.windows)
    step = backend.compile(
        graph,
        n_pages=(pages * n_sequences,) * n_groups,
        max_tokens=n_tokens,
        max_outputs=1,
        n_states=n_sequences if graph.states else 0,
    )
    parts = [([0] * n, length - n, range(s * pages, (s + 1) * pages)) for s in range(n_sequences)]
    batch = make_batch(parts, [0])
    tables = np.repeat(batch.block_tables, n_groups, axis=0)
    profiler = Profiler(machine.repetitions, machine.least_launches)
    with watching(profiler):
        step.run(replace(batch, block_tables=tables), HostOutput(random(n_tokens, width))).rows()
    ceilings = machine.ceilings(0)
    for share in profiler.profiles[0].shares.values():
        floor = share.cost.seconds(ceilings.copy, ceilings.rates)
        yield {
            "batch": f"{n_sequences} x {n} at {length}",
            "call": share.name,
            "launches": share.n_launches / N_LAYERS,
            "us": 1e6 * share.seconds / N_LAYERS,
            "of floor": f"{floor / share.seconds:.0%}",
        }


# -- Layers --------------------------------------------------------------------------------------------------------


def latent_attention(
    graph: Graph, x: g.Tensor, *, n_heads: int, key_dim: int, value_dim: int, n_rotated: int, latent: int
) -> g.Tensor:
    """DeepSeek's latent attention; ``key_dim`` values of a head are not rotated."""
    of_all = latent + n_rotated
    cache = graph.kv_cache(1, of_all, latent, values_in_keys=True)
    q, k = graph.add(ops.Linears(x, (_matrix(n_heads * (key_dim + n_rotated), x.width), _matrix(of_all, x.width))))
    q = graph.add(ops.HeadLinear(q, _weight(n_heads, latent, key_dim)))
    q = graph.add(ops.RopeAppend(q, k, None, cache, Rope(_frequencies(n_rotated), interleaved=True, first=latent)))
    y = graph.add(ops.Attention(q, cache, of_all**-0.5))
    return graph.add(ops.HeadLinear(y, _weight(n_heads, value_dim, latent)))


def attention(graph: Graph, x: g.Tensor, *, n_heads: int, n_kv_heads: int, dim: int, window: int) -> g.Tensor:
    """Attention with a window and sinks, as in gpt-oss."""
    cache = graph.kv_cache(n_kv_heads, dim, window=window)
    q, k, v = graph.add(ops.Linears(x, tuple(_matrix(n * dim, x.width) for n in (n_heads, n_kv_heads, n_kv_heads))))
    q = graph.add(ops.RopeAppend(q, k, v, cache, Rope(_frequencies(dim), interleaved=False)))
    return graph.add(ops.Attention(q, cache, dim**-0.5, window, sinks=f32(random(n_heads))))


def delta_net(graph: Graph, x: g.Tensor, *, n_key_heads: int, n_heads: int, dim: int) -> g.Tensor:
    """Qwen 3 Next's delta net with its convolution."""
    width = (2 * n_key_heads + n_heads) * dim
    qkv, decay, beta = graph.add(ops.Linears(x, tuple(_matrix(n, x.width) for n in (width, n_heads, n_heads))))
    qkv = graph.add(ops.CausalConv(qkv, f32(random(width, 4)), graph.state("conv", 3, width), silu=True))
    a, bias = f32(-np.abs(random(n_heads))), f32(random(n_heads))
    state = graph.state("S", n_heads, dim, dim)
    return graph.add(ops.GatedDelta((qkv,), decay, beta, a, bias, state, n_key_heads=n_key_heads))


def scan(graph: Graph, x: g.Tensor, *, n_heads: int, dim: int, state_dim: int) -> g.Tensor:
    """Mamba 2's scan with its convolution."""
    width = n_heads * dim + 2 * state_dim
    xbc, dt = graph.add(ops.Linears(x, (_matrix(width, x.width), _matrix(n_heads, x.width))))
    xbc = graph.add(ops.CausalConv(xbc, f32(random(width, 4)), graph.state("conv", 3, width), silu=True))
    a, bias, d = f32(-np.abs(random(n_heads))), f32(random(n_heads)), f32(random(n_heads, seed=1))
    return graph.add(ops.Scan((xbc,), dt, a, bias, d, graph.state("S", n_heads, state_dim, dim), n_groups=1))


def mixture(graph: Graph, x: g.Tensor, *, n_experts: int, k: int, n_ff: int) -> g.Tensor:
    """Qwen 3's experts."""
    routing = graph.add(ops.Route(graph.add(ops.Linear(x, Matrix(f32(random(n_experts, x.width))))), k, True))
    residual = graph.add(ops.Scale(x, 1.0))
    up = tuple(_weight(n_experts, n_ff, x.width) for _ in range(2))
    h = graph.add(ops.Gated(*graph.add(ops.ExpertLinears(x, up, routing)), "silu"))
    return graph.add(ops.ExpertOutput(h, _weight(n_experts, x.width, n_ff), routing, residual))


def _frequencies(n: int) -> np.ndarray:
    return np.float32(1) / 10_000 ** np.arange(0, 1, 2 / n, np.float32)


def _matrix(n_out: int, n_in: int) -> Matrix:
    return Matrix(_weight(n_out, n_in))


def _weight(*shape: int) -> weights.Tensor:
    """Return a separate tensor for each call, although tensors of one shape have the same values."""
    return weights.Tensor(GGMLType.Q4_0, shape, _rows(shape), name=" x ".join(map(str, shape)))


@cache
def _rows(shape: tuple[int, ...]) -> np.ndarray:
    pool = random_rows(GGMLType.Q4_0, _POOL, shape[-1])
    return np.resize(pool, (prod(shape[:-1]), pool.shape[1])).reshape(*shape[:-1], -1)
