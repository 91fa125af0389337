"""Backends. A backend compiles a graph to a `Step`, which computes the logits of batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.graph import Graph, LayerTag, Value, Weight
from localllm.kernels.operations import Embed, ExpertLinears, ExpertOutput, Input
from localllm.quant.formats import dequantize

#: Called with each weight of a file after it is packed.
Progress = Callable[[Weight], None]
#: Changes rows [rows, width] of the value with a name in place. The last argument is the rows' base, or None.
EditRows = Callable[[str, NDArray[np.float32], NDArray[np.float32] | None], None]


@dataclass(frozen=True)
class Batch:
    """A ragged batch: the new tokens of S sequences, concatenated.

    Prefill, decode, several sequences at once and the verification of drafted tokens all use this class.
    """

    # int32 [T], token ids; ~i means the id that row i of the previous batch chooses, see `n_chosen`
    ids: NDArray[np.int32]
    positions: NDArray[np.int32]  # int32 [T], position of each token in its sequence, from 0
    query_starts: NDArray[np.int32]  # int32 [S + 1]; sequence s has the tokens query_starts[s] : query_starts[s + 1]
    kv_lengths: NDArray[np.int32]  # int32 [S], tokens in the cache after this batch's are appended
    # int32 [n_groups, S, max_blocks]. Page block_tables[g, s, p // page_size] stores token position p of sequence s
    # for the caches of group g (`Graph.windows`). Pages before the window are not read.
    block_tables: NDArray[np.int32]
    outputs: NDArray[np.int32]  # int32 [N], rows of the batch whose logits are computed
    # int32 [S], slot of each sequence's recurrent states; empty for models without recurrent states
    states: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    # float32 [T, n_adapters], weight of each adapter for each token; [0, 0]: no adapters
    adapters: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    top_k: int = 0  # number of largest logits to return per output; 0: all logits
    # outputs of the previous batch that choose ids of this batch; that batch needs a top_k and a step that
    # `chooses_ahead`
    n_chosen: int = 0
    # float32 [N, 5], sampling of each output: top-k, top-p, min-p, temperature, and a random number 0 <= u < 1, see
    # `localllm.sampling.candidates`. top-k 0 selects the largest logit. [0, 5]: all outputs do.
    draws: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 5), np.float32))
    # int32 [n], ascending rows of tokens with separate embeddings (images and audio); their ids are 0
    embedded: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    # float32 [n, k, d], these embeddings: the first, then further embeddings that layers add
    # (`localllm.kernels.operations.AddRows`)
    embeddings: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))
    # int32 [3, T], position of each token in time, by row and by column (`localllm.kernels.graph.Rope`), at most its
    # position in the sequence; [3, 0]: the position in the sequence for all three
    axes: NDArray[np.int32] = field(default_factory=lambda: np.zeros((3, 0), np.int32))
    # int32 [T], end of the positions that a token sees, for tokens that see later ones
    # (`localllm.kernels.operations.Attention`); [0]: no token sees later ones
    ends: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    # int32 [T], first position that a token sees, for tokens that see only a span, which ends at ``ends``; without
    # ``ends``, the position that divides the token's sequence (`localllm.kernels.operations.Attention.part`)
    begins: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    # changes rows in place, for graphs with `localllm.kernels.operations.HostEdit`
    edit: EditRows | None = None

    def sequences(self) -> Iterator[tuple[int, int, int]]:
        """Yields (first_row, end_row, kv_length) per sequence."""
        starts = self.query_starts.tolist()
        return zip(starts[:-1], starts[1:], self.kv_lengths.tolist(), strict=True)

    def check_size(self, max_tokens: int, max_outputs: int) -> None:
        """Raises KernelError if the batch is larger than the limits that a step was compiled for."""
        n_tokens, n_outputs = len(self.ids), len(self.outputs)
        if n_tokens > max_tokens or n_outputs > max_outputs:
            raise KernelError(
                f"a batch of {n_tokens} tokens and {n_outputs} outputs is larger than this step was compiled for, "
                f"{max_tokens} and {max_outputs}"
            )

    def check(self, cache: Cache, n_joined: int = 1) -> None:
        """Raises KernelError if an index is outside the batch or the cache. Outputs have ``n_joined`` rows."""
        n_tokens, starts = len(self.ids), self.query_starts.tolist()
        if starts[0] != 0 or starts[-1] != n_tokens or n_tokens == 0 or any(a >= b for a, b in pairwise(starts)):
            raise KernelError(f"a batch of {n_tokens} tokens cannot be split at {starts}")
        n_groups, n_tables, n_blocks = self.block_tables.shape
        if n_groups != len(cache.windows):
            raise KernelError(f"a batch has block tables of {n_groups} groups of caches, not {len(cache.windows)}")
        if not len(starts) - 1 == len(self.kv_lengths) == n_tables:
            raise KernelError(f"a batch of {len(starts) - 1} sequences needs a length and a block table per sequence")
        positions = self.positions.tolist()
        for s, (start, stop, kv_length) in enumerate(self.sequences()):
            first = kv_length - (stop - start)
            if first < 0 or positions[start:stop] != list(range(first, kv_length)):
                raise KernelError("the positions of a batch do not match the lengths of its sequences")
            if n_blocks * cache.page_size < kv_length:
                raise KernelError(f"a batch's block tables are too short for {kv_length} tokens")
            for group, window in enumerate(cache.windows):
                first_page = 0 if window is None else max(0, first + 1 - window) // cache.page_size
                pages = self.block_tables[group, s, first_page : -(-kv_length // cache.page_size)].tolist()
                if min(pages) < 0 or max(pages) >= cache.n_pages[group]:
                    raise KernelError(f"a batch names a page outside a cache of {cache.n_pages[group]}")
        # Lists are much faster than numpy's minimum for a few numbers.
        outputs = self.outputs.tolist()
        if outputs and not 0 <= min(outputs) <= max(outputs) <= n_tokens - n_joined:
            raise KernelError(f"a batch requests the logits of a row that is none of its {n_tokens} tokens")
        if len(self.draws) and self.draws.shape != (len(outputs), 5):
            raise KernelError(f"a batch of {len(outputs)} outputs needs one draw each, not {list(self.draws.shape)}")
        if len(self.embedded) or self.axes.size or len(self.ends) or len(self.begins):
            self._check_media()
        if not cache.n_states:
            return
        if not len(self.states) == len(set(self.states.tolist())) == len(starts) - 1:
            raise KernelError(f"a batch of {len(starts) - 1} sequences needs one slot of recurrent states each")
        if not 0 <= self.states.min() <= self.states.max() < cache.n_states:
            raise KernelError(f"a batch names a recurrent state outside a cache of {cache.n_states}")

    def _check_media(self) -> None:
        n, embedded, positions = len(self.ids), self.embedded, self.positions
        if len(embedded) and (min(embedded) < 0 or max(embedded) >= n or (np.diff(embedded) <= 0).any()):
            raise KernelError(f"the rows of embeddings in a batch of {n} tokens are out of range or not ascending")
        if self.ids[embedded].any():
            raise KernelError("a batch has tokens with separate embeddings whose ids are not 0")
        if self.embeddings.ndim != 3 or len(self.embeddings) != len(embedded):
            raise KernelError(f"a batch has embeddings {list(self.embeddings.shape)} of {len(embedded)} tokens")
        shapes = (3, n), (4, n)
        if self.axes.size and (
            self.axes.shape not in shapes or (self.axes < 0).any() or (self.axes > positions).any()
        ):
            raise KernelError("a batch has tokens whose position in an image exceeds their position in the sequence")
        if len(self.ends):
            lengths = np.repeat(self.kv_lengths, np.diff(self.query_starts))
            if len(self.ends) != n or (self.ends <= positions).any() or (self.ends > lengths).any():
                raise KernelError("a batch has tokens that see positions after the batch: do not split spans")
            if (np.diff(self.ends) < 0)[np.diff(positions) == 1].any():
                raise KernelError("the ends of visible positions decrease within a sequence of a batch")
        if len(self.begins) and not len(self.ends):
            if len(self.begins) != n or (self.begins < 0).any() or (self.begins > positions).any():
                raise KernelError("a batch has tokens before the division of their sequence")
        elif len(self.begins) and (
            not len(self.begins) == len(self.ends) == n or (self.begins < 0).any() or (self.begins >= self.ends).any()
        ):
            raise KernelError("a batch has tokens that see an empty span")
        if len(self.begins) and (np.diff(self.begins) < 0)[np.diff(positions) == 1].any():
            raise KernelError("the starts of visible spans decrease within a sequence of a batch")

    def embeddings_of(self, index: int, width: int) -> NDArray[np.float32]:
        """Return embedding ``index`` of all ``embedded`` tokens, [n, width]."""
        _, n, own_width = self.embeddings.shape
        if not (index < n and own_width == width and self.embeddings.dtype == np.float32):
            raise KernelError(
                f"a batch has {n} embeddings of {own_width} values in {self.embeddings.dtype} for each token of an "
                f"image, but the model needs at least {index + 1} of {width} in float32"
            )
        return self.embeddings[:, index]

    def divisions(self) -> NDArray[np.int32]:
        """Return the position that divides the sequence of each token; without ``begins`` its own position."""
        return self.begins if len(self.begins) else self.positions

    def rows_of(self, n_rows: int, *, by_position: bool = False) -> NDArray[np.int32]:
        """Return the ids or positions as indices of a table [n_rows, …]. Raises KernelError if out of range."""
        rows = self.positions if by_position else self.ids
        numbers = rows.tolist()
        if numbers and not -self.n_chosen <= min(numbers) <= max(numbers) < n_rows:
            fault = "positions outside a table" if by_position else "token ids outside the vocabulary"
            raise KernelError(f"a batch has {fault} of {n_rows}")
        return rows


class TopK(NamedTuple):
    """The k largest logits of each row, in descending order: equal logits by id, NaN before any number."""

    ids: NDArray[np.int32]  # int32 [N, k]
    logits: NDArray[np.float32]  # float32 [N, k]
    # all logits [n_vocab] of the requested rows
    whole: Mapping[int, NDArray[np.float32]] = MappingProxyType({})
    chosen: NDArray[np.int32] | None = None  # int32 [N], ids that the next batch may refer to; None: the largest

    def row(self, i: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return ids and logits [k] of one row."""
        return self.ids[i], self.logits[i]


