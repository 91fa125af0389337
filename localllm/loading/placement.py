"""Plan the devices and the memory of a model: a pure function from its graph to a plan.

Backends compute memory by lowering the graph that they will load, so a plan equals the memory that loading takes.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from localllm.engine.runner import max_outputs, max_step_tokens, n_cache_pages, n_states
from localllm.errors import Argument, NotEnoughMemoryError, Notice
from localllm.kernels.backend import Footprint, PackedWeight, Progress, Step
from localllm.kernels.cpu.host import memory_advice
from localllm.kernels.graph import CacheType, LayerTag
from localllm.kernels.offload import OffloadRule
from localllm.kernels.operations import Route
from localllm.kernels.split import SplitStep, page_size, part_footprint
from localllm.loading.bandwidths import Bandwidths
from localllm.loading.devices import Device
from localllm.loading.layer_split import NO_GPU, plan_layers
from localllm.loading.overrides import NO_OVERRIDES, Overrides
from localllm.models.registry import Model

#: Largest default context if memory is short, or if a longer context would move layers off GPUs.
SHORT_CONTEXT = 4096

#: Tokens by which a default context grows above `SHORT_CONTEXT`.
_CONTEXT_STEP = 1024

#: Maximum of the default for ``parallel``: sequences of full length that the cache has room for.
MAX_DEFAULT_PARALLEL = 4

#: Smallest default context if memory is short, in tokens.
MIN_CONTEXT = 512

#: Bytes in addition to the model: compiled kernels, vocabulary, Python.
OVERHEAD_BYTES = 160 << 20


# -- Placements ----------------------------------------------------------------------------------------------------


class Format(NamedTuple):
    """A weight format in the file, such as "IQ2_XS", the format that kernels read, and the bytes in memory.

    The formats differ only if no kernel reads the file's format. Then weights are repacked to the nearest format
    without a measurable loss.
    """

    file_type: str
    kernel_type: str
    n_bytes: int

    def __str__(self) -> str:
        return " read as ".join(dict.fromkeys(self[:2]))


def sum_formats(weights: Iterable[PackedWeight]) -> tuple[Format, ...]:
    """Return one entry per pair of types with the sum of its bytes, largest first."""
    n_bytes: Counter[tuple[str, str]] = Counter()
    for weight in weights:
        n_bytes[weight.file_type, weight.kernel_type] += weight.own_bytes
    return tuple(Format(*types, n) for types, n in n_bytes.most_common())


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A part of the model on one device."""

    name: str  # "embedding", "layers 0-21", "output", or "embedding and output" if both use the same matrix
    device: str  # "cpu", …
    packed: tuple[PackedWeight, ...]  # weights in the backend's layout
    kv_cache: int = 0  # bytes of keys and values
    scratch: int = 0  # bytes of a step's activations, and approximately the bytes of its CUDA graphs
    pool: int = 0  # bytes for experts that stay in the file
    kernels: str = ""  # description of the kernels
    layers: range = range(0)
    is_offloaded: bool = False  # matrices of layers whose other operations run on a GPU

    @property
    def weights(self) -> int:
        """Bytes of packed weights, without shared weights."""
        return sum(weight.own_bytes for weight in self.packed)

    @property
    def formats(self) -> tuple[Format, ...]:
        """Formats of the weights, largest first."""
        return sum_formats(self.packed)


@dataclass(frozen=True, slots=True)
class CacheSizes:
    page_size: int  # tokens per page
    # (window, number of pages) of each group of layers (`localllm.kernels.graph.Graph.windows`)
    n_pages: tuple[tuple[int | None, int], ...]
    n_states: int  # slots for the recurrent states of a sequence; 0 if no layer has a state
    n_snapshots: int  # slots left for snapshots while `Placement.parallel` sequences run

    def __str__(self) -> str:
        of = {window: "all tokens" if window is None else f"a window of {window:,}" for window, _ in self.n_pages}
        windows = (f"{n:,} of {of[window]}" for window, n in self.n_pages)
        states = f"; {self.n_states:,} states, {self.n_snapshots:,} of them snapshots" if self.n_states else ""
        return f"pages of {self.page_size:,} tokens: {', '.join(windows)}{states}"


