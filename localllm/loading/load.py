"""Loading: read a file, check it, place the model in memory, and pack its weights for a device.

options ─▶ file ─▶ graph ─▶ `Planner.at`: placement, lowered ─▶ `Planner.load`: step ─▶ runner ─▶ engine
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import resources
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from localllm.chat.built_in_templates import MESSAGES, built_in
from localllm.chat.template_source import TemplateSource
from localllm.engine.block_store import BlockStore, open_store
from localllm.engine.drafting.assistant import AssistantModel
from localllm.engine.drafting.block import (
    BlockModel,
    ChooseCandidates,
    ChooseDrafts,
    ChooseWithBias,
    choose_likeliest,
)
from localllm.engine.drafting.model import DraftModel
from localllm.engine.drafting.mtp import MTPModel
from localllm.engine.engine import Engine, EngineLoop
from localllm.engine.runner import ModelRunner
from localllm.errors import (
    Argument,
    LocalLLMError,
    ModelError,
    NotEnoughMemoryError,
    Notice,
    UsageError,
    path_text,
    warn,
)
from localllm.generation.embedding import Embedder
from localllm.gguf import GGUFFile
from localllm.kernels.backend import Progress, weights_of
from localllm.kernels.cpu.host import available_memory, default_threads, memory_advice
from localllm.kernels.graph import Graph, LayerTag, Tensor, Weight
from localllm.loading.bandwidths import measure
from localllm.loading.devices import Device, open_devices, split_by_rows
from localllm.loading.model_info import ModelInfo, file_type_name
from localllm.loading.overrides import NO_OVERRIDES, Overrides
from localllm.loading.placement import Placement, Plan, Planner, fit, missing_memory, widened, with_experts_in_file
from localllm.loading.planned_memory import PlannedMemory, unused_memory
from localllm.loading.progress import of_stage
from localllm.loading.projector_files import find_projectors
from localllm.models.adapters import Adapter, with_adapters
from localllm.models.config import ModelMetadata, read_general
from localllm.models.mtp import hidden_norm, hidden_states
from localllm.models.registry import (
    ARCHITECTURES,
    DRAFTERS,
    Model,
    find_architecture,
    has_block,
    has_only_block,
    read_model,
)
from localllm.models.weights import Weights, floats
from localllm.options.declared import LoadOptions, Sampling, declared
from localllm.quant.lut import block_size
from localllm.tokenizer import Tokenizer
from localllm.tokenizer.vocabulary import Vocabulary

# Only functions for chat import jinja2: the import would delay the first token of other programs.
if TYPE_CHECKING:
    from localllm.chat import ChatTemplate
    from localllm.loading.media_encoder import MediaEncoder
    from localllm.models.dflash import DraftBlock

#: Pattern of the warning of a long context, for `warnings.filterwarnings`.
LONG_CONTEXT = ".* was trained on [0-9,]+ tokens of context: "

#: Bytes of memory for the system and other programs if the experts of a model take all other memory.
RESERVE = 1 << 30

_log = logging.getLogger("localllm")


@dataclass(frozen=True)
class LoadedModel:
    tokenizer: Tokenizer
    engine: Engine
    embedder: Embedder | None  # converts the engine's vectors to embeddings of texts; None without pooling
    encoder: MediaEncoder | None  # encoder of images and audio
    options: LoadOptions
    info: ModelInfo
    template_source: TemplateSource  # source of the chat template
    defaults: Mapping[str, Any]  # sampling settings of the file
    template: ChatTemplate | None  # compiled template if it came from the options, not from the file
    warnings: tuple[Notice, ...]  # to show to the user


def load_file(options: LoadOptions) -> LoadedModel:
    with ExitStack() as files, ExitStack() as on_failure:
        file = files.enter_context(_open(options.path))
        encoder = _find_encoder(options, file)
        if encoder is not None:
            on_failure.callback(encoder.close)
        sources = [_read(file, options, "the model", adapts=True, sees=encoder is not None)]
        caches = sources[0].model.pooling is None and sources[0].model.diffusion is None
        store = _open_store(options) if caches else None
        if store is not None:
            on_failure.callback(store.close)
        reading = files.enter_context(_TokenizerReader(file))
        template_source, template = _template_source(sources[0]), None
        defaults = _defaults(sources[0])
        if options.chat_template is not None:  # compiled now to report errors before the weights are loaded
            template_source = TemplateSource(built_in(options.chat_template) or options.chat_template)
            template = compile_template(template_source, reading.result())
        if options.draft_model is not None:
            draft = files.enter_context(GGUFFile.open(options.draft_model))
            sources.append(_read_draft(draft, sources[0], options))
            _check_vocabulary(draft, reading.result())
        devices = _open_devices(options)
        on_failure.callback(_close, devices)
        _check_drafts(sources, devices)
        sources, planners, plan = _plan_with_block(sources, devices, options, encoder)
        if options.planned is not None:
            options.planned(plan)
        loaded = list[tuple[ModelRunner, ModelInfo, tuple[Notice, ...]]]()
        try:
            for source, planner, placement in zip(sources, planners, plan.placements, strict=True):
                if source.model.graph.caches_of not in (None, sources[0].model.graph):  # the target was read again
                    planner = replace(planner, model=source.read_again(placement.context), _footprints={})
                loaded.append(_load(source, planner, placement, options, reading.check))
        except MemoryError as error:
            _drop_tracebacks(error)
            raise
        tokenizer = reading.result()
        tokenizer.warn_if_guessed()
        pooling = sources[0].model.pooling
        embedder = None if pooling is None else Embedder(pooling, sources[0].file.metadata)
        make_draft_model = _draft_model(sources, loaded[0][0])
        on_failure.pop_all()
    runner, info, warnings = loaded[0]
    info = replace(info, encoder=plan.encoder)
    _log_info(info)
    drafting: DraftModel | None = None
    warnings = _device_warnings(devices) + warnings
    for draft_runner, draft_info, notices in loaded[1:]:
        # A step of one token takes as long as reading the weights.
        cost = draft_info.placement.multiplied / max(1, info.placement.multiplied)
        drafting = make_draft_model(draft_runner, expected_cost=cost)
        draft_info = _draft_info(draft_info, sources)
        _log_info(draft_info, "draft model ")
        info, warnings = replace(info, draft=draft_info), warnings + notices
    memory = PlannedMemory([info.placement, *([] if info.draft is None else [info.draft.placement])])
    loop = EngineLoop(
        runner,
        drafting,
        encoder,
        step_s=options.step_s,
        store=store,
        label_of=partial(_cache_label, info, sources[0].adapters),
        is_scoped=options.cache_scope == "key",
        on_end=partial(_close, (*devices, memory) if encoder is None else (encoder, *devices, memory)),
    )
    if store is not None and (notice := store.take_notice()):
        warnings += (Notice(notice),)
    engine = Engine(loop, max_waiting=options.max_waiting)
    return LoadedModel(
        tokenizer, engine, embedder, encoder, options, info, template_source, defaults, template, warnings
    )


def _check_vocabulary(draft: GGUFFile, tokenizer: Tokenizer) -> None:
    """Raise UsageError if a draft model does not have the tokens of the model."""
    if (difference := tokenizer.difference(Vocabulary.from_gguf(draft))) is not None:
        raise UsageError(
            f"the draft model {path_text(draft.path)} has another vocabulary than the model: {difference}; choose a "
            "smaller model of the same family"
        )


def _open_store(options: LoadOptions) -> BlockStore | None:
    if options.prompt_cache is None:
        return None
    size = options.prompt_cache_size
    return open_store(Path(options.prompt_cache), None if size is None else round(size * 1e9))


def _draft_info(info: ModelInfo, sources: Sequence[_ModelSource]) -> ModelInfo:
    """Return the information of a draft model. The parameters of an MTP block do not include the rest of the file."""
    if sources[1].file is not sources[0].file:
        return info
    return replace(info, n_parameters=sum(prod(use.weight.shape) for use in weights_of(sources[1].model.graph)))


def _cache_label(info: ModelInfo, adapters: Sequence[Adapter], tree: Any) -> str | None:
    """Return the label of the blocks on disk (`localllm.engine.records`) of requests with this `Request.tree`.

    None if the requests edit values: their blocks are not stored.
    """
    scope, scales, edits = tree if tree and isinstance(tree[0], str) else ("", tree, None)
    if edits is not None:
        return None
    used = [(adapter.fingerprint, scale) for adapter, scale in zip(adapters, scales, strict=False) if scale]
    return json.dumps([info.title, info.cache_type, info.prompts_key, scope, used])


def _defaults(source: _ModelSource) -> dict[str, Any]:
    """Return a model's sampling settings, from the file and from the release of a model that writes by diffusion."""
    in_file = sampling_defaults(source.file.metadata)
    if (diffusion := source.model.diffusion) is None:
        return in_file
    return {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **diffusion.sampling, **in_file}


