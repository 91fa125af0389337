"""From a kernel's Python to machine code: numba types it and writes LLVM code, LLVM compiles that for a target.

    template ──specialise──▶ Python ──numba──▶ LLVM IR ──LLVM for the target──▶ object code ──link──▶ address
                                                                      └──▶ cache on disk

numba's own ways to machine code know one processor, the one at hand, and its cache does not see changes in
functions imported from elsewhere.  Taking the last step ourselves lets one process compile for several instruction
sets (tests compare them), lets a machine compile for another, and makes a warm start independent of numba, which
takes most of a second to import.

Cached objects lie in a folder named by a hash of everything they depend on: the source of this package and of the
modules elsewhere whose constants it uses, the versions of numba and LLVM, the platform.  (Of kernels defined
elsewhere, the files of the kernel and of its templates count.)
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
from localllm.kernels.code_cache import cache_root, is_stale, read_code, warn_if_unwritable, write_code
from localllm.kernels.cpu.host import check_memory
from localllm.kernels.cpu.object_code import link
from localllm.kernels.cpu.target import Target
from localllm.kernels.cpu.templates import Device, Template

# Imported where something is compiled: a start that finds its kernels on disk mostly does without.
if TYPE_CHECKING:
    import llvmlite.binding as llvm

#: Bytes of memory without which no kernel is compiled, and without which numba is not even loaded: LLVM ends the
#: process where it gets none.  (Measured: 16 and 70 MiB.)
COMPILING_BYTES, LOADING_BYTES = 48 << 20, 128 << 20
_FOLDER_NAME = re.compile("[0-9a-f]{16}")
#: Modules outside this package whose constants become part of machine code.  (Look-up tables of `localllm.quant` are
#: part of the names of the operations that use them.)
_CONSTANTS = ("kernels/cache_rounding.py", "quant/bit_packing.py", "quant/packing.py")


class Kernel(Template):
    """A template that can be called from a program: ``kernel(begin, end, …)``.

    It works on the units of work begin … end (what a unit is, the kernel says).  Its further parameters are
    addresses and numbers, eight bytes each; those annotated ``float`` are float32.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        code = function.__code__
        self.parameters = [(n, n in function.__annotations__) for n in code.co_varnames[2 : code.co_argcount]]


def kernel(function: Callable[..., Any]) -> Kernel:
    """Makes a function a kernel; see `Kernel` and `localllm.kernels.cpu.templates`."""
    return Kernel(function)


@dataclass(frozen=True)
class Variant:
    """A kernel specialised for constants and a target: one piece of machine code."""

    kernel: Kernel
    target: Target
    constants: tuple[tuple[str, Any], ...] = ()

    @property
    def symbol(self) -> str:
        """The name of the code, unique within a process."""
        parts = [self.kernel.full_name, self.target.name]
        for key, value in self.constants:
            name = value.full_name if isinstance(value, Template) else getattr(value, "__name__", value)
            parts.append(f"{key}={name}")
        return ".".join(parts)


def variant(kernel: Kernel, target: Target, **constants: Any) -> Variant:
    return Variant(kernel, target, tuple(sorted(constants.items())))


# -- Python to LLVM ------------------------------------------------------------------------------------------------


