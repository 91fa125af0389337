"""The engine: batching of requests, its thread, and real forward passes."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.engine.engine import Engine, EngineLoop
from localllm.engine.request import Request
from localllm.engine.runner import ModelRunner, max_outputs, n_cache_pages
from localllm.errors import ClosedError, QueueFullError, UsageError
from localllm.gguf import GGUFFile
from localllm.kernels.backend import Batch
from localllm.loading.devices import Device, open_devices
from localllm.models.registry import read_model
from localllm.sampling import Sampling
from tests.helpers.devices import DEVICES
from tests.helpers.fake_backend import N_VOCAB, PAGE_SIZE, fake_engine, fake_runner, greedy_after
from tests.helpers.requests import Results, SteppedEngine, finish, reading, results, writing
from tests.helpers.tiny_models import tiny_gguf

# Steps.


def test_work_is_counted() -> None:
    engine = SteppedEngine(max_tokens=8)
    engine.run(writing(range(12), 5), writing(range(12), 1))
    counts = engine.loop.counts
    assert counts.generated_tokens == 6
    assert counts.prompt_tokens + counts.cached_tokens == 24
    assert counts.cached_tokens >= 8
    assert counts.ended == 2
    assert counts.steps == len(engine.sizes)


def test_the_final_state_of_a_request() -> None:
    engine = SteppedEngine(max_tokens=8)
    request = writing(range(12), 5)
    engine.run(request)
    assert request.finish_reason == "length"
    assert (request.usage.prompt_tokens, request.usage.cached_tokens, request.usage.completion_tokens) == (12, 0, 5)
    timings = request.timings
    assert (timings.prefill_tokens, timings.decode_tokens) == (12, 4)
    now = time.perf_counter()
    assert 0 < timings.prefill_s <= timings.first_token_s < now - request.submitted_at
    assert 0 < timings.decode_s < now - request.submitted_at


@pytest.mark.parametrize("n", [0, 1, 5])
def test_the_number_of_tokens_is_limited(n: int) -> None:
    engine = SteppedEngine()
    request = writing([1, 2, 3], n)
    engine.run(request)
    assert results(request).ids == greedy_after([1, 2, 3], n)
    assert request.finish_reason == "length"
    assert sum(len(batch.outputs) for batch in engine.fake.batches) == max(n, 1)


def test_the_end_of_the_context_ends_a_text() -> None:
    engine = SteppedEngine(16)
    request = writing(range(10), None)
    engine.run(request)
    assert results(request).ids == greedy_after(range(10), 7), "the last token is chosen but not evaluated"
    assert request.finish_reason == "length"
    engine.check_all_pages_are_back()


def test_a_stop_token_ends_a_text_and_is_not_part_of_it() -> None:
    text = greedy_after([1, 2], 6)
    engine = SteppedEngine()
    request = writing([1, 2], 20, stop_ids={text[4]})
    engine.run(request)
    assert results(request).ids == text[: text.index(text[4])]
    assert request.finish_reason == "stop"


def test_the_output_ends_a_text() -> None:
    text = greedy_after([1, 2], 6)
    engine = SteppedEngine()
    request = writing([1, 2], 20, output=Results(lambda id_: id_ == text[3]))
    engine.run(request)
    assert results(request).ids == text[: text.index(text[3]) + 1]
    assert request.finish_reason == "stop"


def test_a_later_prompt_reuses_the_cache_of_an_earlier_one() -> None:
    engine = SteppedEngine(max_tokens=64)
    first = writing([1, 2, 3, 4, 5, 6], 4)
    engine.run(first)
    before = engine.n_evaluated
    second = writing([*first.tokens, 7, 8], 1)
    engine.run(second)
    assert second.n_cached == 9, "the last token of the answer was chosen but never evaluated"
    assert engine.n_evaluated - before == 3
    assert results(second).ids == greedy_after([*first.tokens, 7, 8], 1)


def test_the_last_token_of_a_cached_prompt_is_evaluated_again() -> None:
    engine = SteppedEngine(max_tokens=64)
    for _ in range(3):
        request = writing(range(8), 1)
        engine.run(request)
        assert results(request).ids == greedy_after(range(8), 1)
    assert engine.sizes == [8, 1, 1]


def test_forget_drops_the_cache_of_earlier_requests() -> None:
    engine = SteppedEngine()
    engine.run(writing([1, 2, 3], 1))
    engine.loop.forget()
    request = writing([1, 2, 3], 1)
    engine.run(request)
    assert request.n_cached == 0


def test_only_the_largest_logits_are_requested_if_they_suffice() -> None:
    """The largest number that a request needs; a request for all, or for too many, gets the full row."""
    engine = SteppedEngine(max_tokens=64, parallel=8, max_top_k=20)

    def chosen(*samplings: Sampling | None) -> tuple[int, list[int]]:
        requests = [
            reading([i, 5, i]) if s is None else writing([i, 5, i], 1, sampling=s) for i, s in enumerate(samplings)
        ]
        engine.run(*requests)
        return engine.fake.chosen[-1]

    greedy, some, many = Sampling(temperature=0), Sampling(top_k=5, seed=1), Sampling(top_k=30, seed=1)
    everything = Sampling(temperature=0, logprobs=1)
    assert chosen(greedy) == (1, [])
    assert chosen(greedy, some) == (6, [])
    assert chosen(some, many, greedy, everything) == (6, [1, 3])
    assert [chosen(many), chosen(everything, many), chosen(greedy, None)] == [(0, [])] * 3


def test_logprobs_are_those_of_all_logits() -> None:
    everything, found = Sampling(temperature=0, logprobs=2), []
    for max_top_k in (0, 20):
        engine = SteppedEngine(max_top_k=max_top_k, parallel=2)
        requests = [writing([1, 2, 3], 5, sampling=everything), writing([4, 5], 5)]
        engine.run(*requests)
        found.append(results(requests[0]).choices)
    assert engine.fake.chosen[-1] == (1, [0])
    assert found[0] == found[1]


def test_the_largest_logits_choose_as_all_would() -> None:
    sampling = Sampling(top_k=5, temperature=1.5, seed=3)
    texts = []
    for max_top_k in (0, 20):
        engine = SteppedEngine(max_top_k=max_top_k)
        request = writing([1, 2, 3], 20, sampling=sampling)
        engine.run(request)
        texts.append(results(request).ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("max_tokens", [4, 64])
def test_the_next_step_starts_before_its_token_is_known(max_tokens: int) -> None:
    """Texts are equal with and without it, and every extra evaluation is a discarded token."""

    def run(is_ahead: bool) -> tuple[list[list[int]], SteppedEngine]:
        engine = SteppedEngine(parallel=4, max_tokens=max_tokens, max_top_k=20)
        engine.fake.chooses_ahead = is_ahead
        stop = greedy_after([5, 6, 7], 9)[-1]
        requests = [
            writing([5, 6, 7], 20, stop_ids={stop}),
            writing([1, 2], 30),
            writing(range(9), 11, sampling=Sampling(top_k=3, seed=1)),
            writing([7, 8], 12, speculate="lookup"),
            writing([5, 6, 7, 8], 30),
            writing([9, 9], 25, sampling=Sampling(temperature=0, logit_bias={greedy_after([9, 9], 3)[-1]: -100.0})),
        ]
        for request in requests:  # each arrives while the previous one runs
            engine.submit(request)
            engine.step(5)
        engine.run()
        engine.check_all_pages_are_back()
        return [results(request).ids for request in requests], engine

    (texts, engine), (ahead, other) = run(False), run(True)
    assert ahead == texts
    assert texts[0] == greedy_after([5, 6, 7], 8)
    assert engine.loop.counts.generated_tokens == other.loop.counts.generated_tokens
    assert engine.n_evaluated < other.n_evaluated


def test_a_step_ahead_is_used() -> None:
    """Every token is computed ahead except the first of a page."""
    engine = SteppedEngine(max_top_k=20)
    engine.fake.chooses_ahead = True
    begun = list[int]()
    request = writing([1, 2, 3], 20, output=Results(lambda _: begun.append(len(engine.fake.batches))))
    engine.run(request)
    assert results(request).ids == greedy_after([1, 2, 3], 20)
    assert len(engine.fake.batches) == 20
    assert begun == [i + ((2 + i) % PAGE_SIZE != 0 and i < 20) for i in range(1, 21)]


class OddError(BaseException):
    """An unexpected exception."""


@pytest.mark.parametrize("error", [ValueError("x"), OddError(), KeyboardInterrupt(), SystemExit(1)])
def test_an_error_of_a_callers_function_ends_its_request_alone(error: BaseException) -> None:
    def fail(ids: Any, logits: Any) -> Any:
        raise error

    engine = SteppedEngine(parallel=2)
    good, bad = writing([1, 2, 3], 6), writing([1, 2, 3], 6, sampling=Sampling(processors=(fail,)))
    engine.run(good, bad)
    assert results(bad).error is error
    assert bad.finish_reason is None
    assert results(good).ids == greedy_after([1, 2, 3], 6)
    engine.check_all_pages_are_back()


def test_a_failed_step_ends_the_requests_of_its_batch_and_leaves_the_rest_usable() -> None:
    engine = SteppedEngine(parallel=2)
    engine.run(writing(range(9), 1))
    failing = writing([*range(9), 5, 6], 4)

    def fail(batch: Batch) -> None:
        raise MemoryError("none left")

    engine.fake.before_step = fail
    engine.run(failing)
    assert isinstance(results(failing).error, MemoryError)
    engine.fake.before_step = lambda batch: None
    again = writing([*range(9), 5, 6], 4)
    engine.run(again)
    assert results(again).ids == greedy_after([*range(9), 5, 6], 4)
    assert again.n_cached == 9
    engine.check_all_pages_are_back()


def test_a_cancelled_request_ends_before_the_next_step() -> None:
    engine = SteppedEngine(parallel=2, max_tokens=8)
    writes, reads = writing([1, 2], 20), writing(range(30), 5)
    engine.submit(writes, reads)
    engine.step(2)
    n = len(engine.fake.batches)
    writes.is_cancelled = reads.is_cancelled = True
    assert not engine.step()
    assert len(engine.fake.batches) == n
    assert (writes.finish_reason, reads.finish_reason) == ("cancelled", "cancelled")
    engine.check_all_pages_are_back()


def test_a_request_that_waits_can_be_cancelled() -> None:
    engine = SteppedEngine(max_running=1)
    first, second = writing([1], 4), writing([2], 4)
    engine.submit(first, second)
    engine.step()
    second.is_cancelled = True
    engine.step()
    assert results(second).ended.is_set()
    engine.run()
    assert results(first).ids == greedy_after([1], 4)


def test_a_request_ends_at_its_deadline() -> None:
    engine = SteppedEngine()
    now = time.perf_counter()
    late = writing([1, 2], 50, timeout_s=5.0, submitted_at=now - 6)
    in_time = writing([3], 3, timeout_s=60.0)
    engine.run(late, in_time)
    assert (late.finish_reason, results(late).ids) == ("timeout", [])
    assert in_time.finish_reason == "length"


def test_a_step_has_at_least_one_row_of_logits() -> None:
    assert max_outputs(width=1 << 40, max_tokens=512) == 1
    assert max_outputs(width=1000, max_tokens=512) == 512
    assert max_outputs(width=128_256, max_tokens=512) * 128_256 * 4 <= 64 << 20


# The thread.


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine, _ = fake_engine(64, parallel=4, max_tokens=16)
    yield engine
    engine.close()


def test_many_threads_at_once(engine: Engine) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(8):
                prompt = rng.integers(0, 3, rng.integers(1, 30)).tolist()
                n = int(rng.integers(0, 30))
                request = writing(prompt, n)
                if rng.random() < 0.2:
                    engine.submit(request)
                    time.sleep(0.001)
                    engine.cancel(request)
                    assert results(request).ended.wait(60)
                    assert results(request).ids == greedy_after(prompt, 30)[: len(results(request).ids)]
                else:
                    assert finish(engine, request).ids == greedy_after(prompt, min(n, 65 - len(prompt)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


def test_requests_of_different_threads_share_batches() -> None:
    engine, ops = fake_engine(64, parallel=4, max_tokens=16)
    first = threading.Event()
    ops.before_step = lambda batch: first.wait(60)  # type: ignore[func-returns-value]
    requests = [writing([i], 10) for i in range(4)]
    for request in requests:
        engine.submit(request)
    first.set()
    for i, request in enumerate(requests):
        assert results(request).ended.wait(60)
        assert results(request).ids == greedy_after([i], 10)
    assert len(ops.batches) <= 11 + 10
    engine.close()


@pytest.mark.parametrize("ids", [[], [-1], [0, N_VOCAB], [1 << 40]])
def test_ids_outside_the_vocabulary_never_reach_the_backend(ids: list[int], engine: Engine) -> None:
    for request in (reading(ids), Request(list(ids), Results(), sampler=writing([1]).sampler)):
        with pytest.raises(UsageError):
            engine.submit(request)


def test_too_many_that_wait_are_refused() -> None:
    engine, ops = fake_engine(max_waiting=2, max_running=1)
    go_on = threading.Event()
    in_step = threading.Event()

    def hold(batch: Batch) -> None:
        in_step.set()
        go_on.wait(60)

    ops.before_step = hold
    running, *waiting = (writing([i], 3) for i in range(3))
    engine.submit(running)
    assert in_step.wait(60)
    for request in waiting:
        engine.submit(request)
    with pytest.raises(QueueFullError, match="2 requests are waiting for the model"):
        engine.submit(writing([9], 3))
    other = writing([9], 3, client="other")
    engine.submit(other)  # takes a share of the queue
    with pytest.raises(QueueFullError):
        engine.submit(writing([9], 3, client="other"))
    waiting.append(other)
    engine.cancel(waiting[0])
    go_on.set()
    for request in (running, *waiting):
        assert results(request).ended.wait(60)
    assert finish(engine, writing([9], 3)).ids == greedy_after([9], 3)
    assert not engine._waiting
    engine.close()


def test_closing_ends_requests_and_lets_the_memory_go() -> None:
    runner, ops = fake_runner(64, max_tokens=8)
    ended = threading.Event()
    engine = Engine(EngineLoop(runner, on_end=ended.set))
    failing = Sampling(processors=(lambda ids, logits: 1 / 0,))  # type: ignore[arg-type, return-value]
    kept = finish(engine, writing([1], 2, sampling=failing)).error
    stream = writing([1, 2], None, output=Results(lambda id_: time.sleep(0.002)))
    engine.submit(stream)
    engine.close()
    engine.close()
    assert isinstance(results(stream).error, ClosedError)
    assert ended.is_set()
    with pytest.raises(ClosedError):
        engine.submit(writing([1]))
    with pytest.raises(ClosedError):
        engine.forget()
    with pytest.raises(ClosedError):
        engine.with_cache(len)
    engine.cancel(stream)
    cache = weakref.ref(ops.cache)
    del runner, ops
    gc.collect()
    assert cache() is None
    assert isinstance(kept, ZeroDivisionError), "its traceback refers to the engine"


def test_a_request_during_closing_gets_an_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    request, ended = writing([1], 2), engine._ended.set

    def submit_and_end() -> None:
        engine.submit(request)
        ended()

    monkeypatch.setattr(engine._ended, "set", submit_and_end)
    engine._inbox.put(EngineLoop.close)
    assert results(request).ended.wait(60)
    assert isinstance(results(request).error, ClosedError)
    monkeypatch.undo()


def test_closing_from_the_engines_own_thread(engine: Engine) -> None:
    request = writing([1], 5, output=Results(lambda id_: engine.close()))
    out = finish(engine, request)
    assert isinstance(out.error, ClosedError)


def test_a_defect_of_the_loop_reaches_everybody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """No caller must wait forever for an ended thread."""

    class Broken(Results):
        def end(self, error: BaseException | None) -> None:
            super().end(error)
            if error is None:
                raise RuntimeError("a defect")

    broken, other = writing([1], 2, output=Broken()), writing([2], None, output=Results(lambda _: time.sleep(0.01)))
    engine.submit(other)
    engine.submit(broken)
    assert results(other).ended.wait(60)
    assert isinstance(results(other).error, RuntimeError)
    with pytest.raises(ClosedError):
        engine.submit(writing([1]))


def test_a_deadline_passes_while_nothing_runs(engine: Engine) -> None:
    out = Results()
    request = writing([1], None, output=out, timeout_s=0.05)
    out.is_full = True
    engine.submit(request)
    assert out.ended.wait(60)
    assert request.finish_reason == "timeout"


def test_a_deadline_later_than_the_clock_can_represent(engine: Engine) -> None:
    out = Results()
    out.is_full = True  # makes the engine sleep until the deadline
    request = writing([1], None, output=out, timeout_s=1e300)
    engine.submit(request)
    assert finish(engine, writing([2], 3)).ids == greedy_after([2], 3)
    engine.cancel(request)
    assert out.ended.wait(60)
    assert request.finish_reason == "cancelled"


def test_a_request_continues_when_its_reader_has_caught_up(engine: Engine) -> None:
    out = Results()
    request = writing([1], 6, output=out)
    out.is_full = True
    engine.submit(request)
    assert finish(engine, writing([2], 3)).ids == greedy_after([2], 3)
    assert not out.choices
    out.is_full = False
    engine.wake()
    assert out.ended.wait(60)
    assert out.ids == greedy_after([1], 6)


# Over real forward passes.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("engine") / "tiny.gguf")


MakeEngine = Callable[..., SteppedEngine]


@pytest.fixture(params=DEVICES)
def real_engine(request: pytest.FixtureRequest, tiny: Path) -> Iterator[MakeEngine]:
    """Return a function that creates engines of a tiny random model on a device."""
    devices: list[Device] = []

    def make(*, max_tokens: int = 512, parallel: int = 4) -> SteppedEngine:
        [device] = open_devices(request.param, threads=2)
        devices.append(device)
        n_tokens = min(max_tokens, 96)
        with GGUFFile.open(tiny) as file:
            graph = read_model(file, 96).graph
            n_pages = n_cache_pages(graph, 96, parallel, device.backend.page_size)
            sizes = {"n_pages": n_pages, "max_tokens": n_tokens, "max_outputs": max_outputs(300, n_tokens)}
            step = device.backend.compile(graph, **sizes)
        return SteppedEngine(runner=ModelRunner(step, n_vocab=300, context=96, max_tokens=max_tokens))

    yield make
    for device in devices:
        device.close()


def logits(engine: SteppedEngine, ids: list[int], first: int = 0) -> np.ndarray:
    request = reading(ids, first)
    engine.run(request)
    return np.array(results(request).rows)


def close_to(a: np.ndarray, b: np.ndarray) -> bool:
    """The largest difference is below 1e-4 of the largest logit."""
    return float(np.abs(a - b).max()) < 1e-4 * float(np.abs(b).max())


def test_chunks_do_not_matter(real_engine: MakeEngine) -> None:
    ids = np.random.default_rng(2).integers(0, 300, 90).tolist()
    assert close_to(logits(real_engine(max_tokens=7), ids), logits(real_engine(), ids))


def test_a_token_has_the_same_bits_in_any_company(real_engine: MakeEngine) -> None:
    rng = np.random.default_rng(3)
    engine, other = real_engine(), real_engine()
    texts = [rng.integers(0, 300, n).tolist() for n in (1, 17, 40, 16)]
    requests = [reading(text) for text in texts]
    engine.run(*requests)
    for request, text in zip(requests, texts, strict=True):
        other.loop.forget()
        assert np.array_equal(results(request).rows, logits(other, text))


def test_a_shared_prefix_equals_a_new_evaluation(real_engine: MakeEngine) -> None:
    engine, other = real_engine(), real_engine()
    rng = np.random.default_rng(4)
    trunk = rng.integers(0, 300, 37).tolist()
    logits(engine, trunk)
    for n in (37, 36, 32, 20, 1):
        branch = trunk[:n] + rng.integers(0, 300, 9).tolist()
        request = reading(branch, len(branch) - 1)
        engine.run(request)
        assert request.n_cached == n
        assert close_to(results(request).rows[0], logits(other, branch)[-1])


def test_preempted_requests_give_the_same_tokens(real_engine: MakeEngine) -> None:
    narrow, wide = real_engine(parallel=1), real_engine()
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 300, 50).tolist() for _ in range(3)]
    texts = []
    for engine in (narrow, wide):
        requests = [writing(prompt, 40, n_vocab=300) for prompt in prompts]
        engine.run(*requests)
        texts.append([results(request).ids for request in requests])
    assert texts[0] == texts[1]
