"""The `Ops` protocol on CPU kernels.

Nothing runs while a forward pass is recorded: each operation takes buffers, adds instructions to a program, and
returns the buffer they will write.  A step fills in the batch and runs the program.  One program serves every
batch, because kernels read the number of tokens when they run.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError, UsageError
from localllm.kernels.cpu import attention as attention_kernels
from localllm.kernels.cpu import elementwise, matmul
from localllm.kernels.cpu import experts as expert_kernels
from localllm.kernels.cpu.attention import SPAN, TILE_ROWS, state_bytes
from localllm.kernels.cpu.cache_types import CACHE_LAYOUTS, PAGE, CacheLayout
from localllm.kernels.cpu.compiler import Kernel, Variant, variant
from localllm.kernels.cpu.host import default_threads, most_threads
from localllm.kernels.cpu.memory import Arena, aligned_zeros
from localllm.kernels.cpu.packing import Packer
from localllm.kernels.cpu.program import Instruction, Job, Program, Workers
from localllm.kernels.cpu.simd import load_bf16x16, load_f16x16, load_f32x16
from localllm.kernels.cpu.target import Target, choose
from localllm.kernels.cpu.thread_choice import choose_threads
from localllm.kernels.cpu.tiles import RECORD, TILES, TOKENS
from localllm.kernels.embedding import SMALL_TABLE, CopiedTable, DecodedTable, EmbeddingTable, PackedTable
from localllm.kernels.experts import matrices_to_pack
from localllm.kernels.ops import (
    Backend,
    Batch,
    CacheShape,
    Experts,
    Hidden,
    HostHidden,
    KVCache,
    Linear,
    Part,
    Rope,
    Routing,
    Step,
    Tensor,
    Weight,
    Widening,
    check_choice,
    hidden_rows,
)
from localllm.quant.formats import dequantize
from localllm.quant.lut import KernelType
from localllm.quant.packing import GROUP, LAYOUTS
from localllm.quant.repack import FALLBACK, ScaleRangeError, repack, repack_target
from localllm.quant.types import GGMLType

#: Values that a row of a buffer is padded to.
PADDING = 32
#: Rows of a file packed at once: enough to be worth a call, few enough for threads to end at the same time.
PACKED_ROWS = 256

#: Bytes of a matrix in the file that are packed before its pages are let go: the largest would take memory twice.
KEPT_BYTES = 16 << 20

#: Tokens in a step up to which reading the weights takes longer than multiplying them.
FEW_TOKENS = 4

#: Bytes for what spans of the cache come to; tiles that need more are not cut.
MOST_PART_BYTES = 32 << 20

#: Bytes of a layer's keys from which on a cache lies in huge pages: of a short one they would take most at once.
HUGE_LAYER = 4 << 20

# Numbers in a program's header.  The last one is not a batch's, but what kernels find: experts that tokens go to.
ALWAYS, N_TOKENS, N_OUTPUTS, N_TILES, N_MERGED, N_CHOSEN, N_USED = range(7)
#: What counts the rows of tensors.
ROWS = {N_TOKENS: "each token", N_OUTPUTS: "each output", N_CHOSEN: "each expert of a token"}

FLOAT_LOADS: dict[KernelType, Any] = {
    GGMLType.F32: load_f32x16,
    GGMLType.F16: load_f16x16,
    GGMLType.BF16: load_bf16x16,
}


def padded(n: int) -> int:
    return -(-n // PADDING) * PADDING


@dataclass(frozen=True)
class CPUVector:
    """A vector of n values, with zeros behind them up to a padded length."""

    values: NDArray[np.float32]
    n: int

    @property
    def address(self) -> int:
        return self.values.ctypes.data


@dataclass(frozen=True)
class CPULinear:
    """A packed matrix."""

    packed: NDArray[np.uint8]
    bias: CPUVector | None
    type: KernelType
    n_in: int
    n_out: int

    @property
    def format(self) -> str:
        return self.type.name

    @property
    def n_bytes(self) -> int:
        return self.packed.nbytes


@dataclass(frozen=True)
class CPUExperts:
    """Packed matrices of experts, one after the other."""

    packed: NDArray[np.uint8]
    type: KernelType
    n_experts: int
    n_in: int
    n_out: int

    @property
    def format(self) -> str:
        return self.type.name

    @property
    def n_bytes(self) -> int:
        return self.packed.nbytes


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


class CPUOps(Backend):
    """The CPU backend.

    Attributes:
        workers: the threads, all of which compute steps of many tokens.
        decode_threads: how many of them compute steps of few tokens, which read more than they multiply.

    Args:
        threads: how many to compute with; by default one a physical core that this process may use for steps of many
            tokens, and as many as `localllm.kernels.cpu.thread_choice` finds best for those of few.
        isa: the instruction set to compile for, by name; by default the best that runs here.
        progress: called with (kernels compiled, kernels to compile) when kernels are not in the cache yet.

    Raises:
        UsageError: there is no such instruction set, or so many threads are out of range.
        DeviceError: this processor does not execute the instruction set.
    """

    name = "cpu"
    page_size = PAGE
    #: Products of activations and weights below which the calling thread computes a step alone: handing it to others
    #: would take longer.
    small_step = 8 << 20

    def __init__(
        self,
        threads: int | None = None,
        isa: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.target = choose(isa)
        if threads is None:
            choice = choose_threads(self.target, progress)
            self.decode_threads, threads = choice.decode, choice.cores
        else:
            self.decode_threads = threads = _checked_threads(threads)
        self.workers = Workers(threads)
        self._caller = Workers(1)
        self._progress = progress
        self._packers: dict[KernelType, Packer] = {}
        self._memory = Arena()
        self._recording: Recording | None = None

    # -- Loading ---------------------------------------------------------------------------------------------------

    def load_linear(
        self, weight: Weight, bias: Weight | None = None, *, widening: Widening | None = None
    ) -> CPULinear:
        n_out, n_in = weight.shape
        if bias is not None and bias.shape != (n_out,):
            raise KernelError(f"a matrix [{n_out}, {n_in}] cannot have a bias {list(bias.shape)}")
        packed, kind = self._packed(weight, widening)
        return CPULinear(packed, None if bias is None else self.load_vector(bias), kind, n_in, n_out)

    def load_experts(self, weight: Weight, *, widening: Widening | None = None) -> CPUExperts:
        return CPUExperts(*self._packed(weight, widening), weight.shape[0], weight.shape[2], weight.shape[1])

    def _packed(self, weight: Weight, widening: Widening | None) -> tuple[NDArray[np.uint8], KernelType]:
        """The tiles of one matrix or of several, and their format."""
        kind = repack_target(weight.type)
        try:
            return self._pack(weight, kind), kind
        except ScaleRangeError:
            kind = FALLBACK
            if widening is not None:
                widening(weight, kind.name, _packed_bytes(weight.shape, kind))
            return self._pack(weight, kind), kind

    def _pack(self, weight: Weight, kind: KernelType) -> NDArray[np.uint8]:
        """The weight's tiles in ``kind``.

        Raises:
            ScaleRangeError: it cannot be written so.
        """
        packed = self._memory.take(_packed_bytes(weight.shape, kind))
        matrices = matrices_to_pack(weight, PADDING)
        try:
            for rows, tiles in zip(matrices, packed.reshape(len(matrices), -1), strict=True):
                self._pack_rows(weight, rows, kind, tiles)
        except ScaleRangeError:
            self._memory.take_back()
            raise
        return packed

    def _pack_rows(
        self, weight: Weight, rows: NDArray[np.uint8], kind: KernelType, packed: NDArray[np.uint8]
    ) -> None:
        """Rows of a weight to tiles."""
        n_out, n_in, layout = len(rows), weight.shape[-1], LAYOUTS[kind]
        packer = self._packer(kind)
        kept_rows = PACKED_ROWS * max(1, KEPT_BYTES // (PACKED_ROWS * rows.shape[1]))
        firsts = itertools.count(0, PACKED_ROWS)  # taking the next one is one step of Python's: threads may share it
        given_up = threading.Event()

        def share(*_: int) -> None:
            while (first := next(firsts)) < n_out and not given_up.is_set():
                if first % kept_rows == 0:
                    weight.drop_pages()  # what a thread still reads comes back from the file
                try:
                    part = repack(rows[first : first + PACKED_ROWS], weight.type, kind)
                except ScaleRangeError:
                    given_up.set()
                    raise
                start, stop = (layout.packed_bytes(n, n_in) for n in (first, first + len(part)))
                packer.pack(part, packed[start:stop])

        self.workers.run(Job(share, 0))

    def _packer(self, kind: KernelType) -> Packer:
        if kind not in self._packers:
            self._packers[kind] = Packer(LAYOUTS[kind], self.target, self._progress)
        return self._packers[kind]

    def packed_bytes(self, weight: Weight) -> int:
        if len(weight.shape) < 2:
            return 4 * padded(weight.shape[0])
        return _packed_bytes(weight.shape, repack_target(weight.type))

    def load_vector(self, weight: Weight) -> CPUVector:
        values = dequantize(weight.data, weight.type).reshape(-1)
        return CPUVector(np.pad(values, (0, padded(len(values)) - len(values))), len(values))

    def load_embedding(self, weight: Weight, packed: Linear | None = None) -> EmbeddingTable:
        if weight.shape[0] * weight.shape[1] <= SMALL_TABLE:
            return DecodedTable.of(weight)
        if isinstance(packed, CPULinear):
            return PackedTable(packed.type, (packed.n_out, packed.n_in), packed.packed)
        return CopiedTable.of(weight)

    def new_cache(self, shape: CacheShape, n_pages: int) -> CPUCache:
        size = (shape.n_layers, n_pages, shape.n_kv_heads, CACHE_LAYOUTS[shape.type].block_bytes(shape.head_dim))
        huge = prod(size[1:]) >= HUGE_LAYER
        keys, values = (aligned_zeros(size, np.uint8, huge=huge) for _ in range(2))
        return CPUCache(keys, values, shape, self.workers)

    def cache_bytes(self, shape: CacheShape, n_pages: int) -> int:
        block_bytes = CACHE_LAYOUTS[shape.type].block_bytes(shape.head_dim)
        return 2 * shape.n_layers * n_pages * shape.n_kv_heads * block_bytes

    # -- Compiling and running -------------------------------------------------------------------------------------

    def compile(self, forward: Callable[[], Tensor], cache: KVCache, *, max_tokens: int, max_outputs: int) -> Step:
        def logits() -> Buffer:
            result: Buffer = forward()
            self._check_tensors(result, slot=N_OUTPUTS)
            return result

        part = self.compile_part(logits, cache, max_tokens=max_tokens, max_outputs=max_outputs)
        return lambda batch: part(batch, None).host()

    def compile_part(
        self, forward: Callable[[], Tensor], cache: KVCache, *, max_tokens: int, max_outputs: int
    ) -> Part:
        if not isinstance(cache, CPUCache):
            raise KernelError(f"the CPU backend cannot use a {type(cache).__name__}")
        recording = self._recording = Recording(cache, max_tokens, max_outputs, self.workers.n)
        try:
            result = forward()
            self._check_tensors(result)
        finally:
            self._recording = None
        # The weights live as long as what refers to them: the forward function.
        keep = (recording, forward)
        program = Program(recording.instructions, recording.header, self.target, keep, self._progress)
        matrix, of_tokens = result.matrix()[:, : result.width], result.slot == N_TOKENS

        def part(batch: Batch, hidden: Hidden | None) -> HostHidden:
            workers = self.workers
            if len(batch.ids) * recording.n_products < self.small_step:
                workers.settle()
                workers = self._caller
            threads = self.decode_threads if len(batch.ids) <= FEW_TOKENS else None
            program.run(workers, before=lambda: recording.fill(batch, hidden), threads=threads)
            return HostHidden(matrix[: len(batch.ids if of_tokens else batch.outputs)])

        return part

    @property
    def _now(self) -> Recording:
        if self._recording is None:
            raise KernelError("operations of the CPU backend run only inside a forward pass: see compile()")
        return self._recording

    def _check_tensors(self, *tensors: Buffer, slot: int | None = None) -> None:
        """Makes sure that tensors belong to this forward pass and have the same rows, those that ``slot`` counts.

        Kernels believe every address and every number: what does not fit must be found while recording.
        """
        for x in tensors:
            if not isinstance(x, Buffer) or x.recording is not self._now:
                raise KernelError("an operation was given something else than a tensor of its own forward pass")
        wanted = tensors[0].slot if slot is None else slot
        for x in tensors:
            if x.slot != wanted:
                raise KernelError(f"a tensor has a row for {ROWS[x.slot]} where one for {ROWS[wanted]} is needed")

    def _check_layer(self, layer: int) -> None:
        n_layers = self._now.cache.shape.n_layers
        if not 0 <= layer < n_layers:
            raise KernelError(f"there is no layer {layer} in a cache of {n_layers} layers")

    def _check_heads(self, what: str, x: Buffer, multiple_of: int) -> None:
        """Makes sure that a tensor is a row of whole heads, a multiple of so many."""
        head_dim = self._now.cache.shape.head_dim
        if x.width == 0 or x.width % (multiple_of * head_dim):
            raise KernelError(f"{x.width} values of {what} are no multiple of {multiple_of} heads of {head_dim}")

    def _add(self, kernel: Kernel, arguments: Sequence[int | float], units: int, slot: int, **constants: Any) -> None:
        self._now.add(variant(kernel, self.target, **constants), arguments, units, slot)

    # -- Operations ------------------------------------------------------------------------------------------------

    def embed(self, table: EmbeddingTable, scale: float = 1.0) -> Buffer:
        if len(table.shape) != 2:
            raise KernelError(f"an embedding table has rows and columns, not the shape {list(table.shape)}")
        # Filled in before the program runs: nothing that the program writes may lie in the same memory.
        x = Buffer(self._now, N_TOKENS, table.shape[1], shared=False)
        self._now.embeddings.append((table, scale, x))
        return x

    def hidden(self, width: int) -> Buffer:
        # As an embedding, filled in before the program runs.
        self._now.hidden = Buffer(self._now, N_TOKENS, width, shared=False)
        return self._now.hidden

    def rms_norm(self, x: Buffer, weight: CPUVector, eps: float) -> Buffer:
        recording = self._now
        self._check_tensors(x)
        if weight.n != x.width:
            raise KernelError(f"a norm of {weight.n} weights cannot be taken of {x.width} values")
        y = Buffer(recording, x.slot, x.width)
        recording.operands.append(weight)
        arguments = (
            *(x.address, weight.address, x.width, x.stride // 4, x.stride),
            *(y.address, y.stride, float(eps)),
        )
        self._add(elementwise.rms_norm, arguments, 1, x.slot)
        return y

    def linear(self, x: Buffer, weight: Linear, residual: Buffer | None = None) -> Buffer:
        recording, w = self._now, _packed(weight)
        self._check_tensors(x)
        if residual is None:
            y = Buffer(recording, x.slot, w.n_out)
            self._multiply(x, w, y, 0, wait=True)
            return y
        self._check_tensors(x, residual)
        # A kernel may add to what it reads, but not to what others still multiply.
        y = Buffer(recording, x.slot, x.width) if residual is x else residual.changed()
        self._multiply(x, w, y, residual.address, wait=True)
        return y

    def linears(self, x: Buffer, weights: Sequence[Linear]) -> list[Buffer]:
        recording, packed = self._now, [_packed(w) for w in weights]
        self._check_tensors(x)
        results = [Buffer(recording, x.slot, w.n_out) for w in packed]
        if any(w.type in TILES for w in packed):
            x.records(self.target)  # before the products, which do not wait for each other
        for i, (w, y) in enumerate(zip(packed, results, strict=True)):
            self._multiply(x, w, y, 0, wait=i == len(packed) - 1)
        return results

    def _multiply(self, x: Buffer, w: CPULinear, y: Buffer, residual: int, *, wait: bool) -> None:
        if (x.width, y.width) != (w.n_in, w.n_out):
            raise KernelError(f"a matrix [{w.n_out}, {w.n_in}] cannot turn {x.width} values into {y.width}")
        layout, recording = LAYOUTS[w.type], self._now
        recording.n_products += w.n_in * w.n_out
        batch = recording.header.ctypes.data + 8 * x.slot
        recording.operands.append(w)
        bias = 0 if w.bias is None else w.bias.address
        groups = padded(w.n_out) // GROUP
        matrix = w.packed.ctypes.data
        if w.type in TILES:
            kernel, units = matmul.matmul_quantised, groups
            arguments = [batch, matrix, w.n_in // layout.columns, x.records(self.target)]
        else:
            kernel, units = matmul.matmul_float, groups // matmul.FLOAT_GROUPS
            arguments = [batch, matrix, w.n_in, x.address, x.stride]
        arguments += [bias, residual, y.address, y.stride]
        recording.add(variant(kernel, self.target, **_constants(w.type)), arguments, units, ALWAYS, wait=wait)

    def rope_append(
        self,
        q: Buffer,
        k: Buffer,
        v: Buffer,
        rope: Rope | None,
        layer: int,
        *,
        q_norm: CPUVector | None = None,
        k_norm: CPUVector | None = None,
        eps: float = 0.0,
    ) -> Buffer:
        recording, cache = self._now, self._now.cache
        head_dim = cache.shape.head_dim
        self._check_append(q, k, v, rope, layer)
        for x, norm in ((q, q_norm), (k, k_norm)):
            if norm is not None:
                if norm.n != head_dim:
                    raise KernelError(f"a norm of {norm.n} weights cannot be taken of heads of {head_dim}")
                recording.operands.append(norm)
                arguments = (x.address, norm.address, x.width // head_dim, head_dim, x.stride, float(eps))
                self._add(elementwise.head_norm, arguments, 1, N_TOKENS)
        n_pairs = 0 if rope is None else len(rope.frequencies)
        angles = 0 if rope is None else recording.rope_angles(rope)
        # Bytes from one pair to the next, and from a pair's first value to its second.
        step, offset = (8, 4) if rope is not None and rope.interleaved else (4, 4 * n_pairs)
        self._add(
            elementwise.rope_append,
            (
                *(recording.slots.ctypes.data, recording.positions.ctypes.data, angles, n_pairs),
                *(q.address, q.stride, q.width // head_dim),
                *(k.address, v.address, k.stride, k.width // head_dim, head_dim, step, offset),
                *(cache.keys[layer].ctypes.data, cache.values[layer].ctypes.data),
            ),
            1,
            N_TOKENS,
            **cache.constants,
            APPEND=cache.layout.append,
        )
        return q.changed()

    def _check_append(self, q: Buffer, k: Buffer, v: Buffer, rope: Rope | None, layer: int) -> None:
        shape = self._now.cache.shape
        self._check_tensors(q, k, v, slot=N_TOKENS)
        self._check_layer(layer)
        self._check_heads("queries", q, shape.n_kv_heads)
        for what, x in (("keys", k), ("values", v)):
            if x.width != shape.n_kv_heads * shape.head_dim:
                raise KernelError(
                    f"{x.width} values of {what} do not fit a cache of {shape.n_kv_heads} heads of {shape.head_dim}"
                )
        if rope is not None and 2 * len(rope.frequencies) > shape.head_dim:
            raise KernelError(
                f"{len(rope.frequencies)} pairs of values cannot be turned in heads of {shape.head_dim}"
            )

    def attention(self, q: Buffer, layer: int, *, scale: float, window: int | None = None) -> Buffer:
        recording, cache = self._now, self._now.cache
        heads, head_dim = cache.shape.n_kv_heads, cache.shape.head_dim
        self._check_tensors(q, slot=N_TOKENS)
        self._check_layer(layer)
        self._check_heads("queries", q, heads)
        group_size = q.width // head_dim // heads
        recording.use_groups_of(group_size)
        # The kernel writes heads, not the padding beyond them.
        out = Buffer(recording, N_TOKENS, q.width, shared=q.width % PADDING == 0)
        parts = recording.use_parts()
        header = recording.header.ctypes.data
        self._add(
            attention_kernels.attention,
            (
                *(header + 8 * N_TILES, recording.tiles.ctypes.data, heads, group_size),
                *(q.address, q.stride, head_dim),
                *(a.ctypes.data for a in (recording.starts, recording.positions, recording.block_tables)),
                *(recording.block_tables.shape[1], window or cache.n_pages * PAGE),
                *(cache.keys[layer].ctypes.data, cache.values[layer].ctypes.data, out.address, parts, float(scale)),
            ),
            heads,
            N_TILES,
            **attention_kernels.constants(cache.layout, cache.head, wide=self.target.wide),
        )
        if recording.max_parts:
            arguments = (
                *(header + 8 * N_MERGED, recording.merged.ctypes.data, heads, group_size, head_dim),
                *(recording.starts.ctypes.data, parts, out.address, out.stride),
            )
            self._add(
                attention_kernels.merge_parts,
                arguments,
                heads,
                N_MERGED,
                **attention_kernels.state_constants(cache.head),
            )
        return out

    def gated(self, gate: Buffer, up: Buffer, activation: str) -> Buffer:
        kernels = {"silu": elementwise.gated_silu, "gelu": elementwise.gated_gelu}
        if activation not in kernels:
            raise KernelError(f"there is no activation {activation!r}; choose one of {', '.join(kernels)}")
        recording = self._now
        self._check_tensors(gate, up)
        if gate.width != up.width:
            raise KernelError(f"a gate of {gate.width} values does not fit {up.width} values")
        y = Buffer(recording, gate.slot, gate.width)
        arguments = (gate.address, up.address, gate.stride // 4, gate.stride, y.address)
        self._add(kernels[activation], arguments, 1, gate.slot)
        return y

    def route(self, logits: Buffer, k: int, *, normalise: bool, scale: float = 1.0) -> ChosenExperts:
        recording, n_experts = self._now, logits.width
        self._check_tensors(logits, slot=N_TOKENS)
        check_choice(k, n_experts)
        recording.choose(k)
        chosen = ChosenExperts(recording, n_experts)
        arguments = (logits.address, logits.stride, n_experts, k, int(normalise), chosen.ids, chosen.shares)
        self._add(expert_kernels.route, (*arguments, float(scale)), 1, N_TOKENS)
        header = recording.header.ctypes.data
        places = chosen.cursors, chosen.places, chosen.pairs, chosen.entries
        grouping = header + 8 * N_CHOSEN, chosen.ids, n_experts, *places, header + 8 * N_USED
        self._add(expert_kernels.group_by_expert, grouping, 1, ALWAYS)
        return chosen

    def expert_linears(self, x: Buffer, weights: Sequence[Experts], routing: Routing) -> list[Buffer]:
        self._check_tensors(x, slot=N_TOKENS)
        return self._multiply_experts(x, weights, routing)

    def expert_output(self, h: Buffer, weight: Experts, routing: Routing, residual: Buffer) -> Buffer:
        recording = self._now
        self._check_tensors(h, slot=N_CHOSEN)
        self._check_tensors(residual, slot=N_TOKENS)
        products = self._multiply_experts(h, [weight], routing)[0]
        if products.width != residual.width:
            raise KernelError(f"{residual.width} values cannot be added to the {products.width} of a product")
        y = residual.changed()
        arguments = (products.address, routing.shares, recording.n_chosen, y.stride // 4, y.stride)
        self._add(expert_kernels.add_experts, (*arguments, residual.address, y.address), 1, N_TOKENS)
        return y

    def _multiply_experts(self, x: Buffer, weights: Sequence[Experts], chosen: Routing) -> list[Buffer]:
        """Rows of x, or of each token's where it has one for each token, times the matrices of the experts."""
        recording = self._now
        if not isinstance(chosen, ChosenExperts) or chosen.recording is not recording:
            raise KernelError("an operation was given something else than a routing of its own forward pass")
        matrices = [_checked_experts(weight, x.width, chosen.n_experts) for weight in weights]
        results = [Buffer(recording, N_CHOSEN, w.n_out) for w in matrices]
        per_row = recording.n_chosen if x.slot == N_TOKENS else 1
        gathered = {kind: self._gather(x, chosen, per_row, kind) for kind in {w.type in TILES for w in matrices}}
        for i, (w, y) in enumerate(zip(matrices, results, strict=True)):
            layout, rows = LAYOUTS[w.type], gathered[w.type in TILES].ctypes.data
            recording.n_products += recording.n_chosen * w.n_in * w.n_out
            recording.operands.append(w)
            groups, matrix = padded(w.n_out) // GROUP, w.packed.ctypes.data
            if w.type in TILES:
                kernel, units = expert_kernels.experts_quantised, groups
                arguments = [chosen.entries, units, matrix, w.n_in // layout.columns, rows]
            else:
                kernel, units = expert_kernels.experts_float, groups // matmul.FLOAT_GROUPS
                arguments = [chosen.entries, units, matrix, w.n_in, rows, x.stride]
            arguments += [chosen.pairs, y.address, y.stride]
            code = variant(kernel, self.target, **_constants(w.type))
            recording.add(code, arguments, units, N_USED, wait=i == len(matrices) - 1)
        recording.free += gathered.values()
        return results

    def _gather(self, x: Buffer, chosen: ChosenExperts, per_row: int, as_records: bool) -> NDArray[np.uint8]:
        """Rows of x at the places of their pairs."""
        n_blocks = x.width // 32
        row_bytes = n_blocks * RECORD if as_records else x.stride
        memory = self._now.take(chosen.n_places * row_bytes)
        arguments = [chosen.places, per_row, x.address, x.stride, *([n_blocks] if as_records else [])]
        kernel = expert_kernels.gather_records if as_records else expert_kernels.gather_floats
        self._add(kernel, [*arguments, memory.ctypes.data], 1, N_CHOSEN)
        return memory

    def outputs(self, x: Buffer) -> Buffer:
        recording = self._now
        self._check_tensors(x, slot=N_TOKENS)
        y = Buffer(recording, N_OUTPUTS, x.width)
        arguments = (recording.output_rows.ctypes.data, x.address, x.stride // 4, x.stride, y.address)
        self._add(elementwise.gather_rows, arguments, 1, N_OUTPUTS)
        return y


def _checked_threads(threads: int) -> int:
    most = most_threads()
    if not 1 <= threads <= most:
        raise UsageError(f"threads={threads:,} is out of range: ask for 1 to {most}, or none for {default_threads()}")
    return threads


def _packed_bytes(shape: Sequence[int], kind: KernelType) -> int:
    """Bytes of a packed matrix [n_out, n_in] or of several."""
    *n_experts, n_out, n_in = shape
    return prod(n_experts) * LAYOUTS[kind].packed_bytes(padded(n_out), n_in)


def _constants(kind: KernelType) -> dict[str, Any]:
    """What kernels of a format's products are compiled for."""
    layout = LAYOUTS[kind]
    if tile := TILES.get(kind):
        return {"TILE_BYTES": layout.tile_bytes, "BLOCKS": layout.columns // 32, **tile.constants}
    return {"LOAD": FLOAT_LOADS[kind], "COLUMN_BYTES": layout.tile_bytes}


def _checked_experts(weight: Experts, n_in: int, n_experts: int) -> CPUExperts:
    if not isinstance(weight, CPUExperts):
        raise KernelError(f"the CPU backend cannot use a {type(weight).__name__}")
    if (weight.n_in, weight.n_experts) != (n_in, n_experts):
        raise KernelError(
            f"matrices [{weight.n_experts}, {weight.n_out}, {weight.n_in}] do not fit rows of {n_in} values that "
            f"go to {n_experts} experts"
        )
    return weight


def _packed(weight: Linear) -> CPULinear:
    if not isinstance(weight, CPULinear):
        raise KernelError(f"the CPU backend cannot use a {type(weight).__name__}")
    return weight