class Memory(NamedTuple):
    """Bytes by kind of memory."""

    host: int = 0
    gpus: int = 0  # of all GPUs together

    @classmethod
    def sum(cls, parts: Iterable[Memory]) -> Memory:
        parts = [*parts]
        return cls(sum(part.host for part in parts), sum(part.gpus for part in parts))


NO_MEMORY = Memory()


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices and bytes of a model's weights, cache and buffers."""

    groups: tuple[LayerGroup, ...]  # in execution order
    context: int  # maximum tokens of a sequence
    parallel: int  # sequences of that length that the cache has room for
    cache_type: CacheType  # type of keys and values
    cache: CacheSizes
    overhead: int = OVERHEAD_BYTES  # bytes of the program without models
    host: str = "cpu"  # the device whose memory contains the overhead
    # layers on the host, or with experts on the host, because GPUs have no room; 0 if the user chose the number
    spilled_layers: int = 0
    # number of first layers whose experts are on the host because GPUs have no room
    n_cpu_moe: int = 0
    used_experts: float = 1.0  # fraction of the experts that compute a token

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
        return sum(group.scratch for group in self.groups)

    @property
    def pool(self) -> int:
        """Bytes for experts that stay in the file; 0 if all experts are in memory."""
        return sum(group.pool for group in self.groups)

    @property
    def experts_in_file(self) -> int:
        """Bytes that the experts in the file would take in memory."""
        return sum(weight.n_bytes for group in self.groups for weight in group.packed if weight.is_in_file)

    @property
    def total(self) -> int:
        return self.weights + self.pool + self.kv_cache + self.scratch + self.overhead

    @property
    def memory(self) -> Memory:
        """Bytes that unloading the model frees, by kind."""
        host = self.on(self.host)
        n_bytes = host.total - host.overhead
        return Memory(n_bytes, self.total - self.overhead - n_bytes)

    @property
    def multiplied(self) -> int:
        """Bytes of weights read per token: without the embedding table and the unused experts."""
        weights = [weight for group in self.groups if group.name != "embedding" for weight in group.packed]
        experts = sum(weight.n_bytes for weight in weights if weight.is_expert)
        return sum(weight.n_bytes for weight in weights) - round(experts * (1 - self.used_experts))

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(group.device for group in self.groups))

    def on(self, device: str) -> Placement:
        """Return the part on one device."""
        groups = tuple(group for group in self.groups if group.device == device)
        return replace(self, groups=groups, overhead=self.overhead if device == self.host else 0)

    def layers_on(self, device: str) -> int:
        return sum(len(group.layers) for group in self.groups if group.device == device)

    def sharing(self, shared: Collection[tuple[str, LayerTag]]) -> Placement:
        """Return the placement with some weights, by name and layer, shared with another model that packed them."""
        weights = (weight for group in self.groups for weight in group.packed)
        return self.loaded(replace(w, is_shared=True) for w in weights if (w.name, w.layer) in shared)

    def loaded(self, weights: Iterable[PackedWeight]) -> Placement:
        """Return the placement with the weights after loading, whose formats and bytes can differ from the plan."""
        loaded = {(weight.name, weight.layer): weight for weight in weights}
        groups = (replace(g, packed=tuple(loaded.get((w.name, w.layer), w) for w in g.packed)) for g in self.groups)
        return replace(self, groups=tuple(groups))


@dataclass(frozen=True)
class EncoderInfo:
    path: Path
    family: str  # projector type in the file
    n_bytes: int  # bytes in memory
    n_tokens: int  # tokens of an image of 1,024 × 768 pixels; 0 without an image encoder
    n_sound_tokens: int = 0  # tokens of 30 seconds of audio; 0 without an audio encoder

    def __str__(self) -> str:
        words = [f"{self.path.name} ({self.family}): {self.n_bytes / 1e6:,.1f} MB"]
        words += [f"{self.n_tokens:,} tokens for an image of 1,024 × 768"] if self.n_tokens else []
        words += [f"{self.n_sound_tokens:,} tokens for 30 seconds of audio"] if self.n_sound_tokens else []
        return ", ".join(words)