def top_k(logits: NDArray[np.float32], k: int) -> TopK:
    """Return the ``k`` largest of each row of logits [N, n_vocab]."""
    is_nan = np.isnan(logits)
    ids = np.lexsort((np.where(is_nan, 0, -logits), ~is_nan))[:, :k].astype(np.int32)
    return TopK(ids, np.take_along_axis(logits, ids, axis=1))


_SPLIT_BY_ROWS = (
    "the values of a model whose layers are split by rows cannot be read or changed: leave split_mode out to split "
    "the model by layers, or load it on one device"
)

# -- Steps ---------------------------------------------------------------------------------------------------------


class Output(ABC):
    """The output of a graph: logits [N, n_vocab], or hidden states [T, d] as input of the next device.

    The output may still be in computation. The arrays belong to the step and are valid until its next call.
    """

    @abstractmethod
    def rows(self) -> NDArray[np.float32]:
        """Wait for the output and return it in host memory."""

    def top_k(self, k: int, whole: Sequence[int] = ()) -> TopK:
        """Wait for the logits and return the ``k`` largest, and all logits of the rows in ``whole``."""
        rows = self.rows()
        return top_k(rows, k)._replace(whole={i: rows[i] for i in whole})


@dataclass(frozen=True)
class HostOutput(Output):
    """Output of a synchronous step, in host memory."""

    matrix: NDArray[np.float32]

    def rows(self) -> NDArray[np.float32]:
        return self.matrix


