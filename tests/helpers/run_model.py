"""Run a model on ragged batches without an engine, for the tests of models and kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.gguf import GGUFFile
from localllm.kernels.backend import Batch
from localllm.models.registry import read_model
from tests.helpers.recorder import backend_of

MAX_TOKENS = 512


def make_batch(
    parts: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    outputs: Sequence[int] | None = None,
    states: Sequence[int] | None = None,
) -> Batch:
    """Create a batch of sequences, each given as (new ids, tokens already in the cache, pages).

    ``outputs`` are the rows whose logits are computed, by default all; ``states`` are the slots of the sequences'
    recurrent states, by default the first slots.
    """
    lengths = [len(ids) for ids, _, _ in parts]
    tables = np.zeros((1, len(parts), max(len(pages) for _, _, pages in parts)), np.int32)
    for table, (_, _, pages) in zip(tables[0], parts, strict=True):
        table[: len(pages)] = pages
    return Batch(
        ids=np.concatenate([np.asarray(ids, np.int32) for ids, _, _ in parts]),
        positions=np.concatenate([np.arange(past, past + len(ids), dtype=np.int32) for ids, past, _ in parts]),
        query_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        kv_lengths=np.array([past + len(ids) for ids, past, _ in parts], np.int32),
        block_tables=tables,
        outputs=np.arange(sum(lengths), dtype=np.int32) if outputs is None else np.array(outputs, np.int32),
        states=np.arange(len(parts), dtype=np.int32) if states is None else np.array(states, np.int32),
    )


class Runner:
    """A model file loaded into a backend, with a cache of ``n_pages`` pages."""

    def __init__(
        self,
        path: Path,
        ops: Any,
        n_pages: int = 32,
        max_tokens: int = MAX_TOKENS,
        *,
        sees: bool = False,
        n_states: int = 4,
    ) -> None:
        with GGUFFile.open(path) as file:
            self.model = read_model(file, cache_type=getattr(ops, "cache_type", None) or "f16", sees=sees)
            graph = self.model.graph
            sizes = {"n_pages": (n_pages,) * len(graph.windows), "max_tokens": max_tokens, "max_outputs": MAX_TOKENS}
            self.step = backend_of(ops).compile(graph, **sizes, n_states=n_states if graph.states else 0)
        self.cache = self.step.cache

    def run(self, *parts: tuple[Sequence[int], int, Sequence[int]], outputs: Any = None) -> NDArray[np.float32]:
        """Return a copy of the logits [N, n_vocab] of one batch; see `make_batch`."""
        batch = make_batch(parts, outputs)
        tables = np.repeat(batch.block_tables, len(self.cache.windows), axis=0)  # all groups use the same tables
        return self.step(replace(batch, block_tables=tables)).copy()

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return logits [len(ids), n_vocab] of one sequence, evaluated in one batch."""
        return self.run((ids, 0, range(self.cache.n_pages[0])))


def largest_error(
    runner: Runner,
    ids: Sequence[int],
    other: Sequence[int],
    cut: int,
    expected: Callable[[Sequence[int]], NDArray[np.float32]],
) -> float:
    """Return the largest error of a model's logits, relative to the largest logit.

    Raises:
        AssertionError: a prompt in chunks and decoded tokens have other bits than the prompt at once.

    Args:
        ids, other: two texts that start with the same ``cut`` tokens.
        expected: returns the logits [T, n_vocab] of a text.
    """
    pages, rest = range(8), cut + 10

    def run(ids: Sequence[int], past: int) -> NDArray[np.float32]:
        return runner.run((ids, past, pages))

    def error(ours: NDArray[np.float32], ids: Sequence[int], first: int = 0) -> float:
        theirs = expected(ids)[first:]
        return float(np.abs(ours - theirs).max() / np.abs(theirs).max())

    assert runner.run((ids[:3], 0, pages), outputs=[]).shape == (0, runner.model.config.n_vocab)
    whole = run(ids, 0)
    chunks = [run(ids[first : first + n], first) for first, n in ((0, 7), (7, cut - 7))]
    if runner.cache.n_states:
        runner.cache.copy(None, 0, 1)  # to restore at the cut
    chunks += [run(ids[cut:rest], cut), *(run([token], rest + i) for i, token in enumerate(ids[rest:]))]
    np.testing.assert_array_equal(np.concatenate(chunks), whole)
    if runner.cache.n_states:
        runner.cache.copy(None, 1, 0)
    return max(error(whole, ids), error(run(other[cut:], cut), other, cut))
