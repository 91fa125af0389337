"""How many bytes a model takes, and whether they are there: a pure function from hyper-parameters to a plan.

Weights count as the kernels hold them.  An embedding table counts as the file has it, or not at all where it is the
output matrix as well.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from localllm.engine import MAX_TOKENS, max_outputs, n_cache_pages
from localllm.errors import NotEnoughMemoryError
from localllm.kernels.cpu.host import memory_advice
from localllm.kernels.ops import CacheShape, CacheType, Weight
from localllm.models.config import ModelConfig
from localllm.models.weights import LoadedWeight

#: Tokens of context where nobody asks for a number and the model was trained on as many.
DEFAULT_CONTEXT = 4096

#: The least that a context nobody asked for is reduced to where memory is short.
LEAST_CONTEXT = 512

#: Bytes beside the model's: compiled kernels, vocabulary, Python.
OVERHEAD_BYTES = 160 << 20

#: The tensor of the embedding table.
EMBEDDING = "token_embd.weight"

_LAYER = re.compile(r"blk\.(\d+)\.")


class Format(NamedTuple):
    """How weights lie in the file, what kernels read them as, and the bytes that takes.

    Attributes:
        file_type: such as "IQ2_XS".
        kernel_type: the same, unless no kernel reads that: then the nearest that loses nothing measurable.
        n_bytes: in memory.
    """

    file_type: str
    kernel_type: str
    n_bytes: int

    def __str__(self) -> str:
        return (
            self.file_type if self.kernel_type == self.file_type else f"{self.file_type} read as {self.kernel_type}"
        )


def sum_formats(formats: Iterable[tuple[str, str, int]]) -> tuple[Format, ...]:
    """One entry for each pair of types, with the bytes of all of them; those of most bytes first."""
    n_bytes: Counter[tuple[str, str]] = Counter()
    for file_type, kernel_type, n in formats:
        n_bytes[file_type, kernel_type] += n
    return tuple(Format(*types, n) for types, n in n_bytes.most_common())


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A part of the model that lies on one device.

    Attributes:
        name: "embedding", "layers 0-21", "output", or "embedding and output" where these are one matrix.
        device: "cpu", …
        weights: bytes of packed weights.
        kv_cache: bytes of keys and values.
        formats: of the weights, those of most bytes first; known once they are loaded.
    """

    name: str
    device: str
    weights: int
    kv_cache: int = 0
    formats: tuple[Format, ...] = ()

    def holds(self, tensor_name: str) -> bool:
        if _LAYER.match(tensor_name):
            return self.name.startswith("layers")
        return ("embedding" if tensor_name == EMBEDDING else "output") in self.name

    def loaded(self, weights: Sequence[LoadedWeight]) -> LayerGroup:
        """The same with the formats and bytes of those of ``weights`` that it holds."""
        formats = sum_formats((w.file_type, w.kernel_type, w.n_bytes) for w in weights if self.holds(w.name))
        return replace(self, weights=sum(format.n_bytes for format in formats), formats=formats)


@dataclass(frozen=True, slots=True)
class Placement:
    """What lies where.

    Attributes:
        groups: in the order of the data's way.
        scratch: bytes of activations and logits of one step.
        context: tokens that a sequence can hold.
        parallel: how many sequences of that length the cache has room for.
        cache_type: what keys and values are kept in.
        overhead: bytes that the program itself takes, beside any model.
    """

    groups: tuple[LayerGroup, ...]
    scratch: int
    context: int
    parallel: int
    cache_type: CacheType = "f16"
    overhead: int = OVERHEAD_BYTES

    @property
    def weights(self) -> int:
        return sum(group.weights for group in self.groups)

    @property
    def kv_cache(self) -> int:
        return sum(group.kv_cache for group in self.groups)

    @property
    def total(self) -> int:
        """Bytes of memory in all."""
        return self.weights + self.kv_cache + self.scratch + self.overhead

    @property
    def multiplied(self) -> int:
        """Bytes of the weights that every token is multiplied with: all but a table that only its row is taken of."""
        return sum(group.weights for group in self.groups if group.name != "embedding")

    def loaded(self, weights: Sequence[LoadedWeight]) -> Placement:
        """The same with the formats and bytes of the weights as they were loaded."""
        return replace(self, groups=tuple(group.loaded(weights) for group in self.groups))


@dataclass(frozen=True)
class Demand:
    """What a model asks of memory, for any context.

    Attributes:
        name: of the model, for messages.
        config: its hyper-parameters.
        weights: the groups of layers with their weights, and no cache yet.
        cache_bytes: bytes of the cache for so many tokens of context.
        page_size: tokens in a page of the cache.
        parallel: how many sequences of full length the cache shall have room for.
        cache_type: what keys and values are kept in.
    """

    name: str
    config: ModelConfig
    weights: tuple[LayerGroup, ...]
    cache_bytes: Callable[[int], int]
    page_size: int
    parallel: int
    cache_type: CacheType

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        tensors: Mapping[str, Weight],
        packed_bytes: Callable[[Weight], int],
        cache_bytes: Callable[[CacheShape, int], int],
        *,
        device: str,
        page_size: int,
        parallel: int = 1,
        cache_type: CacheType = "f16",
        name: str = "the model",
    ) -> Demand:
        """What a file's model asks of a backend.

        Args:
            config: the model's hyper-parameters.
            tensors: the file's tensors.
            packed_bytes: bytes of a tensor as the backend will hold it (`Ops.packed_bytes`).
            cache_bytes: bytes of a cache of so many pages as the backend will make it (`Ops.cache_bytes`).
            device: where all of it goes.
            page_size, parallel, cache_type, name: see the class.
        """
        shape = CacheShape(config.n_layers, config.n_kv_heads, config.head_dim, cache_type)

        def of_context(n_tokens: int) -> int:
            return cache_bytes(shape, n_cache_pages(n_tokens, parallel, page_size))

        weights = _weights(config, tensors, packed_bytes, device)
        return cls(name, config, weights, of_context, page_size, parallel, cache_type)

    def at(self, context: int) -> Placement:
        """What lies where with so many tokens of context."""
        kv_bytes = self.cache_bytes(context)
        groups = tuple(replace(g, kv_cache=kv_bytes) if g.name.startswith("layers") else g for g in self.weights)
        return Placement(groups, scratch_bytes(self.config, context), context, self.parallel, self.cache_type)

    def as_draft(self, context: int) -> Placement:
        """The same of a draft model, beside a model of so much context: no more than it was trained on helps it."""
        return replace(self.at(min(context, self.config.context_length)), overhead=0)


