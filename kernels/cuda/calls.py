"""Kernel calls that make up a step on a CUDA device, and the launches of each call.

A call does not launch kernels itself; it returns the launches for batches of an `Extent`.  Kernels read the number of
rows from the batch's header in device memory, and skip rows outside the batch, so the launches of an extent are valid
for every batch that fits it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.kernels.backend import Batch
from localllm.kernels.buffers import Address, Buffer, StoredRows
from localllm.kernels.cuda.attention import (
    NO_WINDOW,
    AttentionVariant,
    HeadShape,
    Work,
    choose_variant,
    work_of_bucket,
)
from localllm.kernels.cuda.cache import PAGE, CUDACache
from localllm.kernels.cuda.driver import DeviceProperties, Launch
from localllm.kernels.cuda.matmul import PackedFormat, ProductLimits
from localllm.kernels.cuda.roofline import Kind
from localllm.kernels.graph import Graph, Rope
from localllm.kernels.operations import Attention, Route

#: Indices in a batch's header (batch.cuh) of the numbers of rows.
N_TOKENS, N_OUTPUTS, N_SEQUENCES, N_PLACES = range(4)
_HEADER, DRAW_WORDS = 4, 5
#: Smaller than all token ids, and than ~i for chosen ids.
EMBEDDED_IDS = np.int32(-(1 << 31))
#: Rows are padded to a multiple of this many values.
PADDING = 32
#: Sizes, in tokens and outputs, of the extents that small batches share.
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
#: Maximum bytes of the partials of attention over a split cache.
MAX_PARTIAL_BYTES = 64 << 20
_ALIGNMENT = 256
#: 2^192 / (2 pi), rounded.
_INVERSE_TURN = 0x28BE60DB9391054A7F09D5F47D4D377036D8A5664F10E410


def padded(n: int) -> int:
    return -(-n // PADDING) * PADDING


# -- Buffers -------------------------------------------------------------------------------------------------------


class DeviceRows(StoredRows):
    """Rows of a tensor, float32 [rows, stride], in device memory; the first ``width`` values are used."""

    @property
    def stride(self) -> int:
        """Values between rows."""
        return padded(self.width)

    def bytes_of(self, n_rows: int) -> int:
        return 4 * self.width * n_rows


@dataclass(frozen=True, eq=False)
class Inputs:
    """Rows in the format that matrix products read: units and scales, see activations.cuh."""

    buffer: Buffer
    format: PackedFormat
    width: int  # values of a row, or of every head if heads have separate matrices
    slot: int
    n_heads: int
    scale_bytes: int
    alone: DeviceRows | None = None  # for a single row, the row itself if it equals its units

    @classmethod
    def new(cls, format: PackedFormat, n_rows: int, width: int, slot: int, n_heads: int = 1) -> Inputs:
        laid_out = format.input_rows(n_rows)
        units = -(-n_heads * format.unit_bytes(width, laid_out) // _ALIGNMENT) * _ALIGNMENT
        scales = n_heads * format.input_scale_bytes(width, laid_out)
        return cls(Buffer(units + scales), format, width, slot, n_heads, scales)

    def bytes_of(self, n_rows: int) -> int:
        row_bytes = self.format.unit_bytes(self.width, n_rows) + self.format.input_scale_bytes(self.width, n_rows)
        return self.n_heads * row_bytes

    def arguments(self, n_rows: int) -> dict[str, Any]:
        """Return arguments for kernels: the units, the scales, and the number of rows of the layout."""
        scales = self.buffer.at(self.buffer.n_bytes - self.scale_bytes)
        units = self.alone.buffer if self.alone and n_rows == 1 else self.buffer
        return {"units": units, "scales": scales, "n_rows": self.format.input_rows(n_rows)}


class BatchBuffer:
    """A batch in the one block of int32 that a step uploads: the header first (batch.cuh), block tables last.

    The block tables of all groups of a sequence are adjacent.  Tokens with separate embeddings have the embedding's
    number, counted from `EMBEDDED_IDS`, as id.

    Args:
        graph: the graph that reads the batch.  Positions by axis and spans are included only if it reads them.
        n_pages: pages of the cache's groups: a block table may have as many entries as the first number.
    """

    def __init__(self, graph: Graph, max_tokens: int, max_outputs: int, n_pages: tuple[int, ...]) -> None:
        has_ends = graph.has_spans or graph.has_parts
        draws, media_sizes = DRAW_WORDS * max_outputs, (4 * max_tokens * graph.has_axes, max_tokens * has_ends)
        self._max_tokens, self._has_axes = max_tokens, graph.has_axes
        self._has_spans, self._has_parts = graph.has_spans, graph.has_parts
        sizes = (_HEADER, draws, max_tokens, max_tokens, max_outputs, max_tokens + 1, max_tokens, max_tokens)
        self._bounds = [*accumulate((*sizes, *media_sizes, *(max_tokens for _ in n_pages)), initial=0)]
        self.n_groups, self._n_blocks = len(n_pages), max(1, n_pages[0])
        #: Entries between the tables of two sequences.
        self._table_stride = self.n_groups * self._n_blocks
        self.buffer = Buffer(4 * self.words_of(max_tokens), is_kept=True)
        addresses = [self.buffer.at(4 * begin) for begin in self._bounds]
        self.header, self.draws, self.ids, self.positions, self.outputs, *remaining = addresses
        self._starts, self._lengths, self._states, self.axes, self._ends, *self.slots, self._tables = remaining

    def words_of(self, n_sequences: int) -> int:
        """Return the maximum words of a batch of ``n_sequences`` sequences."""
        return self._bounds[-1] + n_sequences * self._table_stride

    def fill(self, words: NDArray[np.int32], batch: Batch, uploaded_tables: NDArray[np.int32]) -> list[slice]:
        """Write a checked batch.  Return the words to upload, without the block tables ``uploaded_tables``."""
        n_tokens, n_sequences = len(batch.ids), len(batch.kv_lengths)
        tables = batch.block_tables[:, :, : self._n_blocks]
        sequences = np.repeat(np.arange(n_sequences), np.diff(batch.query_starts))
        slots = tables[:, sequences, batch.positions // PAGE] * np.int32(PAGE) + batch.positions % PAGE
        draws = batch.draws if len(batch.draws) else np.zeros((len(batch.outputs), DRAW_WORDS), np.float32)
        ids = batch.ids
        if n := len(batch.embedded):
            ids = ids.copy()
            ids[batch.embedded] = EMBEDDED_IDS + np.arange(n, dtype=np.int32)
        rows = draws.ravel().view(np.int32), ids, batch.positions, batch.outputs
        sections = *rows, batch.query_starts, batch.kv_lengths, batch.states, *self._media_sections(batch)
        words[:3] = n_tokens, len(batch.outputs), n_sequences
        for begin, values in zip(self._bounds[1:], (*sections, *slots), strict=False):
            words[begin : begin + len(values)] = values
        is_new = np.ones(n_sequences, np.bool_)
        if uploaded_tables.shape[::2] == tables.shape[::2]:
            n = min(n_sequences, uploaded_tables.shape[1])
            is_new[:n] = (uploaded_tables[:, :n] != tables[:, :n]).any(axis=(0, 2))
        if not is_new.any():
            return [slice(0, self._bounds[-1])]
        first, stop = int(is_new.argmax()), n_sequences - int(is_new[::-1].argmax())
        table_words = slice(self.words_of(first), self.words_of(stop))
        new_tables = words[table_words].reshape(-1, self.n_groups, self._n_blocks)
        new_tables[:, :, : tables.shape[2]] = tables[:, first:stop].swapaxes(0, 1)
        return [slice(0, table_words.stop)] if first == 0 else [slice(0, self._bounds[-1]), table_words]

    def _media_sections(self, batch: Batch) -> Iterator[NDArray[np.int32]]:
        """Yield the positions by axis [4 * max_tokens], and the ends of visible spans or the divisions of sequences,
        if the graph reads them."""
        axes = np.zeros((4, self._max_tokens * self._has_axes), np.int32)
        if self._has_axes:
            n = len(batch.axes) if batch.axes.size else 4
            axes[:n, : len(batch.ids)] = batch.axes if batch.axes.size else batch.positions
        yield axes.ravel()
        ends = batch.ends if len(batch.ends) else batch.positions + np.int32(1)
        yield batch.divisions() if self._has_parts else ends[: len(ends) * self._has_spans]

    @property
    def sequences(self) -> dict[str, Any]:
        """Arguments of kernels with recurrent states: header, first tokens, positions, state slots."""
        return {"header": self.header, "starts": self._starts, "positions": self.positions, "slots": self._states}

    def block_tables(self, group: int) -> Address:
        return self.buffer.at(self._tables.n_bytes + 4 * group * self._n_blocks)

    def pages(self, group: int) -> dict[str, Any]:
        tables = {"block_tables": self.block_tables(group), "block_stride": self._table_stride}
        return {"header": self.header, "starts": self._starts, **tables}

    def attention(self, group: int) -> dict[str, Any]:
        """Return the batch's part of PARAMETERS of attention.cu, for the caches of a group."""
        return {**self.pages(group), "kv_lengths": self._lengths, "ends": self._ends}

    def counter(self, slot: int) -> Address:
        """Return the header from the number ``slot`` on, for kernels that read their number of rows at its start."""
        return self.buffer.at(4 * slot)


