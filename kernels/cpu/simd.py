"""SIMD operations: kernels that read like C intrinsics, written in Python.

This module contains operations on numbers; `localllm.kernels.cpu.codes` contains operations on parts of bytes, and
`localllm.kernels.cpu.dots` products of bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from localllm.kernels.cpu.instructions import *

# -- Loads and stores ----------------------------------------------------------------------------------------------


def _memory_ops(kind: Kind, name: str) -> tuple[Any, Any]:
    """Create the operations ``load_NAME(address)`` and ``store_NAME(address, value)``."""

    def load_op(b: Any, address: Any) -> Any:
        return load(b, address, kind.llvm)

    def store_op(b: Any, address: Any, value: Any) -> None:
        store(b, address, value)

    load_op.__name__, store_op.__name__ = f"load_{name}", f"store_{name}"
    return op(kind, intp)(load_op), op(void, intp, kind)(store_op)


load_f32x16, store_f32x16 = _memory_ops(f32x16, "f32x16")
load_i8x64, store_i8x64 = _memory_ops(i8x64, "i8x64")
load_f32, store_f32 = _memory_ops(float32, "f32")
load_i32, store_i32 = _memory_ops(int32, "i32")
load_i64, store_i64 = _memory_ops(intp, "i64")


@op(i32x16, intp)
def load_i32x16(b, address):
    return load(b, address, i32x16.llvm)


@op(f32x16, intp)
def load_f16x16(b, address):
    return _widen_half(b, load(b, address, ir.VectorType(i16, 16)))


@op(f32x16, intp)
def load_splat_f16(b, address):
    return _widen_half(b, broadcast(b, load(b, address, i16), 16))


@op(f32x16, intp)
def load_s8x16(b, address):
    return b.sitofp(load(b, address, ir.VectorType(i8, 16)), f32x16.llvm)


@op(f32x16, intp)
def load_bf16x16(b, address):
    """Load 16 bfloat16 values as float32: they are the upper halves of float32 values."""
    bits = b.zext(load(b, address, ir.VectorType(i16, 16)), i32x16.llvm)
    return b.bitcast(b.shl(bits, constant(16, i32, 16)), f32x16.llvm)


@op(void, intp, f32x16)
def store_s16x16(b, address, value):
    """Store values in -32768 … 32767, rounded to the nearest 16-bit number (ties to even)."""
    store(b, address, b.fptosi(intrinsic(b, "llvm.rint.v16f32", f32x16.llvm, value), ir.VectorType(i16, 16)))


@op(intp, float32, float32)
def rounded(b, value, bound):
    """Return the nearest integer (ties to even), clamped to -bound … bound; -bound or bound for NaN."""
    for name, more in (("llvm.maxnum.f32", [b.fneg(bound)]), ("llvm.minnum.f32", [bound]), ("llvm.rint.f32", [])):
        value = intrinsic(b, name, f32, value, *more)
    return b.fptosi(value, i64)


@op(void, intp, intp)
def store_i8(b, address, value):
    store(b, address, b.trunc(value, i8))


@op(void, intp, intp)
def copy_i8(b, source, target):
    store(b, target, load(b, source, i8))


@op(void, intp, intp)
def copy_i16(b, source, target):
    store(b, target, load(b, source, i16))


@op(intp, literal)
def stack(b, n_bytes):
    """Return the address of ``n_bytes`` on the stack, aligned for vectors, valid until the kernel returns."""
    with b.goto_entry_block():
        memory = b.alloca(ir.ArrayType(i8, n_bytes))
        memory.align = 64
        return b.ptrtoint(memory, i64)


@op(void, intp, float32)
def store_f16(b, address, value):
    """Store one value, rounded to the nearest float16 and clamped to its finite range; NaN stays NaN."""
    half = _narrow_half(b, broadcast(b, value, 16))
    store(b, address, b.extract_element(half, ir.Constant(i32, 0)))


def _widen_half(b: Any, bits: Any) -> Any:
    """Return sixteen float16 values, given as i16, as float32; exact, with subnormals, infinities and NaNs."""
    if dot_kind() != "generic":
        return b.fpext(b.bitcast(bits, ir.VectorType(f16, 16)), f32x16.llvm)
    # Without half-precision instructions LLVM would call a library function for each value.  Instead: move
    # exponent and fraction into place, and correct the exponent's bias by a multiplication, which also normalises
    # subnormals.  https://fgiesen.wordpress.com/2012/03/28/half-to-float-done-quic/
    wide = b.zext(bits, i32x16.llvm)
    magnitude = b.shl(b.and_(wide, constant(0x7FFF, i32, 16)), constant(13, i32, 16))
    scaled = b.fmul(b.bitcast(magnitude, f32x16.llvm), constant(2.0**112, f32, 16))
    not_finite = b.icmp_unsigned(">=", magnitude, constant(0x0F800000, i32, 16))
    special = b.or_(magnitude, constant(0x7F800000, i32, 16))
    magnitude = b.select(not_finite, special, b.bitcast(scaled, i32x16.llvm))
    sign = b.shl(b.and_(wide, constant(0x8000, i32, 16)), constant(16, i32, 16))
    return b.bitcast(b.or_(magnitude, sign), f32x16.llvm)


def _narrow_half(b: Any, value: Any) -> Any:
    """Return the i16 bits of sixteen values, rounded to nearest even and clamped to finite float16; NaN stays NaN."""
    largest, lowest = constant(65504.0, f32, 16), constant(-65504.0, f32, 16)
    value = b.select(b.fcmp_ordered(">", value, largest), largest, value)
    value = b.select(b.fcmp_ordered("<", value, lowest), lowest, value)
    if dot_kind() != "generic":
        return b.bitcast(b.fptrunc(value, ir.VectorType(f16, 16)), ir.VectorType(i16, 16))
    bits = b.bitcast(value, i32x16.llvm)
    magnitude = b.and_(bits, constant(0x7FFFFFFF, i32, 16))
    # Subnormal halves: adding 0.5 leaves their bits at the bottom of the sum's fraction, correctly rounded.
    small = b.fadd(b.bitcast(magnitude, f32x16.llvm), constant(0.5, f32, 16))
    small = b.sub(b.bitcast(small, i32x16.llvm), constant(0x3F000000, i32, 16))
    # Normal halves: rebias the exponent, and round half to even on the thirteen bits that go.
    odd = b.and_(b.lshr(magnitude, constant(13, i32, 16)), constant(1, i32, 16))
    normal = b.add(b.add(magnitude, constant(((15 - 127) << 23) + 0xFFF, i32, 16)), odd)
    normal = b.lshr(normal, constant(13, i32, 16))
    is_small = b.icmp_unsigned("<", magnitude, constant(113 << 23, i32, 16))
    half = b.select(is_small, small, normal)
    is_nan = b.icmp_unsigned(">", magnitude, constant(0x7F800000, i32, 16))
    half = b.select(is_nan, constant(0x7E00, i32, 16), half)
    sign = b.lshr(b.and_(bits, constant(-0x80000000, i32, 16)), constant(16, i32, 16))
    return b.trunc(b.or_(half, sign), ir.VectorType(i16, 16))


@op(void, intp)
def prefetch(b, address):
    """Prefetch the cache line at an address; does nothing for invalid addresses."""
    pointer = pointer_to(b, address, i8)
    read, keep, data = (ir.Constant(i32, n) for n in (0, 3, 1))
    function_type = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
    name = "llvm.prefetch.p0"
    function = b.module.globals.get(name) or ir.Function(b.module, function_type, name)
    b.call(function, [pointer, read, keep, data])


@op(intp, intp)
def opaque(b, address):
    """Return the same address, opaque to the compiler, which then loads its content again."""
    return b.asm(ir.FunctionType(i64, [i64]), "", "=r,0", [address], side_effect=False)


@op(void, intp)
def flush_line(b, address):
    """Flush the cache line at an address from all caches, on x86.  On Arm most systems do not allow it."""
    if lowering_target().family == "x86_64":
        intrinsic(b, "llvm.x86.sse2.clflush", ir.VoidType(), pointer_to(b, address, i8))


# -- Arithmetic ----------------------------------------------------------------------------------------------------


@op(f32x16, float32)
def splat(b, value):
    return broadcast(b, value, 16)


@op(f32x16, intp)
def load_splat_f32(b, address):
    return broadcast(b, load(b, address, f32), 16)


@op(f32x16)
def zero_f32x16(b):
    return constant(0.0, f32, 16)


@op(i32x16, intp)
def load_splat_i32(b, address):
    return broadcast(b, load(b, address, i32), 16)


@op(i32x16)
def zero_i32x16(b):
    return constant(0, i32, 16)


@op(i32x16)
def lane_numbers(b):
    """Return 0, 1, … 15."""
    return ir.Constant(i32x16.llvm, list(range(16)))


@op(i32x16, int32)
def splat_int(b, value):
    return broadcast(b, value, 16)


@op(f32x16, f32x16, f32x16, f32x16)
def fma(b, x, y, z):
    """Return x * y + z, rounded once if the processor can (otherwise LLVM's ``fma`` would call a library)."""
    name = "llvm.fmuladd.v16f32" if dot_kind() == "generic" else "llvm.fma.v16f32"
    return intrinsic(b, name, f32x16.llvm, x, y, z)


def polynomial_op(name: str, coefficients: Sequence[float]) -> Any:
    """Return an operation that computes a polynomial by Horner's rule; the highest power's coefficient is first."""

    def emit(b: Any, x: Any) -> Any:
        total, *others = (constant(c, f32, 16) for c in coefficients)
        for c in others:
            total = fma(b, total, x, c)
        return total

    emit.__name__ = name
    return op(f32x16, f32x16)(emit)


@op(float32, float32)
def sqrt(b, x):
    return intrinsic(b, "llvm.sqrt.f32", f32, x)


@op(f32x16, f32x16)
def sqrt_lanes(b, x):
    return intrinsic(b, "llvm.sqrt.v16f32", f32x16.llvm, x)


@op(f32x16, f32x16, f32x16)
def maximum(b, x, y):
    return intrinsic(b, "llvm.maxnum.v16f32", f32x16.llvm, x, y)


@op(f32x16, f32x16, f32x16)
def minimum(b, x, y):
    return intrinsic(b, "llvm.minnum.v16f32", f32x16.llvm, x, y)


@op(f32x16, i32x16)
def to_float(b, x):
    return b.sitofp(x, f32x16.llvm)


@op(i32x16, f32x16)
def to_int_rounded(b, x):
    """Return the nearest integers, ties to even."""
    return b.fptosi(intrinsic(b, "llvm.rint.v16f32", f32x16.llvm, x), i32x16.llvm)


@op(f32x16, i32x16, i32x16, i32x16, f32x16, f32x16)
def select_between(b, value, low, high, inside, outside):
    """Return ``inside`` in lanes with low <= value <= high, else ``outside``."""
    above, below = b.icmp_signed(">=", value, low), b.icmp_signed("<=", value, high)
    return b.select(b.and_(above, below), inside, outside)


@op(f32x16, i32x16)
def power_of_two(b, exponent):
    """Return 2 ** exponent for exponents in -126 … 127."""
    biased = b.add(exponent, constant(127, i32, 16))
    return b.bitcast(b.shl(biased, constant(23, i32, 16)), f32x16.llvm)


def _fold(b: Any, vectors: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """Return a vector whose lane i combines the 16 lanes of vector i; there are 1, 2, 4, 8 or 16 vectors.

    Upper halves are folded onto lower halves, four times, and two folded vectors are joined.  The order of additions
    in a vector is the same on every processor, and for any number of vectors.
    """
    half = 16
    while half > 1:
        half //= 2
        pairs = [*zip(vectors[::2], vectors[1::2], strict=False)] or [(vectors[0], vectors[0])]
        n = vectors[0].type.count * len(vectors) // (2 * len(pairs))
        low = [2 * half * (i // half) + i % half for i in range(n)]
        lanes = low, [i + half for i in low]
        vectors = [combine(*(shuffle(b, half_lanes, x, y) for half_lanes in lanes)) for x, y in pairs]
    return vectors[0]


def _reduce(b: Any, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
    return b.extract_element(_fold(b, [x], combine), ir.Constant(i32, 0))


@op(intp, intp)
def trailing_zeros(b, x):
    """Return the number of low zero bits of a number other than 0."""
    return intrinsic(b, "llvm.cttz.i64", i64, x, ir.Constant(ir.IntType(1), 1))


@op(f32x16, f32x16)
def hadamard_lanes(b, x):
    """Multiply the lanes by the Hadamard matrix of sixteen rows, whose elements are 1 or -1."""
    for step in (1, 2, 4, 8):
        partners = shuffle(b, [i ^ step for i in range(16)], x)
        signs = ir.Constant(f32x16.llvm, [-1.0 if i & step else 1.0 for i in range(16)])
        x = b.fadd(partners, b.fmul(x, signs))
    return x


@op(float32, f32x16)
def sum_lanes(b, x):
    return _reduce(b, x, b.fadd)


@op(f32x16, *[f32x16] * 4)
def sum_lanes_of_4(b, *vectors):
    """Return `sum_lanes` of each vector, in lanes 0 to 3, repeated in the following groups of four lanes."""
    sums = _fold(b, vectors, b.fadd)
    return shuffle(b, [0, 1, 2, 3] * 4, sums)


@op(f32x16, *[f32x16] * 16)
def sum_lanes_of_16(b, *vectors):
    """Return `sum_lanes` of each vector."""
    return _fold(b, vectors, b.fadd)


@op(float32, f32x16)
def max_lanes(b, x):
    def greater(x: Any, y: Any) -> Any:
        return b.select(b.fcmp_ordered(">", x, y), x, y)

    return _reduce(b, x, greater)


@op(float32, f32x16, f32x16)
def largest_magnitude(b, x, y):
    """Return the largest absolute value in two vectors; NaN if any value is NaN."""

    def greater(u: Any, v: Any) -> Any:
        return b.select(b.icmp_signed(">", u, v), u, v)

    # Without their signs, floats have the order of their bits, and NaNs are the largest.
    bits = [b.and_(b.bitcast(v, i32x16.llvm), constant(0x7FFFFFFF, i32, 16)) for v in (x, y)]
    return b.bitcast(_reduce(b, greater(*bits), greater), f32)


@op(int32, i32x16)
def sum_int_lanes(b, x):
    return _reduce(b, x, b.add)


@op(i32x16, i32x16, literal)
def shift_left(b, x, n):
    return b.shl(x, constant(n, i32, 16))


@op(i32x16, i32x16, literal)
def shift_right(b, x, n):
    return b.lshr(x, constant(n, i32, 16))


@op(i32x16, i32x16, literal)
def shift_right_signed(b, x, n):
    return b.ashr(x, constant(n, i32, 16))


@op(void, intp, i32x16)
def store_bytes(b, address, x):
    """Store the lowest byte of each lane."""
    store(b, address, b.trunc(x, ir.VectorType(i8, 16)))


@op(i32x16, i32x16, literal)
def mask(b, x, bits):
    return b.and_(x, constant(bits, i32, 16))


@op(f32x16, i32x16)
def as_float(b, x):
    """Return the same bits as floats."""
    return b.bitcast(x, f32x16.llvm)


@op(i32x16, f32x16)
def as_int(b, x):
    """Return the same bits as integers."""
    return b.bitcast(x, i32x16.llvm)


#: Operators that kernels may use on vectors.
OPERATORS += [
    (operator.add, f32x16, lambda b, x, y: b.fadd(x, y)),
    (operator.sub, f32x16, lambda b, x, y: b.fsub(x, y)),
    (operator.mul, f32x16, lambda b, x, y: b.fmul(x, y)),
    (operator.truediv, f32x16, lambda b, x, y: b.fdiv(x, y)),
    (operator.add, i32x16, lambda b, x, y: b.add(x, y)),
    (operator.sub, i32x16, lambda b, x, y: b.sub(x, y)),
    (operator.or_, i32x16, lambda b, x, y: b.or_(x, y)),
    (operator.or_, i8x64, lambda b, x, y: b.or_(x, y)),
]


# -- Threads and programs ------------------------------------------------------------------------------------------


@op(intp, intp, intp)
def fetch_add(b, address, n):
    """Atomically add n to the int64 at an address, and return its previous value."""
    return b.atomic_rmw("add", pointer_to(b, address, i64), n, "seq_cst")


@op(intp, intp)
def load_atomic(b, address):
    return b.load_atomic(pointer_to(b, address, i64), "seq_cst", 8)


@op(void, intp, intp)
def store_atomic(b, address, value):
    b.store_atomic(value, pointer_to(b, address, i64), "seq_cst", 8)


@op(void, intp, intp, intp, intp)
def call_kernel(b, function, arguments, begin, end):
    """Call the kernel whose machine code is at ``function``."""
    function_type = ir.FunctionType(ir.VoidType(), [i64, i64, i64])
    b.call(b.inttoptr(function, function_type.as_pointer()), [arguments, begin, end])


@op(int32, intp, intp)
def call_sleep(b, function, microseconds):
    """Call the C function ``int f(unsigned microseconds)`` at an address."""
    function_type = ir.FunctionType(i32, [i32])
    return b.call(b.inttoptr(function, function_type.as_pointer()), [b.trunc(microseconds, i32)])


@op(intp, intp, intp, intp, intp, intp, intp)
def call_back(b, function, *arguments):
    """Call the C function of five int64 at an address, which returns an int64."""
    function_type = ir.FunctionType(i64, [i64] * 5)
    return b.call(b.inttoptr(function, function_type.as_pointer()), arguments)


@op(void)
def pause(b):
    """Signal a spin loop to the processor."""
    family = lowering_target().family
    if family == "x86_64":
        intrinsic(b, "llvm.x86.sse2.pause", ir.VoidType())
    elif family == "aarch64":
        intrinsic(b, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(i32, 1))


#: Names for ``import *`` in kernels: only the operations.
__all__ = [operation.emit.__name__ for operation in OPERATIONS if operation.emit.__module__ == __name__]
