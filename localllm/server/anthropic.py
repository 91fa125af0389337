"""Anthropic's API: messages, streamed or whole, with tools and thinking, and the count of their tokens.

Source: https://docs.anthropic.com/en/api/messages.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import closing
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from localllm.engine.request import Usage
from localllm.server.answers import Answer, Ask, Desk, Generation, Part, Reply, check_tools, constrain
from localllm.server.http import EventStream, HTTPError, decode, event, json_response, unless_gone
from localllm.server.openai import chosen_tools, new_id, template_message


class Tool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool = False


class Thinking(msgspec.Struct):
    type: str = "disabled"


class OutputFormat(msgspec.Struct):
    type: str = "json_schema"
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    format: OutputFormat | None = None


class MessagesRequest(Generation, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[Tool] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


def _ask(body: MessagesRequest) -> Ask:
    body.stop = body.stop_sequences
    options = body.options(max_tokens=body.max_tokens)
    form = body.output_format or (body.output_config and body.output_config.format)
    if form:
        constrain(options, form.schema)
    choice: Any = (body.tool_choice or {}).get("type", "auto")
    if choice == "tool":
        choice = body.tool_choice
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
        if tool.input_schema is not None  # the others are Anthropic's own, such as a search of the web
    ]
    variables = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    messages = _messages(body)
    # What the last message has the assistant begin with goes on there.
    prefix = ""
    if messages and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        prefix = messages.pop()["content"]
    return Ask(
        body.model,
        options,
        messages=messages,
        tools=chosen_tools(tools, choice, options),
        variables=variables,
        reply_prefix=prefix,
        one_call=bool((body.tool_choice or {}).get("disable_parallel_tool_use")),
    )


def _messages(body: MessagesRequest) -> list[dict[str, Any]]:
    """The messages as chat templates take them."""
    system = body.system
    if isinstance(system, list):
        system = "\n\n".join(block["text"] for block in system if isinstance(block.get("text"), str))
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for number, message in enumerate(body.messages):
        content = message.get("content")
        if not isinstance(content, list):
            messages.append(template_message(number, {"role": message.get("role"), "content": content}))
            continue
        messages += _from_blocks(number, str(message.get("role")), content)
    return messages


def _from_blocks(number: int, role: str, blocks: list[Any]) -> list[dict[str, Any]]:
    """A message of blocks: results of tools are messages of their own, before what else it says."""
    results: list[dict[str, Any]] = []
    said: dict[str, Any] = {"role": role, "content": []}
    thinking: list[str] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            content = block.get("content", "")
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
            results.append(template_message(number, result))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            call = {"id": block.get("id"), "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            thinking.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            said["content"].append(block)
    if thinking:
        said["reasoning_content"] = "".join(thinking)
    has_said = said["content"] or len(said) > 2 or not results
    return [*results, template_message(number, said)] if has_said else results


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _stop_reason(reply: Reply) -> str:
    if reply.calls:
        return "tool_use"
    if reply.stop_text is not None:
        return "stop_sequence"
    return "end_turn" if reply.finish_reason == "stop" else "max_tokens"


def _head(answer: Answer) -> dict[str, Any]:
    return {
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": answer.served.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(Usage(answer.prompt_tokens, 0, 0)),
    }


async def messages(request: Request, desk: Desk) -> Response:
    body = await decode(request, MessagesRequest)
    if body.max_tokens is None:
        raise HTTPError(400, "max_tokens is missing: say how many tokens the reply may have")
    answer = await desk.begin(_ask(body), request)
    if body.stream:
        return EventStream(
            _events(answer),
            answer.close,
            path=request.url.path,
            encode_error=partial(event, name="error"),
            ping=event({"type": "ping"}, "ping"),
        )
    with closing(answer):
        replies = await unless_gone(request, answer.read())
    reply = replies[0]
    content: list[dict[str, Any]] = []
    if reply.thinking:
        content.append({"type": "thinking", "thinking": reply.thinking, "signature": ""})
    if reply.text or not (content or reply.calls):
        content.append({"type": "text", "text": reply.text})
    content += [
        {"type": "tool_use", "id": new_id("toolu_"), "name": call.name, "input": call.values} for call in reply.calls
    ]
    end = {"content": content, "stop_reason": _stop_reason(reply), "stop_sequence": reply.stop_text}
    return json_response({**_head(answer), **end, "usage": _usage(reply.usage)})


async def _events(answer: Answer) -> AsyncIterator[bytes]:
    def named(kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    yield named("message_start", message=_head(answer))
    number, open_kind = -1, None
    async for part in answer.parts():
        if part.end is not None:
            if number < 0:
                number = 0
                yield named("content_block_start", index=0, content_block={"type": "text", "text": ""})
            yield named("content_block_stop", index=number)
            delta = {"stop_reason": _stop_reason(part.end), "stop_sequence": part.end.stop_text}
            yield named("message_delta", delta=delta, usage=_usage(part.end.usage))
            yield named("message_stop")
            return
        kind, block, delta = _block(part)
        if kind != open_kind or kind == "tool_use":
            if number >= 0:
                yield named("content_block_stop", index=number)
            number, open_kind = number + 1, kind
            yield named("content_block_start", index=number, content_block=block)
        yield named("content_block_delta", index=number, delta=delta)


def _block(part: Part) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The kind of block that a part belongs to, how such a block begins, and what is added to it."""
    if part.call is not None:
        block = {"type": "tool_use", "id": new_id("toolu_"), "name": part.call.name, "input": {}}
        return "tool_use", block, {"type": "input_json_delta", "partial_json": part.call.arguments}
    if part.thinking:
        block = {"type": "thinking", "thinking": "", "signature": ""}
        return "thinking", block, {"type": "thinking_delta", "thinking": part.thinking}
    return "text", {"type": "text", "text": ""}, {"type": "text_delta", "text": part.text}


async def count_tokens(request: Request, desk: Desk) -> Response:
    ask = _ask(await decode(request, MessagesRequest))
    check_tools(ask.tools)

    def count(llm: Any) -> int:
        tools, messages = ask.tools or None, ask.messages or []
        ids = llm.tokenize_chat(
            messages, tools=tools, template_variables=ask.variables, reply_prefix=ask.reply_prefix
        )
        return len(ids)

    return json_response({"input_tokens": await desk.with_model(request, ask.model, count)})
