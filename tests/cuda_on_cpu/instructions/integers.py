"""Integer arithmetic, logic, shifts and bit fields.  floats.py translates floats of the same opcodes."""

from __future__ import annotations

from tests.cuda_on_cpu.instructions.floats import FLOAT_TYPES, float_arithmetic
from tests.cuda_on_cpu.instructions.table import C_TYPES, Operation, translates
from tests.cuda_on_cpu.ptx import TYPE_BYTES

_INTS = ("u16", "s16", "u32", "s32", "u64", "s64")
_BITS = ("b16", "b32", "b64")


def _unsigned(type_: str) -> str:
    """Compute with unsigned types, because PTX defines signed overflow and C++ does not."""
    return "u" + type_[1:]


def _wide(type_: str) -> str:
    return f"{type_[0]}{2 * int(type_[1:])}"


@translates("add", "sub", "mul", "mad", "neg", "abs", "min", "max", "div")
def arithmetic(op: Operation) -> str:
    if op.modifiers[-1] in FLOAT_TYPES:
        return float_arithmetic(op)
    type_ = op.type(*_INTS)
    return {
        "add": _add,
        "sub": _add,
        "mul": _mul,
        "mad": _mul,
        "neg": _neg,
        "abs": _neg,
        "min": _min,
        "max": _min,
        "div": _div,
    }[op.instruction.opcode](op, type_)


def _add(op: Operation, type_: str) -> str:
    op.count(3)
    sign = "+" if op.instruction.opcode == "add" else "-"
    if op.flag("sat"):
        if type_ != "s32":
            raise op.refuse(".sat is for s32")
        return op.result(type_, f"clamp_int<s32>((s64){op.read(1, type_)} {sign} (s64){op.read(2, type_)})")
    wrapping = _unsigned(type_)
    return op.result(type_, f"{op.read(1, wrapping)} {sign} {op.read(2, wrapping)}")


def _mul(op: Operation, type_: str) -> str:
    op.count(4 if op.instruction.opcode == "mad" else 3)
    half = op.choice("lo", "hi", "wide")
    if half == "wide" and type_ in ("u64", "s64"):
        raise op.refuse(".wide is for 16 and 32 bits")
    result = _wide(type_) if half == "wide" else type_
    wrapping = _unsigned(result)
    if half == "hi":
        product = f"({C_TYPES[wrapping]})mul_hi({op.read(1, type_)}, {op.read(2, type_)})"
    elif half == "wide":
        wide, narrow = C_TYPES[result], C_TYPES[wrapping]
        product = f"(({narrow})(({wide}){op.read(1, type_)} * ({wide}){op.read(2, type_)}))"
    elif type_[1:] == "16":  # u16 * u16 would overflow an int
        product = f"((u32){op.read(1, wrapping)} * {op.read(2, wrapping)})"
    else:
        product = f"({op.read(1, wrapping)} * {op.read(2, wrapping)})"
    addend = f" + {op.read(3, wrapping)}" if op.instruction.opcode == "mad" else ""
    return op.result(result, product + addend)


def _neg(op: Operation, type_: str) -> str:
    op.count(2)
    if type_[0] != "s":
        raise op.refuse("neg and abs are for signed integers")
    value, negative = op.read(1, _unsigned(type_)), f"(0 - {op.read(1, _unsigned(type_))})"
    if op.instruction.opcode == "neg":
        return op.result(type_, negative)
    return op.result(type_, f"{op.read(1, type_)} < 0 ? {negative} : {value}")


def _min(op: Operation, type_: str) -> str:
    op.count(3)
    less = "<" if op.instruction.opcode == "min" else ">"
    a, b = op.read(1, type_), op.read(2, type_)
    return op.result(type_, f"{a} {less} {b} ? {a} : {b}")


def _div(op: Operation, type_: str) -> str:
    op.count(3)
    function = "divide" if op.instruction.opcode == "div" else "remainder_of"
    return op.result(type_, f"{function}<{C_TYPES[type_]}>({op.read(1, type_)}, {op.read(2, type_)}, {op.site})")


@translates("rem")
def rem(op: Operation) -> str:
    return _div(op, op.type(*_INTS))


@translates("sad")
def sad(op: Operation) -> str:
    """|a - b| + c"""
    type_ = op.type(*_INTS)
    op.count(4)
    values = f"{op.read(1, type_)}, {op.read(2, type_)}, {op.read(3, _unsigned(type_))}"
    return op.result(type_, f"add_difference<{C_TYPES[type_]}, {C_TYPES[_unsigned(type_)]}>({values})")


