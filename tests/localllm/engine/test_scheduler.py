"""The contents of steps: plain data, so tests run single steps."""

from __future__ import annotations

import os
from itertools import count
from typing import Any

import pytest
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from localllm.engine.request import BACKGROUND_DELAY_S, Request
from localllm.engine.scheduler import FIRST_CHUNK, MIN_CHUNK, MIN_CHUNK_ALONE, StepTimes
from tests.helpers.fake_backend import PAGE_SIZE, greedy_after, logits_after
from tests.helpers.requests import Results, SteppedEngine, nearly_right, reading, results, writing


def test_a_prompt_in_chunks_then_decoding() -> None:
    engine = SteppedEngine(max_tokens=8)
    request = writing(range(20), 10)
    engine.run(request)
    assert results(request).ids == greedy_after(range(20), 10)
    assert results(request).n_done == [0, 8, 16, 20]
    assert engine.sizes == [8, 8, 4] + [1] * 9
    assert [len(batch.outputs) for batch in engine.fake.batches] == [0, 0, 1] + [1] * 9
    engine.check_all_pages_are_back()


def test_decoding_goes_first_and_a_prompt_gets_the_rest() -> None:
    engine = SteppedEngine(256, parallel=2, max_tokens=40)
    stream, prompt = writing([1, 2], 20), writing(range(90), 1)
    engine.submit(stream)
    engine.step()
    engine.submit(prompt)
    engine.step(3)
    assert engine.sizes == [2, 1 + FIRST_CHUNK, *engine.sizes[2:]]
    assert len(results(stream).choices) == 4, "one token per step"
    engine.run()
    assert results(stream).ids == greedy_after([1, 2], 20)


def test_the_budget_follows_the_measured_speed() -> None:
    times = StepTimes()
    assert times.budget(0.1) == FIRST_CHUNK
    for _ in range(20):
        times.add(0, 1, 0.02)
        times.add(100, 1, 0.02 + 100 * 0.001)
    assert times.budget(0.1) == pytest.approx(80, abs=2)
    for _ in range(20):
        times.add(100, 1, 0.02 + 100 * 0.01)
    assert times.budget(0.1) == MIN_CHUNK, "a prompt continues even with a slow model"
    for _ in range(20):
        times.add(400, 0, 0.4)
    assert times.budget(0.1) == pytest.approx(80, abs=2), "a prompt alone also shows the cost of its tokens"


def test_steps_may_last_as_long_as_a_number_can_say() -> None:
    times = StepTimes()
    times.add(100, 0, 1e-3)
    assert times.budget(1e308) > 10**9


def test_a_prompt_alone_has_chunks_that_are_worth_their_while() -> None:
    engine = SteppedEngine(256, max_tokens=80)
    engine.scheduler.step_times.add(40, 0, 1000.0)
    engine.run(writing(range(90), 1))
    assert engine.sizes[0] == MIN_CHUNK_ALONE


def test_the_oldest_prompt_gets_half_of_the_budget_and_short_prompts_the_rest() -> None:
    engine = SteppedEngine(256, parallel=8, max_tokens=32)
    long, longer, short = writing([1] * 80, 1), writing([2] * 90, 1), writing([3] * 10, 1)
    engine.submit(long, longer, short)
    engine.step()
    assert [results(request).n_done for request in (long, longer, short)] == [[0, 16], [0, 6], [0, 10]]
    assert results(short).ended.is_set()


def test_the_oldest_prompt_gets_the_unused_budget() -> None:
    engine = SteppedEngine(256, parallel=8, max_tokens=32)
    long, short = writing([1] * 80, 1), writing([3] * 5, 1)
    engine.submit(long, short)
    engine.step()
    assert (results(long).n_done, results(short).n_done) == ([0, 27], [0, 5])


def test_common_prefixes_are_evaluated_once() -> None:
    """Also if both arrive at the same time: one evaluates a page, and the other waits for it."""
    engine = SteppedEngine(256, parallel=8, max_tokens=64)
    common = list(range(10 * PAGE_SIZE))
    requests = [writing([*common, 90 + i], 4) for i in range(4)]
    engine.run(*requests)
    assert engine.n_evaluated == len(common) + 4 + 4 * 3
    assert [request.n_cached for request in requests] == [0] + [len(common)] * 3
    assert [results(r).ids for r in requests] == [greedy_after([*common, 90 + i], 4) for i in range(4)]


