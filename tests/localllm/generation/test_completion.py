"""Streams read by threads and by tasks, with a fake engine that tests can pause."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from localllm.engine.request import Request
from localllm.errors import ClosedError, UsageError
from localllm.generation.completion import MAX_UNREAD, Chunk, Stream, TextOutput
from localllm.kernels.backend import Batch
from localllm.sampling import LogitsProcessor, Sampling
from tests.helpers.engines import eventually, n_requests
from tests.helpers.fake_backend import fake_engine, greedy_after
from tests.helpers.requests import writing

CONTEXT = 400


class Numbers:
    """A decoder that turns ids into numbers, and ends the text after a given id."""

    def __init__(self, stop: int | None = None) -> None:
        self.stopped: str | None = None
        self._stop = stop

    def feed(self, id_: int) -> str:
        if id_ == self._stop:
            self.stopped = str(id_)
        return f"{id_} "

    def finish(self) -> str:
        return "."


class Models:
    def __init__(self) -> None:
        self.engine, self.step = fake_engine(CONTEXT, parallel=4, max_tokens=16)

    def stream(
        self,
        prompt: list[int],
        n: int | None = None,
        *,
        progress: Any = None,
        stop: int | None = None,
        **options: Any,
    ) -> Stream:
        def make_request(output: TextOutput) -> Request:
            return writing(prompt, n, output=output, **options)  # type: ignore[arg-type]

        decoder: Any = Numbers(stop)
        return Stream(self.engine, decoder, make_request, logprobs=False, progress=progress)

    def hold(self, n_batches: int = 0) -> threading.Event:
        """Pause the engine before the step after the next ``n_batches``, until the returned event is set."""
        go_on, n_before = threading.Event(), len(self.step.batches)

        def wait(batch: Batch) -> None:
            if len(self.step.batches) - n_before > n_batches:
                go_on.wait(60)

        self.step.before_step = wait
        return go_on


@pytest.fixture
def models() -> Iterator[Models]:
    models = Models()
    yield models
    models.step.before_step = lambda batch: None
    models.engine.close()


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [id_ for chunk in chunks for id_ in chunk.ids]


def text_of(ids: list[int]) -> str:
    return "".join(f"{id_} " for id_ in ids) + "."


# Reading.


def test_a_chunk_for_each_token_and_a_last_one(models: Models) -> None:
    expected = greedy_after([1, 2], 20)
    chunks = list(models.stream([1, 2], 20))
    assert [chunk.ids for chunk in chunks] == [*((id_,) for id_ in expected), ()]
    assert "".join(map(str, chunks)) == text_of(expected)
    assert [chunk.finish_reason for chunk in chunks] == [None] * 20 + ["length"]
    assert all(chunk.usage is chunk.timings is None for chunk in chunks[:-1])
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    completion = models.stream([1, 2], 20).read()
    assert (list(completion.ids), completion.text) == (expected, text_of(expected))
    assert completion.finish_reason == "length"


def test_read_continues_after_iteration(models: Models) -> None:
    stream = models.stream([1, 2], 20)
    first = [next(stream) for _ in range(5)]
    rest = stream.read()
    assert ids_of(first) + list(rest.ids) == greedy_after([1, 2], 20)
    assert list(stream) == []
    assert stream.finish_reason == "length"


def test_a_stop_string_is_the_reason_even_at_the_last_token(models: Models) -> None:
    ids = greedy_after([1, 2], 5)
    for n in (5, 9):
        completion = models.stream([1, 2], n, stop=ids[4]).read()
        assert (completion.finish_reason, list(completion.ids)) == ("stop", ids)


def test_a_request_runs_ahead_of_its_reader_only_so_far(models: Models) -> None:
    stream = models.stream([1], None)
    request = stream._request
    assert eventually(lambda: n_requests(models.engine) and request.n_generated >= MAX_UNREAD)
    assert models.stream([2], 100).read().ids == tuple(greedy_after([2], 100)), "it does not delay other requests"
    assert MAX_UNREAD <= request.n_generated <= MAX_UNREAD + 100
    n_before = request.n_generated
    assert [next(stream).ids[0] for _ in range(150)] == greedy_after([1], 150)
    assert request.n_generated > n_before, "and continues when its reader does"
    assert stream.usage.completion_tokens >= 150


def test_a_request_that_pauses_while_a_chunk_is_read_continues(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = models.hold(n_batches=3)

    def read(output: TextOutput, n: int) -> None:
        if n == 1:  # the engine pauses ahead before the chunk counts as read
            go_on.set()
            assert eventually(lambda: output.is_full)
            time.sleep(0.02)
        vars(output)["n_read"] = n

    # Exactly full.
    monkeypatch.setattr("localllm.generation.completion.DELIVERY_S", 0.0)
    monkeypatch.setattr(TextOutput, "n_read", property(lambda output: vars(output)["n_read"], read), raising=False)
    stream = models.stream([1], 2 * MAX_UNREAD)
    reader = threading.Thread(target=lambda: list(stream), daemon=True)
    reader.start()
    reader.join(60)
    assert stream.finish_reason == "length"


def test_progress_is_called_in_the_readers_thread(models: Models) -> None:
    calls: list[tuple[int, int, threading.Thread]] = []
    stream = models.stream(
        [1] * 40, 2, progress=lambda n, total: calls.append((n, total, threading.current_thread()))
    )
    stream.read()
    assert [(n, total) for n, total, _ in calls] == [(0, 40), (16, 40), (32, 40), (40, 40)]
    assert {thread for _, _, thread in calls} == {threading.current_thread()}


# Ending early.


def test_cancelling_is_reported_in_the_last_chunk(models: Models) -> None:
    go_on = models.hold(n_batches=5)
    stream = models.stream([1, 2])
    next(stream)
    thread = threading.Thread(target=stream.cancel)
    thread.start()
    thread.join()
    go_on.set()
    *written, last = stream
    assert (last.finish_reason, last.ids, last.text) == ("cancelled", (), ".")
    assert last.usage is not None
    assert last.usage.completion_tokens == 1 + len(written), "earlier tokens are still delivered"
    assert [*stream] == []
    assert n_requests(models.engine) == 0


def test_cancelling_a_prompt_stops_between_its_chunks(models: Models) -> None:
    done: list[int] = []

    def progress(n: int, total: int) -> None:
        done.append(n)
        if n == 16:
            stream.cancel()
            go_on.set()

    go_on = models.hold(n_batches=1)
    stream = models.stream([5] * 100, progress=progress)
    (last,) = stream
    assert (last.finish_reason, last.text) == ("cancelled", ".")
    assert done == [0, 16, 32]
    assert models.stream([5] * 50, 1).read().usage.cached_tokens == 32


def close(stream: Stream) -> None:
    stream.close()
    assert stream.finish_reason == "cancelled"
    assert list(stream) == []


def leave(stream: Stream) -> None:
    with pytest.raises(ZeroDivisionError), stream:
        raise ZeroDivisionError


@pytest.mark.parametrize("end", [close, leave, lambda stream: None])
def test_closing_or_dropping_a_stream_frees_its_place(models: Models, end: Callable[[Stream], object]) -> None:
    stream = models.stream([1] * 30)
    first = [next(stream) for _ in range(5)]
    end(stream)
    assert stream.usage.completion_tokens >= 5
    del stream
    gc.collect()
    assert eventually(lambda: n_requests(models.engine) == 0)
    again = models.stream([*[1] * 30, *ids_of(first), 9], 1).read()
    assert again.usage.cached_tokens == 35, "evaluated tokens stay cached"


def test_closing_from_another_thread_ends_a_read(models: Models) -> None:
    """A concurrent reader must not wait forever."""
    go_on = models.hold(n_batches=3)
    stream = models.stream([1])
    written: list[Chunk] = []
    reader = threading.Thread(target=lambda: written.extend(stream))
    reader.start()
    assert eventually(lambda: written)
    stream.close()
    go_on.set()
    reader.join(60)
    assert not reader.is_alive()
    assert ids_of(written) == greedy_after([1], len(ids_of(written)))


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_of_progress_is_raised_and_ends_the_request(models: Models, error: BaseException) -> None:
    def fail(n: int, total: int) -> None:
        raise error

    stream = models.stream([1] * 50, progress=fail)
    with pytest.raises(type(error)) as caught:
        next(stream)
    assert caught.value is error
    assert stream.finish_reason is None
    assert list(stream) == []
    assert eventually(lambda: n_requests(models.engine) == 0)


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
def test_a_stop_iteration_of_a_callers_function_is_no_end(models: Models, kind: type[Exception]) -> None:
    def fail(*_: Any) -> Any:
        raise kind

    for options in ({"progress": fail}, {"sampling": Sampling(processors=(fail,))}):
        with pytest.raises(RuntimeError, match=kind.__name__) as caught:
            models.stream([1], 5, **options).read()
        assert isinstance(caught.value.__cause__, kind)


# Several readers.


def test_two_threads_on_one_stream(models: Models) -> None:
    go_on = models.hold()
    stream = models.stream([1], 5)
    written: list[Chunk] = []
    reader = threading.Thread(target=lambda: written.extend(stream))
    reader.start()
    assert eventually(stream._read_lock.locked)
    with pytest.raises(UsageError, match="already being read"):
        next(stream)
    go_on.set()
    reader.join(60)
    assert ids_of(written) == greedy_after([1], 5), "the first reader gets everything"


def processing(models: Models, work: Callable[[], object]) -> Stream:
    def process(ids: Any, logits: Any) -> Any:
        work()
        return logits

    processor: LogitsProcessor = process
    return models.stream([1], 5, sampling=Sampling(temperature=0, processors=(processor,)))


def test_a_processor_cannot_wait_for_its_own_model(models: Models) -> None:
    stream = processing(models, lambda: models.stream([2], 3).read())
    with pytest.raises(UsageError, match="call the model from another thread"):
        stream.read()
    assert eventually(lambda: n_requests(models.engine) == 0)
    other = Models()
    stream = processing(models, lambda: other.stream([2], 3).read())
    assert stream.read().ids == tuple(greedy_after([1], 5)), "another model can be called"
    other.engine.close()


def test_a_processor_cannot_read_its_own_stream(models: Models) -> None:
    go_on = models.hold()
    stream = processing(models, lambda: stream.read())
    caught: list[BaseException] = []

    def read() -> None:
        try:
            stream.read()
        except UsageError as error:
            caught.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert eventually(stream._read_lock.locked)
    go_on.set()
    reader.join(60)
    assert "cannot wait for the same model" in str(caught[0])


def test_closing_the_engine_ends_a_read(models: Models) -> None:
    stream = models.stream([1])
    next(stream)
    models.engine.close()
    with pytest.raises(ClosedError):
        list(stream)
    assert list(stream) == []


# Tasks.


def test_tasks_and_threads_read_the_same(models: Models) -> None:
    async def main() -> None:
        expected = greedy_after([1, 2], 20)
        chunks = [chunk async for chunk in models.stream([1, 2], 20)]
        assert ids_of(chunks) == expected
        assert chunks[-1].finish_reason == "length"
        completion = await models.stream([1, 2], 20).aread()
        assert (list(completion.ids), completion.text) == (expected, text_of(expected))
        texts = await asyncio.gather(*(models.stream([i], 30).aread() for i in range(20)))
        assert [list(text.ids) for text in texts] == [greedy_after([i], 30) for i in range(20)]

    asyncio.run(main())


def test_a_task_that_stops_reading_does_not_delay_others(models: Models) -> None:
    async def main() -> None:
        slow = models.stream([1])
        assert (await anext(slow)).ids == (greedy_after([1], 1)[0],)
        assert list((await models.stream([2], 100).aread()).ids) == greedy_after([2], 100)
        rest = [(await anext(slow)).ids[0] for _ in range(150)]
        assert rest == greedy_after([1], 151)[1:]
        await slow.aclose()
        assert [chunk async for chunk in slow] == []

    asyncio.run(main())
    assert eventually(lambda: n_requests(models.engine) == 0)


def test_other_tasks_continue_while_one_waits(models: Models) -> None:
    go_on = models.hold()

    async def main() -> None:
        waits = asyncio.create_task(models.stream([1], 3).aread())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not waits.done()
        go_on.set()
        assert list((await waits).ids) == greedy_after([1], 3)

    asyncio.run(main())


async def read_slowly(stream: Stream) -> None:
    async with stream:
        async for _ in stream:
            await asyncio.sleep(0.002)


def test_a_task_that_is_cancelled_stops_the_work(models: Models) -> None:
    goes_on = threading.Event()
    models.step.before_step = lambda batch: goes_on.wait(60) and None

    async def main() -> None:
        task = asyncio.create_task(models.stream([1]).aread())
        while not models.step.batches:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        goes_on.set()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read_slowly(models.stream([2])), 0.01)

    asyncio.run(main())
    assert eventually(lambda: n_requests(models.engine) == 0)


def test_cancelling_a_stream_of_a_task_is_reported(models: Models) -> None:
    async def main() -> None:
        stream = models.stream([1])
        first = await anext(stream)
        stream.cancel()
        *rest, last = [chunk async for chunk in stream]
        assert last.finish_reason == stream.finish_reason == "cancelled"
        assert ids_of([first, *rest]) == greedy_after([1], 1 + len(rest))

    asyncio.run(main())


def test_a_closed_event_loop_does_not_affect_other_requests(models: Models) -> None:
    kept: list[Stream] = []

    async def main() -> None:
        kept.append(models.stream([1] * 50, 100))
        kept[0].deliver_at_end()

    go_on = models.hold()
    asyncio.run(main())
    go_on.set()
    assert eventually(lambda: n_requests(models.engine) == 0)
    assert models.stream([2], 5).read().ids == tuple(greedy_after([2], 5))


def test_errors_reach_a_task(models: Models) -> None:
    def fail(*_: Any) -> Any:
        raise StopAsyncIteration

    async def main() -> None:
        for options in ({"progress": fail}, {"sampling": Sampling(processors=(fail,))}):
            with pytest.raises(RuntimeError, match="StopAsyncIteration"):
                await models.stream([1], 5, **options).aread()
        two = models.stream([1])
        with pytest.raises(UsageError, match="already being read"):
            await asyncio.gather(two.aread(), two.aread())
        stream = models.stream([1])
        await anext(stream)
        closing = asyncio.to_thread(models.engine.close)
        with pytest.raises(ClosedError):
            await asyncio.gather(stream.aread(), closing)

    asyncio.run(main())


def test_a_processor_cannot_wait_for_its_own_model_in_a_loop_of_its_own(models: Models) -> None:
    async def ask() -> None:
        await models.stream([2], 3).aread()

    stream = processing(models, lambda: asyncio.run(ask()))
    with pytest.raises(UsageError, match="call the model from another thread"):
        stream.read()


def test_a_stream_is_read_in_any_loop_and_thread(models: Models) -> None:
    async def read(stream: Stream, n: int) -> list[int]:
        return ids_of([await anext(stream) for _ in range(n)])

    async def begin() -> Stream:
        return models.stream([1], 100)

    stream = asyncio.run(begin())
    ids = asyncio.run(read(stream, 30)) + ids_of([next(stream) for _ in range(30)]) + asyncio.run(read(stream, 30))
    assert ids + list(asyncio.run(stream.aread()).ids) == greedy_after([1], 100)


def test_a_request_that_is_refused_leaves_nothing(models: Models) -> None:
    with pytest.raises(UsageError):
        models.stream([10**6])
    gc.collect()
    assert n_requests(models.engine) == 0
    assert not models.step.batches
