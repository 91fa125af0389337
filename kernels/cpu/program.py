"""A forward pass as a program: a list of kernel calls that threads execute together, without Python code in between.

Each instruction specifies a kernel, its arguments and its number of units of work.  This number may depend on the
batch, through a header of numbers that the caller fills before each run.  The threads take units from a shared
counter until all are taken, and wait for each other if the next instruction reads the results.
"""

from __future__ import annotations

import ctypes
import functools
import queue
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.errors import DeviceError
from localllm.kernels import process
from localllm.kernels.buffers import Address, Buffer
from localllm.kernels.cpu.compiler import Variant, addresses, kernel, variant
from localllm.kernels.cpu.host import check_memory, has_unequal_cores
from localllm.kernels.cpu.simd import call_kernel, call_sleep, fetch_add, load_atomic, load_i64, pause, store_atomic
from localllm.kernels.cpu.target import Target
from localllm.kernels.process import Process

#: Bytes of an instruction in a program's table, and of a counter (one cache line each, to avoid false sharing).
INSTRUCTION, LINE = 64, 64
#: Seconds that a waiting thread spins before it sleeps: as long as waiting takes if work is well balanced.  After
#: that, the other thread may have no core.
SPIN_SECONDS = 100e-6
#: Spins per measurement of a spin's duration, and number of measurements: the shortest one is undisturbed.
TRIAL_SPINS, SPIN_TRIALS = 4096, 3
#: Microseconds of each sleep.  Systems add some tens of microseconds.
SLEEP_US = 1
#: Chunks of an instruction's work per thread: more chunks balance better, fewer chunks cost less.  With unequal
#: cores, threads wait at the end for a chunk on a slow core.
CHUNKS_PER_THREAD, CHUNKS_ON_UNEQUAL_CORES = 4, 16
#: More units than any instruction contains.
ALL_UNITS = 1 << 62
#: Share of an instruction's units in its first piece, which measures how long a unit takes (1 / FIRST_SHARE).
FIRST_SHARE = 32

#: If more bytes of memory than this are available, a thread failed to start for another reason.
STACK_BYTES = 16 << 20

#: Seconds that this thread was running; on Windows all seconds, because its ticks are longer than a step.
_thread_time = time.perf_counter if sys.platform == "win32" else time.thread_time

#: Types of kernel arguments.
Argument = int | float | Buffer | Address

_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


