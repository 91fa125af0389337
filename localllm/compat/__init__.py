"""The most used part of llama-cpp-python's API, with the same dicts as results.  Programs change only one import.

    from localllm.compat import Llama  # was: from llama_cpp import Llama

    llm = Llama("model.gguf", n_ctx=2048)
    print(llm("Q: Name the planets. A:", max_tokens=32, stop=["Q:", "\\n"], echo=True)["choices"][0]["text"])

Unsupported functions raise `NotAvailableError`.  The native API (`localllm.load`, `localllm.LLM`) has more features.
"""

from __future__ import annotations

import inspect
import random
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, Self, TypedDict, TypeVar, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from localllm.catalog.find import find_cached, trained_context
from localllm.catalog.hub_names import HubName
from localllm.catalog.pull import pull
from localllm.chat.built_in_templates import built_in
from localllm.chat.conversation import ToolCall
from localllm.chat.reply import CallDelta
from localllm.chat.tool_choice import choose_tools
from localllm.compat.llama_chat_format import (
    ChatFormatter,
    LlamaChatCompletionHandler,
    MTMDChatHandler,
    NotAvailableError,
    get_chat_completion_handler,
    registered_formats,
)
from localllm.compat.llama_types import (
    CreateChatCompletionResponse,
    CreateChatCompletionStreamResponse,
    CreateCompletionResponse,
    CreateCompletionStreamResponse,
    CreateEmbeddingResponse,
)
from localllm.errors import Argument, ContextLengthError, LocalLLMError, ModelNotFoundError, UsageError, warn
from localllm.files import read_text
from localllm.generation.completion import Chunk, Completion, Stream
from localllm.gguf import GGUFFile
from localllm.kernels.graph import CacheType
from localllm.llm import LLM, load, model_file, warned
from localllm.loading.devices import gpu_memory
from localllm.openai_format import call_delta_json, chat_logprobs_json, message_json, text_logprobs_json, usage_json
from localllm.options.checks import check_keywords, mappings, whole_number
from localllm.options.foreign_names import THEIR_METHODS, no_attribute
from localllm.sampling import Choice
from localllm.tokenizer.stream import TextOffsets

#: llama-cpp-python's handlers of other families of models, as in `llama_chat_format`.
Llava15ChatHandler = Llava16ChatHandler = ObsidianChatHandler = MoondreamChatHandler = MTMDChatHandler
NanoLlavaChatHandler = Llama3VisionAlphaChatHandler = MiniCPMv26ChatHandler = MTMDChatHandler
Qwen25VLChatHandler = Gemma4ChatHandler = MTMDChatHandler

#: Modules of llama_cpp that programs import from.  Their names become aliases of this module.
for _module in ("llama", "llama_grammar", "llama_speculative", "llama_cache"):
    sys.modules[f"{__name__}.{_module}"] = sys.modules[__name__]

#: llama.cpp's number for a random seed.
_ANY_SEED = 0xFFFFFFFF

#: llama.cpp's numbers of the supported cache types.
_CACHE_TYPES: Mapping[int, CacheType] = {1: "f16", 2: "q4_0", 6: "q5_0", 8: "q8_0"}

_NO_EFFECT = """
    n_batch n_ubatch n_threads_batch use_mmap use_mlock numa flash_attn offload_kqv op_offload swa_full no_perf
    last_n_tokens_size main_gpu split_mode embedding pooling_type attention_type verbose
"""
#: Keywords of the constructor without effect, because localllm manages batches, memory and attention itself.
_WITHOUT_EFFECT = frozenset(_NO_EFFECT.split())

#: Keywords accepted only with their default value, because other values would change the output.
_ONLY_DEFAULT: Mapping[str, tuple[object, ...]] = {
    "vocab_only": (False,),
    "kv_overrides": (None, {}),
    "rope_scaling_type": (-1,),
    "rope_freq_base": (0,),
    "rope_freq_scale": (0,),
    "yarn_ext_factor": (-1,),
    "yarn_attn_factor": (1, -1),
    "yarn_beta_fast": (32, -1),
    "yarn_beta_slow": (1, -1),
    "yarn_orig_ctx": (0,),
    "lora_base": (None,),
    "lora_path": (None,),
    "lora_scale": (1,),
    "tokenizer": (None,),
    "spm_infill": (False,),
}

_SAME = """
    temperature top_p min_p typical_p top_k frequency_penalty presence_penalty repeat_penalty mirostat_tau
    mirostat_eta stop seed logit_bias
"""
#: Keywords of a completion, and their names in localllm.
_OPTIONS = {
    **dict(zip(_SAME.split(), _SAME.split(), strict=True)),
    "mirostat_mode": "mirostat",
    "logits_processor": "processors",
}


@dataclass(frozen=True)
class LlamaState:
    """The tokens saved by `Llama.save_state`.  `Llama.load_state` evaluates them again."""

    input_ids: tuple[int, ...]
    seed: int

    @property
    def n_tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class LlamaPromptLookupDecoding:
    """A ``draft_model`` of `Llama` that drafts tokens from earlier text."""

    max_ngram_size: int = 2
    num_pred_tokens: int = 10