@dataclass(frozen=True)
class Plan:
    """Placements of models before they are loaded."""

    placements: tuple[Placement, ...]  # of the model, and of the draft model if there is a draft model
    # bytes available on each device: the host, and GPUs with separate memory
    free: Mapping[str, int]
    notices: tuple[Notice, ...]  # shortcomings of the plan
    # encoder of images and audio; its bytes are not part of the placements
    encoder: EncoderInfo | None = None
    missing: Memory = NO_MEMORY  # bytes that more memory would be used for, see `missing_memory`

    @property
    def placement(self) -> Placement:
        return self.placements[0]

    @property
    def draft(self) -> Placement | None:
        return self.placements[1] if len(self.placements) > 1 else None

    @property
    def has_gpus(self) -> bool:
        """Whether there are devices in addition to the host."""
        return any(device != self.placement.host for device in self.free)


# -- Planning ------------------------------------------------------------------------------------------------------


class StepSizes(NamedTuple):
    """Sizes of a step: see `localllm.kernels.backend.Backend.footprint`."""

    n_pages: tuple[int, ...]
    max_tokens: int
    max_outputs: int
    n_states: int


@dataclass(frozen=True)
class Planner:
    """Plans the placement of a model for any context, and loads the model as planned."""

    name: str  # name of the model in messages
    model: Model
    devices: tuple[Device, ...]  # the host, then GPUs; the model can use fewer
    free: Mapping[str, int] = field(default_factory=dict)  # bytes available on each device
    parallel: int = 1  # sequences of full length that the cache must have room for
    # n_gpu_layers, tensor_split: see `localllm.loading.layer_split.plan_layers`
    n_gpu_layers: int | None = None
    tensor_split: tuple[float, ...] | None = None
    overrides: Overrides = NO_OVERRIDES  # matrices on the host
    # measures bandwidths, so that experts are placed on the host if GPUs have no room; None: only whole layers are
    measured: Callable[[], Bandwidths | None] | None = None
    # names and layers of weights of the target model that a draft model uses in their packed form
    shared: frozenset[tuple[str, LayerTag]] = frozenset()
    expert_bytes: int | None = None  # host memory for experts; None if experts do not stay in the file
    n_pools: int = 1  # parts of the model that share this memory
    _footprints: dict[tuple[Any, ...], Footprint] = field(default_factory=dict, compare=False)

    @property
    def page_size(self) -> int:
        """Tokens per page of the cache."""
        return page_size([device.backend for device in self.devices])

    def sizes(self, context: int) -> StepSizes:
        """Return the sizes of an engine's step for sequences of ``context`` tokens."""
        graph = self.model.graph
        devices = self.devices if self.n_gpu_layers != 0 else self.devices[:1]
        n_tokens = max_step_tokens(graph, context, max(device.backend.step_tokens for device in devices))
        n_pages = n_cache_pages(graph, context, self.parallel, self.page_size, n_tokens)
        n_outputs = max_outputs(graph.result.width, n_tokens, self.model.diffusion)
        return StepSizes(n_pages, n_tokens, n_outputs, n_states(graph, context, self.parallel))

    def at(self, context: int) -> Placement:
        """Return the placement for ``context`` tokens.

        If not all layers fit on GPUs, either the first layers are on the host, or the experts of the first layers:
        the placement that is expected to be faster.
        """
        placement = self._in_layers(context)
        if not placement.spilled_layers or self.measured is None:
            return placement
        mixed = self._with_experts_on_host(context)
        if mixed is None or (bandwidths := self.measured()) is None:
            return placement
        offloaded = (group for group in mixed.groups if group.is_offloaded)
        n_blocks = len({weight.layer for group in offloaded for weight in group.packed})
        # Input and output of the experts, and the router's logits, which are at most as many.
        copied = n_blocks * 3 * 4 * self.model.config.n_embd
        faster = _token_s(bandwidths, mixed, n_blocks, copied) < _token_s(bandwidths, placement, 1, 0)
        return mixed if faster else placement

    def _with_experts_on_host(self, context: int) -> Placement | None:
        """Return a placement with the experts of as few first layers as possible on the host.

        The host also has layers that do not fit on GPUs without experts. None without experts.
        """
        _, *gpus = self.devices
        n_layers = self.model.config.n_layers
        on_gpu = self.footprint(gpus[0].name, range(n_layers), context)
        experts = Counter[LayerTag]()
        for weight in on_gpu.weights:
            experts[weight.layer] += weight.n_bytes * weight.is_expert
        missing, n = on_gpu.n_bytes - sum(self.free[gpu.name] for gpu in gpus), 0
        if not experts.total():
            return None
        while missing > 0 and n < n_layers:
            missing -= experts[n]
            n += 1
        while True:
            placement = replace(self._on_host(n), measured=None)._in_layers(context)
            if not placement.spilled_layers or n == n_layers:
                return replace(placement, spilled_layers=n, n_cpu_moe=n)
            n += 1

    def _in_layers(self, context: int) -> Placement:
        """Return the placement in whole layers, except the ``overrides``."""
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
            tuple(group for layer_range in ranges for group in self._groups(*layer_range, context)),
            context,
            self.parallel,
            graph.cache_type,
            CacheSizes(self.page_size, windows, sizes.n_states, max(0, sizes.n_states - self.parallel)),
            host=host.name,
            spilled_layers=on_host if gpus and self.n_gpu_layers is None else 0,
            used_experts=next((route.k / route.logits.width for route in routes), 1.0),
        )

    def as_draft(self, context: int) -> Placement:
        """Return the placement as a draft model, with at most its trained context: a longer one does not help."""
        if self.model.graph.caches_of is None:
            context = min(context, self.model.config.context_length)
        return replace(self.at(context), overhead=0)

    def next_to(self, *placements: Placement) -> Planner:
        """Return a planner with the free memory that other models leave."""
        used = {name: sum(placement.on(name).total for placement in placements) for name in self.free}
        return replace(self, free={name: free - used[name] for name, free in self.free.items()})

    def load(self, placement: Placement, progress: Progress | None) -> Step:
        """Return the step of the model with the placement that `at` returned."""
        ranges = [(group.device, group.layers) for group in placement.groups if group.layers]
        planner = self._on_host(placement.n_cpu_moe) if placement.n_cpu_moe else self
        steps = tuple(planner.footprint(*layer_range, placement.context).load(progress) for layer_range in ranges)
        if len(steps) == 1:
            return steps[0]
        n_pages, n_tokens, n_outputs, _ = self.sizes(placement.context)
        return SplitStep(
            steps,
            self.model.graph,
            self.page_size,
            layers=[layers for _, layers in ranges],
            n_pages=n_pages,
            max_tokens=n_tokens,
            max_outputs=n_outputs,
        )

    def footprint(self, device: str, layers: range, context: int) -> Footprint:
        """Return the memory of a range of layers on a device."""
        sizes = self.sizes(context)
        overrides = NO_OVERRIDES if device == self.devices[0].name else self.overrides
        if (key := (device, layers, sizes, self.expert_bytes, overrides)) not in self._footprints:
            backend, host = next(d.backend for d in self.devices if d.name == device), self.devices[0].backend
            limits: dict[str, Any] = sizes._asdict()
            computing = backend
            if overrides:
                limits["offloads"], computing = OffloadRule(host, overrides.is_on_host), host
            if computing.pools_experts and self.expert_bytes is not None:
                limits["expert_bytes"] = self.expert_bytes // self.n_pools
            self._footprints[key] = part_footprint(backend, layers, self.model.graph, self.page_size, **limits)
        return self._footprints[key]

    def _n_bytes(self, device: str, layers: range, context: int) -> int:
        """Return the bytes of layers; only weights and cache, which are faster to compute, if these already do not
        fit."""
        n_layers = self.model.config.n_layers
        all_layers = self.footprint(device, range(n_layers), context)
        tags = {*layers, "output"} if layers.stop == n_layers else {*layers}
        least = sum(weight.n_bytes for weight in all_layers.weights if weight.layer in tags)
        least += sum(n for layer, n in all_layers.caches.items() if layer in tags)
        return least if least > self.free[device] else self.footprint(device, layers, context).n_bytes

    def _groups(self, device: str, layers: range, context: int) -> list[LayerGroup]:
        """Return the groups of a device, in execution order."""
        footprint = self.footprint(device, layers, context)
        kernels = next(d.kernels for d in self.devices if d.name == device)
        embedding, output = (tuple(w for w in footprint.weights if w.layer == end) for end in ("embedding", "output"))
        packed = tuple(weight for weight in footprint.weights if isinstance(weight.layer, int))
        name, kv_cache = f"layers {layers.start}-{layers.stop - 1}", sum(footprint.caches.values())
        shared = layers.start == 0 and not embedding
        groups = [
            LayerGroup("embedding", device, embedding, kernels=kernels),
            LayerGroup(name, device, packed, kv_cache, footprint.buffers, footprint.pool, kernels, layers),
            *self._offloaded_groups(footprint.host),
            LayerGroup("embedding and output" if shared else "output", device, output, kernels=kernels),
        ]
        return [group for group in groups if group.packed or group.layers]

    def _offloaded_groups(self, footprint: Footprint | None) -> list[LayerGroup]:
        """Return the groups of the host's part of layers on a GPU."""
        if footprint is None:
            return []
        name, kernels = self.devices[0].name, self.devices[0].kernels
        embedding = tuple(w for w in footprint.weights if w.layer == "embedding")
        packed = tuple(w for w in footprint.weights if w.layer != "embedding")
        numbers = [w.layer for w in packed if isinstance(w.layer, int)]
        kind = "experts" if all("exp" in w.name for w in packed) else "matrices"
        of_layers = f"{kind} of layers {min(numbers)}-{max(numbers)}" if numbers else kind
        memory = footprint.buffers, footprint.pool, kernels
        return [
            *([LayerGroup("embedding", name, embedding, kernels=kernels, is_offloaded=True)] if embedding else []),
            LayerGroup(of_layers, name, packed, 0, *memory, is_offloaded=True),
        ]

    def _on_host(self, n_layers: int) -> Planner:
        """Return a planner with the experts of the first ``n_layers`` layers on the host."""
        return replace(self, overrides=Overrides(n_layers=n_layers))


