"""Integer dot products in kernels: codes of weights times activations of eight bits."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir

from localllm.kernels.cpu.codes import high_number, low_number
from localllm.kernels.cpu.instructions import *
from localllm.kernels.cpu.simd import fma
from localllm.kernels.cpu.templates import Device

#: Bytes of a token's record of activations in 32 columns: see `tiles`.
RECORD = 48

#: Operations on a token's record of activations and 16 rows, and for each the operations on the records of 2 or 4
#: tokens, by the number of tokens: they take 8 or 4 rows.  Of 4 tokens, lanes 4 i … 4 i + 3 of all vectors belong to
#: token i; where matrices of bytes are multiplied, lanes 0 … 3 belong to two rows of tokens 0 and 1 in turn, lanes
#: 4 … 7 to the other rows, and so on.
OF_TOKENS: dict[Any, dict[int, Any]] = {}


class SeveralTokens(Device):
    """A device function for the records of ``n`` tokens instead of one; see `OF_TOKENS`."""

    def __init__(self, function: Callable[..., Any], n: int) -> None:
        super().__init__(function)
        self.n = n

    def specialise(self, constants: Mapping[str, Any]) -> tuple[ast.FunctionDef, dict[str, Any]]:
        tree, scope = super().specialise(constants)
        several = {k: OF_TOKENS[v][self.n] for k, v in scope.items() if callable(v) and v in OF_TOKENS}
        return tree, scope | several


def _record_op(name: str, result: Kind, *arguments: Kind) -> Callable[[Callable[..., Any]], Any]:
    """Make the operations of `OF_TOKENS` from ``emit(b, tokens, *values)``."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def of(tokens: int, name: str) -> Any:
            def operation(b: Any, *values: Any) -> Any:
                return emit(b, tokens, *values)

            operation.__name__ = name
            return op(result, *arguments)(operation)

        one = of(1, name)
        OF_TOKENS[one] = {n: of(n, f"{name}_of_{n}") for n in (2, 4)}
        return one

    return decorate


def multiplies_matrices() -> bool:
    """Whether one instruction multiplies two rows of eight bytes with two others: records are interleaved for it."""
    return dot_kind() == "smmla"


def _at(b: Any, address: Any, offset: int) -> Any:
    return b.add(address, ir.Constant(i64, offset)) if offset else address


def _column(n: int) -> int:
    """Where a record has the activation of column n."""
    return n // 8 * 16 + n % 8 if multiplies_matrices() else n


def _scale_offset() -> int:
    return 64 if multiplies_matrices() else 32


def _sums_offset() -> int:
    return 80 if multiplies_matrices() else 40


@op(intp, intp)
def token_place(b, i):
    """From the records of a tile of activations to that of token i, in bytes."""
    if not multiplies_matrices():
        return b.mul(i, ir.Constant(i64, RECORD))
    pair = b.mul(b.lshr(i, ir.Constant(i64, 1)), ir.Constant(i64, 2 * RECORD))
    return b.add(pair, b.shl(b.and_(i, ir.Constant(i64, 1)), ir.Constant(i64, 3)))


@op(intp, intp)
def scale_place(b, record):
    """Where a record has its scale, and behind it the sum of its codes, as floats."""
    return _at(b, record, _scale_offset())


@op(intp, intp)
def sums_place(b, record):
    """Where a record has the sums of both halves of its codes, as 16-bit numbers."""
    return _at(b, record, _sums_offset())


@op(intp, intp)
def second_half(b, record):
    """Where a record has its codes from column 16 on."""
    return _at(b, record, _column(16))


def _lanes(b: Any, x: Any, lanes: Sequence[int]) -> Any:
    return b.shuffle_vector(x, x, ir.Constant(ir.VectorType(i32, len(lanes)), lanes))


