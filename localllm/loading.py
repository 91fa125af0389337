"""From a file to what a `localllm.LLM` is made of: read, checked, placed in memory, and packed for a device."""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING

from localllm.chat.source import TemplateSource
from localllm.checks import text, whole_number
from localllm.devices import Device, open_device
from localllm.engine import Engine
from localllm.errors import LocalLLMError, ModelError, NotEnoughMemoryError, UsageError
from localllm.gguf import GGUFFile
from localllm.info import ModelInfo, file_type_name
from localllm.kernels.cpu.host import available_memory, memory_advice
from localllm.kernels.ops import CACHE_TYPES, CacheType
from localllm.models.config import ModelConfig, read_config
from localllm.models.registry import builder, load_model
from localllm.models.weights import LoadedWeight
from localllm.placement import Demand, Placement, plan, plan_with_draft
from localllm.progress import LoadProgress, of_stage
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
    context: int | None
    threads: int | None
    isa: str | None
    parallel: int
    cache_type: CacheType
    chat_template: str | None
    draft_model: str | os.PathLike[str] | None
    progress: LoadProgress | None

    def __post_init__(self) -> None:
        text("device", self.device)
        for name in ("isa", "chat_template"):
            if (value := getattr(self, name)) is not None:
                text(name, value)
        for name in ("path", "draft_model"):
            if (value := getattr(self, name)) is not None and not isinstance(value, str | os.PathLike):
                raise UsageError(f"{name} is {value!r:.80}, but must be the path of a GGUF file, as str or Path")
        for name in ("context", "threads", "parallel"):
            if (value := getattr(self, name)) is not None or name == "parallel":
                object.__setattr__(self, name, whole_number(name, value, 1))
        if not isinstance(self.cache_type, str) or self.cache_type not in CACHE_TYPES:
            types = ", ".join(map(repr, CACHE_TYPES))
            raise UsageError(f"cache_type is {self.cache_type!r:.80}, but must be one of {types}")
        if self.progress is not None and not callable(self.progress):
            raise UsageError(f"progress is {self.progress!r:.80}, but must be a function of a stage and two numbers")


@dataclass(frozen=True)
class Parts:
    """What a `localllm.LLM` is made of.

    Attributes:
        template_source: of the chat template.
        template: the same compiled, if it was given and not the file's.
        draft_engine: that of the draft model, if there is one.
        end_threads: ends the device's threads; done by itself when nobody holds the engine any more.
        warnings: what whoever asked for the model should be told.
    """

    tokenizer: Tokenizer
    engine: Engine
    info: ModelInfo
    template_source: TemplateSource
    template: ChatTemplate | None
    draft_engine: Engine | None
    end_threads: Callable[[], object]
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
        device = _open_device(options)
        on_failure.callback(device.close)
        loaded, draft = _load_both(source, draft_source, device, options)
        on_failure.pop_all()
    _log_info(loaded.info)
    if draft is not None:
        _log_info(draft.info, "draft model ")
    return Parts(
        tokenizer,
        loaded.engine,
        loaded.info,
        template_source,
        template,
        draft_engine=None if draft is None else draft.engine,
        # A stream may outlive its LLM: the engine, which both hold, is the last to need the threads.
        end_threads=weakref.finalize(loaded.engine, device.close),
        warnings=_warnings(loaded) + (() if draft is None else _warnings(draft)),
    )


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
    with _open_demo() if path is None else GGUFFile.open(path) as file:
        builder(file.metadata)  # raises for an architecture that is not supported
        if not any(name.startswith("blk.") for name in file.tensors):
            raise ModelError(
                f"{file.path} holds only a vocabulary, no weights: choose the file of the whole model, which is "
                "larger"
            )
        name = f"the draft model {file.path}" if is_draft else "the model"
        yield _Source(name, file, read_config(file.metadata, file.tensors))


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
            f"the draft model {draft.path} has another vocabulary than the model: {difference}; choose a smaller "
            "model of the same family"
        )


# -- Placing and packing -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loaded:
    """A model in memory, and what its messages call it."""

    name: str
    engine: Engine
    info: ModelInfo
    weights: tuple[LoadedWeight, ...]


def _open_device(options: LoadOptions) -> Device:
    progress = of_stage(options.progress, "kernels")
    return open_device(options.device, threads=options.threads, isa=options.isa, progress=progress)


def _load_both(
    source: _Source, draft_source: _Source | None, device: Device, options: LoadOptions
) -> tuple[_Loaded, _Loaded | None]:
    """The model, and the one that drafts for it on the same threads, if any; nothing is loaded unless both fit."""
    available = available_memory()
    demand = _demand(source, device, options)
    if draft_source is None:
        placement = plan(demand, available, options.context)
        return _load(source, device, placement, options, available - placement.total), None
    placement, draft_placement = plan_with_draft(
        demand, _demand(draft_source, device, options), available, options.context
    )
    spare_bytes = available - placement.total - draft_placement.total
    draft = _load(draft_source, device, draft_placement, options, spare_bytes)
    spare_bytes -= sum(weight.unplanned_bytes for weight in draft.weights)
    loaded = _load(source, device, placement, options, spare_bytes)
    return replace(loaded, info=replace(loaded.info, draft=draft.info)), draft


def _demand(source: _Source, device: Device, options: LoadOptions) -> Demand:
    return Demand.of(
        source.config,
        source.file.tensors,
        device.ops.packed_bytes,
        device.ops.cache_bytes,
        device=device.name,
        page_size=device.ops.page_size,
        parallel=options.parallel,
        cache_type=options.cache_type,
        name=source.name,
    )


def _load(source: _Source, device: Device, placement: Placement, options: LoadOptions, spare_bytes: int) -> _Loaded:
    """Packs a model's weights, which may take ``spare_bytes`` beyond the plan, and makes its cache."""
    file, ops, context = source.file, device.ops, placement.context
    progress = of_stage(options.progress, "weights")
    try:
        model = load_model(file, ops, source.config, context, spare_bytes=spare_bytes, progress=progress)
        engine = Engine(model, ops, context=context, parallel=options.parallel, cache_type=options.cache_type)
    except (MemoryError, OSError) as error:
        if isinstance(error, LocalLLMError) or (isinstance(error, OSError) and error.errno != errno.ENOMEM):
            raise
        raise NotEnoughMemoryError(
            f"memory ran out while {file.path} was loaded, which takes {placement.total / 1e9:.2f} GB: "
            f"{memory_advice()}, or choose a smaller context or a smaller quantisation of the model"
        ) from error
    info = _info(source, device, placement.loaded(model.weights))
    file.check_unchanged()
    return _Loaded(source.name, engine, info, model.weights)


# -- What is said of it --------------------------------------------------------------------------------------------


def _warnings(model: _Loaded) -> tuple[str, ...]:
    said = (_long_context(model), _widened(model))
    return tuple(message for message in said if message is not None)


def _long_context(model: _Loaded) -> str | None:
    context, trained = model.info.context, model.info.trained_context
    if context <= trained:
        return None
    return (
        f"{model.name} was trained on {trained:,} tokens of context: with context={context:,} it may lose the thread"
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
        _log.info("%s on %s: %s%s", group.name, group.device, formats, cache)


def _info(source: _Source, device: Device, placement: Placement) -> ModelInfo:
    file, config = source.file, source.config
    name = file.metadata.get("general.name")
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
        device=device.name,
        kernels=device.kernels,
        threads=device.threads,
        decode_threads=device.decode_threads,
        placement=placement,
        config=config,
    )
