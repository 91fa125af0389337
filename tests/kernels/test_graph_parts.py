"""Parts of a graph on every backend, as `localllm.kernels.split` uses them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from localllm.errors import KernelError
from localllm.kernels.backend import HostOutput, Step
from localllm.kernels.graph import Graph, Matrix, Node, Rows, Tensor
from localllm.kernels.operations import Add, Embed, Input, Linear, Outputs, RMSNorm
from localllm.kernels.split import graph_part
from tests.helpers.recorder import Ops
from tests.helpers.run_model import make_batch
from tests.helpers.weights import NO_CACHE, f32, random


def compiled(ops: Ops, graph: Graph, n: int = 8) -> Step:
    return ops.backend.compile(graph, n_pages=(1,), max_tokens=n, max_outputs=n)


@pytest.mark.parametrize("width", [1, 5, 32, 100])
def test_parts_pass_hidden_states_on(ops: Ops, width: int) -> None:
    """Three parts give the bits of the whole graph, also for fewer tokens.  Each part embeds the ids again."""
    x, weight = random(7, width), Matrix(f32(random(width, width, seed=1)))
    norm = f32(random(width, seed=2))
    g = Graph()
    y = embedding = g.add(Embed(f32(x)))
    for g.layer in range(3):
        y = g.add(Linear(g.add(RMSNorm(y, norm, 1e-5)), weight, residual=y))
        y = g.add(Add(embedding, y, 0.5))
    g.layer = "output"
    g.add(Outputs(y))
    whole, *parts = (compiled(ops, part) for part in (g, *(graph_part(g, range(i, i + 1)) for i in range(3))))
    for ids, wanted in ((range(7), [6, 0]), ([4, 4], [1]), ([3], [])):
        batch = make_batch([(ids, 0, [0])], outputs=wanted)
        hidden = None
        for part in parts:
            hidden = part.run(batch, hidden)
            if part is not parts[-1]:
                assert hidden.rows().shape == (len(ids), width)
        np.testing.assert_array_equal(hidden.rows(), whole(batch))


def test_hidden_states_that_do_not_fit_are_refused(ops: Ops) -> None:
    part = compiled(ops, Graph(nodes=[Node(Input(Tensor(Rows.TOKENS, 5)), 1)]), 4)
    batch = make_batch([(range(3), 0, [0])])
    with pytest.raises(KernelError, match=r"hidden states of 5.*, but got none"):
        part.run(batch)
    for wrong in (random(2, 5), random(3, 6), random(3, 5).astype(np.float64)):
        with pytest.raises(KernelError, match=r"needs \[3, 5\] in float32"):
            part.run(batch, HostOutput(wrong))
    np.testing.assert_array_equal(part.run(batch, HostOutput(random(3, 5))).rows(), random(3, 5))


def test_inputs_are_columns_of_the_hidden_states(ops: Ops) -> None:
    tensors = [Tensor(Rows.TOKENS, n) for n in (33, 5)]
    x, y, graph = random(3, 33), random(3, 5, seed=1), Graph()
    for tensor, first in zip(tensors, (0, 33), strict=True):
        graph.add(Input(tensor, first, 38))
    graph.add(Linear(tensors[0], Matrix(f32(weight := random(5, 33, seed=2))), residual=tensors[1]))
    out = compiled(ops, graph).run(make_batch([(range(3), 0, [0])]), HostOutput(np.hstack([x, y])))
    np.testing.assert_allclose(out.rows(), x @ weight.T + y, rtol=1e-4, atol=1e-5)


def test_the_largest_logits(ops: Ops) -> None:
    """NaN comes first, and among equal logits the lowest id."""
    logits = random(4, 3000)
    logits[1] = np.round(logits[1])
    logits[2, [700, 30]], logits[2, 5] = np.nan, np.inf
    logits[3], logits[3, 9] = -np.inf, -0.0
    table = ops.load_embedding(f32(logits))
    cache = ops.new_cache(NO_CACHE, 1)
    step: Any = ops.compile(lambda: ops.outputs(ops.embed(table)), cache, max_tokens=4, max_outputs=4)
    for rows, k in (([0, 1, 2, 3], 1), ([3, 0], 7), ([1, 2, 1], 100), ([], 3)):
        ids, found, whole, _ = step.top_k(make_batch([(range(4), 0, [0])], outputs=rows), k, range(len(rows))[1:3])
        assert set(whole) == {*range(len(rows))[1:3]}
        for i, row in whole.items():
            np.testing.assert_array_equal(row, logits[rows[i]])
        assert ids.shape == found.shape == (len(rows), k)
        assert (ids.dtype, found.dtype) == (np.int32, np.float32)
        for row, some, values in zip(rows, ids.tolist(), found, strict=True):
            x = logits[row].tolist()
            assert some == sorted(range(3000), key=lambda i, x=x: (x[i] == x[i], -x[i], i))[:k]
            np.testing.assert_array_equal(values, logits[row, some])
