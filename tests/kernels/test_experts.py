"""Mixtures of experts on every backend, against the formulas in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.quant.types import GGMLType
from tests.helpers.backends import BACKENDS, OTHER_CPUS, Backend
from tests.helpers.blocks import random_rows, values_of
from tests.helpers.recorder import Experts, Ops
from tests.helpers.run_model import make_batch
from tests.helpers.weights import NO_CACHE, Tensor, f32, one_sequence, random, run

Array = NDArray[Any]
T = GGMLType
#: A number of experts that is no multiple of anything, and rows of theirs that are no whole groups.
N_EXPERTS, N_OUT, D = 11, 40, 64


def experts_of(type: GGMLType, n_out: int, n_in: int, seed: int = 0, n: int = N_EXPERTS) -> Tensor:
    rows = random_rows(type, n * n_out, n_in, seed=seed)
    return Tensor(type, (n, n_out, n_in), rows.reshape(n, n_out, -1))


def matrices(tensor: Tensor) -> Array:
    """[n_experts, n_out, n_in] in float64."""
    return values_of(tensor.data.reshape(-1, tensor.data.shape[-1]), tensor.type).reshape(tensor.shape)


def expert_weights_of(logits: Array, k: int, *, norm_topk_prob: bool, scale: float = 1.0) -> Array:
    """[T, E], 0 of experts that a token does not go to."""
    wide = logits.astype(np.float64)
    weights = np.exp(wide - wide.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    for row, own in zip(weights, wide, strict=True):
        chosen = sorted(range(len(row)), key=lambda e: (-own[e], e))[:k]
        row[[e for e in range(len(row)) if e not in chosen]] = 0
    if norm_topk_prob:
        weights /= weights.sum(axis=1, keepdims=True)
    return weights * scale


@dataclass
class Mixture:
    """Tokens, where they go, and the matrices of experts: the rows of tables are hidden states, logits, residuals."""

    ops: Ops
    weight: Experts
    x: Array
    logits: Array
    residual: Array
    k: int = 2
    norm_topk_prob: bool = True
    scale: float = 1.0

    def forward(self) -> Callable[[], Any]:
        tables = [self.ops.load_embedding(f32(a)) for a in (self.x, self.logits, self.residual)]

        def run_it() -> Any:
            x, logits, residual = (self.ops.embed(t) for t in tables)
            routing = self.ops.route(logits, self.k, norm_topk_prob=self.norm_topk_prob, scale=self.scale)
            h = self.ops.expert_linears(x, [self.weight], routing)[0]
            # The identity, so that each row is seen as it is.
            return self.ops.outputs(self.ops.expert_output(h, self.identity, routing, residual))

        return run_it

    @property
    def identity(self) -> Experts:
        n = self.weight.n_out
        return self.ops.load_experts(f32(np.broadcast_to(np.eye(n), (self.weight.n_experts, n, n))))

    def run(self) -> Array:
        return run(self.ops, self.forward(), one_sequence(len(self.x)))


def mixture(ops: Ops, tensor: Tensor, n: int, **changes: Any) -> Mixture:
    n_experts, n_out, n_in = tensor.shape
    x, logits = random(n, n_in, seed=1), random(n, n_experts, seed=2)
    return Mixture(ops, ops.load_experts(tensor), x, logits, random(n, n_out, seed=3), **changes)


# -- Routing -------------------------------------------------------------------------------------------------------


def shown_weights(ops: Ops, logits: Sequence[Sequence[float]] | Array, k: int, **options: Any) -> Array:
    """The weights of all experts: each answers with its own unit vector."""
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
def test_routes_are_the_likeliest(ops: Ops, n_experts: int, k: int, norm_topk_prob: bool) -> None:
    logits = 3 * random(7, n_experts)
    expected = expert_weights_of(logits, k, norm_topk_prob=norm_topk_prob, scale=2.5)
    found = shown_weights(ops, logits, k, norm_topk_prob=norm_topk_prob, scale=2.5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_of_equal_logits_the_lowest_expert_is_chosen(ops: Ops) -> None:
    logits = [[1, 2, 2, 2], [0, 0, 0, 0], [-0.0, 0.0, -1, 0], [3, 1, 3, 1]]
    expected = [[0, 0.5, 0.5, 0], [0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0]]
    np.testing.assert_allclose(shown_weights(ops, logits, 2, norm_topk_prob=True), expected, rtol=1e-6)


def test_logits_beyond_the_range_of_exp(ops: Ops) -> None:
    logits = [[1e4, 1e4 - 1, -1e4, 0], [-1e4, -1e4, -1e4 - 2, -2e4]]
    for norm_topk_prob in (False, True):
        expected = expert_weights_of(np.array(logits), 2, norm_topk_prob=norm_topk_prob)
        np.testing.assert_allclose(
            shown_weights(ops, logits, 2, norm_topk_prob=norm_topk_prob), expected, rtol=1e-5, atol=1e-30
        )


@pytest.mark.parametrize("k", [2, 4])
def test_logits_that_are_no_numbers_harm_nobody_else(ops: Ops, k: int) -> None:
    logits = np.array([[1, 2, 3, 4], [np.nan] * 4, [np.inf, np.nan, -np.inf, 1], [4, 3, 2, 1]], np.float32)
    found = shown_weights(ops, logits, k, norm_topk_prob=True)
    expected = expert_weights_of(logits[[0, 3]], k, norm_topk_prob=True)
    np.testing.assert_allclose(found[[0, 3]], expected, rtol=1e-5)


@pytest.mark.parametrize("k", [0, 5])
def test_more_experts_than_there_are_cannot_be_chosen(ops: Ops, k: int) -> None:
    with pytest.raises(KernelError, match=rf"{k} of 4 experts cannot be chosen: choose 1 to 4"):
        shown_weights(ops, np.zeros((1, 4)), k, norm_topk_prob=True)


# -- Products ------------------------------------------------------------------------------------------------------


#: A float, a format of 32 columns and one of 256: what differs between formats is tested in test_cpu_matmul.py.
TYPES = (T.F16, T.Q4_0, T.Q4_K)


@pytest.mark.parametrize(
    ("backend", "type"),
    [
        *(pytest.param(b, t, id=f"{b.name}-{t.name}") for b in BACKENDS for t in TYPES),
        *(pytest.param(b, T.Q4_0, id=b.name, marks=pytest.mark.ci) for b in OTHER_CPUS),
    ],
    scope="module",
)
@pytest.mark.parametrize("n_out", [N_OUT, 64])
@pytest.mark.parametrize("n", [1, 23])
def test_each_token_is_multiplied_with_its_experts(
    backend: Backend, ops: Ops, type: GGMLType, n_out: int, n: int
) -> None:
    tensor = experts_of(type, n_out, 256 if type is T.Q4_K else D)
    mix = mixture(ops, tensor, n, k=3)
    assert (mix.weight.n_experts, mix.weight.n_out, mix.weight.n_in) == tensor.shape
    w, x = matrices(tensor), mix.x.astype(np.float64)
    weights = expert_weights_of(mix.logits, 3, norm_topk_prob=True)
    expected = np.einsum("te,eoi,ti->to", weights, w, x) + mix.residual
    bound = np.einsum("te,eoi,ti->to", weights, np.abs(w), np.abs(x)) + np.abs(mix.residual)
    error = backend.half_error if type is T.F16 else 1e-6 if backend.is_exact or type is T.F32 else 1e-2
    assert (np.abs(mix.run() - expected) < (error + 1e-6) * bound).all()


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_a_token_has_the_same_bits_in_any_company(ops: Ops, type: GGMLType) -> None:
    """Alone, with a few, and among so many that experts have tiles of rows."""
    n = 150
    mix = mixture(ops, experts_of(type, N_OUT, 256, n=3), n)
    forward = mix.forward()
    step = ops.compile(forward, ops.new_cache(NO_CACHE, 16), max_tokens=n, max_outputs=n)
    pages = range(16)
    whole = step(make_batch([(range(n), 0, pages)])).copy()
    for ids in ([5], [149, 5], range(3, 8), range(20, 37), range(60), [5]):
        np.testing.assert_array_equal(step(make_batch([(ids, 0, pages)])), whole[list(ids)])


@pytest.mark.parametrize("types", [(T.Q4_0, T.Q4_K, T.F16), (T.Q4_0, T.Q4_0, T.F16)], ids=["mixed", "alike"])
def test_a_gated_mixture(backend: Backend, ops: Ops, types: Sequence[GGMLType]) -> None:
    """Gate, up and down, twice one behind the other, whose memory is used again."""
    n, f, d = 19, 96, 256
    tensors = [experts_of(types[0], f, d, 1), experts_of(types[1], f, d, 2), experts_of(types[2], d, f, 3)]
    gate, up, down = (ops.load_experts(t) for t in tensors)
    x, routed = random(n, d, seed=1) * np.float32(1e-3), 3 * random(n, N_EXPERTS, seed=2)
    tables = [ops.load_embedding(f32(a)) for a in (x, routed)]

    def forward() -> Any:
        y, logits = (ops.embed(t) for t in tables)
        for _ in range(2):
            routing = ops.route(logits, 2, norm_topk_prob=False)
            g, u = ops.expert_linears(y, [gate, up], routing)
            y = ops.expert_output(ops.gated(g, u, "silu"), down, routing, residual=y)
        return ops.outputs(y)

    weights, (w_gate, w_up, w_down) = expert_weights_of(routed, 2, norm_topk_prob=False), map(matrices, tensors)
    expected = x.astype(np.float64)
    for _ in range(2):
        g, u = (np.einsum("eoi,ti->teo", w, expected) for w in (w_gate, w_up))
        h = g / (1 + np.exp(-g)) * u
        expected = expected + np.einsum("te,eoi,tei->to", weights, w_down, h)
    found = run(ops, forward, one_sequence(n))
    error = 1e-5 if backend.is_exact else 3e-2
    assert np.abs(found - expected).max() < error * np.abs(expected).max()


# -- Loading -------------------------------------------------------------------------------------------------------