def sampling_defaults(metadata: Mapping[str, object]) -> dict[str, Any]:
    """Return a file's sampling settings by their names in `localllm.Sampling`, without those out of range."""
    defaults = {}
    for name, option in declared(Sampling).items():
        value = metadata.get(f"general.sampling.{option.key}") if option.key else None
        # Rounds a float32 to the decimal number that was written.
        value = option.kind.read(float(f"{value:.6g}") if isinstance(value, float) else value)
        if value is not None:
            defaults[name] = value
    return defaults


def plan_file(options: LoadOptions) -> Plan:
    """Return the plan of `localllm.load`: devices and bytes. Reads no weights."""
    if options.threads is None:  # the default of loading, without measuring the threads for decode
        options = replace(options, threads=default_threads())
    with _open(options.path) as file, ExitStack() as at_end:
        encoder = _find_encoder(options, file)
        if encoder is not None:
            at_end.callback(encoder.close)
        sources = [_read(file, options, "the model", adapts=True, sees=encoder is not None)]
        if options.draft_model is not None:
            draft = at_end.enter_context(GGUFFile.open(options.draft_model))
            sources.append(_read_draft(draft, sources[0], options))
        devices = _open_devices(options)
        at_end.callback(_close, devices)
        _check_drafts(sources, devices)
        return _plan_with_block(sources, devices, options, encoder)[2]


