"""How many bytes a model takes, and whether they are there: a pure function from hyper-parameters to a plan.

Weights count as the kernels hold them.  An embedding table counts as the file has it, or not at all where it is the
output matrix as well.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

from localllm.engine.runner import MAX_TOKENS, max_outputs, n_cache_pages
from localllm.errors import NotEnoughMemoryError
from localllm.kernels.cpu.host import memory_advice
from localllm.kernels.micro_batches import MICRO_BATCH
from localllm.kernels.ops import CacheShape, CacheType, Place, StepSizes, Weight
from localllm.layers import NO_GPU, Room, Share, plan_layers
from localllm.models.config import ModelConfig
from localllm.models.weights import LoadedWeight
from localllm.quant.types import GGMLType

#: Tokens of context where nobody asks for a number and the model was trained on as many.
DEFAULT_CONTEXT = 4096

#: The least that a context nobody asked for is reduced to where memory is short.
LEAST_CONTEXT = 512

#: Bytes beside the model's: compiled kernels, vocabulary, Python.
OVERHEAD_BYTES = 160 << 20

#: The tensor of the embedding table.
EMBEDDING = "token_embd.weight"

_ROUTER = ".ffn_gate_inp.weight"
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
        scratch: bytes that a step takes there, for activations or logits.
        kernels: which kernels run there, in words.
        places: what it has of the model.
    """

    name: str
    device: str
    weights: int
    kv_cache: int = 0
    formats: tuple[Format, ...] = ()
    scratch: int = 0
    kernels: str = ""
    places: tuple[Place, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers in it."""
        return tuple(place for place in self.places if isinstance(place, int))

    def loaded(self, weights: Sequence[LoadedWeight]) -> LayerGroup:
        """The same with the formats and bytes of those of ``weights`` that it holds."""
        formats = sum_formats((w.file_type, w.kernel_type, w.n_bytes) for w in weights if w.place in self.places)
        return replace(self, weights=sum(format.n_bytes for format in formats), formats=formats)


@dataclass(frozen=True, slots=True)
class Placement:
    """What lies where.

    Attributes:
        groups: in the order of the data's way.
        context: tokens that a sequence can hold.
        parallel: how many sequences of that length the cache has room for.
        cache_type: what keys and values are kept in.
        overhead: bytes that the program itself takes, beside any model.
        host: the device whose memory that is.
        left_over: layers that are there because no GPU had room for them, not because somebody asked for it.
        idle: bytes of the experts that a token does not go to.
    """

    groups: tuple[LayerGroup, ...]
    context: int
    parallel: int
    cache_type: CacheType = "f16"
    overhead: int = OVERHEAD_BYTES
    host: str = "cpu"
    left_over: int = 0
    idle: int = 0

    @property
    def weights(self) -> int:
        return sum(group.weights for group in self.groups)

    @property
    def kv_cache(self) -> int:
        return sum(group.kv_cache for group in self.groups)

    @property
    def scratch(self) -> int:
        """Bytes of activations and logits of one step."""
        return sum(group.scratch for group in self.groups)

    @property
    def total(self) -> int:
        """Bytes of memory in all."""
        return self.weights + self.kv_cache + self.scratch + self.overhead

    @property
    def multiplied(self) -> int:
        """Bytes of the weights that a token is multiplied with: all but the experts that it does not go to, and a
        table that only its row is taken of."""
        return sum(group.weights for group in self.groups if group.name != "embedding") - self.idle

    @property
    def devices(self) -> tuple[str, ...]:
        """Those that have a part of it, in the order of the data's way."""
        return tuple(dict.fromkeys(group.device for group in self.groups))

    def on(self, device: str) -> Placement:
        """What lies on one device."""
        groups = tuple(group for group in self.groups if group.device == device)
        n_layers = sum(len(group.layers) for group in self.groups)
        idle = self.idle * self.layers_on(device) // max(1, n_layers)
        return replace(self, groups=groups, overhead=self.overhead if device == self.host else 0, idle=idle)

    def layers_on(self, device: str) -> int:
        """How many layers a device has."""
        return sum(len(group.layers) for group in self.groups if group.device == device)

    def loaded(self, weights: Sequence[LoadedWeight]) -> Placement:
        """The same with the formats and bytes of the weights as they were loaded."""
        return replace(self, groups=tuple(group.loaded(weights) for group in self.groups))


@dataclass(frozen=True)
class Plan:
    """Where models go, before they are loaded.

    Attributes:
        placement: of the model.
        draft: of the one that drafts for it, if any.
        free: bytes that can be had on each device: of the host's memory, and of GPUs that have their own.
        said: what the plan leaves to be desired.
    """

    placement: Placement
    draft: Placement | None
    free: Mapping[str, int]
    said: tuple[str, ...]

    @property
    def has_gpus(self) -> bool:
        """Whether there are devices beside the host."""
        return any(device != self.placement.host for device in self.free)


@dataclass(frozen=True)
class DeviceSizes:
    """A device, and how many bytes things take there.

    Attributes:
        name: "cpu", "cuda:0", …
        packed_bytes: of a tensor as the backend will hold it (`Loader.packed_bytes`).
        cache_bytes: of a cache of so many pages as the backend will make it (`Ops.cache_bytes`).
        page_size: tokens in such a page.
        free: bytes that can be had on a device with memory of its own.
        kernels: which kernels run there, in words.
        step_bytes: of a step's activations and logits as the backend will make them (`Backend.step_bytes`).
        note: why it is not another device, where that was not chosen by name.
    """

    name: str
    packed_bytes: Callable[[Weight], int]
    cache_bytes: Callable[[CacheShape, int], int]
    page_size: int
    free: int = 0
    kernels: str = ""
    step_bytes: Callable[[StepSizes], tuple[int, int] | None] = lambda sizes: None
    note: str | None = None


@dataclass(frozen=True)
class Demand:
    """What a model asks of memory, for any context.

    Attributes:
        name: of the model, for messages.
        config: its hyper-parameters.
        devices: the host, and then GPUs; the model need not take all.
        rooms: of each, the bytes of weights, and of a cache for no tokens.
        page_size: tokens in a page of the cache.
        parallel: how many sequences of full length the cache shall have room for.
        cache_type: what keys and values are kept in.
        tied: whether the embedding is the output matrix.
        n_gpu_layers, tensor_split: see `localllm.layers.plan_layers`.
        idle: as of a `Placement`.
        types: of the model's matrices, but for routers.
    """

    name: str
    config: ModelConfig
    devices: tuple[DeviceSizes, ...]
    rooms: tuple[Room, ...]
    page_size: int
    parallel: int
    cache_type: CacheType
    tied: bool
    n_gpu_layers: int | None
    tensor_split: tuple[float, ...] | None
    idle: int = 0
    types: frozenset[GGMLType] = frozenset()

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        tensors: Mapping[str, Weight],
        devices: Sequence[DeviceSizes],
        *,
        parallel: int = 1,
        cache_type: CacheType = "f16",
        name: str = "the model",
        n_gpu_layers: int | None = None,
        tensor_split: tuple[float, ...] | None = None,
    ) -> Demand:
        """What a file's model asks of devices; see the class."""
        return cls(
            name=name,
            config=config,
            devices=tuple(devices),
            rooms=tuple(_room(config, tensors, device) for device in devices),
            page_size=lcm(*(device.page_size for device in devices)),
            parallel=parallel,
            cache_type=cache_type,
            tied="output.weight" not in tensors,
            n_gpu_layers=n_gpu_layers,
            tensor_split=tensor_split,
            idle=_idle_bytes(config, tensors, devices[0]),
            types=_multiplied_types(tensors),
        )

    @property
    def host(self) -> str:
        return self.devices[0].name

    def at(self, context: int) -> Placement:
        """What lies where with so many tokens of context.

        Raises:
            UsageError, NotEnoughMemoryError: as `localllm.layers.plan_layers`.
        """
        host, *gpus = (
            self._room_at(room, device, context) for room, device in zip(self.rooms, self.devices, strict=True)
        )
        shares = plan_layers(
            host,
            gpus,
            tied=self.tied,
            n_gpu_layers=self.n_gpu_layers,
            tensor_split=self.tensor_split,
            without_gpus=self.devices[0].note or NO_GPU,
        )
        kernels = {device.name: device.kernels for device in self.devices}
        groups = tuple(group for share in shares for group in _groups(share, kernels[share.room.name]))
        placement = Placement(groups, context, self.parallel, self.cache_type, host=self.host, idle=self.idle)
        as_wanted = not gpus or self.n_gpu_layers is not None
        return placement if as_wanted else replace(placement, left_over=placement.layers_on(self.host))

    def as_draft(self, context: int) -> Placement:
        """The same of a draft model, beside a model of so much context: no more than it was trained on helps it."""
        return replace(self.at(min(context, self.config.context_length)), overhead=0)

    def beside(self, other: Placement) -> Demand:
        """The same where another model lies already."""
        rooms = tuple(replace(room, free=room.free - other.on(room.name).total) for room in self.rooms)
        return replace(self, rooms=rooms)

    def _room_at(self, room: Room, device: DeviceSizes, context: int) -> Room:
        """A room with the bytes of the cache of one layer, and of a step."""
        config, experts = self.config, self.config.experts
        n_pages = n_cache_pages(context, self.parallel, self.page_size) * (self.page_size // device.page_size)
        shape = CacheShape(1, config.n_kv_heads, config.head_dim, self.cache_type)
        n_tokens = min(MAX_TOKENS, context)
        sizes = StepSizes(
            n_embd=config.n_embd,
            n_ff=config.n_ff if experts is None else experts.n_ff,
            n_vocab=config.n_vocab,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            cache_type=self.cache_type,
            n_tokens=n_tokens,
            n_outputs=max_outputs(config.n_vocab, n_tokens),
            n_pages=n_pages,
            n_experts=0 if experts is None else experts.n,
            n_chosen=0 if experts is None else experts.n_used,
            types=self.types,
        )
        whole = device.step_bytes(sizes)
        scratch, logits = whole or (activation_bytes(config, n_tokens), logits_bytes(config, context))
        n_part_tokens = min(n_tokens, MICRO_BATCH)
        part = device.step_bytes(replace(sizes, n_tokens=n_part_tokens))
        return replace(
            room,
            cache=device.cache_bytes(shape, n_pages),
            scratch=scratch,
            logits=logits,
            part_scratch=activation_bytes(config, n_part_tokens) if part is None else part[0],
        )


def _room(config: ModelConfig, tensors: Mapping[str, Weight], device: DeviceSizes) -> Room:
    """The bytes of a model's weights on a device."""

    def n_bytes(tensor: Weight) -> int:
        # No model has tensors of other shapes; loading will say so.
        return device.packed_bytes(tensor) if len(tensor.shape) in (1, 2, 3) else 0

    layers = [0] * config.n_layers
    output = 0
    for name, tensor in tensors.items():
        layer = _LAYER.match(name)
        if layer is None:
            output += n_bytes(tensor)
        elif (i := int(layer[1])) < config.n_layers:
            layers[i] += n_bytes(tensor)
    embedding = tensors.get(EMBEDDING)
    if embedding is not None and "output.weight" in tensors:
        output -= n_bytes(embedding)
    table_bytes = 0 if embedding is None else embedding.data.nbytes
    return Room(device.name, device.free, tuple(layers), 0, table_bytes, output, 0, 0)


def _multiplied_types(tensors: Mapping[str, Weight]) -> frozenset[GGMLType]:
    """Of the matrices that rows are multiplied with, but for routers.  A table is one where it is the output too."""
    looked_up = {EMBEDDING} if "output.weight" in tensors else set()
    return frozenset(
        tensor.type
        for name, tensor in tensors.items()
        if len(tensor.shape) > 1 and name not in looked_up and not name.endswith(_ROUTER)
    )


def _idle_bytes(config: ModelConfig, tensors: Mapping[str, Weight], device: DeviceSizes) -> int:
    """Bytes of the experts that a token does not go to."""
    if config.experts is None:
        return 0
    n_bytes = sum(device.packed_bytes(tensor) for tensor in tensors.values() if len(tensor.shape) == 3)
    return n_bytes * (config.experts.n - config.experts.n_used) // config.experts.n


def _groups(share: Share, kernels: str) -> Iterator[LayerGroup]:
    """What a device has, in the order of the data's way."""
    room, layers = share.room, share.layers

    def group(name: str, weights: int, *places: Place, kv_cache: int = 0, scratch: int = 0) -> LayerGroup:
        return LayerGroup(name, room.name, weights, kv_cache, scratch=scratch, kernels=kernels, places=places)

    shared = share.tied and share.embeds and share.outputs
    if share.embeds and not shared:
        yield group("embedding", room.embedding, "embedding")
    name, n_bytes = f"layers {layers.start}-{layers.stop - 1}", sum(room.layers[i] for i in layers)
    yield group(name, n_bytes, *layers, kv_cache=len(layers) * room.cache, scratch=share.scratch)
    if shared:
        yield group("embedding and output", room.output, "embedding", "output", scratch=room.logits)
    elif share.outputs:
        yield group("output", room.output, "output", scratch=room.logits)


def plan(demand: Demand, available: int, context: int | None = None) -> Placement:
    """The placement of a model.

    Args:
        available: bytes of memory that can be had on the host.
        context: tokens of context.  By default as many as the model was trained on, at most `DEFAULT_CONTEXT`,
            and fewer, down to `LEAST_CONTEXT`, where memory is short.

    Raises:
        NotEnoughMemoryError: it does not fit; gives the numbers and the largest context that does.
        UsageError: it is to be split over GPUs that are not there.
    """
    wanted = context if context is not None else min(demand.config.context_length, DEFAULT_CONTEXT)

    def fits(n_tokens: int) -> bool:
        return _fits(lambda: [demand.at(n_tokens)], available)

    if fits(wanted):
        return demand.at(wanted)
    fitting = _largest_context(fits, wanted, demand.page_size)
    if context is None and fitting >= LEAST_CONTEXT:
        return demand.at(fitting)
    raise NotEnoughMemoryError(_too_large(demand.name, demand.at(wanted).on(demand.host), available, fitting))


def plan_with_draft(
    demand: Demand, draft: Demand, available: int, context: int | None = None
) -> tuple[Placement, Placement]:
    """The placements of a model and of one that drafts for it, with the same context if it was trained on as much.

    On GPUs the draft model comes first: every token waits for it several times.

    Args:
        available, context: as of `plan`; a default context is reduced until both fit.

    Raises:
        NotEnoughMemoryError: one of them does not fit, or not beside the other; says which.
        UsageError: as `plan`.
    """

    def both(n_tokens: int) -> tuple[Placement, Placement]:
        drafting = draft.as_draft(n_tokens)
        return demand.beside(drafting).at(n_tokens), drafting

    def fits(n_tokens: int) -> bool:
        return _fits(lambda: both(n_tokens), available)

    alone = plan(demand, available, context)
    wanted = alone.context
    if fits(wanted):
        return both(wanted)
    fitting = _largest_context(fits, wanted, demand.page_size)
    if context is None and fitting >= LEAST_CONTEXT:
        return both(fitting)
    its_context = None if context is None else min(context, draft.config.context_length)
    plan(draft, available, its_context)  # raises if it does not even fit alone
    model, drafting = both(wanted)  # raises if it is a GPU that has no room for both
    raise NotEnoughMemoryError(
        f"{demand.name} needs {_gigabytes(model.on(model.host).total)} of memory and {draft.name} "
        f"{_gigabytes(drafting.on(drafting.host).total)}, but {_gigabytes(available)} is available, which is enough "
        f"for one of them: leave the draft model out, {_advice(fitting, both=True)}"
    )


def _fits(placed: Callable[[], Iterable[Placement]], available: int) -> bool:
    """Whether there is room for models on their GPUs, and ``available`` bytes of the host are enough."""
    try:
        return sum(placement.on(placement.host).total for placement in placed()) <= available
    except NotEnoughMemoryError:
        return False


def activation_bytes(config: ModelConfig, n_tokens: int) -> int:
    """Bytes of activations of a step of so many tokens: the widest operation's operands, in float32."""
    q_width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    experts = config.experts
    # With experts, a row for each that a token goes to, and of integers once more where rows are put side by side.
    mlp = 3 * config.n_ff if experts is None else experts.n_used * (3 * experts.n_ff + 2 * config.n_embd)
    width = 2 * config.n_embd + max(2 * (q_width + kv_width), mlp)
    return 4 * n_tokens * width


def logits_bytes(config: ModelConfig, context: int) -> int:
    """Bytes of one step's logits."""
    return 4 * max_outputs(config.n_vocab, min(MAX_TOKENS, context)) * config.n_vocab


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
