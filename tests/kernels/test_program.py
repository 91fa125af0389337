"""Programs and the threads that run them: order, interrupts and idle threads."""

from __future__ import annotations

import ctypes
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

from localllm.errors import ClosedError, DeviceError, KernelError, NotEnoughMemoryError
from localllm.kernels import process
from localllm.kernels.cpu import program as program_module
from localllm.kernels.cpu.compiler import kernel, variant
from localllm.kernels.cpu.program import Instruction, Job, Program, Workers, spins_in
from localllm.kernels.cpu.simd import fetch_add, load_atomic, load_i64, pause, store_atomic
from localllm.kernels.cpu.target import choose

TARGET = choose()


@kernel
def mix_neighbours(begin, end, source, target, n, factor):
    """Set target[i] = factor * source[i] + source[(i + 1) % n], over int64 [n]."""
    for i in range(begin, end):
        j = (i + 1) % n
        store_atomic(target + 8 * i, factor * load_i64(source + 8 * i) + load_i64(source + 8 * j))


@kernel
def count_calls(begin, end, counts, weight: float):
    """Add the integer ``weight`` to int64 counts [n]."""
    for i in range(begin, end):
        store_atomic(counts + 8 * i, load_i64(counts + 8 * i) + int(weight))


def counting(counts: np.ndarray, weight: float = 1.0) -> tuple[int | float, ...]:
    return count_calls.arguments(counts=counts.ctypes.data, weight=weight)


@pytest.fixture
def workers() -> Iterator[Workers]:
    three = Workers(3)
    yield three
    three.close()


def mixing(n: int, rounds: int) -> tuple[Program, np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Return a program of many small steps that each need the whole previous step, its data and its formula."""
    data = np.zeros((2, n), np.int64)
    factors = np.random.default_rng(0).integers(-5, 6, rounds).tolist()
    header = np.array([1, n], np.int64)
    mix = variant(mix_neighbours, TARGET)

    def rows(i: int) -> dict[str, int]:
        return {"source": data[i % 2].ctypes.data, "target": data[(i + 1) % 2].ctypes.data}

    steps = [
        Instruction(mix, mix_neighbours.arguments(**rows(i), n=n, factor=factor), 1, 1)
        for i, factor in enumerate(factors)
    ]

    def expected(start: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            for factor in factors:
                start = factor * start + np.roll(start, -1)
        return start

    return Program(steps, header, TARGET, keep=data), data, expected


@pytest.mark.parametrize(("threads", "rounds", "n"), [(1, 1000, 7), (2, 3000, 2), (2, 3000, 64), (4, 800, 7)])
def test_each_instruction_sees_the_whole_result_of_the_previous_one(threads: int, rounds: int, n: int) -> None:
    workers = Workers(threads)
    program, data, expected = mixing(n, rounds)
    for seed in range(2):
        data[0] = np.random.default_rng(seed).integers(-9, 10, n)
        start = data[0].copy()
        program.run(workers)
        np.testing.assert_array_equal(data[rounds % 2], expected(start))
    workers.close()


def test_many_short_runs(workers: Workers) -> None:
    program, data, expected = mixing(5, 2)
    data[0] = start = np.arange(5)
    for _ in range(1000):
        program.run(workers)
        start = expected(start)
    np.testing.assert_array_equal(data[0], start)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("n", [0, 1, 3, 1000])
def test_each_unit_runs_once(threads: int, n: int) -> None:
    """The header gives the number of units at each run; some instructions wait for the previous one."""
    workers, counts = Workers(threads), np.zeros((20, 1000), np.int64)
    header = np.zeros(1, np.int64)
    count = variant(count_calls, TARGET)
    steps = [Instruction(count, counting(row, 2.0), 1, 0, wait=i % 3 == 0) for i, row in enumerate(counts)]
    program = Program(steps, header, TARGET, keep=counts)
    for _ in range(3):
        header[0] = n
        program.run(workers)
    workers.close()
    assert (counts[:, :n] == 6).all()
    assert (counts[:, n:] == 0).all()


def test_units_are_a_multiple_of_the_header(workers: Workers) -> None:
    counts = np.zeros(100, np.int64)
    step = Instruction(variant(count_calls, TARGET), counting(counts), 7, 1)
    Program([step], np.array([50, 3], np.int64), TARGET, keep=counts).run(workers)
    assert counts.tolist() == [1] * 21 + [0] * 79


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({}, r"takes \(counts, weight\), but arguments are missing: counts, weight$"),
        ({"counts": 1, "wieght": 2.0}, "but arguments are missing: weight; unknown: wieght$"),
        ({"counts": 1, "weight": 2.0, "n": 3}, "but arguments are unknown: n$"),
        ({"counts": 1, "weight": 2}, "takes weight as float, not 2$"),
        ({"counts": 1.0, "weight": 2.0}, "takes counts as int or address, not 1.0$"),
        ({"counts": "1", "weight": 2.0}, "takes counts as int or address, not '1'$"),
    ],
)
def test_arguments_of_a_wrong_name_or_type_are_refused(arguments: dict[str, Any], fault: str) -> None:
    with pytest.raises(KernelError, match=f"the kernel count_calls .*{fault}"):
        count_calls.arguments(**arguments)


def test_arguments_are_ordered_as_the_kernel_declares_them() -> None:
    assert count_calls.arguments(weight=2.0, counts=None) == (0, 2.0)


@kernel
def wait_for_flag(begin, end, flag):
    """Unit 0 ends when the flag is set."""
    for i in range(begin, end):
        if i == 0:
            while load_atomic(flag) == 0:
                pause()


def test_a_thread_that_waits_long_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two threads works until the other one sleeps."""
    flag, sleeps = np.zeros(1, np.int64), []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint)
    def sleep(microseconds: int) -> int:
        sleeps.append(microseconds)
        flag[0] = 1
        return 0

    monkeypatch.setattr(program_module, "_sleep_function", lambda: ctypes.cast(sleep, ctypes.c_void_p).value)
    step = Instruction(variant(wait_for_flag, TARGET), wait_for_flag.arguments(flag=flag.ctypes.data), 2, 0)
    workers = Workers(2)
    Program([step], np.ones(1, np.int64), TARGET, keep=flag).run(workers)
    workers.close()
    assert sleeps
    assert set(sleeps) == {program_module.SLEEP_US}


