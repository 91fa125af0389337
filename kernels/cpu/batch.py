"""Tables of a batch that a program reads, filled before each run in buffers of the step's arena."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.backend import Batch
from localllm.kernels.buffers import Buffer
from localllm.kernels.cpu.attention import SPLIT, TILE_ROWS, state_bytes
from localllm.kernels.cpu.cache_types import PAGE
from localllm.kernels.graph import Graph, PositionScale, Rope

#: Maximum size in bytes of the partial sums of KV splits; attention that needs more is not split.
MAX_PARTIAL_BYTES = 32 << 20

# Indices of the header: numbers of units of work.  Kernels compute the last two: the number of experts that tokens
# use, and the number of experts that are computed at once.  Two numbers for each `TileTable` follow.
ALWAYS, N_TOKENS, N_OUTPUTS, N_CHOSEN, N_SEQUENCES, N_EMBEDDED, N_USED, N_HELD, _FIRST_TABLE = range(9)

_TILE, _MERGED = 7, 5  # numbers per entry


@dataclass(eq=False)
class TileTable:
    """Division of one kind of attention into units of work."""

    slot: int  # header index of the number of tiles; the number of merged tiles follows
    group_size: int
    # tables for the kernels `attention` and `merge_partials`
    tiles: Buffer
    merged: Buffer
    max_partials: int  # maximum partials of all tiles that are divided into KV splits; 0 if tiles are never split
    partial_bytes: int
    few_tiles: int  # at most this many tiles would leave threads without work, and are split
    causal: bool = True  # whether tokens see no later tokens
    has_spans: bool = False  # whether tokens see the spans of the batch
    sees_prompt: bool = False  # whether tokens see only the prompt, the part before the batch's ``begins``
    # of gathered positions: window length, tokens per compressed entry, and the maximum number of entries.  A tile
    # then has one token
    gathered: tuple[int, int, int] = (0, 1, 0)

    def fill(self, batch: Batch, tiles: NDArray[np.int64], merged: NDArray[np.int64]) -> tuple[int, int]:
        """Divide each sequence's query rows into tiles, and a small number of tiles into KV splits.

        Returns the number of tiles and of merged tiles.
        """
        group_size = self.group_size
        unsplit: list[tuple[int, int, int, int, int, int, int]] = []
        for s, (start, stop, kv_length) in enumerate(batch.sequences()):
            window, stride, most = self.gathered
            if most:
                for row in range(0, (stop - start) * group_size, group_size):
                    length = kv_length - stop + start + row // group_size + 1
                    n_seen = min(length, window) + min(length // stride, most)
                    first_rows = range(0, group_size, TILE_ROWS)
                    sizes = [(row + i, min(TILE_ROWS, group_size - i)) for i in first_rows]
                    unsplit += [(s, *size, 0, -(-n_seen // SPLIT), -1, kv_length) for size in sizes]
                continue
            n_rows = (stop - start) * group_size
            for first in range(0, n_rows, TILE_ROWS):
                n = min(TILE_ROWS, n_rows - first)
                last = (first + n - 1) // group_size
                farthest = kv_length - (stop - start) + last if self.causal else kv_length - 1
                if self.has_spans and len(batch.ends):
                    farthest = int(batch.ends[start + last]) - 1
                if self.sees_prompt:
                    farthest = max(1, int(batch.divisions()[start + last])) - 1
                unsplit.append((s, first, n, 0, farthest // SPLIT + 1, -1, kv_length))
        n_partials = sum(n_splits for *_, n_splits, _, _ in unsplit)
        if len(unsplit) > self.few_tiles or not len(unsplit) < n_partials <= self.max_partials:
            tiles[: len(unsplit)] = unsplit
            return len(unsplit), 0
        split: list[tuple[int, int, int, int, int, int, int]] = []
        for i, (s, first, n, _, n_splits, _, kv_length) in enumerate(unsplit):
            merged[i] = s, first, n, len(split), n_splits
            split += [(s, first, n, j, j + 1, len(split) + j, kv_length) for j in range(n_splits)]
        tiles[: len(split)] = split
        return len(split), len(unsplit)


class BatchTables:
    """The tables of a batch.

    Attributes:
        positions, starts: int32 [T] and [S + 1], positions of tokens and first tokens of sequences.
        turns, lasts, firsts: int32 [T], the row of each token's angles, the last position that it sees, and the first
            position of its span or of its part of the sequence.  The same buffer as ``positions`` if they always
            equal the positions.
        embedded: int32 [n], rows that embeddings are added to.
        states: int32 [S], slots of the sequences' states.
        n_blocks: maximum pages of a sequence.
    """

    def __init__(
        self, graph: Graph, max_tokens: int, max_outputs: int, n_pages: tuple[int, ...], threads: int
    ) -> None:
        self.max_tokens, self.max_outputs, self.n_blocks = max_tokens, max_outputs, n_pages[0]
        self._n_chosen, self._threads = graph.n_chosen(), threads
        self.header = Buffer(8 * _FIRST_TABLE, is_kept=True)  # int64, see the indices above
        self.positions, self.states, self.embedded = (Buffer(4 * max_tokens, is_kept=True) for _ in range(3))
        self.turns = Buffer(4 * max_tokens, is_kept=True) if graph.has_axes else self.positions
        self._has_parts = graph.has_parts
        has_lasts = graph.has_spans or graph.has_parts
        self.lasts = Buffer(4 * max_tokens, is_kept=True) if has_lasts else self.positions
        self.firsts = Buffer(4 * max_tokens, is_kept=True) if graph.has_begins else self.positions
        self.starts = Buffer(4 * (max_tokens + 1), is_kept=True)
        # per group of caches int64 [T], page * PAGE + position in the page
        self.slots = [Buffer(8 * max_tokens, is_kept=True) for _ in n_pages]
        self.output_rows = Buffer(4 * max_outputs, is_kept=True)  # int32 [N]
        # per group int32 [S, n_blocks]
        self.block_tables = [Buffer(4 * max_tokens * self.n_blocks, is_kept=True) for _ in n_pages]
        #: Buffers that every program reads.
        self.buffers = (
            *(self.header, self.positions, self.starts, self.states, *self.slots),
            *(self.output_rows, *self.block_tables, self.embedded, self.turns, self.lasts, self.firsts),
        )
        self._tables: dict[tuple[Any, ...], TileTable] = {}
        self._ropes: dict[Rope, Buffer] = {}
        self._scales: dict[PositionScale, Buffer] = {}
        self._views: dict[Buffer, NDArray[Any]] = {}
        #: Number of positions whose angles are computed.
        self._n_angles = 0

    def tile_table(
        self,
        n_kv_heads: int,
        group_size: int,
        head: int,
        *,
        causal: bool = True,
        has_spans: bool = False,
        sees_prompt: bool = False,
        gathered: tuple[int, int, int] = (0, 1, 0),
    ) -> TileTable:
        """Return the table of an attention operation; ``head`` is the padded number of values per head."""
        key = n_kv_heads, group_size, head, causal, has_spans, sees_prompt, gathered
        if key not in self._tables:
            few = 0 if self._threads == 1 else -(-2 * self._threads // n_kv_heads) - 1
            partial_bytes = n_kv_heads * TILE_ROWS * state_bytes(head)
            most = min(few * -(-self.n_blocks * PAGE // SPLIT), MAX_PARTIAL_BYTES // partial_bytes)
            n_tiles = self.max_tokens * -(-group_size // TILE_ROWS) + most
            tiles, merged = (Buffer(8 * n, is_kept=True) for n in (_TILE * n_tiles, _MERGED * most))
            slot = self.header.n_bytes // 8
            self.header.n_bytes += 16
            sees = causal, has_spans, sees_prompt, gathered
            self._tables[key] = TileTable(slot, group_size, tiles, merged, most, partial_bytes, few, *sees)
        return self._tables[key]

    def angles(self, rope: Rope) -> Buffer:
        """Return the buffer of (cos, sin) [positions, n_pairs, 2]; a step computes missing positions.

        With axes, rows for the batch's tokens whose position differs between axes follow.
        """
        if rope not in self._ropes:
            n_rows = self.n_blocks * PAGE + (self.max_tokens if rope.axes else 0)
            self._ropes[rope] = Buffer(8 * n_rows * len(rope.frequencies), is_kept=True)
        return self._ropes[rope]

    def position_factors(self, scale: PositionScale) -> Buffer:
        """Return float32 [n]: number i is the factor of positions p with max(p + offset, 0) // length = i."""
        if scale not in self._scales:
            n = max(0, self.n_blocks * PAGE + scale.offset) // scale.length + 1
            self._scales[scale] = Buffer(4 * n, is_kept=True)
        return self._scales[scale]

    def bind(self, arena: NDArray[np.uint8]) -> None:
        """Create views of all buffers.  Called once offsets are known, before the first `fill`."""

        def view(buffer: Buffer, dtype: type[Any], *shape: int) -> None:
            data = arena[buffer.offset : buffer.offset + buffer.n_bytes]
            self._views[buffer] = data.view(dtype).reshape(-1, *shape)

        for buffer in self.buffers:
            view(buffer, np.int32)
        for buffer in (self.header, *self.slots):
            view(buffer, np.int64)
        for buffer in self.block_tables:
            view(buffer, np.int32, self.n_blocks)
        for table in self._tables.values():
            view(table.tiles, np.int64, _TILE)
            view(table.merged, np.int64, _MERGED)
        for rope, buffer in self._ropes.items():
            view(buffer, np.float32, len(rope.frequencies), 2)
        for scale, buffer in self._scales.items():
            view(buffer, np.float32)
            factors = scale.base + scale.rate * np.log1p(np.arange(buffer.n_bytes // 4))
            self._views[buffer][:] = np.maximum(factors, 1)
        self._views[self.header][:] = 1

    def header_numbers(self) -> NDArray[np.int64]:
        return self._views[self.header]

    def fill(self, batch: Batch) -> None:
        """Write a checked batch to the buffers that the program reads."""
        views, n_tokens = self._views, len(batch.ids)
        n_outputs, n_sequences = len(batch.outputs), len(batch.kv_lengths)
        views[self.positions][:n_tokens] = batch.positions
        views[self.starts][: n_sequences + 1] = batch.query_starts
        if len(batch.states):
            views[self.states][:n_sequences] = batch.states
        views[self.output_rows][:n_outputs] = batch.outputs
        blocks, places = batch.positions // PAGE, batch.positions % PAGE
        for group, slot_buffer in enumerate(self.slots):
            tables = batch.block_tables[group, :, : self.n_blocks]
            views[self.block_tables[group]][:n_sequences, : tables.shape[1]] = tables
            slots = views[slot_buffer][:n_tokens]
            for s, (start, stop, _) in enumerate(batch.sequences()):
                slots[start:stop] = tables[s, blocks[start:stop]]
            slots *= PAGE
            slots += places
        self._make_angles(max(batch.kv_lengths.tolist()))
        if self.turns is not self.positions:
            views[self.turns][:n_tokens] = self._turns(batch) if batch.axes.size else batch.positions
        if self.lasts is not self.positions:
            lasts = batch.ends - 1 if len(batch.ends) else batch.positions
            views[self.lasts][:n_tokens] = np.maximum(batch.divisions(), 1) - 1 if self._has_parts else lasts
        if self.firsts is not self.positions:
            views[self.firsts][:n_tokens] = batch.divisions()
        header = views[self.header]
        header[N_EMBEDDED] = len(batch.embedded)
        if len(batch.embedded):
            views[self.embedded][: len(batch.embedded)] = batch.embedded
        header[N_TOKENS], header[N_OUTPUTS] = n_tokens, n_outputs
        header[N_CHOSEN], header[N_SEQUENCES] = n_tokens * self._n_chosen, n_sequences
        for table in self._tables.values():
            header[table.slot : table.slot + 2] = table.fill(batch, views[table.tiles], views[table.merged])

    def _turns(self, batch: Batch) -> NDArray[np.int32]:
        """Return the row of each token's angles.  Computes rows for tokens whose position differs between axes."""
        turns: NDArray[np.int32] = batch.axes[0].copy()
        n_positions = self.n_blocks * PAGE
        rows = np.flatnonzero((batch.axes != batch.axes[0]).any(axis=0))
        turns[rows] = n_positions + np.arange(len(rows))
        for rope, buffer in self._ropes.items():
            if rope.axes:
                angles, places = self._views[buffer], batch.axes[list(rope.axes)][:, rows].T
                angles[n_positions : n_positions + len(rows)] = angles[places, np.arange(len(rope.axes))]
        return turns

    def _make_angles(self, stop: int) -> None:
        """Compute the cosines and sines of positions before ``stop``, in steps of `SPLIT` positions."""
        if stop <= self._n_angles:
            return
        stop = min(-(-stop // SPLIT) * SPLIT, self.n_blocks * PAGE)
        positions = np.arange(self._n_angles, stop, dtype=np.float64)[:, None]
        for rope, buffer in self._ropes.items():
            turns, angles = (positions + rope.position_offset) * rope.frequencies, self._views[buffer]
            angles[self._n_angles : stop, :, 0] = np.cos(turns) * rope.magnitude
            angles[self._n_angles : stop, :, 1] = np.sin(turns) * rope.magnitude
        self._n_angles = stop
