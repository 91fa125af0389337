"""Where a model goes, and how many bytes that takes: a pure function from its graph to a plan.

Backends answer for memory, by the same arithmetic as they load: what a plan says is what loading takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import lcm
from typing import NamedTuple, Protocol

from localllm.engine.runner import MAX_TOKENS, max_outputs, n_cache_pages, n_states
from localllm.errors import NotEnoughMemoryError
from localllm.kernels.backend import Footprint, PackedWeight
from localllm.kernels.cpu.host import memory_advice
from localllm.kernels.graph import CacheType, Graph, Route
from localllm.kernels.split import MICRO_BATCH, smaller_pages
from localllm.layers import NO_GPU, LayerRange, plan_layers
from localllm.models.config import ModelConfig
from localllm.models.registry import Model

#: Tokens of context where nobody asks for a number and the model was trained on as many.
DEFAULT_CONTEXT = 4096

#: The least that a context nobody asked for is reduced to where memory is short.
LEAST_CONTEXT = 512

#: Bytes beside the model's: compiled kernels, vocabulary, Python.
OVERHEAD_BYTES = 160 << 20


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


def sum_formats(weights: Iterable[PackedWeight]) -> tuple[Format, ...]:
    """One entry for each pair of types, with the bytes of all of them; those of most bytes first."""
    n_bytes: Counter[tuple[str, str]] = Counter()
    for weight in weights:
        n_bytes[weight.file_type, weight.kernel_type] += weight.n_bytes
    return tuple(Format(*types, n) for types, n in n_bytes.most_common())


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A part of the model that lies on one device.

    Attributes:
        name: "embedding", "layers 0-21", "output", or "embedding and output" where these are one matrix.
        device: "cpu", …
        packed: its weights, as the backend holds them.
        kv_cache: bytes of keys and values.
        scratch: bytes that a step takes there to compute in.
        kernels: which kernels run there, in words.
        layers: those in it.
    """

    name: str
    device: str
    packed: tuple[PackedWeight, ...]
    kv_cache: int = 0
    scratch: int = 0
    kernels: str = ""
    layers: range = range(0)

    @property
    def weights(self) -> int:
        """Bytes of packed weights."""
        return sum(weight.n_bytes for weight in self.packed)

    @property
    def formats(self) -> tuple[Format, ...]:
        """Of the weights, those of most bytes first."""
        return sum_formats(self.packed)


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """What a cache has room for.

    Attributes:
        page_size: tokens in a page.
        n_pages: of each group of layers, with its window (`localllm.kernels.graph.Graph.windows`).
        n_states: slots for the recurrent states of a sequence; 0 where no layer has any.
        n_snapshots: how many of those are for snapshots, if as many sequences run as were asked for.
    """

    page_size: int
    n_pages: tuple[tuple[int | None, int], ...]
    n_states: int
    n_snapshots: int

    def __str__(self) -> str:
        windows = (
            f"{n:,} " + ("of all tokens" if window is None else f"of a window of {window:,}")
            for window, n in self.n_pages
        )
        states = f"; {self.n_states:,} states, {self.n_snapshots:,} of them snapshots" if self.n_states else ""
        return f"pages of {self.page_size:,} tokens: {', '.join(windows)}{states}"


