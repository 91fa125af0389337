"""Generation jobs and replies, which the server's APIs share.

A `GenerationJob` describes a request with the library's options.  `PendingReplies` yields the events of its replies,
or complete `Reply` objects.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from localllm.chat import thinking
from localllm.chat.conversation import Media, Message, ToolCall, decoded, kind_of
from localllm.chat.rendering import described_tools
from localllm.chat.reply import CallDelta
from localllm.chat.tool_choice import ChosenTools, Tools
from localllm.engine.drafting import Drafts
from localllm.engine.request import FinishReason, Timings, Usage
from localllm.errors import Argument, UsageError
from localllm.generation.completion import Chunk, Stream
from localllm.llm import LLM, checked_variables
from localllm.options.declared import CheckedOptions, Sampling, declared
from localllm.sampling import Choice
from localllm.server.http import HTTPError
from localllm.server.models import ServedModel

#: Limits of a request: replies, stop strings, characters per stop string, and likeliest tokens per position.
MAX_REPLIES, MAX_STOPS, MAX_STOP_LENGTH, MAX_LOGPROBS = 64, 32, 1000, 100

#: Tokens that precede the prefix, suffix and middle, for models that fill in the middle.
_FILL_IN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
)


class LoraScale(msgspec.Struct):
    """The scale of an adapter in a request; ``id`` is the adapter's number in ``/lora-adapters``."""

    id: int
    scale: float


#: Options that requests cannot set, or set by fields of another form.
_NOT_FIELDS = ("logprobs", "overflow", "speculate", "draft_max", "draft_always")

#: Options that `localllm.server.dispatcher.Dispatcher` converts, with the model, before they are checked.
_CONVERTED = ("adapters", "steer", "logit_bias")

#: The other options of `localllm.options.declared`, as fields of requests.  An API may rename a field.
_OPTIONS = [
    (name, option.kind.json | None, None)
    for cls in (Sampling, CheckedOptions)
    for name, option in declared(cls).items()
    if option.kind.json is not None and name not in _NOT_FIELDS
]


class Thinking(msgspec.Struct):
    """The thinking switch of Anthropic, GLM, Kimi and DeepSeek, and Anthropic's budget of tokens."""

    type: str = "disabled"
    budget_tokens: int | None = None


class Reasoning(msgspec.Struct):
    """The thinking switch of OpenAI's responses API, OpenRouter and vLLM."""

    effort: str | None = None
    enabled: bool | None = None
    max_tokens: int | None = None  # OpenRouter's budget


class ThinkingFields(msgspec.Struct):
    """Fields that switch thinking, in the forms of several APIs; every API accepts every form."""

    enable_thinking: bool | None = None
    thinking: Thinking | bool | str | None = None
    think: bool | str | None = None
    reasoning: Reasoning | bool | str | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Budgets of tokens: the library's option, llama.cpp's and Qwen's names
    reasoning_budget: int | None = None
    reasoning_budget_tokens: int | None = None
    thinking_budget_tokens: int | None = None
    thinking_budget: int | None = None

    #: Names of fields in errors, by the library's names.
    FIELDS: ClassVar = {"template_variables": "chat_template_kwargs", "steer": "steering"}

    def template_variables(self) -> dict[str, Any]:
        """Return the variables of the chat template; the most explicit field decides."""
        reasoning, thinking = self.reasoning, self.thinking
        switch = thinking.type if isinstance(thinking, Thinking) else thinking
        efforts: list[bool | str | None] = [self.think, switch]
        efforts += [reasoning.effort, reasoning.enabled] if isinstance(reasoning, Reasoning) else [reasoning]
        variables: dict[str, Any] = {}
        for effort in (*efforts, self.reasoning_effort, self.enable_thinking):
            if isinstance(effort, bool):
                variables["enable_thinking"] = effort
            elif effort in ("enabled", "adaptive", "on", "true"):
                variables["enable_thinking"] = True
            elif effort in ("disabled", "off", "false"):
                variables["enable_thinking"] = False
            elif effort and effort != "auto":
                variables |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return {**variables, **(self.chat_template_kwargs or {})}

    def token_budget(self) -> dict[str, int]:
        """Return the option ``reasoning_budget`` from any of its fields; empty without one."""
        budgets = [self.reasoning_budget, self.reasoning_budget_tokens]
        budgets += [self.thinking_budget_tokens, self.thinking_budget]
        budgets += [self.thinking.budget_tokens] if isinstance(self.thinking, Thinking) else []
        budgets += [self.reasoning.max_tokens] if isinstance(self.reasoning, Reasoning) else []
        budget = next((budget for budget in budgets if budget is not None), None)
        return {} if budget is None else {"reasoning_budget": budget}


