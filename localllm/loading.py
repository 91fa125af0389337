"""From a file to what a `localllm.LLM` is made of: read, checked, placed in memory, and packed for a device."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING

from localllm.chat.source import TemplateSource
from localllm.checks import proportions, seconds, text, whole_number
from localllm.devices import Device, open_devices
from localllm.engine.drafting.model import DraftModel
from localllm.engine.engine import MAX_WAITING, STEP_S, Engine
from localllm.engine.runner import ModelRunner
from localllm.errors import LocalLLMError, ModelError, NotEnoughMemoryError, UsageError, path_text
from localllm.gguf import GGUFFile
from localllm.info import ModelInfo, file_type_name
from localllm.kernels.cpu.host import available_memory, memory_advice
from localllm.kernels.ops import CACHE_TYPES, CacheType, Ops
from localllm.models.config import ModelConfig, read_config
from localllm.models.registry import builder, load_model
from localllm.models.weights import LoadedWeight
from localllm.placement import Demand, DeviceSizes, Placement, Plan, plan, plan_with_draft
from localllm.progress import LoadPlan, LoadProgress, of_stage
from localllm.tokenizer import Tokenizer
from localllm.tokenizer.vocabulary import Vocabulary

# Those that chat import it where they do: jinja2 takes a good part of the time to the first token of those that
# do not.
if TYPE_CHECKING:
    from localllm.chat import ChatTemplate

#: What the warning of a long context is known by, for `warnings.filterwarnings`.
LONG_CONTEXT = ".* was trained on [0-9,]+ tokens of context: "

_log = logging.getLogger("localllm")


@dataclass(frozen=True)
class LoadOptions:
    """The arguments of `localllm.load`, which describes them, checked.

    Raises:
        UsageError: one is of the wrong type or out of range.
    """

    path: str | os.PathLike[str] | None
    device: str
    n_gpu_layers: int | None
    tensor_split: Sequence[float] | None
    context: int | None
    threads: int | None
    isa: str | None
    parallel: int
    cache_type: CacheType
    chat_template: str | None
    draft_model: str | os.PathLike[str] | None
    progress: LoadProgress | None
    planned: LoadPlan | None
    max_waiting: int = MAX_WAITING
    step_s: float = STEP_S

    def __post_init__(self) -> None:
        text("device", self.device)
        for name in ("isa", "chat_template"):
            if (value := getattr(self, name)) is not None:
                text(name, value)
        for name in ("path", "draft_model"):
            if (value := getattr(self, name)) is not None and not isinstance(value, str | os.PathLike):
                raise UsageError(f"{name} is {value!r:.80}, but must be the path of a GGUF file, as str or Path")
        for name in ("context", "threads", "parallel", "max_waiting"):
            if (value := getattr(self, name)) is not None or name in ("parallel", "max_waiting"):
                object.__setattr__(self, name, whole_number(name, value, 1))
        object.__setattr__(self, "step_s", seconds("step_s", self.step_s))
        if self.n_gpu_layers is not None:
            object.__setattr__(self, "n_gpu_layers", whole_number("n_gpu_layers", self.n_gpu_layers, 0))
        if self.tensor_split is not None:
            object.__setattr__(self, "tensor_split", proportions("tensor_split", self.tensor_split))
        if not isinstance(self.cache_type, str) or self.cache_type not in CACHE_TYPES:
            types = ", ".join(map(repr, CACHE_TYPES))
            raise UsageError(f"cache_type is {self.cache_type!r:.80}, but must be one of {types}")
        if self.progress is not None and not callable(self.progress):
            raise UsageError(f"progress is {self.progress!r:.80}, but must be a function of a stage and two numbers")
        if self.planned is not None and not callable(self.planned):
            raise UsageError(f"planned is {self.planned!r:.80}, but must be a function of a plan")


@dataclass(frozen=True)
class Parts:
    """What a `localllm.LLM` is made of.

    Attributes:
        template_source: of the chat template.
        template: the same compiled, if it was given and not the file's.
        warnings: what whoever asked for the model should be told.
    """

    tokenizer: Tokenizer
    engine: Engine
    info: ModelInfo
    template_source: TemplateSource
    template: ChatTemplate | None
    warnings: tuple[str, ...]


def load_parts(options: LoadOptions) -> Parts:
    """Loads what `localllm.load` was asked for.

    Raises:
        As `localllm.load`.
    """
    with ExitStack() as sources, ExitStack() as on_failure:
        source = sources.enter_context(_source(options.path))
        tokenizer = Tokenizer.from_gguf(source.file)
        template_source, template = _template(source.file, tokenizer, options)
        draft_source = None
        if options.draft_model is not None:
            draft_source = sources.enter_context(_source(options.draft_model, is_draft=True))
            _check_vocabulary(draft_source.file, tokenizer)
        devices = _open_devices(options)
        on_failure.callback(_close, devices)
        found = _plan(source, draft_source, devices, options)
        if options.planned is not None:
            options.planned(found)
        try:
            loaded, draft = _load_both(source, draft_source, devices, (found.placement, found.draft), options)
        except MemoryError as error:
            _let_go(error)
            raise
        on_failure.pop_all()
    _log_info(loaded.info)
    if draft is not None:
        _log_info(draft.info, "draft model ")
    draft_model = None
    if draft is not None:
        # Steps over one token take as long as reading the weights.
        cost = draft.info.placement.multiplied / max(1, loaded.info.placement.multiplied)
        draft_model = DraftModel(draft.runner, expected_cost=cost)
    return Parts(
        tokenizer,
        Engine(
            loaded.runner,
            draft_model,
            max_waiting=options.max_waiting,
            step_s=options.step_s,
            on_end=partial(_close, devices),
        ),
        loaded.info,
        template_source,
        template,
        warnings=_notes(devices) + _warnings(loaded) + (() if draft is None else _warnings(draft)),
    )


def plan_file(options: LoadOptions) -> Plan:
    """Where `localllm.load` would put a model; no weight is read.

    Raises:
        As `localllm.load`.
    """
    with _source(options.path) as source:
        devices = _open_devices(options)
        try:
            return _plan(source, None, devices, options)
        finally:
            _close(devices)


def _let_go(error: BaseException) -> None:
    """Drops the frames that an error came through: what was loaded shall not stay for as long as it is handled."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


