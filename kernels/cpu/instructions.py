"""LLVM instructions written from Python: the building blocks of operations in kernels.

A vector is an LLVM vector value of 512 bits on every processor: LLVM splits it over narrower registers.
Addresses are plain integers, and nothing checks them: every index is validated before it reaches a kernel.

Instructions that depend on the instruction set (products of bytes, half precision) read the current target.

An operation is a function that writes instructions; `localllm.kernels.cpu.numba_types` registers it with numba.  This
module does not import numba, so that warm starts do not have to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from localllm.kernels.cpu.target import Target

_target: Target | None = None


@contextlib.contextmanager
def lowering_for(target: Target) -> Iterator[None]:
    """Compile code inside this context for ``target``.  The caller must hold numba's compiler lock."""
    global _target
    previous, _target = _target, target
    try:
        yield
    finally:
        _target = previous


def lowering_target() -> Target:
    """Return the target of the code that is being compiled."""
    if _target is None:
        raise RuntimeError("kernels are compiled by localllm.kernels.cpu.compiler, not by numba.njit")
    return _target


def dot_kind() -> str:
    """Return how the target multiplies bytes; most other missing instructions depend on it too."""
    return lowering_target().dot


def on_arm() -> bool:
    """Return whether the target has Arm vectors, with four registers per vector."""
    return lowering_target().family == "aarch64"


i8, i16, i32, i64 = (ir.IntType(n) for n in (8, 16, 32, 64))
f16, f32 = ir.HalfType(), ir.FloatType()


@dataclass(frozen=True)
class Kind:
    """The type of an argument or result: a vector, a scalar with the same name in numba, or void."""

    name: str
    llvm: ir.Type | None = None


f32x16 = Kind("f32x16", ir.VectorType(f32, 16))
i32x16 = Kind("i32x16", ir.VectorType(i32, 16))
i8x64 = Kind("i8x64", ir.VectorType(i8, 64))
VECTORS = (f32x16, i32x16, i8x64)

intp, int32, float32, void = Kind("intp", i64), Kind("int32", i32), Kind("float32", f32), Kind("void")
#: An integer known at compile time; the function receives it as a Python integer.
literal = Kind("literal")


@dataclass(frozen=True)
class LLVMOperation:
    """A function ``emit(builder, *values)`` that writes LLVM instructions, and its signature."""

    emit: Callable[..., Any]
    result: Kind
    arguments: tuple[Kind, ...]


#: All operations, and the operators of vectors: (operator, vector, emit).
OPERATIONS: list[LLVMOperation] = []
OPERATORS: list[tuple[Any, Kind, Callable[[Any, Any, Any], Any]]] = []


def op(result: Kind, *arguments: Kind) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function that writes LLVM instructions as an operation; kernels call it without the builder."""

    def decorate(emit: Callable[..., Any]) -> Any:
        OPERATIONS.append(LLVMOperation(emit, result, arguments))
        return emit

    return decorate


def pointer_to(builder: Any, address: Any, type: ir.Type) -> Any:
    return builder.inttoptr(address, type.as_pointer())


def load(builder: Any, address: Any, type: ir.Type) -> Any:
    """Return the value at an address, which need not be aligned."""
    value = builder.load(pointer_to(builder, address, type))
    value.align = 1
    return value


def store(builder: Any, address: Any, value: Any) -> None:
    """Store a value at an address, which need not be aligned."""
    builder.store(value, pointer_to(builder, address, value.type)).align = 1


def intrinsic(builder: Any, name: str, result: ir.Type, *values: Any) -> Any:
    function_type = ir.FunctionType(result, [v.type for v in values])
    function = builder.module.globals.get(name) or ir.Function(builder.module, function_type, name)
    return builder.call(function, values)


def broadcast(builder: Any, value: Any, lanes: int) -> Any:
    vector = ir.VectorType(value.type, lanes)
    vector_value = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(i32, 0))
    return shuffle(builder, [0] * lanes, vector_value)


def constant(value: float | int, element: ir.Type, lanes: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(element, lanes), [value] * lanes)


def shuffle(b: Any, lanes: Sequence[int], x: Any, y: Any = None) -> Any:
    """Return the lanes with these indices of x, followed by y."""
    return b.shuffle_vector(x, x if y is None else y, ir.Constant(ir.VectorType(i32, len(lanes)), list(lanes)))


def halves(b: Any, x: Any, n_pieces: int) -> list[Any]:
    """Divide a vector into ``n_pieces`` equal pieces."""
    lanes = x.type.count // n_pieces
    return [shuffle(b, range(k * lanes, (k + 1) * lanes), x) for k in range(n_pieces)]


def join(b: Any, pieces: list[Any]) -> Any:
    while len(pieces) > 1:
        pieces = [shuffle(b, range(2 * p.type.count), p, q) for p, q in zip(pieces[::2], pieces[1::2], strict=True)]
    return pieces[0]


def behind(b: Any, address: Any, n_bytes: int) -> Any:
    """Return the address ``n_bytes`` bytes later."""
    return b.add(address, ir.Constant(i64, n_bytes)) if n_bytes else address
