"""From a request of any API to the engine, and back: the one place that begins generations.

A `GenerationJob` says what is wanted in the library's words.  `Dispatcher.begin` submits it, and `PendingReplies`
has the events of its replies as they come, or whole `Reply` objects.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import Request

from localllm.cancellation import cancellable, check_cancelled
from localllm.chat.conversation import Message, ToolCall, decoded
from localllm.chat.rendering import described_tools
from localllm.chat.reply import CallDelta
from localllm.chat.tool_choice import Tools, calls_grammar, choose_tools
from localllm.chat.tool_choice import call_schema as _call_schema
from localllm.engine.pictures import text_ids
from localllm.engine.request import FinishReason, Timings, Usage
from localllm.errors import Argument, ClosedError, UsageError
from localllm.generation.completion import Chunk, Stream
from localllm.llm import LLM
from localllm.options.declared import CheckedOptions, Sampling, declared
from localllm.sampling import Choice
from localllm.server.http import LONG_REQUEST, HTTPError, cancel_on_disconnect
from localllm.server.models import Models, ServedModel

if TYPE_CHECKING:
    from localllm.server.response_store import ResponseStore

_T = TypeVar("_T")

#: Replies to one request, texts that end one, and characters of each of these, at most.
MAX_REPLIES, MAX_STOPS, MAX_STOP_LENGTH = 64, 32, 1000

#: Characters of a prompt for each token of the context, at most.
MAX_CHARACTERS = 256

#: What stands before what precedes a gap, before what follows it, and where it is filled in.
_FILL_IN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),
)


class LoraScale(msgspec.Struct):
    """How much a request gets of an adapter, whose number ``/lora-adapters`` lists."""

    id: int
    scale: float


#: Options of a call that requests do not set, or not as plain values.
_NOT_FIELDS = ("logprobs", "overflow", "speculate", "draft_max")

#: The other options that `localllm.options.declared` has: each is a field, by its name or by a dialect's own.
_OPTIONS = {
    name: option
    for cls in (Sampling, CheckedOptions)
    for name, option in declared(cls).items()
    if option.kind.json is not None and name not in _NOT_FIELDS
}

if TYPE_CHECKING:

    class _Options(msgspec.Struct):
        def __getattr__(self, name: str) -> Any: ...

else:
    _Options = msgspec.defstruct("_Options", [(name, each.kind.json | None, None) for name, each in _OPTIONS.items()])


class StructuredOutputs(msgspec.Struct):
    """Constraints of a reply in vLLM's form; one of the first four."""

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
    """Fields of a request that all APIs share; their names are llama.cpp's, and vLLM's."""

    model: str | None = None
    stream: bool = False
    lora: list[LoraScale] | None = None
    return_progress: bool = False
    timings_per_token: bool = False
    verbose: bool = False
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def options(self, **more: Any) -> dict[str, Any]:
        options = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        guided = StructuredOutputs(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        held = (self.structured_outputs or guided).options()
        options |= {name: value for name, value in held.items() if value is not None}
        # llama.cpp's ways to switch something off, or leave it open.
        for name in ("temperature", "top_k"):
            if name in options:
                options[name] = max(0, options[name])
        for name in ("max_tokens", "seed"):
            if options.get(name, 0) < 0:
                del options[name]
        if self.lora is not None:
            options["adapters"] = self.lora  # which `Dispatcher.begin` knows the names of
        for name in ("stop", "dry_sequence_breakers"):
            values = options.get(name, ())
            values = tuple(value for value in ([values] if isinstance(values, str) else values) if value)
            if len(values) > MAX_STOPS or any(len(value) > MAX_STOP_LENGTH for value in values):
                raise UsageError(Argument(name), f" has more than {MAX_STOPS} texts, or one that is too long")
            if name in options:
                options[name] = values
        return {**options, **{name: value for name, value in more.items() if value is not None}}


def _biases(llm: LLM, given: dict[str, float] | list[tuple[int | str, float | bool]]) -> dict[int, float]:
    """Biases by ids of tokens, which are given as numbers, or as texts whose tokens are meant, as in llama.cpp."""
    biases: dict[int, float] = {}
    for key, bias in given.items() if isinstance(given, Mapping) else given:
        is_number = isinstance(key, int) or re.fullmatch(r"\s*\d+\s*", key)
        ids = [int(key)] if is_number else llm.tokenize(str(key), add_special=False)
        biases |= dict.fromkeys(ids, float("-inf") if bias is False else float(bias))
    return biases


@dataclass(frozen=True)
class GenerationJob:
    """A generation to run, in the library's terms."""

    model: str | None  # its name; None is the first one
    options: dict[str, Any]  # keywords of `LLM.stream`
    messages: list[Message] | None = None  # of a chat; None if ``prompts`` are to be continued
    prompts: Sequence[Prompt | PicturePrompt] = ()  # each a text, tokens, or both in one
    tools: Tools = field(default_factory=list)  # that the model may call, as OpenAI's API describes them
    must_call: bool = False  # whether the reply has to be a call of one of them
    variables: dict[str, Any] = field(default_factory=dict)  # what else the chat template reads
    reply_prefix: str = ""  # what the reply begins with
    n: int = 1  # how many replies to each prompt
    one_call: bool = False  # whether tools are called one at a time
    special: bool = False  # whether names of control tokens in ``prompts`` are read as these
    tells_progress: bool = False  # whether events say how far the prompt is
    tells_timings: bool = False  # whether each says how long it took so far
    warnings: list[str] = field(default_factory=list)  # what could not be done as asked

    def chat_arguments(self, llm: LLM) -> dict[str, Any]:
        """The arguments of `LLM.stream_chat`, without options; collects warnings."""
        messages, tools = self.messages or [], [_without_strict(tool) for tool in self.tools]
        self.warnings.clear()
        if tools and not llm.chat_template.reads("tools"):
            tools = []
            if self.must_call:
                messages = [Message("system", (described_tools(self.tools),)), *messages]
            else:
                self.warnings.append("this model's chat template knows no tools: the model was not told of them")
        return {
            "messages": messages,
            "tools": tools or None,
            "template_variables": self.variables,
            "reply_prefix": self.reply_prefix,
        }

    def prompt_ids(self, llm: LLM) -> list[int]:
        return llm.tokenize_chat(**self.chat_arguments(llm))


@dataclass
class Reply:
    """One reply, as far as it is: its events, collected."""

    index: int
    is_first: bool = True  # of its prompt
    text: str = ""
    thinking: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[Choice] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_text: str | None = None
    usage: Usage = field(default=Usage(0, 0, 0))
    timings: Timings = field(default=Timings(0.0, 0, 0.0, 0.0, 0))
    warnings: list[str] = field(default_factory=list)

    def add(self, event: Chunk) -> None:
        self.text += event.text
        self.thinking += event.reasoning
        self.logprobs += event.logprobs or ()
        if isinstance(event.call, ToolCall):
            self.calls.append(event.call)
        if event.finish_reason is not None and event.usage is not None and event.timings is not None:
            self.finish_reason, self.usage, self.timings = event.finish_reason, event.usage, event.timings
            self.warnings += event.warnings


#: An event, the last of which has the finish reason, and the reply with it and all before it.
Event = tuple[Reply, Chunk]

#: The output half of a dialect: lines of its stream for an event.
Writer = Callable[[Reply, Chunk], Iterable[bytes]]


class PendingReplies:
    """Replies under way; `close` ends them, and has to be called."""

    def __init__(
        self,
        job: GenerationJob,
        served: ServedModel,
        llm: LLM,
        streams: list[Stream],
        on_close: Callable[[PendingReplies], object],
        begun_at: float,
        load_s: float,
    ) -> None:
        self.number = next(_numbers)  # counted from the server's beginning
        # served, llm: the model
        # streams: one a reply
        self.job, self.served, self.llm, self.streams = job, served, llm, streams
        # begun_at: when they were asked for, in the time of `time.perf_counter`
        # load_s: seconds after that in which the model was not there yet
        self.begun_at, self.load_s = begun_at, load_s
        self._on_close: Callable[[PendingReplies], object] | None = on_close
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def prompt_tokens(self) -> int:
        return self.streams[0].usage.prompt_tokens

    def prompt_text(self, index: int) -> str:
        """The prompt of a reply, with the names of control tokens."""
        stream = self.streams[index]
        ids = text_ids(stream.tokens[: stream.usage.prompt_tokens])
        return self.llm.tokenizer.decode(ids, special=True)

    def stop(self) -> None:
        """Ends it because the server stops; whoever reads it is told."""
        for stream in self.streams:
            stream.cancel()

    def close(self) -> None:
        """Ends what goes on, and gives the model back."""
        on_close, self._on_close = self._on_close, None
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
        # Bounded, so that a slow reader slows the model down and not the memory.
        queue: asyncio.Queue[Event | BaseException] = asyncio.Queue(maxsize=4 * len(self.streams))
        if self._on_close is None:  # the client went before anything was asked for
            return
        # `close` ends them: this generator may be dropped anywhere, and then is closed late, or in another thread.
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
            if n_calls > 1 and self.job.one_call:
                event = replace(event, call=None)
            if event.finish_reason is not None:
                if event.finish_reason == "cancelled":
                    raise _stopping()
                reply.stop_text = stream.stop_text
                if n_calls > 1 and self.job.one_call:
                    reply.warnings.append(f"{n_calls - 1} more calls were left out: one at a time was asked for")
            reply.add(event)
            is_progress = event.n_evaluated is not None
            if event.text or event.reasoning or event.call or event.logprobs or event.finish_reason or is_progress:
                yield reply, event

    async def lines(
        self,
        write: Writer,
        begin: Iterable[bytes] = (),
        end: Callable[[list[Reply]], Iterable[bytes]] = lambda replies: (),
    ) -> AsyncIterator[bytes]:
        """The stream that a dialect makes of the events, with what stands before and behind all of them."""
        replies = []
        for line in begin:
            yield line
        async for reply, event in self.events():
            for line in write(reply, event):
                yield line
            if event.finish_reason is not None:
                replies.append(reply)
        for line in end(replies):
            yield line

    async def read(self, write: Callable[[Reply, Chunk], object] = lambda reply, event: None) -> list[Reply]:
        """All replies, whole, after each of their events was written."""
        for stream in self.streams:
            stream.deliver_at_end()
        replies = []
        async for reply, event in self.events():
            write(reply, event)
            if event.finish_reason is not None:
                replies.append(reply)
        return sorted(replies, key=lambda reply: reply.index)


_numbers = itertools.count(1)


class Dispatcher:
    def __init__(self, models: Models, responses: ResponseStore, is_verbose: bool = False) -> None:
        # models: that the server has
        # responses: those that later ones may go on from
        # is_verbose: whether answers tell their prompts (``__verbose``, as in llama.cpp)
        self.models, self.responses, self.is_verbose = models, responses, is_verbose
        self.active: dict[int, PendingReplies] = {}  # answers under way
        # the first model, which the server loads before anybody asks for it, is not there yet
        # what was under way has been ended
        self.is_starting = self.is_stopping = self.is_cut = False
        # Tokenizing a prompt, and running a template, must not hold up the event loop.  What takes longer, such as
        # making vectors of many texts, has threads of its own, so that no chat waits for it.  Long requests have only
        # two: more of them would take the cores from the threads that decode.
        self._threads = ThreadPoolExecutor(4, "localllm-prompt")
        self._model_threads = ThreadPoolExecutor(4, "localllm-model")
        self._long_threads = ThreadPoolExecutor(2, "localllm-long")
        self._works: set[asyncio.Future[Any]] = set()

    async def begin(self, job: GenerationJob, request: Request) -> PendingReplies:
        """Submits what a request asks for; its headers may say how urgent it is, if its fields do not."""
        self._check(job)
        wanted = job.options.pop("adapters", None)
        if wanted is not None or self.models.adapters:  # else those of the model's own defaults
            job.options["adapters"] = self.adapter_scales(wanted)
        client: str = request.state.client
        if "x-priority" in request.headers:
            job.options.setdefault("priority", request.headers["x-priority"])
        if "x-timeout" in request.headers:
            job.options.setdefault("timeout", _seconds(request.headers["x-timeout"]))
        began = time.perf_counter()
        for attempt in range(3):
            served, llm = await self.models.acquire(job.model)
            load_s = time.perf_counter() - began
            try:
                streams = await self._run(request, self._threads, _submit, job, llm, client)
                break
            except ClosedError:  # it was unloaded between the two
                self.models.release(served)
                if attempt == 2 or self.models.is_closed:
                    raise
            except BaseException:
                self.models.release(served)
                raise
        pending = PendingReplies(job, served, llm, streams, self._end, began, load_s)
        self.active[pending.number] = pending
        return pending

    def adapter_scales(self, wanted: list[LoraScale] | None) -> dict[str, float]:
        """The share of each adapter by name: 0 of those that ``wanted`` leaves out, as in llama.cpp."""
        if wanted is None:
            return dict(self.models.adapters)
        names = [*self.models.adapters]
        for each in wanted:
            if not (0 <= each.id < len(names) and math.isfinite(each.scale)):
                raise HTTPError(400, f"lora: there is no adapter {each.id}, or its scale is not finite")
        return dict.fromkeys(names, 0.0) | {names[each.id]: each.scale for each in wanted}

    async def with_model(self, request: Request, name: str | None, work: Callable[[LLM], Any]) -> Any:
        """Calls ``work`` with a model in another thread; returns its result."""
        served, llm = await self.models.acquire(name)
        try:
            return await self._run(request, self._model_threads, work, llm)
        finally:
            self.models.release(served)

    async def read(self, request: Request, work: Callable[..., _T], *args: Any) -> _T:
        """Calls ``work`` with a request's fields: in another thread where they are long."""
        if request.state.n_bytes <= LONG_REQUEST:
            return work(*args)
        return await self._run(request, self._long_threads, work, *args)

    async def _run(self, request: Request, threads: ThreadPoolExecutor, work: Callable[..., _T], *args: Any) -> _T:
        """Runs ``work`` in another thread; cancelled when the client goes or the server stops."""
        if self.is_cut:
            raise _stopping()
        if request.state.n_bytes > LONG_REQUEST:
            threads = self._long_threads
        is_over = threading.Event()

        def call() -> _T:
            with cancellable(is_over.is_set):
                check_cancelled()  # it may have waited for a thread
                return work(*args)

        future = asyncio.get_running_loop().run_in_executor(threads, call)
        self._works.add(future)
        try:
            return await cancel_on_disconnect(request, future)
        except asyncio.CancelledError:
            if self.is_cut:
                raise _stopping() from None
            raise
        finally:
            is_over.set()
            self._works.discard(future)

    def stop(self, *, at_once: bool) -> None:
        """Takes nothing new, and with ``at_once`` ends what is under way."""
        self.is_stopping = True
        if at_once:
            self.is_cut = True
            for pending in list(self.active.values()):
                pending.stop()
            for work in list(self._works):
                work.cancel()

    def close(self) -> None:
        for threads in (self._threads, self._model_threads, self._long_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _end(self, pending: PendingReplies) -> None:
        self.active.pop(pending.number, None)
        self.models.release(pending.served)

    def _check(self, job: GenerationJob) -> None:
        if self.is_stopping:
            raise _stopping()
        if not 1 <= job.n <= MAX_REPLIES:
            raise HTTPError(400, f"n is {job.n}, but must be from 1 to {MAX_REPLIES}")


def _stopping() -> HTTPError:
    return HTTPError(503, "the server is stopping: send the request again later", "stopping")


def _submit(job: GenerationJob, llm: LLM, client: str) -> list[Stream]:
    begins: list[Callable[..., Stream]]
    if "logit_bias" in job.options:
        job.options["logit_bias"] = _biases(llm, job.options["logit_bias"])
    if job.tells_progress:
        job.options["progress"] = lambda n, total: None  # which the stream's chunks tell
    if job.messages is None:
        for prompt in job.prompts:
            _check_length(prompt.text if isinstance(prompt, PicturePrompt) else prompt, llm.info.context)
        begins = [partial(_stream, llm, each, parse_special=job.special) for each in job.prompts]
    else:
        template = llm.chat_template.used_for({"tools": job.tools}).source
        is_strict = any(tool["function"].get("strict") for tool in job.tools)
        calls_in_json = "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template
        if is_strict and calls_in_json and not {"json_schema", "regex", "grammar"} & job.options.keys():
            job.options["grammar"] = calls_grammar(job.tools)
        begins = [partial(llm.stream_chat, **job.chat_arguments(llm))]
    streams: list[Stream] = []
    try:
        for begin, index in itertools.product(begins, range(job.n)):
            seed = job.options.get("seed")
            more = {} if seed is None else {"seed": (seed + index) % (1 << 64)}
            streams.append(begin(client=client, **{**job.options, **more}))
            streams[-1].tells_progress = job.tells_progress
            if (parser := streams[-1].parser) is not None:
                parser.offer(job.tools)  # the template may know none
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise
    return streams


def _check_length(prompt: Prompt, context: int) -> None:
    """Refuses a prompt that is much too long, without the seconds that tokenizing it would take."""
    kind, most = ("characters", MAX_CHARACTERS * context) if isinstance(prompt, str) else ("tokens", context)
    if len(prompt) > most:
        size = f"{len(prompt):,} {kind}, which exceeds the available context size of {context:,} tokens"
        message = f"the prompt has {size}: shorten it"
        raise HTTPError(400, message, "context_length_exceeded")


def _without_strict(tool: dict[str, Any]) -> dict[str, Any]:
    """As the model is told of it."""
    return {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}


def constrain(options: dict[str, Any], schema: object) -> None:
    """Makes a reply follow a JSON schema; None is any JSON object."""
    if schema is not None and not isinstance(schema, dict):
        raise HTTPError(400, "the schema of a reply's format must be a JSON object")
    options["json_schema"] = {"type": "object"} if schema is None else schema


def offer_tools(options: dict[str, Any], tools: Tools | None, choice: object) -> dict[str, Any]:
    """The fields of a `GenerationJob` for tools; a forced call makes ``options`` follow its schema."""
    chosen = choose_tools(tools, choice)
    if chosen.forced:
        constrain(options, _call_schema(chosen.forced))
    return {"tools": chosen.offered, "must_call": bool(chosen.forced)}


def split_reply_prefix(messages: list[Message], goes_on: bool | None = None) -> tuple[list[Message], str]:
    """The messages without the last one, if that is what the assistant has begun to say; and that text.  ``goes_on``:
    whether the model is to go on with it; None: where the last message is the assistant's, as in llama.cpp's server.
    """
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or last.calls or goes_on is False:
        return messages, ""
    return messages[:-1], last.text


@dataclass(frozen=True)
class PicturePrompt:
    """A text with pictures (bytes of files) in the places of `localllm.llm.MEDIA`."""

    text: str
    images: tuple[bytes, ...]


#: A text, the ids of its tokens, or both in turn.
Prompt = str | list[int | str]


class PromptObject(msgspec.Struct):
    """A text as an object, as llama.cpp's server takes it: with pictures, or in the parts of a message."""

    prompt_string: str | None = None
    multimodal_data: list[str] = []
    content: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """The prompt's text; refuses pictures and sounds."""
        parts = self.content or ()
        if self.multimodal_data or any(not isinstance(part.get("text"), str) for part in parts):
            raise HTTPError(400, "a prompt has pictures or sounds, but this API reads text only here")
        if self.prompt_string is None and self.content is None:
            raise HTTPError(400, "a prompt has no text: give it as prompt_string, or as parts under content")
        return (self.prompt_string or "") + "".join(part["text"] for part in parts)


#: One of the prompts, or a list of them; a list with ids of tokens is one.
Prompts = str | PromptObject | list[str | int | list[int | str] | PromptObject]


def prompts_of(given: Prompts, *, may_see: bool = False) -> list[Any]:
    """Each prompt of a field: a `Prompt`, or a `PicturePrompt`."""
    if isinstance(given, list) and any(isinstance(each, int) for each in given):
        return [[_plain_prompt(each, False) if isinstance(each, PromptObject) else each for each in given]]
    prompts: list[Any] = given if isinstance(given, list) else [given]
    return [_plain_prompt(each, may_see) if isinstance(each, PromptObject) else each for each in prompts]


def _plain_prompt(given: PromptObject, may_see: bool) -> str | PicturePrompt:
    if not (may_see and given.multimodal_data):
        return given.text
    images = (decoded(data, f"multimodal_data[{i}]") for i, data in enumerate(given.multimodal_data))
    return PicturePrompt(given.prompt_string or "", tuple(images))


def _stream(llm: LLM, prompt: Prompt | PicturePrompt, **options: Any) -> Stream:
    if isinstance(prompt, PicturePrompt):
        return llm.stream(prompt.text, images=prompt.images, **options)
    return llm.stream(join_prompt(llm, prompt), **options)


def join_prompt(llm: LLM, prompt: Prompt) -> str | list[int]:
    """A prompt as one text, or as tokens; a text within tokens begins as a model's texts do where it is the first."""
    if isinstance(prompt, str):
        return prompt
    ids: list[int] = []
    for number, part in enumerate(prompt):
        ids += [part] if isinstance(part, int) else llm.tokenize(part, add_special=not number, parse_special=True)
    return ids


def infill_tokens(llm: LLM, before: str, after: str, begun: str = "") -> list[int]:
    """The tokens of a prompt for what stands between two texts, and begins with ``begun``."""
    tokenizer = llm.tokenizer
    for names in _FILL_IN:
        ids = [tokenizer.encode(name, add_special=False, parse_special=True) for name in names]
        if all(len(each) == 1 and tokenizer.is_special(each[0]) for each in ids):
            prefix, suffix, middle = (tokenizer.encode(text, add_special=False) for text in (before, after, begun))
            return tokenizer.with_bos([*ids[0], *prefix, *ids[1], *suffix, *ids[2], *middle])
    raise HTTPError(400, "this model does not fill in: its vocabulary has no tokens for that, leave the suffix out")


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise HTTPError(400, f"X-Timeout is {text!r:.40}, but must be a number of seconds") from None
