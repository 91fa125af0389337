"""A plugin of the program ``llm`` (https://llm.datasette.io): ``llm -m localllm/demo "hi"``.

Registers every model that `localllm models` lists as a model or as an embedding model.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import llm
import pydantic
from llm.parts import AttachmentPart, Message, ReasoningPart, StreamEvent, TextPart, ToolCallPart, ToolResultPart

from localllm.catalog.find import model_path
from localllm.catalog.hub_names import DEMO
from localllm.catalog.listing import find_models, read_details
from localllm.chat.conversation import ToolCall
from localllm.llm import LLM, load
from localllm.models.registry import ARCHITECTURES
from localllm.options.declared import CheckedOptions, Sampling, declared

_PREFIX = "localllm/"
_PICTURES = ("png", "jpeg", "webp", "gif", "bmp", "tiff", "avif")
_OPTIONS: dict[str, Any] = {
    name: (option.kind.json | None, pydantic.Field(None, description=option.brief))
    for cls in (Sampling, CheckedOptions)
    for name, option in declared(cls).items()
    if option.kind.json is not None and name not in ("json_schema", "logprobs", "post_sampling_probs")
}


@functools.lru_cache(maxsize=1)  # memory might not suffice for two models
def _loaded(name: str) -> LLM:
    return load(model_path(name))


def _names(*, encoders: bool) -> Iterator[str]:
    """Yield the names of local models that generate text, or of embedding models."""
    for model in read_details(find_models().models):
        architecture = None if model.details is None else ARCHITECTURES.get(model.details.architecture or "")
        if architecture is not None and architecture.is_encoder == encoders:
            yield model.name.removesuffix(".gguf")


@llm.hookimpl
def register_models(register: Any) -> None:
    for name in (DEMO, *_names(encoders=False)):
        register(LocalTextModel(name))


@llm.hookimpl
def register_embedding_models(register: Any) -> None:
    for name in _names(encoders=True):
        register(LocalEmbeddingModel(name))


class LocalTextModel(llm.Model):
    """A model that generates text."""

    can_stream = True
    supports_schema = True
    supports_tools = True
    attachment_types = frozenset(f"image/{name}" for name in _PICTURES)
    Options = pydantic.create_model("Options", __base__=llm.Options, **_OPTIONS)

    def __init__(self, name: str) -> None:
        self.model_id, self._name = _PREFIX + name, name

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: llm.Response, conversation: llm.Conversation | None
    ) -> Iterator[StreamEvent]:
        """Yield text and reasoning of a reply. Tool calls are added to ``response``."""
        options = prompt.options.model_dump(exclude_none=True)
        if prompt.schema is not None:
            options["json_schema"] = prompt.schema
        tools = [
            {
                "type": "function",
                "function": {"name": t.name, "description": t.description, "parameters": t.input_schema},
            }
            for t in prompt.tools
        ]
        messages = [converted for message in prompt.messages for converted in _as_openai(message)]
        calls: list[ToolCall] = []
        with _loaded(self._name).stream_chat(messages, tools=tools or None, **options) as reply:
            for chunk in reply:
                if chunk.reasoning:
                    yield StreamEvent(type="reasoning", chunk=chunk.reasoning)
                if chunk.text:
                    yield StreamEvent(type="text", chunk=chunk.text)
                if isinstance(chunk.call, ToolCall):
                    calls.append(chunk.call)
                if chunk.usage is not None:
                    response.set_usage(input=chunk.usage.prompt_tokens, output=chunk.usage.completion_tokens)
        for call in calls:
            if call.is_whole:  # False if the reply was cut off
                arguments = json.loads(call.arguments)
                response.add_tool_call(llm.ToolCall(call.name, arguments, tool_call_id=call.id or None))


def _as_openai(message: Message) -> Iterator[dict[str, Any]]:
    """Yield a message in the format of `LLM.chat`; one message per tool result."""
    content: list[dict[str, Any]] = []
    more: dict[str, Any] = {}
    for part in message.parts:
        if isinstance(part, TextPart):
            content.append({"type": "text", "text": part.text})
        elif isinstance(part, AttachmentPart) and part.attachment is not None:
            content.append({"type": "image", "image": part.attachment.content_bytes()})
        elif isinstance(part, ReasoningPart):
            more["reasoning"] = more.get("reasoning", "") + part.text
        elif isinstance(part, ToolCallPart):
            function = {"name": part.name, "arguments": part.arguments}
            more.setdefault("tool_calls", []).append(
                {"id": part.tool_call_id or "", "type": "function", "function": function}
            )
        elif isinstance(part, ToolResultPart):
            yield {
                "role": "tool",
                "name": part.name,
                "tool_call_id": part.tool_call_id or "",
                "content": part.output,
                "is_error": bool(part.exception),
            }
    if content or more:
        yield {"role": message.role, "content": content, **more}


class LocalEmbeddingModel(llm.EmbeddingModel):
    """An embedding model."""

    batch_size = 64

    def __init__(self, name: str) -> None:
        self.model_id, self._name = _PREFIX + name, name

    def embed_batch(self, items: Iterable[str | bytes], *, key: str | None = None) -> Iterator[list[float]]:
        """Yield the embeddings of texts."""
        texts = [item if isinstance(item, str) else item.decode() for item in items]
        vectors: list[list[float]] = _loaded(self._name).embed(texts).tolist()
        yield from vectors
