"""Operations that must not delay other requests: slow grammars, and saving or loading prompts."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from localllm.engine import saved_prompts
from localllm.engine.engine import Engine, EngineLoop
from localllm.engine.request import Request
from localllm.engine.sampling_threads import SamplingThreads
from localllm.errors import ClosedError
from localllm.sampling import Sampler, Sampling
from localllm.sampling.penalties import Logits
from tests.helpers.engines import eventually, in_engine
from tests.helpers.fake_backend import N_VOCAB, PAGE_SIZE, fake_engine, greedy_after
from tests.helpers.requests import GREEDY, Results, finish, nearly_right, results, writing


class SlowGrammar:
    """A grammar that allows every token, with a delay."""

    is_complete = is_free = False

    def __init__(self, *, may_answer: bool = True, error: Exception | None = None, seconds: float = 0.0) -> None:
        self.begun, self.may_answer = threading.Event(), threading.Event()
        self.threads: set[str] = set()
        self._error, self._seconds = error, seconds
        if may_answer:
            self.may_answer.set()

    def allows(self, id_: int) -> bool:
        self.begun.set()
        self.threads.add(threading.current_thread().name)
        assert self.may_answer.wait(60)
        time.sleep(self._seconds)
        if self._error is not None:
            raise self._error
        return True

    def masked(self, logits: Logits) -> Logits:
        return logits

    def accept(self, id_: int) -> None: ...

    def n_possible(self, ids: Sequence[int]) -> int:
        return len(ids)


def held(prompt: Sequence[int], n: int, grammar: SlowGrammar, **options: object) -> Request:
    """Return a request whose tokens a grammar constrains."""
    sampling = options.pop("sampling", GREEDY)
    assert isinstance(sampling, Sampling)
    sampler = Sampler(sampling, N_VOCAB, prompt_ids=prompt, constraint=grammar)  # type: ignore[arg-type]
    return Request(list(prompt), Results(), sampler=sampler, max_tokens=n, **options)  # type: ignore[arg-type]


@pytest.fixture
def engine() -> Engine:
    return fake_engine(64, parallel=8, max_tokens=16)[0]


def test_no_other_request_waits_for_a_choice(engine: Engine) -> None:
    grammar = SlowGrammar(may_answer=False)
    slow = held([1, 2], 5, grammar)
    engine.submit(slow)
    assert grammar.begun.wait(60)
    steps = engine.counts.steps
    for n in (30, 20):
        assert finish(engine, writing([3, 4], n)).ids == greedy_after([3, 4], n)
    assert engine.counts.steps >= steps + 48  # during the choice of one token
    assert not results(slow).ids
    assert all(name.startswith("localllm-chooser") for name in grammar.threads)
    grammar.may_answer.set()
    assert results(slow).ended.wait(60)
    assert results(slow).ids == greedy_after([1, 2], 5)
    engine.close()


@pytest.mark.parametrize(("seconds", "is_quick"), [(0.0, True), (0.002, False)])
def test_only_quick_choices_of_a_single_request_stay_in_the_engines_thread(
    engine: Engine, seconds: float, is_quick: bool
) -> None:
    grammar = SlowGrammar(seconds=seconds)
    assert finish(engine, held([1, 2], 20, grammar)).ids == greedy_after([1, 2], 20)
    assert "localllm-chooser-0" in grammar.threads  # of the first choice
    assert ("localllm-engine" in grammar.threads) == is_quick
    engine.close()


def test_a_single_request_does_not_wait_for_other_work(engine: Engine) -> None:
    grammar = SlowGrammar()
    assert finish(engine, held([1, 2], 20, grammar)).ids == greedy_after([1, 2], 20)
    assert engine.counts.steps <= 21
    engine.close()


def test_a_processor_stays_in_the_engines_thread(engine: Engine) -> None:
    grammar, seen = SlowGrammar(), set[str]()

    def note(ids: object, logits: Logits) -> Logits:
        seen.add(threading.current_thread().name)
        return logits

    finish(engine, held([1, 2], 3, grammar, sampling=GREEDY.replace(processors=(note,))))
    assert seen == {"localllm-engine"} == grammar.threads
    engine.close()


@pytest.mark.parametrize("end", ["cancelled", "timeout"])
def test_a_request_ends_while_its_token_is_chosen(engine: Engine, end: str) -> None:
    grammar = SlowGrammar(may_answer=False)
    slow = held([1, 2], 5, grammar, timeout_s=0.1 if end == "timeout" else None)
    engine.submit(slow)
    assert grammar.begun.wait(60)
    if end == "cancelled":
        engine.cancel(slow)
    assert results(slow).ended.wait(60)
    assert slow.finish_reason == end
    cache = in_engine(engine, lambda loop: loop.runner.cache)
    assert cache.n_available == cache.n_pages
    grammar.may_answer.set()
    assert finish(engine, writing([1, 2], 3)).ids == greedy_after([1, 2], 3)
    assert not results(slow).ids
    engine.close()


def test_an_error_of_a_choice_ends_only_its_request(engine: Engine) -> None:
    error = ValueError("no token")
    assert finish(engine, held([1, 2], 5, SlowGrammar(error=error))).error is error
    assert finish(engine, held([1, 2], 5, SlowGrammar())).ids == greedy_after([1, 2], 5)
    engine.close()


def test_an_engine_that_is_closed_waits_for_the_choice_under_way_alone(engine: Engine) -> None:
    grammars = [SlowGrammar(may_answer=False) for _ in range(7)]
    requests = [held([i, 2], 5, grammar) for i, grammar in enumerate(grammars)]
    for request in requests:
        engine.submit(request)
    assert eventually(lambda: sum(grammar.begun.is_set() for grammar in grammars) == 4)
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    for grammar in grammars:
        if grammar.begun.is_set():
            grammar.may_answer.set()
    closing.join(60)
    assert not closing.is_alive()
    assert sum(grammar.begun.is_set() for grammar in grammars) == 4
    assert all(isinstance(results(request).error, ClosedError) for request in requests)


@pytest.mark.parametrize("n_right", [0, 1, 3])
def test_drafts_are_verified_apart_too(engine: Engine, n_right: int) -> None:
    request = held([1, 2], 20, SlowGrammar())
    request.drafter = nearly_right(n_right)
    assert finish(engine, request).ids == greedy_after([1, 2], 20)
    assert request.n_accepted >= n_right * 3
    engine.close()


def test_any_company_gives_the_same_texts() -> None:
    """Slow and fast requests in a cache that is too small for all: some are preempted, some end early."""
    rng = np.random.default_rng(0)
    engine, _ = fake_engine(64, parallel=2, max_tokens=16)
    requests: list[Request] = []
    for i in range(40):
        prompt = rng.integers(0, N_VOCAB, int(rng.integers(1, 20))).tolist()
        n = int(rng.integers(1, 40))
        slow = SlowGrammar(seconds=float(rng.choice([0.0, 0.001, 0.02])))
        requests.append(held(prompt, n, slow) if i % 2 else writing(prompt, n))
        if i % 4 == 3:
            requests[-1].drafter = nearly_right(2)
        engine.submit(requests[-1])
        if i % 5 == 4:
            engine.cancel(requests[int(rng.integers(len(requests)))])
    for request in requests:
        assert results(request).ended.wait(120)
        expected = greedy_after(request.tokens[: request.n_prompt], len(results(request).ids))
        assert results(request).ids == expected
        assert request.finish_reason == "cancelled" or len(expected) == request.max_tokens
    assert engine.counts.preempted > 0
    cache = in_engine(engine, lambda loop: loop.runner.cache)
    assert cache.n_available == cache.n_pages
    engine.close()


def test_a_request_whose_tokens_are_being_chosen_keeps_its_pages() -> None:
    """Also if its reader is slow and another request waits for its pages."""
    engine, _ = fake_engine(64, parallel=1, max_tokens=16)
    grammar = SlowGrammar(seconds=0.002)
    slow = held([1, 2], 30, grammar)
    slow.drafter = nearly_right(2)
    results(slow).on_token = lambda id_: grammar.may_answer.clear() if len(results(slow).ids) == 5 else None
    engine.submit(slow)
    assert eventually(lambda: not grammar.may_answer.is_set() and slow.is_choosing)
    results(slow).is_full = True
    engine.submit(other := writing([3] * 40, 20))
    assert not results(other).ended.wait(0.1)
    assert slow.sequence is not None
    grammar.may_answer.set()
    assert eventually(lambda: not slow.is_choosing)
    results(slow).is_full = False
    engine.wake()
    for request in (slow, other):
        assert results(request).ended.wait(60)
        assert results(request).ids == greedy_after(request.tokens[: request.n_prompt], len(results(request).ids))
    assert results(slow).error is None
    engine.close()


def test_messages_that_keep_coming_leave_steps_their_turn(engine: Engine) -> None:
    goes_on = threading.Event()
    goes_on.set()

    def again(loop: EngineLoop) -> None:
        if goes_on.is_set():
            loop.inbox.put(again)

    engine._inbox.put(again)
    assert finish(engine, writing([1, 2], 20)).ids == greedy_after([1, 2], 20)
    goes_on.clear()
    engine.close()


def test_steps_go_on_while_prompts_are_saved_and_loaded(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_prompts, "_BLOCKS_AT_ONCE", 1)
    n_tokens = 0
    for i in range(8):
        finish(engine, writing([i] * PAGE_SIZE, 1))
        n_tokens += PAGE_SIZE
    other = writing([9, 9], 62, output=Results(lambda id_: time.sleep(0.005)))
    engine.submit(other)
    assert eventually(lambda: results(other).ids)
    for work in (saved_prompts.save, saved_prompts.load):
        before = engine.counts.steps
        assert work(engine.with_cache, tmp_path / "prompts", "a key") >= n_tokens
        assert engine.counts.steps - before >= 7  # one between two blocks
    assert not results(other).ended.is_set()
    assert results(other).ended.wait(60)
    assert results(other).ids == greedy_after([9, 9], 62)
    engine.close()


def test_choosers_end() -> None:
    before, choosers, done = threading.active_count(), SamplingThreads(), list[int]()
    for i in range(10):
        choosers.put(lambda i=i: done.append(i))  # type: ignore[misc]
    assert eventually(lambda: len(done) == 10)
    choosers.close()
    assert threading.active_count() == before


def test_a_system_that_gives_no_threads_ends_no_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("localllm.engine.sampling_threads.threading.Thread.start", refused)
    slow = held([1, 2], 3, SlowGrammar())
    engine.submit(slow)
    assert results(slow).ended.wait(60)
    monkeypatch.undo()
    assert results(slow).ids == greedy_after([1, 2], 3)
    engine.close()
    assert not engine._thread.is_alive()