@dataclass(frozen=True, slots=True)
class Placement:
    """What lies where.

    Attributes:
        groups: in execution order.
        context: tokens that a sequence can hold.
        parallel: how many sequences of that length the cache has room for.
        cache_type: what keys and values are kept in.
        cache: what the cache has room for.
        overhead: bytes that the program itself takes, beside any model.
        host: the device whose memory that is.
        spilled_layers: layers that are there because no GPU had room for them, not because somebody asked for it.
        used_experts: the share of its experts that a token goes to.
    """

    groups: tuple[LayerGroup, ...]
    context: int
    parallel: int
    cache_type: CacheType = "f16"
    cache: CacheSizes | None = None
    overhead: int = OVERHEAD_BYTES
    host: str = "cpu"
    spilled_layers: int = 0
    used_experts: float = 1.0

    @property
    def weights(self) -> int:
        return sum(group.weights for group in self.groups)

    @property
    def kv_cache(self) -> int:
        return sum(group.kv_cache for group in self.groups)

    @property
    def scratch(self) -> int:
        """Bytes that steps compute in."""
        return sum(group.scratch for group in self.groups)

    @property
    def total(self) -> int:
        """Bytes of memory in all."""
        return self.weights + self.kv_cache + self.scratch + self.overhead

    @property
    def multiplied(self) -> int:
        """Bytes of the weights that a token is multiplied with: all but the experts that it does not go to, and a
        table that only its row is taken of."""
        weights = [weight for group in self.groups if group.name != "embedding" for weight in group.packed]
        experts = sum(weight.n_bytes for weight in weights if weight.is_expert)
        return sum(weight.n_bytes for weight in weights) - round(experts * (1 - self.used_experts))

    @property
    def devices(self) -> tuple[str, ...]:
        """Those that have a part of it, in execution order."""
        return tuple(dict.fromkeys(group.device for group in self.groups))

    def on(self, device: str) -> Placement:
        """What lies on one device."""
        groups = tuple(group for group in self.groups if group.device == device)
        return replace(self, groups=groups, overhead=self.overhead if device == self.host else 0)

    def layers_on(self, device: str) -> int:
        """How many layers a device has."""
        return sum(len(group.layers) for group in self.groups if group.device == device)

    def loaded(self, weights: Iterable[PackedWeight]) -> Placement:
        """The same with the weights as they were loaded."""
        held = {(weight.name, weight.layer): weight for weight in weights}
        groups = (replace(g, packed=tuple(held.get((w.name, w.layer), w) for w in g.packed)) for g in self.groups)
        return replace(self, groups=tuple(groups))


@dataclass(frozen=True)
class Plan:
    """Where models go, before they are loaded.

    Attributes:
        placement: of the model.
        draft: of the one that drafts for it, if any.
        free: bytes that can be had on each device: of the host's memory, and of GPUs that have their own.
        notices: what the plan leaves to be desired.
    """

    placement: Placement
    draft: Placement | None
    free: Mapping[str, int]
    notices: tuple[str, ...]

    @property
    def has_gpus(self) -> bool:
        """Whether there are devices beside the host."""
        return any(device != self.placement.host for device in self.free)


class Measure(Protocol):
    """Tells what a graph takes on a device: see `localllm.kernels.backend.Backend.footprint`."""

    def __call__(
        self, graph: Graph, *, n_pages: tuple[int, ...], max_tokens: int, max_outputs: int, n_states: int = 0
    ) -> Footprint: ...


@dataclass(frozen=True)
class DeviceBudget:
    """A device, the bytes that can be had there, and what tells how many things take.

    Attributes:
        name: "cpu", "cuda:0", …
        free: of a device with memory of its own.
        kernels: which kernels run there, in words.
        note: why it is not another device, where that was not chosen by name.
    """

    name: str
    page_size: int
    footprint: Measure
    free: int = 0
    kernels: str = ""
    note: str | None = None


@dataclass(frozen=True)
class StepSizes:
    """What a step is compiled for: see `localllm.kernels.backend.Backend.compile`."""

    n_pages: tuple[int, ...]
    max_tokens: int
    max_outputs: int
    n_states: int = 0

    @classmethod
    def of(cls, model: Model, context: int, parallel: int, page_size: int) -> StepSizes:
        """Those of an engine for ``parallel`` sequences of ``context`` tokens."""
        n_tokens, n_pages = min(MAX_TOKENS, context), n_cache_pages(model.graph, context, parallel, page_size)
        return cls(
            n_pages, n_tokens, max_outputs(model.config.n_vocab, n_tokens), n_states(model.graph, context, parallel)
        )


