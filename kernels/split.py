"""The `Ops` protocol over several backends, each with some of a model's layers: several GPUs, or CPU and GPU.

The forward function is traced once: its operations are written down, and the list is cut where the weights of one
begin to lie on the next backend.  Only the residual stream crosses such a cut, so each piece is a forward pass of its
own, from the hidden states of the one before it, and its backend compiles it as it would any other.

**Pipelining.**  A batch of many tokens is cut in micro-batches, which go through all parts one after the other, in
the order of the tokens.  A part may return before it has computed; so while one backend works on a micro-batch, the
one before it is given the next.  A backend that computes before it returns, as the CPU's does, keeps those before it
waiting, not those behind it: its place is in front.  Every token stands alone, so the cuts change no bits.

**Pages.**  The cache has a part on each backend, which holds its layers.  A page has as many tokens as the least
common multiple of the backends' own pages, and names a run of neighbours in each part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.ops import (
    Backend,
    Batch,
    CacheShape,
    Hidden,
    KVCache,
    Linear,
    Loader,
    Ops,
    Part,
    Place,
    Rope,
    Step,
    Tensor,
    Weight,
    Widening,
)

#: Tokens of a micro-batch: enough for weights to be read seldom, and four of them in a step of 512.
MICRO_BATCH = 128
#: Their number is a multiple of this, as large as kernels' tiles.
_WHOLE_TILES = 16


# -- What is loaded ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placed:
    """A vector or table of so many values a row, as the backend of that number holds it."""

    backend: int
    held: Any
    width: int


@dataclass(frozen=True)
class PlacedLinear(Linear):
    """A matrix as the backend of that number holds it."""

    backend: int
    held: Linear

    @property
    def n_in(self) -> int:
        return self.held.n_in

    @property
    def n_out(self) -> int:
        return self.held.n_out

    @property
    def format(self) -> str:
        return self.held.format

    @property
    def n_bytes(self) -> int:
        return self.held.n_bytes


@dataclass(frozen=True)
class PlacedLoader(Loader):
    """Loads into the backend of that number, and writes it on what it loads."""

    backend: int
    loader: Loader

    def load_linear(
        self, weight: Weight, bias: Weight | None = None, *, widening: Widening | None = None
    ) -> PlacedLinear:
        return PlacedLinear(self.backend, self.loader.load_linear(weight, bias, widening=widening))

    def packed_bytes(self, weight: Weight) -> int:
        return self.loader.packed_bytes(weight)

    def load_vector(self, weight: Weight) -> Placed:
        return Placed(self.backend, self.loader.load_vector(weight), weight.shape[0])

    def load_embedding(self, weight: Weight, packed: Linear | None = None) -> Placed:
        if packed is not None and not (isinstance(packed, PlacedLinear) and packed.backend == self.backend):
            raise KernelError("an embedding cannot be taken from a matrix that another backend holds")
        table = self.loader.load_embedding(weight, None if packed is None else packed.held)
        return Placed(self.backend, table, weight.shape[1])


@dataclass(frozen=True)
class SplitCache:
    """Keys and values of each backend's layers, in a cache of its own."""

    parts: tuple[KVCache, ...]
    page_size: int
    n_pages: int

    @property
    def n_bytes(self) -> int:
        return sum(part.n_bytes for part in self.parts)

    def copy_page(self, source: int, target: int) -> None:
        for part in self.parts:
            n = self.page_size // part.page_size
            for i in range(n):
                part.copy_page(n * source + i, n * target + i)


# -- What is traced ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Traced:
    """A tensor of the forward pass that is traced: a row of so many values for each token, or each output."""

    width: int
    of_tokens: bool = True


@dataclass(frozen=True)
class _Call:
    """An operation: called with a backend and ``inputs`` it gives ``results``; nobody needs ``last`` afterwards."""

    run: Callable[[Backend, Sequence[Tensor]], Sequence[Tensor]]
    inputs: tuple[Traced, ...]
    results: tuple[Traced, ...]
    last: tuple[Traced, ...] = ()


