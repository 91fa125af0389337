"""Batches of many tokens in micro-batches, which go through the stages of a forward pass one after the other.

They go in the order of their tokens.  A stage may return before it has computed; so while one backend works on a
micro-batch, the one before it is given the next.  A backend that computes before it returns, as the CPU's does, keeps
those before it waiting, not those behind it: its place is in front.  Every token stands alone, so the cuts change no
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.ops import Batch, Best, Hidden, Part, Step
from localllm.kernels.placed import SplitCache

#: Tokens of a micro-batch: enough for weights to be read seldom, and four of them in a step of 512.
MICRO_BATCH = 128
#: Their number is a multiple of this, as large as kernels' tiles.
_WHOLE_TILES = 16


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


class SplitStep(Step):
    """The stages of a forward pass, one after the other.

    Args:
        logits: float32 [most outputs, n_vocab], for those of several micro-batches.
    """

    def __init__(
        self,
        stages: Sequence[Part],
        cache: SplitCache,
        micro_batch: int,
        max_tokens: int,
        logits: NDArray[np.float32],
    ) -> None:
        self._stages, self._cache, self._logits = stages, cache, logits
        self._micro_batch, self._max_tokens = micro_batch, max_tokens

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        self._check(batch)
        if len(batch.ids) <= self._micro_batch:
            return _through(self._stages, batch).host()
        logits = self._logits

        def take(rows: NDArray[np.int64], result: Hidden) -> None:
            logits[rows] = result.host()

        _pipeline(self._stages, micro_batches(batch, self._micro_batch), take)
        whole: NDArray[np.float32] = logits[: len(batch.outputs)]
        return whole

    def best(self, batch: Batch, k: int) -> Best:
        self._check(batch)
        n = len(batch.outputs)
        best = Best(np.empty((n, k), np.int32), np.empty((n, k), np.float32))

        def take(rows: NDArray[np.int64], result: Hidden) -> None:
            best.ids[rows], best.logits[rows] = result.best(k)

        _pipeline(self._stages, micro_batches(batch, self._micro_batch), take)
        return best

    def _check(self, batch: Batch) -> None:
        n_tokens, n_outputs, most_outputs = len(batch.ids), len(batch.outputs), len(self._logits)
        if n_tokens > self._max_tokens or n_outputs > most_outputs:
            raise KernelError(
                f"a batch of {n_tokens} tokens and {n_outputs} outputs is larger than this step was compiled for, "
                f"{self._max_tokens} and {most_outputs}"
            )
        batch.check(self._cache.page_size, self._cache.n_pages)


#: Takes what came out for a micro-batch, whose rows are these of the whole batch's outputs.
Take = Callable[[NDArray[np.int64], Hidden], None]


def _pipeline(stages: Sequence[Part], batches: Sequence[MicroBatch], take: Take) -> None:
    """Sends micro-batches through all stages."""
    *first, last = stages
    under_way: tuple[MicroBatch, Hidden] | None = None
    for micro in batches:
        hidden = _through(first, micro.batch) if first else None
        # The last stage overwrites what it gave before: that is taken only now, for until then nobody had to wait.
        if under_way is not None:
            _take(*under_way, take)
        under_way = micro, last(micro.batch, hidden)
    if under_way is not None:
        _take(*under_way, take)


def _take(micro: MicroBatch, result: Hidden, take: Take) -> None:
    """Waits for the logits of a micro-batch, if it has any."""
    if len(micro.rows):
        take(micro.rows, result)
