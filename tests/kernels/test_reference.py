"""The numpy reference against even plainer formulas: scalars, loops, float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.ops import Batch, CacheShape, Rope
from localllm.kernels.reference import ReferenceCache, ReferenceOps
from localllm.quant.types import GGMLType
from tests.helpers.run_model import make_batch
from tests.helpers.tiny_models import encode

SHAPE = CacheShape(n_layers=2, n_kv_heads=2, head_dim=8)
RNG = np.random.default_rng(0)


@dataclass
class Tensor:
    """A tensor as if from a file."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    def drop_pages(self) -> None: ...


def tensor(array: NDArray[np.float32], type: GGMLType = GGMLType.F32) -> Tensor:
    data, type = encode(array, type)
    return Tensor("t", type, array.shape, np.ascontiguousarray(data).view(np.uint8))


def random(*shape: int) -> NDArray[np.float32]:
    return RNG.normal(size=shape).astype(np.float32)


def run(
    ops: ReferenceOps, batch: Batch, forward: Callable[[], Any], cache: ReferenceCache | None = None
) -> NDArray[np.float32]:
    cache = cache or ops.new_cache(SHAPE, 4)
    return ops.compile(forward, cache, max_tokens=64, max_outputs=64)(batch)


def one(n: int, past: int = 0) -> Batch:
    """One sequence of ``n`` new tokens."""
    return make_batch([(range(n), past, [0, 1, 2, 3])])


@pytest.mark.parametrize("type", [GGMLType.F32, GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_K])
def test_embed_takes_rows(type: GGMLType) -> None:
    ops, table = ReferenceOps(), tensor(random(10, 256), type)
    batch = make_batch([([3, 9, 3], 0, [0])])
    values = gguf.quants.dequantize(table.data, gguf.GGMLQuantizationType(type))
    expected = [[2.5 * x for x in values[i]] for i in (3, 9, 3)]
    out = run(ops, batch, lambda: ops.embed(ops.load_embedding(table), 2.5))
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_rms_norm() -> None:
    ops, x, weight = ReferenceOps(), random(3, 5), random(5)
    out = run(ops, one(3), lambda: ops.rms_norm(x, ops.load_vector(tensor(weight)), 1e-2))
    for row, ours in zip(x, out, strict=True):
        root = math.sqrt(sum(float(v) ** 2 for v in row) / 5 + 1e-2)
        np.testing.assert_allclose(ours, [v / root * w for v, w in zip(row, weight, strict=True)], rtol=1e-6)


def test_rms_norm_of_zeros_is_zero() -> None:
    ops = ReferenceOps()
    out = run(ops, one(1), lambda: ops.rms_norm(np.zeros((1, 4), np.float32), np.ones(4, np.float32), 1e-6))
    np.testing.assert_array_equal(out, np.zeros((1, 4)))


