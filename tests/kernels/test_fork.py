"""A forked child has the memory of its parent without the threads: it must not wait for them."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from localllm.errors import DeviceError
from localllm.kernels.cpu.compiler import addresses, kernel, variant
from localllm.kernels.cpu.program import Instruction, Job, Program, Workers
from localllm.kernels.cpu.simd import load_i64, store_atomic
from localllm.kernels.cpu.target import choose
from localllm.kernels.process import Process
from tests.helpers.fork import in_forked_child, needs_fork

pytestmark = needs_fork


@kernel
def add_number(begin, end, x):
    store_atomic(x, load_i64(x) + N)  # noqa: F821


def adding(x: np.ndarray, n: int) -> Program:
    steps = [Instruction(variant(add_number, choose(), N=n), add_number.arguments(x=x.ctypes.data), 1, 0)]
    return Program(steps, np.ones(1, np.int64), choose(), keep=x)


def test_a_child_is_recognised_as_another_process() -> None:
    here = Process()
    here.check()

    def child() -> None:
        assert not here.is_current
        with pytest.raises(DeviceError, match=r"load the model after the fork, or .*'spawn'"):
            here.check()
        own = Process()
        own.check()

        def grandchild() -> None:
            assert not here.is_current
            assert not own.is_current

        in_forked_child(grandchild)
        own.check()

    in_forked_child(child)
    here.check()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_program_of_the_parent_is_refused(threads: int) -> None:
    workers, x = Workers(threads), np.zeros(1, np.int64)
    program = adding(x, 1)
    program.run(workers)

    def child() -> None:
        for own in (workers, Workers(2)):
            with pytest.raises(DeviceError, match="after the fork"):
                program.run(own)
        with pytest.raises(DeviceError, match="after the fork"):
            workers.run(Job(lambda *_: None, 0))
        workers.close()
        fresh = Workers(threads)
        adding(x, 1).run(fresh)
        assert x.tolist() == [2]
        fresh.close()

    in_forked_child(child)
    program.run(workers)
    assert x.tolist() == [2]
    workers.close()


def test_a_fork_while_a_program_runs() -> None:
    """In the child, the lock of the workers is held forever."""
    workers, started, go_on = Workers(2), threading.Event(), threading.Event()

    def work(*_: int) -> None:
        started.set()
        go_on.wait(60)

    busy = threading.Thread(target=workers.run, args=(Job(work, 0),))
    busy.start()
    assert started.wait(60)

    def child() -> None:
        with pytest.raises(DeviceError, match="after the fork"):
            workers.run(Job(lambda *_: None, 0))
        workers.close()

    try:
        in_forked_child(child, 20)
    finally:
        go_on.set()
        busy.join()
    workers.close()


def test_a_fork_while_kernels_are_compiled(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child compiles its own kernels."""
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    compiling = threading.Event()
    kernels = [variant(add_number, choose(), N=n) for n in range(100, 105)]
    busy = threading.Thread(target=addresses, args=(kernels, lambda done, total: compiling.set()))
    busy.start()
    assert compiling.wait(60)
    time.sleep(0.1)
    x = np.zeros(1, np.int64)

    def child() -> None:
        workers = Workers(2)
        adding(x, 200).run(workers)
        adding(x, 100).run(workers)
        assert x.tolist() == [300]

    in_forked_child(child)
    busy.join()
    adding(x, 104).run(Workers(1))
    assert x.tolist() == [104]