def _spread(b: Any, tokens: int, address: Any, kind: Any, lane: int = 0) -> Any:
    """A number of the eight bytes at an address in each token's record, in all of its lanes.

    kind: f32 or i32.  lane: which of the two.
    """
    if tokens > 1 and multiplies_matrices():
        both = [load(b, _at(b, address, 2 * RECORD * p), ir.VectorType(kind, 4)) for p in range(tokens // 2)]
        return join(b, [_lanes(b, x, [lane, lane + 2] * 2) for x in both for _ in range(2)])
    if tokens > 1 and kind is f32:  # floats of all lanes are read at once, and taken from there
        eights = [load(b, _at(b, address, RECORD * i), ir.VectorType(f32, 2)) for i in range(tokens)]
        return join(b, [_lanes(b, x, [lane] * (16 // tokens)) for x in eights])
    loaded = [load(b, _at(b, address, RECORD * i + 4 * lane), kind) for i in range(tokens)]
    return join(b, [broadcast(b, x, 16 // tokens) for x in loaded])


@_record_op("load_unit", f32x16, intp)
def load_unit(b, tokens, x):
    """The scale of the activations in the record at x."""
    return _spread(b, tokens, _at(b, x, _scale_offset()), f32, 0)


@_record_op("load_sum", f32x16, intp)
def load_sum(b, tokens, x):
    """The sum of the activations in the record at x."""
    return _spread(b, tokens, _at(b, x, _scale_offset()), f32, 1)


@_record_op("load_sums", i32x16, intp)
def load_sums(b, tokens, x):
    """Both halves' sums of the activations in the record at x, as 16-bit numbers."""
    return _spread(b, tokens, _at(b, x, _sums_offset()), i32, 0)


def _interleaved(b: Any, x: Any, y: Any) -> list[Any]:
    """Lanes 0 of both vectors of four, lanes 1, and so on, in two vectors."""
    lanes = [[0, 4, 1, 5], [2, 6, 3, 7]]
    return [b.shuffle_vector(x, y, ir.Constant(ir.VectorType(i32, 4), each)) for each in lanes]


@op(f32x16, intp, literal, literal)
def load_parts(b, address, step, n):
    """Return the floats of 16 / n rows for n tokens, ``step`` bytes apart: see `OF_TOKENS`.

    If the step is 0, all tokens have the same.
    """
    kind = ir.VectorType(f32, 16 // n)
    parts = [load(b, _at(b, address, step * i), kind) for i in range(n)] if step else [load(b, address, kind)] * n
    if multiplies_matrices():
        parts = [*_interleaved(b, *parts[:2]), *_interleaved(b, *parts[2:])]
    return join(b, parts)


@op(void, intp, literal, literal, f32x16)
def store_parts(b, address, step, n, value):
    """Write what `load_parts` reads."""
    parts = halves(b, value, n)
    if multiplies_matrices():
        pairs = [join(b, parts[:2]), join(b, parts[2:])]
        parts = [_lanes(b, pair, list(range(token, 8, 2))) for pair in pairs for token in range(2)]
    for i, part in enumerate(parts):
        store(b, _at(b, address, step * i), part)


@op(void, intp, i8x64, i8x64, literal)
def store_two_of_slab(b, address, first, second, offset):
    """Writes two vectors of codes, less an offset, to a slab, as products of four tokens take them.

    Where matrices of bytes are multiplied, words of both are interleaved, those of each four rows in two vectors.
    """
    if offset:
        first, second = (b.sub(codes, constant(offset, i8, 64)) for codes in (first, second))
    if multiplies_matrices():
        fours = zip(*(halves(b, b.bitcast(codes, i32x16.llvm), 4) for codes in (first, second)), strict=True)
        first, second = (join(b, list(pieces)) for pieces in zip(*(_interleaved(b, *x) for x in fours), strict=True))
    store(b, address, first)
    store(b, _at(b, address, 64), second)


@op(i8x64, intp, literal, literal)
def load_of_slab(b, address, v, offset):
    """Vector 0 or 1 of the two that `store_two_of_slab` wrote."""
    codes = load(b, _at(b, address, 64 * v), i8x64.llvm)
    if multiplies_matrices():
        both = [halves(b, load(b, _at(b, address, 64 * i), i32x16.llvm), 4) for i in range(2)]
        fours = [_lanes(b, join(b, list(pieces)), list(range(v, 8, 2))) for pieces in zip(*both, strict=True)]
        codes = b.bitcast(join(b, fours), i8x64.llvm)
    return b.add(codes, constant(offset, i8, 64)) if offset else codes


@op(i8x64, intp, literal)
def load_part_of_codes(b, address, n):
    """Return the codes of 16 / n rows, n times."""
    return join(b, [load(b, address, ir.VectorType(i8, 64 // n))] * n)


@op(void, intp, f32x16, f32x16)
def store_activations(b, record, first, second):
    """32 numbers in -128 … 127 to a record, rounded to the nearest integers (ties to even)."""
    for i, value in enumerate([first, second]):
        codes = b.fptosi(intrinsic(b, "llvm.rint.v16f32", f32x16.llvm, value), ir.VectorType(i8, 16))
        for k, eight in enumerate(halves(b, codes, 2)):
            store(b, _at(b, record, _column(16 * i + 8 * k)), eight)


@op(f32x16, intp, literal)
def load_activations(b, record, half):
    """The first sixteen codes of a record, or the second."""
    eights = [load(b, _at(b, record, _column(16 * half + 8 * k)), ir.VectorType(i8, 8)) for k in range(2)]
    return b.sitofp(join(b, eights), f32x16.llvm)


def dot_op(name: str, n_vectors: int, bits: int, *, of_record: bool = False) -> Any:
    """A dot product over ``4 * n_vectors`` columns of sixteen rows.

    The function is ``(sums i32x16, w_0 … w_{n-1} i8x64, x) -> i32x16``: lane r of the result is sums[r] plus the
    products of row r's codes with the int8 activations at address x, in a record or one behind the other.  Byte
    4 r + c of w_v is row r's code in column 4 v + c.  Activations lie in -127 … 127.

    With ``bits`` below 8 the codes are unsigned numbers of so many bits, else signed bytes.  Then the function takes
    one more argument, an i32x16 with the sum of the activations in every lane: what processors need that multiply
    bytes only if one of them is unsigned.
    """

    def emit(b: Any, tokens: int, sums: Any, *values: Any) -> Any:
        sum_x = values[-1] if bits == 8 else None
        return _dot(b, tokens, sums, values[:n_vectors], values[n_vectors], bits, sum_x, of_record)

    return _record_op(name, i32x16, i32x16, *[i8x64] * n_vectors, intp, *[i32x16] * (bits == 8))(emit)


def _dot(
    b: Any, tokens: int, sums: Any, weights: Sequence[Any], x: Any, bits: int, sum_x: Any, of_record: bool
) -> Any:
    if tokens > 1 and multiplies_matrices():
        return _dot_of_matrices(b, tokens, sums, weights, x)
    return _DOTS[dot_kind()](b, sums, _with_activations(b, tokens, weights, x, of_record), bits, sum_x)


def scaled_dot_op(name: str, n_scales: int, bits: int, offset: int = 0) -> Any:
    """Dot products with a record of activations, over 32 columns or twice sixteen, times whole numbers and a unit.

    The function is ``(unit f32x16, scale_0 … i32x16, w_0 … w_7 i8x64, x) -> f32x16``, where the ``n_scales`` (one or
    two) hold the rows' numbers, -128 … 127, each twice in a word, as 16 bits.  Lane r of the result is unit[r] times
    row r's products.  Codes are unsigned numbers of so many bits, at most 6; the rest is as in `dot_op`.

    With an ``offset``, which is subtracted from each code, the function takes two more arguments: the pairs of scales
    times the offset, as 16-bit numbers, and the address of two 16-bit numbers, the sums of the activations of both
    halves.
    """

    def emit(b: Any, tokens: int, unit: Any, *values: Any) -> Any:
        scales, weights, x, offsets = values[:n_scales], values[n_scales:][:8], values[n_scales + 8], values[-2:]
        n = len(weights) // n_scales
        kind = dot_kind()
        if kind.startswith("maddubs"):  # which multiplies by the whole numbers on the way, all exact
            start = constant(0, i32, 16)
            if offset:
                start = b.sub(start, multiply_pairs(b, offsets[0], _spread(b, tokens, offsets[1], i32)))
            totals = halves(b, start, _REGISTERS[kind])
            pairs = _with_activations(b, tokens, weights, x, True)
            for i, scale in enumerate(scales):
                words = b.bitcast(scale, ir.VectorType(i16, 32))
                totals = _add_products(b, totals, pairs[n * i : n * (i + 1)], bits, halves(b, words, len(totals)))
            return b.fmul(unit, b.sitofp(join(b, totals), f32x16.llvm))
        total = None
        for i, scale in enumerate(scales):
            start = constant(0, i32, 16)
            if offset and tokens < 4:  # a slab of quarters has codes less the offset
                sums = [b.sext(load(b, _at(b, offsets[1], RECORD * t + 2 * i), i16), i32) for t in range(tokens)]
                parts = [broadcast(b, b.mul(x_sum, ir.Constant(i32, -offset)), 16 // tokens) for x_sum in sums]
                start = join(b, parts)
            part, of_part = weights[n * i : n * (i + 1)], _at(b, x, _column(4 * n * i))
            dot = b.sitofp(_dot(b, tokens, start, part, of_part, bits, None, True), f32x16.llvm)
            # The same for all tokens.  It and the dot product are exact.
            scale = b.fmul(unit, b.sitofp(high_number(b, scale), f32x16.llvm))
            total = b.fmul(scale, dot) if total is None else fma(b, scale, dot, total)
        return total

    more = [i32x16, intp] if offset else []
    return _record_op(name, f32x16, f32x16, *[i32x16] * n_scales, *[i8x64] * 8, intp, *more)(emit)


def _with_activations(b: Any, tokens: int, weights: Sequence[Any], x: Any, of_record: bool) -> list[tuple[Any, Any]]:
    """Each vector of codes with the four activations at x that belong to it, in every word of their token."""
    pairs = []
    for v, w in enumerate(weights):
        if dot_kind() not in ("sdot", "smmla"):
            every = _spread(b, tokens, _at(b, x, 4 * v), i32)
        elif of_record and multiplies_matrices():
            eight = load(b, _at(b, x, _column(8 * (v // 2))), ir.VectorType(i32, 2))
            every = _lanes(b, eight, [v % 2] * 16)
        else:  # they are taken from a lane of sixteen bytes
            if v % 4 == 0:
                sixteen = [load(b, _at(b, x, RECORD * i + 4 * v), ir.VectorType(i32, 4)) for i in range(tokens)]
            every = join(b, [_lanes(b, words, [v % 4] * (16 // tokens)) for words in sixteen])
        pairs.append((w, b.bitcast(every, i8x64.llvm)))
    return pairs


def _dot_of_matrices(b: Any, tokens: int, sums: Any, weights: Sequence[Any], x: Any) -> Any:
    """Two rows' eight codes times two tokens' activations, by one instruction."""
    totals, words = halves(b, sums, 4), ir.VectorType(i32, 4)
    for k in range(len(weights) // 2):
        rows = [halves(b, w, 4)[0] for w in weights[2 * k : 2 * k + 2]]  # as `store_two_of_slab` interleaves them
        for p in range(tokens // 2):
            both = load(b, _at(b, x, 2 * RECORD * p + _column(8 * k)), ir.VectorType(i8, 16))
            for i, two in enumerate(rows):
                own, name = 2 * p + i, "llvm.aarch64.neon.smmla.v4i32.v16i8"
                totals[own] = intrinsic(b, name, words, totals[own], two, both)
    return join(b, totals)


def _dot_vnni(parts: int) -> Callable[..., Any]:
    bits_wide = 512 // parts

    def dot(b: Any, sums: Any, pairs: list[tuple[Any, Any]], bits: int, sum_x: Any) -> Any:
        # Two chains, because each instruction waits for the sum of the one before.
        chains = [sums, constant(0, i32, 16)]
        for i, (w, x) in enumerate(pairs):
            if bits == 8:  # the instruction takes the first factor as unsigned: w + 128
                w = b.xor(w, constant(-128, i8, 64))
            pieces = [
                intrinsic(b, f"llvm.x86.avx512.vpdpbusd.{bits_wide}", s.type, s, u, v)
                for s, u, v in zip(*(halves(b, y, parts) for y in (chains[i % 2], w, x)), strict=True)
            ]
            chains[i % 2] = join(b, pieces)
        total = b.add(*chains)
        return b.sub(total, b.shl(sum_x, constant(7, i32, 16))) if bits == 8 else total

    return dot


#: How many registers a vector fills.
_REGISTERS = {"vnni512": 1, "vnni256": 2, "maddubs512": 1, "maddubs256": 2}
#: Products of bytes, and of 16-bit numbers, added in pairs, for so many registers a vector.
_MULTIPLY = {1: "llvm.x86.avx512.pmaddubs.w.512", 2: "llvm.x86.avx2.pmadd.ub.sw"}
_WIDEN = {1: "llvm.x86.avx512.pmaddw.d.512", 2: "llvm.x86.avx2.pmadd.wd"}


def _largest(bits: int) -> int:
    """The largest magnitude of a code."""
    return 128 if bits == 8 else (1 << bits) - 1


def _add_products(
    b: Any, totals: list[Any], pairs: list[tuple[Any, Any]], bits: int, factors: list[Any]
) -> list[Any]:
    """Adds to the totals, cut into registers, the products of codes and activations, times 16-bit factors."""
    parts = len(totals)
    multiply, widen = _MULTIPLY[parts], _WIDEN[parts]
    # pmaddubsw saturates at 16 bits.  Two products of a code and an activation stay below 2 * 127 * largest, so this
    # many of their sums can be added before they have to be widened.
    fit = max(1, 32767 // (2 * 127 * _largest(bits)))
    for start in range(0, len(pairs), fit):
        partial: list[Any] = [None] * parts
        for w, x in pairs[start : start + fit]:
            for k, (u, v) in enumerate(zip(halves(b, w, parts), halves(b, x, parts), strict=True)):
                if bits == 8:
                    u, v = _signed_pair(b, u, v)
                product = intrinsic(b, multiply, ir.VectorType(i16, 32 // parts), u, v)
                partial[k] = product if partial[k] is None else b.add(partial[k], product)
        totals = [
            b.add(t, intrinsic(b, widen, t.type, p, f)) for t, p, f in zip(totals, partial, factors, strict=True)
        ]
    return totals


def _signed_pair(b: Any, w: Any, x: Any) -> tuple[Any, Any]:
    """(|w|, x with w's sign): the same products, with the first factor unsigned."""
    if w.type.count == 32:  # where AVX2 has an instruction
        absolute, signed = (intrinsic(b, "llvm.x86.avx2.psign.b", w.type, v, w) for v in (w, x))
    else:
        negative = b.icmp_signed("<", w, constant(0, i8, 64))
        absolute, signed = (b.select(negative, b.sub(constant(0, i8, 64), v), v) for v in (w, x))
    return absolute, signed


def _dot_maddubs(b: Any, sums: Any, pairs: list[tuple[Any, Any]], bits: int, sum_x: Any) -> Any:
    totals = halves(b, sums, _REGISTERS[dot_kind()])
    ones = [constant(1, i16, 32 // len(totals))] * len(totals)
    return join(b, _add_products(b, totals, pairs, bits, ones))


def _dot_sdot(b: Any, sums: Any, pairs: list[tuple[Any, Any]], bits: int, sum_x: Any) -> Any:
    totals = halves(b, sums, 4)
    pieces = [(halves(b, w, 4), halves(b, x, 4)) for w, x in pairs]
    for k in range(4):  # a quarter after the other, so that few codes wait in registers
        for w, x in pieces:  # codes of fewer than 8 bits are the same number signed
            name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
            totals[k] = intrinsic(b, name, totals[k].type, totals[k], w[k], x[k])
    return join(b, totals)


def _dot_smull(b: Any, sums: Any, pairs: list[tuple[Any, Any]], bits: int, sum_x: Any) -> Any:
    """By products of 16 bits, of which as many are added as fit before neighbours are."""
    words, doubles = ir.VectorType(i16, 8), ir.VectorType(i32, 4)
    fit = 32767 // (127 * _largest(bits))
    pieces = [(halves(b, w, 8), halves(b, x, 8)) for w, x in pairs]
    twos: list[Any] = []  # of each half of a quarter
    for k in range(8):
        total = None
        for start in range(0, len(pieces), fit):
            partial = None
            for w, x in pieces[start : start + fit]:
                product = b.mul(b.sext(w[k], words), b.sext(x[k], words))
                partial = product if partial is None else b.add(partial, product)
            two = intrinsic(b, "llvm.aarch64.neon.saddlp.v4i32.v8i16", doubles, partial)
            total = two if total is None else b.add(total, two)
        twos.append(total)
    name = "llvm.aarch64.neon.addp.v4i32"
    fours = [intrinsic(b, name, doubles, low, high) for low, high in zip(twos[::2], twos[1::2], strict=True)]
    return b.add(sums, join(b, fours))


def _dot_generic(b: Any, sums: Any, pairs: list[tuple[Any, Any]], bits: int, sum_x: Any) -> Any:
    words, doubles = ir.VectorType(i16, 64), ir.VectorType(i32, 32)
    sixteen, thirty_two = constant(16, i32, 32), constant(32, i64, 16)
    for w, x in pairs:
        # Sums of neighbours, twice: sixteen-bit products (at most 128 * 127) as halves of 32-bit lanes, then those
        # as halves of 64-bit lanes.
        products = b.bitcast(b.mul(b.sext(w, words), b.sext(x, words)), doubles)
        twos = b.add(b.ashr(b.shl(products, sixteen), sixteen), b.ashr(products, sixteen))
        lanes = b.bitcast(twos, ir.VectorType(i64, 16))
        fours = b.add(b.trunc(lanes, i32x16.llvm), b.trunc(b.lshr(lanes, thirty_two), i32x16.llvm))
        sums = b.add(sums, fours)
    return sums


_DOTS = {
    "vnni512": _dot_vnni(1),
    "vnni256": _dot_vnni(2),
    "maddubs512": _dot_maddubs,
    "maddubs256": _dot_maddubs,
    "sdot": _dot_sdot,
    "smmla": _dot_sdot,
    "smull": _dot_smull,
    "generic": _dot_generic,
}


def _add_int16_x86(b: Any, totals: list[Any], pairs: list[tuple[Any, Any]]) -> list[Any]:
    """Each total and its products of 16-bit numbers, added in pairs."""
    added = []
    for total, (w, x) in zip(totals, pairs, strict=True):
        kind = total.type
        if dot_kind().startswith("vnni"):
            added.append(intrinsic(b, f"llvm.x86.avx512.vpdpwssd.{32 * kind.count}", kind, total, w, x))
        else:
            added.append(b.add(total, intrinsic(b, _WIDEN[len(totals)], kind, w, x)))
    return added


def _dot_int16(b: Any, pieces: list[list[tuple[Any, Any]]]) -> list[Any]:
    totals = []
    for pairs in pieces:
        n = pairs[0][0].type.count
        wide, total = ir.VectorType(i32, n), None
        for w, x in pairs:
            product = b.mul(b.sext(w, wide), b.sext(x, wide))
            total = product if total is None else b.add(total, product)
        even, odd = (
            b.shuffle_vector(total, total, ir.Constant(ir.VectorType(i32, n // 2), list(range(first, n, 2))))
            for first in (0, 1)
        )
        totals.append(b.add(even, odd))
    return totals


def _int16_pairs(b: Any, w: Any, x: Any) -> list[tuple[Any, Any]]:
    """A vector of pairs of 16-bit numbers, and the pair at x for each of them, in the parts that registers hold."""
    pair = broadcast(b, load(b, x, i32), 16)
    parts = _REGISTERS.get(dot_kind(), 4)
    return list(zip(*(halves(b, b.bitcast(v, ir.VectorType(i16, 32)), parts) for v in (w, pair)), strict=True))


@op(i32x16, *[i8x64] * 16, intp)
def dot32_s16(b, *values):
    """A dot product over 32 columns of sixteen rows: 16-bit numbers in -8191 … 8191, of both the rows and x.

    Numbers 2 r and 2 r + 1 of w_v are row r's in columns 2 v and 2 v + 1.  Sums are exact.
    """
    weights, x = values[:16], values[16]
    columns = [_int16_pairs(b, w, b.add(x, ir.Constant(i64, 4 * v))) for v, w in enumerate(weights)]
    if dot_kind() not in _REGISTERS:
        return join(b, _dot_int16(b, [list(piece) for piece in zip(*columns, strict=True)]))
    kind = ir.VectorType(i32, 16 // _REGISTERS[dot_kind()])
    totals = [ir.Constant(kind, [0] * kind.count)] * _REGISTERS[dot_kind()]
    for pairs in columns:
        totals = _add_int16_x86(b, totals, pairs)
    return join(b, totals)


@op(i32x16, i32x16, i8x64, intp)
def add_int16_x86(b, total, w, x):
    """total and the products of two columns of `dot32_s16`, whose activations stand at x."""
    return join(b, _add_int16_x86(b, halves(b, total, _REGISTERS[dot_kind()]), _int16_pairs(b, w, x)))


@op(i32x16, i32x16, i32x16)
def multiply_pairs(b, x, y):
    """In each word, the sum of the products of the two 16-bit numbers of x with those of y."""
    parts = _REGISTERS.get(dot_kind())
    if parts is None:
        return b.add(b.mul(low_number(b, x), low_number(b, y)), b.mul(high_number(b, x), high_number(b, y)))
    words = ir.VectorType(i16, 32)
    pieces = [halves(b, b.bitcast(v, words), parts) for v in (x, y)]
    kind = ir.VectorType(i32, 16 // parts)
    return join(b, [intrinsic(b, _WIDEN[parts], kind, u, v) for u, v in zip(*pieces, strict=True)])


# Of activations that stand one behind the other.
dot32_u4 = dot_op("dot32_u4", 8, 4)
dot32_u5 = dot_op("dot32_u5", 8, 5)
dot32_u6 = dot_op("dot32_u6", 8, 6)
dot32_s8 = dot_op("dot32_s8", 8, 8)

# Of activations in a record.
record_dot32_u4 = dot_op("record_dot32_u4", 8, 4, of_record=True)
record_dot32_u5 = dot_op("record_dot32_u5", 8, 5, of_record=True)
record_dot32_s8 = dot_op("record_dot32_s8", 8, 8, of_record=True)
record_dot16_s8 = dot_op("record_dot16_s8", 4, 8, of_record=True)
scaled_dot32_u4 = scaled_dot_op("scaled_dot32_u4", 1, 4)
scaled_dot32_u5 = scaled_dot_op("scaled_dot32_u5", 1, 5)
scaled_dot16_u2 = scaled_dot_op("scaled_dot16_u2", 2, 2)
scaled_dot16_u3 = scaled_dot_op("scaled_dot16_u3", 2, 3, offset=4)
scaled_dot16_u6 = scaled_dot_op("scaled_dot16_u6", 2, 6, offset=32)