def _drop_tracebacks(error: BaseException) -> None:
    """Remove the tracebacks of an error, whose frames would keep the loaded weights in memory."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__


# -- Reading -------------------------------------------------------------------------------------------------------


@contextmanager
def _open(path: str | os.PathLike[str] | None) -> Iterator[GGUFFile]:
    """Yield the opened file of a supported model, or the demo model if ``path`` is None."""
    if path is None:
        demo = resources.files("localllm") / "data" / "demo.gguf"
        if not demo.is_file():
            raise UsageError("this installation of localllm has no demo model: name a GGUF file")
        with resources.as_file(demo) as path, GGUFFile.open(path) as file:
            yield file
        return
    with GGUFFile.open(path) as file:
        check_runs(file)
        yield file


@dataclass
class _ModelSource:
    """A model before it is loaded."""

    name: str  # name in messages
    file: GGUFFile
    read: Callable[[int | None], Model]  # returns the model for a context
    model: Model  # the model for the requested context
    hidden: Tensor | None = None  # tensor that `ModelRunner.hidden` reads; None if no draft model reads it
    adapters: Sequence[Adapter] = ()
    watch: Callable[[Graph], Tensor] = hidden_states  # returns that tensor of a graph, and marks it as watched

    def read_again(self, context: int) -> Model:
        self.model = self.read(context)
        self.hidden = None if self.hidden is None else self.watch(self.model.graph)
        return self.model


def _read(
    file: GGUFFile,
    options: LoadOptions,
    name: str,
    *,
    is_block: bool = False,
    adapts: bool = False,
    sees: bool = False,
    target: Callable[[], Graph | None] = lambda: None,
) -> _ModelSource:
    adapters = list[Adapter]()
    if adapts and options.adapters:
        from localllm.loading.adapters import read_adapter  # imported here: it imports what converts checkpoints

        adapters = [read_adapter(key, Path(path), file) for key, path in options.adapters.items()]

    def read(context: int | None) -> Model:
        model = read_model(file, context, options.cache_type, is_block=is_block, sees=sees, target=target())
        if adapters and model.graph.prompt is not None:
            raise UsageError(Argument("adapters"), " are not used by a model with an encoder of prompts: omit them")
        return replace(model, graph=with_adapters(model.graph, adapters)) if adapters else model

    return _ModelSource(name, file, read, read(options.context), adapters=adapters)


def _read_draft(file: GGUFFile, target: _ModelSource, options: LoadOptions) -> _ModelSource:
    """Return a draft model: independent, or reading the caches or the hidden states of the target model."""
    if target.model.diffusion is not None:
        raise UsageError(Argument("draft_model"), " is not used by a model that writes by diffusion: omit it")
    name = f"the draft model {path_text(file.path)}"
    architecture = file.metadata.get("general.architecture")
    if architecture not in DRAFTERS and has_only_block(file):
        if target.model.config.architecture != architecture or target.model.config.n_embd != _width(file):
            raise UsageError(f"{name} drafts for another model: choose the drafter that was made for this model")
        source = _read(file, options, name, is_block=True)
        for each in (target, source):
            each.hidden = hidden_states(each.model.graph)
        return source
    if architecture not in DRAFTERS:
        check_runs(file)
        return _read(file, options, name)
    if architecture in ("eagle3", "dflash"):

        def watch(graph: Graph) -> Tensor:
            """Return the tensor that the drafter reads of the model. Reading the drafter marks it in the graph."""
            _read(file, options, name, target=lambda: graph)
            return _watched(graph)

        target.hidden, target.watch = watch(target.model.graph), watch
        source = _read(file, options, name, target=lambda: target.model.graph)
        if architecture == "eagle3":
            source.hidden = hidden_states(source.model.graph)
        elif source.model.graph.watched:
            source.hidden, source.watch = _watched(source.model.graph), _watched
        return source
    if target.model.config.architecture != "gemma4":
        raise UsageError(f"{name} drafts for Gemma 4 alone: choose a smaller model of the same family")
    target.hidden = hidden_states(target.model.graph)
    source = _read(file, options, name, target=lambda: target.model.graph)
    source.hidden, source.watch = _watched(source.model.graph), _watched
    return source


def _width(file: GGUFFile) -> int:
    architecture = str(file.metadata.get("general.architecture"))
    return read_general(ModelMetadata(file.metadata, architecture), file.tensors).n_embd


def _watched(graph: Graph) -> Tensor:
    """Return the only tensor of a graph that can be read after a step."""
    (x,) = (x for x in graph.watched if isinstance(x, Tensor))
    return x


def _draft_model(sources: Sequence[_ModelSource], runner: ModelRunner) -> Callable[..., DraftModel]:
    """Return a factory for the draft model. Also loads the norms that connect it to the target model in
    ``runner``."""
    if len(sources) < 2 or sources[0].hidden is None:
        return DraftModel
    graph, draft = (source.model.graph for source in sources)
    if sources[1].model.config.architecture == "dflash":
        from localllm.models.dflash import DraftBlock  # imported here: few models have such a drafter

        file = sources[1].file
        block = DraftBlock.read(
            ModelMetadata(file.metadata, "dflash"), Weights(file), sources[1].model.config.n_vocab
        )
        return partial(
            BlockModel,
            cache=runner.cache,
            mask=block.mask,
            n_drafts=block.n_drafts,
            from_last=block.from_last,
            token_ids=draft.token_ids,
            choose=_choice(block),
        )
    if draft.caches_of is not None:
        return partial(AssistantModel, of_model=hidden_norm(graph))
    if sources[1].model.config.architecture == "eagle3":
        return partial(MTPModel, kind="draft", token_ids=draft.token_ids)
    kind: Literal["draft", "mtp"] = "mtp" if sources[1].file is sources[0].file else "draft"
    if sources[0].hidden.width != sources[0].model.config.n_embd:  # the block norms several streams itself
        return partial(MTPModel, kind=kind)
    return partial(MTPModel, kind=kind, of_model=hidden_norm(graph), of_block=hidden_norm(draft))


def _choice(block: DraftBlock) -> ChooseDrafts:
    """Return the choice of drafts. Reads the weights of a confidence head."""
    if block.n_candidates:
        return ChooseCandidates(block.n_candidates)
    if not block.has_bias:
        return choose_likeliest
    head = block.confidence
    if head is None:
        return ChooseWithBias(None)
    bias = np.zeros(1) if head.bias is None else floats(head.bias)
    return ChooseWithBias(np.concatenate([floats(head.weight).reshape(-1), bias]).astype(np.float32))


def _check_drafts(sources: Sequence[_ModelSource], devices: Sequence[Device]) -> None:
    if len(devices) > 1 and any(source.hidden is not None for source in sources):
        raise UsageError(
            f"{sources[1].name} drafts on the CPU alone: load the model with ",
            Argument("device", "cpu"),
            ", or without it",
        )


def _find_encoder(options: LoadOptions, file: GGUFFile) -> MediaEncoder | None:
    """Return the encoder that was named, or the best one next to the model that belongs to it by name and content."""
    architecture = str(file.metadata.get("general.architecture"))
    if ARCHITECTURES[architecture].has_encoder:
        from localllm.loading.media_encoder import MediaEncoder

        if options.mmproj not in (None, False):
            raise UsageError(Argument("mmproj"), " is for models that see images or hear audio: omit it")
        return MediaEncoder.of_prompts(file.path, architecture, "f32" if options.cache_type == "f32" else "f16")
    if options.mmproj is False or (options.mmproj is None and options.path is None):
        return None
    width = file.metadata.get(f"{architecture}.embedding_length")
    if options.mmproj is not None:
        paths, other_paths = [Path(options.mmproj)], list[Path]()
    else:
        paths, other_paths = find_projectors(file.path)
    for path in [*paths, *other_paths]:
        from localllm.loading.media_encoder import MediaEncoder  # imported here: most models see nothing

        try:
            encoder = MediaEncoder.of(path, architecture, width)
        except LocalLLMError as error:
            if options.mmproj is not None:
                raise
            _log.info("%s is not used: %s", path, error)
            continue
        if path in paths:
            encoder.image_max_tokens = options.image_max_tokens
            return encoder
        encoder.close()
        model, name = path_text(file.path.name), path_text(path.name)
        words = f"{model} is loaded without {name}, which fits but has the name of another model: to use it, choose "
        warn(Notice(words, Argument("mmproj", str(path))))
        return None
    return None


def check_adapters(options: LoadOptions) -> None:
    """Reads the adapters of a model, and no weights."""
    with _open(options.path) as file:
        _read(file, options, "the model", adapts=True)


def _blocks(sources: Sequence[_ModelSource], devices: Sequence[Device], options: LoadOptions) -> list[_ModelSource]:
    """Return the MTP block after the last layer, if any. Only for the host, because GPUs keep no hidden states."""
    if len(sources) > 1 or len(devices) > 1 or not has_block(sources[0].file):
        return []
    block = _read(sources[0].file, options, "the MTP block of the model", is_block=True)
    for source in (sources[0], block):
        source.hidden = hidden_states(source.model.graph)
    return [block]


def check_file(path: str | os.PathLike[str]) -> None:
    """Read a model's header, without weights. Raises LocalLLMError if localllm does not support the model."""
    with _open(path) as file:
        read_model(file)


