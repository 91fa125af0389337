"""From a file to what a `localllm.LLM` is made of: read, checked, placed in memory, and packed for a device."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import resources
from math import prod
from typing import TYPE_CHECKING

from localllm.chat.source import TemplateSource
from localllm.declared_options import LoadOptions
from localllm.devices import Device, open_devices
from localllm.engine.drafting.model import DraftModel
from localllm.engine.engine import Engine
from localllm.engine.runner import ModelRunner
from localllm.errors import LocalLLMError, ModelError, NotEnoughMemoryError, UsageError, path_text
from localllm.gguf import GGUFFile
from localllm.info import ModelInfo, file_type_name
from localllm.kernels.backend import Step, weights_of
from localllm.kernels.cpu.host import available_memory, default_threads, memory_advice
from localllm.kernels.graph import Graph, Weight
from localllm.kernels.split import compile_split, page_size
from localllm.models.registry import Model, find_architecture, read_model
from localllm.placement import DeviceBudget, Placement, Plan, Planner, StepSizes, plan, plan_with_draft
from localllm.progress import of_stage
from localllm.quant.types import BLOCK_SIZES
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
        source = sources.enter_context(_source(options.path, options))
        tokenizer = Tokenizer.from_gguf(source.file)
        template_source, template = _template(source.file, tokenizer, options)
        draft_source = None
        if options.draft_model is not None:
            draft_source = sources.enter_context(_source(options.draft_model, options, is_draft=True))
            _check_vocabulary(draft_source.file, tokenizer)
        devices = _open_devices(options)
        on_failure.callback(_close, devices)
        found = _plan(source, draft_source, devices, options)
        if options.planned is not None:
            options.planned(found)
        draft = None
        try:
            if draft_source is not None and found.draft is not None:
                draft = _load(draft_source, devices, found.draft, options)
            loaded = _load(source, devices, found.placement, options)
        except MemoryError as error:
            _let_go(error)
            raise
        on_failure.pop_all()
    info, draft_model, warnings = loaded.info, None, _notes(devices) + loaded.warnings
    _log_info(info)
    if draft is not None:
        _log_info(draft.info, "draft model ")
        # Steps over one token take as long as reading the weights.
        cost = draft.info.placement.multiplied / max(1, info.placement.multiplied)
        draft_model = DraftModel(draft.runner, expected_cost=cost)
        info, warnings = replace(info, draft=draft.info), warnings + draft.warnings
    engine = Engine(
        loaded.runner,
        draft_model,
        max_waiting=options.max_waiting,
        step_s=options.step_s,
        on_end=partial(_close, devices),
    )
    return Parts(tokenizer, engine, info, template_source, template, warnings)


def plan_file(options: LoadOptions) -> Plan:
    """Where `localllm.load` would put a model, and the bytes that takes; no weight is read.

    Raises:
        As `localllm.load`.
    """
    if options.threads is None:  # as many as loading takes, without measuring how many of them decode
        options = replace(options, threads=default_threads())
    with _source(options.path, options) as source:
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
        model: for the context that was asked for.
    """

    name: str
    file: GGUFFile
    model: Model

    def for_context(self, n_tokens: int) -> Model:
        """The model for sequences of up to so many tokens."""
        model = self.model
        is_long = n_tokens > model.config.original_context
        return model if is_long == model.is_long else read_model(self.file, n_tokens, model.graph.cache_type)


@contextmanager
def _source(
    path: str | os.PathLike[str] | None, options: LoadOptions | None = None, *, is_draft: bool = False
) -> Iterator[_Source]:
    """A file, or that of the demo model, open for as long as the context lasts."""
    with _open_demo() if path is None else GGUFFile.open(_file(path)) as file:
        check_runs(file)
        name = f"the draft model {path_text(file.path)}" if is_draft else "the model"
        context, cache_type = (None, "f16") if options is None else (options.context, options.cache_type)
        yield _Source(name, file, read_model(file, context, cache_type))


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
    find_architecture(file.metadata)
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
    """A model in memory."""

    runner: ModelRunner
    info: ModelInfo
    warnings: tuple[str, ...]


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
    planner = _planner(source, devices, free, options, options.n_gpu_layers)
    draft_placement = None
    if draft_source is None:
        placement = plan(planner, available, options.context)
    else:
        # The number of layers is the model's: of the draft model as many go to a GPU as fit, unless none are to.
        draft = _planner(draft_source, devices, free, options, 0 if options.n_gpu_layers == 0 else None)
        placement, draft_placement = plan_with_draft(planner, draft, available, options.context)
    return Plan(placement, draft_placement, free, _notes(devices) + _notices(source, placement))


def _planner(
    source: _Source,
    devices: Sequence[Device],
    free: Mapping[str, int],
    options: LoadOptions,
    n_gpu_layers: int | None,
) -> Planner:
    budgets = (
        DeviceBudget(
            device.name,
            device.backend.page_size,
            device.backend.footprint,
            0 if device.free_memory is None else free[device.name],
            device.kernels,
            device.note,
        )
        for device in devices
    )
    return Planner(
        source.name,
        source.model,
        tuple(budgets),
        options.parallel,
        n_gpu_layers,
        None if options.tensor_split is None else tuple(options.tensor_split),
    )