@dataclass(frozen=True)
class _Piece:
    """The operations of one backend, from ``begin``, hidden states computed elsewhere, to ``end``."""

    backend: int
    begin: Traced | None
    calls: tuple[_Call, ...]
    end: Traced

    def run(self, ops: Backend) -> Tensor:
        """Does them: the forward function of a part."""
        values: dict[Traced, Tensor] = {}
        if self.begin is not None:
            values[self.begin] = ops.hidden(self.begin.width)
        for call in self.calls:
            results = call.run(ops, [values[x] for x in call.inputs])
            values.update(zip(call.results, results, strict=True))
            del results
            for x in call.last:
                del values[x]
        return values[self.end]


class _Trace:
    """The operations of a forward pass while it is traced."""

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []
        #: The piece that the next operation is added to.
        self.backend = 0
        self._begin: Traced | None = None
        self._calls: list[_Call] = []
        self._known: set[Traced] = set()

    def add(
        self,
        backend: int | None,
        inputs: Sequence[Traced],
        results: Sequence[Traced],
        run: Callable[[Backend, Sequence[Tensor]], Sequence[Tensor]],
    ) -> None:
        """Adds an operation, on the backend that has its weights; without any, on the one that is at work."""
        if backend is not None and backend > self.backend and len(inputs) == 1:
            self._cut(inputs[0], backend)
        if backend not in (None, self.backend) or not all(self._knows(x) for x in inputs):
            raise KernelError(
                f"an operation on backend {self.backend if backend is None else backend} of a split model was given "
                "what lies on another: only hidden states, of each token, can go to the next"
            )
        self._calls.append(_Call(run, tuple(inputs), tuple(results)))
        self._known.update(results)

    def _cut(self, x: Traced, backend: int) -> None:
        """Ends the piece with ``x``; the next one begins with it, on another backend."""
        if self._knows(x) and x.of_tokens:
            self.end(x)
            self.backend, self._begin, self._calls, self._known = backend, x, [], {x}

    def _knows(self, x: Tensor) -> bool:
        """Whether it is a tensor of the piece."""
        return isinstance(x, Traced) and x in self._known

    def end(self, result: Traced) -> None:
        """Ends the piece with its result."""
        if not self._knows(result):
            raise KernelError("a forward pass ended with something else than a tensor of its last backend")
        needed = {result}
        calls = []
        for call in reversed(self._calls):
            last = {*call.inputs, *call.results} - needed
            needed |= last
            calls.append(replace(call, last=tuple(last)))
        self.pieces.append(_Piece(self.backend, self._begin, tuple(reversed(calls)), result))


# -- The backends as one -------------------------------------------------------------------------------------------


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
        self._trace: _Trace | None = None

    @property
    def name(self) -> str:
        return " + ".join(backend.name for backend in self.backends)

    @property
    def page_size(self) -> int:
        return lcm(*(backend.page_size for backend in self.backends))

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
        trace = self._trace = _Trace()
        try:
            result = forward()
            trace.end(result)
        finally:
            self._trace = None
        stages = [self._stage(piece, cache, max_tokens, max_outputs) for piece in trace.pieces]
        logits = np.empty((max_outputs, result.width), np.float32)

        def step(batch: Batch) -> NDArray[np.float32]:
            if len(batch.ids) > max_tokens or len(batch.outputs) > max_outputs:
                raise KernelError(
                    f"a batch of {len(batch.ids)} tokens and {len(batch.outputs)} outputs is larger than this step "
                    f"was compiled for, {max_tokens} and {max_outputs}"
                )
            batch.check(cache.page_size, cache.n_pages)
            if len(batch.ids) <= self._micro_batch:
                return _through(stages, batch).host()
            _pipeline(stages, micro_batches(batch, self._micro_batch), logits)
            rows: NDArray[np.float32] = logits[: len(batch.outputs)]
            return rows

        return step

    def _stage(self, piece: _Piece, cache: SplitCache, max_tokens: int, max_outputs: int) -> Part:
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
    def _now(self) -> _Trace:
        if self._trace is None:
            raise KernelError("operations of a split model run only inside a forward pass: see compile()")
        return self._trace

    def _check_placed(self, *weights: Any) -> int | None:
        """The backend that all weights of an operation lie on; None without any."""
        placed = [weight for weight in weights if weight is not None]
        if not all(isinstance(weight, Placed | PlacedLinear) for weight in placed):
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
        matrix = _placed(weight)
        y = _like(x, matrix.n_out)
        inputs = [x] if residual is None else [x, residual]
        self._add(inputs, [matrix], [y], lambda ops, given: [ops.linear(given[0], matrix.held, *given[1:])])
        return y

    def linears(self, x: Traced, weights: Sequence[Linear]) -> list[Traced]:
        matrices = [_placed(weight) for weight in weights]
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