def test_background_requests_run_later_but_run() -> None:
    engine = SteppedEngine(64, parallel=1, max_tokens=64)
    now = 1000.0
    background = writing([1] * 40, 1, priority="background", submitted_at=now)
    soon = writing([2] * 40, 1, submitted_at=now + 1)
    late = writing([3] * 40, 1, submitted_at=now + BACKGROUND_DELAY_S + 1)
    order: list[Request] = []
    for request in (background, soon, late):
        request.output = Results(lambda _, r=request: order.append(r))
    engine.run(background, soon, late)
    assert order == [soon, background, late]


def test_a_request_waits_until_its_whole_prompt_has_room() -> None:
    engine = SteppedEngine(32, parallel=1, max_tokens=32)
    first, second = writing([1] * 16, 8), writing([2] * 16, 2)
    engine.submit(first, second)
    engine.step()
    assert (first.sequence is not None, second.sequence) == (True, None)
    engine.run()
    assert results(second).ids == greedy_after([2] * 16, 2)


def test_the_youngest_is_preempted_and_writes_on_later() -> None:
    engine = SteppedEngine(32, parallel=1, max_tokens=32)
    older, younger = writing([1] * 8, 24), writing([2] * 8, 24)
    engine.submit(older)
    engine.step()
    engine.submit(younger)
    was_preempted = False
    while engine.step():
        was_preempted |= younger.sequence is None and bool(younger.n_generated) and younger.finish_reason is None
        assert older.sequence is not None or older.finish_reason is not None
    assert was_preempted
    assert results(older).ids == greedy_after([1] * 8, 24)
    assert results(younger).ids == greedy_after([2] * 8, 24)
    assert engine.n_evaluated < 2 * 31 + 40, "it must wait instead of competing for pages token by token"


def test_of_several_the_youngest_is_preempted_first() -> None:
    engine = SteppedEngine(48, parallel=1, max_tokens=48)
    requests = [writing([i] * 8, 30) for i in range(3)]
    for request in requests:
        engine.submit(request)
        engine.step()
    assert all(request.sequence is not None for request in requests)
    preempted: list[Request] = []
    while engine.step():
        preempted += [r for r in engine.scheduler.waiting if r not in preempted]
    assert preempted == [requests[2], requests[1]]


def test_tokens_evaluated_again_do_not_count_as_cached() -> None:
    engine = SteppedEngine(32, parallel=1, max_tokens=32)
    older, younger = writing([1] * 8, 24), writing([2] * 8, 24)
    engine.submit(older)
    engine.step()
    engine.run(younger)
    assert (older.n_cached, younger.n_cached) == (0, 0)


def test_a_request_with_a_slow_reader_pauses_and_loses_its_pages_first() -> None:
    engine = SteppedEngine(32, parallel=1, max_tokens=32)
    older, younger = writing([1] * 8, 24), writing([2] * 20, 4)
    engine.submit(older)
    engine.step(3)
    results(older).is_full = True
    assert not engine.step()
    engine.submit(younger)
    while engine.step():
        assert len(results(older).choices) == 3
    assert results(younger).ids == greedy_after([2] * 20, 4)
    results(older).is_full = False
    engine.run()
    assert results(older).ids == greedy_after([1] * 8, 24)


def test_logits_in_chunks_of_as_many_rows_as_a_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.engine.runner.MAX_LOGITS_BYTES", 4 * 97 * 3)
    engine = SteppedEngine(max_tokens=8)
    ids = list(range(11))
    request = reading(ids)
    engine.run(request)
    assert [len(batch.outputs) for batch in engine.fake.batches] == [3, 3, 3, 2]
    assert all((row == logits_after(ids[: n + 1])).all() for n, row in enumerate(results(request).rows))
    engine.run(writing([50, *ids], 1))
    assert engine.sizes[4:] == [8, 4], "a prompt needs few logits and keeps its chunk size"


def test_logits_of_the_last_tokens_use_what_is_cached() -> None:
    engine = SteppedEngine(max_tokens=64)
    ids = list(range(30))
    engine.run(writing(ids[:21], 0))
    request = reading(ids, 26)
    engine.run(request)
    assert engine.sizes == [21, 9]
    assert len(results(request).rows) == 4
    again = reading(ids, 26)
    engine.run(again)
    assert engine.sizes[2:] == [4]
    assert request.n_cached == 21


