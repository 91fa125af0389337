"""OpenAI's API: models, chat completions and completions.

Source: https://platform.openai.com/docs/api-reference.  Further fields (``reasoning_content``, ``timings``,
``chat_template_kwargs``) are the same as in llama.cpp's server.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localllm.chat.conversation import ToolCall, read_messages
from localllm.generation.completion import Chunk, Stream
from localllm.llm import LLM
from localllm.openai_format import call_delta_json, chat_logprobs_json, message_json, text_logprobs_json, usage_json
from localllm.sampling import Choice
from localllm.server.answers import (
    MAX_REPLIES,
    GenerationFields,
    GenerationJob,
    PendingReplies,
    Prompt,
    Prompts,
    Reply,
    closed_on_error,
    constrain_to_format,
    infill_tokens,
    join_prompt,
    offer_tools,
    prompts_of,
    split_reply_start,
)
from localllm.server.bodies import decode
from localllm.server.dispatcher import Dispatcher
from localllm.server.http import DONE, EventStream, HTTPError, cancel_on_disconnect, event, json_list, json_response
from localllm.server.models import ServedModel
from localllm.tokenizer.stream import TextOffsets
from localllm.version import __version__

#: Maximum number of likeliest tokens per position.
_MAX_LOGPROBS = 100


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
    logprobs = body.top_logprobs or 0 if body.logprobs else None
    if body.max_completion_tokens is not None:
        body.max_tokens = body.max_completion_tokens
    options = body.options(logprobs=checked_logprobs(logprobs))
    if (form := body.response_format) is not None:
        schema = form.schema if form.json_schema is None else form.json_schema.get("schema")
        constrain_to_format(options, "response_format", form.type, schema)
    goes_on = body.continue_final_message
    if goes_on and body.add_generation_prompt:
        raise HTTPError(400, "continue_final_message and add_generation_prompt contradict each other: leave one out")
    if goes_on is None and body.add_generation_prompt:
        goes_on = False
    messages, reply_start = split_reply_start(read_messages(body.messages), goes_on)
    return GenerationJob(
        body.model,
        options,
        messages=messages,
        reply_start=reply_start,
        **offer_tools(options, body.tools, body.tool_choice),
        variables=body.template_variables(),
        n=1 if body.n is None else body.n,
        one_call=body.parallel_tool_calls is False,
        tells_progress=body.return_progress and body.stream,
        tells_timings=body.timings_per_token,
    )


def checked_logprobs(logprobs: int | None) -> int | None:
    """Return ``logprobs``, the number of likeliest tokens per position.  Raises HTTPError if it is too large."""
    if logprobs is not None and logprobs > _MAX_LOGPROBS:
        raise HTTPError(400, f"at most {_MAX_LOGPROBS} likeliest tokens can be listed, not {logprobs}")
    return logprobs


# -- Parts of responses --------------------------------------------------------------------------------------------


def _usage_json(replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the token counts of all replies.  A prompt with several replies counts once."""
    firsts = [reply.usage for reply in replies if reply.is_first]
    n_prompt = sum(usage.prompt_tokens for usage in firsts)
    return {
        **usage_json(n_prompt, sum(reply.usage.completion_tokens for reply in replies)),
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
        "time_ms": round(1e3 * (time.perf_counter() - pending.begun_at)),
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


class _Head:
    def __init__(self, prefix: str, object_name: str, pending: PendingReplies) -> None:
        pending.public_id = new_id(prefix)
        self._fields = {
            "id": pending.public_id,
            "object": object_name,
            "created": int(time.time()),
            "model": pending.served.name,
            "system_fingerprint": f"build-localllm-{__version__}",
        }

    def json(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._fields, "choices": choices, **more}


# -- Chat ----------------------------------------------------------------------------------------------------------


async def chat_completions(request: Request, dispatcher: Dispatcher) -> Response:
    body = await decode(request, ChatRequest)
    pending = await dispatcher.begin(await dispatcher.read(request, _chat_job, body), request)
    if body.stream:
        head = _Head("chatcmpl-", "chat.completion.chunk", pending)
        begin = [
            event(_chat_piece(head, index, {"role": "assistant", "content": None})) for index in range(pending.job.n)
        ]
        lines = pending.lines(partial(_chat_lines, head, pending), begin, partial(_end_lines, head, body))
        return EventStream(lines, pending.close, path=request.url.path)
    with closing(pending):
        replies = await cancel_on_disconnect(request, pending.read())
    head = _Head("chatcmpl-", "chat.completion", pending)

    def convert() -> list[dict[str, Any]]:
        choices = []
        for reply in replies:
            logprobs = chat_logprobs_json(pending.llm.tokenizer, reply.logprobs, json_list) if body.logprobs else None
            message = message_json(reply.text, reply.thinking, reply.calls, refusal=None)
            choice = {"index": reply.index, "message": message, "logprobs": logprobs}
            choices.append({**choice, "finish_reason": finish_reason(reply)})
        return choices

    choices = await dispatcher.convert(request, convert) if body.logprobs else convert()
    verbose = {"__verbose": {"prompt": pending.prompt_text(0)}} if body.verbose else {}
    return json_response(head.json(choices, **_totals(replies), **verbose))


def _totals(replies: Sequence[Reply]) -> dict[str, Any]:
    return {"usage": _usage_json(replies), "timings": timings_json(replies[0]), **warnings_json(*replies)}


def _chat_piece(
    head: _Head, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None
) -> dict[str, Any]:
    return head.json([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}])


