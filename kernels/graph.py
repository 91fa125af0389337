"""Operations of models, and the `Graph` that records a model's forward pass.

A graph is a list of operations over tensors, each tagged with its layer. It refers to the weights of a file without
loading them, so the file's header is enough to build it. The memory of a step, the possible splits over several
devices and the computation on every backend follow from this list: the reference interprets it
(`localllm.kernels.reference`), the CPU and CUDA backends lower it to kernel calls.

    T  tokens in the batch          N  rows whose logits are computed     d  hidden width
    H  query heads                  G  key/value heads (H is a multiple of G)
    E  experts of a layer           k  experts per token

**A graph serves every batch.** It depends on a model's configuration, never on the current batch.

**Tokens are independent of the batch.** The results for a token depend on that token, its position and the cache,
never on the other tokens of the batch. The order of additions in a backend is independent of T, so that a token
decoded alone gets the same bits as in a prefill batch of hundreds. All values must be finite, because a backend may
multiply masked values by zero.

**A new operation** takes four edits: its declaration here, and its computation in the reference, on the CPU and on
CUDA. A declaration checks its arguments for all backends, because kernels trust every address and every number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache, cached_property
from math import gcd, prod
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar, dataclass_transform

import numpy as np
from numpy.typing import NDArray

from localllm.errors import KernelError
from localllm.kernels.cache_rounding import CODE_BITS, MOST_ROTATED, VALUES_PER_SCALE, rotation
from localllm.quant.types import GGMLType

#: Place of an operation: the number of its layer, or before or after all layers.
LayerTag = int | Literal["embedding", "output"]

#: Storage type of keys and values: float16 ("f16"); codes of 8, 5 or 4 bits ("q8_0", "q5_0", "q4_0", see
#: `localllm.kernels.cache_rounding`); or, only in the reference, float32 ("f32"), for comparison with implementations
#: without a cache. Different types for keys and values are written "q8_0/q4_0".
CacheType = str
#: Types that users can choose.
CACHE_TYPES: tuple[CacheType, ...] = ("f16", *CODE_BITS)

#: Limits of a soft-cap. Outside them, scores divided by the cap overflow float32, or the cap has no effect.
MIN_SOFTCAP, MAX_SOFTCAP = 1e-6, 1e6

#: Activation functions of `Activation`, and of `Gated`.
UNGATED = ("silu", "gelu", "gelu_erf", "gelu_quick", "relu2", "tanh")
ACTIVATIONS = (*UNGATED, "sigmoid", "identity", "clamped_swiglu", "softplus")
#: Activation functions of `HeadGate`.
HEAD_GATES = ("sigmoid", "softplus")

#: Maximum number of positions in a run of `IndexSelect`. The length of a run must divide it.
MOST_RUN = 1024

#: Functions of `Route` from logits to probabilities of experts.
GATINGS = ("softmax", "sigmoid", "sqrt_softplus")
#: Maximum number of groups of experts.
MAX_GROUPS = 64

#: Bits of the layer number in `KVCache.key`.
_LAYER_BITS = 16


class Weight(Protocol):
    """A tensor in a GGUF file: the fields of its header, and its data, which is read when the weight is packed."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> GGMLType: ...
    @property
    def shape(self) -> tuple[int, ...]:
        """Numpy order: a matrix [rows, columns] computes ``x @ matrix.T``."""
        ...

    @property
    def data(self) -> NDArray[np.uint8]:
        """Raw blocks, uint8 [rows, bytes per row], or [bytes] for a vector."""
        ...

    def drop_pages(self) -> None:
        """Release the data's pages in the file's mapping, because the data is not needed soon."""
        ...


