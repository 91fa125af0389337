"""An artificial model with every kind of layer: preemption, wrong drafts and divided steps keep its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from localllm.engine import cache as cache_module, runner as runner_module
from localllm.engine.runner import ModelRunner, max_outputs, n_cache_pages, n_states
from localllm.loading.devices import Device, open_devices
from tests.helpers.hybrid import N_VOCAB, hybrid
from tests.helpers.requests import FakeDrafter, SteppedEngine, results, writing
from tests.helpers.run_model import make_batch

CONTEXT, PARALLEL = 512, 2
#: Tokens between two snapshots of a prompt, and per step, in these tests.
INTERVAL, MAX_TOKENS = 64, 96
#: Bytes for windows and states above the minimum: enough for some, but not for all.
KEPT_BYTES = 48 << 10


@pytest.fixture(params=["reference", "cpu"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    [device] = open_devices(request.param, threads=2)
    yield device
    device.close()


@pytest.fixture(autouse=True)
def _frequent_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "SNAPSHOT_TOKENS", INTERVAL)
    monkeypatch.setattr(runner_module, "KEPT_BYTES", KEPT_BYTES)


def new_engine(device: Device) -> SteppedEngine:
    """Return an engine with a plan's pages and states."""
    graph, backend = hybrid(), device.backend
    sizes = {
        "n_pages": n_cache_pages(graph, CONTEXT, PARALLEL, backend.page_size, MAX_TOKENS),
        "n_states": n_states(graph, CONTEXT, PARALLEL),
        "max_tokens": MAX_TOKENS,
        "max_outputs": max_outputs(N_VOCAB, MAX_TOKENS),
    }
    planned, step = backend.footprint(graph, **sizes), backend.compile(graph, **sizes)
    assert (step.cache.n_pages, step.cache.n_states) == (sizes["n_pages"], sizes["n_states"])
    assert step.cache.n_pages[1] < step.cache.n_pages[0]
    assert step.cache.n_bytes == sum(planned.caches.values())
    assert step.weights == planned.weights
    runner = ModelRunner(step, n_vocab=N_VOCAB, context=CONTEXT, max_tokens=MAX_TOKENS)
    return SteppedEngine(runner=runner)


def mostly_right(ids: list[int]) -> FakeDrafter:
    """Draft the next tokens, every third of them wrong."""
    wrong = [(id_ + (i % 3 == 2)) % N_VOCAB for i, id_ in enumerate(ids)]
    return FakeDrafter(lambda tokens, most: wrong[len(tokens) :][: min(most, 5)])


def test_side_by_side_preempted_and_with_wrong_drafts(device: Device) -> None:
    """More sequences than pages: the same tokens as for each alone."""
    engine, alone = new_engine(device), new_engine(device)
    rng = np.random.default_rng(1)
    common, requests, expected, n_preempted = rng.integers(0, N_VOCAB, 100).tolist(), [], [], 0
    for n in (100, 70, 20, 0):
        prompt = common[:n] + rng.integers(0, N_VOCAB, 120 - n).tolist()
        alone.loop.forget()
        alone.run(request := writing(prompt, 210, n_vocab=N_VOCAB))
        expected.append(results(request).ids)
        requests.append(writing(prompt, 210, n_vocab=N_VOCAB))
        requests[-1].drafter = mostly_right(request.tokens)
    engine.submit(*requests)
    running: set[object] = set()
    while engine.step():
        still = {*engine.scheduler.running, *(r for r in requests if results(r).ended.is_set())}
        n_preempted += len(running - still)
        running = set(engine.scheduler.running)
    assert n_preempted, "no request was preempted"
    assert [results(request).ids for request in requests] == expected
    assert all(0 < request.n_accepted < request.n_drafted for request in requests)
    engine.check_all_pages_are_back()


def test_a_step_in_pieces_is_the_step(device: Device) -> None:
    """The result is bit-identical, with other steps between the pieces."""
    graph, sizes = hybrid(sees=True), {"max_tokens": 60, "max_outputs": 60}
    first, other = (device.backend.compile(graph, n_pages=(4, 4), **sizes) for _ in range(2))
    ids = np.random.default_rng(0).integers(0, N_VOCAB, 60).tolist()
    batch = make_batch([(ids, 0, [0, 1, 2, 3])])
    batch = replace(batch, block_tables=np.repeat(batch.block_tables, 2, axis=0))
    expected, pieces = first(batch).copy(), first.run_in_pieces(batch, 0.0)
    n_pieces = 0
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            np.testing.assert_array_equal(end.value.rows(), expected)
            break
        n_pieces += 1
        other(batch)
    assert n_pieces > (20 if device.name == "cpu" else 0)
