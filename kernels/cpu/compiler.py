"""Compilation of kernels: numba translates typed Python to LLVM code, and LLVM compiles it for a target.

    template ──specialise──▶ Python ──numba──▶ LLVM IR ──LLVM for the target──▶ object code ──link──▶ address
                                                                      └──▶ cache on disk

numba's own compilation targets only the processor of this machine, and its cache does not notice changes in imported
functions.  Calling LLVM ourselves lets one process compile for several instruction sets (tests compare them), lets a
machine compile for another one, and lets a warm start skip the import of numba, which takes most of a second.

Cached objects are stored in a folder named by a hash of everything they depend on: the sources of this package, the
modules outside it whose constants it uses, the versions of numba and LLVM, and the platform.  (For kernels defined
elsewhere, the hash covers the files of the kernel and of its templates.)
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llvmlite

from localllm.errors import KernelError
from localllm.kernels import process
from localllm.kernels.buffers import Address, Buffer
from localllm.kernels.code_cache import cache_root, is_stale, read_code, warn_if_unwritable, write_code
from localllm.kernels.cpu.host import check_memory
from localllm.kernels.cpu.object_code import link
from localllm.kernels.cpu.target import Target
from localllm.kernels.cpu.templates import DeviceFunction, Template
from localllm.kernels.parameters import Parameters, ParameterType, ordered

# Imported only to compile: a start with all kernels on disk does not need it.
if TYPE_CHECKING:
    import llvmlite.binding as llvm

#: Bytes of memory needed to compile a kernel, and to import numba as well: LLVM ends the process if an allocation
#: fails.  (Measured: 16 and 70 MiB.)
COMPILING_BYTES, LOADING_BYTES = 48 << 20, 128 << 20
_FOLDER_NAME = re.compile("[0-9a-f]{16}")
#: Modules outside this package whose constants become part of machine code.  (Look-up tables of `localllm.quant` are
#: part of the names of their operations.)
_CONSTANTS = (
    "kernels/cache_rounding.py",
    "kernels/operations/compressed.py",
    "kernels/operations/experts.py",
    "quant/bit_packing.py",
    "quant/packing.py",
)


#: Types of parameters; a null address is 0.
FLOAT = ParameterType("float", (float,), lambda value: value)
WORD = ParameterType(
    "int or address", (int, Buffer, Address, type(None)), lambda value: 0 if value is None else value
)


class Kernel(Template):
    """A template that can be called from a program: ``kernel(begin, end, …)``.

    It computes the units of work begin … end, as defined by each kernel.  The other parameters are addresses and
    numbers of eight bytes each; parameters annotated ``float`` are float32.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        code, floats = function.__code__, function.__annotations__
        names = code.co_varnames[2 : code.co_argcount]
        self.parameters: Parameters = {name: FLOAT if name in floats else WORD for name in names}

    def arguments(self, **arguments: Any) -> tuple[Any, ...]:
        """Return arguments in the kernel's order; see `localllm.kernels.parameters.ordered`."""
        return ordered(self.name, self.parameters, arguments)


def kernel(function: Callable[..., Any]) -> Kernel:
    """Decorate a function as a kernel; see `Kernel` and `localllm.kernels.cpu.templates`."""
    return Kernel(function)


@dataclass(frozen=True)
class Variant:
    """A kernel specialised for constants and a target: one piece of machine code."""

    kernel: Kernel
    target: Target
    constants: tuple[tuple[str, Any], ...] = ()

    @property
    def symbol(self) -> str:
        """The name of the compiled function, unique within a process."""
        words = [self.kernel.full_name, self.target.name]
        for key, value in self.constants:
            name = value.full_name if isinstance(value, Template) else getattr(value, "__name__", value)
            words.append(f"{key}={name}")
        return ".".join(words)


def variant(kernel: Kernel, target: Target, **constants: Any) -> Variant:
    return Variant(kernel, target, tuple(sorted(constants.items())))


# -- Python to LLVM ------------------------------------------------------------------------------------------------


