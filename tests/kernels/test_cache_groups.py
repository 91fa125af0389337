"""Groups of caches with windows: pages before the window are reused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from localllm.errors import KernelError
from localllm.kernels import graph as g, operations
from localllm.kernels.backend import Batch, Step, check_cache
from localllm.kernels.graph import Graph, Matrix, Rope
from localllm.kernels.split import graph_part
from tests.helpers.recorder import Ops
from tests.helpers.run_model import make_batch
from tests.helpers.weights import f32, random

N_VOCAB, D, HEAD = 40, 32, 16
#: Windows of the layers.
WINDOWS = (7, None, 70, 7)


def windowed_model() -> Graph:
    graph, rope = Graph(), Rope(np.float32(1) / 100 ** np.arange(0, 1, 0.25, np.float32), interleaved=True)
    x = graph.add(operations.Embed(f32(random(N_VOCAB, D))))
    for graph.layer, window in enumerate(WINDOWS):
        n_heads = 1 + graph.layer % 2
        cache = graph.kv_cache(n_heads, HEAD, window=window)
        widths = (D, n_heads * HEAD, n_heads * HEAD)
        q, k, v = graph.add(operations.Linears(x, tuple(Matrix(f32(random(n, D, seed=graph.layer))) for n in widths)))
        q = graph.add(operations.RopeAppend(q, k, v, cache, rope))
        y = graph.add(operations.Attention(q, cache, HEAD**-0.5, window))
        x = graph.add(operations.Linear(y, Matrix(f32(random(D, D, seed=graph.layer))), residual=x))
    graph.layer = "output"
    graph.add(operations.Outputs(x))
    return graph


def compiled(ops: Ops, n_pages: tuple[int, ...], n_tokens: int) -> Step:
    graph, sizes = windowed_model(), {"max_tokens": n_tokens, "max_outputs": n_tokens}
    step = ops.backend.compile(graph, n_pages=n_pages, **sizes)
    footprint = ops.backend.footprint(graph, n_pages=n_pages, **sizes)
    assert sum(footprint.caches.values()) == step.cache.n_bytes
    assert (step.cache.windows, step.cache.n_pages) == ([None, 7, 70], n_pages)
    return step


def with_tables(batch: Batch, tables: list[list[int]]) -> Batch:
    return replace(batch, block_tables=np.array(tables, np.int32)[:, None])


@pytest.mark.parametrize("cuts", [[64, 128, 140, 191, 192, 193, 200], [100, 199], range(190, 201)])
def test_pages_before_a_window_can_be_reused(ops: Ops, cuts: list[int]) -> None:
    bounds = [0, *cuts, 210]
    n_tokens = max(b - a for a, b in pairwise(bounds))
    n_blocks, page = -(-bounds[-1] // ops.page_size), ops.page_size
    ids = [i * i % N_VOCAB for i in range(bounds[-1])]
    step = compiled(ops, (n_blocks,) * 3, n_tokens)
    whole = [range(n_blocks)] * 3
    expected = [step(with_tables(make_batch([(ids[a:b], a, [0])]), whole)).copy() for a, b in pairwise(bounds)]
    # Use the pages of a window and a batch in turn.
    n_pages = (n_blocks, *(-(-(w - 1) // page) + 1 + -(-n_tokens // page) for w in (7, 70)))
    step = compiled(ops, n_pages, n_tokens)
    for (a, b), logits in zip(pairwise(bounds), expected, strict=True):
        seen = [0, max(0, a + 1 - 7) // page, max(0, a + 1 - 70) // page]
        tables = [
            [i % n if i >= first else 1 << 30 for i in range(n_blocks)]
            for n, first in zip(n_pages, seen, strict=True)
        ]
        np.testing.assert_array_equal(step(with_tables(make_batch([(ids[a:b], a, [0])]), tables)), logits)


def test_a_page_is_copied_in_the_layers_of_its_group(ops: Ops) -> None:
    step = compiled(ops, (2, 2, 2), 4)
    batch = make_batch([([1, 2, 3], 0, [0])])
    step(with_tables(batch, [[0], [0], [0]]))
    step(with_tables(make_batch([([4, 5, 6], 0, [0])]), [[1], [1], [1]]))
    last = make_batch([([7], 3, [0])])
    expected = step(with_tables(last, [[0], [1], [0]])).copy()
    step.cache.copy(1, 1, 0)
    np.testing.assert_array_equal(step(with_tables(last, [[0], [0], [0]])), expected)


def test_a_batch_must_name_pages_of_each_group(ops: Ops) -> None:
    step, batch = compiled(ops, (2, 1, 1), 4), make_batch([([1, 2, 3], 0, [0])])
    step(with_tables(batch, [[1], [0], [0]]))
    for tables in ([[0], [1], [0]], [[0], [0], [-1]], [[0], [0]]):
        with pytest.raises(KernelError, match=r"outside a cache of 1|block tables of 2 groups of caches, not 3"):
            step(with_tables(batch, tables))


def test_a_part_of_a_graph_keeps_the_group_numbers(ops: Ops) -> None:
    part = graph_part(windowed_model(), range(2, 4))
    assert part.windows == [None, 7, 70]
    assert {layer: part.group(cache) for layer, cache in part.caches.items()} == {2: 2, 3: 1}


def test_attention_with_a_window_larger_than_its_cache_is_refused() -> None:
    graph = Graph(layer=0)
    cache = graph.kv_cache(1, HEAD, window=7)
    q = graph.add(operations.Input(g.Tensor(g.Rows.TOKENS, HEAD)))
    graph.add(operations.Attention(q, cache, 1.0, 6))
    for window in (8, None):
        with pytest.raises(KernelError, match="no further back than a cache of 7"):
            graph.add(operations.Attention(q, cache, 1.0, window))
    with pytest.raises(KernelError, match="pages for 1"):
        check_cache(graph, (3,), 0)
