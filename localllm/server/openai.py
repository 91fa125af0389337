"""OpenAI's API: models, chat completions and completions.

Source: https://platform.openai.com/docs/api-reference.  Further fields (``reasoning_content``, ``timings``,
``chat_template_kwargs``) are the same as in llama.cpp's server.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localllm import openai_format
from localllm.chat.conversation import ToolCall, read_messages
from localllm.generation.completion import Chunk, Stream
from localllm.llm import LLM
from localllm.sampling import Choice
from localllm.server.answers import (
    MAX_REPLIES,
    GenerationFields,
    GenerationJob,
    PendingReplies,
    Prompts,
    Reply,
    constrain_to_format,
    infill_tokens,
    join_prompt,
    prompts_of,
)
from localllm.server.dispatcher import Dispatcher
from localllm.server.endpoint import ReplyWriter, n_input_tokens, respond
from localllm.server.http import DONE, HTTPError, event, json_list, json_response
from localllm.server.models import ServedModel
from localllm.server.response_items import ToolItems
from localllm.tokenizer.stream import TextOffsets
from localllm.version import __version__

# -- Requests ------------------------------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ResponseFormat(msgspec.Struct):
    type: str = "text"
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None


class ChatRequest(GenerationFields, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: Prompts
    suffix: str | None = None
    max_tokens: int | None = 16
    n: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    stream_options: StreamOptions | None = None


def _chat_job(body: ChatRequest) -> GenerationJob:
    if body.max_completion_tokens is not None:
        body.max_tokens = body.max_completion_tokens
    options = body.options(body.top_logprobs or 0 if body.logprobs else None)
    if (form := body.response_format) is not None:
        schema = form.schema if form.json_schema is None else form.json_schema.get("schema")
        constrain_to_format(options, "response_format", form.type, schema)
    goes_on = body.continue_final_message
    if goes_on and body.add_generation_prompt:
        raise HTTPError(400, "continue_final_message and add_generation_prompt contradict each other: leave one out")
    if goes_on is None and body.add_generation_prompt:
        goes_on = False
    custom = ToolItems()
    custom.add([tool for tool in body.tools or () if tool.get("type") == "custom"])
    functions = [tool for tool in body.tools or () if tool.get("type") != "custom"]
    chosen = custom.chosen(body.tool_choice, functions, one_call=body.parallel_tool_calls is False)
    messages, n = read_messages(body.messages), 1 if body.n is None else body.n
    return body.chat_job(options, messages, chosen, goes_on, n=n)


# -- Parts of responses --------------------------------------------------------------------------------------------


def _usage_json(replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the token counts of all replies.  A prompt with several replies counts once."""
    firsts = [reply.usage for reply in replies if reply.is_first]
    n_prompt = sum(usage.prompt_tokens for usage in firsts)
    return {
        **openai_format.usage_json(n_prompt, sum(reply.usage.completion_tokens for reply in replies)),
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in firsts)},
        "completion_tokens_details": {"reasoning_tokens": sum(reply.reasoning_tokens for reply in replies)},
    }


def timings_json(of: Reply | Stream | Chunk) -> dict[str, Any]:
    """Return counts, milliseconds and rates in the format of llama.cpp's server.

    ``first_token_ms`` includes the time in the queue.
    """
    usage, timings, drafts = of.usage, of.timings, of.drafts
    assert usage is not None
    assert timings is not None
    counts = {"draft_n": drafts.drafted, "draft_n_accepted": drafts.accepted} if drafts and drafts.drafted else {}
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": timings.prefill_tokens,
        "prompt_ms": 1e3 * timings.prefill_s,
        "prompt_per_token_ms": 1e3 * timings.prefill_s / max(1, timings.prefill_tokens),
        "prompt_per_second": timings.prefill_tokens_per_s,
        "first_token_ms": 1e3 * timings.first_token_s,
        "predicted_n": usage.completion_tokens,
        "predicted_ms": 1e3 * timings.decode_s,
        "predicted_per_token_ms": 1e3 * timings.decode_s / max(1, usage.completion_tokens),
        "predicted_per_second": timings.decode_tokens_per_s,
        **counts,
    }


