"""Compile kernels of emulated processors on the host, because compiling takes minutes under emulation.

``python -m tests.arm.native_compiler SOCKET`` is the server.  Under emulation, ``pytest -p
tests.arm.native_compiler`` sends requests to the socket in `SOCKET_VARIABLE`.  A request contains the name of a
template and its constants. The compiled code is stored in the cache under the name that the emulated process looks
up.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import socket
import socketserver
import sys
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm

from localllm.errors import KernelError
from localllm.kernels.cpu import compiler, elementwise
from localllm.kernels.cpu.target import TARGETS
from localllm.kernels.cpu.templates import Template
from localllm.kernels.cpu.tiles import TILES

SOCKET_VARIABLE = "LOCALLLM_NATIVE_COMPILER"


def named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def look_up(name: str) -> Any:
    """Return the function that looks up codes in a table; it has a name, but is no attribute of a module."""
    return next(t.look_up for t in TILES.values() if t.look_up and t.look_up.__name__ == name)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Template):
            return named, tuple(value.full_name.rsplit(".", 1))
        name = getattr(value, "__name__", "")
        if name.startswith("look_up_"):
            return look_up, (name,)
        if callable(value) and getattr(value, "__qualname__", name) != name:  # a function created by another function
            return named, (value.__module__, name)
        return NotImplemented


def _code(request: Any) -> bytes:
    variant, triple = pickle.loads(request)
    code: bytes = variant.target.machine(triple).emit_object(compiler.llvm_ir(variant, triple))
    return code


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.wfile.write(_code(self.rfile.read()))


class _Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    request_queue_size = 64


def serve(path: str) -> None:
    """Answer requests, each in a fork of this process, which has imported numba."""
    neon = next(t for t in TARGETS if t.name == "neon")
    compiler.llvm_ir(compiler.variant(elementwise.quantise, neon), "aarch64-unknown-linux-gnu")
    with _Server(path, _Handler) as server:
        server.serve_forever()


def _asking(path: str) -> Callable[[compiler.Variant], bytes]:
    def compile_there(v: compiler.Variant) -> bytes:
        request = io.BytesIO()
        _Pickler(request).dump((v, llvm.get_process_triple()))
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            connection.sendall(request.getvalue())
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as answer:
                code = answer.read()
        if not code:
            raise KernelError(f"the kernel {v.symbol} does not compile; see the output of the compiler")
        if (folder := compiler._folder()) is not None:
            compiler.write_code(folder / compiler._file_name(v), code)
        return code

    return compile_there


if __name__ == "__main__":
    serve(sys.argv[1])
elif path := os.environ.get(SOCKET_VARIABLE):
    compiler._compile = _asking(path)
