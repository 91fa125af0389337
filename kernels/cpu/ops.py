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
from localllm.kernels.cpu.cache_types import CACHE_LAYOUTS, PAGE
from localllm.kernels.cpu.compiler import Kernel, variant
from localllm.kernels.cpu.host import default_threads, most_threads
from localllm.kernels.cpu.memory import Arena, aligned_zeros
from localllm.kernels.cpu.packing import Packer
from localllm.kernels.cpu.program import Job, Program, Workers
from localllm.kernels.cpu.recording import (
    ALWAYS,
    N_MERGED,
    N_OUTPUTS,
    N_TILES,
    N_TOKENS,
    PADDING,
    Buffer,
    CPUCache,
    Recording,
    padded,
)
from localllm.kernels.cpu.simd import load_bf16x16, load_f16x16, load_f32x16
from localllm.kernels.cpu.target import choose
from localllm.kernels.cpu.thread_choice import choose_threads
from localllm.kernels.cpu.tiles import TILES
from localllm.kernels.embedding import SMALL_TABLE, CopiedTable, DecodedTable, EmbeddingTable, PackedTable
from localllm.kernels.ops import (
    Backend,
    Batch,
    CacheShape,
    Hidden,
    HostHidden,
    KVCache,
    Linear,
    Part,
    Rope,
    Step,
    Tensor,
    Weight,
    Widening,
    check_sinks,
    check_softcap,
)
from localllm.quant.formats import dequantize
from localllm.quant.lut import KernelType
from localllm.quant.packing import GROUP, LAYOUTS
from localllm.quant.repack import FALLBACK, ScaleRangeError, repack, repack_target
from localllm.quant.types import GGMLType

#: Rows of a file packed at once: enough to be worth a call, few enough for threads to end at the same time.
PACKED_ROWS = 256

#: Bytes of a matrix in the file that are packed before its pages are let go: the largest would take memory twice.
KEPT_BYTES = 16 << 20

#: Tokens in a step up to which reading the weights takes longer than multiplying them.
FEW_TOKENS = 4

#: Bytes of a layer's keys from which on a cache lies in huge pages: of a short one they would take most at once.
HUGE_LAYER = 4 << 20

FLOAT_LOADS: dict[KernelType, Any] = {
    GGMLType.F32: load_f32x16,
    GGMLType.F16: load_f16x16,
    GGMLType.BF16: load_bf16x16,
}


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
        packed = self._memory.take(layout.packed_bytes(padded(n_out), n_in))
        rows = weight.data.reshape(n_out, -1)
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

        try:
            self.workers.run(Job(share, 0))
        except ScaleRangeError:
            self._memory.take_back()
            raise
        return packed

    def _packer(self, kind: KernelType) -> Packer:
        if kind not in self._packers:
            self._packers[kind] = Packer(LAYOUTS[kind], self.target, self._progress)
        return self._packers[kind]

    @staticmethod
    def packed_bytes(weight: Weight) -> int:
        if len(weight.shape) < 2:
            return 4 * padded(weight.shape[0])
        n_out, n_in = weight.shape
        return LAYOUTS[repack_target(weight.type)].packed_bytes(padded(n_out), n_in)

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

    @staticmethod
    def cache_bytes(shape: CacheShape, n_pages: int) -> int:
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
        rows = {N_TOKENS: "each token", N_OUTPUTS: "each output"}
        for x in tensors:
            if x.slot != wanted:
                raise KernelError(f"a tensor has a row for {rows[x.slot]} where one for {rows[wanted]} is needed")

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
        if tile := TILES.get(w.type):
            kernel, units = matmul.matmul_quantised, groups
            constants = {"TILE_BYTES": layout.tile_bytes, "BLOCKS": layout.columns // 32, **tile.constants}
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

    def attention(
        self,
        q: Buffer,
        layer: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: CPUVector | None = None,
    ) -> Buffer:
        recording, cache = self._now, self._now.cache
        heads, head_dim = cache.shape.n_kv_heads, cache.shape.head_dim
        self._check_tensors(q, slot=N_TOKENS)
        self._check_layer(layer)
        self._check_heads("queries", q, heads)
        check_softcap(softcap)
        if sinks is not None:
            check_sinks(sinks.n, q.width // head_dim)
            recording.operands.append(sinks)
        sink_values = 0 if sinks is None else sinks.address
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
                *(cache.keys[layer].ctypes.data, cache.values[layer].ctypes.data, out.address, parts, sink_values),
                *(float(scale) / (softcap or 1.0), float(softcap or 0)),
            ),
            heads,
            N_TILES,
            **attention_kernels.constants(
                cache.layout,
                cache.head,
                wide=self.target.wide,
                soft_cap=softcap is not None,
                sinks=sinks is not None,
            ),
        )
        if recording.max_parts:
            arguments = (
                *(header + 8 * N_MERGED, recording.merged.ctypes.data, heads, group_size, head_dim),
                *(recording.starts.ctypes.data, parts, sink_values, out.address, out.stride),
            )
            self._add(
                attention_kernels.merge_parts,
                arguments,
                heads,
                N_MERGED,
                **attention_kernels.state_constants(cache.head, sinks=sinks is not None),
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

    def softcap(self, x: Buffer, cap: float) -> Buffer:
        check_softcap(cap)
        self._check_tensors(x)
        y = Buffer(self._now, x.slot, x.width)
        arguments = (x.address, x.stride // 4, x.stride, y.address, float(cap), 1 / float(cap))
        self._add(elementwise.softcap, arguments, 1, x.slot)
        return y

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


def _packed(weight: Linear) -> CPULinear:
    if not isinstance(weight, CPULinear):
        raise KernelError(f"the CPU backend cannot use a {type(weight).__name__}")
    return weight
