"""Anthropic's API: messages with tools and thinking, streamed or complete, and token counts.

Source: https://docs.anthropic.com/en/api/messages.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localllm.chat.conversation import Message, ToolCall, read_message, read_parts
from localllm.chat.reply import CallDelta
from localllm.chat.tool_choice import choose_tools
from localllm.engine.request import Usage
from localllm.generation.completion import Chunk
from localllm.server.answers import GenerationFields, GenerationJob, PendingReplies, Reply, constrain
from localllm.server.dispatcher import Dispatcher
from localllm.server.endpoint import ReplyWriter, n_input_tokens, respond
from localllm.server.http import HTTPError, event, json_response
from localllm.server.openai import new_id, warnings_json


class Tool(msgspec.Struct):
    name: str = ""
    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool = False


class OutputFormat(msgspec.Struct):
    type: str = "json_schema"
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    format: OutputFormat | None = None
    effort: str | None = None


class MessagesRequest(GenerationFields, kw_only=True):
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    stop: list[str] | None = msgspec.field(name="stop_sequences", default=None)
    tools: list[Tool] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    def template_variables(self) -> dict[str, Any]:
        effort = None if self.output_config is None else self.output_config.effort
        return {**({} if effort is None else {"reasoning_effort": effort}), **super().template_variables()}


def _job(body: MessagesRequest) -> GenerationJob:
    options, config = body.options(), body.output_config or OutputConfig()
    if form := body.output_format or config.format:
        constrain(options, form.schema)
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": tool.input_schema or {"type": "object", "properties": {}},
                "strict": tool.strict,
            },
        }
        for tool in body.tools or []
        if tool.input_schema is not None
    ]
    hosted = [tool.name or tool.type for tool in body.tools or [] if tool.input_schema is None]
    one_call = bool((body.tool_choice or {}).get("disable_parallel_tool_use"))
    chosen = choose_tools(tools, body.tool_choice, one_call=one_call)
    skipped: list[str] = []
    messages = _messages(body, skipped)
    return body.chat_job(options, messages, chosen, hosted_tools=hosted, skipped=skipped)


#: The start of Claude Code's first system text, and in it the stamp that changes with each request.
_BILLING, _STAMP = "x-anthropic-billing-header:", re.compile(r"\bcch=[^;\s]*")


def _without_stamp(text: str) -> str:
    """Return a system text with a constant stamp, so that the prompt's start stays in the cache (as in llama.cpp)."""
    if not text.startswith(_BILLING):
        return text
    line, end, rest = text.partition("\n")
    return _STAMP.sub("cch=fffff", line, count=1) + end + rest


def _messages(body: MessagesRequest, skipped: list[str]) -> list[Message]:
    """Return the messages.  Tool results become separate messages before the rest of their message.

    ``skipped`` collects the unknown types of blocks, which are omitted.
    """
    system, _ = read_parts(0, "system", body.system, skipped=skipped)
    texts = [_without_stamp(part) for part in system if isinstance(part, str)]
    if len(texts) < len(system):
        raise HTTPError(400, "system has an image or audio: send it in a user message")
    messages = [Message("system", ("\n\n".join(texts),))] if any(texts) else []
    for number, message in enumerate(body.messages):
        content = message.get("content")
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        converted: dict[str, Any] = {"role": message.get("role"), "content": [], "tool_calls": []}
        n_results = 0
        for block in blocks:
            block_type = block.get("type") if isinstance(block, dict) else None
            if block_type == "tool_result":
                result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "is_error": block.get("is_error")}
                messages.append(read_message(number, {**result, "content": block.get("content")}, skipped=skipped))
                n_results += 1
            elif block_type == "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                converted["tool_calls"].append({"id": block.get("id"), "function": function})
            elif block_type != "redacted_thinking":
                converted["content"].append(block)
        if converted["content"] or converted["tool_calls"] or not n_results:
            messages.append(read_message(number, converted, skipped=skipped))
    return messages


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _line(event_type: str, **fields: Any) -> bytes:
    return event({"type": event_type, **fields}, event_type)


def _end(reply: Reply) -> dict[str, Any]:
    reason = "end_turn" if reply.stop_text is None else "stop_sequence"
    if reply.calls and not reply.has_cut_call:
        reason = "tool_use"
    return {
        "stop_reason": reason if reply.finish_reason == "stop" else "max_tokens",
        "stop_sequence": reply.stop_text,
        **warnings_json(reply),
    }


class _MessageWriter(ReplyWriter[MessagesRequest]):
    """Builds the blocks of a message, and the lines of its stream."""

    ping = event({"type": "ping"}, "ping")

    def __init__(self, pending: PendingReplies, body: MessagesRequest) -> None:
        super().__init__(pending, body)
        self._blocks: list[dict[str, Any]] = []
        self._message: dict[str, Any] = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": pending.served.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage(pending.streams[0].usage.prompt_tokens, 0, 0)),
        }

    def begin(self) -> list[bytes]:
        return [_line("message_start", message=self._message)]

    def error(self, body: dict[str, Any]) -> bytes:
        return event(body, "error")

    def answer(self, replies: list[Reply]) -> Response:
        (reply,) = replies
        for chunk in reply.chunks:
            self.lines(reply, chunk)
        return json_response({**self._message, "content": self._blocks, **_end(reply), "usage": _usage(reply.usage)})

    def lines(self, reply: Reply, chunk: Chunk) -> list[bytes]:
        if chunk.finish_reason is not None:
            last = self._begin({"type": "text", "text": ""}) if not self._blocks else []
            end = _line("message_delta", delta=_end(reply), usage=_usage(reply.usage))
            return [*last, *self._end(), end, _line("message_stop")]
        call = chunk.call
        if isinstance(call, ToolCall):
            self._blocks[-1]["input"] = call.values
            return []
        if isinstance(call, CallDelta):
            if call.begins:
                id_ = "toolu_" + call.id.removeprefix("call_")
                return self._begin({"type": "tool_use", "id": id_, "name": call.name, "input": {}})
            return self._delta("input_json_delta", "partial_json", call.arguments) if call.arguments else []
        block_type, text = ("thinking", chunk.reasoning) if chunk.reasoning else ("text", chunk.text)
        if not text:
            return []
        start_lines = []
        if not self._blocks or self._blocks[-1]["type"] != block_type:
            signature = {"signature": ""} if block_type == "thinking" else {}
            start_lines = self._begin({"type": block_type, block_type: "", **signature})
        self._blocks[-1][block_type] += text
        return [*start_lines, *self._delta(f"{block_type}_delta", block_type, text)]

    def _begin(self, block: dict[str, Any]) -> list[bytes]:
        end_lines = self._end()
        self._blocks.append(block)
        return [*end_lines, _line("content_block_start", index=len(self._blocks) - 1, content_block=block)]

    def _delta(self, delta_type: str, name: str, text: str) -> list[bytes]:
        delta = {"type": delta_type, name: text}
        return [_line("content_block_delta", index=len(self._blocks) - 1, delta=delta)]

    def _end(self) -> list[bytes]:
        return [_line("content_block_stop", index=len(self._blocks) - 1)] if self._blocks else []


async def messages(request: Request, dispatcher: Dispatcher, body: MessagesRequest) -> Response:
    if body.max_tokens is None:
        raise HTTPError(400, "max_tokens is missing: set the maximum number of tokens of the reply")
    return await respond(request, dispatcher, body, _job, _MessageWriter)


async def count_tokens(request: Request, dispatcher: Dispatcher, body: MessagesRequest) -> Response:
    return json_response({"input_tokens": await n_input_tokens(request, dispatcher, body, _job)})
