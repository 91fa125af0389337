"""A backend whose logits identify the tokens in the cache: any fault of paging or batching changes them.

Its "keys" are the token ids themselves.  The logits of a token are a function of all ids of its sequence up to
that token, read through the block table (`logits_after`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.engine.engine import MAX_WAITING, Engine, EngineLoop
from localllm.engine.runner import ModelRunner, max_outputs, n_cache_pages
from localllm.kernels.backend import Batch, HostOutput, Output, Step, TopK, top_k
from localllm.kernels.graph import Graph
from localllm.sampling import candidates
from localllm.sampling.candidates import Candidates

N_VOCAB = 97
PAGE_SIZE = 4


def logits_after(ids: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits [N_VOCAB] that follow ``ids``."""
    seed = hashlib.sha256(np.asarray(ids, np.int32).tobytes()).digest()[:8]
    return np.random.default_rng(int.from_bytes(seed, "little")).standard_normal(N_VOCAB, np.float32)


def greedy_after(ids: Sequence[int], n: int) -> list[int]:
    """Return the ``n`` tokens that greedy decoding appends to ``ids``."""
    ids = list(ids)
    for _ in range(n):
        ids.append(int(logits_after(ids).argmax()))
    return ids[-n:] if n else []


#: Size of a serialised `FakeCache` state, in numbers: the number of ids, then the ids.
_STATE_SIZE = 256


