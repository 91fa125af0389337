"""Arguments of kernels, passed by name.

A kernel declares its parameters once: in the signature of its Python function (CPU), or in its ``.cu`` file (CUDA).
Lowerings pass arguments by name.  `ordered` checks names and types, and sorts the arguments into the declared order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from localllm.errors import KernelError
from localllm.kernels.buffers import StoredRows


@dataclass(frozen=True)
class ParameterType:
    name: str  # for messages
    accepts: tuple[type, ...]  # types of arguments
    convert: Callable[[Any], Any]  # converts an argument to the form that programs or launches contain

    @cached_property
    def converters(self) -> dict[type, Callable[[Any], Any]]:
        """`convert` by the type of an argument; faster than ``isinstance``."""
        return dict.fromkeys((*self.accepts, *((bool,) if int in self.accepts else ())), self.convert)


#: Parameters of a kernel by name, in the declared order.
Parameters = Mapping[str, ParameterType]


def ordered(kernel: str, parameters: Parameters, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return converted arguments in the order of a kernel's parameters.

    Rows of a tensor are two arguments, the address NAME and the stride NAME_stride.  None is a null address, whose
    stride is 0 if it is not given.

    Raises:
        KernelError: an argument is missing, unknown, or of a type that its parameter does not accept.
    """
    values = arguments if len(arguments) == len(parameters) else expanded(parameters, arguments)
    if len(values) == len(parameters):
        with contextlib.suppress(KeyError):  # this path is fast, because prompts of a new length need new launches
            return tuple([type.converters[(x := values[name]).__class__](x) for name, type in parameters.items()])
    values = expanded(parameters, arguments)
    if values.keys() != parameters.keys():
        faults = {"missing": parameters.keys() - values.keys(), "unknown": values.keys() - parameters.keys()}
        lists = "; ".join(f"{fault}: {', '.join(sorted(names))}" for fault, names in faults.items() if names)
        raise KernelError(f"the kernel {kernel} takes ({', '.join(parameters)}), but arguments are {lists}")
    for name, type in parameters.items():
        if not isinstance(values[name], type.accepts):
            raise KernelError(f"the kernel {kernel} takes {name} as {type.name}, not {values[name]!r}")
    return tuple(type.convert(values[name]) for name, type in parameters.items())


def expanded(parameters: Parameters, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with the addresses and the strides of rows."""
    values: dict[str, Any] = {}
    for name, argument in arguments.items():
        if isinstance(argument, StoredRows):
            values[name], values[f"{name}_stride"] = argument.buffer, argument.stride
        else:
            values[name] = argument
            if argument is None and (stride := f"{name}_stride") in parameters:
                values[stride] = arguments.get(stride, 0)
    return values
