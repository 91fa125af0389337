"""Endpoints of llama.cpp's server.

Source: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
from starlette.requests import Request
from starlette.responses import Response

from localllm.chat.conversation import read_messages
from localllm.chat.tool_choice import choose_tools
from localllm.errors import ClosedError, OutputError, PromptCacheError, path_text
from localllm.generation.completion import Chunk
from localllm.llm import LLM
from localllm.openai_format import token_json
from localllm.options.declared import Sampling, declared
from localllm.sampling import Choice
from localllm.server.answers import (
    MAX_REPLIES,
    GenerationFields,
    GenerationJob,
    LoraScale,
    MediaPrompt,
    PendingReplies,
    Prompt,
    Prompts,
    Reply,
    ThinkingFields,
    infill_tokens,
    prompts_of,
    split_reply_start,
)
from localllm.server.dispatcher import Dispatcher, adapter_scales
from localllm.server.endpoint import ReplyWriter, respond
from localllm.server.http import HTTPError, event, json_list, json_response
from localllm.server.models import ServedModel
from localllm.server.openai import progress_json, timings_json, timings_so_far, warnings_json
from localllm.tokenizer import Tokenizer
from localllm.version import __version__

#: Maximum number of characters that a request tokenizes.
MAX_CONTENT = 1_500_000

#: Maximum number of fields that a request selects.
_MAX_FIELDS = 100

#: Valid file names of saved prompts.
_FILE_NAME = re.compile(r"(?!lock$|.*\.blocks$)[\w-][\w.-]{0,127}", re.ASCII)


async def health(request: Request, dispatcher: Dispatcher) -> Response:
    served = dispatcher.models.visible()
    loading = {model.name: model.load_progress for model in served if model.load_progress is not None}
    more = {"loading": loading} if loading else {}
    if dispatcher.is_stopping:
        return json_response({"status": "stopping"}, 503)
    if dispatcher.is_starting:
        error = {"code": 503, "message": "Loading model", "type": "unavailable_error"}  # llama.cpp's words
        return json_response({"status": "loading", **more, "error": error}, 503)
    return json_response({"status": "ok", **more})


async def props(request: Request, dispatcher: Dispatcher) -> Response:
    name = request.query_params.get("model")
    served = dispatcher.models.find(name)
    if served.llm is not None:  # reading the properties does not count as a use
        with contextlib.suppress(ClosedError):
            served.props = await asyncio.to_thread(described, served.llm)
    elif not served.props:
        served.props = await dispatcher.with_model(request, name, described)
    return json_response(
        {
            **served.props,
            "is_sleeping": served.llm is None,
            "model_alias": served.name,
            "model_path": f"{served.name.removesuffix('.gguf')}.gguf",  # without folders
            "build_info": f"localllm {__version__}",
        }
    )


def described(llm: LLM) -> dict[str, Any]:
    """Return the description of a model for ``/props``."""
    tokenizer = llm.tokenizer
    return {
        "default_generation_settings": {"n_ctx": llm.info.context, "params": _settings(llm, {})},
        "total_slots": llm.info.placement.parallel,
        "chat_template": llm.chat_template.source,
        "chat_template_caps": llm.chat_template.capabilities,
        **{f"chat_template_{name}": text for name, text in llm.chat_template.named.items()},
        "bos_token": _token_text(tokenizer, tokenizer.bos_id),
        "eos_token": _token_text(tokenizer, tokenizer.eos_id),
        "modalities": {"vision": llm.accepts_images, "audio": llm.accepts_audio},
    }


def _settings(llm: LLM, options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a request; -1 means unset."""
    checked = llm.with_defaults(options)
    values = {
        name: getattr(checked.sampling, name) for name, option in declared(Sampling).items() if option.kind.json
    }
    values = {name: value for name, value in values.items() if value is not None}
    n_predict = -1 if checked.max_tokens is None else checked.max_tokens
    biases = {id_: bias if math.isfinite(bias) else None for id_, bias in checked.sampling.logit_bias.items()}
    if checked.ignore_eos:
        biases |= dict.fromkeys(llm.tokenizer.eog_ids)
    values["logit_bias"] = [{"token": id_, "bias": bias} for id_, bias in biases.items()]
    return {"seed": -1, **values, "n_predict": n_predict, "stop": checked.stop, "stream": False}