def check_runs(file: GGUFFile) -> None:
    """Raise ModelError if a file has an unsupported architecture or no weights."""
    find_architecture(file.metadata)
    if not any(name.startswith(("blk.", "enc.blk.")) for name in file.tensors):
        raise ModelError(
            f"{path_text(file.path)} holds only a vocabulary, no weights: choose the file of the whole model, which "
            "is larger"
        )
    if has_only_block(file):
        raise ModelError(
            f"{path_text(file.path)} contains only the block that predicts further tokens: load its model, with this "
            "file as the draft model"
        )


class _TokenizerReader(threading.Thread):
    """Reads a file's vocabulary in a thread, because packing weights leaves the Python thread idle.

    Leaving the context waits for the thread, before the file is closed.
    """

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(name="localllm-tokenizer")
        self._file = file
        self._tokenizer: Tokenizer | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._tokenizer = Tokenizer(Vocabulary.from_gguf(self._file))
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback refers to this reader, and so to the mapped file

    def result(self) -> Tokenizer:
        """Wait for the tokenizer and return it."""
        self.__exit__()
        self.check()
        assert self._tokenizer is not None
        return self._tokenizer

    def __enter__(self) -> Self:
        try:
            self.start()
        except (RuntimeError, MemoryError):  # no more threads or memory
            self.run()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_alive():
            self.join()


