"""Convolutions along the tokens of a block, whose kernels depend on the token."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.errors import KernelError
from localllm.kernels import operations
from localllm.kernels.cpu.backend import CPUBackend
from localllm.kernels.cpu.target import available
from localllm.kernels.graph import Graph
from localllm.kernels.reference import ReferenceBackend
from tests.helpers.run_model import make_batch
from tests.helpers.weights import f32, random


def graph_of(x: np.ndarray, factors: np.ndarray, base: np.ndarray, side: int) -> Graph:
    graph = Graph()
    graph.layer = 0
    inputs = [graph.add(operations.Embed(f32(rows))) for rows in (x, factors)]
    graph.add(operations.BlockConv(*inputs, f32(base.reshape(-1, base.shape[-1])), side))
    return graph


@pytest.mark.parametrize("backend", ["reference", *(target.name for target in available())])
@pytest.mark.parametrize(("kernel", "n_groups", "group", "side"), [(2, 4, 16, 0), (3, 3, 32, 1), (5, 1, 48, 0)])
def test_every_token_has_its_kernel(backend: str, kernel: int, n_groups: int, group: int, side: int) -> None:
    n, n_tokens = n_groups * group, 20
    x, factors = random(n_tokens, n, seed=1), random(n_tokens, 2 * kernel * n_groups, seed=2)
    base = random(2, kernel, n, seed=3)
    made = ReferenceBackend() if backend == "reference" else CPUBackend(threads=1, isa=backend)
    step = made.compile(graph_of(x, factors, base, side), n_pages=(8,), max_tokens=n_tokens, max_outputs=n_tokens)
    ids = [np.arange(7), np.arange(7, 8), np.arange(8, 20)]
    batch = make_batch([(part, start, range(4)) for part, start in zip(ids, (0, 5, 33), strict=True)])
    y = step(batch)
    kernels = base[side] + np.repeat(factors.reshape(n_tokens, 2, kernel, n_groups)[:, side], group, axis=2)
    expected = np.zeros((n_tokens, n))
    for part in ids:
        for t in part:
            for j in range(kernel):
                if t - j >= part[0]:
                    expected[t] += kernels[t, j] * x[t - j]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("n_factors", "rows", "side"), [(8, 5, 0), (8, 4, 2), (6, 4, 0), (16, 4, 0), (8, 40, 0)])
def test_wrong_arguments(n_factors: int, rows: int, side: int) -> None:
    with pytest.raises(KernelError):
        graph_of(random(3, 32), random(3, n_factors), random(rows, 1, 32), side)
