"""A forward pass on a CUDA device while it is recorded: buffers in the device's memory, and operations over them.

An operation does not launch anything; it says which launches it takes for batches of an `Extent`
(`localllm.kernels.cuda.operations`).  Kernels read the numbers of tokens and of outputs from the batch's header in
device memory and leave the rows beyond them alone, so the launches for an extent serve every batch that fits into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.cuda.attention import Heads, Variant, Work, choose_variant, work_of_bucket
from localllm.kernels.cuda.cache import PAGE, CacheLayout
from localllm.kernels.cuda.driver import Defines, DeviceMemory, DeviceProperties, Driver, Stream
from localllm.kernels.cuda.matmul import TILE_ROWS, PackedFormat
from localllm.kernels.cuda.rope import phases
from localllm.kernels.cuda.weights import padded
from localllm.kernels.ops import Batch, Rope

#: What counts a tensor's rows: places in a batch's header (batch.cuh).
N_TOKENS, N_OUTPUTS, N_SEQUENCES, N_PLACES = range(4)
_HEADER = 4
#: Tokens and outputs of the extents that small batches share.
BUCKETS = (1, 2, 4, 8, 16, 32)
#: Lengths in the cache that such an extent serves: the first, and then twice as much each.
SHORTEST = 1024
#: Bytes for what spans of the cache come to, at most.
MOST_PART_BYTES = 64 << 20
_PART_ALIGNMENT = 256

Argument = DeviceMemory | np.number[Any]


@dataclass(frozen=True)
class Extent:
    """What launches have room for.

    Attributes:
        n_tokens, n_outputs: in a batch, at most.
        n_places: of what goes to experts, at most.
        attention: the work of each kind of attention that the forward pass has.
    """

    n_tokens: int
    n_outputs: int
    attention: tuple[tuple[Heads, Work], ...] = ()
    n_places: int = 0

    def rows(self, slot: int) -> int:
        """Rows of a tensor whose rows ``slot`` counts."""
        return (self.n_tokens, self.n_outputs, 0, self.n_places)[slot]

    def work(self, heads: Heads) -> Work:
        return dict(self.attention)[heads]


@dataclass(frozen=True)
class Call:
    """A launch: of a kernel of the module ``module``.cu, compiled with ``defines``."""

    module: str
    kernel: str
    defines: Defines
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple[Argument, ...]
    shared_bytes: int = 0


class Operation(Protocol):
    """Something that a forward pass does."""

    def calls(self, extent: Extent) -> Iterable[Call]:
        """The launches for batches of at most this extent."""
        ...


# -- What operations work on ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Rows:
    """The contents of a buffer between two changes: float32 [rows, stride], of which ``width`` values count.

    Attributes:
        slot: what counts the rows, `N_TOKENS`, `N_OUTPUTS` or `N_PLACES`.
        reads: operations that read them.
    """

    memory: DeviceMemory
    width: int
    stride: int
    slot: int
    reads: int = 0


@dataclass(frozen=True, eq=False)
class Inputs:
    """Rows as matrix products read them: units and scales, see activations.cuh."""

    units: DeviceMemory
    scales: DeviceMemory


class Buffer:
    """Memory of a float32 matrix [rows, padded width], which operations read and write.

    It goes back to the recording with the last reference to the buffer, to become that of a later one.

    Args:
        sources: what it is computed from, if that may be done once more, straight into what `inputs` makes: until
            then, their memory must not be taken for it.
    """

    def __init__(self, recording: Recording, slot: int, width: int, sources: Sequence[Buffer] = ()) -> None:
        self.recording = recording
        self._memory: list[DeviceMemory] = []
        stride = padded(width)
        self._now = Rows(self._take(4 * stride * recording.most_rows(slot)), width, stride, slot)
        self._sources = sources
        #: What `inputs` made of the rows; and memory for more of it.
        self._inputs: dict[str, Inputs] = {}
        self._input_memory: dict[str, DeviceMemory] = {}

    @property
    def width(self) -> int:
        return self._now.width

    @property
    def slot(self) -> int:
        return self._now.slot

    @property
    def written(self) -> Rows:
        """The rows, for the operation that writes them."""
        return self._now

    def read(self) -> Rows:
        """The rows, for one more operation that reads them."""
        self._now.reads += 1
        return self._now

    def inputs(self, format: PackedFormat, quantise: Callable[[Rows, Inputs], Operation]) -> Inputs:
        """The rows as products with weights of a format read them; the first call adds what makes them so."""
        kind = input_kind(format)
        if kind not in self._inputs:
            n_rows = self.recording.most_rows(self.slot)
            if kind not in self._input_memory:
                self._input_memory[kind] = self._take(input_bytes(format, n_rows, self.width))
            self._inputs[kind] = inputs_in(self._input_memory[kind], format, n_rows, self.width)
            self.recording.operations.append(quantise(self.read(), self._inputs[kind]))
            self._sources = ()
        return self._inputs[kind]

    def changed(self) -> Buffer:
        """The buffer itself, which an operation changes in its place."""
        self._now = Rows(self._now.memory, self.width, self._now.stride, self.slot)
        self._inputs = {}
        return self

    def _take(self, n_bytes: int) -> DeviceMemory:
        self._memory.append(self.recording.take(n_bytes))
        return self._memory[-1]

    def __del__(self) -> None:
        self.recording.free += self._memory


def input_bytes(format: PackedFormat, n_rows: int, width: int) -> int:
    """Bytes of up to ``n_rows`` rows as products read them."""
    laid_out = format.input_rows(n_rows)
    units = -(-format.unit_bytes(width, laid_out) // _PART_ALIGNMENT) * _PART_ALIGNMENT
    return units + format.input_scale_bytes(width, laid_out)


def inputs_in(memory: DeviceMemory, format: PackedFormat, n_rows: int, width: int) -> Inputs:
    """Those rows in so much memory."""
    scales = format.input_scale_bytes(width, format.input_rows(n_rows))
    units = input_bytes(format, n_rows, width) - scales
    return Inputs(memory.at(0, units), memory.at(units, scales))


def input_kind(format: PackedFormat) -> str:
    """Formats of one kind read the same inputs."""
    return format.name if format.is_float else "int8"


# -- Experts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixture:
    """Mixtures of ``n`` experts, of which each token goes to ``k``."""

    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.k} of {self.n}"

    def n_places(self, n_tokens: int) -> int:
        """Places that rows of so many tokens can have: those of each expert begin at multiples of 8."""
        n_pairs = n_tokens * self.k
        return -(-(n_pairs + 7 * min(self.n, n_pairs)) // 8) * 8

    def most_places(self, max_tokens: int) -> int:
        """The same of batches of up to so many tokens, whose extents are rounded up."""
        return self.n_places(-(-max_tokens // 8) * 8)

    def n_products(self, n_tokens: int, product_rows: int) -> int:
        """Products that they can be cut into."""
        n_pairs = n_tokens * self.k
        return min(n_pairs, n_pairs // product_rows + self.n)


# -- The batch in device memory ------------------------------------------------------------------------------------


class BatchLayout:
    """How a batch lies in the one block of int32 that a step uploads: the header first, block tables last.

    Args:
        n_pages: of the cache: as many entries as a block table may have.
    """

    def __init__(self, max_tokens: int, max_outputs: int, n_pages: int) -> None:
        sizes = (_HEADER, max_tokens, max_tokens, max_tokens, max_outputs, max_tokens + 1, max_tokens)
        bounds = np.cumsum([0, *sizes]).tolist()
        self.header, self.ids, self.positions, self.slots, self.outputs, self.starts, self.lengths = map(
            slice, bounds, bounds[1:]
        )
        self.tables: int = bounds[-1]
        self.table_stride = max(1, n_pages)
        self.n_words: int = self.tables + max_tokens * self.table_stride

    def words_of(self, n_sequences: int) -> int:
        """The words that batches of so many sequences take at most."""
        return self.tables + n_sequences * self.table_stride

    def fill(self, words: NDArray[np.int32], batch: Batch) -> int:
        """Writes a batch that was checked; returns the words that it takes."""
        n_tokens, n_sequences = len(batch.ids), len(batch.kv_lengths)
        words[:3] = n_tokens, len(batch.outputs), n_sequences
        tables = batch.block_tables[:, : self.table_stride]
        sequences = np.repeat(np.arange(n_sequences), np.diff(batch.query_starts))
        slots = batch.block_tables[sequences, batch.positions // PAGE] * np.int32(PAGE) + batch.positions % PAGE
        for part, values in (
            (self.ids, batch.ids),
            (self.positions, batch.positions),
            (self.slots, slots),
            (self.outputs, batch.outputs),
            (self.starts, batch.query_starts),
            (self.lengths, batch.kv_lengths),
        ):
            words[part.start : part.start + len(values)] = values
        end = self.words_of(n_sequences)
        words[self.tables : end].reshape(n_sequences, -1)[:, : tables.shape[1]] = tables
        return end


class DeviceBatch:
    """The block on the device, and its parts."""

    def __init__(self, memory: DeviceMemory, layout: BatchLayout) -> None:
        def part(place: slice) -> DeviceMemory:
            return memory.at(4 * place.start, 4 * (place.stop - place.start))

        self.memory, self.layout = memory, layout
        self.header = part(layout.header)
        self.ids, self.positions, self.slots = part(layout.ids), part(layout.positions), part(layout.slots)
        self.outputs = part(layout.outputs)
        tables = part(slice(layout.tables, layout.n_words))
        #: PARAMETERS of attention.cu, as far as they are the batch's.
        self.attention = (self.header, part(layout.starts), part(layout.lengths), tables)

    def header_at(self, slot: int) -> DeviceMemory:
        """The header from that slot's number on: for kernels that take the first for the number of their rows."""
        return self.header.at(4 * slot, 4 * (_HEADER - slot))


