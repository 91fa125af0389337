"""Submits requests to the models.  Only this module starts generations."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from localllm.cancellation import cancellable, check_cancelled
from localllm.errors import Argument, UsageError
from localllm.generation.completion import Stream
from localllm.inspection.steering import Steering
from localllm.llm import LLM
from localllm.server.answers import (
    MAX_REPLIES,
    GenerationJob,
    LoraScale,
    MediaPrompt,
    PendingReplies,
    Prompt,
    join_prompt,
    stopping,
)
from localllm.server.http import HTTPError, cancel_on_disconnect
from localllm.server.keys import charge
from localllm.server.metrics import Metrics
from localllm.server.models import Models, ServedModel
from localllm.server.page_tools import PageTools
from localllm.server.records import note
from localllm.server.response_store import ResponseStore

_T = TypeVar("_T")

#: Longest string that is read as a token id.
_MAX_DIGITS = 20

#: Limits of ``logit_bias``: entries, and characters of all strings that are not token ids.
MAX_BIASES, MAX_BIAS_CHARACTERS = 1 << 15, 1 << 16

#: Maximum number of characters of a prompt per token of the context.
MAX_CHARACTERS = 256


def _biases(llm: LLM, entries: dict[str, float] | list[tuple[int | str, float | bool]]) -> dict[int, float]:
    """Return the biases by token id.  As in llama.cpp, a key is a token id, or a string for all its tokens."""
    if len(entries) > MAX_BIASES:
        raise UsageError(Argument("logit_bias"), f" has {len(entries):,} entries: send up to {MAX_BIASES:,}")
    biases: dict[int, float] = {}
    n_characters = 0
    for key, bias in entries.items() if isinstance(entries, Mapping) else entries:
        if isinstance(key, int) or (len(key) <= _MAX_DIGITS and key.strip().isdecimal()):
            ids = [int(key)]
        else:
            n_characters += len(key)
            if n_characters > MAX_BIAS_CHARACTERS:
                words = f" has strings of more than {MAX_BIAS_CHARACTERS:,} characters together: send shorter ones"
                raise UsageError(Argument("logit_bias"), words)
            ids = llm.tokenize(key, add_special=False)
        biases |= dict.fromkeys(ids, float("-inf") if bias is False else float(bias))
    return biases


class Dispatcher:
    """Submits requests to the models, and runs blocking work in threads outside the event loop.

    ``responses``: stored responses, which later requests may continue.  ``metrics``: what ``/metrics`` returns.
    """

    def __init__(self, models: Models, responses: ResponseStore, metrics: Metrics) -> None:
        self.models, self.responses, self.metrics = models, responses, metrics
        self.active: dict[int, PendingReplies] = {}  # running replies
        self.is_starting = False  # the first model is still loading
        self.is_stopping = False  # new requests are rejected
        self.is_cut = False  # running replies were ended
        self.may_pull = False  # whether requests may download and delete models
        self.page_tools: PageTools | None = None  # tools that the page may call
        # Tokenizing a prompt and rendering a template must not block the event loop.  Longer work, such as embedding
        # many texts, has separate threads, so that chats do not wait for it.  Long requests have only two threads,
        # because more threads would compete with the decoding threads for the cores.
        sizes = {"prompt": 4, "model": 4, "long": 2, "body": 1, "reply": 4, "tool": 4}
        self._pools = [ThreadPoolExecutor(n, f"localllm-{name}") for name, n in sizes.items()]
        self._threads, self._model_threads, self._long_threads, self._body_thread = self._pools[:4]
        self._reply_threads, self._tool_threads = self._pools[4:]
        # Running work, and whether it may finish when the server stops
        self._works: dict[asyncio.Future[Any], bool] = {}

    async def begin(self, job: GenerationJob, request: Request) -> PendingReplies:
        """Submits a request.  Its headers may set the priority and timeout, unless its fields do."""
        if self.is_stopping:
            raise stopping()
        if not 1 <= job.n <= MAX_REPLIES:
            raise HTTPError(400, f"n is {job.n}, but must be from 1 to {MAX_REPLIES}")
        scales = job.options.pop("adapters", None)
        model = self.models.find(job.model)
        if scales is not None or model.adapters:  # otherwise the model's defaults
            job.options["adapters"] = adapter_scales(model, scales)
        factors = job.options.pop("steer", None)
        if factors is not None:
            job.options["steer"] = vectors(self.models.steering, factors) if factors else ()
        client: str = request.state.client
        if "x-priority" in request.headers:
            job.options.setdefault("priority", request.headers["x-priority"])
        if "x-timeout" in request.headers:
            job.options.setdefault("timeout", _seconds(request.headers["x-timeout"]))
        began = time.perf_counter()
        operation = "chat" if job.messages is not None else "text_completion"
        note(operation=operation, model=model.name, requested_model=job.model, options=job.options, submitted=began)
        served, llm = await self.models.acquire(job.model)
        load_s = time.perf_counter() - began
        note(load_s=load_s)
        try:
            threads, chat = self._threads_for(request, self._threads), job.with_system(served.preset.system)
            streams = await self._run(request, threads, _submit, chat, llm, client)
        except BaseException:
            self.models.release(served)
            raise
        note(llm=llm, streams=streams, n=job.n, is_streamed=job.stream)
        pending = PendingReplies(job, served, llm, streams, self._end, client, began, load_s)
        self.active[pending.number] = pending
        return pending

    async def with_model(self, request: Request, name: str | None, work: Callable[[LLM], _T]) -> _T:
        """Calls ``work`` with a model in another thread, and returns the result."""
        note(model=self.models.find(name).name)
        served, llm = await self.models.acquire(name)
        try:
            threads = self._threads_for(request, self._model_threads)
            return await self._run(request, threads, work, llm, may_finish=True)
        finally:
            self.models.release(served)

    async def with_chat(self, request: Request, job: GenerationJob, work: Callable[[GenerationJob, LLM], _T]) -> _T:
        """Calls ``work`` with a chat and its model in another thread, and returns the result."""
        job = job.with_system(self.models.find(job.model).preset.system)
        return await self.with_model(request, job.model, partial(work, job))

    async def read(self, request: Request, work: Callable[..., _T], *args: Any) -> _T:
        """Calls ``work`` with a request's fields, in another thread if the request is long."""
        if not request.state.is_slow:
            return work(*args)
        return await self._run(request, self._long_threads, work, *args)

    async def convert(self, request: Request | None, work: Callable[..., _T], *args: Any) -> _T:
        """Call ``work``, which converts or stores a long reply, in another thread.

        ``request``: cancels the work if its client disconnects.  None: the caller detects this.
        """
        return await self._run(request, self._reply_threads, work, *args, may_finish=True)

    async def read_body(self, request: Request, work: Callable[..., _T], *args: Any) -> _T:
        """Call ``work`` with a long body in another thread, which reads one body at a time."""
        return await self._run(request, self._body_thread, work, *args)

    async def run_tool(self, request: Request, work: Callable[[Callable[[], bool]], _T]) -> _T:
        """Call ``work`` in another thread, with a function that returns whether the request was cancelled."""
        is_over = threading.Event()
        try:
            return await self._run(request, self._tool_threads, work, is_over.is_set)
        finally:
            is_over.set()

    def _threads_for(self, request: Request, threads: ThreadPoolExecutor) -> ThreadPoolExecutor:
        return self._long_threads if request.state.is_slow else threads

    async def _run(
        self,
        request: Request | None,
        threads: ThreadPoolExecutor,
        work: Callable[..., _T],
        *args: Any,
        may_finish: bool = False,
    ) -> _T:
        """Runs ``work`` in another thread.  It is cancelled when the client disconnects or the server stops.

        ``may_finish``: cancel it only at the end of the grace period, like running replies.
        """
        if self.is_cut:
            raise stopping()
        is_over = threading.Event()

        def call() -> _T:
            with cancellable(is_over.is_set):
                check_cancelled()  # the request may have been cancelled while it waited for a thread
                return work(*args)

        future = asyncio.get_running_loop().run_in_executor(threads, call)
        self._works[future] = may_finish
        try:
            return await (future if request is None else cancel_on_disconnect(request, future))
        except asyncio.CancelledError:
            if self.is_cut or (self.is_stopping and not may_finish):
                raise stopping() from None
            raise
        finally:
            is_over.set()
            del self._works[future]

    def stop(self, *, at_once: bool) -> None:
        """Rejects new requests.  With ``at_once`` also ends running replies."""
        self.is_stopping = True
        if at_once:
            self.is_cut = True
            for pending in list(self.active.values()):
                pending.stop()
        for future, may_finish in list(self._works.items()):
            if at_once or not may_finish:
                future.cancel()

    def close(self) -> None:
        for threads in self._pools:
            threads.shutdown(wait=False, cancel_futures=True)

    def _end(self, pending: PendingReplies) -> None:
        self.active.pop(pending.number, None)
        self.models.release(pending.served)
        usages = [stream.usage for stream in pending.streams]
        charge(sum(usage.total_tokens - usage.cached_tokens for usage in usages))