if TYPE_CHECKING:
    _Options = ThinkingFields
else:  # with a field per option; classes that read a field declare it again, for type checkers
    _Options = msgspec.defstruct("_Options", _OPTIONS, bases=(ThinkingFields,))


class StructuredOutputs(msgspec.Struct):
    """Constraints of a reply in vLLM's format.  Only one of the first four may be set."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def options(self) -> dict[str, Any]:
        choices = "|".join(re.sub(r"([^\w\s])", r"\\\1", text, flags=re.ASCII) for text in self.choice or ())
        schema = {"type": "object"} if self.json_object and self.json is None else self.json
        return {"json_schema": schema, "regex": choices or self.regex, "grammar": self.grammar}


class GenerationFields(_Options):
    """Fields that the requests of all APIs share.  The names are from llama.cpp and vLLM."""

    model: str | None = None
    max_tokens: int | None = None
    stream: bool = False
    lora: list[LoraScale] | None = None
    steering: dict[str, float] | None = None  # factors on the vectors of ``--steering``, by name
    return_progress: bool = False
    timings_per_token: bool = False
    verbose: bool = False
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def options(self, logprobs: int | None = None) -> dict[str, Any]:
        """Return the keywords of `LLM.stream`.  ``logprobs``: number of likeliest tokens per position."""
        if logprobs is not None and logprobs > MAX_LOGPROBS:
            raise HTTPError(400, f"at most {MAX_LOGPROBS} likeliest tokens can be listed, not {logprobs}")
        options = {name: value for name, *_ in _OPTIONS if (value := getattr(self, name)) is not None}
        guided = StructuredOutputs(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        constraints = (self.structured_outputs or guided).options()
        options |= {name: value for name, value in constraints.items() if value is not None}
        # llama.cpp accepts negative numbers for "off" and "unset".
        for name in ("temperature", "top_k"):
            if name in options:
                options[name] = max(0, options[name])
        for name in ("max_tokens", "seed"):
            if options.get(name, 0) < 0:
                del options[name]
        options |= self.token_budget()
        if self.lora is not None:
            options["adapters"] = self.lora  # `Dispatcher.begin` converts numbers to names
        if self.steering is not None:
            options["steer"] = self.steering  # `Dispatcher.begin` converts names to vectors
        for name in ("stop", "dry_sequence_breakers"):
            values = options.get(name, ())
            values = tuple(value for value in ([values] if isinstance(values, str) else values) if value)
            if len(values) > MAX_STOPS or any(len(value) > MAX_STOP_LENGTH for value in values):
                raise UsageError(Argument(name), f" has more than {MAX_STOPS} strings, or a string that is too long")
            if name in options:
                options[name] = values
        return options if logprobs is None else {**options, "logprobs": logprobs}

    def job(self, options: dict[str, Any], **more: Any) -> GenerationJob:
        """Return a job with ``options``, and with the fields that do not depend on the API."""
        return GenerationJob(
            self.model,
            options,
            variables=self.template_variables(),
            stream=self.stream,
            tells_progress=self.return_progress and self.stream,
            tells_timings=self.timings_per_token,
            **more,
        )

    def chat_job(
        self,
        options: dict[str, Any],
        messages: list[Message],
        chosen: ChosenTools,
        goes_on: bool | None = None,
        **more: Any,
    ) -> GenerationJob:
        """Return the job of a chat.  ``goes_on``: see `split_reply_start`."""
        messages, reply_start = split_reply_start(messages, goes_on)
        return self.job(options, messages=messages, reply_start=reply_start, chosen=chosen, **more)


@dataclass(frozen=True)
class GenerationJob:
    """A generation to run, with the library's names and types."""

    model: str | None  # name; None is the first model
    options: dict[str, Any]  # keywords of `LLM.stream`
    messages: list[Message] | None = None  # of a chat; None if ``prompts`` are continued
    prompts: Sequence[Prompt | MediaPrompt] = ()  # strings, token ids, or both in one prompt
    chosen: ChosenTools = field(default_factory=ChosenTools)  # tools that the reply may call
    hosted_tools: Sequence[str] = ()  # tools that only a provider's server can run
    skipped: Sequence[str] = ()  # unknown types of items and blocks, which were omitted
    variables: dict[str, Any] = field(default_factory=dict)  # variables of the chat template
    reply_start: Message | None = None  # start of the reply, sent by the client
    n: int = 1  # replies per prompt
    stream: bool = False  # whether the replies are streamed
    special: bool = False  # whether to parse names of control tokens in ``prompts``
    tells_progress: bool = False  # whether events report the progress of the prompt
    tells_timings: bool = False  # whether each event contains timings
    warnings: list[str] = field(default_factory=list)  # parts of the request that were ignored

    def chat_arguments(self, llm: LLM) -> dict[str, Any]:
        """Return the arguments of `LLM.stream_chat`, without options.  Sets ``warnings``."""
        messages = self.messages or []
        tools = [
            {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}
            for tool in self.chosen.offered
        ]
        self.warnings.clear()
        if self.hosted_tools:
            omitted = ", ".join(self.hosted_tools)
            self.warnings.append(f"tools that only a provider's server can run were omitted: {omitted}")
        if self.skipped:
            omitted = ", ".join(dict.fromkeys(self.skipped))
            self.warnings.append(f"parts of unknown types were omitted: {omitted}")
        if tools and not llm.chat_template.reads("tools"):
            tools, messages = [], [Message("system", (described_tools(self.chosen.offered),)), *messages]
            self.warnings.append("this model's chat template has no tools: a system message describes them")
        return {
            "messages": messages,
            "tools": tools or None,
            "template_variables": self.variables,
            "reply_prefix": self._reply_prefix(llm, messages, tools),
        }

    def _reply_prefix(self, llm: LLM, messages: list[Message], tools: Tools) -> str:
        """Return the start of the reply, formatted to follow the rendered template; empty without ``reply_start``."""
        if self.reply_start is None:
            return ""
        texts = [replace(message, parts=(message.text,)) for message in messages]
        prompt = self._render(llm, texts, tools or None)
        return thinking.reply_prefix(prompt, self.reply_start.reasoning, self.reply_start.text)

    def _render(self, llm: LLM, messages: list[Message], tools: Tools | None) -> str:
        variables: dict[str, Any] = llm.template_variables | checked_variables(self.variables)
        return llm.chat_template.render(messages, tools=tools, **variables)

    def check_options(self) -> None:
        """Check the options of a job that generates nothing.  Raises UsageError."""
        CheckedOptions.of({name: value for name, value in self.options.items() if name not in _CONVERTED})

    def rendered(self, llm: LLM) -> str:
        """Return the prompt of a chat."""
        arguments = self.chat_arguments(llm)
        return self._render(llm, arguments["messages"], arguments["tools"]) + str(arguments["reply_prefix"])

    def prompt_ids(self, llm: LLM) -> list[int]:
        return llm.tokenize_chat(**self.chat_arguments(llm))

    def with_system(self, text: str) -> GenerationJob:
        """Return the job with a system message, unless it is no chat or starts with one."""
        if not text or not self.messages or self.messages[0].role in ("system", "developer"):
            return self
        return replace(self, messages=[Message("system", (text,)), *self.messages])


