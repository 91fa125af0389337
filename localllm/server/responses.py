"""OpenAI's responses API: a chat consists of items, and earlier responses are stored by id.

Source: https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localllm.chat.conversation import Media, Message, ToolCall
from localllm.chat.reply import CallDelta
from localllm.generation.completion import Chunk
from localllm.openai_format import tokens_json
from localllm.sampling import Choice
from localllm.server.answers import GenerationFields, GenerationJob, PendingReplies, Reply, constrain_to_format
from localllm.server.dispatcher import Dispatcher
from localllm.server.endpoint import ReplyWriter, n_input_tokens, respond
from localllm.server.http import HTTPError, event, json_response
from localllm.server.openai import new_id, progress_json, timings_json, timings_so_far, warnings_json
from localllm.server.response_items import ToolItems, read_items
from localllm.server.response_store import StoredResponse


class TextFormat(msgspec.Struct):
    type: str = "text"
    schema: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    description: str | msgspec.UnsetType | None = msgspec.UNSET
    strict: bool | msgspec.UnsetType | None = msgspec.UNSET


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None


class ResponsesRequest(GenerationFields):
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_tokens: int | None = msgspec.field(name="max_output_tokens", default=None)
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    store: bool | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    # conversation, prompt, background: supported only by OpenAI's server
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None


def _job(body: ResponsesRequest, before: list[Message], tools: ToolItems) -> GenerationJob:
    """Return the job.  Adds the request's tools to ``tools``."""
    logprobs = body.top_logprobs
    if logprobs is None and "message.output_text.logprobs" in (body.include or ()):
        logprobs = 0
    options = body.options(logprobs)
    form = body.text.format if body.text is not None else None
    if form is not None:
        constrain_to_format(options, "text.format", form.type, form.schema if isinstance(form.schema, dict) else None)
    tools.add(body.tools)
    for name in ("conversation", "prompt", "background"):
        if getattr(body, name):
            raise HTTPError(400, f"{name} needs OpenAI's own server: send all that the model is to read instead")
    if body.input is None and not before:
        raise HTTPError(400, "input is missing: give a string, a list of items, or previous_response_id")
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input or []
    skipped: list[str] = []
    messages = [*before, *read_items(items, tools, skipped)]
    if body.instructions:
        messages = [Message("system", (body.instructions,)), *messages]
    chosen = tools.chosen(body.tool_choice, one_call=body.parallel_tool_calls is False)
    return body.chat_job(options, messages, chosen, hosted_tools=tools.hosted, skipped=skipped)


async def _stored(request: Request, dispatcher: Dispatcher, id_: str) -> StoredResponse:
    return await dispatcher.convert(request, dispatcher.responses.get, id_, request.state.client)


async def _reader(
    request: Request, dispatcher: Dispatcher, body: ResponsesRequest, tools: ToolItems
) -> Callable[[ResponsesRequest], GenerationJob]:
    earlier = body.previous_response_id
    before = (await _stored(request, dispatcher, earlier)).conversation if earlier else []
    return partial(_job, before=before, tools=tools)


async def responses(request: Request, dispatcher: Dispatcher, body: ResponsesRequest) -> Response:
    tools = ToolItems()
    read = await _reader(request, dispatcher, body, tools)
    return await respond(request, dispatcher, body, read, partial(_ResponseWriter, tools=tools))


async def input_tokens(request: Request, dispatcher: Dispatcher, body: ResponsesRequest) -> Response:
    n_tokens = await n_input_tokens(request, dispatcher, body, await _reader(request, dispatcher, body, ToolItems()))
    return json_response({"object": "response.input_tokens", "input_tokens": n_tokens})


async def input_items(request: Request, dispatcher: Dispatcher) -> Response:
    """List the input messages of a response as items."""
    stored = await _stored(request, dispatcher, request.path_params["id"])
    tools = ToolItems()
    tools.add(stored.response.get("tools"))
    data = [
        {"id": f"msg_{stored.response['id'].removeprefix('resp_')}_{number}", **item}
        for number, item in enumerate(item for message in stored.conversation[:-1] for item in _items(message, tools))
    ]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": data, **ends, "has_more": False})


