"""cvt: between integers, floats and packed halves."""

from __future__ import annotations

from tests.cuda_on_cpu.instructions.table import C_TYPES, Operation, translates
from tests.cuda_on_cpu.ptx import TYPE_BYTES

_INTS = tuple(f"{kind}{bits}" for kind in "us" for bits in (8, 16, 32, 64))
_FLOATS = ("f16", "bf16", "f32", "f64")
_WHOLE = {"rni": "std::rint", "rzi": "std::trunc", "rmi": "std::floor", "rpi": "std::ceil"}
_ROUND = {"rn": "Round::nearest", "rz": "Round::zero", "rm": "Round::down", "rp": "Round::up"}


@translates("cvt")
def convert(op: Operation) -> str:
    source = op.type(*_INTS, *_FLOATS)
    target = op.type(*_INTS, *_FLOATS, "f16x2", "bf16x2", "tf32")
    if target in ("f16x2", "bf16x2"):
        return _to_pair(op, target, source)
    op.count(2)
    if target == "tf32":
        if source != "f32" or not op.flag("rna"):
            raise op.refuse("tf32 comes from f32, rounded by .rna")
        return op.result("tf32", f"tf32_from({op.read(1, 'f32')})")
    if source in _INTS:
        return _from_int(op, target, source)
    if target in _INTS:
        return _float_to_int(op, target, source)
    return _float_to_float(op, target, source)


def _from_int(op: Operation, target: str, source: str) -> str:
    value = op.read(1, source)
    if target in _INTS:
        if op.flag("sat"):
            value = f"clamp_int<{C_TYPES[target]}>({value})"
        return op.result(target, value)
    mode = op.choice(*_ROUND)
    if source[1:] == "64":
        # f64, which the other modes use, does not hold all 64-bit integers
        if mode != "rn" or target not in ("f32", "f64"):
            raise op.refuse("64-bit integers are only rounded to the nearest, to f32 and f64")
        return op.result(target, f"({target}){value}")
    return op.result(target, _narrow(op, f"(f64){value}", target, mode))


def _narrow(op: Operation, value: str, target: str, mode: str) -> str:
    """Convert an f64 to a narrower float."""
    if target == "f64":
        return value
    if target != "f32" and mode not in ("rn", "rz"):
        raise op.refuse("halves are rounded to nearest or to zero")
    function = {"f32": "f32_from", "f16": "f16_from", "bf16": "bf16_from"}[target]
    return f"{function}<{_ROUND[mode]}>({value})"


def _number(op: Operation, index: int, source: str, flush: bool) -> str:
    """Return a float operand as f32 or f64."""
    value = op.read(index, source, flush and source == "f32")
    return {"f16": f"f16_value({value})", "bf16": f"bf16_value({value})"}.get(source, value)


def _float_to_int(op: Operation, target: str, source: str) -> str:
    flush = op.flag("ftz")
    op.flag("sat")  # integers are clamped with and without .sat
    whole = _WHOLE[op.choice(*_WHOLE)]
    wide_nan = str(source == "f64" or target[1:] == "64").lower()
    value = f"{whole}((f64){_number(op, 1, source, flush)})"
    return op.result(target, f"int_from<{C_TYPES[target]}>({value}, {wide_nan})")


def _float_to_float(op: Operation, target: str, source: str) -> str:
    flush = op.flag("ftz")
    value = _number(op, 1, source, flush)
    whole = op.choice(*_WHOLE, default="")
    if whole:
        if target != source:
            raise op.refuse("rounding to a whole number keeps the type")
        value = f"{_WHOLE[whole]}({value})"
    mode = op.choice(*_ROUND, default="rn")
    for name, function in (("sat", "saturate"), ("relu", "relu")):
        if op.flag(name):
            value = f"{function}({value})"
    if TYPE_BYTES[target] > TYPE_BYTES[source] or target == source:
        number = value if target in ("f32", "f64") else f"{target}_from((f64)({value}))"
        return op.result(target, number, flush and target == "f32")
    return op.result(target, _narrow(op, f"(f64)({value})", target, mode), flush and target == "f32")


def _to_pair(op: Operation, target: str, source: str) -> str:
    """``cvt.rn.f16x2.f32 d, high, low``"""
    if source != "f32":
        raise op.refuse("pairs are made from two f32")
    op.count(3)
    half, mode = target.removesuffix("x2"), op.choice("rn", "rz")
    relu = op.flag("relu")
    high, low = (f"relu({op.read(i, 'f32')})" if relu else op.read(i, "f32") for i in (1, 2))
    function = f"{half}_from<{_ROUND[mode]}>"
    return op.result(target, f"(u32){function}({high}) << 16 | {function}({low})")