@dataclass(frozen=True, eq=False)
class WeightView:
    """A weight computed from another one when it is read. The base class keeps its name and type."""

    whole: Weight

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def type(self) -> GGMLType:
        return self.whole.type

    def drop_pages(self) -> None:
        self.whole.drop_pages()


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight [n_out, n_in] with an optional bias [n_out]: y = x @ weight.T + bias."""

    weight: Weight
    bias: Weight | None = None

    def __post_init__(self) -> None:
        _check_dimensions(self.weight, 2)
        _check_shape(self.bias, self.n_out)

    @property
    def n_in(self) -> int:
        return self.weight.shape[1]

    @property
    def n_out(self) -> int:
        return self.weight.shape[0]


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary position embedding of ``2 * len(frequencies)`` values of each head, starting at value ``first``.

    Sources: Su et al., RoFormer (arXiv:2104.09864); axes: Qwen2-VL's M-RoPE (arXiv:2409.12191).
    """

    frequencies: NDArray[np.float32]  # float32 [n_rot / 2], radians per position
    # True: pairs (0, 1), (2, 3), … as in llama's GGUF files. False: pairs (0, n/2), (1, n/2 + 1), … as in Hugging
    # Face's code ("NeoX").
    interleaved: bool
    magnitude: float = 1.0  # factor on cosine and sine (YaRN's attention factor)
    first: int = 0
    # Axis of each frequency: 0 time, 1 row, 2 column, 3 number of the image. Empty: position in the sequence.
    axes: tuple[int, ...] = ()
    position_offset: int = 0  # added to the token's position


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMSNorm of each head, with the same weights [n] for all heads. None means weights of 1.

    With fewer weights than values, only the first n values of each head are normalised.
    """

    eps: float
    weight: Weight | None = None


@dataclass(frozen=True)
class PositionScale:
    """Factor on the queries at position p: 1 + rate * log(1 + floor((p + offset) / length)).

    Sources: Llama 4's attention temperature (offset 1); Ministral 3's (offset 0).
    """

    rate: float
    length: int
    offset: int = 0


@dataclass(frozen=True)
class KVCache:
    """The cache of a layer: keys and values of ``n_heads`` heads for each token.

    Values outside the range of the cache's type are clamped to its largest finite value.
    """

    layer: int
    n_heads: int
    # key_dim, value_dim: values per head in keys and in values
    key_dim: int
    value_dim: int
    type: CacheType = "f16"
    # True: values are the first ``value_dim`` values of the keys and are not stored separately, as in the latents of
    # MLA (DeepSeek-V2, arXiv:2405.04434).
    values_in_keys: bool = False
    # Number of stored tokens: a token sees only the last ``window`` positions, its own included. None: all tokens.
    window: int | None = None
    is_index: bool = False  # True for the second cache of a layer, with the keys of `IndexSelect`
    number: int = 0  # number among several caches of a layer
    # Tokens per cache entry (`Compress`). The last token of each group appends the entry.
    stride: int = 1

    @property
    def key(self) -> int:
        """Key of the cache in `Graph.caches`."""
        return ~self.layer if self.is_index else self.layer + (self.number << _LAYER_BITS)

    def page_rows(self, page_size: int) -> int:
        """Return the rows per page of ``page_size`` tokens: one per entry that ends in the page, at least 1."""
        return max(1, page_size // self.stride)

    @property
    def types(self) -> tuple[CacheType, CacheType]:
        """Types of keys and of values; with ``values_in_keys``, the keys' type twice."""
        keys, _, values = self.type.partition("/")
        return keys, keys if self.values_in_keys else values or keys

    @property
    def rotations(self) -> tuple[int, int]:
        """Number of values rotated together in each head, for keys and values (`localllm.kernels.cache_rounding`)."""
        if self.values_in_keys:
            size = rotation(self.types[0], gcd(self.key_dim, self.value_dim), MOST_ROTATED[0])
            return size, size
        keys, values = map(rotation, self.types, (self.key_dim, self.value_dim), MOST_ROTATED)
        return keys, values

    def bytes_per_token(self) -> int:
        """Return the bytes of one token's keys and values, without padding."""
        dims = (self.key_dim,) if self.values_in_keys else (self.key_dim, self.value_dim)
        floats = {"f32": 4, "f16": 2}
        n_bytes = self.n_heads * sum(
            dim * floats[type] if type in floats else -(-dim * CODE_BITS[type] // 8) + 2 * -(-dim // VALUES_PER_SCALE)
            for dim, type in zip(dims, self.types, strict=False)
        )
        return -(-n_bytes // self.stride)


@dataclass(frozen=True)
class RecurrentState:
    """The state that an operation keeps for each sequence: float32 values that every token changes.

    The state is zero at the start of a sequence (position 0).
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    is_on_host: bool = False  # the host reads and changes it, even if the layer runs on another device

    @property
    def n_values(self) -> int:
        return prod(self.shape)


# -- Tensors -------------------------------------------------------------------------------------------------------


class Rows(Enum):
    """The unit that a tensor has a row for."""

    TOKENS = "each token"  # T
    OUTPUTS = "each output"  # N
    CHOSEN = "each expert of a token"  # T * k, in an order that depends on the backend


@dataclass(frozen=True, eq=False)
class Tensor:
    """A float32 matrix [rows, width] that an operation computes."""

    rows: Rows
    width: int


@dataclass(frozen=True, eq=False)
class Routing:
    """The k of n experts selected for each token, and their weights: the result of `Route`."""

    n_experts: int
    k: int


Value = Tensor | Routing
R = TypeVar("R", bound="Tensor | Routing | tuple[Tensor, ...]", covariant=True)


def _check_rows(rows: Rows, *tensors: Tensor | None) -> None:
    for x in tensors:
        if x is not None and x.rows is not rows:
            raise KernelError(f"a tensor has a row for {x.rows.value}, but a row for {rows.value} is needed")


def _check_dimensions(weight: Weight, n: int) -> None:
    if len(weight.shape) != n:
        usage = "a matrix" if n == 2 else "matrices of experts or heads"
        raise KernelError(f"tensor {weight.name} is used as {usage}, but has the shape {list(weight.shape)}")


def _check_shape(weight: Weight | None, *shape: int) -> None:
    if weight is not None and weight.shape != shape:
        raise KernelError(f"tensor {weight.name} has the shape {list(weight.shape)}, but {list(shape)} is needed")


def _check_residual(residual: Tensor, rows: Rows, width: int) -> None:
    _check_rows(rows, residual)
    if residual.width != width:
        raise KernelError(f"{residual.width} values cannot be added to the {width} of a product")


def _check_softcap(cap: float | None) -> None:
    if cap is not None and not MIN_SOFTCAP <= cap <= MAX_SOFTCAP:
        raise KernelError(
            f"a soft-cap is {cap}, but must be between {MIN_SOFTCAP:g} and {MAX_SOFTCAP:g}, or None for no cap"
        )


# -- Operations ----------------------------------------------------------------------------------------------------


@dataclass_transform(eq_default=False, frozen_default=True)
@dataclass(frozen=True, eq=False)
class Operation(Generic[R]):
    """An operation of a forward pass. Its fields are its arguments; subclasses become dataclasses automatically."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, eq=False)(cls)

    # Names of the inputs that it overwrites. No later operation may read them.
    consumes: ClassVar[tuple[str, ...]] = ()
    # Name of the input whose memory the result may reuse if no later operation reads the input.
    overwrites: ClassVar[str] = ""
    # float_rows, float_columns: names of two-dimensional weights that kernels read as float32, by rows or by columns
    float_rows: ClassVar[tuple[str, ...]] = ()
    float_columns: ClassVar[tuple[str, ...]] = ()

    def computed_by(self, backend: object) -> Iterator[tuple[Value, Any]]:
        """Yield each result with the value that a backend's `method` returns for it."""
        values = getattr(backend, self.method())(self)
        return zip(self.results, values if type(values) is tuple else (values,), strict=True)

    @classmethod
    @cache
    def method(cls) -> str:
        """Return the name of the backend's method: ``expert_output`` for `ExpertOutput`."""
        return re.sub("(?<!^)(?=[A-Z][a-z])", "_", cls.__name__).lower()

    @cached_property
    def result(self) -> R:
        """The tensor or tensors that the operation computes."""
        raise NotImplementedError

    @property
    def results(self) -> tuple[Value, ...]:
        return self.result if isinstance(self.result, tuple) else (self.result,)

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """The tensors that the operation reads."""
        return tuple(value for value in self._values() if isinstance(value, Tensor | Routing))

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """The weights that the operation reads."""
        return tuple(value for value in self._values() if hasattr(value, "drop_pages"))

    @cached_property
    def states(self) -> tuple[RecurrentState, ...]:
        """The sequence states that the operation reads and changes."""
        return tuple(value for value in self._values() if isinstance(value, RecurrentState))

    def named(self, names: tuple[str, ...]) -> set[Weight]:
        """Return the weights in the fields ``names``."""
        values = (getattr(self, name) for name in names)
        return {w for value in values for w in (value if isinstance(value, tuple) else (value,)) if w is not None}

    def _values(self) -> Iterator[Any]:
        for argument in fields(self):
            value = getattr(self, argument.name)
            for item in value if isinstance(value, tuple) else (value,):
                match item:
                    case Matrix():
                        yield from (item.weight, item.bias)
                    case HeadNorm():
                        yield item.weight
                    case _:
                        yield item


class SameShape(Operation[Tensor]):
    """An operation whose result has the shape of x."""

    x: Tensor

    @cached_property
    def result(self) -> Tensor:
        self.check()
        return Tensor(self.x.rows, self.x.width)

    def check(self) -> None:
        """Raises KernelError if the other arguments do not match x."""


class Input(Operation[Tensor]):
    """Rows passed to a step: the result of another device, which a part of a graph starts with.

    Several tensors may be concatenated: this one is the columns of ``total`` starting at ``first``.
    """

    x: Tensor
    first: int = 0
    total: int | None = None

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        return ()

    @cached_property
    def result(self) -> Tensor:
        return self.x


class Embed(Operation[Tensor]):
    """Rows of a table [n_vocab, d] for the batch's ids, times a scale: [T, d].

    ``columns`` selects columns of the table, because layers may have separate columns, as in Gemma 3n. With
    ``by_position``, the rows of the tokens' positions are selected; the table must cover all positions. With
    ``takes_rows``, rows of the batch's ``embedded`` tokens are its ``embeddings``, not scaled.
    """

    table: Weight
    scale: float = 1.0
    columns: range | None = None
    by_position: bool = False
    takes_rows: bool = False

    @cached_property
    def result(self) -> Tensor:
        _check_dimensions(self.table, 2)
        width = self.table.shape[1]
        if self.columns is not None and not 0 <= self.columns.start < self.columns.stop <= width:
            raise KernelError(
                f"a table of {width} columns has no columns {self.columns.start} to {self.columns.stop}"
            )
        return Tensor(Rows.TOKENS, width if self.columns is None else len(self.columns))


class NgramEmbed(Operation[Tensor]):
    """Rows of a table [., d] selected by hashes of the n-grams that end with each token: [T, heads * d].

    The first two of the n ``multipliers`` are for n-grams of two tokens, and so on. Ids, starting with the token
    itself, are multiplied by the multipliers in 64 bits and joined by XOR. The row numbers are the results modulo the
    ``sizes`` of the n-gram's heads, plus their ``offsets``. Each n has the same number of heads. Positions before the
    sequence count as the token ``end``, and so do positions before such a token. ``state`` [n - 1] keeps the last
    ids.

    The table is larger than memory, so the host reads rows from its file. Source: Qwen 3.8 Flash Next.
    """

    table: Weight
    state: RecurrentState
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    end: int

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Empty: the table stays in its file."""
        return ()

    @cached_property
    def result(self) -> Tensor:
        _check_dimensions(self.table, 2)
        n, n_heads, (n_rows, width) = len(self.multipliers), len(self.sizes), self.table.shape
        if n < 2 or n_heads != len(self.offsets) or n_heads % (n - 1) or self.state.shape != (n - 1,):
            raise KernelError(f"{n_heads} heads and a state {list(self.state.shape)} do not fit n-grams of up to {n}")
        ranges = [(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True)]
        if not all(0 <= first < stop <= n_rows for first, stop in ranges) or not all(
            0 <= x < 1 << 64 for x in self.multipliers
        ):
            raise KernelError(
                f"n-grams are hashed to rows that tensor {self.table.name}, of {n_rows:,}, does not have"
            )
        return Tensor(Rows.TOKENS, n_heads * width)

    def numbers(self, before: NDArray[Any], ids: NDArray[Any]) -> NDArray[np.int64]:
        """Return the row numbers [T, heads] of ``ids``, which follow the tokens ``before``."""
        n = len(self.multipliers)
        history = np.concatenate([np.full(n - 1, self.end), before, ids]).astype(np.int64)
        is_end = history == self.end
        positions = np.arange(len(history) - len(ids), len(history))
        mixed, cut = history[positions].astype(np.uint64) * np.uint64(self.multipliers[0]), np.zeros(len(ids), bool)
        numbers, per_n = [], len(self.sizes) // (n - 1)
        for i in range(1, n):
            cut |= is_end[positions - i]
            previous_ids = np.where(cut, self.end, history[positions - i]).astype(np.uint64)
            mixed = mixed ^ (previous_ids * np.uint64(self.multipliers[i]))
            heads = slice((i - 1) * per_n, i * per_n)
            sizes, offsets = (np.array(x[heads], np.uint64) for x in (self.sizes, self.offsets))
            numbers.append(mixed[:, None] % sizes + offsets)
        return np.concatenate(numbers, axis=1).astype(np.int64)


class AdapterWeights(Operation[Tensor]):
    """Weight of each adapter for each token, [T, sum of widths].

    The values between an adapter's two matrices are multiplied by its weight. ``adapters`` lists, for each adapter,
    its number in the batch and the number of these values.

    Source: LoRA, arXiv:2106.09685.
    """

    adapters: tuple[tuple[int, int], ...]

    @cached_property
    def result(self) -> Tensor:
        return Tensor(Rows.TOKENS, sum(width for _, width in self.adapters))

    def rows(self, weights: NDArray[np.float32], n_tokens: int) -> NDArray[np.float32]:
        """Return the result for a batch's weights [T, adapters]; zeros for [0, 0]."""
        numbers, widths = zip(*self.adapters, strict=True)
        if not weights.size:
            return np.zeros((n_tokens, sum(widths)), np.float32)
        if len(weights) != n_tokens or weights.shape[1] <= max(numbers):
            raise KernelError(f"a batch of {n_tokens} tokens has weights {list(weights.shape)} of adapters")
        return np.repeat(weights[:, list(numbers)], widths, axis=1)


def _check_groups(width: int, n_groups: int) -> None:
    if n_groups < 1 or width % n_groups or (n_groups > 1 and width // n_groups % 16):
        raise KernelError(f"{width} values are not {n_groups} groups of a multiple of 16 values")


class RMSNorm(SameShape):
    """x / sqrt(mean(x²) + eps) * weight over the last axis, or over ``n_groups`` equal parts.

    The weight contains a value per value of x, or per value of a group, shared by all groups. None: no weight. With
    several groups, their width must be a multiple of 16. Source: arXiv:1910.07467.
    """

    weight: Weight | None
    eps: float
    n_groups: int = 1

    def check(self) -> None:
        width, n_groups = self.x.width, self.n_groups
        _check_groups(width, n_groups)
        if self.weight is not None and self.weight.shape != (width // n_groups,):
            _check_shape(self.weight, width)


class LayerNorm(SameShape):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over each row, or over ``n_groups`` equal parts of a row.

    Weight and bias contain a value per value of x. With several groups, their width must be a multiple of 16.
    Source: arXiv:1607.06450.
    """

    weight: Weight
    bias: Weight | None
    eps: float
    n_groups: int = 1

    def check(self) -> None:
        _check_groups(self.x.width, self.n_groups)
        _check_shape(self.weight, self.x.width)
        _check_shape(self.bias, self.x.width)


class Add(SameShape):
    """residual + scale * x or, with ``gate`` [rows, 1], residual + scale * σ(gate) * x.

    The gate belongs to a shared expert (Qwen2-MoE). `Linear` adds an unscaled product to a residual itself.
    """

    residual: Tensor
    scale: float = 1.0
    gate: Tensor | None = None
    overwrites = "residual"

    def check(self) -> None:
        _check_residual(self.residual, self.x.rows, self.x.width)
        if self.gate is not None:
            _check_rows(self.x.rows, self.gate)
            if self.gate.width != 1:
                raise KernelError(f"rows are added with one gate each, not with {self.gate.width}")


class AddRows(SameShape):
    """x [T, d] plus, for a batch's ``embedded`` tokens, further embedding ``index`` (from 1) of ``embeddings``.

    Source: DeepStack, arXiv:2406.04334, as used by Qwen3-VL.
    """

    index: int
    consumes = ("x",)

    def check(self) -> None:
        _check_rows(Rows.TOKENS, self.x)
        if self.index < 1:
            raise KernelError(f"the index of further embeddings must be at least 1, not {self.index}")


class Columns(Operation[Tensor]):
    """A range of columns of x. Its start and its length must be multiples of 16."""

    x: Tensor
    columns: range

    @cached_property
    def result(self) -> Tensor:
        first, stop = self.columns.start, self.columns.stop
        if not 0 <= first < stop <= self.x.width or first % 16 or stop % 16:
            raise KernelError(f"columns {first} to {stop} of {self.x.width} cannot be selected: use multiples of 16")
        return Tensor(self.x.rows, stop - first)


class SideBySide(Operation[Tensor]):
    """Several tensors concatenated along the columns. Each must have a multiple of 16 columns."""

    tensors: tuple[Tensor, ...]

    @cached_property
    def result(self) -> Tensor:
        _check_rows(self.tensors[0].rows, *self.tensors)
        if any(x.width % 16 for x in self.tensors):
            raise KernelError(f"rows of {[x.width for x in self.tensors]} columns must all be multiples of 16")
        return Tensor(self.tensors[0].rows, sum(x.width for x in self.tensors))


class MixStreams(Operation[Tensor]):
    """Weighted sums of the n streams of x [rows, n * d], concatenated.

    Stream j is sum over i of (mixing[:, j * n + i] + offset) * x_i, plus stream j of the residual. d must be a
    multiple of 16. Without ``mixing``, all weights are the offset, and the number of results is the residual's number
    of streams, or 1. Streams before number ``first`` are the residual's.

    Sources: AltUp, arXiv:2301.13310; hyper-connections, arXiv:2409.19606.
    """

    x: Tensor
    mixing: Tensor | None
    n: int
    residual: Tensor | None = None
    offset: float = 0.0
    first: int = 0

    @property
    def size(self) -> int:
        """Values per stream."""
        return self.x.width // self.n

    @cached_property
    def result(self) -> Tensor:
        if self.n < 1 or self.x.width % (16 * self.n):
            raise KernelError(f"{self.x.width} values are not {self.n} streams of a multiple of 16")
        _check_rows(self.x.rows, self.mixing, self.residual)
        added = 0 if self.residual is None else self.residual.width // self.size
        n_results = (added or 1) if self.mixing is None else self.mixing.width // self.n
        if (
            (self.mixing is not None and self.mixing.width != n_results * self.n)
            or not 0 <= self.first <= added
            or not n_results
        ):
            raise KernelError(
                f"weights of {n_results} streams do not match {self.n} input streams and {added} residual streams"
            )
        if self.residual is not None:
            _check_residual(self.residual, self.x.rows, n_results * self.size)
        return Tensor(self.x.rows, n_results * self.size)


class HyperWeights(Operation[tuple[Tensor, ...]]):
    """The weights of hyper-connections over n streams, from x [rows, n], [rows, 2 n] or [rows, 2 n + n²].

    Computed from x times ``scale``, with a factor per part, plus ``bias``:

    - read [rows, n]: σ(first part) + eps, the weights of the streams in the input of the layer.
    - write [rows, n]: write_scale σ(second part) + write_offset, the weights of the layer's result in each stream.
    - mix [rows, n²]: the weights that mix the streams. softmax(third part) + eps over the rows of [n, n], then
      columns divided by their sum + eps, then ``n_rounds`` - 1 times rows and columns. The result is ordered by
      target stream, as required by `MixStreams`.

    Sources: mHC, arXiv:2512.24880; without the third part: Hunyuan 4.
    """

    x: Tensor
    scale: Weight
    bias: Weight
    n: int
    eps: float
    write_scale: float = 2.0
    write_offset: float = 0.0
    n_rounds: int = 1

    @cached_property
    def result(self) -> tuple[Tensor, ...]:
        n, n_parts = self.n, self.scale.shape[0]
        widths = [n, n, n * n][:n_parts]
        if not 1 <= n <= 16 or not 1 <= n_parts <= 3 or self.x.width != sum(widths) or self.n_rounds < 1:
            raise KernelError(f"{self.x.width} values are not {n_parts} kinds of weights of {n} streams")
        _check_shape(self.bias, self.x.width)
        return tuple(Tensor(self.x.rows, width) for width in widths)


class StreamGate(Operation[Tensor]):
    """The weights of n streams, from keys and queries [rows, n * d]: [rows, n].

    The weight is σ(sign(s) √max(|s|, 1e-6)) with s = key · query / √d of the stream. d must be a multiple of 16.
    Source: Qwen 3.8 Flash Next.
    """

    key: Tensor
    query: Tensor
    n: int

    @property
    def size(self) -> int:
        """Values per stream."""
        return self.key.width // self.n

    @cached_property
    def result(self) -> Tensor:
        _check_rows(self.key.rows, self.query)
        if self.n < 1 or self.key.width % (16 * self.n) or self.query.width != self.key.width:
            raise KernelError(
                f"keys of {self.key.width} values and queries of {self.query.width} are not {self.n} streams of a "
                "multiple of 16"
            )
        return Tensor(self.key.rows, self.n)


class RootMeanSquare(Operation[Tensor]):
    """√mean(x²) of each row: [rows, 1]."""

    x: Tensor

    @cached_property
    def result(self) -> Tensor:
        return Tensor(self.x.rows, 1)


class AboveDeviation(SameShape):
    """max(0, x - mean(x) - factor * √var(x)), over the last axis.

    Source: Gemma 3n's sparse activations, after Spark Transformer, arXiv:2506.06644.
    """

    factor: float


class Scale(SameShape):
    """factor * x, or factor * weight * x for a weight of one value."""

    factor: float = 1.0
    weight: Weight | None = None
    overwrites = "x"

    def check(self) -> None:
        _check_shape(self.weight, 1)


class Linear(Operation[Tensor]):
    """x @ W.T + bias (+ residual): [rows, n_out]."""

    x: Tensor
    matrix: Matrix
    residual: Tensor | None = None
    overwrites = "residual"

    @cached_property
    def result(self) -> Tensor:
        _check_shape(self.matrix.weight, self.matrix.n_out, self.x.width)
        if self.residual is not None:
            _check_residual(self.residual, self.x.rows, self.matrix.n_out)
        return Tensor(self.x.rows, self.matrix.n_out)


class Linears(Operation[tuple[Tensor, ...]]):
    """Products of several matrices with one input, such as query, key and value, or gate and up."""

    x: Tensor
    matrices: tuple[Matrix, ...]

    @cached_property
    def result(self) -> tuple[Tensor, ...]:
        for matrix in self.matrices:
            _check_shape(matrix.weight, matrix.n_out, self.x.width)
        return tuple(Tensor(self.x.rows, matrix.n_out) for matrix in self.matrices)


class HeadLinear(Operation[Tensor]):
    """Each head of x [rows, H * dim] times its own matrix: [rows, H * n] for weight [H, n_out, n_in].

    Only the first n_in values of a head are multiplied. The remaining values are appended unchanged to the n_out
    results: n = n_out + dim - n_in. n_out, n_in and dim - n_in must be multiples of 32.

    Attention over latents (MLA) uses it to project queries, except their rotated part, into the latent space, and to
    project the result back. Source: DeepSeek-V2, arXiv:2405.04434 ("absorb").
    """

    x: Tensor
    weight: Weight

    @property
    def n_rest(self) -> int:
        """Values of each head that are not multiplied."""
        return self.x.width // self.weight.shape[0] - self.weight.shape[2]

    @cached_property
    def result(self) -> Tensor:
        _check_dimensions(self.weight, 3)
        n_heads, n_out, n_in = self.weight.shape
        if self.x.width % n_heads or self.n_rest < 0 or n_in % 32 or n_out % 32 or self.n_rest % 32:
            raise KernelError(
                f"matrices {[n_out, n_in]} cannot multiply {n_heads} heads in rows of {self.x.width} values: those "
                "have at least as many, and all sizes are multiples of 32"
            )
        return Tensor(self.x.rows, n_heads * (n_out + self.n_rest))


class RopeAppend(Operation[Tensor]):
    """Normalise the heads of q, k and v, rotate the heads of q and k, and append k and v to the layer's cache.

    q is [T, H * key_dim], k [T, G * key_dim] and v [T, G * value_dim]. The result is the rotated q. Norms are applied
    before the rotation or, with ``norm_last``, after it. A norm over whole rows is a separate `RMSNorm` before this
    operation. k and v may be the same tensor, which is then normalised in both ways.

    Without v, values are part of the keys. Without both k and v, the cache belongs to another layer, which has
    already appended to it. A cache with several tokens per entry (`KVCache.stride`) takes the keys of tokens that
    complete an entry. If q is k, the operation only appends.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    cache: KVCache
    rope: Rope | None
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    v_norm: HeadNorm | None = None
    norm_last: bool = False
    q_scale: PositionScale | None = None
    consumes = ("q", "k", "v")

    @property
    def norms(self) -> tuple[HeadNorm | None, HeadNorm | None, HeadNorm | None]:
        """Norms of queries, keys and values."""
        return self.q_norm, self.k_norm, self.v_norm

    @cached_property
    def result(self) -> Tensor:
        cache, key_dim = self.cache, self.cache.key_dim
        _check_rows(Rows.TOKENS, self.q, self.k, self.v)
        _check_queries(self.q, cache)
        if (self.v is None) != (self.k is None or cache.values_in_keys):
            raise KernelError("keys need values unless the keys contain the values, and values need keys")
        for description, x, dim in (("keys", self.k, key_dim), ("values", self.v, cache.value_dim)):
            if x is not None and x.width != cache.n_heads * dim:
                raise KernelError(
                    f"{x.width} values of {description} do not fit a cache of {cache.n_heads} heads of {dim}"
                )
        if self.rope is not None and self.rope.first + 2 * len(self.rope.frequencies) > key_dim:
            raise KernelError(
                f"{len(self.rope.frequencies)} pairs of values from {self.rope.first} on cannot be rotated in heads "
                f"of {key_dim}"
            )
        for norm, dim in zip(self.norms, (key_dim, key_dim, cache.value_dim), strict=True):
            shape = () if norm is None or norm.weight is None else norm.weight.shape
            if shape and (len(shape) > 1 or shape[0] > dim):
                raise KernelError(f"a norm of {list(shape)} weights cannot be taken of {dim} values of a head")
        if self.rope is not None and self.rope.axes:
            axes = self.rope.axes
            if len(axes) != len(self.rope.frequencies) or not {*axes} <= {0, 1, 2, 3}:
                raise KernelError(f"{len(self.rope.frequencies)} pairs of values cannot turn by the axes {axes}")
        if self.q_scale is not None and self.q_scale.length < 1:
            raise KernelError(f"queries cannot be scaled every {self.q_scale.length} positions")
        return Tensor(Rows.TOKENS, self.q.width)


def _check_queries(q: Tensor, cache: KVCache) -> None:
    """Raises KernelError unless queries are whole heads, with equally many query heads per key/value head."""
    if q.width == 0 or q.width % (cache.n_heads * cache.key_dim):
        raise KernelError(
            f"{q.width} values of queries are not a multiple of {cache.n_heads} heads of {cache.key_dim}"
        )


class Attention(Operation[Tensor]):
    """Attention of q [T, H * key_dim] over a layer's cache: [T, H * value_dim].

    A token at position p sees the positions of its sequence up to p: all, the last ``window`` (max(0, p - window + 1)
    … p), or its ``chunk`` (p - p % chunk … p). If attention is not ``causal``, a token sees the same distance ahead,
    as far as positions are in the cache; the whole sequence must then be in one batch. With ``has_spans``, a token
    also sees later positions up to its end in the batch's ``ends``, as tokens of an image see each other. If
    attention is not causal either, it sees only that span, which starts at the batch's ``begins``.

    With ``selected`` [T, k], the result of `IndexSelect`, a token sees only those positions. With [T, G * k], each
    key/value head uses a separate selection. With ``entries``, a second cache, a token also sees the compressed
    entries that end at its position or before, or the selected ones, in the same softmax.

    With ``softcap``, scaled scores s become softcap * tanh(s / softcap). With ``sinks`` [H], the softmax of each
    query head gets an additional score, which adds no value. With ``slopes`` [H], each score decreases by its head's
    slope per position of distance (ALiBi). With ``biases`` [H * (2 n + 1)], the bias of the head and the distance is
    added to each score, for positions up to n before and after the token. Larger distances use the last bias.

    Sources: arXiv:2205.14135; slopes: arXiv:2108.12409; biases: T5, arXiv:1910.10683; soft-cap: Gemma 2,
    arXiv:2408.00118; sinks: gpt-oss, after arXiv:2309.17453; chunks: Llama 4.
    """

    q: Tensor
    cache: KVCache
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Weight | None = None
    chunk: int | None = None
    causal: bool = True
    has_spans: bool = False
    selected: Tensor | None = None
    slopes: Weight | None = None
    biases: Weight | None = None
    entries: KVCache | None = None
    selected_by_head: bool = False

    @property
    def n_selected(self) -> int:
        """Maximum number of selected positions per key/value head; 0 without selection."""
        n_choices = self.cache.n_heads if self.selected_by_head else 1
        return 0 if self.selected is None else self.selected.width // n_choices

    @property
    def bias_width(self) -> int:
        """Number of distances with a bias per head; 0 without biases."""
        return 0 if self.biases is None else self.biases.shape[0] // self.n_heads

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.q.width // self.cache.key_dim

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.n_heads // self.cache.n_heads

    @cached_property
    def result(self) -> Tensor:
        _check_rows(Rows.TOKENS, self.q)
        _check_queries(self.q, self.cache)
        cache_window, reach = self.cache.window, self.window or self.chunk
        if cache_window is not None and (reach is None or reach > cache_window):
            raise KernelError(f"attention must look no further back than a cache of {cache_window} tokens keeps")
        _check_softcap(self.softcap)
        if self.chunk is not None and (self.window is not None or not self.causal):
            raise KernelError("attention in chunks must be causal and without a window")
        if self.has_spans and (self.chunk is not None or not (self.causal or self.window is None)):
            raise KernelError("attention with spans must be without chunks, and without a window if it is not causal")
        if self.selected is not None:
            _check_rows(Rows.TOKENS, self.selected)
            has_reach = reach is not None and self.entries is None
            if has_reach or self.softcap or self.has_spans or not self.causal:
                raise KernelError("positions cannot be selected in attention with a window, spans or a soft-cap")
            if self.selected_by_head and self.selected.width % self.cache.n_heads:
                raise KernelError(f"{self.selected.width} positions do not fit {self.cache.n_heads} heads of keys")
        if self.entries is not None:
            first, second = (replace(c, layer=0, number=0, window=None, stride=1) for c in (self.cache, self.entries))
            if first != second or self.entries.stride == 1 or self.cache.stride > 1 or not first.values_in_keys:
                raise KernelError("entries of runs must be keys like keys of the window, which contain the values")
            if self.window is None or not self.causal or self.softcap or self.has_spans or first.n_heads > 1:
                raise KernelError("entries of runs need a window and one key head, without spans or soft-cap")
            if self.slopes is not None or self.biases is not None:
                raise KernelError("entries of runs cannot be combined with slopes or biases")
        _check_shape(self.sinks, self.n_heads)
        _check_shape(self.slopes, self.n_heads)
        if self.biases is not None:
            _check_shape(self.biases, self.n_heads * (self.bias_width // 2 * 2 + 1))
        by_distance = (self.slopes is not None) + (self.biases is not None)
        if by_distance and (by_distance > 1 or self.softcap or self.has_spans or self.selected is not None):
            raise KernelError("slopes or biases must be used alone, without soft-cap, spans or selection")
        return Tensor(Rows.TOKENS, self.n_heads * self.cache.value_dim)


class IndexSelect(Operation[Tensor]):
    """The k positions that a token attends to, ascending: numbers [T, k], padded with -1 if it sees fewer.

    For a cache with several tokens per entry (`KVCache.stride`), the numbers are indices of entries.

    The positions with the largest scores are selected, the first of equal ones. The score is the sum over heads of
    weight * max(0, q · key), for queries [T, H * dim], ``head_weights`` [T, H] (None: all 1) and the keys of an
    indexer, which `RopeAppend` writes into its cache.

    With a ``run`` of n > 1 positions, k / n whole runs are selected among the complete runs that a token sees, by the
    key of each run's last position. Positions after the last complete run are added, at most n - 1.

    With ``pool`` [n, dim], the key of a run is a weighted sum of the keys of its positions. The weights of each
    channel are the softmax of the positions' gates plus the pool's values. The cache stores [key | gate | key of the
    run that ends here] per token, without codes. `RopeAppend` receives a placeholder for the third part.

    With ``n_last``, each head selects separately, [T, H * k]: the runs with the largest q · key of any position. The
    token's own run counts up to the token. The last ``n_last`` runs, the token's own included, are always
    selected.

    Sources: DeepSeek-V3.2, arXiv:2512.02556; runs: GLM-5.3; the largest product of a run: MiniMax-M3.
    """

    q: Tensor
    head_weights: Tensor | None
    cache: KVCache
    k: int
    run: int = 1
    pool: Weight | None = None
    n_last: int = 0
    float_rows = ("pool",)

    @property
    def dim(self) -> int:
        """Values per key."""
        return self.cache.key_dim // (1 if self.pool is None else 3)

    @property
    def n_heads(self) -> int:
        return self.q.width // self.dim

    @property
    def n_choices(self) -> int:
        """Heads that select separately; 1 if all select together."""
        return self.n_heads if self.n_last else 1

    @cached_property
    def result(self) -> Tensor:
        cache, run = self.cache, self.run
        _check_rows(Rows.TOKENS, self.q, self.head_weights)
        if cache.n_heads != 1 or not cache.values_in_keys or cache.window is not None or self.k < 1:
            raise KernelError("an indexer must keep one key per token and choose at least one position")
        if cache.stride > 1 and (64 % cache.stride or run > 1 or self.n_last or cache.key_dim % 16):
            raise KernelError(
                f"an indexer with an entry per {cache.stride} tokens needs a divisor of 64, keys of a multiple of 16 "
                "values, and no runs"
            )
        if run < 1 or MOST_RUN % run or self.k % run:
            raise KernelError(
                f"runs of {run} positions must divide {MOST_RUN}, and the {self.k} positions that are chosen"
            )
        if self.pool is not None:
            _check_shape(self.pool, run, self.dim)
            if cache.key_dim != 3 * self.dim:
                raise KernelError(f"a cache of {cache.key_dim} values has no gates and keys of runs of {self.dim}")
        if run > 1 and not self.n_last and (self.dim % 16 or 64 % run or cache.types[0] in CODE_BITS):
            raise KernelError(f"keys of {run} positions must be floats, a multiple of 16, in runs that divide 64")
        if self.q.width % self.dim:
            raise KernelError(f"{self.q.width} values are not an indexer's queries, of {self.dim} each")
        if self.head_weights is not None and self.head_weights.width != self.n_heads:
            raise KernelError(f"{self.head_weights.width} weights do not fit {self.n_heads} heads of an indexer")
        if self.n_last == 0:
            return Tensor(Rows.TOKENS, self.k + run - 1)
        if not 1 <= self.n_last <= self.k // run or self.head_weights is not None or self.pool is not None:
            raise KernelError(f"{self.n_last} of {self.k // run} runs cannot be the last ones, which heads choose")
        return Tensor(Rows.TOKENS, self.n_heads * self.k)


class Compress(Operation[Tensor]):
    """One row per n tokens, stored at the last of them: [T, dim]; other rows are zero.

    ``cache`` stores dim values and dim gates per token, [values | gates], or twice as many of both, [values | more
    values | gates | more gates]. A row is the weighted sum of its run's values. The weights of each channel are the
    softmax of the gates plus ``biases`` [n, dim]. With twice as many values, ``biases`` are [n, 2 dim], and the sum
    covers 2 n entries: the first values of the previous run (none for the first run), and the second values of the
    current run. x is the result of the `RopeAppend` that appended the tokens to the cache.

    Source: DeepSeek V4.
    """

    x: Tensor
    cache: KVCache
    biases: Weight
    float_rows = ("biases",)

    @property
    def run(self) -> int:
        """Tokens per run."""
        return self.biases.shape[0]

    @property
    def n_series(self) -> int:
        """Number of value series per token, which belong to different runs."""
        return self.cache.n_heads // 2

    @cached_property
    def result(self) -> Tensor:
        cache = self.cache
        _check_rows(Rows.TOKENS, self.x)
        _check_dimensions(self.biases, 2)
        if (
            cache.n_heads not in (2, 4)
            or not cache.values_in_keys
            or cache.types[0] in CODE_BITS
            or cache.key_dim % 16
        ):
            raise KernelError(
                f"{cache.n_heads} heads are not values and gates, of one kind or two, of a multiple of 16 channels, "
                "without codes"
            )
        _check_shape(self.biases, self.run, self.n_series * cache.key_dim)
        if self.run & (self.run - 1) or (cache.window or self.run * self.n_series) < self.run * self.n_series:
            raise KernelError(
                f"runs of {self.run} tokens must be a power of two, and fit into a cache of {cache.window} tokens"
            )
        return Tensor(Rows.TOKENS, cache.key_dim)


#: Maximum kernel length of `CausalConv`.
MAX_CONV = 16


class CausalConv(Operation[Tensor]):
    """Convolution of each column of x [T, n] along its sequence. The kernel's last value applies to the token itself.

    y[t] = activation(sum over j of weight[:, j] * x[t - kernel + 1 + j] + bias), with weight [n, kernel] and zeros
    before the sequence. ``state`` [kernel - 1, n] keeps the last inputs. Source: Mamba, arXiv:2312.00752.
    """

    x: Tensor
    weight: Weight
    state: RecurrentState
    bias: Weight | None = None
    silu: bool = False
    float_columns = ("weight",)

    @cached_property
    def result(self) -> Tensor:
        _check_rows(Rows.TOKENS, self.x)
        _check_dimensions(self.weight, 2)
        n, kernel = self.x.width, self.weight.shape[1]
        if not 2 <= kernel <= MAX_CONV:
            raise KernelError(f"a convolution needs kernels of 2 to {MAX_CONV} values, not of {kernel}")
        _check_shape(self.weight, n, kernel)
        _check_shape(self.bias, n)
        if self.state.shape != (kernel - 1, n):
            raise KernelError(f"a convolution needs a state {[kernel - 1, n]}, not {list(self.state.shape)}")
        return Tensor(Rows.TOKENS, n)


class GatedDelta(Operation[Tensor]):
    """Linear attention whose state S [d_k, d_v] of each value head decays and is corrected by the delta rule.

    For each token, with q and k divided by their length, √(sum of squares + eps), and q by √d_k:

        S = exp(a · softplus(decay + dt_bias)) · S;  S += k ⊗ σ(beta) (v - Sᵀk);  result = Sᵀq

    With a negative ``bound``, the decay factor is exp(bound · σ(a · (decay + dt_bias))), at least exp(bound).

    ``qkv`` is one tensor of [queries | keys | values] with n_key_heads, n_key_heads and H heads, or three tensors.
    ``decay`` contains H values, like ``beta``, or H * d_k for a decay per channel. ``a`` [H] is negative; with a
    bound it may have either sign, and its magnitude is used. Value head h uses the keys and queries of key head
    h mod n_key_heads or, if ``is_grouped``, of h ÷ (H / n_key_heads). ``state`` is [H, d_k, d_v]; d_k and d_v must be
    multiples of 16. The result is [T, H * d_v].

    Sources: Gated DeltaNet, arXiv:2412.06464; decay per channel: Kimi Linear, arXiv:2510.26692; a bound: Ling 3.
    """

    qkv: tuple[Tensor, ...]
    decay: Tensor
    beta: Tensor
    a: Weight
    dt_bias: Weight
    state: RecurrentState
    n_key_heads: int
    is_grouped: bool = False
    eps: float = 1e-6
    bound: float = 0.0
    float_columns = ("a",)

    @property
    def is_per_channel(self) -> bool:
        return self.decay.width != self.state.shape[0]

    @cached_property
    def result(self) -> Tensor:
        _check_rows(Rows.TOKENS, *self.qkv, self.decay, self.beta)
        n_heads, d_k, d_v = _check_heads(self.state, self.n_key_heads)
        keys = self.n_key_heads * d_k
        _check_side_by_side(self.qkv, (keys, keys, n_heads * d_v))
        if self.decay.width not in (n_heads, n_heads * d_k) or self.beta.width != n_heads:
            raise KernelError(f"decay and beta of {n_heads} heads cannot have {self.decay.width}, {self.beta.width}")
        _check_column(self.a, n_heads)
        _check_shape(self.dt_bias, self.decay.width)
        return Tensor(Rows.TOKENS, n_heads * d_v)


class Scan(Operation[Tensor]):
    """Mamba 2's recurrence with a state S [N, P] per head.

    For each token, with Δ = softplus(dt + dt_bias):

        S = exp(a Δ) · S + B ⊗ Δ x;  result = Sᵀ C + D x

    ``xbc`` is one tensor of [x | B | C] with H, n_groups and n_groups heads, or three tensors. Head h uses B and C of
    group h ÷ (H / n_groups). ``a`` [H] is negative. ``state`` is [H, N, P]; N and P must be multiples of 16. The
    result is [T, H * P]. Source: arXiv:2405.21060.
    """

    xbc: tuple[Tensor, ...]
    dt: Tensor
    a: Weight
    dt_bias: Weight
    d: Weight
    state: RecurrentState
    n_groups: int
    float_columns = ("a", "d")

    @cached_property
    def result(self) -> Tensor:
        _check_rows(Rows.TOKENS, *self.xbc, self.dt)
        n_heads, n, p = _check_heads(self.state, self.n_groups)
        _check_side_by_side(self.xbc, (n_heads * p, self.n_groups * n, self.n_groups * n))
        if self.dt.width != n_heads:
            raise KernelError(f"{self.dt.width} time steps do not match {n_heads} heads: give one per head")
        for weight in (self.a, self.d):
            _check_column(weight, n_heads)
        _check_shape(self.dt_bias, n_heads)
        return Tensor(Rows.TOKENS, n_heads * p)


class ChannelScan(Operation[Tensor]):
    """Mamba's recurrence with N state values per channel, which decay independently.

    For each token, for x and dt [T, n], b and c [T, N], with Δ = softplus(dt + dt_bias):

        h_i = exp(a_i Δ) h_i + b_i Δ x;  result = sum over i of c_i h_i + d x

    ``a`` [n, N] is negative. ``state`` is [N, n]. n must be a multiple of 16 and N at most 64.
    Source: arXiv:2312.00752.
    """

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    a: Weight
    dt_bias: Weight
    d: Weight
    state: RecurrentState
    float_columns = ("a",)

    @cached_property
    def result(self) -> Tensor:
        _check_rows(Rows.TOKENS, self.x, self.dt, self.b, self.c)
        n, n_state = self.x.width, self.b.width
        if (
            self.dt.width != n
            or self.c.width != n_state
            or n % 16
            or n_state > 64
            or self.state.shape != (n_state, n)
        ):
            raise KernelError(f"a scan of {n} channels of {n_state} values does not match {list(self.state.shape)}")
        _check_shape(self.a, n, n_state)
        for weight in (self.dt_bias, self.d):
            _check_shape(weight, n)
        return Tensor(Rows.TOKENS, n)


def side_by_side(tensors: tuple[Tensor, ...], widths: tuple[int, ...]) -> list[tuple[Tensor, int]]:
    """Return the tensor and the first column of each part with the given widths."""
    if len(tensors) == len(widths):
        return [(x, 0) for x in tensors]
    return [(tensors[0], sum(widths[:i])) for i in range(len(widths))]


def _check_side_by_side(tensors: tuple[Tensor, ...], widths: tuple[int, ...]) -> None:
    actual = tuple(x.width for x in tensors)
    if actual not in (widths, (sum(widths),)):
        raise KernelError(f"tensors have {actual} values, but need {widths}, in one tensor or one each")


def _check_heads(state: RecurrentState, n_groups: int) -> tuple[int, int, int]:
    if len(state.shape) != 3 or state.shape[1] % 16 or state.shape[2] % 16 or min(state.shape) < 1:
        raise KernelError(
            f"a state {list(state.shape)} must be [n_heads, rows, columns] with rows and columns multiples of 16"
        )
    n_heads, rows, columns = state.shape
    if n_groups < 1 or n_heads % n_groups:
        raise KernelError(f"{n_heads} heads cannot share the keys of {n_groups}")
    return n_heads, rows, columns


def _check_column(weight: Weight, n: int) -> None:
    """Raises KernelError unless the shape is [n] or [n, 1], the shapes of recurrence weights in files."""
    _check_shape(weight, *((n, 1) if len(weight.shape) == 2 else (n,)))


class Gated(Operation[Tensor]):
    """activation(gate) * up; ``activation`` is one of `ACTIVATIONS`.

    "gelu" is the tanh approximation, and "relu2" is relu(gate)². "clamped_swiglu" is gpt-oss's
    g * σ(1.702 g) * (u + 1) with g at most 7 and u within ±7. Source: arXiv:2002.05202.
    """

    gate: Tensor
    up: Tensor
    activation: str
    overwrites = "gate"

    @cached_property
    def result(self) -> Tensor:
        _check_choice("activation", self.activation, ACTIVATIONS)
        _check_rows(self.gate.rows, self.up)
        if self.gate.width != self.up.width:
            raise KernelError(f"a gate of {self.gate.width} values does not fit {self.up.width} values")
        return Tensor(self.gate.rows, self.gate.width)


class HeadGate(SameShape):
    """Each head of x [T, H * dim] times activation(gate [T, H]), one of `HEAD_GATES`; dim is a multiple of 16.

    Source: gated attention, arXiv:2505.06708, per head.
    """

    gate: Tensor
    activation: str
    overwrites = "x"

    def check(self) -> None:
        _check_choice("gate of heads", self.activation, HEAD_GATES)
        _check_rows(self.x.rows, self.gate)
        if self.x.width % (16 * self.gate.width):
            raise KernelError(f"{self.x.width} values are not {self.gate.width} heads of a multiple of 16 values")


class Activation(SameShape):
    """activation(x), one of `UNGATED`."""

    activation: str
    overwrites = "x"

    def check(self) -> None:
        _check_choice("activation without a gate", self.activation, UNGATED)


class Clamp(SameShape):
    """x clipped to ``low`` … ``high``; infinities mean no bound."""

    low: float
    high: float
    overwrites = "x"

    def check(self) -> None:
        if not self.low < self.high:
            raise KernelError(f"values cannot be clamped to {self.low:g} … {self.high:g}")


class XIELU(SameShape):
    """p x² + β x if x > 0, else n (exp(min(x, ε)) - 1 - x) + β x. Source: arXiv:2411.13010."""

    p: float
    n: float
    beta: float
    eps: float
    overwrites = "x"


def _check_choice(description: str, choice: str, choices: tuple[str, ...]) -> None:
    if choice not in choices:
        raise KernelError(f"there is no {description} {choice!r}; choose one of {', '.join(choices)}")


class Route(Operation[Routing]):
    """The k experts of each token: the largest of the token's logits [T, E], the lowest number first if equal.

    The experts' weights are their probabilities (softmax, sigmoid or √softplus of the logits) times ``scale``. With
    ``norm_topk_prob`` they are divided by their sum, so that softmax covers only the k selected experts.
    ``expert_scales`` [E] are further factors of the weights. ``expert_ids`` [T, k] sets the experts independently of
    the logits.

    With ``selection_bias`` [E], the experts with the largest sums of probability and bias are selected. With
    ``n_groups`` groups of E / n_groups neighbours, only experts of ``n_top_groups`` groups can be selected: the
    groups with the largest sums of their best ``n_group_best`` (1 or 2) probabilities, including biases.

    All layers of a graph have the same k. Sources: arXiv:2401.04088 (Mixtral), arXiv:2405.04434 (DeepSeek V2: groups
    by their best), arXiv:2412.19437 (V3: by their two best).
    """

    logits: Tensor
    k: int
    norm_topk_prob: bool
    scale: float = 1.0
    gating: str = "softmax"
    selection_bias: Weight | None = None
    n_groups: int = 1
    n_top_groups: int = 1
    n_group_best: int = 2
    expert_scales: Weight | None = None
    expert_ids: Tensor | None = None

    @property
    def is_by_logits(self) -> bool:
        """Return whether experts are selected by logits alone and weighted with softmax."""
        is_plain = self.selection_bias is None and self.expert_ids is None and self.n_groups == 1
        return self.gating == "softmax" and is_plain

    @cached_property
    def result(self) -> Routing:
        n = self.logits.width
        _check_rows(Rows.TOKENS, self.logits)
        _check_choice("gating", self.gating, GATINGS)
        _check_shape(self.selection_bias, n)
        _check_shape(self.expert_scales, n)
        if not 1 <= self.k <= self.logits.width:
            raise KernelError(
                f"{self.k} of {self.logits.width} experts cannot be chosen: choose 1 to {self.logits.width}"
            )
        if self.expert_ids is not None:
            _check_rows(Rows.TOKENS, self.expert_ids)
            if self.expert_ids.width != self.k or self.selection_bias is not None or self.n_groups > 1:
                raise KernelError(
                    f"{self.expert_ids.width} experts per token are set, but {self.k} are needed, without bias or "
                    "groups"
                )
        if not 1 <= self.n_group_best <= 2:
            raise KernelError(
                f"groups must be chosen by their best or their two best experts, not by {self.n_group_best}"
            )
        if not 1 <= self.n_groups <= min(MAX_GROUPS, n // 2 or 1) or n % self.n_groups:
            raise KernelError(
                f"{n} experts cannot be {self.n_groups} groups of at least two, of at most {MAX_GROUPS}"
            )
        if not 1 <= self.n_top_groups <= self.n_groups or self.k > n // self.n_groups * self.n_top_groups:
            raise KernelError(f"{self.k} experts cannot be chosen of {self.n_top_groups} in {self.n_groups} groups")
        return Routing(self.logits.width, self.k)


class ExpertLinears(Operation[tuple[Tensor, ...]]):
    """Products of each token of x [T, d] with weights [E, n_out, d], such as gate and up, of each selected expert.

    The results have a row per token and expert, in an order that depends on the backend. `Gated` and `ExpertOutput`
    accept such rows. ``biases`` [E, n_out] are empty or one per weight. If ``is_weighted``, a token's row is first
    multiplied by its weight for the expert, as in Llama 4.
    """

    x: Tensor
    experts: tuple[Weight, ...]
    routing: Routing
    biases: tuple[Weight, ...] = ()
    is_weighted: bool = False
    float_rows = ("biases",)

    @cached_property
    def result(self) -> tuple[Tensor, ...]:
        _check_rows(Rows.TOKENS, self.x)
        if len(self.biases) not in (0, len(self.experts)):
            raise KernelError(
                f"{len(self.biases)} biases do not match {len(self.experts)} matrices: give one per matrix, or none"
            )
        for i, weight in enumerate(self.experts):
            _check_experts(weight, self.x, self.routing, self.biases[i] if self.biases else None)
        return tuple(Tensor(Rows.CHOSEN, weight.shape[1]) for weight in self.experts)


class ExpertOutput(Operation[Tensor]):
    """Each row of h times the weight [E, d, n_in] of its expert, summed per token with its weights, plus a residual.

    The result is [T, d]. The sum starts with a token's best expert. ``bias`` is [E, d]. If ``is_weighted`` is False,
    rows are added without weights.
    """

    h: Tensor
    experts: Weight
    routing: Routing
    residual: Tensor | None = None
    bias: Weight | None = None
    is_weighted: bool = True
    overwrites = "residual"
    float_rows = ("bias",)

    @cached_property
    def result(self) -> Tensor:
        _check_rows(Rows.CHOSEN, self.h)
        _check_experts(self.experts, self.h, self.routing, self.bias)
        if self.residual is not None:
            _check_residual(self.residual, Rows.TOKENS, self.experts.shape[1])
        return Tensor(Rows.TOKENS, self.experts.shape[1])


def _check_experts(weight: Weight, x: Tensor, routing: Routing, bias: Weight | None) -> None:
    _check_dimensions(weight, 3)
    _check_shape(weight, routing.n_experts, weight.shape[1], x.width)
    _check_shape(bias, *weight.shape[:2])


class Softcap(SameShape):
    """cap * tanh(x / cap), for logits. Source: Gemma 2, arXiv:2408.00118."""

    cap: float
    overwrites = "x"

    def check(self) -> None:
        _check_softcap(self.cap)


class Outputs(Operation[Tensor]):
    """The rows of x [T, d] whose logits are computed: [N, d].

    With ``n_joined``, each row is concatenated with the following n_joined - 1 rows: [N, n_joined * d]. With
    ``is_mean``, their mean is computed: [N, d]. Image encoders merge neighbouring patches in this way.
    """

    x: Tensor
    n_joined: int = 1
    is_mean: bool = False

    @cached_property
    def result(self) -> Tensor:
        _check_rows(Rows.TOKENS, self.x)
        if self.n_joined < 1:
            raise KernelError(f"{self.n_joined} rows cannot be joined: give at least 1")
        return Tensor(Rows.OUTPUTS, self.x.width * (1 if self.is_mean else self.n_joined))


# -- Graphs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """An operation and its layer."""

    operation: Operation[Any]
    layer: LayerTag


@dataclass(eq=False)
class Graph:
    """A recorded forward pass, or a device's part of it."""

    cache_type: CacheType = "f16"  # storage type of the layers' caches
    # True: devices may round floats to 14 bits in products; used for encoders, which have many rows per batch
    rounds_floats: bool = False
    nodes: list[Node] = field(default_factory=list)  # in execution order
    caches: dict[int, KVCache] = field(default_factory=dict)  # caches of all layers, by `KVCache.key`
    # states of each layer
    states: dict[int, tuple[RecurrentState, ...]] = field(default_factory=dict)
    # Windows of all caches of the whole graph. Caches with the same window form a **group**, numbered by its index
    # here, with separate pages and block tables. Group 0 keeps all tokens, even if no layer belongs to it.
    windows: list[int | None] = field(default_factory=lambda: [None])
    # graph that owns the caches; a step of this graph uses the memory of that graph's step
    caches_of: Graph | None = None
    layer: LayerTag = "embedding"  # layer of the operations that are added next
    # values that can be read after a step (`localllm.kernels.backend.Step.value`)
    watched: set[Value] = field(default_factory=set)
    # tokens of the result's columns, if they are not the whole vocabulary
    token_ids: NDArray[np.int64] | None = None
    _recorded: set[Value] = field(default_factory=set)
    _consumed: set[Value] = field(default_factory=set)

    def kv_cache(
        self,
        n_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        *,
        values_in_keys: bool = False,
        window: int | None = None,
        is_index: bool = False,
        is_exact: bool = False,
        number: int = 0,
        stride: int = 1,
    ) -> KVCache:
        """Declare a cache of the layer, for keys and values of ``n_heads`` heads.

        Args:
            value_dim: defaults to ``key_dim``.
            is_index: the cache contains the keys of an indexer, in addition to the layer's cache.
            is_exact: never store codes.
            number, stride: see `KVCache`; a cache with several tokens per entry never stores codes.

        Raises:
            KernelError: an argument is invalid, or the layer already has such a cache.
        """
        value_dim = key_dim if value_dim is None else value_dim
        if not isinstance(self.layer, int):
            raise KernelError(f"a cache cannot be declared in {self.layer}: declare it in a layer")
        if values_in_keys and value_dim > key_dim:
            raise KernelError(f"{value_dim} values cannot be the first ones of {key_dim}")
        if window is not None and window < 1:
            raise KernelError(f"a cache cannot have a window of {window} tokens: give at least 1")
        if stride < 1 or stride & (stride - 1) or (stride > 1 and (n_heads > 1 or window or not values_in_keys)):
            raise KernelError(
                f"a cache cannot have an entry for every {stride} tokens: use a power of two, one head, values in "
                "keys, and no window"
            )
        shape = n_heads, key_dim, value_dim
        cache = KVCache(self.layer, *shape, self.cache_type, values_in_keys, window, is_index, number, stride)
        if (is_exact or stride > 1) and cache.types[0] in CODE_BITS:
            cache = replace(cache, type="f16")
        if cache.key in self.caches:
            raise KernelError(f"layer {self.layer} already has such a cache")
        self.caches[cache.key] = cache
        if window not in self.windows:
            self.windows.append(window)
        return cache

    def group(self, cache: KVCache) -> int:
        """Return the number of the cache's group."""
        return self.windows.index(cache.window)

    def state(self, name: str, *shape: int, is_on_host: bool = False) -> RecurrentState:
        """Declare a state of the layer for each sequence, for one operation or for the host. Returns the state."""
        if not isinstance(self.layer, int):
            raise KernelError(f"a state cannot be declared in {self.layer}: declare it in a layer")
        state = RecurrentState(self.layer, name, shape, is_on_host)
        states = self.states.get(self.layer, ())
        if any(existing.name == name for existing in states):
            raise KernelError(f"layer {self.layer} already has a state called {name!r}")
        self.states[self.layer] = (*states, state)
        return state

    def add(self, operation: Operation[R]) -> R:
        """Record an operation and return its result.

        Raises KernelError if its arguments do not match, or a tensor belongs to another graph or has been
        overwritten.
        """
        for x in operation.inputs:
            if x not in self._recorded:
                raise KernelError("an argument of an operation is not a tensor of the same graph")
            if x in self._consumed:
                raise KernelError("an argument of an operation was overwritten by an earlier operation")
        if isinstance(operation, Route):
            for k in {r.k for r in self._recorded if isinstance(r, Routing)} - {operation.k}:
                raise KernelError(f"layers with {k} and with {operation.k} experts per token cannot be mixed")
        for state in operation.states:
            if state not in self.states.get(state.layer, ()) or any(state in n.operation.states for n in self.nodes):
                raise KernelError(
                    f"the state {state.name!r} of layer {state.layer} must be used by one operation of its graph"
                )
        result = operation.result
        self._recorded.update(operation.results)
        self._consumed.update(getattr(operation, name) for name in operation.consumes)
        self.nodes.append(Node(operation, self.layer))
        return result

    @property
    def result(self) -> Tensor:
        """Output of the last operation: logits, or the hidden states that the next device continues with."""
        *_, result = self.nodes[-1].operation.results
        if not isinstance(result, Tensor):
            raise KernelError("a graph must end with a tensor")
        return result

    def last_uses(self) -> dict[Value, int]:
        """Return the index of the last node that reads each tensor.

        Tensors that are read after a step, the result and watched values, get the number of nodes.
        """
        uses: dict[Value, int] = {}
        for i, node in enumerate(self.nodes):
            uses |= dict.fromkeys((*node.operation.results, *node.operation.inputs), i)
        return uses | dict.fromkeys({self.result} | self.watched & set(uses), len(self.nodes))

    @property
    def is_causal(self) -> bool:
        """Return whether no token sees a later one; otherwise a whole sequence must be in one batch."""
        return all(n.operation.causal for n in self.nodes if isinstance(n.operation, Attention))

    @property
    def n_joined(self) -> int:
        """Number of consecutive rows, from its own on, that an output can be computed from."""
        return max((n.operation.n_joined for n in self.nodes if isinstance(n.operation, Outputs)), default=1)

    @property
    def has_spans(self) -> bool:
        """Return whether some tokens see each other both ways (`Attention`); each span must come in one batch."""
        return any(n.operation.has_spans for n in self.nodes if isinstance(n.operation, Attention))

    @property
    def has_begins(self) -> bool:
        """Return whether some tokens see only spans (`Attention`)."""
        nodes = (n.operation for n in self.nodes if isinstance(n.operation, Attention))
        return any(op.has_spans and not op.causal for op in nodes)

    @property
    def looks_ahead(self) -> bool:
        """Return whether a token may see later tokens."""
        return self.has_spans or not self.is_causal

    @property
    def has_axes(self) -> bool:
        """Return whether tokens are rotated by their position in an image (`Rope.axes`)."""
        ropes = (n.operation.rope for n in self.nodes if isinstance(n.operation, RopeAppend))
        return any(rope is not None and rope.axes for rope in ropes)

    def n_chosen(self) -> int:
        """Return the number of experts per token; 0 without experts."""
        return max((n.operation.k for n in self.nodes if isinstance(n.operation, Route)), default=0)

    def part(self, layers: range) -> Graph:
        """Return the operations of a range of layers. The first layers also embed; the last also have norm and head.

        Later layers that need the embedding again (Gemma 4's E2B) compute it themselves.

        Raises:
            KernelError: more than one tensor with a row per token crosses into the part, or a layer uses the keys and
                values of a layer outside.
        """
        if layers == range(self.n_layers):
            return self
        subgraph = Graph(self.cache_type, self.rounds_floats)
        subgraph.caches = {n: c for n, c in self.caches.items() if c.layer in layers}
        subgraph.states = {n: s for n, s in self.states.items() if n in layers}
        subgraph.windows, subgraph.watched = self.windows, self.watched
        ends = {"embedding": layers.start == 0, "output": layers.stop == self.n_layers}
        subgraph.nodes = [n for n in self.nodes if (n.layer in layers if isinstance(n.layer, int) else ends[n.layer])]
        for node in subgraph.nodes:
            cache = getattr(node.operation, "cache", None)
            if cache is not None and cache.layer not in layers:
                raise KernelError(
                    f"the model cannot be cut between layers {cache.layer} and {node.layer}: the second uses the "
                    "keys and values of the first"
                )
        computed = {x for node in subgraph.nodes for x in node.operation.results}
        crossing = {x for node in subgraph.nodes for x in node.operation.inputs} - computed
        operations = [node.operation for node in self.nodes]
        embeds = [op for op in operations if isinstance(op, Embed) and op.result in crossing]
        if layers.start:
            crossing -= {embed.result for embed in embeds}
            inputs = [x for x in crossing if isinstance(x, Tensor) and x.rows is Rows.TOKENS]
            if len(inputs) != 1 or len(crossing) != 1:
                raise KernelError(f"the model cannot be cut at layer {layers.start}: more than one tensor crosses it")
            first: list[Operation[Any]] = [Input(inputs[0]), *embeds]
            subgraph.nodes[:0] = [Node(operation, layers.start) for operation in first]
        return subgraph

    @property
    def n_layers(self) -> int:
        return 1 + max((node.layer for node in self.nodes if isinstance(node.layer, int)), default=-1)
