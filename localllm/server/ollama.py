"""Ollama's API: chat, generate and model information.  Replies are lines of JSON.

Source: https://github.com/ollama/ollama/blob/main/docs/api.md.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localllm.chat.conversation import Media, Message, ToolCall, decoded, read_message
from localllm.chat.tool_choice import choose_tools
from localllm.generation.completion import Chunk
from localllm.llm import LLM
from localllm.server import downloads
from localllm.server.answers import (
    GenerationFields,
    GenerationJob,
    PendingReplies,
    Reply,
    ThinkingFields,
    constrain,
    infill_tokens,
    split_reply_start,
)
from localllm.server.dispatcher import Dispatcher
from localllm.server.endpoint import ReplyWriter, respond
from localllm.server.http import HTTPError, json_bytes, json_response
from localllm.server.keys import is_admin
from localllm.server.models import ServedModel
from localllm.server.openai import warnings_json
from localllm.version import __version__

#: Version of Ollama whose API this is.
_OLLAMA_VERSION = "0.12.0"


class RunOptions(GenerationFields):
    max_tokens: int | None = msgspec.field(name="num_predict", default=None)


class OllamaRequest(ThinkingFields):
    model: str | None = None
    name: str | None = None
    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    prompt: str = ""
    system: str | None = None
    suffix: str | None = None
    images: list[str] | None = None
    raw: bool = False
    tools: list[dict[str, Any]] | None = None
    format: str | dict[str, Any] | None = None
    options: RunOptions | None = None
    stream: bool = True
    keep_alive: str | float | None = None
    context: list[int] | None = None


def _job(body: OllamaRequest, **more: Any) -> GenerationJob:
    _seconds(body.keep_alive)  # rejects an invalid value before the model is loaded
    run = body.options or RunOptions()
    options = run.options() | body.token_budget()
    if isinstance(body.format, str) and body.format not in ("", "json"):
        raise HTTPError(400, f"format is {body.format!r:.40}, but must be 'json' or a JSON schema")
    if body.format:
        constrain(options, body.format if isinstance(body.format, dict) else None)
    variables = run.template_variables() | body.template_variables()
    more |= {"variables": variables, "stream": body.stream, "chosen": choose_tools(body.tools)}
    return GenerationJob(body.model or body.name, options, **more)


async def chat(request: Request, dispatcher: Dispatcher, body: OllamaRequest) -> Response:
    _check_keep_alive(request, body, loads_only=not body.messages)
    if not body.messages:
        return await _load_only(body, dispatcher, _ChatLineWriter)
    return await respond(request, dispatcher, body, _chat_job, _ChatLineWriter)


def _chat_job(body: OllamaRequest) -> GenerationJob:
    messages, reply_start = split_reply_start([_message(*numbered) for numbered in enumerate(body.messages)])
    return _job(body, messages=messages, reply_start=reply_start)


def _message(number: int, message: dict[str, Any]) -> Message:
    fields = {key: value for key, value in message.items() if key != "images"}
    if fields.get("content") is None and not fields.get("tool_calls"):
        fields["content"] = ""  # as in Ollama
    read = read_message(number, fields)
    return replace(read, parts=(*_images(f"message {number}", message.get("images")), *read.parts))


def _images(location: str, images: object) -> list[Media]:
    """Return images in base64, which precede the text."""
    if images is not None and not (isinstance(images, list) and all(isinstance(image, str) for image in images)):
        raise HTTPError(400, f"images of {location} must be a list of strings in base64")
    name = f"the image of {location}"
    return [Media(decoded(image.rpartition(",")[2], name), where=name) for image in images or ()]


async def generate(request: Request, dispatcher: Dispatcher, body: OllamaRequest) -> Response:
    _check_keep_alive(request, body, loads_only=not body.prompt)
    if not body.prompt:
        return await _load_only(body, dispatcher, _LineWriter)
    if body.suffix:
        work = partial(infill_tokens, before=body.prompt, after=body.suffix)
        read = partial(_job, prompts=[await dispatcher.with_model(request, body.model, work)])
    elif body.raw:
        if body.images:
            raise HTTPError(400, "images need the chat template: leave raw out")
        read = partial(_job, prompts=[body.prompt], special=True)
    else:
        messages = [Message("user", (*_images("the request", body.images), body.prompt))]
        if body.system:
            messages.insert(0, Message("system", (body.system,)))
        read = partial(_job, messages=messages)
        if body.context:  # tokens of an earlier reply, which this request continues
            encode = partial(_after, context=body.context, messages=messages, variables=_job(body).variables)
            read = partial(_job, prompts=[await dispatcher.with_model(request, body.model, encode)])
    return await respond(request, dispatcher, body, read, _LineWriter)


def _after(llm: LLM, context: list[int], messages: list[Message], variables: dict[str, Any]) -> list[int]:
    ids = llm.tokenize_chat(messages, template_variables=variables)
    return context + ids[ids[0] == llm.tokenizer.bos_id :]


async def _load_only(body: OllamaRequest, dispatcher: Dispatcher, writer_type: type[_LineWriter]) -> Response:
    """Load the model of a request without a prompt.  ``keep_alive`` 0 unloads it after its replies have ended."""
    name, keep_alive = body.model or body.name, _seconds(body.keep_alive)
    served = dispatcher.models.find(name)
    if keep_alive == 0:
        reason = "unload"
        if served.n_users:
            _keep(served, keep_alive)
        else:
            await dispatcher.models.unload(served)
    else:
        served, _ = await dispatcher.models.acquire(name)
        _keep(served, keep_alive)
        dispatcher.models.release(served)
        reason = "load"
    head, end = {"model": served.name, "created_at": _now()}, {"done": True, "done_reason": reason}
    return json_response({**head, **writer_type.fields(), **end})


class _LineWriter(ReplyWriter[OllamaRequest]):
    """Writes lines of JSON.  As in Ollama, a tool call is sent only when it is complete."""

    media_type = "application/x-ndjson"

    def __init__(self, pending: PendingReplies, body: OllamaRequest) -> None:
        super().__init__(pending, body)
        _keep(pending.served, _seconds(body.keep_alive))
        self.ping = _line({**self._head(), **self.fields(), "done": False})

    @staticmethod
    def fields(text: str = "", thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        return {"response": text, **({"thinking": thinking} if thinking else {})}

    def lines(self, reply: Reply, chunk: Chunk) -> Iterator[bytes]:
        calls = [chunk.call] if isinstance(chunk.call, ToolCall) else []
        if chunk.text or chunk.reasoning or calls:  # the last chunk may contain text that was held back
            yield _line({**self._head(), **self.fields(chunk.text, chunk.reasoning, calls), "done": False})
        if chunk.finish_reason is not None:
            yield _line({**self._head(), **self.fields(), **self._end(reply)})

    def error(self, body: dict[str, Any]) -> bytes:
        return _line(body)

    def answer(self, replies: list[Reply]) -> Response:
        (reply,) = replies
        fields = self.fields(reply.text, reply.thinking, reply.calls)
        return json_response({**self._head(), **fields, **self._end(reply)})

    def _head(self) -> dict[str, Any]:
        return {"model": self.pending.served.name, "created_at": _now()}

    def _end(self, reply: Reply) -> dict[str, Any]:
        usage, timings = reply.usage, reply.timings
        return {
            "done": True,
            "done_reason": "stop" if reply.finish_reason == "stop" else "length",
            "total_duration": _ns(time.perf_counter() - self.pending.started_at),
            "load_duration": _ns(self.pending.load_s),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(timings.prefill_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(timings.decode_s),
            **({} if self.body.messages else {"context": _context(self.pending, reply)}),
            **warnings_json(reply),
        }


class _ChatLineWriter(_LineWriter):
    @staticmethod
    def fields(text: str = "", thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [{"function": {"name": call.name, "arguments": call.values}} for call in calls]
        return {"message": message}


def _line(value: Any) -> bytes:
    return json_bytes(value) + b"\n"


def _context(pending: PendingReplies, reply: Reply) -> list[int]:
    """Return the tokens of prompt and reply without media tokens, for a request that continues the reply."""
    stream, eos = pending.streams[0], pending.llm.tokenizer.eos_id
    ids = [*stream.prompt_ids, *stream.tokens[stream.usage.prompt_tokens :]]
    is_whole = reply.finish_reason == "stop" and reply.stop_text is None
    return [*ids, eos] if is_whole and eos is not None else ids


def _ns(seconds: float) -> int:
    return int(1e9 * seconds)


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


#: Seconds of a hundred years.
_NEVER_S = 36500.0 * 86400

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds(keep_alive: str | float | None) -> float | None:
    """Convert a number of seconds, or a Go duration such as "5m", "1h30m" or "0", to seconds.

    Negative values mean infinity.  None stays None.
    """
    if keep_alive is None or isinstance(keep_alive, int | float):
        return None if keep_alive is None else math.inf if keep_alive < 0 else float(keep_alive)
    length = keep_alive.removeprefix("+") if keep_alive.startswith("+") else keep_alive.removeprefix("-")
    amounts = re.findall(r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)", length)
    if length != "0" and ("".join(number + unit for number, unit in amounts) != length or not amounts):
        raise HTTPError(400, f"keep_alive is {keep_alive!r:.40}, but must be a number of seconds, or as 5m or 1h30m")
    return math.inf if keep_alive.startswith("-") else sum(float(number) * _UNITS[unit] for number, unit in amounts)


def _check_keep_alive(request: Request, body: OllamaRequest, *, loads_only: bool) -> None:
    """Ignore ``keep_alive`` without an administrator's key, because it affects all clients of the model."""
    if body.keep_alive is not None and not is_admin():
        if loads_only and _seconds(body.keep_alive) == 0:
            raise HTTPError(403, "unloading a model needs a key with the role admin: leave keep_alive out")
        body.keep_alive = None
        request.state.ignored.append("keep_alive")


