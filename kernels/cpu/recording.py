"""A forward pass on the CPU while it is recorded and afterwards: its buffers, its instructions, and what they read.

A step fills in the batch (`Recording.fill`) before the program of the instructions runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.cpu import elementwise
from localllm.kernels.cpu.attention import SPAN, TILE_ROWS, state_bytes
from localllm.kernels.cpu.cache_types import CACHE_LAYOUTS, PAGE, CacheLayout
from localllm.kernels.cpu.compiler import Variant, variant
from localllm.kernels.cpu.memory import aligned_zeros, padded
from localllm.kernels.cpu.program import Instruction, Workers
from localllm.kernels.cpu.target import Target
from localllm.kernels.cpu.tiles import RECORD, TOKENS
from localllm.kernels.embedding import EmbeddingTable
from localllm.kernels.ops import Batch, CacheShape, Hidden, Rope, hidden_rows

#: Bytes for what spans of the cache come to; tiles that need more are not cut.
MOST_PART_BYTES = 32 << 20

# Numbers in a program's header.  The last one is not a batch's, but what kernels find: experts that tokens go to.
ALWAYS, N_TOKENS, N_OUTPUTS, N_TILES, N_MERGED, N_CHOSEN, N_USED = range(7)


@dataclass(frozen=True)
class CPUCache:
    """Blocks of keys and of values, [n_layers, n_pages, G, bytes]; `localllm.kernels.cpu.cache_types` draws them."""

    keys: NDArray[np.uint8]
    values: NDArray[np.uint8]
    shape: CacheShape
    workers: Workers
    page_size: int = PAGE

    @property
    def n_pages(self) -> int:
        return int(self.keys.shape[1])

    @property
    def layout(self) -> CacheLayout:
        return CACHE_LAYOUTS[self.shape.type]

    @property
    def head(self) -> int:
        """Values that a head takes, padding included."""
        return self.layout.head(self.shape.head_dim)

    @property
    def constants(self) -> dict[str, int]:
        """What the kernel that appends to it is compiled for."""
        return {"HEAD": self.head, "BLOCK": self.keys.shape[3]}

    @property
    def n_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def copy_page(self, source: int, target: int) -> None:
        self.workers.settle()
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]


class Buffer:
    """A float32 matrix [rows, padded width] that instructions read and write.

    How many of its rows a batch uses is ``header[slot]``.  Its memory goes back to the recording with the last
    reference to it, to become that of a later buffer; unless that is not ``shared``: then it is zero at first, and
    stays so where no instruction of this buffer writes.
    """

    def __init__(self, recording: Recording, slot: int, width: int, *, shared: bool = True) -> None:
        self.recording = recording
        self.slot = slot
        self.width = width
        self.stride = 4 * padded(width)
        self.rows = recording.most_rows(slot)
        self.shared = shared
        self._memory = [recording.take(self.rows * self.stride) if shared else recording.new(self.rows * self.stride)]
        self._records = 0

    @property
    def address(self) -> int:
        return self._memory[0].ctypes.data

    def matrix(self) -> NDArray[np.float32]:
        """The buffer, padding included."""
        n = self.rows * self.stride
        return self._memory[0][:n].view(np.float32).reshape(self.rows, -1)

    def put(self, rows: NDArray[np.float32]) -> None:
        """Fills the first rows with these [n, width], and the padding behind them with zeros."""
        x = self.matrix()
        x[: len(rows), : self.width] = rows
        x[: len(rows), self.width :] = 0

    def records(self, target: Target) -> int:
        """The address of its rows in integers, as `tiles` draws them; the first call adds what makes them."""
        if not self._records:
            n_blocks = self.width // 32
            if len(self._memory) == 1:
                self._memory.append(self.recording.take(-(-self.rows // TOKENS) * TOKENS * n_blocks * RECORD))
            self._records = self._memory[1].ctypes.data
            arguments = (self.address, n_blocks, self.stride, self._records)
            self.recording.add(variant(elementwise.quantise, target), arguments, 1, self.slot)
        return self._records

    def changed(self) -> Buffer:
        """The buffer itself, from whose rows in integers no more can be taken: an instruction overwrites it."""
        self._records = 0
        return self

    def __del__(self) -> None:
        self.recording.free += self._memory[0 if self.shared else 1 :]


class ChosenExperts:
    """The experts that each token goes to, and their pairs brought together: `localllm.kernels.cpu.experts` draws it.

    As of a `Buffer`, its memory goes back to the recording with the last reference to it.
    """

    def __init__(self, recording: Recording, n_experts: int) -> None:
        self.recording, self.n_experts = recording, n_experts
        n_pairs = recording.most_rows(N_CHOSEN)
        #: Places that pairs can have: experts begin with whole tiles.
        self.n_places = (n_pairs + (TOKENS - 1) * min(n_experts, n_pairs)) // TOKENS * TOKENS
        words = (n_pairs, -(-n_pairs // 2), n_experts, n_pairs, self.n_places, 3 * n_experts)
        self._memory = recording.take(8 * sum(words))
        starts = itertools.accumulate(words, initial=0)
        parts = (self._memory.ctypes.data + 8 * start for start in starts)
        self.ids, self.shares, self.cursors, self.places, self.pairs, self.entries, _ = parts

    def __del__(self) -> None:
        self.recording.free.append(self._memory)


class Recording:
    """Instructions and the memory they use, while a forward pass is recorded and afterwards."""

    def __init__(self, cache: CPUCache, max_tokens: int, max_outputs: int, threads: int) -> None:
        self.cache = cache
        #: Tiles of attention that leave threads without work: so few are cut into spans of the cache.
        self.few_tiles = 0 if threads == 1 else -(-2 * threads // cache.shape.n_kv_heads) - 1
        self.part_bytes = cache.shape.n_kv_heads * TILE_ROWS * state_bytes(cache.head)
        self.max_parts = min(self.few_tiles * -(-cache.n_pages * PAGE // SPAN), MOST_PART_BYTES // self.part_bytes)
        self.max_tokens, self.max_outputs = max_tokens, max_outputs
        self.instructions: list[Instruction] = []
        #: Arrays whose addresses stand in the instructions.
        self.operands: list[object] = []
        self.memory: list[NDArray[np.uint8]] = []
        self.free: list[NDArray[np.uint8]] = []
        self.ropes: list[tuple[Rope, NDArray[np.float32]]] = []
        #: Products of activations and weights for each token.
        self.n_products = 0
        #: Experts that each token goes to.
        self.n_chosen = 0
        #: Positions whose angles were made.
        self.n_angles = 0
        self.embeddings: list[tuple[EmbeddingTable, float, Buffer]] = []
        #: What hidden states computed elsewhere are put into, if the forward pass begins with them.
        self.hidden: Buffer | None = None
        # What a step fills in.
        self.header = np.ones(7, np.int64)
        self.positions = np.zeros(max_tokens, np.int32)
        self.starts = np.zeros(max_tokens, np.int32)
        self.slots = np.zeros(max_tokens, np.int64)
        self.output_rows = np.zeros(max_outputs, np.int32)
        self.block_tables = np.zeros((max_tokens, cache.n_pages), np.int32)
        self.group_size = 0
        self.tiles = np.zeros((0, 6), np.int64)
        self.merged = np.zeros((0, 5), np.int64)
        self.parts: NDArray[np.uint8] | None = None

    def most_rows(self, slot: int) -> int:
        """Rows of a tensor whose rows ``slot`` counts, at most."""
        return {N_TOKENS: self.max_tokens, N_OUTPUTS: self.max_outputs, N_CHOSEN: self.max_tokens * self.n_chosen}[
            slot
        ]

    def choose(self, k: int) -> None:
        """Says how many experts a token goes to; all layers must agree."""
        if self.n_chosen not in (0, k):
            raise KernelError(f"layers with {self.n_chosen} and with {k} experts to a token cannot be mixed")
        self.n_chosen = k

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        """Memory of at least ``n_bytes``, with anything in it: the smallest free piece that does, else a new one."""
        fitting = [m for m in self.free if n_bytes <= m.nbytes <= 2 * n_bytes]
        if not fitting:
            return self.new(n_bytes)
        best = min(fitting, key=len)
        self.free = [m for m in self.free if m is not best]
        return best

    def new(self, n_bytes: int) -> NDArray[np.uint8]:
        """Memory of ``n_bytes`` that is zero."""
        self.memory.append(aligned_zeros(n_bytes, np.uint8))
        return self.memory[-1]

    def add(self, v: Variant, arguments: Sequence[int | float], units: int, slot: int, *, wait: bool = True) -> None:
        self.instructions.append(Instruction(v, arguments, units, slot, wait))

    def rope_angles(self, rope: Rope) -> int:
        """The address of (cos, sin) [positions, n_pairs, 2]; a step makes those that it is the first to need."""
        for known, angles in self.ropes:
            if known is rope:
                return angles.ctypes.data
        self.ropes.append((rope, aligned_zeros((self.cache.n_pages * PAGE, len(rope.frequencies), 2), np.float32)))
        return self.ropes[-1][1].ctypes.data

    def make_angles(self, stop: int) -> None:
        """Makes the angles of positions before ``stop``."""
        if stop <= self.n_angles:
            return
        stop = min(-(-stop // SPAN) * SPAN, self.cache.n_pages * PAGE)
        positions = np.arange(self.n_angles, stop, dtype=np.float64)[:, None]
        for rope, angles in self.ropes:
            turns = positions * rope.frequencies
            angles[self.n_angles : stop, :, 0] = np.cos(turns) * rope.magnitude
            angles[self.n_angles : stop, :, 1] = np.sin(turns) * rope.magnitude
        self.n_angles = stop

    def use_groups_of(self, group_size: int) -> None:
        """Says how many query heads share a key/value head; all layers must agree."""
        if self.group_size not in (0, group_size):
            raise KernelError(
                f"layers with {self.group_size} and with {group_size} query heads to a key/value head cannot be mixed"
            )
        if not self.group_size:
            self.group_size = group_size
            n_tiles = self.max_tokens * -(-group_size // TILE_ROWS)
            self.tiles = np.zeros((n_tiles + self.max_parts, 6), np.int64)
            self.merged = np.zeros((self.max_parts, 5), np.int64)

    def use_parts(self) -> int:
        """The address of memory for what spans of the cache come to; 0 if none are cut."""
        if self.parts is None and self.max_parts:
            self.parts = self.new(self.max_parts * self.part_bytes)
        return self.parts.ctypes.data if self.parts is not None else 0

    def fill(self, batch: Batch, hidden: Hidden | None = None) -> None:
        """Puts a batch, and the hidden states that the forward pass begins with, where the program reads them.

        Raises:
            KernelError: it is too large, an index in it is out of range, or they do not fit it: kernels check none.
        """
        n_tokens, n_outputs, n_sequences = len(batch.ids), len(batch.outputs), len(batch.kv_lengths)
        if n_tokens > self.max_tokens or n_outputs > self.max_outputs:
            raise KernelError(
                f"a batch of {n_tokens} tokens and {n_outputs} outputs is larger than this step was compiled for, "
                f"{self.max_tokens} and {self.max_outputs}"
            )
        batch.check(PAGE, self.cache.n_pages)
        self.positions[:n_tokens] = batch.positions
        self.starts[:n_sequences] = batch.query_starts[:-1]
        self.output_rows[:n_outputs] = batch.outputs
        self.block_tables[:n_sequences, : batch.block_tables.shape[1]] = batch.block_tables
        pages, places = batch.positions // PAGE, batch.positions % PAGE
        for s, (start, stop, _) in enumerate(batch.sequences()):
            self.slots[start:stop] = batch.block_tables[s, pages[start:stop]]
        self.slots[:n_tokens] *= PAGE
        self.slots[:n_tokens] += places
        self.make_angles(max(batch.kv_lengths.tolist()))
        self.header[N_TOKENS], self.header[N_OUTPUTS] = n_tokens, n_outputs
        self.header[N_CHOSEN] = n_tokens * self.n_chosen
        self._fill_tiles(batch)
        for table, scale, buffer in self.embeddings:
            if batch.ids.min() < 0 or batch.ids.max() >= table.shape[0]:
                raise KernelError(f"a batch has token ids outside the vocabulary of {table.shape[0]}")
            rows = table.rows(batch.ids)
            buffer.put(rows if scale == 1.0 else rows * np.float32(scale))
        if self.hidden is not None:
            self.hidden.put(hidden_rows(hidden, n_tokens, self.hidden.width))

    def _fill_tiles(self, batch: Batch) -> None:
        """Cuts each sequence's query rows into tiles for the attention kernel, and few of them into spans."""
        group_size = self.group_size
        if not group_size:  # a forward pass without attention
            self.header[N_TILES] = self.header[N_MERGED] = 0
            return
        tiles: list[tuple[int, int, int, int, int, int]] = []
        for s, (start, stop, kv_length) in enumerate(batch.sequences()):
            n_rows = (stop - start) * group_size
            for first in range(0, n_rows, TILE_ROWS):
                n = min(TILE_ROWS, n_rows - first)
                farthest = kv_length - (stop - start) + (first + n - 1) // group_size
                tiles.append((s, first, n, 0, farthest // SPAN + 1, -1))
        merged: list[tuple[int, int, int, int, int]] = []
        n_parts = sum(n_spans for *_, n_spans, _ in tiles)
        if len(tiles) <= self.few_tiles and len(tiles) < n_parts <= self.max_parts:
            whole, tiles = tiles, []
            for s, first, n, _, n_spans, _ in whole:
                merged.append((s, first, n, len(tiles), n_spans))
                tiles += [(s, first, n, span, span + 1, len(tiles) + span) for span in range(n_spans)]
            self.merged[: len(merged)] = merged
        self.tiles[: len(tiles)] = tiles
        self.header[N_TILES], self.header[N_MERGED] = len(tiles), len(merged)