def _token_text(tokenizer: Tokenizer, id_: int | None) -> str:
    return "" if id_ is None else tokenizer.token_text(id_)


async def slots(request: Request, dispatcher: Dispatcher) -> Response:
    """List a slot per running reply, and idle slots for the free part of the caches.  More requests may run."""
    if dispatcher.is_starting:
        raise HTTPError(503, "the model is being loaded: ask again later", "unavailable")
    rows: list[dict[str, Any]] = []
    for served in dispatcher.models.visible():
        if served.llm is None:
            continue
        slot = {"model": served.name, "n_ctx": served.llm.info.context}
        streams = [
            (a.number, stream) for a in dispatcher.active.values() if a.served is served for stream in a.streams
        ]
        for number, stream in streams:
            usage = stream.usage
            counts = {"n_prompt_tokens": usage.prompt_tokens, "n_cached_tokens": usage.cached_tokens}
            counts["n_decoded"] = usage.completion_tokens
            rows.append({**slot, "id_task": number, "is_processing": True, **counts})
        n_idle = served.llm.info.placement.parallel - len(streams)
        rows += [{**slot, "id_task": -1, "is_processing": False}] * n_idle
    return json_response([{"id": number, **row} for number, row in enumerate(rows)])


class SlotRequest(msgspec.Struct):
    filename: str = ""
    model: str | None = None


async def slot(request: Request, dispatcher: Dispatcher, body: SlotRequest) -> Response:
    """Saves, restores or erases the cache of evaluated prompts.  All slots share one cache."""
    action, id_ = request.query_params.get("action"), request.path_params["id"]
    number = int(id_) if id_.isdecimal() and len(id_) < 6 else 0
    if action == "erase":
        await dispatcher.with_model(request, body.model, lambda llm: llm.forget())
        return json_response({"id_slot": number})
    if action not in ("save", "restore"):
        raise HTTPError(400, "the action is one of save, restore and erase, as in /slots/0?action=save")
    if dispatcher.models.prompts is None:
        raise HTTPError(501, "this server saves no prompts: start it with --prompt-cache DIR", "not_available")
    if not _FILE_NAME.fullmatch(body.filename):
        raise HTTPError(400, "filename must be a name of letters, digits, '-', '_' and '.', without folders")
    path, begin = dispatcher.models.prompts / body.filename, time.perf_counter()
    operation = LLM.save_prompts if action == "save" else LLM.load_prompts
    try:
        n = await dispatcher.with_model(request, body.model, lambda llm: operation(llm, path))
    except (PromptCacheError, OutputError) as error:
        status = 400 if isinstance(error, PromptCacheError) else 507
        raise HTTPError(status, str(error).replace(path_text(path.parent) + os.sep, "")) from error
    saved, written = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
    timings = {f"{action}_ms": 1000 * (time.perf_counter() - begin)}
    sizes = {saved: n, written: path.stat().st_size}
    return json_response({"id_slot": number, "filename": body.filename, **sizes, "timings": timings})


async def metrics(request: Request, dispatcher: Dispatcher) -> Response:
    """Return Prometheus' metrics; with the query ``names=localllm`` without the names of other programs."""
    has_aliases = request.query_params.get("names") != "localllm"
    text = await dispatcher.convert(request, partial(dispatcher.metrics.text, has_aliases=has_aliases))
    response = Response(text, media_type="text/plain; version=0.0.4")
    started = str(int(psutil.Process().create_time())).encode()
    response.raw_headers.append((b"Process-Start-Time-Unix", started))  # the spelling that llama.cpp's clients read
    return response


# -- Tokens --------------------------------------------------------------------------------------------------------


class TokenizeRequest(msgspec.Struct):
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    model: str | None = None