def _template_source(source: _ModelSource) -> TemplateSource:
    """Return the chat template of a file. A file without one whose prompts an encoder reads uses `MESSAGES`."""
    template_source = TemplateSource.of_file(source.file)
    if template_source.text is None and source.model.graph.prompt is not None:
        return TemplateSource(MESSAGES, "the template of messages")
    return template_source


def compile_template(source: TemplateSource, tokenizer: Tokenizer) -> ChatTemplate:
    from localllm.chat import ChatTemplate

    return ChatTemplate.compile(source, tokenizer)


# -- Placing and packing -------------------------------------------------------------------------------------------


def _open_devices(options: LoadOptions) -> tuple[Device, ...]:
    progress = of_stage(options.progress, "kernels")
    devices = open_devices(options.device, threads=options.threads, isa=options.isa, progress=progress)
    try:
        _check_rules(options, [device.name for device in devices if device.name.startswith("cuda")])
        if options.split_mode != "row":
            return devices
        if options.tensor_split is not None:
            why = " is for a model split by layers: leave it out, or "
            raise UsageError(Argument("tensor_split"), why, Argument("split_mode", "row"))
        if _overrides(options):
            raise UsageError(
                "experts cannot be on the CPU if each layer is on several GPUs: omit ",
                Argument("split_mode", "row"),
            )
        return split_by_rows(devices)
    except BaseException:
        _close(devices)
        raise