def warnings_json(*replies: Reply) -> dict[str, Any]:
    """Return the warnings about parts of the request that were ignored; empty without warnings."""
    warnings = [warning for reply in replies for warning in reply.warnings]
    return {"warnings": warnings} if warnings else {}


def progress_json(pending: PendingReplies, chunk: Chunk) -> dict[str, Any]:
    """Return the progress of a prompt in the format of llama.cpp's server."""
    usage = chunk.usage
    assert usage is not None
    progress = {
        "total": usage.prompt_tokens,
        "cache": usage.cached_tokens,
        "processed": chunk.n_evaluated,
        "time_ms": round(1e3 * (time.perf_counter() - pending.started_at)),
    }
    return {"prompt_progress": progress, "timings": timings_json(chunk)}


def timings_so_far(pending: PendingReplies, reply: Reply) -> dict[str, Any]:
    """Return timings for a piece of a stream; empty unless the request enables them."""
    return {"timings": timings_json(pending.streams[reply.index])} if pending.job.tells_timings else {}


def finish_reason(reply: Reply) -> str:
    if reply.finish_reason != "stop":
        return "length"
    return "tool_calls" if reply.calls and not reply.has_cut_call else "stop"


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


_OpenAIBody = TypeVar("_OpenAIBody", bound=ChatRequest | CompletionRequest)


class _OpenAIWriter(ReplyWriter[_OpenAIBody]):
    """The format that chats and completions share."""

    prefix: ClassVar[str]  # of the id
    names: ClassVar[tuple[str, str]]  # ``object`` of a complete response, and of an event

    def __init__(self, pending: PendingReplies, body: _OpenAIBody) -> None:
        super().__init__(pending, body)
        pending.public_id = new_id(self.prefix)
        self._head = {
            "id": pending.public_id,
            "object": self.names[pending.job.stream],
            "created": int(time.time()),
            "model": pending.served.name,
            "system_fingerprint": f"build-localllm-{__version__}",
        }

    def json(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head, "choices": choices, **more}

    def _event(
        self, index: int, content: dict[str, Any], *, logprobs: Any = None, reason: str | None = None, **more: Any
    ) -> bytes:
        return event(self.json([_choice(index, content, logprobs, reason)], **more))

    def end(self, replies: list[Reply]) -> Iterator[bytes]:
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            yield event(self.json([], usage=_usage_json(replies), timings=timings_json(replies[0])))
        yield DONE