def plan(demand: Demand, available: int, context: int | None = None) -> Placement:
    """The placement of a model.

    Args:
        available: bytes of memory that can be had.
        context: tokens of context.  By default as many as the model was trained on, at most `DEFAULT_CONTEXT`,
            and fewer, down to `LEAST_CONTEXT`, where memory is short.

    Raises:
        NotEnoughMemoryError: it does not fit; gives the numbers and the largest context that does.
    """
    wanted = context if context is not None else min(demand.config.context_length, DEFAULT_CONTEXT)
    placement = demand.at(wanted)
    if placement.total <= available:
        return placement
    fitting = _largest_context(lambda n: demand.at(n).total <= available, wanted, demand.page_size)
    if context is None and fitting >= LEAST_CONTEXT:
        return demand.at(fitting)
    raise NotEnoughMemoryError(_too_large(demand.name, placement, available, fitting))


def plan_with_draft(
    demand: Demand, draft: Demand, available: int, context: int | None = None
) -> tuple[Placement, Placement]:
    """The placements of a model and of one that drafts for it, with the same context if it was trained on as much.

    Args:
        available, context: as of `plan`; a default context is reduced until both fit.

    Raises:
        NotEnoughMemoryError: one of them does not fit, or not beside the other; says which.
    """

    def total(n_tokens: int) -> int:
        return demand.at(n_tokens).total + draft.as_draft(n_tokens).total

    alone = plan(demand, available, context)
    wanted = alone.context
    if total(wanted) <= available:
        return alone, draft.as_draft(wanted)
    fitting = _largest_context(lambda n: total(n) <= available, wanted, demand.page_size)
    if context is None and fitting >= LEAST_CONTEXT:
        return demand.at(fitting), draft.as_draft(fitting)
    its_context = None if context is None else min(context, draft.config.context_length)
    plan(draft, available, its_context)  # raises if it does not even fit alone
    raise NotEnoughMemoryError(
        f"{demand.name} needs {_gigabytes(alone.total)} of memory and {draft.name} "
        f"{_gigabytes(draft.as_draft(wanted).total)}, but {_gigabytes(available)} is available, which is enough for "
        f"one of them: leave the draft model out, {_advice(fitting, both=True)}"
    )


def _weights(
    config: ModelConfig, tensors: Mapping[str, Weight], packed_bytes: Callable[[Weight], int], device: str
) -> tuple[LayerGroup, ...]:
    """The groups of layers with their weights, and no cache yet."""

    def n_bytes(tensor: Weight) -> int:
        # No model has tensors of other shapes; loading will say so.
        return packed_bytes(tensor) if len(tensor.shape) in (1, 2) else 0

    in_layers = sum(n_bytes(tensor) for name, tensor in tensors.items() if _LAYER.match(name))
    layers = LayerGroup(f"layers 0-{config.n_layers - 1}", device, weights=in_layers)
    rest = sum(n_bytes(tensor) for name, tensor in tensors.items() if not _LAYER.match(name))
    if "output.weight" not in tensors:
        return (layers, LayerGroup("embedding and output", device, weights=rest))
    embedding = tensors[EMBEDDING]
    return (
        LayerGroup("embedding", device, weights=embedding.data.nbytes),
        layers,
        LayerGroup("output", device, weights=rest - n_bytes(embedding)),
    )


def scratch_bytes(config: ModelConfig, context: int) -> int:
    """Bytes of one step's activations and logits: the widest operation's operands, in float32."""
    n_tokens = min(MAX_TOKENS, context)
    q_width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    width = 2 * config.n_embd + max(2 * (q_width + kv_width), 3 * config.n_ff)
    return 4 * (n_tokens * width + max_outputs(config.n_vocab, n_tokens) * config.n_vocab)


def _largest_context(fits: Callable[[int], bool], wanted: int, page_size: int) -> int:
    """The largest number of tokens in whole pages, below ``wanted``, that fits; 0 if none does."""
    low, high = 0, wanted // page_size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * page_size) else (low, middle - 1)
    return low * page_size


def _too_large(name: str, placement: Placement, available: int, fitting: int) -> str:
    return (
        f"{name} needs {_gigabytes(placement.total)} of memory ({_gigabytes(placement.weights)} of weights, "
        f"{_gigabytes(placement.kv_cache)} for {placement.parallel * placement.context:,} tokens of context, "
        f"{_gigabytes(placement.scratch + placement.overhead)} to work in), but {_gigabytes(available)} is "
        f"available: {_advice(fitting)}"
    )


def _advice(fitting: int, *, both: bool = False) -> str:
    """What to do where memory is short for a model, or for ``both``, and ``fitting`` tokens of context would fit."""
    smaller = f"{memory_advice()} or choose a smaller quantisation of the model"
    it = "both" if both else "it"
    return f"load {it} with context={fitting:,} or less, or {smaller}" if fitting >= LEAST_CONTEXT else smaller


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
