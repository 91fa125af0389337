"""Models split over several backends, compared with the same model on one backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from localllm.errors import KernelError
from localllm.gguf import GGUFFile
from localllm.kernels.backend import Batch, HostOutput
from localllm.kernels.graph import Graph, Matrix, Rows, Tensor
from localllm.kernels.operations import Embed, Input, Linear, Outputs
from localllm.kernels.reference import ReferenceBackend
from localllm.kernels.split import _in_smaller_pages, graph_part, micro_batches
from localllm.models.registry import read_model
from localllm.quant.types import GGMLType
from tests.helpers import tiny_models
from tests.helpers.asynchronous import AsynchronousBackend
from tests.helpers.backends import shared_by_threads
from tests.helpers.fake_backend import FakeCache
from tests.helpers.recorder import CPUOps, ReferenceOps, SplitOps, compile_split
from tests.helpers.run_model import Runner, make_batch
from tests.helpers.weights import f32

T = GGMLType

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "type": T.Q8_0},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True, "type": T.Q4_0},
    "qwen3": {"model_type": "qwen3", "type": T.F32},
    "qwen3moe": {"model_type": "qwen3_moe", "type": T.F32},
}

#: Numbers of layers per backend, for models of three layers.
SPLITS = ((3,), (1, 2), (2, 1), (1, 1, 1))

#: Tokens of a micro-batch.  It cuts two of the prompts below, in the middle of a page.
MICRO_BATCH = 24

IDS = [int(i) for i in np.random.default_rng(1).integers(0, 300, 120)]


@cache
def cpu_ops() -> CPUOps:
    return shared_by_threads(CPUOps(threads=2))


@pytest.fixture(params=["llama"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The first of the models, or a model that a test requests."""
    return tiny_models.tiny_gguf(tmp_path / "model.gguf", max_position_embeddings=256, **MODELS[request.param])


every_model = pytest.mark.parametrize("path", MODELS, indirect=True)


def split(makers: Sequence[Callable[[], Any]], layers: Sequence[int]) -> SplitOps:
    parts = [(makers[i % len(makers)](), n) for i, n in enumerate(layers)]
    return SplitOps(parts, micro_batch=MICRO_BATCH)


def conversation(runner: Runner) -> list[np.ndarray]:
    """Return logits of prefills of several sequences, of single tokens, and of rows in any order.

    Pages hold at least 16 tokens and are in random order.
    """
    a, b = [5, 0, 9, 2, 7, 4, 11, 12], [3, 8, 1, 6, 10, 13, 14, 15]
    return [
        runner.run((IDS[:70], 0, a), outputs=[69]),
        runner.run((IDS[70:100], 70, a), (IDS[20:67], 0, b)),
        runner.run((IDS[67:90], 47, b), outputs=[]),
        runner.run((IDS[100:101], 100, a), (IDS[90:91], 70, b)),
        runner.run((IDS[91:110], 71, b), (IDS[101:120], 101, a), outputs=[37, 0, 18, 0, 19]),
    ]


def assert_same(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("path", "layers"),
    [*(("llama", layers) for layers in SPLITS), *((name, (1, 1, 1)) for name in MODELS if name != "llama")],
    indirect=["path"],
    ids=str,
)
@pytest.mark.parametrize("make", [ReferenceOps, cpu_ops], ids=["reference", "cpu"])
def test_a_split_model_has_the_same_bits(make: Callable[[], Any], layers: Sequence[int], path: Path) -> None:
    expected = conversation(Runner(path, make()))
    assert_same(conversation(Runner(path, split([make], layers))), expected)