def _close(devices: Sequence[Device | MediaEncoder | PlannedMemory]) -> None:
    for device in devices:
        device.close()


def _plan(
    sources: Sequence[_ModelSource], devices: tuple[Device, ...], options: LoadOptions, encoder: MediaEncoder | None
) -> tuple[list[Planner], Plan]:
    """Return planners and plan for the model and its draft model, if any, next to the encoder on the host."""
    available, sees = max(0, available_memory() - unused_memory()), None
    reserve = RESERVE
    advice: list[str | Argument] = []
    if options.max_memory is not None:
        reserve, limit = 0, round(options.max_memory * 1e9)
        if limit < available:
            available, advice = limit, ["raise ", Argument("max_memory", options.max_memory)]
    if encoder is not None:
        encoder.backend = devices[0].backend
        sees = encoder.info
        available = max(0, available - sees.n_bytes)
    free = {d.name: available if d.free_memory is None else d.free_memory() for d in devices}
    split = None if options.tensor_split is None else tuple(options.tensor_split)
    # n_gpu_layers is for the model. The draft model uses its default, unless the user wants no layers on GPUs.
    numbers = options.n_gpu_layers, 0 if options.n_gpu_layers == 0 else None
    shared = frozenset[tuple[str, LayerTag]]()
    if sources[0].hidden is not None and devices[0].backend.shares_weights:
        uses, draft_uses = (weights_of(source.model.graph) for source in sources)
        theirs = {*uses, *(use.as_table() for use in uses if use.is_table)}
        shared = frozenset((use.weight.name, use.layer) for use in theirs & {*draft_uses})
    # Each expert of the draft model is on the device of its layer.
    overrides = _overrides(options), NO_OVERRIDES
    chosen = options.n_cpu_moe is not None or options.n_gpu_layers is not None or overrides[0]
    measured = None if chosen else cache(partial(measure, devices))
    planners = [
        Planner(
            *(source.name, source.model, devices, free, options.parallel or 1, n_gpu_layers, split),
            overrides=placed,
            measured=measure_once,
            shared=shared,
        )
        for source, n_gpu_layers, placed, measure_once in zip(
            sources, numbers, overrides, (measured, None), strict=False
        )
    ]
    try:
        placements = fit(planners, available, options.context, advice)
        if options.parallel is None:
            planners, placements = widened(planners, placements, available)
    except NotEnoughMemoryError:
        if (pooled := with_experts_in_file(planners, available - reserve, options.context)) is None:
            raise
        planners, placements = pooled
    notices = _device_warnings(devices) + _plan_warnings(planners[0], placements[0], options)
    missing = missing_memory(planners[0], placements[0], options.context)
    if advice:  # free memory does not raise the user's limit
        missing = missing._replace(host=0)
    return planners, Plan(placements, free, notices, sees, missing)


