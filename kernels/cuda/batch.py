"""How a batch lies in a device's memory: batch.cuh says how kernels see its header."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.backend import Batch
from localllm.kernels.cuda.cache import PAGE

#: What counts a tensor's rows: places in a batch's header (batch.cuh).
N_TOKENS, N_OUTPUTS, N_SEQUENCES, N_PLACES = range(4)
_HEADER = 4


class BatchLayout:
    """How a batch lies in the one block of int32 that a step uploads: the header first, block tables last.

    A sequence has its block tables of all groups side by side.

    Args:
        n_pages: of the cache's groups: a block table may have as many entries as the first.
    """

    def __init__(self, max_tokens: int, max_outputs: int, n_pages: tuple[int, ...]) -> None:
        sizes = (_HEADER, max_tokens, max_tokens, max_outputs, max_tokens + 1, max_tokens, max_tokens)
        bounds = np.cumsum([0, *sizes, *(max_tokens for _ in n_pages)]).tolist()
        parts = [*map(slice, bounds, bounds[1:])]
        self.header, self.ids, self.positions, self.outputs, self.starts, self.lengths = parts[:6]
        self.states, *self.slots = parts[6:]
        self.tables: int = bounds[-1]
        self.n_groups, self.n_blocks = len(n_pages), max(1, n_pages[0])
        #: Entries from one sequence's tables to the next one's.
        self.table_stride = self.n_groups * self.n_blocks
        self.n_words: int = self.tables + max_tokens * self.table_stride

    def words_of(self, n_sequences: int) -> int:
        """The words that batches of so many sequences take at most."""
        return self.tables + n_sequences * self.table_stride

    def fill(self, words: NDArray[np.int32], batch: Batch) -> int:
        """Writes a batch that was checked; returns the words that it takes."""
        n_tokens, n_sequences = len(batch.ids), len(batch.kv_lengths)
        words[:3] = n_tokens, len(batch.outputs), n_sequences
        tables = batch.block_tables[:, :, : self.n_blocks]
        sequences = np.repeat(np.arange(n_sequences), np.diff(batch.query_starts))
        slots = tables[:, sequences, batch.positions // PAGE] * np.int32(PAGE) + batch.positions % PAGE
        for part, values in (
            (self.ids, batch.ids),
            (self.positions, batch.positions),
            (self.outputs, batch.outputs),
            (self.starts, batch.query_starts),
            (self.lengths, batch.kv_lengths),
            (self.states, batch.states),
            *zip(self.slots, slots, strict=True),
        ):
            words[part.start : part.start + len(values)] = values
        end = self.words_of(n_sequences)
        own = words[self.tables : end].reshape(n_sequences, self.n_groups, self.n_blocks)
        own[:, :, : tables.shape[2]] = tables.swapaxes(0, 1)
        return end
