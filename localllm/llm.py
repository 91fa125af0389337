"""The library's front door: `load` a model file, and generate text with the `LLM` that it gives."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from localllm.checks import mappings, text, token_ids
from localllm.completion import Completion, Stream
from localllm.drafting.costs import StepCosts
from localllm.drafting.drafter import Drafter
from localllm.drafting.lookup import LookupDrafter
from localllm.drafting.model import ModelDrafter
from localllm.engine import Engine
from localllm.errors import ClosedError, ContextLengthError, NotEnoughMemoryError, UsageError
from localllm.generation import Generation
from localllm.info import ModelInfo
from localllm.kernels.cpu.host import available_memory
from localllm.kernels.graph import CacheType
from localllm.loading import LoadOptions, Parts, compile_template, load_parts
from localllm.options import Options, Request
from localllm.progress import LoadPlan, LoadProgress, default_progress
from localllm.sampling import make_sampler
from localllm.tokenizer import Tokenizer
from localllm.tokenizer.stream import StreamDecoder

# jinja2, which it imports, takes a good part of the time to the first token of those that do not chat.
if TYPE_CHECKING:
    from localllm.chat import ChatTemplate

Message = Mapping[str, object]

#: Names that `LLM.chat` gives to a template, or to the functions that run it, itself.
_TAKEN_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "tokenizer", "template", "self"})


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    n_gpu_layers: int | None = None,
    tensor_split: Sequence[float] | None = None,
    context: int | None = None,
    threads: int | None = None,
    isa: str | None = None,
    parallel: int = 1,
    cache_type: CacheType = "f16",
    chat_template: str | None = None,
    draft_model: str | os.PathLike[str] | None = None,
    progress: LoadProgress | None = None,
    planned: LoadPlan | None = None,
) -> LLM:
    """Loads a model.

    Args:
        path: a GGUF file, any one of a split model's; or "ORG/REPO", "ORG/REPO:QUANT" or "ORG/REPO:FILE" for one in
            the cache of the Hugging Face hub, where ``localllm pull`` puts it; or None for the small demo model that
            comes with localllm.
        device: "cpu"; "cuda", all GPUs, or "cuda:0,1", these ones, and the CPU for layers that they have no room
            for; "auto", "cuda" where there is a GPU that works, else "cpu"; or "reference", plain numpy, slow and
            exact.
        n_gpu_layers: how many of the model's layers, the last ones, go to GPUs; the rest run on the CPU.  By default
            as many as fit; 0 puts none there, and more than the model has means all.
        tensor_split: in what proportion GPUs share those layers, a number for each, such as (3, 1); by default in
            that of their free memory.
        context: tokens that a prompt and its answer can have together.  By default as many as the model was
            trained on, at most 4,096, and fewer where memory is short.  More than it was trained on is allowed,
            with a warning.
        threads: how many compute; by default one for each physical core that the process may use, and to decode as
            many of them as read memory fastest, which is measured on each machine and kept.
        isa: the instruction set of the CPU's kernels, such as "avx2"; by default the best that runs here.
        parallel: how many sequences of full length the cache has room for.  Threads that generate at the same
            time share it; where it is too small they wait for each other.
        cache_type: what the cache keeps keys and values in: "f16", or "q8_0", bytes with a scale for each 32,
            which takes about half the memory, for logits that differ by about 1 %.
        chat_template: jinja2 source to use in place of the file's own template.
        draft_model: the GGUF file of a smaller model with the same vocabulary, which guesses tokens for the large
            one to check; see ``speculate`` in `localllm.options.Options`.
        progress: called while kernels are compiled, which the first start on a machine has to do, and weights
            packed: with "kernels" or "weights", how many kernels or bytes are done, and of how many.  By default,
            if standard error is a terminal, one line there says so when compiling takes long.
        planned: called once with the `localllm.placement.Plan`, before anything is loaded.

    Raises:
        GGUFError: the file is missing, not a GGUF, or damaged.
        ModelNotFoundError: no file has this name, and the hub's cache does not have it either.
        UnsupportedArchitectureError, ModelError: it holds no model that localllm runs, or a broken one.
        TokenizerError, TemplateError: its vocabulary, or the template given, is broken.
        DeviceError: the device is not there, or does not execute the instruction set.
        NotEnoughMemoryError: the model, or the draft model beside it, would not fit; said before anything is loaded.
        UsageError: an argument is out of range, or the draft model has another vocabulary.
    """
    options = LoadOptions(
        path=path,
        device=device,
        n_gpu_layers=n_gpu_layers,
        tensor_split=tensor_split,
        context=context,
        threads=threads,
        isa=isa,
        parallel=parallel,
        cache_type=cache_type,
        chat_template=chat_template,
        draft_model=draft_model,
        progress=default_progress() if progress is None else progress,
        planned=planned,
    )
    parts = load_parts(options)
    for message in parts.warnings:
        warnings.warn(message, stacklevel=2)
    return LLM(parts)


class LLM:
    """A loaded model; `load` makes it.

    Any number of threads may use it at once, and a program may have several.  What a prompt has in common with
    an earlier one is not evaluated again: the turns of a chat cost only what is new in them.

    Everything raises `ClosedError` after `close`.
    """

    def __init__(self, parts: Parts) -> None:
        self._tokenizer = parts.tokenizer
        self._engine: Engine | None = parts.engine
        self._draft_engine = parts.draft_engine
        self._end_threads = parts.end_threads
        self._info = parts.info
        self._template_source = parts.template_source
        self._template = parts.template
        self._costs = StepCosts()

    @property
    def info(self) -> ModelInfo:
        """What is known of the model: architecture, device, kernels, and the bytes of each group of layers."""
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether the file has a chat template, or one was given to `load`."""
        self._opened()
        return self._template_source.text is not None

    @property
    def chat_template(self) -> ChatTemplate:
        """The file's chat template, or the one given to `load`.

        Raises:
            TemplateError: it is not valid.
        """
        return self._compiled_template(stacklevel=3)

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The tokens of a text.

        Args:
            text: any text.
            add_special: put BOS in front, and EOS behind, if the model asks for them.
            parse_special: read names of control tokens, such as ``<|im_end|>``, as those tokens; leave it off
                for text of others.

        Raises:
            UsageError: it is no text.
            TokenizerError: the text is not valid Unicode, or cannot be spelled with the vocabulary.
        """
        self._opened()
        return self._tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def tokenize_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_variables: Mapping[str, object] | None = None,
        reply_prefix: str = "",
    ) -> list[int]:
        """The tokens of the prompt that `chat` makes of the same arguments, whether or not they fit the context.

        Raises:
            TemplateError, TokenizerError, UsageError: as `chat`.
        """
        return self._chat_encoder(tools, template_variables, reply_prefix, stacklevel=4)(messages)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of tokens; control tokens are left out, and invalid UTF-8 becomes U+FFFD.

        Raises:
            UsageError: an id is outside the vocabulary.
        """
        self._opened()
        return self._tokenizer.decode(token_ids(ids, self._info.n_vocab))

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """The logits after each token, float32 [len(ids), n_vocab].

        Raises:
            UsageError: there are no ids, or one is outside the vocabulary.
            ContextLengthError: there are more than the context holds.
            NotEnoughMemoryError: the result would not fit into memory.
        """
        engine = self._opened()
        ids = token_ids(ids, self._info.n_vocab)
        n_bytes, available = 4 * len(ids) * self._info.n_vocab, available_memory()
        if n_bytes > available:
            raise NotEnoughMemoryError(
                f"the logits of {len(ids):,} tokens take {n_bytes / 1e9:.2f} GB, but {available / 1e9:.2f} GB of "
                "memory is available: ask for fewer tokens at a time"
            )
        return engine.logits(ids)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        add_special: bool = True,
        parse_special: bool = False,
        **options: Unpack[Options],
    ) -> Completion:
        """Goes on with a prompt.

        Args:
            prompt: a text, or tokens, which are taken as they are.  Of an empty one BOS is the beginning.
            add_special, parse_special: how a text is tokenized; see `tokenize`.
            options: ``max_tokens``, ``stop``, ``temperature``, ``seed``, …; see `localllm.options.Options`.

        Raises:
            TypeError: an option is unknown.
            UsageError: an option or token is out of range, or the prompt empty and the model without BOS.
            ContextLengthError: the prompt is too long; see ``overflow``.
        """
        return self._stream(prompt, add_special, parse_special, Request.from_options(options)).read()

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        add_special: bool = True,
        parse_special: bool = False,
        **options: Unpack[Options],
    ) -> Stream:
        """As `generate`, but an iterator of chunks, as they come.  Closing it stops the work."""
        return self._stream(prompt, add_special, parse_special, Request.from_options(options))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_variables: Mapping[str, object] | None = None,
        reply_prefix: str = "",
        **options: Unpack[Options],
    ) -> Completion:
        """Answers the last message of a chat.

        Args:
            messages: each with a ``role`` ("system", "user", "assistant") and a ``content``.
            tools: JSON schemas of functions that the model may call, for templates that know them.
            template_variables: whatever else the template reads, such as ``{"enable_thinking": False}``.
            reply_prefix: what the answer begins with; the model goes on from there, and only what it adds comes
                back.  Names of control tokens in it are text.
            options: ``max_tokens``, ``stop``, ``temperature``, ``seed``, …; see `localllm.options.Options`.

        Raises:
            TemplateError: there are no messages, one is malformed, or the template fails or refuses them.
            TypeError, UsageError, ContextLengthError: as `generate`.
        """
        request = Request.from_options(options)
        return self._stream_chat(messages, tools, template_variables, reply_prefix, request).read()

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_variables: Mapping[str, object] | None = None,
        reply_prefix: str = "",
        **options: Unpack[Options],
    ) -> Stream:
        """As `chat`, but an iterator of chunks, as they come.  Closing it stops the work."""
        request = Request.from_options(options)
        return self._stream_chat(messages, tools, template_variables, reply_prefix, request)

    def forget(self) -> None:
        """Drops what the cache keeps of earlier prompts: the next one is evaluated from its beginning."""
        self._opened().forget()
        if self._draft_engine is not None:
            self._draft_engine.forget()

    def close(self) -> None:
        """Lets the model's memory go.  Generations under way in other threads end with a `ClosedError`."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
            if self._draft_engine is not None:
                self._draft_engine.close()
            self._end_threads()

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._engine is None else f"context={self._info.context}"
        return f"<LLM {self._info.path.name} ({self._info.file_type}) on {self._info.device}, {state}>"

    def _opened(self) -> Engine:
        engine = self._engine
        if engine is None:
            raise ClosedError(f"{self._info.path.name} was closed: load it again to go on")
        return engine

    def _stream(
        self, prompt: str | Sequence[int], add_special: bool, parse_special: bool, request: Request
    ) -> Stream:
        context = self._opened().context
        ids = self._prompt_ids(prompt, add_special, parse_special)
        if request.overflow == "truncate":
            ids = truncate(ids, context - request.room(context), self._tokenizer.bos_id)
        # After a text its first space is part of what follows; after BOS alone, or a control token, it is not.
        continuation = not self._tokenizer.is_special(ids[-1])
        return self._start(ids, request, continuation=continuation, truncatable=lambda: True)

    def _compiled_template(self, stacklevel: int) -> ChatTemplate:
        """The chat template; ``stacklevel`` is that of our caller's code, for warnings."""
        self._opened()
        if self._template is None:
            self._template = compile_template(self._template_source, self._tokenizer)
            if self._template.is_fallback:
                message = f"{self._info.path} has no chat template: ChatML is used, which the model may not know"
                warnings.warn(message, stacklevel=stacklevel)
        return self._template

    def _prompt_ids(self, prompt: str | Sequence[int], add_special: bool, parse_special: bool) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenize(prompt, add_special, parse_special)
        else:
            ids = token_ids(prompt, self._info.n_vocab, "prompt must be a text or a list of token ids")
        if ids:
            return ids
        bos = self._tokenizer.bos_id
        if bos is None:
            raise UsageError("the prompt is empty, and the model has no BOS token to begin with: give it some text")
        return [bos]

    def _stream_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object] | None,
        reply_prefix: str,
        request: Request,
    ) -> Stream:
        context = self._opened().context
        encode = self._chat_encoder(tools, variables, reply_prefix, stacklevel=5)

        def truncated(chosen: Sequence[Message], ids: list[int]) -> list[int]:
            limit = context - request.room(context)
            while len(ids) > limit and (shorter := without_oldest_turn(chosen)) is not None:
                chosen, ids = shorter, encode(shorter)
            return ids

        ids = encode(messages)
        if request.overflow == "truncate":
            ids = truncated(messages, ids)
        # What follows a prefix begins with a space of its own.
        return self._start(
            ids,
            request,
            continuation=bool(reply_prefix),
            truncatable=lambda: len(truncated(messages, ids)) <= context,
        )

    def _chat_encoder(
        self,
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object] | None,
        reply_prefix: str,
        *,
        stacklevel: int,
    ) -> Callable[[Sequence[Message]], list[int]]:
        """What makes tokens of messages; ``stacklevel`` as of `_compiled_template`."""
        from localllm.chat import encode_chat

        tokenizer = self._tokenizer
        self._opened()
        more: dict[str, Any] = {} if variables is None else template_variables(variables)
        if tools is not None:
            mappings("tools", tools)
        text("reply_prefix", reply_prefix)
        template = self._compiled_template(stacklevel)

        def encode(chosen: Sequence[Message]) -> list[int]:
            ids = encode_chat(tokenizer, template, chosen, tools=tools, **more)
            if not reply_prefix:
                return ids
            follows_text = bool(ids) and not tokenizer.is_special(ids[-1])
            return ids + tokenizer.encode(reply_prefix, add_special=False, continuation=follows_text)

        return encode

    def _start(
        self, ids: list[int], request: Request, *, continuation: bool, truncatable: Callable[[], bool]
    ) -> Stream:
        """Begins a generation; ``truncatable`` tells whether a prompt that is too long would fit truncated."""
        engine, tokenizer = self._opened(), self._tokenizer
        sampling = request.sampling
        if request.ignore_eos:
            banned = dict.fromkeys(tokenizer.eog_ids, -math.inf)
            sampling = sampling.replace(logit_bias={**sampling.logit_bias, **banned})
        decoder = StreamDecoder(tokenizer, request.stop, continuation=continuation)
        if len(ids) > engine.context:
            raise _too_long(len(ids), engine.context, request.overflow == "truncate", truncatable)
        sampler = make_sampler(sampling, engine.n_vocab, prompt_ids=ids, token_bytes=tokenizer.token_bytes)
        drafter = self._drafter(request)
        generation = Generation(
            engine,
            engine.start(ids),
            sampler,
            max_tokens=request.max_tokens,
            stop_ids=tokenizer.eog_ids,
            progress=request.progress,
            drafter=drafter,
        )
        return Stream(generation, decoder, logprobs=sampling.logprobs is not None)

    def _drafter(self, request: Request) -> Drafter | None:
        """What guesses tokens for one generation."""
        if request.speculate == "lookup":
            return LookupDrafter(self._costs, request.draft_max)
        if request.speculate is None or (request.speculate == "auto" and self._draft_engine is None):
            return None
        if self._draft_engine is None:
            raise UsageError(
                "speculate is 'draft', but there is no draft model: load the model with draft_model=..., or choose "
                "speculate='lookup'"
            )
        # Steps over one token take as long as reading the weights.
        draft = self._info if self._info.draft is None else self._info.draft
        expected_cost = draft.placement.multiplied / max(1, self._info.placement.multiplied)
        return ModelDrafter(self._draft_engine, self._costs, request.draft_max, expected_cost=expected_cost)