def phases(frequencies: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Convert radians per position to the phases of `append.cu`: turns per position, modulo 1, in units of 2^-64.

    The product of a position and a phase, modulo 2^64, is the angle as a fraction of a turn: exact for any position.
    """
    exact = (round(Fraction(float(f)) * _INVERSE_TURN / 2**128) % 2**64 for f in frequencies)
    return np.array(list(exact), np.uint64)


# -- Sizes of batches ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixture:
    """Mixtures of ``n`` experts with ``k`` experts per token."""

    n: int
    k: int

    def n_places(self, n_tokens: int) -> int:
        """Return the maximum places of ``n_tokens`` rows: the places of each expert start at a multiple of 8."""
        n_pairs = n_tokens * self.k
        return -(-(n_pairs + 7 * min(self.n, n_pairs)) // 8) * 8

    def n_products(self, n_tokens: int, product_rows: int) -> int:
        """Return the maximum number of products that the places are divided into."""
        n_pairs = n_tokens * self.k
        return min(n_pairs, n_pairs // product_rows + self.n)


@dataclass(frozen=True)
class AttentionKind:
    """Attention with the same launches: its heads, and its compile-time parameters except soft-cap and sinks."""

    heads: HeadShape
    variant: AttentionVariant

    def bucket_bytes(self, n_tokens: int, longest: int) -> int:
        """Return the bytes of the partials of batches up to ``n_tokens`` tokens, in sequences up to ``longest``."""
        work = work_of_bucket(n_tokens, longest, self.heads)
        return 4 * sum(work.partial_floats(self.heads, self.variant)) + _ALIGNMENT


@dataclass(frozen=True)
class Extent:
    """Maximum sizes of launches."""

    # n_tokens, n_outputs: maximum in a batch
    n_tokens: int
    n_outputs: int
    attention: tuple[tuple[AttentionKind, Work], ...] = ()  # the work of each kind of attention in the graph
    n_places: int = 0  # maximum places of experts
    top_k: int = 0  # number of largest logits to find; 0 if all logits are requested
    has_embedded: bool = False  # whether tokens have separate embeddings

    def rows(self, slot: int) -> int:
        """Return the rows of a tensor whose rows ``slot`` counts."""
        return (self.n_tokens, self.n_outputs, 0, self.n_places)[slot]

    def work(self, kind: AttentionKind) -> Work:
        return dict(self.attention)[kind]


@dataclass(frozen=True)
class BatchSizes:
    """Sizes of a batch that costs depend on."""

    # n_tokens, n_outputs: totals of all sequences
    n_tokens: int
    n_outputs: int
    sequences: tuple[tuple[int, int], ...]  # per sequence: tokens in the batch, length including them
    n_chosen: int = 0  # experts per token

    @classmethod
    def of(cls, batch: Batch, mixture: Mixture | None = None) -> BatchSizes:
        sequences = tuple((stop - start, length) for start, stop, length in batch.sequences())
        return cls(len(batch.ids), len(batch.outputs), sequences, 0 if mixture is None else mixture.k)

    def rows(self, slot: int) -> int:
        """Return the rows of a tensor whose rows ``slot`` counts."""
        return (self.n_tokens, self.n_outputs, 0, self.n_tokens * self.n_chosen)[slot]

    def seen(self, window: int) -> tuple[int, int]:
        """Return the positions seen by each token, in total, and the positions seen by any token of each sequence."""
        pairs = positions = 0
        for n, length in self.sequences:
            first = length - n
            pairs += sum(min(position + 1, window) for position in range(first, length))
            positions += length - max(0, first + 1 - window)
        return pairs, positions


@dataclass(eq=False)
class StepLimits:
    """Limits shared by a step's calls: the device, the cache, and the largest batch."""

    graph: InitVar[Graph]
    properties: DeviceProperties
    cache: CUDACache
    max_tokens: int
    max_outputs: int
    products: ProductLimits  # properties that launches of matrix products depend on
    # rotary embeddings, and the buffers of their frequencies
    ropes: list[tuple[Rope, Buffer]] = field(default_factory=list)

    def __post_init__(self, graph: Graph) -> None:
        self.batch = BatchBuffer(graph, self.max_tokens, self.max_outputs, self.cache.n_pages)
        self.n_joined = graph.n_joined
        operations = [node.operation for node in graph.nodes]
        routes = [op for op in operations if isinstance(op, Route)]
        #: Maximum requirements of the mixtures of experts; None without experts.
        self.mixture = Mixture(max(op.logits.width for op in routes), routes[0].k) if routes else None
        self.kinds = tuple(
            dict.fromkeys(
                self.kind(op)
                for op in operations
                if isinstance(op, Attention) and op.selected is None and op.entries is None
            )
        )

    def kind(self, op: Attention) -> AttentionKind:
        """Return how an attention is launched."""
        cache = op.cache
        part = ("all", "prompt", "reply").index(op.part)
        sees: Any = {"chunked": op.chunk is not None, "causal": op.causal, "has_spans": op.has_spans, "part": part}
        variant = AttentionVariant(cache.key_dim, cache.value_dim, cache.type, cache.values_in_keys, **sees)
        window = min(op.window or op.chunk or NO_WINDOW, NO_WINDOW)
        heads = HeadShape(cache.n_heads, op.group_size, window, op.causal, op.has_spans)
        return AttentionKind(heads, choose_variant(variant, self.properties.shared_bytes))

    def max_rows(self, slot: int) -> int:
        # Extents are rounded up.
        n_places = 0 if self.mixture is None else self.mixture.n_places(-(-self.max_tokens // 8) * 8)
        return (self.max_tokens, self.max_outputs, 0, n_places)[slot]

    def extent(self, n_tokens: int, n_outputs: int, work: tuple[tuple[AttentionKind, Work], ...] = ()) -> Extent:
        n_places = 0 if self.mixture is None else self.mixture.n_places(n_tokens)
        return Extent(n_tokens, n_outputs, work, n_places)

    def frequencies(self, rope: Rope) -> Buffer:
        """Return the buffer of a rope's frequencies, in the format of append.cu."""
        for existing, buffer in self.ropes:
            if existing is rope:
                return buffer
        self.ropes.append((rope, Buffer(8 * len(rope.frequencies) + 4 * len(rope.axes), is_kept=True)))
        return self.ropes[-1][1]

    @cached_property
    def partial_bytes(self) -> int:
        """Bytes for the partials of attention of any batch, at most the useful number."""
        longest = max(1, self.cache.n_pages[0]) * PAGE
        most = max((kind.bucket_bytes(BUCKETS[-1], longest) for kind in self.kinds), default=0)
        return min(MAX_PARTIAL_BYTES, most)

    @property
    def usable_partial_bytes(self) -> int:
        """`partial_bytes`, minus the padding between sums and states."""
        return max(0, self.partial_bytes - _ALIGNMENT)

    def new_partials(self) -> Buffer:
        return Buffer(max(self.partial_bytes, _ALIGNMENT))

    def bucket_work(self, n_tokens: int, longest: int) -> tuple[tuple[AttentionKind, Work], ...] | None:
        """Return the work of batches up to ``n_tokens``, with sequences up to ``longest``; None if too large."""
        if any(kind.bucket_bytes(n_tokens, longest) > self.partial_bytes for kind in self.kinds):
            return None
        return tuple((kind, work_of_bucket(n_tokens, longest, kind.heads)) for kind in self.kinds)


# -- Calls ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """The minimum cost of a computation: real kernels may read data twice or multiply more."""

    n_bytes: float = 0.0  # read and written in device memory
    n_operations: float = 0.0  # a multiply-add counts as two
    kind: Kind | None = None  # type of the operands; None if tensor cores are not used

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.n_bytes + other.n_bytes, self.n_operations + other.n_operations, self.kind or other.kind)

    def seconds(self, bandwidth: float, rates: Mapping[Kind, float]) -> float:
        """Return the minimum seconds on a device with this bandwidth in bytes per second.

        Args:
            rates: operations per second, for every kind that occurs.
        """
        products = 0.0 if self.kind is None else self.n_operations / rates[self.kind]
        return max(self.n_bytes / bandwidth, products)


@dataclass(frozen=True, eq=False)
class KernelCall:
    """Kernels that compute a part of an operation."""

    name: str  # name in a profile, shared by all layers
    launches: Callable[[Extent], Iterable[Launch]]  # launches for batches within an extent
    operands: Sequence[DeviceRows | Inputs | Buffer]  # buffers that they read and write
    cost: Callable[[BatchSizes], Cost]  # cost for a batch

    @property
    def buffers(self) -> list[Buffer]:
        alone = (x.alone for x in self.operands if isinstance(x, Inputs) and x.alone)
        return [x if isinstance(x, Buffer) else x.buffer for x in (*self.operands, *alone)]


@dataclass(frozen=True, eq=False)
class HostCall(KernelCall):
    """A point between kernels where the host acts."""


@dataclass(frozen=True, eq=False)
class SendCall(HostCall):
    """A point where rows are copied to the host, for its block ``number``; see `localllm.kernels.offload`."""

    rows: tuple[DeviceRows, ...] = field(kw_only=True)
    number: int = field(kw_only=True)


@dataclass(frozen=True, eq=False)
class ReceiveCall(HostCall):
    """A point where the host computes its block ``number``, and its results are copied to rows."""

    rows: tuple[DeviceRows, ...] = field(kw_only=True)
    number: int = field(kw_only=True)


@dataclass(frozen=True, eq=False)
class EditCall(HostCall):
    """A point where the host changes rows of a tensor; see `localllm.kernels.operations.HostEdit`."""

    value_name: str = field(kw_only=True)
    rows: DeviceRows = field(kw_only=True)
    base: DeviceRows | None = field(kw_only=True)


def runs_of(calls: Sequence[KernelCall], kind: type[KernelCall]) -> list[tuple[bool, list[Any]]]:
    """Divide calls into runs of neighbouring calls, and single calls of a kind; the flag is True for the latter."""
    runs: list[tuple[bool, list[Any]]] = [(False, [])]
    for call in calls:
        if isinstance(call, kind):
            runs += [(True, [call]), (False, [])]
        else:
            runs[-1][1].append(call)
    return runs
