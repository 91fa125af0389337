"""The engine over a backend whose logits tell which tokens the cache held, and over real forward passes."""

from __future__ import annotations

import gc
import linecache
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.cache import PagedCache
from localllm.devices import Device, open_devices
from localllm.engine import Engine, Run, max_outputs, n_cache_pages
from localllm.errors import ClosedError, ContextLengthError, UsageError
from localllm.gguf import GGUFFile
from localllm.kernels.backend import Batch
from localllm.models.registry import read_model
from tests.helpers.devices import DEVICES
from tests.helpers.fake_backend import N_VOCAB, PAGE_SIZE, FakeStep, fake_engine, greedy_after, logits_after
from tests.helpers.tiny_models import tiny_gguf


def evaluate(engine: Engine, run: Run) -> np.ndarray:
    """Logits [N_VOCAB] after the run's last token."""
    while True:
        engine.advance(run)
        if run.logits is not None:
            return run.logits[-1]


def decode(engine: Engine, run: Run, n: int) -> list[int]:
    """Greedy decoding, without a sampler."""
    for _ in range(n):
        run.tokens.append(int(evaluate(engine, run).argmax()))
    return run.tokens[-n:]


def evaluated(ops: FakeStep) -> int:
    """Tokens that the backend has evaluated."""
    return sum(len(batch.ids) for batch in ops.batches)


def test_prefill_in_chunks_then_decode() -> None:
    engine, ops = fake_engine(max_tokens=8)
    prompt = list(range(20))
    run = engine.start(prompt)
    assert decode(engine, run, 10) == greedy_after(prompt, 10)
    assert [len(batch.ids) for batch in ops.batches] == [8, 8, 4] + [1] * 9
    assert [len(batch.outputs) for batch in ops.batches] == [0, 0, 1] + [1] * 9


def test_the_largest_logits_are_asked_for_where_they_serve_all_runs() -> None:
    """The most that one of them wants; all, where one wants all, or more than the device can choose."""
    engine, ops = fake_engine(max_tokens=8, max_top_k=20)
    a, b = engine.start([1, 2, 3]), engine.start(list(range(12)))

    def advance(a_wants: int, b_wants: int) -> int:
        a.n_best, b.n_best = a_wants, b_wants
        assert engine.advance(a, b)
        for run, k in ((a, a_wants), (b, b_wants)):
            expected = logits_after(run.tokens)
            if run.logits is not None and ops.chosen[-1]:
                ids, logits = run.logits.row(0)  # type: ignore[union-attr]
                assert ids.tolist() == np.argsort(-expected, kind="stable")[:k].tolist()
                np.testing.assert_array_equal(logits, expected[ids])
            elif run.logits is not None:
                np.testing.assert_array_equal(run.logits[0], expected)
            run.tokens += [5] * (run.n_missing == 0)
        return ops.chosen[-1]

    assert advance(3, 0) == 3, "the second one has not reached its end, and wants nothing yet"
    assert b.logits is None
    assert advance(1, 4) == 4
    assert [advance(a, b) for a, b in ((1, 1), (20, 1), (21, 1), (0, 1), (0, 0))] == [1, 20, 0, 0, 0]