def _check_rules(options: LoadOptions, gpus: Sequence[str]) -> None:
    """Raise UsageError if a rule for tensors names a GPU that the model does not use, unless it uses no GPU."""
    for rule in _overrides(options).rules if gpus else ():
        number = rule.rpartition("CUDA")[2]
        if number.isdecimal() and int(number) >= len(gpus) and f"cuda:{number}" not in gpus:
            words = (
                f" has the rule {rule!r:.80}, but the model uses {', '.join(gpus)}: name one of these GPUs, or CPU"
            )
            raise UsageError(Argument("override_tensor"), words)


def _overrides(options: LoadOptions) -> Overrides:
    """Return the matrices that the user wants on the host."""
    rules: Any = options.override_tensor or ()
    return Overrides(rules, None if options.cpu_moe else options.n_cpu_moe or 0)


def _plan_with_block(
    sources: list[_ModelSource], devices: tuple[Device, ...], options: LoadOptions, encoder: MediaEncoder | None
) -> tuple[list[_ModelSource], list[Planner], Plan]:
    """Return the result of `_plan` with the MTP block after the last layer, if it exists and fits in memory."""
    blocks = _blocks(sources, devices, options)
    try:
        return [*sources, *blocks], *_plan([*sources, *blocks], devices, options, encoder)
    except NotEnoughMemoryError:
        if not blocks:
            raise
        sources[0].hidden = None
        return sources, *_plan(sources, devices, options, encoder)


def _load(
    source: _ModelSource, planner: Planner, placement: Placement, options: LoadOptions, check: Callable[[], None]
) -> tuple[ModelRunner, ModelInfo, tuple[Notice, ...]]:
    """Pack a model's weights, allocate its cache, and return its notices. ``check`` can raise to stop loading."""
    file, config, report = source.file, source.model.config, of_stage(options.progress, "weights")
    # LongRoPE uses other frequencies for short contexts.
    if (placement.context > config.original_context) != planner.model.is_long:
        planner = replace(planner, model=source.read_again(placement.context), _footprints={})
    try:
        step = planner.load(placement, _counted(planner, report, check))
    except (MemoryError, OSError) as error:
        if isinstance(error, LocalLLMError) or (isinstance(error, OSError) and error.errno != errno.ENOMEM):
            raise
        raise NotEnoughMemoryError(
            f"memory ran out while {path_text(file.path)} was loaded, which takes {placement.total / 1e9:.2f} GB: "
            f"{memory_advice()}, or choose a smaller context or a smaller quantisation of the model"
        ) from error
    file.check_unchanged()
    loaded = placement.loaded(step.weights)
    info = _info(source, planner, loaded)
    graph, context = planner.model.graph, placement.context
    runner = ModelRunner(
        step,
        n_vocab=config.n_vocab,
        context=context,
        max_tokens=planner.sizes(context).max_tokens,
        width=graph.result.width,
        is_causal=graph.is_causal,
        hidden=source.hidden,
        has_axes=graph.has_axes,
        has_spans=graph.has_spans,
        graph=graph,
        diffusion=planner.model.diffusion,
    )
    notices = _plan_warnings(planner, placement, options) + _larger_weights(planner.name, placement, loaded)
    return runner, info, notices


def _counted(planner: Planner, report: Callable[[int, int], None] | None, check: Callable[[], None]) -> Progress:
    """Return a callback that calls ``check`` and reports packed bytes and total bytes of a model's weights."""
    total = sum(_file_bytes(use.weight) for use in weights_of(planner.model.graph))
    packed: dict[Weight, int] = {}

    def count(weight: Weight) -> None:
        check()
        if report is None:
            return
        packed[weight] = _file_bytes(weight)
        report(sum(packed.values()), total)

    return count


