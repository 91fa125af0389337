"""The operations that models are made of, and the `Graph` that a model's forward pass is recorded as.

A graph is a list of operations over tensors, each tagged with the layer it belongs to.  It refers to the weights of a
file, but holds none of them, so it is made from the file's header alone.  What a step costs, where it can be cut over
several devices and how every backend computes it follows from this one list: the reference interprets it
(`localllm.kernels.reference`), the CPU and CUDA backends lower it to kernel calls.

    T  tokens in the batch          N  rows whose logits are wanted       d  hidden width
    H  query heads                  G  key/value heads (H is a multiple of G)
    E  experts of a layer           k  experts that a token goes to

**A graph serves every batch.**  It depends on a model's configuration, never on the batch at hand.

**Every token stands alone.**  What an operation computes for a token depends on that token, its position and the
cache, never on which other tokens share the batch.  A backend keeps the order of its additions independent of T, so
that a token decoded alone has the same bits as one that was prefilled in a batch of hundreds.  (All values are
finite, that is to say: a backend may multiply those that a token does not see by zero.)

**A new operation** takes four edits: its declaration here, and what computes it in the reference, on the CPU and on
CUDA.  A declaration checks its arguments, once for all backends: kernels believe every address and every number.
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

#: Where an operation belongs: in the layer of that number, or before or behind all of them.
LayerTag = int | Literal["embedding", "output"]

#: What keys and values are kept in: float16 ("f16"); codes of 8, 5 or 4 bits ("q8_0", "q5_0", "q4_0", see
#: `localllm.kernels.cache_rounding`); or, in the reference alone, float32 ("f32"), to be compared with
#: implementations that have no cache.  One for keys and another for values are "q8_0/q4_0".
CacheType = str
#: Those that a user can choose.
CACHE_TYPES: tuple[CacheType, ...] = ("f16", *CODE_BITS)

#: What a soft-cap may be.  Beyond, float32 could not hold scores divided by it, or would not tell it from none.
MIN_SOFTCAP, MAX_SOFTCAP = 1e-6, 1e6

#: What `Activation` can apply, and what `Gated` can.
UNGATED = ("silu", "gelu", "gelu_erf", "gelu_quick", "relu2", "tanh")
ACTIVATIONS = (*UNGATED, "sigmoid", "identity", "clamped_swiglu", "softplus")
#: And what `HeadGate` can.
HEAD_GATES = ("sigmoid", "softplus")

#: Positions of the longest run that `IndexSelect` chooses; others are divisors of it.
MOST_RUN = 1024

#: What `Route` makes experts' probabilities of logits with.
GATINGS = ("softmax", "sigmoid", "sqrt_softplus")
#: The most groups of experts.
MAX_GROUPS = 64

#: Bits of a layer's number in `KVCache.key`.
_LAYER_BITS = 16


class Weight(Protocol):
    """A tensor as it lies in a GGUF file: what is known from its header, and its data, read when it is packed."""

    @property
    def name(self) -> str: ...
    @property
    def type(self) -> GGMLType: ...
    @property
    def shape(self) -> tuple[int, ...]:
        """Numpy order: a matrix is [rows, columns], and computes ``x @ matrix.T``."""
        ...

    @property
    def data(self) -> NDArray[np.uint8]:
        """Raw blocks, uint8 [rows, bytes per row], or [bytes] of a vector."""
        ...

    def drop_pages(self) -> None:
        """Says that the data will not be needed soon, so that what the file's mapping holds of it can go."""
        ...