def test_logits_of_every_token() -> None:
    engine, _ops = fake_engine()
    ids = [5, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
    logits = engine.logits(ids)
    assert logits.dtype == np.float32
    assert np.array_equal(logits, [logits_after(ids[: n + 1]) for n in range(len(ids))])
    assert np.array_equal(engine.logits(ids), logits), "what a first call leaves behind must not matter"


def test_logits_come_in_chunks_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.engine.MAX_LOGITS_BYTES", 4 * N_VOCAB * 3)
    engine, ops = fake_engine(max_tokens=8)
    ids = list(range(11))
    assert np.array_equal(engine.logits(ids), [logits_after(ids[: n + 1]) for n in range(11)])
    assert [len(batch.outputs) for batch in ops.batches] == [3, 3, 3, 2]
    run = engine.start(ids)
    evaluate(engine, run)
    assert [len(batch.ids) for batch in ops.batches[4:]] == [8, 3], "prefill needs few logits, and keeps its chunks"


def test_a_step_has_room_for_one_row_of_logits_at_least() -> None:
    assert max_outputs(n_vocab=1 << 40, max_tokens=512) == 1
    assert max_outputs(n_vocab=1000, max_tokens=512) == 512
    assert max_outputs(n_vocab=128_256, max_tokens=512) * 128_256 * 4 <= 64 << 20


def test_a_later_prompt_reuses_what_an_earlier_one_left() -> None:
    engine, ops = fake_engine()
    first = engine.start([1, 2, 3, 4, 5, 6])
    answer = decode(engine, first, 4)
    engine.finish(first)
    before = evaluated(ops)
    prompt = [1, 2, 3, 4, 5, 6, *answer, 7, 8]
    second = engine.start(prompt)
    assert second.n_cached == 9, "the last token of the answer was sampled but never evaluated"
    assert np.array_equal(evaluate(engine, second), logits_after(prompt))
    assert evaluated(ops) - before == 3


def test_the_last_token_of_a_cached_prompt_is_evaluated_again() -> None:
    engine, ops = fake_engine()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    for _ in range(3):
        run = engine.start(prompt)
        assert np.array_equal(evaluate(engine, run), logits_after(prompt))
        engine.finish(run)
    assert [len(batch.ids) for batch in ops.batches] == [8, 1, 1]


def test_forget_drops_what_finished_sequences_left() -> None:
    engine, _ = fake_engine()
    run = engine.start([1, 2, 3])
    evaluate(engine, run)
    engine.finish(run)
    engine.forget()
    assert engine.start([1, 2, 3]).n_cached == 0


def test_a_run_that_begins_like_one_in_use_goes_its_own_way() -> None:
    engine, _ = fake_engine(context=64)
    prompt = [3, 1, 4, 1, 5, 9]
    one = engine.start(prompt)
    decode(engine, one, 3)
    two = engine.start([*prompt, 7])
    assert two.n_cached == len(prompt)
    assert np.array_equal(evaluate(engine, two), logits_after([*prompt, 7]))
    assert np.array_equal(evaluate(engine, one), logits_after(one.tokens))


def test_several_runs_in_one_batch() -> None:
    engine, ops = fake_engine(context=64, max_tokens=16)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [1, 2, 9]]
    runs = [engine.start(prompt) for prompt in prompts]
    engine.advance(*runs)
    assert len(ops.batches) == 1
    assert ops.batches[0].query_starts.tolist() == [0, 3, 9, 12]
    for run, prompt in zip(runs, prompts, strict=True):
        assert run.logits is not None
        assert np.array_equal(run.logits, [logits_after(prompt)])
        assert (run.n_company, run.step_s) == (2, runs[0].step_s)
    runs[0].tokens.append(4)
    evaluate(engine, runs[0])
    assert [run.n_company for run in runs] == [0, 2, 2]
    assert runs[0].step_s > 0


def test_runs_that_do_not_fit_into_one_batch_take_turns() -> None:
    engine, _ops = fake_engine(context=64, max_tokens=8)
    prompts = [[1] * 6, [2] * 6, [3] * 6]
    runs = [engine.start(prompt) for prompt in prompts]
    while missing := [run for run in runs if run.n_missing]:
        engine.advance(*missing)
    for run, prompt in zip(runs, prompts, strict=True):
        assert run.logits is not None
        assert np.array_equal(run.logits[-1], logits_after(prompt))


def test_a_run_does_not_take_pages_from_one_of_the_same_batch() -> None:
    engine, _ = fake_engine(context=2 * PAGE_SIZE)
    older, younger = engine.start([1] * PAGE_SIZE), engine.start([2] * 2)
    engine.advance(older, younger)
    for run in (older, younger):
        run.tokens.append(3)
    engine.advance(younger, older)  # the younger has room; the older needs its page, and gets it after that
    for run in (older, younger):
        assert run.logits is not None
        assert np.array_equal(run.logits[-1], logits_after(run.tokens))