class _Frontend:
    """numba, for one kernel and the device functions that it calls."""

    def __init__(self, constants: Mapping[str, Any]) -> None:
        self.constants = constants
        self.modules: list[str] = []

    def kernel(self, kernel: Kernel) -> str:
        """Compile a kernel as a function of (arguments, begin, end), and return its name in the last module."""
        from numba.core import types

        tree, scope = kernel.specialise(self.constants)
        names = ["arguments", *(a.arg for a in tree.args.args[:2])]
        loads: list[ast.stmt] = []
        for i, (name, type) in enumerate(kernel.parameters.items()):
            loads += ast.parse(f"{name} = {'load_f32' if type is FLOAT else 'load_i64'}(arguments + {8 * i})").body
        tree.body = loads + tree.body
        return str(self.compile(tree, names, scope, kernel.file, (types.intp,) * 3).fndesc.llvm_func_name)

    def compile(
        self, tree: ast.FunctionDef, names: list[str], scope: dict[str, Any], file: str, types: tuple[Any, ...]
    ) -> Any:
        """Compile a specialised function with the parameters ``names``, add its module, and return numba's result."""
        from numba.core import compiler
        from numba.core.registry import cpu_target

        from localllm.kernels.cpu import simd
        from localllm.kernels.cpu.numba_types import KernelPipeline

        tree.args = ast.arguments([], [ast.arg(n) for n in names], None, [], [], None, [])
        tree.decorator_list, tree.returns = [], None
        scope |= {"load_i64": simd.load_i64, "load_f32": simd.load_f32}
        for name, value in scope.items():
            if isinstance(value, DeviceFunction):
                scope[name] = self.device(value)
        exec(compile(ast.fix_missing_locations(ast.Module([tree], [])), file, "exec"), scope)
        flags = compiler.Flags()
        flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
        flags.error_model = "numpy"  # a division by zero raises no exception
        result = compiler.compile_extra(
            cpu_target.typing_context,
            cpu_target.target_context,
            scope[tree.name],
            types,
            None,
            flags,
            {},
            pipeline_class=KernelPipeline,
        )
        # numba's own functions, such as min and max, are in separate modules.
        for library in result.library._linking_libraries:
            if library.name != "nrt" and (text := str(library._final_module)) not in self.modules:
                self.modules.append(text)
        self.modules.append(str(result.library._final_module))
        return result

    @functools.cache  # noqa: B019 - lives as long as one compilation
    def device(self, device: DeviceFunction) -> Any:
        """Return a numba intrinsic that compiles the device function for its arguments' types and calls it.

        numba's normal calls would pass the function to its own linker, which compiles for this machine's processor.
        """
        from numba.extending import intrinsic

        names = [a.arg for a in device.tree.args.args]

        def typed(*argument_types: Any) -> Any:
            tree, scope = device.specialise(self.constants)
            result = self.compile(tree, names, scope, device.file, argument_types)

            def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
                callee = context.declare_function(builder.module, result.fndesc)
                _, value = context.call_conv.call_function(builder, callee, sig.return_type, sig.args, values)
                return value

            return result.signature.return_type(*argument_types), codegen

        scope: dict[str, Any] = {"typed": typed}
        arguments = ", ".join(names)
        exec(f"def {device.name}(typingctx, {arguments}):\n    return typed({arguments})", scope)
        return intrinsic(scope[device.name])


