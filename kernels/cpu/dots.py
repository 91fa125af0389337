"""Integer dot products in kernels: codes of weights times 8-bit activations."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir

from localllm.kernels.cpu.codes import high_number, low_number
from localllm.kernels.cpu.instructions import *
from localllm.kernels.cpu.simd import fma
from localllm.kernels.cpu.templates import DeviceFunction

#: Bytes of a token's record of activations in 32 columns; see `tiles`.
RECORD = 48

#: Operations on one token's record of activations and 16 rows; for each, the variants for the records of 2 or 4
#: tokens, by the number of tokens, which use 8 or 4 rows.  With 4 tokens, lanes 4 i … 4 i + 3 of all vectors belong
#: to token i.  With byte matrix instructions, lanes 0 … 3 belong to two rows of tokens 0 and 1 in turn, lanes 4 … 7
#: to the other rows, and so on.
OF_TOKENS: dict[Any, dict[int, Any]] = {}


class SeveralTokens(DeviceFunction):
    """A device function for the records of ``n`` tokens; see `OF_TOKENS`."""

    def __init__(self, function: Callable[..., Any], n: int) -> None:
        super().__init__(function)
        self.n = n

    def specialise(self, constants: Mapping[str, Any]) -> tuple[ast.FunctionDef, dict[str, Any]]:
        tree, scope = super().specialise(constants)
        several = {k: OF_TOKENS[v][self.n] for k, v in scope.items() if callable(v) and v in OF_TOKENS}
        return tree, scope | several


def _record_op(name: str, result: Kind, *arguments: Kind) -> Callable[[Callable[..., Any]], Any]:
    """Create the operations of `OF_TOKENS` from ``emit(b, tokens, *values)``."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def of(tokens: int, name: str) -> Any:
            def operation(b: Any, *values: Any) -> Any:
                return emit(b, tokens, *values)

            operation.__name__ = name
            return op(result, *arguments)(operation)

        single = of(1, name)
        OF_TOKENS[single] = {n: of(n, f"{name}_of_{n}") for n in (2, 4)}
        return single

    return decorate


def multiplies_matrices() -> bool:
    """Return whether one instruction multiplies two rows of eight bytes with two others (interleaved records)."""
    return dot_kind() == "smmla"


def _column(n: int) -> int:
    """Return the offset of the activation of column n in a record."""
    return n // 8 * 16 + n % 8 if multiplies_matrices() else n


def _scale_offset() -> int:
    return 64 if multiplies_matrices() else 32


def _sums_offset() -> int:
    return 80 if multiplies_matrices() else 40


@op(intp, intp)
def token_place(b, i):
    """Return the offset in bytes of token i's record in a tile of activations."""
    if not multiplies_matrices():
        return b.mul(i, ir.Constant(i64, RECORD))
    pair = b.mul(b.lshr(i, ir.Constant(i64, 1)), ir.Constant(i64, 2 * RECORD))
    return b.add(pair, b.shl(b.and_(i, ir.Constant(i64, 1)), ir.Constant(i64, 3)))


@op(intp, intp)
def scale_place(b, record):
    """Return the address of a record's scale and, after it, the sum of its codes, both float32."""
    return behind(b, record, _scale_offset())


@op(intp, intp)
def sums_place(b, record):
    """Return the address of the sums of both halves of a record's codes, as 16-bit numbers."""
    return behind(b, record, _sums_offset())


@op(intp, intp)
def second_half(b, record):
    """Return the address of a record's codes from column 16 on."""
    return behind(b, record, _column(16))


