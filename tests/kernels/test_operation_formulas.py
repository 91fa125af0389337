"""Every operation on every backend, compared with an independent formula in float64.

A case records operations over made-up inputs and computes the expected rows.  `test_operation` then runs two
sequences in one batch, and again in chunks of many sizes, which must give the same bits.

To test a new operation, add a function with the decorator `cases`.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels import graph as g, operations
from localllm.kernels.backend import Batch
from localllm.kernels.cpu.memory import PADDING
from localllm.kernels.graph import CacheType, Graph, HeadNorm, KVCache, Matrix, PositionScale, Rope
from localllm.kernels.operations.dense import HEAD_GATES, UNGATED
from localllm.quant.types import GGMLType
from tests.helpers.backends import BACKENDS, OTHER_CPUS, Backend, no_harness
from tests.helpers.blocks import random_rows, values_of
from tests.helpers.recorder import CPUOps, Ops
from tests.helpers.run_model import make_batch
from tests.helpers.weights import Tensor, blocks, f32, random
from tests.kernels import formulas
from tests.kernels.formulas import attended, heads, normed

Array = NDArray[Any]

#: Tokens of the two sequences.  The first sequence covers two pages.
LENGTHS = (100, 20)
#: Epsilon of the norm that checks padding.
EPS = 1e-6
#: Tokens of the first and of the second sequence in each batch of the second run.
CHUNKS = ((3, 0), (61, 5), (1, 1), (0, 9), (30, 3), (4, 0), (1, 2))


@dataclass(frozen=True, eq=False)
class Case:
    """Operations and their expected result.

    Attributes:
        build: records the operations over the inputs and returns the tensor whose rows are compared.
        inputs: arrays [sum(LENGTHS), width], the rows of both sequences.
        expected: computes the rows of one sequence in float64.
        rtol, atol: tolerances of `numpy.testing.assert_allclose`.
        error: tolerance relative to the largest value, for backends that round activations.
        only: prefixes of the names of the backends that support the operation.
        slow: skip emulated CUDA, because g++ needs too long for the kernel.
        every_cpu: also run on the other instruction sets.
        chunk_error: tolerance between chunks and the full run, relative to the largest value; 0 requires equal bits.
        in_parts: whether sequences may be split into chunks.
        attends: add the backend's `attention_error` to the tolerance.
        has_near: another case compiles nearly the same kernel, so only CI runs this case on the CPU.
        completed: adds media, spans or axes to a batch.
    """

    build: Callable[..., g.Tensor]
    inputs: Sequence[Array]
    expected: Callable[..., Array]
    rtol: float = 1e-5
    atol: float = 2e-6
    error: float = 0.0
    only: tuple[str, ...] = ("reference", "cpu", "cuda")
    slow: bool = False
    every_cpu: bool = False
    chunk_error: float = 0.0
    in_parts: bool = True
    completed: Callable[[Batch], Batch] = lambda batch: batch
    attends: bool = False
    has_near: bool = False


#: Factories of the cases by name.
CASES: dict[str, Callable[[], Case]] = {}


def cases(**options: Sequence[Any]) -> Callable[[Callable[..., Case]], Callable[..., Case]]:
    """Register one case per combination of the arguments."""

    def enter(make: Callable[..., Case]) -> Callable[..., Case]:
        for chosen in itertools.product(*options.values()):
            given = dict(zip(options, chosen, strict=True))
            name = "-".join([make.__name__, *(f"{k}={_shown(v)}" for k, v in given.items())])
            CASES[name] = functools.partial(make, **given)
        return make

    return enter


def _shown(value: Any) -> str:
    return value.name if isinstance(value, GGMLType) else str(value).replace("'", "")


def rows(width: int, seed: int = 0) -> Array:
    """Random inputs of both sequences."""
    return random(sum(LENGTHS), width, seed=seed)


def _runs_on(case: Case, backend: Backend) -> bool:
    known = backend.name.startswith(case.only)
    return known and not (case.slow and backend.is_slow) and (case.every_cpu or backend not in OTHER_CPUS)


def _marks(case: Case, backend: Backend) -> list[Any]:
    """Mark cases that only CI runs: other instruction sets, and kernels that are nearly the same as another."""
    is_rare = backend in OTHER_CPUS or (case.has_near and backend.name.startswith("cpu"))
    return [pytest.mark.ci] if is_rare else []


def _each() -> list[Any]:
    made = {name: make() for name, make in CASES.items()}
    return [
        pytest.param(backend, case, id=f"{backend.name}-{name}", marks=_marks(case, backend))
        for backend in (*BACKENDS, *OTHER_CPUS)
        for name, case in made.items()
        if _runs_on(case, backend)
    ]


def compiled(ops: Ops, case: Case, n_pages: int, *, is_normed: bool = False) -> Any:
    graph = Graph()
    graph.layer = 0
    inputs = [graph.add(operations.Embed(f32(x))) for x in case.inputs]
    y = case.build(graph, *inputs)
    if is_normed:
        y = graph.add(operations.RMSNorm(y, f32(np.ones(y.width)), EPS))
    graph.add(operations.Outputs(y))
    n = sum(LENGTHS)
    return ops.backend.compile(
        graph, n_pages=(n_pages,) * len(graph.windows), n_states=3, max_tokens=n, max_outputs=n
    )


def check_operation(backend: Backend, ops: Ops, case: Case) -> None:
    per_page = ops.page_size
    counts = [-(-n // per_page) for n in LENGTHS]
    pages = np.split(np.random.default_rng(0).permutation(sum(counts) + 1)[1:], [counts[0]])
    step = compiled(ops, case, sum(counts) + 1)
    backend.spoil(step.cache)
    ids = np.split(np.arange(sum(LENGTHS)), [LENGTHS[0]])
    given = [(own, 0, p) for own, p in zip(ids, pages, strict=True)]
    whole = step(case.completed(make_batch(given, states=[2, 0]))).copy()
    expected = np.concatenate(
        [np.asarray(case.expected(*(x[own].astype(np.float64) for x in case.inputs))) for own in ids]
    )
    tolerance = max(case.error * np.abs(expected).max(), backend.attention_error if case.attends else 0)
    np.testing.assert_allclose(whole, expected, rtol=case.rtol, atol=max(case.atol, tolerance))
    if isinstance(ops, CPUOps) and whole.shape[1] % PADDING:
        check_padding(ops, case, make_batch(given, states=[2, 0]), sum(counts) + 1, whole)

    if not case.in_parts:
        for own, place in zip(ids, pages, strict=True):
            np.testing.assert_array_equal(step(case.completed(make_batch([(own, 0, place)]))), whole[own])
        return
    done = [0, 0]
    for chunk in CHUNKS:
        some = [(s, n) for s, n in reversed(list(enumerate(chunk))) if n]
        parts = [(ids[s][done[s] : done[s] + n], done[s], pages[s]) for s, n in some]
        found = step(case.completed(make_batch(parts, states=[s for s, _ in some])))
        own = np.concatenate([part for part, _, _ in parts])
        if case.chunk_error:
            np.testing.assert_allclose(found, whole[own], atol=case.chunk_error * np.abs(expected).max())
        else:
            np.testing.assert_array_equal(found, whole[own])
        done = [a + b for a, b in zip(done, chunk, strict=True)]
    assert tuple(done) == LENGTHS


def check_padding(ops: Ops, case: Case, batch: Batch, n_pages: int, rows: Array) -> None:
    """Check that the padding of rows is still zero: a norm includes it."""
    step = compiled(ops, case, n_pages, is_normed=True)
    expected = normed(rows, None, EPS)
    np.testing.assert_allclose(step(case.completed(batch)), expected, rtol=1e-4, atol=1e-5)


# -- Rows ----------------------------------------------------------------------------------------------------------

#: Values outside the range of exp, and values near the limits at which kernels clamp.
LARGE = np.array([0, -0.0, 1e-30, -1e-30, 20, -20, 87, -87, 88, -88, 89, -89, 104, -104, 700, -700, 1e4, -1e4])


def with_large(scale: float) -> Array:
    x = scale * rows(100)
    x[:, : len(LARGE)] = LARGE
    return x.astype(np.float32)


@cases(width=(1, 5, 32, 100), scale=(1.0, 2.5))
def embed(width: int, scale: float) -> Case:
    table = f32(rows(width))
    return Case(lambda graph, x: graph.add(operations.Embed(table, scale)), [rows(width)], lambda x: scale * x)


@cases(columns=(range(32), range(37, 60)))
def embed_columns(columns: range) -> Case:
    table = f32(rows(100))

    def build(graph: Graph, x: g.Tensor) -> g.Tensor:
        return graph.add(operations.Add(graph.add(operations.Embed(table, 2.0, columns)), x))

    return Case(build, [rows(100)[:, columns]], lambda x: 3 * x)


def with_embeddings(rows: Array) -> Callable[[Batch], Batch]:
    """Replace every third token by embeddings: rows [., k, width] at the token's position."""

    def completed(batch: Batch) -> Batch:
        is_embedded = batch.positions % 3 == 1
        embeddings = rows[batch.positions[is_embedded]].astype(np.float32)
        numbers = np.flatnonzero(is_embedded).astype(np.int32)
        return replace(batch, ids=batch.ids * ~is_embedded, embedded=numbers, embeddings=embeddings)

    return completed


@cases(width=(5, 100))
def media_embeddings(width: int) -> Case:
    """One embedding replaces the row of the table, and another is added."""
    own, table = random(max(LENGTHS), 3, width, seed=4), f32(rows(width))

    def build(graph: Graph, x: g.Tensor) -> g.Tensor:
        return graph.add(operations.AddRows(graph.add(operations.Embed(table, 2.0, takes_rows=True)), 2))

    def expected(x: Array) -> Array:
        is_embedded = np.arange(len(x))[:, None] % 3 == 1
        return np.where(is_embedded, own[: len(x), 0] + own[: len(x), 2], 2 * x)

    return Case(build, [rows(width)], expected, completed=with_embeddings(own), every_cpu=True)


