"""LM Studio's own API: models with their states, and chats.

Sources: https://lmstudio.ai/docs/developer/rest/endpoints (v0), https://lmstudio.ai/docs/developer/rest (v1).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localllm.chat.conversation import Message, read_message
from localllm.chat.reply import CallDelta, ToolCall
from localllm.generation.completion import Chunk
from localllm.server.answers import GenerationFields, GenerationJob, PendingReplies, Reply
from localllm.server.dispatcher import Dispatcher
from localllm.server.endpoint import ReplyWriter, respond
from localllm.server.http import event, json_response
from localllm.server.model_control import ModelName
from localllm.server.models import ServedModel
from localllm.server.openai import new_id, warnings_json

# -- Models --------------------------------------------------------------------------------------------------------


def _is_embedding(served: ServedModel) -> bool:
    return served.llm is not None and not served.llm.writes_text


def _model_v0(served: ServedModel) -> dict[str, Any]:
    details = served.details
    return {
        "id": served.name,
        "object": "model",
        "type": "embeddings" if _is_embedding(served) else "vlm" if "image" in served.modalities else "llm",
        "publisher": "localllm",
        "arch": details.architecture,
        "compatibility_type": "gguf",
        "quantization": details.file_type,
        "state": "not-loaded" if served.llm is None else "loaded",
        "max_context_length": details.trained_context,
        **({} if served.llm is None else {"loaded_context_length": served.context}),
    }


async def models_v0(request: Request, dispatcher: Dispatcher) -> Response:
    return json_response({"object": "list", "data": [_model_v0(m) for m in await dispatcher.models.listed()]})


async def model_v0(request: Request, dispatcher: Dispatcher) -> Response:
    await dispatcher.models.listed()
    return json_response(_model_v0(dispatcher.models.find(request.path_params["name"])))


def _model_v1(served: ServedModel) -> dict[str, Any]:
    details, llm = served.details, served.llm
    n = details.n_parameters
    instances = [] if llm is None else [{"id": served.name, "config": {"context_length": served.context}}]
    return {
        "type": "embedding" if _is_embedding(served) else "llm",
        "publisher": "localllm",
        "key": served.name,
        "display_name": details.title or served.name,
        "architecture": details.architecture,
        "quantization": {"name": details.file_type, "bits_per_weight": 8 * served.n_bytes / n if n else None},
        "size_bytes": served.n_bytes,
        "params_string": f"{n / 1e9:.3g}B" if n else None,
        "loaded_instances": instances,
        "max_context_length": details.trained_context,
        "format": "gguf",
        "capabilities": {
            "vision": "image" in served.modalities,
            "trained_for_tool_use": served.props.get("chat_template_caps", {}).get("supports_tools", False),
        },
    }


async def models_v1(request: Request, dispatcher: Dispatcher) -> Response:
    return json_response({"models": [_model_v1(m) for m in await dispatcher.models.listed()]})


class UnloadRequest(msgspec.Struct):
    instance_id: str


async def load(request: Request, dispatcher: Dispatcher, body: ModelName) -> Response:
    """Load a model with the server's options, and answer when it is loaded."""
    began = time.perf_counter()
    served, llm = await dispatcher.models.acquire(body.model)
    dispatcher.models.release(served)
    seconds = time.perf_counter() - began
    kind = "llm" if llm.writes_text else "embedding"
    return json_response(
        {"type": kind, "instance_id": served.name, "load_time_seconds": round(seconds, 3), "status": "loaded"}
    )


async def unload(request: Request, dispatcher: Dispatcher, body: UnloadRequest) -> Response:
    served = dispatcher.models.named(body.instance_id)
    await dispatcher.models.unload(served)
    return json_response({"instance_id": served.name})


# -- Chats ---------------------------------------------------------------------------------------------------------


class StudioChatRequest(GenerationFields, kw_only=True):
    input: str | list[dict[str, Any]]
    system_prompt: str | None = None
    max_tokens: int | None = msgspec.field(name="max_output_tokens", default=None)
    previous_response_id: str | None = None
    store: bool | None = None


