"""What the kernel calls of a step work on: rows and other buffers in one arena of a device's memory.

A call does not launch anything; it says which launches it takes for batches of an `Extent`
(`localllm.kernels.cuda.calls`).  Kernels read the numbers of tokens and of outputs from the batch's header in device
memory and leave the rows beyond them alone, so the launches for an extent serve every batch that fits into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import InitVar, dataclass, field, fields
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from localllm.errors import KernelError
from localllm.kernels.buffers import Buffer
from localllm.kernels.cuda.attention import NO_WINDOW, Heads, Variant, Work, choose_variant, work_of_bucket
from localllm.kernels.cuda.batch import N_OUTPUTS, N_PLACES, N_TOKENS, BatchLayout
from localllm.kernels.cuda.cache import PAGE, CUDACache
from localllm.kernels.cuda.driver import Argument, DeviceMemory, DeviceProperties
from localllm.kernels.cuda.launch import Launch
from localllm.kernels.cuda.matmul import PackedFormat
from localllm.kernels.graph import Attention, Graph, Rope, Route

#: Values that a row is padded to.
PADDING = 32
#: Tokens and outputs of the extents that small batches share.
BUCKETS = (1, 2, 4, 8, 16, 32)
#: Bytes for the partials of attention over a split cache, at most.
MAX_PARTIAL_BYTES = 64 << 20
_ALIGNMENT = 256


def padded(n: int) -> int:
    """The values that a row of ``n`` takes."""
    return -(-n // PADDING) * PADDING


# -- Buffers -------------------------------------------------------------------------------------------------------


class Arena:
    """The memory that the buffers of a step share, once there is some."""

    memory: DeviceMemory | None = None

    def at(self, buffer: Buffer, offset: int = 0, n_bytes: int | None = None) -> DeviceMemory:
        """A buffer, or a stretch of it."""
        if self.memory is None:
            raise KernelError("a step that is only planned has no memory")
        return self.memory.at(buffer.offset + offset, buffer.n_bytes - offset if n_bytes is None else n_bytes)


@dataclass(frozen=True, eq=False)
class Stored:
    """Rows of a tensor, float32 [rows, stride], of which ``width`` values count.

    Attributes:
        slot: what counts the rows: `N_TOKENS`, `N_OUTPUTS` or `N_PLACES`.
    """

    arena: Arena
    buffer: Buffer
    width: int
    slot: int

    @property
    def stride(self) -> int:
        return padded(self.width)

    @property
    def memory(self) -> DeviceMemory:
        return self.arena.at(self.buffer)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Rows as matrix products read them: units and scales, see activations.cuh."""

    arena: Arena
    buffer: Buffer
    scale_bytes: int

    @property
    def units(self) -> DeviceMemory:
        return self.arena.at(self.buffer, 0, self.buffer.n_bytes - self.scale_bytes)

    @property
    def scales(self) -> DeviceMemory:
        return self.arena.at(self.buffer, self.buffer.n_bytes - self.scale_bytes)


