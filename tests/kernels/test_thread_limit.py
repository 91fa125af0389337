"""Steps use fewer threads while other programs use the processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from localllm.kernels.cpu import thread_limit
from localllm.kernels.cpu.program import Job, Workers
from localllm.kernels.cpu.thread_limit import FIRST_TRIAL_S, LAST_TRIAL_S, ThreadLimit


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(thread_limit, "time", clock)
    return clock


def steps(limit: ThreadLimit, clock: Clock, step_s: Sequence[float], seconds: float) -> list[int]:
    """Return the threads of each step; with n of them it takes ``step_s[n - 1]`` seconds.

    A thread loses the time that the step takes longer than on an idle machine, where n threads are n times as fast.
    """
    found, end = [], clock.now + seconds
    while clock.now < end:
        n = limit.now
        found.append(n)
        limit.record(1 - IDLE_S / n / step_s[n - 1], step_s[n - 1])
        clock.now += step_s[n - 1]
    return found


#: Seconds of a step of one thread on an idle machine; and seconds by number of threads.
IDLE_S = 0.01
IDLE = [IDLE_S / n for n in range(1, 9)]


@pytest.mark.parametrize("limit", [ThreadLimit(8), ThreadLimit.of_long_steps(8)], ids=["short", "long"])
def test_all_threads_run_on_an_idle_machine(clock: Clock, limit: ThreadLimit) -> None:
    assert set(steps(limit, clock, IDLE, 10)) == {8}


@pytest.mark.parametrize("make", [ThreadLimit, ThreadLimit.of_long_steps])
@pytest.mark.parametrize("best", [1, 2, 3, 5])
def test_the_fastest_number_of_threads_runs(clock: Clock, make: Callable[[int], ThreadLimit], best: int) -> None:
    """With more threads than free cores, each step lasts until the last thread gets a core."""
    step_s = [IDLE_S / n if n <= best else 3 * IDLE_S / best for n in range(1, 7)]
    found = steps(make(6), clock, step_s, 60)
    assert np.mean(np.array(found[len(found) // 2 :]) == best) > 0.9


@pytest.mark.parametrize("make", [ThreadLimit, ThreadLimit.of_long_steps])
def test_all_threads_run_if_each_gets_a_part_of_its_core(clock: Clock, make: Callable[[int], ThreadLimit]) -> None:
    step_s = [2 * IDLE_S / n for n in range(1, 5)]
    found = steps(make(4), clock, step_s, 60)
    assert np.mean(np.array(found[len(found) // 2 :]) == 4) > 0.9


@pytest.mark.parametrize("make", [ThreadLimit, ThreadLimit.of_long_steps])
def test_all_threads_run_after_the_load_has_ended(clock: Clock, make: Callable[[int], ThreadLimit]) -> None:
    limit = make(8)
    steps(limit, clock, [IDLE_S] + [3 * IDLE_S] * 7, 30)
    assert limit.now <= 2
    steps(limit, clock, IDLE, 2 * LAST_TRIAL_S + 8 * FIRST_TRIAL_S)
    assert limit.now == 8


def test_a_trial_with_slow_steps_ends_early(clock: Clock) -> None:
    limit = ThreadLimit(2)
    step_s = [IDLE_S, 20 * IDLE_S]
    found = steps(limit, clock, step_s, 60)
    assert found[-1] == 1
    assert found.count(2) < 60 / LAST_TRIAL_S + 20


def test_one_slow_step_changes_nothing(clock: Clock) -> None:
    limit = ThreadLimit(2)
    for i in range(1000):
        limit.record(0.9 if i % 20 == 0 else 0.0, 0.01)
        clock.now += 0.01
        assert limit.now == 2


@pytest.mark.posix("Windows counts a thread's time in long ticks")
def test_a_job_reports_how_long_a_thread_slept() -> None:
    import time

    workers = Workers(2)
    job = Job(lambda arguments, i, n: time.sleep(0.05) if i else None, 0)
    workers.run(job)
    assert len(job.lost) == 2
    assert max(job.lost) > 0.5
    workers.close()
