"""Registers vectors and operations of `localllm.kernels.cpu.instructions` with numba, to compile kernels."""

from __future__ import annotations

from typing import Any

from numba.core import typed_passes, types, untyped_passes
from numba.core.compiler import CompilerBase
from numba.core.compiler_machinery import PassManager
from numba.core.datamodel import models
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, ConcreteTemplate, builtin_registry, infer_global
from numba.extending import lower_builtin, register_model

from localllm.kernels.cpu.instructions import OPERATIONS, OPERATORS, VECTORS, Kind, LLVMOperation, literal


class Vector(types.Type):
    """A vector as a numba type: an opaque value."""

    def __init__(self, kind: Kind) -> None:
        self.llvm = kind.llvm
        super().__init__(name=kind.name)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)


_TYPES: dict[Kind, Any] = {kind: Vector(kind) for kind in VECTORS}


def numba_type(kind: Kind) -> Any:
    return _TYPES.get(kind) or getattr(types, kind.name)


def _register_operation(operation: LLVMOperation) -> None:
    # Registered directly, because numba's ``intrinsic`` doubles the compile time of every use.
    emit, result = operation.emit, numba_type(operation.result)
    expected = [None if kind is literal else numba_type(kind) for kind in operation.arguments]

    class OperationTyping(AbstractTemplate):
        key = emit
        prefer_literal = True

        def generic(self, argument_types: Any, keywords: Any) -> Any:
            if len(argument_types) != len(expected):
                return None
            return signature(result, *(g if e is None else e for g, e in zip(argument_types, expected, strict=True)))

    builtin_registry.register_global(emit, types.Function(OperationTyping))

    @lower_builtin(emit, *(e or types.IntegerLiteral for e in expected))
    def lower(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        arguments = [
            v if e is not None else kind.literal_value for v, e, kind in zip(values, expected, sig.args, strict=True)
        ]
        value = emit(builder, *arguments)
        return context.get_dummy_value() if result is types.void else value


def _register_operator(symbol: Any, kind: Kind, emit: Any) -> None:
    vector = numba_type(kind)

    class OperatorTyping(ConcreteTemplate):
        cases = (signature(vector, vector, vector),)

    infer_global(symbol)(OperatorTyping)

    @lower_builtin(symbol, vector, vector)
    def lower(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return emit(builder, *values)


_registered = 0
for _symbol, _kind, _emit in OPERATORS:
    _register_operator(_symbol, _kind, _emit)


def register_operations() -> None:
    """Register the operations defined since the last call."""
    global _registered
    for operation in OPERATIONS[_registered:]:
        _register_operation(operation)
    _registered = len(OPERATIONS)


class KernelPipeline(CompilerBase):
    """numba's pipeline from bytecode to LLVM code, without passes that kernels do not need, a third of its time.

    Omitted are passes for closures, generators, comprehensions, array expressions, objects and tuples of mixed types;
    passes that remove dead branches, which templates and LLVM do; and the static single assignment form, which LLVM
    creates itself.  A variable of a kernel therefore has the same type in all assignments.
    """

    def define_pipelines(self) -> list[Any]:
        manager = PassManager("kernel")
        for step in (
            untyped_passes.TranslateByteCode,
            untyped_passes.FixupArgs,
            untyped_passes.IRProcessing,
            typed_passes.NopythonTypeInference,
            typed_passes.NativeLowering,
            typed_passes.NoPythonBackend,
        ):
            manager.add_pass(step, step.__name__)
        manager.finalize()
        return [manager]
