"""LlamaIndex's LLM over a model in this process: ``LocalLLM(llm=localllm.load())``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from pydantic import Field, InstanceOf

from localllm.errors import UsageError
from localllm.llm import LLM


class LocalLLM(CustomLLM):
    """A `localllm.LLM` as LlamaIndex's LLM.

    Attributes:
        llm: the model, which other code may use at the same time.
        options: options of every call (`localllm.Options`). Keywords of a call override them.
    """

    llm: InstanceOf[LLM]
    options: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def class_name(cls) -> str:
        return "localllm"

    @property
    def metadata(self) -> LLMMetadata:
        context: int = self.llm.info.context
        return LLMMetadata(
            context_window=context,
            num_output=min(self.options.get("max_tokens") or 256, context),
            is_chat_model=True,
            model_name=self.llm.info.path.stem,
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return CompletionResponse(text=self.llm.generate(prompt, **self.options | kwargs).text)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        stream = self.llm.stream(prompt, **self.options | kwargs)
        return (CompletionResponse(text=text, delta=delta) for text, delta in _pieces(stream))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return _response(self.llm.chat(_as_openai(messages), **self.options | kwargs).text)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        stream = self.llm.stream_chat(_as_openai(messages), **self.options | kwargs)
        return (_response(text, delta) for text, delta in _pieces(stream))


def _as_openai(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages for `LLM.chat`. Raises UsageError if they contain images, audio or other blocks than text."""
    for block in (block for message in messages for block in message.blocks):
        if not isinstance(block, TextBlock):
            kind = type(block).__name__
            raise UsageError(f"LocalLLM accepts only text, but a message has the block {kind}: use LLM.chat instead")
    return [{"role": message.role.value, "content": message.content or ""} for message in messages]


def _response(text: str, delta: str | None = None) -> ChatResponse:
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta)


def _pieces(stream: Any) -> Iterator[tuple[str, str]]:
    """Yield each piece as (the text up to its end, the piece)."""
    text = ""
    with stream:
        for chunk in stream:
            if chunk.text:
                text += chunk.text
                yield text, chunk.text
