"""Parts of OpenAI's JSON format that the server and `localllm.compat` share.

Source: https://platform.openai.com/docs/api-reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from localllm.chat.conversation import ToolCall
from localllm.chat.reply import CallDelta
from localllm.sampling import Choice
from localllm.tokenizer import Tokenizer
from localllm.tokenizer.stream import TextOffsets


def usage_json(n_prompt: int, n_completion: int) -> dict[str, Any]:
    counts = {"prompt_tokens": n_prompt, "completion_tokens": n_completion}
    return {**counts, "total_tokens": n_prompt + n_completion}


def message_json(
    text: str, reasoning: str, calls: Sequence[ToolCall], custom: Container[str] = (), **more: Any
) -> dict[str, Any]:
    """Return the message of a reply.  ``custom``: names of the custom tools."""
    message = {"role": "assistant", "content": text or None if calls else text, **more}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_call_json(call, custom) for call in calls]
    return message


def call_delta_json(call: CallDelta, custom: Container[str] = ()) -> dict[str, Any]:
    """Return the ``delta`` of a chunk with the start of a call.  ``custom``: names of the custom tools."""
    return {"tool_calls": [{"index": call.index, **_call_json(call, custom)}]}


def _call_json(call: ToolCall | CallDelta, custom: Container[str]) -> dict[str, Any]:
    if call.name in custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": custom_input(call)}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def custom_input(call: ToolCall | CallDelta) -> str:
    """Return the text that a custom tool is called with; empty if the call is not complete."""
    return str(call.values.get("input", "")) if isinstance(call, ToolCall) and call.arguments else ""


def _finite(logprob: float | None) -> float:
    return -9999.0 if logprob is None or not math.isfinite(logprob) else logprob


def token_json(tokenizer: Tokenizer, id_: int, logprob: float | None) -> dict[str, Any]:
    data = tokenizer.token_bytes(id_, special=True)
    return {"token": tokenizer.token_label(id_), "logprob": _finite(logprob), "bytes": list(data)}


def tokens_json(tokenizer: Tokenizer, choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
    """Yield the sampled tokens with the likeliest tokens at their positions."""
    for c in choices:
        top = [token_json(tokenizer, id_, logprob) for id_, logprob in c.top]
        yield {**token_json(tokenizer, c.id, c.logprob), "top_logprobs": top}


def chat_logprobs_json(
    tokenizer: Tokenizer, choices: Sequence[Choice], as_list: Callable[[Iterator[dict[str, Any]]], object] = list
) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat.  ``as_list`` converts the tokens to a list."""
    return {"content": as_list(tokens_json(tokenizer, choices)), "refusal": None}


def text_logprobs_json(tokenizer: Tokenizer, choices: Sequence[Choice], offsets: TextOffsets) -> dict[str, Any]:
    """Return the ``logprobs`` of a completion; None for tokens without a probability, such as the first."""
    label = tokenizer.token_label
    tops = [{label(id_): _finite(p) for id_, p in choice.top} for choice in choices]
    return {
        "tokens": [label(choice.id) for choice in choices],
        "token_logprobs": [None if choice.logprob is None else _finite(choice.logprob) for choice in choices],
        "top_logprobs": [None if c.logprob is None else top for c, top in zip(choices, tops, strict=True)],
        "text_offset": [offsets.next(choice.id) for choice in choices],
    }