# -- Reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """The open file of a model that localllm runs.

    Attributes:
        name: "the model", or "the draft model" with its path.
        config: its hyper-parameters.
    """

    name: str
    file: GGUFFile
    config: ModelConfig


@contextmanager
def _source(path: str | os.PathLike[str] | None, *, is_draft: bool = False) -> Iterator[_Source]:
    """A file, or that of the demo model, open for as long as the context lasts."""
    with _open_demo() if path is None else GGUFFile.open(_file(path)) as file:
        check_runs(file)
        name = f"the draft model {path_text(file.path)}" if is_draft else "the model"
        yield _Source(name, file, read_config(file.metadata, file.tensors))


def check_file(path: str | os.PathLike[str]) -> None:
    """Reads a model's header, and no weights, to tell whether localllm runs it.

    Raises:
        ModelNotFoundError, GGUFError, UnsupportedArchitectureError, ModelError: it cannot be loaded.
    """
    with _source(path):
        pass


def check_runs(file: GGUFFile) -> None:
    """Raises:
    UnsupportedArchitectureError, ModelError: it holds no model that localllm runs.
    """
    builder(file.metadata)
    if not any(name.startswith("blk.") for name in file.tensors):
        raise ModelError(
            f"{path_text(file.path)} holds only a vocabulary, no weights: choose the file of the whole model, which "
            "is larger"
        )


def _file(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The file of a name; one on the hub is a str, and no path that exists."""
    if not isinstance(path, str) or os.path.lexists(path):
        return path
    # Imported here: most name a file.
    from localllm.library.find import find

    return find(path)


def _open_demo() -> GGUFFile:
    demo = resources.files("localllm") / "data" / "demo.gguf"
    if not demo.is_file():
        raise UsageError("this installation of localllm has no demo model: name a GGUF file")
    with resources.as_file(demo) as path:
        return GGUFFile.open(path)


def _template(
    file: GGUFFile, tokenizer: Tokenizer, options: LoadOptions
) -> tuple[TemplateSource, ChatTemplate | None]:
    """The chat template: the file's, compiled when it is used; or the one given, compiled now to be checked."""
    if options.chat_template is None:
        return TemplateSource.of_file(file), None
    source = TemplateSource(options.chat_template)
    return source, compile_template(source, tokenizer)


def compile_template(source: TemplateSource, tokenizer: Tokenizer) -> ChatTemplate:
    """A chat template for the texts of this tokenizer's tokens.

    Raises:
        TemplateError: it is not valid.
    """
    from localllm.chat import ChatTemplate

    return ChatTemplate.compile(source, tokenizer)


