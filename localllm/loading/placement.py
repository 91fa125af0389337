"""Where a model goes, and how many bytes that takes: a pure function from its graph to a plan.

Backends answer for memory, by lowering what they will load: what a plan says is what loading takes.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from localllm.engine.runner import max_outputs, max_step_tokens, n_cache_pages, n_states
from localllm.errors import Argument, NotEnoughMemoryError, Notice
from localllm.kernels.backend import Footprint, PackedWeight, Progress, Step
from localllm.kernels.cpu.host import memory_advice
from localllm.kernels.graph import CacheType, LayerTag, Route
from localllm.kernels.split import SplitStep, page_size, part_footprint
from localllm.loading.devices import Device
from localllm.loading.layer_split import NO_GPU, plan_layers
from localllm.models.registry import Model

#: The longest context that a model gets by default where memory is short, or another would push layers off GPUs.
SHORT_CONTEXT = 4096

#: Steps in which a default context grows beyond that, in tokens.
_CONTEXT_STEP = 1024

#: Sequences of full length that a server's cache has room for at most, where nobody asks for a number.
MAX_DEFAULT_PARALLEL = 4

#: The least that a context nobody asked for is reduced to where memory is short.
MIN_CONTEXT = 512

#: Bytes beside the model's: compiled kernels, vocabulary, Python.
OVERHEAD_BYTES = 160 << 20


# -- What lies where -----------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """How weights lie in the file, as "IQ2_XS", what kernels read them as, and the bytes that this takes in memory.

    The two are the same unless no kernel reads the first: then it is the nearest that loses nothing measurable.
    """

    file_type: str
    kernel_type: str
    n_bytes: int

    def __str__(self) -> str:
        return " read as ".join(dict.fromkeys(self[:2]))


def sum_formats(weights: Iterable[PackedWeight]) -> tuple[Format, ...]:
    """One entry for each pair of types, with the bytes of all of them; those of most bytes first."""
    n_bytes: Counter[tuple[str, str]] = Counter()
    for weight in weights:
        n_bytes[weight.file_type, weight.kernel_type] += weight.own_bytes
    return tuple(Format(*types, n) for types, n in n_bytes.most_common())


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A part of the model that lies on one device."""

    name: str  # "embedding", "layers 0-21", "output", or "embedding and output" where these are one matrix
    device: str  # "cpu", …
    packed: tuple[PackedWeight, ...]  # its weights, as the backend holds them
    kv_cache: int = 0  # bytes of keys and values
    scratch: int = 0  # bytes that a step takes there to compute in, and about those of its CUDA graphs
    pool: int = 0  # bytes for experts that stay in the file
    kernels: str = ""  # which kernels run there, in words
    layers: range = range(0)  # those in it

    @property
    def weights(self) -> int:
        """Bytes of packed weights, less those that are shared."""
        return sum(weight.own_bytes for weight in self.packed)

    @property
    def formats(self) -> tuple[Format, ...]:
        """Of the weights, those of most bytes first."""
        return sum_formats(self.packed)