def _chat_lines(head: _Head, pending: PendingReplies, reply: Reply, chunk: Chunk) -> Iterator[bytes]:
    if chunk.n_evaluated is not None:
        yield event(_chat_piece(head, reply.index, {}) | progress_json(pending, chunk))
    elif chunk.finish_reason is not None:
        yield event(_chat_piece(head, reply.index, {}, finish_reason(reply)) | _end_of_stream(reply))
    elif (delta := _delta(chunk)) or chunk.logprobs:
        logprobs = chat_logprobs_json(pending.llm.tokenizer, chunk.logprobs, json_list) if chunk.logprobs else None
        yield event(_chat_piece(head, reply.index, delta, logprobs=logprobs) | timings_so_far(pending, reply))


def _end_lines(head: _Head, body: ChatRequest | CompletionRequest, replies: Sequence[Reply]) -> Iterator[bytes]:
    if body.stream_options is not None and body.stream_options.include_usage:
        yield event(head.json([], usage=_usage_json(replies), timings=timings_json(replies[0])))
    yield DONE


def _end_of_stream(reply: Reply) -> dict[str, Any]:
    return {"timings": timings_json(reply), **warnings_json(reply)}


def _delta(chunk: Chunk) -> dict[str, Any]:
    call = chunk.call
    if isinstance(call, ToolCall):  # its pieces were already sent
        return {}
    if call is None:
        return {"reasoning_content": chunk.reasoning} if chunk.reasoning else {"content": chunk.text}
    if call.begins:
        return call_delta_json(call)
    function = {"arguments": call.arguments}
    return {"tool_calls": [{"index": call.index, "function": function}]} if call.arguments else {}


class ControlRequest(msgspec.Struct):
    id: str
    action: str
    model: str | None = None


async def control(request: Request, dispatcher: Dispatcher) -> Response:
    """Act on a running chat completion, as in llama.cpp: ``reasoning_end`` ends its reasoning."""
    body = await decode(request, ControlRequest)
    if body.action != "reasoning_end":
        raise HTTPError(400, f"action is {body.action!r:.40}, but must be reasoning_end")
    pending = next((each for each in dispatcher.active.values() if each.public_id == body.id), None)
    if pending is None:
        return json_response({"success": False, "message": "no running completion has this id"})
    for stream in pending.streams:
        stream.end_reasoning()
    return json_response({"success": True})


async def chat_input_tokens(request: Request, dispatcher: Dispatcher) -> Response:
    job = await dispatcher.read(request, _chat_job, await decode(request, ChatRequest))
    return await count_input(request, dispatcher, job)


async def count_input(request: Request, dispatcher: Dispatcher, job: GenerationJob) -> Response:
    n_tokens = len(await dispatcher.with_chat(request, job, GenerationJob.prompt_ids))
    return json_response({"object": "response.input_tokens", "input_tokens": n_tokens})


