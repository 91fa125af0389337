"""A made-up model with layers of every kind chats as if it had no cache, and evaluates little again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from localllm.devices import Device, open_devices
from localllm.engine import cache as cache_module
from localllm.engine.cache import common_prefix
from localllm.engine.runner import ModelRunner, max_outputs
from localllm.kernels.backend import Step
from tests.helpers.hybrid import N_VOCAB, hybrid
from tests.helpers.requests import SteppedEngine, reading, results, writing

CONTEXT, N_STATES, PARALLEL = 512, 16, 2
#: Tokens from one snapshot of a prompt to the next, in these tests.
INTERVAL = 64


@pytest.fixture(params=["reference", "cpu"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    [device] = open_devices(request.param, threads=2)
    yield device
    device.close()


@pytest.fixture(autouse=True)
def _frequent_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "SNAPSHOT_TOKENS", INTERVAL)


class Counted:
    """A step that counts tokens."""

    def __init__(self, step: Step) -> None:
        self.n_evaluated, self._step = 0, step

    def __getattr__(self, name: str) -> object:
        return getattr(self._step, name)

    def __call__(self, batch: object) -> object:
        self.n_evaluated += len(batch.ids)
        return self._step(batch)


def new_engine(device: Device, n_tokens: int = 96) -> tuple[SteppedEngine, Counted]:
    graph, n = hybrid(), PARALLEL * CONTEXT // device.backend.page_size
    n_windowed = min(n, 384 // device.backend.page_size)
    step = device.backend.compile(
        graph,
        n_pages=(n, n_windowed),
        n_states=N_STATES,
        max_tokens=n_tokens,
        max_outputs=max_outputs(N_VOCAB, n_tokens),
    )
    counted = Counted(step)
    runner = ModelRunner(counted, n_vocab=N_VOCAB, context=CONTEXT, max_tokens=n_tokens)
    return SteppedEngine(runner=runner), counted


def test_ten_turns_with_edits(device: Device) -> None:
    (engine, step), (fresh, _) = new_engine(device), new_engine(device)
    rng = np.random.default_rng(0)
    chat: list[int] = rng.integers(0, N_VOCAB, 90).tolist()
    held: list[int] = []
    for turn in range(10):
        if turn in (3, 6):  # a template writes the reply before in another way
            chat = [*chat[:-10], 1, 2]
        if turn == 8:  # a message is edited
            chat = [*chat[:-60], 3]
        chat += rng.integers(0, N_VOCAB, 11).tolist()
        before, n_shared = step.n_evaluated, common_prefix(chat, held)
        cached, plain = writing(chat, 15, n_vocab=N_VOCAB), writing(chat, 15, n_vocab=N_VOCAB)
        engine.run(cached)
        fresh.loop.forget()
        fresh.run(plain)
        assert results(cached).error is None
        assert results(cached).ids == results(plain).ids
        held = chat = cached.tokens
        assert step.n_evaluated - before <= len(chat) - n_shared + (INTERVAL if turn else 0), turn
    rows = [reading(chat, len(chat) - 1) for _ in range(2)]
    engine.run(rows[0])
    fresh.loop.forget()
    fresh.run(rows[1])
    assert rows[0].n_cached > len(chat) - INTERVAL
    one, other = (results(request).rows[0] for request in rows)
    np.testing.assert_allclose(one, other, atol=1e-4 * np.abs(other).max())
    engine.check_all_pages_are_back()
