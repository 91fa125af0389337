"""Matrix products on the CPU: all formats on the best instruction set of this machine, and some on the others.

Expected values are computed in float64 from the values of the gguf package and from activations rounded to eight
bits, which the first test checks.  The bounds allow for sums in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import KernelError, NotEnoughMemoryError
from localllm.kernels.cpu import host
from localllm.kernels.cpu.matmul import INT16_TOKENS, MAX_TOKENS
from localllm.kernels.cpu.memory import padded
from localllm.kernels.cpu.target import available
from localllm.kernels.cpu.tiles import OUTLIER, TILES
from localllm.quant.formats import FORMATS
from localllm.quant.repack import repack_target
from localllm.quant.types import BLOCK_SIZES, GGMLType
from tests.helpers.blocks import KERNEL_FORMATS, UNITS, has_own_kernel, random_rows, set_scales, values_of
from tests.helpers.recorder import CPUOps
from tests.helpers.weights import blocks, f32, one_sequence, run

Array = NDArray[np.float64]
T = GGMLType

FLOATS = (T.F32, T.F16, T.BF16)
#: No multiple of the rows in a tile or of the rows that float kernels compute at once.
N_OUT = 37
#: One token, less and more than half a tile, a whole tile, and more than a tile.
BATCHES = (1, 2, 5, 8, 11)

#: Formats tried on every instruction set.  test_simd.py tests the code that differs between instruction sets.
EVERYWHERE = (T.Q8_0, T.F16)
#: The best instruction set, and the best one with narrower vectors.  Only CI tries the others.
BEST, *OTHERS = available()
ISAS = [BEST, *[t for t in OTHERS if not t.wide][:1]]


def cases() -> Iterator[Any]:
    """Return (instruction set, format) pairs.

    Each kernel compiles for a second, so only CI tries a pair whose kernel is nearly the same as another.
    """
    for target in available():
        for type in FORMATS if target is BEST else KERNEL_FORMATS:
            is_near = not has_own_kernel(type) if target is BEST else target not in ISAS or type not in EVERYWHERE
            marks = [pytest.mark.ci] if is_near else []
            yield pytest.param(target.name, type, id=f"{target.name}-{type.name}", marks=marks)


CASES = list(cases())
# In module scope, tests of one kernel follow each other, so that one pytest-xdist worker compiles it.
every_kernel = pytest.mark.parametrize(("isa", "type"), CASES, scope="module")
every_isa = pytest.mark.parametrize(
    "isa", [pytest.param(t.name, marks=[] if t in ISAS else [pytest.mark.ci]) for t in available()], scope="module"
)

_backends: dict[str, CPUOps] = {}


def backend(isa: str) -> CPUOps:
    if isa not in _backends:
        _backends[isa] = CPUOps(threads=2, isa=isa)
    return _backends[isa]


def multiply(
    isa: str,
    x: NDArray[np.floating],
    rows: NDArray[np.uint8],
    type: GGMLType,
    bias: NDArray[np.float32] | None = None,
    residual: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Compute x @ W.T (+ bias) (+ residual) on the backend for ``isa``, with W as blocks."""
    ops = backend(isa)
    weight = ops.load_linear(blocks(rows, type, x.shape[1]), None if bias is None else f32(bias))
    inputs = ops.load_embedding(f32(x))
    others = None if residual is None else ops.load_embedding(f32(residual))

    def forward() -> object:
        added = None if others is None else ops.embed(others)
        return ops.outputs(ops.linear(ops.embed(inputs), weight, residual=added))

    return run(ops, forward, one_sequence(len(x)))


def rounded(x: NDArray[np.float32]) -> Array:
    """Round activations [T, k] to eight bits with a scale per 32 columns.

    In blocks above `OUTLIER` times the mean of the row, the remainder is added in eight bits, too.
    """
    codes, scale = in_eight_bits(x)
    parts = codes.astype(np.float64) * scale
    largest = np.abs(x.reshape(codes.shape)).max(axis=2, keepdims=True)
    rests = (x.reshape(codes.shape) - codes.astype(np.float64) * scale).astype(np.float32)
    codes, scale = in_eight_bits(rests.reshape(x.shape))
    has_rest = largest > OUTLIER * largest.mean(axis=1, keepdims=True)
    return (parts + has_rest * codes * scale.astype(np.float64)).reshape(x.shape)


