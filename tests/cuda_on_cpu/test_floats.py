"""Float arithmetic compared with exact fractions, rounded once in each mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from tests.cuda_on_cpu.kernels import Array, Case, Instructions
from tests.cuda_on_cpu.rounding import BF16, F16, F32, Format, rounded

TINY = 2.0**-149
VALUES = (
    *(0.0, -0.0, 1.0, -1.0, 1.5, 3.0, 1 / 3, -0.1, 1e-3, 12345.678, 3e38, -3e38, 2.0**-126, -(2.0**-126)),
    *(TINY, -TINY, 2.0**-127, 1 + 2.0**-23, 1 - 2.0**-24, 2.0**24 + 1, 7e-20, -5e19, 2.0**12 + 2.0**-11),
)
MODES = ("rn", "rz", "rm", "rp")
Exact = Callable[..., Fraction]
OPERATIONS: dict[str, tuple[int, Exact]] = {
    "add": (2, lambda a, b: a + b),
    "sub": (2, lambda a, b: a - b),
    "mul": (2, lambda a, b: a * b),
    "fma": (3, lambda a, b, c: a * b + c),
}
HALVES = {"f16": F16, "bf16": BF16}


def _registers(n: int) -> str:
    return ", ".join(f"%{i}" for i in range(n + 1))


@cache
def instructions() -> Instructions:
    cases = []
    for (name, (n, _)), mode in itertools.product(OPERATIONS.items(), MODES):
        cases.append(Case(f"{name}_{mode}", f"{name}.{mode}.f32 {_registers(n)};", "f32", ("f32",) * n))
    for name, (n, _) in OPERATIONS.items():
        cases.append(Case(f"{name}_ftz", f"{name}.rn.ftz.f32 {_registers(n)};", "f32", ("f32",) * n))
        cases.append(Case(f"{name}_sat", f"{name}.rn.sat.f32 {_registers(n)};", "f32", ("f32",) * n))
        cases.append(Case(f"{name}_f64", f"{name}.rn.f64 {_registers(n)};", "f64", ("f64",) * n))
    for name, half in (("fma", "f16"), ("add", "f16"), ("sub", "f16"), ("mul", "f16"), ("fma", "bf16")):
        n = OPERATIONS[name][0]
        cases.append(Case(f"{name}_{half}", f"{name}.rn.{half} {_registers(n)};", "u16", ("u16",) * n))
        cases.append(Case(f"{name}_{half}x2", f"{name}.rn.{half}x2 {_registers(n)};", "u32", ("u32",) * n))
    cases.append(Case("relu_f16", f"fma.rn.relu.f16 {_registers(3)};", "u16", ("u16",) * 3))
    for name in ("min", "max"):
        cases.append(Case(name, f"{name}.f32 {_registers(2)};", "f32", ("f32", "f32")))
        cases.append(Case(f"{name}_nan", f"{name}.NaN.f32 {_registers(2)};", "f32", ("f32", "f32")))
        cases.append(Case(f"{name}_f16x2", f"{name}.f16x2 {_registers(2)};", "u32", ("u32", "u32")))
        cases.append(Case(f"{name}_bf16x2", f"{name}.NaN.bf16x2 {_registers(2)};", "u32", ("u32", "u32")))
    for name in ("neg", "abs"):
        cases.append(Case(name, f"{name}.f32 %0, %1;", "f32", ("f32",)))
        cases.append(Case(f"{name}_f16x2", f"{name}.f16x2 %0, %1;", "u32", ("u32",)))
        cases.append(Case(f"{name}_bf16", f"{name}.bf16 %0, %1;", "u16", ("u16",)))
    for name in ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"):
        ftz = "" if name == "tanh" else ".ftz"
        cases.append(Case(name, f"{name}.approx{ftz}.f32 %0, %1;", "f32", ("f32",)))
    cases.append(Case("sqrt_rn", "sqrt.rn.f32 %0, %1;", "f32", ("f32",)))
    cases.append(Case("rcp_rn", "rcp.rn.f32 %0, %1;", "f32", ("f32",)))
    cases.append(Case("ex2_f16x2", "ex2.approx.f16x2 %0, %1;", "u32", ("u32",)))
    cases.append(Case("tanh_bf16", "tanh.approx.bf16 %0, %1;", "u16", ("u16",)))
    for kind in ("rn", "approx", "full"):
        cases.append(Case(f"div_{kind}", f"div.{kind}.f32 %0, %1, %2;", "f32", ("f32", "f32")))
    cases.append(Case("copysign", "copysign.f32 %0, %1, %2;", "f32", ("f32", "f32")))
    for kind in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
        asm = f"{{ .reg .pred p; testp.{kind}.f32 p, %1; selp.u32 %0, 1, 0, p; }}"
        cases.append(Case(f"testp_{kind}", asm, "u32", ("f32",)))
    return Instructions(cases, architecture=86)


def _points(n: int, values: Array) -> list[Array]:
    """Return all pairs of values, each with a third value."""
    a, b = (x.reshape(-1) for x in np.meshgrid(values, values))
    return [a, b, np.resize(values[::-1], a.size)][:n]


def _exact(operation: str, inputs: list[Array], to: Format, mode: str = "rn") -> list[float]:
    """Return the exact results, rounded.  Zero sums of these values are +0, or -0 when rounding down."""
    formula = OPERATIONS[operation][1]
    return [rounded(formula(*map(Fraction, map(float, point))), to, mode) for point in zip(*inputs, strict=True)]


def _assert_same(got: Array, wanted: list[float]) -> None:
    """Compare as numbers; other tests check the sign of zero."""
    np.testing.assert_array_equal(got.astype(np.float64), np.array(wanted))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_f32(name: str, mode: str) -> None:
    inputs = _points(OPERATIONS[name][0], np.array(VALUES, np.float32))
    _assert_same(instructions()(f"{name}_{mode}", *inputs), _exact(name, inputs, F32, mode))


@pytest.mark.parametrize("name", OPERATIONS)
def test_denormals_are_flushed_with_ftz(name: str) -> None:
    inputs = _points(OPERATIONS[name][0], np.array(VALUES, np.float32))
    flushed = [np.where(np.abs(x) < 2.0**-126, np.float32(0), x) for x in inputs]
    wanted = np.array(_exact(name, flushed, F32))
    wanted[np.abs(wanted) < 2.0**-126] = 0
    _assert_same(instructions()(f"{name}_ftz", *inputs), wanted.tolist())


def test_flushing_keeps_the_sign() -> None:
    got = instructions()("mul_ftz", np.array([-TINY, TINY], np.float32), np.ones(2, np.float32))
    np.testing.assert_array_equal(got.view(np.uint32), [0x80000000, 0])


@pytest.mark.parametrize("name", OPERATIONS)
def test_saturation(name: str) -> None:
    inputs = _points(OPERATIONS[name][0], np.array([-2, -0.5, 0, 0.25, 0.75, 1, 3], np.float32))
    wanted = np.clip(_exact(name, inputs, F32), 0, 1)
    _assert_same(instructions()(f"{name}_sat", *inputs), wanted.tolist())
    nan = [np.array([np.nan], np.float32)] * len(inputs)
    assert instructions()(f"{name}_sat", *nan)[0] == 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_f64(name: str) -> None:
    inputs = _points(OPERATIONS[name][0], np.array([0.1, -1 / 3, 1e150, 7.5, 1e-150], np.float64))
    points = zip(*(x.tolist() for x in inputs), strict=True)
    wanted = [float(OPERATIONS[name][1](*map(Fraction, point))) for point in points]
    np.testing.assert_array_equal(instructions()(f"{name}_f64", *inputs), wanted)


def _half_values(half: str, bits: Array) -> Array:
    """Return the floats that 16 bits encode."""
    if half == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _random_halves(half: str, n: int, seed: int) -> Array:
    bits = np.random.default_rng(seed).integers(0, 65536, n).astype(np.uint16)
    return bits[np.isfinite(_half_values(half, bits))]


@pytest.mark.parametrize(
    ("name", "half"), [("fma", "f16"), ("add", "f16"), ("sub", "f16"), ("mul", "f16"), ("fma", "bf16")]
)
def test_halves(name: str, half: str) -> None:
    n = OPERATIONS[name][0]
    halves = [_random_halves(half, 3000, seed) for seed in range(n)]
    size = min(map(len, halves)) // 2 * 2
    halves = [h[:size] for h in halves]
    wanted = _exact(name, [_half_values(half, h) for h in halves], HALVES[half])
    _assert_same(_half_values(half, instructions()(f"{name}_{half}", *halves)), wanted)
    pairs = instructions()(f"{name}_{half}x2", *(h.view(np.uint32) for h in halves))
    _assert_same(_half_values(half, pairs.view(np.uint16)), wanted)


def test_double_rounding_of_bf16_is_avoided() -> None:
    """A product halfway between two bf16 values, so that the smallest addend decides."""
    factor, tiny = (np.array([x], np.float32).view(np.uint16)[1:] for x in (1 + 2.0**-4, 2.0**-100))
    # (1 + 2^-4)^2 = 1 + 2^-3 + 2^-8
    got = instructions()("fma_bf16", factor, factor, tiny)
    assert _half_values("bf16", got)[0] == 1 + 2.0**-3 + 2.0**-7


def test_relu() -> None:
    a, b, c = (np.array(x, np.float16).view(np.uint16) for x in ([1.0, -1.0], [2.0, 2.0], [0.5, 0.5]))
    np.testing.assert_array_equal(
        instructions()("relu_f16", a, b, c).view(np.float16), np.array([2.5, 0.0], np.float16)
    )


@pytest.mark.parametrize("name", ["min", "max"])
def test_min_and_max(name: str) -> None:
    values = np.array([0.0, -0.0, 1.0, -2.0, np.inf, -np.inf, np.nan, TINY], np.float32)
    a, b = _points(2, values)
    function = {"min": np.fmin, "max": np.fmax}[name]
    np.testing.assert_array_equal(instructions()(name, a, b), function(a, b))
    strict = {"min": np.minimum, "max": np.maximum}[name]
    np.testing.assert_array_equal(instructions()(f"{name}_nan", a, b), strict(a, b))
    zeros = instructions()(name, np.array([0.0, -0.0], np.float32), np.array([-0.0, 0.0], np.float32))
    assert np.signbit(zeros).all() == (name == "min")


@pytest.mark.parametrize("name", ["min", "max"])
def test_min_and_max_of_pairs(name: str) -> None:
    for half, function in (
        ("f16", {"min": np.fmin, "max": np.fmax}),
        ("bf16", {"min": np.minimum, "max": np.maximum}),
    ):
        a, b = (np.random.default_rng(seed).integers(0, 65536, 4096).astype(np.uint16) for seed in (0, 1))
        got = instructions()(f"{name}_{half}x2", a.view(np.uint32), b.view(np.uint32)).view(np.uint16)
        wanted = function[name](_half_values(half, a), _half_values(half, b))
        np.testing.assert_array_equal(_half_values(half, got), wanted)


def test_signs() -> None:
    values = np.array([1.5, -2.5, 0.0, -0.0, np.inf], np.float32)
    np.testing.assert_array_equal(instructions()("neg", values).view(np.uint32), (-values).view(np.uint32))
    np.testing.assert_array_equal(instructions()("abs", values).view(np.uint32), np.abs(values).view(np.uint32))
    bits = np.arange(65536, dtype=np.uint16)
    np.testing.assert_array_equal(instructions()("neg_bf16", bits), bits ^ 0x8000)
    np.testing.assert_array_equal(instructions()("abs_bf16", bits), bits & 0x7FFF)
    np.testing.assert_array_equal(instructions()("neg_f16x2", bits.view(np.uint32)).view(np.uint16), bits ^ 0x8000)
    np.testing.assert_array_equal(instructions()("abs_f16x2", bits.view(np.uint32)).view(np.uint16), bits & 0x7FFF)
    a, b = _points(2, values)
    np.testing.assert_array_equal(instructions()("copysign", a, b), np.copysign(b, a))


@pytest.mark.parametrize("kind", ["rn", "approx", "full"])
def test_division(kind: str) -> None:
    a, b = _points(2, np.array([1.0, -3.0, 0.1, 7e5, 1e-6, 2.0**-100], np.float32))
    quotients = a.astype(np.float64) / b
    np.testing.assert_allclose(instructions()(f"div_{kind}", a, b), quotients, rtol=2e-7)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("ex2", np.exp2),
        ("lg2", np.log2),
        ("rcp", lambda x: 1 / x),
        ("rcp_rn", lambda x: 1 / x),
        ("rsqrt", lambda x: 1 / np.sqrt(x)),
        ("sqrt", np.sqrt),
        ("sqrt_rn", np.sqrt),
        ("sin", np.sin),
        ("cos", np.cos),
        ("tanh", np.tanh),
    ],
)
def test_functions(name: str, function: Callable[[Array], Array]) -> None:
    values = np.linspace(0.01, 20, 999).astype(np.float32)
    np.testing.assert_allclose(
        instructions()(name, values), function(values.astype(np.float64)), rtol=1e-6, atol=1e-7
    )


def test_functions_of_halves() -> None:
    values = np.linspace(-8, 8, 1024).astype(np.float16)
    got = instructions()("ex2_f16x2", values.view(np.uint32)).view(np.float16)
    np.testing.assert_array_equal(got, np.exp2(values.astype(np.float64)).astype(np.float16))
    bits = (np.linspace(-4, 4, 500).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    got = _half_values("bf16", instructions()("tanh_bf16", bits))
    np.testing.assert_allclose(got, np.tanh(_half_values("bf16", bits)), rtol=2.0**-8)


def test_properties() -> None:
    values = np.array([0.0, 1.0, TINY, np.inf, -np.inf, np.nan], np.float32)
    tests = {
        "finite": np.isfinite(values),
        "infinite": np.isinf(values),
        "number": ~np.isnan(values),
        "notanumber": np.isnan(values),
        "normal": values == 1,
        "subnormal": values == np.float32(TINY),
    }
    for kind, wanted in tests.items():
        np.testing.assert_array_equal(instructions()(f"testp_{kind}", values), wanted)
