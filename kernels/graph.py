"""The `Graph` that records a model's forward pass, and the tensors, caches and states that its operations use.

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

**A new operation** takes four edits: its declaration in `localllm.kernels.operations`, and its computation in the
reference, on the CPU and on CUDA. A declaration checks its arguments for all backends, because kernels trust every
address and every number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cache, cached_property
from math import gcd, prod
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar, dataclass_transform

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

    @property
    def data(self) -> NDArray[np.uint8]:
        """Raw blocks, uint8 [rows, bytes per row], or [bytes] for a vector."""

    def drop_pages(self) -> None:
        """Release the data's pages in the file's mapping, because the data is not needed soon."""


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
        check_dimensions(self.weight, 2)
        check_shape(self.bias, self.n_out)

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
    """Factor on the queries at position p: max(1, base + rate * log(1 + floor(max(p + offset, 0) / length))).

    Sources: Llama 4's attention temperature (offset 1); Ministral 3's (offset 0); Grok 2's (base 0, offset -1).
    """

    rate: float
    length: int
    offset: int = 0
    base: float = 1.0


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


def check_rows(rows: Rows, *tensors: Tensor | None) -> None:
    for x in tensors:
        if x is not None and x.rows is not rows:
            raise KernelError(f"a tensor has a row for {x.rows.value}, but a row for {rows.value} is needed")


def check_dimensions(weight: Weight, n: int) -> None:
    if len(weight.shape) != n:
        usage = "a matrix" if n == 2 else "matrices of experts or heads"
        raise KernelError(f"tensor {weight.name} is used as {usage}, but has the shape {list(weight.shape)}")


def check_shape(weight: Weight | None, *shape: int) -> None:
    if weight is not None and weight.shape != shape:
        raise KernelError(f"tensor {weight.name} has the shape {list(weight.shape)}, but {list(shape)} is needed")


def check_residual(residual: Tensor, rows: Rows, width: int) -> None:
    check_rows(rows, residual)
    if residual.width != width:
        raise KernelError(f"{residual.width} values cannot be added to the {width} of a product")


def check_softcap(cap: float | None) -> None:
    if cap is not None and not MIN_SOFTCAP <= cap <= MAX_SOFTCAP:
        raise KernelError(
            f"a soft-cap is {cap}, but must be between {MIN_SOFTCAP:g} and {MAX_SOFTCAP:g}, or None for no cap"
        )


def check_choice(description: str, choice: str, choices: tuple[str, ...]) -> None:
    if choice not in choices:
        raise KernelError(f"there is no {description} {choice!r}; choose one of {', '.join(choices)}")


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

    # Properties of some operations, which a `Graph` reports for all of its operations.

    @property
    def causal(self) -> bool:
        """Whether no token sees later tokens, except in spans."""
        return True

    @property
    def has_spans(self) -> bool:
        """Whether tokens of a span see each other both ways."""
        return False

    @property
    def has_part(self) -> bool:
        """Whether tokens see only a part of their sequence, before or after a division."""
        return False

    @property
    def has_axes(self) -> bool:
        """Whether tokens are rotated by their position in an image (`Rope.axes`)."""
        return False

    @property
    def n_joined(self) -> int:
        """Rows of the input that a row of the result is computed from."""
        return 1

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

    def with_inputs(self, changes: Mapping[Value, Value]) -> Self:
        """Return the operation with the inputs in ``changes`` replaced; the same object without such inputs."""

        def replaced(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(replaced, value))
            return changes.get(value, value) if isinstance(value, Tensor | Routing) else value

        values = {argument.name: getattr(self, argument.name) for argument in fields(self)}
        arguments = {name: new for name, value in values.items() if (new := replaced(value)) != value}
        return replace(self, **arguments) if arguments else self

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


# -- Graphs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    operation: Operation[Any]
    layer: LayerTag


@dataclass(frozen=True)
class NamedValue:
    """A value that users can read and change by its name: ``value``, or ``value`` - ``base``.

    Blocks often add their output to the residual stream in one operation. The output alone is then the difference of
    the streams after and before the block.
    """

    value: Value
    base: Tensor | None = None

    def in_graph(self, renewed: Mapping[Value, Value]) -> NamedValue:
        """Return the named value of another graph, whose values ``renewed`` maps from the values of this graph."""
        base: Any = None if self.base is None else renewed.get(self.base, self.base)
        return NamedValue(renewed.get(self.value, self.value), base)


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
    # graph of a prompt that an encoder reads: it appends the prompt's keys and values, which `self` attends to
    prompt: Graph | None = None
    layer: LayerTag = "embedding"  # layer of the operations that are added next
    # values that can be read after a step (`localllm.kernels.backend.Step.value`)
    watched: set[Value] = field(default_factory=set)
    # values by name, such as "layers.3.attention", in execution order
    names: dict[str, NamedValue] = field(default_factory=dict)
    # separate program over the same weights, from token ids without a context (`ModelRunner.of_tokens`)
    token_graph: Graph | None = None
    # tokens of the result's columns, if they are not the whole vocabulary
    token_ids: NDArray[np.int64] | None = None
    _recorded: set[Value] = field(default_factory=set)
    _consumed: set[Value] = field(default_factory=set)

    def empty(self) -> Graph:
        """Return a graph without operations, with the caches and states of this graph."""
        new = Graph(self.cache_type, self.rounds_floats, [], self.caches, self.states, self.windows)
        new.caches_of, new.token_ids = self.caches_of, self.token_ids
        return new

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
        for state in operation.states:
            if state not in self.states.get(state.layer, ()) or any(state in n.operation.states for n in self.nodes):
                raise KernelError(
                    f"the state {state.name!r} of layer {state.layer} must be used by one operation of its graph"
                )
        result = operation.result
        if isinstance(result, Routing):
            for k in {r.k for r in self._recorded if isinstance(r, Routing)} - {result.k}:
                raise KernelError(f"layers with {k} and with {result.k} experts per token cannot be mixed")
        self._recorded.update(operation.results)
        self._consumed.update(getattr(operation, name) for name in operation.consumes)
        self.nodes.append(Node(operation, self.layer))
        return result

    def name(self, name: str, value: Value, base: Tensor | None = None) -> None:
        """Name a value of the current layer, or of the model before or after the layers.

        A layer's first value with a name keeps it.
        """
        prefix = f"layers.{self.layer}." if isinstance(self.layer, int) else ""
        self.names.setdefault(prefix + name, NamedValue(value, base))

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
        return all(node.operation.causal for node in self.nodes)

    @property
    def n_joined(self) -> int:
        """Number of consecutive rows, from its own on, that an output can be computed from."""
        return max((node.operation.n_joined for node in self.nodes), default=1)

    @property
    def has_spans(self) -> bool:
        """Return whether some tokens see each other both ways (`Attention`); each span must come in one batch."""
        return any(node.operation.has_spans for node in self.nodes)

    @property
    def has_begins(self) -> bool:
        """Return whether some tokens see only spans, or only a part of their sequence (`Attention`)."""
        return self.has_parts or any(op.has_spans and not op.causal for op in (node.operation for node in self.nodes))

    @property
    def has_parts(self) -> bool:
        """Return whether some tokens see only a part of their sequence (`Attention`)."""
        return any(node.operation.has_part for node in self.nodes)

    @property
    def looks_ahead(self) -> bool:
        """Return whether a token may see later tokens."""
        return self.has_spans or not self.is_causal

    @property
    def has_axes(self) -> bool:
        """Return whether tokens are rotated by their position in an image (`Rope.axes`)."""
        return any(node.operation.has_axes for node in self.nodes)

    def n_chosen(self) -> int:
        """Return the number of experts per token; 0 without experts."""
        return max((x.k for node in self.nodes for x in node.operation.results if isinstance(x, Routing)), default=0)

    @property
    def n_layers(self) -> int:
        return 1 + max((node.layer for node in self.nodes if isinstance(node.layer, int)), default=-1)
