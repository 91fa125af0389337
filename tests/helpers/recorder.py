"""Adapters for tests: operations are methods, and calls in a forward function record a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import lcm
from typing import Any

import numpy as np

from localllm.kernels import operations
from localllm.kernels.backend import Backend, Cache, Step
from localllm.kernels.cpu.backend import CPUBackend
from localllm.kernels.graph import CacheType, Graph, Matrix, Rope, Routing, Rows, Tensor, Weight
from localllm.kernels.reference import ReferenceBackend
from localllm.kernels.split import MICRO_BATCH, SplitStep, page_size, part_footprint


@dataclass(frozen=True)
class CacheShape:
    """Shape of every layer's cache: keys and values [heads, head size] per token."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    type: CacheType = "f16"


@dataclass(frozen=True)
class Experts:
    """Expert matrices [n_experts, n_out, n_in]."""

    weight: Weight

    @property
    def n_experts(self) -> int:
        return self.weight.shape[0]

    @property
    def n_out(self) -> int:
        return self.weight.shape[1]

    @property
    def n_in(self) -> int:
        return self.weight.shape[2]


@dataclass
class RecordedCache:
    """A requested cache, allocated when a step is compiled with it."""

    shape: CacheShape
    n_pages: int
    page_size: int
    made: Cache | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made, name)


class Ops:
    """Records operations; other attributes are the backend's."""

    cache_type: CacheType | None = None
    rounds_floats = False

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._graph = Graph()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def load_linear(self, weight: Weight, bias: Weight | None = None) -> Matrix:
        return Matrix(weight, bias)

    def load_experts(self, weight: Weight) -> Experts:
        return Experts(weight)

    def load_vector(self, weight: Weight) -> Weight:
        return weight

    load_embedding = load_vector

    def new_cache(self, shape: CacheShape, n_pages: int) -> RecordedCache:
        return RecordedCache(shape, n_pages, self.backend.page_size)

    def record(self, forward: Callable[[], Any], shape: CacheShape) -> Graph:
        """Record the graph of a forward function, with a cache for each layer."""
        self._graph = graph = Graph(self.cache_type if self.cache_type and shape.type == "f16" else shape.type)
        graph.rounds_floats = self.rounds_floats
        for graph.layer in range(shape.n_layers):
            graph.kv_cache(shape.n_kv_heads, shape.head_dim)
        graph.layer = 0
        forward()
        return graph

    def compile(self, forward: Callable[[], Any], cache: RecordedCache, *, max_tokens: int, max_outputs: int) -> Step:
        graph = self.record(forward, cache.shape)
        sizes = {"n_pages": (cache.n_pages,), "max_tokens": max_tokens, "max_outputs": max_outputs}
        step = self.backend.compile(graph, **sizes)
        footprint = self.backend.footprint(graph, **sizes)
        for planned, held in zip(footprint.weights, step.weights, strict=True):
            assert planned == held or planned.kernel_type != held.kernel_type
        assert sum(footprint.caches.values()) == step.cache.n_bytes
        cache.made = step.cache
        return step

    # -- Operations ------------------------------------------------------------------------------------------------

    def hidden(self, width: int, first: int = 0) -> Tensor:
        return self._graph.add(operations.Input(Tensor(Rows.TOKENS, width), first))

    def embed(self, table: Weight, scale: float = 1.0) -> Tensor:
        return self._graph.add(operations.Embed(table, scale))

    def rms_norm(self, x: Tensor, weight: Weight, eps: float) -> Tensor:
        return self._graph.add(operations.RMSNorm(x, weight, eps))

    def linear(self, x: Tensor, weight: Matrix, residual: Tensor | None = None) -> Tensor:
        return self._graph.add(operations.Linear(x, weight, residual))

    def linears(self, x: Tensor, weights: Sequence[Matrix]) -> tuple[Tensor, ...]:
        return self._graph.add(operations.Linears(x, tuple(weights)))

    def rope_append(self, q: Tensor, k: Tensor, v: Tensor, rope: Rope | None, layer: int, **norms: Any) -> Tensor:
        return self._graph.add(operations.RopeAppend(q, k, v, self._graph.caches[layer], rope, **norms))

    def attention(self, q: Tensor, layer: int, **settings: Any) -> Tensor:
        return self._graph.add(operations.Attention(q, self._graph.caches[layer], **settings))

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        return self._graph.add(operations.Gated(gate, up, activation))

    def route(self, logits: Tensor, k: int, *, norm_topk_prob: bool, scale: float = 1.0) -> Routing:
        return self._graph.add(operations.Route(logits, k, norm_topk_prob=norm_topk_prob, scale=scale))

    def expert_linears(self, x: Tensor, weights: Sequence[Experts], routing: Routing) -> tuple[Tensor, ...]:
        return self._graph.add(operations.ExpertLinears(x, tuple(w.weight for w in weights), routing))

    def expert_output(self, h: Tensor, weight: Experts, routing: Routing, residual: Tensor) -> Tensor:
        return self._graph.add(operations.ExpertOutput(h, weight.weight, routing, residual))

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return self._graph.add(operations.Softcap(x, cap))

    def outputs(self, x: Tensor, n_joined: int = 1, is_mean: bool = False) -> Tensor:
        return self._graph.add(operations.Outputs(x, n_joined, is_mean))


class CPUOps(Ops):
    """The CPU backend; takes its arguments."""

    backend: CPUBackend

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(CPUBackend(*arguments, **keywords))


class ReferenceOps(Ops):
    """The reference backend, whose "f16" caches may contain float32."""

    def __init__(self, f16_dtype: type = np.float16) -> None:
        super().__init__(ReferenceBackend())
        self.cache_type = "f32" if f16_dtype is np.float32 else None


def backend_of(ops: Any) -> Backend:
    backend: Backend = getattr(ops, "backend", ops)
    return backend


def compile_split(
    backends: Sequence[Any], layers: Sequence[range], graph: Graph, *, micro_batch: int = MICRO_BATCH, **sizes: Any
) -> SplitStep:
    """Compile a graph for several backends, each with a range of layers."""
    size, limits = page_size(backends), {"micro_batch": micro_batch, **sizes}
    parts = [part_footprint(*part, graph, size, **limits) for part in zip(backends, layers, strict=True)]
    limits.pop("n_states", None)
    return SplitStep(tuple(part.load(None) for part in parts), graph, size, layers=layers, **limits)


class SplitOps:
    """Several backends, each with a range of layers."""

    cache_type: CacheType | None = None

    def __init__(self, parts: Sequence[tuple[Any, int]], *, micro_batch: int = MICRO_BATCH) -> None:
        self.backend = self
        self.backends = [backend_of(ops) for ops, _ in parts]
        self.layers = [range(*ends) for ends in pairwise(accumulate((n for _, n in parts), initial=0))]
        self._micro_batch = micro_batch

    @property
    def page_size(self) -> int:
        return lcm(*(backend.page_size for backend in self.backends))

    def compile(self, graph: Graph, **sizes: Any) -> Step:
        return compile_split(self.backends, self.layers, graph, micro_batch=self._micro_batch, **sizes)