def in_eight_bits(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return codes [T, k / 32, 32] and scales [T, k / 32, 1]."""
    runs = x.reshape(len(x), -1, 32)
    largest = np.abs(runs).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    return np.rint(runs * inverse), largest / np.float32(127)


def seen(x: NDArray[np.float32], type: GGMLType) -> Array:
    """Return activations as the kernel for ``type`` reads them."""
    return x.astype(np.float64) if type in FLOATS else rounded(x)


def check(y: NDArray[np.float32], x: Array, w: Array, added: Array | float = 0.0) -> None:
    """Compare y with x @ w.T + added; the bound is relative to the sum of magnitudes, as rounding errors are."""
    assert y.shape == (len(x), len(w))
    bound = 1e-6 * (np.abs(x) @ np.abs(w).T + np.abs(added)) + 1e-30
    excess = np.abs(y - (x @ w.T + added)) / bound
    assert excess.max() < 1, f"{excess.max():.3g} times the bound at {np.unravel_index(excess.argmax(), y.shape)}"


def activations(n: int, k: int, seed: int = 5) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((n, k), np.float32)


def with_outliers(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Activations with a large value in each third token, so that each tile of tokens has blocks with outliers."""
    x[::3][np.arange(len(x[::3])), np.random.default_rng(6).integers(0, x.shape[1], len(x[::3]))] = 1000.0
    return x


@every_isa
def test_activations_are_rounded_to_eight_bits_for_each_32(isa: str) -> None:
    """Multiply by the identity in Q8_0, whose products are exact."""
    identity = np.zeros((64, 2, 34), np.uint8)
    identity[:, :, :2] = np.array([1.0], "<f2").view(np.uint8)
    identity[np.arange(64), np.arange(64) // 32, 2 + np.arange(64) % 32] = 1
    x = activations(9, 64)
    x[1] *= 1e6
    x[2] *= 1e-20
    x[3, :32] = 0
    x[4, 5] = 1000  # an outlier, which costs the other values precision
    x[5] = np.arange(64) - 31.5  # ties, which round to even
    y = multiply(isa, x, identity.reshape(64, -1), T.Q8_0)
    np.testing.assert_allclose(y, rounded(x), rtol=2e-7)
    np.testing.assert_array_equal(y == 0, rounded(x) == 0)


@every_isa
def test_blocks_with_outliers_keep_their_remainder(isa: str) -> None:
    identity = np.zeros((320, 10, 34), np.uint8)
    identity[:, :, :2] = np.array([1.0], "<f2").view(np.uint8)
    identity[np.arange(320), np.arange(320) // 32, 2 + np.arange(320) % 32] = 1
    x = with_outliers(activations(2 * MAX_TOKENS, 320))
    assert np.abs(rounded(x) - x)[::3].max() < 0.02  # below 1000 / 127 / 2, the error without the remainder
    for n in (1, *BATCHES, 40, len(x)):
        y = multiply(isa, x[:n], identity.reshape(320, -1), T.Q8_0)
        np.testing.assert_allclose(y, rounded(x[:n]), rtol=1e-6, atol=1e-9)


@every_kernel
def test_products(isa: str, type: GGMLType) -> None:
    k = 512
    # Scales that float16 holds exactly, for formats that are repacked.
    scales = () if repack_target(type) is type else (0.25, 0.5, 1.0, 2.0)
    rows = random_rows(type, N_OUT, k, scales=scales)
    w = values_of(rows, type)
    rng = np.random.default_rng(1)
    for n in BATCHES:
        x = with_outliers(activations(n, k))
        bias = rng.standard_normal(N_OUT, np.float32)
        residual = rng.standard_normal((n, N_OUT), np.float32)
        check(multiply(isa, x, rows, type), seen(x, type), w)
        check(multiply(isa, x, rows, type, bias), seen(x, type), w, bias)
        check(multiply(isa, x, rows, type, None, residual), seen(x, type), w, residual)
        check(multiply(isa, x, rows, type, bias, residual), seen(x, type), w, bias + residual.astype(np.float64))


@every_kernel
def test_a_token_has_the_same_bits_in_any_batch(isa: str, type: GGMLType) -> None:
    k = 512 if type in FLOATS else 256 + BLOCK_SIZES[type].length
    rows = random_rows(type, N_OUT, k)
    x = with_outliers(activations(MAX_TOKENS + 7, k))
    together = multiply(isa, x, rows, type)
    for part in (slice(0, 1), slice(7, 8), slice(8, 19), slice(MAX_TOKENS - 2, MAX_TOKENS + 2), slice(-1, None)):
        np.testing.assert_array_equal(multiply(isa, x[part], rows, type), together[part])


@every_isa
@pytest.mark.parametrize("type", FLOATS)
def test_floats_rounded_to_fourteen_bits(isa: str, type: GGMLType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoders round floats this way.  The number of columns is no multiple of a block."""
    monkeypatch.setattr(backend(isa), "rounds_floats", True)
    rng = np.random.default_rng(3)
    for k in (32, 75, 300):
        rows = random_rows(type, N_OUT, k)
        w, x = values_of(rows, type), with_outliers(activations(2 * INT16_TOKENS - 3, k))
        x[1], x[2] = 0, x[2] * 1e-20
        bias, residual = rng.standard_normal(N_OUT, np.float32), rng.standard_normal((len(x), N_OUT), np.float32)
        y = multiply(isa, x, rows, type, bias, residual)
        exact = x.astype(np.float64) @ w.T
        parts = [
            (np.linalg.norm(x[:, i : i + 32], axis=1), np.linalg.norm(w[:, i : i + 32], axis=1))
            for i in range(0, k, 32)
        ]
        scale = sum(np.outer(*part) for part in parts)
        assert (np.abs(y - (exact + bias + residual)) <= 2e-3 * scale + 1e-5).all()
        assert np.linalg.norm(multiply(isa, x, rows, type) - exact) < 1e-3 * np.linalg.norm(exact)
        for n in (1, 9, INT16_TOKENS):
            np.testing.assert_array_equal(multiply(isa, x[:n], rows, type, bias, residual[:n]), y[:n])
    w = values_of(rows, type).astype(np.float32)
    x[3, 7], w[5, 40] = np.nan, np.nan
    y = multiply(isa, x, w.view(np.uint8), T.F32)
    assert np.isnan(y[3]).all()
    assert np.isnan(y[:, 5]).all()
    assert np.isfinite(np.delete(np.delete(y, 3, 0), 5, 1)).all()


@pytest.mark.parametrize(("isa", "type"), [p for p in CASES if p.values[1] in UNITS], scope="module")
def test_integers_are_summed_exactly(isa: str, type: GGMLType) -> None:
    """With integer scales and activations, every sum is an integer below 2^24, so results are exact."""
    k = 256
    rng = np.random.default_rng(2)
    rows = random_rows(type, N_OUT, k, scales=[UNITS[type]])
    x = rng.integers(-127, 128, (11, k))
    x[:, ::32] = 127  # the scale of the activations is 1
    w = values_of(rows, type)
    np.testing.assert_array_equal(w, np.rint(w))
    expected = x @ w.astype(np.int64).T
    assert np.abs(expected).max() < 2**24
    np.testing.assert_array_equal(multiply(isa, x, rows, type), expected)


@pytest.mark.parametrize(("isa", "type"), [p for p in CASES if p.values[1] in UNITS], scope="module")
def test_extreme_codes_times_extreme_activations(isa: str, type: GGMLType) -> None:
    """The largest products of all, with equal and with alternating signs, do not saturate."""
    k = 256
    size = BLOCK_SIZES[type]
    fills = (0x00, 0xFF, 0x80, 0x7F, 0x0F, 0xF0, 0x01, 0x55, 0xAA)
    rows = np.repeat(np.array(fills, np.uint8), k // size.length * size.n_bytes).reshape(len(fills), -1)
    set_scales(rows.reshape(-1, size.n_bytes), type, [UNITS[type]], np.random.default_rng(0))
    x = np.full((4, k), 127)
    x[1] = -127
    x[2, 1::2] = -127
    x[3, ::3] = -127
    check(multiply(isa, x, rows, type), x.astype(np.float64), values_of(rows, type))


@pytest.mark.parametrize(("isa", "type"), [p for p in CASES if p.values[1] in {T.F16, *UNITS}], scope="module")
def test_zero_tiny_and_huge_scales(isa: str, type: GGMLType) -> None:
    """Zeros, subnormals and the largest values of float16, with and without instructions for float16."""
    if type in (T.MXFP4, T.NVFP4):
        scales = [2.0**-6, 2.0**8]
    elif repack_target(type) is type:
        scales = [0.0, -0.0, 2.0**-24, 3 * 2.0**-24, 1023 * 2.0**-24, 2.0**-14, 65504.0, -65504.0]
    else:
        scales = [0.0, 2.0**-10, 2.0**8]
    for scale in scales:
        rows = random_rows(type, N_OUT, 256, scales=[scale])
        x = activations(3, 256)
        y = multiply(isa, x, rows, type)
        check(y, seen(x, type), values_of(rows, type))
        if scale == 0:
            np.testing.assert_array_equal(y, 0)


@every_isa
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00], ids=["inf", "-inf", "nan"])
def test_a_non_finite_scale_affects_only_its_row(isa: str, bits: int) -> None:
    rows = random_rows(T.Q8_0, N_OUT, 64)
    x = activations(11, 64)
    clean = multiply(isa, x, rows, T.Q8_0)
    rows[20, :2] = bits & 255, bits >> 8
    y = multiply(isa, x, rows, T.Q8_0)
    assert not np.isfinite(y[:, 20]).any()
    np.testing.assert_array_equal(np.delete(y, 20, axis=1), np.delete(clean, 20, axis=1))


@every_isa
@pytest.mark.parametrize("type", [T.Q8_0, T.F16], ids=lambda type: type.name)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_activation_affects_only_its_token(isa: str, type: GGMLType, value: float) -> None:
    rows = random_rows(type, N_OUT, 64)
    x = activations(11, 64)
    clean = multiply(isa, x, rows, type)
    x[9, 40] = value
    y = multiply(isa, x, rows, type)
    assert not np.isfinite(y[9]).any()
    np.testing.assert_array_equal(np.delete(y, 9, axis=0), np.delete(clean, 9, axis=0))


@every_isa
def test_activations_too_small_for_a_scale_give_zero(isa: str) -> None:
    """127 / largest would overflow."""
    x = np.full((2, 64), 1e-41, np.float32)
    x[1, :32] = 1.0
    rows = random_rows(T.Q8_0, N_OUT, 64)
    y = multiply(isa, x, rows, T.Q8_0)
    np.testing.assert_allclose(y[0], 0, atol=1e-30)
    check(y[1:], np.concatenate([x[1:, :32], 0 * x[1:, 32:]], axis=1).astype(np.float64), values_of(rows, T.Q8_0))


@pytest.mark.parametrize("n_in", [32, 96, 416])
@pytest.mark.parametrize("n_out", [1, 15, 16, 17, 33, 64])
def test_any_shape(n_in: int, n_out: int) -> None:
    isa = available()[0].name
    for type in (T.Q4_0, T.F32):
        rows, x = random_rows(type, n_out, n_in), activations(9, n_in)
        check(multiply(isa, x, rows, type), seen(x, type), values_of(rows, type))


@pytest.mark.parametrize("n_in", [1, 5, 172])
def test_float_rows_of_any_length(n_in: int) -> None:
    isa = available()[0].name
    for type in FLOATS:
        rows, x = random_rows(type, N_OUT, n_in), activations(9, n_in)
        check(multiply(isa, x, rows, type), x.astype(np.float64), values_of(rows, type))


def test_a_matrix_reports_its_format() -> None:
    loader = backend(available()[0].name).loader
    names = {t: loader.pack(blocks(random_rows(t, 2, 256), t, 256))[1].name for t in FORMATS}
    assert names[T.Q4_K] == "Q4_K"
    assert names[T.IQ4_XS] == "IQ4_NL"
    assert names[T.TQ1_0] == "Q2_K"
    assert names[T.IQ2_S] == "LUT_IQ2_16"


def test_matrices_with_scales_above_float16_become_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(T.IQ2_XXS, N_OUT, 256, scales=[40000.0])
    isa, x = available()[0].name, activations(2, 256)
    weight = blocks(rows, T.IQ2_XXS, 256)
    tiles, kind = backend(isa).loader.pack(weight)
    assert (kind, tiles.nbytes) == (T.F32, 4 * padded(N_OUT) * 256)
    check(multiply(isa, x, rows, T.IQ2_XXS), x.astype(np.float64), values_of(rows, T.IQ2_XXS))
    monkeypatch.setattr(host, "_least_memory", lambda: (tiles.nbytes - 1, "there"))
    with pytest.raises(NotEnoughMemoryError, match=r"for tensor tensor, whose scales do not fit float16 .* F32"):
        backend(isa).loader.pack(weight)


def test_a_type_that_no_kernel_reads_is_refused() -> None:
    weight = blocks(np.zeros((2, 256), np.uint8), T.I8, 256)
    ops = backend(available()[0].name)
    with pytest.raises(KernelError, match="type I8"):
        run(ops, lambda: ops.linear(ops.embed(f32(activations(1, 256))), ops.load_linear(weight)), one_sequence(1))


def test_every_integer_format_has_a_tile() -> None:
    assert {repack_target(t) for t in FORMATS if t not in FLOATS} == set(TILES)
