"""cvt compared with exact rounding, exhaustively for small types; mov, selections and comparisons."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.cuda_on_cpu.kernels import Array, Case, Instructions
from tests.cuda_on_cpu.rounding import BF16, F16, F32, rounded

WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
INTS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
ORDERED = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
UNSIGNED = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
F32_VALUES = np.array(
    [
        *(0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 1e10, -1e10, 3e38, 127.5, -128.5, 255.4, 256, 65535.5, -32769),
        *(2**31, 2**63, 2**31 - 1, -(2**31), -(2.0**63), 2.0**64, 1e-40, 2.0**24 + 2, 4294967040.0),
        *(np.inf, -np.inf, np.nan),
    ],
    np.float32,
)


def _register(kind: str) -> str:
    """Return the register type of a PTX type."""
    return {"f32": "f32", "f64": "f64"}.get(kind, f"u{max(16, int(kind.lstrip('busf')))}")


def _numpy(kind: str) -> np.dtype[np.integer[Any]]:
    return np.dtype(f"{'i' if kind[0] == 's' else kind[0]}{int(kind[1:]) // 8}")


@cache
def to_ints() -> Instructions:
    cases = []
    for target, mode in itertools.product(INTS, WHOLE):
        if target in ("u8", "s8"):  # inline assembly has no 8-bit registers, so the value is extended to 32 bits
            asm = f"{{ .reg .b16 t; cvt.{mode}.{target}.f32 t, %1; cvt.{target[0]}32.{target[0]}16 %0, t; }}"
            cases.append(Case(f"{target}_{mode}", asm, "u32", ("f32",)))
        else:
            cases.append(Case(f"{target}_{mode}", f"cvt.{mode}.{target}.f32 %0, %1;", _register(target), ("f32",)))
    cases.append(Case("s32_f64", "cvt.rzi.s32.f64 %0, %1;", "u32", ("f64",)))
    cases.append(Case("s32_f16", "cvt.rni.s32.f16 %0, %1;", "u32", ("u16",)))
    cases.append(Case("s32_ftz", "cvt.rpi.ftz.s32.f32 %0, %1;", "u32", ("f32",)))
    for name, asm in (
        ("whole_rni", "cvt.rni.f32.f32"),
        ("whole_rmi", "cvt.rmi.f32.f32"),
        ("unit", "cvt.sat.f32.f32"),
    ):
        cases.append(Case(name, f"{asm} %0, %1;", "f32", ("f32",)))
    return Instructions(cases)


@cache
def others() -> Instructions:
    cases = []
    for source, mode in itertools.product(("s32", "u32"), ("rn", "rz", "rm", "rp")):
        cases.append(Case(f"f32_{mode}_{source}", f"cvt.{mode}.f32.{source} %0, %1;", "f32", ("u32",)))
    cases.append(Case("f32_s64", "cvt.rn.f32.s64 %0, %1;", "f32", ("u64",)))
    cases.append(Case("f32_u64", "cvt.rn.f32.u64 %0, %1;", "f32", ("u64",)))
    cases.append(Case("f64_s32", "cvt.rn.f64.s32 %0, %1;", "f64", ("u32",)))
    cases.append(Case("f16_s32", "cvt.rn.f16.s32 %0, %1;", "u16", ("u32",)))
    cases.append(Case("f32_f16", "cvt.f32.f16 %0, %1;", "f32", ("u16",)))
    cases.append(Case("f64_f32", "cvt.f64.f32 %0, %1;", "f64", ("f32",)))
    for mode in ("rn", "rz", "rm", "rp"):
        cases.append(Case(f"f32_f64_{mode}", f"cvt.{mode}.f32.f64 %0, %1;", "f32", ("f64",)))
    for mode in ("rn", "rz"):
        cases.append(Case(f"f16_{mode}", f"cvt.{mode}.f16.f32 %0, %1;", "u16", ("f32",)))
        cases.append(Case(f"bf16_{mode}", f"cvt.{mode}.bf16.f32 %0, %1;", "u16", ("f32",)))
        for half in ("f16", "bf16"):
            cases.append(Case(f"{half}x2_{mode}", f"cvt.{mode}.{half}x2.f32 %0, %1, %2;", "u32", ("f32", "f32")))
    cases.append(Case("f16_relu", "cvt.rn.relu.f16.f32 %0, %1;", "u16", ("f32",)))
    cases.append(Case("tf32", "cvt.rna.tf32.f32 %0, %1;", "u32", ("f32",)))
    cases.append(Case("s64_s32", "cvt.s64.s32 %0, %1;", "u64", ("u32",)))
    cases.append(Case("u32_s16", "cvt.u32.s16 %0, %1;", "u32", ("u16",)))
    cases.append(Case("s32_s8", "cvt.s32.s8 %0, %1;", "u32", ("u32",)))
    cases.append(Case("u16_u32", "cvt.u16.u32 %0, %1;", "u16", ("u32",)))
    cases.append(Case("sat_s8", "{ .reg .b16 t; cvt.sat.s8.s32 t, %1; cvt.s32.s16 %0, t; }", "u32", ("u32",)))
    cases.append(Case("sat_u16", "cvt.sat.u16.s32 %0, %1;", "u16", ("u32",)))
    return Instructions(cases)


def _rounded(values: Array, to: object, mode: str) -> list[float]:
    out = []
    for value in values.astype(np.float64).tolist():
        out.append(rounded(Fraction(value), to, mode) if math.isfinite(value) else value)  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize("mode", WHOLE)
@pytest.mark.parametrize("target", INTS)
def test_float_to_int(target: str, mode: str) -> None:
    kind = _numpy(target)
    info = np.iinfo(kind)
    wanted = []
    for value in F32_VALUES.tolist():
        if math.isnan(value):  # PTX ISA, cvt: the lowest value of the type for 64 bits, otherwise 0
            wanted.append(1 << 63 if target == "u64" else info.min if target == "s64" else 0)
        elif math.isinf(value):
            wanted.append(int(info.max if value > 0 else info.min))
        else:
            wanted.append(min(max(int(WHOLE[mode](value)), int(info.min)), int(info.max)))
    got = to_ints()(f"{target}_{mode}", F32_VALUES)
    kind = np.dtype(f"{kind.kind}{got.itemsize}")
    np.testing.assert_array_equal(got.view(kind), np.array(wanted, kind))


def test_other_floats_to_int() -> None:
    doubles = np.array([1e300, -1e300, 2.0**31 - 0.5, -1.9, np.nan], np.float64)
    np.testing.assert_array_equal(
        to_ints()("s32_f64", doubles).view(np.int32)[:4], [2**31 - 1, -(2**31), 2**31 - 1, -1]
    )
    halves = np.array([0.5, 1.5, -2.5, 65504, np.inf], np.float16)
    got = to_ints()("s32_f16", halves.view(np.uint16)).view(np.int32)
    np.testing.assert_array_equal(got, [0, 2, -2, 65504, 2**31 - 1])
    np.testing.assert_array_equal(to_ints()("s32_ftz", np.array([1e-40, 1e-30], np.float32)), [0, 1])


def test_float_to_whole_float() -> None:
    finite = F32_VALUES[np.isfinite(F32_VALUES)]
    np.testing.assert_array_equal(to_ints()("whole_rni", finite), np.rint(finite))
    np.testing.assert_array_equal(to_ints()("whole_rmi", finite), np.floor(finite))
    np.testing.assert_array_equal(to_ints()("unit", finite), np.clip(finite, 0, 1))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("source", ["s32", "u32"])
def test_int_to_float(source: str, mode: str) -> None:
    bits = np.array(
        [0, 1, 2**24 + 1, 2**24 + 3, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 2**24 - 1, 123456789], np.uint32
    )
    numbers = bits.view(np.int32) if source == "s32" else bits
    wanted = [rounded(Fraction(n), F32, mode) for n in numbers.tolist()]
    np.testing.assert_array_equal(others()(f"f32_{mode}_{source}", bits), np.array(wanted, np.float32))


def test_long_int_to_float() -> None:
    bits = np.array([0, 2**63 - 1, 2**63, 2**64 - 1, 2**40 + 2**16 + 1, 2**55 + 2**31], np.uint64)
    signed = [rounded(Fraction(n), F32) for n in bits.view(np.int64).tolist()]
    np.testing.assert_array_equal(others()("f32_s64", bits), np.array(signed, np.float32))
    unsigned = [rounded(Fraction(n), F32) for n in bits.tolist()]
    np.testing.assert_array_equal(others()("f32_u64", bits), np.array(unsigned, np.float32))
    words = np.array([5, 2**31, 2**32 - 1, 70000, 2049], np.uint32)
    np.testing.assert_array_equal(others()("f64_s32", words), words.view(np.int32).astype(np.float64))
    halves = [rounded(Fraction(n), F16) for n in words.view(np.int32).tolist()]
    np.testing.assert_array_equal(others()("f16_s32", words).view(np.float16), np.array(halves, np.float16))


def test_every_f16_to_f32() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    np.testing.assert_array_equal(others()("f32_f16", bits), bits.view(np.float16).astype(np.float32))


def _f32_near_halves() -> Array:
    """Return the boundaries between neighbouring bf16 and f16 values, and values next to them."""
    rng = np.random.default_rng(0)
    bf16 = rng.integers(0, 65536, 500).astype(np.uint32) << 16
    f16 = rng.integers(0, 65536, 500).astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    parts = [bf16, bf16 + 0x8000, bf16 + 0x7FFF, bf16 + 0x8001, f16, f16 + 0x1000, f16 + 0xFFF, f16 + 0x1001]
    values = np.concatenate(parts).astype(np.uint32).view(np.float32)
    return np.concatenate([values[np.isfinite(values)], F32_VALUES])


@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_f32_to_halves(mode: str) -> None:
    values = _f32_near_halves()
    got = others()(f"f16_{mode}", values)
    np.testing.assert_array_equal(got.view(np.float16).astype(np.float64), np.array(_rounded(values, F16, mode)))
    as_f32 = (others()(f"bf16_{mode}", values).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(as_f32.astype(np.float64), np.array(_rounded(values, BF16, mode)))
    for half in ("f16", "bf16"):
        single = others()(f"{half}_{mode}", values)
        pairs = others()(f"{half}x2_{mode}", values, values[::-1].copy())
        np.testing.assert_array_equal(pairs >> 16, single)  # the first source is the upper half
        np.testing.assert_array_equal(pairs & 0xFFFF, single[::-1])


def test_nan_becomes_canonical() -> None:
    nan = np.array([0x7F800001, 0xFFC12345], np.uint32).view(np.float32)
    for name in ("f16_rn", "bf16_rn", "f16_rz", "bf16_rz"):
        np.testing.assert_array_equal(others()(name, nan), [0x7FFF, 0x7FFF])


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_f64_to_f32(mode: str) -> None:
    values = np.array(
        [0.1, -0.1, 1e300, -1e300, 1e-320, 3.4028235e38, 1 + 2.0**-24, 1 + 2.0**-24 + 2.0**-50, 2.0**-150]
    )
    np.testing.assert_array_equal(others()(f"f32_f64_{mode}", values).astype(np.float64), _rounded(values, F32, mode))


def test_remaining_floats() -> None:
    np.testing.assert_array_equal(others()("f64_f32", F32_VALUES), F32_VALUES.astype(np.float64))
    np.testing.assert_array_equal(
        others()("f16_relu", np.array([-1.0, 2.0], np.float32)).view(np.float16), np.array([0.0, 2.0], np.float16)
    )
    values = np.array([1 + 2.0**-11, 1 + 2.0**-12, -(1 + 2.0**-11)], np.float32)  # ties round away from zero
    np.testing.assert_array_equal(
        others()("tf32", values).view(np.float32), np.array([1 + 2.0**-10, 1, -(1 + 2.0**-10)])
    )


def test_int_to_int() -> None:
    words = np.array([0, 1, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x80000000, 0xFFFFFFFF], np.uint32)
    signed = words.view(np.int32)
    np.testing.assert_array_equal(others()("s64_s32", words).view(np.int64), signed)
    short = words.astype(np.uint16)
    np.testing.assert_array_equal(others()("u32_s16", short).view(np.int32), short.view(np.int16))
    np.testing.assert_array_equal(others()("s32_s8", words).view(np.int32), words.astype(np.int8))
    np.testing.assert_array_equal(others()("u16_u32", words), words.astype(np.uint16))
    np.testing.assert_array_equal(others()("sat_s8", words).view(np.int32), np.clip(signed, -128, 127))
    np.testing.assert_array_equal(others()("sat_u16", words), np.clip(signed, 0, 65535))


# ---- comparisons, selections, moves
def _setp(comparison: str, kind: str, register: str) -> Case:
    asm = f"{{ .reg .pred p; setp.{comparison}.{kind} p, %1, %2; selp.u32 %0, 1, 0, p; }}"
    return Case(f"{comparison}_{kind}", asm, "u32", (register, register))


@cache
def comparisons() -> Instructions:
    cases = [_setp(name, "s32", "u32") for name in ORDERED]
    cases += [_setp(name, "u32", "u32") for name in (*ORDERED, *UNSIGNED)]
    cases += [_setp(name, "f32", "f32") for name in (*ORDERED, *(f"{name}u" for name in ORDERED), "num", "nan")]
    cases += [_setp(name, "f16", "u16") for name in ("lt", "geu")]
    both = (
        "{ .reg .pred p, q, r; setp.gt.u32 r, %2, 2; setp.lt.and.s32 p|q, %1, %2, r; "
        "selp.u32 %0, 1, 0, p; @q add.u32 %0, %0, 2; }"
    )
    cases.append(Case("both", both, "u32", ("u32", "u32")))
    cases.append(Case("set_f32", "set.lt.f32.f32 %0, %1, %2;", "f32", ("f32", "f32")))
    cases.append(Case("set_u32", "set.ge.u32.s32 %0, %1, %2;", "u32", ("u32", "u32")))
    cases.append(Case("set_f16x2", "set.gt.f16x2.f16x2 %0, %1, %2;", "u32", ("u32", "u32")))
    pair = "{ .reg .pred p, q; setp.lt.f16x2 p|q, %1, %2; selp.u32 %0, 1, 0, p; @q add.u32 %0, %0, 2; }"
    cases.append(Case("pair", pair, "u32", ("u32", "u32")))
    cases.append(Case("slct", "slct.u32.s32 %0, %1, %2, %3;", "u32", ("u32", "u32", "u32")))
    cases.append(Case("pack", "{ .reg .b32 l, h; mov.b64 {l, h}, %1; mov.b64 %0, {h, l}; }", "u64", ("u64",)))
    halves = "{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, l}; }"
    cases.append(Case("halves", halves, "u32", ("u32",)))
    return Instructions(cases)


@pytest.mark.parametrize("name", [*ORDERED, *UNSIGNED])
def test_compare_ints(name: str) -> None:
    a, b = (x.reshape(-1) for x in np.meshgrid(*[np.array([0, 1, 5, 2**31 - 1, 2**31, 2**32 - 1], np.uint32)] * 2))
    if name in ORDERED:
        np.testing.assert_array_equal(
            comparisons()(f"{name}_s32", a, b), ORDERED[name](a.view(np.int32), b.view(np.int32))
        )
    np.testing.assert_array_equal(comparisons()(f"{name}_u32", a, b), (ORDERED | UNSIGNED)[name](a, b))


@pytest.mark.parametrize("name", ORDERED)
def test_compare_floats(name: str) -> None:
    a, b = (x.reshape(-1) for x in np.meshgrid(*[np.array([0.0, -0.0, 1.0, -2.0, np.inf, np.nan], np.float32)] * 2))
    nan = np.isnan(a) | np.isnan(b)
    np.testing.assert_array_equal(comparisons()(f"{name}_f32", a, b), ORDERED[name](a, b) & ~nan)
    np.testing.assert_array_equal(comparisons()(f"{name}u_f32", a, b), ORDERED[name](a, b) | nan)
    np.testing.assert_array_equal(comparisons()("nan_f32", a, b), nan)
    np.testing.assert_array_equal(comparisons()("num_f32", a, b), ~nan)


def test_compare_halves() -> None:
    a, b = (x.reshape(-1) for x in np.meshgrid(*[np.array([0.0, 1.0, -2.0, np.nan], np.float16)] * 2))
    np.testing.assert_array_equal(comparisons()("lt_f16", a.view(np.uint16), b.view(np.uint16)), a < b)
    np.testing.assert_array_equal(comparisons()("geu_f16", a.view(np.uint16), b.view(np.uint16)), ~(a < b))
    low, high = np.tile(a, 2), np.repeat(b, 2)
    x, y = (np.stack([low, high], 1).view(np.uint32)[:, 0], np.stack([high, low], 1).view(np.uint32)[:, 0])
    wanted = (low < high) + 2 * (high < low)
    np.testing.assert_array_equal(comparisons()("pair", x, y), wanted)
    ones = np.stack([low > high, high > low], 1).astype(np.float16)
    np.testing.assert_array_equal(comparisons()("set_f16x2", x, y).view(np.float16).reshape(-1, 2), ones)


def test_two_predicates_at_once() -> None:
    a, b = (x.reshape(-1).astype(np.uint32) for x in np.meshgrid(np.arange(6), np.arange(6)))
    wanted = ((a < b) & (b > 2)) + 2 * (~(a < b) & (b > 2))
    np.testing.assert_array_equal(comparisons()("both", a, b), wanted)


def test_set_and_select() -> None:
    a, b = (x.reshape(-1) for x in np.meshgrid(*[np.array([-1.0, 0.0, 2.0], np.float32)] * 2))
    np.testing.assert_array_equal(comparisons()("set_f32", a, b), (a < b).astype(np.float32))
    i, j = a.astype(np.int32), b.astype(np.int32)
    np.testing.assert_array_equal(comparisons()("set_u32", i, j), np.where(i >= j, 0xFFFFFFFF, 0))
    np.testing.assert_array_equal(comparisons()("slct", i, j, i), np.where(i >= 0, i, j).view(np.uint32))


def test_moves_of_parts() -> None:
    words = np.array([0x1122334455667788], np.uint64)
    assert comparisons()("pack", words)[0] == 0x5566778811223344
    assert comparisons()("halves", np.array([0x11223344], np.uint32))[0] == 0x33441122
