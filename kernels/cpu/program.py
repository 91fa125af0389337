"""A forward pass as a program: a list of kernel calls that threads walk together, with no Python in between.

Each instruction names a kernel, its arguments and how many units of work there are; how many may depend on the
batch, through a header of numbers that the caller fills in before each run.  The threads take units from a shared
counter until none are left, and wait for each other where the next instruction reads what this one wrote.
"""

from __future__ import annotations

import ctypes
import os
import queue
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from localllm.errors import KernelError
from localllm.kernels.cpu.compiler import Variant, addresses, kernel, variant
from localllm.kernels.cpu.simd import (
    call_kernel,
    call_yield,
    fetch_add,
    load_atomic,
    load_i64,
    pause,
    store_atomic,
)
from localllm.kernels.cpu.target import Target

#: Bytes of an instruction in a program's table, and of a counter (a cache line each, or threads would collide).
INSTRUCTION, LINE = 64, 64
#: Spins before a waiting thread offers its core to others.
SPINS = 2000
#: Pieces that an instruction's work is cut into, for each thread: more balance better, fewer cost less.
PIECES = 4

_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


@kernel
def run_program(begin, end, table, n_instructions, header, counters, meeting, give_way):
    """Runs a program as thread ``begin`` of ``end``.

    table: int64 [n, 8]: kernel, arguments, units a header number, which header number, wait afterwards.
    counters: int64, one a line, zero at first.  meeting: int64, threads that have arrived, and a line further,
    how often all have.  give_way: the address of a C function that offers the core to other threads.
    """
    for i in range(n_instructions):
        entry = table + INSTRUCTION * i
        function, arguments = load_i64(entry), load_i64(entry + 8)
        units = load_i64(entry + 16) * load_i64(header + 8 * load_i64(entry + 24))
        piece = max(1, units // (end * PIECES))
        if end == 1:
            piece = max(1, units)
        place = fetch_add(counters + LINE * i, piece)
        while place < units:
            call_kernel(function, arguments, place, min(place + piece, units))
            place = fetch_add(counters + LINE * i, piece)
        if load_i64(entry + 32) != 0 and end > 1:
            meetings = load_atomic(meeting + LINE)
            if fetch_add(meeting, 1) == end - 1:
                store_atomic(meeting, 0)
                store_atomic(meeting + LINE, meetings + 1)
            else:
                spins = 0
                while load_atomic(meeting + LINE) == meetings:
                    pause()
                    spins += 1
                    if spins > SPINS:
                        call_yield(give_way)


@dataclass(frozen=True)
class Instruction:
    """A kernel call: ``units * header[slot]`` units of work.

    Attributes:
        arguments: integers (addresses, sizes) and floats, in the kernel's order.
        wait: whether all threads must be done before the next instruction begins.
    """

    variant: Variant
    arguments: Sequence[int | float]
    units: int
    slot: int
    wait: bool = True


class Program:
    """Instructions ready to run.

    Args:
        header: int64; ``header[slot]`` is read when an instruction begins.
        keep: what the arguments' addresses point into, kept alive with the program.
        progress: see `localllm.kernels.cpu.compiler.addresses`.
    """

    def __init__(
        self,
        instructions: Sequence[Instruction],
        header: np.ndarray,
        target: Target,
        keep: object = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        runner = variant(run_program, target)
        code = addresses([runner, *(i.variant for i in instructions)], progress)
        self._entry = _ENTRY(code[runner])
        self._keep = (keep, header)
        self._table = np.zeros((len(instructions), INSTRUCTION // 8), np.int64)
        self._arguments = [np.frombuffer(_pack(i), np.int64) for i in instructions]
        for row, i, arguments in zip(self._table, instructions, self._arguments, strict=True):
            row[:5] = code[i.variant], arguments.ctypes.data, i.units, i.slot, i.wait
        self._counters = np.zeros((len(instructions), LINE // 8), np.int64)
        self._meeting = np.zeros((2, LINE // 8), np.int64)
        parts = (self._table, header, self._counters, self._meeting)
        table, head, counters, meeting = (a.ctypes.data for a in parts)
        self._call = np.array([table, len(instructions), head, counters, meeting, _give_way()], np.int64)

    def run(self, workers: Workers) -> None:
        """Runs all instructions once, on all the workers' threads."""
        self._counters[:] = 0
        workers.run(self._entry, self._call.ctypes.data)


def _pack(instruction: Instruction) -> bytes:
    """The arguments as the kernel reads them, eight bytes each."""
    kernel, arguments = instruction.variant.kernel, instruction.arguments
    if [isinstance(a, float) for a in arguments] != [is_float for _, is_float in kernel.parameters]:
        names = ", ".join(f"{name}: {'float' if is_float else 'int'}" for name, is_float in kernel.parameters)
        raise KernelError(f"the kernel {kernel.name} takes ({names}), but was given {tuple(arguments)}")
    return b"".join(struct.pack("<f4x" if isinstance(a, float) else "<q", a) for a in arguments)


def _give_way() -> int:
    """The address of the C function that offers a core to other threads."""
    if sys.platform == "win32":
        function = ctypes.windll.kernel32.SwitchToThread
    else:
        function = ctypes.CDLL(None).sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value or 0


#: A part of a program: (arguments, thread number, number of threads).
Part = Callable[[int, int, int], None]


class Workers:
    """Threads that run programs.

    They are Python threads that sleep on a queue between programs and let go of the interpreter's lock within one.
    So idle ones burn nothing, several `Workers` live side by side in one process, and a forked child, which
    inherits no threads, simply starts its own.

    The thread that asks takes no part unless it is the only one: Ctrl-C may interrupt it between any two steps of
    Python, and the others would wait for it for ever.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._lock = threading.Lock()
        self._process = 0

    def run(self, entry: Part, arguments: int) -> None:
        """Calls ``entry(arguments, i, n)`` on thread i, for all of them; returns when all have."""
        with self._lock:
            if self.n == 1:
                entry(arguments, 0, 1)
                return
            if self._process != os.getpid():
                self._start()
            self._jobs[0].put((entry, arguments))
            self._await_done()

    def close(self) -> None:
        """Ends the threads."""
        with self._lock:
            if self._process == os.getpid():
                for jobs in self._jobs:
                    jobs.put(None)
            self._process = 0

    def _start(self) -> None:
        self._jobs: list[queue.SimpleQueue[tuple[Part, int] | None]] = [queue.SimpleQueue() for _ in range(self.n)]
        self._done: list[queue.SimpleQueue[None]] = [queue.SimpleQueue() for _ in range(self.n)]
        for i in range(self.n):
            # What a thread needs is handed to it, so that a forgotten Workers can be collected.
            work = (i, self._jobs, self._done)
            threading.Thread(target=_work, args=work, name=f"localllm-{i}", daemon=True).start()
        self._process = os.getpid()

    def _await_done(self) -> None:
        """Waits for thread 0; an interrupt meanwhile is raised only after that, since buffers are in use."""
        interrupt: BaseException | None = None
        while True:
            try:
                self._done[0].get()
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _work(
    i: int,
    jobs: list[queue.SimpleQueue[tuple[Part, int] | None]],
    done: list[queue.SimpleQueue[None]],
) -> None:
    """A worker's life: thread 0 passes each job on to the others and reports when all are through with it."""
    while (job := jobs[i].get()) is not None:
        entry, arguments = job
        if i == 0:
            for other in jobs[1:]:
                other.put(job)
        entry(arguments, i, len(jobs))
        if i == 0:
            for other_done in done[1:]:
                other_done.get()
        done[i].put(None)
