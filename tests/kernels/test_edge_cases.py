"""Operations at the limits of numbers and batches, on every backend.

test_operation_formulas.py tests the operations with ordinary inputs.  Inputs are rows of embedding tables, selected
by the token ids of a batch, as in a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gguf.quants
import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.graph import CACHE_TYPES, CacheType, KVCache, Rope
from localllm.quant.types import GGMLType
from tests.helpers.backends import Backend, shared_by_threads
from tests.helpers.blocks import random_rows
from tests.helpers.recorder import CacheShape, CPUOps, Ops
from tests.helpers.run_model import make_batch
from tests.helpers.weights import blocks, f32, one_sequence, random, run
from tests.kernels.formulas import attended, normed, rotated

Array = NDArray[Any]
T = GGMLType


def halves(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return random(*shape, seed=seed).astype(np.float16).astype(np.float32)


def scaled_codes(n: int, n_heads: int, head_dim: int, seed: int, cache_type: CacheType) -> NDArray[np.float32]:
    """Random heads [n, n_heads * head_dim] that a cache of codes stores exactly.

    Each group of 32 values contains the largest code.  A cache does not rotate heads of these sizes.
    """
    assert head_dim % 16
    rng, most = np.random.default_rng([seed, n, head_dim]), {"q8_0": 127, "q5_0": 15, "q4_0": 7}[cache_type]
    codes = rng.integers(-most, most + 1, (n, n_heads, head_dim))
    codes[..., ::32] = 127 if most == 127 else -most - 1
    scales = np.repeat(rng.integers(1, 1024, (n, n_heads, -(-head_dim // 32))), 32, axis=2) / 2**16
    return (codes * scales[..., :head_dim]).reshape(n, -1).astype(np.float32)


def apply(ops: Ops, operation: Callable[..., Any], *inputs: Array) -> NDArray[np.float32]:
    """Return the result of an operation on matrices [T, width]."""
    tables = [ops.load_embedding(f32(x)) for x in inputs]
    return run(ops, lambda: ops.outputs(operation(*(ops.embed(t) for t in tables))), one_sequence(len(inputs[0])))


# -- Outputs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 5, 32, 100])
def test_outputs_are_the_requested_rows_in_order(ops: Ops, width: int) -> None:
    x = random(7, width)
    table = ops.load_embedding(f32(x))
    step = ops.compile(
        lambda: ops.outputs(ops.embed(table)), ops.new_cache(CacheShape(1, 1, 16), 1), max_tokens=9, max_outputs=3
    )
    for wanted in ([6, 0], [3], [1, 1, 2], []):
        out = step(make_batch([(range(7), 0, [0])], outputs=wanted))
        np.testing.assert_array_equal(out, x[wanted])


@pytest.mark.parametrize("is_mean", [False, True])
@pytest.mark.parametrize("width", [5, 32, 100])
def test_outputs_are_joined_of_neighbouring_rows(ops: Ops, width: int, is_mean: bool) -> None:
    x = random(13, width)
    table = ops.load_embedding(f32(x))
    step = ops.compile(
        lambda: ops.outputs(ops.embed(table), 3, is_mean),
        ops.new_cache(CacheShape(1, 1, 16), 1),
        max_tokens=13,
        max_outputs=4,
    )
    for wanted in ([10, 0, 4], [1, 1, 2, 7], []):
        rows = x[np.array(wanted, int)[:, None] + np.arange(3)]
        out = step(make_batch([(range(13), 0, [0])], outputs=wanted))
        if is_mean:
            np.testing.assert_allclose(out, rows.mean(axis=1), rtol=1e-6, atol=1e-7)
        else:
            np.testing.assert_array_equal(out, rows.reshape(len(wanted), 3 * width))
    with pytest.raises(KernelError, match="none of its 13"):
        step(make_batch([(range(13), 0, [0])], outputs=[11]))


# -- Norms, gates --------------------------------------------------------------------------------------------------


def test_an_unknown_activation_is_named_with_the_known_ones(ops: Ops) -> None:
    with pytest.raises(KernelError, match=r"'gelu_new'.*silu, gelu"):
        apply(ops, lambda g, u: ops.gated(g, u, "gelu_new"), random(1, 4), random(1, 4))


# -- Linear --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", [T.F32, T.F16, T.Q8_0, T.Q4_K], ids=lambda t: t.name)
def test_linears_are_linear_of_each(ops: Ops, type: GGMLType) -> None:
    x = random(5, 256)
    linears = [ops.load_linear(blocks(random_rows(type, n, 256, seed=n), type, 256)) for n in (40, 16, 33)]
    for i, linear in enumerate(linears):
        alone = apply(ops, lambda t, linear=linear: ops.linear(t, linear), x)
        np.testing.assert_array_equal(apply(ops, lambda t, i=i: ops.linears(t, linears)[i], x), alone)


@pytest.mark.parametrize("type", [T.F32, T.Q8_0], ids=lambda t: t.name)
def test_a_residual_that_is_overwritten_is_read_again(ops: Ops, type: GGMLType) -> None:
    """A tensor is multiplied, then becomes the residual, and the sum in its memory is multiplied again."""
    first, second = (ops.load_linear(blocks(random_rows(type, 64, 64, seed=s), type, 64)) for s in (1, 2))
    x = random(3, 64)

    def chain(t: Any) -> Any:
        return ops.linear(ops.linear(ops.linear(t, first), second, residual=t), first)

    y = apply(ops, lambda t: ops.linear(t, first), x)
    total = apply(ops, lambda u, r: ops.linear(u, second, residual=r), y, x)
    np.testing.assert_array_equal(apply(ops, chain, x), apply(ops, lambda t: ops.linear(t, first), total))


def test_a_tensor_can_be_its_own_residual(ops: Ops) -> None:
    linear = ops.load_linear(f32(random(256, 256)))
    x = random(40, 256)
    out = apply(ops, lambda t: ops.linear(t, linear, residual=t), x)
    np.testing.assert_array_equal(out, apply(ops, lambda t, r: ops.linear(t, linear, residual=r), x, x))


# -- Rope ----------------------------------------------------------------------------------------------------------

DIM = 16


def test_rotation_at_large_positions_is_precise(ops: Ops) -> None:
    """At position 100,000, an angle in float32 would be off by 0.004."""
    rope = Rope(np.array([1.0, 0.9999], np.float32), interleaved=False)
    x = random(2, DIM)
    table = ops.load_embedding(f32(x))
    past = 100_000
    n_blocks = (past + 1) // ops.page_size + 1
    batch = make_batch([([0, 1], past, [0] * n_blocks)])

    def forward() -> Any:
        return ops.outputs(ops.rope_append(ops.embed(table), ops.embed(table), ops.embed(table), rope, 0))

    out = run(ops, forward, batch, ops.new_cache(CacheShape(1, 1, DIM), n_blocks))
    np.testing.assert_allclose(out, rotated(x.reshape(2, 1, DIM), batch.positions, rope)[:, 0], rtol=1e-5, atol=2e-6)


def test_rotation_is_the_same_however_positions_grow(ops: Ops) -> None:
    """A step computes angles when a batch first needs them, here in four parts."""
    rope = Rope(np.array([1.0, 0.01], np.float32), interleaved=False)
    x = random(2, DIM)
    table = ops.load_embedding(f32(x))
    n_blocks = 2000 // ops.page_size + 1

    def forward() -> Any:
        return ops.outputs(ops.rope_append(ops.embed(table), ops.embed(table), ops.embed(table), rope, 0))

    step = ops.compile(forward, ops.new_cache(CacheShape(1, 1, DIM), n_blocks), max_tokens=2, max_outputs=2)
    for past in (0, 511, 600, 1023, 1900, 3):
        batch = make_batch([([0, 1], past, [0] * n_blocks)])
        expected = rotated(x.reshape(2, 1, DIM), batch.positions, rope)[:, 0]
        np.testing.assert_allclose(step(batch), expected, rtol=1e-5, atol=2e-6, err_msg=f"after {past} tokens")


# -- Attention -----------------------------------------------------------------------------------------------------


@dataclass
class Conversation:
    """Sequences of random queries, keys and values, in pages in random order.

    Attributes:
        powers: exponents of two; the queries of the tokens are multiplied by them in turn.
    """

    ops: Ops
    lengths: Sequence[int]
    n_heads: int
    n_groups: int
    head_dim: int
    scale: float = 0.25
    window: int | None = None
    softcap: float | None = None
    sinks: Sequence[float] | None = None
    rope: Rope | None = None
    n_layers: int = 1
    cache_type: CacheType = "f16"
    powers: Sequence[int] = (0,)
    cache: Any = field(init=False)
    spare: int = field(init=False)

    def __post_init__(self) -> None:
        total = sum(self.lengths)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        powers = np.exp2(np.resize(self.powers, (total, 1))).astype(np.float32)
        self.q = halves(total, self.n_heads * self.head_dim, seed=1) * powers
        if self.cache_type == "f16":
            self.k, self.v = (halves(total, self.n_groups * self.head_dim, seed=seed) for seed in (2, 3))
        else:
            self.k, self.v = (
                scaled_codes(total, self.n_groups, self.head_dim, seed, self.cache_type) for seed in (2, 3)
            )
        counts = [-(-n // self.ops.page_size) for n in self.lengths]
        self.spare, *pages = np.random.default_rng(0).permutation(sum(counts) + 1).tolist()
        self.pages = np.split(np.array(pages), np.cumsum(counts)[:-1])
        shape = CacheShape(self.n_layers, self.n_groups, self.head_dim, self.cache_type)
        self.cache = self.ops.new_cache(shape, sum(counts) + 1)
        tables = [self.ops.load_embedding(f32(x)) for x in (self.q, self.k, self.v)]
        layer = self.n_layers - 1
        more: dict[str, Any] = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        if self.sinks is not None:
            more["sinks"] = self.ops.load_vector(f32(self.sinks))

        def forward() -> Any:
            q, k, v = (self.ops.embed(t) for t in tables)
            q = self.ops.rope_append(q, k, v, self.rope, layer)
            return self.ops.outputs(self.ops.attention(q, layer, **more))

        self.step = self.ops.compile(forward, self.cache, max_tokens=total, max_outputs=total)

    def run(self, *parts: tuple[int, int, int]) -> Array:
        """Run tokens first … stop - 1 of sequences (sequence, first, stop) in one batch."""
        batch = make_batch([(range(self.starts[s] + a, self.starts[s] + b), a, self.pages[s]) for s, a, b in parts])
        return self.step(batch).copy().reshape(len(batch.ids), self.n_heads, self.head_dim)

    def expected(self, sequence: int, first: int, stop: int) -> Array:
        """Expected rows of tokens first … stop - 1 of a sequence; only without rope."""
        rows = slice(self.starts[sequence], self.starts[sequence + 1])
        q, k, v = (x[rows].reshape(self.lengths[sequence], -1, self.head_dim) for x in (self.q, self.k, self.v))
        sinks = None if self.sinks is None else np.array(self.sinks, np.float64)
        options: dict[str, Any] = {"window": self.window, "softcap": self.softcap, "sinks": sinks}
        out = attended(q[first:stop], k[:stop], v[:stop], self.scale, **options)
        return out.reshape(-1, self.n_heads, self.head_dim)


#: Error from rounding queries to bytes on the CPU, for values below 4.
ROUNDED_QUERY = 2e-2


def assert_close(out: Array, expected: Array, error: float = 0.0) -> None:
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=max(2e-6, error))


@pytest.mark.parametrize("sink", [-math.inf, -1e30, -100.0])
def test_a_sink_far_below_the_scores_changes_nothing(backend: Backend, ops: Ops, sink: float) -> None:
    talk = Conversation(ops, [80], 2, 2, 16, sinks=(sink, sink))
    assert_close(talk.run((0, 0, 80)), replace(talk, sinks=None).expected(0, 0, 80), backend.attention_error)


@pytest.mark.parametrize("sink", [200.0, 1e30])
def test_a_sink_far_above_the_scores_takes_all_weight(backend: Backend, ops: Ops, sink: float) -> None:
    talk = Conversation(ops, [80], 2, 2, 16, sinks=(sink, 0))
    out = talk.run((0, 0, 80))
    assert np.abs(out[:, 0]).max() < 1e-30
    assert_close(out[:, 1], talk.expected(0, 0, 80)[:, 1], backend.attention_error)


#: Sinks of two query heads that get no weight.  Other tests already compile the kernels with cap and sinks.
NO_SINKS = (-1e30, -1e30)


@pytest.mark.parametrize("softcap", [1e-6, 1e-3])
def test_a_tiny_soft_cap_gives_equal_weights(ops: Ops, softcap: float) -> None:
    talk = Conversation(ops, [80], 2, 2, 16, scale=100.0, softcap=softcap, sinks=NO_SINKS)
    means = np.cumsum(talk.v.reshape(80, 2, 16).astype(np.float64), axis=0) / np.arange(1, 81)[:, None, None]
    np.testing.assert_allclose(talk.run((0, 0, 80)), means, rtol=2e-3, atol=5e-3)


def test_a_large_soft_cap_changes_nothing(backend: Backend, ops: Ops) -> None:
    """The scores also keep their precision."""
    talk = Conversation(ops, [80], 2, 2, 16, softcap=1e6, sinks=NO_SINKS)
    assert_close(
        talk.run((0, 0, 80)), replace(talk, softcap=None, sinks=None).expected(0, 0, 80), backend.attention_error
    )


@pytest.mark.parametrize("softcap", [0.0, -1.0, 1e-7, 1e7, math.inf, math.nan])
def test_a_soft_cap_out_of_range_is_refused(ops: Ops, softcap: float) -> None:
    with pytest.raises(KernelError, match=r"soft-cap is .* between 1e-06 and 1e\+06"):
        Conversation(ops, [3], 2, 2, 16, softcap=softcap).run((0, 0, 3))
    with pytest.raises(KernelError, match="soft-cap is"):
        apply(ops, lambda x: ops.softcap(x, softcap), random(1, 4))


@pytest.mark.parametrize("n", [1, 3, 5])
def test_a_number_of_sinks_other_than_query_heads_is_refused(ops: Ops, n: int) -> None:
    with pytest.raises(KernelError, match=rf"the shape \[{n}\], but \[4\] is needed"):
        Conversation(ops, [3], 4, 2, 16, sinks=(0,) * n).run((0, 0, 3))


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize(("softcap", "sinks"), [(None, None), (2.0, (1, -1, 0, 5))])
def test_many_threads_share_a_long_cache(
    window: int | None, cache_type: CacheType, softcap: float | None, sinks: Sequence[float] | None
) -> None:
    """Each thread sums a part of the cache, which must not change a bit."""
    outputs = []
    more: dict[str, Any] = {"window": window, "cache_type": cache_type, "softcap": softcap, "sinks": sinks}
    for threads in (1, 8):
        ops = shared_by_threads(CPUOps(threads=threads))
        talk = Conversation(ops, [1300, 40], 4, 2, 24, **more)
        talk.run((0, 0, 1299), (1, 0, 39))
        outputs.append(talk.run((0, 1299, 1300), (1, 39, 40)))
        error = 0.0 if cache_type == "f16" else ROUNDED_QUERY
        assert_close(outputs[-1], np.concatenate([talk.expected(0, 1299, 1300), talk.expected(1, 39, 40)]), error)
    np.testing.assert_array_equal(*outputs)


def test_scores_outside_the_range_of_exp(ops: Ops) -> None:
    """Scores in the thousands, whose float32 values keep three decimals."""
    talk = Conversation(ops, [80], 2, 2, 16, scale=300.0)
    np.testing.assert_allclose(talk.run((0, 0, 80)), talk.expected(0, 0, 80), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_queries_of_any_size(backend: Backend, ops: Ops, cache_type: CacheType) -> None:
    """Queries above the range of float16, and queries so small that all positions get the same weight."""
    talk = Conversation(ops, [80], 2, 2, 24, cache_type=cache_type, powers=(0, 17, -20, 60, -120, 90))
    out, expected = talk.run((0, 0, 80)), talk.expected(0, 0, 80)
    if cache_type == "f16":
        assert_close(out, expected, backend.attention_error)
    else:  # rounded queries may swap nearly equal positions of large queries
        small = np.resize(talk.powers, 80) <= 0
        assert_close(out[small], expected[small], ROUNDED_QUERY)
        assert np.isfinite(out).all()


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_a_copied_page_gives_the_same_bits(backend: Backend, ops: Ops, cache_type: CacheType) -> None:
    talk = Conversation(ops, [100], 4, 2, 24, n_layers=2, cache_type=cache_type)
    backend.spoil(talk.cache)
    talk.run((0, 0, 90))
    before = talk.run((0, 90, 100))
    # Move the last page to the spare page, and overwrite it with the first page.
    first, *_, last = talk.pages[0].tolist()
    talk.cache.copy(0, last, talk.spare)
    talk.cache.copy(0, first, last)
    talk.pages[0][-1] = talk.spare
    np.testing.assert_array_equal(talk.run((0, 98, 100)), before[8:])


@pytest.mark.parametrize(("cache_type", "largest"), [("f16", 65504.0), ("q8_0", 127 * 65504.0)])
def test_keys_and_values_above_the_range_are_clamped(ops: Ops, cache_type: CacheType, largest: float) -> None:
    big = np.array([[1e9] * 8, [np.inf] * 8], np.float32)  # a cache does not rotate heads this small
    tables = [ops.load_embedding(f32(x)) for x in (np.zeros((2, 8)), big, -big)]

    def forward() -> Any:
        q, k, v = (ops.embed(t) for t in tables)
        return ops.outputs(ops.attention(ops.rope_append(q, k, v, None, 0), 0, scale=1.0))

    out = run(ops, forward, one_sequence(2), ops.new_cache(CacheShape(1, 1, 8, cache_type), 1))
    np.testing.assert_allclose(out, np.full((2, 8), -largest), rtol=1e-6)


@pytest.mark.parametrize(("cache_type", "steps_to_largest"), [("q8_0", 127), ("q5_0", 16), ("q4_0", 8)])
def test_a_cache_of_codes_rounds_as_ggml_does(ops: Ops, cache_type: CacheType, steps_to_largest: int) -> None:
    """A token that sees only itself gets its value as gguf-py rounds it, except for ties and the last bit."""
    n_heads, dim = 3, 72  # a cache does not rotate heads of 72 values
    v = random(9, n_heads * dim, seed=5) * np.float32(10) ** np.linspace(-2, 4, 9, dtype=np.float32)[:, None]
    tables = [ops.load_embedding(f32(x)) for x in (random(9, n_heads * dim), random(9, n_heads * dim), v)]

    def forward() -> Any:
        q, k, v = (ops.embed(t) for t in tables)
        return ops.outputs(ops.attention(ops.rope_append(q, k, v, None, 0), 0, scale=1.0, window=1))

    out = run(ops, forward, one_sequence(9), ops.new_cache(CacheShape(1, n_heads, dim, cache_type), 1))
    padded = np.pad(v.reshape(9, n_heads, dim), ((0, 0), (0, 0), (0, 24)))
    type = gguf.GGMLQuantizationType[cache_type.upper()]
    expected = gguf.quants.dequantize(gguf.quants.quantize(padded, type), type)[..., :dim].reshape(9, -1)
    step = np.abs(padded).reshape(9, n_heads, -1, 32).max(axis=-1, keepdims=True) / steps_to_largest
    steps = np.broadcast_to(step, (9, n_heads, 3, 32)).reshape(9, n_heads, 96)[..., :dim].reshape(9, -1)
    near = np.abs(out - expected) <= 1e-5 * np.abs(expected)
    assert near.mean() > 0.99
    assert (np.abs(out - v) <= (0.51 if cache_type == "q8_0" else 1.01) * steps + 1e-3 * np.abs(v)).all()


@pytest.mark.parametrize("n_heads", [1, 3])
def test_a_norm_after_attention_sees_heads_only(backend: Backend, ops: Ops, n_heads: int) -> None:
    """The width is no multiple of a vector, and other operations used the memory before."""
    n, width = 5, n_heads * 8
    q, kv, junk = random(n, width), random(n, 8), random(n, 32)
    tables = [ops.load_embedding(f32(x)) for x in (q, kv, kv, junk)]
    ones, wide = ops.load_vector(f32(np.ones(width))), ops.load_vector(f32(np.ones(32)))

    def forward(*, norm: bool) -> Any:
        q, k, v, junk = (ops.embed(t) for t in tables)
        for _ in range(4):
            junk = ops.gated(ops.rms_norm(junk, wide, 1.0), junk, "silu")
        out = ops.attention(ops.rope_append(q, k, v, None, 0), 0, scale=1.0)
        return ops.outputs(ops.rms_norm(out, ones, 1e-6) if norm else out)

    def result(norm: bool) -> Array:
        return run(ops, lambda: forward(norm=norm), one_sequence(n), ops.new_cache(CacheShape(1, 1, 8), 1))

    np.testing.assert_allclose(result(True), normed(result(False), np.ones(width), 1e-6), rtol=1e-5)


@pytest.mark.parametrize(
    ("cache_type", "head_dim", "most"),
    [("f16", 64, 1.0), ("f16", 8, 2.0), ("f16", 40, 1.2), ("q8_0", 64, 4.0), ("q8_0", 40, 4.0)],
)
def test_a_cache_takes_the_planned_bytes(ops: Ops, cache_type: CacheType, head_dim: int, most: float) -> None:
    """A backend may pad heads to ``most`` times their size; the reference stores codes as float32."""
    kv = ops.new_cache(CacheShape(3, 2, head_dim, cache_type), 500)
    # Compiling compares the cache with its footprint.
    ops.compile(lambda: ops.embed(f32(random(2, 16))), kv, max_tokens=1, max_outputs=1)
    assert (kv.made.n_pages, kv.made.page_size) == ((500,), ops.page_size)
    plain = 3 * 500 * ops.page_size * KVCache(0, 2, head_dim, head_dim, cache_type).bytes_per_token()
    assert plain <= kv.n_bytes <= most * plain


def test_a_q8_0_cache_takes_about_half_the_memory() -> None:
    ops = CPUOps(threads=1)
    for cache_type, n_bytes in (("f16", 4 * 64 * 64 * 2 * 2), ("q8_0", 4 * 64 * (64 + 4) * 2)):
        graph = ops.record(lambda: ops.embed(f32(random(2, 16))), CacheShape(22, 4, 64, cache_type))
        footprint = ops.footprint(graph, n_pages=(128,), max_tokens=1, max_outputs=1)
        assert footprint.caches == dict.fromkeys(range(22), 128 * n_bytes)


# -- Batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "page", "outputs", "words"),
    [
        (range(9), 0, [0], "9 tokens and 1 outputs .* compiled for, 8 and 3"),
        (range(8), 0, [0, 1, 2, 3], "8 tokens and 4 outputs .* compiled for, 8 and 3"),
        ([40], 0, [0], "outside the vocabulary of 40"),
        ([-1], 0, [0], "outside the vocabulary of 40"),
        ([1], 1, [0], "page outside a cache of 1"),
    ],
)
def test_invalid_batches_are_refused(ops: Ops, ids: Sequence[int], page: int, outputs: list[int], words: str) -> None:
    table, twice = ops.load_embedding(f32(np.eye(40))), ops.load_linear(f32(2 * np.eye(40)))
    cache = ops.new_cache(CacheShape(1, 1, 16), 1)
    step = ops.compile(lambda: ops.outputs(ops.linear(ops.embed(table), twice)), cache, max_tokens=8, max_outputs=3)
    with pytest.raises(KernelError, match=words):
        step(make_batch([(ids, 0, [page])], outputs=outputs))
    rows = step(make_batch([(range(8), 0, [0])], outputs=[7, 6, 5]))  # the step still works
    np.testing.assert_array_equal(rows, 2 * np.eye(40)[[7, 6, 5]])