@dataclass(frozen=True, eq=False)
class WeightView:
    """A weight that is made of another when it is read: here of the same name and format."""

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
    """Rotary position embedding of ``2 * len(frequencies)`` values of each head, from number ``first`` on.

    Sources: Su et al., RoFormer (arXiv:2104.09864); axes: Qwen2-VL's M-RoPE (arXiv:2409.12191).
    """

    frequencies: NDArray[np.float32]  # float32 [n_rot / 2], radians a position
    # pairs are (0, 1), (2, 3), … as in llama's GGUF files; otherwise (0, n/2), (1, n/2 + 1), … as in Hugging Face's
    # code ("NeoX")
    interleaved: bool
    magnitude: float = 1.0  # factor on cosine and sine (YaRN's attention factor)
    first: int = 0
    # of each frequency, what a token turns by: its time (0), row (1), column (2) or its picture's number (3).  Empty:
    # its place in the sequence
    axes: tuple[int, ...] = ()
    ahead: int = 0  # by how many positions it turns further than to the token's own


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """An RMSNorm of each head, with the same weights [n] for all; without weights, as if all were 1.

    Where there are fewer weights than values, it is one of the first n values of each head, and leaves the others.
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
    """The cache of a layer, for each token: keys and values of ``n_heads`` heads.

    Values beyond the range of the cache's type are clamped to its largest finite value.
    """

    layer: int
    n_heads: int
    # key_dim, value_dim: the values of a head in keys and in values
    key_dim: int
    value_dim: int
    type: CacheType = "f16"
    # whether values are the first ``value_dim`` values of the keys, and not kept themselves: the latents of MLA
    # (DeepSeek-V2, arXiv:2405.04434)
    values_in_keys: bool = False
    # tokens that are kept: none is seen by one that comes so many behind it.  None: all of them.
    window: int | None = None
    is_index: bool = False  # whether it is a layer's second one, of what `IndexSelect` chooses by
    part: int = 0  # its number among those of a layer that has several
    # tokens of a run: the cache has one entry for each run (`Compress`), which its last token appends
    every: int = 1

    @property
    def key(self) -> int:
        """Its key among those of a graph."""
        return ~self.layer if self.is_index else self.layer + (self.part << _LAYER_BITS)

    def page_rows(self, page_size: int) -> int:
        """Rows of a page of so many tokens: one for each run that ends there, or one where runs are longer."""
        return max(1, page_size // self.every)

    @property
    def types(self) -> tuple[CacheType, CacheType]:
        """Of keys and of values; where values are in the keys, theirs."""
        keys, _, values = self.type.partition("/")
        return keys, keys if self.values_in_keys else values or keys

    @property
    def rotations(self) -> tuple[int, int]:
        """Values of a head in keys and in values that are rotated together (`localllm.kernels.cache_rounding`)."""
        if self.values_in_keys:
            size = rotation(self.types[0], gcd(self.key_dim, self.value_dim), MOST_ROTATED[0])
            return size, size
        keys, values = map(rotation, self.types, (self.key_dim, self.value_dim), MOST_ROTATED)
        return keys, values

    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values, without padding."""
        dims = (self.key_dim,) if self.values_in_keys else (self.key_dim, self.value_dim)
        floats = {"f32": 4, "f16": 2}
        n_bytes = self.n_heads * sum(
            dim * floats[type] if type in floats else -(-dim * CODE_BITS[type] // 8) + 2 * -(-dim // VALUES_PER_SCALE)
            for dim, type in zip(dims, self.types, strict=False)
        )
        return -(-n_bytes // self.every)


@dataclass(frozen=True)
class RecurrentState:
    """The state that an operation keeps of each sequence: float32 values that every token changes.

    A sequence that begins, at position 0, begins with zeros.
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    is_on_host: bool = False  # whether the host reads and changes it, wherever the layer is computed

    @property
    def n_values(self) -> int:
        return prod(self.shape)


# -- Tensors -------------------------------------------------------------------------------------------------------


class Rows(Enum):
    """The unit that a tensor has a row for."""

    TOKENS = "each token"  # T
    OUTPUTS = "each output"  # N
    CHOSEN = "each expert of a token"  # T * k, in an order of the backend's own


@dataclass(frozen=True, eq=False)
class Tensor:
    """A float32 matrix [rows, width] that an operation computes."""

    rows: Rows
    width: int


@dataclass(frozen=True, eq=False)
class Routing:
    """The k of n experts that each token goes to, and their weights: what `Route` computes."""

    n_experts: int
    k: int


Value = Tensor | Routing
R = TypeVar("R", bound="Tensor | Routing | tuple[Tensor, ...]", covariant=True)


def _check_rows(rows: Rows, *tensors: Tensor | None) -> None:
    for x in tensors:
        if x is not None and x.rows is not rows:
            raise KernelError(f"a tensor has a row for {x.rows.value} where one for {rows.value} is needed")


def _check_dimensions(weight: Weight, n: int) -> None:
    if len(weight.shape) != n:
        what = "a matrix" if n == 2 else "matrices of experts or heads"
        raise KernelError(f"tensor {weight.name} is used as {what}, but has the shape {list(weight.shape)}")


def _check_shape(weight: Weight | None, *shape: int) -> None:
    if weight is not None and weight.shape != shape:
        raise KernelError(
            f"tensor {weight.name} has the shape {list(weight.shape)}, but {list(shape)} is needed where it is used"
        )


def _check_residual(residual: Tensor, rows: Rows, width: int) -> None:
    _check_rows(rows, residual)
    if residual.width != width:
        raise KernelError(f"{residual.width} values cannot be added to the {width} of a product")


def _check_softcap(cap: float | None) -> None:
    if cap is not None and not MIN_SOFTCAP <= cap <= MAX_SOFTCAP:
        raise KernelError(
            f"a soft-cap is {cap}, but must lie between {MIN_SOFTCAP:g} and {MAX_SOFTCAP:g}; without one, "
            "nothing is capped"
        )


# -- Operations ----------------------------------------------------------------------------------------------------


@dataclass_transform(eq_default=False, frozen_default=True)
@dataclass(frozen=True, eq=False)
class Operation(Generic[R]):
    """Something that a forward pass computes.  What it is given are its fields: subclasses are dataclasses, too."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, eq=False)(cls)

    # the names of the inputs whose memory it changes: no later operation may read them
    consumes: ClassVar[tuple[str, ...]] = ()
    # the name of the input whose place the result may take, if nothing reads that any more
    overwrites: ClassVar[str] = ""
    # float_rows, float_columns: the names of weights of two dimensions that kernels read as float32, row after row or
    # column after column
    float_rows: ClassVar[tuple[str, ...]] = ()
    float_columns: ClassVar[tuple[str, ...]] = ()

    def computed_by(self, backend: object) -> Iterator[tuple[Value, Any]]:
        """Each result, and what a backend's `method` makes of it."""
        made = getattr(backend, self.method())(self)
        return zip(self.results, made if type(made) is tuple else (made,), strict=True)

    @classmethod
    @cache
    def method(cls) -> str:
        """The name of what computes it: of `ExpertOutput`, ``expert_output``."""
        return re.sub("(?<!^)(?=[A-Z][a-z])", "_", cls.__name__).lower()

    @cached_property
    def result(self) -> R:
        """The tensor or tensors that it computes."""
        raise NotImplementedError

    @property
    def results(self) -> tuple[Value, ...]:
        return self.result if isinstance(self.result, tuple) else (self.result,)

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """The tensors that it reads."""
        return tuple(value for value in self._values() if isinstance(value, Tensor | Routing))

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """The weights that it reads."""
        return tuple(value for value in self._values() if hasattr(value, "drop_pages"))

    @cached_property
    def states(self) -> tuple[RecurrentState, ...]:
        """The states of each sequence that it reads and changes."""
        return tuple(value for value in self._values() if isinstance(value, RecurrentState))

    def named(self, names: tuple[str, ...]) -> set[Weight]:
        """The weights of these names."""
        values = (getattr(self, name) for name in names)
        return {w for value in values for w in (value if isinstance(value, tuple) else (value,)) if w is not None}

    def _values(self) -> Iterator[Any]:
        for each in fields(self):
            value = getattr(self, each.name)
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
        """Makes sure that its other arguments fit to x."""


class Input(Operation[Tensor]):
    """Rows that a step is given: what another device computed, with which a part of a graph begins.

    Several tensors may come side by side: each is the columns from ``first`` on of ``total``.
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
    """The rows of a table [n_vocab, d] for the batch's ids, times a scale: [T, d].

    With ``columns``, only those of the table: layers may each have theirs, as in Gemma 3n.  With ``by_position``, the
    rows are those of the tokens' positions, of which the table has all.  With ``takes_rows``, those of a batch's
    ``embedded`` tokens are its ``embeddings``, as they are.
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
    """Rows of a table [., d] that the n-grams ending with each token are hashed to, side by side: [T, heads * d].

    Of the n ``multipliers``, the first two are for n-grams of two tokens, and so on.  Ids, of the token itself first,
    are multiplied with theirs in 64 bits, and joined by XOR; modulo the ``sizes`` of those n-grams' heads, of which
    there are as many for each n, and with their ``offsets`` added, those are the rows' numbers.  What is before the
    sequence counts as the token ``end``, and so does what is before such a token.  ``state`` [n - 1] keeps the last
    ids.

    The table is larger than memory: rows are read from its file, by the host.  Source: Qwen 3.8 Flash Next.
    """

    table: Weight
    state: RecurrentState
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    end: int

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """None: the table stays in its file."""
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
        """The rows' numbers [T, heads] of tokens that come behind others, of which the last n - 1 count."""
        n = len(self.multipliers)
        known = np.concatenate([np.full(n - 1, self.end), before, ids]).astype(np.int64)
        is_end = known == self.end
        places = np.arange(len(known) - len(ids), len(known))
        mixed, cut = known[places].astype(np.uint64) * np.uint64(self.multipliers[0]), np.zeros(len(ids), bool)
        numbers, per_n = [], len(self.sizes) // (n - 1)
        for i in range(1, n):
            cut |= is_end[places - i]
            own = np.where(cut, self.end, known[places - i]).astype(np.uint64)
            mixed = mixed ^ (own * np.uint64(self.multipliers[i]))
            heads = slice((i - 1) * per_n, i * per_n)
            sizes, offsets = (np.array(x[heads], np.uint64) for x in (self.sizes, self.offsets))
            numbers.append(mixed[:, None] % sizes + offsets)
        return np.concatenate(numbers, axis=1).astype(np.int64)


class AdapterWeights(Operation[Tensor]):
    """How much of each adapter a token gets, [T, sum of widths]: what is between an adapter's two matrices is
    multiplied with it.  ``parts`` are adapters' numbers in the batch, and how many values each has there.

    Source: LoRA, arXiv:2106.09685.
    """

    parts: tuple[tuple[int, int], ...]

    @cached_property
    def result(self) -> Tensor:
        return Tensor(Rows.TOKENS, sum(width for _, width in self.parts))

    def rows(self, weights: NDArray[np.float32], n_tokens: int) -> NDArray[np.float32]:
        """The result, of a batch's weights [T, adapters]; of [0, 0] zeros."""
        numbers, widths = zip(*self.parts, strict=True)
        if not weights.size:
            return np.zeros((n_tokens, sum(widths)), np.float32)
        if len(weights) != n_tokens or weights.shape[1] <= max(numbers):
            raise KernelError(f"a batch of {n_tokens} tokens has weights {list(weights.shape)} of adapters")
        return np.repeat(weights[:, list(numbers)], widths, axis=1)


def _check_groups(width: int, n_groups: int) -> None:
    if n_groups < 1 or width % n_groups or (n_groups > 1 and width // n_groups % 16):
        raise KernelError(f"{width} values are not {n_groups} groups of a multiple of 16 values")


class RMSNorm(SameShape):
    """x / sqrt(mean(x²) + eps) * weight over the last axis, or over each of ``n_groups`` parts of it.

    The weight has a value for each of x, or for each of a group, the same for all of them; without one, nothing is
    multiplied.  Several groups are of a multiple of 16 values.  Source: arXiv:1910.07467.
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

    Weight and bias have a value for each value of x.  If there are several groups, their width is a multiple of 16.
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
    """residual + scale * x, or with ``gate`` [rows, 1], residual + scale * σ(gate) * x.

    The gate is that of a shared expert (Qwen2-MoE).  Where a product is added as it is, `Linear` does it at once.
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
    """x [T, d] plus, for a batch's ``embedded`` tokens, number ``index`` of their further ``embeddings``, from 1 on.

    Source: DeepStack, arXiv:2406.04334, as Qwen3-VL has it.
    """

    index: int
    consumes = ("x",)

    def check(self) -> None:
        _check_rows(Rows.TOKENS, self.x)
        if self.index < 1:
            raise KernelError(f"further embeddings are counted from 1, and there is none of number {self.index}")


class Columns(Operation[Tensor]):
    """Some columns of x; their number and where they begin are multiples of 16."""

    x: Tensor
    columns: range

    @cached_property
    def result(self) -> Tensor:
        first, stop = self.columns.start, self.columns.stop
        if not 0 <= first < stop <= self.x.width or first % 16 or stop % 16:
            raise KernelError(f"columns {first} to {stop} cannot be taken of {self.x.width}: they are 16 at a time")
        return Tensor(self.x.rows, stop - first)


class SideBySide(Operation[Tensor]):
    """Rows of several tensors as one; each has a multiple of 16 columns."""

    parts: tuple[Tensor, ...]

    @cached_property
    def result(self) -> Tensor:
        _check_rows(self.parts[0].rows, *self.parts)
        if any(x.width % 16 for x in self.parts):
            raise KernelError(f"rows of {[x.width for x in self.parts]} columns are not all of a multiple of 16")
        return Tensor(self.parts[0].rows, sum(x.width for x in self.parts))


class MixStreams(Operation[Tensor]):
    """Several streams side by side, each a sum of those of x [rows, n * d]: stream j is
    sum over i of (weights[:, j * n + i] + offset) * x_i, plus that of the residual.

    d is a multiple of 16.  Without weights, they are the offset alone, of as many streams as the residual has, or of
    one; streams before number ``first`` are the residual's.
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
        """Values of a stream."""
        return self.x.width // self.n

    @cached_property
    def result(self) -> Tensor:
        if self.n < 1 or self.x.width % (16 * self.n):
            raise KernelError(f"{self.x.width} values are not {self.n} streams of a multiple of 16")
        _check_rows(self.x.rows, self.mixing, self.residual)
        added = 0 if self.residual is None else self.residual.width // self.size
        made = (added or 1) if self.mixing is None else self.mixing.width // self.n
        if (
            (self.mixing is not None and self.mixing.width != made * self.n)
            or not 0 <= self.first <= added
            or not made
        ):
            raise KernelError(
                f"weights of {made} streams do not fit {self.n} of which they are made, and {added} more"
            )
        if self.residual is not None:
            _check_residual(self.residual, self.x.rows, made * self.size)
        return Tensor(self.x.rows, made * self.size)


class HyperWeights(Operation[tuple[Tensor, ...]]):
    """Of x [rows, n], [rows, 2 n] or [rows, 2 n + n²], the weights of hyper-connections over n streams.

    With x times ``scale`` plus ``base``, of which each part has its own scale: ``before`` [rows, n], σ(first part)
    + eps, by which streams are summed up; ``behind`` [rows, n], magnitude σ(second) + more, by which the result goes
    to each; and ``between`` [rows, n²], by which they are mixed: softmax(third) + eps over its rows, a stream's parts
    for each stream, whose columns are divided by their sum + eps; and then ``n_rounds`` - 1 times rows and columns.
    That is given by streams that are made: as `MixStreams` takes it.

    Sources: mHC, arXiv:2512.24880; without the third, as Hunyuan 4 has them.
    """

    x: Tensor
    scale: Weight
    base: Weight
    n: int
    eps: float
    magnitude: float = 2.0
    more: float = 0.0
    n_rounds: int = 1

    @cached_property
    def result(self) -> tuple[Tensor, ...]:
        n, n_parts = self.n, self.scale.shape[0]
        widths = [n, n, n * n][:n_parts]
        if not 1 <= n <= 16 or not 1 <= n_parts <= 3 or self.x.width != sum(widths) or self.n_rounds < 1:
            raise KernelError(f"{self.x.width} values are not {n_parts} kinds of weights of {n} streams")
        _check_shape(self.base, self.x.width)
        return tuple(Tensor(self.x.rows, width) for width in widths)


class StreamGate(Operation[Tensor]):
    """How much each of n streams gets, of keys and queries [rows, n * d]: [rows, n].

    It is σ(sign(s) √max(|s|, 1e-6)), where s is the stream's key · query / √d; d is a multiple of 16.
    Source: Qwen 3.8 Flash Next.
    """

    key: Tensor
    query: Tensor
    n: int

    @property
    def size(self) -> int:
        """Values of a stream."""
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
    """factor * x, or factor * weight * x with a weight of one value."""

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
    """Several matrices over one input, such as query, key and value, or gate and up."""

    x: Tensor
    matrices: tuple[Matrix, ...]

    @cached_property
    def result(self) -> tuple[Tensor, ...]:
        for matrix in self.matrices:
            _check_shape(matrix.weight, matrix.n_out, self.x.width)
        return tuple(Tensor(self.x.rows, matrix.n_out) for matrix in self.matrices)


class HeadLinear(Operation[Tensor]):
    """Each head of x [rows, H * dim] times a matrix of its own: with weight [H, n_out, n_in], [rows, H * n].

    It is the first n_in values of a head that are multiplied; the others follow the n_out that they become, as they
    are: n = n_out + dim - n_in.  All three are multiples of 32.

    Where attention is over latents (MLA), it brings queries into their space, but for the part that is rotated, and
    the result out of it again.  Source: DeepSeek-V2, arXiv:2405.04434 ("absorb").
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
    """Norms the heads of q, k and v, rotates those of q and k, and appends k and v to the layer's cache.

    Takes q [T, H * key_dim], k [T, G * key_dim] and v [T, G * value_dim], and gives the rotated q.  Norms come before
    the rotation, or with ``norm_last`` behind it; one of a whole row is an `RMSNorm` before this.  k and v may be the
    same tensor, which is then normed as either.

    Without v, values are in the keys.  Without k too, the cache is another layer's, which has appended to it already.
    A cache of entries of runs (`KVCache.every`) takes the keys of tokens that end a run.  Where q is k, it is only
    appended.
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
        """Of queries, keys and values."""
        return self.q_norm, self.k_norm, self.v_norm

    @cached_property
    def result(self) -> Tensor:
        cache, key_dim = self.cache, self.cache.key_dim
        _check_rows(Rows.TOKENS, self.q, self.k, self.v)
        _check_queries(self.q, cache)
        if (self.v is None) != (self.k is None or cache.values_in_keys):
            raise KernelError(
                "keys are appended with values, unless those are in the keys; and no values without keys"
            )
        for what, x, dim in (("keys", self.k, key_dim), ("values", self.v, cache.value_dim)):
            if x is not None and x.width != cache.n_heads * dim:
                raise KernelError(f"{x.width} values of {what} do not fit a cache of {cache.n_heads} heads of {dim}")
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
    """Queries must be whole heads, as many to each key/value head."""
    if q.width == 0 or q.width % (cache.n_heads * cache.key_dim):
        raise KernelError(
            f"{q.width} values of queries are not a multiple of {cache.n_heads} heads of {cache.key_dim}"
        )


class Attention(Operation[Tensor]):
    """Attention of q [T, H * key_dim] over a layer's cache: [T, H * value_dim].

    A token at position p sees the positions of its sequence up to p: all of them, or the last ``window``, that is
    max(0, p - window + 1) … p, or those of its ``chunk``, p - p % chunk … p.  Where it is not ``causal``, it sees as
    many behind it, as far as they are in the cache: a text then has to come in one batch.  With ``has_spans``, it
    sees what is behind it before the end that the batch has for it, too, as the tokens of a picture see each other;
    where it is not causal, it sees that span alone, from the begin that the batch has for it.
    With ``selected`` [T, k], which `IndexSelect` makes, it sees those positions alone; with [T, G * k], those of each
    key/value head.
    With ``entries``, a second cache, it sees beside its window what that has of the runs that end at its position or
    before, or those of them that are selected: all in one softmax.

    With ``softcap``, scores s (scaled) become softcap * tanh(s / softcap).  With ``sinks`` [H], the softmax of each
    query head has one more score, that one, which takes its share and adds no value.  With ``slopes`` [H], each
    score falls by its head's slope for every position between the two (ALiBi).  With ``biases`` [H * (2 n + 1)], it
    has its head's for the distance added, for -n … n positions behind the token; those farther off have the last one.

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
        """Positions that the queries of a key/value head see, at most, where they are selected; else 0."""
        n_choices = self.cache.n_heads if self.selected_by_head else 1
        return 0 if self.selected is None else self.selected.width // n_choices

    @property
    def bias_width(self) -> int:
        """Distances that each head has a bias for; 0 without any."""
        return 0 if self.biases is None else self.biases.shape[0] // self.n_heads

    @property
    def n_heads(self) -> int:
        """Of queries."""
        return self.q.width // self.cache.key_dim

    @property
    def group_size(self) -> int:
        """Query heads that share a key/value head."""
        return self.n_heads // self.cache.n_heads

    @cached_property
    def result(self) -> Tensor:
        _check_rows(Rows.TOKENS, self.q)
        _check_queries(self.q, self.cache)
        kept, reach = self.cache.window, self.window or self.chunk
        if kept is not None and (reach is None or reach > kept):
            raise KernelError(f"attention must look no further back than a cache of {kept} tokens keeps")
        _check_softcap(self.softcap)
        if self.chunk is not None and (self.window is not None or not self.causal):
            raise KernelError("attention in chunks is causal, and has no window beside them")
        if self.has_spans and (self.chunk is not None or not (self.causal or self.window is None)):
            raise KernelError("attention that sees spans has no chunks, and no window where it sees nothing else")
        if self.selected is not None:
            _check_rows(Rows.TOKENS, self.selected)
            has_reach = reach is not None and self.entries is None
            if has_reach or self.softcap or self.has_spans or not self.causal:
                raise KernelError("positions cannot be selected where there is a window, spans or a soft-cap")
            if self.selected_by_head and self.selected.width % self.cache.n_heads:
                raise KernelError(f"{self.selected.width} positions do not fit {self.cache.n_heads} heads of keys")
        if self.entries is not None:
            first, second = (replace(c, layer=0, part=0, window=None, every=1) for c in (self.cache, self.entries))
            if first != second or self.entries.every == 1 or self.cache.every > 1 or not first.values_in_keys:
                raise KernelError("entries of runs are keys like those of the window, which have their values")
            if self.window is None or not self.causal or self.softcap or self.has_spans or first.n_heads > 1:
                raise KernelError("entries of runs are seen beside a window, of one key, without spans or soft-cap")
            if self.slopes is not None or self.biases is not None:
                raise KernelError("entries of runs have no distance")
        _check_shape(self.sinks, self.n_heads)
        _check_shape(self.slopes, self.n_heads)
        if self.biases is not None:
            _check_shape(self.biases, self.n_heads * (self.bias_width // 2 * 2 + 1))
        by_distance = (self.slopes is not None) + (self.biases is not None)
        if by_distance and (by_distance > 1 or self.softcap or self.has_spans or self.selected is not None):
            raise KernelError("scores that depend on the distance have one rule, and no soft-cap, spans or selection")
        return Tensor(Rows.TOKENS, self.n_heads * self.cache.value_dim)


class IndexSelect(Operation[Tensor]):
    """The k positions that a token attends to, in order: numbers [T, k], and -1 behind them where it sees fewer.
    Of a cache of entries of runs (`KVCache.every`) they are the numbers of entries, counted from 0.

    They are those of the largest scores, of equals the first: the sum over heads of weight * max(0, q · key), for
    queries [T, H * dim], ``head_weights`` [T, H] (without, all are 1) and the keys of an indexer, which `RopeAppend`
    puts into its cache.

    With a ``run`` of n positions, it is whole runs that are chosen, k / n of those that a token sees to their end, by
    the key of each one's last position, and all positions behind them: up to n - 1 more.

    With ``pool`` [n, dim], that key is, of each channel, the sum of the run's keys times the softmax of their gates
    plus the pool's.  The cache has of a token [key | gate | key of the run that it ends], of which `RopeAppend` is
    given something for the last, and has no codes.

    With ``n_last``, each head chooses for itself, [T, H * k]: the runs with the largest q · key of any position, of
    which the token's own counts as far as it goes; that one and those before it, so many in all, are always chosen.

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
        """Values of a key."""
        return self.cache.key_dim // (1 if self.pool is None else 3)

    @property
    def n_heads(self) -> int:
        return self.q.width // self.dim

    @property
    def n_choices(self) -> int:
        """Heads that choose for themselves; 1 where all choose together."""
        return self.n_heads if self.n_last else 1

    @cached_property
    def result(self) -> Tensor:
        cache, run = self.cache, self.run
        _check_rows(Rows.TOKENS, self.q, self.head_weights)
        if cache.n_heads != 1 or not cache.values_in_keys or cache.window is not None or self.k < 1:
            raise KernelError("an indexer keeps one key of every token, and chooses at least one position")
        if cache.every > 1 and (64 % cache.every or run > 1 or self.n_last or cache.key_dim % 16):
            raise KernelError(
                f"an indexer that keeps one of {cache.every} tokens has keys of a multiple of 16 values, and no runs "
                "beside those, of a divisor of 64"
            )
        if run < 1 or MOST_RUN % run or self.k % run:
            raise KernelError(
                f"runs of {run} positions are a divisor of {MOST_RUN}, and of the {self.k} that are chosen"
            )
        if self.pool is not None:
            _check_shape(self.pool, run, self.dim)
            if cache.key_dim != 3 * self.dim:
                raise KernelError(f"a cache of {cache.key_dim} values has no gates and keys of runs of {self.dim}")
        if run > 1 and not self.n_last and (self.dim % 16 or 64 % run or cache.types[0] in CODE_BITS):
            raise KernelError(f"keys of {run} positions are floats, 16 at a time, and of at most 64")
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
    """Of each run of n tokens one row, with its last: [T, dim], zeros with the others.

    ``cache`` has of each token values of dim channels, and as many gates, [values | gates], or twice as many of
    either, [values | more values | gates | more gates].  A row is the sum of the values of its run, each channel
    weighed by the softmax of the gates plus the run's ``biases`` [n, dim].  Where there are twice as many, with
    ``biases`` [n, 2 dim], the sum is of 2 n: the values of the run before, if there is one, and the further values of
    its own.  x is what `RopeAppend` has given that appended the tokens to the cache.

    Source: DeepSeek V4.
    """

    x: Tensor
    cache: KVCache
    biases: Weight
    float_rows = ("biases",)

    @property
    def run(self) -> int:
        """Tokens of a run."""
        return self.biases.shape[0]

    @property
    def n_series(self) -> int:
        """Values of a token that go to different runs."""
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
                f"runs of {self.run} tokens are not of a power of two, or longer than a cache of {cache.window} keeps"
            )
        return Tensor(Rows.TOKENS, cache.key_dim)


#: The longest kernel of `CausalConv`.
MAX_CONV = 16


class CausalConv(Operation[Tensor]):
    """A convolution of each column of x [T, n] along its sequence: with a token, the kernel's last value.

    y[t] = activation(sum over j of weight[:, j] * x[t - kernel + 1 + j] + bias), with weight [n, kernel], where
    inputs before the sequence are zero.  ``state`` [kernel - 1, n] keeps the last inputs.  Source: Mamba,
    arXiv:2312.00752.
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
            raise KernelError(f"a convolution has kernels of 2 to {MAX_CONV} values, not of {kernel}")
        _check_shape(self.weight, n, kernel)
        _check_shape(self.bias, n)
        if self.state.shape != (kernel - 1, n):
            raise KernelError(f"a convolution keeps a state {[kernel - 1, n]}, not {list(self.state.shape)}")
        return Tensor(Rows.TOKENS, n)


class GatedDelta(Operation[Tensor]):
    """Linear attention whose state S [d_k, d_v] of each value head decays, and is corrected by the delta rule.

    Of each token, with q and k divided by their length, √(sum of squares + eps), and q by √d_k:

        S = exp(a · softplus(decay + dt_bias)) · S;  S += k ⊗ σ(beta) (v - Sᵀk);  result = Sᵀq

    With a ``bound``, which is negative, it decays by exp(bound · σ(a · (decay + dt_bias))), and no more than that.

    ``qkv`` is one tensor of [queries | keys | values] of n_key_heads, n_key_heads and H heads, or those three.
    ``decay`` has one value for each of the H value heads, as ``beta``, or with one for each of their d_k channels.
    ``a`` [H] is negative; with a bound, of either sign: its size counts.  Value head h has the keys and queries of
    key head h mod n_key_heads; where ``is_grouped``, of h ÷ (H / n_key_heads).  ``state`` is [H, d_k, d_v], both
    multiples of 16.  Gives [T, H * d_v].

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
    """Mamba 2's recurrence of a state S [N, P] of each head.

    Of each token, with Δ = softplus(dt + dt_bias):

        S = exp(a Δ) · S + B ⊗ Δ x;  result = Sᵀ C + D x

    ``xbc`` is one tensor of [x | B | C], of H, n_groups and n_groups heads, or those three; head h has B and C of
    group h ÷ (H / n_groups).  ``a`` [H] is negative.  ``state`` is [H, N, P], both multiples of 16.  Gives
    [T, H * P].  Source: arXiv:2405.21060.
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
            raise KernelError(f"{self.dt.width} time steps do not fit {n_heads} heads: each has one")
        for weight in (self.a, self.d):
            _check_column(weight, n_heads)
        _check_shape(self.dt_bias, n_heads)
        return Tensor(Rows.TOKENS, n_heads * p)


class ChannelScan(Operation[Tensor]):
    """Mamba's recurrence of N values of each of n channels, that each decay by themselves.

    Of each token, for x and dt [T, n], b and c [T, N], with Δ = softplus(dt + dt_bias):

        h_i = exp(a_i Δ) h_i + b_i Δ x;  result = sum over i of c_i h_i + d x

    ``a`` [n, N] is negative.  ``state`` is [N, n]; n is a multiple of 16, N at most 64.  Source: arXiv:2312.00752.
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
            raise KernelError(f"a scan of {n} channels of {n_state} values does not fit {list(self.state.shape)}")
        _check_shape(self.a, n, n_state)
        for weight in (self.dt_bias, self.d):
            _check_shape(weight, n)
        return Tensor(Rows.TOKENS, n)


def side_by_side(tensors: tuple[Tensor, ...], widths: tuple[int, ...]) -> list[tuple[Tensor, int]]:
    """Where parts of so many values lie: of each the tensor, and the column that it begins at."""
    if len(tensors) == len(widths):
        return [(x, 0) for x in tensors]
    return [(tensors[0], sum(widths[:i])) for i in range(len(widths))]


def _check_side_by_side(tensors: tuple[Tensor, ...], widths: tuple[int, ...]) -> None:
    given = tuple(x.width for x in tensors)
    if given not in (widths, (sum(widths),)):
        raise KernelError(
            f"tensors of {given} values were given where {widths} are needed, side by side or each alone"
        )


def _check_heads(state: RecurrentState, n_groups: int) -> tuple[int, int, int]:
    if len(state.shape) != 3 or state.shape[1] % 16 or state.shape[2] % 16 or min(state.shape) < 1:
        raise KernelError(
            f"a state {list(state.shape)} is not one of heads of matrices whose sides are multiples of 16"
        )
    n_heads, rows, columns = state.shape
    if n_groups < 1 or n_heads % n_groups:
        raise KernelError(f"{n_heads} heads cannot share the keys of {n_groups}")
    return n_heads, rows, columns


def _check_column(weight: Weight, n: int) -> None:
    """That it is [n] or [n, 1], as files have those of recurrences."""
    _check_shape(weight, *((n, 1) if len(weight.shape) == 2 else (n,)))


class Gated(Operation[Tensor]):
    """activation(gate) * up; ``activation`` is one of `ACTIVATIONS`.

    "gelu" is its tanh form, "relu2" relu(gate)²; and "clamped_swiglu" gpt-oss's
    g * σ(1.702 g) * (u + 1), where g is at most 7, and u within ±7.  Source: arXiv:2002.05202.
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

    Source: gated attention, arXiv:2505.06708, by head.
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
    """x, but no less than ``low`` and no more than ``high``; infinities for no bound."""

    low: float
    high: float
    overwrites = "x"

    def check(self) -> None:
        if not self.low < self.high:
            raise KernelError(f"values cannot be clamped to {self.low:g} … {self.high:g}")


class XIELU(SameShape):
    """p x² + β x where x > 0, else n (exp(min(x, ε)) - 1 - x) + β x.  Source: arXiv:2411.13010."""

    p: float
    n: float
    beta: float
    eps: float
    overwrites = "x"


def _check_choice(what: str, chosen: str, known: tuple[str, ...]) -> None:
    if chosen not in known:
        raise KernelError(f"there is no {what} {chosen!r}; choose one of {', '.join(known)}")


class Route(Operation[Routing]):
    """The k experts that each token goes to: those of its largest logits [T, E], of equals the lowest first.

    Their weights are their probabilities, times ``scale``: softmax or sigmoid of the logits, or √softplus; with
    ``norm_topk_prob`` divided by their sum, so that softmax is one over those k alone.  ``expert_scales`` [E] are
    further factors of the weights.  With ``chosen`` [T, k], those numbers are its experts, whatever the logits.

    With ``selection_bias`` [E], those of the largest sums of probability and bias are chosen.  With ``n_groups`` of
    E / n_groups neighbours, only the experts of ``n_top_groups`` of them can be: of the groups whose best
    ``n_group_best`` probabilities (with bias), one or two, have the largest sums.

    All layers of a graph have the same k.  Sources: arXiv:2401.04088 (Mixtral), arXiv:2405.04434 (DeepSeek V2: groups
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
    chosen: Tensor | None = None

    @property
    def is_by_logits(self) -> bool:
        """Whether it is by logits alone that experts are chosen, and weighed with softmax."""
        is_plain = self.selection_bias is None and self.chosen is None and self.n_groups == 1
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
                f"{self.k} of {self.logits.width} experts cannot be chosen: 1 to {self.logits.width} can"
            )
        if self.chosen is not None:
            _check_rows(Rows.TOKENS, self.chosen)
            if self.chosen.width != self.k or self.selection_bias is not None or self.n_groups > 1:
                raise KernelError(
                    f"{self.chosen.width} experts of a token are given, where {self.k} are to be chosen"
                )
        if not 1 <= self.n_group_best <= 2:
            raise KernelError(
                f"groups are chosen by their best or their two best experts, not by {self.n_group_best}"
            )
        if not 1 <= self.n_groups <= min(MAX_GROUPS, n // 2 or 1) or n % self.n_groups:
            raise KernelError(
                f"{n} experts cannot be {self.n_groups} groups of at least two, of at most {MAX_GROUPS}"
            )
        if not 1 <= self.n_top_groups <= self.n_groups or self.k > n // self.n_groups * self.n_top_groups:
            raise KernelError(f"{self.k} experts cannot be chosen of {self.n_top_groups} in {self.n_groups} groups")
        return Routing(self.logits.width, self.k)


class ExpertLinears(Operation[tuple[Tensor, ...]]):
    """Each token of x [T, d] times several weights [E, n_out, d], such as gate and up, of each expert it goes to.

    Gives a row for each token and expert, in an order of the backend's own, which `Gated` and `ExpertOutput` can be
    given.  ``biases``, one for each weight or none at all, are [E, n_out].  Where ``is_weighted``, a token's row is
    multiplied with its weight for the expert first, as in Llama 4.
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
                f"{len(self.biases)} biases do not fit {len(self.experts)} matrices: each has one, or none"
            )
        for i, weight in enumerate(self.experts):
            _check_experts(weight, self.x, self.routing, self.biases[i] if self.biases else None)
        return tuple(Tensor(Rows.CHOSEN, weight.shape[1]) for weight in self.experts)


class ExpertOutput(Operation[Tensor]):
    """Each row of h times the weight [E, d, n_in] of its expert; of each token the weighted sum, plus a residual.

    Gives [T, d].  A token's best expert is added up first.  ``bias`` is [E, d].  Where ``is_weighted`` is not set,
    rows are added up as they are.
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
    """cap * tanh(x / cap), of logits.  Source: Gemma 2, arXiv:2408.00118."""

    cap: float
    overwrites = "x"

    def check(self) -> None:
        _check_softcap(self.cap)


class Outputs(Operation[Tensor]):
    """The rows of x [T, d] whose logits are wanted: [N, d].

    With ``n_joined``, that row and those behind it, so many in all, side by side: [N, n_joined * d]; or with
    ``is_mean`` their mean, [N, d].  So encoders of pictures merge neighbouring patches.
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
    """An operation, and the layer that it belongs to."""

    operation: Operation[Any]
    layer: LayerTag


@dataclass(eq=False)
class Graph:
    """A recorded forward pass, or the part of one that a device computes."""

    cache_type: CacheType = "f16"  # what the layers' caches keep keys and values in
    # whether devices may round floats to 14 bits in products, as those of encoders, which have many rows at once
    rounds_floats: bool = False
    nodes: list[Node] = field(default_factory=list)  # the operations, in execution order
    caches: dict[int, KVCache] = field(default_factory=dict)  # what layers keep of every token, by `KVCache.key`
    # what each layer keeps of every sequence
    states: dict[int, tuple[RecurrentState, ...]] = field(default_factory=dict)
    # those of all caches of the whole graph.  Caches of one window form a **group**, numbered as here, with pages and
    # block tables of its own.  Group 0 keeps all tokens, whether or not a layer is in it.
    windows: list[int | None] = field(default_factory=lambda: [None])
    # the graph whose caches these are: a step of this one works on the memory of that one's
    caches_of: Graph | None = None
    layer: LayerTag = "embedding"  # where the operations that are added belong
    # values that can be read after a step (`localllm.kernels.backend.Step.value`)
    watched: set[Value] = field(default_factory=set)
    # tokens that the columns of the result are the logits of, where they are not those of the whole vocabulary
    token_ids: NDArray[np.int64] | None = None
    _known: set[Value] = field(default_factory=set)
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
        part: int = 0,
        every: int = 1,
    ) -> KVCache:
        """Declares that the layer keeps keys and values of so many heads; without ``value_dim``, both are as long.

        ``is_index``: those are the keys of an indexer, which are kept beside them.  ``is_exact``: never as codes.
        ``part``, ``every``: as in `KVCache`; a cache of runs has no codes.
        """
        value_dim = key_dim if value_dim is None else value_dim
        if not isinstance(self.layer, int):
            raise KernelError(f"a cache cannot be declared in {self.layer}: layers have them")
        if values_in_keys and value_dim > key_dim:
            raise KernelError(f"{value_dim} values cannot be the first ones of {key_dim}")
        if window is not None and window < 1:
            raise KernelError(f"a cache cannot have a window of {window} tokens: give at least 1")
        if every < 1 or every & (every - 1) or (every > 1 and (n_heads > 1 or window or not values_in_keys)):
            raise KernelError(
                f"a cache cannot have an entry for every {every} tokens: they must be a power of two, and the cache "
                "has one head, whose keys are the values, and no window"
            )
        kept = self.cache_type, values_in_keys, window, is_index, part, every
        cache = KVCache(self.layer, n_heads, key_dim, value_dim, *kept)
        if (is_exact or every > 1) and cache.types[0] in CODE_BITS:
            cache = replace(cache, type="f16")
        if cache.key in self.caches:
            raise KernelError(f"layer {self.layer} already has such a cache")
        self.caches[cache.key] = cache
        if window not in self.windows:
            self.windows.append(window)
        return cache

    def group(self, cache: KVCache) -> int:
        """The number of the group that a cache belongs to."""
        return self.windows.index(cache.window)

    def state(self, name: str, *shape: int, is_on_host: bool = False) -> RecurrentState:
        """Declares that the layer keeps so many values of each sequence, for one operation, or for the host."""
        if not isinstance(self.layer, int):
            raise KernelError(f"a state cannot be declared in {self.layer}: layers have them")
        state = RecurrentState(self.layer, name, shape, is_on_host)
        others = self.states.get(self.layer, ())
        if any(other.name == name for other in others):
            raise KernelError(f"layer {self.layer} already has a state called {name!r}")
        self.states[self.layer] = (*others, state)
        return state

    def add(self, operation: Operation[R]) -> R:
        """Records an operation, and gives what it computes.

        Raises KernelError if its arguments do not fit together, or a tensor is of another graph or was changed since.
        """
        for x in operation.inputs:
            if x not in self._known:
                raise KernelError("an operation was given something else than a tensor of its own graph")
            if x in self._consumed:
                raise KernelError("an operation was given a tensor that an earlier one has changed")
        if isinstance(operation, Route):
            for k in {r.k for r in self._known if isinstance(r, Routing)} - {operation.k}:
                raise KernelError(f"layers with {k} and with {operation.k} experts to a token cannot be mixed")
        for state in operation.states:
            if state not in self.states.get(state.layer, ()) or any(state in n.operation.states for n in self.nodes):
                raise KernelError(
                    f"the state {state.name!r} of layer {state.layer} is for one operation of its graph"
                )
        result = operation.result
        self._known.update(operation.results)
        self._consumed.update(getattr(operation, name) for name in operation.consumes)
        self.nodes.append(Node(operation, self.layer))
        return result

    @property
    def result(self) -> Tensor:
        """The last operation's output: logits, or the hidden states that the next device goes on with."""
        *_, result = self.nodes[-1].operation.results
        if not isinstance(result, Tensor):
            raise KernelError("a graph must end with a tensor")
        return result

    def last_uses(self) -> dict[Value, int]:
        """Of each tensor, the number of the last node that reads it; one more than the last for those that are read
        after a step: the result and what is watched."""
        uses: dict[Value, int] = {}
        for i, node in enumerate(self.nodes):
            uses |= dict.fromkeys((*node.operation.results, *node.operation.inputs), i)
        return uses | dict.fromkeys({self.result} | self.watched & set(uses), len(self.nodes))

    @property
    def is_causal(self) -> bool:
        """Whether no token sees one behind it; otherwise a text has to come in one batch."""
        return all(n.operation.causal for n in self.nodes if isinstance(n.operation, Attention))

    @property
    def n_joined(self) -> int:
        """Rows from an output's on that it may be made of."""
        return max((n.operation.n_joined for n in self.nodes if isinstance(n.operation, Outputs)), default=1)

    @property
    def has_spans(self) -> bool:
        """Whether some tokens see each other both ways (`Attention`): each span has to come in one batch."""
        return any(n.operation.has_spans for n in self.nodes if isinstance(n.operation, Attention))

    @property
    def has_begins(self) -> bool:
        """Whether some tokens see nothing but spans (`Attention`)."""
        nodes = (n.operation for n in self.nodes if isinstance(n.operation, Attention))
        return any(op.has_spans and not op.causal for op in nodes)

    @property
    def looks_ahead(self) -> bool:
        """Whether a token may see others behind it."""
        return self.has_spans or not self.is_causal

    @property
    def has_axes(self) -> bool:
        """Whether tokens turn by their place in a picture (`Rope.axes`)."""
        ropes = (n.operation.rope for n in self.nodes if isinstance(n.operation, RopeAppend))
        return any(rope is not None and rope.axes for rope in ropes)

    def n_chosen(self) -> int:
        """Experts that each token goes to; 0 without any."""
        return max((n.operation.k for n in self.nodes if isinstance(n.operation, Route)), default=0)

    def part(self, layers: range) -> Graph:
        """The operations of a range of layers; the first layers also embed, the last ones have norm and head.

        What later layers need of the embedding again (Gemma 4's E2B) they embed themselves.  Raises KernelError where
        anything but one tensor with a row for each token crosses into it, or a layer uses the keys and values of one
        outside.
        """
        if layers == range(self.n_layers):
            return self
        part = Graph(self.cache_type, self.rounds_floats)
        part.caches = {n: c for n, c in self.caches.items() if c.layer in layers}
        part.states = {n: s for n, s in self.states.items() if n in layers}
        part.windows, part.watched = self.windows, self.watched
        ends = {"embedding": layers.start == 0, "output": layers.stop == self.n_layers}
        part.nodes = [n for n in self.nodes if (n.layer in layers if isinstance(n.layer, int) else ends[n.layer])]
        for node in part.nodes:
            cache = getattr(node.operation, "cache", None)
            if cache is not None and cache.layer not in layers:
                raise KernelError(
                    f"the model cannot be cut between layers {cache.layer} and {node.layer}: the second uses the "
                    "keys and values of the first"
                )
        made = {x for node in part.nodes for x in node.operation.results}
        crossing = {x for node in part.nodes for x in node.operation.inputs} - made
        operations = [node.operation for node in self.nodes]
        embeds = [op for op in operations if isinstance(op, Embed) and op.result in crossing]
        if layers.start:
            crossing -= {embed.result for embed in embeds}
            inputs = [x for x in crossing if isinstance(x, Tensor) and x.rows is Rows.TOKENS]
            if len(inputs) != 1 or len(crossing) != 1:
                raise KernelError(f"the model cannot be cut at layer {layers.start}: more than one tensor crosses it")
            first: list[Operation[Any]] = [Input(inputs[0]), *embeds]
            part.nodes[:0] = [Node(operation, layers.start) for operation in first]
        return part

    @property
    def n_layers(self) -> int:
        return 1 + max((node.layer for node in self.nodes if isinstance(node.layer, int)), default=-1)