# -- Completions ---------------------------------------------------------------------------------------------------


async def completions(request: Request, dispatcher: Dispatcher) -> Response:
    body = await decode(request, CompletionRequest)
    prompts = await dispatcher.read(request, prompts_of, body.prompt)
    if not 1 <= len(prompts) <= MAX_REPLIES:
        raise HTTPError(400, f"there are {len(prompts):,} prompts, but a request has from 1 to {MAX_REPLIES}")
    n = 1 if body.n is None else body.n
    options = await dispatcher.read(request, partial(body.options, logprobs=checked_logprobs(body.logprobs)))
    if body.suffix:
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise HTTPError(400, "suffix needs a prompt that is a string")
        filled = [partial(infill_tokens, before=str(prompt), after=body.suffix) for prompt in prompts]
        prompts = [await dispatcher.with_model(request, body.model, work) for work in filled]
    pending = await dispatcher.begin(GenerationJob(body.model, options, prompts=prompts, n=n, special=True), request)
    head, n_replies = _Head("cmpl-", "text_completion", pending), range(len(pending.streams))
    offsets = [TextOffsets(pending.llm.tokenizer) for _ in n_replies]
    with closed_on_error(pending):
        echoes = [await _echo(request, dispatcher, body, pending, prompt) for prompt in prompts] if body.echo else []
    if body.stream:

        def write(index: int, text: str, sampled: Sequence[Choice], reason: str | None = None) -> dict[str, Any]:
            logprobs = text_logprobs_json(pending.llm.tokenizer, sampled, offsets[index]) if sampled else None
            return head.json([{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}])

        def begin() -> list[bytes]:
            return [event(write(index, *echoes[index // n])) for index in n_replies if echoes]

        with closed_on_error(pending):
            first = begin() if body.logprobs is None or not echoes else await dispatcher.convert(request, begin)
        lines = pending.lines(partial(_completion_lines, write), first, partial(_end_lines, head, body))
        return EventStream(lines, pending.close, path=request.url.path)
    with closing(pending):
        replies = await cancel_on_disconnect(request, pending.read())

    def convert() -> list[dict[str, Any]]:
        choices = []
        for reply in replies:
            echo, before = echoes[reply.index // n] if echoes else ("", [])
            sampled = [*before, *reply.logprobs]
            logprobs = None
            if body.logprobs is not None:
                logprobs = text_logprobs_json(pending.llm.tokenizer, sampled, offsets[reply.index])
                logprobs["top_logprobs"] = json_list(logprobs["top_logprobs"])
            choice = {"index": reply.index, "text": echo + reply.text, "logprobs": logprobs}
            choices.append({**choice, "finish_reason": finish_reason(reply)})
        return choices

    choices = convert() if body.logprobs is None else await dispatcher.convert(request, convert)
    return json_response(head.json(choices, **_totals(replies)))


async def _echo(
    request: Request, dispatcher: Dispatcher, body: CompletionRequest, pending: PendingReplies, prompt: Prompt
) -> tuple[str, list[Choice]]:
    """Return the prompt's text, and its tokens' log-probabilities if requested."""

    def work(llm: LLM) -> tuple[str, list[Choice]]:
        ids = llm.tokenize(prompt, parse_special=True) if isinstance(prompt, str) else join_prompt(llm, prompt)
        assert isinstance(ids, list)
        text = prompt if isinstance(prompt, str) else llm.detokenize(ids)
        if body.logprobs is None or not ids:
            return text, []
        (score,) = llm.score(ids[:1], [ids[1:]], top_logprobs=body.logprobs)
        return text, [Choice(ids[0]), *score.choices]

    result: tuple[str, list[Choice]] = await dispatcher.with_model(request, pending.served.name, work)
    return result


def _completion_lines(write: Callable[..., dict[str, Any]], reply: Reply, chunk: Chunk) -> Iterator[bytes]:
    if chunk.text or chunk.logprobs:  # the last chunk may contain text that was held back
        yield event(write(reply.index, chunk.text, chunk.logprobs or ()))
    if chunk.finish_reason is not None:
        yield event(write(reply.index, "", (), finish_reason(reply)) | _end_of_stream(reply))


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
        "aliases": served.aliases,
        "tags": served.tags,
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