def _media(media: Media) -> dict[str, Any]:
    data = base64.b64encode(media.source).decode()
    if media.kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    detail = "auto" if media.max_tokens is None else "low"
    return {"type": "input_image", "image_url": f"data:;base64,{data}", "detail": detail}


def _items(message: Message, tools: ToolItems) -> Iterator[dict[str, Any]]:
    """Convert a message to items, the inverse of `read_items`."""
    text_type = "output_text" if message.role == "assistant" else "input_text"
    content = [{"type": text_type, "text": part} if isinstance(part, str) else _media(part) for part in message.parts]
    if message.role == "tool":
        output = content if message.media else message.text
        yield {"type": "function_call_output", "call_id": message.call_id, "output": output}
        return
    if content or not message.calls:
        yield {"type": "message", "role": message.role, "content": content, "status": "completed"}
    yield from map(tools.item, message.calls)


async def get_response(request: Request, dispatcher: Dispatcher) -> Response:
    return json_response((await _stored(request, dispatcher, request.path_params["id"])).response)


async def delete_response(request: Request, dispatcher: Dispatcher) -> Response:
    id_ = request.path_params["id"]
    await dispatcher.convert(request, dispatcher.responses.remove, id_, request.state.client)
    return json_response({"id": id_, "object": "response", "deleted": True})


def _usage_json(reply: Reply) -> dict[str, Any]:
    usage = reply.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


#: The name and the fields of an event.
_Event = tuple[str, dict[str, Any]]


