"""Operations on codes in kernels: bytes, parts of bytes, and pairs of 16-bit numbers in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from localllm.kernels.cpu.instructions import *
from localllm.quant.bit_packing import BIT_RUNS


@op(i8x64, intp, intp, literal)
def load_bits(b, address, n, mask):
    """(x >> n) & mask for 64 bytes x at an address."""
    return _bits(b, load(b, address, i8x64.llvm), n, mask)


@op(i8x64, intp, intp, literal, literal)
def load_bits_raised(b, address, n, mask, up):
    """((x >> n) & mask) << up for 64 bytes x at an address; the result must fit into a byte."""
    words = b.bitcast(_bits(b, load(b, address, i8x64.llvm), n, mask), ir.VectorType(i16, 32))
    return b.bitcast(b.shl(words, constant(up, i16, 32)), i8x64.llvm)


def _bits(b: Any, x: Any, n: Any, mask: int) -> Any:
    if on_arm():
        return b.and_(b.lshr(x, broadcast(b, b.trunc(n, i8), 64)), constant(mask, i8, 64))
    # x86 cannot shift bytes.  It shifts words, and the mask clears the bits from the neighbouring byte.
    words = ir.VectorType(i16, 32)
    shifted = b.lshr(b.bitcast(x, words), broadcast(b, b.trunc(n, i16), 32))
    return b.and_(b.bitcast(shifted, i8x64.llvm), constant(mask, i8, 64))


def _halves_of(b: Any, address: Any) -> Any:
    """Return the lower halves of eight bytes, followed by their upper halves."""
    x = load(b, address, ir.VectorType(i8, 8))
    return join(b, [b.and_(x, constant(15, i8, 8)), b.lshr(x, constant(4, i8, 8))])


@op(f32x16, intp)
def load_u4x16(b, address):
    """Load sixteen 4-bit codes in the layout of latents (`localllm.kernels.cpu.cache_types`), minus 8."""
    return b.sitofp(b.sub(_halves_of(b, address), constant(8, i8, 16)), f32x16.llvm)


@op(f32x16, intp)
def load_u5x16(b, address):
    """Load sixteen 5-bit codes, minus 16."""
    high = load(b, behind(b, address, 8), i16)
    fifth = b.select(b.bitcast(high, ir.VectorType(ir.IntType(1), 16)), constant(0, i8, 16), constant(-16, i8, 16))
    return b.sitofp(b.add(_halves_of(b, address), fifth), f32x16.llvm)


@op(i8x64, i8x64, intp, literal)
def with_fifth_bits(b, codes, address, half):
    """Add the fifth bits to 4-bit codes of values at four positions (`localllm.kernels.cpu.cache_types`)."""
    bytes_ = join(b, [load(b, address, ir.VectorType(i8, 16))] * 4)
    bits = ir.Constant(i8x64.llvm, [1 << (quarter + 4 * half) for quarter in range(4) for _ in range(16)])
    is_set = b.icmp_unsigned("!=", b.and_(bytes_, bits), constant(0, i8, 64))
    return b.or_(codes, b.select(is_set, constant(16, i8, 64), constant(0, i8, 64)))


@op(i8x64, intp, literal, literal)
def load_bit_packed(b, words, v, bits):
    """Load the codes of columns 4 v … 4 v + 3 from the bit-packed codes of 32 columns."""
    code = constant(0, i8, 64)
    up = 0
    for word, first, n in BIT_RUNS[bits][v]:
        code = b.or_(code, _moved_bits(b, load(b, behind(b, words, 64 * word), i8x64.llvm), first, up, n))
        up += n
    return code


@op(i8x64, *[i8x64] * 8, literal, literal)
def bit_packed_word(b, *values):
    """Return a word of bit-packed codes of 32 columns.  Arguments: eight vectors, the word's number, the bits."""
    *codes, word, bits = values
    packed = constant(0, i8, 64)
    for code, runs in zip(codes, BIT_RUNS[bits], strict=True):
        up = 0
        for packed_word, first, n in runs:
            if packed_word == word:
                packed = b.or_(packed, _moved_bits(b, code, up, first, n))
            up += n
    return packed


def _moved_bits(b: Any, x: Any, first: int, to: int, n: int) -> Any:
    """Move bits first … first + n - 1 of each byte to bits to … to + n - 1, and clear the other bits."""
    words = x if on_arm() else b.bitcast(x, ir.VectorType(i16, 32))
    distance = ir.Constant(words.type, [abs(to - first)] * words.type.count)
    moved = b.shl(words, distance) if to > first else b.lshr(words, distance)  # see `_bits`
    return b.and_(b.bitcast(moved, i8x64.llvm), constant(((1 << n) - 1) << to, i8, 64))


@op(i32x16, i32x16, literal)
def unsigned_byte(b, x, n):
    """Return byte n of each word."""
    return b.and_(b.lshr(x, constant(8 * n, i32, 16)), constant(255, i32, 16))