def _too_long(n_tokens: int, context: int, truncated: bool, truncatable: Callable[[], bool]) -> ContextLengthError:
    if truncated:
        advice = "the last message alone does not fit: shorten it or the system's, or choose a larger context"
        return ContextLengthError(n_tokens, context, advice, truncated=True)
    if truncatable():
        advice = "shorten it, load the model with a larger context, or pass overflow='truncate'"
        return ContextLengthError(n_tokens, context, advice, truncatable=True)
    return ContextLengthError(n_tokens, context, "shorten it or load the model with a larger context")


def template_variables(value: object) -> dict[str, object]:
    """What a template shall read beside the messages.

    Raises:
        UsageError: it is no mapping, or has a name that is not a text or has another meaning.
    """
    if not isinstance(value, Mapping):
        raise UsageError(f"template_variables is {value!r:.80}, but must be a mapping of names to values")
    for name in value:
        if not isinstance(name, str):
            raise UsageError(f"template_variables has the name {name!r:.80}, but names must be texts")
        if name in _TAKEN_NAMES:
            raise UsageError(f"template_variables cannot have the name {name!r}, which chat sets itself")
    return dict(value)


def truncate(ids: list[int], n_tokens: int, bos_id: int | None) -> list[int]:
    """The newest of ``ids``, ``n_tokens`` at most, with BOS in front if it was there."""
    if len(ids) <= n_tokens:
        return ids
    if ids[0] == bos_id and n_tokens > 1:
        return [ids[0], *ids[len(ids) - n_tokens + 1 :]]
    return ids[len(ids) - n_tokens :]


def without_oldest_turn(messages: Sequence[Message]) -> list[Message] | None:
    """A chat without its oldest turn, a user's message and what was said to it; None if there is just one.

    Messages of the system before it stay.
    """
    turns = [i for i, message in enumerate(messages) if message.get("role") == "user"]
    if len(turns) < 2:
        return None
    before, rest = messages[: turns[1]], messages[turns[1] :]
    return [*(message for message in before if message.get("role") in ("system", "developer")), *rest]