def _choice(index: int, content: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def _totals(replies: Sequence[Reply]) -> dict[str, Any]:
    return {"usage": _usage_json(replies), "timings": timings_json(replies[0]), **warnings_json(*replies)}


# -- Chat ----------------------------------------------------------------------------------------------------------


class _ChatWriter(_OpenAIWriter[ChatRequest]):
    prefix, names = "chatcmpl-", ("chat.completion", "chat.completion.chunk")

    def __init__(self, pending: PendingReplies, body: ChatRequest) -> None:
        super().__init__(pending, body)
        self._custom = pending.job.chosen.custom

    def begin(self) -> Iterator[bytes]:
        for index in range(self.pending.job.n):
            yield self._event(index, {"delta": {"role": "assistant", "content": None}})

    def lines(self, reply: Reply, chunk: Chunk) -> Iterator[bytes]:
        write = partial(self._event, reply.index)
        if chunk.n_evaluated is not None:
            yield write({"delta": {}}, **progress_json(self.pending, chunk))
        elif chunk.finish_reason is not None:
            more = {"timings": timings_json(reply), **warnings_json(reply)}
            yield write({"delta": {}}, reason=finish_reason(reply), **more)
        elif (delta := self._delta(reply, chunk)) or chunk.logprobs:
            logprobs = self._logprobs(chunk.logprobs)
            yield write({"delta": delta}, logprobs=logprobs, **timings_so_far(self.pending, reply))

    def answer(self, replies: list[Reply]) -> Response:
        choices = []
        for reply in replies:
            message = openai_format.message_json(reply.text, reply.thinking, reply.calls, self._custom, refusal=None)
            logprobs = self._logprobs(reply.logprobs) if self.body.logprobs else None
            choices.append(_choice(reply.index, {"message": message}, logprobs, finish_reason(reply)))
        verbose = {"__verbose": {"prompt": self.pending.prompt_text(0)}} if self.body.verbose else {}
        return json_response(self.json(choices, **_totals(replies), **verbose))

    def _logprobs(self, choices: Sequence[Choice] | None) -> dict[str, Any] | None:
        tokenizer = self.pending.llm.tokenizer
        return None if choices is None else openai_format.chat_logprobs_json(tokenizer, choices, json_list)

    def _delta(self, reply: Reply, chunk: Chunk) -> dict[str, Any]:
        """Return the ``delta`` of a chunk.  The input of a custom tool is sent when it is complete."""
        call = chunk.call
        if call is None:
            return {"reasoning_content": chunk.reasoning} if chunk.reasoning else {"content": chunk.text}
        if isinstance(call, ToolCall):
            custom = {"index": len(reply.calls) - 1, "custom": {"input": openai_format.custom_input(call)}}
            return {"tool_calls": [custom]} if call.name in self._custom else {}
        if call.begins:
            return openai_format.call_delta_json(call, self._custom)
        function = {"index": call.index, "function": {"arguments": call.arguments}}
        return {"tool_calls": [function]} if call.arguments and call.name not in self._custom else {}


async def chat_completions(request: Request, dispatcher: Dispatcher, body: ChatRequest) -> Response:
    return await respond(request, dispatcher, body, _chat_job, _ChatWriter)


class ControlRequest(msgspec.Struct):
    id: str
    action: str
    model: str | None = None


async def control(request: Request, dispatcher: Dispatcher, body: ControlRequest) -> Response:
    """Act on a running chat completion of the same client, as in llama.cpp: ``reasoning_end`` ends its reasoning."""
    if body.action != "reasoning_end":
        raise HTTPError(400, f"action is {body.action!r:.40}, but must be reasoning_end")
    running = (pending for pending in dispatcher.active.values() if pending.client == request.state.client)
    pending = next((pending for pending in running if pending.public_id == body.id), None)
    if pending is None:
        return json_response({"success": False, "message": "no running completion has this id"})
    for stream in pending.streams:
        stream.end_reasoning()
    return json_response({"success": True})


async def chat_input_tokens(request: Request, dispatcher: Dispatcher, body: ChatRequest) -> Response:
    n_tokens = await n_input_tokens(request, dispatcher, body, _chat_job)
    return json_response({"object": "response.input_tokens", "input_tokens": n_tokens})


# -- Completions ---------------------------------------------------------------------------------------------------


class _CompletionWriter(_OpenAIWriter[CompletionRequest]):
    prefix, names = "cmpl-", ("text_completion", "text_completion")

    async def prepare(self, request: Request, dispatcher: Dispatcher) -> None:
        tokenizer, name = self.pending.llm.tokenizer, self.pending.served.name
        self._offsets = [TextOffsets(tokenizer) for _ in self.pending.streams]
        echoed = self.pending.job.prompts if self.body.echo else ()
        self._echoes = [await dispatcher.with_model(request, name, partial(self._echo, prompt)) for prompt in echoed]

    def _echo(self, prompt: Any, llm: LLM) -> tuple[str, list[Choice]]:
        """Return the prompt's text, and its tokens' log-probabilities if requested."""
        ids = llm.tokenize(prompt, parse_special=True) if isinstance(prompt, str) else join_prompt(llm, prompt)
        assert isinstance(ids, list)
        text = prompt if isinstance(prompt, str) else llm.detokenize(ids)
        if self.body.logprobs is None or not ids:
            return text, []
        (score,) = llm.score(ids[:1], [ids[1:]], top_logprobs=self.body.logprobs)
        return text, [Choice(ids[0]), *score.choices]

    def begin(self) -> Iterator[bytes]:
        for index in range(len(self.pending.streams)) if self._echoes else ():
            text, choices = self._echoes[index // self.pending.job.n]
            yield self._event(index, {"text": text}, logprobs=self._logprobs(index, choices or None))

    def lines(self, reply: Reply, chunk: Chunk) -> Iterator[bytes]:
        if chunk.text or chunk.logprobs:  # the last chunk may contain text that was held back
            logprobs = self._logprobs(reply.index, chunk.logprobs)
            yield self._event(reply.index, {"text": chunk.text}, logprobs=logprobs)
        if chunk.finish_reason is not None:
            more = {"timings": timings_json(reply), **warnings_json(reply)}
            yield self._event(reply.index, {"text": ""}, reason=finish_reason(reply), **more)

    def answer(self, replies: list[Reply]) -> Response:
        choices = []
        for reply in replies:
            text, echoed = self._echoes[reply.index // self.pending.job.n] if self._echoes else ("", [])
            sampled = None if self.body.logprobs is None else [*echoed, *reply.logprobs]
            logprobs = self._logprobs(reply.index, sampled)
            choices.append(_choice(reply.index, {"text": text + reply.text}, logprobs, finish_reason(reply)))
        return json_response(self.json(choices, **_totals(replies)))

    def _logprobs(self, index: int, choices: Sequence[Choice] | None) -> dict[str, Any] | None:
        if choices is None:
            return None
        logprobs = openai_format.text_logprobs_json(self.pending.llm.tokenizer, choices, self._offsets[index])
        return {**logprobs, "top_logprobs": json_list(logprobs["top_logprobs"])}


async def completions(request: Request, dispatcher: Dispatcher, body: CompletionRequest) -> Response:
    prompts = await dispatcher.read(request, prompts_of, body.prompt)
    if not 1 <= len(prompts) <= MAX_REPLIES:
        raise HTTPError(400, f"there are {len(prompts):,} prompts, but a request has from 1 to {MAX_REPLIES}")
    if body.suffix:
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise HTTPError(400, "suffix needs a prompt that is a string")
        filled = [partial(infill_tokens, before=str(prompt), after=body.suffix) for prompt in prompts]
        prompts = [await dispatcher.with_model(request, body.model, work) for work in filled]
    return await respond(request, dispatcher, body, partial(_completion_job, prompts), _CompletionWriter)


def _completion_job(prompts: list[Any], body: CompletionRequest) -> GenerationJob:
    options = body.options(body.logprobs)
    return body.job(options, prompts=prompts, n=1 if body.n is None else body.n, special=True)


# -- Models --------------------------------------------------------------------------------------------------------


async def models(request: Request, dispatcher: Dispatcher) -> Response:
    listed = await dispatcher.models.listed()
    described = [{"name": model.name, "model": model.name, "capabilities": _capabilities(model)} for model in listed]
    return json_response({"object": "list", "data": [model_json(model) for model in listed], "models": described})


def _capabilities(served: ServedModel) -> list[str]:
    """Return a model's capabilities in llama-server's format.  Image and audio input are known after loading."""
    if served.llm is None:
        return ["completion"]
    if not served.llm.writes_text:
        return ["embedding"]
    return ["completion", *(["multimodal"] if served.llm.accepts_images or served.llm.accepts_audio else [])]


async def model(request: Request, dispatcher: Dispatcher) -> Response:
    await dispatcher.models.listed()
    return json_response(model_json(dispatcher.models.find(request.path_params["name"])))


def model_json(served: ServedModel) -> dict[str, Any]:
    details, info = served.details, None if served.llm is None else served.llm.info
    context = served.context
    meta = {
        "n_ctx": context,
        "n_ctx_train": details.trained_context,
        "n_params": details.n_parameters,
        "size": served.n_bytes,
        "ftype": details.file_type,
        "n_vocab": None if info is None else info.n_vocab,
    }
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "localllm",
        "aliases": served.preset.aliases,
        "tags": served.preset.tags,
        "status": {"value": served.state, "progress": served.load_progress},
        "architecture": {"input_modalities": served.modalities, "output_modalities": ["text"]},
        "meta": meta,
        # Fields of vLLM, OpenRouter, LiteLLM and others.
        "context_length": context,
        "max_model_len": context,
        "max_input_tokens": context,
        "max_tokens": context,
        # Fields that Anthropic's clients read.
        "type": "model",
        "display_name": served.name,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(served.created)),
    }
