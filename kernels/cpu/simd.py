"""SIMD vectors as numba types: kernels that read like C intrinsics, written in Python.

A vector is an LLVM vector value of 512 bits, whatever the processor: LLVM splits it over narrower registers.
Addresses are plain integers (numba's ``intp``), and nothing checks them: every index is validated before it
reaches a kernel.

What depends on the instruction set (products of bytes, half precision) asks `lowering_for` which one the code at
hand is being compiled for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.typing import signature
from numba.extending import intrinsic, lower_builtin, register_model
from numba.core.typing.templates import ConcreteTemplate, infer_global
import operator

from localllm.kernels.cpu.target import Target

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


i1, i8, i16, i32, i64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
f16, f32 = ir.HalfType(), ir.FloatType()


class Vector(types.Type):  # type: ignore[misc]
    """An LLVM vector: ``lanes`` values of ``element``."""

    def __init__(self, name: str, element: ir.Type, lanes: int) -> None:
        self.llvm = ir.VectorType(element, lanes)
        super().__init__(name=name)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


f32x16 = Vector("f32x16", f32, 16)
i32x16 = Vector("i32x16", i32, 16)
i8x64 = Vector("i8x64", i8, 64)
intp, float32 = types.intp, types.float32


#: In an operation's signature: an integer that is known when the kernel is compiled.
literal = object()


def op(result: types.Type, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Makes a numba function of ``emit(builder, *values)``, which writes LLVM instructions.

    Parameters marked `literal` reach ``emit`` as Python integers.
    """
    is_literal = [kind is literal for kind in arguments]

    def decorate(emit: Callable[..., Any]) -> Any:
        def typed(*given: Any) -> Any:
            numbers = [g.literal_value if is_literal[i] else None for i, g in enumerate(given)]

            def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
                merged = [n if lit else v for n, lit, v in zip(numbers, is_literal, values, strict=True)]
                value = emit(builder, *merged)
                return context.get_dummy_value() if result is types.void else value

            return result(*[g if lit else a for g, lit, a in zip(given, is_literal, arguments, strict=True)]), codegen

        # numba counts an intrinsic's parameters, so give it as many as the operation has.
        names = "".join(f", a{i}" for i in range(len(arguments)))
        scope: dict[str, Any] = {"typed": typed}
        exec(f"def {emit.__name__}(typingctx{names}):\n    return typed({names[2:]})", scope)
        function = scope[emit.__name__]
        function.__doc__ = emit.__doc__
        return intrinsic(prefer_literal=True)(function)

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
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


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
def load_bf16x16(b, address):
    """Sixteen bfloat16, widened: they are the upper halves of float32."""
    bits = b.zext(_load(b, address, ir.VectorType(i16, 16)), i32x16.llvm)
    return b.bitcast(b.shl(bits, _constant(16, i32, 16)), f32x16.llvm)


@op(f32x16, intp)
def load_u8x16(b, address):
    """Sixteen unsigned bytes, as float32."""
    return b.uitofp(_load(b, address, ir.VectorType(i8, 16)), f32x16.llvm)


@op(f32x16, intp)
def load_s8x16(b, address):
    """Sixteen signed bytes, as float32."""
    return b.sitofp(_load(b, address, ir.VectorType(i8, 16)), f32x16.llvm)


@op(types.void, intp, f32x16)
def store_f32x16(b, address, value):
    _store(b, address, value)


@op(types.void, intp, i8x64)
def store_i8x64(b, address, value):
    _store(b, address, value)


@op(types.void, intp, f32x16)
def store_f16x16(b, address, value):
    """Rounded to the nearest half; beyond the range of halves, the largest finite one."""
    _store(b, address, _narrow_half(b, value))


@op(types.void, intp, f32x16)
def store_s8x16(b, address, value):
    """Rounded to the nearest integer (ties to even); values must lie in -128 … 127."""
    _store(b, address, b.fptosi(_call(b, "llvm.rint.v16f32", f32x16.llvm, value), ir.VectorType(i8, 16)))


@op(float32, intp)
def load_f32(b, address):
    return _load(b, address, f32)


@op(types.int32, intp)
def load_i32(b, address):
    return _load(b, address, i32)


@op(intp, intp)
def load_i64(b, address):
    return _load(b, address, i64)