@dataclass(frozen=True, slots=True)
class CacheSizes:
    page_size: int  # tokens in a page
    # of each group of layers, with its window (`localllm.kernels.graph.Graph.windows`)
    n_pages: tuple[tuple[int | None, int], ...]
    n_states: int  # slots for the recurrent states of a sequence; 0 where no layer has any
    n_snapshots: int  # how many of those are for snapshots, if as many sequences run as were asked for

    def __str__(self) -> str:
        of = {window: "all tokens" if window is None else f"a window of {window:,}" for window, _ in self.n_pages}
        windows = (f"{n:,} of {of[window]}" for window, n in self.n_pages)
        states = f"; {self.n_states:,} states, {self.n_snapshots:,} of them snapshots" if self.n_states else ""
        return f"pages of {self.page_size:,} tokens: {', '.join(windows)}{states}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where weights, cache and buffers of a model lie."""

    groups: tuple[LayerGroup, ...]  # in execution order
    context: int  # tokens that a sequence can hold
    parallel: int  # how many sequences of that length the cache has room for
    cache_type: CacheType  # what keys and values are kept in
    cache: CacheSizes  # what the cache has room for
    overhead: int = OVERHEAD_BYTES  # bytes that the program itself takes, beside any model
    host: str = "cpu"  # the device whose memory that is
    # layers that are there because no GPU had room for them, not because somebody asked for it
    spilled_layers: int = 0
    used_experts: float = 1.0  # the share of its experts that a token goes to

    @property
    def formats(self) -> tuple[Format, ...]:
        """Formats of the weights, largest first."""
        return sum_formats(weight for group in self.groups for weight in group.packed)

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
    def pool(self) -> int:
        """Bytes for experts that stay in the file; 0 where all are in memory."""
        return sum(group.pool for group in self.groups)

    @property
    def experts_in_file(self) -> int:
        """Bytes of experts that stay in the file, as they would be in memory."""
        return sum(weight.n_bytes for group in self.groups for weight in group.packed if weight.is_in_file)

    @property
    def total(self) -> int:
        """Bytes of memory in all."""
        return self.weights + self.pool + self.kv_cache + self.scratch + self.overhead

    @property
    def multiplied(self) -> int:
        """Bytes of the weights that a token is multiplied with: all but the experts that it does not go to, and a
        table that only its row is taken of."""
        weights = [weight for group in self.groups if group.name != "embedding" for weight in group.packed]
        experts = sum(weight.n_bytes for weight in weights if weight.is_expert)
        return sum(weight.n_bytes for weight in weights) - round(experts * (1 - self.used_experts))

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that have a part of it, in execution order."""
        return tuple(dict.fromkeys(group.device for group in self.groups))

    def on(self, device: str) -> Placement:
        """The part on one device."""
        groups = tuple(group for group in self.groups if group.device == device)
        return replace(self, groups=groups, overhead=self.overhead if device == self.host else 0)

    def layers_on(self, device: str) -> int:
        """How many layers a device has."""
        return sum(len(group.layers) for group in self.groups if group.device == device)

    def sharing(self, shared: Collection[tuple[str, LayerTag]]) -> Placement:
        """The same beside another model that has packed some of its weights: those of these names and layers."""
        weights = (weight for group in self.groups for weight in group.packed)
        return self.loaded(replace(w, is_shared=True) for w in weights if (w.name, w.layer) in shared)

    def loaded(self, weights: Iterable[PackedWeight]) -> Placement:
        """The same with the weights as they were loaded."""
        held = {(weight.name, weight.layer): weight for weight in weights}
        groups = (replace(g, packed=tuple(held.get((w.name, w.layer), w) for w in g.packed)) for g in self.groups)
        return replace(self, groups=tuple(groups))


@dataclass(frozen=True)
class EncoderInfo:
    path: Path
    family: str  # its projector, as the file names it
    n_bytes: int  # of memory that it takes
    n_tokens: int  # that it makes of a picture of 1,024 × 768 pixels, or 0
    n_sound_tokens: int = 0  # that it makes of 30 seconds of sound, or 0

    def __str__(self) -> str:
        words = [f"{self.path.name} ({self.family}): {self.n_bytes / 1e6:,.1f} MB"]
        words += [f"{self.n_tokens:,} tokens for a picture of 1,024 × 768"] if self.n_tokens else []
        words += [f"{self.n_sound_tokens:,} tokens for 30 seconds of sound"] if self.n_sound_tokens else []
        return ", ".join(words)


@dataclass(frozen=True)
class Plan:
    """Where models go, before they are loaded."""

    placements: tuple[Placement, ...]  # of the model, and of the one that drafts for it, if any
    # bytes that can be had on each device: of the host's memory, and of GPUs that have their own
    free: Mapping[str, int]
    notices: tuple[Notice, ...]  # what the plan leaves to be desired
    # that of pictures and sounds, where the model takes any; its bytes are beside those of placements
    encoder: EncoderInfo | None = None

    @property
    def placement(self) -> Placement:
        return self.placements[0]

    @property
    def draft(self) -> Placement | None:
        return self.placements[1] if len(self.placements) > 1 else None

    @property
    def has_gpus(self) -> bool:
        """Whether there are devices beside the host."""
        return any(device != self.placement.host for device in self.free)


# -- Where it goes -------------------------------------------------------------------------------------------------


class StepSizes(NamedTuple):
    """Sizes of a step: see `localllm.kernels.backend.Backend.footprint`."""

    n_pages: tuple[int, ...]
    max_tokens: int
    max_outputs: int
    n_states: int


@dataclass(frozen=True)
class Planner:
    """Plans where a model goes, for any context, and loads what it has planned."""

    name: str  # of the model, for messages
    model: Model
    devices: tuple[Device, ...]  # the host, and then GPUs; the model need not take all
    free: Mapping[str, int] = field(default_factory=dict)  # bytes that can be had on each device
    parallel: int = 1  # how many sequences of full length the cache shall have room for
    # n_gpu_layers, tensor_split: see `localllm.loading.layer_split.plan_layers`
    n_gpu_layers: int | None = None
    tensor_split: tuple[float, ...] | None = None
    # weights of the model that it drafts for, which it takes as they are packed: their names and layers
    shared: frozenset[tuple[str, LayerTag]] = frozenset()
    expert_bytes: int | None = None  # of the host's memory for experts, where they stay in the file
    _known: dict[tuple[str, range, StepSizes, int | None], Footprint] = field(default_factory=dict, compare=False)

    @property
    def page_size(self) -> int:
        """Tokens in a page of the cache."""
        return page_size([device.backend for device in self.devices])

    def sizes(self, context: int) -> StepSizes:
        """The sizes of an engine's step for sequences of so many tokens."""
        graph = self.model.graph
        wanted = self.devices if self.n_gpu_layers != 0 else self.devices[:1]
        n_tokens = max_step_tokens(graph, context, max(each.backend.step_tokens for each in wanted))
        n_pages = n_cache_pages(graph, context, self.parallel, self.page_size, n_tokens)
        n_outputs = max_outputs(graph.result.width, n_tokens)
        return StepSizes(n_pages, n_tokens, n_outputs, n_states(graph, context, self.parallel))

    def at(self, context: int) -> Placement:
        """The placement with so many tokens of context."""
        host, *gpus = self.devices
        ranges = plan_layers(
            self.model.config.n_layers,
            host.name,
            {gpu.name: self.free[gpu.name] for gpu in gpus},
            lambda device, layers: self._n_bytes(device, layers, context),
            n_gpu_layers=self.n_gpu_layers,
            tensor_split=self.tensor_split,
            without_gpus=host.note or NO_GPU,
        )
        sizes, graph = self.sizes(context), self.model.graph
        windows = tuple(zip(graph.windows, sizes.n_pages, strict=True))
        on_host = sum(len(layers) for device, layers in ranges if device == host.name)
        routes = (node.operation for node in graph.nodes if isinstance(node.operation, Route))
        return Placement(
            tuple(group for each in ranges for group in self._groups(*each, context)),
            context,
            self.parallel,
            graph.cache_type,
            CacheSizes(self.page_size, windows, sizes.n_states, max(0, sizes.n_states - self.parallel)),
            host=host.name,
            spilled_layers=on_host if gpus and self.n_gpu_layers is None else 0,
            used_experts=next((route.k / route.logits.width for route in routes), 1.0),
        )

    def as_draft(self, context: int) -> Placement:
        """The same of a draft model, beside a model of so much context: no more than it was trained on helps it."""
        if self.model.graph.caches_of is None:
            context = min(context, self.model.config.context_length)
        return replace(self.at(context), overhead=0)

    def beside(self, *others: Placement) -> Planner:
        """The same where other models lie already."""
        taken = {name: sum(other.on(name).total for other in others) for name in self.free}
        return replace(self, free={name: free - taken[name] for name, free in self.free.items()})

    def load(self, placement: Placement, progress: Progress | None) -> Step:
        """Makes the step of the model, placed as `at` has said."""
        ranges = [(group.device, group.layers) for group in placement.groups if group.layers]
        steps = tuple(self.footprint(*each, placement.context).load(progress) for each in ranges)
        if len(steps) == 1:
            return steps[0]
        n_pages, n_tokens, n_outputs, _ = self.sizes(placement.context)
        limits = {"max_tokens": n_tokens, "max_outputs": n_outputs}
        return SplitStep(steps, self.model.graph, self.page_size, n_pages=n_pages, **limits)

    def footprint(self, device: str, layers: range, context: int) -> Footprint:
        """The memory of a range of layers on a device."""
        sizes = self.sizes(context)
        if (key := (device, layers, sizes, self.expert_bytes)) not in self._known:
            backend = next(each.backend for each in self.devices if each.name == device)
            limits: dict[str, Any] = sizes._asdict()
            if backend.pools_experts and self.expert_bytes is not None:
                limits["expert_bytes"] = self.expert_bytes
            self._known[key] = part_footprint(backend, layers, self.model.graph, self.page_size, **limits)
        return self._known[key]

    def _n_bytes(self, device: str, layers: range, context: int) -> int:
        """Their bytes, or those of weights and cache if these alone are too many, which is sooner known."""
        n_layers = self.model.config.n_layers
        whole = self.footprint(device, range(n_layers), context)
        places = {*layers, "output"} if layers.stop == n_layers else {*layers}
        least = sum(weight.n_bytes for weight in whole.weights if weight.layer in places)
        least += sum(n for layer, n in whole.caches.items() if layer in places)
        return least if least > self.free[device] else self.footprint(device, layers, context).n_bytes

    def _groups(self, device: str, layers: range, context: int) -> list[LayerGroup]:
        """The groups of a device, in execution order."""
        footprint = self.footprint(device, layers, context)
        kernels = next(each.kernels for each in self.devices if each.name == device)
        embedding, output = (tuple(w for w in footprint.weights if w.layer == end) for end in ("embedding", "output"))
        packed = tuple(weight for weight in footprint.weights if isinstance(weight.layer, int))
        name, kept = f"layers {layers.start}-{layers.stop - 1}", sum(footprint.caches.values())
        shared = layers.start == 0 and not embedding
        groups = [
            LayerGroup("embedding", device, embedding, kernels=kernels),
            LayerGroup(name, device, packed, kept, footprint.buffers, footprint.pool, kernels, layers),
            LayerGroup("embedding and output" if shared else "output", device, output, kernels=kernels),
        ]
        return [group for group in groups if group.packed]


