"""Models in forked children: the parent's models are rejected at once, and a child can load its own."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest

import localllm
from localllm.errors import DeviceError
from localllm.kernels.backend import Batch
from tests.helpers.fake_backend import fake_engine, greedy_after
from tests.helpers.fork import in_forked_child, needs_fork
from tests.helpers.requests import results, writing

pytestmark = needs_fork

PROMPT, OPTIONS = "Once upon a time", {"max_tokens": 8, "temperature": 0}


def test_an_engine_of_the_parent_is_refused_while_a_step_runs() -> None:
    engine, ops = fake_engine()
    in_step, go_on = threading.Event(), threading.Event()

    def hold(batch: Batch) -> None:
        in_step.set()
        go_on.wait(60)

    ops.before_step = hold
    request = writing([1, 2, 3], 4)
    engine.submit(request)
    assert in_step.wait(60)

    def child() -> None:
        for call in (lambda: engine.submit(writing([1])), engine.forget, lambda: engine.wait_for(SimpleQueue())):
            with pytest.raises(DeviceError, match=r"load the model after the fork, or .*'spawn'"):
                call()
        engine.cancel(request)
        engine.close()
        engine.close()

    try:
        in_forked_child(child, 20)
    finally:
        go_on.set()
    assert results(request).ended.wait(60)
    assert results(request).ids == greedy_after([1, 2, 3], 4)
    engine.close()


def test_a_stream_of_the_parent_is_refused_in_the_child() -> None:
    """No further output comes; earlier output remains readable, and dropping the stream is harmless."""
    with localllm.load(device="reference", context=256) as llm:
        stream = llm.stream(PROMPT, ignore_eos=True)
        next(stream)

        def child() -> None:
            with pytest.raises(DeviceError, match="load the model after the fork"):
                list(stream)
            stream.close()
            llm.close()

        in_forked_child(child)
        assert next(stream).ids


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_child_forked_while_a_thread_generates(device: str) -> None:
    with localllm.load(device=device, context=256, threads=2) as llm:
        expected = llm.generate(PROMPT, **OPTIONS).text
        generating, stop = threading.Event(), threading.Event()

        def generate() -> None:
            while not stop.is_set():
                for _ in llm.stream(PROMPT, max_tokens=200, ignore_eos=True):
                    generating.set()
                    if stop.is_set():
                        break

        busy = threading.Thread(target=generate)
        busy.start()
        assert generating.wait(60)

        def many() -> None:
            next(llm.generate_many([PROMPT]))

        def child() -> None:
            for call in (lambda: llm.generate(PROMPT, **OPTIONS), lambda: llm.logits([1]), llm.forget, many):
                with pytest.raises(DeviceError, match="load the model after the fork"):
                    call()
            llm.close()
            with localllm.load(device=device, context=256, threads=2) as own:
                assert own.generate(PROMPT, **OPTIONS).text == expected

        try:
            in_forked_child(child)
        finally:
            stop.set()
            busy.join()
        assert llm.generate(PROMPT, **OPTIONS).text == expected