def _job(body: StudioChatRequest, before: list[Message]) -> GenerationJob:
    parts = [{"type": "text", "text": body.input}] if isinstance(body.input, str) else body.input
    content = [_part(part) for part in parts]
    messages = [*before, read_message(len(before), {"role": "user", "content": content})]
    if body.system_prompt:
        messages.insert(0, Message("system", (body.system_prompt,)))
    return replace(body.job(body.options(), messages=messages), tells_progress=body.stream)


def _part(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part in the format of `read_message`."""
    if part.get("type") == "image":
        return {"type": "image_url", "image_url": part.get("data_url")}
    return {"type": "text", "text": part.get("content", part.get("text"))}


async def chat(request: Request, dispatcher: Dispatcher, body: StudioChatRequest) -> Response:
    before: list[Message] = []
    if body.previous_response_id:
        get = dispatcher.responses.get
        stored = await dispatcher.convert(request, get, body.previous_response_id, request.state.client)
        before = stored.conversation
        if body.system_prompt and before[0].role == "system":
            before = before[1:]
    return await respond(request, dispatcher, body, partial(_job, before=before), _Writer)


class _Writer(ReplyWriter[StudioChatRequest]):
    """Collects the output of a chat, and builds the lines of its stream."""

    def __init__(self, pending: PendingReplies, body: StudioChatRequest) -> None:
        super().__init__(pending, body)
        self._id = None if body.store is False else new_id("resp_")  # of the stored response
        self._output: list[dict[str, Any]] = []

    @property
    def uses_thread(self) -> bool:
        return super().uses_thread or self._id is not None

    def begin(self) -> list[bytes]:
        return [_line("chat.start", model_instance_id=self.pending.served.name)]

    def lines(self, reply: Reply, chunk: Chunk) -> Iterator[bytes]:
        if chunk.n_evaluated is not None:
            n_tokens = self.pending.streams[0].usage.prompt_tokens
            yield _line("prompt_processing.progress", progress=round(chunk.n_evaluated / max(1, n_tokens), 3))
        elif chunk.finish_reason is not None:
            yield from self._close()
            yield _line("chat.end", result=self._result(reply))
        elif isinstance(chunk.call, ToolCall):
            yield from self._close()
            self._output.append({"type": "tool_call", "tool": chunk.call.name, "arguments": chunk.call.values})
        elif not isinstance(chunk.call, CallDelta) and (text := chunk.reasoning or chunk.text):
            kind = "reasoning" if chunk.reasoning else "message"
            if not self._output or self._output[-1]["type"] != kind:
                yield from self._close()
                self._output.append({"type": kind, "content": ""})
                yield _line(f"{kind}.start")
            self._output[-1]["content"] += text
            yield _line(f"{kind}.delta", content=text)

    def error(self, body: dict[str, Any]) -> bytes:
        return _line("error", error={"type": "unknown", "message": body["error"]})

    def answer(self, replies: list[Reply]) -> Response:
        (reply,) = replies
        for chunk in reply.chunks[:-1]:
            list(self.lines(reply, chunk))
        return json_response(self._result(reply))

    def _close(self) -> Iterator[bytes]:
        if self._output and "content" in self._output[-1]:
            yield _line(f"{self._output[-1]['type']}.end")

    def _result(self, reply: Reply) -> dict[str, Any]:
        """Return the complete response.  Stores it, unless the request forbids it."""
        usage, timings = reply.usage, reply.timings
        stats = {
            "input_tokens": usage.prompt_tokens,
            "total_output_tokens": usage.completion_tokens,
            "reasoning_output_tokens": reply.reasoning_tokens,
            "tokens_per_second": timings.decode_tokens_per_s,
            "time_to_first_token_seconds": timings.first_token_s,
        }
        result = {"model_instance_id": self.pending.served.name, "output": self._output, "stats": stats}
        if self._id is not None:
            self.keep(self._id, reply, {"id": self._id})
            result["response_id"] = self._id
        return result | warnings_json(reply)


def _line(event_type: str, **fields: Any) -> bytes:
    return event({"type": event_type, **fields}, event_type)
