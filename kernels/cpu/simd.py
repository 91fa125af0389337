"""SIMD operations: kernels that read like C intrinsics, written in Python.

A vector is an LLVM vector value of 512 bits, whatever the processor: LLVM splits it over narrower registers.
Addresses are plain integers, and nothing checks them: every index is validated before it reaches a kernel.

What depends on the instruction set (products of bytes, half precision) asks `lowering_for` which one the code at
hand is being compiled for.

An operation here is a function that writes LLVM instructions; `localllm.kernels.cpu.numba_types` makes numba know
them.  That this module does without numba keeps warm starts free of importing it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from localllm.kernels.cpu.target import Target
from localllm.quant.folding import FOLDS

_target: Target | None = None


@contextlib.contextmanager
def lowering_for(target: Target) -> Iterator[None]:
    """Code that numba lowers inside this context is for ``target``.  Hold numba's compiler lock."""
    global _target
    previous, _target = _target, target
    try:
        yield
    finally:
        _target = previous


def _dot_kind() -> str:
    if _target is None:
        raise RuntimeError("kernels are compiled by localllm.kernels.cpu.compiler, not by numba.njit")
    return _target.dot


i8, i16, i32, i64 = (ir.IntType(n) for n in (8, 16, 32, 64))
f16, f32 = ir.HalfType(), ir.FloatType()


@dataclass(frozen=True)
class Kind:
    """What an operation takes or returns: a vector, a scalar that numba has under the same name, or nothing."""

    name: str
    llvm: ir.Type | None = None


f32x16 = Kind("f32x16", ir.VectorType(f32, 16))
i32x16 = Kind("i32x16", ir.VectorType(i32, 16))
i8x64 = Kind("i8x64", ir.VectorType(i8, 64))
VECTORS = (f32x16, i32x16, i8x64)

intp, int32, float32, void = (Kind(name) for name in ("intp", "int32", "float32", "void"))
#: An integer that is known when the kernel is compiled; it reaches the function as a Python integer.
literal = Kind("literal")


@dataclass(frozen=True)
class Operation:
    """A function ``emit(builder, *values)`` that writes LLVM instructions, and its signature."""

    emit: Callable[..., Any]
    result: Kind
    arguments: tuple[Kind, ...]


#: All operations, and the operators that vectors have: (operator, vector, emit).
OPERATIONS: list[Operation] = []
OPERATORS: list[tuple[Any, Kind, Callable[[Any, Any, Any], Any]]] = []


def op(result: Kind, *arguments: Kind) -> Callable[[Callable[..., Any]], Any]:
    """Makes an operation of a function that writes LLVM instructions; kernels call it without the builder."""

    def decorate(emit: Callable[..., Any]) -> Any:
        OPERATIONS.append(Operation(emit, result, arguments))
        return emit

    return decorate


def _pointer(builder: Any, address: Any, kind: ir.Type) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder: Any, address: Any, kind: ir.Type, align: int = 1) -> Any:
    value = builder.load(_pointer(builder, address, kind))
    value.align = align
    return value


def _store(builder: Any, address: Any, value: Any, align: int = 1) -> None:
    builder.store(value, _pointer(builder, address, value.type)).align = align


def _call(builder: Any, name: str, result: ir.Type, *values: Any) -> Any:
    """Calls an LLVM intrinsic."""
    kind = ir.FunctionType(result, [v.type for v in values])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, values)


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    kind = ir.VectorType(value.type, lanes)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(i32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(i32, lanes), [0] * lanes))


