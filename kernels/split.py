"""The `Ops` protocol over several backends, each with some of a model's layers: several GPUs, or CPU and GPU.

The forward function is traced once (`localllm.kernels.tracing`), and cut where the weights of one operation begin to
lie on the next backend (`localllm.kernels.placed`).  Each piece's backend compiles it as it would any other forward
pass; batches go through all of them in turn (`localllm.kernels.micro_batches`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import lcm
from typing import Any, TypeVar

import numpy as np

from localllm.errors import KernelError
from localllm.kernels.micro_batches import MICRO_BATCH, SplitStep, in_smaller_pages
from localllm.kernels.ops import (
    Backend,
    CacheShape,
    Experts,
    KVCache,
    Linear,
    Ops,
    Part,
    Place,
    Rope,
    Routing,
    Step,
    Tensor,
)
from localllm.kernels.placed import Placed, PlacedExperts, PlacedLinear, PlacedLoader, SplitCache
from localllm.kernels.tracing import Piece, Trace, Traced


class SplitOps(Ops):
    """Several backends with a range of layers each.

    Attributes:
        backends: in the order of the data's way.
        layers: of each, those that it has; none of the first if that only embeds.

    Args:
        parts: the backends, and how many layers each has.  The first one also embeds, the last one has norm and head.
        micro_batch: tokens beyond which a batch is cut.
    """

    def __init__(self, parts: Sequence[tuple[Backend, int]], *, micro_batch: int = MICRO_BATCH) -> None:
        if not parts:
            raise KernelError("a model cannot be split over no backends")
        self.backends = tuple(backend for backend, _ in parts)
        ends = [0, *accumulate(n for _, n in parts)]
        self.layers = tuple(range(start, stop) for start, stop in pairwise(ends))
        self._micro_batch = micro_batch
        self._loaders = [PlacedLoader(i, backend) for i, backend in enumerate(self.backends)]
        self._trace: Trace | None = None

    @property
    def name(self) -> str:
        return " + ".join(backend.name for backend in self.backends)

    @property
    def page_size(self) -> int:
        return lcm(*(backend.page_size for backend in self.backends))

    @property
    def most_choices(self) -> int:
        return self.backends[-1].most_choices

    # -- Loading ---------------------------------------------------------------------------------------------------

    def at(self, place: Place) -> PlacedLoader:
        if place == "embedding":
            return self._loaders[0]
        if place == "output":
            return self._loaders[-1]
        return self._loaders[self._backend_of(place)]

    def _backend_of(self, layer: int) -> int:
        for i, layers in enumerate(self.layers):
            if layer in layers:
                return i
        raise KernelError(f"there is no layer {layer} in a model split at {[len(layers) for layers in self.layers]}")

    def new_cache(self, shape: CacheShape, n_pages: int) -> SplitCache:
        parts = (
            backend.new_cache(part, n_pages * self._pages_in_page(backend))
            for backend, part in zip(self.backends, self._shapes(shape), strict=True)
        )
        return SplitCache(tuple(parts), self.page_size, n_pages)

    def cache_bytes(self, shape: CacheShape, n_pages: int) -> int:
        return sum(
            backend.cache_bytes(part, n_pages * self._pages_in_page(backend))
            for backend, part in zip(self.backends, self._shapes(shape), strict=True)
        )

    def _shapes(self, shape: CacheShape) -> list[CacheShape]:
        """That of each backend's part of a cache."""
        if shape.n_layers != self.layers[-1].stop:
            raise KernelError(f"a model of {shape.n_layers} layers is split as one of {self.layers[-1].stop}")
        return [replace(shape, n_layers=len(layers)) for layers in self.layers]

    def _pages_in_page(self, backend: Backend) -> int:
        return self.page_size // backend.page_size

    # -- Compiling and running -------------------------------------------------------------------------------------

    def compile(self, forward: Callable[[], Tensor], cache: KVCache, *, max_tokens: int, max_outputs: int) -> Step:
        if not isinstance(cache, SplitCache) or len(cache.parts) != len(self.backends):
            raise KernelError(f"a split model cannot use a {type(cache).__name__}")
        trace = self._trace = Trace()
        try:
            result = forward()
            trace.end(result)
        finally:
            self._trace = None
        stages = [self._stage(piece, cache, max_tokens, max_outputs) for piece in trace.pieces]
        return SplitStep(
            stages, cache, self._micro_batch, max_tokens, np.empty((max_outputs, result.width), np.float32)
        )

    def _stage(self, piece: Piece, cache: SplitCache, max_tokens: int, max_outputs: int) -> Part:
        """A piece, compiled; it takes batches that name pages of the split cache."""
        backend = self.backends[piece.backend]
        part = backend.compile_part(
            lambda: piece.run(backend),
            cache.parts[piece.backend],
            max_tokens=min(max_tokens, self._micro_batch),
            max_outputs=max_outputs,
        )
        n = self._pages_in_page(backend)
        return lambda batch, hidden: part(in_smaller_pages(batch, n), hidden)

    @property
    def _now(self) -> Trace:
        if self._trace is None:
            raise KernelError("operations of a split model run only inside a forward pass: see compile()")
        return self._trace

    def _check_placed(self, *weights: Any) -> int | None:
        """The backend that all weights of an operation lie on; None without any."""
        placed = [weight for weight in weights if weight is not None]
        if not all(isinstance(weight, Placed | PlacedLinear | PlacedExperts) for weight in placed):
            raise KernelError("a split model cannot use what no backend of it loaded: see at()")
        backends = {weight.backend for weight in placed}
        if len(backends) > 1:
            raise KernelError(f"an operation mixes weights of the backends {sorted(backends)} of a split model")
        return backends.pop() if backends else None

    def _check_layer(self, layer: int) -> int:
        """The place of a layer among those of the backend at work."""
        layers = self.layers[self._now.backend]
        if layer not in layers:
            raise KernelError(f"an operation of layer {layer} is on a backend that has the layers {layers}")
        return layer - layers.start

    def _add(
        self,
        inputs: Sequence[Tensor],
        weights: Sequence[Any],
        results: Sequence[Traced],
        run: Callable[[Backend, Sequence[Tensor]], Sequence[Tensor]],
    ) -> None:
        self._now.add(self._check_placed(*weights), inputs, results, run)

    # -- Operations ------------------------------------------------------------------------------------------------

    def embed(self, table: Placed, scale: float = 1.0) -> Traced:
        y = Traced(table.width)
        self._add([], [table], [y], lambda ops, _: [ops.embed(table.held, scale)])
        return y

    def rms_norm(self, x: Traced, weight: Placed, eps: float) -> Traced:
        y = _like(x)
        self._add([x], [weight], [y], lambda ops, given: [ops.rms_norm(given[0], weight.held, eps)])
        return y

    def linear(self, x: Traced, weight: Linear, residual: Traced | None = None) -> Traced:
        matrix = _placed(weight, PlacedLinear)
        y = _like(x, matrix.n_out)
        inputs = [x] if residual is None else [x, residual]
        self._add(inputs, [matrix], [y], lambda ops, given: [ops.linear(given[0], matrix.held, *given[1:])])
        return y

    def linears(self, x: Traced, weights: Sequence[Linear]) -> list[Traced]:
        matrices = [_placed(weight, PlacedLinear) for weight in weights]
        results = [_like(x, matrix.n_out) for matrix in matrices]
        held = [matrix.held for matrix in matrices]
        self._add([x], matrices, results, lambda ops, given: ops.linears(given[0], held))
        return results

    def rope_append(
        self,
        q: Traced,
        k: Traced,
        v: Traced,
        rope: Rope | None,
        layer: int,
        *,
        q_norm: Placed | None = None,
        k_norm: Placed | None = None,
        eps: float = 0.0,
    ) -> Traced:
        own, y = self._check_layer(layer), _like(q)
        held = {"q_norm": None if q_norm is None else q_norm.held, "k_norm": None if k_norm is None else k_norm.held}

        def run(ops: Backend, given: Sequence[Tensor]) -> list[Tensor]:
            return [ops.rope_append(given[0], given[1], given[2], rope, own, **held, eps=eps)]

        self._add([q, k, v], [q_norm, k_norm], [y], run)
        return y

    def attention(
        self,
        q: Traced,
        layer: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Placed | None = None,
    ) -> Traced:
        own, y = self._check_layer(layer), _like(q)
        held = None if sinks is None else sinks.held

        def run(ops: Backend, given: Sequence[Tensor]) -> list[Tensor]:
            return [ops.attention(given[0], own, scale=scale, window=window, softcap=softcap, sinks=held)]

        self._add([q], [sinks], [y], run)
        return y

    def gated(self, gate: Traced, up: Traced, activation: str) -> Traced:
        y = _like(gate)
        self._add([gate, up], [], [y], lambda ops, given: [ops.gated(given[0], given[1], activation)])
        return y

    def route(self, logits: Traced, k: int, *, normalise: bool, scale: float = 1.0) -> Traced:
        y = replace(_like(logits), of_tokens=False)
        self._add([logits], [], [y], lambda ops, given: [ops.route(given[0], k, normalise=normalise, scale=scale)])
        return y

    def expert_linears(self, x: Traced, weights: Sequence[Experts], routing: Routing) -> list[Traced]:
        matrices = [_placed(weight, PlacedExperts) for weight in weights]
        results = [Traced(matrix.n_out, of_tokens=False) for matrix in matrices]
        held = [matrix.held for matrix in matrices]
        self._add([x, routing], matrices, results, lambda ops, given: ops.expert_linears(given[0], held, given[1]))
        return results

    def expert_output(self, h: Traced, weight: Experts, routing: Routing, residual: Traced) -> Traced:
        matrix, y = _placed(weight, PlacedExperts), _like(residual)
        self._add(
            [h, routing, residual], [matrix], [y], lambda ops, x: [ops.expert_output(x[0], matrix.held, *x[1:])]
        )
        return y

    def softcap(self, x: Traced, cap: float) -> Traced:
        y = _like(x)
        self._add([x], [], [y], lambda ops, given: [ops.softcap(given[0], cap)])
        return y

    def outputs(self, x: Traced) -> Traced:
        y = replace(_like(x), of_tokens=False)
        self._add([x], [], [y], lambda ops, given: [ops.outputs(given[0])])
        return y


def _like(x: Tensor, width: int | None = None) -> Traced:
    """Another tensor with the rows of this one, and as many values each unless others are wanted."""
    if not isinstance(x, Traced):
        raise KernelError("an operation was given something else than a tensor of its own forward pass")
    return replace(x, width=x.width if width is None else width)


_Matrix = TypeVar("_Matrix", PlacedLinear, PlacedExperts)


def _placed(weight: Linear | Experts, kind: type[_Matrix]) -> _Matrix:
    if not isinstance(weight, kind):
        raise KernelError(
            f"a split model cannot use a {type(weight).__name__}, which no backend of it loaded: see at()"
        )
    return weight
