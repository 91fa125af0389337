"""A made-up model with layers of every kind chats as if it had no cache, and evaluates little again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from localllm.devices import Device, open_devices
from localllm.engine import cache as cache_module
from localllm.engine.cache import common_prefix
from localllm.engine.runner import ModelRunner, max_outputs
from localllm.kernels import graph as g
from localllm.kernels.backend import Step
from localllm.kernels.graph import Graph, Matrix, Rope, Tensor
from tests.helpers.requests import SteppedEngine, reading, results, writing
from tests.helpers.weights import f32, random

N_VOCAB, D, HEAD, WINDOW = 50, 64, 16, 24
CONTEXT, N_STATES, PARALLEL = 512, 16, 2
#: Tokens from one snapshot of a prompt to the next, in these tests.
INTERVAL = 64

ROPE = Rope(np.float32(1) / 1000 ** np.arange(0, 1, 0.25, np.float32), interleaved=True)


def matrix(n_out: int, n_in: int, seed: int) -> Matrix:
    return Matrix(f32(random(n_out, n_in, seed=seed) / np.sqrt(n_in)))


def attention(graph: Graph, x: Tensor, seed: int, *, window: int | None = None, shared: int | None = None) -> Tensor:
    cache = graph.caches[shared] if shared is not None else graph.kv_cache(2, HEAD, window=window)
    q = graph.add(g.Linear(x, matrix(4 * HEAD, D, seed)))
    k, v = (
        (None, None)
        if shared is not None
        else graph.add(g.Linears(x, (matrix(2 * HEAD, D, seed + 1), matrix(2 * HEAD, D, seed + 2))))
    )
    q = graph.add(g.RopeAppend(q, k, v, cache, ROPE))
    return graph.add(g.Attention(q, cache, HEAD**-0.5, window))


def latent_attention(graph: Graph, x: Tensor, seed: int) -> Tensor:
    cache = graph.kv_cache(1, 3 * HEAD, 2 * HEAD, values_in_keys=True)
    q, k = graph.add(g.Linears(x, (matrix(2 * 3 * HEAD, D, seed), matrix(3 * HEAD, D, seed + 1))))
    q = graph.add(g.RopeAppend(q, k, None, cache, ROPE))
    return graph.add(g.Attention(q, cache, (3 * HEAD) ** -0.5))


def delta_net(graph: Graph, x: Tensor, seed: int) -> Tensor:
    width, n = 4 * 2 * HEAD, 4
    qkv, decay, beta = graph.add(
        g.Linears(x, (matrix(width, D, seed), matrix(n, D, seed + 1), matrix(n, D, seed + 2)))
    )
    conv = f32(random(width, 4, seed=seed + 3) / 2)
    qkv = graph.add(g.CausalConv(qkv, conv, graph.state("conv", 3, width), silu=True))
    a, bias = f32(-np.abs(random(n, seed=seed))), f32(random(n, seed=seed + 1))
    return graph.add(g.GatedDelta((qkv,), decay, beta, a, bias, graph.state("S", n, HEAD, HEAD), n_key_heads=2))


def scan(graph: Graph, x: Tensor, seed: int) -> Tensor:
    n = 4
    xbc, dt = graph.add(g.Linears(x, (matrix((n + 2) * HEAD, D, seed), matrix(n, D, seed + 1))))
    a, bias, d = f32(-np.abs(random(n, seed=seed))), f32(random(n, seed=seed + 1)), f32(random(n, seed=seed + 2))
    return graph.add(g.Scan((xbc,), dt, a, bias, d, graph.state("S", n, HEAD, HEAD), n_groups=1))


LAYERS: list[Callable[[Graph, Tensor, int], Tensor]] = [
    attention,
    delta_net,
    lambda graph, x, seed: attention(graph, x, seed, window=WINDOW),
    latent_attention,
    scan,
    lambda graph, x, seed: attention(graph, x, seed, shared=0),
]


def hybrid() -> Graph:
    graph, ones = Graph(), f32(np.ones(D))
    x = graph.add(g.Embed(f32(random(N_VOCAB, D))))
    for graph.layer, layer in enumerate(LAYERS):
        y = layer(graph, graph.add(g.RMSNorm(x, ones, 1e-6)), 10 * graph.layer)
        x = graph.add(g.Linear(y, matrix(D, y.width, 7), residual=x))
    graph.layer = "output"
    x = graph.add(g.RMSNorm(graph.add(g.Outputs(x)), ones, 1e-6))
    graph.add(g.Linear(x, matrix(N_VOCAB, D, 8)))
    return graph


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
