"""A small artificial model with a layer of every kind: attention over all tokens, a window, latents, another
layer's cache and entries of token groups, and two recurrences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from localllm.kernels import operations as ops
from localllm.kernels.graph import Graph, Matrix, Rope, Tensor
from tests.helpers.weights import f32, random

N_VOCAB, D, HEAD, WINDOW = 50, 64, 16, 24
ROPE = Rope(np.float32(1) / 1000 ** np.arange(0, 1, 0.25, np.float32), interleaved=True)


def matrix(n_out: int, n_in: int, seed: int) -> Matrix:
    return Matrix(f32(random(n_out, n_in, seed=seed) / np.sqrt(n_in)))


#: The same with position axes, for models that see images.
TURNED = replace(ROPE, axes=(0, 1, 2, 1))


def attention(
    graph: Graph,
    x: Tensor,
    seed: int,
    *,
    window: int | None = None,
    shared: int | None = None,
    rope: Rope = ROPE,
    has_spans: bool = False,
) -> Tensor:
    cache = graph.caches[shared] if shared is not None else graph.kv_cache(2, HEAD, window=window)
    q = graph.add(ops.Linear(x, matrix(4 * HEAD, D, seed)))
    k, v = (
        (None, None)
        if shared is not None
        else graph.add(ops.Linears(x, (matrix(2 * HEAD, D, seed + 1), matrix(2 * HEAD, D, seed + 2))))
    )
    q = graph.add(ops.RopeAppend(q, k, v, cache, rope))
    return graph.add(ops.Attention(q, cache, HEAD**-0.5, window, has_spans=has_spans))


def latent_attention(graph: Graph, x: Tensor, seed: int) -> Tensor:
    cache = graph.kv_cache(1, 3 * HEAD, 2 * HEAD, values_in_keys=True)
    q, k = graph.add(ops.Linears(x, (matrix(2 * 3 * HEAD, D, seed), matrix(3 * HEAD, D, seed + 1))))
    q = graph.add(ops.RopeAppend(q, k, None, cache, ROPE))
    return graph.add(ops.Attention(q, cache, (3 * HEAD) ** -0.5))


def attention_to_entries(graph: Graph, x: Tensor, seed: int) -> Tensor:
    """Return the context: half a window, and three entries of overlapping groups of four tokens."""
    dim = 2 * HEAD
    cache = graph.kv_cache(1, dim, values_in_keys=True, window=WINDOW)
    kept = graph.kv_cache(4, dim, values_in_keys=True, window=WINDOW, number=1)
    entries = graph.kv_cache(1, dim, values_in_keys=True, number=2, stride=4)
    widths = 4 * dim, 4 * dim, dim, 4, 4 * dim
    q, of_index, k, weights, rows = graph.add(
        ops.Linears(x, tuple(matrix(n, D, seed + i) for i, n in enumerate(widths)))
    )
    rows = graph.add(ops.RopeAppend(rows, rows, None, kept, None))
    entry = graph.add(ops.Compress(rows, kept, f32(random(4, 2 * dim, seed=seed))))
    graph.add(ops.RopeAppend(entry, entry, None, entries, replace(ROPE, position_offset=-3)))
    selected = graph.add(ops.IndexSelect(of_index, weights, entries, 3))
    q = graph.add(ops.RopeAppend(q, k, None, cache, ROPE))
    return graph.add(ops.Attention(q, cache, dim**-0.5, WINDOW // 2, selected=selected, entries=entries))


def delta_net(graph: Graph, x: Tensor, seed: int) -> Tensor:
    width, n = 4 * 2 * HEAD, 4
    qkv, decay, beta = graph.add(
        ops.Linears(x, (matrix(width, D, seed), matrix(n, D, seed + 1), matrix(n, D, seed + 2)))
    )
    conv = f32(random(width, 4, seed=seed + 3) / 2)
    qkv = graph.add(ops.CausalConv(qkv, conv, graph.state("conv", 3, width), silu=True))
    a, bias = f32(-np.abs(random(n, seed=seed))), f32(random(n, seed=seed + 1))
    return graph.add(ops.GatedDelta((qkv,), decay, beta, a, bias, graph.state("S", n, HEAD, HEAD), n_key_heads=2))


def scan(graph: Graph, x: Tensor, seed: int) -> Tensor:
    n = 4
    xbc, dt = graph.add(ops.Linears(x, (matrix((n + 2) * HEAD, D, seed), matrix(n, D, seed + 1))))
    a, bias, d = f32(-np.abs(random(n, seed=seed))), f32(random(n, seed=seed + 1)), f32(random(n, seed=seed + 2))
    return graph.add(ops.Scan((xbc,), dt, a, bias, d, graph.state("S", n, HEAD, HEAD), n_groups=1))


LAYERS: list[Callable[[Graph, Tensor, int], Tensor]] = [
    attention,
    delta_net,
    lambda graph, x, seed: attention(graph, x, seed, window=WINDOW),
    latent_attention,
    scan,
    lambda graph, x, seed: attention(graph, x, seed, shared=0),
    attention_to_entries,
]


#: Models that see images: the first by position axes, the second with bidirectional attention among image tokens.
SEEING: list[Callable[[Graph, Tensor, int], Tensor]] = [
    lambda graph, x, seed: attention(graph, x, seed, rope=TURNED),
    lambda graph, x, seed: attention(graph, x, seed, window=WINDOW, has_spans=True),
]


def hybrid(*, sees: bool = False) -> Graph:
    """Return the model; with ``sees``, its layers see images and have no states."""
    graph, ones = Graph(), f32(np.ones(D))
    x = graph.add(ops.Embed(f32(random(N_VOCAB, D)), takes_rows=sees))
    for graph.layer, layer in enumerate(SEEING if sees else LAYERS):
        y = layer(graph, graph.add(ops.RMSNorm(x, ones, 1e-6)), 10 * graph.layer)
        x = graph.add(ops.Linear(y, matrix(D, y.width, 7), residual=x))
        if sees and graph.layer == 0:
            x = graph.add(ops.AddRows(x, 1))
    graph.layer = "output"
    x = graph.add(ops.RMSNorm(graph.add(ops.Outputs(x)), ones, 1e-6))
    graph.add(ops.Linear(x, matrix(N_VOCAB, D, 8)))
    return graph