def _check_vocabulary(draft: GGUFFile, tokenizer: Tokenizer) -> None:
    difference = tokenizer.difference(Vocabulary.from_gguf(draft))
    if difference is not None:
        raise UsageError(
            f"the draft model {path_text(draft.path)} has another vocabulary than the model: {difference}; choose a "
            "smaller model of the same family"
        )


# -- Placing and packing -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loaded:
    """A model in memory, and what its messages call it."""

    name: str
    runner: ModelRunner
    info: ModelInfo
    weights: tuple[LoadedWeight, ...]


def _open_devices(options: LoadOptions) -> tuple[Device, ...]:
    progress = of_stage(options.progress, "kernels")
    return open_devices(options.device, threads=options.threads, isa=options.isa, progress=progress)


def _close(devices: Sequence[Device]) -> None:
    for device in devices:
        device.close()


def _plan(source: _Source, draft_source: _Source | None, devices: Sequence[Device], options: LoadOptions) -> Plan:
    """Where the model goes, and the one that drafts for it, if any."""
    available = available_memory()
    free = {each.name: available if each.free_memory is None else each.free_memory() for each in devices}
    demand = _demand(source, devices, free, options, options.n_gpu_layers)
    draft_placement = None
    said = _notes(devices)
    if draft_source is None:
        placement = plan(demand, available, options.context)
    else:
        # The number of layers is the model's: of the draft model as many go to a GPU as fit, unless none are to.
        draft = _demand(draft_source, devices, free, options, 0 if options.n_gpu_layers == 0 else None)
        placement, draft_placement = plan_with_draft(demand, draft, available, options.context)
    said += _said_of(source.name, source.config, placement)
    return Plan(placement, draft_placement, free, said)


def _demand(
    source: _Source,
    devices: Sequence[Device],
    free: Mapping[str, int],
    options: LoadOptions,
    n_gpu_layers: int | None,
) -> Demand:
    return Demand.of(
        source.config,
        source.file.tensors,
        [
            DeviceSizes(
                device.name,
                device.ops.packed_bytes,
                device.ops.cache_bytes,
                device.ops.page_size,
                0 if device.free_memory is None else free[device.name],
                device.kernels,
                device.ops.step_bytes,
                device.note,
            )
            for device in devices
        ],
        parallel=options.parallel,
        cache_type=options.cache_type,
        name=source.name,
        n_gpu_layers=n_gpu_layers,
        tensor_split=None if options.tensor_split is None else tuple(options.tensor_split),
    )


def _load_both(
    source: _Source,
    draft_source: _Source | None,
    devices: Sequence[Device],
    placements: tuple[Placement, Placement | None],
    options: LoadOptions,
) -> tuple[_Loaded, _Loaded | None]:
    """The model, and the one that drafts for it on the same threads, if any."""
    placement, draft_placement = placements
    spare_bytes = _spare_bytes(devices, [each for each in placements if each is not None])
    if draft_source is None or draft_placement is None:
        return _load(source, devices, placement, options, spare_bytes), None
    draft = _load(draft_source, devices, draft_placement, options, spare_bytes)
    spare_bytes -= sum(weight.unplanned_bytes for weight in draft.weights)
    loaded = _load(source, devices, placement, options, spare_bytes)
    return replace(loaded, info=replace(loaded.info, draft=draft.info)), draft


def _spare_bytes(devices: Sequence[Device], placements: Sequence[Placement]) -> int:
    """What weights may take beyond the plan, on whichever device: what the fullest one has left."""
    return min(
        (available_memory() if device.free_memory is None else device.free_memory())
        - sum(placement.on(device.name).total for placement in placements)
        for device in devices
        if any(device.name in placement.devices for placement in placements)
    )


def _ops(devices: Sequence[Device], placement: Placement) -> Ops:
    """What a model placed so runs on."""
    parts = [(device.ops, n) for device in devices if (n := placement.layers_on(device.name))]
    if len(parts) == 1:
        return parts[0][0]
    # Imported here: few models are split.
    from localllm.kernels.split import SplitOps

    return SplitOps(parts)