def _submit(job: GenerationJob, llm: LLM, client: str) -> list[Stream]:
    begins: list[Callable[..., Stream]]
    if "logit_bias" in job.options:
        job.options["logit_bias"] = _biases(llm, job.options["logit_bias"])
    if job.tells_progress:
        job.options["progress"] = lambda n, total: None  # enables progress in the stream's chunks
    if job.messages is None:
        for prompt in job.prompts:
            _check_length(prompt.text if isinstance(prompt, MediaPrompt) else prompt, llm.info.context)
        begins = [partial(_stream, llm, prompt, parse_special=job.special) for prompt in job.prompts]
    else:
        # The template may not support tools.
        begins = [partial(llm.stream_chat, parse=job.chosen, **job.chat_arguments(llm))]
    streams: list[Stream] = []
    try:
        for begin, index in itertools.product(begins, range(job.n)):
            seed = job.options.get("seed")
            more = {} if seed is None else {"seed": (seed + index) % (1 << 64)}
            streams.append(begin(client=client, **{**job.options, **more}))
            streams[-1].tells_progress = job.tells_progress
    except BaseException:
        for stream in streams:
            stream.cancel()
        raise
    return streams


def _check_length(prompt: Prompt, context: int) -> None:
    """Rejects a prompt that is much too long before it is tokenized, which would take seconds."""
    unit, most = ("characters", MAX_CHARACTERS * context) if isinstance(prompt, str) else ("tokens", context)
    if len(prompt) > most:
        size = f"{len(prompt):,} {unit}, which exceeds the available context size of {context:,} tokens"
        raise HTTPError(400, f"the prompt has {size}: shorten it", "context_length_exceeded")