@translates("and", "or", "xor")
def logic(op: Operation) -> str:
    type_ = op.type("pred", *_BITS)
    op.count(3)
    sign = {"and": "&", "or": "|", "xor": "^"}[op.instruction.opcode]
    return op.result(type_, f"{op.read(1, type_)} {sign} {op.read(2, type_)}")


@translates("not")
def not_(op: Operation) -> str:
    type_ = op.type("pred", *_BITS)
    op.count(2)
    return op.result(type_, f"{'!' if type_ == 'pred' else '~'}{op.read(1, type_)}")


@translates("cnot")
def cnot(op: Operation) -> str:
    type_ = op.type(*_BITS)
    op.count(2)
    return op.result(type_, f"{op.read(1, type_)} == 0")


@translates("lop3")
def lop3(op: Operation) -> str:
    op.type("b32")
    op.count(5)
    return op.result(
        "b32", f"lop3({op.read(1, 'b32')}, {op.read(2, 'b32')}, {op.read(3, 'b32')}, {int(op.operands[4], 0) & 255})"
    )


@translates("shl", "shr")
def shift(op: Operation) -> str:
    type_ = op.type(*_BITS, *_INTS)
    op.count(3)
    left = op.instruction.opcode == "shl"
    count = op.number(2)
    if count is not None and count < 8 * TYPE_BYTES[type_]:
        return op.result(type_, f"{op.read(1, type_)} {'<<' if left else '>>'} {count}")
    function = "shift_left" if left else "shift_right"
    return op.result(type_, f"{function}<{C_TYPES[type_]}>({op.read(1, type_)}, {op.read(2, 'u32')})")


@translates("shf")
def funnel_shift(op: Operation) -> str:
    op.type("b32")
    op.count(4)
    left = op.choice("l", "r") == "l"
    wrap = op.choice("wrap", "clamp") == "wrap"
    values = ", ".join(op.read(i, "u32") for i in (1, 2, 3))
    return op.result("b32", f"funnel_shift<{str(left).lower()}, {str(wrap).lower()}>({values})")


@translates("prmt")
def permute(op: Operation) -> str:
    op.type("b32")  # the modes .f4e, .b4e, … remain in the list and are refused
    op.count(4)
    return op.result("b32", f"prmt({op.read(1, 'b32')}, {op.read(2, 'b32')}, {op.read(3, 'b32')})")


@translates("bfe")
def bit_field_extract(op: Operation) -> str:
    type_ = op.type("u32", "s32", "u64", "s64")
    op.count(4)
    unsigned, signed = _unsigned(type_), str(type_[0] == "s").lower()
    values = f"{op.read(1, unsigned)}, {op.read(2, 'u32')}, {op.read(3, 'u32')}"
    return op.result(type_, f"bit_field_extract<{unsigned}, {signed}>({values})")


@translates("bfi")
def bit_field_insert(op: Operation) -> str:
    type_ = op.type("b32", "b64")
    op.count(5)
    values = f"{op.read(1, type_)}, {op.read(2, type_)}, {op.read(3, 'u32')}, {op.read(4, 'u32')}"
    return op.result(type_, f"bit_field_insert<{C_TYPES[type_]}>({values})")


@translates("popc")
def population(op: Operation) -> str:
    type_ = op.type("b32", "b64")
    op.count(2)
    return op.result("u32", f"__builtin_popcountll({op.read(1, type_)})")


@translates("clz")
def leading_zeros(op: Operation) -> str:
    type_ = op.type("b32", "b64")
    op.count(2)
    return op.result("u32", f"leading_zeros({op.read(1, type_)})")


@translates("bfind")
def find_bit(op: Operation) -> str:
    type_ = op.type("u32", "s32", "u64", "s64")
    op.count(2)
    return op.result("u32", f"find_bit<{C_TYPES[type_]}>({op.read(1, type_)}, {str(op.flag('shiftamt')).lower()})")


@translates("brev")
def reverse_bits(op: Operation) -> str:
    type_ = op.type("b32", "b64")
    op.count(2)
    return op.result(type_, f"reverse_bits<{C_TYPES[type_]}>({op.read(1, type_)})")


@translates("dp4a", "dp2a")
def dot_product(op: Operation) -> str:
    op.count(4)
    b_type = op.type("u32", "s32")
    a_type = op.type("u32", "s32")
    types = f"{a_type[0]}8, {b_type[0]}8"
    if op.instruction.opcode == "dp2a":
        function = f"dot_2<{types}, {str(op.choice('lo', 'hi') == 'hi').lower()}>"
    else:
        function = f"dot_4<{types}>"
    return op.result("u32", f"{function}({op.read(1, 'u32')}, {op.read(2, 'u32')}, {op.read(3, 'u32')})")
