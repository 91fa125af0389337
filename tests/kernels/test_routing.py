"""Routing of tokens to experts on every backend: numbers of experts, ties, and extreme logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import KernelError
from tests.helpers.recorder import Ops
from tests.helpers.weights import f32, one_sequence, random, run

Array = NDArray[Any]


def expert_weights_of(logits: Array, k: int, *, norm_topk_prob: bool, scale: float = 1.0) -> Array:
    """Weights [T, E]; 0 for experts that a token is not routed to."""
    wide = logits.astype(np.float64)
    weights = np.exp(wide - wide.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    for row, own in zip(weights, wide, strict=True):
        chosen = sorted(range(len(row)), key=lambda e: (-own[e], e))[:k]
        row[[e for e in range(len(row)) if e not in chosen]] = 0
    if norm_topk_prob:
        weights /= weights.sum(axis=1, keepdims=True)
    return weights * scale


def shown_weights(ops: Ops, logits: Sequence[Sequence[float]] | Array, k: int, **options: Any) -> Array:
    """Return the weights of all experts.  Expert i outputs the unit vector i."""
    wide = np.asarray(logits, np.float32)
    n_tokens, n = wide.shape
    tables = [ops.load_embedding(f32(a)) for a in (np.ones((n_tokens, 32)), wide, np.zeros((n_tokens, n)))]
    units = np.zeros((n, n, 32), np.float32)
    units[np.arange(n), np.arange(n), 0] = 1
    weights = ops.load_experts(f32(units)), ops.load_experts(f32(np.broadcast_to(np.eye(n), (n, n, n))))

    def forward() -> Any:
        x, routed, residual = (ops.embed(t) for t in tables)
        routing = ops.route(routed, k, **options)
        h = ops.expert_linears(x, weights[:1], routing)[0]
        return ops.outputs(ops.expert_output(h, weights[1], routing, residual))

    return run(ops, forward, one_sequence(n_tokens))


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize(("n_experts", "k"), [(1, 1), (5, 2), (16, 16), (130, 8)])
def test_tokens_are_routed_to_the_highest_logits(ops: Ops, n_experts: int, k: int, norm_topk_prob: bool) -> None:
    logits = 3 * random(7, n_experts)
    expected = expert_weights_of(logits, k, norm_topk_prob=norm_topk_prob, scale=2.5)
    found = shown_weights(ops, logits, k, norm_topk_prob=norm_topk_prob, scale=2.5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_ties_are_routed_to_the_lowest_expert(ops: Ops) -> None:
    logits = [[1, 2, 2, 2], [0, 0, 0, 0], [-0.0, 0.0, -1, 0], [3, 1, 3, 1]]
    expected = [[0, 0.5, 0.5, 0], [0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0]]
    np.testing.assert_allclose(shown_weights(ops, logits, 2, norm_topk_prob=True), expected, rtol=1e-6)


def test_logits_outside_the_range_of_exp(ops: Ops) -> None:
    logits = [[1e4, 1e4 - 1, -1e4, 0], [-1e4, -1e4, -1e4 - 2, -2e4]]
    for norm_topk_prob in (False, True):
        expected = expert_weights_of(np.array(logits), 2, norm_topk_prob=norm_topk_prob)
        np.testing.assert_allclose(
            shown_weights(ops, logits, 2, norm_topk_prob=norm_topk_prob), expected, rtol=1e-5, atol=1e-30
        )


@pytest.mark.parametrize("k", [2, 4])
def test_nan_logits_affect_only_their_own_token(ops: Ops, k: int) -> None:
    logits = np.array([[1, 2, 3, 4], [np.nan] * 4, [np.inf, np.nan, -np.inf, 1], [4, 3, 2, 1]], np.float32)
    found = shown_weights(ops, logits, k, norm_topk_prob=True)
    expected = expert_weights_of(logits[[0, 3]], k, norm_topk_prob=True)
    np.testing.assert_allclose(found[[0, 3]], expected, rtol=1e-5)


@pytest.mark.parametrize("k", [0, 5])
def test_k_outside_1_to_the_number_of_experts_is_refused(ops: Ops, k: int) -> None:
    with pytest.raises(KernelError, match=rf"{k} of 4 experts cannot be chosen: choose 1 to 4"):
        shown_weights(ops, np.zeros((1, 4)), k, norm_topk_prob=True)
