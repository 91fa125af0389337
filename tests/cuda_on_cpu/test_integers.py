"""Integer instructions compared with formulas in Python integers and numpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from tests.cuda_on_cpu.errors import KernelFault
from tests.cuda_on_cpu.kernels import Case, Instructions, Kernels

M32, M64 = 2**32 - 1, 2**64 - 1
EDGES = (
    *(0, 1, 2, 3, 7, 8, 31, 32, 33, 100, 0x7FFF, 0x8000, 0xFFFF, 0x12345678, 0x7FFFFFFF),
    *(0x80000000, 0xDEADBEEF, M32 - 1, M32),
)
EDGES_64 = (0, 1, 5, 0x7FFFFFFF, 0x80000000, M32, 0x123456789ABCDEF0, 2**63 - 1, 2**63, M64 - 1, M64)


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def clamp(value: int, low: int, high: int) -> int:
    return min(max(value, low), high)


def S(value: int) -> int:
    return signed(value, 32)


Formula = Callable[..., int]
# name: (instruction, inputs, formula on unsigned 32-bit values)
WORDS: dict[str, tuple[str, int, Formula]] = {
    "add": ("add.s32", 2, lambda a, b: a + b),
    "sub": ("sub.u32", 2, lambda a, b: a - b),
    "add_sat": ("add.sat.s32", 2, lambda a, b: clamp(S(a) + S(b), -(2**31), 2**31 - 1)),
    "sub_sat": ("sub.sat.s32", 2, lambda a, b: clamp(S(a) - S(b), -(2**31), 2**31 - 1)),
    "mul_lo": ("mul.lo.s32", 2, lambda a, b: a * b),
    "mul_hi_s": ("mul.hi.s32", 2, lambda a, b: S(a) * S(b) >> 32),
    "mul_hi_u": ("mul.hi.u32", 2, lambda a, b: a * b >> 32),
    "mad_lo": ("mad.lo.u32", 3, lambda a, b, c: a * b + c),
    "mad_hi": ("mad.hi.s32", 3, lambda a, b, c: (S(a) * S(b) >> 32) + c),
    "neg": ("neg.s32", 1, lambda a: -a),
    "abs": ("abs.s32", 1, lambda a: abs(S(a))),
    "min_s": ("min.s32", 2, lambda a, b: min(S(a), S(b))),
    "max_u": ("max.u32", 2, lambda a, b: max(a, b)),
    "sad_s": ("sad.s32", 3, lambda a, b, c: abs(S(a) - S(b)) + c),
    "sad_u": ("sad.u32", 3, lambda a, b, c: abs(a - b) + c),
    "and_": ("and.b32", 2, lambda a, b: a & b),
    "or_": ("or.b32", 2, lambda a, b: a | b),
    "xor_": ("xor.b32", 2, lambda a, b: a ^ b),
    "not_": ("not.b32", 1, lambda a: ~a),
    "cnot": ("cnot.b32", 1, lambda a: a == 0),
    "shl": ("shl.b32", 2, lambda a, n: a << n if n < 32 else 0),
    "shr_u": ("shr.u32", 2, lambda a, n: a >> n if n < 32 else 0),
    "shr_s": ("shr.s32", 2, lambda a, n: S(a) >> min(n, 31)),
    "shf_l_wrap": ("shf.l.wrap.b32", 3, lambda lo, hi, n: (hi << 32 | lo) << (n & 31) >> 32),
    "shf_r_wrap": ("shf.r.wrap.b32", 3, lambda lo, hi, n: (hi << 32 | lo) >> (n & 31)),
    "shf_l_clamp": ("shf.l.clamp.b32", 3, lambda lo, hi, n: (hi << 32 | lo) << min(n, 32) >> 32),
    "shf_r_clamp": ("shf.r.clamp.b32", 3, lambda lo, hi, n: (hi << 32 | lo) >> min(n, 32)),
    "popc": ("popc.b32", 1, lambda a: a.bit_count()),
    "clz": ("clz.b32", 1, lambda a: 32 - a.bit_length()),
    "bfind_u": ("bfind.u32", 1, lambda a: a.bit_length() - 1),
    "bfind_s": ("bfind.s32", 1, lambda a: (~S(a) if S(a) < 0 else a).bit_length() - 1),
    "bfind_shift": ("bfind.shiftamt.u32", 1, lambda a: 32 - a.bit_length() if a else -1),
    "brev": ("brev.b32", 1, lambda a: int(f"{a:032b}"[::-1], 2)),
}
DIVISIONS: dict[str, tuple[str, int, Formula]] = {
    "div_u": ("div.u32", 2, lambda a, b: a // b),
    "div_s": ("div.s32", 2, lambda a, b: quotient(S(a), S(b))),
    "rem_u": ("rem.u32", 2, lambda a, b: a % b),
    "rem_s": ("rem.s32", 2, lambda a, b: S(a) - S(b) * quotient(S(a), S(b))),
}


def dot(a: int, b: int, c: int, a_signed: bool, b_signed: bool, width: int = 8, at: int = 0) -> int:
    def pick(value: int, i: int, bits: int, is_signed: bool) -> int:
        part = value >> bits * i & (1 << bits) - 1
        return signed(part, bits) if is_signed else part

    n = 4 if width == 8 else 2
    return c + sum(pick(a, i, width, a_signed) * pick(b, i + at, 8, b_signed) for i in range(n))


for a_type, b_type in itertools.product("us", "us"):
    WORDS[f"dp4a_{a_type}{b_type}"] = (
        f"dp4a.{a_type}32.{b_type}32",
        3,
        lambda a, b, c, x=a_type == "s", y=b_type == "s": dot(a, b, c, x, y),
    )
    WORDS[f"dp2a_{a_type}{b_type}"] = (
        f"dp2a.hi.{a_type}32.{b_type}32",
        3,
        lambda a, b, c, x=a_type == "s", y=b_type == "s": dot(a, b, c, x, y, 16, 2),
    )

LONGS: dict[str, tuple[str, int, Formula]] = {
    "add_64": ("add.s64", 2, lambda a, b: a + b),
    "mul_lo_64": ("mul.lo.s64", 2, lambda a, b: a * b),
    "mul_hi_u64": ("mul.hi.u64", 2, lambda a, b: a * b >> 64),
    "mul_hi_s64": ("mul.hi.s64", 2, lambda a, b: signed(a, 64) * signed(b, 64) >> 64),
    "mad_64": ("mad.lo.s64", 3, lambda a, b, c: a * b + c),
    "min_s64": ("min.s64", 2, lambda a, b: min(signed(a, 64), signed(b, 64))),
    "brev_64": ("brev.b64", 1, lambda a: int(f"{a:064b}"[::-1], 2)),
    "xor_64": ("xor.b64", 2, lambda a, b: a ^ b),
}


def _case(name: str, asm: str, n: int, kind: str) -> Case:
    return Case(name, f"{asm} {', '.join(f'%{i}' for i in range(n + 1))};", kind, (kind,) * n)


@cache
def instructions() -> Instructions:
    cases = [_case(name, asm, n, "u32") for name, (asm, n, _) in (WORDS | DIVISIONS).items()]
    cases += [_case(name, asm, n, "u64") for name, (asm, n, _) in LONGS.items()]
    for sign, bits in itertools.product("us", (32, 64)):
        of_width = f"u{bits}"
        cases.append(
            Case(f"bfe_{sign}{bits}", f"bfe.{sign}{bits} %0, %1, %2, %3;", of_width, (of_width, "u32", "u32"))
        )
    for bits in (32, 64):
        of_width = f"u{bits}"
        asm = f"bfi.b{bits} %0, %1, %2, %3, %4;"
        cases.append(Case(f"bfi_{bits}", asm, of_width, (of_width, of_width, "u32", "u32")))
    cases.append(Case("mul_wide_s", "mul.wide.s32 %0, %1, %2;", "u64", ("u32", "u32")))
    cases.append(Case("mad_wide_u", "mad.wide.u32 %0, %1, %2, %3;", "u64", ("u32", "u32", "u64")))
    cases.append(Case("mul_wide_16", "mul.wide.s16 %0, %1, %2;", "u32", ("u16", "u16")))
    cases.append(Case("mul_lo_16", "mul.lo.u16 %0, %1, %2;", "u16", ("u16", "u16")))
    cases.append(Case("shl_64", "shl.b64 %0, %1, %2;", "u64", ("u64", "u32")))
    cases.append(Case("shr_s64", "shr.s64 %0, %1, %2;", "u64", ("u64", "u32")))
    cases.append(Case("shr_s16", "shr.s16 %0, %1, %2;", "u16", ("u16", "u32")))
    cases.append(Case("popc_64", "popc.b64 %0, %1;", "u32", ("u64",)))
    cases.append(Case("clz_64", "clz.b64 %0, %1;", "u32", ("u64",)))
    cases.append(Case("prmt", "prmt.b32 %0, %1, %2, %3;", "u32", ("u32", "u32", "u32")))
    return Instructions(cases)


def _check(name: str, formula: Formula, n: int, values: tuple[int, ...], bits: int) -> None:
    points = list(itertools.product(values, repeat=min(n, 2)))
    if n == 3:
        points = [(a, b, c) for (a, b), c in zip(points, itertools.cycle(values[:13]), strict=False)]
    kind = np.uint32 if bits == 32 else np.uint64
    inputs = [np.array([point[i] for point in points], kind) for i in range(n)]
    wanted = np.array([formula(*point) & ((1 << bits) - 1) for point in points], kind)
    np.testing.assert_array_equal(instructions()(name, *inputs), wanted)


@pytest.mark.parametrize("name", WORDS)
def test_words(name: str) -> None:
    _check(name, WORDS[name][2], WORDS[name][1], EDGES, 32)


@pytest.mark.parametrize("name", DIVISIONS)
def test_divisions(name: str) -> None:
    _check(name, DIVISIONS[name][2], 2, EDGES[1:], 32)


@pytest.mark.parametrize("name", LONGS)
def test_longs(name: str) -> None:
    _check(name, LONGS[name][2], LONGS[name][1], EDGES_64, 64)


def test_wide_products() -> None:
    a, b = (np.array(x, np.uint32) for x in zip(*itertools.product(EDGES, EDGES), strict=True))
    wide = a.astype(np.int32).astype(np.int64) * b.astype(np.int32)
    np.testing.assert_array_equal(instructions()("mul_wide_s", a, b).view(np.int64), wide)
    c = np.arange(a.size, dtype=np.uint64) * np.uint64(0x123456789)
    np.testing.assert_array_equal(instructions()("mad_wide_u", a, b, c), a.astype(np.uint64) * b + c)
    h, k = a.astype(np.uint16), b.astype(np.uint16)
    products = h.view(np.int16).astype(np.int32) * k.view(np.int16)
    np.testing.assert_array_equal(instructions()("mul_wide_16", h, k).view(np.int32), products)
    np.testing.assert_array_equal(instructions()("mul_lo_16", h, k), h * k)


def test_long_shifts_and_counts() -> None:
    value = np.repeat(np.array(EDGES_64, np.uint64), 80)
    count = np.tile(np.arange(80, dtype=np.uint32), len(EDGES_64))
    left = [v << n & M64 for v, n in zip(value.tolist(), count.tolist(), strict=True)]
    np.testing.assert_array_equal(instructions()("shl_64", value, count), np.array(left, np.uint64))
    right = [signed(v, 64) >> min(n, 63) for v, n in zip(value.tolist(), count.tolist(), strict=True)]
    np.testing.assert_array_equal(instructions()("shr_s64", value, count).view(np.int64), np.array(right, np.int64))
    short = value.astype(np.uint16)
    right = [signed(v, 16) >> min(n, 15) for v, n in zip(short.tolist(), count.tolist(), strict=True)]
    np.testing.assert_array_equal(instructions()("shr_s16", short, count).view(np.int16), np.array(right, np.int16))
    np.testing.assert_array_equal(instructions()("popc_64", value), [v.bit_count() for v in value.tolist()])
    np.testing.assert_array_equal(instructions()("clz_64", value), [64 - v.bit_length() for v in value.tolist()])


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("sign", ["u", "s"])
def test_bit_field_extract(sign: str, bits: int) -> None:
    values = (0, (1 << bits) - 1, 0x12345678DEADBEEF & ((1 << bits) - 1), 1 << (bits - 1))
    spots = (0, 1, 5, bits // 2, bits - 1, bits, 100, 255)
    points = list(itertools.product(values, spots, spots))

    def formula(value: int, position: int, length: int) -> int:
        # PTX ISA, bfe: bits outside the field or the register equal the sign, which is 0 for length 0
        top = bits - 1
        sign_bit = value >> min(position + length - 1, top) & 1 if sign == "s" and length else 0
        field = [value >> (position + i) & 1 if i < length and position + i <= top else sign_bit for i in range(bits)]
        return sum(bit << i for i, bit in enumerate(field))

    kind = np.dtype(f"u{bits // 8}")
    values_in, positions, lengths = zip(*points, strict=True)
    value, position, length = np.array(values_in, kind), np.array(positions, np.uint32), np.array(lengths, np.uint32)
    wanted = np.array([formula(*point) for point in points], kind)
    np.testing.assert_array_equal(instructions()(f"bfe_{sign}{bits}", value, position, length), wanted)


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_field_insert(bits: int) -> None:
    ones = (1 << bits) - 1
    spots = (0, 1, 5, bits // 2, bits - 1, bits, 100, 255)
    points = list(itertools.product((0, ones, 0x12345678DEADBEEF & ones), (0, ones), spots, spots))

    def formula(new: int, old: int, position: int, length: int) -> int:
        for i in range(length):
            if position + i < bits:
                old = old & ~(1 << position + i) | (new >> i & 1) << position + i
        return old

    kinds = (f"u{bits // 8}", f"u{bits // 8}", "u4", "u4")
    arrays = [np.array(x, kind) for x, kind in zip(zip(*points, strict=True), kinds, strict=True)]
    wanted = np.array([formula(*point) for point in points], kinds[0])
    np.testing.assert_array_equal(instructions()(f"bfi_{bits}", *arrays), wanted)


def test_every_byte_permutation() -> None:
    selector = np.arange(65536, dtype=np.uint32)
    a, b = np.uint32(0x8305FE01), np.uint32(0x7F90A144)
    source = np.frombuffer(a.tobytes() + b.tobytes(), np.uint8)
    nibbles = selector[:, None] >> np.array([0, 4, 8, 12], np.uint32) & 15
    picked = source[nibbles & 7]
    signs = np.where(picked & 128, 255, 0).astype(np.uint8)
    wanted = np.where(nibbles & 8, signs, picked).astype(np.uint8)
    got = instructions()("prmt", np.full_like(selector, a), np.full_like(selector, b), selector)
    np.testing.assert_array_equal(got.view(np.uint8).reshape(-1, 4), wanted)


def test_every_lop3_table() -> None:
    """The result is the truth table if the inputs count through its rows."""
    lines = "\n".join(
        f'asm volatile("lop3.b32 %0, %1, %2, %3, {table};" : "=r"(r) : "r"(a), "r"(b), "r"(c)); out[{table}] = r;'
        for table in range(256)
    )
    head = 'extern "C" __global__ void lop3(unsigned a, unsigned b, unsigned c, unsigned* out)'
    source = f"{head} {{ unsigned r; {lines} }}"
    out = np.zeros(256, np.uint32)
    Kernels.of(source).run("lop3", 1, 1, np.uint32(0xF0), np.uint32(0xCC), np.uint32(0xAA), out)
    np.testing.assert_array_equal(out & 255, np.arange(256))


def test_division_by_zero_is_a_fault() -> None:
    with pytest.raises(KernelFault, match="division by zero"):
        instructions()("div_s", np.array([1], np.uint32), np.array([0], np.uint32))