@cases(n_groups=(1, 3, 6), weights=(0, 1, 96))
def rms_norm_of_groups(n_groups: int, weights: int) -> Case:
    n = {0: 0, 1: 96 // n_groups, 96: 96}[weights]
    weight = random(n, seed=1) if n else None
    factors = np.float64(1) if weight is None else np.resize(weight, (n_groups, 96 // n_groups))
    return Case(
        lambda graph, x: graph.add(operations.RMSNorm(x, None if weight is None else f32(weight), 0.1, n_groups)),
        [rows(96)],
        lambda x: normed(x.reshape(len(x), n_groups, -1), factors, 0.1).reshape(x.shape),
    )


def layer_norm_case(width: int, n_groups: int, with_bias: bool) -> Case:
    weight, bias = random(width, seed=1), random(width, seed=2) * with_bias
    own = f32(weight), f32(bias) if with_bias else None

    def expected(x: Array) -> Array:
        groups = x.reshape(len(x), n_groups, -1)
        centred = groups - groups.mean(axis=2, keepdims=True)
        return (centred / np.sqrt(groups.var(axis=2, keepdims=True) + 0.1)).reshape(x.shape) * weight + bias

    return Case(lambda graph, x: graph.add(operations.LayerNorm(x, *own, 0.1, n_groups)), [3 + rows(width)], expected)


@cases(width=(1, 5, 100), with_bias=(False, True))
def layer_norm(width: int, with_bias: bool) -> Case:
    return layer_norm_case(width, 1, with_bias)


@cases(n_groups=(3, 6), with_bias=(False, True))
def layer_norm_of_groups(n_groups: int, with_bias: bool) -> Case:
    return layer_norm_case(96, n_groups, with_bias)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-np.clip(x, -700, 700)))


def softplus(x: Array) -> Array:
    return np.logaddexp(x, 0)


@cases(scale=(1.0, 0.22), with_gate=(False, True))
def add(scale: float, with_gate: bool) -> Case:
    return Case(
        lambda graph, x, r, gate: graph.add(operations.Add(x, r, scale, gate if with_gate else None)),
        [rows(100), rows(100, 1), with_large(1.0)[:, 5:6]],
        lambda x, r, gate: r + scale * x * (sigmoid(gate) if with_gate else 1),
    )


@cases(n_parts=(1, 2, 3), n_rounds=(1, 4))
def hyper_weights(n_parts: int, n_rounds: int) -> Case:
    n, eps = 4, 0.01
    widths = [n, n, n * n][:n_parts]
    scale, base = random(n_parts, seed=1), random(sum(widths), seed=2)

    def build(graph: Graph, x: g.Tensor, ones: g.Tensor) -> g.Tensor:
        made = graph.add(operations.HyperWeights(x, f32(scale), f32(base), n, eps, 1.5, 0.1, n_rounds))
        return graph.add(operations.SideBySide(tuple(graph.add(operations.MixStreams(ones, y, 1)) for y in made)))

    def expected(x: Array, ones: Array) -> Array:
        x = x * np.repeat(scale, widths) + base
        parts = [sigmoid(x[:, :n]) + eps, 1.5 * sigmoid(x[:, n : 2 * n]) + 0.1]
        if n_parts == 3:
            powers = np.exp(x[:, 2 * n :].reshape(-1, n, n))
            between = powers / powers.sum(axis=2, keepdims=True) + eps
            between /= between.sum(axis=1, keepdims=True) + eps
            for _ in range(n_rounds - 1):
                between /= between.sum(axis=2, keepdims=True) + eps
                between /= between.sum(axis=1, keepdims=True) + eps
            parts.append(between.transpose(0, 2, 1).reshape(len(x), -1))
        return np.repeat(np.concatenate(parts[:n_parts], axis=1), 16, axis=1)

    return Case(build, [rows(sum(widths)), np.ones((sum(LENGTHS), 16), np.float32)], expected)


@cases(width=(5, 100))
def root_mean_square(width: int) -> Case:
    def build(graph: Graph, x: g.Tensor) -> g.Tensor:
        return graph.add(operations.RootMeanSquare(x))

    return Case(build, [rows(width)], lambda x: np.sqrt(np.square(x).mean(axis=1, keepdims=True)))


@cases(width=(5, 100), factor=(-0.5, 1.3))
def above_deviation(width: int, factor: float) -> Case:
    def expected(x: Array) -> Array:
        return np.maximum(x - x.mean(axis=1, keepdims=True) - factor * x.std(axis=1, keepdims=True), 0)

    return Case(lambda graph, x: graph.add(operations.AboveDeviation(x, factor)), [rows(width) - 1], expected)


@cases(n=(1, 3), n_made=(1, 4), added=(False, True))
def mix_streams(n: int, n_made: int, added: bool) -> Case:
    """Mix columns of one tensor, then mix the result with one more stream."""
    offset, first = (0.5, n_made - 1) if added else (0.0, 0)

    def build(graph: Graph, x: g.Tensor, weights: g.Tensor, more: g.Tensor) -> g.Tensor:
        x = graph.add(operations.Columns(x, range(16, 16 + 48 * n)))
        y = graph.add(operations.MixStreams(x, weights, n, more if added else None, offset, first))
        z = graph.add(operations.MixStreams(y, None, n_made, graph.add(operations.Columns(y, range(48))), 2.0))
        return graph.add(operations.SideBySide((y, z)))

    def expected(x: Array, weights: Array, more: Array) -> Array:
        streams = x[:, 16 : 16 + 48 * n].reshape(len(x), n, 48)
        factors = weights.reshape(len(x), n_made, n) + offset
        factors[:, :first] = 0
        y = np.einsum("tji,tid->tjd", factors, streams) + added * more.reshape(len(x), n_made, 48)
        return np.concatenate([y, y[:, :1] + 2 * y.sum(axis=1, keepdims=True)], axis=1).reshape(len(x), -1)

    return Case(build, [rows(16 + 48 * n), rows(n * n_made, 1), rows(48 * n_made, 2)], expected)


@cases(n=(1, 3))
def stream_gate(n: int) -> Case:
    def expected(key: Array, query: Array) -> Array:
        products = (key * query).reshape(len(key), n, 48).sum(axis=2) / np.sqrt(48)
        return sigmoid(np.sign(products) * np.sqrt(np.maximum(np.abs(products), 1e-6)))

    key = rows(48 * n, 1)
    key[:3] *= np.array([[0], [1e-9], [-1e-9]])
    return Case(
        lambda graph, key, query: graph.add(operations.StreamGate(key, query, n)), [key, rows(48 * n, 2)], expected
    )


@cases(n=(2, 3))
def ngram_embed(n: int) -> Case:
    """The ids are the row numbers; id 37 ends an n-gram."""
    sizes, table, factors = [7, 11, 13, 17][: 2 * n - 2], random(60, 48, seed=1), [(1 << 61) - 1, 12345677, 987654323]
    offsets = [10, 17, 28, 41][: len(sizes)]

    def build(graph: Graph, x: g.Tensor) -> g.Tensor:
        state = graph.state("ids", n - 1, is_on_host=True)
        return graph.add(
            operations.NgramEmbed(f32(table), state, tuple(factors[:n]), tuple(sizes), tuple(offsets), 37)
        )

    def expected(x: Array) -> Array:
        ids, found = [int(i) for i in x[:, 0]], []
        for t in range(len(ids)):
            own, mixed = [ids[t]], ids[t] * factors[0]
            for i in range(1, n):
                own.append(ids[t - i] if t >= i and 37 not in own[1:] else 37)
                mixed ^= own[i] * factors[i] % 2**64
                numbers = [mixed % 2**64 % sizes[j] + offsets[j] for j in (2 * i - 2, 2 * i - 1)]
                found += [table[number] for number in numbers]
        return np.concatenate(found).reshape(len(ids), -1)

    return Case(build, [np.arange(sum(LENGTHS), dtype=np.float32)[:, None]], expected)


@cases(with_weight=(False, True))
def scale(with_weight: bool) -> Case:
    weight = f32(random(1)) if with_weight else None
    factor = 0.25 * (random(1)[0] if with_weight else 1)
    return Case(lambda graph, x: graph.add(operations.Scale(x, 0.25, weight)), [rows(100)], lambda x: factor * x)


@cases(width=(1, 5, 32, 100), eps=(1e-6, 0.5))
def rms_norm(width: int, eps: float) -> Case:
    weight, x = random(width, seed=1), rows(width)
    x[1] *= 1e-4
    x[2] = 0
    return Case(
        lambda graph, x: graph.add(operations.RMSNorm(x, f32(weight), eps)),
        [x],
        lambda x: x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + eps) * weight,
        every_cpu=width == 100,
    )


def silu(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x: Array) -> Array:
    return x * np.vectorize(statistics.NormalDist().cdf)(x)


GATES: dict[str, tuple[Callable[[Array], Array], dict[str, Any]]] = {
    "silu": (silu, {"rtol": 2e-6, "atol": 1e-30}),
    "gelu": (gelu, {"rtol": 1e-5, "atol": 1e-6}),
    "gelu_erf": (gelu_erf, {"rtol": 3e-6, "atol": 1e-6}),
    "gelu_quick": (lambda x: x * sigmoid(1.702 * x), {"rtol": 3e-6, "atol": 1e-30}),
    "relu": (lambda x: np.maximum(x, 0), {}),
    "relu2": (lambda x: np.maximum(x, 0) ** 2, {}),
    "tanh": (np.tanh, {"rtol": 2e-6, "atol": 1e-6}),
    "sigmoid": (sigmoid, {"atol": 1e-30}),
    "identity": (lambda x: x, {}),
    "softplus": (lambda x: np.logaddexp(0, x), {"rtol": 2e-6, "atol": 1e-30}),
}


