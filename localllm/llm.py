"""The library's main entry point: `load` opens a model file and returns an `LLM`, which generates text."""

from __future__ import annotations

import math
import os
import queue
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal, Never, Self, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from localllm.engine.engine import MAX_WAITING, STEP_S, Counts, Engine
from localllm.engine.media import NO_MEDIA, MediaTokens, PreparedMedia, PromptMedia, text_ids
from localllm.engine.probe import Probe
from localllm.engine.request import Request
from localllm.errors import (
    Argument,
    ClosedError,
    ContextLengthError,
    NotEnoughMemoryError,
    QueueFullError,
    UsageError,
    warn,
)
from localllm.files import expanded
from localllm.generation.completion import Completion, Stream
from localllm.generation.diffusion import check_no_diffusion, make_canvas
from localllm.generation.embedding import unit_length
from localllm.generation.scoring import Score, last_logits, scores
from localllm.inspection.names import ValueNames
from localllm.kernels import process
from localllm.kernels.cpu.host import available_memory
from localllm.kernels.graph import CacheType
from localllm.loading.load import LoadedModel, check_adapters, compile_template, load_file
from localllm.loading.model_info import ModelInfo
from localllm.loading.progress import LoadPlan, default_progress
from localllm.options.checks import check_keywords, floats, mappings, text, token_ids, whole_number
from localllm.options.declared import GRAMMARS, CheckedOptions, LoadOptions, Sampling, declared, describes
from localllm.options.foreign_names import THEIR_LOAD, THEIR_METHODS, no_attribute
from localllm.options.keywords import Options
from localllm.options.types import CacheScope, LoadProgress, Progress, SplitMode
from localllm.sampling import Sampler
from localllm.tokenizer import Tokenizer
from localllm.tokenizer.stream import StreamDecoder

# Importing jinja2 would delay the first token of programs that do not chat.
if TYPE_CHECKING:
    from localllm.chat import ChatTemplate
    from localllm.chat.calls.grammar import CallGrammar
    from localllm.chat.conversation import Media, Message
    from localllm.chat.reply import ReplyParser
    from localllm.chat.thinking import ThinkingSplitter
    from localllm.chat.tool_choice import ChosenTools
    from localllm.generation.embedding import Embedder
    from localllm.inspection.hidden_states import HiddenStates, PoolingKind
    from localllm.inspection.trace import Trace, TraceOptions, TracePiece
    from localllm.loading.media_encoder import MediaEncoder
    from localllm.sampling.call_constraint import CallConstraint, CallSearch
    from localllm.sampling.constraint import Constraint
    from localllm.sampling.grammar import Grammars
    from localllm.sampling.reasoning_limit import ReasoningLimit

    #: Messages of a chat, in the format of OpenAI's API or of `localllm.chat.conversation`.
    Messages = Sequence[Message | Mapping[str, object]]

#: Placeholder of an image or audio clip in the prompt of `LLM.generate`, the same as in llama.cpp.
MEDIA = "<__media__>"

#: Maximum number of prompts that `LLM.generate_many` runs at once.
_AT_ONCE = 64

#: Maximum number of template variables.  Each is an argument of several calls.
MAX_VARIABLES = 1000

#: Variable names that `LLM.chat` sets for the template or for the functions that render it.
_RESERVED_NAMES = frozenset({"messages", "tools", "tokenizer", "template", "self"})


@describes(LoadOptions)
def load(
    path: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    n_gpu_layers: int | None = None,
    tensor_split: Sequence[float] | None = None,
    split_mode: SplitMode | None = None,
    n_cpu_moe: int | None = None,
    cpu_moe: bool | None = None,
    override_tensor: str | Sequence[str] | None = None,
    max_memory: float | None = None,
    context: int | None = None,
    threads: int | None = None,
    isa: str | None = None,
    parallel: int | None = 1,
    cache_type: CacheType = "f16",
    chat_template: str | None = None,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    draft_model: str | os.PathLike[str] | None = None,
    mmproj: str | os.PathLike[str] | Literal[False] | None = None,
    image_max_tokens: int | None = None,
    prompt_cache: str | os.PathLike[str] | None = None,
    prompt_cache_size: float | None = None,
    cache_scope: CacheScope = "all",
    progress: LoadProgress | None = None,
    planned: LoadPlan | None = None,
    max_waiting: int = MAX_WAITING,
    step_s: float = STEP_S,
    **unknown: Never,
) -> LLM:
    """Loads a model.

    Args:
        {options}

    Raises:
        TypeError: a keyword is unknown; the message suggests the correct name.
        ModelNotFoundError: no file or model has this name; also a FileNotFoundError.
        GGUFError: the file is not in the GGUF format, or is damaged.
        UnsupportedArchitectureError, ModelError: the file's architecture is not supported, or its model is broken.
        TokenizerError, TemplateError: the file's vocabulary, or ``chat_template``, is broken.
        DeviceError: the device does not exist, or does not support the instruction set.
        NotEnoughMemoryError: the model and the draft model would not fit; raised before anything is loaded.
        UsageError: an argument is out of range, or the draft model has a different vocabulary.
        SettingsError: the name must be searched in ``model_folders``, but the settings file is broken.
    """
    if unknown:
        check_keywords(unknown, declared(LoadOptions), THEIR_LOAD)
    options = LoadOptions(
        path=model_file(path),
        device=device,
        n_gpu_layers=n_gpu_layers,
        tensor_split=tensor_split,
        split_mode=split_mode,
        n_cpu_moe=n_cpu_moe,
        cpu_moe=cpu_moe,
        override_tensor=override_tensor,
        max_memory=max_memory,
        context=context,
        threads=threads,
        isa=isa,
        parallel=parallel,
        cache_type=cache_type,
        chat_template=chat_template,
        adapters=adapters,
        draft_model=model_file(draft_model, demo_is_a_file=True),
        mmproj=expanded(mmproj) if isinstance(mmproj, str | os.PathLike) else mmproj,
        image_max_tokens=image_max_tokens,
        prompt_cache=None if prompt_cache is None else expanded(prompt_cache),
        prompt_cache_size=prompt_cache_size,
        cache_scope=cache_scope,
        progress=default_progress() if progress is None else progress,
        planned=planned,
        max_waiting=max_waiting,
        step_s=step_s,
    )
    loaded = load_file(options)
    for message in loaded.warnings:
        warn(message)
    return LLM(loaded)


def model_file(name: Any, *, demo_is_a_file: bool = False) -> Any:
    """Return the path of the model called ``name``, by the same search as on the command line.

    None is the demo model; with ``demo_is_a_file``, the demo model's path is returned instead.  A value that is
    neither a string nor a path is returned unchanged, and `LoadOptions` rejects it.
    """
    if isinstance(name, os.PathLike):
        return expanded(name)
    if not isinstance(name, str) or os.path.lexists(name):
        return name
    # Imported here because most callers pass a file.
    from localllm.catalog.find import model_path
    from localllm.catalog.listing import demo_model
    from localllm.options.settings import load_settings

    path = model_path(os.path.expanduser(name), load_settings().model_folders)
    demo = demo_model() if path is None and demo_is_a_file else None
    return path if demo is None else demo.path