class FakeCache:
    """Pages of ids; -1 marks unwritten entries.  A state is the list of ids that it has processed."""

    def __init__(self, n_pages: int | tuple[int, ...], windows: Sequence[int | None] = (None,), n_states: int = 0):
        self.page_size, self.windows, self.n_states = PAGE_SIZE, windows, n_states
        self.n_pages = n_pages if isinstance(n_pages, tuple) else (n_pages,)
        self.n_bytes = 4 * sum(self.n_pages) * PAGE_SIZE
        self.groups = [np.full((n, PAGE_SIZE), -1, np.int32) for n in self.n_pages]
        self.states: list[list[int]] = [[-1] for _ in range(n_states)]

    @property
    def ids(self) -> NDArray[np.int32]:
        """Pages of the first group, which holds all tokens."""
        return self.groups[0]

    def copy(self, group: int | None, source: int, target: int) -> None:
        if group is None:
            self.states[target] = self.states[source].copy()
        else:
            self.groups[group][target] = self.groups[group][source]

    def n_bytes_of(self, group: int | None) -> int:
        return 4 * (_STATE_SIZE if group is None else PAGE_SIZE)

    def read(self, group: int | None, number: int) -> bytes:
        if group is not None:
            return self.groups[group][number].tobytes()
        ids = self.states[number]
        return np.pad(np.array([len(ids), *ids], np.int32), (0, _STATE_SIZE - len(ids) - 1)).tobytes()

    def write(self, group: int | None, number: int, data: bytes) -> None:
        ids = np.frombuffer(data, np.int32)
        if group is None:
            self.states[number] = ids[1 : 1 + ids[0]].tolist()
        else:
            self.groups[group][number] = ids

    def put(self, tables: Sequence[Sequence[int]], state: int, first: int, ids: Sequence[int]) -> None:
        """Append the tokens of a sequence from position ``first``, as a step does."""
        for group, table in zip(self.groups, tables, strict=True):
            for position, id_ in enumerate(ids, first):
                group[table[position // PAGE_SIZE], position % PAGE_SIZE] = id_
        if self.n_states:
            self.states[state] = [*(self.states[state] if first else []), *ids]

    def get(self, tables: Sequence[Sequence[int]], state: int, n_tokens: int) -> list[int]:
        """Return the tokens of a sequence; checks that windows and states hold the same tokens."""
        all_ids, *others = (
            [int(group[table[p // PAGE_SIZE], p % PAGE_SIZE]) for p in range(first, n_tokens)]
            for group, table, first in zip(self.groups, tables, self.first_seen(n_tokens), strict=True)
        )
        for ids in others:
            assert ids == all_ids[len(all_ids) - len(ids) :]
        assert not self.n_states or not all_ids or self.states[state] == all_ids
        return all_ids

    def first_seen(self, n_tokens: int) -> list[int]:
        """Return, for each group, the first position that the token after ``n_tokens`` attends to."""
        return [0 if window is None else max(0, n_tokens + 1 - window) for window in self.windows]


class FakeStep(Step):
    """The parts of a backend that an engine uses.

    Attributes:
        batches: every batch, in order.
        chosen: per batch, the number of largest logits requested (0: all), and the rows requested in full.
        before_step: called with each batch before it is run; may raise.
        chooses_ahead: whether the choices of the last two batches are stored.
    """

    weights = ()
    chooses_ahead = False

    def __init__(self, cache: FakeCache, max_tokens: int, max_outputs: int, max_top_k: int = 0) -> None:
        self.batches: list[Batch] = []
        self.chosen: list[tuple[int, list[int]]] = []
        self.before_step: Callable[[Batch], None] = lambda batch: None
        self.cache = cache
        self.max_top_k, self._max_tokens, self._ids = max_top_k, max_tokens, np.zeros(0, np.int32)
        # A backend may reuse these buffers.
        self._own, self._other = np.empty((2, max_outputs, N_VOCAB), np.float32)

    def run(self, batch: Batch, hidden: Output | None = None) -> FakeLogits:
        assert 0 < len(batch.ids) <= self._max_tokens
        assert len(batch.outputs) <= len(self._own)
        if batch.n_chosen:
            batch = replace(batch, ids=np.where(batch.ids < 0, self._ids[~batch.ids], batch.ids))
        if self.chooses_ahead:
            self._own, self._other = self._other, self._own
        self.batches.append(batch)
        self.before_step(batch)
        histories = _write_and_read(batch, self.cache)
        for n, row in enumerate(batch.outputs):
            self._own[n] = logits_after(histories[row])
        logits = self._own[: len(batch.outputs)]
        self._ids = np.zeros(len(logits) if batch.top_k else 0, np.int32)
        for i, (row, (k, top_p, min_p, temperature, u)) in enumerate(zip(logits, batch.draws.tolist(), strict=True)):
            if batch.top_k:
                best = candidates.top_k(Candidates(np.arange(len(row)), row), max(1, int(k)))
                kept = candidates.min_p(candidates.top_p(best, top_p), min_p or 1e-9) if k else best
                self._ids[i] = kept.ids[candidates.draw(candidates.temper(kept, temperature), u) if k else 0]
        return FakeLogits(logits, self.chosen, self._ids)


@dataclass(frozen=True)
class FakeLogits(HostOutput):
    """Logits that record the number of requested values."""

    chosen: list[tuple[int, list[int]]]
    ids: NDArray[np.int32]

    def rows(self) -> NDArray[np.float32]:
        self.chosen.append((0, []))
        return self.matrix

    def top_k(self, k: int, whole: Sequence[int] = ()) -> TopK:
        self.chosen.append((k, list(whole)))
        return top_k(self.matrix, k)._replace(whole={i: self.matrix[i] for i in whole}, chosen=self.ids)


def _write_and_read(batch: Batch, cache: FakeCache) -> list[NDArray[np.int32]]:
    """Append the batch to the cache; return the ids up to and including each new token."""
    n_sequences = len(batch.kv_lengths)
    assert batch.query_starts[0] == 0
    assert batch.query_starts[-1] == len(batch.ids)
    rows = [np.arange(batch.query_starts[s], batch.query_starts[s + 1]) for s in range(n_sequences)]
    for s in range(n_sequences):
        positions = batch.positions[rows[s]]
        first = batch.kv_lengths[s] - len(rows[s])
        assert positions.tolist() == list(range(first, batch.kv_lengths[s]))
        tables = batch.block_tables[:, s].tolist()
        before = cache.get(tables, batch.states[s], first)
        cache.put(tables, batch.states[s], first, batch.ids[rows[s]].tolist())
        assert cache.get(tables, batch.states[s], batch.kv_lengths[s])[:first] == before
    histories = []
    for s in range(n_sequences):
        held = cache.ids[batch.block_tables[0, s]].reshape(-1)
        histories += [held[: position + 1].copy() for position in batch.positions[rows[s]]]
    return histories


def fake_runner(
    context: int = 64,
    *,
    parallel: int = 1,
    max_tokens: int = 8,
    max_top_k: int = 0,
    cache: FakeCache | None = None,
) -> tuple[ModelRunner, FakeStep]:
    n_tokens = min(max_tokens, context)
    cache = cache or FakeCache(n_cache_pages(Graph(), context, parallel, PAGE_SIZE))
    step = FakeStep(cache, n_tokens, max_outputs(N_VOCAB, n_tokens), max_top_k)
    return ModelRunner(step, n_vocab=N_VOCAB, context=context, max_tokens=max_tokens), step


def fake_engine(
    context: int = 64,
    *,
    parallel: int = 1,
    max_tokens: int = 8,
    max_top_k: int = 0,
    max_waiting: int = MAX_WAITING,
    cache: FakeCache | None = None,
    **settings: Any,
) -> tuple[Engine, FakeStep]:
    runner, step = fake_runner(context, parallel=parallel, max_tokens=max_tokens, max_top_k=max_top_k, cache=cache)
    return Engine(EngineLoop(runner, **settings), max_waiting=max_waiting), step