class Cache(Protocol):
    """The cache of a step's layers: pages of ``page_size`` tokens, named by block tables, and recurrent states."""

    @property
    def page_size(self) -> int: ...
    @property
    def windows(self) -> Sequence[int | None]:
        """Window of each group, see `Graph.windows`."""

    @property
    def n_pages(self) -> tuple[int, ...]:
        """Pages per group."""

    @property
    def n_states(self) -> int:
        """Slots for the recurrent states of a sequence; 0 if no layer has any."""

    @property
    def n_bytes(self) -> int:
        """Bytes of memory."""

    # In the next four methods, group None selects slots of recurrent states, in all layers, instead of pages.

    def copy(self, group: int | None, source: int, target: int) -> None:
        """Copy one page, in all layers of a group."""

    def n_bytes_of(self, group: int | None) -> int:
        """Return the number of bytes that `read` returns."""

    def read(self, group: int | None, number: int) -> bytes:
        """Return the bytes of a page, in all layers of a group."""

    def write(self, group: int | None, number: int, data: bytes) -> None:
        """Write the bytes that `read` returned into a page of the same group."""


class HostCache(ABC):
    """Pages and slots of a `Cache` in host memory."""

    @abstractmethod
    def _arrays(self, group: int | None, number: int) -> list[NDArray[Any]]:
        """Return a page in the layers of a group or, for None, a slot in all layers: contiguous arrays."""

    def copy(self, group: int | None, source: int, target: int) -> None:
        for original, copy in zip(self._arrays(group, source), self._arrays(group, target), strict=True):
            copy[...] = original

    def n_bytes_of(self, group: int | None) -> int:
        return sum(array.nbytes for array in self._arrays(group, 0))

    def read(self, group: int | None, number: int) -> bytes:
        return b"".join(array.tobytes() for array in self._arrays(group, number))

    def write(self, group: int | None, number: int, data: bytes) -> None:
        scatter(data, [array.reshape(-1).view(np.uint8) for array in self._arrays(group, number)])