def test_logits_of_several_runs_share_the_rows_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.engine.MAX_LOGITS_BYTES", 4 * N_VOCAB * 5)
    engine, ops = fake_engine(parallel=2)
    runs = [engine.start([i, 5, 6], all_logits=True) for i in range(2)]
    engine.advance(*runs)
    assert [run.position for run in runs] == [3, 2]
    assert len(ops.batches[0].outputs) == 5


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=9, max_size=30), min_size=2, max_size=4),
    schedule=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["advance", "finish", "restart"])), max_size=40),
)
@settings(max_examples=60, deadline=None)
def test_any_schedule_over_too_few_pages_decodes_what_each_run_decodes_alone(
    prompts: list[list[int]], schedule: list[tuple[int, str]]
) -> None:
    """All runs are this thread's, so each is idle while another goes on, and loses its pages to it at once."""
    engine, _ = fake_engine(context=32, max_tokens=8)
    engine._new_bell = lambda: pytest.fail("a run waits for room")  # type: ignore[method-assign]
    runs = [engine.start(prompt) for prompt in prompts]
    for i, action in schedule:
        i %= len(runs)
        if action != "advance":
            engine.finish(runs[i], keep=action == "finish")
            runs[i] = engine.start(prompts[i])
        elif len(runs[i].tokens) < engine.context:
            decode(engine, runs[i], 1)
    for run, prompt in zip(runs, prompts, strict=True):
        assert run.tokens[len(prompt) :] == greedy_after(prompt, len(run.tokens) - len(prompt))
        engine.finish(run)
    engine.forget()
    cache, _ = engine._opened()
    assert cache.n_free_pages == cache.n_pages


def test_a_younger_run_gives_way_to_an_older_one_and_waits() -> None:
    """Two threads want the whole context each, and the cache has room for one."""
    engine, ops = fake_engine(context=32, max_tokens=8)
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8]]
    runs = [engine.start(prompt) for prompt in prompts]
    results: dict[int, list[int]] = {}

    def work(i: int) -> None:
        results[i] = decode(engine, runs[i], 28)
        engine.finish(runs[i])

    in_threads(work, range(2))
    assert results == {i: greedy_after(prompts[i], 28) for i in range(2)}
    assert evaluated(ops) < 2 * 31 + 40, "the younger must wait and not fight for pages token by token"


def in_threads(work, arguments: Sequence[int], timeout: float = 60) -> None:
    """Runs work(argument) in a thread each; fails if one raises or does not end."""
    errors: list[BaseException] = []

    def guarded(argument: int) -> None:
        try:
            work(argument)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(a,), daemon=True) for a in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def test_many_threads_on_one_engine() -> None:
    engine, _ops = fake_engine(context=40, parallel=2, max_tokens=8)

    def work(i: int) -> None:
        for n in range(6):
            prompt = [n % 2, 1, 2, 3, 4, 5, i][: 3 + n]
            run = engine.start(prompt)
            assert decode(engine, run, 12) == greedy_after(prompt, 12)
            engine.finish(run, keep=n % 2 == 0)
            ids = [i, n, 7]
            assert np.array_equal(engine.logits(ids), [logits_after(ids[: k + 1]) for k in range(3)])

    in_threads(work, range(6))
    engine.forget()
    cache, _ = engine._opened()
    assert cache.n_free_pages == cache.n_pages


def test_threads_that_wait_share_a_batch() -> None:
    engine, ops = fake_engine(context=64, parallel=4, max_tokens=8)
    runs = [engine.start([i, i + 1]) for i in range(4)]
    all_wait = threading.Event()

    def hold(batch: Batch) -> None:
        """Keeps the first step going until the other threads are waiting."""
        while not all_wait.is_set() and sum(run.waiting for run in runs) < 4:
            time.sleep(0.001)
        all_wait.set()

    ops.before_step = hold
    in_threads(lambda i: evaluate(engine, runs[i]), range(4))
    assert [len(batch.kv_lengths) for batch in ops.batches] == [1, 3]


