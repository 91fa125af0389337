"""mov, selections and comparisons."""

from __future__ import annotations

from tests.cuda_on_cpu.instructions.table import C_TYPES, Operation, translates
from tests.cuda_on_cpu.ptx import TYPE_BYTES

_INTS = ("u16", "s16", "u32", "s32", "u64", "s64")
_BITS = ("b16", "b32", "b64")
_FLOATS = ("f16", "bf16", "f32", "f64")
_ORDERED = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
_UNORDERED = ("equ", "neu", "ltu", "leu", "gtu", "geu")
_OPPOSITE = {"equ": "ne", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
_COMBINE = {"and": "&&", "or": "||", "xor": "!="}


@translates("mov")
def mov(op: Operation) -> str:
    type_ = op.type("pred", *_BITS, *_INTS, *_FLOATS, "f16x2", "bf16x2")
    op.count(2)
    if op.operands[1].startswith("{"):
        return _pack(op, type_)
    if op.operands[0].startswith("{"):
        return _unpack(op, type_)
    return op.result(type_, op.read(1, type_))


def _pack(op: Operation, type_: str) -> str:
    """``mov.b64 d, {low, high}``"""
    parts = op.vector(op.operands[1])
    width = TYPE_BYTES[type_] * 8 // len(parts)
    whole = C_TYPES[f"u{8 * TYPE_BYTES[type_]}"]
    values = [f"({whole}){op.value(part, f'u{width}')} << {i * width}" for i, part in enumerate(parts)]
    return op.result(f"b{8 * TYPE_BYTES[type_]}", " | ".join(f"({value})" for value in values))


def _unpack(op: Operation, type_: str) -> str:
    """``mov.b32 {low, high}, a``; the source may be one of the destinations"""
    parts = op.vector(op.operands[0])
    width = TYPE_BYTES[type_] * 8 // len(parts)
    bits = f"b{8 * TYPE_BYTES[type_]}"
    writes = [op.write(part, f"b{width}", f"whole >> {i * width}") for i, part in enumerate(parts) if part != "_"]
    return f"{{ const {C_TYPES[bits]} whole = {op.read(1, bits)}; {' '.join(writes)} }}"


@translates("selp")
def select(op: Operation) -> str:
    type_ = op.type(*_BITS, *_INTS, *_FLOATS)
    op.count(4)
    return op.result(type_, f"{op.value(op.operands[3], 'pred')} ? {op.read(1, type_)} : {op.read(2, type_)}")


@translates("slct")
def select_by_sign(op: Operation) -> str:
    """Return a if c >= 0, else b."""
    sign_type = op.type("s32", "f32")
    type_ = op.type(*_BITS, *_INTS, "f32", "f64")
    op.count(4)
    sign = op.read(3, sign_type, op.flag("ftz"))
    return op.result(type_, f"{sign} >= 0 ? {op.read(1, type_)} : {op.read(2, type_)}")


def _comparison(op: Operation, type_: str) -> tuple[str, str]:
    """Return the C++ operator or word of a comparison, and whether it is ``unordered`` (true for NaN)."""
    allowed = [*_ORDERED] if type_[0] != "b" or type_ == "bf16" else ["eq", "ne"]
    if type_ in (*_FLOATS, "f16x2", "bf16x2"):
        allowed = [name for name in allowed if name not in ("lo", "ls", "hi", "hs")] + [*_UNORDERED, "num", "nan"]
    name = op.choice(*allowed)
    return name, type_


def _as_number(value: str, type_: str) -> str:
    return {"f16": f"f16_value({value})", "bf16": f"bf16_value({value})"}.get(type_, value)


def _compare(name: str, a: str, b: str, is_float: bool) -> str:
    if not is_float:
        return f"({a} {_ORDERED[name]} {b})"
    if name in ("num", "nan"):
        return f"{'!' if name == 'num' else ''}std::isunordered({a}, {b})"
    # In C++, comparisons with NaN are false, except for !=.
    if name == "ne":
        return f"({a} < {b} || {a} > {b})"
    if name in _UNORDERED and name != "neu":
        return f"!{_compare(_OPPOSITE[name], a, b, True)}"
    return f"({a} {_ORDERED[name[:2]]} {b})"


@translates("setp")
def set_predicate(op: Operation) -> str:
    type_ = op.type(*_BITS, *_INTS, *_FLOATS, "f16x2", "bf16x2")
    if type_ in ("f16x2", "bf16x2"):
        return _set_predicate_pair(op, type_)
    flush = op.flag("ftz") and type_ == "f32"
    name, _ = _comparison(op, type_)
    combine = op.choice(*_COMBINE, default="")
    op.count(4 if combine else 3)
    a, b = (_as_number(op.read(i, type_, flush), type_) for i in (1, 2))
    test = _compare(name, a, b, type_ in _FLOATS)
    with_third = f" {_COMBINE[combine]} {op.value(op.operands[3], 'pred')}" if combine else ""
    first, _, second = op.operands[0].partition("|")
    writes = op.write(first, "pred", f"test{with_third}")
    if second:
        writes = f"const bool not_test = !test{with_third}; {writes} {op.write(second, 'pred', 'not_test')}"
    return f"{{ const bool test = {test}; {writes} }}"


def _set_predicate_pair(op: Operation, type_: str) -> str:
    """``p|q``: results of the low and of the high half."""
    name, _ = _comparison(op, type_)
    op.flag("ftz")
    op.count(3)
    half = type_.removesuffix("x2")
    a, b = op.read(1, type_), op.read(2, type_)
    low, high = (
        _compare(name, _as_number(f"(u16)({a} >> {s})", half), _as_number(f"(u16)({b} >> {s})", half), True)
        for s in (0, 16)
    )
    first, _, second = op.operands[0].partition("|")
    writes = op.write(first, "pred", "low") + (op.write(second, "pred", "high") if second else "")
    return f"{{ const bool low = {low}, high = {high}; (void)high; {writes} }}"


@translates("set")
def set_value(op: Operation) -> str:
    """A comparison whose result is all ones, 1.0 or zero."""
    type_ = op.type(*_BITS, *_INTS, *_FLOATS, "f16x2", "bf16x2")
    result = op.type("u32", "s32", "f32", "f16", "bf16", "f16x2", "bf16x2", "u16", "s16")
    flush = op.flag("ftz") and type_ == "f32"
    name, _ = _comparison(op, type_)
    op.count(3)
    if type_ in ("f16x2", "bf16x2"):
        half = type_.removesuffix("x2")
        one = {"f16x2": "0x3c00", "bf16x2": "0x3f80", "u32": "0xffff"}.get(result)
        if one is None:
            raise op.refuse("this result of a comparison of pairs is not known")
        test = _compare(name, _as_number("a", half), _as_number("b", half), True)
        function = f"[](u16 a, u16 b) -> u16 {{ return {test} ? {one} : 0; }}"
        return op.result("b32", f"each_half({function}, {op.read(1, type_)}, {op.read(2, type_)})")
    a, b = (_as_number(op.read(i, type_, flush), type_) for i in (1, 2))
    test = _compare(name, a, b, type_ in _FLOATS)
    yes = {"f32": "1.0f", "f16": "0x3c00", "bf16": "0x3f80"}.get(result, "-1")
    return op.result(result, f"{test} ? {yes} : 0")


@translates("cvta")
def convert_address(op: Operation) -> str:
    """Generic addresses are addresses of the host; addresses of shared memory count from its start."""
    type_ = op.type("u64")
    op.count(2)
    to_space = op.flag("to")
    space = op.choice("shared", "shared::cta", "global", "local", "const", "param")
    if op.instruction.operands[1] in op.names.addresses and to_space:
        raise op.refuse("a variable's name is no generic address")
    if not space.startswith("shared"):
        return op.result(type_, op.read(1, type_))
    if to_space:
        return op.result(type_, f"{op.read(1, type_)} - (u64)shared_memory")
    return op.result(type_, f"shared_address({op.read(1, type_)})")


@translates("isspacep")
def is_in_space(op: Operation) -> str:
    op.count(2)
    space = op.choice("shared", "shared::cta", "global")
    inside = f"is_shared({op.read(1, 'u64')})"
    if space == "global":
        inside = f"!{inside} && !check::is_local({op.read(1, 'u64')}, 1)"
    return op.write(op.operands[0], "pred", inside)
