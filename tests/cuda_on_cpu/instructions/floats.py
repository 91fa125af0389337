"""Arithmetic on f16, bf16, f32 and f64, and the functions that the device approximates.

Approximate functions are computed exactly and rounded; the device may differ by a few units in the last place.
"""

from __future__ import annotations

from tests.cuda_on_cpu.instructions.table import C_TYPES, Operation, translates

_HALVES = ("f16", "bf16")
_PAIRS = ("f16x2", "bf16x2")
FLOAT_TYPES = ("f32", "f64", *_HALVES, *_PAIRS)
_ROUND = {"rn": "Round::nearest", "rz": "Round::zero", "rm": "Round::down", "rp": "Round::up"}
_APPROXIMATE = {"ex2": "exp2", "lg2": "log2", "sin": "sin", "cos": "cos", "tanh": "tanh"}


def float_arithmetic(op: Operation) -> str:
    """Translate add, sub, mul, neg, abs, min, max and div of floats."""
    type_ = op.type(*FLOAT_TYPES)
    opcode = op.instruction.opcode
    if opcode == "div":
        return _div(op, type_)
    if type_ in (*_HALVES, *_PAIRS):
        return _half_arithmetic(op, type_)
    if opcode in ("neg", "abs"):
        return _sign(op, type_)
    if opcode in ("min", "max"):
        return _min(op, type_)
    if opcode == "mad":
        raise op.refuse("mad of floats is obsolete; NVRTC emits fma")
    return _add(op, type_)


def _round(op: Operation, type_: str) -> str:
    mode = op.choice(*_ROUND, default="rn")
    if mode != "rn" and type_ != "f32":
        raise op.refuse("only f32 is rounded otherwise than to the nearest")
    return _ROUND[mode]


def _saturated(op: Operation, value: str) -> str:
    return f"saturate({value})" if op.flag("sat") else value


def _add(op: Operation, type_: str) -> str:
    op.count(3)
    flush, mode = op.flag("ftz"), _round(op, type_)
    a, b = op.read(1, type_, flush), op.read(2, type_, flush)
    if op.instruction.opcode == "sub":
        b = f"-{b}"
    product = op.instruction.opcode == "mul"
    if type_ == "f64":
        return op.result(type_, f"{a} {'*' if product else '+'} {b}")
    value = f"{'mul' if product else 'add'}_f32<{mode}>({a}, {b})"
    return op.result(type_, _saturated(op, value), flush)


@translates("fma")
def fma(op: Operation) -> str:
    type_ = op.type(*FLOAT_TYPES)
    op.count(4)
    if type_ in (*_HALVES, *_PAIRS):
        return _half_arithmetic(op, type_)
    flush, mode = op.flag("ftz"), _round(op, type_)
    values = ", ".join(op.read(i, type_, flush) for i in (1, 2, 3))
    if type_ == "f64":
        return op.result(type_, f"fma({values})")
    return op.result(type_, _saturated(op, f"fma_f32<{mode}>({values})"), flush)


def _half_arithmetic(op: Operation, type_: str) -> str:
    """Operate on one float16 or on both in a register; floats.h has the functions."""
    half = type_.removesuffix("x2")
    op.choice("rn", default="rn")
    function = op.instruction.opcode
    if function in ("min", "max") and op.flag("NaN"):
        function += "_nan"
    after = [name for name in ("sat", "relu", "ftz") if op.flag(name)]
    arguments = ["a", "b", "c"][: len(op.operands) - 1]
    flush = "ftz" in after
    inner = ", ".join(f"flush_{half}({name})" if flush else name for name in arguments)
    body = f"{function}_{half}({inner})"
    for name in after:
        body = f"{ {'sat': 'saturate', 'relu': 'relu', 'ftz': 'flush'}[name] }_{half}({body})"
    if "sat" in after and half != "f16":
        raise op.refuse(".sat is for f16")
    return _on_halves(op, type_, arguments, body)