@pytest.mark.parametrize("type", [GGMLType.F32, GGMLType.F16, GGMLType.Q4_0, GGMLType.Q8_0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_linear(type: GGMLType, with_bias: bool, with_residual: bool) -> None:
    ops, x, matrix = ReferenceOps(), random(3, 64), tensor(random(7, 64), type)
    bias, residual = random(7) * with_bias, random(3, 7) * with_residual
    linear = ops.load_linear(matrix, tensor(bias) if with_bias else None)
    assert (linear.n_in, linear.n_out) == (64, 7)
    out = run(ops, one(3), lambda: ops.linear(x, linear, residual.copy() if with_residual else None))
    values = gguf.quants.dequantize(matrix.data, gguf.GGMLQuantizationType(type)).astype(np.float64)
    for t in range(3):
        for row in range(7):
            expected = math.fsum(x[t] * values[row]) + bias[row] + residual[t, row]
            assert out[t, row] == pytest.approx(expected, abs=1e-5)


def test_linears_is_linear_of_each() -> None:
    ops, x = ReferenceOps(), random(2, 32)
    linears = [ops.load_linear(tensor(random(n, 32))) for n in (4, 6)]
    out = run(ops, one(2), lambda: ops.linears(x, linears))
    for ours, linear in zip(out, linears, strict=True):
        np.testing.assert_array_equal(ours, run(ops, one(2), lambda linear=linear: ops.linear(x, linear)))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("n_rot", [8, 4])
def test_rope_turns_pairs_as_complex_numbers(interleaved: bool, n_rot: int) -> None:
    ops, q, k = ReferenceOps(np.float32), random(3, 4 * 8), random(3, 2 * 8)
    frequencies = np.array([1.0, 0.3, 0.05, 0.001], np.float32)[: n_rot // 2]
    rope = Rope(frequencies, interleaved, magnitude=1.2)
    cache = ops.new_cache(SHAPE, 4)
    rotated = run(ops, one(3, past=5), lambda: ops.rope_append(q, k, k, rope, 0), cache)
    keys = cache.keys[0, 0, 5:8].reshape(3, 2 * 8)
    for before, after in ((q, rotated), (k, keys)):
        heads, turned = before.reshape(3, -1, 8), after.reshape(3, -1, 8)
        for t, head in np.ndindex(heads.shape[:2]):
            for i, frequency in enumerate(frequencies):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + n_rot // 2)
                turn = 1.2 * np.exp(1j * (5 + t) * float(frequency))
                expected = complex(heads[t, head, a], heads[t, head, b]) * turn
                assert turned[t, head, a] == pytest.approx(expected.real, abs=1e-5)
                assert turned[t, head, b] == pytest.approx(expected.imag, abs=1e-5)
            np.testing.assert_array_equal(turned[t, head, n_rot:], heads[t, head, n_rot:])


def test_heads_are_normed_before_they_are_rotated() -> None:
    ops, q, k, v = ReferenceOps(np.float32), random(2, 4 * 8), random(2, 2 * 8), random(2, 2 * 8)
    q_norm, k_norm = random(8), random(8)
    rope = Rope(np.full(4, 0.7, np.float32), interleaved=False)
    cache, other = ops.new_cache(SHAPE, 4), ops.new_cache(SHAPE, 4)
    out = run(ops, one(2), lambda: ops.rope_append(q, k, v, rope, 0, q_norm=q_norm, k_norm=k_norm, eps=0.1), cache)
    normed = [
        np.array([h / math.sqrt(np.mean(h.astype(float) ** 2) + 0.1) * w for h in a.reshape(-1, 8)], np.float32)
        for a, w in ((q, q_norm), (k, k_norm))
    ]
    expected = run(
        ops, one(2), lambda: ops.rope_append(normed[0].reshape(2, -1), normed[1].reshape(2, -1), v, rope, 0), other
    )
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(cache.keys, other.keys, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(cache.values, other.values)


def test_keys_and_values_are_appended_where_the_block_table_says() -> None:
    ops, k, v = ReferenceOps(), random(5, 16), random(5, 16)
    cache = ops.new_cache(SHAPE, 4)
    # One sequence passes from page 2 to page 0 after 15 tokens, the other begins page 3.
    batch = make_batch([([1, 2, 3], 14, [2, 0]), ([4, 5], 0, [3])])
    run(ops, batch, lambda: ops.rope_append(random(5, 32), k, v, None, 1), cache)
    places = [(2, 14), (2, 15), (0, 0), (3, 0), (3, 1)]
    for row, (page, slot) in enumerate(places):
        np.testing.assert_array_equal(cache.keys[1, page, slot].ravel(), k[row].astype(np.float16))
        np.testing.assert_array_equal(cache.values[1, page, slot].ravel(), v[row].astype(np.float16))
    touched = {tuple(place) for place in np.argwhere(cache.keys.any(axis=(3, 4)))}
    assert touched == {(1, page, slot) for page, slot in places}


def test_what_float16_cannot_hold_becomes_its_largest_value() -> None:
    ops = ReferenceOps()
    cache = ops.new_cache(SHAPE, 4)
    k = np.full((1, 16), 1e6, np.float32)
    run(ops, one(1), lambda: ops.rope_append(random(1, 32), k, -k, None, 0), cache)
    assert (cache.keys[0, 0, 0] == 65504).all()
    assert (cache.values[0, 0, 0] == -65504).all()


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("n_heads", [2, 6])
def test_attention(window: int | None, n_heads: int) -> None:
    """Three ragged sequences, one with a past, over pages out of order; what must not be seen is NaN."""
    ops = ReferenceOps()
    cache = ops.new_cache(SHAPE, 6)
    cache.keys[:], cache.values[:] = np.nan, np.nan
    parts = [(range(3), 17, [4, 1]), (range(1), 0, [5]), (range(6), 12, [0, 3])]
    batch = make_batch(parts)
    for new, past, pages in parts:
        for p in range(past + len(new)):
            cache.keys[1, pages[p // 16], p % 16] = random(2, 8)
            cache.values[1, pages[p // 16], p % 16] = random(2, 8)
    q = random(len(batch.ids), n_heads * 8)
    out = run(ops, batch, lambda: ops.attention(q, 1, scale=0.3, window=window), cache)
    row = 0
    for new, past, pages in parts:
        for position in range(past, past + len(new)):
            first = 0 if window is None else max(0, position - window + 1)
            seen = [(pages[p // 16], p % 16) for p in range(first, position + 1)]
            for head in range(n_heads):
                group = head // (n_heads // 2)
                query = q[row, head * 8 : head * 8 + 8].astype(float)
                scores = [0.3 * float(query @ cache.keys[1, page, slot, group]) for page, slot in seen]
                shares = [math.exp(s) for s in scores]
                expected = sum(
                    w / sum(shares) * cache.values[1, page, slot, group].astype(float)
                    for w, (page, slot) in zip(shares, seen, strict=True)
                )
                np.testing.assert_allclose(out[row, head * 8 : head * 8 + 8], expected, rtol=1e-4, atol=1e-6)
            row += 1


def test_attention_survives_scores_beyond_the_range_of_exp() -> None:
    ops = ReferenceOps(np.float32)
    cache = ops.new_cache(SHAPE, 4)
    cache.keys[0, 0, :2] = [[[100.0] * 8] * 2, [[99.0] * 8] * 2]
    cache.values[0, 0, 0], cache.values[0, 0, 1] = 1.0, 3.0
    q = np.full((1, 16), 100.0, np.float32)
    out = run(ops, one(1, past=1), lambda: ops.attention(q, 0, scale=1.0), cache)
    np.testing.assert_array_equal(out, np.ones((1, 16)))


def test_gated_silu() -> None:
    ops, gate, up = ReferenceOps(), random(2, 9) * 5, random(2, 9)
    gate[0, 0] = -200  # exp(200) is beyond float32
    out = run(ops, one(2), lambda: ops.gated(gate, up, "silu"))
    wide = gate.astype(float)
    np.testing.assert_allclose(out, wide / (1 + np.exp(-wide)) * up, rtol=1e-5, atol=1e-30)


def test_gated_gelu() -> None:
    """The tanh form stays within 5e-4 of the exact one, x * P(X <= x) for a standard normal X."""
    ops, gate, up = ReferenceOps(), random(2, 9) * 2, random(2, 9)
    out = run(ops, one(2), lambda: ops.gated(gate, up, "gelu"))
    exact = [
        [g * (1 + math.erf(g / math.sqrt(2))) / 2 * u for g, u in zip(*rows, strict=True)]
        for rows in zip(gate, up, strict=True)
    ]
    np.testing.assert_allclose(out, exact, atol=5e-4 * float(np.abs(up).max()))
    tanh = 0.5 * gate * (1 + np.tanh(0.7978845608028654 * (gate + 0.044715 * gate.astype(float) ** 3))) * up
    np.testing.assert_allclose(out, tanh, rtol=1e-4, atol=1e-6)


def test_an_unknown_activation_is_named_with_the_known_ones() -> None:
    ops = ReferenceOps()
    with pytest.raises(KernelError, match=r"'relu'.*silu, gelu"):
        run(ops, one(1), lambda: ops.gated(random(1, 4), random(1, 4), "relu"))


def test_outputs_are_the_wanted_rows_in_their_order() -> None:
    ops, x = ReferenceOps(), random(5, 4)
    out = run(ops, make_batch([(range(5), 0, [0])], outputs=[4, 0]), lambda: ops.outputs(x))
    np.testing.assert_array_equal(out, x[[4, 0]])


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_a_cache_takes_the_bytes_that_its_shape_says(kind: type) -> None:
    ops = ReferenceOps(kind)
    cache = ops.new_cache(SHAPE, 7)
    assert cache.n_bytes == ops.cache_bytes(SHAPE, 7)
    assert cache.n_bytes == SHAPE.bytes_per_token() * 7 * cache.page_size * np.dtype(kind).itemsize // 2
    assert (cache.n_pages, cache.page_size) == (7, ReferenceOps.page_size)


def test_a_loaded_matrix_takes_the_bytes_that_were_foretold() -> None:
    ops, matrix = ReferenceOps(), tensor(random(7, 64), GGMLType.Q8_0)
    assert ops.packed_bytes(matrix) == ops.load_linear(matrix).n_bytes == 7 * 64 * 4


def test_copy_page_copies_all_layers() -> None:
    cache = ReferenceOps().new_cache(SHAPE, 3)
    cache.keys[:], cache.values[:] = random(*cache.keys.shape), random(*cache.values.shape)
    keys, values = cache.keys.copy(), cache.values.copy()
    cache.copy_page(0, 2)
    for array, before in ((cache.keys, keys), (cache.values, values)):
        np.testing.assert_array_equal(array[:, 2], before[:, 0])
        np.testing.assert_array_equal(array[:, :2], before[:, :2])


def test_another_backends_cache_is_refused() -> None:
    class OtherCache:
        page_size, n_pages, n_bytes = 16, 1, 0

        def copy_page(self, source: int, target: int) -> None: ...

    ops = ReferenceOps()
    with pytest.raises(KernelError, match="OtherCache"):
        ops.compile(lambda: None, OtherCache(), max_tokens=1, max_outputs=1)