def _together(planners: Sequence[Planner], n_tokens: int) -> tuple[Placement, ...]:
    """The placements of a model, and of one that drafts for it, with so many tokens of context."""
    planner, *drafts = planners
    drafting = [draft.as_draft(n_tokens) for draft in drafts]
    model = planner.beside(*drafting).at(n_tokens)
    return model, *(placed.sharing(draft.shared) for draft, placed in zip(drafts, drafting, strict=True))


def _leaves_memory(planners: Sequence[Planner], available: int, n_tokens: int, n_spilled: int) -> bool:
    """Whether a context that nobody asked for is modest.

    On each device what grows with it takes at most half of what is free beside the weights, and no more than
    ``n_spilled`` layers are on the host because GPUs have no room for them.
    """
    try:
        placements = _together(planners, n_tokens)
    except NotEnoughMemoryError:  # on a GPU
        return False
    for device, free in {**planners[0].free, placements[0].host: available}.items():
        on_device = [placed.on(device) for placed in placements]
        fixed = sum(placed.weights + placed.overhead for placed in on_device)
        if sum(placed.kv_cache + placed.scratch for placed in on_device) > (free - fixed) / 2:
            return False
    return placements[0].spilled_layers <= n_spilled


def fit(
    planners: Sequence[Planner], available: int, context: int | None = None, advice: Sequence[str | Argument] = ()
) -> tuple[Placement, ...]:
    """The placements of a model, and of one that drafts for it, with the same context if both can have it.

    On GPUs the draft model comes first: every token waits for it several times.

    Args:
        planners: of the model, and of the draft model, if there is one.
        available: bytes of memory that can be had on the host.
        advice: how more memory becomes available, in the error; `memory_advice` if it is empty.
        context: tokens of context.  By default as many as the model was trained on, if they take at most half of the
            memory that is free beside the weights, else as many as do.  Up to `SHORT_CONTEXT` they may take all;
            where it is too small for those there are fewer, down to `MIN_CONTEXT`.
    """
    planner, *drafts = planners
    at = partial(_together, planners)

    def is_too_large(n_tokens: int) -> bool:
        try:
            return sum(each.on(each.host).total for each in at(n_tokens)) > available
        except NotEnoughMemoryError:  # on a GPU
            return True

    trained = planner.model.config.context_length
    # What a longer context takes is lost to experts that stay in the file.
    may_be_long = context is None and planner.expert_bytes is None
    if may_be_long and trained > SHORT_CONTEXT and _leaves_memory(planners, available, trained, 0):
        return at(trained)
    wanted = context if context is not None else min(trained, SHORT_CONTEXT)
    if not is_too_large(wanted):
        if not may_be_long or trained <= wanted:
            return at(wanted)
        n_spilled = at(wanted)[0].spilled_layers
        longer = [*range(wanted, trained, _CONTEXT_STEP), trained]
        too_long = bisect(longer, False, lo=1, key=lambda n: not _leaves_memory(planners, available, n, n_spilled))
        return at(longer[too_long - 1])
    contexts = range(0, wanted, planner.page_size)
    fitting = contexts[bisect(contexts, False, lo=1, key=is_too_large) - 1]  # 0 where none does
    if context is None and fitting >= MIN_CONTEXT:
        return at(fitting)
    if drafts:
        fit([planner], available, context, advice)  # raises if not even the model alone fits
    named = zip((each.name for each in planners), at(wanted), strict=True)
    needs = " and ".join(f"{name} needs {_needs(placed.on(placed.host))}" for name, placed in named)
    before = f"{needs}, but {_gigabytes(available)} is available: {'leave the draft model out, ' if drafts else ''}"
    smaller = [*(advice or [memory_advice()]), " or choose a smaller quantisation of the model"]
    if fitting < MIN_CONTEXT:
        raise NotEnoughMemoryError(before, *smaller)
    it = "both" if drafts else "it"
    raise NotEnoughMemoryError(before, f"load {it} with ", Argument("context", fitting), " or less, or ", *smaller)