@op(types.void, intp, float32)
def store_f32(b, address, value):
    _store(b, address, value)


@op(types.void, intp, types.int32)
def store_i32(b, address, value):
    _store(b, address, value)


@op(types.void, intp, float32)
def store_f16(b, address, value):
    """One value, as `store_f16x16` does."""
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
    """i16 bits of sixteen values, rounded to nearest even and clamped to the finite halves (NaN becomes 65504)."""
    value = _call(b, "llvm.minnum.v16f32", f32x16.llvm, value, _constant(65504.0, f32, 16))
    value = _call(b, "llvm.maxnum.v16f32", f32x16.llvm, value, _constant(-65504.0, f32, 16))
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
    sign = b.lshr(b.and_(bits, _constant(-0x80000000, i32, 16)), _constant(16, i32, 16))
    return b.trunc(b.or_(half, sign), ir.VectorType(i16, 16))


# -- Arithmetic ----------------------------------------------------------------------------------------------------


@op(f32x16, float32)
def splat(b, value):
    return _splat(b, value, 16)


@op(f32x16, intp)
def splat_f32(b, address):
    """The float32 at an address, in every lane."""
    return _splat(b, _load(b, address, f32), 16)


@op(i32x16, intp)
def splat_i32(b, address):
    """The int32 at an address, in every lane."""
    return _splat(b, _load(b, address, i32), 16)


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


@op(i32x16, types.int32)
def splat_int(b, value):
    return _splat(b, value, 16)


@op(f32x16, f32x16, f32x16, f32x16)
def fma(b, x, y, z):
    """x * y + z, rounded once where the processor can (LLVM's ``fma`` elsewhere would call a library)."""
    name = "llvm.fmuladd.v16f32" if _dot_kind() == "generic" else "llvm.fma.v16f32"
    return _call(b, name, f32x16.llvm, x, y, z)


@op(f32x16, f32x16, f32x16)
def maximum(b, x, y):
    return _call(b, "llvm.maxnum.v16f32", f32x16.llvm, x, y)


@op(f32x16, f32x16, f32x16)
def minimum(b, x, y):
    return _call(b, "llvm.minnum.v16f32", f32x16.llvm, x, y)


@op(f32x16, f32x16)
def absolute(b, x):
    return _call(b, "llvm.fabs.v16f32", f32x16.llvm, x)


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


@op(types.int32, i32x16)
def sum_int_lanes(b, x):
    return _reduce(b, x, b.add)


def _operator(symbol: Any, vector: Vector, emit: Callable[[Any, Any, Any], Any]) -> None:
    """Lets kernels write ``x + y`` on vectors."""

    class Template(ConcreteTemplate):  # type: ignore[misc]
        cases = [signature(vector, vector, vector)]

    infer_global(symbol)(Template)

    @lower_builtin(symbol, vector, vector)  # type: ignore[untyped-decorator]
    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return emit(builder, *args)


_operator(operator.add, f32x16, lambda b, x, y: b.fadd(x, y))
_operator(operator.sub, f32x16, lambda b, x, y: b.fsub(x, y))
_operator(operator.mul, f32x16, lambda b, x, y: b.fmul(x, y))
_operator(operator.truediv, f32x16, lambda b, x, y: b.fdiv(x, y))
_operator(operator.add, i32x16, lambda b, x, y: b.add(x, y))
_operator(operator.sub, i32x16, lambda b, x, y: b.sub(x, y))
_operator(operator.or_, i32x16, lambda b, x, y: b.or_(x, y))
_operator(operator.or_, i8x64, lambda b, x, y: b.or_(x, y))


# -- Codes: bytes and parts of bytes ---------------------------------------------------------------------------


def _shift_bytes_right(b: Any, x: Any, n: int) -> Any:
    """Each byte shifted; what comes in from its neighbour must be masked off (no processor shifts bytes)."""
    words = ir.VectorType(i16, 32)
    return b.bitcast(b.lshr(b.bitcast(x, words), _constant(n, i16, 32)), i8x64.llvm)


def _shift_bytes_left(b: Any, x: Any, n: int) -> Any:
    words = ir.VectorType(i16, 32)
    return b.bitcast(b.shl(b.bitcast(x, words), _constant(n, i16, 32)), i8x64.llvm)