def _stream(llm: LLM, prompt: Prompt | MediaPrompt, **options: Any) -> Stream:
    if isinstance(prompt, MediaPrompt):
        return llm.stream(prompt.text, images=prompt.media, **options)
    return llm.stream(join_prompt(llm, prompt), **options)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise HTTPError(400, f"X-Timeout is {text!r:.40}, but must be a number of seconds") from None


def adapter_scales(model: ServedModel, scales: list[LoraScale] | None) -> dict[str, float]:
    """Return the scales of a model's adapters, by path.

    Adapters that ``scales`` omits get 0, as in llama.cpp; without ``scales`` every adapter has its default.
    """
    if scales is None:
        return dict(model.adapters)
    paths = [*model.adapters]
    for adapter in scales:
        if not 0 <= adapter.id < len(paths):
            has = f"adapters 0 to {len(paths) - 1}" if paths else "no adapters"
            raise HTTPError(400, f"lora: there is no adapter {adapter.id}, the model {model.name} has {has}")
        if not math.isfinite(adapter.scale):
            raise HTTPError(400, f"lora: the scale of adapter {adapter.id} is not finite")
    return dict.fromkeys(paths, 0.0) | {paths[adapter.id]: adapter.scale for adapter in scales}


def vectors(steering: Mapping[str, Steering], factors: Mapping[str, float]) -> list[Steering]:
    """Return the server's vectors ``steering`` that a request names, times its factors."""
    if not steering:
        raise HTTPError(400, "steering: this server has no vectors: start it with --steering DIR")
    for name, factor in factors.items():
        if name not in steering:
            raise HTTPError(400, f"steering: there is no vector {name!r:.80}, the vectors are {', '.join(steering)}")
        if not math.isfinite(factor):
            raise HTTPError(400, f"steering: the factor of {name} is not finite")
    return [steering[name].scaled(factor) for name, factor in factors.items()]
