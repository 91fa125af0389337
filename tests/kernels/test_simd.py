"""Operations that differ between instruction sets: products of bytes, tables, bytes of words, float16.

Other code is the same for all instruction sets, and is tested on the best one.  If this processor lacks VNNI, the
tests replace its instruction by an equivalent sequence.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llvmlite import ir
from numpy.typing import NDArray

from localllm.kernels.cpu import dots
from localllm.kernels.cpu.codes import (
    high_number,
    low_number,
    lut_op,
    signed_byte_pair,
    signed_byte_twice,
    subtract_from_bytes,
    unsigned_byte,
    unsigned_byte_pair,
    unsigned_byte_twice,
)
from localllm.kernels.cpu.compiler import Kernel, addresses, kernel, variant
from localllm.kernels.cpu.dots import (
    dot32_s8,
    dot32_s16,
    dot32_u4,
    dot32_u5,
    dot32_u6,
    multiply_pairs,
    record_dot16_s8,
    record_dot32_s8,
    record_dot32_u4,
    record_dot32_u5,
    scaled_dot16_u2,
    scaled_dot16_u3,
    scaled_dot16_u6,
    scaled_dot32_u4,
    scaled_dot32_u5,
)
from localllm.kernels.cpu.elementwise import exp, softplus, tanh
from localllm.kernels.cpu.instructions import intrinsic
from localllm.kernels.cpu.simd import (
    load_f16x16,
    load_f32,
    load_f32x16,
    load_i8x64,
    load_i32x16,
    load_splat_i32,
    splat,
    store_f16,
    store_f32x16,
    store_i8x64,
    sum_lanes,
    sum_lanes_of_4,
    sum_lanes_of_16,
    to_float,
    zero_i32x16,
)
from localllm.kernels.cpu.target import Target, available
from localllm.kernels.cpu.templates import static_range

RNG = np.random.default_rng(0)


def emulated_vnni(b: Any, name: str, result: ir.Type, *values: Any) -> Any:
    """Like `intrinsic`, for instructions that sum products of unsigned and signed bytes, and of words."""
    if "vpdp" not in name:
        return intrinsic(b, name, result, *values)
    total, first, second = values
    lanes, n = result.count, first.type.count
    wide = ir.VectorType(ir.IntType(32), n)
    products = b.mul(b.zext(first, wide) if "busd" in name else b.sext(first, wide), b.sext(second, wide))
    for i in range(n // lanes):
        places = ir.Constant(ir.VectorType(ir.IntType(32), lanes), list(range(i, n, n // lanes)))
        total = b.add(total, b.shuffle_vector(products, products, places))
    return total


def targets() -> Iterator[Any]:
    """Targets of this machine, and both kinds of VNNI if the machine has only their vectors."""
    best = available()[0]
    for target in available():
        yield pytest.param(target, id=target.name)
    for dot in ("vnni512", "vnni256") if best.wide else ("vnni256",):
        if best.family == "x86_64" and dot not in {target.dot for target in available()}:
            yield pytest.param(replace(best, name=f"emulated-{dot}", dot=dot), id=f"emulated-{dot}")


@pytest.fixture(params=targets())
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    chosen: Target = request.param
    if chosen.name.startswith("emulated"):
        monkeypatch.setattr(dots, "intrinsic", emulated_vnni)
    return chosen


def call(kernel: Kernel, target: Target, n: int, *arrays: NDArray[Any]) -> None:
    """Run units 0 … n - 1 of a kernel whose arguments are addresses."""
    code = variant(kernel, target)
    arguments = np.array([a.ctypes.data for a in arrays], np.int64)
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(addresses([code])[code])(arguments.ctypes.data, 0, n)


# -- Products of bytes ---------------------------------------------------------------------------------------------

#: Bits of codes, in the order of the arrays that the kernel takes; codes of eight bits are signed.
WIDTHS = (2, 3, 4, 5, 6, 8)
N_RESULTS = 14


@kernel
def all_products(begin, end, x, records, sums_x, codes, first, second, offsets, units, pairs, sums, out):
    """Multiply ``codes`` int8 [units, 6, 8, 64] by ``x`` int8 [units, 32], with ``sums`` [units, 16] to add.

    records: x in the layout of `kernels.cpu.tiles`.  sums_x: sums of the first 16 and of all 32 values of x; the
    last word holds both halves as 16-bit numbers.  first, second: scales int16 [units, 16, 2], each number twice.
    offsets: int16 [units, 2, 16, 2], pairs of scales times 4 and times 32.  units: float32 [units, 16].
    pairs: int16 [units, 2, 16, 2].  out: float32 [units, N_RESULTS, 16].
    """
    for unit in range(begin, end):
        row, record = x + 32 * unit, records + 64 * unit
        place, w2 = out + N_RESULTS * 64 * unit, codes + 6 * 512 * unit
        start, f, s = load_i32x16(sums + 64 * unit), load_i32x16(first + 64 * unit), load_i32x16(second + 64 * unit)
        sum_first, sum_all = load_splat_i32(sums_x + 12 * unit), load_splat_i32(sums_x + 12 * unit + 4)
        d, less, halves = load_f32x16(units + 64 * unit), offsets + 128 * unit, sums_x + (12 * unit + 8)
        for v in static_range(8):
            w[v] = load_i8x64(w2 + 64 * v)
        store_f32x16(place, scaled_dot16_u2(d, f, s, *w[0:8], record))
        for v in static_range(8):
            w[v] = load_i8x64(w2 + (512 + 64 * v))
        store_f32x16(place + 64, scaled_dot16_u3(d, f, s, *w[0:8], record, load_i32x16(less), halves))
        for v in static_range(8):
            w[v] = load_i8x64(w2 + (1024 + 64 * v))
        store_f32x16(place + 128, to_float(dot32_u4(start, *w[0:8], row)))
        store_f32x16(place + 704, to_float(record_dot32_u4(start, *w[0:8], record)))
        store_f32x16(place + 192, scaled_dot32_u4(d, f, *w[0:8], record))
        for v in static_range(8):
            w[v] = load_i8x64(w2 + (1536 + 64 * v))
        store_f32x16(place + 256, to_float(dot32_u5(start, *w[0:8], row)))
        store_f32x16(place + 768, to_float(record_dot32_u5(start, *w[0:8], record)))
        store_f32x16(place + 320, scaled_dot32_u5(d, f, *w[0:8], record))
        for v in static_range(8):
            w[v] = load_i8x64(w2 + (2048 + 64 * v))
        store_f32x16(place + 384, to_float(dot32_u6(start, *w[0:8], row)))
        store_f32x16(place + 448, scaled_dot16_u6(d, f, s, *w[0:8], record, load_i32x16(less + 64), halves))
        for v in static_range(8):
            w[v] = load_i8x64(w2 + (2560 + 64 * v))
        store_f32x16(place + 512, to_float(dot32_s8(start, *w[0:8], row, sum_all)))
        store_f32x16(place + 576, to_float(record_dot16_s8(start, *w[0:4], record, sum_first)))
        store_f32x16(place + 832, to_float(record_dot32_s8(start, *w[0:8], record, sum_all)))
        numbers = multiply_pairs(load_i32x16(pairs + 128 * unit), load_i32x16(pairs + 128 * unit + 64))
        store_f32x16(place + 640, to_float(numbers))


def test_products_of_bytes(target: Target) -> None:
    """Random products, and the largest ones with equal and alternating signs, which must not saturate."""
    n = 12
    codes = np.stack([RNG.integers(-128 if bits == 8 else 0, 1 << min(bits, 7), (n, 8, 64)) for bits in WIDTHS], 1)
    x, scales = RNG.integers(-127, 128, (n, 32)), RNG.integers(-128, 128, (2, n, 16))
    codes[1:9] = np.array([128 if bits == 8 else 1 << bits for bits in WIDTHS])[:, None, None] - 1
    codes[5:9, -1] = -128
    x[1::4], x[2::4] = 127, -127
    x[3::4] = np.where(np.arange(32) % 2, 127, -127)
    x[4::4] = np.where(np.arange(32) % 3, 127, -127)
    sum_first, sum_second = x[:, :16].sum(1), x[:, 16:].sum(1)
    sums_x = np.stack([sum_first, x.sum(1), (sum_first & 0xFFFF) | (sum_second << 16)], 1)
    offsets = np.stack(scales, -1)[:, None] * np.array([4, 32])[:, None, None]
    units = RNG.uniform(0.001, 1, (n, 16)).astype(np.float16)
    sums, out = RNG.integers(-1000, 1000, (n, 16)), np.zeros((n, N_RESULTS, 16), np.float32)
    pairs = RNG.integers(-2000, 2000, (n, 2, 16, 2))
    kinds = [np.int8, np.int8, np.int32, np.int8, *[np.int16] * 3, np.float32, np.int16, np.int32]
    step = 16 if target.dot == "smmla" else 8  # bytes between groups of eight columns of a record
    records = np.zeros((n, 64))
    records[:, np.arange(32) // 8 * step + np.arange(32) % 8] = x
    given = [x, records, sums_x, codes, *np.repeat(scales[..., None], 2, 3), offsets, units, pairs, sums]
    call(all_products, target, n, *(a.astype(kind) for a, kind in zip(given, kinds, strict=True)), out)

    rows = codes.reshape(n, 6, 8, 16, 4).transpose(1, 0, 3, 2, 4).reshape(6, n, 16, 32)
    low, high = (np.einsum("bnrc,nc->bnr", rows[..., half], x[:, half]) for half in (slice(16), slice(16, 32)))
    (_, _, u4, u5, u6, s8), (f, s) = low + high, scales
    for place, product in {2: u4, 4: u5, 6: u6, 8: s8, 9: low[5], 11: u4, 12: u5, 13: s8}.items():
        np.testing.assert_array_equal(out[:, place], sums + product)
    np.testing.assert_array_equal(out[:, 10], pairs.prod(1).sum(-1))
    scaled = {3: f * u4, 5: f * u5}
    for place, i, offset in ((0, 0, 0), (1, 1, 4), (7, 4, 32)):
        less_low, less_high = (offset * sum_x[:, None] for sum_x in (sum_first, sum_second))
        scaled[place] = f * (low[i] - less_low) + s * (high[i] - less_high)
    for place, product in scaled.items():
        np.testing.assert_allclose(out[:, place], units.astype(np.float64) * product, rtol=2**-22, atol=2)


@kernel
def products_of_int16(begin, end, rows, x, out):
    """rows: int16 [n, 16, 16, 2].  x: int16 [n, 32].  out: float32 [n, 16]."""
    for i in range(begin, end):
        for v in static_range(16):
            w[v] = load_i8x64(rows + 1024 * i + 64 * v)
        store_f32x16(out + 64 * i, to_float(dot32_s16(*w[0:16], x + 64 * i)))


def test_products_of_int16(target: Target) -> None:
    """Random products, and the largest ones, whose sum fits 32 bits."""
    n = 8
    rows, x = RNG.integers(-8191, 8192, (n, 16, 16, 2)), RNG.integers(-8191, 8192, (n, 32))
    rows[:2], x[0], x[1] = 8191, 8191, -8191
    out = np.zeros((n, 16), np.float32)
    call(products_of_int16, target, n, rows.astype(np.int16), x.astype(np.int16), out)
    expected = np.einsum("nvrc,nvc->nr", rows, x.reshape(n, 16, 2))
    np.testing.assert_array_equal(out, expected.astype(np.float32))


# -- Codes ---------------------------------------------------------------------------------------------------------

TABLE = (-128, 127, -7, 1, 9, 0, 43, -44, 60, -61, 5, -5, 100, -101, 17, -18)
look_up = lut_op(TABLE)


@kernel
def all_codes(begin, end, x, words, out, numbers):
    """out: int8 [64].  numbers: float32 [10, 16]."""
    store_i8x64(out, look_up(load_i8x64(x)))
    w = load_i32x16(words)
    store_f32x16(numbers, to_float(unsigned_byte(w, 2)))
    store_f32x16(numbers + 64, to_float(low_number(unsigned_byte_twice(w, 1))))
    store_f32x16(numbers + 128, to_float(high_number(unsigned_byte_twice(w, 1))))
    store_f32x16(numbers + 192, to_float(low_number(signed_byte_twice(w, 3))))
    store_f32x16(numbers + 256, to_float(high_number(signed_byte_twice(w, 3))))
    store_f32x16(numbers + 320, to_float(low_number(unsigned_byte_pair(w, 2))))
    store_f32x16(numbers + 384, to_float(high_number(unsigned_byte_pair(w, 2))))
    store_f32x16(numbers + 448, to_float(low_number(signed_byte_pair(w, 0, 5))))
    store_f32x16(numbers + 512, to_float(high_number(signed_byte_pair(w, 0, 5))))
    store_f32x16(numbers + 576, to_float(subtract_from_bytes(w, 32) + zero_i32x16()))


def test_tables_and_bytes_of_words(target: Target) -> None:
    x = RNG.permutation(np.repeat(np.arange(16), 4)).astype(np.int8)
    words = RNG.integers(-(1 << 23), 1 << 23, 16).astype(np.int32)
    out, numbers = np.zeros(64, np.int8), np.zeros((10, 16), np.float32)
    call(all_codes, target, 1, x, words, out, numbers)
    np.testing.assert_array_equal(out, np.array(TABLE)[x])
    unsigned, signed = (words.view(kind).reshape(16, 4).T.astype(int) for kind in (np.uint8, np.int8))
    less = (words.view(np.uint8) - np.uint8(32)).view(np.int32).astype(np.float32)
    expected = [unsigned[2], unsigned[1], unsigned[1], signed[3], signed[3], unsigned[2], unsigned[3]]
    np.testing.assert_array_equal(numbers, [*expected, 32 * signed[0], 32 * signed[1], less])


# -- Floats --------------------------------------------------------------------------------------------------------


@kernel
def all_floats(begin, end, halves, wide, x, narrow, powers, tangents, logarithms):
    """wide: ``halves`` as float32.  The other outputs: ``x`` as float16, exp, tanh and softplus of ``x``."""
    for i in range(16 * begin, 16 * end, 16):
        store_f32x16(wide + 4 * i, load_f16x16(halves + 2 * i))
        v = load_f32x16(x + 4 * i)
        store_f32x16(powers + 4 * i, exp(v))
        store_f32x16(tangents + 4 * i, tanh(v))
        store_f32x16(logarithms + 4 * i, softplus(v))
        for j in range(i, i + 16):
            store_f16(narrow + 2 * j, load_f32(x + 4 * j))


def test_halves_and_exponentials(target: Target) -> None:
    """Widen all float16 values, and round floats of all magnitudes, including ties.

    exp is within 2 units in the last place, tanh within 3, and softplus within 4.
    """
    n = 1 << 16
    halves = np.arange(n, dtype=np.uint16).view(np.float16)
    with np.errstate(invalid="ignore"):  # some values are NaN, which Arm reports
        bits = halves[: n // 2].astype(np.float32).view(np.int32)
    bits[: n // 4] += 1 << 12  # ties, except for subnormals
    x = np.concatenate([bits.view(np.float32), RNG.standard_normal(n // 2, np.float32) * 20])
    x[1::2] = np.copysign(x[1::2], np.float32(-1))
    x[-4:] = 65519, 65520, 1e30, -np.inf
    wide, powers, tangents, logarithms = (np.zeros(n, np.float32) for _ in range(4))
    narrow = np.zeros(n, np.float16)
    call(all_floats, target, n // 16, halves, wide, x, narrow, powers, tangents, logarithms)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(wide, halves.astype(np.float32))
        np.testing.assert_array_equal(narrow, np.clip(x, -65504, 65504).astype(np.float16))
        inside = np.abs(x) < 87
        exact = x[inside].astype(np.float64)
        np.testing.assert_allclose(powers[inside], np.exp(exact), rtol=2 * 2.0**-23)
        np.testing.assert_allclose(tangents[inside], np.tanh(exact), rtol=3 * 2.0**-23, atol=1e-37)
        assert powers[x < -90].max() == 0
        np.testing.assert_allclose(logarithms[inside], np.logaddexp(exact, 0), rtol=4 * 2.0**-23, atol=1e-37)
        finite = np.isfinite(x)
        np.testing.assert_array_equal(logarithms[finite & (x > 20)], x[finite & (x > 20)])
    odd = np.resize(np.array([np.nan, np.inf, 1.0], np.float32), 16)
    call(all_floats, target, 1, halves, wide, odd, narrow, powers, tangents, logarithms)
    np.testing.assert_array_equal(logarithms[:2], [np.nan, np.inf])


@kernel
def sums_in_order(begin, end, x, out):
    """Sum 16 vectors of sixteen lanes: all, the first four, those four times over, and the first."""
    for i in static_range(16):
        row[i] = load_f32x16(x + 64 * i)
    store_f32x16(out, sum_lanes_of_16(*row[0:16]))
    store_f32x16(out + 64, sum_lanes_of_4(*row[0:4]))
    store_f32x16(out + 128, splat(sum_lanes(row[0])))


def test_lanes_are_summed_in_the_same_order_on_every_target(target: Target) -> None:
    x = (10.0 ** np.arange(16) * np.where(np.arange(16) % 3, 1, -1)).astype(np.float32)
    vectors = RNG.permuted(np.tile(x, (16, 1)), axis=1)
    out, expected = np.zeros((3, 16), np.float32), vectors
    call(sums_in_order, target, 1, vectors, out)
    while expected.shape[1] > 1:
        expected = np.add(*np.split(expected, 2, axis=1))
    np.testing.assert_array_equal(out, [expected[:, 0], np.tile(expected[:4, 0], 4), expected[:1, 0].repeat(16)])