def patience(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Steps wait so long for the others of the last batch, however short that was."""
    monkeypatch.setattr("localllm.engine._PART_OF_STEP", 1e12)
    monkeypatch.setattr("localllm.engine._MOST_SECONDS", seconds)


def test_a_step_waits_for_the_others_of_the_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    patience(monkeypatch, 30)
    engine, ops = fake_engine(context=64, parallel=3)
    runs = [engine.start([i, i + 1]) for i in range(3)]
    engine.advance(*runs)

    def go_on(i: int) -> None:
        time.sleep(0.02 * i)  # the first is there before the others
        decode(engine, runs[i], 1)
        evaluate(engine, runs[i])

    for run in runs:
        run.tokens.append(0)
    in_threads(go_on, range(3), timeout=20)
    assert [len(batch.kv_lengths) for batch in ops.batches] == [3, 3, 3]


def test_a_caller_that_does_not_come_back_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    patience(monkeypatch, 0.01)
    engine, ops = fake_engine(context=64, parallel=2)
    runs = [engine.start([i, i + 1]) for i in range(2)]
    engine.advance(*runs)
    runs[0].tokens.append(0)
    in_threads(lambda _: evaluate(engine, runs[0]), [0])
    assert [run.is_quick for run in runs] == [True, False]
    assert len(ops.batches) == 2


def test_a_thread_does_not_wait_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    patience(monkeypatch, 1e6)
    engine, ops = fake_engine(context=64, parallel=2)

    def work(_: int) -> None:
        runs = [engine.start([i, i + 1]) for i in range(2)]
        engine.advance(*runs)
        runs[0].tokens.append(0)
        evaluate(engine, runs[0])

    in_threads(work, [0], timeout=10)
    assert len(ops.batches) == 2


def test_no_thread_waits_for_a_run_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    patience(monkeypatch, 1e6)
    engine, ops = fake_engine(context=64, parallel=2)
    runs = [engine.start([i, i + 1]) for i in range(2)]
    engine.advance(*runs)
    for run in runs:
        engine.finish(run)
    in_threads(lambda _: decode(engine, engine.start([5, 6, 7]), 2), [0], timeout=10)
    assert len(ops.batches) == 3


def test_an_idle_run_of_another_thread_gives_up_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.engine.IDLE_SECONDS", 0.05)
    engine, _ = fake_engine(context=32)
    older = engine.start([1] * 20)
    in_threads(lambda _: evaluate(engine, older), [0])
    younger = engine.start([2] * 20)
    assert np.array_equal(evaluate(engine, younger), logits_after([2] * 20))
    assert np.array_equal(evaluate_again(engine, older), logits_after([1] * 20 + [3]))


def evaluate_again(engine: Engine, run: Run) -> np.ndarray:
    run.tokens.append(3)
    return evaluate(engine, run)


def test_a_failed_step_leaves_everything_usable() -> None:
    engine, ops = fake_engine()
    run, other = engine.start([1, 2, 3]), engine.start([4, 5])
    evaluate(engine, other)

    def fail(batch: Batch) -> None:
        raise KeyboardInterrupt

    ops.before_step = fail
    with pytest.raises(KeyboardInterrupt):
        engine.advance(run)
    ops.before_step = lambda batch: None
    assert decode(engine, run, 3) == greedy_after([1, 2, 3], 3)
    assert decode(engine, engine.start([4, 5]), 3) == greedy_after([4, 5], 3)


def test_a_failed_step_of_one_thread_is_done_again_by_those_that_wait() -> None:
    engine, ops = fake_engine(parallel=2)
    runs = [engine.start([1, 2, 3]), engine.start([4, 5])]
    failed = threading.Event()

    def fail_once(batch: Batch) -> None:
        while not failed.is_set() and not all(run.waiting for run in runs):
            time.sleep(0.001)
        if not failed.is_set():
            failed.set()
            raise RuntimeError("broken")

    ops.before_step = fail_once
    results: list[bool] = []

    def work(i: int) -> None:
        try:
            results.append(np.array_equal(evaluate(engine, runs[i]), logits_after(runs[i].tokens)))
        except RuntimeError:
            results.append(False)

    in_threads(work, range(2))
    assert sorted(results) == [False, True]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer signals here")
def test_an_interrupt_while_waiting_takes_the_lock_from_nobody() -> None:
    """Ctrl-C comes when the wait for room is over, and that for another thread's step is not."""
    engine, ops = fake_engine(context=8)
    is_full, in_step, go_on = threading.Event(), threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def of_other_thread() -> None:
        try:
            run = engine.start(range(7))
            decode(engine, run, 1)
            is_full.set()
            while not engine._bells:  # until somebody waits for room
                time.sleep(0.001)
            ops.before_step = lambda batch: (in_step.set(), go_on.wait(10))  # type: ignore[func-returns-value]
            evaluate(engine, run)
            engine.finish(run)
        except BaseException as error:
            errors.append(error)

    def interrupt(*_: object) -> None:
        assert in_step.is_set()
        raise KeyboardInterrupt

    other = threading.Thread(target=of_other_thread)
    other.start()
    is_full.wait(10)
    younger = engine.start([1, 2])
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            engine.advance(younger)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert engine._lock.locked()
    go_on.set()
    other.join()
    assert not errors
    assert np.array_equal(evaluate(engine, younger), logits_after([1, 2]))


@pytest.mark.parametrize("file", ["engine.py", "cache.py"])
def test_an_interrupt_at_any_line_loses_no_page(file: str) -> None:
    """What was lost would be missed for ever, and in the end nobody would have room."""

    class Interrupt(BaseException):
        pass

    def work(engine: Engine) -> None:
        first = engine.start([1, 2, 3, 4, 5, 6])
        second = engine.start([1, 2, 3, 4, 5, 7])
        for run in (first, second):
            decode(engine, run, 3)
        engine.finish(first)
        decode(engine, second, 2)
        engine.finish(second)
        engine.finish(engine.start(second.tokens[:9]))

    def interrupted_at(n: int) -> bool:
        """Whether there were so many lines."""
        engine, _ops = fake_engine(context=16)
        count = 0

        def trace(frame: FrameType, event: str, _argument: object) -> Any:
            nonlocal count
            code = frame.f_code
            # A signal does not come between a lock and its ``with``, nor here while one is let go of.
            if not code.co_filename.endswith(f"localllm/{file}") or code.co_name == "finish":
                return None
            if event == "line" and "with self._lock" not in linecache.getline(code.co_filename, frame.f_lineno):
                count += 1
                if count == n:
                    raise Interrupt
            return trace

        tracing = sys.gettrace()
        sys.settrace(trace)
        try:
            work(engine)
            return False
        except Interrupt:
            return True
        finally:
            sys.settrace(tracing)
            assert not engine._lock.locked()
            for run in list(engine._runs):
                engine.finish(run)
            engine.forget()
            cache = cast("tuple[PagedCache, object]", engine._open)[0]
            assert cache.n_free_pages == cache.n_pages, f"interrupted at line {n} that is executed"
            assert decode(engine, engine.start(range(14)), 1) == greedy_after(range(14), 1)

    n = 1
    while interrupted_at(n):
        n += 1
    assert n > 100


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    engine, _ops = fake_engine(context=16)
    with pytest.raises(ContextLengthError, match=r"17 tokens but the context holds 16") as caught:
        engine.start([1] * 17)
    assert (caught.value.n_tokens, caught.value.context) == (17, 16)
    with pytest.raises(ContextLengthError):
        engine.logits([1] * 17)
    run = engine.start([1] * 16)
    evaluate(engine, run)
    run.tokens.append(1)
    with pytest.raises(ContextLengthError):
        engine.advance(run)
    assert engine.logits([1] * 16).shape == (16, N_VOCAB)


@pytest.mark.parametrize("ids", [[], [-1], [0, N_VOCAB], [1 << 40]])
def test_ids_outside_the_vocabulary_never_reach_the_backend(ids: list[int]) -> None:
    engine, ops = fake_engine()
    with pytest.raises(UsageError):
        engine.start(ids)
    with pytest.raises(UsageError):
        engine.logits(ids)
    assert not ops.batches


def test_runs_that_ended_or_have_nothing_to_do_are_refused() -> None:
    engine, _ = fake_engine()
    run = engine.start([1, 2])
    evaluate(engine, run)
    with pytest.raises(UsageError, match="append"):
        engine.advance(run)
    run.tokens.append(1)
    engine.finish(run)
    engine.finish(run)
    with pytest.raises(UsageError, match="finished"):
        engine.advance(run)


def test_finish_during_a_step_takes_effect_with_the_next() -> None:
    """As a finaliser would, that the garbage collector runs while this very thread holds the lock."""
    engine, ops = fake_engine()
    abandoned = engine.start([9] * 12)
    evaluate(engine, abandoned)
    ops.before_step = lambda batch: engine.finish(abandoned)
    run = engine.start([1, 2, 3])
    assert np.array_equal(evaluate(engine, run), logits_after([1, 2, 3]))
    assert engine.start([9] * 12).n_cached == 11


def test_close_ends_runs_and_lets_the_cache_go() -> None:
    engine, ops = fake_engine()
    run = engine.start([1, 2])
    engine.close()
    engine.close()
    with pytest.raises(ClosedError):
        engine.advance(run)
    with pytest.raises(ClosedError):
        engine.start([1])
    engine.finish(run)
    cache = weakref.ref(ops.cache)
    del ops.cache
    gc.collect()
    assert cache() is None


def test_close_wakes_a_run_that_waits_for_room() -> None:
    engine, _ops = fake_engine(context=2 * PAGE_SIZE, max_tokens=8)
    older, younger = engine.start([1] * 8), engine.start([2] * 8)
    evaluating = threading.Event()

    def work(i: int) -> None:
        if i == 0:
            evaluate(engine, older)
            older.waiting = True  # as if its thread were about to go on
            evaluating.set()
        elif i == 1:
            evaluating.wait(10)
            with pytest.raises(ClosedError):
                evaluate(engine, younger)
        else:
            evaluating.wait(10)
            while not younger.waiting:
                time.sleep(0.001)
            engine.close()

    in_threads(work, range(3))


# Over real forward passes.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("engine") / "tiny.gguf")


MakeEngine = Callable[..., Engine]


@pytest.fixture(params=DEVICES)
def real_engine(request: pytest.FixtureRequest, tiny: Path) -> Iterator[MakeEngine]:
    """Makes engines of a tiny random model on a device."""
    devices: list[Device] = []

    def make(*, max_tokens: int = 512, parallel: int = 4) -> Engine:
        [device] = open_devices(request.param, threads=2)
        devices.append(device)
        n_tokens = min(max_tokens, 96)
        n_pages = n_cache_pages(96, parallel, device.backend.page_size)
        with GGUFFile.open(tiny) as file:
            graph = read_model(file, 96).graph
            sizes = {"n_pages": n_pages, "max_tokens": n_tokens, "max_outputs": max_outputs(300, n_tokens)}
            step = device.backend.compile(graph, **sizes)
        return Engine(step, n_vocab=300, context=96, max_tokens=max_tokens)

    yield make
    for device in devices:
        device.close()


def close_to(a: np.ndarray, b: np.ndarray) -> bool:
    """As the issue bounds it: the largest difference under 1e-4 of the largest logit."""
    return float(np.abs(a - b).max()) < 1e-4 * float(np.abs(b).max())


def test_cached_decode_equals_prefill(real_engine: MakeEngine) -> None:
    engine = real_engine()
    ids = np.random.default_rng(1).integers(0, 300, 70).tolist()
    full = engine.logits(ids)
    run = engine.start(ids[:33])
    for n in range(33, 70):
        assert close_to(evaluate(engine, run), full[n - 1])
        run.tokens.append(ids[n])


def test_chunks_do_not_matter(real_engine: MakeEngine) -> None:
    ids = np.random.default_rng(2).integers(0, 300, 90).tolist()
    assert close_to(real_engine(max_tokens=7).logits(ids), real_engine().logits(ids))


def test_a_ragged_batch_equals_each_sequence_alone(real_engine: MakeEngine) -> None:
    rng = np.random.default_rng(3)
    engine, other = real_engine(), real_engine()
    lengths = [1, 17, 40, 16]
    texts = [rng.integers(0, 300, n + 5).tolist() for n in lengths]
    alone = [other.logits(text) for text in texts]
    runs = [engine.start(text[:n]) for text, n in zip(texts, lengths, strict=True)]
    for step in range(6):
        engine.advance(*runs)
        for run, text, n, expected in zip(runs, texts, lengths, alone, strict=True):
            assert run.logits is not None
            assert close_to(run.logits[-1], expected[n + step - 1])
            run.tokens += text[n + step : n + step + 1]


def test_a_fork_equals_a_sequence_from_scratch(real_engine: MakeEngine) -> None:
    engine, other = real_engine(), real_engine()
    rng = np.random.default_rng(4)
    trunk = rng.integers(0, 300, 37).tolist()
    first = engine.start(trunk)
    evaluate(engine, first)
    for n in (37, 36, 32, 20, 1):
        branch = trunk[:n] + rng.integers(0, 300, 9).tolist()
        run = engine.start(branch)
        assert run.n_cached == n
        assert close_to(evaluate(engine, run), other.logits(branch)[-1])
    first.tokens += [5, 6]
    assert close_to(evaluate(engine, first), other.logits([*trunk, 5, 6])[-1])


def test_what_runs_lose_for_want_of_room_comes_back_the_same(real_engine: MakeEngine) -> None:
    engine, other = real_engine(parallel=1), real_engine()
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 300, 80).tolist() for _ in range(2)]
    expected = [other.logits(text) for text in texts]
    runs = [engine.start(text[:60]) for text in texts]
    for n in range(60, 80):
        for run, text, logits in zip(runs, texts, expected, strict=True):
            assert close_to(evaluate(engine, run), logits[n - 1])
            run.tokens.append(text[n])