@dataclass(frozen=True)
class LlamaGrammar:
    """A grammar, for the argument ``grammar`` of a completion.

    Attributes:
        options: the keyword of `LLM.generate`: ``grammar`` or ``json_schema``.
    """

    options: Mapping[str, str]

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> Self:
        """Create a grammar from a string in GBNF, llama.cpp's notation."""
        return cls({"grammar": grammar})

    @classmethod
    def from_file(cls, file: str | Path, verbose: bool = True) -> Self:
        """Create a grammar from a GBNF file."""
        return cls.from_string(read_text(file))

    @classmethod
    def from_json_schema(cls, json_schema: str, verbose: bool = True) -> Self:
        """Create a grammar from a JSON schema, given as a string."""
        return cls({"json_schema": json_schema})


#: Types of functions of the tokens and of the logits after them, float32 [n_vocab].
#: A processor returns new logits.  A criterion returns whether the text ends.
LogitsProcessor = Callable[[NDArray[Any], NDArray[np.float32]], NDArray[np.float32]]
StoppingCriteria = Callable[[NDArray[Any], NDArray[np.float32]], bool]


class LogitsProcessorList(list[LogitsProcessor]):
    """Functions of tokens and logits, for ``logits_processor``."""

    def __call__(self, input_ids: NDArray[Any], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


class StoppingCriteriaList(list[StoppingCriteria]):
    """Functions of tokens and logits, for ``stopping_criteria``.  The text ends if any returns True."""

    def __call__(self, input_ids: NDArray[Any], logits: NDArray[np.float32]) -> bool:
        return any(criterion(input_ids, logits) for criterion in self)


@dataclass
class MinTokensLogitsProcessor:
    """Forbids a token until ``min_tokens`` tokens were generated."""

    min_tokens: int
    token_eos: int
    prompt_tokens: int | None = None

    def __call__(self, input_ids: NDArray[Any], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        if self.prompt_tokens is None:
            self.prompt_tokens = len(input_ids)
        if len(input_ids) - self.prompt_tokens < self.min_tokens:
            scores[self.token_eos] = -np.inf
        return scores


class LlamaSamplingOptions(TypedDict, total=False):
    """Keywords of `Llama.create_completion` and `Llama.create_chat_completion`."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    stop: str | list[str] | None
    seed: int | None
    frequency_penalty: float
    presence_penalty: float
    repeat_penalty: float
    tfs_z: float
    mirostat_mode: int
    mirostat_tau: float
    mirostat_eta: float
    logits_processor: Sequence[LogitsProcessor] | None
    grammar: LlamaGrammar | None
    logit_bias: Mapping[int, float] | None


class ChatOptions(LlamaSamplingOptions, total=False):
    """Keywords of `Llama.create_chat_completion`."""

    response_format: Mapping[str, Any] | None
    max_tokens: int | None
    model: str | None
    logprobs: bool | None
    top_logprobs: int | None


class CompletionOptions(LlamaSamplingOptions, total=False):
    """Keywords of `Llama.create_completion`."""

    logprobs: int | None
    echo: bool
    model: str | None
    stopping_criteria: Callable[[NDArray[Any], NDArray[np.float32]], bool] | None


#: Replacements for unsupported attributes of ``llama_cpp.Llama``.
_INSTEAD = {
    **{name: text.replace("LLM.", "Llama.llm.") for name, text in THEIR_METHODS.items()},
    "tokenizer": "Llama.llm.tokenizer",
}


class Llama:
    """A loaded model with the methods of ``llama_cpp.Llama``.

    Args:
        model_path: the argument ``path`` of `localllm.load`.
        n_gpu_layers: number of layers on GPUs; -1 is the largest number that fits, 0 only the CPU.
        n_ctx: tokens of context; 0 is the model's training context.
        seed: seed of all random numbers; random by default.
        type_k, type_v: llama.cpp's number of the cache's type: 1 is F16, 2 Q4_0, 6 Q5_0 and 8 Q8_0.
        chat_format: a name such as "chatml" or "llama-3", or a format that the program has registered
            (`localllm.compat.llama_chat_format`).  It replaces the file's chat template.  An unknown name only causes
            a warning.
        chat_handler: an `MTMDChatHandler` (or subclass) with the encoder of a model that accepts images, or a
            function that answers chats (`llama_chat_format.LlamaChatCompletionHandler`).
        logits_all: whether `eval` stores logits, for `scores`.
        draft_model: a `LlamaPromptLookupDecoding`, or a GGUF file of a smaller model.
        more: further keywords of llama-cpp-python, which have no effect or must have their default value.

    Raises:
        TypeError: a keyword is unknown.
        NotAvailableError: a value is not supported in this version of localllm.
        LocalLLMError: as in `localllm.load`.
    """

    def __init__(
        self,
        model_path: str,
        *,
        n_gpu_layers: int = 0,
        tensor_split: Sequence[float] | None = None,
        n_ctx: int = 512,
        n_threads: int | None = None,
        seed: int | None = _ANY_SEED,
        type_k: int | None = None,
        type_v: int | None = None,
        chat_format: str | None = None,
        chat_handler: MTMDChatHandler | LlamaChatCompletionHandler | None = None,
        draft_model: LlamaPromptLookupDecoding | str | None = None,
        logits_all: bool = False,
        **more: Any,
    ) -> None:
        parameters = inspect.signature(Llama).parameters.keys() - {"more"}
        check_keywords(more, sorted({*parameters, *_WITHOUT_EFFECT, *_ONLY_DEFAULT}), {})
        for name, allowed in _ONLY_DEFAULT.items():
            if name in more and more[name] not in allowed:
                raise NotAvailableError(f"{name} is {more[name]!r:.80}, but here it can only be {allowed[0]!r}")
        encoder = chat_handler.clip_model_path if isinstance(chat_handler, MTMDChatHandler) else None
        if chat_handler is not None and encoder is None and not callable(chat_handler):
            words = "but must be an image encoder, Llava15ChatHandler(clip_model_path=…), or a function"
            raise UsageError(f"chat_handler is {chat_handler!r:.80}, {words}")
        self._answers = None if isinstance(chat_handler, MTMDChatHandler) else chat_handler
        if chat_format in registered_formats():
            self._answers = self._answers or get_chat_completion_handler(chat_format or "")
            chat_format = None
        template = built_in((chat_format or "").replace("llama-3", "llama3"))
        if chat_format is not None and template is None:
            warn(f"chat_format {chat_format!r} has no effect: the file's own template is used")
        n_gpu_layers = whole_number("n_gpu_layers", n_gpu_layers, -1)
        if (n_gpu_layers > 0 or tensor_split) and not gpu_memory("auto"):
            warn(f"n_gpu_layers={n_gpu_layers} has no effect: no GPU can be used (localllm doctor says why)")
            n_gpu_layers, tensor_split = 0, None
        self._drafts: dict[str, Any] = {}
        if isinstance(draft_model, LlamaPromptLookupDecoding):
            self._drafts = {"speculate": "lookup", "draft_max": draft_model.num_pred_tokens}
            draft_model = None
        self.model_path = str(model_path)
        self.set_seed(seed)
        self._ids: tuple[int, ...] = ()
        self._keeps_scores = logits_all
        self._rows: list[NDArray[np.float32]] = []
        cache_type = _cache_type(type_k, type_v)
        try:
            #: The same model with localllm's native API.
            self.llm: LLM = load(
                model_path,
                device="cpu" if n_gpu_layers == 0 else "auto",
                n_gpu_layers=None if n_gpu_layers <= 0 else n_gpu_layers,
                tensor_split=tensor_split,
                context=n_ctx or trained_context(model_file(model_path, demo_is_a_file=True)),
                threads=n_threads,
                cache_type=cache_type,
                chat_template=template,
                draft_model=draft_model,
                mmproj=encoder,
            )
        except UsageError as error:
            raise _with_their_names(error) from None

    @classmethod
    def from_pretrained(cls, repo_id: str, filename: str | None = None, **options: Any) -> Self:
        """Loads a model of the hub.  Downloads it first if it is not in the cache.

        Args:
            repo_id: "ORG/REPO".
            filename: a file of the repository, or a pattern such as "*Q4_K_M.gguf".

        Raises:
            HubError: the model cannot be downloaded.
            UsageError: no file matches, or several files match.
        """
        choice = None if filename is None else _choice(filename)
        name = HubName(repo_id, choice)
        try:
            path = find_cached(name)
        except ModelNotFoundError:
            path = pull(str(name))
        return cls(str(path), **options)

    # -- Text --------------------------------------------------------------------------------------------------

    @overload
    def create_completion(
        self,
        prompt: str | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        *,
        stream: Literal[False] = False,
        **options: Unpack[CompletionOptions],
    ) -> CreateCompletionResponse: ...

    @overload
    def create_completion(
        self,
        prompt: str | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        *,
        stream: Literal[True],
        **options: Unpack[CompletionOptions],
    ) -> Iterator[CreateCompletionStreamResponse]: ...

    @overload
    def create_completion(
        self,
        prompt: str | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        *,
        stream: bool,
        **options: Unpack[CompletionOptions],
    ) -> CreateCompletionResponse | Iterator[CreateCompletionStreamResponse]: ...

    def create_completion(
        self,
        prompt: str | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        *,
        logprobs: int | None = None,
        echo: bool = False,
        stream: bool = False,
        model: str | None = None,
        **options: Any,
    ) -> Any:
        """Generates a continuation of a prompt.

        Returns a dict in the format of OpenAI's completions, or an iterator of such dicts with ``stream``.

        Args:
            suffix: appended to the text.
            max_tokens: None and numbers below 1 mean no limit.
            logprobs: number of likeliest tokens to report per position.
            echo: start the text with the prompt; with ``logprobs`` also report the prompt's tokens.
            model: the name in the answer.
            options: ``temperature``, ``top_k``, ``stop``, ``seed``, … with llama-cpp-python's names and defaults.

        Raises:
            TypeError: a keyword is unknown.
            LocalLLMError: as in `LLM.generate`.
        """
        keywords = self._options(options, max_tokens, logprobs)
        before = prompt if isinstance(prompt, str) else self.llm.detokenize(prompt)
        echoed = self._prompt_choices(prompt, logprobs) if echo and logprobs is not None else ()

        begin = partial(self._begin, self.llm.stream, prompt, parse_special=True, **keywords)
        head = _ResponseHead(f"cmpl-{uuid.uuid4()}", "text_completion", model or self.model_path)
        if stream:
            return self._text_chunks(begin, head, before if echo else "", echoed, len(before), suffix or "")
        completion = self._read(begin())
        text = (before if echo else "") + completion.text + (suffix or "")
        choices = None if completion.logprobs is None else (*echoed, *completion.logprobs)
        choice = {"text": text, "logprobs": self._logprobs(choices, 0 if echoed else len(before))}
        return head.response(choice, completion)

    __call__ = create_completion

    def _prompt_choices(self, prompt: str | Sequence[int], n_top: int) -> tuple[Choice, ...]:
        """Return the tokens of a prompt without BOS, with log-probabilities and likeliest tokens after the first."""
        ids = self.llm.tokenize(prompt, parse_special=True) if isinstance(prompt, str) else list(prompt)
        (score,) = self.llm.score(ids[:1], [ids[1:]], top_logprobs=n_top)
        choices = (Choice(ids[0]), *score.choices)[ids[0] == self.llm.tokenizer.bos_id :]
        return (*(Choice(first.id) for first in choices[:1]), *choices[1:])

    @overload
    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Mapping[str, Any]] | None = None,
        function_call: str | Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> CreateChatCompletionResponse: ...

    @overload
    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Mapping[str, Any]] | None = None,
        function_call: str | Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> Iterator[CreateChatCompletionStreamResponse]: ...

    @overload
    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Mapping[str, Any]] | None = None,
        function_call: str | Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        *,
        stream: bool,
        **options: Unpack[ChatOptions],
    ) -> CreateChatCompletionResponse | Iterator[CreateChatCompletionStreamResponse]: ...

    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Mapping[str, Any]] | None = None,
        function_call: str | Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        *,
        stream: bool = False,
        **options: Unpack[ChatOptions],
    ) -> Any:
        """Answers a chat.

        Returns a dict in the format of OpenAI's chat completions, or an iterator of its chunks with ``stream``.  The
        model's chat template describes the tools.  Tool calls are returned as ``tool_calls``; a stream contains
        pieces of their arguments.

        Args:
            functions, function_call: the old names of ``tools`` and ``tool_choice``.
            tool_choice: "auto", "none" for no tools, or a function that the model must call:
                ``{"type": "function", "function": {"name": ...}}``.
            response_format: None, ``{"type": "text"}``, ``{"type": "json_object"}`` with an optional ``schema``, or
                ``{"type": "json_schema", "json_schema": {"schema": ...}}``.
            logprobs, top_logprobs: whether to report log-probabilities, and the number of likeliest tokens.
            max_tokens, options: as in `create_completion`.

        Raises:
            TypeError: a keyword is unknown.
            UsageError: the function is not among the tools.
            NotAvailableError: the format is unknown, or ``tool_choice`` is "required".
            LocalLLMError: as in `LLM.chat`.
        """
        keywords: dict[str, Any] = {"functions": functions, "function_call": function_call, "tools": tools}
        answer = self._chat if self._answers is None else partial(self._answers, llama=self)
        return answer(messages=messages, tool_choice=tool_choice, stream=stream, **keywords, **options)

    def create_chat_completion_openai_v1(self, *args: Any, **options: Any) -> Any:
        """Like `create_chat_completion`, but return OpenAI's ``ChatCompletion``, or an iterator of its chunks."""
        try:
            from openai.types.chat import ChatCompletion, ChatCompletionChunk
        except ImportError:
            raise ImportError("create_chat_completion_openai_v1 needs openai: pip install openai") from None
        answer = self.create_chat_completion(*args, **options)
        if options.get("stream"):
            return (ChatCompletionChunk.model_validate(chunk) for chunk in answer)
        return ChatCompletion.model_validate(answer)

    def _chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        formatter: ChatFormatter | None = None,
        *,
        functions: Sequence[Mapping[str, Any]] | None = None,
        function_call: str | Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        temperature: float = 0.2,
        stream: bool = False,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        model: str | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        **options: Any,
    ) -> Any:
        """Answer a chat with the prompt of the model's template or of a formatter."""
        if functions is not None:
            tools = [{"type": "function", "function": function} for function in functions]
        choice = tool_choice if function_call is None else function_call
        selection = choose_tools(None if tools is None else [*map(dict, mappings("tools", tools))], choice)
        if choice == "required" or len(selection.forced) > 1:
            raise NotAvailableError(f"tool_choice is {choice!r:.80}: name the function, or leave it open by 'auto'")
        function = selection.forced[0]["function"] if selection.forced else None
        n_logprobs = (top_logprobs or 0) if logprobs else None
        keywords = self._options({"temperature": temperature, **options}, max_tokens, n_logprobs)
        schema = _schema_of(response_format)
        if function is not None:
            schema = function.get("parameters") or {"type": "object"}
        if schema is not None:
            keywords["json_schema"] = schema
        name = None if function is None else str(function["name"])
        offered = selection.offered or None

        def begin() -> Stream:
            if formatter is not None:
                formatted = formatter(messages=messages, functions=functions, tools=offered, tool_choice=choice)
                stops = keywords.get("stop"), formatted.stop
                ends = [end for stop in stops for end in ([stop] if isinstance(stop, str) else stop or ())]
                more = keywords | {"stop": ends}
                if formatted.stopping_criteria is not None:
                    more["processors"] = self._processors(more.get("processors", ()), formatted.stopping_criteria)
                special = {"add_special": not formatted.added_special, "parse_special": True}
                return self._begin(self.llm.stream, formatted.prompt, **special, **more)
            # After reasoning, a forced call has only arguments.  Without tools, the content is the unparsed output,
            # as in llama-cpp-python.
            parse = () if name is not None else bool(offered)
            return self._begin(self.llm.stream_chat, messages, tools=offered, parse=parse, **keywords)

        head = _ResponseHead(f"chatcmpl-{uuid.uuid4()}", "chat.completion", model or self.model_path)
        if stream:
            return self._chat_chunks(begin, head, name)
        completion = self._read(begin())
        calls: Sequence[ToolCall] = completion.tool_calls
        if name is not None:
            calls = [ToolCall(name, completion.text)]
        calls = [replace(call, id=head.call_id(i, call.name)) for i, call in enumerate(calls)]
        message = message_json("" if name is not None else completion.text, completion.reasoning, calls)
        choice = {"message": message, "logprobs": self._chat_logprobs(completion.logprobs)}
        return head.response(choice, _with_tool_finish(completion) if calls else completion)

    def _begin(self, work: Callable[..., _T], prompt: Any, **options: Any) -> _T:
        try:
            return work(prompt, **options)
        except ContextLengthError as error:
            raise _with_their_names(ContextLengthError(error.n_tokens, error.context)) from None
        except UsageError as error:
            raise _with_their_names(error) from None

    def _read(self, stream: Stream) -> Completion:
        completion = warned(stream.read())
        self._ids = stream.tokens
        return completion

    def _text_chunks(
        self,
        begin: Callable[[], Stream],
        head: _ResponseHead,
        echo: str,
        echoed: tuple[Choice, ...],
        offset: int,
        suffix: str,
    ) -> Iterator[dict[str, Any]]:
        if echo:
            yield head.chunk({"text": echo, "logprobs": self._logprobs(echoed or None, 0)}, Chunk(""))
        for chunk in self._chunks(begin):
            text = chunk.text if chunk.finish_reason is None else suffix
            yield head.chunk({"text": text, "logprobs": self._logprobs(chunk.logprobs, offset)}, chunk)
            offset += len(chunk.text)

    def _chat_chunks(
        self, begin: Callable[[], Stream], head: _ResponseHead, function: str | None
    ) -> Iterator[dict[str, Any]]:
        head = _ResponseHead(head.id, "chat.completion.chunk", head.model)
        yield head.chunk({"delta": {"role": "assistant"}, "logprobs": None}, Chunk(""))
        has_calls = function is not None
        for chunk in self._chunks(begin):
            delta: dict[str, Any] = {"content": chunk.text} if chunk.text else {}
            if chunk.reasoning:
                delta = {"reasoning_content": chunk.reasoning}
            elif function is not None and delta:
                delta = call_delta_json(CallDelta(0, head.call_id(0, function), function, chunk.text))
            elif isinstance(call := chunk.call, CallDelta):
                has_calls = True
                delta = call_delta_json(replace(call, id=head.call_id(call.index, call.name)))
            choice = {"delta": delta, "logprobs": self._chat_logprobs(chunk.logprobs)}
            yield head.chunk(choice, _with_tool_finish(chunk) if has_calls else chunk)

    def _chunks(self, begin: Callable[[], Stream]) -> Iterator[Chunk]:
        """Yield chunks with text, reasoning or a piece of a call, and a final chunk with the finish reason.

        Tokens without output are part of the next chunk.
        """
        waiting: tuple[Choice, ...] = ()
        with begin() as stream:
            for chunk in stream:
                waiting += chunk.logprobs or ()
                call = chunk.call if isinstance(chunk.call, CallDelta) else None
                if chunk.text or chunk.reasoning or call:
                    yield Chunk(chunk.text, logprobs=waiting or None, reasoning=chunk.reasoning, call=call)
                    waiting = ()
                if chunk.finish_reason is not None:
                    self._ids = stream.tokens
                    for message in chunk.warnings:
                        warn(message)
                    yield Chunk("", logprobs=waiting or None, finish_reason=chunk.finish_reason)

    def _options(self, keywords: Mapping[str, Any], max_tokens: int | None, logprobs: int | None) -> dict[str, Any]:
        """Convert llama-cpp-python's keywords to the keywords of `LLM.stream`."""
        names = ("grammar", "max_tokens", "logprobs", "stream", "stopping_criteria", "tfs_z")
        check_keywords(keywords, [*_OPTIONS, *names], {})
        if keywords.get("tfs_z") not in (None, 1):
            raise NotAvailableError("tfs_z is not available in this version of localllm: leave it out")
        options = {
            _OPTIONS[name]: value for name, value in keywords.items() if name in _OPTIONS and value is not None
        }
        # Negative numbers mean 0.
        for name in ("temperature", "top_k"):
            if isinstance(options.get(name), int | float) and options[name] < 0:
                options[name] = 0
        if "processors" in options:
            processors = options["processors"]  # a list, or a single function
            options["processors"] = tuple(processors) if isinstance(processors, Iterable) else (processors,)
        if (criteria := keywords.get("stopping_criteria")) is not None:
            options["processors"] = self._processors(options.get("processors", ()), criteria)
        if isinstance(options.get("logit_bias"), Mapping):
            options["logit_bias"] = {int(id_): bias for id_, bias in options["logit_bias"].items()}
        if (grammar := keywords.get("grammar")) is not None:
            if not isinstance(grammar, LlamaGrammar):
                raise UsageError(f"grammar is {grammar!r:.80}, but must be a LlamaGrammar, as of from_string(...)")
            options |= grammar.options
        if options.get("seed") in (-1, _ANY_SEED):
            options["seed"] = None
        elif "seed" not in options and self._random is not None:
            options["seed"] = self._random.getrandbits(32)
        unlimited = max_tokens is None or (isinstance(max_tokens, int) and max_tokens <= 0)
        return {"max_tokens": None if unlimited else max_tokens, "logprobs": logprobs, **self._drafts, **options}

    def _processors(
        self, processors: Sequence[LogitsProcessor], criteria: Callable[[NDArray[Any], NDArray[np.float32]], bool]
    ) -> tuple[LogitsProcessor]:
        """Combine processors and stopping criteria.  If a criterion is true, only end-of-text tokens are allowed."""
        criteria = criteria if callable(criteria) else StoppingCriteriaList(criteria)
        if (eos := self.llm.tokenizer.eos_id) is None:
            raise NotAvailableError("stopping_criteria need a model that can end its texts: leave them out")

        def process(ids: NDArray[Any], logits: NDArray[np.float32]) -> NDArray[np.float32]:
            if criteria(ids, logits):
                logits = np.full_like(logits, -np.inf)
                logits[eos] = 0
                return logits
            return LogitsProcessorList(processors)(ids, logits)

        return (process,)

    def _logprobs(self, choices: Sequence[Choice] | None, offset: int) -> dict[str, list[Any]] | None:
        """Return log-probabilities of a completion.  The likeliest tokens include the generated token."""
        if choices is None:
            return None
        likely = [c if c.logprob is None else c._replace(top=(*c.top, (c.id, c.logprob))) for c in choices]
        return text_logprobs_json(self.llm.tokenizer, likely, TextOffsets(self.llm.tokenizer, offset))

    def _chat_logprobs(self, choices: Sequence[Choice] | None) -> dict[str, Any] | None:
        return None if choices is None else chat_logprobs_json(self.llm.tokenizer, choices)

    # -- Tokens ------------------------------------------------------------------------------------------------

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Return the token ids of UTF-8 text.  ``special`` converts names of control tokens to these tokens."""
        if not isinstance(text, bytes):
            raise UsageError(f"text is {text!r:.80}, but must be bytes: give text.encode()")
        return self.llm.tokenize(text.decode(errors="replace"), add_special=add_bos, parse_special=special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """Return the UTF-8 text of tokens, without the space after BOS.  ``special`` includes control tokens."""
        tokenizer = self.llm.tokenizer
        text = b"".join(tokenizer.token_bytes(id_, special=special) for id_ in tokens)
        begins = not prev_tokens and len(tokens) > 0 and tokens[0] == tokenizer.bos_id
        return text.removeprefix(b" ") if begins else text

    def n_ctx(self) -> int:
        """Return the context length in tokens."""
        return self.llm.info.context

    def n_embd(self) -> int:
        """Return the hidden size."""
        return self.llm.info.config.n_embd

    @property
    def metadata(self) -> dict[str, str]:
        """The file's metadata, with values as strings."""
        with GGUFFile.open(self.llm.info.path) as file:
            return {name: str(value) for name, value in file.metadata.items()}

    def set_cache(self, cache: object) -> None:
        """Does nothing: common prefixes of prompts are always cached."""

    def n_vocab(self) -> int:
        """Return the size of the vocabulary."""
        return self.llm.info.n_vocab

    def token_bos(self) -> int:
        """Return the BOS token, or -1 if the vocabulary has no BOS."""
        return -1 if self.llm.tokenizer.bos_id is None else self.llm.tokenizer.bos_id

    def token_eos(self) -> int:
        """Return the EOS token, or -1 if the vocabulary has no EOS."""
        return -1 if self.llm.tokenizer.eos_id is None else self.llm.tokenizer.eos_id

    def token_nl(self) -> int:
        """Return the newline token."""
        return self.tokenize(b"\n", add_bos=False)[-1]

    # -- Token by token ----------------------------------------------------------------------------------------

    def eval(self, tokens: Sequence[int]) -> None:
        """Appends and evaluates tokens.  With ``logits_all``, `scores` contains their logits."""
        if tokens:
            ids = (*self._ids, *tokens)
            rows = self._begin(self.llm.logits, ids, last=len(tokens) if self._keeps_scores else 1)
            self._ids = ids
            self._rows += [*rows] if self._keeps_scores else []

    @property
    def scores(self) -> NDArray[np.float32]:
        """The logits after each token passed to `eval`, float32 [n_tokens, n_vocab].

        Raises:
            NotAvailableError: the model was loaded without ``logits_all=True``, or tokens were generated without
                `eval`.
        """
        if not self._keeps_scores or len(self._rows) != len(self._ids):
            raise NotAvailableError("scores need Llama(..., logits_all=True), and Llama.eval of all tokens")
        return np.stack(self._rows) if self._rows else np.zeros((0, self.n_vocab()), np.float32)

    _scores = scores

    @property
    def eval_tokens(self) -> deque[int]:
        """The current tokens."""
        return deque(self._ids, self.n_ctx())

    @property
    def eval_logits(self) -> deque[list[float]]:
        """`scores` as lists."""
        return deque(self.scores.tolist(), self.n_ctx())

    @property
    def input_ids(self) -> NDArray[np.intc]:
        """The current tokens, as an array."""
        return np.array(self._ids, np.intc)

    _input_ids = input_ids

    def sample(self, temp: float = 0.8, **options: Unpack[CompletionOptions]) -> int:
        """Sample the next token.  `eval` appends it."""
        ids, rows = self._ids, self._rows
        try:
            return next(self.generate((), temp, reset=False, **options), self.token_eos())
        finally:
            self._ids, self._rows = ids, rows

    def generate(
        self, tokens: Sequence[int], temp: float = 0.8, *, reset: bool = True, **options: Unpack[CompletionOptions]
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yield the tokens that the model generates after ``tokens``, up to the end of the text.

        Args:
            temp: the temperature.
            reset: whether ``tokens`` replace the current tokens; otherwise they are appended.
            options: ``top_k``, ``logits_processor``, ``stopping_criteria``, ``grammar``, … as for a completion.
        """
        ids = [*tokens] if reset else [*self._ids, *tokens]
        self._rows = []
        criteria, is_stopped = options.get("stopping_criteria"), False

        def criterion(ids: NDArray[Any], logits: NDArray[np.float32]) -> bool:
            nonlocal is_stopped
            is_stopped = criteria is not None and criteria(ids, logits)
            return is_stopped

        options = {**options, "temperature": temp}
        if criteria is not None:
            options["stopping_criteria"] = criterion
        keywords = self._options(options, None, None)
        is_ended = False
        while not is_ended:
            is_ended = True
            with self._begin(self.llm.stream, ids, **keywords) as stream:
                for chunk in stream:
                    if chunk.finish_reason == "stop" and not is_stopped:
                        yield self.token_eos()
                    if not chunk.ids:
                        continue
                    ids += chunk.ids
                    self._ids = tuple(ids)
                    if more := (yield chunk.ids[0]):  # tokens sent by the caller are appended
                        ids += more
                        is_ended = False
                        break

    # -- State -------------------------------------------------------------------------------------------------

    @property
    def n_tokens(self) -> int:
        """Number of tokens of the last prompt and its completion."""
        return len(self._ids)

    def save_state(self) -> LlamaState:
        """Return the tokens of the last prompt and its completion."""
        return LlamaState(self._ids, self.seed)

    def load_state(self, state: LlamaState) -> None:
        """Evaluates the tokens of a state that are not in the cache, so that prompts can continue them."""
        self.set_seed(state.seed)
        self._ids = state.input_ids
        if self._ids and min(self._ids) >= 0:  # images are encoded again by the next prompt
            self.llm.generate(self._ids[: self.n_ctx()], max_tokens=0)

    def reset(self) -> None:
        """Clears the current tokens and the cache."""
        self._ids, self._rows = (), []
        self.llm.forget()

    def set_seed(self, seed: int | None) -> None:
        """Sets the seed of all following random numbers; None and -1 mean a random seed."""
        self.seed = _ANY_SEED if seed in (None, -1) else seed
        self._random = None if self.seed == _ANY_SEED else random.Random(self.seed)

    def embed(self, input: str | Sequence[str], normalize: bool = False, truncate: bool = True) -> Any:
        """Return the vector of a string, or the vectors of a list of strings; see `LLM.embed`."""
        texts = [input] if isinstance(input, str) else list(input)
        vectors = self.llm.embed(texts, normalize=normalize, truncate=truncate).tolist()
        return vectors[0] if isinstance(input, str) else vectors

    def create_embedding(self, input: str | Sequence[str], model: str | None = None) -> CreateEmbeddingResponse:
        """Return the vectors of texts in OpenAI's format."""
        texts = [input] if isinstance(input, str) else list(input)
        n_tokens = sum(len(self.llm.tokenize(text)) for text in texts)
        usage: Any = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        vectors = enumerate(self.embed(texts))
        data: Any = [{"object": "embedding", "embedding": vector, "index": i} for i, vector in vectors]
        return {"object": "list", "data": data, "model": model or self.model_path, "usage": usage}

    def close(self) -> None:
        """Frees the model's memory."""
        self.llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # type checkers would accept every attribute

        def __getattr__(self, name: str) -> Never:
            raise no_attribute("'Llama' object", name, _INSTEAD)


@dataclass(frozen=True)
class _ResponseHead:
    """The fields shared by all dicts of a reply."""

    id: str
    object: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def chunk(self, choice: Mapping[str, Any], chunk: Chunk | Completion) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": [{"index": 0, **choice, "finish_reason": chunk.finish_reason}],
        }

    def response(self, choice: Mapping[str, Any], completion: Completion) -> dict[str, Any]:
        usage = usage_json(completion.usage.prompt_tokens, completion.usage.completion_tokens)
        return {**self.chunk(choice, completion), "usage": usage}

    def call_id(self, number: int, name: str) -> str:
        return f"call__{number}_{name}_{self.id}"


def _schema_of(response_format: Mapping[str, Any] | None) -> Any:
    """Return the schema of replies; None for text."""
    format_ = response_format or {"type": "text"}
    if not isinstance(format_, Mapping):
        raise UsageError(f"response_format is {format_!r:.80}, but must be a mapping, as {{'type': 'text'}}")
    if format_.get("type") not in ("text", "json_object", "json_schema"):
        words = "but must have type 'text', 'json_object' or 'json_schema'"
        raise NotAvailableError(f"response_format is {dict(format_)!r:.80}, {words}")
    schema = format_.get("json_schema") or format_
    if not isinstance(schema, Mapping):
        raise UsageError(f"json_schema is {schema!r:.80}, but must be a mapping with the schema as 'schema'")
    return None if format_["type"] == "text" else schema.get("schema") or {"type": "object"}


_T = TypeVar("_T")
_Reply = TypeVar("_Reply", Chunk, Completion)


def _with_tool_finish(reply: _Reply) -> _Reply:
    """Set the finish reason of a reply with calls, unless the reply was cut off."""
    return replace(reply, finish_reason="tool_calls") if reply.finish_reason == "stop" else reply  # type: ignore[arg-type]


#: llama-cpp-python's names of localllm's options.
_THEIR_NAMES = {"context": "n_ctx", "threads": "n_threads", **{ours: theirs for theirs, ours in _OPTIONS.items()}}


def _with_their_names(error: LocalLLMError) -> LocalLLMError:
    """Return the error with the argument names of llama-cpp-python."""
    error.args = tuple(
        piece._replace(name=_THEIR_NAMES.get(piece.name, piece.name)) if isinstance(piece, Argument) else piece
        for piece in error.args
    )
    return error


def _cache_type(keys: int | None, values: int | None) -> CacheType:
    types = [_CACHE_TYPES.get(1 if number is None else number) for number in (keys, values)]
    if None in types:
        words = f"type_k is {keys!r:.80} and type_v is {values!r:.80}"
        raise NotAvailableError(f"{words}, but here each must be 1 (F16), 2 (Q4_0), 6 (Q5_0) or 8 (Q8_0)")
    return "/".join(dict.fromkeys(filter(None, types)))


def __getattr__(name: str) -> object:
    if name in ("LlamaCache", "LlamaRAMCache", "LlamaDiskCache"):
        return lambda *_, **__: None  # for `Llama.set_cache`
    raise no_attribute("module 'localllm.compat'", name, {})


def _choice(filename: str) -> str | None:
    """Convert a file pattern to a quantization or a file name."""
    choice = filename.strip("*").removesuffix(".gguf").strip("*.-_") if "*" in filename else filename
    if set(choice) & set("*?["):
        raise NotAvailableError(f"filename is {filename!r:.80}: write a name, or a quantisation as *Q4_K_M.gguf")
    return choice or None
