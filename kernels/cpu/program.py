"""A forward pass as a program: a list of kernel calls that threads walk together, with no Python in between.

Each instruction names a kernel, its arguments and how many units of work there are; how many may depend on the
batch, through a header of numbers that the caller fills in before each run.  The threads take units from a shared
counter until none are left, and wait for each other where the next instruction reads what this one wrote.
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

from localllm.errors import DeviceError, KernelError
from localllm.kernels import process
from localllm.kernels.buffers import Address, Buffer
from localllm.kernels.cpu.compiler import Variant, addresses, kernel, variant
from localllm.kernels.cpu.host import check_memory, has_unequal_cores
from localllm.kernels.cpu.simd import call_kernel, call_sleep, fetch_add, load_atomic, load_i64, pause, store_atomic
from localllm.kernels.cpu.target import Target
from localllm.kernels.process import Process

#: Bytes of an instruction in a program's table, and of a counter (a cache line each, or threads would collide).
INSTRUCTION, LINE = 64, 64
#: Seconds for which a waiting thread spins before it sleeps: as long as a well shared instruction lets it wait.
#: Longer, and the thread that it waits for may be without a core.
SPIN_SECONDS = 100e-6
#: Spins in a measurement of how long one takes, and how often it is measured: the shortest time is not disturbed.
TRIAL_SPINS, SPIN_TRIALS = 4096, 3
#: Microseconds that it sleeps at a time.  Systems take some tens more.
SLEEP_US = 1
#: Chunks of an instruction's work for each thread: more balance better, fewer cost less.  Where cores are unequal,
#: threads wait at the end for one that a slow core has begun.
CHUNKS_PER_THREAD, CHUNKS_ON_UNEQUAL_CORES = 4, 16
#: More units than any instruction has.
ALL_UNITS = 1 << 62
#: Of an instruction's units in a piece, one in so many is computed first, to see how long they take.
FIRST_SHARE = 32

#: Bytes of memory from which on it was not for want of them that a thread could not be started.
STACK_BYTES = 16 << 20

#: Seconds that this thread had a core; on Windows, which counts them in ticks longer than a step, all seconds.
_thread_time = time.perf_counter if sys.platform == "win32" else time.thread_time

#: What a kernel is called with.
Argument = int | float | Buffer | Address

_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


@kernel
def run_program(begin, end, table, n_instructions, header, counters, barrier, most_spins, sleep, stop, most, chunks):
    """Runs a program as thread ``begin`` of ``end``: of each instruction the units before ``stop``.

    table: int64 [n, 8]: kernel, arguments, units a header number, which header number, wait afterwards.
    counters: int64, one a line, the first unit at first.  most: so many units at most are left.  barrier: int64,
    threads that have arrived, and a line further, how often all have.  most_spins: of a waiting thread before it
    sleeps.  sleep: the address of a C function that sleeps for so many microseconds.  chunks: for each thread.
    """
    for i in range(n_instructions):
        entry = table + INSTRUCTION * i
        function, arguments = load_i64(entry), load_i64(entry + 8)
        units = min(stop, load_i64(entry + 16) * load_i64(header + 8 * load_i64(entry + 24)))
        chunk = max(1, min(units, most) // (end * chunks))
        if end == 1:
            chunk = max(1, units)
        place = fetch_add(counters + LINE * i, chunk)
        while place < units:
            call_kernel(function, arguments, place, min(place + chunk, units))
            place = fetch_add(counters + LINE * i, chunk)
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
    """Spins as a thread that waits in `run_program` does, ``end - begin`` times."""
    for _ in range(begin, end):
        if load_atomic(barrier) == 0:
            pause()


@functools.cache
def spins_in(seconds: float, target: Target) -> int:
    """How often a waiting thread spins in so many seconds.

    One spin takes a nanosecond on some processors and fifty on others, so it is measured, in under a millisecond.
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
    arguments: Sequence[Argument]  # integers (addresses, sizes), floats, and places in buffers, in the kernel's order
    units: int
    slot: int
    wait: bool = True  # whether all threads must be done before the next instruction begins