def _keep(served: ServedModel, keep_alive: float | None) -> None:
    if keep_alive is not None:
        served.ttl_s = None if keep_alive == math.inf else keep_alive


# -- Models --------------------------------------------------------------------------------------------------------


def _details(served: ServedModel) -> dict[str, Any]:
    family, n = served.details.architecture, served.details.n_parameters or 0
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family or "",
        "families": [family] if family else [],
        "parameter_size": f"{n / 1e9:.1f}B" if n >= 1e8 else f"{n / 1e6:.1f}M",
        "quantization_level": served.details.file_type or "",
    }


def _described(served: ServedModel) -> dict[str, Any]:
    # A digest of the complete file would take minutes, so the digest depends on the file's size and time.
    status = served.path.stat() if served.path.is_file() else None
    stamp = f"{served.path.name} {status.st_size} {status.st_mtime_ns}" if status else served.name
    return {
        "name": served.name,
        "model": served.name,
        "modified_at": datetime.fromtimestamp(status.st_mtime if status else served.created, UTC).isoformat(),
        "size": served.n_bytes,
        "digest": hashlib.sha256(stamp.encode(errors="replace")).hexdigest(),
        "details": _details(served),
    }


async def tags(request: Request, dispatcher: Dispatcher) -> Response:
    return json_response({"models": [_described(model) for model in await dispatcher.models.listed()]})


