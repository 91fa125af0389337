"""The `Ops` protocol on CPU kernels.

Nothing runs while a forward pass is recorded: each operation takes buffers, adds instructions to a program, and
returns the buffer they will write.  A step fills in the batch and runs the program.  One program serves every
batch, because kernels read the number of tokens when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError, UsageError
from localllm.kernels.checks import (
    check_append,
    check_choice,
    check_experts,
    check_gate,
    check_norm,
    check_product,
    check_queries,
    check_residual,
    check_routing,
    check_sinks,
    check_softcap,
    check_tensors,
)
from localllm.kernels.cpu import attention as attention_kernels
from localllm.kernels.cpu import elementwise, matmul
from localllm.kernels.cpu import experts as expert_kernels
from localllm.kernels.cpu.cache_types import CACHE_LAYOUTS, PAGE
from localllm.kernels.cpu.compiler import Kernel, variant
from localllm.kernels.cpu.host import default_threads, most_threads
from localllm.kernels.cpu.memory import PADDING, aligned_zeros, padded
from localllm.kernels.cpu.program import Program, Workers
from localllm.kernels.cpu.recording import (
    ALWAYS,
    N_CHOSEN,
    N_MERGED,
    N_OUTPUTS,
    N_TILES,
    N_TOKENS,
    N_USED,
    Buffer,
    ChosenExperts,
    CPUCache,
    Recording,
)
from localllm.kernels.cpu.simd import load_bf16x16, load_f16x16, load_f32x16
from localllm.kernels.cpu.target import choose
from localllm.kernels.cpu.thread_choice import choose_threads
from localllm.kernels.cpu.tiles import RECORD, TILES
from localllm.kernels.cpu.weights import CPUExperts, CPULinear, CPUVector, WeightLoader, packed_bytes
from localllm.kernels.embedding import SMALL_TABLE, CopiedTable, DecodedTable, EmbeddingTable, PackedTable
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
    WholeStep,
    Widening,
)
from localllm.quant.lut import KernelType
from localllm.quant.packing import GROUP, LAYOUTS
from localllm.quant.types import GGMLType

#: Tokens in a step up to which reading the weights takes longer than multiplying them.
FEW_TOKENS = 4

#: Bytes of a layer's keys from which on a cache lies in huge pages: of a short one they would take most at once.
HUGE_LAYER = 4 << 20

#: What counts the rows of tensors.
_ROWS = {N_TOKENS: "each token", N_OUTPUTS: "each output", N_CHOSEN: "each expert of a token"}

FLOAT_LOADS: dict[KernelType, Any] = {
    GGMLType.F32: load_f32x16,
    GGMLType.F16: load_f16x16,
    GGMLType.BF16: load_bf16x16,
}


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
        self._loader = WeightLoader(self.workers, self.target, progress)
        self._recording: Recording | None = None

    # -- Loading ---------------------------------------------------------------------------------------------------

    def load_linear(
        self, weight: Weight, bias: Weight | None = None, *, widening: Widening | None = None
    ) -> CPULinear:
        return self._loader.linear(weight, bias, widening)

    def load_experts(self, weight: Weight, *, widening: Widening | None = None) -> CPUExperts:
        return self._loader.experts(weight, widening)

    @staticmethod
    def packed_bytes(weight: Weight) -> int:
        return packed_bytes(weight)

    def load_vector(self, weight: Weight) -> CPUVector:
        return self._loader.vector(weight)

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
        return WholeStep(part)

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
        check_tensors(tensors, Buffer, self._now, _ROWS, slot)

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
        check_norm(weight.n, x.width)
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
        check_product(w, x.width, y.width)
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
        head_dim, norms = cache.shape.head_dim, (q_norm, k_norm)
        self._check_tensors(q, k, v, slot=N_TOKENS)
        check_queries(q.width, layer, cache.shape)
        check_append(k.width, v.width, rope, [norm.n for norm in norms if norm is not None], cache.shape)
        for x, norm in zip((q, k), norms, strict=True):
            if norm is not None:
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
        check_queries(q.width, layer, cache.shape)
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
        recording = self._now
        self._check_tensors(gate, up)
        check_gate(gate.width, up.width, activation, kernels)
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
        check_residual(residual.width, products.width)
        y = residual.changed()
        arguments = (products.address, routing.shares, recording.n_chosen, y.stride // 4, y.stride)
        self._add(expert_kernels.add_experts, (*arguments, residual.address, y.address), 1, N_TOKENS)
        return y

    def _multiply_experts(self, x: Buffer, weights: Sequence[Experts], chosen: Routing) -> list[Buffer]:
        """Rows of x, or of each token's where it has one for each token, times the matrices of the experts."""
        recording = self._now
        check_routing(chosen, ChosenExperts, recording)
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


def _constants(kind: KernelType) -> dict[str, Any]:
    """What kernels of a format's products are compiled for."""
    layout = LAYOUTS[kind]
    if tile := TILES.get(kind):
        return {"TILE_BYTES": layout.tile_bytes, "BLOCKS": layout.columns // 32, **tile.constants}
    return {"LOAD": FLOAT_LOADS[kind], "COLUMN_BYTES": layout.tile_bytes}


def _checked_experts(weight: Experts, n_in: int, n_experts: int) -> CPUExperts:
    if not isinstance(weight, CPUExperts):
        raise KernelError(f"the CPU backend cannot use a {type(weight).__name__}")
    check_experts(weight, n_in, n_experts)
    return weight


def _packed(weight: Linear) -> CPULinear:
    if not isinstance(weight, CPULinear):
        raise KernelError(f"the CPU backend cannot use a {type(weight).__name__}")
    return weight