class Program:
    """Instructions ready to run; ``header[slot]``, int64, is read when an instruction begins.

    ``keep`` is what the arguments' addresses point into, kept alive with the program; ``arena`` is the address of the
    memory that buffers lie in; ``progress``: see `localllm.kernels.cpu.compiler.addresses`.
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
        parts = (self._table, header, self._counters, self._barrier)
        table, head, counters, barrier = (a.ctypes.data for a in parts)
        spins, sleep = spins_in(SPIN_SECONDS, target), _sleep_function()
        numbers = spins, sleep, ALL_UNITS, ALL_UNITS, _chunks_per_thread()
        self._call = np.array([table, len(instructions), head, counters, barrier, *numbers], np.int64)
        self._call_address = self._call.ctypes.data

    def run(
        self, workers: Workers, before: Callable[[], None] = lambda: None, *, threads: int | None = None
    ) -> float:
        """Runs all instructions once; gives the largest share of the time for which a thread had no core, or slept.

        Args:
            before: fills in what the instructions read; called when nothing else runs on these threads.
            threads: how many of the workers' threads take part; all, where it is None.

        Raises:
            DeviceError: the program was made before this process was forked.
            What ``before`` raised; nothing was run then.
        """
        self._process.check()

        def prepare() -> None:
            before()
            self._counters[:] = 0

        job = Job(self._entry, self._call_address, keep=self, threads=threads)
        workers.run(job, prepare)
        return max(job.lost, default=0.0)

    def run_in_pieces(self, workers: Workers, before: Callable[[], None], piece_s: float) -> Iterator[None]:
        """As `run`, with the same bits, in pieces of about so many seconds, between which others can compute."""
        self._process.check()
        for i, (units, slot) in enumerate(self._table[:, 2:4].tolist()):
            # The first comes whole: how many units there are is filled in before it.
            total = units * int(self._header[slot]) if i else 1
            done, n, seconds = 0, max(1, total // FIRST_SHARE) if i else ALL_UNITS, 0.0
            while done < total:
                call, first = self._call.copy(), done
                call[:2] = self._table[i:].ctypes.data, 1
                call[3] = self._counters[i:].ctypes.data
                call[7:9] = first + n, n

                def prepare(i: int = i, first: int = first) -> None:
                    if i == 0:
                        before()
                    self._counters[i] = first

                begin = time.perf_counter()
                workers.run(Job(self._entry, call.ctypes.data, keep=(self, call)), prepare)
                seconds += time.perf_counter() - begin
                done += n
                n = max(1, int(done * piece_s / max(seconds, 1e-6)))
                yield


@functools.cache
def _chunks_per_thread() -> int:
    return CHUNKS_ON_UNEQUAL_CORES if has_unequal_cores() else CHUNKS_PER_THREAD


def _pack(instruction: Instruction, arena: int) -> bytes:
    """The arguments as the kernel reads them, eight bytes each."""
    kernel = instruction.variant.kernel
    arguments = [_resolved(argument, arena) for argument in instruction.arguments]
    if [isinstance(a, float) for a in arguments] != [is_float for _, is_float in kernel.parameters]:
        names = ", ".join(f"{name}: {'float' if is_float else 'int'}" for name, is_float in kernel.parameters)
        raise KernelError(f"the kernel {kernel.name} takes ({names}), but was given {tuple(arguments)}")
    return b"".join(struct.pack("<f4x" if isinstance(a, float) else "<q", a) for a in arguments)


def _resolved(argument: Argument, arena: int) -> int | float:
    """A number as it is; a place in a buffer as its address."""
    if isinstance(argument, Address):
        return _resolved(argument.buffer, arena) + argument.n_bytes
    if isinstance(argument, Buffer):
        return arena + argument.offset if argument.address is None else argument.address
    return argument


def _sleep_function() -> int:
    """The address of the C function by which a waiting thread sleeps.

    Merely to offer the core to others (``sched_yield``) is no way to wait where other programs are busy: who offers
    it loses it for a whole slice of time, milliseconds, and who slept gets it back at once.
    """
    if sys.platform == "win32":
        # Windows sleeps for milliseconds at least; this function has no use for its argument.
        function = ctypes.windll.kernel32.SwitchToThread
    else:
        function = ctypes.CDLL(None).usleep
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class Job:
    """Work for all threads, or so many: ``entry(arguments, thread number, number of threads)`` on each."""

    def __init__(
        self, entry: Callable[[int, int, int], None], arguments: int, keep: object = None, threads: int | None = None
    ) -> None:
        self.entry = entry
        self.arguments = arguments
        self.keep = keep
        self.threads = threads
        self.done = False
        self.error: BaseException | None = None
        #: The share of its time for which each of the threads had no core, or slept; not measured of one alone, for
        #: which nobody waits.
        self.lost: list[float] = []

    def n_threads(self, n: int) -> int:
        """On how many of n threads it runs."""
        return min(self.threads or n, n)

    def run(self, i: int, n: int) -> None:
        """Does the part of thread i of n; an exception is kept for the thread that asked."""
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
    """The inbox of a thread: jobs, then None; and one item for each that it is through with."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.through: queue.SimpleQueue[None] = queue.SimpleQueue()


