"""Graphs: inputs that operations refuse, cuts, and the placement of buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from localllm.errors import KernelError
from localllm.kernels import graph as g, operations as ops
from localllm.kernels.buffers import ALIGNMENT, Buffer, assign
from localllm.kernels.graph import Graph, Matrix, Rope, Tensor
from localllm.kernels.reference import ReferenceBackend
from localllm.kernels.split import graph_part
from tests.helpers.backends import Backend
from tests.helpers.run_model import make_batch
from tests.helpers.weights import f32, random

ROPE = Rope(np.ones(5, np.float32), interleaved=False)
FROM_1 = Rope(np.ones(4, np.float32), interleaved=False, first=1)
VECTOR, SQUARE = f32(random(40)), Matrix(f32(random(48, 48)))


class Recording:
    """A graph with a cache of two heads of eight values, and tensors of any width."""

    def __init__(self) -> None:
        self.graph = Graph(layer=0)
        self.cache = self.graph.kv_cache(2, 8)

    def x(self, width: int) -> Tensor:
        return self.graph.add(ops.Embed(f32(random(4, width))))

    def few(self, width: int) -> Tensor:
        return self.graph.add(ops.Outputs(self.x(width)))

    def append(self, q: int = 32, k: int = 16, v: int = 16, **more: Any) -> Tensor:
        more = {"rope": None, **more}
        return self.graph.add(ops.RopeAppend(self.x(q), self.x(k), self.x(v), self.cache, **more))

    def route(self, n: int, k: int = 2, **more: Any) -> g.Routing:
        return self.graph.add(ops.Route(self.x(n), k, norm_topk_prob=True, **more))

    def delta(self, a: Any, dt_bias: Any) -> Tensor:
        given = (self.x(128),), self.x(4), self.x(4), a, dt_bias
        return self.graph.add(ops.GatedDelta(*given, self.graph.state("S", 4, 16, 16), n_key_heads=2))

    def conv(self, kernel: int) -> Tensor:
        state = self.graph.state("conv", kernel - 1, 16)
        return self.graph.add(ops.CausalConv(self.x(16), f32(random(16, kernel)), state))

    def select(self, q: int = 48, k: int = 16, run: int = 1, n_last: int = 0) -> Tensor:
        index = self.graph.kv_cache(1, 16, values_in_keys=True, is_index=True)
        return self.graph.add(ops.IndexSelect(self.x(q), None, index, k, run, n_last=n_last))

    def attend(self, selected: Tensor, **more: Any) -> Tensor:
        return self.graph.add(ops.Attention(self.x(32), self.cache, 1.0, selected=selected, **more))

    def ngrams(self, n: int, sizes: tuple[int, ...]) -> Tensor:
        state = self.graph.state("ids", n, is_on_host=True)
        return self.graph.add(ops.NgramEmbed(f32(random(4, 16)), state, (3, 5), sizes, (0, 2), 0))

    def head_linear(self, width: int, *shape: int) -> Tensor:
        return self.graph.add(ops.HeadLinear(self.x(width), f32(random(*shape))))

    def experts(self, *shape: int) -> Any:
        return self.graph.add(ops.ExpertLinears(self.x(48), (f32(random(*shape)),), self.route(4)))

    def compress(self, n_heads: int, run: int, biases: Any = None) -> Tensor:
        cache = self.graph.kv_cache(n_heads, 16, values_in_keys=True, window=8, number=1)
        biases = f32(random(run, 8 * n_heads)) if biases is None else biases
        return self.graph.add(ops.Compress(self.x(16), cache, biases))

    def entries(self, dim: int = 16, window: int | None = 8) -> Tensor:
        cache, entries = (
            self.graph.kv_cache(1, n, values_in_keys=True, number=i, stride=stride)
            for i, (n, stride) in enumerate(((16, 1), (dim, 4)), 1)
        )
        return self.graph.add(ops.Attention(self.x(32), cache, 1.0, window, entries=entries))

    def again(self) -> Tensor:
        q = self.x(32)
        self.graph.add(ops.RopeAppend(q, self.x(16), self.x(16), self.cache, None))
        return self.graph.add(ops.Attention(q, self.cache, scale=1.0))


REFUSED: dict[str, Callable[[Recording], Any]] = {
    r"clamped to 0.5 … 2: the range must contain 0": lambda r: r.graph.add(ops.Clamp(r.x(48), 0.5, 2.0)),
    r"tensor has the shape \[40\], but \[48\] is needed": lambda r: r.graph.add(ops.RMSNorm(r.x(48), VECTOR, 1e-6)),
    r"gate of 48 values .* 40 values": lambda r: r.graph.add(ops.Gated(r.x(48), r.x(40), "silu")),
    r"no activation 'relu6'.*silu, gelu": lambda r: r.graph.add(ops.Gated(r.x(48), r.x(48), "relu6")),
    r"each output, but a row for each token": lambda r: r.graph.add(ops.Gated(r.x(48), r.few(48), "silu")),
    r"the shape \[48, 48\], but \[48, 40\] is needed": lambda r: r.graph.add(ops.Linear(r.x(40), SQUARE)),
    r"48\], but \[48, 40\] is needed": lambda r: r.graph.add(ops.Linears(r.x(40), (SQUARE,))),
    r"40 values cannot be added to the 48": lambda r: r.graph.add(ops.Linear(r.x(48), SQUARE, r.x(40))),
    r"each output, but .* token": lambda r: r.graph.add(ops.Linear(r.x(48), SQUARE, r.few(48))),
    r"for each output, but a row for each token": lambda r: r.graph.add(ops.Outputs(r.few(48))),
    r"not a tensor of the same graph": lambda r: r.graph.add(ops.Outputs(Recording().x(48))),
    r"40 values of queries .* 2 heads of 8": lambda r: r.append(q=40),
    r"8 values of keys": lambda r: r.append(k=8),
    r"32 values of values": lambda r: r.append(v=32),
    r"5 pairs .* heads of 8": lambda r: r.append(rope=ROPE),
    r"norm of \[40\] weights .* 8 values of a head": lambda r: r.append(q_norm=g.HeadNorm(1e-6, VECTOR)),
    r"\[40\] weights .* 8 values of a head": lambda r: r.append(k_norm=g.HeadNorm(1e-6, VECTOR)),
    r"4 pairs of values from 1 on .* heads of 8": lambda r: r.append(rope=FROM_1),
    r"every 0 positions": lambda r: r.append(q_scale=g.PositionScale(0.1, 0)),
    r"values need keys": lambda r: r.graph.add(ops.RopeAppend(r.x(32), None, r.x(16), r.cache, None)),
    r"keys need values": lambda r: r.graph.add(ops.RopeAppend(r.x(32), r.x(16), None, r.cache, None)),
    r"16 values cannot be the first ones of 8": lambda _: Graph(layer=0).kv_cache(1, 8, 16, values_in_keys=True),
    r"in chunks must be causal": lambda r: r.graph.add(ops.Attention(r.x(32), r.cache, 1.0, chunk=8, window=8)),
    r"without a window": lambda r: r.graph.add(ops.Attention(r.x(32), r.cache, 1.0, chunk=8, causal=False)),
    r"24 values of queries": lambda r: r.graph.add(ops.Attention(r.x(24), r.cache, scale=1.0)),
    r"8 values of queries": lambda r: r.graph.add(ops.Attention(r.x(8), r.cache, scale=1.0)),
    r"a row for each output": lambda r: r.graph.add(ops.Attention(r.few(32), r.cache, scale=1.0)),
    r"overwritten by an earlier operation": lambda r: r.again(),
    r"the shape \[15\], but \[16\] is needed": lambda r: Matrix(f32(random(16, 32)), f32(random(15))),
    r"used as a matrix, but has the shape \[32\]": lambda r: r.graph.add(ops.Embed(f32(random(32)))),
    r"\[16, 48\] cannot multiply 3 heads in rows of 96": lambda r: r.head_linear(96, 3, 16, 48),
    r"\[32, 64\] cannot multiply 2 heads in rows of 96": lambda r: r.head_linear(96, 2, 32, 64),
    r"\[32, 32\] cannot multiply 3 heads in rows of 128": lambda r: r.head_linear(128, 3, 32, 32),
    r"by their best or their two best experts, not by 3": lambda r: r.route(8, n_group_best=3),
    r"9 of 8 experts": lambda r: r.route(8, 9),
    r"0 of 8 experts": lambda r: r.route(8, 0),
    r"with 2 and with 3 experts": lambda r: (r.route(8, 2), r.route(8, 3)),
    r"\[5, 8, 48\], but \[4, 8, 48\] is needed": lambda r: r.experts(5, 8, 48),
    r"\[4, 8, 40\], but \[4, 8, 48\] is needed": lambda r: r.experts(4, 8, 40),
    r"\[8, 1\], but \[8\] is needed": lambda r: r.route(8, selection_bias=f32(random(8, 1))),
    r"\[1, 8\], but \[8\] is needed": lambda r: r.route(8, expert_scales=f32(random(1, 8))),
    r"\[3\], but \[4\] is needed": lambda r: r.delta(f32(random(3)), f32(random(4))),
    r"\[1, 4\], but \[4, 1\] is needed": lambda r: r.delta(f32(random(1, 4)), f32(random(4))),
    r"\[4, 1\], but \[4\] is needed": lambda r: r.delta(f32(random(4, 1)), f32(random(4, 1))),
    r"kernels of 2 to 16 values, not of 17": lambda r: r.conv(17),
    r"24 values are not an indexer's queries, of 16": lambda r: r.select(24),
    r"runs of 3 positions": lambda r: r.select(run=3),
    r"2 of 1 runs cannot be the last ones": lambda r: r.select(run=16, n_last=2),
    r"selected in attention with a window": lambda r: r.attend(r.x(4), window=8),
    r"5 positions do not fit 2 heads": lambda r: r.attend(r.x(5), selected_by_head=True),
    r"are not 3 streams": lambda r: r.graph.add(ops.StreamGate(r.x(48), r.x(32), 3)),
    r"2 heads and a state \[2\] do not fit n-grams of up to 2": lambda r: r.ngrams(2, (2, 2)),
    r"rows that tensor .*, of 4, does not have": lambda r: r.ngrams(1, (2, 3)),
    r"layer 0 already has such a cache": lambda r: r.graph.kv_cache(1, 8),
    r"every 3 tokens": lambda r: r.graph.kv_cache(1, 16, values_in_keys=True, number=1, stride=3),
    r"every 4 tokens": lambda r: r.graph.kv_cache(2, 16, values_in_keys=True, number=1, stride=4),
    r"3 heads are not values and gates": lambda r: r.compress(3, 4),
    r"fit into a cache of 8 tokens": lambda r: r.compress(4, 8),
    r"\[4, 16\], but \[4, 32\] is needed": lambda r: r.compress(4, 4, f32(random(4, 16))),
    r"keys like keys of the window": lambda r: r.entries(dim=32),
    r"need a window": lambda r: r.entries(window=None),
    r"3 experts per token are set, but 2": lambda r: r.route(8, 2, expert_ids=r.x(3)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_mismatched_operands_are_refused(message: str) -> None:
    """Kernels do not check shapes, so these calls would access memory of another tensor."""
    with pytest.raises(KernelError, match=message):
        REFUSED[message](Recording())


def test_an_operation_that_a_backend_does_not_know_is_named() -> None:
    class Unknown(ops.Softcap):
        pass

    r = Recording()
    r.graph.add(Unknown(r.x(8), 1.0))
    with pytest.raises(KernelError, match="reference backend cannot compute Unknown"):
        ReferenceBackend().compile(r.graph, n_pages=(1,), max_tokens=1, max_outputs=1)


def test_a_graph_is_cut_if_one_tensor_crosses() -> None:
    r = Recording()
    embedding = r.x(48)
    first = r.graph.add(ops.Linear(embedding, SQUARE))
    y = r.graph.add(ops.Linear(first, SQUARE))
    r.graph.layer = 1
    r.graph.add(ops.Linear(r.graph.add(ops.Linear(y, SQUARE)), SQUARE, residual=y))
    part = graph_part(r.graph, range(1, 2))
    assert [type(node.operation).__name__ for node in part.nodes] == ["Input", "Linear", "Linear"]
    assert part.nodes[0].operation.result is y
    assert (part.caches, graph_part(r.graph, range(1)).caches) == ({}, {0: r.cache})
    r.graph.layer = 2
    r.graph.add(ops.Linear(r.graph.result, SQUARE, residual=embedding))  # the part computes the embedding again
    part = graph_part(r.graph, range(2, 3))
    assert [type(node.operation).__name__ for node in part.nodes] == ["Input", "Embed", "Linear"]
    r.graph.layer = 3
    r.graph.add(ops.Linear(r.graph.result, SQUARE, residual=first))
    with pytest.raises(KernelError, match="cut at layer 3: more than one tensor"):
        graph_part(r.graph, range(3, 4))


def test_a_graph_is_not_cut_between_layers_that_share_keys_and_values() -> None:
    r = Recording()
    r.append()
    for r.graph.layer in (1, 2):
        q = r.graph.add(ops.Linear(r.graph.result, Matrix(f32(random(32, 32)))))
        q = r.graph.add(ops.RopeAppend(q, None, None, r.cache, None))
        r.graph.add(ops.Attention(q, r.cache, 1.0))
    assert len(graph_part(r.graph, range(3)).nodes) == len(r.graph.nodes)
    for layers in (range(1, 3), range(2, 3)):
        with pytest.raises(KernelError, match=f"between layers 0 and {layers.start}: the second uses the keys"):
            graph_part(r.graph, layers)


def test_keys_and_values_are_appended_to_the_pages_of_the_block_table() -> None:
    """One sequence moves from page 2 to page 0 after 15 tokens, the other starts in page 3."""
    graph, k, v = Graph(layer=1), random(5, 16, seed=1), random(5, 16, seed=2)
    tensors = [graph.add(ops.Embed(f32(x))) for x in (random(5, 32), k, v)]
    graph.add(ops.RopeAppend(*tensors, graph.kv_cache(2, 8), None))
    step = ReferenceBackend().compile(graph, n_pages=(4,), max_tokens=5, max_outputs=5)
    step(make_batch([([0, 1, 2], 14, [2, 0]), ([3, 4], 0, [3])]))
    keys, values = step.cache.layers[1]
    places = [(2, 14), (2, 15), (0, 0), (3, 0), (3, 1)]
    for row, place in enumerate(places):
        np.testing.assert_array_equal(keys[place].ravel(), k[row].astype(np.float16))
        np.testing.assert_array_equal(values[place].ravel(), v[row].astype(np.float16))
    assert {tuple(place) for place in np.argwhere(keys.any(axis=(2, 3)))} == {*places}


def test_layers_may_cache_different_heads(backend: Backend) -> None:
    """The sequence has two pages, including a copied one, and the caches take the planned memory."""
    graph, heads, n = Graph(), [(2, 8, 2), (1, 16, 3), (2, 8, 2)], 75  # key heads, head_dim, query heads per key head
    x = graph.add(ops.Embed(f32(random(n, 64))))
    for graph.layer, (n_heads, size, group) in enumerate(heads):
        widths = n_heads * group * size, n_heads * size, n_heads * size
        matrices = tuple(Matrix(f32(0.1 * random(width, 64, seed=i))) for i, width in enumerate(widths))
        q, k, v = graph.add(ops.Linears(x, matrices))
        cache, rope = graph.kv_cache(n_heads, size), Rope(np.ones(size // 2, np.float32), interleaved=True)
        q = graph.add(ops.RopeAppend(q, k, v, cache, rope))
        y = graph.add(ops.Attention(q, cache, scale=size**-0.5, window=40 if graph.layer else None))
        x = graph.add(ops.Linear(y, Matrix(f32(0.1 * random(64, widths[0]))), residual=x))
    graph.add(ops.Outputs(x))

    def logits(made: Any) -> np.ndarray:
        *first, last = range(-(-n // made.page_size))
        sizes = {"n_pages": (last + 2,), "max_tokens": n, "max_outputs": n}
        step = made.compile(graph, **sizes)
        assert sum(made.footprint(graph, **sizes).caches.values()) == step.cache.n_bytes
        step(make_batch([(range(n - 1), 0, [*first, last])]))
        step.cache.copy(0, last, last + 1)
        return step(make_batch([([n - 1], n - 1, [*first, last + 1])])).copy()

    expected, found = logits(ReferenceBackend()), logits(backend.make().backend)
    assert np.abs(found - expected).max() < 2e-2 * np.abs(expected).max()


# -- Buffers -------------------------------------------------------------------------------------------------------

LIVES = st.lists(
    st.tuples(st.integers(0, 5 * ALIGNMENT), st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=30
)


@given(LIVES)
def test_buffers_in_use_at_the_same_time_do_not_overlap(lives: list[tuple[int, int, int, bool]]) -> None:
    buffers = [(Buffer(n, is_kept), min(a, b), max(a, b)) for n, a, b, is_kept in lives]
    stages = [[buffer for buffer, first, last in buffers if i in (first, last)] for i in range(10)]
    size = assign(stages)
    bounds = [(0, 9) if buffer.is_kept else (first, last) for buffer, first, last in buffers]
    for i, (one, *_) in enumerate(buffers):
        assert one.offset % ALIGNMENT == 0
        assert 0 <= one.offset <= one.offset + one.n_bytes <= size
        for j, (other, *_) in enumerate(buffers[:i]):
            together = bounds[i][0] <= bounds[j][1] and bounds[j][0] <= bounds[i][1]
            apart = one.offset + one.n_bytes <= other.offset or other.offset + other.n_bytes <= one.offset
            assert apart or not together or not one.n_bytes * other.n_bytes
    pages = [-(-buffer.n_bytes // ALIGNMENT) for buffer, *_ in buffers]
    used = [sum(n for n, (a, b) in zip(pages, bounds, strict=True) if a <= i <= b) for i in range(10)]
    assert max(used) * ALIGNMENT <= size <= sum(pages) * ALIGNMENT


def test_free_memory_is_reused() -> None:
    a, b, c, d = (Buffer(n * ALIGNMENT) for n in (4, 2, 2, 3))
    assert assign([[a, b], [b, c], [c, d], [d]]) == 6 * ALIGNMENT
    assert (c.offset, d.offset) == (0, 2 * ALIGNMENT)


def subclasses(declared: type) -> set[type]:
    return {x for child in declared.__subclasses__() for x in (child, *subclasses(child))}


def test_all_operations_are_exported() -> None:
    declared = {x.__name__ for x in subclasses(g.Operation) if x.__module__.startswith(f"{ops.__name__}.")}
    assert declared == {name for name, value in vars(ops).items() if isinstance(value, type)}