class _ResponseWriter(ReplyWriter[ResponsesRequest]):
    """Builds the items of a response, and the events of its stream."""

    def __init__(self, pending: PendingReplies, body: ResponsesRequest, tools: ToolItems) -> None:
        super().__init__(pending, body)
        self._tools = tools
        self._id, self._created = new_id("resp_"), time.time()
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # item whose text follows
        self._call_item: dict[str, Any] = {}  # item of the call whose arguments follow
        self._waiting: tuple[Choice, ...] = ()
        self._numbers = itertools.count()
        self._json = self._response("in_progress")  # the incomplete response

    @property
    def uses_thread(self) -> bool:
        return super().uses_thread or self.body.store is not False

    def begin(self) -> list[bytes]:
        return [self._line(f"response.{status}", {"response": self._json}) for status in ("created", "in_progress")]

    def lines(self, reply: Reply, chunk: Chunk) -> list[bytes]:
        events = self._events(reply, chunk)
        return [self._line(name, fields) for name, fields in events]

    def error(self, body: dict[str, Any]) -> bytes:
        error = {name: body["error"][name] for name in ("code", "message", "param")}
        failed = self._response("failed") | {"error": {**error, "code": error["code"] or "server_error"}}
        # Libraries read the nested error, and coding agents the failed response.
        return self._line("error", {**error, **body}) + self._line("response.failed", {"response": failed})

    def answer(self, replies: list[Reply]) -> Response:
        (reply,) = replies
        for chunk in reply.chunks:
            self._events(reply, chunk)
        return json_response(self._json)

    def _line(self, name: str, fields: dict[str, Any]) -> bytes:
        return event({"type": name, "sequence_number": next(self._numbers), **fields}, name)

    def _response(self, status: str, reply: Reply | None = None, why: str | None = None) -> dict[str, Any]:
        body = self.body
        return {
            "id": self._id,
            "object": "response",
            "created_at": int(self._created),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": why} if why else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_tokens,
            "model": self.pending.served.name,
            "output": list(self._output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": getattr(body.reasoning, "effort", None), "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": body.text.format if body.text and body.text.format else TextFormat()},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if reply is None else _usage_json(reply),
            "metadata": body.metadata or {},
        }

    def _events(self, reply: Reply, chunk: Chunk) -> list[_Event]:
        """Return names and fields of events."""
        if chunk.finish_reason is not None:
            last = [] if self._output or self._open else self._begin("message")
            status = "completed" if reply.finish_reason == "stop" and not reply.has_cut_call else "incomplete"
            events = [*last, *self._close(status)]
            why = None if reply.finish_reason == "stop" else "max_output_tokens"
            self._json = self._response(status, reply, why) | warnings_json(reply)
            if self.body.store is not False:
                self.keep(self._id, reply, self._json, n_omitted=1 if self.body.instructions else 0)
            timings = timings_json(reply)  # a field of llama.cpp, as below
            return [*events, (f"response.{status}", {"response": self._json, "timings": timings})]
        if chunk.n_evaluated is not None:
            progress = progress_json(self.pending, chunk)
            return [("response.in_progress", {"response": self._json, **progress})]
        if chunk.call is not None:
            return self._call(chunk.call)
        item_type = "reasoning" if chunk.reasoning else "message"
        text = chunk.reasoning or chunk.text
        if not text:
            self._waiting += chunk.logprobs or ()
            return []
        start_events: list[_Event] = []
        if self._open is None or self._open["type"] != item_type:
            start_events = [*self._close(), *self._begin(item_type)]
        assert self._open is not None
        (part,) = self._open["content"]
        part["text"] += text
        more = timings_so_far(self.pending, reply)
        if item_type == "message":
            more["logprobs"] = self._logprobs(chunk)
            part["logprobs"] += more["logprobs"]
        return [*start_events, (f"response.{part['type']}.delta", {**self._position(), "delta": text, **more})]

    def _logprobs(self, chunk: Chunk) -> list[msgspec.Raw]:
        """Return log-probabilities of a chunk's tokens, and of earlier tokens that produced no text.

        Each token is encoded once, although the last events repeat all tokens.
        """
        choices, self._waiting = (*self._waiting, *(chunk.logprobs or ())), ()
        tokens = tokens_json(self.pending.llm.tokenizer, choices)
        return [msgspec.Raw(msgspec.json.encode(token)) for token in tokens]

    def _position(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output), "content_index": 0}

    def _begin(self, item_type: str) -> list[_Event]:
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        head: dict[str, Any] = {"id": new_id("rs_"), "type": item_type, "summary": []}
        if item_type == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            head = {"id": new_id("msg_"), "type": item_type, "role": "assistant"}
        self._open = {**head, "content": [part], "status": "in_progress"}
        added = {"output_index": len(self._output), "item": {**self._open, "content": []}}
        part_added = {**self._position(), "part": deepcopy(part)}  # the part may grow before it is sent
        return [("response.output_item.added", added), ("response.content_part.added", part_added)]

    def _close(self, status: str = "completed") -> list[_Event]:
        if self._open is None:
            return []
        item, position = self._open, self._position()
        item["status"] = status
        (part,) = item["content"]
        self._output.append(item)
        self._open = None
        done = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [
            (f"response.{part['type']}.done", {**position, **done}),
            ("response.content_part.done", {**position, "part": part}),
            ("response.output_item.done", {"output_index": position["output_index"], "item": item}),
        ]

    def _call(self, call: CallDelta | ToolCall) -> list[tuple[str, dict[str, Any]]]:
        """Return the events of a call.  The input of calls that are not functions is sent when it is complete."""
        if isinstance(call, CallDelta) and call.begins:
            end_events, index = self._close(), len(self._output)
            item = self._tools.item(ToolCall(call.name, "", call.id)) | {"status": "in_progress"}
            self._call_item = item
            return [*end_events, ("response.output_item.added", {"output_index": index, "item": item})]
        index = len(self._output)
        if isinstance(call, CallDelta):
            fields = {"item_id": self._call_item["id"], "output_index": index, "delta": call.arguments}
            is_function = self._call_item["type"] == "function_call"
            return [("response.function_call_arguments.delta", fields)] if is_function else []
        item = self._tools.item(call)
        self._output.append(item)
        position = {"item_id": item["id"], "output_index": index}
        events: list[tuple[str, dict[str, Any]]] = []
        if item["type"] == "function_call":
            done = {**position, "name": item["name"], "arguments": call.arguments}
            events = [("response.function_call_arguments.done", done)]
        elif item["type"] == "custom_tool_call":
            events = [
                ("response.custom_tool_call_input.delta", {**position, "delta": item["input"]}),
                ("response.custom_tool_call_input.done", {**position, "input": item["input"]}),
            ]
        return [*events, ("response.output_item.done", {"output_index": index, "item": item})]