def _token_s(bandwidths: Bandwidths, placement: Placement, n_blocks: int, copied: int) -> float:
    """Return the seconds for reading the weights of a token; see `Bandwidths.token_s`."""
    on_host = placement.on(placement.host).multiplied
    return bandwidths.token_s(on_host, placement.multiplied - on_host, n_blocks, copied)


def _together(planners: Sequence[Planner], n_tokens: int) -> tuple[Placement, ...]:
    """Return the placements of a model and of its draft model, if any, for ``n_tokens`` tokens of context."""
    planner, *drafts = planners
    drafting = [draft.as_draft(n_tokens) for draft in drafts]
    model = planner.next_to(*drafting).at(n_tokens)
    return model, *(placed.sharing(draft.shared) for draft, placed in zip(drafts, drafting, strict=True))


def _leaves_memory(planners: Sequence[Planner], available: int, n_tokens: int, n_spilled: int) -> bool:
    """Return whether a default context leaves enough memory.

    On each device, cache and activations must take at most half of the memory that weights and overhead leave, and
    at most ``n_spilled`` layers may be on the host because GPUs have no room.
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
    """Return the placements of a model and of its draft model, if any, with the same context if both support it.

    GPU memory goes to the draft model first, because it runs several times per token.

    Args:
        planners: of the model, and of the draft model if there is a draft model.
        available: bytes of memory available on the host.
        advice: how to free memory, for the error; `memory_advice` if empty.
        context: tokens of context. Defaults to `Model.default_context` if it takes at most half of the memory that
            the weights leave, otherwise to the longest context that does. Up to `SHORT_CONTEXT`, a default context
            may take all memory; if that is too small, the context is reduced to `MIN_CONTEXT` at least.

    Raises:
        NotEnoughMemoryError: the models do not fit.
    """
    planner, *drafts = planners
    at = partial(_together, planners)

    def is_too_large(n: int) -> bool:
        try:
            return sum(placement.on(placement.host).total for placement in at(n)) > available
        except NotEnoughMemoryError:  # on a GPU
            return True

    trained = planner.model.default_context
    # With experts in the file, a longer context would leave less memory for experts.
    may_be_long = context is None and planner.expert_bytes is None
    if may_be_long and trained > SHORT_CONTEXT and _leaves_memory(planners, available, trained, 0):
        return at(trained)
    n_tokens = context if context is not None else min(trained, SHORT_CONTEXT)
    if not is_too_large(n_tokens):
        if not may_be_long or trained <= n_tokens:
            return at(n_tokens)
        n_spilled = at(n_tokens)[0].spilled_layers
        longer = [*range(n_tokens, trained, _CONTEXT_STEP), trained]
        too_long = bisect(longer, False, lo=1, key=lambda n: not _leaves_memory(planners, available, n, n_spilled))
        return at(longer[too_long - 1])
    contexts = range(0, n_tokens, planner.page_size)
    fitting = contexts[bisect(contexts, False, lo=1, key=is_too_large) - 1]  # 0 if no context fits
    if context is None and fitting >= MIN_CONTEXT:
        return at(fitting)
    if drafts:
        fit([planner], available, context, advice)  # raises if the model does not fit without the draft model
    named_placements = zip((p.name for p in planners), at(n_tokens), strict=True)
    needs = " and ".join(f"{name} needs {_needs(placed.on(placed.host))}" for name, placed in named_placements)
    before = f"{needs}, but {_gigabytes(available)} is available: {'leave the draft model out, ' if drafts else ''}"
    smaller = [*(advice or [memory_advice()]), " or choose a smaller quantisation of the model"]
    models = "both" if drafts else "it"
    shorter = [f"load {models} with ", Argument("context", fitting), " or less, or "]
    error = NotEnoughMemoryError(before, *(shorter if fitting >= MIN_CONTEXT else ()), *smaller)
    least = n_tokens if context is not None else min(n_tokens, MIN_CONTEXT)
    error.missing = sum(placed.on(placed.host).total for placed in at(least)) - available
    raise error


def missing_memory(planner: Planner, placement: Placement, context: int | None) -> Memory:
    """Return the bytes that a model needs in addition for all layers on GPUs, all experts in memory and a context of
    `SHORT_CONTEXT`.  A longer default context depends on the free memory, but is not missed.

    ``context``: the requested context; None for the default.
    """
    on_host = placement.on(placement.host)
    groups = on_host.groups if placement.spilled_layers else ()
    spilled = [group for group in groups if group.layers or group.is_offloaded]
    n_tokens = min(planner.model.config.context_length, SHORT_CONTEXT)
    growth = max(0.0, n_tokens / placement.context - 1) if context is None else 0.0
    host = max(0, placement.experts_in_file - placement.pool) + math.ceil(on_host.kv_cache * growth)
    gpus = sum(group.weights + group.kv_cache for group in spilled)
    return Memory(host, gpus + math.ceil((placement.kv_cache - on_host.kv_cache) * growth))


def with_experts_in_file(
    planners: Sequence[Planner], available: int, context: int | None = None
) -> tuple[list[Planner], tuple[Placement, ...]] | None:
    """Return planners and placements, as `fit`, for a model larger than memory whose experts stay in the file.

    The remaining memory caches the experts used most recently, at least one token's experts of one layer.
    None if the model has no experts on the host.
    """
    planner, *drafts = planners
    host_usage = planner.at(MIN_CONTEXT).on(planner.devices[0].name)
    layers = Counter[LayerTag]()
    for weight in (weight for group in host_usage.groups for weight in group.packed if weight.is_expert):
        layers[weight.layer] += weight.n_bytes
    if not layers or not planner.devices[0].backend.pools_experts:
        return None
    n_pools = sum(any(weight.is_expert for weight in group.packed) for group in host_usage.groups)
    least = math.ceil(max(layers.values()) * host_usage.used_experts)
    pooled = replace(planner, expert_bytes=n_pools * least, n_pools=n_pools)
    placements = fit([pooled, *drafts], available, context)
    n_free = available - sum(placed.on(placed.host).total for placed in placements)
    pooled = replace(pooled, expert_bytes=min(layers.total(), placements[0].pool + n_free))
    return [pooled, *drafts], _together([pooled, *drafts], placements[0].context)


def widened(
    planners: Sequence[Planner], placements: tuple[Placement, ...], available: int
) -> tuple[list[Planner], tuple[Placement, ...]]:
    """Return planners and placements for as many parallel sequences as leave memory, up to
    `MAX_DEFAULT_PARALLEL`."""
    context, n_spilled = placements[0].context, placements[0].spilled_layers
    for n in range(MAX_DEFAULT_PARALLEL, 1, -1):
        wider = [replace(p, parallel=n) for p in planners]
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