def _drafting(
    checked: CheckedOptions, drafts_by: Literal["lookup", "draft", "mtp"] | None
) -> Literal["lookup", "draft", "mtp"] | None:
    """Return the method that drafts tokens.  ``drafts_by``: the model's method."""
    speculate = drafts_by if checked.speculate == "auto" else checked.speculate
    lookup = Argument("draft_model"), ", or choose ", Argument("speculate", "lookup")
    if speculate == "mtp" and drafts_by != "mtp":
        why = " is 'mtp', but the model cannot predict several tokens, or is on a GPU: load it with a "
        raise UsageError(Argument("speculate"), why, *lookup, ", or None")
    if speculate == "draft" and drafts_by != "draft":
        why = " is 'draft', but there is no draft model: load the model with a "
        raise UsageError(Argument("speculate"), why, *lookup)
    if checked.draft_always and speculate is None:
        why = " is True, but no drafts are available: load the model with a "
        raise UsageError(Argument("draft_always"), why, *lookup)
    return speculate


class LLM:
    """A loaded model, created by `load`.

    Any number of threads and tasks may use a model at once.  A dedicated thread evaluates their requests in shared
    batches.  A program may load several models.  A prefix that a prompt shares with an earlier prompt is not
    evaluated again, so a turn of a chat costs only its new tokens.

    All methods raise `ClosedError` after `close`.

    Attributes:
        template_variables: variables of the chat template in every chat; arguments of a call override them.
        defaults: default options; arguments of a call override them.  Initially the sampling options in the
            file's metadata (``general.sampling.*``).
    """

    def __init__(self, loaded: object) -> None:
        if not isinstance(loaded, LoadedModel):
            raise TypeError(f"use localllm.load({loaded!r:.80}), which returns an LLM")
        self._adopt(loaded)

    def _adopt(self, loaded: LoadedModel) -> None:
        self._tokenizer = loaded.tokenizer
        self._engine: Engine | None = loaded.engine
        self._embedder = loaded.embedder
        self._encoder = loaded.encoder
        self._options = loaded.options
        self._info = loaded.info
        self._template_source = loaded.template_source
        self._template = loaded.template
        self._grammars: Grammars | None = None
        self.template_variables: dict[str, object] = {}
        self.defaults: dict[str, Any] = dict(loaded.defaults)

    @property
    def info(self) -> ModelInfo:
        """Facts about the model: architecture, device, kernels, and the bytes per group of layers."""
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def graph(self) -> ValueNames:
        """Names and shapes of the values inside the model that `trace`, ``watch``, ``steer`` and ``hooks`` accept."""
        return ValueNames(self._opened().graph)

    @property
    def is_late(self) -> bool:
        """Whether the model returns one vector per token (ColBERT): use `embed` with ``per_token``, or `rerank`."""
        return self._embedder is not None and self._embedder.is_late

    @property
    def writes_text(self) -> bool:
        """Whether the model generates text, and not vectors (`embed`) or scores (`rerank`)."""
        return self._embedder is None

    @property
    def accepts_images(self) -> bool:
        """Whether the model accepts images: it was loaded with an image encoder from an ``mmproj`` file."""
        return self._encoder is not None and "image" in self._encoder.encoders

    @property
    def accepts_audio(self) -> bool:
        """Whether the model accepts audio: it was loaded with an audio encoder from an ``mmproj`` file."""
        return self._encoder is not None and "audio" in self._encoder.encoders

    @property
    def sees(self) -> bool:
        """Deprecated alias of `accepts_images`."""
        warn("LLM.sees is deprecated: use LLM.accepts_images", DeprecationWarning)
        return self.accepts_images

    @property
    def hears(self) -> bool:
        """Deprecated alias of `accepts_audio`."""
        warn("LLM.hears is deprecated: use LLM.accepts_audio", DeprecationWarning)
        return self.accepts_audio

    @property
    def has_chat_template(self) -> bool:
        """Whether the file contains a chat template, or `load` was given a template."""
        self._opened()
        return self._template_source.text is not None

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat template passed to `load`, or the file's.

        Raises:
            TemplateError: the template is not valid.
        """
        self._opened()
        if self._template is None:
            self._template = compile_template(self._template_source, self._tokenizer)
        return self._template

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the token ids of a string.

        Args:
            text: any string.
            add_special: add BOS at the start and EOS at the end, if the model requires them.
            parse_special: convert names of control tokens, such as ``<|im_end|>``, to these tokens.  Keep it off
                for untrusted text.

        Raises:
            UsageError: ``text`` is not a string.
            TokenizerError: ``text`` is not valid Unicode.

        Warns:
            TokenizerWarning: the vocabulary has no token for a byte of a character; the byte is omitted.
        """
        self._opened()
        return self._tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def tokenize_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_variables: Mapping[str, object] | None = None,
        reply_prefix: str = "",
    ) -> list[int]:
        """Return the token ids of the prompt that `chat` builds from the same arguments.

        The prompt may be longer than the context.  Tokens of images and audio are negative numbers, which are equal
        for equal images.

        Raises:
            TemplateError, TokenizerError, UsageError: as in `chat`.
        """
        from localllm.chat.conversation import read_messages

        chat = read_messages(messages, may_open_files=True)
        return self._chat_encoder(tools, template_variables, reply_prefix)(chat)[0]

    def detokenize(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens; invalid UTF-8 becomes U+FFFD.

        Args:
            ids: token ids.
            special: include the names of control tokens, which the text otherwise omits.

        Raises:
            UsageError: an id is outside the vocabulary.
        """
        self._opened()
        return self._tokenizer.decode(token_ids(ids, self._info.n_vocab), special=special)

    def logits(self, ids: Sequence[int], *, last: int | None = None) -> NDArray[np.float32]:
        """Return the logits after the ``last`` tokens (default: all tokens), float32 [n, n_vocab].

        Earlier tokens in the cache are not evaluated again.

        Raises:
            UsageError: ``ids`` is empty, an id is outside the vocabulary, or ``last`` is not from 1 to ``len(ids)``.
            ContextLengthError: ``ids`` is longer than the context.
            NotEnoughMemoryError: the result would not fit into memory.
        """
        engine = self._opened()
        self._check_writes()
        ids = token_ids(ids, self._info.n_vocab)
        n = len(ids) if last is None else whole_number("last", last, 1)
        if n > len(ids):
            raise UsageError.of("last", n, f"at most the number of tokens, {len(ids):,}")
        self._check_memory_for_logits(n)
        return last_logits(engine, ids, n)

    def unembed(self, streams: ArrayLike) -> NDArray[np.float32]:
        """Return the logits of rows of the residual stream after the last layer, float32 [n, n_vocab].

        Only the final norm and the head are computed. With the outputs of earlier layers, this is a logit lens.

        Args:
            streams: [n, width], with the width of the last layer's output in `graph`.

        Raises:
            UsageError: the rows have another shape, or are not finite.
            NotEnoughMemoryError: the result would not fit into memory.
        """
        engine = self._opened()
        self._check_writes()
        width = self.graph[f"layers.{engine.graph.n_layers - 1}.output"].width
        try:
            rows = floats(streams)
        except TypeError:
            raise UsageError.of("streams", streams, f"an array of real numbers [n, {width}]") from None
        if rows.ndim != 2 or rows.shape[1] != width:
            raise UsageError(Argument("streams"), f" has the shape {list(rows.shape)}, but must be [n, {width}]")
        if not np.isfinite(rows).all():
            raise UsageError(Argument("streams"), " has NaN or infinity: give finite numbers")
        self._check_memory_for_logits(len(rows))
        logits = [np.empty((0, engine.width), np.float32)]
        for first in range(0, len(rows), engine.context):
            piece = rows[first : first + engine.context]
            # The program reads no token ids. The key keeps its tokens out of the shared cache.
            logits.append(last_logits(engine, [0] * len(piece), len(piece), Probe(stream=piece, key=object())))
        return np.concatenate(logits)

    def _check_memory_for_logits(self, n: int) -> None:
        n_bytes, available = 4 * n * self._info.n_vocab, available_memory()
        if n_bytes > available:
            raise NotEnoughMemoryError(
                f"the logits of {n:,} tokens take {n_bytes / 1e9:.2f} GB, but {available / 1e9:.2f} GB of "
                "memory is available: request fewer tokens at a time"
            )

    def score(
        self,
        prompt: str | Sequence[int],
        continuations: Sequence[str | Sequence[int]],
        *,
        add_special: bool = True,
        top_logprobs: int = 0,
    ) -> list[Score]:
        """Return the log-probabilities of continuations of a prompt; the prompt is evaluated once.

        To choose among answers, take the answer with the greatest ``logprob``, or the greatest
        ``logprob / len(ids)`` if their lengths differ.

        Args:
            prompt: a string or token ids.  An empty prompt consists of BOS.
            continuations: strings or lists of token ids.  A string is tokenized together with the prompt, so a word
                may span both.  Spaces at the end of the prompt count as part of the continuation.
            add_special: whether to add the model's BOS to the prompt; see `tokenize`.
            top_logprobs: number of likeliest tokens to report per position (`Score.top`).

        Raises:
            TypeError, UsageError, ContextLengthError: as in `generate`.
        """
        engine = self._opened()
        self._check_writes()
        whole_number("top_logprobs", top_logprobs, 0)
        if isinstance(continuations, str | bytes) or not isinstance(continuations, Sequence):
            raise UsageError.of("continuations", continuations, "a list of texts, or of lists of token ids")
        pairs = [self._continued(prompt, continuation, add_special) for continuation in continuations]
        return scores(engine, pairs, top_logprobs)

    @overload  # a string is a prompt, not a list of prompts
    def trace(  # type: ignore[overload-overlap]
        self, prompts: str | Sequence[int], names: str | Sequence[str], **options: Unpack[TraceOptions]
    ) -> dict[str, NDArray[Any]]: ...

    @overload
    def trace(
        self,
        prompts: Sequence[str | Sequence[int]],
        names: str | Sequence[str],
        **options: Unpack[TraceOptions],
    ) -> list[dict[str, NDArray[Any]]]: ...

    def trace(self, prompts: Any, names: str | Sequence[str], **options: Unpack[TraceOptions]) -> Any:
        """Return values inside the model at the tokens of a prompt: float32 [n_positions, width] by name.

        For a list of prompts, return a list with the values of each prompt. Chosen experts are int32 numbers. Other
        requests are evaluated as before, and share the cache of prompts.

        Args:
            prompts: a string, token ids, or a list of strings or of lists of token ids.
            names: names of values, see `graph`. ``*`` matches any layer: "layers.*.output".
            options: ``positions``, ``steer``, ``hooks``, …; see `localllm.inspection.trace.TraceOptions`.

        Raises:
            UsageError: a name is unknown, a position is outside the prompt, or as in `generate`.
            NotEnoughMemoryError: the values do not fit in memory: use `stream_trace` or `save_trace`.
        """
        trace = self._trace(prompts, names, options)
        values = trace.arrays()
        return values if trace.is_list else values[0]

    def stream_trace(
        self, prompts: Any, names: str | Sequence[str], **options: Unpack[TraceOptions]
    ) -> Iterator[TracePiece]:
        """Like `trace`, but return an iterator of `localllm.inspection.trace.TracePiece`.

        The pieces of a prompt are in the order of its tokens. Pieces of several prompts may be mixed.
        """
        return self._trace(prompts, names, options).pieces()

    def save_trace(
        self,
        path: str | os.PathLike[str],
        prompts: Any,
        names: str | Sequence[str],
        *,
        progress: Progress | None = None,
        **options: Unpack[TraceOptions],
    ) -> None:
        """Like `trace`, but write the values to a ``.safetensors`` or ``.npz`` file while they are computed.

        The arrays of a single prompt have the names of the values. The arrays of prompt i of a list are ``i/NAME``.

        Args:
            progress: called with the number of tokens whose values were written, and the number of all tokens.

        Raises:
            OutputError: the file cannot be written.
        """
        self._trace(prompts, names, options).save(expanded(path), progress)

    def _trace(self, prompts: Any, names: str | Sequence[str], options: TraceOptions) -> Trace:
        from localllm.inspection.positions import select
        from localllm.inspection.trace import Trace, TracedPrompt, TraceOptions

        check_keywords(options, TraceOptions.__annotations__, {})
        positions = options.get("positions")
        engine, value_names = self._opened(), self.graph
        watched = value_names.matching("names", names)
        steer, others = options.get("steer", ()), {name: options.get(name) for name in ("hooks", "adapters")}
        is_list = isinstance(prompts, list | tuple) and any(isinstance(p, Sequence | np.ndarray) for p in prompts)
        items = prompts if is_list else [prompts]
        changes: Any = [steer] * len(items)
        if is_list and isinstance(steer, list | tuple) and any(isinstance(item, list | tuple) for item in steer):
            changes = steer
        if len(changes) != len(items):
            words = (
                f" has lists for {len(changes):,} prompts, but there are {len(items):,}: give a list for each prompt"
            )
            raise UsageError(Argument("steer"), words)
        traced = []
        for prompt, change in zip(items, changes, strict=True):
            checked = CheckedOptions.of({"steer": change, **others})
            scales = self._adapter_scales(checked.adapters)
            ids = self._prompt_ids(prompt, options.get("add_special", True), options.get("parse_special", False))
            if len(ids) > engine.context:
                raise ContextLengthError(len(ids), engine.context)
            probe = replace(self._probe(checked, len(ids)) or Probe(), watched=watched)
            traced.append(TracedPrompt(ids, select(positions, len(ids)), probe, scales))
            if not len(traced[-1].positions):
                raise UsageError(Argument("positions"), f" select no token of a prompt of {len(ids):,} tokens")
        return Trace(engine, traced, value_names, is_list)

    def _probe(self, checked: CheckedOptions, n_prompt: int) -> Probe | None:
        """Return the values that a request reads and changes; None if it does neither."""
        if checked.on_values is not None and not checked.watch:
            raise UsageError(Argument("on_values"), " gets no values: name them in ", Argument("watch"))
        if not (checked.watch or checked.steer or checked.hooks):
            return None
        from localllm.inspection.steering import all_edits

        if checked.watch and checked.on_values is None:
            raise UsageError(
                Argument("watch"), " needs a function that receives the values: pass ", Argument("on_values")
            )
        names = self.graph
        watched = names.matching("watch", checked.watch) if checked.watch else ()
        edits, key = all_edits(checked.steer, checked.hooks or {}, names, n_prompt)
        return Probe(watched, edits, checked.on_values, n_prompt - 1, key)

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Adds a low-rank adapter, a GGUF file or a PEFT folder, for ``generate(..., adapters={name: 0.8})``.

        The adapter replaces an adapter of the same name.  The model is reloaded, which ends running requests with a
        `ClosedError`; prefer to pass adapters to `load`.

        Raises:
            ModelNotFoundError, GGUFError, ModelError: the adapter does not exist, is damaged, or belongs to a
                different model.  The loaded model is unchanged.
        """
        self._opened()
        adapters = {**(self._options.adapters or {}), text("name", name): path}
        options = replace(self._options, adapters=adapters, planned=None)
        check_adapters(options)
        template, source = self._template, self._template_source
        self.close()
        self._adopt(load_file(options))
        self._template, self._template_source = template, source

    @overload
    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        prefix: str = "",
        dimensions: int | None = None,
        normalize: bool = True,
        truncate: bool = False,
        per_token: Literal[False] = False,
        layer: int | str | None = None,
        pooling: PoolingKind | None = None,
    ) -> NDArray[np.float32]: ...

    @overload
    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        prefix: str = "",
        dimensions: int | None = None,
        normalize: bool = True,
        truncate: bool = False,
        per_token: Literal[True],
        layer: int | str | None = None,
        pooling: PoolingKind | None = None,
    ) -> list[NDArray[np.float32]]: ...

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        prefix: str = "",
        dimensions: int | None = None,
        normalize: bool = True,
        truncate: bool = False,
        per_token: bool = False,
        layer: int | str | None = None,
        pooling: PoolingKind | None = None,
    ) -> NDArray[np.float32] | list[NDArray[np.float32]]:
        """Return the vectors of texts, float32 [n, width].

        The model is an embedding model, or any other model with ``layer`` or ``pooling``.

        Args:
            texts: strings, or lists of token ids, which are used unchanged.
            prefix: added before each text, such as "search_query: "; see the model card.
            dimensions: number of leading values of each vector to return, for models that support it (Matryoshka).
            normalize: whether to scale vectors to length 1, so that their dot products are cosines.
            truncate: whether to cut a text that does not fit into the context at its end.  False is an error.
            per_token: return the token vectors before pooling, as models of late interaction (ColBERT) use them:
                a list with one array [n_tokens, width] per text.
            layer: for models that generate text: the number of the layer whose output is pooled, negative from the
                end, or the name of any value (see `graph`).  Defaults to "final_norm".
            pooling: for models that generate text: the "mean" of the tokens' rows (default), or the row of the
                "first" or "last" token.

        Raises:
            UsageError: the model generates text and needs ``layer`` or ``pooling``; the model is an embedding model,
                whose file specifies the pooling, and does not accept them; or an argument is out of range.
            TokenizerError: a text is not valid Unicode.
            ContextLengthError: a text is too long.
        """
        engine, embedder = self._opened(), self._embedder_for(layer, pooling, per_token)
        if embedder.is_late and not per_token:
            raise UsageError(
                f"{self._info.path.name} computes a vector per token (late interaction): use rerank, or embed with "
                "per_token=True"
            )
        if isinstance(texts, str | bytes) or not isinstance(texts, Sequence | np.ndarray):
            raise UsageError.of("texts", texts, "a list of texts, or of lists of token ids")
        n = embedder.width if dimensions is None else whole_number("dimensions", dimensions, 1)
        if n > embedder.width:
            raise UsageError.of("dimensions", n, f"at most {embedder.width:,}, the size of the model's vectors")
        text("prefix", prefix)
        ids = [self._prompt_ids(prefix + item if isinstance(item, str) else item, True, False) for item in texts]
        if truncate:
            n_end = 0 if self._embedder is None else 1  # embedding models need the end token
            most = engine.context - n_end
            ids = [i[:most] + i[len(i) - n_end :] if len(i) > engine.context else i for i in ids]
        if per_token:
            rows = [vectors[:, :n] for vectors in embedder.token_vectors(engine, ids)]
            return [np.ascontiguousarray(unit_length(row) if normalize else row) for row in rows]
        vectors = embedder.vectors(engine, ids)[:, :n]
        return np.ascontiguousarray(unit_length(vectors) if normalize else vectors)

    def _embedder_for(
        self, layer: int | str | None, pooling: PoolingKind | None, per_token: bool
    ) -> Embedder | HiddenStates:
        """Return what computes vectors of texts: the pooling of the model's file, or of hidden states."""
        name, embedder = self._info.path.name, self._embedder
        if embedder is not None and embedder.is_reranker:
            raise UsageError(f"{name} scores documents, and cannot compute vectors of texts: use rerank")
        option = Argument("pooling" if layer is None else "layer")
        if layer is None and pooling is None:
            if embedder is not None:
                return embedder
            raise UsageError(
                f"{name} generates text, and cannot compute vectors of texts: load an embedding model, or choose "
                "hidden states with ",
                option._replace(name="layer"),
            )
        if embedder is not None:
            raise UsageError(
                option, f" is for models that generate text, but {name} has its own pooling: leave it out"
            )
        if per_token and pooling is not None:
            raise UsageError(Argument("pooling"), " is not used for vectors of tokens: leave it out")
        # Imported here because most programs do not look inside a model.
        from localllm.inspection.hidden_states import HiddenStates

        return HiddenStates(self._opened(), layer, pooling)

    def rerank(self, query: str, documents: Sequence[str]) -> NDArray[np.float32]:
        """Return the relevance of each document to a query, float32 [n]; higher is better.

        Requires a reranker or a model of late interaction (ColBERT).  For late interaction, the score is the sum over
        query tokens of the largest cosine to a document token.

        Raises:
            UsageError: the model cannot rerank, or an argument is not a string.
            TokenizerError, ContextLengthError: as in `embed`.
        """
        engine, embedder = self._opened(), self._embedder
        if embedder is None or not (embedder.is_reranker or embedder.is_late):
            raise UsageError(f"{self._info.path.name} is not a reranker: load one, such as bge-reranker-v2-m3")
        if isinstance(documents, str | bytes) or not isinstance(documents, Sequence):
            raise UsageError.of("documents", documents, "a list of texts")
        text("query", query)
        documents = [text("document", document) for document in documents]
        if embedder.is_late:
            return embedder.late_interaction(engine, self._tokenizer, query, documents)
        pairs = [embedder.pair(self._tokenizer, query, document) for document in documents]
        return embedder.vectors(engine, pairs)[:, 0].copy()

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        add_special: bool = True,
        parse_special: bool = False,
        images: Sequence[Any] = (),
        audio: Sequence[Any] = (),
        **options: Unpack[Options],
    ) -> Completion:
        """Generates a continuation of a prompt.

        Args:
            prompt: a string, or token ids, which are used unchanged.  An empty prompt consists of BOS.
            add_special, parse_special: how a string is tokenized; see `tokenize`.
            images: paths, bytes of files, Pillow images or arrays uint8 [height, width, 3].  They replace the
                ``<__media__>`` placeholders of the prompt.  Without placeholders they precede the prompt.
            audio: paths, bytes of WAV, MP3, FLAC or OGG files, or arrays of samples at 16 kHz, floats or int16 [n]
                or [n, channels].  They follow the images and replace placeholders in the same way.
            options: ``max_tokens``, ``stop``, ``temperature``, ``seed``, …; see `localllm.Options`.

        Raises:
            TypeError: an option is unknown.
            UsageError: an option or token is out of range; the prompt is empty and the model has no BOS; or an image
                or audio clip cannot be read, or the model does not accept it.
            GrammarError: ``json_schema``, ``regex`` or ``grammar`` cannot be used.
            ContextLengthError: the prompt is too long; see ``overflow``.
        """
        checked = self.with_defaults(options)
        return warned(self._stream(prompt, add_special, parse_special, checked, images, audio).read())

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        add_special: bool = True,
        parse_special: bool = False,
        images: Sequence[Any] = (),
        audio: Sequence[Any] = (),
        **options: Unpack[Options],
    ) -> Stream:
        """Like `generate`, but return an iterator of chunks, for ``for`` and ``async for``.

        Closing the iterator cancels the request.  The call tokenizes the prompt: in an event loop, call it in another
        thread if the prompt is long.
        """
        return self._stream(prompt, add_special, parse_special, self.with_defaults(options), images, audio)

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_variables: Mapping[str, object] | None = None,
        reply_prefix: str = "",
        **options: Unpack[Options],
    ) -> Completion:
        """Answers the last message of a chat.

        The completion's ``text`` is the answer.  Separate fields contain the reasoning and the tool calls.  A tool
        call that cannot be parsed stays in the text and causes a warning.

        Args:
            messages: mappings with a ``role`` ("system", "user", "assistant") and a ``content``: a string, or a list
                of parts.  Parts are ``{"type": "text", "text": …}``, ``{"type": "image", "image": …}`` with a value
                that ``images`` of `generate` accepts, ``{"type": "audio", "audio": …}``, and OpenAI's ``image_url``
                (with a data URL) and ``input_audio``.
            tools: JSON schemas of functions that the model may call.  A template that ignores tools causes a warning.
            template_variables: further variables of the template, such as ``{"enable_thinking": False}``.
            reply_prefix: the start of the answer, which the model continues.  The completion contains only the
                continuation.  Names of control tokens in the prefix are plain text.
            options: ``max_tokens``, ``stop``, ``temperature``, ``seed``, …; see `localllm.Options`.

        Raises:
            TemplateError: ``messages`` is empty, a message is malformed, or the template fails or rejects it.
            TypeError, UsageError, ContextLengthError: as in `generate`.
        """
        checked = self.with_defaults(options)
        stream = self._stream_chat(messages, tools, template_variables, reply_prefix, checked)
        return warned(stream.read())

    def stream_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_variables: Mapping[str, object] | None = None,
        reply_prefix: str = "",
        parse: bool | Sequence[Mapping[str, object]] | ChosenTools = True,
        **options: Unpack[Options],
    ) -> Stream:
        """Like `chat`, but return an iterator of chunks.  Closing the iterator cancels the request.

        A chunk contains ``text``, ``reasoning``, or a piece of a ``call``.  The last chunk contains the reply's
        ``warnings``.  With ``parse=False``, the text is the complete output.  A list of tools as ``parse`` replaces
        ``tools`` in the parser.  A `localllm.chat.tool_choice.ChosenTools` may also require a call, or limit a reply
        to one call.
        """
        checked = self.with_defaults(options)
        return self._stream_chat(messages, tools, template_variables, reply_prefix, checked, parse)

    def generate_many(
        self,
        prompts: Iterable[str | Sequence[int] | Messages],
        *,
        add_special: bool = True,
        parse_special: bool = False,
        **options: Unpack[Options],
    ) -> Iterator[Completion]:
        """Like `generate` for many prompts.  Runs them concurrently and yields completions in order.

        By default the prompts have a lower priority than other requests (``priority``).

        Args:
            prompts: any iterable.  Prompts are read ahead of the yielded completions.  A list of messages is a chat,
                which is answered as by `chat`.
            add_special, parse_special: as in `generate`.
            options: as in `generate`, except that ``progress`` is called with the number of finished and of started
                completions.

        Raises:
            TypeError, UsageError: an option is unknown or out of range.

        The error of a prompt is raised instead of its completion, after the completions of earlier prompts.  Later
        prompts are not read.
        """
        options.setdefault("priority", "background")
        checked = self.with_defaults(options)
        self._opened()
        if isinstance(prompts, str | bytes):
            raise UsageError.of("prompts", prompts, "a list of prompts: use generate for a single one")
        if not isinstance(prompts, Iterable):
            raise UsageError.of("prompts", prompts, "a list of prompts")
        return self._generate_many(iter(prompts), add_special, parse_special, checked)

    def _generate_many(
        self, prompts: Iterator[Any], add_special: bool, parse_special: bool, checked: CheckedOptions
    ) -> Iterator[Completion]:
        engine, progress, checked = self._opened(), checked.progress, replace(checked, progress=None)
        numbered = enumerate(prompts)
        refused: list[tuple[int, Any]] = []
        streams: dict[int, Stream] = {}
        results: dict[int, Completion | Exception] = {}
        ended_streams: queue.SimpleQueue[int] = queue.SimpleQueue()
        n_begun = n_yielded = 0
        try:
            while True:
                for i, prompt in islice(chain(refused, numbered), _AT_ONCE - len(streams)):
                    on_end = partial(ended_streams.put, i)
                    try:
                        if _is_chat(prompt):
                            streams[i] = self._stream_chat(prompt, None, None, "", checked, on_end=on_end)
                        else:
                            streams[i] = self._stream(prompt, add_special, parse_special, checked, on_end=on_end)
                    except Exception as error:
                        if streams and isinstance(error, QueueFullError):
                            refused = [(i, prompt)]  # retried when one of these streams has ended_streams
                        else:
                            results[i], refused, numbered = error, [], enumerate(())
                        break
                    refused, n_begun = [], i + 1
                while n_yielded in results:
                    result = results.pop(n_yielded)
                    if isinstance(result, Exception):
                        raise result
                    yield result
                    n_yielded += 1
                if not streams:
                    return
                i = engine.wait_for(ended_streams)
                try:
                    stream = streams.pop(i)
                    results[i] = warned(stream.read())
                except Exception as error:
                    results[i], refused, numbered = error, [], enumerate(())
                if progress is not None:
                    progress(n_yielded + len(results), n_begun)
        finally:
            for stream in streams.values():
                stream.close()

    async def agenerate(
        self,
        prompt: str | Sequence[int],
        *,
        add_special: bool = True,
        parse_special: bool = False,
        images: Sequence[Any] = (),
        audio: Sequence[Any] = (),
        **options: Unpack[Options],
    ) -> Completion:
        """Like `generate`, for asyncio.  Other tasks keep running; cancelling the task cancels the request."""
        checked = self.with_defaults(options)
        return warned(await self._stream(prompt, add_special, parse_special, checked, images, audio).aread())

    async def achat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_variables: Mapping[str, object] | None = None,
        reply_prefix: str = "",
        **options: Unpack[Options],
    ) -> Completion:
        """Like `chat`, for asyncio.  Other tasks keep running; cancelling the task cancels the request."""
        checked = self.with_defaults(options)
        stream = self._stream_chat(messages, tools, template_variables, reply_prefix, checked)
        return warned(await stream.aread())

    #: Aliases for asyncio; a `Stream` supports ``async for``.
    astream, astream_chat = stream, stream_chat

    def prepare_grammars(self) -> None:
        """Builds the tables that ``json_schema``, ``regex`` and ``grammar`` need; later calls do nothing.

        For a large vocabulary this takes half a second, during which no other Python thread can run.  A server calls
        it while it loads the model.
        """
        engine = self._opened()
        if self._embedder is None:
            self._all_grammars(engine).prepare()

    @property
    def counts(self) -> Counts:
        """Counters since the model was loaded: steps, tokens, and cache in use."""
        return self._opened().counts

    @property
    def n_waiting(self) -> int:
        """Number of queued requests."""
        return self._opened().n_waiting

    def forget(self) -> None:
        """Clears the cache of earlier prompts in memory.

        The next prompt is evaluated completely, except for tokens that are in the folder ``prompt_cache`` of `load`.
        """
        self._opened().forget()

    @property
    def prompts_key(self) -> str:
        """Return the key of saved prompts: a hash of the model, version, device and cache type."""
        return self._info.prompts_key

    def save_prompts(self, path: str | os.PathLike[str]) -> int:
        """Writes the cache of prompts and replies to a file, and returns the number of tokens.

        Raises:
            OutputError: the file cannot be written.
        """
        from localllm.engine import saved_prompts

        target, key = expanded(path), self.prompts_key
        return saved_prompts.save(self._opened().with_cache, target, key)

    def load_prompts(self, path: str | os.PathLike[str]) -> int:
        """Loads a file of `save_prompts` into the cache; its prefixes of prompts are not evaluated again.

        Returns:
            The number of loaded tokens; smaller than the number saved if the cache is full.

        Raises:
            PromptCacheError: the file does not exist, is damaged, or belongs to another model, version, device or
                cache type.  The tokens before the damage are loaded.
        """
        from localllm.engine import saved_prompts

        source, key = expanded(path), self.prompts_key
        return saved_prompts.load(self._opened().with_cache, source, key)

    def close(self) -> None:
        """Frees the model's memory.  Running requests of other threads end with a `ClosedError`."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # type checkers would accept every attribute

        def __getattr__(self, name: str) -> Never:
            raise no_attribute("'LLM' object", name, THEIR_METHODS)

        def __call__(self, *_: Any, **__: Any) -> Never:
            raise TypeError(f"an LLM cannot be called: use {THEIR_METHODS['create_completion']}")

    def __repr__(self) -> str:
        state = "closed" if self._engine is None else f"context={self._info.context}"
        return f"<LLM {self._info.path.name} ({self._info.file_type}) on {self._info.device}, {state}>"

    def with_defaults(self, options: Options | Mapping[str, Any]) -> CheckedOptions:
        """Return the options of a call, with `defaults` added.  With ``sampling``, no sampling defaults are added."""
        defaults = {} if options.get("sampling") is not None else self.defaults
        if any(options.get(name) is not None for name in GRAMMARS):
            defaults = {name: value for name, value in defaults.items() if name not in GRAMMARS}
        return CheckedOptions.of({**defaults, **options})

    def _check_writes(self) -> None:
        if self._embedder is not None:
            raise UsageError(f"{self._info.path.name} does not generate text: use embed or rerank")

    def _opened(self) -> Engine:
        process.engines.check()
        engine = self._engine
        if engine is None:
            raise ClosedError(f"{self._info.path.name} was closed: load it again to continue")
        return engine

    def _stream(
        self,
        prompt: str | Sequence[int],
        add_special: bool,
        parse_special: bool,
        checked: CheckedOptions,
        images: Sequence[Any] = (),
        audio: Sequence[Any] = (),
        on_end: Callable[[], object] | None = None,
    ) -> Stream:
        context = self._opened().context
        prompt_media = NO_MEDIA
        if media := self._media(images, audio):
            ids, prompt_media = self._prompt_with_media(prompt, media, add_special, parse_special)
        else:
            ids = self._prompt_ids(prompt, add_special, parse_special)
            if checked.overflow == "truncate":
                ids = truncate(ids, self._prompt_limit(checked, context), self._tokenizer.bos_id)
        # After text, the first space belongs to the continuation; after BOS or a control token it does not.
        continuation = ids[-1] >= 0 and not self._tokenizer.is_special(ids[-1])
        more: dict[str, Any] = {"truncatable": not media, "media": prompt_media, "on_end": on_end}
        return self._start(ids, checked, continuation=continuation, **more)

    def _media(self, images: Sequence[Any], audio: Sequence[Any]) -> list[Media]:
        """Return the images, followed by the audio clips."""
        if not (images or audio):
            return []
        from localllm.chat.conversation import Media

        clips = list[Media]()
        arguments: Any = ("images", images, "image", "image"), ("audio", audio, "audio clip", "audio")
        for name, values, noun, kind in arguments:
            if isinstance(values, str | bytes) or not isinstance(values, Sequence):
                raise UsageError.of(name, values, f"a list of {noun}s")
            for i, value in enumerate(values):
                clips.append(value if isinstance(value, Media) else Media(value, where=f"{noun} {i}", kind=kind))
        return clips

    def _prompt_with_media(
        self, prompt: str | Sequence[int], media: Sequence[Media], add_special: bool, parse_special: bool
    ) -> tuple[list[int], PromptMedia]:
        """Return the token ids of text whose `MEDIA` placeholders are replaced by images and audio.

        Without placeholders, the media precede the text.
        """
        encoder, tokenizer = self._encoder_of(media), self._tokenizer
        name = Argument("images" if media[0].kind == "image" else "audio")
        if not isinstance(prompt, str):
            raise UsageError(name, " need a prompt that is text, not token ids")
        texts = prompt.split(MEDIA)
        if len(texts) == 1:
            texts = [""] * len(media) + texts
        if len(texts) != len(media) + 1:
            nouns = " and ".join(dict.fromkeys("audio clips" if m.kind == "audio" else "images" for m in media))
            words = f" has {len(media)} {nouns}, but the prompt contains {len(texts) - 1} times {MEDIA}: match them"
            raise UsageError(name, words)
        pieces: list[str | Media] = [texts[0]]
        for medium, next_text in zip(media, texts[1:], strict=True):
            opening, _, closing = encoder.markers[medium.kind]
            pieces += [opening, medium, f"{closing}{next_text}"]
        ids, placed = encoder.prompt(pieces, partial(tokenizer.encode, add_special=False, parse_special=True))
        return self._with_bos(ids, placed) if add_special else (ids, PromptMedia(placed))

    def _with_bos(self, ids: list[int], placed: Sequence[MediaTokens]) -> tuple[list[int], PromptMedia]:
        """Return a prompt that starts with BOS, if the model requires it."""
        ids_with_bos = self._tokenizer.with_bos(ids)
        n = len(ids_with_bos) - len(ids)
        return ids_with_bos, PromptMedia([tokens._replace(start=tokens.start + n) for tokens in placed])

    @property
    def _reads_by_encoder(self) -> bool:
        """Whether an encoder reads prompts."""
        return self._opened().graph.prompt is not None

    def _prompt_limit(self, checked: CheckedOptions, context: int) -> int:
        """Return the maximum tokens of a truncated prompt. The start token of a decoder is not part of the prompt."""
        return context - checked.reserved_for_reply(context) - self._reads_by_encoder

    def _encoder_of(self, media: Sequence[Media]) -> MediaEncoder:
        """Return the encoder of images and audio.  Raises UsageError if the encoder does not support ``media``."""
        for kind in dict.fromkeys(medium.kind for medium in media):
            if self._encoder is None:
                nouns = "audio" if kind == "audio" else "images"
                raise UsageError(
                    f"{self._info.path.name} was loaded without an encoder of {nouns}: pass its mmproj file as ",
                    Argument("mmproj"),
                )
            self._encoder.of_kind(kind)
        assert self._encoder is not None
        return self._encoder

    def _continued(
        self, prompt: str | Sequence[int], continuation: str | Sequence[int], add_special: bool
    ) -> tuple[list[int], int]:
        """Return the tokens of a prompt with its continuation, and the index of the continuation's first token."""
        if isinstance(continuation, str) and isinstance(prompt, str):
            stripped = prompt.rstrip()
            before = self._prompt_ids(stripped, add_special, False)
            ids = self.tokenize(prompt + continuation, add_special)
            if ids[: len(before)] == before:
                return ids, len(before)
            continuation = prompt[len(stripped) :] + continuation
        else:
            before = self._prompt_ids(prompt, add_special, False)
        if isinstance(continuation, str):
            return before + self._tokenizer.encode(continuation, add_special=False, continuation=True), len(before)
        return before + token_ids(continuation, self._info.n_vocab), len(before)

    def _prompt_ids(self, prompt: str | Sequence[int], add_special: bool, parse_special: bool) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenize(prompt, add_special, parse_special)
        else:
            if _is_chat(prompt):
                raise UsageError(Argument("prompt"), " is a list of messages: pass it to chat")
            if isinstance(prompt, list | tuple) and any(isinstance(item, str | list | tuple) for item in prompt):
                many = " is a list of prompts: pass it to generate_many, or a single prompt to generate"
                raise UsageError(Argument("prompt"), many)
            ids = token_ids(prompt, self._info.n_vocab, "prompt", "text or a list of token ids")
        if ids:
            return ids
        bos = self._tokenizer.bos_id
        if bos is None:
            raise UsageError("the prompt is empty, and the model has no BOS token: pass a prompt with text")
        return [bos]

    def _stream_chat(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object] | None,
        reply_prefix: str,
        checked: CheckedOptions,
        parse: bool | Sequence[Mapping[str, object]] | ChosenTools = True,
        on_end: Callable[[], object] | None = None,
    ) -> Stream:
        from localllm.chat.conversation import read_messages
        from localllm.chat.reply import ReplyParser
        from localllm.chat.tool_choice import ChosenTools

        context = self._opened().context
        encode = self._chat_encoder(tools, variables, reply_prefix)
        chat = read_messages(messages, may_open_files=True)
        (ids, prompt_media), n_turns = encode(chat), sum(message.role == "user" for message in chat)
        limit = self._prompt_limit(checked, context)
        if checked.overflow == "truncate" and len(ids) > limit and n_turns > 1:
            # The prompt's length grows with the number of turns, so bisection finds the smallest number to omit.
            n_omitted = range(1, n_turns - 1)
            n = 1 + bisect_left(n_omitted, True, key=lambda n: len(encode(without_turns(chat, n))[0]) <= limit)
            ids, prompt_media = encode(without_turns(chat, n))
        parser = ReplyParser.after(ids, self._tokenizer, tools or (), reply_prefix)
        splitter = parser.splitter()
        if not isinstance(parse, ChosenTools):
            offered = [] if parse is False else (tools or ()) if parse is True else parse
            parse, chosen = parse is not False, ChosenTools([dict(tool) for tool in offered])
        else:
            chosen, parse = parse, True
        parser.offer(chosen.offered)
        # The space at the start of text after a prefix belongs to the text.
        return self._start(
            ids,
            checked,
            continuation=bool(reply_prefix),
            template="" if reply_prefix else self._template_source.text or "",
            truncatable=n_turns > 1,
            media=prompt_media,
            on_end=on_end,
            splitter=splitter,
            parser=parser if parse else None,
            calls=self._calls(chosen, tools, checked, parser.opened, reply_prefix),
        )

    def _calls(
        self,
        chosen: ChosenTools,
        tools: Sequence[Mapping[str, object]] | None,
        checked: CheckedOptions,
        opened: str,
        reply_prefix: str,
    ) -> tuple[CallGrammar, CallSearch] | None:
        """Return the grammar of a reply's tool calls, and the search for the first call; None for no grammar.

        Args:
            chosen: the tools that may be called.
            tools: the tools in the prompt. Without tools in the prompt, a system message describes them.
            opened: as in `ReplyParser`.
        """
        from localllm.chat.tool_choice import is_function

        writes_tokens = self._opened().diffusion is None
        if chosen.forced and not writes_tokens:
            raise UsageError("a model that writes by diffusion cannot be forced to call a tool: let it choose")
        callable_tools = [tool for tool in chosen.forced or chosen.offered if is_function(tool)]
        is_off = checked.sampling.grammar_kind is not None or not (checked.tool_grammar and writes_tokens)
        if not callable_tools or (is_off and not chosen.forced):
            return None
        from localllm.chat.calls.formats import DESCRIBED
        from localllm.chat.calls.grammar import call_grammar
        from localllm.sampling.call_constraint import CallSearch

        call_format = self.chat_template.used_for({"tools": tools}).call_format if tools else DESCRIBED
        if call_format is None and not chosen.forced:
            return None
        grammar = call_grammar(
            call_format or DESCRIBED,
            callable_tools,
            chosen.custom,
            must_call=bool(chosen.forced),
            one_call=chosen.one_call,
        )
        return grammar, CallSearch(grammar, opened, reply_prefix)

    def _chat_encoder(
        self, tools: Sequence[Mapping[str, object]] | None, variables: Mapping[str, object] | None, reply_prefix: str
    ) -> Callable[[Sequence[Message]], tuple[list[int], PromptMedia]]:
        """Return a function that converts messages to token ids and the positions of media."""
        from localllm.chat import encode_chat

        tokenizer = self._tokenizer
        self._opened()
        more: dict[str, Any] = self.template_variables | checked_variables({} if variables is None else variables)
        if tools is not None:
            mappings("tools", tools)
        text("reply_prefix", reply_prefix)
        if reply_prefix and self._reads_by_encoder:
            raise UsageError(
                "an encoder reads the model's prompts, so the model cannot continue a reply: end the chat with a "
                "user's message, without ",
                Argument("reply_prefix"),
            )
        template = self.chat_template
        if template.is_fallback:
            warn(f"{self._info.path} has no chat template: ChatML is used, which the model may not know")
        if tools and not template.reads("tools"):
            warn(f"the chat template of {self._info.path} does not use tools, so the model does not see them")
        prepared: dict[Media, PreparedMedia] = {}

        def encode(messages: Sequence[Message]) -> tuple[list[int], PromptMedia]:
            prompt_media = NO_MEDIA
            if media := [medium for message in messages for medium in message.media]:
                encoder = self._encoder_of(media)
                pieces = template.render_with_media(messages, encoder.markers, tools=tools, **more)
                as_tokens = partial(tokenizer.encode, add_special=False, parse_special=True)
                ids, prompt_media = self._with_bos(*encoder.prompt(pieces, as_tokens, prepared))
            else:
                ids = encode_chat(tokenizer, template, messages, tools=tools, **more)
            if not reply_prefix:
                return ids, prompt_media
            follows_text = bool(ids) and ids[-1] >= 0 and not tokenizer.is_special(ids[-1])
            ids = ids + tokenizer.encode(reply_prefix, add_special=False, continuation=follows_text)
            return ids, prompt_media

        return encode

    def _start(
        self,
        ids: list[int],
        checked: CheckedOptions,
        *,
        continuation: bool,
        truncatable: bool,
        template: str = "",
        media: PromptMedia = NO_MEDIA,
        on_end: Callable[[], object] | None = None,
        splitter: ThinkingSplitter | None = None,
        parser: ReplyParser | None = None,
        calls: tuple[CallGrammar, CallSearch] | None = None,
    ) -> Stream:
        """Submits a request.

        Args:
            calls: the grammar of tool calls, and the search for the first call.
            parser: splits a chat's reply into events.
            splitter: separates reasoning, which stop strings do not end, from the answer.
            truncatable: whether a prompt that is too long can be truncated.
            template: the chat template, if this request starts an answer.
            media: images and audio of the prompt, with their positions in ``ids``.
        """
        engine, tokenizer = self._opened(), self._tokenizer
        self._check_writes()
        if self._reads_by_encoder:
            assert self._encoder is not None
            ids, media = self._encoder.encoded_prompt(ids)
        sampling = checked.sampling
        banned = tokenizer.suppressed_ids | (tokenizer.eog_ids if checked.ignore_eos else frozenset())
        if banned:
            sampling = sampling.replace(logit_bias={**sampling.logit_bias, **dict.fromkeys(banned, -math.inf)})
        decoder = StreamDecoder(tokenizer, checked.stop, continuation=continuation, splitter=splitter)
        if len(ids) > engine.context:
            truncated = checked.overflow == "truncate"
            remedies = (Argument("overflow", "truncate"),) if truncatable and not truncated else ()
            raise ContextLengthError(len(ids), engine.context, *remedies, truncated=truncated)
        make_request = partial(
            Request,
            ids,
            stop_ids=tokenizer.eog_ids,
            max_tokens=checked.max_tokens,
            priority=checked.priority,
            timeout_s=checked.timeout,
            client=checked.client,
            adapters=self._adapter_scales(checked.adapters),
            media=media,
        )
        if (diffusion := engine.diffusion) is not None:
            limits = {"context": engine.context, "max_masks": engine.max_outputs}
            make_request.keywords["canvas"] = make_canvas(ids, checked, sampling, diffusion, **limits)
        else:
            check_no_diffusion(checked)
            make_request.keywords.update(
                sampler=self._sampler(engine, checked, sampling, calls, template, splitter, ids, media),
                speculate=_drafting(checked, engine.drafts_by),
                draft_max=checked.draft_max,
                draft_always=checked.draft_always,
                probe=self._probe(checked, len(ids)),
            )
        return Stream(
            engine,
            decoder,
            make_request,
            logprobs=sampling.logprobs is not None,
            progress=checked.progress,
            on_end=on_end,
            parser=parser,
        )

    def _sampler(
        self,
        engine: Engine,
        checked: CheckedOptions,
        sampling: Sampling,
        calls: tuple[CallGrammar, CallSearch] | None,
        template: str,
        splitter: ThinkingSplitter | None,
        ids: list[int],
        media: PromptMedia,
    ) -> Sampler:
        """Return the sampler of a request.  `_start` documents the arguments."""
        text_of = text_ids(ids) if media.placed else ids
        return Sampler(
            sampling,
            engine.n_vocab,
            prompt_ids=text_of,
            token_bytes=self._tokenizer.token_bytes,
            constraint=self._constraint(engine, sampling, calls, text_of, template),
            reasoning=self._reasoning_limit(checked, splitter, text_of),
        )

    def _constraint(
        self,
        engine: Engine,
        sampling: Sampling,
        calls: tuple[CallGrammar, CallSearch] | None,
        prompt_ids: Sequence[int],
        template: str,
    ) -> Constraint | CallConstraint | None:
        """Return the constraint of tool calls or of the settings' grammar; None without both."""
        if calls is not None:
            return self._all_grammars(engine).call_constraint(*calls, prompt_ids, template)
        if sampling.grammar_kind is not None:
            return self._all_grammars(engine).constraint(sampling, prompt_ids, template)
        return None

    def _reasoning_limit(
        self, checked: CheckedOptions, splitter: ThinkingSplitter | None, prompt_ids: Sequence[int]
    ) -> ReasoningLimit | None:
        """Return the limit of a chat's reply, or of any request with ``reasoning_budget``; otherwise None."""
        if splitter is None and checked.reasoning_budget is None:
            return None
        from localllm.chat.thinking import ThinkingSplitter, opening_tag
        from localllm.sampling.reasoning_limit import ReasoningLimit

        if splitter is None:
            splitter = ThinkingSplitter(opening_tag(self._tokenizer.decode(prompt_ids[-16:], special=True)))
        budget = None if checked.reasoning_budget == -1 else checked.reasoning_budget
        return ReasoningLimit(copy(splitter), self._tokenizer, budget, checked.reasoning_budget_message or "")

    def _adapter_scales(self, requested: Mapping[str, float] | None) -> tuple[float, ...]:
        """Return the scale of each adapter for a request; empty if all scales are 0."""
        requested, loaded = requested or {}, self._options.adapters or {}
        for name in requested.keys() - loaded.keys():
            hint = f"the loaded adapters are {', '.join(map(repr, loaded))}" if loaded else "no adapter is loaded"
            raise UsageError(f"there is no adapter {name!r:.80}: {hint}; see load_adapter")
        scales = tuple(requested.get(name, 0.0) for name in loaded)
        return scales if any(scales) else ()

    def _all_grammars(self, engine: Engine) -> Grammars:
        if self._grammars is None:
            # Imported here because most requests have no grammar.
            from localllm.sampling.grammar import Grammars

            self._grammars = Grammars(self._tokenizer, engine.n_vocab)
        return self._grammars


