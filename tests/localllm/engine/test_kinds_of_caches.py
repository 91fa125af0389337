"""An engine with windowed caches and recurrent states: the same tokens as without a cache, with little work."""

from __future__ import annotations

import numpy as np
import pytest

from localllm.engine import cache as cache_module
from localllm.engine.cache import common_prefix
from localllm.engine.request import Request
from localllm.kernels.backend import Batch, Output
from tests.helpers.fake_backend import PAGE_SIZE, FakeCache, greedy_after
from tests.helpers.requests import FakeDrafter, SteppedEngine, results, writing

#: Tokens between two snapshots of a prompt in these tests.
INTERVAL = 4 * PAGE_SIZE


@pytest.fixture(autouse=True)
def _frequent_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "SNAPSHOT_TOKENS", INTERVAL)


#: Windows, and whether there are states.
KINDS = {"windows": ((None, 6, 20), False), "states": ((None,), True), "all": ((None, 6), True)}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[tuple[int | None, ...], bool]:
    return KINDS[request.param]


def new_engine(
    kind: tuple[tuple[int | None, ...], bool],
    n_pages: int = 64,
    n_windowed: int = 20,
    n_states: int = 8,
    **settings: object,
) -> SteppedEngine:
    windows, has_states = kind
    kept = FakeCache(
        (n_pages, *(min(n_pages, n_windowed) for _ in windows[1:])), windows, n_states if has_states else 0
    )
    return SteppedEngine(256, cache=kept, **settings)


def check(request: Request) -> list[int]:
    n = request.n_prompt
    assert results(request).error is None
    assert results(request).ids == greedy_after(request.tokens[:n], len(results(request).ids))
    return request.tokens


def test_each_turn_of_a_chat_evaluates_only_new_tokens(kind: tuple[tuple[int | None, ...], bool]) -> None:
    engine, rng = new_engine(kind, max_tokens=16, n_states=24, n_windowed=40), np.random.default_rng(0)
    chat: list[int] = rng.integers(0, 97, 30).tolist()
    held: list[int] = []
    for turn in range(10):
        if turn in (3, 6):  # a template changes the previous reply
            chat = [*chat[:-6], 96]
        if turn == 8:  # a message is edited
            chat = [*chat[: len(chat) - 40], 95, 94]
        chat += rng.integers(0, 97, 7).tolist()
        before, n_shared = engine.n_evaluated, common_prefix(chat, held)
        engine.run(request := writing(chat, 8))
        held = chat = check(request)
        assert engine.n_evaluated - before <= len(chat) - n_shared + (INTERVAL if turn else 0), turn
    engine.check_all_pages_are_back()


def test_the_end_of_a_prompt_is_reused(kind: tuple[tuple[int | None, ...], bool]) -> None:
    engine, prompt = new_engine(kind), list(range(50))
    first = writing(prompt, 30)
    engine.run(first)
    before = engine.n_evaluated
    engine.run(again := writing(prompt, 1))
    assert engine.n_evaluated == before + 1
    assert again.n_cached == 49
    engine.run(other := writing([*prompt, 90, 91], 1))
    assert other.n_cached >= 49
    for request in (first, again, other):
        check(request)


def test_a_prompt_that_changes_in_the_middle_goes_back_to_a_snapshot() -> None:
    engine = new_engine(KINDS["states"])
    engine.run(writing(list(range(60)), 4))
    engine.run(request := writing([*range(40), 77, *range(41, 60)], 4))
    assert request.n_cached == 2 * INTERVAL
    check(request)


def test_requests_side_by_side_and_preempted(kind: tuple[tuple[int | None, ...], bool]) -> None:
    engine, rng = new_engine(kind, n_pages=30, n_states=5), np.random.default_rng(1)
    common = rng.integers(0, 97, 20).tolist()
    requests = [writing(common[: rng.integers(21)] + rng.integers(0, 97, 9).tolist(), 25) for _ in range(12)]
    engine.run(*requests)
    for request in requests:
        check(request)
    engine.check_all_pages_are_back()


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_wrong_drafts_are_rolled_back(kind: tuple[tuple[int | None, ...], bool], rate: float) -> None:
    engine, rng = new_engine(kind), np.random.default_rng(2)

    def guess(tokens: list[int], most: int) -> list[int]:
        return [(id_ + (rng.random() > rate)) % 97 for id_ in greedy_after(tokens, min(most, 5))]

    requests = [writing(rng.integers(0, 97, n).tolist(), 40) for n in (9, 21)]
    for request in requests:
        request.drafter = FakeDrafter(guess)
    engine.run(*requests)
    for request in requests:
        check(request)
        assert request.n_drafted > 20 or not rate
    assert len(engine.fake.batches) < (70 if rate else 100)
    engine.check_all_pages_are_back()
    before = engine.n_evaluated
    engine.run(request := writing([*requests[0].tokens, 1, 2], 1))
    assert engine.n_evaluated - before <= 3 + 7
    check(request)


def test_a_failed_step_leaves_no_state_behind() -> None:
    engine = new_engine(KINDS["all"])
    engine.run(first := writing(list(range(20)), 4))
    calls, evaluate = iter([None, None, ValueError("no")]), engine.fake.run

    def fail(batch: Batch) -> Output:
        output = evaluate(batch)  # changes the states
        if (error := next(calls, None)) is not None:
            raise error
        return output

    engine.fake.run = fail
    engine.run(second := writing([*first.tokens, 5, 6, 7], 8))
    assert isinstance(results(second).error, ValueError)
    engine.run(third := writing(second.tokens, 8))
    check(third)
    engine.check_all_pages_are_back()


def test_running_requests_are_limited_by_the_slots() -> None:
    engine = new_engine(KINDS["states"], n_states=3)
    requests = [writing([i, i + 1, i + 2], 10) for i in range(5)]
    engine.submit(*requests)
    while engine.step():
        assert len(engine.scheduler.running) <= 2
    for request in requests:
        check(request)