# Drafts.


def test_drafts_are_evaluated_with_the_last_token() -> None:
    engine, ops = fake_engine()
    run = engine.start([1, 2, 3])
    run.drafts = [7, 8, 9]
    engine.advance(run)
    assert len(ops.batches) == 1
    assert run.logits is not None
    assert np.array_equal(run.logits, [logits_after([1, 2, 3, 7, 8, 9][:n]) for n in range(3, 7)])
    assert (run.tokens, run.drafts, run.position) == ([1, 2, 3], [7, 8, 9], 3)


@pytest.mark.parametrize("n_right", range(5))
def test_the_cache_is_cut_back_to_what_was_right(n_right: int) -> None:
    """In the middle of a page and at its end, and without evaluating anything twice."""
    engine, ops = fake_engine()
    run = engine.start([1, 2, 3])
    run.drafts = [7, 8, 9, 10]
    engine.advance(run)
    run.tokens += run.drafts[:n_right]
    run.cut(len(run.tokens))
    run.tokens.append(50)
    assert run.n_missing == 1
    before = evaluated(ops)
    assert np.array_equal(evaluate(engine, run), logits_after(run.tokens))
    assert evaluated(ops) - before == 1
    engine.finish(run)
    again = engine.start([*run.tokens, 60])
    assert again.n_cached == len(run.tokens)


