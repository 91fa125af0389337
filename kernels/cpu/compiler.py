"""From a kernel's Python to machine code: numba types it and writes LLVM code, LLVM compiles that for a target.

    template ──specialise──▶ Python ──numba──▶ LLVM IR ──LLVM for the target──▶ object code ──link──▶ address
                                                                      └──▶ cache on disk

numba's own ways to machine code know one processor, the one at hand, and its cache does not see changes in
functions imported from elsewhere.  Taking the last step ourselves lets one process compile for several instruction
sets (tests compare them), lets a machine compile for another, and makes a warm start independent of numba, which
takes most of a second to import.

Cached objects lie in a folder named by a hash of everything they depend on: this package's source, the versions of
numba and LLVM, the platform.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from localllm.errors import KernelError
from localllm.kernels.cpu.target import Target
from localllm.kernels.cpu.templates import Template

#: Environment variable that names another folder for compiled kernels.
CACHE_VARIABLE = "LOCALLLM_CACHE"


class Kernel(Template):
    """A template that can be called from a program: ``kernel(begin, end, …)``.

    It works on the units of work begin … end (what a unit is, the kernel says).  Its further parameters are
    addresses and numbers, eight bytes each; those annotated ``float`` are float32.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.parameters = [(a.arg, a.annotation is not None) for a in self.tree.args.args[2:]]


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
        parts = [self.kernel.name, self.target.name]
        for key, value in self.constants:
            parts.append(f"{key}={getattr(value, 'name', None) or getattr(value, '__name__', value)}")
        return ".".join(parts)


def variant(kernel: Kernel, target: Target, **constants: Any) -> Variant:
    return Variant(kernel, target, tuple(sorted(constants.items())))


# -- Python to LLVM ------------------------------------------------------------------------------------------------


def _python(v: Variant) -> Callable[..., Any]:
    """The specialised function ``(arguments, begin, end)``."""
    tree, scope = v.kernel.specialise(dict(v.constants))
    first, second = (a.arg for a in tree.args.args[:2])
    names = ["arguments", first, second]
    tree.args = ast.arguments([], [ast.arg(n) for n in names], None, [], [], None, [])
    tree.decorator_list, tree.returns = [], None
    loads: list[ast.stmt] = []
    for i, (name, is_float) in enumerate(v.kernel.parameters):
        source = f"{name} = {'load_f32' if is_float else 'load_i64'}(arguments + {8 * i})"
        loads += ast.parse(source).body
    tree.body = loads + tree.body
    module = ast.fix_missing_locations(ast.Module([tree], []))
    from localllm.kernels.cpu import simd

    scope |= {"load_i64": simd.load_i64, "load_f32": simd.load_f32}
    exec(compile(module, v.kernel.file, "exec"), scope)
    function: Callable[..., Any] = scope[v.kernel.name]
    return function


def llvm_ir(v: Variant, triple: str | None = None) -> llvm.ModuleRef:
    """The kernel as optimised LLVM code for its target, with one function ``v.symbol``."""
    from numba.core import compiler, types
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    from localllm.kernels.cpu.simd import lowering_for

    function = _python(v)
    flags = compiler.Flags()
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
    flags.error_model = "numpy"  # a division by zero is not an exception
    with global_compiler_lock, lowering_for(v.target):
        typing, context = cpu_target.typing_context, cpu_target.target_context
        typing.refresh()
        context.refresh()
        try:
            result = compiler.compile_extra(typing, context, function, (types.intp,) * 3, types.void, flags, {})
        except Exception as error:
            raise KernelError(f"the kernel {v.symbol} does not compile: {error}") from error
        text, inner = str(result.library._final_module), result.fndesc.llvm_func_name
    machine = v.target.machine(triple)
    module = llvm.parse_assembly(_with_entry(text, inner, v.symbol))
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    for f in module.functions:
        if not f.is_declaration and f.name != v.symbol:
            f.linkage = "internal"
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    # Vectors are written by hand here; what LLVM would vectorise beside them are only the odd ends.
    options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module


def _with_entry(text: str, inner: str, symbol: str) -> str:
    """Adds the function that programs call, ``void symbol(i64 arguments, i64 begin, i64 end)``.

    numba's functions return a status and take a place for the result and for an exception; kernels raise none.
    """
    lines = [line for line in text.splitlines() if not line.startswith(("target ", "source_filename"))]
    entry = f"""
define void @"{symbol}"(i64 %arguments, i64 %begin, i64 %end) {{
  %result = alloca ptr
  %exception = alloca ptr
  %status = call i32 @{inner}(ptr %result, ptr %exception, i64 %arguments, i64 %begin, i64 %end)
  ret void
}}
"""
    return "\n".join(lines) + entry


def assembly(v: Variant, triple: str | None = None) -> str:
    """The machine code as assembly text, for this platform or another (``aarch64-linux-gnu``)."""
    return str(v.target.machine(triple).emit_assembly(llvm_ir(v, triple)))


# -- The cache -----------------------------------------------------------------------------------------------------


def cache_root() -> Path:
    """The folder for compiled kernels: ``LOCALLLM_CACHE``, or the platform's place for caches."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "localllm" / "kernels"


@functools.cache
def _fingerprint() -> str:
    """A hash of what compiled kernels depend on, beside their own variant."""
    from importlib.metadata import version

    digest = hashlib.sha256()
    for fact in (llvmlite.__version__, version("numba"), llvm.get_process_triple()):
        digest.update(fact.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cache_file(v: Variant) -> Path:
    name = hashlib.sha256(v.symbol.encode()).hexdigest()[:16]
    return cache_root() / _fingerprint() / f"{v.kernel.name}-{v.target.name}-{name}.o"


def is_cached(v: Variant) -> bool:
    return _cache_file(v).exists()


def _object_code(v: Variant) -> bytes:
    file = _cache_file(v)
    with contextlib.suppress(OSError):
        return file.read_bytes()
    code: bytes = v.target.machine().emit_object(llvm_ir(v))
    with contextlib.suppress(OSError):  # a home that cannot be written costs time, not function
        file.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and moved into place, so that another process never reads half a file.
        handle, scratch = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(code)
        os.replace(scratch, file)
    return code


# -- Linking -------------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_addresses: dict[str, int] = {}


@functools.cache
def _engine() -> llvm.ExecutionEngine:
    """The linker: one for the process, since code once linked stays."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def addresses(variants: Iterable[Variant], progress: Callable[[int, int], None] | None = None) -> dict[Variant, int]:
    """Machine code addresses, compiling what is not in the cache.

    Args:
        variants: what is needed; duplicates are fine.
        progress: called with (kernels compiled, kernels to compile) if any has to be compiled.
    """
    wanted = dict.fromkeys(variants)
    with _lock:
        missing = [v for v in wanted if v.symbol not in _addresses]
        to_compile = [v for v in missing if not is_cached(v)]
        if to_compile and progress:
            progress(0, len(to_compile))
        compiled = 0
        engine = _engine()
        for v in missing:
            engine.add_object_file(llvm.ObjectFileRef.from_data(_object_code(v)))
            if v in to_compile:
                compiled += 1
                if progress:
                    progress(compiled, len(to_compile))
        if missing:
            engine.finalize_object()
            for v in missing:
                _addresses[v.symbol] = engine.get_function_address(v.symbol)
        return {v: _addresses[v.symbol] for v in wanted}