def test_spins_are_counted_from_the_faster_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock shows one second for the first trial and two for the second."""
    clock = iter([0.0, 1.0, 10.0, 12.0, 20.0, 22.0])
    monkeypatch.setattr(program_module.time, "perf_counter", lambda: next(clock))
    assert spins_in.__wrapped__(0.25, TARGET) == program_module.TRIAL_SPINS // 4


# -- Workers, with jobs in Python ----------------------------------------------------------------------------------


class Log:
    """A job that logs which threads ran it, and calls ``during`` on each."""

    def __init__(self, during: Callable[[int], None] = lambda i: None) -> None:
        self.during = during
        self.parts: list[tuple[int, int, int]] = []

    def __call__(self, arguments: int, i: int, n: int) -> None:
        self.during(i)
        self.parts.append((arguments, i, n))

    def job(self) -> Job:
        return Job(self, 5)


def assert_whole(log: Log, n: int = 3) -> None:
    assert sorted(log.parts) == [(5, i, n) for i in range(n)]


def assert_working(workers: Workers) -> None:
    """Check that the workers run another job correctly."""
    log = Log()
    workers.run(log.job())
    assert_whole(log, workers.n)


def worker_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("localllm-")}


def wait_until(condition: Callable[[], bool]) -> bool:
    """Return whether the condition becomes true within ten seconds."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_run_returns_when_all_threads_are_done(workers: Workers) -> None:
    log = Log(during=lambda i: time.sleep(0.02 * i))
    workers.run(log.job())
    assert_whole(log)


@pytest.mark.parametrize("n", [1, 3])
def test_an_error_reaches_the_caller_when_all_threads_are_done(n: int) -> None:
    def fail(i: int) -> None:
        if i == n - 1:
            raise ValueError("a part failed")
        time.sleep(0.02)

    workers, log = Workers(n), Log(fail)
    with pytest.raises(ValueError, match="a part failed"):
        workers.run(log.job())
    assert sorted(log.parts) == [(5, i, n) for i in range(n - 1)]
    assert_working(workers)
    workers.close()


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in this thread, the default."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("only the main thread is interrupted")
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_is_raised_after_the_work(workers: Workers) -> None:
    def interrupt(i: int) -> None:
        if i == 1:
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.01)
        time.sleep(0.05)

    log = Log(interrupt)
    with pytest.raises(KeyboardInterrupt):
        workers.run(log.job())
    assert_whole(log)
    assert_working(workers)


class Alarm(Exception):
    """Raised by a signal handler."""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
@pytest.mark.usefixtures("interrupts")
def test_many_interrupts_neither_lose_nor_repeat_a_job(workers: Workers) -> None:
    def raise_alarm(number: int, frame: FrameType | None) -> None:
        # Not inside this function, which could then not stop the timer.
        while frame is not None:
            if frame.f_code is Workers.run.__code__:
                raise Alarm
            frame = frame.f_back

    assert_working(workers)  # starts the threads
    logs: list[Log] = []
    raised = 0
    previous = signal.signal(signal.SIGALRM, raise_alarm)
    gc.disable()  # no caller can catch an exception in a finaliser
    try:
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
                for _ in range(20):
                    log = Log(during=lambda i: time.sleep(0.0002))
                    logs.append(log)
                    workers.run(log.job())
            except Alarm:
                raised += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, previous)
        gc.enable()
    assert raised > 10
    assert_working(workers)
    for log in logs:
        if log.parts:  # otherwise the interrupt came before the job started
            assert_whole(log)
    assert sum(bool(log.parts) for log in logs) > 10