@dataclass
class Reply:
    """The collected events of one reply, complete or not."""

    index: int
    is_first: bool = True  # of its prompt
    chunks: list[Chunk] = field(default_factory=list)  # all events, unless the reply is streamed
    text: str = ""
    thinking: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[Choice] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_text: str | None = None
    usage: Usage = field(default=Usage(0, 0, 0))
    reasoning_tokens: int = 0  # generated tokens of ``thinking``
    timings: Timings = field(default=Timings(0.0, 0, 0.0, 0.0, 0))
    drafts: Drafts | None = None
    warnings: list[str] = field(default_factory=list)
    _n_silent: int = 0  # tokens without output yet, such as a part of a character

    @property
    def has_cut_call(self) -> bool:
        """Whether a stop string or the token limit cut off the last call, so clients should not run it."""
        was_cut = self.finish_reason != "stop" or self.stop_text is not None
        return was_cut and bool(self.calls) and not self.calls[-1].is_whole

    def add(self, event: Chunk) -> None:
        self._n_silent += len(event.ids)
        if event.reasoning:
            self.reasoning_tokens += self._n_silent
        if event.reasoning or event.text or event.call:
            self._n_silent = 0
        self.text += event.text
        self.thinking += event.reasoning
        self.logprobs += event.logprobs or ()
        if isinstance(event.call, ToolCall):
            self.calls.append(event.call)
        if event.finish_reason is not None and event.usage is not None and event.timings is not None:
            self.finish_reason, self.usage, self.timings = event.finish_reason, event.usage, event.timings
            self.drafts = event.drafts
            self.warnings += event.warnings