def _file_bytes(weight: Weight) -> int:
    *n_rows, n_columns = weight.shape
    return prod(n_rows) * block_size(weight.type).row_bytes(n_columns)


# -- Notices ---------------------------------------------------------------------------------------------------------


def _device_warnings(devices: Sequence[Device]) -> tuple[Notice, ...]:
    return tuple(device.note for device in devices if device.note is not None)


def _plan_warnings(planner: Planner, placement: Placement, options: LoadOptions) -> tuple[Notice, ...]:
    """Notices about a plan: a long context, layers that do not fit on the GPU, experts that stay in the file."""
    name, config, notices = planner.name, planner.model.config, list[Notice]()
    context, trained = placement.context, config.context_length
    if context > trained:
        before = f"{name} was trained on {trained:,} tokens of context: with "
        notices.append(Notice(before, Argument("context", context), " its answers may get worse"))
    if n := placement.n_cpu_moe:
        before = (
            f"the GPU has no room for the experts of {n} of {config.n_layers} layers of {name}: the "
            f"{placement.host} computes them, slower; a smaller context or quantisation leaves more room, and "
        )
        notices.append(Notice(before, Argument("n_cpu_moe", n), " silences this warning"))
    elif n := placement.spilled_layers:
        room = "no layer" if n == config.n_layers else f"not more than {config.n_layers - n} layers"
        before = (
            f"the GPU has room for {room} of {name}: {n} of {config.n_layers} run on the {placement.host}, slower; a "
            "smaller context or quantisation leaves more room, and "
        )
        notices.append(Notice(before, Argument("n_gpu_layers", config.n_layers - n), " silences this warning"))
    if placement.pool and options.max_memory is None:
        before = (
            f"{name} is larger than memory: {placement.experts_in_file / 1e9:.2f} GB of experts stay in the file, "
            f"{placement.pool / 1e9:.2f} GB of them are in memory at a time, and the disk decides how fast it is; "
        )
        advice = f"{memory_advice()} or choose a smaller quantisation, and "
        notices.append(Notice(before, advice, Argument("max_memory"), " silences this warning"))
    return tuple(notices)


def _larger_weights(name: str, placement: Placement, loaded: Placement) -> tuple[Notice, ...]:
    """Return a notice if weights take more memory than planned: the planned format cannot represent their values."""
    planned = {(w.name, w.layer): w for group in placement.groups for w in group.packed}
    larger = [w for group in loaded.groups for w in group.packed if w.n_bytes > planned[w.name, w.layer].n_bytes]
    if not larger:
        return ()
    names = ", ".join(weight.name for weight in larger[:3]) + (", …" if len(larger) > 3 else "")
    before = sum(planned[weight.name, weight.layer].n_bytes for weight in larger)
    text = (
        f"{len(larger)} of the tensors of {name} ({names}) have scales outside the range of float16, the "
        f"scales' type of {larger[0].file_type} in memory: they are stored as {larger[0].kernel_type}, take "
        f"{sum(w.n_bytes for w in larger) / 1e9:.2f} GB instead of {before / 1e9:.2f} GB, and are slower to compute "
        "with"
    )
    return (Notice(text),)


def _log_info(info: ModelInfo, role: str = "") -> None:
    _log.info("%s%s on %s (%s, %d threads)", role, info.path, info.device, info.kernels, info.threads)
    for group in info.placement.groups:
        formats = ", ".join(f"{format} ({format.n_bytes:,} bytes)" for format in group.formats)
        cache = f", {info.cache_type} KV cache ({group.kv_cache:,} bytes)" if group.kv_cache else ""
        _log.info("%s on %s (%s): %s%s", group.name, group.device, group.kernels, formats, cache)


def _info(source: _ModelSource, planner: Planner, placement: Placement) -> ModelInfo:
    file, config = source.file, source.model.config
    name = file.metadata.get("general.name")
    used = [device for device in planner.devices if device.name in placement.devices]
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
        fingerprint=file.fingerprint(),
    )