# -- The recording -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CUDACache:
    """Keys and values in one allocation; `localllm.kernels.cuda.cache` draws it.

    All that reads and writes them goes into ``stream``: programs may return before they have computed.
    """

    memory: DeviceMemory
    layout: CacheLayout
    driver: Driver
    stream: Stream
    page_size: int = PAGE

    @property
    def n_pages(self) -> int:
        return self.layout.n_pages

    @property
    def n_bytes(self) -> int:
        return self.layout.n_bytes

    @property
    def append_defines(self) -> Defines:
        """What append.cu is compiled for."""
        return {"HEAD_DIM": self.layout.shape.head_dim, "Q8_0": int(self.layout.shape.type == "q8_0")}

    def layer(self, number: int) -> tuple[Argument, Argument, Argument, Argument]:
        """Keys, their scales, values and theirs, of a layer, as kernels take them."""
        keys, values, key_scales, value_scales = (
            self.memory.at(*part.layer(number)) if part.n_bytes else np.uint64(0) for part in self.layout.parts
        )
        return keys, key_scales, values, value_scales

    def copy_page(self, source: int, target: int) -> None:
        for page in (source, target):
            if not 0 <= page < self.n_pages:
                raise KernelError(f"there is no page {page} in a cache of {self.n_pages}")
        module = self.driver.load_module(self.memory.device, "append", self.append_defines)
        for part in self.layout.parts:
            if part.n_bytes:
                sizes = np.int32(part.page_bytes), np.int64(part.layer_bytes), np.int32(source), np.int32(target)
                grid = (-(-part.page_bytes // _COPIED_BYTES), part.n_layers)
                memory = self.memory.at(part.offset, part.n_bytes)
                self.driver.launch(module, "copy_page", grid, (256,), [memory, *sizes], self.stream)
        self.driver.synchronize(self.stream)


#: Bytes of a page that a block copies.
_COPIED_BYTES = 16 * 256 * 4


class Recording:
    """Operations, and the memory that they use, while a forward pass is recorded and afterwards.

    Attributes:
        tile_rows: see `localllm.kernels.cuda.matmul.product_launch`.
        operands: what must live as long as the operations.
        hidden: the rows that hidden states computed elsewhere are put into, if the forward pass begins with them.
        vocabularies: rows of the embedding tables that ids are looked up in.
    """

    def __init__(
        self,
        driver: Driver,
        device: int,
        cache: CUDACache,
        max_tokens: int,
        max_outputs: int,
        tile_rows: tuple[int, ...] = TILE_ROWS,
    ) -> None:
        self.driver, self.device, self.cache = driver, device, cache
        self.stream = cache.stream
        self.max_tokens, self.max_outputs = max_tokens, max_outputs
        self.tile_rows = tile_rows
        self.operations: list[Operation] = []
        self.operands: list[object] = [cache]
        self.memory: list[DeviceMemory] = []
        self.free: list[DeviceMemory] = []
        self.hidden: Rows | None = None
        self.vocabularies: list[int] = []
        self.heads: list[Heads] = []
        layout = BatchLayout(max_tokens, max_outputs, cache.n_pages)
        self.batch = DeviceBatch(self.new(4 * layout.n_words), layout)
        #: What the mixtures of experts have in common, if there are any.
        self.mixture: Mixture | None = None
        self._phases: list[tuple[Rope, Argument]] = []
        self._part_memory: DeviceMemory | None = None

    @cached_property
    def properties(self) -> DeviceProperties:
        return self.driver.properties(self.device)

    @cached_property
    def variant(self) -> Variant:
        """What attention is compiled for."""
        shape = self.cache.layout.shape
        return choose_variant(shape.head_dim, shape.type, self.properties.shared_bytes)

    def most_rows(self, slot: int) -> int:
        if slot == N_PLACES:
            return 0 if self.mixture is None else self.mixture.most_places(self.max_tokens)
        return self.max_tokens if slot == N_TOKENS else self.max_outputs

    def extent(self, n_tokens: int, n_outputs: int, work: tuple[tuple[Heads, Work], ...] = ()) -> Extent:
        n_places = 0 if self.mixture is None else self.mixture.n_places(n_tokens)
        return Extent(n_tokens, n_outputs, work, n_places)

    def use_mixture(self, mixture: Mixture) -> None:
        """Notes how many experts there are, and how many a token goes to; all layers must agree.

        Raises:
            KernelError: they do not.
        """
        if self.mixture not in (None, mixture):
            raise KernelError(f"mixtures of experts with {self.mixture} and with {mixture} cannot be mixed")
        self.mixture = mixture

    # -- Memory ----------------------------------------------------------------------------------------------------

    def take(self, n_bytes: int) -> DeviceMemory:
        """Memory of at least ``n_bytes``, with anything in it: the smallest free piece that does, else a new one."""
        fitting = [m for m in self.free if n_bytes <= m.n_bytes <= 2 * n_bytes]
        if not fitting:
            return self.new(n_bytes)
        best = min(fitting, key=lambda m: m.n_bytes)
        self.free = [m for m in self.free if m is not best]
        return best

    def new(self, n_bytes: int) -> DeviceMemory:
        """Memory of ``n_bytes`` that is zero: what pads rows is read, and must be something."""
        memory = self.driver.allocate(self.device, n_bytes)
        self.driver.fill(memory, 0, self.stream)
        self.memory.append(memory)
        return memory

    def upload(self, values: NDArray[Any]) -> DeviceMemory:
        """A constant."""
        memory = self.driver.allocate(self.device, values.nbytes)
        self.driver.upload(memory, values, self.stream)
        self.driver.synchronize(self.stream)
        self.memory.append(memory)
        return memory

    def phases(self, rope: Rope) -> Argument:
        """Frequencies as append.cu takes them."""
        for known, memory in self._phases:
            if known is rope:
                return memory
        self._phases.append((rope, self.upload(phases(rope.frequencies)) if len(rope.frequencies) else np.uint64(0)))
        return self._phases[-1][1]

    # -- Attention -------------------------------------------------------------------------------------------------

    def use_heads(self, heads: Heads) -> None:
        """Notes a kind of attention; see `Extent`.

        Raises:
            KernelError: the device has no kernel for heads of this size.
        """
        if self.variant and heads not in self.heads:
            self.heads.append(heads)

    def finish(self) -> None:
        """To be called when all operations are there: takes the memory that depends on all of them."""
        self._part_memory = self.new(max(self.part_bytes, _PART_ALIGNMENT)) if self.heads else None

    def parts(self, heads: Heads, work: Work) -> tuple[Argument, Argument]:
        """Memory for the sums and the states of spans."""
        if self._part_memory is None:
            raise KernelError("attention was launched before its recording was finished")
        n_sums, n_states = (max(4, 4 * n) for n in work.part_floats(heads, self.variant))
        begin = self._part_memory.n_bytes - n_states
        return self._part_memory.at(0, n_sums), self._part_memory.at(begin // 8 * 8, n_states)

    @cached_property
    def part_bytes(self) -> int:
        """What the parts of any batch may take: no more than is of use."""
        return part_bytes(self.heads, self.variant, max(1, self.cache.n_pages) * PAGE)

    @property
    def usable_part_bytes(self) -> int:
        """Those, less what may be lost between sums and states."""
        return max(0, self.part_bytes - _PART_ALIGNMENT)

    def bucket_work(self, n_tokens: int, longest: int) -> tuple[tuple[Heads, Work], ...] | None:
        """For batches of at most ``n_tokens``, in sequences of at most ``longest``; None if parts take too much."""
        if any(_bucket_bytes(n_tokens, longest, heads, self.variant) > self.part_bytes for heads in self.heads):
            return None
        return tuple((heads, work_of_bucket(n_tokens, longest, heads)) for heads in self.heads)


def part_bytes(all_heads: Iterable[Heads], variant: Variant, longest: int) -> int:
    """What the parts of any batch may take, in sequences of at most ``longest``: no more than is of use."""
    wanted = max((_bucket_bytes(BUCKETS[-1], longest, heads, variant) for heads in all_heads), default=0)
    return min(MOST_PART_BYTES, wanted)


def _bucket_bytes(n_tokens: int, longest: int, heads: Heads, variant: Variant) -> int:
    floats = sum(work_of_bucket(n_tokens, longest, heads).part_floats(heads, variant))
    return 4 * floats + _PART_ALIGNMENT