class _Frontend:
    """numba, for one kernel and the device functions that it calls."""

    def __init__(self, constants: Mapping[str, Any]) -> None:
        self.constants = constants
        self.modules: list[str] = []

    def kernel(self, kernel: Kernel) -> str:
        """Compiles a kernel as a function of (arguments, begin, end); returns its name in the last module."""
        from numba.core import types

        tree, scope = kernel.specialise(self.constants)
        names = ["arguments", *(a.arg for a in tree.args.args[:2])]
        loads: list[ast.stmt] = []
        for i, (name, is_float) in enumerate(kernel.parameters):
            loads += ast.parse(f"{name} = {'load_f32' if is_float else 'load_i64'}(arguments + {8 * i})").body
        tree.body = loads + tree.body
        return str(self.compile(tree, names, scope, kernel.file, (types.intp,) * 3).fndesc.llvm_func_name)

    def compile(
        self, tree: ast.FunctionDef, names: list[str], scope: dict[str, Any], file: str, types: tuple[Any, ...]
    ) -> Any:
        """numba's result for a specialised function of the parameters ``names``; its module joins the others."""
        from numba.core import compiler
        from numba.core.registry import cpu_target

        from localllm.kernels.cpu import simd
        from localllm.kernels.cpu.numba_types import KernelPipeline

        tree.args = ast.arguments([], [ast.arg(n) for n in names], None, [], [], None, [])
        tree.decorator_list, tree.returns = [], None
        scope |= {"load_i64": simd.load_i64, "load_f32": simd.load_f32}
        for name, value in scope.items():
            if isinstance(value, Device):
                scope[name] = self.device(value)
        exec(compile(ast.fix_missing_locations(ast.Module([tree], [])), file, "exec"), scope)
        flags = compiler.Flags()
        flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
        flags.error_model = "numpy"  # a division by zero is not an exception
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
        # numba's own functions, such as min and max, come in modules of their own.
        for library in result.library._linking_libraries:
            if library.name != "nrt" and (text := str(library._final_module)) not in self.modules:
                self.modules.append(text)
        self.modules.append(str(result.library._final_module))
        return result

    @functools.cache  # noqa: B019 - lives as long as one compilation
    def device(self, device: Device) -> Any:
        """A numba intrinsic that compiles the device function for its arguments' types and calls it.

        numba's own calls would hand the function to its linker, which compiles for the processor at hand.
        """
        from numba.extending import intrinsic

        names = [a.arg for a in device.tree.args.args]

        def typed(*given: Any) -> Any:
            tree, scope = device.specialise(self.constants)
            result = self.compile(tree, names, scope, device.file, given)

            def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
                callee = context.declare_function(builder.module, result.fndesc)
                _, value = context.call_conv.call_function(builder, callee, sig.return_type, sig.args, values)
                return value

            return result.signature.return_type(*given), codegen

        scope: dict[str, Any] = {"typed": typed}
        arguments = ", ".join(names)
        exec(f"def {device.name}(typingctx, {arguments}):\n    return typed({arguments})", scope)
        return intrinsic(scope[device.name])