async def running(request: Request, dispatcher: Dispatcher) -> Response:
    models = []
    for model in await dispatcher.models.listed():
        if model.llm is not None or model.load_progress is not None:
            remaining_s = _NEVER_S if model.expires_s is None else model.expires_s
            # Ollama reports a date in 100 years for "never".
            expires = datetime.now(UTC) + timedelta(seconds=min(_NEVER_S, remaining_s))
            info = None if model.llm is None else model.llm.info
            sizes = (0, 0) if info is None else (info.gpu_bytes, info.context)
            now = {"expires_at": expires.isoformat(), "size_vram": sizes[0], "context_length": sizes[1]}
            models.append({**_described(model), **now, "load_progress": model.load_progress})
    return json_response({"models": models})


async def show(request: Request, dispatcher: Dispatcher, body: OllamaRequest) -> Response:
    name = body.model or body.name

    def work(llm: LLM) -> dict[str, Any]:
        info = llm.info
        about: dict[str, Any] = {
            "general.architecture": info.architecture,
            "general.parameter_count": info.n_parameters,
        }
        about[f"{info.architecture}.context_length"] = info.trained_context
        about[f"{info.architecture}.embedding_length"] = info.config.n_embd
        if not llm.writes_text:
            return {"template": "", "capabilities": ["embedding"], "model_info": about}
        template = llm.chat_template
        can = {"vision": llm.accepts_images, "audio": llm.accepts_audio}
        can |= {"tools": template.reads("tools"), "thinking": template.reads("enable_thinking")}
        capabilities = ["completion", *(name for name, has in can.items() if has)]
        return {"template": template.source, "capabilities": capabilities, "model_info": about}

    shown = await dispatcher.with_model(request, name, work)
    await dispatcher.models.listed()
    served = dispatcher.models.find(name)
    fixed = {"modelfile": "", "parameters": "", "license": "", "system": served.preset.system}
    return json_response({**fixed, **shown, "details": _details(served), "modified_at": _now()})


async def pull(request: Request, dispatcher: Dispatcher, body: OllamaRequest) -> Response:
    name = body.model or body.name or ""
    if not dispatcher.models.has(name):
        return await downloads.pull(dispatcher, name, is_streamed=body.stream)
    status = {"status": "success"}
    return Response(_line(status), media_type="application/x-ndjson") if body.stream else json_response(status)


async def delete(request: Request, dispatcher: Dispatcher, body: OllamaRequest) -> Response:
    await downloads.delete(dispatcher, body.model or body.name or "")
    return Response()


async def version(request: Request, dispatcher: Dispatcher) -> Response:
    # Some clients reject older versions of Ollama.
    return json_response({"version": _OLLAMA_VERSION, "localllm": __version__})