#: A reply, which includes the newest event, and this event.  The last event has the finish reason.
Event = tuple[Reply, Chunk]


@dataclass(eq=False)
class PendingReplies:
    """Running replies.  The caller must call `close`, which ends them."""

    job: GenerationJob
    served: ServedModel
    llm: LLM
    streams: list[Stream]  # one per reply
    on_close: Callable[[PendingReplies], object] | None
    client: str  # id of the client that sent the request; see `localllm.server.http.Guard`
    started_at: float  # time of the request, by `time.perf_counter`
    load_s: float  # seconds from ``started_at`` until the model was loaded
    public_id: str = ""  # in OpenAI's chat API
    number: int = field(default_factory=itertools.count(1).__next__)  # counted from the server's start
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def prompt_text(self, index: int) -> str:
        """Return the prompt of a reply, including the names of control tokens."""
        return self.llm.tokenizer.decode(self.streams[index].prompt_ids, special=True)

    def stop(self) -> None:
        """Ends the replies because the server stops.  Their readers get an error."""
        for stream in self.streams:
            stream.cancel()

    def close(self) -> None:
        """Ends replies that still run, and releases the model."""
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            for stream in self.streams:
                stream.cancel()
            for task in self._tasks:
                task.cancel()
            on_close(self)

    async def events(self) -> AsyncIterator[Event]:
        if len(self.streams) == 1:
            async for event in self._events_of(0):
                yield event
            return
        # Bounded: a slow reader slows down the model instead of filling the memory.
        queue: asyncio.Queue[Event | BaseException] = asyncio.Queue(maxsize=4 * len(self.streams))
        if self.on_close is None:  # the client disconnected early
            return
        # `close` ends the tasks, because a dropped generator is finalized late or in another thread.
        self._tasks = [asyncio.create_task(self._put_events(index, queue)) for index in range(len(self.streams))]
        n_open = len(self._tasks)
        while n_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            n_open -= item[1].finish_reason is not None
            yield item

    async def _put_events(self, index: int, queue: asyncio.Queue[Event | BaseException]) -> None:
        try:
            async for event in self._events_of(index):
                await queue.put(event)
        except Exception as error:
            await queue.put(error)

    async def _events_of(self, index: int) -> AsyncIterator[Event]:
        stream, reply = self.streams[index], Reply(index, not index % self.job.n)
        reply.warnings = [] if index else [*self.job.warnings]
        n_calls = 0
        async for event in stream:
            n_calls += isinstance(event.call, CallDelta) and event.call.begins
            if n_calls > 1 and self.job.chosen.one_call:
                event = replace(event, call=None)
            if event.finish_reason is not None:
                if event.finish_reason == "cancelled":
                    raise stopping()
                reply.stop_text = stream.stop_text
                if n_calls > 1 and self.job.chosen.one_call:
                    reply.warnings.append(f"{n_calls - 1} more calls were omitted: the request allows only one call")
            reply.add(event)
            is_progress = event.n_evaluated is not None
            if event.text or event.reasoning or event.call or event.logprobs or event.finish_reason or is_progress:
                yield reply, event

    async def read(self) -> list[Reply]:
        """Return all complete replies."""
        for stream in self.streams:
            stream.deliver_at_end()
        replies = []
        async for reply, event in self.events():
            reply.chunks.append(event)
            if event.finish_reason is not None:
                replies.append(reply)
        return sorted(replies, key=lambda reply: reply.index)


def stopping() -> HTTPError:
    return HTTPError(503, "the server is stopping: send the request again later", "stopping")


