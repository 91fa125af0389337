"""Steps use fewer threads while other programs use the processors."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.kernels.cpu import thread_limit
from localllm.kernels.cpu.program import Job, Workers
from localllm.kernels.cpu.thread_limit import FIRST_TRIAL_S, IDLE_LOST, LAST_TRIAL_S, TRIAL_STEPS, ThreadLimit


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(thread_limit, "time", clock)
    return clock


def steps(limit: ThreadLimit, clock: Clock, cores: float, seconds: float) -> list[int]:
    """Return the threads of each step of 10 ms if ``cores`` cores are free."""
    found = []
    for _ in range(round(seconds / 0.01)):
        found.append(limit.now)
        limit.record(max(0.0, 1 - cores / limit.now))
        clock.now += 0.01
    return found


def test_all_threads_run_on_an_idle_machine(clock: Clock) -> None:
    limit = ThreadLimit(4)
    assert set(steps(limit, clock, 4, 10)) == {4}


@pytest.mark.parametrize(("most", "cores"), [(2, 0.5), (8, 6), (8, 2), (3, 0.2)])
def test_steps_use_one_thread_per_free_core(clock: Clock, most: int, cores: float) -> None:
    limit = ThreadLimit(most)
    found = steps(limit, clock, cores, 60)[-3000:]
    assert min(found) >= max(1, int(cores))
    assert np.mean([n <= max(1, cores / (1 - IDLE_LOST)) for n in found]) > 0.9


def test_all_threads_run_after_the_load_has_ended(clock: Clock) -> None:
    limit = ThreadLimit(8)
    steps(limit, clock, 1, 30)
    assert limit.now <= 2
    steps(limit, clock, 8, LAST_TRIAL_S + 8 * (TRIAL_STEPS * 0.01 + FIRST_TRIAL_S) + 1)
    assert limit.now == 8


def test_one_slow_step_changes_nothing(clock: Clock) -> None:
    limit = ThreadLimit(2)
    for i in range(1000):
        limit.record(0.9 if i % 20 == 0 else 0.0)
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
