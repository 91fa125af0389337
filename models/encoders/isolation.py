"""Decoders of untrusted files, in worker processes with limits on time and memory.

A small file can take a decoder minutes or gigabytes, and most decoders cannot be interrupted.  A worker process ends
itself after `SECONDS`, and is killed when the request is cancelled.  It decodes one file at a time and is used again.
It exits when its standard input is closed, so no worker outlives the program.

A worker is a plain child process: `multiprocessing` would import the program's main module again.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from localllm.cancellation import check_cancelled
from localllm.errors import UsageError

#: Seconds that a file may take to decode: 20 times as long as a progressive JPEG file of 50 megapixels.
SECONDS = 30
#: Bytes of address space that a worker may have, where the system has such a limit (not Windows).
MAX_MEMORY = 6 << 30
#: Files that are decoded at the same time; more wait.
MAX_WORKERS = 4
#: Seconds between two checks whether a request is cancelled.
_POLL_SECONDS = 0.05

#: The program of a worker.  It gets the paths of imports, because a program may have changed them.
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {0} import _serve; _serve({1}, {2})"


class Decoded(NamedTuple):
    """The result of a decoder: values for JSON, and the data."""

    info: dict[str, Any]
    data: Any  # an object with the buffer interface


class _Crash(Exception):
    """A worker has ended without an answer."""


def decode(
    decoder: Callable[..., Decoded], source: str | os.PathLike[str] | bytes | bytearray, label: str, *arguments: Any
) -> Decoded:
    """Call ``decoder(source, label, *arguments)`` in a worker process.

    A program without a Python interpreter, such as an executable of PyInstaller, decodes in its own process without
    limits.

    Args:
        decoder: a function of a module; raises UsageError for a damaged file.
        source: the path or the bytes of a file.
        label: the name of the file in errors.
        arguments: further arguments, which JSON can represent.

    Raises:
        UsageError: the decoder's error, or the file takes too much time or memory.
        CancelledError: the request is cancelled (`localllm.cancellation`).
    """
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    if _interpreter() is None:
        return decoder(source, label, *arguments)
    return _pool.run(decoder, source, label, arguments)


def _interpreter() -> str | None:
    """Return the path of the Python interpreter (`multiprocessing.set_executable`); None if the program has none.

    In a program that embeds Python, `sys.executable` may be the program itself.
    """
    from multiprocessing import spawn  # imported here: it takes 10 ms

    path = os.fsdecode(spawn.get_executable() or "")
    return path if Path(path).stem.lower().startswith(("python", "pypy")) else None


class _Worker:
    """A process that decodes one file at a time."""

    def __init__(self) -> None:
        import subprocess

        program = _PROGRAM.format(__name__, SECONDS, MAX_MEMORY)
        options: dict[str, Any] = {}
        if sys.platform == "win32":
            options["creationflags"] = subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP
        else:
            options["process_group"] = 0  # Ctrl-C ends the program or its reply, not the worker
        paths = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        # -P: without it the program would import json.py from the current folder.
        command = [_interpreter(), "-P", "-c", program, paths]
        try:
            self._process = subprocess.Popen(
                command,  # type: ignore[arg-type]  # an interpreter exists
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # numpy's threads take address space
                **options,
            )
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"the process that decodes images and audio cannot be started ({reason})") from None
        self._input: Any = self._process.stdin
        self._output: Any = self._process.stdout

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def exchange(self, request: dict[str, Any], data: bytes | bytearray) -> Decoded:
        """Send a file and return the worker's answer.  Raises _Crash if the worker ends instead."""
        try:
            _write(self._input, request, data)
            if (answer := _read(self._output)) is not None:
                return Decoded(*answer)
        except (OSError, ValueError):  # ValueError: closed by `stop`
            pass
        raise _Crash

    def stop(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.wait()
        self._input.close()
        self._output.close()

    def disown(self) -> None:
        """Close the pipes in a forked process; the worker belongs to its parent."""
        self._process.returncode = 0  # it cannot be waited for here
        self._input.close()
        self._output.close()


class _Pool:
    """The workers of this process.  Used by several threads."""

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(MAX_WORKERS)
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []

    def run(
        self, decoder: Callable[..., Decoded], source: str | bytes | bytearray, label: str, arguments: Any
    ) -> Decoded:
        while not self._slots.acquire(timeout=_POLL_SECONDS):
            check_cancelled()
        try:
            worker = self._take()
            try:
                answer = self._answer(worker, decoder, source, label, arguments)
            except BaseException:
                with self._lock:
                    self._workers.discard(worker)
                worker.stop()
                raise
            with self._lock:
                self._idle.append(worker)
        finally:
            self._slots.release()
        if (error := answer.info.get("error")) is not None:
            raise UsageError(error)
        return answer

    def _take(self) -> _Worker:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive:
                    return worker
                self._workers.discard(worker)
                worker.stop()
            worker = _Worker()
            self._workers.add(worker)
            return worker

    def _answer(
        self, worker: _Worker, decoder: Callable[..., Decoded], source: str | bytes | bytearray, label: str, more: Any
    ) -> Decoded:
        request = {"module": decoder.__module__, "name": decoder.__name__, "label": label, "arguments": more}
        if isinstance(source, str):
            request["path"], source = os.path.abspath(source), b""
        answers: list[Decoded] = []

        def exchange() -> None:
            with contextlib.suppress(_Crash):
                answers.append(worker.exchange(request, source))

        # A read from a pipe cannot be cancelled on Windows.
        thread = threading.Thread(target=exchange, name="localllm-decoder", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            check_cancelled()
        if not answers:
            if worker not in self._workers:
                raise SystemExit  # the program ends: ends a daemon thread without a message
            raise UsageError(
                f"{label} takes more than {SECONDS} seconds or {MAX_MEMORY >> 30} GiB to decode, or crashes its "
                "decoder: save it again as a plain file, or make it smaller"
            )
        return answers[0]

    def close(self) -> None:
        with self._lock:
            workers, self._workers, self._idle = self._workers, set(), []
        for worker in workers:
            worker.stop()

    def disown(self) -> None:
        for worker in self._workers:
            worker.disown()


_pool = _Pool()


def _after_fork() -> None:
    global _pool
    _pool.disown()
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _pool.close())


# -- Messages ------------------------------------------------------------------------------------------------------


def _write(file: FileIO, header: dict[str, Any], data: Any) -> None:
    """Write a line of JSON, and data."""
    view = memoryview(data).cast("B")
    line = json.dumps({**header, "n_bytes": len(view)}).encode() + b"\n"
    for unwritten in (memoryview(line), view):
        while unwritten:
            unwritten = unwritten[file.write(unwritten) :]


def _read(file: FileIO) -> tuple[dict[str, Any], bytearray] | None:
    """Read a message; None at the end of the file."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (byte := file.read(1)):
            return None
        line += byte
    header: dict[str, Any] = json.loads(line)
    data = bytearray(header.pop("n_bytes"))
    view = memoryview(data)
    while view:
        if not (n := file.readinto(view)):
            return None
        view = view[n:]
    return header, data


# -- The worker ----------------------------------------------------------------------------------------------------


def _serve(seconds: float, max_memory: int) -> None:
    """Decode files until standard input is closed."""
    requests, answers = FileIO(0), FileIO(os.dup(1), "w")
    os.dup2(2, 1)  # decoders print warnings
    if sys.platform != "win32":
        import resource

        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (message := _read(requests)) is not None:
        request, data = message
        faulthandler.dump_traceback_later(seconds, exit=True)  # its thread needs no lock of the interpreter
        try:
            decoder = getattr(importlib.import_module(request["module"]), request["name"])
            answer: Decoded = decoder(request.get("path", data), request["label"], *request["arguments"])
        except UsageError as error:
            answer = Decoded({"error": str(error)}, b"")
        except MemoryError:
            answer = Decoded({"error": f"{request['label']} takes too much memory to decode: make it smaller"}, b"")
        faulthandler.cancel_dump_traceback_later()
        _write(answers, *answer)
        del message, data, answer