def _spread(b: Any, tokens: int, address: Any, element: Any, lane: int = 0) -> Any:
    """Broadcast one number of the eight bytes at an address in each token's record to all lanes of the token.

    element: f32 or i32.  lane: 0 or 1, the position of the number.
    """
    if tokens > 1 and multiplies_matrices():
        pairs = [load(b, behind(b, address, 2 * RECORD * p), ir.VectorType(element, 4)) for p in range(tokens // 2)]
        return join(b, [shuffle(b, [lane, lane + 2] * 2, x) for x in pairs for _ in range(2)])
    if tokens > 1 and element is f32:  # all floats are read at once, and then selected
        eights = [load(b, behind(b, address, RECORD * i), ir.VectorType(f32, 2)) for i in range(tokens)]
        return join(b, [shuffle(b, [lane] * (16 // tokens), x) for x in eights])
    loaded = [load(b, behind(b, address, RECORD * i + 4 * lane), element) for i in range(tokens)]
    return join(b, [broadcast(b, x, 16 // tokens) for x in loaded])


@_record_op("load_unit", f32x16, intp)
def load_unit(b, tokens, x):
    """Return the scale of the activations in the record at x."""
    return _spread(b, tokens, behind(b, x, _scale_offset()), f32, 0)


@_record_op("load_sum", f32x16, intp)
def load_sum(b, tokens, x):
    """Return the sum of the activations in the record at x."""
    return _spread(b, tokens, behind(b, x, _scale_offset()), f32, 1)


@_record_op("load_sums", i32x16, intp)
def load_sums(b, tokens, x):
    """Return the sums of both halves of the activations in the record at x, as 16-bit numbers."""
    return _spread(b, tokens, behind(b, x, _sums_offset()), i32, 0)


def _interleaved(b: Any, x: Any, y: Any) -> list[Any]:
    """Return two vectors with the lanes 0 of both vectors of four, their lanes 1, and so on."""
    return [shuffle(b, lanes, x, y) for lanes in ([0, 4, 1, 5], [2, 6, 3, 7])]


@op(f32x16, intp, literal, literal)
def load_parts(b, address, step, n):
    """Return the floats of 16 / n rows for n tokens, ``step`` bytes apart; see `OF_TOKENS`.

    If the step is 0, all tokens use the same floats.
    """
    vector = ir.VectorType(f32, 16 // n)
    pieces = (
        [load(b, behind(b, address, step * i), vector) for i in range(n)] if step else [load(b, address, vector)] * n
    )
    if multiplies_matrices():
        pieces = [*_interleaved(b, *pieces[:2]), *_interleaved(b, *pieces[2:])]
    return join(b, pieces)


@op(void, intp, literal, literal, f32x16)
def store_parts(b, address, step, n, value):
    """Store floats in the order of `load_parts`."""
    pieces = halves(b, value, n)
    if multiplies_matrices():
        pairs = [join(b, pieces[:2]), join(b, pieces[2:])]
        pieces = [shuffle(b, range(token, 8, 2), pair) for pair in pairs for token in range(2)]
    for i, piece in enumerate(pieces):
        store(b, behind(b, address, step * i), piece)


@op(void, intp, i8x64, i8x64, literal)
def store_two_of_slab(b, address, first, second, offset):
    """Store two vectors of codes, minus an offset, in a slab, in the order for products of four tokens.

    With byte matrix instructions, words of both vectors are interleaved: the words of four rows in two vectors.
    """
    if offset:
        first, second = (b.sub(codes, constant(offset, i8, 64)) for codes in (first, second))
    if multiplies_matrices():
        fours = zip(*(halves(b, b.bitcast(codes, i32x16.llvm), 4) for codes in (first, second)), strict=True)
        first, second = (join(b, list(pieces)) for pieces in zip(*(_interleaved(b, *x) for x in fours), strict=True))
    store(b, address, first)
    store(b, behind(b, address, 64), second)


@op(i8x64, intp, literal, literal)
def load_of_slab(b, address, v, offset):
    """Return vector 0 or 1 of the two vectors stored by `store_two_of_slab`."""
    codes = load(b, behind(b, address, 64 * v), i8x64.llvm)
    if multiplies_matrices():
        both = [halves(b, load(b, behind(b, address, 64 * i), i32x16.llvm), 4) for i in range(2)]
        fours = [shuffle(b, range(v, 8, 2), join(b, list(pieces))) for pieces in zip(*both, strict=True)]
        codes = b.bitcast(join(b, fours), i8x64.llvm)
    return b.add(codes, constant(offset, i8, 64)) if offset else codes


@op(i8x64, intp, literal)
def load_part_of_codes(b, address, n):
    """Return the codes of 16 / n rows, n times."""
    return join(b, [load(b, address, ir.VectorType(i8, 64 // n))] * n)


@op(void, intp, f32x16, f32x16)
def store_activations(b, record, first, second):
    """Store 32 numbers in -128 … 127 in a record, rounded to the nearest integers (ties to even)."""
    for i, value in enumerate([first, second]):
        codes = b.fptosi(intrinsic(b, "llvm.rint.v16f32", f32x16.llvm, value), ir.VectorType(i8, 16))
        for k, eight in enumerate(halves(b, codes, 2)):
            store(b, behind(b, record, _column(16 * i + 8 * k)), eight)


@op(f32x16, intp, literal)
def load_activations(b, record, half):
    """Return the first or the second sixteen codes of a record."""
    eights = [load(b, behind(b, record, _column(16 * half + 8 * k)), ir.VectorType(i8, 8)) for k in range(2)]
    return b.sitofp(join(b, eights), f32x16.llvm)


def dot_op(name: str, n_vectors: int, bits: int, *, of_record: bool = False) -> Any:
    """Return a dot product over ``4 * n_vectors`` columns of sixteen rows.

    The function is ``(sums i32x16, w_0 … w_{n-1} i8x64, x) -> i32x16``: lane r of the result is sums[r] plus the
    products of row r's codes with the int8 activations at address x, in a record or consecutive.  Byte 4 r + c of w_v
    is row r's code in column 4 v + c.  Activations are in -127 … 127.

    Codes with ``bits`` below 8 are unsigned, and 8-bit codes are signed bytes.  For 8 bits the function takes one
    more argument, an i32x16 with the sum of the activations in every lane, for processors that multiply bytes only if
    one factor is unsigned.
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
    """Return dot products with a record of activations, over 32 columns or twice 16, times integer scales and a unit.

    The function is ``(unit f32x16, scale_0 … i32x16, w_0 … w_7 i8x64, x) -> f32x16``.  The ``n_scales`` scales (one
    or two) contain the rows' numbers, -128 … 127, each twice in a word, as 16 bits.  Lane r of the result is unit[r]
    times row r's products.  Codes are unsigned numbers of ``bits`` bits, at most 6.  `dot_op` describes the other
    arguments.

    With an ``offset``, which is subtracted from each code, the function takes two more arguments: the pairs of scales
    times the offset, as 16-bit numbers, and the address of two 16-bit numbers, the sums of the activations of both
    halves.
    """

    def emit(b: Any, tokens: int, unit: Any, *values: Any) -> Any:
        scales, weights, x, offsets = values[:n_scales], values[n_scales:][:8], values[n_scales + 8], values[-2:]
        n = len(weights) // n_scales
        instruction = dot_kind()
        if instruction.startswith("maddubs"):  # multiplies by the scales on the way; all products are exact
            start = constant(0, i32, 16)
            if offset:
                start = b.sub(start, multiply_pairs(b, offsets[0], _spread(b, tokens, offsets[1], i32)))
            totals = halves(b, start, _REGISTERS[instruction])
            pairs = _with_activations(b, tokens, weights, x, True)
            for i, scale in enumerate(scales):
                words = b.bitcast(scale, ir.VectorType(i16, 32))
                totals = _add_products(b, totals, pairs[n * i : n * (i + 1)], bits, halves(b, words, len(totals)))
            return b.fmul(unit, b.sitofp(join(b, totals), f32x16.llvm))
        total = None
        for i, scale in enumerate(scales):
            start = constant(0, i32, 16)
            if offset and tokens < 4:  # codes in a slab of quarters are already reduced by the offset
                sums = [b.sext(load(b, behind(b, offsets[1], RECORD * t + 2 * i), i16), i32) for t in range(tokens)]
                products = [broadcast(b, b.mul(x_sum, ir.Constant(i32, -offset)), 16 // tokens) for x_sum in sums]
                start = join(b, products)
            group_weights, group_x = weights[n * i : n * (i + 1)], behind(b, x, _column(4 * n * i))
            dot = b.sitofp(_dot(b, tokens, start, group_weights, group_x, bits, None, True), f32x16.llvm)
            # The scale is the same for all tokens.  The scale and the dot product are exact.
            scale = b.fmul(unit, b.sitofp(high_number(b, scale), f32x16.llvm))
            total = b.fmul(scale, dot) if total is None else fma(b, scale, dot, total)
        return total

    more = [i32x16, intp] if offset else []
    return _record_op(name, f32x16, f32x16, *[i32x16] * n_scales, *[i8x64] * 8, intp, *more)(emit)


def _with_activations(b: Any, tokens: int, weights: Sequence[Any], x: Any, of_record: bool) -> list[tuple[Any, Any]]:
    """Return each vector of codes with its four activations at x, in every word of their token."""
    pairs = []
    for v, w in enumerate(weights):
        if dot_kind() not in ("sdot", "smmla"):
            every = _spread(b, tokens, behind(b, x, 4 * v), i32)
        elif of_record and multiplies_matrices():
            eight = load(b, behind(b, x, _column(8 * (v // 2))), ir.VectorType(i32, 2))
            every = shuffle(b, [v % 2] * 16, eight)
        else:  # select from a lane of sixteen bytes
            if v % 4 == 0:
                sixteen = [load(b, behind(b, x, RECORD * i + 4 * v), ir.VectorType(i32, 4)) for i in range(tokens)]
            every = join(b, [shuffle(b, [v % 4] * (16 // tokens), words) for words in sixteen])
        pairs.append((w, b.bitcast(every, i8x64.llvm)))
    return pairs


def _dot_of_matrices(b: Any, tokens: int, sums: Any, weights: Sequence[Any], x: Any) -> Any:
    """Multiply eight codes of two rows with the activations of two tokens, by one instruction."""
    totals, words = halves(b, sums, 4), ir.VectorType(i32, 4)
    for k in range(len(weights) // 2):
        rows = [halves(b, w, 4)[0] for w in weights[2 * k : 2 * k + 2]]  # in the order of `store_two_of_slab`
        for p in range(tokens // 2):
            both = load(b, behind(b, x, 2 * RECORD * p + _column(8 * k)), ir.VectorType(i8, 16))
            for i, two in enumerate(rows):
                row_pair, name = 2 * p + i, "llvm.aarch64.neon.smmla.v4i32.v16i8"
                totals[row_pair] = intrinsic(b, name, words, totals[row_pair], two, both)
    return join(b, totals)


def _dot_vnni(n_registers: int) -> Callable[..., Any]:
    bits_wide = 512 // n_registers

    def dot(b: Any, sums: Any, pairs: list[tuple[Any, Any]], bits: int, sum_x: Any) -> Any:
        # One sum for all columns, although each instruction waits for the previous sum: products of other tokens and
        # blocks fill the pauses.  With two sums, prompts of Q6_K take 15% longer on Zen 5.
        totals = halves(b, sums, n_registers)
        for w, x in pairs:
            if bits == 8:  # the instruction takes the first factor as unsigned: w + 128
                w = b.xor(w, constant(-128, i8, 64))
            totals = [
                intrinsic(b, f"llvm.x86.avx512.vpdpbusd.{bits_wide}", total.type, total, u, v)
                for total, u, v in zip(totals, *(halves(b, y, n_registers) for y in (w, x)), strict=True)
            ]
        total = join(b, totals)
        return b.sub(total, b.shl(sum_x, constant(7, i32, 16))) if bits == 8 else total

    return dot


#: Registers per vector.
_REGISTERS = {"vnni512": 1, "vnni256": 2, "maddubs512": 1, "maddubs256": 2}
#: Instructions that multiply bytes, and 16-bit numbers, and add pairs of products, by registers per vector.
_MULTIPLY = {1: "llvm.x86.avx512.pmaddubs.w.512", 2: "llvm.x86.avx2.pmadd.ub.sw"}
_WIDEN = {1: "llvm.x86.avx512.pmaddw.d.512", 2: "llvm.x86.avx2.pmadd.wd"}


def _largest(bits: int) -> int:
    """Return the largest magnitude of a code."""
    return 128 if bits == 8 else (1 << bits) - 1


def _add_products(
    b: Any, totals: list[Any], pairs: list[tuple[Any, Any]], bits: int, factors: list[Any]
) -> list[Any]:
    """Add the products of codes and activations, times 16-bit factors, to the totals, one vector per register."""
    n_registers = len(totals)
    multiply, widen = _MULTIPLY[n_registers], _WIDEN[n_registers]
    # pmaddubsw saturates at 16 bits.  Two products of a code and an activation are at most 2 * 127 * largest, so this
    # many of their sums can be added before they must be widened.
    fit = max(1, 32767 // (2 * 127 * _largest(bits)))
    for start in range(0, len(pairs), fit):
        partial: list[Any] = [None] * n_registers
        for w, x in pairs[start : start + fit]:
            for k, (u, v) in enumerate(zip(halves(b, w, n_registers), halves(b, x, n_registers), strict=True)):
                if bits == 8:
                    u, v = _signed_pair(b, u, v)
                product = intrinsic(b, multiply, ir.VectorType(i16, 32 // n_registers), u, v)
                partial[k] = product if partial[k] is None else b.add(partial[k], product)
        totals = [
            b.add(t, intrinsic(b, widen, t.type, p, f)) for t, p, f in zip(totals, partial, factors, strict=True)
        ]
    return totals


def _signed_pair(b: Any, w: Any, x: Any) -> tuple[Any, Any]:
    """Return (|w|, x with w's sign): the same products, with an unsigned first factor."""
    if w.type.count == 32:  # AVX2 has an instruction
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
    for k in range(4):  # one quarter at a time, so that few codes wait in registers
        for w, x in pieces:  # codes of fewer than 8 bits are the same number if signed
            name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
            totals[k] = intrinsic(b, name, totals[k].type, totals[k], w[k], x[k])
    return join(b, totals)


def _dot_smull(b: Any, sums: Any, pairs: list[tuple[Any, Any]], bits: int, sum_x: Any) -> Any:
    """Multiply to 16 bits, and add as many products as fit before neighbours are added to 32 bits."""
    words, doubles = ir.VectorType(i16, 8), ir.VectorType(i32, 4)
    fit = 32767 // (127 * _largest(bits))
    pieces = [(halves(b, w, 8), halves(b, x, 8)) for w, x in pairs]
    twos: list[Any] = []  # for each half of a quarter
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
        # Sums of neighbours, twice: 16-bit products (at most 128 * 127) as halves of 32-bit lanes, then their sums as
        # halves of 64-bit lanes.
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
    """Add products of 16-bit numbers in pairs to each total."""
    added = []
    for total, (w, x) in zip(totals, pairs, strict=True):
        vector = total.type
        if dot_kind().startswith("vnni"):
            added.append(intrinsic(b, f"llvm.x86.avx512.vpdpwssd.{32 * vector.count}", vector, total, w, x))
        else:
            added.append(b.add(total, intrinsic(b, _WIDEN[len(totals)], vector, w, x)))
    return added


def _dot_int16(b: Any, pieces: list[list[tuple[Any, Any]]]) -> list[Any]:
    totals = []
    for pairs in pieces:
        n = pairs[0][0].type.count
        wide, total = ir.VectorType(i32, n), None
        for w, x in pairs:
            product = b.mul(b.sext(w, wide), b.sext(x, wide))
            total = product if total is None else b.add(total, product)
        totals.append(b.add(*(shuffle(b, range(first, n, 2), total) for first in (0, 1))))
    return totals


def _int16_pairs(b: Any, w: Any, x: Any) -> list[tuple[Any, Any]]:
    """Return a vector of pairs of 16-bit numbers, and the pair at x for each, in the parts that fit registers."""
    pair = broadcast(b, load(b, x, i32), 16)
    n_registers = _REGISTERS.get(dot_kind(), 4)
    return list(zip(*(halves(b, b.bitcast(v, ir.VectorType(i16, 32)), n_registers) for v in (w, pair)), strict=True))


@op(i32x16, *[i8x64] * 16, intp)
def dot32_s16(b, *values):
    """Return a dot product over 32 columns of sixteen rows: 16-bit numbers in -8191 … 8191, in both the rows and x.

    Numbers 2 r and 2 r + 1 of w_v belong to row r, columns 2 v and 2 v + 1.  Sums are exact.
    """
    weights, x = values[:16], values[16]
    columns = [_int16_pairs(b, w, behind(b, x, 4 * v)) for v, w in enumerate(weights)]
    if dot_kind() not in _REGISTERS:
        return join(b, _dot_int16(b, [list(piece) for piece in zip(*columns, strict=True)]))
    vector = ir.VectorType(i32, 16 // _REGISTERS[dot_kind()])
    totals = [ir.Constant(vector, [0] * vector.count)] * _REGISTERS[dot_kind()]
    for pairs in columns:
        totals = _add_int16_x86(b, totals, pairs)
    return join(b, totals)


@op(i32x16, i32x16, i8x64, intp)
def add_int16_x86(b, total, w, x):
    """Return total plus the products of two columns of `dot32_s16`, whose activations are at x."""
    return join(b, _add_int16_x86(b, halves(b, total, _REGISTERS[dot_kind()]), _int16_pairs(b, w, x)))


@op(i32x16, i32x16, i32x16)
def multiply_pairs(b, x, y):
    """Return, in each word, the sum of the products of the two pairs of 16-bit numbers of x and y."""
    n_registers = _REGISTERS.get(dot_kind())
    if n_registers is None:
        return b.add(b.mul(low_number(b, x), low_number(b, y)), b.mul(high_number(b, x), high_number(b, y)))
    words = ir.VectorType(i16, 32)
    pieces = [halves(b, b.bitcast(v, words), n_registers) for v in (x, y)]
    vector = ir.VectorType(i32, 16 // n_registers)
    return join(b, [intrinsic(b, _WIDEN[n_registers], vector, u, v) for u, v in zip(*pieces, strict=True)])


# For consecutive activations.
dot32_u4 = dot_op("dot32_u4", 8, 4)
dot32_u5 = dot_op("dot32_u5", 8, 5)
dot32_u6 = dot_op("dot32_u6", 8, 6)
dot32_s8 = dot_op("dot32_s8", 8, 8)

# For activations in a record.
record_dot32_u4 = dot_op("record_dot32_u4", 8, 4, of_record=True)
record_dot32_u5 = dot_op("record_dot32_u5", 8, 5, of_record=True)
record_dot32_s8 = dot_op("record_dot32_s8", 8, 8, of_record=True)
record_dot16_s8 = dot_op("record_dot16_s8", 4, 8, of_record=True)
scaled_dot32_u4 = scaled_dot_op("scaled_dot32_u4", 1, 4)
scaled_dot32_u5 = scaled_dot_op("scaled_dot32_u5", 1, 5)
scaled_dot16_u2 = scaled_dot_op("scaled_dot16_u2", 2, 2)
scaled_dot16_u3 = scaled_dot_op("scaled_dot16_u3", 2, 3, offset=4)
scaled_dot16_u6 = scaled_dot_op("scaled_dot16_u6", 2, 6, offset=32)
