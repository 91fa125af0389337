"""A backend whose logits tell which tokens the cache held: any fault of paging or batching changes them.

Its "keys" are the token ids themselves.  The logits of a token are a function of all ids from its sequence's
beginning up to it, read back through the block table (`logits_after`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.engine.engine import Engine
from localllm.engine.runner import ModelRunner
from localllm.kernels.ops import Batch, Best, CacheShape, Hidden, HostHidden, Step, WholeStep

N_VOCAB = 97
PAGE_SIZE = 4


def logits_after(ids: Sequence[int]) -> NDArray[np.float32]:
    """The logits [N_VOCAB] that follow ``ids``."""
    seed = hashlib.sha256(np.asarray(ids, np.int32).tobytes()).digest()[:8]
    return np.random.default_rng(int.from_bytes(seed, "little")).standard_normal(N_VOCAB, np.float32)


def greedy_after(ids: Sequence[int], n: int) -> list[int]:
    """The ``n`` tokens that greedy decoding adds to ``ids``."""
    ids = list(ids)
    for _ in range(n):
        ids.append(int(logits_after(ids).argmax()))
    return ids[-n:] if n else []


class FakeCache:
    """Pages of ids; -1 where nothing was written."""

    def __init__(self, n_pages: int) -> None:
        self.page_size = PAGE_SIZE
        self.n_pages = n_pages
        self.n_bytes = 4 * n_pages * PAGE_SIZE
        self.ids = np.full((n_pages, PAGE_SIZE), -1, np.int32)

    def copy_page(self, source: int, target: int) -> None:
        self.ids[target] = self.ids[source]


class FakeOps:
    """As much of the `Ops` protocol as an engine uses.

    Attributes:
        batches: every batch that was run.
        chosen: for each of them how many of the largest logits were asked for; 0 for all.
        most_choices: may be set before an engine is made.
        before_step: called with each batch before it is run; may raise.
    """

    name = "fake"
    page_size = PAGE_SIZE
    most_choices = 0

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.chosen: list[int] = []
        self.before_step: Callable[[Batch], None] = lambda batch: None
        self.cache: FakeCache

    def new_cache(self, shape: CacheShape, n_pages: int) -> FakeCache:
        self.cache = FakeCache(n_pages)
        return self.cache

    def cache_bytes(self, shape: CacheShape, n_pages: int) -> int:
        return 4 * n_pages * PAGE_SIZE

    def compile(self, forward: Callable[[], Any], cache: FakeCache, *, max_tokens: int, max_outputs: int) -> Step:
        own = np.empty((max_outputs, N_VOCAB), np.float32)  # reused, as a backend may

        def part(batch: Batch, hidden: Hidden | None) -> FakeLogits:
            assert 0 < len(batch.ids) <= max_tokens
            assert len(batch.outputs) <= max_outputs
            self.batches.append(batch)
            self.before_step(batch)
            histories = _write_and_read(batch, cache)
            for n, row in enumerate(batch.outputs):
                own[n] = logits_after(histories[row])
            return FakeLogits(own[: len(batch.outputs)], self.chosen)

        return WholeStep(part)


@dataclass(frozen=True)
class FakeLogits(HostHidden):
    """Logits that note how many of them are asked for."""

    chosen: list[int]

    def host(self) -> NDArray[np.float32]:
        self.chosen.append(0)
        return super().host()

    def best(self, k: int) -> Best:
        self.chosen.append(k)
        return super().best(k)


def _write_and_read(batch: Batch, cache: FakeCache) -> list[NDArray[np.int32]]:
    """Appends the batch to the cache; the ids up to and with each of its tokens."""
    n_sequences = len(batch.kv_lengths)
    assert batch.query_starts[0] == 0
    assert batch.query_starts[-1] == len(batch.ids)
    rows = [np.arange(batch.query_starts[s], batch.query_starts[s + 1]) for s in range(n_sequences)]
    for s in range(n_sequences):
        positions = batch.positions[rows[s]]
        first = batch.kv_lengths[s] - len(rows[s])
        assert positions.tolist() == list(range(first, batch.kv_lengths[s]))
        block, slot = np.divmod(positions, PAGE_SIZE)
        cache.ids[batch.block_tables[s, block], slot] = batch.ids[rows[s]]
    histories = []
    for s in range(n_sequences):
        held = cache.ids[batch.block_tables[s]].reshape(-1)
        histories += [held[: position + 1].copy() for position in batch.positions[rows[s]]]
    return histories


class FakeConfig:
    n_vocab = N_VOCAB


class FakeModel:
    """As much of `localllm.models.blocks.Model` as an engine uses."""

    config = FakeConfig()
    cache_shape = CacheShape(n_layers=1, n_kv_heads=1, head_dim=2)

    def forward(self, ops: Any) -> None:
        raise AssertionError("the fake backend computes logits without a model")


def fake_runner(
    context: int = 64, *, parallel: int = 1, max_tokens: int = 8, most_choices: int = 0
) -> tuple[ModelRunner, FakeOps]:
    ops = FakeOps()
    ops.most_choices = most_choices
    runner = ModelRunner(FakeModel(), ops, context=context, parallel=parallel, max_tokens=max_tokens)  # type: ignore[arg-type]
    return runner, ops


def fake_engine(
    context: int = 64, *, parallel: int = 1, max_tokens: int = 8, most_choices: int = 0, **settings: Any
) -> tuple[Engine, FakeOps]:
    runner, ops = fake_runner(context, parallel=parallel, max_tokens=max_tokens, most_choices=most_choices)
    return Engine(runner, **settings), ops