def scatter(data: bytes, arrays: Sequence[NDArray[np.uint8]]) -> None:
    """Fill flat arrays in order. Raises ValueError if the sizes do not match."""
    if len(data) != sum(array.size for array in arrays):
        raise ValueError(f"{len(data)} bytes do not match the size of a page or slot")
    begin = 0
    for array in arrays:
        array[:] = np.frombuffer(data, np.uint8, array.size, begin)
        begin += array.size


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight as a backend stores it."""

    name: str  # tensor name in the file
    layer: LayerTag  # layer that uses it
    file_type: str  # format in the file, such as "IQ2_XS"
    kernel_type: str  # format that kernels read, such as "LUT_IQ2_16"
    n_bytes: int  # size in memory
    is_expert: bool = False  # True for matrices of experts; a token needs only a few
    # True if the target model of a drafter already stores the weight; it then needs no further memory
    is_shared: bool = False
    is_in_file: bool = False  # True if it stays in the file, and experts are packed when selected

    @property
    def own_bytes(self) -> int:
        """Bytes that are neither shared nor left in the file."""
        return 0 if self.is_shared or self.is_in_file else self.n_bytes


class ExpertReads(NamedTuple):
    """Reads of experts that stay in a file, since the file was loaded."""

    needed: int  # bytes used by steps, from memory or the file
    read: int  # bytes read from the file
    read_s: float  # seconds with at least one read in progress
    wait_s: float  # seconds that steps waited


class Step(ABC):
    """A compiled graph, with its weights and its cache."""

    cache: Cache
    weights: tuple[PackedWeight, ...]  # as stored by the backend
    # Number of largest logits that `top_k` finds on the device, so that only these are copied to the host. 0 if all
    # logits are in host memory anyway.
    max_top_k: int = 0

    @property
    def expert_reads(self) -> ExpertReads | None:
        """Statistics of reading experts that stay in the file; None without such experts."""
        return None

    @property
    def chooses_ahead(self) -> bool:
        """Return whether a batch may refer to ids that the previous batch has not chosen yet.

        The results of both batches are then valid until the batch after them.
        """
        return False

    @abstractmethod
    def run(self, batch: Batch, hidden: Output | None = None) -> Output:
        """Run a batch. May return before the output is computed.

        Inputs in host memory have been read when this returns.

        Args:
            hidden: output of the previous part of the graph; None if this part starts with ids.

        Raises:
            KernelError: the batch is larger than the step was compiled for, or an index in it is out of range.
        """

    def run_in_pieces(
        self, batch: Batch, piece_s: float, hidden: Output | None = None
    ) -> Generator[None, None, Output]:
        """Run a batch in pieces of about ``piece_s`` seconds, with a yield after each, and return the output.

        Another step can compute between the pieces. Backends that cannot be interrupted yield once.
        """
        output = self.run(batch, hidden)
        yield
        return output

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        """Run a batch and return the logits, float32 [N, n_vocab]."""
        return self.run(batch).rows()

    def top_k(self, batch: Batch, k: int, whole: Sequence[int] = ()) -> TopK:
        """Run a batch and return the ``k`` largest logits (at most `max_top_k`), and all logits of rows ``whole``."""
        return self.run(replace(batch, top_k=k)).top_k(k, whole)

    def value(self, x: Value) -> NDArray[Any]:
        """Return a watched value of the last batch, valid until the next batch.

        Returns:
            float32 [rows, width] or, for a `Routing`, the numbers of each token's experts, int32 [T, k]. Rows per
            token and expert are in the order of these numbers.
        """
        raise KernelError(_SPLIT_BY_ROWS)

    def variant(self, graph: Graph, max_tokens: int | None = None) -> Step:
        """Compile another graph over the same weights and the same cache; see `localllm.kernels.variants`.

        Args:
            max_tokens: maximum number of tokens in a batch; defaults to the limit of this step.

        Raises:
            KernelError: the model is split by rows.
            NotEnoughMemoryError: there is no memory for the values.
        """
        raise KernelError(_SPLIT_BY_ROWS)


def input_rows(hidden: Output | None, n_tokens: int, op: Input) -> NDArray[np.float32]:
    """Return the hidden states [n_tokens, width] that a part of a graph starts with. Waits for them."""
    width = op.x.width if op.total is None else op.total
    if hidden is None:
        raise KernelError(f"this part of a model starts with hidden states of {width} values, but got none")
    rows = hidden.rows()
    if rows.shape != (n_tokens, width) or rows.dtype != np.float32:
        raise KernelError(
            f"this part of a model got hidden states {list(rows.shape)} in {rows.dtype}, but needs "
            f"{[n_tokens, width]} in float32"
        )
    return rows[:, op.first : op.first + op.x.width]


# -- Backends ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    """A lowered graph: the memory that its step needs, and the functions that create the step."""

    weights: tuple[PackedWeight, ...]  # with their sizes in bytes
    caches: Mapping[int, int]  # bytes of each layer's cache
    buffers: int  # bytes of intermediate results, and an estimate for CUDA graphs
    # packs the weights, allocates the memory, and returns the step; call it once
    load: Callable[[Progress | None], Step] = field(compare=False)
    # packs one weight per item, before `load`, so that callers can do other work in between
    pack: Callable[[], Iterable[object]] = field(default=tuple, compare=False)
    pool: int = 0  # bytes for experts that stay in the file
    host: Footprint | None = None  # the part that the host computes, see `localllm.kernels.offload`

    @property
    def n_bytes(self) -> int:
        return sum(weight.own_bytes for weight in self.weights) + sum(self.caches.values()) + self.buffers + self.pool


class Backend(Protocol):
    """Kernels on one device, which can run all or some layers of a model."""

    name: str  # "reference", "cpu", …
    page_size: int  # tokens per page of the cache
    shares_weights: bool = False  # True if a weight that two of its steps use is packed once
    pools_experts: bool = False  # True if experts may stay in the file; `footprint` then accepts ``expert_bytes``
    step_tokens: int = 512  # maximum useful number of tokens per step; more would be no faster

    def footprint(
        self, graph: Graph, *, n_pages: tuple[int, ...], max_tokens: int, max_outputs: int, n_states: int = 0
    ) -> Footprint:
        """Lower a graph. Computes the exact memory of its step, without reading weights.

        Args:
            n_pages: pages of the cache for each of the graph's groups (`Graph.windows`).
            n_states: slots of recurrent states in the cache.
            max_tokens, max_outputs: limits of a batch.

        Raises:
            KernelError: the backend does not support one of the operations or the type of one of the weights.
        """

    def compile(
        self,
        graph: Graph,
        *,
        n_pages: tuple[int, ...],
        max_tokens: int,
        max_outputs: int,
        n_states: int = 0,
        progress: Progress | None = None,
    ) -> Step:
        """Pack the weights of a graph, reporting each to ``progress``, and return its step; see `footprint`."""
        sizes = {"max_tokens": max_tokens, "max_outputs": max_outputs, "n_states": n_states}
        return self.footprint(graph, n_pages=n_pages, **sizes).load(progress)


def check_operations(graph: Graph, computes: type, backend: str) -> None:
    """Raises KernelError if the class ``computes`` of a backend lacks a method for an operation of the graph."""
    for node in graph.nodes:
        if not hasattr(computes, node.operation.method()):
            raise KernelError(f"the {backend} backend cannot compute {type(node.operation).__name__}: choose another")


def check_cache(graph: Graph, n_pages: tuple[int, ...], n_states: int) -> None:
    """Raises KernelError if a cache of this size does not match the graph."""
    if len(n_pages) != len(graph.windows):
        raise KernelError(f"a model with {len(graph.windows)} groups of caches got pages for {len(n_pages)}")
    if graph.states and n_states < 1:
        raise KernelError("a model with recurrent states got no slots for them: give at least 1")


@dataclass(frozen=True)
class WeightUse:
    weight: Weight
    layer: LayerTag  # layer that computes with it, or looks it up
    is_table: bool  # rows are looked up
    is_operand: bool  # used in computations; a table that is also an operand is both embedding and output matrix
    is_float: bool  # kernels read it as float32
    is_column: bool  # kernels read it column by column
    is_expert: bool  # contains the matrices of experts

    def floats(self) -> NDArray[np.float32]:
        """Return the values as kernels read float weights: [n_rows, n] or [1, n], or by columns [n, n_rows]."""
        weight = self.weight
        values = dequantize(weight.data, weight.type).reshape(self.float_shape[:: -1 if self.is_column else 1])
        return np.ascontiguousarray(values.T if self.is_column else values)

    @property
    def float_shape(self) -> tuple[int, int]:
        *n_rows, n_columns = self.weight.shape
        return (n_columns if n_rows else 1, self.weight.shape[0]) if self.is_column else (prod(n_rows), n_columns)

    def as_table(self) -> WeightUse:
        """Return the use as a look-up table only."""
        return replace(self, layer="embedding", is_operand=False)

    def packed(self, kernel_type: str, n_bytes: int, *, is_in_file: bool = False) -> PackedWeight:
        """Return the weight as a backend stores it, with its size in bytes."""
        weight = self.weight
        return PackedWeight(
            *(weight.name, self.layer, weight.type.name, kernel_type, n_bytes, self.is_expert), is_in_file=is_in_file
        )


def weights_of(graph: Graph) -> tuple[WeightUse, ...]:
    """Return the weights of a graph and of the graphs that belong to it, without duplicates.

    Weights of the output come first, because they are the largest. The temporary memory for packing them is then
    needed while little else is allocated.
    """
    graphs = (each for each in (graph, graph.prompt, graph.token_graph) if each is not None)
    nodes = [node for each in graphs for node in each.nodes]
    tables = {node.operation.table for node in nodes if isinstance(node.operation, Embed)}
    operands = {w for node in nodes if not isinstance(node.operation, Embed) for w in node.operation.weights}
    layers: dict[Weight, LayerTag] = {}
    for node in sorted(nodes, key=lambda node: node.layer != "output"):
        for weight in node.operation.weights:
            layers.setdefault(weight, node.layer)
    rows = {weight for node in nodes for weight in node.operation.named(node.operation.float_rows)}
    columns = {weight for node in nodes for weight in node.operation.named(node.operation.float_columns)}
    floats = rows | columns
    experts = {w for n in nodes if isinstance(n.operation, ExpertLinears | ExpertOutput) for w in n.operation.weights}
    return tuple(
        WeightUse(
            *(w, layer, w in tables, w in operands, len(w.shape) == 1 or w in floats, w in columns),
            is_expert=w in experts and len(w.shape) == 3,
        )
        for w, layer in layers.items()
    )


def matrices_to_pack(weight: Weight, group: int) -> NDArray[np.uint8]:
    """Return the raw rows of a matrix [n_out, n_in] or of experts' matrices [E, n_out, n_in].

    Packed matrices have whole groups of ``group`` rows. Experts' matrices that need no padding form one large matrix.

    Returns:
        uint8 [matrices, n_out, bytes of a row].
    """
    n = 1 if weight.shape[-2] % group == 0 else prod(weight.shape[:-2])
    return weight.data.reshape(n, prod(weight.shape[:-1]) // n, -1)