class DetokenizeRequest(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


class TemplateRequest(ThinkingFields, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    model: str | None = None


async def tokenize(request: Request, dispatcher: Dispatcher, body: TokenizeRequest) -> Response:
    if len(body.content) > MAX_CONTENT:
        raise HTTPError(
            413, f"content has {len(body.content):,} characters: send up to {MAX_CONTENT:,} in one request"
        )

    def work(llm: LLM) -> msgspec.Raw:
        ids = llm.tokenize(body.content, body.add_special, body.parse_special)
        if not body.with_pieces:
            return json_list(ids)
        pieces = (_piece(llm.tokenizer.token_bytes(id_, special=True)) for id_ in ids)
        return json_list({"id": id_, "piece": piece} for id_, piece in zip(ids, pieces, strict=True))

    return json_response({"tokens": await dispatcher.with_model(request, body.model, work)})


def _piece(data: bytes) -> str | list[int]:
    """Return a token's text, or its bytes if it is not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(request: Request, dispatcher: Dispatcher, body: DetokenizeRequest) -> Response:
    text = await dispatcher.with_model(request, body.model, lambda llm: llm.detokenize(body.tokens, special=True))
    return json_response({"content": text})


async def apply_template(request: Request, dispatcher: Dispatcher, body: TemplateRequest) -> Response:
    goes_on = None if body.add_generation_prompt else False
    read = partial(read_messages, body.messages)
    messages, reply_start = split_reply_start(await dispatcher.read(request, read), goes_on)
    variables = body.template_variables()
    if not body.add_generation_prompt:
        variables["add_generation_prompt"] = False
    more: dict[str, Any] = {"variables": variables, "reply_start": reply_start, "chosen": choose_tools(body.tools)}
    job = GenerationJob(body.model, {}, messages, **more)
    return json_response({"prompt": await dispatcher.with_chat(request, job, GenerationJob.rendered)})


async def lora_adapters(request: Request, dispatcher: Dispatcher) -> Response:
    """Lists the adapters of the query's ``model``, which defaults to the first model."""
    adapters = enumerate(_model_of_query(request, dispatcher).adapters.items())
    return json_response([{"id": i, "path": Path(path).name, "scale": scale} for i, (path, scale) in adapters])


async def set_lora_adapters(request: Request, dispatcher: Dispatcher, body: list[LoraScale]) -> Response:
    """Sets the adapters' scales for requests without ``lora``."""
    model = _model_of_query(request, dispatcher)
    model.adapters = adapter_scales(model, body)
    return await lora_adapters(request, dispatcher)


def _model_of_query(request: Request, dispatcher: Dispatcher) -> ServedModel:
    return dispatcher.models.find(request.query_params.get("model"))


# -- Completions ---------------------------------------------------------------------------------------------------


class _CompletionFields(GenerationFields):
    max_tokens: int | None = msgspec.field(name="n_predict", default=None)
    post_sampling_probs: bool | None = None
    n_probs: int | None = None
    response_fields: list[str] | None = None
    return_tokens: bool = False


class LlamaCompletionRequest(_CompletionFields, kw_only=True):
    prompt: Prompts


class InfillRequest(_CompletionFields, kw_only=True):
    input_prefix: str
    input_suffix: str
    input_extra: list[dict[str, str]] | None = None
    prompt: str | list[int] = ""


async def completion(request: Request, dispatcher: Dispatcher, body: LlamaCompletionRequest) -> Response:
    if body.prompt == []:
        raise HTTPError(400, "prompt is an empty list: give a string, or token ids")
    prompts = await dispatcher.read(request, partial(prompts_of, body.prompt, may_see=True))
    return await _complete(request, dispatcher, body, prompts)


async def infill(request: Request, dispatcher: Dispatcher, body: InfillRequest) -> Response:
    prompt = body.prompt if isinstance(body.prompt, str) else ""
    extra = "".join(file.get("text", "") + "\n" for file in body.input_extra or [])
    work = partial(infill_tokens, before=extra + body.input_prefix, after=body.input_suffix, start=prompt)
    ids: list[Any] = await dispatcher.with_model(request, body.model, work)
    return await _complete(request, dispatcher, body, [ids])


async def _complete(
    request: Request, dispatcher: Dispatcher, body: _CompletionFields, prompts: Sequence[Prompt | MediaPrompt]
) -> Response:
    if len(prompts) > MAX_REPLIES:
        raise HTTPError(400, f"there are {len(prompts):,} prompts, but a request has at most {MAX_REPLIES}")
    if (n_fields := len(body.response_fields or ())) > _MAX_FIELDS:
        raise HTTPError(400, f"response_fields has {n_fields:,} names: send up to {_MAX_FIELDS}")
    return await respond(request, dispatcher, body, partial(_completion_job, prompts), _LlamaWriter)


def _completion_job(prompts: Sequence[Prompt | MediaPrompt], body: _CompletionFields) -> GenerationJob:
    return body.job(body.options(body.n_probs or None), prompts=prompts, special=True)


class _LlamaWriter(ReplyWriter[_CompletionFields]):
    def __init__(self, pending: PendingReplies, body: _CompletionFields) -> None:
        super().__init__(pending, body)
        self._settings = _settings(pending.llm, pending.job.options)
        self._shows_prompt = body.verbose or "prompt" in (body.response_fields or ())  # it may be long

    @property
    def uses_thread(self) -> bool:
        return super().uses_thread or self._shows_prompt

    def lines(self, reply: Reply, chunk: Chunk) -> Iterator[bytes]:
        head = {"index": reply.index, "content": chunk.text, "tokens": chunk.ids, "stop": False}
        if chunk.n_evaluated is not None:
            yield event({**head, **progress_json(self.pending, chunk)})
        elif chunk.text or chunk.logprobs:  # the last chunk may contain text that was held back
            probabilities = self._probabilities(chunk.logprobs or ())
            yield event({**head, **probabilities, **timings_so_far(self.pending, reply)})
        if chunk.finish_reason is not None:
            yield event(_chosen(self.body, self._end(reply)))

    def answer(self, replies: list[Reply]) -> Response:
        rows = []
        for reply in replies:
            probabilities = {name: json_list(rows) for name, rows in self._probabilities(reply.logprobs).items()}
            rows.append(_chosen(self.body, {**self._end(reply), "content": reply.text, **probabilities}))
        return json_response(rows if len(rows) > 1 else rows[0])

    def _probabilities(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return _probabilities(self.pending.llm, choices, bool(self.body.post_sampling_probs))

    def _end(self, reply: Reply) -> dict[str, Any]:
        body, stream = self.body, self.pending.streams[reply.index]
        stop = "word" if reply.stop_text is not None else "eos" if reply.finish_reason == "stop" else "limit"
        return {
            "index": reply.index,
            "content": "",
            "tokens": stream.tokens[stream.usage.prompt_tokens :] if body.return_tokens else [],
            **({"prompt": self.pending.prompt_text(reply.index)} if self._shows_prompt else {}),
            "has_new_line": "\n" in reply.text,
            "model": self.pending.served.name,
            "stop": True,
            "stop_type": stop,
            "stopping_word": reply.stop_text or "",
            "tokens_predicted": reply.usage.completion_tokens,
            "tokens_evaluated": reply.usage.prompt_tokens,
            "tokens_cached": reply.usage.cached_tokens,
            "truncated": reply.usage.total_tokens >= self.pending.llm.info.context,
            "generation_settings": self._settings,
            "timings": timings_json(reply),
            **warnings_json(reply),
        }


def _chosen(body: _CompletionFields, result: dict[str, Any]) -> dict[str, Any]:
    """Return the requested fields, or all fields.  "a/b" is field b of a."""
    if not body.response_fields:
        return result
    selected = {}
    for path in body.response_fields:
        value: Any = result
        for name in path.split("/"):
            value = value.get(name, msgspec.UNSET) if isinstance(value, dict) else msgspec.UNSET
        if value is not msgspec.UNSET:
            selected[path] = value
    return selected


def _probabilities(llm: LLM, choices: Sequence[Choice], are_drawn: bool) -> dict[str, Any]:
    if not choices:
        return {}
    row = partial(_drawn_json if are_drawn else token_json, llm.tokenizer)
    name = "top_probs" if are_drawn else "top_logprobs"

    def top(choice: Choice) -> list[dict[str, Any]]:
        return [{"id": id_, **row(id_, logprob)} for id_, logprob in choice.top]

    return {"completion_probabilities": [{"id": c.id, **row(c.id, c.logprob), name: top(c)} for c in choices]}


def _drawn_json(tokenizer: Tokenizer, id_: int, logprob: float | None) -> dict[str, Any]:
    """Return a token with its probability after sampling, in llama.cpp's format."""
    token = token_json(tokenizer, id_, logprob)
    return {"token": token["token"], "prob": math.exp(token["logprob"]), "bytes": token["bytes"]}