def with_experts_in_file(
    planners: Sequence[Planner], available: int, context: int | None = None
) -> tuple[list[Planner], tuple[Placement, ...]] | None:
    """As `fit`, of a model larger than memory, whose experts stay in the file.

    What is left of memory is for those that were chosen last, at least for one token's of a layer.  Gives None of a
    model without experts on the host.
    """
    planner, *drafts = planners
    whole = planner.at(MIN_CONTEXT).on(planner.devices[0].name)
    layers = Counter[LayerTag]()
    for weight in (weight for group in whole.groups for weight in group.packed if weight.is_expert):
        layers[weight.layer] += weight.n_bytes
    if not layers or not planner.devices[0].backend.pools_experts:
        return None
    pooled = replace(planner, expert_bytes=math.ceil(max(layers.values()) * whole.used_experts))
    placements = fit([pooled, *drafts], available, context)
    left = available - sum(placed.on(placed.host).total for placed in placements)
    pooled = replace(planner, expert_bytes=min(layers.total(), placements[0].pool + left))
    return [pooled, *drafts], _together([pooled, *drafts], placements[0].context)


def widened(
    planners: Sequence[Planner], placements: tuple[Placement, ...], available: int
) -> tuple[list[Planner], tuple[Placement, ...]]:
    """The same for as many sequences at once as leave room, up to `MAX_DEFAULT_PARALLEL`."""
    context, n_spilled = placements[0].context, placements[0].spilled_layers
    for n in range(MAX_DEFAULT_PARALLEL, 1, -1):
        wider = [replace(each, parallel=n) for each in planners]
        if _leaves_memory(wider, available, context, n_spilled):
            return wider, _together(wider, context)
    return list(planners), placements


def _needs(placed: Placement) -> str:
    return (
        f"{_gigabytes(placed.total)} of memory ({_gigabytes(placed.weights)} of weights, "
        f"{_gigabytes(placed.kv_cache)} for {placed.parallel * placed.context:,} tokens of context, "
        f"{f'{_gigabytes(placed.pool)} for experts of a token, ' if placed.pool else ''}"
        f"{_gigabytes(placed.scratch + placed.overhead)} to work in)"
    )


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
