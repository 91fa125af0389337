"""Models split over several backends, against the same model on one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.errors import KernelError
from localllm.kernels.cpu.ops import CPUOps
from localllm.kernels.micro_batches import in_smaller_pages, micro_batches
from localllm.kernels.ops import Backend, Batch, CacheShape, HostHidden, Ops
from localllm.kernels.reference import ReferenceOps
from localllm.kernels.split import SplitOps
from localllm.quant.types import GGMLType
from tests.helpers import tiny_models
from tests.helpers.asynchronous import AsynchronousOps
from tests.helpers.backends import shared_by_threads
from tests.helpers.data import shared_data
from tests.helpers.run_model import Runner, make_batch
from tests.helpers.weights import f32

T = GGMLType

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "type": T.Q8_0},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True, "type": T.Q4_0},
    "qwen3": {"model_type": "qwen3", "type": T.F32},
    "qwen3moe": {"model_type": "qwen3_moe", "type": T.F32},
}

#: Layers of three, and a first backend that only embeds.
SPLITS = ((3,), (1, 2), (2, 1), (1, 1, 1), (0, 3))

#: Tokens of a micro-batch: two pieces of a prompt below are cut, at places that are no page's end.
MICRO_BATCH = 24

IDS = [int(i) for i in np.random.default_rng(1).integers(0, 300, 120)]


@cache
def cpu_ops() -> CPUOps:
    return shared_by_threads(CPUOps(threads=2))


@pytest.fixture(params=["llama"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The first of the models, or another that a test names."""
    return tiny_models.tiny_gguf(tmp_path / "model.gguf", max_position_embeddings=256, **MODELS[request.param])


every_model = pytest.mark.parametrize("path", MODELS, indirect=True)


def split(makers: Sequence[Callable[[], Backend]], layers: Sequence[int]) -> SplitOps:
    parts = [(makers[i % len(makers)](), n) for i, n in enumerate(layers)]
    return SplitOps(parts, micro_batch=MICRO_BATCH)


