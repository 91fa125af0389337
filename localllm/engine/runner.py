"""Evaluates batches: a model's compiled step, and the cache that it reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.engine.cache import CachedSequence, PagedCache, n_window_pages
from localllm.kernels.backend import Batch, HostOutput, Step, TopK
from localllm.kernels.graph import Graph, Value

#: Tokens that one step evaluates at most.
MAX_TOKENS = 512

#: What is kept of windows and of recurrent states for prompts that begin like earlier ones: those at so many places
#: for each sequence that can run, and where more fits into so many bytes, that.
KEPT_ENDS, KEPT_BYTES = 2, 256 << 20
#: Tokens of a prompt or a reply that is short.
_SHORT_TURN = 128

#: Bytes of logits that one step computes at most.
MAX_LOGITS_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one sequence has in a batch.

    Attributes:
        sequence: has pages reserved up to the end of the chunk.
        ids: the tokens to evaluate.
        n_outputs: for how many of the last of them logits are wanted.
        start: position of the first of them; what the cache holds from there on is overwritten.
    """

    sequence: CachedSequence
    ids: list[int]
    n_outputs: int
    start: int


class ModelRunner:
    """A model on its device, with its cache.  Used by one thread.

    Attributes:
        cache: which tokens are where.
        context: tokens that a sequence can hold.
        n_vocab: logits a token.
        max_tokens: tokens that one step evaluates at most.
        max_outputs: rows of logits that one step computes at most.
        max_top_k: largest logits that are found on the device; 0 where all lie in memory of the host anyway.
        hidden: hidden states that can be read after a step, where something drafts from them.
    """

    def __init__(
        self, step: Step, *, n_vocab: int, context: int, max_tokens: int = MAX_TOKENS, hidden: Value | None = None
    ) -> None:
        """``step`` was compiled for ``max_tokens`` tokens, or as many as the context has, and their `max_outputs`."""
        self.context = context
        self.n_vocab = n_vocab
        self.max_tokens = min(max_tokens, context)
        self.max_outputs = max_outputs(n_vocab, self.max_tokens)
        self.max_top_k = step.max_top_k
        self.cache = PagedCache(step.cache)
        self.hidden = hidden
        self._step = step

    def run(self, chunks: Sequence[Chunk], top_k: int = 0, whole: Sequence[int] = ()) -> NDArray[np.float32] | TopK:
        """Evaluates a batch; writes the cache's pages, but records nothing of it (`PagedCache.append`).

        Returns:
            The logits [rows, n_vocab] of all chunks in turn, or only the ``top_k`` largest of each row, and all of
            those ``whole``: the backend's own memory, good until the next call.
        """
        batch = make_batch(chunks, self.cache.page_size)
        for chunk in chunks:
            chunk.sequence.is_ahead = True
        return self._step.top_k(batch, top_k, whole) if 0 < top_k <= self.max_top_k else self._step(batch)

    def continued(self, chunks: Sequence[Chunk], hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """As `run`, of a graph that begins with hidden states of all tokens, [T, d]."""
        return self._step.run(make_batch(chunks, self.cache.page_size), HostOutput(hidden)).rows()

    def hidden_rows(self) -> NDArray[np.float32]:
        """The `hidden` states [T, d] of the last step, good until the next one."""
        assert self.hidden is not None
        rows: NDArray[np.float32] = self._step.value(self.hidden)
        return rows


def n_cache_pages(graph: Graph, context: int, parallel: int, page_size: int) -> tuple[int, ...]:
    """Pages of each group of a cache (`Graph.windows`) for ``parallel`` sequences of ``context`` tokens.

    Where there is a window, they hold those of all sequences, the tokens of a step, and as much again as `KEPT_ENDS`
    and `KEPT_BYTES` say.  No group has more than that of all tokens.
    """
    of_all = parallel * -(-context // page_size)
    n_pages = [of_all]
    for window in graph.windows[1:]:
        page_bytes = page_size * sum(c.bytes_per_token() for c in graph.caches.values() if c.window == window)
        of_windows = parallel * n_window_pages(window or 1, page_size)
        kept = max(KEPT_ENDS * of_windows, KEPT_BYTES // page_bytes)
        n_pages.append(min(of_all, of_windows + -(-MAX_TOKENS // page_size) + kept))
    return tuple(n_pages)


def n_states(graph: Graph, context: int, parallel: int) -> int:
    """Slots for the recurrent states of ``parallel`` sequences of ``context`` tokens; 0 where no layer has any.

    Further ones are for snapshots: as many as `KEPT_ENDS` and `KEPT_BYTES` say, but no more than the cache has short
    prompts and replies.
    """
    n_bytes = 4 * sum(state.n_values for states in graph.states.values() for state in states)
    if not n_bytes:
        return 0
    most = min(KEPT_BYTES // n_bytes, parallel * context // _SHORT_TURN)
    return parallel + max(KEPT_ENDS * parallel, most)


def max_outputs(n_vocab: int, max_tokens: int) -> int:
    """Rows of logits that one step computes at most."""
    return max(1, min(max_tokens, MAX_LOGITS_BYTES // (4 * n_vocab)))


def make_batch(chunks: Sequence[Chunk], page_size: int) -> Batch:
    """The chunks laid end to end, as a backend takes them."""
    ids: list[int] = []
    positions: list[int] = []
    query_starts = [0]
    kv_lengths: list[int] = []
    outputs: list[int] = []
    n_blocks = max(-(-(chunk.start + len(chunk.ids)) // page_size) for chunk in chunks)
    block_tables = np.zeros((len(chunks[0].sequence.pages), len(chunks), n_blocks), np.int32)
    for s, chunk in enumerate(chunks):
        stop = chunk.start + len(chunk.ids)
        ids += chunk.ids
        positions += range(chunk.start, stop)
        outputs += range(len(ids) - chunk.n_outputs, len(ids))
        query_starts.append(len(ids))
        kv_lengths.append(stop)
        for group, pages in enumerate(chunk.sequence.pages):
            block_tables[group, s, : len(pages)] = pages[:n_blocks]
    return Batch(
        ids=np.array(ids, np.int32),
        positions=np.array(positions, np.int32),
        query_starts=np.array(query_starts, np.int32),
        kv_lengths=np.array(kv_lengths, np.int32),
        block_tables=block_tables,
        outputs=np.array(outputs, np.int32),
        states=np.array([chunk.sequence.state for chunk in chunks], np.int32),
    )