class Workers:
    """Threads that run programs.

    They are Python threads that sleep on a queue between programs and let go of the interpreter's lock within one.
    So idle ones burn nothing, and several `Workers` live side by side in one process.  A forked child inherits
    none of the threads, and must make its own `Workers`.

    An engine's thread takes the first part of its jobs itself, which saves waking another.  No thread of a caller
    does, unless it is the only one: Ctrl-C, or whoever stops a thread by an exception, may interrupt it between any
    two steps of Python, while the others wait for it or still work.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._lock = threading.Lock()
        self._process = Process()
        self._started = False
        self._last: Job | None = None

    def run(self, job: Job, before: Callable[[], None] | None = None) -> None:
        """Does a job on as many threads as it asks for; returns when they are through with it.

        Args:
            before: called first, when nothing else runs on these threads.

        Raises:
            What a part of the job raised; KeyboardInterrupt, but only when the job is done, since buffers are in use.
            DeviceError: a thread cannot be started; or they were made before this process was forked.
            NotEnoughMemoryError: a thread cannot be started because there is no memory for its stack.
            As `process.Stage.check`, if the process is ending and engines have stopped.
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
        """Returns when nothing runs on these threads: before what they read and write is touched from outside."""
        with self._lock:
            self._wait_until_idle()

    def _wait_until_idle(self) -> None:
        if self._last is not None:  # two interrupts at once may have cut the wait for it short
            self._await(self._last)
            self._last = None

    def close(self) -> None:
        """Ends the threads; a later run starts new ones."""
        if not self._process.is_current:  # a thread of the parent may have held the lock, and there are no threads
            return
        with self._lock:
            if self._started:
                self._end()
            self._started = False

    def _start(self) -> None:
        self._inboxes = inboxes = [_Inbox() for _ in range(self.n)]
        self._last = None
        # The threads do not refer to the Workers, so that forgetting it ends them.
        self._end = weakref.finalize(self, _tell_all, inboxes)
        self._end.atexit = False  # engines may still need them: `localllm.kernels.process` has the order
        for i in range(self.n):
            try:
                threading.Thread(target=_work, args=(i, inboxes), name=f"localllm-{i}", daemon=True).start()
            except RuntimeError as error:
                self._end()
                check_memory(STACK_BYTES, f"to start {self.n} threads")
                raise DeviceError(
                    f"{i or 'none'} of {self.n} threads could be started: the system limits how many this process or "
                    "user may have; ask for fewer"
                ) from error
        self._started = True

    def _await(self, job: Job) -> None:
        """Hands a job over and waits until it is done; an interrupt meanwhile is raised only then."""
        interrupt: BaseException | None = None
        handed_over = False
        while not job.done:
            try:
                while not job.done:
                    if not handed_over:
                        self._inboxes[0].jobs.put(job)  # again, if interrupted behind this: a done job is ignored
                        handed_over = True
                    self._inboxes[0].through.get()
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _tell_all(inboxes: list[_Inbox]) -> None:
    """Tells threads to end."""
    for inbox in inboxes:
        inbox.jobs.put(None)


def _work(i: int, inboxes: list[_Inbox]) -> None:
    """A worker's life: thread 0 passes each job on to the others and reports when all are through with it."""
    while (job := inboxes[i].jobs.get()) is not None:
        if i:
            job.run(i, job.n_threads(len(inboxes)))
        elif job.done:  # given twice
            continue
        else:
            _run_shared(job, inboxes)
        inboxes[i].through.put(None)
        del job


def _run_shared(job: Job, inboxes: list[_Inbox]) -> None:
    """Does the first part of a job in this thread and the others in theirs; returns when all are through with it."""
    n = job.n_threads(len(inboxes))
    for other in inboxes[1:n]:
        other.jobs.put(job)
    job.run(0, n)
    for other in inboxes[1:n]:
        other.through.get()
    job.done = True