def _on_halves(op: Operation, type_: str, arguments: list[str], body: str) -> str:
    parameters = ", ".join(f"u16 {name}" for name in arguments)
    values = ", ".join(op.read(i + 1, type_) for i in range(len(arguments)))
    function = f"[]({parameters}) -> u16 {{ return {body}; }}"
    return op.result(type_, f"each_half({function}, {values})" if type_ in _PAIRS else f"({function})({values})")


def _sign(op: Operation, type_: str) -> str:
    op.count(2)
    flush = op.flag("ftz")
    value = op.read(1, type_, flush)
    return op.result(type_, f"-{value}" if op.instruction.opcode == "neg" else f"std::fabs({value})")


def _min(op: Operation, type_: str) -> str:
    flush = op.flag("ftz")
    function = f"{op.instruction.opcode}_{'nan' if op.flag('NaN') else 'float'}<{C_TYPES[type_]}>"
    op.count(3, 4)
    value = op.read(1, type_, flush)
    for i in range(2, len(op.operands)):
        value = f"{function}({value}, {op.read(i, type_, flush)})"
    return op.result(type_, value)


def _div(op: Operation, type_: str) -> str:
    op.count(3)
    if type_ not in ("f32", "f64"):
        raise op.refuse("div is for f32 and f64")
    flush = op.flag("ftz")
    op.choice("rn", "approx", "full")
    return op.result(type_, f"{op.read(1, type_, flush)} / {op.read(2, type_, flush)}", flush)


@translates("rcp", "sqrt", "rsqrt")
def roots(op: Operation) -> str:
    type_ = op.type("f32", "f64")
    op.count(2)
    flush = op.flag("ftz")
    op.choice("rn", "approx")
    value = op.read(1, type_, flush)
    # rsqrt in f64 is rounded twice, which is within the error of the device
    one = "1.0f" if type_ == "f32" else "1.0"
    root = f"({'f32' if type_ == 'f32' else 'f64'})std::sqrt((f64){value})"
    formula = {"rcp": f"{one} / {value}", "sqrt": root, "rsqrt": f"1.0 / std::sqrt((f64){value})"}
    return op.result(type_, f"({type_})({formula[op.instruction.opcode]})", flush)


@translates("ex2", "lg2", "sin", "cos", "tanh")
def approximate(op: Operation) -> str:
    type_ = op.type("f32", *_HALVES, *_PAIRS)
    op.count(2)
    op.choice("approx")
    opcode = op.instruction.opcode
    if type_ != "f32":
        if opcode not in ("ex2", "tanh"):
            raise op.refuse("only ex2 and tanh are there for halves")
        half = type_.removesuffix("x2")
        flush = op.flag("ftz")
        inner = f"{opcode}_{half}({f'flush_{half}(a)' if flush else 'a'})"
        return _on_halves(op, type_, ["a"], f"flush_{half}({inner})" if flush else inner)
    flush = op.flag("ftz")
    value = op.read(1, type_, flush)
    return op.result(type_, f"(f32)std::{_APPROXIMATE[opcode]}((f64){value})", flush)


@translates("copysign")
def copysign(op: Operation) -> str:
    """Combine the sign of a with the magnitude of b."""
    type_ = op.type("f32", "f64")
    op.count(3)
    return op.result(type_, f"std::copysign({op.read(2, type_)}, {op.read(1, type_)})")


@translates("testp")
def has_property(op: Operation) -> str:
    type_ = op.type("f32", "f64")
    op.count(2)
    value = op.read(1, type_)
    tests = {
        "finite": f"std::isfinite({value})",
        "infinite": f"std::isinf({value})",
        "number": f"!std::isnan({value})",
        "notanumber": f"std::isnan({value})",
        "normal": f"std::isnormal({value})",
        "subnormal": f"std::fpclassify({value}) == FP_SUBNORMAL",
    }
    return op.result("pred", tests[op.choice(*tests)])