def test_cutting_tokens_that_were_no_drafts() -> None:
    engine, _ = fake_engine()
    run = engine.start(list(range(1, 12)))
    evaluate(engine, run)
    engine.advance(engine.start([90]))
    run.cut(6)
    run.tokens += [80, 81]
    assert run.n_missing == 2
    assert np.array_equal(evaluate(engine, run), logits_after([1, 2, 3, 4, 5, 6, 80, 81]))


def test_wrong_drafts_in_a_page_that_another_run_shares() -> None:
    """A run that began as the other with its drafts keeps them, whoever cuts back."""
    engine, _ = fake_engine(context=64, parallel=2)
    run = engine.start([1, 2, 3])
    run.drafts = [7, 8, 9]
    engine.advance(run)
    other = engine.start([1, 2, 3, 7, 8, 9, 10])
    assert other.n_cached == 6
    run.cut(3)
    run.tokens.append(50)
    assert np.array_equal(evaluate(engine, run), logits_after([1, 2, 3, 50]))
    assert np.array_equal(evaluate(engine, other), logits_after([1, 2, 3, 7, 8, 9, 10]))
    assert np.array_equal(evaluate(engine, engine.start([1, 2, 3, 50, 1])), logits_after([1, 2, 3, 50, 1]))


def test_drafts_that_were_not_taken_are_forgotten_at_the_end() -> None:
    engine, _ = fake_engine()
    run = engine.start([1, 2, 3])
    run.drafts = [7, 8, 9]
    engine.advance(run)
    run.tokens.append(7)
    engine.finish(run)
    assert engine.start([1, 2, 3, 7, 8, 9, 10]).n_cached == 4