def _load(
    source: _Source, devices: Sequence[Device], placement: Placement, options: LoadOptions, spare_bytes: int
) -> _Loaded:
    """Packs a model's weights, which may take ``spare_bytes`` beyond the plan, and makes its cache."""
    file, ops, context = source.file, _ops(devices, placement), placement.context
    progress = of_stage(options.progress, "weights")
    try:
        model = load_model(file, ops, source.config, context, spare_bytes=spare_bytes, progress=progress)
        runner = ModelRunner(model, ops, context=context, parallel=options.parallel, cache_type=options.cache_type)
    except (MemoryError, OSError) as error:
        if isinstance(error, LocalLLMError) or (isinstance(error, OSError) and error.errno != errno.ENOMEM):
            raise
        raise NotEnoughMemoryError(
            f"memory ran out while {path_text(file.path)} was loaded, which takes {placement.total / 1e9:.2f} GB: "
            f"{memory_advice()}, or choose a smaller context or a smaller quantisation of the model"
        ) from error
    info = _info(source, devices, placement.loaded(model.weights))
    file.check_unchanged()
    return _Loaded(source.name, runner, info, model.weights)


# -- What is said of it --------------------------------------------------------------------------------------------


def _notes(devices: Sequence[Device]) -> tuple[str, ...]:
    """What is to be said of the devices."""
    return tuple(device.note for device in devices if device.note is not None)


def _warnings(model: _Loaded) -> tuple[str, ...]:
    widened = _widened(model)
    said = _said_of(model.name, model.info.config, model.info.placement)
    return said if widened is None else (*said, widened)


def _said_of(name: str, config: ModelConfig, placement: Placement) -> tuple[str, ...]:
    """What a plan leaves to be desired."""
    said = (_long_context(name, config, placement), _left_over(name, config, placement))
    return tuple(message for message in said if message is not None)


def _long_context(name: str, config: ModelConfig, placement: Placement) -> str | None:
    context, trained = placement.context, config.context_length
    if context <= trained:
        return None
    return f"{name} was trained on {trained:,} tokens of context: with context={context:,} it may lose the thread"


def _left_over(name: str, config: ModelConfig, placement: Placement) -> str | None:
    n = placement.left_over
    if not n:
        return None
    left = "no layer" if n == config.n_layers else f"not more than {config.n_layers - n} layers"
    return (
        f"the GPU has room for {left} of {name}: {n} of {config.n_layers} run on the {placement.host}, slower; a "
        f"smaller context or quantisation leaves more room, and n_gpu_layers={config.n_layers - n} says that it is "
        "meant so"
    )


def _widened(model: _Loaded) -> str | None:
    widened = [weight for weight in model.weights if weight.unplanned_bytes]
    if not widened:
        return None
    names = ", ".join(weight.name for weight in widened[:3]) + (", …" if len(widened) > 3 else "")
    return (
        f"{len(widened)} of the tensors of {model.name} ({names}) have scales beyond the range of float16, in "
        f"which {widened[0].file_type} is read: they are kept in {widened[0].kernel_type}, take "
        f"{sum(w.n_bytes for w in widened) / 1e9:.2f} GB instead of "
        f"{sum(w.planned_bytes for w in widened) / 1e9:.2f} GB, and are slower to compute with"
    )


def _log_info(info: ModelInfo, role: str = "") -> None:
    _log.info("%s%s on %s (%s, %d threads)", role, info.path, info.device, info.kernels, info.threads)
    for group in info.placement.groups:
        formats = ", ".join(f"{format} ({format.n_bytes:,} bytes)" for format in group.formats)
        cache = f", {info.cache_type} KV cache ({group.kv_cache:,} bytes)" if group.kv_cache else ""
        _log.info("%s on %s (%s): %s%s", group.name, group.device, group.kernels, formats, cache)


def _info(source: _Source, devices: Sequence[Device], placement: Placement) -> ModelInfo:
    file, config = source.file, source.config
    name = file.metadata.get("general.name")
    used = [device for device in devices if device.name in placement.devices]
    return ModelInfo(
        path=file.path,
        name=name if isinstance(name, str) else None,
        architecture=config.architecture,
        n_parameters=sum(tensor.n_values for tensor in file.tensors.values()),
        file_type=file_type_name(file.metadata, file.tensors.values()),
        n_bytes=sum(tensor.n_bytes for tensor in file.tensors.values()),
        n_vocab=config.n_vocab,
        n_layers=config.n_layers,
        trained_context=config.context_length,
        context=placement.context,
        device=" + ".join(device.name for device in used),
        kernels=" + ".join(dict.fromkeys(device.kernels for device in used)),
        threads=used[0].threads,
        decode_threads=used[0].decode_threads,
        placement=placement,
        config=config,
    )