@dataclass(frozen=True)
class Planner:
    """Plans where a model goes, for any context.

    Attributes:
        name: of the model, for messages.
        devices: the host, and then GPUs; the model need not take all.
        parallel: how many sequences of full length the cache shall have room for.
        n_gpu_layers, tensor_split: see `localllm.layers.plan_layers`.
    """

    name: str
    model: Model
    devices: tuple[DeviceBudget, ...]
    parallel: int = 1
    n_gpu_layers: int | None = None
    tensor_split: tuple[float, ...] | None = None
    _known: dict[tuple[str, range, StepSizes], Footprint] = field(default_factory=dict, compare=False)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def host(self) -> str:
        return self.devices[0].name

    @property
    def page_size(self) -> int:
        """Tokens in a page of the cache."""
        return lcm(*(device.page_size for device in self.devices))

    def at(self, context: int) -> Placement:
        """What lies where with so many tokens of context.

        Raises:
            UsageError, NotEnoughMemoryError: as `localllm.layers.plan_layers`.
        """
        host, *gpus = self.devices
        ranges = plan_layers(
            self.config.n_layers,
            host.name,
            {gpu.name: gpu.free for gpu in gpus},
            lambda device, layers: self._n_bytes(device, layers, context),
            n_gpu_layers=self.n_gpu_layers,
            tensor_split=self.tensor_split,
            without_gpus=host.note or NO_GPU,
        )
        groups = tuple(group for each in ranges for group in self._groups(each, context))
        routes = (n.operation for n in self.model.graph.nodes if isinstance(n.operation, Route))
        placement = Placement(
            groups,
            context,
            self.parallel,
            self.model.graph.cache_type,
            self._cache_sizes(context),
            host=host.name,
            used_experts=next((route.k / route.logits.width for route in routes), 1.0),
        )
        as_wanted = not gpus or self.n_gpu_layers is not None
        return placement if as_wanted else replace(placement, spilled_layers=placement.layers_on(host.name))

    def _cache_sizes(self, context: int) -> CacheSizes:
        sizes = StepSizes.of(self.model, context, self.parallel, self.page_size)
        windows, n = zip(self.model.graph.windows, sizes.n_pages, strict=True), sizes.n_states
        return CacheSizes(self.page_size, tuple(windows), n, max(0, n - self.parallel))

    def as_draft(self, context: int) -> Placement:
        """The same of a draft model, beside a model of so much context: no more than it was trained on helps it."""
        return replace(self.at(min(context, self.config.context_length)), overhead=0)

    def beside(self, other: Placement) -> Planner:
        """The same where another model lies already."""
        devices = (replace(device, free=device.free - other.on(device.name).total) for device in self.devices)
        return replace(self, devices=tuple(devices))

    def footprint(self, device: str, layers: range, context: int) -> Footprint:
        """What a range of layers takes on a device; of a part of the layers, with micro-batches."""
        budget = next(each for each in self.devices if each.name == device)
        sizes = StepSizes.of(self.model, context, self.parallel, self.page_size)
        sizes = replace(sizes, n_pages=smaller_pages(sizes.n_pages, self.page_size // budget.page_size))
        if len(layers) < self.config.n_layers:
            sizes = replace(sizes, max_tokens=min(sizes.max_tokens, MICRO_BATCH))
        key = device, layers, sizes
        if key not in self._known:
            self._known[key] = budget.footprint(self.model.graph.part(layers), **asdict(sizes))
        return self._known[key]

    def _n_bytes(self, device: str, layers: range, context: int) -> int:
        """What they take, or what weights and cache take if that alone is too much: it is sooner known."""
        whole = self.footprint(device, range(self.config.n_layers), context)
        places = {*layers, "output"} if layers.stop == self.config.n_layers else {*layers}
        least = sum(weight.n_bytes for weight in whole.weights if weight.layer in places)
        least += sum(n for layer, n in whole.caches.items() if layer in places)
        free = next(each.free for each in self.devices if each.name == device)
        return least if least > free else self.footprint(device, layers, context).n_bytes

    def _groups(self, each: LayerRange, context: int) -> list[LayerGroup]:
        """What a device has, in execution order."""
        footprint, layers = self.footprint(*each, context), each.layers
        kernels = next(device.kernels for device in self.devices if device.name == each.device)
        embedding, output = (tuple(w for w in footprint.weights if w.layer == end) for end in ("embedding", "output"))
        packed = tuple(weight for weight in footprint.weights if isinstance(weight.layer, int))
        name = f"layers {layers.start}-{layers.stop - 1}"
        kept, scratch = sum(footprint.caches.values()), footprint.buffers
        shared = layers.start == 0 and not embedding
        groups = [
            LayerGroup("embedding", each.device, embedding, kernels=kernels),
            LayerGroup(name, each.device, packed, kept, scratch, kernels, layers),
            LayerGroup("embedding and output" if shared else "output", each.device, output, kernels=kernels),
        ]
        return [group for group in groups if group.packed]


def plan(planner: Planner, available: int, context: int | None = None) -> Placement:
    """The placement of a model.

    Args:
        available: bytes of memory that can be had on the host.
        context: tokens of context.  By default as many as the model was trained on, at most `DEFAULT_CONTEXT`,
            and fewer, down to `LEAST_CONTEXT`, where memory is short.

    Raises:
        NotEnoughMemoryError: it does not fit; gives the numbers and the largest context that does.
        UsageError: it is to be split over GPUs that are not there.
    """
    wanted = context if context is not None else min(planner.config.context_length, DEFAULT_CONTEXT)
    found, fitting = _largest(lambda n: (planner.at(n),), available, wanted, planner.page_size)
    if found is not None and (fitting == wanted or (context is None and fitting >= LEAST_CONTEXT)):
        return found[0]
    on_host = planner.at(wanted).on(planner.host)
    raise NotEnoughMemoryError(
        f"{planner.name} needs {_gigabytes(on_host.total)} of memory ({_gigabytes(on_host.weights)} of weights, "
        f"{_gigabytes(on_host.kv_cache)} for {on_host.parallel * on_host.context:,} tokens of context, "
        f"{_gigabytes(on_host.scratch + on_host.overhead)} to work in), but {_gigabytes(available)} is "
        f"available: {_advice(fitting)}"
    )


def plan_with_draft(
    planner: Planner, draft: Planner, available: int, context: int | None = None
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
        return planner.beside(drafting).at(n_tokens), drafting

    wanted = plan(planner, available, context).context
    found, fitting = _largest(both, available, wanted, planner.page_size)
    if found is not None and (fitting == wanted or (context is None and fitting >= LEAST_CONTEXT)):
        return found[0], found[1]
    its_context = None if context is None else min(context, draft.config.context_length)
    plan(draft, available, its_context)  # raises if it does not even fit alone
    model, drafting = both(wanted)  # raises if it is a GPU that has no room for both
    raise NotEnoughMemoryError(
        f"{planner.name} needs {_gigabytes(model.on(model.host).total)} of memory and {draft.name} "
        f"{_gigabytes(drafting.on(drafting.host).total)}, but {_gigabytes(available)} is available, which is enough "
        f"for one of them: leave the draft model out, {_advice(fitting, both=True)}"
    )


def _largest(
    placed: Callable[[int], Sequence[Placement]], available: int, wanted: int, page_size: int
) -> tuple[Sequence[Placement] | None, int]:
    """The placements with the largest context up to the wanted one that fit, and that context; None and 0 if none do.

    They fit where there is room for them on their GPUs, and ``available`` bytes of the host are enough.
    """

    def fitting(n_tokens: int) -> Sequence[Placement] | None:
        try:
            found = placed(n_tokens)
        except NotEnoughMemoryError:
            return None
        return found if sum(each.on(each.host).total for each in found) <= available else None

    best, low, high = fitting(wanted), 0, wanted // page_size
    if best is not None:
        return best, wanted
    while low < high:
        middle = (low + high + 1) // 2
        if (found := fitting(middle * page_size)) is not None:
            best, low = found, middle
        else:
            high = middle - 1
    return best, low * page_size


def _advice(fitting: int, *, both: bool = False) -> str:
    """What to do where memory is short for a model, or for ``both``, and ``fitting`` tokens of context would fit."""
    smaller = f"{memory_advice()} or choose a smaller quantisation of the model"
    it = "both" if both else "it"
    return f"load {it} with context={fitting:,} or less, or {smaller}" if fitting >= LEAST_CONTEXT else smaller


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