def constrain(options: dict[str, Any], schema: object) -> None:
    """Makes a reply follow a JSON schema; None allows any JSON object."""
    if schema is not None and not isinstance(schema, dict):
        raise HTTPError(400, "the schema of a reply's format must be a JSON object")
    options["json_schema"] = {"type": "object"} if schema is None else schema


def constrain_to_format(options: dict[str, Any], name: str, format_type: str, schema: object) -> None:
    """Makes a reply follow a format of OpenAI's APIs, which is given in the field ``name``."""
    if format_type not in ("text", "json_object", "json_schema"):
        raise HTTPError(400, f"{name} is {format_type!r:.40}, but must be text, json_object or json_schema")
    if format_type != "text":
        constrain(options, schema)


def split_reply_start(messages: list[Message], goes_on: bool | None = None) -> tuple[list[Message], Message | None]:
    """Split an unfinished reply of the assistant off the end of the messages.

    ``goes_on``: whether the model continues the last message.  None: if it is the assistant's, as in llama.cpp's
    server.
    """
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or last.calls or goes_on is False:
        return messages, None
    return messages[:-1], last


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt whose `localllm.llm.MEDIA` placeholders are replaced by images and audio."""

    text: str
    media: tuple[Media, ...]


#: A string, or a list of token ids and strings.
Prompt = str | list[int | str]


class PromptObject(msgspec.Struct):
    """A prompt in llama.cpp's object format: a string with media, or the parts of a message."""

    prompt_string: str | None = None
    multimodal_data: list[str] = []
    content: list[dict[str, Any]] | None = None

    def prompt(self, may_see: bool) -> str | MediaPrompt:
        """Return the prompt.  Rejects images and audio unless ``may_see``."""
        if may_see and self.multimodal_data:
            names = [f"multimodal_data[{i}]" for i in range(len(self.multimodal_data))]
            files = list(map(decoded, self.multimodal_data, names))
            media = (Media(file, where=name, kind=kind_of(file)) for file, name in zip(files, names, strict=True))
            return MediaPrompt(self.prompt_string or "", tuple(media))
        parts = self.content or ()
        if self.multimodal_data or any(not isinstance(part.get("text"), str) for part in parts):
            raise HTTPError(400, "a prompt has images or audio, but this endpoint accepts only text")
        if self.prompt_string is None and self.content is None:
            raise HTTPError(400, "a prompt has no text: give it as prompt_string, or as parts under content")
        return (self.prompt_string or "") + "".join(part["text"] for part in parts)


#: A prompt, or a list of prompts.  A list with token ids is one prompt.
Prompts = str | PromptObject | list[str | int | list[int | str] | PromptObject]


def prompts_of(value: Prompts, *, may_see: bool = False) -> list[Any]:
    """Return the prompts of a field; each is a `Prompt` or a `MediaPrompt`."""
    is_ids = isinstance(value, list) and any(isinstance(item, int) for item in value)
    items = value if isinstance(value, list) else [value]
    prompts = [item.prompt(may_see and not is_ids) if isinstance(item, PromptObject) else item for item in items]
    return [prompts] if is_ids else prompts


def join_prompt(llm: LLM, prompt: Prompt) -> str | list[int]:
    """Return a prompt as one string or as token ids.  Of the strings among token ids, only a leading one gets BOS."""
    if isinstance(prompt, str):
        return prompt
    ids: list[int] = []
    for number, item in enumerate(prompt):
        ids += [item] if isinstance(item, int) else llm.tokenize(item, add_special=not number, parse_special=True)
    return ids


def infill_tokens(llm: LLM, before: str, after: str, start: str = "") -> list[int]:
    """Return the tokens of a prompt to fill in the text between ``before`` and ``after``, starting with ``start``."""
    tokenizer = llm.tokenizer
    for names in _FILL_IN:
        ids = [tokenizer.encode(name, add_special=False, parse_special=True) for name in names]
        if all(len(token_ids) == 1 and tokenizer.is_special(token_ids[0]) for token_ids in ids):
            prefix, suffix, middle = (tokenizer.encode(text, add_special=False) for text in (before, after, start))
            return tokenizer.with_bos([*ids[0], *prefix, *ids[1], *suffix, *ids[2], *middle])
    raise HTTPError(400, "this model cannot fill in text: its vocabulary has no tokens for it, leave the suffix out")