def _placed(weight: Linear) -> PlacedLinear:
    if not isinstance(weight, PlacedLinear):
        raise KernelError(
            f"a split model cannot use a {type(weight).__name__}, which no backend of it loaded: see at()"
        )
    return weight


# -- Batches -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch:
    """Neighbouring tokens of a batch, as a batch; ``rows`` [N] are the places of its outputs among the batch's."""

    batch: Batch
    rows: NDArray[np.int64]


def micro_batches(batch: Batch, n_tokens: int) -> list[MicroBatch]:
    """Cuts a batch into parts of at most ``n_tokens`` and about the same size, in the order of its tokens.

    Where a cut goes through a sequence, its first part ends in the cache where the second one begins.
    """
    n = len(batch.ids)
    if n <= n_tokens:
        return [MicroBatch(batch, np.arange(len(batch.outputs)))]
    even = -(-n // -(-n // n_tokens))
    size = min(n_tokens, -(-even // _WHOLE_TILES) * _WHOLE_TILES)
    return [_rows(batch, start, min(start + size, n)) for start in range(0, n, size)]


def _rows(batch: Batch, start: int, stop: int) -> MicroBatch:
    """The tokens start : stop."""
    starts = np.clip(batch.query_starts, start, stop)
    within = np.flatnonzero(np.diff(starts))  # the sequences that have tokens there
    lasts = starts[within + 1] - 1
    rows = np.flatnonzero((batch.outputs >= start) & (batch.outputs < stop))
    part = Batch(
        ids=batch.ids[start:stop],
        positions=batch.positions[start:stop],
        query_starts=np.append(starts[within], stop).astype(np.int32) - np.int32(start),
        kv_lengths=batch.positions[lasts] + np.int32(1),
        block_tables=batch.block_tables[within],
        outputs=batch.outputs[rows] - np.int32(start),
    )
    return MicroBatch(part, rows)


def in_smaller_pages(batch: Batch, n: int) -> Batch:
    """The batch over a cache each of whose pages is a run of ``n``."""
    if n == 1:
        return batch
    tables = batch.block_tables[:, :, None] * n + np.arange(n, dtype=np.int32)
    return replace(batch, block_tables=tables.reshape(len(tables), -1).astype(np.int32))


def _through(stages: Sequence[Part], batch: Batch, hidden: Hidden | None = None) -> Hidden:
    """Sends a batch through some stages."""
    for stage in stages:
        hidden = stage(batch, hidden)
    if hidden is None:
        raise KernelError("a forward pass without any stage has no result")
    return hidden


def _pipeline(stages: Sequence[Part], batches: Sequence[MicroBatch], logits: NDArray[np.float32]) -> None:
    """Sends micro-batches through all stages, and puts what comes out into ``logits``."""
    *first, last = stages
    under_way: tuple[MicroBatch, Hidden] | None = None
    for micro in batches:
        hidden = _through(first, micro.batch) if first else None
        # The last stage overwrites what it gave before: that is taken only now, for until then nobody had to wait.
        if under_way is not None:
            _take(*under_way, logits)
        under_way = micro, last(micro.batch, hidden)
    if under_way is not None:
        _take(*under_way, logits)


def _take(micro: MicroBatch, result: Hidden, logits: NDArray[np.float32]) -> None:
    """Waits for the logits of a micro-batch, if it has any."""
    if len(micro.rows):
        logits[micro.rows] = result.host()