def _load(source: _Source, devices: Sequence[Device], placement: Placement, options: LoadOptions) -> _Loaded:
    """Packs a model's weights, and makes its cache."""
    file, model = source.file, source.for_context(placement.context)
    try:
        step = compile_model(model, devices, placement, options)
    except (MemoryError, OSError) as error:
        if isinstance(error, LocalLLMError) or (isinstance(error, OSError) and error.errno != errno.ENOMEM):
            raise
        raise NotEnoughMemoryError(
            f"memory ran out while {path_text(file.path)} was loaded, which takes {placement.total / 1e9:.2f} GB: "
            f"{memory_advice()}, or choose a smaller context or a smaller quantisation of the model"
        ) from error
    file.check_unchanged()
    loaded = placement.loaded(step.weights)
    runner = ModelRunner(step, n_vocab=model.config.n_vocab, context=placement.context)
    return _Loaded(
        runner,
        _info(source, devices, loaded),
        _notices(source, placement) + _larger_weights(source, placement, loaded),
    )


def compile_model(model: Model, devices: Sequence[Device], placement: Placement, options: LoadOptions) -> Step:
    """The step of a model that is placed so."""
    used = [device for device in devices if placement.layers_on(device.name)]
    backends = [device.backend for device in used]
    report, graph = of_stage(options.progress, "weights"), model.graph
    sizes = StepSizes.of(model, placement.context, options.parallel, page_size(backends))
    progress = None if report is None else _Counted(graph, report)
    limits = asdict(sizes)
    if len(used) == 1:
        return backends[0].compile(graph, progress=progress, **limits)
    ranges = [group.layers for group in placement.groups if group.layers]
    return compile_split(backends, ranges, graph, progress=progress, **limits)


class _Counted:
    """Tells the bytes of a graph's weights that were packed so far, and of all of them."""

    def __init__(self, graph: Graph, report: Callable[[int, int], None]) -> None:
        self._report = report
        self._total = sum(_file_bytes(use.weight) for use in weights_of(graph))
        self._packed: dict[Weight, int] = {}

    def __call__(self, weight: Weight) -> None:
        self._packed[weight] = _file_bytes(weight)
        self._report(sum(self._packed.values()), self._total)


def _file_bytes(weight: Weight) -> int:
    """What a tensor takes in its file."""
    *n_rows, n_columns = weight.shape
    return prod(n_rows) * BLOCK_SIZES[weight.type].row_bytes(n_columns)


# -- What is said of it --------------------------------------------------------------------------------------------


def _notes(devices: Sequence[Device]) -> tuple[str, ...]:
    """What is to be said of the devices."""
    return tuple(device.note for device in devices if device.note is not None)


def _notices(source: _Source, placement: Placement) -> tuple[str, ...]:
    """What a plan leaves to be desired."""
    name, config, notices = source.name, source.model.config, list[str]()
    context, trained = placement.context, config.context_length
    if context > trained:
        notices.append(
            f"{name} was trained on {trained:,} tokens of context: with context={context:,} it may lose the thread"
        )
    if n := placement.spilled_layers:
        left = "no layer" if n == config.n_layers else f"not more than {config.n_layers - n} layers"
        notices.append(
            f"the GPU has room for {left} of {name}: {n} of {config.n_layers} run on the {placement.host}, slower; a "
            f"smaller context or quantisation leaves more room, and n_gpu_layers={config.n_layers - n} says that it "
            "is meant so"
        )
    return tuple(notices)


def _larger_weights(source: _Source, placement: Placement, loaded: Placement) -> tuple[str, ...]:
    """That weights took more than was planned, because the format planned on cannot hold their values."""
    planned = {(w.name, w.layer): w for group in placement.groups for w in group.packed}
    larger = [w for group in loaded.groups for w in group.packed if w.n_bytes > planned[w.name, w.layer].n_bytes]
    if not larger:
        return ()
    names = ", ".join(weight.name for weight in larger[:3]) + (", …" if len(larger) > 3 else "")
    before = sum(planned[weight.name, weight.layer].n_bytes for weight in larger)
    return (
        f"{len(larger)} of the tensors of {source.name} ({names}) have scales beyond the range of float16, in "
        f"which {larger[0].file_type} is read: they are kept in {larger[0].kernel_type}, take "
        f"{sum(w.n_bytes for w in larger) / 1e9:.2f} GB instead of {before / 1e9:.2f} GB, and are slower to compute "
        "with",
    )


def _log_info(info: ModelInfo, role: str = "") -> None:
    _log.info("%s%s on %s (%s, %d threads)", role, info.path, info.device, info.kernels, info.threads)
    for group in info.placement.groups:
        formats = ", ".join(f"{format} ({format.n_bytes:,} bytes)" for format in group.formats)
        cache = f", {info.cache_type} KV cache ({group.kv_cache:,} bytes)" if group.kv_cache else ""
        _log.info("%s on %s (%s): %s%s", group.name, group.device, group.kernels, formats, cache)


def _info(source: _Source, devices: Sequence[Device], placement: Placement) -> ModelInfo:
    file, config = source.file, source.model.config
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