def test_drafts_wait_for_the_end_of_a_prompt() -> None:
    engine, ops = fake_engine(max_tokens=8)
    prompt = list(range(14))
    run = engine.start(prompt)
    run.drafts = [5, 6, 7, 8]
    engine.advance(run)
    assert run.logits is None
    engine.advance(run)
    assert [len(batch.ids) for batch in ops.batches] == [8, 8]
    assert run.drafts == [5, 6], "there was no room for more in the batch"
    assert run.logits is not None
    assert np.array_equal(run.logits, [logits_after([*prompt, 5, 6][:n]) for n in (14, 15, 16)])


def test_drafts_end_with_the_context() -> None:
    engine, _ = fake_engine(context=8)
    run = engine.start([1, 2, 3, 4, 5, 6])
    run.drafts = [7, 8, 9, 10]
    engine.advance(run)
    assert run.drafts == [7, 8]


def test_drafts_take_no_rows_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.engine.MAX_LOGITS_BYTES", 4 * N_VOCAB * 3)
    engine, _ = fake_engine(context=16, max_tokens=16)
    one, two = engine.start([1, 2, 3]), engine.start([4, 5, 6, 7, 8, 9, 10])
    one.drafts = [11, 12, 13]
    engine.advance(one, two)
    assert one.drafts == [11], "three rows of logits, and two are taken"
    for run, ids in ((one, [1, 2, 3]), (two, [4, 5, 6, 7, 8, 9, 10])):
        assert run.logits is not None
        assert np.array_equal(run.logits[0], logits_after(ids))


