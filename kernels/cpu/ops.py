"""The `Ops` protocol on CPU kernels.

Nothing runs while a forward pass is recorded: each operation takes buffers, adds instructions to a program, and
returns the buffer they will write.  A step fills in the batch and runs the program.  One program serves every
batch, because kernels read the number of tokens when they run.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.cpu import attention as attention_kernels
from localllm.kernels.cpu import elementwise, matmul
from localllm.kernels.cpu.attention import PAGE, ROWS
from localllm.kernels.cpu.compiler import Kernel, Variant, variant
from localllm.kernels.cpu.program import Instruction, Program, Workers
from localllm.kernels.cpu.simd import load_bf16x16, load_f16x16, load_f32x16
from localllm.kernels.cpu.target import Target, choose
from localllm.kernels.cpu.tiles import RECORD, TILES, TOKENS
from localllm.kernels.embedding import CopiedTable, EmbeddingTable, PackedTable
from localllm.kernels.ops import Batch, CacheShape, KVCache, Linear, Rope, Step, Tensor, Weight, Widening
from localllm.quant.formats import dequantize
from localllm.quant.lut import KernelType
from localllm.quant.packing import GROUP, LAYOUTS
from localllm.quant.repack import FALLBACK, ScaleRangeError, repack, repack_target
from localllm.quant.types import GGMLType

#: Values that a row of a buffer is padded to.
PADDING = 32
#: Rows of a file packed at once: enough to keep numpy busy, few enough to stay in the cache.
PACKED_ROWS = 256

# Numbers in a program's header.
ALWAYS, N_TOKENS, N_OUTPUTS, N_TILES = range(4)

FLOAT_LOADS: dict[KernelType, Any] = {
    GGMLType.F32: load_f32x16,
    GGMLType.F16: load_f16x16,
    GGMLType.BF16: load_bf16x16,
}


def padded(n: int) -> int:
    return -(-n // PADDING) * PADDING


def aligned_zeros(shape: int | tuple[int, ...], kind: type) -> NDArray[Any]:
    """Zeros that begin at a page of memory; pages are only taken as they are written."""
    count = int(np.prod(shape))
    n_bytes = max(1, count * np.dtype(kind).itemsize)
    # Private: a forked child computes in memory of its own.
    memory = (
        mmap.mmap(-1, n_bytes) if os.name == "nt" else mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    )
    return np.frombuffer(memory, kind, count).reshape(shape)


@dataclass(frozen=True)
class CPULinear:
    """A packed matrix."""

    packed: NDArray[np.uint8]
    bias: NDArray[np.float32] | None  # padded
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
class CPUCache:
    """Keys [n_layers, n_pages, G, head, PAGE] and values [n_layers, n_pages, G, PAGE, head], in float16 bits."""

    keys: NDArray[np.uint16]
    values: NDArray[np.uint16]
    shape: CacheShape
    page_size: int = PAGE

    @property
    def n_pages(self) -> int:
        return int(self.keys.shape[1])

    @property
    def n_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def copy_page(self, source: int, target: int) -> None:
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
        self.rows = recording.max_tokens if slot == N_TOKENS else recording.max_outputs
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


class Recording:
    """Instructions and the memory they use, while a forward pass is recorded and afterwards."""

    def __init__(self, cache: CPUCache, max_tokens: int, max_outputs: int) -> None:
        self.cache = cache
        self.max_tokens, self.max_outputs = max_tokens, max_outputs
        self.instructions: list[Instruction] = []
        #: Arrays whose addresses stand in the instructions.
        self.operands: list[object] = []
        self.memory: list[NDArray[np.uint8]] = []
        self.free: list[NDArray[np.uint8]] = []
        self.ropes: list[tuple[Rope, NDArray[np.float32]]] = []
        self.embeddings: list[tuple[EmbeddingTable, float, Buffer]] = []
        # What a step fills in.
        self.header = np.ones(4, np.int64)
        self.positions = np.zeros(max_tokens, np.int32)
        self.starts = np.zeros(max_tokens, np.int32)
        self.slots = np.zeros(max_tokens, np.int64)
        self.output_rows = np.zeros(max_outputs, np.int32)
        self.block_tables = np.zeros((max_tokens, cache.n_pages), np.int32)
        self.group_size = 0
        self.tiles = np.zeros((0, 3), np.int64)

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
        """The address of (cos, sin) [T, n_pairs, 2] for a batch's positions."""
        for known, angles in self.ropes:
            if known is rope:
                return angles.ctypes.data
        self.ropes.append((rope, np.zeros((self.max_tokens, len(rope.frequencies), 2), np.float32)))
        return self.ropes[-1][1].ctypes.data

    def use_groups_of(self, group_size: int) -> None:
        """Says how many query heads share a key/value head; all layers must agree."""
        if self.group_size not in (0, group_size):
            raise KernelError(
                f"layers with {self.group_size} and with {group_size} query heads to a key/value head cannot be mixed"
            )
        if not self.group_size:
            self.group_size = group_size
            self.tiles = np.zeros((self.max_tokens * -(-group_size // ROWS), 3), np.int64)

    def fill(self, batch: Batch) -> None:
        """Puts a batch where the program reads it.

        Raises:
            KernelError: it is too large, or an index in it is out of range: kernels check none.
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
        lengths = np.diff(batch.query_starts)
        sequence = np.repeat(np.arange(n_sequences), lengths)
        page, place = np.divmod(batch.positions, PAGE)
        self.slots[:n_tokens] = batch.block_tables[sequence, page].astype(np.int64) * PAGE + place
        for rope, angles in self.ropes:
            turns = batch.positions[:, None].astype(np.float64) * rope.frequencies
            angles[:n_tokens, :, 0] = np.cos(turns) * rope.magnitude
            angles[:n_tokens, :, 1] = np.sin(turns) * rope.magnitude
        self.header[[N_TOKENS, N_OUTPUTS, N_TILES]] = n_tokens, n_outputs, self._fill_tiles(lengths)
        for table, scale, buffer in self.embeddings:
            if batch.ids.min() < 0 or batch.ids.max() >= table.shape[0]:
                raise KernelError(f"a batch has token ids outside the vocabulary of {table.shape[0]}")
            rows = table.rows(batch.ids)
            x = buffer.matrix()
            x[:n_tokens, : buffer.width] = rows if scale == 1.0 else rows * np.float32(scale)
            x[:n_tokens, buffer.width :] = 0

    def _fill_tiles(self, lengths: NDArray[np.int32]) -> int:
        """Cuts each sequence's query rows into tiles for the attention kernel; returns how many there are."""
        rows = lengths.astype(np.int64) * self.group_size
        counts = -(-rows // ROWS)
        n = int(counts.sum())
        sequence = np.repeat(np.arange(len(lengths)), counts)
        first = (np.arange(n) - np.repeat(np.cumsum(counts) - counts, counts)) * ROWS
        self.tiles[:n, 0], self.tiles[:n, 1] = sequence, first
        self.tiles[:n, 2] = np.minimum(ROWS, rows[sequence] - first)
        return n


class CPUOps:
    """The CPU backend.

    Args:
        threads: how many to compute with; by default one a physical core that this process may use.
        isa: the instruction set to compile for, by name; by default the best that runs here.
        progress: called with (kernels compiled, kernels to compile) when kernels are not in the cache yet.
    """

    name = "cpu"
    page_size = PAGE

    def __init__(
        self,
        threads: int | None = None,
        isa: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.target = choose(isa)
        self.workers = Workers(threads or default_threads())
        self._progress = progress
        self._recording: Recording | None = None

    # -- Loading ---------------------------------------------------------------------------------------------------

    def load_linear(
        self, weight: Weight, bias: Weight | None = None, *, widening: Widening | None = None
    ) -> CPULinear:
        n_out, n_in = weight.shape
        kind = repack_target(weight.type)
        try:
            packed = self._pack(weight, kind)
        except ScaleRangeError:
            kind = FALLBACK
            if widening is not None:
                widening(weight, kind.name, LAYOUTS[kind].packed_bytes(padded(n_out), n_in))
            packed = self._pack(weight, kind)
        return CPULinear(packed, None if bias is None else self.load_vector(bias), kind, n_in, n_out)

    def _pack(self, weight: Weight, kind: KernelType) -> NDArray[np.uint8]:
        """The weight's tiles in ``kind``.

        Raises:
            ScaleRangeError: it cannot be written so.
        """
        n_out, n_in = weight.shape
        layout = LAYOUTS[kind]
        packed = aligned_zeros(layout.packed_bytes(padded(n_out), n_in), np.uint8)
        rows = weight.data.reshape(n_out, -1)

        def pack(first: int) -> None:
            part = repack(rows[first : first + PACKED_ROWS], weight.type, kind)
            start, stop = (layout.packed_bytes(n, n_in) for n in (first, first + len(part)))
            layout.pack(part, packed[start:stop])

        with ThreadPoolExecutor(self.workers.n) as pool:
            list(pool.map(pack, range(0, n_out, PACKED_ROWS)))
        return packed

    def packed_bytes(self, weight: Weight) -> int:
        if len(weight.shape) < 2:
            return 4 * padded(weight.shape[0])
        n_out, n_in = weight.shape
        return LAYOUTS[repack_target(weight.type)].packed_bytes(padded(n_out), n_in)

    def load_vector(self, weight: Weight) -> NDArray[np.float32]:
        values = dequantize(weight.data, weight.type).reshape(-1)
        return np.pad(values, (0, padded(len(values)) - len(values)))

    def load_embedding(self, weight: Weight, packed: Linear | None = None) -> EmbeddingTable:
        if isinstance(packed, CPULinear):
            return PackedTable(packed.type, (packed.n_out, packed.n_in), packed.packed)
        return CopiedTable.of(weight)

    def new_cache(self, shape: CacheShape, n_pages: int) -> CPUCache:
        head = -(-shape.head_dim // 16) * 16
        size = (shape.n_layers, n_pages, shape.n_kv_heads)
        keys = aligned_zeros((*size, head, PAGE), np.uint16)
        return CPUCache(keys, aligned_zeros((*size, PAGE, head), np.uint16), shape)

    # -- Compiling and running -------------------------------------------------------------------------------------

    def compile(self, forward: Callable[[], Tensor], cache: KVCache, *, max_tokens: int, max_outputs: int) -> Step:
        if not isinstance(cache, CPUCache):
            raise KernelError(f"the CPU backend cannot use a {type(cache).__name__}")
        recording = self._recording = Recording(cache, max_tokens, max_outputs)
        try:
            logits = forward()
        finally:
            self._recording = None
        # The weights live as long as what refers to them: the forward function.
        keep = (recording, forward)
        program = Program(recording.instructions, recording.header, self.target, keep, self._progress)
        matrix = logits.matrix()[:, : logits.width]

        def step(batch: Batch) -> NDArray[np.float32]:
            recording.fill(batch)
            program.run(self.workers)
            result: NDArray[np.float32] = matrix[: len(batch.outputs)]
            return result

        return step

    @property
    def _now(self) -> Recording:
        if self._recording is None:
            raise KernelError("operations of the CPU backend run only inside a forward pass: see compile()")
        return self._recording

    def _add(self, kernel: Kernel, arguments: Sequence[int | float], units: int, slot: int, **constants: Any) -> None:
        self._now.add(variant(kernel, self.target, **constants), arguments, units, slot)

    # -- Operations ------------------------------------------------------------------------------------------------

    def embed(self, table: EmbeddingTable, scale: float = 1.0) -> Buffer:
        x = Buffer(self._now, N_TOKENS, table.shape[1])
        self._now.embeddings.append((table, scale, x))
        return x

    def rms_norm(self, x: Buffer, weight: NDArray[np.float32], eps: float) -> Buffer:
        y = Buffer(self._now, x.slot, x.width)
        self._now.operands.append(weight)
        arguments = (
            *(x.address, weight.ctypes.data, x.width, x.stride // 4, x.stride),
            *(y.address, y.stride, float(eps)),
        )
        self._add(elementwise.rms_norm, arguments, 1, x.slot)
        return y

    def linear(self, x: Buffer, weight: CPULinear, residual: Buffer | None = None) -> Buffer:
        # A kernel may add to what it reads, but not to what others still multiply.
        y = Buffer(self._now, x.slot, weight.n_out) if residual is None or residual is x else residual.changed()
        self._multiply(x, weight, y, 0 if residual is None else residual.address, wait=True)
        return y

    def linears(self, x: Buffer, weights: Sequence[CPULinear]) -> list[Buffer]:
        results = [Buffer(self._now, x.slot, w.n_out) for w in weights]
        for w in weights:
            if w.type in TILES:
                x.records(self.target)  # before the products, which do not wait for each other
        for i, (w, y) in enumerate(zip(weights, results, strict=True)):
            self._multiply(x, w, y, 0, wait=i == len(weights) - 1)
        return results

    def _multiply(self, x: Buffer, w: CPULinear, y: Buffer, residual: int, *, wait: bool) -> None:
        if (x.width, y.width) != (w.n_in, w.n_out):
            raise KernelError(f"a matrix [{w.n_out}, {w.n_in}] cannot turn {x.width} values into {y.width}")
        layout, recording = LAYOUTS[w.type], self._now
        batch = recording.header.ctypes.data + 8 * x.slot
        recording.operands.append(w)
        bias = 0 if w.bias is None else w.bias.ctypes.data
        groups = padded(w.n_out) // GROUP
        matrix = w.packed.ctypes.data
        if tile := TILES.get(w.type):
            kernel, units = matmul.matmul_quantised, groups
            constants = {"ADD_TILE": tile.add, "TILE_BYTES": layout.tile_bytes, "BLOCKS": layout.columns // 32}
            constants |= dict(tile.constants)
            arguments = [batch, matrix, w.n_in // layout.columns, x.records(self.target)]
        else:
            kernel, units = matmul.matmul_float, groups // matmul.FLOAT_GROUPS
            constants = {"LOAD": FLOAT_LOADS[w.type], "COLUMN_BYTES": layout.tile_bytes}
            arguments = [batch, matrix, w.n_in, x.address, x.stride]
        arguments += [bias, residual, y.address, y.stride]
        recording.add(variant(kernel, self.target, **constants), arguments, units, ALWAYS, wait=wait)

    def rope_append(
        self,
        q: Buffer,
        k: Buffer,
        v: Buffer,
        rope: Rope | None,
        layer: int,
        *,
        q_norm: NDArray[np.float32] | None = None,
        k_norm: NDArray[np.float32] | None = None,
        eps: float = 0.0,
    ) -> Buffer:
        recording, cache = self._now, self._now.cache
        head_dim = cache.shape.head_dim
        for x, norm in ((q, q_norm), (k, k_norm)):
            if norm is not None:
                recording.operands.append(norm)
                arguments = (x.address, norm.ctypes.data, x.width // head_dim, head_dim, x.stride, float(eps))
                self._add(elementwise.head_norm, arguments, 1, N_TOKENS)
        n_pairs = 0 if rope is None else len(rope.frequencies)
        angles = 0 if rope is None else recording.rope_angles(rope)
        # Bytes from one pair to the next, and from a pair's first value to its second.
        step, offset = (8, 4) if rope is not None and rope.interleaved else (4, 4 * n_pairs)
        self._add(
            elementwise.rope_append,
            (
                *(recording.slots.ctypes.data, angles, n_pairs),
                *(q.address, q.stride, q.width // head_dim),
                *(k.address, v.address, k.stride, k.width // head_dim, head_dim, step, offset),
                *(cache.keys[layer].ctypes.data, cache.values[layer].ctypes.data),
            ),
            1,
            N_TOKENS,
            **self._head_constants(),
        )
        return q.changed()

    def _head_constants(self) -> dict[str, int]:
        return {"HEAD": self._now.cache.keys.shape[3], "PAGE": PAGE}

    def attention(self, q: Buffer, layer: int, *, scale: float, window: int | None = None) -> Buffer:
        recording, cache = self._now, self._now.cache
        heads, head_dim = cache.shape.n_kv_heads, cache.shape.head_dim
        group_size = q.width // head_dim // heads
        recording.use_groups_of(group_size)
        constants = self._head_constants()
        n_chunks = constants["HEAD"] // 16
        # As many head values at once as divide the head and leave registers for the rest.
        constants["CHUNK"] = max(c for c in range(1, 6) if n_chunks % c == 0)
        # The kernel writes heads, not the padding beyond them.
        out = Buffer(recording, N_TOKENS, q.width, shared=q.width % PADDING == 0)
        self._add(
            attention_kernels.attention,
            (
                *(recording.header.ctypes.data + 8 * N_TILES, recording.tiles.ctypes.data, heads, group_size),
                *(q.address, q.stride, head_dim),
                *(a.ctypes.data for a in (recording.starts, recording.positions, recording.block_tables)),
                *(recording.block_tables.shape[1], window or 0),
                *(cache.keys[layer].ctypes.data, cache.values[layer].ctypes.data, out.address, float(scale)),
            ),
            heads,
            N_TILES,
            **constants,
        )
        return out

    def gated(self, gate: Buffer, up: Buffer, activation: str) -> Buffer:
        kernels = {"silu": elementwise.gated_silu, "gelu": elementwise.gated_gelu}
        if activation not in kernels:
            raise KernelError(f"there is no activation {activation!r}; choose one of {', '.join(kernels)}")
        y = Buffer(self._now, gate.slot, gate.width)
        arguments = (gate.address, up.address, gate.stride // 4, gate.stride, y.address)
        self._add(kernels[activation], arguments, 1, gate.slot)
        return y

    def outputs(self, x: Buffer) -> Buffer:
        y = Buffer(self._now, N_OUTPUTS, x.width)
        arguments = (self._now.output_rows.ctypes.data, x.address, x.stride // 4, x.stride, y.address)
        self._add(elementwise.gather_rows, arguments, 1, N_OUTPUTS)
        return y


def default_threads() -> int:
    """One thread for each physical core that this process may run on."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))