def test_rows_of_logits_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences decode than a step has rows: they take turns."""
    monkeypatch.setattr("localllm.engine.runner.MAX_LOGITS_BYTES", 4 * 97 * 3)
    engine = SteppedEngine(32, parallel=8, max_tokens=32)
    requests = [writing([i], 9) for i in range(7)]
    engine.submit(*requests)
    for _ in range(12):
        engine.step()
        lengths = [len(results(r).choices) for r in requests]
        assert max(lengths) - min(lengths) <= 1
    engine.run()
    assert [results(r).ids for r in requests] == [greedy_after([i], 9) for i in range(7)]


def test_prompts_are_not_starved_by_many_that_decode() -> None:
    engine = SteppedEngine(64, parallel=24, max_tokens=24)
    decoding = [writing([i], 40) for i in range(20)]
    engine.submit(*decoding)
    engine.step(4)
    prompt = writing(range(40), 1)
    engine.submit(prompt)
    engine.step(3)
    assert results(prompt).ended.is_set()


@pytest.mark.parametrize("is_read", [False, True])
def test_prompts_are_not_starved_for_rows_of_logits(monkeypatch: pytest.MonkeyPatch, is_read: bool) -> None:
    monkeypatch.setattr("localllm.engine.runner.MAX_LOGITS_BYTES", 4 * 97 * 3)
    engine = SteppedEngine(64, parallel=8, max_tokens=64)
    decoding = [writing([i], 50) for i in range(4)]
    engine.submit(*decoding)
    engine.step(4)
    prompt = reading(range(10)) if is_read else writing(range(10), 1)
    engine.submit(prompt)
    engine.step(12)
    assert results(prompt).ended.is_set()
    engine.run()
    assert [results(r).ids for r in decoding] == [greedy_after([i], 50) for i in range(4)]


def test_requests_without_a_reader_lose_their_pages() -> None:
    engine = SteppedEngine(32, parallel=8, max_running=2)
    unread = [writing([i], 20) for i in range(2)]
    engine.submit(*unread)
    engine.step(2)
    for request in unread:
        results(request).is_full = True
    engine.run(writing([5], 3), again := writing([6], 3))
    assert results(again).ids == greedy_after([6], 3)
    for request in unread:
        results(request).is_full = False
    engine.run()
    assert [results(r).ids for r in unread] == [greedy_after([i], 20) for i in range(2)]


def test_the_number_of_running_requests_is_limited() -> None:
    engine = SteppedEngine(32, parallel=8, max_running=2)
    requests = [writing([i], 5) for i in range(6)]
    engine.submit(*requests)
    while engine.step():
        assert len(engine.scheduler.running) <= 2
    assert [results(r).ids for r in requests] == [greedy_after([i], 5) for i in range(6)]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests of all types with too few pages, compared with the text that each would generate alone."""

    @initialize(
        parallel=st.integers(1, 4),
        max_tokens=st.integers(4, 40),
        max_running=st.integers(1, 6),
        rows=st.integers(1, 8),
    )
    def begin(self, parallel: int, max_tokens: int, max_running: int, rows: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("localllm.engine.runner.MAX_LOGITS_BYTES", 4 * 97 * rows)
            self.engine = SteppedEngine(32, parallel=parallel, max_tokens=max_tokens, max_running=max_running)
        self.limits = min(max_tokens, 32), rows
        self.requests: list[tuple[Request, list[int], Any]] = []
        self.serial = count()

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=32),
        n=st.integers(0, 32),
        background=st.booleans(),
        guess=st.sampled_from([None, 0, 1, 2, 3]),
        first=st.integers(0, 31),
        reads=st.booleans(),
    )
    def submit(self, prompt: list[int], n: int, background: bool, guess: int | None, first: int, reads: bool) -> None:
        if len(self.requests) >= 12:
            return
        priority: Any = "background" if background else "normal"
        submitted_at = 1.0 + next(self.serial) * 10.0
        if reads:
            first = min(first, len(prompt) - 1)
            request = reading(prompt, first, priority=priority, submitted_at=submitted_at)
            expected: Any = [logits_after(prompt[: i + 1]) for i in range(first, len(prompt))]
        else:
            drafter = None if guess is None else nearly_right(guess)
            request = writing(prompt, n, priority=priority, submitted_at=submitted_at, drafter=drafter)
            expected = greedy_after(prompt, min(n, 32 - len(prompt) + 1))
        self.requests.append((request, list(prompt), expected))
        self.engine.submit(request)

    @rule(n=st.integers(1, 8))
    def step(self, n: int) -> None:
        for _ in range(n):
            n_before = len(self.engine.fake.batches)
            oldest = min((r for r, *_ in self.requests if self.can_run(r)), key=lambda r: r.rank, default=None)
            n_missing = (oldest.n_missing, oldest.n_generated) if oldest and self.is_next(oldest) else None
            self.engine.step()
            for batch in self.engine.fake.batches[n_before:]:
                assert len(batch.ids) <= self.limits[0]
                assert len(batch.outputs) <= self.limits[1]
            if oldest and n_missing and oldest.finish_reason is None:
                assert (oldest.n_missing, oldest.n_generated) != n_missing, "the oldest request must continue"
            self.settle()

    def can_run(self, request: Request) -> bool:
        return request.finish_reason is None and not request.output.is_full

    def is_next(self, request: Request) -> bool:
        """Return whether the request must be in each step: rows are assigned in turn."""
        is_only_one = sum(other.rank == request.rank for other, *_ in self.requests) == 1
        n_decoding_at_once = min(self.limits[1], max(1, self.limits[0] - MIN_CHUNK))
        return is_only_one and request.sequence is not None and len(self.requests) <= n_decoding_at_once

    @rule(i=st.integers(0, 11))
    def cancel(self, i: int) -> None:
        if i < len(self.requests):
            self.requests[i][0].is_cancelled = True

    @rule(i=st.integers(0, 11))
    def pause_or_go_on(self, i: int) -> None:
        if i < len(self.requests):
            output = results(self.requests[i][0])
            output.is_full = not output.is_full

    @rule()
    def forget(self) -> None:
        self.engine.loop.forget()

    def settle(self) -> None:
        """Compare finished requests with the model, and running ones with its prefix."""
        for request, prompt, expected in list(self.requests):
            out = results(request)
            assert out.error is None
            if request.sampler is None:
                assert all((a == b).all() for a, b in zip(out.rows, expected, strict=False))
                done: Any = len(out.rows) == len(expected)
            else:
                assert out.ids == expected[: len(out.ids)]
                assert request.tokens == prompt + out.ids
                done = len(out.ids) == len(expected)
            if out.ended.is_set():
                assert request.is_cancelled or done
                self.requests.remove((request, prompt, expected))

    @invariant()
    def lists_are_in_order(self) -> None:
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.scheduler
        for each in (scheduler.running, scheduler.waiting):
            assert [r.rank for r in each] == sorted(r.rank for r in each)
        assert all(r.sequence is not None for r in scheduler.running)
        assert all(r.sequence is None for r in scheduler.waiting)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for request, *_ in self.requests:
                results(request).is_full = False
            self.engine.run()
            self.settle()
            assert not self.requests
            self.engine.check_all_pages_are_back()


#: LOCALLLM_TEST_EXAMPLES=250 runs 10,000 rules or more.
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=int(os.environ.get("LOCALLLM_TEST_EXAMPLES", "40")),
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.generate],
)


def test_clients_take_turns_however_many_requests_each_has() -> None:
    engine = SteppedEngine(64, parallel=1)
    flood = [writing([1, 2, i], 30, client="many") for i in range(20)]
    engine.submit(*flood)
    engine.step()
    single = writing([3, 4], 30, client="few")
    engine.submit(single)
    n_before = len(engine.scheduler.running)
    assert n_before < 20
    while single.sequence is None:
        engine.step()
    waiting = [request for request in flood if request.sequence is None and not results(request).ended.is_set()]
    assert len(waiting) >= 20 - n_before - 1, "it must not wait for every earlier request"
    engine.run()
    assert all(results(request).ids for request in [*flood, single])


def test_among_requests_of_one_client_nothing_changes() -> None:
    engine = SteppedEngine(64, parallel=1)
    requests = [writing([1, 2, i], 30, client="one") for i in range(12)]
    engine.submit(*requests)
    engine.run()
    begun = [request.started_at for request in requests]
    assert begun == sorted(begun)