def llvm_ir(v: Variant, triple: str | None = None) -> llvm.ModuleRef:
    """Return the kernel as optimised LLVM code for its target, with one function ``v.symbol``."""
    import llvmlite.binding as llvm
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    from localllm.kernels.cpu.dots import SeveralTokens
    from localllm.kernels.cpu.instructions import lowering_for
    from localllm.kernels.cpu.numba_types import register_operations

    constants = {**dict(v.constants), **v.target.constants}
    if "ADD" in constants:
        constants |= {
            f"ADD_{name}": SeveralTokens(constants["ADD"].function, n) for n, name in ((2, "TWO"), (4, "FOUR"))
        }
    frontend = _Frontend(constants)
    with global_compiler_lock, lowering_for(v.target):
        register_operations()
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()
        try:
            inner = frontend.kernel(v.kernel)
        except MemoryError:
            raise
        except Exception as error:
            raise KernelError(f"the kernel {v.symbol} does not compile: {error}") from error
    machine = v.target.machine(triple)
    *devices, main = frontend.modules
    module = llvm.parse_assembly(_with_entry(main, inner, v))
    for text in devices:
        module.link_in(llvm.parse_assembly(_without_target(text)))
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    for f in module.functions:
        if not f.is_declaration and f.name != v.symbol:
            f.linkage = "internal"
            f.add_function_attribute("alwaysinline")
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    # Kernels vectorise by hand; LLVM would only vectorise the remainder loops.
    options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    unknown = [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")]
    if unknown:
        raise KernelError(f"the kernel {v.symbol} calls {', '.join(unknown)}, which no code here defines")
    return module


def _without_target(text: str) -> str:
    """Remove the lines that name the target machine of numba."""
    return "\n".join(line for line in text.splitlines() if not line.startswith(("target ", "source_filename")))


def _with_entry(text: str, inner: str, v: Variant) -> str:
    """Add the function that programs call, ``void symbol(i64 arguments, i64 begin, i64 end)``.

    numba's functions return a status and write a result and an exception; kernels raise no exceptions.
    """
    # LLVM needs a processor model to schedule instructions; without one it keeps too many values live.
    tuned = ' "tune-cpu"="neoverse-n1"' if v.target.family == "aarch64" else ""
    entry = f"""
define void @"{v.symbol}"(i64 %arguments, i64 %begin, i64 %end){tuned} {{
  %result = alloca ptr
  %exception = alloca ptr
  %status = call i32 @{inner}(ptr %result, ptr %exception, i64 %arguments, i64 %begin, i64 %end)
  ret void
}}
"""
    return _without_target(text) + entry


def assembly(v: Variant, triple: str | None = None) -> str:
    """Return the machine code as assembly text, for this platform or another one (``aarch64-linux-gnu``)."""
    return str(v.target.machine(triple).emit_assembly(llvm_ir(v, triple)))


# -- The cache -----------------------------------------------------------------------------------------------------


def _folder() -> Path | None:
    """Return the cache folder for kernels compiled by these versions; None if caching is disabled."""
    root = cache_root()
    return None if root is None else root / fingerprint()


@functools.cache
def fingerprint() -> str:
    """Return a hash of everything that compiled kernels depend on, except their own variant."""
    digest = hashlib.sha256()
    for fact in (llvmlite.__version__, _numba_version(), sys.platform, platform.machine()):
        digest.update(fact.encode())
    folder = Path(__file__).parent
    for path in (*(folder.parents[1] / name for name in _CONSTANTS), *sorted(folder.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _numba_version() -> str:
    """Return a key of numba's version, without the slow import of numba or `importlib.metadata`."""
    spec = importlib.util.find_spec("numba")
    if spec is None or spec.origin is None:
        raise KernelError("the package numba, which compiles kernels, is missing: install localllm again")
    return (Path(spec.origin).parent / "_version.py").read_text(encoding="utf-8")


@functools.cache
def _source(file: str) -> bytes:
    """Return a source file's content; empty for files of this package, which the fingerprint covers."""
    path = Path(file)
    return b"" if path.parent == Path(__file__).parent or not path.exists() else path.read_bytes()


def _file_name(v: Variant) -> str:
    digest = hashlib.sha256(v.symbol.encode())
    for value in (v.kernel, *(value for _, value in v.constants)):
        if isinstance(value, Template):
            digest.update(_source(value.file))
    return f"{v.kernel.name}-{v.target.name}-{digest.hexdigest()[:16]}.o"


def _cached(v: Variant) -> bytes | None:
    """Return object code from the cache, or None if it is missing or damaged.

    The check is necessary because LLVM ends the process on a truncated object, or one without the expected symbol.
    """
    folder = _folder()
    if folder is None or (code := read_code(folder / _file_name(v))) is None:
        return None
    _mark_used(folder)
    return code


def _compile(v: Variant) -> bytes:
    """Compile a kernel and store it in the cache.  An unwritable cache is ignored: it only costs time."""
    code: bytes = v.target.machine().emit_object(llvm_ir(v))
    if (folder := _folder()) is not None:
        write_code(folder / _file_name(v), code)
        _prune(folder)
    return code


@functools.cache
def _mark_used(folder: Path) -> None:
    """Update the time of a cache folder, once per process."""
    with contextlib.suppress(OSError):
        os.utime(folder)


@functools.cache
def _prune(used: Path) -> None:
    """Remove old folders next to ``used``, once per process.

    A process that still uses a removed folder compiles the missing kernels again.  Folders with other names are kept,
    because a user may have chosen a folder that contains other files.
    """
    with contextlib.suppress(OSError):
        for folder in used.parent.iterdir():
            is_ours = _FOLDER_NAME.fullmatch(folder.name) and folder != used and not folder.is_symlink()
            if is_ours and is_stale(folder):
                _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder of object files, unless it contains other files."""
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            if file.suffix == ".o" or file.name.startswith(tempfile.gettempprefix()):
                file.unlink()
        folder.rmdir()


# -- Linking -------------------------------------------------------------------------------------------------------

_lock = threading.RLock()
_addresses: dict[str, int] = {}
#: Compiled object code that is not linked yet, by symbol.
_objects: dict[str, bytes] = {}

# A fork waits for the lock, so that compiler and linker are consistent and unlocked in the child.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def _define_stack_probe() -> None:
    """Define ``__chkstk`` of ntdll on Windows, which LLVM may not find.  Code with frames over a page calls it."""
    import llvmlite.binding as llvm

    if sys.platform == "win32" and llvm.address_of_symbol("__chkstk") is None:
        llvm.add_symbol("__chkstk", ctypes.cast(ctypes.windll.ntdll["__chkstk"], ctypes.c_void_p).value)


@functools.cache
def _engine() -> llvm.ExecutionEngine:
    """Return LLVM's linker.  It is shared by the process, because linked code is never unloaded."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    _define_stack_probe()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def addresses(variants: Iterable[Variant], progress: Callable[[int, int], None] | None = None) -> dict[Variant, int]:
    """Return machine code addresses.  Compiles missing kernels, and reports (done, to compile) to ``progress``."""
    requested = dict.fromkeys(variants)
    with _lock:
        to_compile = [v for v in requested if not _is_ready(v)]
    if to_compile:
        warn_if_unwritable(cache_root())
    # No lock is held while the caller's function runs.  If it raises, the kernels compiled before are kept.
    for n_done, v in enumerate(to_compile):
        if progress:
            progress(n_done, len(to_compile))
        with _lock, process.UnfinishedWork(process.workers):
            if not _is_ready(v):  # another thread may have compiled it
                is_loaded = "numba.core.compiler" in sys.modules
                check_memory(COMPILING_BYTES if is_loaded else LOADING_BYTES, "to compile kernels for this processor")
                _objects[v.symbol] = _compile(v)
    if to_compile and progress:
        progress(len(to_compile), len(to_compile))
    with _lock, process.UnfinishedWork(process.workers):
        _link([v.symbol for v in requested if v.symbol not in _addresses])
        return {v: _addresses[v.symbol] for v in requested}


def _is_ready(v: Variant) -> bool:
    """Return whether a kernel is linked, or its object code is in memory or in the cache."""
    if v.symbol not in _addresses and v.symbol not in _objects and (code := _cached(v)) is not None:
        _objects[v.symbol] = code
    return v.symbol in _addresses or v.symbol in _objects


def _link(symbols: list[str]) -> None:
    """Make object code executable.  Code passed to LLVM's linker cannot be removed."""
    if not symbols:
        return
    objects = [(symbol, _objects.pop(symbol)) for symbol in symbols]
    if (code_addresses := link(objects)) is None:
        import llvmlite.binding as llvm

        engine = _engine()
        for _, code in objects:
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        code_addresses = [engine.get_function_address(symbol) for symbol in symbols]
    _addresses.update(zip(symbols, code_addresses, strict=True))