@every_model
@pytest.mark.parametrize("makers", [(cpu_ops, ReferenceOps), (ReferenceOps, cpu_ops)], ids=["to", "from"])
def test_cpu_and_reference_together(makers: Sequence[Callable[[], Any]], path: Path) -> None:
    """The result is near the results of both backends, which round activations differently."""
    expected, runner = conversation(Runner(path, ReferenceOps())), Runner(path, split(makers, (1, 2)))
    actual, cpu = conversation(runner), conversation(Runner(path, cpu_ops()))
    for a, b, c in zip(actual, expected, cpu, strict=True):
        if len(b):
            rounding = max(np.abs(c - b).max(), 1e-4 * np.abs(b).max())
            assert np.abs(a - b).max() <= 2 * rounding
    assert (runner.cache.page_size, runner.cache.n_pages) == (64, (32,))
    assert [part.n_pages[0] for part in runner.cache.caches] == [32 * 64 // make().page_size for make in makers]


@pytest.mark.parametrize("makers", [(ReferenceOps,), (cpu_ops, ReferenceOps)], ids=["reference", "mixed"])
def test_a_copied_page_continues_like_its_source(makers: Sequence[Callable[[], Any]], path: Path) -> None:
    runner = Runner(path, split(makers, (1, 2)))
    runner.run((IDS[:10], 0, [4]))
    runner.cache.copy(0, 4, 6)
    runner.run((IDS[20:26], 10, [4]))  # then change the source
    np.testing.assert_array_equal(runner.run((IDS[10:12], 10, [6])), runner.logits(IDS[:12])[10:])


def test_a_split_model_sums_the_caches_and_weights_of_its_parts(path: Path) -> None:
    runner = Runner(path, split([cpu_ops, ReferenceOps], (2, 1)))
    with GGUFFile.open(path) as file:
        graph = read_model(file).graph
        parts = [
            backend.footprint(graph_part(graph, layers), n_pages=(n,), max_tokens=MICRO_BATCH, max_outputs=512)
            for backend, layers, n in ((cpu_ops().backend, range(2), 32), (ReferenceBackend(), range(2, 3), 128))
        ]
    assert [part.n_bytes for part in runner.cache.caches] == [sum(part.caches.values()) for part in parts]
    assert runner.cache.n_bytes == sum(part.n_bytes for part in runner.cache.caches)
    assert runner.step.weights == parts[0].weights + parts[1].weights


# -- Pipelining ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two() -> Iterator[tuple[AsynchronousBackend, AsynchronousBackend]]:
    backends = AsynchronousBackend(), AsynchronousBackend()
    yield backends
    for backend in backends:
        backend.close()


def test_backends_work_at_the_same_time(two: tuple[AsynchronousBackend, AsynchronousBackend], path: Path) -> None:
    """The second backend finishes a micro-batch only after the first one has started the next."""
    first, second = two
    reached = {int(position): threading.Event() for position in range(len(IDS))}
    met: list[int] = []

    def meet(batch: Batch) -> None:
        after = int(batch.positions[-1]) + 1
        if after < 96:  # the last micro-batch has no successor
            assert reached[after].wait(timeout=30)
            met.append(after)

    first.before = lambda batch: reached[int(batch.positions[0])].set()
    second.before = meet
    runner = Runner(path, SplitOps([(first, 1), (second, 2)], micro_batch=MICRO_BATCH))
    logits = runner.run((IDS[:96], 0, range(8)), outputs=[95])
    assert met == [24, 48, 72]
    np.testing.assert_array_equal(logits, Runner(path, ReferenceOps()).logits(IDS[:96])[95:])


def test_backends_that_compute_later_give_the_same_bits(
    two: tuple[AsynchronousBackend, AsynchronousBackend], path: Path
) -> None:
    ops = SplitOps([(cpu_ops(), 1), (two[0], 1), (two[1], 1)], micro_batch=MICRO_BATCH)
    expected = conversation(Runner(path, SplitOps([(cpu_ops(), 1), (ReferenceOps(), 2)], micro_batch=512)))
    assert_same(conversation(Runner(path, ops)), expected)


# -- Micro-batches -------------------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    pasts = [draw(st.integers(0, 30)) for _ in lengths]
    pages = iter(range(1000))
    parts = [
        ([draw(st.integers(0, 99))] * n, past, [next(pages) for _ in range(-(-(n + past) // 4))])
        for n, past in zip(lengths, pasts, strict=True)
    ]
    outputs = draw(st.lists(st.integers(0, sum(lengths) - 1), max_size=12))
    batch = make_batch(parts, outputs)
    return replace(batch, adapters=np.arange(2 * len(batch.ids), dtype=np.float32).reshape(-1, 2))


@given(batch=batches(), n_tokens=st.integers(16, 64))
def test_micro_batches_cover_the_batch(batch: Batch, n_tokens: int) -> None:
    parts = micro_batches(batch, n_tokens)
    for part in parts:
        assert len(part.batch.ids) <= n_tokens
        part.batch.check(FakeCache(1000))
    for name in ("ids", "positions", "adapters"):
        joined = np.concatenate([getattr(part.batch, name) for part in parts])
        np.testing.assert_array_equal(joined, getattr(batch, name))
    slots = np.concatenate([slots_of(part.batch) for part in parts])
    np.testing.assert_array_equal(slots, slots_of(batch))
    wanted = np.full(len(batch.outputs), -1)
    start = 0
    for part in parts:
        wanted[part.rows] = part.batch.outputs + start
        start += len(part.batch.ids)
    np.testing.assert_array_equal(wanted, batch.outputs)
    sizes = [len(part.batch.ids) for part in parts]
    assert all(size % 16 == 0 or size == n_tokens for size in sizes[:-1])


def slots_of(batch: Batch) -> np.ndarray:
    """Return the page of each token and its position in the page."""
    slots = []
    for s, (start, stop, _) in enumerate(batch.sequences()):
        for position in batch.positions[start:stop].tolist():
            slots.append((batch.block_tables[0, s, position // 4], position % 4))
    return np.array(slots)


@given(batch=batches(), n=st.sampled_from([1, 2, 4]))
def test_smaller_pages_hold_the_same_positions(batch: Batch, n: int) -> None:
    smaller = _in_smaller_pages(batch, n)
    for s, (start, stop, _) in enumerate(batch.sequences()):
        for position in batch.positions[start:stop].tolist():
            place = smaller.block_tables[0, s, position // (4 // n)] * (4 // n) + position % (4 // n)
            assert place == batch.block_tables[0, s, position // 4] * 4 + position % 4


def test_invalid_batches_are_refused() -> None:
    table, head = f32(np.arange(36).reshape(9, 4)), Matrix(f32(np.eye(4)))
    graph = Graph()
    x = graph.add(Embed(table))
    for graph.layer in (0, 1):
        x = graph.add(Linear(x, head))
    graph.layer = "output"
    graph.add(Outputs(x))
    backends, sizes = [ReferenceBackend(), ReferenceBackend()], {"n_pages": (2,), "max_tokens": 8, "max_outputs": 8}
    step = compile_split(backends, [range(1), range(1, 2)], graph, micro_batch=4, **sizes)
    rows = step(make_batch([(range(7), 0, [0])], outputs=[6, 0]))
    np.testing.assert_array_equal(rows, [[24, 25, 26, 27], [0, 1, 2, 3]])
    best = step.top_k(make_batch([(range(7), 0, [0])], outputs=[6, 0, 1]), 2, [2, 0])
    np.testing.assert_array_equal(best.ids, [[3, 2], [3, 2], [3, 2]])
    assert {i: row.tolist() for i, row in best.whole.items()} == {0: [24, 25, 26, 27], 2: [4, 5, 6, 7]}
    with pytest.raises(KernelError, match="9 tokens and 1 outputs is larger"):
        step(make_batch([(range(9), 0, [0])], outputs=[8]))
    with pytest.raises(KernelError, match="a page outside a cache of 2"):
        step(make_batch([(range(7), 0, [2])], outputs=[6]))


def test_a_model_may_start_with_given_embeddings() -> None:
    """Each micro-batch gets its rows of the embeddings."""
    graph = Graph()
    x = graph.add(Input(Tensor(Rows.TOKENS, 4)))
    for graph.layer in (0, 1):
        x = graph.add(Linear(x, Matrix(f32(2 * np.eye(4)))))
    graph.layer = "output"
    graph.add(Outputs(x))
    sizes: dict[str, Any] = {"n_pages": (2,), "max_tokens": 8, "max_outputs": 8}
    embeddings = HostOutput(np.arange(28, dtype=np.float32).reshape(7, 4))
    for layers, micro_batch in (([range(1), range(1, 2)], 4), ([range(1), range(1, 2)], 8), ([range(2)], 4)):
        backends = [ReferenceBackend() for _ in layers]
        step = compile_split(backends, layers, graph, micro_batch=micro_batch, **sizes)
        out = step.run(make_batch([(range(7), 0, [0])], outputs=[6, 0]), embeddings).rows()
        np.testing.assert_array_equal(out, 4 * embeddings.matrix[[6, 0]])