def warned(completion: Completion) -> Completion:
    """Emit the warnings of a completion as Python warnings, and return the completion."""
    for message in completion.warnings:
        warn(message)
    return completion


def _is_chat(prompt: object) -> bool:
    """Return whether a prompt is a list of messages."""
    return isinstance(prompt, list | tuple) and any(isinstance(item, Mapping) for item in prompt)


def checked_variables(value: object) -> dict[str, object]:
    """Return ``template_variables`` as a dict.

    Raises:
        UsageError: the value is not a mapping, or a name is not a string or is reserved.
    """
    if not isinstance(value, Mapping):
        raise UsageError.of("template_variables", value, "a mapping of names to values")
    if len(value) > MAX_VARIABLES:
        many = f" has {len(value):,} names: give up to {MAX_VARIABLES:,}"
        raise UsageError(Argument("template_variables"), many)
    for name in value:
        if not isinstance(name, str):
            raise UsageError(Argument("template_variables"), f" has the name {name!r:.80}, but names must be strings")
        if name in _RESERVED_NAMES:
            raise UsageError(Argument("template_variables"), f" cannot contain {name!r}, which chat sets")
    return dict(value)


def truncate(ids: list[int], n_tokens: int, bos_id: int | None) -> list[int]:
    """Return at most the last ``n_tokens`` of ``ids``.  A BOS at the start is retained."""
    if len(ids) <= n_tokens:
        return ids
    if ids[0] == bos_id and n_tokens > 1:
        return [ids[0], *ids[len(ids) - n_tokens + 1 :]]
    return ids[len(ids) - n_tokens :]


def without_turns(messages: Sequence[Message], n: int) -> list[Message]:
    """Return a chat without its ``n`` oldest turns.  A turn is a user message with the messages that follow it.

    System messages are retained.
    """
    start = [i for i, message in enumerate(messages) if message.role == "user"][n]
    return [*(message for message in messages[:start] if message.role in ("system", "developer")), *messages[start:]]