@cases(activation=(*UNGATED, "sigmoid"))
def activation(activation: str) -> Case:
    function, bounds = GATES[activation]
    x = with_large(3.0)[:, : 96 if activation == "sigmoid" else None]
    return Case(lambda graph, x: graph.add(operations.Activation(x, activation)), [x], function, **bounds)


@cases()
def clamped_swiglu() -> Case:
    def expected(gate: Array, up: Array) -> Array:
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate * sigmoid(1.702 * gate) * (up + 1)

    return Case(
        lambda graph, gate, up: graph.add(operations.Gated(gate, up, "clamped_swiglu")),
        [with_large(6.0), 6 * rows(100, 1)],
        expected,
    )


@cases(activation=tuple(GATES))
def gated(activation: str) -> Case:
    function, bounds = GATES[activation]
    return Case(
        lambda graph, gate, up: graph.add(operations.Gated(gate, up, activation)),
        [with_large(3.0), rows(100, 1)],
        lambda gate, up: function(gate) * up,
        every_cpu=True,
        **bounds,
    )


@cases(has_base=(False, True))
def host_edit(has_base: bool) -> Case:
    def edit(name: str, x: Array, base: Array | None) -> None:
        x[:] = 2 * x if base is None else 2 * x + base

    return Case(
        lambda graph, x, *base: graph.add(operations.HostEdit(graph.add(operations.Scale(x, 3.0)), "x", *base)),
        [rows(100), rows(100, 1)][: 1 + has_base],
        lambda x, *base: 6 * x + sum(base),
        completed=lambda batch: replace(batch, edit=edit),
    )


@cases(activation=HEAD_GATES)
def head_gate(activation: str) -> Case:
    function, bounds = GATES[activation]
    return Case(
        lambda graph, x, gate: graph.add(operations.HeadGate(x, gate, activation)),
        [rows(144, 1), rows(3)],
        lambda x, gate: np.repeat(function(gate), 48, axis=1) * x,
        every_cpu=True,
        **bounds,
    )


@cases(low=(-2.0, -np.inf))
def clamp(low: float) -> Case:
    return Case(
        lambda graph, x: graph.add(operations.Clamp(x, low, 1.5)),
        [with_large(3.0)],
        lambda x: np.clip(x, low, 1.5),
        every_cpu=True,
    )


@cases()
def xielu() -> Case:
    def expected(x: Array) -> Array:
        return np.where(x > 0, 0.8 * x**2, 1.3 * (np.expm1(np.minimum(x, -1e-6)) - x)) + 0.5 * x

    build = lambda graph, x: graph.add(operations.XIELU(x, 0.8, 1.3, 0.5, -1e-6))  # noqa: E731
    return Case(build, [with_large(3.0)], expected, every_cpu=True)


@cases(cap=(1e-3, 1.0, 30.0, 1e6))
def softcap(cap: float) -> Case:
    return Case(
        lambda graph, x: graph.add(operations.Softcap(x, cap)),
        [with_large(5.0)],
        lambda x: cap * np.tanh(x / cap),
        rtol=1e-6,
        atol=1e-30,
        every_cpu=True,
    )


# -- Products ------------------------------------------------------------------------------------------------------


@cases(with_bias=(False, True), with_residual=(False, True))
def linear(with_bias: bool, with_residual: bool) -> Case:
    matrix, bias = random(7, 50), random(7)
    own = Matrix(f32(matrix), f32(bias) if with_bias else None)
    return Case(
        lambda graph, x, r: graph.add(operations.Linear(x, own, r if with_residual else None)),
        [rows(50), rows(7, 1)],
        lambda x, r: x @ matrix.T + with_bias * bias + with_residual * r,
        atol=3e-6,
    )


@cases(type=(GGMLType.F32, GGMLType.Q4_0, GGMLType.Q6_K), which=(0, 1, 2))
def linears(type: GGMLType, which: int) -> Case:
    """Three matrices with one input, the last in another format."""
    types = (type, type, GGMLType.Q8_0)
    packed = [random_rows(t, n, 256, seed=n) for t, n in zip(types, (40, 16, 33), strict=True)]
    own = tuple(Matrix(blocks(r, t, 256)) for r, t in zip(packed, types, strict=True))
    values = values_of(packed[which], types[which])
    return Case(
        lambda graph, x: graph.add(operations.Linears(x, own))[which],
        [rows(256)],
        lambda x: x @ values.T,
        error=1e-5 if types[which] is GGMLType.F32 else 1.5e-2,
    )


@cases(
    type=(GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.Q4_0, GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.Q6_K),
    rest=(0, 32),
)
def head_linear(type: GGMLType, rest: int) -> Case:
    n_heads, n_out, n_in = 3, 64, 256 if type in (GGMLType.Q4_K, GGMLType.Q6_K) else 96
    packed = random_rows(type, n_heads * n_out, n_in)
    weight = Tensor(type, (n_heads, n_out, n_in), packed.reshape(n_heads, n_out, -1))
    values = values_of(packed, type).reshape(weight.shape)

    def expected(x: Array) -> Array:
        each = heads(x, n_in + rest)
        y = np.einsum("hoi,thi->tho", values, each[..., :n_in])
        return np.concatenate([y, each[..., n_in:]], axis=2).reshape(len(x), -1)

    error = {GGMLType.F32: 1e-5, GGMLType.F16: 1e-3, GGMLType.BF16: 1e-2}.get(type, 2e-2)
    more = {"every_cpu": type in (GGMLType.F32, GGMLType.Q4_0)}
    more["has_near"] = type in (GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q6_K)
    x = rows(n_heads * (n_in + rest))
    return Case(lambda graph, x: graph.add(operations.HeadLinear(x, weight)), [x], expected, error=error, **more)


@cases(norm_topk_prob=(False, True), k=(1, 3))
def mixture(norm_topk_prob: bool, k: int) -> Case:
    n, d, f, scale = 11, 64, 40, 2.5
    gate, up, down = random(n, f, d, seed=1), random(n, f, d, seed=2), random(n, d, f, seed=3)
    x, logits = rows(d, 4), 3 * rows(n, 5)

    def build(graph: Graph, x: g.Tensor, logits: g.Tensor) -> g.Tensor:
        routing = graph.add(operations.Route(logits, k, norm_topk_prob=norm_topk_prob, scale=scale))
        h = graph.add(operations.ExpertLinears(x, tuple(_experts(w) for w in (gate, up)), routing))
        return graph.add(operations.ExpertOutput(graph.add(operations.Gated(*h, "silu")), _experts(down), routing, x))

    def expected(x: Array, logits: Array) -> Array:
        weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        weights[weights < np.sort(weights, axis=1)[:, -k, None]] = 0
        if norm_topk_prob:
            weights /= weights.sum(axis=1, keepdims=True)
        h = silu(np.einsum("efd,td->tef", gate, x)) * np.einsum("efd,td->tef", up, x)
        return x + scale * np.einsum("te,edf,tef->td", weights, down, h)

    return Case(build, [x, logits], expected, error=1e-5)


#: Ways to route a token to 3 of 12 experts.
ROUTING: dict[str, dict[str, Any]] = {
    "sigmoid": {"gating": "sigmoid"},
    "sqrt_softplus": {"gating": "sqrt_softplus", "scale": 1.5},
    "softmax with bias": {"selection_bias": True},
    "sigmoid with all": {
        "gating": "sigmoid",
        "selection_bias": True,
        "n_groups": 4,
        "n_top_groups": 2,
        "scale": 2.5,
        "expert_scales": True,
    },
    "scales": {"expert_scales": True},
    "groups": {"n_groups": 3, "n_top_groups": 1},
    "sigmoid of best": {"gating": "sigmoid_of_best", "selection_bias": True},
    "sparsemixer": {"gating": "sparsemixer", "scale": 1.5, "expert_scales": True},
    "groups by their best": {"n_groups": 4, "n_top_groups": 2, "n_group_best": 1},
}


def by_number(graph: Graph, x: g.Tensor, chosen: Any, numbers: Array) -> g.Tensor:
    """Add the outputs of experts that multiply x by their numbers, so the result shows the weight of each expert."""
    ones, multiples = (np.array([n * np.eye(x.width) for n in own], np.float32) for own in (numbers**0, numbers))
    (h,) = graph.add(operations.ExpertLinears(x, (_experts(ones),), chosen))
    return graph.add(operations.ExpertOutput(h, _experts(multiples), chosen, x))


def sparsemixer(row: Array) -> Array:
    """Return the weight of each expert, if experts with larger logits were selected before."""
    near = row[:, None] - row <= 0.02 * np.maximum(np.abs(row), row[:, None])
    weights: Array = 1 / np.where(near & (row <= row[:, None]), np.exp(row - row[:, None]), 0).sum(axis=1)
    return weights


GATINGS: dict[str, Callable[[Array], Array]] = {
    "sigmoid": sigmoid,
    "sigmoid_of_best": sigmoid,
    "sqrt_softplus": lambda x: np.sqrt(softplus(x)),
    "sparsemixer": sparsemixer,
}


