"""States of recurrent operations: copies, and the states that a batch names."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels import operations
from localllm.kernels.backend import Step
from localllm.kernels.graph import Graph, Tensor
from tests.helpers.recorder import Ops
from tests.helpers.run_model import make_batch
from tests.helpers.weights import f32, random

N_TOKENS, N_STATES = 11, 4


def conv(graph: Graph) -> Tensor:
    """Two layers, each a convolution of 40 columns."""
    x = graph.add(operations.Embed(f32(random(N_TOKENS, 40))))
    for graph.layer in range(2):
        weight, bias = f32(random(40, 4, seed=graph.layer)), f32(random(40, seed=7))
        x = graph.add(operations.CausalConv(x, weight, graph.state("conv", 3, 40), bias, silu=graph.layer == 0))
    return x


def rows(graph: Graph, width: int, seed: int) -> Tensor:
    return graph.add(operations.Embed(f32(random(N_TOKENS, width, seed=seed))))


def delta(graph: Graph, per_channel: bool = False) -> Tensor:
    """Four value heads and two key heads of 16 x 32, with one tensor for all, or with a decay per channel."""
    widths = (32, 32, 128) if per_channel else (192,)
    qkv = tuple(rows(graph, width, seed) for seed, width in enumerate(widths))
    gates = rows(graph, 64 if per_channel else 4, 4), rows(graph, 4, 5)
    weights = f32(-np.abs(random(4, seed=6))), f32(random(gates[0].width, seed=7))
    graph.layer = 0
    return graph.add(operations.GatedDelta(qkv, *gates, *weights, graph.state("delta", 4, 16, 32), 2))


def scan(graph: Graph) -> Tensor:
    """Four heads of 16 values with a state of 32 per value, in two groups."""
    xbc, dt = (rows(graph, 4 * 16 + 2 * 2 * 32, 1),), rows(graph, 4, 2)
    weights = f32(-np.abs(random(4, seed=6))[:, None]), f32(random(4, seed=7)), f32(random(4, seed=8)[:, None])
    graph.layer = 0
    return graph.add(operations.Scan(xbc, dt, *weights, graph.state("scan", 4, 32, 16), 2))


KINDS = {"conv": conv, "delta": delta, "delta-channels": partial(delta, per_channel=True), "scan": scan}


@pytest.fixture(params=KINDS)
def step(request: pytest.FixtureRequest, ops: Ops) -> Step:
    graph = Graph()
    graph.add(operations.Outputs(KINDS[request.param](graph)))
    sizes = {"n_pages": (1,), "n_states": N_STATES, "max_tokens": N_TOKENS, "max_outputs": N_TOKENS}
    step = ops.backend.compile(graph, **sizes)
    assert sum(ops.backend.footprint(graph, **sizes).caches.values()) == step.cache.n_bytes
    return step


def run(step: Step, first: int, stop: int, slot: int) -> NDArray[np.float32]:
    return step(make_batch([(range(first, stop), first, [0])], states=[slot])).copy()


def test_a_copied_state_continues_independently(step: Step) -> None:
    whole = run(step, 0, N_TOKENS, 0)
    run(step, 0, 6, 1)
    step.cache.copy(None, 1, 3)
    run(step, 6, 9, 1)
    np.testing.assert_array_equal(run(step, 6, N_TOKENS, 3), whole[6:])
    np.testing.assert_array_equal(run(step, 9, N_TOKENS, 1), whole[9:])


@pytest.mark.parametrize("states", [[], [0], [1, 1], [0, N_STATES], [-1, 0], [0, 1, 2]])
def test_a_batch_with_missing_shared_or_unknown_states_is_refused(step: Step, states: list[int]) -> None:
    batch = make_batch([([0], 0, [0]), ([1], 0, [0])])
    with pytest.raises(KernelError, match="recurrent state"):
        step(replace(batch, states=np.array(states, np.int32)))
