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

#: Bytes of a token's record of activations in 32 columns, and where it has its scale and its sums (see `tiles`).
RECORD = 44
D, SUM, SUMS = 32, 36, 40

#: Operations on a record of activations, and for each the one that takes four records, of the tokens from that on:
#: lanes 4 i … 4 i + 3 of all its vectors are those of token i, and of the same four rows.
OF_FOUR_TOKENS: dict[Any, Any] = {}


class FourTokens(Device):
    """A device function for four tokens' records of activations instead of one's; see `OF_FOUR_TOKENS`."""

    def specialise(self, constants: Mapping[str, Any]) -> tuple[ast.FunctionDef, dict[str, Any]]:
        tree, scope = super().specialise(constants)
        four = {k: OF_FOUR_TOKENS[v] for k, v in scope.items() if callable(v) and v in OF_FOUR_TOKENS}
        return tree, scope | four


def _record_op(name: str, result: Kind, *arguments: Kind) -> Callable[[Callable[..., Any]], Any]:
    """Makes two operations, for `OF_FOUR_TOKENS`, of ``emit(b, tokens, *values)``."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def of(tokens: int, name: str) -> Any:
            def operation(b: Any, *values: Any) -> Any:
                return emit(b, tokens, *values)

            operation.__name__ = name
            return op(result, *arguments)(operation)

        one = of(1, name)
        OF_FOUR_TOKENS[one] = of(4, f"{name}_of_four")
        return one

    return decorate


def _spread(b: Any, tokens: int, address: Any, kind: ir.Type, lane: int = 0, factor: int = 0) -> Any:
    """A lane of the vector, or a number, in each token's record, times a factor if given, in all of its lanes."""
    loaded = [load(b, b.add(address, ir.Constant(i64, RECORD * i)) if i else address, kind) for i in range(tokens)]
    if factor:
        loaded = [b.mul(b.sext(x, i32), ir.Constant(i32, factor)) for x in loaded]
    if not isinstance(kind, ir.VectorType):
        return join(b, [broadcast(b, x, 16 // tokens) for x in loaded])
    lanes = ir.Constant(ir.VectorType(i32, 16 // tokens), [lane] * (16 // tokens))
    return join(b, [b.shuffle_vector(x, x, lanes) for x in loaded])


def _record_lane(b: Any, tokens: int, x: Any, lane: int) -> Any:
    if tokens == 1:
        return _spread(b, tokens, b.add(x, ir.Constant(i64, D + 4 * lane)), f32)
    return _spread(b, tokens, b.add(x, ir.Constant(i64, D)), ir.VectorType(f32, 2), lane)  # read once for both


@_record_op("load_unit", f32x16, intp)
def load_unit(b, tokens, x):
    """The scale of the activations in the record at x."""
    return _record_lane(b, tokens, x, 0)


@_record_op("load_sum", f32x16, intp)
def load_sum(b, tokens, x):
    """The sum of the activations in the record at x."""
    return _record_lane(b, tokens, x, 1)


@_record_op("load_sums", i32x16, intp)
def load_sums(b, tokens, x):
    """Both halves' sums of the activations in the record at x, as 16-bit numbers."""
    return _spread(b, tokens, b.add(x, ir.Constant(i64, SUMS)), i32)


@op(f32x16, intp, literal)
def load_quarters(b, address, step):
    """Four lanes from each of the places ``step`` bytes apart: of four tokens, or one's four times if it is 0."""
    kind = ir.VectorType(f32, 4)
    if step == 0:
        return join(b, [load(b, address, kind)] * 4)
    return join(b, [load(b, b.add(address, ir.Constant(i64, step * i)), kind) for i in range(4)])


@op(void, intp, literal, f32x16)
def store_quarters(b, address, step, value):
    """Writes what `load_quarters` reads."""
    for i, quarter in enumerate(halves(b, value, 4)):
        store(b, b.add(address, ir.Constant(i64, step * i)), quarter)


@op(i8x64, f32x16)
def as_bytes(b, x):
    """The bits of floats."""
    return b.bitcast(x, i8x64.llvm)


def dot_op(name: str, n_vectors: int, bits: int) -> Any:
    """A dot product over ``4 * n_vectors`` columns of sixteen rows.

    The function is ``(sums i32x16, w_0 … w_{n-1} i8x64, x) -> i32x16``: lane r of the result is sums[r] plus the
    products of row r's codes with the int8 activations at address x.  Byte 4 r + c of w_v is row r's code in column
    4 v + c.  Activations lie in -127 … 127.

    With ``bits`` below 8 the codes are unsigned numbers of so many bits, else signed bytes.  Then the function takes
    one more argument, an i32x16 with the sum of the activations in every lane: what processors need that multiply
    bytes only if one of them is unsigned.
    """

    def emit(b: Any, tokens: int, sums: Any, *values: Any) -> Any:
        sum_x = values[-1] if bits == 8 else None
        weights, x = values[:n_vectors], values[n_vectors]
        return _DOTS[dot_kind()](b, sums, _with_activations(b, tokens, weights, x), bits, sum_x)

    return _record_op(name, i32x16, i32x16, *[i8x64] * n_vectors, intp, *[i32x16] * (bits == 8))(emit)


def scaled_dot_op(name: str, n_scales: int, bits: int, offset: int = 0) -> Any:
    """Dot products over 32 columns of sixteen rows, or over two times sixteen, each times a whole number and a unit.

    The function is ``(unit f32x16, scale_0 … i32x16, w_0 … w_7 i8x64, x) -> f32x16``, where the ``n_scales`` (one or
    two) hold the rows' numbers, -128 … 127, each twice in a word, as 16 bits.  Lane r of the result is unit[r] times
    row r's products.  Codes are unsigned numbers of so many bits, at most 6; the rest is as in `dot_op`.

    With an ``offset``, which is subtracted from each code, the function takes two more arguments: the pairs of scales
    times the offset, as 16-bit numbers, and the address of two 16-bit numbers, the sums of the activations of both
    halves.
    """

    def emit(b: Any, tokens: int, unit: Any, *values: Any) -> Any:
        scales, weights, x, offsets = values[:n_scales], values[n_scales:][:8], values[n_scales + 8], values[-2:]
        pairs = _with_activations(b, tokens, weights, x)
        n = len(pairs) // n_scales
        parts = [pairs[i : i + n] for i in range(0, len(pairs), n)]
        kind = dot_kind()
        if kind.startswith("maddubs"):  # which multiplies by the whole numbers on the way, all exact
            start = constant(0, i32, 16)
            if offset:
                start = b.sub(start, multiply_pairs(b, offsets[0], broadcast(b, load(b, offsets[1], i32), 16)))
            totals = halves(b, start, _REGISTERS[kind])
            for scale, part in zip(scales, parts, strict=True):
                words = b.bitcast(scale, ir.VectorType(i16, 32))
                totals = _add_products(b, totals, part, bits, halves(b, words, len(totals)))
            return b.fmul(unit, b.sitofp(join(b, totals), f32x16.llvm))
        total = None
        for i, (scale, part) in enumerate(zip(scales, parts, strict=True)):
            start = constant(0, i32, 16)
            if offset:
                start = _spread(b, tokens, b.add(offsets[1], ir.Constant(i64, 2 * i)), i16, factor=-offset)
            dot = b.sitofp(_DOTS[kind](b, start, part, bits, None), f32x16.llvm)
            # The same for all tokens.  It and the dot product are exact.
            scale = b.fmul(unit, b.sitofp(high_number(b, scale), f32x16.llvm))
            total = b.fmul(scale, dot) if total is None else fma(b, scale, dot, total)
        return total

    more = [i32x16, intp] if offset else []
    return _record_op(name, f32x16, f32x16, *[i32x16] * n_scales, *[i8x64] * 8, intp, *more)(emit)


def _with_activations(b: Any, tokens: int, weights: Sequence[Any], x: Any) -> list[tuple[Any, Any]]:
    """Each vector of codes with the four activations at x that belong to it, in every word of their token."""
    pairs = []
    for v, w in enumerate(weights):
        if dot_kind() == "sdot":  # which takes them from a lane of sixteen bytes
            if v % 4 == 0:
                sixteen = [
                    load(b, b.add(x, ir.Constant(i64, RECORD * i + 4 * v)), ir.VectorType(i32, 4))
                    for i in range(tokens)
                ]
            lanes = ir.Constant(ir.VectorType(i32, 16 // tokens), [v % 4] * (16 // tokens))
            every = join(b, [b.shuffle_vector(words, words, lanes) for words in sixteen])
        else:
            every = _spread(b, tokens, b.add(x, ir.Constant(i64, 4 * v)), i32)
        pairs.append((w, b.bitcast(every, i8x64.llvm)))
    return pairs


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
    "smull": _dot_smull,
    "generic": _dot_generic,
}


def _dot_int16_x86(b: Any, pieces: list[list[tuple[Any, Any]]]) -> list[Any]:
    totals = []
    for pairs in pieces:
        kind = ir.VectorType(i32, pairs[0][0].type.count // 2)
        total = ir.Constant(kind, [0] * kind.count)
        for w, x in pairs:
            if dot_kind().startswith("vnni"):
                total = intrinsic(b, f"llvm.x86.avx512.vpdpwssd.{32 * kind.count}", kind, total, w, x)
            else:
                total = b.add(total, intrinsic(b, _WIDEN[len(pieces)], kind, w, x))
        totals.append(total)
    return totals


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


@op(i32x16, *[i8x64] * 16, intp)
def dot32_s16(b, *values):
    """A dot product over 32 columns of sixteen rows: 16-bit numbers in -8191 … 8191, of both the rows and x.

    Numbers 2 r and 2 r + 1 of w_v are row r's in columns 2 v and 2 v + 1.  Sums are exact.
    """
    weights, x = values[:16], values[16]
    parts = _REGISTERS.get(dot_kind(), 4)
    columns = []
    for v, w in enumerate(weights):
        pair = broadcast(b, load(b, b.add(x, ir.Constant(i64, 4 * v)), i32), 16)
        cut = (halves(b, b.bitcast(each, ir.VectorType(i16, 32)), parts) for each in (w, pair))
        columns.append(list(zip(*cut, strict=True)))
    emit = _dot_int16_x86 if dot_kind() in _REGISTERS else _dot_int16
    return join(b, emit(b, [list(piece) for piece in zip(*columns, strict=True)]))


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


dot32_u4 = dot_op("dot32_u4", 8, 4)
dot32_u5 = dot_op("dot32_u5", 8, 5)
dot32_u6 = dot_op("dot32_u6", 8, 6)
dot32_s8 = dot_op("dot32_s8", 8, 8)
dot16_s8 = dot_op("dot16_s8", 4, 8)
scaled_dot32_u4 = scaled_dot_op("scaled_dot32_u4", 1, 4)
scaled_dot32_u5 = scaled_dot_op("scaled_dot32_u5", 1, 5)
scaled_dot16_u2 = scaled_dot_op("scaled_dot16_u2", 2, 2)
scaled_dot16_u3 = scaled_dot_op("scaled_dot16_u3", 2, 3, offset=4)
scaled_dot16_u6 = scaled_dot_op("scaled_dot16_u6", 2, 6, offset=32)