@cases(kind=tuple(ROUTING), norm_topk_prob=(False, True))
def routing(kind: str, norm_topk_prob: bool) -> Case:
    n, k, d, own = 12, 3, 32, ROUTING[kind]
    gating = own.get("gating", "")
    norm_topk_prob &= gating != "sparsemixer"
    logits, x = 2 * rows(n, 5), rows(d, 4)
    if gating == "sparsemixer":
        logits[:, 1::2] = 1.008 * logits[:, ::2]  # near enough to count
    bias, scales, numbers = random(n, seed=6) / 4, np.exp(random(n, seed=7)), np.arange(1.0, n + 1)
    weights = {name: f32(w) for name, w in (("selection_bias", bias), ("expert_scales", scales)) if name in own}

    def build(graph: Graph, x: g.Tensor, logits: g.Tensor) -> g.Tensor:
        chosen = graph.add(operations.Route(logits, k, norm_topk_prob, **{**own, **weights}))
        return by_number(graph, x, chosen, numbers)

    def expected(x: Array, logits: Array) -> Array:
        out = x.copy()
        for t, row in enumerate(logits):
            p = GATINGS.get(gating, lambda x: np.exp(x) / np.exp(x).sum())(row)
            scores = (row if gating in ("sigmoid_of_best", "sparsemixer") else p) + bias * ("selection_bias" in own)
            groups = scores.reshape(own.get("n_groups", 1), -1)
            ranks = np.argsort(-np.sort(groups, axis=1)[:, -own.get("n_group_best", 2) :].sum(axis=1))
            allowed = np.isin(np.arange(n) // groups.shape[1], ranks[: own.get("n_top_groups", 1)])
            chosen = np.argsort(-np.where(allowed, scores, -np.inf))[:k]
            shares = p[chosen] / (p[chosen].sum() if norm_topk_prob else 1) * own.get("scale", 1)
            out[t] += x[t] * (shares * numbers[chosen] * (scales[chosen] if "expert_scales" in own else 1)).sum()
        return out

    return Case(build, [x, logits], expected, error=1e-5)


@cases(norm_topk_prob=(False, True))
def routing_by_token(norm_topk_prob: bool) -> Case:
    """Experts chosen by a table per token id instead of the logits."""
    n, k, d = 12, 3, 32
    logits, x, rng = 2 * rows(n, 5), rows(d, 4), np.random.default_rng(6)
    given = rng.permuted(np.tile(np.arange(n), (len(x), 1)), axis=1)[:, :k].astype(np.float32)
    numbers = np.arange(1.0, n + 1)

    def build(graph: Graph, x: g.Tensor, logits: g.Tensor, given: g.Tensor) -> g.Tensor:
        chosen = graph.add(operations.Route(logits, k, norm_topk_prob, 1.5, "sqrt_softplus", expert_ids=given))
        return by_number(graph, x, chosen, numbers)

    def expected(x: Array, logits: Array, given: Array) -> Array:
        p = np.take_along_axis(np.sqrt(softplus(logits)), given.astype(int), axis=1)
        shares = 1.5 * p / (p.sum(axis=1, keepdims=True) if norm_topk_prob else 1)
        return x + x * (shares * numbers[given.astype(int)]).sum(axis=1, keepdims=True)

    return Case(build, [x, logits, given], expected, error=1e-5)


@cases(type=(GGMLType.F32, GGMLType.Q4_0), is_weighted_first=(False, True), with_biases=(False, True))
def experts(type: GGMLType, is_weighted_first: bool, with_biases: bool) -> Case:
    return experts_case((type, type, type), is_weighted_first, with_biases)


@cases(formats=("F16 F16 F16", "Q4_K Q4_K F16", "Q4_0 Q4_K F16", "Q4_0 Q4_0 Q4_K"))
def experts_of_formats(formats: str) -> Case:
    """Gate, up and down in several formats, with an output of 40 rows, which is no multiple of a tile."""
    case = experts_case([GGMLType[name] for name in formats.split()], True, False, d=256, f=256, n_out=40)
    return replace(case, every_cpu=formats == "Q4_0 Q4_K F16")


def experts_case(
    types: Sequence[GGMLType], is_weighted_first: bool, with_biases: bool, d: int = 64, f: int = 96, n_out: int = 64
) -> Case:
    n, sizes = 5, ((f, d), (f, d), (n_out, f))
    packed = [random_rows(t, n * s[0], s[1], seed=i) for i, (t, s) in enumerate(zip(types, sizes, strict=True))]
    matrices = list(zip(types, sizes, packed, strict=True))
    gate, up, down = (Tensor(t, (n, *s), p.reshape(n, s[0], -1)) for t, s, p in matrices)
    wg, wu, wd = (values_of(p, t).reshape(n, *s) for t, s, p in matrices)
    bg, bu, bd = (with_biases * random(n, out, seed=7 + i) for i, (out, _) in enumerate(sizes))
    has_residual = with_biases or not is_weighted_first

    def build(graph: Graph, x: g.Tensor, logits: g.Tensor) -> g.Tensor:
        chosen = graph.add(operations.Route(logits, 2, norm_topk_prob=False))
        biases = (f32(bg), f32(bu)) if with_biases else ()
        h = graph.add(operations.ExpertLinears(x, (gate, up), chosen, biases, is_weighted_first))
        out = f32(bd) if with_biases else None
        h = graph.add(operations.Gated(*h, "identity"))
        return graph.add(
            operations.ExpertOutput(h, down, chosen, x if has_residual else None, out, not is_weighted_first)
        )

    def expected(x: Array, logits: Array) -> Array:
        weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        weights[weights < np.sort(weights, axis=1)[:, -2, None]] = 0
        before, after = (weights, (weights > 0) * 1.0) if is_weighted_first else (np.ones_like(weights), weights)
        rows = before[:, :, None] * x[:, None]
        h = (np.einsum("efd,ted->tef", wg, rows) + bg) * (np.einsum("efd,ted->tef", wu, rows) + bu)
        down_rows = np.einsum("te,ted->td", after, np.einsum("edf,tef->ted", wd, h) + bd)
        return x + down_rows if has_residual else down_rows

    error = 1e-5 if set(types) == {GGMLType.F32} else 2e-2
    return Case(build, [rows(d, 4), 3 * rows(n, 5)], expected, error=error)


def _experts(matrices: Array) -> Tensor:
    n, n_out, n_in = matrices.shape
    return Tensor(GGMLType.F32, (n, n_out, n_in), f32(matrices.reshape(n * n_out, n_in)).data.reshape(n, n_out, -1))


# -- Recurrent states ----------------------------------------------------------------------------------------------


@cases(kernel=(2, 3, 4, 8, 10), silu_after=(False, True), with_bias=(False, True))
def causal_conv(kernel: int, silu_after: bool, with_bias: bool) -> Case:
    weight, bias = random(50, kernel, seed=1), random(50, seed=2) * with_bias

    def build(graph: Graph, x: g.Tensor) -> g.Tensor:
        state = graph.state("conv", kernel - 1, 50)
        return graph.add(operations.CausalConv(x, f32(weight), state, f32(bias) if with_bias else None, silu_after))

    def expected(x: Array) -> Array:
        wide = np.concatenate([np.zeros((kernel - 1, 50)), x])
        y = np.array([np.sum(wide[t : t + kernel] * weight.T, axis=0) for t in range(len(x))]) + bias
        return silu(y) if silu_after else y

    has_near = kernel != 4 and not (silu_after and with_bias)
    return Case(build, [rows(50)], expected, every_cpu=kernel == 4, has_near=has_near)


@cases(kernel=(9, 15), ahead=(1, 7))
def convolution_ahead(kernel: int, ahead: int) -> Case:
    weight = random(50, kernel, seed=1)

    def build(graph: Graph, x: g.Tensor) -> g.Tensor:
        return graph.add(operations.CausalConv(x, f32(weight), graph.state("conv", kernel - 1, 50), ahead=ahead))

    def expected(x: Array) -> Array:
        wide = np.concatenate([np.zeros((kernel - 1 - ahead, 50)), x, np.zeros((ahead, 50))])
        return np.array([np.sum(wide[t : t + kernel] * weight.T, axis=0) for t in range(len(x))])

    return Case(build, [rows(50)], expected, in_parts=False, has_near=kernel == 9 or ahead == 1)


#: Heads, key heads, key_dim and value_dim.
DELTAS = {"small": (4, 2, 16, 16), "wide": (4, 4, 32, 96), "odd": (3, 1, 48, 32), "qwen": (2, 1, 128, 128)}


@cases(sizes=tuple(DELTAS), is_grouped=(False, True), per_channel=(False, True), in_parts=(False, True))
def gated_delta(sizes: str, is_grouped: bool, per_channel: bool, in_parts: bool, bound: float = 0.0) -> Case:
    n_heads, n_keys, d_k, d_v = DELTAS[sizes]
    widths = n_keys * d_k, n_keys * d_k, n_heads * d_v
    n_decays = n_heads * d_k if per_channel else n_heads
    a, bias = np.exp(random(n_heads, seed=3)) * (1 if bound else -1), random(n_decays, seed=4)
    qkv = [rows(width, seed) for seed, width in enumerate(widths)]

    def build(graph: Graph, *x: g.Tensor) -> g.Tensor:
        state = graph.state("delta", n_heads, d_k, d_v)
        weights = f32(a), f32(bias)
        return graph.add(
            operations.GatedDelta(x[:-2], *x[-2:], *weights, state, n_keys, is_grouped, eps=0.01, bound=bound)
        )

    def expected(*x: Array) -> Array:
        q, k, v = x[:3] if in_parts else np.split(x[0], np.cumsum(widths)[:2], axis=1)
        q, k, v = heads(q, d_k), heads(k, d_k), heads(v, d_v)
        q, k = (y / np.sqrt(np.square(y).sum(axis=2, keepdims=True) + 0.01) for y in (q, k))
        of = np.arange(n_heads) // (n_heads // n_keys) if is_grouped else np.arange(n_heads) % n_keys
        steps = (x[-2] + bias).reshape(len(v), n_heads, -1)
        decay = np.exp(bound * sigmoid(steps * a[:, None]) if bound else softplus(steps) * a[:, None])
        state, y = np.zeros((n_heads, d_k, d_v)), np.empty_like(v)
        for t in range(len(v)):
            state = state * decay[t][:, :, None]
            missing = v[t] - np.einsum("hkv,hk->hv", state, k[t, of])
            state = state + np.einsum("hk,hv->hkv", k[t, of], sigmoid(x[-1][t])[:, None] * missing)
            y[t] = np.einsum("hkv,hk->hv", state, q[t, of]) / np.sqrt(d_k)
        return y.reshape(len(y), -1)

    inputs = [*(qkv if in_parts else [np.concatenate(qkv, axis=1)]), rows(n_decays, 5), rows(n_heads, 6)]
    has_near = per_channel != (sizes in ("small", "odd"))
    return Case(build, inputs, expected, error=2e-6, every_cpu=sizes == "wide", has_near=has_near)


@cases(per_channel=(False, True))
def bounded_delta(per_channel: bool) -> Case:
    return gated_delta("wide", False, per_channel, False, bound=-5.0)


@cases(sizes=((4, 2, 32, 16), (3, 3, 16, 80), (2, 1, 128, 64)), in_parts=(False, True))
def scan(sizes: tuple[int, int, int, int], in_parts: bool) -> Case:
    n_heads, n_groups, n, p = sizes
    widths = n_heads * p, n_groups * n, n_groups * n
    a, bias, d = -np.exp(random(n_heads, seed=3)), random(n_heads, seed=4), random(n_heads, seed=5)
    xbc = [rows(width, seed) for seed, width in enumerate(widths)]

    def build(graph: Graph, *x: g.Tensor) -> g.Tensor:
        weights = f32(a[:, None]), f32(bias), f32(d[:, None])
        return graph.add(operations.Scan(x[:-1], x[-1], *weights, graph.state("scan", n_heads, n, p), n_groups))

    def expected(*inputs: Array) -> Array:
        x, b, c = inputs[:3] if in_parts else np.split(inputs[0], np.cumsum(widths)[:2], axis=1)
        x, b, c = heads(x, p), heads(b, n), heads(c, n)
        of, step = np.arange(n_heads) // (n_heads // n_groups), softplus(inputs[-1] + bias)
        # The dual form of Mamba 2: one sum over all previous tokens.
        decays = np.cumsum(step * a, axis=0)
        weights = np.exp(np.minimum(decays[:, None] - decays[None], 0)) * np.tri(len(x))[:, :, None]
        scores = np.einsum("thn,shn->tsh", c[:, of], b[:, of]) * weights
        return (np.einsum("tsh,sh,shp->thp", scores, step, x) + d[:, None] * x).reshape(len(x), -1)

    inputs = [*(xbc if in_parts else [np.concatenate(xbc, axis=1)]), rows(n_heads, 6)]
    return Case(build, inputs, expected, error=2e-6)


@cases(n=(48, 64), n_state=(4, 16))
def channel_scan(n: int, n_state: int) -> Case:
    a, bias, d = -np.exp(random(n, n_state, seed=3)), random(n, seed=4), random(n, seed=5)

    def build(graph: Graph, *x: g.Tensor) -> g.Tensor:
        return graph.add(operations.ChannelScan(*x, f32(a), f32(bias), f32(d), graph.state("scan", n_state, n)))

    def expected(x: Array, dt: Array, b: Array, c: Array) -> Array:
        step, y, h = softplus(dt + bias), d * x, np.zeros((n, n_state))
        for t in range(len(x)):
            h = np.exp(a * step[t][:, None]) * h + (step[t] * x[t])[:, None] * b[t]
            y[t] += h @ c[t]
        return y

    inputs = [rows(n), rows(n, 1), rows(n_state, 2), rows(n_state, 6)]
    return Case(build, inputs, expected, error=2e-6, every_cpu=n == 48)


#: Heads and values per head, and whether these states have rates of keys and bonuses.
STATES = {"rwkv7": (3, 64, True, True), "small": (2, 16, True, True), "rwkv6": (3, 64, False, True)}


@cases(kind=(*STATES, "rwkv6qwen2"))
def wkv(kind: str) -> Case:
    """RWKV's states. The results, if there are two, are added."""
    n_heads, d, has_rate, has_bonus = STATES.get(kind, (2, 48, False, False))
    width = n_heads * d
    scale, rate, bonus = (random(width, seed=7 + i) for i in range(3))

    def build(graph: Graph, r: g.Tensor, k: g.Tensor, v: g.Tensor, decay: g.Tensor, *a: g.Tensor) -> g.Tensor:
        rates = (a[0], f32(scale), f32(rate)) if a else (None, None, None)
        state = graph.state("S", n_heads, d, d)
        ys = graph.add(operations.WKV(r, k, v, decay, state, *rates, f32(bonus) if has_bonus else None))
        return graph.add(operations.Add(*ys, 0.5)) if has_bonus else ys[0]

    def expected(r: Array, k: Array, v: Array, decay: Array, *a: Array) -> Array:
        r, k, v, decay, out = (*(heads(x, d) for x in (r, k, v, decay)), np.empty((len(r), n_heads, d)))
        w = np.exp(-np.exp(-0.5) * sigmoid(decay)) if has_rate else np.exp(-np.exp(decay))
        kappa = rates = np.zeros_like(k)
        if has_rate:
            kappa, rates = k * scale.reshape(n_heads, d), sigmoid(heads(a[0], d))
            kappa = kappa / np.linalg.norm(kappa, axis=-1, keepdims=True)
            k = k * (1 + (rates - 1) * rate.reshape(n_heads, d))
        elif not has_bonus:
            k = k * (1 - w)
        for h, state in enumerate(np.zeros((n_heads, d, d))):  # [values, keys]
            for t in range(len(r)):
                before = state
                transition = np.diag(w[t, h]) - np.outer(kappa[t, h], kappa[t, h] * rates[t, h])
                state = state @ transition + np.outer(v[t, h], k[t, h])
                out[t, h] = (state if has_rate or not has_bonus else before) @ r[t, h]
        by_bonus = v * np.sum(r * k * bonus.reshape(n_heads, d), axis=-1, keepdims=True)
        return (0.5 * out + by_bonus if has_bonus else out).reshape(len(r), width)

    inputs = [rows(width, seed) for seed in range(5 if has_rate else 4)]
    return Case(build, inputs, expected, error=2e-6, every_cpu=kind == "small")


# -- Attention -----------------------------------------------------------------------------------------------------


def axes_of(positions: Array) -> Array:
    """Positions of tokens on the axes time, row and column, inside images and after them."""
    moved = positions // 3 * 2
    return np.stack([np.where(positions % 9 < 5, moved, positions), moved, moved + (positions % 2 & positions % 3)])


def ends_of(positions: Array, length: int) -> Array:
    """End of the span that each token sees: tokens 13 to 92 of every hundred see each other."""
    number = positions % 100
    return np.where((number >= 13) & (number < 93), np.minimum(positions - number + 93, length), positions + 1)


def begins_of(positions: Array) -> Array:
    """Start of the span that `ends_of` ends; every other token is its own span."""
    number = positions % 100
    return np.where((number >= 13) & (number < 93), positions - number + 13, positions)


def with_media(batch: Batch) -> Batch:
    lengths = np.repeat(batch.kv_lengths, np.diff(batch.query_starts))
    places = axes_of(batch.positions), begins_of(batch.positions), ends_of(batch.positions, lengths)
    axes, begins, ends = (x.astype(np.int32) for x in places)
    return replace(batch, axes=axes, begins=begins, ends=ends)


def divided(batch: Batch) -> Batch:
    return replace(batch, begins=begins_of(batch.positions).astype(np.int32))


def rotated(x: Array, rope: Rope | None) -> Array:
    """Rotate heads [T, n, head_dim] at positions 0 … T - 1."""
    positions = np.arange(len(x))
    return formulas.rotated(x, axes_of(positions)[list(rope.axes)].T if rope and rope.axes else positions, rope)


def turned_together(x: Array, size: int) -> Array:
    """Multiply groups of ``size`` neighbours on the last axis by a Hadamard matrix; size 0 changes nothing."""
    matrix = functools.reduce(
        np.kron, [np.array([[1, 1], [1, -1]]) / math.sqrt(2)] * int(math.log2(size or 1)), np.eye(1)
    )
    return (x.reshape(-1, len(matrix)) @ matrix).reshape(x.shape)


def stored(x: Array, type: CacheType, together: int) -> Array:
    """Round heads [T, n, dim] as a cache does: to float16, or to codes with a scale per 32 values.

    ``together``: size of the Hadamard matrix that rotates values before rounding and back afterwards.
    """
    x = x.astype(np.float32)
    if type == "f16":
        return x.astype(np.float16).astype(np.float64)
    turned = turned_together(x.astype(np.float64), together)
    padded = np.pad(turned, ((0, 0), (0, 0), (0, -x.shape[2] % 32))).reshape(*x.shape[:2], -1, 32)
    at = np.abs(padded).argmax(axis=3, keepdims=True)
    code = {"q8_0": 127, "q5_0": 16, "q4_0": 8}[type]
    unit = (
        np.abs(np.take_along_axis(padded, at, 3)) / 127 if code == 127 else np.take_along_axis(padded, at, 3) / -code
    )
    codes = np.clip(np.rint(padded / np.where(unit == 0, 1, unit)), -code, 127 if code == 127 else code - 1)
    back = (codes * unit.astype(np.float16)).reshape(*x.shape[:2], -1)[..., : x.shape[2]]
    return turned_together(back, together)


ROPES = {
    f"{n}-{name}-{magnitude}": Rope(0.7 ** np.arange(n, dtype=np.float32), name == "interleaved", magnitude)
    for n, name, magnitude in itertools.product((8, 4, 1), ("interleaved", "halves"), (1.0, 1.3))
}
ROPES["5 positions behind"] = Rope(0.7 ** np.arange(4, dtype=np.float32), interleaved=True, position_offset=-5)


def kept_rows(n_heads: int, dim: int, type: CacheType, seed: int) -> Array:
    """Random heads that a cache of this type stores without rounding."""
    x = heads(rows(n_heads * dim, seed), dim)
    if type != "q8_0":
        return x.astype(np.float16).astype(np.float32).reshape(len(x), -1)
    codes = np.clip(np.rint(50 * x), -127, 127)
    codes[..., ::32] = 127
    scales = np.random.default_rng(seed).integers(1, 1024, (*x.shape[:2], -(-dim // 32))) / 2**16
    return (codes * np.repeat(scales, 32, axis=2)[..., :dim]).astype(np.float32).reshape(len(x), -1)


@dataclass(frozen=True)
class Heads:
    """The attention of a layer: its declaration and its formula.

    Attributes:
        q_norm, k_norm, v_norm: "weights", "ones", or the number of leading values of a head that are normed.
        shown: return the rotated queries instead of the output of attention.
        shared: another layer appended to the cache.
    """

    n_heads: int = 6
    n_kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    type: CacheType = "f16"
    rope: Rope | None = None
    q_norm: str | int = ""
    k_norm: str | int = ""
    v_norm: str | int = ""
    norm_last: bool = False
    q_scale: PositionScale | None = None
    values_in_keys: bool = False
    values_are_keys: bool = False
    shown: bool = False
    shared: bool = False
    window: int | None = None
    chunk: int | None = None
    causal: bool = True
    has_spans: bool = False
    softcap: float | None = None
    sinks: bool = False
    falls: bool = False
    n_biases: int = 0
    part: Any = "all"

    def case(self) -> Case:
        keys, values = (
            kept_rows(self.n_kv_heads, d, type, s)
            for d, type, s in zip((self.key_dim, self.value_dim), self.cache.types, (2, 3), strict=True)
        )
        kept = self.cache
        is_kept = kept.types == ("f16", "f16") or (kept.values_in_keys and not any(kept.rotations))
        is_kept &= not (self.rope or self.k_norm or self.v_norm)
        # Keys close to a rounding boundary may round either way, and backends round queries.
        error = max({"f16": 2e-3, "q8_0": 1e-2, "q5_0": 3e-2, "q4_0": 5e-2}[type] for type in kept.types)
        bounds = {"rtol": 1e-4} if is_kept else {"error": error}
        if self.shown:
            bounds = {"rtol": 1e-5}
        # Of the largest heads, run only kernels that no smaller head uses.
        slow = max(self.key_dim, self.value_dim) > (320 if self.values_in_keys and self.type == "f16" else 96)
        more: dict[str, Any] = {"in_parts": self.causal and not self.has_spans, "attends": not self.shown, **bounds}
        if self.has_spans and not self.causal:
            more["only"] = "reference", "cpu"
        if self.has_spans or (self.rope and self.rope.axes):
            more["completed"] = with_media
        if self.part != "all":
            more["completed"] = divided
        return Case(self.build, [queries(self), keys, values], self.expected, slow=slow, **more)

    @property
    def cache(self) -> KVCache:
        return KVCache(0, self.n_kv_heads, self.key_dim, self.value_dim, self.type, self.values_in_keys)

    def norm(self, what: str, dim: int) -> tuple[HeadNorm | None, Array | None]:
        kind = getattr(self, what)
        n = kind if isinstance(kind, int) else dim
        weight = random(n, seed=ord(what[0])) if kind != "ones" else None
        return (None, None) if not kind else (HeadNorm(0.01, None if weight is None else f32(weight)), weight)

    def build(self, graph: Graph, q: g.Tensor, k: g.Tensor, v: g.Tensor) -> g.Tensor:
        graph.cache_type, dims = self.type, (self.key_dim, self.value_dim)
        cache = graph.kv_cache(self.n_kv_heads, *dims, values_in_keys=self.values_in_keys)
        own_v = None if self.values_in_keys else k if self.values_are_keys else v
        q_norm, k_norm = (self.norm(what, self.key_dim)[0] for what in ("q_norm", "k_norm"))
        v_norm, _ = self.norm("v_norm", self.value_dim)
        norms = {"q_norm": q_norm, "norm_last": self.norm_last, "q_scale": self.q_scale}
        if self.shared:
            first = graph.add(operations.RMSNorm(q, f32(np.ones(q.width)), 1.0))
            graph.add(
                operations.RopeAppend(
                    first, k, own_v, cache, self.rope, k_norm=k_norm, v_norm=v_norm, norm_last=self.norm_last
                )
            )
            graph.layer = 1
            q = graph.add(operations.RopeAppend(q, None, None, cache, self.rope, **norms))
        else:
            q = graph.add(operations.RopeAppend(q, k, own_v, cache, self.rope, k_norm=k_norm, v_norm=v_norm, **norms))
        if self.shown:
            return q
        sinks = f32(self.sink_scores()) if self.sinks else None
        more = {"window": self.window, "softcap": self.softcap, "chunk": self.chunk, "causal": self.causal}
        more |= {"has_spans": self.has_spans, "part": self.part}
        more["slopes"] = f32(self.slopes()) if self.falls else None
        more["biases"] = f32(self.biases().reshape(-1)) if self.n_biases else None
        return graph.add(operations.Attention(q, cache, self.key_dim**-0.5, sinks=sinks, **more))

    def sink_scores(self) -> Array:
        return 3 * random(self.n_heads, seed=9)

    def biases(self) -> Array:
        return 2 * random(self.n_heads * self.n_biases, seed=8).reshape(self.n_heads, -1)

    def slopes(self) -> Array:
        return 0.5 ** np.arange(1, self.n_heads + 1)

    def turned(self, x: Array, what: str) -> Array:
        """Normed and rotated heads."""
        norm, weight = self.norm(what, x.shape[2])
        n = x.shape[2] if weight is None else len(weight)
        rope = None if what == "v_norm" else self.rope
        if self.norm_last:
            x = rotated(x, rope)
        if norm is not None:
            x = np.concatenate([normed(x[..., :n], weight, 0.01), x[..., n:]], axis=2)
        return x if self.norm_last else rotated(x, rope)

    def expected(self, q: Array, k: Array, v: Array) -> Array:
        q, k, v = heads(q, self.key_dim), heads(k, self.key_dim), heads(v, self.value_dim)
        v = self.turned(k if self.values_are_keys else v, "v_norm")
        types, (of_keys, of_values) = self.cache.types, self.cache.rotations
        q, k = self.turned(q, "q_norm"), stored(self.turned(k, "k_norm"), types[0], of_keys)
        if (scale := self.q_scale) is not None:
            places = np.maximum(np.arange(len(q)) + scale.offset, 0)
            factors = scale.base + scale.rate * np.log(1 + np.floor(places / scale.length))
            q = q * np.maximum(factors, 1)[:, None, None]
        if self.shown:
            return turned_together(q, of_keys).reshape(len(q), -1)
        values = k[..., : self.value_dim] if self.values_in_keys else stored(v, types[1], of_values)
        more = {"window": self.window, "softcap": self.softcap, "chunk": self.chunk, "causal": self.causal}
        places = np.arange(len(q))
        ends = ends_of(places, len(q)) if self.has_spans else None
        begins = begins_of(places) if self.has_spans and not self.causal else None
        if self.part == "reply":
            begins = begins_of(places)
        more["prompts"] = np.maximum(begins_of(places), 1) if self.part == "prompt" else None
        more |= {"begins": begins, "causal": self.causal or self.has_spans}
        sinks = self.sink_scores() if self.sinks else None
        more["slopes"] = self.slopes() if self.falls else None
        more["biases"] = self.biases() if self.n_biases else None
        return attended(q, k, values, self.key_dim**-0.5, sinks=sinks, ends=ends, **more)


@cases(rope=tuple(ROPES), norm=("", "weights"))
def rope_append(rope: str, norm: str) -> Case:
    return replace(Heads(shown=True, rope=ROPES[rope], q_norm=norm, k_norm=norm).case(), every_cpu=True)


ROPE = ROPES["4-halves-1.3"]
LAST = Rope(0.7 ** np.arange(4, dtype=np.float32), interleaved=True, first=8)
#: Latent attention: one key head, whose first values are the values.
LATENT: dict[str, Any] = {"n_kv_heads": 1, "n_heads": 9, "values_in_keys": True, "key_dim": 72, "value_dim": 64}
#: Attention layers.  Each runs with two cache types.
OPTIONS: dict[str, Heads] = {
    **{f"heads of {dim}": Heads(key_dim=dim, value_dim=dim) for dim in (8, 16, 64, 80, 96, 128, 256)},
    **{f"{h} heads over {n}": Heads(n_heads=h, n_kv_heads=n) for h, n in ((1, 1), (12, 3), (7, 1), (16, 2))},
    **{f"keys of {k}, values of {v}": Heads(key_dim=k, value_dim=v) for k, v in ((16, 48), (192, 128), (8, 16))},
    "rotated": Heads(rope=ROPE),
    "the last values rotated": Heads(rope=LAST),
    "the last values rotated, the first normed": Heads(rope=LAST, k_norm=8),
    "norms": Heads(rope=ROPE, q_norm="weights", k_norm="weights", v_norm="ones"),
    "norms without weights": Heads(rope=ROPE, q_norm="ones", k_norm="ones"),
    "norms after rotation": Heads(rope=ROPE, q_norm="weights", k_norm="weights", norm_last=True),
    "norms after rotation, without weights": Heads(rope=ROPE, q_norm="ones", k_norm="ones", norm_last=True),
    "values from keys": Heads(rope=ROPE, k_norm="weights", v_norm="ones", values_are_keys=True),
    "queries scaled": Heads(q_norm="weights", q_scale=PositionScale(0.1, 30), shown=True),
    "queries scaled from 1 on": Heads(rope=ROPE, q_scale=PositionScale(0.5, 7, 1)),
    "queries scaled late": Heads(rope=ROPE, q_scale=PositionScale(1 / math.log(9), 1, -1, 0.0), shown=True),
    "keys of another layer": Heads(rope=ROPE, q_norm="weights", k_norm="weights", shared=True),
    "capped": Heads(softcap=2.0),
    "sinks": Heads(sinks=True),
    "falling": Heads(falls=True),
    "biases of distances": Heads(n_biases=31),
    "biases of distances in both directions": Heads(n_biases=7, causal=False, n_heads=6, n_kv_heads=3),
    "falling in both directions": Heads(falls=True, causal=False, n_heads=6, n_kv_heads=3),
    "falling, window 65, sinks": Heads(falls=True, window=65, sinks=True),
    **{f"window {n}": Heads(window=n) for n in (1, 2, 16, 63, 64, 65, 100, 1000)},
    **{f"chunks of {n}": Heads(chunk=n) for n in (1, 20, 64, 70, 1000)},
    "in both directions": Heads(causal=False),
    **{f"in both directions, window {n}": Heads(causal=False, window=n) for n in (1, 30, 65)},
    **{f"spans, window {n}": Heads(has_spans=True, window=n) for n in (None, 1, 30, 65)},
    "the prompt alone": Heads(part="prompt"),
    "the reply alone, with biases": Heads(part="reply", n_biases=31),
    "spans alone": Heads(has_spans=True, causal=False),
    "turned by axes": Heads(rope=Rope(0.7 ** np.arange(4, dtype=np.float32), False, axes=(0, 1, 2, 1))),
    "all": Heads(softcap=1.5, sinks=True, window=33),
    "latents": Heads(**LATENT),
    "latents of 320": Heads(**{**LATENT, "key_dim": 320, "value_dim": 272}),
    "latents of 576": Heads(**{**LATENT, "key_dim": 576, "value_dim": 512, "n_heads": 20}),
    "latents, rotated and normed": Heads(**LATENT, rope=replace(LAST, first=64), k_norm=64),
    "latents, windowed": Heads(**LATENT, window=30),
}

#: Layers whose kernel differs from another layer's only in numbers, or that use one option of "all".  For the other
#: layers, both cache types have nearly the same kernel, so only one type runs outside CI.
NEAR = {"heads of 64", "heads of 96", "heads of 128", "keys of 192, values of 128", "capped", "sinks"}
NEAR |= {"latents of 320", "latents of 576"}


@cases(kind=tuple(OPTIONS), type=("f16", "q8_0"))
def attention(kind: str, type: CacheType) -> Case:
    one = "q8_0" if kind.startswith(("in both", "latents")) or [*OPTIONS].index(kind) % 2 else "f16"
    has_near = kind in NEAR or type != ("f16" if kind.startswith("chunks") else one)
    made = replace(OPTIONS[kind], type=type).case()
    return replace(made, every_cpu=kind in ("all", "latents"), has_near=has_near)


FEW_BITS = ("heads of 8", "heads of 80", "keys of 192, values of 128", "12 heads over 3", "norms", "window 65", "all")
FEW_BITS += ("values from keys", "keys of another layer", "spans, window 30", "latents", "latents of 320")


FEW_BIT_TYPES: tuple[CacheType, ...] = ("q5_0", "q4_0", "q8_0/q4_0", "q4_0/f16")


@cases(kind=FEW_BITS, type=FEW_BIT_TYPES)
def attention_to_few_bits(kind: str, type: CacheType) -> Case:
    one = FEW_BIT_TYPES[FEW_BITS.index(kind) % len(FEW_BIT_TYPES)]
    return replace(replace(OPTIONS[kind], type=type).case(), has_near=type != one)


def queries(made: Heads) -> Array:
    """Random queries that float16 stores without rounding."""
    return rows(made.n_heads * made.key_dim, 1).astype(np.float16).astype(np.float32)


def attended_latents(made: Heads, q: Array, keys_of: Callable[[int], Array], sinks: Array | None = None) -> Array:
    """Attention of each token t to the latents ``keys_of(t)``: [n_tokens, n_heads * value_dim]."""
    out = np.zeros((len(q), made.n_heads, made.value_dim))
    for t, own in enumerate(heads(q, made.key_dim)):
        keys = keys_of(t)
        terms = np.exp(own @ keys.T * made.key_dim**-0.5)
        total = terms.sum(1) + (0 if sinks is None else np.exp(sinks))
        out[t] = terms @ keys[:, : made.value_dim] / total[:, None]
    return out.reshape(len(q), -1)


@cases(k=(1, 20, 70), type=("f16", "q8_0"), sinks=(False, True))
def selected_attention(k: int, type: CacheType, sinks: bool) -> Case:
    """Attention to the k positions with the highest scores of an indexer with five heads."""
    made = replace(Heads(**LATENT), type=type, sinks=sinks)

    def build(graph: Graph, q: g.Tensor, key: g.Tensor, *indexer: g.Tensor) -> g.Tensor:
        graph.cache_type = type
        cache = graph.kv_cache(1, made.key_dim, made.value_dim, values_in_keys=True)
        index = graph.kv_cache(1, 24, values_in_keys=True, is_index=True)
        of_index = graph.add(operations.RopeAppend(indexer[0], indexer[1], None, index, None))
        selected = graph.add(operations.IndexSelect(of_index, indexer[2], index, k))
        q = graph.add(operations.RopeAppend(q, key, None, cache, None))
        weights = f32(made.sink_scores()) if sinks else None
        return graph.add(operations.Attention(q, cache, made.key_dim**-0.5, sinks=weights, selected=selected))

    def expected(q: Array, key: Array, of_index: Array, index_key: Array, weights: Array) -> Array:
        products = np.einsum("thd,sd->ths", heads(of_index, 24), index_key)
        scores = np.einsum("ths,th->ts", np.maximum(products, 0), weights)
        scores[~np.tri(len(q), dtype=bool)] = -np.inf
        chosen = [key[np.argsort(-scores[t], kind="stable")[: min(k, t + 1)]] for t in range(len(q))]
        return attended_latents(made, q, chosen.__getitem__, made.sink_scores() if sinks else None)

    kept = [kept_rows(1, dim, type, seed) for dim, seed in ((made.key_dim, 2), (24, 4))]
    inputs = [queries(made), kept[0], rows(5 * 24, 3), kept[1], rows(5, 5)]
    has_near = k == 70 or sinks != (type == "q8_0")
    return Case(build, inputs, expected, rtol=1e-4, attends=True, every_cpu=k == 20, has_near=has_near)


@cases(k=(16, 48))
def attention_to_runs(k: int) -> Case:
    """Attention to the k / 8 runs of eight positions with the highest scores of an indexer with five heads."""
    made, run, dim = Heads(**LATENT), 8, 32
    pool = random(run, dim, seed=7)

    def build(graph: Graph, q: g.Tensor, key: g.Tensor, *indexer: g.Tensor) -> g.Tensor:
        cache = graph.kv_cache(1, made.key_dim, made.value_dim, values_in_keys=True)
        index = graph.kv_cache(1, 3 * dim, values_in_keys=True, is_index=True, is_exact=True)
        keys = graph.add(operations.SideBySide((indexer[1], indexer[2], indexer[1])))
        graph.add(operations.RopeAppend(keys, keys, None, index, None))
        selected = graph.add(operations.IndexSelect(indexer[0], indexer[3], index, k, run, f32(pool)))
        q = graph.add(operations.RopeAppend(q, key, None, cache, None))
        return graph.add(operations.Attention(q, cache, made.key_dim**-0.5, selected=selected))

    def expected(q: Array, key: Array, of_index: Array, index_key: Array, gates: Array, weights: Array) -> Array:
        def chosen(t: int) -> Array:
            n = (t + 1) // run
            powers = np.exp(gates[: n * run].reshape(n, run, dim) + pool)
            keys = (powers * index_key[: n * run].reshape(n, run, dim)).sum(1) / powers.sum(1)
            scores = weights[t] @ np.maximum(of_index[t].reshape(5, dim) @ keys.T, 0)
            return key[positions_of(scores, run, k, t)]

        return attended_latents(made, q, chosen)

    kept = [kept_rows(1, n, "f16", seed) for n, seed in ((made.key_dim, 2), (dim, 4), (dim, 6))]
    inputs = [queries(made), kept[0], rows(5 * dim, 3), *kept[1:], rows(5, 5)]
    return Case(build, inputs, expected, rtol=1e-4, attends=True, every_cpu=k == 16)


@cases(run=(4, 32), overlaps=(False, True))
def compress(run: int, overlaps: bool) -> Case:
    """Each run of tokens becomes one row: the mean of its values, weighted by the softmax of its gates."""
    n, dim = 1 + overlaps, 48
    biases = random(run, n * dim, seed=7)

    def build(graph: Graph, values: g.Tensor, gates: g.Tensor) -> g.Tensor:
        cache = graph.kv_cache(2 * n, dim, values_in_keys=True, is_exact=True)
        x = graph.add(operations.SideBySide((values, gates)))
        x = graph.add(operations.RopeAppend(x, x, None, cache, None))
        return graph.add(operations.Compress(x, cache, f32(biases)))

    def expected(values: Array, gates: Array) -> Array:
        out = np.zeros((len(values), dim))
        for end in range(run, len(values) + 1, run):
            tokens = np.arange(max(0, end - n * run), end)[:, None]
            columns = np.where(tokens < end - run, 0, (n - 1) * dim) + np.arange(dim)
            powers = np.exp(gates[tokens, columns] + biases[tokens % run, columns])
            out[end - 1] = (powers * values[tokens, columns]).sum(0) / powers.sum(0)
        return out

    kept = [kept_rows(n, dim, "f16", seed) for seed in (2, 4)]
    return Case(build, kept, expected, rtol=1e-4, every_cpu=run == 4, has_near=not overlaps)


@cases(window=(5, 70), stride=(4, 32), k=(0, 3))
def attention_to_entries(window: int, stride: int, k: int) -> Case:
    """Attention to a window and to the entries of a second cache, or to the k best entries."""
    made, dim = Heads(**LATENT), 32

    def build(graph: Graph, q: g.Tensor, key: g.Tensor, entry: g.Tensor, *indexer: g.Tensor) -> g.Tensor:
        cache = graph.kv_cache(1, made.key_dim, made.value_dim, values_in_keys=True)
        entries = graph.kv_cache(1, made.key_dim, made.value_dim, values_in_keys=True, number=1, stride=stride)
        index = graph.kv_cache(1, dim, values_in_keys=True, number=2, stride=stride)
        graph.add(operations.RopeAppend(entry, entry, None, entries, None))
        graph.add(operations.RopeAppend(indexer[1], indexer[1], None, index, None))
        selected = graph.add(operations.IndexSelect(indexer[0], indexer[2], index, k)) if k else None
        q = graph.add(operations.RopeAppend(q, key, None, cache, None))
        how: dict[str, Any] = {"sinks": f32(made.sink_scores()), "selected": selected, "entries": entries}
        return graph.add(operations.Attention(q, cache, made.key_dim**-0.5, window, **how))

    def expected(q: Array, key: Array, entry: Array, of_index: Array, index_key: Array, weights: Array) -> Array:
        def seen(t: int) -> Array:
            ends = np.arange(stride - 1, t + 1, stride)
            if k:
                scores = weights[t] @ np.maximum(of_index[t].reshape(5, dim) @ index_key[ends].T, 0)
                ends = ends[np.argsort(-scores, kind="stable")[:k]]
            return np.concatenate([key[max(0, t + 1 - window) : t + 1], entry[ends]])

        return attended_latents(made, q, seen, made.sink_scores())

    kept = [kept_rows(1, n, "f16", seed) for n, seed in ((made.key_dim, 2), (made.key_dim, 6), (dim, 4))]
    inputs = [queries(made), *kept[:2], rows(5 * dim, 3), kept[2], rows(5, 5)]
    near = {"has_near": (window, stride) != (5, 4), "every_cpu": (window, stride, k) == (5, 4, 3)}
    return Case(build, inputs, expected, rtol=1e-4, attends=True, **near)


def attended_at(made: Heads, q: Array, k: Array, v: Array, seen: Callable[[int, int], Array]) -> Array:
    """Attention of each token and key/value head to the positions that ``seen`` returns."""
    n, types, together = made.n_kv_heads, made.cache.types, made.cache.rotations
    keys = stored(heads(k, made.key_dim), types[0], together[0])
    values = stored(heads(v, made.value_dim), types[1], together[1])
    q = q.reshape(len(q), n, -1, made.key_dim)
    out = np.zeros((*q.shape[:3], made.value_dim))
    for t, head in np.ndindex(len(q), n):
        own = seen(t, head)
        terms = np.exp(q[t, head] @ keys[own, head].T * made.key_dim**-0.5)
        out[t, head] = terms @ values[own, head] / terms.sum(1, keepdims=True)
    return out.reshape(len(q), -1)


def positions_of(scores: Array, run: int, k: int, t: int) -> Array:
    """Positions up to t in the runs with the largest scores, and the positions after the last run."""
    runs = np.sort(np.argsort(-scores, kind="stable")[: k // run])
    chosen = np.append(runs[:, None] * run + np.arange(run), np.arange(len(scores) * run, t + 1))
    return chosen[chosen <= t].astype(np.int64)


def of_heads(made: Heads, type: CacheType, index_dim: int, n_index_heads: int) -> dict[str, Any]:
    """Inputs and tolerance of attention to positions that an indexer selects."""
    kv = rows(made.n_kv_heads * made.key_dim, 2), rows(made.n_kv_heads * made.value_dim, 3)
    index = rows(n_index_heads * index_dim, 4), kept_rows(1, index_dim, "f16", 5)
    error = max({"f16": 2e-3, "q8_0": 1e-2, "q5_0": 3e-2}.get(kind, 5e-2) for kind in made.cache.types)
    return {"inputs": [queries(made), *kv, *index], "error": error, "attends": True}


GROUPED: dict[str, Any] = {"n_heads": 6, "n_kv_heads": 3, "key_dim": 40, "value_dim": 72}


@cases(run=(4, 32), k=(32, 64), type=("f16", "q8_0", "q5_0", "q4_0/f16"))
def attention_to_largest_runs(run: int, k: int, type: CacheType) -> Case:
    """Attention of each key/value head to the runs with the largest product of its index head and a key."""
    made, dim, n_last = Heads(**GROUPED, type=type), 24, k // 32

    def build(graph: Graph, q: g.Tensor, keys: g.Tensor, v: g.Tensor, of_index: g.Tensor, key: g.Tensor) -> g.Tensor:
        graph.cache_type = type
        cache = graph.kv_cache(3, made.key_dim, made.value_dim)
        index = graph.kv_cache(1, dim, values_in_keys=True, is_index=True, is_exact=True)
        of_index = graph.add(operations.RopeAppend(of_index, key, None, index, None))
        selected = graph.add(operations.IndexSelect(of_index, None, index, k, run, n_last=n_last))
        q = graph.add(operations.RopeAppend(q, keys, v, cache, None))
        return graph.add(operations.Attention(q, cache, made.key_dim**-0.5, selected=selected, selected_by_head=True))

    def expected(q: Array, keys: Array, v: Array, of_index: Array, index_key: Array) -> Array:
        def seen(t: int, head: int) -> Array:
            products = heads(of_index, dim)[t, head] @ index_key[: t + 1].T
            scores = np.array([products[i : i + run].max() for i in range(0, t + 1, run)])
            scores[-n_last:] = np.inf
            return positions_of(scores, run, k, t)

        return attended_at(made, q, keys, v, seen)

    return Case(
        build,
        expected=expected,
        every_cpu=(run, k, type) == (4, 32, "f16"),
        has_near=(run, k, type) not in {(4, 32, "f16"), (32, 64, "q8_0"), (4, 64, "q5_0"), (32, 32, "q4_0/f16")},
        **of_heads(made, type, dim, 3),
    )


@cases(type=("f16", "q8_0"))
def attention_to_runs_of_heads(type: CacheType) -> Case:
    """Attention of all heads to the runs whose last key has the highest scores of an indexer with five heads."""
    made, dim, run, k = Heads(**GROUPED, type=type), 32, 4, 24

    def build(graph: Graph, q: g.Tensor, keys: g.Tensor, v: g.Tensor, of_index: g.Tensor, key: g.Tensor) -> g.Tensor:
        graph.cache_type = type
        cache = graph.kv_cache(3, made.key_dim, made.value_dim)
        index = graph.kv_cache(1, dim, values_in_keys=True, is_index=True, is_exact=True)
        ahead = Rope(0.7 ** np.arange(4, dtype=np.float32), interleaved=False, position_offset=run - 1)
        of_index = graph.add(operations.RopeAppend(of_index, None, None, index, ahead))
        graph.add(
            operations.RopeAppend(
                graph.add(operations.SideBySide((key,))), key, None, index, replace(ahead, position_offset=0)
            )
        )
        selected = graph.add(operations.IndexSelect(of_index, None, index, k, run))
        q = graph.add(operations.RopeAppend(q, keys, v, cache, None))
        return graph.add(operations.Attention(q, cache, made.key_dim**-0.5, selected=selected))

    def expected(q: Array, keys: Array, v: Array, of_index: Array, index_key: Array) -> Array:
        rope = Rope(0.7 ** np.arange(4, dtype=np.float32), interleaved=False)
        padded = np.pad(heads(of_index, dim), ((run - 1, 0), (0, 0), (0, 0)))  # shifts positions by run - 1
        turned = rotated(padded, rope)[run - 1 :]
        turned_key = rotated(heads(index_key, dim), rope)[:, 0].astype(np.float16).astype(np.float64)

        def seen(t: int, head: int) -> Array:
            ends = turned_key[: t + 1][run - 1 :: run]
            return positions_of(np.maximum(turned[t] @ ends.T, 0).sum(0), run, k, t)

        return attended_at(made, q, keys, v, seen)

    return Case(build, expected=expected, has_near=type != "f16", **of_heads(made, type, dim, 5))


@pytest.mark.parametrize(("backend", "case"), _each(), scope="module")
def test_operation(backend: Backend, ops: Ops, case: Case) -> None:
    check_operation(backend, ops, case)


def after_outputs(case: Case) -> Graph | None:
    """Apply the operations to rows of `Outputs`; None if an operation needs the rows of all tokens."""
    graph = Graph()
    graph.layer = 0
    tables = [graph.add(operations.Embed(f32(x))) for x in case.inputs]
    try:
        y = case.build(graph, *(graph.add(operations.Outputs(x)) for x in tables))
    except KernelError:
        return None
    return graph if y.rows is g.Rows.OUTPUTS else None


def _after_outputs() -> list[Any]:
    first = {name.split("-")[0]: CASES[name]() for name in reversed(CASES)}
    graphs = {name: (case, after_outputs(case)) for name, case in reversed(first.items())}
    return [
        pytest.param(backend, graph, id=f"{backend.name}-{name}")
        for backend in BACKENDS
        for name, (case, graph) in graphs.items()
        if graph is not None and _runs_on(case, backend)
    ]


@pytest.mark.parametrize(("backend", "graph"), _after_outputs(), scope="module")
def test_operation_on_no_rows(backend: Backend, ops: Ops, graph: Graph) -> None:
    """A batch that requests no logits has no rows after `Outputs`."""
    step = ops.backend.compile(graph, n_pages=(3,), n_states=0, max_tokens=20, max_outputs=20)
    assert step(make_batch([(np.arange(20), 0, np.arange(3))], outputs=[])).shape == (0, graph.result.width)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_batch_without_tokens_is_refused(backend: Backend) -> None:
    graph = Graph()
    graph.layer = 0
    graph.add(operations.Outputs(graph.add(operations.Embed(f32(rows(32))))))
    step = backend.make().backend.compile(graph, n_pages=(1,), n_states=0, max_tokens=4, max_outputs=4)
    batch = make_batch([([0], 0, [0])])
    nothing: dict[str, Array] = {
        name: np.zeros(0, np.int32) for name in ("ids", "positions", "kv_lengths", "outputs")
    }
    tables, starts = np.zeros((1, 0, 0), np.int32), np.zeros(1, np.int32)
    with pytest.raises(KernelError, match="a batch of 0 tokens"):
        step(replace(batch, block_tables=tables, query_starts=starts, **nothing))


def test_cuda_is_included() -> None:
    if reason := no_harness():
        pytest.skip(f"the operations do not run on CUDA: {reason}")
    assert any(backend.name == "cuda-emulated" for backend in BACKENDS)