@kernel
def run_program(begin, end, table, n_instructions, header, counters, barrier, most_spins, sleep, stop, most, chunks):
    """Run a program as thread ``begin`` of ``end``: the units of each instruction before ``stop``.

    table: int64 [n, 8]: kernel, arguments, units per header number, index of the header number, whether to wait
    afterwards.
    counters: int64, one per cache line, initially the first unit.  most: the maximum number of remaining units.
    barrier:  int64, number of threads that arrived and, one line later, number of times that all arrived.
    most_spins: spins of a waiting thread before it sleeps.  sleep: address of a C function that sleeps for a number
    of microseconds.  chunks: per thread.
    """
    for i in range(n_instructions):
        entry = table + INSTRUCTION * i
        function, arguments = load_i64(entry), load_i64(entry + 8)
        units = min(stop, load_i64(entry + 16) * load_i64(header + 8 * load_i64(entry + 24)))
        chunk = max(1, min(units, most) // (end * chunks))
        if end == 1:
            chunk = max(1, units)
        first_unit = fetch_add(counters + LINE * i, chunk)
        while first_unit < units:
            call_kernel(function, arguments, first_unit, min(first_unit + chunk, units))
            first_unit = fetch_add(counters + LINE * i, chunk)
        if load_i64(entry + 32) != 0 and end > 1:
            passed = load_atomic(barrier + LINE)
            if fetch_add(barrier, 1) == end - 1:
                store_atomic(barrier, 0)
                store_atomic(barrier + LINE, passed + 1)
            else:
                spins = 0
                while load_atomic(barrier + LINE) == passed:
                    pause()
                    spins += 1
                    if spins > most_spins:
                        call_sleep(sleep, SLEEP_US)


@kernel
def spin(begin, end, barrier):
    """Spin ``end - begin`` times, in the same way as a waiting thread in `run_program`."""
    for _ in range(begin, end):
        if load_atomic(barrier) == 0:
            pause()


@functools.cache
def spins_in(seconds: float, target: Target) -> int:
    """Return the number of spins of a waiting thread in ``seconds``.

    A spin takes a nanosecond on some processors and fifty on others, so it is measured, in less than a millisecond.
    """
    code = variant(spin, target)
    entry = _ENTRY(addresses([code])[code])
    arguments = np.zeros(2, np.int64)
    arguments[0] = arguments[1:].ctypes.data
    times = []
    for _ in range(SPIN_TRIALS):
        begin = time.perf_counter()
        entry(arguments.ctypes.data, 0, TRIAL_SPINS)
        times.append(time.perf_counter() - begin)
    return max(1, round(seconds * TRIAL_SPINS / min(times)))


@dataclass(frozen=True)
class Instruction:
    """A kernel call: ``units * header[slot]`` units of work."""

    variant: Variant
    arguments: Sequence[Argument]  # in the order of `Kernel.arguments`
    units: int
    slot: int
    wait: bool = True  # whether all threads must finish before the next instruction starts


class Program:
    """Instructions ready to run; ``header[slot]``, int64, is read when an instruction starts.

    ``keep`` is the memory that the arguments refer to, kept alive with the program; ``arena`` is the address of the
    memory of buffers; ``progress``: see `localllm.kernels.cpu.compiler.addresses`.
    """

    def __init__(
        self,
        instructions: Sequence[Instruction],
        header: np.ndarray,
        target: Target,
        keep: object = None,
        progress: Callable[[int, int], None] | None = None,
        arena: int = 0,
    ) -> None:
        runner = variant(run_program, target)
        self._process = Process()
        code = addresses([runner, variant(spin, target), *(i.variant for i in instructions)], progress)
        self._entry = _ENTRY(code[runner])
        self._keep, self._header = (keep, header), header
        self._table = np.zeros((len(instructions), INSTRUCTION // 8), np.int64)
        self._arguments = [np.frombuffer(_pack(i, arena), np.int64) for i in instructions]
        for row, i, arguments in zip(self._table, instructions, self._arguments, strict=True):
            row[:5] = code[i.variant], arguments.ctypes.data, i.units, i.slot, i.wait
        self._counters = np.zeros((len(instructions), LINE // 8), np.int64)
        self._barrier = np.zeros((2, LINE // 8), np.int64)
        self._call_arguments = {
            "table": self._table.ctypes.data, "n_instructions": len(instructions), "header": header.ctypes.data,
            "counters": self._counters.ctypes.data, "barrier": self._barrier.ctypes.data,
            "most_spins": spins_in(SPIN_SECONDS, target), "sleep": _sleep_function(), "stop": ALL_UNITS,
            "most": ALL_UNITS, "chunks": _chunks_per_thread(),
        }  # fmt: skip
        self._call = self._packed_call()
        self._call_address = self._call.ctypes.data

    def _packed_call(self, **changes: int) -> NDArray[np.int64]:
        """Return the arguments of `run_program`, with changes."""
        return np.array(run_program.arguments(**{**self._call_arguments, **changes}), np.int64)

    def run(
        self,
        workers: Workers,
        before: Callable[[], None] = lambda: None,
        *,
        threads: int | None = None,
        instructions: range | None = None,
    ) -> float:
        """Run instructions once.  Return the largest share of its time that a thread slept or had no core.

        Args:
            before: fills the data that the instructions read; called while these threads run nothing else.
            threads: number of the workers' threads that take part; defaults to all.
            instructions: consecutive instructions to run; defaults to all.

        Raises:
            DeviceError: the program was created before this process was forked.
            Exception: any error of ``before``; then no instruction was run.
        """
        self._process.check()

        def prepare() -> None:
            before()
            self._counters[:] = 0

        call, address = None, self._call_address
        if instructions is not None:
            call = self._call_of(instructions.start, len(instructions))
            address = call.ctypes.data
        job = Job(self._entry, address, keep=(self, call), threads=threads)
        workers.run(job, prepare)
        return max(job.lost, default=0.0)

    def _call_of(self, first: int, n: int, **changes: int) -> NDArray[np.int64]:
        """Return the arguments of `run_program` for ``n`` instructions, with changes."""
        tables = {"table": self._table[first:].ctypes.data, "counters": self._counters[first:].ctypes.data}
        return self._packed_call(**tables, n_instructions=n, **changes)

    def run_in_pieces(self, workers: Workers, before: Callable[[], None], piece_s: float) -> Iterator[None]:
        """Run with the same bits as `run`, in pieces of about ``piece_s`` seconds with pauses for other work."""
        self._process.check()
        for i, (units, slot) in enumerate(self._table[:, 2:4].tolist()):
            # The first instruction is one piece, because ``before`` sets its number of units.
            total = units * int(self._header[slot]) if i else 1
            n_done, n, seconds = 0, max(1, total // FIRST_SHARE) if i else ALL_UNITS, 0.0
            while n_done < total:
                first = n_done
                call = self._call_of(i, 1, stop=first + n, most=n)

                def prepare(i: int = i, first: int = first) -> None:
                    if i == 0:
                        before()
                    self._counters[i] = first

                begin = time.perf_counter()
                workers.run(Job(self._entry, call.ctypes.data, keep=(self, call)), prepare)
                seconds += time.perf_counter() - begin
                n_done += n
                n = max(1, int(n_done * piece_s / max(seconds, 1e-6)))
                yield


@functools.cache
def _chunks_per_thread() -> int:
    return CHUNKS_ON_UNEQUAL_CORES if has_unequal_cores() else CHUNKS_PER_THREAD


def _pack(instruction: Instruction, arena: int) -> bytes:
    """Return the arguments in the kernel's format, eight bytes each."""
    arguments = (_resolved(argument, arena) for argument in instruction.arguments)
    return b"".join(struct.pack("<f4x" if isinstance(a, float) else "<q", a) for a in arguments)


def _resolved(argument: Argument, arena: int) -> int | float:
    """Return a number unchanged, and the address of a place in a buffer."""
    if isinstance(argument, Address):
        return _resolved(argument.buffer, arena) + argument.n_bytes
    if isinstance(argument, Buffer):
        return arena + argument.offset if argument.address is None else argument.address
    return argument


def _sleep_function() -> int:
    """Return the address of the C function that a waiting thread sleeps with.

    Yielding the core (``sched_yield``) does not help if other programs are busy: a thread that yields loses the core
    for a whole time slice of milliseconds, but a thread that slept gets it back at once.
    """
    if sys.platform == "win32":
        # Sleep on Windows takes at least milliseconds.  This function ignores its argument.
        function = ctypes.windll.kernel32.SwitchToThread
    else:
        function = ctypes.CDLL(None).usleep
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class Job:
    """Work for all threads, or for ``threads`` threads: each calls ``entry(arguments, thread, n_threads)``."""

    def __init__(
        self, entry: Callable[[int, int, int], None], arguments: int, keep: object = None, threads: int | None = None
    ) -> None:
        self.entry = entry
        self.arguments = arguments
        self.keep = keep
        self.threads = threads
        self.done = False
        self.error: BaseException | None = None
        #: Share of its time that each thread slept or had no core.  Not measured for a single thread, because no
        #: other thread waits for it.
        self.lost: list[float] = []

    def n_threads(self, n: int) -> int:
        """Return the number of threads, at most n, that run this job."""
        return min(self.threads or n, n)

    def run(self, i: int, n: int) -> None:
        """Run the part of thread i of n; an exception is stored for the thread that submitted the job."""
        if n > 1:
            began, computed = time.perf_counter(), _thread_time()
        try:
            self.entry(self.arguments, i, n)
        except BaseException as error:
            self.error = error
        if n > 1:
            seconds, computed = time.perf_counter() - began, _thread_time() - computed
            self.lost.append(1 - computed / max(seconds, 1e-9))


class _Inbox:
    """The inbox of a thread: jobs, then None; and one item for each finished job."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.through: queue.SimpleQueue[None] = queue.SimpleQueue()


class Workers:
    """Threads that run programs.

    They are Python threads that sleep on a queue between programs, and release the interpreter's lock during a
    program.  Idle threads use no processor time, so several `Workers` can exist in one process.  A forked child
    inherits no threads, and must create its own `Workers`.

    An engine's thread runs the first part of its jobs itself, which avoids waking another thread.  Other callers'
    threads do so only for a single thread.  Otherwise Ctrl-C, or an exception raised in the thread, could interrupt
    it between two steps of Python, while the workers wait for it or still compute.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._lock = threading.Lock()
        self._process = Process()
        self._started = False
        self._last: Job | None = None

    def run(self, job: Job, before: Callable[[], None] | None = None) -> None:
        """Run a job on its number of threads, and return when all parts are finished.

        Args:
            before: called first, while these threads run nothing else.

        Raises:
            Exception: any error of a part of the job.
            KeyboardInterrupt: raised only after the job finished, because its buffers are in use.
            DeviceError: a thread cannot be started; or the workers were created before this process was forked.
            NotEnoughMemoryError: a thread cannot be started because there is no memory for its stack.
            ClosedError: as in `process.Stage.check`, if the process is ending and engines have stopped.
        """
        self._process.check()
        with self._lock, process.UnfinishedWork(process.workers):
            if self.n > 1 and not self._started:
                self._start()
            self._wait_until_idle()
            if before is not None:
                before()
            if self.n == 1:
                job.run(0, 1)
            elif process.engines.is_own:
                _run_shared(job, self._inboxes)
            else:
                self._last = job
                self._await(job)
                self._last = None
        if job.error is not None:
            raise job.error

    def wait_until_idle(self) -> None:
        """Return when these threads run nothing.  Called before other code changes the memory of their jobs."""
        with self._lock:
            self._wait_until_idle()

    def _wait_until_idle(self) -> None:
        if self._last is not None:  # two interrupts at once may have ended the wait early
            self._await(self._last)
            self._last = None

    def close(self) -> None:
        """Stop the threads; a later run starts new ones."""
        if not self._process.is_current:  # the lock may be held forever, and the child has no threads
            return
        with self._lock:
            if self._started:
                self._end()
            self._started = False

    def _start(self) -> None:
        self._inboxes = inboxes = [_Inbox() for _ in range(self.n)]
        self._last = None
        # The threads do not refer to the Workers, so that deleting the Workers stops them.
        self._end = weakref.finalize(self, _tell_all, inboxes)
        self._end.atexit = False  # engines may still need them; `localllm.kernels.process` defines the order
        for i in range(self.n):
            try:
                threading.Thread(target=_work, args=(i, inboxes), name=f"localllm-{i}", daemon=True).start()
            except RuntimeError as error:
                self._end()
                check_memory(STACK_BYTES, f"to start {self.n} threads")
                raise DeviceError(
                    f"{i or 'none'} of {self.n} threads could be started: the system limits how many this process or "
                    "user may have; use fewer threads"
                ) from error
        self._started = True

    def _await(self, job: Job) -> None:
        """Hand over a job and wait until it is done; an interrupt during the wait is raised afterwards."""
        interrupt: BaseException | None = None
        handed_over = False
        while not job.done:
            try:
                while not job.done:
                    if not handed_over:
                        self._inboxes[0].jobs.put(job)  # repeated if interrupted here: a finished job is ignored
                        handed_over = True
                    self._inboxes[0].through.get()
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _tell_all(inboxes: list[_Inbox]) -> None:
    """Stop the threads."""
    for inbox in inboxes:
        inbox.jobs.put(None)


def _work(i: int, inboxes: list[_Inbox]) -> None:
    """Run a worker thread: thread 0 passes each job to the other threads and reports when it is finished."""
    while (job := inboxes[i].jobs.get()) is not None:
        if i:
            job.run(i, job.n_threads(len(inboxes)))
        elif job.done:  # handed over twice
            continue
        else:
            _run_shared(job, inboxes)
        inboxes[i].through.put(None)
        del job


def _run_shared(job: Job, inboxes: list[_Inbox]) -> None:
    """Run the first part of a job in this thread, the other parts in theirs, and wait until all are finished."""
    n = job.n_threads(len(inboxes))
    for inbox in inboxes[1:n]:
        inbox.jobs.put(job)
    job.run(0, n)
    for inbox in inboxes[1:n]:
        inbox.through.get()
    job.done = True