@op(i8x64, i8x64, literal, literal)
def shift_mask(b, x, shift, mask):
    """(x >> shift) & mask, byte by byte; a negative shift goes left.  The mask drops what neighbours push in."""
    if shift > 0:
        x = _shift_bytes_right(b, x, shift)
    elif shift < 0:
        x = _shift_bytes_left(b, x, -shift)
    return b.and_(x, _constant(mask, i8, 64))


@op(i8x64, i8x64, intp)
def bit_to_16(b, x, n):
    """Bit n of each byte, worth 16: ((x >> n) & 1) << 4."""
    words = ir.VectorType(i16, 32)
    count = _splat(b, b.trunc(n, i16), 32)
    one = b.and_(b.lshr(b.bitcast(x, words), count), _constant(0x0101, i16, 32))
    return b.bitcast(b.shl(one, _constant(4, i16, 32)), i8x64.llvm)


@op(i32x16, i32x16, literal)
def shift_left(b, x, n):
    return b.shl(x, _constant(n, i32, 16))


@op(i32x16, i32x16, literal)
def shift_right(b, x, n):
    return b.lshr(x, _constant(n, i32, 16))


@op(i32x16, i32x16, literal)
def mask(b, x, bits):
    return b.and_(x, _constant(bits, i32, 16))


@op(f32x16, i32x16, literal)
def unsigned_byte(b, x, n):
    """Byte n of each word, as float32."""
    return b.sitofp(b.and_(b.lshr(x, _constant(8 * n, i32, 16)), _constant(255, i32, 16)), f32x16.llvm)


@op(f32x16, i32x16, literal)
def signed_byte(b, x, n):
    """Byte n of each word, signed, as float32."""
    high = b.shl(x, _constant(24 - 8 * n, i32, 16))
    return b.sitofp(b.ashr(high, _constant(24, i32, 16)), f32x16.llvm)


# -- Integer dot products ------------------------------------------------------------------------------------------


def dot_op(name: str, n_vectors: int, bits: int) -> Any:
    """A dot product over ``4 * n_vectors`` columns of sixteen rows.

    The function is ``(sums i32x16, w_0 … w_{n-1} i8x64, x) -> i32x16``: lane r of the result is sums[r] plus the
    products of row r's codes with the int8 activations at address x.  Byte 4 r + c of w_v is row r's code in column
    4 v + c.  With ``bits`` below 8 the codes are unsigned numbers of so many bits, else signed bytes.
    Activations lie in -127 … 127.
    """

    def emit(b: Any, sums: Any, *values: Any) -> Any:
        *weights, x = values
        pairs = []
        for v, w in enumerate(weights):
            four = _load(b, b.add(x, ir.Constant(i64, 4 * v)), i32)
            pairs.append((w, b.bitcast(_splat(b, four, 16), i8x64.llvm)))
        return _DOTS[_dot_kind()](b, sums, pairs, bits)

    emit.__name__ = name
    return op(i32x16, i32x16, *[i8x64] * n_vectors, intp)(emit)


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


def _signed_pair(b: Any, w: Any, x: Any) -> tuple[Any, Any]:
    """(|w|, x with w's sign): the same products, with the first factor unsigned."""
    negative = b.icmp_signed("<", w, _constant(0, i8, 64))
    flip = [b.select(negative, b.sub(_constant(0, i8, 64), v), v) for v in (w, x)]
    return flip[0], flip[1]


def _dot_vnni(parts: int) -> Callable[..., Any]:
    bits_wide = 512 // parts

    def dot(b: Any, sums: Any, pairs: list[tuple[Any, Any]], bits: int) -> Any:
        # Two chains, because each instruction waits for the sum of the one before.
        chains = [sums, _constant(0, i32, 16)]
        for i, (w, x) in enumerate(pairs):
            if bits == 8:
                w, x = _signed_pair(b, w, x)
            pieces = [
                _call(b, f"llvm.x86.avx512.vpdpbusd.{bits_wide}", s.type, s, u, v)
                for s, u, v in zip(*(_halves(b, y, parts) for y in (chains[i % 2], w, x)), strict=True)
            ]
            chains[i % 2] = _join(b, pieces)
        return b.add(*chains)

    return dot


