"""Translate a PTX module to C++: one function per kernel and device function, about one statement per instruction."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.cuda_on_cpu.denormals import flushed_registers
from tests.cuda_on_cpu.errors import PtxError, UnsupportedInstruction
from tests.cuda_on_cpu.instructions import HANDLERS
from tests.cuda_on_cpu.instructions.table import C_TYPES, Names, Operation, mangle, register_type
from tests.cuda_on_cpu.ptx import TYPE_BYTES, BranchTargets, Function, Instruction, Label, Module, Parameter, Variable

DYNAMIC_ALIGN = 16

#: Mistakes for tests by the span of an instruction: numbers, and replacements (None removes the instruction).
#: `EmulatedModule.mutation` selects the active number.
Planted = Mapping[tuple[int, int], Sequence[tuple[int, Instruction | None]]]


@dataclass(frozen=True)
class Site:
    """Source location of an instruction, for errors and counts of memory traffic."""

    function: str
    instruction: Instruction

    def __str__(self) -> str:
        return f"{self.instruction.location or self.function} (`{self.instruction.text}`)"


@dataclass(frozen=True)
class KernelSignature:
    """Parameters of a kernel, for launches.  ``offsets``: positions of the parameters in their buffer."""

    symbol: str
    parameters: tuple[Parameter, ...]
    offsets: tuple[int, ...]
    parameter_bytes: int
    static_shared_bytes: int
    max_threads: int | None


@dataclass(frozen=True)
class Translation:
    source: str
    sites: list[Site]
    kernels: dict[str, KernelSignature]


def translate(module: Module, planted: Planted | None = None) -> Translation:
    """Translate a module.  Raises UnsupportedInstruction for instructions without a translation."""
    return _Translator(module, planted or {}).run()


def _align(offset: int, align: int) -> int:
    return (offset + align - 1) // align * align


class _Layout:
    """Offsets in shared memory, assigned in order."""

    def __init__(self, start: int = 0) -> None:
        self.end = start
        self.offsets: dict[str, str] = {}

    def add(self, variable: Variable) -> None:
        if variable.n_bytes is None:  # dynamic memory follows the static variables of the running kernel
            self.offsets[variable.name] = "((u32)static_shared_bytes)"
            return
        start = _align(self.end, variable.align)
        self.offsets[variable.name] = f"{start}u"
        self.end = start + variable.n_bytes


class _Translator:
    def __init__(self, module: Module, planted: Planted) -> None:
        self._module = module
        self._planted = planted
        self._sites: list[Site] = []
        # Any kernel may call device functions, so their shared variables are placed with the module's.
        self._shared = _Layout()
        for variable in module.variables:
            if variable.space == "shared":
                self._shared.add(variable)
        for function in module.functions:
            for variable in function.variables:
                if variable.space == "shared" and not function.is_kernel:
                    self._shared.add(variable)
        self._global_variables = [variable for variable in module.variables if variable.space != "shared"]

    def run(self) -> Translation:
        functions = [self._function(function) for function in self._module.functions]
        parts = [
            '#include "kernel.h"',
            '#define EXPORT extern "C" __attribute__((visibility("default")))',
            *map(_definition, self._global_variables),
            *(f"{_head(function)};" for function in self._module.functions if not function.is_kernel),
            *functions,
            self._registration(),
        ]
        kernels = {name: self._signature(kernel) for name, kernel in self._module.kernels().items()}
        return Translation("\n".join(part for part in parts if part) + "\n", self._sites, kernels)

    def _registration(self) -> str:
        calls = [
            f"check::add_module_range((u64){mangle(v.name)}, {v.n_bytes}, {str(v.space == 'global').lower()});"
            for v in self._global_variables
        ]
        return f"EXPORT void register_variables() {{ {' '.join(calls)} }}"

    def _kernel_shared(self, function: Function) -> _Layout:
        layout = _Layout(self._shared.end)
        for variable in function.variables:
            if variable.space == "shared":
                layout.add(variable)
        return layout

    def _signature(self, function: Function) -> KernelSignature:
        offsets, end = [], 0
        for parameter in function.parameters:
            offsets.append(_align(end, parameter.align))
            end = offsets[-1] + parameter.n_bytes
        shared = _align(self._kernel_shared(function).end, DYNAMIC_ALIGN)
        parameters = tuple(function.parameters)
        return KernelSignature(_symbol(function), parameters, tuple(offsets), end, shared, function.max_threads)

    # ---- one function
    def _names(self, function: Function) -> Names:
        names = Names(function.registers, flushed=flushed_registers(function))
        names.shared.update(self._shared.offsets)
        if function.is_kernel:
            names.shared.update(self._kernel_shared(function).offsets)
            signature = self._signature(function)
            for parameter, offset in zip(function.parameters, signature.offsets, strict=True):
                names.addresses[parameter.name] = f"((u64)parameters + {offset})"
        else:
            for parameter in [*function.returns, *function.parameters]:
                names.addresses[parameter.name] = f"((u64){mangle(parameter.name)})"
        for variable in [*self._global_variables, *function.variables]:
            if variable.space != "shared":
                names.addresses[variable.name] = f"((u64){mangle(variable.name)})"
        names.labels = {item.name: f"label_{mangle(item.name)}" for item in function.body if isinstance(item, Label)}
        names.branch_targets = {item.name: item.labels for item in function.body if isinstance(item, BranchTargets)}
        names.functions = {f.name: _symbol(f) for f in self._module.functions if not f.is_kernel}
        return names

    def _function(self, function: Function) -> str:
        names = self._names(function)
        lines = [f"{_head(function)} {{", *_declarations(function)]
        seen: set[str] = set()
        for item in function.body:
            if isinstance(item, Label):
                seen.add(item.name)
                lines.append(f"{names.labels[item.name]}:;")
            elif isinstance(item, Instruction):
                lines.append(self._with_mistakes(function, item, names, seen))
        return "\n".join([*lines, "}"])

    def _with_mistakes(self, function: Function, instruction: Instruction, names: Names, seen: set[str]) -> str:
        site = len(self._sites)
        self._sites.append(Site(function.name, instruction))
        statement = self._instruction(function, instruction, names, seen, site)
        others = self._planted.get(instruction.span)
        if others is None:
            return statement
        cases = [
            f"case {number}: {self._instruction(function, other, names, seen, site) if other else ''} break;"
            for number, other in others
        ]
        return f"switch (mutation) {{ {' '.join(cases)} default: {statement} }}"

    def _instruction(
        self, function: Function, instruction: Instruction, names: Names, seen: set[str], site: int
    ) -> str:
        operation = Operation(instruction, names, site, seen.__contains__)
        handler = HANDLERS.get(instruction.opcode)
        if handler is None:
            raise operation.refuse(f"{instruction.opcode} is not known")
        if instruction.opcode == "exit" and not function.is_kernel:
            raise operation.refuse("exit within a device function")
        try:
            statement = handler(operation)
        except (IndexError, ValueError) as error:
            raise operation.refuse(f"operands not understood ({error})") from error
        operation.finish()
        if instruction.predicate is None:
            return statement
        test = f"{'!' if instruction.negated else ''}{operation.value(instruction.predicate, 'pred')}"
        return f"if ({test}) {{ {statement} }}"


def _symbol(function: Function) -> str:
    return f"{'kernel' if function.is_kernel else 'function'}_{mangle(function.name)}"


def _head(function: Function) -> str:
    if function.is_kernel:
        return f"EXPORT void {_symbol(function)}(const u8* parameters)"
    parameters = ", ".join(f"u8* {mangle(parameter.name)}" for parameter in [*function.returns, *function.parameters])
    return f"static void {_symbol(function)}({parameters})"


def _declarations(function: Function) -> list[str]:
    """Declare registers, initialised to zero (they are undefined on the device), and variables of a thread."""
    lines = []
    for type_ in sorted(set(function.registers.values())):
        names = [mangle(name) for name, kind in function.registers.items() if kind == type_]
        lines.append(f"{register_type(type_)} {', '.join(f'{name} = 0' for name in names)};")
    for variable in function.variables:
        if variable.space in ("local", "param"):
            lines.append(f"alignas({max(8, variable.align)}) u8 {mangle(variable.name)}[{variable.n_bytes}];")
        elif variable.space != "shared":
            raise PtxError(f"{variable.space} variable {variable.name} in a function")
    return lines


def _definition(variable: Variable) -> str:
    """Declare a ``.global`` or ``.const`` variable with its initial values."""
    if variable.n_bytes is None:
        raise PtxError(f"extern variable {variable.name} is defined nowhere")
    values = [_initial_value(variable, value) for value in variable.values]
    c_type = f"u{8 * TYPE_BYTES[variable.type]}"
    count = variable.n_bytes // TYPE_BYTES[variable.type]
    const = "const " if variable.space == "const" else ""
    head = f"alignas({variable.align}) static {const}{c_type} {mangle(variable.name)}[{count}]"
    return f"{head} = {{{', '.join(values)}}};"


def _initial_value(variable: Variable, text: str) -> str:
    if re.fullmatch(r"0[fFdD][0-9a-fA-F]+", text):
        return f"0x{text[2:]}ull"
    if re.fullmatch(r"-?\d+U?|0[xX][0-9a-fA-F]+U?", text):
        return f"({C_TYPES[f'u{8 * TYPE_BYTES[variable.type]}']}){int(text.rstrip('U'), 0) & (2**64 - 1):#x}ull"
    raise UnsupportedInstruction(f"initial value of {variable.name} not understood: {text}")