def test_several_workers_run_at_once() -> None:
    """Each job waits for the other, so they would block if they ran in sequence."""
    barrier = threading.Barrier(2, timeout=10)
    both = [Workers(2), Workers(3)]
    logs = [Log(during=lambda i: barrier.wait() if i == 0 else None) for _ in both]
    threads = [threading.Thread(target=w.run, args=(log.job(),)) for w, log in zip(both, logs, strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for w, log in zip(both, logs, strict=True):
        assert_whole(log, w.n)
        w.close()


def test_threads_that_share_workers_take_turns(workers: Workers) -> None:
    running, most = [], []

    def watch(i: int) -> None:
        running.append(i)
        most.append(len(running))
        time.sleep(0.005)
        running.remove(i)

    logs = [Log(watch) for _ in range(8)]
    threads = [threading.Thread(target=workers.run, args=(log.job(),)) for log in logs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for log in logs:
        assert_whole(log)
    assert max(most) <= 3


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("is_engine", [True, False])
def test_only_the_thread_of_an_engine_runs_the_first_part(n: int, is_engine: bool) -> None:
    """An interrupt can stop a caller's thread between any two bytecodes, while other threads wait for it."""
    workers, took = Workers(n), dict[int, threading.Thread]()

    def fail(i: int) -> None:
        took[i] = threading.current_thread()
        if i == 0:
            raise ValueError("the first part failed")

    def ask() -> None:
        stage = process.engines if is_engine else process.workers
        with process.UnfinishedWork(stage), pytest.raises(ValueError, match="the first part failed"):
            workers.run(Log(fail).job())

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    assert (took[0] is asking) == (is_engine or n == 1)
    assert len({*took.values()}) == n
    assert_working(workers)
    workers.close()


def test_closing_ends_the_threads() -> None:
    before = worker_threads()
    workers = Workers(3)
    assert_working(workers)
    mine = worker_threads() - before
    assert len(mine) == 3
    workers.close()
    assert wait_until(lambda: not any(t.is_alive() for t in mine))
    workers.close()
    assert_working(workers)
    workers.close()


@pytest.mark.parametrize("started", [0, 1, 2])
def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, started: int) -> None:
    """The started threads end, nothing runs, and a later run may succeed."""
    real, threads = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if len(threads) == started:
            raise RuntimeError("can't start new thread")
        threads.append(thread)
        real(thread)

    workers, log = Workers(3), Log()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        for _ in range(2):
            with pytest.raises(DeviceError, match=rf"{started or 'none'} of 3 threads could be started.* fewer"):
                workers.run(log.job())
            assert wait_until(lambda: not any(t.is_alive() for t in threads))
            threads.clear()
    assert not log.parts
    assert_working(workers)
    workers.close()


def test_threads_without_room_for_their_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr("localllm.kernels.cpu.host._system_memory", lambda: 1 << 20)
    with pytest.raises(NotEnoughMemoryError, match="to start 3 threads takes"):
        Workers(3).run(Log().job())


def test_threads_end_with_their_workers() -> None:
    before = worker_threads()
    workers = Workers(2)
    assert_working(workers)
    mine = worker_threads() - before
    del workers
    gc.collect()
    assert wait_until(lambda: not any(t.is_alive() for t in mine))


def test_a_job_keeps_its_memory_until_it_is_done(workers: Workers) -> None:
    import weakref

    class Memory:
        pass

    memory = Memory()
    alive = weakref.ref(memory)
    seen: list[bool] = []
    job = Job(Log(during=lambda i: seen.append(alive() is not None)), 5, keep=memory)
    del memory
    workers.run(job)
    assert seen == [True] * 3
    del job
    assert wait_until(lambda: alive() is None)


def test_idle_threads_use_no_processor_time(workers: Workers) -> None:
    program, _, _ = mixing(64, 50)
    program.run(workers)

    def is_quiet() -> bool:  # apart from threads of other tests
        before = time.process_time()
        time.sleep(0.1)
        return time.process_time() - before < 0.02

    assert wait_until(is_quiet)


@pytest.mark.parametrize(("threads", "taking_part"), [(None, 3), (1, 1), (2, 2), (3, 3), (7, 3)])
def test_a_job_runs_on_the_requested_threads(threads: int | None, taking_part: int) -> None:
    workers = Workers(3)
    seen: list[tuple[int, int]] = []

    def note(_: int, i: int, n: int) -> None:
        seen.append((i, n))

    for _ in range(3):  # the other threads stay available
        seen.clear()
        workers.run(Job(note, 0, threads=threads))
        assert sorted(seen) == [(i, taking_part) for i in range(taking_part)]
        seen.clear()
        workers.run(Job(note, 0))
        assert sorted(seen) == [(i, 3) for i in range(3)]
    workers.close()


@pytest.mark.parametrize("n", [1, 3])
def test_a_job_for_workers_that_have_ended_is_refused(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    workers, log, refusals = Workers(n), Log(), list[BaseException]()
    assert_working(workers)
    assert wait_until(lambda: not process.workers.is_busy)  # engines of other tests have stopped
    monkeypatch.setattr(process.workers, "is_over", True)
    with pytest.raises(ClosedError, match="the process is ending"):
        workers.run(log.job())

    def in_thread() -> None:
        try:
            workers.run(log.job())
        except BaseException as error:
            refusals.append(error)

    for is_daemon in (False, True):
        thread = threading.Thread(target=in_thread, daemon=is_daemon)
        thread.start()
        thread.join()
    assert [type(error) for error in refusals] == [ClosedError, SystemExit]
    assert not log.parts
    assert not process.workers.is_busy
    monkeypatch.undo()
    assert_working(workers)
    workers.close()


def test_ending_waits_for_a_running_job(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, started, go_on = process.Stage(), threading.Event(), threading.Event()
    monkeypatch.setattr(process, "workers", stage)
    workers = Workers(2)

    def work(*_: int) -> None:
        started.set()
        go_on.wait(60)

    busy = threading.Thread(target=workers.run, args=(Job(work, 0),))
    busy.start()
    assert started.wait(60)
    stage.end(time.monotonic() + 0.05)  # returns after its time limit
    assert stage.is_busy
    threading.Timer(0.05, go_on.set).start()
    stage.end(time.monotonic() + 60)
    assert not stage.is_busy
    busy.join()
    workers.close()


def test_ending_does_not_wait_for_work_interrupted_at_its_start() -> None:
    stage = process.Stage()
    ended = threading.Thread(target=process.UnfinishedWork(stage).__enter__)
    process.UnfinishedWork(stage).__enter__()
    ended.start()
    ended.join()
    assert not stage.is_busy


@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_cover_all_units_in_order(threads: int) -> None:
    """Each unit runs once, in pieces of any size.  The first instruction may change the units of the others."""
    workers, counts = Workers(threads), np.zeros((4, 1000), np.int64)
    header = np.array([1, 0], np.int64)
    count = variant(count_calls, TARGET)
    steps = [Instruction(count, counting(row), 1, int(i > 0)) for i, row in enumerate(counts)]
    program = Program(steps, header, TARGET, keep=counts)

    def before() -> None:
        header[1] = 997

    for piece_s in (0.0, 1e-5, 10.0):
        counts[:] = 0
        n_pieces = sum(1 for _ in program.run_in_pieces(workers, before, piece_s))
        assert n_pieces >= (3 * (997 - 997 // 32) if piece_s == 0 else 4)
        assert counts[0].sum() == 1
        assert (counts[1:, :997] == 1).all()
        assert not counts[:, 997:].any()
    program.run(workers, before)
    assert (counts[1:, :997] == 2).all()
    workers.close()


@kernel
def slow_first_unit(begin, end, done, others, n_units):
    """Let the thread that runs unit 0 wait until the other threads have run all units outside its piece.

    done: int64, number of finished units.  others: int64, number of units outside the piece of the slow thread.
    """
    if begin == 0:
        for _ in range(1 << 40):
            if load_atomic(done) >= n_units - end:
                break
            pause()
        store_atomic(others, n_units - end)
    else:
        fetch_add(done, end - begin)


@pytest.mark.parametrize("is_unequal", [False, True])
def test_a_slow_thread_takes_one_small_piece(monkeypatch: pytest.MonkeyPatch, is_unequal: bool) -> None:
    """With equal shares for all threads, the test would block."""
    monkeypatch.setattr(program_module, "has_unequal_cores", lambda: is_unequal)
    program_module._chunks_per_thread.cache_clear()
    numbers, n = np.zeros(2, np.int64), 640
    place = numbers.ctypes.data
    arguments = slow_first_unit.arguments(done=place, others=place + 8, n_units=n)
    slow = Instruction(variant(slow_first_unit, TARGET), arguments, n, 0)
    workers = Workers(2)
    Program([slow], np.ones(1, np.int64), TARGET, numbers).run(workers)
    workers.close()
    program_module._chunks_per_thread.cache_clear()
    assert numbers.tolist() == [n - n // (32 if is_unequal else 8)] * 2