def _dot_maddubs(parts: int) -> Callable[..., Any]:
    multiply, widen = {
        1: ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
        2: ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    }[parts]

    def dot(b: Any, sums: Any, pairs: list[tuple[Any, Any]], bits: int) -> Any:
        # pmaddubsw saturates at 16 bits.  Two products of a code and an activation stay below 2 * 127 * largest,
        # so this many of their sums can be added before they have to be widened.
        largest = 128 if bits == 8 else (1 << bits) - 1
        fit = max(1, 32767 // (2 * 127 * largest))
        words, ones = ir.VectorType(i16, 32 // parts), _constant(1, i16, 32 // parts)
        totals = _halves(b, sums, parts)
        for start in range(0, len(pairs), fit):
            partial: list[Any] = [None] * parts
            for w, x in pairs[start : start + fit]:
                if bits == 8:
                    w, x = _signed_pair(b, w, x)
                for k, (u, v) in enumerate(zip(_halves(b, w, parts), _halves(b, x, parts), strict=True)):
                    product = _call(b, multiply, words, u, v)
                    partial[k] = product if partial[k] is None else b.add(partial[k], product)
            totals = [
                b.add(t, _call(b, widen, t.type, p, ones)) for t, p in zip(totals, partial, strict=True)
            ]
        return _join(b, totals)

    return dot


def _dot_sdot(b: Any, sums: Any, pairs: list[tuple[Any, Any]], bits: int) -> Any:
    totals = _halves(b, sums, 4)
    for w, x in pairs:  # codes of fewer than 8 bits are the same number signed
        totals = [
            _call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", t.type, t, u, v)
            for t, u, v in zip(totals, _halves(b, w, 4), _halves(b, x, 4), strict=True)
        ]
    return _join(b, totals)


def _dot_generic(b: Any, sums: Any, pairs: list[tuple[Any, Any]], bits: int) -> Any:
    words = ir.VectorType(i16, 64)
    for w, x in pairs:
        product = b.mul(b.sext(w, words), b.sext(x, words))  # at most 128 * 127: fits
        for c in range(4):
            column = ir.Constant(ir.VectorType(i32, 16), list(range(c, 64, 4)))
            sums = b.add(sums, b.sext(b.shuffle_vector(product, product, column), i32x16.llvm))
    return sums


_DOTS = {
    "vnni512": _dot_vnni(1),
    "vnni256": _dot_vnni(2),
    "maddubs512": _dot_maddubs(1),
    "maddubs256": _dot_maddubs(2),
    "sdot": _dot_sdot,
    "generic": _dot_generic,
}

dot32_u4 = dot_op("dot32_u4", 8, 4)
dot32_u5 = dot_op("dot32_u5", 8, 5)
dot32_s8 = dot_op("dot32_s8", 8, 8)
dot16_u6 = dot_op("dot16_u6", 4, 6)


# -- Threads and programs ------------------------------------------------------------------------------------------


@op(intp, intp, intp)
def fetch_add(b, address, n):
    """Adds n to the int64 at an address and returns what it was, as one indivisible step."""
    return b.atomic_rmw("add", _pointer(b, address, i64), n, "seq_cst")


@op(intp, intp)
def load_atomic(b, address):
    return b.load_atomic(_pointer(b, address, i64), "seq_cst", 8)


@op(types.void, intp, intp)
def store_atomic(b, address, value):
    b.store_atomic(value, _pointer(b, address, i64), "seq_cst", 8)


@op(types.void, intp, intp, intp, intp)
def call_kernel(b, function, arguments, begin, end):
    """Calls the kernel whose machine code begins at ``function``."""
    kind = ir.FunctionType(ir.VoidType(), [i64, i64, i64])
    b.call(b.inttoptr(function, kind.as_pointer()), [arguments, begin, end])


@op(types.int32, intp)
def call_yield(b, function):
    """Calls the C function ``int f(void)`` at an address."""
    return b.call(b.inttoptr(function, ir.FunctionType(i32, []).as_pointer()), [])


@op(types.void)
def pause(b):
    """Tells the processor that this is a spin loop."""
    hint = {"x86_64": "pause", "aarch64": "yield"}.get(_target.family if _target else "any")
    if hint:
        b.asm(ir.FunctionType(ir.VoidType(), []), hint, "", [], side_effect=True)