def new_inputs(arena: Arena, format: PackedFormat, n_rows: int, width: int, n_heads: int = 1) -> Inputs:
    """Those of up to ``n_rows`` rows of so many heads of ``width`` values."""
    laid_out = format.input_rows(n_rows)
    units = -(-n_heads * format.unit_bytes(width, laid_out) // _ALIGNMENT) * _ALIGNMENT
    scales = n_heads * format.input_scale_bytes(width, laid_out)
    return Inputs(arena, Buffer(units + scales), scales)


def input_kind(format: PackedFormat) -> str:
    """Formats of one kind read the same inputs."""
    return format.name if format.is_float else "int8"


class BatchBuffer:
    """A batch on the device, and its parts."""

    def __init__(self, arena: Arena, layout: BatchLayout) -> None:
        self.layout, self._arena = layout, arena
        self.buffer = Buffer(4 * layout.n_words, is_kept=True)

    def _part(self, place: slice) -> DeviceMemory:
        return self._arena.at(self.buffer, 4 * place.start, 4 * (place.stop - place.start))

    @property
    def memory(self) -> DeviceMemory:
        return self._arena.at(self.buffer)

    @property
    def header(self) -> DeviceMemory:
        return self._part(self.layout.header)

    @property
    def ids(self) -> DeviceMemory:
        return self._part(self.layout.ids)

    @property
    def positions(self) -> DeviceMemory:
        return self._part(self.layout.positions)

    def slots(self, group: int) -> DeviceMemory:
        return self._part(self.layout.slots[group])

    @property
    def outputs(self) -> DeviceMemory:
        return self._part(self.layout.outputs)

    @property
    def sequences(self) -> tuple[DeviceMemory, ...]:
        """What kernels of recurrent states read: header, first tokens, positions, slots of the states."""
        return self.header, self._part(self.layout.starts), self.positions, self._part(self.layout.states)

    def attention(self, group: int) -> tuple[Argument, ...]:
        """PARAMETERS of attention.cu over the caches of a group, as far as they are the batch's."""
        layout = self.layout
        tables = self._part(slice(layout.tables + group * layout.n_blocks, layout.n_words))
        lengths = self._part(layout.lengths)
        return self.header, self._part(layout.starts), lengths, tables, np.int32(layout.table_stride)

    def header_at(self, slot: int) -> DeviceMemory:
        """The header from that slot's number on: for kernels that take the first for the number of their rows."""
        return self.header.at(4 * slot, self.header.n_bytes - 4 * slot)


# -- Experts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixture:
    """Mixtures of ``n`` experts, of which each token goes to ``k``."""

    n: int
    k: int

    def n_places(self, n_tokens: int) -> int:
        """Places that rows of so many tokens can have: those of each expert begin at multiples of 8."""
        n_pairs = n_tokens * self.k
        return -(-(n_pairs + 7 * min(self.n, n_pairs)) // 8) * 8

    def max_places(self, max_tokens: int) -> int:
        """The same of batches of up to so many tokens, whose extents are rounded up."""
        return self.n_places(-(-max_tokens // 8) * 8)

    def n_products(self, n_tokens: int, product_rows: int) -> int:
        """Products that they can be cut into."""
        n_pairs = n_tokens * self.k
        return min(n_pairs, n_pairs // product_rows + self.n)


# -- Attention -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionKind:
    """Attention that is launched alike: its heads, and what it is compiled for but for soft-cap and sinks."""

    heads: Heads
    variant: Variant

    def bucket_bytes(self, n_tokens: int, longest: int) -> int:
        """Bytes of the partials of batches of at most so many tokens, in sequences of at most ``longest``."""
        work = work_of_bucket(n_tokens, longest, self.heads)
        return 4 * sum(work.partial_floats(self.heads, self.variant)) + _ALIGNMENT


# -- Steps ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extent:
    """What launches have room for.

    Attributes:
        n_tokens, n_outputs: in a batch, at most.
        n_places: of what goes to experts, at most.
        attention: the work of each kind of attention that the graph has.
    """

    n_tokens: int
    n_outputs: int
    attention: tuple[tuple[AttentionKind, Work], ...] = ()
    n_places: int = 0

    def rows(self, slot: int) -> int:
        """Rows of a tensor whose rows ``slot`` counts."""
        return (self.n_tokens, self.n_outputs, 0, self.n_places)[slot]

    def work(self, kind: AttentionKind) -> Work:
        return dict(self.attention)[kind]


class Call(Protocol):
    """Kernels that a step calls."""

    def launches(self, extent: Extent) -> Iterable[Launch]:
        """The launches for batches of at most this extent."""
        ...


def stored_in(call: Call) -> Iterator[Stored]:
    """The rows that a call reads and writes."""
    return (value for value in _values(call) if isinstance(value, Stored))


def buffers_of(call: Call) -> list[Buffer]:
    """The buffers that a call uses."""
    return [value if isinstance(value, Buffer) else value.buffer for value in _values(call) if _has_buffer(value)]


def _has_buffer(value: Any) -> bool:
    return isinstance(value, Buffer) or isinstance(getattr(value, "buffer", None), Buffer)


def _values(call: Any) -> Iterator[Any]:
    for each in fields(call):
        value = getattr(call, each.name)
        yield from value if isinstance(value, tuple | list) else (value,)


@dataclass(eq=False)
class StepLimits:
    """What the calls of a step have in common: the device, the cache, and the largest batch.

    Attributes:
        tile_rows: see `localllm.kernels.cuda.matmul.product_launch`.
        ropes: rotary embeddings, and where their frequencies lie.
    """

    graph: InitVar[Graph]
    properties: DeviceProperties
    cache: CUDACache
    max_tokens: int
    max_outputs: int
    tile_rows: tuple[int, ...]
    arena: Arena = field(default_factory=Arena)
    ropes: list[tuple[Rope, Buffer]] = field(default_factory=list)

    def __post_init__(self, graph: Graph) -> None:
        self.batch = BatchBuffer(self.arena, BatchLayout(self.max_tokens, self.max_outputs, self.cache.n_pages))
        operations = [node.operation for node in graph.nodes]
        routes = [op for op in operations if isinstance(op, Route)]
        #: What the mixtures of experts need at most, if there are any.
        self.mixture = Mixture(max(op.logits.width for op in routes), routes[0].k) if routes else None
        self.kinds = tuple(dict.fromkeys(self.kind(op) for op in operations if isinstance(op, Attention)))

    def kind(self, op: Attention) -> AttentionKind:
        """How an attention is launched.

        Raises:
            KernelError: the device has no kernel for heads of this size.
        """
        cache = op.cache
        sees = {"chunked": op.chunk is not None, "causal": op.causal}
        variant = Variant(cache.key_dim, cache.value_dim, cache.type, cache.values_in_keys, **sees)
        heads = Heads(cache.n_heads, op.group_size, min(op.window or op.chunk or NO_WINDOW, NO_WINDOW), op.causal)
        return AttentionKind(heads, choose_variant(variant, self.properties.shared_bytes))

    def max_rows(self, slot: int) -> int:
        if slot == N_PLACES:
            return 0 if self.mixture is None else self.mixture.max_places(self.max_tokens)
        return {N_TOKENS: self.max_tokens, N_OUTPUTS: self.max_outputs}[slot]

    def extent(self, n_tokens: int, n_outputs: int, work: tuple[tuple[AttentionKind, Work], ...] = ()) -> Extent:
        n_places = 0 if self.mixture is None else self.mixture.n_places(n_tokens)
        return Extent(n_tokens, n_outputs, work, n_places)

    def frequencies(self, rope: Rope) -> Buffer:
        """Where those of a rope lie, as append.cu takes them."""
        for known, buffer in self.ropes:
            if known is rope:
                return buffer
        self.ropes.append((rope, Buffer(8 * len(rope.frequencies), is_kept=True)))
        return self.ropes[-1][1]

    # -- Partials of attention -------------------------------------------------------------------------------------

    @cached_property
    def partial_bytes(self) -> int:
        """What the partials of any batch may take: no more than is of use."""
        longest = max(1, self.cache.n_pages[0]) * PAGE
        return min(
            MAX_PARTIAL_BYTES, max((kind.bucket_bytes(BUCKETS[-1], longest) for kind in self.kinds), default=0)
        )

    @property
    def usable_partial_bytes(self) -> int:
        """Those, less what may be lost between sums and states."""
        return max(0, self.partial_bytes - _ALIGNMENT)

    def new_partials(self) -> Buffer:
        return Buffer(max(self.partial_bytes, _ALIGNMENT))

    def partials(self, buffer: Buffer, kind: AttentionKind, work: Work) -> tuple[Argument, Argument]:
        """The sums and the states in a buffer."""
        n_sums, n_states = (max(4, 4 * n) for n in work.partial_floats(kind.heads, kind.variant))
        begin = buffer.n_bytes - n_states
        return self.arena.at(buffer, 0, n_sums), self.arena.at(buffer, begin // 8 * 8, n_states)

    def bucket_work(self, n_tokens: int, longest: int) -> tuple[tuple[AttentionKind, Work], ...] | None:
        """For batches of at most ``n_tokens``, in sequences up to ``longest``; None if partials take too much."""
        if any(kind.bucket_bytes(n_tokens, longest) > self.partial_bytes for kind in self.kinds):
            return None
        return tuple((kind, work_of_bucket(n_tokens, longest, kind.heads)) for kind in self.kinds)