def conversation(runner: Runner) -> list[np.ndarray]:
    """Logits of prefills of several sequences at once, of single tokens, and of rows in any order.

    The pages named are whole ones of 16 tokens or more, in no order.
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
def test_a_split_model_has_the_same_bits(make: Callable[[], Backend], layers: Sequence[int], path: Path) -> None:
    expected = conversation(Runner(path, make()))
    assert_same(conversation(Runner(path, split([make], layers))), expected)


@every_model
@pytest.mark.parametrize("makers", [(cpu_ops, ReferenceOps), (ReferenceOps, cpu_ops)], ids=["to", "from"])
def test_cpu_and_reference_together(makers: Sequence[Callable[[], Backend]], path: Path) -> None:
    """Between what each would give alone: they differ by how activations are rounded."""
    expected, runner = conversation(Runner(path, ReferenceOps())), Runner(path, split(makers, (1, 2)))
    actual, cpu = conversation(runner), conversation(Runner(path, cpu_ops()))
    for a, b, c in zip(actual, expected, cpu, strict=True):
        if len(b):
            rounding = max(np.abs(c - b).max(), 1e-4 * np.abs(b).max())
            assert np.abs(a - b).max() <= 2 * rounding
    assert (runner.cache.page_size, runner.cache.n_pages) == (64, 32)
    assert [part.n_pages for part in runner.cache.parts] == [32 * 64 // make().page_size for make in makers]


def capped(ops: Ops, sinks_at: int) -> np.ndarray:
    """Attention in the second of two layers, with soft-caps and with sinks, which lie with the layer ``sinks_at``."""
    rng = np.random.default_rng(5)
    table = ops.at("embedding").load_embedding(f32(rng.standard_normal((20, 32))))
    weights = [ops.at(1).load_linear(f32(rng.standard_normal((n, 32)))) for n in (32, 16, 16)]
    sinks = ops.at(sinks_at).load_vector(f32([0, 3, -1, 1]))

    def forward() -> Any:
        q, k, v = ops.linears(ops.embed(table), weights)
        q = ops.rope_append(q, k, v, None, 1)
        return ops.softcap(ops.outputs(ops.attention(q, 1, scale=1.0, softcap=2.0, sinks=sinks)), 0.5)

    step = ops.compile(forward, ops.new_cache(CacheShape(2, 2, 8), 4), max_tokens=20, max_outputs=20)
    return step(make_batch([(range(20), 0, [2, 1])])).copy()


@pytest.mark.parametrize("make", [ReferenceOps, cpu_ops], ids=["reference", "cpu"])
def test_soft_caps_and_sinks_reach_the_backend_of_their_layer(make: Callable[[], Backend]) -> None:
    np.testing.assert_array_equal(capped(split([make], (1, 1)), 1), capped(make(), 1))
    with pytest.raises(KernelError, match="lies on another"):
        capped(split([make], (1, 1)), 0)


def test_stories260k_split_has_the_same_bits() -> None:
    path = shared_data("models/stories260K/stories260K.gguf")
    expected = Runner(path, cpu_ops()).logits(IDS)
    np.testing.assert_array_equal(Runner(path, split([cpu_ops], (2, 3))).logits(IDS), expected)


@pytest.mark.parametrize("makers", [(ReferenceOps,), (cpu_ops, ReferenceOps)], ids=["reference", "mixed"])
def test_a_copied_page_continues_like_its_source(makers: Sequence[Callable[[], Backend]], path: Path) -> None:
    runner = Runner(path, split(makers, (1, 2)))
    runner.run((IDS[:10], 0, [4]))
    runner.cache.copy_page(4, 6)
    runner.run((IDS[20:26], 10, [4]))  # the source goes its own way
    np.testing.assert_array_equal(runner.run((IDS[10:12], 10, [6])), runner.logits(IDS[:12])[10:])


def test_bytes_of_the_cache_and_of_weights() -> None:
    ops = SplitOps([(cpu_ops(), 2), (ReferenceOps(), 1)])
    shape = CacheShape(n_layers=3, n_kv_heads=2, head_dim=20, type="q8_0")
    kept = ops.new_cache(shape, 5)
    parts = [
        cpu_ops().cache_bytes(replace(shape, n_layers=2), 5),
        ReferenceOps().cache_bytes(replace(shape, n_layers=1), 20),
    ]
    assert [part.n_bytes for part in kept.parts] == parts
    assert kept.n_bytes == ops.cache_bytes(shape, 5) == sum(parts)
    weight = f32(np.ones((48, 64)))
    for place, backend in ((0, cpu_ops()), (1, cpu_ops()), (2, ReferenceOps()), ("output", ReferenceOps())):
        assert ops.at(place).packed_bytes(weight) == backend.packed_bytes(weight)


def test_a_shared_matrix_lies_on_both_its_backends() -> None:
    ops = SplitOps([(ReferenceOps(), 1), (ReferenceOps(), 1)])
    head = ops.at("output").load_linear(f32(np.ones((5, 3))))
    assert (head.n_in, head.n_out, head.format, head.n_bytes) == (3, 5, "F32", 60)
    assert ops.at("output") is ops.at(1) is not ops.at("embedding")
    assert ops.at("embedding").load_embedding(f32(np.ones((5, 3)))).backend == 0
    with pytest.raises(KernelError, match="another backend"):
        ops.at("embedding").load_embedding(f32(np.ones((5, 3))), head)


# -- Pipelining ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two() -> Iterator[tuple[AsynchronousOps, AsynchronousOps]]:
    backends = AsynchronousOps(), AsynchronousOps()
    yield backends
    for backend in backends:
        backend.close()


def test_backends_work_at_the_same_time(two: tuple[AsynchronousOps, AsynchronousOps], path: Path) -> None:
    """The second backend works on a micro-batch only while the first one is at the next: it waits for that."""
    first, second = two
    reached = {int(position): threading.Event() for position in range(len(IDS))}
    met: list[int] = []

    def meet(batch: Batch) -> None:
        after = int(batch.positions[-1]) + 1
        if after < 96:  # behind the last there is none
            assert reached[after].wait(timeout=30)
            met.append(after)

    first.before = lambda batch: reached[int(batch.positions[0])].set()
    second.before = meet
    runner = Runner(path, SplitOps([(first, 1), (second, 2)], micro_batch=MICRO_BATCH))
    logits = runner.run((IDS[:96], 0, range(8)), outputs=[95])
    assert met == [24, 48, 72]
    np.testing.assert_array_equal(logits, Runner(path, ReferenceOps()).logits(IDS[:96])[95:])


def test_backends_that_compute_later_give_the_same_bits(
    two: tuple[AsynchronousOps, AsynchronousOps], path: Path
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
    return make_batch(parts, outputs)


@given(batch=batches(), n_tokens=st.integers(16, 64))
def test_micro_batches_are_the_batch(batch: Batch, n_tokens: int) -> None:
    parts = micro_batches(batch, n_tokens)
    for part in parts:
        assert len(part.batch.ids) <= n_tokens
        part.batch.check(page_size=4, n_pages=1000)
    for name in ("ids", "positions"):
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
    """Where each token is kept: page and place in it."""
    slots = []
    for s, (start, stop, _) in enumerate(batch.sequences()):
        for position in batch.positions[start:stop].tolist():
            slots.append((batch.block_tables[s, position // 4], position % 4))
    return np.array(slots)


@given(batch=batches(), n=st.sampled_from([1, 2, 4]))
def test_smaller_pages_name_the_same_places(batch: Batch, n: int) -> None:
    smaller = in_smaller_pages(batch, n)
    for s, (start, stop, _) in enumerate(batch.sequences()):
        for position in batch.positions[start:stop].tolist():
            place = smaller.block_tables[s, position // (4 // n)] * (4 // n) + position % (4 // n)
            assert place == batch.block_tables[s, position // 4] * 4 + position % 4


# -- What is refused -----------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    ops = SplitOps([(ReferenceOps(), 1), (ReferenceOps(), 1)], micro_batch=4)
    shape = CacheShape(2, 1, 4)
    kept = ops.new_cache(shape, 2)
    table = ops.at("embedding").load_embedding(f32(np.ones((9, 4))))
    low, high = (ops.at(layer).load_linear(f32(np.ones((4, 4)))) for layer in (0, 1))
    loose = ReferenceOps().load_linear(f32(np.ones((4, 4))))

    def forward(body: Callable[[Any], Any]) -> Callable[[], Any]:
        return lambda: body(ops.embed(table))

    def back(x: Any) -> Any:
        return ops.linear(ops.linear(x, high), low)

    def around(x: Any) -> Any:
        """The second backend adds what has not gone over to it."""
        return ops.linear(ops.linear(x, low), high, residual=x)

    def skipped(x: Any) -> Any:
        y = ops.linear(x, low)
        return ops.gated(ops.linear(y, high), x, "silu")

    for body, words in (
        (back, "backend 0 of a split model was given what lies on another"),
        (around, "backend 1 of a split model was given what lies on another"),
        (skipped, "backend 1 of a split model was given what lies on another"),
        (lambda x: ops.linear(ops.outputs(x), high), "hidden states, of each token"),
        (lambda x: ops.linears(x, [low, high])[0], r"weights of the backends \[0, 1\]"),
        (lambda x: ops.linear(x, loose), "ReferenceLinear, which no backend of it loaded"),
        (lambda x: ops.rms_norm(x, np.ones(4), 0.1), "what no backend of it loaded"),
        (lambda x: ops.linear("x", low), "something else than a tensor"),
        (lambda x: ops.attention(x, 1, scale=1.0), r"layer 1 is on a backend that has the layers range\(0, 1\)"),
        (lambda x: np.ones((7, 4)), "ended with something else"),
    ):
        with pytest.raises(KernelError, match=words):
            ops.compile(forward(body), kept, max_tokens=8, max_outputs=8)
    with pytest.raises(KernelError, match="only inside a forward pass"):
        ops.embed(table)
    with pytest.raises(KernelError, match="cannot use a ReferenceCache"):
        ops.compile(forward(lambda x: x), ReferenceOps().new_cache(shape, 2), max_tokens=8, max_outputs=8)
    with pytest.raises(KernelError, match="3 layers is split as one of 2"):
        ops.new_cache(CacheShape(3, 1, 4), 2)
    with pytest.raises(KernelError, match=r"no layer 2 in a model split at \[1, 1\]"):
        ops.at(2)
    with pytest.raises(KernelError, match="no backends"):
        SplitOps([])


def test_batches_that_do_not_fit_are_refused() -> None:
    ops = SplitOps([(ReferenceOps(), 1), (ReferenceOps(), 1)], micro_batch=4)
    table = ops.at("embedding").load_embedding(f32(np.arange(36).reshape(9, 4)))
    head = ops.at("output").load_linear(f32(np.eye(4)))
    kept = ops.new_cache(CacheShape(2, 1, 4), 2)
    step = ops.compile(lambda: ops.outputs(ops.linear(ops.embed(table), head)), kept, max_tokens=8, max_outputs=8)
    rows = step(make_batch([(range(7), 0, [0])], outputs=[6, 0]))
    np.testing.assert_array_equal(rows, [[24, 25, 26, 27], [0, 1, 2, 3]])
    with pytest.raises(KernelError, match="9 tokens and 1 outputs is larger"):
        step(make_batch([(range(9), 0, [0])], outputs=[8]))
    with pytest.raises(KernelError, match="a page outside a cache of 2"):
        step(make_batch([(range(7), 0, [2])], outputs=[6]))


def test_host_hidden_gives_what_it_was_made_of() -> None:
    rows = np.ones((2, 3), np.float32)
    assert HostHidden(rows).host() is rows