@op(i32x16, i32x16, literal)
def unsigned_byte_twice(b, x, n):
    """Return byte n of each word as a 16-bit number, twice."""
    return _bytes_of_words(b, x, [n, None, n, None])


@op(i32x16, i32x16, literal)
def signed_byte_twice(b, x, n):
    """Return byte n of each word as a signed 16-bit number, twice."""
    return _shifted_pairs(b, _bytes_of_words(b, x, [None, n, None, n]), 8)


@op(i32x16, i32x16, literal)
def unsigned_byte_pair(b, x, n):
    """Return bytes n and n + 1 of each word as a pair of 16-bit numbers."""
    return _bytes_of_words(b, x, [n, None, n + 1, None])


@op(i32x16, i32x16, literal, literal)
def signed_byte_pair(b, x, n, up):
    """Return bytes n and n + 1 of each word as a pair of signed 16-bit numbers, times 2 ** up."""
    return _shifted_pairs(b, _bytes_of_words(b, x, [None, n, None, n + 1]), 8 - up)


def _bytes_of_words(b: Any, x: Any, bytes_of_word: Sequence[int | None]) -> Any:
    """Return words built from selected bytes of each word; None selects 0."""
    if dot_kind() == "generic":  # no instruction for this
        word = constant(0, i32, 16)
        for position, n in enumerate(bytes_of_word):
            if n is not None:
                byte = b.and_(b.lshr(x, constant(8 * n, i32, 16)), constant(255, i32, 16))
                word = b.or_(word, b.shl(byte, constant(8 * position, i32, 16)))
        return word
    zero = 64
    lanes = [zero if n is None else 4 * word + n for word in range(16) for n in bytes_of_word]
    return b.bitcast(shuffle(b, lanes, b.bitcast(x, i8x64.llvm), constant(0, i8, 64)), i32x16.llvm)


def _shifted_pairs(b: Any, x: Any, n: int) -> Any:
    """Shift both signed 16-bit numbers of each word right."""
    return b.bitcast(b.ashr(b.bitcast(x, ir.VectorType(i16, 32)), constant(n, i16, 32)), i32x16.llvm)


@op(i32x16, i32x16, literal)
def subtract_from_bytes(b, x, n):
    """Subtract n from each byte of the words."""
    return b.bitcast(b.sub(b.bitcast(x, i8x64.llvm), constant(n, i8, 64)), i32x16.llvm)


@op(i32x16, i32x16)
def low_number(b, x):
    """Return the first of the two 16-bit numbers in each word."""
    sixteen = constant(16, i32, 16)
    return b.ashr(b.shl(x, sixteen), sixteen)


@op(i32x16, i32x16)
def high_number(b, x):
    """Return the second of the two 16-bit numbers in each word."""
    return b.ashr(x, constant(16, i32, 16))


def lut_op(table: Sequence[int]) -> Any:
    """Return a function (codes i8x64) -> i8x64 that looks up ``table[code]``; the table has 16 or 8 values."""
    sixteen = [*table] * (16 // len(table))

    def emit(b: Any, codes: Any) -> Any:
        return _LOOK_UPS[dot_kind()](b, codes, sixteen)

    # The name becomes part of the names of kernels that use it, which are their keys in the cache.
    emit.__name__ = "look_up_" + "_".join(map(str, table))
    return op(i8x64, i8x64)(emit)


def _look_up_by(name: str, n_pieces: int) -> Callable[[Any, Any, Sequence[int]], Any]:
    """Return a look-up by an instruction for 16-byte tables, in vectors of 64 / parts bytes."""

    def look_up(b: Any, codes: Any, table: Sequence[int]) -> Any:
        pieces = halves(b, codes, n_pieces)
        repeated = ir.Constant(pieces[0].type, list(table) * (4 // n_pieces))
        return join(b, [intrinsic(b, name, p.type, repeated, p) for p in pieces])

    return look_up


def _look_up_generic(b: Any, codes: Any, table: Sequence[int]) -> Any:
    """Look up by a binary search: each bit of the code halves the table."""
    choices = [constant(value, i8, 64) for value in table]
    for bit in (1, 2, 4, 8):
        is_set = b.icmp_unsigned("!=", b.and_(codes, constant(bit, i8, 64)), constant(0, i8, 64))
        choices = [b.select(is_set, odd, even) for even, odd in zip(choices[::2], choices[1::2], strict=True)]
    return choices[0]


_PSHUFB_512 = _look_up_by("llvm.x86.avx512.pshuf.b.512", 1)
_PSHUFB_256 = _look_up_by("llvm.x86.avx2.pshuf.b", 2)
_TBL = _look_up_by("llvm.aarch64.neon.tbl1.v16i8", 4)
_LOOK_UPS = {
    "vnni512": _PSHUFB_512,
    "vnni256": _PSHUFB_256,
    "maddubs512": _PSHUFB_512,
    "maddubs256": _PSHUFB_256,
    "sdot": _TBL,
    "smmla": _TBL,
    "smull": _TBL,
    "generic": _look_up_generic,
}