def test_drafts_take_no_pages_from_others() -> None:
    engine, _ = fake_engine(context=4 * PAGE_SIZE, max_tokens=16)
    one, two = engine.start([1, 2, 3]), engine.start(list(range(3 * PAGE_SIZE)))
    engine.advance(one, two)
    one.tokens.append(11)
    one.drafts = [31, 32]
    engine.advance(one)
    assert one.drafts == [], "they would need another page"
    assert two.n_missing == 0
    engine.finish(two)
    one.tokens.append(12)
    one.drafts = [31, 32]
    engine.advance(one)
    assert one.drafts == [31, 32], "what finished runs left is free to take"


def test_advancing_without_waiting() -> None:
    engine, _ = fake_engine(context=16)
    first = engine.start(list(range(16)))
    evaluate(engine, first)
    first.waiting = True  # as if its thread were about to go on
    second = engine.start([50, 51])
    assert not engine.advance(second, wait=False)
    assert second.n_missing == 2
    first.waiting = False
    assert engine.advance(second, wait=False)
    assert second.logits is not None
    assert np.array_equal(second.logits, [logits_after([50, 51])])


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_drafts_right_or_wrong(data: st.DataObject) -> None:
    """Several runs with drafts in a cache that is too small for all, against the logits of their tokens."""
    engine, _ = fake_engine(context=32, parallel=1, max_tokens=data.draw(st.sampled_from([4, 16])))
    runs = [engine.start([1, 2, n % 2]) for n in range(3)]
    token = st.integers(0, N_VOCAB - 1)
    for _ in range(12):
        run = data.draw(st.sampled_from(runs))
        if not run.n_missing or len(run.tokens) > 24:
            continue
        run.drafts = data.draw(st.lists(token, max_size=6))
        while True:
            engine.advance(run)
            if run.logits is not None:
                break
        text = run.tokens + run.drafts
        for row, logits in enumerate(run.logits):
            assert np.array_equal(logits, logits_after(text[: len(run.tokens) + row]))
        n_right = data.draw(st.integers(0, len(run.drafts)))
        run.tokens += run.drafts[:n_right]
        run.cut(len(run.tokens))
        run.tokens.append(data.draw(token))
