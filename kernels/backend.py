"""Backends, which run graphs: one compiles a graph to a `Step`, which computes the logits of batches."""

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
from localllm.kernels.graph import Embed, ExpertLinears, ExpertOutput, Graph, Input, LayerTag, Value, Weight
from localllm.quant.formats import dequantize

#: Called with each weight of a file once it was packed.
Progress = Callable[[Weight], None]


@dataclass(frozen=True)
class Batch:
    """A ragged batch: the new tokens of S sequences, laid end to end.

    Prefill, decode, several sequences at once and the checking of drafted tokens are all this.
    """

    # int32 [T], token ids; ~i is the one that row i of the batch before this one chose, see `n_chosen`
    ids: NDArray[np.int32]
    positions: NDArray[np.int32]  # int32 [T], place of each token in its sequence, from 0
    query_starts: NDArray[np.int32]  # int32 [S + 1]; sequence s has the tokens query_starts[s] : query_starts[s + 1]
    kv_lengths: NDArray[np.int32]  # int32 [S], tokens in the cache once this batch's are appended
    # int32 [n_groups, S, max_blocks]; for the caches of group g (`Graph.windows`), token position p of sequence s
    # lies in page block_tables[g, s, p // page_size].  Pages behind a window are not read.
    block_tables: NDArray[np.int32]
    outputs: NDArray[np.int32]  # int32 [N], rows of the batch whose logits are wanted
    # int32 [S], the slot of each sequence's recurrent states, where a model has any
    states: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    # float32 [T, n_adapters], how much of each a token gets; [0, 0] for nothing of any
    adapters: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    top_k: int = 0  # how many of the largest logits of each output are wanted; 0 for all
    # outputs of the batch before this one which choose ids of this: that had a top_k, and the step `chooses_ahead`
    n_chosen: int = 0
    # float32 [N, 5], how each output chooses: top-k, top-p, min-p, temperature, and the number 0 <= u < 1 to draw by,
    # see `localllm.sampling.candidates`; by its largest logit where top-k is 0.  [0, 5]: all do.
    draws: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 5), np.float32))
    # int32 [n], in order, the rows of tokens that have embeddings of their own: those of pictures.  Their ids are 0.
    embedded: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    # float32 [n, k, d], these: one, and further ones that layers add (`localllm.kernels.graph.AddRows`)
    embeddings: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))
    # int32 [3, T], where each token is in time, by row and by column (`localllm.kernels.graph.Rope`), not beyond its
    # place in the sequence; [3, 0]: there, by all three
    axes: NDArray[np.int32] = field(default_factory=lambda: np.zeros((3, 0), np.int32))
    # int32 [T], the position behind the last one that a token sees, if it sees any behind it
    # (`localllm.kernels.graph.Attention`); [0]: no token does
    ends: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    # int32 [T], the first position that a token sees where it sees nothing but a span, which ``ends`` ends
    begins: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    def sequences(self) -> Iterator[tuple[int, int, int]]:
        """Of each sequence: its first row in the batch, the one behind its last, and its length in the cache."""
        starts = self.query_starts.tolist()
        return zip(starts[:-1], starts[1:], self.kv_lengths.tolist(), strict=True)

    def check_size(self, max_tokens: int, max_outputs: int) -> None:
        """Makes sure that it is not larger than a step was compiled for."""
        n_tokens, n_outputs = len(self.ids), len(self.outputs)
        if n_tokens > max_tokens or n_outputs > max_outputs:
            raise KernelError(
                f"a batch of {n_tokens} tokens and {n_outputs} outputs is larger than this step was compiled for, "
                f"{max_tokens} and {max_outputs}"
            )

    def check(self, cache: Cache, n_joined: int = 1) -> None:
        """Raises KernelError if an index leads outside the batch or the cache; outputs have ``n_joined`` rows."""
        n_tokens, starts = len(self.ids), self.query_starts.tolist()
        if starts[0] != 0 or starts[-1] != n_tokens or n_tokens == 0 or any(a >= b for a, b in pairwise(starts)):
            raise KernelError(f"a batch of {n_tokens} tokens cannot be cut at {starts}")
        n_groups, n_tables, n_blocks = self.block_tables.shape
        if n_groups != len(cache.windows):
            raise KernelError(f"a batch has block tables of {n_groups} groups of caches, not {len(cache.windows)}")
        if not len(starts) - 1 == len(self.kv_lengths) == n_tables:
            raise KernelError(f"a batch of {len(starts) - 1} sequences needs as many lengths and block tables")
        positions = self.positions.tolist()
        for s, (start, stop, kv_length) in enumerate(self.sequences()):
            first = kv_length - (stop - start)
            if first < 0 or positions[start:stop] != list(range(first, kv_length)):
                raise KernelError("a batch's positions do not lead up to the lengths of its sequences")
            if n_blocks * cache.page_size < kv_length:
                raise KernelError(f"a batch's block tables are too short for {kv_length} tokens")
            for group, window in enumerate(cache.windows):
                seen = 0 if window is None else max(0, first + 1 - window) // cache.page_size
                pages = self.block_tables[group, s, seen : -(-kv_length // cache.page_size)].tolist()
                if min(pages) < 0 or max(pages) >= cache.n_pages[group]:
                    raise KernelError(f"a batch names a page outside a cache of {cache.n_pages[group]}")
        # Lists: of few numbers NumPy's own minimum takes many times as long.
        outputs = self.outputs.tolist()
        if outputs and not 0 <= min(outputs) <= max(outputs) <= n_tokens - n_joined:
            raise KernelError(f"a batch wants the logits of a row that is none of its {n_tokens} tokens")
        if len(self.draws) and self.draws.shape != (len(outputs), 5):
            raise KernelError(f"a batch of {len(outputs)} outputs needs as many draws, not {list(self.draws.shape)}")
        if len(self.embedded) or self.axes.size or len(self.ends) or len(self.begins):
            self._check_pictures()
        if not cache.n_states:
            return
        if not len(self.states) == len(set(self.states.tolist())) == len(starts) - 1:
            raise KernelError(f"a batch of {len(starts) - 1} sequences needs as many slots of recurrent states")
        if not 0 <= self.states.min() <= self.states.max() < cache.n_states:
            raise KernelError(f"a batch names a recurrent state outside a cache of {cache.n_states}")

    def _check_pictures(self) -> None:
        n, embedded, positions = len(self.ids), self.embedded, self.positions
        if len(embedded) and (min(embedded) < 0 or max(embedded) >= n or (np.diff(embedded) <= 0).any()):
            raise KernelError(f"a batch of {n} tokens has embeddings of others, or not in their order")
        if self.ids[embedded].any():
            raise KernelError("a batch has tokens with embeddings of their own whose ids are not 0")
        if self.embeddings.ndim != 3 or len(self.embeddings) != len(embedded):
            raise KernelError(f"a batch has embeddings {list(self.embeddings.shape)} of {len(embedded)} tokens")
        shapes = (3, n), (4, n)
        if self.axes.size and (
            self.axes.shape not in shapes or (self.axes < 0).any() or (self.axes > positions).any()
        ):
            raise KernelError("a batch has tokens whose place in a picture lies beyond that in their sequence")
        if len(self.ends):
            lengths = np.repeat(self.kv_lengths, np.diff(self.query_starts))
            if len(self.ends) != n or (self.ends <= positions).any() or (self.ends > lengths).any():
                raise KernelError("a batch has tokens that see others behind it: spans come as a whole")
            if (np.diff(self.ends) < 0)[np.diff(positions) == 1].any():
                raise KernelError("a batch has tokens that see less far than those before them")
        if len(self.begins):
            if (
                not len(self.begins) == len(self.ends) == n
                or (self.begins < 0).any()
                or (self.begins >= self.ends).any()
            ):
                raise KernelError("a batch has tokens that see a span of nothing")
            if (np.diff(self.begins) < 0)[np.diff(positions) == 1].any():
                raise KernelError("a batch has tokens that see farther back than those before them")

    def embeddings_of(self, index: int, width: int) -> NDArray[np.float32]:
        """The embeddings of that number of its ``embedded`` tokens, [n, width]."""
        _, n, own_width = self.embeddings.shape
        if not (index < n and own_width == width and self.embeddings.dtype == np.float32):
            raise KernelError(
                f"a batch has {n} embeddings of {own_width} values in {self.embeddings.dtype} for each token of a "
                f"picture, but the model takes at least {index + 1} of {width} in float32"
            )
        return self.embeddings[:, index]

    def rows_of(self, n_rows: int, *, by_position: bool = False) -> NDArray[np.int32]:
        """Its ids, or its positions: those of a table [n_rows, …]."""
        rows = self.positions if by_position else self.ids
        numbers = rows.tolist()
        if numbers and not -self.n_chosen <= min(numbers) <= max(numbers) < n_rows:
            what = "positions outside a table" if by_position else "token ids outside the vocabulary"
            raise KernelError(f"a batch has {what} of {n_rows}")
        return rows


class TopK(NamedTuple):
    """The k largest of each row of logits, those first; of equals the lowest id, and NaN before any number."""

    ids: NDArray[np.int32]  # int32 [N, k]
    logits: NDArray[np.float32]  # float32 [N, k]
    # all logits [n_vocab] of the rows that they were wanted of
    whole: Mapping[int, NDArray[np.float32]] = MappingProxyType({})
    chosen: NDArray[np.int32] | None = None  # int32 [N], the ids that the next batch may name; by default the largest

    def row(self, i: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Ids and logits [k] of one row."""
        return self.ids[i], self.logits[i]


def top_k(logits: NDArray[np.float32], k: int) -> TopK:
    """The ``k`` largest of each row of logits [N, n_vocab]."""
    is_nan = np.isnan(logits)
    ids = np.lexsort((np.where(is_nan, 0, -logits), ~is_nan))[:, :k].astype(np.int32)
    return TopK(ids, np.take_along_axis(logits, ids, axis=1))


# -- Steps ---------------------------------------------------------------------------------------------------------


class Output(ABC):
    """The output of a graph: logits [N, n_vocab], or hidden states [T, d] that the next device goes on with.

    It may still be being computed.  The arrays are the step's own and good until its next call.
    """

    @abstractmethod
    def rows(self) -> NDArray[np.float32]:
        """Waits, and gives it in memory of the host."""

    def top_k(self, k: int, whole: Sequence[int] = ()) -> TopK:
        """Of logits, waits and gives the ``k`` largest; and all of the rows ``whole``."""
        rows = self.rows()
        return top_k(rows, k)._replace(whole={i: rows[i] for i in whole})


@dataclass(frozen=True)
class HostOutput(Output):
    """That of a step which is through when it returns, in memory of the host."""

    matrix: NDArray[np.float32]

    def rows(self) -> NDArray[np.float32]:
        return self.matrix


class Cache(Protocol):
    """The cache of a step's layers: pages of ``page_size`` tokens, which sequences name in their block tables, and
    recurrent states."""

    @property
    def page_size(self) -> int: ...
    @property
    def windows(self) -> Sequence[int | None]:
        """Of each group, as `Graph.windows`."""
        ...

    @property
    def n_pages(self) -> tuple[int, ...]:
        """Of each group."""
        ...

    @property
    def n_states(self) -> int:
        """Slots for the recurrent states of a sequence; 0 where no layer has any."""
        ...

    @property
    def n_bytes(self) -> int:
        """Bytes of memory."""
        ...

    # Of the next four, a group of None means slots of recurrent states, in all layers, instead of pages.

    def copy(self, group: int | None, source: int, target: int) -> None:
        """Copies one page, in all layers of a group."""
        ...

    def n_bytes_of(self, group: int | None) -> int:
        """The bytes that `read` gives."""
        ...

    def read(self, group: int | None, number: int) -> bytes:
        """Bytes of a page, in all layers of a group."""
        ...

    def write(self, group: int | None, number: int, data: bytes) -> None:
        """Puts what `read` gave into a page of the same group."""
        ...


class HostCache(ABC):
    """What a `Cache` in memory of the host does with pages and slots."""

    @abstractmethod
    def _where(self, group: int | None, number: int) -> list[NDArray[Any]]:
        """A page in the layers of a group, or with None a slot in all layers: contiguous arrays."""

    def copy(self, group: int | None, source: int, target: int) -> None:
        for kept, copied in zip(self._where(group, source), self._where(group, target), strict=True):
            copied[...] = kept

    def n_bytes_of(self, group: int | None) -> int:
        return sum(part.nbytes for part in self._where(group, 0))

    def read(self, group: int | None, number: int) -> bytes:
        return b"".join(part.tobytes() for part in self._where(group, number))

    def write(self, group: int | None, number: int, data: bytes) -> None:
        scatter(data, [part.reshape(-1).view(np.uint8) for part in self._where(group, number)])


def scatter(data: bytes, parts: Sequence[NDArray[np.uint8]]) -> None:
    """Fills flat arrays, one after the other."""
    if len(data) != sum(part.size for part in parts):
        raise ValueError(f"{len(data)} bytes are not those of a page or slot here")
    begin = 0
    for part in parts:
        part[:] = np.frombuffer(data, np.uint8, part.size, begin)
        begin += part.size


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight as a backend holds it, or will."""

    name: str  # in the file
    layer: LayerTag  # where it belongs
    file_type: str  # its format there, such as "IQ2_XS"
    kernel_type: str  # the format that kernels read, such as "LUT_IQ2_16"
    n_bytes: int  # what it takes in memory
    is_expert: bool = False  # whether it is the matrices of experts, of which a token needs a few
    is_shared: bool = False  # whether the model that it drafts for has it already: it takes no further memory
    is_in_file: bool = False  # whether it stays there, and experts are packed as they are chosen

    @property
    def own_bytes(self) -> int:
        """Bytes beside those that are shared, or stay in the file."""
        return 0 if self.is_shared or self.is_in_file else self.n_bytes


class ExpertReads(NamedTuple):
    """Experts that stay in a file, since it was loaded."""

    needed: int  # bytes that steps computed with, in memory or not
    read: int  # bytes that came from the file
    read_s: float  # seconds in which any were being read
    wait_s: float  # seconds for which steps waited


class Step(ABC):
    """A compiled graph, with its weights and its cache."""

    cache: Cache
    weights: tuple[PackedWeight, ...]  # as the backend holds them
    # how many of the largest logits `top_k` finds on a device, so that only they come from there; 0 where all logits
    # lie in memory of the host anyway
    max_top_k: int = 0

    @property
    def expert_reads(self) -> ExpertReads | None:
        """Statistics of reading experts that stay in the file, if any do."""
        return None

    @property
    def chooses_ahead(self) -> bool:
        """Whether a batch may name ids that the one before it has yet to choose; the results of both are good until
        the batch after them."""
        return False

    @abstractmethod
    def run(self, batch: Batch, hidden: Output | None = None) -> Output:
        """Runs a batch, perhaps returning before it is computed.

        What it was given in memory of the host it has read when it returns.

        Args:
            hidden: what the part of the graph before this one gave, unless this begins with ids.

        Raises:
            KernelError: the batch is larger than the step was compiled for, or an index in it is out of range.
        """

    def run_in_pieces(
        self, batch: Batch, piece_s: float, hidden: Output | None = None
    ) -> Generator[None, None, Output]:
        """As `run`: yields about every ``piece_s`` seconds, so that another step can compute between, where a backend
        can be interrupted; and returns the result."""
        output = self.run(batch, hidden)
        yield
        return output

    def __call__(self, batch: Batch) -> NDArray[np.float32]:
        """Runs a batch, and gives the logits, float32 [N, n_vocab]."""
        return self.run(batch).rows()

    def top_k(self, batch: Batch, k: int, whole: Sequence[int] = ()) -> TopK:
        """Runs a batch, and gives the ``k`` largest logits, up to `max_top_k`; all of them only of ``whole``."""
        return self.run(replace(batch, top_k=k)).top_k(k, whole)

    def value(self, x: Value) -> NDArray[Any]:
        """What the last batch made of a value that its graph watches: float32 [rows, width], or of a `Routing` the
        numbers of the experts that each token went to, [T, k].  Rows for tokens and their experts are in that order.
        """
        raise KernelError("only the CPU and the reference keep values to be watched: choose one of them")


def input_rows(hidden: Output | None, n_tokens: int, op: Input) -> NDArray[np.float32]:
    """The hidden states [n_tokens, width] that a part of a graph begins with, once they are there."""
    width = op.x.width if op.total is None else op.total
    if hidden is None:
        raise KernelError(f"this part of a model begins with hidden states of {width} values, but was given none")
    rows = hidden.rows()
    if rows.shape != (n_tokens, width) or rows.dtype != np.float32:
        raise KernelError(
            f"this part of a model was given hidden states {list(rows.shape)} in {rows.dtype}, but needs "
            f"{[n_tokens, width]} in float32"
        )
    return rows[:, op.first : op.first + op.x.width]


# -- Backends ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    """A graph as a backend has lowered it: the memory that its step takes, and what makes that step."""

    weights: tuple[PackedWeight, ...]  # bytes of each
    caches: Mapping[int, int]  # of what each layer keeps
    buffers: int  # of what is computed, and about those of CUDA graphs
    # packs the weights, takes the memory, and gives the step; to be called once
    load: Callable[[Progress | None], Step] = field(compare=False)
    # packs a weight with each item, ahead of `load`, for those who do other work between
    pack: Callable[[], Iterable[object]] = field(default=tuple, compare=False)
    pool: int = 0  # of memory for experts that stay in the file

    @property
    def n_bytes(self) -> int:
        return sum(weight.own_bytes for weight in self.weights) + sum(self.caches.values()) + self.buffers + self.pool


class Backend(Protocol):
    """Kernels on one device: all of a model can run there, or some of its layers."""

    name: str  # "reference", "cpu", …
    page_size: int  # tokens in a page of the cache
    shares_weights: bool = False  # whether a weight that two of its steps use is packed once
    pools_experts: bool = False  # whether experts may stay in the file: its `footprint` takes ``expert_bytes``
    step_tokens: int = 512  # tokens that a step should evaluate at most: more would be no faster

    def footprint(
        self, graph: Graph, *, n_pages: tuple[int, ...], max_tokens: int, max_outputs: int, n_states: int = 0
    ) -> Footprint:
        """Lowers a graph: tells what its step takes, to the byte, and how it is made.  No weight is read.

        Args:
            n_pages: of the cache, for each of the graph's groups (`Graph.windows`).
            n_states: slots of recurrent states in the cache.
            max_tokens, max_outputs: of a batch.

        Raises:
            KernelError: it cannot compute one of the operations, or read one of the weights.
        """
        ...

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
        """Packs the weights of a graph, reporting each to ``progress``, and makes its step; see `footprint`."""
        sizes = {"max_tokens": max_tokens, "max_outputs": max_outputs, "n_states": n_states}
        return self.footprint(graph, n_pages=n_pages, **sizes).load(progress)


def check_operations(graph: Graph, computes: type, backend: str) -> None:
    """Makes sure that the class which computes operations for a backend has a method for all of a graph."""
    for node in graph.nodes:
        if not hasattr(computes, node.operation.method()):
            raise KernelError(f"the {backend} backend cannot compute {type(node.operation).__name__}: choose another")


def check_cache(graph: Graph, n_pages: tuple[int, ...], n_states: int) -> None:
    """Makes sure that a cache of this size serves a graph."""
    if len(n_pages) != len(graph.windows):
        raise KernelError(f"a model with {len(graph.windows)} groups of caches was given pages for {len(n_pages)}")
    if graph.states and n_states < 1:
        raise KernelError("a model with recurrent states was given no slots for them: give at least 1")


@dataclass(frozen=True)
class WeightUse:
    """A weight of a graph, and what for."""

    weight: Weight
    layer: LayerTag  # where it is computed with, or looked up
    is_table: bool  # whether rows of it are looked up
    is_operand: bool  # whether it is computed with.  One that is both is the embedding and the output matrix.
    is_float: bool  # whether kernels read it as float32
    is_column: bool  # whether they do so column after column
    is_expert: bool  # whether it is the matrices of experts

    def floats(self) -> NDArray[np.float32]:
        """The values, as kernels read those of `is_float`: [n_rows, n] or [1, n], or by columns [n, n_rows]."""
        weight = self.weight
        values = dequantize(weight.data, weight.type).reshape(self.float_shape[:: -1 if self.is_column else 1])
        return np.ascontiguousarray(values.T if self.is_column else values)

    @property
    def float_shape(self) -> tuple[int, int]:
        """That of `floats`."""
        *n_rows, n_columns = self.weight.shape
        return (n_columns if n_rows else 1, self.weight.shape[0]) if self.is_column else (prod(n_rows), n_columns)

    def as_table(self) -> WeightUse:
        """The same where rows of it are looked up alone."""
        return replace(self, layer="embedding", is_operand=False)

    def packed(self, kernel_type: str, n_bytes: int, *, is_in_file: bool = False) -> PackedWeight:
        """A weight as a backend stores it, with its size in bytes."""
        weight = self.weight
        return PackedWeight(
            *(weight.name, self.layer, weight.type.name, kernel_type, n_bytes, self.is_expert), is_in_file=is_in_file
        )


def weights_of(graph: Graph) -> tuple[WeightUse, ...]:
    """The weights of a graph, each once.

    Those of the output come first, the largest of all: what packing one takes beside its result then comes on top of
    nothing else.
    """
    tables = {node.operation.table for node in graph.nodes if isinstance(node.operation, Embed)}
    operands = {w for node in graph.nodes if not isinstance(node.operation, Embed) for w in node.operation.weights}
    layers: dict[Weight, LayerTag] = {}
    for node in sorted(graph.nodes, key=lambda node: node.layer != "output"):
        for weight in node.operation.weights:
            layers.setdefault(weight, node.layer)
    rows = {weight for node in graph.nodes for weight in node.operation.named(node.operation.float_rows)}
    columns = {weight for node in graph.nodes for weight in node.operation.named(node.operation.float_columns)}
    floats = rows | columns
    experts = {
        w for n in graph.nodes if isinstance(n.operation, ExpertLinears | ExpertOutput) for w in n.operation.weights
    }
    return tuple(
        WeightUse(
            *(w, layer, w in tables, w in operands, len(w.shape) == 1 or w in floats, w in columns),
            is_expert=w in experts and len(w.shape) == 3,
        )
        for w, layer in layers.items()
    )


def matrices_to_pack(weight: Weight, group: int) -> NDArray[np.uint8]:
    """Raw rows [matrices, n_out, bytes of a row] of a matrix [n_out, n_in] or of experts' [E, n_out, n_in].

    Packed matrices are whole groups of ``group`` rows.  Where experts' are so without padding, they are one large
    matrix.
    """
    n = 1 if weight.shape[-2] % group == 0 else prod(weight.shape[:-2])
    return weight.data.reshape(n, prod(weight.shape[:-1]) // n, -1)