def llvm_ir(v: Variant, triple: str | None = None) -> llvm.ModuleRef:
    """The kernel as optimised LLVM code for its target, with one function ``v.symbol``."""
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
    # Vectors are written by hand here; what LLVM would vectorise beside them are only the odd ends.
    options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    unknown = [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")]
    if unknown:
        raise KernelError(f"the kernel {v.symbol} calls {', '.join(unknown)}, which no code here defines")
    return module


def _without_target(text: str) -> str:
    """Drops the lines that say which machine numba compiled for."""
    return "\n".join(line for line in text.splitlines() if not line.startswith(("target ", "source_filename")))


def _with_entry(text: str, inner: str, v: Variant) -> str:
    """Adds the function that programs call, ``void symbol(i64 arguments, i64 begin, i64 end)``.

    numba's functions return a status and take a place for the result and for an exception; kernels raise none.
    """
    # LLVM must know a processor to order instructions for: else it keeps too many values at a time.
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
    """The machine code as assembly text, for this platform or another (``aarch64-linux-gnu``)."""
    return str(v.target.machine(triple).emit_assembly(llvm_ir(v, triple)))


# -- The cache -----------------------------------------------------------------------------------------------------


def _folder() -> Path | None:
    """The cache's folder for kernels that this version of everything compiles."""
    root = cache_root()
    return None if root is None else root / _fingerprint()


@functools.cache
def _fingerprint() -> str:
    """A hash of what compiled kernels depend on, beside their own variant."""
    digest = hashlib.sha256()
    for fact in (llvmlite.__version__, _numba_version(), sys.platform, platform.machine()):
        digest.update(fact.encode())
    folder = Path(__file__).parent
    for path in (*(folder.parents[1] / name for name in _CONSTANTS), *sorted(folder.glob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _numba_version() -> str:
    """A key of numba's version: to import it, or `importlib.metadata`, would take longer than all this."""
    spec = importlib.util.find_spec("numba")
    if spec is None or spec.origin is None:
        raise KernelError("the package numba, which compiles kernels, is missing: install localllm again")
    return (Path(spec.origin).parent / "_version.py").read_text(encoding="utf-8")


@functools.cache
def _source(file: str) -> bytes:
    """A source file's content, unless it is one of this package's, which the fingerprint covers."""
    path = Path(file)
    return b"" if path.parent == Path(__file__).parent or not path.exists() else path.read_bytes()


def _file_name(v: Variant) -> str:
    digest = hashlib.sha256(v.symbol.encode())
    for part in (v.kernel, *(value for _, value in v.constants)):
        if isinstance(part, Template):
            digest.update(_source(part.file))
    return f"{v.kernel.name}-{v.target.name}-{digest.hexdigest()[:16]}.o"


def _cached(v: Variant) -> bytes | None:
    """Object code from the cache, or None where it has none or a damaged one.

    LLVM ends the process when it is given an object that is cut short or does not define what is looked for.
    """
    folder = _folder()
    if folder is None or (code := read_code(folder / _file_name(v))) is None:
        return None
    _mark_used(folder)
    return code


def _compile(v: Variant) -> bytes:
    """Object code, which is also put into the cache; a cache that cannot be written costs time, not function."""
    code: bytes = v.target.machine().emit_object(llvm_ir(v))
    if (folder := _folder()) is not None:
        write_code(folder / _file_name(v), code)
        _prune(folder)
    return code


@functools.cache
def _mark_used(folder: Path) -> None:
    """Notes, once in a process, that a folder of the cache is in use."""
    with contextlib.suppress(OSError):
        os.utime(folder)


@functools.cache
def _prune(used: Path) -> None:
    """Removes, once in a process, the folders beside ``used`` that nobody has used for long.

    Should a process still be at work in one, it compiles anew what it misses, as at any time.  Whatever has not a
    name of ours stays: the folder may be one that a user named, with other things in it.
    """
    with contextlib.suppress(OSError):
        for folder in used.parent.iterdir():
            is_ours = _FOLDER_NAME.fullmatch(folder.name) and folder != used and not folder.is_symlink()
            if is_ours and is_stale(folder):
                _remove(folder)


def _remove(folder: Path) -> None:
    """Removes a folder of object files, unless there is something else in it."""
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            if file.suffix == ".o" or file.name.startswith(tempfile.gettempprefix()):
                file.unlink()
        folder.rmdir()


# -- Linking -------------------------------------------------------------------------------------------------------

_lock = threading.RLock()
_addresses: dict[str, int] = {}
#: Object code that is yet to be linked, by symbol.
_objects: dict[str, bytes] = {}

# A fork waits for the lock, so that compiler and linker are whole in the child, and nobody holds it there.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def _define_stack_probe() -> None:
    """On Windows code with a frame of more than a page calls ``__chkstk``, which LLVM may not find: ntdll has it."""
    import llvmlite.binding as llvm

    if sys.platform == "win32" and llvm.address_of_symbol("__chkstk") is None:
        llvm.add_symbol("__chkstk", ctypes.cast(ctypes.windll.ntdll["__chkstk"], ctypes.c_void_p).value)


@functools.cache
def _engine() -> llvm.ExecutionEngine:
    """LLVM's linker: one for the process, since code once linked stays."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    _define_stack_probe()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def addresses(variants: Iterable[Variant], progress: Callable[[int, int], None] | None = None) -> dict[Variant, int]:
    """Machine code addresses; kernels not in the cache are compiled, (done, to compile) reported to ``progress``."""
    wanted = dict.fromkeys(variants)
    with _lock:
        to_compile = [v for v in wanted if not _is_ready(v)]
    if to_compile:
        warn_if_unwritable(cache_root())
    # The caller's function runs while nothing is locked, and may raise: what was compiled by then is kept.
    for done, v in enumerate(to_compile):
        if progress:
            progress(done, len(to_compile))
        with _lock, process.UnfinishedWork(process.workers):
            if not _is_ready(v):  # another thread may have compiled it meanwhile
                is_loaded = "numba.core.compiler" in sys.modules
                check_memory(COMPILING_BYTES if is_loaded else LOADING_BYTES, "to compile kernels for this processor")
                _objects[v.symbol] = _compile(v)
    if to_compile and progress:
        progress(len(to_compile), len(to_compile))
    with _lock, process.UnfinishedWork(process.workers):
        _link([v.symbol for v in wanted if v.symbol not in _addresses])
        return {v: _addresses[v.symbol] for v in wanted}


def _is_ready(v: Variant) -> bool:
    """Whether a kernel is linked, or its object code at hand or in the cache."""
    if v.symbol not in _addresses and v.symbol not in _objects and (code := _cached(v)) is not None:
        _objects[v.symbol] = code
    return v.symbol in _addresses or v.symbol in _objects


def _link(symbols: list[str]) -> None:
    """Makes object code runnable.  What has been given to LLVM's linker cannot be taken back."""
    if not symbols:
        return
    objects = [(symbol, _objects.pop(symbol)) for symbol in symbols]
    if (found := link(objects)) is None:
        import llvmlite.binding as llvm

        engine = _engine()
        for _, code in objects:
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        found = [engine.get_function_address(symbol) for symbol in symbols]
    _addresses.update(zip(symbols, found, strict=True))