def _constant(value: float | int, element: ir.Type, lanes: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


# -- Loads and stores ----------------------------------------------------------------------------------------------


@op(f32x16, intp)
def load_f32x16(b, address):
    return _load(b, address, f32x16.llvm)


@op(i32x16, intp)
def load_i32x16(b, address):
    return _load(b, address, i32x16.llvm)


@op(i8x64, intp)
def load_i8x64(b, address):
    return _load(b, address, i8x64.llvm)


@op(f32x16, intp)
def load_f16x16(b, address):
    """Sixteen halves, widened."""
    return _widen_half(b, _load(b, address, ir.VectorType(i16, 16)))


@op(f32x16, intp)
def load_s8x16(b, address):
    """Sixteen signed bytes, widened."""
    return b.sitofp(_load(b, address, ir.VectorType(i8, 16)), f32x16.llvm)


@op(f32x16, intp)
def load_bf16x16(b, address):
    """Sixteen bfloat16, widened: they are the upper halves of float32."""
    bits = b.zext(_load(b, address, ir.VectorType(i16, 16)), i32x16.llvm)
    return b.bitcast(b.shl(bits, _constant(16, i32, 16)), f32x16.llvm)


@op(void, intp, i8x64)
def store_i8x64(b, address, value):
    _store(b, address, value)


@op(void, intp, f32x16)
def store_f32x16(b, address, value):
    _store(b, address, value)


@op(void, intp, f32x16)
def store_s8x16(b, address, value):
    """Rounded to the nearest integer (ties to even); values must lie in -128 … 127."""
    _store(b, address, b.fptosi(_call(b, "llvm.rint.v16f32", f32x16.llvm, value), ir.VectorType(i8, 16)))


@op(void, intp, float32)
def store_s8(b, address, value):
    """Rounded to the nearest integer (ties to even) and clamped to -127 … 127; NaN becomes one of them."""
    for name, bound in (("llvm.maxnum.f32", -127.0), ("llvm.minnum.f32", 127.0), ("llvm.rint.f32", None)):
        more = () if bound is None else (ir.Constant(f32, bound),)
        value = _call(b, name, f32, value, *more)
    _store(b, address, b.fptosi(value, i8))


@op(float32, intp)
def load_f32(b, address):
    return _load(b, address, f32)


@op(int32, intp)
def load_i32(b, address):
    return _load(b, address, i32)


@op(intp, intp)
def load_i64(b, address):
    return _load(b, address, i64)


@op(void, intp, float32)
def store_f32(b, address, value):
    _store(b, address, value)


@op(void, intp, int32)
def store_i32(b, address, value):
    _store(b, address, value)


@op(void, intp, intp)
def store_i64(b, address, value):
    _store(b, address, value)


@op(intp, literal)
def stack(b, n_bytes):
    """The address of ``n_bytes`` of the thread's stack, aligned for vectors, good until the kernel returns."""
    with b.goto_entry_block():
        memory = b.alloca(ir.ArrayType(i8, n_bytes))
        memory.align = 64
        return b.ptrtoint(memory, i64)


@op(void, intp, float32)
def store_f16(b, address, value):
    """One value, rounded to the nearest half; beyond the range of halves, the largest finite one; NaN stays NaN."""
    half = _narrow_half(b, _splat(b, value, 16))
    _store(b, address, b.extract_element(half, ir.Constant(i32, 0)))


def _widen_half(b: Any, bits: Any) -> Any:
    """float32 of sixteen halves, given as i16; exact, with subnormals, infinities and NaNs."""
    if _dot_kind() != "generic":
        return b.fpext(b.bitcast(bits, ir.VectorType(f16, 16)), f32x16.llvm)
    # Without half-precision instructions LLVM would call a library function for each value.  Instead: move
    # exponent and fraction into place, and correct the exponent's bias by a multiplication, which also normalises
    # subnormals.  https://fgiesen.wordpress.com/2012/03/28/half-to-float-done-quic/
    wide = b.zext(bits, i32x16.llvm)
    magnitude = b.shl(b.and_(wide, _constant(0x7FFF, i32, 16)), _constant(13, i32, 16))
    scaled = b.fmul(b.bitcast(magnitude, f32x16.llvm), _constant(2.0**112, f32, 16))
    not_finite = b.icmp_unsigned(">=", magnitude, _constant(0x0F800000, i32, 16))
    special = b.or_(magnitude, _constant(0x7F800000, i32, 16))
    magnitude = b.select(not_finite, special, b.bitcast(scaled, i32x16.llvm))
    sign = b.shl(b.and_(wide, _constant(0x8000, i32, 16)), _constant(16, i32, 16))
    return b.bitcast(b.or_(magnitude, sign), f32x16.llvm)


def _narrow_half(b: Any, value: Any) -> Any:
    """i16 bits of sixteen values, rounded to nearest even and clamped to the finite halves; NaN stays NaN."""
    largest, lowest = _constant(65504.0, f32, 16), _constant(-65504.0, f32, 16)
    value = b.select(b.fcmp_ordered(">", value, largest), largest, value)
    value = b.select(b.fcmp_ordered("<", value, lowest), lowest, value)
    if _dot_kind() != "generic":
        return b.bitcast(b.fptrunc(value, ir.VectorType(f16, 16)), ir.VectorType(i16, 16))
    bits = b.bitcast(value, i32x16.llvm)
    magnitude = b.and_(bits, _constant(0x7FFFFFFF, i32, 16))
    # Subnormal halves: adding 0.5 leaves their bits at the bottom of the sum's fraction, correctly rounded.
    small = b.fadd(b.bitcast(magnitude, f32x16.llvm), _constant(0.5, f32, 16))
    small = b.sub(b.bitcast(small, i32x16.llvm), _constant(0x3F000000, i32, 16))
    # Normal halves: rebias the exponent, and round half to even on the thirteen bits that go.
    odd = b.and_(b.lshr(magnitude, _constant(13, i32, 16)), _constant(1, i32, 16))
    normal = b.add(b.add(magnitude, _constant(((15 - 127) << 23) + 0xFFF, i32, 16)), odd)
    normal = b.lshr(normal, _constant(13, i32, 16))
    is_small = b.icmp_unsigned("<", magnitude, _constant(113 << 23, i32, 16))
    half = b.select(is_small, small, normal)
    is_nan = b.icmp_unsigned(">", magnitude, _constant(0x7F800000, i32, 16))
    half = b.select(is_nan, _constant(0x7E00, i32, 16), half)
    sign = b.lshr(b.and_(bits, _constant(-0x80000000, i32, 16)), _constant(16, i32, 16))
    return b.trunc(b.or_(half, sign), ir.VectorType(i16, 16))


@op(void, intp)
def prefetch(b, address):
    """Begins to bring the cache line at an address near; nothing happens where there is no memory."""
    pointer = _pointer(b, address, i8)
    read, keep, data = (ir.Constant(i32, n) for n in (0, 3, 1))
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
    name = "llvm.prefetch.p0"
    function = b.module.globals.get(name) or ir.Function(b.module, kind, name)
    b.call(function, [pointer, read, keep, data])


# -- Arithmetic ----------------------------------------------------------------------------------------------------


@op(f32x16, float32)
def splat(b, value):
    return _splat(b, value, 16)


@op(f32x16, intp)
def splat_f32(b, address):
    """The float32 at an address, in every lane."""
    return _splat(b, _load(b, address, f32), 16)


@op(f32x16)
def zero_f32x16(b):
    return _constant(0.0, f32, 16)


@op(i32x16)
def zero_i32x16(b):
    return _constant(0, i32, 16)


@op(i32x16)
def lane_numbers(b):
    """0, 1, … 15."""
    return ir.Constant(i32x16.llvm, list(range(16)))


@op(i32x16, int32)
def splat_int(b, value):
    return _splat(b, value, 16)


@op(f32x16, f32x16, f32x16, f32x16)
def fma(b, x, y, z):
    """x * y + z, rounded once where the processor can (LLVM's ``fma`` elsewhere would call a library)."""
    name = "llvm.fmuladd.v16f32" if _dot_kind() == "generic" else "llvm.fma.v16f32"
    return _call(b, name, f32x16.llvm, x, y, z)


@op(float32, float32)
def sqrt(b, x):
    return _call(b, "llvm.sqrt.f32", f32, x)


@op(f32x16, f32x16, f32x16)
def maximum(b, x, y):
    return _call(b, "llvm.maxnum.v16f32", f32x16.llvm, x, y)


@op(f32x16, f32x16, f32x16)
def minimum(b, x, y):
    return _call(b, "llvm.minnum.v16f32", f32x16.llvm, x, y)


@op(f32x16, i32x16)
def to_float(b, x):
    return b.sitofp(x, f32x16.llvm)


@op(i32x16, f32x16)
def to_int_rounded(b, x):
    """The nearest integers, ties to even."""
    return b.fptosi(_call(b, "llvm.rint.v16f32", f32x16.llvm, x), i32x16.llvm)


@op(f32x16, i32x16, i32x16, i32x16, f32x16, f32x16)
def select_between(b, value, low, high, inside, outside):
    """Lane by lane: ``inside`` where low <= value <= high, else ``outside``."""
    above, below = b.icmp_signed(">=", value, low), b.icmp_signed("<=", value, high)
    return b.select(b.and_(above, below), inside, outside)


@op(f32x16, i32x16)
def power_of_two(b, exponent):
    """2 ** exponent for exponents in -126 … 127."""
    biased = b.add(exponent, _constant(127, i32, 16))
    return b.bitcast(b.shl(biased, _constant(23, i32, 16)), f32x16.llvm)


def _reduce(b: Any, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Folds the upper half onto the lower, four times: the same order of additions on every processor."""
    lanes = 16
    while lanes > 1:
        lanes //= 2
        low, high = (
            b.shuffle_vector(x, x, ir.Constant(ir.VectorType(i32, lanes), list(range(start, start + lanes))))
            for start in (0, lanes)
        )
        x = combine(low, high)
    return b.extract_element(x, ir.Constant(i32, 0))


@op(float32, f32x16)
def sum_lanes(b, x):
    return _reduce(b, x, b.fadd)


@op(float32, f32x16)
def max_lanes(b, x):
    def greater(x: Any, y: Any) -> Any:
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    return _reduce(b, x, greater)


@op(float32, f32x16, f32x16)
def largest_magnitude(b, x, y):
    """The largest absolute value in two vectors; NaN if any is NaN."""

    def greater(u: Any, v: Any) -> Any:
        return b.select(b.icmp_signed(">", u, v), u, v)

    # Without their signs floats are in the order of their bits, and NaNs come last.
    bits = [b.and_(b.bitcast(v, i32x16.llvm), _constant(0x7FFFFFFF, i32, 16)) for v in (x, y)]
    return b.bitcast(_reduce(b, greater(*bits), greater), f32)


@op(int32, i32x16)
def sum_int_lanes(b, x):
    return _reduce(b, x, b.add)


def _operator(symbol: Any, vector: Kind, emit: Callable[[Any, Any, Any], Any]) -> None:
    """Lets kernels write ``x + y`` on vectors."""
    OPERATORS.append((symbol, vector, emit))


_operator(operator.add, f32x16, lambda b, x, y: b.fadd(x, y))
_operator(operator.sub, f32x16, lambda b, x, y: b.fsub(x, y))
_operator(operator.mul, f32x16, lambda b, x, y: b.fmul(x, y))
_operator(operator.truediv, f32x16, lambda b, x, y: b.fdiv(x, y))
_operator(operator.add, i32x16, lambda b, x, y: b.add(x, y))
_operator(operator.sub, i32x16, lambda b, x, y: b.sub(x, y))
_operator(operator.or_, i32x16, lambda b, x, y: b.or_(x, y))
_operator(operator.or_, i8x64, lambda b, x, y: b.or_(x, y))


# -- Codes: bytes and parts of bytes ---------------------------------------------------------------------------


@op(i8x64, intp, intp, literal)
def load_bits(b, address, n, mask):
    """(x >> n) & mask for each of 64 bytes x at an address."""
    return _bits(b, _load(b, address, i8x64.llvm), n, mask)


@op(i8x64, intp, intp, literal, literal)
def load_bits_raised(b, address, n, mask, up):
    """((x >> n) & mask) << up for each of 64 bytes x at an address; the result must fit into a byte."""
    words = b.bitcast(_bits(b, _load(b, address, i8x64.llvm), n, mask), ir.VectorType(i16, 32))
    return b.bitcast(b.shl(words, _constant(up, i16, 32)), i8x64.llvm)


def _bits(b: Any, x: Any, n: Any, mask: int) -> Any:
    # No processor shifts bytes.  Words do as well: the mask drops what comes in from the neighbour.
    words = ir.VectorType(i16, 32)
    shifted = b.lshr(b.bitcast(x, words), _splat(b, b.trunc(n, i16), 32))
    return b.and_(b.bitcast(shifted, i8x64.llvm), _constant(mask, i8, 64))


@op(i8x64, intp, literal, literal)
def load_folded(b, words, v, bits):
    """The codes of columns 4 v … 4 v + 3 of the 32 whose folded codes begin at an address."""
    code = _constant(0, i8, 64)
    up = 0
    for word, first, n in FOLDS[bits][v]:
        address = b.add(words, ir.Constant(i64, 64 * word))
        code = b.or_(code, _moved_bits(b, _load(b, address, i8x64.llvm), first, up, n))
        up += n
    return code


@op(i8x64, *[i8x64] * 8, literal, literal)
def folded_word(b, *values):
    """A word of the folded codes of 32 columns, given as eight vectors; then the number of the word, and the bits."""
    *codes, word, bits = values
    folded = _constant(0, i8, 64)
    for code, pieces in zip(codes, FOLDS[bits], strict=True):
        up = 0
        for place, first, n in pieces:
            if place == word:
                folded = b.or_(folded, _moved_bits(b, code, up, first, n))
            up += n
    return folded


def _moved_bits(b: Any, x: Any, first: int, to: int, n: int) -> Any:
    """Bits first … first + n - 1 of each byte as bits to … to + n - 1, the others 0."""
    words = b.bitcast(x, ir.VectorType(i16, 32))
    distance = _constant(abs(to - first), i16, 32)
    moved = b.shl(words, distance) if to > first else b.lshr(words, distance)  # see `_bits`
    return b.and_(b.bitcast(moved, i8x64.llvm), _constant(((1 << n) - 1) << to, i8, 64))


@op(i32x16, i32x16, literal)
def shift_left(b, x, n):
    return b.shl(x, _constant(n, i32, 16))


@op(i32x16, i32x16, literal)
def shift_right(b, x, n):
    return b.lshr(x, _constant(n, i32, 16))


@op(i32x16, i32x16, literal)
def mask(b, x, bits):
    return b.and_(x, _constant(bits, i32, 16))


@op(i32x16, i32x16, literal)
def unsigned_byte(b, x, n):
    """Byte n of each word."""
    return b.and_(b.lshr(x, _constant(8 * n, i32, 16)), _constant(255, i32, 16))


@op(i32x16, i32x16, literal)
def signed_byte(b, x, n):
    """Byte n of each word, signed."""
    return b.ashr(b.shl(x, _constant(24 - 8 * n, i32, 16)), _constant(24, i32, 16))


@op(i32x16, i32x16)
def twice(b, x):
    """Words that hold the same 16-bit number twice; the numbers lie in -32768 … 32767."""
    return b.or_(b.and_(x, _constant(0xFFFF, i32, 16)), b.shl(x, _constant(16, i32, 16)))


@op(i32x16, i32x16, literal)
def unsigned_byte_twice(b, x, n):
    """Byte n of each word as a 16-bit number, twice."""
    return _bytes_of_words(b, x, [n, None, n, None])


@op(i32x16, i32x16, literal)
def signed_byte_twice(b, x, n):
    """The same, signed."""
    return _shifted_pairs(b, _bytes_of_words(b, x, [None, n, None, n]), 8)


@op(i32x16, i32x16, literal)
def unsigned_byte_pair(b, x, n):
    """Bytes n and n + 1 of each word as a pair of 16-bit numbers."""
    return _bytes_of_words(b, x, [n, None, n + 1, None])


@op(i32x16, i32x16, literal, literal)
def signed_byte_pair(b, x, n, up):
    """The same, signed, and times 2 ** up."""
    return _shifted_pairs(b, _bytes_of_words(b, x, [None, n, None, n + 1]), 8 - up)


def _bytes_of_words(b: Any, x: Any, chosen: Sequence[int | None]) -> Any:
    """Words whose bytes are the chosen ones of each word, or 0."""
    if _dot_kind() == "generic":  # which has no instruction for this
        word = _constant(0, i32, 16)
        for place, n in enumerate(chosen):
            if n is not None:
                byte = b.and_(b.lshr(x, _constant(8 * n, i32, 16)), _constant(255, i32, 16))
                word = b.or_(word, b.shl(byte, _constant(8 * place, i32, 16)))
        return word
    zero = 64
    lanes = [zero if n is None else 4 * word + n for word in range(16) for n in chosen]
    every = ir.Constant(ir.VectorType(i32, 64), lanes)
    shuffled = b.shuffle_vector(b.bitcast(x, i8x64.llvm), _constant(0, i8, 64), every)
    return b.bitcast(shuffled, i32x16.llvm)


def _shifted_pairs(b: Any, x: Any, n: int) -> Any:
    """Both 16-bit numbers of each word shifted right, with their signs."""
    return b.bitcast(b.ashr(b.bitcast(x, ir.VectorType(i16, 32)), _constant(n, i16, 32)), i32x16.llvm)


@op(i32x16, i32x16, literal)
def subtract_from_bytes(b, x, n):
    """Each byte of the words, less n."""
    return b.bitcast(b.sub(b.bitcast(x, i8x64.llvm), _constant(n, i8, 64)), i32x16.llvm)


@op(i32x16, i32x16, i32x16)
def multiply_pairs(b, x, y):
    """In each word, the sum of the products of the two 16-bit numbers of x with those of y."""
    parts = {"maddubs512": 1, "vnni512": 1, "maddubs256": 2, "vnni256": 2}.get(_dot_kind())
    if parts is None:
        sixteen = _constant(16, i32, 16)
        lows = [b.ashr(b.shl(v, sixteen), sixteen) for v in (x, y)]
        highs = [b.ashr(v, sixteen) for v in (x, y)]
        return b.add(b.mul(*lows), b.mul(*highs))
    words = ir.VectorType(i16, 32)
    pieces = [_halves(b, b.bitcast(v, words), parts) for v in (x, y)]
    kind = ir.VectorType(i32, 16 // parts)
    return _join(b, [_call(b, _WIDEN[parts], kind, u, v) for u, v in zip(*pieces, strict=True)])


@op(i32x16, intp)
def splat_i32(b, address):
    """The int32 at an address, in every lane."""
    return _splat(b, _load(b, address, i32), 16)


@op(i32x16, i32x16)
def low_number(b, x):
    """The first of the two 16-bit numbers in each word."""
    sixteen = _constant(16, i32, 16)
    return b.ashr(b.shl(x, sixteen), sixteen)


@op(i32x16, i32x16)
def high_number(b, x):
    """The second of the two 16-bit numbers in each word."""
    return b.ashr(x, _constant(16, i32, 16))


@op(f32x16, i32x16)
def as_float(b, x):
    """The same bits."""
    return b.bitcast(x, f32x16.llvm)


@op(i32x16, f32x16)
def as_int(b, x):
    """The same bits."""
    return b.bitcast(x, i32x16.llvm)


def lut_op(table: Sequence[int]) -> Any:
    """A function (codes i8x64) -> i8x64 that puts ``table[code]`` for each code; codes lie in 0 … 15."""

    def emit(b: Any, codes: Any) -> Any:
        return _LOOK_UPS[_dot_kind()](b, codes, table)

    # The name becomes part of that of the kernels that use it, which is how they are found in the cache.
    emit.__name__ = "look_up_" + "_".join(map(str, table))
    return op(i8x64, i8x64)(emit)


def _look_up_by(intrinsic: str, parts: int) -> Callable[[Any, Any, Sequence[int]], Any]:
    """Looks up by an instruction that takes 16-byte tables, in vectors of 64 / parts bytes."""

    def look_up(b: Any, codes: Any, table: Sequence[int]) -> Any:
        pieces = _halves(b, codes, parts)
        repeated = ir.Constant(pieces[0].type, list(table) * (4 // parts))
        return _join(b, [_call(b, intrinsic, p.type, repeated, p) for p in pieces])

    return look_up


def _look_up_generic(b: Any, codes: Any, table: Sequence[int]) -> Any:
    """Halves the choice with each bit of the code."""
    choices = [_constant(value, i8, 64) for value in table]
    for bit in (1, 2, 4, 8):
        is_set = b.icmp_unsigned("!=", b.and_(codes, _constant(bit, i8, 64)), _constant(0, i8, 64))
        choices = [b.select(is_set, odd, even) for even, odd in zip(choices[::2], choices[1::2], strict=True)]
    return choices[0]


_PSHUFB_512 = _look_up_by("llvm.x86.avx512.pshuf.b.512", 1)
_PSHUFB_256 = _look_up_by("llvm.x86.avx2.pshuf.b", 2)
_LOOK_UPS = {
    "vnni512": _PSHUFB_512,
    "vnni256": _PSHUFB_256,
    "maddubs512": _PSHUFB_512,
    "maddubs256": _PSHUFB_256,
    "sdot": _look_up_by("llvm.aarch64.neon.tbl1.v16i8", 4),
    "generic": _look_up_generic,
}


# -- Integer dot products ------------------------------------------------------------------------------------------


def dot_op(name: str, n_vectors: int, bits: int) -> Any:
    """A dot product over ``4 * n_vectors`` columns of sixteen rows.

    The function is ``(sums i32x16, w_0 … w_{n-1} i8x64, x) -> i32x16``: lane r of the result is sums[r] plus the
    products of row r's codes with the int8 activations at address x.  Byte 4 r + c of w_v is row r's code in column
    4 v + c.  Activations lie in -127 … 127.

    With ``bits`` below 8 the codes are unsigned numbers of so many bits, else signed bytes.  Then the function takes
    one more argument, an i32x16 with the sum of the activations in every lane: what processors need that multiply
    bytes only if one of them is unsigned.
    """

    def emit(b: Any, sums: Any, *values: Any) -> Any:
        sum_x = values[-1] if bits == 8 else None
        weights, x = values[:n_vectors], values[n_vectors]
        return _DOTS[_dot_kind()](b, sums, _with_activations(b, weights, x), bits, sum_x)

    emit.__name__ = name
    return op(i32x16, i32x16, *[i8x64] * n_vectors, intp, *[i32x16] * (bits == 8))(emit)


def scaled_dot_op(name: str, n_scales: int, bits: int) -> Any:
    """Dot products over 32 columns of sixteen rows, or over two times sixteen, each times a whole number.

    The function is ``(start i32x16, scale_0 … i32x16, w_0 … w_7 i8x64, x) -> f32x16``, where the ``n_scales`` (one or
    two) hold the rows' numbers, -128 … 127, as `twice` does.  Lane r of the result is start[r] plus row r's products;
    where the processor multiplies by whole numbers at once, rounded at the end only.  Codes are unsigned numbers of
    so many bits, at most 6; the rest is as in `dot_op`.
    """

    def emit(b: Any, start: Any, *values: Any) -> Any:
        scales, weights, x = values[:n_scales], values[n_scales:-1], values[-1]
        pairs = _with_activations(b, weights, x)
        n = len(pairs) // n_scales
        parts = [pairs[i : i + n] for i in range(0, len(pairs), n)]
        kind = _dot_kind()
        if kind in _MADDUBS:
            totals = _halves(b, start, _MADDUBS[kind])
            for scale, part in zip(scales, parts, strict=True):
                words = b.bitcast(scale, ir.VectorType(i16, 32))
                totals = _add_products(b, totals, part, bits, _halves(b, words, len(totals)))
            return b.sitofp(_join(b, totals), f32x16.llvm)
        # A dot product is below 2^17 and a number at most 2^7: as floats their product is exact too.
        total = b.sitofp(start, f32x16.llvm)
        for scale, part in zip(scales, parts, strict=True):
            dot = b.sitofp(_DOTS[kind](b, _constant(0, i32, 16), part, bits, None), f32x16.llvm)
            total = fma(b, b.sitofp(high_number(b, scale), f32x16.llvm), dot, total)
        return total

    emit.__name__ = name
    return op(f32x16, *[i32x16] * (1 + n_scales), *[i8x64] * 8, intp)(emit)


def _with_activations(b: Any, weights: Sequence[Any], x: Any) -> list[tuple[Any, Any]]:
    """Each vector of codes with the four activations at x that belong to it, in every word."""
    pairs = []
    for v, w in enumerate(weights):
        four = _load(b, b.add(x, ir.Constant(i64, 4 * v)), i32)
        pairs.append((w, b.bitcast(_splat(b, four, 16), i8x64.llvm)))
    return pairs


def _halves(b: Any, x: Any, parts: int) -> list[Any]:
    """A vector cut into ``parts`` equal pieces."""
    lanes = x.type.count // parts
    return [
        b.shuffle_vector(x, x, ir.Constant(ir.VectorType(i32, lanes), list(range(k * lanes, (k + 1) * lanes))))
        for k in range(parts)
    ]


def _join(b: Any, pieces: list[Any]) -> Any:
    """The pieces, laid end to end."""
    while len(pieces) > 1:
        lanes = pieces[0].type.count * 2
        every = ir.Constant(ir.VectorType(i32, lanes), list(range(lanes)))
        pieces = [b.shuffle_vector(p, q, every) for p, q in zip(pieces[::2], pieces[1::2], strict=True)]
    return pieces[0]


def _dot_vnni(parts: int) -> Callable[..., Any]:
    bits_wide = 512 // parts

    def dot(b: Any, sums: Any, pairs: list[tuple[Any, Any]], bits: int, sum_x: Any) -> Any:
        # Two chains, because each instruction waits for the sum of the one before.
        chains = [sums, _constant(0, i32, 16)]
        for i, (w, x) in enumerate(pairs):
            if bits == 8:  # the instruction takes the first factor as unsigned: w + 128
                w = b.xor(w, _constant(-128, i8, 64))
            pieces = [
                _call(b, f"llvm.x86.avx512.vpdpbusd.{bits_wide}", s.type, s, u, v)
                for s, u, v in zip(*(_halves(b, y, parts) for y in (chains[i % 2], w, x)), strict=True)
            ]
            chains[i % 2] = _join(b, pieces)
        total = b.add(*chains)
        return b.sub(total, b.shl(sum_x, _constant(7, i32, 16))) if bits == 8 else total

    return dot


#: The kinds that multiply by pmaddubsw, and how many registers a vector fills.
_MADDUBS = {"maddubs512": 1, "maddubs256": 2}
#: Products of bytes, and of 16-bit numbers, added in pairs, for so many registers a vector.
_MULTIPLY = {1: "llvm.x86.avx512.pmaddubs.w.512", 2: "llvm.x86.avx2.pmadd.ub.sw"}
_WIDEN = {1: "llvm.x86.avx512.pmaddw.d.512", 2: "llvm.x86.avx2.pmadd.wd"}


def _add_products(
    b: Any, totals: list[Any], pairs: list[tuple[Any, Any]], bits: int, factors: list[Any]
) -> list[Any]:
    """Adds to the totals, cut into registers, the products of codes and activations, times 16-bit factors."""
    parts = len(totals)
    multiply, widen = _MULTIPLY[parts], _WIDEN[parts]
    # pmaddubsw saturates at 16 bits.  Two products of a code and an activation stay below 2 * 127 * largest, so this
    # many of their sums can be added before they have to be widened.
    largest = 128 if bits == 8 else (1 << bits) - 1
    fit = max(1, 32767 // (2 * 127 * largest))
    for start in range(0, len(pairs), fit):
        partial: list[Any] = [None] * parts
        for w, x in pairs[start : start + fit]:
            for k, (u, v) in enumerate(zip(_halves(b, w, parts), _halves(b, x, parts), strict=True)):
                if bits == 8:
                    u, v = _signed_pair(b, u, v)
                product = _call(b, multiply, ir.VectorType(i16, 32 // parts), u, v)
                partial[k] = product if partial[k] is None else b.add(partial[k], product)
        totals = [b.add(t, _call(b, widen, t.type, p, f)) for t, p, f in zip(totals, partial, factors, strict=True)]
    return totals


def _signed_pair(b: Any, w: Any, x: Any) -> tuple[Any, Any]:
    """(|w|, x with w's sign): the same products, with the first factor unsigned."""
    if w.type.count == 32:  # where AVX2 has an instruction
        return _call(b, "llvm.x86.avx2.psign.b", w.type, w, w), _call(b, "llvm.x86.avx2.psign.b", w.type, x, w)
    negative = b.icmp_signed("<", w, _constant(0, i8, 64))
    flip = [b.select(negative, b.sub(_constant(0, i8, 64), v), v) for v in (w, x)]
    return flip[0], flip[1]


def _dot_maddubs(b: Any, sums: Any, pairs: list[tuple[Any, Any]], bits: int, sum_x: Any) -> Any:
    totals = _halves(b, sums, _MADDUBS[_dot_kind()])
    ones = [_constant(1, i16, 32 // len(totals))] * len(totals)
    return _join(b, _add_products(b, totals, pairs, bits, ones))


def _dot_sdot(b: Any, sums: Any, pairs: list[tuple[Any, Any]], bits: int, sum_x: Any) -> Any:
    totals = _halves(b, sums, 4)
    for w, x in pairs:  # codes of fewer than 8 bits are the same number signed
        totals = [
            _call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", t.type, t, u, v)
            for t, u, v in zip(totals, _halves(b, w, 4), _halves(b, x, 4), strict=True)
        ]
    return _join(b, totals)


def _dot_generic(b: Any, sums: Any, pairs: list[tuple[Any, Any]], bits: int, sum_x: Any) -> Any:
    words, doubles = ir.VectorType(i16, 64), ir.VectorType(i32, 32)
    sixteen, thirty_two = _constant(16, i32, 32), _constant(32, i64, 16)
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
    "generic": _dot_generic,
}

dot32_u4 = dot_op("dot32_u4", 8, 4)
dot32_u5 = dot_op("dot32_u5", 8, 5)
dot32_s8 = dot_op("dot32_s8", 8, 8)
dot16_s8 = dot_op("dot16_s8", 4, 8)
scaled_dot32_u4 = scaled_dot_op("scaled_dot32_u4", 1, 4)
scaled_dot32_u5 = scaled_dot_op("scaled_dot32_u5", 1, 5)
scaled_dot16_u2 = scaled_dot_op("scaled_dot16_u2", 2, 2)
scaled_dot16_u3 = scaled_dot_op("scaled_dot16_u3", 2, 3)
scaled_dot16_u6 = scaled_dot_op("scaled_dot16_u6", 2, 6)


# -- Threads and programs ------------------------------------------------------------------------------------------


@op(intp, intp, intp)
def fetch_add(b, address, n):
    """Adds n to the int64 at an address and returns what it was, as one indivisible step."""
    return b.atomic_rmw("add", _pointer(b, address, i64), n, "seq_cst")


@op(intp, intp)
def load_atomic(b, address):
    return b.load_atomic(_pointer(b, address, i64), "seq_cst", 8)


@op(void, intp, intp)
def store_atomic(b, address, value):
    b.store_atomic(value, _pointer(b, address, i64), "seq_cst", 8)


@op(void, intp, intp, intp, intp)
def call_kernel(b, function, arguments, begin, end):
    """Calls the kernel whose machine code begins at ``function``."""
    kind = ir.FunctionType(ir.VoidType(), [i64, i64, i64])
    b.call(b.inttoptr(function, kind.as_pointer()), [arguments, begin, end])


@op(int32, intp, intp)
def call_nap(b, function, microseconds):
    """Calls the C function ``int f(unsigned microseconds)`` at an address."""
    kind = ir.FunctionType(i32, [i32])
    return b.call(b.inttoptr(function, kind.as_pointer()), [b.trunc(microseconds, i32)])


@op(void)
def pause(b):
    """Tells the processor that this is a spin loop."""
    family = _target.family if _target else "any"
    if family == "x86_64":
        _call(b, "llvm.x86.sse2.pause", ir.VoidType())
    elif family == "aarch64":
        _call(b, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(i32, 1))
